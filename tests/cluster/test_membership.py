"""How sets change: whoever leaves stays eligible while nothing can be committed without him, and no longer."""

from __future__ import annotations

from cluster.samples import changed, node, shard_record
from hypothesis import given
from hypothesis import strategies as st

from region.cluster import membership
from region.cluster.records import ShardRecord, Yielded, encode


def test_leavers_stay_eligible_with_their_recorded_registration_while_isr_is_below_min() -> None:
    record = shard_record({"a": 1, "b": 2, "c": 3})
    two = membership.with_shrunk(record, ["c"])
    assert two.isr == {"a": 1, "b": 2} and two.elr == {}
    one = membership.with_shrunk(two, ["b"])
    assert one.isr == {"a": 1} and one.elr == {"b": 2}
    back = membership.with_expanded(one, "c", 4)
    assert back.isr == {"a": 1, "c": 4} and back.elr == {}


def test_a_lower_min_empties_elr_in_the_same_change_and_a_higher_one_keeps_it() -> None:
    record = shard_record({"a": 1}, {"b": 2})
    assert membership.with_min(record, 1).elr == {}
    assert membership.with_min(record, 3) == changed(record, min=3)


def test_to_fsync_nobody_stays_who_is_only_eligible() -> None:
    record = shard_record({"a": 1}, {"b": 2}, durability="interval")
    assert membership.with_durability(record, "fsync").elr == {}
    assert membership.with_durability(record, "interval").elr == {"b": 2}


def test_a_leader_that_can_serve_yields_as_a_member() -> None:
    record = shard_record({"a": 1, "b": 2})
    assert membership.with_yield(record, "drain") == changed(record, yielded=Yielded(7, "drain"))


def test_a_leader_that_cannot_serve_leaves_isr_where_another_member_remains() -> None:
    failed = membership.with_yield(shard_record({"a": 1, "b": 2}), "failed")
    assert (failed.isr, failed.elr, failed.failed) == ({"b": 2}, {"a": 1}, {"a": 1})
    corrupt = membership.with_yield(shard_record({"a": 1, "b": 2}), "corrupt")
    assert (corrupt.isr, corrupt.elr, corrupt.failed) == ({"b": 2}, {}, {})
    only_eligible = membership.with_yield(shard_record({"a": 1}, {"b": 2}), "hung")
    assert (only_eligible.isr, only_eligible.elr) == ({}, {"a": 1, "b": 2})
    alone = membership.with_yield(shard_record({"a": 1}), "failed")
    assert (alone.isr, alone.elr, alone.failed) == ({"a": 1}, {}, {"a": 1})


def test_a_failed_sync_of_an_interval_stream_takes_what_was_acknowledged() -> None:
    failed = membership.with_yield(shard_record({"a": 1, "b": 2}, durability="interval"), "failed")
    assert (failed.isr, failed.elr) == ({"b": 2}, {})


def test_replaced_folders_leave_all_sets_but_a_leader_waits_for_its_successor() -> None:
    nodes = {
        "a": node(9, whole_since=9, kept_since=9),
        "b": node(9, whole_since=9, kept_since=9),
        "c": node(),
    }
    record = shard_record({"a": 1, "b": 2, "c": 3})
    assert membership.without_replaced(record, nodes).isr == {"a": 1, "c": 3}
    assert membership.without_replaced(changed(record, leader=""), nodes).isr == {"c": 3}
    admitted_anew = changed(record, isr={"a": 1, "b": 9, "c": 3})
    assert membership.without_replaced(admitted_anew, nodes) == admitted_anew


def test_a_move_arrives_once_its_target_is_in_sync_and_leads() -> None:
    record = shard_record({"a": 1, "b": 2, "c": 3}, target=("d", "b"))
    assert not membership.has_arrived(record)
    there = changed(record, isr=record.isr | {"d": 4})
    assert not membership.has_arrived(there), "a still leads"
    led = changed(there, leader="d")
    assert membership.arrived(led) == changed(led, replicas=("d", "b"), target=(), isr={"b": 2, "d": 4})
    assert not membership.has_arrived(changed(led, yielded=Yielded(7, "move")))
    assert not membership.has_arrived(changed(led, min=3))


def test_a_move_of_the_leader_alone_needs_no_copy_but_the_next_leaders() -> None:
    record = shard_record({"a": 1, "b": 2}, replicas=("a", "b", "c"), target=("b", "a", "c"))
    assert membership.moves_leader_alone(record) and membership.is_target_in_sync(record)
    assert not membership.is_target_in_sync(changed(record, target=("c", "a", "b")))
    led = changed(record, leader="b")
    assert membership.arrived(led) == changed(led, replicas=("b", "a", "c"), target=())


@given(st.data())
def test_every_sequence_of_changes_keeps_a_record_that_may_be_written(data: st.DataObject) -> None:
    record: ShardRecord = shard_record({"a": 1, "b": 2, "c": 3})
    registrations = {"a": 1, "b": 2, "c": 3}
    for step in data.draw(
        st.lists(st.sampled_from(["expand", "shrink", "min", "yield", "elect", "restart"]), max_size=8)
    ):
        broker = data.draw(st.sampled_from(["a", "b", "c"]))
        if step == "restart":
            registrations[broker] += 5
        elif step == "elect":
            if broker in record.members():
                nodes = {name: node(number) for name, number in registrations.items()}
                record = membership.elected(record, broker, registrations, nodes, record.election)
        elif record.yielded is None:
            match step:
                case "expand":
                    record = membership.with_expanded(record, broker, registrations[broker])
                case "shrink" if broker != record.leader:
                    record = membership.with_shrunk(record, [broker])
                case "min":
                    record = membership.with_min(record, data.draw(st.integers(1, 3)))
                case "yield":
                    why = data.draw(st.sampled_from(["failed", "drain", "corrupt"]))
                    record = membership.with_yield(record, why)
        encode(record, "a record of the test")
        assert record.failed.items() <= record.members().items()
