"""Every interactive in a real page: it fits, nothing in it scrolls, each control has a name, a key
moves the picture in time, and pictures are sharp and say what they show.

`pytest -m "" -s tests/browser/test_page_panels.py` prints the time from a key to the drawn picture.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import nbformat
import pytest
from lab import CHROMIUM, Lab, playwright

from nsa_tutorial.course import latency

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.exhaustive,  # in make test, tests/course/test_panels.py moves every control
]

PANELS = list(latency.panels())
MOVED = ["gradients.explore", "mask_explorer.mask_explorer"]  # once more, for tests that move them
Page, Locator = playwright.Page, playwright.Locator
HEIGHT = 560  # of 599 that JupyterLab leaves for a notebook on a screen of 1280 x 720
KEY_TO_PICTURE_MS = 100
ALLOWED_MS = 2 * KEY_TO_PICTURE_MS
ROUNDS = 5  # in which a late slider is asked again

MEASURED = """panel => {
  const parts = [panel, ...panel.querySelectorAll('*')];
  for (let o = panel.parentElement; !o.matches('.jp-Cell'); o = o.parentElement) parts.push(o);
  const scrolls = (part, way, size) =>
    part['scroll' + size] > part['client' + size] + 1
    && ['auto', 'scroll'].includes(getComputedStyle(part)['overflow' + way]);
  const named = part => part.getAttribute('aria-label') || part.labels?.length
    || part.tagName === 'BUTTON' && part.textContent.trim();
  const pen = document.createElement('canvas').getContext('2d');
  const cut = select => {
    pen.font = getComputedStyle(select).font;
    const widest = Math.max(...[...select.options].map(o => pen.measureText(o.text).width));
    return widest > select.clientWidth - 22;  // the arrow's
  };
  const box = panel.getBoundingClientRect();
  const svg = panel.querySelector('svg');
  return {
    height: box.height,
    scrolling: parts.filter(p => scrolls(p, 'X', 'Width') || scrolls(p, 'Y', 'Height'))
      .map(p => String(p.className)),
    outside: parts.filter(p => p.tagName !== 'STYLE' && panel.contains(p) && !p.closest('svg')
      && p.getBoundingClientRect().right > box.right + 1).map(p => String(p.className)),
    unnamed: [...panel.querySelectorAll('[role=slider], select, input, button, [contenteditable]')]
      .filter(p => !named(p)).map(p => p.outerHTML.slice(0, 99)),
    cut: [...panel.querySelectorAll('select')].filter(cut).map(s => s.labels[0].textContent),
    live: panel.querySelector('.nsa-sentence > .widget-html-content').getAttribute('aria-live'),
    finding: svg.getAttribute('aria-label'),
    drawn: svg.getBoundingClientRect().width,
    smallest: Math.min(...[...svg.querySelectorAll('text')].map(
      t => parseFloat(getComputedStyle(t).fontSize) * svg.getScreenCTM().a)),
  };
}"""
# waits for the picture that follows a key, and for the frame that shows it
ANSWERED = """panel => {
  window.answer = new Promise(done => {
    let pressed = 0;
    const note = () => { pressed = performance.now(); };
    panel.addEventListener('keydown', note, {once: true, capture: true});
    const watch = new MutationObserver(() => {
      watch.disconnect();
      requestAnimationFrame(() => setTimeout(() => done(performance.now() - pressed)));
    });
    watch.observe(panel.querySelector('.nsa-drawn'), {subtree: true, childList: true});
    setTimeout(() => { watch.disconnect(); done(null); }, 3000);
  });
}"""


STATIC = """from nsa_tutorial.course.widgets import online_softmax
online_softmax.draw_stream()"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("panels"))
    yield server
    server.close()


@contextmanager
def page_with(lab: Lab, names: list[str], **options: object) -> Iterator[Page]:
    """A page with these panels and a static picture, all run, in a notebook and kernel of its
    own."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    for name in names:
        module, maker = name.split(".")
        source = f"from nsa_tutorial.course.widgets import {module}\n{module}.{maker}()"
        notebook.cells.append(nbformat.v4.new_code_cell(source))
    notebook.cells.append(nbformat.v4.new_code_cell(STATIC))
    file = f"panels-{len(list(lab.folder.glob('*.ipynb')))}.ipynb"
    nbformat.write(notebook, lab.folder / file)
    page = lab.run_all(file, **options)
    yield page
    page.close()
    lab.shut(file)


class Everything:
    """A page with every panel, and those of `MOVED` once more; to make one takes ten seconds."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.held, self.page = lab, ExitStack(), None

    @contextmanager
    def opened(self) -> Iterator[Page]:
        """The page; a new one where a test has failed on it."""
        if self.page is None:
            self.page = self.held.enter_context(page_with(self.lab, [*PANELS, *MOVED]))
        try:
            yield self.page
        except BaseException:
            self.close()
            raise

    @contextmanager
    def moved(self, name: str) -> Iterator[tuple[Page, Locator]]:
        """The page, and a panel of it that one test moves."""
        with self.opened() as page:
            yield page, shown(page, len(PANELS) + MOVED.index(name))

    def close(self) -> None:
        self.page = None
        self.held.close()


@pytest.fixture(scope="module")
def everything(lab: Lab) -> Iterator[Everything]:
    kept = Everything(lab)
    yield kept
    kept.close()


def shown(page: Page, number: int):
    """The panel of a cell, in view."""
    cell = page.locator(".jp-CodeCell").nth(number)
    cell.scroll_into_view_if_needed()
    found = cell.locator(".nsa-panel")
    found.wait_for(timeout=30_000)
    found.locator("svg").wait_for(timeout=30_000)
    found.locator(".noUi-handle[aria-label]").first.wait_for(timeout=30_000)
    found.scroll_into_view_if_needed()
    return found


AXES = (("lab", "notebook"), ("light", "dark"), ((1280, 720), (1440, 900)))
# A third of the panels on one screen and on its opposite: each panel in every application, theme
# and size, and every pair of those on a page.
SCREENS = [
    pytest.param(PANELS[third::3], app, theme, size, id=f"{third}-{app}-{theme}-{size[0]}")
    for third, first in enumerate(((0, 0, 0), (0, 1, 1), (0, 0, 1)))
    for places in (first, [1 - place for place in first])
    for app, theme, size in [[axis[place] for axis, place in zip(AXES, places, strict=True)]]
]


@pytest.mark.parametrize(("names", "app", "theme", "size"), SCREENS)
def test_panels_fit_and_are_named(
    lab: Lab, tmp_path: Path, names: list[str], app: str, theme: str, size: tuple[int, int]
) -> None:
    with page_with(lab, names, app=app, theme=theme, size=size) as page:
        wrong = {}
        for number, name in enumerate(names):
            panel = shown(page, number)
            found = panel.evaluate(MEASURED)
            panel.screenshot(path=tmp_path / f"{name}.png")
            if bad := faults(found):
                wrong[name] = bad
        assert not wrong
        image = page.locator(".jp-RenderedHTMLCommon img, .jp-RenderedImage img").last
        image.scroll_into_view_if_needed()
        facts = image.evaluate("i => [i.alt, i.naturalWidth / i.getBoundingClientRect().width]")
        assert len(facts[0]) > 20, "the finding, for those who do not see it"
        assert facts[1] >= 1.9, "pixels of the picture for each of the page's"


def faults(found: dict) -> dict:
    """What is wrong with a measured panel."""
    bad = {key: found[key] for key in ("scrolling", "outside", "unnamed", "cut") if found[key]}
    if found["height"] > HEIGHT:
        bad["height"] = found["height"]
    if found["smallest"] < 8.5:
        bad["smallest letters, px"] = found["smallest"]
    if found["drawn"] < 400 or len(found["finding"] or "") < 20 or found["live"] != "polite":
        bad["picture or sentence"] = found
    return bad


def test_reset_brings_the_start_back(lab: Lab, everything: Everything) -> None:
    with everything.moved("gradients.explore") as (page, panel):
        said, drawn = panel.locator(".nsa-sentence p"), panel.locator("svg")
        start = said.text_content(), drawn.get_attribute("aria-label")
        panel.locator(".noUi-handle").first.focus()
        page.keyboard.press("ArrowRight")
        lab.wait(lambda: said.text_content() != start[0], "the panel to answer")
        panel.get_by_role("button", name="Reset").click()
        lab.wait(
            lambda: (said.text_content(), drawn.get_attribute("aria-label")) == start,
            "the panel to be as at the start",
        )


def test_controls_bound_each_other_and_say_so(lab: Lab, everything: Everything) -> None:
    """The mask explorer's text made as short as it can be: the query moves along, the panel says
    so, and what the sliders read is what is drawn. What is not shown greys its controls out."""
    with everything.moved("mask_explorer.mask_explorer") as (page, panel):
        said = panel.locator(".nsa-sentence p")
        tokens, query = (panel.get_by_role("slider", name=name) for name in ("tokens", "query"))
        before = int(float(query.get_attribute("aria-valuenow")))
        tokens.focus()
        page.keyboard.press("Home")
        lab.wait(lambda: "is out of range here, now" in said.text_content(), "the panel to say so")
        fewest = int(float(tokens.get_attribute("aria-valuenow")))
        last = int(float(query.get_attribute("aria-valuenow")))
        assert last == int(float(query.get_attribute("aria-valuemax"))) == fewest - 1
        assert f"query: {before} is out of range here, now {last}." in said.text_content()
        assert f"Query {last} " in panel.locator("svg").get_attribute("aria-label")
        greyed = panel.locator("[disabled] .noUi-handle")
        assert greyed.count() == 0
        panel.get_by_label("show").select_option("compressed")
        lab.wait(lambda: greyed.count() > 0, "controls that do nothing now to be greyed out")
        assert "window" in greyed.evaluate_all("hs => hs.map(h => h.ariaLabel)")


def test_a_key_moves_the_picture_in_time(
    lab: Lab, everything: Everything, capsys: pytest.CaptureFixture
) -> None:
    """Alone, each median lies under the budget. Other tests run on the same machine, so twice the
    budget is allowed here, the fastest of a slider's answers is judged, and a slider that is late
    is asked again, in a kernel that has drawn nothing yet: a slow panel has no fast answer."""
    late: dict[str, dict[str, list[float]]] = {}
    with everything.opened() as page:
        for number, name in enumerate(PANELS):
            panel = shown(page, number)
            for handle in panel.locator(".noUi-handle").all():
                label = handle.get_attribute("aria-label")
                times = answers(page, panel, handle)
                if not times:
                    continue
                with capsys.disabled():
                    print(
                        f"\n{name:42}{label:36}{statistics.median(times):6.0f} ms, "
                        f"at most {max(times):.0f}",
                        end="",
                    )
                if min(times) > ALLOWED_MS:
                    late.setdefault(name, {})[label] = times
    for _ in range(ROUNDS):
        for name, sliders in late.items():
            with page_with(lab, [name]) as page:
                panel = shown(page, 0)
                for label, times in sliders.items():
                    times += answers(page, panel, panel.get_by_role("slider", name=label))
        late = {
            name: kept
            for name, sliders in late.items()
            if (kept := {k: times for k, times in sliders.items() if min(times) > ALLOWED_MS})
        }
        if not late:
            break
        time.sleep(3)
    assert not late


def answers(page: Page, panel: Locator, handle: Locator) -> list[float]:
    """Milliseconds from a key on a slider to the drawn picture, up to three times, until one is
    judged to be in time; infinity where none comes. Each key leads to a value that was not drawn
    before: those are kept, and come back at once. None where the slider is greyed out or has
    nowhere to go."""
    low, now, high = (handle.get_attribute(f"aria-value{end}") for end in ("min", "now", "max"))
    if low == high or handle.locator("xpath=ancestor::*[@disabled]").count():
        return []
    key, end = ("ArrowRight", high) if now == low else ("ArrowLeft", low)
    times = []
    while len(times) < 3 and now != end:
        handle.focus()
        time.sleep(0.2)
        panel.evaluate(ANSWERED)
        page.keyboard.press(key)
        answer = page.evaluate("window.answer")
        times.append(math.inf if answer is None else answer)
        if times[-1] <= ALLOWED_MS:
            break
        now = handle.get_attribute("aria-valuenow")
    return times
