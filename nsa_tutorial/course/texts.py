"""What a chapter's exercises and predictions say: one Markdown file a chapter, beside its module.

    # Exercises

    ## window_logit

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
    - `30 <= guess <= 45`: in backquotes stands a value, a condition on the guess, or the name of
      a function in the chapter's module that says whether it is this guess.

Hints, why, traps, reason and thoughts may be left out. A trap is the name of a mistake and the
words of the chapter that warn of it. Where the chapter does so more than once, each quote has
quotation marks of its own.
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
_LISTS = {"Hints", "Traps", "Thoughts"}


@dataclass(frozen=True)
class _Section:
    """What stands between a heading and the next one.

    Attributes:
        path: the headings that it stands under, its own last.
        text: its lines.
        items: those of its lists, a line each.
        is_list: whether it is one list and nothing else.
    """

    path: tuple[str, ...]
    text: str
    items: tuple[str, ...]
    is_list: bool


class Texts:
    """The Markdown file of a chapter's exercises.

    Args:
        module: `__name__` of the chapter's module in `course.exercises`; the file stands beside it.

    Raises:
        ValueError: by its methods, naming the file and the heading: for a heading, a list or a
            name that should be there and is not, or that is there and should not be.
    """

    def __init__(self, module: str) -> None:
        self.chapter = module.rpartition(".")[2]
        self.path = Path(__file__).parent / "exercises" / f"{self.chapter}.md"

    def exercise(self, name: str, **others: object) -> Exercise:
        """The exercise of that name, from what the file says of it and its other attributes."""
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
        for name in self.names("Exercises"):
            section = self._of("Exercises", name).get("Traps")
            for item in section.items if section is not None else ():
                match = re.fullmatch(r'(?P<mistake>.+?): (?P<quotes>"(.|\n)+")', item)
                if match is None:
                    raise self._wrong(f'{name}: the trap {item!r} is to read: mistake: "quote"')
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
        names = self.names("Predictions")
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
            thoughts=tuple(self._thought(name, item, module) for item in thoughts),
            **others,
        )

    def _thought(self, name: str, item: str, module: dict[str, object]) -> tuple[object, str]:
        match = re.fullmatch(r"`(?P<guess>[^`]+)`: (?P<said>.+)", item, flags=re.DOTALL)
        if match is None:
            raise self._wrong(f"{name}: the thought {item!r} is to read: `guess`: sentence")
        guess = match["guess"]
        if guess in module and callable(module[guess]):
            return module[guess], match["said"]
        try:
            if re.search(r"\bguess\b", guess):
                return eval(f"lambda guess: {guess}", module), match["said"]
            return ast.literal_eval(guess), match["said"]
        except (ValueError, SyntaxError):
            raise self._wrong(
                f"{name}: the guess `{guess}` is no value, condition on `guess`, or function"
            ) from None

    @functools.cached_property
    def _sections(self) -> dict[tuple[str, ...], _Section]:
        found: dict[tuple[str, ...], _Section] = {}
        for section in _sections(self.path.read_text(encoding="utf-8")):
            heading, part = " / ".join(section.path), "".join(section.path[2:])
            if len(section.path) > 3 or part not in _PARTS.get(section.path[0], ()):
                raise self._wrong(f"no place for the heading {heading!r}")
            if section.path in found:
                raise self._wrong(f"two headings {heading!r}")
            if part in _LISTS and not section.is_list:
                raise self._wrong(f"{heading!r} is to be one list")
            found[section.path] = section
        return found

    def names(self, kind: str) -> tuple[str, ...]:
        """What the file has under `kind`, "Exercises" or "Predictions", in its order."""
        return tuple(path[1] for path in self._sections if path[0] == kind and len(path) == 2)

    def _of(self, kind: str, name: str) -> dict[str, _Section]:
        if name not in self.names(kind):
            raise self._wrong(
                f"nothing on {name!r} under {kind!r}; there are: {', '.join(self.names(kind))}"
            )
        return {
            part: self._sections[path]
            for part in _PARTS[kind]
            if (path := (kind, name, part) if part else (kind, name)) in self._sections
        }

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{self.path.name}: {what}")


def exercise_names(chapter: str) -> tuple[str, ...]:
    """The exercises of a chapter in its order, from the headings of its file alone: its module may
    import TileLang, which takes a second. None where there is no such file."""
    path = Path(__file__).parent / "exercises" / f"{chapter}.md"
    if not path.exists():
        return ()
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    (part,) = re.findall(r"^# Exercises$(.*?)(?=^# |\Z)", text, re.M | re.S) or [""]
    return tuple(re.findall(r"^## (\w+)$", part, re.M))


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
        outermost = [t.type for t in own if t.level == 0 and t.nesting >= 0]
        yield _Section(
            path,
            text="\n".join(lines[first:last]).strip("\n"),
            items=tuple(_items(own, lines)),
            is_list=outermost in (["bullet_list_open"], ["ordered_list_open"]),
        )


def _items(tokens: list[Token], lines: list[str]) -> Iterator[str]:
    """The items of a list, in one line each."""
    for token in tokens:
        if token.type == "list_item_open" and token.level == 1:
            first, last = token.map
            item = "\n".join(lines[first:last])
            marker = re.match(r"\s*([-*]|\d+[.)])\s+", item)[0]
            body = [line[len(marker) :] for line in item.split("\n")]
            yield _unwrapped("\n".join(body).strip("\n"))
