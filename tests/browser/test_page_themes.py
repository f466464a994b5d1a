"""A chapter's copy in JupyterLab, before and after it is run, on a light page and on a dark one:
pictures have the page's own ground, and nothing is an error for want of a kernel."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import nbformat
import numpy as np
import pytest
from lab import CHROMIUM, Lab
from PIL import Image

from nsa_tutorial.course import copying, execute, themes

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.exhaustive,  # in make test, tests/course/test_themes.py looks at the colours
]
CELLS = [
    "from nsa_tutorial.course import check\n"
    "from nsa_tutorial.course.data_flow import data_flow\n"
    "from nsa_tutorial.course.widgets import gradients as pictures\n"
    'data_flow("kernels")',
    "pictures.explore()",
    "def causal_weights(scores):\n    return scores.softmax(-1)",
    'check("dense_attention", causal_weights=causal_weights)',
]
GROUNDS = {"light": (255, 255, 255), "dark": (17, 17, 17)}
NAMES = [f"{theme}.ipynb" for theme in GROUNDS]
ERROR = "Error displaying widget"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    kernel = {"name": "python3", "display_name": "", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    stored = execute.execute(notebook, folder=folder)
    for name in NAMES:
        text = copying.text_of(copying.reader_copy(json.loads(nbformat.writes(stored))))
        (folder / name).write_text(text, encoding="utf-8")
    server = Lab(folder)
    for name in NAMES:
        server.trust(name)
    yield server
    server.close()


def edge(picture) -> tuple[float, ...]:
    """The mean colour of a strip at a picture's left edge, as the page shows it."""
    pixels = np.asarray(Image.open(io.BytesIO(picture.screenshot())).convert("RGB"), dtype=float)
    return tuple(np.median(pixels[4:-4, 2:5].reshape(-1, 3), 0))


def darkest_and_lightest(picture) -> tuple[str, str]:
    pixels = np.asarray(Image.open(io.BytesIO(picture.screenshot())).convert("L"))
    return tuple(f"#{v:02X}{v:02X}{v:02X}" for v in (int(pixels.min()), int(pixels.max())))


@pytest.mark.parametrize("theme", GROUNDS)
def test_a_copy_in_the_theme_of_the_page(lab: Lab, theme: str) -> None:
    name, ground = f"{theme}.ipynb", pytest.approx(GROUNDS[theme], abs=3)
    page = lab.open(name, theme=theme, size=(1400, 3000))
    # as it is first opened
    pictures = page.locator("img.nsa-picture")
    lab.wait(lambda: pictures.count() == 2, "both stored pictures")
    assert ERROR not in page.content()
    assert page.locator("p:has-text('Run this cell to move it.')").count() == 1
    for picture in pictures.all():
        assert edge(picture) == ground
        assert themes.contrast(*darkest_and_lightest(picture)) >= 10
        assert len(picture.get_attribute("alt")) > 20
    page.close()
    # run
    page = lab.run_all(name, theme=theme, size=(1400, 3000))
    drawn = page.locator(".nsa-panel .nsa-drawn svg")
    drawn.wait_for(timeout=30_000)
    assert edge(drawn) == ground
    assert themes.contrast(*darkest_and_lightest(drawn)) >= 10
    before = page.locator(".nsa-said").count()
    page.get_by_role("button", name="Hint", exact=True).click()
    lab.wait(lambda: page.locator(".nsa-said").count() == before + 1, "the hint")
    page.get_by_role("button", name="Solution", exact=True).click()
    lab.wait(lambda: page.locator(".nsa-listing").count() == 1, "the solution")
    # saved, and opened again without its kernel
    path = lab.folder / name
    saved = path.stat().st_mtime_ns
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    lab.wait(lambda: path.stat().st_mtime_ns > saved, "the notebook to be saved")
    lab.shut(name)
    page.close()
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert copying.without_controls(notebook)
    path.write_text(copying.text_of(notebook), encoding="utf-8")
    lab.trust(name)
    page = lab.open(name, theme=theme, size=(1400, 3000))
    lab.wait(lambda: page.locator("img.nsa-picture").count() == 3, "the pictures again")
    assert ERROR not in page.content()
    page.close()
