"""The TileLang kernel with one decision changed, for measuring what the decision is worth.

The kernel that is taught has no switches. A variant is its module with a few lines of the source
replaced: `CHANGES` says which, so that a reader sees what a measurement compared. A line that is no
longer there is an error, and no variant can become the original unseen.

Two variants are probes, measuring instruments and no attention: they load the same tiles by the
same copies, with and without the two products, and have no mask and no softmax. `python -m
nsa_tutorial.bench selected --backend tilelang --steps` measures them beside the kernel, in one run.
A kernel that takes as long as a probe is held up by what the probe does; where a probe takes
longer, it says nothing.

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
SCORES = """                T.clear(acc_s)
                if exact:
                    exact_gemm(Q_shared, K_shared, acc_s, GT, BT, DT, True)
                else:
                    T.gemm(Q_shared, K_shared, acc_s, transpose_B=True, policy=full_rows)
"""
MASK = """                for i, j in T.Parallel(GT, BT):
                    is_seen = T.And(is_visible, j < num_seen)
                    acc_s[i, j] = T.if_then_else(is_seen, acc_s[i, j], -T.infinity(accum_dtype))
"""
SOFTMAX = """                T.copy(scores_max, scores_max_prev)
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(GT):
                    scores_scale[i] = T.exp2((scores_max_prev[i] - scores_max[i]) * scale_log2)
                for i, j in T.Parallel(GT, BT):
                    acc_s[i, j] = T.exp2((acc_s[i, j] - scores_max[i]) * scale_log2)
                T.reduce_sum(acc_s, scores_sum, dim=1)
                for i in T.Parallel(GT):
                    running_sum[i] = running_sum[i] * scores_scale[i] + scores_sum[i]
                for i, j in T.Parallel(GT, DVT):
                    acc_o[i, j] *= scores_scale[i]
"""
ACCUMULATE = """                T.copy(acc_s, acc_s_cast)
                if exact:
                    exact_gemm(acc_s_cast, V_shared, acc_o, GT, DVT, BT, False)
                else:
                    T.gemm(acc_s_cast, V_shared, acc_o, policy=full_rows)
"""
INITIALISE = """            T.clear(running_sum)
            T.fill(scores_max, T.min_value(accum_dtype))  # not -inf: -inf - -inf would be NaN
"""
DIVIDE = """            for i, j in T.Parallel(GT, DVT):
                acc_o[i, j] = T.if_then_else(is_empty, 0, acc_o[i, j] / running_sum[i])
"""
LSE = """                log_sum = scores_max[i] * scale + T.log(running_sum[i])
                lse[i] = T.if_then_else(is_empty, -T.infinity(accum_dtype), log_sum)
"""
# a tile must be waited for: some of it is added to the output
READ_KEYS = """                for i, j in T.Parallel(GT, DVT):
                    acc_o[i, j] += K_shared[i % BT, j % DT]
"""
READ_VALUES = """                for i, j in T.Parallel(GT, DVT):
                    acc_o[i, j] += V_shared[i % BT, j]
"""
NO_LSE = "                lse[i] = 0\n"
NO_SOFTMAX = [*((lines, "") for lines in (INITIALISE, MASK, SOFTMAX, DIVIDE)), (LSE, NO_LSE)]
# What is changed, as pairs of lines of the kernel and of what stands in their place.
CHANGES = {
    # a choice between two numbers has to see them first: they pass through registers
    "values through registers": [(VALUES, VALUES_CHOSEN)],
    "weights through shared memory": [(
        "alloc_weights = T.alloc_fragment if in_registers else T.alloc_shared",
        "alloc_weights = T.alloc_shared",
    )],
    "loads and products alone": NO_SOFTMAX,
    "loads alone": [*NO_SOFTMAX, (SCORES, READ_KEYS), (ACCUMULATE, READ_VALUES)],
    "threads": [('options["threads"]', "{}")],
    "stages": [('options["num_stages"]', "{}")],
    "slots": [('T.dynamic("S")', "{}")],
}  # fmt: skip


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
    lines = [*CHANGES[change]] if change else []
    lines += [(old, new.format(n)) for name, n in numbers.items() for old, new in CHANGES[name]]
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
