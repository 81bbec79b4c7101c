"""Readers of a log that was put back to an earlier copy, and has grown beyond where they stood by the time that they come again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from ports import claim_port
from region_home import running, us_east
from region_peer import client

import felix
from felix.address import Address
from felix.frames import GapReason
from region.folder import RegionFolder

ORDERS = "acme/ops/orders"


@contextmanager
def put_back(folder: RegionFolder, copy: Path) -> Iterator[None]:
    """What is in the data folder by now is lost at the end of the block, and a copy of how it was at the beginning stands there."""
    data = folder.root / "data"
    shutil.copytree(data, copy)
    yield
    shutil.rmtree(data)
    shutil.copytree(copy, data)


async def publish(region: felix.RegionClient, *numbers: int) -> None:
    for number in numbers:
        await region.stream(ORDERS).publish(b"%d" % number)


async def take(subscription: felix.Subscription, count: int) -> list[tuple[int, bytes]]:
    found = []
    async with asyncio.timeout(60):
        async for record in subscription:
            found.append((record.offset, record.payload))
            if len(found) == count:
                break
    return found


async def test_a_reader_is_told_where_the_log_that_it_read_ends_and_is_given_what_stands_there_now(
    tmp_path: Path,
) -> None:
    folder, listen = us_east(tmp_path / "home"), Address("127.0.0.1", claim_port())
    async with running(folder, listen=listen), client(folder) as region:
        await region.create_stream(ORDERS)
        await publish(region, *range(10))
    async with AsyncExitStack() as stack:
        with put_back(folder, tmp_path / "copy"):
            async with running(folder, listen=listen), client(folder) as region:
                reader = await stack.enter_async_context(client(folder))
                subscription = reader.stream(ORDERS).subscribe("earliest")
                await publish(region, *range(10, 20))
                assert len(await take(subscription, 20)) == 20
                positions, epochs = subscription.positions, subscription.epochs
        async with running(folder, listen=listen), client(folder) as region:
            # Before the reader is back, the log is longer than it ever was.
            await publish(region, *range(100, 130))
            again = [(10 + number, b"%d" % (100 + number)) for number in range(30)]
            assert await take(subscription, 30) == again
            (gap,) = subscription.gaps
            assert (gap.reason, gap.first_offset, gap.next_offset) == (GapReason.TRUNCATED, 20, 10)
            # The same by what a program kept of it.
            kept = region.stream(ORDERS).subscribe(
                offsets=positions, epochs=epochs, incarnation=subscription.incarnation
            )
            assert await take(kept, 30) == again
            assert [each.next_offset for each in kept.gaps] == [10]
            # One who had nothing of what is lost hears of no loss.
            async with region.stream(ORDERS).subscribe(
                offsets=subscription.positions,
                epochs=subscription.epochs,
                incarnation=subscription.incarnation,
            ) as whole:
                await publish(region, 130)
                assert await take(whole, 1) == [(40, b"130")]
                assert not whole.gaps


async def test_a_reader_of_a_log_that_is_still_shorter_gets_all_that_was_written_since(
    tmp_path: Path,
) -> None:
    folder, listen = us_east(tmp_path / "home"), Address("127.0.0.1", claim_port())
    async with running(folder, listen=listen), client(folder) as region:
        await region.create_stream(ORDERS)
        await publish(region, *range(10))
    async with AsyncExitStack() as stack:
        with put_back(folder, tmp_path / "copy"):
            async with running(folder, listen=listen), client(folder) as region:
                reader = await stack.enter_async_context(client(folder))
                subscription = reader.stream(ORDERS).subscribe("earliest")
                await publish(region, *range(10, 20))
                await take(subscription, 20)
        async with running(folder, listen=listen), client(folder) as region:
            await publish(region, *range(100, 105))
            assert await take(subscription, 5) == [(10 + n, b"%d" % (100 + n)) for n in range(5)]
            assert [(each.first_offset, each.next_offset) for each in subscription.gaps] == [(20, 10)]
