"""An operator's first call does not import PyTorch's compiler (`test_interrupts` sees that it does
not), and a compiler that is there is kept out of the operator (`test_compile` compiles them all).
Gradients do not wait for the list of its arguments."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch._library import autograd, utils

from nsa_tutorial.runtime.operators import _plain_without_a_compiler, operator


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


def test_arguments_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an operator gets gradients; its arguments, also those that were left out, are as
    PyTorch's own."""
    usual, read = autograd.make_autograd_impl, []

    @operator("nsa_tutorial_test::scaled")
    def scaled(x: Tensor, y: Tensor | None, by: float = 3.0, to: int = 0) -> Tensor:
        return by * x + to

    def save(ctx, inputs: tuple, output: Tensor) -> None:
        ctx.by = inputs[2]
        read.append(inputs[1:])

    def run(ctx, d_o: Tensor) -> tuple:
        return ctx.by * d_o, None, None, None

    scaled.register_autograd(run, setup_context=save)
    fill = utils.fill_defaults

    def filled(schema, args, kwargs):
        assert schema.arguments is schema.arguments, "made anew"
        return fill(schema, args, kwargs)

    monkeypatch.setattr(utils, "fill_defaults", filled)
    x = torch.ones(2, requires_grad=True)
    for given, by in (((None,), 3.0), ((None, 2.0), 2.0), ((x.detach(), 2.0, 1), 2.0)):
        (d_x,) = torch.autograd.grad(scaled(x, *given).sum(), x)
        assert d_x.tolist() == [by, by]
    assert read[0] == (None, 3.0, 0) and read[2][1:] == (2.0, 1)
    assert autograd.make_autograd_impl is usual, "only while ours are defined"
