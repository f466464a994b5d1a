"""From the profiler's trace to a timeline small enough to keep: what each stream did when, and how
much of the communication computing hid."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]


def trace(call: Callable[[], object], is_cuda: bool) -> list[dict]:
    """The events of one call, as Chrome's trace format has them: `name`, `cat`, `ts` and `dur` in
    microseconds, and `args` with the stream."""
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]


def timeline(events: Iterable[dict]) -> dict[str, object]:
    """Kernels and copies of a trace.

    Returns:
        `names`, of the kernels; `events`, `[name, stream, start, length]` each, the name by its
        place, in microseconds from the first one's start; `communication_ms` and `compute_ms`, for
        how long there was some; `hidden_ms`, for how long there were both.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    names: dict[str, int] = {}
    begin = kernels[0]["ts"] if kernels else 0
    rows, sent, computed = [], [], []
    for event in kernels:
        name = short(event["name"])
        start, length = event["ts"] - begin, event["dur"]
        stream = event.get("args", {}).get("stream", 0)
        place = names.setdefault(name, len(names))
        rows.append([place, stream, round(start, 1), round(length, 1)])
        (sent if is_communication(name) else computed).append((start, start + length))
    sent, computed = union(sent), union(computed)
    return {
        "names": list(names),
        "events": rows,
        "communication_ms": round(length_of(sent) / 1e3, 4),
        "compute_ms": round(length_of(computed) / 1e3, 4),
        "hidden_ms": round(length_of(common(sent, computed)) / 1e3, 4),
    }


def is_communication(name: str) -> bool:
    """Whether a kernel is NCCL's."""
    return "nccl" in name.lower()


def short(name: str) -> str:
    """A kernel's name without its C++ arguments, 60 characters at most."""
    name = re.sub(r"^void ", "", name)
    inner = re.search(r"\b(\w*(?:kernel|Kernel|Functor|copy)\w*)", name)
    plain = re.split(r"[<(]", name)[0]
    return (plain if len(plain) <= 60 or not inner else inner.group(1))[:60]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same without overlaps, in order."""
    found: list[list[float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(a, b) for a, b in found]


def common(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Where both are, of two lists without overlaps in order."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length_of(intervals: Iterable[Interval]) -> float:
    """Of all together."""
    return sum(b - a for a, b in intervals)
