"""F9: what peers cost who have proved nothing: a real broker's memory under them, on both engines, while its own people get in.

The finding: seven one-byte frames at rising offsets cost 408 MiB on one connection; fragments at every other offset cost ten times
what was on the wire; 4,352 connections were let in. Every attack here must leave the broker within 64 MiB of what it had idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest
from quic_stranger import CONTROL, Stranger, crypto_frame, fragments, stream_frame
from region_peer import client
from region_process import BrokerProcess, fixed_region

from felix.transport.port import ENGINE_NAMES, TransportLimits
from keys.bundle import decode_bundle

Tally = Callable[[str, int], None]
ALLOWED_BYTES = 64 << 20
LIMITS = TransportLimits()
STREAM = "acme/ops/crew"


class Target:
    """A broker as a process, its memory when it was idle, and the most that was seen since."""

    def __init__(self, home: Path, engine: str) -> None:
        self.folder = fixed_region(home, extra=f"engine: {engine}\n")
        self.process = BrokerProcess(self.folder, home)
        self.address = ("127.0.0.1", int(self.process.wait()["address"].rpartition(":")[2]))
        self.root_pem = decode_bundle(self.folder.bundle.read_bytes()).bundle.root_pem.encode()
        asyncio.run(self.own_people(first=True))
        self.idle_bytes = self.most_bytes = self.process.rss_bytes()

    def stranger(self, where: str = "127.0.0.1") -> Stranger:
        return Stranger(self.address, self.root_pem, "us-east.acme", where)

    def weigh(self) -> None:
        self.most_bytes = max(self.most_bytes, self.process.rss_bytes())

    async def own_people(self, *, first: bool = False) -> None:
        """An operator gets in and publishes."""
        async with asyncio.timeout(120), client(self.folder) as own:
            if first:
                await own.create_stream(STREAM)
            await own.stream(STREAM).publish(b"still here")

    def check(self) -> None:
        """Its own people get in, it holds what is allowed, and nothing in it failed."""
        self.weigh()
        asyncio.run(self.own_people())
        self.weigh()
        grown = self.most_bytes - self.idle_bytes
        assert grown <= ALLOWED_BYTES, f"grew by {grown >> 20} MiB"
        assert "Traceback" not in self.process.log.read_text()


@pytest.fixture(scope="module", params=ENGINE_NAMES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("home"), request.param)
    try:
        yield made
    finally:
        made.process.terminate()


def test_single_bytes_at_rising_offsets_open_no_window(
    target: Target, attack_scale: int, tally: Tally
) -> None:
    """The finding's seven frames, each at the highest offset that is allowed then, and seven more."""
    count = 6 * attack_scale
    with ExitStack() as stack:
        for _ in range(count):
            stranger = stack.enter_context(target.stranger())
            assert stranger.handshake()
            stream = stranger.quic._get_or_create_stream_for_send(CONTROL)
            for _ in range(14):
                highest = min(stream.max_stream_data_remote, stranger.quic._remote_max_data)
                stranger.say([stream_frame(CONTROL, highest - 1, b"x")])
                stranger.pump()
            target.weigh()
            assert stream.max_stream_data_remote <= LIMITS.stream_window_bytes * 2
        target.check()
    tally("frames at rising offsets", 14 * count)


def test_fragments_floods_and_far_offsets_are_cut_off(
    target: Target, attack_scale: int, tally: Tally
) -> None:
    """Each kind on several connections, all held open: no connection is let go on beyond its bytes."""
    far = [stream_frame(CONTROL, 1 << 40, b"x")]
    kinds = {
        "fragments": lambda: fragments(40_000),
        "fragments in small packets": lambda: fragments(2_000),
        "fragments over streams": lambda: chain(
            *(fragments(400, stream_id) for stream_id in (*range(0, 400, 4), *range(2, 402, 4)))
        ),
        "a flood": lambda: (stream_frame(CONTROL, 1_000 * n, bytes(1_000)) for n in range(400)),
        "a flood behind a hole": lambda: (stream_frame(CONTROL, 1 + 1_000 * n, bytes(1_000)) for n in range(400)),
        "far offsets": lambda: far * 10,
        "handshake messages behind holes": lambda: (crypto_frame(7 + 8_000 * n, b"x") for n in range(65)),
        "fragments of handshake messages": lambda: (crypto_frame(1 + 2 * n, b"x") for n in range(40_000)),
        "a handshake message of 16 MiB": lambda: chain(
            [crypto_frame(0, b"\x01\xff\xff\xff")], (crypto_frame(4 + 1_000 * n, bytes(1_000)) for n in range(400))
        ),
    }  # fmt: skip
    wire = connections = 0
    with ExitStack() as stack:
        for name, frames in kinds.items():
            for _ in range(2 * attack_scale):
                stranger = stack.enter_context(target.stranger())
                if not stranger.handshake():
                    continue
                connections += 1
                sent = stranger.say(frames(), 30 if "small" in name else 1150)
                wire += sent
                if sent > LIMITS.stranger_bytes_max:
                    # More than is allowed was sent: the broker closes, whatever it was.
                    stranger.wait(lambda: False, "the end")
                    assert stranger.closed is not None
                target.weigh()
        target.check()
    tally("connections with fragments, floods and far offsets", connections)
    tally("bytes of them", wire)


def test_slow_handshakes_and_silent_connections_take_no_place_for_long(
    target: Target, attack_scale: int, tally: Tally
) -> None:
    """More than are allowed, from several addresses: half stop after their first packet, half after TLS with a fragment or two."""
    count = 120 * attack_scale
    done = 0
    with ExitStack() as stack:
        for number in range(count):
            stranger = stack.enter_context(target.stranger(f"127.0.{1 + number % 5}.1"))
            if number % 2 and stranger.handshake():
                done += 1
                stranger.say(fragments(1_000))
            if number % 20 == 0:
                target.weigh()
        target.check()
    assert done
    tally("slow handshakes", count - done)
    tally("connections that prove nothing", done)
