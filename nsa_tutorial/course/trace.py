"""Run a phased function and look over its shoulder: the local variables at the end of every phase,
by the function's own source.

`trace(function, *args, **keywords)` executes the source of `function` with one call added at the
end of each phase (`# -- name --`, see `source.py`); nothing of what it computes is written a second
time. A phase inside a loop ends once in every turn.

It records plain Python functions, as the PyTorch twins of the kernels are. Programs of a Triton
kernel are recorded by `recorder`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from nsa_tutorial.course.source import markers

_HOOK = "__end_of_phase__"


@dataclass(frozen=True)
class Step:
    """The end of a phase.

    Attributes:
        phase: its name.
        turn: how often it had ended before: the turn of the loop it stands in, counted from 0.
        variables: the local variables by name, tensors and arrays as copies.
    """

    phase: str
    turn: int
    variables: Mapping[str, object]

    def __getitem__(self, name: str) -> object:
        return self.variables[name]


@dataclass(frozen=True)
class Trace:
    """All steps of a call, in order, and what it returned."""

    steps: tuple[Step, ...]
    result: object

    @property
    def turns(self) -> int:
        """How often the phase that ended most often did."""
        return 1 + max(step.turn for step in self.steps)

    def at(self, phase: str, turn: int = 0) -> Step:
        """The step at the end of `phase`, in turn `turn`.

        Raises:
            ValueError: where there is none, naming the phases there are.
        """
        for step in self.steps:
            if (step.phase, step.turn) == (phase, turn):
                return step
        known = ", ".join(repr(name) for name in dict.fromkeys(step.phase for step in self.steps))
        raise ValueError(
            f"no turn {turn} of a phase {phase!r}; the phases are {known}, with up to "
            f"{self.turns} turns"
        )


def trace(function: Callable, *args: object, **keywords: object) -> Trace:
    """Call `function` and record its local variables at the end of each of its phases.

    Args:
        function: a Python function with phases, without a closure; its source has to be readable.
        args, keywords: what it is called with.

    Raises:
        ValueError: if it has no phases.
    """
    steps: list[Step] = []
    ended: dict[str, int] = {}
    copied: dict[
        int, tuple[object, int, object]
    ] = {}  # what a tensor was, how often it had been written to, and its copy

    def copy(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value.copy() if isinstance(value, np.ndarray) else value
        known = copied.get(id(value))
        if known is None or known[0] is not value or known[1] != value._version:
            copied[id(value)] = value, value._version, value.detach().clone()
        return copied[id(value)][2]

    def note(phase: str, variables: Mapping[str, object]) -> None:
        copies = {name: copy(value) for name, value in variables.items()}
        steps.append(Step(phase, ended.setdefault(phase, 0), MappingProxyType(copies)))
        ended[phase] += 1

    result = _hooked(function, note)(*args, **keywords)
    return Trace(tuple(steps), result)


def _hooked(function: Callable, note: Callable) -> Callable:
    """The function, compiled anew with a call of `note` at the end of each phase, in its module's
    own names."""
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    found = markers(source)
    if not found:
        raise ValueError(
            f"trace: {function.__name__} has no phases, expected comments such as '# -- online "
            "softmax --'"
        )
    tree = ast.parse(source)
    definition = tree.body[0]
    definition.decorator_list, definition.returns = [], None
    _add_hooks(definition, found)
    ast.increment_lineno(tree, first - 1)
    ast.fix_missing_locations(tree)
    names = {**function.__globals__, _HOOK: note}
    exec(compile(tree, inspect.getsourcefile(function) or "<traced>", "exec"), names)
    return names[function.__name__]


def _add_hooks(parent: ast.AST, found: Mapping[int, str]) -> None:
    """Put the calls into every block below `parent`; `found` names the phase that begins at a
    line."""
    before = parent.lineno
    for field in ("body", "orelse", "finalbody"):
        block = getattr(parent, field, None)
        if not isinstance(block, list):
            continue
        phase, new = None, []
        for statement in block:
            begun = [name for line, name in found.items() if before < line < statement.lineno]
            holds = any(statement.lineno <= line <= statement.end_lineno for line in found)
            if phase is not None and (begun or holds or isinstance(statement, ast.Return)):
                new.append(_call(phase, new[-1]))
                phase = None
            if begun:
                phase = begun[-1]
                if isinstance(statement, ast.Return):
                    new.append(_call(phase, statement))
                    phase = None
            if holds:
                _add_hooks(statement, found)
                phase = None
            new.append(statement)
            before = statement.end_lineno
        if phase is not None:
            new.append(_call(phase, new[-1]))
        setattr(parent, field, new)


def _call(phase: str, near: ast.stmt) -> ast.stmt:
    call = ast.parse(f"{_HOOK}({phase!r}, dict(locals()))").body[0]
    for node in ast.walk(call):
        ast.copy_location(node, near)
    return call
