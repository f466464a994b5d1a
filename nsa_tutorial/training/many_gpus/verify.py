"""A text over several ranks beside the same text on one: the largest differences.

On a CPU, and on a GPU in fp64, both compute the same formula, and what differs is rounding. In bf16
on a GPU, the ranks may be as far from fp64 as one process is, twice, plus 10⁻⁶ (README.md says the
same of every kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.training.many_gpus import meshes, operators
from nsa_tutorial.training.many_gpus.cuts import KINDS, Cut

Tensors = dict[str, Tensor]
EXACT = 1e-10  # what rounding in fp64 may add up to


class Sizes(NamedTuple):
    """Of a text and of the branches."""

    query_heads: int = 4
    kv_heads: int = 2
    key_width: int = 8
    value_width: int = 6
    batch: int = 1
    block_size: int = 4
    top_n: int = 4
    window_size: int = 7
    length: int = 6
    stride: int = 2

    def options(self) -> dict[str, int]:
        """As `ops.three_branches` takes them."""
        names = ("block_size", "window_size", "length", "stride")
        return {name: getattr(self, name) for name in names} | {"block_counts": self.top_n}


REAL = Sizes(16, 2, 128, 128, 1, 64, 16, 512, 32, 16)


def text(tokens: int, sizes: Sizes, *, seed: int = 0, device: str = "cpu") -> Tensors:
    """Queries, two sets of keys and values, gates, and the gradient of the output, in fp64."""
    s, g = sizes, torch.Generator(device).manual_seed(seed)
    widths = {"q": (s.query_heads, s.key_width), "d_o": (s.query_heads, s.value_width)}
    for i in ("", "_swa"):
        widths |= {f"k{i}": (s.kv_heads, s.key_width), f"v{i}": (s.kv_heads, s.value_width)}
    options = {"generator": g, "dtype": torch.float64, "device": device}
    made = {name: torch.randn(s.batch, tokens, *w, **options) for name, w in widths.items()}
    for name in ("g_cmp", "g_slc", "g_swa"):
        made[name] = torch.rand(s.batch, tokens, s.query_heads, **options)
    return made


def _attend(
    x: Tensors, sizes: Sizes, own_window: bool, backend: str,
    compress: Callable[..., Tensor], three_branches: Callable[..., Tensor],
) -> Tensors:  # fmt: skip
    """The output, and the gradients of all that went in."""
    x = {key: y if key == "d_o" else y.detach().requires_grad_() for key, y in x.items()}
    made = {"length": sizes.length, "stride": sizes.stride, "backend": backend}
    compressed = [compress(x[name], **made) for name in "kv"]
    window = (x["k_swa"], x["v_swa"]) if own_window else ()
    gates = (x["g_cmp"], x["g_slc"], x["g_swa"])
    options = sizes.options() | {"backend": backend}
    o = three_branches(x["q"], compressed, (x["k"], x["v"]), window, gates, **options)
    o.backward(x["d_o"])
    return {"o": o.detach()} | {f"d_{key}": y.grad for key, y in x.items() if y.grad is not None}


def on_one(
    x: Tensors, cut: Cut, sizes: Sizes, *, own_window: bool = False, backend: str = "auto"
) -> Tensors:
    """The whole text in this process: the output, and every gradient."""
    offsets = cut.documents
    if offsets is not None:
        offsets = torch.tensor(offsets, dtype=torch.int32, device=x["q"].device)

    def compress(x: Tensor, **options: object) -> Tensor:
        return ops.compress(x, cu_seqlens=offsets, **options)

    def three_branches(*given: object, **options: object) -> Tensor:
        return ops.three_branches(*given, num_keys=cut.tokens, cu_seqlens=offsets, **options)

    return _attend(x, sizes, own_window, backend, compress, three_branches)


def on_ranks(
    x: Tensors, mesh: meshes.Mesh, cut: Cut, sizes: Sizes, *, own_window: bool = False,
    backend: str = "auto",
) -> Tensors:  # fmt: skip
    """This rank's share of it."""
    x = {key: meshes.shard(y, mesh, cut) for key, y in x.items()}

    def compress(x: Tensor, **options: object) -> Tensor:
        return operators.compress(x, mesh=mesh, cut=cut, **options)

    def three_branches(*given: object, **options: object) -> Tensor:
        return operators.three_branches(*given, mesh=mesh, cut=cut, **options)

    return _attend(x, sizes, own_window, backend, compress, three_branches)


def distances(found: Tensors, expected: Tensors, cut: Cut, rank: int) -> dict[str, float]:
    """How far each of this rank's tensors is from its share of those of one process, at most."""
    assert found.keys() == expected.keys()
    shares = {key: cut.shard(x, rank) for key, x in expected.items()}
    return {
        key: (x.double() - shares[key].double()).abs().max().item() if x.numel() else 0.0
        for key, x in found.items()
    }


class Found(NamedTuple):
    """One comparison: what was compared, the largest error of any tensor, and how large it may
    be."""

    what: str
    error: float
    limit: float

    @property
    def is_right(self) -> bool:
        """Whether it is no larger (NaN is)."""
        return self.error <= self.limit


def cases(ranks: int) -> Iterator[tuple[Cut, Sizes, bool]]:
    """Cuts, sizes, and whether the window has keys of its own."""
    for kind in KINDS:
        for own_window in (False, True):
            yield Cut(ranks, 203, kind), Sizes(batch=2), own_window
        yield Cut(ranks, 3, kind), Sizes(), True  # fewer tokens than pieces, or hardly more
        yield Cut(ranks, 203, kind, (0, 3, 90, 91, 150, 203)), Sizes(), True


def verify(mesh: meshes.Mesh, device: str) -> Iterator[Found]:
    """Compare this mesh with one process; the errors are the largest of all ranks."""
    context = meshes.context_of(mesh)
    for cut, sizes, own_window in cases(context.ranks):
        x = text(cut.tokens, sizes, device=device)
        options = {"own_window": own_window, "backend": "reference"}
        expected = on_one(x, cut, sizes, **options)
        found = on_ranks(x, mesh, cut, sizes, **options)
        error = max(distances(found, expected, cut, context.rank).values())
        yield Found(f"{_words(cut, own_window)}, fp64", _largest(context, error)[0], EXACT)
    if device == "cuda":
        for kind in KINDS:
            yield from _kernels(mesh, Cut(context.ranks, 8191, kind))


def _kernels(mesh: meshes.Mesh, cut: Cut) -> Iterator[Found]:
    """The kernels in bf16: as far from fp64 as on one process."""
    context, names = meshes.context_of(mesh), {}
    exact = text(cut.tokens, REAL, device="cuda")
    rounded = {key: x.bfloat16() for key, x in exact.items()}
    expected = on_one({key: x.double() for key, x in rounded.items()}, cut, REAL)
    one = on_one(rounded, cut, REAL)
    mine = on_ranks(rounded, mesh, cut, REAL)
    alone = distances({key: cut.shard(x, context.rank) for key, x in one.items()}, expected, cut,
                      context.rank)  # fmt: skip
    names = list(mine)
    together = distances(mine, expected, cut, context.rank)
    errors = _largest(context, *(together[name] for name in names))
    limits = _largest(context, *(alone[name] for name in names))
    for name, error, limit in zip(names, errors, limits, strict=True):
        yield Found(f"{_words(cut, False)}, bf16, {name}", error, 2 * limit + 1e-6)


def _largest(context: meshes.Context, *numbers: float) -> list[float]:
    """The largest of all ranks, of each number; NaN if there is one."""
    everyone: list[Sequence[float]] = [()] * context.ranks
    dist.all_gather_object(everyone, numbers, group=context.group)
    return torch.tensor(everyone, dtype=torch.float64).amax(0).tolist()


def _words(cut: Cut, own_window: bool) -> str:
    documents = "" if cut.documents is None else f", {len(cut.documents) - 1} documents"
    window = ", a window with its own keys" if own_window else ""
    return f"{cut.kind}, {cut.tokens:,} tokens{documents}{window}"
