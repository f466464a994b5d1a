"""The book in a browser without a network: every page in three widths and two themes, and what a
reader does there: search, switch the theme, open a fold, look a term up, print."""

from __future__ import annotations

import html
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from lab import CHROMIUM, FLAGS, playwright
from PIL import Image

from nsa_tutorial.course import themes

pytest.importorskip("myst_nb", reason="the book's packages are not installed: make book")
pytest.importorskip("sphinx_book_theme", reason="the book's packages are not installed: make book")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.exhaustive,  # tests/book looks at the pages that Sphinx is given
]
ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (390, 768, 1440)
MIB = 1_000_000
CHAPTER = "03_online_softmax"
FINDINGS = Path(__file__).with_name("page_findings.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, brought up to date."""
    done = subprocess.run(
        [sys.executable, "-m", "book"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "book" / "_build" / "html"


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    driver = playwright.sync_playwright().start()
    yield driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    driver.stop()


class Reader:
    """A page of the book, with what went wrong on it."""

    def __init__(self, browser, site: Path, theme: str = "light") -> None:
        context = browser.new_context(color_scheme=theme, offline=True)
        self.page, self.site, self.wrong = context.new_page(), site, []
        self.page.on("request", self._request)
        self.page.on("requestfailed", lambda request: self.wrong.append(f"no {request.url}"))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda told: told.type == "error" and self.wrong.append(told.text))

    def _request(self, request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.wrong.append(f"asks for {request.url}")

    def open(self, name: str):
        self.page.goto(f"file://{self.site / name}.html")
        self.page.evaluate("window.MathJax?.startup?.promise")
        return self.page


def test_every_page(site: Path, browser) -> None:
    """No request, no error, no sideways scrolling, readable text, and a name for everything that
    can be clicked or seen."""
    reader, wrong = Reader(browser, site), []
    for path in sorted(site.glob("*.html")):
        page = reader.open(path.stem)
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            wrong += [f"{path.stem}: {wide} px too wide for {width}"] * (wide > 0)
        for theme in ("light", "dark"):
            page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            found = page.evaluate(FINDINGS)
            wrong += [f"{path.stem}, {theme}: {finding}" for finding in found]
        wrong += [f"{path.stem}: {told}" for told in reader.wrong]
        reader.wrong.clear()
    assert not wrong, "\n".join(wrong[:50])


def test_pages_are_small_and_fetch_nothing(site: Path) -> None:
    fetched = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(?:https?:)?//"
        r"|<link[^>]*\shref=\"(?:https?:)?//"
        r"|url\(\s*[\"']?(?:https?:)?//|@import\s+[\"'](?:https?:)?//"
    )
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        assert not fetched.search(text), f"{path.name}: {fetched.search(text)[0]}"
        assert len(text.encode()) < MIB, f"{path.name} has {len(text.encode())} bytes"


def test_tables_of_exercises_are_tables(site: Path) -> None:
    raw = [path.name for path in site.glob("*.html") if re.search(r"\|[—-]+\|", path.read_text())]
    assert not raw


def test_links_within_the_book_lead_somewhere(site: Path) -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}
    places = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in pages.items()}
    lost = set()
    for name, text in pages.items():
        for link in re.findall(r'<a [^>]*href="(?!\w+:|#|//)([^"]+)"', text):
            to, _, anchor = html.unescape(link).partition("#")
            there = to in pages and (not anchor or unquote(anchor) in places[to])
            if not there and not (to not in pages and (site / to).is_file()):
                lost.add(f"{name}: {link}")
    assert not lost, "\n".join(sorted(lost))


def test_paper(site: Path, browser) -> None:
    """It has what folds hold, the picture of a figure that moves, with its sentence, and none of
    its controls."""
    page = Reader(browser, site).open("13_backward_kernels")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    folded = page.locator("details.hide > :not(summary)").first
    style = folded.evaluate("e => getComputedStyle(e).opacity + getComputedStyle(e).animationName")
    assert style == "1none"
    figure = page.locator("#nsa-inverse")
    assert figure.locator("svg").is_visible() and figure.locator(".said").is_visible()
    assert not figure.locator(":is(input, select, button):visible").count()


def test_search_finds_a_word(site: Path, browser) -> None:
    page = Reader(browser, site).open("search")
    page.goto(f"file://{site}/search.html?q=multiprocessors")
    page.locator(f"#search-results a[href*='{CHAPTER}']").first.wait_for(timeout=20_000)


def test_a_formula_is_set(site: Path, browser) -> None:
    page = Reader(browser, site).open(CHAPTER)
    assert page.locator("mjx-container").count() > 5


def test_the_switch_of_the_theme(site: Path, browser) -> None:
    """It leads to the dark page, and the picture there has the page's own ground."""
    page = Reader(browser, site).open(CHAPTER)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.get_by_role("button", name="Color mode").first.click()
    page.locator("button.theme-change-button[data-mode=dark]:visible").first.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    picture = page.locator("img.nsa-picture").first
    picture.scroll_into_view_if_needed()
    pixels = np.asarray(Image.open(io.BytesIO(picture.screenshot())).convert("RGB"), dtype=float)
    ground = np.median(pixels[4:-4, 2:5].reshape(-1, 3), 0)
    assert tuple(ground) == pytest.approx((17, 17, 17), abs=3)
    body = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert body == "rgb(17, 17, 17)" and themes.DARK == "#111111"


def test_an_answer_is_a_fold(site: Path, browser) -> None:
    """It hides the number until it is opened, and so does a hint; paper shows both."""
    page = Reader(browser, site).open(CHAPTER)
    answer = page.locator("details:has-text('it is 1.4375')").first
    text = answer.locator(".nsa-said").first
    assert not text.is_visible()
    answer.locator("summary").first.click()
    assert text.is_visible()
    assert "Next time, guess first" not in page.content()
    hint = page.locator("details:has(> summary:text-is('Hint 1'))").first
    assert not hint.locator("p").first.is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert hint.locator("p").first.is_visible()


def test_a_term_says_what_it_means(site: Path, browser) -> None:
    """To the mouse and to the keyboard, within the page; a click leads to the glossary."""
    page = Reader(browser, site).open(CHAPTER)
    page.set_viewport_size({"width": 390, "height": 900})
    box, terms = page.locator("#definition"), page.locator("a.term")
    term = terms.filter(has_text="multiprocessors").first
    term.hover()
    assert "units of a GPU" in box.inner_text()
    edges = box.bounding_box()
    assert edges["x"] >= 0 and edges["x"] + edges["width"] <= 390
    page.mouse.move(0, 0)
    assert not box.is_visible()
    term.focus()
    assert box.is_visible() and term.get_attribute("aria-describedby") == "definition"
    term.click()
    assert page.locator(":target").inner_text().startswith("multiprocessor")


def test_a_figure_moves_without_a_kernel(site: Path, browser) -> None:
    page = Reader(browser, site).open("08_native_sparse_attention")
    figure = page.locator("#nsa-masks")
    before = figure.inner_text()
    figure.locator("input[type=range]").first.press("ArrowLeft")
    assert figure.inner_text() != before
