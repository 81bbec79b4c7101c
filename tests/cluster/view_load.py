"""Clients that use a queue, a durable subscription and a cache for ever, and note what they were told."""

from __future__ import annotations

import asyncio
from collections import Counter

import felix
from felix import Code, FelixError


async def work(
    region: felix.RegionClient,
    name: str,
    recorded: Counter[bytes],
    faults: list[str],
    broken: frozenset[bytes] = frozenset(),
) -> None:
    """Take jobs for ever, and count what the queue confirmed as done. Those that are `broken` are given back each time."""
    async with region.queue(name).consume(prefetch=8) as worker:
        async for job in worker:
            try:
                if job.payload in broken:
                    await job.nack(delay=0, reason="broken")
                    continue
                await job.ack()
            except FelixError as error:
                # Nobody knows whether it was recorded: the job comes again, or it was. One that is given back again, since the answer was
                # lost, may be another's by then; one that is acknowledged again is recognised.
                assert error.code is not Code.LEASE_LOST or job.payload in broken, (job.payload, error)
                faults.append(error.code.name)
            else:
                recorded[job.payload] += 1


async def consume(
    stream: felix.Stream, acknowledged: set[bytes], again: list[bytes], faults: list[str]
) -> None:
    """Acknowledge what comes, for ever. `again`: what came although it was known to be acknowledged."""
    async with stream.consumer("crew") as consumer:
        async for record in consumer:
            payload = bytes(record.payload)
            if payload in acknowledged:
                again.append(payload)
            if await consumer.ack(record):
                acknowledged.add(payload)
            else:
                faults.append("lost")


async def put(cache: felix.Cache, confirmed: dict[str, int]) -> None:
    """Put numbers under twenty keys, one after the other, and count them in one more."""
    number = 0
    while True:
        number += 1
        key = f"k{number % 20}"
        await cache.put(key, b"%d" % number)
        confirmed[key] = number
        assert await cache.increment("count") == number
        await asyncio.sleep(0.002)
