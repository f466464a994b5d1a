"""What a trained model knows: by distance, by depth and length, and how often its lists hold the
answer. All on texts that no run trains on.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from nsa_tutorial.training.capstone.attention import SparseAttention
from nsa_tutorial.training.capstone.listed import ListedAttention
from nsa_tutorial.training.capstone.model import loss_of
from nsa_tutorial.training.capstone.settings import Settings
from nsa_tutorial.training.capstone.tasks import HELD_OUT, NONE, Needle, Texts
from nsa_tutorial.training.capstone.train import Run


def held_out(run: Run, batches: int) -> list[tuple[Texts, Tensor]]:
    """Texts that were held out, and what the model predicts for them."""
    texts = [run.task.texts(HELD_OUT + step) for step in range(batches)]
    return [(each, run.logits(each.tokens)) for each in texts]


def summary(run: Run, batches: int = 8) -> dict:
    """ "loss" and "accuracy" on held-out texts, and, where an answer has a distance, "by_distance":
    a list of `{"from", "to", "asked", "accuracy"}`, one for each doubling; "far" is the accuracy
    beyond the window and the two latest blocks; "hits" is how many of those questions have the
    block of their answer in a list of the last layer, and "chance" how many of the blocks that
    are not forced fit into a list."""
    s, results = run.settings, held_out(run, batches)
    target = torch.cat([texts.target for texts, _ in results])
    distance = torch.cat([texts.distance for texts, _ in results])
    logits = torch.cat([logits for _, logits in results])
    is_right, is_asked = logits.argmax(-1) == target, target != NONE
    found = {
        "loss": loss_of(logits, target).item(),
        "accuracy": is_right[is_asked].float().mean().item(),
    }
    if (distance != NONE).any():
        found["by_distance"] = []
        for power in range(1, math.ceil(math.log2(s.length)) + 1):
            lies = (distance >= 2 ** (power - 1) + (power == 1)) & (distance < 2**power)
            if count := int(lies.sum()):
                share = is_right[lies].float().mean().item()
                bounds = {"from": int(distance[lies].min()), "to": int(distance[lies].max())}
                found["by_distance"].append(bounds | {"asked": count, "accuracy": share})
        far = distance >= reach(s)
        found["far"] = is_right[far].float().mean().item() if far.any() else None
        found |= _hits(run, batches, distance, far)
    return found


def reach(settings: Settings) -> int:
    """The tokens that a query sees for certain, in all layers together: beyond them lies `far`."""
    s = settings
    return s.layers * max(s.window_size, 2 * s.block_size)


def _hits(run: Run, batches: int, distance: Tensor, far: Tensor) -> dict:
    layer, s = run.model.blocks[-1].attend, run.settings
    if not far.any():
        return {}
    if isinstance(layer, ListedAttention):
        unit, slots, forced = layer.unit, layer.slots, layer.forced
    elif isinstance(layer, SparseAttention) and layer.variant != "no-selection":
        unit, slots, forced = s.block_size, s.top_n, 3
    else:
        return {}
    place = torch.arange(s.length)
    told = (place - distance + 1) // unit  # the block of the value that was told, or its token
    is_listed = (run.lists(batches) == told[..., None, None]).flatten(2).any(-1)
    own = place // unit
    free, rest = slots - forced, (own + 1 - forced).clamp(min=1)
    chance = (free / rest).clamp(max=1).expand(far.shape)[far]
    return {"hits": is_listed[far].float().mean().item(), "chance": chance.mean().item()}


def needle_map(run: Run, lengths: list[int], depths: int = 10, batches: int = 2) -> list[list]:
    """The accuracy of the needle hidden at each depth, a row for each length, on held-out texts.
    A text may be as long as those that the model was trained with, or shorter."""
    rows = []
    for length in lengths:
        task = dataclasses.replace(run.task, length=length)
        assert isinstance(task, Needle)
        row = []
        for depth in range(depths):
            right = asked = 0
            for step in range(batches):
                texts = task.texts(HELD_OUT + step, depth / (depths - 1))
                answer = run.logits(texts.tokens)[:, -2].argmax(-1)
                right += int((answer == texts.target[:, -2]).sum())
                asked += len(answer)
            row.append(right / asked)
        rows.append(row)
    return rows
