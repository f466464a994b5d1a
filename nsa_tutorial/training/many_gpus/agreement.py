"""What ranks have to agree on before anything travels.

Ranks that ask for different things would wait for each other without end, or add up what does not
belong together. So each call of an operator begins by comparing what its ranks want, and a wrong
argument on one of them is an error on all. Whatever else keeps a rank away ends in an error after
the timeout of the process group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nsa_tutorial.runtime import checks
from nsa_tutorial.training.many_gpus import collectives
from nsa_tutorial.training.many_gpus.cuts import Cut
from nsa_tutorial.training.many_gpus.meshes import Context, Mesh, context_of

_AGREED: set[tuple[str, str]] = set()  # groups without a CPU backend: their settings so far


class RanksDisagree(ValueError):
    """Ranks of one context were called with different arguments, or one of them with a wrong
    one."""


def begin(
    name: str, mesh: Mesh, cut: Cut, options: Mapping[str, object], check: Callable[[], None],
    tensors: Mapping[str, Tensor | None],
) -> Context:  # fmt: skip
    """Find this rank, check its tensors, and compare everything with the other ranks."""
    context, problem = context_of(mesh), None
    try:
        _check_cut(cut, context)
        for key, x in tensors.items():
            _check_share(key, x, cut, context)
        with torch.no_grad():
            check()
    except Exception as error:  # the other ranks are told, and it is raised then
        problem = error
    settings: dict[str, object] = {"operator": name, "cut": cut, **options}
    settings["gradients"] = torch.is_grad_enabled()
    for key, x in tensors.items():
        if isinstance(x, Tensor):  # all but the tokens
            shape = [x.shape[0], *x.shape[2:]] if x.ndim > 1 else []
            settings[key] = (shape, str(x.dtype), x.device.type, x.requires_grad)
        else:
            settings.setdefault(key, None)
    places = [x.device for x in tensors.values() if isinstance(x, Tensor)]
    device = places[0] if places else torch.device("cpu")
    agree(context, settings, device, problem)
    return context


def _check_cut(cut: object, context: Context) -> None:
    if not isinstance(cut, Cut):
        raise TypeError(f"cut: got {checks.describe(cut)}, expected a Cut")
    if cut.ranks != context.ranks:
        raise ValueError(
            f"cut: got one for {cut.ranks} ranks, expected {context.ranks}, as many as the mesh has"
        )


def _check_share(name: str, x: object, cut: Cut, context: Context) -> None:
    """`x [B, n, …]` has this rank's tokens."""
    if x is None:
        return
    if not isinstance(x, Tensor) or x.ndim < 3:
        raise TypeError(f"{name}: got {checks.describe(x)}, expected a tensor [B, n, heads, …]")
    if x.shape[1] != cut.length(context.rank):
        raise ValueError(
            f"{name}: got {x.shape[1]} tokens, expected {cut.length(context.rank)}, those of rank "
            f"{context.rank} of a {cut.kind} cut of {cut.tokens} tokens over {cut.ranks} ranks"
        )
    if cut.documents is not None and x.shape[0] != 1:
        raise ValueError(
            f"{name}: got a batch of {x.shape[0]}, expected 1 for packed documents: they lie "
            "behind each other in one row"
        )


def check_summaries(
    summaries: Sequence[Tensor], cut: Cut, context: Context, length: int, stride: int
) -> None:
    """Summary keys and values are those that end in this rank's pieces."""
    checks.check_positive_int("length", length)
    checks.check_positive_int("stride", stride)
    counts = cut.summaries_of_pieces(length, stride)
    expected = sum(counts[piece] for piece in cut.pieces(context.rank))
    for i, x in enumerate(summaries):
        checks.check_tensor(f"compressed[{i}]", x, "[B, m, H, D]", checks.FLOATS)
        if x.shape[1] != expected:
            raise ValueError(
                f"compressed[{i}]: got {x.shape[1]} summaries, expected {expected}: those with "
                f"length {length} and stride {stride} that end in the tokens of rank {context.rank}"
            )


def agree(
    context: Context, settings: Mapping[str, object], device: torch.device,
    problem: Exception | None = None,
) -> None:  # fmt: skip
    """Compare what the ranks want, before anything travels.

    Where the group has a backend for CPU tensors, each call compares, and no rank waits for its
    GPU. Otherwise the first call with these settings does, and waits.

    Args:
        settings: whatever has to be the same on all ranks.
        problem: what is wrong with the arguments of this rank, if anything is.

    Raises:
        RanksDisagree: naming what differs, or whose argument is wrong and how.
        RankLost: if a rank does not come.
    """
    mine = {name: repr(value) for name, value in settings.items()}
    mine["problem"] = "" if problem is None else str(problem)
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=7).hexdigest()
    on_cpu = "cpu:" in str(dist.get_backend_config(context.group))
    key = (context.group.group_name, digest)
    if not on_cpu and key in _AGREED:
        return
    place = torch.device("cpu") if on_cpu else device
    number = torch.tensor([int(digest, 16)], device=place)
    found = collectives.all_gather(number, context.group, "settings").wait().tolist()
    if len(set(found)) == 1 and problem is None:
        if not on_cpu:
            _AGREED.add(key)
        return
    everyone: list[dict[str, str]] = [{} for _ in found]
    with collectives.told("settings"):
        dist.all_gather_object(everyone, mine, group=context.group)
    if problem is not None:
        raise problem
    raise RanksDisagree(difference(everyone))


def difference(settings: list[dict[str, str]]) -> str:
    """What differs between the settings of ranks, or the problem of one of them, as a sentence."""
    for rank, of in enumerate(settings):
        if of["problem"]:
            return f"rank {rank} of this context was called with a wrong argument: {of['problem']}"
    names = dict.fromkeys(name for of in settings for name in of)
    told = []
    for name in names:
        values = [of.get(name, "nothing") for of in settings]
        if len(set(values)) > 1:
            each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            told.append(f"{name}: got {each}, expected the same on all ranks of this context")
    return "; ".join(told)
