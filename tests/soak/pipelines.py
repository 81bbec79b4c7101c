"""A queue whose workers do each job in a transaction, the result and the acknowledgement together, while they and the broker are killed.

Settled: every acknowledged job has exactly one result, however often it was worked on; and the queue says that nothing is left.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from soak.harness import Books, Worker, duplicates, load

import felix

JOBS = "acme/soak/invoices"
RESULTS = "acme/soak/receipts"
WORKERS = 2
BATCH = 5
BACKLOG_MAX = load(30, 300)
BACKLOG_LOOK_S = 0.1
VISIBILITY_S = 3.0
"""What a killed worker held comes back soon."""
DRAIN_S = 120.0


class PipelinePart:
    """See the module."""

    name = "pipelines"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._put: list[bytes] = []
        self._over = asyncio.Event()
        self._producing: asyncio.Task[None] | None = None
        self._workers: list[Worker] = []
        self._region: felix.RegionClient | None = None

    async def start(self, region: felix.RegionClient) -> list[Worker]:
        self._region = region
        await region.create_queue(JOBS, visibility=VISIBILITY_S, attempts=0, retry=0.1)
        await region.create_stream(RESULTS, shards=2)
        self._producing = asyncio.ensure_future(self._produce(region))
        self._workers = [
            Worker(self._home, "pipeline_worker", f"pipeline-{number}", JOBS, RESULTS)
            for number in range(WORKERS)
        ]
        return self._workers

    def progress(self) -> int:
        if self._producing is not None and self._producing.done():
            self._producing.result()
        return len(self._put)

    async def _produce(self, region: felix.RegionClient) -> None:
        queue = region.queue(JOBS)
        while not self._over.is_set():
            jobs = [b"%d" % (len(self._put) + n) for n in range(BATCH)]
            await queue.put_many(jobs)
            self._put += jobs
            if len(self._put) - await self._results(region) > BACKLOG_MAX:
                await asyncio.sleep(BACKLOG_LOOK_S)

    async def _results(self, region: felix.RegionClient) -> int:
        return sum(shard.high_watermark for shard in (await region.describe_stream(RESULTS)).state)

    async def _left(self, region: felix.RegionClient) -> int:
        state = await region.queue(JOBS).describe()
        return state.ready + state.leased + state.delayed + state.waiting

    async def stop(self) -> None:
        self._over.set()
        assert self._producing is not None
        assert self._region is not None
        await asyncio.wait_for(self._producing, 120)
        limit = time.monotonic() + DRAIN_S
        # What killed workers held comes back when its time is over.
        while time.monotonic() < limit and await self._left(self._region):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        for worker in self._workers:
            await asyncio.to_thread(worker.end)

    async def settle(self, region: felix.RegionClient) -> Books:
        total = await self._results(region)
        results: list[bytes] = []
        async with region.stream(RESULTS).subscribe("earliest", on_gap="raise") as reader:
            async for batch in reader.batches():
                results += map(bytes, batch.payloads())
                if len(results) >= total:
                    break
        problems = []
        if missing := set(self._put) - set(results):
            problems.append(f"{len(missing)} jobs have no result")
        if twice := duplicates(results):
            problems.append(f"{twice} jobs have two results")
        if left := await self._left(region):
            problems.append(f"{left} jobs are left")
        lines = [line for worker in self._workers for line in worker.lines()]
        tried = sum(line.startswith("got ") for line in lines)
        failed = sum(line.startswith("failed ") for line in lines)
        return Books(
            {
                "put": len(self._put),
                "results": len(results),
                "tried": tried,
                "transactions that failed": failed,
            },
            problems,
        )
