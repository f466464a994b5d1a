"""What writing one token reads of the past, by branch: from the shapes alone.

Symbols: `M` tokens of a text, the newest included · `H` key/value heads · `D`, `DV` widths.
"""

from __future__ import annotations


def keys_of_step(
    M: int, *, block_size: int = 64, top_n: int = 16, window_size: int = 512, length: int = 32,
    stride: int = 16,
) -> dict[str, int]:  # fmt: skip
    """Keys that the newest of `M` tokens reads in one key/value head: all of them in dense
    attention, and those of each branch.

    >>> keys_of_step(65_536)
    {'dense': 65536, 'summaries': 4095, 'lists': 1024, 'window': 512}
    """
    return {
        "dense": M,
        "summaries": max(0, (M - length) // stride + 1),
        "lists": min(M, top_n * block_size),
        "window": min(M, window_size),
    }


def bytes_of_step(
    M: int, *, H: int = 4, D: int = 128, DV: int | None = None, itemsize: int = 2, **sizes: int
) -> dict[str, int]:
    """The bytes of these keys and of their values, and of the three branches together, `"nsa"`.

    Args:
        M, H, D, DV: shapes; `DV` defaults to `D`.
        itemsize: bytes of a number.
        sizes: those of `keys_of_step`.

    >>> bytes_of_step(65_536)["dense"] >> 20, round(bytes_of_step(65_536)["nsa"] / 2**20)
    (128, 11)
    """
    token = H * (D + (DV or D)) * itemsize
    found = {name: keys * token for name, keys in keys_of_step(M, **sizes).items()}
    return {**found, "nsa": found["summaries"] + found["lists"] + found["window"]}
