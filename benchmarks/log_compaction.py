"""Compaction beside the appends that made its log, on this machine and in the same run.

    PYTHONPATH=. python benchmarks/log_compaction.py [folder]

Prints MB of batches a second for plain durable appends, and MB of segments a second for one pass over them, which reads
them twice (once for the keys, once to copy), with the share of time it takes in a broker and with all of it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from felix.batch import Batch, NewRecord, encode_batch
from felix.names import StreamName
from felix.settings import Compaction
from keys.envelope import BatchSealer, DataKey, open_batch
from keys.key_id import RANDOM_BYTES, KeyKind, new_key_id
from region.log.maintenance import COMPACTION_SHARE
from region.log.segment import ShardIdentity
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardHooks, ShardLog, ShardSettings

IDENTITY = ShardIdentity("us-east", "bench/log/compact", bytes(16), 0)
RECORDS_PER_BATCH = 64
PAYLOAD = 256
BATCHES = 2_000
KEYS = 20_000
"""Of 128,000 records: most are superseded, and nearly every batch is split."""
AT_ONCE = 128


def batch_of(number: int) -> Batch:
    first = number * RECORDS_PER_BATCH
    return encode_batch(
        [
            NewRecord(bytes(PAYLOAD), b"key-%08d" % ((first + at) * 7_919 % KEYS))
            for at in range(RECORDS_PER_BATCH)
        ]
    )


async def measure(folder: Path, share: float) -> None:
    key_id = new_key_id("us-east", KeyKind.DATA, bytes(RANDOM_BYTES))
    key = DataKey(key_id, "us-east", StreamName.parse(IDENTITY.stream), bytes(16), 0, 0, bytes(32))
    sealer = BatchSealer(key)
    with ThreadPoolExecutor(4) as pool:
        shard = await ShardLog.open(
            folder,
            IDENTITY,
            ShardSettings(
                segments=SegmentLimits(segment_bytes_max=16 << 20), compaction=Compaction(), ring_bytes_max=1
            ),
            ShardHooks(sealer.seal, lambda batch: open_batch(key, batch)),
            commit_pool=pool,
            read_pool=pool,
        )
        batches = [batch_of(number) for number in range(BATCHES)]
        begun = time.perf_counter()
        for first in range(0, BATCHES, AT_ONCE):
            await asyncio.gather(*(shard.append(batch) for batch in batches[first : first + AT_ONCE]))
        appended_s = time.perf_counter() - begun
        appended = sum(batch.header.total_length for batch in batches) / 1e6
        begun = time.perf_counter()
        closed = shard.dirty_bytes / 1e6
        report = await shard.compact(time.time_ns() // 1_000_000, pool, share=share)
        compacted_s = time.perf_counter() - begun
        assert report is not None
        append_rate, compact_rate = appended / appended_s, closed / compacted_s
        print(
            f"append {append_rate:7.1f} MB/s   compaction at {share:.0%} of a thread {compact_rate:7.1f} MB/s "
            f"({report.records_removed:,} records removed)   ratio {compact_rate / append_rate:.2f}"
        )
        await shard.close()


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        for number, share in enumerate((COMPACTION_SHARE, 1.0)):
            asyncio.run(measure(Path(folder) / str(number), share))


if __name__ == "__main__":
    main()
