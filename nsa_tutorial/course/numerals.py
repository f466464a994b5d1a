"""Numbers as a reader writes them, "1,000", "1,6 %", "1/64" or "8 GiB", read exactly; and numbers
in words that fit a line.

A comma before groups of three digits separates thousands, as in 1,234, and any other comma is a
decimal one, as in 1,6 and 0,0156. A percentage such as "1,234 %" may mean both: it is asked about,
and not read. "1/16" is a share, whatever is asked for: 0.0625 of the whole, or 6.25 %.
"""

from __future__ import annotations

import math
import numbers as abstract
import re
from decimal import Decimal
from fractions import Fraction

_BINARY = ("KiB", "MiB", "GiB", "TiB")  # each is 1,024 of the one before
_MOST_DIGITS = 10_000  # before or behind the point, of a decimal number that is computed with


def is_percent(guess: object) -> bool:
    """Whether the reader wrote the sign."""
    return isinstance(guess, str) and guess.rstrip().endswith("%")


def doubt(guess: object, unit: str) -> str:
    """What to ask about a comma that can be read in two ways; empty where there is none."""
    if not isinstance(guess, str) or not (is_percent(guess) or unit == "%"):
        return ""
    found = re.search(r"(?<![\d.,])([1-9]\d{0,2}),(\d{3})(?![\d.,])", guess)
    if not found:
        return ""
    thousands, decimal = "".join(found.groups()), ".".join(found.groups())
    return f"Do you mean {decimal} % or {thousands} %? Write it without the comma."


def _without_commas(found: re.Match) -> str:
    """A run of digits, points and commas as Python writes it; as it is where that is unclear."""
    text = found[0]
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
        return text.replace(",", "")
    if re.fullmatch(r"\d*,\d+", text):
        return text.replace(",", ".")
    if re.fullmatch(r"[1-9]\d{0,2}(\.\d{3})+,\d+", text):
        return text.replace(".", "").replace(",", ".")
    return text


def as_number(value: object, unit: str) -> Fraction | float | None:
    """A number, exactly where it is finite; None for what is none, and for a comma in doubt.

    Args:
        value: a number, or text.
        unit: what is asked for, such as "GiB"; empty for a plain number.
    """
    if isinstance(value, bool) or doubt(value, unit):
        return None
    if isinstance(value, str):
        text = re.sub(r"[\d.,]+", _without_commas, value.strip().replace("_", ""))
        if unit in _BINARY and text[-3:] in _BINARY and not text.endswith(unit):
            plain = as_number(text[:-3], "")
            factor = Fraction(1024) ** (_BINARY.index(text[-3:]) - _BINARY.index(unit))
            return plain * factor if isinstance(plain, Fraction) else None
        has_unit = bool(unit) and text.endswith(unit)
        if has_unit:
            text = text[: -len(unit)].strip()
        try:
            if re.fullmatch(r"[+-]?\d{1,20}/\d{1,20}", text):
                return Fraction(text) * (100 if unit == "%" and not has_unit else 1)
            if re.fullmatch(r"[\d.]+ ?[kM]", text):
                return Fraction(text[:-1].strip()) * {"k": 1000, "M": 10**6}[text[-1]]
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except (ValueError, ZeroDivisionError):
            return None
    if isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) > _MOST_DIGITS:
        value = float(value)  # infinite, or 0: as a fraction it would fill the memory
    if not isinstance(value, abstract.Real | Decimal):
        return None
    try:
        return Fraction(value)
    except (OverflowError, ValueError, TypeError):  # infinite, or not a number
        try:
            return float(value)
        except (OverflowError, ValueError, TypeError):
            return None


def percent(share: Fraction) -> str:
    """A share as a percentage, `"1.56 %"`."""
    return f"{float(100 * share):.3g} %"


def in_words(number: Fraction) -> str:
    """A number in at most six digits, whole ones with their thousands."""
    if number.denominator == 1 and abs(number) < 10**15:
        return f"{int(number):,}"
    if 0 < abs(number) < Fraction(1, 10**300) or abs(number) >= 10**300:
        digits = abs(number.numerator).bit_length() - number.denominator.bit_length()
        return f"about 10^{round(digits * math.log10(2))}" + (", negative" if number < 0 else "")
    return f"{float(number):.6g}" if abs(number) < 10**15 else f"{float(number):.3g}"
