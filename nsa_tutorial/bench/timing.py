"""How long a call takes, and how much memory: `triton.testing.do_bench` on a GPU, which empties the
cache between calls, `torch.utils.benchmark` on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

QUANTILES = (0.5, 0.2, 0.8)
Times = tuple[float, float, float]


def measure(call: Callable[[], object], device: str, *, seconds: float) -> Times:
    """Median, 20 % and 80 % quantile of a call's time, in milliseconds; the first call is not
    counted."""
    call()
    if device == "cuda":
        from triton.testing import do_bench

        return tuple(
            do_bench(call, warmup=100 * seconds, rep=1000 * seconds, quantiles=[*QUANTILES])
        )
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return quantiles([t * 1e3 for t in timer.blocked_autorange(min_run_time=seconds).times])


def measure_kernel(call: Callable[[], object], name: str, *, seconds: float) -> Times:
    """The same of those kernels of a call whose name begins with `name`, on a GPU: what each call
    spends in them together. The profiler measures, and the cache is as the call leaves it.

    Raises:
        LookupError: where the call launches no such kernel.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    median, _, _ = measure(call, "cuda", seconds=seconds)
    calls = max(3, int(1000 * seconds / median))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    launches = [
        event.device_time_total / 1e3
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and event.name.startswith(name)
    ]
    return quantiles(per_call(launches, calls))


def per_call(launches: Sequence[float], calls: int) -> list[float]:
    """What each call spends, from the times of all launches in their order: a call may launch a
    kernel several times, and every call does so equally often.

    Raises:
        LookupError: where launches are missing.
    """
    launches_of_a_call, rest = divmod(len(launches), calls)
    if not launches or rest:
        raise LookupError(f"got {len(launches)} launches of the kernel in {calls} calls")
    return torch.tensor(launches).view(calls, launches_of_a_call).sum(1).tolist()


def quantiles(times: Sequence[float]) -> Times:
    """Median, 20 % and 80 % quantile."""
    wanted = torch.tensor(QUANTILES, dtype=torch.float64)
    return tuple(torch.tensor(times, dtype=torch.float64).quantile(wanted).tolist())


def peak_mib(call: Callable[[], object], device: str) -> float | None:
    """MiB that a call takes at most, on top of what is allocated before it; None on a CPU."""
    if device == "cpu":
        return None
    gc.collect()  # tensors in cycles of references, freed during the call, would hide its own
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
