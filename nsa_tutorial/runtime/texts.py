"""Text that every Python brings along, to train small models on: its standard library's sources
and the help topics of `pydoc`.

Which files are held out depends on a hash of their names alone, so they stay held out from one
Python version to the next.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TRAIN_BYTES = 6_000_000
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "turtledemo",
    "ensurepip",
}
START = 0  # the byte that begins every sequence; no Python source holds one


def documents() -> dict[str, bytes]:
    """The standard library's sources and the topics of `pydoc`, by name, in the order of their
    names."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    found = {f"pydoc topic {name}": text.encode() for name, text in topics.items()}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        generated = name.name.startswith("_sysconfigdata") or name.parts[0].startswith(
            ("config-", "pydoc_data")
        )
        if not generated and not SKIPPED.intersection(name.parts):
            # Windows stores both
            found[name.as_posix()] = path.read_bytes().replace(b"\r\n", b"\n")
    return dict(sorted(found.items()))


def is_held_out(name: str) -> bool:
    """Whether a document is kept away from training: one in sixteen, by a hash of its name."""
    return zlib.crc32(name.encode()) % 16 == 0


def split(
    texts: dict[str, bytes], train_bytes: int = TRAIN_BYTES
) -> tuple[Tensor, dict[str, bytes]]:
    """The bytes to train on, uint8 `[at most train_bytes]`, and the held-out documents by name."""
    train = bytes([START]).join(text for name, text in texts.items() if not is_held_out(name))[
        :train_bytes
    ]
    return torch.from_numpy(np.frombuffer(train, np.uint8).copy()), {
        n: t for n, t in texts.items() if is_held_out(n)
    }
