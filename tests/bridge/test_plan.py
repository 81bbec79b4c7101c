"""Which links run, from documents alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from random import Random
from typing import Any, cast

import pytest
from approvers import roots, with_approvals
from departures import DAY, terms
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import bridge.plan as plan_module
from bridge.plan import (
    NAMES_SAID,
    SHARDS_MAX,
    STEP_ROWS,
    Fitting,
    Known,
    Plan,
    PlannedLink,
    Planner,
    Verdict,
    plan_links,
)
from bridge.source_streams import SourceStreams
from felix.connection import RegionConnection
from felix.errors import Code, UnavailableError
from felix.messages import ListStreams, ShardState, StreamPage, StreamState
from felix.names import SpiffeId
from felix.settings import Durability, Retention
from felix.steps import finished
from keys.signing import SigningKey
from policy.grant import (
    Attempt,
    DenyEntry,
    GrantBook,
    Standing,
    StandingAction,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import parse_policy
from policy.signed import SignedDocument

NOW = 40 * DAY
US, EU, MALLORY = (SigningKey.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3))
TRUSTED = {"us-east": (US.verify_key.public,), "eu-west": (EU.verify_key.public,)}
BRIDGE = SpiffeId.parse("spiffe://us-east.acme/bridge/us-to-eu")
STREAM = "acme/ops/departures"
_REGIONS = (
    "regions:\n  us-east: {country: US, jurisdiction: US}\n  eu-west: {country: IE, jurisdiction: EU}\n"
)
_RULE = "classes: [ops]\n    bases: [scc]\n    lifetime: 90d\n    wildcards: true\n"
_CLASS = "classes:\n  ops: {description: Flights., streams: [acme/ops/*]}\n"
POLICY_US = parse_policy(
    f"version: 1\nname: us\nrevision: 1\nregion: us-east\n{_REGIONS}{_CLASS}"
    f"exports:\n  - name: out\n    to: {{regions: [eu-west]}}\n    {_RULE}",
    "us",
)
POLICY_EU = parse_policy(
    f"version: 1\nname: eu\nrevision: 1\nregion: eu-west\n{_REGIONS}{_CLASS}"
    f"imports:\n  - name: in\n    from: {{regions: [us-east]}}\n    {_RULE}",
    "eu",
)


def halves(*, signed_at: int = NOW, **changes: Any) -> tuple[SignedDocument, SignedDocument, str]:
    wanted = terms(**changes)
    export = sign_export(wanted, POLICY_US, US.private_key, signed_at)
    accepted = sign_import(
        export, POLICY_EU, EU.private_key, TRUSTED, "spiffe://eu-west.acme/operator/bob", NOW
    )
    return export, accepted, GrantBook([export], TRUSTED).list(NOW)[0].grant


def stream(name: str = STREAM, shards: int = 1) -> dict[str, StreamState]:
    return {name: StreamState(name, b"i" * 16, shards, Durability(), Retention(), 0, 0)}


def rows(*documents: SignedDocument, now: int = NOW, **more: Any) -> tuple[PlannedLink, ...]:
    fields: dict[str, Any] = {
        "bridge": BRIDGE,
        "streams": stream(),
        "destinations": ["eu-west"],
        "now_ms": now,
    }
    return plan_links(GrantBook(with_approvals(*documents), TRUSTED, roots()), **{**fields, **more})


def one(*documents: SignedDocument, **more: Any) -> PlannedLink:
    (row,) = rows(*documents, **more)
    return row


def standing(
    grant: str, action: StandingAction, region: str = "eu-west", key: SigningKey = EU
) -> SignedDocument:
    said = Standing(grant=grant, action=action, region=region, sequence=1, at=NOW, by="alice")
    return sign_standing(said, key.private_key)


def test_a_grant_with_both_halves_runs_one_link_per_shard() -> None:
    export, accepted, grant = halves()
    found = rows(export, accepted, streams=stream(shards=3))
    assert [(row.grant, row.stream, row.shard, row.shards, row.verdict) for row in found] == [
        (grant, STREAM, shard, 3, Verdict.RUN) for shard in range(3)
    ]


def test_one_half_alone_waits() -> None:
    export, accepted, _ = halves()
    for alone in (export, accepted):
        row = one(alone)
        assert (row.verdict, row.code) == (Verdict.WAIT, Code.GRANT_MISSING)


def test_halves_of_different_terms_wait() -> None:
    export, _, _ = halves()
    _, other, _ = halves(purpose="advertising")
    assert {row.verdict for row in rows(export, other)} == {Verdict.WAIT}


def test_a_forged_half_counts_for_nothing() -> None:
    export, _, _ = halves()
    forged = SignedDocument(
        export.purpose, export.region, export.key, export.body, MALLORY.sign("grant-export", export.body)
    )
    assert rows(forged) == ()


def test_a_forged_revocation_stops_nothing() -> None:
    export, accepted, grant = halves()
    assert one(export, accepted, standing(grant, StandingAction.REVOKE, key=MALLORY)).verdict is Verdict.RUN


@pytest.mark.parametrize(
    ("action", "verdict", "code"),
    [
        (StandingAction.PAUSE, Verdict.PAUSE, Code.PAUSED),
        (StandingAction.RESUME, Verdict.RUN, 0),
        (StandingAction.REVOKE, Verdict.STOP, Code.GRANT_REVOKED),
    ],
)
def test_what_a_region_says_later_holds(action: StandingAction, verdict: Verdict, code: int) -> None:
    export, accepted, grant = halves()
    row = one(export, accepted, standing(grant, action))
    assert (row.verdict, row.code) == (verdict, code)


def test_a_grant_holds_from_its_beginning_to_its_end() -> None:
    export, accepted, _ = halves(not_before=NOW + 10, expires=NOW + 20)
    found = [one(export, accepted, now=now).verdict for now in (NOW, NOW + 10, NOW + 19, NOW + 20)]
    assert found == [Verdict.WAIT, Verdict.RUN, Verdict.RUN, Verdict.STOP]


def test_deny_wins_until_it_is_lifted() -> None:
    export, accepted, _ = halves()

    def deny(sequence: int, lifted: bool) -> SignedDocument:
        entry = DenyEntry(
            streams="acme/*/*",
            peer="*",
            region="us-east",
            sequence=sequence,
            at=NOW,
            by="alice",
            lifted=lifted,
        )
        return sign_deny(entry, US.private_key)

    row = one(export, accepted, deny(1, False))
    assert (row.verdict, row.code) == (Verdict.DENY, Code.RESIDENCY_DENIED)
    assert one(export, accepted, deny(1, False), deny(2, True)).verdict is Verdict.RUN


def test_grants_of_other_bridges_are_nobodys_business() -> None:
    export, accepted, _ = halves(bridge="spiffe://us-east.acme/bridge/another")
    assert rows(export, accepted) == ()


def test_a_stream_that_is_not_there_and_a_region_that_is_not_configured_wait() -> None:
    export, accepted, _ = halves()
    missing = one(export, accepted, streams={})
    assert (missing.verdict, missing.code, missing.shard) == (Verdict.WAIT, Code.NOT_FOUND, -1)
    assert one(export, accepted, destinations=[]).verdict is Verdict.WAIT


def test_a_wildcard_runs_for_each_stream_that_it_names() -> None:
    export, accepted, _ = halves(stream="acme/ops/*", wildcard=True)
    named = {**stream(), **stream("acme/ops/arrivals"), **stream("acme/hr/people")}
    found = rows(export, accepted, streams=named)
    assert [row.stream for row in found] == ["acme/ops/arrivals", STREAM]
    assert all(row.destination_stream == row.stream for row in found)


def test_two_grants_for_one_stream_run_one_link_and_say_why() -> None:
    first, second = halves(), halves(purpose="planning")
    found = rows(*first[:2], *second[:2])
    assert sorted(row.verdict for row in found) == [Verdict.RUN, Verdict.WAIT]
    assert next(row.code for row in found if row.verdict is Verdict.WAIT) == Code.CONFLICT


def test_of_two_grants_for_one_stream_the_one_signed_first_runs_until_it_ends() -> None:
    purposes = ("planning", "analytics", "research", "forecasts", "billing")
    signed = [halves(purpose=purpose, signed_at=NOW - age) for age, purpose in enumerate(purposes)]
    documents = [document for export, accepted, _ in signed for document in (export, accepted)]
    running = [row.grant for row in rows(*documents) if row.verdict is Verdict.RUN]
    assert running == [signed[-1][2]]
    found = rows(*documents, standing(signed[-1][2], StandingAction.REVOKE))
    assert [row.grant for row in found if row.verdict is Verdict.RUN] == [signed[-2][2]]
    assert {row.reason.split()[0] for row in found if row.verdict is Verdict.WAIT} == {signed[-2][2]}


def test_two_grants_into_two_streams_both_run() -> None:
    first, second = halves(), halves(destination_stream="acme/ops/copy")
    found = rows(*first[:2], *second[:2])
    assert sorted(row.destination_stream for row in found if row.verdict is Verdict.RUN) == [
        "acme/ops/copy",
        STREAM,
    ]


def test_beyond_the_limit_links_wait_and_say_so() -> None:
    export, accepted, _ = halves()
    found = rows(export, accepted, streams=stream(shards=5), links_max=3)
    assert [row.verdict for row in found] == [Verdict.RUN] * 3 + [Verdict.WAIT] * 2


def test_beyond_the_limit_no_later_stream_takes_the_place_of_an_earlier_one_nor_of_one_that_is_granted_by_name() -> (
    None
):
    by_name = halves(stream="acme/ops/zulu", destination_stream="acme/ops/zulu")
    pattern = halves(stream="acme/ops/y*", destination_stream="acme/ops/y*", wildcard=True)
    made = {"acme/ops/yankee": (NOW - 2, 2), "acme/ops/yaa": (NOW - 1, 200), "acme/ops/zulu": (NOW, 1)}
    streams = {
        name: replace(stream(name, shards)[name], created_ms=created_ms)
        for name, (created_ms, shards) in made.items()
    }
    found = rows(*by_name[:2], *pattern[:2], streams=streams, links_max=5)
    running = [(row.stream, row.shard) for row in found if row.verdict is Verdict.RUN]
    assert sorted(running) == [
        ("acme/ops/yaa", 0),
        ("acme/ops/yaa", 1),
        ("acme/ops/yankee", 0),
        ("acme/ops/yankee", 1),
        ("acme/ops/zulu", 0),
    ]
    assert found == tuple(sorted(found, key=lambda row: row[:3]))


def made_at(created_ms: int, name: str, shards: int = 1) -> StreamState:
    return replace(stream(name, shards)[name], created_ms=created_ms)


def wildcard(first: str, **changes: Any) -> tuple[SignedDocument, SignedDocument, str]:
    pattern = f"acme/ops/{first}*"
    return halves(stream=pattern, destination_stream=pattern, wildcard=True, **changes)


@pytest.mark.parametrize("by_name", [True, False])
def test_streams_of_one_grant_take_no_link_of_anothers_share(by_name: bool) -> None:
    """Whoever may make the stream that a grant names, or streams that fit a pattern, chooses how many shards it has; and may have made it before all others."""
    costly = halves(stream="acme/ops/aa", destination_stream="acme/ops/aa") if by_name else wildcard("a")
    others = [wildcard(first) for first in "bc"]
    made = (
        made_at(NOW - 9, "acme/ops/aa", 256),
        made_at(NOW - 2, "acme/ops/ba", 4),
        made_at(NOW, "acme/ops/bb", 4),
        made_at(NOW - 1, "acme/ops/ca", 1),
    )
    documents = [each for found in (costly, *others) for each in found[:2]]
    found = rows(*documents, streams={each.stream: each for each in made}, links_max=15)
    running = Counter(row.stream for row in found if row.verdict is Verdict.RUN)
    assert running == {"acme/ops/aa": 9, "acme/ops/ba": 4, "acme/ops/bb": 1, "acme/ops/ca": 1}


def taken(states: Iterable[StreamState]) -> Fitting:
    fitting = Fitting()
    for state in states:
        fitting.take(state)
    return fitting


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 3, 8])), max_size=14),
    st.randoms(use_true_random=False),
)
def test_of_streams_that_fit_those_made_first_are_looked_at_however_they_are_listed(
    made: list[tuple[int, int]], rng: Random
) -> None:
    states = [made_at(when, f"acme/ops/s{at}", shards) for at, (when, shards) in enumerate(made)]
    rng.shuffle(states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.plan.STREAMS_MAX", 5)
        patch.setattr("bridge.plan.SHARDS_MAX", 20)
        fitting = taken(states)
    ordered = sorted(states, key=lambda each: (each.created_ms, each.stream))
    kept, shards = list[StreamState](), 0
    for state in ordered:
        shards += state.shards
        if shards > 20 or len(kept) == 5:
            break
        kept.append(state)
    left = ordered[len(kept) :]
    assert fitting.names() == tuple(sorted(each.stream for each in kept))
    assert (fitting.left, fitting.left_shards) == (len(left), sum(each.shards for each in left))
    assert [name for _, name, _ in fitting.left_names] == [each.stream for each in left[:NAMES_SAID]]


def test_streams_that_have_no_room_under_a_wildcard_grant_are_named_and_keep_none_of_anothers_out() -> None:
    crowded, other = wildcard("a"), wildcard("z")
    made = [made_at(NOW + number, f"acme/ops/a{number:03}", 256) for number in range(SHARDS_MAX // 256 + 9)]
    made.append(made_at(NOW + 999, "acme/ops/zulu"))
    found = rows(*crowded[:2], *other[:2], streams={each.stream: each for each in made})
    assert len(found) == SHARDS_MAX + 2
    (said,) = (row for row in found if row.stream == "acme/ops/a*")
    assert (said.shard, said.verdict, said.code) == (-1, Verdict.WAIT, Code.LIMIT_STREAMS)
    first = SHARDS_MAX // 256
    names = ", ".join(f"acme/ops/a{number:03}" for number in range(first, first + 3))
    assert said.reason.startswith(
        f"Of the streams that fit acme/ops/a*, 9 with 2304 shards do not cross, those made last: {names} and 6 more."
    )
    assert "felix quota set" in said.reason
    assert [row.verdict for row in found if row.stream == "acme/ops/zulu"] == [Verdict.RUN]
    revoked = rows(
        *crowded[:2], standing(crowded[2], StandingAction.REVOKE), streams={s.stream: s for s in made}
    )
    assert {row.verdict for row in revoked} == {Verdict.STOP}, "a grant that ended says nothing of room"


def test_what_did_not_change_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    book = GrantBook(with_approvals(*wildcard("a")[:2]), TRUSTED, roots())
    made = {each.stream: each for each in (made_at(n, f"acme/ops/a{n:02}", 256) for n in range(12))}
    planner, asked, rows_made = Planner(BRIDGE, ["eu-west"]), list[str](), list[int]()
    check, rows_of = GrantBook.check, plan_module._rows_of

    def counted_check(self: GrantBook, attempt: Attempt, *rest: Any, **more: Any) -> Any:
        asked.append(str(attempt.stream))
        return check(self, attempt, *rest, **more)

    def counted_rows(block: Any) -> Any:
        rows_made.append(block.shards)
        return rows_of(block)

    monkeypatch.setattr(GrantBook, "check", counted_check)
    monkeypatch.setattr(plan_module, "_rows_of", counted_rows)

    def plan(now_ms: int = NOW) -> tuple[Plan, list[str], int]:
        asked.clear()
        rows_made.clear()
        found = finished(planner.plan(book, Known(made), now_ms))
        return found, sorted(asked), sum(rows_made)

    first, streams, count = plan()
    assert (streams, count) == (sorted(made), 12 * 256)
    again, streams, count = plan(NOW + 1)
    assert (streams, count) == ([], 0)
    assert all(again[place] is rows for place, rows in first.items())
    made["acme/ops/a99"] = made_at(99, "acme/ops/a99", 2)
    _, streams, count = plan(NOW + 2)
    assert (streams, count) == (["acme/ops/a99"], 2)
    ended, streams, count = plan(NOW + 10_000 * DAY)
    assert len(streams) == len(made) and count == 12 * 256 + 2
    assert {row.verdict for rows in ended.values() for row in rows} == {Verdict.STOP}


def test_a_plan_is_made_in_steps_of_some_hundred_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    book = GrantBook(with_approvals(*wildcard("a")[:2]), TRUSTED, roots())
    made = {each.stream: each for each in (made_at(n, f"acme/ops/a{n:02}", 256) for n in range(16))}
    worked, longest = 0, 0
    accepted = GrantBook.accepted_truncations

    def counted(self: GrantBook, *about: Any) -> Any:
        nonlocal worked
        worked += 1
        return accepted(self, *about)

    monkeypatch.setattr(GrantBook, "accepted_truncations", counted)
    steps = 0
    for _ in Planner(BRIDGE, ["eu-west"]).plan(book, Known(made), NOW):
        longest, worked, steps = max(longest, worked), 0, steps + 1
    assert longest <= STEP_ROWS + 256 and steps >= 2 * 16 * 256 // (STEP_ROWS + 256)


def test_a_publisher_has_one_share_of_an_agents_work_however_many_patterns_name_its_stream() -> None:
    """Whoever signs a pattern gives what fits it a share; and a stream that several name would have as many."""
    wide, narrow = wildcard(""), wildcard("a")
    exact = halves(stream="acme/ops/ab", destination_stream="acme/ops/else")
    made = {name: made_at(NOW, name, 2) for name in ("acme/ops/ab", "acme/ops/ac", "acme/ops/b")}

    def shares(*grants: tuple[SignedDocument, SignedDocument, str]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for row in rows(*(each for grant in grants for each in grant[:2]), streams=made):
            if row.verdict is Verdict.RUN:
                found.setdefault(row.stream, set()).add(row.share)
        return found

    assert shares(wide) == {name: {"acme/ops/*"} for name in made}
    two = {"acme/ops/ab": {"acme/ops/a*"}, "acme/ops/ac": {"acme/ops/a*"}, "acme/ops/b": {"acme/ops/*"}}
    assert shares(wide, narrow) == two
    assert shares(wide, narrow, exact) == {**two, "acme/ops/ab": {"acme/ops/ab"}}


@pytest.mark.parametrize("limit", [3, 100])
async def test_streams_are_listed_once_for_all_patterns_of_a_beginning_and_without_their_shards(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    made = [f"acme/ops/a{number}" for number in range(5)] + [f"acme/ops/b{number}" for number in range(5)]
    asked = list[ListStreams]()

    async def pages(_: Any, listed: ListStreams, *__: Any) -> AsyncIterator[StreamPage]:
        asked.append(listed)
        for name in made:
            if name.startswith(listed.prefix):
                shard = ShardState(0, 0, 0, 0, 0)
                yield StreamPage([replace(stream(name)[name], state=[shard])])

    monkeypatch.setattr("bridge.source_streams.pages", pages)
    monkeypatch.setattr("bridge.source_streams.LISTED_MAX", limit)
    exports = [wildcard(first)[0] for first in "ab"] + [wildcard("a", purpose="planning")[0]]
    book, connection = GrantBook(exports, TRUSTED), cast(RegionConnection, None)
    known = await SourceStreams().list_known(connection, book, BRIDGE, {})
    assert sorted(known.streams) == [*made[: min(limit, 5)], *made[5 : 5 + limit]]
    assert not any(state.state for state in known.streams.values()), "its leader alone knows of a shard"
    assert sorted(each.prefix for each in asked) == ["acme/ops/a", "acme/ops/b"]
    assert all(each.brief for each in asked)
    said = [kept.said("acme/ops/a*") for kept in known.fitting.values()]
    assert all("are looked at then" in each for each in said) if limit < 5 else not any(said)


async def test_streams_that_one_pattern_fits_hide_none_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [made_at(n, f"acme/ops/{first}{n}") for first in "ab" for n in range(5)]

    async def pages(_: Any, listed: ListStreams, *__: Any) -> AsyncIterator[StreamPage]:
        for state in made:
            if state.stream.startswith(listed.prefix):
                yield StreamPage([state])

    monkeypatch.setattr("bridge.source_streams.pages", pages)
    monkeypatch.setattr("bridge.plan.STREAMS_MAX", 3)
    book = GrantBook([wildcard(first)[0] for first in "ab"], TRUSTED)
    known = await SourceStreams().list_known(cast(RegionConnection, None), book, BRIDGE, {})
    assert sorted(known.streams) == [each.stream for each in (*made[:3], *made[5:8])]


async def test_who_makes_streams_hides_none_that_comes_later_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link that runs would end, for as long as they are there."""
    made = {each.stream: each for each in (made_at(1, "acme/ops/zz"), made_at(2, "acme/ops/b1"))}
    asked, fails = list[str](), set[str]()

    async def pages(_: Any, listed: ListStreams, *__: Any) -> AsyncIterator[StreamPage]:
        for name in sorted(made):
            if name.startswith(listed.prefix) and name > listed.after:
                if name in fails:
                    fails.remove(name)
                    raise UnavailableError("The broker went away.")
                asked.append(name)
                yield StreamPage([made[name]])

    monkeypatch.setattr("bridge.source_streams.pages", pages)
    monkeypatch.setattr("bridge.source_streams.LISTED_MAX", 3)
    monkeypatch.setattr("bridge.plan.STREAMS_MAX", 2)
    source, grant = SourceStreams(), wildcard("")
    books = [GrantBook([grant[0]], TRUSTED), GrantBook([grant[0], wildcard("a")[0]], TRUSTED)]

    async def seen(book: GrantBook = books[0]) -> list[str]:
        asked.clear()
        known = await source.list_known(cast(RegionConnection, None), book, BRIDGE, {})
        assert len(asked) <= 3 * len(known.fitting)
        assert set(known.streams) == {name for each in known.fitting.values() for name in each.names()}
        return sorted(known.fitting[grant[2]].names())

    assert await seen() == ["acme/ops/b1", "acme/ops/zz"]
    for number in range(20):
        made[f"acme/ops/a{number:02}"] = made_at(10 + number, f"acme/ops/a{number:02}")
    for _ in range(20):
        assert await seen() == ["acme/ops/b1", "acme/ops/zz"]
    # Another grant of such names begins a round anew, and what is known of this one goes on.
    for _ in range(3):
        assert await seen(books[1]) == ["acme/ops/b1", "acme/ops/zz"]
    del made["acme/ops/b1"]
    for _ in range(20):
        await seen()
    assert await seen() == ["acme/ops/a00", "acme/ops/zz"]
    # An agent that has just begun knows of those that it has listed, until it has listed all.
    source = SourceStreams()
    assert await seen() == ["acme/ops/a00", "acme/ops/a01"]
    fails.add("acme/ops/a07")
    for _ in range(20):
        with suppress(UnavailableError):
            await seen()
    assert not fails and await seen() == ["acme/ops/a00", "acme/ops/zz"]
    known = await source.list_known(cast(RegionConnection, None), books[0], BRIDGE, {})
    (kept,) = known.fitting.values()
    assert (kept.left, kept.left_shards, kept.is_cut) == (19, 19, False), "each is counted once"
