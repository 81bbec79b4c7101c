"""Control of Python's cyclic garbage collector: paused where it has nothing to find, and kept from walking what stays."""

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


def keep_what_is_there() -> None:
    """Let no later search for cycles walk what is there now: it stays for as long as the process, and would hold up the event loop by a tenth of a
    second each time. For processes of Felix's own, once they have started; blocks for one such search."""
    gc.collect()
    gc.freeze()
