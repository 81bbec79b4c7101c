"""The broker is killed (SIGKILL) in the middle of its work, again and again, and everything is back: streams, records,
rights, producers, subscriptions.

python examples/demos/restart.py [KILLS]
"""

import asyncio
import sys

from own_region import OwnRegion, Summary, say

import felix

STREAM = "acme/payments/orders"
SHARDS = 2
BETWEEN_KILLS = 2_000  # records acknowledged before the next one
CUSTOMERS = 50


async def publish(
    region: felix.RegionClient, acknowledged: list[tuple[int, int]], over: asyncio.Event
) -> None:
    """Orders, ten at a time; each place in the log is kept once it is acknowledged."""
    stream = region.stream(STREAM)
    while not over.is_set():
        first = len(acknowledged)
        orders = [
            felix.NewRecord(b"%d" % n, b"customer %d" % (n % CUSTOMERS)) for n in range(first, first + 10)
        ]
        receipt = await stream.publish_batch(orders, shard=first // 10 % SHARDS)
        acknowledged += [(receipt.shard, receipt.base_offset + at) for at in range(receipt.records)]


async def follow(subscription: felix.Subscription, found: dict[tuple[int, int], int]) -> None:
    async for batch in subscription.batches():
        for record in batch.records():
            place = (batch.shard, record.offset)
            assert place not in found, f"{place} came twice"
            found[place] = int(record.payload)


async def until(done: asyncio.Task[None], reached: list[tuple[int, int]], count: int) -> None:
    """Until so much is acknowledged; what fails meanwhile is raised."""
    async with asyncio.timeout(300):
        while len(reached) < count:
            await asyncio.wait([done], timeout=0.01)
            if done.done():
                done.result()


async def run(own: OwnRegion, kills: int) -> int:
    summary = Summary(f"Killed {kills} times, and everything is back")
    command = asyncio.to_thread
    await command(own.cli, "stream", "create", STREAM, "--shards", str(SHARDS))
    await command(own.cli, "identity", "issue", "shop", "--allow", "publish acme/payments/*")
    await command(own.cli, "identity", "issue", "ledger", "--allow", "subscribe acme/payments/*")
    rights = await command(own.cli, "identity", "list", "--json")
    acknowledged: list[tuple[int, int]] = []
    followed: dict[tuple[int, int], int] = {}
    over = asyncio.Event()
    async with own.connect("shop") as shop, own.connect("ledger") as ledger:
        subscription = ledger.stream(STREAM).subscribe("earliest", on_gap="raise")
        following = asyncio.ensure_future(follow(subscription, followed))
        publishing = asyncio.ensure_future(publish(shop, acknowledged, over))
        for number in range(1, kills + 1):
            await until(publishing, acknowledged, number * BETWEEN_KILLS)
            await command(own.kill)
            say(f"SIGKILL {number} after {len(acknowledged):,} acknowledged records; felix region up")
            await command(own.up)
        await until(publishing, acknowledged, (kills + 1) * BETWEEN_KILLS)
        over.set()
        await publishing
        async with own.connect() as operator:
            state = await operator.describe_stream(STREAM)
        total = sum(shard.high_watermark for shard in state.state)
        async with asyncio.timeout(60):
            # Looked at now and then: the figures of two tasks, which know nothing of each other.
            while len(followed) < total and not following.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.wait([following])
        gaps = len(subscription.gaps)
        await subscription.close()
        reconnects = shop.reconnects
        read: list[tuple[int, int, int]] = []
        async with ledger.stream(STREAM).subscribe("earliest", on_gap="raise") as anew:
            async for batch in anew.batches():
                read += [(batch.shard, record.offset, int(record.payload)) for record in batch.records()]
                if len(read) >= total:
                    break
    held = {(shard, offset): number for shard, offset, number in read}
    moved = sum(held.get(place) != number for number, place in enumerate(acknowledged))
    order = all(
        [number for shard, _, number in sorted(read) if shard == each]
        == sorted(number for shard, _, number in read if shard == each)
        for each in range(SHARDS)
    )
    summary.figure("records acknowledged", len(acknowledged))
    summary.must("acknowledged records lost or moved", moved, 0)
    summary.must("records in the log", total, len(acknowledged))
    summary.must("published twice, though retried", len(read) - len({number for *_, number in read}), 0)
    summary.must("in the order of publishing, in each shard", order, True)
    summary.must("one subscription across all kills saw each once", followed == held, True)
    summary.must("gaps that it was told of", gaps, 0)
    after = await command(own.cli, "identity", "list", "--json")
    summary.must("identities and rights are as before", after == rights, True)
    summary.figure("times the publisher's session was made anew", reconnects)
    return summary.end()


def main(kills: int = 5) -> int:
    with OwnRegion() as own:
        return asyncio.run(run(own, kills))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
