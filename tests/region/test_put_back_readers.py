"""Readers of a log that was put back to an earlier copy, and has grown beyond where they stood by the time that they come again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

from ports import claim_port
from region_home import running, us_east
from region_peer import client, until

import felix
from felix.address import Address
from felix.cache import Change, Position
from felix.frames import GapReason
from region.folder import RegionFolder

ORDERS, STATE = "acme/ops/orders", "acme/ops/state"


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


async def test_a_watch_and_a_mirror_begin_anew_where_the_cache_that_they_followed_was_put_back(
    tmp_path: Path,
) -> None:
    folder, listen = us_east(tmp_path / "home"), Address("127.0.0.1", claim_port())
    async with running(folder, listen=listen), client(folder) as region:
        cache = await region.create_cache(STATE)
        await cache.put("lost later", b"1")
        await cache.put("kept", b"1")
    async with AsyncExitStack() as stack:
        with put_back(folder, tmp_path / "copy"):
            async with running(folder, listen=listen), client(folder) as region:
                reader = await stack.enter_async_context(client(folder))
                watch = await stack.enter_async_context(reader.cache(STATE).watch())
                mirror = await stack.enter_async_context(reader.cache(STATE).mirror())
                for number in range(5):
                    await region.cache(STATE).put("lost", b"%d" % number)
                await region.cache(STATE).delete("lost later")
                await until(lambda: set(mirror) == {b"kept", b"lost"})
                async with asyncio.timeout(60):
                    async for change in watch:
                        if change.kind == "deleted":
                            position = change.position
                            break
                assert position is not None
        async with running(folder, listen=listen), client(folder) as region:
            for number in range(9):
                await region.cache(STATE).put("new", b"%d" % number)
            await until(
                lambda: mirror.get(b"new") == b"8" and set(mirror) == {b"kept", b"lost later", b"new"}
            )
            assert (await told(watch))[0].kind == "reset"
            kept = Position.parse(str(position))
            assert kept == position
            async with region.cache(STATE).watch(resume=kept) as again:
                assert (await told(again))[0].kind == "reset"
                at = again.position
            assert at is not None
            # What came there since the restart goes on without one.
            await region.cache(STATE).put("newer", b"1")
            async with region.cache(STATE).watch(resume=str(at)) as again:
                first, *_ = await told(again)
                assert (first.kind, first.key) == ("put", b"newer")
            # And without epochs, as of an earlier release, by its offset.
            bare = Position(position.incarnation, position.offsets)
            async with region.cache(STATE).watch(resume=str(bare)) as again:
                assert (await told(again))[0].kind == "put"


async def told(watch: felix.Watch) -> list[Change]:
    """Changes up to the next `ready`."""
    found = []
    async with asyncio.timeout(60):
        async for change in watch:
            found.append(change)
            if change.kind == "ready":
                break
    return found


async def test_a_watch_that_its_broker_left_in_order_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, listen = us_east(tmp_path / "home"), Address("127.0.0.1", claim_port())
    async with AsyncExitStack() as stack:
        for start in range(3):
            async with running(folder, listen=listen), client(folder) as region:
                if not start:
                    reader = await stack.enter_async_context(client(folder))
                    await region.create_cache(STATE)
                    watch = await stack.enter_async_context(reader.cache(STATE).watch())
                    await told(watch)
                for number in range(3):
                    await region.cache(STATE).put("key", b"%d" % number)
                    async with asyncio.timeout(60):
                        change = await anext(watch)
                    assert (change.kind, change.value) == ("put", b"%d" % number), start


async def test_a_publisher_and_a_worker_that_run_go_on_with_what_was_put_back(tmp_path: Path) -> None:
    folder, listen = us_east(tmp_path / "home"), Address("127.0.0.1", claim_port())
    jobs = "acme/ops/jobs"
    async with AsyncExitStack() as stack:
        async with running(folder, listen=listen), client(folder) as region:
            writer = await stack.enter_async_context(client(folder))
            await region.create_stream(ORDERS)
            await region.create_queue(jobs)
            publisher = await stack.enter_async_context(writer.stream(ORDERS).publisher())
            for number in range(3):
                await publisher.send(b"%d" % number)
            await publisher.flush()
            await region.queue(jobs).put_many([b"0", b"1"])
        with put_back(folder, tmp_path / "copy"):
            async with running(folder, listen=listen), client(folder) as region:
                for number in range(3, 8):
                    await publisher.send(b"%d" % number)
                await publisher.flush()
                worker = await stack.enter_async_context(writer.queue(jobs).consume())
                await region.queue(jobs).put(b"lost")
                async with asyncio.timeout(60):
                    held = [await anext(worker) for _ in range(3)]
                await held[0].ack()
        async with running(folder, listen=listen), client(folder) as region:
            for number in range(100, 104):
                await publisher.send(b"%d" % number)
            await publisher.flush()
            found = await take(region.stream(ORDERS).subscribe("earliest"), 7)
            assert [payload for _, payload in found] == [b"0", b"1", b"2", b"100", b"101", b"102", b"103"]
            # A lease that nobody remembers settles nothing, whatever job has the offset now.
            await region.queue(jobs).put(b"instead")
            for job in held[1:]:
                with suppress(felix.FelixError):
                    await job.ack()
            done = []
            async with asyncio.timeout(60):
                async for job in worker:
                    await job.ack()
                    done.append(bytes(job.payload))
                    if len(done) == 3:
                        break
            assert sorted(done) == [b"0", b"1", b"instead"]
