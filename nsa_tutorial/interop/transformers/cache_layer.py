"""What one layer of the project remembers, as Hugging Face's caches hold it.

A cache of a model is their `Cache(layers=[NSACacheLayer(…), …])`, and a layer is called with
`cache=cache.layers[i].buffers_for(x)`. Padding is not kept: a model whose rows are padded on the
left turns them, so that padding comes last, and takes it back with `without_padding`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import cache_utils

from nsa_tutorial.serving.cache import Cache


class NSACacheLayer(cache_utils.CacheLayerMixin):
    """What one layer remembers, as Hugging Face's `Cache(layers=[…])` asks for it.

    Args:
        new_cache: makes our `Cache` for a number of rows, and for how many tokens of padding it has
            to take back at most. It is called when the first tokens come, because only they tell.
        max_length: tokens of a row, at most, with its padding.
    """

    is_croppable = True

    def __init__(self, new_cache: Callable[[int, int], Cache], max_length: int) -> None:
        super().__init__()
        self.new_cache, self.max_length = new_cache, max_length
        self.buffers: Cache | None = None
        self.padding: Tensor | None = None  # [B], on the host: what rows had before their tokens

    def buffers_for(self, x: Tensor, padding: int = 0) -> Cache:
        """Our `Cache`, made now if these are the first tokens; `x` has a row for each sequence, and
        `padding` tokens of one of them, at most, will be taken back."""
        if self.buffers is None:
            self._hold(self.new_cache(len(x), padding))
        return self.buffers

    def without_padding(self, padding: Tensor) -> None:
        """Take back the last `padding [B]` tokens of rows, which count as columns before them."""
        self.buffers.crop(self.buffers.host_lengths - padding)
        self.padding = padding

    def _hold(self, buffers: Cache) -> None:
        self.buffers, self.batch_size = buffers, len(buffers.host_lengths)
        self.is_initialized = True

    def __deepcopy__(self, memo: dict) -> NSACacheLayer:
        new = copy.copy(self)  # `new_cache` may hold a layer: its weights are not copied
        new.buffers = copy.deepcopy(self.buffers, memo)
        return new

    # -- what Hugging Face calls; every name is theirs --

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers. Only the number of rows is taken from `key_states`."""
        self.buffers_for(key_states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> None:
        """Not supported: a layer of NSA has up to three sets of keys and values."""
        raise NotImplementedError(
            "update: got one set of keys and values, expected a layer that writes those of all "
            "three branches: call layer(x, cache=cache.layers[i].buffers_for(x))"
        )

    def get_seq_length(self) -> int:
        """Tokens of the longest row, with its padding. They are counted on the host, so nothing
        waits for the device."""
        if self.buffers is None:
            return 0
        padding = 0 if self.padding is None else self.padding
        return int((self.buffers.host_lengths + padding).max())

    def get_max_length(self) -> int:
        """Tokens that a row may have."""
        return self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys a mask covers, and the position of the first one."""
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """Forget all tokens, and keep the buffers for the next ones."""
        self.padding = None
        if self.buffers is not None:
            self.buffers.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` tokens of each row, as a rejected draft asks for."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: got {tokens_to_remove}, expected 0 or less: -3 takes back 3"
            )
        if tokens_to_remove and self.buffers is not None:
            self.buffers.crop(self.buffers.host_lengths + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `b` becomes what row `beam_idx[b]` was."""
        if self.buffers is not None:
            self.buffers.reorder(beam_idx)
            self._select_padding(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows that follow each other."""
        if self.buffers is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in this order."""
        if self.buffers is not None:
            self._hold(self.buffers.select(indices))
            self._select_padding(indices)

    def _select_padding(self, rows: Tensor) -> None:
        if self.padding is not None:
            self.padding = self.padding[rows.to("cpu")]

    def offload(self) -> None:
        """Not supported."""
        raise NotImplementedError("offload: the cache stays on the device of its layer")

    prefetch = offload
