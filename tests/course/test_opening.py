"""README's opening picture: what moves in it is what the masks and the lists say."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from nsa_tutorial.course import opening
from nsa_tutorial.course.mask_report import explore

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
QUERIES = (45, 157, opening.STILL)


def moments(picture: str) -> dict[str, str]:
    """The shapes of each query, by the id of their group."""
    return dict(re.findall(r'<g class="m" id="(q\d+)">(.*?)</g>', picture))


@pytest.fixture(scope="module")
def few() -> str:
    return opening.drawn("light", QUERIES)


def test_a_moment_says_and_lights_up_what_its_query_reads(few: str) -> None:
    found = moments(few)
    assert list(found) == [f"q{query}" for query in QUERIES]
    for query in QUERIES:
        masks, told = explore(opening.settings_at(query))
        words = "".join(ElementTree.fromstring(f"<g>{found[f'q{query}']}</g>").itertext())
        assert f"Query {query} loads {told.keys['selected'][query]} keys" in words
        assert f"of {len(told.listed)} blocks" in words
        # one pixel of the row for each key
        (band,) = re.findall(rf'd="([^"]*)" fill="{opening.inks_of("light")["selected"]}"/>'
                             r'<path d="M[^"]*" stroke', found[f"q{query}"])  # fmt: skip
        lit = np.zeros(512, dtype=bool)
        for x, wide in re.findall(r"M(\d+) \d+h(\d+)", band):
            lit[int(x) - opening.TEXT :][: int(wide)] = True
        assert (lit == masks["selected"][query]).all()


def test_an_outline_is_around_its_rows() -> None:
    assert opening.outline(2, [(0, 3), (0, 3), (1, 5)]) == "M0 2H3V4H5V5H1V4H0z"


def test_each_query_has_its_time(few: str) -> None:
    """All of the time, one query is shown, and it goes down the text and back."""
    hours = opening.timeline(QUERIES)
    assert [query for query, _ in hours] == [45, 157, 389, 157]
    whole, shown = sum(seconds for _, seconds in hours), 0.0
    for query in QUERIES:
        (steps,) = re.findall(rf"@keyframes k{query}{{(.*?}})}}", few)
        marks = [(float(at), how) for at, how in re.findall(r"([\d.]+)%{visibility:(\w+)", steps)]
        times = itertools.pairwise(marks)
        mine = sum(end - at for (at, how), (end, _) in times if how == "visible") * whole / 100
        assert mine == pytest.approx(sum(s for of, s in hours if of == query), abs=1e-3)
        shown += mine
    assert shown == pytest.approx(whole, abs=1e-2)


@pytest.mark.parametrize("theme", opening.THEMES)
def test_the_stored_pictures_are_what_the_command_makes(theme: str) -> None:
    stored = {ending: (ROOT / "assets" / f"opening_{theme}{ending}.svg").read_text()
              for ending in ("", "_still")}  # fmt: skip
    assert stored["_still"] == opening.drawn(theme, (opening.STILL,))
    found = moments(stored[""])
    assert list(found) == [f"q{query}" for query in opening.QUERIES]
    assert found[f"q{opening.STILL}"] == moments(stored["_still"])[f"q{opening.STILL}"]
    assert len(stored[""]) < 1_000_000
    assert ElementTree.fromstring(stored[""]).tag == f"{SVG}svg"
    assert not re.search(r'<script|(?:href|src)="(?!#)|url\((?!#)', stored[""])


def test_the_page_shows_each_of_them() -> None:
    page = (ROOT / "README.md").read_text()
    names = re.findall(r'(?:srcset|src)="assets/(opening_[\w.]+)"', page)
    assert sorted(names) == sorted(path.name for path in (ROOT / "assets").glob("opening_*"))
    assert "assets/opening_light.svg" in page.partition("## ")[0]


@pytest.mark.parametrize(("call", "error"), [
    (lambda: opening.drawn("blue"), r"theme: expected one of \['light', 'dark'\], got 'blue'"),
    (lambda: opening.drawn("dark", (7,)), "still: expected one of the queries, got 389"),
])  # fmt: skip
def test_wrong_arguments_are_refused(call, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        call()
