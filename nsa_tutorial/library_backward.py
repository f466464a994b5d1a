"""The gradients of the operators as PyTorch knows them: `torch.ops.nsa_tutorial.*_backward`.

A backward is a custom operator like its forward, with a fake kernel, so that `torch.compile` takes
it. It has the gradients of the forward's outputs, these outputs, and the forward's arguments, and
calls the backend's function from `backends.BACKWARDS`. It has no gradient of its own: a second
derivative raises.

`differentiable` makes one of them the gradient of an operator that attends, `differentiable_mean`
and `differentiable_sum` those of the two others; `library` calls them. `call` takes an operator
through the transforms of `torch.func`, where custom operators of PyTorch's have no gradient.
"""

# no `from __future__ import annotations`: PyTorch reads the operators' schemas from them
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import CustomOpDef

from nsa_tutorial import backends
from nsa_tutorial.backends import BACKWARDS
from nsa_tutorial.runtime.devices import on_its_device
from nsa_tutorial.runtime.operators import operator
from nsa_tutorial.runtime.strides import with_new_strides
from nsa_tutorial.runtime.transforms import is_transformed, no_tangents

SLOT_SCALE = 5  # its place among the arguments of the operators that have it
FUNCTIONS: dict[CustomOpDef, type[torch.autograd.Function]] = {}  # the same, for `torch.func`


def call(operator: CustomOpDef, *arguments: object) -> object:
    """`operator(*arguments)`; inside of `torch.func.grad`, `vjp`, `vmap` and the like, its twin in
    `FUNCTIONS`."""
    return FUNCTIONS[operator].apply(*arguments) if is_transformed() else operator(*arguments)


def _add_function(operator: CustomOpDef, run: Callable, save: Callable) -> None:
    """The `autograd.Function` of `operator`, with the gradient `run` of what `save` saved."""
    name = operator._name

    def jvp(ctx, *tangents) -> None:
        raise RuntimeError(no_tangents(name))

    def vmap(info, in_dims, *arguments) -> tuple:
        """One element of the batch after the other."""
        found = [
            call(operator, *(x if d is None else x.select(d, i) for x, d in each))
            for i in range(info.batch_size)
            for each in [list(zip(arguments, in_dims, strict=True))]
        ]
        stacked = [torch.stack(parts) for parts in zip(*found, strict=True)]
        return tuple(stacked), (0,) * len(stacked)

    methods = {"forward": operator, "setup_context": save, "backward": run, "jvp": jvp}
    methods = {key: staticmethod(method) for key, method in (methods | {"vmap": vmap}).items()}
    FUNCTIONS[operator] = type(name, (torch.autograd.Function,), methods)


def make_differentiable(
    operator: CustomOpDef, backward: CustomOpDef, run: Callable, save: Callable
) -> None:
    """Give `operator` the gradient `run`, which calls `backward`, of what `save` saved."""
    operator.register_autograd(run, setup_context=save)
    _add_function(operator, run, save)

    def raise_(ctx, *gradients) -> None:
        raise RuntimeError(f"{backward._name} has no derivative: there is no second derivative")

    _add_function(backward, raise_, lambda ctx, inputs, output: None)


def differentiable(
    operator: CustomOpDef, backward: CustomOpDef, num_tensors: int, has_factors: bool = False
) -> None:
    """Make `backward` the gradient of `operator(q, k, v, *lists, *options)`, and give it a fake
    kernel.

    Args:
        operator, backward: custom operators; `backward` takes the gradients of the operator's
            outputs, the outputs, and its arguments.
        num_tensors: how many of the operator's first arguments are tensors or None.
        has_factors: there is a `slot_scale` among them; `backward` returns its gradient last.
    """
    places = (0, 1, 2, SLOT_SCALE) if has_factors else (0, 1, 2)

    def save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*output, *inputs[:num_tensors])
        ctx.options = inputs[num_tensors:]

    def run(ctx, d_o: Tensor, d_lse: Tensor) -> tuple:
        found = call(backward, d_o, d_lse, *ctx.saved_tensors, *ctx.options)
        gradients = [None] * (num_tensors + len(ctx.options))
        for place, gradient in zip(places, found, strict=True):
            gradients[place] = gradient if ctx.needs_input_grad[place] else None
        return tuple(gradients)

    def fake(d_o, d_lse, o, lse, q, *others):
        inputs = [(q, *others)[place] for place in places]
        return tuple(_no_factors(q) if x is None else x.new_empty(x.shape) for x in inputs)

    make_differentiable(operator, backward, run, save)
    backward.register_fake(fake)


def _no_factors(q: Tensor) -> Tensor:
    """In place of a gradient of factors that there are not: operators return no None."""
    return q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))


def _of_nothing(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients without queries."""
    return tuple(x.new_zeros(x.shape) for x in inputs)


def _of_lists(
    operator: str, backend: str, saved: Sequence[Tensor], lists: tuple, slot_scale: Tensor | None,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k`, `v` and `slot_scale`; `lists` are from `listed_blocks`."""
    q, (ids, rows, sizes) = saved[2], lists
    function = backends.load(BACKWARDS, operator, backend, q)
    d_q, d_k, d_v, *rest = function(*saved, ids, rows, **sizes, **options)
    of_factors = _no_factors(q)
    if slot_scale is not None:  # the added own block, if any, stands behind the slots
        of_factors = rest[0][..., : slot_scale.shape[-1]].reshape(slot_scale.shape)
    return d_q, d_k, d_v, of_factors


@operator("nsa_tutorial::selected_attention_backward")
@on_its_device
@with_new_strides
def selected_attention_backward(
    d_o: Tensor, d_lse: Tensor, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    slot_scale: Tensor | None, cu_seqlens: Tensor | None, block_size: int, include_own_block: bool,
    causal: bool, scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k`, `v` and `slot_scale`, the last one empty where there is none."""
    if q.numel() == 0:
        return _of_nothing(q, k, v, _no_factors(q) if slot_scale is None else slot_scale)
    lists = backends.listed_blocks(
        q, k, block_indices, block_counts, slot_scale, cu_seqlens, block_size, include_own_block,
        causal,
    )  # fmt: skip
    saved = (d_o, d_lse, q, k, v, o, lse)
    return _of_lists("selected_attention", backend, saved, lists, slot_scale, scale=scale)


@operator("nsa_tutorial::sliding_window_attention_backward")
@on_its_device
@with_new_strides
def sliding_window_attention_backward(
    d_o: Tensor, d_lse: Tensor, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window_size: int, scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k` and `v`."""
    if q.numel() == 0:
        return _of_nothing(q, k, v)
    function = backends.load(BACKWARDS, "sliding_window_attention", backend, q)
    rows = backends.located_rows(q, k.shape[1], cu_seqlens)
    window_size = backends.at_most_past(window_size, k.shape[1])
    saved = (d_o, d_lse, q, k, v, o, lse)
    return function(*saved, rows, window_size=window_size, scale=scale)


@operator("nsa_tutorial::selected_and_window_attention_backward")
@on_its_device
@with_new_strides
def selected_and_window_attention_backward(
    d_o: Tensor, d_lse: Tensor, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | None,
    slot_scale: Tensor | None, cu_seqlens: Tensor | None, window_size: int, block_size: int,
    include_own_block: bool, scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q`, `k`, `v` and `slot_scale`, through both outputs; the last one empty
    where there is none."""
    if q.numel() == 0:
        return _of_nothing(q, k, v, _no_factors(q) if slot_scale is None else slot_scale)
    lists = backends.listed_blocks(
        q, k, block_indices, block_counts, slot_scale, cu_seqlens, block_size, include_own_block,
        True,
    )  # fmt: skip
    saved = (d_o, d_lse, q, k, v, o, lse)
    window_size = backends.at_most_past(window_size, k.shape[1])
    options = {"window_size": window_size, "scale": scale}
    operator = "selected_and_window_attention"
    return _of_lists(operator, backend, saved, lists, slot_scale, **options)


@operator("nsa_tutorial::compressed_attention_backward")
@on_its_device
@with_new_strides
def compressed_attention_backward(
    d_o: Tensor, d_lse: Tensor, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, num_keys: int, length: int,
    stride: int, scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `q` and of the summaries `k` and `v`."""
    if q.numel() == 0:
        return _of_nothing(q, k, v)
    function = backends.load(BACKWARDS, "compressed_attention", backend, q)
    _, rows = backends.rows_and_summaries(q, k, cu_seqlens, num_keys, length, stride)
    return function(d_o, d_lse, q, k, v, o, lse, rows, scale=scale)


# -- the mean of windows, and the gated sum --


@operator("nsa_tutorial::mean_summaries_backward")
@on_its_device
@with_new_strides
def mean_summaries_backward(
    d_summaries: Tensor, first: Tensor, num_tokens: int, length: int, stride: int, backend: str
) -> Tensor:
    """The gradient of `num_tokens` tokens, `[B, M, H, D]`."""
    B, _, H, D = d_summaries.shape
    if d_summaries.numel() == 0:
        return d_summaries.new_zeros(B, num_tokens, H, D)
    function = backends.load(BACKWARDS, "compress", backend, d_summaries)
    most = -(-length // stride)  # summaries that hold a token
    return function(d_summaries, first, M=num_tokens, length=length, most=most)


@mean_summaries_backward.register_fake
def _(d_summaries, first, num_tokens, length, stride, backend):
    B, _, H, D = d_summaries.shape
    return d_summaries.new_empty(B, num_tokens, H, D)


def differentiable_mean(operator: CustomOpDef) -> None:
    """Make `mean_summaries_backward` the gradient of `operator(x, first, *options)`."""

    def save(ctx, inputs, output) -> None:
        x, first, *ctx.options = inputs
        ctx.num_tokens = x.shape[1]
        ctx.save_for_backward(first)

    def run(ctx, d_summaries: Tensor) -> tuple:
        (first,) = ctx.saved_tensors
        d_x = mean_summaries_backward(d_summaries, first, ctx.num_tokens, *ctx.options)
        return d_x, None, *(None for _ in ctx.options)

    operator.register_autograd(run, setup_context=save)


@operator("nsa_tutorial::gated_sum_backward")
@on_its_device
@with_new_strides
def gated_sum_backward(
    d_o: Tensor, gates: list[Tensor], outputs: list[Tensor], backend: str
) -> list[Tensor]:
    """The gradients of the gates, then those of the outputs, stacked where these are."""
    found = [x.new_empty(x.shape) for x in (*gates, *outputs)]
    if d_o.numel() == 0:
        return [x.zero_() for x in found]
    function = backends.load(BACKWARDS, "gated_sum", backend, d_o)
    d_gates, d_outputs = found[: len(gates)], backends.one_by_one(found[len(gates) :])
    function(d_o, gates, backends.one_by_one(outputs), d_gates, d_outputs)
    return found


@gated_sum_backward.register_fake
def _(d_o, gates, outputs, backend):
    return [x.new_empty(x.shape) for x in (*gates, *outputs)]


def differentiable_sum(operator: CustomOpDef) -> None:
    """Make `gated_sum_backward` the gradient of `operator(gates, outputs, backend)`."""

    def save(ctx, inputs, output) -> None:
        gates, outputs, ctx.backend = inputs
        ctx.num_gates = len(gates)
        ctx.save_for_backward(*gates, *outputs)

    def run(ctx, d_o: Tensor) -> tuple:
        gates = list(ctx.saved_tensors[: ctx.num_gates])
        outputs = list(ctx.saved_tensors[ctx.num_gates :])
        found = gated_sum_backward(d_o, gates, outputs, ctx.backend)
        return found[: ctx.num_gates], found[ctx.num_gates :], None

    operator.register_autograd(run, setup_context=save)
