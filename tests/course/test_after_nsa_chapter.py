"""Chapter 19's exercises, answers as readers write them, what its text says of costs, of masks and
of the recording, and what its pictures say."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import torch
import torch.nn.functional as F

from nsa_tutorial import ops
from nsa_tutorial.course import indexing_costs as costs
from nsa_tutorial.course.exercises import after_nsa as solutions
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.widgets import after_nsa as pictures
from nsa_tutorial.sparse import indexer
from nsa_tutorial.training.capstone.tasks import Recall

pytestmark = pytest.mark.usefixtures("one_thread")

CHAPTER = Path(__file__).parents[2] / "notebooks" / "19_after_nsa.ipynb"
KNOWN = chapter_exercises("after_nsa")
INDEX = KNOWN["learned_index"]


def text() -> str:
    cells = nbformat.read(CHAPTER, as_version=4).cells
    return " ".join(" ".join(c.source.split()) for c in cells if c.cell_type == "markdown")


# -- the solution --


@pytest.mark.parametrize("case", INDEX.cases, ids=lambda case: case.name)
def test_the_solution_is_the_operator_and_its_loss(case) -> None:
    _, _, q, k, q_idx, k_idx, w, top_n, block_size = case.arguments()
    ids, loss = solutions.learned_index(q, k, q_idx, k_idx, w, top_n, block_size)
    sizes = {"top_n": top_n, "block_size": block_size, "num_local": 0, "backend": "reference"}
    assert torch.equal(ids, ops.index_blocks(q_idx[None], k_idx[None], w[None], **sizes)[0, :, 0])
    given = q[None], k[None, :, None], q_idx[None], k_idx[None], w[None]
    torch.testing.assert_close(loss, indexer.kl_loss(*given), atol=1e-12, rtol=0)


# -- answers as readers write them --


@pytest.mark.parametrize("name", KNOWN)
def test_each_mistake_is_named_as_itself(name: str) -> None:
    for mistake in KNOWN[name].misconceptions:
        assert judge(KNOWN[name], mistake.wrong).misconceptions == (mistake.name,), mistake


def lists_alone(q, k, q_idx, k_idx, w, top_n, block_size):
    return solutions.learned_index(q, k, q_idx, k_idx, w, top_n, block_size)[0]


def the_last_query(q, k, q_idx, k_idx, w, top_n, block_size):
    """Right for the last query, and without whole blocks."""
    score = (w[..., None] * torch.einsum("njd,md->njm", q_idx, k_idx).relu()).sum(1)
    return score.sort(dim=-1, descending=True).indices[:, :top_n].sort(-1).values, None


def by_kl_div(q, k, q_idx, k_idx, w, top_n, block_size):
    """In another form: PyTorch's divergence, and a loop over the queries."""
    ids, _ = solutions.learned_index(q, k, q_idx, k_idx, w, top_n, block_size)
    losses = []
    for t in range(len(q)):
        products = q_idx[t] @ k_idx[: t + 1].T * q_idx.shape[-1] ** -0.5
        log_p = (w[t] @ products.relu()).log_softmax(-1)
        s = q[t].detach() @ k[: t + 1].detach().T * q.shape[-1] ** -0.5
        losses.append(F.kl_div(log_p, s.softmax(-1).mean(0), reduction="sum"))
    return ids, torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("attempt", "held"), [(the_last_query, 2), (lists_alone, 5), (by_kl_div, 8)]
)
def test_a_half_done_function_holds_its_stages(attempt, held: int) -> None:
    assert judge(INDEX, attempt).held == held


def of_loss(say):
    """An attempt with right lists and a loss of its own: `say(p, score, is_hidden)`, where `p` is
    the target and hidden scores are -inf."""

    def attempt(q, k, q_idx, k_idx, w, top_n, block_size):
        ids, _ = solutions.learned_index(q, k, q_idx, k_idx, w, top_n, block_size)
        is_hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        products = torch.einsum("njd,md->njm", q_idx, k_idx) * k_idx.shape[-1] ** -0.5
        score = torch.einsum("nj,njm->nm", w, products.relu()).masked_fill(is_hidden, -torch.inf)
        with torch.no_grad():
            s = torch.einsum("nhd,md->hnm", q, k) * q.shape[-1] ** -0.5
            p = s.masked_fill(is_hidden, -torch.inf).softmax(-1).mean(0)
        return ids, say(p, score, is_hidden)

    return attempt


@pytest.mark.parametrize(
    "say",
    [
        lambda p, score, _: F.kl_div(score.log_softmax(-1), p, reduction="batchmean"),
        lambda p, score, _: (p * (p.log() - score.log_softmax(-1))).sum(-1).mean(),
        lambda p, score, _: (torch.xlogy(p, p) - p * score.log_softmax(-1)).sum(-1).mean(),
    ],
    ids=["kl_div", "p.log", "p * log_softmax"],
)
def test_a_loss_of_nan_is_told_its_cause(say) -> None:
    verdict = judge(INDEX, of_loss(say))
    assert (verdict.misconception, verdict.held) == ("0 · -inf at hidden places", 5)


def test_a_small_number_in_the_logarithms_is_right() -> None:
    def say(p, score, _):
        return (p * ((p + 1e-8).log() - (score.softmax(-1) + 1e-8).log())).sum(-1).mean()

    assert judge(INDEX, of_loss(say)).outcome == "right"


def test_lists_without_a_loss_are_told_what_is_missing() -> None:
    verdict = judge(INDEX, of_loss(lambda *_: None))
    assert verdict.held == 5 and "Your lists hold. No loss comes with them yet" in verdict.text
    assert "return statement" not in verdict.text


def test_topk_holds_until_ties_are_asked_for() -> None:
    topk = next(m for m in INDEX.misconceptions if "topk" in m.name)
    assert judge(INDEX, topk.wrong).held == 4


def test_what_does_not_hold_of_needle_scores_is_named() -> None:
    verdict = judge(KNOWN["needle_scores"], lambda size: torch.zeros(2 * size))
    assert "'mean prefers block 0': False" in verdict.text


@pytest.mark.parametrize(
    ("name", "attempt", "said"),
    [
        ("needle_scores", lambda size: [0.0] * 2 * size,
         "Got type list, expected a tensor of shape [32]."),
        ("needle_scores", lambda size: torch.zeros(2, size),
         "Got shape [2, 16], expected a tensor of shape [32]."),
        ("entry_lists", lambda *sizes: solutions.entry_lists(*sizes).float(),
         "The ids came back as floats."),
        ("learned_index", lambda *given: (lists_alone(*given).float(), None),
         "The ids came back as floats."),
        ("learned_index", lambda *given: tuple(x.detach() for x in solutions.learned_index(*given)),
         "No gradient reached `q_idx`"),
    ],
)  # fmt: skip
def test_an_answer_of_another_kind_is_told_what_came(name: str, attempt, said: str) -> None:
    assert said in judge(KNOWN[name], attempt).text


def test_no_query_reads_a_negative_number_of_summaries() -> None:
    def by_loops(N, length, stride, window_size):
        M_c = (N - length) // stride + 1
        ended = [[j for j in range(M_c) if j * stride + length <= t + 1] for t in range(N)]
        rows = [ended[t] + [M_c + i for i in range(max(0, t - window_size + 1), t + 1)]
                for t in range(N)]  # fmt: skip
        wide = max(len(row) for row in rows)
        return torch.tensor([row + [-1] * (wide - len(row)) for row in rows])

    verdict = judge(KNOWN["entry_lists"], by_loops)
    assert verdict.misconception == "fewer than no summaries", verdict.text


def test_the_needle_may_be_found_in_other_ways() -> None:
    def other(block_size):
        scores = torch.full((2, block_size), -4.0)
        scores[0, :] = torch.linspace(-3.2, -2.0, block_size)
        scores[1, -1] = 4.0
        return scores.flatten()

    assert judge(KNOWN["needle_scores"], other).outcome == "right"


# -- what the text says --


def test_the_minutes_are_told() -> None:
    sources = [cell.source for cell in nbformat.read(CHAPTER, as_version=4).cells]
    optional = next(i for i, source in enumerate(sources) if "If you have more time" in source)
    minutes = {True: 0, False: 0}
    for name, e in KNOWN.items():
        minutes[sources.index(f'exercise("after_nsa", "{name}")') < optional] += e.minutes
    assert f"{minutes[True]} of them exercises" in text()
    assert f"minutes more, {minutes[False]} of them an exercise" in text()
    parts = re.findall(r"If you have more time: .*?\n\nAbout (\d+) minutes", "\n".join(sources))
    assert f"parts take about {sum(map(int, parts))} minutes more" in text()


def test_costs_by_hand() -> None:
    """Of the last query of 4,096 tokens, as products times two."""
    N = 4096
    q = costs.dials(128, "an indexer").query(N)
    assert q.choosing == 2 * 4 * 128 * N and q.attending == 2 * 64 * 256 * 2048
    assert (q.read_to_choose, q.read_to_attend) == (2 * 128 * N, 4 * 256 * 2 * 2048)
    assert (q.rows, q.runs) == (2048, 16)
    q = costs.dials(64, "mean keys").query(N)
    assert (q.choosing, q.runs) == (2 * 64 * 128 * N // 64, 32)
    assert costs.DENSE.query(N).attending == 2 * 64 * 256 * N
    of = {m.name: m.query(1 << 20) for m in costs.MEMBERS}
    assert of["DSA"].choosing == 2 * 64 * 128 << 20
    assert of["DSA"].attending == 2 * 128 * (576 + 512) * 2048
    assert of["DSA"].read_to_attend == 2048 * 1152
    assert of["CSA"].rows == 512 + 128 and of["HCA"].rows == (1 << 20) // 128 + 128
    assert of["NSA"].rows == 16 * 64 + 512 + (1 << 16) - 1
    assert of["MoBA"].rows == 12 * 4096 and "its blocks have 4,096 tokens" in text()


def test_what_a_guess_would_find() -> None:
    assert f"a guess among {Recall.values} values would find {100 / Recall.values:.0f} %" in text()


def test_what_the_text_says_of_costs() -> None:
    """Each statement that no cell prints."""
    N = 1 << 20
    indexed, means = (costs.dials(128, c).query(N) for c in ("an indexer", "mean keys"))
    dense = costs.DENSE.query(N).attending
    assert round(dense / (indexed.choosing + indexed.attending)) == 30
    assert indexed.choosing == 8 * means.choosing
    own = costs.dials(1, "mean keys").query(N)
    assert own.choosing == dense // 2 and dense / 2 < own.choosing + own.attending < dense
    half = costs.dials(128, "mean keys").query(N // 2)
    assert half.choosing == half.attending == 67_108_864
    assert costs.dials(1, "mean keys").query(N // 2).choosing == 128 * half.choosing
    assert round(costs.dials(1, "mean keys").query(N // 2).choosing / 1e9, 2) == 8.59
    assert round(2048 / N, 3) == 0.002
    assert indexed.read_to_attend == 4 << 20


def test_what_is_said_of_a_wrong_guess_of_the_share() -> None:
    """A guess is right at the length that its sentence names."""
    asked = next(p for p in solutions.PREDICTIONS if p.name == "share_of_choosing")
    said, of = dict(asked.thoughts), costs.dials(128, "an indexer")
    assert "right for 2,048 tokens" in said[3] and "right for 64k tokens" in said[50]
    assert [round(100 * of.query(N).share_of_choosing) for N in (2048, 1 << 16, 1 << 20)] == [
        3, 50, 94,
    ]  # fmt: skip


def test_what_the_text_says_of_the_first_picture() -> None:
    held = {(u, c): pictures.mask(u, c)[1] for u in (16, 1) for c in pictures.CHOOSERS}
    shares = {where: f"{round(100 * share)} %" for where, share in held.items()}
    said = f"{shares[16, 'an indexer']} and {shares[1, 'an indexer']} in the first picture"
    assert said in text()
    assert torch.equal(*(pictures.mask(1, chooser)[0] for chooser in pictures.CHOOSERS))
    # chapter 07's best 4 blocks: by the sum of a block's attention, and none forced
    p = pictures._group()[1]
    best = p.unflatten(1, (-1, 16)).sum(-1).topk(4).values.sum(1)[pictures.LATER :].mean()
    assert f"hold {round(100 * best.item())} % (chapter 07)" in text()
    dial_one = held[1, "an indexer"] - held[16, "an indexer"]
    assert dial_one > 5 * (held[16, "an indexer"] - held[16, "mean keys"]) > 0


@pytest.mark.parametrize("unit", [16, 1])
@pytest.mark.parametrize("chooser", pictures.CHOOSERS)
def test_a_mask_reads_the_past_and_no_more_than_its_budget(unit: int, chooser: str) -> None:
    seen, share = pictures.mask(unit, chooser)
    t = torch.arange(len(seen))
    assert not (seen & (t > t[:, None])).any() and seen.diagonal().all()
    assert seen.sum(1).max() <= 64 and (seen.sum(1)[64:] > 64 - unit).all()
    best = pictures._group()[1].sort(1, descending=True).values[pictures.LATER :, :64].sum(1).mean()
    assert 0.5 < share <= best + 1e-6


def test_what_the_text_says_of_the_recording() -> None:
    """Each statement that no cell prints."""
    most, least = pictures.budgets()
    assert (most * pictures.block_size(), least * pictures.block_size()) == (80, 32)
    found = {
        (name, blocks): f"{round(100 * pictures.mean(name, 'far', blocks))} %"
        for blocks in (most, least)
        for name in ("moba", "msa", "dsa", "top", "any")
    }
    assert {found[n, b] for n in ("msa", "dsa", "top") for b in (most, least)} == {"100 %"}
    assert pictures.mean("dense", "far") > 0.995
    means, chance = found["moba", most], found["any", most]
    assert f"find {means} with 80 tokens, where chance finds {chance}" in text()
    fewer = f"With 32 tokens they find {found['moba', least]}, and chance {found['any', least]}"
    assert fewer in text()
    assert f"it finds {round(100 * pictures.mean('nsa', 'far'))} % here" in text()
    reason = next(p.reason for p in solutions.PREDICTIONS if p.name == "who_finds")
    assert f"an indexer finds {found['msa', most]} of the far answers and mean keys {means}" in (
        " ".join(reason.split())
    )
    at_200 = {name: [r["progress"][2] for r in pictures.rows(name)] for name in ("dsa", "dense")}
    assert {point[0] for of in at_200.values() for point in of} == {200}
    hits = sum(point[2] for point in at_200["dsa"]) / 3
    of_answers = f"tokens by an indexer already hold {round(100 * hits)} % of the answers"
    assert f"After 200 steps, when nothing is found, {of_answers}" in text()
    assert all(point[1] < 0.02 for of in at_200.values() for point in of)

    def at(name: str, point: int, what: int) -> float:
        return sum(r["progress"][point][what] for r in pictures.rows(name)) / 3

    assert abs(at("msa", 2, 2) - at("any", 2, 2)) < 0.05  # "no more than chance", after 200 steps
    assert at("msa", 3, 1) > at("dsa", 3, 1) + 0.2  # "blocks find more at step 300"
    for name in pictures.NAMES.keys() - {"nsa"}:  # those of the picture
        found = [at(name, point, 1) for point in range(len(pictures.rows(name)[0]["progress"]))]
        rises = [b - a for a, b in pairwise(found)]
        assert max(rises) == rises[2], "all rise most between steps 200 and 300"
    assert all(r["progress"][3][1] > 0.9 for r in pictures.rows("dense"))


# -- pictures --


def test_what_the_text_says_of_single_tokens() -> None:
    ms, told = pictures.token_times(), text()
    times = [ms[65_536, "forward", kernel] for kernel in ("dense, cuDNN", "triton")]
    assert f"the forward is {times[0] / times[1]:.1f} times as fast as dense attention" in told
    rates = [pictures.token_rate(65_536, kernel) for kernel in ("triton", "dense, cuDNN")]
    assert f"run at {rates[0]:.0f} TFLOP/s, and those of dense attention at {rates[1]:.0f}" in told
    slots = {row["slots"] for row in json.loads(pictures.TOKENS.read_text())["rows"]}
    assert slots == {65_536 // 32} and "the last query reads one key in 32" in told
    assert all(
        ms[n, d, x] < ms[n, d, "dense, cuDNN"] for n, d, x in ms if not x.startswith("dense")
    )


def test_pictures_say_what_they_show() -> None:
    assert "hold 54% to 56%" in pictures.draw_dials().finding
    assert "rank 8 of 8 by its mean, rank 1 by its maximum" in pictures.draw_needle().finding
    assert "Past 64k tokens" in pictures.draw_costs().finding
    share = f"{pictures.mean('moba', 'far'):.0%}"
    for draw in (pictures.draw_race, pictures.draw_learning):
        assert draw().finding.endswith(share)
    assert "by an indexer 60%" in pictures.draw_live({"msa": [0.2, 0.6]}, {"msa": 0.2}, 24).finding


def test_the_panel_moves() -> None:
    panel = pictures.explore()
    assert "choosing takes 134 MFLOP, attending 67.1 MFLOP, so 67% is choice" in panel.sentence
    assert "2,048 keys lie in 2,048 stretches" in panel.set(unit="tokens")
    assert "so 97% is choice" in panel.set(chooser="mean keys")
    assert "1M tokens, blocks of 64" in panel.set(unit="blocks of 64", tokens=1 << 20)
