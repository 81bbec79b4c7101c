"""A durable subscription under kills: consumers share its shards and are killed, and so is the broker.

Settled: every acknowledged record of the stream reached a consumer; none went to the dead letters; and in the end the subscription itself says
that it has come to the end of every shard.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from soak.harness import Books, Worker, load

import felix
from felix.messages import SubscriptionState
from felix.settings import Retries, SubscriptionSettings

STREAM = "acme/soak/readings"
SUBSCRIPTION = "billing"
SHARDS = 4
CONSUMERS = 3
BATCH = 20
BEHIND_MAX = load(200, 4_000)
BEHIND_LOOK_S = 0.1
ACK_TIMEOUT_MS = 3_000
"""What a killed consumer held comes back soon."""
DRAIN_S = 120.0


class SubscriptionPart:
    """See the module."""

    name = "subscriptions"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._published: dict[bytes, tuple[int, int]] = {}
        self._over = asyncio.Event()
        self._producing: asyncio.Task[None] | None = None
        self._workers: list[Worker] = []
        self._region: felix.RegionClient | None = None

    async def start(self, region: felix.RegionClient) -> list[Worker]:
        self._region = region
        await region.create_stream(STREAM, shards=SHARDS)
        await region.stream(STREAM).create_subscription(
            SUBSCRIPTION,
            SubscriptionSettings(
                start="earliest",
                ack_timeout_ms=ACK_TIMEOUT_MS,
                retries=Retries(attempts_max=0, interval_ms=100),
            ),
        )
        self._producing = asyncio.ensure_future(self._produce(region))
        self._workers = [
            Worker(self._home, "consumer_worker", f"consumer-{number}", STREAM, SUBSCRIPTION)
            for number in range(CONSUMERS)
        ]
        return self._workers

    def progress(self) -> int:
        if self._producing is not None and self._producing.done():
            self._producing.result()
        return len(self._published)

    async def _produce(self, region: felix.RegionClient) -> None:
        async with region.stream(STREAM).publisher(deadline_ms=300_000) as publisher:
            at = 0
            while not self._over.is_set():
                payloads = [b"%d" % (at + n) for n in range(BATCH)]
                receipt = await publisher.publish_batch(
                    list(map(felix.NewRecord, payloads)), at // BATCH % SHARDS
                )
                for n, payload in enumerate(payloads):
                    self._published[payload] = (receipt.shard, receipt.base_offset + n)
                at += BATCH
                # Consumers write line after line and are slower.
                if len(self._published) - self._acknowledged() > BEHIND_MAX:
                    await asyncio.sleep(BEHIND_LOOK_S)

    def _acknowledged(self) -> int:
        return sum(worker.journal.read_bytes().count(b"acked ") for worker in self._workers)

    async def _state(self, region: felix.RegionClient) -> SubscriptionState:
        return await region.stream(STREAM).describe_subscription(SUBSCRIPTION)

    async def stop(self) -> None:
        self._over.set()
        assert self._producing is not None
        assert self._region is not None
        await asyncio.wait_for(self._producing, 120)
        limit = time.monotonic() + DRAIN_S
        # What killed consumers held comes back when its time is over.
        while time.monotonic() < limit and _behind(await self._state(self._region)):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        for worker in self._workers:
            await asyncio.to_thread(worker.end)

    async def settle(self, region: felix.RegionClient) -> Books:
        state = await self._state(region)
        problems = []
        got: set[bytes] = set()
        came = acknowledged = refused = 0
        for worker in self._workers:
            for line in worker.lines():
                what, payload = line.split(" ")
                if what == "got":
                    got.add(payload.encode())
                    came += 1
                elif what == "acked":
                    acknowledged += 1
                else:
                    refused += 1
        if missing := set(self._published) - got:
            problems.append(f"{len(missing)} records never reached a consumer")
        if behind := _behind(state):
            problems.append(f"{behind} records are not acknowledged: {state.shards}")
        if state.dead:
            problems.append(f"{state.dead} records went to the dead letters")
        return Books(
            {
                "published": len(self._published),
                "deliveries": came,
                "acknowledged": acknowledged,
                "acknowledgements that did not count": refused,
                "redelivered, said by the last broker": state.redelivered,
            },
            problems,
        )


def _behind(state: SubscriptionState) -> int:
    return sum(shard.high_watermark - shard.committed for shard in state.shards)
