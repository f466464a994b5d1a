"""What a model of `transformers` asks for once a call, for all its layers: who sees which keys.

Other implementations answer with a mask of `[B, 1, N, M]`. Here it is one number for each query,
the first key that it may see: where its text begins after padding, or its text among packed ones.
What is later than the query is hidden by position.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial.runtime import checks


def first_keys(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Callable | None = None, attention_mask: Tensor | None = None,
    local_size: int | None = None, use_vmap: bool = False,
    device: torch.device | str | None = None, **_: object,
) -> Tensor | None:  # fmt: skip
    """The first key that each query may see, `[B, N]` int64, or None where it is key 0 for all.

    Every argument is one of the mask functions of `transformers`. A query that is padding
    sees nothing: its number is `kv_length`. To find out whether there is padding, the host waits
    for the device, once for all layers, as `flash_attention_mask` does.

    Raises:
        ValueError: a mask that is more than causal, padded and packed: a window, a function of the
            model's own, keys that a cache of fixed length holds in advance, or padding between
            tokens.
    """
    _check(q_length, kv_length, q_offset, kv_offset, local_size, use_vmap)
    first = _packed(batch_size, q_length, mask_function, device)
    if attention_mask is None:
        return first
    padded = _padded(q_length, kv_length, attention_mask)
    return first if padded is None else padded if first is None else first.maximum(padded)


def _check(
    q_length: int, kv_length: int, q_offset: int, kv_offset: int, local_size: int | None,
    use_vmap: bool,
) -> None:  # fmt: skip
    if local_size is not None:
        raise ValueError(
            f"sliding_window: got {local_size}, expected None: a window is not given by lists"
        )
    if use_vmap:
        raise ValueError(
            "or_mask_function, and_mask_function: got one, expected None: which keys a query sees "
            "beyond its lists is causal, padded or packed"
        )
    # a cache of fixed length counts its tokens on the device
    if isinstance(q_offset, Tensor) or kv_offset or q_offset + q_length != kv_length:
        raise ValueError(
            f"cache: got {kv_length} keys from position {kv_offset} for {q_length} queries from "
            f"position {q_offset}, expected queries that are the last keys: use a cache that grows "
            "(DynamicCache), not one of fixed length (StaticCache)"
        )


def _packed(
    batch_size: int, q_length: int, mask_function: Callable | None,
    device: torch.device | str | None,
) -> Tensor | None:  # fmt: skip
    """Where the text of each token begins, in rows that hold several; None for one text a row.

    `transformers` tells only by a function `(row, head, query, key)`. A token that does not see the
    one before it begins a text.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is None or mask_function is causal_mask_function:
        return None
    rows = torch.arange(batch_size, device=device)[:, None]  # [B, 1]
    head = torch.zeros((1, 1), dtype=torch.int64, device=device)
    t = torch.arange(q_length, device=device)[None]  # [1, N]
    sees_next = mask_function(rows, head, t[:, :-1], t[:, 1:])
    if not torch.compiler.is_compiling() and bool(torch.as_tensor(sees_next).any()):
        raise ValueError(
            "mask_function: got one that shows a query its next key, expected causal attention"
        )
    goes_on = mask_function(rows, head, t[:, 1:], t[:, :-1]).expand(batch_size, -1)  # [B, N - 1]
    starts = t[:, 1:].masked_fill(goes_on, 0)
    return torch.cat([starts.new_zeros(batch_size, 1), starts], 1).cummax(1).values


def _padded(q_length: int, kv_length: int, mask: Tensor) -> Tensor | None:
    """Where the text of each row begins after its padding; None if there is no padding."""
    checks.check_tensor("attention_mask", mask, "[B, M]", (torch.bool, *checks.INTEGERS))
    if mask.shape[1] != kv_length:
        raise ValueError(
            f"attention_mask: got {checks.describe(mask)}, expected {kv_length} columns, one a key"
        )
    real = mask != 0
    counts = real.cumsum(1)  # [B, M]
    tokens, begins = counts[:, -1], (counts == 0).sum(1)  # [B]
    if not torch.compiler.is_compiling():
        ends = kv_length - (counts == tokens[:, None]).sum(1) + 1
        # rows without a token end where they begin
        is_torn = (ends - begins != tokens) & (tokens > 0)
        has_padding, is_torn = torch.stack([tokens < kv_length, is_torn]).any(1).tolist()
        if is_torn:
            raise ValueError(
                "attention_mask: got zeros between ones, expected padding before or after the "
                "tokens of a row; pad prompts on the left to generate"
            )
        if not has_padding:
            return None
    return begins[:, None].where(real[:, kv_length - q_length :], kv_length)
