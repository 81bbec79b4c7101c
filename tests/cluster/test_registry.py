"""A broker registers and stays alive on a store that goes away, answers late or not at all; and stops before another can take over.

On simulated time; tests/cluster/test_registry_stores.py does it on SQLite and etcd.
"""

from __future__ import annotations

import asyncio

import pytest
from cluster.simulated_brokers import FOLDER, KEYS, LEASE_MS, Region, Store, play
from msgspec.structs import replace

from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.runtime.simulated import simulated
from region.cluster import registration
from region.cluster.audit_home import AuditHome
from region.cluster.node_file import NodeFile
from region.cluster.records import FrozenRecord, Health, ShardId, ShardRecord, encode
from region.cluster.registration import PULSE_MS
from region.cluster.registry import EXPIRY_SLACK_MS, RETRY_MS, RETURN_MS
from region.cluster.transactions import Refusal, Transaction, unchanged
from region.metadata.records import AUDIT_STREAM
from region.metadata.transaction import Delete, Put


def test_a_broker_is_alive_under_its_number_and_sees_the_others_come_and_go() -> None:
    async def scene(region: Region) -> None:
        first, second = region.broker("b1"), region.broker("b2")
        registry = await first.start()
        assert registry.registration == 1 and registry.may_answer() and registry.refusal() is None
        await second.start()
        await region.until(lambda: first.mirror.view.brokers.registrations() == {"b1": 1, "b2": 1})
        await second.die()
        await region.until(lambda: first.mirror.view.brokers.registrations() == {"b1": 1})
        assert first.mirror.view.nodes["b2"].registration == 1 and len(first.leases) == 1

    play(scene)


def test_it_is_alive_only_once_it_has_announced_itself() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.open()
        assert not registry.may_answer() and await region.alive() == []
        refused = registry.refusal()
        assert refused is not None and refused.code is Code.NOT_LEADER and "not announced" in refused.sentence
        await registry.announce(Health())
        await registry.tell(Health(open=True, reaches=("b2",)))
        await region.until(lambda: broker.mirror.view.alive["b1"].health.reaches == ("b2",))
        assert len(broker.leases) == 1, "the same lease"

    play(scene)


def test_after_an_end_in_order_the_next_start_knows_of_it_and_need_not_wait() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        others: list[bool] = []
        registry.on_lease(lambda _: others.append(KEYS.broker("b1") in region.store._entries))
        await registry.close()
        assert others == [True] and not registry.may_answer(), "fenced before others can lead"
        assert await region.alive() == [] and (await region.node()).clean == 1
        began = region.loop.time()
        registry = await region.broker(boot="boot-2", lock="another").start()
        node = await region.node()
        assert registry.registration == 2 and (node.kept_since, node.whole_since) == (1, 1)
        assert region.loop.time() - began < 1

    play(scene)


def test_after_a_crash_its_own_lock_lets_it_in_at_once_and_another_machine_waits_for_the_lease() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        await broker.start()
        await broker.die()
        began = region.loop.time()
        again = region.broker()
        assert (await again.start()).registration == 2 and region.loop.time() - began < 1
        await again.die()
        moved = region.broker(lock="elsewhere", boot="boot-2")
        assert (await moved.start()).registration == 3 and region.loop.time() - began > 1
        assert (await region.node()).kept_since == 3, "another boot: what was not synced may be gone"

    play(scene)


def test_a_second_process_under_a_name_is_refused_while_the_first_is_alive() -> None:
    async def scene(region: Region) -> None:
        first = await region.broker().start()
        region.copy("b1", "copy")
        began = region.loop.time()
        await region.broker(disk="copy").refused(UnavailableError, Code.SERVED_ELSEWHERE)
        assert region.loop.time() - began >= (LEASE_MS + EXPIRY_SLACK_MS) / 1_000
        assert first.may_answer() and first.ended is None and (await region.node()).registration == 1

    play(scene)


def test_of_two_copies_of_a_folder_that_start_at_once_one_lives_and_the_other_stops_for_good() -> None:
    async def scene(region: Region) -> None:
        await (await region.broker().start()).close()
        region.copy("b1", "copy")
        pair = region.broker(), region.broker(disk="copy")
        await asyncio.gather(*(one.start() for one in pair), return_exceptions=True)
        await asyncio.sleep(3 * LEASE_MS / 1_000)
        assert [one.registry.may_answer() for one in pair].count(True) == 1
        assert await region.alive() == ["b1"]

    for seed in range(8):
        play(scene, seed)


def test_r7_a_process_that_hung_while_another_took_its_name_stops_for_good() -> None:
    async def scene(region: Region) -> None:
        old = region.broker()
        registry = await old.start()
        region.copy("b1", "copy")
        await old.die()
        new = region.broker(disk="copy")
        assert (await new.start()).registration == 2
        # It goes on where it hung: its watch first, then its lease.
        await old.mirror.start()
        assert not registry.may_answer()
        registry._tasks = [asyncio.ensure_future(registry._keep())]
        await region.until(lambda: registry.ended)
        assert registry.ended is not None and registry.ended.code is Code.CONFLICT
        assert "registration 2" in registry.ended.sentence and old.leases[-1] is None
        await registry.close()
        assert new.registry.may_answer() and await region.alive() == ["b1"]
        assert (await region.node()).clean == 0, "an end in order is the word of whoever has the number"

    play(scene)


def test_who_begins_begins_no_more_once_another_copy_of_its_folder_was_registered() -> None:
    async def scene(region: Region) -> None:
        first = region.broker()
        registry = await first.open()
        assert registry.is_beginning
        region.copy("b1", "copy")
        second = await region.broker(disk="copy").open()
        assert second.registration == 2 and second.is_beginning
        await region.until(lambda: first.mirror.view.nodes["b1"].registration == 2)
        assert not registry.is_beginning
        await second.announce(Health())
        assert not second.is_beginning and second.may_answer()

    play(scene)


def test_it_is_fenced_before_its_lease_can_have_ended_for_others() -> None:
    async def scene(region: Region) -> None:
        broker, other = region.broker("b1"), region.broker("b2")
        registry = await broker.start()
        await other.mirror.start()
        region.store.is_away = True
        while "b1" in other.mirror.view.alive:
            could = registry.may_answer()
            await asyncio.sleep(0.01)
        assert not could and "b1" not in other.mirror.view.alive

    for seed in range(4):
        play(scene, seed)


def test_a_process_that_was_stopped_is_fenced_at_its_first_look() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        assert registry.may_answer()
        # Nothing of this loop runs, and the clock that counts sleep goes on.
        region.loop._now_s += LEASE_MS / 1_000
        assert not registry.may_answer() and registry.refusal() is not None
        await region.until(registry.may_answer)
        assert registry.registration == 1 and broker.leases[1] is None and len(broker.leases) == 3

    play(scene)


def test_a_store_that_was_away_gets_the_broker_back_under_its_number_and_its_latest_word() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        region.store.is_away = True
        await region.until(lambda: not registry.may_answer())
        await asyncio.sleep(60)
        await registry.tell(Health(open=True, skew_ms=7))
        region.store.is_away = False
        await region.until(registry.may_answer)
        await region.until(lambda: "b1" in broker.mirror.view.alive)
        assert (registry.registration, broker.mirror.view.alive["b1"].health.skew_ms) == (1, 7)
        assert [lease is None for lease in broker.leases] == [False, True, False]
        assert await region.alive() == ["b1"]

    play(scene)


def test_for_how_long_the_store_has_not_answered_is_known_before_the_lease_ends_and_until_it_answers() -> (
    None
):
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        await asyncio.sleep(3 * LEASE_MS / 1_000)
        assert registry.unanswered_ms() == 0 and not registry.is_returning()
        region.store.is_away = True
        await region.until(registry.unanswered_ms)
        assert registry.may_answer() and 2 * LEASE_MS // 3 < registry.unanswered_ms() < LEASE_MS
        await asyncio.sleep(60)
        assert not registry.may_answer() and 60_000 <= registry.unanswered_ms() < 60_000 + LEASE_MS
        region.store.is_away = False
        await region.until(registry.may_answer)
        assert registry.unanswered_ms() == 0

        # The others need not be alive again yet, so what is known of them may be from before; also where this broker's own lease held.
        assert registry.is_returning()
        await asyncio.sleep(RETURN_MS / 1_000)
        assert not registry.is_returning()
        region.store.is_away = True
        await region.until(registry.unanswered_ms)
        region.store.is_away = False
        await region.until(lambda: not registry.unanswered_ms())
        assert registry.is_returning() and registry.may_answer()
        await asyncio.sleep(RETURN_MS / 1_000)
        assert not registry.is_returning()

    play(scene)


def test_a_new_lease_is_told_once_the_watch_has_shown_what_was_elected_before_it() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        await region.until(lambda: len(broker.leases) == 1)
        region.store.watches_lag = True
        assert registry._lease is not None
        registry._lease.lose("It was lost.")
        await region.until(lambda: registry._is_announced and registry._lease.remaining_ms() > 0)
        assert not registry.may_answer() and broker.leases[-1] is None
        region.store.watches_lag = False
        await region.until(lambda: broker.leases[-1] is registry._lease)
        assert registry.may_answer()

    play(scene)


def test_a_lease_after_one_that_was_lost_counts_for_nothing_in_a_store_that_went_back() -> None:
    """Who was elected meanwhile it may have forgotten. Whoever starts leads nothing of before, and has a lease."""

    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        key = KEYS.frozen
        await region.store.transact([], [Put(key, encode(FrozenRecord("b2", "It went back."), key))])
        await region.until(lambda: broker.mirror.view.frozen is not None)
        assert registry.may_answer(), "nobody was elected while it was alive"
        assert registry._lease is not None
        registry._lease.lose("It was lost.")
        await region.until(lambda: registry._is_announced and registry._lease.remaining_ms() > 0)
        await asyncio.sleep(1)
        assert broker.mirror.view.revision >= registry._alive_revision
        assert not registry.may_answer() and registry.refusal() is not None and broker.leases[-1] is None
        late = region.broker("b3")
        assert (await late.start()).may_answer()
        await region.store.transact([], [Delete(key)])
        await region.until(lambda: broker.leases[-1] is registry._lease)
        assert registry.may_answer()

    play(scene)


def test_what_is_told_while_the_broker_is_being_announced_again_is_not_lost() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        region.store.meanwhile = [lambda: registry.tell(Health(skew_ms=9))]
        assert registry._lease is not None
        registry._lease.lose("It was lost.")
        await region.until(lambda: len(broker.leases) == 3)
        await region.until(lambda: broker.mirror.view.alive["b1"].health.skew_ms == 9)

    play(scene)


def test_a_lease_that_is_lost_is_told_whoever_notices_it_first() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        assert registry._lease is not None
        registry._lease.lose("It was lost.")
        await registry.tell(Health(skew_ms=9))
        await asyncio.sleep(1)
        assert registry.may_answer() and [lease is None for lease in broker.leases] == [False, True, False]

    play(scene)


def test_whoever_finds_its_record_gone_is_fenced_although_its_lease_holds() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        lease = registry._lease
        assert lease is not None
        await region.store.transact([], [Delete(KEYS.broker("b1"))])
        await region.until(lambda: broker.leases[-1] is None)
        assert lease.lost.is_set()
        await region.until(registry.may_answer)
        assert await region.alive() == ["b1"] and registry._lease is not lease

    play(scene)


@pytest.mark.parametrize("happened", [True, False])
def test_a_start_whose_answers_are_lost_goes_on_until_it_knows(happened: bool) -> None:
    async def scene(region: Region) -> None:
        region.store.loses = [happened, happened]
        registry = await region.broker().open()
        assert registry.registration == 3, "a number that nobody knows the fate of is not used again"
        region.store.loses = [happened, happened]
        await registry.announce(Health())
        assert registry.may_answer() and await region.alive() == ["b1"]
        region.store.loses = [happened]
        await registry.close()
        assert (await region.node()).clean == 3 and await region.alive() == []

    play(scene)


def test_the_pulse_is_raised_in_the_folder_first_and_an_old_copy_is_refused() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        await broker.start()
        region.copy("b1", "snapshot")
        await asyncio.sleep(2.5 * PULSE_MS / 1_000)
        assert await region.pulse() == 2
        region.store.loses = [True, False]
        await asyncio.sleep(2 * PULSE_MS / 1_000)
        await broker.die()
        assert await region.pulse() >= 3
        refused = await region.broker(disk="snapshot", lock="b1").refused(CorruptionError, Code.ROLLED_BACK)
        assert "older copy" in refused.sentence
        assert (await region.broker().start()).registration == 2, "the folder itself goes on"

    play(scene)


def test_a_replaced_folder_is_refused_unless_it_is_meant_and_then_has_nothing_from_before() -> None:
    async def scene(region: Region) -> None:
        await (await region.broker().start()).close()
        await region.broker(disk="new").refused(RequestError, Code.CONFLICT)
        registry = await region.broker(disk="new").start(replace=True)
        node = await region.node()
        assert registry.registration == node.whole_since == node.kept_since == 2
        await registry.close()
        await region.broker().refused(RequestError, Code.CONFLICT)

    play(scene)


def test_r10_a_store_that_went_back_fences_who_was_alive_and_refuses_who_starts() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        registry = await broker.start()
        await asyncio.sleep(3.5 * PULSE_MS / 1_000)
        # As from a backup: an earlier pulse.
        entry = await region.store.get(KEYS.pulse("b1"))
        assert entry is not None
        await region.store.transact([], [Put(KEYS.pulse("b1"), b'{"pulse":1}')])
        await region.until(lambda: not registry.may_answer())
        await asyncio.sleep(3 * RETRY_MS / 1_000)
        refused = registry.refusal()
        assert refused is not None and "older than the data folder" in refused.sentence
        assert registry.ended is None, "an operator may put it right"
        await region.until(lambda: "b1" not in broker.mirror.view.alive)
        await broker.die()
        await region.broker().refused(CorruptionError, Code.ROLLED_BACK)
        region.store = Store(region.loop)
        await (await region.broker("b2").start()).close(in_order=False)
        region.store = Store(region.loop)
        await region.broker("b2").refused(CorruptionError, Code.ROLLED_BACK)

    play(scene)


def test_a_failed_sync_is_remembered_by_the_folder() -> None:
    async def scene(region: Region) -> None:
        registry = await region.broker().start()
        await registry.sync_failed()
        await registry.close()
        node = await region.node()
        assert node.clean == 0 and await region.alive() == []
        await region.broker().start()
        assert (await region.node()).kept_since == 2

    play(scene)


def test_a_file_that_is_damaged_is_no_new_folder() -> None:
    async def scene(region: Region) -> None:
        await (await region.broker().start()).close()
        region.disks["b1"].flip(FOLDER / "node", 200)
        refused = await region.broker().refused(CorruptionError, Code.CORRUPTION)
        assert "/data/node" in refused.sentence

    play(scene)


def test_a_region_that_a_broker_serves_alone_lets_no_cluster_in() -> None:
    async def scene(region: Region) -> None:
        await region.store.transact([], [Put(KEYS.broker("b9"), b'{"broker":"b9"}')])
        await region.broker().refused(UnavailableError, Code.SERVED_ELSEWHERE)
        assert await region.store.get(KEYS.node("b1")) is None

    play(scene)


def test_nothing_is_announced_before_the_watch_has_reached_the_registration() -> None:
    async def scene(region: Region) -> None:
        broker = region.broker()
        await broker.mirror.start()
        # A watch that lags for ever.
        await broker.mirror.close()
        await broker.registry.open()
        assert broker.mirror.view.nodes["b1"].registration == 1, "known by its own transaction"
        with pytest.raises(UnavailableError, match="has not shown"):
            await broker.registry.announce(Health())
        assert await region.alive() == []

    play(scene)


def test_a_new_folder_has_an_id_of_its_own() -> None:
    async def scene(region: Region) -> None:
        for name in ("b1", "b2"):
            await region.broker(name).start()
        assert (await region.node("b1")).folder != (await region.node("b2")).folder
        assert registration.next_number(region.brokers[0].registry._file, await region.node("b1")) == 2

    play(scene)


def test_whoever_follows_the_store_remembers_with_its_next_pulse_who_was_retired() -> None:
    async def scene(region: Region) -> None:
        names = ("b1", "b2", "b3")
        first, other, gone = [region.broker(name) for name in names]
        registry = await first.start()
        await other.start()
        folder = (await gone.start()).folder
        await gone.registry.close()
        await region.until(lambda: "b3" not in first.mirror.view.alive)
        made = registration.retire(other.mirror.view, "b3")
        assert not isinstance(made, Refusal)
        result = await other.mirror.commit(made)
        assert result is not None and result.succeeded
        await asyncio.sleep(2 * PULSE_MS / 1_000)
        for name in ("b1", "b2"):
            file = NodeFile(region.disks[name].mount(), FOLDER, simulated(region.loop, 1).random).load()
            assert file.retired == {"b3": folder}
        # A name that is given anew is another broker.
        again = region.broker("b3", disk="new")
        await again.start()
        await region.until(lambda: not registry._file.retired)

    play(scene)


def test_whoever_follows_the_store_remembers_with_its_next_pulse_whose_copies_of_the_audit_log_are_in_sync() -> (
    None
):
    async def scene(region: Region) -> None:
        registries = {name: await region.broker(name).start() for name in ("b1", "b2", "b3")}
        shard = ShardId("a" * 32, 0)
        for registry in registries.values():
            await registry.remember_audit(AuditHome("", shard.incarnation, 3).encode())
        mirror = region.brokers[0].mirror
        key = mirror.view.keys.shard(shard)

        async def written(record: ShardRecord) -> tuple[int, dict[str, str]]:
            """What stands in the store then: an election may follow."""
            made = Transaction((unchanged(mirror.view, key),), (Put(key, encode(record, key)),))
            result = await mirror.commit(made)
            assert result is not None and result.succeeded
            await asyncio.sleep(2 * PULSE_MS / 1_000)
            found = mirror.view.shards[shard]
            return found.epoch, {name: mirror.view.nodes[name].folder for name in found.members()}

        def known() -> list[tuple[int, dict[str, str]]]:
            files = [registry._file for registry in registries.values()]
            return [(file.audit_epoch, file.audit_copies) for file in files]

        all_ = {name: mirror.view.nodes[name].registration for name in registries}
        made = ShardRecord(
            stream=str(AUDIT_STREAM), epoch=7, election="1" * 16, replicas=tuple(all_), min=2, isr=all_
        )
        whole = await written(made)
        assert known() == [whole] * 3 and whole[1].keys() == all_.keys()
        record = mirror.view.shards[shard]
        gone = next(name for name in all_ if name != record.leader)
        two = await written(
            replace(record, isr={name: number for name, number in all_.items() if name != gone})
        )
        assert known() == [two] * 3 and two[1].keys() == all_.keys() - {gone}
        # Of a store that went back.
        older = await written(replace(record, epoch=record.epoch - 1))
        assert older != two and known() == [two] * 3
        for name in registries:
            file = NodeFile(region.disks[name].mount(), FOLDER, simulated(region.loop, 1).random).load()
            assert (file.audit_epoch, file.audit_copies) == two

    play(scene)
