"""How many calls of Python and of C the event loop makes for a unit of work, broker and client in one process: `python -m benchmarks.loop_calls`.

For comparing two trees on a machine that is busy with other things, where times differ by half from run to run and these counts by one or two
of a hundred. Run it in the one tree and in the other, in turns (of another tree: this file by its path, with PYTHONPATH set to that tree). It counts what the loop does, not what threads and the disk take: a change
that computes the same with slower calls is not seen.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Final

import felix
from cli.benchmark.roles import RING_BYTES, bench_client, found_bench_region, serving
from region.config import load_config

ROUNDS: Final = 12
UNITS: Final = 40
"""Of each round, one after the other."""
BATCH_RECORDS: Final = 64
PAYLOAD: Final = b"x" * 256

NAMED: Final = {
    "_run_once": "iterations",
    "<method 'recvmsg_into' of '_socket.socket' objects>": "reads of a socket",
    "_transmit": "transmits",
    "<method 'sendto' of '_socket.socket' objects>": "sent by the broker",
    "<method 'send' of '_socket.socket' objects>": "sent by the client",
    "<method 'get_timer' of 'qh3._hazmat.QuicConnectionCore' objects>": "asked for the timer",
    "<method 'get_send_buffer_size' of 'qh3._hazmat.QuicConnectionCore' objects>": "for the backlog",
    "call_at": "timers set",
}
"""What is counted by itself, by the name of its function; a wake by a thread is one of what the client sends."""

Work = Callable[[int], Awaitable[None]]


async def counted(what: str, work: Work) -> None:
    """Print the calls for each unit: median, least and most of the rounds; and, on average, some of them by themselves."""
    await work(UNITS)
    found = []
    named = dict.fromkeys(NAMED, 0)
    for _ in range(ROUNDS):
        profile = cProfile.Profile()
        profile.enable()
        await work(UNITS)
        profile.disable()
        counts = pstats.Stats(profile)
        found.append(counts.total_calls / UNITS)  # type: ignore[attr-defined]
        for (_, _, name), (calls, *_) in counts.stats.items():  # type: ignore[attr-defined]
            if name in named:
                named[name] += calls
    print(f"{what:45} {median(found):8.0f}  ({min(found):.0f} - {max(found):.0f})")
    per_unit = (f"{told} {named[name] / ROUNDS / UNITS:.1f}" for name, told in NAMED.items())
    print(f"    {', '.join(per_unit)}")


async def streams(client: felix.RegionClient, kind: str) -> None:
    """Publishing into a stream, and reading along."""
    name = f"bench/calls/{kind}"
    ring_bytes = RING_BYTES if kind == "ephemeral" else 0
    await client.create_stream(name, durability=felix.Durability(kind, 0), ring_bytes=ring_bytes)
    stream = client.stream(name)
    async with stream.publisher() as publisher:

        async def alone(count: int) -> None:
            for _ in range(count):
                await publisher.publish(PAYLOAD)

        async def batches(count: int) -> None:
            records = [felix.NewRecord(PAYLOAD)] * BATCH_RECORDS
            for _ in range(count):
                await publisher.publish_batch(records, 0)

        await counted(f"{kind}: publish a lone record", alone)
        await counted(f"{kind}: publish a batch of {BATCH_RECORDS}", batches)
        async with stream.subscribe("latest") as subscription:
            arriving = aiter(subscription.batches())

            async def followed(count: int) -> None:
                for _ in range(count):
                    await asyncio.gather(publisher.publish(PAYLOAD), anext(arriving))

            await counted(f"{kind}: publish and receive a lone record", followed)


async def queue(client: felix.RegionClient) -> None:
    """One job after the other."""
    await client.create_queue("bench/calls/queue")
    jobs = client.queue("bench/calls/queue")

    async def put(count: int) -> None:
        for _ in range(count):
            await jobs.put(PAYLOAD)

    await counted("queue: put", put)
    async with jobs.consume() as consumer:

        async def take(count: int) -> None:
            for _ in range(count):
                job = await anext(consumer)
                await job.ack()

        await counted("queue: take and acknowledge", take)


async def cache(client: felix.RegionClient) -> None:
    """One call after the other."""
    held = await client.create_cache("bench/calls/cache")

    async def put(count: int) -> None:
        for at in range(count):
            await held.put(f"key-{at}", PAYLOAD)

    async def get(count: int) -> None:
        for at in range(count):
            await held.get(f"key-{at}")

    await counted("cache: put", put)
    await counted("cache: get", get)


async def run() -> None:
    """Print all counts."""
    with tempfile.TemporaryDirectory(prefix="felix-bench-") as home:
        folder = found_bench_region(Path(home))
        async with serving(folder, load_config(folder.config)), bench_client(Path(home), "qh3") as client:
            for kind in ("fsync", "ephemeral"):
                await streams(client, kind)
            await queue(client)
            await cache(client)


if __name__ == "__main__":
    asyncio.run(run())
