"""Measure one sparse attention layer as Hugging Face's transformers calls it:
`python -m nsa_tutorial.bench hugging_face --pass forward both --output layer.json`.

The sizes are those of a layer of MiniMax-M3 (MSA, arXiv 2606.13392): 64 query heads over 4, 128
wide, and lists of 16 blocks of 128 tokens. From queries, keys, values and lists, in the layouts in
which the model hands them over, to the output that it takes back, three implementations:

    nsa_tutorial    ours, on Triton: no mask is made
    eager           transformers' own: a mask of all heads, queries and keys, then products and a
                    softmax in fp32
    sdpa            transformers' own: the same mask, then PyTorch's attention

and dense causal attention, which needs no mask, beside them. The mask is made in each call, as in
each layer of the model. Where a call ran out of memory, its row says so. Projections, the choice of
the lists and everything else of a layer are left out. transformers is not needed: what it computes
is written out here.

Results are judged, and rows are made, as those of the other operators.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_tutorial.bench import drawing, judging, stored
from nsa_tutorial.bench.drawing import DRIFTS
from nsa_tutorial.bench.inputs import Shape
from nsa_tutorial.bench.measuring import Row, measured, with_ratios
from nsa_tutorial.bench.options import seconds, too_large, whole, wrong_run
from nsa_tutorial.bench.problem import DTYPES, PASSES, Problem, dense_kernels
from nsa_tutorial.bench.steps import Step
from nsa_tutorial.interop import transformers
from nsa_tutorial.runtime import environment

KERNELS = ("nsa_tutorial", "eager", "sdpa")


def add_command(operators: argparse._SubParsersAction) -> None:
    """`hugging_face` and its options."""
    summary, _, rest = __doc__.partition("\n\n")
    on_gpu = environment.detect().gpu is not None
    p = operators.add_parser(
        "hugging_face", help="a sparse layer, as transformers calls it", description=summary,
        epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip

    def sizes(option: str, on: list[int], off: list[int], text: str) -> None:
        default = on if on_gpu else off
        text += f" (default: {' '.join(map(str, default))})"
        p.add_argument(option, nargs="+", type=whole(), default=default, metavar="n", help=text)

    sizes("--tokens", [2**n for n in range(13, 18)], [128], "queries, and keys")
    for option, on, off, text in (
        ("--kv-heads", 4, 2, "key/value heads"),
        ("--group", 16, 2, "query heads of a key/value head"),
        ("--width", 128, 16, "channels of queries, keys and values"),
        ("--block-size", 128, 16, "tokens of a block"),
        ("--slots", 16, 4, "blocks of a list"),
    ):
        default = on if on_gpu else off
        text += f" (default: {default})"
        p.add_argument(option, type=whole(), default=default, metavar="n", help=text)
    p.add_argument("--kernel", nargs="+", choices=KERNELS, default=[*KERNELS], help="measured")
    p.add_argument("--pass", nargs="+", choices=PASSES, default=["forward"], dest="directions")
    p.add_argument("--lists", nargs="+", choices=[*DRIFTS], default=["trained"], help="how drawn")
    p.add_argument("--no-dense", action="store_true", help="leave dense attention out")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16" if on_gpu else "float32")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    p.add_argument("--seconds", type=seconds, metavar="s", default=0.3)
    p.add_argument("--output", type=Path, metavar="file", help=".json; without it rows are printed")


def fault(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, in one sentence, or None."""
    wrong = wrong_run(options)
    if wrong is not None:
        return wrong
    if min(options.tokens) < drawing.NEIGHBOURS:
        return f"--tokens: got {min(options.tokens)}, expected at least {drawing.NEIGHBOURS}"
    return next(filter(None, (too_large(s, options.device) for s in shapes(options))), None)


def shapes(options: argparse.Namespace) -> list[Shape]:
    """One for each number of tokens."""
    return [
        Shape(
            tokens=tokens, kv_heads=options.kv_heads, group=options.group, width=options.width,
            value_width=options.width, block_size=options.block_size, slots=options.slots,
            dtype=options.dtype,
        )
        for tokens in options.tokens
    ]  # fmt: skip


# -- what is measured --


def handed_over(problem: Problem) -> tuple[Problem, Tensor]:
    """The same numbers as the model lays them out: queries and keys, which it turns by their
    positions, have their heads first in memory. And the lists `[1, H, N, S]`, int64, packed to the
    left in no order of the blocks, as a choice by scores leaves them."""
    tensors = {x: problem.tensors[x].transpose(1, 2).contiguous() for x in ("q", "k")}
    tensors = {x: y.transpose(1, 2) for x, y in tensors.items()}
    generator = torch.Generator(problem.device).manual_seed(3)
    ids = problem.block_indices.transpose(1, 2)
    place = torch.rand(ids.shape, generator=generator, device=ids.device)
    order = place.masked_fill_(ids < 0, 2).argsort(-1)
    return problem.with_tensors(**tensors), ids.gather(-1, order).long()


def ours(query: Tensor, key: Tensor, value: Tensor, lists: Tensor, block_size: int) -> Tensor:
    """The attention function that `transformers.register()` registers."""
    layer = types.SimpleNamespace(indexer=types.SimpleNamespace(block_size=block_size))
    return transformers.attention(layer, query, key, value, None, block_indices=lists)[0]


def block_mask(query: Tensor, lists: Tensor, block_size: int, causal: Tensor | None) -> Tensor:
    """The mask `[1, HQ, N, N]` that `MiniMaxM3VLIndexer.build_block_mask` of transformers 5.24
    makes of lists `[1, H, N, S]`: 0 where a query sees a key, the least number elsewhere. `causal`
    is the mask of a dense layer, which only the eager path has."""
    _, HQ, N, _ = query.shape
    H, blocks = lists.shape[1], -(-N // block_size)
    bias = query.new_full((1, H, N, blocks + 1), -torch.inf)
    bias = bias.scatter_(-1, lists.masked_fill(lists < 0, blocks), 0.0)[..., :blocks]
    keep = (bias == 0).repeat_interleave(block_size, dim=-1)[..., :N]
    keep = keep.repeat_interleave(HQ // H, dim=1)
    if causal is not None:
        keep = keep & (causal == 0)
    else:
        t = torch.arange(N, device=query.device)
        keep = keep & ~(t[None, None, None] > t[None, None, :, None])
    least = torch.finfo(query.dtype).min
    return torch.zeros(keep.shape, dtype=query.dtype, device=query.device).masked_fill(~keep, least)


def eager(
    query: Tensor, key: Tensor, value: Tensor, lists: Tensor, block_size: int, causal: Tensor
) -> Tensor:
    """`eager_attention_forward` of transformers 5.24, with the mask of the lists."""
    mask = block_mask(query, lists, block_size, causal)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    weights = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    weights = (weights + mask).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def sdpa(query: Tensor, key: Tensor, value: Tensor, lists: Tensor, block_size: int) -> Tensor:
    """`sdpa_attention_forward` of transformers 5.24, with the mask of the lists: with a mask, it
    repeats keys and values."""
    mask = block_mask(query, lists, block_size, None)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    o = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return o.transpose(1, 2).contiguous()


def prepared(problem: Problem, lists: Tensor, kernel: str, direction: str) -> Callable:
    """A pass over one implementation. The causal mask of the eager path is made once for all
    layers, and so is not timed."""
    function = {"nsa_tutorial": ours, "eager": eager, "sdpa": sdpa}[kernel]
    options = {"lists": lists, "block_size": problem.shape.block_size}
    if kernel == "eager":
        N, least = problem.shape.tokens, torch.finfo(problem.q.dtype).min
        causal = torch.full((N, N), least, dtype=problem.q.dtype, device=problem.device)
        options["causal"] = causal.triu_(1)[None, None]

    def run(p: Problem) -> tuple[Tensor]:
        return (function(*(x.transpose(1, 2) for x in (p.q, p.k, p.v)), **options),)

    return problem.prepare(direction, run)


# -- rows --


def rows_of(shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    """Every kind of lists, pass and implementation of one shape, then dense attention."""
    for kind in options.lists:
        problem = Problem.make("selected", shape, options.device, kind)
        truth = judging.truth(problem, gradients=set(options.directions) != {"forward"})
        known = {"lists": kind, "overlap": drawing.overlap(problem.block_indices)}
        problem, lists = handed_over(problem)
        for direction in options.directions:
            for kernel in options.kernel:
                step = Step(partial(prepared, problem, lists, kernel, direction))
                yield one(shape, kernel, direction, step, truth, options, **known)
    if options.no_dense:
        return
    for direction in options.directions:
        for kernel, prepare in dense_kernels(problem).items():
            yield one(shape, kernel, direction, Step(partial(prepare, direction)), None, options)


def one(
    shape: Shape, kernel: str, direction: str, step: Step, truth: judging.Truth | None,
    options: argparse.Namespace, **known: object,
) -> Row:  # fmt: skip
    """One row, printed when it is there."""
    if options.device == "cuda":
        torch.cuda.empty_cache()  # what a larger call failed to get is not in its way
    row = Row(**asdict(shape), operator="hugging_face", kernel=kernel, change="",
              direction=direction, **known)  # fmt: skip
    row = measured(row, step, options.device, options.seconds, truth)
    if row.note.startswith(("OutOfMemoryError", "RuntimeError: [enforce fail")):
        row = replace(row, note=f"out of memory: {row.note.partition(': ')[2]}")
    told = row.note or f"{row.ms:.2f} ms, {'right' if row.is_right else 'not judged'}"
    if row.is_right is False:
        told = f"wrong: {row.error} off"
    print(f"{shape.tokens:,} tokens, {row.lists or 'all keys'}, {direction}, {kernel}: {told}",
          flush=True)  # fmt: skip
    return row


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Measure, and write or print; returns 1 where an implementation was wrong, or where ours did
    not run."""
    rows: list[Row] = []
    for shape in shapes(options):
        found = list(rows_of(shape, options))
        rows += with_ratios(found, [row for row in found if row.kernel.startswith("dense")])
        if options.output is not None:  # what is measured so far
            stored.write(stored.Run(stored.about(arguments), rows), options.output)
    judged = [row for row in rows if row.is_right is not None or row.kernel == KERNELS[0]]
    return int(not all(row.is_right for row in judged))
