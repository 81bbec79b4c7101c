"""Durability: what an acknowledgement of a stream means. One value, written `fsync`, `interval:50ms`, `ephemeral`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from felix.errors import Code, RequestError

INTERVAL_MS_MAX: Final = 60_000
"""More than a minute of acknowledged records at risk is not a durability anybody asks for on purpose."""

_INTERVAL: Final = re.compile(r"interval:([0-9]{1,6})ms")


class Kind(Enum):
    """FSYNC: on disk. INTERVAL: in the file, on disk within `interval_ms`. EPHEMERAL: in memory."""

    FSYNC = "fsync"
    INTERVAL = "interval"
    EPHEMERAL = "ephemeral"


@dataclass(frozen=True, slots=True)
class Durability:
    """`interval_ms` is positive for INTERVAL and zero for the others."""

    kind: Kind
    interval_ms: int = 0

    def __post_init__(self) -> None:
        if self.kind is Kind.INTERVAL:
            valid = 0 < self.interval_ms <= INTERVAL_MS_MAX
        else:
            valid = self.interval_ms == 0
        if not valid:
            raise RequestError(
                f"An interval of {self.interval_ms} ms does not go with durability {self.kind.value}: "
                f"interval takes 1 to {INTERVAL_MS_MAX} ms, the others none.",
                code=Code.CONFIG_INVALID,
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError(CONFIG_INVALID) with what was expected."""
        if text in (Kind.FSYNC.value, Kind.EPHEMERAL.value):
            return cls(Kind(text))
        if match := _INTERVAL.fullmatch(text):
            return cls(Kind.INTERVAL, int(match[1]))
        raise RequestError(
            f"{text[:80]!r} is not a durability: expected fsync, interval:<ms>ms (as in interval:50ms) or ephemeral.",
            code=Code.CONFIG_INVALID,
        )

    def __str__(self) -> str:
        return f"interval:{self.interval_ms}ms" if self.kind is Kind.INTERVAL else self.kind.value


FSYNC: Final = Durability(Kind.FSYNC)
EPHEMERAL: Final = Durability(Kind.EPHEMERAL)
