"""When certificates end, and how early that is said. Pure.

A life has four stages: nothing to say, DUE in its last third (renewal should have happened, or must be asked for), URGENT in its last tenth, EXPIRED.
The owner of an `ExpiryWatch` reports each stage of a certificate once; the figures are available at any time.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from felix.bounded import BoundedMap

WATCHED_MAX: Final = 10_000
"""Names that a watch remembers; the one that was seen longest ago is forgotten first."""
FORGET_MS: Final = 86_400_000
"""A name that no session used is forgotten this long after its expiry: by then it was reported, and it is not in use."""


class Stage(IntEnum):
    """How near the end is."""

    FRESH = 0
    DUE = 1
    URGENT = 2
    EXPIRED = 3


class Life(NamedTuple):
    """Of a certificate, in ms since the Unix epoch."""

    not_before_ms: int
    not_after_ms: int


class Notice(NamedTuple):
    """The report of one name that is due now."""

    name: str
    kind: str
    life: Life
    stage: Stage


def stage_of(life: Life, now_ms: int) -> Stage:
    """The stage of a certificate at `now_ms`."""
    left, whole = life.not_after_ms - now_ms, life.not_after_ms - life.not_before_ms
    if left <= 0:
        return Stage.EXPIRED
    if left * 10 <= whole:
        return Stage.URGENT
    return Stage.DUE if left * 3 <= whole else Stage.FRESH


def until_text(not_after_ms: int, now_ms: int) -> str:
    """As in "expires in 2d 5h", "expired 3m ago": the two units that count."""
    seconds = abs(not_after_ms - now_ms) // 1000
    parts = [
        f"{seconds // unit % top}{letter}"
        for unit, top, letter in ((86_400, 1 << 40, "d"), (3_600, 24, "h"), (60, 60, "m"), (1, 60, "s"))
    ]
    first = next((at for at, part in enumerate(parts) if part[0] != "0"), 3)
    text = " ".join(part for part in parts[first : first + 2] if part[0] != "0" or first == 3)
    return f"expires in {text}" if not_after_ms > now_ms else f"expired {text} ago"


class ExpiryWatch:
    """Certificates by name: the newest of each counts."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, Stage]] = {}
        self._lives: BoundedMap[str, tuple[str, Life]] = BoundedMap(WATCHED_MAX, gone=self._forgotten)

    def see(self, name: str, kind: str, life: Life) -> None:
        """Somebody came with this certificate. An older one than is known says nothing new: a renewed one is in use, too."""
        held = self._lives.look(name)
        if held is not None and held[1].not_after_ms > life.not_after_ms:
            life = held[1]
        self._lives.put(name, (kind, life))

    def _forgotten(self, name: str, _: object) -> None:
        self._told.pop(name, None)

    def notices(self, now_ms: int) -> list[Notice]:
        """The new reports: each name once per certificate and stage, the nearest expiry first."""
        found = []
        for name, (kind, life) in self._lives.items():
            stage = stage_of(life, now_ms)
            if life.not_after_ms + FORGET_MS < now_ms:
                self._lives.pop(name)
                self._told.pop(name, None)
            elif stage > Stage.FRESH and self._told.get(name) != (life.not_after_ms, stage):
                self._told[name] = (life.not_after_ms, stage)
                found.append(Notice(name, kind, life, stage))
        return sorted(found, key=lambda each: each.life.not_after_ms)

    def expiring(self, now_ms: int, most: int) -> list[Notice]:
        """All that are in their last third or beyond it, the nearest end first; at most so many."""
        found = [
            Notice(name, kind, life, stage_of(life, now_ms)) for name, (kind, life) in self._lives.items()
        ]
        late = sorted(
            (each for each in found if each.stage > Stage.FRESH), key=lambda each: each.life.not_after_ms
        )
        return late[:most]

    def seconds_left(self, now_ms: int) -> dict[str, float]:
        """Of each kind, until the first of its names ends; below 0 once it has."""
        least: dict[str, float] = {}
        for kind, life in self._lives.values():
            left = (life.not_after_ms - now_ms) / 1000
            least[kind] = min(left, least.get(kind, left))
        return least
