"""Every interactive keeps one contract, whatever it draws; and pictures are sharp, small, and say
what they show."""

from __future__ import annotations

import gc
import io
import json
import random
import re
import statistics
from xml.etree import ElementTree

import ipywidgets
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from nsa_tutorial.course import latency
from nsa_tutorial.course.figures import PALETTE, Picture, grid, new_figure, readable_on
from nsa_tutorial.course.widgets import Panel, panel

SVG = "{http://www.w3.org/2000/svg}"
PANELS = latency.panels()

each = pytest.mark.parametrize("name", PANELS)


@pytest.fixture(scope="module")
def made() -> dict[str, Panel]:
    """One panel of each kind; a test that moves it puts it back."""
    return {}


def panel_of(made: dict[str, Panel], name: str) -> Panel:
    if name not in made:
        made[name] = PANELS[name]()
    made[name].reset()
    return made[name]


# -- one small panel, looked at from all sides --


def render(n: int, block: int, on: bool) -> tuple[Picture, str]:
    figure, axes = new_figure(3, 2)
    axes[0, 0].plot([0, n])
    return Picture(figure, f"up to {n}"), f"n < {n}, {block}, {on}"


def small() -> Panel:
    """`n` may not reach 4 times `block`; `on` counts from block 2 on."""
    return panel(
        "a test",
        render,
        limits=lambda n, block, on: {"n": range(4 * block)},
        idle=lambda n, block, on: {"on"} if block == 1 else (),
        n=ipywidgets.IntSlider(3, 0, 15, description="number"),
        block=ipywidgets.SelectionSlider(options=[1, 2, 4], value=4, description="block"),
        on=ipywidgets.Checkbox(False, description="on"),
    )


def test_a_panel_redraws() -> None:
    p = small()
    before = p.picture
    assert p.sentence == "n < 3, 4, False"
    assert p.set(n=4, on=True) == "n < 4, 4, True"
    assert p.picture != before
    assert repr(p) == "Interactive: a test (n, block, on). Run this cell to move it."


def test_a_control_that_has_to_move_is_said() -> None:
    p = small()
    p.controls["n"].value = 14
    p.controls["block"].value = 2
    assert p.values == {"n": 7, "block": 2, "on": False}
    assert p.moved == "number: 14 is out of range here, now 7."
    assert p.moved in p._message.value
    p.controls["n"].value = 5
    assert p.moved == ""
    p.controls["block"].value = 4
    assert (p.controls["n"].max, p.controls["n"].value) == (15, 5)


def test_limits_of_a_choice() -> None:
    p = panel(
        "a test",
        render,
        limits=lambda n, block, on: {"block": [b for b in (1, 2, 4) if b <= max(n, 1)]},
        n=ipywidgets.IntSlider(4, 0, 9, description="number"),
        block=ipywidgets.Dropdown(
            options={"one": 1, "two": 2, "four": 4}, value=4, description="block"
        ),
        on=ipywidgets.Checkbox(False, description="on"),
    )
    p.controls["n"].value = 3
    assert (p.values["block"], p.controls["block"].label) == (2, "two")
    assert p.moved == "block: 4 is out of range here, now 2."
    p.controls["n"].value = 9
    assert [label for label, _ in p.controls["block"]._options_full] == ["one", "two", "four"]


def test_reset_and_controls_that_do_nothing_now() -> None:
    p = small()
    p.set(n=1, block=1)
    assert p.controls["on"].disabled
    p.reset_button.click()
    assert p.values == {"n": 3, "block": 4, "on": False}
    assert not p.controls["on"].disabled
    assert p.controls["n"].max == 15


def test_a_step_back_is_not_drawn_again() -> None:
    calls = []

    def noted(n: int) -> tuple[Picture, str]:
        calls.append(n)
        return render(n, 1, False)

    p = panel("a test", noted, n=ipywidgets.IntSlider(1, 0, 5, description="number"))
    first = p.picture
    p.set(n=2)
    p.set(n=1)
    assert (calls, p.picture) == ([1, 2], first)


def test_a_drawn_figure_is_gone_before_the_next_move() -> None:
    """It refers to itself: left alone, fourteen of them pile up and are searched for at once."""
    p = small()
    p.set(n=2)
    before = sum(isinstance(x, Figure) for x in gc.get_objects())
    for n in (4, 5, 6):
        p.set(n=n)
    assert sum(isinstance(x, Figure) for x in gc.get_objects()) <= before
    assert gc.isenabled()


# -- all panels --


@each
def test_controls_have_names_of_their_own(made: dict, name: str) -> None:
    named = [c.description.strip() for c in panel_of(made, name).controls.values()]
    assert all(named)
    assert len(set(named)) == len(named)


@each
def test_the_picture_says_what_it_shows_and_fits(made: dict, name: str) -> None:
    p = panel_of(made, name)
    drawn = ElementTree.fromstring(p.picture)
    assert drawn.get("role") == "img"
    assert len(drawn.get("aria-label")) > 20
    assert not list(drawn.iter(f"{SVG}style")), "a style sheet would reach the whole page"
    width, height = map(float, drawn.get("viewBox").split()[2:])
    assert width / 0.72 <= 860, "pixels on the page"
    assert height / 0.72 <= 460
    sizes = [
        float(re.search(r"font:\w+ ([\d.]+)px", text.get("style"))[1])
        for text in drawn.iter(f"{SVG}text")
    ]
    assert min(sizes) >= 7, "points"


@each
@pytest.mark.parametrize("moves", [3, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_a_reader_who_moves_everything(made: dict, name: str, moves: int) -> None:
    """Whatever is moved: what the controls read is what is drawn, and what moves with it is
    said."""
    p, dice = panel_of(made, name), random.Random(0)
    drawn: list[dict] = []
    inner = p._draw
    p._draw = lambda **values: drawn.append(values) or inner(**values)
    try:
        for _ in range(moves):
            key = dice.choice([n for n, c in p.controls.items() if not c.disabled])
            before = p.values
            p.controls[key].value = dice.choice(latency.choices(p.controls[key]))
            for other, control in p.controls.items():
                assert control.value in latency.choices(control) or control.value == pytest.approx(
                    control.value
                )
                if other != key and control.value != before[other]:
                    assert f"{control.description}: " in p.moved
            assert not drawn or drawn[-1] == p.values or tuple(p.values.values()) in p._known
            assert p.sentence.strip()
    finally:
        p._draw = inner
    start = {name: control.value for name, control in PANELS[name]().controls.items()}
    p.reset()
    assert p.values == start


@pytest.mark.exhaustive
@each
def test_a_move_is_drawn_in_time(made: dict, name: str) -> None:
    """`python -m nsa_tutorial.course.latency` shows the times; here another test runs beside."""
    times = [t for found in latency.measure(panel_of(made, name)).values() for t in found]
    assert statistics.median(times) <= 1.6 * latency.BUDGET_MS


def test_the_latency_command(capsys: pytest.CaptureFixture) -> None:
    assert latency.main(["gradients"]) in (0, 1)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5, "a head, a panel, three controls"
    assert re.search(r"gradients\.explore +\d+ +\d+$", said[1])


# -- pictures --


def six_numbers() -> Picture:
    figure, axes = new_figure(4, 3)
    grid(axes[0, 0], np.arange(6.0).reshape(2, 3), text=".1f", hidden=np.eye(2, 3, dtype=bool))
    return Picture(figure, "six numbers < 10 & more")


def test_a_picture_is_small_sharp_and_the_same_every_time() -> None:
    first, second = six_numbers(), six_numbers()
    assert first.png() == second.png()
    assert len(first.png()) < 60_000
    assert first.size == (400, 300)
    assert Image.open(io.BytesIO(first.png())).size == (800, 600)
    assert repr(first) == "Picture: six numbers < 10 & more"


def test_a_picture_tells_jupyter_its_size_and_its_finding() -> None:
    data, facts = six_numbers()._repr_mimebundle_()
    assert facts["image/png"] == {"alt": "six numbers < 10 & more", "width": 400, "height": 300}
    assert 'alt="six numbers &lt; 10 &amp; more"' in data["text/html"]
    assert data["image/png"] in data["text/html"]
    json.dumps(data)


def test_svg_leaves_the_title_out_and_keeps_the_picture_as_it_was() -> None:
    picture = six_numbers()
    picture.figure.set_layout_engine(None)
    before = picture.png()
    drawn = ElementTree.fromstring(picture.svg())
    assert drawn.get("aria-label") == "six numbers < 10 & more"
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "5.0" in texts
    assert picture.finding not in texts
    assert all(float(text.get("textLength")) > 0 for text in drawn.iter(f"{SVG}text"))
    assert picture.png() == before


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (12, 9)])
def test_a_grid_keeps_the_lines_between_its_squares(rows: int, columns: int) -> None:
    """A major tick at a boundary would delete the minor one there, and with it the line."""
    figure, axes = new_figure(3, 3)
    axis = axes[0, 0]
    grid(axis, np.ones((rows, columns)))
    figure.canvas.draw()
    assert len(axis.get_xticks(minor=True)) == columns + 1
    assert len(axis.get_yticks(minor=True)) == rows + 1


def test_palette_can_be_written_on() -> None:
    assert {readable_on(c) for c in PALETTE} <= {PALETTE["text"], "#FFFFFF"}
    assert readable_on("masked") == PALETTE["text"]
    assert readable_on("selected") == "#FFFFFF"
