"""`python -m nsa_tutorial.bench host`: both ways compute the same, and rows are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nsa_tutorial.bench import __main__ as bench
from nsa_tutorial.bench import host
from nsa_tutorial.bench.inputs import Shape
from nsa_tutorial.bench.problem import Problem

STORED = Path(__file__).parents[2] / "assets" / "native_host_h100.json"


def test_the_stored_run() -> None:
    """It is whole, and its kernels' times add up."""
    rows = [host.Row(**row) for row in json.loads(STORED.read_text())["rows"]]
    cases = {(r.way, r.direction, r.queries, r.tokens) for r in rows}
    assert len(cases) == len(rows) == 3 * (2 * 2 * 2 + 2) + 2
    for row in rows:
        assert abs(sum(us for _, us in row.kernels) / 1e3 - row.device_ms) < 1e-2 * row.device_ms


def test_branch_by_branch_is_all_at_once() -> None:
    shape = Shape(
        tokens=200, kv_heads=1, group=2, width=16, value_width=16, block_size=64, slots=3,
        dtype="float32", length=32, stride=16, window=64,
    )  # fmt: skip
    problem = Problem.make("native", shape, "cpu", "smooth")
    (one,), (other,) = problem.run("reference"), host.branch_by_branch(problem, "reference")
    assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.usefixtures("one_thread")
def test_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "host.json"
    monkeypatch.setattr(torch, "compile", lambda model: model)  # it takes long
    given = ["host", "--tokens", "96", "--layer", "48", "--seconds", "0.001", "--device", "cpu"]
    given += ["--queries", "smooth"]
    bench.main([*given, "--dtype", "float32", "--output", str(path)])
    rows = [host.Row(**row) for row in json.loads(path.read_text())["rows"]]
    ways = {(row.way, row.direction, row.queries) for row in rows}
    assert ways == {
        *((way, d, "smooth") for way in ("branch by branch", "at once") for d in host.DIRECTIONS),
        *(("dense", d, "") for d in host.DIRECTIONS),
        *((f"layer, {way}", "both", "") for way in ("eager", "compiled")),
    }
    assert all(row.ms > 0 and row.host_ms > 0 and row.kernels is None for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
