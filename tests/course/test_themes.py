"""Pictures can be read on a light page and on a dark one; without a kernel they stand in the place
of what moves."""

from __future__ import annotations

import copy
from xml.etree import ElementTree

import ipywidgets
import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from nbconvert import HTMLExporter

from nsa_tutorial.course import checking, copying, data_flow, stills, themes
from nsa_tutorial.course.figures import INKS, PALETTE, SURFACE, Picture, new_figure, readable_on
from nsa_tutorial.course.widgets import panel

GROUNDS = {"light": (themes.WHITE, lambda c: c), "dark": (themes.DARK, themes.turned)}
themed = pytest.mark.parametrize("theme", GROUNDS)


def on(theme: str, ink: str, ground: str = SURFACE) -> float:
    """The contrast of two colours of a picture on a page of this theme."""
    shown = GROUNDS[theme][1]
    return themes.contrast(shown(ink), shown(ground))


def test_contrast_is_the_wcag_s() -> None:
    assert themes.contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert themes.contrast("#777777", "#FFFFFF") == pytest.approx(4.478, abs=1e-3)
    assert themes.contrast("#FF0000", "#FFFFFF") == pytest.approx(3.998, abs=1e-3)


def test_white_turns_into_the_ground_of_a_dark_page() -> None:
    assert themes.turned(themes.WHITE) == themes.DARK
    assert themes.turned("#000000") == "#EEEEEE"


def test_no_single_colour_is_text_on_both_grounds() -> None:
    """So a picture has to change with the page."""
    greys = [f"#{i:02X}{i:02X}{i:02X}" for i in range(256)]
    both = [min(themes.contrast(c, themes.WHITE), themes.contrast(c, themes.DARK)) for c in greys]
    assert max(both) < themes.TEXT


@themed
@pytest.mark.parametrize("name", PALETTE)
def test_words_can_be_read(theme: str, name: str) -> None:
    """In a colour on the page, and black or white on the colour."""
    assert on(theme, INKS[name]) >= themes.TEXT
    if name != "line":
        assert on(theme, readable_on(name), PALETTE[name]) >= themes.TEXT


@themed
@pytest.mark.parametrize("name", ["text", "faint", "line"])
def test_lines_can_be_seen(theme: str, name: str) -> None:
    assert on(theme, PALETTE[name]) >= themes.LINE


@themed
@pytest.mark.parametrize("here", [None, "compression", "kernels"])
def test_the_diagram_s_quiet_parts_can_be_read(theme: str, here: str | None) -> None:
    drawn = ElementTree.fromstring(data_flow.data_flow(here).svg())
    words = [text.get("fill").upper() for text in drawn.iter() if text.tag.endswith("}text")]
    # what stands in a box of its colour is looked at above
    on_the_page = [ink for ink in words if ink != SURFACE]
    assert len(on_the_page) > 5
    assert min(on(theme, ink) for ink in on_the_page) >= themes.TEXT


def test_a_live_picture_has_no_ground_of_its_own() -> None:
    figure, _ = new_figure(3, 2)
    drawn = Picture(figure, "nothing").svg()
    assert SURFACE.lower() not in drawn.lower()
    assert figure.patch.get_visible(), "the stored one has: it has to be read anywhere"


# -- without a kernel --


def small() -> ipywidgets.Widget:
    def render(n: int) -> tuple[Picture, str]:
        figure, axes = new_figure(3, 2)
        axes[0, 0].plot([0, n])
        return Picture(figure, f"a line up to {n}"), f"n is {n}."

    return panel("a line", render, n=ipywidgets.IntSlider(3, 0, 15, description="number"))


def stored(shown: object, **metadata: object) -> dict:
    """A notebook of one cell, as JupyterLab saves it after showing something."""
    data, facts = DisplayFormatter().format(shown)
    data[stills.WIDGET] = {"model_id": "of a kernel", "version_major": 2, "version_minor": 0}
    output = nbformat.v4.new_output("display_data", data, metadata={**facts, **metadata})
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("…", outputs=[output])])


def test_a_panel_brings_its_picture_along() -> None:
    p = small()
    p.set(n=7)
    data, facts = p._repr_mimebundle_()
    assert facts["image/png"]["alt"] == "a line up to 7"
    assert stills.WIDGET in data
    assert data["image/png"]
    assert data["text/plain"].startswith(stills.INTERACTIVE)


def test_a_fresh_copy_has_pictures_in_place_of_controls() -> None:
    made = copying.reader_copy(stored(small()))
    (output,) = made["cells"][0]["outputs"]
    assert stills.WIDGET not in output["data"]
    shown = output["data"]["text/html"]
    assert "Run this cell to move it." in shown
    assert 'alt="a line up to 3"' in shown
    assert themes.TURN in shown


def test_a_saved_copy_gets_them_back() -> None:
    """Whoever saves and closes a notebook finds the picture when they come back."""
    saved = stored(small())
    saved.cells.append(nbformat.v4.new_code_cell("x"))
    before = copy.deepcopy(saved)
    assert copying.without_controls(saved)
    assert "Run this cell to move it." in saved.cells[0].outputs[0].data["text/html"]
    assert copying.same(saved, before)
    assert not copying.without_controls(saved), "the second time changes nothing"


def test_buttons_are_not_stored() -> None:
    saved = stored(checking.Help("c", "n", checking.hint, checking.solution), **stills.LIVE)
    assert copying.without_controls(saved)
    assert saved.cells[0].outputs == []


def test_an_exported_page_has_a_text_for_every_picture() -> None:
    figure, _ = new_figure(3, 2)
    notebook = stored(Picture(figure, "what it shows"))
    notebook.cells += stored(small()).cells
    page, _ = HTMLExporter().from_notebook_node(nbformat.from_dict(copying.reader_copy(notebook)))
    assert 'alt="what it shows"' in page
    assert 'alt="a line up to 3"' in page
    assert "Run this cell to move it." in page
    assert "No description has been provided" not in page


# -- buttons below a verdict --


def test_a_button_gives_the_next_hint_and_the_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("dense_attention", "causal_weights")
    help_ = checking.Help(*asked, checking.hint, checking.solution)
    assert repr(help_) == 'Stuck? Run hint("dense_attention", "causal_weights").'
    help_.hint_button.click()
    first = help_.told.value
    assert "nsa-said" in first
    help_.hint_button.click()
    assert help_.told.value != first
    help_.solution_button.click()
    assert "def causal_weights" in help_.told.value.replace("</span>", "").replace(
        '<span class="keyword">', ""
    ).replace('<span class="function">', "")


def test_only_who_is_not_done_is_offered_help() -> None:
    def causal_weights(scores):
        return scores.softmax(-1)

    solved = checking._find("dense_attention", "causal_weights").solution
    assert len(checking.check("dense_attention", causal_weights=causal_weights)._below()) == 1
    assert checking.check("dense_attention", causal_weights=solved)._below() == []
