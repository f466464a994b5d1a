"""Run a TileLang kernel, written for a GPU, on the CPU: its source is unchanged, and it is
rewritten just before compilation.

TileLang's C target knows neither shared memory nor fragments nor parallel loops. It takes the same
kernel once every tile lies in local memory and every parallel loop is serial, which is what
`serialise` does to the finished kernel. The CPU then runs one program after the other, one element
after the other: the results are the kernel's, races and missing barriers are not seen.

The rewrite edits the JSON form of TileLang 0.1's intermediate representation, where memory scopes
are strings and loop kinds are integers; all that depends on it is in this file.
"""

from __future__ import annotations

import contextlib
import json
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
    """Leave out those of the finished kernel. They change next to nothing by then, and take up to
    three quarters of the compilation: the solver that they ask knows nothing of the tensors' sizes
    any more."""

    def __init__(self) -> None:
        self.finished = False

    def run_after_pass(self, module: ir.IRModule, info: ir.transform.PassInfo) -> None:
        self.finished |= info.name == "tl.SplitHostDevice"

    def should_run(self, module: ir.IRModule, info: ir.transform.PassInfo) -> bool:
        return not (self.finished and info.name in ("tirx.Simplify", "tl.Simplify"))


class _Shorter(PassInstrumentationTool):
    def create_pass_instrument(self) -> object:
        return _FewerSimplifications()


def compile_for_cpu(kernel: tirx.PrimFunc) -> tilelang.JITKernel:
    """Compile a kernel to C and load it: about half a second, kept on disk by TileLang for the next
    time.

    Vectorised code is switched off because TileLang's C has no fp16 vectors; `-O2` because the
    default is unoptimised, and `-O3` takes g++ longer than it saves a small kernel.
    """
    with compile_pass_instrumentation(tools=[_Shorter()]):
        compiled = tilelang.compile(
            serialise(kernel),
            target="c",
            execution_backend="cython",
            pass_configs={"tirx.disable_vectorize": True},
            compile_flags=["-O2", *compiled_header.flags("-O2")],
        )
    _tidy_up(compiled.adapter.srcpath, compiled.adapter.libpath)
    return compiled


def _tidy_up(*paths: str | None) -> None:
    """Remove the C source and the library that TileLang leaves in the folder for temporary files:
    the library is loaded by now, and a copy of it is among TileLang's own files."""
    for path in map(Path, filter(None, paths)):
        if path.parent == Path(tempfile.gettempdir()):
            with contextlib.suppress(OSError):  # Windows keeps what is loaded
                path.unlink()
