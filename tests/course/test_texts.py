"""What a chapter's Markdown file gives its exercises and predictions; how its errors are told."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa_tutorial.course import exercises
from nsa_tutorial.course.exercises import Trap
from nsa_tutorial.course.texts import Texts, exercise_names

FILE = """\
# Exercises

## doubled

**Double it.** `x` is `[N]`.

```python
# a comment is no heading
doubled(x)
```

### Hints

1. What is two
   times three?
2. Which operator is it?

   It may be `*`.
3. Write `2` first.

### Why

Twice a number is the number
and once more the number.

### Traps

- squaring: "two times
  two" "two squared"
- adding 2: "twice: no addend"

## alone

Just a statement.

# Predictions

## how_many

How many
are there?

### Reason

Because.

### Thoughts

- `1`: the first alone.
- `(1, 2)`: both.
- `"a few"`: a word.
- `30 <= guess <= LARGEST`: about 40.
- `is_odd`: one too many, or one
  too few.

## why_so

Why?
"""
LARGEST = 45


def is_odd(guess: int) -> bool:
    return guess % 2 == 1


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., Texts]:
    def of(*edits: tuple[str, str]) -> Texts:
        text = FILE
        for old, new in edits:
            assert text.count(old) == 1
            text = text.replace(old, new)
        made = Texts("nsa_tutorial.course.exercises.chapter")
        made.path = tmp_path / made.path.name
        made.path.write_text(text, encoding="utf-8")
        return made

    return of


def test_the_file_stands_beside_the_module() -> None:
    path = Texts("nsa_tutorial.course.exercises.compression").path
    assert path == Path(exercises.__file__).parent / "compression.md"


def test_an_exercise(texts: Callable[..., Texts]) -> None:
    e = texts().exercise("doubled", minutes=3, difficulty=1, solution=abs, cases=())
    assert (e.name, e.minutes, e.solution) == ("doubled", 3, abs)
    assert e.statement == (
        "\n**Double it.** `x` is `[N]`.\n\n```python\n# a comment is no heading\ndoubled(x)\n```\n"
    )
    assert e.hints == (
        "What is two times three?",
        "Which operator is it?\n\nIt may be `*`.",
        "Write `2` first.",
    )
    assert e.why == "Twice a number is the number and once more the number."
    e = texts().exercise("alone", minutes=1, difficulty=1, solution=abs, cases=())
    assert (e.statement, e.hints, e.why) == ("\nJust a statement.\n", (), "")


def test_a_trap_has_a_quote_or_several(texts: Callable[..., Texts]) -> None:
    assert texts().traps == (
        Trap("two times two", "doubled", "squaring"),
        Trap("two squared", "doubled", "squaring"),
        Trap("twice: no addend", "doubled", "adding 2"),
    )


def test_predictions(texts: Callable[..., Texts]) -> None:
    first, second = texts().predictions(globals(), how_many={"unit": "GB", "tolerance": 0.1})
    assert (first.name, first.unit, first.tolerance) == ("how_many", "GB", 0.1)
    assert (first.question, first.reason) == ("How many are there?", "Because.")
    assert (second.name, second.reason, second.thoughts) == ("why_so", "", ())


def test_thoughts_are_values_conditions_or_functions(texts: Callable[..., Texts]) -> None:
    thoughts = texts().predictions(globals())[0].thoughts
    assert thoughts[:3] == (
        (1, "the first alone."), ((1, 2), "both."), ("a few", "a word."),
    )  # fmt: skip
    (about, _), (odd, said) = thoughts[3:]
    assert [about(guess) for guess in (29, 30, 45, 46)] == [False, True, True, False]
    assert odd is is_odd
    assert said == "one too many, or one too few."


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("### Why", "### Wy", "no place for the heading 'Exercises / doubled / Wy'"),
        ("### Thoughts", "### Hints", "no place for the heading 'Predictions / how_many / Hints'"),
        ("### Why", "#### Why", "no place for the heading 'Exercises / doubled / Hints / Why'"),
        ("# Predictions", "# Guesses", "no place for the heading 'Guesses'"),
        ("## alone", "## doubled", "two headings 'Exercises / doubled'"),
        ("### Why", "### Hints", "two headings 'Exercises / doubled / Hints'"),
        ("1. What", "Is this a hint?\n\n1. What",
         "'Exercises / doubled / Hints' is to be one list"),
        ("3. Write", "* Write", "'Exercises / doubled / Hints' is to be one list"),
        ("- squaring: \"two times\n  two\" \"two squared\"\n- adding 2: \"twice: no addend\"",
         "Nobody falls into one.", "'Exercises / doubled / Traps' is to be one list"),
        ('"two times\n  two" "two squared"', "two times two",
         "doubled: the trap 'squaring: two times two' is to read: mistake: \"quote\""),
        ("- `1`: the first", "- 1: the first",
         "how_many: the thought '1: the first alone.' is to read: `guess`: sentence"),
        ("`is_odd`", "`is_even`",
         "how_many: the guess `is_even` is no value, condition on `guess`, or function"),
        ("30 <= guess <=", "30 <= guess <= <=",
         "how_many: the guess `30 <= guess <= <= LARGEST` is no value, condition on `guess`, or "
         "function"),
    ],
    ids=["part", "part of another kind", "level", "kind", "exercise twice", "part twice",
         "text before a list", "two lists", "no list", "quote", "backquotes", "name", "condition"],
)  # fmt: skip
def test_an_error_names_the_file_and_the_heading(
    old: str, new: str, told: str, texts: Callable[..., Texts]
) -> None:
    changed = texts((old, new))
    with pytest.raises(ValueError, match=rf"^chapter\.md: {re.escape(told)}$"):
        _ = changed.traps, changed.predictions(globals())


def test_a_missing_name_is_told_with_those_that_there_are(texts: Callable[..., Texts]) -> None:
    told = r"^chapter\.md: nothing on 'tripled' under 'Exercises'; there are: doubled, alone$"
    with pytest.raises(ValueError, match=told):
        texts().exercise("tripled")
    told = r"^chapter\.md: no prediction 'how_long'; there are: how_many, why_so$"
    with pytest.raises(ValueError, match=told):
        texts().predictions(globals(), how_long={"unit": "m"})


@pytest.mark.parametrize("chapter", exercises.modules())
def test_all_that_a_chapters_file_says_is_used(chapter: str) -> None:
    """An exercise that was renamed leaves no text behind, and its traps are listed."""
    module, texts = exercises.chapter_module(chapter), Texts(chapter)
    names = [e.name for e in getattr(module, "EXERCISES", ())]
    assert tuple(names) == texts.names("Exercises") == exercise_names(chapter)
    assert [p.name for p in getattr(module, "PREDICTIONS", ())] == list(texts.names("Predictions"))
    assert getattr(module, "TRAPS", ()) == texts.traps
