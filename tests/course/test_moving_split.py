"""The figure of split-KV: what node computes is what chapter 03's merge gives, in parts that the
decoding kernels cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from test_moving import needs_node, run

from nsa_tutorial.course.moving import split as figure
from nsa_tutorial.exact import online_softmax

CASES = list(itertools.product((1, 3, 4, 20, 47, 88, 96), range(1, 13)))
DRIVER = """
import * as m from "./split.mjs";
import { readFileSync } from "node:fs";
const { data, cases, start, wild } = JSON.parse(readFileSync("given.json"));
const text = (x) => String(x);
const found = cases.map(([tokens, parts]) => {
  const s = { ...start, tokens, parts, texts: 4 };
  const look = (more) => m.look({ ...s, ...more }, data);
  const { parts: made, merged, steps, empty, programs, busy, isRight } = look({});
  const others = m.WAYS.slice(1).flatMap((weights) => [0, 100].map((lift) => {
    const found = look({ weights, lift });
    return [text(found.merged.o), found.isRight];
  }));
  const lifted = look({ lift: 100 });
  return { parts: made.map(({ first, last, o, lse }) => [first, last, o, text(lse)]),
    weights: merged.weights, o: merged.o, steps, empty, programs, busy, isRight, others,
    lifted: [text(lifted.merged.o), lifted.isRight] };
});
const said = [{}, { tokens: 20 }, { tokens: 20, weights: m.WAYS[2] },
  { weights: m.WAYS[1], lift: 99 }, { parts: 1, texts: 32 }].map((more) =>
  m.sentence({ ...start, ...more }, data));
process.stdout.write(JSON.stringify({ ways: m.WAYS, found, said,
  settled: wild.map((s) => m.settle(s, data)) }));
"""
WILD = [
    {**figure.START, "tokens": 0, "parts": 99, "texts": 5, "lift": -1},
    {**figure.START, "weights": "none", "tokens": 1000},
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict:
    given = {"data": figure.data(), "cases": CASES, "start": figure.START, "wild": WILD}
    return run("split", DRIVER, given, tmp_path_factory.mktemp("node"))


def number(told: str) -> float:
    return float(told.replace("Infinity", "inf"))


def merged(parts: list[figure.Part]) -> float:
    """By chapter 03's merge, one part after the other."""
    o, lse = torch.zeros(1, dtype=torch.float64), torch.tensor(-torch.inf, dtype=torch.float64)
    for part in parts:
        own = torch.tensor([part.o], dtype=torch.float64)
        o, lse = online_softmax.merge(o, lse, own, torch.tensor(part.lse, dtype=torch.float64))
    return o.item()


@needs_node
def test_parts_and_their_merge(ran: dict) -> None:
    assert ran["ways"] == list(figure.WAYS)
    scores = np.array(figure.scores())
    for (tokens, count), found in zip(CASES, ran["found"], strict=True):
        parts = figure.parts_of(tokens, count)
        for part, (first, last, o, lse) in zip(parts, found["parts"], strict=True):
            assert (first, last) == (part.first, part.last)
            assert o == pytest.approx(part.o, rel=1e-5)
            assert number(lse) == pytest.approx(part.lse, rel=1e-5)
        assert parts[0].first == 0
        assert parts[-1].last == tokens
        empty = sum(part.last == part.first for part in parts)
        assert found["empty"] == empty == found["weights"].count(0)
        whole = np.exp(scores[:tokens])
        right = float(whole @ np.arange(tokens) / whole.sum())
        assert merged(parts) == pytest.approx(right)
        assert found["o"] == pytest.approx(right, rel=1e-5, abs=1e-5)
        assert number(found["lifted"][0]) == pytest.approx(right, rel=1e-4, abs=1e-4)
        assert found["isRight"]
        assert found["lifted"][1]
        assert found["steps"] == -(-(parts[0].last - parts[0].first) // figure.STEP)
        assert (found["programs"], found["busy"]) == (16 * count, min(16 * count, 132))


@needs_node
def test_other_weights_go_wrong(ran: dict) -> None:
    """exp(lse) alone where it overflows; equal weights wherever there are two parts."""
    for (tokens, count), found in zip(CASES, ran["found"], strict=True):
        plain, lifted, equal, _ = found["others"]
        assert plain[1]
        assert lifted == ["NaN", False]
        outputs = [part.o for part in figure.parts_of(tokens, count)]
        assert number(equal[0]) == pytest.approx(np.mean(outputs), rel=1e-5)
        if count > 1 and tokens > 1:
            assert not equal[1]


@needs_node
def test_it_says_what_is_right_and_what_is_busy(ran: dict) -> None:
    plain, short, equal, lifted, one = ran["said"]
    assert "8 programs walk 88 keys in 3 steps, not 22." in plain
    assert "1 text × 4 KV heads × 8 parts = 32 programs, so 32 of 132" in plain
    assert "3 parts are empty: lse −inf, weight 0." in short
    assert "would be right: a part counts by its sum of exp, and an empty one not at all" in equal
    assert "o = NaN" in lifted
    assert "one program walks 88 keys in 22 steps. o =" in one
    assert "128 programs, so 128 of 132" in one
    first, second = ran["settled"]
    assert first["s"] == {**figure.START, "tokens": 1, "parts": 12, "texts": 4}
    assert second["s"] == {**figure.START, "tokens": 96}
    assert [len(told["moved"]) for told in ran["settled"]] == [4, 2]


def test_the_picture_at_rest() -> None:
    told = figure.still({**figure.START, "tokens": 20}).finding
    assert told.startswith("20 keys in 8 parts, 3 of them empty: o = ")
