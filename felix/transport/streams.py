"""The streams of one connection, as both ends have opened and ended them, and what waits to leave on each.

Pure. Only felix.transport.driver_connection uses it.

Invariants:
- a stream is known while one of its directions is open, and counted by who opened it and in how many directions (RFC 9000, section 2.1);
- of one kind there are at most `streams_max` of ours, and `STREAMS_SLACK` times that of the peer's.
"""

from __future__ import annotations

from typing import Final

from felix.errors import Code, UnavailableError

STREAMS_SLACK: Final = 2
"""A peer may have this many times `streams_max` open as we see it: ends arrive later than they were sent."""

SENDING: Final = 1
RECEIVING: Final = 2
STOPPED: Final = 4
"""The peer wants no more of it, though we have not ended it."""


class StreamTable:
    """Which streams are open, and in which directions."""

    __slots__ = ("_counts", "_is_client", "_streams_max", "states")

    def __init__(self, streams_max: int, *, is_client: bool) -> None:
        self._streams_max = streams_max
        self._is_client = is_client
        self._counts = [0, 0, 0, 0]
        """Open streams by the two low bits of their ids: initiator and direction."""
        self.states: dict[int, int] = {}
        """Of `SENDING`, `RECEIVING` and `STOPPED`. To read; the methods change it."""

    def check_room(self, *, bidirectional: bool) -> None:
        """Raises UnavailableError where we may open no further one of this kind."""
        kind = (0 if self._is_client else 1) | (0 if bidirectional else 2)
        if self._counts[kind] >= self._streams_max:
            raise UnavailableError(
                f"The connection has {self._streams_max} streams of this kind open, which is its limit.",
                code=Code.LIMIT_SUBSCRIPTIONS,
                hint="End a stream first.",
            )

    def opened(self, stream_id: int) -> None:
        """We have opened it."""
        self.states[stream_id] = SENDING if stream_id & 2 else SENDING | RECEIVING
        self._counts[stream_id & 3] += 1

    def take_up(self, stream_id: int) -> bool:
        """Something came on an unknown stream: take it up as the peer's; False where it is one of ours that has ended. Raises UnavailableError
        where the peer has too many open."""
        if bool(stream_id & 1) == (not self._is_client):
            return False
        if self._counts[stream_id & 3] >= STREAMS_SLACK * self._streams_max:
            raise UnavailableError(
                f"more than {STREAMS_SLACK * self._streams_max} streams of one kind are open; end some before opening others",
                code=Code.LIMIT_SUBSCRIPTIONS,
            )
        self.states[stream_id] = RECEIVING if stream_id & 2 else RECEIVING | SENDING
        self._counts[stream_id & 3] += 1
        return True

    def stop(self, stream_id: int) -> bool:
        """The peer wants no more of it; False where we had ended it."""
        state = self.states.get(stream_id, 0)
        if not state & SENDING:
            return False
        self.states[stream_id] = state | STOPPED
        return True

    def end_sending(self, stream_id: int) -> None:
        self._end(stream_id, SENDING | STOPPED)

    def end_receiving(self, stream_id: int) -> None:
        self._end(stream_id, RECEIVING)

    def clear(self) -> None:
        """The connection is over."""
        self.states.clear()

    def _end(self, stream_id: int, what: int) -> None:
        state = self.states[stream_id] & ~what
        if state & (SENDING | RECEIVING):
            self.states[stream_id] = state
        else:
            del self.states[stream_id]
            self._counts[stream_id & 3] -= 1


class Outbox:
    """What the application sent since the last transmit."""

    __slots__ = ("held_bytes", "pending")

    def __init__(self) -> None:
        self.pending: dict[int, tuple[list[bytes], bool]] = {}
        """The pieces of each stream, in the order in which streams were first sent on, and whether they are its last. To read."""
        self.held_bytes = 0

    def put(self, stream_id: int, data: bytes, end: bool) -> None:
        """`end`: nothing follows on this stream."""
        pending = self.pending.get(stream_id)
        if pending is None:
            self.pending[stream_id] = ([data], end)
        else:
            pending[0].append(data)
            if end:
                self.pending[stream_id] = (pending[0], True)
        self.held_bytes += len(data)

    def take(self) -> dict[int, tuple[list[bytes], bool]]:
        """All that is pending."""
        taken, self.pending = self.pending, {}
        self.held_bytes = 0
        return taken

    def drop(self, stream_id: int) -> bool:
        """Forget what waits on a stream; False where nothing did."""
        dropped = self.pending.pop(stream_id, None)
        if dropped is None:
            return False
        self.held_bytes -= sum(map(len, dropped[0]))
        return True

    def clear(self) -> None:
        self.pending.clear()
        self.held_bytes = 0
