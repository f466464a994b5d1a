"""In which order a kernel walks the lists of selected attention: the same sums, other programs."""

from __future__ import annotations

import enum


class Order(enum.Enum):
    """One program for each query, for each tile of neighbouring queries, or for each block of keys.
    The values are the names that the operators take."""

    QUERIES = "queries"
    QUERY_TILES = "tiles"
    KEY_BLOCKS = "blocks"


ORDERS = tuple(order.value for order in Order)
