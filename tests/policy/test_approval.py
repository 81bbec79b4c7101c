from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from approvers import DAY, MADE_MS, approver, authority, roots
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from departures import terms

from felix.errors import Code, RequestError
from felix.identity import Binding, Identity, prove
from felix.names import IDENTITY_KINDS, SESSION_KINDS, SpiffeId
from felix.peer import TrustBundle, encode_chain, verify_peer
from keys.authority import IDENTITY_LIFETIME, create_authority
from policy.approval import (
    ORDER,
    Approval,
    ApprovalBody,
    open_approval,
    parse_document,
    refuse_ended,
    refuse_twin,
    sign_approval,
)
from policy.signed import Purpose, SignatureError, SignedDocument, canonical, sign
from policy.terms import grant_id

HASH = terms().hash()
NOW = 10 * DAY
APPROVAL = sign_approval(HASH, approver("dpo"), NOW, "checked with the owner")


def test_an_approval_says_who_approved_what_and_when() -> None:
    body = open_approval(APPROVAL, roots())
    assert body == ApprovalBody(
        grant=grant_id(HASH), terms_hash=HASH.hex(), region="us-east",
        approver="spiffe://us-east.acme/approver/dpo", at=NOW, comment="checked with the owner",
    )  # fmt: skip
    assert (body.name, APPROVAL.region, APPROVAL.purpose) == ("dpo", "us-east", Purpose.APPROVAL)


@pytest.mark.parametrize("encode", [Approval.encode_file, Approval.encode_token])
def test_a_file_and_a_token_give_the_same_approval_back(encode: object) -> None:
    data = encode(APPROVAL)  # type: ignore[operator]
    assert Approval.parse(data) == APPROVAL == parse_document(data)


def test_parse_document_tells_approvals_and_signed_documents_apart() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    document = sign(Purpose.DENY, "us-east", b"{}", Ed25519PrivateKey.generate())
    assert parse_document(document.encode_file()) == document == parse_document(document.encode_token())
    with pytest.raises(SignatureError):
        SignedDocument.parse(APPROVAL.encode_file())
    for damaged in (b"", b"{", b"????", b"{}", b'{"purpose":"grant-approval"}', b"\xff\xfe"):
        with pytest.raises(SignatureError):
            parse_document(damaged)


def test_an_edited_file_is_refused_wherever_it_was_edited() -> None:
    data = APPROVAL.encode_file()
    for at in range(0, len(data), 7):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(SignatureError):
            open_approval(Approval.parse(changed), roots())
    with pytest.raises(SignatureError, match="reformatted"):
        Approval.parse(data.replace(b"  ", b"   "))


def _resigned(identity: Identity, **changes: object) -> Approval:
    """The approval with these fields, signed by this identity, which `sign_approval` would refuse to."""
    body = canonical({**msgspec.json.decode(APPROVAL.body), **changes})
    return Approval(body, identity.chain_pem, identity.sign(Purpose.APPROVAL, body))


def test_nobody_else_speaks_for_an_approver() -> None:
    us = authority("us-east")
    operator = us.issue_identity(SpiffeId("us-east", "acme", "operator", "dpo"), MADE_MS)
    other = create_authority("us-east", "acme", MADE_MS)
    stranger = other.issue_identity(SpiffeId("us-east", "acme", "approver", "dpo"), MADE_MS)
    colleague = approver("ciso")
    abroad = approver("dpo", "eu-west")
    for identity, sentence in [
        (operator, "here only approver may come"),
        (stranger, "was not issued under the root of us-east.acme"),
        (colleague, "names spiffe://us-east.acme/approver/dpo, and its certificate"),
        (abroad, "names spiffe://us-east.acme/approver/dpo, and its certificate|not trusted here"),
    ]:
        with pytest.raises(SignatureError, match=sentence):
            open_approval(_resigned(identity), roots())
    with pytest.raises(SignatureError, match="operator/dpo is of kind operator"):
        sign_approval(HASH, operator, NOW)


def test_a_signature_for_another_purpose_or_body_is_none() -> None:
    identity = approver("dpo")
    for approval in (
        Approval(APPROVAL.body, APPROVAL.chain_pem, identity.sign("identity", APPROVAL.body)),
        Approval(APPROVAL.body, APPROVAL.chain_pem, identity.sign(Purpose.EXPORT, APPROVAL.body)),
        Approval(_resigned(identity, at=NOW + 1).body, APPROVAL.chain_pem, APPROVAL.signature),
        Approval(APPROVAL.body, APPROVAL.chain_pem, b""),
    ):
        with pytest.raises(SignatureError, match="forged or changed"):
            open_approval(approval, roots())


@pytest.mark.parametrize("at", [0, MADE_MS + 31 * DAY, (1 << 53) - 1])
def test_a_certificate_that_was_not_valid_at_the_time_approves_nothing(at: int) -> None:
    with pytest.raises(SignatureError, match=r"valid only from|expired|out of range"):
        open_approval(sign_approval(HASH, approver("dpo"), at), roots())


def test_an_approval_outlives_its_certificate_but_is_handed_in_before() -> None:
    refuse_ended(APPROVAL, roots(), NOW)
    open_approval(APPROVAL, roots())
    with pytest.raises(SignatureError, match="expired"):
        refuse_ended(APPROVAL, roots(), MADE_MS + 31 * DAY)


def test_of_the_two_signatures_that_hold_a_new_approval_has_the_one_that_we_make() -> None:
    """Whoever carries an approval makes the other one of it. What was signed before has either, and holds."""
    for at in range(NOW, NOW + 16):
        approval = sign_approval(HASH, approver("dpo"), at)
        r, s = decode_dss_signature(approval.signature)
        twin = Approval(approval.body, approval.chain_pem, encode_dss_signature(r, ORDER - s))
        assert open_approval(twin, roots()) == open_approval(approval, roots())
        assert Approval.parse(twin.encode_file()) == twin
        refuse_twin(approval)
        with pytest.raises(SignatureError, match="the higher one of two"):
            refuse_twin(twin)


def test_without_the_regions_root_nothing_is_believed() -> None:
    for bundle in (TrustBundle(), roots("eu-west"), TrustBundle([authority("us-east", "umbrella").anchor()])):
        with pytest.raises(SignatureError, match=r"the root of us-east.acme is not known here"):
            open_approval(APPROVAL, bundle)


@pytest.mark.parametrize(
    "changes",
    [
        {"region": "eu-west"},
        {"approver": "spiffe://us-east.acme/operator/dpo"},
        {"approver": "dpo"},
        {"terms_hash": "00" * 32},
        {"grant": "g-aaaaaaaaaaaaaaaa"},
        {"version": 2},
        {"at": -1},
        {"comment": "two\nlines"},
        {"more": 1},
    ],
)
def test_bodies_that_contradict_themselves_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(SignatureError, match="cannot be read"):
        Approval.parse(_resigned(approver("dpo"), **changes).encode_file())


def test_an_approver_opens_no_session() -> None:
    assert set(IDENTITY_KINDS) - set(SESSION_KINDS) == {"approver"}
    assert set(IDENTITY_LIFETIME) == set(IDENTITY_KINDS)
    identity, binding = approver("dpo"), Binding(b"hello", b"challenge", bytes(32))
    proof = prove(identity, binding)
    with pytest.raises(RequestError, match="is of kind approver; here only") as caught:
        verify_peer(proof, binding, roots(), NOW)
    assert caught.value.code is Code.IDENTITY_REFUSED


def test_a_chain_with_comments_is_another_file_and_refused(tmp_path: Path) -> None:
    commented = Approval(APPROVAL.body, b"# me\n" + APPROVAL.chain_pem, APPROVAL.signature)
    with pytest.raises(SignatureError, match="not in canonical form"):
        Approval.parse(commented.encode_file())


def _certificate_with(text: bytes) -> bytes:
    """Anybody's, self-signed, which says what he likes."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    made = datetime.fromtimestamp((NOW - DAY) / 1000, UTC)
    extension = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), text)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, made, made + timedelta(days=9))
    return encode_chain([builder.add_extension(extension, critical=False).sign(key, SHA256())])


def test_a_chain_is_the_path_to_the_root_and_has_nothing_beside_it() -> None:
    """The approver signs the body alone. Who carries his approval to another region would carry 12 kB of his own in a certificate that leads nowhere."""
    leaf, issuing = x509.load_pem_x509_certificates(APPROVAL.chain_pem)
    root = authority("us-east").anchor().root
    chains = {
        "a certificate of somebody's": APPROVAL.chain_pem + _certificate_with(b"SSN 078-05-1120 " * 500),
        "another approver's": APPROVAL.chain_pem
        + encode_chain(x509.load_pem_x509_certificates(approver("ciso").chain_pem)[:1]),
        "one twice": encode_chain([leaf, issuing, issuing]),
        "the root": encode_chain([leaf, issuing, root]),
        "another order": encode_chain([leaf, root, issuing]),
    }
    for what, chain in chains.items():
        carried = Approval(APPROVAL.body, chain, APPROVAL.signature)
        with pytest.raises(SignatureError, match="nothing besides") as caught:
            open_approval(Approval.parse(carried.encode_file()), roots())
        assert "078-05-1120" not in caught.value.sentence, what
