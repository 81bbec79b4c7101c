"""A subscriber that stops reading, beside three that do not: these notice nothing, and it catches up without a gap.

python examples/demos/slow_consumer.py [RECORDS]
"""

import asyncio
import os
import sys
import time

from own_region import OwnRegion, Summary, say

import felix

STREAM = "acme/plant/readings"
FAST = 3
PAYLOAD_BYTES = 1024
PER_SECOND = 4_000
SLOW_CREDIT_BYTES = 2 << 20  # what the slow subscriber lets the broker send ahead


class Reader:
    """Reads one subscription, and checks that every record is the next one."""

    def __init__(self, region: felix.RegionClient, credit_bytes: int = 4 << 20) -> None:
        self.subscription = region.stream(STREAM).subscribe(
            "earliest", credit_bytes=credit_bytes, on_gap="raise"
        )
        self.next = 0
        self.times_ms: list[float] = []

    async def read_to(self, end: int) -> None:
        """Read on until record `end` - 1 has come."""
        async for batch in self.subscription.batches():
            now_ns = time.monotonic_ns()
            for record in batch.records():
                number, made_ns = (int.from_bytes(record.payload[at : at + 8]) for at in (0, 8))
                if (number, record.offset) != (self.next, self.next):
                    raise AssertionError(f"record {number} at {record.offset}, not {self.next}")
                self.next += 1
                self.times_ms.append((now_ns - made_ns) / 1e6)
            if self.next >= end:
                return


async def publish(publisher: felix.Publisher, first: int, count: int) -> None:
    """At an even pace."""
    begun = time.monotonic()
    for number in range(first, first + count):
        if number % 20 == 0:
            await asyncio.sleep(max(0.0, begun + (number - first) / PER_SECOND - time.monotonic()))
        stamp = number.to_bytes(8) + time.monotonic_ns().to_bytes(8)
        await publisher.send(stamp + os.urandom(PAYLOAD_BYTES - len(stamp)))
    await publisher.flush()


def p99_ms(times_ms: list[float]) -> float:
    return sorted(times_ms)[len(times_ms) * 99 // 100]


async def run(own: OwnRegion, records: int) -> int:
    alone = records // 10
    total = alone + records
    summary = Summary("Slow consumer beside fast ones")
    async with own.connect() as writer, own.connect() as region, own.connect() as elsewhere:
        await writer.create_stream(STREAM)
        fast = [Reader(region) for _ in range(FAST)]
        slow = Reader(elsewhere, SLOW_CREDIT_BYTES)
        async with writer.stream(STREAM).publisher() as publisher:
            say(f"{alone:,} records to {FAST} subscribers, alone")
            await asyncio.gather(publish(publisher, 0, alone), *(reader.read_to(alone) for reader in fast))
            alone_ms = p99_ms([each for reader in fast for each in reader.times_ms])
            for reader in fast:
                reader.times_ms.clear()

            say(f"{records:,} more, ten times as many, beside one that does not read at all")
            await slow.subscription.open()
            before = most = own.memory_bytes()
            publishing = asyncio.ensure_future(
                asyncio.wait_for(
                    asyncio.gather(
                        publish(publisher, alone, records), *(reader.read_to(total) for reader in fast)
                    ),
                    300,
                )
            )
            while not publishing.done():
                most = max(most, own.memory_bytes())
                await asyncio.wait([publishing], timeout=0.1)
            publishing.result()
            beside_ms = p99_ms([each for reader in fast for each in reader.times_ms])
        behind = total - slow.next
        gauges = (await writer.describe()).gauges

        say("the slow one begins to read")
        begun = time.monotonic()
        await asyncio.wait_for(slow.read_to(total), 300)
        caught_up_s = time.monotonic() - begun
        most = max(most, own.memory_bytes())
        gaps = sum(len(reader.subscription.gaps) for reader in (*fast, slow))
        for reader in (*fast, slow):
            await reader.subscription.close()

    summary.must("records published", total, total)
    for number, reader in enumerate(fast, 1):
        summary.must(f"fast subscriber {number}: records, in order", reader.next, total)
    summary.must("slow subscriber: behind, when all else was done", behind, total)
    summary.must("slow subscriber: records in the end, in order", slow.next, total)
    summary.must("gaps", gaps, 0)
    for name in ("publish", "delivery", "catch_up", "ring"):
        within = gauges[f"{name}_bytes"] <= gauges[f"{name}_bytes_limit"]
        summary.must(f"the broker's {name} budget was kept", within, True)
    summary.figure("fast subscribers' p99, alone", f"{alone_ms:.1f} ms")
    summary.figure("fast subscribers' p99, beside the slow one", f"{beside_ms:.1f} ms")
    summary.figure("the slow one caught up in", f"{caught_up_s:.2f} s")
    summary.figure("backlog", f"{records * PAYLOAD_BYTES / 1e6:.0f} MB")
    summary.figure("broker's memory grew by, at most", f"{(most - before) / 1e6:.0f} MB")
    return summary.end()


def main(records: int = 20_000) -> int:
    with OwnRegion() as own:
        return asyncio.run(run(own, records))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
