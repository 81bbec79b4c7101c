"""F10, the book: documents without end. No number of them stops a broker, and leaving some out allows nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from approvers import approvals, roots
from attacks.chance import Chance
from bridge_mesh import STREAM, Mesh
from departures import DAY, terms

from felix.errors import Code, FelixError
from felix.names import SpiffeId, StreamName
from keys.signing import SigningKey
from policy.approval import Document
from policy.grant import (
    Allowed,
    Attempt,
    DenyEntry,
    GrantBook,
    GrantState,
    RefusalKind,
    Standing,
    StandingAction,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import parse_policy
from policy.terms import grant_id

Tally = Callable[[str, int], None]
EXAMPLES = Path(__file__).parents[2] / "examples" / "regions"
NOW = 10 * DAY
US, EU = (SigningKey.from_seed(bytes([seed]) * 32).private_key for seed in (1, 2))
TRUSTED = {
    "us-east": (US.public_key().public_bytes_raw(),),
    "eu-west": (EU.public_key().public_bytes_raw(),),
}
POLICY_US = parse_policy((EXAMPLES / "residency.yaml").read_text(), "us")
POLICY_EU = parse_policy((EXAMPLES / "residency-eu-west.yaml").read_text(), "eu")
BRIDGE = SpiffeId.parse("spiffe://us-east.acme/bridge/us-to-eu")
ATTEMPT = Attempt(StreamName.parse("acme/ops/departures"), "us-east", "eu-west", BRIDGE)


@cache
def grant(reference: str, expires: int = 80 * DAY) -> tuple[str, tuple[Document, ...]]:
    """A grant that holds: both halves and both approvals, four documents."""
    wanted = terms(not_before=DAY, expires=expires, reference=reference)
    export = sign_export(wanted, POLICY_US, US, DAY)
    accepted = sign_import(export, POLICY_EU, EU, TRUSTED, "spiffe://eu-west.acme/operator/bob", DAY)
    return grant_id(wanted.hash()), (export, accepted, *approvals(wanted.hash()))


def revocation(name: str, region: str, at: int) -> Document:
    said = Standing(
        grant=name,
        action=StandingAction.REVOKE,
        region=region,
        sequence=1,
        at=at,
        by="m",
        reason=f"because {at}",
    )
    return sign_standing(said, US if region == "us-east" else EU)


def test_of_many_revocations_the_first_holds_and_the_rest_change_nothing(
    chance: Chance, tally: Tally
) -> None:
    name, documents = grant("R-1")
    many = [
        revocation(name, region, DAY + number) for region in ("us-east", "eu-west") for number in range(300)
    ]
    books = []
    for seed in range(3):
        chance(seed).shuffle(many)
        book = GrantBook([*documents, *many], TRUSTED, roots())
        found = book.check(ATTEMPT, POLICY_US, NOW)
        assert not isinstance(found, Allowed) and found.kind is RefusalKind.REVOKED
        books.append(found.sentence)
        assert book.is_revoked_by(name, "us-east") and book.is_revoked_by(name, "eu-west")
        assert len(book._standings) == 2
    assert len(set(books)) == 1 and "because 86400000" in books[0]
    tally("revocations of one grant", len(many))


def test_what_is_too_much_is_left_out_oldest_ended_first_and_allows_nothing(
    chance: Chance, tally: Tally
) -> None:
    old, old_documents = grant("R-old", 20 * DAY)
    new, new_documents = grant("R-new", 80 * DAY)
    documents = [*old_documents, *new_documents]
    assert isinstance(
        GrantBook(documents, TRUSTED, roots(), documents_max=8).check(ATTEMPT, None, NOW, grant=old), Allowed
    )
    book = GrantBook(documents, TRUSTED, roots(), documents_max=7)
    assert [claim.grant for claim in book.left_out] == [old]
    assert isinstance(book.check(ATTEMPT, POLICY_US, NOW, grant=new), Allowed)
    found = book.check(ATTEMPT, POLICY_US, NOW, grant=old)
    assert not isinstance(found, Allowed) and (found.kind, found.code) == (
        RefusalKind.LEFT_OUT,
        Code.GRANT_MISSING,
    )
    assert old in found.sentence
    # Every room there is, from none to all: what is allowed is allowed with all documents, too.
    closed = sign_deny(
        DenyEntry(streams="acme/ops/x", peer="*", region="us-east", sequence=1, at=NOW, by="a"), US
    )
    denial = sign_deny(
        DenyEntry(streams="acme/ops/*", peer="*", region="us-east", sequence=1, at=NOW, by="a"), US
    )
    tried = 0
    for more in (
        (),
        (revocation(new, "eu-west", NOW),),
        (revocation(old, "us-east", NOW), closed),
        (denial,),
        (denial, closed),
    ):
        whole = [*documents, *more]
        lawful = GrantBook(whole, TRUSTED, roots())
        for room in range(len(whole) + 1):
            for seed in range(3):
                shuffled = whole[:]
                chance(seed).shuffle(shuffled)
                held = GrantBook(shuffled, TRUSTED, roots(), documents_max=room)
                for name in (old, new):
                    allowed = isinstance(held.check(ATTEMPT, POLICY_US, NOW, grant=name), Allowed)
                    assert not allowed or isinstance(
                        lawful.check(ATTEMPT, POLICY_US, NOW, grant=name), Allowed
                    )
                    tried += 1
    tally("books with too little room", tried)


def test_grants_that_nobody_can_use_leave_first() -> None:
    name, documents = grant("R-1")
    orphans = [
        revocation(
            f"g-{'a' * 12}{number:04}".translate(str.maketrans("0189", "bcde")), "eu-west", NOW + number
        )
        for number in range(200)
    ]
    book = GrantBook([*orphans, *documents], TRUSTED, roots(), documents_max=20)
    assert isinstance(book.check(ATTEMPT, POLICY_US, NOW), Allowed)
    assert book.get(name, NOW).state is GrantState.ACTIVE
    assert len(book.left_out) >= 184


def test_one_grant_with_too_many_documents_does_not_push_others_out() -> None:
    name, documents = grant("R-1")
    noisy, noise = grant("R-2", 90 * DAY)
    pauses = [
        sign_standing(
            Standing(
                grant=noisy, action=StandingAction.RESUME, region="eu-west", sequence=number, at=NOW, by="m"
            ),
            EU,
        )
        for number in range(1, 60)
    ]
    book = GrantBook([*documents, *noise, *pauses], TRUSTED, roots(), documents_max=30)
    assert [claim.grant for claim in book.left_out] == [noisy]
    assert isinstance(book.check(ATTEMPT, POLICY_US, NOW, grant=name), Allowed)


async def test_a_broker_starts_however_many_documents_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """600 revocations, each signed by the other region, in a store from which a broker takes 20."""
    mesh = Mesh.make(tmp_path)
    await mesh.start("us-east")
    try:
        await mesh.enact_policies_of("us-east")
        await mesh.create()
        body, export, accepted = mesh.sign_grant()
        await mesh.agree("us-east", body, export, accepted)
        store = mesh.nodes["us-east"].broker.catalog
        for number in range(600):
            said = Standing(
                grant=body.grant, action=StandingAction.REVOKE, region="eu-west", sequence=1, at=number, by="m",
                reason=f"number {number}",
            )  # fmt: skip
            document = sign_standing(said, mesh.key("eu-west"))
            await store.put_document(
                "revocations", "state", f"{body.grant}.{number:024}", document.encode_file(), revision=0
            )
        await mesh.stop("us-east")
        monkeypatch.setattr("policy.grant.DOCUMENTS_MAX", 20)
        node = await mesh.start("us-east")
        governance = node.services.governance
        # The first of them is kept, and the others are not counted as documents.
        assert governance.book.left_out == ()
        with pytest.raises(FelixError) as refused:
            governance.check_export(mesh.bridge_id, body.grant, StreamName.parse(STREAM), "read")
        assert refused.value.code is Code.GRANT_REVOKED
        # It serves, and takes what an operator puts.
        async with mesh.operator("us-east") as client:
            assert [state async for state in client.list_streams()]
        tally("documents beyond the bound", 600)
    finally:
        await mesh.stop("us-east")
