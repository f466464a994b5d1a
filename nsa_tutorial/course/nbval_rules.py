"""How `pytest --nbval` runs chapters: a short time limit for a cell, no addresses, times or pixels
in comparisons, `gpu` cells only on a GPU, and a reader's own cells only run. Numbers of a stored
measurement are compared as they stand, times too, also in a cell that is tagged
`nbval-ignore-output`.

A plugin of pytest; `conftest.py` at the top of the repository loads it.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import pytest

from nsa_tutorial.course.copying import MARKER, answers, source
from nsa_tutorial.course.stored_numbers import imported, shows_measurements

# Replaced on both sides before stored and new outputs are compared.
PATTERNS = {r"0x[0-9a-f]{6,}": "ADDRESS", r"\d+(\.\d+)? (µs|ms|s)\b": "TIME"}
MESSAGE = r"^[○✓✗] [\s\S]*"  # what the course says to its reader, whose answer it depends on
NBVAL_TIMEOUT_S, TIMEOUT_S = 2000, 60  # nbval's default, far longer than any cell here needs


def pytest_configure(config: pytest.Config) -> None:
    """A cell may take a minute, unless the command line says otherwise. Kernels share what they
    import, where no GPU forbids it: CUDA does not survive a fork."""
    if config.pluginmanager.hasplugin("nbval"):
        limit = config.option.nbval_cell_timeout
        config.option.nbval_cell_timeout = TIMEOUT_S if limit == NBVAL_TIMEOUT_S else limit
        if sys.platform == "linux" and not _has_gpu():
            from nsa_tutorial.course import forked_provisioner

            forked_provisioner.use()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A reader's copy is run only where it is asked for by name."""
    return True if (collection_path / MARKER).is_dir() else None


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Live pictures carry their pixels in HTML, too; what they show is in their plain text."""
    if hasattr(collector, "sanitize_patterns"):
        collector.sanitize_patterns.update(PATTERNS)
        collector.skip_compare += ("text/html",)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cells that cannot run here, and note those of which only the run counts."""
    cells = [item for item in items if hasattr(item, "cell")]
    gpu = [item for item in cells if "gpu" in item.cell.metadata.get("tags", [])]
    if gpu and not _has_gpu():
        items[:] = [item for item in items if item not in gpu]
        config.hook.pytest_deselected(items=gpu)
    copies = {item.path for item in cells if (item.path.parent / MARKER).is_dir()}
    compared = {path: _compared(path) for path in copies}
    for item in cells:
        cell = (item.cell.get("id"), item.cell.source)
        if item.path in copies and cell not in compared[item.path]:
            item.options["check"] = False
    _compare_measurements([item for item in cells if item.path not in copies])


def _compare_measurements(cells: list[pytest.Item]) -> None:
    """Compare the cells that show numbers of a stored measurement, but for messages in them."""
    imports = {
        path: imported(item.cell.source for item in cells if item.path == path)
        for path in {item.path for item in cells}
    }
    for item in cells:
        if shows_measurements(item.cell.source, imports[item.path]):
            item.options["check"] = item.parent.compare_outputs
            item.sanitize = functools.partial(re.sub, MESSAGE, "MESSAGE")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _compared(path: Path) -> set[tuple[str, str]]:
    """The cells of a reader's copy whose outputs are the course's to tell: neither answers nor
    the reader's own cells, and run before."""
    base = path.parent / MARKER / "base" / path.name
    if not base.exists():
        return set()
    mine, course = (json.loads(p.read_text(encoding="utf-8")) for p in (path, base))
    hidden = [c.get("id") for c in answers(mine)]
    known = {(c.get("id"), source(c)) for c in course["cells"]}
    ran = {
        (c.get("id"), source(c))
        for c in mine["cells"]
        if c.get("execution_count") is not None and c.get("id") not in hidden
    }
    return known & ran
