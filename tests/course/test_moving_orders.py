"""The figure of three orders: what node counts is what chapter 16's pictures count."""

from __future__ import annotations

import itertools

import pytest
from test_moving import needs_node, run

from nsa_tutorial.course.moving import orders as figure
from nsa_tutorial.course.widgets import performance as pictures

UNIONS = (100, 102, 104, 129, 131, 187, 250, 318, 399, 400)
CASES = list(itertools.product(pictures.ORDERS, (1, 4, 16), UNIONS))
DRIVER = """
import * as m from "./orders.mjs";
import { readFileSync } from "node:fs";
const { data, cases, unions, wild } = JSON.parse(readFileSync("given.json"));
const found = cases.map(([order, group, union]) => {
  const { cached, memory, flops, times, ms } = m.cost(order, group, union / 100, data);
  return { cached, memory, flops, times, ms, said: m.sentence({ order, group, union }, data) };
});
const sketches = unions.map((union) => ({ lists: m.neighbours(union / 100, data),
  walks: m.ORDERS.map((order) => m.walk(order, union / 100, data)),
  told: m.ORDERS.map((order) => m.loaded(order, union / 100, data)) }));
process.stdout.write(JSON.stringify({ orders: m.ORDERS, found, sketches,
  settled: wild.map((s) => m.settle(s, data)) }));
"""
WILD = [
    {**figure.START, "union": 99, "group": 3, "order": "none"},
    {**figure.START, "union": "x", "group": 1000},
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict:
    given = {"data": figure.data(), "cases": CASES, "unions": UNIONS, "wild": WILD}
    return run("orders", DRIVER, given, tmp_path_factory.mktemp("node"))


@needs_node
def test_bytes_operations_and_times(ran: dict) -> None:
    assert ran["orders"] == list(pictures.ORDERS)
    for (order, group, union), found in zip(CASES, ran["found"], strict=True):
        cost = pictures.order_cost(order, group, union / 100)
        for name in ("cached", "memory", "flops", "ms"):
            assert found[name] == pytest.approx(getattr(cost, name)), name
        assert found["times"] == pytest.approx(cost.times)
        assert found["said"] == pictures.told_orders(order, union / 100, group)
    recorded = [found["said"] for found in ran["found"] if "Recorded: " in found["said"]]
    assert len(recorded) >= len(pictures.recorded())


@needs_node
def test_the_sketch_has_the_union_that_is_asked_for(ran: dict) -> None:
    for union, found in zip(UNIONS, ran["sketches"], strict=True):
        lists, columns = found["lists"], int(16 * union / 100 + 0.5)
        assert [len(set(ids)) for ids in lists] == [16] * 4
        assert len(set().union(*lists)) == columns
        pairs = {(t, b) for t, ids in enumerate(lists) for b in ids}
        for steps in found["walks"]:
            walked = [tuple(pair) for step in steps for pair in step["pairs"]]
            assert len(walked) == len(pairs)
            assert set(walked) == pairs
        queries, tiles, blocks = (steps[-1]["loads"] for steps in found["walks"])
        assert (queries, tiles, blocks) == (64, columns, 64)
        assert f"{columns} loads of a block, and {4 * columns - 64} of" in found["told"][1]


@needs_node
def test_a_state_is_brought_into_range(ran: dict) -> None:
    first, second = (told["s"] for told in ran["settled"])
    assert first == {"union": 100, "group": 1, "order": "queries"}
    assert second == {**figure.START, "union": 100, "group": 16}


def test_the_picture_at_rest_is_the_chapters() -> None:
    told = figure.still(figure.START).finding
    assert told == pictures.draw_paper("tiles", 1.29, 16).finding
