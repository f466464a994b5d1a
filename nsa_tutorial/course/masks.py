"""What each branch of native sparse attention lets a query see: from settings to masks.

`Settings` are the sizes, brought into range. `source` gives the scores of a group of heads, made up
or of the trained heads; `importance` and `choose_blocks` turn them into block lists, `branch_masks`
into what is seen. It is computed here by means of its own, from the definitions, and the tests hold
it against the chapters' modules. It counts no cost (`mask_report`) and draws nothing
(`widgets.mask_explorer`).

Symbols: `N` positions, `G` query heads of the group, `BS` block size, `NB` blocks, `M_c` summaries.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

MAX_N = 512
SYNTHETIC, REAL = "made up", "trained heads"
POWERS = (4, 8, 16, 32, 64, 128)
# in the order of drawing: later ones cover earlier ones
BRANCHES = "compressed", "window", "selected", "own block"

Masks = Mapping[str, np.ndarray]

# -- where the scores come from --


@dataclass(frozen=True)
class Source:
    """The scores of one group of query heads, and the shapes that its costs are counted for.

    Attributes:
        logits: scaled scores `[G, N, N]` before the causal mask and the softmax, read-only.
        D, DV: widths of a key and of a value.
        text: the bytes that the positions stand for, or None.
    """

    logits: np.ndarray
    D: int
    DV: int
    text: bytes | None = None


@functools.cache
def _heads() -> object | None:
    """The stored heads, or None where there are none."""
    try:
        from nsa_tutorial.course import heads

        return heads.load()
    except (ImportError, FileNotFoundError):
        return None


def sources() -> dict[str, tuple[int, int]]:
    """The data that can be explored: by name, how many head groups and positions it has."""
    heads, found = _heads(), {SYNTHETIC: (2, MAX_N)}
    if heads is None:
        return found
    return {**found, REAL: (heads.k.shape[2], min(heads.k.shape[1], MAX_N))}


@functools.lru_cache(maxsize=2)
def synthetic_logits(group: int, G: int = 4) -> np.ndarray:
    """Made-up scores `[G, 512, 512]` of `G` heads: a sink at the start, a diagonal, and a few
    passages that copy an earlier one.

    The copies belong to the group, their strength to the head. The same group always gives the same
    numbers, read-only.
    """
    random = np.random.default_rng(group)
    t, key = np.arange(MAX_N)[:, None], np.arange(MAX_N)[None, :]
    # some keys please every query
    logits = 0.5 * random.normal(size=(G, MAX_N, MAX_N)) + random.normal(size=(1, 1, MAX_N))
    logits += 6.0 * (key < 4) + 5.0 * np.exp(-np.abs(t - key) / 8)
    starts = np.sort(random.integers(MAX_N // 10, MAX_N - 48, size=7))
    for start in starts:
        length, distance = random.integers(32, 80), random.integers(40, 350)
        copied = (t >= start) & (t < start + length) & (start >= distance)
        # a little to each side, as trained heads look
        near = np.exp(-np.abs(t - distance - key) / 6)
        logits += random.uniform(6, 10, size=(G, 1, 1)) * copied * near
    logits.setflags(write=False)
    return logits


@functools.lru_cache(maxsize=4)
def _real_logits(group: int) -> np.ndarray:
    heads, N = _heads(), sources()[REAL][1]
    mine = slice(group * heads.G, (group + 1) * heads.G)
    q, k = heads.q[0, :N, mine].double().numpy(), heads.k[0, :N, group].double().numpy()
    logits = np.einsum("igd,jd->gij", q, k, optimize=True) * k.shape[1] ** -0.5  # [G, N, N]
    logits.setflags(write=False)
    return logits


def source(data: str, N: int, group: int) -> Source:
    """The scores of head group `group` of one of `sources()`, for the first `N` positions."""
    if data == SYNTHETIC:
        return Source(synthetic_logits(group)[:, :N, :N], D=128, DV=128)
    heads = _heads()
    logits = _real_logits(group)[:, :N, :N]
    return Source(logits, heads.k.shape[3], heads.v.shape[3], heads.text[:N])


# -- settings --


@dataclass(frozen=True)
class Settings:
    """What is explored. A value out of range is moved to the nearest one allowed (see `ranges`),
    and `adjusted` says so.

    Attributes:
        N: sequence length, 16 to 512.
        block_size: keys per block, a power of two from 4 to 128.
        top_n: blocks listed per query, the forced ones among them.
        num_initial, num_local: first and last blocks of a query's past that are always listed; the
            last one is its own. Together at most `top_n`; local ones go first.
        window: keys of the sliding window, the query's own included.
        length, stride: tokens of a summary and from one summary to the next: powers of two, a
            summary no longer than the text, the stride no longer than the summary or a block.
        query: position of the query that is looked at.
        group: which group of heads of `data`.
        data: one of `sources()`.
        adjusted: what was moved, in words.
    """

    N: int = 512
    block_size: int = 16
    top_n: int = 7
    num_initial: int = 1
    num_local: int = 2
    window: int = 32
    length: int = 16
    stride: int = 8
    query: int = 410
    group: int = 0
    data: str = SYNTHETIC
    adjusted: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.type == "int"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if self.data not in sources():
            raise ValueError(f"data: expected one of {list(sources())}, got {self.data!r}")
        for name in ranges(self):
            given, allowed = getattr(self, name), ranges(self)[name]
            if given not in allowed:
                value = max((x for x in allowed if x < given), default=allowed[0])
                moved = f"{name} {given} becomes {value}"
                object.__setattr__(self, name, value)
                object.__setattr__(self, "adjusted", (*self.adjusted, moved))

    @property
    def NB(self) -> int:
        """Blocks of the text; the last one may be short."""
        return -(-self.N // self.block_size)


def ranges(settings: Settings) -> dict[str, Sequence[int]]:
    """What each number may be, given those that stand before it here."""
    s, (groups, positions) = settings, sources()[settings.data]
    return {
        "N": range(16, positions + 1),
        "block_size": POWERS,
        "top_n": range(1, MAX_N + 1),
        "num_local": range(s.top_n + 1),
        "num_initial": range(s.top_n - s.num_local + 1),
        "window": range(1, s.N + 1),
        "length": [x for x in POWERS if x <= s.N],
        "stride": [x for x in POWERS if x <= min(s.length, s.block_size)],
        "query": range(s.N),
        "group": range(groups),
    }


# -- which blocks are listed --


def summary_visible(settings: Settings) -> np.ndarray:
    """Bool `[N, M_c]`: summary `j` is visible to query `t` once its last token,
    `j · stride + length - 1`, is at `t` or before."""
    last = np.arange(0, settings.N - settings.length + 1, settings.stride) + settings.length - 1
    return last[None, :] <= np.arange(settings.N)[:, None]


def importance(settings: Settings, logits: np.ndarray) -> np.ndarray:
    """How much the compressed branch cares for each block, `[N, NB]`, summed over the heads of
    `logits` `[G, N, N]`.

    A summary is a mean of keys, so its score is the mean of its tokens' scores. Then a softmax over
    the visible summaries; and every `stride` tokens of a summary give its whole weight to the block
    they lie in (arXiv 2502.11089, Eq. 9 and 10).
    """
    N, length, stride = settings.N, settings.length, settings.stride
    visible = summary_visible(settings)
    M_c, per_summary = visible.shape[1], length // stride

    # Sums run in the same order for every summary and every block, so that equal ones stay equal to
    # the last bit.
    end = N // stride * stride
    pieces = sum(logits[..., first:end:stride] for first in range(stride))
    scores = sum(pieces[..., offset : offset + M_c] for offset in range(per_summary)) / length
    scores = np.where(visible, scores, -np.inf)  # [G, N, M_c]
    largest = scores.max(-1, keepdims=True)
    # all 0 where no summary is visible
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    weights = (weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)).sum(0)  # [N, M_c]

    per_block = settings.block_size // stride
    given = np.zeros((N, settings.NB * per_block))  # to each piece of `stride` tokens
    for offset in range(per_summary):
        given[:, offset : offset + M_c] += weights
    return sum(given[:, piece::per_block] for piece in range(per_block))


def forced_blocks(settings: Settings) -> np.ndarray:
    """Bool `[N, NB]`: the blocks listed whatever their importance."""
    block = np.arange(settings.NB)[None, :]
    own = np.arange(settings.N)[:, None] // settings.block_size
    return (block <= own) & ((block < settings.num_initial) | (block > own - settings.num_local))


def choose_blocks(settings: Settings, scores: np.ndarray) -> np.ndarray:
    """Bool `[N, NB]`: the `top_n` blocks of every query by `scores` `[N, NB]`, forced ones first,
    ties to the lower id.

    A query with fewer blocks behind it lists all of them; a block that begins after the query is
    never listed.
    """
    own = np.arange(settings.N)[:, None] // settings.block_size
    causal = np.arange(settings.NB)[None, :] <= own
    rank = np.where(forced_blocks(settings), np.inf, scores)
    rank = np.where(causal, rank, -np.inf)
    best = np.argsort(-rank, axis=-1, kind="stable")[:, : settings.top_n]
    listed = np.zeros_like(causal)
    np.put_along_axis(listed, best, True, axis=-1)
    return listed & causal


# -- what is seen --


def branch_masks(settings: Settings, scores: np.ndarray) -> dict[str, np.ndarray]:
    """What every query sees through each branch: a bool `[N, N]`, query by key, for each of
    `BRANCHES`.

    Args:
        settings: all but `query` matters.
        scores: importance of the blocks, `[N, NB]`.

    Returns:
        `"selected"`, the keys of listed blocks but the query's own, and `"own block"`, those of its
        own if that is listed; together the selected branch. `"window"`, the last keys.
        `"compressed"`, the keys that some visible summary covers: seen through the summary, not one
        by one.
    """
    t, key = np.arange(settings.N)[:, None], np.arange(settings.N)[None, :]
    listed = choose_blocks(settings, scores).repeat(settings.block_size, axis=1)[:, : settings.N]
    listed &= key <= t  # [N, N]
    own = key // settings.block_size == t // settings.block_size
    ended = summary_visible(settings).sum(-1, keepdims=True)  # [N, 1]
    # the visible summaries are the first ones, and they leave no gap: stride <= length
    covered = np.where(ended > 0, (ended - 1) * settings.stride + settings.length, 0)
    return {
        "compressed": key < covered,
        "window": (key <= t) & (key > t - settings.window),
        "selected": listed & ~own,
        "own block": listed & own,
    }


@functools.lru_cache(maxsize=8)
def _scores_of(settings: Settings) -> np.ndarray:
    return importance(settings, source(settings.data, settings.N, settings.group).logits)


@functools.lru_cache(maxsize=8)
def _masks_of(settings: Settings) -> Masks:
    plain = replace(settings, window=1, top_n=1, num_initial=0, num_local=0)
    found = branch_masks(settings, _scores_of(plain))
    for mask in found.values():
        mask.setflags(write=False)
    return found


def masks_of(settings: Settings) -> Masks:
    """`branch_masks` of these settings' own data, read-only. What has not changed since the last
    few calls is not computed again."""
    return _masks_of(replace(settings, query=0))
