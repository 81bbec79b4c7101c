"""A consumer of a durable subscription that is killed: `consumer_worker.py HOME JOURNAL STREAM SUBSCRIPTION`.

It writes each record that it got, and whether its acknowledgement counted.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from soak.harness import Journal

import felix


async def main(home: Path, journal: Journal, stream: str, subscription: str) -> None:
    async with (
        felix.connect(profile=felix.load_profile("us-east", home=home)) as region,
        region.stream(stream).consumer(subscription) as consumer,
    ):
        async for batch in consumer.batches():
            for record in batch.records():
                journal.write(f"got {bytes(record.payload).decode()}")
            counted = await consumer.ack(batch)
            for record in batch.records():
                journal.write(f"{'acked' if counted else 'refused'} {bytes(record.payload).decode()}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Journal(sys.argv[2]), sys.argv[3], sys.argv[4]))
