"""A process that appends to a shard and says on standard output what was acknowledged, until it is killed.

Arguments: folder, run. Each line: offset, payload. Each payload: run, publisher, sequence.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from log.building import batch_of, masked, serving

from felix.errors import FelixError
from region.log.segment_limits import SegmentLimits
from region.log.shard import Appended, ShardHooks, ShardLog, ShardSettings

PUBLISHERS = 8


def publish(shard: ShardLog, run: str, publisher: int, sequence: int) -> None:
    payload = f"{run}.{publisher}.{sequence}"

    def done(answer: Appended | FelixError) -> None:
        if isinstance(answer, FelixError):
            raise answer
        os.write(1, f"{answer.base_offset} {payload}\n".encode())
        publish(shard, run, publisher, sequence + 1)

    shard.append_nowait(batch_of(payload.encode() * 20), done, annotation=payload.encode(), slot=publisher)


async def main(folder: Path, run: str) -> None:
    settings = ShardSettings(segments=SegmentLimits(segment_bytes_max=100_000))
    async with serving(folder, settings, ShardHooks(seal=masked, open_batch=masked)) as shard:
        for publisher in range(PUBLISHERS):
            publish(shard, run, publisher, 0)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
