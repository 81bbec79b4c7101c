"""Control of Python's cyclic garbage collector: paused where it has nothing to find, and kept from walking what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

YOUNG: Final = 20_000
"""Objects that are made between two searches of what is young, in a process of Felix's own; Python's default is 700. A batch of 65,536 records makes some 200,000 that all stay for as long
as it is worked on, so that searches in everything followed each other, and each held up the event loop by 20 to 70 ms."""
_NEVER: Final = 1 << 30
"""Searches of what is young before one of everything."""


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


@contextmanager
def start_kept() -> Iterator[None]:
    """Around the start of a process of Felix's own, which searches seldom from then on. Meanwhile nothing looks for cycles in everything; at the end `keep_what_is_there`."""
    young, older, whole = gc.get_threshold()
    gc.set_threshold(young, older, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(max(young, YOUNG), older, whole)
    keep_what_is_there()


def keep_what_is_there() -> None:
    """Let no later search for cycles walk what is there now: it stays for as long as the process, and would hold up the event loop by a tenth of a
    second each time. For processes that are Felix's own; blocks for one such search."""
    gc.collect()
    gc.freeze()
