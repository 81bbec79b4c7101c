"""`python -m benchmarks.relayed [ROUNDS]`: what it costs a client that another broker carries its connection to the leader.

Three brokers and their etcd run as processes; a stream in memory has another leader than the broker that the profile names. Rounds alternate between a client
that reaches the leader itself and one that is carried: published in bulk, read from the beginning, and one record after the other. Rates and
waits are the client's; processor times are of the leader and of the broker in between. The ratio of a round holds on a busy machine where rates do not.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

import felix
from benchmarks.brokers import Brokers
from benchmarks.process_use import ProcessUse
from cli.benchmark.roles import REGION
from felix.connection import RegionConnection, Relaying
from felix.profile import load_profile
from felix.settings import EPHEMERAL

ROUNDS: Final = 5
RECORDS: Final = 20_000
RECORD_BYTES: Final = 1_000
LONE: Final = 300
RING_BYTES: Final = 256 << 20
SEED: Final = "b1"


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in MB/s, waits in ms; processor time in µs for each record that was published and read: of the leader, of the broker in between."""

    publish: float
    read: float
    lone_p50: float
    lone_p99: float
    leader_us: float
    between_us: float


async def _stream_elsewhere(client: felix.RegionClient) -> tuple[str, str]:
    """A new stream that another broker than SEED leads, and that broker."""
    for number in range(32):
        name = f"acme/bench/relayed-{number}"
        await client.create_stream(name, durability=EPHEMERAL, ring_bytes=RING_BYTES, replicas=1)
        await client.stream(name).publish(b"first")
        for leader in client.connection._routes.leaders():
            assert isinstance(leader, RegionConnection)
            return name, leader.session.broker
        await client.delete_stream(name)
    raise RuntimeError(f"Every stream was placed on {SEED}.")


async def _round(home: Path, brokers: Brokers, name: str, leader: str, relay: Relaying) -> Round:
    profile = await asyncio.to_thread(load_profile, REGION, home=home)
    payloads = [bytes(RECORD_BYTES)] * RECORDS
    megabytes = RECORDS * RECORD_BYTES / 1e6
    async with felix.connect(profile=profile, relay=relay) as client:
        stream = client.stream(name)
        await stream.publish(b"open")
        pids = brokers.pid_of(leader), brokers.pid_of(SEED)
        before = [ProcessUse.of(pid).cpu_s for pid in pids]
        began = time.perf_counter()
        offsets = await stream.publish_many(payloads)
        publish_s = time.perf_counter() - began
        first = offsets[0]
        count = 0
        began = time.perf_counter()
        async with stream.subscribe(offsets={0: first}) as records:
            async for batch in records.batches():
                count += len(batch)
                if count >= RECORDS:
                    break
        read_s = time.perf_counter() - began
        used = [(ProcessUse.of(pid).cpu_s - at) * 1e6 / RECORDS for pid, at in zip(pids, before, strict=True)]
        waits = []
        for _ in range(LONE):
            began = time.perf_counter()
            await stream.publish(b"lone")
            waits.append((time.perf_counter() - began) * 1e3)
        waits.sort()
    return Round(
        publish=megabytes / publish_s,
        read=megabytes / read_s,
        lone_p50=waits[LONE // 2],
        lone_p99=waits[LONE * 99 // 100],
        leader_us=used[0],
        between_us=used[1],
    )


async def _measure(home: Path, brokers: Brokers, rounds: int) -> dict[Relaying, list[Round]]:
    profile = await asyncio.to_thread(load_profile, REGION, home=home)
    async with felix.connect(profile=profile) as client:
        name, leader = await _stream_elsewhere(client)
    ways: tuple[Relaying, ...] = ("never", "always")
    for way in ways:
        await _round(home, brokers, name, leader, way)
    found: dict[Relaying, list[Round]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way].append(await _round(home, brokers, name, leader, way))
    return found


def main(rounds: int = ROUNDS) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        brokers = Brokers(Path(folder), 3)
        with brokers.running():
            found = asyncio.run(_measure(Path(folder), brokers, rounds))
    print(f"{rounds} rounds of {RECORDS} records of {RECORD_BYTES} bytes; median (lowest, highest)")
    for field in Round.__struct_fields__:
        direct, carried = ([getattr(each, field) for each in found[way]] for way in ("never", "always"))
        ratios = [there / here for here, there in zip(direct, carried, strict=True) if here]
        shown = (
            f"{statistics.median(each):8.2f} ({min(each):.2f}, {max(each):.2f})"
            for each in (direct, carried, ratios)
            if each
        )
        print(f"{field:12}", *shown, sep="  ")


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:2]))
