"""Figures that move without a kernel, in JupyterLab, where a cell reads and sets them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from lab import CHROMIUM, Lab

pytest.importorskip("anywidget")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.exhaustive,  # in make test, test_page_moving.py moves the same module on a page
]


def test_a_cell_reads_and_sets_it(tmp_path: Path) -> None:
    kernel = {"name": "python3", "display_name": "", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    notebook.cells = [
        nbformat.v4.new_code_cell(source)
        for source in (
            "from nsa_tutorial.course.moving import figure",
            'explorer = figure("masks", query=40)\nexplorer',
            "from pathlib import Path\n"
            "explorer.observe(lambda move: Path('read.txt').write_text(str(move.new)), 'query')",
            "explorer.window = 77",
        )
    ]
    nbformat.write(notebook, tmp_path / "moving.ipynb")
    lab = Lab(tmp_path)
    try:
        page = lab.run_all("moving.ipynb", theme="dark", size=(1280, 2000))
        said = page.locator(".nsa-masks .said")
        said.filter(has_text="Query 40 ").wait_for(timeout=30_000)
        root = page.locator(".nsa-moving")
        assert "invert" in root.evaluate("e => getComputedStyle(e).filter")
        assert page.get_by_label("window", exact=True).input_value() == "77"
        page.locator(".nsa-masks .mask canvas").focus()
        page.keyboard.press("End")
        page.keyboard.press("ArrowUp")  # JupyterLab would go to the cell above
        read = tmp_path / "read.txt"
        lab.wait(lambda: read.exists() and read.read_text() == "510", "the kernel to hear of it")
    finally:
        lab.close()
