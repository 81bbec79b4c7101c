"""A QUIC client that says what no engine would: real handshakes over UDP, then frames of the attacker's own making.

The handshake is aioquic's; 1-RTT packets are encrypted here, with whatever frames they are given, and no flow control of the
peer's is kept. It blocks, and takes what comes only in `pump`; the broker that it attacks is another process.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from aioquic import tls
from aioquic.buffer import encode_uint_var
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicProtocolVersion
from cryptography.hazmat.primitives.hashes import SHA256

from felix.identity import NONCE_BYTES, Identity, prove
from felix.session import ClientSession, Established

PAYLOAD_BYTES = 1150
PATIENCE_S = 20.0
CONTROL = 0
"""The first stream that a client opens."""


def stream_frame(stream_id: int, offset: int, data: bytes) -> bytes:
    """A STREAM frame with offset and length (RFC 9000, section 19.8)."""
    number = encode_uint_var
    return b"\x0e" + number(stream_id) + number(offset) + number(len(data)) + data


def crypto_frame(offset: int, data: bytes) -> bytes:
    """A CRYPTO frame (RFC 9000, section 19.6)."""
    return b"\x06" + encode_uint_var(offset) + encode_uint_var(len(data)) + data


def fragments(count: int, stream_id: int = CONTROL, first: int = 1) -> Iterator[bytes]:
    """Single bytes at every other offset: nothing of it can be handed on, and no two can be joined."""
    return (stream_frame(stream_id, first + 2 * number, b"x") for number in range(count))


class Stranger:
    """One connection to a broker. `where`: the loopback address that it comes from."""

    def __init__(self, address: tuple[str, int], root_pem: bytes, server_name: str, where: str = "127.0.0.1"):
        self._address = address
        self.server_name = server_name
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((where, 0))
        self.socket.connect(address)
        self.socket.settimeout(0.002)
        self.quic = QuicConnection(
            configuration=QuicConfiguration(
                alpn_protocols=["felix/1"],
                server_name=server_name,
                cadata=root_pem,
                supported_versions=[QuicProtocolVersion.VERSION_1],
                idle_timeout=600,
            )
        )
        self.closed: events.ConnectionTerminated | None = None
        self.received = b""
        self.quic.connect(address, time.monotonic())
        self._transmit()

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    # -- the engine's ----------------------------------------------------------------------------------

    def _transmit(self) -> None:
        for datagram, _ in self.quic.datagrams_to_send(time.monotonic()):
            self._send(datagram)

    def _send(self, datagram: bytes) -> None:
        with suppress(OSError):  # the broker's queue is full: lost, as on any path
            self.socket.send(datagram)

    def pump(self, *, answer: bool = True) -> None:
        """Take what has come; `answer`: and acknowledge it."""
        while self.closed is None:
            try:
                data = self.socket.recv(65_536)
            except OSError:
                break
            self.quic.receive_datagram(data, self._address, time.monotonic())
            while (event := self.quic.next_event()) is not None:
                if isinstance(event, events.ConnectionTerminated):
                    self.closed = event
                elif isinstance(event, events.StreamDataReceived):
                    self.received += event.data
            ending = self.quic._close_event
            if ending is not None:
                self.closed = ending
        timer = self.quic.get_timer()
        if timer is not None and timer <= time.monotonic() and self.closed is None:
            self.quic.handle_timer(time.monotonic())
        if answer and self.closed is None:
            self._transmit()

    def wait(self, condition: Any, what: str) -> None:
        """Pump until it holds or the connection is closed."""
        until = time.monotonic() + PATIENCE_S
        while not condition() and self.closed is None:
            assert time.monotonic() < until, f"{what} did not come about"
            self.pump()

    def handshake(self) -> bool:
        """Complete QUIC's and TLS's part; False where the broker would not have it."""
        self.wait(lambda: self.quic._handshake_confirmed, "the handshake")
        return self.closed is None

    # -- the attacker's --------------------------------------------------------------------------------

    def packet(self, payload: bytes) -> bytes:
        """A 1-RTT packet with these frames."""
        number = self.quic._packet_number
        self.quic._packet_number += 1
        crypto = self.quic._cryptos[tls.Epoch.ONE_RTT]
        header = (
            bytes([0x41 | crypto.key_phase << 2]) + self.quic._peer_cid.cid + (number & 0xFFFF).to_bytes(2)
        )
        return crypto.encrypt_packet(header, payload.ljust(4, b"\0"), number)

    def say(self, frames: Iterable[bytes], payload_bytes: int = PAYLOAD_BYTES) -> int:
        """Send frames, several to a packet, until they are all sent or the broker closed. Returns bytes on the wire."""
        wire, payload, sent = 0, b"", 0
        for frame in frames:
            if len(payload) + len(frame) > payload_bytes:
                wire += self._say(payload)
                payload, sent = b"", sent + 1
                if sent % 16 == 0:
                    self.pump(answer=False)
                    if self.closed is not None:
                        return wire
            payload += frame
        return wire + (self._say(payload) if payload else 0)

    def _say(self, payload: bytes) -> int:
        datagram = self.packet(payload)
        self._send(datagram)
        return len(datagram)

    # -- Felix's handshake -----------------------------------------------------------------------------

    @property
    def leaf_sha256(self) -> bytes:
        """Of the certificate that the broker showed."""
        leaf = self.quic.tls._peer_certificate
        assert leaf is not None
        return bytes(leaf.fingerprint(SHA256()))

    def prove(self, identity: Identity, region: str) -> bool:
        """Come in as `identity`; False where the broker would not have it."""
        come: list[Established] = []
        taken = 0
        session = ClientSession(
            region=region,
            software="stranger",
            nonce=os.urandom(NONCE_BYTES),
            leaf_sha256=self.leaf_sha256,
            prove=lambda _, binding: prove(identity, binding),
        )

        def step() -> bool:
            nonlocal taken
            fresh, taken = self.received[taken:], len(self.received)
            if fresh:
                come.extend(event for event in session.receive(fresh) if isinstance(event, Established))
            out = session.take_output()
            if out:
                self.quic.send_stream_data(CONTROL, out)
                self._transmit()
            return bool(come)

        self.wait(step, "the session's handshake")
        return bool(come)
