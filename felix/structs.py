"""msgspec's knowledge of structs, made before threads need it.

msgspec (0.22) learns how a struct is decoded at the first time that somebody decodes it, and shows what it has learned so far to other
threads: two that decode structs with one in common for the first time, at once, may crash the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final
from weakref import WeakSet

import msgspec

_prepared: Final[WeakSet[type[msgspec.Struct]]] = WeakSet()


def prepare_structs() -> None:
    """Have msgspec learn of every struct of the modules that are imported: some 30 ms for a whole broker, 1 ms when repeated. For processes that decode in
    threads, before they start any."""
    for struct in _all_below(msgspec.Struct):
        if struct in _prepared:
            continue
        # What cannot be decoded by itself (a union that no tag tells apart, a name for type checkers alone) nobody decodes.
        with suppress(TypeError, NameError):
            msgspec.json.Decoder(struct)
            _prepared.add(struct)


def _all_below(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in struct.__subclasses__():
        yield each
        yield from _all_below(each)
