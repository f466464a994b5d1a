"""Which function computes an operator, on each backend.

`BACKENDS` names the forward and `BACKWARDS` the backward of each operator, as `"module:function"`;
a module is imported when it is first needed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from nsa_tutorial.runtime import environment, interrupts
from nsa_tutorial.runtime.alignment import with_aligned_tensors
from nsa_tutorial.runtime.smaller_tiles import with_smaller_tiles

Table = Mapping[str, Mapping[str, str]]
BACKENDS: Table = {
    "selected_attention": {
        "reference": "nsa_tutorial.sparse.query_tiles:selected_in_order",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.launch:selected_forward",
        "triton": "nsa_tutorial.kernels.triton.selected.launch:selected_forward",
    },
    "sliding_window_attention": {
        "reference": "nsa_tutorial.sparse.sliding_window:forward",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.launch:window_forward",
        "triton": "nsa_tutorial.kernels.triton.window.launch:window_forward",
    },
    "selected_and_window_attention": {
        "reference": "nsa_tutorial.sparse.native_sparse_attention:selection_and_window",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.launch:selected_and_window_forward",
        "triton": "nsa_tutorial.kernels.triton.selected.launch:selected_and_window_forward",
    },
    "compressed_attention": {
        "reference": "nsa_tutorial.sparse.compression:compressed_attention",
        "tilelang": "nsa_tutorial.kernels.tilelang.compressed.launch:compressed_forward",
        "triton": "nsa_tutorial.kernels.triton.compressed.launch:compressed_forward",
    },
    "select_blocks": {
        "reference": "nsa_tutorial.sparse.block_selection:select_blocks",
        "tilelang": "nsa_tutorial.kernels.tilelang.choice.launch:select_blocks",
        "triton": "nsa_tutorial.kernels.triton.choice.launch:select_blocks",
    },
    "index_blocks": {
        "reference": "nsa_tutorial.sparse.indexer:index_blocks",
        "tilelang": "nsa_tutorial.kernels.tilelang.choice.index_launch:index_blocks",
        "triton": "nsa_tutorial.kernels.triton.choice.index_launch:index_blocks",
    },
    "compress": {  # the mean; other summaries are matmuls, whatever the backend
        "reference": "nsa_tutorial.sparse.compression:summarise",
        "tilelang": "nsa_tutorial.kernels.tilelang.pooling:mean",
        "triton": "nsa_tutorial.kernels.triton.pooling:mean",
    },
    "gated_sum": {
        "reference": "nsa_tutorial.sparse.native_sparse_attention:gated_sum",
        "tilelang": "nsa_tutorial.kernels.tilelang.gates:gated_sum",
        "triton": "nsa_tutorial.kernels.triton.gates:gated_sum",
    },
    # the three branches in one call: other backends compute them one by one (`compositions`)
    "branches_at_once": {"triton": "nsa_tutorial.kernels.triton.native:forward"},
    "decode_attention": {
        "reference": "nsa_tutorial.sparse.decoding:decode_attention",
        "tilelang": "nsa_tutorial.kernels.tilelang.decoding.launch:decode_attention",
        "triton": "nsa_tutorial.kernels.triton.decoding.launch:decode_attention",
    },
    "write_tokens": {
        "reference": "nsa_tutorial.sparse.decoding:write_tokens",
        "tilelang": "nsa_tutorial.kernels.tilelang.decoding.write:write_tokens",
        "triton": "nsa_tutorial.kernels.triton.decoding.write:write_tokens",
    },
    "write_summaries": {
        "reference": "nsa_tutorial.sparse.decoding:write_summaries",
        "tilelang": "nsa_tutorial.kernels.tilelang.decoding.write:write_summaries",
        "triton": "nsa_tutorial.kernels.triton.decoding.write:write_summaries",
    },
}
BACKWARDS: Table = {
    "selected_attention": {
        "reference": "nsa_tutorial.training.gradients:selected_in_order_backward",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.backward_launch:selected_backward",
        "triton": "nsa_tutorial.kernels.triton.selected.backward_launch:selected_backward",
    },
    "sliding_window_attention": {
        "reference": "nsa_tutorial.training.tile_gradients:window_backward",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.backward_launch:window_backward",
        "triton": "nsa_tutorial.kernels.triton.window.launch:window_backward",
    },
    "selected_and_window_attention": {
        "reference": "nsa_tutorial.training.gradients:selected_and_window_backward",
        "tilelang": "nsa_tutorial.kernels.tilelang.selected.backward_launch:"
        "selected_and_window_backward",
        "triton": "nsa_tutorial.kernels.triton.selected.backward_launch:"
        "selected_and_window_backward",
    },
    "compressed_attention": {
        "reference": "nsa_tutorial.training.tile_gradients:compressed_backward",
        "tilelang": "nsa_tutorial.kernels.tilelang.compressed.launch:compressed_backward",
        "triton": "nsa_tutorial.kernels.triton.compressed.launch:compressed_backward",
    },
    # on the reference backend, PyTorch derives these two gradients itself
    "compress": {
        "tilelang": "nsa_tutorial.kernels.tilelang.pooling:mean_backward",
        "triton": "nsa_tutorial.kernels.triton.pooling:mean_backward",
    },
    "gated_sum": {
        "tilelang": "nsa_tutorial.kernels.tilelang.gates:gated_sum_backward",
        "triton": "nsa_tutorial.kernels.triton.gates:gated_sum_backward",
    },
    "branches_at_once": {"triton": "nsa_tutorial.kernels.triton.native:backward"},
}
WRITERS = ("write_tokens", "write_summaries")  # change their arguments, so they get no copies
_INTERPRETER = threading.RLock()


def load(table: Table, operator: str, backend: str, q: Tensor) -> Callable:
    """The backend's function in `table`, or `BackendUnavailable`, where this machine cannot run
    it on tensors like `q`."""
    if backend != "reference":
        environment.require(backend, q.device.type, str(q.dtype).removeprefix("torch."))
    module, name = table[operator][backend].split(":")
    function = getattr(interrupts.import_module(module), name)
    if q.is_cuda and backend != "reference":
        function = with_smaller_tiles(function)
        return function if operator in WRITERS else with_aligned_tensors(function)
    is_interpreted = backend == "triton" and q.device.type == "cpu"
    return _one_at_a_time(function) if is_interpreted else function


def _one_at_a_time(function: Callable) -> Callable:
    """Serialise `function` across threads, because Triton's interpreter keeps its state in global
    variables."""

    @functools.wraps(function)
    def run(*args: object, **options: object) -> object:
        with _INTERPRETER:
            return function(*args, **options)

    return run
