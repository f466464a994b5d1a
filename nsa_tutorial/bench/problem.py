"""What the benchmark runs: the tensors of one operator and one shape, and the passes over them.

A pass is a call without arguments that returns its results by name: `forward` gives the operator's
outputs, `backward` the gradients of its inputs and nothing of the forward is timed with it, `both`
is one step of training. Dense attention takes the same passes, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_tutorial.bench import drawing
from nsa_tutorial.bench.inputs import Inputs, Shape
from nsa_tutorial.bench.operators import OPERATORS
from nsa_tutorial.sparse.selected_attention import query_rows

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PASSES = ("forward", "backward", "both")
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Problem(Inputs):
    """`Inputs` of an operator, as the benchmark draws them, and the passes over them."""

    @classmethod
    def make(cls, operator: str, shape: Shape, device: str, lists: str = "") -> Problem:
        """Draw the tensors, the same ones every time."""
        generator = torch.Generator(device).manual_seed(1)
        N = shape.tokens
        rows = query_rows(1, N, N, causal=True, cu_seqlens=None, device=torch.device(device))
        tensors = {}
        for name in OPERATORS[operator].drawn:
            size, dtype = _size(name, shape), DTYPES[shape.dtype]
            x = torch.randn(size, generator=generator, device=device, dtype=dtype)
            tensors[name] = x.sigmoid_() if name.startswith("g_") else x
        problem = cls(operator, shape, rows, tensors)
        return problem.with_lists(lists) if lists else OPERATORS[operator].complete(problem)

    def with_lists(self, lists: str) -> Problem:
        """The same tensors, with lists of that kind; where blocks are chosen, with such queries."""
        s, device = self.shape, self.q.device.type
        if self.operator == "selected":
            ids = drawing.draw(lists, s.tokens, s.kv_heads, s.block_size, s.slots, device)
            return replace(self, lists=lists, block_indices=ids)
        q = drawing.drifting(lists, s.tokens, self.q.shape[2:], self.q.dtype, device)
        problem = replace(self, lists=lists, tensors={**self.tensors, "q": q})
        return OPERATORS[self.operator].complete(problem)

    def run(self, backend: str) -> tuple[Tensor, ...]:
        """The operator's outputs; attention adds its `lse`."""
        return OPERATORS[self.operator].run(self, backend)

    def prepare(
        self, direction: str, run: Callable[[Problem], tuple[Tensor, ...]]
    ) -> Callable[[], Results]:
        """The call that is measured.

        Args:
            direction: of `PASSES`.
            run: makes the outputs of a problem's tensors.

        Returns:
            For `forward`, `run`, without a graph. For `backward`, the gradients alone: the forward
            runs now, once, and what it keeps is held for as long as the call is.

        Raises:
            NotImplementedError: for a backward of what has none.
        """
        operator = OPERATORS[self.operator]
        if direction == "forward":
            return lambda: dict(zip(operator.outputs, run(self), strict=False))
        if not operator.inputs:
            raise NotImplementedError(f"{self.operator}: there is no backward")
        leaves = {x: self.tensors[x].detach().requires_grad_() for x in operator.inputs}
        problem = self.with_tensors(**leaves)
        upstream = [self.tensors[f"d_{name}"] for name in operator.outputs]

        def forward() -> Results:
            with torch.enable_grad():
                return dict(zip(operator.outputs, run(problem), strict=False))

        def backward(found: Results) -> Results:
            outputs, is_kept = [*found.values()], direction == "backward"
            gradients = torch.autograd.grad(outputs, [*leaves.values()], upstream, is_kept)
            return {f"d_{x}": grad for x, grad in zip(leaves, gradients, strict=True)}

        def both() -> Results:
            found = forward()
            return {**{x: o.detach() for x, o in found.items()}, **backward(found)}

        if direction == "both":
            return both
        found = forward()
        return lambda: backward(found)


def _size(name: str, shape: Shape) -> tuple[int, ...]:
    """The size of a tensor that is drawn, by its name."""
    H, HQ = shape.kv_heads, shape.kv_heads * shape.group
    if name in ("d_k_cmp", "d_v_cmp"):
        width = shape.width if name == "d_k_cmp" else shape.value_width
        return 1, shape.num_summaries, H, width
    if name.startswith("g_"):
        return 1, shape.tokens, HQ
    heads = H if name in ("k", "v") else HQ
    return 1, shape.tokens, heads, shape.width if name in ("q", "k") else shape.value_width


def dense(kernel: SDPBackend | None) -> Callable[[Problem], tuple[Tensor, ...]]:
    """Dense causal attention, as a function of a problem; None leaves the choice to PyTorch."""

    def run(problem: Problem) -> tuple[Tensor, ...]:
        q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
        options = {"is_causal": True, "enable_gqa": True}
        if kernel is None:
            return (F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2),)
        with sdpa_kernel(kernel):
            return (F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2),)

    return run


def dense_kernels(problem: Problem) -> dict[str, Callable[[str], Callable[[], Results]]]:
    """Dense attention to the same queries, keys and values by name, as what prepares a pass:
    PyTorch's flash and cuDNN kernels on a GPU, its own choice on a CPU and in fp32, which neither
    of them computes."""
    if problem.device.type == "cpu" or problem.shape.dtype == "float32":
        kernels = {"dense": None}
    else:
        kernels = {
            "dense, flash": SDPBackend.FLASH_ATTENTION,
            "dense, cuDNN": SDPBackend.CUDNN_ATTENTION,
        }
    # of q, k and v, and with the gradients of these, as a window has them
    as_window = replace(problem, operator="window")
    return {name: partial(as_window.prepare, run=dense(kernel)) for name, kernel in kernels.items()}
