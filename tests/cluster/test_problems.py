"""What each broker says is wrong with its region, and how to go on: the most serious first."""

from __future__ import annotations

import pytest
from cluster.samples import ELECTION, KEYS, SHARD, STREAM, node, shard_record, view_of

from felix.settings import Durability
from region.cluster.election import JournalEnd, LogEnd, Unopened
from region.cluster.problems import Found, look, may_be_uneven, survey, uneven_leaders, vacancy
from region.cluster.records import FrozenRecord, RebalanceRecord, ShardId, ShardRecord, encode
from region.cluster.view import ClusterView
from region.log.companions import JournalKind
from region.metadata.records import AUDIT_STREAM, Stream, StreamConfig
from region.metadata.transaction import Change, Entry, Event

NAME = "acme/payments/orders"
WHOLE = {"a": 5, "b": 5, "c": 5}


def stream(shards: int = 1, replicas: int = 3, name: str = NAME, kind: str = "fsync") -> Stream:
    return Stream(
        name=name,
        incarnation=STREAM,
        created_ms=0,
        config=StreamConfig(shards=shards, replicas=replicas, durability=Durability(kind)),  # type: ignore[arg-type]
    )


def seen(view: ClusterView, **of: object) -> Found:
    return look(view, [stream(**of)], "us-east")  # type: ignore[arg-type]


def one_copy(broker: str, registration: int = 5, **changed: object) -> ShardRecord:
    return shard_record({broker: registration}, replicas=(broker,), min=1, **changed)


def test_a_region_in_which_all_is_well_has_no_problem_and_no_remark() -> None:
    assert seen(view_of(WHOLE, shards={0: shard_record(WHOLE)})) == Found([], [])


def test_shards_that_nobody_can_lead_come_first_with_the_reason_and_the_command_at_whichever_broker() -> None:
    alive = {"a": 5, "b": 5}
    view = view_of(
        WHOLE,
        alive,
        {0: one_copy("c"), 1: shard_record({"a": 5, "b": 5}), 2: one_copy("c"), 3: one_copy("a")},
    )
    led, away, copies = seen(view, shards=4, replicas=2).problems
    assert led == (
        f"Nobody leads {NAME} shard 0, {NAME} shard 2: c is not alive. Start c; only if its disk is lost: "
        "`felix region up us-east --broker c --replace-folder`."
    )
    assert away.startswith(
        "Broker c is not alive, and has copies of 3 shards. Start it; if it is gone for good: `felix region drain c`"
    )
    assert copies.startswith("Not every copy is in sync")
    assert vacancy(view, ShardId(STREAM, 0)) == "c is not alive" and vacancy(view, ShardId(STREAM, 1)) == ""


def test_a_shard_whose_folder_was_replaced_is_recovered_from_the_broker_that_has_the_new_one() -> None:
    view = view_of({"a": node(6, whole_since=6, kept_since=6)}, shards={0: one_copy("a", 5)})
    assert seen(view, replicas=1).problems == [
        f"Nobody leads {NAME} shard 0: a has another folder. What was there was given up; without it goes on: "
        f"`felix region recover-shard {NAME} 0 --from a --accept-loss --region us-east`."
    ]


def test_an_empty_new_folder_is_not_what_a_shard_is_recovered_from_while_another_copy_is_alive() -> None:
    nodes = {"a": node(6, whole_since=6, kept_since=6), "b": node(), "c": node()}
    view = view_of(nodes, shards={0: shard_record({}, leader="", min=1)})
    assert survey(view, [stream()]).asks_for_ends() == [SHARD]
    (led, *_) = seen(view).problems
    assert (
        "no copy has all that is committed. What was there was given up" in led
        and "--from b --accept-loss" in led
    )
    heard = {
        "a": LogEnd(6, 0, "", (0, 0)),
        "b": LogEnd(5, 7, ELECTION, (190, 0)),
        "c": LogEnd(5, 7, ELECTION, (200, 0)),
    }
    (led, *_) = look(view, [stream()], "us-east", {SHARD: heard}).problems
    assert "a has no records, b has records to 189, c has records to 199. What was there was given up" in led
    assert "--from c --accept-loss" in led
    # The last epoch counts first, and what would be cut for it is named.
    heard["b"] = LogEnd(5, 8, ELECTION, (190, 0))
    (led, *_) = look(view, [stream()], "us-east", {SHARD: heard}).problems
    assert "--from b --lost c --accept-loss" in led


def test_what_a_living_copy_has_of_a_journal_is_named_where_the_command_cuts_it() -> None:
    nodes = {"a": node(6, whole_since=6, kept_since=6), "b": node(), "c": node()}
    view = view_of(nodes, shards={0: shard_record({}, leader="", min=1)})
    heard = {
        "a": LogEnd(6, 0, "", (0, 0)),
        "b": LogEnd(5, 7, ELECTION, (200, 0), (JournalEnd(JournalKind.QUEUE, 7, (50, 0)),)),
        "c": LogEnd(5, 7, ELECTION, (190, 0), (JournalEnd(JournalKind.QUEUE, 7, (60, 0)),)),
    }
    (led, *_) = look(view, [stream()], "us-east", {SHARD: heard}).problems
    assert "With the copy of b, c loses entries 50 to 59 of the queue journal. What was there" in led
    assert "--from b --lost c --accept-loss" in led
    # Said too where there is somebody to wait for.
    view = view_of(nodes, {"b": 5, "c": 5}, {0: shard_record({"a": 6}, leader="", min=1)})
    (led, *_) = look(view, [stream()], "us-east", {SHARD: heard}).problems
    assert "c loses entries 50 to 59 of the queue journal. Start a; only if" in led
    assert "--from b --lost a --lost c --accept-loss" in led


def test_a_copy_that_is_away_is_to_be_started_before_another_one_is_the_shard() -> None:
    nodes = {"a": node(6, whole_since=6, kept_since=6), "b": node(), "c": node()}
    view = view_of(nodes, {"a": 6, "b": 5}, {0: shard_record({}, leader="", min=1)})
    heard = {"a": LogEnd(6, 0, "", (0, 0)), "b": LogEnd(5, 7, ELECTION, (190, 0))}
    (led, *_) = look(view, [stream()], "us-east", {SHARD: heard}).problems
    assert "Start c, which may have more; only if that is lost, too: `" in led
    assert "--from b --lost c --accept-loss" in led


def test_of_members_that_are_away_each_is_named_as_lost_in_the_command() -> None:
    record = shard_record({"a": 5}, {"b": 5}, leader="")
    (led, *_) = seen(view_of(WHOLE, {"c": 5}, {0: record})).problems
    assert "a is not alive; b is not alive. Start a, b; only if what was there is lost: " in led
    assert "--from c --lost a --lost b --accept-loss" in led


def test_a_copy_that_failed_wants_a_restart_and_the_audit_log_is_never_recovered() -> None:
    failed = shard_record({"a": 5}, replicas=("a",), min=1, leader="", failed={"a": 5})
    assert (
        seen(view_of({"a": 5}, shards={0: failed}), replicas=1)
        .problems[0]
        .endswith("a has a copy that failed. Restart a.")
    )
    lost = shard_record({"a": 5}, stream=str(AUDIT_STREAM))
    (led, *_) = seen(view_of(WHOLE, {"b": 5, "c": 5}, {0: lost}), name=str(AUDIT_STREAM)).problems
    assert "a is not alive. Start a: more than half of its copies are needed. Give up no data folder" in led


def test_an_audit_log_that_was_given_up_with_a_folder_is_told_apart_from_streams_and_has_a_way_on() -> None:
    nodes = {broker: node(7, folder=f"{broker}2" * 16, whole_since=7, kept_since=7) for broker in WHOLE}
    given_up = {
        number: shard_record({}, leader="", stream=name)
        for number, name in enumerate((str(AUDIT_STREAM), NAME))
    }
    view = view_of(nodes, dict.fromkeys(WHOLE, 7), {0: given_up[0]})
    (audit, *_) = seen(view, name=str(AUDIT_STREAM)).problems
    assert "It is led by no copy that may lack leaves" in audit and "docs/operations.md" in audit
    both = view_of(nodes, dict.fromkeys(WHOLE, 7), given_up)
    groups = survey(both, [stream(shards=2)]).groups
    assert [[str(shard) for shard in found] for found in groups.values()] == [
        [f"{NAME} shard 0"],
        [f"{NAME} shard 1"],
    ]


def test_a_shard_below_its_min_names_the_brokers_to_start() -> None:
    record = shard_record({"a": 5}, {"b": 5}, leader="a", min=2)
    (below, *_) = seen(view_of(WHOLE, {"a": 5}, {0: record})).problems
    assert below.endswith("fewer copies are in sync than a record needs. Start b, c.")
    (below, *_) = seen(view_of(WHOLE, WHOLE, {0: record})).problems
    assert "Their copies catch up" in below


def test_a_shard_below_its_min_for_want_of_brokers_says_so_and_what_to_do() -> None:
    nodes = {"a": 5, "b": node(drain=True), "c": node(drain=True)}
    alone = {0: shard_record({"a": 5}, replicas=("a",), min=2)}
    (below,), remarks = seen(view_of(nodes, shards=alone))
    assert not remarks, "it is not as it should be"
    assert below == (
        f"Nothing is written to {NAME} shard 0: {NAME} needs 2 copies and 1 broker may have one. Have 4 brokers (felix region scale 4 --region us-east, "
        "where all are on one machine), or felix region undrain b."
    )
    # Retired they are no brokers to be undrained, and one that is away is to be started.
    (below, *_) = seen(view_of({"a": 5, "d": 5}, {"a": 5}, alone)).problems
    assert "1 broker may have one. Have 3 brokers (" in below and below.endswith("), or start d.")
    # To start one that is drained is not enough; nor may it be started before it is known whether it lives.
    away = view_of(nodes | {"b": 5}, {"a": 5}, alone)
    assert seen(away).problems[0].endswith(", or start b.")
    assert "That is from before" in survey(away, [stream()]).found("us-east", is_out_of_date=True).problems[0]
    # Whoever has a copy keeps it while no other may have one; a move that is under way is waited for.
    kept = {0: shard_record({"a": 5}, replicas=("a", "b"), min=2)}
    assert seen(view_of(nodes, shards=kept)).problems[0].endswith("as is said below.")
    assert seen(view_of(nodes, {"a": 5}, kept)).problems[0].endswith("Start b.")
    going = {0: shard_record({"a": 5}, replicas=("a",), target=("a", "b"), min=2)}
    assert seen(view_of(nodes, shards=going)).problems[0].endswith("as is said below.")


def test_shards_below_their_min_are_told_by_what_is_to_be_done() -> None:
    nodes = {"a": 5, "b": node(drain=True)}
    view = view_of(
        nodes,
        {"a": 5},
        {
            0: shard_record({"a": 5}, replicas=("a",), min=2),
            1: shard_record({"a": 5}, replicas=("a", "b"), min=2),
        },
    )
    short, away, *_ = seen(view, shards=2).problems
    assert short.startswith(f"Nothing is written to {NAME} shard 0: {NAME} needs 2 copies and 1 broker")
    assert away.startswith(f"Nothing is written to {NAME} shard 1: fewer") and away.endswith("Start b.")


def test_a_copy_that_cannot_be_opened_is_put_right_or_given_up_for_another_one() -> None:
    failed = shard_record({"a": 5}, leader="", failed={"a": 5})
    view = view_of(WHOLE, shards={0: failed})
    heard = {
        "a": Unopened(5, "byte 9 does not hold."),
        "b": LogEnd(5, 0, "", (0, 0)),
        "c": LogEnd(5, 7, ELECTION, (9, 0)),
    }
    assert survey(view, [stream()]).asks_for_ends() == [SHARD]
    assert seen(view).problems[0].endswith("a has a copy that failed. Restart a."), (
        "its disk may have, and not its copy"
    )
    assert look(view, [stream()], "us-east", {SHARD: heard}).problems[0] == (
        f"Nobody leads {NAME} shard 0: a has a copy that failed. b has no records, c has records to 8. a cannot open its copy: byte 9 does not "
        "hold. If what is damaged there can be put back, do so and restart a; only if what was there is lost: "
        f"`felix region recover-shard {NAME} 0 --from c --lost a --accept-loss --region us-east`."
    )


def test_what_is_about_to_be_led_or_placed_is_said_as_such() -> None:
    soon = f"Nobody leads {NAME} shard 0 yet: a broker is about to."
    assert seen(view_of(WHOLE, {"b": 5, "c": 5}, {0: shard_record(WHOLE)})).problems[0] == soon
    assert seen(view_of(WHOLE)).problems == [soon]
    in_memory = view_of(WHOLE, {"b": 5, "c": 5}, {0: one_copy("a")})
    assert seen(in_memory, replicas=1, kind="ephemeral").problems[0] == soon


def test_a_new_stream_waits_for_an_undrain_where_each_broker_that_is_alive_is_drained() -> None:
    nodes = {"a": 5, "b": node(drain=True), "c": node(drain=True)}
    assert seen(view_of(nodes, {"b": 5, "c": 5})).problems[0] == (
        f"Nobody leads {NAME} shard 0: each broker that is alive is drained, and gets no copies. "
        "`felix region undrain b` lets one have them again, or start a."
    )
    assert "a broker is about to" in seen(view_of(nodes)).problems[0]


def test_a_shard_to_which_nothing_is_written_is_told_before_copies_that_lack() -> None:
    told = seen(view_of(WHOLE, {"a": 5}, {0: shard_record({"a": 5})})).problems
    assert (
        told[0]
        == f"Nothing is written to {NAME} shard 0: fewer copies are in sync than a record needs. Start b, c."
    )
    assert [each.split()[0] for each in told] == ["Nothing", "Broker", "Broker", "Too"]
    assert told[-1] == f"Too few copies while b, c are not alive: {NAME} shard 0 has 1 of 3 (a)."


def test_fewer_copies_while_a_broker_is_drained_are_a_remark_and_no_problem() -> None:
    nodes = {"a": 5, "b": 5, "c": node(drain=True)}
    two = shard_record({"a": 5, "b": 5}, replicas=("a", "b"))
    shards = dict.fromkeys(range(5), two)
    names = ", ".join(f"{NAME} shard {number} has 2 of 3 (a, b)" for number in range(3))
    remark = f"Fewer copies while c is drained, which is normal: {names} and 2 more."
    assert seen(view_of(nodes, shards=shards), shards=5) == Found([], [remark])
    # It may be stopped, too; that is why it was drained.
    stopped = {**nodes, "c": node(drain=True, clean=5)}
    away = (
        "Broker c was stopped and is not alive, is drained, and has no copies. If it is gone for good: "
        "`felix region retire c`."
    )
    assert seen(view_of(stopped, {"a": 5, "b": 5}, shards), shards=5) == Found([], [away, remark])


def test_copies_that_are_made_or_catch_up_are_a_problem_that_ends_by_itself() -> None:
    behind = f"Not every copy is in sync: {NAME} shard 0 has 2 of 3 (a, b)."
    for record in (
        shard_record({"a": 5, "b": 5}),
        shard_record({"a": 5, "b": 5}, replicas=("a", "b")),
        shard_record({"a": 5, "b": 5}, replicas=("a", "b"), target=("a", "b", "c")),
    ):
        assert seen(view_of(WHOLE, shards={0: record})) == Found([behind], [])


def test_a_stream_with_more_copies_than_brokers_is_a_remark() -> None:
    two = {"a": 5, "b": 5}
    told = seen(view_of(two, shards={0: shard_record(two, replicas=("a", "b"))}))
    assert told == Found(
        [], [f"Fewer copies, as the region has 2 brokers: {NAME} shard 0 has 2 of 3 (a, b)."]
    )


def test_a_broker_that_is_away_and_has_nothing_may_be_retired_at_once() -> None:
    (told,) = seen(view_of({**WHOLE, "d": 1}, WHOLE, {0: shard_record(WHOLE)})).problems
    assert (
        told
        == "Broker d is not alive, and has no copies. Start it; if it is gone for good: `felix region retire d`."
    )


def test_a_rebalancing_that_somebody_asked_for_is_a_remark_until_it_has_ended() -> None:
    view = view_of(WHOLE, shards={0: shard_record(WHOLE)})
    view.rebalance = RebalanceRecord("spiffe://us-east.acme/operator/kim")
    problems, (remark,) = seen(view)
    assert not problems and "as spiffe://us-east.acme/operator/kim asked" in remark


def led_by(*leaders: str, **changed: object) -> dict[int, ShardRecord]:
    """Shards with a copy at each broker, in sync, by their leaders."""
    return {
        number: shard_record({leader: 5} | WHOLE, leader=leader, **changed)
        for number, leader in enumerate(leaders)
    }


def test_leaders_that_a_rebalancing_would_even_out_are_told_with_the_command() -> None:
    view = view_of(WHOLE, shards=led_by("a", "a", "a", "a", "b"))
    assert may_be_uneven(view)
    planned = {
        ShardId(STREAM, number): (leader, *(other for other in WHOLE if other != leader))
        for number, leader in enumerate("ccaab")
    }
    assert list(uneven_leaders(view, planned, "us-east")) == [
        "Leaders are uneven: broker a leads 4 of 5 shards, broker c leads none. `felix region rebalance --region us-east` evens them out, to 2 at one "
        "broker at most."
    ]
    # Of one copy each, as where one broker had the region alone, they are copied first.
    alone = view_of(
        WHOLE,
        shards={number: shard_record({"a": 5}, leader="a", replicas=("a",), min=1) for number in range(4)},
    )
    (told,) = uneven_leaders(
        alone, {ShardId(STREAM, number): (leader,) for number, leader in enumerate("abca")}, "us-east"
    )
    assert told.endswith("to 2 at one broker at most. For that 2 shards are copied first.")
    # What a rebalancing would leave so, as where all are shards of one stream, is not told.
    stays = {ShardId(STREAM, number): tuple(WHOLE) for number in range(5)}
    assert not list(uneven_leaders(view, stays, "us-east"))
    # Nor what it would only turn around.
    turned = {
        shard: (leader, *(other for other in WHOLE if other != leader))
        for shard, leader in zip(view.shards, "bbbba", strict=True)
    }
    assert not list(uneven_leaders(view, turned, "us-east"))
    # Nor what no rebalancing moves, as it has too few brokers for it.
    assert not list(uneven_leaders(view, dict.fromkeys(view.shards, ("b",)), "us-east"))


def test_nothing_is_said_of_leaders_while_brokers_restart_or_copies_move_nor_where_they_are_even() -> None:
    uneven = led_by("a", "a", "a", "a")
    assert may_be_uneven(view_of(WHOLE, shards=uneven))
    assert not may_be_uneven(view_of(WHOLE, shards=led_by("a", "a", "b", "c")))
    assert not may_be_uneven(view_of({"a": 5}, shards=uneven)), "of one broker"
    assert not may_be_uneven(view_of(WHOLE))
    away = view_of(WHOLE, {"a": 5, "b": 5}, uneven)
    assert not may_be_uneven(away)
    # A broker that is to have nothing keeps nobody from being told.
    assert may_be_uneven(view_of(WHOLE | {"c": node(drain=True)}, {"a": 5, "b": 5}, uneven))
    behind = uneven | {4: shard_record({"b": 5, "a": 5})}
    assert not may_be_uneven(view_of(WHOLE, shards=behind))
    moving = uneven | {4: shard_record(WHOLE, target=("b", "a", "c"))}
    assert not may_be_uneven(view_of(WHOLE, shards=moving))
    assert not may_be_uneven(view_of(WHOLE, shards=uneven | {4: shard_record(WHOLE, leader="")}))
    asked = view_of(WHOLE, shards=uneven)
    asked.rebalance = RebalanceRecord("kim")
    assert not may_be_uneven(asked)
    assert not may_be_uneven(view_of(WHOLE, shards=uneven, frozen=FrozenRecord("a", "it is older")))


def test_since_when_leaders_stand_is_told_by_the_view() -> None:
    view = view_of(WHOLE, shards=led_by("a"))
    before = view.leaders_since
    for revision, record in (
        (before + 1, shard_record({"a": 5, "b": 5})),
        (before + 2, shard_record({"b": 5, "a": 5}, leader="b", epoch=8)),
        (before + 3, shard_record({"b": 5} | WHOLE, leader="b", epoch=8)),
    ):
        key = KEYS.shard(SHARD)
        entry = Entry(key, encode(record, key), revision, revision)
        view.apply(Change(revision, (Event(key, entry),)))
    assert view.leaders_since == before + 2


def test_a_store_that_went_back_comes_before_what_follows_from_it() -> None:
    view = view_of(WHOLE, {"a": 5}, {0: one_copy("c")}, frozen=FrozenRecord("a", "the store is older"))
    told = seen(view, replicas=1).problems
    assert told[0].startswith("The metadata store is older than the brokers' folders: the store is older.")
    assert "felix region reconcile us-east --dry-run" in told[0] and told[1].startswith("Nobody leads")
    # Who would be elected, were it not for that, is not said to be about to.
    view = view_of(WHOLE, {"b": 5, "c": 5}, {0: shard_record(WHOLE)}, frozen=view.frozen)
    assert seen(view).problems[1] == (
        f"Nobody leads {NAME} shard 0: nothing is elected before the region is reconciled."
    )


def test_a_record_that_cannot_be_read_is_named_and_its_shard_not_taken_for_vacant() -> None:
    view = view_of(WHOLE, shards={0: shard_record(WHOLE)})
    view.unreadable[KEYS.shard(SHARD)] = "it is of a later version"
    assert seen(view).problems == [f"{KEYS.shard(SHARD)} cannot be read: it is of a later version"]


@pytest.mark.parametrize("count", [6, 7])
def test_many_reasons_are_not_all_told(count: int) -> None:
    nodes = {f"x{number}": 5 for number in range(count)}
    view = view_of(nodes, {}, {number: one_copy(f"x{number}") for number in range(count)})
    told = [each for each in seen(view, shards=count, replicas=1).problems if "Nobody" in each]
    assert len(told) == 6 and told[-1] == f"Nobody leads shards for {count - 5} more reasons."
