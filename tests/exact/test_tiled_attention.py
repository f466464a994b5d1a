"""Chapter 04: tiled attention equals dense attention for any tiles, never holds the table, and
moves the bytes that are counted."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nsa_tutorial.course import costs
from nsa_tutorial.course.widgets import tiled_attention as pictures
from nsa_tutorial.exact import dense_attention, online_softmax, tiled_attention
from nsa_tutorial.exact import grouped_query_attention as gqa

# B, N, M, HQ, H, D, DV
SHAPES = [
    pytest.param((2, 13, 13, 6, 3, 8, 5), id="B2-N13-H3-G2-DV5"),
    pytest.param((1, 7, 23, 8, 2, 4, 6), id="last-7-of-23-H2-G4"),
    pytest.param((2, 1, 19, 12, 4, 5, 3), id="decode-H4-G3"),
    pytest.param((1, 16, 16, 4, 1, 3, 2), id="multi-query-even"),
    pytest.param((1, 1, 1, 2, 2, 1, 1), id="one-token"),
]
TILES = [(4, 4), (3, 5), (5, 2), (1, 1), (1, 64), (64, 1), (64, 64)]
tile_sizes = pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def inputs(shape, dtype=torch.float64, factor=1.0, seed=0):
    B, N, M, HQ, H, D, DV = shape
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, N, HQ, D), (B, M, H, D), (B, M, H, DV))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return (factor * q).to(dtype), k.to(dtype), v.to(dtype)


def run(q, k, v, tile, **options):
    return tiled_attention.attention(q, k, v, tile_q=tile[0], tile_k=tile[1], **options)


# -- the function --


@causal_or_not
@tile_sizes
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_attention_of_chapters_01_and_02(shape, tile, causal):
    q, k, v = inputs(shape)
    o, lse = run(q, k, v, tile, causal=causal, return_lse=True)
    G = q.shape[2] // k.shape[2]
    expanded = (q, gqa.expand_kv_heads(k, G), gqa.expand_kv_heads(v, G))
    for reference in (
        gqa.attention(q, k, v, causal=causal, return_lse=True),
        dense_attention.attention(*expanded, causal=causal, return_lse=True),
    ):
        torch.testing.assert_close(o, reference[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, reference[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape):
    q, k, v = inputs(shape)
    mask = dense_attention.causal_mask(q.shape[1], k.shape[1])
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(run(q, k, v, (5, 3)), expected.transpose(1, 2))


def test_more_queries_than_keys_when_nothing_is_hidden():
    q, k, v = inputs((1, 9, 4, 2, 1, 3, 3))
    torch.testing.assert_close(
        run(q, k, v, (4, 3), causal=False), gqa.attention(q, k, v, causal=False)
    )


@pytest.mark.parametrize("direction", [1, -1], ids=["ascending", "descending"])
@tile_sizes
def test_adversarial_scores(direction, tile):
    """Scores that climb (or fall) by hundreds of log2 units from tile to tile: the maximum has to
    run."""
    M = 21
    climb = direction * torch.linspace(-2000, 2000, M, dtype=torch.float64)
    q, v = (
        torch.ones(1, M, 2, 1, dtype=torch.float64),
        torch.arange(M, dtype=torch.float64).view(1, M, 1, 1),
    )
    k = climb.view(1, M, 1, 1)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        o, lse = run(q.to(dtype), k.to(dtype), v.to(dtype), tile, scale=1.0, return_lse=True)
        expected = gqa.attention(q, k.to(dtype).double(), v, scale=1.0, return_lse=True)
        for got, right in zip((o, lse), expected, strict=True):
            assert got.isfinite().all()
            torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance)


def test_large_equal_scores_do_not_lose_precision():
    """Scores near 3e6: products with scale_log2 would be rounded by 0.25 before they met."""
    k = 3e6 + torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    q, v = torch.ones(1, 5, 1, 1), torch.arange(5.0).view(1, 5, 1, 1)
    o = run(q, k.view(1, 5, 1, 1), v, (2, 2), scale=1.0)
    expected = gqa.attention(q.double(), k.double().view(1, 5, 1, 1), v.double(), scale=1.0)
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_computed_in_fp32(dtype):
    q, k, v = inputs((2, 9, 14, 6, 2, 8, 3), dtype)
    o, lse = run(q, k, v, (4, 5), return_lse=True)
    expected, expected_lse = gqa.attention(q.double(), k.double(), v.double(), return_lse=True)
    assert o.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)
    assert (o.double() - expected).abs().max() <= torch.finfo(
        dtype
    ).eps * expected.abs().max() + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gives_the_same_on_a_gpu(dtype):
    q, k, v = inputs((2, 9, 14, 6, 2, 8, 3), dtype)
    got = run(*(x.cuda() for x in (q, k, v)), (4, 5), return_lse=True)
    for x, expected in zip(got, run(q, k, v, (4, 5), return_lse=True), strict=True):
        torch.testing.assert_close(
            x.cpu(), expected, rtol=1e-5 if x.dtype == torch.float32 else 1e-2, atol=1e-5
        )


def test_scale_and_non_contiguous_inputs():
    q, k, v = inputs((2, 6, 9, 6, 2, 4, 3))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(run(*strided, (4, 4), scale=0.3), gqa.attention(q, k, v, scale=0.3))


@causal_or_not
def test_gradients_in_fp64(causal):
    q, k, v = (x.requires_grad_() for x in inputs((1, 4, 6, 4, 2, 3, 2)))
    assert torch.autograd.gradcheck(
        lambda *x: run(*x, (3, 4), causal=causal, return_lse=True), (q, k, v)
    )


def test_gradients_equal_those_of_the_table():
    results = []
    for function in (gqa.attention, lambda *x, **o: run(*x, (4, 3), **o)):
        x = [t.requires_grad_() for t in inputs((2, 7, 9, 6, 3, 4, 2))]
        o, lse = function(*x, return_lse=True)
        results.append(torch.autograd.grad(o.square().sum() + lse.sin().sum(), x))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda q, k, v: (q[0], k, v, (4, 4)), "^q: "),
        (lambda q, k, v: (q, k[..., 1:], v, (4, 4)), "^k: "),
        (lambda q, k, v: (q, k, v[:, 1:], (4, 4)), "^v: "),
        (lambda q, k, v: (q[:, :, 1:], k, v, (4, 4)), "^HQ, H: "),
        (lambda q, k, v: (q, k[:, :2], v[:, :2], (4, 4)), "^q: "),
        (lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0], (4, 4)), "^k: "),
        (lambda q, k, v: (q, k, v, (0, 4)), "^tile_q, tile_k: "),
        (lambda q, k, v: (q, k, v, (4, -1)), "^tile_q, tile_k: "),
    ],
    ids=[
        "rank of q",
        "width of k",
        "length of v",
        "heads",
        "N > M",
        "no keys",
        "no queries in a tile",
        "no keys in a tile",
    ],
)
def test_errors_name_the_argument(change, named):
    q, k, v, tile = change(*inputs((1, 3, 5, 4, 2, 4, 4)))
    with pytest.raises(ValueError, match=named):
        run(q, k, v, tile)


# -- the walk --


@causal_or_not
@tile_sizes
@pytest.mark.parametrize(("N", "M"), [(13, 13), (7, 23), (1, 9), (16, 16)], ids=str)
def test_kinds_are_what_the_mask_says(N, M, tile, causal):
    mask = dense_attention.causal_mask(N, M) if causal else torch.ones(N, M, dtype=torch.bool)
    visited = torch.zeros(N, M, dtype=torch.int)
    for t in tiled_attention.tiles(N, M, *tile, causal):
        part = mask[t.query_start : t.query_end, t.key_start : t.key_end]
        assert t.kind == ("full" if part.all() else "diagonal" if part.any() else "skipped")
        visited[t.query_start : t.query_end, t.key_start : t.key_end] += 1
    assert (visited == 1).all()  # every pair once, and nothing past the ends


def test_tiles_refuses_queries_that_no_position_holds():
    with pytest.raises(ValueError, match=r"^N: "):
        list(tiled_attention.tiles(5, 4, 2, 2))


def test_a_skipped_tile_is_not_read():
    """What a skipped tile holds may be anything, NaN included; a masked tile may not."""
    q, k, v = inputs((1, 8, 8, 2, 1, 4, 4))
    o = run(q, k, v, (4, 4))
    poisoned_k, poisoned_v = k.clone(), v.clone()
    poisoned_k[:, 4:], poisoned_v[:, 4:] = math.nan, math.nan
    torch.testing.assert_close(run(q, poisoned_k, poisoned_v, (4, 4))[:, :4], o[:, :4])


# -- memory and cost --


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations (not views) take from and put into given tensors, and the
    largest result there is."""

    def __init__(self, **watched):
        super().__init__()
        self.watched, self.read, self.largest = watched, dict.fromkeys(watched, 0), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            place = result.untyped_storage().data_ptr()
            self.largest = max(self.largest, result.untyped_storage().nbytes())
            # that one takes shape and dtype only
            reads = () if function is torch.ops.aten.new_empty.default else args
            for x in (x for x in reads if isinstance(x, torch.Tensor)):
                for name, tensor in self.watched.items():
                    if (
                        x.untyped_storage().data_ptr()
                        == tensor.untyped_storage().data_ptr()
                        != place
                    ):
                        self.read[name] += x.nbytes
        return result


@causal_or_not
@pytest.mark.parametrize(
    "tile", [(4, 4), (3, 5), (7, 2), (1, 6), (32, 32)], ids=lambda t: f"{t[0]}x{t[1]}"
)
@pytest.mark.parametrize("shape", [p for p in SHAPES if p.id != "one-token"])
def test_costs_are_what_the_function_moves_and_computes(shape, tile, causal):
    """In fp16 every load is a conversion to fp32, which shows as an operation that reads the
    tensor."""
    B, N, M, HQ, H, D, DV = shape
    q, k, v = inputs(shape, torch.float16)
    with Traffic(q=q, k=k, v=v) as traffic:
        o, lse = run(q, k, v, tile, causal=causal, return_lse=True)
    with FlopCounterMode(display=False) as counter:
        run(q, k, v, tile, causal=causal)
    cost = costs.tiled_attention(
        N, M, D, DV, tile_q=tile[0], tile_k=tile[1], causal=causal, B=B, HQ=HQ, H=H
    )
    assert cost.bytes_read == sum(traffic.read.values())
    assert traffic.read["q"] == q.nbytes
    assert cost.bytes_written == o.nbytes + lse.nbytes
    assert cost.flops == counter.get_total_flops()


@causal_or_not
@pytest.mark.parametrize("tile", [(4, 4), (3, 5), (7, 2), (64, 64)], ids=lambda t: f"{t[0]}x{t[1]}")
def test_costs_walk_the_same_tiles(tile, causal):
    visited = [t for t in tiled_attention.tiles(13, 29, *tile, causal) if t.kind != "skipped"]
    cost = costs.tiled_attention(
        13, 29, 4, 6, tile_q=tile[0], tile_k=tile[1], causal=causal, itemsize=1
    )
    assert cost.bytes_read == 13 * 4 + sum(t.key_end - t.key_start for t in visited) * (4 + 6)
    assert cost.flops == sum(
        (t.key_end - t.key_start) * (t.query_end - t.query_start) for t in visited
    ) * 2 * (4 + 6)


def test_nothing_as_large_as_the_table_is_ever_held():
    q, k, v = inputs((1, 256, 256, 2, 1, 8, 8), torch.float32)
    with Traffic() as tiled:
        run(q, k, v, (32, 32))
    with Traffic() as dense:
        gqa.attention(q, k, v)
    # the output; a tile of scores is smaller still: 2 · 32 · 32 numbers
    assert tiled.largest <= q.nbytes
    assert dense.largest >= 2 * 256 * 256 * 4


def test_costs_by_hand():
    # N = M = 4, tiles of 2: the first pair of queries reads 2 keys, the second 4. D = 3, DV = 5.
    cost = costs.tiled_attention(4, 4, 3, 5, tile_q=2, tile_k=2)
    assert cost.flops == 2 * (2 * 2 + 2 * 4) * (3 + 5) == 192
    assert cost.bytes_read == 2 * (4 * 3 + (2 + 4) * (3 + 5)) == 120
    assert cost.bytes_written == 2 * 4 * 5 + 4 * 4 == 56


def test_costs_by_hand_with_ragged_tiles_and_groups():
    # B = 2, the last 3 of 5 positions, tiles of 2 queries and 3 keys, 4 heads on 2, D = DV = 1.
    # Queries 0, 1 end at position 3 and see 4 keys: two tiles, 5 keys. Query 2 ends at position 4:
    # 5 keys.
    cost = costs.tiled_attention(3, 5, 1, tile_q=2, tile_k=3, B=2, HQ=4, H=2)
    assert cost.flops == 2 * (2 * 4) * (2 * 5 + 1 * 5) * 2
    assert cost.bytes_read == 2 * (2 * 4 * 3) + 2 * (2 * 2) * (5 + 5) * 2
    assert cost.bytes_written == 2 * (2 * 4 * 3) + 4 * (2 * 4 * 3)


def test_without_a_mask_the_operations_are_those_of_the_table_and_bytes_follow_the_formula():
    N, D, tile_q = 1024, 64, 128
    dense = costs.dense_attention(N, N, D)
    tiled = costs.tiled_attention(N, N, D, tile_q=tile_q, tile_k=32, causal=False)
    assert tiled.flops == dense.flops
    q = k = v = o = 2 * N * D
    assert tiled.bytes == q + o + 4 * N + (k + v) * math.ceil(N / tile_q)


def test_bytes_on_chip_by_hand():
    parts = costs.tile_bytes_on_chip(4, 3, 5, 7, G=2)
    assert parts == {
        "q_tile": 80,
        "k_tile": 30,
        "v_tile": 42,
        "acc_s": 96,
        "acc_o": 224,
        "statistics": 64,
    }
    assert sum(costs.tile_bytes_on_chip(128, 128, 128).values()) == 225 * 1024


def test_bytes_on_chip_are_those_of_the_tensors():
    """The fp32 tiles of one program (one KV head) as `online_softmax.start` makes them."""
    parts = costs.tile_bytes_on_chip(4, 3, 5, 7, G=2, itemsize=4)
    state = online_softmax.start(8, 7)
    assert parts["statistics"] == state.scores_max.nbytes + state.running_sum.nbytes
    assert parts["acc_o"] == state.acc_o.nbytes
    assert parts["acc_s"] == (torch.zeros(8, 5) @ torch.zeros(3, 5).T).nbytes


# -- the pictures --


@causal_or_not
@pytest.mark.parametrize("shape", [(64, 64, 16, 16), (7, 23, 3, 5), (1, 9, 4, 4)], ids=str)
def test_the_meter_ends_at_the_cost(shape, causal):
    N, M, tile_q, tile_k = shape
    readings = pictures.meter(N, M, 8, tile_q, tile_k, causal)
    cost = costs.tiled_attention(N, M, 8, tile_q=tile_q, tile_k=tile_k, causal=causal)
    assert readings[-1].bytes == cost.bytes
    assert readings[-1].out == cost.bytes_written
    assert all(a.bytes < b.bytes for a, b in itertools.pairwise(readings))
    assert [r.tile for r in readings] == [
        t for t in tiled_attention.tiles(*shape, causal) if t.kind != "skipped"
    ]


def test_the_walks_finding_carries_its_numbers():
    assert (
        pictures.draw_walk().finding
        == "10 tiles computed (4 need a mask), 6 skipped: 14.2 KiB moved; with the table it would "
        "be 40.0"
    )
    assert (
        pictures.draw_walk(step=4).finding
        == "4 of 10 tiles computed: 6.6 of 14.2 KiB moved so far; with the table it would be 40.0"
    )


def test_facts_of_a_choice():
    one, some, many = pictures.facts(1, 64), pictures.facts(128, 128), pictures.facts(256, 16)
    assert one.gib > 1024 and one.intensity == pytest.approx(1, rel=0.01)
    assert some.kib == 225 and some.fits and some.memory_ms > some.arithmetic_ms
    assert many.fits and many.memory_ms < many.arithmetic_ms
    assert not pictures.facts(256, 32).fits


def test_every_choice_keeps_its_operations_per_byte_near_its_height():
    for tile_q in pictures.TILE_Q:
        assert pictures.facts(tile_q, 16).intensity == pytest.approx(tile_q, rel=0.02)


def test_the_panel_says_what_the_pure_function_says():
    panel = pictures.explore()
    assert panel.sentence == pictures.sentence(16, 128)
    assert panel.set(tile_q=256, tile_k=16) == pictures.sentence(256, 16)
    assert "which fits into 227" in panel.sentence and "less than the arithmetic" in panel.sentence
    assert "does not fit" in panel.set(tile_k=64)


@pytest.mark.parametrize("tile", [(128, 128), (256, 32), (1, 16)], ids=str)
def test_the_picture_says_what_a_tile_holds_and_whether_it_fits(tile):
    picture, facts = pictures.draw_tile_sizes(*tile), pictures.facts(*tile)
    assert ("do not fit" in picture.finding) is not facts.fits
    assert picture.svg().count(f">{facts.kib:.3g}<") >= 1


@pytest.mark.parametrize("tile", [(16, 128), (256, 16)], ids=str)
def test_a_time_of_main_memory_is_said_to_be_without_hits(tile):
    """Keys and values fit into L2: the counted bytes bound main memory's from above, each tensor
    once from below."""
    cost = costs.tiled_attention(
        pictures.TOKENS, pictures.TOKENS, pictures.WIDTH, tile_q=tile[0], tile_k=tile[1]
    )
    once = 4 * pictures.TOKENS * pictures.WIDTH * 2
    assert once // 2 < 50e6 < once < cost.bytes
    told = pictures.sentence(*tile)
    assert told.index("If nothing hits L2") < told.index("main memory needs")
