"""JupyterLab and Notebook 7 on a folder of notebooks, and a browser that looks at them.

Needs Chromium (`CHROMIUM` is None without it) and the playwright package, which drives it and
brings no browser of its own. Tests that import this module are skipped without playwright.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.sign import NotebookNotary

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    f"--{flag}"
    for flag in (
        "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync",
    )
]  # fmt: skip
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
ROUTES = {"lab": "lab/tree", "notebook": "notebooks"}


class Lab:
    """A server for `folder`, with JupyterLab and Notebook 7, and a browser.

    Args:
        folder: what the server shows; notebooks are named by their path in it.
        state: where settings, signatures, the log and the browser's profile go; by default
            `folder`, in folders that Jupyter hides.
    """

    def __init__(self, folder: Path, state: Path | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.folder, self.state = folder, state or folder
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
            "JUPYTER_CONFIG_DIR": str(self.state / ".config"),
            "JUPYTER_DATA_DIR": str(self.state / ".data"),
            "JUPYTERLAB_SETTINGS_DIR": str(self.state / ".settings"),
        }
        # no question over the pictures
        self.set("apputils-extension/notification", fetchNews="false")
        self.log = (self.state / "lab.log").open("w")
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
            str(self.state / ".profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport={"width": 1400, "height": 1000},
        )

    def set(self, plugin: str, **settings: object) -> None:
        """A reader's settings of one of JupyterLab's plugins, for the pages opened from now on."""
        path = self.state / ".settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))

    def trust(self, notebook: str) -> None:
        """Sign a notebook's stored outputs, as `jupyter trust` does; others are sanitised."""
        data = self.state / ".data"
        data.mkdir(exist_ok=True)
        NotebookNotary(data_dir=str(data)).sign(nbformat.read(self.folder / notebook, 4))

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

    def shut(self, notebook: str) -> None:
        """End a notebook's kernel, which holds half a GiB."""
        address = f"{self.url}/api/kernels/{self.kernel(notebook)['id']}"
        head = {"Authorization": "token t"}
        urllib.request.urlopen(urllib.request.Request(address, method="DELETE", headers=head))

    def open(
        self,
        notebook: str,
        *,
        app: str = "lab",
        theme: str = "light",
        size: tuple[int, int] | None = None,
    ):
        """Open a notebook and wait until its cells are there and the kernel is idle.

        Args:
            notebook: its path in the folder.
            app: `"lab"` or `"notebook"`, for Notebook 7.
            theme: `"light"` or `"dark"`.
            size: width and height of the view; by default the browser's.

        Returns:
            The page.
        """
        self.set("apputils-extension/themes", theme=THEMES[theme])
        page = self.browser.new_page()
        if size:
            page.set_viewport_size({"width": size[0], "height": size[1]})
        page.goto(f"{self.url}/{ROUTES[app]}/{notebook}?token=t&reset")
        page.wait_for_selector(".jp-Notebook", timeout=60_000)
        drawn = f"body[data-jp-theme-light='{json.dumps(theme == 'light')}']"
        page.wait_for_selector(drawn, state="attached", timeout=60_000)
        self.wait(lambda: self.is_idle(notebook), "the kernel to connect")
        return page

    def run_all(self, notebook: str, **options: object):
        """`open` a notebook, run all its cells, wait for the last; returns the page."""
        page = self.open(notebook, **options)
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

    def save(self, page, notebook: str) -> str:
        """Save a notebook by the keyboard; what stands in its file then, once all of it is
        written."""
        path = self.folder / notebook
        before = path.stat().st_mtime_ns
        page.bring_to_front()
        page.keyboard.press("Escape")
        page.keyboard.press("Control+s")

        def is_written() -> bool:
            with contextlib.suppress(json.JSONDecodeError):  # until then, half of it stands there
                json.loads(path.read_text(encoding="utf-8"))
                return path.stat().st_mtime_ns > before
            return False

        self.wait(is_written, f"{notebook} to be saved")
        return path.read_text(encoding="utf-8")

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
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:  # it waits for kernels, and a busy machine is slow
            self.process.kill()
            self.process.wait()
        self.log.close()
