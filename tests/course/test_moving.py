"""Figures that move without a kernel: their arithmetic is the course's, run by node; and what
Python hands to a notebook and to a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nsa_tutorial.course import costs, masks, moving
from nsa_tutorial.course.figures import PALETTE
from nsa_tutorial.course.masks import BRANCHES, POWERS, Settings
from nsa_tutorial.course.moving import choice as choice_figure
from nsa_tutorial.course.moving import masks as explorer
from nsa_tutorial.course.stills import WIDGET
from nsa_tutorial.course.widgets import (
    mask_explorer,
    online_softmax,
    selection_kernels,
    tilelang_forward,
)
from nsa_tutorial.course.widgets import tiled_attention as walks
from nsa_tutorial.exact import tiled_attention

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
SIZES = [
    Settings(N=512, top_n=5),
    Settings(N=512, block_size=4, top_n=32, num_initial=0, num_local=1, length=4, stride=4),
    Settings(N=512, block_size=128, top_n=2, num_initial=1, num_local=1, length=128, stride=16),
    Settings(N=512, block_size=32, top_n=9, num_initial=3, num_local=4, window=1, length=64),
    Settings(N=77, block_size=8, top_n=3, num_initial=1, num_local=1, window=256, length=8),
]
DRIVER = """
import * as m from "./masks.mjs";
import { readFileSync } from "node:fs";
const { data, cases, wild } = JSON.parse(readFileSync("given.json"));
const heads = m.decode(data), all = { compressed: true, selected: true, sliding: true };
const found = cases.map(({ s, N, scores }) => {
  const listed = m.lists(s, N, scores.flat());
  return {
    lists: listed,
    random: m.lists({ ...s, random: true }, N),
    kinds: [...m.masks({ ...s, ...all }, listed, N)],
    layers: ["compressed", "selected", "sliding"].map((name) =>
      [...m.masks({ ...s, ...all, [name]: false }, listed, N)]),
    importance: N === heads.N ? [...m.importance(heads, s)] : null,
    attention: [...m.attention(heads, s.group, N - 1)],
    held: m.held(s, N - 1, listed[N - 1], m.attention(heads, s.group, N - 1)),
    loads: m.loads(s, N - 1, listed[N - 1]),
    costs: [N, 512, 4096, 65536].map((n) => m.costs(s, heads, n)),
  };
});
const settled = wild.map((state) => m.settle(state, heads.N, heads.groups.length));
const amounts = [0, 640, 1536, 12_300_000].map((x) => [m.amount(x, "B"), m.amount(x)]);
process.stdout.write(JSON.stringify({ found, settled, amounts }));
"""


def run(name: str, driver: str, given: object, folder: Path) -> dict:
    """What node prints, as JSON, for a driver that imports a figure's module."""
    (folder / f"{name}.mjs").write_text(moving.source(name))
    (folder / "driver.mjs").write_text(driver)
    (folder / "given.json").write_text(json.dumps(given))
    done = subprocess.run(
        [NODE, "driver.mjs"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def logits(data: dict, group: int) -> np.ndarray:
    """The scaled scores `[G, N, N]` that the 8 bits of `data` stand for."""
    import base64

    def read(name: str) -> np.ndarray:
        stored = data["groups"][group]
        raw = np.frombuffer(base64.b64decode(stored[name]), np.int8).astype(float)
        return raw * stored[f"{name}_scale"]

    q, k = read("q").reshape(-1, data["G"], data["D"]), read("k").reshape(-1, data["D"])
    return np.einsum("igd,jd->gij", q, k) * data["D"] ** -0.5


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def tied(settings: Settings) -> np.ndarray:
    """Importance `[N, NB]` in which many blocks are equal."""
    return np.random.default_rng(0).integers(0, 4, (settings.N, settings.NB)).astype(float)


def chance(t: int, block: int) -> float:
    """The score of a random slot, in Python's integers."""
    word = 2**32 - 1
    x = (t * 4096 + block + 1) * 2654435761 & word
    x = (x ^ x >> 15) * 2246822519 & word
    x = (x ^ x >> 13) * 3266489917 & word
    return (x ^ x >> 16) / 2**32


WILD = [
    {**explorer.START, "query": -3, "top_n": 99, "num_local": 0, "stride": 64, "lens": 1000},
    {**explorer.START, "top_n": 2, "num_initial": 8, "num_local": 8, "length": 3, "group": 7},
    {**explorer.START, "query": None, "block_size": 5, "stride": 128, "length": 8},
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What node says of `SIZES` and `WILD`."""
    folder, names = tmp_path_factory.mktemp("node"), explorer.START.keys()
    cases = [
        {
            "s": {n: getattr(s, n) for n in names if hasattr(s, n)} | {"group": i % 2},
            "N": s.N,
            "scores": tied(s).tolist(),
        }
        for i, s in enumerate(SIZES)
    ]
    given = {"data": explorer.data(), "cases": cases, "wild": WILD}
    return run("masks", DRIVER, given, folder)


def ids(listed: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in listed]


each_size = pytest.mark.parametrize("i", range(len(SIZES)))


@needs_node
@each_size
def test_lists_and_masks_are_those_of_the_course(ran: dict, i: int) -> None:
    s, found = SIZES[i], ran["found"][i]
    assert found["lists"] == ids(masks.choose_blocks(s, tied(s)))
    drawn = np.array([[chance(t, b) for b in range(s.NB)] for t in range(s.N)])
    assert found["random"] == ids(masks.choose_blocks(s, drawn))
    seen = masks.branch_masks(s, tied(s))
    assert found["kinds"] == mask_explorer.kinds(seen).ravel().tolist()
    without = [{"compressed"}, {"selected", "own block"}, {"window"}]
    for kinds, names in zip(found["layers"], without, strict=True):
        assert kinds == mask_explorer.kinds(seen, set(BRANCHES) - names).ravel().tolist()


@needs_node
@each_size
def test_scores_of_the_stored_heads(ran: dict, i: int) -> None:
    s, found = SIZES[i], ran["found"][i]
    scores, t = logits(explorer.data(), i % 2), s.N - 1
    shares = softmax(scores[:, t, : t + 1]).mean(0)
    assert found["attention"] == pytest.approx(shares.tolist(), abs=1e-12)
    if found["importance"]:
        expected = masks.importance(s, scores)
        assert np.array(found["importance"]) == pytest.approx(expected.ravel(), abs=1e-9)
    seen = masks.branch_masks(s, tied(s))
    one_by_one = seen["selected"][t] | seen["own block"][t] | seen["window"][t]
    assert found["held"] == pytest.approx(shares[one_by_one].sum())


def summaries(s: Settings, t: int) -> int:
    """How many begin by the position of `t`, and end there."""
    return len([j for j in range(0, t + 1, s.stride) if j + s.length <= t + 1])


@needs_node
@each_size
def test_costs(ran: dict, i: int) -> None:
    s, data = SIZES[i], explorer.data()
    G, D = data["G"], data["D"]
    for N, found in zip((s.N, 512, 4096, 65536), ran["found"][i]["costs"], strict=True):
        shape = {"HQ": G, "H": 1}
        dense = costs.tiled_attention(N, N, D, **shape)
        assert found["all"]["dense"] == {"flops": dense.flops, "bytes": dense.bytes}
        if N > 4096:  # too many to count here
            continue
        ends = [min(start + 64, N) for start in range(0, N, 64)]
        keys = [summaries(s, end - 1) for end in ends]
        pairs = sum((end - (end - 1) // 64 * 64) * n for end, n in zip(ends, keys, strict=True))
        q = N * G * D * 2
        branches = costs.total(
            costs.selected_attention(N, N, D, block_size=s.block_size, top_n=s.top_n, **shape),
            costs.sliding_window_attention(N, N, D, window_size=s.window, **shape),
            # the compressed branch, and the choice
            costs.Cost(4 * G * pairs * D, q + sum(keys) * D * 4, q + 4 * N * G),
            costs.Cost(2 * G * pairs * D, q + 4 * N * G + sum(keys) * D * 2, 4 * N * s.top_n),
        )
        assert found["all"]["nsa"] == {"flops": branches.flops, "bytes": branches.bytes}
        last = costs.selected_keys(1, N, block_size=s.block_size, top_n=s.top_n)
        last += costs.window_keys(1, N, window_size=s.window) + summaries(s, N - 1)
        assert found["one"]["nsa"] == {"keys": last, "bytes": 4 * D * last}
        assert found["one"]["dense"] == {"keys": N, "bytes": 4 * D * N}
    loads = ran["found"][i]["loads"]
    assert sum(loads.values()) == ran["found"][i]["costs"][0]["one"]["nsa"]["keys"]


@needs_node
def test_a_state_is_brought_into_range(ran: dict) -> None:
    for given, told in zip(WILD, ran["settled"], strict=True):
        s = told["s"]
        assert 0 <= s["query"] < 512
        assert s["length"] in POWERS
        assert s["stride"] <= min(s["length"], s["block_size"])
        assert s["num_initial"] + s["num_local"] <= s["top_n"] <= 32
        assert 0 <= s["group"] < len(explorer.GROUPS)
        moved = {text.split()[0] for text in told["moved"]}
        assert moved == {name for name in s if s[name] != given[name]}
    assert ran["amounts"] == [
        ["0 B", "0"], ["640 B", "640"], ["1.50 KiB", "1.54 k"], ["11.7 MiB", "12.3 M"],
    ]  # fmt: skip


SOFTMAX = """
import * as m from "./softmax.mjs";
import { readFileSync } from "node:fs";
const told = JSON.parse(readFileSync("given.json")).map(([lift, reference]) =>
  m.walk(lift, reference).map((moment, i) => [
    m.sentence({ lift, reference, step: i + 1 }), moment.parts.map(String), m.isRight(moment)]));
const settled = m.settle({ step: 99, lift: "x", reference: "none" });
process.stdout.write(JSON.stringify({ told, scores: m.SCORES, references: m.REFERENCES, settled }));
"""


@needs_node
def test_online_softmax_is_that_of_chapter_03(tmp_path: Path) -> None:
    """In fp32, where it overflows, too: sentences, parts, and where it is right."""
    pictures = online_softmax
    edges = {pictures.limit(x) + up for x in pictures.REFERENCES for up in (0, 1)}
    lifts = sorted({0, 1, 10, 11, 40, 125, 160, *edges} - {161})
    cases = [(lift, reference) for lift in lifts for reference in pictures.REFERENCES]
    found = run("softmax", SOFTMAX, cases, tmp_path)
    assert (found["scores"], found["references"]) == (
        list(pictures.SCORES), list(pictures.REFERENCES),
    )  # fmt: skip
    for (lift, reference), steps in zip(cases, found["told"], strict=True):
        moments = pictures.walk(pictures.row(lift), pictures.positions(), reference)
        for step, (moment, (said, parts, right)) in enumerate(zip(moments, steps, strict=True), 1):
            assert said == pictures.sentence(step, reference, lift)
            got = [float(part.replace("Infinity", "inf")) for part in parts]
            assert got == pytest.approx(moment.parts, rel=1e-6, abs=1e-37, nan_ok=True)
            assert right == said.endswith("which is right.")
    assert found["settled"]["s"] == {"step": 6, "lift": 0, "reference": "running max"}
    assert len(found["settled"]["moved"]) == 3


CHOICE = """
import * as m from "./choice.mjs";
import { readFileSync } from "node:fs";
const { data, cases, wild } = JSON.parse(readFileSync("given.json"));
const heads = m.decode(data), real = heads.groups.map((_, group) =>
  m.importance(heads, { ...m.SIZES, group }));
const told = cases.map(({ s, scores }) => {
  const now = m.look(s, heads, scores?.flat() ?? real[s.group]);
  return { ...now, mass: [...now.mass], said: m.sentence(s, now) };
});
const settled = wild.map((state) => m.settle(state, heads.N, heads.groups.length));
const values = [0, 1e-45, 0.3, 2, 1e38].map((x) => [m.bitsOf(x), m.valueOf(m.bitsOf(x))]);
process.stdout.write(JSON.stringify({ told, settled, values }));
"""


@needs_node
def test_the_choice_is_found_as_in_chapter_14(tmp_path: Path) -> None:
    """Its questions, and the list they end with: by the real heads, and by scores with ties."""
    data, start = explorer.data(), choice_figure.START
    sizes = {"block_size": 16, "length": 8, "stride": 4}
    cases, expected = [], []
    for query, top_n, num_initial, num_local, group, made_up in (
        (505, 4, 0, 1, 0, False), (505, 8, 1, 2, 1, False), (389, 16, 4, 4, 0, False),
        (20, 8, 1, 2, 0, False), (3, 1, 0, 1, 0, False), (300, 6, 0, 0, 1, True),
        (511, 15, 1, 2, 0, True), (97, 7, 0, 1, 0, True),
    ):  # fmt: skip
        forced = {"num_initial": num_initial, "num_local": num_local}
        settings = Settings(N=512, top_n=top_n, **forced, **sizes)
        scores = tied(settings) if made_up else masks.importance(settings, logits(data, group))
        state = {**start, "query": query, "top_n": top_n, "group": group, **forced}
        cases.append({"s": state, "scores": scores.tolist() if made_up else None})
        own = query // 16
        rank = np.where(masks.forced_blocks(settings)[query], np.inf, scores[query])
        rank = torch.tensor(rank, dtype=torch.float32).index_fill_(0, torch.arange(own + 1, 32), -1)
        shares = softmax(logits(data, group)[:, query, : query + 1]).mean(0)
        mass = np.add.reduceat(shares, np.arange(0, query + 1, 16))
        expected.append((rank, masks.choose_blocks(settings, scores)[query], mass))
    wild = [{**start, "top_n": 2, "num_local": 9, "num_initial": 9, "question": 0},
            {**start, "threshold": -5, "query": 600, "group": 2, "question": 40}]  # fmt: skip
    given = {"data": data, "cases": cases, "wild": wild}
    found = run("choice", CHOICE, given, tmp_path)
    for case, told, (rank, chosen, mass) in zip(cases, found["told"], expected, strict=True):
        n, bits = case["s"]["top_n"], selection_kernels.bits_of(rank.clamp(max=torch.inf))
        asked = selection_kernels.questions(bits, n)
        assert told["asked"] == [vars(question) for question in asked]
        ids = np.flatnonzero(chosen).tolist()
        assert told["list"] == ids + [-1] * (n - len(ids))
        assert told["mass"][: len(mass)] == pytest.approx(mass.tolist())
        best = np.sort(mass)[-n:].sum()
        assert told["said"].endswith(f"holds {100 * mass[ids].sum():.0f}% of its attention, the "
            f"best {min(n, len(mass))} block{'s' * (min(n, len(mass)) > 1)} {100 * best:.0f}%."
        )  # fmt: skip
    assert [told["s"] for told in found["settled"]] == [
        {**start, "top_n": 2, "num_local": 2, "num_initial": 0, "question": 1},
        {**start, "threshold": 0, "query": 511, "group": 1, "question": 31},
    ]
    for (bits, value), x in zip(found["values"], (0, 1e-45, 0.3, 2, 1e38), strict=True):
        assert bits == selection_kernels.bits_at(x)
        assert value == np.float32(x)


TILES = """
import * as m from "./tiles.mjs";
import { readFileSync } from "node:fs";
const { cases, wild } = JSON.parse(readFileSync("given.json"));
const told = cases.map((s) => ({
  kinds: m.tiles(s).map((tile) => [tile.q, tile.qEnd, tile.k, tile.kEnd, tile.kind]),
  dense: m.table(s).bytes,
  steps: m.meter(s).map(({ so, moves, bytes }, i) =>
    ({ so, moves, bytes, said: m.sentence(s, m.look({ ...s, step: i + 1 })) })),
}));
process.stdout.write(JSON.stringify({ told, settled: wild.map(m.settle) }));
"""


@needs_node
def test_the_tile_walk_is_that_of_chapter_04(tmp_path: Path) -> None:
    """Kinds of tiles, and the meter after each of them."""
    start = moving._module("tiles").START
    sizes = [(40, 56, 16, 12, True), (64, 64, 16, 16, False), (37, 61, 5, 7, True),
             (8, 8, 64, 64, True), (33, 64, 33, 4, True)]  # fmt: skip
    names = ("N", "M", "tile_q", "tile_k", "causal")
    cases = [{**start, **dict(zip(names, size, strict=True))} for size in sizes]
    wild = [{**start, "N": 99, "M": 20, "step": 0, "tile_q": None, "causal": "x"}]
    found = run("tiles", TILES, {"cases": cases, "wild": wild}, tmp_path)
    for (N, M, BQ, BK, causal), told in zip(sizes, found["told"], strict=True):
        kinds = list(tiled_attention.tiles(N, M, BQ, BK, causal))
        assert [tuple(kind) for kind in told["kinds"]] == kinds
        assert told["dense"] == costs.dense_attention(N, M, 16).bytes
        readings = walks.meter(N, M, 16, BQ, BK, causal)
        before = {"q": 0, "kv": 0, "out": 0}
        for step, (reading, shown) in enumerate(zip(readings, told["steps"], strict=True), 1):
            so = {"q": reading.q, "kv": reading.kv, "out": reading.out}
            assert (shown["so"], shown["bytes"]) == (so, reading.bytes)
            assert shown["moves"] == {part: so[part] - before[part] for part in so}
            before = so
            assert shown["said"].startswith(f"Tile {step} of {len(readings)}: ")
            assert f"{reading.bytes / 1024:.1f} " in shown["said"]
        skipped = [kind.kind for kind in kinds].count("skipped")
        assert f" {skipped} tile" in told["steps"][-1]["said"]
    settled = {**start, "N": 20, "M": 20, "step": 1, "tile_q": 4}
    assert found["settled"][0]["s"] == settled


LIST_WALK = """
import * as m from "./list_walk.mjs";
import { readFileSync } from "node:fs";
const { data, cases, wild } = JSON.parse(readFileSync("given.json")), given = m.decode(data);
const plain = (x) => x === -Infinity ? "-inf" : x?.length === undefined || x.at === undefined ||
  typeof x === "string" ? x : [...x].map(plain);
const told = cases.map(([token, head, slot]) => {
  const steps = m.walk(given, token, head), cost = m.bytes(given, steps, slot, token);
  const held = Object.entries(steps[slot]).map(([name, value]) => [name, plain(value)]);
  return { ...Object.fromEntries(held), cost,
    said: m.sentence(given, { token, head, slot }, steps[slot], cost) };
});
process.stdout.write(JSON.stringify({ told, settled: wild.map(m.settle(given)) }));
"""


@needs_node
def test_the_list_walk_is_that_of_the_traced_twin(tmp_path: Path) -> None:
    """Tiles, scores, statistics and the numerator; empty slots and a cut block among them."""
    pictures = tilelang_forward
    cases = [(77, head, slot) for head in (0, 3) for slot in range(4)]
    cases += [(0, 0, 0), (0, 0, 3), (16, 1, 0), (16, 1, 2), (31, 2, 2), (95, 1, 3)]
    wild = [{"token": 99, "head": -1, "slot": None}]
    given = {"data": moving._module("list_walk").data(), "cases": cases, "wild": wild}
    found = run("list_walk", LIST_WALK, given, tmp_path)

    def near(got: list, expected: np.ndarray) -> None:
        numbers = np.array(got, dtype=object)
        numbers = np.where(numbers == "-inf", -np.inf, numbers).astype(float)
        np.testing.assert_allclose(numbers, expected, rtol=1e-4, atol=1e-4)

    for (token, head, slot), told in zip(cases, found["told"], strict=True):
        m = pictures.moment(token, head, slot)
        seen = int(m.is_seen.sum())
        assert (told["block"], told["seen"]) == (m.block_id, seen)
        if seen:
            near(told["k_tile"], m.k_tile[m.is_seen])
            near(told["v_tile"], m.v_tile[m.is_seen])
        for name in ("scores", "weights", "scores_max_prev", "scores_max", "scores_scale",
                     "running_sum", "acc_o"):  # fmt: skip
            near(told[name], getattr(m, name))
        said = pictures.sentence(token, head, slot)
        assert re.sub(r"[0-9.,]+", "#", told["said"]).startswith(re.sub(r"[0-9.,]+", "#", said))
        loaded = [int(pictures.moment(token, head, i).is_seen.sum()) for i in range(pictures.S)]
        # 4 heads, and 32 numbers of two bytes in each row of a tensor
        assert told["cost"] == {
            "q": 4 * 64, "so": 2 * 64 * sum(loaded[: slot + 1]), "list": 2 * 64 * sum(loaded),
            "dense": 2 * 64 * (token + 1), "out": 4 * 64 + 4 * 4,
        }  # fmt: skip
    assert found["settled"][0]["s"] == {"token": 95, "head": 0, "slot": 0}


# -- what Python hands over --


def test_the_stored_heads_in_8_bits_choose_what_the_stored_ones_choose() -> None:
    assert explorer.data() == explorer.stored()
    assert explorer.PATH.stat().st_size < 300_000
    s, past = Settings(top_n=5), np.tri(512, dtype=bool)
    for group, kv_head in enumerate(explorer.GROUPS):
        rough = logits(explorer.data(), group)
        exact = masks.source(masks.REAL, 512, kv_head).logits
        both = [masks.choose_blocks(s, masks.importance(s, x)) for x in (rough, exact)]
        assert (both[0] == both[1]).all(-1).mean() > 0.98
        shares = [softmax(np.where(past, x, -np.inf)) for x in (rough, exact)]
        assert np.abs(shares[0] - shares[1]).sum(-1).mean() / 2 < 0.0101, "masks.py says 1 %"


def test_a_figure_in_a_notebook_is_read_and_set_by_name() -> None:
    pytest.importorskip("anywidget")
    shown = moving.figure("masks", query=410, random=True)
    assert (shown.query, shown.random, shown.palette) == (410, True, PALETTE)
    shown.query = 7
    assert shown.state == {**explorer.START, "query": 7, "random": True}
    data, facts = shown._repr_mimebundle_()
    assert {WIDGET, "image/png"} <= data.keys()
    assert data["text/plain"] == "Interactive: the mask explorer. Run this cell to move it."
    assert facts["image/png"]["alt"].startswith("Query 7 ")


@pytest.mark.parametrize("name", moving.NAMES)
def test_every_figure_begins_as_it_says_and_has_a_picture(name: str) -> None:
    pytest.importorskip("anywidget")
    shown = moving.figure(name)
    assert shown.state == moving._module(name).START
    assert len(shown._repr_mimebundle_()[1]["image/png"]["alt"]) > 20


def test_a_figure_without_anywidget_is_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    moving._widget.cache_clear()
    shown = moving.figure("masks")
    data, facts = shown._repr_mimebundle_()
    assert WIDGET not in data
    assert repr(shown) == data["text/plain"]
    assert len(facts["image/png"]["alt"]) > 20
    moving._widget.cache_clear()


@pytest.mark.parametrize(
    ("state", "error"),
    [({"blocks": 3}, "blocks: expected one of"), ({"query": 3.5}, "query: expected int, got float"),
     ({"random": 1}, "random: expected bool, got int")],
    ids=["name", "kind", "flag"],
)  # fmt: skip
def test_a_wrong_state_is_refused(state: dict, error: str) -> None:
    with pytest.raises(TypeError, match=re.escape(error)):
        moving.page("masks", state)


@pytest.mark.parametrize("name", moving.NAMES)
def test_a_page_asks_for_nothing_and_is_small(name: str) -> None:
    page = moving.page(name)
    assert len(page) < 400_000
    assert page.count("</script>") == 1
    remote = re.findall(r"(?:src|href)=\"(?!data:|\$)[^\"]*\"|url\([^)]*\)|@?import\s+[\"']", page)
    assert not remote
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", sorted(moving.HERE.glob("*.js")), ids=lambda path: path.name)
def test_a_module_keeps_to_the_style_of_the_course(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 100 or line != line.rstrip()]
    colours = set(re.findall(r"#[0-9A-F]{6}\b", "\n".join(lines)))
    assert colours <= {*PALETTE.values(), "#F3F4F6"}, "the palette's, and the ground of a button"
