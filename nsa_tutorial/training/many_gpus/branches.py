"""The branches of NSA one by one over a text that ranks share, with log-sum-exps and lists.

`operators.three_branches` computes all of them at once. These are for tests, for looking, and for
models of another make. Arguments are those of `ops`, of this rank's tokens, with `mesh=` and
`cut=`, which hold the number of keys and the documents. Errors are those of `three_branches`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.runtime import checks
from nsa_tutorial.runtime.operators import outside_graphs
from nsa_tutorial.training.many_gpus.agreement import begin, check_summaries
from nsa_tutorial.training.many_gpus.apart import apart, together
from nsa_tutorial.training.many_gpus.calls import by_head, cu_seqlens_of, with_halo
from nsa_tutorial.training.many_gpus.cuts import Cut, Part, starts_of_window
from nsa_tutorial.training.many_gpus.meshes import Context, Mesh, context_of

Attention = Tensor | tuple[Tensor, Tensor]


@outside_graphs
def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, mesh: Mesh, cut: Cut, length: int = 32,
    stride: int = 16, scale: float | None = None, return_lse: bool = False, backend: str = "auto",
) -> Attention:  # fmt: skip
    """`ops.compressed_attention`, to the summaries that `compress` made on each rank."""
    options = {"length": length, "stride": stride, "scale": scale, "backend": backend}

    def check() -> None:
        check_summaries((k_cmp, v_cmp), cut, context_of(mesh), length, stride)
        ops.compressed_attention(q[:, :0], k_cmp[:, :0], v_cmp[:, :0], num_keys=0, **options)

    context = begin("compressed_attention", mesh, cut, options, check, {"q": q})

    def run(part: Part, queries: list, keys: list, summaries: list) -> tuple[Tensor, ...]:
        return ops.compressed_attention(
            *queries, *summaries, num_keys=part.stop - part.first, return_lse=True,
            cu_seqlens=cu_seqlens_of(part, q.device), **options,
        )  # fmt: skip

    found = by_head(context, cut, (q,), (), (k_cmp, v_cmp), (length, stride), run)
    return found if return_lse else found[0]


@outside_graphs
def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None = None, *, mesh: Mesh, cut: Cut, top_n: int = 16,
    block_size: int = 64, length: int = 32, stride: int = 16, num_initial: int = 1,
    num_local: int = 2, scale: float | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """`ops.select_blocks`: the lists `[B, n, H, top_n]` of this rank's tokens. Ids count blocks of
    the whole document. There is no gradient."""
    options = {
        "top_n": top_n, "block_size": block_size, "length": length, "stride": stride,
        "num_initial": num_initial, "num_local": num_local, "scale": scale, "backend": backend,
    }  # fmt: skip

    def check() -> None:
        check_summaries((k_cmp,), cut, context_of(mesh), length, stride)
        ops.select_blocks(q[:, :0], k_cmp[:, :0], num_keys=0, **options)

    context = begin("select_blocks", mesh, cut, options, check, {"q": q, "lse": lse})

    def run(part: Part, mine: list, keys: list, summaries: list) -> tuple[Tensor]:
        q, lse = mine
        return (
            ops.select_blocks(
                q, *summaries, lse, num_keys=part.stop - part.first,
                cu_seqlens=cu_seqlens_of(part, q.device), **options,
            ),
        )  # fmt: skip

    mine = (q.detach(), None if lse is None else lse.detach())
    return by_head(context, cut, mine, (), (k_cmp.detach(),), (length, stride), run)[0]


@outside_graphs
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *, mesh: Mesh, cut: Cut,
    return_lse: bool = False, **options: object,
) -> Attention:  # fmt: skip
    """`ops.selected_attention`, with its further `options`, causal. Ids count blocks of the whole
    document."""
    if not options.setdefault("causal", True):
        raise ValueError("causal: got False, expected True: a piece sees what came before it")
    tensors = {"q": q, "k": k, "v": v, "block_indices": block_indices}
    tensors |= {name: options.pop(name, None) for name in ("slot_scale", "block_counts")}
    if not isinstance(tensors["block_counts"], Tensor):
        options["block_counts"] = tensors.pop("block_counts")

    def check() -> None:
        none = {name: None if x is None else x[:, :0] for name, x in tensors.items()}
        ops.selected_attention(**none, **options)

    context = begin("selected_attention", mesh, cut, options, check, tensors)
    names = [name for name in tensors if name not in ("k", "v")]

    def run(part: Part, mine: list, keys: list, summaries: list) -> tuple[Tensor, ...]:
        given = dict(zip(names, mine, strict=True)) | dict(zip("kv", keys, strict=True))
        offsets = cu_seqlens_of(part, q.device)
        return ops.selected_attention(**given, **options, cu_seqlens=offsets, return_lse=True)

    found = by_head(context, cut, [tensors[name] for name in names], (k, v), (), (1, 1), run)
    return found if return_lse else found[0]


@outside_graphs
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh, cut: Cut, window_size: int,
    scale: float | None = None, return_lse: bool = False, backend: str = "auto",
) -> Attention:  # fmt: skip
    """`ops.sliding_window_attention`. Only the tokens just before each piece travel."""
    options = {"window_size": window_size, "scale": scale, "backend": backend}

    def check() -> None:
        ops.sliding_window_attention(q[:, :0], k[:, :0], v[:, :0], **options)

    tensors = {"q": q, "k": k, "v": v}
    context = begin("sliding_window_attention", mesh, cut, options, check, tensors)
    found = window_of(context, cut, q, (k, v), **options)
    return found if return_lse else found[0]


def window_of(
    context: Context, cut: Cut, q: Tensor, keys_and_values: Sequence[Tensor], window_size: int,
    scale: float | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention to the window, and its log-sum-exp."""
    window_size = checks.check_window_size(window_size)
    reach, starts = window_size - 1, starts_of_window(cut, window_size)
    pieces = [cut.parts(piece) for piece in cut.pieces(context.rank)]
    sizes = [part.stop - part.start for parts in pieces for part in parts]
    (queries,) = apart(q, 1, sizes)
    found = []
    for parts, rows, start in with_halo(
        context, cut, keys_and_values, starts, "halo of the window", pieces
    ):
        for part in parts:
            keys = [x[:, part.first_key(reach) - start : part.stop - start] for x in rows]
            found.append(
                ops.sliding_window_attention(
                    queries[len(found)], *keys, window_size=window_size, scale=scale,
                    cu_seqlens=cu_seqlens_of(part, q.device), return_lse=True, backend=backend,
                )
            )  # fmt: skip
    return tuple(together([of], sizes) for of in zip(*found, strict=True))
