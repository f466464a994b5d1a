"""What a chapter's exercises and predictions say: one Markdown file a chapter, beside its module.

    # Exercises

    ## visible_summaries

    The statement.

    ### Hints

    1. Three of them,
    2. each more telling,
    3. none with a line of the solution.

    ### Why

    The reason why the solution is as it is.

    ### Traps

    - letting a summary be seen once it starts: "every summary whose window has *started*"

    # Predictions

    ## times_lighter

    The question.

    ### Reason

    Why the answer is what it is.

    ### Thoughts

    - `1`: the thought that leads to this wrong guess.
    - `30 <= guess <= 45`: in backquotes stand a value, a condition on the guess, or a function of
      the chapter's module that answers it.

A trap is the name of a mistake, and the words of the chapter that warn of it, in quotes. Several
quotes may follow a name, each in quotes of its own.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from nsa_tutorial.course.exercises import Exercise, Prediction, Trap

_PARTS = {
    "Exercises": ("", "Hints", "Why", "Traps"),
    "Predictions": ("", "Reason", "Thoughts"),
}


@dataclass(frozen=True)
class _Section:
    """A heading's own text, up to the next heading: its lines, and the items of its list."""

    path: tuple[str, ...]
    text: str
    items: tuple[str, ...]


class Texts:
    """The Markdown file of a chapter's exercises.

    Args:
        module: `__name__` of the chapter's module in `course.exercises`; the file stands beside it.

    Raises:
        ValueError: by its methods, for a heading, a list or a name that the file should have, or
            that it should not have, naming it and the file.
    """

    def __init__(self, module: str) -> None:
        self.chapter = module.rpartition(".")[2]
        self.path = Path(__file__).parent / "exercises" / f"{self.chapter}.md"

    def exercise(self, name: str, **others: object) -> Exercise:
        """The exercise of that name with what the file says of it; `others` are its other
        attributes."""
        parts = self._of("Exercises", name)
        return Exercise(
            name=name,
            statement=f"\n{parts[''].text}\n",
            hints=parts["Hints"].items if "Hints" in parts else (),
            why=_unwrapped(parts["Why"].text) if "Why" in parts else "",
            **others,
        )

    @property
    def traps(self) -> tuple[Trap, ...]:
        """What the chapter warns of, in the file's order."""
        found = []
        for name in self._names("Exercises"):
            section = self._of("Exercises", name).get("Traps")
            for item in section.items if section is not None else ():
                match = re.fullmatch(r'(?P<mistake>.+?): (?P<quotes>"(.|\n)+")', item)
                if match is None:
                    raise self._wrong(f'the trap {item!r} is to read: mistake: "quote"')
                quotes = re.split(r'"\s+"', match["quotes"][1:-1])
                found += [Trap(quote, name, match["mistake"]) for quote in quotes]
        return tuple(found)

    def predictions(
        self, module: dict[str, object], **others: dict[str, object]
    ) -> tuple[Prediction, ...]:
        """The file's predictions, in its order.

        Args:
            module: the names of the chapter's module, for thoughts that are functions.
            others: by a prediction's name, its other attributes.
        """
        names = self._names("Predictions")
        if unknown := sorted(others.keys() - set(names)):
            raise self._wrong(f"no prediction {unknown[0]!r}; there are: {', '.join(names)}")
        return tuple(self._prediction(name, module, others.get(name, {})) for name in names)

    def _prediction(
        self, name: str, module: dict[str, object], others: dict[str, object]
    ) -> Prediction:
        parts = self._of("Predictions", name)
        thoughts = parts["Thoughts"].items if "Thoughts" in parts else ()
        return Prediction(
            name=name,
            question=_unwrapped(parts[""].text),
            reason=_unwrapped(parts["Reason"].text) if "Reason" in parts else "",
            thoughts=tuple(self._thought(item, module) for item in thoughts),
            **others,
        )

    def _thought(self, item: str, module: dict[str, object]) -> tuple[object, str]:
        match = re.fullmatch(r"`(?P<guess>[^`]+)`: (?P<said>.+)", item, flags=re.DOTALL)
        if match is None:
            raise self._wrong(f"the thought {item!r} is to read: `guess`: sentence")
        guess = match["guess"]
        if guess in module and callable(module[guess]):
            return module[guess], match["said"]
        try:
            if re.search(r"\bguess\b", guess):
                return eval(f"lambda guess: {guess}", module), match["said"]
            return ast.literal_eval(guess), match["said"]
        except (ValueError, SyntaxError):
            raise self._wrong(
                f"the guess `{guess}` is no value, condition on `guess`, or function"
            ) from None

    @functools.cached_property
    def _sections(self) -> dict[tuple[str, ...], _Section]:
        found: dict[tuple[str, ...], _Section] = {}
        for section in _sections(self.path.read_text(encoding="utf-8")):
            kind, *rest = section.path
            part = rest[1] if len(rest) > 1 else ""
            if part not in _PARTS.get(kind, ()):
                raise self._wrong(f"no place for the heading {section.path[-1]!r}")
            if section.path in found:
                raise self._wrong(f"two headings {' / '.join(section.path)!r}")
            found[section.path] = section
        return found

    def _names(self, kind: str) -> tuple[str, ...]:
        return tuple(path[1] for path in self._sections if path[0] == kind and len(path) == 2)

    def _of(self, kind: str, name: str) -> dict[str, _Section]:
        if name not in self._names(kind):
            raise self._wrong(
                f"nothing on {name!r} under {kind!r}; there are: {', '.join(self._names(kind))}"
            )
        return {
            part: self._sections[path]
            for part in _PARTS[kind]
            if (path := (kind, name, part) if part else (kind, name)) in self._sections
        }

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{self.path.name}: {what}")


def _unwrapped(text: str) -> str:
    """Paragraphs in one line each; lists and code keep their lines."""
    blocks = re.split(r"\n{2,}", text)
    return "\n\n".join(
        block if re.match(r"[-*|>]\s|```|\d+\.\s|    ", block) else " ".join(block.split("\n"))
        for block in blocks
    )


def _sections(text: str) -> Iterator[_Section]:
    """The file, cut at its headings."""
    tokens, lines = MarkdownIt().parse(text), text.split("\n")
    heads = [i for i, t in enumerate(tokens) if t.type == "heading_open" and t.level == 0]
    path: tuple[str, ...] = ()
    for head, end in zip(heads, [*heads[1:], len(tokens)], strict=True):
        level = int(tokens[head].tag[1])
        path = (*path[: level - 1], tokens[head + 1].content)
        first = tokens[head].map[1]
        last = tokens[end].map[0] if end < len(tokens) else len(lines)
        own = tokens[head + 3 : end]
        body = "\n".join(lines[first:last]).strip("\n")
        yield _Section(path, body, tuple(_items(own, lines)))


def _items(tokens: list[Token], lines: list[str]) -> Iterator[str]:
    """The items of a list, in one line each."""
    for token in tokens:
        if token.type == "list_item_open" and token.level == 1:
            first, last = token.map
            item = "\n".join(lines[first:last])
            marker = re.match(r"\s*([-*]|\d+[.)])\s+", item)[0]
            body = [line[len(marker) :] for line in item.split("\n")]
            yield _unwrapped("\n".join(body).strip("\n"))
