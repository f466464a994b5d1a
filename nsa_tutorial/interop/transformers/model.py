"""A small decoder for Hugging Face's `generate`, and the cache that it generates with.

    model = NSAForCausalLM(NSAConfig(hidden_size=512, attention={"query_heads": 8, "kv_heads": 1}))
    tokens = model.generate(prompt, max_new_tokens=100)
    model.save_pretrained("folder")
    model = NSAForCausalLM.from_pretrained("folder")

`transformers` is an extra: `pip install .[transformers]`. Prompts of one batch have one length,
since the cache has no place for padding.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, cache_utils
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
            return NSACacheLayer(lambda rows: make(rows, most, max_step=step), most)

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
            attention_mask: ones, `[B, tokens]`: padding is refused.
            cache: from `new_cache`. With a cache there is no gradient.
            use_cache: make a cache if none is given. It is in the result.
            labels: `[B, N]`, the tokens again: the result has their loss.
            logits_to_keep: of the latest tokens; 0 for all.
        """
        if cache is None and use_cache:
            cache = self.new_cache()
        self._check(input_ids, attention_mask, cache)
        x = self.embed_tokens(input_ids)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache.layers[i].buffers_for(x))
        x = self.norm(x)[:, -logits_to_keep:]
        logits = nn.functional.linear(x, self.embed_tokens.weight)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)

    def _check(self, input_ids: Tensor, mask: Tensor | None, cache: object) -> None:
        """Refuse padding, and a cache of another kind."""
        # `generate` adds a 1 for each later token, so a step of one token need not wait for this
        if mask is not None and input_ids.shape[1] > 1 and not bool((mask == 1).all()):
            raise ValueError(
                "attention_mask: got zeros, expected ones: rows with padding are not supported. "
                "Put prompts of one length into a batch"
            )
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
