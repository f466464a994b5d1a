"""Silence for what a library logs while the course runs a reader's code: the verdict says it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence every logger, because TileLang logs a page of generated code for each case with a
    kernel that it cannot read."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
