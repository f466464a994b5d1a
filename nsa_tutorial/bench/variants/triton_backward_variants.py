"""The backward in Triton with one decision changed, for measuring what the decision is worth.

The kernels that are taught have no switches. A variant is their module, and the module that
launches them, with a few lines of the source replaced: `CHANGES` says which, so that a reader sees
what a measurement compared. A line that is no longer there is an error.

`per_slot` is another design: a program for every slot of every list, which adds to all three
gradients at once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import linecache
import sys
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.kernels.triton.selected.lists_backward import ListsCall

KERNELS = "nsa_tutorial.kernels.triton.selected.backward"
LAUNCH = "nsa_tutorial.kernels.triton.selected.backward_launch"
SUMMING = "nsa_tutorial.kernels.triton.selected.lists_backward"
TABLES = "nsa_tutorial.kernels.tables.chunks"

MASKED = "num_masked = tl.minimum(tl.cdiv(num_masked, BR) * BR, num_rows)"
SHARE = """        tl.store(SharesK + token[:, None] * DT + width, acc_dk)
        tl.store(SharesV + token[:, None] * DVT + value_width, acc_dv)
"""
# the workspace becomes fp32 gradients of all keys and values
ADDED = """        tl.atomic_add(SharesK + k_offset, acc_dk, mask=in_tile[:, None] & (width < D))
        tl.atomic_add(SharesV + v_offset, acc_dv, mask=in_tile[:, None] & (value_width < DV))
"""
WORKSPACE = "[c.q.new_empty(places, width, dtype=torch.float32) for width in widths.values()]"
ALL_KEYS = "[torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (c.k, c.v)]"
SUMS = "    if walked.num_places:\n"
CAST = """    for gradient, share in zip((d_k, d_v), shares, strict=True):
        gradient += share.to(gradient.dtype)
    if False:
"""
ACCUMULATE = 'acc_dk = tl.dot(d_s.to(q_tile.dtype), q_tile, acc_dk, input_precision="ieee")\n'
# lists without factors leave `Factors` free: here it is the queries' gradient, in fp32
ADD_DQ = (
    ACCUMULATE
    + """        d_q = tl.dot(tl.trans(d_s.to(q_tile.dtype)), k_tile, input_precision="ieee")
        pointer = Factors + group_row[:, None] * D + width
        tl.atomic_add(pointer, d_q, mask=q_mask, sem="relaxed")
"""
)
BY_ROWS = "{} = tl.sum({}[:, None, :].to(tl.float32) * {}[None, :, :], axis=2)"
BY_COLUMNS = "acc_dq += tl.sum(d_s[:, :, None].to(tl.float32) * k_tile[None, :, :], axis=1)"
FLAG = "**sizes, SLOT_SCALE=c.slot_scale is not None, "
GROUP = "**tiles | {'GT': 1 << (sizes['G'] - 1).bit_length()},"
QUERIES = "gradient_of_queries(call, d_q, d_slot_scale)\n"
KEYS = "gradients_of_keys_and_values(call, d_k, d_v)\n    return"
ALL_AT_ONCE = """global DQ32
    DQ32 = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    gradients_of_keys_and_values(call, d_k, d_v)
    d_q.copy_(DQ32.mul_(scale))
    return"""
BROADCAST = "products by broadcasting"  # for groups smaller than a tensor core's tile
# By name, what is changed: of a module, (line, what stands in its place).
CHANGES: dict[str, dict[str, list[tuple[str, str]]]] = {
    "no change": {},
    "all rows behind a mask": {KERNELS: [(MASKED, "num_masked = num_rows")]},
    "64-bit offsets": {LAUNCH: [("WIDE=max(c.q.numel(), c.d_o.numel()) >= 2**31", "WIDE=True")]},
    "pointers instead of descriptors": {
        LAUNCH: [("if can_walk(c.q, c.k, c.v, c.block_size) and", "if False and")]
    },
    "chunks added by atomics": {
        KERNELS: [(SHARE, ADDED)], SUMMING: [(WORKSPACE, ALL_KEYS), (SUMS, CAST)],
    },
    "no chunks: a program per block": {TABLES: [("{2: 2**14, 4: 2**8}", "{2: 2**30, 4: 2**30}")]},
    BROADCAST: {
        KERNELS: [
            ("acc_s = tl.dot(q_tile, k_tile.T, input_precision=\"ieee\")", BY_ROWS.format(
                "acc_s", "q_tile", "k_tile")),
            ("d_p = tl.dot(do_tile, v_tile.T, input_precision=\"ieee\")", BY_ROWS.format(
                "d_p", "do_tile", "v_tile")),
            ("acc_dq = tl.dot(d_s, k_tile, acc_dq, input_precision=\"ieee\")", BY_COLUMNS),
        ],
        LAUNCH: [("if can_walk(c.q, c.k, c.v, c.block_size) and", "if False and"),
                 (FLAG + "**tiles,", FLAG + GROUP)],
    },
    "one pass, dQ by atomics": {
        KERNELS: [(ACCUMULATE, ADD_DQ)],
        LAUNCH: [(QUERIES, "pass\n"), (KEYS, ALL_AT_ONCE), ("tables.rows, tables.factors,",
                                                      "tables.rows, DQ32,")],
    },
}  # fmt: skip


@functools.cache
def variant(change: str) -> ModuleType:
    """A module like `triton.selected.backward_launch`, with one of `CHANGES`.

    Raises:
        ValueError: a line to be changed is not in the source exactly once.
    """
    modules = {name: importlib.import_module(name) for name in (TABLES, KERNELS, SUMMING, LAUNCH)}
    made = {}
    for name, module in modules.items():
        source = inspect.getsource(module)
        for old, new in CHANGES[change].get(name, []):
            if source.count(old) != 1:
                raise ValueError(
                    f"variant: found {source.count(old)} times, expected once: {old!r}"
                )
            source = source.replace(old, new)
        made[name] = _module(f"{name}_{change.replace(' ', '_')}", source)
    # the copies, in place of the modules that they import
    for user, name in itertools.product((SUMMING, LAUNCH), modules):
        for attribute, value in vars(modules[user]).items():
            if value is modules[name]:
                setattr(made[user], attribute, made[name])
    made[LAUNCH].can_name_ahead = lambda call: False  # the kernel that is taught
    return made[LAUNCH]


def _module(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    # Triton reads the source of a kernel, through `inspect`
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
    sys.modules[name] = module
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module


@triton.jit
def slot_kernel(
    Q, K, V, GradO, Delta, LSE2, BlockIndices, FirstKey, NumVisible, GradQ, GradK, GradV,
    scale, scale_log2, H, S,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, DVT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A program for each slot; the grid is `(R, H, S)`. Gradients are fp32, and all are added to by
    atomics."""
    # -- locate the program --
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_key = tl.load(FirstKey + row).to(tl.int64)
    num_visible = tl.load(NumVisible + row)
    block_id = tl.load(BlockIndices + (row * H + head) * S + tl.program_id(2))
    if (block_id < 0) | (block_id * BS >= num_visible):
        return
    token = block_id * BS + tl.arange(0, BT)
    is_seen = (tl.arange(0, BT) < BS) & (token < num_visible)  # [BT]
    key_row = (first_key + token) * H + head
    group = tl.arange(0, GT)
    group_row = (row * H + head) * G + group  # [GT]
    width = tl.arange(0, DT)
    value_width = tl.arange(0, DVT)

    # -- load --
    q_offset = group_row[:, None] * D + width
    do_offset = group_row[:, None] * DV + value_width
    k_offset = key_row[:, None] * D + width
    v_offset = key_row[:, None] * DV + value_width
    q_mask = (group < G)[:, None] & (width < D)
    k_mask = is_seen[:, None] & (width < D)
    v_mask = is_seen[:, None] & (value_width < DV)
    do_mask = (group < G)[:, None] & (value_width < DV)
    q_tile = tl.load(Q + q_offset, mask=q_mask, other=0.0)
    do_tile = tl.load(GradO + do_offset, mask=do_mask, other=0.0)
    k_tile = tl.load(K + k_offset, mask=k_mask, other=0.0)
    v_tile = tl.load(V + v_offset, mask=v_mask, other=0.0)
    lse = tl.load(LSE2 + group_row, mask=group < G, other=float("inf"))
    delta = tl.load(Delta + group_row, mask=group < G, other=0.0)

    # -- the five lines --
    acc_s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [GT, BT]
    p = tl.where(is_seen, tl.exp2(acc_s * scale_log2 - lse[:, None]), 0.0)
    d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")
    d_s = (p * (d_p - delta[:, None])).to(k_tile.dtype)
    d_v = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, input_precision="ieee")
    d_q = tl.dot(d_s, k_tile, input_precision="ieee") * scale
    d_k = tl.dot(tl.trans(d_s), q_tile, input_precision="ieee") * scale

    # -- add --
    tl.atomic_add(GradQ + q_offset, d_q, mask=q_mask, sem="relaxed")
    tl.atomic_add(GradK + k_offset, d_k, mask=k_mask, sem="relaxed")
    tl.atomic_add(GradV + v_offset, d_v, mask=v_mask, sem="relaxed")


def per_slot(call: ListsCall) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v` by `slot_kernel`."""
    sums = [torch.zeros(x.shape, device=x.device) for x in (call.q, call.k, call.v)]
    slot_kernel[call.ids.shape](
        call.q, call.k, call.v, call.d_o, call.delta, call.lse2, call.ids, call.rows.first_key,
        call.rows.num_visible, *sums, *call.scales, *call.ids.shape[1:], **call.block_sizes,
        **call.tiles, BT=max(16, triton.next_power_of_2(call.block_size)), num_warps=4,
    )  # fmt: skip
    return tuple(x.to(y.dtype) for x, y in zip(sums, (call.q, call.k, call.v), strict=True))
