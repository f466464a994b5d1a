"""How many bytes travel: counted by hand, without a process. `collectives.counted` measures."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tutorial.training.many_gpus import cuts
from nsa_tutorial.training.many_gpus.cuts import Cut


@dataclass(frozen=True)
class Widths:
    """Of the keys and values of a text.

    Attributes:
        kv_heads, key_width, value_width: `H`, `D` and `DV`.
        batch: `B`.
        itemsize: bytes of a number; 2 for bf16.
        sets: of keys and values: 1 if all branches share one, 3 if each has its own. With 3, the
            window's get a halo and are not gathered.
    """

    kv_heads: int
    key_width: int
    value_width: int
    batch: int = 1
    itemsize: int = 2
    sets: int = 1

    @property
    def row(self) -> int:
        """Bytes of the keys and values of one token, or of one summary."""
        return self.batch * self.kv_heads * (self.key_width + self.value_width) * self.itemsize


def bytes_moved(
    cut: Cut, rank: int, widths: Widths, *, length: int = 32, stride: int = 16,
    window_size: int = 512, backward: bool = False,
) -> dict[str, int]:  # fmt: skip
    """What a rank sends to others in the forward of Native Sparse Attention, or in its backward.

    A gather brings a rank's rows to the `R - 1` others. Backward, as many rows of gradients leave
    it, in fp32 (fp64 for fp64). Rows are padded to those of the longest piece. A halo goes to who
    needs it, and its gradient comes back.

    Returns:
        Bytes, by what travels: the names that `collectives.counted` uses.
    """
    wide = max(widths.itemsize, 4) / widths.itemsize
    name, factor = ("gradients of {}", wide) if backward else ("{}", 1)
    gathered = {
        "keys and values": cut.tokens_of_pieces(),
        "summaries": cut.summaries_of_pieces(length, stride),
    }
    found = {
        name.format(what): int((cut.ranks - 1) * cut.slots * max(counts) * widths.row * factor)
        for what, counts in gathered.items()
    }
    halos = {"halo of summaries": cuts.starts_of_summaries(cut, length, stride)}
    if widths.sets > 1:
        halos["halo of the window"] = cuts.starts_of_window(cut, window_size)
    for what, starts in halos.items():
        tokens = 0
        for segment in cuts.halos(cut, starts):
            there, here = (cut.owner(piece)[0] for piece in (segment.target, segment.source))
            sender = there if backward else here
            tokens += (segment.stop - segment.start) * (sender == rank and here != there)
        found[name.format(what)] = tokens * widths.row
    return found
