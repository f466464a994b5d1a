"""The training loop: AdamW, a warm-up and a cosine, clipped gradients, and a run that can be killed
and go on to the bit.

    run = Run(Settings.of("recall", attention="nsa"))
    for metrics in run.steps():
        print(metrics["step"], metrics["loss"])
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nsa_tutorial.training.capstone import checkpoints, shared_checkpoints
from nsa_tutorial.training.capstone.attention import SparseAttention, attention
from nsa_tutorial.training.capstone.listed import ListedAttention, index_loss
from nsa_tutorial.training.capstone.model import Decoder, accuracy, loss_of
from nsa_tutorial.training.capstone.settings import Settings
from nsa_tutorial.training.capstone.tasks import HELD_OUT, task_of

if TYPE_CHECKING:
    from nsa_tutorial.training.capstone.ranks import Ranks


def rate(step: int, settings: Settings) -> float:
    """The factor on the learning rate: up in a line, then down to a tenth in half a cosine."""
    s = settings
    progress = min(1.0, step / s.steps)
    return min((step + 1) / s.warmup, 0.55 + 0.45 * math.cos(math.pi * progress))


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, target: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """One step of training; the loss and the logits before it, without a gradient."""
    device = tokens.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(tokens)
    loss = loss_of(logits, target)
    optimizer.zero_grad()
    (loss + index_loss(model)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach(), logits.detach()


class Run:
    """One run of training.

    Args:
        settings: what is trained.
        out: the folder of checkpoints and metrics; None keeps nothing.
        checkpoint_every: steps between checkpoints; there is one at the end, too.
        resume: go on from the checkpoint in `out`.
        attend: makes the attention of a block, as for `Decoder`.
        ranks: the processes that share the texts, each with a run like this one; None for one
            process.

    Attributes:
        model: the `Decoder`.
        step: steps done.

    Raises:
        CheckpointError: for a folder with a run that is not to be resumed, or cannot be.
    """

    def __init__(
        self,
        settings: Settings,
        out: Path | str | None = None,
        *,
        checkpoint_every: int = 100,
        resume: bool = False,
        attend: Callable[[Settings], nn.Module] = attention,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks
        self.settings, self.every, self.step = settings, checkpoint_every, 0
        self.out = None if out is None else Path(out)
        self.task = task_of(settings)
        state, shared = None, None
        if self.out is not None:
            if resume:
                shared = shared_checkpoints.load(self.out, settings)
                state = None if shared else checkpoints.load(self.out, settings)
            elif ranks is None:
                self._begin()
            else:
                ranks.first(self._begin)
        is_cuda = settings.device.startswith("cuda")
        self._devices = [torch.device(settings.device)] if is_cuda else []
        with torch.random.fork_rng(self._devices):
            torch.manual_seed(settings.seed)
            attend = attend if ranks is None else ranks.attention
            self.model = Decoder(settings, self.task.vocabulary, attend).to(settings.device)
            self._random = self._random_states()
        if ranks is not None:
            ranks.share(self.model.to(settings.device))
        self.forward = torch.compile(self.model) if settings.compile else self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )  # fmt: skip
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: rate(step, settings)
        )
        if state is not None:
            self._restore(state)
        if shared is not None:
            self._restore_shared(shared)

    def _begin(self) -> None:
        """A folder for a new run."""
        checkpoints.check_new(self.out)
        self.out.mkdir(parents=True, exist_ok=True)

    # -- what a checkpoint holds --

    def save(self) -> None:
        """Write a checkpoint. Several ranks write one together."""
        state = {
            "settings": self.settings.as_dict(),
            "step": self.step,
            "schedule": self.schedule.state_dict(),
            "random": self._random,
        }
        if self.ranks is not None:
            shared_checkpoints.save(self.out, state, self.model, self.optimizer)
            if self._is_first:
                (self.out / checkpoints.NAME).unlink(missing_ok=True)
            return
        weights = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        checkpoints.save(self.out, state | weights)
        shared_checkpoints.remove(self.out)

    def _restore(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._go_on(state, state["random"])

    def _restore_shared(self, facts: dict) -> None:
        given = (self.model, self.optimizer, self._random)
        self._go_on(facts, shared_checkpoints.restore(self.out, facts, *given))

    def _go_on(self, state: dict, random: list[Tensor]) -> None:
        self.step, self._random = state["step"], random
        self.schedule.load_state_dict(state["schedule"])
        if self._is_first:
            checkpoints.cut_metrics(self.out, self.step)

    @property
    def _is_first(self) -> bool:
        """Whether this process writes what all share."""
        return self.ranks is None or self.ranks.is_first

    # -- random numbers: a run has its own, whatever else draws some --

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._devices)]

    @contextlib.contextmanager
    def _own_random(self, *, keep: bool = True) -> Iterator[None]:
        """Draw the run's own random numbers; `keep` goes on after them the next time."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            if keep:
                self._random = self._random_states()

    # -- training --

    def steps(self, until: int | None = None) -> Iterator[dict]:
        """Train to the end, or for `until` steps in all; after each step its metrics: "step",
        "loss", "accuracy" of the tokens asked for, and "tokens_per_second"."""
        s = self.settings
        until = s.steps if until is None else min(until, s.steps)
        with self._metrics() as file:
            while self.step < until:
                start = time.perf_counter()
                texts = self.task.texts(self.step)
                tokens, target = texts.tokens.to(s.device), texts.target.to(s.device)
                with self._own_random():
                    loss, right = self._train(tokens, target)
                self.schedule.step()
                self.step += 1
                metrics = {
                    "step": self.step,
                    "loss": loss,
                    "accuracy": right,
                    "tokens_per_second": round(tokens.numel() / (time.perf_counter() - start)),
                }
                if file is not None:
                    file.write(json.dumps(metrics) + "\n")
                    file.flush()
                is_time = self.step % self.every == 0 or self.step == s.steps
                if self.out is not None and is_time:
                    self.save()
                yield metrics

    def _train(self, tokens: Tensor, target: Tensor) -> tuple[float, float]:
        """A step; its loss and its accuracy."""
        given = (self.forward, self.optimizer, tokens, target, self.settings.clip)
        if self.ranks is not None:
            return self.ranks.training_step(*given)
        loss, logits = training_step(*given)
        return loss.item(), accuracy(logits, target)

    def _metrics(self) -> contextlib.AbstractContextManager:
        if self.out is None or not self._is_first:
            return contextlib.nullcontext()
        return (self.out / checkpoints.METRICS).open("a", encoding="utf-8")

    # -- what it has learnt --

    def alone(self) -> Run:
        """The same model for whole texts, in this process alone."""
        run = Run(self.settings)
        run.model.load_state_dict(self.model.state_dict())
        run.step = self.step
        return run

    @torch.no_grad()
    def lists(self, batches: int = 1) -> Tensor:
        """The blocks that the last layer of a sparse variant chooses for texts that were held out,
        `[batches * batch, N, H, top_n]`."""
        layer = self.model.blocks[-1].attend
        has_lists = isinstance(layer, SparseAttention) and layer.variant != "no-selection"
        if not has_lists and not isinstance(layer, ListedAttention):
            raise ValueError(f"attention: got {self.settings.attention!r}, which has no lists")
        layer.lists = []
        try:
            for step in range(batches):
                self.logits(self.task.texts(HELD_OUT + step).tokens)
            return torch.cat(layer.lists).cpu()
        finally:
            layer.lists = None

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """What the model predicts for `tokens [B, N]`; a look, which does not change the run."""
        device = torch.device(self.settings.device).type
        autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
        with autocast, self._own_random(keep=False):
            return self.model(tokens.to(self.settings.device)).float().cpu()
