"""Exercises of chapter 13: the inverse list, and the backward along lists in Triton; optional, the
rows of a step, shares of a long list, the queries of a window's keys, two programs that store to
one place, and the gradient of a choice."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.course.attempts import expect_unchanged
from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.endless import refuse_leaving_a_loop, tree_of
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.launches import NotLaunched, counting
from nsa_tutorial.course.room import roomy
from nsa_tutorial.course.texts import Texts
from nsa_tutorial.runtime import environment

TEXTS = Texts(__name__)

Element = tuple[str, int]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- inverse_list --


def inverse_list(lists: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """The queries that list each block, one block after the other, and where each block's begin."""
    S = lists.shape[1]
    block = torch.where(lists < 0, num_blocks, lists).flatten()  # empty slots: behind all blocks
    block, entry = block.sort(stable=True)
    bounds = torch.searchsorted(block, torch.arange(num_blocks + 1))
    return entry[: bounds[-1]] // S, bounds


_INVERSE = TEXTS.exercise(
    "inverse_list",
    returns=("queries", "bounds"),
    minutes=12,
    difficulty=2,
    solution=inverse_list,
    misconceptions=diffs(inverse_list, [
        ("// S", "% S", "the slot in place of the query",
         "A place in the flattened lists is `query * S + slot`. Which of the two is the "
         "remainder?"),
        ({"return entry": "return block", " // S": ""},
         "the sorted blocks in place of their queries",
         "A sort returns two things: the sorted values, and where each came from. Which one says "
         "whose entry it was?"),
        ("block, entry = block.sort(stable=True)",
         "entry = block.numel() - 1 - block.flip(0).argsort(stable=True)\n    block = block[entry]",
         "a block's queries in descending order",
         "Equal keys should stay in the order of their queries. What is a sort called that "
         "promises that?"),
        ("stable=True", "stable=True, descending=True", "sorting the blocks in descending order",
         "`torch.searchsorted` expects numbers that ascend, and block 0 comes first. Which "
         "number sends the empty slots to the end all the same?"),
        ({"torch.where(lists < 0, num_blocks, lists)": "lists",
          "stable=True": "stable=True, descending=True"}, "sorting the blocks in descending order"),
        ("block, entry = block.sort(stable=True)", "entry = block.argsort(stable=True)",
         "searching the blocks before they are sorted",
         "`torch.searchsorted` halves a sorted list again and again. Which of your tensors is "
         "sorted?"),
        ({"return ": "return (", ", bounds": ", bounds)[::-1]"}, "the two results exchanged",
         "The queries come first, then the bounds."),
        ("block, entry = block.sort(stable=True)",
         "entry = (block < num_blocks).nonzero().flatten()\n    block = block.sort().values",
         "leaving the entries in the order of the lists",
         "The queries of block 0 have to stand next to each other. What brings them together?"),
        ({"return ": "return list((", ", bounds": ").tensor_split(bounds[1:-1])), bounds"},
         "a list for each block in place of one flat list",
         "A GPU has no lists of lists. With all queries in one flat list, what do the bounds say?"),
        ({"return ": "return list((", ", bounds": ").tensor_split(bounds[1:-1]))"},
         "a list for each block in place of one flat list"),
        (", bounds", ", bounds.diff()", "counts in place of bounds",
         "A count says how many queries a block has. Where does its stretch begin?"),
        ("num_blocks + 1)", "num_blocks + 1), right=True",
         "where each block ends in place of where it begins",
         "`bounds[b]` is where block b's stretch begins. What has to be `bounds[0]`?"),
        ("num_blocks + 1", "num_blocks", "leaving out the end of the last block",
         "Block b's stretch is `queries[bounds[b] : bounds[b + 1]]`. What is that for the last "
         "one?"),
        (", bounds", ", bounds[:-1]", "leaving out the end of the last block"),
        (", bounds", ", bounds[1:]", "leaving out where block 0 begins",
         "Block 0's stretch is `queries[bounds[0] : bounds[1]]`. What has to be `bounds[0]`?"),
        ({"torch.where(lists < 0, num_blocks, lists)": "lists", "[: bounds[-1]]": ""},
         "letting empty slots sort in front",
         "-1 is smaller than every block, so a sort puts it before block 0. Which number would "
         "send it behind all blocks?"),
        ("torch.where(lists < 0, num_blocks, lists)", "lists.clamp(min=0)",
         "taking an empty slot for block 0",
         "An empty slot names no block. Whose gradient do its queries add to now?"),
        ("[: bounds[-1]]", "", "keeping the empty slots at the end",
         "Behind the last block stand the entries that name none. Where does the last block's "
         "stretch end?"),
        ("torch.where(lists < 0, num_blocks, lists).flatten()", "lists[lists >= 0]",
         "dropping the empty slots before the sort",
         "Without the empty slots, the places behind them have moved up. Which query does place "
         "1 belong to now?"),
        (" // S", "", "the place of an entry in place of its query",
         "The sort tells places in the flattened lists. Each query has `S` of them. Which query "
         "does place 5 belong to, with two slots?"),
        ("// S", "// len(lists)", "dividing by the number of queries",
         "Each query has `S` places in the flattened lists. With two slots, which query does "
         "place 5 belong to?"),
        ("// S", "% len(lists)", "the remainder by the number of queries",
         "A place in the flattened lists is `query * S + slot`. By what do you divide, and is the "
         "query the quotient or the remainder?"),
        ({".flatten()": ".T.flatten()", "// S": "% len(lists)"},
         "flattening the lists slot by slot",
         "First come all queries that list a block in slot 0, then those with slot 1. In which "
         "order do the queries of a block have to stand?"),
        (".flatten()", ".T.flatten()", "flattening the lists slot by slot",
         "After `.T`, the slots 0 of all queries come first. Which query does place 1 belong to "
         "now? And in which order would a block's queries come?"),
        ("lists < 0", "lists <= 0", "taking block 0 for an empty slot",
         "An empty slot is -1, and blocks are numbered from 0. Which queries list block 0?"),
        ("return entry[: bounds[-1]] // S, bounds", "return [], []", "returning two empty lists",
         "Take block 0 of the case below, by hand. Which queries have a 0 in their list?"),
        (", bounds", ", bounds.unique()", "leaving out blocks that nobody lists",
         "A program looks up its block by number. At which place does it find block 2 if block 1 "
         "has no bound?"),
    ]),
    cases=(
        Case("two blocks, one slot", lambda: (torch.tensor([[0], [1], [0]]), 2)),
        Case("an empty slot", lambda: (torch.tensor([[0, -1], [0, 1], [1, 0]]), 2)),
        Case("two slots", lambda: (torch.tensor([[0, 1], [1, 0], [1, 2]]), 3)),
        Case("a block that nobody lists", lambda: (torch.tensor([[0, -1], [2, 0], [2, 0]]), 3)),
        Case("a query that lists nothing",
             lambda: (torch.tensor([[-1, 0], [-1, -1], [3, 1], [1, -1]]), 5)),
        Case("three slots",
             lambda: (torch.tensor([[0, -1, -1], [0, 1, -1], [2, 0, 1], [3, 0, 2]]), 4)),
        Case("everybody lists block 0",
             lambda: (torch.tensor([[0, b // 2] for b in range(2, 10)]), 5)),
    ),
)  # fmt: skip


# -- triton_selected_backward --


@triton.jit
def walk_list(
    GradO, Q, K, V, LSE, Delta, Lists, GradQ, N, M, H, S, scale,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """`GradQ` of one query and KV head, along its list; the grid is `(N, H)`."""
    # -- locate the program --
    query, head = tl.program_id(0), tl.program_id(1)
    row = (query * H + head) * G + tl.arange(0, G)  # [G], counted in query heads
    width, value_width = tl.arange(0, D), tl.arange(0, DV)

    # -- load the query group --
    q_tile = tl.load(Q + row[:, None] * D + width)  # [G, D]
    do_tile = tl.load(GradO + row[:, None] * DV + value_width)  # [G, DV]
    lse = tl.load(LSE + row)
    delta = tl.load(Delta + row)
    acc_dq = tl.zeros([G, D], tl.float32)

    for slot in range(S):
        # -- guard --
        block = tl.load(Lists + (query * H + head) * S + slot)
        key = block * BS + tl.arange(0, BS)  # [BS]
        is_seen = (block >= 0) & (key <= M - N + query)

        # -- load the keys and the values --
        key_row = (key * H + head)[:, None]  # [BS, 1]
        k_tile = tl.load(K + key_row * D + width, mask=is_seen[:, None], other=0.0)
        v_tile = tl.load(V + key_row * DV + value_width, mask=is_seen[:, None], other=0.0)

        # -- weights --
        s = scale * tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [G, BS]
        p = tl.where(is_seen, tl.exp(s - lse[:, None]), 0.0)

        # -- gradient of the scores --
        d_p = tl.dot(do_tile, v_tile.T, input_precision="ieee")
        d_s = p * (d_p - delta[:, None])

        # -- accumulate --
        acc_dq = tl.dot(d_s, k_tile, acc_dq, input_precision="ieee")

    # -- store --
    tl.store(GradQ + row[:, None] * D + width, scale * acc_dq)


@triton.jit
def walk_inverse_list(
    GradO, Q, K, V, LSE, Delta, Queries, Bounds, GradK, GradV, N, M, H, scale,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """`GradK` and `GradV` of one block and KV head, from the queries that list the block; the grid
    is `(blocks, H)`."""
    # -- locate the program --
    head = tl.program_id(1)
    key = tl.program_id(0) * BS + tl.arange(0, BS)[:, None]  # [BS, 1]
    key_row, is_key = key * H + head, key < M
    width, value_width = tl.arange(0, D), tl.arange(0, DV)

    # -- load the keys and the values --
    k_tile = tl.load(K + key_row * D + width, mask=is_key, other=0.0)
    v_tile = tl.load(V + key_row * DV + value_width, mask=is_key, other=0.0)
    acc_dk = tl.zeros([BS, D], tl.float32)
    acc_dv = tl.zeros([BS, DV], tl.float32)

    bound = Bounds + head * (tl.num_programs(0) + 1) + tl.program_id(0)
    for place in range(tl.load(bound), tl.load(bound + 1)):
        # -- load the queries --
        query = tl.load(Queries + place)
        row = (query * H + head) * G + tl.arange(0, G)  # [G], all heads of the group
        q_tile = tl.load(Q + row[:, None] * D + width)
        do_tile = tl.load(GradO + row[:, None] * DV + value_width)
        lse = tl.load(LSE + row)
        delta = tl.load(Delta + row)

        # -- weights --
        s = scale * tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BS, G], a key a row
        p = tl.where(key <= M - N + query, tl.exp(s - lse), 0.0)

        # -- gradient of the values --
        acc_dv = tl.dot(p, do_tile, acc_dv, input_precision="ieee")

        # -- gradient of the scores --
        d_p = tl.dot(v_tile, do_tile.T, input_precision="ieee")
        d_s = p * (d_p - delta)

        # -- gradient of the keys --
        acc_dk = tl.dot(d_s, q_tile, acc_dk, input_precision="ieee")

    # -- store --
    tl.store(GradK + key_row * D + width, scale * acc_dk, mask=is_key)
    tl.store(GradV + key_row * DV + value_width, acc_dv, mask=is_key)


def triton_selected_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, lists: Tensor,
    queries: Tensor, bounds: Tensor, block_size: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [N, HQ, D], k [M, H, D] and v [M, H, DV]: two kernels, no atomic adds."""
    (N, HQ, D), (M, H, DV) = q.shape, v.shape
    delta = (d_o * o).sum(-1)  # [N, HQ]
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sizes = {"G": HQ // H, "D": D, "DV": DV, "BS": block_size}
    given = (d_o, q, k, v, lse, delta)
    walk_list[N, H](*given, lists, d_q, N, M, H, lists.shape[2], scale, **sizes)
    num_blocks = bounds.shape[1] - 1
    walk_inverse_list[num_blocks, H](*given, queries, bounds, d_k, d_v, N, M, H, scale, **sizes)
    return d_q, d_k, d_v


@triton.jit
def _walk_with_atomics(
    GradO, Q, K, V, LSE, Delta, Lists, GradQ, GradK, GradV, N, M, H, S, scale,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    query, head = tl.program_id(0), tl.program_id(1)
    row = (query * H + head) * G + tl.arange(0, G)
    width, value_width = tl.arange(0, D), tl.arange(0, DV)
    q_tile = tl.load(Q + row[:, None] * D + width)
    do_tile = tl.load(GradO + row[:, None] * DV + value_width)
    lse, delta = tl.load(LSE + row), tl.load(Delta + row)
    acc_dq = tl.zeros([G, D], tl.float32)
    for slot in range(S):
        block = tl.load(Lists + (query * H + head) * S + slot)
        key = block * BS + tl.arange(0, BS)
        is_seen = (block >= 0) & (key <= M - N + query)
        key_row, mask = (key * H + head)[:, None], is_seen[:, None]
        k_tile = tl.load(K + key_row * D + width, mask=mask, other=0.0)
        v_tile = tl.load(V + key_row * DV + value_width, mask=mask, other=0.0)
        s = scale * tl.dot(q_tile, k_tile.T, input_precision="ieee")
        p = tl.where(is_seen, tl.exp(s - lse[:, None]), 0.0)
        d_s = p * (tl.dot(do_tile, v_tile.T, input_precision="ieee") - delta[:, None])
        acc_dq = tl.dot(d_s, k_tile, acc_dq, input_precision="ieee")
        d_k = scale * tl.dot(d_s.T, q_tile, input_precision="ieee")
        tl.atomic_add(GradK + key_row * D + width, d_k, mask=mask)
        d_v = tl.dot(p.T, do_tile, input_precision="ieee")
        tl.atomic_add(GradV + key_row * DV + value_width, d_v, mask=mask)
    tl.store(GradQ + row[:, None] * D + width, scale * acc_dq)


def _by_atomics(d_o, q, k, v, o, lse, lists, queries, bounds, block_size, scale):
    """One kernel: the program of a query adds its share of `d_k` and `d_v` to memory."""
    (N, HQ, D), (M, H, DV) = q.shape, v.shape
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    _walk_with_atomics[N, H](
        d_o, q, k, v, lse, (d_o * o).sum(-1), lists, d_q, d_k, d_v, N, M, H, lists.shape[2], scale,
        G=HQ // H, D=D, DV=DV, BS=block_size,
    )  # fmt: skip
    return d_q, d_k, d_v


class _Asked(NamedTuple):
    """What a stage of the backward looks at.

    Attributes:
        keys: whether it looks at `d_k` and `d_v`, too.
        twice: whether it looks at the bits of a second run.
    """

    keys: bool
    twice: bool


class RoundedInputs(Exception):
    """A GPU would round the inputs of a product to TF32, and the interpreter does not."""


def _run_backward(solution: Callable, asked: _Asked, *given: object) -> object:
    """What a stage looks at: `d_q`, all gradients, or whether a second run gives the same bits.

    Raises:
        NotLaunched: if the second kernel is missing, or a kernel is one that Triton's compiler
            refuses.
        RoundedInputs: if a product would be rounded on a GPU.
    """
    if not asked.keys:
        with _only_the_first_may_fail() as failed:
            first = _gradients_of(solution, given)
        d_q = first[0] if isinstance(first, tuple | list) and first else first
        if failed and not (isinstance(d_q, Tensor) and d_q.isfinite().all() and d_q.any()):
            raise failed[0]
        return d_q
    first = _gradients_of(solution, given)
    if isinstance(first, tuple) and any(x is None for x in first[1:]):
        raise NotLaunched("`d_q` is done. Now the second kernel: it gives `d_k` and `d_v`.")
    if not asked.twice:
        return first
    with _last_program_first():
        second = _gradients_of(solution, given)
    pairs = zip(first, second, strict=True)
    return tuple(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _gradients_of(solution: Callable, given: tuple) -> object:
    """Launch it: NaN lies around the tensors."""
    floats = {torch.float32: torch.nan, torch.int32: 2**24}
    tensors = [roomy(x, floats[x.dtype]) if isinstance(x, Tensor) else x for x in given]
    with np.errstate(all="ignore"), counting("triton") as launched:
        found = solution(*tensors)
    for kernel in dict.fromkeys(launched):
        _expect_compiled_alike(kernel)
    expect_unchanged([x.cpu() if isinstance(x, Tensor) else x for x in tensors], given)
    if isinstance(found, tuple | list):
        return tuple(x.cpu() if isinstance(x, Tensor) else x for x in found)
    return found.cpu() if isinstance(found, Tensor) else found


def _expect_compiled_alike(kernel: Callable) -> None:
    """Refuse what a CPU interprets and a GPU's compiler refuses, or computes with fewer bits."""
    tree = tree_of(kernel)
    if tree is None:
        return
    refuse_leaving_a_loop(kernel, tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot"):
            continue
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        is_exact = options.get("input_precision", "'ieee'") != "'tf32'" and not (
            options.keys().isdisjoint({"input_precision", "allow_tf32", None})
        )
        if not is_exact:
            raise RoundedInputs(
                f"a `tl.dot` of `{kernel.__name__}` would round fp32 to TF32's ten bits on a GPU. "
                'Add `input_precision="ieee"`.'
            )


@contextmanager
def _only_the_first_may_fail() -> Iterator[list[Exception]]:
    """An error of a launch behind the first is noted, not raised: `d_q` may be right without it.
    Only Triton's interpreter is asked; a GPU's errors are raised as they are."""
    failed: list[Exception] = []
    if not environment.is_interpreted():
        yield failed
        return
    from triton.runtime.interpreter import GridExecutor

    launch, begun = GridExecutor.__call__, []

    def launched(self: GridExecutor, *arguments: object, **options: object) -> None:
        begun.append(self)
        try:
            launch(self, *arguments, **options)
        except Exception as error:
            if len(begun) == 1:
                raise
            failed.append(error)

    with mock.patch.object(GridExecutor, "__call__", launched):
        yield failed


@contextmanager
def _last_program_first() -> Iterator[None]:
    """Triton's interpreter runs the programs of a launch in the opposite order. A GPU chooses an
    order of its own at each launch."""
    if not environment.is_interpreted():
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    begin = InterpreterBuilder.set_grid_idx

    def mirrored(self: InterpreterBuilder, *program: int) -> None:
        begin(self, *(n - 1 - i for i, n in zip(program, self.grid_dim, strict=True)))

    with mock.patch.object(InterpreterBuilder, "set_grid_idx", mirrored):
        yield


def _backward_case(
    name: str, lists: list, M: int, *, keys: bool = False, twice: bool = False, far: bool = False
) -> Case:
    """Gradients of random tensors along `lists [H, N, S]`, in blocks of 16 keys and groups of 32
    heads; the queries are the last of `M` positions. Where `far`, the last key's scores are too
    large for `exp`. A group has more heads than a block has keys, so that weights that are not
    turned do not fit."""
    here = environment.detect()

    def arguments() -> tuple:
        ids = torch.tensor(lists, dtype=torch.int32).transpose(0, 1).contiguous()  # [N, H, S]
        (N, H, _), G, D, DV, BS, scale = ids.shape, 32, 16, 32, 16, 0.3
        q, d_o = (_random(N, H * G, width, seed=seed) for seed, width in ((0, D), (1, DV)))
        k, v = (_random(M, H, width, seed=seed) for seed, width in ((2, D), (3, DV)))
        k[-1] *= 1e3 if far else 1
        key = torch.arange(M)
        is_listed = (ids[..., None] == key // BS).any(2)  # [N, H, M]
        is_seen = is_listed & (key <= (M - N + torch.arange(N))[:, None, None])
        keys_of, values_of = (x.transpose(0, 1)[None, :, None] for x in (k, v))  # [1, H, 1, M, …]
        s = scale * (q.unflatten(1, (H, G, 1)) * keys_of).sum(-1)  # [N, H, G, M]
        s = s.masked_fill(~is_seen[:, :, None], -torch.inf)
        lse = s.logsumexp(-1)  # [N, H, G]
        p = torch.exp(s - lse[..., None]).nan_to_num()  # 0 where nothing is listed
        o = (p[..., None] * values_of).sum(-2).flatten(1, 2)
        inverse = [inverse_list(ids[:, head], -(-M // BS)) for head in range(H)]
        starts = [0, *accumulate(len(found) for found, _ in inverse)]
        queries = torch.cat([found for found, _ in inverse]).int()
        bounds = torch.stack([b + n for (_, b), n in zip(inverse, starts, strict=False)]).int()
        of_forward = (d_o, q, k, v, o, lse.flatten(1))
        return _Asked(keys, twice), *of_forward, ids, queries, bounds, BS, scale

    return Case(name, arguments, lambda: here.why_not("triton", here.device))


_BACKWARD = TEXTS.exercise(
    "triton_selected_backward", minutes=50, difficulty=3, solution=triton_selected_backward,
    parts=(walk_list, walk_inverse_list), run=_run_backward, returns=("d_q", "d_k", "d_v"),
    tolerance=1e-4, launches="triton",
    forbidden=(
        ("torch.autograd", "autograd"),
        ("nsa_tutorial", "the course's own function"),
        ("torch.matmul", "PyTorch's matrix product"),
        ("torch.__matmul__", "PyTorch's matrix product"),
        ("torch.bmm", "PyTorch's matrix product"),
        ("torch.einsum", "PyTorch's `einsum`"),
    ),
    stages=(
        Stage("dQ of one block", (
            _backward_case("two queries that list one block, all of it visible", [[[0], [0]]], 32),
        )),
        Stage("dQ of many blocks", (
            _backward_case("two queries, three visible blocks", [[[0, 1, 2], [2, 0, 1]]], 64),
        )),
        Stage("hidden keys and empty rows", (
            _backward_case("a query inside of a block that it lists", [[[0, 2]]], 40),
            _backward_case("an empty slot", [[[-1, 2], [0, -1]]], 40),
            _backward_case("a query that lists nothing", [[[1], [-1]]], 40),
        )),
        Stage("two KV heads", (
            _backward_case("two KV heads with lists of their own",
                           [[[0, 2], [1, 0]], [[1, 2], [2, -1]]], 48),
        )),
        Stage("dK and dV", (
            _backward_case("three queries, two blocks", [[[0, 1], [0, -1], [1, 0]]], 40,
                           keys=True),
            _backward_case("queries inside of a block that they list",
                           [[[0, 2], [1, 2], [2, -1]]], 40, keys=True),
            _backward_case("a block that nobody lists", [[[2], [0]]], 40, keys=True),
            _backward_case("a hidden key with large scores", [[[2], [0]]], 40, keys=True,
                           far=True),
        )),
        Stage("the sum over each group", (
            _backward_case("two groups, each with an inverse list of its own",
                           [[[0, 2], [1, 0], [0, -1]], [[1, 2], [2, -1], [-1, -1]]], 48,
                           keys=True),
        )),
        Stage("repeatable", (
            _backward_case("four queries that list one block, twice", [[[0]] * 4], 32,
                           keys=True, twice=True),
        )),
    ),
    misconceptions=diffs(triton_selected_backward, [
        ("scale * acc_dq", "acc_dq", "a gradient of the queries without the scale",
         "Line 5 of chapter 12: by what is `d_s @ k` multiplied?"),
        ("s = scale * tl.dot(q_tile", "s = tl.dot(q_tile", "weights from scores without the scale",
         "`lse` is that of the *scaled* scores. Are yours scaled?"),
        ("s = scale * tl.dot(k_tile", "s = tl.dot(k_tile", "weights from scores without the scale"),
        ("p * (d_p - delta[:, None])", "p * d_p", "leaving delta out",
         "A score that rises takes weight from the others. What do they lose together?"),
        ("p * (d_p - delta)", "p * d_p", "leaving delta out"),
        ("d_p - delta[:, None]", "d_p + delta[:, None]", "adding delta",
         "A key gains where it beats its row's average. What is done to the average then?"),
        ("d_p - delta)", "d_p + delta)", "adding delta"),
        ("d_p - delta[:, None]", "d_p - tl.sum(p * d_p, axis=1)[:, None]",
         "delta from one block's keys",
         "The row has keys in other blocks, too. Which two tensors of the forward and the loss "
         "give the sum over all of them?"),
        ("tl.where(is_seen, tl.exp(s - lse[:, None]), 0.0)",
         "tl.softmax(tl.where(is_seen, s, float('-inf')), 1, keep_dims=True)",
         "a softmax over one block's keys",
         "The row has keys in other blocks, too. Which number of the forward knows them?"),
        ("tl.exp(s - lse[:, None])", "tl.exp(s - lse)", "a number of each row along the columns",
         "`s` has a row for each head, and so has `lse`. Which axis does `lse` lack?"),
        ("d_p - delta[:, None]", "d_p - delta", "a number of each row along the columns"),
        ("tl.exp(s - lse[:, None])", "tl.exp(s)", "weights that do not sum to 1",
         "Line 1 is more than `exp(s)`. Which number of the forward holds the row's sum?"),
        ("tl.exp(s - lse[:, None])", "tl.exp2(s - lse[:, None])", "`exp2` of natural scores",
         "`exp2` wants exponents in base two. In which base are `s` and `lse` here?"),
        ("acc_dq = tl.dot(d_s, k_tile, acc_dq,", "acc_dq = tl.dot(d_s, k_tile,",
         "the share of the last block alone",
         "Each block of the list adds to `d_q`. What happens to the sum so far?"),
        ("tl.dot(d_s, k_tile, acc_dq", "tl.dot(p, k_tile, acc_dq",
         "the weights where d_q wants the gradient of the scores",
         "A query acts through its scores. Which matrix says how the loss follows them?"),
        ("block * BS + tl.arange", "block + tl.arange", "an id for the number of a key",
         "Block 2 begins at key 2 · BS. Where does your tile begin?"),
        ("(block >= 0) & ", "", "loading the keys of an empty slot",
         "Block -1 would begin BS keys before the tensor. What should such a slot load?"),
        ("(key <= M - N + query)", "(key < M)", "keys that come after the query",
         "The last block of a list may reach past the query. Up to which key does query "
         "`query` see?"),
        ("(key <= M - N + query)", "(key <= query)", "a query's number for its position",
         "The queries are the *last* `N` of `M` positions. Where does query 0 stand?"),
        ("key <= M - N + query, tl.exp", "key <= query, tl.exp",
         "a query's number for its position"),
        ("(key <= M - N + query)", "(key < M - N + query)", "hiding a query's own key",
         "A query sees the keys up to its position. Is its own key among them?"),
        ("key <= M - N + query, tl.exp", "key < M - N + query, tl.exp",
         "hiding a query's own key"),
        ("p = tl.where(is_seen, tl.exp(s - lse[:, None]), 0.0)", "p = tl.exp(s - lse[:, None])",
         "NaN for a query that lists nothing",
         "Its `lse` is -inf, so `exp(s - lse)` is infinite, and infinity times 0 is NaN. Which "
         "step can write 0 over it?"),
        ("(query * H + head) * S", "query * S", "one list for all KV heads",
         "Each KV head has a list of its own. How many lists stand before that of `head`?"),
        ("(key * H + head)[:, None]", "(head * M + key)[:, None]", "taking K for `[H, M, D]`",
         "In K `[M, H, D]` the KV heads of one key lie side by side. How far is it from one key "
         "to the next?"),
        ("(key * H + head)[:, None]", "key[:, None]", "rows of K as if there were one KV head",
         "Between two keys of a head lie the rows of the other KV heads. What is the step?"),
        ("(query * H + head) * G + tl.arange(0, G)  # [G], counted",
         "query * H * G + tl.arange(0, G) * H + head  # [G], counted",
         "query heads that read the wrong KV head",
         "Query head `hq` reads KV head `hq // G`, so the heads of a group are neighbours. Which "
         "heads does your program have?"),
        ("(query * H + head) * G + tl.arange(0, G)  # [G], counted",
         "query * G + tl.arange(0, G)  # [G], counted", "forgetting the other groups",
         "Between two queries lie the heads of *all* groups. How many are they?"),
        ("scale * acc_dk", "acc_dk", "a gradient of the keys without the scale",
         "Line 5 of chapter 12: by what is `d_s.T @ q` multiplied?"),
        (", acc_dv, mask", ", scale * acc_dv, mask", "scaling the gradient of the values",
         "Values never meet the scale. Which lines of the five have it?"),
        ("query = tl.load(Queries + place)", "query = place",
         "the place in the inverse list in place of the query",
         "`bounds` says where a block's queries stand. What stands there?"),
        ("head * (tl.num_programs(0) + 1) + tl.program_id(0)", "tl.program_id(0)",
         "the inverse list of KV head 0 for all heads",
         "Each KV head has a row of `bounds`. How long is a row?"),
        ("(tl.num_programs(0) + 1)", "tl.num_programs(0)", "rows of `bounds` without their end",
         "A row of `bounds` has one number more than there are blocks. Where does the row of KV "
         "head 1 begin?"),
        ({'acc_dv = tl.dot(p, do_tile, acc_dv, input_precision="ieee")': "",
          "d_s = p * (d_p - delta)\n": "d_s = p * (d_p - delta)\n        "
          'acc_dv = tl.dot(d_s, do_tile, acc_dv, input_precision="ieee")\n'},
         "the gradient of the scores where d_v wants the weights",
         "A value is summed with its weight. Which matrix holds the weights?"),
        ("tl.dot(p, do_tile", "tl.dot(p.T, do_tile", "a matrix that is not turned",
         "A product sums over the axis that its two matrices share. Over what does `d_v` sum, and "
         "over what does `d_k`?"),
        ("tl.dot(d_s, q_tile", "tl.dot(d_s.T, q_tile", "a matrix that is not turned"),
        ("tl.where(key <= M - N + query, tl.exp(s - lse), 0.0)",
         "tl.where(key <= M - N + query, 1.0, 0.0) * tl.exp(s - lse)", "infinity times 0",
         "The score of a hidden key may be so large that `exp(s - lse)` is infinite, and infinity "
         "times 0 is NaN. Which step can write 0 over it?"),
        ("p = tl.where(key <= M - N + query, tl.exp(s - lse), 0.0)", "p = tl.exp(s - lse)",
         "weights for keys after the query",
         "`exp(s - lse)` does not know which keys a query sees. Which of this block's keys come "
         "after the query?"),
        ("tl.dot(d_s, q_tile, acc_dk", "tl.dot(p, q_tile, acc_dk",
         "the weights where d_k wants the gradient of the scores",
         "A key acts through its scores. Which matrix says how the loss follows them?"),
        ("acc_dk = tl.dot(d_s, q_tile, acc_dk,", "acc_dk = tl.dot(d_s, q_tile,",
         "the share of the last query alone",
         "Every query of the inverse list adds to the sum. What happens to the sum so far?"),
        ({"acc_dk = tl.dot(d_s, q_tile, acc_dk,": "acc_dk = tl.dot(d_s, q_tile,",
          "acc_dv = tl.dot(p, do_tile, acc_dv,": "acc_dv = tl.dot(p, do_tile,"},
         "the share of the last query alone"),
        ("(query * H + head) * G + tl.arange(0, G)  # [G], all",
         "(query * H + head) * G + 0 * tl.arange(0, G)  # [G], all",
         "one head of the group again and again",
         "All heads of the group have used this block. Which row of `Q` does each of them have?"),
        ({"scale * acc_dk": "scale / G * acc_dk", ", acc_dv, mask": ", acc_dv / G, mask"},
         "the mean over a group where its sum is meant",
         "All heads of a group use the same key. Do their effects average, or add up?"),
        ("return d_q, d_k, d_v", "return d_q, d_v, d_k", "d_v before d_k",
         "The order of the results is queries, keys, values. Which one do you return second?"),
        ({"s = scale * tl.dot(q_tile": "s = tl.dot(q_tile", "scale * acc_dq": "acc_dq"},
         "no scale at all",
         "The scores are `scale * q @ k.T`. In which of the five lines does the scale stand?"),
        ("walk_list[N, H]", "walk_list[N, 1]", "a program for each query alone",
         "Each KV head has a group of its own, and your programs have the first one. How many "
         "programs does a query need?"),
        ("bounds.shape[1] - 1", "len(k) // block_size", "leaving out a block that `M` cuts short",
         "40 keys are two blocks of 16, and 8 keys more. How many programs is that?"),
        (_by_atomics, "sums whose order depends on the launch",
         "Several programs add to one place, and they come in another order each time. Without "
         "atomic adds, some shares get lost as well. Which program could add all shares of a "
         "block by itself, one query after the other?"),
    ], parts=(walk_list, walk_inverse_list), pairs=False),
)  # fmt: skip


# -- rows_of_step --


def rows_of_step(queries: list[int], step: int, head: int, H: int, G: int, BR: int) -> list[int]:
    """The rows of Q, seen as [N * H * G, D], that a program loads in one step; -1 past its end."""
    index = step * BR + torch.arange(BR)  # [BR], query after query, head after head
    is_row = index < len(queries) * G
    query = torch.tensor(queries)[(index // G).clamp(max=len(queries) - 1)]
    row = (query * H + head) * G + index % G
    return torch.where(is_row, row, -1).tolist()


_STEP = TEXTS.exercise(
    "rows_of_step",
    minutes=10,
    difficulty=2,
    solution=rows_of_step,
    misconceptions=diffs(rows_of_step, [
        ({"len(queries) * G": "len(queries)", "index // G": "index", "index % G": "0"},
         "taking one head of each group",
         "Every head of the group has used this block's keys. What happens to the shares of the "
         "others?"),
        ("torch.tensor(queries)", "torch.arange(len(queries))",
         "the place in the chunk in place of the query",
         "A row's place in the chunk is not its place in Q. What does `queries` hold?"),
        ("len(queries) * G", "len(queries)", "as many rows as the chunk has queries",
         "`len(queries)` counts queries. How many rows are they, with `G` heads each?"),
        ("(query * H + head) * G", "query * H + head * G", "too short a step from query to query",
         "How many rows of Q belong to one query, over all its KV heads?"),
        ("(query * H + head) * G", "query * H + head",
         "counting in KV heads where rows are query heads",
         "`query * H + head` is a row of K. How many rows of Q stand for one row of K?"),
        (" + index % G", "", "the group's first head again and again",
         "Each query has `G` rows for this KV head, and they lie side by side. How do they "
         "differ?"),
        ("(query * H + head) * G", "query * H * G", "leaving `head` out",
         "These are the rows of KV head 0, whichever `head` the program has. How many rows of a "
         "query stand before those of `head`?"),
        ({"len(queries) * G": "len(queries) * H * G", "index // G": "index // (H * G)",
          "(query * H + head) * G + index % G": "query * H * G + index % (H * G)"},
         "taking the heads of all groups",
         "The heads of another group read other keys, and have a list of their own. How many "
         "heads share this KV head?"),
        ({"index // G": "index % len(queries)", "index % G": "index // len(queries)"},
         "all queries of one head first",
         "The sum is the same, but the group's heads lie side by side in memory. Which order "
         "loads them together?"),
        ({"index = step * BR + torch.arange(BR)": "n, index = max(BR // G, 1), torch.arange(BR)",
          "index < len(queries) * G": "(step * n + index % n < len(queries)) & (index // n < G)",
          "index // G": "step * n + index % n", "index % G": "index // n"},
         "all queries of one head first"),
        ("(query * H + head) * G", "query * G", "forgetting the other KV heads",
         "Between two queries lie the heads of *all* KV heads. How many are they?"),
        ("(query * H + head) * G", "(query + head) * G", "forgetting the other KV heads"),
        ("(query * H + head) * G + index % G", "(query * G + index % G) * H + head",
         "taking Q for `[N, G, H, D]`",
         "In Q `[N, H, G, D]` the heads of one group lie side by side. How far is it from one of "
         "them to the next?"),
        ("(query * H + head) * G", "(head * len(queries) + query) * G",
         "taking Q for `[H, N, G, D]`",
         "In Q `[N, H, G, D]` all KV heads of a query come before the next query. By what do you "
         "multiply the query, then?"),
        ("torch.where(is_row, row, -1)", "row[is_row]", "a short list without −1",
         "A tile has `BR` rows in every step. What stands in the rows that the chunk cannot fill?"),
        ("torch.where(is_row, row, -1)", "row", "loading rows past the end of the chunk",
         "The last step may have fewer rows than the tile. Whose gradient do the others add to?"),
        ({".clamp(max=len(queries) - 1)": "", "torch.where(is_row, row, -1)": "row"},
         "asking for queries past the end of the chunk",
         "Which rows does a step have past the chunk's end?"),
        ("row, -1", "row, 0", "row 0 in place of −1",
         "Row 0 of Q is a query like any other. How does your list say that nothing is loaded?"),
        ({"step * BR + torch.arange(BR)": "step * (BR // G) * G + torch.arange(BR // G * G)",
          ".tolist()": ".tolist() + [-1] * (BR % G)"}, "taking whole queries only",
         "Where `G` does not divide `BR`, whole queries leave rows of the step idle. Whose heads "
         "could fill them?"),
        ("step * BR + torch.arange(BR)", "step * (BR // G) * G + torch.arange(BR // G * G)",
         "taking whole queries only"),
        ("step * BR", "step * (BR // G) * G", "starting each step with a whole query",
         "Where `G` does not divide `BR`, step 0 ends inside a query. With which of its heads "
         "does step 1 begin?"),
        ({"(index // G).clamp(max=len(queries) - 1)": "torch.where(is_row, index // H, 0)",
          "index % G": "index % H"}, "dividing by the number of KV heads",
         "In the chunk, each query has the `G` rows of one group. By which number do you divide "
         "to find the query?"),
        ({"(index // G).clamp(max=len(queries) - 1)": "torch.where(is_row, index // H, 0)",
          "index % G": "index % H", "len(queries) * G": "len(queries) * H"},
         "dividing by the number of KV heads"),
        ("index % G", "index % H", "the remainder by the number of KV heads",
         "The quotient by `G` is the query. The remainder of which division is the head of its "
         "group?"),
        ("index % G", "torch.arange(BR) % G", "counting heads from the beginning of the step",
         "Where `G` does not divide `BR`, a step may begin inside of a query. Which number has its "
         "first row in the chunk?"),
        ("index // G", "torch.arange(BR) // G", "the first queries of the chunk in every step",
         "Step 1 begins `BR` rows later. Which number has its first row in the chunk?"),
        ({"index // G": "index % G", "index % G": "index // G"},
         "quotient and remainder exchanged",
         "The chunk's rows 0 to `G - 1` are all heads of one query. Which of the two is the same "
         "for all of them?"),
        ("index // G", "index % G", "the remainder in place of the query",
         "The chunk's rows 0 to `G - 1` are all heads of one query. Is it their remainder by `G` "
         "that is the same?"),
        ({"(index // G).clamp(max=len(queries) - 1)": "torch.where(is_row, index % G, 0)",
          "+ index % G": "+ index // G"}, "quotient and remainder exchanged"),
        ("(index // G).clamp(max=len(queries) - 1)", "torch.where(is_row, index % G, 0)",
         "the remainder in place of the query"),
        ("+ index % G", "+ index // G", "the quotient in place of the head",
         "The chunk's rows 0 to `G - 1` are all heads of one query. Which of quotient and "
         "remainder tells them apart?"),
        ("+ index % G", "+ index", "the number of the row in place of the head",
         "A group has `G` heads, and the chunk may have thousands of rows. What is left of a row's "
         "number once its query is taken out?"),
        ("index // G", "index % len(queries)", "the remainder by the number of queries",
         "The heads of one query come before the next query. Which number changes after every "
         "`G` rows?"),
        ("index // G", "index // BR", "dividing by the rows of a step",
         "A step has `BR` rows, a query has `G`. Which of the two tells when the next query "
         "begins?"),
        ("index % G", "index % BR", "the remainder by the rows of a step",
         "A step has `BR` rows, a query has `G`. Which of the two tells how many heads there "
         "are?"),
        ("(query * H + head) * G", "(query * G + head) * H", "`H` and `G` mixed up",
         "A query has `H` groups of `G` heads. How many rows of `Q` does one group take?"),
        ("(query * H + head) * G + index % G", "(head * G + index % G) * H + query",
         "letting the query move by one row",
         "In Q `[N, H, G, D]` the heads of one query lie side by side. How many rows is it from "
         "one query to the next?"),
        ("step * BR", "step * BR * G", "counting a step in queries",
         "A step has `BR` *rows*. How many queries is that, with `G` heads each?"),
        ("step * BR", "step", "moving on by one row a step",
         "A step loads `BR` rows, so step 0 has the rows 0 to `BR - 1`. Where does step 1 begin?"),
        ("step * BR + ", "", "loading the first step's rows in every step",
         "Which row of the chunk does step 1 begin with?"),
    ]),
    cases=(
        Case("one query, a group of 2", lambda: ([3], 0, 0, 1, 2, 2)),
        Case("two KV heads", lambda: ([1, 4], 0, 1, 2, 2, 4)),
        Case("three KV heads, groups of 2", lambda: ([1, 4], 0, 1, 3, 2, 4)),
        Case("the last rows do not exist", lambda: ([0, 2], 0, 1, 2, 3, 8)),
        Case("the second step", lambda: ([1, 2, 5], 1, 0, 2, 4, 8)),
        Case("a query on both sides of a step", lambda: ([1, 2, 6], 1, 1, 2, 3, 4)),
        Case("three KV heads, groups of 1", lambda: ([2, 3, 7, 8, 9], 1, 2, 3, 1, 4)),
        Case("groups of 5, the third step", lambda: ([0, 3, 4, 8, 9], 2, 1, 3, 5, 8)),
    ),
)  # fmt: skip


# -- chunk_lengths --


def chunk_lengths(count: int, length: int) -> list[int]:
    """How many queries each chunk of a block has, the shorter ones first."""
    num_chunks = max(count // length, 1) if count else 0
    # chunk i begins at count * i / n, rounded down, and ends where the next one begins
    bounds = [count * i // num_chunks for i in range(num_chunks)] + [count]
    return sorted(end - start for start, end in pairwise(bounds))


_LENGTHS = TEXTS.exercise(
    "chunk_lengths",
    minutes=4,
    difficulty=1,
    solution=chunk_lengths,
    misconceptions=diffs(chunk_lengths, [
        ("count // length", "count // (2 * length)", "as few chunks as possible",
         "More chunks are more programs at work. What is the largest number of them that leaves "
         "each at least `length`?"),
        ("[count * i // num_chunks for i in range(num_chunks)] + [count]",
         "[*range(0, count, length), count]", "chunks of one length, and a short rest",
         "A rest of one query costs a program and a place in the workspace, too. What if all "
         "chunks took a part of the rest?"),
        ({"[count * i // num_chunks for i in range(num_chunks)] + [count]":
          "[*range(0, count, length), count]",
          "sorted(": "list("}, "chunks of one length, and a short rest"),
        ("count // length", "-(-count // length)", "one chunk more, and all of them shorter",
         "With 11 queries and a length of 4, three chunks have fewer than 4 each. How many "
         "chunks of *at least* 4 are there?"),
        ("end - start", "count // num_chunks", "losing the rest",
         "Add up your lengths. Whose gradient is missing?"),
        ("pairwise(bounds))", "pairwise(bounds))[::-1]", "the longest first",
         "Which lengths does the statement ask for first?"),
        ({"max(": "(", ", 1)": ")"}, "dropping a block with few queries",
         "A block that three queries list has a gradient, too. How many chunks does it need?"),
        (" if count else 0", "", "a chunk for a block that nobody lists",
         "Without queries there is nothing to sum. How many programs does that take?"),
        ("count * i // num_chunks", "count // num_chunks * i", "giving the whole rest to one chunk",
         "The kernel is done when its longest program is. By how much do the most equal lengths "
         "differ?"),
        ("sorted(", "list(", "leaving the lengths as the chunks come",
         "With `count * i // n`, longer and shorter chunks take turns. Which ones does the "
         "statement ask for first?"),
    ]),
    cases=(
        Case("two full chunks", lambda: (8, 4)),
        Case("three queries over", lambda: (11, 4)),
        Case("fewer than `length`", lambda: (3, 4)),
        Case("nobody lists it", lambda: (0, 4)),
        Case("nearly twice the length", lambda: (7, 4)),
        Case("three chunks", lambda: (14, 4)),
        Case("four chunks, two over", lambda: (30, 7)),
        Case("a long list", lambda: (51, 6)),
    ),
)  # fmt: skip


# -- window_queries --


def window_queries(start: int, BT: int, window_size: int, N: int) -> tuple[int, int]:
    """The queries that see some of BT keys: the first of them, and the end of their range."""
    last_key = start + BT - 1
    return start, min(last_key + window_size, N)


_WINDOW = TEXTS.exercise(
    "window_queries",
    minutes=5,
    difficulty=1,
    solution=window_queries,
    misconceptions=diffs(window_queries, [
        ("last_key + window_size", "start + window_size",
         "stopping behind the queries that see the first key",
         "The last key of the tile stands `BT - 1` later. How long do queries see *that* one?"),
        ("last_key + window_size", "start + BT", "stopping at the end of the tile",
         "Queries behind the tile look back into it. How far back does a window reach?"),
        ("start, min(last_key + window_size, N)",
         "max(start - window_size + 1, 0), min(start + BT, N)",
         "the keys that a tile of queries sees",
         "That is the forward's question. Here the tile is of keys. On which side of a key do "
         "its queries stand?"),
        ("return start", "return last_key", "waiting until the whole tile is seen",
         "A query in the middle of the tile sees its first half. Does that half learn from it?"),
        ("min(last_key + window_size, N)", "N", "walking on to the end of the text",
         "So it is without a window. Query `t` sees the keys from `t - window_size + 1` on. "
         "Which is the last query that sees the tile's last key?"),
        ({"return start,": "return tuple(range(start,", ", N)": ", N)))"},
         "the queries themselves in place of two numbers",
         "The queries stand side by side. Which two numbers does a `range` of them need?"),
        ({"return start,": "return range(start,", ", N)": ", N))"},
         "the queries themselves in place of two numbers"),
        ("return start, ", "return ", "returning the end alone",
         "The end is right. With which query does the walk begin?"),
        ("+ window_size", "+ window_size - 1", "one query too few",
         "Key `i` is seen by the queries `i` to `i + window_size - 1`. How many are they?"),
        ("+ window_size", "+ window_size + 1", "one query too many",
         "With a window of 1, a query sees itself alone. Which is the last query that sees key "
         "`i`?"),
        ("last_key + window_size", "start + BT * window_size",
         "a window for each key, one behind the other",
         "The windows of neighbouring keys overlap. By how much does one more key move the end?"),
        ({"return start, ": "return ", ", N)": ", N), start"}, "the two results exchanged",
         "Where the walk begins comes first."),
        (", N)", ", N) - 1", "the last query itself in place of the end",
         "A `range` stops before its end. Which number has to be its end?"),
        ({"min(": "(", ", N)": ")"}, "running past the last query",
         "The text ends. What is loaded for a query that is not there?"),
        (", N)", ", N - 1)", "leaving out the text's last query",
         "The queries are 0 to `N - 1`, and a `range` stops before its end. What is the largest "
         "end?"),
    ]),
    cases=(
        Case("two keys, a window of 3", lambda: (4, 2, 3, 20)),
        Case("a window of 1", lambda: (2, 2, 1, 20)),
        Case("the first tile", lambda: (0, 4, 4, 20)),
        Case("near the end of the text", lambda: (8, 4, 5, 13)),
        Case("a window longer than the tile", lambda: (3, 3, 8, 40)),
        Case("a tile longer than the window", lambda: (8, 8, 2, 40)),
        Case("the last tile, not full", lambda: (16, 4, 6, 18)),
    ),
)  # fmt: skip


# -- audit --


def audit(
    tensors: list[tuple[str, int]], stores: list[tuple[int, str, int]]
) -> tuple[list[Element], list[Element]]:
    """The elements that nobody stores, and those that more than one program stores."""
    programs = {(name, i): set() for name, size in tensors for i in range(size)}
    for program, name, offset in stores:
        programs[name, offset].add(program)
    never = [element for element, who in programs.items() if not who]
    raced = [element for element, who in programs.items() if len(who) > 1]
    return never, raced


_AUDIT = TEXTS.exercise(
    "audit",
    minutes=5,
    difficulty=2,
    solution=audit,
    misconceptions=diffs(audit, [
        ({"never =": "stored = {(name, i): [] for _, name, i in stores}\n    never =",
          "if not who": "if stored[element]"}, "looking up elements that nobody stored",
         "An element that nobody stored has no key. Who could give every element one?"),
        ("if not who", "if element[0] not in [name for _, name, _ in stores]",
         "reporting only tensors that are empty as a whole",
         "A tensor of which half is stored has another half. What stands there?"),
        ("[element for element, who in programs.items() if len(who) > 1]", "[]",
         "never reporting a race",
         "Two programs that store to one element are a race. Where do you collect who stores?"),
        ("[element for element, who in programs.items() if not who]", "[]",
         "never reporting a missing element",
         "Some elements occur in `tensors` and not in `stores`. Where do you look for them?"),
        ("return never, raced", "return [], []", "reporting nothing",
         "Begin with the elements that nobody stores. Which elements are there, and which of "
         "them occur in `stores`?"),
        ("if not who", "if element not in stores", "looking for pairs among triples",
         "`stores` holds `(program, name, offset)`, so a pair `(name, offset)` is never in it. "
         "Which part of a store do you compare?"),
        ({"if not who": "if element not in stores", "len(who) > 1": "stores.count(element) > 1"},
         "looking for pairs among triples"),
        ("[element for element, who in programs.items() if len(who) > 1]",
         "[(name, i) for _, name, i in stores if len(programs[name, i]) > 1]",
         "an element once for each of its stores",
         "A place that two programs store to is one element. How do you name it once?"),
        ("> 1", "> 2", "looking for three programs", "How many does it take to race?"),
        ("[element for element, who in programs.items() if len(who) > 1]",
         "[store for store in stores if len(programs[store[1:]]) > 1]",
         "the stores in place of the elements",
         "A place that two programs store to is one element, however many stores it has. How do "
         "you name it once?"),
        ({"set() for name, size in tensors for i in range(size)": "[] for _, name, i in stores",
          ".add(": ".append("}, "looking at `stores` alone",
         "What nobody stored is not in `stores`. Go through the elements of `tensors`: how many "
         "different programs stored to each?"),
        ("return never, raced",
         "return tuple(list(dict.fromkeys(name for name, _ in x)) for x in (never, raced))",
         "the tensors' names in place of their elements",
         "Half of a tensor may be fine. Which elements are not?"),
        ("return never, raced", "return raced, never", "the two results exchanged",
         "The elements that nobody stores come first."),
        ({"set()": "[]", ".add(": ".append("}, "counting stores in place of programs",
         "One program may store twice, one after the other: the second is what stays. Who has to "
         "store for the winner to be unknown?"),
        ("len(who) > 1", "who", "reporting every element that is stored",
         "One program for each element is as it should be. How many are too many?"),
        ("range(size)", "range(size) if name in [n for _, n, _ in stores]",
         "forgetting tensors that nobody stores to",
         "A tensor that is never stored does not occur in `stores`. From where do you know that "
         "it exists?"),
        ("in stores:", "in [(p, name, i) for p, _, i in stores for name, n in tensors if i < n]:",
         "mixing up the tensors",
         "Offset 0 of `o` and offset 0 of `lse` are two places. What tells them apart?"),
        ("[element for element, who in programs.items() if len(who) > 1]",
         "[b[1:] for a, b in pairwise(stores) if a[1:] == b[1:] and a[0] != b[0]]",
         "comparing neighbouring stores alone",
         "Programs run in any order, so two stores to one place may stand far apart. What could "
         "you collect for each place?"),
        ("return never, raced", "return sorted(never), sorted(raced)",
         "another order than that of `tensors`",
         "Go through the elements of `tensors`, and pick. In which order do they come then?"),
        ("return never, raced",
         "return never, sorted(raced, key=[(name, i) for _, name, i in stores].index)",
         "another order than that of `tensors`"),
    ]),
    cases=(
        Case("two elements, two programs", lambda: ([("o", 2)], [(0, "o", 0), (1, "o", 0)])),
        Case("one program stores twice",
             lambda: ([("o", 2)], [(0, "o", 0), (0, "o", 0), (1, "o", 1)])),
        Case("a tensor that nobody stores to", lambda: ([("o", 1), ("lse", 2)], [(4, "o", 0)])),
        Case(
            "two tensors, one of them shared",
            lambda: (
                [("o", 2), ("lse", 2)],
                [(0, "o", 0), (0, "lse", 0), (1, "o", 1), (1, "lse", 0)],
            ),
        ),
        Case("one place, far apart",
             lambda: ([("a", 3)], [(0, "a", 1), (1, "a", 0), (2, "a", 2), (3, "a", 1)])),
        Case(
            "stored from the back",
            lambda: (
                [("o", 2), ("lse", 3)],
                [(0, "lse", 1), (1, "lse", 1), (0, "lse", 0), (0, "o", 0), (1, "o", 0)],
            ),
        ),
        Case(
            "three tensors",
            lambda: (
                [("x", 2), ("y", 1), ("z", 2)],
                [(2, "x", 1), (0, "z", 1), (1, "z", 0), (0, "z", 0), (2, "z", 0)],
            ),
        ),
    ),
)  # fmt: skip


# -- slot_gradient --


def slot_gradient(d_s: Tensor, s: Tensor, is_seen: Tensor) -> Tensor:
    """The gradient [S] of one query's factors, at ones, from all heads of its group."""
    return (d_s * s).masked_fill(~is_seen, 0).sum((0, 2))


_SLOT = TEXTS.exercise(
    "slot_gradient",
    minutes=5,
    difficulty=2,
    solution=slot_gradient,
    misconceptions=diffs(slot_gradient, [
        (" * s", "", "leaving the scores out",
         "That is the gradient of a number *added* to the slot's scores. The factor multiplies "
         "them. By how much does a score change when the factor does?"),
        (" * s", " * s.exp()", "the exponential in place of the score",
         "`d_s` already is the gradient with respect to the score, behind the softmax. How does "
         "`factor * s` change with the factor?"),
        ({"(d_s * s)": "(d_s.masked_fill(~is_seen, 0).sum(2) * s",
          ".sum((0, 2))": ".sum(2)).sum(0)"}, "summing before multiplying",
         "Each key has its own score and its own gradient. In which order do the sums and the "
         "product belong?"),
        ("(d_s * s)", "d_s.masked_fill(~is_seen, 0).sum((0, 2)) * s", "summing before multiplying"),
        (".sum(", ".mean(", "averaging over heads and keys",
         "The factor stands in the score of every key, for every head. Are effects averaged?"),
        (", 0)", ", 0).div(is_seen.sum(1, keepdim=True).clamp(min=1))", "averaging over the keys",
         "The factor stands in each key's score. Are effects averaged?"),
        (".sum((0, 2))", ".sum(2)", "a gradient for each head",
         "The group has one list, and one factor for each slot. Which axis has to go?"),
        (".sum((0, 2))", ".sum(0)", "a gradient for each key",
         "All keys of a slot share one factor. Which axis has to go, too?"),
        (".sum((0, 2))", ".sum()", "one number for all slots",
         "Each slot has a factor of its own. Which axis stays?"),
        (".sum((0, 2))", ".sum((0, 1))", "summing over the slots, not over their keys",
         "The axes are heads, slots, keys. Which one should be left?"),
        ("return ", "return -", "the sign turned round",
         "A gradient points to where the loss grows. Who turns it round?"),
        (".masked_fill(~is_seen, 0)", "", "NaN from a hidden key",
         "A hidden score is `-inf` and its gradient is 0. `0 * -inf` is NaN, and NaN times a "
         "mask is NaN still. What writes 0 whatever stood there?"),
        (".sum((0, 2))", "[:1].sum((0, 2))", "taking one head of the group",
         "One factor serves all heads of the group. Through how many of them does it act?"),
        (".sum((0, 2))", ".sum(2).mean(0)", "averaging over the heads",
         "The heads do not share one effect, each has its own. What do effects do?"),
    ]),
    cases=(
        Case(
            "one head, two slots of two keys",
            lambda: (
                torch.tensor([[[1.0, 2.0], [-4.0, 1.0]]]),
                torch.tensor([[[3.0, 1.0], [0.5, 2.0]]]),
                torch.tensor([[True, True], [True, True]]),
            ),
        ),
        Case(
            "two heads, one hidden key",
            lambda: (
                torch.tensor([[[1.0, 2.0]], [[-3.0, 0.0]]]) * torch.tensor([1.0, 0.0]),
                torch.tensor([[[2.0, -torch.inf]], [[1.0, -torch.inf]]]),
                torch.tensor([[True, False]]),
            ),
        ),
        Case("three heads, two slots, all seen", lambda: _of_slots(3, 2, 3, hidden=0, seed=1)),
        Case("two heads, three slots, hidden keys", lambda: _of_slots(2, 3, 4, hidden=2, seed=2)),
        Case("four heads, a slot that is empty", lambda: _of_slots(4, 3, 2, hidden=2, seed=3)),
    ),
)  # fmt: skip


def _of_slots(G: int, S: int, BS: int, *, hidden: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of `slot_gradient`, with the last `hidden` keys of the last slot hidden."""
    is_seen = torch.ones(S, BS, dtype=torch.bool)
    is_seen[-1, BS - hidden :] = False
    s = _random(G, S, BS, seed=seed).masked_fill(~is_seen, -torch.inf)
    d_s = _random(G, S, BS, seed=seed + 100).masked_fill(~is_seen, 0)
    return d_s, s, is_seen


EXERCISES = (_INVERSE, _BACKWARD, _STEP, _WINDOW, _LENGTHS, _AUDIT, _SLOT)


DOUBLES = (
    Double(
        "inverse_list",
        names=("taking an empty slot for block 0", "the place of an entry in place of its query"),
    ),
    Double(
        "rows_of_step",
        names=("taking one head of each group", "loading rows past the end of the chunk"),
    ),
    Double(
        "chunk_lengths", names=("as few chunks as possible", "giving the whole rest to one chunk")
    ),
    Double("slot_gradient", names=("leaving the scores out", "averaging over the heads")),
    Double(
        "window_queries",
        names=("stopping behind the queries that see the first key", "running past the last query"),
    ),
    Double(
        "audit",
        names=("counting stores in place of programs", "forgetting tensors that nobody stores to"),
    ),
)


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    queries_of_a_block={"tolerance": 0.03},
    fastest_backward={"choices": ("slots", "one pass", "two passes")},
    killed_idea={"choices": ("contention", "volume", "both")},
    peaked_choice={"unit": "%"},
)
