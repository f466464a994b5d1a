"""The prediction of chapter 00: how little of the context is looked at. It has no exercises."""

from __future__ import annotations

from nsa_tutorial.course.exercises import Prediction

PREDICTIONS = (
    Prediction(
        name="share_of_the_tokens",
        question="What share of 65,536 tokens are 16 blocks of 64?",
        reason="16 blocks of 64 are 1,024 tokens, and 65,536 divided by 1,024 is 64.",
        thoughts=(
            (16 / 65_536, "That is 16 tokens. A block holds 64 of them."),
            (64 / 65_536, "That is a single block of 64 tokens. There are 16."),
            (1 / 16, "16 is the number of blocks that are read. How many does the context have?"),
            (lambda guess: guess >= 1, "A share lies between 0 and 1."),
        ),
        tolerance=0.03,
    ),
)
