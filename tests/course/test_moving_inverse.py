"""The figure of lists and inverse lists: what node computes is what `sparse.inverse_list` does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_moving import chance, needs_node, run

from nsa_tutorial.course.moving import inverse as figure
from nsa_tutorial.course.widgets.backward_kernels import causal_rows
from nsa_tutorial.sparse import inverse_list

LENGTHS = (8, 10, 48)
DRIVER = """
import * as m from "./inverse.mjs";
import { readFileSync } from "node:fs";
const { data, lengths, wild } = JSON.parse(readFileSync("given.json"));
const found = Object.entries(data.lists).map(([kind, lists]) => {
  const blocks = lists.length / data.block_size, { queries, bounds } = m.invert(lists, blocks);
  const of = (block) => queries.slice(bounds[block], bounds[block + 1]);
  const each = (does) => bounds.slice(1).map((_, block) => does(of(block), block));
  const state = { lists: kind, query: 37, block: 5, length: 8, run: 3 };
  return { kind, queries, bounds,
    chunks: lengths.map((length) => each((its) => m.chunks(its, length))),
    sums: lengths.map((length) =>
      each((its, block) => m.sums({ adds: m.WAYS[0], length, block }, its).total)),
    runs: [0, 7].map((run) => each((its, block) => {
      const { rows, total } = m.sums({ adds: m.WAYS[1], length: 8, block, run }, its);
      return [rows[0], total];
    })),
    said: m.WAYS.map((adds) => m.sentence({ ...state, adds }, data)),
    different: m.different({ adds: m.WAYS[1], block: 0 }, of(0)),
    same: m.different({ adds: m.WAYS[0], length: 8, block: 0 }, of(0)) };
});
process.stdout.write(JSON.stringify({ found, settled: wild.map((s) => m.settle(s, data)) }));
"""
WILD = [
    {**figure.START, "query": -3, "block": 99, "length": 1, "run": 1000},
    {**figure.START, "lists": "none", "adds": "nobody", "query": "x"},
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict:
    given = {"data": figure.data(), "lengths": LENGTHS, "wild": WILD}
    return run("inverse", DRIVER, given, tmp_path_factory.mktemp("node"))


def part(query: int, block: int) -> np.float32:
    return np.float32(2 * chance(query, block) - 1)


def added(numbers: list[np.float32]) -> np.float32:
    """Their sum in fp32, one after the other."""
    return np.cumsum(np.array([0, *numbers], np.float32), dtype=np.float32)[-1]


@needs_node
@pytest.mark.parametrize("kind", figure.KINDS)
def test_inverse_lists_chunks_and_sums(ran: dict, kind: str) -> None:
    (found,) = (x for x in ran["found"] if x["kind"] == kind)
    ids = torch.tensor(figure.lists(kind), dtype=torch.int32)[:, None]
    sizes = {"block_size": figure.BLOCK, "num_keys": figure.TOKENS}
    inverse = inverse_list.invert_lists(ids, causal_rows(figure.TOKENS), **sizes)
    blocks = figure.TOKENS // figure.BLOCK
    queries = (inverse.entries // figure.SLOTS)[: inverse.last[blocks - 1]].tolist()
    assert found["queries"] == queries
    assert found["bounds"] == [*inverse.first[:blocks].tolist(), len(queries)]
    for length, cut, sums in zip(LENGTHS, found["chunks"], found["sums"], strict=True):
        c = inverse_list.chunks(inverse, length=length)
        for block in range(blocks):
            mine = ((c.first_key == block * figure.BLOCK) & (c.last > c.first)).nonzero().flatten()
            expected = [queries[c.first[p] : c.last[p]] for p in mine.tolist()]
            assert cut[block] == expected
            shares = [added([part(q, block) for q in row]) for row in expected]
            assert np.float32(sums[block]) == added(shares)


@needs_node
def test_atomics_add_in_another_order_in_each_run(ran: dict) -> None:
    for found in ran["found"]:
        for runs in zip(*found["runs"], strict=True):
            for row, total in runs:
                block = found["runs"][0].index(runs[0])
                assert sorted(row) == found["chunks"][-1][block][0]
                assert np.float32(total) == added([part(q, block) for q in row])
        assert found["runs"][0][0][0] != found["runs"][1][0][0]
        assert found["different"] > 5
        assert found["same"] == 1


@needs_node
def test_it_says_who_adds(ran: dict) -> None:
    said = {found["kind"]: found["said"] for found in ran["found"]}
    assert said["trained"][0].startswith(
        "d_q of query 37 is a sum over its 4 blocks, 0, 5, 8, 9. d_k of block 5 is a sum over the "
        "19 queries that list it: 2 programs walk up to 10 each, and their shares are added in "
    )
    assert "19 programs add to it in turn" in said["trained"][1]
    assert "8 queries that list it: one program walks them" in said["smooth"][0]
    for given, told in zip(WILD, ran["settled"], strict=True):
        s = told["s"]
        moved = {text.split()[0] for text in told["moved"]}
        assert moved == {name for name in s if s[name] != given[name]}
        assert (s["query"], s["adds"]) == (0, figure.START["adds"])
    s = ran["settled"][0]["s"]
    assert (s["block"], s["length"], s["run"]) == (11, 8, 99)


def test_the_picture_at_rest_shows_the_same_lists() -> None:
    told = figure.still({**figure.START, "lists": "random", "block": 0}).finding
    assert told == "Query 37 lists 4 blocks; 48 queries list block 0"
