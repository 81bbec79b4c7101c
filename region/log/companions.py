"""The logs of a shard: its records, and beside them, in the stream's folder, the journals of its views. Pure.

They are led, copied and deleted as one. A journal's number is above every shard's: its kind, then the shard's number in 16 bits. Within
its shard a log is known by its kind, and the records by RECORDS.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

RECORDS: Final = 0
"""What a shard's record log is known by within its shard."""
AUDIT_CHECKPOINTS: Final = 17
"""Beside the leaves of a region's audit log: its checkpoints (region.evidence.audit_log)."""
_SHARD_BITS: Final = 16


class JournalKind(IntEnum):
    """Whose journal it is. `number` is that of its companion log."""

    SUBSCRIPTIONS = 1
    QUEUE = 2
    TRANSACTIONS = 3

    def number(self, shard: int) -> int:
        """The companion's number: above every shard's, one for each shard of the stream."""
        return log_number(self.value, shard)


def log_number(kind: int, shard: int) -> int:
    """The number of a shard's log: of its records (RECORDS), or of a journal of this kind."""
    return kind << _SHARD_BITS | shard


def shard_of(number: int) -> int:
    """The shard that the log of this number belongs to."""
    return number & ((1 << _SHARD_BITS) - 1)


def kind_of(number: int) -> int:
    """What the log of this number is known by within its shard."""
    return number >> _SHARD_BITS
