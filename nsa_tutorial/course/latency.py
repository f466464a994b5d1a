"""How long each interactive takes to respond when one of its controls moves.

    python -m nsa_tutorial.course.latency                     every panel
    python -m nsa_tutorial.course.latency online_softmax      those with a part of the name

Counted is the kernel's CPU time from a control's new value to the finished picture, for values not
seen before. `BUDGET_MS` leaves room for Jupyter and the browser within 100 ms from key to picture,
which `tests/browser/test_page_panels.py` measures.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import ipywidgets

from nsa_tutorial.course import widgets
from nsa_tutorial.course.widgets import Panel

BUDGET_MS = 60
_STEPS = 10  # moves of one control


def panels() -> dict[str, Callable[[], Panel]]:
    """The makers of all interactives, by `module.function`."""
    found = {}
    for module in pkgutil.iter_modules(widgets.__path__):
        loaded = importlib.import_module(f"{widgets.__name__}.{module.name}")
        for name, maker in inspect.getmembers(loaded, inspect.isfunction):
            returns = maker.__annotations__.get("return")
            if maker.__module__ == loaded.__name__ and returns in (Panel, "Panel"):
                found[f"{module.name}.{name}"] = maker
    return found


def choices(control: ipywidgets.Widget) -> list:
    """The values that a control offers now, in its order."""
    if isinstance(control, ipywidgets.Checkbox):
        return [False, True]
    if isinstance(control, ipywidgets.IntSlider):
        return list(range(control.min, control.max + 1, control.step))
    if isinstance(control, ipywidgets.FloatSlider):
        steps = round((control.max - control.min) / control.step)
        return [control.min + i * control.step for i in range(steps + 1)]
    return [value for _, value in control._options_full]


def moves(control: ipywidgets.Widget) -> Iterator[object]:
    """Up to `_STEPS` other values: those next to where the control stands."""
    offered = choices(control)
    here = min(range(len(offered)), key=lambda i: (offered[i] != control.value, i))
    near = sorted(range(len(offered)), key=lambda i: abs(i - here))
    yield from (offered[i] for i in near[1 : _STEPS + 1])


def measure(panel: Panel) -> dict[str, list[float]]:
    """Milliseconds of CPU time for each move of each control, by the control's name; every control
    starts from where the panel began."""
    found: dict[str, list[float]] = {}
    for name, control in panel.controls.items():
        panel.reset()
        if control.disabled:
            continue
        found[name] = []
        for value in moves(control):
            start = time.process_time()
            control.value = value
            found[name].append(1e3 * (time.process_time() - start))
    panel.reset()
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where a panel's median is over the budget."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_tutorial.course.latency", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("names", nargs="*", help="parts of panels' names; all if none is given")
    chosen, late = parser.parse_args(arguments), 0
    print(f"{'ms of CPU time, a move':56}{'median':>8}{'most':>8}")
    for title, maker in panels().items():
        if chosen.names and not any(part in title for part in chosen.names):
            continue
        times = measure(maker())
        rows = {title: [t for found in times.values() for t in found]}
        rows |= {f"    {name}": found for name, found in times.items()}
        for row, found in rows.items():
            print(f"{row:56}{statistics.median(found):8.0f}{max(found):8.0f}")
        late += statistics.median(rows[title]) > BUDGET_MS
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
