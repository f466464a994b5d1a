"""Lists of a model that was trained with them: how much neighbours share, and what each order of
the same sums takes on them.

    python -m nsa_tutorial.bench.model_lists --output assets/model_lists_h200.json

The other lists of the benchmark are drawn. Here a small byte-level transformer, whose every layer
is `layer.NativeSparseAttention`, learns the standard library's sources in sequences of 8,192 bytes.
Then it reads held-out ones. Each layer's choice is recorded, `drawing.overlap` says for every
key/value head how much four neighbours share, and the forward and backward of selected attention
are timed on these lists, with random queries, keys and values of width 128.

It needs a GPU for its size; `--device cpu` with small sizes shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_tutorial import ops
from nsa_tutorial.bench import drawing, stored, timing
from nsa_tutorial.bench.options import whole
from nsa_tutorial.layer import NativeSparseAttention, NativeSparseAttentionConfig
from nsa_tutorial.layer_parts import rotate
from nsa_tutorial.runtime.checks import LARGEST_WIDTH
from nsa_tutorial.runtime.order import ORDERS
from nsa_tutorial.runtime.texts import documents, split

LEARNING_RATE, WARM_UP = 1e-3, 50
SIZES = (  # options, their defaults, the most that is taken, and what they are
    ("tokens", 8192, 2**20, "bytes of a sequence"),
    ("batch", 4, 2**12, "sequences of a step"),
    ("steps", 600, 10**6, "of training"),
    ("layers", 4, 128, "of the model"),
    ("model-width", 512, 2**14, "channels of the model"),
    ("kv-heads", 2, 128, "of a layer"),
    ("group", 16, 128, "query heads of a key/value head"),
    ("head-width", 64, LARGEST_WIDTH, "channels of a head"),
)
BACKENDS = ("auto", "reference", "tilelang", "triton")


class Model(nn.Module):
    """Bytes in, the logits of the next byte out: layers of sparse attention and perceptrons."""

    def __init__(self, config: NativeSparseAttentionConfig, layers: int) -> None:
        super().__init__()
        W = config.width
        self.embed, self.head = nn.Embedding(256, W), nn.Linear(W, 256, bias=False)
        self.attentions = nn.ModuleList(NativeSparseAttention(config) for _ in range(layers))
        self.perceptrons = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(W), nn.Linear(W, 4 * W), nn.GELU(), nn.Linear(4 * W, W))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(W) for _ in range(layers))
        self.last_norm = nn.RMSNorm(W)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, N, 256]` of the byte after each of `tokens [B, N]`."""
        x = self.embed(tokens)
        for norm, attention, perceptron in zip(
            self.norms, self.attentions, self.perceptrons, strict=True
        ):
            x = x + attention(norm(x))
            x = x + perceptron(x)
        return self.head(self.last_norm(x))


def train(model: Model, data: Tensor, *, tokens: int, batch: int, steps: int) -> list[float]:
    """Train on `data`, uint8, in bf16 on a GPU; returns the loss of every step, in nats a byte."""
    device = model.embed.weight.device
    sample = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min(1, (i + 1) / WARM_UP, (steps - i) / (steps / 5) + 0.02)
    )
    losses = []
    for step in range(steps):
        starts = torch.randint(len(data) - tokens - 1, (batch, 1), generator=sample)
        text = data[starts + torch.arange(tokens + 1)].long().to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rate.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step:5d} of {steps}   {losses[-1]:.3f} nats a byte", flush=True)
    return losses


@torch.no_grad()
def lists_of(model: Model, text: Tensor) -> list[Tensor]:
    """The lists `[1, N, H, top_n]` that every layer chooses for a text `[1, N]`."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        for layer in model.attentions
    ]
    model(text)
    for hook in hooks:
        hook.remove()
    return [choice(layer, x) for layer, x in zip(model.attentions, inputs, strict=True)]


def choice(layer: NativeSparseAttention, x: Tensor) -> Tensor:
    """The lists that a layer chooses for its input `[B, N, width]`."""
    c, (B, N) = layer.config, x.shape[:2]
    q = layer.q(x).view(B, N, c.query_heads, c.key_width)
    k = layer.k(x).view(B, N, -1, c.key_width)[:, :, : c.kv_heads]  # those that are summarised
    v = layer.v(x).view(B, N, -1, c.value_width)[:, :, : c.kv_heads]
    if c.rotary_base is not None:
        q, k = (rotate(t, torch.arange(N, device=x.device), c.rotary_base) for t in (q, k))
    k_cmp, v_cmp = layer.compress_k(k), layer.compress_v(v)
    windows = {"num_keys": N, "length": c.length, "stride": c.stride, "backend": c.backend}
    _, lse = ops.compressed_attention(q, k_cmp, v_cmp, return_lse=True, **windows)
    ids = ops.select_blocks(q, k_cmp, lse, top_n=c.top_n, block_size=c.block_size, **windows)
    return F.pad(ids, (0, c.top_n - ids.shape[-1]), value=-1)


def times(lists: Tensor, *, group: int, width: int, block_size: int) -> list[dict[str, object]]:
    """Median milliseconds of selected attention on `lists [1, N, H, S]`, with their 20 % and 80 %
    quantiles, for each order and direction, on a GPU."""
    N, H = lists.shape[1:3]
    draw = torch.Generator(lists.device).manual_seed(1)

    def new(heads: int) -> Tensor:
        x = torch.randn(1, N, heads, width, generator=draw, device=lists.device)
        return x.to(torch.bfloat16).requires_grad_()

    q, k, v = new(H * group), new(H), new(H)
    rows = []
    for order in ("auto", *ORDERS):
        call = {"block_size": block_size, "backend": "triton", "order": order}
        o = ops.selected_attention(q, k, v, lists, **call)
        d_o = torch.randn_like(o)

        def forward(call: dict = call) -> Tensor:
            with torch.no_grad():
                return ops.selected_attention(q, k, v, lists, **call)

        def backward(o: Tensor = o, d_o: Tensor = d_o) -> tuple[Tensor, ...]:
            return torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)

        for direction, run in (("forward", forward), ("backward", backward)):
            ms, low, high = timing.measure(run, "cuda", seconds=0.1)
            rows.append(
                {"order": order, "direction": direction, "ms": ms, "ms_low": low, "ms_high": high}
            )
    return rows


def measured(options: argparse.Namespace) -> dict[str, object]:
    """Train, choose, time; everything that is stored."""
    torch.manual_seed(0)
    config = NativeSparseAttentionConfig(
        width=options.model_width, query_heads=options.group * options.kv_heads,
        kv_heads=options.kv_heads, key_width=options.head_width, value_width=options.head_width,
        backend=options.backend,
    )  # fmt: skip
    data, held_out = split(documents())
    model = Model(config, options.layers).to(options.device)
    begin = time.perf_counter()
    losses = train(model, data, tokens=options.tokens, batch=options.batch, steps=options.steps)
    text = b"\0".join(held_out.values())[: options.tokens]
    seen = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None].to(options.device)
    lists = lists_of(model, seen)
    heads = [
        {"layer": layer, "head": head, "overlap": drawing.overlap(ids[:, :, head : head + 1])}
        for layer, ids in enumerate(lists)
        for head in range(options.kv_heads)
    ]
    found = {
        "seconds": time.perf_counter() - begin, "first_loss": losses[0],
        "last_loss": statistics.mean(losses[-20:]), "heads": heads, "rows": [],
    }  # fmt: skip
    if options.device == "cuda":
        last = torch.cat(lists, 2)[:, :, -4:].contiguous()
        found["overlap"] = drawing.overlap(last)
        found["rows"] = times(last, group=16, width=128, block_size=config.block_size)
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_tutorial.bench.model_lists",
        description="lists of a model that was trained with them",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default, most, told in SIZES:
        kind = whole(least=drawing.NEIGHBOURS if name == "tokens" else 1, most=most)
        parser.add_argument(f"--{name}", type=kind, metavar="n", default=default, help=told)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="where")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="of the model's operators"
    )
    parser.add_argument("--output", type=Path, help="JSON; without it, it is printed")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, and there is no CUDA device here")
    if options.head_width % 2:
        parser.error(f"--head-width: got {options.head_width}, expected an even number")
    facts = stored.about(sys.argv[1:] if arguments is None else arguments)
    facts["command"] = facts["command"].replace("bench ", "bench.model_lists ", 1)
    sizes = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name, *_ in SIZES}
    found = {**facts, **sizes, **measured(options)}
    told = json.dumps(found, indent=1) + "\n"
    if options.output:
        options.output.write_text(told)
    else:
        print(told, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
