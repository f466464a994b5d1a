"""What the operators call on the Triton backend: lists, windows, or both, by the kernel that suits
the call.

`triton_forward` holds the kernel that runs everywhere, `triton_descriptors` the one that Hopper
runs faster. No argument is checked here: `ops` does.
"""

from __future__ import annotations

from torch import Tensor

from nsa_tutorial.kernels import triton_descriptors, triton_forward
from nsa_tutorial.sparse.selected_attention import QueryRows

WINDOW_BLOCK = 64  # tokens of a window that a program takes as one block


def forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The lists; arguments and results as in `selected_attention.forward`, on CUDA tensors, or
    interpreted on CPU tensors."""
    sizes = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale}
    o, lse = launch(q, k, v, ids, rows, **sizes)
    return o[0], lse[0]


def sliding_window(
    q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, *, window_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The windows; arguments and results as in `sliding_window.forward`."""
    no_list = rows.first_key.new_empty(len(rows.first_key), v.shape[2], 0)  # [R, H, S = 0]
    sizes = {"block_size": WINDOW_BLOCK, "scale": scale, "window_size": window_size}
    o, lse = launch(q, k, v, no_list, rows, **sizes)
    return o[0], lse[0]


def selection_and_window(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, window_size: int, scale: float, slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both over the same keys and values, in one launch: `o [2, B, N, HQ, DV]` and
    `lse [2, B, N, HQ]`, of the lists, then of the windows. `rows` are from `query_rows`, causal;
    `slot_scale` is the lists'."""
    sizes = {"block_size": block_size, "scale": scale, "window_size": window_size}
    return launch(q, k, v, ids, rows, **sizes, slot_scale=slot_scale)


def launch(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None, window_size: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`triton_descriptors.launch` where that kernel takes the call, else `triton_forward.launch`;
    arguments and results as there."""
    fast = triton_descriptors.can_use_descriptors(q, k, v, block_size)
    kernels = triton_descriptors if fast else triton_forward
    sizes = {"block_size": block_size, "scale": scale, "window_size": window_size}
    return kernels.launch(q, k, v, ids, rows, **sizes, slot_scale=slot_scale)
