"""Measure the operators of a backend: `python -m nsa_tutorial.bench selected --backend tilelang
--tokens 8192 65536`.

Every combination of the sizes given is one row: median and spread of a call's time, the ratio to
dense attention measured in the same run, and the error against the fp64 reference on the last
queries, so that no wrong kernel is ever called fast. `--steps` adds the kernel of TileLang or
Triton with one decision changed at a time. Rows go to a CSV or JSON file, or as CSV to the standard
output; JSON also holds the machine, the versions and the command.

On a GPU, `triton.testing.do_bench` measures (the cache is emptied between calls), on a CPU
`torch.utils.benchmark`. Compilation is excluded. Times of the CPU say nothing about a GPU: there,
Triton is interpreted and TileLang runs one program after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from nsa_tutorial import ops
from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows

CHECKED_QUERIES = 64
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
class Row(Shape):
    """One measurement, of one shape.

    Attributes:
        operator, kernel, change: what ran; `change` says what differs from the kernel as `ops`
            calls it, empty where nothing does.
        ms, ms_low, ms_high: median, 20 % and 80 % quantile of a call, in milliseconds; None where
            it could not run.
        dense_ratio: time of the fastest dense attention of the same shape and run, over this one;
            None where none was measured.
        error: largest difference from the fp64 reference over the last queries.
        is_right: whether that is within 16 units of the dtype's precision; None where it was not
            judged.
        note: why it could not run.
    """

    operator: str
    kernel: str
    change: str
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    dense_ratio: float | None = None
    error: float | None = None
    is_right: bool | None = None
    note: str = ""


def random_blocks(tokens: int, kv_heads: int, block_size: int, slots: int, device: str) -> Tensor:
    """Lists `[1, tokens, kv_heads, slots]` of distinct causal blocks, the query's own first; -1
    where there are not enough."""
    generator = torch.Generator(device).manual_seed(0)
    num_blocks, parts = -(-tokens // block_size), []
    for start in range(0, tokens, 4096):
        own = (
            torch.arange(start, min(start + 4096, tokens), device=device)[:, None, None]
            // block_size
        )
        score = torch.rand(len(own), kv_heads, num_blocks, generator=generator, device=device)
        block = torch.arange(num_blocks, device=device)
        score = score.masked_fill(block > own, -1).masked_fill(block == own, 2)
        best, ids = score.topk(min(slots, num_blocks), -1)
        ids = F.pad(ids.masked_fill(best < 0, -1), (0, slots - ids.shape[-1]), value=-1)
        parts.append(ids.to(torch.int32))
    return torch.cat(parts)[None]


def measure(
    call: Callable[[], object], device: str, *, seconds: float
) -> tuple[float, float, float]:
    """Median, 20 % and 80 % quantile of a call's time, in milliseconds; the first call is not
    counted."""
    call()
    if device == "cuda":
        from triton.testing import do_bench

        return tuple(
            do_bench(call, warmup=100 * seconds, rep=1000 * seconds, quantiles=[0.5, 0.2, 0.8])
        )
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    times = (
        torch.tensor(timer.blocked_autorange(min_run_time=seconds).times, dtype=torch.float64) * 1e3
    )
    return tuple(times.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)).tolist())


@dataclass(frozen=True)
class Problem:
    """The tensors of a shape, and what kernels need to know of them."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    block_indices: Tensor
    rows: QueryRows

    @classmethod
    def make(cls, shape: Shape, device: str) -> Problem:
        """Draw them, the same ones every time."""
        generator = torch.Generator(device).manual_seed(1)
        dtype, heads = (
            DTYPES[shape.dtype],
            (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads),
        )
        q, k, v = (
            torch.randn(1, shape.tokens, n, width, generator=generator, device=device, dtype=dtype)
            for n, width in zip(heads, (shape.width, shape.width, shape.value_width), strict=True)
        )
        rows = query_rows(
            1, shape.tokens, shape.tokens, causal=True, cu_seqlens=None, device=q.device
        )
        ids = random_blocks(shape.tokens, shape.kv_heads, shape.block_size, shape.slots, device)
        return cls(shape, q, k, v, ids, rows)

    @property
    def window_size(self) -> int:
        """Keys of the window: as many as the lists name."""
        return self.shape.slots * self.shape.block_size

    def call(self, operator: str, backend: str) -> Tensor:
        """The operator's output on these tensors."""
        if operator == "window":
            return ops.sliding_window_attention(
                self.q, self.k, self.v, window_size=self.window_size, backend=backend
            )
        return ops.selected_attention(
            self.q, self.k, self.v, self.block_indices, block_size=self.shape.block_size,
            backend=backend
        )  # fmt: skip

    def last_queries(self) -> Problem:
        """The same with the last queries alone, in fp64: small enough for the reference."""
        n = CHECKED_QUERIES
        wide = (self.q[:, -n:].double(), self.k.double(), self.v.double())
        return replace(
            self, q=wide[0], k=wide[1], v=wide[2], block_indices=self.block_indices[:, -n:]
        )

    def judge(self, o: Tensor, truth: Tensor) -> tuple[float, bool]:
        """Largest error of the last queries, and whether it is rounding."""
        error = (o[:, -CHECKED_QUERIES:].double() - truth).abs().max().item()
        return error, error <= 16 * torch.finfo(
            self.q.dtype
        ).eps * truth.abs().max().item()  # False for NaN


def dense_calls(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Dense causal attention by name: PyTorch's flash and cuDNN kernels on a GPU, its own choice on
    a CPU."""
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))

    def dense(kernel: SDPBackend | None) -> Tensor:
        if kernel is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    if problem.q.device.type == "cpu" or problem.shape.dtype == "float32":
        return {"dense": lambda: dense(None)}
    kernels = {
        "dense, flash": SDPBackend.FLASH_ATTENTION,
        "dense, cuDNN": SDPBackend.CUDNN_ATTENTION,
    }
    return {name: lambda kernel=kernel: dense(kernel) for name, kernel in kernels.items()}


def tilelang_steps(problem: Problem) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The TileLang kernel with one decision changed at a time, and the published design it comes
    from."""
    from tilelang import PassConfigKey

    from nsa_tutorial.kernels import tilelang_first_draft, tilelang_forward, tilelang_launch
    from nsa_tutorial.kernels.tilelang_variants import variant

    shape = problem.shape
    options = {"block_counts": None, "include_own_block": False}
    ids = block_list(problem.block_indices, problem.rows, block_size=shape.block_size, **options)
    token_bytes = (shape.width + shape.value_width) * problem.q.element_size()
    ids, block_size = tilelang_launch.split_long_blocks(ids, shape.block_size, token_bytes)

    def changed(
        change: str = "", pass_configs: dict[object, object] | None = None, **numbers: int
    ) -> Callable[[], Tensor]:
        configs = tuple({**tilelang_forward.PASS_CONFIGS, **(pass_configs or {})}.items())
        return lambda: variant(change, **numbers).launch(
            problem.q, problem.k, problem.v, ids, problem.rows,
            block_size=block_size, scale=shape.width**-0.5, pass_configs=configs,
        )[0]  # fmt: skip

    def draft(num_stages: int) -> Callable[[], Tensor]:
        return lambda: tilelang_first_draft.run(
            problem.q, problem.k, problem.v, problem.block_indices, block_size=shape.block_size,
            num_stages=num_stages,
            **tilelang_first_draft.MENDED,
        )  # fmt: skip

    if shape.group % 16 == 0 and shape.width == shape.value_width <= 128:
        yield "first draft, mended, 2 stages", draft(2)
        yield "first draft, mended, 1 stage", draft(1)
    slots = ids.shape[-1]
    yield "values through registers", changed("values through registers")
    yield "weights through shared memory", changed("weights through shared memory")
    yield "no stage: each copy is waited for", changed(stages=0)
    yield "1 stage, number of slots fixed", changed(slots=slots)
    yield "2 stages, number of slots fixed", changed(slots=slots, stages=2)
    yield "3 stages, number of slots fixed", changed(slots=slots, stages=3)
    for threads in (32, 64, 128, 256):
        yield f"{threads} threads", changed(threads=threads)
    yield "exact exp2", changed("", {PassConfigKey.TL_ENABLE_FAST_MATH: False})
    yield "TMA off", changed("", {PassConfigKey.TL_DISABLE_TMA_LOWER: True})
    yield (
        "warp specialisation, 128 threads",
        changed("", {PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: False}, threads=128),
    )


def triton_steps(problem: Problem) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The Triton kernels, the one with pointers with one decision of its launch changed at a time,
    and the probe."""
    from nsa_tutorial.kernels import triton_descriptors, triton_forward, triton_probe

    shape = problem.shape
    ids = block_list(
        problem.block_indices,
        problem.rows,
        block_size=shape.block_size,
        block_counts=None,
        include_own_block=False,
    )
    # empty slots stand at the end of a list; now two blocks follow them, and they are walked
    between = ids.roll(-2, -1)

    def pointers(lists: Tensor = ids, **options: int) -> Callable[[], Tensor]:
        return changed(triton_forward.launch, lists, options)

    def descriptors(lists: Tensor = ids, **options: int) -> Callable[[], Tensor]:
        return changed(triton_descriptors.launch, lists, options)

    def changed(launch: Callable, lists: Tensor, options: dict[str, int]) -> Callable[[], Tensor]:
        return lambda: launch(
            problem.q, problem.k, problem.v, lists, problem.rows,
            block_size=shape.block_size, scale=shape.width**-0.5, **options,
        )[0][0]  # fmt: skip

    whole_block = max(16, shape.block_size)
    yield (
        "pointers, whole blocks, 2 warps, 2 stages",
        pointers(BT=whole_block, num_warps=2, num_stages=2),
    )
    yield "pointers", pointers()
    yield "pointers, empty slots walked", pointers(between)
    for BT in (16, 32, 64):
        if shape.block_size >= BT:
            yield f"pointers, steps of {BT} tokens", pointers(BT=BT)
    for warps in (1, 2, 4):
        yield f"pointers, {warps} warp{'s' * (warps > 1)}", pointers(num_warps=warps)
    for stages in (1, 2, 3, 4):
        yield f"pointers, {stages} stage{'s' * (stages > 1)}", pointers(num_stages=stages)
    if triton_descriptors.can_use_descriptors(problem.q, problem.k, problem.v, shape.block_size):
        yield "descriptors", descriptors()
        yield "descriptors, empty slots walked", descriptors(between)
        yield PROBE, lambda: triton_probe.loads_and_products(
            problem.q, problem.k, problem.v, ids, problem.rows, block_size=shape.block_size
        )  # fmt: skip
        yield "descriptors, 2 stages", descriptors(num_stages=2)
        yield (
            "descriptors, steps of 64 tokens, 2 stages",
            descriptors(BT=min(64, shape.block_size), num_stages=2),
        )


PROBE = "descriptors, loads and products alone"  # no attention, so there is nothing to judge
STEPS = {"tilelang": tilelang_steps, "triton": triton_steps}


def measure_shape(
    operator: str, names: list[str], shape: Shape, device: str, *, steps: bool, with_dense: bool,
    seconds: float, jobs: int,
    bar: tqdm,
) -> list[Row]:  # fmt: skip
    """All rows of one shape."""
    problem = Problem.make(shape, device)
    truth = problem.last_queries().call(operator, "reference")
    calls = [(name, "", lambda name=name: problem.call(operator, name)) for name in names]
    if steps:
        calls += [
            (name, change, call)
            for name in names
            if name in STEPS
            for change, call in STEPS[name](problem)
        ]
        bar.set_description(f"{shape.tokens} tokens, compiling {len(calls)} kernels")
        with ThreadPoolExecutor(
            jobs
        ) as pool:  # what goes wrong here goes wrong again below, and is noted there
            list(pool.map(lambda call: _attempt(call[2]), calls))
    rows = []
    for kernel, change, call in calls:
        bar.set_description(f"{shape.tokens} tokens, {kernel} {change}".strip())
        rows.append(
            _row(
                operator,
                kernel,
                change,
                problem,
                call,
                device,
                seconds,
                None if change == PROBE else truth,
            )
        )
    dense = dense_calls(problem) if with_dense else {}
    for name, call in dense.items():
        bar.set_description(f"{shape.tokens} tokens, {name}")
        rows.append(_row(operator, name, "", problem, call, device, seconds, None))
    fastest = min(
        (row.ms for row in rows if row.kernel in dense and row.ms is not None), default=None
    )
    if fastest is not None:
        rows = [replace(row, dense_ratio=fastest / row.ms) if row.ms else row for row in rows]
    return rows


def _attempt(call: Callable[[], object]) -> None:
    with contextlib.suppress(Exception), torch.no_grad():
        call()


def _row(
    operator: str, kernel: str, change: str, problem: Problem, call: Callable[[], Tensor],
    device: str, seconds: float,
    truth: Tensor | None,
) -> Row:  # fmt: skip
    row = Row(**asdict(problem.shape), operator=operator, kernel=kernel, change=change)
    try:
        if truth is not None:
            error, is_right = problem.judge(call(), truth)
            row = replace(row, error=error, is_right=is_right)
        ms, low, high = measure(call, device, seconds=seconds)
    except Exception as error:  # a compiler may refuse one of the variants: that is a result too
        return replace(
            row, note=f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
        )
    return replace(row, ms=ms, ms_low=low, ms_high=high)


def about(command: list[str]) -> dict[str, object]:
    """The machine, the versions and the command, for whoever reads the numbers later."""
    env = environment.detect()
    processor = platform.processor() or platform.machine()
    return {
        "command": "python -m nsa_tutorial.bench " + shlex.join(command),
        "machine": env.gpu or f"{processor}, {torch.get_num_threads()} threads",
        "python": env.python,
        "torch": env.torch,
        "triton": env.triton,
        "tilelang": env.tilelang,
    }


def write(rows: list[Row], facts: dict[str, object], path: Path | None) -> None:
    """Rows to a `.json` or `.csv` file, or as CSV to the standard output."""
    if path is not None and path.suffix == ".json":
        path.write_text(
            json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )
        return
    machine = {name: facts[name] for name in ("machine", "torch", "triton", "tilelang")}
    with (
        open(path, "w", newline="")
        if path is not None
        else open(sys.stdout.fileno(), "w", newline="", closefd=False) as file
    ):
        writer = csv.DictWriter(file, [*Row.__dataclass_fields__, *machine])
        writer.writeheader()
        for row in rows:
            numbers = {
                key: f"{x:.4g}" if isinstance(x, float) else x for key, x in asdict(row).items()
            }
            writer.writerow({**numbers, **machine})


def parser() -> argparse.ArgumentParser:
    """The command line."""
    on_gpu = environment.detect().gpu is not None
    summary, _, rest = __doc__.partition("\n\n")
    result = argparse.ArgumentParser(
        "python -m nsa_tutorial.bench",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    operators = result.add_subparsers(dest="operator", required=True, metavar="operator")
    for name, summary in (
        ("selected", "selected_attention: each query attends to a list of blocks"),
        ("window", "sliding_window_attention over slots * block-size keys"),
    ):
        p = operators.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        every = {"nargs": "+", "type": int, "metavar": "n"}
        p.add_argument(
            "--backend",
            nargs="+",
            choices=("reference", "tilelang", "triton"),
            default=["tilelang"],
            help="what is measured",
        )
        p.add_argument(
            "--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu", help="where"
        )
        p.add_argument(
            "--tokens",
            **every,
            default=[8192, 65536] if on_gpu else [128, 512],
            help="queries, and keys",
        )
        p.add_argument(
            "--kv-heads", **every, default=[4] if on_gpu else [1], help="key/value heads"
        )
        p.add_argument("--group", **every, default=[16], help="query heads of a key/value head")
        p.add_argument(
            "--width",
            **every,
            default=[128] if on_gpu else [64],
            help="channels of queries and keys",
        )
        p.add_argument(
            "--value-width",
            type=int,
            metavar="n",
            default=argparse.SUPPRESS,
            help="channels of values, if others",
        )
        p.add_argument(
            "--block-size", **every, default=[64] if on_gpu else [32], help="tokens of a block"
        )
        p.add_argument("--slots", **every, default=[16] if on_gpu else [4], help="blocks of a list")
        p.add_argument(
            "--dtype",
            nargs="+",
            choices=DTYPES,
            default=["float16"] if on_gpu else ["float32"],
            help="of tensors",
        )
        p.set_defaults(steps=False)
        if name == "selected":
            p.add_argument(
                "--steps",
                action="store_true",
                help="a kernel with one decision changed at a time, too",
            )
        p.add_argument("--no-dense", action="store_true", help="leave dense attention out")
        p.add_argument("--seconds", type=float, default=0.3, help="spent on each measurement")
        p.add_argument(
            "--jobs",
            type=int,
            metavar="n",
            default=min(16, os.cpu_count() or 1),
            help="kernels compiled at a time",
        )
        p.add_argument(
            "--output",
            type=Path,
            metavar="file",
            default=argparse.SUPPRESS,
            help=".json or .csv; without it CSV is printed",
        )
    return result


def shapes(options: argparse.Namespace) -> list[Shape]:
    """Every combination of the sizes given."""
    sizes = ("tokens", "kv_heads", "group", "width", "block_size", "slots", "dtype")
    found = []
    for values in itertools.product(*(getattr(options, name) for name in sizes)):
        size = dict(zip(sizes, values, strict=True))
        found.append(Shape(**size, value_width=getattr(options, "value_width", size["width"])))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 where a kernel as `ops` calls it was wrong
    or did not run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = parser()
    options = command.parse_args(arguments)
    path = getattr(options, "output", None)
    if path is not None and path.suffix not in (".json", ".csv"):
        command.error(f"--output: got {path}, expected a name that ends in .json or .csv")
    if options.steps and options.device == "cpu":
        command.error(
            "--steps: got --device cpu, expected cuda: on a CPU these decisions change nothing"
        )
    for name, dtype in itertools.product(options.backend, options.dtype):
        reason = environment.detect().why_not(name, options.device, dtype)
        if options.device == "cuda" and not environment.detect().gpu:
            reason = "there is no CUDA device here"
        if reason is not None:
            command.error(reason)
    rows = []
    with torch.no_grad(), tqdm(shapes(options), unit="shape", file=sys.stderr) as bar:
        for shape in bar:
            rows += measure_shape(
                options.operator, options.backend, shape, options.device, steps=options.steps,
                with_dense=not options.no_dense, seconds=options.seconds, jobs=options.jobs,
                bar=bar,
            )  # fmt: skip
    write(rows, about(arguments), path)
    return int(
        any(
            row.change == "" and not row.kernel.startswith("dense") and not row.is_right
            for row in rows
        )
    )


if __name__ == "__main__":
    sys.exit(main())
