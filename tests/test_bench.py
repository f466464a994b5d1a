"""The benchmark measures what it says, judges what it measures, and writes what can be read
again."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from nsa_tutorial import bench

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = bench.Shape(
    tokens=100, kv_heads=2, group=3, width=8, value_width=5, block_size=16, slots=3, dtype="float32"
)
SMALL = [
    "--device",
    "cpu",
    "--backend",
    "reference",
    "--tokens",
    "70",
    "90",
    "--kv-heads",
    "2",
    "--group",
    "2",
    "--width",
    "8",
]
QUICK = ["--block-size", "16", "--slots", "3", "--seconds", "0.01"]


def test_random_blocks_are_distinct_and_causal() -> None:
    ids = bench.random_blocks(100, 2, 16, 3, "cpu")
    assert ids.shape == (1, 100, 2, 3)
    own = torch.arange(100)[:, None] // 16
    assert torch.equal(ids[0, :, :, 0], own.expand(-1, 2).int()), "the own block comes first"
    assert (ids[0] <= own[:, :, None]).all()
    for row, last in zip(
        ids[0].flatten(0, 1).tolist(), own.expand(-1, 2).flatten().tolist(), strict=True
    ):
        listed = [i for i in row if i >= 0]
        assert len(set(listed)) == len(listed) == min(3, last + 1)


@pytest.mark.parametrize("operator", ["selected", "window"])
def test_judges_the_last_queries(operator: str) -> None:
    problem = bench.Problem.make(SHAPE, "cpu")
    truth = problem.last_queries().call(operator, "reference")
    o = problem.call(operator, "reference")
    assert o.shape == (1, 100, 6, 5)
    error, is_right = problem.judge(o, truth)
    assert is_right
    assert error < 1e-5
    o[0, 99, 0, 0] += 0.01
    assert not problem.judge(o, truth)[1]
    o[0, 99, 0, 0] = torch.nan
    assert not problem.judge(o, truth)[1]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert bench.main(["selected", *SMALL, *QUICK, "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["command"].startswith("python -m nsa_tutorial.bench selected --device cpu")
    assert found["torch"] == torch.__version__
    assert [(r["kernel"], r["tokens"]) for r in found["rows"]] == [
        ("reference", 70), ("dense", 70), ("reference", 90), ("dense", 90),
    ]  # fmt: skip
    for row in found["rows"]:
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
        dense = next(
            r["ms"]
            for r in found["rows"]
            if r["kernel"] == "dense" and r["tokens"] == row["tokens"]
        )
        assert row["dense_ratio"] == pytest.approx(dense / row["ms"])
    assert "90 tokens" in capsys.readouterr().err, "the progress bar"


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert bench.main(["window", *SMALL, *QUICK, "--no-dense", "--output", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    assert [row["kernel"] for row in rows] == ["reference", "reference"]
    assert {row["torch"] for row in rows} == {torch.__version__}
    assert all(row["is_right"] == "True" and row["dense_ratio"] == "" for row in rows)


def test_csv_on_the_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    bench.main(["selected", *SMALL[:-1], "8", *QUICK, "--no-dense"])
    rows = list(csv.DictReader(capfd.readouterr().out.splitlines()))
    assert len(rows) == 2


def test_a_wrong_kernel_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = bench.Problem.call
    monkeypatch.setattr(
        bench.Problem,
        "call",
        lambda self, *a: right(self, *a) * (1 if self.q.dtype == torch.float64 else 1.01),
    )
    path = tmp_path / "rows.json"
    assert bench.main(["selected", *SMALL, *QUICK, "--no-dense", "--output", str(path)]) == 1
    assert [row["is_right"] for row in json.loads(path.read_text())["rows"]] == [False, False]


def test_what_cannot_run_is_noted() -> None:
    problem = bench.Problem.make(SHAPE, "cpu")

    def fails() -> torch.Tensor:
        raise RuntimeError("first line\nno such tile")

    row = bench._row("selected", "x", "y", problem, fails, "cpu", 0.01, torch.zeros(1))
    assert (row.ms, row.note) == (None, "RuntimeError: no such tile")
    assert replace(row, note="") == bench.Row(
        **asdict(SHAPE), operator="selected", kernel="x", change="y"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["selected", "--output", "x.txt"],
            "--output: got x.txt, expected a name that ends in .json or .csv",
        ),
        (["selected", "--device", "cpu", "--steps"], "--steps: got --device cpu, expected cuda"),
        (
            ["selected", "--device", "cpu", "--backend", "triton", "--dtype", "bfloat16"],
            "bfloat16|not installed|CUDA tensors only",
        ),
        (["dense"], "invalid choice: 'dense'"),
    ],
)
def test_errors_in_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    errors = capsys.readouterr().err
    assert re.search(message, errors), errors


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(["selected", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--backend", "--tokens", "--dtype", "--steps", "--output", "--seconds"):
        assert option in text


@pytest.mark.gpu
def test_steps_on_the_gpu(tmp_path: Path) -> None:
    """Every decision of the TileLang kernel is measured, and all but warp specialisation is
    right."""
    pytest.importorskip("tilelang")
    path = tmp_path / "rows.json"
    bench.main(
        [
            "selected",
            "--tokens",
            "1024",
            "--slots",
            "4",
            "--steps",
            "--seconds",
            "0.02",
            "--output",
            str(path),
        ]
    )
    rows = {
        row["change"]: row
        for row in json.loads(path.read_text())["rows"]
        if row["kernel"] == "tilelang"
    }
    assert {
        "",
        "first draft, mended, 2 stages",
        "values through registers",
        "64 threads",
    } <= rows.keys()
    assert all(row["is_right"] for change, row in rows.items() if not change.startswith("warp"))


@pytest.mark.gpu
def test_triton_steps_on_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    sizes = ["--tokens", "1024", "--slots", "4", "--seconds", "0.02"]
    bench.main(["selected", "--backend", "triton", *sizes, "--steps", "--output", str(path)])
    rows = {
        row["change"]: row
        for row in json.loads(path.read_text())["rows"]
        if row["kernel"] == "triton"
    }
    assert {
        "",
        "pointers",
        "pointers, 1 warp",
        "pointers, 4 stages",
        "pointers, empty slots walked",
    } <= rows.keys()
    assert all(row["ms"] for row in rows.values())
    assert all(row["is_right"] for change, row in rows.items() if change != bench.PROBE)
