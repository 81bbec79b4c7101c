"""Agreements: which documents a log must have before a crossing, and what is believed of them."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any

import msgspec
import pytest
from audit_log import BRIDGE, EGRESS_ORIGIN, INGRESS_ORIGIN, STREAM, TIME_MS, Link, key, region_bundle, trust
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_grants import (
    ACCEPTOR,
    HOUR_MS,
    Signed,
    approver,
    deny_entry,
    grant_leaves,
    make_terms,
    opened_policy,
    paper_leaf,
    policy_document,
    signed_grant,
    signing_key,
    standing,
)

from audit.agreement import STANDING_GRACE_MS, Agreements, read_agreements
from audit.document_leaf import read_document
from audit.leaf import Header, Kind, Leaf, Side
from audit.origin import Origin
from audit.spark.agreements import rows_of
from audit.tile import MemoryFiles
from audit.trust import Trust
from policy.approval import Document, sign_approval
from policy.grant import StandingAction, open_export, sign_export, sign_import
from policy.signed import SignedDocument

NOWHERE = MemoryFiles({})


def load(header: Header) -> bytes | None:
    return read_document(header, NOWHERE)


def read(
    leaves: list[Leaf], side: Side = Side.EGRESS, trusted: Trust | None = None
) -> tuple[Agreements, list[str]]:
    origin = Origin.parse(EGRESS_ORIGIN if side is Side.EGRESS else INGRESS_ORIGIN)
    return read_agreements(trusted or trust(), origin, enumerate(leaves), load)


def crossing(
    signed: Signed, side: Side = Side.EGRESS, time_ms: int = TIME_MS + 60_000, **changes: Any
) -> Header:
    fields: dict[str, Any] = {
        "grant_id": signed.grant,
        "terms_hash": signed.terms.hash(),
        "time_ms": time_ms,
        "first_offset": 0,
        "last_offset": 0,
    }
    kind = Kind.INTENT if side is Side.EGRESS else Kind.ACK
    return msgspec.structs.replace(Link().header(kind, side), **(fields | changes))


@pytest.mark.parametrize("side", list(Side))
def test_a_crossing_stands_behind_both_halves_the_approvals_and_the_own_policy(side: Side) -> None:
    signed = signed_grant(approvals=2)
    leaves = grant_leaves(signed, side)
    agreements, problems = read(leaves, side)
    assert problems == [] and agreements.judge(crossing(signed, side)) == []
    found = agreements.agreement(signed.grant)
    assert found is not None and found.complete and found.terms == signed.terms
    assert found.accepted_by == "spiffe://eu-west.acme/operator/bob"
    assert len(found.approvers) == 4 and all("/approver/dpo" in each for each in found.approvers)
    assert found.legal_fields.source_country == "US" and found.legal_fields.destination_country == "IE"
    assert found.place("eu-west") == ("IE", "EU") and found.legal_fields.approvers == found.approvers
    assert found.leaves == tuple(range(1, 7))


@pytest.mark.parametrize("side", list(Side))
def test_every_leaf_of_them_is_needed(side: Side) -> None:
    signed = signed_grant(approvals=2)
    leaves = grant_leaves(signed, side)
    for count in range(len(leaves)):
        for kept in combinations(leaves, count):
            agreements, problems = read(list(kept), side)
            assert problems == []
            assert agreements.judge(crossing(signed, side)), [leaf.header.kind.name for leaf in kept]


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": "acme/ops/crew"},
        {"destination_stream": "acme/ops/crew"},
        {"bridge": "spiffe://us-east.acme/bridge/other"},
        {"destination_region": "ap-south"},
        {"source_region": "ap-south"},
        {"terms_hash": b"t" * 32},
        {"grant_id": "g-aaaaaaaaaaaaaaaa"},
        {"time_ms": TIME_MS - HOUR_MS - 1},
        {"time_ms": TIME_MS + 10**9},
    ],
)
def test_a_crossing_is_the_grants_in_every_respect(changes: dict[str, Any]) -> None:
    signed = signed_grant()
    agreements, _ = read(grant_leaves(signed))
    assert agreements.judge(crossing(signed)) == []
    assert agreements.judge(crossing(signed, **changes))


def test_pauses_and_deny_entries_hold_once_what_was_on_its_way_is_through() -> None:
    signed = signed_grant()
    for stop, go_on in (
        (
            standing(signed.grant, StandingAction.PAUSE),
            standing(signed.grant, StandingAction.RESUME, sequence=2),
        ),
        (deny_entry("acme/ops/*"), deny_entry("acme/ops/*", sequence=2, lifted=True)),
    ):
        for region_signed in (stop,):
            leaves = [*grant_leaves(signed), paper_leaf(region_signed, signed)]
            agreements, problems = read(leaves)
            assert problems == []
            assert agreements.judge(crossing(signed, time_ms=TIME_MS + STANDING_GRACE_MS - 1)) == []
            assert agreements.judge(crossing(signed, time_ms=TIME_MS + STANDING_GRACE_MS + 1))
            agreements, _ = read([*leaves, paper_leaf(go_on, signed)])
            assert agreements.judge(crossing(signed)) == []


def test_nothing_stands_behind_a_revocation_and_what_was_late_before_it_is_told() -> None:
    signed = signed_grant()
    revocation = standing(signed.grant, StandingAction.REVOKE, region="eu-west")
    agreements, problems = read([*grant_leaves(signed), paper_leaf(revocation, signed)])
    assert problems == [] and "revoked before" in agreements.judge(crossing(signed))[0]
    for deadline, late_ms in ((TIME_MS + 60_000, 0), (TIME_MS + 59_999, 1)):
        agreements, _ = read(grant_leaves(signed))
        assert agreements.judge(crossing(signed)) == []
        leaf = paper_leaf(revocation, signed, drain_until_ms=deadline)
        assert agreements.take(9, leaf, load) == []
        assert agreements.taken_late(leaf.header) == late_ms


def resigned_by(region: str, document: SignedDocument) -> SignedDocument:
    """The same words signed by another region in this one's name, with its own key."""
    from policy.signed import sign

    forged = sign(document.purpose, region, document.body, signing_key(region))
    return SignedDocument(document.purpose, document.region, forged.key, document.body, forged.signature)


def test_a_document_that_its_own_region_did_not_sign_is_found_and_not_believed() -> None:
    signed = signed_grant()
    forged: list[Document] = [
        resigned_by("eu-west", signed.export),
        resigned_by("us-east", signed.accepted),
        resigned_by("eu-west", signed.source_policy),
        resigned_by("ap-south", standing(signed.grant, StandingAction.REVOKE)),
        resigned_by("ap-south", deny_entry("acme/ops/*")),
    ]
    for document in forged:
        agreements, problems = read(
            [paper_leaf(document, signed)], trusted=trust("us-east", "eu-west", "ap-south")
        )
        assert len(problems) == 1 and not agreements.documents, problems


def test_an_approval_holds_under_its_regions_root_alone() -> None:
    signed = signed_grant()
    at = TIME_MS - HOUR_MS + 1_000
    cuckoo = region_bundle("us-east")
    other = Trust.of([msgspec.structs.replace(cuckoo), region_bundle("eu-west")])
    from felix.names import SpiffeId
    from keys.authority import create_authority

    stranger = create_authority("us-east", "acme", TIME_MS - HOUR_MS)
    identity = stranger.issue_identity(SpiffeId("us-east", "acme", "approver", "dpo"), TIME_MS - HOUR_MS)
    forged = sign_approval(signed.terms.hash(), identity, at)
    own = (signed.source_policy, signed.export, signed.accepted)
    leaves = [paper_leaf(each, signed) for each in (*own, forged, *signed.approvals[1:])]
    agreements, problems = read(leaves, trusted=other)
    assert len(problems) == 1 and "does not hold" in problems[0]
    assert "us-east: 0 of 1" in agreements.judge(crossing(signed))[0]


def dated(signed: Signed, at: int) -> Document:
    """The approval of us-east's dpo, signed at this time."""
    return sign_approval(signed.terms.hash(), approver("us-east", "dpo"), at)


def asking_nobody(signed: Signed) -> SignedDocument:
    """The export half, asking for no approval: the policy alone does."""
    from policy.signed import Purpose, canonical, sign

    body = msgspec.structs.replace(signed.body, approvals=0, separate=False)
    return sign(Purpose.EXPORT, "us-east", canonical(body), signing_key("us-east"))


@pytest.mark.parametrize("by_policy", [False, True], ids=["by the half", "by the policy alone"])
def test_of_two_approvals_by_one_person_the_earlier_one_counts_in_any_order(by_policy: bool) -> None:
    signed = signed_grant()
    export = asking_nobody(signed) if by_policy else signed.export
    early, late = dated(signed, TIME_MS), dated(signed, TIME_MS + 5 * HOUR_MS)
    for pair in ((early, late), (late, early)):
        documents = (signed.source_policy, export, signed.accepted, *pair, *signed.approvals[1:])
        agreements, problems = read([paper_leaf(each, signed) for each in documents])
        assert problems == [] and agreements.judge(crossing(signed)) == []


@pytest.mark.parametrize("by_policy", [False, True], ids=["by the half", "by the policy alone"])
def test_an_approval_that_a_later_crossing_had_is_not_lent_to_an_earlier_one(by_policy: bool) -> None:
    signed = signed_grant()
    export = asking_nobody(signed) if by_policy else signed.export
    late = dated(signed, TIME_MS + HOUR_MS)
    documents = (signed.source_policy, export, signed.accepted, late, *signed.approvals[1:])
    agreements, problems = read([paper_leaf(each, signed) for each in documents])
    assert problems == []
    for time_ms, missing in (
        (TIME_MS + 2 * HOUR_MS, False),
        (TIME_MS + 60_000, True),
        (TIME_MS + 3 * HOUR_MS, False),
    ):
        found = agreements.judge(crossing(signed, time_ms=time_ms))
        assert ["us-east: 0 of 1" in sentence for sentence in found] == [True] * missing, found


def test_the_policy_of_the_own_side_asks_for_more_than_the_half_states() -> None:
    """Who holds the policy key signs a half that asks for nobody; the policy that it names asks for two."""
    signed = signed_grant(approvals=2)
    documents = (signed.source_policy, asking_nobody(signed), signed.accepted, *signed.approvals[2:])
    agreements, problems = read([paper_leaf(each, signed) for each in documents])
    assert problems == []
    assert "us-east: 0 of 2" in agreements.judge(crossing(signed))[0]


def test_a_later_policy_of_the_region_stands_in_for_the_one_that_the_half_names() -> None:
    signed = signed_grant()
    later = policy_document("us-east", 1, False, 2)
    documents = (later, signed.export, signed.accepted, *signed.approvals)
    agreements, _ = read([paper_leaf(each, signed) for each in documents])
    assert agreements.judge(crossing(signed)) == []
    stricter = policy_document("us-east", 2, False, 3)
    documents = (stricter, signed.export, signed.accepted, *signed.approvals)
    agreements, _ = read([paper_leaf(each, signed) for each in documents])
    assert "us-east: 1 of 2" in agreements.judge(crossing(signed))[0]


def test_leaf_and_document_say_the_same_in_every_field_that_the_document_decides() -> None:
    signed = signed_grant()
    for leaf in grant_leaves(signed):
        kind = leaf.header.kind
        for name, value in (
            ("grant_id", "g-aaaaaaaaaaaaaaaa"),
            ("terms_hash", b"x" * 32),
            ("stream", "acme/ops/other"),
            ("destination_stream", "acme/ops/other"),
            ("bridge", BRIDGE + "x"),
            ("source_region", "ap-south"),
            ("destination_region", "ap-south"),
            ("policy_version", 77),
            ("policy_hash", b"x" * 32),
        ):
            if kind is Kind.POLICY and name in (
                "grant_id",
                "terms_hash",
                "stream",
                "destination_stream",
                "bridge",
            ):
                continue
            if kind in (Kind.ACCEPT, Kind.APPROVE) and name in ("policy_version", "policy_hash"):
                continue
            changed = Leaf(msgspec.structs.replace(leaf.header, **{name: value}), b"", 2)
            before = [] if kind in (Kind.POLICY, Kind.GRANT) else grant_leaves(signed)[:2]
            _, problems = read([*before, changed])
            assert len(problems) == 1, (kind, name)


def test_a_document_that_is_missing_or_another_one_is_found() -> None:
    signed = signed_grant()
    (leaf,) = [leaf for leaf in grant_leaves(signed) if leaf.header.kind is Kind.GRANT]
    gone = Leaf(msgspec.structs.replace(leaf.header, document=b""), b"", 2)
    assert "neither in the leaf nor beside the log" in read([gone])[1][0]
    beside = MemoryFiles({f"documents/{leaf.header.document_sha256.hex()}": leaf.header.document})
    agreements = Agreements(trust(), Origin.parse(EGRESS_ORIGIN))
    assert agreements.take(0, gone, lambda header: read_document(header, beside)) == []
    swapped = MemoryFiles({f"documents/{leaf.header.document_sha256.hex()}": b"{}"})
    assert (
        "does not hold the document"
        in agreements.take(1, gone, lambda header: read_document(header, swapped))[0]
    )


def test_a_grant_of_other_regions_has_no_place_in_the_log() -> None:
    terms = make_terms(to_region="ap-south", importer="Acme India")
    policy = opened_policy(policy_document("us-east"))
    export = sign_export(terms, policy, signing_key("us-east"), TIME_MS - HOUR_MS)
    signed = signed_grant()._replace(terms=terms, export=export)
    _, problems = read([paper_leaf(export, signed, Side.INGRESS)], Side.INGRESS)
    assert "between other regions" in problems[0]
    assert read([paper_leaf(export, signed)])[1] == []


def test_without_a_pair_that_agrees_there_is_no_agreement() -> None:
    signed, other = signed_grant(), signed_grant(purpose="marketing")
    agreements, _ = read([paper_leaf(signed.export, signed), paper_leaf(other.accepted, other)])
    assert agreements.agreement(signed.grant) is None and agreements.agreement(other.grant) is None
    assert agreements.agreement("g-aaaaaaaaaaaaaaaa") is None
    agreements, _ = read([paper_leaf(signed.export, signed), paper_leaf(signed.accepted, signed)])
    found = agreements.agreement(signed.grant)
    assert found is not None and not found.complete and len(found.problems) == 2


def test_leaves_of_version_1_are_left_aside() -> None:
    signed = signed_grant()
    leaves = [Leaf(leaf.header, leaf.entries, 1) for leaf in grant_leaves(signed)]
    agreements, problems = read(leaves)
    assert problems == [] and agreements.agreement(signed.grant) is None
    assert agreements.judge(crossing(signed))


def test_the_keys_of_these_tests_are_those_of_their_bundles() -> None:
    for region in ("us-east", "eu-west"):
        assert approver(region).spiffe_id.region == region
    assert key(8).verify_key.public in region_bundle("us-east").policy_keys and STREAM in str(
        make_terms().pattern
    )


def test_a_half_signed_again_for_more_approvals_stops_what_comes_and_undoes_nothing() -> None:
    """A destination that asks for two approvals from now on does not make a breach of what crossed with one."""
    signed = signed_grant()
    stricter = policy_document("eu-west", 2)
    at = TIME_MS + 90_000
    export = open_export(signed.export, trust().policy_keys)
    again = sign_import(
        signed.export, opened_policy(stricter), signing_key("eu-west"), trust().policy_keys, ACCEPTOR, at
    )
    found, problems = read(grant_leaves(signed))
    assert problems == [] and found.judge(crossing(signed)) == []
    assert found.take(50, paper_leaf(again, signed, Side.EGRESS, at), load) == []
    # What was on its way then is written down behind it.
    late = at + STANDING_GRACE_MS
    assert [found.judge(crossing(signed, time_ms=each)) for each in (at + 1, late - 1)] == [[], []]
    (said,) = found.judge(crossing(signed, time_ms=late))
    assert "not approved" in said
    agreed = found.agreement(signed.grant)
    assert agreed is not None and agreed.complete
    assert (agreed.terms, agreed.accepted.approvals) == (export.terms, 1)
    rows = rows_of(
        EGRESS_ORIGIN,
        enumerate([*grant_leaves(signed), paper_leaf(again, signed, Side.EGRESS, at)]),
        NOWHERE,
        trust(),
    )
    assert [row[0] for row in rows.terms] == [signed.terms.hash().hex()]
    # With the second approval the new half counts.
    more = sign_approval(signed.terms.hash(), approver("eu-west", "dpo1"), at)
    assert found.take(51, paper_leaf(more, signed, Side.EGRESS, at), load) == []
    assert found.judge(crossing(signed, time_ms=late)) == []
    agreed = found.agreement(signed.grant)
    assert agreed is not None and agreed.accepted.approvals == 2


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 25_000)), max_size=12), st.randoms()
)
@settings(max_examples=25)
def test_books_that_are_made_from_the_ones_before_decide_as_new_ones_do(
    entries: list[tuple[int, bool, int]], random: Random
) -> None:
    """Deny entries and liftings between crossings, inside and outside of the time in which what was on its way is written down."""
    signed, at = signed_grant(), TIME_MS
    leaves, found = grant_leaves(signed), Agreements(trust(), Origin.parse(EGRESS_ORIGIN))
    for index, leaf in enumerate(leaves):
        assert found.take(index, leaf, load) == []
    for number, (streams, lifted, later_ms) in enumerate(entries):
        at += later_ms
        document = deny_entry(
            ("acme/*/*", "acme/ops/*", STREAM, "acme/hr/*", "*/*/*")[streams],
            region=random.choice(("us-east", "eu-west")), sequence=number // 2 + 1, lifted=lifted, at=at,
        )  # fmt: skip
        leaves.append(paper_leaf(document, signed, Side.EGRESS, at))
        assert found.take(len(leaves) - 1, leaves[-1], load) == []
        asked = crossing(signed, time_ms=at + random.choice((0, 1, 9_999, 10_000, 10_001)))
        fresh, _ = read(leaves)
        assert (found.judge(asked) == []) is (fresh.judge(asked) == [])
