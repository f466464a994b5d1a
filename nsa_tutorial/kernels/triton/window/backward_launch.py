"""What the operators call for the gradients of sliding windows on the Triton backend.

`window.backward` holds the kernels, `window.forward` the forward. No argument is checked
here: `ops` does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from nsa_tutorial.exact.online_softmax import LOG2_E
from nsa_tutorial.kernels.triton.launch_options import tile_sizes
from nsa_tutorial.kernels.triton.selected.backward import delta_kernel
from nsa_tutorial.kernels.triton.window import backward as triton_windows_backward
from nsa_tutorial.kernels.triton.window.forward import FP32_TILES, fitting, step_at_the_ends
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY, shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

# As `window.forward.TILES`: of dQ rows of a tile and keys of a step, of dK and dV the other way
# round.
DQ_TILES = (
    (256, 64, 64, 4, 2), (512, 64, 64, 8, 2), (512, 64, 32, 4, 2), (512, 32, 32, 4, 1),
)  # fmt: skip
DKV_TILES = (
    (256, 64, 32, 4, 4), (512, 64, 32, 8, 2), (512, 64, 32, 4, 2), (512, 32, 32, 4, 1),
)  # fmt: skip
FP32_DKV_TILES = ((128, 32, 32, 4, 2), (512, 16, 16, 4, 2), (512, 16, 16, 4, 1))
EDGE = 32  # keys of a step at the ends, where a tile has no more queries than that
SHORT_SUM = 256  # rows whose fp32 gradients are added up before the sum joins the others
Gradients = tuple[Tensor, Tensor, Tensor]


class Backward(NamedTuple):
    """One backward: what the forward was given and gave, contiguous, and the rows' numbers.

    Attributes:
        delta, lse2: what `selected.backward.delta_kernel` writes, `[R, H, G]`.
        is_added: whether gradients are added to what stands in their place.
    """

    d_o: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    lse2: Tensor
    rows: QueryRows
    window_size: int
    scale: float
    is_added: bool

    @property
    def sizes(self) -> dict[str, int]:
        """The kernels' `G, D, DV`."""
        (HQ, D), (H, DV) = self.q.shape[2:], self.v.shape[2:]
        return {"G": HQ // H, "D": D, "DV": DV}

    @property
    def memory(self) -> dict[str, int]:
        """What the choice of options has to know besides the sizes."""
        return {
            "itemsize": self.q.element_size(), "shared_memory": shared_memory(self.q.device)
        }  # fmt: skip


def window_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, window_size: int, scale: float, out: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """The backward of `window.forward.launch`.

    Args:
        d_o, d_lse: gradients of `o` and `lse`, `[B, N, HQ, DV]` and `[B, N, HQ]`.
        q, k, v, rows, window_size, scale: the forward's arguments.
        o, lse: what it returned.
        out: contiguous gradients to which these are added; None makes new ones.

    Returns:
        The gradients of `q`, `k`, `v`, in their dtypes; the same bits in every run.
    """
    if q.numel() == 0:
        return out or (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    sizes = {"window_size": min(window_size, k.shape[1]), "scale": scale}
    call = prepare(d_o, d_lse, q, k, v, o, lse, rows, **sizes, is_added=out is not None)
    d_q, d_k, d_v = out or tuple(x.new_empty(x.shape) for x in (q, k, v))
    gradient_of_queries(call, d_q)
    gradients_of_keys_and_values(call, d_k, d_v)
    return d_q, d_k, d_v


def prepare(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    rows: QueryRows, *, window_size: int, scale: float, is_added: bool = False,
) -> Backward:  # fmt: skip
    """What both passes read: contiguous tensors, and the numbers of each row."""
    (B, N, HQ, D), (H, DV) = q.shape, v.shape[2:]
    d_o, q, k, v, lse = (x.contiguous() for x in (d_o, q, k, v, lse))
    delta, lse2 = (q.new_empty(B * N, H, HQ // H, dtype=torch.float32) for _ in range(2))
    tiles = tile_sizes(HQ // H, D, DV)
    delta_kernel[(B * N, H)](
        o.contiguous(), d_o, lse, d_lse.contiguous(), delta, lse2, H,
        G=HQ // H, DV=DV, GT=tiles["GT"], DVT=tiles["DVT"], num_warps=1,
    )  # fmt: skip
    return Backward(d_o, q, k, v, lse, delta, lse2, rows, window_size, scale, is_added)


def gradient_of_queries(call: Backward, d_q: Tensor, **options: int) -> None:
    """Write the gradients of the queries. `options` stand in place of what `dq_options` chooses."""
    c, sizes = call, call.sizes
    (B, N), H = c.q.shape[:2], c.k.shape[2]
    tiles = tile_sizes(**sizes)
    options = dq_options(**sizes, **c.memory) | options
    num_tiles = triton.cdiv(N * sizes["G"], options["BQ"])
    triton_windows_backward.dq_kernel[(B * num_tiles * H,)](
        c.q, c.k, c.v, c.d_o, c.lse, c.delta, c.lse2, c.rows.first_key, c.rows.num_visible, d_q,
        c.scale, c.scale * LOG2_E, N, H, num_tiles, c.window_size, **sizes,
        ADD=c.is_added, DT=tiles["DT"], DVT=tiles["DVT"], **options,
    )  # fmt: skip


def gradients_of_keys_and_values(
    call: Backward, d_k: Tensor, d_v: Tensor, **options: int
) -> None:  # fmt: skip
    """Write the gradients of keys and values. `options` stand in place of what `dkv_options`
    chooses."""
    c, sizes = call, call.sizes
    B, M, H = c.k.shape[:3]
    tiles = tile_sizes(**sizes)
    options = dkv_options(sizes["D"], sizes["DV"], **c.memory) | options
    num_tiles = triton.cdiv(B * M, options["BT"])
    runs, num_unread = runs_of(
        c.rows, c.lse2[:, :, 0], window_size=c.window_size, tile_size=options["BT"],
        num_keys=B * M,
    )  # fmt: skip
    triton_windows_backward.dkv_kernel[(num_tiles * H,)](
        c.q, c.k, c.v, c.d_o, c.delta, c.lse2, c.rows.first_key, c.rows.num_visible, runs,
        num_unread, d_k, d_v, c.scale, c.scale * LOG2_E, len(c.lse2), H, B * M,
        num_tiles, c.window_size, **sizes, ADD=c.is_added, DT=tiles["DT"], DVT=tiles["DVT"],
        PART=0 if c.q.element_size() == 2 else SHORT_SUM // options["BR"], **options,
    )  # fmt: skip


def runs_of(
    rows: QueryRows, lse2: Tensor, *, window_size: int, tile_size: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Which queries see a tile of keys.

    Args:
        lse2: `[R, H]`, infinite or NaN where a row's group is not to be read.
        num_keys: of all sequences.

    Returns:
        `[4, tiles]` int32: the first query that sees some of the tile, the first that sees no less
        than the tile's end, the end of those that see its start, and the end of those that see any;
        and `[H, R + 1]` int32: how many rows before each are not to be read.
    """
    row_end = rows.first_key + rows.num_visible  # both ascend from row to row
    row_start = torch.maximum(rows.first_key, row_end - window_size)
    first = torch.arange(0, num_keys, tile_size, dtype=torch.int32, device=lse2.device)
    last = first + tile_size - 1
    ends = torch.stack((first, last.clamp(max=num_keys - 1)))
    runs = [
        torch.searchsorted(bounds, keys, right=True, out_int32=True)
        for bounds, keys in ((row_end, ends), (row_start, torch.stack((first, last))))
    ]
    num_unread = F.pad((~lse2.isfinite()).T.cumsum(1, dtype=torch.int32), (1, 0))
    return torch.cat(runs), num_unread


def dq_options(
    G: int, D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BQ, BT, BE, num_warps, num_stages`, as far as `shared_memory` allows. Arguments as in
    `launch_options.launch_options`."""
    BQ, BT, num_warps, num_stages = fitting(
        DQ_TILES if itemsize == 2 else FP32_TILES, D, DV, itemsize, shared_memory
    )
    BE = step_at_the_ends(G, BQ, BT, EDGE)
    return {"BQ": BQ, "BT": BT, "BE": BE, "num_warps": num_warps, "num_stages": num_stages}


def dkv_options(
    D: int, DV: int, itemsize: int, shared_memory: int = SHARED_MEMORY
) -> dict[str, int]:
    """`BT, BR, num_warps, num_stages`; arguments as in `dq_options`."""
    choices = DKV_TILES if itemsize == 2 else FP32_DKV_TILES
    options = fitting(choices, D, DV, itemsize, shared_memory)
    return dict(zip(("BT", "BR", "num_warps", "num_stages"), options, strict=True))
