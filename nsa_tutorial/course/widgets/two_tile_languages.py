"""Chapter 09's pictures: which elements one program loads and stores, found by running that
program's own index arithmetic.

`example` holds a kernel at a size that can be drawn; `record` runs one of its programs
(`course.recorder`), `draw_program` draws what it touched, `sentence` says it, and `explore` puts
controls on them. `draw_owners` shows the whole grid at once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import ipywidgets
import numpy as np
from matplotlib.colors import to_rgb

from nsa_tutorial.course import recorder
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure, readable_on
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.exact.online_softmax import LOG2_E

_COLOURS = {"load": PALETTE["key"], "store": PALETTE["query"], "nothing": "#EDEFF1"}
_OWNERS = ["#C9D1D9", "#EDEFF1"]  # like a chessboard: neighbours differ


@dataclass(frozen=True)
class Example:
    """A kernel at a size to look at.

    Attributes:
        grid: its programs, one number per axis.
        shapes: of its tensors, by name, in the order in which they are drawn.
        numbers: its other arguments.
        axes: what a row and what a column of each tensor's drawing is, by tensor.
    """

    grid: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    numbers: dict[str, object]
    axes: dict[str, tuple[str, str]]


@functools.cache
def example(kernel: str) -> Example:
    """The example of `"copy"`, `"softmax"`, `"matmul"` or `"attention"`: sizes that no tile
    divides."""
    if kernel == "copy":
        shapes = {"X": (37,), "Y": (37,)}
        numbers = {"N": 37, "BN": 8}
        return Example((5,), shapes, numbers, dict.fromkeys(shapes, ("", "element")))
    if kernel == "softmax":
        shapes = {"X": (6, 5), "Y": (6, 5)}
        numbers = {"R": 6, "N": 5, "scale_log2": LOG2_E, "BR": 4, "BN": 8}
        return Example((2,), shapes, numbers, dict.fromkeys(shapes, ("row", "column")))
    if kernel == "matmul":
        shapes = {"A": (7, 6), "B": (6, 10), "C": (7, 10)}
        numbers = {"M": 7, "N": 10, "K": 6, "BM": 4, "BN": 4, "BD": 4, "NUM_STAGES": 2}
        return Example((2, 3), shapes, numbers, {"A": ("M", "K"), "B": ("K", "N"), "C": ("M", "N")})
    if kernel == "attention":
        shapes = {
            "Q": (1, 6, 4, 2), "K": (1, 10, 2, 2), "V": (1, 10, 2, 2),
            "Output": (1, 6, 4, 2), "LSE": (1, 6, 4),
        }  # fmt: skip
        numbers = {
            "N": 6, "M": 10, "HQ": 4, "scale": 0.5, "scale_log2": 0.5 * LOG2_E,
            "G": 2, "D": 2, "DV": 2, "CAUSAL": True,
            "BQ": 4, "BK": 4, "DT": 2, "DVT": 2, "NUM_STAGES": 2,
        }  # fmt: skip
        queries, keys = ("query", "query head"), ("key", "KV head")
        axes = {"Q": queries, "K": keys, "V": keys, "Output": queries, "LSE": queries}
        return Example((2, 4, 1), shapes, numbers, axes)
    raise ValueError(f"kernel: got {kernel!r}, expected copy, softmax, matmul or attention")


def ids(kernel: str, number: int) -> tuple[int, ...]:
    """The program ids of program `number`, the first axis fastest."""
    return list(recorder.programs(example(kernel).grid))[number]


@functools.cache
def record(kernel: str, program: tuple[int, ...]) -> recorder.Record:
    """Run one program of the example on random numbers and return what it touched."""
    case, generator = example(kernel), np.random.default_rng(0)
    tensors = {name: generator.standard_normal(shape) for name, shape in case.shapes.items()}
    name = f"nsa_tutorial.course.kernels.triton_basics:{kernel}"
    return recorder.run(name, program, tensors | case.numbers)


def times_loaded(kernel: str, tensor: str) -> np.ndarray:
    """How often all programs of the example together load each element of `tensor`."""
    programs = recorder.programs(example(kernel).grid)
    return sum(record(kernel, program).touched("load", tensor) for program in programs)


def masked_elements(seen: recorder.Record) -> tuple[int, int]:
    """Elements of tiles that a mask keeps from memory, and all of them, over the program's loads
    and stores."""
    return sum(int((~a.mask).sum()) for a in seen.accesses), sum(a.mask.size for a in seen.accesses)


def sentence(kernel: str, program: tuple[int, ...]) -> str:
    """What one program touches, in words."""
    seen, case = record(kernel, program), example(kernel)
    grid = " × ".join(map(str, case.grid))
    told = {"load": [], "store": []}
    for kind, parts in told.items():
        for name, shape in case.shapes.items():
            count = int((seen.touched(kind, name) > 0).sum())
            if count:
                parts.append(f"{count} of {name}'s {math.prod(shape)}")
    masked, elements = masked_elements(seen)
    return (
        f"Program {_name(program)} of a grid of {grid} loads {_list(told['load'])} elements, and "
        f"stores {_list(told['store'])}. In its tiles, {masked} of {elements} elements are masked."
    )


def _name(program: tuple[int, ...]) -> str:
    return str(program[0]) if len(program) == 1 else f"({', '.join(map(str, program))})"


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _flat(count: np.ndarray) -> np.ndarray:
    """A tensor as rows and columns: without the batch, the heads of a position side by side."""
    if count.ndim > 2:
        return count[0].reshape(count.shape[1], -1)
    return np.atleast_2d(count)


def _draw_tensor(
    sheet: Sheet, place: Place, name: str, seen: recorder.Record, labels: tuple[str, str]
) -> None:
    loads, stores = (_flat(seen.touched(kind, name)) for kind in ("load", "store"))
    picture = np.tile(byte_colour(_COLOURS["nothing"]), (*loads.shape, 1))
    picture[loads > 0] = byte_colour(_COLOURS["load"])
    picture[stores > 0] = byte_colour(_COLOURS["store"])
    rows, columns = loads.shape
    sheet.image(place, picture)
    sheet.cuts(place, rows, columns)
    shape = seen.shapes[name]
    if len(shape) > 2:  # heads side by side, each with its channels
        sheet.cuts(place, 1, shape[2], 3.0)
        across = {(head + 0.5) / shape[2]: head for head in range(shape[2])}
    else:
        step = 4 if columns > 12 else 2
        across = {(i + 0.5) / columns: i for i in range(0, columns, step)}
    sheet.text(place.x(0.5), place.top - 0.12, name, 10, ha="center")
    sheet.below(place, across, labels[1])
    down = {(i + 0.5) / rows: i for i in range(0, rows, 2)} if rows > 1 else {}
    sheet.beside(place, down, labels[0])


def _places(shapes: list[tuple[int, int]], width: float) -> list[Place]:
    """Squares of one size in all drawings, their upper edges level, spread over the width of the
    sheet."""
    gap, top = 0.62, 0.62  # inches on the left of each drawing and over it, for its labels
    room, columns_of_all = width - 0.25 - gap * len(shapes), sum(columns for _, columns in shapes)
    side = min(room / columns_of_all, 1.9 / max(rows for rows, _ in shapes))
    spare = (room - side * columns_of_all) / len(shapes)
    left, found = gap + spare / 2, []
    for rows, columns in shapes:
        found.append(Place(left, top, side * columns, side * rows))
        left += side * columns + gap + spare
    return found


def draw_program(kernel: str = "matmul", program: tuple[int, ...] = (1, 2)) -> Picture:
    """Every tensor of the example; what the program loads and what it stores in colour."""
    seen, case = record(kernel, program), example(kernel)
    if kernel == "copy":
        sheet = Sheet(8.2, 2.3)
        places = [Place(0.25, top, 7.7, 7.7 / 37) for top in (0.62, 1.42)]
    else:
        sheet = Sheet(8.2, 3.2)
        flat = [_flat(np.zeros(shape)).shape for shape in case.shapes.values()]
        places = _places(flat, 8.2)
    for place, name in zip(places, case.shapes, strict=True):
        _draw_tensor(sheet, place, name, seen, case.axes[name])
    labels = {"load": "loaded", "store": "stored", "nothing": "not touched"}
    names = {_COLOURS[kind]: label for kind, label in labels.items()}
    sheet.legend(2.7, 2.14 if kernel == "copy" else 3.06, names)
    return Picture(sheet.figure, f"{kernel}, program {_name(program)}: {_point(kernel, seen)}")


def _point(kernel: str, seen: recorder.Record) -> str:
    """What the picture of a program shows, in a few words."""
    if kernel == "matmul":
        a, b = (seen.touched("load", name) > 0 for name in "AB")
        c = seen.touched("store", "C") > 0
        strips = f"{a.any(1).sum()} rows of A and {b.any(0).sum()} columns of B"
        return f"{strips} make {c.sum()} elements of C"
    if kernel == "attention":
        queries, heads = np.nonzero((seen.touched("load", "Q")[0] > 0).any(2))
        keys, kv_heads = np.nonzero((seen.touched("load", "K")[0] > 0).any(2))
        first, last = queries.min(), queries.max()
        tile = f"queries {first} {'and' if last == first + 1 else 'to'} {last} of head {heads[0]}"
        return f"{tile} meet {len(keys)} keys of KV head {kv_heads[0]}"
    loaded = int((seen.touched("load", "X") > 0).sum())
    stored = int((seen.touched("store", "Y") > 0).sum())
    return f"{loaded} elements loaded, {stored} stored"


def owners(kernel: str, tensor: str) -> np.ndarray:
    """Which program stores each element of `tensor`, by number; -1 where none does, -2 where
    several do."""
    found = np.full(example(kernel).shapes[tensor], -1)
    for number, program in enumerate(recorder.programs(example(kernel).grid)):
        stored = record(kernel, program).touched("store", tensor) > 0
        found = np.where(stored, np.where(found == -1, number, -2), found)
    return found


def draw_owners(kernel: str = "matmul", tensor: str = "C") -> Picture:
    """The result, and in each element the ids of the program that stores it."""
    found = _flat(owners(kernel, tensor))
    known = list(recorder.programs(example(kernel).grid))
    rows, columns = found.shape
    figure, axes = new_figure(7.0, 3.6)
    axis = axes[0, 0]
    colours = [_OWNERS[sum(program) % 2] for program in known]
    picture = np.array([[to_rgb(colours[number]) for number in row] for row in found])
    axis.imshow(picture, aspect="equal", interpolation="none")
    for i, j in np.ndindex(rows, columns):
        text, shade = ", ".join(map(str, known[found[i, j]])), readable_on(colours[found[i, j]])
        axis.text(j, i, text, ha="center", va="center", fontsize=9, color=shade)
    axis.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.2)
    axis.tick_params(which="both", length=0)
    axis.spines[:].set_visible(False)
    axis.set_xticks(range(columns))
    axis.set_yticks(range(rows))
    labels = example(kernel).axes[tensor]
    axis.set_ylabel(f"row of {tensor} ({labels[0]})", fontsize=9)
    axis.set_xlabel(f"column of {tensor} ({labels[1]})", fontsize=9)
    once = f"{int((found >= 0).sum())} of {found.size} elements of {tensor}"
    return Picture(figure, f"{len(known)} programs store {once} exactly once")


def explore() -> Panel:
    """The interactive: a kernel, a program id, and what that program loads and stores."""

    def render(kernel: str, program: int) -> tuple[Picture, str]:
        chosen = ids(kernel, program)
        return draw_program(kernel, chosen), sentence(kernel, chosen)

    def limits(kernel: str, **_: object) -> dict[str, range]:
        return {"program": range(math.prod(example(kernel).grid))}

    kernels = ["copy", "softmax", "matmul", "attention"]
    return panel(
        "one program's loads and stores",
        render,
        limits=limits,
        kernel=ipywidgets.Dropdown(options=kernels, value="matmul", description="kernel"),
        program=ipywidgets.IntSlider(5, 0, 5, description="program number"),
    )
