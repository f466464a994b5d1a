"""What the operators call on the TileLang backend: lists, windows, or both, by the kernel of
`selected.forward`, and lists of tokens, or of blocks of a few, by that of
`selected.tokens_forward`.

Blocks that are too long for a tile are cut in parts, blocks of a few tokens into tokens, and a
window becomes rows that see nothing before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.kernels.tilelang.launch_options import block_tokens
from nsa_tutorial.kernels.tilelang.selected import tokens_forward
from nsa_tutorial.kernels.tilelang.selected.forward import launch
from nsa_tutorial.kernels.tokens import gathers
from nsa_tutorial.runtime.shared_memory import shared_memory
from nsa_tutorial.sparse.selected_attention import QueryRows

WINDOW_BLOCK = 64  # tokens of a window that are taken at a time
# A kernel holds the keys and the values of one block on chip, at most this many bytes, and as many
# tokens as a GPU has room for (`block_tokens`); a longer block is walked in equal parts.
LARGEST_KERNEL_TILE = 64 * 1024
# A block of 64 tokens takes one warp, a longer one two (`launch_options.LAUNCH_TABLE`), so parts of
# this size are the faster ones, up to this width.
PART_TOKENS, PART_WIDTH = 64, 128


def selected_forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float, slot_scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The lists; arguments and results as in `selected_attention.forward`, on CUDA tensors, or on
    CPU tensors through C. `out` is where `o` and `lse` go."""
    token_bytes = (k.shape[-1] + v.shape[-1]) * q.element_size()
    room = 1 if gathers(block_size) else _room(q, v)
    if block_size % PART_TOKENS == 0 and max(k.shape[-1], v.shape[-1]) <= PART_WIDTH:
        room = min(room, PART_TOKENS)
    ids, part_size = split_long_blocks(ids, block_size, token_bytes, room)
    if slot_scale is not None:  # the parts of a block share its factor
        slot_scale = slot_scale.repeat_interleave(block_size // part_size, dim=-1)
    if gathers(block_size):
        given = {"scale": scale, "slot_scale": slot_scale, "out": out}
        return tokens_forward.launch(q, k, v, ids, rows, **given)
    sizes = {"block_size": part_size, "scale": scale, "slot_scale": slot_scale}
    return launch(q, k, v, ids, rows, **sizes, out=out)


def window_forward(
    q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, *,
    window_size: int, scale: float, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The windows; arguments and results as in `sliding_window.forward`."""
    start = (rows.position - window_size + 1).clamp(min=0)
    rows = rows._replace(first_key=rows.first_key + start, num_visible=rows.num_visible - start)
    no_list = start.new_empty(len(start), k.shape[2], 0)  # [R, H, S = 0]
    block_size = min(WINDOW_BLOCK, _room(q, v))
    options = {"block_size": block_size, "scale": scale, "is_window": True}
    return launch(q, k, v, no_list, rows, **options, out=out)


def selected_and_window_forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, window_size: int, scale: float, slot_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both over the same keys and values, in two launches: `o [2, B, N, HQ, DV]` and
    `lse [2, B, N, HQ]`, of the lists, then of the windows. `slot_scale` is the lists'."""
    o = v.new_empty(2, *q.shape[:3], v.shape[3])
    lse = v.new_empty(2, *q.shape[:3], dtype=torch.float32)
    lists, windows = zip(o, lse, strict=True)
    sizes = {"block_size": block_size, "scale": scale, "slot_scale": slot_scale}
    selected_forward(q, k, v, ids, rows, **sizes, out=lists)
    window_forward(q, k, v, rows, window_size=window_size, scale=scale, out=windows)
    return o, lse


def _room(q: Tensor, v: Tensor) -> int:
    """Tokens of a block for which the GPU of these queries and values has room."""
    (HQ, D), (H, DV) = q.shape[2:], v.shape[2:]
    return block_tokens(HQ // H, D, DV, q.element_size(), shared_memory(q.device))


def split_long_blocks(
    ids: Tensor, block_size: int, bytes_per_token: int, room: int = 128
) -> tuple[Tensor, int]:
    """Blocks too long for a kernel's tile, of at most `room` tokens, as lists of equal parts: ids
    `[R, H, S * parts]` and the size of a part."""
    most = min(room, LARGEST_KERNEL_TILE // bytes_per_token)
    parts = next(
        p for p in range(1, block_size + 1) if block_size % p == 0 and block_size // p <= most
    )
    if parts == 1:
        return ids, block_size
    # an id this large is past the end of any sequence
    limit = torch.iinfo(torch.int32).max // parts
    part = torch.arange(parts, dtype=ids.dtype, device=ids.device)
    split = torch.where((ids >= 0) & (ids < limit), ids, -1)[..., None] * parts + part
    return split.masked_fill(split < 0, -1).flatten(-2).contiguous(), block_size // parts
