"""Copies whose disk fails for a moment are opened again by the broker that has them, and are in sync again without a restart."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from long_runs import count
from replication.replicated_region import NAMES, SimulatedRegion, failing, play
from replication.test_host import settle

from felix.errors import CorruptionError
from felix.reopening import REOPEN_MS_MAX, REOPEN_MS_MIN, SOUND_MS, Reopening
from felix.runtime.simulated import WORK_S_MAX
from felix.storage.memory import MemoryDisk
from region.cluster.transactions import Transaction
from region.log.disk_reader import READ_FAILURES_MAX
from region.log.segment_limits import SegmentLimits
from region.metadata.transaction import TransactResult
from region.replication.copier import Copier
from region.replication.disk import ReplicaDisk
from region.replication.ready import Keep


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


def wipe(disk: MemoryDisk) -> None:
    """The folder of a copy's log of records is gone; no process runs."""
    disk.mount().remove_folder(Path("/data/s0-0"))
    disk.kill()


def test_a_copy_that_is_built_anew_and_whose_disk_fails_meanwhile_goes_on_without_a_restart() -> None:
    """What it had was lost before: it lacks no more than it did, and counts for nothing until it has all."""

    async def scene(region: SimulatedRegion) -> None:
        shard, name = region.shards[0], other_than_leader(region)
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 60)
        # Its commit point is kept, and tells of what will be gone.
        await asyncio.sleep(2)
        region.kill(name)
        disk = disk_of(region, name)
        wipe(disk)
        others = [each for each in NAMES if each != name]
        for other in others:
            region.network.part(name, other, both=True)
        await region.start(name)
        broker = region.running[name]
        replica = broker.host.replica(shard)
        assert replica is not None and replica.lost
        await asyncio.sleep(1)
        # Nothing of the log has come yet.
        disk.on_call = failing(("sync", "pwritev"), errno.EIO, 1)
        region.network.heal()
        await region.until(lambda: has_failed(region, name))
        disk.on_call = None
        await region.until(lambda: broker.host.reopener.opened)
        opened = broker.host.replica(shard)
        assert opened is not None and opened is not replica
        await settle(region)
        assert region.running[name] is broker and not opened.lost and not broker.host.alarms

    play(scene, 11)


def test_nobody_is_told_how_far_a_copy_goes_whose_disk_has_failed() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard, name = region.shards[0], other_than_leader(region)
        host = region.running[name].host
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 20)
        assert host.end_of(shard) and not host.why_unknown(shard)
        await fail_a_sync(region, name)
        assert host.end_of(shard) is None and "its disk has failed" in host.why_unknown(shard)
        await region.until(lambda: host.reopener.opened)
        assert host.end_of(shard) and not host.why_unknown(shard)
        await settle(region)

    play(scene, 13)


async def with_two_in_sync(region: SimulatedRegion) -> tuple[str, str, str]:
    """The leader's name, that of the other broker in sync, and that of one which is down."""
    leader, name = region.leader(region.shards[0]), other_than_leader(region)
    assert leader is not None
    (third,) = {*NAMES} - {leader.name, name}
    region.append_all_the_time()
    await region.until(lambda: region.acknowledged() > 20)
    region.kill(third)
    await region.until(lambda: (record := region.record(region.shards[0])) and third not in record.isr)
    return leader.name, name, third


async def goes_on_with(region: SimulatedRegion, name: str, third: str, leader: str) -> None:
    before = region.acknowledged()
    await region.start(third)
    await region.until(lambda: region.acknowledged() > before + 20)
    await region.start(leader)
    await settle(region)
    assert not region.running[name].host.alarms


def test_a_copy_that_fails_after_it_was_elected_and_before_it_leads_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An election that comes while a log is being copied counts once that is done."""

    async def scene(region: SimulatedRegion) -> None:
        leader, name, third = await with_two_in_sync(region)
        shard = region.shards[0]
        host = region.running[name].host
        monkeypatch.setattr(Copier, "begin", lambda *_: None)
        assert host.copy_anew(shard, 0)
        region.kill(leader)
        await region.until(lambda: (record := region.record(shard)) and record.leader == name)
        await asyncio.sleep(1)
        assert host.is_copying(shard, 0) and not host.serves(shard)
        disk_of(region, name).on_call = failing_at_rename
        host._hosted[shard].workers[0].put(Keep(0, host.committed(shard, 0)))
        await region.until(lambda: has_failed(region, name))
        disk_of(region, name).on_call = None
        await region.until(lambda: host.reopener.opened)
        await goes_on_with(region, name, third, leader)

    play(scene, 17)


def failing_at_rename(call: str, path: Path) -> None:
    if call == "rename":
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_a_damaged_copy_that_is_elected_before_anybody_heard_of_it_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a restart builds it anew, and only from another copy: but others may be elected meanwhile."""

    async def scene(region: SimulatedRegion) -> None:
        leader, name, third = await with_two_in_sync(region)
        shard, host, write = region.shards[0], region.running[name].host, ReplicaDisk.write

        def damaged(disk: ReplicaDisk, *arguments: Any, **named: Any) -> None:
            if disk is host._hosted[shard].workers[0].disk:
                monkeypatch.undo()
                region.loop.call_soon_threadsafe(region.kill, leader)
                raise CorruptionError("It is damaged.")
            write(disk, *arguments, **named)

        monkeypatch.setattr(ReplicaDisk, "write", damaged)
        await region.until(lambda: leader not in region.running)
        await region.start(third)
        # It has all that was committed, as far as anybody knows.
        await region.until(lambda: (record := region.record(shard)) and record.yielded)
        await region.start(leader)
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 20)

    play(scene, 19)


def test_a_copy_that_is_open_again_before_its_word_that_it_cannot_lead_is_written_leads_nevertheless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was elected while it was opened, and the store takes long."""

    async def scene(region: SimulatedRegion) -> None:
        leader, name, third = await with_two_in_sync(region)
        host = region.running[name].host
        commit, held = host._mirror.commit, asyncio.Event()

        async def commit_late(made: Transaction) -> TransactResult | None:
            await held.wait()
            return await commit(made)

        await fail_a_sync(region, name)
        region.machines[name].standstill.begin()
        await region.until(lambda: host._hosted[region.shards[0]].broken)
        monkeypatch.setattr(host._mirror, "commit", commit_late)
        region.kill(leader)
        await region.until(lambda: host._eligibility.yielding)
        region.machines[name].standstill.end()
        await region.until(lambda: host.reopener.opened)
        await asyncio.sleep(0.5)
        held.set()
        await goes_on_with(region, name, third, leader)

    play(scene, 23)


@pytest.mark.parametrize("seed", range(count(2, 20)))
def test_copies_whose_disks_answer_again_may_lead_although_nobody_let_them_in_since(seed: int) -> None:
    """The last leader of several whose disks hung dies before it does."""

    async def scene(region: SimulatedRegion) -> None:
        shard, led = region.shards[0], list[str]()
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 50)
        for name in NAMES:
            region.machines[name].standstill.begin()

        def are_all_elected() -> bool:
            record = region.record(shard)
            if record is not None and record.leader and record.leader not in led:
                led.append(record.leader)
            return len(led) == len(NAMES)

        await region.until(are_all_elected)
        region.kill(led[-1])
        await asyncio.sleep(1)
        for name in led[:-1]:
            region.machines[name].standstill.end()
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 20)
        region.machines[led[-1]].standstill.end()
        await region.start(led[-1])
        await settle(region)

    play(scene, seed)


def bad(path: Path, disk: MemoryDisk) -> Callable[[str, Path], None]:
    """A sector of this file cannot be read, until another one takes its place."""

    def on_call(call: str, of: Path) -> None:
        if call == "rename" and path.name in of.name:
            disk.on_call = None
        elif of == path and call == "pread":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    return on_call


async def with_closed_segments(region: SimulatedRegion) -> tuple[str, Path]:
    """The leader's name, whose process has just begun, so that old records are not in memory; and the oldest of several segments."""
    shard = region.shards[0]
    leader = region.leader(shard)
    assert leader is not None
    name = leader.name
    for other in {*NAMES} - {name}:
        region.kill(other)
    await region.until(lambda: (record := region.record(shard)) and [*record.isr] == [name])
    region.kill(name)
    await region.start(name)
    await go_on(region, 5)
    found = {path for path in contents(disk_of(region, name)) if path.parent.name == "s0-0"}
    segments = sorted(path for path in found if path.suffix == ".seg")
    assert len(segments) > 1
    return name, segments[0]


@pytest.mark.parametrize("who", ["a reader", "another copy"])
def test_a_leader_that_nobody_can_follow_goes_on_beside_a_place_that_its_disk_does_not_give(who: str) -> None:
    """Of one bad sector in an old segment; publishers go on, and all is as ever once it can be read."""

    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 150)
        name, segment = await with_closed_segments(region)
        host, log, disk = region.running[name].host, region.running[name].log(shard, 0), disk_of(region, name)
        first, *others = sorted({*NAMES} - {name})
        disk.on_call = bad(segment, disk)
        if who == "a reader":
            for _ in range(3 * READ_FAILURES_MAX):
                with pytest.raises(
                    CorruptionError, match="cannot be read: they are damaged on this broker's disk"
                ):
                    await log.read(0, 100)
        else:
            wipe(disk_of(region, first))
            await region.start(first)
            await asyncio.sleep(20)
        assert host.serves(shard) and "could not be repaired" in host.alarms[shard]
        await go_on(region, 20)
        disk.on_call = None
        await region.until(lambda: not host.repairs.damaged)
        assert await log.read(0, 100)
        await region.start(first, *others)
        await settle(region)
        assert not host.alarms

    play(scene, 29, answers_early=True)


def test_what_a_leaders_disk_does_not_give_is_read_and_written_anew_from_another_copy() -> None:
    """Whoever else reads: nobody gives way for it, and the sector is not used any more."""

    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 150)
        name, segment = await with_closed_segments(region)
        await region.start(*sorted({*NAMES} - {name}))
        await region.well()
        broker, disk = region.running[name], disk_of(region, name)
        epoch = broker.host.epoch(shard)
        assert epoch
        disk.on_call = bad(segment, disk)
        read = await broker.log(shard, 0).read(0, 100)
        assert read and disk.on_call is None and broker.host.repairs.repaired == 1
        assert broker.host.epoch(shard) == epoch
        await settle(region)
        assert not broker.host.alarms

    play(scene, 31, answers_early=True)


def test_limits_that_are_altered_while_a_copy_is_opened_again_are_in_force() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard, name, limits = (
            region.shards[0],
            other_than_leader(region),
            SegmentLimits(segment_bytes_max=7_000),
        )
        host = region.running[name].host
        region.append_all_the_time()
        await fail_a_sync(region, name)
        region.loop.work_s_max = 3.0
        await region.until(lambda: host._hosted[shard].is_abandoned)
        host.limit_segments(shard, 0, limits)
        assert not host.reopener.opened
        region.loop.work_s_max = WORK_S_MAX
        await region.until(lambda: host.reopener.opened)
        disk = host.disks(shard)[0]
        assert disk.plan.limits == disk.log.limits == limits
        await settle(region)

    play(scene, 39)
