"""The two commands of the benchmark that read stored runs: `plot` and `compare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from nsa_tutorial.bench import comparing, plotting, stored
from nsa_tutorial.bench.options import wrong_file


def add_commands(operators: argparse._SubParsersAction) -> None:
    """The two commands that read stored runs."""
    text = "draw a stored run: a bar for each row, a panel for each shape, pass and lists"
    p = operators.add_parser("plot", help=text, description=text)
    p.add_argument("run", type=Path, help="a .json file from --output")
    p.add_argument("--output", type=Path, required=True, metavar="file", help=".png, .svg or .pdf")
    text = "print a table of two stored runs: ms before, ms after, and their ratio"
    p = operators.add_parser("compare", help=text, description=text)
    for name in ("before", "after"):
        p.add_argument(name, type=Path, help="a .json file from --output")


def run(options: argparse.Namespace) -> None:
    """Run `plot` or `compare`.

    Raises:
        ValueError: a file is not what it should be, in one sentence.
    """
    if options.operator == "compare":
        before, after = stored.read(options.before), stored.read(options.after)
        print(comparing.compare(before, after), end="")
        return
    wrong = wrong_file(options, "output", plotting.SUFFIXES)
    if wrong is not None:
        raise ValueError(wrong)
    plotting.save(stored.read(options.run), options.output)
