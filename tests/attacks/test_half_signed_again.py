"""A half is signed again and asks for more, or a policy does, while records cross: what was on its way is written down behind its leaf, by an
honest agent and an honest broker, and their logs must go on verifying. What comes later than the grace is found as before.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from audit_log import EGRESS_ORIGIN, INGRESS_ORIGIN, TIME_MS, Link, trust
from signed_grants import (
    Signed,
    grant_leaves,
    paper_leaf,
    policy_document,
    signed_grant,
    signing_key,
    standing,
)

from audit import halves as halves_module
from audit.agreement import STANDING_GRACE_MS, Agreements
from audit.halves import REPLACED_MAX
from audit.leaf import Header, Kind, Leaf, Side
from audit.origin import Origin
from bridge.document_feed import LIST_BURST, LIST_PER_S
from policy.grant import StandingAction
from policy.signed import Purpose, SignedDocument, canonical, sign
from region.governance.intake import SIGNED_AGAIN_MAX, SIGNED_AGAIN_PER_S

SIDES = {Side.EGRESS: EGRESS_ORIGIN, Side.INGRESS: INGRESS_ORIGIN}


def load(header: Header) -> bytes | None:
    return header.document


def again(signed: Signed, region: str, later: int, **changes: Any) -> SignedDocument:
    """The region's half of a grant, signed so much later (ms)."""
    body = signed.body if region == "us-east" else signed.half
    purpose = Purpose.EXPORT if region == "us-east" else Purpose.IMPORT
    made = msgspec.structs.replace(body, signed_at=body.signed_at + later, **changes)  # type: ignore[type-var]
    return sign(purpose, region, canonical(made), signing_key(region))


def agreements(signed: Signed, side: Side) -> Agreements:
    found = Agreements(trust(), Origin.parse(SIDES[side]))
    take(found, *grant_leaves(signed, side))
    return found


def take(found: Agreements, *leaves: Leaf) -> None:
    for leaf in leaves:
        assert found.take(0, leaf, load) == []


def crossing(signed: Signed, side: Side, time_ms: int) -> Header:
    kind = Kind.INTENT if side is Side.EGRESS else Kind.ACK
    changes = {"grant_id": signed.grant, "terms_hash": signed.terms.hash(), "time_ms": time_ms}
    return msgspec.structs.replace(Link().header(kind, side), first_offset=0, last_offset=0, **changes)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("region", ["us-east", "eu-west"])
def test_what_was_on_its_way_when_a_half_asked_for_more_stands(side: Side, region: str, tally: Tally) -> None:
    signed = signed_grant()
    found = agreements(signed, side)
    # Two approvals, one, two … within one grace, as fast as documents come.
    for number in range(1, 9):
        at = TIME_MS + number * 1_000
        half = again(signed, region, number, approvals=1 + number % 2)
        take(found, paper_leaf(half, signed, side, at))
        for late in (0, STANDING_GRACE_MS // 2):
            assert found.judge(crossing(signed, side, at + late)) == []
    half = again(signed, region, 9, approvals=2)
    at = TIME_MS + 20_000
    take(found, paper_leaf(half, signed, side, at))
    assert found.judge(crossing(signed, side, at + STANDING_GRACE_MS - 1)) == []
    (said,) = found.judge(crossing(signed, side, at + STANDING_GRACE_MS))
    assert "not approved" in said
    tally("halves that were signed again", 9)


@pytest.mark.parametrize("side", SIDES)
def test_both_sides_ask_for_more_at_once_and_nothing_else_is_let_through(side: Side, tally: Tally) -> None:
    signed = signed_grant()
    found = agreements(signed, side)
    for region in ("us-east", "eu-west"):
        take(found, paper_leaf(again(signed, region, 1, approvals=3), signed, side, TIME_MS))
    soon = crossing(signed, side, TIME_MS + 1)
    assert found.judge(soon) == []
    refused = [
        msgspec.structs.replace(soon, terms_hash=bytes(32)),
        msgspec.structs.replace(soon, destination_stream="acme/ops/elsewhere"),
        msgspec.structs.replace(soon, bridge="spiffe://us-east.acme/bridge/other"),
        msgspec.structs.replace(soon, time_ms=signed.terms.expires),
    ]
    assert all(found.judge(each) for each in refused)
    pause = standing(signed.grant, StandingAction.PAUSE, at=TIME_MS - STANDING_GRACE_MS)
    take(found, paper_leaf(pause, signed, side, TIME_MS - STANDING_GRACE_MS))
    assert "paused" in found.judge(soon)[0]
    revoke = standing(signed.grant, StandingAction.REVOKE, sequence=2)
    take(found, paper_leaf(revoke, signed, side))
    assert "revoked" in found.judge(soon)[0]
    tally("crossings under a half that was replaced", len(refused) + 2)


def test_what_was_on_its_way_when_the_own_policy_asked_for_more_stands(tally: Tally) -> None:
    """The own side's half names the stricter policy; and none that stands in the log, so that the newest there decides."""
    signed = signed_grant(separate=True)
    stricter = policy_document("us-east", 3, revision=2)
    newer = paper_leaf(stricter, signed, time_ms=TIME_MS)
    named = agreements(signed, Side.EGRESS)
    half = again(signed, "us-east", 1, policy_hash=newer.header.policy_hash.hex(), policy_revision=2)
    take(
        named,
        newer,
        paper_leaf(half, signed, time_ms=TIME_MS, policy_hash=newer.header.policy_hash, policy_version=2),
    )
    unnamed = Agreements(trust(), Origin.parse(EGRESS_ORIGIN))
    unknown = again(signed, "us-east", 1, policy_hash="ab" * 32)
    take(unnamed, *(leaf for leaf in grant_leaves(signed) if leaf.header.kind is not Kind.GRANT))
    take(
        unnamed,
        paper_leaf(unknown, signed, time_ms=TIME_MS - 60_000, policy_hash=b"\xab" * 32),
        paper_leaf(policy_document("us-east", revision=2), signed, time_ms=TIME_MS - 60_000),
        paper_leaf(policy_document("us-east", 3, revision=3), signed, time_ms=TIME_MS),
    )
    for found in (named, unnamed):
        assert found.judge(crossing(signed, Side.EGRESS, TIME_MS + STANDING_GRACE_MS - 1)) == []
        assert "rule" in found.judge(crossing(signed, Side.EGRESS, TIME_MS + STANDING_GRACE_MS))[0]
    tally("policies that asked for more", 2)


def test_the_halves_that_are_held_are_bounded_and_no_honest_log_reaches_the_bound(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    assert SIGNED_AGAIN_MAX + SIGNED_AGAIN_PER_S * 60 < REPLACED_MAX
    assert LIST_BURST + LIST_PER_S * 2 * STANDING_GRACE_MS / 1_000 < REPLACED_MAX
    monkeypatch.setattr(halves_module, "REPLACED_MAX", 4)
    signed = signed_grant()
    found = agreements(signed, Side.INGRESS)
    for number in range(1, 20):
        take(found, paper_leaf(again(signed, "eu-west", number, approvals=2), signed, Side.INGRESS))
    held = next(iter(found._grants[signed.grant].accepted.values()))
    assert len(held._replaced) == 4
    tally("halves that were signed again", 20)


@pytest.mark.parametrize("gap_ms", [1_000, 61_000, 3_600_000])
def test_what_a_crash_left_stands_behind_halves_signed_again_since(gap_ms: int, tally: Tally) -> None:
    """A broker dies between a range's append and its leaf, which bears the time at which it was taken; the stream opens later, and a
    half that asks for more is signed three times meanwhile."""
    signed = signed_grant()
    found = agreements(signed, Side.INGRESS)
    for number in range(3):
        half = again(signed, "eu-west", 10_000 * (number + 1), approvals=2)
        take(found, paper_leaf(half, signed, Side.INGRESS, TIME_MS + 1_000 + number * gap_ms))
    assert found.judge(crossing(signed, Side.INGRESS, TIME_MS + 500)) == []
    assert found.judge(crossing(signed, Side.INGRESS, TIME_MS + 1_000 + STANDING_GRACE_MS + 3 * gap_ms))
    tally("halves that were signed again", 3)
