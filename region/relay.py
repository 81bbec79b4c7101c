"""Relays: this broker carries the datagrams of a client's connection to another broker of its region.

For clients that reach one broker's address alone (a load balancer, a port-forward, a firewall with one hole). What is carried is a QUIC connection
of its own between the client and the other broker, which proves that it is one, judges the client's own certificate, and counts its use; this
broker has no key to it, and can add nothing to it. The idea is that of RFC 9298 (proxying UDP), the frames are in docs/wire.md.

Invariants:

- a client names a broker's address and nothing else; only that of a broker leads anywhere that is registered and alive in this region's own
  metadata and has proved itself to this one on a link between the two. So nothing is carried out of the region;
- only clients and operators of this region that have some right in it have relays; bridges have none;
- one relay reaches three connections of the other broker at most: what a client's handshake needs (RFC 9000, section 7.2);
- nothing waits here: what the client's connection, or the kernel, does not take is dropped, which QUIC takes for a network's loss;
- a relay ends with its session, with the client's last right, and when its broker is no longer registered at its address.

On the event loop, except for `gauges`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Final

from felix.address import Address as HostPort
from felix.errors import Code, FelixError, ProtocolError, RequestError, UnavailableError
from felix.frames import NOBODY_LISTENS, FrameDecoder, FrameType, Train, decode_datagrams
from felix.messages import OpenRelay, RelayOpened, decode_request, encode_error, encode_message
from felix.transport.packet import PACKET_BYTES_MIN, read_long_header
from felix.transport.udp import RECEIVE_BYTES, Address, UdpSocket, is_loopback, open_socket
from region.broker import Broker
from region.clustered import Clustered
from region.exchange import no_memory
from region.ports import Exchanging, Role

IDENTITY_PART: Final = 4
"""One identity has at most one relay of so many: nobody takes all of them."""
CONNECTIONS_MAX: Final = 3
"""Destination connection ids in long headers of one relay: of the first packet, after a Retry, and the one that the other broker chose."""
SOCKET_BYTES: Final = 1 << 20
"""Asked of the kernel for a relay's socket, each way: bursts of a connection, not its whole window."""
RETRY_MS: Final = 500
"""A client that was refused for now asks again after this: links between brokers stand again within a beat or two."""
_LONG: Final = 0x80
_INBOUND: Final = frozenset({FrameType.REQUEST, FrameType.DATAGRAMS})


class RelayService:
    """One per broker. `clustered`: None for one that has no others, and carries nothing. `most`: relays at once, of all sessions."""

    def __init__(self, broker: Broker, clustered: Clustered | None, most: int) -> None:
        self._broker = broker
        self._clustered = clustered
        self.most = 0 if clustered is None else most
        self._relays: dict[Relay, str] = {}
        """with the identity of each"""
        self._counts: Counter[str] = Counter()
        self._lookups: dict[str, asyncio.Task[tuple[int, Address]]] = {}
        """under way, by the address"""
        # One event loop reads them all, one after the other, and keeps nothing in it.
        self._buffer = bytearray(RECEIVE_BYTES)
        self.carried_bytes = 0
        self.dropped_bytes = 0
        if clustered is not None:
            clustered.member.mirror.on_change(lambda known: self._look())

    @property
    def most_of_identity(self) -> int:
        """What one identity may have at once."""
        return max(1, self.most // IDENTITY_PART) if self.most else 0

    def open(self, session: Exchanging, stream_id: int) -> Role:
        """The role of a stream that begins with OpenRelay."""
        return Relay(self, self._broker, session, stream_id)

    def gauges(self) -> dict[str, float]:
        """By name. From every thread."""
        return {
            "relays": len(self._relays),
            "relays_limit": self.most,
            "relayed_bytes": self.carried_bytes,
            "relay_dropped_bytes": self.dropped_bytes,
        }

    def close(self) -> None:
        """End them all."""
        for relay in list(self._relays):
            relay.closed()

    # -- what a relay asks ------------------------------------------------------------------------------

    def take(self, relay: Relay, identity: str, address: str) -> str:
        """The broker at an address, and a place for a relay to it. Raises UnavailableError, and RequestError(UNSUPPORTED) where nothing is
        carried."""
        clustered = self._clustered
        if clustered is None or not self.most:
            raise RequestError(
                f"Broker {self._broker.broker_id} carries no connections to other brokers.",
                code=Code.UNSUPPORTED,
                hint="Reach each broker's own address, or have limits.relays set.",
            )
        if len(self._relays) >= self.most or self._counts[identity] >= self.most_of_identity:
            whose = (
                f"{self.most}" if len(self._relays) >= self.most else f"{self.most_of_identity} of {identity}"
            )
            raise UnavailableError(
                f"Broker {self._broker.broker_id} carries {whose} connections to other brokers, the most that are allowed.",
                code=Code.LIMIT_SESSIONS,
                hint="Let clients reach every broker's address, or have limits.relays raised.",
                retry_after_ms=5_000,
            )
        found = [
            broker
            for broker, alive in clustered.member.mirror.view.alive.items()
            if alive.client_address == address
        ]
        if not found:
            raise UnavailableError(
                f"No broker of {self._broker.region} is alive at {address}.",
                hint="Ask who leads again; the SDK does.",
                retry_after_ms=RETRY_MS,
            )
        if clustered.requests is None or not clustered.requests.is_up(found[0]):
            raise UnavailableError(
                f"Broker {self._broker.broker_id} does not reach {found[0]} at {address} at the moment.",
                hint="Try again; felix region status shows which brokers run.",
                retry_after_ms=RETRY_MS,
            )
        self._relays[relay] = identity
        self._counts[identity] += 1
        return found[0]

    def give(self, relay: Relay) -> None:
        """It is over."""
        identity = self._relays.pop(relay, None)
        if identity is not None:
            self._counts[identity] -= 1
            if not self._counts[identity]:
                del self._counts[identity]

    async def connect(self, address: str, receiver: Relay) -> tuple[UdpSocket, int]:
        """A socket to a broker, and the largest datagram to send there. Raises UnavailableError."""
        loop, lookup = asyncio.get_running_loop(), self._lookups.get(address)
        if lookup is None:
            lookup = self._lookups[address] = loop.create_task(_look_up(address))
            lookup.add_done_callback(lambda done: self._looked_up(address, done))
        try:
            # A look-up blocks a thread that disks need, too: one of each broker at a time, however many relays begin and end meanwhile.
            family, found = await asyncio.shield(lookup)
            sock = open_socket(family, connect=found, buffer_bytes=SOCKET_BYTES)
        except OSError as error:
            raise UnavailableError(
                f"Broker {self._broker.broker_id} has no way to {address} (UDP): {error.strerror or error}.",
                retry_after_ms=RETRY_MS,
            ) from error
        limits, near = self._broker.transport_limits, is_loopback(found)
        size = limits.datagram_loopback_bytes_max if near else limits.datagram_bytes_max
        return UdpSocket(sock, loop, receiver, self._buffer), size

    def _looked_up(self, address: str, done: asyncio.Task[tuple[int, Address]]) -> None:
        del self._lookups[address]
        if not done.cancelled():
            # All who waited for it may have gone.
            done.exception()

    def is_there(self, broker: str, address: str) -> bool:
        """Whether a broker is registered still, and at no other address."""
        assert self._clustered is not None
        view = self._clustered.member.mirror.view
        alive = view.alive.get(broker)
        return broker in view.nodes and (alive is None or alive.client_address == address)

    def _look(self) -> None:
        for relay in list(self._relays):
            relay.look()


async def _look_up(address: str) -> tuple[int, Address]:
    """Family and address of a socket. Raises OSError."""
    place = HostPort.parse(address)
    (family, _, _, _, found), *_ = await asyncio.get_running_loop().getaddrinfo(
        place.host, place.port, type=socket.SOCK_DGRAM
    )
    return int(family), found  # type: ignore[return-value]


class Relay:
    """The role of one stream: datagrams in, datagrams out (`region.ports.Role`, `felix.transport.udp.Receiver`)."""

    def __init__(self, service: RelayService, broker: Broker, session: Exchanging, stream_id: int) -> None:
        self._service = service
        self._broker = broker
        self._session = session
        self._stream_id = stream_id
        self._decoder = FrameDecoder(_INBOUND)
        self._partial = 0
        self._to = ""
        self._address = ""
        self._largest = 0
        self._reached: set[bytes] = set()
        """connection ids that long headers named"""
        self._udp: UdpSocket | None = None
        self._opening: asyncio.Task[None] | None = None
        self._over = False

    # -- region.ports.Role -----------------------------------------------------------------------------

    def data(self, data: bytes, end: bool) -> None:
        for frame in self._decoder.feed(data):
            if self._over:
                return
            if frame.type is FrameType.DATAGRAMS:
                self._carry(decode_datagrams(frame.body))
            elif self._opening is not None:
                raise ProtocolError("A relay is opened once.", code=Code.STATE)
            else:
                request = decode_request(frame.body)
                assert isinstance(request, OpenRelay)  # PendingHandler chose this role by it
                self._open(frame.correlation, request.address)
        self._hold_partial()
        if end and not self._over:
            self._end()

    @property
    def meter(self) -> None:
        """It uses no stream."""

    def pump(self) -> None:
        """Nothing waits."""

    def rights_changed(self) -> None:
        identity = self._session.identity
        if identity is None or not self._broker.has_right(identity):
            self._fail(
                RequestError(
                    f"{identity} has no right in {self._broker.region} any more.",
                    code=Code.NOT_FOUND_OR_FORBIDDEN,
                )
            )

    def closed(self) -> None:
        if self._over:
            return
        self._over = True
        if self._opening is not None:
            self._opening.cancel()
        if self._udp is not None:
            self._udp.close()
        self._broker.budgets.exchange.give(self._partial)
        self._partial = 0
        self._service.give(self)

    # -- felix.transport.udp.Receiver ------------------------------------------------------------------

    def datagrams_received(self, data: bytes, segment_bytes: int, address: Address) -> None:
        if not self._session.may_send():
            self._service.dropped_bytes += len(data)
            return
        self._service.carried_bytes += len(data)
        self._session.send(self._stream_id, Train(segment_bytes, data).encode())

    def pass_ended(self) -> None:
        """Each read was sent on by itself."""

    def peer_refused(self) -> None:
        if not self._over and self._session.may_send():
            self._session.send(self._stream_id, NOBODY_LISTENS.encode())

    # -- its life --------------------------------------------------------------------------------------

    def look(self) -> None:
        """The region's brokers may be others now."""
        if self._to and not self._service.is_there(self._to, self._address):
            self._fail(
                UnavailableError(
                    f"Broker {self._to} is no longer at {self._address}.", retry_after_ms=RETRY_MS
                )
            )

    def _open(self, correlation: int, address: str) -> None:
        identity = self._session.identity
        assert identity is not None
        try:
            refusal = self._session.meter_for("").requested()
            if refusal is not None:
                raise refusal
            self._to, self._address = self._service.take(self, str(identity), address), address
        except (RequestError, UnavailableError) as error:
            self._fail(error, correlation)
            return
        self._opening = asyncio.ensure_future(self._connect(correlation))

    async def _connect(self, correlation: int) -> None:
        try:
            udp, self._largest = await self._service.connect(self._address, self)
        except FelixError as error:
            self._fail(error, correlation)
            return
        self._udp = udp
        opened = RelayOpened(self._to, self._largest)
        self._session.send(self._stream_id, encode_message(FrameType.ANSWER, opened, correlation))

    def _carry(self, train: Train) -> None:
        udp, service = self._udp, self._service
        if udp is None:
            raise ProtocolError("Datagrams came before the relay was opened.", code=Code.STATE)
        if not train.data or train.segment_bytes > self._largest:
            raise ProtocolError(
                f"A datagram of {train.segment_bytes} bytes; 1 to {self._largest} are carried.",
                code=Code.FRAME_MALFORMED,
            )
        # What is too short is dropped before it is split: a frame has room for 65,536 datagrams of one byte.
        if udp.blocked or train.segment_bytes < PACKET_BYTES_MIN:
            service.dropped_bytes += len(train.data)
            return
        carried = [datagram for datagram in train.split() if self._may_pass(datagram)]
        size = sum(map(len, carried))
        service.dropped_bytes += len(train.data) - size
        service.carried_bytes += size
        udp.send(carried, None)

    def _may_pass(self, datagram: bytes) -> bool:
        """Whether it is of a connection that this relay may reach. A short header names one that was made, or nothing."""
        if len(datagram) < PACKET_BYTES_MIN:
            return False
        if not datagram[0] & _LONG:
            return True
        header = read_long_header(datagram)
        if header is None:
            return False
        if header.destination_cid in self._reached:
            return True
        if len(self._reached) >= CONNECTIONS_MAX:
            return False
        self._reached.add(header.destination_cid)
        return True

    def _hold_partial(self) -> None:
        """What has come of a frame is held, and counts."""
        held = 0 if self._over else self._decoder.held_bytes
        budget = self._broker.budgets.exchange
        if held <= self._partial:
            budget.give(self._partial - held)
        elif not budget.take(held - self._partial):
            self._fail(no_memory(self._broker))
            return
        self._partial = held

    def _fail(self, error: FelixError, correlation: int = 0) -> None:
        if not self._over:
            self._broker.metrics.refused(error)
            self._session.send(self._stream_id, encode_error(error, correlation))
            self._end()

    def _end(self) -> None:
        self._session.send(self._stream_id, b"", end=True)
        self._session.end_role(self)
        self.closed()
