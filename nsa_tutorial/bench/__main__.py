"""Measure the operators of a backend: `python -m nsa_tutorial.bench selected --backend triton
--tokens 8192 65536 --pass forward backward --lists random trained`.

Operators: `selected` and `window` attend to tokens, `compressed` to summaries. `selection` chooses
blocks by summaries, `indexing` by an indexer, `pooling` makes summaries, `gates` adds up three
branches, and `native` is all of NSA in one call, from queries, keys, values and gates. `decode` is
one token a sequence and has rows of its own; `hugging_face` is a sparse layer as transformers calls
it, and `host` counts launches.

Lists of tokens: `selected --block-size 1 --slots 2048`, and `indexing` with the same sizes, which
chooses them.

Every combination of the sizes given, of the kinds of lists and of the passes is one row: median and
spread of a call's time, the memory it takes on top of its inputs, the ratio to dense attention
measured in the same run, and the errors against fp64 for some queries and some blocks of keys, so
that no wrong kernel is ever called fast. Where a call could not run, its row says why. Rows go to a
CSV or JSON file, or as CSV to the standard output, with the machine, the versions and the command.

Passes: `forward` runs without a graph; `backward` is the gradients of the inputs alone; `both` is a
forward and its backward.

Lists: `random` lists have little in common from query to query, `smooth` ones nearly everything,
and `trained` ones as much as those of trained heads. `selection` and `native` choose their lists:
there, `--queries` says how queries are drawn, and `smooth` ones choose smooth lists. The column
`overlap` says how many blocks four neighbouring queries list together, over how many one does.

Orders: of `selected`, `--order queries tiles blocks` tells Triton how to walk the lists, and each
order is a row: a program for each query, for a few neighbours and the union of their lists, or for
each block of keys. With `auto`, Triton chooses.

Steps: of `selected`, `--steps` adds the kernels of TileLang or Triton with one decision changed at
a time; of `native`, each of its parts as a call of its own; of `selection`, its two kernels apart.
Triton's steps are changes to the order `queries`, so add that order to compare them with.

Stored runs: `--plot times.png` draws the rows when they are measured, and `plot times.json --output
times.png` draws them from a file, on any machine. `compare before.json after.json` prints a table
of two runs: ms before, ms after, and their ratio.

On a GPU, `triton.testing.do_bench` measures (the cache is emptied between calls), on a CPU
`torch.utils.benchmark`. Compilation is excluded. Times of the CPU say nothing about a GPU: there,
Triton is interpreted and TileLang runs one program after the other.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from nsa_tutorial.bench import decode, host, hugging_face, plotting, reading, stored
from nsa_tutorial.bench.drawing import DRIFTS, NEIGHBOURS
from nsa_tutorial.bench.inputs import Shape
from nsa_tutorial.bench.measuring import Plan, measure_shape
from nsa_tutorial.bench.operators import CHOOSING, OPERATORS
from nsa_tutorial.bench.options import seconds, too_large, whole, wrong_file
from nsa_tutorial.bench.problem import DTYPES, PASSES
from nsa_tutorial.bench.steps import has_steps
from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.checks import LARGEST_WIDTH
from nsa_tutorial.runtime.order import ORDERS
from nsa_tutorial.sparse.native_sparse_attention import NUM_INITIAL, NUM_LOCAL

BACKENDS = ("reference", "tilelang", "triton")
# with rows or options of their own
COMMANDS = {"decode": decode, "host": host, "hugging_face": hugging_face}
# On a GPU; always allowed, however few tokens there are.
DEFAULT_BLOCK_SIZE, DEFAULT_SLOTS = 64, 16
MAX_JOBS = 256


def parser() -> argparse.ArgumentParser:
    """The command line."""
    summary, _, rest = __doc__.partition("\n\n")
    result = argparse.ArgumentParser(
        "python -m nsa_tutorial.bench",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    operators = result.add_subparsers(dest="operator", required=True, metavar="operator")
    for command in COMMANDS.values():
        command.add_command(operators)
    for name, operator in OPERATORS.items():
        if not operator.summary:
            continue
        _add_options(
            operators.add_parser(
                name,
                help=operator.summary,
                description=operator.summary,
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            ),
            name,
        )
    reading.add_commands(operators)
    return result


def _add_options(p: argparse.ArgumentParser, name: str) -> None:
    """The options of one operator; their defaults are larger where there is a GPU."""
    on_gpu, operator = environment.detect().gpu is not None, OPERATORS[name]

    def several(option: str, default: list, text: str, **kind: object) -> None:
        p.add_argument(option, nargs="+", default=default, help=text, **kind)

    def sizes(option: str, on: list[int], off: list[int], text: str, **bounds: int) -> None:
        several(option, on if on_gpu else off, text, type=whole(**bounds), metavar="n")

    several("--backend", ["tilelang"], "what is measured", choices=BACKENDS)
    several("--pass", ["forward"], "of what", choices=PASSES, dest="directions")
    # the size of a block says where keys are judged, also where there are none
    p.set_defaults(steps=False, order=["auto"], lists=[""], block_size=[64], no_dense=True)
    p.set_defaults(group=[1], slots=[0], length=[0], stride=[0], window=[0])
    if name == "selected":
        several("--lists", ["random"], "how lists are drawn", choices=[*DRIFTS])
        several("--order", ["auto"], "how Triton walks them", choices=("auto", *ORDERS))
    if name in CHOOSING:
        kinds = ("random", "smooth")
        several(
            "--queries",
            ["random"],
            "how queries are drawn, which choose",
            choices=kinds,
            dest="lists",
        )
    if any(has_steps(name, *case) for case in itertools.product(BACKENDS, PASSES)):
        p.add_argument(
            "--steps",
            action="store_true",
            help="measure variants of the kernels, or parts of the call, too",
        )
    device = "cuda" if on_gpu else "cpu"
    p.add_argument("--device", choices=("cpu", "cuda"), default=device, help="where")
    sizes("--tokens", [8192, 65536], [128, 512], "queries, and keys", least=NEIGHBOURS)
    sizes("--kv-heads", [4], [1], "key/value heads")
    sizes("--width", [128], [64], "channels of queries and keys", most=LARGEST_WIDTH)
    p.add_argument(
        "--value-width",
        type=whole(most=LARGEST_WIDTH),
        metavar="n",
        default=argparse.SUPPRESS,
        help="channels of values, if others",
    )
    for option, on, off, text in (
        ("group", [16], [16], "query heads of a key/value head"),
        ("block_size", [DEFAULT_BLOCK_SIZE], [32], "tokens of a block"),
        ("slots", [DEFAULT_SLOTS], [4], "blocks of a list"),
        ("length", [32], [32], "tokens of a summary"),
        ("stride", [16], [16], "tokens from one summary's first to the next one's"),
        ("window", [512], [64], "keys of the window"),
    ):
        if option in operator.sizes:
            sizes("--" + option.replace("_", "-"), on, off, text)
    several("--dtype", ["float16"] if on_gpu else ["float32"], "of tensors", choices=DTYPES)
    if operator.has_dense:
        p.add_argument(
            "--no-dense", action="store_true", default=False, help="leave dense attention out"
        )
    p.add_argument(
        "--seconds", type=seconds, metavar="s", default=0.3, help="spent on each measurement"
    )
    p.add_argument(
        "--jobs",
        type=whole(most=MAX_JOBS),
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
    p.add_argument(
        "--plot",
        type=Path,
        metavar="file",
        default=argparse.SUPPRESS,
        help="also draw the rows: .png, .svg or .pdf",
    )


def shapes(options: argparse.Namespace) -> list[Shape]:
    """Every combination of the sizes given."""
    sizes = ("tokens", "kv_heads", "group", "width", "block_size", "slots", "dtype")
    sizes += ("length", "stride", "window")
    found = []
    for values in itertools.product(*(getattr(options, name) for name in sizes)):
        size = dict(zip(sizes, values, strict=True))
        found.append(Shape(**size, value_width=getattr(options, "value_width", size["width"])))
    return found


def fault(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, in one sentence, or None."""
    wrong = wrong_file(options, "output", (".json", ".csv"))
    wrong = wrong or wrong_file(options, "plot", plotting.SUFFIXES)
    if wrong is not None:
        return wrong
    if set(options.order) != {"auto"} and "triton" not in options.backend:
        got = ", ".join(options.order)
        return f"--order: got {got} without --backend triton, expected auto: Triton alone has more"
    if options.steps and options.device == "cpu":
        return "--steps: got --device cpu, expected cuda: on a CPU these times say nothing"
    least = max(options.length)
    if min(options.tokens) < least:
        return f"--tokens: got {min(options.tokens)}, expected at least {least}, a summary's length"
    if options.operator in CHOOSING and min(options.slots) < NUM_INITIAL + NUM_LOCAL:
        forced = NUM_INITIAL + NUM_LOCAL
        return f"--slots: got {min(options.slots)}, expected at least {forced}, the forced blocks"
    tokens, size = max(options.tokens), min(options.block_size)
    most = max(tokens, DEFAULT_BLOCK_SIZE)
    if max(options.block_size) > most:
        return f"--block-size: got {max(options.block_size)}, expected at most {most}, all tokens"
    most = max(-(-tokens // size), DEFAULT_SLOTS)
    if max(options.slots) > most:
        return (
            f"--slots: got {max(options.slots)}, expected at most {most}, "
            f"as many as there are blocks of {size} in {tokens} tokens"
        )
    asked = itertools.product(options.backend, options.directions)
    if options.steps and not any(has_steps(options.operator, *case) for case in asked):
        known = ", ".join(
            f"{name} {direction}"
            for name, direction in itertools.product(BACKENDS, PASSES)
            if has_steps(options.operator, name, direction)
        )
        return f"--steps: got no kernel that has steps, expected one of: {known}"
    if options.device == "cuda" and not environment.detect().gpu:
        return "there is no CUDA device here"
    reasons = (
        environment.detect().why_not(name, options.device, dtype)
        for name, dtype in itertools.product(options.backend, options.dtype)
    )
    sizes = (too_large(shape, options.device) for shape in shapes(options))
    return next(filter(None, itertools.chain(reasons, sizes)), None)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 where a kernel as `ops` calls it was wrong
    or did not run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = parser()
    options = command.parse_args(arguments)
    if options.operator in COMMANDS:
        if (wrong := COMMANDS[options.operator].fault(options)) is not None:
            command.error(wrong)
        with torch.no_grad():
            return COMMANDS[options.operator].main(options, arguments) or 0
    if options.operator not in OPERATORS:
        try:
            reading.run(options)
        except ValueError as error:
            command.error(str(error))
        return 0
    wrong = fault(options)
    if wrong is not None:
        command.error(wrong)
    plan = Plan(
        options.operator, tuple(options.backend), tuple(options.directions), tuple(options.lists),
        options.device, options.steps, not options.no_dense, options.seconds, options.jobs,
        tuple(dict.fromkeys(options.order)),
    )  # fmt: skip
    rows = []
    with torch.no_grad(), tqdm(shapes(options), unit="shape", file=sys.stderr) as bar:
        for shape in bar:
            rows += measure_shape(shape, plan, bar)
    run = stored.Run(stored.about(arguments), rows)
    stored.write(run, getattr(options, "output", None))
    if "plot" in options:
        plotting.save(run, options.plot)
    ours = [row for row in rows if row.change == "" and not row.kernel.startswith("dense")]
    # the choice of blocks has no backward: no mistake
    written = [row for row in ours if not row.note.startswith("NotImplementedError")]
    return int(not all(row.is_right for row in written))


if __name__ == "__main__":
    sys.exit(main())
