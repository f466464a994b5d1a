"""Which cells are found to show numbers of a stored measurement."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from nsa_tutorial.course.stored_numbers import MEASUREMENTS, imported, shows_measurements

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = {
    "ladder": "nsa_tutorial.course.widgets.triton_forward:draw_ladder",
    "pictures": "nsa_tutorial.course.widgets:triton_forward",
    "of_10": "nsa_tutorial.course.widgets:tilelang_forward",
    "of_13": "nsa_tutorial.course.widgets:backward_kernels",
    "np": "numpy",
}


@pytest.mark.parametrize(
    "source",
    [
        "open('assets/' + 'triton_forward_h200.json')",
        "rows(f'{backend}_backward_h200.json')",
        "ladder()",
        "pictures.draw_ladder()",
        "told = [row for row in pictures.measured()['rows']]",
        "of_10.measured()",
        "of_13.measured('triton')",
    ],
)
def test_a_cell_that_shows_a_measurement(source: str) -> None:
    assert shows_measurements(source, NAMES)


@pytest.mark.parametrize(
    "source",
    [
        "pictures.draw_packed()",
        "np.ones(3)",
        "unknown.measured()",
        "print('triton_forward_h200')",
        "x = 'my.json'",
        "%timeit pictures.measured()",
        "reveal('worst_change', slowest)",
    ],
)
def test_a_cell_that_shows_none(source: str) -> None:
    assert not shows_measurements(source, NAMES)


def test_what_is_imported() -> None:
    cells = ["import numpy as np\nimport torch", "if x:\n    from a.b import c as d, e", "%magic"]
    assert imported(cells) == {"np": "numpy", "d": "a.b:c", "e": "a.b:e"}


def test_chapters_with_recordings_are_seen() -> None:
    """The chapters that hold recordings are seen to do so."""
    assert MEASUREMENTS
    for name in ("10_tilelang_forward", "11_triton_forward", "14_selection_kernels"):
        cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4).cells
        sources = [cell.source for cell in cells if cell.cell_type == "code"]
        assert any(shows_measurements(source, imported(sources)) for source in sources), name
