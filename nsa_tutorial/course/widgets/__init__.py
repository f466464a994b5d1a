"""Interactives: each draws what a tested pure function computes.

A chapter's interactive lives in the module of the chapter's name here. It is built with `panel`:
controls on top, and below them what `render` makes of their values. Only ipywidgets is used, so the
same cell works in JupyterLab, Notebook 7 and VS Code; a figure travels as the bytes of an `Image`
widget and a sentence as the value of an `HTML` widget, both of which stored outputs allow.
"""

from __future__ import annotations

import html
from collections.abc import Callable

import ipywidgets
from ipywidgets import HTML, Image, Layout, VBox

from nsa_tutorial.course.figures import Picture

Render = Callable[..., tuple[Picture, str]]


class Panel(VBox):
    """Controls, a sentence, a picture. `set(name=value)` moves a control as the reader's hand
    would.

    Attributes:
        controls: the widgets by name.
        sentence: what the panel says now, as plain text.
    """

    def __init__(self, title: str, render: Render, controls: dict[str, ipywidgets.Widget]) -> None:
        self.panel_title, self._draw, self.controls = title, render, controls
        self._message, self._image = (
            HTML(),
            Image(
                format="png",
                layout=Layout(max_width="100%", object_fit="contain", align_self="flex-start"),
            ),
        )
        for control in controls.values():
            control.style.description_width = "initial"
            if isinstance(
                control, ipywidgets.IntSlider | ipywidgets.SelectionSlider | ipywidgets.FloatSlider
            ):
                control.layout.width = "420px"
            control.observe(self._update, names="value")
        super().__init__([*controls.values(), self._message, self._image])
        self._update()

    def _update(self, _change: object = None) -> None:
        picture, self.sentence = self._draw(
            **{name: control.value for name, control in self.controls.items()}
        )
        self._message.value = f"<p>{html.escape(self.sentence)}</p>"
        self._image.value = picture.png()

    def set(self, **values: object) -> str:
        """Set controls by name and return the sentence the panel then shows."""
        for name, value in values.items():
            self.controls[name].value = value
        return self.sentence

    def __repr__(self) -> str:
        return f"Interactive: {self.panel_title} ({', '.join(self.controls)})"


def panel(title: str, render: Render, **controls: ipywidgets.Widget) -> Panel:
    """An interactive: `render(**values of the controls)` gives the picture and the sentence, again
    after every change.

    Args:
        title: a few words, shown where widgets cannot be drawn.
        render: a pure function of the controls' values that returns `(Picture, sentence)`.
        controls: ipywidgets with a `value`, by the names of `render`'s parameters.
    """
    return Panel(title, render, controls)
