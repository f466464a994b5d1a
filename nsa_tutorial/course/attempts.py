"""Call an attempt on a case; where it raises, find the reader's line and what the error means."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, TracebackType

import torch
from torch import Tensor

from nsa_tutorial.course.addresses import WildPointer
from nsa_tutorial.course.diffs import Edited
from nsa_tutorial.course.exercises import Case, Exercise
from nsa_tutorial.course.forbidden import forbidding
from nsa_tutorial.course.launches import NotLaunched, counting, expect_launch
from nsa_tutorial.course.room import unset_is_nan
from nsa_tutorial.course.speech import Code, Part, text_of

_SHAPES = (
    "The shapes do not fit. Print `x.shape` of both just before this line, and write down which "
    "axis is which."
)
_NOTHING = (
    "Something here is None. Does it come from a function that you have not written yet, or that "
    "lacks its `return`?"
)
# TypeErrors that are mistakes of their own: a call with the wrong arguments, torch in a kernel.
_WRONG_CALL = r"positional arguments? but|missing \d+ required|unexpected keyword"
_NO_TENSOR = (
    r"must be (Tensor|real number), not (Buffer|Var|Add|Sub|Mul|Div|Max|Min|Call|Cast|tensor$)"
    r"|'Buffer(Load)?' object has no attribute|got \(tensor,"
)
# The first pattern found in "Kind: message" gives the sentence.
MEANINGS = (
    (
        r"Cannot use and / or / not operator to Expr",
        "These values exist only when the kernel runs, so Python cannot decide `and`, `or`, `not`, "
        "`if` or `a < b < c` on them now. Write `T.And(a, b)`, `T.Or(a, b)` or `T.Not(a)`. "
        "`(a) & (b)` works too, but the parentheses matter: `&` binds tighter than `<`.",
    ),
    (
        r"if_then_else only accept the condition to be boolean",
        "The kernel needs a condition here, such as `a < b`, and got another kind of value.",
    ),
    (
        _NO_TENSOR,
        "A kernel's tiles and numbers are no tensors: functions of `torch` and `math` cannot work "
        "on them, and they lack a tensor's methods. Take the function of `T` or `tl` that does it.",
    ),
    (
        r"InternalError: bad optional access",
        "An argument of a `T` function is of the wrong kind. Does text in quotes stand where a "
        "number, `True` or `False` belongs?",
    ),
    (
        r"using augmented assignment",
        "A TileLang buffer changes element by element: write to `buffer[i, j]`, inside "
        "`T.Parallel`.",
    ),
    (
        r"arange's range must be a power of 2",
        "A tile's sides are powers of 2. Take the next larger one, and mask what lies past it.",
    ),
    (
        r"chained boolean operators|logical (and|or)",
        "Triton joins conditions element by element: `(a) & (b)`, `(a) | (b)` and `~(a)`, each "
        "condition in parentheses.",
    ),
    (
        r"Boolean value of Tensor with more than one value is ambiguous",
        "Python's `if`, `and`, `or`, `not` and `a < b < c` need one yes or no, and a tensor holds "
        "many. Use `torch.where`, or `(a) & (b)`, `(a) | (b)`, `~(a)` with the parentheses.",
    ),
    (
        r"appears? to not have been used in the graph",
        "You asked for the gradient of a tensor that the result does not depend on. Did a "
        "`detach`, a new tensor or another name cut it off? If it really does not depend on it, "
        "pass `allow_unused=True`; its gradient is then None.",
    ),
    (
        r"does not require grad and does not have a grad_fn",
        "Nothing here was recorded for a backward pass. Did you call `requires_grad_()` on the "
        "inputs, and avoid `detach` and `no_grad`?",
    ),
    (
        r"grad can be implicitly created only for scalar outputs",
        "A backward pass starts from one number. Sum first, or say with which weights the outputs "
        "count (`grad_outputs`).",
    ),
    (
        r"backward through the graph a second time",
        "A graph is thrown away once it was walked. Ask for all gradients in one call, or pass "
        "`retain_graph=True` to all calls but the last.",
    ),
    (r"leaf Variable that requires grad", "Write into a copy (`x.clone()`), or make a new tensor."),
    (r"Can't call numpy\(\) on Tensor that requires grad", "Call `.detach()` first."),
    (
        r"must match the size of tensor|cannot be multiplied|does not broadcast|must match except"
        r"|expects each tensor to be equal size|must match the existing size|to have shape"
        r"|is invalid for input of size|make_shape_compatible|incompatible dimensions"
        r"|same number of dimensions|inconsistent tensor size|expected to be in range of"
        r"|shape of the mask|cannot be broadcast|of batch2 tensor|number of sizes provided",
        _SHAPES,
    ),
    (
        r"same dtype, but|not implemented for '(Long|Int|Bool)'|could not infer output dtype",
        "One of these tensors holds whole numbers. Convert it with `.float()`, or to the dtype of "
        "the other.",
    ),
    (
        r"masks?, but got mask with dtype|tensors used as indices must be long",
        "A mask or an index must be boolean or whole numbers; this one has another dtype. A "
        "comparison such as `x > 0` gives a mask, and `.long()` gives indices.",
    ),
    (r"a tuple of \d+ tensors", "A function returned two tensors. Then take both: `o, lse = ...`."),
    (
        r"only integer tensors of a single element",
        "A tensor is an index into a Python list here: `torch.tensor(numbers)[index]` can do it. "
        "Or a tensor meets a tuple. Does a function return two things? Take both: `o, lse = ...`.",
    ),
    (
        r"only one element tensors|cannot be converted to (Scalar|an index)",
        "One number is needed here, and this tensor holds several, or one that is not whole.",
    ),
    (
        r"non-zero size|reduction dim to be specified for input.numel\(\) == 0",
        "There is no element to take the largest or smallest of. Print the shape just before this "
        "line. Which axis is 0 long, and why?",
    ),
    (r"NoneType", _NOTHING),
    (
        r"subscripts in the equation \((\d+)\).*dimensions \((\d+)\) for operand (\d+)",
        r"Input \3, counted from 0, has \2 axes, your letters are \1. Give each axis one letter.",
    ),
    (r"[Ee]llipsis", "A `...` still stands here: a gap that waits for your code."),
    (r"^UnboundLocalError", "It gets its value further down, or in a branch that was not taken."),
    (r"return_types", "There, `x.max(1)` gives numbers and places. `x.amax(1)`: the numbers."),
    (r"^NameError: name 'inf'", "Here infinity is called `torch.inf`."),
    (r"^NameError", "Is the name spelled as where you set it, and was that cell run?"),
    (r"^AttributeError.* Did you mean", ""),
    (
        r"'(builtin_function_or_method|InterpreterBuilder)' object has no attribute '(scalar|grid)",
        "Is a kernel called like a function here? A launch names its grid: `kernel[grid](…)`.",
    ),
    (r"language.* has no attribute 'mean'", "Triton has no `mean`. It has `tl.sum`."),
    (r"^AttributeError: (module|'Tensor')", "It has nothing of that name. Is it spelled right?"),
    (r"tuple of ints, ?but got float", "Sizes are whole, and `/` makes a float: take `//`."),
    (r"^AttributeError", "This value is of another kind than the line expects. Print its `type`."),
    (r": (compress|select|sliding)\w*\(\) takes", "Pass sizes by name, as `length=length`."),
    (
        r"sort\(\) (takes|received)",
        "With `stable`, `sort` takes all by name: `x.sort(dim=-1, stable=True)`.",
    ),
    (_WRONG_CALL, "Count the arguments."),
    (r"object is not callable", "Round brackets call a function. To pick an element, use `[ ]`."),
    (
        r"arg is an empty sequence|iterable argument is empty|Expected reduction dim",
        "The largest of nothing was asked for. Which input leaves nothing over here, and what "
        "should come out then?",
    ),
    (
        r"must be of type tl\.constexpr",
        "A tile's size is fixed when the kernel is compiled: declare it as `tl.constexpr`.",
    ),
    (r"is not in list", "Look it up only where it is there: `if x in values`."),
    (
        r"argument 'input' .*must be Tensor, not (int|float)",
        "For a plain number, use `math`, or `x ** 0.5` for a square root.",
    ),
    (r"unsupported operand type\(s\) for \^", "Python writes a power as `x ** 2`."),
    (r"'(int|float)' object is not subs", "A plain number has no axes. Should each row have one?"),
    (r"operands were provided", "Give `einsum` letters for each input, and each axis one letter."),
    (r"-dimensional.*index\(es\) were provided", "A tile needs one index for each of its axes."),
    (
        r"^IndexError",
        "The first index is 0, so the last one is the length minus 1. What is the largest index "
        "that you ask for?",
    ),
    (r"^KeyError", "Print the keys that there are: `list(d)`."),
    (r"^ZeroDivisionError", "Which input makes the divisor 0, and what should come out then?"),
    (r"^RecursionError", "The function calls itself. Did you mean another one of a similar name?"),
)


class ChangedInput(Exception):
    """An attempt wrote into what it was given."""


def expect_unchanged(arguments: Sequence[object], as_given: Sequence[object]) -> None:
    """Refuse an attempt after which an argument is another one than was given.

    Raises:
        ChangedInput: saying which argument, by its place, and what to write instead.
    """
    for place, (now, before) in enumerate(zip(arguments, as_given, strict=True), start=1):
        if not _is_as_given(now, before):
            raise ChangedInput(
                f"argument {place} is another one after the call. It belongs to the caller: make a "
                "new tensor (`x = x + y`, not `x += y`), or write into `x.clone()`."
            )


def _is_as_given(now: object, before: object) -> bool:
    """Of tensors and of lists of numbers. A list of tensors is not looked into: where one is
    overwritten, the exercise names the mistake."""
    if isinstance(now, list) and not any(isinstance(x, Tensor) for x in now):
        return now == before
    if not isinstance(now, Tensor):
        return True
    is_nan = torch.equal(now.isnan(), before.isnan())
    return is_nan and torch.equal(now.nan_to_num(), before.nan_to_num())


@dataclass(frozen=True)
class NoGradient:
    """In place of the gradient of an argument that a result does not depend on.

    Attributes:
        argument: the argument's name.
    """

    argument: str

    @property
    def told(self) -> str:
        """What the reader is told and asked."""
        return (
            f"No gradient reached `{self.argument}`: autograd finds no way back to it from the "
            "result. What was detached on the way, computed under `no_grad`, or written in place "
            "into `.data`?"
        )


def gradients(
    result: Tensor, d_result: Tensor, **arguments: Tensor
) -> tuple[Tensor | NoGradient, ...]:
    """The gradient of each argument, or `NoGradient` with its name."""
    found = torch.autograd.grad(result, list(arguments.values()), d_result, allow_unused=True)
    return tuple(
        NoGradient(name) if d is None else d for name, d in zip(arguments, found, strict=True)
    )


@dataclass(frozen=True)
class Raised:
    """What a call came to when it raised instead of returning.

    Attributes:
        kind: the error's type.
        message: its text.
        where: the reader's line, as "line 3 of your cell"; empty if no line of theirs was running.
        line: the source text of that line.
    """

    kind: str
    message: str
    where: str = ""
    line: str = ""

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message}"

    @property
    def gist(self) -> tuple[str, str]:
        """What two errors with the same cause share: their kind. For kinds that can mean anything,
        the message counts too, without numbers and names; for TypeErrors, only if they are about a
        call, and of a wild pointer, whether it loads."""
        if self.kind == WildPointer.__name__:
            return self.kind, "load" if " would load " in self.message else "store"
        is_a_call = re.search(f"{_WRONG_CALL}|{_NO_TENSOR}", self.message)
        stands_for_anything = self.kind in ("ValueError", "RuntimeError")
        says_more = is_a_call if self.kind == "TypeError" else stands_for_anything
        if not says_more:
            return self.kind, ""
        first = next(iter(self.message.splitlines()), "")
        return self.kind, re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`|[\W\d]+", " ", first).strip()

    def told(self, is_recognised: bool = False) -> tuple[Part, ...]:
        """The reader's line, the error, and what it usually means, unless the mistake itself has
        been named."""
        if self.kind in (NotLaunched.__name__, ChangedInput.__name__):
            return (self.message,)
        place = (f"In {self.where}:", Code(self.line)) if self.where else ()
        here = "" if self.where else "Here "
        told = *place, f"{here}it raised {self!r}".rstrip()
        searched = ((re.search(pattern, repr(self)), said) for pattern, said in MEANINGS)
        found = (match.expand(said) for match, said in searched if match)
        meaning = "" if is_recognised else next(found, "")
        called = re.search(r"= (\w+)\(", self.line) if "unpack" in self.message else None
        meaning = meaning.replace("a function", f"`{called[1]}`, a function") if called else meaning
        return (*told, meaning) if meaning else told

    @property
    def is_not_attempted(self) -> bool:
        """Whether the reader's stub raised, and not torch for a dtype that it has no kernel for."""
        return self.kind == "NotImplementedError" and "not implemented for" not in self.message


def call(exercise: Exercise, function: Callable, case: Case) -> object:
    """What `function` gives on `case`: its result, or `Raised`."""
    try:
        run = function if exercise.run is None else functools.partial(exercise.run, function)
        if _is_made_elsewhere(exercise, function):
            return run(*case.arguments())
        arguments = case.arguments()
        with contextlib.ExitStack() as stack:
            if exercise.launches is not None:
                stack.enter_context(unset_is_nan())
            stack.enter_context(forbidding(exercise.forbidden))
            launched = stack.enter_context(counting(exercise.launches))
            result = run(*arguments)
        if exercise.run is None:
            expect_unchanged(arguments, case.arguments())
        if result is not None:
            expect_launch(exercise.launches, launched)
        return result
    except Exception as error:
        cause = _cause(error)
        return Raised(type(cause).__name__, text_of(cause), *_line(function, error))


def _is_made_elsewhere(exercise: Exercise, function: Callable) -> bool:
    """Whether this is a known mistake, made in a function that computes the same as the solution,
    such as a kernel's twin in PyTorch. Its numbers alone count."""
    return isinstance(function, Edited) and function.solution is not exercise.solution


def answer(exercise: Exercise, function: Callable, case: Case) -> object:
    """What the exercise's solution or a wrong one gives. Cached, because kernels take long, and
    alike for all exercises that differ in nothing but their cases and known mistakes."""
    return _answer(exercise.bare, function, case)


_answer = functools.cache(call)


def _cause(error: BaseException) -> BaseException:
    """The cause that is worth showing: Triton's interpreter wraps it in an error of its own."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _codes(function: object) -> Iterator[CodeType]:
    """The code objects of a function, of what it wraps, and of a kernel's Python function."""
    seen = []
    while function is not None and function not in seen:
        seen.append(function)
        if hasattr(function, "__code__"):
            yield function.__code__
        function = next(
            (
                inner
                for name in ("__wrapped__", "fn", "func", "orig_func")
                if (inner := getattr(function, name, None)) is not None
            ),
            None,
        )


def _frames(traceback: TracebackType | None) -> Iterator[tuple[CodeType, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next


def _line(function: Callable, error: BaseException) -> tuple[str, str]:
    """The innermost line of the reader's file, cell or function, that was running."""
    own = [*_codes(function)]
    files = {code.co_filename for code in own}
    found = ("", "")
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for link in chain:
        for code, number in _frames(link.__traceback__):
            if code.co_filename not in files:
                continue
            is_cell = "ipykernel" in code.co_filename or code.co_filename.startswith("<ipython")
            relative = number if is_cell else number - code.co_firstlineno + 1
            text = linecache.getline(code.co_filename, number).strip()
            if text:
                place = "your function" if code in own else f"`{code.co_name}`"
                found = f"line {relative} of {'your cell' if is_cell else place}", text
    return found


def is_empty(function: Callable) -> bool:
    """True for a body of nothing but a docstring, `...` or `pass`: it does no more than return
    None."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return False
    idle = {"RESUME", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST", "NOP", "CACHE"}
    instructions = list(dis.get_instructions(code))
    constants = {i.argval for i in instructions if i.opname in ("LOAD_CONST", "RETURN_CONST")}
    return {i.opname for i in instructions} <= idle and constants == {None}
