"""What the benchmark runs: the tensors of one shape, and the passes over them.

A pass is a call without arguments that returns its results by name: `forward` gives `o`,
`backward` gives `d_q`, `d_k` and `d_v` and nothing of the forward is timed with it, `both` is one
step of training. Dense attention takes the same passes, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_tutorial import ops
from nsa_tutorial.bench import drawing
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PASSES = ("forward", "backward", "both")
GRADIENTS = ("d_q", "d_k", "d_v")
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """One call: batch 1, as many queries as keys, causal. For the window, `slots * block_size` keys
    are its size."""

    tokens: int
    kv_heads: int
    group: int
    width: int
    value_width: int
    block_size: int
    slots: int
    dtype: str


@dataclass(frozen=True)
class Problem:
    """The tensors of an operator and a shape.

    Attributes:
        operator: `"selected"` or `"window"`.
        shape: the sizes.
        q, k, v, d_o: random, contiguous; `d_o` is the gradient of the output.
        rows: where the query rows stand.
        lists: how the lists were drawn (`drawing.DRIFTS`); empty for the window.
        block_indices: the lists; None for the window.
    """

    operator: str
    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor
    rows: QueryRows
    lists: str = ""
    block_indices: Tensor | None = None

    @classmethod
    def make(cls, operator: str, shape: Shape, device: str, lists: str = "") -> Problem:
        """Draw the tensors, the same ones every time."""
        generator = torch.Generator(device).manual_seed(1)
        N, H, HQ = shape.tokens, shape.kv_heads, shape.kv_heads * shape.group
        D, DV = shape.width, shape.value_width
        q, k, v, d_o = (
            torch.randn(
                1, N, heads, width, generator=generator, device=device, dtype=DTYPES[shape.dtype]
            )
            for heads, width in ((HQ, D), (H, D), (H, DV), (HQ, DV))
        )
        rows = query_rows(1, N, N, causal=True, cu_seqlens=None, device=q.device)
        problem = cls(operator, shape, q, k, v, d_o, rows)
        return problem.with_lists(lists) if lists else problem

    def with_lists(self, lists: str) -> Problem:
        """The same tensors, with lists of that kind."""
        s = self.shape
        ids = drawing.draw(lists, s.tokens, s.kv_heads, s.block_size, s.slots, self.q.device.type)
        return replace(self, lists=lists, block_indices=ids)

    @property
    def window_size(self) -> int:
        """Keys of the window: as many as the lists name."""
        return self.shape.slots * self.shape.block_size

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.shape.width**-0.5

    @property
    def ids(self) -> Tensor:
        """The lists in the form that kernels walk, `[R, H, S]`."""
        return block_list(
            self.block_indices, self.rows, block_size=self.shape.block_size, block_counts=None,
            include_own_block=False,
        )  # fmt: skip

    def attend(self, backend: str) -> tuple[Tensor, Tensor]:
        """The operator's `o` and `lse`."""
        options = {"return_lse": True, "backend": backend}
        if self.operator == "window":
            return ops.sliding_window_attention(
                self.q, self.k, self.v, window_size=self.window_size, **options
            )
        return ops.selected_attention(
            self.q, self.k, self.v, self.block_indices, block_size=self.shape.block_size, **options
        )

    def prepare(self, direction: str, run: Callable[[Problem], Tensor]) -> Callable[[], Results]:
        """The call that is measured.

        Args:
            direction: of `PASSES`.
            run: makes an output of a problem's tensors.

        Returns:
            For `forward`, `run`, without a graph. For `backward`, the gradients alone: the forward
            runs now, once, and what it keeps is held for as long as the call is.
        """
        if direction == "forward":
            return lambda: {"o": run(self)}
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        problem = replace(self, **dict(zip("qkv", leaves, strict=True)))

        def forward() -> Tensor:
            with torch.enable_grad():
                return run(problem)

        def backward(o: Tensor) -> Results:
            found = torch.autograd.grad(o, leaves, self.d_o, retain_graph=direction == "backward")
            return dict(zip(GRADIENTS, found, strict=True))

        def both() -> Results:
            o = forward()
            return {"o": o.detach(), **backward(o)}

        if direction == "both":
            return both
        o = forward()
        return lambda: backward(o)


def dense(kernel: SDPBackend | None) -> Callable[[Problem], Tensor]:
    """Dense causal attention, as a function of a problem; None leaves the choice to PyTorch."""

    def run(problem: Problem) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
        options = {"is_causal": True, "enable_gqa": True}
        if kernel is None:
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return run


def dense_kernels(problem: Problem) -> dict[str, Callable[[Problem], Tensor]]:
    """Dense attention by name: PyTorch's flash and cuDNN kernels on a GPU, its own choice on a CPU
    and in fp32, which neither of them computes."""
    if problem.q.device.type == "cpu" or problem.shape.dtype == "float32":
        return {"dense": dense(None)}
    return {
        "dense, flash": dense(SDPBackend.FLASH_ATTENTION),
        "dense, cuDNN": dense(SDPBackend.CUDNN_ATTENTION),
    }
