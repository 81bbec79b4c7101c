"""A consumer as a process of its own, to be killed: writes down what it got, and what it knows to be acknowledged.

Arguments: the region's home folder, its name, the stream, the subscription, the file to write to.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import felix


async def consume(home: Path, region: str, stream: str, name: str, report: Path) -> None:
    profile = felix.load_profile(region, home=home)
    with report.open("a", buffering=1) as said:
        async with (
            felix.connect(
                profile=profile, backoff=felix.BackoffPolicy(first_ms=5, ceiling_ms=100), connect_timeout_s=60
            ) as client,
            client.stream(stream).consumer(name) as consumer,
        ):
            async for record in consumer:
                said.write(f"{time.monotonic_ns()} got {record.payload!r}\n")
                if await consumer.ack(record):
                    said.write(f"{time.monotonic_ns()} acked {record.payload!r}\n")


if __name__ == "__main__":
    asyncio.run(consume(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], Path(sys.argv[5])))
