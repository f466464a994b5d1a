"""Train a small byte-level transformer on the standard library, and keep the queries, keys and
values of a few of its heads.

    python -m nsa_tutorial.course.train_heads                 7 000 steps, writes assets/heads.npz
    python -m nsa_tutorial.course.train_heads --device cpu    the same, although there is a GPU
    python -m nsa_tutorial.course.train_heads --steps 100 --out heads.npz

The stored heads' 7 000 steps took 57 s on an H200 (their `info` says with what); two cores need
about 0.1 s a step.

The later chapters choose blocks of keys. Random queries and keys say nothing about that, for their
attention has no structure; trained heads look at the start, at the bytes just before, and at the
place where the same words stood a while ago. The text is what every Python brings along: the
sources of its standard library and the help topics of `pydoc`. Which files are held out depends on
a hash of their names alone, so they stay held out from one Python version to the next.

It does not teach training (chapter 17 does), has no attention of its own (PyTorch's serves), and
resumes nothing. `heads.py` loads what it writes.

Symbols: `B` batch, `N` positions, `HQ` query heads, `H` key/value heads, `G = HQ // H`, `D` head
width, `W` model width.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa_tutorial.course.heads import (
    COMMAND,
    PATH,
    attention_weights,
    copy_share,
    copy_targets,
    first_share,
    previous_share,
)
from nsa_tutorial.runtime.texts import START, documents, split

# -- the passage --


def repetitive_passage(
    texts: dict[str, bytes], length: int = 511, apart: int = 128, gram: int = 12
) -> tuple[str, int, bytes]:
    """The passage, beginning with a line, of which most repeats something that stands `apart` bytes
    or more before it.

    A byte counts as repeated if the `gram` bytes that end with it were last seen at least `apart`
    bytes earlier in the passage.

    Returns:
        The document's name, the number of the passage's first line, and the passage.
    """
    best = (-1, "", 0, b"")
    for name, text in texts.items():
        last: dict[bytes, int] = {}
        previous = np.full(len(text), -1)  # where the gram that ends here ended before, or -1
        for end in range(gram - 1, len(text)):
            piece = text[end - gram + 1 : end + 1]
            previous[end] = last.get(piece, -1)
            last[piece] = end
        far = np.arange(len(text)) - previous >= apart
        starts = [0] + [i + 1 for i, byte in enumerate(text[:-1]) if byte == ord("\n")]
        for line, start in enumerate(starts, 1):
            if start + length > len(text):
                break
            here = slice(start, start + length)
            count = int((far[here] & (previous[here] >= start + gram - 1)).sum())
            if count > best[0]:
                best = (count, name, line, text[here])
    return best[1:]


# -- the model --


@dataclass(frozen=True)
class Size:
    """How large the model is, and how it is trained."""

    layers: int = 4
    width: int = 192
    query_heads: int = 8
    kv_heads: int = 2
    head_width: int = 32
    context: int = 512
    batch: int = 2
    learning_rate: float = 2e-3
    warm_up: int = 50


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of `x` `[B, N, heads, D]`: the
    angle grows with the position."""
    N, half = x.shape[1], x.shape[3] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(N, device=x.device)[:, None, None] * frequency  # [N, 1, D/2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


class Block(nn.Module):
    """Grouped-query attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        W, D = size.width, size.head_width
        self.heads = [size.query_heads, size.kv_heads, size.kv_heads]
        self.attention_norm, self.mlp_norm = nn.RMSNorm(W), nn.RMSNorm(W)
        self.qkv = nn.Linear(W, sum(self.heads) * D, bias=False)
        self.out = nn.Linear(size.query_heads * D, W, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(W, 4 * W, bias=False), nn.GELU(), nn.Linear(4 * W, W, bias=False)
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What attention sees of `x` `[B, N, W]`: `q` `[B, N, HQ, D]` and `k` `[B, N, H, D]`, both
        rotated, and `v` as `k`."""
        # [B, N, HQ + H + H, D]
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (sum(self.heads), -1))
        q, k, v = qkv.split(self.heads, dim=2)
        return rotate(q), rotate(k), v

    def forward(self, x: Tensor) -> Tensor:
        """One layer: `[B, N, W]` to `[B, N, W]`."""
        q, k, v = (t.transpose(1, 2) for t in self.project(x))  # [B, heads, N, D]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Bytes in, the logits of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.head = nn.Sequential(nn.RMSNorm(size.width), nn.Linear(size.width, 256, bias=False))
        nn.init.normal_(self.embed.weight, std=0.5)
        for name, module in self.named_modules():
            if name.endswith(("out", "mlp.2")):
                # the last of a branch: at first, every layer passes on what it gets
                nn.init.zeros_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.7 * module.in_features**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, N, 256]` of the byte after each of `tokens` `[B, N]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def queries_keys_values(self, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """`q`, `k`, `v` of every layer, as attention sees them."""
        x, seen = self.embed(tokens), []
        for block in self.blocks:
            seen.append(block.project(x))
            x = block(x)
        return seen


# -- training --


def windows(data: Tensor, starts: Tensor, context: int) -> Tensor:
    """Sequences `[len(starts), context + 1]`, int64: the start byte, then `context` bytes of
    `data`."""
    tokens = data[starts[:, None] + torch.arange(context)].long()
    return F.pad(tokens, (1, 0), value=START)


def loss_of(model: Transformer, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each byte given those before it, in nats: a scalar."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(
    data: Tensor, size: Size, *, steps: int, seed: int = 0, device: str = "cpu"
) -> tuple[Transformer, list[float]]:
    """Train a model on `data`, uint8, and print a line now and then; returns the model and the loss
    of every step."""
    torch.manual_seed(seed)
    sample = torch.Generator().manual_seed(seed)
    model = Transformer(size).to(device)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    warm_up = torch.optim.lr_scheduler.LinearLR(optimiser, 0.01, total_iters=size.warm_up)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimiser, max(steps - size.warm_up, 1), eta_min=size.learning_rate / 20
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(optimiser, [warm_up, cosine], [size.warm_up])
    losses, begin = [], time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - size.context, (size.batch,), generator=sample)
        loss = loss_of(model, windows(data, starts, size.context).to(device))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            recent, seconds = losses[-50:], time.perf_counter() - begin
            print(
                f"step {step:5d} of {steps}   {sum(recent) / len(recent):.3f} nats per byte   "
                f"{seconds:4.0f} s",
                flush=True,
            )
    return model, losses


@torch.no_grad()
def held_out_loss(
    model: Transformer, texts: dict[str, bytes], context: int, count: int = 64, device: str = "cpu"
) -> float:
    """Nats per byte over `count` sequences, evenly spaced over the held-out documents."""
    data = torch.from_numpy(np.frombuffer(bytes([START]).join(texts.values()), np.uint8).copy())
    starts = torch.linspace(0, len(data) - context, count).long()
    return float(
        np.mean([loss_of(model, windows(data, s[None], context).to(device)).item() for s in starts])
    )


# -- what is kept --


def choose_groups(
    weights: Tensor, text: bytes, kv_heads: int, count: int = 4
) -> list[tuple[int, int]]:
    """The groups worth keeping, `(layer, KV head)` in the order of the layers: those with the
    strongest head of each kind.

    In turn, the kinds are copying, looking at the byte before, and looking at the start, until
    `count` groups are chosen.

    Args:
        weights: `[layers, HQ, N, N]`.
        text: the `N` bytes.
        kv_heads: `H`, per layer.
        count: how many groups.
    """
    shares = torch.stack(
        [copy_share(weights, copy_targets(text)), previous_share(weights), first_share(weights)]
    )
    best = shares.unflatten(-1, (kv_heads, -1)).amax(-1)  # [kind, layer, H]
    count, chosen = min(count, best[0].numel()), []
    for kind in itertools.cycle(best):
        if len(chosen) == count:
            return sorted(chosen)
        order = [divmod(i, kv_heads) for i in kind.flatten().argsort(descending=True).tolist()]
        chosen.append(next(group for group in order if group not in chosen))


def processor() -> str:
    """The name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def store(
    model: Transformer, size: Size, held_out: dict[str, bytes], path: Path, facts: dict
) -> dict:
    """Write `q`, `k`, `v` (fp16) of the chosen groups on one held-out text, the text, and `facts`,
    completed; returns the facts."""
    name, line, passage = repetitive_passage(held_out, size.context - 1)
    text = bytes([START]) + passage
    layers = model.cpu().queries_keys_values(torch.tensor(list(text))[None])
    weights = torch.cat([attention_weights(q, k) for q, k, _ in layers])  # [layers, HQ, N, N]
    groups, G = choose_groups(weights, text, size.kv_heads), size.query_heads // size.kv_heads
    arrays = {
        # [N, groups · G, D]
        "q": torch.cat([layers[layer][0][0, :, h * G : (h + 1) * G] for layer, h in groups], dim=1),
        # [N, groups, D]
        "k": torch.stack([layers[layer][1][0, :, h] for layer, h in groups], dim=1),
        "v": torch.stack([layers[layer][2][0, :, h] for layer, h in groups], dim=1),
    }
    labels = [f"layer {layer} head {h * G + g}" for layer, h in groups for g in range(G)]
    facts = facts | {"text": f"{name}, from line {line}, held out from training", "labels": labels}
    path.parent.mkdir(parents=True, exist_ok=True)
    halves = {name: x.to(torch.float16).numpy() for name, x in arrays.items()}
    np.savez_compressed(
        path, text=np.frombuffer(text, np.uint8), info=np.array(json.dumps(facts)), **halves
    )
    return facts


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--threads", type=int, help="CPU threads; 1 is faster than 2 where other programs are busy"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=PATH, help="assets/heads.npz, if not given")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    size, (data, held_out) = Size(), split(documents())
    begin = time.perf_counter()
    model, _ = train(data, size, steps=chosen.steps, seed=chosen.seed, device=chosen.device)
    seconds = time.perf_counter() - begin
    loss = held_out_loss(model, held_out, size.context, device=chosen.device)
    on_gpu = chosen.device == "cuda"
    facts = {
        "command": f"{COMMAND} --steps {chosen.steps} --device {chosen.device} --seed {chosen.seed}"
        + (f" --threads {chosen.threads}" if chosen.threads else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": chosen.seed,
        "steps": chosen.steps,
        "size": asdict(size),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_bytes": len(data),
        "held_out_nats_per_byte": round(loss, 4),
        "seconds": round(seconds, 1),
        "machine": torch.cuda.get_device_name() if on_gpu else processor(),
        "threads": torch.get_num_threads(),
    }
    facts = store(model, size, held_out, chosen.out, facts)
    print(
        f"held out: {loss:.3f} nats per byte; {seconds:.0f} s; {chosen.out.name} holds "
        f"{', '.join(facts['labels'])}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
