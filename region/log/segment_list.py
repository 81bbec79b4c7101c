"""The segments of one log, oldest first, and what follows from them alone: where the log begins and ends, what may go. Does not block.

Invariants: `now` is an immutable tuple that the writer replaces as a whole, so a reader in another thread goes on with the one that it has
taken and sees by identity that it was replaced; there is always at least one once the log is open, and the last is the one that is
written to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from felix.errors import Code, RequestError
from felix.settings import Retention
from region.log.compaction import DirtySpan
from region.log.errors import OffsetOutOfRangeError
from region.log.point import LogPoint
from region.log.retention import SegmentSpan, plan_deletion
from region.log.segment_state import SegmentState


class SegmentList:
    """See the module. Readers take `now`; only the log's writer replaces it."""

    __slots__ = ("now",)

    def __init__(self, segments: Iterable[SegmentState]) -> None:
        self.now: tuple[SegmentState, ...] = tuple(segments)

    @property
    def active(self) -> SegmentState:
        """The segment that is written to."""
        return self.now[-1]

    @property
    def start_offset(self) -> int:
        """The oldest offset held."""
        return self.now[0].base_offset

    @property
    def start_point(self) -> LogPoint:
        """Where the log stands before the first entry held."""
        return self.now[0].base_point

    @property
    def end_point(self) -> LogPoint:
        """Where the log stands behind the last entry written."""
        return self.now[-1].end_point

    @property
    def local_bytes(self) -> int:
        """Bytes of all segment files that are local."""
        return sum(segment.segment_bytes for segment in self.now if segment.is_local)

    @property
    def store_only_bytes(self) -> int:
        """Bytes of all segments that are in a store and not local."""
        return sum(segment.segment_bytes for segment in self.now if not segment.is_local)

    @property
    def remote_bytes(self) -> int:
        """Bytes of all segments that are in a store, local as well or not."""
        return sum(segment.segment_bytes for segment in self.now if segment.remote)

    @property
    def last_time_ms(self) -> int:
        """Append time of the newest batch; -1 where there is none."""
        return max(segment.last_time_ms for segment in self.now)

    def deletable(self, retention: Retention, now_ms: int, *, below: int, hold: int | None) -> int:
        """How many of the oldest segments `retention` lets go, all of them wholly below offset `below`. `hold`: see
        region.log.retention."""
        spans = [
            SegmentSpan(one.base_offset, one.next_offset, one.segment_bytes, one.last_time_ms)
            for one in self.now
        ]
        count = plan_deletion(spans, retention, now_ms, hold=hold)
        while count and spans[count - 1].next_offset > below:
            count -= 1
        return count

    def dirty_spans(self, below: int) -> list[DirtySpan]:
        """The closed segments that lie wholly below offset `below`."""
        return [
            DirtySpan(one.next_offset, one.segment_bytes, one.last_time_ms)
            for one in self.now[:-1]
            if one.next_offset <= below
        ]

    def droppable(self, local_bytes: int) -> SegmentState | None:
        """The oldest local segment of which a copy is in a store, where more than `local_bytes` are local."""
        if self.local_bytes <= local_bytes:
            return None
        return next((one for one in self.now[:-1] if one.is_local and one.remote), None)

    @property
    def fixed_to(self) -> LogPoint:
        """The log cannot be cut before this point: what stands there was compacted, or is in a store. What compaction rests on besides, its state says."""
        return self._behind(lambda one: one.header.span is not None or one.remote is not None)

    @property
    def whole_from(self) -> LogPoint:
        """From where on the log has all of its frames: behind the last segment that compaction wrote."""
        return self._behind(lambda one: one.header.span is not None)

    def _behind(self, holds: Callable[[SegmentState], bool]) -> LogPoint:
        """Behind the last segment of which this holds, which is never the one that is written to; the least point where there is none."""
        segments = self.now
        last = max((at for at, one in enumerate(segments) if holds(one)), default=-1)
        return segments[last + 1].base_point if last >= 0 else LogPoint(0)

    def position_of(self, run: Sequence[SegmentState]) -> int | None:
        """Where this run of closed segments stands, or None where it no longer stands there whole."""
        segments = self.now
        if run[0] not in segments:
            return None
        at = segments.index(run[0])
        behind = at + len(run)
        return at if segments[at:behind] == tuple(run) and behind < len(segments) else None

    def check_cut(self, cut: LogPoint, fixed_to: int) -> int:
        """Which segment the log would end with, cut at this point. `fixed_to`: `CompactionState.fixed_to`.

        Raises OffsetOutOfRangeError outside the log, RequestError(UNSUPPORTED) where it was compacted, so that what the cut records
        superseded is gone, or offloaded.
        """
        segments = self.now
        if not self.start_point <= cut < self.end_point:
            raise OffsetOutOfRangeError(cut.offset, self.start_offset, segments[-1].next_offset)
        at = bisect_right(segments, cut, key=base_point) - 1
        if cut.offset < fixed_to or any(one.header.span or one.remote for one in segments[at:]):
            raise RequestError(
                f"The log was compacted or offloaded behind offset {cut.offset}; it cannot be cut there.",
                code=Code.UNSUPPORTED,
                hint="Build the replica anew from its leader.",
            )
        return at


def base_offset(segment: SegmentState) -> int:
    """What the segments of a log are in order of."""
    return segment.base_offset


def base_point(segment: SegmentState) -> LogPoint:
    """The same, with positions counted."""
    return segment.base_point


def first_local(segments: Sequence[SegmentState]) -> int:
    """Which of them is the first of those at the end that are all local."""
    return max((at + 1 for at, one in enumerate(segments) if not one.is_local), default=0)
