"""Run a TileLang kernel, written for a GPU, on the CPU: its source is unchanged, and it is
rewritten just before compilation.

TileLang's C target knows neither shared memory nor fragments nor parallel loops. It takes the same
kernel once every tile lies in local memory and every parallel loop is serial, which is what
`serialise` does to the finished kernel. `prepare` lets `@tilelang.jit` do so where there is no CUDA
device. The CPU then runs one program after the other, one element
after the other: the results are the kernel's, races and missing barriers are not seen.

The rewrite edits the JSON form of TileLang 0.1's intermediate representation, where memory scopes
are strings and loop kinds are integers; all that depends on it is in this file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import tempfile
from pathlib import Path

import tilelang
from tilelang.instrumentation import PassInstrumentationTool, compile_pass_instrumentation
from tvm import ir, tirx
from tvm.ir.instrument import pass_instrument

from nsa_tutorial.runtime import compiled_header, environment

environment.silence_tilelang()

_GPU_SCOPES = {"shared.dyn", "shared", "local.fragment"}
_SERIAL, _PARALLEL = 0, 1  # tvm::tirx::ForKind


def serialise(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel with shared memory and fragments in local memory and parallel loops in
    order."""
    graph = json.loads(ir.save_json(kernel))
    for node in graph["nodes"]:
        kind, data = node.get("type"), node.get("data")
        if kind == "tirx.For" and data["kind"] == _PARALLEL:
            data["kind"] = _SERIAL
        elif kind == "ffi.String" and data in _GPU_SCOPES:
            node["data"] = "local"
    return ir.load_json(json.dumps(graph))


@pass_instrument
class _FewerSimplifications:
    """Leave out TileLang's own, which g++ makes up for, and those of the finished kernel. Where a
    kernel chooses between many things they take nine tenths of the compilation, and of a finished
    one the solver that they ask knows nothing of the tensors' sizes any more."""

    def __init__(self) -> None:
        self.finished = False

    def run_after_pass(self, module: ir.IRModule, info: ir.transform.PassInfo) -> None:
        self.finished |= info.name == "tl.SplitHostDevice"

    def should_run(self, module: ir.IRModule, info: ir.transform.PassInfo) -> bool:
        is_late = self.finished and info.name == "tirx.Simplify"
        return not is_late and info.name != "tl.Simplify"


class _Shorter(PassInstrumentationTool):
    def create_pass_instrument(self) -> object:
        return _FewerSimplifications()


def compile_for_cpu(
    kernel: tirx.PrimFunc, out_idx: list[int] | int | None = None
) -> tilelang.JITKernel:
    """Compile a kernel to C and load it: about half a second, kept on disk by TileLang for the next
    time.

    `out_idx` says which arguments are results, which TileLang allocates, as for `tilelang.compile`.
    What was compiled keeps the kernel as `written`.
    Vectorised code is switched off because TileLang's C has no fp16 vectors; `-O2` because the
    default is unoptimised, and `-O3` takes g++ longer than it saves a small kernel.
    """
    with compile_pass_instrumentation(tools=[_Shorter()]):
        compiled = tilelang.compile(
            serialise(kernel),
            out_idx=out_idx,
            target="c",
            execution_backend="cython",
            pass_configs={"tirx.disable_vectorize": True},
            compile_flags=["-O2", *compiled_header.flags("-O2")],
        )
    _tidy_up(compiled.adapter.srcpath, compiled.adapter.libpath)
    compiled.written = kernel
    return compiled


def _tidy_up(*paths: str | None) -> None:
    """Remove the C source and the library that TileLang leaves in the folder for temporary files:
    the library is loaded by now, and a copy of it is among TileLang's own files."""
    for path in map(Path, filter(None, paths)):
        if path.parent == Path(tempfile.gettempdir()):
            with contextlib.suppress(OSError):  # Windows keeps what is loaded
                path.unlink()


def unset_is_infinite(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, with ∞ in each tile of floats until something is written there: on a GPU, a
    new tile holds anything. (NaN would lose against any number in a maximum.)"""

    def filled(block: tirx.SBlock) -> tirx.SBlock:
        fills = []
        for tile in block.alloc_buffers:
            if not tile.dtype.startswith("float"):
                continue
            places = [tirx.Var(f"i{axis}", "int32") for axis in range(len(tile.shape))]
            fill = tirx.BufferStore(tile, tirx.const(math.inf, tile.dtype), places)
            for place, side in zip(places, tile.shape, strict=True):
                fill = tirx.For(place, 0, side, tirx.ForKind.PARALLEL, fill)
            fills.append(fill)
        return tirx.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint,
            tirx.SeqStmt([*fills, block.body]) if fills else block.body,
            block.init, block.alloc_buffers, block.match_buffers, block.annotations,
        )  # fmt: skip

    body = tirx.stmt_functor.ir_transform(kernel.body, None, filled, ["tirx.SBlock"])
    return kernel.with_body(body)


@functools.cache
def prepare() -> None:
    """From now on, in this process, `@tilelang.jit` and `tilelang.compile` without a target compile
    for the CPU where there is no CUDA device. With one, TileLang decides for itself.

    A tile holds ∞ until something is written there. What was compiled keeps the kernel as it was
    written, as `written`. Options for a GPU's compiler are left out.
    """
    if environment.detect().gpu is not None:
        return
    module = importlib.import_module("tilelang.jit")
    elsewhere = module.compile

    @functools.wraps(elsewhere)
    def compile_here(
        func: tirx.PrimFunc, out_idx: list[int] | int | None = None,
        execution_backend: str | None = None, target: object = None, **options: object,
    ) -> tilelang.JITKernel:  # fmt: skip
        if target not in (None, "auto"):
            return elsewhere(func, out_idx, execution_backend, target, **options)
        compiled = compile_for_cpu(unset_is_infinite(func), out_idx)
        compiled.written = func
        return compiled

    module.compile = tilelang.compile = compile_here
