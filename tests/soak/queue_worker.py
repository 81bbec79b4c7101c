"""A worker of a queue that is killed: `queue_worker.py HOME JOURNAL QUEUE`.

It writes which job it got, and what became of its acknowledgement: done, lost (another worker has the job), unknown (no answer).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from soak.harness import Journal

import felix

PREFETCH = 16


async def main(home: Path, journal: Journal, name: str) -> None:
    async with (
        felix.connect(profile=felix.load_profile("us-east", home=home)) as region,
        region.queue(name).consume(prefetch=PREFETCH) as consumer,
    ):
        async for job in consumer:
            text = job.payload.decode()
            journal.write(f"got {text}")
            try:
                await job.ack()
            except felix.RequestError as error:
                if error.code is not felix.Code.LEASE_LOST:
                    raise
                journal.write(f"lost {text}")
            except felix.UnavailableError:
                journal.write(f"unknown {text}")
            else:
                journal.write(f"done {text}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Journal(sys.argv[2]), sys.argv[3]))
