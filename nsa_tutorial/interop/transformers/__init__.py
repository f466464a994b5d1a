"""The operators as an attention implementation of Hugging Face's `transformers`.

    from nsa_tutorial.interop import transformers
    transformers.register()
    model.set_attn_implementation("nsa_tutorial")

Layers that hand over lists of blocks (MiniMax-M3's MSA, arXiv 2606.13392) then run on
`ops.selected_attention`, forward and backward, in training and in `generate`; layers without lists
run on PyTorch's SDPA. Nothing as long as keys times queries is made for a layer with lists.

`attention_function` is what a layer calls, `masks` what a model calls once for all its layers.
`texts` lets a model choose blocks for each of several texts in one row. `model` is a decoder of the
project's own layer, and `cache_layer` its cache. `transformers` itself is imported when something
here needs it, and is an extra: `pip install .[transformers]`.
"""

from __future__ import annotations

import functools

from nsa_tutorial.interop.transformers.attention_function import attention
from nsa_tutorial.interop.transformers.masks import first_keys
from nsa_tutorial.interop.transformers.texts import choose_within_texts

NAME = "nsa_tutorial"

__all__ = ["NAME", "attention", "choose_within_texts", "first_keys", "register", "unregister"]


def register(name: str = NAME, *, backend: str = "auto", order: str = "auto") -> None:
    """Make the operators known to `transformers`, for `set_attn_implementation(name)` and
    `from_pretrained(…, attn_implementation=name)`. A second call replaces the first.

    Args:
        name: under which name; one that `transformers` itself has is refused.
        backend, order: as in `ops.selected_attention`.

    Raises:
        ValueError: `transformers` has something of its own under this name.
        ModuleNotFoundError: it is not installed.
    """
    functions, masks = _interfaces()
    if name in functions.valid_keys() and not _is_ours(functions[name]):
        raise ValueError(
            f"name: got {name!r}, which transformers has already, expected another, as {NAME!r}"
        )
    ours = functools.partial(attention, backend=backend, order=order)
    functions.register(name, ours)
    masks.register(name, first_keys)


def unregister(name: str = NAME) -> None:
    """Take back `register(name)`. A model that is set to the name raises at its next call."""
    functions, masks = _interfaces()
    if name in functions.valid_keys() and _is_ours(functions[name]):
        # neither interface has a public way to forget a name
        functions._global_mapping.pop(name, None)
        masks._global_mapping.pop(name, None)


def _interfaces() -> tuple:
    """The tables of `transformers` that every model looks into."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def _is_ours(function: object) -> bool:
    return getattr(function, "func", None) is attention
