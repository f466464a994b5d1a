"""Measure decoding: `python -m nsa_tutorial.bench decode --sequences 32 1 --tokens 65536`.

One token a sequence attends to a cache that holds `--tokens` of each: all three branches and the
gates, from queries and a cache to outputs, beside dense attention (PyTorch's own, which reads every
key and value) in the same run. Each is measured as a call, host included, and as a CUDA graph that
is replayed, with L2 emptied before each replay; `steps` are the kernels of a call by the profiler.
`mib` is what has to be read at least: keys, values and summaries. The output of the first and the
last sequence is compared with the reference in fp64, on given lists.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.bench import stored, timing
from nsa_tutorial.bench.options import memory_of, seconds, whole, wrong_run
from nsa_tutorial.bench.problem import DTYPES
from nsa_tutorial.runtime import environment

LENGTH, STRIDE, BLOCK_SIZE, TOP_N, WINDOW = 32, 16, 64, 16, 512


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kernel: a backend of NSA, or `"dense"`.
        sequences, tokens: of the cache.
        query_heads, kv_heads, width, dtype: of the queries, and of keys and values.
        mib: MiB of keys, values and summaries that a call has to read at least.
        call_us, graph_us: microseconds of a call with its host, and of a replayed graph; None where
            there is none (a CPU has no graphs).
        steps: microseconds of each kernel.
        error: largest difference from fp64 in the first and the last sequence; None for dense.
    """

    kernel: str
    sequences: int
    tokens: int
    query_heads: int
    kv_heads: int
    width: int
    dtype: str
    mib: float
    call_us: float
    graph_us: float | None
    steps: dict[str, float] = field(default_factory=dict)
    error: float | None = None


def add_command(operators: argparse._SubParsersAction) -> None:
    """`decode` and its options."""
    summary, _, rest = __doc__.partition("\n\n")
    on_gpu = environment.detect().gpu is not None
    p = operators.add_parser(
        "decode", help="one token a sequence attends to a cache", description=summary, epilog=rest
    )

    def several(option: str, on: list[int], off: list[int], text: str) -> None:
        default = on if on_gpu else off
        text += f" (default: {' '.join(map(str, default))})"
        p.add_argument(option, nargs="+", type=whole(), default=default, metavar="n", help=text)

    several("--sequences", [32, 1], [2], "sequences of the batch")
    several("--tokens", [8192, 65536], [512], "tokens of each in the cache")
    several("--kv-heads", [4], [1], "key/value heads")
    several("--group", [16], [4], "query heads of a key/value head")
    several("--width", [128], [32], "channels of queries, keys and values")
    backends = ("reference", "tilelang", "triton")
    default = ["triton" if on_gpu else "reference"]
    p.add_argument("--backend", nargs="+", choices=backends, default=default, help="of NSA")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16" if on_gpu else "float32")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    p.add_argument("--seconds", type=seconds, metavar="s", default=0.3)
    p.add_argument("--output", type=Path, metavar="file", help=".json; without it rows are printed")


def fault(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, in one sentence, or None."""
    wrong = wrong_run(options)
    if wrong is not None:
        return wrong
    asked = max(options.sequences) * max(options.tokens) * max(options.kv_heads)
    bytes_of_caches = 2 * asked * max(options.width) * DTYPES[options.dtype].itemsize
    memory = memory_of(options.device)
    if memory is not None and bytes_of_caches > memory:
        return (
            f"--sequences, --tokens, --kv-heads: got a cache of {bytes_of_caches / 2**30:,.0f} "
            f"GiB, expected at most {memory / 2**30:,.0f} GiB, this machine's memory"
        )
    reasons = (environment.detect().why_not(b, options.device, options.dtype)
               for b in options.backend if b != "reference")  # fmt: skip
    return next(filter(None, reasons), None)


def cache_of(
    sequences: int, tokens: int, kv_heads: int, group: int, width: int, dtype: torch.dtype,
    device: str,
) -> dict[str, object]:  # fmt: skip
    """A full cache, drawn, and one query a sequence: the arguments of `ops.decode_attention`."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def pair(places: int) -> tuple[Tensor, Tensor]:
        size = (sequences, places, kv_heads, width)
        return draw(*size), draw(*size)

    room = -(-tokens // STRIDE) * STRIDE
    return {
        "q": draw(sequences, 1, kv_heads * group, width), "compressed": pair(room // STRIDE),
        "selected": pair(room), "window": pair(min(WINDOW + 16, room)),
        "gates": [draw(sequences, 1, kv_heads * group).sigmoid() for _ in range(3)],
        "lengths": torch.full((sequences,), tokens, dtype=torch.int32, device=device),
        "block_counts": TOP_N, "block_size": BLOCK_SIZE, "window_size": WINDOW, "length": LENGTH,
        "stride": STRIDE,
    }  # fmt: skip


def dense_call(call: dict[str, object]) -> Callable[[], Tensor]:
    """Dense attention of the same queries to the tokens of the lists."""
    q = call["q"].transpose(1, 2)
    k, v = (x[:, : int(call["lengths"][0])].transpose(1, 2) for x in call["selected"])
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def error_of(call: dict[str, object], backend: str) -> float:
    """The largest difference from the reference in fp64, in the first and the last sequence, on
    lists that are drawn: rounding may choose others."""
    tokens, worst = int(call["lengths"][0]), 0.0
    blocks = torch.randperm(-(-tokens // BLOCK_SIZE), device=call["q"].device)[:TOP_N]
    H = call["selected"][0].shape[2]
    for b in {0, len(call["q"]) - 1}:
        row = slice(b, b + 1)

        def cut(x: object, row: slice = row) -> object:
            if isinstance(x, Tensor):
                return x[row]
            return [part[row] for part in x] if isinstance(x, (list, tuple)) else x

        one = {name: cut(x) for name, x in call.items()}
        one["block_indices"] = blocks.expand(1, 1, H, -1)
        found = ops.decode_attention(**one, backend=backend)
        exact = {
            name: [part.double() for part in x] if isinstance(x, list) else x
            for name, x in one.items()
        }
        exact["q"] = exact["q"].double()
        worst = max(worst, float((found - ops.decode_attention(**exact)).abs().max()))
    return worst


def measured(
    kernel: str, run: Callable[[], object], device: str, spent: float, **known: object
) -> Row:
    """A row of a call."""
    run()
    if device == "cpu":
        return Row(kernel, call_us=timing.measure(run, device, seconds=spent)[0] * 1e3,
                   graph_us=None, **known)  # fmt: skip
    return Row(
        kernel, call_us=call_time(run, spent), graph_us=graph_time(run, spent),
        steps=kernel_times(run), **known,
    )  # fmt: skip


def call_time(run: Callable[[], object], spent: float) -> float:
    """Microseconds of a call among many, host included."""
    from torch.utils.benchmark import Timer

    timer = Timer("run()", globals={"run": run})
    return timer.blocked_autorange(min_run_time=spent).median * 1e6


def graph_time(run: Callable[[], object], spent: float) -> float:
    """Microseconds of a replayed graph, with nothing of it in L2."""
    from triton.testing import do_bench

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return do_bench(graph.replay, warmup=50, rep=1000 * spent, return_mode="median") * 1e3


def kernel_times(run: Callable[[], object], calls: int = 10) -> dict[str, float]:
    """Microseconds of each kernel of a call, in their order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in trace.events():
        if event.device_type == DeviceType.CUDA:
            name = event.name[:60]
            found[name] = found.get(name, 0.0) + event.device_time_total / calls
    return found


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Every combination of the sizes: NSA on each backend, then dense attention."""
    sizes = (options.sequences, options.tokens, options.kv_heads, options.group, options.width)
    for sequences, tokens, kv_heads, group, width in product(*sizes):
        dtype = DTYPES[options.dtype]
        call = cache_of(sequences, tokens, kv_heads, group, width, dtype, options.device)
        known = {"sequences": sequences, "tokens": tokens, "query_heads": kv_heads * group}
        known |= {"kv_heads": kv_heads, "width": width, "dtype": options.dtype}
        token_mib = sequences * 2 * kv_heads * width * dtype.itemsize / 2**20  # a key and a value
        read = max(0, (tokens - LENGTH) // STRIDE + 1) + min(tokens, WINDOW)
        read += min(tokens, TOP_N * BLOCK_SIZE)
        for backend in options.backend:
            run = lambda: ops.decode_attention(**call, backend=backend)  # noqa: B023, E731
            yield measured(backend, run, options.device, options.seconds, **known,
                           mib=read * token_mib, error=error_of(call, backend))  # fmt: skip
        yield measured("dense", dense_call(call), options.device, options.seconds, **known,
                       mib=tokens * token_mib)  # fmt: skip


def main(options: argparse.Namespace, arguments: list[str]) -> None:
    """Measure, and write or print."""
    rows = []
    for row in rows_of(options):
        rows.append(row)
        graph = "" if row.graph_us is None else f", {row.graph_us:.1f} in a graph"
        print(f"{row.sequences} sequences of {row.tokens:,}, {row.kernel}: "
              f"{row.call_us:.1f} µs a call{graph}; reads {row.mib:.1f} MiB")  # fmt: skip
    if options.output is not None:
        facts = stored.about(arguments)
        text = json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1)
        options.output.write_text(text + "\n")
