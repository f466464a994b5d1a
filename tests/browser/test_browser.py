"""The chapters in a real browser: JupyterLab runs them from top to bottom, and a reader's hand on a
control changes what is said.

Needs Chromium and the playwright package, which drives it and brings no browser of its own. Without
them these tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import ipywidgets
import pytest

from nsa_tutorial.course.widgets import Panel

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

exhaustive = pytest.mark.exhaustive  # make test runs a chapter's cells once, and one chapter's here

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
FLAGS = [
    f"--{flag}"
    for flag in (
        "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
            "disable-background-networking",
        "disable-component-update", "disable-sync",
    )
]  # fmt: skip


class Lab:
    """A JupyterLab server on a copy of the notebooks, and a browser that looks at it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        root = ["--allow-root"] if os.getuid() == 0 else []
        options = [
            "--no-browser",
            f"--port={port}",
            "--IdentityProvider.token=t",
            f"--ServerApp.root_dir={folder}",
            *root,
        ]
        variables = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(folder / ".config"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / ".settings"),
        }
        settings = folder / ".settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        # no question over the pictures
        (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
        self.folder, self.log = folder, (folder / "lab.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            stdout=self.log,
            stderr=self.log,
            env=variables,
            cwd=folder,
        )
        self.wait(lambda: self.api("status") is not None, "the server to answer")
        self.driver = playwright.sync_playwright().start()
        self.browser = self.driver.chromium.launch_persistent_context(
            str(folder / ".profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport={"width": 1400, "height": 1000},
        )

    def api(self, path: str) -> object:
        try:
            with urllib.request.urlopen(f"{self.url}/api/{path}?token=t", timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s for {what}"
            time.sleep(0.3)

    def kernel(self, notebook: str) -> dict:
        sessions = [s for s in self.api("sessions") or [] if s["path"] == notebook]
        return sessions[0]["kernel"] if sessions else {}

    def is_idle(self, notebook: str) -> bool:
        kernel = self.kernel(notebook)
        return kernel.get("execution_state") == "idle" and kernel.get("connections", 0) >= 1

    def run_all(self, notebook: str):
        """Open a notebook, run all its cells, wait for the last; returns the page."""
        page = self.browser.new_page()
        page.goto(f"{self.url}/lab/tree/{notebook}?token=t&reset")
        page.wait_for_selector(".jp-Notebook", timeout=60_000)
        self.wait(lambda: self.is_idle(notebook), "the kernel to connect")
        for _ in range(5):  # JupyterLab drops the command when it comes too early
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            time.sleep(1.5)
            if (
                self.kernel(notebook)["execution_state"] != "idle"
                or page.locator(".jp-InputPrompt:has-text('[*]')").count()
            ):
                break

        # The kernel is idle for a moment between two cells, and only cells in view are drawn: the
        # last cell's number counts.
        cells = json.loads((self.folder / notebook).read_text())["cells"]
        last = page.locator(
            f".jp-InputPrompt:text-is('[{sum(c['cell_type'] == 'code' for c in cells)}]:')"
        )
        to_end = (
            "for (const p of document.querySelectorAll('.jp-WindowedPanel-outer')) "
            "p.scrollTo(0, p.scrollHeight)"
        )

        def is_done() -> bool:
            page.evaluate(to_end)
            return self.is_idle(notebook) and last.count() == 1

        self.wait(is_done, f"{notebook} to run to its last cell")
        return page

    def scroll_to(self, page, target) -> None:
        """JupyterLab draws cells as they come into view: walk down until one holds `target`."""
        page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTo(0, 0)")
        for _ in range(150):
            time.sleep(0.3)
            if target.count():
                target.first.scroll_into_view_if_needed()
                return
            page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollBy(0, 600)")
        raise AssertionError(f"nothing matches {target}")

    def close(self) -> None:
        self.browser.close()
        self.driver.stop()
        self.process.terminate()
        self.process.wait(timeout=20)
        self.log.close()


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
        self.box = page.locator(".jp-OutputArea-output")
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
        image = self.box.locator("img").first
        assert image.evaluate("image => image.complete && image.naturalWidth > 400")


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


def test_chapter_03_slider(lab: Lab, tmp_path: Path) -> None:
    from nsa_tutorial.course.widgets import online_softmax

    twin = online_softmax.explore()
    shown = Shown(lab, lab.run_all("03_online_softmax.ipynb"), twin)
    for _ in range(2):
        shown.press(next(iter(twin.controls)), "ArrowRight")
    assert "After chunk" in shown.said.text_content()
    shown.screenshot(tmp_path / "03.png")


@exhaustive
def test_chapter_05_mask_explorer(lab: Lab, tmp_path: Path) -> None:
    from nsa_tutorial.course.widgets import mask_explorer

    shown = Shown(lab, lab.run_all("05_selected_attention.ipynb"), mask_explorer.mask_explorer())
    shown.walk(
        ("query", "ArrowLeft"),
        ("top_n", "ArrowRight"),
        ("block_size", "ArrowLeft"),
        ("window", "ArrowRight"),
    )
    settings = mask_explorer.Settings(
        **{name: shown.value(name) for name in shown.twin.controls if name != "show"}
    )
    assert shown.said.text_content() == mask_explorer.sentence(settings)
    shown.screenshot(tmp_path / "05.png")


@exhaustive
def test_chapter_11_stepper(lab: Lab, tmp_path: Path) -> None:
    from nsa_tutorial.course.widgets import triton_forward

    shown = Shown(lab, lab.run_all("11_triton_forward.ipynb"), triton_forward.explore())
    shown.walk(
        ("slot", "ArrowLeft"), ("slot", "ArrowLeft"), ("head", "ArrowRight"), ("token", "ArrowLeft")
    )
    shown.screenshot(tmp_path / "11.png")


@pytest.mark.parametrize(
    "notebook",
    [
        "03_online_softmax.ipynb",
        pytest.param("01_dense_attention.ipynb", marks=exhaustive),
        pytest.param("05_selected_attention.ipynb", marks=exhaustive),
    ],
)
def test_what_the_browser_ran_has_no_stderr(lab: Lab, notebook: str) -> None:
    """What JupyterLab saves after a run, read back: every cell ran and none wrote to stderr."""
    page = next((p for p in lab.browser.pages if notebook in p.url), None) or lab.run_all(notebook)
    path = lab.folder / notebook
    before = path.stat().st_mtime_ns
    page.bring_to_front()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    lab.wait(lambda: path.stat().st_mtime_ns > before, "the notebook to be saved")
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(c["execution_count"] for c in cells)
    assert not [o for c in cells for o in c["outputs"] if o.get("name") == "stderr"]


@pytest.mark.parametrize(
    "notebook",
    [
        "02_grouped_query_attention.ipynb",
        pytest.param("08_native_sparse_attention.ipynb", marks=exhaustive),
    ],
)
def test_opening_a_chapter_changes_nothing(lab: Lab, notebook: str) -> None:
    """What JupyterLab saves is what is stored, to the byte, but for the number of another
    Python."""
    path = lab.folder / notebook
    stored, before = (NOTEBOOKS / notebook).read_text(encoding="utf-8"), path.stat().st_mtime_ns
    page = lab.browser.new_page()
    page.goto(f"{lab.url}/lab/tree/{notebook}?token=t&reset")
    page.wait_for_selector(".jp-Notebook", timeout=60_000)
    lab.wait(lambda: lab.is_idle(notebook), "the kernel to connect")
    time.sleep(2)  # it then tells JupyterLab of itself
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    lab.wait(lambda: path.stat().st_mtime_ns > before, "the notebook to be saved")
    here, there = (
        platform.python_version(),
        json.loads(stored)["metadata"]["language_info"]["version"],
    )
    saved = path.read_text(encoding="utf-8")
    assert saved.replace(f'"version": "{here}"', f'"version": "{there}"') == stored
