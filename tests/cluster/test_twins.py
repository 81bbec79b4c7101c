"""Rules of the records and of the controller, switched off one by one: each is missed by the trace that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from cluster import test_controller as controller_traces
from cluster import test_registration as registration_traces
from cluster import test_transactions as traces
from cluster.samples import eligible_if_alive

from felix.errors import FelixError
from region.cluster import controller, election, membership, registration, transactions
from region.cluster.controller import ControllerCore
from region.cluster.records import ShardRecord
from region.cluster.registration import FolderRecord
from region.cluster.transactions import Transaction
from region.cluster.view import ClusterView
from region.metadata.transaction import Absent, Compare, ModRevision


class Twin(NamedTuple):
    """The rule, where it stands, what stands there instead, and the trace that misses it."""

    rule: str
    owner: object
    name: str
    instead: Any
    trace: Callable[[], None]


def never(*_: object, **__: object) -> None:
    return None


def without_frozen(view: ClusterView, term: int) -> Transaction:
    return Transaction((ModRevision(view.keys.controller, term),), ())


def without_term(view: ClusterView, term: int) -> Transaction:
    return Transaction((Absent(view.keys.frozen),), ())


def compare_record_alone(view: ClusterView, shard: Any) -> tuple[Compare, ...]:
    return (transactions.unchanged(view, view.keys.shard(shard)),)


def compare_no_brokers(view: ClusterView, brokers: Iterable[str]) -> tuple[Compare, ...]:
    return ()


def as_intended(file: FolderRecord, node: object) -> int:
    return file.registration + 1


def first_of_replicas(record: ShardRecord, member: str, brokers: election.Brokers) -> tuple[int, ...]:
    return (record.replicas.index(member),)


def keep_elr(
    record: ShardRecord, isr: dict[str, int], elr: dict[str, int], failed: dict[str, int]
) -> ShardRecord:
    fields: dict[str, Any] = {"isr": isr, "elr": elr, "failed": failed}
    return traces.changed(record, **fields)


TWINS = (
    Twin(
        "what a power cut took is known by the registration",
        registration,
        "kept_since",
        lambda file, node, *_: node.kept_since,
        traces.test_r5a_a_clean_stop_does_not_bring_back_what_a_power_cut_took_before_it,
    ),
    Twin(
        "eligible by what is recorded (interval)",
        election,
        "is_eligible",
        eligible_if_alive,
        traces.test_r5a_a_clean_stop_does_not_bring_back_what_a_power_cut_took_before_it,
    ),
    Twin(
        "eligible by what is recorded (folders)",
        election,
        "is_eligible",
        eligible_if_alive,
        traces.test_r5b_a_replaced_folder_is_not_elected_and_is_taken_out,
    ),
    Twin(
        "eligible by what is recorded (failures)",
        election,
        "is_eligible",
        eligible_if_alive,
        traces.test_r11_a_copy_that_failed_is_not_elected_under_its_registration_but_under_the_next,
    ),
    Twin(
        "an expand compares its member's registration",
        transactions,
        "_nodes",
        compare_no_brokers,
        traces.test_r5b_an_expand_that_comes_after_its_member_was_replaced_does_nothing,
    ),
    Twin(
        "an election compares its winner's registration",
        transactions,
        "_nodes",
        compare_no_brokers,
        traces.test_r6_nobody_leads_in_a_registration_that_was_not_elected,
    ),
    Twin(
        "an election compares that the leader has stopped",
        transactions,
        "_stopped",
        compare_record_alone,
        traces.test_an_election_is_void_where_the_leader_is_alive_again_or_the_record_changed,
    ),
    Twin(
        "only a leader that has stopped is replaced",
        transactions,
        "has_stopped",
        lambda *_: True,
        traces.test_a_leader_that_is_alive_is_replaced_only_by_its_own_word,
    ),
    Twin(
        "replaced folders leave the sets",
        controller,
        "without_replaced",
        lambda record, nodes: record,
        controller_traces.test_r5b_a_replaced_folder_is_taken_out_of_all_sets,
    ),
    Twin(
        "whoever was followed by another start stops",
        registration,
        "superseded",
        never,
        registration_traces.test_r7_a_process_that_lost_its_lease_is_alive_again_with_its_number_until_another_has_started,
    ),
    Twin(
        "pulses tell old copies",
        registration,
        "_pulse_of",
        never,
        registration_traces.test_r8a_a_folder_that_was_copied_within_a_registration_is_refused_once_a_pulse_has_passed,
    ),
    Twin(
        "pulses tell an old store",
        registration,
        "_pulse_of",
        never,
        registration_traces.test_r10_a_store_that_went_back_is_told_from_its_numbers_and_pulses,
    ),
    Twin(
        "only our lock proves a death",
        registration,
        "is_dead_for_certain",
        lambda *_: True,
        registration_traces.test_r8b_a_copy_of_a_folder_does_not_start_beside_the_living_broker,
    ),
    Twin(
        "no number is used by two starts",
        registration,
        "next_number",
        as_intended,
        registration_traces.test_r8c_a_start_whose_answer_was_lost_is_followed_by_another_number_whether_it_happened_or_not,
    ),
    Twin(
        "elr empties with a lower min",
        membership,
        "_settled",
        keep_elr,
        traces.test_r9_min_is_the_records_and_changes_together_with_elr,
    ),
    Twin(
        "epochs tell a store that went back",
        transactions,
        "went_back",
        lambda *_: False,
        controller_traces.test_r10_a_store_that_went_back_and_went_on_is_known_by_the_epoch_or_the_election_of_one_shard,
    ),
    Twin(
        "a frozen region elects nobody",
        transactions,
        "in_term",
        without_frozen,
        traces.test_r10_a_frozen_region_elects_nobody_and_leaders_change_nothing,
    ),
    Twin(
        "a controller writes in its term",
        transactions,
        "in_term",
        without_term,
        traces.test_the_controller_is_one_broker_that_is_alive,
    ),
    Twin(
        "a failed copy is marked",
        membership,
        "CANNOT_SERVE",
        frozenset(),
        controller_traces.test_r11_a_shard_whose_only_copy_failed_is_vacant_with_an_alarm_and_no_storm,
    ),
    Twin("order of election", election, "_rank", first_of_replicas, traces.test_r19_order_of_election),
    Twin(
        "whom most reach",
        election,
        "_rank",
        first_of_replicas,
        traces.test_r21_whom_most_of_the_replicas_reach_follows_a_leader_that_was_cut_off,
    ),
    Twin(
        "a controller without progress makes room",
        ControllerCore,
        "_watch_progress",
        never,
        controller_traces.test_r20_a_controller_that_gets_nothing_done_for_a_lease_makes_room,
    ),
    Twin(
        "interval goes on after a power cut",
        controller,
        "may_ask_for_ends",
        lambda *_: False,
        controller_traces.test_r22_after_a_power_cut_of_all_the_longest_copy_of_an_interval_shard_leads,
    ),
    Twin(
        "what has changed goes alone",
        ControllerCore,
        "_set_apart",
        never,
        controller_traces.test_r23c_one_shard_that_changes_again_and_again_does_not_hold_up_the_others,
    ),
    Twin(
        "who was away itself waits",
        ControllerCore,
        "_held_by_own_lease",
        lambda _: 0,
        controller_traces.test_r23d_a_controller_whose_own_lease_was_interrupted_gives_absent_leaders_one_lease,
    ),
    Twin(
        "where most went it waits",
        ControllerCore,
        "_held_by_others",
        lambda *_: 0,
        controller_traces.test_r23d_where_most_brokers_go_within_one_lease_it_waits_one_lease,
    ),
)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.rule)
def test_a_rule_that_is_switched_off_is_missed(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin.owner, twin.name, twin.instead)
    with pytest.raises((AssertionError, FelixError)):
        twin.trace()
