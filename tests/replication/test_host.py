"""Three brokers with real logs, links, registries and controllers, on simulated time: what was acknowledged is never lost, whatever fails."""

from __future__ import annotations

import asyncio
import errno
import logging
from dataclasses import replace
from typing import Any

import pytest
from cluster.simulated_brokers import Store
from long_runs import count
from replication.replicated_region import LOGS, NAMES, SimulatedRegion, failing, go_wrong, play
from slow_runs import only_slow

from felix.batch import NewRecord, encode_batch
from felix.errors import Code, RequestError, UnavailableError
from region.cluster.records import ShardId
from region.cluster.transactions import Reason, Refusal
from region.log.disk import DiskLog
from region.log.origin import Origin
from region.log.point import LogPoint
from region.log.producers import ProducerTable
from region.replication import copy_alarms
from region.replication import host as host_module
from region.replication import leader as leader_module
from region.replication.copies import HostedCopies
from region.replication.core import ReplicaCore
from region.replication.disk import ReplicaDisk
from region.replication.leader import HUNG_MS, LINK_DOWN_MS
from region.replication.log_worker import LogBegun
from region.replication.messages import Commit, Durable, Follow, LogPlace, Probe
from region.replication.ready import Begun, Ready, Tick
from region.replication.wire import Said


async def settle(region: SimulatedRegion) -> None:
    """Nobody appends any more, everybody is up: everything is served, and equal."""
    await region.no_more_appends()
    await region.well()
    region.check()


def test_what_is_appended_is_committed_by_all_copies_and_equal_on_them() -> None:
    async def scene(region: SimulatedRegion) -> None:
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 200)
        await settle(region)

    play(scene, 1)


@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
@pytest.mark.parametrize("seed", range(count(3, 60)))
def test_a_leader_that_dies_is_followed_by_one_that_has_all_it_acknowledged(seed: int, power: bool) -> None:
    async def scene(region: SimulatedRegion) -> None:
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 50)
        leader = region.leader(region.shards[0])
        assert leader is not None
        region.kill(leader.name, power=power)
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 50)
        record = region.record(region.shards[0])
        assert record is not None and record.epoch > 1 and record.leader != leader.name
        await region.start(leader.name)
        await settle(region)

    play(scene, seed)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=only_slow) for seed in range(2, count(8, 400)))]
)
def test_nothing_that_was_acknowledged_is_lost_whatever_goes_wrong(seed: int) -> None:
    async def scene(region: SimulatedRegion) -> None:
        region.append_all_the_time(3)
        try:
            await go_wrong(region, 20)
            await settle(region)
        except (AssertionError, TimeoutError) as error:
            error.add_note(f"what went wrong: {region.faults}")
            raise
        assert region.acknowledged() > 20

    play(scene, seed, shards=2)


@pytest.mark.parametrize("answers_early", [True, False], ids=["acks leader", "acks quorum"])
def test_a_leader_that_is_cut_off_acknowledges_alone_with_acks_leader_and_what_is_lost_is_told(
    answers_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_alarms, "CUT_SHOWN_MS", 20_000)

    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        for other in NAMES:
            if other != leader.name:
                region.network.part(leader.name, other, both=True)
        batch = encode_batch([NewRecord(b"x")], producer_id=1)
        asked = asyncio.ensure_future(leader.append(shard, 0, batch))
        # It is on the leader's disk; nobody leaves the in-sync set within half a second.
        await asyncio.wait([asked], timeout=0.5)
        assert asked.done() is answers_early
        assert leader.log(shard, 0).high_watermark == 0, "read once it is committed"
        region.kill(leader.name)
        asked.cancel()
        region.network.heal()
        await region.until(lambda: region.leader(shard) is not None)
        successor = region.leader(shard)
        assert successor is not None and successor.log(shard, 0).log_end_offset == 0
        await region.start(leader.name)
        await region.well()
        region.check()
        back = region.running[leader.name].host
        assert (back.cut_records, successor.host.cut_records) == (1, 0)
        assert ("records 0 to 0 were cut" in back.alarms.get(shard, "")) is answers_early
        await region.until(lambda: not back.alarms)

    play(scene, 5, answers_early=answers_early)


def test_nobody_waits_for_a_follower_that_says_it_leaves() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 20)
        gone = next(name for name in NAMES if name != leader.name)
        before = region.loop.time()
        region.running[gone].host.leave()

        def left() -> bool:
            record = region.record(shard)
            return record is not None and gone not in record.isr

        await region.until(left)
        assert region.loop.time() - before < LINK_DOWN_MS / 1_000, "before its link is down"
        acknowledged = region.acknowledged()
        await region.until(lambda: region.acknowledged() > acknowledged + 20)
        await region.running.pop(gone).close()
        await region.start(gone)
        await settle(region)

    play(scene, 3)


def test_a_disk_that_has_not_what_was_acknowledged_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin: without the sync, a loss of power everywhere loses what was acknowledged, and the check says so."""
    monkeypatch.setattr(ReplicaDisk, "sync", lambda self: self.log.end_point)

    async def scene(region: SimulatedRegion) -> None:
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 100)
        for name in list(region.running):
            region.kill(name, power=True)
        await region.start()
        await region.no_more_appends()
        await region.until(region.is_well, 20)
        region.check()

    caught = 0
    for seed in range(4):
        try:
            play(scene, seed)
        except (AssertionError, TimeoutError):
            caught += 1
    assert caught


def test_a_leader_that_does_not_know_who_published_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin: what is sent again after an election stands twice, or leaves a gap, and the check says so."""
    monkeypatch.setattr(HostedCopies, "producers", property(lambda self: ProducerTable()))

    async def scene(region: SimulatedRegion) -> None:
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 50)
        leader = region.leader(region.shards[0])
        assert leader is not None
        leader.host.give_up("drain")
        await region.until(lambda: region.leader(region.shards[0]) not in (None, leader))
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 50, 20)
        await settle(region)

    with pytest.raises((AssertionError, TimeoutError, RequestError)):
        play(scene, 8)


async def cut_what_nobody_heard(region: SimulatedRegion) -> None:
    """A leader has an append alone, is gone, and comes back to another one's log."""
    shard = region.shards[0]
    leader = region.leader(shard)
    assert leader is not None
    for other in NAMES:
        if other != leader.name:
            region.network.part(leader.name, other, both=True)
    asked = asyncio.ensure_future(
        leader.append(shard, 0, encode_batch([NewRecord(b"x")]), annotation=b"cut", slot=9)
    )
    await asyncio.wait([asked], timeout=0.5)
    region.kill(leader.name)
    asked.cancel()
    region.network.heal()
    await region.until(lambda: region.leader(shard) is not None)
    await region.start(leader.name)
    await settle(region)


def test_annotations_are_those_of_the_frames_after_a_cut_and_a_cut_that_leaves_them_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(cut_what_nobody_heard, 5)
    cut = DiskLog.truncate

    def leave(self: DiskLog, point: LogPoint) -> ProducerTable:
        before, producers = dict(self.annotations), cut(self, point)
        self.annotations = before
        return producers

    monkeypatch.setattr(DiskLog, "truncate", leave)
    with pytest.raises(AssertionError, match="annotations of log 0"):
        play(cut_what_nobody_heard, 5)


def test_a_copy_that_begins_without_the_annotations_of_what_was_let_go_of_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = DiskLog.origin

    def forget(self: DiskLog, *asked: Any, **how: Any) -> Origin:
        return replace(begin(self, *asked, **how), annotations={})

    monkeypatch.setattr(DiskLog, "origin", forget)
    with pytest.raises((AssertionError, TimeoutError)):
        play(follow_from_far_behind, 3)


async def follow_from_far_behind(region: SimulatedRegion) -> None:
    """Of a log that was trimmed meanwhile, with an annotation that stands in no frame any more."""
    shard = region.shards[0]
    leader = region.leader(shard)
    assert leader is not None
    await leader.append(shard, 0, encode_batch([NewRecord(b"x")]), annotation=b"let go of", slot=9)
    region.annotated[shard, 0] = {9: b"let go of"}
    away = next(name for name in NAMES if name != leader.name)
    region.kill(away)
    region.append_all_the_time()
    await region.until(lambda: region.acknowledged() > 300)
    replica = leader.host.replica(shard)
    assert replica is not None
    for number, log in replica.logs.items():
        await leader.log(shard, number).trim(log.commit.offset)
    await region.until(lambda: all(log.start > LogPoint(0) for log in replica.logs.values()))
    await region.start(away)
    await settle(region)
    copy = region.running[away].host.replica(shard)
    assert copy is not None
    assert all(copy.logs[number].start >= LogPoint(1) for number in copy.logs)


def test_a_follower_that_is_far_behind_a_trimmed_log_begins_anew_where_it_begins() -> None:
    play(follow_from_far_behind, 3)


def test_a_full_disk_refuses_a_leaders_appends_and_another_one_leads() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        disk = region.machines[leader.name].disk
        assert disk is not None
        disk.on_call = failing(("pwritev",), errno.ENOSPC, 1_000)
        with pytest.raises(UnavailableError) as refused:
            await leader.append(shard, 0, encode_batch([NewRecord(b"no room")]))
        assert refused.value.code is Code.DISK_FULL
        await region.until(lambda: region.leader(shard) not in (None, leader))
        next_one = region.leader(shard)
        assert next_one is not None
        assert await next_one.append(shard, 0, encode_batch([NewRecord(b"room")])) == LogPoint(1)
        disk.on_call = None
        await region.well()
        region.check()

    play(scene, 4)


def test_a_follower_whose_disk_is_full_leaves_and_comes_back_by_itself() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        name = next(each for each in NAMES if each != leader.name)
        disk = region.machines[name].disk
        assert disk is not None
        disk.on_call = failing(("pwritev",), errno.ENOSPC, 1_000_000)
        region.append_all_the_time()
        await region.until(lambda: name not in (region.record(shard) or leader.mirror.view.shards[shard]).isr)
        assert "its disk is full" in region.running[name].host.alarms[shard]
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 50)
        disk.on_call = None
        await settle(region)
        assert not region.running[name].host.alarms

    play(scene, 5)


@pytest.mark.parametrize("where", ["leader", "follower", "read"])
def test_a_mistake_in_one_copy_stops_that_copy_alone(where: str, caplog: pytest.LogCaptureFixture) -> None:
    def mistaken(*_: object) -> None:
        raise ValueError("unforeseen")

    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 50)
        leader = region.leader(shard)
        assert leader is not None
        other = next(broker for broker in region.running.values() if broker is not leader)
        broken = other if where == "follower" else leader
        hosted = broken.host._hosted[shard]
        if where == "read":
            # What a follower that comes back asks for.
            hosted.workers[0].disk.read_placed = mistaken  # type: ignore[assignment,method-assign]
            region.kill(other.name)
            await region.until(lambda: (record := region.record(shard)) and other.name not in record.isr)
            await region.start(other.name)
        else:
            hosted.core.step = mistaken  # type: ignore[assignment,method-assign]
        await region.until(lambda: bool(hosted.broken))
        assert "it has stopped by a mistake of its own (ValueError: unforeseen)" in broken.host.alarms[shard]
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 50)
        record = region.record(shard)
        assert record is not None and broken.name not in record.isr
        assert (record.epoch == 1) == (where == "follower") and record.leader != broken.name
        region.kill(broken.name)
        await region.start(broken.name)
        await settle(region)

    play(scene, 3)


def test_a_record_that_cannot_be_changed_is_told_once_however_often_that_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, tried = host_module.change, []

    def refused(*what: Any) -> Any:
        tried.append(what)
        return Refusal(Reason.NO_LEASE, "The watch shows nothing new.", retry=True)

    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 50)
        with monkeypatch.context() as patched, caplog.at_level(logging.INFO, host_module.log.name):
            patched.setattr(host_module, "change", refused)
            region.kill(next(name for name in NAMES if name != leader.name))
            await region.until(lambda: len(tried) > 20)
        told = [each for each in caplog.messages if "The watch shows nothing new" in each]
        assert 0 < len(told) == len({what[1] for what in tried}), "once for each shard"
        assert host_module.change is real
        for name in set(NAMES) - region.running.keys():
            await region.start(name)
        await settle(region)

    play(scene, 3)


def test_an_append_to_who_does_not_lead_is_not_written() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        other = next(broker for broker in region.running.values() if broker is not leader)
        with pytest.raises(UnavailableError) as refused:
            other.host.lead(shard, 0)
        assert refused.value.code is Code.NOT_LEADER and "not written" in refused.value.sentence
        region.check()

    play(scene, 6)


def test_appends_under_way_at_a_leader_that_gives_up_are_told_to_be_unknown_or_are_committed() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        answers = [
            asyncio.ensure_future(leader.append(shard, 0, encode_batch([NewRecord(f"{at}".encode())])))
            for at in range(40)
        ]
        await asyncio.sleep(region.random.random() * 0.004)
        leader.host.give_up("drain")
        told = await asyncio.gather(*answers, return_exceptions=True)
        assert all(isinstance(each, LogPoint | UnavailableError) for each in told)
        await region.well()
        region.check()
        record = region.record(shard)
        assert record is not None and record.leader != leader.name
        new = region.leader(shard)
        assert new is not None
        replica = new.host.replica(shard)
        assert replica is not None
        assert all(each <= replica.logs[0].commit for each in told if isinstance(each, LogPoint))

    for seed in range(count(5, 200)):
        play(scene, seed)


def test_a_log_that_is_released_with_what_is_not_committed_is_led_again_once_it_is() -> None:
    """As where a broker leads all shards of a stream, then not one of them, and then all again."""

    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        epoch = leader.host.epoch(shard)
        followers = [name for name in NAMES if name != leader.name]
        for other in followers:
            region.network.part(leader.name, other, both=True)
        asked = asyncio.ensure_future(leader.append(shard, 0, encode_batch([NewRecord(b"x")])))
        replica = leader.host.replica(shard)
        assert replica is not None
        await region.until(lambda: replica.logs[0].end.offset == 1)
        for number in LOGS:
            await leader.logs.pop((shard, number)).close()
        assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], UnavailableError)
        assert not leader.host.serves(shard)
        with pytest.raises(UnavailableError):
            leader.host.lead(shard, 0)
        region.network.heal()
        await region.until(lambda: (shard, 0) in leader.logs)
        assert leader.host.epoch(shard) == epoch
        assert leader.log(shard, 0).high_watermark == 1
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 20)
        await settle(region)

    play(scene, 4)


def test_a_log_that_could_not_be_led_by_a_mistake_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        for number in LOGS:
            await leader.logs.pop((shard, number)).close()
        leader._led.clear()
        with monkeypatch.context() as wrong:
            wrong.setattr(HostedCopies, "committed", lambda copies, durable: LogPoint(-1))
            with pytest.raises(AssertionError):
                await leader._lead(shard)
        leader._led.clear()
        await leader._lead(shard)
        assert all((shard, number) in leader.logs for number in LOGS)
        await settle(region)

    play(scene, 4)


def test_the_beginning_of_an_epoch_that_was_lost_counts_for_no_later_one() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        hosted = leader.host._hosted[shard]
        begun: list[object] = []
        hosted.core.step = lambda event, now: begun.append(event) or Ready()  # type: ignore[method-assign]
        hosted.to_begin = {0: 7, 1: 7}
        for told in (LogBegun(0, 6), LogBegun(0, 7), LogBegun(1, 6)):
            leader.host._worked(hosted, told)
        assert not [event for event in begun if isinstance(event, Begun)], "log 1 has not begun it yet"
        leader.host._worked(hosted, LogBegun(1, 7))
        assert [event for event in begun if isinstance(event, Begun)] == [Begun(7)]
        del hosted.core.step

    play(scene, 4)


def test_what_a_peer_says_of_logs_that_are_not_here_is_not_heard() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        leader = region.leader(shard)
        assert leader is not None
        replica = leader.host.replica(shard)
        assert replica is not None
        epoch, election = replica.fence.epoch, replica.fence.election
        for message in (
            Durable(epoch, election, 1, 1, 99, LogPoint(5)),
            Commit(epoch, election, 1, 1, 99, LogPoint(5)),
            Follow(epoch, election, 9, "f" * 32, 9, (LogPlace(99, LogPoint(0), LogPoint(0), (), True),)),
        ):
            leader.host.heard("b" if leader.name != "b" else "c", Said(shard, message))
        leader.host.heard("c", Said(ShardId("00" * 16, 5), Probe(1, "0" * 15 + "1")))
        assert not leader.host.alarms and not leader.host._hosted[shard].broken
        await region.well()

    play(scene, 7)


def test_shards_that_nothing_happens_to_take_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[object]()
    step = ReplicaCore.step

    def counted(self: ReplicaCore, event: object, now: int) -> Ready:
        steps.append(event)
        return step(self, event, now)

    monkeypatch.setattr(ReplicaCore, "step", counted)
    for module in (leader_module, host_module):
        monkeypatch.setattr(module, "DETACHED_MS", 30_000)

    async def scene(region: SimulatedRegion) -> None:
        hosts = [broker.host for broker in region.running.values()]
        await region.until(lambda: not any(host._ticking for host in hosts))
        steps.clear()
        records = [region.record(shard) for shard in region.shards]
        await asyncio.sleep(60)
        assert not steps
        region.append_all_the_time(3)
        await region.until(lambda: region.acknowledged() > 60)
        assert [region.record(shard) for shard in region.shards] == records, "nobody left meanwhile"
        await settle(region)
        await region.until(lambda: not any(host._ticking for host in hosts))
        assert isinstance(region.store, Store)
        region.store.is_away = True
        await asyncio.sleep(15)
        assert not any(host._ticking for host in hosts), "the lease is over, and nobody asks anything"
        await region.until(lambda: not any(host.serves(shard) for host in hosts for shard in region.shards))
        region.store.is_away = False
        await region.well()

    play(scene, 11, shards=3)


def test_copies_whose_commit_point_waits_to_be_kept_are_not_ticked_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = list[ReplicaCore]()
    step = ReplicaCore.step

    def counted(self: ReplicaCore, event: object, now: int) -> Ready:
        if isinstance(event, Tick):
            ticks.append(self)
        return step(self, event, now)

    monkeypatch.setattr(ReplicaCore, "step", counted)

    async def scene(region: SimulatedRegion) -> None:
        hosts = [broker.host for broker in region.running.values()]
        await region.until(lambda: not any(host._ticking for host in hosts))
        (shard,) = region.shards
        leader = region.leader(shard)
        assert leader is not None
        for number in range(2):
            batch = encode_batch([NewRecord(b"x")], producer_id=1, base_sequence=number)
            await leader.append(shard, 0, batch)
            await asyncio.sleep(0.35)
        assert any(host._ticking for host in hosts), "the second one is kept a second after the first"
        ticks.clear()
        await region.until(lambda: not any(host._ticking for host in hosts))
        assert 1 <= len(ticks) <= len(NAMES), "each copy once, when it is to keep it"
        kept = [host._hosted[shard].core.replica.logs[0] for host in hosts]
        assert all(log.kept == log.commit == LogPoint(2) for log in kept)

    play(scene, 3)


def test_a_leader_whose_disk_does_not_answer_a_write_gives_way_and_is_in_sync_again_once_it_does() -> None:
    """Of a write that has not returned the leader's core knows nothing: nobody asked for a sync of it yet."""

    async def scene(region: SimulatedRegion) -> None:
        shard = region.shards[0]
        await region.well()
        leader = region.leader(shard)
        assert leader is not None
        region.machines[leader.name].standstill.begin()
        region.append_all_the_time()
        hangs_since = region.loop.time()
        await region.until(lambda: region.leader(shard) not in (None, leader))
        assert region.loop.time() - hangs_since < 2 * HUNG_MS / 1_000
        assert "has not answered" in leader.host.alarms[shard]
        await region.until(lambda: region.acknowledged() > 100)
        region.machines[leader.name].standstill.end()
        await settle(region)
        assert not leader.host.alarms

    play(scene, 6)


@pytest.mark.parametrize("seed", range(count(3, 60)))
@pytest.mark.parametrize("hangs_s", [4.0, 12.0, 60.0])
def test_where_all_disks_hang_all_is_served_again_once_they_go_on(hangs_s: float, seed: int) -> None:
    async def scene(region: SimulatedRegion) -> None:
        region.append_all_the_time()
        await region.until(lambda: region.acknowledged() > 50)
        before = region.acknowledged()
        for name in NAMES:
            region.machines[name].standstill.begin()
        await asyncio.sleep(hangs_s)
        for name in NAMES:
            region.machines[name].standstill.end()
        await region.until(lambda: region.acknowledged() > before + 50)
        await settle(region)

    play(scene, seed)
