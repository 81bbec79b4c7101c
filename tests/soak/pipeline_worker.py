"""A worker that is killed: `pipeline_worker.py HOME JOURNAL JOBS RESULTS`.

For each job it publishes a result and acknowledges the job, in one transaction.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from soak.harness import Journal

import felix

PREFETCH = 8
PAUSE_S = 0.05


async def main(home: Path, journal: Journal, jobs: str, results: str) -> None:
    async with (
        felix.connect(profile=felix.load_profile("us-east", home=home)) as region,
        region.queue(jobs).consume(prefetch=PREFETCH) as consumer,
    ):
        async for job in consumer:
            text = job.payload.decode()
            journal.write(f"got {text}")
            try:
                async with region.transaction() as transaction:
                    await transaction.publish(results, job.payload, key=job.payload)
                    await transaction.acknowledge(job)
            except felix.FelixError as error:
                # Whether it was committed the queue knows: what is done is not handed out again.
                journal.write(f"failed {text} {error.code.name}")
                job.release()
                await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Journal(sys.argv[2]), *sys.argv[3:]))
