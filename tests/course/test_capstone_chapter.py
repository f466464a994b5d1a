"""Chapter 17's exercises, answers as readers write them, and what its pictures say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nsa_tutorial.course.exercises import capstone as solutions
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.widgets import capstone as pictures
from nsa_tutorial.training.capstone import evaluate, model
from nsa_tutorial.training.capstone.settings import Settings
from nsa_tutorial.training.capstone.train import Run, rate

pytestmark = pytest.mark.usefixtures("one_thread")

CHAPTER = Path(__file__).parents[2] / "notebooks" / "17_capstone.ipynb"
KNOWN = chapter_exercises("capstone")


# -- solutions --


def test_the_block_is_the_models() -> None:
    block = model.Block(6, nn.Linear(6, 6)).double()
    nn.init.normal_(block.shift.before)
    x = torch.randn(2, 5, 6).double()
    with torch.no_grad():
        right = block(x)
        found = solutions.decoder_block(
            x, block.attend, block.mlp, block.shift.own, block.shift.before
        )
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)  # the model's eps is another


def test_the_loop_is_the_librarys_to_the_bit() -> None:
    s = Settings.of("recall", length=32, batch=2, width=16, head_width=16, steps=4)
    run = Run(s)
    losses, state = solutions.train(
        run.model, run.optimizer, lambda step: run.task.texts(step)[:2],
        lambda step: s.learning_rate * rate(step, s), s.clip, s.steps,
    )  # fmt: skip
    assert losses == [metrics["loss"] for metrics in Run(s).steps()]
    assert state["step"] == 4


def test_hits_are_the_librarys() -> None:
    s = Settings.of("recall", length=256, batch=1, width=16, head_width=16)
    run = Run(s)
    texts = run.task.texts(evaluate.HELD_OUT)
    distance = texts.distance[0].where(texts.distance[0] >= evaluate.reach(run.settings), -100)
    found = solutions.share_of_hits(run.lists()[0, :, 0], distance, s.block_size)
    assert found == pytest.approx(evaluate.summary(run, 1)["hits"])


# -- answers as readers write them --


@pytest.mark.parametrize("name", KNOWN)
def test_each_mistake_is_named_as_itself(name: str) -> None:
    for mistake in KNOWN[name].misconceptions:
        assert judge(KNOWN[name], mistake.wrong).misconceptions == (mistake.name,), mistake


def without_a_state(model, optimizer, texts, rate, clip, until, state=None):
    """Holds all stages of a run that nobody stops, in another form."""
    losses = []
    for step in range(until):
        tokens, target = texts(step)
        log_p = F.log_softmax(model(tokens), -1)
        asked = target != -100
        loss = -log_p[asked].gather(-1, target[asked][:, None]).mean()
        model.zero_grad()
        loss.backward()
        norm = sum(w.grad.square().sum() for w in model.parameters()).sqrt()
        for w in model.parameters():
            w.grad *= min(1, clip / (norm.item() + 1e-6))
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, {}


def one_step(model, optimizer, texts, rate, clip, until, state=None):
    tokens, target = texts(0)
    optimizer.param_groups[0]["lr"] = rate(0)
    loss = F.cross_entropy(model(tokens).transpose(1, 2), target)
    loss.backward()
    optimizer.step()
    return [loss.item()], None


@pytest.mark.parametrize(("attempt", "held"), [(one_step, 1), (without_a_state, 4)])
def test_a_half_done_loop_holds_its_stages(attempt, held: int) -> None:
    assert judge(replace(KNOWN["train"], misconceptions=()), attempt).held == held


@pytest.mark.parametrize(
    ("name", "mistake", "first"),
    [
        ("train", "gradients that pile up", "many steps"),
        ("train", "a loss over tokens that ask for nothing", "questions alone"),
        ("train", "gradients that are not clipped when they are used", "clipped"),
        ("train", "an optimizer that forgets", "goes on"),
        ("train", "dice that begin anew", "the same dice"),
        ("decoder_block", "an mlp that does not see what attention added", "the mlp adds"),
        ("decoder_block", "a shift that looks ahead", "the token before"),
    ],
)
def test_a_mistake_ends_in_its_stage(name: str, mistake: str, first: str) -> None:
    wrong = next(m.wrong for m in KNOWN[name].misconceptions if m.name == mistake)
    stages = [stage.name for stage in KNOWN[name].stages]
    assert judge(KNOWN[name], wrong).held == stages.index(first)


def test_the_courses_block_is_forbidden() -> None:
    def attempt(x, attend, mlp, own, before):
        shift = model.TokenShift(x.shape[-1]).double()
        return x + attend(shift(F.rms_norm(x, x.shape[-1:])))

    assert "Forbidden: the course's own block" in judge(KNOWN["decoder_block"], attempt).text


def test_the_minutes_are_told() -> None:
    cells = nbformat.read(CHAPTER, as_version=4).cells
    text = "".join(cell.source for cell in cells).split("### If you have more time")[0]
    on_the_way = [e.minutes for name, e in KNOWN.items() if f'"capstone", "{name}"' in text]
    assert f"{sum(on_the_way)} of them exercises" in cells[0].source


# -- pictures, and what the text says of the recordings --


def test_what_the_text_says_of_the_short_recording() -> None:
    """Each statement of the chapter that no cell prints."""
    far = {name: pictures.found(name, "far") for name in pictures.NAMES}
    pairs = zip(far["nsa"], pictures.found("nsa", "hits"), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 0.002
    assert min(far["nsa"]) > max(far["random"]) > min(far["random"]) > max(far["no-selection"])
    assert all(0.48 < share < 0.53 for share in far["no-selection"])
    assert max(far["nsa"]) < min(far["dense"]) == 1
    assert max(far["window"]) < 2 / 64
    assert max(far["learned-choice"]) < min(far["nsa"])
    assert pictures.far("no-window") > pictures.far("nsa")
    assert round(100 * pictures.far("random")) == 61
    assert round(100 * pictures.chance()) == 19
    hits = pictures.mean(pictures.found("random", "hits"))
    assert 2.8 < pictures.far("random") / hits < 3.5
    assert pictures.far_without("no-summaries") > pictures.far("nsa") - 0.02
    alone = sorted(row["without"]["no-selection"]["far"] for row in pictures.rows("nsa"))
    assert alone[1] < 0.1 < alone[2]
    near = [b for r in pictures.rows("nsa") for b in r["found"]["by_distance"] if b["to"] < 16]
    assert all(b["accuracy"] > 0.99 for b in near)


def test_losses_end_in_the_order_of_the_far_answers() -> None:
    names = [
        n for n in pictures.NAMES if pictures.rows(n) and n not in ("random", "learned-choice")
    ]
    last = {n: pictures.mean([r["curve"][-1][1] for r in pictures.rows(n)]) for n in names}
    assert sorted(names, key=pictures.far) == sorted(names, key=lambda n: -last[n])


def test_what_the_text_says_of_the_long_recording() -> None:
    def found(name: str, what: str = "far") -> list[float]:
        return pictures.found(name, what, pictures.LONG)

    assert min(found("dense")) > 0.97 and max(found("window")) < 2 / 64
    assert min(found("nsa")) > max(found("random")) > max(found("no-selection"))
    assert min(found("no-summaries", "hits")) > 0.7 and max(found("no-summaries", "hits")) < 0.8
    assert max(found("separate", "hits")) < pictures.mean(found("separate", "chance")) + 0.03
    s = pictures.sizes(pictures.LONG)
    assert (s["length"], s["block_size"], s["top_n"], s["window_size"]) == (8192, 32, 16, 64)
    assert (s["summary_length"], s["compression"], s["separate_keys"]) == (4, "mean", False)
    assert all(row["settings"]["separate_keys"] for row in pictures.rows("nsa"))


def test_what_the_text_says_of_other_sizes() -> None:
    coarse = {}
    for row in pictures.recording(pictures.LONG)["rows"]:
        if row["size"] in ("long", "long-separate"):
            coarse.setdefault((row["size"], row["attention"]), []).append(row["found"]["far"])
    assert max(coarse["long-separate", "nsa"]) < 0.15
    seeds = sorted(coarse["long", "nsa"])
    assert seeds[0] < max(coarse["long", "random"]) and seeds[-1] > 1.5 * seeds[0]


def test_what_the_text_says_of_needles_and_speed() -> None:
    share = {
        name: pictures.mean(
            [pictures.mean(row["map"][-1]) for row in pictures.rows(name, pictures.NEEDLE)]
        )
        for name in ("dense", "nsa", "random", "separate", "window")
    }
    assert min(share["dense"], share["nsa"], share["random"]) > 0.7
    assert abs(share["nsa"] - share["random"]) < 0.05
    assert max(share["separate"], share["window"]) < 0.2
    speed = pictures.tokens_per_second()["nsa"]
    assert 32768 / speed[32768] < 1.25 * 2048 / speed[2048]
    assert pictures.pays_from() == (16384, 32768)
    dense = pictures.tokens_per_second()["dense"]
    assert 8192 / dense[8192] < 1.1 * 2048 / dense[2048]


def test_pictures_say_what_they_show() -> None:
    race = "Far answers found: dense 100%, NSA 86%, random slots 61%, window alone 1%"
    assert pictures.draw_race().finding == race
    assert "4 keys come again" in pictures.draw_text().finding
    for draw in (pictures.draw_curves, pictures.draw_distance, pictures.draw_without):
        assert "NSA" in draw().finding
    assert pictures.draw_live([4.0, 2.0]).finding.endswith("a mean loss of 3.00")
    assert "8,192" in pictures.draw_long().finding
    assert "separate keys" in pictures.draw_needle().finding
    assert "from 32k tokens on" in pictures.draw_speed().finding


def test_the_film_counts_hits() -> None:
    row = pictures.rows("nsa")[0]
    distance = torch.tensor(row["text"]["distance"])
    lists = torch.tensor(row["lists"]["1000"])
    far = distance.where(distance >= 32, -100)
    assert pictures.hits_at(row, 1000) == pytest.approx(solutions.share_of_hits(lists, far, 16))
    assert pictures.draw_film().finding.startswith("As NSA learns")


def test_the_panel_moves() -> None:
    panel = pictures.explore()
    assert "hold 82.4% of the far answers" in panel.sentence
    assert "window alone, seed 2" in panel.set(attention="window", seed=2)
    assert panel.controls["step"].disabled
    assert "the needle is found" in panel.set(task="needles, 2,048")
    assert "was not recorded" in panel.set(attention="no-window")
    assert "separate keys, seed 2" in panel.set(task="recall, 8,192", attention="separate")
