"""Measure what the host costs: `python -m nsa_tutorial.bench host --tokens 2048 8192 32768`.

A call of Native Sparse Attention is queued launch by launch, and on a short text the device waits
for the next one. For a forward, and for the gradients alone, each row has the time of a call with
L2 emptied before it (`ms`), how long the host takes to queue it (`host_ms`), what its kernels take
together (`device_ms`), and the kernels themselves in their order, by the profiler (`kernels`, in
microseconds). Where `ms` is more than `device_ms`, the device has waited.

Three ways: `at once` is `ops.native_sparse_attention`; `branch by branch` calls public operators
one after the other, and adds up with PyTorch; `dense` is PyTorch's attention. Queries are drawn so
that neighbours choose much the same blocks, or so that they do not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.bench import stored, timing
from nsa_tutorial.bench.drawing import NEIGHBOURS
from nsa_tutorial.bench.inputs import Shape
from nsa_tutorial.bench.operators import GATES
from nsa_tutorial.bench.options import seconds, too_large, whole, wrong_run
from nsa_tutorial.bench.problem import DTYPES, Problem, dense_kernels
from nsa_tutorial.layer import NativeSparseAttention, NativeSparseAttentionConfig
from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.checks import LARGEST_WIDTH

LENGTH, STRIDE, BLOCK_SIZE, TOP_N, WINDOW = 32, 16, 64, 16, 512
MODEL_WIDTH = 1024
DIRECTIONS, QUERIES = ("forward", "backward"), ("smooth", "random")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        way: `"at once"`, `"branch by branch"`, `"dense"`, `"layer, eager"` or `"layer, compiled"`.
        direction, queries: of `DIRECTIONS`, or `"both"`; of `QUERIES`, empty for dense and layer.
        tokens, query_heads, kv_heads, width, dtype: of the call.
        ms, host_ms: of a call; of the host that queues it.
        device_ms: of its kernels; None on a CPU, as are the `kernels`.
        kernels: names and microseconds of the kernels, in their order.
    """

    way: str
    direction: str
    queries: str
    tokens: int
    query_heads: int
    kv_heads: int
    width: int
    dtype: str
    ms: float
    host_ms: float
    device_ms: float | None = None
    kernels: list[tuple[str, float]] | None = None


def branch_by_branch(p: Problem, backend: str) -> tuple[Tensor, ...]:
    """The output of `native`, by public operators."""
    windows = {"length": p.shape.length, "stride": p.shape.stride, "backend": backend}
    k_cmp, v_cmp = (ops.compress(x, **windows) for x in (p.k, p.v))
    o_cmp, lse = ops.compressed_attention(p.q, k_cmp, v_cmp, return_lse=True, **windows)
    sizes = {"top_n": p.shape.slots, "block_size": p.shape.block_size}
    ids = ops.select_blocks(p.q, k_cmp, lse, **sizes, **windows)
    sizes = {"block_size": p.shape.block_size, "window_size": p.shape.window, "backend": backend}
    o_slc, o_swa = ops.selected_and_window_attention(p.q, p.k, p.v, ids, **sizes)
    gates = (p.tensors[name][..., None] for name in GATES)
    return (sum(g * o for g, o in zip(gates, (o_cmp, o_slc, o_swa), strict=True)),)


def add_command(operators: argparse._SubParsersAction) -> None:
    """`host` and its options."""
    summary, _, rest = __doc__.partition("\n\n")
    on_gpu = environment.detect().gpu is not None
    p = operators.add_parser(
        "host", help="what the host costs, launch by launch", description=summary, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip

    def several(option: str, on: list[int], off: list[int], text: str, **bounds: int) -> None:
        default = on if on_gpu else off
        text += f" (default: {' '.join(map(str, default))})"
        kind = {"type": whole(**bounds), "metavar": "n"}
        p.add_argument(option, nargs="+", default=default, help=text, **kind)

    several("--tokens", [2048, 8192, 32768], [96], "queries, and keys", least=NEIGHBOURS)
    several("--kv-heads", [4], [1], "key/value heads")
    several("--group", [16], [2], "query heads of a key/value head")
    several("--width", [128], [16], "channels of queries, keys and values", most=LARGEST_WIDTH)
    p.add_argument("--queries", nargs="+", choices=QUERIES, default=[*QUERIES], help="that choose")
    p.add_argument("--backend", choices=("reference", "tilelang", "triton"),
                   default="triton" if on_gpu else "reference", help="of NSA")  # fmt: skip
    p.add_argument("--dtype", default="bfloat16" if on_gpu else "float32", choices=DTYPES)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    p.add_argument("--layer", nargs="+", type=whole(), default=[], metavar="n",
                   help="tokens with which to measure steps of the layer, too")  # fmt: skip
    p.add_argument("--seconds", type=seconds, metavar="s", default=0.3)
    p.add_argument("--output", type=Path, metavar="file", help=".json; without it rows are printed")


def fault(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, in one sentence, or None."""
    reasons = [
        wrong_run(options),
        environment.detect().why_not(options.backend, options.device, options.dtype),
        *(too_large(shape, options.device) for shape in shapes(options)),
    ]
    return next(filter(None, reasons), None)


def shapes(options: argparse.Namespace) -> list[Shape]:
    """One for each combination of the sizes."""
    sizes = product(options.tokens, options.kv_heads, options.group, options.width)
    return [
        Shape(
            tokens=tokens, kv_heads=kv_heads, group=group, width=width, value_width=width,
            block_size=BLOCK_SIZE, slots=TOP_N, dtype=options.dtype, length=LENGTH, stride=STRIDE,
            window=WINDOW,
        )
        for tokens, kv_heads, group, width in sizes
    ]  # fmt: skip


def host_time(call: Callable[[], object], calls: int = 30) -> float:
    """Milliseconds until a call returns to an idle host whose device is idle, too: the median."""
    found = []
    for _ in range(calls):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - start))
    return timing.quantiles(found)[0]


def kernels_of(call: Callable[[], object]) -> list[tuple[str, float]]:
    """The kernels of a call in their order, and the microseconds of each."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name[:70], round(e.device_time_total, 2)) for e in events]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of a command, one after the other."""
    for shape in shapes(options):
        known = {"tokens": shape.tokens, "query_heads": shape.kv_heads * shape.group}
        known |= {"kv_heads": shape.kv_heads, "width": shape.width, "dtype": shape.dtype}
        for queries in options.queries:
            problem = Problem.make("native", shape, options.device, queries)
            ways = {
                "branch by branch": partial(branch_by_branch, backend=options.backend),
                "at once": lambda p: p.run(options.backend),
            }
            for (way, run), direction in product(ways.items(), DIRECTIONS):
                call = problem.prepare(direction, run)
                named = {"way": way, "direction": direction, "queries": queries}
                yield row(call, options, **named, **known)
        *_, dense = dense_kernels(problem).values()
        for direction in DIRECTIONS:
            named = {"way": "dense", "direction": direction, "queries": ""}
            yield row(dense(direction), options, **named, **known)


def row(call: Callable[[], object], options: argparse.Namespace, **known: object) -> Row:
    """The measurements of one call."""
    call()
    ms = timing.measure(call, options.device, seconds=options.seconds)[0]
    found = Row(ms=ms, host_ms=host_time(call), **known)
    if options.device == "cpu":
        return found
    kernels = kernels_of(call)
    return Row(**{**asdict(found), "kernels": kernels,
                  "device_ms": sum(us for _, us in kernels) / 1e3})  # fmt: skip


def layer_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One training step of the layer with means for summaries, eager and compiled: a forward and
    its backward, from `x [1, tokens, MODEL_WIDTH]`."""
    sizes = (options.layer, options.kv_heads, options.group, options.width)
    for (tokens, kv_heads, group, width), way in product(product(*sizes), ("eager", "compiled")):
        config = NativeSparseAttentionConfig(
            width=MODEL_WIDTH, query_heads=kv_heads * group, kv_heads=kv_heads, key_width=width,
            value_width=width, compression="mean", backend=options.backend,
        )  # fmt: skip
        torch.manual_seed(0)
        layer = NativeSparseAttention(config).to(options.device, DTYPES[options.dtype])
        layer = torch.compile(layer) if way == "compiled" else layer
        size = (1, tokens, MODEL_WIDTH)
        x = torch.randn(size, device=options.device, dtype=DTYPES[options.dtype])
        d_o = torch.randn_like(x)

        def step(layer: torch.nn.Module = layer, x: Tensor = x, d_o: Tensor = d_o) -> None:
            layer.zero_grad(set_to_none=True)
            with torch.enable_grad():
                layer(x).backward(d_o)

        yield row(
            step, options, way=f"layer, {way}", direction="both", queries="", tokens=tokens,
            query_heads=kv_heads * group, kv_heads=kv_heads, width=width, dtype=options.dtype,
        )  # fmt: skip


def main(options: argparse.Namespace, arguments: list[str]) -> None:
    """Measure, and write or print."""
    found = []
    for measured in itertools.chain(rows(options), layer_rows(options)):
        found.append(measured)
        launches = "" if measured.kernels is None else f", {len(measured.kernels)} launches"
        print(
            f"{measured.tokens:,} tokens, {measured.queries or 'no'} queries, {measured.way}, "
            f"{measured.direction}: {measured.ms:.3f} ms, host {measured.host_ms:.3f} ms{launches}",
            flush=True,
        )
    if options.output is not None:
        text = {**stored.about(arguments), "rows": [asdict(x) for x in found]}
        options.output.write_text(json.dumps(text, indent=1) + "\n")
