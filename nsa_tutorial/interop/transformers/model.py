"""A small decoder for Hugging Face's `generate`, and the cache that it generates with.

    model = NSAForCausalLM(NSAConfig(hidden_size=512, attention={"query_heads": 8, "kv_heads": 1}))
    tokens = model.generate(prompt, max_new_tokens=100)
    model.save_pretrained("folder")
    model = NSAForCausalLM.from_pretrained("folder")

`transformers` is an extra: `pip install .[transformers]`. With this module imported, its
`AutoModelForCausalLM.from_pretrained` knows the model, too. Rows that are padded on the left give
what each gives alone: their tokens are moved to the front, and back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    cache_utils,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from nsa_tutorial.interop.transformers.cache_layer import NSACacheLayer
from nsa_tutorial.layer import NativeSparseAttention, NativeSparseAttentionConfig
from nsa_tutorial.runtime import checks
from nsa_tutorial.serving.cache import Cache


class NSAConfig(PreTrainedConfig):
    """The sizes of a model.

    Attributes:
        attention: arguments of `NativeSparseAttentionConfig`, without `width`.
        max_position_embeddings: tokens of a cache that is made without a number of them.
        max_step: how many tokens a cache can always take back. A draft of assisted generation is
            shorter than that.
    """

    model_type = "nsa_tutorial"

    vocab_size: int = 32_000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 12
    max_position_embeddings: int = 4096
    max_step: int = 64
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention: dict | None = None

    def __post_init__(self, **kwargs: object) -> None:
        self.attention = self.attention or {"query_heads": 16, "kv_heads": 1}
        super().__post_init__(**kwargs)


class Block(nn.Module):
    """Attention, then a SwiGLU MLP (arXiv 2002.05202), each added to what came in."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        width, hidden, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        sizes = NativeSparseAttentionConfig(width=width, **config.attention)
        self.attention_norm = nn.RMSNorm(width, eps)
        self.attention = NativeSparseAttention(sizes)
        self.mlp_norm = nn.RMSNorm(width, eps)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        """`[B, N, width]` to `[B, N, width]`."""
        x = x + self.attention(self.attention_norm(x), cache=cache)
        y = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder. Its head is the embedding, transposed."""

    config_class = NSAConfig

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def new_cache(self, max_tokens: int | None = None) -> cache_utils.Cache:
        """An empty cache for `generate(cache=…)` and `forward(cache=…)`.

        Args:
            max_tokens: tokens of a row, at most; None for `max_position_embeddings`.
        """
        most, step = max_tokens or self.config.max_position_embeddings, self.config.max_step

        def layer(block: Block) -> NSACacheLayer:
            make = block.attention.new_cache
            return NSACacheLayer(
                lambda rows, padding: make(rows, most, max_step=step + padding), most
            )

        return cache_utils.Cache(layers=[layer(block) for block in self.blocks])

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None,
        cache: cache_utils.Cache | None = None, use_cache: bool | None = None,
        labels: Tensor | None = None, logits_to_keep: int = 0,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """The logits of each next token, `[B, N, vocab_size]`.

        Args:
            input_ids: `[B, N]`; with a cache, the tokens that follow those it holds.
            attention_mask: `[B, tokens]`, with a cache those that it holds among them: zeros where
                a row is padded, on the left, or, without a cache, on the right.
            cache: from `new_cache`. With a cache there is no gradient.
            use_cache: make a cache if none is given. It is in the result.
            labels: `[B, N]`, the tokens again: the result has their loss.
            logits_to_keep: of the latest tokens; 0 for all.
        """
        if cache is None and use_cache:
            cache = self.new_cache()
        self._check(cache)
        padding = _padding(input_ids, attention_mask, cache)  # [B] on the host, or None
        x = self.embed_tokens(input_ids)
        if padding is not None:
            x = _turned(x, padding)
        for i, block in enumerate(self.blocks):
            if cache is None:
                x = block(x, None)
                continue
            layer = cache.layers[i]
            x = block(x, layer.buffers_for(x, 0 if padding is None else int(padding.max())))
            if padding is not None:
                layer.without_padding(padding)
        if padding is not None:
            x = _turned(x, -padding)
        x = self.norm(x)[:, -logits_to_keep:]
        logits = nn.functional.linear(x, self.embed_tokens.weight)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)

    def _check(self, cache: object) -> None:
        """Refuse a cache of another kind."""
        layers = getattr(cache, "layers", ())
        fits = [isinstance(layer, NSACacheLayer) for layer in layers] == [True] * len(self.blocks)
        if cache is not None and not fits:
            raise TypeError(
                f"cache: got {checks.describe(cache)}, expected one from new_cache of this model"
            )

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:  # fmt: skip
        """Where `generate` gets its cache, unless it was given one."""
        ours = generation_config.use_cache and model_kwargs.get("cache") is None
        if ours and generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation: got {generation_config.cache_implementation!r}, expected "
                "None: the model has a cache of its own"
            )
        if ours:
            # The last draft may go past the end. An assistant writes all drafts with one cache, but
            # `max_cache_length` is that of its first one.
            most = max_cache_length + self.config.max_step
            model_kwargs["cache"] = self.new_cache(None if generation_config.is_assistant else most)
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )


AutoConfig.register(NSAConfig.model_type, NSAConfig)
AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM)


def _padding(
    input_ids: Tensor, mask: Tensor | None, cache: cache_utils.Cache | None
) -> Tensor | None:
    """How many columns stand before the tokens of each row, `[B]` on the host; None where none do.
    What stands behind them is hidden by position.

    Raises:
        ValueError: zeros between ones, behind them with a cache, or after tokens that it holds.
    """
    N, past = input_ids.shape[1], 0 if cache is None else cache.get_seq_length()
    # `generate` adds a 1 for each later token, so a step of one token need not wait for this
    if mask is None or (past and N == 1):
        return None
    checks.check_tensor("attention_mask", mask, "[B, tokens]", (torch.bool, *checks.INTEGERS))
    if mask.shape != (len(input_ids), past + N):
        raise ValueError(
            f"attention_mask: got {checks.describe(mask)}, expected {[len(input_ids), past + N]}"
        )
    counts = (mask[:, past:] != 0).cpu().cumsum(1)  # [B, N]
    first, tokens = (counts == 0).sum(1), counts[:, -1]
    end = N + 1 - (counts == counts[:, -1:]).sum(1)
    is_torn = (tokens > 0) & (end - first != tokens)
    is_padded_behind = (tokens > 0) & (end < N)
    if bool(is_torn.any()) or (cache is not None and bool(is_padded_behind.any())):
        raise ValueError(
            "attention_mask: got zeros after ones, expected padding on the left, before the tokens "
            "of a row"
        )
    if past and bool(first.any()):
        raise ValueError(
            "attention_mask: got zeros after the tokens of the cache, expected ones: a row is "
            "padded before its first token"
        )
    return first if bool(first.any()) else None


def _turned(x: Tensor, by: Tensor) -> Tensor:
    """`x [B, N, …]` with each row turned to the left by so many tokens."""
    N, by = x.shape[1], by.to(x.device)
    place = (torch.arange(N, device=x.device) + by[:, None]) % N  # [B, N]
    return x[torch.arange(len(x), device=x.device)[:, None], place]
