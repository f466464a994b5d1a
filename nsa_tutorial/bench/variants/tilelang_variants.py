"""The TileLang kernel with one decision changed, for measuring what the decision is worth.

The kernel that is taught has no switches. A variant is its module with a few lines of the source
replaced: `CHANGES` says which, so that a reader sees what a measurement compared. A line that is no
longer there is an error, and no variant can become the original unseen.

`bench` measures the variants, and chapter 10 reads what becomes of them in CUDA.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from types import ModuleType

from nsa_tutorial.kernels.tilelang.selected import forward as tilelang_forward

VALUES = """key = T.if_then_else(i < BS, block_start + i, num_visible)
                    V_shared[i, j] = V_seen[key, head, j]
"""
VALUES_CHOSEN = """value = V_seen[block_start + i, head, j]
                    is_shown = T.And(is_visible, i < num_seen)
                    V_shared[i, j] = T.if_then_else(is_shown, value, T.cast(0, dtype))
"""
# What is changed, as (line of the kernel, what stands in its place).
CHANGES = {
    # a choice between two numbers has to see them first: they pass through registers
    "values through registers": (VALUES, VALUES_CHOSEN),
    "weights through shared memory": (
        "alloc_weights = T.alloc_fragment if in_registers else T.alloc_shared",
        "alloc_weights = T.alloc_shared",
    ),
    "threads": ('options["threads"]', "{}"),
    "stages": ('options["num_stages"]', "{}"),
    "slots": ('T.dynamic("S")', "{}"),
}


@functools.cache
def variant(change: str = "", **numbers: int) -> ModuleType:
    """A module like `tilelang.selected.forward`, with other lines.

    Args:
        change: one of `CHANGES`, or none.
        numbers: `threads`, `stages`, or `slots`, fixed at this number.

    Raises:
        ValueError: a line to be changed is not in the kernel's source exactly once.
    """
    source = inspect.getsource(tilelang_forward)
    lines = [CHANGES[change]] if change else []
    lines += [(CHANGES[name][0], CHANGES[name][1].format(n)) for name, n in numbers.items()]
    for old, new in lines:
        if source.count(old) != 1:
            raise ValueError(f"variant: found {source.count(old)} times, expected once: {old!r}")
        source = source.replace(old, new)
    told = "_".join([change.replace(" ", "_"), *(f"{k}_{n}" for k, n in numbers.items())])
    module = ModuleType(f"{tilelang_forward.__name__}_{told}")
    module.__file__ = f"<{module.__name__}>"
    # TileLang reads the source of a kernel, through `inspect`
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
    sys.modules[module.__name__] = module
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module
