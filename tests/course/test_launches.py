"""An exercise that asks for a kernel: launches are counted, numbers without one are refused, and
what is built runs from the reader's file."""

from __future__ import annotations

import linecache
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa_tutorial.course import checking, keeping, mine, reader
from nsa_tutorial.course.attempts import call
from nsa_tutorial.course.diffs import Edited, diffs
from nsa_tutorial.course.exercises import Case, Exercise, Stage
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import T, tilelang, tl, triton
from nsa_tutorial.course.launches import counting
from nsa_tutorial.course.unwrapped import unwrapped
from nsa_tutorial.course.watching import watch
from nsa_tutorial.runtime import environment

here = environment.detect()
for_each = pytest.mark.parametrize(
    "language",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(here.why_not(name, here.device) is not None, reason=name)
        )
        for name in ("triton", "tilelang")
    ],
)


@triton.jit
def double_kernel(X, Y, N, BN: tl.constexpr):
    places = tl.program_id(0) * BN + tl.arange(0, BN)
    x_tile = tl.load(X + places, mask=places < N, other=0.0)
    tl.store(Y + places, 2 * x_tile, mask=places < N)


def triton_double(x):
    y = torch.empty_like(x)
    double_kernel[(triton.cdiv(len(x), 4),)](x, y, len(x), BN=4)
    return y


@tilelang.jit
def double_program(BN):
    N = T.dynamic("N")

    @T.prim_func
    def kernel(X: T.Tensor([N], "float32"), Y: T.Tensor([N], "float32")):
        with T.Kernel(T.ceildiv(N, BN), threads=32) as block:
            x_tile = T.alloc_fragment([BN], "float32")
            T.copy(X[block * BN : block * BN + BN], x_tile)
            for i in T.Parallel(BN):
                x_tile[i] = 2 * x_tile[i]
            T.copy(x_tile, Y[block * BN : block * BN + BN])

    return kernel


def tilelang_double(x):
    y = torch.empty_like(x)
    double_program(4)(x, y)
    return y


SOLUTIONS = {
    "triton": (triton_double, double_kernel), "tilelang": (tilelang_double, double_program),
}  # fmt: skip


def numbers(count: int) -> Case:
    return Case(f"{count} numbers", lambda: (torch.arange(float(count), device=here.device),))


def exercise(language: str) -> Exercise:
    solution, part = SOLUTIONS[language]
    wrong = {"triton": ("2 * x_tile, mask", "x_tile + 2, mask"),
             "tilelang": ("2 * x_tile[i]", "x_tile[i] + 2")}  # fmt: skip
    rows = [(*wrong[language], "adding 2", "What is twice 3?")]
    return Exercise(
        name=solution.__name__, statement="", minutes=5, difficulty=1, solution=solution,
        parts=(part,), launches=language,
        stages=(Stage("a tile", (numbers(4),)), Stage("more", (numbers(9),))),
        misconceptions=diffs(solution, rows, parts=(part,)),
    )  # fmt: skip


def cells(name: str, *sources: str) -> Callable:
    """A function of a notebook's cells."""
    names = {"__name__": "__main__", "torch": torch, "triton": triton, "tl": tl,
             "tilelang": tilelang, "T": T}  # fmt: skip
    for source in sources:
        file = f"<cell {abs(hash(source))}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec", dont_inherit=True), names)
    return names[name]


@for_each
def test_launches_are_counted(language: str) -> None:
    double, x = SOLUTIONS[language][0], torch.ones(9, device=here.device)
    with counting(language) as launched:
        double(x)
        double(x)
    double(x)
    assert len(launched) == 2
    with counting({"triton": "tilelang", "tilelang": "triton"}[language]) as others:
        double(x)
    assert not others


@for_each
def test_numbers_without_a_kernel_are_refused(language: str) -> None:
    e = exercise(language)
    assert judge(e, e.solution).outcome == "right"
    verdict = judge(e, lambda x: 2 * x)
    assert (verdict.outcome, verdict.held) == ("wrong", 0)
    name = {"triton": "Triton", "tilelang": "TileLang"}[language]
    assert f"No {name} kernel was launched: the numbers came from PyTorch." in verdict.text
    assert "NotLaunched" not in verdict.text
    assert judge(replace(e, launches=None), lambda x: 2 * x).outcome == "right"


@for_each
def test_the_courses_functions_may_be_forbidden_beside(language: str) -> None:
    """And compiling the attempt's kernel is none of them."""
    e = replace(exercise(language), forbidden=(("nsa_tutorial", "the course's own function"),))
    name, (solution, part) = e.name, SOLUTIONS[language]
    code = f"{checking.show(part).code}\n\n{checking.show(solution).code}"
    fresh = cells(name, code.replace("2 *", "2.0 *"))
    assert call(e, fresh, e.cases[0]).tolist() == [0, 2, 4, 6]


@for_each
def test_what_no_program_stores_is_nan(language: str) -> None:
    """And not what an earlier result left in the same memory."""
    e = exercise(language)
    solution, part = SOLUTIONS[language]
    code = f"{checking.show(part).code}\n\n{checking.show(solution).code}"
    half = {"triton": ("triton.cdiv(len(x), 4)", "1"), "tilelang": ("T.ceildiv(N, BN)", "1")}
    few = cells(e.name, code.replace(*half[language]))
    assert call(e, e.solution, e.cases[1]).isfinite().all()
    assert call(e, few, e.cases[1])[4:].isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@for_each
def test_a_kernel_of_the_other_language_is_none(language: str) -> None:
    other = {"triton": "tilelang", "tilelang": "triton"}[language]
    if here.why_not(other, here.device) is not None:
        pytest.skip(other)
    assert judge(exercise(language), SOLUTIONS[other][0]).held == 0


@for_each
def test_an_attempt_that_raises_before_its_launch_is_told_why(language: str) -> None:
    assert "KeyError" in judge(exercise(language), lambda x: {}["x"]).text


@for_each
def test_a_mistake_may_stand_in_the_kernel(language: str) -> None:
    e = exercise(language)
    (known,) = e.misconceptions
    assert judge(e, known.wrong).misconceptions == ("adding 2",)
    assert judge(e, e.solution).outcome == "right", "the right kernel is still in its place"
    with pytest.raises(ValueError, match="is to stand once in the source"):
        Edited(e.solution, {known.wrong.edits.popitem()[0]: ""}).source  # noqa: B018


@for_each
def test_the_solution_shows_kernel_and_launch(language: str, monkeypatch) -> None:
    e = exercise(language)
    monkeypatch.setattr(checking, "chapter_exercises", lambda _: {e.name: e})
    code = checking.solution("chapter", e.name).code
    assert code.index(f"def {unwrapped(e.parts[0]).__name__}") < code.index(f"def {e.name}(x):")
    assert code.startswith({"triton": "@triton.jit\n", "tilelang": "@tilelang.jit\n"}[language])
    assert judge(e, cells(e.name, code)).outcome == "right"


@for_each
def test_kernel_and_launch_are_kept_and_run_from_the_file(
    language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = exercise(language)
    (tmp_path / reader.FOLDER).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keeping, "all_builds", lambda: [("two_tile_languages", e)])
    monkeypatch.setattr(checking, "chapter_exercises", lambda _: {e.name: e})
    kernel, launch = checking.solution("chapter", e.name).code.split(f"def {e.name}")
    told = keeping.keep("two_tile_languages", e, cells(e.name, kernel, f"def {e.name}{launch}"))
    assert told.startswith("Kept in my_nsa.py"), told
    text = (tmp_path / keeping.FILE).read_text()
    wanted = {
        "triton": "import triton\nimport triton.language as tl\n",
        "tilelang": "import tilelang\nimport tilelang.language as T\n",
    }
    assert set(wanted[language].splitlines()) <= set(text.splitlines())
    assert text.count(f"@{language}.jit") == 1
    assert judge(e, keeping.built(e.name)).outcome == "right"
    table, all_hold = mine.report(lambda _: keeping.built(e.name))
    assert all_hold
    assert "✓ a tile  ✓ more" in table


@pytest.mark.exhaustive
def test_a_library_with_kernels_runs_in_a_process_of_its_own() -> None:
    """`python -m nsa_tutorial.course.mine` imports the file before it imports any chapter."""
    installed = [name for name in SOLUTIONS if here.why_not(name, here.device) is None]
    text = "".join(
        f"import {name}\nimport {name}.language as {'tl' if name == 'triton' else 'T'}\n"
        f"{checking.show(SOLUTIONS[name][1]).code}\n{checking.show(SOLUTIONS[name][0]).code}\n"
        for name in installed
    )
    code = (
        "import sys, torch\nfrom nsa_tutorial.course import keeping\n"
        "module = keeping.module_of('import torch\\n' + sys.argv[1])\n"
        f"for name in {installed}:\n"
        f"    x = torch.arange(9.0, device={here.device!r})\n"
        "    print(torch.equal(getattr(module, name + '_double')(x), 2 * x))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * len(installed), done.stderr


# -- TileLang on a CPU --

on_a_cpu = pytest.mark.skipif(
    here.gpu is not None or here.why_not("tilelang", "cpu") is not None,
    reason="TileLang decides for itself where there is a GPU",
)


@on_a_cpu
def test_results_that_tilelang_allocates() -> None:
    program = tilelang.jit(unwrapped(double_program), out_idx=[-1])
    x = torch.arange(9.0)
    assert torch.equal(program(4)(x), 2 * x)


@on_a_cpu
def test_an_eager_kernel() -> None:
    @tilelang.jit
    def double(X, Y, BN: int = 4):
        N = T.const("N")
        X: T.Tensor[[N], "float32"]  # noqa: F821, UP037
        Y: T.Tensor[[N], "float32"]  # noqa: F821, UP037
        with T.Kernel(T.ceildiv(N, BN), threads=32) as block:
            for i in T.Parallel(BN):
                if block * BN + i < N:
                    Y[block * BN + i] = 2 * X[block * BN + i]

    x, y = torch.arange(9.0), torch.zeros(9)
    double(x, y)
    assert torch.equal(y, 2 * x)


@on_a_cpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_tile_that_nobody_set_spoils_the_result(dtype: str) -> None:
    """Also a maximum, to which NaN would do nothing."""

    @tilelang.jit
    def program(BN):
        @T.prim_func
        def kernel(X: T.Tensor([2, BN], dtype), Y: T.Tensor([2], dtype), Z: T.Tensor([2], dtype)):
            with T.Kernel(1, threads=32):
                x_tile = T.alloc_fragment([2, BN], dtype)
                total = T.alloc_fragment([2], dtype)
                largest = T.alloc_fragment([2], dtype)
                T.copy(X, x_tile)
                T.reduce_sum(x_tile, total, dim=1, clear=False)
                T.reduce_max(x_tile, largest, dim=1, clear=False)
                T.copy(total, Y)
                T.copy(largest, Z)

        return kernel

    x = torch.ones(2, 4, dtype=getattr(torch, dtype))
    y, z = torch.zeros(2, dtype=x.dtype), torch.zeros(2, dtype=x.dtype)
    program(4)(x, y, z)
    assert not y.isfinite().any()
    assert not z.isfinite().any()


@on_a_cpu
def test_turns_of_a_parallel_loop_that_share_a_place_are_seen() -> None:
    @tilelang.jit
    def program(BN):
        @T.prim_func
        def kernel(X: T.Tensor([BN], "float32"), Y: T.Tensor([1], "float32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(BN):
                    Y[0] += X[i]

        return kernel

    y = torch.zeros(1)
    told = repr(watch(lambda: program(4)(torch.ones(4), y)))
    assert y.item() == 4, "a CPU forgives it"
    assert "✗ turns of T.Parallel add to the same places of `Y`" in told


@on_a_cpu
def test_of_tilelang_only_the_source_is_read() -> None:
    """So that nothing is promised of it, and a place that all programs share is seen."""
    sound = watch(lambda: tilelang_double(torch.ones(9)))
    assert "○ TileLang: its programs are not watched." in repr(sound)
    assert "✗" not in repr(sound)
    assert not sound.is_sound
    assert sound.seen.widest == 4

    @tilelang.jit
    def program(BN):
        @T.prim_func
        def kernel(X: T.Tensor([8], "float32"), Y: T.Tensor([8], "float32")):
            with T.Kernel(2, 3, threads=32) as (block, _turn):
                x_tile = T.alloc_fragment([BN], "float32")
                T.copy(X[block * BN : block * BN + BN], x_tile)
                T.copy(x_tile, Y[block * BN : block * BN + BN])

        return kernel

    told = repr(watch(lambda: program(4)(torch.ones(8), torch.zeros(8))))
    assert "✗ programs of different ids store to the same places of `Y`" in told
