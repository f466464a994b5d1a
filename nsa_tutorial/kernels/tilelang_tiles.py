"""Which tiles, threads and pipeline stages the TileLang kernel of the forward takes, by shape.

`tile_rows` is what the tensor cores ask for. `launch_options` reads `LAUNCH_TABLE`, which is frozen
from measurements: no call of an operator measures anything.
"""

from __future__ import annotations

# Widest tile and longest block up to which a row holds, warps for every 16 rows of a group's tile,
# stages. Behind it milliseconds with 1, 2 and 4 warps: H200, torch 2.11, TileLang 0.1.15, 16,384
# tokens, 4 key/value heads, 1,024 keys a query, fp16, G 16; one run, to be had again by `python -m
# nsa_tutorial.bench selected --steps --tokens 16384` with the widths and blocks in question. What
# more stages do is in assets/tilelang_forward_h200.json.
LAUNCH_TABLE = (
    # D 128: 3.6, 4.4, 4.6; D 64: 1.9, 2.2, 2.8; D 32: 1.1, 1.4, 2.2
    # G 64, D 128: 6.7 with 1, 8.9 with 2
    (128, 64, 1, 1),
    # D 192, DV 128: 13.8, 5.5, 7.2; D 256: 11.7, 7.9, 8.6; D 128, blocks of 128: 5.3, 4.1, 4.8
    (256, 128, 2, 1),
)


def tile_rows(n: int) -> int:
    """`n` rounded up to what the tensor cores take: a multiple of 16."""
    return -(-n // 16) * 16


def launch_options(G: int, D: int, DV: int, BS: int) -> dict[str, int]:
    """Threads of a program and stages of its pipeline for a shape, from `LAUNCH_TABLE`; past its
    end its last row.
    """
    fitting = [row for row in LAUNCH_TABLE if row[0] >= max(D, DV) and row[1] >= BS]
    _, _, warps, stages = (fitting or LAUNCH_TABLE[-1:])[0]
    sixteens = tile_rows(G) // 16
    # warps take equal shares of the rows, and are not too many
    shares = max(n for n in range(1, 9) if sixteens % n == 0)
    return {"threads": 32 * warps * shares, "num_stages": stages}
