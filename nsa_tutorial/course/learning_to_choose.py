"""Chapter 13's experiment: can the scores that choose blocks learn from the loss of the task alone?

Each query is a copy of one key among 16 blocks and has to return that key's value. It may read four
blocks. A *scorer*, one matrix `W`, gives a block the score `q W k_mean`, `k_mean` being the mean of
the block's keys, and the four best are read. Attention itself is fixed and right, so that a query
that reads the right block finds its value. Only `W` is trained, from noise, by the squared error of
what is returned. The choice itself has no gradient. Three ways to go on from there:

    none              the scores choose, and get no gradient
    slot_scale        factors `1 + w - w.detach()` on the scores of the chosen blocks' keys, `w`
                      being the softmax of all blocks' scores: the forward stays the same
    straight_through  every block is read and weighted: 1 for a chosen one and 0 for others in the
                      forward, `w` in the backward. It costs as much as dense attention.

What comes out depends on how peaked attention is (`scale`), and that is the point of `GENTLE` and
`PEAKED`. The gradient of a factor says what a slightly larger one would change, for blocks that
were read. Where a chosen block was the right one, a larger factor helps, unless attention is so
peaked that nothing is left to gain. Where all chosen blocks were wrong, a smaller factor on the
most similar keys helps: the average of several wrong values is a better answer than one of them.
Gentle attention learns to choose; peaked attention learns to avoid the right block. `pushes` takes
the two effects apart. Seeds are fixed, and a run takes a few seconds on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nsa_tutorial import ops
from nsa_tutorial.course.threads import one_thread

WAYS = ("none", "slot_scale", "straight_through")
NUM_BLOCKS, BLOCK_SIZE, TOP_N, WIDTH, QUERIES = 16, 8, 4, 32, 64
GENTLE, PEAKED = 4.0, 16.0  # scales of the attention: the score of a query's own key
STEPS, RATE = 100, 0.01
SPREAD = 10.0  # of the scores of blocks: means of keys are short
CHANCE = TOP_N / NUM_BLOCKS


class Question(NamedTuple):
    """A step's batch.

    Attributes:
        q, k, v: `[1, QUERIES, 1, WIDTH]`, keys of length 1, and random values.
        block: `[QUERIES]`, where each query's key is.
        answer: `[1, QUERIES, 1, WIDTH]`, its value.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block: Tensor
    answer: Tensor


def ask(generator: torch.Generator) -> Question:
    """New keys and values, and queries for some of the keys."""
    shape = (1, NUM_BLOCKS * BLOCK_SIZE, 1, WIDTH)
    k = normalize(torch.randn(shape, generator=generator), dim=-1)
    v = torch.randn(shape, generator=generator)
    key = torch.randint(shape[1], (QUERIES,), generator=generator)
    return Question(k[:, key], k, v, key // BLOCK_SIZE, v[:, key])


def new_scorer(generator: torch.Generator) -> Tensor:
    """`W [WIDTH, WIDTH]`, small and random."""
    return 0.1 * torch.randn(WIDTH, WIDTH, generator=generator)


def score_blocks(scorer: Tensor, question: Question) -> tuple[Tensor, Tensor]:
    """The probability of each block, `[1, QUERIES, 1, NUM_BLOCKS]`, and the ids of those that are
    chosen, `[1, QUERIES, 1, TOP_N]`."""
    k_mean = question.k.unflatten(1, (NUM_BLOCKS, BLOCK_SIZE)).mean(2)
    scores = SPREAD * torch.einsum("bnhd,de,bmhe->bnhm", question.q, scorer, k_mean)
    return torch.softmax(scores, -1), scores.topk(TOP_N, -1).indices


def is_found(ids: Tensor, question: Question) -> Tensor:
    """Whether each query reads the block of its key, `[QUERIES]`."""
    return (ids[0, :, 0] == question.block[:, None]).any(-1)


def attend(how: str, question: Question, w: Tensor, ids: Tensor, scale: float) -> Tensor:
    """What the queries return, `[1, QUERIES, 1, WIDTH]`: the same numbers in all three ways.

    Args:
        how: of `WAYS`.
        question, scale: the attention's tensors and the factor on its scores.
        w, ids: of `score_blocks`.
    """
    q, k, v = question[:3]
    if how == "straight_through":
        chosen = torch.zeros_like(w).scatter(-1, ids, 1)
        weight_of_key = (chosen + w - w.detach()).repeat_interleave(BLOCK_SIZE, -1)
        s = scale * torch.einsum("bnhd,bmhd->bnhm", q, k)
        weights = weight_of_key * torch.exp(s - s.amax(-1, keepdim=True))
        return torch.einsum("bnhm,bmhd->bnhd", weights / weights.sum(-1, keepdim=True), v)
    w_chosen = w.gather(-1, ids)
    slot_scale = 1 + w_chosen - w_chosen.detach() if how == "slot_scale" else None
    lists = {"block_size": BLOCK_SIZE, "slot_scale": slot_scale, "causal": False}
    return ops.selected_attention(q, k, v, ids, **lists, scale=scale, backend="reference")


@one_thread()
def run(
    how: str, steps: int = STEPS, seed: int = 0, *, scale: float = GENTLE, rate: float = RATE
) -> Tensor:
    """Train a scorer; returns, for each step, the share of new queries that read the block of their
    key, `[steps]`.

    Args:
        how: of `WAYS`.
        steps, seed, rate: of the training, by Adam.
        scale: how peaked attention is.

    Raises:
        ValueError: for another `how`.
    """
    if how not in WAYS:
        raise ValueError(f"how: got {how!r}, expected one of {', '.join(WAYS)}")
    generator = torch.Generator().manual_seed(seed)
    scorer = new_scorer(generator).requires_grad_()
    adam, found = torch.optim.Adam([scorer], lr=rate), []
    for _ in range(steps):
        question = ask(generator)
        w, ids = score_blocks(scorer, question)
        found.append(is_found(ids, question).float().mean())
        if how == "none":  # the choice passes on no gradient, whatever the error
            continue
        error = (attend(how, question, w, ids, scale) - question.answer).square().mean()
        adam.zero_grad()
        error.backward()
        adam.step()
    return torch.stack(found)


def found_by_hand(draws: int = 50) -> float:
    """What a scorer would find that knows the task: with `W` the identity, a block's score is how
    similar its mean is to the query."""
    generator = torch.Generator().manual_seed(0)
    questions = [ask(generator) for _ in range(draws)]
    found = [is_found(score_blocks(torch.eye(WIDTH), x)[1], x).float().mean() for x in questions]
    return float(torch.stack(found).mean())


def weight_of_own_key(scale: float) -> float:
    """The weight that a query gives its own key, on average, if it reads the block of that key and
    three others."""
    question = ask(torch.Generator().manual_seed(0))
    s = scale * torch.einsum("bnhd,bmhd->nm", question.q, question.k)  # [QUERIES, keys]
    read = (question.block[:, None] + torch.arange(TOP_N)) % NUM_BLOCKS
    is_read = torch.zeros(QUERIES, NUM_BLOCKS, dtype=torch.bool).scatter(1, read, True)
    s = s.masked_fill(~is_read.repeat_interleave(BLOCK_SIZE, 1), -torch.inf)
    return float(torch.softmax(s, -1).amax(-1).mean())


@one_thread()
def pushes(scale: float, draws: int = 20) -> tuple[float, float]:
    """Where the gradient through `slot_scale` pushes an untrained scorer: towards blocks that are
    similar to the query (positive), or away from them.

    Returns:
        The sum over queries that read the right block, and over those that do not.
    """
    generator, total = torch.Generator().manual_seed(0), torch.zeros(2)
    for _ in range(draws):
        scorer, question = new_scorer(generator).requires_grad_(), ask(generator)
        w, ids = score_blocks(scorer, question)
        o = attend("slot_scale", question, w, ids, scale)
        error = (o - question.answer).square().mean((0, 2, 3)) / QUERIES
        found = is_found(ids, question)
        for i, part in enumerate((found, ~found)):
            (d_scorer,) = torch.autograd.grad(error[part].sum(), scorer, retain_graph=True)
            total[i] -= d_scorer.trace()  # the derivative towards the identity
    return float(total[0]), float(total[1])
