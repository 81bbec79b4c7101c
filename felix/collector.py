"""Control of Python's cyclic garbage collector: paused where it has nothing to find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing looks for cycles meanwhile: what a start or an import makes stays, and would be walked over again and again while it grows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
