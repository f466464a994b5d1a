"""Hugging Face's `generate` writes with our cache what it writes without one. Needs
`pip install .[transformers]`, and skips without it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from nsa_tutorial.interop.transformers.cache_layer import NSACacheLayer  # noqa: E402
from nsa_tutorial.interop.transformers.model import NSAConfig, NSAForCausalLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION = {
    "query_heads": 4, "kv_heads": 2, "key_width": 8, "value_width": 8, "block_size": 8, "top_n": 3,
    "window_size": 9, "length": 6, "stride": 4, "gate_width": 8,
}  # fmt: skip
SIZES = {
    "vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "max_position_embeddings": 80, "max_step": 32, "initializer_range": 0.3,
}  # fmt: skip
NEW = 12


def model_of(seed: int = 0, **changes: object) -> NSAForCausalLM:
    torch.manual_seed(seed)
    config = NSAConfig(**{**SIZES, **changes}, attention=ATTENTION)
    return NSAForCausalLM(config).double().eval()


def prompt(rows: int, length: int = 37) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SIZES["vocab_size"], (rows, length), generator=generator)


def generate(model: NSAForCausalLM, ids: Tensor, **how: object) -> Tensor:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **how)


@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
def test_the_same_tokens_as_without_a_cache(beams: int, length: int) -> None:
    model, ids = model_of(), prompt(2, length)
    found = generate(model, ids, num_beams=beams)
    assert found.shape == (2, length + NEW)
    assert len(found[:, length:].unique()) > 2  # not one token over and over
    assert found.equal(generate(model, ids, num_beams=beams, use_cache=False))


def test_sampled_tokens() -> None:
    model, ids, found = model_of(), prompt(2), []
    for use_cache in (True, False):
        torch.manual_seed(3)
        how = {"do_sample": True, "use_cache": use_cache}
        found.append(model.generate(ids, max_new_tokens=NEW, **how))
    assert found[0].equal(found[1])


def test_several_texts_of_a_prompt() -> None:
    """Beams that end are filled up with `pad_token_id`, and the others go on."""
    model, ids, end = model_of(), prompt(2), {"eos_token_id": 10, "pad_token_id": 0}
    how = {"num_beams": 3, "num_return_sequences": 3, "attention_mask": torch.ones_like(ids), **end}
    found = generate(model, ids, **how)
    assert len(found) == 6 and bool((found[:, ids.shape[1] :] == 10).any())
    assert found.equal(generate(model, ids, use_cache=False, **how))


@pytest.mark.parametrize("same", [False, True], ids=["another model", "the same model"])
def test_an_assistant_writes_drafts(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are taken back where they are wrong, and kept where they are right."""
    cropped = []
    crop = NSACacheLayer.crop
    monkeypatch.setattr(
        NSACacheLayer, "crop", lambda self, n: (cropped.append(n), crop(self, n))[1]
    )
    model, ids = model_of(), prompt(1)
    assistant = model if same else model_of(5, num_hidden_layers=1)
    assistant = copy.deepcopy(assistant)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.assistant_confidence_threshold = 0.0
    found = generate(model, ids, assistant_model=assistant)
    assert (min(cropped) < 0) != same
    assert found.equal(generate(model, ids, use_cache=False))


def test_drafts_from_the_prompt() -> None:
    model, ids = model_of(), prompt(1)
    found = generate(model, ids, prompt_lookup_num_tokens=4)
    assert found.equal(generate(model, ids, use_cache=False))


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    model, ids = model_of(), prompt(2)
    model.save_pretrained(tmp_path)
    loaded = NSAForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.attention == ATTENTION and loaded.dtype == torch.float64
    assert loaded(ids).logits.equal(model(ids).logits)


def test_a_loss_and_its_gradient() -> None:
    model, ids = model_of(), prompt(2)
    out = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )
    torch.testing.assert_close(out.loss.float(), expected)
    out.loss.backward()
    assert all(bool(p.grad.any()) for p in model.blocks[0].attention.q.parameters())


@torch.no_grad()
def test_what_hugging_face_asks_of_a_cache() -> None:
    model, ids = model_of(), prompt(2)
    whole = model(ids).logits
    cache = model.new_cache()
    assert (cache.get_seq_length(), cache.get_max_length(), cache.is_initialized) == (0, 80, False)
    model(ids[:, :30], cache=cache)
    assert (cache.get_seq_length(), cache.batch_size, cache.is_croppable) == (30, 2, True)
    assert cache.get_mask_sizes(4, 0) == (34, 0)

    def goes_on(cache: object, rows: list[int]) -> None:
        found = model(ids[rows, 30:33], cache=cache, logits_to_keep=2).logits
        torch.testing.assert_close(found, whole[rows, 31:33], rtol=1e-10, atol=1e-10)
        cache.crop(-3)

    other = copy.deepcopy(cache)
    goes_on(other, [0, 1])
    other.batch_repeat_interleave(2)
    assert other.batch_size == 4
    goes_on(other, [0, 0, 1, 1])
    other.batch_select_indices(torch.tensor([3, 0, 1]))
    goes_on(other, [1, 0, 0])
    other.reorder_cache(torch.tensor([1, 0, 0]))
    goes_on(other, [0, 1, 1])
    goes_on(cache, [0, 1])
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, cache=cache).logits, whole)


def test_a_cache_goes_on_in_another_call() -> None:
    model, ids, cache = model_of(), prompt(2), model_of().new_cache()
    first = generate(model, ids[:, :20], cache=cache)
    assert cache.get_seq_length() == first.shape[1] - 1
    longer = torch.cat([first, ids[:, 20:25]], 1)
    found = generate(model, longer, cache=cache)
    assert found.equal(generate(model, longer, use_cache=False))


def test_layers_made_by_early_initialization() -> None:
    cache = model_of().new_cache(9)
    cache.early_initialization(2, 2, 8, torch.float64, torch.device("cpu"))
    assert cache.batch_size == 2 and cache.layers[0].buffers.max_tokens == 9


def padded(*real: slice, length: int = 37) -> Tensor:
    """Ones where a row has tokens."""
    mask = torch.zeros(len(real), length, dtype=torch.long)
    for row, tokens in zip(mask, real, strict=True):
        row[tokens] = 1
    return mask


# the second takes back more than a cache usually can
LEFT = {"one row": padded(slice(3, None), slice(0, None)),
        "both rows": padded(slice(35, None), slice(2, None))}  # fmt: skip


@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
@pytest.mark.parametrize("mask", LEFT.values(), ids=LEFT)
def test_rows_with_padding_give_what_each_gives_alone(mask: Tensor, beams: int) -> None:
    model, ids = model_of(), prompt(2)
    alone = [
        generate(model, row[is_real.bool()][None], num_beams=beams)[0, -NEW:]
        for row, is_real in zip(ids, mask, strict=True)
    ]
    for use_cache in (True, False):
        how = {"attention_mask": mask, "num_beams": beams, "use_cache": use_cache}
        assert generate(model, ids, **how)[:, -NEW:].equal(torch.stack(alone)), use_cache


def test_logits_and_gradients_of_rows_with_padding() -> None:
    """On both sides, and where a row is nothing but padding."""
    model, ids = model_of(), prompt(3)
    real = [slice(3, 30), slice(0, 0), slice(1, 37)]
    logits = model(ids, attention_mask=padded(*real)).logits
    found = torch.cat([row[tokens] for row, tokens in zip(logits, real, strict=True)])
    alone = [model(row[None, s]).logits[0] for row, s in zip(ids, real, strict=True) if s.stop]
    right, weights = torch.cat(alone), [*model.parameters()]
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    gradients = (torch.autograd.grad(x.square().sum(), weights) for x in (found, right))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_cache_with_padding_goes_on() -> None:
    """In several tokens, after rows were copied and reordered, and after some were taken back."""
    model, ids, mask = model_of(), prompt(2), LEFT["one row"]
    right = model(ids, attention_mask=mask).logits[:, 30:]
    cache = model.new_cache()
    model(ids[:, :30], attention_mask=mask[:, :30], cache=cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([1, 0]))
    for _ in range(2):
        assert cache.get_seq_length() == 30
        found = model(ids[:, 30:], attention_mask=mask, cache=cache).logits
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
        cache.crop(-7)
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.get_seq_length() == 30, "its padding counts"


@torch.no_grad()
def test_the_class_is_found_by_its_name(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, NSAForCausalLM)


def go_on(model: NSAForCausalLM, mask: Tensor) -> None:
    """Seven tokens after thirty, with such a mask."""
    cache, ids = model.new_cache(), prompt(2)
    model(ids[:, :30], cache=cache)
    model(ids[:, 30:], cache=cache, attention_mask=mask)


WRONG = {
    "full": (lambda model: generate(model, prompt(2), cache=model.new_cache(40)),
             "cache: got 1 more tokens for row 0.*at most 40"),
    "padding on the right": (
        lambda model: generate(model, prompt(2), attention_mask=padded(slice(9), slice(37))),
        "attention_mask: got zeros after ones"),
    "a hole": (
        lambda model: model(prompt(1), attention_mask=padded(slice(0, None, 2))),
        "attention_mask: got zeros after ones"),
    "padding after tokens": (
        lambda model: go_on(model, torch.ones(2, 37).long().index_fill(1, torch.tensor(30), 0)),
        "attention_mask: got zeros after the tokens of the cache"),
    "a mask of other tokens": (
        lambda model: go_on(model, torch.ones(2, 7).long()),
        r"attention_mask: got .* expected \[2, 37\]"),
    "another cache": (lambda model: model(prompt(2), cache=transformers.DynamicCache()),
                      "cache: got DynamicCache.*expected one from new_cache"),
    "static": (lambda model: generate(model, prompt(2), cache_implementation="static"),
               "cache_implementation: got 'static'"),
    "update": (lambda model: model.new_cache().update(prompt(2), prompt(2), 0), "three branches"),
    "crop": (lambda model: model.new_cache().crop(3), "tokens_to_remove: got 3"),
    "offload": (lambda model: model.new_cache().offload(0), "offload: the cache stays"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(call: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call(model_of())
