"""Which links run, from documents alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from approvers import roots, with_approvals
from departures import DAY, terms
from msgspec.structs import replace

from bridge.agent import Agent
from bridge.plan import PlannedLink, Verdict, plan_links
from felix.errors import Code
from felix.messages import ListStreams, StreamPage, StreamState
from felix.names import SpiffeId
from felix.settings import Durability, Retention
from keys.signing import SigningKey
from policy.grant import (
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


async def test_streams_that_one_pattern_fits_hide_none_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [f"acme/ops/a{number}" for number in range(5)] + [f"acme/ops/b{number}" for number in range(5)]

    async def pages(_: Any, listed: ListStreams, *__: Any) -> AsyncIterator[StreamPage]:
        for name in made:
            if name.startswith(listed.prefix):
                yield StreamPage([stream(name)[name]])

    monkeypatch.setattr("bridge.agent.pages", pages)
    monkeypatch.setattr("bridge.agent.STREAMS_MAX", 3)
    exports = [
        halves(stream=f"acme/ops/{first}*", destination_stream=f"acme/ops/{first}*", wildcard=True)[0]
        for first in "ab"
    ]
    source = SimpleNamespace(connection=lambda: None)
    agent: Any = SimpleNamespace(
        context=SimpleNamespace(bridge=BRIDGE, source=source), _book=GrantBook(exports, TRUSTED)
    )
    assert sorted(await Agent._streams(agent)) == [*made[:3], *made[5:8]]
