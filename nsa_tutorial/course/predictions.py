"""Guess before you are told: `predict("name", value)`, and later `reveal("name", answer)`.

A guess may be anything: it is described, never trusted to behave.
"""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import torch

from nsa_tutorial.course import exercises, reader
from nsa_tutorial.course.exercises import Prediction
from nsa_tutorial.course.numerals import as_number, doubt, in_words, is_percent, percent
from nsa_tutorial.course.speech import Message

_NEAR = Fraction(1, 10)  # relative distance up to which a number is close
_MEANT = Fraction(1, 50)  # and up to which it is the wrong number that a thought leads to
_SAID = 80  # characters of a guess that are repeated
_TIMES = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine",
          10: "ten"}  # fmt: skip


def predict(name: str, guess: object) -> Message:
    """Note a guess; None is no guess yet, and a guess that is none of the choices is not kept.

    Raises:
        ValueError: for a prediction that does not exist, naming those that do.
    """
    asked = exercises.prediction(name)
    guess = _counted(asked.in_full(_simple(guess)), asked)
    if guess is not None and (_is_unclear(guess, asked) or not _is_choice(guess, asked)):
        return Message(
            "open", "○", name, f"not noted, {_written(guess, asked)}.", (_wish(guess, asked),)
        )
    if guess is not None:
        reader.note_guess(name, guess)
        wish = _wish(guess, asked) or "You will see."
        said = (wish, *reader.remarks_once())
        return Message("open", "○", name, f"noted, {_written(guess, asked)}.", said)
    before = reader.guess_of(name)
    if before is not None:
        return Message("open", "○", name, f"your guess so far is {_written(before, asked)}.")
    nudge = "Put a guess in place of None, even a wild one."
    return Message("open", "○", name, "no guess yet.", (asked.question, nudge))


def _wish(guess: object, asked: Prediction) -> str:
    """What to ask back about a guess that cannot be meant like this."""
    if _is_unclear(guess, asked):
        return doubt(guess, asked.unit)
    if not _is_choice(guess, asked):
        choices = ", ".join(_written(c, asked) for c in asked.choices)
        return f"It is none of the choices: {choices}. You may guess again."
    if not asked.asks_for_a_number:
        return ""
    number = as_number(guess, asked.unit)
    if number is None:
        return "Say it as a number, such as 8, 0.5 or 1/64, and you hear how far off it is."
    if asked.unit == "%" and 0 < number < 1 and not is_percent(guess):
        return "That is less than one percent. If you meant a share, multiply it by 100."
    return ""


def _is_unclear(guess: object, asked: Prediction) -> bool:
    """Whether a comma of a number can be read in two ways."""
    return asked.asks_for_a_number and bool(doubt(guess, asked.unit))


def _counted(guess: object, asked: Prediction) -> object:
    """The number alone of "about 8" and "8 x", and of "8 programs" where the question asks for
    programs."""
    if isinstance(guess, str) and asked.asks_for_a_number:
        found = re.fullmatch(r"\s*(?:about|around|~|≈)?\s*([\d.,_]+) ?(?:x|×|times)?\s*", guess)
        if found:
            return found[1]
        found = re.fullmatch(r"\s*([\d.,_]+) ?([A-Za-z]{3,})\s*", guess)
        if found and re.search(rf"\b{found[2]}\b", asked.question):
            return found[1]
    return guess


def reveal(name: str, answer: object) -> Message:
    """Compare the guess with the answer: how far off it was, and which thought leads there.

    Raises:
        ValueError: for a prediction that does not exist, naming those that do.
    """
    asked = exercises.prediction(name)
    guess, answer = _simple(reader.guess_of(name)), _simple(answer)
    truth = _written(answer, asked)
    share = as_number(answer, asked.unit)
    if is_percent(guess) and not asked.unit and isinstance(share, Fraction) and abs(share) < 1000:
        truth = percent(share)  # as the reader said it
    if guess is None:
        nudge = "Next time, guess first: an answer stays longer beside a guess, even a wrong one."
        return Message("open", "○", name, f"it is {truth}.", (asked.reason, nudge))
    said = _written(guess, asked)
    distance = _distance(guess, answer, asked)
    if distance in ("exactly right", "right"):
        lead = f"You said {said}, and it is {truth}: {distance}."
        return Message("right", "✓", name, lead, (asked.reason,))
    near = distance.startswith("close")
    thought = _thought(guess, asked)
    repeats = f" {truth} times " in distance  # "it is 14: 14 times too large"
    if thought and (repeats or distance.endswith(("% too large", "% too small"))):
        distance = ""  # the thought says more
    lead = f"You said {said}, it is {truth}{': ' + distance if distance else ''}."
    reason = f"{thought} {asked.reason}".strip()
    # a guess that is off is no failure: it has no colour of one
    return Message("right" if near else "open", "≈" if near else "→", name, lead, (reason,))


def _simple(value: object) -> object:
    """Tensors and arrays as numbers and lists, other things as they are."""
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            return value.item() if value.numel() == 1 else value.tolist()
        if isinstance(value, np.ndarray | np.generic):
            return value.item() if value.size == 1 else value.tolist()
    except Exception:
        return repr(type(value))  # a tensor without values, say on the meta device
    return value


def _written(value: object, asked: Prediction) -> str:
    """A guess or an answer in words that fit a line."""
    is_text = isinstance(value, str) and not asked.asks_for_a_number
    number = None if is_text else as_number(value, asked.unit)
    if isinstance(number, Fraction):
        if is_percent(value) and not asked.unit:
            return percent(number)
        return in_words(number) + (f" {asked.unit}" if asked.unit else "")
    try:
        text = value if isinstance(value, str) else repr(value)
        text = " ".join(text.split())
    except Exception:
        return f"something of type {type(value).__name__}"
    return text if len(text) <= _SAID else f"{text[:_SAID]}…"


def _distance(guess: object, answer: object, asked: Prediction) -> str:
    """How far off a guess is, in words; empty if there is nothing more to say than that it is."""
    x, y = as_number(guess, asked.unit), as_number(answer, asked.unit)
    if y is None or isinstance(answer, str) or asked.choices:
        if _chosen(guess, answer, asked):
            return "exactly right"
        return "right" if _is_nearest(x, y, asked) else ""
    if x is None:
        return "a number was asked for"
    if not (isinstance(x, Fraction) and isinstance(y, Fraction)):
        alike = x == y or (x != x and y != y)  # both infinite, or neither is a number
        return "exactly right" if alike else "not a finite number"
    if abs(x - y) <= abs(y) * Fraction(1, 10**9):
        return "exactly right"
    if abs(x - y) <= abs(y) * Fraction(asked.tolerance):
        return "right"
    if abs(x - y) == 1 and x.denominator == y.denominator == 1:
        return "off by one"
    if y == 0 or x == 0:
        return ""
    is_count = not asked.unit and _is_count(x) and _is_count(y)
    if x == 1 and is_count:
        return ""  # "14 times too small" repeats the answer
    if x == -y:
        return "the sign is the other way round"
    if x * y < 0:
        return "of the other sign"
    if is_count and x < 2 * y and y < 2 * x and abs(x / y - 1) > _NEAR:
        return f"your guess is {abs(x - y)} too {'large' if x > y else 'small'}"
    return _ratio(x / y, x - y if asked.unit == "%" else None)


def _is_count(number: Fraction) -> bool:
    """Whether a number is so small that a difference says more than a percentage."""
    return number.denominator == 1 and 0 < number <= 100


def _ratio(ratio: Fraction, points: Fraction | None) -> str:
    """A guess over the answer, both of one sign, in words; a guess in percent may be so many points
    off."""
    if abs(ratio - 1) <= _NEAR:
        return "close, within 10 %"
    large = ratio > 1
    times = ratio if large else 1 / ratio
    whole, wrong = round(times), "too large" if large else "too small"
    is_whole = abs(times - whole) <= whole * _NEAR / 2
    if whole == 2 and is_whole:
        return f"your guess is {'twice' if large else 'half'} the answer"
    if whole in _TIMES and is_whole:
        return f"your guess is {_TIMES[whole]} times {wrong}"
    if times < 2:
        # "41 % too large" of a number of percent could mean either
        off = round(abs(ratio - 1) * 100) if points is None else round(abs(points), 1)
        return f"your guess is {float(off):g} {'%' if points is None else 'points'} {wrong}"
    if times > 100:
        return f"your guess is far {wrong}"
    return f"your guess is {f'{float(times):.2g}' if times < 10 else whole} times {wrong}"


def _equal(guess: object, answer: object) -> bool:
    """Equality that never raises, and that also holds between text and lists."""
    if isinstance(guess, str) and isinstance(answer, str):
        x, y = (" ".join(text.casefold().split()).removesuffix("s") for text in (guess, answer))
        return x == y
    if isinstance(guess, list | tuple) and isinstance(answer, list | tuple):
        return len(guess) == len(answer) and all(map(_equal, guess, answer))
    if isinstance(guess, bool) or isinstance(answer, bool):
        return guess is answer
    try:
        return bool(guess == answer)
    except Exception:
        return False


def _chosen(guess: object, choice: object, asked: Prediction) -> bool:
    """Whether a guess is this choice, which may be a number written as text."""
    x, y = as_number(guess, asked.unit), as_number(choice, asked.unit)
    return _equal(guess, choice) or (x is not None and x == y)


def _is_nearest(x: object, y: object, asked: Prediction) -> bool:
    """Whether no other choice is nearer to the answer."""
    choices = [as_number(choice, asked.unit) for choice in asked.choices]
    if not all(isinstance(number, Fraction) for number in (x, y, *choices)):
        return False
    return all(abs(x - y) <= abs(choice - y) for choice in choices)


def _is_choice(guess: object, asked: Prediction) -> bool:
    """Whether a guess is one of the choices, or anything may be guessed."""
    return not asked.choices or any(_chosen(guess, choice, asked) for choice in asked.choices)


def _thought(guess: object, asked: Prediction) -> str:
    """The sentence on the thought that leads to this guess, if one is known."""
    number = as_number(guess, asked.unit)
    for wrong, told in asked.thoughts:
        if callable(wrong):
            try:
                if wrong(guess):
                    return told
            except Exception:
                continue  # the guess is of a kind that the question was not made for
            continue
        value = as_number(wrong, asked.unit)
        if isinstance(value, Fraction) and isinstance(number, Fraction):
            if abs(number - value) <= abs(value) * _MEANT:
                return told
        elif _equal(guess, wrong):
            return told
    return ""
