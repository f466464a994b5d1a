"""Chapter 15: what the two kernels of `attend` do with a tile of keys, in TileLang, with the names
of `triton.decoding.attend`.

Symbols: those of `attend`.
"""

from tilelang import language as T

from nsa_tutorial.kernels.tilelang.products import multiply

accum_dtype = "float32"


def alloc_weights_of(dtype: str, GT: int, threads: int):
    """Where the weights lie: in registers from one product to the next where each warp has 16 rows,
    as in `selected.forward`; otherwise in shared memory."""
    in_registers = dtype != "float32" and threads <= 2 * GT
    return T.alloc_fragment if in_registers else T.alloc_shared


@T.macro
def page_row(Table, page, place, batch, first, num_keys, pages, of_page, is_paged, BT):
    """Where the keys from `first` on lie, `page` and `place [BT]`; past `num_keys` no page."""
    for i in T.Parallel(BT):
        is_key = i < num_keys
        key = T.if_then_else(is_key, first + i, 0)
        if is_paged:
            page[i] = T.if_then_else(is_key, Table[batch, key // of_page], pages)
            place[i] = key % of_page
        else:
            page[i] = T.if_then_else(is_key, batch, pages)
            place[i] = key


@T.macro
def load_tiles(K, V, page, place, k_tile, v_tile, head, BT, DT, DVT):
    """The keys and the values at `page` and `place [BT]`: zeros where there is none."""
    for i, j in T.Parallel(BT, DT):
        k_tile[i, j] = K[page[i], place[i], head, j]
    for i, j in T.Parallel(BT, DVT):
        v_tile[i, j] = V[page[i], place[i], head, j]


@T.macro
def scores_of(q_tile, k_tile, acc_s, num_keys, GT, BT, DT):
    """Scores `[GT, BT]`, unscaled, `-inf` past `num_keys`."""
    T.clear(acc_s)
    multiply(q_tile, k_tile, acc_s, GT, BT, DT, True)
    for i, j in T.Parallel(GT, BT):
        acc_s[i, j] = T.if_then_else(j < num_keys, acc_s[i, j], -T.infinity(accum_dtype))


@T.macro
def accumulate(
    acc_s, p, v_tile, acc_o, scores_max, scores_max_prev, scores_scale, scores_sum, running_sum,
    scale_log2, GT, BT, DVT,
):  # fmt: skip
    """The online softmax of one tile of scores, and its values."""
    T.copy(scores_max, scores_max_prev)
    T.reduce_max(acc_s, scores_max, dim=1, clear=False)
    for i in T.Parallel(GT):
        scores_scale[i] = T.exp2((scores_max_prev[i] - scores_max[i]) * scale_log2)
    for i, j in T.Parallel(GT, BT):
        acc_s[i, j] = T.exp2((acc_s[i, j] - scores_max[i]) * scale_log2)
    T.reduce_sum(acc_s, scores_sum, dim=1)
    for i in T.Parallel(GT):
        running_sum[i] = running_sum[i] * scores_scale[i] + scores_sum[i]
    for i, j in T.Parallel(GT, DVT):
        acc_o[i, j] *= scores_scale[i]
    T.copy(acc_s, p)
    multiply(p, v_tile, acc_o, GT, DVT, BT, False)


@T.macro
def initialise(acc_o, running_sum, scores_max):
    """As in `selected.forward`."""
    T.clear(acc_o)
    T.clear(running_sum)
    T.fill(scores_max, T.min_value(accum_dtype))  # not -inf: -inf - -inf would be NaN


@T.macro
def store_part(
    acc_o, running_sum, scores_max, has_keys, Partials, PartialLSE, row, head, part, scale, G, GT,
    DVT,
):  # fmt: skip
    """Normalise, and write `Partials [R, H, G, P, DV]` and `PartialLSE [R, H, G, P]`: zeros and
    `-inf` for a part without keys."""
    for i, j in T.Parallel(GT, DVT):
        acc_o[i, j] = T.if_then_else(has_keys, acc_o[i, j] / running_sum[i], 0)
    for i in T.Parallel(GT):
        log_sum = scores_max[i] * scale + T.log(running_sum[i])
        running_sum[i] = T.if_then_else(has_keys, log_sum, -T.infinity(accum_dtype))
    for i, j in T.Parallel(GT, DVT):
        if i < G:
            Partials[row, head, i, part, j] = acc_o[i, j]
    for i in T.Parallel(GT):
        if i < G:
            PartialLSE[row, head, i, part] = running_sum[i]
