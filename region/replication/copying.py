"""How a follower begins a log as its leader's begins (COPY): it asks where that is, then for the closed segments piece by piece. Pure.

The host sends the questions, and gives the log's worker what the answers bring.

Invariants:
- one question is under way at a time, and an answer counts where it is to that one alone;
- nothing more is asked for before the disk has what came: of a log's segments one piece waits for it at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from region.log.offload import Offloaded
from region.log.point import LogPoint
from region.replication.origin import Beginning, Closed, decode_beginning
from region.replication.wire import OriginAsked, OriginTold, PieceAsked, PieceTold

COPY_MS: Final = 10_000
"""A leader that has not answered for so long is asked again where its log begins."""


@dataclass(frozen=True, slots=True)
class Collect:
    """What the log is to be begun anew with comes piece by piece: nothing of it is there yet."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a closed segment of it, behind those before."""

    closed: Closed
    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Replace:
    """Begin the log anew (COPY). `listed`: the segments before it that are in a store alone, of a beginning that has a `start`."""

    beginning: Beginning
    listed: tuple[Offloaded, ...] = ()


class Copying:
    """Of one log. Event by event: `take` an answer, then `go_on` once the disk has what it brought."""

    def __init__(self, leader: str, asked: OriginAsked, now: int) -> None:
        """`asked`: as it was sent to `leader`, at `now` (ms)."""
        self.leader = leader
        self._origin = asked
        self._asked: OriginAsked | PieceAsked | None = asked
        self._asked_ms = now
        self._writing: Collect | Piece | None = None
        self._beginning: Beginning | None = None
        self._segment = 0
        """of those of the beginning, which comes next"""
        self._position = 0
        """in its file"""

    @property
    def epoch(self) -> int:
        """Of the leader."""
        return self._origin.epoch

    def is_late(self, now: int) -> bool:
        """Whether the leader has left a question without an answer for too long."""
        return self._asked is not None and now - self._asked_ms > COPY_MS

    def awaits(self, peer: str, told: OriginTold | PieceTold) -> bool:
        """Whether this answers what was asked last."""
        return (peer, told.asked) == (self.leader, self._asked)

    def take(self, told: OriginTold | PieceTold, must_keep: LogPoint) -> Collect | Piece | Replace | None:
        """What the disk is to do with an answer that was awaited; None where the log cannot be begun so. `must_keep`: nothing before
        this point may go.

        Raises ProtocolError (of where the log begins).
        """
        self._asked = None
        if isinstance(told, OriginTold):
            return self._take_beginning(told.payload, must_keep)
        closed = self._next
        assert closed is not None
        if not told.data or self._position + len(told.data) > closed.size:
            # It was let go of, or compacted, since it was named.
            return None
        self._writing = Piece(closed, self._position, told.data)
        return self._writing

    def _take_beginning(self, payload: bytes, must_keep: LogPoint) -> Collect | Replace | None:
        if not payload:
            return None
        beginning = decode_beginning(payload)
        if beginning.origin.point < must_keep:
            return None
        self._beginning = beginning
        if not beginning.closed:
            return Replace(beginning)
        self._writing = Collect()
        return self._writing

    @property
    def _next(self) -> Closed | None:
        """The segment of which bytes are to come; None once all have."""
        assert self._beginning is not None
        closed = self._beginning.closed
        return closed[self._segment] if self._segment < len(closed) else None

    def go_on(self, done: Collect | Piece, now: int) -> PieceAsked | Replace | None:
        """The disk has done this: what is to be asked now, at `now` (ms), or done in the end. None where it was of a copy before."""
        if done is not self._writing:
            return None
        self._writing = None
        if isinstance(done, Piece):
            self._position += len(done.data)
            if self._position == done.closed.size:
                self._segment, self._position = self._segment + 1, 0
        closed = self._next
        if closed is None:
            assert self._beginning is not None
            return Replace(self._beginning)
        asked = PieceAsked(*self._origin, closed.base_offset, closed.generation, self._position)
        self._asked, self._asked_ms = asked, now
        return asked
