"""An agent alone writes an older policy of its region into its egress log, in the place of the one that the half names.

Both are genuine. The older one lets more people approve and says another country; which of them stands there is the agent's to choose.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import signed_grants
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, ORIGINS, files_of
from audit_log import BRIDGE, STREAM, TIME_MS, Link, trust
from signed_grants import (
    ACCEPTOR,
    Signed,
    approver,
    make_terms,
    opened_policy,
    policy_document,
    signing_key,
)

from audit.leaf import DOCUMENT_KINDS, Leaf
from audit.proof import check_proof, prove
from audit.spark.agreements import LogDocuments, rows_of
from audit.verify import verify_log
from bridge.documents import EgressDocuments, Paper
from felix.errors import TamperError
from felix.names import SpiffeId, StreamName
from policy.approval import sign_approval
from policy.grant import (
    Allowed,
    Attempt,
    GrantBook,
    GrantError,
    Refusal,
    RefusalKind,
    sign_export,
    sign_import,
)
from policy.residency import parse_policy, sign_policy
from policy.signed import SignedDocument
from region.governance.intake import DocumentIntake

AT = TIME_MS - 1_000


def policy(revision: int, country: str, approvers: str = "", dated: str = "") -> SignedDocument:
    """us-east's, of this revision: where eu-west is, who may approve, and what stands in the place of the line of its revision."""
    text = signed_grants._POLICY.format(
        region="us-east", revision=revision, way="export", toward="to", approvals=1, separate="false"
    )
    text = text.replace("country: IE", f"country: {country}").replace(
        f"revision: {revision}", dated or f"revision: {revision}"
    )
    if approvers:
        text = text.replace("approvals: 1", f"approvals: 1\n    approvers: [{approvers}]")
    return sign_policy(parse_policy(text, "us-east"), signing_key("us-east"))


OLDER, NAMED, LATER = policy(1, "RU"), policy(2, "IE", "ciso"), policy(3, "IE", "ciso")


def grant_approved_by(name: str) -> Signed:
    """A grant whose export half is made under NAMED, approved at the source by this person."""
    terms = make_terms()
    export = sign_export(terms, opened_policy(NAMED), signing_key("us-east"), AT)
    there = policy_document("eu-west")
    keys = trust("us-east", "eu-west").policy_keys
    accepted = sign_import(export, opened_policy(there), signing_key("eu-west"), keys, ACCEPTOR, AT)
    people = (approver("us-east", name), approver("eu-west", "dpo"))
    approvals = tuple(sign_approval(terms.hash(), each, AT + 1) for each in people)
    return Signed(terms, NAMED, there, export, accepted, approvals)


def leaves_with(signed: Signed, *policies: SignedDocument) -> list[Leaf]:
    """An egress log with these policies in the place of the one that the half names."""
    link = Link()
    link.signed, link.grant_id = signed, signed.grant
    own = [signed_grants.paper_leaf(each, signed) for each in policies]
    intents = link.intent(3)
    return [*own, *link.agreement()[1:], *intents, link.ack(intents)]


def documents_of(leaves: list[Leaf]) -> LogDocuments:
    papers = [(at, leaf) for at, leaf in enumerate(leaves) if leaf.header.kind in DOCUMENT_KINDS]
    return rows_of(ORIGINS[EGRESS], papers, files_of(EGRESS, leaves), trust())


def test_an_older_policy_says_nothing_of_a_half_that_names_a_later_one(tally: Tally) -> None:
    for name in ("dpo", "ciso"):
        leaves = leaves_with(grant_approved_by(name), OLDER)
        files = files_of(EGRESS, leaves)
        found = verify_log(files, trust()).findings
        assert {each.step for each in found} == {7}
        assert "no later one does" in found[0].sentence
        with pytest.raises(TamperError, match="no later one does"):
            check_proof(prove(files, trust(), STREAM, 0, 1), trust())
        [row] = documents_of(leaves).terms
        assert "RU" not in row, "the register names a country that the policy in force does not"
    tally("older policies in the place of the one that the half names", 2)


def test_the_policy_that_the_half_names_or_a_later_one_says_who_approves_and_where() -> None:
    unlawful = grant_approved_by("dpo")
    for held in ((NAMED,), (LATER,), (OLDER, NAMED), (NAMED, OLDER), (OLDER, LATER)):
        leaves = leaves_with(unlawful, *held)
        sentences = [each.sentence for each in verify_log(files_of(EGRESS, leaves), trust()).findings]
        assert sentences and "dpo does not count" in sentences[0]
        leaves = leaves_with(grant_approved_by("ciso"), *held)
        files = files_of(EGRESS, leaves)
        assert verify_log(files, trust()).ok
        assert check_proof(prove(files, trust(), STREAM, 0, 1), trust()).approved.destination_country == "IE"
        [row] = documents_of(leaves).terms
        assert "IE" in row and "RU" not in row


def test_a_later_policy_that_stands_behind_a_newer_one_never_counted(tally: Tally) -> None:
    """The third revision lets the source's dpo approve, the fourth does not. What was on its way under the third is written down behind the
    fourth, but only if the third stood there before it."""
    lax, strict = policy(3, "IE"), policy(4, "IE", "ciso")
    signed = grant_approved_by("dpo")
    in_order = leaves_with(signed, NAMED, lax, strict)
    assert verify_log(files_of(EGRESS, in_order), trust()).ok
    out_of_order = leaves_with(signed, NAMED, strict, lax)
    (first, *_) = verify_log(files_of(EGRESS, out_of_order), trust()).findings
    assert first.step == 7 and "dpo does not count" in first.sentence
    tally("policies behind the one that had replaced them", 1)


def test_brokers_take_no_own_half_before_its_policy_and_let_nothing_cross_under_it() -> None:
    signed = grant_approved_by("ciso")
    trusted = trust("us-east", "eu-west")
    book = GrantBook(
        (signed.export, signed.accepted, *signed.approvals), trusted.policy_keys, trusted.anchors
    )
    attempt = Attempt(StreamName.parse(STREAM), "us-east", "eu-west", SpiffeId.parse(BRIDGE))
    for held, lawful in ((OLDER, False), (NAMED, True), (LATER, True)):
        found = book.check(attempt, opened_policy(held), TIME_MS)
        assert isinstance(found, Allowed) if lawful else isinstance(found, Refusal)
        assert lawful or found.kind is RefusalKind.AGAINST_POLICY  # type: ignore[union-attr]
        judgement = SimpleNamespace(policy=opened_policy(held))
        service: Any = SimpleNamespace(_judgement=judgement, _own=SimpleNamespace(region="us-east"))
        if lawful:
            DocumentIntake._require_policy_of(service, signed.body, "us-east")
        else:
            with pytest.raises(GrantError, match="revision 1 is in force"):
                DocumentIntake._require_policy_of(service, signed.body, "us-east")
        DocumentIntake._require_policy_of(service, signed.body, "eu-west")


async def test_an_agent_writes_no_half_before_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, tried = SimpleNamespace(documents=set[bytes]()), list[bytes]()
    context: Any = SimpleNamespace(
        runtime=SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: 0.0)),
        source=SimpleNamespace(region="us-east"),
        ledger=ledger,
    )

    async def append(_: EgressDocuments, paper: Paper) -> bool:
        tried.append(paper.digest)
        ledger.documents.add(paper.digest)
        return True

    monkeypatch.setattr(EgressDocuments, "_append", append)
    signed = grant_approved_by("ciso")
    half = Paper(signed.export, b"", b"half", signed.grant, made_under=2)
    documents = EgressDocuments(context)
    for held, digest, wanted in ((OLDER, b"older", [b"older"]), (NAMED, b"named", [b"named", b"half"])):
        documents._papers = (Paper(held, b"", digest, policy=opened_policy(held)), half)
        assert await documents.log(lambda grant: False) == len(wanted)
        assert tried[-len(wanted) :] == wanted
