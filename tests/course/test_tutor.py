"""The tutor: which mistakes it recognises, how it speaks, its hints; and what every chapter gives
it to say."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import judged
import nbformat
import pytest
import torch
from nbclient import NotebookClient

from nsa_tutorial.course import check, checking, exercise, exercises, hint, reader, show, solution
from nsa_tutorial.course.attempts import MEANINGS
from nsa_tutorial.course.exercises import Case, Exercise, Misconception
from nsa_tutorial.course.judging import Verdict, judge
from nsa_tutorial.course.speech import DARK, LIGHT, Code, Message
from nsa_tutorial.course.values import difference
from nsa_tutorial.runtime import environment

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
# Chapters whose exercises lack hints, a why, or the list of their traps. It only ever shrinks.
UNFINISHED: set[str] = set()


@functools.cache
def cells_of(path: Path) -> list[nbformat.NotebookNode]:
    return nbformat.read(path, 4).cells


@pytest.fixture(autouse=True)
def nothing_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    reader.forget()
    yield
    reader.forget()


# -- recognition: sums of the numbers of a list that pass a filter, with slips --


def total(numbers: list, *, slips: frozenset = frozenset()) -> float:
    """The sum, or what the slips make of it."""
    if "negative" in slips:
        numbers = [max(n, 0) for n in numbers]
    if "last" in slips:
        numbers = numbers[:9]
    if "rounded" in slips:
        numbers = [int(n) for n in numbers]
    return float(sum(numbers)) + ("plus one" in slips) * (len(numbers) > 3)


def slip(*names: str) -> Callable:
    return lambda numbers: total(numbers, slips=frozenset(names))


def known(name: str) -> Misconception:
    return Misconception(name, slip(name), f"Hint at {name}.")


SUM = Exercise(
    name="total",
    statement="Sum.",
    minutes=1,
    difficulty=1,
    solution=total,
    misconceptions=tuple(map(known, ("negative", "last", "rounded"))),
    cases=(
        Case("two numbers", lambda: ([1, 2],)),
        Case("a negative number", lambda: ([1, -2],)),
        Case("three and a half", lambda: ([3.5],)),
        Case("four numbers, one negative", lambda: ([4, 3, 2, -1],)),
        Case("ten ones", lambda: ([1] * 10,)),
        Case("ten numbers, one negative", lambda: ([5] * 8 + [-1, 1],)),
    ),
)


def test_one_mistake() -> None:
    verdict = judge(SUM, slip("negative"))
    assert (verdict.outcome, verdict.misconceptions) == ("misconception", ("negative",))
    assert verdict.text == (
        "Not yet. This looks like negative. Hint at negative.\n"
        "Smallest failing case: a negative number.\n"
        "got      1\nexpected -1\nwith numbers = [1, -2]"
    )


def test_an_unknown_slip_does_not_hide_a_known_one() -> None:
    """The plus one spoils the cases of more than three numbers; the smallest shows the other."""
    verdict = judge(
        replace(SUM, cases=(*SUM.cases, *more_negatives())), slip("negative", "plus one")
    )
    assert verdict.misconceptions == ("negative",)
    assert "Smallest failing case: a negative number." in verdict.text
    assert verdict.text.endswith(
        "This does not explain everything. See also the case: four numbers, one negative."
    )


def more_negatives() -> tuple[Case, ...]:
    return tuple(Case(f"minus {n}", lambda n=n: ([-n],)) for n in range(2, 6))


def test_two_mistakes_are_both_named_the_one_seen_first_first() -> None:
    """The last case shows both mixed, which is neither's answer."""
    verdict = judge(SUM, slip("last", "negative"))
    assert verdict.misconceptions == ("negative", "last")
    assert verdict.misconception == "negative"
    assert verdict.text == (
        "Not yet. This looks like negative. Hint at negative.\n"
        "Smallest failing case: a negative number.\n"
        "got      1\nexpected -1\nwith numbers = [1, -2]\n"
        "Then look at a second thing. This looks like last. Hint at last."
    )


def test_every_pair_is_named_whatever_its_order() -> None:
    for pair in (("negative", "rounded"), ("rounded", "last"), ("negative", "last")):
        assert set(judge(SUM, slip(*pair)).misconceptions) == set(pair)


def test_the_values_of_the_inputs_stand_in_one_column() -> None:
    named = replace(
        SUM, solution=lambda x, longer: 4, misconceptions=(), cases=(Case("", lambda: (1, [2])),)
    )
    text = judge(named, lambda x, longer: 0).text
    assert text.endswith("got      0\nexpected 4\nwith x      = 1\nwith longer = [2]")


def test_a_coincidence_on_the_smallest_case_is_no_mistake() -> None:
    """The constant 1 is what `negative` gives on one case of five."""
    verdict = judge(SUM, lambda numbers: 1.0)
    assert (verdict.outcome, verdict.misconceptions) == ("wrong", ())


def test_a_mistake_that_would_err_where_the_answer_is_right_is_not_named() -> None:
    def right_on_large(numbers: list) -> float:
        return total(numbers) if len(numbers) > 1 else total(numbers, slips=frozenset({"rounded"}))

    mostly = tuple(Case(f"{n} halves", lambda n=n: ([n + 0.5] * 2,)) for n in range(4))
    assert judge(SUM, right_on_large).misconceptions == ("rounded",)
    assert judge(replace(SUM, cases=SUM.cases + mostly), right_on_large).misconceptions == ()


MIXED = (
    Case("ten numbers, one negative", lambda: ([5] * 8 + [-1, 1],)),
    Case("eleven numbers, two negative", lambda: ([2] * 8 + [-1, -3, 1],)),
)


@dataclass(frozen=True)
class Slip:
    """A wrong sum that can be made together with another one, but not with rounding."""

    names: frozenset[str]

    def __call__(self, numbers: list) -> float:
        return total(numbers, slips=self.names)

    def beside(self, other: Slip) -> Slip:
        if "rounded" in self.names | other.names:
            raise ValueError("rounding goes with nothing else")
        return Slip(self.names | other.names)


def test_two_mistakes_together_are_recognised_where_no_case_isolates_them() -> None:
    mixed = replace(SUM, cases=MIXED)
    assert judge(mixed, slip("negative", "last")).misconceptions == ()
    known = [replace(m, wrong=Slip(frozenset({m.name}))) for m in SUM.misconceptions]
    paired = replace(mixed, misconceptions=tuple(known))
    verdict = judge(paired, slip("negative", "last"))
    assert verdict.misconceptions == ("negative", "last")
    assert "Then look at a second thing." in verdict.text
    assert judge(paired, slip("last")).misconceptions == ("last",)


def test_a_mistake_beside_an_unknown_smallest_case_is_named_with_its_own() -> None:
    def attempt(numbers: list) -> float:
        return 7.0 if numbers == [1, 2] else total(numbers, slips=frozenset({"negative"}))

    verdict = judge(SUM, attempt)
    assert verdict.misconceptions == ("negative",)
    assert "Smallest such case: a negative number.\ngot      1\n" in verdict.text
    assert verdict.text.endswith(
        "This does not explain everything. See also the case: two numbers."
    )


def test_mistakes_are_computed_no_further_than_needed() -> None:
    """A full match ends the search; a mistake that the smallest case rules out is not run on the
    others until everything else has failed."""
    runs: list[str] = []

    def counted(name: str) -> Misconception:
        return Misconception(
            name, lambda numbers: runs.append(name) or slip(name)(numbers), "Hint."
        )

    names = ("last", "negative", "rounded")
    judge(replace(SUM, misconceptions=tuple(map(counted, names))), slip("negative"))
    assert runs.count("last") == runs.count("rounded") == 1
    assert runs.count("negative") == len(SUM.cases)


# -- how it speaks --


def failing(attempt: Callable, *arguments: object, expected: object = 0.0) -> Verdict:
    one = Exercise(
        name="f", statement="", minutes=1, difficulty=1, solution=lambda *a: expected,
        cases=(Case("the case", lambda: arguments),),
    )  # fmt: skip
    return judge(one, attempt)


X, Y = torch.ones(2, 3), torch.ones(4)
LEAF = torch.ones(2, requires_grad=True)


def assign_to_leaf(x: torch.Tensor) -> None:
    x[0] = 1.0


def set_too_late(x: object) -> object:
    if x is None:
        late = x
    return late


def stub(x: object) -> None: ...


ERRORS = [
    (lambda x: 1 if x > 0 else 2, X, "torch.where"),
    (lambda x: (x > 0) and (x < 2), X, "parentheses"),
    (lambda x: 0 < x < 2, X, "parentheses"),
    (lambda x: x + Y, X, "shapes do not fit"),
    (lambda x: x @ x, X, "shapes do not fit"),
    (lambda x: x.view(4), X, "shapes do not fit"),
    (lambda x: torch.einsum("ij,jk", x, x), X, "shapes do not fit"),
    (lambda x: torch.stack([x, Y]), X, "shapes do not fit"),
    (lambda x: torch.cat([x, x.T], 1), X, "shapes do not fit"),
    (lambda x: Y.expand(3), X, "shapes do not fit"),
    (lambda x: x.sum(dim=3), X, "shapes do not fit"),
    (lambda x: torch.autograd.grad((LEAF * 2).sum(), [x, LEAF]), LEAF.clone(), "allow_unused"),
    (lambda x: x.sum().backward(), X, "requires_grad_()"),
    (lambda x: (x * 2).backward(), LEAF, "Sum first"),
    (assign_to_leaf, LEAF, "clone"),
    (lambda x: x.numpy(), LEAF, "detach"),
    (lambda x: Y.long() @ Y, X, ".float()"),
    (lambda x: torch.arange(3).mean(), X, ".float()"),
    (lambda x: torch.softmax(torch.arange(3), 0), X, ".float()"),
    (lambda x: x.masked_fill(x, 0), X, "mask"),
    (lambda x: x[x], X, ".long()"),
    (lambda x: int(x), X, "One number"),
    (lambda x: x.item(), X, "One number"),
    (lambda x: stub(x) + 1, X, "have not written yet"),
    (lambda x: stub(x)[0], X, "have not written yet"),
    (lambda x: stub(x).shape, X, "have not written yet"),
    (lambda x: [a for a, b in [stub(x)]], X, "have not written yet"),
    (lambda x: missspelt, X, "spelled"),  # noqa: F821
    (lambda x: torch.qqqq(x), X, "spelled"),
    (lambda x: x.qqqq(0), X, "spelled"),
    (lambda x: [x].foo, X, "another kind"),
    (set_too_late, X, "further down"),
    (lambda x: x[5], X, "length minus 1"),
    (lambda x: x[:0].amax(0), X, "no element"),
    (lambda x: x[:0].max(), X, "no element"),
    (lambda x: [1][3], X, "length minus 1"),
    (lambda x: {}["a"], X, "keys"),
    (lambda x: 1 / 0, X, "divisor"),
    (lambda x: x(0), X, "Round brackets"),
    (lambda: 1, X, "Count the arguments"),
    (lambda x: x.sort(-1, descending=True, stable=True), X, "takes all by name"),
    (lambda x: x.sort(-1, stable=True), X, "takes all by name"),
    (lambda x, y: 1, X, "Count the arguments"),
    (lambda x: exec("def f(): return f()") or f_again(), X, "calls itself"),
]  # fmt: skip


def f_again() -> object:
    return f_again()


@pytest.mark.parametrize(
    ("attempt", "argument", "meaning"),
    ERRORS,
    ids=[f"{i}-{m}" for i, (_, _, m) in enumerate(ERRORS)],
)
def test_an_error_is_told_with_its_meaning(
    attempt: Callable, argument: object, meaning: str
) -> None:
    text = failing(attempt, argument).text
    assert "it raised" in text
    assert meaning in text.split("it raised", 1)[1].split("\n", 1)[1]


def test_where_python_suggests_a_name_its_word_is_enough() -> None:
    text = failing(lambda x: torch.soft_max(x), X).text
    assert "Did you mean `softmax`?" in text
    assert "spelled" not in text


def two_lines(x: torch.Tensor) -> torch.Tensor:
    y = helper(x)
    return y @ y


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + Y


def test_the_readers_own_line_comes_before_the_error() -> None:
    """The innermost one: in the reader's helper, not where torch raised."""
    text = failing(two_lines, X).text
    assert "In line 2 of `helper`:\nreturn x + Y\nit raised RuntimeError: The size" in text


@pytest.mark.exhaustive
def test_in_a_notebook_lines_are_those_of_the_cell(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell("from nsa_tutorial.course import check\n\nimport torch"),
        nbformat.v4.new_code_cell(
            "# mine\n\ndef causal_weights(scores):\n    if scores > 0:\n        return scores"
        ),
        nbformat.v4.new_code_cell('check("dense_attention", causal_weights=causal_weights)'),
    ]
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    data = notebook.cells[-1].outputs[0].data
    assert "In line 4 of your cell:\nif scores > 0:\nit raised" in data["text/plain"]
    assert "<pre>if scores &gt; 0:</pre>" in data["text/html"]
    assert "/" not in re.sub(r"<[^>]*>", "", data["text/plain"]), "no path of this machine"


tilelang = pytest.mark.skipif(
    environment.detect().why_not("tilelang", "cpu") is not None,
    reason="TileLang does not run on this CPU",
)


@tilelang
@pytest.mark.parametrize(
    ("condition", "meaning"),
    [
        (lambda query, key, num_keys, causal: key < num_keys and query >= key, "T.And(a, b)"),
        (lambda query, key, num_keys, causal: key < num_keys & query >= key, "parentheses matter"),
        (lambda query, key, num_keys, causal: 0 <= key < num_keys, "T.And(a, b)"),
        (lambda query, key, num_keys, causal: not key >= num_keys, "T.Not(a)"),
        (lambda query, key, num_keys, causal: (key < num_keys) + 1.5, "needs a condition"),
    ],
    ids=["and", "precedence", "chain", "not", "number"],
)
def test_python_cannot_decide_what_the_kernel_computes(condition: Callable, meaning: str) -> None:
    e = exercises.chapter_exercises("tilelang_forward")["is_seen"]
    e = replace(e, misconceptions=(), cases=e.cases[:1])
    assert meaning in judge(e, condition).text


@tilelang
@pytest.mark.parametrize(
    "join", ["T.And, T.Or, T.Not", pytest.param("&", marks=pytest.mark.exhaustive)]
)
def test_what_the_meaning_recommends_does_work(join: str) -> None:
    from nsa_tutorial.course.languages import T

    def condition(query: object, key: object, num_keys: object, causal: bool) -> object:
        if "&" in join:
            return (key < num_keys) & (query >= key) if causal else key < num_keys
        end = T.Not(T.Or(key >= num_keys, key >= num_keys))
        return T.And(end, query >= key) if causal else end

    e = exercises.chapter_exercises("tilelang_forward")["is_seen"]
    e = replace(e, misconceptions=(), cases=e.cases[-2:])
    assert judge(e, condition).outcome == "right"


@pytest.mark.parametrize("entry", MEANINGS, ids=[pattern for pattern, _ in MEANINGS])
def test_meanings_are_sentences(entry: tuple[str, str]) -> None:
    pattern, told = entry
    re.compile(pattern)
    # no word where Python's own message says enough
    assert not told or (told[0].isupper() and told.endswith((".", "?")))


def test_short_lists_are_shown_whole() -> None:
    assert difference([0, 0, 2], [0, 1, 2]) == "got      [0, 0, 2]\nexpected [0, 1, 2]"
    assert difference(([1, 2], 0.5), ([1, 3], 0.5)) == (
        "got      ([1, 2], 0.5)\nexpected ([1, 3], 0.5)"
    )
    assert difference([1.0] * 17, [0.0] * 17).startswith("Value 0 of the result:")
    whole = difference(torch.zeros(4, 6), torch.ones(4, 6))
    assert whole.count("0., 0., 0., 0., 0., 0.") == whole.count("1., 1., 1., 1., 1., 1.") == 4
    assert "largest difference is at index [0]" in difference(torch.zeros(25), torch.ones(25))
    lists = torch.arange(48).view(6, 2, 4)
    changed = lists.clone()
    changed[3, 1, 2] = 0
    assert "1 of 12 rows differ, first at index [3, 1]." in difference(changed, lists)
    assert "got      [28, 29, 0, 31]\nexpected [28, 29, 30, 31]" in difference(changed, lists)
    assert (
        difference(torch.tensor([3, 4]), torch.tensor([3, 5])) == "got      [3, 4]\nexpected [3, 5]"
    )


class Paragraphs(HTMLParser):
    """The tags of a piece of HTML, checked to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, str] = {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.seen[self.open[-1]] = self.seen.get(self.open[-1], "") + data


def test_a_verdict_in_html_is_prose_with_code_in_it() -> None:
    """Sentences are paragraphs, values are `pre`; nothing of the reader's becomes markup."""
    message = Message(
        "wrong", "✗", "f", "Not yet.", ("Use `a < b` & go.", "A case.", Code("got <b>\n  1"))
    )
    found = Paragraphs(message._repr_html_())
    assert found.seen["pre"] == "got <b>\n  1"
    assert found.seen["p"].endswith("A case.")
    assert found.seen["code"] == "fa < b"
    assert found.seen["strong"] == "Not yet."
    assert 'role="status"' in message.html()
    assert "style" not in message.html(), "no style but the one that can be stripped"
    assert repr(message) == "✗ f: Not yet. Use `a < b` & go.\nA case.\ngot <b>\n  1"


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_read(colours: dict[str, str]) -> None:
    for ground in ("ground", "code"):
        for text in ("text", "link", "right", "wrong", "open"):
            low, high = sorted(luminance(colours[name]) for name in (ground, text))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ground, text)


# -- hints --


def with_hints(
    monkeypatch: pytest.MonkeyPatch, hints: tuple[str, ...] = ("First?", "Second?", "Third?")
) -> tuple[str, str]:
    """An exercise of a chapter, with hints of its own."""
    found = exercises.chapter_exercises("dense_attention")
    e = replace(found["causal_weights"], hints=hints, why="It sums to 1.")
    monkeypatch.setattr(
        "nsa_tutorial.course.checking.chapter_exercises", lambda chapter: {e.name: e}
    )
    return "dense_attention", e.name


def test_hints_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chapter, name = with_hints(monkeypatch)
    said = [repr(hint(chapter, name)) for _ in range(5)]
    for number, text in enumerate(said[:3], start=1):
        assert f"hint {number} of 3." in text
        assert [word in text for word in ("First?", "Second?", "Third?")] == [
            n <= number for n in (1, 2, 3)
        ]
    assert f'solution("{chapter}", "{name}")' not in "".join(said[:3])
    assert said[3] == said[4]
    assert f'solution("{chapter}", "{name}")' in said[3]
    assert "Third?" in said[3]


def test_a_stage_gets_its_hint_before_the_solution_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chapter, built = next((c, e) for c, e in ALL if len(e.stages) > 1)
    monkeypatch.setattr(checking, "_hinted", {})
    monkeypatch.setattr(checking, "_held", {})
    told = f'solution("{chapter}", "{built.name}")'
    assert [told in repr(hint(chapter, built.name)) for _ in range(3)] == [False, True, True]
    checking._held[chapter, built.name] = 1  # one stage holds now
    said = repr(hint(chapter, built.name))
    assert built.stages[1].name in said and told not in said


def test_without_hints_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    chapter, name = with_hints(monkeypatch, ())
    assert "there are no hints yet." in repr(hint(chapter, name))
    assert reader.notes()["hints"] == {}


def test_the_reason_stands_below_the_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = solution(*with_hints(monkeypatch))
    assert repr(listing).rstrip().endswith("It sums to 1.")
    assert "It sums to 1." in listing._repr_html_()


def test_a_statement_is_listed_in_the_contents() -> None:
    text = exercise("dense_attention", "causal_weights")._repr_markdown_()
    assert re.match(r"### Exercise: `causal_weights`\n\n\d+ minutes · ★", text)
    assert text.endswith(
        'Stuck? Run `hint("dense_attention", "causal_weights")`, '
        'and last `solution("dense_attention", "causal_weights")`.'
    )


# -- what the chapters give it to say --

ALL = [(c, e) for c in exercises.chapters() for e in exercises.chapter_exercises(c).values()]
MODULES = {c: exercises.chapter_module(c) for c in exercises.modules()}
TRAPS = [(c, t) for c, m in MODULES.items() for t in getattr(m, "TRAPS", ())]
DOUBLES = [(c, d) for c, m in MODULES.items() for d in getattr(m, "DOUBLES", ())]


def is_finished(chapter: str) -> bool:
    known = exercises.chapter_exercises(chapter).values()
    return hasattr(MODULES[chapter], "TRAPS") and all(e.hints and e.why for e in known)


@pytest.mark.parametrize("chapter", exercises.chapters())
def test_every_chapter_has_hints_reasons_and_traps(chapter: str) -> None:
    told = "finished: take it out of UNFINISHED" if is_finished(chapter) else "not finished"
    assert is_finished(chapter) != (chapter in UNFINISHED), told


def code_lines(function: Callable) -> set[str]:
    """The lines of a function's body, without white space; the docstring is none of them."""
    source = show(function).code
    body = ast.parse(source).body[0].body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    lines = source.splitlines()[body[0].lineno - 1 :]
    return {line for raw in lines if len(line := re.sub(r"\s", "", raw)) >= 12}


@pytest.mark.parametrize(("chapter", "e"), ALL, ids=[f"{c}-{e.name}" for c, e in ALL])
def test_hints_lead_and_do_not_tell(chapter: str, e: Exercise) -> None:
    if not e.hints:
        assert chapter in UNFINISHED
        return
    assert len(set(e.hints)) == (len(e.stages) or 3)
    for text in (*e.hints, e.why):
        assert text.strip().endswith((".", "?", "!", "`", ")")), text
    told = [re.sub(r"\s", "", text) for text in e.hints]
    for line in code_lines(e.solution):
        assert not any(line in text for text in told), (
            f"a hint holds a line of the solution: {line}"
        )


@pytest.mark.parametrize(
    ("chapter", "trap"), TRAPS, ids=[f"{c}-{t.misconception}" for c, t in TRAPS]
)
def test_a_trap_that_the_prose_names_is_recognised(chapter: str, trap: exercises.Trap) -> None:
    (path,) = (p for p in NOTEBOOKS if p.stem[3:] == chapter)
    quote = re.sub(r"\s", "", trap.quote)
    cells = cells_of(path)
    assert any(quote in re.sub(r"\s", "", cell.source) for cell in cells), "not in the notebook"
    e = exercises.chapter_exercises(chapter)[trap.exercise]
    assert trap.misconception in {m.name for m in e.misconceptions}


def compiles(chapter: str, name: str) -> bool:
    """Whether an exercise is judged by kernels: they take seconds."""
    return exercises.chapter_exercises(chapter)[name].run is not None


@pytest.mark.parametrize(
    ("chapter", "double"),
    [
        pytest.param(
            chapter,
            double,
            id=f"{chapter}-{' and '.join(double.names)}",
            # of each exercise, the first
            marks=[pytest.mark.exhaustive]
            if compiles(chapter, double.exercise) or double is not first
            else [],
        )
        for chapter, double in DOUBLES
        for first in [next(d for c, d in DOUBLES if (c, d.exercise) == (chapter, double.exercise))]
        if not judged.is_apart(chapter, exercises.chapter_exercises(chapter)[double.exercise])
    ],
)
def test_two_slips_of_a_chapter_are_both_named(chapter: str, double: exercises.Double) -> None:
    judged.assert_both_are_named(exercises.chapter_exercises(chapter)[double.exercise], double)


@pytest.mark.parametrize(("chapter", "e"), ALL, ids=[f"{c}-{e.name}" for c, e in ALL])
def test_names_go_on_a_sentence(chapter: str, e: Exercise) -> None:
    """A name follows "This looks like", and a hint follows the name."""
    for m in e.misconceptions:
        assert not m.name.endswith("."), m.name
        assert m.hint.rstrip(" )").endswith((".", "?", "!")), m.hint


SAYS_WHAT_THE_READER_DID = {"hint", "predict", "progress", "reveal"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_depends_on_the_reader_is_not_compared(path: Path) -> None:
    for cell in cells_of(path):
        if cell.cell_type != "code":
            continue
        try:
            tree = ast.parse(cell.source)
        except SyntaxError:  # a cell with a magic
            continue
        called = {
            node.func.id for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }  # fmt: skip
        if called & SAYS_WHAT_THE_READER_DID:
            assert "nbval-ignore-output" in cell.metadata.get("tags", []), f"cell {cell.id}"


def test_check_notes_what_is_solved() -> None:
    e = exercises.chapter_exercises("dense_attention")["causal_weights"]
    check("dense_attention", causal_weights=lambda scores: scores)
    assert reader.notes()["solved"] == {}
    check("dense_attention", causal_weights=e.solution)
    check("dense_attention", causal_weights=lambda scores: scores)
    assert reader.notes()["solved"] == {"dense_attention": ["causal_weights"]}


def test_of_a_named_mistake_the_error_is_not_explained_again() -> None:
    """What an error means in general would point away from what the mistake's own hint says."""
    missing = Misconception("calling a function that is missing", lambda x: None + x, "What is x?")
    verdict = judge(replace(SUM, misconceptions=(missing,)), lambda x: x + None)
    assert verdict.misconception == missing.name
    assert "Something here is None" not in verdict.text
    assert "Something here is None" in judge(SUM, lambda x: x + None).text


def test_errors_that_say_different_things_are_different() -> None:
    def refusing(sentence: str) -> Callable:
        def refuse(x: object) -> object:
            raise ValueError(sentence)

        return refuse

    long = Misconception("a window too long", refusing("window: 9 tokens, expected 4"), "How long?")
    known = replace(SUM, misconceptions=(long,))
    assert judge(known, refusing("window: 7 tokens, expected 4")).misconception == long.name
    assert judge(known, refusing("q: expected 4 axes, got 3")).misconception is None


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: max([]), "The largest of nothing"),
        (lambda: torch.ones(2, 0).amax(1), "The largest of nothing"),
        (lambda: [0].index(1), "only where it is there"),
        (lambda: torch.sqrt(2), "For a plain number"),
        (lambda: 0.5 ^ 2, "x ** 2"),
        (lambda: torch.einsum("ij,j->i", torch.ones(2), torch.ones(2)), "one letter"),
        (lambda: torch.einsum("ij->i", torch.ones(2)), "has 1 axes, your letters are 2"),
        (lambda: torch.ones(4).unflatten(0, (2, 4 / 2)), "take `//`"),
        (lambda: torch.ones(4).unflaten(0, (2, 2)), "Did you mean `unflatten`?"),
        (lambda: torch.einsum("i->i", torch.ones(2), torch.ones(2)), "one letter"),
    ],
    ids=[
        "empty",
        "empty axis",
        "not there",
        "no tensor",
        "power",
        "einsum",
        "a letter too many",
        "a size of a float",
        "a misspelt name",
        "einsum of three",
    ],
)
def test_more_errors_are_explained(attempt: Callable, words: str) -> None:
    assert words in judge(SUM, lambda x: attempt()).text


def test_a_function_may_be_named_by_itself() -> None:
    def causal_weights(scores: torch.Tensor) -> torch.Tensor:
        return scores

    assert check("dense_attention", causal_weights).verdicts[0].exercise == "causal_weights"
    with pytest.raises(ValueError, match="nothing to check; name a function: check"):
        check("dense_attention")


def held_by_itself() -> list:
    numbers = []
    numbers.append(numbers)
    return numbers


def doubling(depth: int) -> list:
    """2 ** depth numbers, in a few lists."""
    return [doubling(depth - 1)] * 2 if depth else [1]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.ones(2, device="meta"), "shape [2] on the meta device"),
        ((1, torch.ones(2, device="meta")), "shape [2] on the meta device"),
        (torch.eye(2).to_sparse(), "Call `.to_dense()` on it first"),
        (held_by_itself(), "a list that holds itself"),
        ({"numbers": held_by_itself()}, "a dict that holds itself"),
        (doubling(18), "more than can be looked through"),
    ],
    ids=["meta", "meta inside", "sparse", "itself", "itself inside", "too many"],
)
def test_what_cannot_be_compared_gets_a_sentence(result: object, words: str) -> None:
    verdict = judge(SUM, lambda numbers: result)
    assert verdict.outcome == "wrong" and words in verdict.text
    assert "Case: two numbers." in verdict.text


def test_masks_differ_in_yes_and_no() -> None:
    mask = torch.zeros(6, 6, dtype=torch.bool)
    other = mask.clone()
    other[1, 4] = other[5, 5] = True
    told = "They differ at 2 of 36 places, first at index [1, 4].\ngot      False\nexpected True"
    assert difference(mask, other) == told
