"""Durable appends against the same bytes written raw, on this machine and in the same run.

    PYTHONPATH=. python benchmarks/log_append.py [folder]

Prints one line per case: appends, MB and records a second, syncs, and the ratio to the raw loops. "raw group"
is what no log can beat: the same bytes, written and synced in groups of the size that the fsync case chose.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from felix.batch import Batch, NewRecord, encode_batch
from felix.names import StreamName
from felix.settings import EPHEMERAL, FSYNC, Durability
from keys.envelope import BatchSealer, DataKey
from keys.key_id import KeyKind, new_key_id
from region.log.disk import DiskLog
from region.log.segment import ShardIdentity
from region.log.shard import ShardHooks, ShardLog, ShardSettings

IDENTITY = ShardIdentity("us-east", "bench/log/append", bytes(16), 0)
RECORDS_PER_BATCH = 64
IN_FLIGHT = 256
"""Batches on their way at once: what a few dozen publishing sessions keep in flight."""
APPENDS = 6_000
RECOVERY_BYTES = 1 << 30


async def append_all(
    folder: Path | None, durability: Durability, batch: Batch, count: int, hooks: ShardHooks | None = None
) -> tuple[float, ShardLog]:
    """Seconds for `count` acknowledged appends with `IN_FLIGHT` at once."""
    with ThreadPoolExecutor(4) as pool:
        shard = await ShardLog.open(
            folder,
            IDENTITY,
            ShardSettings(durability=durability),
            hooks or ShardHooks(),
            commit_pool=pool,
            read_pool=pool,
        )
        finished = asyncio.Event()
        left, running = count, 0

        def done(answer: object) -> None:
            nonlocal running
            if isinstance(answer, Exception):
                raise answer
            running -= 1
            fill()

        def fill() -> None:
            nonlocal left, running
            while left and running < IN_FLIGHT:
                left -= 1
                running += 1
                shard.append_nowait(batch, done)
            if not left and not running:
                finished.set()

        begun = time.perf_counter()
        if durability is EPHEMERAL:
            for _ in range(count):
                shard.append_nowait(batch, lambda _: None)
        else:
            fill()
            await finished.wait()
        elapsed = time.perf_counter() - begun
        await shard.close()
    return elapsed, shard


def raw(path: Path, chunk: bytes, count: int) -> float:
    """Seconds for `count` times write and fdatasync of `chunk`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    begun = time.perf_counter()
    for _ in range(count):
        os.write(descriptor, chunk)
        os.fdatasync(descriptor)
    elapsed = time.perf_counter() - begun
    os.close(descriptor)
    path.unlink()
    return elapsed


def sealed() -> ShardHooks:
    """Hooks that seal as a broker's do: AES-256-GCM under a data key."""
    key = DataKey(
        new_key_id(IDENTITY.region, KeyKind.DATA, os.urandom(11)),
        IDENTITY.region,
        StreamName.parse(IDENTITY.stream),
        IDENTITY.incarnation,
        IDENTITY.shard,
        0,
        os.urandom(32),
    )
    return ShardHooks(seal=BatchSealer(key).seal, commitment=key.commitment)


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def reopen(folder: Path, full_verify: bool) -> None:
    DiskLog.open(folder, IDENTITY, now_ms=0, full_verify=full_verify)[0].close()


def main(folder: Path) -> None:
    batch = encode_batch([NewRecord(bytes(256))] * RECORDS_PER_BATCH)
    size = batch.header.total_length
    print(f"batch: {RECORDS_PER_BATCH} records of 256 B, {size} B; {IN_FLIGHT} in flight; {APPENDS} appends")
    rates: dict[str, float] = {}

    def line(name: str, count: int, elapsed: float, more: str = "") -> None:
        rates[name] = count / elapsed
        print(
            f"{name:22} {count / elapsed:9,.0f} appends/s {count * size / elapsed / 1e6:8,.0f} MB/s "
            f"{count * RECORDS_PER_BATCH / elapsed:12,.0f} records/s  {more}"
        )

    chunk = batch.encode()
    line("raw write+fdatasync", 1_000, raw(folder / "raw", chunk, 1_000))
    elapsed, shard = asyncio.run(append_all(folder / "fsync", FSYNC, batch, APPENDS))
    line("fsync, group commit", APPENDS, elapsed, f"{shard.counters.syncs} syncs")
    per_group = max(1, APPENDS // shard.counters.groups)
    line(
        "raw group",
        APPENDS // per_group * per_group,
        raw(folder / "raw", chunk * per_group, APPENDS // per_group),
        f"{per_group} batches a sync",
    )
    elapsed, shard = asyncio.run(append_all(folder / "sealed", FSYNC, batch, APPENDS, sealed()))
    line("fsync, sealed", APPENDS, elapsed, f"{shard.counters.syncs} syncs")
    elapsed, shard = asyncio.run(append_all(folder / "interval", Durability("interval", 50), batch, APPENDS))
    line("interval:50ms", APPENDS, elapsed, f"{shard.counters.syncs} syncs")
    elapsed, _ = asyncio.run(append_all(None, EPHEMERAL, batch, APPENDS))
    line("ephemeral", APPENDS, elapsed)
    print(f"fsync / raw one by one   {rates['fsync, group commit'] / rates['raw write+fdatasync']:.2f}")
    print(f"fsync / raw group        {rates['fsync, group commit'] / rates['raw group']:.2f}")

    count = RECOVERY_BYTES // size
    asyncio.run(append_all(folder / "large", Durability("interval", 1_000), batch, count))
    for name, full in (("clean stop", False), ("every byte verified", True)):
        elapsed = timed(partial(reopen, folder / "large", full))
        print(f"recovery of 1 GiB, {name:20} {elapsed:6.2f} s")
    for stale in (folder / "large").glob("producers"):
        stale.unlink()
    elapsed = timed(partial(reopen, folder / "large", False))
    print(f"recovery of 1 GiB, {'no producer snapshot':20} {elapsed:6.2f} s")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as temporary:
        main(Path(temporary))
