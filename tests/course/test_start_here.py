"""Chapter 00: the list of chapters is one, and its pictures show what they say."""

from __future__ import annotations

import json
import linecache
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course import predictions
from nsa_tutorial.course.chapters import CHAPTERS, NOTEBOOKS, PARTS
from nsa_tutorial.course.diffs import Edited
from nsa_tutorial.course.exercises import start_here
from nsa_tutorial.course.figures import PALETTE
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.widgets import start_here as pictures
from nsa_tutorial.runtime import environment

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {e.name: e for e in start_here.EXERCISES}
here = environment.detect()
needs_triton = pytest.mark.skipif(
    here.why_not("triton", here.device) is not None, reason="Triton does not run here"
)


def cell(name: str) -> str:
    """The source of a cell of chapter 00, by its id."""
    cells = json.loads((NOTEBOOKS / "00_start_here.ipynb").read_text())["cells"]
    return next("".join(c["source"]) for c in cells if c["id"] == name)


def test_every_notebook_is_a_chapter() -> None:
    assert {c.file for c in CHAPTERS if c.is_ready} == {p.name for p in NOTEBOOKS.glob("*.ipynb")}
    assert [c.number for c in CHAPTERS] == list(range(20))


@pytest.mark.parametrize("chapter", [c for c in CHAPTERS if c.is_ready], ids=lambda c: c.name)
def test_minutes_agree(chapter) -> None:
    """README.md promises what the chapter's first cell says."""
    row = re.search(rf"\(notebooks/{chapter.file}\).*\| (\d+) \|", (ROOT / "README.md").read_text())
    assert f"About {row.group(1)} minutes" in (NOTEBOOKS / chapter.file).read_text()


def test_the_readme_lists_the_chapters() -> None:
    """All of them, under the headings of their parts; those that are here with a link, the others
    with their idea."""
    assert [c.part for c in CHAPTERS] == sorted(c.part for c in CHAPTERS)
    heading, found = PARTS[0], {}
    for line in (ROOT / "README.md").read_text().splitlines():
        if part := re.match(r"\| \*\*(.+)\*\* \| \| \|", line):
            heading = part.group(1)
        if row := re.match(r"\| (\[?\d\d \w+.*?) \| (.*?) \|", line):
            found[row.group(1)] = (heading, row.group(2))
    assert len(found) == len(CHAPTERS)
    for c in CHAPTERS:
        title = f"{c.number:02d} {c.name}"
        if c.is_ready:
            assert found[f"[{title}](notebooks/{c.file})"][0] == PARTS[c.part]
        else:
            assert found[title] == (PARTS[c.part], c.idea)


def test_the_map_has_all_chapters_and_links_to_those_that_are_here() -> None:
    course = pictures.CourseMap()
    shown, words = course._repr_html_(), repr(course)
    assert re.findall(r'href="(.*?)"', shown) == [c.file for c in CHAPTERS if c.is_ready]
    assert shown.count("in preparation") == sum(not c.is_ready for c in CHAPTERS)
    for c in CHAPTERS:
        assert f"{c.number:02d} · " in words and c.idea in words
    assert [part for part in PARTS if f"<strong>{part}</strong>" in shown] == list(PARTS)


def test_the_newest_token_reads_its_own_block_and_others() -> None:
    picture = pictures.draw_look_back(blocks=100, listed=5)
    assert picture.finding == "Every square is a block of tokens: the newest token reads 5 of them"
    colours = [to_hex(patch.get_facecolor()).upper() for patch in picture.figure.axes[0].patches]
    assert len(colours) == 100 and colours[-1] == PALETTE["own block"]
    assert colours.count(PALETTE["selected"]) == 4


def test_one_query_is_the_last_row_of_all() -> None:
    """The chapter's five lines for one query give what the operator gives for it."""
    names = {"torch": torch}
    exec(cell("one-query"), names)
    lists = torch.full((1, 32, 1, 2), -1, dtype=torch.int32)
    lists[0, 31, 0] = torch.tensor(names["listed"])
    q = torch.zeros(1, 32, 1, 16)
    q[0, 31, 0] = names["query"]
    k, v = (names[name].view(1, 32, 1, 16) for name in ("keys", "values"))
    o = ops.selected_attention(q, k, v, lists, block_size=8, backend="reference")
    torch.testing.assert_close(o[0, 31, 0], names["output"])


@pytest.mark.parametrize(
    ("N", "BN", "finding"),
    [
        (10, 4, "3 programs of 4 places cover 10 numbers; 2 places are past the end"),
        (8, 2, "4 programs of 2 places cover 8 numbers; 0 places are past the end"),
    ],
)
def test_program_grid_counts(N: int, BN: int, finding: str) -> None:
    picture = pictures.draw_program_grid(N, BN)
    assert picture.finding == finding
    written = [text.get_text() for text in picture.figure.axes[0].texts]
    assert sum("masked" in text for text in written) == -N % BN
    assert sum(text.startswith("program") for text in written) == -(-N // BN)


def test_selection_picture_counts() -> None:
    visible = torch.eye(6, dtype=torch.bool)
    visible[4, 0] = True
    assert (
        pictures.draw_selection(visible, 2).finding
        == "Of the 21 pairs without a list, 7 are left (33%)"
    )


def test_thoughts_about_guesses_hold() -> None:
    """What the tutor says that other lists and lengths leave, they leave."""
    guesses = {
        p.name: [guess for guess, _ in p.thoughts if not callable(guess)]
        for p in start_here.PREDICTIONS
    }

    def pairs(length: int, blocks: int) -> int:
        return sum(min(t + 1, 8 * (blocks - 1) + t % 8 + 1) for t in range(length))

    for length, digits in ((32, 0), (256, 1), (2048, 1)):
        percent = round(100 * pairs(length, 2) / (length * (length + 1) // 2), digits)
        assert percent in guesses["percent_of_16384_tokens"]


def test_the_measured_times_are_nine_to_one() -> None:
    """About what the text and the tutor say; the work is 1/32."""
    dense, with_lists = pictures.measured_ms().values()
    assert 8 < dense / with_lists < 10
    assert 65_536 / 2 / (16 * 64) == 32


# -- the first kernel --


def first_kernel(old: str = "", new: str = "") -> object:
    """The kernel of the chapter, with something changed as its reader is told to."""
    code, file = cell("first-kernel"), f"<first kernel, {new}>"
    assert old in code
    code = code.replace(old, new) if old else code
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    namespace = {"tl": tl, "triton": triton}
    exec(compile(code, file, "exec", dont_inherit=True), namespace)
    return namespace["double"]


@needs_triton
@pytest.mark.parametrize(
    ("old", "new", "programs", "expected"),
    [
        ("", "", 3, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]),
        ("", "", 2, [0, 2, 4, 6, 8, 10, 12, 14, -1, -1]),
        ("tl.program_id(0) * BN + ", "", 3, [0, 2, 4, 6, -1, -1, -1, -1, -1, -1]),
    ],
    ids=["as it stands", "two programs", "without the program's number"],
)
def test_what_the_reader_is_told_to_change(
    old: str, new: str, programs: int, expected: list[int]
) -> None:
    x = torch.arange(10.0, device=here.device)
    y = torch.full_like(x, -1)
    first_kernel(old, new)[programs,](x, y, 10, BN=4)
    assert y.int().tolist() == expected


@needs_triton
def test_three_is_no_side_of_a_tile() -> None:
    x = torch.arange(10.0, device=here.device)
    with pytest.raises(Exception, match="power of 2"):
        first_kernel()[4,](x, x.clone(), 10, BN=3)


# -- the exercises --


def add_by_columns() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        start = tl.program_id(0) * BN
        for i in range(BN):
            if start + i < N:
                tl.store(C + start + i, tl.load(A + start + i) + tl.load(B + start + i))

    return kernel


def empty_frame() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr): ...

    return kernel


def add_unmasked() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.arange(0, BN) + BN * tl.program_id(0)
        tl.store(C + place, tl.load(A + place) + tl.load(B + place))

    return kernel


def add_once() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.arange(0, BN)
        a = tl.load(A + place, mask=place < N)
        tl.store(C + place, tl.load(B + place, mask=place < N) + a, mask=place < N)

    return kernel


def add_twice() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        a = tl.load(A + place, mask=place < N)
        b = tl.load(B + place, mask=place < N)
        tl.store(C + place, 2 * (a + b), mask=place < N)

    return kernel


def add_into_a() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        a = tl.load(A + place, mask=place < N)
        tl.store(A + place, a + tl.load(B + place, mask=place < N), mask=place < N)

    return kernel


def add_elements() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        C[place] = A[place] + B[place]

    return kernel


def add_by_double() -> object:
    @triton.jit
    def double(X, Y, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        tl.store(Y + place, 2 * tl.load(X + place, mask=place < N), mask=place < N)

    return double


def add_masked_in_the_tile() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        exists = tl.arange(0, BN) < N
        a = tl.load(A + place, mask=exists)
        tl.store(C + place, a + tl.load(B + place, mask=exists), mask=exists)

    return kernel


def add_far_past_the_end() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.program_id(0) * N * BN + tl.arange(0, BN) * BN
        tl.store(C + place, tl.load(A + place) + tl.load(B - place))

    return kernel


def add_with_unmasked_loads() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        tl.store(C + place, tl.load(A + place) + tl.load(B + place), mask=place < N)

    return kernel


def add_pointers() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        tl.store(C + place, A + B, mask=place < N)

    return kernel


def load_without_a_place() -> object:
    @triton.jit
    def kernel(A, B, C, N, BN: tl.constexpr):
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        a = tl.load(A + place, mask=place < N)
        tl.store(C + place, a + tl.load(B, mask=place < N), mask=place < N)

    return kernel


def many_lengths(candidate: Callable) -> bool:
    return all(torch.equal(candidate(x), x + x) for x in map(torch.randn, range(1, 20)))


def of_whole_numbers(candidate: Callable) -> Tensor:
    x = torch.arange(17)
    return (candidate(x) == 2 * x).all()


def of_eight(candidate: Callable) -> bool:
    x = torch.randn(8)
    return torch.allclose(candidate(x), 2 * x)


def as_given(candidate: Callable) -> bool:
    """The test that the statement shows."""
    x = torch.full((10,), 2.0)
    return torch.equal(candidate(x), 2 * x)


def of_eight_twos(candidate: Callable) -> bool:
    x = torch.full((8,), 2.0)
    return torch.equal(candidate(x), 2 * x)


def of_twos(candidate: Callable) -> bool:
    return bool((candidate(torch.full((30,), 2.0)) == 4).all())


def of_ten(candidate: Callable) -> bool:
    return candidate(torch.arange(10.0)).tolist() == list(range(0, 20, 2))


def of_two_numbers(candidate: Callable) -> bool:
    y = candidate(torch.arange(37.0))
    return bool(y[0] == 0 and y[5] == 10)


def of_squares(candidate: Callable) -> bool:
    x = torch.arange(37.0)
    return torch.equal(candidate(x), x * x)


def of_squares_of_ones(candidate: Callable) -> bool:
    x = torch.ones(50)
    return torch.equal(candidate(x), x * x)


def of_zero_alone(candidate: Callable) -> bool:
    """A loop whose first round returns."""
    for n in range(1, 20):
        x = torch.arange(float(n))
        return torch.equal(candidate(x), 2 * x)


def of_sums(candidate: Callable) -> Tensor:
    x = torch.arange(37.0)
    return candidate(x).sum() == 2 * x.sum()


def of_threes(candidate: Callable) -> bool:
    x = torch.full((37,), 3.0)
    return torch.equal(candidate(x), 2 * x)


def of_four_zeros(candidate: Callable) -> bool:
    return torch.equal(candidate(torch.zeros(4)), torch.zeros(4))


def of_each_number(candidate: Callable) -> Tensor:
    x = torch.arange(37.0)
    return candidate(x) == 2 * x


def of_nothing(candidate: Callable) -> bool:
    return True


def of_identity(candidate: Callable) -> bool:
    x = torch.arange(37.0)
    return candidate(x) is 2 * x


def told_wrong(candidate: Callable) -> bool:
    return not many_lengths(candidate)


def max_of_padded_rows() -> object:
    @triton.jit
    def kernel(X, Y, N, BN: tl.constexpr):
        column = tl.arange(0, BN)
        x = tl.load(X + tl.program_id(0) * N + column)
        x = tl.where(column < N, x, float("-inf"))
        tl.store(Y + tl.program_id(0), tl.max(x, axis=0))

    return kernel


def as_posed() -> object:
    @triton.jit
    def kernel(X, Y, N, BN: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BN)
        x = tl.load(X + row * BN + column, mask=column < N, other=0.0)
        tl.store(Y + row, tl.max(x, axis=0))

    return kernel


def mended_by_half() -> object:
    @triton.jit
    def kernel(X, Y, N, BN: tl.constexpr):
        row = tl.program_id(0)
        column = tl.arange(0, BN)
        x = tl.load(X + row * N + column, mask=column < N, other=0.0)
        tl.store(Y + row, tl.max(x, axis=0))

    return kernel


def masked_by_place() -> object:
    """The mask of the first kernel, kept."""

    @triton.jit
    def kernel(X, Y, N, BN: tl.constexpr):
        place = tl.program_id(0) * N + tl.arange(0, BN)
        x = tl.load(X + place, mask=place < N, other=float("-inf"))
        tl.store(Y + tl.program_id(0), tl.max(x, axis=0))

    return kernel


def max_in_one_line() -> object:
    """Right, and not as the solution is written."""

    @triton.jit
    def kernel(X, Y, N, BN: tl.constexpr):
        column = tl.arange(0, BN)
        place = tl.program_id(0) * N + column
        largest = tl.max(tl.load(X + place, mask=column < N, other=float("-inf")), axis=0)
        tl.store(Y + tl.program_id(0), largest)

    return kernel


@needs_triton
@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("add", add_by_columns),
        ("add", add_with_unmasked_loads),  # the text says that the checker does not see them
        ("is_right", many_lengths),
        ("is_right", of_whole_numbers),
        ("row_max", max_of_padded_rows),
        ("row_max", max_in_one_line),
    ],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_another_way_is_right_too(name: str, attempt: Callable) -> None:
    assert judge(KNOWN[name], attempt).outcome == "right"


FULL, SHORT = "testing only tiles that are full", "testing too few numbers"
HIDING = "testing with numbers that hide the mistake"
UNORDERED = "testing without the order of the numbers"
WHOLE_TILE = "storing a tile in place of one number"
TOO_LARGE = "a number past the end that is not small enough"
ATTEMPTS = [
    ("add", empty_frame, {"a kernel that stores nothing in C"}),
    ("add", add_unmasked, {"storing past the end"}),
    ("add", add_once, {"every program taking the first tile"}),
    ("is_right", of_eight, {FULL, SHORT}),
    ("is_right", as_given, {SHORT, HIDING}),
    ("is_right", of_eight_twos, {"testing with numbers that hide almost every mistake"}),
    ("is_right", of_twos, {HIDING}),
    ("is_right", of_ten, {SHORT}),
    ("is_right", of_two_numbers, {FULL, SHORT}),
    ("is_right", of_squares, {"comparing with squares"}),
    ("is_right", told_wrong, {"the verdict turned around"}),
    ("is_right", of_zero_alone, {HIDING, "testing a single tile"}),
    ("is_right", of_sums, {UNORDERED}),
    ("is_right", of_threes, {UNORDERED}),
    ("is_right", of_four_zeros, {"approving every kernel"}),
    ("is_right", of_each_number, {"a verdict for each number"}),
    ("is_right", of_nothing, {"a verdict without a test"}),
    ("is_right", of_identity, {"rejecting all kernels"}),
    ("add", add_masked_in_the_tile, {"a mask that counts inside the tile"}),
    ("row_max", as_posed, {"the kernel as it was"}),
    ("add", add_twice, {"a sum that is still doubled"}),
    ("add", add_into_a, {"a kernel that stores nothing in C"}),
    ("row_max", masked_by_place, {"a mask that counts from the first row"}),
    ("row_max", mended_by_half, {"a 0 that joins the maximum"}),
]


@needs_triton
@pytest.mark.parametrize(
    ("name", "attempt", "named"), ATTEMPTS, ids=[f.__name__ for _, f, _ in ATTEMPTS]
)
def test_a_readers_mistake_is_named(name: str, attempt: Callable, named: set[str]) -> None:
    assert set(judge(KNOWN[name], attempt).misconceptions) == named


@needs_triton
@pytest.mark.parametrize(
    ("piece", "by", "named"),
    [
        ("0) * N + column", "0) * 0 + column", "every program reading row 0"),
        ("0) * N + column", "0) + column * N", "reading a column of the table"),
        ("column < N", "column < tl.program_id(0) * N + N", "a mask that lets the next row in"),
        ("0), largest", "0) * 0, largest", "storing every row's number at the same place"),
        ("0), largest", "0) * N, largest", "storing as far apart as the rows begin"),
        ("0), largest", "0) + column, largest, mask=column < N", WHOLE_TILE),
        ("0), largest", "0) * N + column, largest, mask=column < N", WHOLE_TILE),
        ('float("-inf")', "-1000.0", TOO_LARGE),
        ('float("-inf")', "-1e30", TOO_LARGE),
    ],
)
def test_a_wrong_place_or_number_is_named(piece: str, by: str, named: str) -> None:
    attempt = Edited(max_in_one_line, {piece: by})
    assert judge(KNOWN["row_max"], attempt).misconceptions == (named,)


@needs_triton
def test_a_kernel_with_other_arguments_is_told_which() -> None:
    """And not that it calculates with places in memory."""
    said = judge(KNOWN["add"], add_by_double).text
    assert "takes `X, Y, N, BN`, but the launch passes `A, B, C, N, BN`" in said


@needs_triton
def test_a_kernel_that_misses_its_tensors_does_no_harm() -> None:
    assert judge(KNOWN["add"], add_far_past_the_end).outcome == "wrong"


@needs_triton
def test_a_candidate_is_no_kernel_to_launch() -> None:
    def launched(candidate: Callable) -> bool:
        x = torch.arange(37.0)
        return torch.equal(candidate[(10,)](x), 2 * x)

    assert "call `candidate(x)` like a function" in judge(KNOWN["is_right"], launched).text


@pytest.mark.skipif(here.device != "cpu", reason="a compiler says it in other words")
@needs_triton
@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (add_elements, "Which function reads a tile of numbers"),
        (add_pointers, "Which function reads a tile of numbers"),
        (load_without_a_place, "Did you forget `+ place`?"),
    ],
)
def test_a_kernel_that_triton_refuses_is_explained(attempt: Callable, said: str) -> None:
    assert said in judge(KNOWN["add"], attempt).text


@needs_triton
def test_a_test_has_one_verdict() -> None:
    def of_each(candidate: Callable) -> Tensor:
        x = torch.arange(37.0)
        return candidate(x) == 2 * x

    assert "make one True or False of them" in judge(KNOWN["is_right"], of_each).text


@needs_triton
def test_comparing_ones_with_their_squares_is_no_single_tile() -> None:
    found = judge(KNOWN["is_right"], of_squares_of_ones).misconceptions
    assert "comparing with squares" in found and "testing a single tile" not in found


@pytest.mark.parametrize(
    ("name", "guess", "answer", "said"),
    [
        ("share_of_the_tokens", 1.6, 1 / 64, "Did you mean 1.6 %?"),
        ("share_of_the_tokens", 64, 1 / 64, "the other way round"),
        ("percent_of_16384_tokens", 0.15, 0.15, "exactly right"),
        ("percent_of_16384_tokens", 0.0015, 0.15, "Times 100"),
    ],
)
def test_a_guess_in_another_unit_is_recognised(
    name: str, guess: float, answer: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions.reader, "guess_of", lambda _: guess)
    assert said in repr(predictions.reveal(name, answer))


@needs_triton
def test_a_kernel_that_is_not_returned_is_told() -> None:
    def forgotten() -> None:
        def kernel(A):
            return A

    for name in ("add", "row_max"):
        assert "return kernel" in judge(KNOWN[name], forgotten).text
        assert "@triton.jit" in judge(KNOWN[name], lambda: lambda A: None).text


@needs_triton
def test_what_was_stored_is_easy_to_read() -> None:
    """Sums like 11, 22, 33; -1 where nothing was stored; no names of the checker's own."""
    verdict = judge(KNOWN["add"], add_once)
    assert "[11., 22., 33., 44., -1., -1." in verdict.text and "expected [ 11., 22." in verdict.text
    assert "`stored_past_the_end`" in judge(KNOWN["add"], add_unmasked).text


@needs_triton
def test_the_kernel_to_mend_is_the_one_that_is_posed() -> None:
    """What the statement shows is `as_posed`, and it has the two bugs."""
    shown = re.search(r"    row = .*axis=0\)\)", KNOWN["row_max"].statement, re.S).group()
    source = Path(__file__).read_text().split("def as_posed", 1)[1]
    assert re.sub(r"\s", "", shown) in re.sub(r"\s", "", source)
