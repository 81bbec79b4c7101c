"""Which history of its shard's records the entries of a view's journal speak of.

Entries name records by their offsets, and stand in a log of their own. Where the records lost their end (a power cut under `interval`, a copy that an operator
let lead, an older copy of a disk) and the journal did not, entries name what is gone, and by then perhaps what was written in its place: new jobs would
count as done, and new records as acknowledged. So before the first entry of each opening a view says which leader epochs its records had, as readers
do (`EpochHistory.shared_end`), and a replay takes of the entries behind that only what the records still share with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from region.log.epochs import EVERYTHING
from region.log.shard import ShardLog

EPOCHS_TOLD: Final = 8
"""The newest of a shard's epochs: more openings than are lost at once."""


def told(shard: ShardLog) -> list[int]:
    """What an entry says of its shard's history: epochs, each with its first offset."""
    return [number for pair in shard.newest_epochs(EPOCHS_TOLD) for number in pair]


def known_end(shard: ShardLog, said: Sequence[int] | None) -> int:
    """The same of what a transaction has acknowledged, which may be settled long after; above every offset where it does not say (of an earlier release)."""
    return shared_end(shard, said) if said else EVERYTHING


def shared_end(shard: ShardLog, said: Sequence[int]) -> int:
    """Up to which offset the shard's records are those of which an entry says so."""
    epochs = zip(said[::2], said[1::2], strict=False)
    return shard.epochs.shared_end(epochs, shard.log_end_offset)
