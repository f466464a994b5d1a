"""What a reader of chapter 18 built, on several ranks, beside one process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_tutorial.course.exercises.many_gpus import (
    selected_attention,
    text_of,
    window_attention,
)
from nsa_tutorial.course.ranks import Rank, on_ranks


def beside_one_process(forward: Callable, backward: Callable, ranks: int = 4) -> dict[str, float]:
    """The largest error of two functions over several ranks, by what it is an error of.

    Each rank runs `forward`. Then it attends again to keys that autograd watches, and `backward`
    brings their gradients home.
    """
    lengths, size, window = (7,) * (ranks - 1) + (5,), 3, 4
    *text, lists = text_of(lengths, 2, 3, size)
    whole = [x.clone().requires_grad_() for x in text]
    q, k, v, k_near, v_near = whole
    right = selected_attention(q, k, v, lists, size) + window_attention(q, k_near, v_near, window)
    d_o = torch.cos(torch.arange(right.numel()).double()).view_as(right)
    right.backward(d_o)
    split = [x.split(lengths) for x in (*text, lists, d_o)]

    def one(rank: Rank) -> tuple:
        q, k, v, k_near, v_near, ids, d_o = (x[rank.number] for x in split)
        o = forward(rank, q, (k, v), (k_near, v_near), ids, size, window)
        far = [torch.cat(rank.gather(x)[: rank.number + 1]).requires_grad_() for x in (k, v)]
        halo = [rank.to_next(x[len(x) - window + 1 :]) for x in (k_near, v_near)]
        near = [torch.cat(x).requires_grad_() for x in zip(halo, (k_near, v_near), strict=True)]
        mine = selected_attention(q, *far, ids, size) + window_attention(q, *near, window)
        d_far, d_near = torch.autograd.grad(mine, far, d_o, retain_graph=True), None
        d_near = torch.autograd.grad(mine, near, d_o)
        found = [backward(rank, *d, list(lengths)) for d in zip(d_far, d_near, strict=True)]
        return o, found[0][0], found[1][0], found[0][1], found[1][1]

    names = ("o", "far keys", "far values", "near keys", "near values")
    gathered = [torch.cat(x).detach() for x in zip(*on_ranks(ranks, one), strict=True)]
    expected = [right.detach(), *(x.grad for x in whole[1:])]
    return {
        name: (got - as_one).abs().max().item()
        for name, got, as_one in zip(names, gathered, expected, strict=True)
    }
