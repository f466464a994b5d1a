"""Chapter 15's exercises: their solutions against the module, answers as readers write them; what
its pictures compute; and the rhyme that is typed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch

from nsa_tutorial.course import rhyme
from nsa_tutorial.course.decoding_costs import bytes_of_step, keys_of_step
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import decoding as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.small_cache import attend, block_scores, listed_blocks, new_cache
from nsa_tutorial.course.widgets import decoding as pictures
from nsa_tutorial.sparse import block_selection, compression, decoding

pytestmark = pytest.mark.usefixtures("one_thread")

CHAPTER = Path(__file__).parents[2] / "notebooks" / "15_decoding.ipynb"
KNOWN = chapter_exercises("decoding")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


# -- solutions --


@pytest.mark.parametrize(("length", "stride"), [(32, 16), (7, 3), (4, 4)])
def test_complete_summaries_are_the_modules(length: int, stride: int) -> None:
    tokens = torch.arange(100)
    right = compression.num_summaries(tokens, length, stride)
    assert solutions.complete_summaries(tokens, length, stride).equal(right)


def test_merged_parts_are_one_softmax() -> None:
    s, v = draw(2, 20), draw(20, 3, seed=1)
    pieces = [slice(0, 3), slice(3, 3), slice(3, 20)]
    o = torch.stack([torch.softmax(s[:, i], -1) @ v[i] for i in pieces])
    lse = torch.stack([torch.logsumexp(s[:, i], -1) for i in pieces])
    right = torch.softmax(s, -1) @ v
    torch.testing.assert_close(solutions.merge_parts(o, lse), right)


def test_a_step_is_the_librarys() -> None:
    """Row by row, beside `sparse.decoding`, on a cache that both read."""
    sizes = {"block_size": 4, "top_n": 4, "window_size": 5, "length": 4, "stride": 2}
    B, N, HQ, D = 2, 30, 2, 3
    cache = new_cache(B, 40, D, **sizes)
    for x in (cache.tokens, cache.summaries, cache.window):
        x.zero_()  # the reference masks, and reads all
    q, kv, gates = draw(N, B, HQ, D), draw(N, B, 3, 2, D, seed=1), draw(N, B, 3, HQ, seed=2)
    for t in range(N):
        o = solutions.decode_step(cache, q[t], kv[t], gates[t])
        pairs = [
            x[:, :, i, None] for x in (cache.summaries, cache.tokens, cache.window) for i in (0, 1)
        ]
        buffers = decoding.Buffers(*pairs, cache.lengths.int(), None)
        right = decoding.decode_attention(
            q[t][:, None], buffers, [g[:, None] for g in gates[t].unbind(1)], None,
            scale=D**-0.5, **sizes,
        )  # fmt: skip
        torch.testing.assert_close(o, right[:, 0])


def test_scores_of_blocks_are_chapter_07s() -> None:
    cache = new_cache(1, 64, 2, block_size=8, top_n=3, window_size=4, length=8, stride=4)
    mass = draw(9).abs()
    overlap = block_selection.overlap_weights(8, 4, 8, 5)
    first, visible = torch.zeros(1, dtype=torch.int64), torch.tensor([9])
    right = block_selection.from_summaries_to_blocks(
        mass.view(1, 1, 1, -1), first, visible, overlap
    )
    torch.testing.assert_close(block_scores(mass, 5, cache), right.flatten())


# -- answers as readers write them --


def without_summaries(cache, q, kv, gates):
    """All tokens, and the window: holds the first two stages."""
    c, o = cache, torch.zeros_like(q)
    for b, t in enumerate(c.lengths.tolist()):
        c.tokens[b, t] = kv[b, 1]
        c.window[b, t % c.window.shape[1]] = kv[b, 2]
        latest = torch.arange(max(0, t + 1 - c.window_size), t + 1) % c.window.shape[1]
        o_slc, o_swa = attend(q[b], c.tokens[b, : t + 1])[0], attend(q[b], c.window[b, latest])[0]
        o[b] = gates[b, 1, :, None] * o_slc + gates[b, 2, :, None] * o_swa
    c.lengths += 1
    return o


def forced_blocks(cache, q, kv, gates):
    """Lists of the blocks that are always listed, and no summaries yet."""
    c, o = cache, torch.zeros_like(q)
    for b, t in enumerate(c.lengths.tolist()):
        c.tokens[b, t] = kv[b, 1]
        c.window[b, t % c.window.shape[1]] = kv[b, 2]
        latest = torch.arange(max(0, t + 1 - c.window_size), t + 1) % c.window.shape[1]
        own = t // c.block_size
        token = [i for i in range(t + 1) if i // c.block_size in {0, own - 1, own}]
        o_slc, o_swa = attend(q[b], c.tokens[b, token])[0], attend(q[b], c.window[b, latest])[0]
        o[b] = gates[b, 1, :, None] * o_slc + gates[b, 2, :, None] * o_swa
    c.lengths += 1
    return o


def one_row(cache, q, kv, gates):
    """Whole, but with the first row's length for all."""
    lengths = cache.lengths.clone()
    cache.lengths[:] = lengths[0]
    o = solutions.decode_step(cache, q, kv, gates)
    cache.lengths[:] = lengths + 1
    return o


def by_masks(cache, q, kv, gates):
    """All places are read, and hidden ones get the weight 0."""
    c, o = cache, torch.zeros_like(q)
    for b, t in enumerate(c.lengths.tolist()):
        c.tokens[b, t] = kv[b, 1]
        c.window[b, t % c.window.shape[1]] = kv[b, 2]
        place, ring = torch.arange(c.tokens.shape[1]), c.window.shape[1]
        held = t - (t - torch.arange(ring)) % ring  # the token in each place
        seen = (held >= 0) & (held > t - c.window_size)
        for i, (x, mask) in enumerate([(c.tokens[b], place <= t), (c.window[b], seen)], 1):
            s = (q[b] @ x[:, 0].T * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
            o[b] += gates[b, i, :, None] * (torch.softmax(s, -1) @ x[:, 1])
    c.lengths += 1
    return o


@pytest.mark.parametrize(
    ("attempt", "held"),
    [(without_summaries, 2), (by_masks, 2), (forced_blocks, 3), (one_row, 4)],
)
def test_a_half_done_step_holds_its_stages(attempt, held: int) -> None:
    assert judge(replace(KNOWN["decode_step"], misconceptions=()), attempt).held == held


@pytest.mark.parametrize(
    "mistake", KNOWN["decode_step"].misconceptions, ids=lambda mistake: mistake.name
)
def test_each_mistake_is_named_as_itself(mistake) -> None:
    assert judge(KNOWN["decode_step"], mistake.wrong).misconceptions == (mistake.name,)


@pytest.mark.parametrize("name", ["complete_summaries", "merge_parts"])
def test_each_mistake_in_a_part_is_named_as_itself(name: str) -> None:
    for mistake in KNOWN[name].misconceptions:
        assert judge(KNOWN[name], mistake.wrong).misconceptions == (mistake.name,), mistake


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("a summary at multiples of the stride", "a summary arrives"),
        ("a counter of summaries", "taken back"),
        ("a place that is masked, but loaded", "ragged rows"),
    ],
)
def test_a_mistake_ends_in_its_stage(name: str, first: str) -> None:
    """Up to there, all stages hold."""
    mistake = next(m for m in KNOWN["decode_step"].misconceptions if m.name == name)
    stages = [stage.name for stage in KNOWN["decode_step"].stages]
    assert judge(KNOWN["decode_step"], mistake.wrong).held == stages.index(first)


def test_the_first_rows_length_is_named() -> None:
    verdict = judge(KNOWN["decode_step"], one_row)
    assert verdict.misconceptions == ("the first row's length for all rows",)


def test_the_librarys_cache_is_forbidden() -> None:
    def attempt(cache, q, kv, gates):
        sizes = {"block_size": 4, "length": 4, "stride": 2}
        pair = [cache.tokens[:, :, i, None] for i in (0, 1)]
        return decoding.decode_attention(
            q[:, None], decoding.Buffers(*pair * 3, cache.lengths + 1, None),
            [None, *gates[:, 1:, None].unbind(1)], torch.zeros(len(q), 1, 1, 1).int(),
            top_n=3, window_size=5, scale=1.0, **sizes,
        )[:, 0]  # fmt: skip

    verdict = judge(KNOWN["decode_step"], attempt)
    assert "Forbidden: the course's own function" in verdict.text


def test_merging_two_by_two_is_right_too() -> None:
    def attempt(o, lse):
        whole, total = o[0], lse[0]
        for part, other in zip(o[1:], lse[1:], strict=True):
            new = torch.logaddexp(total, other)
            shift = new.nan_to_num(neginf=0.0)
            whole = torch.exp(total - shift)[:, None] * whole
            whole = whole + torch.exp(other - shift)[:, None] * part
            total = new
        return whole

    assert judge(KNOWN["merge_parts"], attempt).outcome == "right"


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        (lambda tokens, length, stride: torch.tensor(
            [max(0, (n - length) // stride + 1) for n in tokens.tolist()]), "`tolist` reads"),
        (lambda tokens, length, stride: torch.stack(
            [max(0 * n, (n - length) // stride + 1) for n in tokens]), "`bool` reads"),
        (lambda tokens, length, stride: ((tokens - length) / stride + 1).floor().clamp(min=0),
         "expected integers"),
    ],
    ids=["a list", "a condition", "fractions"],
)  # fmt: skip
def test_row_lengths_are_not_read_in_python(attempt: Callable, told: str) -> None:
    verdict = judge(KNOWN["complete_summaries"], attempt)
    assert verdict.outcome == "wrong" and told in verdict.text


def test_the_minutes_are_told() -> None:
    first = nbformat.read(CHAPTER, as_version=4).cells[0].source
    assert f"{sum(e.minutes for e in KNOWN.values())} of them exercises" in first


def test_what_is_told_of_a_graph_s_parts_is_what_was_recorded() -> None:
    """Reading, the other kernels, and pauses, of one text and of 32."""
    rows = [pictures.rows_of(kernel="triton", sequences=n, tokens=65_536)[0] for n in (1, 32)]
    one, many = (pictures.times_of(row) for row in rows)
    told = "\n".join(c.source for c in nbformat.read(CHAPTER, as_version=4).cells)
    ratios = [y / x for x, y in zip(one, many, strict=True)]
    assert [round(x) for x in ratios] == [16, 2, 1]
    assert (
        "reading takes 16 times as\nlong, the other kernels twice as long, and the pauses" in told
    )
    assert round(5 * sum(many[1:]) / sum(many)) == 1 and 2 * sum(one[1:]) > sum(one)
    assert "take a fifth of the time, and with one text most of it" in told


# -- pictures --


def test_bytes_of_the_chapters_layer() -> None:
    """The numbers of the chapter; the paper's table 4 says 11.6."""
    read, keys = bytes_of_step(65_536), keys_of_step(65_536)
    assert read["dense"] == 128 * 2**20
    assert round(read["nsa"] / 2**20) == 11
    assert round(read["dense"] / read["nsa"], 1) == 11.6
    assert keys == {"dense": 65_536, "summaries": 4095, "lists": 1024, "window": 512}
    assert keys_of_step(20) == {"dense": 20, "summaries": 0, "lists": 20, "window": 20}


@pytest.mark.parametrize(("tokens", "ring"), [(0, 3), (2, 3), (3, 3), (21, 9)])
def test_a_ring_holds_the_latest_tokens(tokens: int, ring: int) -> None:
    held = [None] * ring
    for t in range(tokens):
        held[t % ring] = t
    assert pictures.ring_of(tokens, ring) == held


def test_pictures_say_what_they_show() -> None:
    assert pictures.draw_bytes().finding.startswith("Token 65,536: dense attention reads 128 MiB")
    finding = pictures.draw_buffers(tokens=24).finding
    assert finding == "After 24 tokens, 5 summaries are complete; the next one waits for token 27"
    assert "288" in pictures.draw_split().finding


def test_tokens_that_wait_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 21 tokens, 16 to 20 wait for a summary."""
    needed = {}
    monkeypatch.setattr(
        pictures,
        "_draw_ring",
        lambda axis, name, held, tokens, newest: needed.update({name: tokens}),
    )
    pictures.draw_buffers(tokens=21)
    assert needed == {"window": range(15, 21), "pending": range(16, 21)}


def test_parts_follow_the_batch_alone() -> None:
    one, many = pictures.parts_of(1), pictures.parts_of(32)
    assert one.first_programs == 4 * (one.summaries + one.window) == 288
    assert (one.summaries, one.window) == (64, 8), "the chapter's text says so"
    assert many.first_programs > pictures.MULTIPROCESSORS
    assert many.summaries < one.summaries


@pytest.mark.parametrize("tokens", pictures.TOKENS)
@pytest.mark.parametrize("sequences", pictures.SEQUENCES)
def test_a_step_on_paper(tokens: int, sequences: int) -> None:
    s = pictures.step(tokens, sequences)
    assert s.nsa < s.dense
    for best, recorded in ((s.dense_us, s.dense_recorded), (s.nsa_us, s.nsa_recorded)):
        assert recorded is None or recorded > best, "no faster than the memory"
    assert f"{sequences} texts" in pictures.sentence(tokens, sequences) or sequences == 1


def test_the_panel_moves() -> None:
    panel = pictures.explore()
    assert "one text of 4,096 tokens" in panel.set(tokens=4096, sequences=1)


# -- the rhyme --


@pytest.fixture(scope="module")
def typist() -> pictures.Typist:
    """After the first 300 letters, fed from the rhyme."""
    typist = pictures.Typist(solutions.decode_step)
    typist.scores = [typist.next_scores(int(i)) for i in rhyme.encode(rhyme.rhyme()[:300])]
    return typist


def test_the_model_knows_the_rhyme(typist: pictures.Typist) -> None:
    typed = rhyme.decode(torch.stack(typist.scores).argmax(-1))
    assert typed == rhyme.rhyme()[1:301]
    assert typed.startswith("This is the house that Jack built.\n\nThis is the malt\nthat lay in")


def test_typed_with_a_cache_is_read_at_once(typist: pictures.Typist) -> None:
    at_once = typist.model(rhyme.encode(rhyme.rhyme()[:300])[None])[0]
    torch.testing.assert_close(torch.stack(typist.scores), at_once)


def test_what_was_read_is_counted(typist: pictures.Typist) -> None:
    listed, keys = typist.read[-1][-1]
    assert listed[0] == 0 and listed[-2:] == [17, 18] and len(listed) == 5
    # 300 tokens: 36 summaries; four whole blocks and 12 letters of the last; a window of 32
    assert keys == 36 + 4 * 16 + 12 + 32
    assert typist.bar().count("█") == 5 and len(typist.bar()) == 19
    assert pictures.draw_typed(typist).finding == (
        "The last of 300 tokens reads 144 keys, where dense attention reads 300"
    )


def test_the_text_below_the_rhyme_holds() -> None:
    letters, c = len(rhyme.rhyme()) - 1, rhyme.CONFIG
    blocks = -(-letters // c.block_size)
    summaries = (letters - c.length) // c.stride + 1
    listed = (c.top_n - 1) * c.block_size + letters - (blocks - 1) * c.block_size
    text = " ".join("\n".join(x.source for x in nbformat.read(CHAPTER, as_version=4).cells).split())
    assert f"a rhyme of {letters} letters" in text and f"the text has {blocks} at the end" in text
    assert f"summaries of {c.length} letters, one every {c.stride}" in text
    assert f"reads {summaries} summaries, {listed} letters of its lists" in text
    assert f"{c.window_size} of the window" in text


def test_the_list_of_a_short_text_is_all_of_it() -> None:
    cache = new_cache(1, 64, 2, block_size=8, top_n=3, window_size=4, length=8, stride=4)
    cache.lengths += 9
    cache.summaries.zero_()
    assert listed_blocks(cache, draw(1, 2)) == [0, 1]


def test_the_weights_are_small() -> None:
    assert rhyme.WEIGHTS.stat().st_size <= 200_000


def test_the_text_below_the_recording_holds() -> None:
    """The launches are most of one text's call, and the clock gains less than the bytes."""
    (one,), (many,) = (
        pictures.rows_of(kernel="triton", sequences=n, tokens=65_536) for n in (1, 32)
    )
    reading = sum(many["steps"][f"{x}_kernel"] for x in ("summaries_and_window", "lists"))
    assert one["call_us"] > 2 * one["graph_us"]
    assert pictures.step(65_536, 32).nsa_us < reading < sum(many["steps"].values())
    assert sum(many["steps"].values()) < many["graph_us"]
    gains = [
        pictures.recorded_us("dense", n, 65_536) / pictures.recorded_us("nsa", n, 65_536)
        for n in (1, 32)
    ]
    assert 1 < gains[0] < gains[1] < 11.6
    assert f"{one['call_us']:.0f} µs as a plain call" in pictures.told_times()[0]
    assert pictures.told_times()[-1].endswith("12 sizes: 0.3 to 0.7 ms")  # the text says so, too
    assert pictures.draw_recorded().finding.endswith(f"{gains[1]:.1f} times less")
    text = "\n".join(c.source for c in nbformat.read(CHAPTER, as_version=4).cells)
    assert f"Here is what an {pictures.machine()} took" in text
