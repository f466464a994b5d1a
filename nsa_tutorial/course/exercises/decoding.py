"""Exercises of chapter 15: how many summaries are complete, the merge of parts, and a step of
decoding, built from an empty body."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_tutorial.course.attempts import expect_unchanged
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.small_cache import SmallCache, attend, block_scores, new_cache
from nsa_tutorial.course.texts import Texts

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


# -- complete_summaries --


def complete_summaries(tokens: Tensor, length: int, stride: int) -> Tensor:
    """How many summaries each row has, from its number of tokens, [B]."""
    return ((tokens - length) // stride + 1).clamp(min=0)


class AskedForNumbers(Exception):
    """A number of a tensor was read in Python, for which a GPU makes the host wait."""


class _Unread(Tensor):
    """A tensor whose numbers are not read in Python."""

    READERS = frozenset(
        {"tolist", "item", "numpy", "__bool__", "__float__", "__index__", "__int__"}
    )

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args=(), kwargs=None) -> object:
        if func.__name__ in cls.READERS:
            raise AskedForNumbers(
                f"`{func.__name__.strip('_')}` reads numbers in Python, and a GPU makes the host "
                "wait for them. An expression on the whole tensor needs no loop and no `if`."
            )
        return super().__torch_function__(func, types, args, kwargs or {})


def _count(solution: Callable, tokens: Tensor, length: int, stride: int) -> object:
    """What it makes of row lengths that nobody reads.

    Raises:
        ValueError: if the numbers of summaries are no integers.
    """
    given = tokens.clone()
    found = solution(tokens.as_subclass(_Unread), length, stride)
    expect_unchanged([tokens], [given])
    if not isinstance(found, Tensor):
        return found
    if found.is_floating_point():
        raise ValueError("got fractions, expected integers: `//` divides whole numbers")
    return found.as_subclass(Tensor)


_COMPLETE = TEXTS.exercise(
    "complete_summaries", minutes=6, difficulty=1, solution=complete_summaries, run=_count,
    misconceptions=diffs(complete_summaries, [
        ("(tokens - length) // stride + 1", "tokens // stride",
         "counting a summary once its first tokens are there",
         "After 16 tokens, how many of the 32 that the first summary needs are written?"),
        ("(tokens - length) // stride + 1", "(tokens + stride - 1) // stride",
         "counting a summary as soon as it has begun",
         "A summary is the mean of 32 tokens. How many of them are there after the first one?"),
        (" + 1", "", "forgetting the first summary",
         "After exactly 32 tokens, how many summaries are complete?"),
        ("tokens - length", "tokens - 1 - length", "a summary that comes one token late",
         "The newest token is written before it attends. After 32 tokens, is one of the first 32 "
         "still missing?"),
        ("tokens - length", "tokens + 1 - length", "a summary that comes one token early",
         "After 31 tokens, which token would the first summary be made of that is not there?"),
        (".clamp(min=0)", "", "a number of summaries below 0",
         "With one token, the formula counts backwards. What is the least number of summaries?"),
        ("(tokens - length) // stride + 1", "tokens // length",
         "summaries that do not overlap",
         "The second summary begins 16 tokens after the first one, not 32. When does it end?"),
        ("(tokens - length) // stride + 1", "tokens // stride - length // stride + 1",
         "rounding down before the difference",
         "With length 7 and stride 3, the second summary is complete after 10 tokens. How many do "
         "you count after 9?"),
    ]),
    cases=(
        Case("32 tokens", lambda: (torch.tensor([32]), 32, 16)),
        Case("31 and 47 tokens", lambda: (torch.tensor([31, 47]), 32, 16)),
        Case("47, 48 and 49 tokens", lambda: (torch.tensor([47, 48, 49]), 32, 16)),
        Case("1 to 20 tokens, length 8, stride 2", lambda: (torch.arange(1, 21), 8, 2)),
        Case("a length that the stride does not divide", lambda: (torch.arange(30), 7, 3)),
    ),
)  # fmt: skip


# -- merge_parts --


def merge_parts(o: Tensor, lse: Tensor) -> Tensor:
    """The output [HQ, DV] of all keys, from those of P parts, o [P, HQ, DV] and lse [P, HQ]."""
    shift = lse.amax(0).clamp(min=-1e30)  # finite where no part has keys
    weight = torch.exp(lse - shift)  # [P, HQ]
    total = weight.sum(0).clamp(min=1e-30)
    return (weight[:, :, None] * o).sum(0) / total[:, None]


def _parts(
    counts: tuple[int, ...], *, HQ: int = 2, DV: int = 3, shift: float = 0.0, empty: tuple = ()
) -> tuple:
    """Partial outputs and log-sum-exps of parts with so many keys; `empty` heads see none."""
    o, lse = [], []
    for i, count in enumerate(counts):
        s = 2 * _random(HQ, count, seed=i) + shift
        s[list(empty)] = -torch.inf
        p = torch.softmax(s, -1).nan_to_num(0)
        o.append(p @ _random(count, DV, seed=i + 50))
        lse.append(torch.logsumexp(s, -1))
    return torch.stack(o), torch.stack(lse)


_MERGE = TEXTS.exercise(
    "merge_parts", minutes=10, difficulty=2, solution=merge_parts, tolerance=1e-6,
    misconceptions=diffs(merge_parts, [
        ({"weight = torch.exp(lse - shift)": "weight = torch.ones_like(lse)"},
         "an average of the parts", "A part of 3 keys counts as much as one of 100 here. Which "
         "number says how much a part's keys weigh together?"),
        ({"weight = torch.exp(lse - shift)": "weight = torch.ones_like(lse)",
          " / total[:, None]": ""}, "a plain sum of the parts",
         "Each part's output is a mean of values already, and a sum of means is too large. How "
         "much of the whole does each part weigh?"),
        (" / total[:, None]", "", "weights that do not sum to 1",
         "The weights are relative to the largest part. By what do they have to be divided?"),
        ("torch.exp(lse - shift)", "lse", "weighing by lse itself",
         "`lse` is the *logarithm* of the sum. What turns it back into the sum?"),
        ("torch.exp(lse - shift)", "torch.exp2(lse - shift)", "a natural lse under exp2",
         "This `lse` is a natural logarithm, as everywhere outside a kernel. Which power undoes "
         "it?"),
        ("torch.exp(lse - shift)", "torch.exp(lse)", "a power that overflows",
         "e to the 800 is infinite. What can be subtracted from all `lse` of a head first?"),
        ("lse.amax(0)", "lse.amax()", "one maximum for all heads",
         "One head's scores lie 1,600 below another's. What is left of its weights?"),
        (".clamp(min=-1e30)", ".clamp(min=0)", "a maximum that may not be negative",
         "All scores of a head may be about -800. What is left of its weights, if 0 is taken for "
         "their maximum?"),
        ({"torch.exp(lse - shift)": "torch.softmax(lse, 1)", " / total[:, None]": ""},
         "a softmax over the heads", "`lse` is `[P, HQ]`. Over which of the two axes do a head's "
         "weights sum to 1?"),
        ("torch.exp(lse - shift)", "torch.softmax(lse, 1)", "a softmax over the heads"),
        (".clamp(min=-1e30)", "", "NaN for a head without keys",
         "What is `-inf - -inf`?"),
        (".clamp(min=1e-30)", "", "NaN for a head without keys"),
    ]),
    cases=(
        Case("two parts of one key, one head", lambda: _parts((1, 1), HQ=1, DV=2)),
        Case("a part of 2 keys, and one of 9", lambda: _parts((2, 9))),
        Case("an empty part", lambda: _parts((3, 0, 5))),
        Case("scores about 800", lambda: _parts((2, 4), shift=800.0)),
        Case("scores about -800", lambda: _parts((2, 4), shift=-800.0)),
        Case("a head without keys", lambda: _parts((2, 4), empty=(1,))),
        Case("heads 1,600 apart", lambda: _apart()),
    ),
)  # fmt: skip


def _apart() -> tuple:
    o, lse = _parts((3, 4))
    return o, lse + torch.tensor([800.0, -800.0])


# -- decode_step --


def decode_step(cache: SmallCache, q: Tensor, kv: Tensor, gates: Tensor) -> Tensor:
    """Write the newest token of each row to the cache, and attend: q [B, HQ, D] to o [B, HQ, D]."""
    c, o = cache, torch.zeros_like(q)
    for b, t in enumerate(c.lengths.tolist()):  # t: the newest token's position
        # write
        c.pending[b, t % c.pending.shape[1]] = kv[b, 0]
        c.tokens[b, t] = kv[b, 1]
        c.window[b, t % c.window.shape[1]] = kv[b, 2]
        first = t + 1 - c.length  # of the tokens whose summary may be complete
        if first >= 0 and first % c.stride == 0:
            place = torch.arange(first, t + 1) % c.pending.shape[1]
            c.summaries[b, first // c.stride] = c.pending[b, place].mean(0)
        # attend
        seen = max(0, (t + 1 - c.length) // c.stride + 1)
        o_cmp, p = attend(q[b], c.summaries[b, :seen])
        own = t // c.block_size
        score = block_scores(p.sum(0), own + 1, c)
        score[[0, max(own - 1, 0), own]] = torch.inf
        block = score.topk(min(c.top_n, own + 1)).indices
        token = (block[:, None] * c.block_size + torch.arange(c.block_size)).flatten()
        o_slc, _ = attend(q[b], c.tokens[b, token[token <= t]])
        latest = torch.arange(max(0, t + 1 - c.window_size), t + 1) % c.window.shape[1]
        o_swa, _ = attend(q[b], c.window[b, latest])
        o[b] = (gates[b, :, :, None] * torch.stack([o_cmp, o_slc, o_swa])).sum(0)
    c.lengths += 1
    return o


def _type(
    step: Callable, q: Tensor, kv: Tensor, gates: Tensor, sizes: dict, before: tuple, cuts: dict,
    has_nan: bool,
) -> object:  # fmt: skip
    """Let a function type: `q [steps, B, HQ, D]`, `kv [steps, B, 3, 2, D]`, `gates [steps, B, 3,
    HQ]` to the outputs `[steps, B, HQ, D]`.

    Args:
        step: the function.
        q, kv, gates: of each step.
        sizes: of the cache.
        before: how many tokens each row has already.
        cuts: before which steps how many tokens are taken back, of each row.
        has_nan: places that nothing was written to hold NaN, not another text.
    """
    B, D = q.shape[1], q.shape[-1]
    cache, found = new_cache(B, 40, D, **sizes), []
    if not has_nan:  # what another text left
        for i, x in enumerate((cache.tokens, cache.summaries, cache.window, cache.pending)):
            x.copy_(3 * _random(*x.shape, seed=200 + i))
    _fill(cache, before)
    for i in range(len(q)):
        if i in cuts:
            cache.lengths -= torch.tensor(cuts[i])
        gave = step(cache, q[i].clone(), kv[i].clone(), gates[i].clone())
        if not isinstance(gave, Tensor):
            return gave
        found.append(gave)
    return torch.stack(found)


def _fill(cache: SmallCache, before: tuple) -> None:
    """Give each row its first tokens."""
    for b, tokens in enumerate(before):
        x = _random(tokens, 3, 2, cache.tokens.shape[-1], seed=100 + b)
        for t in range(tokens):
            cache.pending[b, t % cache.pending.shape[1]] = x[t, 0]
            cache.tokens[b, t] = x[t, 1]
            cache.window[b, t % cache.window.shape[1]] = x[t, 2]
        for j in range(max(0, (tokens - cache.length) // cache.stride + 1)):
            window = x[j * cache.stride : j * cache.stride + cache.length, 0]
            cache.summaries[b, j] = window.mean(0)
        cache.lengths[b] = tokens


_SIZES = {"block_size": 4, "top_n": 4, "window_size": 5, "length": 4, "stride": 2}


def _typing(
    name: str, steps: int, *, HQ: int = 2, D: int = 3, before: tuple = (0,),
    cuts: dict | None = None, has_nan: bool = False, **sizes: int,
) -> Case:  # fmt: skip
    """A text of some steps, in so many rows as `before` has."""

    def arguments() -> tuple:
        B = len(before)
        shapes = ((steps, B, HQ, D), (steps, B, 3, 2, D), (steps, B, 3, HQ))
        q, kv, gates = (_random(*shape, seed=i) for i, shape in enumerate(shapes))
        return 2 * q, kv, torch.sigmoid(gates), {**_SIZES, **sizes}, before, cuts or {}, has_nan

    return Case(name, arguments)


_STEP = TEXTS.exercise(
    "decode_step", minutes=38, difficulty=3, solution=decode_step, run=_type, tolerance=1e-8,
    forbidden=(("nsa_tutorial", "the course's own function"),),
    stages=(
        Stage("first tokens", (
            _typing("one token, one head", 1, HQ=1, D=2),
            _typing("three tokens", 3),
        )),
        Stage("a window", (
            _typing("seven tokens, a window of 5", 7, length=40),
            _typing("twelve tokens, so that the ring wraps", 12, length=40),
        )),
        Stage("a list", (
            _typing("twenty tokens, lists of 3 blocks of 4", 20, length=40, top_n=3),
            _typing("thirty-two tokens, lists of 3 blocks of 4", 32, length=40, top_n=3),
        )),
        Stage("a summary arrives", (
            _typing("four tokens, the first summary", 4),
            _typing("seven tokens, two summaries", 7),
            _typing("twenty-six tokens, so that the ring of pending tokens wraps", 26),
            _typing("thirty tokens, summaries of 6", 30, length=6, block_size=6),
            _typing("thirteen tokens, summaries of 5, one every 2", 13, length=5),
        )),
        Stage("ragged rows", (
            _typing("rows of 5 and 2 tokens, and one more", 1, before=(5, 2)),
            _typing("rows of 3, 17 and 0 tokens, and eight more", 8, before=(3, 17, 0)),
            _typing("rows of 6 and 9 tokens, and NaN in all other places", 3, before=(6, 9),
                    has_nan=True),
        )),
        Stage("taken back", (
            _typing("seven tokens, three taken back, six others", 13, cuts={7: (3,)}),
            _typing("rows of 16 and 11 tokens, of which two and three are taken back", 9,
                    before=(16, 11), cuts={0: (2, 3), 4: (1, 2)}),
        )),
    ),
    misconceptions=diffs(decode_step, [
        ("seen = max(0, (t + 1 - c.length)", "seen = max(0, (t + 2 - c.length)",
         "a summary that is seen one token early",
         "With tokens 0 to 2 written, is a summary of 4 tokens complete?"),
        ("seen = max(0, (t + 1 - c.length)", "seen = max(0, (t - c.length)",
         "a summary that is seen one token late",
         "The newest token is written before it attends. How many tokens are there then, `t` or "
         "`t + 1`?"),
        ({"(t + 1 - c.length) // c.stride": "(t - c.length) // c.stride",
          "token[token <= t]": "token[token < t]",
          "torch.arange(max(0, t + 1 - c.window_size), t + 1)":
          "torch.arange(max(0, t - c.window_size), t)"},
         "reading without the newest token",
         "It is written before it attends, so it is among what it reads. How many tokens are there "
         "by then, `t` or `t + 1`?"),
        ({"first = t + 1 - c.length": "first = t - c.length",
          "torch.arange(first, t + 1)": "torch.arange(first, t)",
          "(t + 1 - c.length) // c.stride": "(t - c.length) // c.stride",
          "token[token <= t]": "token[token < t]",
          "torch.arange(max(0, t + 1 - c.window_size), t + 1)":
          "torch.arange(max(0, t - c.window_size), t)"},
         "reading without the newest token"),
        ("first % c.stride == 0", "(t + 1) % c.stride == 0",
         "a summary at multiples of the stride",
         "With summaries of 5 tokens, one every 2, the first is complete after 5 tokens and the "
         "next after 7. What do 5 and 7 have in common?"),
        ("seen = max(0, (t + 1 - c.length) // c.stride + 1)", "seen = t // c.stride + 1",
         "summaries that have only begun",
         "A summary is complete with its last token, not with its first. How many are complete "
         "after 3 tokens, with summaries of 4?"),
        ("seen = max(0, (t + 1 - c.length) // c.stride + 1)",
         "seen = max(0, (t + 1 - c.length) // c.stride)",
         "a summary that is seen one stride late",
         "The first summary is complete after `length` tokens. How many does your line count?"),
        ("c.summaries[b, :seen]", "c.summaries[b]", "summaries that are not complete",
         "The buffer has room for more summaries than are complete. How many of its places does "
         "the length allow?"),
        ("c.pending[b, place].mean(0)", "c.pending[b, place].sum(0)", "a sum in place of a mean",
         "A summary is the plain mean of its tokens. How many are they?"),
        ("c.pending[b, place].mean(0)", "c.pending[b, : c.length].mean(0)",
         "a summary of the wrong tokens once the ring has wrapped",
         "In a ring, token `t` lies in place `t % ring`. In which places do the last `length` "
         "tokens lie?"),
        ("c.pending[b, place].mean(0)", "c.pending[b, -c.length :].mean(0)",
         "a summary of the wrong tokens once the ring has wrapped"),
        ("c.pending[b, place].mean(0)", "c.pending[b].mean(0)",
         "a summary of the whole ring",
         "The ring is longer than a summary, so that tokens can be taken back. Which of its "
         "places belong to the last `length` tokens?"),
        ("c.pending[b, place].mean(0)", "c.tokens[b, first : t + 1].mean(0)",
         "a summary of another branch's keys",
         "Each branch has keys of its own. In which buffer are those of compression?"),
        ("= kv[b, 0]", "= kv[b, 1]", "a summary of another branch's keys"),
        ("enumerate(c.lengths.tolist())", "enumerate((c.lengths + 1).tolist())",
         "the new length taken for the newest token's position",
         "The first token of a text has position 0. How long is the text before it is written?"),
        ("t + 1 - c.window_size", "t - c.window_size", "a window of one token too many",
         "A window of 5 that ends with token 9 begins with token 5. Count yours."),
        ("t + 1 - c.window_size", "t + 2 - c.window_size", "a window of one token too few",
         "The newest token is in its own window. With a window of 5 that ends with token 9, which "
         "is the first?"),
        ("c.window[b, latest]", "c.window[b]", "a window as long as its ring",
         "The ring is longer than the window, and at first it has empty places. Which places hold "
         "the latest `window_size` tokens?"),
        ("c.window[b, latest]", "c.window[b, : t + 1]", "a window as long as its ring"),
        ("torch.arange(max(0, t + 1 - c.window_size), t + 1) % c.window.shape[1]",
         "torch.arange(min(t + 1, c.window_size))", "the first places of the ring, not the latest "
         "tokens", "Token `t` lies in place `t % ring`. Where does the newest token lie once the "
         "ring has wrapped?"),
        ({"t % c.window.shape[1]": "t % c.window_size",
          "t + 1) % c.window.shape[1]": "t + 1) % c.window_size"},
         "a ring of another size than its buffer",
         "Each ring has as many places as its buffer, so that tokens can be taken back. How many "
         "has the window's ring, and how many the pending one?"),
        ({"t % c.pending.shape[1]": "t % c.length",
          "t + 1) % c.pending.shape[1]": "t + 1) % c.length"},
         "a ring of another size than its buffer"),
        ("t + 1) % c.window.shape[1]", "t + 1) % c.window_size",
         "the first places of the ring, not the latest tokens"),
        ("t + 1) % c.pending.shape[1]", "t + 1) % c.length",
         "a summary of the wrong tokens once the ring has wrapped"),
        ({"if first >= 0": "count = c.__dict__.setdefault('count', {})\n"
          "        count.setdefault(b, max(0, (t - c.length) // c.stride + 1))\n"
          "        if first >= 0",
          "c.summaries[b, first // c.stride]": "count[b] += 1\n"
          "            c.summaries[b, count[b] - 1]",
          "seen = max(0, (t + 1 - c.length) // c.stride + 1)": "seen = count[b]"},
         "a counter of summaries",
         "Taking tokens back lowers `lengths`, and nothing lowers your counter. What does the "
         "length alone say?"),
        ({"if first >= 0": "count = c.__dict__.setdefault('count', {})\n"
          "        count.setdefault(b, 0)\n"
          "        if first >= 0",
          "c.summaries[b, first // c.stride]": "count[b] += 1\n"
          "            c.summaries[b, count[b] - 1]",
          "seen = max(0, (t + 1 - c.length) // c.stride + 1)": "seen = count[b]"},
         "a counter of summaries"),
        ("seen = max(0, (t + 1 - c.length) // c.stride + 1)",
         "most = c.__dict__.setdefault('most', {})\n"
         "        seen = max(0, (t + 1 - c.length) // c.stride + 1, most.get(b, 0))\n"
         "        most[b] = seen",
         "a summary that outlives its tokens",
         "Taking tokens back lowers `lengths` and erases nothing. Which summaries does the length "
         "alone allow?"),
        ("if first >= 0 and first % c.stride == 0:",
         "made = c.__dict__.setdefault('made', set())\n"
         "        if first >= 0 and first % c.stride == 0 and (b, first) not in made:\n"
         "            made.add((b, first))",
         "keeping a summary of tokens that were taken back",
         "A place that is not empty may hold the past that was taken back. When does the last "
         "token of a summary come again?"),
        ("enumerate(c.lengths.tolist())", "enumerate([max(c.lengths.tolist())] * len(q))",
         "the longest row's length for all rows",
         "A row of 2 tokens beside one of 5: in which place does its next token belong?"),
        ("enumerate(c.lengths.tolist())", "enumerate([int(c.lengths[0])] * len(q))",
         "the first row's length for all rows",
         "Each row has a length of its own. Where in `lengths` does row `b` find it?"),
        ("[0, max(own - 1, 0), own]", "[0]", "a list without one of the two latest blocks",
         "No summary covers the newest tokens yet, so the score of their block is 0. Which blocks "
         "does NSA list whatever their score?"),
        ("[0, max(own - 1, 0), own]", "[0, own]", "a list without one of the two latest blocks"),
        ("[0, max(own - 1, 0), own]", "[max(own - 1, 0), own]", "a list without the first block",
         "NSA always lists the two latest blocks, and one more. Which?"),
        ("[0, max(own - 1, 0), own]", "[own]", "a list without the first block"),
        ("min(c.top_n, own + 1)", "own + 1", "all blocks in place of a list",
         "Your lists hold every block. How many may they hold, and which are always among them?"),
        ("min(c.top_n, own + 1)", "min(c.top_n + 3, own + 1)",
         "the fixed blocks in addition to `top_n`",
         "A list has `top_n` blocks at most. Do the first and the two latest count among them?"),
        ("o_slc, _ = attend(q[b], c.tokens[b, token[token <= t]])",
         "listed = torch.isin(torch.arange(c.tokens.shape[1]), token[token <= t])\n"
         "        s = q[b] @ c.tokens[b, :, 0].T * q.shape[-1] ** -0.5\n"
         "        s = s.masked_fill(~listed, -torch.inf)\n"
         "        o_slc = torch.softmax(s, -1) @ c.tokens[b, :, 1]",
         "a place that is masked, but loaded",
         "A weight of 0 times NaN is NaN. Can you index the places that you need, in place of "
         "masking the others?"),
        ("token[token <= t]", "token[token < t]", "a list without the newest token",
         "It lies in the own block, and is written before it attends. What keeps it out?"),
        ("own = t // c.block_size", "own = (t + 1) // c.block_size",
         "an own block that comes one token early",
         "With blocks of 4, tokens 0 to 3 are in block 0. Which block is that of token 3?"),
        ("score = block_scores(p.sum(0), own + 1, c)", "score = p.new_zeros(own + 1)",
         "a list that no score decides",
         "Of the blocks that are not fixed, the best are listed. Which of the functions that you "
         "are given says how good each block is?"),
        ("token[token <= t]", "token", "tokens that are not written yet",
         "The own block ends after the newest token. Which of its tokens exist?"),
        ("p.sum(0)", "p[0]", "a list by the first head alone",
         "All heads of a group share a list. Whose weights decide on it?"),
        ({"    c.lengths += 1\n": "", "        o[b] = (gates": "        c.lengths += 1\n"
          "        o[b] = (gates"}, "counting the newest token once for each row",
         "`c.lengths += 1` adds to all rows at once. How often does your loop say it?"),
        ("    c.lengths += 1\n", "", "never counting the newest token",
         "After the call, the cache holds one token more. Where is that noted?"),
        ("c.tokens[b, t] = kv[b, 1]", "c.tokens[b, t] = kv[b, 0]",
         "one branch's keys in another's buffer",
         "`kv` holds compression, selection, window, in this order. Which one do the lists read?"),
        ("= kv[b, 2]", "= kv[b, 1]", "one branch's keys in another's buffer"),
        ({"c.tokens[b, t] = kv[b, 1]": "c.tokens[b, t] = kv[b, 2]", "= kv[b, 2]": "= kv[b, 1]"},
         "one branch's keys in another's buffer"),
        ("[o_cmp, o_slc, o_swa]", "[o_slc, o_cmp, o_swa]", "a gate on another branch's output",
         "Axis 1 of `gates` is in the order of `kv`: compression, selection, window. In which "
         "order are your outputs?"),
        ("[o_cmp, o_slc, o_swa]", "[o_swa, o_slc, o_cmp]", "a gate on another branch's output"),
        ("[o_cmp, o_slc, o_swa]", "[0 * o_cmp, o_slc, o_swa]", "a sum without the summaries",
         "Three branches are added up. Which of them is missing, now that there are summaries?"),
        ("(gates[b, :, :, None] * torch", "(torch",
         "branches without their gates",
         "The three outputs are not simply added. What multiplies each, head by head?"),
    ]),
)  # fmt: skip


EXERCISES = (_COMPLETE, _MERGE, _STEP)


# -- two mistakes at once --

DOUBLES = (
    Double("complete_summaries", names=(
        "forgetting the first summary", "a number of summaries below 0")),
    Double("merge_parts", names=("a natural lse under exp2", "NaN for a head without keys")),
    Double("decode_step", names=(
        "a summary that is seen one token late", "a list by the first head alone")),
)  # fmt: skip


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    read_for_a_token={"unit": "MiB", "choices": (3, 11, 43, 128)},
)
