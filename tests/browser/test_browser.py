"""The chapters in a real browser: JupyterLab runs them from top to bottom, and a reader's hand on a
control changes what is said.

Needs Chromium and the playwright package, which drives it and brings no browser of its own. Without
them these tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import ipywidgets
import pytest
from lab import CHROMIUM, Lab

from nsa_tutorial.course.widgets import Panel

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
exhaustive = pytest.mark.exhaustive  # make test runs a chapter's cells once, without a browser
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, folder)
    server = Lab(folder)
    yield server
    server.close()


class Shown:
    """A panel in the page, beside its twin: the same panel in this process, where it is what a
    tested pure function makes of it."""

    def __init__(self, lab: Lab, page, twin: Panel) -> None:
        """Find the panel by the names of the twin's controls, and bring it into view."""
        self.lab, self.page, self.twin = lab, page, twin
        self.box = page.locator(".nsa-panel")
        for name in twin.controls:
            self.box = self.box.filter(has=self.label(name))
        lab.scroll_to(page, self.box)
        self.said = self.box.locator(".widget-html-content p").first

    def label(self, name: str):
        return self.page.locator(
            ":is(.widget-label, .widget-label-basic "
            f"span):text-is('{self.twin.controls[name].description}')"
        )

    def control(self, name: str):
        return self.box.locator(":is(.widget-inline-hbox, .widget-toggle-buttons)").filter(
            has=self.label(name)
        )

    def value(self, name: str) -> object:
        """What a control shows, as the value that `render` gets."""
        control, drawn = self.twin.controls[name], self.control(name)
        if isinstance(control, ipywidgets.Dropdown):
            text = drawn.locator("select").evaluate("select => select.value")
        elif isinstance(control, ipywidgets.Checkbox):
            return drawn.locator("input").is_checked()
        elif isinstance(control, ipywidgets.ToggleButtons):
            text = drawn.locator(".mod-active").text_content()
        else:
            text = drawn.locator(".widget-readout").text_content()
        if isinstance(control, ipywidgets.IntSlider):
            return int(text)
        return next(value for label, value in control._options_full if label == text)

    def expected(self) -> str:
        return self.twin.set(**{name: self.value(name) for name in self.twin.controls})

    def press(self, name: str, key: str) -> None:
        """Press a key on a slider, as a reader would: the slider moves, and the panel says what the
        pure function gives."""
        before = self.value(name)
        for _ in range(3):  # a key pressed while the page is busy may be lost
            self.control(name).locator(".noUi-handle").focus()
            self.page.keyboard.press(key)
            with contextlib.suppress(AssertionError):
                self.lab.wait(lambda: self.value(name) != before, "the slider to move", 10)
                break
        assert self.value(name) != before, "the slider did not move"
        with contextlib.suppress(AssertionError):
            self.lab.wait(
                lambda: self.said.text_content() == self.expected(), "the panel to answer", 30
            )
        assert self.said.text_content() == self.expected()

    def walk(self, *moves: tuple[str, str]) -> None:
        """Press one key after the other; the panel never says the same twice."""
        said = [self.said.text_content()]
        for name, key in moves:
            self.press(name, key)
            said.append(self.said.text_content())
        assert len(set(said)) == len(said)

    def screenshot(self, path: Path) -> None:
        """A picture of the panel with all its controls, its sentence and its drawn image."""
        self.box.scroll_into_view_if_needed()
        self.box.screenshot(path=path)
        assert path.stat().st_size > 20_000
        assert self.box.locator("svg").first.bounding_box()["width"] > 400


@exhaustive
def test_chapter_00_runs_in_the_browser(lab: Lab, tmp_path: Path) -> None:
    start = time.monotonic()
    page = lab.run_all("00_start_here.ipynb")
    assert time.monotonic() - start < 90
    lab.scroll_to(page, page.locator(".jp-RenderedHTMLCommon table td:has-text('TileLang')"))
    page.screenshot(path=tmp_path / "00.png")
    assert (tmp_path / "00.png").stat().st_size > 20_000


@exhaustive
def test_chapter_01_slider(lab: Lab, tmp_path: Path) -> None:
    from nsa_tutorial.course.widgets import dense_attention

    shown = Shown(lab, lab.run_all("01_dense_attention.ipynb"), dense_attention.lookup_panel())
    said = shown.said.text_content()
    for _ in range(2):
        shown.press("query", "ArrowLeft")
    assert shown.said.text_content() != said
    shown.screenshot(tmp_path / "01.png")


@exhaustive
def test_chapter_03_moves(lab: Lab) -> None:
    from nsa_tutorial.course.widgets import online_softmax

    page = lab.run_all("03_online_softmax.ipynb")
    shown = page.locator(".nsa-softmax")
    lab.scroll_to(page, shown)
    for _ in range(2):
        shown.get_by_label("chunks read", exact=True).press("ArrowRight")
    said = shown.locator(".said")
    lab.wait(lambda: said.text_content() == online_softmax.sentence(3), "the figure to answer", 30)


@exhaustive
def test_chapter_05_mask_explorer(lab: Lab, tmp_path: Path) -> None:
    from nsa_tutorial.course.widgets import mask_explorer

    start = mask_explorer.Settings(data=mask_explorer.REAL, group=3, query=385)
    twin = mask_explorer.mask_explorer(start, "selected")
    shown = Shown(lab, lab.run_all("05_selected_attention.ipynb"), twin)
    shown.walk(("query", "ArrowLeft"), ("top_n", "ArrowRight"), ("N", "ArrowLeft"))
    values = {name: shown.value(name) for name in shown.twin.controls}
    show = values.pop("show")
    assert shown.said.text_content() == mask_explorer.sentence(
        mask_explorer.Settings(**values), show
    )
    shown.screenshot(tmp_path / "05.png")


@exhaustive
def test_chapter_11_stepper(lab: Lab, tmp_path: Path) -> None:
    from nsa_tutorial.course.widgets import triton_forward

    shown = Shown(lab, lab.run_all("11_triton_forward.ipynb"), triton_forward.explore())
    shown.walk(
        ("slot", "ArrowRight"),
        ("slot", "ArrowRight"),
        ("head", "ArrowRight"),
        ("token", "ArrowLeft"),
    )
    shown.screenshot(tmp_path / "11.png")


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param("03_online_softmax.ipynb", marks=exhaustive),
        pytest.param("01_dense_attention.ipynb", marks=exhaustive),
        pytest.param("05_selected_attention.ipynb", marks=exhaustive),
    ],
)
def test_what_the_browser_ran_has_no_stderr(lab: Lab, notebook: str) -> None:
    """What JupyterLab saves after a run, read back: every cell ran and none wrote to stderr."""
    page = next((p for p in lab.browser.pages if notebook in p.url), None) or lab.run_all(notebook)
    cells = json.loads(lab.save(page, notebook))["cells"]
    cells = [c for c in cells if c["cell_type"] == "code"]
    assert all(c["execution_count"] for c in cells)
    assert not [o for c in cells for o in c["outputs"] if o.get("name") == "stderr"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("notebook", ["08_native_sparse_attention.ipynb"])
def test_opening_a_chapter_changes_nothing(lab: Lab, notebook: str) -> None:
    """What JupyterLab saves is what is stored, to the byte, but for the number of another
    Python."""
    stored = (NOTEBOOKS / notebook).read_text(encoding="utf-8")
    page = lab.open(notebook)
    time.sleep(2)  # it then tells JupyterLab of itself
    saved = lab.save(page, notebook)
    here, there = (
        platform.python_version(),
        json.loads(stored)["metadata"]["language_info"]["version"],
    )
    assert saved.replace(f'"version": "{here}"', f'"version": "{there}"') == stored
