"""`python -m nsa_tutorial.bench decode`: what it measures is right, and its stored run is whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nsa_tutorial.bench import __main__ as bench
from nsa_tutorial.bench.decode import Row

STORED = Path(__file__).parents[2] / "assets" / "decode_h100.json"
SMALL = ["decode", "--device", "cpu", "--dtype", "float32", "--sequences", "2", "--tokens", "96"]
CASE = ("tilelang", 32, 65_536)
SMALL += ["--kv-heads", "2", "--group", "2"]


def test_rows_of_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    options = ["--width", "16", "--seconds", "0.001", "--backend", "reference"]
    assert bench.main([*SMALL, *options, "--output", str(path)]) == 0
    nsa, dense = (Row(**row) for row in json.loads(path.read_text())["rows"])
    assert (nsa.kernel, dense.kernel) == ("reference", "dense")
    assert nsa.error < 1e-5
    # 2 sequences, 2 heads, a key and a value of 16 fp32 numbers: all tokens, or three branches
    assert dense.mib * 2**20 == 2 * 2 * 2 * 16 * 4 * 96
    assert nsa.mib * 2**20 == 2 * 2 * 2 * 16 * 4 * (5 + 96 + 96)
    assert "2 sequences of 96, reference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "4000000000"], "--tokens: got 4000000000, expected a whole number"),
        (["--tokens", "2000000000"], "--sequences, --tokens, --kv-heads: got a cache of .* GiB"),
        (["--output", "rows.csv"], "--output: got rows.csv"),
        (["--backend", "triton", "--dtype", "bfloat16"], "bfloat16"),
    ],
)
def test_a_wrong_option_is_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main([*SMALL, *options])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["decode_h100.json", "decode_tilelang_h100.json"])
def test_a_stored_run(name: str) -> None:
    """Each row of NSA has its dense row, was right, and its kernels make up its graph."""
    run = json.loads(STORED.with_name(name).read_text())
    rows = [Row(**row) for row in run["rows"]]
    assert {"command", "machine", "torch", "triton"} <= run.keys()
    dense = {(row.sequences, row.tokens): row for row in rows if row.kernel == "dense"}
    for row in rows:
        if row.kernel != "dense":
            assert row.error < 0.01
            assert row.mib < dense[row.sequences, row.tokens].mib
            assert sum(row.steps.values()) < 1.1 * row.graph_us


def test_the_figures_of_the_operators_page() -> None:
    """The table of OPERATORS.md is the stored run's."""
    page = (STORED.parents[1] / "OPERATORS.md").read_text()
    rows = [Row(**row) for row in json.loads(STORED.read_text())["rows"]]
    found = {(r.kernel, r.sequences, r.tokens): f"{r.graph_us:,.0f} µs" for r in rows}
    for tokens in (8_192, 65_536, 131_072):
        nsa, dense = found["triton", 32, tokens], found["dense", 32, tokens]
        assert f"| {tokens:,} | {nsa} | {dense} |" in page
    calls = [r.call_us / 1000 for r in rows if r.kernel == "triton"]
    assert f"the host takes {min(calls):.1f} to {max(calls):.1f} ms a call" in page
    assert f"{found['dense', 1, 8_192]} against {found['triton', 1, 8_192][:-3]}." in page
    run = json.loads(STORED.with_name("decode_tilelang_h100.json").read_text())
    (row,) = [r for r in run["rows"] if (r["kernel"], r["sequences"], r["tokens"]) == CASE]
    assert f"32 sequences of 65,536 tokens take {row['graph_us']:.0f} µs" in page.replace("\n", " ")
