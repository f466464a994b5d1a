"""Exercises of chapter 02: copies for every head, scores without copies, the gradient of shared
keys, the size of the cache, and the KV heads that a given memory can hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.figures import Picture, grid, new_figure


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- expand_heads --


def expand_heads(x: Tensor, G: int) -> Tensor:
    """Keys or values [B, M, H, D] → [B, M, H·G, D], one copy per query head."""
    return x.repeat_interleave(G, dim=2)


def _draw_heads(arguments: tuple, got: Tensor, expected: Tensor) -> Picture:
    """The first number of every head, yours above the right ones."""
    rows = torch.stack([got[0, 0, :, 0], expected[0, 0, :, 0]]).detach().numpy()
    wrong = int((abs(rows[0] - rows[1]) > 1e-5).sum())
    figure, axes = new_figure(6.0, 1.9)
    grid(axes[0, 0], rows, colour="key", text=".0f" if abs(rows).max() >= 10 else ".2f")
    axes[0, 0].set_yticks([0, 1], ["yours", "expected"])
    axes[0, 0].set_xticks(range(rows.shape[1]))
    axes[0, 0].set_xlabel("query head hq")
    return Picture(figure, f"{wrong} of {rows.shape[1]} query heads got another head's keys")


_EXPAND = Exercise(
    name="expand_heads",
    statement="""
`x` holds keys (or values) `[B, M, H, D]`. Return `[B, M, H·G, D]` in which head `hq` is head
`hq // G` of `x`: every query head gets its own copy of what its group shares.
""",
    minutes=3,
    difficulty=1,
    solution=expand_heads,
    misconceptions=(
        Misconception(
            "`repeat` where `repeat_interleave` is meant",
            lambda x, G: x.repeat(1, 1, G, 1),
            "`repeat` lays whole copies of all heads one after the other, so that query head hq "
            "gets KV head hq % H: neighbours no "
            "longer share. The shape is right, and with one KV head so is the result. Print "
            "which head each copy came from.",
        ),
        Misconception(
            "repeating positions, not heads",
            lambda x, G: x.repeat_interleave(G, dim=1),
            "The layout is [batch, position, head, width]: look at which of the four dimensions "
            "grew.",
        ),
        Misconception(
            "`repeat_interleave` without a dimension",
            lambda x, G: x.repeat_interleave(G),
            "Without `dim` PyTorch flattens the tensor first and repeats single numbers. Tell it "
            "which dimension holds the heads.",
        ),
        Misconception(
            "H copies of each head where G are needed",
            lambda x, G: x.repeat_interleave(x.shape[2], dim=2),
            "Each KV head is needed once for every query head that reads it. How many are those?",
        ),
    ),
    cases=(
        Case(
            "one position, two KV heads holding 10 and 20, G = 3",
            lambda: (torch.tensor([10.0, 20.0]).view(1, 1, 2, 1), 3),
        ),
        Case("three KV heads, G = 2, two sequences", lambda: (_random(2, 5, 3, 4, seed=0), 2)),
        Case("G = 1: nothing to share", lambda: (_random(1, 3, 4, 2, seed=1), 1)),
        Case(
            "one KV head: here `repeat` would be right too",
            lambda: (_random(1, 4, 1, 3, seed=2), 4),
        ),
    ),
    picture=_draw_heads,
)


# -- grouped_scores --


def grouped_scores(q: Tensor, k: Tensor) -> Tensor:
    """Unscaled scores [B, N, HQ, M] of queries [B, N, HQ, D] with shared keys [B, M, H, D]."""
    H = k.shape[2]
    G = q.shape[2] // H
    qg = q.unflatten(2, (H, G))  # [B, N, H, G, D]
    scores = torch.einsum("bihgd,bjhd->bihgj", qg, k)  # [B, N, H, G, M]
    return scores.flatten(2, 3)  # [B, N, HQ, M]


def _heads_interleaved(q: Tensor, k: Tensor) -> Tensor:
    H = k.shape[2]
    qg = q.unflatten(2, (q.shape[2] // H, H))
    return torch.einsum("bighd,bjhd->bighj", qg, k).flatten(2, 3)


def _merged_in_the_wrong_order(q: Tensor, k: Tensor) -> Tensor:
    H = k.shape[2]
    qg = q.unflatten(2, (H, q.shape[2] // H))
    return torch.einsum("bihgd,bjhd->bighj", qg, k).flatten(2, 3)


def _merged_by_reshape(q: Tensor, k: Tensor) -> Tensor:
    (B, N, HQ, _), (M, H) = q.shape, k.shape[1:3]
    return torch.einsum("bihgd,bjhd->bhgij", q.unflatten(2, (H, HQ // H)), k).reshape(B, N, HQ, M)


def _heads_before_positions(q: Tensor, k: Tensor) -> Tensor:
    H = k.shape[2]
    return torch.einsum("bihgd,bjhd->bhgij", q.unflatten(2, (H, q.shape[2] // H)), k).flatten(1, 2)


def _scaled(q: Tensor, k: Tensor) -> Tensor:
    return grouped_scores(q, k) * q.shape[-1] ** -0.5


def _group_summed(q: Tensor, k: Tensor) -> Tensor:
    H = k.shape[2]
    return torch.einsum("bihgd,bjhd->bihj", q.unflatten(2, (H, q.shape[2] // H)), k)


_SCORES = Exercise(
    name="grouped_scores",
    statement="""
Queries `q` `[B, N, HQ, D]`, shared keys `k` `[B, M, H, D]`. Return the dot product of every query
with every key its head reads, `[B, N, HQ, M]` (mind the order of the axes), unscaled and unmasked.
Do it without copying the keys if you can, as a kernel does: regroup the queries, leave the keys
alone.
""",
    minutes=7,
    difficulty=2,
    solution=grouped_scores,
    misconceptions=(
        Misconception(
            "the head axis split as [G, H] instead of [H, G]",
            _heads_interleaved,
            "A split of an axis into (a, b) puts neighbours into the *last* part. Neighbouring "
            "query heads share a KV head, so "
            "which of h and g must run fastest? As it is, query head hq reads KV head hq % H.",
        ),
        Misconception(
            "merging the two head axes in the wrong order",
            _merged_in_the_wrong_order,
            "Every query met the right key, but the results came back under other heads' "
            "numbers: the order of the two axes before "
            "flattening must be the order in which you split them.",
        ),
        Misconception(
            "merging axes with a reshape that does not move them",
            _merged_by_reshape,
            "einsum gave you [B, H, G, N, M], positions *after* heads. `reshape` reads the "
            "numbers in the order in which they lie "
            "and cuts them anew: it never moves an axis. With one position you cannot see it, "
            "with two the heads and positions are "
            "mixed up. In which order must the axes stand before you merge two of them?",
        ),
        Misconception(
            "the order of axes of the chapter's scores, heads before positions",
            _heads_before_positions,
            "Every number is right. Here the result is asked for as [B, N, HQ, M], positions "
            "before heads, the layout of q.",
        ),
        Misconception(
            "scaled scores where unscaled ones are asked for",
            _scaled,
            "The dot products are right, and in attention the scale comes next. This exercise "
            "wants them before that.",
        ),
        Misconception(
            "summing the scores of a group's heads",
            _group_summed,
            "einsum sums over every letter that is missing after the arrow. Sharing keys does "
            "not mean sharing scores: each of the "
            "HQ heads keeps its own.",
        ),
    ),
    cases=(
        Case(
            "queries 1 … 6, keys 1 and 10, one position",
            lambda: (
                torch.arange(1.0, 7.0).view(1, 1, 6, 1),
                torch.tensor([1.0, 10.0]).view(1, 1, 2, 1),
            ),
        ),
        Case(
            "two positions, two heads: queries 1 and 2, then 3 and 4; keys 1 and 10, then 5 and 50",
            lambda: (
                torch.arange(1.0, 5.0).view(1, 2, 2, 1),
                torch.tensor([1.0, 10.0, 5.0, 50.0]).view(1, 2, 2, 1),
            ),
        ),
        Case(
            "three KV heads, G = 2, N < M",
            lambda: (_random(2, 3, 6, 4, seed=3), _random(2, 5, 3, 4, seed=4)),
        ),
        Case(
            "one query head per KV head",
            lambda: (_random(1, 2, 3, 4, seed=5), _random(1, 3, 3, 4, seed=6)),
        ),
    ),
)


# -- key_gradient --


def key_gradient(dk_expanded: Tensor, H: int) -> Tensor:
    """Gradient with respect to the keys [B, M, H, D], from the gradient of their expanded copies
    [B, M, HQ, D]."""
    G = dk_expanded.shape[2] // H
    return dk_expanded.unflatten(2, (H, G)).sum(dim=3)  # every copy's share, added up


_GRADIENT = Exercise(
    name="key_gradient",
    statement="""
You expanded keys `[B, M, H, D]` to one copy per query head, and the backward pass gave you
`dk_expanded` `[B, M, HQ, D]`, the gradient with respect to the *copies*. Return the gradient with
respect to the keys themselves, `[B, M, H, D]`.
""",
    minutes=4,
    difficulty=2,
    solution=key_gradient,
    misconceptions=(
        Misconception(
            "averaging over the group",
            lambda dk_expanded, H: dk_expanded.unflatten(2, (H, -1)).mean(dim=3),
            "If you move a shared key a little, every head of the group sees it move, and the "
            "loss changes by all their shares "
            "together. What would an average say about a group of two equal heads?",
        ),
        Misconception(
            "adding up every H-th head, not neighbours",
            lambda dk_expanded, H: dk_expanded.unflatten(2, (-1, H)).sum(dim=2),
            "Query head hq read KV head hq // G, so the heads of one group stand next to each "
            "other. You added heads hq, hq + H, "
            "…, the wiring of `repeat`.",
        ),
        Misconception(
            "summing over the KV heads, not over the group",
            lambda dk_expanded, H: dk_expanded.unflatten(2, (H, -1)).sum(dim=2),
            "After the split into (H, G) there are two axes of heads, and the result keeps the "
            "one of the *KV heads*. Print the "
            "shape after the split, and count which axis has to go.",
        ),
        Misconception(
            "keeping one head's gradient for the whole group",
            lambda dk_expanded, H: dk_expanded[:, :, :: dk_expanded.shape[2] // H],
            "The other heads of the group used the same key, and their gradients are lost here.",
        ),
    ),
    cases=(
        Case(
            "one position, six query heads with gradients 1, 2, 4, 8, 16, 32, two KV heads",
            lambda: (2.0 ** torch.arange(6).view(1, 1, 6, 1), 2),
        ),
        Case("three KV heads, G = 2", lambda: (_random(2, 4, 6, 3, seed=7), 3)),
        Case("one KV head shared by all", lambda: (_random(1, 3, 4, 2, seed=8), 1)),
    ),
)


# -- cache_gib --


def cache_gib(tokens: int, layers: int, HQ: int, G: int, D: int, DV: int) -> float:
    """GiB of the KV cache of one sequence, two bytes per number."""
    H = HQ // G  # KV heads: only they are cached
    numbers = tokens * layers * H * (D + DV)  # a key of width D and a value of width DV per KV head
    return 2 * numbers / 2**30


_CACHE = Exercise(
    name="cache_gib",
    statement="""
A model has `layers` layers, each with `HQ` query heads in groups of `G`; keys are `D` wide, values
`DV` wide. How many GiB (1 GiB = 2³⁰ bytes) does the cache of one sequence of `tokens` tokens take
at two bytes per number?
""",
    minutes=3,
    difficulty=1,
    solution=cache_gib,
    misconceptions=(
        Misconception(
            "counting query heads",
            lambda tokens, layers, HQ, G, D, DV: 2 * tokens * layers * HQ * (D + DV) / 2**30,
            "The cache holds keys and values. How many different ones does a layer have per token?",
        ),
        Misconception(
            "counting the heads of a group, G, where KV heads are meant",
            lambda tokens, layers, HQ, G, D, DV: 2 * tokens * layers * G * (D + DV) / 2**30,
            "G says how many query heads read one KV head: a larger group makes a *smaller* "
            "cache. Count the KV heads.",
        ),
        Misconception(
            "multiplying by the group size where it divides",
            lambda tokens, layers, HQ, G, D, DV: 2 * tokens * layers * HQ * G * (D + DV) / 2**30,
            "A larger group shares more, so the cache gets smaller. How many groups do HQ heads "
            "make?",
        ),
        Misconception(
            "counting the keys alone",
            lambda tokens, layers, HQ, G, D, DV: 2 * tokens * layers * (HQ // G) * D / 2**30,
            "Scores need the earlier keys; what does the weighted sum need?",
        ),
        Misconception(
            "taking values to be as wide as keys",
            lambda tokens, layers, HQ, G, D, DV: 2 * tokens * layers * (HQ // G) * 2 * D / 2**30,
            "Often DV = D, not always: this case has values of another width.",
        ),
        Misconception(
            "counting a single layer",
            lambda tokens, layers, HQ, G, D, DV: 2 * tokens * (HQ // G) * (D + DV) / 2**30,
            "Every layer attends to its own keys and values, so every layer keeps its own cache.",
        ),
        Misconception(
            "GB (10⁹ bytes) where GiB (2³⁰ bytes) are asked for",
            lambda tokens, layers, HQ, G, D, DV: 2 * tokens * layers * (HQ // G) * (D + DV) / 1e9,
            "The number of bytes is right; only the unit you divide by is not.",
        ),
        Misconception(
            "bytes where GiB are asked for",
            lambda tokens, layers, HQ, G, D, DV: 2 * tokens * layers * (HQ // G) * (D + DV),
            "The number of bytes is right. How many bytes make one GiB?",
        ),
        Misconception(
            "MiB (2²⁰ bytes) where GiB (2³⁰ bytes) are asked for",
            lambda tokens, layers, HQ, G, D, DV: 2 * tokens * layers * (HQ // G) * (D + DV) / 2**20,
            "The number of bytes is right; the unit is one step too small.",
        ),
        Misconception(
            "whole GiB, the rest cut off",
            lambda tokens, layers, HQ, G, D, DV: (
                2 * tokens * layers * (HQ // G) * (D + DV) // 2**30
            ),
            "`//` throws away what is left over, and a cache of less than one GiB becomes 0. Use "
            "it only to count heads.",
        ),
        Misconception(
            "one byte per number",
            lambda tokens, layers, HQ, G, D, DV: tokens * layers * (HQ // G) * (D + DV) / 2**30,
            "fp16 and bf16 numbers take 16 bits. How many bytes is that?",
        ),
    ),
    cases=(
        Case(
            "65,536 tokens, 4 layers, HQ = 12, G = 3, D = 192, DV = 128",
            lambda: (65_536, 4, 12, 3, 192, 128),
        ),
        Case(
            "131,072 tokens, 30 layers, HQ = 64, G = 16, D = 192, DV = 128",
            lambda: (131_072, 30, 64, 16, 192, 128),
        ),
    ),
    tolerance=1e-6,
)


# -- most_kv_heads --


def most_kv_heads(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    """The most KV heads whose cache of one sequence fits into `gib` GiB, two bytes per number; 0 if
    none fits."""
    per_head = 2 * tokens * layers * (D + DV)  # bytes that one KV head costs
    shareable = [H for H in range(1, HQ + 1) if HQ % H == 0]  # groups must be of equal size
    return max((H for H in shareable if H * per_head <= gib * 2**30), default=0)


def _most(room: float, per_head: int, HQ: int) -> int:
    return max((H for H in range(1, HQ + 1) if HQ % H == 0 and H * per_head <= room), default=0)


def _powers_of_two(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    room, per_head = gib * 2**30, 2 * tokens * layers * (D + DV)
    return max(
        (H for H in (1, 2, 4, 8, 16, 32, 64) if HQ % H == 0 and H * per_head <= room), default=0
    )


def _fewest(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    return min(1, most_kv_heads(gib, tokens, layers, HQ, D, DV))


def _group_instead(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    H = most_kv_heads(gib, tokens, layers, HQ, D, DV)
    return HQ // H if H else 0


_MOST = Exercise(
    name="most_kv_heads",
    statement="""
The other way round. `gib` GiB of memory are left for the cache of one sequence of `tokens` tokens,
in a model with `layers` layers, `HQ` query heads, keys of width `D` and values of width `DV`. What
is the largest number `H` of KV heads that the model can have if its cache is to fit, at two bytes
per number? A cache that fills the memory exactly fits. If even one KV head is too many, return 0.
""",
    minutes=6,
    difficulty=2,
    solution=most_kv_heads,
    misconceptions=(
        Misconception(
            "a number of KV heads that does not divide HQ",
            lambda gib, tokens, layers, HQ, D, DV: min(
                HQ, int(gib * 2**30 // (2 * tokens * layers * (D + DV)))
            ),
            "So many would fit, but the query heads cannot be shared out evenly among them. What "
            "did `group_size(8, 3)` say?",
        ),
        Misconception(
            "more KV heads than there are query heads",
            lambda gib, tokens, layers, HQ, D, DV: int(
                gib * 2**30 // (2 * tokens * layers * (D + DV))
            ),
            "This is how many KV heads the memory can hold. How many can a model with HQ query "
            "heads have, and which numbers share "
            "them out evenly?",
        ),
        Misconception(
            "trying powers of two only",
            _powers_of_two,
            "Most models take a power of two, but any divisor of HQ makes groups of equal size.",
        ),
        Misconception(
            "the group size G where the number of KV heads is asked for",
            _group_instead,
            "G = HQ // H is the number of query heads that share one KV head. You had H in your "
            "hands.",
        ),
        Misconception(
            "the fewest KV heads, not the most",
            _fewest,
            "One KV head is the smallest cache. Asked for is how little sharing will do.",
        ),
        Misconception(
            "taking an exact fit for too large",
            lambda gib, tokens, layers, HQ, D, DV: _most(
                gib * 2**30 - 1, 2 * tokens * layers * (D + DV), HQ
            ),
            "A cache may fill the memory to the last byte: compare with ≤.",
        ),
        Misconception(
            "GB (10⁹ bytes) where GiB (2³⁰ bytes) are given",
            lambda gib, tokens, layers, HQ, D, DV: _most(
                gib * 1e9, 2 * tokens * layers * (D + DV), HQ
            ),
            "The memory is given in GiB, which are a little larger than GB.",
        ),
        Misconception(
            "counting the keys alone",
            lambda gib, tokens, layers, HQ, D, DV: _most(gib * 2**30, 2 * tokens * layers * D, HQ),
            "Scores need the earlier keys; what does the weighted sum need?",
        ),
        Misconception(
            "taking values to be as wide as keys",
            lambda gib, tokens, layers, HQ, D, DV: _most(gib * 2**30, 4 * tokens * layers * D, HQ),
            "Often DV = D, not always: this case has values of another width.",
        ),
        Misconception(
            "counting a single layer",
            lambda gib, tokens, layers, HQ, D, DV: _most(gib * 2**30, 2 * tokens * (D + DV), HQ),
            "Every layer keeps its own cache, and all of them have to fit at once.",
        ),
        Misconception(
            "one byte per number",
            lambda gib, tokens, layers, HQ, D, DV: _most(
                gib * 2**30, tokens * layers * (D + DV), HQ
            ),
            "fp16 and bf16 numbers take 16 bits. How many bytes is that?",
        ),
    ),
    cases=(
        Case("room for 10 KV heads, HQ = 12", lambda: (80, 262_144, 48, 12, 192, 128)),
        Case(
            "room for 8 KV heads and a little more, HQ = 32, DV < D",
            lambda: (10, 65_536, 30, 32, 192, 128),
        ),
        Case(
            "an exact fit: a million tokens in 120 GiB, HQ = 64",
            lambda: (120, 1_048_576, 60, 64, 128, 128),
        ),
        Case("not even one KV head fits", lambda: (1, 1_048_576, 60, 64, 128, 128)),
        Case(
            "room for more KV heads than there are query heads", lambda: (100, 4_096, 10, 6, 64, 64)
        ),
    ),
)

EXERCISES = (_EXPAND, _SCORES, _GRADIENT, _CACHE, _MOST)
