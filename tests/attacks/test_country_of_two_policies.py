"""Of several policies of a region the one that let the records cross says where the other region is, and a later one, or a half that is signed again, hides nothing of it."""

from __future__ import annotations

import pytest
from attacks import test_older_policy as older
from attacks.test_country_of_another import trusting
from attacks.test_half_signed_again import again
from attacks.test_older_policy import grant_approved_by, leaves_with, policy
from attacks.test_one_party_alone import EGRESS, ORIGINS, files_of
from audit_log import STREAM
from signed_grants import opened_policy, paper_leaf

from audit import verify as verification
from audit.leaf import DOCUMENT_KINDS, Kind, Leaf
from audit.proof import check_proof, prove
from audit.spark.agreements import FirstCrossing, rows_of
from audit.verify import PLACED_OTHERWISE, verify_log

MOVED = trusting(eu="BY")


def told(leaves: list[Leaf]) -> list[str]:
    report = verify_log(files_of(EGRESS, leaves), MOVED)
    assert report.ok
    return [each.sentence for each in report.notices if each.name == PLACED_OTHERWISE]


def told_by_proof(leaves: list[Leaf]) -> tuple[str, ...]:
    approved = check_proof(prove(files_of(EGRESS, leaves), MOVED, STREAM, 0, 1), MOVED).approved
    assert approved is not None
    return approved.placed_otherwise


def test_a_later_policy_that_alone_lets_it_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    true, lie = policy(2, "BY", "ciso"), policy(3, "IE", "dpo")
    monkeypatch.setattr(older, "NAMED", true)
    signed = grant_approved_by("dpo")
    assert not verify_log(files_of(EGRESS, leaves_with(signed, true)), MOVED).ok, "it lets nothing cross"
    leaves = leaves_with(signed, true, lie)
    for each in (*told(leaves), *told_by_proof(leaves)):
        assert "eu-west is in IE by the policy under which records crossed, and in BY" in each
    assert len(told(leaves)) == len(told_by_proof(leaves)) == 1


def test_a_later_policy_that_is_right_alone_lets_it_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """The register names countries by the policy that the grant was made under: that one is told of as what it is."""
    lie, true = policy(2, "IE", "ciso"), policy(3, "BY", "dpo")
    monkeypatch.setattr(older, "NAMED", lie)
    leaves = leaves_with(grant_approved_by("dpo"), lie, true)
    for each in (*told(leaves), *told_by_proof(leaves)):
        assert "eu-west is in IE by the policy that the grant was made under, and in BY" in each
    assert len(told(leaves)) == len(told_by_proof(leaves)) == 1


def test_of_one_grant_no_more_is_held_than_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lie, other = policy(2, "IE", "ciso"), policy(3, "DE", "dpo")
    monkeypatch.setattr(older, "NAMED", lie)
    leaves = leaves_with(grant_approved_by("dpo"), lie, other)
    assert len(told(leaves)) == 2
    monkeypatch.setattr(verification, "ELSEWHERE_MAX", 1)
    report = verify_log(files_of(EGRESS, leaves), MOVED)
    assert [each.sentence for each in report.notices if each.name == PLACED_OTHERWISE] == told(leaves)
    assert len(told(leaves)) == 1 and report.notices_left_off == 1


def test_a_half_that_is_signed_again_afterwards() -> None:
    signed, true = grant_approved_by("ciso"), policy(3, "BY", "ciso")
    leaves = leaves_with(signed, older.NAMED)
    before = told(leaves)
    assert len(before) == 1
    first = next((at, leaf) for at, leaf in enumerate(leaves) if leaf.header.kind is Kind.INTENT)
    half = again(signed, "us-east", 1, policy_hash=opened_policy(true).hash.hex(), policy_revision=3)
    named = {"policy_version": 3, "policy_hash": opened_policy(true).hash}
    leaves += [paper_leaf(true, signed), paper_leaf(half, signed, **named)]
    papers = [(at, leaf) for at, leaf in enumerate(leaves) if leaf.header.kind in DOCUMENT_KINDS]
    crossed = {signed.grant: FirstCrossing(first[0], first[1].header.time_ms)}
    [row] = rows_of(ORIGINS[EGRESS], papers, files_of(EGRESS, leaves), MOVED, crossed).terms
    assert "IE" in row and "BY" not in row, "what the register names"
    assert len(told_by_proof(leaves)) == 1
    assert told(leaves) == before
