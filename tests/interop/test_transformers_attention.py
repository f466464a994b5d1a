"""MiniMax-M3's sparse layers on the operators compute what `transformers` computes by a dense mask:
a small random model of its own class, set from "eager" to "nsa_tutorial". Needs
`pip install .[transformers]`, and skips without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from nsa_tutorial.interop import transformers as ours  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "registered")

BS, TOP = 4, 3
SIZES = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "num_local_experts": 2, "num_experts_per_tok": 1, "dense_intermediate_size": 12,
    "shared_intermediate_size": 8, "initializer_range": 0.4, "max_position_embeddings": 256,
    "index_n_heads": 2, "index_head_dim": 8, "index_block_size": BS, "index_topk_blocks": TOP,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
DENSE, SPARSE = "full_attention", "minimax_m3_sparse"


@pytest.fixture
def registered() -> Iterator[None]:
    ours.register(backend="reference")
    yield
    ours.unregister()


def models(judge: str = "sdpa", layers: tuple = (DENSE, SPARSE, SPARSE), **changes: object) -> list:
    """One model twice: on the judge's path of `transformers`, and on the operators. Its eager path
    has a softmax in fp32; its SDPA, with the same dense mask, does all in fp64."""
    changes |= {"layer_types": [*layers], "num_hidden_layers": len(layers)}
    changes.setdefault("mlp_layer_types", ["dense"] * (len(layers) - 1) + ["sparse"])
    found = []
    for name in (judge, ours.NAME):
        torch.manual_seed(0)
        config = transformers.MiniMaxM3VLTextConfig(**{**SIZES, **changes})
        model = transformers.MiniMaxM3VLForCausalLM(config)
        model.set_experts_implementation("eager")  # the grouped product of experts takes no fp64
        model.set_attn_implementation(name)
        found.append(model.to(DTYPES[judge]).eval())
    return found


DTYPES = {"sdpa": torch.float64, "eager": torch.float32}


def prompt(rows: int = 2, length: int = 37) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=generator)


def same(found: Tensor, right: Tensor, judge: str = "sdpa") -> None:
    tolerance = {"sdpa": 1e-9, "eager": 2e-4}[judge]
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


def mask_of(*real: slice, length: int = 37) -> Tensor:
    """Ones where a row has tokens."""
    mask = torch.zeros(len(real), length, dtype=torch.long)
    for row, tokens in zip(mask, real, strict=True):
        row[tokens] = 1
    return mask


# Each hides less than one block before a text, so that every token sees something: where one sees
# nothing, the paths of `transformers` average over all that is hidden. They differ from each other
# in what they compute for padding, and the indexers of later layers score it, so that a layer with
# lists is the first one here, unless padding comes last.
PADDED = {
    "left": mask_of(slice(3, None), slice(0, None)),
    "left of all rows": mask_of(slice(1, None), slice(2, None)),
    "right": mask_of(slice(0, 20), slice(0, 37)),
    "both": mask_of(slice(3, 30), slice(1, 33)),
}


@pytest.mark.parametrize("judge", DTYPES)
@pytest.mark.parametrize("padded", [None, *PADDED])
def test_logits_and_gradients(padded: str | None, judge: str) -> None:
    """Of the tokens; what is computed for padding differs, and goes nowhere."""
    ids, mask, found = prompt(), PADDED.get(padded), []
    layers = (DENSE, SPARSE, SPARSE) if padded in (None, "right") else (SPARSE, DENSE)
    is_judged = torch.ones_like(ids) if mask is None else mask
    factors = torch.randn(*ids.shape, 13, generator=torch.Generator().manual_seed(2))
    for model in models(judge, layers):
        logits = model(ids, attention_mask=mask).logits * is_judged[..., None]
        loss = (logits * factors).sum() / 50
        names, weights = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        found.append({"logits": logits, **dict(zip(names, gradients, strict=True))})
    for (name, right), got in zip(found[0].items(), found[1].values(), strict=True):
        if "indexer" in name:
            assert got is None and right is None, name  # the choice has no gradient in either
        else:
            assert got.any(), name
            same(got, right, judge)


@pytest.mark.parametrize("length", [1, 3 * BS, 37])
@pytest.mark.parametrize("padded", [False, True], ids=["one length", "left padding"])
@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
def test_generate(beams: int, length: int, padded: bool) -> None:
    """With a cache and without one, from prompts shorter and longer than the lists."""
    ids, found = prompt(2, length), []
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : min(length - 1, 3)] = 0
    how = {"max_new_tokens": 9, "do_sample": False, "attention_mask": mask, "num_beams": beams}
    for model in models(layers=(SPARSE, DENSE) if padded else (DENSE, SPARSE, SPARSE)):
        found += [model.generate(ids, use_cache=use_cache, **how) for use_cache in (True, False)]
    assert all(tokens.equal(found[0]) for tokens in found), found
    assert len(found[0][:, length:].unique()) > 2


@torch.no_grad()
def test_a_prompt_in_pieces_and_crops() -> None:
    """Several tokens after those of a cache, whose keys are then longer than the queries."""
    ids, found = prompt(), []
    for model in models():
        cache = transformers.DynamicCache(config=model.config)
        pieces = [model(piece, cache=cache).logits for piece in ids.split([17, 1, 9, 10], 1)]
        cache.crop(-12)
        found.append(torch.cat([*pieces, model(ids[:, 25:], cache=cache).logits], 1))
        same(torch.cat(pieces, 1), model(ids).logits)
    same(found[1], found[0])


TEXTS = (13, 24)
OFFSETS = torch.tensor([0, 13, 37], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(length) for length in TEXTS])[None]
PACKED = {
    "position_ids": {"position_ids": POSITIONS, "use_cache": False},
    # with a mask, `transformers` does not look for texts in positions
    "cu_seq_lens": {"position_ids": POSITIONS, "attention_mask": torch.ones_like(POSITIONS),
                    "cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS.clone()},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("told", PACKED)
def test_packed(told: str) -> None:
    """A dense layer computes what each text alone gives. In a sparse one, an indexer looks for the
    keys of a text from the row's first key on, so that only the first text finds all its own."""
    texts = prompt(1).split(TEXTS, 1)
    ids = torch.cat(texts, 1)
    for layers, judged in (((DENSE,), 37), ((SPARSE,), TEXTS[0])):
        sdpa, model = models(layers=layers)
        alone = torch.cat([sdpa(text).logits for text in texts], 1)
        packed = sdpa(ids, **PACKED["position_ids"]).logits
        found = model(ids, **PACKED[told]).logits
        same(found[:, :judged], alone[:, :judged])
        same(found[:, :judged], packed[:, :judged])


@pytest.mark.parametrize("told", PACKED)
def test_packed_texts_choose_as_each_does_alone(told: str) -> None:
    """Logits and gradients; taken back, the lists are those of the row again."""
    ids, packed = prompt(1), PACKED[told] | {"use_cache": False}
    texts = ids.split(TEXTS, 1)
    sdpa, model = models()
    before = model(ids, **packed).logits
    assert ours.choose_within_texts(model) == ours.choose_within_texts(model) == 2
    alone = torch.cat([sdpa(text).logits for text in texts], 1)
    logits = model(ids, **packed).logits
    same(logits, alone)
    assert not logits.allclose(before)
    for x in (alone, logits):
        x.square().sum().backward()
    for (name, p), right in zip(model.named_parameters(), sdpa.parameters(), strict=True):
        if right.grad is not None:  # norms are summed in fp32
            torch.testing.assert_close(p.grad, right.grad, rtol=1e-4, atol=1e-4, msg=name)
    same(model(texts[1]).logits, alone[:, TEXTS[0] :])
    with pytest.raises(ValueError, match=r"cache: got one .* anew at \[13\], .* use_cache=False"):
        model(ids, position_ids=POSITIONS)
    ours.choose_within_texts(model, on=False)
    same(model(ids, **packed).logits, before)


@torch.no_grad()
def test_a_model_that_sees_pictures() -> None:
    """Its layers for pictures are not causal, and have no lists."""
    vision = {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # fmt: skip
    text = SIZES | {"vocab_size": 30, "layer_types": [SPARSE, DENSE], "num_hidden_layers": 2}
    text |= {"mlp_layer_types": ["dense"] * 2}
    generator, found = torch.Generator().manual_seed(1), []
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])  # patches of two pictures: 4 and 8 tokens
    pixels = torch.randn(48, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
    ids = torch.randint(1, 20, (1, 30), generator=generator)
    ids[:, 3:15] = 25
    for name in ("sdpa", ours.NAME):
        torch.manual_seed(0)
        config = transformers.MiniMaxM3VLConfig(
            text_config=text, vision_config=vision, image_token_index=25, video_token_index=26,
            projector_hidden_size=16,
        )  # fmt: skip
        model = transformers.MiniMaxM3SparseForConditionalGeneration(config).double().eval()
        model.set_attn_implementation(name)
        assert {x.config._attn_implementation for x in (model, model.model.vision_tower)} == {name}
        found.append(model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid).logits)
    same(found[1], found[0])
    found = [model(input_ids=ids, pixel_values=x, image_grid_thw=grid).logits for x in
             (pixels, -pixels)]  # fmt: skip
    assert not found[0].allclose(found[1]), "pictures are seen"


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    _, model = models()
    model.save_pretrained(tmp_path)
    how = {"attn_implementation": ours.NAME, "dtype": torch.float64}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how)
    loaded.set_experts_implementation("eager")
    assert loaded.config._attn_implementation == ours.NAME
    assert loaded(prompt()).logits.equal(model(prompt()).logits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("padded", [None, "left"])
def test_compiled(padded: str | None) -> None:
    """In one graph, forward and backward."""
    _, model = models(layers=(DENSE, SPARSE), mlp_layer_types=["dense"] * 2)
    arguments = {"attention_mask": PADDED.get(padded), "use_cache": False}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for run in (model, compiled):
        logits = run(prompt(), **arguments).logits
        weight = model.model.layers[1].self_attn.q_proj.weight
        found.append((logits, *torch.autograd.grad(logits.square().sum(), weight)))
    for got, right in zip(found[1], found[0], strict=True):
        same(got, right)
    torch.compiler.reset()


# -- what is refused, and the name; of what a layer hands over: test_transformers_lists.py --


def forward(**arguments: object) -> Callable[[], object]:
    return lambda: models()[1](prompt(), **arguments)


def generate(**arguments: object) -> Callable[[], object]:
    return lambda: models()[1].generate(prompt(), max_new_tokens=3, do_sample=False, **arguments)


def masks(**changes: object) -> Callable[[], object]:
    arguments = {"batch_size": 2, "q_length": 7, "kv_length": 7, "device": "cpu"}
    return lambda: ours.first_keys(**{**arguments, **changes})


REFUSED = {
    "a mask function": (masks(use_vmap=True), "or_mask_function, and_mask_function: got one"),
    "a mask that is not causal": (masks(mask_function=lambda b, h, q, k: k <= q + 1), "causal"),
    "a window for all": (masks(local_size=3), "sliding_window: got 3"),
    "a model's mask": (forward(attention_mask=torch.ones(2, 1, 37, 37).bool()), "of your own"),
    "a hole": (forward(attention_mask=mask_of(slice(3, 9), slice(2, None, 2))), "between ones"),
    "a mask of other keys": (masks(attention_mask=torch.ones(2, 6).bool()), "expected 7 columns"),
    "a static cache": (generate(cache_implementation="static"), "StaticCache"),
    "padding on the right": (generate(attention_mask=PADDED["right"]), "between ones"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_named(function: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function()


def test_registering_and_unregistering() -> None:
    """Twice each; names of `transformers` are left alone; a model that is set to a name that is
    gone says so."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    ours.register("another", backend="triton", order="queries")
    ours.register("another")
    assert functions["another"].keywords == {"backend": "auto", "order": "auto"}
    for _ in range(2):
        ours.unregister("another")
        assert "another" not in functions and "another" not in masks and ours.NAME in functions
    with pytest.raises(ValueError, match="name: got 'sdpa', which transformers has already"):
        ours.register("sdpa")
    ours.unregister("sdpa")
    assert "sdpa" in functions and "sdpa" in masks
    _, model = models()
    ours.unregister()
    with pytest.raises(KeyError, match=ours.NAME):
        model(prompt())
