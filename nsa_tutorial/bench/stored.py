"""Runs of the benchmark as files: written, and read again.

`write` makes a `.json` or `.csv` file, or prints CSV; `read` takes a `.json` file back, also one
from before some columns came. `shared_columns` and `in_words` say what rows have in common, for the
table of `comparing` and the picture of `plotting`.
"""

from __future__ import annotations

import csv
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import torch

from nsa_tutorial.bench.inputs import Shape
from nsa_tutorial.bench.measuring import Row
from nsa_tutorial.runtime import environment

SIZES = tuple(field.name for field in fields(Shape))
# What tells one row from another.
NAMES = (*SIZES, "operator", "kernel", "order", "change", "direction", "lists")
WORDS = {
    "operator": "{}",
    "kernel": "{}",
    "order": "order {}",
    "change": "{}",
    "tokens": "{:,} tokens",
    "direction": "{}",
    "lists": "{} lists",
    "kv_heads": "KV heads: {}",
    "group": "group of {}",
    "width": "width {}",
    "value_width": "values' width {}",
    "block_size": "blocks of {}",
    "slots": "{} slots",
    "length": "summaries of {}",
    "stride": "stride {}",
    "window": "window of {}",
    "dtype": "{}",
}


class Run(NamedTuple):
    """What one command measured.

    Attributes:
        facts: `command`, `machine` and the versions.
        rows: the measurements.
    """

    facts: dict[str, object]
    rows: list[Row]


def about(command: Sequence[str]) -> dict[str, object]:
    """The machine, the versions and the command, for whoever reads the numbers later. Of a file,
    the command keeps the name: folders are the business of the machine alone."""
    env = environment.detect()
    processor = platform.processor() or platform.machine()
    return {
        "command": "python -m nsa_tutorial.bench " + shlex.join(map(_without_folders, command)),
        "machine": env.gpu or f"{processor}, {torch.get_num_threads()} threads",
        "python": env.python,
        "torch": env.torch,
        "triton": env.triton,
        "tilelang": env.tilelang,
    }


def _without_folders(argument: str) -> str:
    """`x.json` for `/some/folder/x.json`, and `--output=x.json` for `--output=folder/x.json`."""
    option, equals, value = argument.partition("=")
    if argument.startswith("--"):
        return option + equals + (value and Path(value).name)
    return Path(argument).name


def write(run: Run, path: Path | None) -> None:
    """Rows to a `.json` or `.csv` file, or as CSV to the standard output."""
    facts, rows = run
    if path is not None and path.suffix == ".json":
        stored = {**facts, "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(stored, indent=1) + "\n")
        return
    with (
        open(path, "w", newline="")
        if path is not None
        else open(sys.stdout.fileno(), "w", newline="", closefd=False) as file
    ):
        writer = csv.DictWriter(file, [*Row.__dataclass_fields__, *facts])
        writer.writeheader()
        for row in rows:
            numbers = {
                key: f"{x:.4g}" if isinstance(x, float) else x for key, x in asdict(row).items()
            }
            writer.writerow({**numbers, **facts})


def read(path: Path) -> Run:
    """A `.json` file that `write` made. A column that it lacks has its default. Files without a
    pass or without lists are older: they hold forwards, and lists were random.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        facts = json.loads(path.read_text())
        rows = [Row(**_completed(row)) for row in facts.pop("rows")]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected a .json file that the benchmark wrote with --output"
        ) from error
    return Run(facts, rows)


def _completed(row: Mapping[str, object]) -> dict[str, object]:
    has_lists = row["operator"] == "selected" and not row["kernel"].startswith("dense")
    return {"direction": "forward", "lists": "random" if has_lists else "", **row}


# -- what rows have in common --


def shared_columns(rows: Sequence[Row]) -> dict[str, object]:
    """Those of `NAMES` that are the same in all rows, with their values."""
    found = {name: {getattr(row, name) for row in rows} for name in NAMES}
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def in_words(columns: Mapping[str, object]) -> str:
    """Columns of one row as a phrase: "8,192 tokens, forward, random lists". What is empty or 0 is
    left out, and so is the width of values if it is the keys'."""
    told = {name: value for name, value in columns.items() if value}
    if told.get("value_width") == told.get("width"):
        told.pop("value_width", None)
    return ", ".join(text.format(told[name]) for name, text in WORDS.items() if name in told)
