"""A queue under kills: jobs are put, workers lease and finish them, and broker and workers are killed.

Settled: every acknowledged job reached a worker; no job was finished twice as the queue records it (an acknowledgement was confirmed once at
most, whoever made it); no job stands in the log twice, though puts were retried; and in the end the queue itself says that nothing is
left.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from soak.harness import Books, Worker, duplicates, load

import felix
from felix.queue_messages import QueueState

QUEUE = "acme/soak/jobs"
PUTTERS = 2
WORKERS = 3
BATCH = 10
VISIBILITY_S = 3.0
"""What a killed worker held comes back soon."""
BACKLOG_MAX = load(100, 2_000)
BACKLOG_LOOK_S = 0.1
DRAIN_S = 120.0


class QueuePart:
    """See the module."""

    name = "queues"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._put: list[bytes] = []
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: list[Worker] = []
        self._region: felix.RegionClient | None = None

    async def start(self, region: felix.RegionClient) -> list[Worker]:
        self._region = region
        await region.create_queue(QUEUE, visibility=VISIBILITY_S, attempts=0, retry=0.1, shards=2)
        self._tasks = [asyncio.ensure_future(self._produce(region, who)) for who in range(PUTTERS)]
        self._workers = [
            Worker(self._home, "queue_worker", f"worker-{number}", QUEUE) for number in range(WORKERS)
        ]
        return self._workers

    def progress(self) -> int:
        for task in self._tasks:
            if task.done():
                task.result()
        return len(self._put)

    async def _produce(self, region: felix.RegionClient, who: int) -> None:
        queue = region.queue(QUEUE)
        at = 0
        while not self._over.is_set():
            jobs = [b"%d-%d" % (who, at + n) for n in range(BATCH)]
            await queue.put_many(jobs)
            self._put += jobs
            at += BATCH
            # The workers write line after line and are slower; a backlog without bound would only be drained at the end.
            if len(self._put) - self._finished() > BACKLOG_MAX:
                await asyncio.sleep(BACKLOG_LOOK_S)

    def _finished(self) -> int:
        return sum(worker.journal.read_bytes().count(b"done ") for worker in self._workers)

    async def stop(self) -> None:
        self._over.set()
        async with asyncio.timeout(120):
            await asyncio.gather(*self._tasks)
        assert self._region is not None
        limit = time.monotonic() + DRAIN_S
        # What killed workers held comes back when its time is over.
        while time.monotonic() < limit and _left(await self._state(self._region)):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        for worker in self._workers:
            await asyncio.to_thread(worker.end)

    async def _state(self, region: felix.RegionClient) -> QueueState:
        return await region.queue(QUEUE).describe()

    async def settle(self, region: felix.RegionClient) -> Books:
        state = await self._state(region)
        got: set[bytes] = set()
        done: list[bytes] = []
        lost = unknown = 0
        for worker in self._workers:
            for line in worker.lines():
                what, job = line.split(" ")
                if what == "got":
                    got.add(job.encode())
                elif what == "done":
                    done.append(job.encode())
                elif what == "lost":
                    lost += 1
                else:
                    unknown += 1
        stored: list[bytes] = []
        log = await region.describe_stream(QUEUE)
        total = sum(shard.high_watermark for shard in log.state)
        async with region.stream(QUEUE).subscribe("earliest") as reader:
            async for batch in reader.batches():
                stored += [bytes(record.payload) for record in batch.records()]
                if len(stored) >= total:
                    break
        problems = []
        if missing := set(self._put) - got:
            problems.append(f"{len(missing)} jobs never reached a worker")
        if twice := duplicates(done):
            problems.append(f"{twice} jobs were finished twice")
        if twice := duplicates(stored):
            problems.append(f"{twice} jobs were put twice")
        if missing := set(self._put) - set(stored):
            problems.append(f"{len(missing)} acknowledged jobs are not in the log")
        if left := _left(state):
            problems.append(f"{left} jobs are left: {state}")
        if state.dead:
            problems.append(f"{state.dead} jobs are dead")
        kills = sum(worker.kills for worker in self._workers)
        return Books(
            {
                "put": len(self._put),
                "finished, and confirmed to a worker": len(done),
                "finished, and the worker killed before it was told": len(got - set(done)),
                "leases lost": lost,
                "acknowledgements without an answer": unknown,
                "kills of workers": kills,
            },
            problems,
        )


def _left(state: QueueState) -> int:
    return state.ready + state.leased + state.delayed + state.waiting
