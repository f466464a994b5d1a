"""The reader's own library: what is kept, what is refused, and that nothing is lost."""

from __future__ import annotations

import datetime
import linecache
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa_tutorial.course import keeping, mine, reader
from nsa_tutorial.course.exercises import Case, Exercise, Misconception, Stage
from nsa_tutorial.course.gathering import piece_of
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.library_file import HEADER, File


def weights(scores: torch.Tensor) -> torch.Tensor:
    """A softmax that gives zeros where nothing is visible."""
    largest = scores.amax(-1, keepdim=True)
    p = (scores - torch.where(largest.isinf(), 0, largest)).exp()
    total = p.sum(-1, keepdim=True)
    return torch.where(total == 0, 0, p / total)


def case(name: str, *numbers: float) -> Case:
    return Case(name, lambda: (torch.tensor(numbers, dtype=torch.float32),))


INF = float("inf")
WEIGHTS = Exercise(
    name="weights",
    statement="",
    minutes=5,
    difficulty=1,
    solution=weights,
    stages=(
        Stage("a row", (case("two numbers", 1, 2), case("three numbers", 0, 2, 1))),
        Stage("large scores", (case("two hundred", 1, 200),)),
        Stage("nothing visible", (case("two hidden", -INF, -INF),)),
    ),
    misconceptions=(
        Misconception("a sum in place of a softmax", lambda s: s / s.sum(), "What weighs?"),
        Misconception("exponentials that overflow", lambda s: s.exp() / s.exp().sum(), "Large?"),
    ),
    forbidden=(("torch.softmax", "PyTorch's softmax"), ("nsa_tutorial", "the course's function")),
)
RIGHT = """
def weights(scores):
    largest = scores.amax(-1, keepdim=True)
    p = (scores - torch.where(largest.isinf(), 0, largest)).exp()
    return divide(p, p.sum(-1, keepdim=True))
"""
DIVIDE = """
def divide(p, total, nothing=NOTHING):
    return torch.where(total == 0, nothing, p / total)
"""


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's copy of the chapters, in which `weights` can be built."""
    (tmp_path / reader.FOLDER).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keeping, "all_builds", lambda: [("gradients", WEIGHTS)])
    return tmp_path


def cells(*sources: str, **namespace: object) -> Callable:
    """The function `weights` of a notebook's cells."""
    names = {"__name__": "__main__", "torch": torch, **namespace}
    for source in sources:
        file = f"<cell {abs(hash(source))}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec", dont_inherit=True), names)
    return names["weights"]


def right() -> Callable:
    return cells(DIVIDE, RIGHT, NOTHING=0)


# -- stages --


def test_a_half_done_function_is_praised_for_what_it_does() -> None:
    verdict = judge(WEIGHTS, lambda s: s.exp() / s.exp().sum())
    assert (verdict.outcome, verdict.held) == ("misconception", 1)
    assert verdict.lead == "1 of 3 stages hold."
    assert "✓ a row   ✗ large scores   ○ nothing visible" in verdict.text
    assert verdict.misconceptions == ("exponentials that overflow",)
    assert "two hundred" in verdict.text


def test_stages_behind_the_first_failure_do_not_run() -> None:
    seen = []

    def attempt(scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.tolist())
        return scores

    assert judge(WEIGHTS, attempt).held == 0
    assert seen == [[1.0, 2.0], [0.0, 2.0, 1.0]]


def test_all_stages() -> None:
    verdict = judge(WEIGHTS, weights)
    assert (verdict.outcome, verdict.held, verdict.lead) == ("right", 3, "All 3 stages hold.")


@pytest.mark.parametrize(
    "attempt",
    [
        lambda s: s.softmax(-1),
        lambda s: torch.softmax(s, -1),
        lambda s: torch.nn.functional.softmax(s, -1),
    ],
)
def test_what_the_exercise_builds_may_not_be_called(attempt: Callable) -> None:
    assert "PyTorch's softmax: you build it yourself here" in judge(WEIGHTS, attempt).text


def test_nor_may_the_courses_function() -> None:
    from nsa_tutorial.exact.dense_attention import softmax

    assert "the course's function: not in this" in judge(WEIGHTS, lambda s: softmax(s)).text


@pytest.mark.parametrize(
    "derive",
    [
        lambda y, x: torch.autograd.grad(y.sum(), x),
        lambda y, x: y.sum().backward(),
        lambda y, x: torch.func.grad(torch.sum)(x),
    ],
)
def test_nor_may_autograd_where_gradients_are_built(derive: Callable) -> None:
    known = replace(WEIGHTS, forbidden=(("torch.autograd", "autograd"),))

    def attempt(scores: torch.Tensor) -> torch.Tensor:
        x = scores.clone().requires_grad_()
        return derive(2 * x, x)

    assert "autograd: you build it yourself here" in judge(known, attempt).text
    assert torch.autograd.grad((2 * (x := torch.ones(1, requires_grad=True))).sum(), x)


# -- keeping --


def test_the_file_runs_alone(copy: Path) -> None:
    told = keeping.keep("gradients", WEIGHTS, right())
    assert told == "Kept in my_nsa.py (11 lines). It has `weights`."
    text = (copy / keeping.FILE).read_text()
    assert text.startswith(HEADER)
    assert "import torch\n" in text
    holds = "# holds: a row, large scores, nothing visible\n"
    assert f"# -- 12 gradients · weights --\n{holds}" in text
    assert text.index("NOTHING = 0") < text.index("def divide") < text.index("def weights")
    names: dict = {}
    exec(text, names)
    assert torch.equal(names["weights"](torch.zeros(2)), torch.tensor([0.5, 0.5]))


def test_the_same_function_changes_nothing(copy: Path) -> None:
    keeping.keep("gradients", WEIGHTS, right())
    before = (copy / keeping.FILE).read_text()
    assert keeping.keep("gradients", WEIGHTS, right()) == "It is in my_nsa.py already."
    assert (copy / keeping.FILE).read_text() == before
    assert {p.name for p in copy.iterdir()} == {reader.FOLDER, keeping.FILE}


def test_an_older_version_stays_beside_it(copy: Path) -> None:
    """And what the reader wrote around it stays in the file."""
    keeping.keep("gradients", WEIGHTS, right())
    file = copy / keeping.FILE
    file.write_text(file.read_text().replace(HEADER, HEADER + "# mine\n") + "\n\nREST = 1\n")
    before = file.read_text()
    other = RIGHT.replace("largest", "most")
    day = datetime.date.today().isoformat()
    told = keeping.keep("gradients", WEIGHTS, cells(DIVIDE, other, NOTHING=0))
    assert told.endswith(f"The version before is in my_nsa.{day}.py.")
    assert (copy / f"my_nsa.{day}.py").read_text() == before
    assert "# mine\n" in file.read_text()
    assert "most = " in file.read_text()
    keeping.keep("gradients", WEIGHTS, right())
    assert (copy / f"my_nsa.{day}.2.py").exists()


def test_pieces_stand_in_reading_order(copy: Path) -> None:
    keeping.keep("gradients", WEIGHTS, right())
    source = RIGHT.replace("def weights", "def early").replace("divide(", "share(")
    early = cells(DIVIDE.replace("divide", "share"), source + "\n\nweights = early\n", NOTHING=0)
    exercise = replace(WEIGHTS, name="early", misconceptions=())
    assert "Kept" in keeping.keep("online_softmax", exercise, early)
    names = File.parse((copy / keeping.FILE).read_text()).names
    assert names == ["early", "weights"]


def test_another_pieces_name_is_refused(copy: Path) -> None:
    keeping.keep("gradients", WEIGHTS, right())
    exercise = replace(WEIGHTS, name="other")
    source = RIGHT.replace("def weights", "def other") + "\n\nweights = other\n"
    other = cells(DIVIDE.replace("p / total", "p.div(total)"), source, NOTHING=0)
    before = (copy / keeping.FILE).read_text()
    told = keeping.keep("online_softmax", exercise, other)
    assert "another `divide` is in my_nsa.py already, a part of `weights`: rename yours" in told
    assert (copy / keeping.FILE).read_text() == before


def test_a_variable_of_the_notebook_is_refused(copy: Path) -> None:
    told = keeping.keep("gradients", WEIGHTS, cells(DIVIDE, RIGHT, NOTHING=torch.tensor(0.0)))
    assert told == (
        "Not kept in my_nsa.py: it uses `NOTHING`, a Tensor of the notebook: make it an argument."
    )
    assert not (copy / keeping.FILE).exists()


def test_a_file_that_the_reader_broke_is_left_alone(copy: Path) -> None:
    (copy / keeping.FILE).write_text("def broken(:\n")
    assert "Not kept" in keeping.keep("gradients", WEIGHTS, right())
    assert (copy / keeping.FILE).read_text() == "def broken(:\n"


def test_nothing_is_kept_outside_of_a_copy(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert keeping.keep("gradients", WEIGHTS, right()) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_is_kept_with_its_decorator(copy: Path) -> None:
    pytest.importorskip("triton")
    from nsa_tutorial.course.languages import tl, triton

    kernel = "@triton.jit\ndef kernel(X, N: tl.constexpr):\n    tl.store(X, N)\n"
    launch = "\n\ndef weights(scores):\n    kernel[1,](scores, N=SIZE)\n    return scores\n"
    function = cells(kernel, launch, triton=triton, tl=tl, SIZE=4)
    piece = piece_of("gradients", WEIGHTS, function)
    assert set(piece.imports) == {"import triton", "import triton.language as tl"}
    assert piece.source.startswith("@triton.jit\ndef kernel")
    assert "SIZE = 4" in piece.source


# -- taking --


def test_a_chapter_takes_the_readers_function_or_the_courses(copy: Path) -> None:
    assert keeping.built("weights") is weights
    keeping.keep("gradients", WEIGHTS, right())
    assert keeping.built("weights").__code__.co_filename != weights.__code__.co_filename
    with pytest.raises(ValueError, match="nothing builds 'x'; the course builds weights"):
        keeping.built("x")


def test_the_report(copy: Path, capsys: pytest.CaptureFixture) -> None:
    assert mine.main(["--file", keeping.FILE]) == 0
    assert "it begins with the first exercise" in capsys.readouterr().out
    keeping.keep("gradients", WEIGHTS, right())
    assert mine.main(["--file", keeping.FILE]) == 0
    assert capsys.readouterr().out == (
        "✓ gradients · weights: ✓ a row  ✓ large scores  ✓ nothing visible\n"
    )
    file = copy / keeping.FILE
    file.write_text(file.read_text().replace("torch.where(largest.isinf(), 0, largest)", "0"))
    assert mine.main(["--file", keeping.FILE]) == 1
    assert "✓ a row  ✗ large scores  ○ nothing visible" in capsys.readouterr().out
    file.write_text("import nothing_there\n")
    assert mine.main(["--file", keeping.FILE]) == 1
    assert "does not run: ModuleNotFoundError" in capsys.readouterr().out
