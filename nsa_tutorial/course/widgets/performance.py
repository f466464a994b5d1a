"""Chapter 16's pictures: the roofline with NSA's operators on it, three orders of one sum, what
each of them moves and how long it takes, and what a choice of tiles is worth.

`operators` counts the work of what was measured on a GPU, `order_cost` that of an order on paper.
`profiled` reads what a profiler said of five kernels, `host_runs` what the host costs.
The times are those that `assets/` stores; `rates` derives from them how fast the machine turned out
to be. `recorded` reads older files, and `assets/performance_h200.json` where it is there.
`told_orders` and `draw_paper` say and draw what the interactive does (`moving/orders.js`).

Nothing here needs Triton or a GPU; `instructions` asks Triton's compiler.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.bench import drawing
from nsa_tutorial.course import costs, heads
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure
from nsa_tutorial.course.sheet import Place, Sheet
from nsa_tutorial.course.widgets.grouped_query_attention import H200_BYTES_PER_S, H200_FLOPS_PER_S
from nsa_tutorial.course.widgets.selection_kernels import SIZES
from nsa_tutorial.course.widgets.tilelang_forward import ASSETS
from nsa_tutorial.runtime import environment, lowering

PERFORMANCE = ASSETS / "performance_h200.json"
PROFILE = ASSETS / "ncu_h200.txt"
TOKENS, WIDTH, BLOCK, SLOTS = 65_536, 128, 64, 16  # of everything that is drawn here
HEADS = {16: (64, 4), 4: (32, 8), 1: (8, 8)}  # by group: query heads and KV heads
T = 4  # queries of a tile
LEAST_ROWS = 16  # that a tensor core's instruction multiplies, filled or not
ORDERS = ("queries", "tiles", "blocks")
TOLD = {
    "queries": "one query a program",
    "tiles": f"tiles of {T} queries",
    "blocks": "a block of keys a program",
}
KERNELS = {  # in `PROFILE`, and what they do
    "descriptor_kernel": TOLD["queries"],
    "kernel": TOLD["tiles"],
    "partial_kernel": TOLD["blocks"],
    "merge_kernel": "merging the partials",
    "attend_kernel": "window",
}
PARTS = {  # of a GPU, and what the profiler calls their use
    "memory": "DRAM Throughput",
    "L2": "L2 Cache Throughput",
    "issue slots": "Issue Slots Busy",
}
PROFILED = {  # the lists and the group of each launch in `PROFILE`
    TOLD["queries"]: ("smooth", 16),
    TOLD["tiles"]: ("smooth", 16),
    TOLD["blocks"]: ("random", 4),
    "merging the partials": ("random", 4),
    "window": ("no lists", 16),
}
MARKS = {"queries": "o", "tiles": "s", "blocks": "^"}
PAYS = (
    0.5  # another order replaces one query a program if it promises at most this share of its time
)


# -- what was measured --


@functools.cache
def stored(name: str) -> dict:
    """A file of `assets/`: machine, versions, command, rows."""
    return json.loads((ASSETS / name).read_text())


def rows_of(name: str, **asked: object) -> list[dict]:
    """The rows of a file at this chapter's tokens and width that have these entries."""
    sizes = {"tokens": TOKENS, "width": WIDTH, **asked}
    return [
        row
        for row in stored(name)["rows"]
        if row["ms"] is not None and all(row.get(key) == value for key, value in sizes.items())
    ]


def dense_runs() -> dict[str, float]:
    """Milliseconds of cuDNN's dense forward, 64 heads over 4, in every file that has it."""
    files = ("triton_forward", "tilelang_forward", "selection", "tilelang_groups")
    asked = {"kernel": "dense, cuDNN", "kv_heads": 4, "group": 16}
    found = {}
    for name in files:
        rows = rows_of(f"{name}_h200.json", **asked)
        rows = [row for row in rows if row.get("direction", "forward") == "forward"]
        found[name] = rows[0]["ms"]
    return found


def recorded() -> dict[tuple[int, str, str], tuple[float, float]]:
    """Milliseconds of the forward and the overlap of its lists, by group, order and kind of
    lists."""
    rows = rows_of("selection_h200.json", direction="forward", change="attention to lists")
    rows += rows_of("triton_backward_groups_h200.json", direction="forward", kernel="triton")
    rows = [row | {"order": "queries"} for row in rows if "order" not in row]  # there was but one
    if PERFORMANCE.exists():
        new = rows_of(PERFORMANCE.name, direction="forward", operator="selected")
        rows += [row for row in new if row["order"] in ORDERS]  # these take the place of the old
    return {
        (row["group"], row["order"], row["lists"]): (row["ms"], row["overlap"])
        for row in rows
        if HEADS.get(row["group"]) == (row["kv_heads"] * row["group"], row["kv_heads"])
    }


def recorded_table() -> list[str]:
    """The recorded times where there are several orders to compare, as lines of text; one sentence
    where none are stored."""
    if not PERFORMANCE.exists():
        return ["No times of all three orders are stored in this copy of the course."]
    told, found = stored(PERFORMANCE.name), recorded()
    lines = [f"{told['machine']}, torch {told['torch']}, Triton {told['triton']}"]
    lines.append(f"forward, {TOKENS:,} tokens, bf16: milliseconds")
    lines.append(f"{'group':>5}  {'lists':8}" + "".join(f"{order:>9}" for order in ORDERS))
    overlaps = {(group, kind): overlap for (group, _, kind), (_, overlap) in found.items()}
    for group, kind in sorted(overlaps, key=lambda row: (-row[0], -overlaps[row])):
        times = [found.get((group, order, kind)) for order in ORDERS]
        if sum(time is not None for time in times) > 1:
            cells = (f"{time[0]:9.1f}" if time else f"{'–':>9}" for time in times)
            lines.append(f"{group:5}  {kind:8}" + "".join(cells))
    return lines


def lists_of_a_model() -> str:
    """A line on each order, forward, along the lists of a trained model."""
    told = stored("model_lists_h200.json")
    overlaps = [head["overlap"] for head in told["heads"]]
    ms = {row["order"]: row["ms"] for row in told["rows"] if row["direction"] == "forward"}
    times = "".join(f"{ms[order]:9.1f}" for order in ORDERS)
    spread = f"{told['tokens']:,} tokens; unions {min(overlaps):.2f} to {max(overlaps):.2f} times"
    return f"{told['group']:5}  {'a model':8}{times}   ({spread} a list)"


# -- what a profiler said --

_COUNTER = re.compile(r" {4}(\S.*?) {2,}(?:\S+ +)?([\d.,]+)$")


@functools.cache
def profiled() -> dict[str, dict[str, float]]:
    """The counters of `PROFILE` by kernel, as `KERNELS` calls it."""
    found: dict[str, dict[str, float]] = {}
    kernel = None
    for line in PROFILE.read_text().splitlines():
        launch, counter = re.match(r"(\w+) \(\d", line), _COUNTER.match(line)
        if launch:
            kernel = found.setdefault(KERNELS[launch[1]], {})
        elif counter and kernel is not None:
            kernel[counter[1]] = float(counter[2].replace(",", ""))
    return found


def profile_table(*kernels: str) -> list[str]:
    """How busy the parts of the GPU were during these kernels, or all of them, as lines of text."""
    lines = [f"{'% of what each can do':27}{'lists':>9}{'group':>7}"]
    lines[0] += "".join(f"{part:>13}" for part in PARTS) + f"{'found in L2':>13}"
    for name in kernels or KERNELS.values():
        found, (lists, group) = profiled()[name], PROFILED[name]
        busy = "".join(f"{found[counter]:13.0f}" for counter in PARTS.values())
        lines.append(f"{name:27}{lists:>9}{group:7}{busy}{found['L2 Hit Rate']:13.0f}")
    return lines


def rate_of_l2() -> str:
    """What the profile of smooth lists says of L2, if they load as many bytes as random ones."""
    lists = profiled()["one query a program"]
    random = next(o for o in operators() if o.name == "attention to lists")
    ms, busy = lists["Duration"], lists[PARTS["L2"]]
    rate = rates().l2 * random.ms / ms / 1e12
    return (
        f"smooth lists: the bytes of random ones in {ms:.1f} ms, {rate:.1f} TB/s; "
        f"if that is {busy:.0f} % of L2, it can do {100 * rate / busy:.1f}"
    )


def busiest(kernel: str) -> str:
    """The part of the GPU that was used most."""
    return max(PARTS, key=lambda part: profiled()[kernel][PARTS[part]])


# -- other sizes and shapes --


@functools.cache
def native_sizes() -> dict[tuple[int, str, str], float]:
    """Milliseconds of the whole of NSA ("triton"), with smooth lists, and of dense attention, by
    tokens, kernel and direction."""
    rows = stored("native_sizes_h200.json")["rows"]
    return {
        (row["tokens"], row["kernel"], row["direction"]): row["ms"]
        for row in rows
        if row["lists"] != "random"
    }


def before_table() -> list[str]:
    """Forward and backward of all of NSA, by an earlier version of the package, which called the
    branches one by one, and by this one, in one run."""
    told, ms = stored("native_sizes_h200.json"), {}
    for when in ("before", "sizes"):
        for row in stored(f"native_{when}_h200.json")["rows"]:
            what = (row["tokens"], row["lists"] or row["kernel"])
            ms.setdefault(what, {}).setdefault(when, []).append(row["ms"])
    lines = [
        f"{told['machine']}, torch {told['torch']}, Triton {told['triton']}: "
        "forward + backward, milliseconds",
        f"{'tokens':>6}  {'lists':7}{'before':>15}{'after':>16}{'cuDNN, dense':>18}",
    ]
    for (tokens, lists), times in sorted(ms.items()):
        if "before" in times:
            dense = sum(ms[tokens, "dense, cuDNN"]["sizes"])
            cells = (" + ".join(f"{x:.2f}" for x in times[when]) for when in ("before", "sizes"))
            lines.append(f"{tokens:6,}  {lists:7}" + "".join(f"{x:>16}" for x in cells)
                         + f"{dense:16.2f}")  # fmt: skip
    return lines


def draw_sizes() -> Picture:
    """How many times as long as NSA dense attention takes, by tokens, kernel and direction."""
    ms = native_sizes()
    sizes = sorted({tokens for tokens, _, _ in ms})
    figure, axes = new_figure(8.2, 3.4, columns=2)
    for axis, direction in zip(axes[0], ("forward", "backward"), strict=True):
        axis.axhline(1, color=PALETTE["text"], linewidth=0.8)
        for dense, colour in (("dense, flash", "faint"), ("dense, cuDNN", "selected")):
            ratios = [ms[n, dense, direction] / ms[n, "triton", direction] for n in sizes]
            axis.plot(sizes, ratios, "o-", color=PALETTE[colour], markeredgecolor=PALETTE["text"])
            axis.annotate(f"{dense.removeprefix('dense, ')}: {ratios[-1]:.1f}",
                          (sizes[-1], ratios[-1]), (8, -3), fontsize=9,
                          textcoords="offset points")  # fmt: skip
        axis.set(xscale="log", yscale="log", title=direction, xlabel="tokens")
        axis.set_xlim(sizes[0] / 1.3, 4 * sizes[-1])  # words stand behind the last points
        axis.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axis.set_xticks([], minor=True)
        axis.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
        axis.set_yticks([], minor=True)
    axes[0, 0].set_ylabel("dense attention's time / NSA's")
    first = next(n for n in sizes if _both(n, "dense, cuDNN") > _both(n, "triton"))
    return Picture(
        figure,
        f"Smooth lists: from {first:,} tokens on, NSA is faster than cuDNN, both passes together",
    )


def _both(tokens: int, kernel: str) -> float:
    """Milliseconds of forward and backward."""
    return sum(native_sizes()[tokens, kernel, way] for way in ("forward", "backward"))


@functools.cache
def shape_ratios() -> dict[tuple[int, int, int], dict[tuple[str, str], float]]:
    """The time of the operator's own choice over that of one query a program: by group, width of
    the keys and of the values, then by direction and kind of lists."""
    ms: dict[tuple, dict[str, float]] = {}
    for row in stored("performance_shapes_h200.json")["rows"]:
        if row["kernel"] == "triton" and row["ms"] is not None:
            shape = row["group"], row["width"], row["value_width"]
            ms.setdefault((shape, row["direction"], row["lists"]), {})[row["order"]] = row["ms"]
    found: dict[tuple[int, int, int], dict[tuple[str, str], float]] = {}
    for (shape, *kind), times in ms.items():
        if "queries" in times:
            own = next(time for order, time in times.items() if order in ("", "auto"))
            found.setdefault(shape, {})[tuple(kind)] = own / times["queries"]
    return dict(sorted(found.items()))


def draw_shapes() -> Picture:
    """`shape_ratios`, a row for each shape."""
    found = shape_ratios()
    figure, axes = new_figure(8.2, 3.6, columns=2)
    marks = {"random": ("o", "masked", -0.14), "smooth": ("s", "selected", 0.14)}
    for axis, direction in zip(axes[0], ("forward", "backward"), strict=True):
        axis.axvline(1, color=PALETTE["text"], linewidth=0.8)
        for lists, (mark, colour, up) in marks.items():
            ratios = [its[direction, lists] for its in found.values()]
            axis.plot(ratios, [row + up for row in range(len(found))], mark, label=f"{lists} lists",
                      color=PALETTE[colour], markeredgecolor=PALETTE["text"])  # fmt: skip
        axis.set(title=direction, xlim=(0, 1.2), xlabel="time / that of one query a program")
        axis.set_yticks(range(len(found)), [f"{group:2}, {d}/{dv}" for group, d, dv in found])
        axis.set_ylim(len(found) - 0.5, -0.5)
    axes[0, 0].set_ylabel("group, widths of keys/values")
    axes[0, 1].legend(frameon=False, fontsize=8.5, loc="lower left")
    ratios = [ratio for its in found.values() for ratio in its.values()]
    slower = sum(ratio > 1.05 for ratio in ratios)
    told = f"Slower than one query a program by more than 5 %: {slower} of {len(ratios)} runs"
    return Picture(figure, told)


# -- the host --


@dataclass(frozen=True)
class HostRun:
    """One recorded call of all of NSA, or of dense attention.

    Attributes:
        ms: of a call, by the clock.
        host_ms: of the host that queues its launches.
        kernels: names and milliseconds, in their order; copies and fills count as kernels.
    """

    ms: float
    host_ms: float
    kernels: list[tuple[str, float]]

    @property
    def device_ms(self) -> float:
        """Milliseconds of its kernels together."""
        return sum(ms for _, ms in self.kernels)

    @property
    def queued_ms(self) -> float:
        """Until the last launch: the host's time, or what the call, which was timed in other runs,
        leaves for it before the last kernel."""
        return min(self.host_ms, self.ms - self.kernels[-1][1])

    @property
    def timeline(self) -> list[tuple[float, float]]:
        """When each kernel begins and ends, in milliseconds, if the launches are spread evenly:
        once it is launched, and the kernel before it is done."""
        found, done = [], 0.0
        for number, (_, ms) in enumerate(self.kernels, 1):
            begin = max(done, self.queued_ms * number / len(self.kernels))
            done = begin + ms
            found.append((begin, done))
        return found


@functools.cache
def host_runs() -> dict[tuple[int, str, str], HostRun]:
    """What was recorded of the host, with smooth queries: by tokens, way and direction. Ways are
    "branch by branch", "at once" and "dense"."""
    return {
        (row["tokens"], row["way"], row["direction"]): HostRun(
            row["ms"], row["host_ms"], [(name, us / 1e3) for name, us in row["kernels"]]
        )
        for row in stored("native_host_h100.json")["rows"]
        if row["queries"] != "random" and not row["way"].startswith("layer")
    }


WAYS = ("branch by branch", "at once")  # in which all of NSA is called


def draw_launches(tokens: int = 2048) -> Picture:
    """The forward of all of NSA in both ways: the host's launches above the GPU's kernels."""
    sheet, end = Sheet(8.3, 3.4), 5
    for way, top in zip(WAYS, (0.62, 1.82), strict=True):
        run = host_runs()[tokens, way, "forward"]
        chart = sheet.chart(Place(0.7, top, 7.3, 0.72), (0, end), (2, 0))
        step = run.queued_ms / len(run.kernels)
        slots = [(i * step, 0.1, 0.86 * step, 0.8) for i in range(len(run.kernels))]
        chart.boxes(slots, "masked", edgecolors=PALETTE["faint"], linewidths=0.4)
        spans = [(begin, 1.1, done - begin, 0.8) for begin, done in run.timeline]
        chart.boxes(spans, "selected", edgecolors=PALETTE["selected"], linewidths=0.5)
        chart.lines([[(run.ms, 0.02), (run.ms, 1.98)]], "query", 2)
        chart.left([0.5, 1.5], ["host", "GPU"], line=False)
        told = f"{way}: {len(run.kernels)} launches, kernels {run.device_ms:.2f} ms together"
        sheet.words([(0.7, top - 0.1, told)], size=9.5, ha="left")
        chart.words([(run.ms, 0.5, f"{run.ms:.2f} ms")], size=9, ha="left", offset=(5, 0))
        if way == WAYS[-1]:
            chart.bottom([0, 1, 2, 3, 4], None, "milliseconds")
    names = {"masked": "launches, spread evenly",
             "selected": "kernels, as recorded", "query": "the call, by the clock"}  # fmt: skip
    sheet.legend(0.7, 3.2, names)
    runs = [host_runs()[tokens, way, "forward"] for way in WAYS]
    counts = " or ".join(str(len(run.kernels)) for run in runs)
    idle = " or ".join(dict.fromkeys(f"{100 * (1 - x.device_ms / x.ms):.0f}" for x in runs))
    return Picture(
        sheet.figure,
        f"{tokens:,} tokens, {counts} launches: the GPU waits {idle} % of the time",
    )


def draw_host() -> Picture:
    """The forward's time by tokens, and those of the host and of the kernels, in both ways."""
    runs = host_runs()
    sizes = sorted({tokens for tokens, _, _ in runs})
    figure, axes = new_figure(8.2, 3.4, columns=2)
    off = []
    for axis, way in zip(axes[0], WAYS, strict=True):
        mine = [runs[n, way, "forward"] for n in sizes]
        lines = (("host", "faint", "s--", [x.host_ms for x in mine]),
                 ("kernels", "selected", "o-", [x.device_ms for x in mine]))  # fmt: skip
        for name, colour, style, ms in lines:
            axis.plot(sizes, ms, style, color=PALETTE[colour], markersize=5)
            axis.annotate(name, (sizes[-1], ms[-1]), (12, -3), fontsize=9,
                          textcoords="offset points")  # fmt: skip
        axis.plot(sizes, [x.ms for x in mine], "o", color="none", markersize=12,
                  markeredgecolor=PALETTE["query"], markeredgewidth=2,
                  label="the call, by the clock")  # fmt: skip
        off += [abs(x.ms / max(x.host_ms, x.device_ms) - 1) for x in mine]
        launches = len(runs[sizes[0], way, "forward"].kernels)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylim=(0.3, 20),
                 title=f"{way}: {launches} launches at {sizes[0]:,} tokens")  # fmt: skip
        axis.set_xlim(sizes[0] / 1.4, 3 * sizes[-1])  # words stand behind the last points
        axis.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axis.set_xticks([], minor=True)
        axis.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
        axis.set_yticks([], minor=True)
    axes[0, 0].set_ylabel("ms, forward")
    axes[0, 0].legend(frameon=False, fontsize=8.5, loc="upper left")
    return Picture(
        figure,
        "A call takes the longer of the host's time and its kernels', "
        f"to within {math.ceil(100 * max(off))} %",
    )


def host_table() -> list[str]:
    """`host_runs` as lines of text."""
    told, runs = stored("native_host_h100.json"), host_runs()
    lines = [f"{told['machine']}, torch {told['torch']}, Triton {told['triton']}; "
             "bf16, 64 heads over 4, smooth lists: milliseconds"]  # fmt: skip
    lines.append(f"{'':17}" + "".join(f"{way:^26}" for way in WAYS) + "dense, cuDNN")
    lines.append(f"{'tokens':>6}  {'':9}" + f"{'call':>8}{'host':>8}{'kernels':>9} " * 2 + "  call")
    for tokens, direction in dict.fromkeys((n, d) for n, _, d in sorted(runs, key=lambda x: x[0])):
        mine = [runs[tokens, way, direction] for way in WAYS]
        cells = (f"{x.ms:8.2f}{x.host_ms:8.2f}{x.device_ms:9.2f} " for x in mine)
        dense = runs[tokens, "dense", direction].ms
        lines.append(f"{tokens:6,}  {direction:9}{''.join(cells)}{dense:6.2f}")
    return lines


# -- the roofline --


@dataclass(frozen=True)
class Operator:
    """One measured operator.

    Attributes:
        name: what it is.
        flops: operations of its products, or of its sums where it has none.
        bytes: what its programs load and store, whoever serves it.
        ms: how long it took.
    """

    name: str
    flops: float
    bytes: float
    ms: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        """Operations a second."""
        return 1e3 * self.flops / self.ms

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second."""
        return 1e3 * self.bytes / self.ms


def _walk(keys: float, rows: int, flops_per_pair: int) -> tuple[float, float]:
    """Operations and bytes where `keys`, summed over the queries, are walked by tiles of `rows`
    rows that load keys and values; with the queries and the outputs."""
    HQ, _ = HEADS[16]
    ends = 2 * 2 * TOKENS * HQ * WIDTH
    return flops_per_pair * HQ * keys, ends + HQ * keys / rows * 2 * WIDTH * 2


def operators() -> list[Operator]:
    """NSA's operators, and dense attention, with 64 heads over 4, forward, in bf16."""
    HQ, H = HEADS[16]
    product, both = 2 * WIDTH, 4 * WIDTH
    listed = costs.selected_keys(TOKENS, TOKENS, block_size=BLOCK, top_n=SLOTS)
    window = costs.window_keys(TOKENS, TOKENS, window_size=512)
    summaries = costs.summary_keys(TOKENS, TOKENS)
    pairs = costs.visible_pairs(TOKENS, TOKENS)
    outputs, keys = TOKENS * HQ * WIDTH, TOKENS * H * WIDTH
    work = {
        "attention to lists": _walk(listed, 16, both),  # a group is the tile
        "window": _walk(window, T * 16, both),  # neighbours' windows differ in a few keys
        "attention to summaries": _walk(summaries, 128, both),
        # a step of 128 summaries and 64 queries: the queries of every head come anew
        "choice of blocks": (product * HQ * summaries, HQ * summaries / 128 * product),
        "gates": (6 * outputs, 2 * 4 * outputs),  # three outputs in, one out
        "summaries": (4 * keys, 2 * 2 * keys),  # each key and each value in two windows
        "dense, cuDNN": _walk(pairs, 128, both),
    }
    asked = {"kv_heads": H, "group": 16, "direction": "forward"}
    rows = rows_of("selection_h200.json", **asked)
    ms = {row["change"] or row["kernel"]: row["ms"] for row in rows if row["lists"] != "smooth"}
    ms["attention to lists"] = recorded()[16, "queries", "random"][0]  # the order counted above
    return [Operator(name, *done, ms[name]) for name, done in work.items()]


@dataclass(frozen=True)
class Rates:
    """How fast the machine is: by its data sheet, and as it was measured.

    Attributes:
        memory: bytes a second of the main memory, data sheet.
        l2: bytes a second that attention to random lists was served, by whatever cache: an
            estimate of what L2 can serve, and no measurement of it.
        peak: bf16 operations a second, data sheet.
        products: operations a second of the best dense kernel that was measured.
    """

    memory: float
    l2: float
    peak: float
    products: float


@functools.cache
def rates() -> Rates:
    """Of the H200 that the stored times come from."""
    flops = 4 * WIDTH * 64 * costs.visible_pairs(TOKENS, TOKENS)
    best = min(dense_runs().values())
    lists = next(o for o in operators() if o.name == "attention to lists")
    return Rates(H200_BYTES_PER_S, lists.bytes_per_s, H200_FLOPS_PER_S, 1e3 * flops / best)


def draw_roofline() -> Picture:
    """The measured operators under the roofs of memory and of the tensor cores, and the slope that
    goes through attention to lists."""
    r, points = rates(), operators()
    figure, axes = new_figure(8.2, 4.2)
    axis = axes[0, 0]
    x = np.logspace(-0.6, 3.2, 200)
    roofs = ((r.memory, "faint", "-"), (r.l2, "query", "--"))
    names = ("memory and tensor cores, data sheet",
             f"{r.l2 / 1e12:.1f} TB/s: chosen to go through attention to lists")  # fmt: skip
    for (bandwidth, colour, style), name in zip(roofs, names, strict=True):
        y = np.minimum(bandwidth * x, r.peak) / 1e12
        axis.plot(x, y, color=PALETTE[colour], linestyle=style, linewidth=1.6, label=name)
    places = {
        "attention to lists": (-8, 4, "right"), "window": (6, -13, "left"),
        "dense, cuDNN": (10, 1, "left"),
    }  # fmt: skip
    for o in points:
        colour = PALETTE["masked"] if o.name.startswith("dense") else PALETTE["selected"]
        axis.plot(o.intensity, o.flops_per_s / 1e12, "o", color=colour, markersize=8,
                  markeredgecolor=PALETTE["text"], markeredgewidth=0.6)  # fmt: skip
        right, up, side = places.get(o.name, (9, -3, "left"))
        axis.annotate(o.name, (o.intensity, o.flops_per_s / 1e12), (right, up), ha=side,
                      textcoords="offset points", fontsize=9)  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="operations a byte that the programs ask for",
             ylabel="TFLOP/s", ylim=(0.4, 1500))  # fmt: skip
    axis.legend(frameon=False, fontsize=8.5, loc="lower right")
    lists = points[0]
    over = lists.bytes_per_s / r.memory
    return Picture(
        figure,
        f"Attention to lists loads {lists.bytes_per_s / 1e12:.1f} TB/s: {over:.1f} times what "
        "memory can give",
    )


# -- three orders of the same sums --


@dataclass(frozen=True)
class OrderCost:
    """What an order does in one forward.

    Attributes:
        cached: bytes that L2 serves.
        memory: bytes that cross the main memory.
        flops: operations of its products, with the rows that fill a tile up.
    """

    cached: float
    memory: float
    flops: float

    @property
    def times(self) -> dict[str, float]:
        """Milliseconds on paper: of L2, of memory and of the tensor cores."""
        r = rates()
        parts = {
            "L2": self.cached / r.l2, "memory": self.memory / r.memory,
            "products": self.flops / r.products,
        }  # fmt: skip
        return {name: 1e3 * seconds for name, seconds in parts.items()}

    @property
    def ms(self) -> float:
        """The time on paper: that of the slowest of the three."""
        return max(self.times.values())


@functools.cache
def order_cost(order: str, group: int, overlap: float) -> OrderCost:
    """What an order moves and multiplies; what a causal mask hides does not count.

    Args:
        order: of `ORDERS`.
        group: query heads of a KV head, one of `HEADS`.
        overlap: blocks in the union of `T` neighbours' lists, over those in one list.
    """
    HQ, H = HEADS[group]
    keys = costs.selected_keys(TOKENS, TOKENS, block_size=BLOCK, top_n=SLOTS)
    entries = H * keys / BLOCK  # one query and one block
    block, row = 2 * BLOCK * WIDTH * 2, 2 * WIDTH
    ends = TOKENS * HQ * 2 * row + 2 * TOKENS * H * WIDTH * 2  # q, o, k and v, once
    pair = 4 * WIDTH * BLOCK  # operations of one row and one block
    if order == "queries":
        return OrderCost(entries * block + ends, ends, entries * max(group, LEAST_ROWS) * pair)
    if order == "tiles":
        loads = entries * overlap / T
        return OrderCost(loads * block + ends, ends, loads * max(T * group, LEAST_ROWS) * pair)
    partials = 2 * entries * group * (row + 4)  # an output and an LSE, out and in
    queries = entries * group * row
    return OrderCost(queries + partials + ends, partials + ends, entries * group * pair)


def best_order(group: int, overlap: float) -> str:
    """The order to take for many queries: another than one query a program only if it clearly
    promises less."""
    ms = {order: order_cost(order, group, overlap).ms for order in ORDERS}
    first = min(ORDERS, key=ms.__getitem__)
    return first if ms[first] <= PAYS * ms["queries"] else "queries"


@functools.cache
def real_lists() -> Tensor:
    """The lists of the course's real heads, `[N, H, 8]`, of 32 blocks of 16 keys."""
    h = heads.load()
    k_cmp, v_cmp = (ops.compress(x, **SIZES) for x in (h.k, h.v))
    _, lse = ops.compressed_attention(
        h.q, k_cmp, v_cmp, **SIZES, return_lse=True, backend="reference"
    )
    sizes = {**SIZES, "block_size": 16, "top_n": 8}
    return ops.select_blocks(h.q, k_cmp, lse, **sizes, backend="reference")[0]


def neighbours(query: int = 460, head: int = 3) -> list[list[int]]:
    """The lists of `T` neighbours, from `query` on, on the real heads."""
    return real_lists()[query : query + T, head].tolist()


def draw_orders(query: int = 460, head: int = 3) -> Picture:
    """Four queries and their blocks, and what one program loads in each of the three orders."""
    lists = neighbours(query, head)
    blocks = sorted({b for ids in lists for b in ids if b >= 0})
    entries = [(t, blocks.index(b)) for t, ids in enumerate(lists) for b in ids if b >= 0]
    n, sheet = len(blocks), Sheet(8.3, 3.3)
    most = max(range(n), key=lambda x: sum(place == x for _, place in entries))
    mine: dict[str, Callable[[int, int], bool]] = {
        "queries": lambda t, x: t == 1,
        "tiles": lambda t, x: True,
        "blocks": lambda t, x: x == most,
    }
    loads = {"queries": f"{len(entries)} loads of a block", "tiles": f"{n} loads of a block",
             "blocks": f"{len(entries)} loads of queries"}  # fmt: skip
    titles = {"queries": "a program: one query", "tiles": f"a program: {T} queries",
              "blocks": "a program: one block"}  # fmt: skip
    for i, order in enumerate(ORDERS):
        place = Place(0.75 + i * 2.55, 0.72, 2.25, 1.6)
        chart = sheet.chart(place, (0, n), (T, 0))
        chart.title(titles[order])
        colours = ["selected" if mine[order](t, x) else "#DDE3E8" for t, x in entries]
        chart.boxes([(x + 0.06, t + 0.06, 0.88, 0.88) for t, x in entries], colours)
        chart.bottom([x + 0.5 for x in range(n)], blocks, "block", line=False, size=7.5)
        if i == 0:
            names = [query + t for t in range(T)]
            chart.left([t + 0.5 for t in range(T)], names, "query", line=False)
        sheet.words([(place.x(0.5), 3.02, loads[order])], size=9.5)
    sheet.words([(0.7, 3.02, "in all:")], size=9.5, ha="right")
    told = f"{T} neighbours list {len(entries)} blocks, {n} of them different"
    return Picture(sheet.figure, told)


# -- bytes, operations and time of an order --

_PARTS = {"L2": "#4A5560", "memory": "#8A929A", "products": "#C8CCD0"}


def measured_ms(order: str, group: int, overlap: float) -> float | None:
    """The recorded time of an order at these lists; None where there is none. The kernel fills 64
    rows, so only in groups of 16 its tiles have `T` queries."""
    if order == "tiles" and T * group != 64:
        return None
    for (its_group, its_order, _), (ms, its_overlap) in recorded().items():
        if (its_group, its_order) == (group, order) and abs(its_overlap - overlap) < 0.02:
            return ms
    return None


def told_orders(order: str, overlap: float, group: int) -> str:
    """What the interactive says about a setting."""
    cost, (HQ, H) = order_cost(order, group, overlap), HEADS[group]
    limit = max(cost.times, key=cost.times.__getitem__)
    ms = measured_ms(order, group, overlap)
    was = f"Recorded: {ms:.1f} ms." if ms else "No recorded run has these lists."
    return (
        f"{HQ} heads over {H}, {TOLD[order]}: {cost.cached / 1e9:.0f} GB through L2, "
        f"{cost.memory / 1e9:.0f} GB through memory, {cost.flops / 1e12:.1f} TFLOP. "
        f"The longest on paper: {limit}, {cost.ms:.1f} ms. {was}"
    )


def draw_paper(order: str = "tiles", overlap: float = 1.29, group: int = 16) -> Picture:
    """The time of each order on paper, by what limits it, and what was recorded."""
    sheet, found = Sheet(8.3, 3.3), {o: order_cost(o, group, overlap) for o in ORDERS}
    measured = {o: measured_ms(o, group, overlap) for o in ORDERS}
    ends = [*(cost.ms for cost in found.values()), *filter(None, measured.values())]
    top = 1.7 * max(ends)  # words stand behind the bars
    chart = sheet.chart(Place(2.0, 0.62, 5.8, 2.1), (0, top), (len(ORDERS), 0))
    for row, (name, cost) in enumerate(found.items()):
        if name == order:
            chart.boxes([(0, row + 0.02, top, 0.96)], "#EEF3F7")
        for i, (part, ms) in enumerate(cost.times.items()):
            chart.boxes([(0, row + 0.14 + 0.25 * i, ms, 0.22)], _PARTS[part])
        told, end = f"{cost.ms:.1f} ms on paper", cost.ms
        if measured[name]:
            told, end = told + f", {measured[name]:.1f} recorded", max(end, measured[name])
            chart.lines([[(measured[name], row + 0.06), (measured[name], row + 0.94)]], "query", 2)
        chart.words([(end, row + 0.5, told)], size=9, ha="left", offset=(6, 0))
    step = 5 if top <= 50 else 10
    chart.bottom(list(range(0, int(top) + 1, step)), None, "milliseconds")
    chart.left([row + 0.5 for row in range(3)], [TOLD[o] for o in ORDERS], line=False)
    sheet.legend(2.0, 0.45, {**{_PARTS[p]: p for p in _PARTS}, "query": "recorded"})
    first = min(ORDERS, key=lambda o: found[o].ms)
    return Picture(
        sheet.figure,
        f"Group of {group}, unions {overlap:.2f} times a list: {found[first].ms:.1f} ms on paper, "
        f"with {TOLD[first]}",
    )


def paper_and_recorded() -> list[tuple[str, float, float]]:
    """Order, milliseconds on paper and recorded milliseconds of every run in `recorded_table` that
    `order_cost` describes."""
    found = recorded()
    orders = Counter((group, kind) for group, _, kind in found)
    return [
        (order, order_cost(order, group, overlap).ms, ms)
        for (group, order, kind), (ms, overlap) in found.items()
        if orders[group, kind] > 1 and (order != "tiles" or T * group == 64)
    ]


def draw_recorded() -> Picture:
    """Every recorded run: its time over the time on paper."""
    found = paper_and_recorded()
    figure, axes = new_figure(6.4, 3.6)
    axis, low, high = axes[0, 0], 2, 40
    axis.plot([low, high], [low, high], color=PALETTE["faint"], linewidth=1)
    label = functools.partial(axis.annotate, textcoords="offset points", fontsize=9.5)
    label("as on paper", (6, 6), (6, -12))
    beside = {"queries": (-10, 4, "right"), "tiles": (-8, 8, "right"), "blocks": (10, 2, "left")}
    for order in ORDERS:
        points = [(paper, ms) for its, paper, ms in found if its == order]
        if points:
            axis.plot(*zip(*points, strict=True), MARKS[order], color=PALETTE["selected"],
                      markersize=8, markeredgecolor=PALETTE["text"])  # fmt: skip
            right, up, side = beside[order]
            label(TOLD[order], max(points), (right, up), ha=side)
    ticks = [2, 5, 10, 20, 40]
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high),
             xlabel="ms on paper", ylabel="ms, recorded")  # fmt: skip
    for side in (axis.xaxis, axis.yaxis):
        side.set_ticks(ticks, [str(tick) for tick in ticks])
        side.set_ticks([], minor=True)
    most = {o: max((ms / paper for its, paper, ms in found if its == o), default=0) for o in ORDERS}
    told = f"Tiles take up to {most['tiles']:.1f} times as long as on paper, key blocks "
    return Picture(figure, f"{told}{most['blocks']:.1f} times")


# -- autotuning --

CHOSEN = {"warps": 1, "stages": 3, "tokens": 32}  # by the package, for this shape
_TUNED = re.compile(r"pointers, (?:steps of )?(\d+) (warps?|stages?|tokens)$")


def tuned() -> dict[str, dict[int, float]]:
    """Recorded milliseconds of one kernel by what was changed in it: warps, stages, tokens of a
    step."""
    found: dict[str, dict[int, float]] = {"warps": {}, "stages": {}, "tokens": {}}
    for row in rows_of("triton_forward_h200.json", group=16):
        match = _TUNED.match(row["change"])
        if match:
            found[match[2].rstrip("s") + "s"][int(match[1])] = row["ms"]
    return found


def draw_tuning() -> Picture:
    """What each choice of one kernel costs, one choice changed at a time; the package's own is
    coloured."""
    choices, figure_axes = tuned(), new_figure(8.2, 2.6, columns=3)
    figure, axes = figure_axes
    worst = max(ms for times in choices.values() for ms in times.values())
    chosen = next(
        row["ms"] for row in rows_of("triton_forward_h200.json", group=16)
        if row["change"] == "pointers"
    )  # fmt: skip
    names = {"warps": "warps of a program", "stages": "stages in flight",
             "tokens": "tokens of a step"}  # fmt: skip
    for axis, (name, times) in zip(axes[0], choices.items(), strict=True):
        colours = [PALETTE["selected" if x == CHOSEN[name] else "masked"] for x in times]
        axis.bar([str(x) for x in times], list(times.values()), color=colours, width=0.65)
        axis.set(xlabel=names[name], ylim=(0, 1.12 * worst))
        for i, ms in enumerate(times.values()):
            axis.text(i, ms + 0.4, f"{ms:.1f}", ha="center", fontsize=8.5)
    axes[0, 0].set_ylabel("ms")
    costly = next(
        f"{x} {name}" for name, times in choices.items() for x, ms in times.items() if ms == worst
    )
    told = (
        f"One choice changed at a time: {costly} cost most, {worst:.1f} ms instead of {chosen:.1f}"
    )
    return Picture(figure, told)


# -- what a compiler writes --

_KERNELS = "nsa_tutorial.course.kernels.performance:"


def instructions() -> dict[str, dict[str, int]]:
    """How often some instructions stand in the PTX of this chapter's small kernels, for a Hopper
    GPU: by kernel, then by instruction.

    Raises:
        BackendUnavailable: one sentence, where Triton is not installed.
    """
    types = {"X": "*fp16", "Y": "*fp16", "A": "*fp16", "B": "*fp16", "C": "*fp32"}
    small, large = ({"BM": n, "BN": n, "BK": n} for n in (16, 64))
    asked = {
        "neighbours": ("gather", {"APART": 1, "BN": 1024}, {}),
        "16 apart": ("gather", {"APART": 16, "BN": 1024}, {}),
        "number by number": ("multiply", small | {"DOT": False}, {"num_stages": 1}),
        "tensor cores": ("multiply", large | {"DOT": True}, {"num_stages": 1}),
        "3 stages": ("multiply", large | {"DOT": True}, {"num_stages": 3}),
    }
    patterns = {
        "loads": r"ld\.global",
        "multiply-adds": r"fma\.rn",
        "tensor cores": r"wgmma\.mma_async",
        "copies ahead": r"cp\.async\.c[ag]",
    }
    requests = [
        lowering.request(_KERNELS + kernel, constants, types, aligned=["K"], **options)
        for kernel, constants, options in asked.values()
    ]
    return {
        name: {told: len(re.findall(text, stages["ptx"])) for told, text in patterns.items()}
        for name, stages in zip(asked, lowering.all_stages(requests), strict=True)
    }


def instructions_table() -> list[str]:
    """`instructions` as lines of text, or what is missing."""
    here = environment.detect()
    missing = here.why_not("triton", here.device)
    if missing:
        return [missing]
    found = instructions()
    heads_ = list(next(iter(found.values())))
    lines = [f"{'kernel':17}" + "".join(f"{name:>15}" for name in heads_)]
    lines += [f"{name:17}" + "".join(f"{n:15}" for n in row.values()) for name, row in
              found.items()]  # fmt: skip
    return lines


# -- numbers of the text --


def random_union(blocks: int = 1024, slots: int = SLOTS, forced: int = 3) -> float:
    """Blocks in the union of `T` late queries' lists that share the forced ones and draw all
    others at random."""
    free = blocks - forced
    missed = (1 - (slots - forced) / free) ** T
    return forced + free * (1 - missed)


def listed_ms() -> float:
    """Milliseconds that all blocks of all lists take at the speed of the memory."""
    return 1e3 * TOKENS * HEADS[16][1] * SLOTS * (4 * BLOCK * WIDTH) / H200_BYTES_PER_S


def tiles_of_lists(only_full: bool = False) -> list[list[list[int]]]:
    """The lists of every `T` neighbours on the course's real heads, for each KV head; with
    `only_full`, of neighbours whose lists have no empty slot."""
    tiles = real_lists().unflatten(0, (-1, T)).transpose(1, 2).flatten(0, 1)  # [tiles * H, T, 8]
    return (tiles[(tiles >= 0).all(-1).all(-1)] if only_full else tiles).tolist()


def small_lists(tokens: int) -> Tensor:
    """Lists of 3 blocks of 4 keys for two KV heads, which neighbours share in part."""
    return drawing.draw("smooth", tokens, 2, 4, 3, "cpu")
