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

CHAPTER = Path(__file__).parents[2] / "notebooks" / "02_grouped_query_attention.ipynb"
here = environment.detect()
EXERCISES = {e.name: e for e in exercises.EXERCISES}
PREDICTIONS = {p.name: p for p in exercises.PREDICTIONS}


def skip_without_triton() -> None:
    if missing := here.why_not("triton", here.device):
        pytest.skip(missing)


# -- the module and the exercises say the same --


@pytest.mark.parametrize(("N", "M", "HQ", "H"), [(5, 5, 6, 2), (2, 7, 6, 3), (1, 4, 4, 1)])
def test_the_build_is_the_modules(N: int, M: int, HQ: int, H: int) -> None:
    q, k, v = torch.randn(1, N, HQ, 8), torch.randn(1, M, H, 8), torch.randn(1, M, H, 3)
    o = exercises.grouped_attention(q[0], k[0], v[0])
    torch.testing.assert_close(o, gqa.attention(q, k, v)[0])


def test_autograd_goes_through_the_build() -> None:
    sizes = ((2, 4, 3), (4, 2, 3), (4, 2, 2))
    inputs = [torch.randn(x, dtype=torch.float64).requires_grad_() for x in sizes]
    assert torch.autograd.gradcheck(exercises.grouped_attention, inputs)


@pytest.mark.parametrize(("HQ", "G"), [(64, 1), (64, 8), (6, 2)])
def test_the_cache_is_as_large_as_costs_say(HQ: int, G: int) -> None:
    size = kv_cache_bytes(100, layers=3, H=HQ // G, D=16, DV=8)
    assert exercises.cache_bytes(100, 3, HQ, G, 16, 8) == size


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
    scores = (q.unflatten(2, (H, G)) * k[:, :, :, None]).sum(-1).flatten()
    torch.testing.assert_close(s, scores.to(s.device))


def test_timing_leaves_torch_its_threads() -> None:
    before = torch.get_num_threads()
    assert pictures.fastest_ms(lambda: torch.ones(4).sum()) > 0
    assert torch.get_num_threads() == before


def test_the_chapters_numbers_of_an_h200_are_the_pictures() -> None:
    """The chapter writes them out, where they carry an argument."""
    source = CHAPTER.read_text(encoding="utf-8")
    for number in ("141e9", "4.8e12", "989e12"):
        assert number in source
    sheet = (pictures.H200_BYTES, pictures.H200_BYTES_PER_S, pictures.H200_FLOPS_PER_S)
    assert sheet == (141e9, 4.8e12, 989e12)
    assert round(989e12 / 4.8e12) == 206 and "206 operations" in source


def test_the_least_times_are_those_of_the_facts() -> None:
    reading = {H: pictures.cache_facts(H, 65_536).read_ms for H in (64, 8, 4, 1)}
    per_head = 60 * 65_536 * 256
    assert reading[8] == pytest.approx(1e3 * 2 * 8 * per_head / 4.8e12)
    computing = 1e3 * 2 * 64 * per_head / 989e12
    assert computing < min(reading.values()), "reading always takes longer"
    assert "1 KV head" in str(pictures.draw_least_times(reading, computing))


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
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
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


def with_zeros(expand: Callable) -> bool:
    x = torch.zeros(1, 5, 2, 4)
    copies = expand(x, 3)
    right = gqa.expand_kv_heads(x, 3)
    return copies.shape == right.shape and torch.equal(copies, right)


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
    ("key_gradient", first_heads, "taking the first H of the HQ gradients"),
    ("most_kv_heads", doubled_while_it_fits, "trying powers of two only"),
    ("wiring_is_right", at_one_position, "a test that cannot see the order of positions"),
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


# -- the build, as readers write it --


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head: q [N, D], k [M, D], v [M, DV]."""
    N, M = len(q), len(k)
    s = q @ k.T / q.shape[1] ** 0.5
    hidden = torch.ones(N, M).triu(M - N + 1).bool()
    return s.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def by_query_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    G = q.shape[1] // k.shape[1]
    heads = [attended(q[:, h], k[:, h // G], v[:, h // G]) for h in range(q.shape[1])]
    return torch.stack(heads, 1)


def by_kv_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A loop over the KV heads, each with the rows of its group below one another."""
    (N, HQ, D), (M, H, _) = q.shape, k.shape
    G, groups = HQ // H, []
    hidden = torch.ones(N, M).triu(M - N + 1).bool().repeat(G, 1)
    for h in range(H):
        rows = q[:, h * G : (h + 1) * G].transpose(0, 1).reshape(G * N, D)
        s = rows @ k[:, h].T / D**0.5
        o = s.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, h]
        groups.append(o.view(G, N, -1).transpose(0, 1))
    return torch.cat(groups, 1)


def heads_first(
    q: Tensor, k: Tensor, v: Tensor, widen: Callable | None = None, is_masked: bool = True
) -> Tensor:
    """With `@`, the heads in front, and keys and values widened to all query heads."""
    (N, HQ, D), (M, H, _) = q.shape, k.shape
    k, v = (x if widen is None else widen(x, HQ, H) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    s = q @ k.mT * D**-0.5
    if is_masked:
        place = torch.arange(M - N, M)
        s = s.masked_fill(torch.arange(M) > place[:, None], float("-inf"))
    return (s.softmax(-1) @ v).transpose(0, 1)


def in_groups(
    equation: str = "nhgd,mhd->nhgm", back: str = "nhgm,mhe->nhge", merged: tuple = (1, 2),
    low: float = -torch.inf, size: int | None = None,
) -> Callable:  # fmt: skip
    """Queries in groups, with other letters and another mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (N, HQ, D), (M, H, _) = q.shape, k.shape
        s = torch.einsum(equation, q.unflatten(1, (H, size or HQ // H)), k) / D**0.5
        place = torch.arange(M - N, M).view([N] + [1] * (s.dim() - 1))
        p = s.masked_fill(torch.arange(M) > place, low).softmax(-1)
        o = torch.einsum(back, p, v)
        return o.flatten(*merged) if merged else o

    return attend


def widened(widen: Callable, **options: bool) -> Callable:
    return lambda q, k, v: heads_first(q, k, v, widen, **options)


def one_row_at_a_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No mask: each query gets the keys that it sees."""
    N, M, G = len(q), len(k), q.shape[1] // k.shape[1]
    copies = [x.repeat_interleave(G, 1) for x in (k, v)]
    rows = []
    for i in range(N):
        seen = M - N + i + 1
        s = (q[i] * copies[0][:seen]).sum(-1) / q.shape[2] ** 0.5
        rows.append((s.softmax(0)[..., None] * copies[1][:seen]).sum(0))
    return torch.stack(rows)


ROUNDS = "whole rounds of heads, where neighbours should share"
NOT_G = "another number of copies than G"
ONE_TO_ONE = "pairing query heads with KV heads one to one"
ONCE = "loading each key once for every query head that reads it"
FINITE = "a finite score where -inf is meant"
BUILT = {
    "no groups": (heads_first, ONE_TO_ONE, 3),
    "repeat": (widened(lambda x, HQ, H: x.repeat(1, HQ // H, 1)), ROUNDS, 3),
    "cat": (widened(lambda x, HQ, H: torch.cat([x] * (HQ // H), 1)), ROUNDS, 3),
    "hq % H": (widened(lambda x, HQ, H: x[:, torch.arange(HQ) % H]), ROUNDS, 3),
    "H·G copies": (widened(lambda x, HQ, H: x.repeat_interleave(HQ, 1)), NOT_G, 2),
    "H copies": (widened(lambda x, HQ, H: x.repeat_interleave(H, 1)), NOT_G, 2),
    "expand": (
        widened(lambda x, HQ, H: x.expand(-1, HQ, -1)),
        "`expand` along an axis that is longer than 1", 3,
    ),
    "head 0 for all": (
        widened(lambda x, HQ, H: x[:, :1].expand(-1, HQ, -1)), "one KV head for all query heads", 2,
    ),
    "hq // H": (
        widened(lambda x, HQ, H: x[:, torch.arange(HQ) // H]),
        "dividing a head's number by H, not by G", 1,
    ),
    "copies": (widened(lambda x, HQ, H: x.repeat_interleave(HQ // H, 1)), ONCE, 7),
    "an axis expanded": (
        widened(lambda x, HQ, H: x[:, :, None].expand(-1, -1, HQ // H, -1).flatten(1, 2)), ONCE, 7,
    ),
    "a loop over query heads": (by_query_head, ONCE, 7),
    "row by row": (one_row_at_a_time, ONCE, 7),
    "no mask": (
        widened(lambda x, HQ, H: x.repeat_interleave(HQ // H, 1), is_masked=False),
        "queries that see later keys", 5,
    ),
    "-1e4": (in_groups(low=-1e4), FINITE, 5),
    "-1e9": (in_groups(low=-1e9), FINITE, 5),
    "the notebook's G": (
        in_groups(size=4), "a group size that does not come from these shapes", 0,
    ),
    "five axes": (in_groups(merged=()), "leaving the group as an axis of its own", 0),
    "flatten(1)": (in_groups(merged=(1,)), "merging the width with the heads", 0),
    "g before h": (
        in_groups(back="nhgm,mhe->nghe"), "merging the two head axes in the wrong order", 3,
    ),
    "a summed group": (
        in_groups(back="nhgm,mhe->nhe", merged=()), "summing the outputs of a group's heads", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("attempt", "mistake", "held"), BUILT.values(), ids=BUILT.keys())
def test_a_build_is_named_by_its_mistake(attempt: Callable, mistake: str, held: int) -> None:
    """None of these is written like the row that names it; each holds what it takes care of."""
    verdict = judge(EXERCISES["grouped_attention"], attempt)
    assert (verdict.misconceptions, verdict.held) == ((mistake,), held)


TYPED = """
def grouped_attention(q, k, v):
    N, HQ, D = q.shape
    M, H, DV = v.shape
    G = HQ // H
    rows = q.unflatten(1, (H, G)).transpose(0, 1).flatten(1, 2)  # [H, N * G, D]
    s = rows @ k.permute(1, 2, 0) * D ** -0.5
    hidden = torch.arange(M) > torch.arange(M - N, M)[:, None]
    hidden = hidden.repeat_interleave(G, 0)
    w = torch.softmax(s.masked_fill(hidden, -torch.inf), -1)
    return (w @ v.transpose(0, 1)).unflatten(1, (N, G)).transpose(0, 1).flatten(1, 2)
"""
FOUR_AXES = {
    "    hidden = hidden.repeat_interleave(G, 0)\n": "",
    "s.masked_fill(hidden, -torch.inf)":
        "s.view(H, N, G, M).transpose(0, 1).masked_fill(hidden, -torch.inf)",
    "(w @ v.transpose(0, 1)).unflatten(1, (N, G)).transpose(0, 1)":
        "torch.einsum('nhgm,mhe->nhge', w, v)",
}  # fmt: skip
SLIPS = [
    ({"repeat_interleave(G, 0)": "repeat(G, 1)"},
     "a mask repeated in another order than its rows", 5),
    (FOUR_AXES, "a mask [N, M] on scores whose last two axes are others", 5),
    ({"q.unflatten(1, (H, G))": "q.unflatten(1, (G, H)).transpose(1, 2)"},
     "splitting the head axis as [G, H] instead of [H, G]", 3),
    ({"G = HQ // H": "G = H"}, "taking the number of KV heads for the group size", 1),
    ({"G = HQ // H": "G = H", "q.unflatten(1, (H, G))": "q.view(N, H, G, D)"},
     "taking the number of KV heads for the group size", 1),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "named", "held"), SLIPS, ids=str)
def test_a_slip_in_a_typed_build_is_named(edits: dict[str, str], named: str, held: int) -> None:
    source = TYPED
    for piece, by in edits.items():
        assert source.count(piece) == 1
        source = source.replace(piece, by)
    namespace = {"torch": torch}
    exec(source, namespace)
    verdict = judge(EXERCISES["grouped_attention"], namespace["grouped_attention"])
    assert (verdict.misconceptions, verdict.held) == ((named,), held)


@pytest.mark.parametrize(
    "attempt", [by_kv_head, in_groups()], ids=["a loop over KV heads", "einsum"]
)
def test_a_build_may_be_written_in_any_way(attempt: Callable) -> None:
    assert judge(EXERCISES["grouped_attention"], attempt).outcome == "right"


@pytest.mark.parametrize(
    "known", EXERCISES["grouped_attention"].misconceptions,
    ids=lambda m: m.name,
)  # fmt: skip
def test_a_mistake_of_the_build_is_named_as_itself(known: Misconception) -> None:
    assert judge(EXERCISES["grouped_attention"], known.wrong).misconceptions == (known.name,)


def with_pytorchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tensors = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
    return o[0].transpose(0, 1)


def with_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return gqa.attention(q[None], k[None], v[None])[0]


@pytest.mark.parametrize("attempt", [with_pytorchs, with_ours])
def test_what_the_build_builds_may_not_be_called(attempt: Callable) -> None:
    verdict = judge(EXERCISES["grouped_attention"], attempt)
    assert (verdict.outcome, verdict.held) == ("wrong", 0)
    assert "you build it yourself here" in verdict.text


def test_a_build_that_changes_its_input_is_refused() -> None:
    def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q *= q.shape[2] ** -0.5
        return in_groups()(q * q.shape[2] ** 0.5, k, v)

    verdict = judge(EXERCISES["grouped_attention"], in_place)
    assert "argument 1 is another one after the call" in verdict.text


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
    """The optional exercises are not among the chapter's minutes."""
    first = "".join(json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"][0]["source"])
    main = ("cache_bytes", "grouped_attention")
    assert f"{sum(EXERCISES[name].minutes for name in main)} of them exercises" in first
