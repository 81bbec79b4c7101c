"""Quantities as people write them: durations (`90d`), sizes (`10GB`, `64MiB`), rates (`5MB/s`) and instants.

Invariants: a unit is always written out, a bare number is refused, because `90` in a retention field has
meant seconds, days and bytes to different readers; the value is a whole number of ms, bytes or bytes per
second; `str()` of a quantity parses back to the same quantity, but for an instant that no calendar has. Anyone may call.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final, Self

from felix.errors import Code, RequestError

DURATION_MS_MAX: Final = 100 * 365 * 86_400_000
"""A century: beyond it a figure is a slip of the keyboard, and expiry arithmetic stays far from 2^53."""
SIZE_BYTES_MAX: Final = 1 << 53
"""8 PiB: what every JSON reader can hold exactly."""
TEXT_CHARS_MAX: Final = 32
AFTER_CALENDAR: Final = "after the year 9999"
"""How a time outside the calendar is shown: signed documents may state any time, and none may crash its reader."""

_NUMBER: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z/]+)", re.ASCII)

_INSTANT: Final = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d))?", re.ASCII)

_DURATION_UNITS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_SIZE_UNITS: Final = {
    "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip


def _refuse(what: str, text: str, expected: str) -> RequestError:
    shown = text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "…"
    return RequestError(f"{shown!r} is not a {what}: expected {expected}.", code=Code.INVALID)


def _parse(what: str, text: str, units: dict[str, int], most: int, expected: str) -> int:
    found = _NUMBER.fullmatch(text) if len(text) <= TEXT_CHARS_MAX else None
    if found is None or found[2] not in units:
        raise _refuse(what, text, expected)
    value = Decimal(found[1]) * units[found[2]]
    if value != int(value):
        raise _refuse(what, text, f"{expected}; this one is not a whole number of its smallest unit")
    if value > most:
        raise _refuse(what, text, f"{expected}; this one is larger than Felix handles")
    return int(value)


def _show(value: int, units: dict[str, int]) -> str:
    unit = max((name for name in units if value % units[name] == 0), key=units.__getitem__)
    return f"{value // units[unit]}{unit}"


class Duration(int):
    """A span of time in whole milliseconds; written `90d`, `12h`, `1.5s`, `50ms`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError(INVALID) with what was expected."""
        expected = "a number with ms, s, m, h, d or w, as in 50ms, 12h or 90d"
        return cls(_parse("duration", text, _DURATION_UNITS, DURATION_MS_MAX, expected))

    def __str__(self) -> str:
        return _show(int(self), _DURATION_UNITS) if self else "0s"


class Size(int):
    """A number of bytes; written `512B`, `10GB` (powers of 1000) or `64MiB` (powers of 1024)."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError(INVALID) with what was expected."""
        expected = "a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, as in 10GB or 64MiB"
        return cls(_parse("size", text, _SIZE_UNITS, SIZE_BYTES_MAX, expected))

    def __str__(self) -> str:
        return _show(int(self), _SIZE_UNITS) if self else "0B"


class Rate(int):
    """Bytes per second; written as a size with `/s`: `5MB/s`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError(INVALID) with what was expected."""
        expected = "a size per second, as in 5MB/s or 512KiB/s"
        if not text.endswith("/s"):
            raise _refuse("rate", text, expected)
        return cls(_parse("rate", text.removesuffix("/s"), _SIZE_UNITS, SIZE_BYTES_MAX, expected))

    def __str__(self) -> str:
        return f"{Size(self)}/s"


class Instant(int):
    """A point in time in ms since the Unix epoch; written `2026-12-31` (midnight UTC) or `2026-12-31T18:00Z`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """ISO 8601 with Z or an offset. Raises RequestError(INVALID) with what was expected."""
        expected = "a date or a time with its zone, as in 2026-12-31 or 2026-12-31T18:00Z"
        if len(text) > TEXT_CHARS_MAX or not _INSTANT.fullmatch(text):
            raise _refuse("time", text, expected)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise _refuse("time", text, expected) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        since = moment - datetime(1970, 1, 1, tzinfo=UTC)
        if since.days < 0:
            raise _refuse("time", text, f"{expected}, not before 1970")
        return cls(since // timedelta(milliseconds=1))

    def __str__(self) -> str:
        try:
            moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=int(self))
        except OverflowError:
            return f"a time {AFTER_CALENDAR}"
        return moment.isoformat(timespec="milliseconds" if self % 1000 else "seconds").replace("+00:00", "Z")
