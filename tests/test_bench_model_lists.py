"""Lists of a trained model: `nsa_tutorial.bench.model_lists`, at a size for a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nsa_tutorial.bench import model_lists
from nsa_tutorial.layer import NativeSparseAttentionConfig

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"tokens": 96, "batch": 1, "steps": 2, "layers": 2, "model-width": 16, "kv-heads": 2}
SIZES |= {"group": 2, "head-width": 8}


def test_what_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "lists.json"
    options = [x for name, n in SIZES.items() for x in (f"--{name}", str(n))]
    options += ["--device", "cpu", "--backend", "reference", "--output", str(path)]
    assert model_lists.main(options) == 0
    found = json.loads(path.read_text())
    assert found["command"].startswith("python -m nsa_tutorial.bench.model_lists --tokens 96")
    assert [(x["layer"], x["head"]) for x in found["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(1 <= x["overlap"] <= 4 for x in found["heads"])
    assert found["first_loss"] > 0


def test_lists_are_those_of_the_layers() -> None:
    """Every query lists its own block, no block twice and none of the future; the model computes
    the same as without being watched."""
    torch.manual_seed(0)
    config = NativeSparseAttentionConfig(
        width=16, query_heads=4, kv_heads=2, key_width=8, value_width=8, block_size=16, top_n=3,
        window_size=8, length=8, stride=8, backend="reference",
    )  # fmt: skip
    model, text = model_lists.Model(config, layers=2), torch.randint(256, (1, 120))
    before = model(text)
    lists = model_lists.lists_of(model, text)
    assert torch.equal(model(text), before)
    assert len(lists) == 2
    own = torch.arange(120)[None, :, None, None] // 16
    for ids in lists:
        assert ids.shape == (1, 120, 2, 3)
        assert ((ids == own).sum(-1) == 1).all()
        assert (ids <= own).all()
        ascending = ids.sort(-1).values
        assert ((ascending[..., 1:] > ascending[..., :-1]) | (ascending[..., :-1] < 0)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layers 0", "--layers: got 0, expected a whole number from 1 to 128"),
        ("--tokens 3", "--tokens: got 3, expected a whole number from 4 to"),
        ("--group 1000000000", "--group: got 1000000000, expected a whole number from 1 to 128"),
        ("--device cpu --head-width 7", "--head-width: got 7, expected an even number"),
        ("--backend fast", "invalid choice: 'fast'"),
    ],
)
def test_errors_in_one_sentence(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        model_lists.main(["--device", "cpu", *arguments.split()])
    assert message in capsys.readouterr().err
