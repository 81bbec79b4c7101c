"""Routes: which broker of the region leads a stream, and a connection to each such broker that is in use.

A region of one broker needs none: everything goes over the connection that the profile leads to. A broker that does not lead a stream
answers NOT_LEADER with the address of the one that does; from then on what lives on that stream (publishers, subscriptions) goes over a
connection there, until it is lost, or says that the leader is another one again.

Invariants:

- the answer of a higher epoch counts, so a broker that has not heard of an election yet leads nobody back;
- every connection proves the region's name and authority, as the first one did: an answer leads nowhere else;
- what is attached is on one connection at a time; whose connection is lost asks again over the first one;
- an address that did not answer, or where a connection was lost, is tried again only after a pause that grows, or once somebody leads in a new
  epoch there; nobody waits for its answer, as a machine that is lost gives none for seconds, in which another broker is elected;
- a broker that for a while names nobody, or one who does not answer, may be cut off from those who know: the profile's others are asked.

On the event loop; used by `felix.connection` alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from felix.backoff import Backoff, BackoffPolicy
from felix.bounded import BoundedMap
from felix.errors import FelixError, NotLeaderError, RequestError
from felix.names import StreamName
from felix.profile import parse_address
from felix.runtime.port import Runtime

LEADERS_MAX: Final = 128
"""Brokers of a region at most: connections that one client may be led to."""
ROUTES_MAX: Final = 4_096
"""Streams whose leaders are remembered; for others the first connection is asked."""
ELSEWHERE_S: Final = 1.0
"""How long a stream may have nobody who leads it, as one broker says, before another one is asked, and so on: longer than most elections take
to be heard of."""
ANSWER_S: Final = 1.0
"""How long anybody waits for a first connection to an address: several round trips to another continent. Then others are asked until it stands."""
FORGOTTEN_S: Final = 30.0
"""What was said of a stream so long ago says nothing of today: whoever has no leader asks each second or so."""

_log = logging.getLogger("felix.routing")


class Movable(Protocol):
    """What lives on a stream, wherever that is led (connection.Attachment)."""

    def link_down(self, error: FelixError) -> None: ...


_MovableT = TypeVar("_MovableT", bound=Movable)
_Attached = TypeVar("_Attached", bound=Movable, contravariant=True)


class Reach(Protocol[_Attached]):
    """A connection to the region, or to one broker of it."""

    def join(self, attachment: _Attached) -> None:
        """Tell it of this connection's links from now on."""

    def part(self, attachment: _Attached) -> None:
        """Tell it nothing more."""

    async def open(self) -> None:
        """Connect. Raises FelixError where nobody answers in time."""

    async def close(self) -> None:
        """End it."""


class _Route(NamedTuple):
    address: str
    epoch: int
    broker: str


class _Leader(Generic[_MovableT]):
    """A connection to one leader, which is open or being opened."""

    __slots__ = ("opening", "reach")

    def __init__(self, reach: Reach[_MovableT]) -> None:
        self.reach = reach
        self.opening: asyncio.Task[None] | None = None


class Routes(Generic[_MovableT]):
    """Of one client and its region. `connect` makes a connection to one broker, not open yet, that tells `lost` when its link ends."""

    def __init__(
        self,
        first: Reach[_MovableT],
        connect: Callable[[str], Reach[_MovableT]],
        policy: BackoffPolicy,
        runtime: Runtime,
        here: Callable[[], str],
        may_call: Callable[[str], bool] = lambda address: True,
        known: Sequence[str] = (),
        with_broker: Callable[[], str] = lambda: "",
    ) -> None:
        """`first`: the connection that the profile leads to; `here`: the address that it is at; `with_broker`: the id of the broker there;
        `may_call`: whether an address that a broker names may be called; `known`: all that the profile names."""
        self._first = first
        self._connect = connect
        self._policy = policy
        self._runtime = runtime
        self._here = here
        self._with_broker = with_broker
        self.may_call = may_call
        self._known = known
        self._unled: BoundedMap[StreamName, float] = BoundedMap(ROUTES_MAX)
        """since when a stream's leader is not to be had, as the broker says that was asked last"""
        self._routes: BoundedMap[StreamName, _Route] = BoundedMap(ROUTES_MAX)
        self._leaders: dict[str, _Leader[_MovableT]] = {}
        self._placed: dict[_MovableT, tuple[StreamName, Reach[_MovableT]]] = {}
        self._pauses: BoundedMap[str, tuple[float, Backoff]] = BoundedMap(LEADERS_MAX)
        self._silent: BoundedMap[str, bool] = BoundedMap(LEADERS_MAX)
        """addresses that did not answer when they were called last, or have not answered since a connection there was lost"""
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def attach(self, attachment: _MovableT, stream: StreamName) -> None:
        """Put it on the connection to the stream's leader, as far as that is known."""
        reach = self.reach(stream)
        self._placed[attachment] = stream, reach
        reach.join(attachment)

    def detach(self, attachment: _MovableT) -> None:
        """It is on no connection any more."""
        placed = self._placed.pop(attachment, None)
        if placed is not None:
            placed[1].part(attachment)

    def learned(self, error: NotLeaderError, said_at: str) -> None:
        """The broker at `said_at` said who leads a stream.

        A lower epoch counts only from the supposed leader itself: the stream was created anew.
        """
        if self._is_closed or not error.stream:
            return
        try:
            stream = StreamName.parse(error.stream)
        except RequestError:
            return
        if not error.address:
            self._look_elsewhere(stream, said_at, error)
            return
        known = self._routes.use(stream)
        if known is None or known.epoch < error.epoch:
            # Whoever was elected since it was called last is there again.
            self._pauses.pop(error.address)
        if known is None or known.epoch <= error.epoch or self._is_said_by(known, said_at):
            known = _Route(error.address, error.epoch, error.leader)
            self._routes.put(stream, known)
        reach = self.at(known.address, known.broker)
        if reach is None:
            self._look_elsewhere(stream, said_at, error)
            return
        self._unled.pop(stream)
        self._move_all(stream, reach, error)

    def beside(self, address: str) -> Reach[_MovableT] | None:
        """A connection to the next broker that the profile names behind this one, and that may be asked now; None where there is no other."""
        known = self._known
        at = known.index(address) + 1 if address in known else 0
        for other in (*known[at:], *known[:at]):
            if other != address and (reach := self.at(other)) is not None:
                return reach
        return None

    def _look_elsewhere(self, stream: StreamName, said_at: str, error: FelixError) -> None:
        now = asyncio.get_running_loop().time()
        since = self._unled_since(stream)
        if since is None:
            self._unled.put(stream, now)
            return
        if now - since < ELSEWHERE_S:
            return
        reach = self.beside(said_at)
        if reach is not None:
            self._unled.put(stream, now)
            self._move_all(stream, reach, error)

    def _unled_since(self, stream: StreamName) -> float | None:
        """Since when its leader is not to be had, as far as that was said of late; None: it is."""
        since = self._unled.use(stream)
        forgotten = since is None or asyncio.get_running_loop().time() - since > FORGOTTEN_S
        return None if forgotten else since

    def _move_all(self, stream: StreamName, reach: Reach[_MovableT], error: FelixError) -> None:
        for attachment, (of, now) in list(self._placed.items()):
            if of == stream and now is not reach:
                self._move(attachment, stream, reach, error)

    def reach(self, stream: StreamName) -> Reach[_MovableT]:
        """The connection to the stream's leader, as far as that is known; else the first one."""
        route = self._routes.use(stream)
        return (self.at(route.address, route.broker) if route is not None else None) or self._first

    def leaders(self) -> list[Reach[_MovableT]]:
        """The connections to leaders that are open or being opened."""
        return [leader.reach for leader in self._leaders.values()]

    def at(self, address: str, broker: str = "") -> Reach[_MovableT] | None:
        """A connection to the broker at an address; None where it may not be called, or the address is none, and where it did not answer the last
        time: then it is called again, and whoever wanted it asks others until it answers. `broker`: its id, where that is known: the first connection may be with it by another address."""
        if self._is_here(address, broker):
            return self._first
        held = self._leaders.get(address)
        if held is not None:
            return None if self._silent.use(address) else held.reach
        loop = asyncio.get_running_loop()
        pause = self._pauses.use(address)
        if self._is_closed or len(self._leaders) >= LEADERS_MAX or (pause and loop.time() < pause[0]):
            return None
        if not self.may_call(address):
            return None
        try:
            parse_address(address)
        except RequestError:
            return None
        leader = self._leaders[address] = _Leader(self._connect(address))
        leader.opening = loop.create_task(self._open(address, leader), name=f"felix-leader-{address}")
        return None if self._silent.use(address) else leader.reach

    def _is_here(self, address: str, broker: str) -> bool:
        return address == self._here() or bool(broker and broker == self._with_broker())

    def _is_said_by(self, supposed: _Route, said_at: str) -> bool:
        """Whether what was said at an address is the word of the supposed leader itself."""
        return said_at == (
            self._here() if self._is_here(supposed.address, supposed.broker) else supposed.address
        )

    def lost(self, address: str, reach: Reach[_MovableT]) -> None:
        """The connection to a leader is over, or could not be made: what was on it asks over the first one who leads now."""
        leader = self._leaders.get(address)
        if leader is None or leader.reach is not reach or self._is_closed:
            return
        del self._leaders[address]
        _, backoff = self._pauses.use(address) or (0.0, Backoff(self._policy, self._runtime.random))
        loop = asyncio.get_running_loop()
        self._pauses.put(address, (loop.time() + backoff.next_ms() / 1000, backoff))
        self._leave(address, reach, NotLeaderError(f"The connection to {address} was lost."))
        closing = loop.create_task(leader.reach.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _gave_no_answer(self, address: str, reach: Reach[_MovableT]) -> None:
        self._leave(address, reach, NotLeaderError(f"{address} has not answered for {ANSWER_S:g} s."))

    def _leave(self, address: str, reach: Reach[_MovableT], error: FelixError) -> None:
        """Nobody waits at an address until it answers; then all are led there that were told to go there."""
        self._silent.put(address, True)
        elsewhere = self._first
        if any(
            each.address == address and self._is_here(address, each.broker) for each in self._routes.values()
        ):
            # The first connection has come to the same broker since, and would find out by itself, some seconds later.
            elsewhere = self.beside(self._here()) or elsewhere
        for attachment, (stream, now) in list(self._placed.items()):
            if now is reach:
                self._move(attachment, stream, elsewhere, error)

    async def close(self) -> None:
        """End every connection to a leader; what is on one is told so by that."""
        self._is_closed = True
        leaders, self._leaders = list(self._leaders.values()), {}
        for leader in leaders:
            if leader.opening is not None:
                leader.opening.cancel()
        await asyncio.gather(
            *self._closing, *(leader.reach.close() for leader in leaders), return_exceptions=True
        )

    async def _open(self, address: str, leader: _Leader[_MovableT]) -> None:
        slow = asyncio.get_running_loop().call_later(ANSWER_S, self._gave_no_answer, address, leader.reach)
        try:
            await leader.reach.open()
        except FelixError as error:
            _log.info("no connection to the leader at %s: %s", address, error.sentence)
            self.lost(address, leader.reach)
            return
        finally:
            slow.cancel()
        self._pauses.pop(address)
        if self._silent.pop(address):
            self._gather(address, leader.reach)

    def _gather(self, address: str, reach: Reach[_MovableT]) -> None:
        """Lead to a broker that answers again all that was told of late to go there, and asked others meanwhile. Whoever was told so long ago is
        served where it is now."""
        led: set[StreamName] = set()
        for attachment, (stream, now) in list(self._placed.items()):
            route = self._routes.use(stream)
            if (
                route is not None
                and route.address == address
                and now is not reach
                and self._unled_since(stream) is not None
            ):
                self._move(attachment, stream, reach, NotLeaderError(f"{address} answers again."))
                led.add(stream)
        for stream in led:
            self._unled.pop(stream)

    def _move(
        self, attachment: _MovableT, stream: StreamName, reach: Reach[_MovableT], error: FelixError
    ) -> None:
        self._placed[attachment][1].part(attachment)
        self._placed[attachment] = stream, reach
        attachment.link_down(error)
        reach.join(attachment)
