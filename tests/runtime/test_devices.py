"""An operator runs on the device and the current stream of its tensors, whichever is current."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from places import skip_unless_runs
from torch import Tensor
from torch.library import CustomOpDef

from nsa_tutorial import backends, library, library_at_once, library_backward, ops
from nsa_tutorial.runtime import devices

HQ, H = 4, 2
SIZES = {"length": 4, "stride": 2}


def calls(device: str, backend: str, N: int = 70, D: int = 16) -> dict[str, Callable[[], Tensor]]:
    """Each public operator on `N` tokens and its gradients, as a few numbers that tell of all."""
    g = torch.Generator().manual_seed(0)
    draw = [torch.randn(1, N, h, D, generator=g) for h in (HQ, H, H)]
    gates = [torch.rand(1, N, HQ, generator=g).to(device) for _ in range(3)]
    ids = torch.tensor([0, -1, 2], dtype=torch.int32, device=device).expand(1, N, H, 3)
    packed = torch.tensor([0, 5, 5, N], dtype=torch.int32, device=device)
    common = {"backend": backend, "cu_seqlens": packed}
    blocks = {"block_size": 16, **common}

    def summed(function: Callable[..., Tensor | tuple[Tensor, ...]]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            q, k, v = (x.to(device).requires_grad_() for x in draw)
            found = function(q, k, v)
            found = found if isinstance(found, tuple) else (found,)
            weighted = [(x * torch.linspace(-1, 1, x.numel(), device=device).view_as(x)).sum()
                        for x in found]  # fmt: skip
            gradients = torch.autograd.grad(sum(weighted), (q, k, v), allow_unused=True)
            numbers = [x.detach() for x in weighted]
            return torch.stack([*numbers, *(x.abs().sum() for x in gradients if x is not None)])

        return run

    def with_summaries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k_cmp, v_cmp = (ops.compress(x, **SIZES, **common) for x in (k, v))
        o = ops.compressed_attention(q, k_cmp, v_cmp, **SIZES, **common)
        chosen = ops.select_blocks(q, k_cmp, top_n=3, block_size=16, **SIZES, **common)
        return o, chosen * q.sum() * 0 + chosen

    return {
        "selected": summed(lambda q, k, v: ops.selected_attention(q, k, v, ids, **blocks)),
        "window": summed(
            lambda q, k, v: ops.sliding_window_attention(q, k, v, window_size=9, **common)
        ),
        "both": summed(
            lambda q, k, v: ops.selected_and_window_attention(q, k, v, ids, window_size=9, **blocks)
        ),
        "summaries": summed(with_summaries),
        "all": summed(
            lambda q, k, v: ops.native_sparse_attention(
                q, k, v, *gates, block_counts=3, window_size=9, **SIZES, **blocks
            )
        ),
    }


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A fake guard; the tensors whose device is current now."""
    inside: list[Tensor] = []

    @contextmanager
    def fake(x: Tensor) -> Iterator[None]:
        inside.append(x)
        yield
        inside.pop()

    monkeypatch.setattr(devices, "guard", fake)
    return inside


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_each_backends_function_runs_under_the_guard(
    backend: str, guarded: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU: a fake guard in the place of CUDA's, forward and backward."""
    load, seen = backends.load, set()

    def watched(table: backends.Table, operator: str, name: str, q: Tensor) -> Callable:
        function = load(table, operator, name, q)

        def run(*args: object, **options: object) -> object:
            assert guarded and guarded[-1].device == q.device
            seen.add((operator, table is backends.BACKWARDS))
            return function(*args, **options)

        return run

    monkeypatch.setattr(backends, "load", watched)
    for call in calls("cpu", backend, 10 if backend == "triton" else 30).values():
        call()
    assert not guarded
    attending = ("selected_attention", "sliding_window_attention", "selected_and_window_attention",
                 "compressed_attention")  # fmt: skip
    expected = {(name, is_backward) for name in attending for is_backward in (False, True)}
    if backend == "triton":
        expected |= {("compress", True), ("branches_at_once", False), ("branches_at_once", True)}
    else:  # where a window and a selection over the same keys are two operators
        expected |= {("select_blocks", False)}
    assert expected <= seen


def test_every_custom_operator_has_the_guard(guarded: list[Tensor]) -> None:
    """The guard is entered before an operator looks at anything but its first tensor."""
    found = [x for m in (library, library_at_once, library_backward) for x in vars(m).values()
             if isinstance(x, CustomOpDef)]  # fmt: skip
    assert len({x._qualname for x in found}) >= 15
    for operator in found:
        first = torch.zeros(0)
        entered = []

        @contextmanager
        def note(x: Tensor, entered: list[Tensor] = entered) -> Iterator[None]:
            entered.append(x)
            raise InterruptedError
            yield

        devices.guard = note  # the fixture puts it back
        is_list = "Tensor[] " in str(operator._opoverload._schema).split(",")[0]
        with pytest.raises(InterruptedError):
            operator._init_fn([first] if is_list else first)
        assert entered == [first], operator


def test_a_guard_of_cpu_tensors_does_nothing() -> None:
    with devices.guard(torch.zeros(1)):
        assert devices.kind_of(torch.device("cpu")) == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run here")
def test_what_needs_a_gpu_is_left_out_and_not_skipped(request: pytest.FixtureRequest) -> None:
    """This file has some of it."""
    assert not [item.name for item in request.session.items if "gpu" in item.keywords]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_the_current_stream(backend: str) -> None:
    """What a stream has queued before a call is done before the call reads it."""
    expected = {name: call() for name, call in calls("cuda", backend).items()}
    late = torch.cuda.Stream()
    for name, call in calls("cuda", backend).items():
        with torch.cuda.stream(late):
            torch.cuda._sleep(20_000_000)  # some ten milliseconds: what another stream does is done
            found = call()
        late.synchronize()
        torch.testing.assert_close(found, expected[name])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_another_device_than_the_current_one(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    expected = {name: call() for name, call in calls("cuda:0", backend).items()}
    for name, call in calls("cuda:1", backend).items():
        found = call()
        assert torch.cuda.current_device() == 0
        torch.testing.assert_close(found.to("cuda:0"), expected[name])


def in_threads(*works: Callable[[], Tensor]) -> list[Tensor]:
    """What each of `works` returns, all of them at once."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


@pytest.mark.parametrize(
    "backend", ["triton", pytest.param("tilelang", marks=pytest.mark.exhaustive)]
)
def test_threads_on_a_cpu(backend: str) -> None:
    """Triton's interpreter keeps its program in global variables: two at once gave 1e35."""
    skip_unless_runs(backend, "cpu")
    call, *_ = calls("cpu", backend, 10).values()
    expected = calls("cpu", "reference", 10)["selected"]()
    for found in in_threads(call, call):
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_threads_on_their_own_devices(backend: str) -> None:
    """Two devices where there are two, else one: the operators at once, compiled meanwhile."""
    places = ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"]

    def work(place: str) -> dict[str, Tensor]:
        torch.cuda.set_device(0)  # not always the tensors' own
        for _ in range(3):
            found = {name: call() for name, call in calls(place, backend, D=32).items()}
        return {name: x.cpu() for name, x in found.items()}

    for found in in_threads(*(functools.partial(work, place) for place in places)):
        expected = {name: call().cpu() for name, call in calls("cuda:0", backend, D=32).items()}
        torch.testing.assert_close(found, expected)
