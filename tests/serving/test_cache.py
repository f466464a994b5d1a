"""A layer with a cache: in whatever pieces a text comes, the result is that of the whole text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from places import places_of, skip_unless_runs
from torch import Tensor

from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig
from nsa_tutorial.serving.cache import Cache
from nsa_tutorial.sparse.compression import KINDS

WIDTH, N = 24, 70
SIZES = {
    "width": WIDTH, "query_heads": 6, "kv_heads": 2, "key_width": 8, "value_width": 12,
    "block_size": 8, "top_n": 4, "window_size": 11, "length": 6, "stride": 4, "gate_width": 8,
}  # fmt: skip
places = places_of(("reference", "tilelang", "triton"), slow=("tilelang",))


def new(
    dtype: torch.dtype = torch.float64, device: str = "cpu", B: int = 2, **changes: object
) -> tuple[NativeSparseAttention, Tensor, Tensor]:
    """A layer, a text, and what the layer makes of the whole of it."""
    torch.manual_seed(0)
    layer = NativeSparseAttention(NativeSparseAttentionConfig(**{**SIZES, **changes}))
    layer = layer.to(device, dtype)
    x = torch.randn(B, N, WIDTH, dtype=dtype).to(device)
    with torch.no_grad():
        return layer, x, layer(x)


def on_backend(layer: NativeSparseAttention, backend: str) -> NativeSparseAttention:
    """The same layer, computed by a backend."""
    other = NativeSparseAttention(replace(layer.config, backend=backend))
    other.load_state_dict(layer.state_dict())
    return other.to(layer.o.weight)


def write(layer: NativeSparseAttention, cache: Cache, x: Tensor, cuts: list[int]) -> Tensor:
    return torch.cat([layer(piece, cache=cache) for piece in x.split(cuts, 1)], 1)


CUTS = {
    "prompt": [40, *[1] * 30],
    "tokens": [1] * N,
    "pieces": [3, 20, 7, 1, 1, 13, 25],
    "a long step": [1, 69],
}


@pytest.mark.parametrize("page_size", [None, 16], ids=["contiguous", "pages"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_any_cut(cuts: list[int], page_size: int | None) -> None:
    layer, x, whole = new()
    cache = layer.new_cache(2, N, page_size, max_step=7)
    torch.testing.assert_close(write(layer, cache, x, cuts), whole, rtol=1e-12, atol=1e-12)
    assert cache.lengths.tolist() == cache.host_lengths.tolist() == [N, N]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_summary(kind: str) -> None:
    layer, x, whole = new(compression=kind, separate_keys=kind != "mean", rotary_base=None)
    cache = layer.new_cache(2, N, max_step=7)
    found = write(layer, cache, x, CUTS["pieces"])
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (3, 5), (20, 2), (1, 1)])
def test_every_length_of_summary(length: int, stride: int) -> None:
    layer, x, whole = new(length=length, stride=stride)
    cache = layer.new_cache(2, N, max_step=7)
    found = write(layer, cache, x, CUTS["pieces"])
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("few_parts")
@places
def test_on_backends(backend: str, device: str) -> None:
    """What a backend writes step by step, in pages and without, is the reference's whole."""
    skip_unless_runs(backend, device)
    layer, x, whole = new(torch.float32, device, backend="reference")
    layer = on_backend(layer, backend)
    for page_size, cuts in ((None, [3, 1, 5]), (8, [18, 1, 7])):
        cache = layer.new_cache(2, N, page_size, max_step=7)
        found = write(layer, cache, x[:, : sum(cuts)], cuts)
        torch.testing.assert_close(found, whole[:, : sum(cuts)], rtol=1e-4, atol=1e-5)


def ragged(layer: NativeSparseAttention, x: Tensor, lengths: tuple[int, ...], **kind: int) -> Cache:
    """A cache whose rows hold `lengths` tokens of their texts: each row is fed on its own."""
    cache = layer.new_cache(len(lengths), N, max_step=7, **kind)
    done = 0
    for length in sorted(set(lengths)):
        write(layer, cache, x[:, done:length], [1] * (length - done))
        done = length
    cache.crop(lengths)
    return cache


def test_rows_of_different_lengths() -> None:
    """Cropped to different lengths, rows go on at their own positions."""
    layer, x, whole = new(B=3)
    cache = ragged(layer, x, (30, 27, 24))
    step = torch.stack([x[b, n : n + 5] for b, n in enumerate((30, 27, 24))])
    expected = torch.stack([whole[b, n : n + 5] for b, n in enumerate((30, 27, 24))])
    torch.testing.assert_close(layer(step, cache=cache), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("page_size", [None, 8], ids=["contiguous", "pages"])
def test_tokens_taken_back(page_size: int | None) -> None:
    """Wrong tokens, as a draft model may write, leave no trace: neither in rings nor in
    summaries."""
    layer, x, whole = new()
    cache = layer.new_cache(2, N, page_size, max_step=7)
    write(layer, cache, x[:, :29], [29])
    for n in range(29, 50, 3):
        layer(torch.randn(2, 7, WIDTH, dtype=x.dtype), cache=cache)
        cache.crop(n)
        found = layer(x[:, n : n + 3], cache=cache)
        torch.testing.assert_close(found, whole[:, n : n + 3], rtol=1e-12, atol=1e-12)


def test_more_than_the_rings_hold_cannot_be_taken_back() -> None:
    layer, x, _ = new()
    cache = layer.new_cache(2, N, max_step=7)
    write(layer, cache, x[:, :60], [60])
    with pytest.raises(ValueError, match=r"lengths: got 40 for row 0.*larger max_step"):
        cache.crop(40)
    assert cache.host_lengths.tolist() == [60, 60]
    cache.crop([53, 0])
    assert cache.lengths.tolist() == [53, 0]
    with pytest.raises(ValueError, match="lengths: got"):
        cache.crop(54)


@pytest.mark.parametrize("page_size", [None, 8], ids=["contiguous", "pages"])
def test_beams(page_size: int | None) -> None:
    layer, x, whole = new(B=3)
    cache = layer.new_cache(3, N, page_size, max_step=7)
    write(layer, cache, x[:, :21], [21])
    cache.reorder([2, 0, 0])
    order = torch.tensor([2, 0, 0])
    found = layer(x[order, 21:25], cache=cache)
    torch.testing.assert_close(found, whole[order, 21:25], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("page_size", [None, 8], ids=["contiguous", "pages"])
@pytest.mark.parametrize("rows", [[1, 1, 0, 2, 1], [2]], ids=["more", "one"])
def test_rows_selected(rows: list[int], page_size: int | None) -> None:
    """Another number of rows is another cache: neither writes to the other."""
    layer, x, whole = new(B=3)
    cache = layer.new_cache(3, N, page_size, max_step=7)
    write(layer, cache, x[:, :21], [21])
    selected = cache.select(rows)
    found = layer(x[rows, 21:25], cache=selected)
    torch.testing.assert_close(found, whole[rows, 21:25], rtol=1e-12, atol=1e-12)
    selected.reset()
    found = layer(x[:, 21:25], cache=cache)
    torch.testing.assert_close(found, whole[:, 21:25], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("page_size", [None, 8], ids=["contiguous", "pages"])
def test_a_row_starts_anew(page_size: int | None) -> None:
    """Continuous batching: one row ends, and another text takes its place."""
    layer, x, whole = new()
    cache = layer.new_cache(2, N, page_size, max_step=7)
    write(layer, cache, x[:, :21], [21])
    cache.reset([1])
    step = torch.stack([x[0, 21:24], x[1, :3]])
    found = layer(step, cache=cache)
    expected = torch.stack([whole[0, 21:24], whole[1, :3]])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_no_rows_and_no_tokens() -> None:
    layer, x, _ = new()
    assert layer(x[:0, :1], cache=layer.new_cache(0, N)).shape == (0, 1, WIDTH)
    cache = layer.new_cache(2, N)
    assert layer(x[:, :0], cache=cache).shape == (2, 0, WIDTH)
    assert cache.lengths.tolist() == [0, 0]


def test_a_shared_prefix() -> None:
    """Full pages of a prefix are shared, and stay as they are, also when a row is cut inside
    them."""
    layer, x, _ = new(B=3)
    x[1:, :21] = x[:1, :21]
    with torch.no_grad():
        whole = layer(x)
    cache = layer.new_cache(3, N, 8, max_step=7)
    write(layer, cache, x[:1, :21].expand(3, -1, -1), [21])
    cache.reset([1, 2])
    cache.share_prefix(0, [1, 2])
    assert cache.block_table[1, :2].tolist() == cache.block_table[0, :2].tolist()
    assert cache.block_table[1, 2] != cache.block_table[0, 2]
    found = write(layer, cache, x[:, 21:33], [5, 7])
    torch.testing.assert_close(found, whole[:, 21:33], rtol=1e-12, atol=1e-12)
    cache = layer.new_cache(3, N, 8, max_step=7)
    write(layer, cache, x[:1, :20].expand(3, -1, -1), [20])
    cache.share_prefix(0, [1, 2])
    cache.crop([20, 14, 20])  # inside a page that row 0 reads
    before = cache.k[cache.block_table[0, :2].long()].clone()
    layer(torch.randn(3, 2, WIDTH, dtype=x.dtype), cache=cache)
    torch.testing.assert_close(cache.k[cache.block_table[0, :2].long()], before)


@pytest.mark.parametrize("n", [1, 9], ids=["a step", "several steps"])
def test_a_full_cache_stays_as_it_is(n: int) -> None:
    layer, x, _ = new()
    cache = layer.new_cache(2, 30, max_step=7)
    write(layer, cache, x[:, : 30 - n + 1], [30 - n + 1])
    before = {name: t.clone() for name, t in vars(cache).items() if isinstance(t, Tensor)}
    with pytest.raises(ValueError, match=rf"cache: got {n} more tokens for row 0.*at most 30"):
        layer(x[:, :n], cache=cache)
    for name, t in before.items():
        torch.testing.assert_close(getattr(cache, name), t, rtol=0, atol=0)


def test_a_step_in_one_graph() -> None:
    """`torch.compile` takes a step whole, and one compilation serves every length."""
    layer, x, whole = new(torch.float32, compression="mean")
    cache = layer.new_cache(2, N, max_step=7)
    layer(x[:, :20], cache=cache)
    frames = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        frames.append(graph)
        return graph.forward

    step = torch.compile(lambda x: layer(x, cache=cache), fullgraph=True, backend=backend)
    for n in range(20, 40):
        found = step(x[:, n : n + 1].contiguous())
        torch.testing.assert_close(found, whole[:, n : n + 1], rtol=1e-4, atol=1e-5)
    assert len(frames) <= 2


WRONG = {
    "max_tokens": (lambda layer: layer.new_cache(2, 0), "max_tokens: got 0"),
    "page_size": (lambda layer: layer.new_cache(2, 30, 12), "page_size: got 12, expected"),
    "batch": (lambda layer: layer(torch.zeros(1, 1, WIDTH).double(), cache=layer.new_cache(2, 9)),
              "x: got .*expected the batch"),
    "cache": (lambda layer: layer(torch.zeros(1, 1, WIDTH).double(), cache={}), "cache: got"),
    "index": (lambda layer: layer.new_cache(2, 9).reorder([0]), "index: got 1 rows"),
    "rows": (lambda layer: layer.new_cache(2, 9).reset([2]), r"rows: got \[2\], expected numbers"),
    "kind": (lambda layer: layer.new_cache(2, 9).reset("all"), "rows: got"),
    "shared": (lambda layer: layer.new_cache(2, 9).share_prefix(0, [1]), "without pages"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(call: object, message: str) -> None:
    layer, _, _ = new()
    with pytest.raises((ValueError, TypeError), match=message):
        call(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16], ids=["contiguous", "pages"])
def test_a_step_in_a_cuda_graph(page_size: int | None) -> None:
    """One capture writes the rest of the text, token by token."""
    layer, x, whole = new(torch.float32, "cuda")
    cache = layer.new_cache(2, N, page_size, max_step=7)
    layer(x[:, :20], cache=cache)
    token = x[:, 20:21].clone()
    for _ in range(2):  # compile
        layer(token, cache=cache)
    cache.crop(20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(token, cache=cache)
    for n in range(20, N):
        token.copy_(x[:, n : n + 1])
        cache.count(1)
        graph.replay()
        torch.testing.assert_close(y, whole[:, n : n + 1], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="cache: got 1 more tokens"):
        cache.count(1)
