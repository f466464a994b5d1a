"""The predictions of chapter 00: how little of the context is looked at. It has no exercises."""

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
    Prediction(
        name="pairs_of_32_tokens",
        question="Of 528 pairs, how many does a list of the first block and the own one leave?",
        reason="The first 8 queries keep all their 36 pairs. Each of the other 24 has 8 keys of "
        "the first block, and in its own those up to itself: 3 · (8 · 8 + 36) = 300.",
        thoughts=(
            (
                528,
                "That is all pairs. A query of the last block no longer sees the two in between.",
            ),
            (512, "That is 32 queries times 16 keys, but nobody sees the keys after its own."),
            (
                264,
                "That is half of them. Early queries have hardly more than two blocks behind "
                "them, so a short sequence keeps more.",
            ),
            (256, "That is 32 queries times 8 keys. Most lists have two blocks."),
            (300, "The queries of the first block see keys, too: 36 pairs more."),
            (144, "Those are the own blocks alone. Most lists have the first block as well."),
            (lambda guess: guess > 528, "A list only takes pairs away."),
        ),
        tolerance=0.01,
    ),
    Prediction(
        name="percent_of_16384_tokens",
        question="And of 16,384 tokens: how many percent of the pairs are left?",
        reason="A query keeps 12.5 keys on average, as before, of the 8,192 that stand before it "
        "on average.",
        thoughts=(
            (64, "That is what 32 tokens keep. The list stays as short, but the rows get longer."),
            (9.5, "That is what 256 tokens keep."),
            (1.2, "That is what 2,048 tokens keep. Eight times as many keep an eighth of it."),
            (0.1, "That is 16 of 16,384. But a query sees half of them on average, not all."),
            (0, "Not quite: every query still sees its own block."),
            (lambda guess: guess > 5, "The list keeps its length. What it is held against grows."),
        ),
        unit="%",
        tolerance=0.35,
    ),
)
