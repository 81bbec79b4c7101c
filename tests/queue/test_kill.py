"""A broker's process and workers are killed (SIGKILL) under load: no job is lost, none is recorded as done twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from long_runs import count
from region_peer import client, until
from region_process import ROOT, BrokerProcess, fixed_region

import felix
from felix import Code, FelixError
from region.folder import RegionFolder

pytestmark = pytest.mark.timeout(600)
JOBS = "acme/ops/jobs"
COUNT = 1_500
KILLS = int(os.environ.get("FELIX_QUEUE_KILLS", count(2, 4)))
"""Of the broker, and as many of workers."""
ATTEMPTS = 1_000


async def work(
    region: felix.RegionClient, chance: random.Random, recorded: dict[bytes, int], faults: list[str]
) -> None:
    """Take jobs for ever: give some back, acknowledge the others, and count what the queue confirmed."""
    jobs = region.queue(JOBS)
    while True:
        try:
            async with jobs.consume(prefetch=16, visibility=2) as consumer:
                async for job in consumer:
                    if chance.random() < 0.1:
                        job.nack(delay=0)
                        continue
                    await asyncio.sleep(0.005)
                    try:
                        await job.ack()
                    except FelixError as error:
                        if error.code is not Code.LEASE_LOST:
                            # Nobody knows whether it was recorded: the job comes again, or it was.
                            faults.append(error.code.name)
                        continue
                    recorded[job.payload] = recorded.get(job.payload, 0) + 1
        except FelixError as error:
            faults.append(error.code.name)
            await asyncio.sleep(0.05)


WORKER = """
import asyncio, sys
from pathlib import Path
import felix
async def main() -> None:
    async with felix.connect("us-east") as region:
        async with region.queue(sys.argv[1]).consume(prefetch=8, visibility=1) as consumer:
            async for job in consumer:
                await asyncio.sleep(0.01)
                await job.ack()
                print(job.payload.decode(), flush=True)
asyncio.run(main())
"""


async def doomed_worker(folder: RegionFolder, home: Path, chance: random.Random) -> list[bytes]:
    """A worker of its own process, killed in the middle of its work; what the queue confirmed to it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, JOBS,
        env={**os.environ, "FELIX_HOME": str(home), "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    lines: list[bytes] = []
    enough = chance.randrange(2, 8)

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            lines.append(line.strip())
            if len(lines) == enough:
                process.send_signal(signal.SIGKILL)

    reading = asyncio.ensure_future(read())
    await asyncio.wait({reading}, timeout=10)
    if not reading.done():
        process.kill()  # the queue has nothing left for it
        await reading
    await process.wait()
    return lines


async def test_no_job_is_lost_and_none_is_done_twice(tmp_path: Path) -> None:
    folder = fixed_region(tmp_path)
    chance = random.Random(3)
    broker = BrokerProcess(folder, tmp_path)
    recorded: dict[bytes, int] = {}
    faults: list[str] = []
    try:
        await asyncio.to_thread(broker.wait)
        async with client(folder) as region, client(folder) as other:
            await region.create_queue(JOBS, shards=2, attempts=ATTEMPTS, retry=0.01)
            jobs = region.queue(JOBS)
            await jobs.put_many([b"%d" % n for n in range(COUNT)])
            workers = [
                asyncio.ensure_future(work(each, random.Random(n), recorded, faults))
                for n, each in enumerate((region, other))
            ]
            for _ in range(KILLS):
                for line in await doomed_worker(folder, tmp_path, chance):
                    recorded[line] = recorded.get(line, 0) + 1
                before = len(recorded)
                await until(lambda before=before: len(recorded) >= min(COUNT, before + 20), 120)  # type: ignore[misc]
                broker.kill()
                broker = BrokerProcess(folder, tmp_path)
                await asyncio.to_thread(broker.wait)
            async with asyncio.timeout(120):
                while (state := await jobs.describe()).ready + state.leased + state.delayed:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            for worker in workers:
                worker.cancel()
            assert state.dead == 0
            seen = await region.describe_stream(JOBS)
            assert sum(shard.high_watermark for shard in seen.state) == COUNT
    finally:
        broker.kill()
    twice = {payload: count for payload, count in recorded.items() if count > 1}
    assert not twice, (
        f"recorded as done more than once: {json.dumps({k.decode(): v for k, v in twice.items()})}"
    )
    # What a killed worker or a lost answer left unsaid is done all the same; nothing else may be missing.
    missing = COUNT - len(recorded)
    assert missing <= KILLS * 8 + len(faults) * 16
