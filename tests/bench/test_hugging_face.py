"""`python -m nsa_tutorial.bench hugging_face`: what it measures is right, and what it says of
transformers' own paths is theirs."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path

import pytest
import torch

from nsa_tutorial.bench import __main__ as bench
from nsa_tutorial.bench import hugging_face
from nsa_tutorial.bench.measuring import Row

ROOT = Path(__file__).parents[2]
SMALL = ["hugging_face", "--device", "cpu", "--tokens", "72", "--seconds", "0.001"]


def test_rows_of_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every implementation computes the lists, forward and backward, also of the last block, which
    is short."""
    path = tmp_path / "rows.json"
    assert bench.main([*SMALL, "--pass", "forward", "both", "--output", str(path)]) == 0
    run = json.loads(path.read_text())
    rows = [Row(**row) for row in run["rows"]]
    assert [(row.direction, row.kernel) for row in rows if row.lists] == [
        (direction, kernel) for direction in ("forward", "both") for kernel in hugging_face.KERNELS
    ]
    assert all(row.is_right and row.d_k_error is not None for row in rows[3:6])
    assert {"command", "machine", "torch"} <= run.keys() and "72 tokens" in capsys.readouterr().out
    assert bench.main(["plot", str(path), "--output", str(path.with_suffix(".svg"))]) == 0


def test_what_a_wrong_result_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that attends to its own block alone is found out, and a call without memory says
    so."""

    def wrong(query: object, key: object, value: object, lists: object, **_: object) -> object:
        return hugging_face.sdpa(query, key, value, lists[..., :1], 16)

    def hungry(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")

    monkeypatch.setattr(hugging_face, "ours", wrong)
    monkeypatch.setattr(hugging_face, "eager", hungry)
    options = bench.parser().parse_args([*SMALL, "--no-dense"])
    (shape,) = hugging_face.shapes(options)
    with torch.no_grad():
        found = list(hugging_face.rows_of(shape, options))
    assert [row.is_right for row in found] == [False, None, True]
    assert found[1].note == "out of memory: CUDA out of memory. Tried to allocate 64.00 GiB."
    assert bench.main([*SMALL, "--no-dense", "--kernel", "nsa_tutorial"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "3"], "--tokens: got 3, expected at least 4"),
        (["--tokens", "2000000000"], "--tokens, --kv-heads, --group: got .* GiB"),
        (["--output", "rows.csv"], "--output: got rows.csv"),
    ],
)
def test_a_wrong_option_is_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main([*SMALL, *options])
    assert re.search(message, capsys.readouterr().err)


def figure(run: dict) -> str:
    """What README.md says of a recording: the longest text of which PyTorch's attention with a mask
    has room, and the longest one of all."""
    rows = [Row(**row) for row in run["rows"] if row["direction"] == "both" and row["lists"]]
    ms = {(row.kernel, row.tokens): row.ms for row in rows if row.ms is not None}
    assert all(row.is_right for row in rows if row.ms is not None)
    assert all(row.note.startswith("out of memory") for row in rows if row.ms is None)
    shared, longest = (max(n for name, n in ms if name == x) for x in ("sdpa", "nsa_tutorial"))
    return (
        f"forward and backward of {shared:,} tokens in {ms['nsa_tutorial', shared]:.1f} ms, "
        f"{ms['sdpa', shared]:.0f} ms by SDPA with its mask, and of {longest:,} tokens in "
        f"{ms['nsa_tutorial', longest]:.0f} ms, for which its mask has no room "
        f"({run['machine'].partition(',')[0]})"
    )


def test_the_figure_of_the_readme() -> None:
    """It is the recording's, and there is none without one."""
    (line,) = re.findall("^.*production sparse model.*$", (ROOT / "README.md").read_text(), re.M)
    recording = ROOT / "assets" / "hugging_face_h200.json"
    if recording.exists():
        assert figure(json.loads(recording.read_text())) in line
    else:
        assert not re.search(r"\d ms", line)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_the_paths_of_transformers(name: str) -> None:
    """Bit by bit what the model's own functions give, where they are installed."""
    pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as theirs

    options = bench.parser().parse_args([*SMALL, "--dtype", "float16"])
    (shape,) = hugging_face.shapes(options)
    problem = hugging_face.Problem.make("selected", shape, "cpu", "random")
    problem, lists = hugging_face.handed_over(problem)
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    indexer = types.SimpleNamespace(
        block_size=16, config=types.SimpleNamespace(num_attention_heads=4)
    )
    causal = eager_mask(1, 72, 72, dtype=q.dtype) if name == "eager" else None
    mask = theirs.MiniMaxM3VLIndexer.build_block_mask(
        indexer, lists, causal, 72, q.dtype, q.device, torch.arange(72)[None]
    )
    assert mask.equal(hugging_face.block_mask(q, lists, 16, causal))
    layer = types.SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    function = sdpa_attention_forward if causal is None else theirs.eager_attention_forward
    right, _ = function(layer, q, k, v, mask, scaling=16**-0.5)
    found = hugging_face.prepared(problem, lists, name, "forward")()["o"]
    assert found.equal(right) and found.stride() == right.stride()
