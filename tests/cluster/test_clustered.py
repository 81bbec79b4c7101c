"""What one of several brokers answers for its region: whether the store answers it first, and why nobody leads a shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cluster.samples import STREAM, node, shard_record, view_of

from felix.errors import UnavailableError
from region.cluster.assignments import Assignments
from region.cluster.audit_home import AuditHome
from region.cluster.view import ClusterView
from region.clustered import NO_LINK_MS, Clustered
from region.metadata.records import Stream, StreamConfig

RECORD = Stream(name="acme/payments/orders", incarnation=STREAM, created_ms=0, config=StreamConfig())
LED_BY = {"replicas": ("c",), "min": 1}
"""A shard whose only copy is at c."""


def clustered(view: ClusterView, **member: Any) -> Clustered:
    """At broker a, which is not the controller."""
    known: dict[str, Any] = {
        "broker": "a",
        "region": "us-east",
        "mirror": SimpleNamespace(view=view, is_current=True),
        "assignments": Assignments(view, "a", lambda: 5),
        "audit": AuditHome("", "cd" * 16, 1),
        "alarms": {},
        "unanswered": lambda: (0, 0),
        "refusal": lambda: None,
        "silent_members": dict,
        "may_be_out_of_date": lambda: False,
    }
    return Clustered(SimpleNamespace(**(known | member)))  # type: ignore[arg-type]


def test_a_store_that_does_not_answer_is_the_first_problem_with_since_when_and_what_is_not_served() -> None:
    view = view_of({"a": 5, "c": 5}, shards={0: shard_record({"c": 5}, **LED_BY)})
    silent = clustered(view, unanswered=lambda: (40_000, 1_700_000_000_000)).alarms([RECORD])
    assert silent[0].startswith(
        "The metadata store has not answered broker a for 40 s (since 2023-11-14T22:13:20Z). What is led is served until the lease ends;"
    )
    fenced = clustered(
        view, unanswered=lambda: (40_000, 0), refusal=lambda: UnavailableError("Its lease has ended.")
    )
    assert (
        "others, caches, durable subscriptions, workers of queues and transactions wait"
        in fenced.alarms([RECORD])[0]
    )


def test_a_member_of_the_store_that_does_not_answer_is_named_while_the_others_do() -> None:
    view = view_of({"a": 5, "c": 5}, shards={0: shard_record({"c": 5}, **LED_BY)})
    said = clustered(view, silent_members=lambda: {"http://etcd-1:2379": 42_300}).alarms([RECORD])[0]
    assert said.startswith(
        "The member http://etcd-1:2379 of the metadata store has not answered broker a for 42 s. "
    )


@pytest.mark.parametrize(
    "store",
    [
        {"unanswered": lambda: (5_000, 0)},
        {"is_current": False},
        {},  # it has only just begun to answer again
    ],
)
def test_what_a_store_that_cannot_be_asked_said_of_brokers_is_called_old_and_no_data_are_given_up_for_it(
    store: dict[str, Any],
) -> None:
    view = view_of(
        {"a": 5, "b": 5, "c": 5}, {"a": 5}, {0: shard_record({"b": 5, "c": 5}, replicas=("a", "b", "c"))}
    )
    assert any("recover-shard" in each for each in clustered(view).alarms([RECORD]))
    mirror = SimpleNamespace(view=view, is_current=store.pop("is_current", True))
    told = clustered(view, mirror=mirror, may_be_out_of_date=lambda: True, **store).alarms([RECORD])
    of_brokers = [each for each in told if "b is not alive" in each or "c is not alive" in each]
    assert any(each.startswith("Nobody leads ") for each in of_brokers)
    assert all("That is from before" in each for each in of_brokers if not each.startswith("Too few"))
    assert not any("accept-loss" in each or "retire" in each or "drain" in each for each in told)


def test_a_broker_without_its_lease_says_why_where_the_store_answers_and_so_does_what_it_refuses() -> None:
    view = view_of({"a": 5}, shards={0: shard_record({"a": 5}, replicas=("a",), min=1)})
    broker = clustered(view, refusal=lambda: UnavailableError("Its lease has ended."))
    assert broker.alarms([RECORD])[0] == "Its lease has ended." == broker.not_leader(RECORD, 0).sentence


def test_a_client_is_told_why_nobody_can_lead_a_shard() -> None:
    lost = view_of({"a": 5, "c": 5}, {"a": 5}, {0: shard_record({"c": 5}, **LED_BY)})
    refused = clustered(lost).not_leader(RECORD, 0)
    assert refused.sentence.endswith("at the moment: c is not alive.") and "says how to go on" in refused.hint
    soon = view_of({"a": 5, "c": 5}, {"a": 5}, {0: shard_record({"c": 5, "a": 5})})
    assert clustered(soon).not_leader(RECORD, 0).sentence.endswith("at the moment.")


def test_a_shard_that_lacks_copies_is_not_said_to_be_served_soon() -> None:
    for isr, told in (
        ({"a": 5}, "fewer copies are in sync than a record needs."),
        ({"a": 5, "b": 5}, "is about to be served here."),
    ):
        view = view_of(
            {"a": 5, "b": 5}, shards={0: shard_record(isr, leader="a", replicas=("a", "b"), min=2)}
        )
        refused = clustered(view, refusal=lambda: None).not_leader(RECORD, 0)
        assert refused.sentence.endswith(told) and bool(refused.hint) is ("fewer" in told)


def test_whoever_publishes_to_a_new_stream_is_told_that_no_broker_may_have_it() -> None:
    drained = {broker: node(drain=True) for broker in "ab"}
    refused = clustered(view_of(drained | {"c": 5}, {"a": 5, "b": 5})).not_leader(RECORD, 0)
    assert refused.sentence.endswith(": each broker that is alive is drained, and gets no copies.")
    assert refused.hint == "`felix region undrain a` lets one have them again, or start c."
    placed = clustered(view_of(drained | {"c": 5})).not_leader(RECORD, 0)
    assert "placed within a second" in placed.hint


def test_a_store_that_this_broker_alone_found_older_is_told_before_it_is_written_there() -> None:
    view = view_of({"a": 5}, shards={0: shard_record({"a": 5}, replicas=("a",), min=1)})
    told = clustered(
        view, alarms={"frozen": "it is at revision 3 and was at 9", "shard x/0": "b is not alive"}
    )
    problems = told.alarms([RECORD])
    assert problems[0] == "The metadata store went back: it is at revision 3 and was at 9."
    assert not any("b is not alive" in each for each in problems), (
        "what the controller said of shards is for its log"
    )


@pytest.mark.parametrize(
    ("ahead_ms", "said"),
    [
        ({"b": 0, "c": 900}, ""),
        ({"b": None, "c": None}, ""),
        ({"b": 3_600_000, "c": 20}, ""),
        ({"b": -3_600_400, "c": -3_620_000}, "The clock of broker a is 3,600 s behind that of b, c. "),
        ({"b": 7_000, "c": 6_100}, "The clock of broker a is 6 s ahead of that of b, c. "),
        (
            {"b": -86_400_000, "c": None},
            "The clock of broker a is 86,400 s behind that of b, and one of the two is wrong. ",
        ),
    ],
)
def test_a_broker_whose_clock_is_far_from_that_of_most_others_says_so(
    ahead_ms: dict[str, int | None], said: str
) -> None:
    of_three = clustered(view_of({"a": 5, "b": 5, "c": 5}), brokers=["a", "b", "c"])
    of_three.requests = SimpleNamespace(clock_ahead_ms=ahead_ms.get, apart=dict)  # type: ignore[assignment]
    told = of_three.own_troubles()
    assert told == [each for each in of_three.alarms([]) if "clock" in each]
    assert [each[: len(said)] for each in told] == ([said] if said else [])


def test_brokers_that_are_alive_and_have_no_link_are_named_once_a_dead_one_would_not_be_alive_any_more() -> (
    None
):
    of_three = clustered(view_of({"a": 5, "b": 5, "c": 5}), brokers=["a", "b", "c"])
    lease_ms = of_three.member.mirror.view.alive["b"].lease_ms
    apart = {"b": (lease_ms + NO_LINK_MS, "It is too late."), "c": (lease_ms + NO_LINK_MS - 1, "")}
    of_three.requests = SimpleNamespace(clock_ahead_ms=lambda peer: None, apart=lambda: apart)  # type: ignore[assignment]
    (told,) = of_three.own_troubles()
    seconds = (lease_ms + NO_LINK_MS) // 1_000
    assert told.startswith(
        f"Brokers a and b are both alive, and have had no link for {seconds} s: It is too late. Neither"
    )
    # Of what is heard of others, each pair is told by one of them.
    assert of_three.own_troubles("c") == [told]
    apart = {"a": (lease_ms + NO_LINK_MS, "")}
    of_three.member.broker = "b"  # type: ignore[misc]
    assert of_three.own_troubles("c") == []
    assert "no link for" in of_three.own_troubles()[0]
