"""F6: "under which approval" was a text under one key. Whoever has a region's policy key, and everything but the approvers'
keys, tries to bring a grant into force."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bridge_mesh import ACCEPTED_BY, POLICIES, STREAM, Mesh, flight, until
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from region_peer import raw_peer

from felix.errors import Code, FelixError, RequestError
from felix.identity import Identity
from felix.identity_file import load_identity
from felix.messages import ListDocuments, PutDocument
from felix.names import SpiffeId, StreamName
from felix.runtime.real import now_ms
from keys.authority import create_authority, load_authority
from policy.approval import ORDER, Approval, ApprovalBody, sign_approval
from policy.grant import ExportGrant, ImportGrant, sign_export, sign_import
from policy.residency import parse_policy, sign_policy
from policy.signed import Purpose, SignedDocument, canonical, sign
from policy.terms import GrantTerms
from region.bootstrap import issue_identity
from region.config import load_config

Tally = Callable[[str, int], None]
NAME = StreamName.parse(STREAM)
STRICT = {
    region: text.replace("lifetime: 90d", "lifetime: 90d\n    approvals: 2\n    separate: true").replace(
        "    approvals: 1\n", ""
    )
    for region, text in POLICIES.items()
}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Both regions ask for two approvals, of others than who drew the grant up or accepted it."""
    mesh = Mesh.make(tmp_path)
    for folder in (mesh.us, mesh.eu):
        for name in ("ciso", "operator-2"):
            issue_identity(folder, load_config(folder.config), "approver", name, now_ms())
    try:
        for region, text in STRICT.items():
            await mesh.start(region)
            await mesh.put(region, "policy", sign_policy(parse_policy(text, region), mesh.key(region)))
        yield mesh
    finally:
        for region in STRICT:
            await mesh.stop(region)


def halves(mesh: Mesh, **changes: Any) -> tuple[ExportGrant, SignedDocument, SignedDocument]:
    us, eu = (parse_policy(STRICT[region], region) for region in ("us-east", "eu-west"))
    export = sign_export(mesh.terms(**changes), us, mesh.key("us-east"), now_ms())
    trusted = {region: mesh.bundle(region).policy_keys for region in ("us-east", "eu-west")}
    accepted = sign_import(export, eu, mesh.key("eu-west"), trusted, ACCEPTED_BY, now_ms())
    return msgspec.json.decode(export.body, type=ExportGrant), export, accepted


async def put_halves(mesh: Mesh, export: SignedDocument, accepted: SignedDocument) -> None:
    for region in ("us-east", "eu-west"):
        await mesh.put(region, "export", export)
        await mesh.put(region, "import", accepted)


def asked(mesh: Mesh, grant: str) -> tuple[str, str]:
    """What both brokers say: "allowed", or the refusal's sentence."""
    said = []
    for region in ("us-east", "eu-west"):
        governance = mesh.nodes[region].services.governance
        try:
            if region == "us-east":
                governance.check_export(mesh.bridge_id, grant, NAME, "read")
            else:
                governance.check_import(mesh.bridge_id, grant, "us-east", NAME)
            said.append("allowed")
        except FelixError as error:
            assert error.code in (Code.NOT_APPROVED, Code.GRANT_MISSING, Code.GRANT_INVALID), error
            said.append(error.sentence)
    return said[0], said[1]


def denied(mesh: Mesh, grant: str, sentence: str = "") -> None:
    for said in asked(mesh, grant):
        assert said != "allowed"
        assert sentence in said, said


async def refused(mesh: Mesh, region: str, approval: Approval) -> str:
    with pytest.raises(RequestError) as caught:
        await mesh.put(region, "approval", approval)
    return caught.value.sentence


async def test_names_of_people_who_were_never_asked_are_no_approvals(mesh: Mesh, tally: Tally) -> None:
    """The exploit of the finding: `approvers` as texts, signed with one policy key on each side."""
    await mesh.create()
    with pytest.raises(TypeError, match="approvers"):
        GrantTerms(**{**msgspec.structs.asdict(mesh.terms()), "approvers": ("dpo@acme", "ciso@acme")})
    body, export, accepted = halves(mesh)
    old = msgspec.json.decode(export.body)
    terms = old["terms"] | {"version": 1, "approvers": ["dpo@acme (never asked)", "ciso@acme (never asked)"]}
    del terms["drawn_up_by"], old["approvals"], old["separate"]
    forged = sign(
        Purpose.EXPORT, "us-east", canonical(old | {"version": 1, "terms": terms}), mesh.key("us-east")
    )
    with pytest.raises(RequestError, match=r"made by Felix 0\.1, where approvals were texts"):
        await mesh.put("us-east", "export", forged)
    await put_halves(mesh, export, accepted)
    denied(mesh, body.grant, "us-east: 0 of 2 (nobody has approved it), 2 missing. eu-west: 0 of 2")
    tally("grants with approvers as texts", 2)


async def test_a_half_that_asks_for_less_than_the_policy_is_held_to_the_policy(mesh: Mesh) -> None:
    """The policy key signs a half that says: no approvals needed. The broker asks its own policy besides."""
    await mesh.create()
    body, _, accepted = halves(mesh)
    mine = canonical(msgspec.structs.replace(body, approvals=0, separate=False))
    theirs = msgspec.json.decode(accepted.body, type=ImportGrant)
    lax = (
        sign(Purpose.EXPORT, "us-east", mine, mesh.key("us-east")),
        sign(
            Purpose.IMPORT, "eu-west", canonical(msgspec.structs.replace(theirs, approvals=0, separate=False)),
            mesh.key("eu-west"),
        ),
    )  # fmt: skip
    await put_halves(mesh, *lax)
    denied(mesh, body.grant, "as rule ")


async def test_whatever_the_operator_signs_it_takes_two_people_on_each_side(mesh: Mesh, tally: Tally) -> None:
    await mesh.create()
    body, export, accepted = halves(mesh)
    await put_halves(mesh, export, accepted)
    terms_hash = bytes.fromhex(body.terms_hash)
    dpo, ciso = (load_identity(mesh.us.identity(name)) for name in ("dpo", "ciso"))
    tried = 0

    def signed_by(identity: Identity, approver: str, at: int = 0) -> Approval:
        claim = canonical(
            ApprovalBody(
                grant=body.grant, terms_hash=body.terms_hash, region="us-east", at=at or now_ms(),
                approver=f"spiffe://us-east.acme/approver/{approver}",
            )
        )  # fmt: skip
        return Approval(claim, identity.chain_pem, identity.sign(Purpose.APPROVAL, claim))

    # Keys that are no approver's: the operator's, the bridge's, a colleague's, another region's, a look-alike authority's.
    strangers = create_authority("us-east", "acme", now_ms())
    for identity in (
        load_identity(mesh.us.identity("operator")),
        load_identity(mesh.us.identity("us-to-eu")),
        dpo,
        load_identity(mesh.eu.identity("ciso")),
        strangers.issue_identity(SpiffeId("us-east", "acme", "approver", "ciso"), now_ms()),
    ):
        assert "does not hold" in (found := await refused(mesh, "us-east", signed_by(identity, "ciso"))) or (
            "and its certificate" in found
        )
        tried += 1
    # A signature over something else, and a good one for another grant.
    good = sign_approval(terms_hash, dpo, now_ms())
    other = ec.generate_private_key(ec.SECP256R1())
    for approval in (
        Approval(good.body, good.chain_pem, dpo.sign("identity", good.body)),
        Approval(good.body, good.chain_pem, dpo.sign(Purpose.EXPORT, good.body)),
        Approval(good.body, good.chain_pem, ciso.sign(Purpose.APPROVAL, good.body)),
        Approval(good.body, good.chain_pem, other.sign(good.body, ec.ECDSA(SHA256()))),
    ):  # fmt: skip
        assert "forged or changed" in await refused(mesh, "us-east", approval)
        tried += 1
    elsewhere = sign_approval(halves(mesh, reference="R-2")[0].terms.hash(), dpo, now_ms())
    assert "There is no grant" in await refused(mesh, "us-east", elsewhere)
    # A certificate that has ended, dated back to when it had not.
    authority = load_authority(mesh.us.authority, "us-east", "acme")
    day = 86_400_000
    former = authority.issue_identity(
        SpiffeId("us-east", "acme", "approver", "former"), now_ms(), lifetime=timedelta(seconds=1)
    )
    dated_back = signed_by(former, "former", now_ms())
    await until(lambda: now_ms() > former.not_after_ms + 1_000, "the end of a certificate")
    assert "expired" in await refused(mesh, "us-east", dated_back)
    # A certificate of the time before this authority was made is none.
    assert "valid only from" in await refused(mesh, "us-east", signed_by(dpo, "dpo", now_ms() - 20 * day))
    # One that is dated ahead is taken only once its time has come.
    ahead = sign_approval(terms_hash, ciso, now_ms() + day)
    assert "dated" in await refused(mesh, "us-east", ahead)
    # The other signature that holds, which anybody makes of a good one.
    r, s = decode_dss_signature(good.signature)
    twin = Approval(good.body, good.chain_pem, encode_dss_signature(r, ORDER - s))
    assert "the higher one of two" in await refused(mesh, "us-east", twin)
    tried += 5
    denied(mesh, body.grant, "us-east: 0 of 2")
    # The same person twice, and who drew it up (operator/operator): neither makes two.
    for region, folder in (("us-east", mesh.us), ("eu-west", mesh.eu)):
        for comment in ("first", "second"):
            await mesh.put(
                region,
                "approval",
                sign_approval(terms_hash, load_identity(folder.identity("dpo")), now_ms(), comment),
            )
        drafter = load_authority(folder.authority, region, "acme").issue_identity(
            SpiffeId(region, "acme", "approver", "operator"), now_ms()
        )
        await mesh.put(region, "approval", sign_approval(terms_hash, drafter, now_ms()))
        tried += 3
    both = (
        "us-east: 1 of 2 (approved by dpo; operator does not count: who drew a grant up",
        "eu-west: 1 of 2 (approved by dpo",
    )
    for said in both:
        assert any(said in sentence for sentence in asked(mesh, body.grant)), asked(mesh, body.grant)
    # Nothing crosses meanwhile; then the second person signs on each side, and it does.
    await mesh.publish([flight(number) for number in range(20)])
    async with mesh.agent() as agent:
        await until(lambda: agent.links() and "1 missing" in agent.links()[0].reason, "what a link waits for")
        assert agent.links()[0].state == "waiting"
        assert await mesh.arrived() == 0
        await mesh.put("us-east", "approval", sign_approval(terms_hash, ciso, now_ms()))
        await until(
            lambda: "eu-west: 1 of 2" in asked(mesh, body.grant)[0], "the other side's first approval"
        )
        await mesh.put("eu-west", "approval", mesh.sign_approval("eu-west", body.terms_hash, "ciso"))
        await mesh.crossed(20)
    assert asked(mesh, body.grant) == ("allowed", "allowed")
    tally("false approvals", tried)


async def test_a_policy_that_asks_for_more_stops_a_grant_that_stands(mesh: Mesh) -> None:
    await mesh.create()
    body, export, accepted = halves(mesh)
    await put_halves(mesh, export, accepted)
    for region in ("us-east", "eu-west"):
        for taker in ("us-east", "eu-west"):
            for name in ("dpo", "ciso"):
                await mesh.put(taker, "approval", mesh.sign_approval(region, body.terms_hash, name))
    assert asked(mesh, body.grant) == ("allowed", "allowed")
    stricter = STRICT["us-east"].replace("revision: 1", "revision: 2")
    for change in ("approvals: 3", "approvals: 2\n    approvers: [dpo, operator-2]"):
        text = stricter.replace("approvals: 2", change)
        await mesh.put("us-east", "policy", sign_policy(parse_policy(text, "us"), mesh.key("us-east")))
        assert "as rule to-eu of revision" in asked(mesh, body.grant)[0]
        stricter = stricter.replace("revision: 2", "revision: 3")
    await mesh.put("us-east", "approval", mesh.sign_approval("us-east", body.terms_hash, "operator-2"))
    assert asked(mesh, body.grant) == ("allowed", "allowed")


@pytest.mark.parametrize("engine", ["qh3", "aioquic"])
async def test_an_approver_can_do_nothing_but_sign(mesh: Mesh, engine: str) -> None:
    """Its identity opens no session, in its own region or in the other one, and so hands in nothing."""
    identity = load_identity(mesh.us.identity("dpo"))
    for region, folder in (("us-east", mesh.us), ("eu-west", mesh.eu)):
        with pytest.raises((FelixError, AssertionError)) as caught:
            async with raw_peer(
                folder, mesh.nodes[region].address, identity=identity, engine=engine, region=region
            ) as peer:
                await peer.ask(ListDocuments("export"), 1)
        assert "approver" in str(caught.value), caught.value


async def test_a_bridge_brings_approvals_of_its_own_grants_alone(mesh: Mesh) -> None:
    issue_identity(mesh.us, load_config(mesh.us.config), "bridge", "another", now_ms())
    body, export, accepted = halves(mesh)
    await put_halves(mesh, export, accepted)
    approval = mesh.sign_approval("us-east", body.terms_hash)
    identity = load_identity(mesh.us.identity("another"))
    async with raw_peer(mesh.eu, mesh.nodes["eu-west"].address, identity=identity, region="eu-west") as peer:
        with pytest.raises(RequestError, match="cannot bring a grant of"):
            await peer.ask(PutDocument("approval", approval.encode_file()), 1)
