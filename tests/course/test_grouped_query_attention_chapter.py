"""What chapter 02's tutor recognises of what a reader would type, and what it says of guesses."""

from __future__ import annotations

import json
import linecache
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa_tutorial.course.costs import kv_cache_bytes
from nsa_tutorial.course.exercises import Misconception
from nsa_tutorial.course.exercises import grouped_query_attention as exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import grouped_query_attention as pictures
from nsa_tutorial.exact import grouped_query_attention as gqa
from nsa_tutorial.runtime import environment

pytestmark = pytest.mark.usefixtures("one_thread")

here = environment.detect()
EXERCISES = {e.name: e for e in exercises.EXERCISES}
PREDICTIONS = {p.name: p for p in exercises.PREDICTIONS}


def skip_without_triton() -> None:
    if missing := here.why_not("triton", here.device):
        pytest.skip(missing)


# -- the module and the exercises say the same --


@pytest.mark.parametrize(("H", "G"), [(1, 4), (2, 3), (4, 1)])
def test_the_copies_are_the_modules(H: int, G: int) -> None:
    x = torch.randn(2, 5, H, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(exercises.expand_heads(x, G), gqa.expand_kv_heads(x, G))


@pytest.mark.parametrize("HQ", [1, 6, 42, 64])
@pytest.mark.parametrize("gib", [1, 7.5, 8, 60, 1000])
def test_one_more_kv_head_that_divides_would_not_fit(gib: float, HQ: int) -> None:
    shape = (262_144, 48)
    H = exercises.most_kv_heads(gib, *shape, HQ, 192, 128)
    divisors = [n for n in range(1, HQ + 1) if HQ % n == 0]
    assert H in (0, *divisors)
    for n in divisors:
        size = kv_cache_bytes(shape[0], layers=shape[1], H=n, D=192, DV=128)
        assert (size <= gib * 2**30) == (n <= H)


def test_the_kernel_scores_as_the_module_does() -> None:
    H, G, D = 3, 3, 8
    skip_without_triton()
    q, k = torch.randn(1, 1, H * G, D), torch.randn(1, 1, H, D)
    q, k, s = (x.to(here.device) for x in (q, k, torch.zeros(H * G)))
    exercises.score_group()[H,](q, k, s, G, D=D, GT=4)
    torch.testing.assert_close(s, exercises.grouped_scores(q, k)[0, 0, :, 0])


def test_timing_a_step_leaves_torch_its_threads() -> None:
    before = torch.get_num_threads()
    assert pictures.step_ms(H=8, tokens=16) > 0
    assert torch.get_num_threads() == before


# -- what the tutor says --


def test_a_kernel_without_its_decorator_is_told() -> None:
    skip_without_triton()
    assert "@triton.jit" in judge(EXERCISES["score_group"], lambda: lambda Q: None).text


def test_a_kernel_that_is_not_returned_is_told() -> None:
    def forgotten():
        def kernel(Q):
            return Q

    skip_without_triton()
    verdict = judge(EXERCISES["score_group"], forgotten)
    assert (verdict.outcome, "return kernel" in verdict.text) == ("wrong", True)


def test_the_kernel_itself_is_told_from_the_function_that_returns_it() -> None:
    skip_without_triton()
    verdict = judge(EXERCISES["score_group"], exercises.score_group())
    assert (verdict.outcome, "the function that returns it" in verdict.text) == ("wrong", True)


def test_the_frame_with_all_its_gaps_is_no_attempt() -> None:
    skip_without_triton()
    path = Path(__file__).parents[2] / "notebooks/02_grouped_query_attention.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    frame = "".join(next(c["source"] for c in cells if c["id"] == "score-group-stub"))
    name = "<frame of score_group>"
    linecache.cache[name] = (len(frame), None, frame.splitlines(keepends=True), name)
    namespace = {"tl": tl, "triton": triton}
    exec(compile(frame, name, "exec"), namespace)
    verdict = judge(EXERCISES["score_group"], namespace["score_group"])
    assert verdict.outcome == "not attempted"


def test_open_gaps_are_named_and_filled_ones_are_not() -> None:
    def half_done() -> object:
        @triton.jit
        def kernel(Q, K, S, G, D: tl.constexpr, GT: tl.constexpr):
            member = tl.arange(0, GT)
            in_group = ...
            row = member[..., None]
            s = ...
            tl.store(S + row, s, mask=in_group)

        return kernel

    skip_without_triton()
    text = judge(EXERCISES["score_group"], half_done).text
    assert "`in_group = ...` and `s = ...`" in text
    assert "member" not in text and "row" not in text


def test_a_number_where_the_heads_of_a_group_belong_is_told() -> None:
    def first_head_alone() -> object:
        @triton.jit
        def kernel(Q, K, S, G, D: tl.constexpr, GT: tl.constexpr):
            h = tl.program_id(0)
            width, member = tl.arange(0, D), tl.arange(0, GT)
            key = tl.load(K + h * D + width)
            heads = h * G
            in_group = member < G
            q_tile = tl.load(Q + heads * D + width[None, :], mask=in_group[:, None], other=0.0)
            tl.store(S + heads, tl.sum(q_tile * key, axis=1), mask=in_group)

        return kernel

    skip_without_triton()
    assert "`heads` is one number" in judge(EXERCISES["score_group"], first_head_alone).text


def test_places_without_a_score_are_said_to_have_none() -> None:
    skip_without_triton()
    e = EXERCISES["score_group"]
    (wrong,) = (m.wrong for m in e.misconceptions if m.name.startswith("comparing the query head"))
    empty, past_end, into_next, scores = e.run(wrong, 2, 2, 4)
    assert (empty, past_end, into_next) == (2, 0, 0)
    assert scores.isnan().tolist() == [False, False, True, True]
    assert "places of S that got no score" in judge(e, wrong).text


def test_a_function_of_torch_is_told_in_the_words_of_triton() -> None:
    def with_torch() -> object:
        @triton.jit
        def kernel(Q, K, S, G, D: tl.constexpr, GT: tl.constexpr):
            heads = tl.program_id(0) * G + tl.arange(0, GT)
            tl.store(S + heads, torch.sum(tl.load(K + tl.arange(0, D)), dim=0))

        return kernel

    skip_without_triton()
    text = judge(EXERCISES["score_group"], with_torch).text
    assert "the function of `tl`" in text and "`T`" not in text


def test_a_matrix_product_with_a_row_is_told() -> None:
    def with_a_product() -> object:
        @triton.jit
        def kernel(Q, K, S, G, D: tl.constexpr, GT: tl.constexpr):
            h = tl.program_id(0)
            width, member = tl.arange(0, D), tl.arange(0, GT)
            key = tl.load(K + h * D + width)
            heads = h * G + member
            q_tile = tl.load(Q + heads[:, None] * D + width[None, :])
            tl.store(S + heads, q_tile @ key, mask=member < G)

        return kernel

    skip_without_triton()
    assert "`key` is one row" in judge(EXERCISES["score_group"], with_a_product).text


@pytest.mark.parametrize("known", EXERCISES["score_group"].misconceptions, ids=lambda m: m.name)
def test_a_wrong_kernel_is_recognised(known: Misconception) -> None:
    """Each is seen from its numbers, though the programs run one after the other here."""
    skip_without_triton()
    verdict = judge(EXERCISES["score_group"], known.wrong)
    assert verdict.misconceptions == (known.name,)


def test_a_test_may_compare_with_the_module() -> None:
    def against_ours(expand: Callable) -> bool:
        x = torch.randn(2, 3, 3, 2)
        copies = expand(x, 2)
        right = gqa.expand_kv_heads(x, 2)
        return copies.shape == right.shape and torch.equal(copies, right)

    assert judge(EXERCISES["wiring_is_right"], against_ours).outcome == "right"


def test_a_tensor_of_answers_is_told_from_one() -> None:
    def number_by_number(expand: Callable) -> Tensor:
        x = torch.randn(1, 5, 2, 4)
        return expand(x, 3) == gqa.expand_kv_heads(x, 3)

    def in_a_tensor(expand: Callable) -> Tensor:
        return torch.tensor(exercises.wiring_is_right(expand))

    e = EXERCISES["wiring_is_right"]
    assert "torch.equal" in judge(e, number_by_number).text
    assert judge(e, in_a_tensor).outcome == "right"


def test_the_chapters_group_size_fits_no_case() -> None:
    """A function that picks up the notebook's own `G` is wrong on every case, and never by luck."""
    for case in EXERCISES["grouped_scores"].cases:
        q, k = case.arguments()
        assert q.shape[2] != 4 * k.shape[2]


def with_zeros(expand: Callable) -> bool:
    x = torch.zeros(1, 5, 2, 4)
    copies = expand(x, 3)
    right = gqa.expand_kv_heads(x, 3)
    return copies.shape == right.shape and torch.equal(copies, right)


def with_the_notebooks_size(q: Tensor, k: Tensor) -> Tensor:
    G = 4
    qg = q.unflatten(2, (k.shape[2], G))
    return torch.einsum("bihgd,bjhd->bihgj", qg, k).flatten(2, 3)


def merged_in_einsum(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihgd,bjhd->bi(hg)j", q.unflatten(2, (k.shape[2], -1)), k)


def summed_over_the_last(dk_expanded: Tensor, H: int) -> Tensor:
    return dk_expanded.unflatten(2, (H, -1)).sum(-1)


def split_by_the_notebooks_size(dk_expanded: Tensor, H: int) -> Tensor:
    return dk_expanded.unflatten(2, (H, 4)).sum(3)


def one_kv_head(expand: Callable) -> bool:
    x = torch.randn(1, 2, 1, 4)
    return torch.equal(expand(x, 4), x.repeat_interleave(4, dim=2))


def the_same_sum(expand: Callable) -> bool:
    x = torch.randn(1, 5, 2, 4)
    copies = expand(x, 3)
    is_shaped = copies.shape == (1, 5, 6, 4)
    return is_shaped and torch.allclose(copies.sum(), 3 * x.sum(), atol=1e-4)


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


def by_the_number_of_kv_heads(expand: Callable) -> bool:
    H, G = 2, 3
    x = torch.randn(1, 5, H, 4)
    copies = expand(x, G)
    if copies.shape != (1, 5, H * G, 4):
        return False
    return all(torch.equal(copies[:, :, hq], x[:, :, hq // H]) for hq in range(H * G))


def by_any(expand: Callable) -> bool:
    H, G = 2, 4
    x = torch.randn(1, 5, H, 4)
    copies = expand(x, G)
    if copies.shape != (1, 5, H * G, 4):
        return False
    return any(torch.equal(copies[:, :, hq], x[:, :, hq // G]) for hq in range(H * G))


def by_means(expand: Callable) -> bool:
    H, G = 2, 3
    x = torch.randn(1, 5, H, 4)
    copies = expand(x, G)
    if copies.shape != (1, 5, H * G, 4):
        return False
    right = gqa.expand_kv_heads(x, G)
    return torch.allclose(copies.mean((1, 3)), right.mean((1, 3)), atol=1e-6)


def divided_by_the_group(x: Tensor, G: int) -> Tensor:
    return x.repeat_interleave(x.shape[2] // G, dim=2)


def one_number(dk_expanded: Tensor, H: int) -> Tensor:
    return dk_expanded.unflatten(2, (H, -1)).sum()


def the_most_that_fit(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    return int(gib * 2**30 // (2 * tokens * layers * (D + DV)))


def without_a_last_return(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    for H in range(HQ, 0, -1):
        if HQ % H == 0 and H * 2 * tokens * layers * (D + DV) <= gib * 2**30:
            return H


def at_one_position(expand: Callable) -> bool:
    x = torch.arange(2.0).view(1, 1, 2, 1)
    return expand(x, 3).flatten().tolist() == [0, 0, 0, 1, 1, 1]


def with_letters(equation: str, *merged: int) -> Callable:
    def scores(q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum(equation, q.unflatten(2, (k.shape[2], -1)), k).flatten(*merged)

    return scores


def first_of_each_group(expand: Callable) -> bool:
    H, G = 2, 3
    x = torch.randn(1, 5, H, 4)
    copies = expand(x, G)
    if copies.shape != (1, 5, H * G, 4):
        return False
    return all(torch.equal(copies[:, :, h * G], x[:, :, h]) for h in range(H))


def every_fourth(expand: Callable) -> bool:
    x = torch.randn(1, 5, 2, 4)
    copies = expand(x, 4)
    return copies.shape == (1, 5, 8, 4) and torch.equal(copies[:, :, ::4], x)


def with_one_head_each(expand: Callable) -> bool:
    x = torch.randn(1, 5, 3, 4)
    copies = expand(x, 1)
    return copies.shape == x.shape and torch.equal(copies, x)


def up_to_the_kv_heads(expand: Callable) -> bool:
    H, G = 2, 3
    x = torch.randn(1, 5, H, 4)
    copies = expand(x, G)
    if copies.shape != (1, 5, H * G, 4):
        return False
    return all(torch.equal(copies[:, :, hq], x[:, :, hq // G]) for hq in range(H))


def repeated_along(x: Tensor, G: int) -> Tensor:
    return x.repeat(G, dim=2)


def four_copies(x: Tensor, G: int) -> Tensor:
    return x.repeat_interleave(4, dim=2)


def split_again(q: Tensor, k: Tensor) -> Tensor:
    H, G = k.shape[2], q.shape[2] // k.shape[2]
    return torch.einsum("bihgd,bjhd->bihgj", q.unflatten(2, (H, G)), k).unflatten(2, (H, G))


def first_heads(dk_expanded: Tensor, H: int) -> Tensor:
    return dk_expanded[:, :, :H]


def doubled_while_it_fits(gib: float, tokens: int, layers: int, HQ: int, D: int, DV: int) -> int:
    best, H = 0, 1
    while H <= HQ and H * 2 * tokens * layers * (D + DV) <= gib * 2**30:
        best, H = H, 2 * H
    return best


TYPED = [
    ("wiring_is_right", first_of_each_group, "a test of one head per group"),
    ("wiring_is_right", every_fourth, "a test of one head per group"),
    ("wiring_is_right", with_one_head_each, "a test with one query head per KV head"),
    ("wiring_is_right", up_to_the_kv_heads, "a test of the first group alone"),
    ("expand_heads", repeated_along, "`repeat` with a `dim`"),
    ("expand_heads", four_copies, "four copies of each head, whatever `G` is"),
    ("grouped_scores", split_again, "splitting an axis again where two should become one"),
    ("key_gradient", first_heads, "taking the first H of the HQ gradients"),
    ("most_kv_heads", doubled_while_it_fits, "trying powers of two only"),
    ("wiring_is_right", at_one_position, "a test that cannot see the order of positions"),
    (
        "expand_heads",
        expanded_before_the_heads,
        "whole rounds of heads, where neighbours should share",
    ),
    ("expand_heads", beside_each_other, "whole rounds of heads, where neighbours should share"),
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
    (
        "grouped_scores",
        with_the_notebooks_size,
        "a group size that does not come from these shapes",
    ),
    ("grouped_scores", merged_in_einsum, "merging two axes inside einsum"),
    ("key_gradient", summed_over_the_last, "summing over the width, not over the group"),
    (
        "key_gradient",
        split_by_the_notebooks_size,
        "a group size that does not come from these shapes",
    ),
    ("wiring_is_right", with_zeros, "a test that sees the shapes alone"),
    ("wiring_is_right", one_kv_head, "a test with one KV head"),
    ("wiring_is_right", the_same_sum, "comparing the numbers whatever their order"),
    ("key_gradient", summed_over_heads, "adding up all heads, whatever they read"),
    ("key_gradient", viewed_as_rounds, "adding up every H-th head, not neighbours"),
    ("key_gradient", split_by_the_number, "groups of H heads where groups of G are meant"),
    ("wiring_is_right", by_the_number_of_kv_heads, "a test that lets nothing through"),
    ("wiring_is_right", by_any, "a test that is content with one right head"),
    ("wiring_is_right", by_means, "a test that cannot see the order of positions"),
    ("expand_heads", divided_by_the_group, "dividing the KV heads by G once more"),
    ("key_gradient", one_number, "adding up everything"),
    ("most_kv_heads", the_most_that_fit, "as many KV heads as the memory can hold"),
    ("most_kv_heads", without_a_last_return, "no answer where not even one KV head fits"),
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


@pytest.mark.parametrize(
    ("equation", "merged", "mistake"),
    [
        ("bnhgd,bmkd->bnhgm", (2, 3), "a head letter of its own for the keys"),
        ("bihgd,bjhd->bihgj", (2,), "merging the key positions, too"),
        ("bihgd,bjhd->bihgjd", (2, 3), "keeping the width instead of summing over it"),
        ("bnhgd,bnhd->bnhg", (2, 3), "one letter for two kinds of positions"),
        ("bihgd,bjhe->bihgj", (2, 3), "two letters for one width"),
        ("bihgd,bjhd->bjhgi", (2, 3), "key positions where the query positions belong"),
        ("bihgd,bjhd->bihgj", (3, 4), "merging the group with the key positions"),
        ("bihgd,bjhd->bighj", (2, 3), "merging the two head axes in the wrong order"),
        ("bihgd,bjhd->bhgij", (2, 3), "merging axes with a reshape that does not move them"),
    ],
)
def test_wrong_letters_are_recognised(equation: str, merged: tuple[int, int], mistake: str) -> None:
    attempt = with_letters(equation, *merged)
    assert judge(EXERCISES["grouped_scores"], attempt).misconceptions == (mistake,)


def test_a_test_may_assert() -> None:
    def with_assert(expand: Callable) -> bool:
        x = torch.randn(1, 5, 2, 4)
        assert torch.equal(expand(x, 3), gqa.expand_kv_heads(x, 3))
        return True

    assert judge(EXERCISES["wiring_is_right"], with_assert).outcome == "right"


def test_a_comparison_number_by_number_is_told() -> None:
    def compared(expand: Callable) -> bool:
        x = torch.randn(1, 5, 2, 4)
        return all(expand(x, 3)[:, :, hq] == x[:, :, hq // 3] for hq in range(6))

    assert "torch.equal" in judge(EXERCISES["wiring_is_right"], compared).text


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
    is_gb = next(g for g, _ in PREDICTIONS["cache_of_64_heads"].thoughts if callable(g))
    assert is_gb(cache / 1e9) and not is_gb(pictures.H200_BYTES / 2**30)
    is_several = next(g for g, _ in PREDICTIONS["step_with_8_kv_heads"].thoughts if callable(g))
    assert is_several(4) and is_several("8") and not is_several(64)
    keys_left = 100 / 8  # percent
    assert {keys_left, 100 - keys_left} <= set(guesses["fewer_operations"])
    (is_same,) = (g for g, _ in PREDICTIONS["repeated_by_repeat"].thoughts if callable(g))
    digits = torch.arange(2).repeat(4).tolist()
    for between in ("", " ", ", "):
        assert is_same(between.join(map(str, digits)))
    assert not is_same("00001111")
    assert 1 in guesses["step_with_8_kv_heads"] and 64 // 8 not in guesses["step_with_8_kv_heads"]
    heads = torch.arange(2)
    assert guesses["repeated_by_repeat"][0] == heads.repeat_interleave(4).tolist()
    shares = torch.tensor([-0.34, 0.66, 1.19, 0.07])
    assert round(shares.abs().sum().item(), 2) in guesses["gradient_of_a_shared_key"]
    (mean,) = (g for g, _ in PREDICTIONS["gradient_of_a_shared_key"].thoughts if callable(g))
    assert mean(round(shares.mean().item(), 2))
    assert not mean(shares.sum().item())


def test_the_minutes_are_told() -> None:
    """The three optional exercises are not among the chapter's minutes."""
    path = Path(__file__).parents[2] / "notebooks/02_grouped_query_attention.ipynb"
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    names = ("key_gradient", "score_group", "most_kv_heads")
    optional = sum(EXERCISES[name].minutes for name in names)
    rest = sum(e.minutes for e in EXERCISES.values()) - optional
    told = " ".join(first.split())
    assert f"{rest} of them exercises" in told
    assert f"takes half an hour, {optional} minutes of it exercises" in told
