"""A policy that lets more than the one under which a half was made, and one that ends: brokers ask the one in force. Whoever verifies their
logs, and whoever checks a proof, takes what they let cross.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_half_signed_again import SIDES, again, crossing, take
from attacks.test_older_policy import EGRESS, NAMED, files_of, grant_approved_by, leaves_with, policy
from audit_log import BRIDGE, EGRESS_ORIGIN, STREAM, TIME_MS, trust
from signed_grants import (
    grant_leaves,
    opened_policy,
    paper_leaf,
    policy_document,
    signed_grant,
    signing_key,
)

from audit.agreement import STANDING_GRACE_MS, Agreements
from audit.leaf import DOCUMENT_KINDS, Kind, Leaf, Side
from audit.origin import Origin
from audit.proof import check_proof, prove
from audit.verify import OUTLAWED, verify_log
from felix.errors import TamperError
from felix.names import SpiffeId, StreamName
from policy.grant import Allowed, Attempt, GrantBook
from policy.residency import parse_policy, sign_policy

NEWER, BACK = policy(3, "IE", "dpo"), policy(4, "IE", "ciso")


def found_in(leaves: list[Leaf]) -> list[str]:
    return [each.sentence for each in verify_log(files_of(EGRESS, leaves), trust()).findings]


def test_who_may_approve_changes_after_the_half_was_made(tally: Tally) -> None:
    """Revision 2 names ciso; the half is made under it; revision 3 names dpo, who approves."""
    signed = grant_approved_by("dpo")
    book = GrantBook(
        (signed.export, signed.accepted, *signed.approvals), trust().policy_keys, trust().anchors
    )
    attempt = Attempt(StreamName.parse(STREAM), "us-east", "eu-west", SpiffeId.parse(BRIDGE))
    assert isinstance(book.check(attempt, opened_policy(NEWER), TIME_MS), Allowed), "so does the broker"
    for policies in ((NAMED, NEWER), (NEWER,), (NEWER, NAMED)):
        leaves = leaves_with(signed, *policies)
        assert found_in(leaves) == []
        approved = check_proof(prove(files_of(EGRESS, leaves), trust(), STREAM, 0, 1), trust()).approved
        assert (approved.policy_revision, approved.allowed_by_revision) == (2, 3)
    # Under the newest alone, and not under one in between that lets more.
    for policies in ((NAMED,), (NAMED, NEWER, BACK), (NEWER, BACK)):
        leaves = leaves_with(signed, *policies)
        late = [*leaves[: len(policies)], *later(leaves[len(policies) :], 2 * STANDING_GRACE_MS)]
        assert "dpo does not count" in found_in(late)[0]
        with pytest.raises(TamperError, match="dpo does not count"):
            prove(files_of(EGRESS, late), trust(), STREAM, 0, 1)
    tally("policies that let more than the one that the half names", 3)


def later(leaves: list[Leaf], by_ms: int) -> list[Leaf]:
    """The same crossings so much later, in leaves of their own."""
    return [
        msgspec.structs.replace(leaf, header=msgspec.structs.replace(leaf.header, time_ms=leaf.header.time_ms + by_ms))
        if leaf.header.kind in (Kind.INTENT, Kind.ACK)
        else leaf
        for leaf in leaves
    ]  # fmt: skip


@pytest.mark.parametrize("side", list(Side))
def test_a_stream_that_only_a_later_policy_allows(side: Side) -> None:
    """Of either side: a region's own log has every revision."""
    signed, own = signed_grant(), "us-east" if side is Side.EGRESS else "eu-west"
    first, second = (policy_document(own, approvals, revision=n) for n, approvals in ((1, 3), (2, 1)))
    body = signed.body if side is Side.EGRESS else signed.half
    half = again(signed, own, 1, policy_hash=opened_policy(first).hash.hex(), policy_revision=1)
    assert body.policy_revision == 1
    found = Agreements(trust(), Origin.parse(SIDES[side]))
    others = [leaf for leaf in grant_leaves(signed, side) if leaf.header.kind is not Kind.POLICY]
    take(found, paper_leaf(first, signed, side), *others)
    more = {"policy_hash": opened_policy(first).hash} if side is Side.EGRESS else {}
    take(found, paper_leaf(half, signed, side, **more))
    assert "rule" in found.judge(crossing(signed, side, TIME_MS))[0]
    take(found, paper_leaf(second, signed, side))
    assert found.judge(crossing(signed, side, TIME_MS)) == []


def test_what_was_on_its_way_when_a_policy_ended_stands(tally: Tally) -> None:
    """Revision 2 is not in the log, as in one that was begun later; of revision 3 the end is near."""
    signed = grant_approved_by("ciso")
    ends = TIME_MS + 60_000
    until = datetime.fromtimestamp(ends / 1000, UTC).isoformat()
    ending = policy(3, "IE", "ciso", f"revision: 3\nvalid_until: {until}")
    found = Agreements(trust(), Origin.parse(EGRESS_ORIGIN))
    take(found, *(leaf for leaf in leaves_with(signed, ending) if leaf.header.kind in DOCUMENT_KINDS))
    for late in (-1, 0, STANDING_GRACE_MS - 1):
        assert found.judge(crossing(signed, Side.EGRESS, ends + late)) == []
    (said,) = found.judge(crossing(signed, Side.EGRESS, ends + STANDING_GRACE_MS))
    assert "valid until" in said
    tally("ends of a policy", 1)


def told_of(leaves: list[Leaf]) -> list[tuple[int, int]]:
    report = verify_log(files_of(EGRESS, leaves), trust())
    assert report.ok and report.findings == []
    return [(notice.leaf, notice.records) for notice in report.notices if notice.name == OUTLAWED]


def test_what_crosses_though_a_newer_policy_in_the_log_forbids_it_is_told(tally: Tally) -> None:
    """A rogue agent that had read ahead, and announces it under the policy that the half names. No broker serves it any more, and no agent of ours announces it."""
    signed = grant_approved_by("ciso")
    over = datetime.fromtimestamp((TIME_MS + 1_000) / 1000, UTC).isoformat()
    forbids = policy(3, "IE", "ciso").body.decode().replace("bases: [scc, adequacy]", "bases: [bcr]")
    newer = {
        "forbids": sign_policy(parse_policy(forbids, "us-east"), signing_key("us-east")),
        "is over": policy(3, "IE", "ciso", f"revision: 3\nvalid_until: {over}"),
        "allows": policy(3, "IE", "ciso"),
        "asks for another approver": NEWER,
    }
    assert "bcr" in forbids
    for what, document in newer.items():
        leaves = leaves_with(signed, NAMED, document)
        at = next(at for at, leaf in enumerate(leaves) if leaf.header.kind is Kind.INTENT)
        records = sum(leaf.header.records for leaf in leaves if leaf.header.kind is Kind.INTENT)
        found = [(at, records)] if what in ("forbids", "is over") else []
        late = later(leaves, 2 * STANDING_GRACE_MS)
        assert told_of(late) == found, what
        assert told_of(leaves) == [], "what was on its way may be written down"
    tally("policies that forbid what crosses", 2)
