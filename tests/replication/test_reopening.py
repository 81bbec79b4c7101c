"""Copies whose disk fails for a moment are opened again by the broker that has them, and are in sync again without a restart."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from long_runs import count
from replication.replicated_region import NAMES, SimulatedRegion, failing, play
from replication.test_host import settle

from felix.reopening import REOPEN_MS_MAX, REOPEN_MS_MIN, SOUND_MS, Reopening
from felix.storage.memory import MemoryDisk


def disk_of(region: SimulatedRegion, name: str) -> MemoryDisk:
    disk = region.machines[name].disk
    assert disk is not None
    return disk


def other_than_leader(region: SimulatedRegion) -> str:
    leader = region.leader(region.shards[0])
    assert leader is not None
    return next(name for name in NAMES if name != leader.name)


def has_failed(region: SimulatedRegion, name: str) -> bool:
    return "its disk has failed" in region.running[name].host.alarms.get(region.shards[0], "")


def contents(disk: MemoryDisk) -> dict[Path, bytes]:
    """The files of a copy's log of records, as they are read."""
    found = {}
    for path in disk.files():
        if "s0-0" in str(path):
            descriptor = disk.mounted.open(path, os.O_RDONLY)
            found[path] = disk.mounted.pread(descriptor, disk.mounted.size(descriptor), 0)
            disk.mounted.close(descriptor)
    return found


async def go_on(region: SimulatedRegion, appends: int) -> None:
    told = region.acknowledged()
    await region.until(lambda: region.acknowledged() > told + appends, 300)


async def fail_a_sync(region: SimulatedRegion, name: str) -> None:
    disk_of(region, name).on_call = failing(("sync",), errno.EIO, 1)
    await region.until(lambda: has_failed(region, name))
    disk_of(region, name).on_call = None


def test_pauses_double_up_to_a_limit_and_are_short_again_after_a_while() -> None:
    reopening, now, pauses = Reopening(), 0, []
    for _ in range(10):
        reopening.failed(now)
        pauses.append(reopening.due_ms - now)
        assert not reopening.is_due(reopening.due_ms - 1)
        now = reopening.due_ms
        assert reopening.is_due(now)
    assert pauses == [min(REOPEN_MS_MAX, REOPEN_MS_MIN << n) for n in range(10)]
    reopening.opened(now)
    assert not reopening.is_due(now + REOPEN_MS_MAX)
    reopening.failed(now + SOUND_MS - 1)
    assert reopening.pause_ms == REOPEN_MS_MAX
    reopening.opened(now)
    reopening.failed(now + SOUND_MS)
    assert reopening.pause_ms == REOPEN_MS_MIN


@pytest.mark.parametrize("seed", range(count(2, 40)))
@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_copy_whose_sync_fails_once_is_in_sync_again_without_a_restart(
    who: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What the failed sync left in the page cache is written anew: the power goes afterwards."""

    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 50)
        leader = region.leader(shard)
        assert leader is not None
        name = leader.name if who == "leader" else other_than_leader(region)
        broker = region.running[name]
        await fail_a_sync(region, name)
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 20)
        assert not broker.host.serves(shard)
        await region.until(lambda: broker.host.reopener.opened)
        await settle(region)
        assert region.running[name] is broker and broker.host.reopener.opened == 1 and not broker.host.alarms
        assert sum("open again" in line for line in caplog.messages) == 1
        region.kill(name, power=True)
        await region.start(name)
        await region.well()
        region.check()

    caplog.set_level(logging.WARNING, "felix.region.replication")
    play(scene, seed)


@pytest.mark.parametrize("seed", range(count(1, 20)))
@pytest.mark.parametrize("call", ["pwritev", "sync", "sync_folder", "rename", "open", "pread"])
def test_whatever_call_fails_once_at_each_broker_nobody_has_to_restart_one(call: str, seed: int) -> None:
    """Of a log's files, of its epochs, of what is known of its commit point; also while its copy is opened again."""

    async def scene(region: SimulatedRegion) -> None:
        def failing_at(which: int) -> Callable[[str, Path], None]:
            seen = 0

            def on_call(called: str, path: Path) -> None:
                nonlocal seen
                if called == call and "s0-" in str(path):
                    seen += 1
                    if seen == which:
                        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

            return on_call

        region.append_all_the_time()
        before = dict(region.running)
        for _ in range(2):
            for name in region.random.sample(NAMES, len(NAMES)):
                disk_of(region, name).on_call = failing_at(region.random.randrange(1, 40))
                await go_on(region, 15)
        for name in NAMES:
            disk_of(region, name).on_call = None
        await region.no_more_appends()
        await region.until(region.is_well, 700)
        region.check()
        assert region.running == before
        assert all(not broker.host.alarms for broker in region.running.values())
        for name in NAMES:
            region.kill(name, power=True)
        await region.start(*NAMES)
        await region.well()
        region.check()

    play(scene, seed)


@pytest.mark.parametrize("seed", range(count(2, 40)))
def test_where_the_disks_of_all_copies_fail_all_is_served_again_without_a_restart(seed: int) -> None:
    async def scene(region: SimulatedRegion) -> None:
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 50)
        before = region.acknowledged()
        for name in NAMES:
            disk_of(region, name).on_call = failing(("sync",), errno.EIO, 2)
        await region.until(lambda: all(has_failed(region, name) for name in NAMES))
        for name in NAMES:
            disk_of(region, name).on_call = None
        await region.until(lambda: region.acknowledged() > before + 50)
        await settle(region)
        for name in NAMES:
            region.kill(name, power=True)
        await region.start(*NAMES)
        await region.well()
        region.check()

    play(scene, seed)


def test_a_disk_that_stays_broken_is_tried_seldom_and_its_copy_comes_back_once_it_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard, name = region.shards[0], other_than_leader(region)
        broker = region.running[name]

        def broken(call: str, path: Path) -> None:
            if ".seg" in path.name and call in ("sync", "open"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

        region.append_all_the_time()
        disk_of(region, name).on_call = broken
        await region.until(lambda: has_failed(region, name))
        await region.no_more_appends()
        await asyncio.sleep(300)
        assert "opened again by themselves" in broker.host.alarms[shard]
        assert not broker.host.reopener.opened and has_failed(region, name)
        tries = [line for line in caplog.messages if "cannot be opened again" in line]
        assert 3 <= len(tries) <= 7, tries
        disk_of(region, name).on_call = None
        await region.until(lambda: broker.host.reopener.opened, 700)
        await settle(region)
        assert not broker.host.serves(shard) and not broker.host.alarms

    caplog.set_level(logging.WARNING, "felix.region.replication")
    play(scene, 3)


@pytest.mark.parametrize("what", ["damaged", "older", "older with its commit point"])
def test_a_copy_that_has_not_what_it_acknowledged_stays_stopped_and_says_so(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nothing on its disk tells that: what this process had acknowledged does."""

    async def scene(region: SimulatedRegion) -> None:
        shard, name = region.shards[0], other_than_leader(region)
        broker, disk = region.running[name], disk_of(region, name)
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 20)
        older = contents(disk)
        await region.until(lambda: region.acknowledged() > 60)
        await fail_a_sync(region, name)
        await region.no_more_appends()
        await asyncio.sleep(1)
        if what == "damaged":
            older = {path: data[: len(data) // 2] for path, data in contents(disk).items()}
        for path in contents(disk):
            if what == "older" and path.name.endswith(".commit"):
                continue
            disk.mounted.remove(path)
            if path in older:
                descriptor = disk.mounted.open(path, os.O_RDWR | os.O_CREAT)
                disk.mounted.pwritev(descriptor, (older[path],), 0)
                disk.mounted.close(descriptor)
        await region.until(lambda: "not opened again before a restart" in broker.host.alarms[shard])
        await asyncio.sleep(100)
        assert not broker.host.reopener.opened and broker.host.disks(shard) == {}
        assert sum("not opened again" in line for line in caplog.messages) == 1
        record = region.record(shard)
        assert record is not None and name not in record.members()
        region.kill(name)
        await region.start(name)
        await settle(region)

    caplog.set_level(logging.WARNING, "felix.region.replication")
    play(scene, 5)


def test_a_copy_that_is_elected_though_it_has_just_failed_gives_way_and_may_lead_once_it_is_open_again() -> (
    None
):
    """Its leader died before it heard of it."""

    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader, name = region.leader(shard), other_than_leader(region)
        assert leader is not None
        (third,) = {*NAMES} - {leader.name, name}
        region.kill(third)
        await region.until(lambda: (record := region.record(shard)) and third not in record.isr)
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 20)
        fail = failing(("sync",), errno.EIO, 1)

        def fail_and_end_the_leader(call: str, path: Path) -> None:
            try:
                fail(call, path)
            except OSError:
                region.loop.call_soon_threadsafe(region.kill, leader.name)
                raise

        disk_of(region, name).on_call = fail_and_end_the_leader
        await region.until(lambda: leader.name not in region.running)
        disk_of(region, name).on_call = None
        await region.until(lambda: has_failed(region, name))
        await region.until(lambda: (record := region.record(shard)) and record.failed)
        await region.until(lambda: region.running[name].host.reopener.opened)
        await region.until(lambda: (record := region.record(shard)) and record.leader == name)
        await region.start(third)
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 20)
        await region.start(leader.name)
        await settle(region)

    play(scene, 9)


def test_a_copy_that_moves_away_while_it_is_opened_again_is_gone() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard, name = region.shards[0], other_than_leader(region)
        host = region.running[name].host
        region.append_all_the_time()
        await fail_a_sync(region, name)
        region.loop.work_s_max = 1.0
        await region.until(lambda: host._hosted[shard].is_abandoned)
        await host.remove(shard)
        assert not host.shards and not host.reopener.is_waiting(shard)
        await asyncio.sleep(30)
        assert not host.shards and not host.reopener.opened and not host.alarms
        await region.no_more_appends()

    play(scene, 7)
