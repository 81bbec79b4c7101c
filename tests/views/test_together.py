"""Streams that dead letters go between are one group."""

from __future__ import annotations

from felix.settings import QueueSettings, Retries, SubscriptionSettings, Views
from region.metadata.records import Stream, StreamConfig, Subscription
from region.views.together import places_together


def stream(name: str, dead_letter: str | None = None) -> Stream:
    views = (
        Views()
        if dead_letter is None
        else Views(queue=QueueSettings(retries=Retries(dead_letter=dead_letter)))
    )
    return Stream(
        name=f"acme/ops/{name}", incarnation="ab" * 16, created_ms=1, config=StreamConfig(views=views)
    )


def groups(*streams: Stream, subscriptions: tuple[Subscription, ...] = ()) -> set[frozenset[str]]:
    found: dict[str, set[str]] = {}
    for name, (_, group) in places_together(streams, subscriptions).items():
        found.setdefault(group, set()).add(name.removeprefix("acme/ops/"))
    return set(map(frozenset, found.values()))


def test_a_stream_is_with_its_own_dead_letters_and_theirs() -> None:
    streams = [stream(name) for name in ("a.dead.dead", "a", "a.dead", "b", "b2.dead")]
    assert groups(*streams) == {frozenset({"a", "a.dead", "a.dead.dead"})}


def test_queues_that_name_one_stream_are_together_and_a_name_that_is_no_stream_joins_nothing() -> None:
    streams = [
        stream("a", "acme/ops/d"),
        stream("b", "acme/ops/d"),
        stream("c", "acme/ops/e"),
        stream("c2", "acme/ops/e"),
    ]
    assert groups(*streams) == set()
    assert groups(*streams, stream("d")) == {frozenset({"a", "b", "d"})}


def test_a_streams_own_dead_letters_are_with_it_before_those_that_it_names() -> None:
    streams = [stream("a", "acme/ops/d"), stream("a.dead"), stream("b", "acme/ops/d"), stream("d")]
    found = places_together(streams, ())
    own = {
        name.removeprefix("acme/ops/"): first.removeprefix("acme/ops/") for name, (first, _) in found.items()
    }
    assert own == {"a": "a", "a.dead": "a", "b": "b", "d": "d"}
    assert len({group for _, group in found.values()}) == 1


def test_a_durable_subscription_names_one_for_its_stream() -> None:
    named = Subscription(
        stream="acme/ops/a",
        name="crew",
        id="cd" * 8,
        incarnation="ab" * 16,
        creator="x",
        created_ms=1,
        settings=SubscriptionSettings(retries=Retries(dead_letter="acme/ops/d")),
    )
    assert groups(stream("a"), stream("d"), subscriptions=(named,)) == {frozenset({"a", "d"})}
