"""What goes wrong over several ranks ends with a sentence on each of them, and nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator

import many_gpus_cases as cases
import pytest
import torch
from ranks import Ranks

from nsa_tutorial.training.many_gpus import Cut, make_mesh
from nsa_tutorial.training.many_gpus.agreement import difference
from nsa_tutorial.training.many_gpus.meshes import context_of

TIMEOUT, LONG = 4.0, 12.0  # seconds


@pytest.fixture
def mortal() -> Iterator[Ranks]:
    """Two ranks of which one may die."""
    ranks = Ranks(2, timeout=TIMEOUT)
    yield ranks
    ranks.close()


def test_a_wrong_length(two: Ranks) -> None:
    first, second = two.run(cases.told, [Cut(2, 45)] * 2, [{}] * 2, 1)
    name, text = second
    assert name == "ValueError"
    assert text == (
        "x: got 23 tokens, expected 24, those of rank 1 of a zigzag cut of 45 tokens over 2 ranks"
    )
    assert first == (
        "RanksDisagree", f"rank 1 of this context was called with a wrong argument: {text}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name"),
    [({"block_size": 8}, "block_size"), ({"window_size": 9}, "window_size"),
     ({"stride": 3}, "stride"), ({"block_counts": 4}, "block_counts"),
     ({"learn_choice": True}, "learn_choice"), ({"scale": 0.5}, "scale")],
)  # fmt: skip
def test_ranks_that_disagree(two: Ranks, change: dict, name: str) -> None:
    for error, text in two.run(cases.told, [Cut(2, 45)] * 2, [{}, change]):
        assert error == "RanksDisagree"
        assert text.startswith(f"{name}: got ") and "on rank 0" in text and "on rank 1" in text


def test_cuts_that_disagree(two: Ranks) -> None:
    cuts = [Cut(2, 44), Cut(2, 44, "contiguous")]
    for error, text in two.run(cases.told, cuts, [{}] * 2):
        assert error == "RanksDisagree" and "zigzag" in text and "contiguous" in text
    assert two.run(cases.told, [Cut(2, 44)] * 2, [{}] * 2) == [("", "")] * 2  # and life goes on


@pytest.mark.parametrize(
    ("change", "text"),
    [({"block_counts": 2}, "block_counts: got 2, expected an int of at least 3"),
     ({"block_size": 0}, "block_size: got 0, expected an int of at least 1"),
     ({"backend": "cuda"}, "backend: got")],
)  # fmt: skip
def test_wrong_options(two: Ranks, change: dict, text: str) -> None:
    for error, found in two.run(cases.told, [Cut(2, 45)] * 2, [change] * 2):
        assert error == "ValueError" and found.startswith(text)


def test_a_cut_for_other_ranks(two: Ranks) -> None:
    for error, text in two.run(cases.told, [Cut(3, 45)] * 2, [{}] * 2):
        assert error == "ValueError"
        assert text == "cut: got one for 3 ranks, expected 2, as many as the mesh has"


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_dies(mortal: Ranks, when: str) -> None:
    (error, text, seconds), _ = mortal.run(cases.told_of_a_death, when, TIMEOUT, patience=LONG)
    assert error == "RankLost" and "One of them has died" in text
    assert seconds < 2 * TIMEOUT


@pytest.mark.exhaustive
def test_a_rank_that_does_not_come(mortal: Ranks) -> None:
    (error, text, seconds), _ = mortal.run(cases.told_of_a_death, "never", TIMEOUT, patience=LONG)
    assert error == "RankLost" and "did not come within the timeout" in text
    assert seconds < 2 * TIMEOUT


# -- without processes --


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0, 4), "ranks: got 0, expected an int of at least 1"),
     ((2, -1), "tokens: got -1, expected an int of at least 0"),
     ((2, 4, "ring"), "kind: got 'ring' (str), expected one of contiguous, zigzag"),
     ((2, 4, "zigzag", (0, 3)), "documents: got [0, 3], expected offsets that never decrease, from "
      "0 to the number of tokens, 4")],
)  # fmt: skip
def test_a_wrong_cut(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Cut(*arguments)
    assert str(caught.value) == text


def test_a_wrong_text() -> None:
    with pytest.raises(ValueError, match=r"x: got .*, expected 5 tokens in dimension 1"):
        Cut(2, 5).shard(torch.zeros(1, 4), 0)


def test_a_wrong_mesh() -> None:
    with pytest.raises(ValueError, match="data: got 0, expected an int of at least 1"):
        make_mesh(0, 1, "cpu")
    with pytest.raises(ValueError, match=r"device: got 'tpu' \(str\), expected one of cuda, cpu"):
        make_mesh(1, 1, "tpu")
    with pytest.raises(TypeError, match=r"mesh: got 3 \(int\), expected a DeviceMesh"):
        context_of(3)


def test_the_first_problem_is_told() -> None:
    settings = [{"problem": "", "a": "1"}, {"problem": "too long", "a": "2"}]
    assert difference(settings).endswith("with a wrong argument: too long")
    settings[1]["problem"] = ""
    assert difference(settings).startswith("a: got 1 on rank 0, 2 on rank 1")
