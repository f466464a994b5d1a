"""What the ranks of `test_many_gpus` compute: a text on one process, and the same text cut."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.training import many_gpus
from nsa_tutorial.training.many_gpus import Cut

HQ, H, D, DV = 4, 2, 4, 3
SIZES = {"block_size": 4, "window_size": 7, "length": 6, "stride": 2, "backend": "reference"}


@cache
def mesh_of(ranks: int) -> object:
    """One mesh for all cases of a process."""
    return many_gpus.make_mesh(1, ranks, "cpu", timeout=60.0)


def text(N: int, B: int = 1, H: int = H) -> dict[str, Tensor]:
    """Queries, keys, values of two sets, gates and the gradient of the output, fp64."""
    g = torch.Generator().manual_seed(N)
    shapes = {"q": (HQ, D), "k": (H, D), "v": (H, DV), "k2": (H, D), "v2": (H, DV)}
    made = {name: torch.randn(B, N, *shape, generator=g, dtype=torch.float64)
            for name, shape in shapes.items()}  # fmt: skip
    for name in ("g_cmp", "g_slc", "g_swa"):
        made[name] = torch.rand(B, N, HQ, generator=g, dtype=torch.float64)
    made["d_o"] = torch.randn(B, N, HQ, DV, generator=g, dtype=torch.float64)
    return made


def leaves(of: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as leaves of a graph, but for the gradient of the output."""
    return {key: x.clone().requires_grad_() if key != "d_o" else x for key, x in of.items()}


def errors(cut: Cut, rank: int, found: dict[str, Tensor], whole: dict[str, Tensor]) -> dict:
    """The largest difference of each of this rank's tensors from those of one process."""
    return {key: float((x - cut.shard(whole[key], rank)).abs().max()) if x.numel() else 0.0
            for key, x in found.items()}  # fmt: skip


def branches(rank: int, cut: Cut, B: int, own_window: bool, H: int, **changes: object) -> dict:
    """The errors of the output and of each gradient of `three_branches` with means."""
    mesh, sizes = mesh_of(cut.ranks), SIZES | changes
    made = {key: sizes[key] for key in ("length", "stride", "backend")}
    whole, mine = leaves(text(cut.tokens, B, H)), None
    cu_seqlens = None if cut.documents is None else torch.tensor(cut.documents, dtype=torch.int32)

    def run(x: dict[str, Tensor], compress, attend, **more: object) -> dict[str, Tensor]:
        compressed = [compress(x[name], **made) for name in "kv"]
        window = (x["k2"], x["v2"]) if own_window else ()
        gates = (x["g_cmp"], x["g_slc"], x["g_swa"])
        o = attend(x["q"], compressed, (x["k"], x["v"]), window, gates, block_counts=3, **sizes,
                   **more)  # fmt: skip
        o.backward(x["d_o"])
        gradients = {f"d_{key}": y.grad for key, y in x.items() if y.grad is not None}
        return {"o": o.detach(), **gradients}

    def compress(x: Tensor, **options: object) -> Tensor:
        return ops.compress(x, cu_seqlens=cu_seqlens, **options)

    def attend(*args: object, **options: object) -> Tensor:
        more = {"num_keys": cut.tokens, "cu_seqlens": cu_seqlens}
        return ops.three_branches(*args, **more, **options)

    expected = run(whole, compress, attend)
    mine = leaves({key: cut.shard(x.detach(), rank) for key, x in whole.items()})

    def compress_mine(x: Tensor, **options: object) -> Tensor:
        return many_gpus.compress(x, mesh=mesh, cut=cut, **options)

    found = run(mine, compress_mine, many_gpus.three_branches, mesh=mesh, cut=cut)
    assert found.keys() == expected.keys()
    return errors(cut, rank, found, expected)


def one_by_one(rank: int, cut: Cut, B: int, backend: str = "reference") -> dict[str, float]:
    """The errors of each branch's output and log-sum-exp, of their gradients, and of the lists,
    whose error is how many ids differ."""
    from nsa_tutorial.training.many_gpus import branches as cut_branches

    mesh = mesh_of(cut.ranks)
    dtype = torch.float64 if backend == "reference" else torch.float32
    whole = {key: x.to(dtype) for key, x in text(cut.tokens, B).items()}
    # ties: keys that are the same, and numbers whose sums are exact
    whole["k"] = (whole["k"] * 0).add_(torch.arange(cut.tokens)[:, None, None] % 2)
    whole["q"] = whole["q"].round()
    offsets = cut.documents
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    made = {"length": 4, "stride": 2, "backend": backend}

    def run(x: dict[str, Tensor], of, compress, shared: dict, queries: dict) -> dict[str, Tensor]:
        x, found = leaves(x), {}
        k_cmp, v_cmp = (compress(x[name], **made, **shared) for name in "kv")
        options = shared | {"return_lse": True}
        found["o_cmp"], found["lse_cmp"] = of.compressed_attention(
            x["q"], k_cmp, v_cmp, **made, **options, **queries
        )
        found["lists"] = lists = of.select_blocks(
            x["q"], k_cmp, found["lse_cmp"], top_n=4, block_size=4, **made, **shared, **queries
        )
        found["o_slc"], found["lse_slc"] = of.selected_attention(
            x["q"], x["k"], x["v"], lists, block_size=4, backend=backend, **options
        )
        found["o_swa"], found["lse_swa"] = of.sliding_window_attention(
            x["q"], x["k"], x["v"], window_size=5, backend=backend, **options
        )
        d_o = x["d_o"]
        loss = sum((found[f"o_{name}"] * d_o).sum() for name in ("cmp", "slc", "swa"))
        for name in ("cmp", "slc", "swa"):
            lse = found[f"lse_{name}"]
            loss = loss + lse.masked_fill(lse == -torch.inf, 0).sum()
        loss.backward()
        found |= {f"d_{name}": x[name].grad for name in "qkv"}
        return {key: y.detach().nan_to_num(neginf=-1e9) for key, y in found.items()}

    queries = {"num_keys": cut.tokens}
    expected = run(whole, ops, ops.compress, {"cu_seqlens": cu_seqlens}, queries)
    mine = {key: cut.shard(x, rank) for key, x in whole.items()}
    shared = {"mesh": mesh, "cut": cut}
    found = run(mine, cut_branches, many_gpus.compress, shared, {})
    return errors(cut, rank, found, expected)


def branches_changed(rank: int, arguments: tuple, changes: dict) -> dict:
    """`branches` with other sizes."""
    return branches(rank, *arguments, **changes)


def bytes_sent(rank: int, cut: Cut, own_window: bool) -> tuple[dict, dict, dict, dict]:
    """Bytes of the forward and the backward: counted by hand, and sent."""
    from nsa_tutorial.training.many_gpus.volume import Widths, bytes_moved

    mesh, made = mesh_of(cut.ranks), {"length": 6, "stride": 2, "backend": "reference"}
    x = leaves({key: cut.shard(y, rank).float() for key, y in text(cut.tokens).items()})
    with many_gpus.counted() as forward:
        compressed = [many_gpus.compress(x[n], mesh=mesh, cut=cut, **made) for n in "kv"]
        o = many_gpus.three_branches(
            x["q"], compressed, (x["k"], x["v"]), (x["k2"], x["v2"]) if own_window else (),
            (x["g_cmp"], x["g_slc"], x["g_swa"]), mesh=mesh, cut=cut, **SIZES
        )  # fmt: skip
    with many_gpus.counted() as backward:
        o.sum().backward()
    widths = Widths(H, D, DV, itemsize=4, sets=3 if own_window else 1)
    sizes = {"length": 6, "stride": 2, "window_size": SIZES["window_size"]}
    by_hand = [bytes_moved(cut, rank, widths, **sizes, backward=back) for back in (False, True)]
    del forward["settings"]
    return by_hand[0], dict(forward), by_hand[1], dict(backward)


@cache
def grid_of(data: int, context: int) -> object:
    """One mesh for all cases of a process."""
    return many_gpus.make_mesh(data, context, "cpu", timeout=60.0)


def layer(
    rank: int, data: int, cut: Cut, compression: str, *, shards: bool, compiles: bool = False,
    learns: bool = False,
) -> dict[str, float]:  # fmt: skip
    """The errors of a layer over a mesh of (data, context): its output, and the gradient of each
    weight, averaged over all ranks."""
    from copy import deepcopy

    from torch.distributed.fsdp import fully_shard

    from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig

    mesh = grid_of(data, cut.ranks)
    torch.manual_seed(0)
    config = NativeSparseAttentionConfig(
        width=8, query_heads=4, kv_heads=2, key_width=4, value_width=4, block_size=4, top_n=3,
        window_size=5, length=4, stride=2, compression=compression, gate_width=4,
        learn_choice=learns, backend="reference",
    )  # fmt: skip
    one = NativeSparseAttention(config).double()
    mine = deepcopy(one)
    x = torch.randn(data, cut.tokens, 8, dtype=torch.float64)
    d_y = torch.randn_like(x)
    offsets = None if cut.documents is None else torch.tensor(cut.documents)

    # -- one process: the mean over all tokens of all texts --
    y = torch.cat([one(text, cu_seqlens=offsets) for text in x.split(1)])
    ((y * d_y).sum() / (data * cut.tokens)).backward()

    # -- all ranks: each its tokens' part of the mean, times the ranks of the context --
    text = slice(rank // cut.ranks, rank // cut.ranks + 1)
    own = rank % cut.ranks
    if shards:
        fully_shard(mine, mesh=mesh)  # replicated over data, sharded over context; averages
    run = torch.compile(mine, backend="aot_eager") if compiles else mine
    found = run(cut.shard(x[text], own), mesh=mesh, cut=cut)
    ((found * cut.shard(d_y[text], own)).sum() * cut.ranks / cut.tokens).backward()
    errors = {"y": float((found - cut.shard(y[text], own)).abs().max()) if found.numel() else 0.0}
    for (name, weight), (_, expected) in zip(
        mine.named_parameters(), one.named_parameters(), strict=True
    ):
        gradient = weight.grad
        if shards:
            gradient = gradient.full_tensor()
        else:
            torch.distributed.all_reduce(gradient)
            gradient /= data * cut.ranks
        errors[name] = float((gradient - expected.grad).abs().max())
    return errors


def layer_with(rank: int, arguments: tuple, options: dict) -> dict[str, float]:
    """`layer`."""
    return layer(rank, *arguments, **options)


# -- what goes wrong --


def told(rank: int, cuts: list[Cut], options: list[dict], missing: int = 0) -> tuple[str, str]:
    """The name and the text of the error that a rank gets, each rank with a cut and options of its
    own, the last one with so many tokens `missing`."""
    mesh, cut = mesh_of(len(cuts)), cuts[rank]
    x = leaves({key: cut.shard(y, rank) for key, y in text(cut.tokens).items()})
    if rank == len(cuts) - 1 and missing:
        x = {key: y[:, :-missing] for key, y in x.items()}
    try:
        many_gpus.native_sparse_attention(
            *(x[name] for name in ("q", "k", "v", "g_cmp", "g_slc", "g_swa")), mesh=mesh, cut=cut,
            **SIZES | {"block_counts": 3} | options[rank],
        )  # fmt: skip
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def told_of_a_death(rank: int, when: str, timeout: float) -> tuple[str, str, float]:
    """The error of the first rank, and after how many seconds, where the second one dies before
    the forward or before the backward, or goes on without its call."""
    import os
    import time

    mesh, cut = many_gpus.make_mesh(1, 2, "cpu", timeout=timeout), Cut(2, 45)
    x = leaves({key: cut.shard(y, rank) for key, y in text(45).items()})
    given = [x[name] for name in ("q", "k", "v", "g_cmp", "g_slc", "g_swa")]
    if rank == 1 and when == "forward":
        os._exit(1)
    if rank == 1 and when == "never":
        return "", "", 0.0
    start = time.monotonic()
    try:
        o = many_gpus.native_sparse_attention(
            *given, mesh=mesh, cut=cut, **SIZES | {"block_counts": 3}
        )
        if rank == 1:
            os._exit(1)
        o.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start
