"""Silence for what a library logs while the course runs a reader's code: the verdict says it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_tilelang() -> Iterator[None]:
    """Silence TileLang's loggers: for a kernel that it cannot read, TileLang logs a page of
    generated code, once for each case of an exercise."""
    logger = logging.getLogger("tilelang")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
