"""When leaves had been cosigned at the latest, and which of them say a later time. Pure; fed with leaves in order.

A cosignature has its witness's time: each leaf below its checkpoint stood in the log by then, whatever time the leaf says. A leaf that is dated later was dated by a
clock that was ahead, or by somebody who wanted it inside of a grant's window, or in another window of a report. It breaks no rule: the witness's clock may be the wrong one. Only what is known of
cosignatures shows it, and a log keeps the newest of them: soon afterwards all that it shows are later than such a leaf.

Invariant: what is held is bounded by the cosignatures that are given. Callers: audit.verify, audit.proof, audit.tlog_proof.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

SLACK_MS: Final = 60_000
"""Clocks of two regions may differ by so much, and nothing is told."""


class DatedLate(NamedTuple):
    """Leaves that follow each other, all dated later than this party cosigned them."""

    leaf: int
    """the first of them"""
    leaves: int
    records: int
    """that crossed by them"""
    by_ms: int
    """by how much the one that is dated latest"""
    party: str


class _Cosigned(NamedTuple):
    time_ms: int
    party: str
    size: int


class TimesOfCosignatures:
    """Of one log."""

    def __init__(self) -> None:
        self._all: list[_Cosigned] = []
        self._at: int | None = None
        self._open: tuple[_Cosigned, DatedLate] | None = None

    def add(self, size: int, time_ms: int, party: str) -> None:
        """A cosignature of the first so many leaves. All are added before a leaf is taken."""
        assert self._at is None
        self._all.append(_Cosigned(time_ms, party, size))

    def _earliest(self, index: int) -> _Cosigned | None:
        """The earliest of those that cover this leaf. No leaf is asked for before one that was asked for already."""
        if self._at is None:
            self._at = 0
            # Of those that cover no less than an earlier one, none is asked for.
            kept: list[_Cosigned] = []
            for each in sorted(self._all):
                if not kept or each.size > kept[-1].size:
                    kept.append(each)
            self._all = kept
        while self._at < len(self._all) and self._all[self._at].size <= index:
            self._at += 1
        return self._all[self._at] if self._at < len(self._all) else None

    def take(self, index: int, time_ms: int, records: int) -> DatedLate | None:
        """Take the next leaf. Returns those before it that are dated late, where this one is not, or not by the same cosignature."""
        earliest = self._earliest(index)
        by_ms = 0 if earliest is None else time_ms - earliest.time_ms
        if earliest is None or by_ms <= SLACK_MS:
            return self.end()
        if self._open is not None and self._open[0] == earliest:
            found = self._open[1]
            self._open = (
                earliest,
                found._replace(
                    leaves=found.leaves + 1, records=found.records + records, by_ms=max(found.by_ms, by_ms)
                ),
            )
            return None
        ended = self.end()
        self._open = earliest, DatedLate(index, 1, records, by_ms, earliest.party)
        return ended

    def end(self) -> DatedLate | None:
        """The leaves before the next one that are dated late, if the last one is."""
        found, self._open = self._open, None
        return None if found is None else found[1]


def dated_late(cosigned: Iterable[tuple[str, int]], *times_ms: int | None) -> tuple[str, ...]:
    """What a proof does not show whose leaves say these times: when they were written, where a cosignature of its checkpoint (party and POSIX seconds) is of before."""
    latest = max((time_ms for time_ms in times_ms if time_ms is not None), default=0)
    earliest = min(((seconds, party) for party, seconds in cosigned if seconds), default=None)
    if earliest is None or latest - earliest[0] * 1000 <= SLACK_MS:
        return ()
    by_s = latest // 1000 - earliest[0]
    return (
        f"when it crossed: a leaf is dated {by_s:,} s after {earliest[1]} cosigned it, so one of the two clocks was wrong, or the time is made up",
    )
