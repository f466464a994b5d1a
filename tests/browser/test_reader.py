"""What a reader meets: the command behind `make lab` in a clone, with its own flags and address."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import CHROMIUM, FLAGS, playwright

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

ROOT = Path(__file__).resolve().parents[2]


class Reader:
    """A clone of the repository in another folder, JupyterLab on it, and a browser."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clone = folder, folder / "a clone"
        for name in self.git("ls-files", "--cached", "--others", "--exclude-standard", at=ROOT):
            if (ROOT / name).is_file():
                (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.clone / name)
        self.git("init", "--quiet")
        self.git("add", "--all")
        self.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "all")
        places = {"CONFIG_DIR": ".config", "DATA_DIR": ".data", "LAB_WORKSPACES_DIR": ".workspaces"}
        variables = {f"JUPYTER_{key}": str(folder / name) for key, name in places.items()}
        variables |= {
            "JUPYTERLAB_SETTINGS_DIR": str(folder / ".settings"),
            "PYTHONPATH": str(self.clone),
        }
        self.log = folder / "lab.log"
        command = [sys.executable, "-m", "nsa_tutorial.course.copies", "--lab", "--no-browser"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--ServerApp.port=0"], cwd=self.clone, env={**os.environ, **variables},
                stdout=log, stderr=log,
            )  # fmt: skip

    def git(self, *arguments: str, at: Path | None = None) -> list[str]:
        command = ["git", "-c", "core.quotePath=false", *arguments]
        done = subprocess.run(
            command, cwd=at or self.clone, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    def address(self) -> str:
        """The one that JupyterLab prints."""
        for _ in range(300):
            found = re.search(r"http://127\.0\.0\.1:\d+/\S+", self.log.read_text())
            if found:
                return found.group()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.3)
        raise AssertionError(self.log.read_text())

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:  # a busy machine is slow
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not in a clone")
    one = Reader(tmp_path_factory.mktemp("reader"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def page(reader: Reader) -> Iterator[object]:
    """The printed address, opened."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(reader.address())
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
        yield page
        browser.close()


@pytest.mark.exhaustive
def test_the_printed_address_leads_to_chapter_00(reader: Reader, page) -> None:
    assert "/lab/tree/my_chapters/00_start_here.ipynb" in reader.address()
    assert "00 · Start here" in page.locator(".jp-Notebook h1").first.text_content()
    page.wait_for_selector(".jp-DirListing-item")
    names = page.locator(".jp-DirListing-itemText").all_text_contents()
    assert names == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.exhaustive
def test_a_session_leaves_the_clone_clean(reader: Reader, page) -> None:
    """A cell is run and saved; then the link at the end opens the next chapter."""
    path = reader.clone / "my_chapters" / "00_start_here.ipynb"
    before = path.stat().st_mtime_ns
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=90_000)
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    time.sleep(3)
    for _ in range(20):
        page.keyboard.press("Control+s")
        time.sleep(1)
        if path.stat().st_mtime_ns > before:
            break
    assert path.stat().st_mtime_ns > before
    assert reader.git("status", "--porcelain") == []
    link = page.locator(".jp-Notebook a:text-is('Dense attention')").last
    for _ in range(60):  # cells are drawn as they come into view
        if link.count():
            break
        page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollBy(0, 1500)")
        time.sleep(0.3)
    link.click()
    page.wait_for_selector(".lm-TabBar-tab.lm-mod-current:has-text('01_dense_attention')")
    page.wait_for_selector(".jp-Notebook h1:has-text('01 · Dense attention')", timeout=60_000)
    assert "my_chapters/01_dense_attention.ipynb" in page.url
    assert reader.git("status", "--porcelain") == []
