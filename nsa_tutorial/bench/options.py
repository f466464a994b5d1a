"""Numbers and files of the command line: argparse types that say what came and what was expected,
whether a file can be written, and whether the tensors asked for fit into this machine.

argparse puts the option's name before the sentence of a type. This module measures nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch

from nsa_tutorial.bench.inputs import Shape
from nsa_tutorial.bench.problem import DTYPES
from nsa_tutorial.runtime import environment

MOST = 2**31 - 1  # what the operators take
LONGEST = 3600.0


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """The type of a whole number between two bounds, both included."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"got {text}, expected a whole number from {least:,} to {most:,}"
            )
        return value

    return number


def seconds(text: str) -> float:
    """The type of a time: above 0, an hour at most."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST:  # NaN neither
        raise argparse.ArgumentTypeError(
            f"got {text}, expected a number of seconds above 0, at most {LONGEST:,.0f}"
        )
    return value


def wrong_file(options: argparse.Namespace, name: str, suffixes: tuple[str, ...]) -> str | None:
    """Why a file that is to be written cannot be, in one sentence, or None: better before anything
    is measured than after."""
    path = getattr(options, name, None)
    if path is None:
        return None
    if path.suffix not in suffixes:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        return f"--{name}: got {path}, expected a name that ends in {known}"
    if not path.parent.is_dir():
        return f"--{name}: got {path}, but there is no folder {path.parent}"
    return None


def wrong_run(options: argparse.Namespace) -> str | None:
    """Why a run on `--device` that writes a `.json` file to `--output`, if any, cannot begin: one
    sentence, or None."""
    if options.device == "cuda" and not environment.detect().gpu:
        return "there is no CUDA device here"
    return wrong_file(options, "output", (".json",))


def too_large(shape: Shape, device: str) -> str | None:
    """One sentence where queries, keys, values, outputs and lists of a shape alone are more than
    this machine's memory, or None."""
    heads = shape.kv_heads * (shape.group + 1)  # queries and outputs, keys and values
    numbers = shape.tokens * heads * (shape.width + shape.value_width)
    taken = numbers * DTYPES[shape.dtype].itemsize + 4 * shape.tokens * shape.kv_heads * shape.slots
    memory = memory_of(device)
    if memory is None or taken <= memory:
        return None
    return (
        f"--tokens, --kv-heads, --group: got {shape.tokens:,}, {shape.kv_heads:,} and "
        f"{shape.group:,}, whose tensors take {taken / 2**30:,.0f} GiB, expected at most "
        f"{memory / 2**30:,.0f} GiB, this machine's memory"
    )


def memory_of(device: str) -> int | None:
    """Bytes of memory of the device, or None where Python cannot say."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):  # Windows
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
