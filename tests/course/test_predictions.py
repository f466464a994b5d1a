"""Guesses: what is noted, what is said of them, and that nothing a reader guesses breaks a cell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from nsa_tutorial.course import exercises, predict, reader, reveal
from nsa_tutorial.course.exercises import Prediction
from nsa_tutorial.course.numerals import as_number

CACHE = Prediction(
    name="cache",
    question="How many GiB?",
    reason="Keys and values are both kept.",
    thoughts=(
        (4, "That is the keys alone."),
        (lambda guess: guess > 1000, "That is MiB."),
        ("none", "It has to be kept somewhere."),
    ),
    unit="GiB",
)
SHARE = Prediction("share", "What share?", "Because.", tolerance=0.05)
PERCENT = Prediction("percent", "How many percent?", "Because.", unit="%")
CHOICE = Prediction("choice", "Which, 0, 1 or 2?", "Because.", choices=(0, 1, 2))
PROGRAMS = Prediction("programs", "How many programs run?", "One a tile.", ((64, "One side."),))
ASKED = {p.name: p for p in (CACHE, SHARE, PERCENT, CHOICE, PROGRAMS)}


@pytest.fixture(autouse=True)
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / reader.FOLDER).mkdir()
    monkeypatch.setattr(exercises, "prediction", ASKED.__getitem__)
    reader.forget()
    yield
    reader.forget()


def told(guess: object, answer: object = 8, name: str = "cache") -> str:
    predict(name, guess)
    return repr(reveal(name, answer))


def test_a_guess_is_noted() -> None:
    assert repr(predict("cache", 4)) == "○ cache: noted, 4 GiB. You will see."
    assert repr(predict("cache", None)) == "○ cache: your guess so far is 4 GiB."


def test_no_guess_is_nudged() -> None:
    nudge = "Put a guess in place of None, even a wild one."
    said = f"○ cache: no guess yet. How many GiB?\n{nudge}"
    assert repr(predict("cache", None)) == said
    assert repr(reveal("cache", 8)) == (
        "○ cache: it is 8 GiB. Keys and values are both kept.\n"
        "Next time, guess first: an answer stays longer beside a guess, even a wrong one."
    )


def test_a_wrong_guess_hears_how_far_off_and_why() -> None:
    assert told(4) == (
        "→ cache: You said 4 GiB, it is 8 GiB: your guess is half the answer. "
        "That is the keys alone. Keys and values are both kept."
    )
    assert "That is MiB." in told(8192)
    assert "It has to be kept somewhere." in told("None")
    assert told(5).endswith("GiB: your guess is 38 % too small. Keys and values are both kept.")


def test_a_guess_in_percent_is_points_off() -> None:
    """55 % is 16 points more than 39 %, and 41 % more: two numbers that are easily confused."""
    large = "You said 55 %, it is 39 %: your guess is 16 points too large."
    assert large in told(55, 39, "percent")
    assert "it is 67 %: your guess is 22.5 points too small." in told(44.5, 67, "percent")
    assert "it is 40 %: your guess is half the answer." in told(20, 40, "percent")


def test_a_right_guess_hears_the_reason() -> None:
    expected = (
        "✓ cache: You said 8 GiB, and it is 8 GiB: exactly right. Keys and values are both kept."
    )
    assert told(8) == told(8.0) == told("8 GiB") == told(torch.tensor([8])) == expected


def test_a_size_may_be_told_in_another_unit() -> None:
    for text in ("8192 MiB", "0.0078125 TiB", "8,388,608 KiB"):
        assert "exactly right" in told(text), text
    assert "half the answer" in told("4096 MiB")


def test_numbers_may_be_written_out() -> None:
    for text in ("1/4", " 25 %", "0.25", "2.5e-1", 0.25):
        assert "exactly right" in told(text, 0.25, "share"), text
    assert "a number was asked for" in told("1/0", 0.25, "share")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0,0156", 0.0156), ("1,6", 1.6), ("1,60", 1.6), ("0,016", 0.016), (",5", 0.5),
        ("1234,567", 1234.567), ("1,6 %", 0.016), ("1,6e3", 1600), ("1,5k", 1500),
        ("1,234", 1234), ("-1,234.5", -1234.5), ("4,194,304", 2**22), ("4.194.304,5", 2**22 + 0.5),
        ("1,234/2", 617), ("1,2,3", None), ("1,23,456", None), ("1,", None), (",", None),
    ],
)  # fmt: skip
def test_commas_are_decimal_or_separate_thousands(text: str, number: float | None) -> None:
    assert as_number(text, "") == (None if number is None else pytest.approx(number))


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [("1/16", "", 0.0625), ("1/16", "%", 6.25), ("1/16 %", "%", 0.0625), ("1/4", "GiB", 0.25)],
)
def test_a_fraction_is_a_share_in_every_question(text, unit, number):
    """A sixteenth is 0.0625 of the whole and 6.25 percent of it."""
    assert as_number(text, unit) == pytest.approx(number)


@pytest.mark.parametrize(("name", "text"), [("programs", "1,234 %"), ("percent", "1,234")])
def test_a_comma_in_doubt_is_asked_about(name: str, text: str) -> None:
    """Of a percentage, both may be meant; the guess is not kept."""
    said = "Do you mean 1.234 % or 1234 %? Write it without the comma."
    assert repr(predict(name, text)) == f"○ {name}: not noted, {text}. {said}"
    assert "no guess yet" in repr(predict(name, None))


def test_outside_of_a_copy_it_is_said_once_that_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "saved" not in repr(predict("cache", 4))
    monkeypatch.chdir(tmp_path / reader.FOLDER)  # which holds no notes' folder of its own
    reader.forget()
    assert "Nothing is saved in this folder" in repr(predict("cache", 4))
    assert "saved" not in repr(predict("cache", 5))


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (1.0, "exactly right"), (1.04, "close, within 10 %"), (0.91, "close, within 10 %"),
        (0.5, "your guess is half the answer"), (2, "your guess is twice the answer"),
        (10, "your guess is ten times too large"), (0.1, "your guess is ten times too small"),
        (1 / 3, "your guess is three times too small"), (1.5, "your guess is 50 % too large"),
        (0.8, "your guess is 20 % too small"), (2.5, "your guess is 2.5 times too large"),
        (0.4, "your guess is 2.5 times too small"), (1000, "your guess is far too large"),
        (1e-3, "your guess is far too small"),
        (1e30, "your guess is far too large"),
        (1e-30, "your guess is far too small"),
        (-1, "the sign is the other way round"), (-3, "of the other sign"),
    ],
)  # fmt: skip
def test_distances_in_words(ratio: float, words: str) -> None:
    for answer in (8.0, 0.003, -250.0):
        assert words in told(ratio * answer, answer)


def test_a_small_count_is_off_by_a_number() -> None:
    assert "your guess is 10 too large" in told(41, 31, "share")
    assert "your guess is 11 too small" in told(20, 31, "share")
    assert "your guess is twice the answer" in told(62, 31, "share")
    assert "your guess is 50 % too large" in told(300, 200, "share")


def test_a_tolerance_makes_a_number_right() -> None:
    assert repr(told(0.63, 0.61, "share")).count("and it is 0.61: right.") == 1
    assert "close" in told(0.57, 0.61, "share")


@pytest.mark.parametrize(
    ("guess", "answer", "is_right"),
    [
        ("Triton ", "triton", True), ("tilelang", "triton", False),
        (True, True, True), (False, True, False), (1, True, False),
        ([0, 2], (0, 2), True), ([0, 2], [0, 3], False), ([0], [0, 0], False),
        (torch.tensor([0, 2]), [0, 2], True), ([True], np.array([True, True]), False),
        (math.nan, math.nan, True), (math.inf, math.inf, True), (0, 0, True), (3, 0, False),
        (0, 3, False), (True, 1, False), (None, None, False),
    ],
)  # fmt: skip
def test_right_or_not(guess: object, answer: object, is_right: bool) -> None:
    assert told(guess, answer).startswith("✓") == is_right


class Rude:
    """An object that answers nothing."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None


@pytest.mark.parametrize(
    "guess",
    [
        math.nan, -math.inf, 10**5000, -(10**400), 1e-320, "", "x" * 10**5, "\ud800", "1e999",
        Decimal("1e9999999"), Decimal("-1e-9999999"), "١٢", "1/0",
        "9" * 5000 + "/1", "%", b"4", 3 + 4j, [], [[]],
        (None,), {}, {1: {2}}, set(), object(), Rude(), Rude,
        [Rude()], lambda: 1, np.array([]), np.float32("nan"), np.array(["a"]), torch.empty(0),
        torch.ones(3, 3), torch.ones(2, device="meta"), torch.tensor(3 + 1j), True, range(3),
    ],
    ids=lambda g: type(g).__name__,
)  # fmt: skip
@pytest.mark.parametrize("answer", [8, 0, -2.5, math.nan, "text", True, [1, 2], torch.ones(2)])
def test_nothing_that_is_guessed_breaks_a_cell(guess: object, answer: object) -> None:
    """Neither in memory nor beside a file; what is said is short and has both forms."""
    for message in (predict("cache", guess), reveal("cache", answer)):
        assert len(repr(message)) < 500
        assert "</div>" in message._repr_html_()
    assert reader.notes()["version"] == 1


def test_a_guess_outlives_the_kernel() -> None:
    predict("cache", 4)
    reader.forget()
    told_again = "→ cache: You said 4 GiB, it is 8 GiB: your guess is half the answer."
    assert repr(reveal("cache", 8)).startswith(told_again)


def test_unknown_names_are_told_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    names = [p.name for p in every()]
    for call in (predict, reveal):
        with pytest.raises(ValueError, match="no prediction 'nothing'; there are: ") as caught:
            call("nothing", 3)
        assert all(name in str(caught.value) for name in names)


# -- what the chapters ask --


def every() -> list[Prediction]:
    modules = map(exercises.chapter_module, exercises.modules())
    return [p for m in modules for p in getattr(m, "PREDICTIONS", ())]


def test_names_are_unique_in_the_course() -> None:
    names = [p.name for p in every()]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("asked", every(), ids=lambda p: p.name)
def test_a_prediction_is_complete(asked: Prediction) -> None:
    """A question, a reason, thoughts in sentences; found by its name."""
    assert asked.question.strip().endswith("?")
    for text in (asked.reason, *(told for _, told in asked.thoughts)):
        assert text.strip().endswith((".", "!", "?")), text


def test_a_chapter_with_predictions_alone_has_no_exercises() -> None:
    for name in exercises.modules():
        module = exercises.chapter_module(name)
        assert (name in exercises.chapters()) == bool(getattr(module, "EXERCISES", ()))
        if name not in exercises.chapters():
            with pytest.raises(ValueError, match=f"chapter '{name}' has no exercises; "):
                exercises.chapter_exercises(name)


def test_what_is_no_number_is_said_at_once() -> None:
    assert "Say it as a number" in repr(predict("cache", "many"))
    assert "You will see." in repr(predict("cache", "8 GiB"))
    assert "exactly right" in told("8k", 8000)


def test_a_number_may_stand_with_the_noun_of_its_question() -> None:
    assert "noted, 4,096. You will see." in repr(predict("programs", "4096 programs"))
    assert "Say it as a number" in repr(predict("programs", "4096 threads"))


@pytest.mark.parametrize(
    "guess", ["20 x", "20x", "about 20", "~20", "20 times", " around 20 times"]
)
def test_a_number_may_be_said_as_people_speak(guess: str) -> None:
    assert "noted, 20. You will see." in repr(predict("programs", guess))


def test_a_share_said_in_percent_is_answered_in_percent() -> None:
    assert "You said 1.45 %, it is 1.56 %: close" in told("1.45 %", 1 / 64, "share")
    assert "You said 25 %, and it is 25 %: exactly right." in told("25 %", 0.25, "share")
    assert "it is 0.25: exactly right." in told(0.25, 0.25, "share")


def test_a_share_where_percent_are_asked_for_is_asked_about() -> None:
    """Without the product: the share may be the answer in another unit, or the answer itself."""
    said = repr(predict("percent", 0.6))
    assert "If you meant a share, multiply it by 100." in said and "60" not in said
    assert "If you meant" not in repr(predict("percent", 60))
    assert "If you meant" not in repr(predict("percent", "0.1 %"))  # the sign says what is meant


def test_words_may_stand_in_the_plural() -> None:
    assert told("Gates", "gate", "share").startswith("✓")
    assert not told("gas", "gate", "share").startswith("✓")


def test_a_number_written_as_text_is_repeated_as_a_number() -> None:
    predict("cache", "16000")
    assert repr(predict("cache", None)) == "○ cache: your guess so far is 16,000 GiB."


def test_of_a_choice_nothing_is_far_or_near() -> None:
    assert told(2, 1, "choice") == "→ choice: You said 2, it is 1. Because."
    assert "exactly right" in told(1, 1, "choice")
    assert "exactly right" in told("1", 1, "choice")


def test_the_choice_nearest_to_the_answer_is_right() -> None:
    """Choices are round numbers, and what is measured is not."""
    assert "You said 1, and it is 1.2: right." in told(1, 1.2, "choice")
    assert told(2, 1.2, "choice") == "→ choice: You said 2, it is 1.2. Because."


def test_a_guess_of_one_is_not_told_the_answer_as_a_ratio() -> None:
    assert "You said 1, it is 14. " in told(1, 14, "share")


def test_what_is_none_of_the_choices_is_not_kept() -> None:
    """Neither in place of no guess, nor in place of an earlier one."""
    said = "○ choice: not noted, atomics. It is none of the choices: 0, 1, 2. You may guess again."
    assert repr(predict("choice", "atomics")) == said
    assert "no guess yet" in repr(predict("choice", None))
    predict("choice", 2)
    predict("choice", 5)
    assert repr(predict("choice", None)) == "○ choice: your guess so far is 2."
