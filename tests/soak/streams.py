"""Streams under kills: idempotent producers that live through them, one that is killed itself, and a subscriber across all.

Settled: every acknowledged record is at the offset that its acknowledgement named; no record is there twice; each producer's
records are in order; the subscriber saw each record once, without a gap, though the broker went away under it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from region_peer import until
from soak.harness import Books, Worker, duplicates

import felix

STREAM = "acme/soak/orders"
SHARDS = 2
PRODUCERS = 3
BATCH = 20
PACE_S = 0.02
"""Between batches: a soak is about kills, and what is kept for its books should stay small."""
STAY_MS = 300_000
"""A producer tries for longer than any broker takes to come back."""


class StreamPart:
    """See the module."""

    name = "streams"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._acknowledged: dict[bytes, tuple[int, int]] = {}
        self._followed: list[tuple[int, int, bytes]] = []
        self._over = asyncio.Event()
        self._producing: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        self._gaps = 0

    async def start(self, region: felix.RegionClient) -> list[Worker]:
        await region.create_stream(STREAM, shards=SHARDS)
        self._producing = [asyncio.ensure_future(self._produce(region, who)) for who in range(PRODUCERS)]
        self._following = asyncio.ensure_future(self._follow(region))
        self._worker = Worker(self._home, "stream_worker", "producer", STREAM)
        return [self._worker]

    def progress(self) -> int:
        for task in (*self._producing, self._following):
            if task is not None and task.done():
                task.result()
        return len(self._acknowledged)

    async def _produce(self, region: felix.RegionClient, who: int) -> None:
        async with region.stream(STREAM).publisher(deadline_ms=STAY_MS) as publisher:
            at = 0
            while not self._over.is_set():
                payloads = [b"%d %d" % (who, at + n) for n in range(BATCH)]
                receipt = await publisher.publish_batch(list(map(felix.NewRecord, payloads)), who % SHARDS)
                for n, payload in enumerate(payloads):
                    self._acknowledged[payload] = (receipt.shard, receipt.base_offset + n)
                at += BATCH
                await asyncio.sleep(PACE_S)

    async def _follow(self, region: felix.RegionClient) -> None:
        async with region.stream(STREAM).subscribe("earliest", on_gap="raise") as follower:
            async for batch in follower.batches():
                self._followed += [(batch.shard, r.offset, bytes(r.payload)) for r in batch.records()]

    async def stop(self) -> None:
        self._over.set()
        async with asyncio.timeout(120):
            await asyncio.gather(*self._producing)
        assert self._worker is not None
        await asyncio.to_thread(self._worker.end)

    async def settle(self, region: felix.RegionClient) -> Books:
        assert self._following is not None
        assert self._worker is not None
        state = await region.describe_stream(STREAM)
        total = sum(shard.high_watermark for shard in state.state)
        await until(lambda: len(self._followed) >= total or self._following.done(), 120)  # type: ignore[union-attr]
        self._following.cancel()
        held: dict[tuple[int, int], bytes] = {}
        async with region.stream(STREAM).subscribe("earliest", on_gap="raise") as reader:
            async for batch in reader.batches():
                held.update({(batch.shard, r.offset): bytes(r.payload) for r in batch.records()})
                if len(held) >= total:
                    break
        promised = dict(self._acknowledged)
        for line in self._worker.lines():
            shard, offset, payload = line.split(" ", 2)
            promised[payload.encode()] = (int(shard), int(offset))
        problems = []
        if moved := sum(held.get(place) != payload for payload, place in promised.items()):
            problems.append(f"{moved} acknowledged records lost or moved")
        if twice := duplicates(list(held.values())):
            problems.append(f"{twice} records twice")
        if sorted(self._followed) != sorted((*place, payload) for place, payload in held.items()):
            problems.append("the subscriber across the kills did not see each record once")
        for who in range(PRODUCERS):
            order = [int(p.split()[1]) for _, p in sorted(held.items()) if p.startswith(b"%d " % who)]
            if order != list(range(len(order))):
                problems.append(f"the records of producer {who} are not in order, or with a hole")
        figures = {"acknowledged": len(promised), "in the log": total, "followed": len(self._followed)}
        return Books(figures, problems)
