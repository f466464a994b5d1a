"""What an operator would launch on a GPU that is not there.

Tensors have no data and say that they are on that GPU, so that operators choose as they would
there. Kernels are compiled for it, as far as it shows how much shared memory they take, and never
run. `outcomes` asks a second process, since Triton's compiler and its interpreter exclude each
other within one.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nsa_tutorial.backends import BACKENDS, BACKWARDS

GPUS = {  # compute capability, bytes of shared memory that a program may have
    "sm_80": ((8, 0), 163 * 1024), "sm_86": ((8, 6), 99 * 1024), "sm_89": ((8, 9), 99 * 1024),
    "sm_90": ((9, 0), 227 * 1024), "sm_120": ((12, 0), 99 * 1024),
}  # fmt: skip
H, N, S = 2, 2048, 16
LENGTH, STRIDE = 32, 16


class Case(NamedTuple):
    """One call: the GPU, the backend, the operator (`operators` names them), the sizes."""

    gpu: str
    backend: str
    operator: str
    G: int
    D: int
    DV: int
    BS: int
    dtype: str


class Launch(NamedTuple):
    """A kernel, the bytes of shared memory that it takes, and whether it takes descriptors."""

    kernel: str
    shared: int
    has_descriptors: bool


class Outcome(NamedTuple):
    """What a call launches, in vain too, and the sentence with which it gives up, if it does."""

    launches: list[Launch]
    refusal: str


class OnTheGPU(TorchFunctionMode):
    """Tensors without data, that say they are on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function == Tensor.device.__get__:
            return torch.device("cuda", 0)
        if function == Tensor.is_cuda.__get__:
            return True
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


@contextmanager
def pretended(gpu: str) -> Iterator[None]:
    """Inside, the one GPU is a `gpu`."""
    from nsa_tutorial.runtime.devices import capability, kind_of
    from nsa_tutorial.runtime.shared_memory import shared_memory

    version, num_bytes = GPUS[gpu]
    properties = SimpleNamespace(shared_memory_per_block_optin=num_bytes)
    told = {
        "get_device_capability": lambda *_: version,
        "get_device_name": lambda *_: gpu,
        "get_device_properties": lambda *_: properties,
    }
    for cached in (capability, kind_of, shared_memory):
        cached.cache_clear()
    with mock.patch.multiple(torch.cuda, **told), OnTheGPU():
        yield


def operators(case: Case) -> dict[str, partial]:
    """The calls that there are for the sizes of `case`, by name."""
    from nsa_tutorial.runtime.order import Order
    from nsa_tutorial.sparse.decoding import Buffers
    from nsa_tutorial.sparse.selected_attention import query_rows

    G, D, DV, BS, dtype = *case[3:7], getattr(torch, case.dtype)
    M_c, room = N // STRIDE - 1, 8192

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def loaded(name: str, backward: bool = False) -> Callable:
        module, function = (BACKWARDS if backward else BACKENDS)[name][case.backend].split(":")
        return getattr(importlib.import_module(module), function)

    q, k, v = new(1, N, H * G, D), new(1, N, H, D), new(1, N, H, DV)
    k_cmp, v_cmp = new(1, M_c, H, D), new(1, M_c, H, DV)
    o, lse = new(1, N, H * G, DV), new(1, N, H * G, dtype=torch.float32)
    rows = query_rows(1, N, N, causal=True, cu_seqlens=None, device=q.device)
    ids, factors = (new(N, H, S, dtype=kind) for kind in (torch.int32, torch.float32))
    of_outputs, lists = (o, lse), {"block_size": BS, "scale": 1.0}
    windows, pools = {"window_size": 512, "scale": 1.0}, {"length": LENGTH, "stride": STRIDE}
    given = {
        "selected_attention": ((q, k, v), (ids, rows), lists),
        "selected_attention, factors": ((q, k, v), (ids, rows), lists | {"slot_scale": factors}),
        "sliding_window_attention": ((q, k, v), (rows,), windows),
        "compressed_attention": ((q, k_cmp, v_cmp), (rows,), {"scale": 1.0}),
    }
    if case.backend == "triton":
        for order in Order:
            name = f"selected_attention, {order.name}"
            given[name] = ((q, k, v), (ids, rows), lists | {"order": order})
    calls = {}
    for name, (tensors, others, options) in given.items():
        operator = name.split(",")[0]
        calls[name] = partial(loaded(operator), *tensors, *others, **options)
        calls[f"{name}, backward"] = partial(
            loaded(operator, backward=True), *of_outputs, *tensors, *of_outputs, *others, **options
        )
    calls["select_blocks"] = partial(
        loaded("select_blocks"), q, k_cmp, lse, rows, rows, M=N, top_n=S, block_size=BS,
        num_initial=1, num_local=2, scale=1.0, **pools,
    )  # fmt: skip
    rings = (new(1, room // STRIDE, H, D), new(1, room // STRIDE, H, DV))
    rings += (new(1, room, H, D), new(1, room, H, DV), new(1, 1024, H, D), new(1, 1024, H, DV))
    calls["decode_attention"] = partial(
        loaded("decode_attention"), q[:, :1], Buffers(*rings, new(1, dtype=torch.int32), None),
        [new(1, 1, H * G)] * 3, None, top_n=S, **lists, window_size=512, **pools,
    )  # fmt: skip
    return calls


# -- Triton --


@dataclass
class Bare:
    """Of a tensor, what Triton's compiler looks at."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


_known: dict[str, Launch] = {}


def triton_launch(kernel, args: Sequence[object], options: dict[str, object], gpu: str) -> Launch:
    """What this launch of a Triton kernel takes on `gpu`."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature
    from triton.tools.tensor_descriptor import TensorDescriptor

    boxes = []

    def bare(x: object) -> object:
        if isinstance(x, TensorDescriptor):
            box = object.__new__(TensorDescriptor)
            vars(box).update(vars(x), base=Bare(x.base.dtype))
            boxes.append(box)
            return box
        return Bare(x.dtype) if isinstance(x, Tensor) else x

    target = GPUTarget("cuda", int(gpu.removeprefix("sm_")), 32)
    backend = make_backend(target)
    args = [bare(x) for x in args]
    options = {name: bare(x) for name, x in options.items()}
    options |= {"debug": False, "instrumentation_mode": ""}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, types, chosen = bind(*args, **options)
    key = f"{gpu} {kernel.module} {kernel.__name__} {types} {sorted(chosen.items())}"
    if key in _known:
        return _known[key]
    chosen, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, types, chosen
    )
    source = ASTSource(kernel, signature, constants, attributes)
    context, stages, metadata = ir.context(), {}, {"hash": "", "target": target, **vars(chosen)}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, chosen, source.language)
    functions = backend.get_codegen_implementation(chosen), backend.get_module_map()
    module = source.make_ir(target, chosen, *functions, context)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    name = f"{kernel.module.removeprefix('nsa_tutorial.kernels.triton.')}.{kernel.__name__}"
    _known[key] = Launch(name, shared_bytes(module, target.arch, chosen), bool(boxes))
    return _known[key]


def shared_bytes(module, arch: int, options) -> int:
    """The shared memory of a kernel that is in Triton's last form of its own: the first passes of
    its way to LLVM give each tile its place, and the others take ten times as long."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    steps = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(steps)
    passes.ttgpuir.add_allocate_warp_groups(steps)
    passes.convert.add_scf_to_cf(steps)
    passes.gluon.add_inliner(steps)
    version = get_ptx_version_from_options(options, arch)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(steps, arch, version)
    steps.run(module, "shared_bytes")
    return module.get_int_attr("ttg.shared")


@contextmanager
def recorded_triton(gpu: str, found: list[Launch], only: Sequence[str]) -> Iterator[None]:
    """Launches of Triton kernels go to `found`, and fail where they would fail."""
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    def run(kernel, *args: object, grid: object, warmup: bool, **options: object) -> None:
        if not only or kernel.__name__ in only:
            found.append(triton_launch(kernel, args, options, gpu))
            if found[-1].shared > GPUS[gpu][1]:
                raise OutOfResources(found[-1].shared, GPUS[gpu][1], "shared memory")

    with mock.patch.object(JITFunction, "run", run):
        yield


# -- TileLang --


@contextmanager
def recorded_tilelang(gpu: str, found: list[Launch], only: Sequence[str]) -> Iterator[None]:
    """TileLang kernels that would be compiled go to `found`, and fail where they would fail."""
    import tilelang
    import tvm

    from nsa_tutorial.kernels.tilelang.compiling import compiled

    def lower(kernel, target: str, pass_configs: dict[object, object]) -> Callable:
        name = str(kernel.attrs["global_symbol"])
        if only and name not in only:
            return lambda *_: None
        gpu_target = tvm.target.Target({"kind": target, "arch": gpu})
        with tvm.transform.PassContext(config=pass_configs), gpu_target:
            module = tilelang.lower(kernel, target=gpu_target).device_mod
        functions = [f.attrs for f in module.functions.values()]
        shared = max(int(attrs.get("dyn_shared_memory_buf", 0)) for attrs in functions)
        found.append(Launch(name, shared, False))

        def launch(*_: object) -> None:
            if shared > GPUS[gpu][1]:
                words = f"Failed to set the allowed dynamic shared memory size to {shared}"
                raise RuntimeError(words)

        return launch

    compiled.cache_clear()
    with mock.patch.object(tilelang, "compile", lower):
        yield
    compiled.cache_clear()


RECORDED = {"triton": recorded_triton, "tilelang": recorded_tilelang}


def outcome(case: Case, *only: str) -> Outcome:
    """What `case` launches, or what of it has these names, in a process with
    `TRITON_INTERPRET=0`."""
    from nsa_tutorial.runtime.environment import BackendUnavailable
    from nsa_tutorial.runtime.shared_memory import withhold
    from nsa_tutorial.runtime.smaller_tiles import with_smaller_tiles

    found: list[Launch] = []
    with pretended(case.gpu), RECORDED[case.backend](case.gpu, found, only):
        call = operators(case)[case.operator]
        try:
            with_smaller_tiles(call.func)(*call.args, **call.keywords)
        except BackendUnavailable as error:
            return Outcome(found, str(error))
        finally:
            withhold(call.args[0].device, 0)
    return Outcome(found, "")


def outcomes(cases: Sequence[Case], *only: str) -> list[Outcome]:
    """`outcome` of each case."""
    finished = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps([cases, only]), capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(finished.stdout)
    return [Outcome([Launch(*x) for x in launches], refusal) for launches, refusal in found]


if __name__ == "__main__":
    asked, names = json.load(sys.stdin)
    output, sys.stdout = sys.stdout, sys.stderr  # compilers speak, too
    json.dump([outcome(Case(*case), *names) for case in asked], output)
