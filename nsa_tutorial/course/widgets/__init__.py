"""Interactives: each draws what a tested pure function computes.

A chapter's interactive lives in the module of the chapter's name here. It is built with `panel`:
controls, a sentence, and a picture of what `render` makes of the controls' values. One contract
holds for all of them:

- What a control reads is what is drawn. `limits` keeps controls inside each other's range; where
  one has to move, the panel says so.
- A control that changes nothing now is greyed out (`idle`), and *Reset* brings back the start.
- The sentence is announced to screen readers, each control has its name, the picture its finding.

Only ipywidgets is used, so the same cell works in JupyterLab, Notebook 7 and VS Code. A picture
travels as SVG inside an `HTML` widget: sharp on every screen, and nothing to encode. Where there is
no kernel, the same cell shows the picture as it began, as PNG.
"""

from __future__ import annotations

import contextlib
import gc
import html
from collections.abc import Callable, Collection, Iterator, Mapping

import ipywidgets
from ipywidgets import HTML, Box, Button, GridBox, Layout, VBox

from nsa_tutorial.course.figures import Picture
from nsa_tutorial.course.stills import INTERACTIVE
from nsa_tutorial.course.themes import turning

Values = dict[str, object]
Render = Callable[..., tuple[Picture, str]]
Limits = Callable[..., Mapping[str, Collection]]
Idle = Callable[..., Collection[str]]

_REMEMBERED = 128  # pictures; a step back is then drawn at once

# ipywidgets gives a slider's handle no name, a toggle no pressed state, and no way to say that a
# text is to be announced. Where a page runs no script of ours, only that is missing.
_NAMES = """
((panel) => {
  const name = () => {
    for (const row of panel.querySelectorAll('.widget-inline-hbox')) {
      const label = row.querySelector('.widget-label');
      for (const part of row.querySelectorAll('.noUi-handle, .widget-readout'))
        if (label && !part.hasAttribute('aria-label'))
          part.setAttribute('aria-label', label.textContent);
    }
    for (const button of panel.querySelectorAll('.widget-toggle-buttons button'))
      button.setAttribute('aria-pressed', button.classList.contains('mod-active'));
    for (const text of panel.querySelectorAll('.nsa-sentence > .widget-html-content'))
      if (!text.hasAttribute('aria-live')) text.setAttribute('aria-live', 'polite');
  };
  name();
  new MutationObserver(name).observe(
    panel, {subtree: true, childList: true, attributes: true, attributeFilter: ['class']});
})(this.closest('.nsa-panel'))
"""
_STYLE = """
.nsa-panel { max-width: 100%; overflow: hidden; padding: 2px; box-sizing: border-box;
  container-type: inline-size; }
.nsa-panel .nsa-controls { display: grid; gap: 0 20px; width: 100%;
  grid-template-columns: repeat(auto-fit, minmax(270px, 1fr)); }
.nsa-panel .nsa-controls > * { width: auto; min-width: 0; max-width: 440px; margin: 1px 0; }
.nsa-panel .nsa-controls .widget-label { flex: 0 0 auto; width: auto; }
.nsa-panel .nsa-controls button { width: auto; height: 26px; line-height: 24px; }
.nsa-panel .nsa-controls select { text-overflow: ellipsis; }
.nsa-panel .nsa-body { display: flex; flex-direction: column; gap: 0 20px; width: 100%; }
.nsa-panel .nsa-result { flex: 0 0 auto; min-width: 0; margin: 0; overflow: hidden; }
.nsa-panel .nsa-sentence, .nsa-panel .nsa-drawn { margin: 0; width: auto; height: auto; }
.nsa-panel .nsa-sentence p { margin: 2px 0; line-height: 1.35; max-width: 960px; }
.nsa-panel .nsa-moved { font-style: italic; }
.nsa-panel .nsa-drawn svg { display: block; width: 100%; height: auto; border-radius: 4px; }
.nsa-panel.nsa-beside .nsa-controls { grid-template-columns: minmax(0, 1fr); }
@container (min-width: 760px) {
  .nsa-panel.nsa-beside .nsa-body { flex-direction: row; }
  .nsa-panel.nsa-beside .nsa-controls { flex: 0 0 272px; align-content: start; }
  .nsa-panel.nsa-beside .nsa-result { flex: 1 1 0; }
}
@container (max-width: 759px) {
  .nsa-panel.nsa-beside .nsa-controls {
    grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); }
}
"""
_STYLE += turning(".nsa-panel .nsa-drawn svg")


class Panel(VBox):
    """Controls, a sentence, a picture. `set(name=value)` moves a control as the reader's hand
    would.

    Attributes:
        controls: the widgets by name.
        sentence: what the panel says now, as plain text.
        picture: what it shows now, as SVG.
        moved: what had to move to stay in range at the last change, in words; empty mostly.
    """

    def __init__(
        self,
        title: str,
        render: Render,
        controls: dict[str, ipywidgets.Widget],
        *,
        limits: Limits | None = None,
        idle: Idle | None = None,
        beside: bool = False,
    ) -> None:
        self.panel_title, self._draw, self.controls = title, render, controls
        self._limits, self._idle = limits, idle
        self._start = {name: control.value for name, control in controls.items()}
        self._labels = {
            name: {value: label for label, value in control._options_full}
            for name, control in controls.items()
            if hasattr(control, "_options_full")
        }
        self._settling, self._known, self.moved = False, {}, ""
        self._message, self._image = HTML(), HTML()
        self._message.add_class("nsa-sentence")
        self._image.add_class("nsa-drawn")
        for control in controls.values():
            control.style.description_width = "initial"
            control.observe(self._update, names="value")
        self.reset_button = Button(description="Reset", tooltip="Back to where the panel began")
        self.reset_button.on_click(lambda _button: self.reset())
        self.actions = Box([self.reset_button], layout=Layout(flex_flow="row wrap"))
        # a class of its own and no inline layout: the style sheet decides by the width there is
        shelf, result = GridBox([*controls.values(), self.actions]), VBox()
        shelf.add_class("nsa-controls")
        result.children = [self._message, self._image]
        result.add_class("nsa-result")
        body = Box([shelf, result])
        body.add_class("nsa-body")
        style = HTML(f'<style onload="{html.escape(_NAMES)}">{_STYLE}</style>')
        style.layout.display = "none"
        super().__init__([style, body])
        self.add_class("nsa-panel")
        if beside:
            self.add_class("nsa-beside")
        _settle_memory()
        self._update()

    @property
    def values(self) -> Values:
        """The controls' values by name."""
        return {name: control.value for name, control in self.controls.items()}

    def _update(self, _change: object = None) -> None:
        if self._settling:
            return
        self._settling = True
        try:
            self.moved = self._keep_in_range()
            unused = set(self._idle(**self.values)) if self._idle else set()
            for name, control in self.controls.items():
                control.disabled = name in unused
        finally:
            self._settling = False
        key = tuple(self.values.values())
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            with _swept():
                self._known[key] = self._fresh()
        self.picture, (width, _), self.sentence = self._known[key]
        moved = f' <span class="nsa-moved">{html.escape(self.moved)}</span>' if self.moved else ""
        self._message.value = f"<p>{html.escape(self.sentence)}{moved}</p>"
        self._image.value = f'<div style="max-width:{width}px">{self.picture}</div>'

    def _fresh(self) -> tuple[str, tuple[int, int], str]:
        """The picture as SVG, its size, and the sentence."""
        picture, sentence = self._draw(**self.values)
        return picture.svg(), picture.size, sentence

    def _keep_in_range(self) -> str:
        """Bring every control into the limits that the others set, and say which value moved."""
        if self._limits is None:
            return ""
        before = self.values
        for _ in self.controls:  # a limit may follow a control that a limit has just moved
            settled = self.values
            self._limit(settled)
            if self.values == settled:
                break
        moves = [
            f"{self.controls[name].description}: {_shown(old)} is out of range here, now "
            f"{_shown(self.values[name])}."
            for name, old in before.items()
            if self.values[name] != old
        ]
        return " ".join(moves)

    def _limit(self, values: Values) -> None:
        for name, allowed in self._limits(**values).items():
            if isinstance(self.controls[name], ipywidgets.IntSlider):
                _limit_range(self.controls[name], min(allowed), max(allowed))
            else:
                _limit_choice(self.controls[name], list(allowed), self._labels[name])

    def set(self, **values: object) -> str:
        """Set controls by name, all at once, and return the sentence the panel then shows."""
        self._settling = True
        try:
            if self._limits:
                self._limit({**self.values, **values})
            for name, value in values.items():
                self.controls[name].value = value
        finally:
            self._settling = False
        self._update()
        return self.sentence

    def reset(self) -> str:
        """Put every control back to where it was at the start."""
        return self.set(**self._start)

    def _repr_mimebundle_(self, **options: object) -> tuple[dict, dict]:
        # beside the controls the picture as it is now, for pages without a kernel
        data = super()._repr_mimebundle_(**options)
        with _swept():
            still, facts = self._draw(**self.values)[0]._repr_mimebundle_()
        return {**data, "image/png": still["image/png"]}, facts

    def __repr__(self) -> str:
        return (
            f"{INTERACTIVE} {self.panel_title} ({', '.join(self.controls)}). "
            "Run this cell to move it."
        )


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _limit_range(slider: ipywidgets.IntSlider, low: int, high: int) -> None:
    value = min(max(slider.value, low), high)
    # never a range that excludes the other end, which ipywidgets refuses
    slider.min, slider.max = min(low, slider.min), max(high, slider.max)
    slider.value = value
    slider.min, slider.max = low, high


def _limit_choice(control: ipywidgets.Widget, allowed: list, labels: Mapping) -> None:
    """Offer only `allowed`, in its order; a value that is not among them moves to the last one
    before it."""
    if [value for _, value in control._options_full] == allowed:
        return
    value = control.value
    if value not in allowed:
        known = list(labels)
        earlier = [x for x in allowed if known.index(x) < known.index(value)]
        value = earlier[-1] if earlier else allowed[0]
    control.options = [(labels[x], x) for x in allowed]
    control.value = value


@contextlib.contextmanager
def _swept() -> Iterator[None]:
    """Throw a drawn figure away at once.

    Its thousands of objects refer to each other. Left to themselves, they survive while they are
    drawn, and every so often a picture waits for a search through all that are left.
    """
    searching = gc.isenabled()
    gc.disable()  # or a search in between would take the figure for something that stays
    try:
        yield
    finally:
        if searching:
            gc.enable()
        gc.collect(0)


def _settle_memory() -> None:
    """Take what is loaded by now out of Python's search for unused objects.

    A figure leaves thousands of them, and each full search walks through all of torch, in the
    middle of a drag.
    """
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()


def panel(
    title: str,
    render: Render,
    *,
    limits: Limits | None = None,
    idle: Idle | None = None,
    beside: bool = False,
    **controls: ipywidgets.Widget,
) -> Panel:
    """An interactive: `render(**values of the controls)` gives the picture and the sentence, again
    after every change.

    Args:
        title: a few words, shown where widgets cannot be drawn.
        render: a pure function of the controls' values that returns `(Picture, sentence)`.
        limits: optional; from the controls' values to what a control may be, by its name: a range
            for an `IntSlider`, the values in order for a choice.
        idle: optional; from the controls' values to the names of those that change nothing now.
        beside: controls to the left of the picture, where the page is wide enough; for many of
            them. Otherwise above it.
        controls: ipywidgets with a `value`, by the names of `render`'s parameters.
    """
    return Panel(title, render, controls, limits=limits, idle=idle, beside=beside)
