"""The stored heads are what they say, the measures of their attention hold by construction, and the
training command runs."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nsa_tutorial.course import heads as stored
from nsa_tutorial.course import train_heads
from nsa_tutorial.course.heads import (
    Heads,
    attention_mass,
    attention_weights,
    block_mass,
    copy_targets,
    load,
    top_mass,
)
from nsa_tutorial.exact.grouped_query_attention import attention
from nsa_tutorial.runtime import texts as library_texts


@pytest.fixture(scope="module")
def heads() -> Heads:
    return load()


@pytest.fixture(scope="module")
def weights(heads: Heads) -> torch.Tensor:
    return attention_weights(heads.q, heads.k)[0]


def some_heads(N: int, HQ: int, H: int, D: int = 8, spread: float = 1.0) -> Heads:
    g = torch.Generator().manual_seed(N * HQ + H)
    q, k, v = (spread * torch.randn(1, N, heads, D, generator=g) for heads in (HQ, H, H))
    return Heads(q, k, v, bytes(N), tuple(f"layer 0 head {h}" for h in range(HQ)), {})


# -- the asset --


def test_shapes_and_labels(heads: Heads) -> None:
    _, N, HQ, D = heads.q.shape
    H = heads.k.shape[2]
    assert heads.q.shape == (1, N, HQ, D)
    assert heads.k.shape == heads.v.shape == (1, N, H, D)
    assert N == len(heads.text) == 512
    assert HQ == H * heads.G and heads.G >= 2 and H >= 2
    assert {t.dtype for t in (heads.q, heads.k, heads.v)} == {torch.float32}
    assert all(bool(t.isfinite().all()) for t in (heads.q, heads.k, heads.v))
    assert len(set(heads.labels)) == HQ
    assert all(re.fullmatch(r"layer \d head \d", label) for label in heads.labels)


def test_heads_of_a_group_come_from_one_kv_head(heads: Heads) -> None:
    for h in range(heads.k.shape[2]):
        group = [
            tuple(map(int, re.findall(r"\d+", label)))
            for label in heads.labels[h * heads.G : (h + 1) * heads.G]
        ]
        assert len({(layer, head // heads.G) for layer, head in group}) == 1


def test_the_model_has_learnt(heads: Heads) -> None:
    info = heads.info
    assert 0.5 < info["held_out_nats_per_byte"] < 1.6
    assert info["command"].startswith(stored.COMMAND)
    assert {
        "python",
        "torch",
        "seed",
        "steps",
        "parameters",
        "seconds",
        "machine",
        "threads",
        "text",
        "size",
    } <= set(info)


def test_info_names_no_place(heads: Heads) -> None:
    import platform

    assert not re.search(
        r"(^|[\s\"'])/\w|[A-Z]:\\|" + re.escape(platform.node() or "no such name") + r"\b",
        str(heads.info),
    )


def test_the_asset_is_small() -> None:
    assert stored.PATH.stat().st_size < 2_000_000


def test_every_token_has_a_name(heads: Heads) -> None:
    assert heads.text[0] == 0 and 0 not in heads.text[1:]
    names = [heads.token(i) for i in range(len(heads.text))]
    assert names[0] == "⟨start⟩"
    assert all(name.isprintable() and name.strip() for name in names)


def test_the_text_repeats_itself_far_apart(heads: Heads) -> None:
    assert int(copy_targets(heads.text).any(-1).sum()) > 100


def test_a_missing_asset_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"run '{stored.COMMAND}'")):
        load(tmp_path / "heads.npz")


def test_heads_do_not_change(heads: Heads) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        heads.q = heads.k


# -- the attention of the stored heads --


def test_rows_sum_to_one_and_see_no_future(heads: Heads, weights: torch.Tensor) -> None:
    assert weights.shape == (heads.q.shape[2], 512, 512)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert not weights.triu(1).any()


def test_weights_give_the_output_of_grouped_attention(heads: Heads, weights: torch.Tensor) -> None:
    v = heads.v[0].double().repeat_interleave(heads.G, dim=1)
    o = torch.einsum("hij,jhe->ihe", weights, v)
    torch.testing.assert_close(
        o.float()[None], attention(heads.q, heads.k, heads.v), rtol=1e-4, atol=1e-5
    )


def test_heads_look_where_trained_heads_look(heads: Heads, weights: torch.Tensor) -> None:
    """Each share is many times what even attention over the visible keys would give."""
    even = attention_weights(
        torch.zeros_like(heads.q[:, :, :1]), torch.zeros_like(heads.k[:, :, :1])
    )[0]
    targets = copy_targets(heads.text)
    for share, least in (
        (stored.first_share, 10),
        (stored.previous_share, 10),
        (lambda w: stored.copy_share(w, targets), 10),
    ):
        assert share(weights).max() > least * share(even)[0]


# -- how much the best blocks hold --


@pytest.mark.parametrize(
    ("block_size", "per_group"),
    [(16, True), (20, False)],
    ids=["blocks of 16, per group", "blocks of 20, per head"],
)
def test_mass_grows_with_n_and_ends_at_one(
    heads: Heads, weights: torch.Tensor, block_size: int, per_group: bool
) -> None:
    G, NB = heads.G if per_group else 1, -(-512 // block_size)
    masses = [top_mass(weights, block_size, n, G) for n in (1, 2, 4, 9, NB - 1, NB)]
    for less, more in pairwise(masses):
        assert (more >= less - 1e-12).all()
    torch.testing.assert_close(masses[-1], torch.ones_like(masses[-1]))
    averages = [attention_mass(heads, block_size, n, per_group=per_group) for n in (1, 4, 16)]
    assert all((more > less).all() for less, more in pairwise(averages))
    assert (
        attention_mass(heads, block_size, NB, per_group=per_group).tolist()
        == [1.0] * heads.q.shape[2]
    )


@pytest.mark.parametrize("n", [1, 4, 8])
def test_sharing_a_choice_never_helps(heads: Heads, weights: torch.Tensor, n: int) -> None:
    alone, shared = top_mass(weights, 16, n), top_mass(weights, 16, n, heads.G)
    assert (shared <= alone + 1e-12).all()
    assert (attention_mass(heads, 16, n, per_group=True) < attention_mass(heads, 16, n)).any()


@pytest.mark.parametrize(
    ("N", "HQ", "H", "block_size"), [(37, 4, 2, 8), (64, 6, 2, 16), (5, 3, 3, 4)], ids=str
)
@pytest.mark.parametrize("per_group", [False, True], ids=["per head", "per group"])
def test_mass_against_a_loop(N: int, HQ: int, H: int, block_size: int, per_group: bool) -> None:
    heads, n = some_heads(N, HQ, H, spread=2.0), 2
    weights = attention_weights(heads.q, heads.k)[0]
    expected = torch.zeros(HQ, dtype=torch.float64)
    queries = [i for i in range(N) if i // block_size + 1 > n]
    for hq in range(HQ):
        group = [x for x in range(HQ) if x // heads.G == hq // heads.G] if per_group else [hq]
        for i in queries:
            blocks = [
                [float(weights[x, i, j : j + block_size].sum()) for j in range(0, N, block_size)]
                for x in group
            ]
            total = [sum(column) for column in zip(*blocks, strict=True)]
            best = sorted(range(len(total)), key=lambda b: -total[b])[:n]
            expected[hq] += sum(blocks[group.index(hq)][b] for b in best) / len(queries)
    if not queries:
        expected = torch.ones(HQ, dtype=torch.float64)
    torch.testing.assert_close(attention_mass(heads, block_size, n, per_group=per_group), expected)


def test_block_mass_keeps_the_short_last_block() -> None:
    mass = block_mass(torch.full((1, 1, 10), 0.1), 4)
    torch.testing.assert_close(mass, torch.tensor([[[0.4, 0.4, 0.2]]]))


def test_even_attention_needs_every_block() -> None:
    heads = some_heads(64, 2, 1, spread=0.0)
    held = top_mass(attention_weights(heads.q, heads.k)[0], 16, 1)[:, -1]
    torch.testing.assert_close(held, torch.full((2,), 0.25, dtype=torch.float64))


# -- what a head looks at --


def test_copy_targets_by_hand() -> None:
    text = b"abcd..abcd"
    target = copy_targets(text, gram=3, apart=6)
    # after "abc" stood "d", after "bcd" stood "."
    assert target.nonzero().tolist() == [[8, 3], [9, 4]]
    assert not copy_targets(text, gram=3, apart=7).any()


def test_shares_of_made_up_attention() -> None:
    first = torch.zeros(1, 10, 10).index_fill(-1, torch.tensor([0]), 1.0)
    before = torch.eye(10).roll(1, 0)[None]
    targets = copy_targets(b"abcd..abcd", gram=3, apart=6)
    assert stored.first_share(first).item() == stored.previous_share(before).item() == 1
    assert stored.copy_share(targets[None].float(), targets).item() == 1
    assert stored.copy_share(before, targets).item() == 0
    with pytest.raises(ValueError, match="repeats nothing"):
        stored.copy_share(first, copy_targets(bytes(range(10)), gram=3, apart=6))


# -- training --

SMALL = train_heads.Size(
    layers=2,
    width=32,
    query_heads=4,
    kv_heads=2,
    head_width=8,
    context=64,
    batch=4,
    learning_rate=5e-3,
    warm_up=5,
)


@pytest.fixture(scope="module")
def texts() -> dict[str, bytes]:
    return library_texts.documents()


@pytest.mark.exhaustive
def test_the_split_is_the_same_each_time_and_holds_out(texts: dict[str, bytes]) -> None:
    data, held_out = library_texts.split(texts, 200_000)
    again, held_again = library_texts.split(library_texts.documents(), 200_000)
    assert data.dtype == torch.uint8 and len(data) == 200_000
    assert torch.equal(data, again) and held_out == held_again
    assert 0 < len(held_out) < len(texts) / 8
    whole = library_texts.split(texts, 10**9)[0].numpy().tobytes().split(bytes([0]))
    assert sorted(whole) == sorted(
        text for name, text in texts.items() if not library_texts.is_held_out(name)
    )


def test_the_split_depends_on_names_alone() -> None:
    assert [
        n
        for n in ("ast.py", "json/decoder.py", "pathlib.py", "typing.py")
        if library_texts.is_held_out(n)
    ] == ["pathlib.py"]


def test_there_is_enough_text_without_the_start_byte(texts: dict[str, bytes]) -> None:
    assert list(texts) == sorted(texts)
    assert len(library_texts.split(texts)[0]) == library_texts.TRAIN_BYTES
    assert not any(library_texts.START in text for text in texts.values())
    assert any(name.startswith("pydoc topic ") for name in texts)


def test_the_passage_is_the_one_that_repeats() -> None:
    line, other = b"def same(self): return 1\n", bytes(range(33, 83)) + b"\n"
    texts = {"a.py": other + b"x = 1\n" * 3, "b.py": other + line + other[::-1] + line}
    name, number, passage = train_heads.repetitive_passage(
        texts, length=len(line) * 2 + len(other), apart=40, gram=8
    )
    assert (name, number) == ("b.py", 2)
    assert passage == line + other[::-1] + line


def test_a_short_training_learns(texts: dict[str, bytes], capsys: pytest.CaptureFixture) -> None:
    data, held_out = library_texts.split(texts, 50_000)
    model, losses = train_heads.train(data, SMALL, steps=50)
    assert losses[0] > 5  # about ln 256: it begins by knowing nothing
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
    assert train_heads.held_out_loss(model, held_out, SMALL.context, count=4) < losses[0] - 1.5
    assert "step    50 of 50" in capsys.readouterr().out


def test_training_again_gives_the_same_model(texts: dict[str, bytes]) -> None:
    data, _ = library_texts.split(texts, 50_000)
    losses = [train_heads.train(data, SMALL, steps=3)[1] for _ in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_queries_and_keys_are_those_of_the_model(texts: dict[str, bytes]) -> None:
    """Attention over what is stored, computed here, continues to what the model computes with
    PyTorch's own."""
    model = train_heads.Transformer(SMALL)
    for block in model.blocks:
        torch.nn.init.normal_(block.out.weight, std=0.2)
    tokens = library_texts.split(texts, 100)[0][None, :64].long()
    x = model.embed(tokens)
    for block, (q, k, v) in zip(model.blocks, model.queries_keys_values(tokens), strict=True):
        x = x + block.out(attention(q, k, v).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    torch.testing.assert_close(model.head(x), model(tokens), rtol=1e-4, atol=1e-5)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned_q, turned_k = (train_heads.rotate(x.expand(1, 20, 1, 8))[0, :, 0] for x in (q, k))
    torch.testing.assert_close(turned_q[15] @ turned_k[11], turned_q[7] @ turned_k[3])
    assert not torch.isclose(turned_q[15] @ turned_k[11], turned_q[15] @ turned_k[3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_command_writes_what_load_reads(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU with a small model."""
    path = tmp_path / "heads.npz"
    if device == "cpu":
        small = dataclasses.replace(SMALL, context=512, batch=1)
        monkeypatch.setattr(train_heads, "Size", lambda: small)
    assert train_heads.main(["--steps", "1", "--device", device, "--out", str(path)]) == 0
    heads = load(path)
    assert heads.q.shape[1] == 512 and heads.info["steps"] == 1
    assert str(tmp_path) not in str(heads.info)
    assert "nats per byte" in capsys.readouterr().out
