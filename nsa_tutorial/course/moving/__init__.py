"""Figures that move without a kernel: one ESM module each, `NAME.js`, beside a Python module of the
same name with its numbers and its picture at rest.

    from nsa_tutorial.course.moving import figure
    explorer = figure("masks", query=410)   # in a notebook; explorer.query is what the reader set
    page("masks", {"query": 410})           # HTML that asks for nothing else

`NAME.js` exports `default { render({ model, el }) }`, and its arithmetic for the tests. In a
notebook, anywidget brings the model; on a page, page.js does, and keeps the state in the address.
A figure is drawn dark on white and turned over on a dark page, as the pictures are (`themes`).
"""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

from nsa_tutorial.course import themes
from nsa_tutorial.course.figures import PALETTE, Picture
from nsa_tutorial.course.stills import INTERACTIVE

HERE = Path(__file__).parent
# Each figure's module, and what stands before it beside common.js.
PARTS = {
    "masks": ("heads",),
    "softmax": (),
    "choice": ("heads",),
    "inverse": (),
    "split": (),
    "orders": (),
    "tiles": (),
    "list_walk": (),
}
NAMES = tuple(PARTS)
ROOT = ".nsa-moving"  # the class of every figure's element


def source(name: str) -> str:
    """The module of a figure, with what it shares with others."""
    return "\n".join(_text(part) for part in ("common", *PARTS[name], name))


def _text(name: str) -> str:
    return (HERE / f"{name}.js").read_text(encoding="utf-8")


def _module(name: str) -> ModuleType:
    if name not in NAMES:
        raise ValueError(f"name: expected one of {list(NAMES)}, got {name!r}")
    return import_module(f"{__name__}.{name}")


def _values(name: str, state: Mapping[str, object]) -> dict[str, object]:
    """A figure's whole state: its start, and what `state` changes of it."""
    start = _module(name).START
    for key, value in state.items():
        if key not in start:
            raise TypeError(f"{key}: expected one of {list(start)}")
        if type(value) is not type(start[key]):
            kind = type(start[key]).__name__
            raise TypeError(f"{key}: expected {kind}, got {type(value).__name__}")
    return {**start, **state}


# -- in a notebook --


class Still:
    """A figure where nothing can move it: its picture."""

    def __init__(self, title: str, picture: Picture) -> None:
        self.title, self.picture = title, picture

    def __repr__(self) -> str:
        return f"{INTERACTIVE} {self.title}. Run this cell to move it."

    def _repr_mimebundle_(self, **_: object) -> tuple[dict, dict]:
        data, facts = self.picture._repr_mimebundle_()
        return {"text/plain": repr(self), "image/png": data["image/png"]}, facts


@functools.cache
def _widget(name: str) -> type:
    """The figure's widget: a trait for each control, and its picture for pages without a kernel."""
    import anywidget
    import traitlets

    kinds = {bool: traitlets.Bool, int: traitlets.Int, str: traitlets.Unicode}
    module = _module(name)

    class Moving(anywidget.AnyWidget):
        """A figure that moves in the page. Its controls are attributes, both ways."""

        _esm = source(name)
        _css = themes.turning(ROOT)
        start = traitlets.Dict(module.START).tag(sync=True)
        data = traitlets.Dict(module.data()).tag(sync=True)
        palette = traitlets.Dict(PALETTE).tag(sync=True)

        @property
        def state(self) -> dict[str, object]:
            """What the reader set, by the names of the controls."""
            return {key: getattr(self, key) for key in module.START}

        def __repr__(self) -> str:
            return repr(Still(module.TITLE, None))

        def _repr_mimebundle_(self, **options: object) -> tuple[dict, dict]:
            shown = super()._repr_mimebundle_(**options)
            live, facts = shown if isinstance(shown, tuple) else (shown, {})
            still, alt = Still(module.TITLE, module.still(self.state))._repr_mimebundle_()
            return {**live, **still}, {**facts, **alt}

    traits = {key: kinds[type(value)](value).tag(sync=True) for key, value in module.START.items()}
    return type(name.title(), (Moving,), traits)


def figure(name: str, **state: object) -> object:
    """A figure in JupyterLab. Without anywidget it is its picture.

    Args:
        name: one of `NAMES`.
        state: controls that begin elsewhere than in the module's `START`.
    """
    values, module = _values(name, state), _module(name)
    try:
        return _widget(name)(**values)
    except ModuleNotFoundError as missing:
        if missing.name != "anywidget":
            raise
        return Still(module.TITLE, module.still(values))


# -- on a page --


def fragment(name: str, state: Mapping[str, object] | None = None) -> str:
    """A figure as HTML for a page that has other things, too; see `page`."""
    module, values = _module(name), _values(name, state or {})
    start = module.START
    given = {**values, "start": start, "data": module.data(), "palette": PALETTE}
    told = json.dumps(given, separators=(",", ":")).replace("<", "\\u003c")
    place = f"nsa-{name}"
    return (
        f"<style>{themes.turning(ROOT)}</style>\n"
        f'<div id="{place}"><noscript>{html.escape(module.TITLE)} needs JavaScript.</noscript>'
        f'</div>\n<script type="module">\n{source(name)}\n{_text("page")}\n'
        f'startOnPage("{name}", {told}, render, document.getElementById("{place}"));\n</script>\n'
    )


_PAGE = """<!doctype html>
<html lang="en" class="nsa-page">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
body {{ margin: 12px auto; padding: 0 12px; max-width: 1104px; background: #FFF; }}
html[data-theme="dark"] body {{ background: {dark}; }}
@media (prefers-color-scheme: dark) {{
  html:not([data-theme]) body {{ background: {dark}; }}
  html.nsa-page:not([data-theme]) {root} {{ filter: {turn}; }}
}}
</style>
<body>
{fragment}
</body>
</html>
"""


def page(name: str, state: Mapping[str, object] | None = None) -> str:
    """A figure as a page of its own, which asks for nothing else.

    Args:
        name: one of `NAMES`.
        state: controls that begin elsewhere than in the module's `START`.

    Returns:
        HTML. The state stands behind `#name?` in the address, so an address restores it. The theme
        is that of `html[data-theme]`, or else what the reader's system prefers.
    """
    return _PAGE.format(
        title=html.escape(_module(name).TITLE.capitalize()),
        dark=themes.DARK,
        root=ROOT,
        turn=themes.TURN,
        fragment=fragment(name, state),
    )
