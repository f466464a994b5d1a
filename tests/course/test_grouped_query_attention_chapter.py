"""What chapter 02's tutor recognises of what a reader would type, and what it says of guesses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa_tutorial.course.exercises import grouped_query_attention as exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.mistakes import Wrong
from nsa_tutorial.exact import grouped_query_attention as gqa
from nsa_tutorial.runtime.costs import kv_cache_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

EXERCISES = {e.name: e for e in exercises.EXERCISES}
PREDICTIONS = {p.name: p for p in exercises.PREDICTIONS}


# -- the module and the exercises say the same --


@pytest.mark.parametrize(("H", "G"), [(1, 4), (2, 3), (4, 1)])
def test_the_copies_are_the_modules(H: int, G: int) -> None:
    x = torch.randn(2, 5, H, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(exercises.expand_heads(x, G), gqa.expand_kv_heads(x, G))


def test_the_cache_is_the_modules() -> None:
    expected = kv_cache_bytes(1000, layers=7, H=4, D=192, DV=128) / 2**30
    assert exercises.cache_gib(1000, 7, 12, 3, 192, 128) == pytest.approx(expected)


@pytest.mark.parametrize("HQ", [1, 6, 42, 64])
@pytest.mark.parametrize("gib", [1, 7.5, 8, 60, 1000])
def test_one_more_kv_head_that_divides_would_not_fit(gib: float, HQ: int) -> None:
    shape = (262_144, 48)
    H = exercises.most_kv_heads(gib, *shape, HQ, 192, 128)
    divisors = [n for n in range(1, HQ + 1) if HQ % n == 0]
    assert H in (0, *divisors)
    for n in divisors:
        fits = exercises.cache_gib(*shape, HQ, HQ // n, 192, 128) <= gib
        assert fits == (n <= H)


# -- what the tutor says --


@pytest.mark.parametrize("name", EXERCISES)
def test_without_slips_a_wrong_solution_is_right(name: str) -> None:
    """A slip changes what it is named for, and nothing else."""
    e = EXERCISES[name]
    assert judge(e, Wrong(e.misconceptions[0].wrong.function, frozenset())).outcome == "right"


def expanded_before_the_heads(x: Tensor, G: int) -> Tensor:
    return x[:, :, None].expand(-1, -1, G, -1, -1).flatten(2, 3)


def beside_each_other(x: Tensor, G: int) -> Tensor:
    return torch.cat([x] * G, dim=2)


def not_flattened(x: Tensor, G: int) -> Tensor:
    return x[:, :, :, None].expand(-1, -1, -1, G, -1)


def with_copies_in_rounds(q: Tensor, k: Tensor) -> Tensor:
    k = k.repeat(1, 1, q.shape[2] // k.shape[2], 1)
    return torch.einsum("bihd,bjhd->bihj", q, k)


def as_in_the_chapter(q: Tensor, k: Tensor) -> Tensor:
    qg = q.unflatten(2, (k.shape[2], -1))
    return torch.einsum("bihgd,bjhd->bhgij", qg, k).flatten(1, 2)


def without_groups(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihd,bjhd->bihj", q, k)


def letters_of_the_other_split(q: Tensor, k: Tensor) -> Tensor:
    qg = q.unflatten(2, (-1, k.shape[2]))
    return torch.einsum("bihgd,bjhd->bihgj", qg, k).flatten(2, 3)


def summed_over_heads(dk_expanded: Tensor, H: int) -> Tensor:
    return dk_expanded.sum(2)


def viewed_as_rounds(dk_expanded: Tensor, H: int) -> Tensor:
    B, M, HQ, D = dk_expanded.shape
    return dk_expanded.view(B, M, HQ // H, H, D).sum(2)


def split_by_the_number(dk_expanded: Tensor, H: int) -> Tensor:
    return dk_expanded.unflatten(2, (-1, H)).sum(3)


def two_times_two(tokens: int, layers: int, HQ: int, G: int, D: int, DV: int) -> float:
    return 2 * 2 * tokens * layers * (HQ // G) * (D + DV) / 2**30


def sixteen_bits(tokens: int, layers: int, HQ: int, G: int, D: int, DV: int) -> float:
    return 16 * tokens * layers * (HQ // G) * (D + DV) / 2**30


def divided(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> float:
    return gib * 2**30 / (2 * tokens * layers * (D + DV))


def halved(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    H = HQ
    while H * 2 * tokens * layers * (D + DV) > gib * 2**30:
        H //= 2
    return H


def counted_down(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    H = min(HQ, int(gib * 2**30 // (2 * tokens * layers * (D + DV))))
    while HQ % H:
        H -= 1
    return H


def range_without_its_end(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    per_head = 2 * tokens * layers * (D + DV)
    return max((H for H in range(1, HQ) if HQ % H == 0 and H * per_head <= gib * 2**30), default=0)


TYPED = [
    (
        "expand_heads",
        expanded_before_the_heads,
        "`repeat` where `repeat_interleave` is meant",
    ),
    ("expand_heads", beside_each_other, "`repeat` where `repeat_interleave` is meant"),
    ("expand_heads", not_flattened, "leaving the copies on an axis of their own"),
    (
        "grouped_scores",
        with_copies_in_rounds,
        "sharing a key among every H-th query head, not among neighbours",
    ),
    ("grouped_scores", as_in_the_chapter, "heads before positions, as in the chapter's scores"),
    ("grouped_scores", without_groups, "pairing query heads with KV heads one to one"),
    (
        "grouped_scores",
        letters_of_the_other_split,
        "splitting the head axis as [G, H] instead of [H, G]",
    ),
    ("key_gradient", summed_over_heads, "adding up all heads, whatever they read"),
    ("key_gradient", viewed_as_rounds, "adding up every H-th head, not neighbours"),
    ("key_gradient", split_by_the_number, "groups of H heads where groups of G are meant"),
    ("cache_gib", two_times_two, "a factor of two too many"),
    ("cache_gib", sixteen_bits, "counting bits, not bytes"),
    ("most_kv_heads", divided, "a fraction of a KV head"),
    ("most_kv_heads", halved, "halving HQ until it fits"),
    ("most_kv_heads", counted_down, "an error where not even one KV head fits"),
    ("most_kv_heads", range_without_its_end, "leaving H = HQ out of the numbers to try"),
]


@pytest.mark.parametrize(
    ("name", "typed", "mistake"), TYPED, ids=[typed.__name__ for _, typed, _ in TYPED]
)
def test_what_a_reader_would_type_is_recognised(name: str, typed: Callable, mistake: str) -> None:
    assert judge(EXERCISES[name], typed).misconceptions == (mistake,)


def test_copies_are_as_good_as_groups() -> None:
    """The exercise asks to do without copies, and takes an answer that makes them."""

    def with_copies(q: Tensor, k: Tensor) -> Tensor:
        copies = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        return torch.einsum("bihd,bjhd->bihj", q, copies)

    assert judge(EXERCISES["grouped_scores"], with_copies).outcome == "right"


def test_thoughts_about_guesses_hold() -> None:
    """The numbers that the thoughts give as somebody's way to them come out of that way."""
    guesses = {
        name: [guess for guess, _ in p.thoughts if not callable(guess)]
        for name, p in PREDICTIONS.items()
    }
    cache = kv_cache_bytes(65_536, layers=60, H=64, D=128)
    for way in (cache / 2, 2 * cache, cache / 60, cache / 64):
        assert way / 2**30 in guesses["cache_of_64_heads"]
    assert round(cache / 1e9, 3) in guesses["cache_of_64_heads"]
    heads = torch.arange(2)
    assert guesses["repeated_by_repeat"][0] == heads.repeat_interleave(4).tolist()
    assert guesses["repeated_by_repeat_interleave"][0] == heads.repeat(4).tolist()
