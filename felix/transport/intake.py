"""What a listener read and its connections have not taken yet: fair turns, so that no peer waits behind all that another sent.

One socket is one queue, in which a lone datagram stands behind megabytes of a busy peer. Reading is cheap (a system call for 64 KiB),
decrypting and handling what was read is not. So of each burst that the listener reads a connection takes a bounded part at once, while it is
warm in the processor's caches; the rest is kept here by connection, and goes on in turns of the event loop. Pure: no sockets, no clock of its own.

Invariants:
- a connection takes its datagrams in the order in which they came;
- in each turn every connection that waits with no more than `QUANTUM_BYTES` takes all of it, before those that wait with more;
- those take `QUANTUM_BYTES` each, in rotation, until the turn has come to `TURN_BYTES`;
- a connection is alone where nobody else sent anything for `ALONE_S`: it takes all that comes at once, and nothing waits;
- `held_bytes` never passes `HELD_BYTES_MAX`: beyond it a datagram is dropped, as a full socket would, but of whoever has more than its
  share, and never of a connection that keeps within it while another does not.

Decision 0074 has the measurements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from felix.transport.udp import Address

QUANTUM_BYTES: Final = 66 * 1024
"""What a connection takes per turn while others send too: one read with receive offload and a little, about 0.6 ms of work."""

TURN_BYTES: Final = 4 * QUANTUM_BYTES
"""What all busy connections take together per turn: a lone datagram waits no longer than that takes."""

HELD_BYTES_MAX: Final = 24 * 1024 * 1024
"""What waits here in all: one and a half of a connection's window, so that one busy peer that keeps to it loses nothing."""

ARRIVAL_BYTES: Final = 192
"""What a datagram costs beside its bytes: objects and references, counted with it, so that many small ones are bounded too."""

ALONE_S: Final = 0.1
"""A connection is alone once no other sent anything for so long."""


class Arrival(NamedTuple):
    """Datagrams of one read, back to back, each of `segment_bytes`, the last one maybe shorter."""

    data: bytes
    segment_bytes: int
    address: Address


def _cost(arrival: Arrival) -> int:
    return len(arrival.data) + ARRIVAL_BYTES


class _Waiting:
    """What one connection has not taken yet."""

    __slots__ = ("arrivals", "held_bytes")

    def __init__(self) -> None:
        self.arrivals: deque[Arrival] = deque()
        self.held_bytes = 0

    def take(self, bytes_max: int) -> list[Arrival]:
        """The oldest, up to so many bytes; one at least."""
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
        """In the order in which they are served: who took its part goes to the end."""
        self._last: K | None = None
        """Who sent last."""
        self._shared_at = float("-inf")
        """When somebody else had sent before it."""
        self._taken: dict[K, int] = {}
        """Bytes of this burst that were taken at once, by connection."""
        self.held_bytes = 0
        self.dropped = 0
        """Reads that were dropped for want of room."""

    def takes(self, key: K, size: int, now: float) -> bool:
        """Whether the connection takes so many bytes that came just now at once; else `put` them. `now`: seconds of a monotonic clock."""
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
        """All that there was to read is read. Returns the connections that took something at once."""
        taken, self._taken = self._taken, {}
        return taken

    def put(self, key: K, arrival: Arrival) -> bool:
        """Keep it until the connection's turn; False where it was dropped."""
        waiting = self._waiting.get(key)
        size = _cost(arrival)
        if self.held_bytes + size > self._held_bytes_max:
            count = len(self._waiting) + (waiting is None)
            if (waiting.held_bytes if waiting is not None else 0) + size > self._held_bytes_max // count:
                self.dropped += 1
                return False
            self._make_room(size)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting()
        waiting.arrivals.append(arrival)
        waiting.held_bytes += size
        self.held_bytes += size
        return True

    def _make_room(self, size: int) -> None:
        """Drop the newest of whoever holds most: there is one with more than its share."""
        while self.held_bytes + size > self._held_bytes_max:
            most = max(self._waiting.values(), key=lambda each: each.held_bytes)
            gone = _cost(most.arrivals.pop())
            most.held_bytes -= gone
            self.held_bytes -= gone
            self.dropped += 1

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def turn(self) -> Iterator[tuple[K, list[Arrival]]]:
        """What is to be handled in this turn. The caller may `forget` any connection meanwhile."""
        busy: list[K] = []
        for key, waiting in list(self._waiting.items()):
            if waiting.held_bytes > QUANTUM_BYTES:
                busy.append(key)
            elif self._waiting.pop(key, None) is not None:
                self.held_bytes -= waiting.held_bytes
                yield key, waiting.take(QUANTUM_BYTES)
        left_bytes = TURN_BYTES
        for key in busy:
            if left_bytes < QUANTUM_BYTES:
                return
            found = self._waiting.pop(key, None)
            if found is None:
                continue
            before = found.held_bytes
            taken = found.take(QUANTUM_BYTES)
            self.held_bytes -= before - found.held_bytes
            left_bytes -= before - found.held_bytes
            if found.arrivals:
                self._waiting[key] = found
            yield key, taken

    def forget(self, key: K) -> None:
        """The connection is gone, and what waits for it."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self.held_bytes -= waiting.held_bytes
        self._taken.pop(key, None)
        if key is self._last:
            self._last = None
