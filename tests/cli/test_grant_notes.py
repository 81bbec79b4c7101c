"""What is said of grants beside their terms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from departures import terms
from msgspec.structs import replace

from cli.grant_notes import (
    backlog_note,
    carried_by_another,
    silent_notes,
    waiting_notes,
    where_truncations_are,
)
from felix.messages import LinkState
from policy.approval import Tally
from policy.grant import GrantState, GrantView
from policy.transform import build_spec

BRIDGE = "spiffe://us-east.acme/bridge/us-to-eu"


def view(
    state: GrantState = GrantState.OFFERED,
    *,
    grant: str = "g-old",
    accepted: bool = False,
    signed_at: int = 1,
    approvals: tuple[Tally, ...] = (),
    **more: Any,
) -> GrantView:
    export = SimpleNamespace(terms=terms(bridge=BRIDGE, **more), grant=grant, signed_at=signed_at)
    return GrantView(grant, state, export, object() if accepted else None, (), approvals)  # type: ignore[arg-type]


def state(*shards: tuple[int, int]) -> Any:
    return SimpleNamespace(
        state=[SimpleNamespace(log_start=start, high_watermark=end) for start, end in shards]
    )


def link(shard: int, position: int, withheld: int = 0, grant: str = "g-old") -> LinkState:
    return LinkState(
        grant,
        terms().stream,
        shard,
        "us-east",
        "eu-west",
        BRIDGE,
        "stopped",
        position=position,
        withheld=withheld,
    )


def test_an_offered_grant_says_what_it_waits_for_and_that_its_bridge_is_away() -> None:
    (said,) = waiting_notes([view()], "us-east", [])
    assert said == (
        "g-old waits for eu-west to accept; its bridge us-to-eu is not connected, and what is signed there comes only with "
        "it (felix bridge up us-to-eu --region us-east)"
    )
    assert waiting_notes([view()], "us-east", ["us-to-eu"]) == ["g-old waits for eu-west to accept"]
    assert waiting_notes([view()], "eu-west", []) == ["g-old waits for eu-west to accept"]


def test_a_destination_that_lacks_the_sources_approvals_says_what_brings_them() -> None:
    offered = view(accepted=True, approvals=(Tally("us-east", 1, ()), Tally("eu-west", 1, ("dpo",))))
    assert waiting_notes([offered], "eu-west", []) == [
        "g-old waits for approvals: us-east 1; what is signed in us-east comes with its bridge"
    ]
    assert waiting_notes([offered], "us-east", ["us-to-eu"]) == ["g-old waits for approvals: us-east 1"]
    own = view(accepted=True, approvals=(Tally("us-east", 1, ("dpo",)), Tally("eu-west", 1, ())))
    assert waiting_notes([own], "eu-west", []) == ["g-old waits for approvals: eu-west 1"]


def test_an_active_grant_whose_bridge_is_away_says_so_and_one_that_is_over_says_nothing() -> None:
    (said,) = waiting_notes([view(GrantState.ACTIVE, accepted=True)], "us-east", [])
    assert said.startswith("g-old its bridge us-to-eu is not connected (")
    assert waiting_notes([view(GrantState.ACTIVE, accepted=True)], "us-east", ["us-to-eu"]) == []
    assert waiting_notes([view(GrantState.REVOKED), view(GrantState.EXPIRED)], "us-east", []) == []


def test_a_first_grant_covers_what_the_stream_holds() -> None:
    assert (
        backlog_note(terms(), [], state((0, 10), (5, 7)), [])
        == "the grant covers the 12 records that the stream holds already"
    )
    assert backlog_note(terms(), [], state((3, 3)), []) == ""


def test_a_renewed_grant_goes_on_where_the_link_before_stopped() -> None:
    before = [view(GrantState.EXPIRED, accepted=True)]
    said = backlog_note(
        terms(), before, state((0, 10), (0, 4)), [link(0, 9), link(1, 4), link(0, 3, grant="g-else")]
    )
    assert said.startswith(
        "g-old led into the same stream there, and its link stopped 1 record ago: this grant covers"
    )
    assert backlog_note(terms(), before, state((0, 9)), [link(0, 9)]) == ""
    assert "goes on where its link stopped" in backlog_note(terms(), before, state((0, 9)), [])


def test_where_a_link_stopped_is_not_guessed_once_its_agent_has_started_again() -> None:
    """It reported no position, which was taken for 0: then all of the stream was said to cross."""
    before = [view(GrantState.EXPIRED, accepted=True)]
    crossed = replace(link(0, -1), crossed=9)
    said = backlog_note(terms(), before, state((0, 9)), [crossed])
    assert said == (
        "g-old led into the same stream there: this grant goes on where its link stopped, and covers what was published since"
    )
    said = backlog_note(terms(), before, state((0, 9)), [replace(crossed, withheld=4)])
    assert "9 records ago" not in said and ". 4 records stayed under earlier grants" in said
    # Of one by which nothing went, all that the stream holds is still to cross.
    assert "stopped 9 records ago" in backlog_note(terms(), before, state((0, 9)), [link(0, -1)])


def test_what_stayed_under_the_grant_before_is_said() -> None:
    said = backlog_note(
        terms(), [view(GrantState.REVOKED, accepted=True)], state((0, 9)), [link(0, 9, withheld=9)]
    )
    assert (
        said.startswith("9 records stayed under earlier grants into that stream")
        and "felix bridge resend" in said
    )


def test_a_grant_beside_one_that_holds_says_that_nothing_crosses_under_it_yet() -> None:
    held = view(GrantState.ACTIVE, accepted=True)
    said = backlog_note(terms(), [held], state((0, 9)), [link(0, 9)])
    assert (
        said.startswith("g-old holds, and leads into the same stream there: nothing crosses")
        and "revoke g-old" in said
    )
    new = view(GrantState.ACTIVE, grant="g-new", accepted=True, signed_at=2)
    assert carried_by_another(new, [held, new]) == "g-old"
    assert carried_by_another(held, [new, held]) == "", (
        "it was signed first: what is sent again crosses under it"
    )
    paused = view(GrantState.PAUSED, accepted=True)
    assert carried_by_another(paused, [new, paused]) == "g-new"
    assert carried_by_another(new, [new, view(GrantState.REVOKED, accepted=True)]) == ""
    assert carried_by_another(new, [new, view(GrantState.ACTIVE, accepted=True, to_region="ap-south")]) == ""


def test_of_two_bridges_whichever_has_the_link_carries_so_what_is_sent_again_has_terms_that_both_share() -> (
    None
):
    one = view(GrantState.ACTIVE, accepted=True)
    of_another = msgspec.structs.replace(terms(bridge=BRIDGE), bridge=f"{BRIDGE}-2")
    said = backlog_note(of_another, [one], state((0, 9)), [link(0, 9)])
    assert said.startswith(f"g-old holds for {BRIDGE}, ") and "the other stands by" in said

    def other(**more: Any) -> GrantView:
        made = view(GrantState.ACTIVE, grant="g-2", accepted=True, signed_at=2, **more)
        assert made.export is not None
        changed = msgspec.structs.replace(made.export.terms, bridge=f"{BRIDGE}-2")
        export = SimpleNamespace(terms=changed, grant="g-2", signed_at=2)
        return made._replace(export=export)  # type: ignore[arg-type]

    alike, unlike = other(), other(transform=build_spec(drop=["hour"]))
    for each, beside in ((one, alike), (alike, one)):
        assert carried_by_another(each, [one, alike]) == "", beside
    assert carried_by_another(one, [one, unlike]) == "g-2"
    assert carried_by_another(unlike, [one, unlike]) == "g-old"


@pytest.mark.parametrize("change", [{"to_region": "ap-south"}, {"destination_stream": "acme/ops/copy"}])
def test_a_grant_that_leads_elsewhere_does_not_count(change: dict[str, str]) -> None:
    new = msgspec.structs.replace(terms(), **change)
    said = backlog_note(new, [view(GrantState.EXPIRED, accepted=True)], state((0, 9)), [link(0, 9)])
    assert said == "the grant covers the 9 records that the stream holds already"


def test_a_truncation_is_accepted_at_the_source_and_another_region_names_it() -> None:
    there = where_truncations_are(view(GrantState.ACTIVE), "eu-west")
    assert "felix bridge resume g-old --accept-truncation --region us-east" in there
    assert "felix bridge status" in where_truncations_are(view(GrantState.ACTIVE), "us-east")


def test_a_bridge_whose_agent_says_nothing_any_more_is_named_once() -> None:
    other = "spiffe://us-east.acme/bridge/us-to-ap"
    links = [
        replace(link(0, 9), reported_ms=1_000_000),
        replace(link(1, 9), reported_ms=1_010_000),
        replace(link(0, 9), bridge=other, reported_ms=1_080_000),
        # A broker of before says no time.
        replace(link(0, 9), bridge=f"{other}-2"),
    ]
    (said,) = silent_notes(links, 1_093_000)
    assert said.startswith(f"{BRIDGE} has said nothing for 83 s: its links are shown as they were then")
    assert silent_notes(links, 1_040_000) == []
