"""An operator's first call does not import PyTorch's compiler (`test_interrupts` sees that it does
not), and a compiler that is there is kept out of the operator (`test_compile` compiles them
all)."""

from __future__ import annotations

import sys

import pytest

from nsa_tutorial.runtime.operators import _plain_without_a_compiler


def test_what_keeps_the_compiler_out_runs_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kept_out(x: int) -> str:
        return f"{x}, kept out"

    kept_out.__wrapped__ = lambda x: f"{x}, plain"
    run = _plain_without_a_compiler(kept_out)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert run(1) == "1, plain"
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys)
    assert run(2) == "2, kept out"
