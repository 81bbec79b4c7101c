"""What other regions signed about each other, put into a region's store by whoever administers it: it gets no leaf in the region's own log, which
would never verify again, and is not held. Asked of the product's own sorting, without a broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attacks.conftest import Tally
from attacks.test_documents_of_one_grant import other_acceptances
from audit_log import STREAM, TIME_MS, region_bundle, trust
from signed_grants import Signed, approver, deny_entry, make_terms, signed_grant, signing_key, standing

from felix.names import SpiffeId
from policy.approval import Document, sign_approval
from policy.grant import (
    ExportGrant,
    GrantBook,
    GrantError,
    ImportGrant,
    Standing,
    StandingAction,
    sign_standing,
)
from policy.signed import Purpose, SignedDocument, canonical, sign
from policy.terms import grant_id
from policy.truncation import Truncation
from region.governance.held_documents import HeldDocuments
from region.governance.intake import DocumentIntake
from region.governance.lasting import LastingDocuments
from region.governance.own_words import OwnWords
from region.trust.held_document import digest_of

REGIONS = ("us-east", "eu-west", "ap-south")


def between_others() -> tuple[str, list[Document]]:
    """A grant from ap-south to eu-west, and what is said about it. All of it is genuine."""
    terms = make_terms(
        from_region="ap-south",
        bridge="spiffe://ap-south.acme/bridge/ap-to-eu",
        drawn_up_by="spiffe://ap-south.acme/operator/eve",
    )
    grant, signed = grant_id(terms.hash()), signed_grant()
    rest: dict[str, Any] = {
        "grant": grant, "terms_hash": terms.hash().hex(), "approvals": 1, "separate": False,
        "policy_revision": 1, "policy_hash": "0" * 64, "signed_at": signed.body.signed_at,
    }  # fmt: skip
    export = ExportGrant(terms=terms, **rest)
    accepted = ImportGrant(
        stream=terms.stream, destination_stream=terms.destination_stream, from_region="ap-south",
        to_region="eu-west", bridge=terms.bridge, accepted_by=signed.half.accepted_by, **rest,
    )  # fmt: skip
    return grant, [
        sign(Purpose.EXPORT, "ap-south", canonical(export), signing_key("ap-south")),
        sign(Purpose.IMPORT, "eu-west", canonical(accepted), signing_key("eu-west")),
        *(
            sign_approval(terms.hash(), approver(region), rest["signed_at"])
            for region in ("ap-south", "eu-west")
        ),
        standing(grant, StandingAction.PAUSE, "eu-west"),
        standing(grant, StandingAction.REVOKE, "ap-south"),
        goes_on(grant, "eu-west"),
    ]


def sorted_by(own: str, stored: list[Document]) -> tuple[set[bytes], set[bytes]]:
    """Digests of what the region holds of these in its book, and of what is to get its leaf."""
    sections: dict[tuple[str, str], dict[str, bytes]] = {}
    for number, document in enumerate(stored):
        kind = {Purpose.STANDING: ("revocations", "state"), Purpose.DENY: ("denies", "state")}.get(
            document.purpose, ("grants", str(document.purpose).removeprefix("grant-"))
        )
        sections.setdefault(kind, {})[str(number)] = document.encode_file()
    bundles = {region: region_bundle(region) for region in REGIONS}
    regions: Any = SimpleNamespace(
        own=bundles[own], bundles=bundles, trust=trust(*REGIONS).anchors,
        believed_policy_keys=lambda: {region: bundle.policy_keys for region, bundle in bundles.items()}, withdrawn=frozenset(),
    )  # fmt: skip
    mirror: Any = SimpleNamespace(documents=lambda section, side: sections.get((section, side), {}))
    memory: Any = SimpleNamespace(keep=lambda *_: None)
    logged: Any = set()
    lasting = LastingDocuments(logged, memory, [], regions.believed_policy_keys, OwnWords(regions.own))
    documents, waiting = HeldDocuments(regions, mirror, logged, lasting, lambda: 1).sort()
    held = {digest_of(each) for each in (*documents, *lasting.in_force())}
    return held, {digest_of(each) for each in waiting}


def goes_on(grant: str, region: str) -> SignedDocument:
    cut = Truncation(stream=STREAM, shard=0, incarnation="ab" * 16, epoch=1, offset=10)
    body = Standing(
        grant=grant, action=StandingAction.ACCEPT_TRUNCATION, region=region, sequence=1, at=TIME_MS, by="alice", truncation=cut
    )  # fmt: skip
    return sign_standing(body, signing_key(region))


def all_of(signed: Signed) -> list[Document]:
    return [
        signed.export, signed.accepted, *signed.approvals, goes_on(signed.grant, "us-east"),
        standing(signed.grant, StandingAction.PAUSE, "eu-west"), deny_entry("acme/hr/*", "eu-west"),
    ]  # fmt: skip


@pytest.mark.parametrize("own", ["us-east", "eu-west"])
def test_what_concerns_the_region_gets_its_leaf(own: str) -> None:
    documents = all_of(signed_grant())
    held, waiting = sorted_by(own, documents)
    assert waiting == {digest_of(each) for each in documents}
    # What forbids counts before it has its leaf.
    assert held == {digest_of(each) for each in documents[-2:]}


def test_what_others_signed_about_each_other_gets_none(tally: Tally) -> None:
    """Each by itself, all together, and beside a grant of the region's own."""
    grant, documents = between_others()
    own = all_of(signed_grant())
    halves = documents[:2]
    for stored in (
        [*documents],
        [*own, *documents],
        [halves[0]],
        [halves[1]],
        documents[2:4],
        [*halves, documents[4]],
    ):
        held, waiting = sorted_by("us-east", stored)
        strangers = {digest_of(each) for each in documents}
        assert not strangers & waiting, grant
        # A word on where a link goes on is in the book, which asks who said it, as it asks of words on grants that are not known.
        assert not strangers & held - {digest_of(documents[-1])}, grant
    held, waiting = sorted_by("ap-south", documents)
    assert {digest_of(each) for each in documents} == waiting
    tally("genuine documents of two other regions", len(documents))


def test_an_acceptance_of_other_terms_gets_none(tally: Tally) -> None:
    signed = signed_grant()
    odd = other_acceptances(signed)
    held, waiting = sorted_by("us-east", [signed.export, signed.accepted, *odd])
    assert waiting == {digest_of(signed.export), digest_of(signed.accepted)} and not held
    tally("acceptances of something else in the store", len(odd))


async def test_a_broker_keeps_as_many_approvals_as_whoever_verifies_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("region.governance.intake.APPROVERS_MAX", 3)
    signed = signed_grant()
    names = ("x1", "x2", "x3")
    more = [sign_approval(signed.terms.hash(), approver("eu-west", name), TIME_MS) for name in names]
    documents = [signed.export, signed.accepted, *signed.approvals, *more[:2]]
    stored: list[Document] = []

    async def keep(*said: Any) -> None:
        stored.append(said[-1])

    intake = object.__new__(DocumentIntake)
    anchors = trust().anchors
    for name, value in {
        "_regions": SimpleNamespace(trust=anchors), "_broker": SimpleNamespace(clock_ms=lambda: TIME_MS), "_own": region_bundle("us-east"),
        "_judgement": SimpleNamespace(book=GrantBook(documents, trust().policy_keys, anchors)), "_require_room": keep, "_store_and_log": keep,
    }.items():  # fmt: skip
        setattr(intake, name, value)
    actor = SpiffeId.parse(signed.terms.bridge)
    assert "already" in await intake._put_approval(actor, more[0])
    with pytest.raises(GrantError, match="3 people of eu-west"):
        await intake._put_approval(actor, more[2])
    assert stored == []
    # Another region's do not use up this one's.
    own = sign_approval(signed.terms.hash(), approver("us-east", "x3"), TIME_MS)
    await intake._put_approval(actor, own)
    assert stored[-1] == own
