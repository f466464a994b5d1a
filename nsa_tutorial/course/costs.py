"""What an implementation has to compute and to move: floating-point operations and bytes, from the
shapes alone.

Matrix products are counted, a multiply and an add as two operations, as is usual; the softmax's few
operations per score are not. Bytes are those of the named tensors, each time an implementation
reads or writes them, as if main memory served them all. A cache in between (L2) may serve repeated
reads: main memory sees this many bytes at the most, and each tensor once at the least.

Symbols: `B` batch, `N` queries, `M` keys, `HQ` query heads, `H` key/value heads, `D` key width,
`DV` value width.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Operations and traffic of one call.

    Attributes:
        flops: floating-point operations of the matrix products.
        bytes_read, bytes_written: traffic of the programs, in bytes; with main memory, if nothing
            hits the cache in between.
    """

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def bytes(self) -> int:
        """All traffic, in bytes."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Operations per byte moved; a machine's own ratio says which is the limit, arithmetic or
        (without a cache) memory."""
        return self.flops / self.bytes


def visible_pairs(N: int, M: int, causal: bool = True) -> int:
    """How many (query, key) pairs are visible to one head: the queries are the last `N` of `M`
    positions.

    >>> visible_pairs(4, 4), visible_pairs(1, 4), visible_pairs(4, 4, causal=False)
    (10, 4, 16)
    """
    return N * M - N * (N - 1) // 2 if causal else N * M


def dense_attention(
    N: int,
    M: int,
    D: int,
    DV: int | None = None,
    *,
    B: int = 1,
    HQ: int = 1,
    H: int | None = None,
    itemsize: int = 2,
) -> Cost:
    """Attention as three separate steps (scores, softmax, weighted sum), each reading and writing
    main memory.

    Every score is computed, the masked ones too, because a plain matrix product computes all of
    them.

    Args:
        N, M, D, DV, B, HQ, H: shapes; `DV` defaults to `D`, `H` to `HQ`.
        itemsize: bytes per element of every tensor, scores and weights included (2 for fp16 and
            bf16).
    """
    DV, H = DV or D, H or HQ
    pairs = B * HQ * N * M
    q, k, v, o = B * N * HQ * D, B * M * H * D, B * M * H * DV, B * N * HQ * DV
    return Cost(
        flops=2 * pairs * (D + DV),
        bytes_read=(q + k + pairs + pairs + v) * itemsize,
        bytes_written=(pairs + pairs + o) * itemsize,
    )


def tiled_attention(
    N: int, M: int, D: int, DV: int | None = None, *, tile_q: int = 64, tile_k: int = 64,
    causal: bool = True, B: int = 1,
    HQ: int = 1, H: int | None = None, itemsize: int = 2,
) -> Cost:  # fmt: skip
    """Attention tile by tile, the scores never leaving the chip: every tile of queries reads the
    keys and values that it needs.

    The `HQ // H` query heads of a group share a tile, so that it reads each of its KV head's tiles
    once. A tile of keys that holds one visible key is loaded and computed whole; without such a key
    it is skipped. Padding of ragged tiles is not counted.

    Args:
        N, M, D, DV, B, HQ, H: shapes; `DV` defaults to `D`, `H` to `HQ`.
        tile_q, tile_k: positions of queries and of keys in a tile.
        causal: the queries are the last `N` of the `M` positions and see no later key.
        itemsize: bytes per element of q, k, v and o. The log-sum-exp is written in fp32.
    """
    DV, H = DV or D, H or HQ
    pairs = keys = (
        0  # computed scores of one head; keys loaded for one KV head, each as often as it is loaded
    )
    for query_start in range(0, N, tile_q):
        query_end = min(query_start + tile_q, N)
        seen = M - N + query_end if causal else M  # by the tile's last query
        loaded = min(-(-seen // tile_k) * tile_k, M)
        keys += loaded
        pairs += (query_end - query_start) * loaded
    q, o, lse = B * N * HQ * D, B * N * HQ * DV, B * N * HQ
    return Cost(
        flops=2 * B * HQ * pairs * (D + DV),
        bytes_read=(q + B * H * keys * (D + DV)) * itemsize,
        bytes_written=o * itemsize + lse * 4,
    )


def tile_bytes_on_chip(
    tile_q: int, tile_k: int, D: int, DV: int | None = None, *, G: int = 1, itemsize: int = 2
) -> dict[str, int]:
    """What one program of tiled attention holds at a time, in bytes, by name. The sum is what has
    to fit on the chip.

    Args:
        tile_q, tile_k, D, DV: of the tiles; `DV` defaults to `D`.
        G: query heads that share the tile; it has `G * tile_q` rows.
        itemsize: bytes per element of the loaded tiles. Scores, accumulator and the two statistics
            of a row are fp32.

    >>> sum(tile_bytes_on_chip(64, 64, 128).values())
    98816
    """
    rows, DV = G * tile_q, DV or D
    return {
        "q_tile": rows * D * itemsize,
        "k_tile": tile_k * D * itemsize,
        "v_tile": tile_k * DV * itemsize,
        "acc_s": rows * tile_k * 4,
        "acc_o": rows * DV * 4,
        "statistics": rows * 2 * 4,  # scores_max and running_sum
    }


def kv_cache_bytes(
    tokens: int,
    *,
    layers: int,
    H: int,
    D: int,
    DV: int | None = None,
    B: int = 1,
    itemsize: int = 2,
) -> int:
    """Bytes that keys and values of `tokens` positions take in `layers` layers of `H` key/value
    heads, for `B` sequences.

    >>> kv_cache_bytes(1, layers=1, H=8, D=128)
    4096
    """
    return B * tokens * layers * H * (D + (DV or D)) * itemsize


def decode_attention(
    M: int, D: int, DV: int | None = None, *, B: int = 1, HQ: int, H: int, itemsize: int = 2
) -> Cost:
    """One layer's attention for one new token: a query per head against a cache of `M` positions,
    each KV head read once.

    The scores stay on the chip, so that the traffic is the queries, the cache and the output.

    Args:
        M, D, DV, B, HQ, H: shapes; `DV` defaults to `D`.
        itemsize: bytes per element of queries, cache and output.
    """
    DV = DV or D
    return Cost(
        flops=2 * B * HQ * M * (D + DV),
        bytes_read=(B * HQ * D + B * M * H * (D + DV)) * itemsize,
        bytes_written=B * HQ * DV * itemsize,
    )


# -- sparse attention, one program per (query, KV head) --
#
# A program loads the keys and values of its own query once, for all `HQ // H` query heads of the
# group, and shares nothing with the programs of other queries. The queries are the last `N` of the
# `M` positions; a query at position `t` sees keys `0 … t`. Counts are exact: what a causal mask
# hides inside a listed block is neither loaded nor computed.


def total(*parts: Cost) -> Cost:
    """The cost of several calls, one after the other."""
    return Cost(
        *(
            sum(getattr(part, name) for part in parts)
            for name in ("flops", "bytes_read", "bytes_written")
        )
    )


def one_program_per_query(
    keys: int,
    N: int,
    D: int,
    DV: int | None = None,
    *,
    B: int = 1,
    HQ: int = 1,
    H: int | None = None,
    itemsize: int = 2,
) -> Cost:
    """Attention in which every query loads its own keys and values, however they were chosen.

    Args:
        keys: keys loaded, summed over the `N` queries of one sequence and one KV head.
        N, D, DV, B, HQ, H: shapes; `DV` defaults to `D`, `H` to `HQ`.
        itemsize: bytes per element of q, k, v and o. The log-sum-exp is written in fp32.
    """
    DV, H = DV or D, H or HQ
    return Cost(
        flops=2 * B * HQ * keys * (D + DV),
        bytes_read=(B * N * HQ * D + B * H * keys * (D + DV)) * itemsize,
        bytes_written=B * N * HQ * (DV * itemsize + 4),
    )


def selected_keys(N: int, M: int, *, block_size: int = 64, top_n: int = 16) -> int:
    """Keys that the `N` queries see in blocks listed for them: `top_n` blocks, among them the
    query's own, or all there are.

    >>> selected_keys(4, 4, block_size=2, top_n=1)  # 1, 2, 1, 2
    6
    """
    full = top_n * block_size  # from this position on, some past block is left out

    def before(t: int) -> int:
        late_blocks, rest = divmod(max(t - full, 0), block_size)
        # the own block is seen up to the query
        own = late_blocks * _triangle(block_size) + _triangle(rest)
        return _triangle(min(t, full)) + own + max(t - full, 0) * (full - block_size)

    return before(M) - before(M - N)


def window_keys(N: int, M: int, *, window_size: int = 512) -> int:
    """Keys that the `N` queries see in their windows: the last `window_size`, the query's own
    included, or all there are.

    >>> window_keys(4, 4, window_size=3)  # 1, 2, 3, 3
    9
    """

    def before(t: int) -> int:
        return _triangle(min(t, window_size)) + window_size * max(t - window_size, 0)

    return before(M) - before(M - N)


def summary_keys(N: int, M: int, *, length: int = 32, stride: int = 16) -> int:
    """Summaries that the `N` queries see; summary `j` covers tokens `j·stride … j·stride+length-1`
    and is seen once it ends.

    >>> summary_keys(6, 6, length=3, stride=2)  # 0, 0, 1, 1, 2, 2
    6
    """

    def before(t: int) -> int:
        # every `stride` queries there is one more
        rounds, rest = divmod(max(t - length + 1, 0), stride)
        return stride * _triangle(rounds) + rest * (rounds + 1)

    return before(M) - before(M - N)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def selected_attention(
    N: int, M: int, D: int, DV: int | None = None, *, block_size: int = 64, top_n: int = 16,
    B: int = 1, HQ: int = 1,
    H: int | None = None, itemsize: int = 2,
) -> Cost:  # fmt: skip
    """Attention to `top_n` listed blocks of keys per query and KV head, the query's own among them;
    the list is read in int32."""
    H = H or HQ
    keys = selected_keys(N, M, block_size=block_size, top_n=top_n)
    attention = one_program_per_query(keys, N, D, DV, B=B, HQ=HQ, H=H, itemsize=itemsize)
    return total(attention, Cost(0, B * N * H * top_n * 4, 0))


def sliding_window_attention(
    N: int, M: int, D: int, DV: int | None = None, *, window_size: int = 512, B: int = 1,
    HQ: int = 1, H: int | None = None,
    itemsize: int = 2,
) -> Cost:  # fmt: skip
    """Attention to the last `window_size` keys, every query loading its own."""
    keys = window_keys(N, M, window_size=window_size)
    return one_program_per_query(keys, N, D, DV, B=B, HQ=HQ, H=H, itemsize=itemsize)


def compressed_attention(
    N: int, M: int, D: int, DV: int | None = None, *, length: int = 32, stride: int = 16,
    B: int = 1, HQ: int = 1,
    H: int | None = None, itemsize: int = 2,
) -> Cost:  # fmt: skip
    """Attention to the summaries that end by the query, every query loading its own. Making the
    summaries is not included."""
    keys = summary_keys(N, M, length=length, stride=stride)
    return one_program_per_query(keys, N, D, DV, B=B, HQ=HQ, H=H, itemsize=itemsize)


def native_sparse_attention(
    N: int, M: int, D: int, DV: int | None = None, *, block_size: int = 64, top_n: int = 16,
    window_size: int = 512,
    length: int = 32, stride: int = 16, B: int = 1, HQ: int = 1, H: int | None = None,
    itemsize: int = 2,
) -> Cost:  # fmt: skip
    """All of NSA's forward: summaries, three branches, choice of blocks, gated sum, each storing
    what the next one reads.

    The choice computes the summaries' scores a second time, normalised by the log-sum-exp of the
    compressed branch, and writes the list. Summaries are means: no matrix product. Each token is
    read once for them.
    """
    DV, H = DV or D, H or HQ
    shape = {"B": B, "HQ": HQ, "H": H, "itemsize": itemsize}
    num_summaries = max((M - length) // stride + 1, 0)
    keys = summary_keys(N, M, length=length, stride=stride)
    return total(
        Cost(0, B * M * H * (D + DV) * itemsize, B * num_summaries * H * (D + DV) * itemsize),
        compressed_attention(N, M, D, DV, length=length, stride=stride, **shape),
        Cost(  # the choice: q, the summaries' keys and the log-sum-exp in, the list out
            2 * B * HQ * keys * D,
            B * N * HQ * (D * itemsize + 4) + B * H * keys * D * itemsize,
            B * N * H * top_n * 4,
        ),
        selected_attention(N, M, D, DV, block_size=block_size, top_n=top_n, **shape),
        sliding_window_attention(N, M, D, DV, window_size=window_size, **shape),
        # three outputs and gates in, one output out
        Cost(0, 3 * B * N * HQ * (DV + 1) * itemsize, B * N * HQ * DV * itemsize),
    )


# -- the backward --
#
# What a forward keeps for it, and what it computes and moves, with the matrix of weights stored and
# with its tiles computed again from the log-sum-exp.


def kept_for_backward(
    N: int, M: int, DV: int, *, B: int = 1, HQ: int = 1, weights: bool, itemsize: int = 2
) -> int:
    """Bytes that a forward keeps beside its inputs `q`, `k` and `v`.

    With `weights` that is the whole matrix, the hidden half included, and nothing else. Without, it
    is `o` and the log-sum-exp, which is fp32.

    >>> kept_for_backward(8, 8, 4, weights=True), kept_for_backward(8, 8, 4, weights=False)
    (128, 96)
    """
    return B * HQ * N * (M * itemsize if weights else DV * itemsize + 4)


def dense_attention_backward(
    N: int, M: int, D: int, DV: int | None = None, *, B: int = 1, HQ: int = 1,
    H: int | None = None, itemsize: int = 2,
) -> Cost:  # fmt: skip
    """The backward with stored weights, in steps that each read and write main memory: `d_v`,
    `d_p`, `d_s`, `d_q`, `d_k`. The counterpart of `dense_attention`, with its arguments.

    The matrices of weights, of `d_p` and of `d_s` cross seven times: the weights are read for `d_v`
    and for `d_s`, `d_p` is written and read, `d_s` is written, and read for `d_q` and for `d_k`.
    """
    DV, H = DV or D, H or HQ
    pairs = B * HQ * N * M
    q, k, v, o = B * N * HQ * D, B * M * H * D, B * M * H * DV, B * N * HQ * DV
    return Cost(
        flops=2 * pairs * (2 * D + 2 * DV),
        # d_o for d_v; d_o and v for d_p; k for d_q; q for d_k
        bytes_read=(5 * pairs + 2 * o + v + k + q) * itemsize,
        bytes_written=(2 * pairs + q + k + v) * itemsize,
    )


def tiled_attention_backward(
    N: int, M: int, D: int, DV: int | None = None, *, tile_q: int = 64, tile_k: int = 64,
    causal: bool = True, B: int = 1, HQ: int = 1, H: int | None = None, itemsize: int = 2,
) -> Cost:  # fmt: skip
    """The backward in two walks that compute the weights again, no matrix leaving the chip.

    By tiles of queries: scores, `d_p` and `d_q`, three products, and a tile of queries loads the
    keys and values that it sees. By tiles of keys: scores, `d_p`, `d_v` and `d_k`, four products,
    and a tile of keys loads the queries that see it, with their `d_o`, `lse` and `delta` (fp32).
    Before that, `delta` is made from `d_o` and `o`. Arguments as for `tiled_attention`.
    """
    DV, H = DV or D, H or HQ
    forward = tiled_attention(
        N, M, D, DV, tile_q=tile_q, tile_k=tile_k, causal=causal, B=B, HQ=HQ, H=H, itemsize=itemsize
    )
    pairs = forward.flops // (2 * (D + DV))  # of all heads
    loaded_keys = forward.bytes_read - B * N * HQ * D * itemsize  # with their values
    queries = 0  # loaded for one head, each as often as it is loaded
    for key_start in range(0, M, tile_k):
        first = max(key_start - (M - N), 0) if causal else 0  # the first that sees the tile
        queries += N - first // tile_q * tile_q if first < N else 0
    row = (D + DV) * itemsize + 2 * 4  # q, d_o, lse and delta
    rows, keys = B * N * HQ, B * M * H * (D + DV) * itemsize
    prepared = 2 * rows * DV * itemsize  # d_o and o, for delta
    return Cost(
        flops=2 * pairs * (4 * D + 3 * DV),
        bytes_read=prepared + rows * row + loaded_keys + keys + B * HQ * queries * row,
        bytes_written=rows * 4 + rows * D * itemsize + keys,
    )
