"""Chapter 15: what a decoding step writes to the cache, in TileLang, with the phases and the names
of `triton.decoding.write`: the newest tokens of each row, and the summaries that they complete.
What does not fit into a row's pages is not written.

`build_tokens` and `build_summaries` return kernels that are not yet compiled; `write_tokens` and
`write_summaries` compile and run them. Numbers of rows, tokens and pages stay open.

Symbols: those of `attend`; `NK`, `NV` numbers of a token's keys and values, of all heads.
"""

from collections.abc import Sequence

from tilelang import language as T
from torch import Tensor
from tvm import tirx

from nsa_tutorial.kernels.tilelang.compiling import compiled
from nsa_tutorial.kernels.tilelang.compressed.launch import dtype_of
from nsa_tutorial.runtime.devices import kind_of

THREADS = 128


@T.macro
def copy_token(Target, Source, page, place, batch, i, NUM):
    """Copy the `NUM` numbers of a token; none, where `page` is past the last."""
    for number in T.Parallel(NUM):
        Target[page, place, number] = Source[batch, i, number]


def build_tokens(NK: int, NV: int, dtype: str, *, is_paged: bool) -> tirx.PrimFunc:
    """The kernel that writes token `i` of `n` of each row to its page, `K [pages, PAGE, NK]`, and
    to both rings, `[B, ring, NK]` and `[B, pending, NK]`; `Lengths` does not count them yet. The
    grid is `(n, B, 3)`: pages, window, pending tokens."""
    B, n, pages, PAGE = T.dynamic("B"), T.dynamic("n"), T.dynamic("pages"), T.dynamic("PAGE")
    max_pages, ring, pending = T.dynamic("max_pages"), T.dynamic("ring"), T.dynamic("pending")

    @T.prim_func
    def tokens_kernel(
        K: T.Tensor([pages, PAGE, NK], dtype),
        V: T.Tensor([pages, PAGE, NV], dtype),
        KWindow: T.Tensor([B, ring, NK], dtype),
        VWindow: T.Tensor([B, ring, NV], dtype),
        KPending: T.Tensor([B, pending, NK], dtype),
        VPending: T.Tensor([B, pending, NV], dtype),
        NewK: T.Tensor([B, n, NK], dtype),
        NewV: T.Tensor([B, n, NV], dtype),
        NewKWindow: T.Tensor([B, n, NK], dtype),
        NewVWindow: T.Tensor([B, n, NV], dtype),
        NewKPending: T.Tensor([B, n, NK], dtype),
        NewVPending: T.Tensor([B, n, NV], dtype),
        Lengths: T.Tensor([B], "int32"),
        Table: T.Tensor([B, max_pages], "int32"),
    ):
        # -- locate the program --
        with T.Kernel(n, B, 3, threads=THREADS) as (i, batch, target):
            token = T.alloc_var("int32", init=Lengths[batch] + i)
            page = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=B)  # of a ring: past the last
            if token < max_pages * PAGE:
                row = batch

            # -- copy --
            if target == 0:
                page = pages
                if row < B:
                    page = Table[batch, token // PAGE] if is_paged else batch
                copy_token(K, NewK, page, token % PAGE, batch, i, NK)
                copy_token(V, NewV, page, token % PAGE, batch, i, NV)
            elif target == 1:
                copy_token(KWindow, NewKWindow, row, token % ring, batch, i, NK)
                copy_token(VWindow, NewVWindow, row, token % ring, batch, i, NV)
            else:
                copy_token(KPending, NewKPending, row, token % pending, batch, i, NK)
                copy_token(VPending, NewVPending, row, token % pending, batch, i, NV)

    return tokens_kernel


def build_summaries(
    NK: int, NV: int, length: int, stride: int, dtype: str, *, is_paged: bool
) -> tirx.PrimFunc:
    """The kernel that writes window `i` of `NewK [B, windows, NK]` and `NewV` to `K [pages,
    summaries of a page, NK]` and `V`, where the latest `n` tokens of a row completed its summary;
    `Lengths` counts them. The grid is `(windows, B)`."""
    B, windows, max_pages = T.dynamic("B"), T.dynamic("windows"), T.dynamic("max_pages")
    pages, of_page = T.dynamic("pages"), T.dynamic("of_page")

    @T.prim_func
    def summaries_kernel(
        K: T.Tensor([pages, of_page, NK], dtype),
        V: T.Tensor([pages, of_page, NV], dtype),
        NewK: T.Tensor([B, windows, NK], dtype),
        NewV: T.Tensor([B, windows, NV], dtype),
        Lengths: T.Tensor([B], "int32"),
        Table: T.Tensor([B, max_pages], "int32"),
        n: T.int32,
    ):
        # -- locate the program --
        with T.Kernel(windows, B, threads=THREADS) as (i, batch):
            tokens = T.alloc_var("int32", init=Lengths[batch])
            # the first that the tokens may have completed; of what is positive
            first = T.alloc_var("int32", init=T.max(tokens - n - length + stride, 0) // stride)
            summary = T.alloc_var("int32", init=first + i)
            page = T.alloc_var("int32", init=pages)
            is_complete = summary * stride + length <= tokens
            if T.And(is_complete, tokens <= max_pages * of_page * stride):
                page = Table[batch, summary // of_page] if is_paged else batch

            # -- copy --
            copy_token(K, NewK, page, summary % of_page, batch, i, NK)
            copy_token(V, NewV, page, summary % of_page, batch, i, NV)

    return summaries_kernel


def write_tokens(
    targets: Sequence[Tensor], tokens: Sequence[Tensor], lengths: Tensor,
    block_table: Tensor | None,
) -> None:  # fmt: skip
    """`sparse.decoding.write_tokens`."""
    kernel = compiled(build_tokens, *_kind(targets), is_paged=block_table is not None)
    kernel(*_flat(targets), *_flat(tokens), lengths, _table(lengths, block_table))


def write_summaries(
    targets: Sequence[Tensor], summaries: Sequence[Tensor], lengths: Tensor,
    block_table: Tensor | None, n: int, length: int, stride: int, page_size: int,
) -> None:  # fmt: skip
    """`sparse.decoding.write_summaries`."""
    device, NK, NV, dtype = _kind(targets)
    kernel = compiled(
        build_summaries, device, NK, NV, length, stride, dtype, is_paged=block_table is not None
    )
    kernel(*_flat(targets), *_flat(summaries), lengths, _table(lengths, block_table), n)


def _kind(targets: Sequence[Tensor]) -> tuple[str, int, int, str]:
    """The device, the numbers of a key and of a value, and the dtype."""
    k, v = targets[:2]
    return kind_of(k.device), k.shape[2] * k.shape[3], v.shape[2] * v.shape[3], dtype_of(k)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`[…, …, H, D]` as `[…, …, H * D]`, contiguous: a buffer of the cache is so, and is not
    copied."""
    return [x.contiguous().flatten(2) for x in tensors]


def _table(lengths: Tensor, block_table: Tensor | None) -> Tensor:
    """The table; without one, a tensor of one page a row, that is not read."""
    return lengths[:, None] if block_table is None else block_table
