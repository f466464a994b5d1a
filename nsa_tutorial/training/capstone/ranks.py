"""One model trained by several processes: they hold the same weights, and each a share of every
text (chapter 18).

    torchrun --nproc-per-node 2 -m nsa_tutorial.training.capstone \\
        --context-parallel 2 --out runs/two
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from nsa_tutorial.layer import NativeSparseAttention
from nsa_tutorial.training.capstone.attention import config_of
from nsa_tutorial.training.capstone.checkpoints import CheckpointError
from nsa_tutorial.training.capstone.model import Decoder, TokenShift
from nsa_tutorial.training.capstone.settings import Settings
from nsa_tutorial.training.capstone.tasks import NONE
from nsa_tutorial.training.many_gpus import Cut, context_of, make_mesh
from nsa_tutorial.training.many_gpus.calls import with_halo
from nsa_tutorial.training.many_gpus.collectives import told
from nsa_tutorial.training.many_gpus.cuts import starts_of_window

VARIANTS = ("nsa", "learned-choice")  # which draw no random numbers and attend as the layer does


class Ranks:
    """The processes that train one model, seen from one of them. Texts of a step are dealt out over
    the mesh's dimension "data", and the tokens of each over "context".

    Args:
        settings: of the run.
        context: processes that share a text.
        timeout: seconds that a process is waited for.

    Attributes:
        mesh, cut: of the processes, and of a text.
        is_first: whether this one writes what all share.

    Raises:
        ValueError: for settings that cannot be shared, or without that many processes.
        RankLost: later, if a process dies or does not come in time.
    """

    def __init__(self, settings: Settings, context: int, timeout: float = 120.0) -> None:
        s = settings
        if s.attention not in VARIANTS:
            raise ValueError(
                f"attention: got {s.attention!r}, expected one of {VARIANTS} where ranks share a "
                "text"
            )
        if s.backend == "masks":
            raise ValueError(
                "backend: got 'masks', expected an operator's ('auto') where ranks share a text"
            )
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if processes % context:
            raise ValueError(
                f"context-parallel: got {context} with {processes} process"
                f"{'' if processes == 1 else 'es'}, expected a number that divides it; begin with "
                f"torchrun --nproc-per-node {context}"
            )
        data = processes // context
        if data > s.batch:
            raise ValueError(f"batch: got {s.batch}, expected a text for each of {data} groups")
        device = torch.device(s.device).type
        self.mesh = make_mesh(data, context, device, timeout=timeout)
        self.cut = Cut(context, s.length)
        self.context = context_of(self.mesh)
        self.data = data, self.mesh.get_local_rank("data")
        self.is_first = dist.get_rank() == 0

    # -- the model --

    def attention(self, settings: Settings) -> nn.Module:
        """The attention of a block, for `Decoder`."""
        return SharedAttention(config_of(settings), self)

    def share(self, model: Decoder) -> None:
        """Replace what looks at a token's neighbour, weights and their names staying."""
        for block in model.blocks:
            shift = SharedShift(len(block.shift.own), self)
            shift.load_state_dict(block.shift.state_dict())
            block.shift = shift

    # -- a step --

    def training_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, target: Tensor,
        clip: float,
    ) -> tuple[float, float]:  # fmt: skip
        """One step on this rank's share of the texts, which all ranks pass whole; the loss and the
        accuracy of all."""
        groups, mine = self.data
        tokens, y = (self.cut.shard(x[mine::groups], self.context.rank) for x in (tokens, target))
        asked = (target != NONE).sum()
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens)
        each = logits.float().flatten(0, -2), y.flatten()
        loss = F.cross_entropy(*each, ignore_index=NONE, reduction="sum") / asked
        optimizer.zero_grad()
        loss.backward()
        self._add_up("gradients", [p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        is_right = (logits.argmax(-1) == y) & (y != NONE)
        found = [loss.detach(), is_right.sum() / asked]
        self._add_up("losses", found)
        return found[0].item(), found[1].item()

    def _add_up(self, what: str, tensors: list[Tensor]) -> None:
        """Over all ranks, in place."""
        vector = parameters_to_vector(tensors)
        with told(what):
            dist.all_reduce(vector)
        vector_to_parameters(vector, tensors)

    # -- files --

    def first(self, action: Callable[[], object]) -> None:
        """The first rank does something, and all wait for it.

        Raises:
            CheckpointError: on every rank, if it did on the first.
        """
        error = [None]
        if self.is_first:
            try:
                action()
            except CheckpointError as e:
                error = [str(e)]
        with told("files"):
            dist.broadcast_object_list(error, 0)
        if error[0] is not None:
            raise CheckpointError(error[0])


class SharedAttention(NativeSparseAttention):
    """NSA of the tokens that this rank holds, `[B, n, width]` to the same."""

    def __init__(self, config: object, ranks: Ranks) -> None:
        super().__init__(config)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """`[B, n, width]` to the same."""
        return super().forward(x, mesh=self.ranks.mesh, cut=self.ranks.cut)


class SharedShift(TokenShift):
    """`TokenShift` of the tokens that this rank holds: the one before a piece is another's."""

    def __init__(self, width: int, ranks: Ranks) -> None:
        super().__init__(width)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """`[B, n, width]` to the same."""
        context, cut = self.ranks.context, self.ranks.cut
        pieces = [cut.parts(piece) for piece in cut.pieces(context.rank)]
        starts = starts_of_window(cut, 2)  # a token, and the one before it
        shared = with_halo(context, cut, [x], starts, "halo of the token shift", pieces)
        return torch.cat(
            [super(SharedShift, self).forward(rows)[:, parts[0].start - start :]
             for parts, (rows,), start in shared], 1,
        )  # fmt: skip
