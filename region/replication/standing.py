"""The records of a shard that may stand in the store, as its leader has to assume (R1, R2).

A record may stand if it is the newest one read, or that of a swap sent and not settled. All swaps are sent on the newest record read, so a
later revision settles all of them. Reading the *same* revision settles nothing: a swap whose answer was lost may still be on its way
inside the store. Then it, or another one on the same record, is sent again until one is answered.

Pure; of the leader's core alone. Whoever leads counts by `all`.
"""

from __future__ import annotations

from typing import Final

from region.cluster.records import ShardRecord
from region.replication.ready import Outcome, Swap, SwapAnswered

RECORDS_MAX: Final = 4
"""Records that may stand: the one read, and three swaps that differ. With more, only those are sent again."""


class Standing:
    """Of one epoch of one leader. `record` is the newest read, last changed at `revision`."""

    __slots__ = ("_attempts", "_sent", "_unknown", "record", "revision")

    def __init__(self, record: ShardRecord, revision: int, attempts: int = 0) -> None:
        self.record = record
        self.revision = revision
        self._attempts = attempts
        self._sent: Swap | None = None
        self._unknown: list[ShardRecord] = []

    @property
    def all(self) -> list[ShardRecord]:
        """Every record that may stand."""
        if self._sent is None:
            return [self.record, *self._unknown] if self._unknown else [self.record]
        return [self.record, *self._unknown, self._sent.record]

    @property
    def attempts(self) -> int:
        """Swaps sent so far, by which the next one is numbered."""
        return self._attempts

    @property
    def waiting(self) -> bool:
        """Whether a swap has been sent and neither answered nor given up."""
        return self._sent is not None

    @property
    def unsettled(self) -> bool:
        """Whether more than one record may stand."""
        return self._sent is not None or bool(self._unknown)

    def is_sent(self, record: ShardRecord) -> bool:
        """Whether this is what the swap that is not answered yet was to write."""
        return self._sent is not None and self._sent.record == record

    def read(self, record: ShardRecord, revision: int) -> bool:
        """The record was read; whether it says more than what was known."""
        if revision <= self.revision:
            return False
        self.record, self.revision = record, revision
        self._sent = None
        self._unknown.clear()
        return True

    def swap(self, record: ShardRecord) -> Swap:
        """Send `record` in place of the newest one read. One at a time."""
        assert self._sent is None
        if len(self._unknown) >= RECORDS_MAX - 1 and record not in self._unknown:
            record = self._unknown[-1]
        self._attempts += 1
        self._sent = Swap(self._attempts, self.revision, self.record, record)
        return self._sent

    def answered(self, answer: SwapAnswered) -> bool:
        """What came of a swap; whether what may stand has changed."""
        sent = self._sent
        if sent is None or sent.attempt != answer.attempt:
            return False
        if answer.outcome is Outcome.APPLIED:
            return self.read(sent.record, answer.revision)
        self._sent = None
        if answer.outcome is Outcome.UNKNOWN and sent.record not in self._unknown:
            self._unknown.append(sent.record)
        return True
