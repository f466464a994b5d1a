"""Chapter 09: four kernels in two languages against PyTorch, and what their launch functions
refuse."""

from __future__ import annotations

import pytest
import torch
from places import dtypes, places_of, product, skip_unless_runs
from selection import assert_within_budget
from torch import Tensor

from nsa_tutorial.course.kernels import two_tile_languages as tiles
from nsa_tutorial.exact import grouped_query_attention as gqa
from nsa_tutorial.runtime.environment import BackendUnavailable

LANGUAGES = ("triton", "tilelang")
places = places_of(LANGUAGES)


def random(
    *shape: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    factor: float = 1.0,
) -> Tensor:
    x = factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to(device)


# -- the kernels against PyTorch --


LENGTHS = {str(n): n for n in (1, 16, 37)}


@product("N", LENGTHS, LANGUAGES, {torch.float32: LENGTHS})
def test_copy(N: int, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    x = random(N, dtype=dtype, device=device)
    y = tiles.copy(x, backend=backend, tile=16)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()


@places
def test_copy_of_every_other_element(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    x = random(40, device=device)[::2]
    assert torch.equal(tiles.copy(x, backend=backend, tile=16), x)


ROWS = {f"{R}-{N}": (R, N) for R, N in ((6, 37), (4, 64), (5, 1))}


@product(
    "shape", ROWS, LANGUAGES, {torch.float32: ["6-37", "5-1"], torch.float16: ["6-37"]},
    slow={"tilelang": ["6-37"]},
)  # fmt: skip
def test_softmax(shape: tuple[int, int], dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    R, N = shape
    x = random(R, N, dtype=dtype, device=device, factor=4.0)
    y = tiles.softmax(x, backend=backend)
    assert y.dtype == dtype
    assert_within_budget(
        y, torch.softmax(x.double(), -1), torch.softmax(x, -1), f"{backend} softmax"
    )


@places
@pytest.mark.parametrize("shift", [1e4, -1e4, 88.0])
def test_softmax_of_extreme_scores(shift: float, backend: str, device: str) -> None:
    """All large, all far below 0 (where padding with 0 would win), and one that towers over the
    rest."""
    skip_unless_runs(backend, device)
    x = torch.full((3, 37), shift, device=device)
    assert torch.allclose(tiles.softmax(x, backend=backend), torch.full_like(x, 1 / 37), rtol=1e-5)
    x[:, 5] += 1000.0
    assert torch.equal(
        tiles.softmax(x, backend=backend),
        torch.nn.functional.one_hot(torch.tensor(5), 37).to(x).expand(3, 37),
    )


PRODUCTS = {
    "1-1-1": (1, 1, 1),
    "20-37-25": (20, 37, 25),
    "1-37-25": (1, 37, 25),
}
IN_ONE_KERNEL = PRODUCTS.keys() - {"1-1-1"}  # TileLang compiles one for each K and N


@product("shape", PRODUCTS, LANGUAGES, {torch.float32: IN_ONE_KERNEL, torch.float16: ["20-37-25"]})
def test_matmul(shape: tuple[int, int, int], dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    M, K, N = shape
    # sums of order 1, which the budget's 1e-6 is meant for: one row leaves to luck how well the
    # plain product rounds
    a = random(M, K, dtype=dtype, device=device, factor=K**-0.5)
    b = random(K, N, seed=1, dtype=dtype, device=device)
    c = tiles.matmul(a, b, backend=backend, tile=(16, 16, 16))
    assert_within_budget(c, a.double() @ b.double(), a @ b, f"{backend} matmul")


@places
def test_matmul_keeps_all_the_bits_of_fp32(backend: str, device: str) -> None:
    """TF32 would lose 2**-12 beside 1."""
    skip_unless_runs(backend, device)
    a = torch.full((16, 37), 1 + 2**-12, device=device)
    assert torch.equal(
        tiles.matmul(a, torch.eye(37, 25, device=device), backend=backend, tile=(16, 16, 16)),
        a[:, :25],
    )


# B, N, M, H, G, D, DV. TileLang compiles a kernel for each (G, D, DV, causal, dtype): they are few.
SHAPES = {
    "B2, last 21 of 50, H2, G3, widths 24 and 40": (2, 21, 50, 2, 3, 24, 40),
    "one query, one key": (1, 1, 1, 2, 3, 24, 40),
    "one query, many keys": (1, 1, 37, 2, 3, 24, 40),
    "one row fewer than a tile": (1, 15, 17, 1, 3, 24, 40),
}
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
# full attention by TileLang: another kernel to compile
on_places = pytest.mark.parametrize(
    ("causal", "backend", "device"),
    [
        pytest.param(
            causal, backend, device, id=f"{'causal' if causal else 'full'}-{backend}-{device}",
            marks=pytest.mark.gpu if device == "cuda"
            else [] if causal or backend == "triton" else pytest.mark.exhaustive,
        )
        for causal in (True, False) for backend in LANGUAGES for device in ("cpu", "cuda")
    ],
)  # fmt: skip


def qkv(
    shape: tuple, dtype: torch.dtype = torch.float32, device: str = "cpu", factor: float = 1.0
) -> tuple[Tensor, ...]:
    B, N, M, H, G, D, DV = shape
    options = {"dtype": dtype, "device": device}
    return (
        random(B, N, H * G, D, factor=factor, **options), random(B, M, H, D, seed=1, **options),
        random(B, M, H, DV, seed=2, **options),
    )  # fmt: skip


def assert_attention(
    q: Tensor, k: Tensor, v: Tensor, backend: str, **options: object
) -> tuple[Tensor, Tensor]:
    o, lse = tiles.attention(q, k, v, backend=backend, tile_q=16, tile_k=16, **options)
    truth = gqa.attention(q.double(), k.double(), v.double(), return_lse=True, **options)
    plain = gqa.attention(q, k, v, return_lse=True, **options)
    # the weights are rounded to the dtype before they meet the values, as on a GPU's tensor cores;
    # PyTorch's stay in fp32 here
    rounding = torch.finfo(v.dtype).eps if v.dtype != torch.float32 else 0.0
    assert_within_budget(o, truth[0], plain[0] + rounding * v.abs().max(), f"{backend} o")
    assert_within_budget(lse, truth[1], plain[1], f"{backend} lse")
    assert o.dtype == v.dtype
    assert lse.dtype == torch.float32
    return o, lse


@on_places
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention(shape: tuple, causal: bool, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    assert_attention(*qkv(shape, device=device), backend, causal=causal)


@places_of(LANGUAGES, slow=["tilelang"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_attention_in_16_bits(dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    assert_attention(*qkv((1, 21, 50, 2, 3, 24, 40), dtype, device), backend)


GROUPS = {"G1": (1, 16, 16), "G16-DV8": (16, 16, 8)}


@product(
    "group", GROUPS, LANGUAGES, {torch.float32: ["G16-DV8"]}, dtypes=[torch.float32],
    slow={"tilelang": []},
)  # fmt: skip
def test_other_groups(group: tuple, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    G, D, DV = group
    assert_attention(*qkv((1, 3, 20, 1, G, D, DV), device=device), backend)


@places
def test_attention_of_extreme_scores(backend: str, device: str) -> None:
    """Scores of thousands, the largest in the first tile for one query and in the last for
    another."""
    skip_unless_runs(backend, device)
    q, k, v = qkv((1, 2, 37, 1, 3, 24, 40), device=device, factor=300.0)
    q[:, 1] = -q[:, 0]
    o, lse = assert_attention(q, k, v, backend)
    assert torch.isfinite(o).all()
    assert torch.isfinite(lse).all()


@places
def test_keys_of_the_future_and_past_the_end_do_not_matter(backend: str, device: str) -> None:
    """The same queries, once at the end of a short text and once as the beginning of a longer
    one."""
    skip_unless_runs(backend, device)
    q, k, v = qkv((1, 21, 21, 1, 3, 24, 40), device=device)
    o, lse = tiles.attention(q, k, v, backend=backend, tile_q=16, tile_k=16)
    first, first_lse = tiles.attention(
        q[:, :5], k[:, :5], v[:, :5], backend=backend, tile_q=16, tile_k=16
    )
    torch.testing.assert_close(o[:, :5], first)
    torch.testing.assert_close(lse[:, :5], first_lse)


@pytest.mark.gpu
@dtypes
@causal_or_not
@pytest.mark.parametrize("backend", LANGUAGES)
def test_attention_at_the_default_tiles(backend: str, causal: bool, dtype: torch.dtype) -> None:
    """Sizes of a model; the CPU is too slow for them."""
    skip_unless_runs(backend, "cuda", dtype)
    q, k, v = qkv((2, 300, 333, 2, 4, 64, 128), dtype, "cuda")
    o, lse = tiles.attention(q, k, v, backend=backend, causal=causal)
    truth = gqa.attention(q.double(), k.double(), v.double(), causal=causal, return_lse=True)
    torch.testing.assert_close(
        o.double(), truth[0], rtol=0, atol=2e-2 if dtype != torch.float32 else 1e-5
    )
    torch.testing.assert_close(
        lse.double(), truth[1], rtol=0, atol=1e-4 if dtype != torch.float32 else 1e-5
    )


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("backend", LANGUAGES)
def test_matmul_at_the_default_tiles(backend: str, dtype: torch.dtype) -> None:
    skip_unless_runs(backend, "cuda", dtype)
    for M, K, N in ((300, 256, 128), (257, 100, 33)):
        a = random(M, K, dtype=dtype, device="cuda")
        b = random(K, N, seed=1, dtype=dtype, device="cuda", factor=K**-0.5)  # sums of order one
        c = tiles.matmul(a, b, backend=backend)
        assert_within_budget(c, a.double() @ b.double(), a @ b, f"{backend} matmul")


# -- what the launch functions refuse --


X = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: tiles.copy(X),
            ValueError,
            r"x: got a float32 tensor of shape \[4, 4\] on cpu, expected 1 dimensions, \[N\]",
        ),
        (lambda: tiles.copy([1.0]), TypeError, r"x: got \[1.0\] \(list\), expected a tensor"),
        (lambda: tiles.copy(X[0].int()), TypeError, "x: got a int32 tensor"),
        (lambda: tiles.copy(X[0], tile=24), ValueError, "tile: got 24, expected a power of two"),
        (
            lambda: tiles.copy(X[0], tile=0),
            ValueError,
            "tile: got 0, expected an int of at least 1",
        ),
        (lambda: tiles.copy(X[0], tile=8.0), TypeError, "tile: got 8.0"),
        (
            lambda: tiles.copy(X[0], backend="cuda"),
            ValueError,
            "backend: got 'cuda', expected one of reference, triton, tilelang",
        ),
        (
            lambda: tiles.copy(X[0, :0]),
            ValueError,
            r"x: got a float32 tensor of shape \[0\] on cpu, expected 1 to",
        ),
        (lambda: tiles.softmax(X[0]), ValueError, r"x: .* expected 2 dimensions, \[R, N\]"),
        (
            lambda: tiles.softmax(torch.zeros(1, 20_000)),
            ValueError,
            "x: got rows of 20000, expected at most 16384",
        ),
        (
            lambda: tiles.matmul(X, torch.zeros(5, 4)),
            ValueError,
            r"b: got .*\[5, 4\].*expected 4 rows, the width of a",
        ),
        (
            lambda: tiles.matmul(X, X.half()),
            TypeError,
            "b: got a float16 tensor .* expected the dtype of a",
        ),
        (
            lambda: tiles.matmul(X, X, tile=(8, 16, 16)),
            ValueError,
            "tile: got 8, expected an int of at least 16",
        ),
        (
            lambda: tiles.matmul(X, X, tile=16),
            TypeError,
            r"tile: got 16 \(int\), expected three ints",
        ),
        (
            lambda: tiles.attention(X, X, X),
            ValueError,
            r"q: .* expected 4 dimensions, \[B, N, HQ, D\]",
        ),
        (
            lambda: tiles.attention(*qkv((1, 3, 2, 1, 1, 4, 4))),
            ValueError,
            "q: got 3 queries for 2 keys",
        ),
        (
            lambda: tiles.attention(*qkv((1, 2, 3, 1, 1, 4, 4)), tile_q=8),
            ValueError,
            "tile_q: got 8",
        ),
        (
            lambda: tiles.attention(*qkv((1, 2, 3, 1, 1, 4, 4)), tile_k=48),
            ValueError,
            "tile_k: got 48, expected a power of two",
        ),
        (
            lambda: tiles.attention(*qkv((1, 2, 3, 1, 1, 4, 4)), scale=0.0),
            ValueError,
            "scale: got 0.0",
        ),
        (
            lambda: tiles.attention(*qkv((1, 2, 3, 1, 1, 4, 4)), causal=1),
            TypeError,
            "causal: got 1",
        ),
    ],
)
def test_errors_name_the_argument(call, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("backend", LANGUAGES)
def test_bf16_is_refused_on_the_cpu(backend: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"."):
        tiles.copy(X[0].bfloat16(), backend=backend)


def test_reference_takes_fp64() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(tiles.softmax(x), torch.softmax(x, -1))
    assert torch.equal(tiles.copy(x[0]), x[0])
    assert torch.equal(tiles.matmul(x, x.T), x @ x.T)


@pytest.mark.parametrize("backend", LANGUAGES)
@pytest.mark.parametrize(("n", "power"), [(1, 16), (15, 16), (16, 16), (17, 32), (64, 64)])
def test_padded(n: int, power: int, backend: str) -> None:
    skip_unless_runs(backend, "cpu")
    assert tiles._padded(n, backend) == power
