"""Silence for what a library logs while the course runs a reader's code: the verdict says it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence every logger: for a kernel that it cannot read, TileLang logs a page of generated
    code, once for each case of an exercise."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
