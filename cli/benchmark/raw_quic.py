"""The yardstick: what this machine's QUIC engine moves without Felix above it.

`measure_relay`: publisher → relay → subscriber, three processes, opaque bytes on one stream each way, through
the same transport port that Felix uses. `measure_echo`: one small message there and back, over and over; with a folder
the server writes and syncs each message on a thread before it answers, which is the least that an acknowledgement of a
synced record can take over this engine, this loop and this disk.

What makes it fair: the relay forwards bytes as they come and looks at nothing; the subscriber's count goes back to
the publisher, which keeps at most `WINDOW_BYTES` under way, so that no side buffers without bound; both ends hash
what they sent and received, and a result exists only where the hashes agree. The clock starts once
`warm_bytes` arrived, so that the handshake and the slow start of the congestion window are not counted.

As a script: `python benchmarks/raw_quic.py [--engine qh3] [--chunk 16384] [--total 67108864]`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import xxhash
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from cli.benchmark.figures import Latency
from cli.benchmark.processes import HOST, Processes, until_parent_is_done
from felix.errors import UnavailableError
from felix.runtime.real import REAL
from felix.transport.port import (
    ENGINE_NAMES,
    ClientTls,
    Connection,
    ServerTls,
    TransportLimits,
    engine_named,
)

NAME: Final = "relay.bench"

WINDOW_BYTES: Final = 8 * 1024 * 1024
"""Under way from publisher to subscriber at most: several times what the path and the sockets hold."""

REPORT_BYTES: Final = 512 * 1024
"""The subscriber says how much it has after each such step; small against the window, large against a datagram."""

SYNCED_BYTES: Final = 16 * 1024 * 1024
"""Of the file in which echoes are synced: more than any run writes."""

CHUNK_KINDS: Final = 16
"""Different chunks that the publisher sends in turn, so that a repeated or swapped one changes the hash."""

WARM_BYTES: Final = 8 * 1024 * 1024
"""Not counted: slow start."""

_WHAT: Final = "the raw QUIC measurement"

_SUBSCRIBE: Final = b"S"
_PUBLISH: Final = b"P"


@dataclass(frozen=True, slots=True)
class RelayResult:
    """`total_bytes` reached the subscriber, whole and in order, in `seconds` after the warm-up."""

    engine: str
    chunk_bytes: int
    total_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.total_bytes / self.seconds


def measure_relay(
    engine: str,
    chunk_bytes: int = 16 * 1024,
    total_bytes: int = 64 * 1024 * 1024,
    *,
    warm_bytes: int = WARM_BYTES,
    limits: TransportLimits = TransportLimits(),  # noqa: B008 - frozen
    timeout_s: float = 60.0,
) -> RelayResult:
    """Bytes per second from a publisher by way of a relay to a subscriber, each a process of its own.

    UnavailableError where it does not finish within `timeout_s`, or something was lost or changed on the way."""
    authority, tls = _certificate()
    whole = -(-(warm_bytes + total_bytes) // chunk_bytes) * chunk_bytes
    with Processes(time.monotonic() + timeout_s, what=_WHAT) as processes:
        relay = processes.start(_relay, engine, tls, limits)
        port = processes.answer(relay)
        client = ClientTls(authority, NAME)
        subscriber = processes.start(_subscribe, engine, port, client, limits, whole, warm_bytes)
        processes.answer(subscriber)
        publisher = processes.start(_publish, engine, port, client, limits, whole, chunk_bytes)
        sent = processes.answer(publisher)
        received, warm_at, last_at = processes.answer(subscriber)
    if sent != received:
        raise UnavailableError(
            f"The relay over {engine} lost or changed bytes: hashes {sent:x} and {received:x}."
        )
    return RelayResult(engine, chunk_bytes, whole - warm_bytes, last_at - warm_at)


def measure_echo(
    engine: str,
    message_bytes: int = 64,
    count: int = 3000,
    *,
    synced_in: Path | None = None,
    limits: TransportLimits = TransportLimits(),  # noqa: B008 - frozen
    timeout_s: float = 60.0,
) -> Latency:
    """Round trips of one message at a time between two processes; `synced_in`: with each of them synced in a file there before its answer.
    UnavailableError as for `measure_relay`."""
    authority, tls = _certificate()
    with Processes(time.monotonic() + timeout_s, what=_WHAT) as processes:
        server = processes.start(_echo_server, engine, tls, limits, synced_in)
        port = processes.answer(server)
        client = processes.start(
            _echo_client, engine, port, ClientTls(authority, NAME), limits, message_bytes, count
        )
        found = Latency.of(processes.answer(client))
    assert found is not None
    return found


class _Quiet:
    """A handler that wants nothing."""

    def connected(self, connection: Connection) -> None:
        self.connection = connection
        connection.admit()

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None: ...
    def stream_reset(self, stream_id: int, code: int) -> None: ...
    def drained(self) -> None: ...
    def closed(self, code: int, reason: str) -> None: ...


# relay


class _RelayHandler(_Quiet):
    """A client of the relay: its first byte says what it is."""

    def __init__(self, hub: dict[bytes, tuple[Connection, int]]) -> None:
        self._hub = hub
        self._role = b""
        self._to: tuple[Connection, int] | None = None

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        if not self._role:
            self._role, data = data[:1], data[1:]
            self._hub[self._role] = (self.connection, stream_id)
            self._to = self._hub.get(_SUBSCRIBE if self._role == _PUBLISH else _PUBLISH)
            if self._role == _SUBSCRIBE:
                self.connection.send(stream_id, _SUBSCRIBE)
        if self._to is None:
            self._to = self._hub.get(_PUBLISH)
            if self._to is None:
                return
        if data or end:
            self._to[0].send(self._to[1], data, end=end)


async def _relay(pipe: Pipe, engine: str, tls: ServerTls, limits: TransportLimits) -> None:
    hub: dict[bytes, tuple[Connection, int]] = {}
    listener = await engine_named(engine).listen(HOST, 0, tls, lambda: _RelayHandler(hub), limits)
    pipe.send(listener.address[1])
    await until_parent_is_done(pipe)
    await listener.close()


# publisher


class _Publisher(_Quiet):
    def __init__(self, chunks: list[bytes], whole: int, backlog_high: int) -> None:
        self._chunks = chunks
        self._whole = whole
        self._backlog_high = backlog_high
        self._sent = 0
        self._counts = b""
        self._number = 0
        self.received = 0
        self.hash = xxhash.xxh3_64()
        self.done = asyncio.Event()

    def start(self) -> None:
        self._stream = self.connection.open_stream(bidirectional=True)
        self.connection.send(self._stream, _PUBLISH)
        self._push()

    def _push(self) -> None:
        connection = self.connection
        while (
            self._sent < self._whole
            and self._sent - self.received < WINDOW_BYTES
            and connection.backlog_bytes() < self._backlog_high
        ):
            chunk = self._chunks[self._number % CHUNK_KINDS]
            self._number += 1
            self._sent += len(chunk)
            self.hash.update(chunk)
            connection.send(self._stream, chunk)

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        counts = self._counts + data
        cut = len(counts) - len(counts) % 8
        self._counts = counts[cut:]
        if cut:
            self.received = int.from_bytes(counts[cut - 8 : cut], "big")
            if self.received == self._whole:
                self.done.set()
            else:
                self._push()

    def drained(self) -> None:
        self._push()


async def _publish(
    pipe: Pipe, engine: str, port: int, tls: ClientTls, limits: TransportLimits, whole: int, chunk_bytes: int
) -> None:
    handler = _Publisher(
        [os.urandom(chunk_bytes) for _ in range(CHUNK_KINDS)], whole, limits.backlog_high_bytes
    )
    connection = await engine_named(engine).connect(HOST, port, tls, handler, limits)
    handler.start()
    await handler.done.wait()
    pipe.send(handler.hash.intdigest())
    await until_parent_is_done(pipe)
    connection.close()


# subscriber


class _Subscriber(_Quiet):
    def __init__(self, whole: int, warm: int) -> None:
        self._whole = whole
        self._warm = warm
        self._received = 0
        self._report_at = REPORT_BYTES
        self.hash = xxhash.xxh3_64()
        self.warm_at = 0.0
        self.last_at = 0.0
        self.ready = asyncio.Event()
        self.done = asyncio.Event()

    def start(self) -> None:
        self._stream = self.connection.open_stream(bidirectional=True)
        self.connection.send(self._stream, _SUBSCRIBE)

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        if not self.ready.is_set():
            assert data[:1] == _SUBSCRIBE
            data = data[1:]
            self.ready.set()
        self.hash.update(data)
        self._received += len(data)
        if not self.warm_at and self._received >= self._warm:
            self.warm_at = time.monotonic()
        if self._received >= self._report_at or self._received == self._whole:
            self._report_at = self._received + REPORT_BYTES
            self.connection.send(stream_id, self._received.to_bytes(8, "big"))
        if self._received == self._whole:
            self.last_at = time.monotonic()
            self.done.set()


async def _subscribe(
    pipe: Pipe, engine: str, port: int, tls: ClientTls, limits: TransportLimits, whole: int, warm: int
) -> None:
    handler = _Subscriber(whole, warm)
    connection = await engine_named(engine).connect(HOST, port, tls, handler, limits)
    handler.start()
    await handler.ready.wait()
    pipe.send(None)
    await handler.done.wait()
    pipe.send((handler.hash.intdigest(), handler.warm_at, handler.last_at))
    await until_parent_is_done(pipe)
    connection.close()


# echo


class _EchoServer(_Quiet):
    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        self.connection.send(stream_id, data, end=end)


class _SyncedEchoServer(_Quiet):
    """Answers once what came is on the disk, with the thread that a broker's log has for it and nothing else of one."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._came: list[tuple[int, bytes, bool]] = []
        self._loop = asyncio.get_running_loop()
        self._worker = REAL.worker(self._step, "sync")
        self._worker.start()

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        self._came.append((stream_id, data, end))
        self._worker.wake()

    def _step(self) -> float:
        while self._came:
            stream_id, data, end = self._came.pop(0)
            os.write(self._file, data)
            os.fdatasync(self._file)
            self._loop.call_soon_threadsafe(partial(self.connection.send, stream_id, data, end=end))
        return math.inf


async def _echo_server(
    pipe: Pipe, engine: str, tls: ServerTls, limits: TransportLimits, synced_in: Path | None
) -> None:
    with ExitStack() as opened:
        made: Callable[[], _Quiet] = _EchoServer
        if synced_in is not None:
            made = partial(_SyncedEchoServer, opened.enter_context(_preallocated(synced_in)))
        listener = await engine_named(engine).listen(HOST, 0, tls, made, limits)
        pipe.send(listener.address[1])
        await until_parent_is_done(pipe)
        await listener.close()


@contextmanager
def _preallocated(folder: Path) -> Iterator[int]:
    """A file that a sync need not grow, as a broker's segments are."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, SYNCED_BYTES)
        os.fsync(file.fileno())
        yield file.fileno()


def measure_sync(folder: Path, message_bytes: int = 64, count: int = 3000) -> Latency:
    """Writes of one message, each synced, with nothing else in between."""
    message, took = os.urandom(message_bytes), []
    with _preallocated(folder) as file:
        for _ in range(count):
            begun = time.perf_counter_ns()
            os.write(file, message)
            os.fdatasync(file)
            took.append(time.perf_counter_ns() - begun)
    found = Latency.of(took)
    assert found is not None
    return found


class _EchoClient(_Quiet):
    def __init__(self, message: bytes, count: int) -> None:
        self._message = message
        self._left = count
        self._have = bytearray()
        self.trips_ns: list[int] = []
        self.failed = False
        self.done = asyncio.Event()

    def start(self) -> None:
        self._stream = self.connection.open_stream(bidirectional=True)
        self._next()

    def _next(self) -> None:
        self._sent_at = time.perf_counter_ns()
        self.connection.send(self._stream, self._message)

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        self._have += data
        if len(self._have) < len(self._message):
            return
        self.trips_ns.append(time.perf_counter_ns() - self._sent_at)
        self.failed = self.failed or self._have != self._message
        self._have.clear()
        self._left -= 1
        if self._left and not self.failed:
            self._next()
        else:
            self.done.set()


async def _echo_client(
    pipe: Pipe,
    engine: str,
    port: int,
    tls: ClientTls,
    limits: TransportLimits,
    message_bytes: int,
    count: int,
) -> None:
    handler = _EchoClient(os.urandom(message_bytes), count)
    connection = await engine_named(engine).connect(HOST, port, tls, handler, limits)
    handler.start()
    await handler.done.wait()
    if handler.failed:
        raise UnavailableError("An echo came back changed.")
    pipe.send(handler.trips_ns)
    await until_parent_is_done(pipe)
    connection.close()


def _certificate() -> tuple[bytes, ServerTls]:
    """A certificate that is its own authority's, for the hour: authority PEM and the server's side."""
    now = datetime.now(UTC)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark authority")])

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(hours=1))
        )

    authority = (
        builder(issuer, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    leaf = (
        builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "relay")]), key.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    return authority.public_bytes(Encoding.PEM), ServerTls(
        leaf.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Throughput and latency of a raw QUIC relay on this machine."
    )
    parser.add_argument("--engine", action="append", choices=ENGINE_NAMES, help="default: each")
    parser.add_argument("--chunk", type=int, default=16 * 1024, help="bytes per send")
    parser.add_argument("--total", type=int, default=64 * 1024 * 1024, help="bytes to measure")
    parser.add_argument("--datagram", type=int, help="bytes per datagram on loopback")
    parser.add_argument("--echoes", type=int, default=3000)
    parser.add_argument("--synced-in", type=Path, help="a folder: echoes that are synced there, too")
    chosen = parser.parse_args(arguments)
    limits = (
        TransportLimits(datagram_loopback_bytes_max=chosen.datagram) if chosen.datagram else TransportLimits()
    )
    for engine in chosen.engine or ENGINE_NAMES:
        relay = measure_relay(engine, chosen.chunk, chosen.total, limits=limits)
        print(f"{engine}: relay {relay.bytes_per_second / 1e6:.1f} MB/s, nothing lost", flush=True)
        echo = measure_echo(engine, count=chosen.echoes, limits=limits)
        print(f"{engine}: echo p50 {echo.p50_us:.0f} µs, p99 {echo.p99_us:.0f} µs", flush=True)
        if chosen.synced_in is not None:
            sync = measure_sync(chosen.synced_in, count=chosen.echoes)
            print(f"the disk: sync p50 {sync.p50_us:.0f} µs, p99 {sync.p99_us:.0f} µs", flush=True)
            echo = measure_echo(engine, count=chosen.echoes, synced_in=chosen.synced_in, limits=limits)
            print(f"{engine}: synced echo p50 {echo.p50_us:.0f} µs, p99 {echo.p99_us:.0f} µs", flush=True)
    return 0
