"""The operators of decoding as PyTorch knows them: attention to a cache, and the two that write to
it, which change their arguments. None has a gradient.

As in `library`, arguments are checked and flat, and the backend has a name.
"""

# no `from __future__ import annotations`: PyTorch reads the operators' schemas from them
import torch
from torch import Tensor

from nsa_tutorial import backends
from nsa_tutorial.backends import BACKENDS
from nsa_tutorial.runtime.devices import on_its_device
from nsa_tutorial.runtime.operators import operator
from nsa_tutorial.runtime.strides import with_new_strides
from nsa_tutorial.sparse import decoding
from nsa_tutorial.sparse.decoding import Buffers


@operator("nsa_tutorial::decode_attention")
@on_its_device
@with_new_strides
def decode_attention(
    q: Tensor, buffers: list[Tensor], lengths: Tensor, block_table: Tensor | None,
    g_cmp: Tensor | None, g_slc: Tensor | None, g_swa: Tensor | None,
    block_indices: Tensor | None, top_n: int, block_size: int, window_size: int, length: int,
    stride: int, scale: float, backend: str,
) -> Tensor:  # fmt: skip
    """`ops.decode_attention`; `buffers` are keys and values of summaries, lists and window."""
    function = backends.load(BACKENDS, "decode_attention", backend, q)
    if q.numel() == 0:
        return q.new_empty(*q.shape[:3], buffers[3].shape[3])
    return function(
        q, Buffers(*buffers, lengths, block_table), (g_cmp, g_slc, g_swa), block_indices,
        top_n=top_n, block_size=block_size, window_size=window_size, length=length, stride=stride,
        scale=scale,
    )  # fmt: skip


@decode_attention.register_fake
def _(q, buffers, *_):
    return q.new_empty(*q.shape[:3], buffers[3].shape[3])


def _no_gradient(ctx, grad):
    raise RuntimeError(
        "decode_attention: there is no gradient through a cache: call it under torch.no_grad(), "
        "or train with native_sparse_attention"
    )


decode_attention.register_autograd(_no_gradient)


@operator("nsa_tutorial::write_tokens", mutates=("targets",))
@on_its_device
def write_tokens(
    targets: list[Tensor], tokens: list[Tensor], lengths: Tensor, block_table: Tensor | None,
    backend: str,
) -> None:  # fmt: skip
    """Write the next tokens of each row to its pages and to both rings."""
    function = backends.load(BACKENDS, "write_tokens", backend, targets[0])
    if tokens[0].numel():
        function(targets, tokens, lengths, block_table)


@operator("nsa_tutorial::pending_windows")
@on_its_device
@with_new_strides
def pending_windows(ring: Tensor, lengths: Tensor, n: int, length: int, stride: int) -> Tensor:
    """The windows that the latest `n` tokens of each row may have completed, `[B * windows, length,
    H, D]`."""
    return decoding.pending_windows(ring, lengths, n, length, stride)


@pending_windows.register_fake
def _(ring, lengths, n, length, stride):
    windows = ring.shape[0] * decoding.most_new_summaries(n, stride)
    return ring.new_empty(windows, length, *ring.shape[2:])


@operator("nsa_tutorial::write_summaries", mutates=("targets",))
@on_its_device
def write_summaries(
    targets: list[Tensor], summaries: list[Tensor], lengths: Tensor, block_table: Tensor | None,
    n: int, length: int, stride: int, page_size: int, backend: str,
) -> None:  # fmt: skip
    """Write the summaries that the latest `n` tokens completed."""
    function = backends.load(BACKENDS, "write_summaries", backend, targets[0])
    if summaries[0].numel():
        function(targets, summaries, lengths, block_table, n, length, stride, page_size)


def check_room(host_lengths: Tensor, n: int, max_tokens: int) -> None:
    """Raise `ValueError` if a row has no room for `n` more tokens."""
    if len(host_lengths) and int(host_lengths.max()) + n > max_tokens:
        row = int(host_lengths.argmax())
        raise ValueError(
            f"cache: got {n} more tokens for row {row}, which holds {int(host_lengths[row])}, "
            f"expected at most {max_tokens} in all: make the cache with a larger max_tokens"
        )


@operator("nsa_tutorial::count_tokens", mutates=("host_lengths", "most"))
def count_tokens(host_lengths: Tensor, most: Tensor, n: int, max_tokens: int) -> None:
    """Count `n` more tokens on the host, in `host_lengths` and in the `most` that each row ever
    had, or raise where a row has no room for them. Not while a CUDA graph is captured, since
    nothing runs then."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    check_room(host_lengths, n, max_tokens)
    host_lengths += n
    torch.maximum(most, host_lengths, out=most)


for _writer in (write_tokens, write_summaries, count_tokens):
    _writer.register_fake(lambda *_: None)
