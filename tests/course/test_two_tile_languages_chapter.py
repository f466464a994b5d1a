"""Chapter 09's frame: both languages beside each other, what one program touches, what the
compilers make, what its exercises tell."""

from __future__ import annotations

import json
import linecache
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from nsa_tutorial.course import lowered, phases, recorder, show, solution
from nsa_tutorial.course.exercises import Exercise
from nsa_tutorial.course.exercises import two_tile_languages as chapter_09
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.kernels import two_tile_languages as tiles
from nsa_tutorial.course.languages import Absent, T, tilelang, tl, triton
from nsa_tutorial.course.unwrapped import unwrapped
from nsa_tutorial.course.watching import watch
from nsa_tutorial.course.widgets import two_tile_languages as pictures
from nsa_tutorial.exact import grouped_query_attention as gqa
from nsa_tutorial.runtime import environment

needs_tilelang = pytest.mark.skipif(
    environment.detect().tilelang is None, reason="tilelang is not installed"
)
needs_triton = pytest.mark.skipif(
    environment.detect().triton is None, reason="triton is not installed"
)
interpreted = pytest.mark.skipif(
    environment.detect().triton is None or not environment.detect().triton_interpreted,
    reason="needs Triton's interpreter",
)


# -- the two languages beside each other --

MODULES = tuple(f"nsa_tutorial.course.kernels.{x}_basics" for x in ("triton", "tilelang"))


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
        ("matmul", "a_tile b_tile acc step depth BM BN BD"),
        (
            "attention",
            "head batch kv_head start position num_keys q_tile k_tile v_tile p_tile acc_s acc_o "
            "scores_max scores_max_prev scores_scale scores_sum running_sum scale scale_log2 "
            "step visible G D DV DT DVT BQ BK",
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
        assert re.search(
            r"exp2\(\(acc_s(\[i, j\])? - scores_max\[[^]]+\]\) \* scale_log2\)", code
        ), module


# -- what one program touches --


@interpreted
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_the_recorder_sees_what_tritons_interpreter_does(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every address that the real kernel loads and stores, program by program, mask by mask."""
    from triton.runtime import interpreter

    from nsa_tutorial.course.kernels import triton_basics

    case = pictures.example(kernel)
    tensors = {name: torch.randn(shape) for name, shape in case.shapes.items()}
    builder = interpreter.interpreter_builder
    seen: dict[tuple, list] = {}

    def spy(kind: str, original):
        def note(ptrs, *args, **keywords):
            mask = args[0] if kind == "load" else args[1]
            program = tuple(builder.grid_idx[: len(case.grid)])
            seen.setdefault(program, []).append(
                (kind, np.sort(ptrs.data[mask.data].astype(np.int64)))
            )
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
        assert (sum(seen.touched("load", tensor) for seen in everyone) >= 1).all(), (
            "an input that nobody reads"
        )


def test_the_recorder_computes_what_the_kernel_computes() -> None:
    """Nothing but the kernel's own source decides what is recorded: the results are right too."""
    case, generator = pictures.example("attention"), np.random.default_rng(1)
    tensors = {name: generator.standard_normal(shape) for name, shape in case.shapes.items()}
    for program in recorder.programs(case.grid):
        recorder.run(
            "nsa_tutorial.course.kernels.triton_basics:attention", program, tensors | case.numbers
        )
    q, k, v, o, lse = (torch.from_numpy(x) for x in tensors.values())
    expected = gqa.attention(q, k, v, scale=0.5, return_lse=True)
    torch.testing.assert_close((o, lse), expected)


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_a_program_reads_nothing_else(backend: str) -> None:
    """NaN wherever program (1, 1) of the recorder does not load leaves the tile that it stores as
    it was, in both languages."""
    device = environment.detect().device
    reason = environment.detect().why_not(backend, device)
    if reason is not None:
        pytest.skip(reason)
    case = pictures.example("matmul")
    sizes = case.numbers | {"BM": 16, "BN": 16, "BD": 16, "M": 20, "N": 25, "K": 37}
    shapes = {"A": (20, 37), "B": (37, 25), "C": (20, 25)}
    arrays = {name: np.zeros(shape) for name, shape in shapes.items()}
    seen = recorder.run("nsa_tutorial.course.kernels.triton_basics:matmul", (1, 1), arrays | sizes)
    a, b = torch.randn(20, 37, device=device), torch.randn(37, 25, device=device)
    poisoned = [
        x.masked_fill(torch.from_numpy(seen.touched("load", name) == 0).to(device), torch.nan)
        for name, x in (("A", a), ("B", b))
    ]
    stored = torch.from_numpy(seen.touched("store", "C") > 0).to(device)
    clean, dirty = (
        tiles.matmul(*pair, backend=backend, tile=(16, 16, 16)) for pair in ((a, b), poisoned)
    )
    assert torch.equal(clean[stored], dirty[stored])
    assert dirty[~stored].isnan().any()
    assert int(stored.sum()) == 4 * 9


def test_the_recorder_counts_what_lies_outside() -> None:
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
        ("copy", (4,), "copy, program 4: 5 elements loaded, 5 stored"),
        ("softmax", (1,), "softmax, program 1: 10 elements loaded, 10 stored"),
        (
            "matmul",
            (0, 0),
            "matmul, program (0, 0): 4 rows of A and 4 columns of B make 16 elements of C",
        ),
        (
            "attention",
            (1, 3, 0),
            "attention, program (1, 3, 0): queries 4 and 5 of head 3 meet 10 keys of KV head 1",
        ),
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
    assert (
        "Program 4 of a grid of 5 loads 5 of X's 37 elements, and stores 5 of Y's 37."
        in panel.set(kernel="copy", program=7)
    )
    assert panel.set(kernel="attention", program=7).startswith(
        "Program (1, 3, 0) of a grid of 2 × 4 × 1 loads 4 of Q's 48, 20 of K's 40 and "
    )
    with pytest.raises(ValueError, match="kernel: got 'transpose'"):
        pictures.example("transpose")


@pytest.mark.parametrize(
    ("kernel", "programs"), [("copy", 5), ("softmax", 2), ("matmul", 6), ("attention", 8)]
)
def test_the_panel_offers_the_programs_of_the_grid(kernel: str, programs: int) -> None:
    panel = pictures.explore()
    panel.set(kernel=kernel)
    slider = panel.controls["program"]
    assert (slider.min, slider.max) == (0, programs - 1)
    found = {pictures.ids(kernel, number) for number in range(programs)}
    assert len(found) == programs
    with pytest.raises(IndexError):
        pictures.ids(kernel, programs)


def test_the_panel_says_that_the_program_moved() -> None:
    panel = pictures.explore()
    panel.controls["kernel"].value = "softmax"
    assert panel.values["program"] == 1
    assert panel.moved == "program number: 5 is out of range here, now 1."


# -- what the compilers make of them --


@pytest.mark.exhaustive
@needs_tilelang
@pytest.mark.parametrize(
    ("name", "arch", "dtype"),
    [
        ("matmul", "sm_90", "float16"),  # the text that the chapter shows
        ("matmul", "sm_90", "float32"),
        pytest.param("copy", "sm_80", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("softmax", "sm_80", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("matmul", "sm_80", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("attention", "sm_90", "float16", marks=pytest.mark.exhaustive),
    ],
)
def test_tilelang_becomes_cuda(name: str, arch: str, dtype: str) -> None:
    source = lowered.basic_cuda(name, arch, dtype)
    assert "__global__ void" in source
    assert "tf32" not in source.lower()
    if name in ("matmul", "attention"):
        assert ("wgmma" in source or "mma_sync" in source) == (dtype != "float32"), (
            "fp32 stays off the tensor cores"
        )
        assert "cp_async_gs" in source, "the loads are asynchronous"


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("sm_90", "float32"), pytest.param("sm_80", "bfloat16", marks=pytest.mark.exhaustive)],
)
def test_triton_becomes_ptx(arch: str, dtype: str) -> None:
    names = tiles.KERNELS if dtype == "bfloat16" else ("matmul",)
    for name in names:
        stages = lowered.basic_stages(name, arch, dtype)
        assert set(stages) == {"ttir", "ttgir", "llir", "ptx"}
        assert f".target {arch}" in stages["ptx"]
        assert "tf32" not in stages["ptx"]
        if name in ("matmul", "attention"):
            assert ("mma.sync" in stages["ptx"] or "wgmma" in stages["ptx"]) == (
                dtype != "float32"
            ), name
            assert "cp.async" in stages["ptx"], name


@needs_tilelang
@pytest.mark.exhaustive
def test_what_the_page_writes_in_tilelang_lowers() -> None:
    import tilelang as language
    import tvm

    program = in_a_cell("gate_program", cell("@tilelang.jit\ndef gate_program"))
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    with target:
        source = language.lower(unwrapped(program)(16, 64), target=target).kernel_source
    assert "__global__ void" in source


@needs_tilelang
@pytest.mark.exhaustive
def test_tilelang_lowers_the_tests_tiles() -> None:
    """What the tests on a GPU compile: one warp, tiles of 16, widths and rows that nothing divides;
    and the exercise's solution."""
    import tilelang
    import tvm

    from nsa_tutorial.course.kernels import tilelang_basics

    kernels = [
        tilelang_basics.softmax(BR=4, BN=16, dtype="bfloat16"),
        tilelang_basics.matmul(N=25, K=37, BM=16, BN=16, BD=16, dtype="bfloat16", threads=32),
        unwrapped(chapter_09.row_max_program)(4, 16),
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
        listing = lowered.excerpt(language, "word", name="copy")
        assert listing.title.startswith(f"{name} is not installed here")
        assert listing.code == ""


# -- exercises --

EXERCISES = {e.name: e for e in chapter_09.EXERCISES}
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "09_two_tile_languages.ipynb"


def runnable(name: str) -> Exercise:
    if EXERCISES[name].missing:
        pytest.skip(EXERCISES[name].missing[0])
    return EXERCISES[name]


def knowing(name: str, *misconceptions: str) -> Exercise:
    """The exercise with these misconceptions alone: looking for another runs its kernel, too."""
    e = runnable(name)
    return replace(e, misconceptions=tuple(m for m in e.misconceptions if m.name in misconceptions))


def cell(start: str) -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (found,) = (text for c in cells if (text := "".join(c["source"])).startswith(start))
    return found


def in_a_cell(name: str, source: str) -> Callable:
    """The function of that name, as a cell defines it."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"T": T, "tilelang": tilelang, "tl": tl, "triton": triton, "torch": torch}
    exec(compile(source, file, "exec", dont_inherit=True), namespace)
    return namespace[name]


def edited(name: str, *edits: tuple[str, str]) -> Callable:
    """The chapter's cell for an exercise, with some of its text replaced."""
    source = cell(f"def {name}(")
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    return in_a_cell(name, source)


def test_a_missing_language_is_said_and_not_counted() -> None:
    e = EXERCISES["program_offsets"]
    absent = replace(e.cases[1], why_not=lambda: "TileLang is not installed here.")
    verdict = judge(replace(e, cases=(e.cases[0], absent)), e.solution)
    assert verdict.outcome == "right"
    assert "Not run: TileLang is not installed here" in verdict.text
    verdict = judge(replace(e, cases=(absent,)), e.solution)
    assert verdict.outcome == "not attempted"
    assert "cannot be judged here. Not run: TileLang is not installed here" in verdict.text


@pytest.mark.parametrize(
    ("name", "comment"),
    [
        ("row_variance", "# [BN], and BN may be larger than N"),
        ("tile_product", "# 3: [BM, BN], one more product in the sum"),
    ],
)
def test_a_kernel_as_given_is_no_attempt(name: str, comment: str) -> None:
    e = runnable(name)
    assert judge(e, edited(name)).outcome == "not attempted"
    assert judge(e, edited(name, (comment, "# mine"))).outcome == "not attempted"


@pytest.mark.parametrize(
    "name", ["row_variance", pytest.param("tile_product", marks=pytest.mark.exhaustive)]
)
def test_what_is_no_kernel_is_told(name: str) -> None:
    told = judge(runnable(name), lambda: lambda X: None).text
    assert "not decorated with @triton.jit" in told


def test_a_kernel_that_is_not_returned_is_told() -> None:
    e = runnable("row_variance")
    verdict = judge(e, edited("row_variance", ("return kernel", "None"), ("- mean", "+ mean")))
    assert verdict.outcome == "wrong"
    assert "returns None: `return kernel`" in verdict.text


START = ("row * BN", "row * N")
HIDE = ("x_tile - mean", "tl.where(exists, x_tile - mean, 0.0)")


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ([START, HIDE], ()),
        ([START, ("tl.sum(difference * difference, axis=0) / N",
          "tl.sum(x_tile * x_tile, axis=0) / N - mean * mean")], ()),
        ([("=0.0)", '=float("-inf"))')],
         ("filling masked places as for a maximum", "letting the padding into the variance")),
        ([START], ("letting the padding into the variance",)),
        ([HIDE], ("stepping to the next row by the width of the tile",)),
        ([START, HIDE, ("axis=0) / N\n", "axis=0) / BN\n")],
         ("taking the mean over the whole tile",)),
        ([START, HIDE, ("axis=0) / N)", "axis=0) / BN)")],
         ("dividing the squares by the length of the tile",)),
        ([("row * BN", "row"), HIDE], ("starting a row at every element",)),
        ([START, HIDE, (", other=0.0", "")], ("a masked load without `other`",)),
        ([START, HIDE, (", other=0.0)", ")\n        x_tile = tl.where(exists, x_tile, 0.0)")], ()),
        ([START, HIDE, ("=0.0)", '=float("-inf"))')],
         ("filling masked places as for a maximum",)),
        ([START, (HIDE[0], HIDE[1].replace("0.0", 'float("-inf")'))],
         ("filling masked places as for a maximum",)),
        ([START, (HIDE[0], "tl.where(x_tile == 0, 0.0, x_tile - mean)")],
         ("taking a 0 of the data for a masked place",)),
        ([START, (HIDE[0], "tl.where(exists, 0.0, x_tile - mean)")],
         ("a `where` with its branches swapped",)),
        ([START, HIDE, ("axis=0) / N\n", "axis=0) / BN\n"), ("axis=0) / N)", "axis=0) / BN)")],
         ("taking the mean over the whole tile", "dividing the squares by the length of the tile")),
    ],
    ids=["mended", "another formula", "minus infinity alone", "padding", "start", "mean", "divisor",
         "every element", "no other", "other set later", "minus infinity",
         "hidden as for a maximum", "hidden by value", "swapped", "both by BN"],
)  # fmt: skip
def test_half_mended_variances_are_named(edits: list, named: tuple) -> None:
    verdict = judge(runnable("row_variance"), edited("row_variance", *edits))
    assert (verdict.outcome == "right", verdict.misconceptions) == (not named, named)


LOOP = re.search(r"a_mask = .* acc = [^\n]*", cell("def tile_product("), re.DOTALL).group()
LINES = {
    "a_mask": "(rows < M)[:, None] & (depth < K)",
    "b_mask": "(depth < K)[:, None] & (columns < N)",
    "a_tile": "tl.load(A + rows[:, None] * K + depth, mask=a_mask, other=0.0)",
    "b_tile": "tl.load(B + depth[:, None] * N + columns, mask=b_mask, other=0.0)",
    "acc": 'tl.dot(a_tile, b_tile, acc, input_precision="ieee")',
}


def product(**changed: str) -> Callable:
    """The cell's kernel with the loop written out, some of its lines changed."""
    lines = [f"{name} = {value}" for name, value in ({"depth": "depth"} | LINES | changed).items()]
    return edited("tile_product", (LOOP, ("\n" + 12 * " ").join(lines)))


def firsts(rows: list[tuple], ids: list[str]) -> list:
    """Of several ways to one mistake, the first; the others are exhaustive."""
    names = [named for _, named in rows]
    return [
        pytest.param(*row, id=name, marks=[pytest.mark.exhaustive] * (row[1] in names[:i]))
        for i, (row, name) in enumerate(zip(rows, ids, strict=True))
    ]


@pytest.mark.parametrize(
    ("changed", "named"),
    firsts([
        ({}, ()),
        ({"acc": 'acc + tl.dot(a_tile, b_tile, input_precision="ieee")'}, ()),
        ({"acc": 'tl.dot(a_tile, b_tile, input_precision="ieee")'},
         ("keeping the last step only",)),
        ({"acc": "tl.dot(a_tile, b_tile, acc)"}, ("a dot that rounds its inputs to TF32",)),
        ({"acc": "tl.dot(a_tile, b_tile, acc, input_precision='tf32')"},
         ("a dot that rounds its inputs to TF32",)),
        ({"acc": "acc"}, ("a product that is never added",)),
        ({"a_mask": "(rows < M)[:, None]"}, ("no mask along A's depth",)),
        ({"b_mask": "(columns < N)[None, :]"}, ("no mask along the depth",)),
        ({"a_mask": "depth[None, :] < K", "b_mask": "depth[:, None] < K"},
         ("a mask along the depth alone",)),
        ({"a_tile": "tl.load(A + rows[:, None] * K + depth)",
          "b_tile": "tl.load(B + depth[:, None] * N + columns)"}, ("masks that keep nothing out",)),
        ({name: LINES[name].replace("&", "|") for name in ("a_mask", "b_mask")},
         ("masks that keep nothing out",)),
        ({name: LINES[name].replace(", other=0.0", "") for name in ("a_tile", "b_tile")},
         ("masked loads without `other`",)),
        ({"a_mask": "(rows < M) & (depth < K)"},
         ("a mask along a line, where a table is needed",)),
        ({"b_mask": "(depth < K) & (columns < N)"},
         ("a mask along a line, where a table is needed",)),
        ({"a_mask": "(rows < M) & (depth < K)", "b_mask": "(depth < K) & (columns < N)"},
         ("a mask along a line, where a table is needed",)),
        ({"acc": "acc + a_tile * b_tile"}, ("multiplying the tiles element by element",)),
        ({"depth": "tl.arange(0, BD)"}, ("loading the same step of K again and again",)),
        ({"a_tile": LINES["a_tile"].replace("rows[", "depth[")},
         ("taking the rows of A from `depth`",)),
        ({"b_tile": LINES["b_tile"].replace("depth[", "rows[")},
         ("taking the rows of B from `rows`",)),
        ({"a_tile": LINES["a_tile"].replace("[:, None]", "")},
         ("offsets of A along a line, where a table is needed",)),
        ({"b_tile": LINES["b_tile"].replace("* N", "* K")},
         ("stepping to B's next row by its number of rows",)),
        ({"b_tile": "tl.load(B + columns[:, None] * N + depth, mask=b_mask, other=0.0)"},
         ("loading B's tile on its side",)),
        ({"b_tile": LINES["b_tile"].replace("[:, None]", "")},
         ("offsets of B along a line, where a table is needed",)),
        *(({"b_tile": f"tl.load(B + {offsets}, mask=b_mask, other=0.0)"},
           ("reading B as if its columns lay one after the other",))
          for offsets in ("depth[:, None] + columns * K", "columns[:, None] * K + depth")),
        ({"acc": "acc + " + LINES["acc"]}, ("adding the sum so far twice",)),
        ({"b_mask": "(depth < K) & (columns < N)[:, None]"},
         ("a mask of B that does not lie as its tile does",)),
        ({"b_mask": "a_mask"}, ("A's mask for B",)),
        ({"acc": 'tl.dot(b_tile, a_tile, acc, input_precision="ieee")'},
         ("multiplying in the wrong order",)),
    ],
    ["right", "added", "last step", "no ieee", "tf32", "nothing", "a's depth", "b's depth",
         "depth alone",
         "no masks", "or", "no other", "a's mask a line",
         "b's mask a line", "both a line",
         "element by element", "first step", "rows of a from depth",
         "rows of b from rows", "a line", "stride of b", "b on its side", "b a line",
         "b by columns", "b by columns, turned", "added twice",
         "b's mask turned", "a's mask", "b times a"]),
)  # fmt: skip
def test_a_readers_loop_is_judged(changed: dict, named: tuple) -> None:
    verdict = judge(runnable("tile_product"), product(**changed))
    assert (verdict.outcome == "right", verdict.misconceptions) == (not named, named)


def test_loads_past_the_end_are_seen_where_the_product_is_right() -> None:
    """Rows past the end of A are never stored, and still nobody may load them."""
    e = runnable("tile_product")
    careless = product(a_mask="(rows >= 0)[:, None] & (depth < K)")
    with pytest.raises(chapter_09.LoadsElsewhere, match=r"C is right, but .* outside of A"):
        e.run(careless, 20, 25, 37)
    assert "C is right, but" in judge(e, careless).text


def test_and_between_masks_is_told() -> None:
    """The interpreter takes the second mask alone, and would let it pass."""
    verdict = judge(knowing("tile_product"), product(a_mask=LINES["a_mask"].replace("&", "and")))
    assert verdict.outcome == "wrong"
    assert "`(a) & (b)`" in verdict.text


def offsets_as_a_table(pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int) -> list:
    rows = range(pid_m * BM, min(M, (pid_m + 1) * BM))
    columns = range(pid_n * BN, min(N, (pid_n + 1) * BN))
    return [[i * N + j for j in columns] for i in rows]


def offsets_with_marks(pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int) -> list:
    rows, columns = pid_m * BM + torch.arange(BM)[:, None], pid_n * BN + torch.arange(BN)
    return torch.where((rows < M) & (columns < N), rows * N + columns, -1).flatten().tolist()


def offsets_with_swapped_sides(
    pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int
) -> list[int]:
    return chapter_09.program_offsets(pid_m, pid_n, M, N, BN, BM)


def offsets_of_the_whole_tile(
    pid_m: int, pid_n: int, M: int, N: int, BM: int, BN: int
) -> torch.Tensor:
    rows, columns = pid_m * BM + torch.arange(BM), pid_n * BN + torch.arange(BN)
    return rows[:, None] * N + columns


@pytest.mark.parametrize(
    ("typed", "mistake"),
    [
        (offsets_with_swapped_sides, "swapping the two sides of the tile"),
        (offsets_of_the_whole_tile, "giving the whole tile, as a table"),
        (offsets_as_a_table, "giving a list for each row of the tile"),
        (offsets_with_marks, "writing −1 for masked elements"),
    ],
)
def test_what_a_reader_would_type_is_recognised(typed: Callable, mistake: str) -> None:
    assert judge(EXERCISES["program_offsets"], typed).misconceptions == (mistake,)


def test_whole_numbers_are_told_in_one_line() -> None:
    text = judge(EXERCISES["program_offsets"], offsets_of_the_whole_tile).text
    assert "with pid_m = 0, pid_n = 1, M = 4, N = 4, BM = 2, BN = 2" in text


# -- what is built --


def solved(name: str, *edits: tuple[str, str]) -> Callable:
    """The solution as a reader would type it, with some of its text replaced."""
    source = solution("two_tile_languages", name).code
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return in_a_cell(name, source)


BUILT = ("triton_row_max", "tilelang_row_max")


@pytest.mark.parametrize("name", BUILT)
def test_an_empty_cell_is_no_attempt(name: str) -> None:
    e = runnable(name)
    empty = in_a_cell(name, cell({"triton_row_max": "# your kernel",
                                  "tilelang_row_max": "# your program"}[name]))  # fmt: skip
    assert judge(e, empty).outcome == "not attempted"


@pytest.mark.parametrize("name", BUILT)
def test_a_maximum_without_a_kernel_is_refused(name: str) -> None:
    by_hand = lambda x, BR, BN: torch.tensor([max(row) for row in x.tolist()])  # noqa: E731
    verdict = judge(replace(runnable(name), misconceptions=()), by_hand)
    assert verdict.held == 0
    assert "kernel was launched" in verdict.text
    verdict = judge(replace(runnable(name), misconceptions=()), lambda x, BR, BN: x.amax(1))
    assert "PyTorch's maximum: you build it yourself here" in verdict.text


@pytest.mark.parametrize(
    "edits",
    [
        [("x, y, R, N, x.stride(0), x.stride(1)", "x.contiguous(), y, R, N, N, 1")],
        [("triton.cdiv(R, BR)", "-(-R // BR)"), (", num_warps=4", "")],
        [("tl.range(0, N, BN)", "range(0, N, BN)")],
        [('exists, other=float("-inf"))', 'exists)\n        x_tile = tl.where(exists, x_tile, '
          'float("-inf"))')],
    ],
    ids=["contiguous", "grid by hand", "python's range", "hidden by where"],
)  # fmt: skip
def test_a_row_maximum_is_free_in_form(edits: list) -> None:
    e = replace(runnable("triton_row_max"), misconceptions=())
    assert judge(e, solved("triton_row_max", *edits)).outcome == "right"


def test_a_load_past_the_end_is_told_where_the_maximum_is_right() -> None:
    verdict = judge(
        knowing("triton_row_max", "a mask on the columns alone"),
        solved("triton_row_max", ("(rows < R)[:, None] & (columns < N)", "columns < N")),
    )
    assert verdict.misconceptions == ("a mask on the columns alone",)
    assert "row_max_kernel: program 1 loads 4 elements outside of all its arguments" in verdict.text


def test_an_input_that_a_kernel_changes_is_told() -> None:
    verdict = judge(
        knowing("triton_row_max"),
        solved("triton_row_max", ("tl.store(Y + rows", "tl.store(X + rows")),
    )
    assert "the kernel stored to x" in verdict.text


STEP = "T.reduce_max(x_tile, largest, dim=1, clear=False)"
LOAD = "T.copy(X[row : row + BR, column : column + BN], x_tile)"
ALLOCATE = 'largest = T.alloc_fragment([BR], "float32")'
STORE = "T.copy(largest, Y[row : row + BR])"
FILL = 'T.fill(largest, -T.infinity("float32"))'
# wrong maxima of a kernel that has to be compiled first: `make test` tries one of them
compiled = partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("edits", "told"),
    [
        ([(f"            {FILL}\n", "")], "a maximum that was never set"),
        compiled([(", clear=False", "")], "clearing the maximum so far at each step"),
        compiled([(f"            {FILL}\n", ""), (STEP, f"{FILL}\n{16 * ' '}{STEP}")],
         "clearing the maximum so far at each step"),
        ([(LOAD, "x_tile = X[row : row + BR, column : column + BN]")],
         "a slice of X is no tile. `T.copy` fills a tile from a slice"),
        ([(ALLOCATE, "largest = T.alloc_fragment([BR], accum_dtype)")],
         "write the dtype here, in quotes"),
        ([("block * BR", "block * BR + tl.arange(0, BR)")], "`tl` belongs to Triton"),
        ([(f"            {ALLOCATE}\n", "")],
         "name 'largest' is not defined. If it is a tile, where is it allocated?"),
        ([(STEP, f"largest = {STEP}")], "It returns nothing, so write no `largest =`"),
        ([("dim=1", "dim=0")], "One number is left for each row of the tile"),
        ([(LOAD, f"x_tile = {LOAD.replace(', x_tile', '')}")],
         "`T.copy` takes a source and a target"),
        ([(STORE, "Y[row : row + BR] = largest")], "and `T.copy` moves it"),
        compiled([("column : column + BN", "0:BN")], "looking at the first tile only"),
        compiled([(f"            {STORE}\n", "")], "a maximum that is never stored"),
        compiled([("x.contiguous()", "x")],
         "a view, where the kernel expects rows that follow each other"),
    ],
    ids=["never filled", "cleared", "filled at each step", "slice", "dtype", "arange",
         "not allocated", "assigned", "other axis", "copy's result", "stored by =",
         "same columns", "no store", "a view"],
)  # fmt: skip
def test_a_readers_row_maximum_is_judged(edits: list, told: str) -> None:
    verdict = judge(knowing("tilelang_row_max", told), solved("tilelang_row_max", *edits))
    assert verdict.outcome in ("wrong", "misconception")
    assert told in verdict.text
    assert "script.ir_builder" not in verdict.text


def by_loops(first: str, second: str) -> Callable:
    """A maximum by two loops in place of the reduction."""
    loops = f"for i in {first}(BR):\n{20 * ' '}for j in {second}(BN):\n{24 * ' '}"
    step = f"{loops}largest[i] = T.max(largest[i], x_tile[i, j])"
    return solved("tilelang_row_max", (STEP, step))


def test_turns_that_share_a_place_are_told() -> None:
    """On a CPU their maximum is right, and no case fails."""
    name = "turns of `T.Parallel` that share `largest[i]`"
    verdict = judge(knowing("tilelang_row_max", name), by_loops("T.serial", "T.Parallel"))
    assert verdict.misconceptions == (name,)
    assert "turns of T.Parallel add to the same places of `largest`" in verdict.text


def test_turns_with_places_of_their_own_are_right() -> None:
    e = runnable("tilelang_row_max")
    assert judge(e, by_loops("T.Parallel", "T.serial")).outcome == "right"


# -- a race --

SUMS = cell("@triton.jit\ndef column_sums_kernel")
STORE_SUM = "tl.store(Y + columns, so_far, mask=columns < N)"


def sums(*edits: tuple[str, str]) -> Callable:
    """The chapter's racing sums, with some of their text replaced."""
    source = SUMS
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    return in_a_cell("column_sums", source)


def test_sums_as_given_race_and_are_no_attempt() -> None:
    e, given = runnable("column_sums"), sums()
    assert torch.equal(given(torch.ones(9, 5)), torch.full((5,), 9.0)), "right on a CPU"
    assert "program 1 loads 5 elements of `Y` where program 0 stores" in repr(
        watch(given, torch.ones(9, 5))
    )
    assert judge(e, given).outcome == "not attempted"


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ([(STORE_SUM, "tl.atomic_add(Y + columns, tl.sum(x_tile, axis=0), mask=columns < N)")], ()),
        ([("BR=4,", "BR=triton.next_power_of_2(R),"), ("(triton.cdiv(R, 4),)", "(1,)")], ()),
        ([(STORE_SUM, f"tl.debug_barrier()\n    {STORE_SUM}")],
         ("a load, an addition and a store, one after the other",)),
        ([(STORE_SUM, "tl.atomic_add(Y + columns, so_far, mask=columns < N)")],
         ("adding the sum so far twice",)),
        ([("(triton.cdiv(R, 4),)", "(1,)")], ("summing the first four rows only",)),
    ],
    ids=["atomic", "one program", "a barrier", "added twice", "four rows"],
)  # fmt: skip
def test_mended_sums_are_judged(edits: list, named: tuple) -> None:
    e = runnable("column_sums")
    if edits[0][1].startswith("tl.atomic_add") and not named:
        edits = [*edits, ("    so_far = tl.load(Y + columns, mask=columns < N, other=0.0)\n", ""),
                 ("    so_far += tl.sum(x_tile, axis=0)\n", "")]  # fmt: skip
    verdict = judge(e, sums(*edits))
    assert (verdict.outcome == "right", verdict.misconceptions) == (not named, named)


@pytest.mark.parametrize(
    ("acc", "told"),
    [
        ("acc + a_tile @ b_tile", "take `tl.dot`"),
        ("torch.where(acc > 0, acc, acc)", "functions of `torch` take tensors"),
    ],
    ids=["at", "torch"],
)
def test_words_that_are_not_tritons_are_told_in_a_line(acc: str, told: str) -> None:
    verdict = judge(knowing("tile_product"), product(acc=acc))
    assert told in verdict.text
    assert "overload" not in verdict.text


@pytest.mark.parametrize(
    ("old", "new"), [("T.serial", "T.range"), ("T.reduce_max", "T.max_of")], ids=["range", "max"]
)
def test_a_typo_in_tilelang_prints_the_verdict_alone(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TileLang logs the code that it generated, and here it stays silent; afterwards it speaks."""
    e, logger = knowing("tilelang_row_max"), logging.getLogger("tilelang")
    said = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    logger.addHandler(handler)
    try:
        verdict = judge(e, solved("tilelang_row_max", (old, new)))
        assert not said
        with pytest.raises(AttributeError):
            e.run(solved("tilelang_row_max", (old, new)), *e.cases[0].arguments())
        assert [record.levelname for record in said] == ["CRITICAL"]
    finally:
        logger.removeHandler(handler)
    assert f"has no attribute '{new[2:]}'" in verdict.text


# -- the text --


def prose() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def test_the_exercises_take_as_long_as_the_chapter_says() -> None:
    required = sum(EXERCISES[name].minutes for name in (*BUILT, "column_sums"))
    assert f"About 75 minutes, {required} of them exercises" in prose()
    assert f"Who stores what? ({EXERCISES['program_offsets'].minutes} minutes)" in prose()
    parts = re.findall(r"\*\*\d\. [^*]*?\((\d+) minutes\)", prose())
    assert sum(map(int, parts)) == 60
    assert len(parts) == 5
    assert prose().count("about 60 minutes") == 2


@needs_triton
def test_the_least_tiles_of_a_dot_are_what_the_text_says() -> None:
    """For CUDA, where the installed Triton has its limits in the compiler: M, N, K."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import min_dot_size

    least = min_dot_size(GPUTarget("cuda", 90, 32))
    assert (
        "takes tiles of one row, and wants 16 numbers along the depth (32 for numbers of eight"
        in (" ".join(prose().split()))
    )
    for dtype, depth in ((tl.float16, 16), (tl.float32, 16), (tl.float8e5, 32)):
        side = tl.block_type(dtype, [1, 1])
        assert least(side, side) == (1, 1, depth)


def test_no_tile_that_is_large_enough_fits() -> None:
    """The text's tile of 512: its loads are shorter than the arithmetic, and `acc` fits nowhere."""
    arithmetic = 2 * 4096**3 / 989e12
    loads = {side: 4 * 4096**3 / side / 4.8e12 for side in (64, 128, 256, 512)}
    assert min(side for side, time in loads.items() if time < arithmetic) == 512
    assert "takes 1,024 KiB" in prose()
    assert 512 * 512 * 4 == 1024 * 1024 > 256 * 1024
    assert round(arithmetic * 1e3, 2) == 0.14


def test_occupancy_in_the_text_fits() -> None:
    """Two programs of 100 KiB fit into a multiprocessor's 228, each with the KiB that CUDA keeps
    for itself; three do not."""
    assert "takes 100 KiB of\n  shared memory leaves room for one more" in prose()
    assert 2 * (100 + 1) <= 228 < 3 * (100 + 1)


@pytest.mark.exhaustive
@needs_tilelang
def test_the_stages_lie_where_the_text_says() -> None:
    assert "two stages × 64 × 32 numbers × 2 bytes = 8,192" in prose()
    source = lowered.basic_cuda("matmul")
    assert f"buf_dyn_shmem + {2 * 64 * 32 * 2}" in source
    assert f"float acc[{64 * 64 // 128}]" in source
