"""Chapter 15: what joins the parts of `attend`, in Triton: attention to each summary, summed over a
group, from which `choice.pick` chooses; and the merge of all parts and branches.

Symbols: those of `attend`; `PC`, `PW`, `PL` parts of the summaries, the window and the lists.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shift_of(lse, axis: tl.constexpr):
    """What to subtract from log-sum-exps before `exp`: the largest, or 0 where all are `-inf`."""
    largest = tl.max(lse, axis=axis)
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit(do_not_specialize=["NC"])
def mass_kernel(
    Scores, PartialLSE, NumVisible, Mass, scale, H, P, NC,
    G: tl.constexpr, PC: tl.constexpr, PT: tl.constexpr, GT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Reads the scores `[R, H, G, NC]` and the log-sum-exps `[R, H, G, P]` of the first `PC` parts;
    writes the attention that each visible summary gets from a group, `Mass [R, H, NC]`.

    The grid is `(R * H, tiles of BC summaries)`; tiles past what is visible do nothing.
    """
    place = tl.program_id(0).to(tl.int64)  # of a row and a head
    num_visible = tl.load(NumVisible + place // H)
    if tl.program_id(1) * BC >= num_visible:
        return
    heads, parts = tl.arange(0, GT), tl.arange(0, PT)
    row = place * G + heads  # [GT]
    mask = (heads < G)[:, None] & (parts < PC)
    lse = tl.load(PartialLSE + row[:, None] * P + parts, mask=mask, other=float("-inf"))
    shift = shift_of(lse, 1)
    total = tl.sum(tl.exp(lse - shift[:, None]), axis=1)  # [GT]
    lse = shift + tl.log(tl.where(total == 0.0, 1.0, total))
    summary = tl.program_id(1) * BC + tl.arange(0, BC)
    is_seen = summary < num_visible
    offset = row[:, None] * NC + summary
    mask = (heads < G)[:, None] & is_seen
    acc_s = tl.load(Scores + offset, mask=mask, other=float("-inf"))  # [GT, BC]
    p = tl.where(mask, tl.exp(acc_s * scale - lse[:, None]), 0.0)
    tl.store(Mass + place * NC + summary, tl.sum(p, axis=0), mask=is_seen)


@triton.jit
def merge_branch(
    acc, Partials, PartialLSE, Gate, row, P, first, COUNT: tl.constexpr, PT: tl.constexpr,
    BP: tl.constexpr, DV: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """Adds one branch to `acc [DVT]`: its `COUNT` parts from `first` on, merged, times its gate."""
    width, parts = tl.arange(0, DVT), tl.arange(0, PT)
    place = row * P + first
    lse = tl.load(PartialLSE + place + parts, mask=parts < COUNT, other=float("-inf"))
    shift = shift_of(lse, 0)
    total = tl.sum(tl.exp(lse - shift), axis=0)
    o_tile = tl.zeros([DVT], tl.float32)
    for start in range(0, COUNT, BP):
        part = start + tl.arange(0, BP)
        exists = part < COUNT
        of_part = tl.load(PartialLSE + place + part, mask=exists, other=float("-inf"))
        weight = tl.exp(of_part - shift)  # [BP]
        mask = exists[:, None] & (width < DV)
        tile = tl.load(Partials + (place + part)[:, None] * DV + width, mask=mask, other=0.0)
        # a part without keys has weight 0, and zeros
        o_tile += tl.sum(weight[:, None] * tile, axis=0)
    safe_total = tl.where(total == 0.0, 1.0, total)  # no part has keys
    return acc + tl.load(Gate + row).to(tl.float32) * (o_tile / safe_total)


@triton.jit
def merge_kernel(
    Partials, PartialLSE, Gate0, Gate1, Gate2, Output, P,
    DV: tl.constexpr, PC: tl.constexpr, PW: tl.constexpr, PL: tl.constexpr, PCT: tl.constexpr,
    PWT: tl.constexpr, PLT: tl.constexpr, BP: tl.constexpr, DVT: tl.constexpr,
):  # fmt: skip
    """Reads `Partials [R * HQ, P, DV]`, `PartialLSE [R * HQ, P]` and the gates `[R * HQ]` of
    compression, selection and window; writes `Output [R * HQ, DV]`. The grid is `(R * HQ,)`; a
    branch without parts is left out."""
    row = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([DVT], tl.float32)
    if PC > 0:
        acc = merge_branch(acc, Partials, PartialLSE, Gate0, row, P, 0, PC, PCT, BP, DV, DVT)
    if PL > 0:
        acc = merge_branch(
            acc, Partials, PartialLSE, Gate1, row, P, PC + PW, PL, PLT, BP, DV, DVT
        )  # fmt: skip
    if PW > 0:
        acc = merge_branch(acc, Partials, PartialLSE, Gate2, row, P, PC, PW, PWT, BP, DV, DVT)
    width = tl.arange(0, DVT)
    tl.store(Output + row * DV + width, acc.to(Output.dtype.element_ty), mask=width < DV)
