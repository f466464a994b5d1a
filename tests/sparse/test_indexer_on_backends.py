"""The choice by an indexer on every backend: the reference's in fp64, to the last id. Scores are
whole numbers, which every dtype holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from places import places_of, product, skip_unless_runs
from test_indexer import CASES as GEOMETRIES
from test_indexer import Case
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.kernels.tables import tiles
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]

BACKENDS = ["reference", "tilelang", "triton"]
places_but_slowest = places_of(BACKENDS, slow=["tilelang"])
OWN, FREE, ENDS = (4, 0, 1), (3, 0, 0), (5, 1, 2)
# how a kernel walks depends on whether a step holds whole blocks, and on how many there are
CASES = {
    "nothing divides anything": (GEOMETRIES["nothing divides anything"], ENDS),
    "plain products": (GEOMETRIES["plain products, a head a list"], OWN),
    "one list for all heads": (GEOMETRIES["one list for all heads"], FREE),
    "more keys than queries": (GEOMETRIES["more keys than queries"], OWN),
    "packed, one empty": (GEOMETRIES["packed, one empty"], ENDS),
    "blocks of 8": (Case(N=70, M=80, H=1, J=2, DI=24, BS=8), OWN),
    "blocks longer than a step": (Case(N=9, M=300, H=1, J=2, BS=70), (2, 0, 0)),
    "blocks of 128": (Case(N=9, M=400, J=1, DI=80, BS=128, weighted=False), (2, 0, 1)),
    "tokens": (Case(N=60, M=60, H=1, BS=1), (20, 0, 0)),
    "many tokens a list": (Case(N=20, M=300, H=1, BS=1), (100, 3, 2)),
    "many tokens": (Case(N=3, M=4200, H=1, J=1, BS=1), (9, 1, 1)),
    "many sequences": (Case(B=30, N=1, M=20, H=1, BS=4), FREE),
    "several parts": (Case(N=3, M=2300, H=2, J=1, BS=64), OWN),
}
QUICK = {
    torch.float32: [
        "nothing divides anything", "packed, one empty", "blocks of 8", "blocks longer than a step",
        "many tokens a list",
    ],
    torch.float16: ["plain products"],
    torch.bfloat16: ["tokens"],
}  # fmt: skip


def whole_numbers(case: Case, dtype: torch.dtype, device: str) -> list[Tensor | None]:
    tensors = replace(case, whole=True).make(dtype)
    return [None if x is None else x.to(device) for x in tensors]


def options_of(case: Case, pick: tuple[int, int, int], device: str) -> dict[str, object]:
    options = dict(zip(("top_n", "num_initial", "num_local"), pick, strict=True))
    cu_seqlens = None if case.cu is None else case.offsets.to(device)
    return options | {"block_size": case.BS, "kv_heads": case.H, "cu_seqlens": cu_seqlens}


def doubled(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in tensors]


@product(
    "case", CASES, BACKENDS, QUICK, slow={"tilelang": []},  # it compiles two kernels for each
    rest={"reference": []},
)  # fmt: skip
def test_the_choice(
    case: tuple[Case, tuple[int, int, int]], dtype: torch.dtype, backend: str, device: str
) -> None:
    skip_unless_runs(backend, device, dtype)
    shape, pick = case
    tensors, options = whole_numbers(shape, dtype, device), options_of(shape, pick, device)
    ids = ops.index_blocks(*tensors, **options, backend=backend)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, ops.index_blocks(*doubled(tensors), **options))


@places_but_slowest
def test_scores_that_are_not_whole(backend: str, device: str) -> None:
    """Of either sign, and of many magnitudes."""
    skip_unless_runs(backend, device)
    case = Case(N=30, M=60, H=1, BS=3)
    q_idx, k_idx, w = (x.float().to(device) for x in case.make())
    k_idx *= 10.0 ** torch.linspace(-6, 6, 60, device=device)[torch.arange(60) * 7 % 60][:, None]
    options = options_of(case, (6, 0, 0), device)
    ids = ops.index_blocks(q_idx, k_idx, w, **options, backend=backend)
    right = ops.index_blocks(*doubled([q_idx, k_idx, w]), **options)
    assert torch.equal(ids, right)


@places_but_slowest
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite(bad: float, backend: str, device: str) -> None:
    """Others choose the same to the bit; who sees it takes what the reference takes, the forced
    blocks among them. A NaN is the least of all."""
    skip_unless_runs(backend, device)
    case = Case(N=40, M=40, H=2, J=1, BS=4, weighted=False)
    q_idx, k_idx, _ = whole_numbers(case, torch.float32, device)
    options = options_of(case, (4, 1, 1), device)
    before = ops.index_blocks(q_idx, k_idx, **options, backend=backend)
    q_idx[0, 30, 1, 2], k_idx[0, 20, 3] = bad, bad
    q_idx[..., 3] = 1.0  # no 0 times infinity
    q_idx[0, 33], k_idx[0, 37:] = torch.nan, torch.nan
    after = ops.index_blocks(q_idx, k_idx, **options, backend=backend)
    assert torch.equal(after, ops.index_blocks(q_idx, k_idx, **options, backend="reference"))
    assert torch.equal(after < 0, before < 0)
    assert after[0, 33].tolist() == [[0, 1, 2, 8]] * 2  # all alike: the lower ids
    ops.check_block_indices(after, 40, block_size=4)


@places_but_slowest
def test_nothing_leaks(backend: str, device: str) -> None:
    """From the future, or from the next sequence."""
    skip_unless_runs(backend, device)
    case = Case(N=40, M=40, H=1, BS=4, cu=(0, 17, 40))
    tensors = whole_numbers(case, torch.float32, device)
    options = options_of(case, OWN, device) | {"backend": backend}
    before = ops.index_blocks(*tensors, **options)
    for x in tensors:
        x[:, 30:] = torch.nan
    tensors[1][:, :17] = 50.0
    after = ops.index_blocks(*tensors, **options)
    assert torch.equal(before[:, 17:30], after[:, 17:30])


@places_but_slowest
def test_strides_and_weights_of_another_dtype(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    case = Case(B=2, N=9, M=20, BS=4)
    q_idx, k_idx, w = whole_numbers(case, torch.float32, device)
    options = options_of(case, OWN, device) | {"backend": backend}
    right = ops.index_blocks(q_idx, k_idx, w, **options)
    strided = [x.transpose(1, -1).contiguous().transpose(1, -1) for x in (q_idx, k_idx, w)]
    assert not any(x.is_contiguous() for x in strided)
    strided[2] = strided[2].double()
    assert torch.equal(ops.index_blocks(*strided, **options), right)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_nothing_to_do_and_more_slots_than_blocks(backend: str) -> None:
    skip_unless_runs(backend, "cpu")
    q_idx, k_idx, w = whole_numbers(Case(N=9, M=9), torch.float32, "cpu")
    options = {"kv_heads": 2, "block_size": 2**31 - 1, "backend": backend}
    ids = ops.index_blocks(q_idx, k_idx, w, top_n=10**6, **options)
    assert ids.shape == (1, 9, 2, 10**6)
    assert (ids[..., 0] == 0).all() and (ids[..., 1:] == -1).all()
    for q_0, k_0, w_0 in ((q_idx[:0], k_idx[:0], w[:0]), (q_idx[:, :0], k_idx, w[:, :0]),
                          (q_idx[:, :0], k_idx[:, :0], w[:, :0])):  # fmt: skip
        assert ops.index_blocks(q_0, k_0, w_0, **options).shape == (*q_0.shape[:2], 2, 16)


def test_a_choice_has_no_gradient() -> None:
    tensors = [x.requires_grad_() for x in Case().make()]
    assert not ops.index_blocks(*tensors, kv_heads=2).requires_grad


@pytest.mark.parametrize("chunk_rows", [1, 7, 128])
def test_chunks_of_queries(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are cut."""
    skip_unless_runs("triton", "cpu")
    monkeypatch.setattr(tiles, "rows_of_an_index_chunk", lambda per_row, R, H: min(R, chunk_rows))
    case = Case(N=40, M=40, H=1, J=1, BS=4, cu=(0, 17, 17, 40)) if chunk_rows > 1 else Case(N=3)
    tensors, options = whole_numbers(case, torch.float32, "cpu"), options_of(case, OWN, "cpu")
    right = ops.index_blocks(*tensors, **options)
    assert torch.equal(ops.index_blocks(*tensors, **options, backend="triton"), right)


@pytest.mark.parametrize("BQ", [4, 32])
@pytest.mark.parametrize("cu", [None, (0, 3, 3, 4, 40, 41, 90)])
def test_tiles_hold_one_sequence(BQ: int, cu: tuple[int, ...] | None) -> None:
    """All rows lie in one tile each, in order, wherever a chunk begins."""
    B, N, M = (1, 90, 90) if cu else (3, 30, 50)
    offsets = torch.tensor(cu) if cu else None
    rows = query_rows(B, N, M, causal=True, cu_seqlens=offsets, device=torch.device("cpu"))
    for first, last in ((0, B * N), (5, 70), (41, 42)):
        starts = tiles.tile_starts(
            rows.position[first:last], skip=M - N, BQ=BQ, num_sequences=rows.num_sequences
        ).tolist()
        assert starts[0] == 0 and starts[-1] == last - first
        for begin, end in pairwise(starts):
            assert 0 <= end - begin <= BQ
            assert rows.first_key[first + begin : first + end].unique().numel() <= 1


WRONG = {
    "q_idx: a list": ({"q_idx": [1.0]}, TypeError, "q_idx: got .*expected a tensor of shape"),
    "q_idx: rank": ({"q_idx": torch.zeros(9, 6, 8)}, ValueError, "q_idx: got .*4 dimensions"),
    "q_idx: more than keys": ({"k_idx": torch.zeros(1, 8, 8)}, ValueError, "q_idx: got 9 queries"),
    "q_idx: heads": ({"kv_heads": 4}, ValueError, "q_idx: got 6 heads for 4 lists"),
    "k_idx: rank": ({"k_idx": torch.zeros(1, 9, 1, 8)}, ValueError, "k_idx: got .*3 dimensions"),
    "k_idx: width": ({"k_idx": torch.zeros(1, 9, 7)}, ValueError, "k_idx: .*the width of q_idx, 8"),
    "k_idx: batch": ({"k_idx": torch.zeros(2, 9, 8)}, ValueError, "k_idx: .*the batch of q_idx, 1"),
    "k_idx: dtype": ({"k_idx": torch.zeros(1, 9, 8).half()}, TypeError, "k_idx: .*dtype of q_idx"),
    "k_idx: meta": ({"k_idx": torch.zeros(1, 9, 8, device="meta")}, ValueError, "k_idx: .*device"),
    "widths": (
        {"q_idx": torch.zeros(1, 9, 6, 257), "k_idx": torch.zeros(1, 9, 257)}, ValueError,
        "q_idx and k_idx: got width 257, expected 1 to 256",
    ),
    "w: heads": ({"w": torch.zeros(1, 9, 5)}, ValueError, r"w: got .*expected \[B, N, HI\]"),
    "w: ints": ({"w": torch.zeros(1, 9, 6).int()}, TypeError, "w: got .*expected float32"),
    "kv_heads": ({"kv_heads": 0}, ValueError, "kv_heads: got 0"),
    "top_n": ({"top_n": 2, "num_initial": 2}, ValueError, "top_n: got 2, expected at least num_i"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_named(changes: dict, error: type, message: str) -> None:
    q_idx, k_idx, w = whole_numbers(Case(N=9, M=9), torch.float32, "cpu")
    call = {"q_idx": q_idx, "k_idx": k_idx, "w": w, "kv_heads": 2} | changes
    with pytest.raises(error, match=f"^{message}"):
        ops.index_blocks(**call)
