"""Chapter 15: what a layer remembers while it writes a text.

`Cache` holds four kinds of buffers, since each branch of NSA has keys and values of its own: pages
of all tokens for the lists, summaries, a ring of the latest tokens for the window, and a ring of
the **pending** tokens, which no summary holds yet. `NativeSparseAttention.new_cache` makes one, and
`layer(x, cache=cache)` appends `x` and attends.

A step waits for nothing: lengths are counted on the device, where kernels read them, and once more
on the host, which so knows that a cache is full without asking the device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_tutorial import library_decoding, ops
from nsa_tutorial.runtime import checks
from nsa_tutorial.runtime.describing import describe
from nsa_tutorial.sparse.decoding import most_new_summaries, places

Rows = Sequence[int] | Tensor


class Cache:
    """Keys and values of the tokens that a layer has seen, for a batch of sequences.

    Attributes:
        k, v: for the lists, `[pages, page_size, H, D]` and `[…, DV]`.
        k_cmp, v_cmp: summaries, `[pages, page_size // stride, H, D]` and `[…, DV]`.
        k_window, v_window: rings for the window, `[B, ring, H, D]` and `[…, DV]`.
        k_pending, v_pending: rings of tokens for the summaries to come.
        block_table: `[B, max_pages]` int32, the pages of each row; None where a row is one page.
        lengths: `[B]` int32, on the device: tokens of each row.
        host_lengths: the same on the host. A CUDA graph that is replayed changes `lengths` alone:
            call `count` before each replay.
        max_tokens: how many tokens a row may have.
        max_step: how many tokens the layer appends at a time (it cuts longer inputs), and how many
            `crop` can always take back.
    """

    def __init__(
        self, *, batch_size: int, max_tokens: int, heads: int, key_width: int, value_width: int,
        block_size: int, window_size: int, length: int, stride: int, page_size: int | None = None,
        max_step: int = 16, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu", backend: str = "auto",
    ) -> None:  # fmt: skip
        sizes = {"max_tokens": max_tokens, "max_step": max_step}
        for name, x in sizes.items():
            checks.check_positive_int(name, x)
        checks.check_positive_int("batch_size", batch_size, least=0)
        if page_size is not None:
            checks.check_positive_int("page_size", page_size)
            if page_size % block_size or page_size % stride:
                raise ValueError(
                    f"page_size: got {page_size}, expected a multiple of block_size, {block_size}, "
                    f"and of stride, {stride}"
                )
        self.max_tokens, self.max_step = max_tokens, max_step
        self.length, self.stride, self.window_size = length, stride, window_size
        B, H, widths = batch_size, heads, (key_width, value_width)
        place = {"dtype": dtype, "device": device}
        max_pages = 1 if page_size is None else -(-max_tokens // page_size)
        self.page_size = page_size or -(-max_tokens // stride) * stride

        def pair(*shape: int) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(*shape, H, width, **place) for width in widths)

        self.k, self.v = pair(B * max_pages, self.page_size)
        self.k_cmp, self.v_cmp = pair(B * max_pages, self.page_size // stride)
        room = max_pages * self.page_size
        self.k_window, self.v_window = pair(B, min(window_size + max_step, room))
        self.k_pending, self.v_pending = pair(B, min(length + max_step, room + length))
        self.lengths = torch.zeros(B, dtype=torch.int32, device=device)
        self.host_lengths = torch.zeros(B, dtype=torch.int64)
        self._most = torch.zeros(B, dtype=torch.int64)  # that a row had since its reset
        self.backend = checks.choose_backend(backend, self.k, name="dtype")
        self.block_table = None
        if page_size is not None:
            pages = torch.arange(B * max_pages, dtype=torch.int32, device=device)
            self.block_table = pages.view(B, max_pages)
            self._own_pages = self.block_table.clone()
            self._shared = torch.zeros(B, dtype=torch.int64)  # tokens in pages of another row

    # -- what a step calls --

    def count(self, n: int) -> None:
        """Count `n` more tokens of each row on the host. The layer calls it; call it yourself
        before each replay of a CUDA graph that appends them.

        Raises:
            ValueError: if a row has no room for them.
        """
        library_decoding.count_tokens(self.host_lengths, self._most, n, self.max_tokens)

    def check_room(self, n: int) -> None:
        """Raise `ValueError` if a row has no room for `n` more tokens."""
        library_decoding.check_room(self.host_lengths, n, self.max_tokens)

    def positions(self, n: int) -> Tensor:
        """The positions of the next `n` tokens, `[B, n]` int64."""
        return self.lengths.long()[:, None] + torch.arange(n, device=self.lengths.device)

    def write(self, *tokens: Tensor) -> None:
        """Write keys and values of the next tokens, for lists, window and summaries: `[B, n, H, D]`
        and `[B, n, H, DV]` each."""
        n, targets = tokens[0].shape[1], [self.k, self.v, self.k_window, self.v_window]
        targets += [self.k_pending, self.v_pending]
        self.count(n)
        given = (targets, list(tokens), self.lengths, self.block_table, self.backend)
        library_decoding.write_tokens(*given)
        self.lengths += n

    def pending_windows(self, n: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the windows that the latest `n` tokens may have completed, `[B *
        windows, length, H, D]` and `[…, DV]`: what is to be summarised."""
        sizes = (self.lengths, n, self.length, self.stride)
        rings = (self.k_pending, self.v_pending)
        return tuple(library_decoding.pending_windows(ring, *sizes) for ring in rings)

    def write_summaries(self, k_cmp: Tensor, v_cmp: Tensor, n: int) -> None:
        """Write the summaries `[B * windows, 1, H, D]` and `[…, DV]` of `pending_windows`: those
        that are complete."""
        windows = (len(self.lengths), most_new_summaries(n, self.stride))
        summaries = [x.reshape(*windows, *x.shape[2:]) for x in (k_cmp, v_cmp)]
        library_decoding.write_summaries(
            [self.k_cmp, self.v_cmp], summaries, self.lengths, self.block_table, n, self.length,
            self.stride, self.page_size, self.backend,
        )  # fmt: skip

    def attend(self, q: Tensor, gates: Sequence[Tensor | None], **options: object) -> Tensor:
        """`ops.decode_attention` of the latest tokens' `q [B, n, HQ, D]`; `options` are its own."""
        return ops.decode_attention(
            q, (self.k_cmp, self.v_cmp), (self.k, self.v), (self.k_window, self.v_window), gates,
            self.lengths, block_table=self.block_table, window_size=self.window_size,
            length=self.length, stride=self.stride, backend=self.backend, **options,
        )  # fmt: skip

    def fill(self, *tokens: Tensor, summaries: Sequence[Tensor]) -> None:
        """Write a whole prompt to an empty cache: keys and values as for `write`, and the summaries
        `[B, M_c, H, D]` and `[B, M_c, H, DV]` of them."""
        n, device = tokens[0].shape[1], self.lengths.device
        self.count(n)
        position = torch.arange(n, device=device).expand(len(self.lengths), n)
        page, place = places(position, self.block_table, self.page_size)
        self.k[page, place], self.v[page, place] = tokens[:2]
        rings = ((self.k_window, self.v_window), (self.k_pending, self.v_pending))
        for ring, pair in zip(rings, (tokens[2:4], tokens[4:]), strict=True):
            first = max(0, n - ring[0].shape[1])  # what the ring would overwrite
            latest = torch.arange(first, n, device=device) % ring[0].shape[1]
            for target, x in zip(ring, pair, strict=True):
                target[:, latest] = x[:, first:]
        page, place = (x[:, :: self.stride][:, : summaries[0].shape[1]] for x in (page, place))
        for target, x in zip((self.k_cmp, self.v_cmp), summaries, strict=True):
            target[page, place // self.stride] = x
        self.lengths += n

    @property
    def is_empty(self) -> bool:
        """Whether no row has a token."""
        return not bool(self.host_lengths.any())

    # -- what a server calls --

    def reset(self, rows: Rows | None = None) -> None:
        """Forget all tokens of `rows`, or of all rows: their places are free for other
        sequences."""
        rows = self._rows(rows)
        self._set_lengths(rows, torch.zeros(len(rows), dtype=torch.int64))
        self._most[rows] = 0
        if self.block_table is not None:
            on_device = rows.to(self.lengths.device)
            self.block_table[on_device] = self._own_pages[on_device]
            self._shared[rows] = 0

    def reorder(self, index: Rows) -> None:
        """Row `b` becomes what row `index[b]` was, as beam search asks for."""
        index = self._rows(index)
        if len(index) != len(self.host_lengths):
            raise ValueError(
                f"index: got {len(index)} rows, expected one for each of {len(self.host_lengths)}"
            )
        on_device = index.to(self.lengths.device)
        pages, own = on_device, slice(None)
        if self.block_table is not None:
            pages = self.block_table[on_device].flatten().long()
            own = self._own_pages.flatten().long()
            self.block_table.copy_(self._own_pages)
            self._shared.zero_()
        for x in (self.k, self.v, self.k_cmp, self.v_cmp):
            x[own] = x[pages]
        for x in (self.k_window, self.v_window, self.k_pending, self.v_pending, self.lengths):
            x.copy_(x[on_device])
        self.host_lengths, self._most = self.host_lengths[index], self._most[index]

    def select(self, rows: Rows) -> Cache:
        """Another cache, for `len(rows)` rows: row `b` holds what row `rows[b]` holds here."""
        rows = self._rows(rows)
        new, on_device = copy.copy(self), rows.to(self.lengths.device)
        pages = on_device
        if self.block_table is not None:
            pages = self.block_table[on_device].flatten().long()
            new.block_table = torch.arange(len(pages), device=pages.device).int()
            new.block_table = new.block_table.view(len(rows), self.block_table.shape[1])
            new._own_pages, new._shared = new.block_table.clone(), torch.zeros_like(rows)
        for name in ("k", "v", "k_cmp", "v_cmp"):
            setattr(new, name, getattr(self, name)[pages])
        for name in ("k_window", "v_window", "k_pending", "v_pending", "lengths"):
            setattr(new, name, getattr(self, name)[on_device])
        new.host_lengths, new._most = self.host_lengths[rows], self._most[rows]
        return new

    def crop(self, lengths: int | Rows) -> None:
        """Take tokens back until `lengths` are left: of all rows, or one number a row. A summary of
        which a token is gone goes with it, and is made anew when its last token comes again.

        Raises:
            ValueError: if a row has fewer tokens, or if its rings have overwritten what the tokens
                that stay need: up to `max_step` tokens can always be taken back.
        """
        B = len(self.host_lengths)
        to = torch.as_tensor(lengths, device="cpu").long().expand(B).clone()
        if bool((to < 0).any()) or bool((to > self.host_lengths).any()):
            raise ValueError(
                f"lengths: got {to.tolist()}, expected 0 to what rows hold, "
                f"{self.host_lengths.tolist()}"
            )
        # the ring holds the last of the most tokens that a row ever had
        for ring, needed in ((self.k_window, self.window_size), (self.k_pending, self.length)):
            oldest = (self._most - ring.shape[1]).clamp(min=0)
            lost = (to > 0) & (oldest > 0) & (to - needed + 1 < oldest)
            if bool(lost.any()):
                row = int(lost.nonzero()[0])
                raise ValueError(
                    f"lengths: got {int(to[row])} for row {row}, which had {int(self._most[row])} "
                    f"tokens, expected at most {self.max_step} fewer: make the cache with a larger "
                    "max_step"
                )
        if self.block_table is not None:
            self._unshare(to)
        self._set_lengths(torch.arange(B), to)
        self._most[to == 0] = 0

    def share_prefix(self, source: int, rows: Rows) -> None:
        """Let `rows` begin with the tokens of row `source`, without a copy of the pages that are
        full: they are read, and never written. What they held is forgotten."""
        if self.block_table is None:
            raise ValueError(
                "share_prefix: got a cache without pages, expected one made with page_size"
            )
        (source,) = self._rows([source]).tolist()
        rows = self._rows(rows)
        rows = rows[rows != source]
        self.reset(rows)
        on_device, n = rows.to(self.lengths.device), int(self.host_lengths[source])
        full = n // self.page_size
        self.block_table[on_device, :full] = self.block_table[source, :full].clone()
        if n % self.page_size:  # the last page will be written: a copy of its own
            to = self._own_pages[on_device, full].long()
            for x in (self.k, self.v, self.k_cmp, self.v_cmp):
                x[to] = x[self.block_table[source, full].long()].clone()
        for x in (self.k_window, self.v_window, self.k_pending, self.v_pending):
            x[on_device] = x[source].clone()
        self._set_lengths(rows, self.host_lengths[source].repeat(len(rows)))
        self._most[rows] = self._most[source].clone()
        self._shared[rows] = full * self.page_size

    def _unshare(self, to: Tensor) -> None:
        """Rows that are cut inside a shared page get a copy of it, since they will write there."""
        for row in ((to < self._shared) & (to % self.page_size > 0)).nonzero()[:, 0].tolist():
            page = int(to[row]) // self.page_size
            own = self._own_pages[row, page].long()
            for x in (self.k, self.v, self.k_cmp, self.v_cmp):
                x[own] = x[self.block_table[row, page].long()].clone()
        for row in (to < self._shared).nonzero()[:, 0].tolist():
            page = int(to[row]) // self.page_size
            self.block_table[row, page:] = self._own_pages[row, page:]
            self._shared[row] = page * self.page_size

    def _set_lengths(self, rows: Tensor, to: Tensor) -> None:
        self.host_lengths[rows] = to
        self.lengths[rows.to(self.lengths.device)] = to.to(self.lengths)

    def _rows(self, rows: Rows | None) -> Tensor:
        """Row numbers as a tensor on the host, checked."""
        B = len(self.host_lengths)
        if rows is None:
            return torch.arange(B)
        try:
            found = torch.as_tensor(rows, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            found = None
        if found is None or found.ndim != 1 or (len(found) and found.dtype not in checks.INTEGERS):
            raise TypeError(f"rows: got {describe(rows)}, expected row numbers, a list or a tensor")
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < B:
            raise ValueError(f"rows: got {found.tolist()}, expected numbers from 0 to {B - 1}")
        return found.long()
