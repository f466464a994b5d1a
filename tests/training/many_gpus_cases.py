"""What the ranks of `test_many_gpus` compute: a text on one process, and the same text cut."""

from __future__ import annotations

import os
import time
from copy import deepcopy
from functools import cache, partial
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig, ops
from nsa_tutorial.training import many_gpus
from nsa_tutorial.training.many_gpus import __main__ as command_line
from nsa_tutorial.training.many_gpus import branches as one_branch
from nsa_tutorial.training.many_gpus import collectives, travel, verify
from nsa_tutorial.training.many_gpus.cuts import Cut
from nsa_tutorial.training.many_gpus.verify import Sizes
from nsa_tutorial.training.many_gpus.volume import Widths, bytes_moved

SIZES = Sizes(key_width=4, value_width=3, top_n=3)
EXACT = {"backend": "reference"}


@cache
def mesh_of(ranks: int, data: int = 1) -> object:
    """One mesh for all cases of a process."""
    return many_gpus.make_mesh(data, ranks, "cpu", timeout=60.0)


def leaves(of: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as leaves of a graph, but for the gradient of the output."""
    return {key: x.clone().requires_grad_() if key != "d_o" else x for key, x in of.items()}


def share(x: dict[str, Tensor], cut: Cut, rank: int) -> dict[str, Tensor]:
    """A rank's part of a text."""
    return {key: cut.shard(y, rank) for key, y in x.items()}


def branches(
    rank: int, cut: Cut, own_window: bool = False, changes: dict | None = None,
    backend: str = "reference",
) -> dict[str, float]:  # fmt: skip
    """The errors of the output and of each gradient of `three_branches` with means."""
    sizes = SIZES._replace(**changes or {})
    x = verify.text(cut.tokens, sizes)
    if backend != "reference":
        x = {key: y.float() for key, y in x.items()}
    options = {"own_window": own_window, "backend": backend}
    expected = verify.on_one(x, cut, sizes, **options)
    found = verify.on_ranks(x, mesh_of(cut.ranks), cut, sizes, **options)
    return verify.distances(found, expected, cut, rank)


def lists(rank: int, cut: Cut, what: str) -> dict[str, float]:
    """The errors of `three_branches` with lists, counts or gates of other kinds."""
    x = leaves(verify.text(cut.tokens, SIZES))
    B, N, H = 1, cut.tokens, SIZES.kv_heads
    g = torch.Generator().manual_seed(1)
    blocks = torch.rand(B, N, H, -(-N // SIZES.block_size), generator=g).argsort(-1)[..., :4]
    factors = 1 + torch.rand(B, N, H, 4, generator=g, dtype=torch.float64)
    counts = torch.randint(3, 6, (B, N, H), generator=g)
    gates = [x["g_cmp"], x["g_slc"], x["g_swa"]]
    options = {
        "lists": {"block_indices": blocks, "block_counts": None},
        "factors": {"block_indices": blocks, "block_counts": 2, "slot_scale": factors},
        "counts of lists": {"block_indices": blocks, "block_counts": counts},
        "counts": {"block_counts": counts},
        "learn_choice": {"block_counts": 4, "learn_choice": True},
        "no summaries": {"block_indices": blocks, "block_counts": None},
        "the window alone": {"block_counts": None},
        "summaries alone": {"block_counts": None},
    }[what]  # fmt: skip
    without = {"no summaries": (0,), "the window alone": (0, 1), "summaries alone": (1, 2)}
    gates = [None if i in without.get(what, ()) else gate for i, gate in enumerate(gates)]
    sizes = SIZES.options() | EXACT
    del sizes["block_counts"]
    made = {key: sizes[key] for key in ("length", "stride", "backend")}

    def run(x: dict, gates: list, compress, attend, options: dict) -> dict[str, Tensor]:
        compressed = [compress(x[name], **made) for name in "kv"]
        o = attend(x["q"], compressed, (x["k"], x["v"]), (), gates, **sizes, **options)
        o.backward(x["d_o"])
        return {"o": o.detach()} | {key: y.grad for key, y in x.items() if y.grad is not None}

    expected = run(x, gates, ops.compress, partial(ops.three_branches, num_keys=N), options)
    mine = leaves(share({key: y.detach() for key, y in x.items()}, cut, rank))
    names = ("g_cmp", "g_slc", "g_swa")
    gates = [gate if gate is None else mine[n] for gate, n in zip(gates, names, strict=True)]
    options = {key: cut.shard(y, rank) if isinstance(y, Tensor) else y
               for key, y in options.items()}  # fmt: skip
    shared = {"mesh": mesh_of(cut.ranks), "cut": cut}
    compress = partial(many_gpus.compress, **shared)
    attend = partial(many_gpus.three_branches, **shared)
    found = run(mine, gates, compress, attend, options)
    return verify.distances(found, expected, cut, rank)


def one_by_one(rank: int, cut: Cut, B: int, backend: str = "reference") -> dict[str, float]:
    """The errors of each branch's output and log-sum-exp, of their gradients, and of the lists,
    whose error is how many ids differ."""
    mesh = mesh_of(cut.ranks)
    dtype = torch.float64 if backend == "reference" else torch.float32
    sizes = SIZES._replace(batch=B)
    whole = {key: x.to(dtype) for key, x in verify.text(cut.tokens, sizes).items()}
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
    mine = share(whole, cut, rank)
    shared = {"mesh": mesh, "cut": cut}
    found = run(mine, one_branch, many_gpus.compress, shared, {})
    return verify.distances(found, expected, cut, rank)


def order(rank: int) -> list[str]:
    """What happens when, over two KV heads: gathers that start and are waited for, and the calls
    that compute, forward and backward."""
    log, cut = [], Cut(2, 44)
    x = leaves(share(verify.text(cut.tokens, SIZES), cut, rank))

    def logged(name: str, function):
        def run(*arguments: object, **options: object) -> object:
            if "halo" not in getattr(arguments[0], "what", ""):
                log.append(name)
            return function(*arguments, **options)

        return run

    def compute(*arguments: object, **options: object) -> Tensor:
        o = three_branches(*arguments, **options)
        if not o.requires_grad:  # of no token: arguments are checked
            return o
        log.append("compute")
        o.register_hook(lambda d_o: log.append("compute back"))
        return o

    three_branches, Gather = ops.three_branches, travel.Gather
    names = ("start", "finish", "start_back", "finish_back")
    methods = {name: logged(name, getattr(Gather, name)) for name in names}
    with mock.patch.multiple(Gather, **methods):
        given = [x[name] for name in ("q", "k", "v", "g_cmp", "g_slc", "g_swa")]
        options = SIZES.options() | EXACT | {"mesh": mesh_of(2), "cut": cut}
        ops.three_branches = compute
        try:
            many_gpus.native_sparse_attention(*given, **options).sum().backward()
        finally:
            ops.three_branches = three_branches
    return log


def round_trip(rank: int, cut: Cut) -> tuple[bool, bool]:
    """A tensor cut and put together again, in two dimensions; positions."""
    mesh = mesh_of(cut.ranks)
    whole = torch.arange(3.0 * cut.tokens).view(3, cut.tokens)
    own = many_gpus.shard(whole, mesh, cut)
    turned = many_gpus.shard(whole.T, mesh, cut, dim=0)
    is_whole = torch.equal(many_gpus.unshard(own, mesh, cut), whole)
    is_whole = is_whole and torch.equal(many_gpus.unshard(turned, mesh, cut, 0), whole.T)
    return is_whole, torch.equal(many_gpus.positions(mesh, cut).double(), own[0].double())


def bytes_sent(rank: int, cut: Cut, own_window: bool) -> tuple[dict, dict, dict, dict]:
    """Bytes of the forward and the backward: counted by hand, and sent."""
    shared = {"mesh": mesh_of(cut.ranks), "cut": cut}
    x = leaves(share(verify.text(cut.tokens, SIZES), cut, rank))
    sizes = SIZES.options() | EXACT
    made = {key: sizes[key] for key in ("length", "stride", "backend")}
    window = (x["k_swa"], x["v_swa"]) if own_window else ()
    gates = (x["g_cmp"], x["g_slc"], x["g_swa"])
    with many_gpus.counted() as forward:
        compressed = [many_gpus.compress(x[name], **made, **shared) for name in "kv"]
        keys = (x["k"], x["v"])
        o = many_gpus.three_branches(x["q"], compressed, keys, window, gates, **sizes, **shared)
    with many_gpus.counted() as backward:
        o.sum().backward()
    del forward["settings"]
    widths = Widths(SIZES.kv_heads, SIZES.key_width, SIZES.value_width, itemsize=8,
                    sets=3 if own_window else 1)  # fmt: skip
    sizes = {key: sizes[key] for key in ("length", "stride", "window_size")}
    by_hand = [bytes_moved(cut, rank, widths, **sizes, backward=back) for back in (False, True)]
    return by_hand[0], dict(forward), by_hand[1], dict(backward)


def layer(
    rank: int, data: int, cut: Cut, compression: str, *, shards: bool, compiles: bool = False,
    learns: bool = False, recomputes: bool = False,
) -> dict[str, float]:  # fmt: skip
    """The errors of a layer over a mesh of (data, context): its output, and the gradient of each
    weight, averaged over all ranks."""
    mesh = mesh_of(cut.ranks, data)
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
        from torch.distributed.fsdp import fully_shard  # a second of its own

        fully_shard(mine, mesh=mesh)  # replicated over data, sharded over context; averages
    run = torch.compile(mine, backend="aot_eager") if compiles else mine
    run = partial(checkpoint, run, use_reentrant=False) if recomputes else run
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


# -- what goes wrong --


def told(rank: int, cuts: list[Cut], options: list[dict], missing: int = 0) -> tuple[str, str]:
    """The name and the text of the error that a rank gets, each rank with a cut and options of its
    own, the last one with so many tokens `missing`."""
    mesh, cut = mesh_of(len(cuts)), cuts[rank]
    x = leaves(share(verify.text(cut.tokens, SIZES), cut, rank))
    if rank == len(cuts) - 1 and missing:
        x = {key: y[:, :-missing] for key, y in x.items()}
    try:
        many_gpus.native_sparse_attention(
            *(x[name] for name in ("q", "k", "v", "g_cmp", "g_slc", "g_swa")), mesh=mesh, cut=cut,
            **SIZES.options() | EXACT | options[rank],
        )  # fmt: skip
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def told_of_a_death(rank: int, when: str, timeout: float) -> tuple[str, str, float]:
    """The error of the first rank, and after how many seconds, where the second one dies before
    the forward or before the backward, or goes on without its call."""
    mesh, cut = many_gpus.make_mesh(1, 2, "cpu", timeout=timeout), Cut(2, 45)
    x = leaves(share(verify.text(45, SIZES), cut, rank))
    given = [x[name] for name in ("q", "k", "v", "g_cmp", "g_slc", "g_swa")]
    if rank == 1 and when == "forward":
        os._exit(1)
    if rank == 1 and when == "never":
        return "", "", 0.0
    start = time.monotonic()
    try:
        o = many_gpus.native_sparse_attention(
            *given, mesh=mesh, cut=cut, **SIZES.options(), **EXACT
        )
        if rank == 1:
            os._exit(1)
        o.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


# -- does verifying find mistakes? --

FAULTS = {
    "a halo that is one token short": (
        "cuts.Part.first_key", lambda part, reach: max(part.first, part.start - reach + 1)
    ),
    "gradients that are not added up": (
        "collectives.reduce_scatter", lambda x, group, what: collectives.Flight(
            x.chunk(group.size())[group.rank()], None, None, what)
    ),
    "gradients of a halo that stay away": (
        "travel.Halo.finish_back",
        lambda halo, flights, like: [
            (flight.wait(), total.transpose(0, 1))[1] for flight, total in flights
        ],
    ),
    "pieces in the order of ranks": (
        "travel.Gather._in_order", lambda gather, gathered: gathered[: gather.ends[-1]]
    ),
}  # fmt: skip


def verified(rank: int, ranks: int, fault: str | None = None) -> list[bool]:
    """What `verify` finds, until it finds a mistake; with a mistake of ours."""
    mesh, found = mesh_of(ranks), []
    name, wrong = FAULTS.get(fault, ("cuts.Cut.length", Cut.length))
    with mock.patch(f"nsa_tutorial.training.many_gpus.{name}", wrong):
        for comparison in verify.verify(mesh, "cpu"):
            found.append(comparison.is_right)
            if not comparison.is_right:
                break
    return found


def verified_on_gpus(rank: int) -> list[tuple]:
    """What `verify` finds over NCCL."""
    return list(verify.verify(many_gpus.make_mesh(1, 2, "cuda", timeout=60.0), "cuda"))


def command(rank: int, is_right: bool) -> int:
    """The exit status of `--verify`."""
    found = [verify.Found("a comparison", 0.0 if is_right else 1.0, 0.5)]
    with mock.patch.object(command_line, "verify", lambda mesh, device: found):
        return command_line.main(["--verify", "--device", "cpu"])
