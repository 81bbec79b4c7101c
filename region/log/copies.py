"""What the log of a shard asks of whoever keeps its other copies, where there are any (region.replication).

The log is led here: what is appended goes into the file on this disk and, by whoever stands behind this port, to the others. It is
answered and read once it is committed. The disk is theirs: it was opened before the log is led, and stays open when it is led no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

from felix.errors import FelixError
from region.log.core import CommitPort
from region.log.disk import DiskLog
from region.log.errors import SegmentDamagedError
from region.log.frame import Frame
from region.log.offload import ListPointer
from region.log.point import LogPoint
from region.log.producers import ProducerTable
from region.log.segment_state import SegmentState
from region.log.shared_offload import SharedLists


class LedLog(Protocol):
    """What whoever keeps the copies asks of the log, on the loop (region.log.shard.ShardLog)."""

    def commit_moved(self) -> None:
        """More is committed."""

    def stop(self, error: FelixError) -> None:
        """It is led here no more, or its disk has failed: what was not begun is refused with this."""

    @property
    def is_full(self) -> bool:
        """Whether the last append found no room on the disk."""

    def producers_snapshot(self) -> bytes:
        """The producers up to the commit point."""

    async def fetch(self, segment: SegmentState) -> None:
        """Bring a segment back that is in a store only, for another copy. Raises UnavailableError, CorruptionError."""


class Copies(CommitPort, Protocol):
    """Of one log, for as long as it is led here. All of it is called on the loop."""

    @property
    def disk(self) -> DiskLog:
        """The log on this broker's disk; all of it is committed when the log begins to be led."""

    @property
    def producers(self) -> ProducerTable:
        """The producers of what it has. From now on whoever leads keeps them."""

    @property
    def pool(self) -> Executor:
        """Does what changes the log's folder, one thing after the other."""

    def led(self, log: LedLog) -> None:
        """This one leads it, until `released`."""

    def refusal(self) -> FelixError | None:
        """Why nothing may be appended now: too few copies are in sync, or it is led here no more."""

    def written(self, prev: LogPoint, frames: Sequence[Frame]) -> None:
        """These stand in the file behind `prev`: send them, and sync."""

    def trimmed(self, start: LogPoint) -> None:
        """The log begins here now."""

    def failed(self, error: FelixError) -> None:
        """The log's disk, or what is on it, cannot be used any more."""

    def full(self, error: FelixError) -> None:
        """An append found no room on the disk, and the one before did."""

    async def repair(self, damage: SegmentDamagedError) -> None:
        """A segment of the log on this disk is damaged: return once it was written anew from another copy. Raises UnavailableError while that
        takes longer than a reader waits, CorruptionError where no copy has it: of these offsets alone."""

    @property
    def offloaded(self) -> ListPointer | None:
        """Which list of segments in a store is in force; None: there is none."""

    @property
    def lists(self) -> SharedLists:
        """What reads and writes these lists."""

    async def point_to(self, pointer: ListPointer) -> None:
        """Have this list in force in place of the one that `offloaded` says. Raises UnavailableError where it is not, or is not known to be: as
        where another leader was elected."""

    def released(self) -> None:
        """Nothing here reads or writes the log any more."""
