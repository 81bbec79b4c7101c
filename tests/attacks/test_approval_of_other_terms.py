"""The destination operator alone, with one approver of its own: an approval whose terms hash begins like the grant's, so that it names the
grant's id, and goes on otherwise. It is of nothing here: it gets no leaf, takes no place of a right one, and makes no honest log wrong."""

from __future__ import annotations

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_documents_of_one_grant import agreements, crossing, leaf_of, papers_of, take
from audit_log import BRIDGE, STREAM, TIME_MS, trust
from signed_grants import HOUR_MS, Signed, approver, grant_leaves, signed_grant

from audit import agreement as agreement_module
from audit.agreement import Agreements
from audit.leaf import Kind, Leaf
from felix.names import SpiffeId, StreamName
from policy.approval import Approval, sign_approval
from policy.grant import Allowed, Attempt, GrantBook, approves

EARLY = TIME_MS - HOUR_MS + 1
ATTEMPT = Attempt(StreamName.parse(STREAM), "us-east", "eu-west", SpiffeId.parse(BRIDGE))


def odd_approvals(signed: Signed) -> list[Approval]:
    """By the people who approve it rightly, earlier than they do, and by another one; of both regions."""
    hash_ = signed.terms.hash()
    assert all(each.claim.at > EARLY for each in signed.approvals)
    return [
        sign_approval(hash_[:10] + bytes([number]) * 22, approver(region, name), EARLY)
        for number in range(3)
        for region in ("us-east", "eu-west")
        for name in ("dpo", "dpo9")
    ]


def allows(book: GrantBook) -> bool:
    return isinstance(book.check(ATTEMPT, None, TIME_MS), Allowed)


def is_right(found: Agreements, signed: Signed) -> bool:
    agreed = found.agreement(signed.grant)
    return agreed is not None and agreed.complete and set(agreed.approvers) == {
        each.claim.approver for each in signed.approvals
    }  # fmt: skip


def test_it_gets_no_leaf_and_the_right_one_does(tally: Tally) -> None:
    signed = signed_grant()
    odd = odd_approvals(signed)
    assert all(each.claim.grant == signed.grant and not approves(signed.body, each.claim) for each in odd)
    assert papers_of(signed, *odd) == {signed.export, signed.accepted, *signed.approvals}
    tally("approvals of other terms", len(odd))


@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_book_counts_the_right_one(order: str, tally: Tally) -> None:
    signed = signed_grant()
    odd = odd_approvals(signed)
    rest = [signed.export, signed.accepted, *signed.approvals]
    documents = [*odd, *rest] if order == "before" else [*rest, *odd]
    keys, anchors = trust().policy_keys, trust().anchors
    book = GrantBook(documents, keys, anchors)
    assert allows(book) and allows(GrantBook((), keys, anchors).including(documents))
    assert not allows(book.changed(signed.approvals, ()))
    for approval in signed.approvals:
        held = book.approval(signed.grant, SpiffeId.parse(approval.claim.approver))
        assert held == approval.claim
    assert book.approval(signed.grant, SpiffeId("eu-west", "acme", "approver", "dpo9")) is None
    assert [book.approvers(signed.grant, region) for region in ("us-east", "eu-west")] == [1, 1]
    tally("approvals of other terms", len(odd))


def test_its_leaf_makes_no_log_wrong(monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    """Of a log that an agent of before wrote: in front of the right ones and behind them, and before the export is known."""
    monkeypatch.setattr(agreement_module, "APPROVERS_MAX", 16)
    signed = signed_grant()
    odd = [leaf_of(each, signed) for each in odd_approvals(signed)]
    leaves = grant_leaves(signed)
    papers = [each for each in leaves if each.header.kind is not Kind.APPROVE]
    right = [each for each in leaves if each.header.kind is Kind.APPROVE]
    for order in (
        [*papers, *odd, *right],
        [*papers, *right, *odd],
        [*odd, *right, *papers],
        [*right, *odd, *papers],
    ):
        found = agreements()
        take(found, *order)
        assert found.judge(crossing(signed, TIME_MS)) == [] and is_right(found, signed)
    alone = agreements()
    take(alone, *papers, *odd)
    assert "0 of 1" in alone.judge(crossing(signed, TIME_MS))[0]
    tally("leaves of approvals of other terms", len(odd))


def test_a_leaf_that_repeats_its_approval_wrongly_is_found_as_before(tally: Tally) -> None:
    """The tolerance is for what the document itself says: the rest of its leaf stays the grant's."""
    signed = signed_grant()
    (odd, *_) = odd_approvals(signed)
    found = agreements()
    take(found, *grant_leaves(signed))
    leaf = leaf_of(odd, signed)
    for changes in (
        {"terms_hash": signed.terms.hash()},
        {"stream": "acme/ops/other"},
        {"bridge": "spiffe://us-east.acme/bridge/other"},
        {"source_region": "eu-west"},
    ):
        changed = Leaf(msgspec.structs.replace(leaf.header, **changes))
        assert found.take(0, changed, lambda header: header.document)
        tally("leaves that differ from their approval", 1)
