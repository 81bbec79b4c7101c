"""The intake: datagrams that a listener has read and its connections have not processed yet, served round-robin.

All connections of a listener share one socket, and a socket is a first-in-first-out queue: without this module a single datagram waits
until the broker has processed the megabytes of a busy peer that came before it. Reading costs little (one system call for 64 KiB);
decrypting and processing costs much. So the listener reads all that the socket holds. Each connection processes up to a quantum of the burst at
once, while the bytes are in the processor's caches; the intake keeps the rest by connection, for later iterations of the event loop.

Pure: no sockets, no clock of its own.

Invariants:
- a connection gets its datagrams in the order in which they were read;
- a round first serves every connection that holds at most `QUANTUM_BYTES`, and serves it whole;
- a round then serves the others in rotation, `QUANTUM_BYTES` each and `ROUND_BYTES` in all;
- a connection is alone when no other sent anything for `ALONE_S`; it processes a whole burst at once, and nothing of it is kept;
- `held_bytes` never exceeds `HELD_BYTES_MAX`. At the limit the intake drops datagrams, as a full socket buffer would, but only those of
  connections that hold more than an equal share.

The measurements are in decision 0074.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from felix.transport.udp import Address

QUANTUM_BYTES: Final = 66 * 1024
"""What one connection processes per round while others send too: one read with receive offload, about 0.6 ms of work."""

ROUND_BYTES: Final = 4 * QUANTUM_BYTES
"""What the busy connections process per round together. A datagram of a quiet connection waits for one round at most."""

HELD_BYTES_MAX: Final = 24 * 1024 * 1024
"""What the intake keeps in all: one and a half times a connection's flow-control window, so that one busy peer loses nothing."""

ARRIVAL_BYTES: Final = 192
"""What an arrival costs in objects and references; counted with its bytes, so that many small datagrams are bounded too."""

ALONE_S: Final = 0.1
"""How long the others must have sent nothing for a connection to count as alone."""


class Arrival(NamedTuple):
    """Datagrams of one read, back to back, each of `segment_bytes`, the last one maybe shorter."""

    data: bytes
    segment_bytes: int
    address: Address


def _cost(arrival: Arrival) -> int:
    return len(arrival.data) + ARRIVAL_BYTES


class _Waiting:
    """The arrivals of one connection, oldest first."""

    __slots__ = ("arrivals", "held_bytes")

    def __init__(self) -> None:
        self.arrivals: deque[Arrival] = deque()
        self.held_bytes = 0

    def take(self, bytes_max: int) -> list[Arrival]:
        """Remove and return the oldest arrivals, up to `bytes_max` but at least one."""
        if self.held_bytes <= bytes_max:
            taken = list(self.arrivals)
            self.arrivals.clear()
            self.held_bytes = 0
            return taken
        taken = [self.arrivals.popleft()]
        taken_bytes = _cost(taken[0])
        while self.arrivals and taken_bytes + _cost(self.arrivals[0]) <= bytes_max:
            arrival = self.arrivals.popleft()
            taken_bytes += _cost(arrival)
            taken.append(arrival)
        self.held_bytes -= taken_bytes
        return taken


K = TypeVar("K")


class Intake(Generic[K]):
    """See the module. `K`: a connection, or whatever stands for one."""

    def __init__(self, *, held_bytes_max: int = HELD_BYTES_MAX) -> None:
        self._held_bytes_max = held_bytes_max
        self._waiting: dict[K, _Waiting] = {}
        """In the order of service: a connection that was served goes to the end."""
        self._last: K | None = None
        """The connection that sent last."""
        self._shared_at = float("-inf")
        """When the sender last changed."""
        self._taken: dict[K, int] = {}
        """Bytes of this burst that were processed at once, by connection."""
        self.held_bytes = 0
        self.dropped_bytes = 0
        """What was dropped at the limit, since the start."""

    def takes(self, key: K, size: int, now: float) -> bool:
        """Whether the connection may process `size` bytes, just read, at once; where it may not, `put` them. `now`: seconds, monotonic."""
        if key is not self._last:
            self._last = key
            self._shared_at = now
        if key in self._waiting:
            return False
        taken = self._taken.get(key, 0)
        if taken and taken + size > QUANTUM_BYTES and (self._waiting or now - self._shared_at <= ALONE_S):
            return False
        self._taken[key] = taken + size
        return True

    def burst_ended(self) -> Iterable[K]:
        """The socket is empty, or the burst has its length. Returns the connections that processed something at once."""
        taken, self._taken = self._taken, {}
        return taken

    def put(self, key: K, arrival: Arrival) -> bool:
        """Keep an arrival for a later round. Returns False where it was dropped."""
        waiting = self._waiting.get(key)
        size = _cost(arrival)
        if self.held_bytes + size > self._held_bytes_max:
            count = len(self._waiting) + (waiting is None)
            if (waiting.held_bytes if waiting is not None else 0) + size > self._held_bytes_max // count:
                self.dropped_bytes += len(arrival.data)
                return False
            self._make_room(size)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting()
        waiting.arrivals.append(arrival)
        waiting.held_bytes += size
        self.held_bytes += size
        return True

    def _make_room(self, size: int) -> None:
        """Drop the newest arrivals of the connection that holds most, which holds more than its share."""
        while self.held_bytes + size > self._held_bytes_max:
            most = max(self._waiting.values(), key=lambda each: each.held_bytes)
            arrival = most.arrivals.pop()
            gone = _cost(arrival)
            most.held_bytes -= gone
            self.held_bytes -= gone
            self.dropped_bytes += len(arrival.data)

    def __bool__(self) -> bool:
        """Whether it keeps anything."""
        return bool(self._waiting)

    def round(self) -> Iterator[tuple[K, list[Arrival]]]:
        """One round: connections, and the arrivals that each is to process. The caller may `forget` connections meanwhile."""
        busy: list[K] = []
        for key, waiting in list(self._waiting.items()):
            if waiting.held_bytes > QUANTUM_BYTES:
                busy.append(key)
            elif self._waiting.pop(key, None) is not None:
                self.held_bytes -= waiting.held_bytes
                yield key, waiting.take(QUANTUM_BYTES)
        left_bytes = ROUND_BYTES
        for key in busy:
            if left_bytes < QUANTUM_BYTES:
                return
            found = self._waiting.pop(key, None)
            if found is None:
                continue
            taken = found.take(QUANTUM_BYTES)
            taken_bytes = sum(map(_cost, taken))
            self.held_bytes -= taken_bytes
            left_bytes -= taken_bytes
            if found.arrivals:
                self._waiting[key] = found
            yield key, taken

    def forget(self, key: K) -> None:
        """The connection is gone: drop its arrivals."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self.held_bytes -= waiting.held_bytes
        self._taken.pop(key, None)
        if key is self._last:
            self._last = None
