"""The controller, over a modelled store: whom it elects and when, what it does where answers are lost, and when it does nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from cluster.samples import DELETED, KEYS, SHARD, STREAM, changed, shard_record
from cluster.stage import LEASE_MS, Stage
from simulation.controller_host import ControllerHost
from slow_runs import only_slow

from region import reconciliation
from region.cluster import controller, membership, registration, transactions
from region.cluster.controller import TICK_MS, EndTold, Leased, LeaseLost, StreamWish, Tick, Wanted
from region.cluster.election import LogEnd
from region.cluster.membership import place_of
from region.cluster.placement import Planning
from region.cluster.records import ShardId, encode
from region.cluster.registration import FolderRecord
from region.metadata.transaction import Delete, ModRevision, Put

WISH = StreamWish(STREAM, "acme/payments/orders", shards=1, replicas=3, min=2, spread=True)


class Region(Stage):
    """A stage with would-be controllers. Leases of living brokers do not end by themselves."""

    def __init__(self, brokers: str = "abc", controllers: str = "b") -> None:
        super().__init__(brokers)
        self.hosts = {name: self.host(name) for name in controllers}
        # Long alive, so that nothing is held for having been away.
        self.pass_ms(3 * LEASE_MS)

    def host(self, name: str) -> ControllerHost:
        ids = (f"{number:015x}{ord(name) & 15:x}" for number in range(1, 10_000))
        host = ControllerHost(self.store.client(name), KEYS, name, LEASE_MS, ids)
        host.step(Leased(self.leases[name]))
        return host

    def _grant(self, name: str) -> int:
        lease = super()._grant(name)
        self.keep()
        return lease

    def keep(self) -> None:
        """All brokers renew their leases, whatever happens to the store."""
        for lease in self.store._leases.values():
            lease.ends_ms = float("inf")

    def pass_ms(self, ms: int) -> None:
        end = self.store.now_ms + ms
        while self.store.now_ms < end:
            self.store.run(min(end, self.store.now_ms + TICK_MS))
            for host in self.hosts.values():
                host.step(Tick())

    def until(self, holds: Callable[[], bool], within_ms: int = 2_000) -> None:
        end = self.store.now_ms + within_ms
        while not holds():
            assert self.store.now_ms < end, self.record() if SHARD in self.view().shards else "no shard"
            self.pass_ms(10)

    def wants(self, *wishes: StreamWish, deleted: dict[str, int] | None = None) -> None:
        for host in self.hosts.values():
            host.step(Wanted(wishes, deleted or {}))

    def rebalance(self) -> None:
        """An operator's word."""
        assert self.do(transactions.rebalance(self.view(), "operator"))

    def leaders(self) -> list[str]:
        return [record.leader for _, record in sorted(self.view().shards.items())]


def test_a_dead_leaders_shards_are_led_again_at_once_in_few_transactions() -> None:
    region = Region()
    shards = [region.place("abc", number=number) for number in range(150)]
    region.pass_ms(100)
    sent = len(region.hosts["b"].sent)
    region.die("a")
    region.until(lambda: region.leaders() == ["b"] * 150, 200)
    assert len(region.hosts["b"].sent) - sent == 3
    assert {record.epoch for record in region.view().shards.values()} == {8} and len(shards) == 150


def test_a_plan_takes_as_many_steps_as_it_needs_and_is_kept_while_it_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Planning] = []

    def counted(*of: Any) -> Planning:
        made.append(Planning(*of))
        return made[-1]

    monkeypatch.setattr(controller, "Planning", counted)
    monkeypatch.setattr(controller, "PLAN_LOOKS", 100)
    region = Region("abcde")
    region.die("e")
    region.pass_ms(100)
    core = region.hosts["b"].core
    assert core.term
    region.wants(dataclasses.replace(WISH, shards=150))
    region.until(lambda: len(region.view().shards) == 150)
    assert not made, "new shards are placed without a plan for all"
    region.start("e")
    region.pass_ms(100)
    region.rebalance()
    region.until(lambda: core.wants_step)
    steps = 0
    while core.wants_step:
        region.hosts["b"].step(Tick())
        steps += 1
    assert steps > 5 and len(made) == 1
    region.pass_ms(100)
    moving = [record for record in region.view().shards.values() if record.target]
    assert moving and len(made) == 1, "moving what was planned asks for no other plan"
    region.wants(dataclasses.replace(WISH, shards=150), dataclasses.replace(WISH, incarnation="cd" * 16))
    region.until(lambda: len(region.view().shards) == 151)
    assert len(made) > 1


def test_a_plan_is_dropped_where_somebody_else_moves_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region("abcde")
    region.until(lambda: region.hosts["b"].core.term > 0)
    region.wants(dataclasses.replace(WISH, shards=20))
    region.until(lambda: len(region.view().shards) == 20)
    shard = ShardId(STREAM, 3)
    record = region.record(shard)
    # An operator recovered it elsewhere, with fewer copies.
    replicas = tuple(sorted({*"abcde"} - {*record.replicas}))[:1]
    numbers = {name: region.registration(name) for name in replicas}
    moved = msgspec.structs.replace(record, epoch=2, leader=replicas[0], replicas=replicas, isr=numbers)
    region.store.transact([], [Put(KEYS.shard(shard), encode(moved, "of the test"))])
    region.until(lambda: region.record(shard).target != ())
    assert region.record(shard).target[0] in replicas or replicas[0] in region.record(shard).target
    assert len(region.record(shard).target) == 3


def test_many_decisions_are_made_in_several_steps_and_all_are_carried_out() -> None:
    region = Region()
    for number in range(250):
        region.place("abc", number=number)
    region.pass_ms(100)
    region.die("a")
    region.until(lambda: region.leaders() == ["b"] * 250, 1_000)
    sizes = [
        len(sent.transaction.writes) for sent in region.hosts["b"].sent if len(sent.transaction.writes) > 1
    ]
    assert sum(sizes) == 250 and max(sizes) == transactions.SHARDS_PER_TRANSACTION


def test_a_leader_that_yielded_or_was_started_again_is_followed_at_once_even_after_an_outage() -> None:
    region = Region(controllers="")
    region.place("abc")
    region.hosts["c"] = region.host("c")
    region.pass_ms(100)
    assert region.hosts["c"].core.term
    assert region.do(region.change(membership.with_yield(region.record(), "drain")))
    region.until(lambda: region.record().leader == "b", 100)
    region.die("b")
    region.start("b")
    region.until(lambda: region.record().epoch == 9, 100)


def test_a_leader_that_stopped_in_order_is_followed_at_once() -> None:
    region = Region(controllers="")
    region.place("abc")
    region.hosts["b"] = region.host("b")
    region.pass_ms(100)
    region.stop("a")
    region.until(lambda: region.record().leader == "b", 100)


def test_r23d_a_controller_whose_own_lease_was_interrupted_gives_absent_leaders_one_lease() -> None:
    region = Region()
    region.place("abc")
    region.until(lambda: region.hosts["b"].core.term > 0)
    region.lose_lease("b")
    region.hosts["b"].step(LeaseLost())
    region.lose_lease("a")
    region.pass_ms(500)
    assert region.do(region.announce("b"))
    region.hosts["b"].step(Leased(region.leases["b"]))
    region.pass_ms(LEASE_MS - 500)
    assert region.record().epoch == 7, "the store was away, not the leader"
    assert region.do(region.announce("a"))
    region.pass_ms(2 * LEASE_MS)
    assert region.record().epoch == 7
    region.die("a")
    region.until(lambda: region.record().leader == "b", 200)


def test_r23d_once_the_store_has_answered_it_for_a_lease_a_controller_elects_at_once() -> None:
    region = Region(controllers="a")
    region.place("abc")
    region.until(lambda: region.hosts["a"].core.term > 0)
    region.hosts["b"] = region.host("b")
    region.pass_ms(LEASE_MS)
    del region.hosts["a"]
    region.die("a")
    region.until(lambda: region.record().leader == "b", 200)


def test_r23d_where_most_brokers_go_within_one_lease_it_waits_one_lease() -> None:
    region = Region("abcde", controllers="e")
    region.place("abc")
    region.until(lambda: region.hosts["e"].core.term > 0)
    for name in "abc":
        region.lose_lease(name)
        region.pass_ms(300)
    # Two of five may die; with the third, it is rather the store that was away.
    assert region.record().leader == "c" and region.record().epoch == 9
    region.pass_ms(LEASE_MS - 1_000)
    assert region.do(region.announce("c"))
    region.pass_ms(2 * LEASE_MS)
    assert region.record().leader == "c" and region.record().epoch == 9
    region.die("c")
    region.until(lambda: region.record().leader == "")


def test_r23c_one_shard_that_changes_again_and_again_does_not_hold_up_the_others() -> None:
    region = Region()
    shards = [region.place("abc", number=number) for number in range(60)]
    region.pass_ms(100)
    region.die("a")
    region.hosts["b"].client.cut_in = True  # What it knows is old by the time that it decides.
    hot = shards[30]

    def touch() -> None:
        record = region.record(hot)
        if record.epoch == 7:
            region.store.transact([], [Put(KEYS.shard(hot), encode(record, "of the test"))])

    touch()
    region.hosts["b"].client.heal()
    for _ in range(40):
        region.pass_ms(1)
        touch()
    others = [region.record(shard).leader for shard in shards if shard != hot]
    assert others == ["b"] * 59
    region.until(lambda: region.record(hot).leader == "b")


def test_what_was_sent_and_not_answered_happens_once_however_late() -> None:
    region = Region()
    region.place("abc")
    region.pass_ms(100)
    region.store.faults.late = 1.0
    region.die("a")
    region.pass_ms(60)
    region.store.faults.late = 0.0
    region.until(lambda: region.record().leader == "b", 30_000)
    region.pass_ms(30_000)
    assert region.record().epoch == 8 and region.store.applied_late >= 1


def test_only_one_of_several_is_the_controller_and_another_follows_when_it_dies() -> None:
    region = Region(controllers="abc")
    region.pass_ms(100)
    controllers = [name for name, host in region.hosts.items() if host.core.term]
    assert len(controllers) == 1
    region.place("abc")
    (first,) = controllers
    region.hosts.pop(first).die()
    region.die(first)
    region.until(lambda: any(host.core.term for host in region.hosts.values()))
    assert region.record().leader != first or region.record().epoch == 7


def test_a_controller_that_was_deposed_without_knowing_writes_nothing() -> None:
    region = Region(controllers="bc")
    region.pass_ms(100)
    (name,) = [name for name, host in region.hosts.items() if host.core.term]
    host = region.hosts[name]
    region.place("abc")
    region.pass_ms(50)
    host.client.cut_in = True
    region.lose_lease(name)
    assert region.do(region.announce(name))
    region.until(lambda: any(h.core.term for other, h in region.hosts.items() if other != name))
    sent = len(host.sent)
    writes = [write.key for each in host.sent for write in each.transaction.writes]
    host.client.heal()
    region.pass_ms(2_500)
    assert not host.core.term and len(host.sent) == sent, writes


def test_r20_a_controller_that_gets_nothing_done_for_a_lease_makes_room() -> None:
    region = Region(controllers="bc")
    region.pass_ms(100)
    (name,) = [name for name, host in region.hosts.items() if host.core.term]
    host, other = region.hosts[name], region.hosts["c" if name == "b" else "b"]
    region.place("abc")
    region.pass_ms(50)
    # Its swaps are not answered; its lease is renewed all the same, and reads are, so that no time-out of the store's shows it.
    transact = host.client.transact
    host.client.transact = lambda compares, writes, done: (  # type: ignore[method-assign]
        transact(compares, writes, done) if len(writes) == 1 and "controller" in writes[0].key else None
    )
    region.die("a")
    region.until(lambda: other.core.term > 0, 2 * LEASE_MS)
    region.until(lambda: region.record().epoch == 8, 2 * LEASE_MS)


def test_r11_a_shard_whose_only_copy_failed_is_vacant_with_an_alarm_and_no_storm() -> None:
    region = Region()
    region.place("a", min=1)
    region.pass_ms(100)
    assert region.do(region.change(membership.with_yield(region.record(), "failed")))
    region.until(lambda: region.record().leader == "")
    region.pass_ms(5_000)
    assert region.record().epoch == 7
    assert any("copy that failed" in sentence for sentence in region.hosts["b"].alarms.values())
    region.die("a")
    region.start("a")
    region.until(lambda: region.record().leader == "a")
    region.pass_ms(100)
    assert region.hosts["b"].alarms == {}


def test_a_controller_that_lost_its_term_takes_back_what_it_said_of_shards() -> None:
    region = Region(controllers="bc")
    region.pass_ms(100)
    (name,) = [name for name, host in region.hosts.items() if host.core.term]
    host, other = region.hosts[name], "c" if name == "b" else "b"
    region.place("a", min=1)
    region.pass_ms(50)
    region.die("a")
    region.until(lambda: host.alarms != {}, 3 * LEASE_MS)
    host.client.cut_in = True
    region.lose_lease(name)
    assert region.do(region.announce(name))
    region.until(lambda: region.hosts[other].core.term > 0)
    host.client.heal()
    region.start("a")
    region.until(lambda: region.record().leader == "a", 3 * LEASE_MS)
    region.pass_ms(2_500)
    assert not host.core.term and host.alarms == {} == region.hosts[other].alarms


def test_r5b_a_replaced_folder_is_taken_out_of_all_sets() -> None:
    region = Region()
    region.place("abc")
    region.pass_ms(100)
    region.die("c")
    region.files["c"] = FolderRecord(folder="77" * 16)
    region.start("c", replace=True)
    region.until(lambda: region.record().isr == {"a": 1, "b": 1})


def test_r22_after_a_power_cut_of_all_the_longest_copy_of_an_interval_shard_leads() -> None:
    region = Region("abcd", controllers="d")
    region.place("ab", durability="interval")
    alone = region.place("a", durability="interval", min=1, number=1)
    region.pass_ms(100)
    asked: list[ShardId] = []
    region.hosts["d"]._ask_ends = lambda ask: asked.append(ask.shard)
    for name in "ab":
        region.die(name, power=True)
    for name in "ab":
        region.start(name)
    region.until(lambda: region.record(alone).leader == "a" and region.record(alone).unclean == 8)
    region.until(lambda: asked == [SHARD])
    for name, end in {"a": 10, "b": 12}.items():
        assert region.record().leader == ""
        region.hosts["d"].step(EndTold(SHARD, name, LogEnd(2, 7, "0" * 16, (end, 0))))
    region.until(lambda: region.record().leader == "b")
    assert region.record().unclean == region.record().epoch


def test_r10_a_store_that_went_back_freezes_the_region_until_it_is_reconciled() -> None:
    region = Region()
    region.place("abc")
    region.pass_ms(100)
    backup = region.store.backup()
    region.die("a")
    region.until(lambda: region.record().epoch == 8)
    region.store.restore(backup)
    region.keep()
    region.until(lambda: region.view().frozen is not None, 10_000)
    assert "frozen" in region.hosts["b"].alarms
    region.store._revoke(region.store.entries[KEYS.broker("a")].lease)
    region.pass_ms(3 * LEASE_MS)
    assert region.record().epoch == 7, "nobody is elected"
    key = KEYS.shard(SHARD)
    reconciled = changed(region.record(), epoch=1_000, election="2" * 16, leader="", isr={"b": 1, "c": 1})
    region.store.transact([], [Put(key, encode(reconciled, key))])
    assert region.do(reconciliation.thaw(region.view()))
    region.until(lambda: region.record().leader == "b")
    assert region.record().epoch > 1_000
    assert "frozen" not in region.hosts["b"].alarms


def test_r10_a_store_that_went_back_and_went_on_is_known_by_the_epoch_or_the_election_of_one_shard() -> None:
    for elected_again in (False, True):
        region = Region()
        region.place("abc")
        region.pass_ms(100)
        backup = region.store.backup()
        region.die("a")
        region.until(lambda region=region: region.record().epoch == 8)
        client = region.hosts["b"].client
        client.cut_in = True
        region.store.restore(backup)
        region.keep()
        # By the time that the controller hears of it, the store is at a higher revision than ever before.
        for number in range(50):
            region.store.transact([], [Put("k", b"%d" % number)])
        if elected_again:
            region.store._revoke(region.store.entries[KEYS.broker("a")].lease)
            assert region.led() == "b" and region.record().epoch == 8
        client.heal()
        region.until(lambda region=region: region.view().frozen is not None, 10_000)


def test_r10_a_shard_whose_record_is_gone_is_not_placed_anew() -> None:
    region = Region()
    backup = region.store.backup()
    region.wants(WISH)
    region.until(lambda: SHARD in region.view().shards)
    region.pass_ms(100)
    region.store.restore(backup)
    region.pass_ms(10_000)
    assert not region.view().shards and region.view().frozen is not None


def test_wanted_streams_are_placed_and_deleted_ones_are_removed_with_their_mark() -> None:
    region = Region("abcd", controllers="a")
    wish = StreamWish(STREAM, "acme/payments/orders", shards=8, replicas=3, min=2, spread=True)
    region.wants(wish)
    region.until(lambda: len(region.view().shards) == 8)
    records = list(region.view().shards.values())
    assert all(
        record.epoch == 1 and len(record.isr) == 3 and record.leader == record.replicas[0]
        for record in records
    )
    assert sorted(record.leader for record in records) == [*"aabbccdd"]
    region.store.transact([], [Put(DELETED, b"")])
    region.wants(deleted={STREAM: region.store.revision})
    region.until(lambda: not region.view().shards)


def arrive(region: Region) -> None:
    """What leaders do for moves: they take targets into their sets, and yield where another is to lead."""
    for shard, record in region.view().shards.items():
        after = record
        for broker in (each for each in record.target if each in region.view().alive):
            after = membership.with_expanded(after, broker, region.registration(broker))
        if membership.is_target_in_sync(after) and after.leader != after.target[0]:
            after = membership.with_yield(after, "move")
        if after != record and record.leader and record.yielded is None:
            view = region.view()
            revision = view.revision_of(KEYS.shard(shard))
            region.do(transactions.change(view, shard, record.leader, record, revision, after))


def carry_out(region: Region, rounds: int) -> None:
    """Controllers and leaders by turns, 50 ms each."""
    for _ in range(rounds):
        region.pass_ms(50)
        arrive(region)


def test_a_drained_broker_loses_its_shards_two_at_a_time() -> None:
    region = Region("abcd", controllers="d")
    wish = changed_wish(shards=12, replicas=2)
    region.wants(wish)
    region.until(lambda: len(region.view().shards) == 12)
    assert region.do(registration.drain(region.view(), "a", on=True))
    for _ in range(40):
        region.pass_ms(50)
        moving = [record for record in region.view().shards.values() if record.target]
        assert sum("a" in record.replicas for record in moving) <= 2
        arrive(region)
    records = region.view().shards.values()
    assert not any("a" in {*record.replicas, *record.target, *record.members()} for record in records)
    assert all(record.leader and len(record.isr) == 2 for record in records)


def test_what_has_nowhere_to_go_stays_and_a_rebalancing_ends_all_the_same() -> None:
    region = Region("ab", controllers="b")
    region.wants(dataclasses.replace(WISH, replicas=2))
    region.until(lambda: len(region.view().shards) == 1)
    assert region.do(registration.drain(region.view(), "a", on=True))
    before = region.record()
    region.rebalance()
    region.pass_ms(1_000)
    assert region.record() == before and {*before.replicas} == {*"ab"}
    assert region.view().rebalance is None, "what cannot be moved is not waited for"


@pytest.mark.parametrize("copies", [1, 2])
def test_a_leader_that_leaves_goes_once_all_shards_that_it_is_to_lead_have_their_copies(copies: int) -> None:
    region = Region("abcd", controllers="d")
    wish = dataclasses.replace(changed_wish(shards=6, replicas=copies), spread=False)
    region.wants(wish)
    region.until(lambda: len(region.view().shards) == 6)
    (leader,) = {record.leader for record in region.view().shards.values()}
    assert region.do(registration.drain(region.view(), leader, on=True))
    for _ in range(60):
        region.pass_ms(50)
        records = region.view().shards.values()
        new = [set(record.target) - set(record.replicas) for record in records]
        assert sum(map(bool, new)) <= 2
        led = [record.leader for record in records if not record.yielded]
        if {*led} != {leader}:
            assert not any(new) and all({*record.replicas} - {leader} for record in records)
        arrive(region)
    records = region.view().shards.values()
    assert (
        len({record.leader for record in records}) == 1 and len({record.replicas for record in records}) == 1
    )
    assert all(len(record.replicas) == copies and leader not in record.replicas for record in records)


def test_a_leader_leaves_also_where_its_shards_were_moved_apart() -> None:
    """As by a drain that was ended half way."""
    region = Region("abcde", controllers="d")
    region.place("abc", number=0, leader="a", replicas=("a", "b", "c"))
    region.place("bce", number=1, leader="b", replicas=("b", "c", "e"))
    region.wants(dataclasses.replace(changed_wish(shards=2, replicas=3), spread=False))
    assert region.do(registration.drain(region.view(), "a", on=True))
    carry_out(region, 100)
    records = region.view().shards.values()
    assert not any("a" in record.replicas or record.target for record in records)
    assert len({record.leader for record in records}) == 1


def test_handing_over_shard_by_shard_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller.ControllerCore, "_step_to", lambda self, shard, target, *of: target)
    with pytest.raises(AssertionError):
        test_a_leader_that_leaves_goes_once_all_shards_that_it_is_to_lead_have_their_copies(1)


def test_what_is_in_memory_goes_on_with_one_other_broker_once_its_leader_has_stopped() -> None:
    region = Region("abcd", controllers="d")
    wish = dataclasses.replace(
        changed_wish(shards=100, replicas=1), spread=False, stays=True, in_memory=True, durability="interval"
    )
    region.wants(wish)
    region.until(lambda: len(region.view().shards) == 100)
    (leader,) = set(region.leaders())
    if leader == "d":
        leader = "a"
        region.die("d")
        region.until(lambda: "d" not in region.leaders())
        (leader,) = set(region.leaders())
    assert region.do(registration.drain(region.view(), leader, on=True))
    region.pass_ms(500)
    assert {*region.leaders()} == {leader}, "not while it runs"
    epoch = next(iter(region.view().shards.values())).epoch
    region.die(leader)
    region.until(lambda: leader not in region.leaders(), 20_000)
    records = region.view().shards.values()
    (after,) = {record.replicas for record in records}
    assert after != (leader,) and all(
        record.epoch > epoch and record.isr.keys() == {*after} for record in records
    )


def test_a_rebalance_moves_streams_of_several_shards_as_one() -> None:
    region = Region("abc", controllers="a")
    wishes = [
        StreamWish(f"{number:032x}", f"acme/ops/s{number}", shards=3, replicas=1, min=1)
        for number in range(1, 13)
    ]
    region.wants(*wishes)
    region.until(lambda: len(region.view().shards) == 36)
    region.boots["d"] = 1
    region.files["d"] = FolderRecord(folder="dd" * 16)
    region.start("d")
    region.pass_ms(500)
    region.rebalance()
    carry_out(region, 120)
    records = region.view().shards
    for wish in wishes:
        assert len({records[ShardId(wish.incarnation, number)].replicas for number in range(3)}) == 1
    assert not any(record.target for record in records.values())
    assert sum(record.leader == "d" for record in records.values()) == 9


def test_what_nobody_leads_is_not_moved_and_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only copies went with their broker: there is nobody to copy from, until an operator decides. Then it moves as others do."""
    plans = 0

    class Counted(Planning):
        def __init__(self, *of: Any) -> None:
            nonlocal plans
            plans += 1
            super().__init__(*of)

    monkeypatch.setattr(controller, "Planning", Counted)
    region = Region("abc", controllers="a")
    wishes = [StreamWish(f"{number:032x}", f"acme/ops/s{number}", 1, 1, 1) for number in range(1, 25)]
    region.wants(*wishes)
    region.until(lambda: len(region.view().shards) == 24 and all(region.leaders()))
    lost = {shard for shard, record in region.view().shards.items() if record.leader == "c"}
    assert len(lost) == 8
    region.die("c")
    region.pass_ms(3 * LEASE_MS)
    region.boots["d"] = 1
    region.files["d"] = FolderRecord(folder="dd" * 16)
    region.start("d")
    region.pass_ms(500)
    host = region.hosts["a"]
    region.rebalance()
    carry_out(region, 120)
    records = region.view().shards
    assert {shard for shard, record in records.items() if not record.leader} == lost
    assert all(records[shard].replicas == ("c",) and not records[shard].target for shard in lost)
    led = Counter(record.leader for shard, record in records.items() if shard not in lost)
    assert min(led[name] for name in "abd") >= 4 and not any(record.target for record in records.values())
    settled = plans
    region.pass_ms(3_000)
    assert plans == settled and not host.core.wants_step, "nothing is planned for ever"

    # They come back, and go where they should.
    region.start("c")
    region.pass_ms(2 * LEASE_MS)
    assert all(region.view().shards[shard].leader == "c" for shard in lost)
    region.rebalance()
    carry_out(region, 120)
    led = Counter(record.leader for record in region.view().shards.values())
    assert set(led.values()) == {6}


def test_what_stays_is_not_moved_off_a_drained_broker_and_holds_up_nothing() -> None:
    region = Region("abcd", controllers="d")
    alone = [
        StreamWish(f"{number:032x}", f"acme/ops/s{number}", 4, 1, 1, stays=True) for number in range(1, 4)
    ]
    region.wants(changed_wish(shards=8, replicas=2), *alone)
    region.until(lambda: len(region.view().shards) == 20)
    before = {
        shard: record.replicas
        for shard, record in region.view().shards.items()
        if shard.incarnation != STREAM
    }
    assert region.do(registration.drain(region.view(), "a", on=True))
    carry_out(region, 40)
    after = region.view().shards
    assert all(after[shard].replicas == place and not after[shard].target for shard, place in before.items())
    assert not any("a" in record.replicas for shard, record in after.items() if shard.incarnation == STREAM)
    region.rebalance()
    carry_out(region, 40)
    assert all(region.view().shards[shard].replicas == place for shard, place in before.items())


def test_a_move_that_is_under_way_goes_elsewhere_when_its_broker_is_drained_and_back_when_that_ends() -> None:
    region = Region("abcd", controllers="d")
    region.wants(changed_wish(shards=1, replicas=3))
    region.until(lambda: len(region.view().shards) == 1)
    first = next(iter(region.view().shards.values())).replicas
    spare = next(broker for broker in "abcd" if broker not in first)
    assert region.do(registration.drain(region.view(), first[1], on=True))
    region.until(lambda: spare in next(iter(region.view().shards.values())).target)
    assert region.do(registration.drain(region.view(), spare, on=True))
    region.until(lambda: set(next(iter(region.view().shards.values())).target) == {*first} - {first[1]})
    assert region.do(registration.drain(region.view(), first[1], on=False))
    region.until(lambda: set(next(iter(region.view().shards.values())).target) == {*first})
    arrive(region)
    region.until(lambda: not next(iter(region.view().shards.values())).target)
    assert set(next(iter(region.view().shards.values())).replicas) == {*first}


def test_fewer_copies_are_kept_where_fewer_are_wanted_and_more_where_more_are() -> None:
    region = Region("abcd", controllers="d")
    region.wants(changed_wish(shards=4, replicas=3))
    region.until(lambda: len(region.view().shards) == 4)
    for count in (2, 4):
        region.wants(changed_wish(shards=4, replicas=count))
        carry_out(region, 40)
        assert {len(record.replicas) for record in region.view().shards.values()} == {count}


def test_what_was_placed_while_a_broker_was_away_gets_its_copy_there_each_time_that_it_is_back() -> None:
    region = Region("abc", controllers="a")
    for shards in (2, 4, 6):
        region.die("c")
        region.pass_ms(500)
        region.wants(changed_wish(shards=shards, replicas=3))
        region.until(lambda wanted=shards: len(region.view().shards) == wanted)
        region.start("c")
        carry_out(region, 40)
        assert {len(record.replicas) for record in region.view().shards.values()} == {3}, shards


def changed_wish(*, shards: int, replicas: int) -> StreamWish:
    return StreamWish(STREAM, "acme/payments/orders", shards=shards, replicas=replicas, min=1, spread=True)


def test_a_rebalance_gives_a_new_broker_its_share_and_each_its_leaders() -> None:
    region = Region("abc", controllers="a")
    region.wants(changed_wish(shards=12, replicas=1))
    region.until(lambda: len(region.view().shards) == 12)
    region.boots["d"] = 1
    region.files["d"] = FolderRecord(folder="dd" * 16)
    region.start("d")
    before = {shard: record.replicas for shard, record in region.view().shards.items()}
    region.pass_ms(500)
    assert before == {shard: record.replicas for shard, record in region.view().shards.items()}, (
        "not by itself"
    )
    region.rebalance()
    carry_out(region, 20)
    after = region.view().shards
    assert sum(before[shard] != after[shard].replicas for shard in after) == 3
    assert sorted(record.leader for record in after.values()) == [*"aaabbbcccddd"]


def test_a_rebalance_spreads_leaders_that_elections_gathered_and_copies_nothing() -> None:
    """Whoever was restarted first leads everything; who is named first of the copies says who led it once."""
    region = Region("abc", controllers="a")
    for number in range(9):
        region.place(
            "abc", number=number, leader="a", replicas=tuple("abc"[number % 3 :] + "abc"[: number % 3])
        )
    region.wants(dataclasses.replace(WISH, shards=9))
    region.pass_ms(500)
    assert region.leaders() == ["a"] * 9, "not by itself"
    region.rebalance()
    for _ in range(20):
        region.pass_ms(50)
        records = region.view().shards.values()
        assert all(set(record.target) <= {*"abc"} == set(record.replicas) for record in records)
        arrive(region)
    assert Counter(region.leaders()) == {"a": 3, "b": 3, "c": 3}


def test_a_rebalance_goes_on_with_the_next_controller_and_ends_with_it() -> None:
    region = Region("abcd", controllers="abc")
    region.die("d")
    region.pass_ms(300)
    region.wants(changed_wish(shards=12, replicas=2))
    region.until(lambda: len(region.view().shards) == 12)
    region.start("d")
    region.rebalance()
    region.until(lambda: any(record.target for record in region.view().shards.values()))
    first = region.view().controller
    assert first is not None
    region.hosts.pop(first.broker).die()
    region.die(first.broker)
    carry_out(region, 200)
    region.start(first.broker)
    carry_out(region, 200)
    second = region.view().controller
    assert second is not None and second.broker != first.broker
    assert Counter(
        broker for record in region.view().shards.values() for broker in record.replicas
    ) == dict.fromkeys("abcd", 6)
    assert region.view().rebalance is None
    # Nobody moves anything that was not asked for, whoever becomes the controller.
    before = {shard: record.replicas for shard, record in region.view().shards.items()}
    region.die("d")
    region.hosts[first.broker] = region.host(first.broker)
    region.wants(changed_wish(shards=12, replicas=2))
    region.hosts.pop(second.broker).die()
    region.die(second.broker)
    carry_out(region, 200)
    assert before == {shard: record.replicas for shard, record in region.view().shards.items()}


def test_a_word_to_rebalance_that_comes_while_one_ends_is_carried_out() -> None:
    region = Region("abc", controllers="a")
    region.wants(changed_wish(shards=4, replicas=1))
    region.until(lambda: len(region.view().shards) == 4)
    host = region.hosts["a"]
    region.rebalance()
    region.until(lambda: not host.core.rebalances and region.view().rebalance is not None)
    region.rebalance()
    later = region.view().revision_of(KEYS.rebalance)
    region.until(lambda: region.view().rebalance is None)
    ended = [each.transaction for each in host.sent if Delete(KEYS.rebalance) in each.transaction.writes]
    assert ModRevision(KEYS.rebalance, later) in ended[-1].compares and len(ended) > 1


@pytest.mark.parametrize("moment_ms", range(0, 12, 2))
def test_a_rebalancing_that_is_ended_begins_no_further_move_however_late_its_controller_hears_of_it(
    moment_ms: int,
) -> None:
    region = Region("abc", controllers="ab")
    region.wants(changed_wish(shards=24, replicas=1))
    region.until(lambda: len(region.view().shards) == 24)
    region.boots["d"] = 1
    region.files["d"] = FolderRecord(folder="dd" * 16)
    region.start("d")
    region.pass_ms(500)
    region.rebalance()
    region.pass_ms(20)
    arrive(region)
    region.store.run(region.store.now_ms + moment_ms)
    region.pass_ms(1)
    assert region.do(transactions.rebalanced(region.view()))
    begun = {shard for shard, record in region.view().shards.items() if record.target}
    before = {shard: place_of(record) for shard, record in region.view().shards.items()}
    for _ in range(30):
        region.pass_ms(50)
        assert {shard for shard, record in region.view().shards.items() if record.target} <= begun
        arrive(region)
    after = region.view()
    assert not any(record.target for record in after.shards.values()) and after.rebalance is None
    assert before == {shard: place_of(record) for shard, record in after.shards.items()}, "what moved arrived"
    assert sum(record.leader == "d" for record in after.shards.values()) < 6
    # It may be asked for again.
    region.rebalance()
    carry_out(region, 60)
    assert Counter(region.leaders()) == dict.fromkeys("abcd", 6)


def test_a_copy_is_made_elsewhere_where_its_broker_is_gone_and_others_are_not_held_up() -> None:
    region = Region("abcde", controllers="a")
    region.wants(changed_wish(shards=20, replicas=2))
    region.until(lambda: len(region.view().shards) == 20)
    assert region.do(registration.drain(region.view(), "b", on=True))
    region.until(lambda: any(record.target for record in region.view().shards.values()))
    new = [broker for record in region.view().shards.values() for broker in record.target[-1:]]
    gone = next(broker for broker in new if broker != "a")
    region.die(gone)
    carry_out(region, 20)
    assert any(gone in record.target for record in region.view().shards.values()), "it may be back soon"
    region.pass_ms(controller.COPY_AWAITED_MS)
    carry_out(region, 200)
    records = region.view().shards.values()
    left = [record for record in records if "b" in record.replicas]
    assert all(gone in record.replicas and gone not in record.isr for record in left), "these wait for it"
    assert left and all(gone in record.replicas for record in records if gone in record.target)
    region.start(gone)
    carry_out(region, 200)
    assert not any("b" in {*record.replicas, *record.target} for record in region.view().shards.values())


def test_a_move_that_cannot_end_is_replaced_also_where_a_new_copy_is_in_sync_already() -> None:
    region = Region("abcde", controllers="a")
    for number in range(1, 5):
        region.place("bd", number=number, leader="b", replicas=("b", "d"), min=1)
    moved = region.place("eb", leader="e", replicas=("c", "e"), target=("c", "b"), min=1)
    region.wants(changed_wish(shards=5, replicas=2))
    region.die("c")
    assert region.do(registration.drain(region.view(), "c", on=True))
    region.rebalance()
    carry_out(region, 100)
    record = region.record(moved)
    assert not record.target and len(record.replicas) == 2 and "c" not in record.replicas
    assert isinstance(registration.retire(region.view(), "c"), transactions.Transaction)
    assert region.view().rebalance is None


def test_a_copy_whose_broker_is_gone_is_given_up_where_no_other_may_have_it() -> None:
    region = Region("abc", controllers="a")
    region.die("c")
    region.wants(changed_wish(shards=1, replicas=2))
    region.until(lambda: len(region.view().shards) == 1)
    (before,) = region.view().shards.values()
    region.start("c")
    region.wants(changed_wish(shards=1, replicas=3))
    region.until(lambda: "c" in next(iter(region.view().shards.values())).target)
    region.die("c")
    region.pass_ms(controller.COPY_AWAITED_MS)
    carry_out(region, 40)
    (record,) = region.view().shards.values()
    assert not record.target and {*record.replicas} == {*before.replicas} == {*"ab"}
    region.start("c")
    carry_out(region, 40)
    (record,) = region.view().shards.values()
    assert {*record.replicas} == {*"abc"} and not record.target


@pytest.mark.parametrize("seed", range(12))
def test_a_rebalance_ends_whoever_leads_what_belongs_together(seed: int) -> None:
    """Elections may have left a queue and its dead letters, on the same brokers, with other leaders and in another order: they are planned as one all the same,
    or the plan and the gathering of leaders would take them from each other for ever."""
    random = Random(seed)
    region = Region("abc", controllers="a")
    wishes = []
    for number in range(1, 6):
        replicas = tuple(random.sample("abc", 3))
        wish = dataclasses.replace(
            WISH,
            incarnation=f"{number:032x}",
            stream=f"acme/payments/s{number}",
            spread=False,
            groups=("jobs", "jobs") if number <= 3 else (),
        )
        record = shard_record(
            region._members("abc"), {}, leader=random.choice(replicas), replicas=replicas, stream=wish.stream
        )
        region.store.transact([], [Put(KEYS.shard(ShardId(wish.incarnation, 0)), encode(record, "a test"))])
        wishes.append(wish)
    region.wants(*wishes)
    region.pass_ms(300)
    region.rebalance()
    carry_out(region, 30)
    settled = region.view().shards
    assert len({record.leader for record in list(settled.values())[:3]}) == 1
    assert not any(record.target for record in settled.values())
    carry_out(region, 20)
    assert region.view().shards == settled


def test_a_record_that_cannot_be_read_is_left_alone_with_an_alarm() -> None:
    region = Region()
    region.wants(changed_wish(shards=2, replicas=3))
    region.store.transact([], [Put(KEYS.shard(SHARD), b'{"of": "a later version"}')])
    region.until(lambda: len(region.view().shards) == 1)
    region.pass_ms(500)
    assert region.store.entries[KEYS.shard(SHARD)].value == b'{"of": "a later version"}'
    assert any(KEYS.shard(SHARD) in subject for subject in region.hosts["b"].alarms)


def test_a_broker_whose_records_cannot_be_read_is_neither_replaced_nor_dead() -> None:
    region = Region()
    region.place("abc")
    region.pass_ms(100)
    for key in (KEYS.node("c"), KEYS.broker("a")):
        region.store.transact([], [Put(key, b'{"of": "a later version"}')])
    region.pass_ms(2 * LEASE_MS)
    record = region.record()
    assert (record.epoch, record.leader, record.isr) == (7, "a", {"a": 1, "b": 1, "c": 1})
    assert {KEYS.node("c"), KEYS.broker("a")} <= region.hosts["b"].alarms.keys()
    region.store.transact([], [Delete(KEYS.broker("a"))])
    region.until(lambda: region.record().leader == "b")
    assert region.record().elr == {"a": 1, "c": 1} and KEYS.broker("a") not in region.hosts["b"].alarms


def test_how_long_a_broker_has_been_silent_counts_from_when_it_was_seen_to_go() -> None:
    region = Region()
    region.pass_ms(100)
    core = region.hosts["b"].core
    now = int(region.store.now_ms)
    assert core.silent_ms("a", now) == 0
    region.die("a")
    region.pass_ms(1_000)
    assert 900 <= core.silent_ms("a", int(region.store.now_ms)) <= 1_000


def test_shards_of_one_stream_get_one_leader_again_that_has_all_of_them() -> None:
    region = Region("abcd", controllers="d")
    region.place("abc", number=0)
    region.place("ac", number=1)
    wish = dataclasses.replace(WISH, shards=2, spread=False)
    region.die("a")
    region.until(lambda: region.leaders() == ["b", "c"])
    # b lacks some of the other shard, and c has all of both.
    region.wants(wish)
    carry_out(region, 20)
    assert region.leaders() == ["c", "c"]
    records = [*region.view().shards.values()]
    assert {record.replicas for record in records} == {("c", "a", "b")}
    assert not any(record.target for record in records), "a is away, and has its copies all the same"
    epochs = [record.epoch for record in records]
    region.pass_ms(5_000)
    assert [record.epoch for record in region.view().shards.values()] == epochs


def test_streams_that_dead_letters_go_between_get_one_leader() -> None:
    region = Region("abc", controllers="c")
    dead = "cd" * 16
    jobs = dataclasses.replace(WISH, spread=False, groups=("jobs", "jobs"))
    region.wants(jobs)
    region.until(lambda: len(region.view().shards) == 1)
    (first,) = region.leaders()
    region.die(first)
    region.until(lambda: region.leaders() not in ([""], [first]))
    region.start(first)
    region.wants(jobs, dataclasses.replace(jobs, incarnation=dead, stream="acme/payments/orders.dead"))
    carry_out(region, 20)
    assert len(region.leaders()) == 2 and len({*region.leaders()}) == 1


def test_a_leader_that_goes_while_leaders_are_brought_together_is_given_up() -> None:
    region = Region("abcd", controllers="d")
    region.place("abc", number=0)
    region.place("bca", number=1, leader="b")
    region.wants(dataclasses.replace(WISH, shards=2, spread=False))
    region.until(lambda: any(record.target for record in region.view().shards.values()))
    (wanted,) = {record.target[0] for record in region.view().shards.values() if record.target}
    region.die(wanted)
    carry_out(region, 20)
    assert len({*region.leaders()}) == 1 and wanted not in region.leaders()
    assert not any(record.target for record in region.view().shards.values())


@pytest.mark.parametrize("shards", [2, 50, pytest.param(256, marks=only_slow)])
def test_a_stream_of_any_size_is_brought_together(shards: int) -> None:
    """More shards than are decided on in one step, too."""
    region = Region("abcd", controllers="d")
    for number in range(shards):
        first = "abc"[number % 3]
        region.place("abc", number=number, leader=first)
    region.wants(dataclasses.replace(WISH, shards=shards, spread=False))
    carry_out(region, 60)
    assert len({*region.leaders()}) == 1
    assert not any(record.target for record in region.view().shards.values())


def test_streams_whose_shards_all_changed_meanwhile_are_brought_together_too() -> None:
    """Each shard goes alone then, which is more transactions than are sent at once; what was not sent is decided again."""
    region = Region("abcd", controllers="d")
    streams = [f"{number:032x}" for number in range(1, 5)]
    shards = [ShardId(incarnation, number) for incarnation in streams for number in range(10)]
    records = {}
    for shard in shards:
        first = "abc"[shard.number % 3]
        records[shard] = shard_record(region._members("abc"), {}, leader=first)

    def touch() -> None:
        region.store.transact(
            [], [Put(KEYS.shard(shard), encode(records[shard], "of the test")) for shard in shards]
        )

    touch()
    region.pass_ms(100)
    region.hosts["d"].client.cut_in = True  # What it knows is old by the time that it decides.
    touch()
    region.wants(*(dataclasses.replace(WISH, incarnation=each, shards=10, spread=False) for each in streams))
    region.pass_ms(100)
    region.hosts["d"].client.heal()
    carry_out(region, 100)
    assert {
        incarnation: len(
            {
                record.leader
                for shard, record in region.view().shards.items()
                if shard.incarnation == incarnation
            }
        )
        for incarnation in streams
    } == dict.fromkeys(streams, 1)
    assert not any(record.target for record in region.view().shards.values())
