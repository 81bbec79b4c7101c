"""A producer process that is killed: `stream_worker.py HOME JOURNAL STREAM`.

It writes place and payload of each acknowledged record into its journal. Each run uses payloads of its own, so that nothing that a
killed run left behind can look like a repeat.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from soak.harness import Journal
from soak.streams import PACE_S

import felix

BATCH = 10


async def main(home: Path, journal: Journal, stream: str) -> None:
    run = os.urandom(4).hex()
    profile = felix.load_profile("us-east", home=home)
    async with (
        felix.connect(profile=profile) as region,
        region.stream(stream).publisher(deadline_ms=300_000) as publisher,
    ):
        at = 0
        while True:
            payloads = [b"run-%s %d" % (run.encode(), at + n) for n in range(BATCH)]
            receipt = await publisher.publish_batch(list(map(felix.NewRecord, payloads)), at // BATCH % 2)
            for n, payload in enumerate(payloads):
                journal.write(f"{receipt.shard} {receipt.base_offset + n} {payload.decode()}")
            at += BATCH
            await asyncio.sleep(PACE_S)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Journal(sys.argv[2]), sys.argv[3]))
