"""Chapter 09: four kernels in two languages against PyTorch, what one program touches, and what the compilers make of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from selection import assert_within_budget
from torch import Tensor

from nsa_tutorial import environment, lowering
from nsa_tutorial import grouped_query_attention as gqa
from nsa_tutorial import two_tile_languages as tiles
from nsa_tutorial.course import exercises, phases, recorder, show
from nsa_tutorial.course.checking import judge
from nsa_tutorial.course.languages import Absent
from nsa_tutorial.course.widgets import two_tile_languages as pictures
from nsa_tutorial.environment import BackendUnavailable

LANGUAGES = ("triton", "tilelang")
LANES = [pytest.param(b, "cpu", id=f"{b}-cpu") for b in LANGUAGES] + [
    pytest.param(b, "cuda", id=f"{b}-cuda", marks=pytest.mark.gpu) for b in LANGUAGES
]
lanes = pytest.mark.parametrize(("backend", "device"), LANES)
DTYPES = [pytest.param(d, id=str(d).removeprefix("torch.")) for d in (torch.float32, torch.float16, torch.bfloat16)]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
needs_tilelang = pytest.mark.skipif(environment.detect().tilelang is None, reason="tilelang is not installed")
needs_triton = pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed")
interpreted = pytest.mark.skipif(
    environment.detect().triton is None or not environment.detect().triton_interpreted, reason="needs Triton's interpreter"
)


def skip_unless_runs(backend: str, device: str, dtype: torch.dtype = torch.float32) -> None:
    reason = environment.detect().why_not(backend, device, str(dtype).removeprefix("torch."))
    if reason is not None:
        pytest.skip(reason)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu", factor: float = 1.0) -> Tensor:
    x = factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to(device)


# -- the kernels against PyTorch --


@lanes
@dtypes
@pytest.mark.parametrize("N", [1, 7, 16, 17, 37, 1000])
def test_copy(N: int, backend: str, device: str, dtype: torch.dtype) -> None:
    skip_unless_runs(backend, device, dtype)
    x = random(N, dtype=dtype, device=device)
    y = tiles.copy(x, backend=backend, tile=16)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()


@lanes
def test_copy_of_every_other_element(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    x = random(40, device=device)[::2]
    assert torch.equal(tiles.copy(x, backend=backend, tile=16), x)


@lanes
@dtypes
@pytest.mark.parametrize(("R", "N"), [(1, 1), (1, 37), (6, 37), (4, 64), (9, 33), (5, 1)], ids=lambda n: str(n))
def test_softmax(R: int, N: int, backend: str, device: str, dtype: torch.dtype) -> None:
    skip_unless_runs(backend, device, dtype)
    x = random(R, N, dtype=dtype, device=device, factor=4.0)
    y = tiles.softmax(x, backend=backend)
    assert y.dtype == dtype
    assert_within_budget(y, torch.softmax(x.double(), -1), torch.softmax(x, -1), f"{backend} softmax")


@lanes
@pytest.mark.parametrize("shift", [1e4, -1e4, 88.0])
def test_softmax_of_extreme_scores(shift: float, backend: str, device: str) -> None:
    """All large, all far below 0 (where padding with 0 would win), and one that towers over the rest."""
    skip_unless_runs(backend, device)
    x = torch.full((3, 37), shift, device=device)
    assert torch.allclose(tiles.softmax(x, backend=backend), torch.full_like(x, 1 / 37), rtol=1e-5)
    x[:, 5] += 1000.0
    assert torch.equal(tiles.softmax(x, backend=backend), torch.nn.functional.one_hot(torch.tensor(5), 37).to(x).expand(3, 37))


@lanes
@dtypes
@pytest.mark.parametrize(("M", "K", "N"), [(1, 1, 1), (20, 37, 25), (16, 37, 25), (1, 37, 25)], ids=lambda n: str(n))
def test_matmul(M: int, K: int, N: int, backend: str, device: str, dtype: torch.dtype) -> None:
    skip_unless_runs(backend, device, dtype)
    a, b = random(M, K, dtype=dtype, device=device), random(K, N, seed=1, dtype=dtype, device=device)
    c = tiles.matmul(a, b, backend=backend, tile=(16, 16, 16))
    assert_within_budget(c, a.double() @ b.double(), a @ b, f"{backend} matmul")


@lanes
def test_matmul_keeps_all_the_bits_of_fp32(backend: str, device: str) -> None:
    """TF32 would lose 2**-12 beside 1."""
    skip_unless_runs(backend, device)
    a = torch.full((16, 37), 1 + 2**-12, device=device)
    assert torch.equal(tiles.matmul(a, torch.eye(37, 25, device=device), backend=backend, tile=(16, 16, 16)), a[:, :25])


# B, N, M, H, G, D, DV. TileLang compiles a kernel for each (G, D, DV, causal, dtype): they are few.
SHAPES = {
    "B2, last 21 of 50, H2, G3, widths 24 and 40": (2, 21, 50, 2, 3, 24, 40),
    "one query, one key": (1, 1, 1, 2, 3, 24, 40),
    "one query, many keys": (1, 1, 37, 1, 3, 24, 40),
    "one row fewer than a tile": (1, 15, 17, 1, 3, 24, 40),
}
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def qkv(shape: tuple, dtype: torch.dtype = torch.float32, device: str = "cpu", factor: float = 1.0) -> tuple[Tensor, ...]:
    B, N, M, H, G, D, DV = shape
    options = {"dtype": dtype, "device": device}
    return (
        random(B, N, H * G, D, factor=factor, **options), random(B, M, H, D, seed=1, **options),
        random(B, M, H, DV, seed=2, **options),
    )  # fmt: skip


def assert_attention(q: Tensor, k: Tensor, v: Tensor, backend: str, **options: object) -> tuple[Tensor, Tensor]:
    o, lse = tiles.attention(q, k, v, backend=backend, tile_q=16, tile_k=16, **options)
    truth = gqa.attention(q.double(), k.double(), v.double(), return_lse=True, **options)
    plain = gqa.attention(q, k, v, return_lse=True, **options)
    # the weights are rounded to the dtype before they meet the values, as on a GPU's matrix units; PyTorch's stay in fp32 here
    rounding = torch.finfo(v.dtype).eps if v.dtype != torch.float32 else 0.0
    assert_within_budget(o, truth[0], plain[0] + rounding * v.abs().max(), f"{backend} o")
    assert_within_budget(lse, truth[1], plain[1], f"{backend} lse")
    assert o.dtype == v.dtype
    assert lse.dtype == torch.float32
    return o, lse


@lanes
@causal_or_not
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention(shape: tuple, causal: bool, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    assert_attention(*qkv(shape, device=device), backend, causal=causal)


@lanes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 21, 50, 2, 3, 24, 40), (1, 1, 1, 1, 3, 24, 40)], ids=["odd", "one"])
def test_attention_in_16_bits(shape: tuple, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    assert_attention(*qkv(shape, dtype, device), backend)


@lanes
@pytest.mark.parametrize(("G", "D", "DV"), [(1, 16, 16), (16, 16, 8)], ids=["G1", "G16-DV8"])
def test_attention_of_other_groups(G: int, D: int, DV: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    assert_attention(*qkv((1, 3, 20, 1, G, D, DV), device=device), backend)


@lanes
def test_attention_of_extreme_scores(backend: str, device: str) -> None:
    """Scores of thousands, the largest in the first tile for one query and in the last for another."""
    skip_unless_runs(backend, device)
    q, k, v = qkv((1, 2, 37, 1, 3, 24, 40), device=device, factor=300.0)
    q[:, 1] = -q[:, 0]
    o, lse = assert_attention(q, k, v, backend)
    assert torch.isfinite(o).all()
    assert torch.isfinite(lse).all()


@lanes
def test_keys_of_the_future_and_past_the_end_do_not_matter(backend: str, device: str) -> None:
    """The same queries, once at the end of a short text and once as the beginning of a longer one."""
    skip_unless_runs(backend, device)
    q, k, v = qkv((1, 21, 21, 1, 3, 24, 40), device=device)
    o, lse = tiles.attention(q, k, v, backend=backend, tile_q=16, tile_k=16)
    first, first_lse = tiles.attention(q[:, :5], k[:, :5], v[:, :5], backend=backend, tile_q=16, tile_k=16)
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
    torch.testing.assert_close(o.double(), truth[0], rtol=0, atol=2e-2 if dtype != torch.float32 else 1e-5)
    torch.testing.assert_close(lse.double(), truth[1], rtol=0, atol=1e-4 if dtype != torch.float32 else 1e-5)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("backend", LANGUAGES)
def test_matmul_at_the_default_tiles(backend: str, dtype: torch.dtype) -> None:
    skip_unless_runs(backend, "cuda", dtype)
    for M, K, N in ((300, 256, 128), (257, 100, 33)):
        a, b = random(M, K, dtype=dtype, device="cuda"), random(K, N, seed=1, dtype=dtype, device="cuda")
        c = tiles.matmul(a, b, backend=backend)
        assert_within_budget(c, a.double() @ b.double(), a @ b, f"{backend} matmul")


# -- what the launch functions refuse --


X = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tiles.copy(X), ValueError, r"x: got a float32 tensor of shape \[4, 4\] on cpu, expected 1 dimensions, \[N\]"),
        (lambda: tiles.copy([1.0]), TypeError, r"x: got \[1.0\] \(list\), expected a tensor"),
        (lambda: tiles.copy(X[0].int()), TypeError, "x: got a int32 tensor"),
        (lambda: tiles.copy(X[0], tile=24), ValueError, "tile: got 24, expected a power of two"),
        (lambda: tiles.copy(X[0], tile=0), ValueError, "tile: got 0, expected an int of at least 1"),
        (lambda: tiles.copy(X[0], tile=8.0), TypeError, "tile: got 8.0"),
        (lambda: tiles.copy(X[0], backend="cuda"), ValueError, "backend: got 'cuda', expected one of reference, triton, tilelang"),
        (lambda: tiles.copy(X[0, :0]), ValueError, r"x: got a float32 tensor of shape \[0\] on cpu, expected 1 to"),
        (lambda: tiles.softmax(X[0]), ValueError, r"x: .* expected 2 dimensions, \[R, N\]"),
        (lambda: tiles.softmax(torch.zeros(1, 20_000)), ValueError, "x: got rows of 20000, expected at most 16384"),
        (lambda: tiles.matmul(X, torch.zeros(5, 4)), ValueError, r"b: got .*\[5, 4\].*expected 4 rows, the width of a"),
        (lambda: tiles.matmul(X, X.half()), TypeError, "b: got a float16 tensor .* expected the dtype of a"),
        (lambda: tiles.matmul(X, X, tile=(8, 16, 16)), ValueError, "tile: got 8, expected an int of at least 16"),
        (lambda: tiles.matmul(X, X, tile=16), TypeError, r"tile: got 16 \(int\), expected three ints"),
        (lambda: tiles.attention(X, X, X), ValueError, r"q: .* expected 4 dimensions, \[B, N, HQ, D\]"),
        (lambda: tiles.attention(*qkv((1, 3, 2, 1, 1, 4, 4))), ValueError, "q: got 3 queries for 2 keys"),
        (lambda: tiles.attention(*qkv((1, 2, 3, 1, 1, 4, 4)), tile_q=8), ValueError, "tile_q: got 8"),
        (lambda: tiles.attention(*qkv((1, 2, 3, 1, 1, 4, 4)), tile_k=48), ValueError, "tile_k: got 48, expected a power of two"),
        (lambda: tiles.attention(*qkv((1, 2, 3, 1, 1, 4, 4)), scale=0.0), ValueError, "scale: got 0.0"),
        (lambda: tiles.attention(*qkv((1, 2, 3, 1, 1, 4, 4)), causal=1), TypeError, "causal: got 1"),
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


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32)])
def test_next_power_of_2(n: int, power: int) -> None:
    assert tiles.next_power_of_2(n) == power


# -- the two languages beside each other --

MODULES = ("nsa_tutorial.triton_basics", "nsa_tutorial.tilelang_basics")


@pytest.mark.parametrize("name", tiles.KERNELS)
def test_phases_are_the_same(name: str) -> None:
    ours, theirs = (phases(f"{module}:{name}") for module in MODULES)
    assert ours == theirs
    assert len(ours) >= 3


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("copy", "block x_tile BN"),
        ("softmax", "block x_tile scores_max scores_sum scale_log2 BR BN"),
        ("matmul", "a_tile b_tile acc step depth BM BN BK"),
        (
            "attention",
            "head batch kv_head start position num_keys q_tile k_tile v_tile p_tile acc_s acc_o scores_max scores_max_prev "
            "scores_scale scores_sum logsum scale scale_log2 step visible G D DV DT DVT BQ BK",
        ),
    ],
)
def test_names_are_the_same(name: str, names: str) -> None:
    for module in MODULES:
        code = show(f"{module}:{name}").code
        assert not [n for n in names.split() if not re.search(rf"\b{n}\b", code)], module


def test_exponents_subtract_first() -> None:
    for module in MODULES:
        code = show(f"{module}:attention", "online softmax").code
        assert re.search(r"exp2\(\(acc_s(\[i, j\])? - scores_max\[[^]]+\]\) \* scale_log2\)", code), module


# -- what one program touches --


@interpreted
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_the_recorder_sees_what_tritons_interpreter_does(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address that the real kernel loads and stores, program by program, mask by mask."""
    from triton.runtime import interpreter

    from nsa_tutorial import triton_basics

    case = pictures.example(kernel)
    tensors = {name: torch.randn(shape) for name, shape in case.shapes.items()}
    builder = interpreter.interpreter_builder
    seen: dict[tuple, list] = {}

    def spy(kind: str, original):
        def note(ptrs, *args, **keywords):
            mask = args[0] if kind == "load" else args[1]
            program = tuple(builder.grid_idx[: len(case.grid)])
            seen.setdefault(program, []).append((kind, np.sort(ptrs.data[mask.data].astype(np.int64))))
            return original(ptrs, *args, **keywords)

        return note

    monkeypatch.setattr(builder, "create_masked_load", spy("load", builder.create_masked_load))
    monkeypatch.setattr(builder, "create_masked_store", spy("store", builder.create_masked_store))
    getattr(triton_basics, kernel)[case.grid](*tensors.values(), **case.numbers)
    assert set(seen) == set(recorder.programs(case.grid))
    for program, accesses in seen.items():
        recorded = pictures.record(kernel, program).accesses
        assert [kind for kind, _ in accesses] == [a.kind for a in recorded]
        for (_, addresses), access in zip(accesses, recorded, strict=True):
            mine = np.sort(tensors[access.tensor].data_ptr() + 4 * access.touched.astype(np.int64))
            assert np.array_equal(addresses, mine)


@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_programs_store_everything_once_and_stay_inside(kernel: str) -> None:
    case = pictures.example(kernel)
    everyone = [pictures.record(kernel, program) for program in recorder.programs(case.grid)]
    assert len(everyone) == math.prod(case.grid)
    assert not any(seen.outside() for seen in everyone)
    for tensor in {a.tensor for seen in everyone for a in seen.accesses if a.kind == "store"}:
        assert (sum(seen.touched("store", tensor) for seen in everyone) == 1).all()
        assert (pictures.owners(kernel, tensor) >= 0).all()
    for tensor in {a.tensor for seen in everyone for a in seen.accesses if a.kind == "load"}:
        assert (sum(seen.touched("load", tensor) for seen in everyone) >= 1).all(), "an input that nobody reads"


def test_the_recorder_computes_what_the_kernel_computes() -> None:
    """Nothing but the kernel's own source decides what is recorded: the results are right too."""
    case, generator = pictures.example("attention"), np.random.default_rng(1)
    tensors = {name: generator.standard_normal(shape) for name, shape in case.shapes.items()}
    for program in recorder.programs(case.grid):
        recorder.run("nsa_tutorial.triton_basics:attention", program, tensors | case.numbers)
    q, k, v, o, lse = (torch.from_numpy(x) for x in tensors.values())
    expected = gqa.attention(q, k, v, scale=0.5, return_lse=True)
    torch.testing.assert_close((o, lse), expected)


@pytest.mark.parametrize("backend", LANGUAGES)
def test_a_program_reads_nothing_else(backend: str) -> None:
    """NaN wherever program (1, 1) of the recorder does not load leaves the tile that it stores as it was, in both languages."""
    device = environment.detect().device
    skip_unless_runs(backend, device)
    case = pictures.example("matmul")
    sizes = case.numbers | {"BM": 16, "BN": 16, "BK": 16, "M": 20, "N": 25, "K": 37}
    shapes = {"A": (20, 37), "B": (37, 25), "C": (20, 25)}
    arrays = {name: np.zeros(shape) for name, shape in shapes.items()}
    seen = recorder.run("nsa_tutorial.triton_basics:matmul", (1, 1), arrays | sizes)
    a, b = random(20, 37, device=device), random(37, 25, seed=1, device=device)
    poisoned = [
        x.masked_fill(torch.from_numpy(seen.touched("load", name) == 0).to(device), torch.nan) for name, x in (("A", a), ("B", b))
    ]
    stored = torch.from_numpy(seen.touched("store", "C") > 0).to(device)
    clean, dirty = (tiles.matmul(*pair, backend=backend, tile=(16, 16, 16)) for pair in ((a, b), poisoned))
    assert torch.equal(clean[stored], dirty[stored])
    assert dirty[~stored].isnan().any()
    assert int(stored.sum()) == 4 * 9


def test_the_recorder_notes_lanes_outside() -> None:
    from nsa_tutorial.course.languages import tl

    def careless(X, Y, BN):
        columns = tl.program_id(0) * BN + tl.arange(0, BN)
        tl.store(Y + columns, tl.load(X + columns))

    arrays = {"X": np.zeros(5), "Y": np.zeros(5)}
    assert recorder.run(careless, (0,), arrays | {"BN": 4}).outside() == 0
    assert recorder.run(careless, (1,), arrays | {"BN": 4}).outside() == 6


@pytest.mark.parametrize(
    ("kernel", "program", "finding"),
    [
        ("copy", (4,), "copy, program 4: 5 elements loaded, 5 stored, 6 of 16 lanes masked"),
        ("softmax", (1,), "softmax, program 1: 10 elements loaded, 10 stored, 44 of 64 lanes masked"),
        ("matmul", (0, 0), "matmul, program (0, 0): 48 elements loaded, 16 stored, 16 of 80 lanes masked"),
    ],
)
def test_program_pictures(kernel: str, program: tuple, finding: str) -> None:
    picture = pictures.draw_program(kernel, program)
    assert picture.finding == finding
    assert len(picture.png()) < 60_000


def test_owner_pictures() -> None:
    assert pictures.draw_owners().finding == "6 programs store 70 of 70 elements of C exactly once"
    assert pictures.owners("copy", "Y").tolist() == [i // 8 for i in range(37)]


def test_panel() -> None:
    panel = pictures.explore()
    assert panel.sentence == pictures.sentence("matmul", (1, 2))
    assert "Program 4 of a grid of 5 loads 5 of 37 elements of X" in panel.set(kernel="copy", program=7)
    assert panel.set(kernel="attention", program=7).startswith("Program (1, 3, 0) of a grid of 2 × 4 × 1 loads 4 of 48")
    with pytest.raises(ValueError, match="kernel: got 'transpose'"):
        pictures.example("transpose")


# -- what the compilers make of them --


@needs_tilelang
@pytest.mark.parametrize(
    ("name", "arch", "dtype"),
    [
        ("copy", "sm_80", "bfloat16"), ("softmax", "sm_80", "bfloat16"), ("matmul", "sm_80", "bfloat16"),
        ("matmul", "sm_90", "float16"), ("matmul", "sm_90", "float32"), ("attention", "sm_90", "float16"),
    ],
)  # fmt: skip
def test_tilelang_becomes_cuda(name: str, arch: str, dtype: str) -> None:
    source = lowering.basic_cuda(name, arch, dtype)
    assert "__global__ void" in source
    assert "tf32" not in source.lower()
    if name in ("matmul", "attention"):
        assert ("wgmma" in source or "mma_sync" in source) == (dtype != "float32"), "fp32 stays off the matrix units"
        assert "cp_async_gs" in source, "the loads are asynchronous"


@needs_triton
@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "bfloat16"), ("sm_90", "float32")])
def test_triton_becomes_ptx(arch: str, dtype: str) -> None:
    names = tiles.KERNELS if dtype == "bfloat16" else ("matmul", "attention")
    for name, stages in lowering.all_basic_stages(arch, dtype, names).items():
        assert set(stages) == {"ttir", "ttgir", "llir", "ptx"}
        assert f".target {arch}" in stages["ptx"]
        assert "tf32" not in stages["ptx"]
        if name in ("matmul", "attention"):
            assert ("mma.sync" in stages["ptx"] or "wgmma" in stages["ptx"]) == (dtype != "float32"), name
            assert "cp.async" in stages["ptx"], name


@needs_tilelang
def test_tilelang_lowers_the_tests_tiles() -> None:
    """What the tests on a GPU compile: one warp, tiles of 16, widths and rows that nothing divides; and the exercise's solution."""
    import tilelang
    import tvm

    from nsa_tutorial import tilelang_basics

    kernels = [
        tilelang_basics.softmax(BR=4, BN=16, dtype="bfloat16"),
        tilelang_basics.matmul(N=25, K=37, BM=16, BN=16, BK=16, dtype="bfloat16", threads=32),
        exercises.chapter_exercises("two_tile_languages")["row_sums"].solution("tilelang"),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    for kernel in kernels:
        with tvm.transform.PassContext(config=dict(tilelang_basics.PASS_CONFIGS)), target:
            assert "__global__ void" in tilelang.lower(kernel, target=target).kernel_source


def test_an_absent_language_lets_a_kernel_be_written_down() -> None:
    absent = Absent()

    @absent.jit
    def kernel(x: absent.constexpr) -> object:
        return x

    assert kernel(3) == 3


def test_excerpts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment.detect()
    monkeypatch.setattr(environment, "detect", lambda: replace(here, triton=None, tilelang=None))
    for language, name in (("triton", "Triton"), ("tilelang", "TileLang")):
        listing = lowering.basic_excerpt(language, "copy", "word")
        assert listing.title.startswith(f"{name} is not installed here")
        assert listing.code == ""


# -- the exercise in both languages --


def test_a_missing_language_is_said_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    e = exercises.chapter_exercises("two_tile_languages")["row_sums"]
    if e.missing:
        pytest.skip(e.missing[0])
    here = environment.detect()
    monkeypatch.setattr(environment, "detect", lambda: replace(here, tilelang=None))
    verdict = judge(e, e.solution)
    assert verdict.outcome == "right"
    assert "right, on all 4 cases. Not run: TileLang is not installed here" in verdict.text
    monkeypatch.setattr(environment, "detect", lambda: replace(here, tilelang=None, triton=None))
    verdict = judge(e, e.solution)
    assert verdict.outcome == "not attempted"
    assert "cannot be judged here. Not run: Triton is not installed here" in verdict.text


@pytest.mark.parametrize(("written", "unwritten"), [("triton", "TileLang"), ("tilelang", "Triton")])
def test_a_kernel_in_one_language_is_an_attempt(written: str, unwritten: str) -> None:
    e = exercises.chapter_exercises("two_tile_languages")["row_sums"]
    if e.missing:
        pytest.skip(e.missing[0])
    e = replace(e, misconceptions=())  # looking for them would compile each
    verdict = judge(e, lambda language: e.solution(language) if language == written else None)
    assert verdict.outcome == "wrong"
    assert f"there is no {unwritten} kernel yet" in verdict.text
