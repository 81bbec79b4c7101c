"""F4: whoever holds the egress key writes a GRANT leaf with terms of its own invention. Verifier and proof believe documents alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_f03_receipts_of_the_source import write
from audit_log import EGRESS_ORIGIN, STREAM, TIME_MS, Link, trust
from signed_grants import HOUR_MS, approver, make_terms, paper_leaf, policy_document, signing_key

from audit.agreement import read_agreements
from audit.document_leaf import document_leaf, read_document
from audit.leaf import EncodedLeaf, Kind, Leaf, Side, Terms, _encode, encode_leaf
from audit.origin import Origin
from audit.proof import check_proof, prove
from audit.tile import MemoryFiles
from audit.verify import verify_log
from felix.errors import FelixError, RequestError
from policy.approval import sign_approval
from policy.signed import Purpose, canonical, sign

INVENTED = Terms(
    purpose="INVENTED purpose",
    basis="adequacy",
    article="GDPR 45",
    reference="none",
    approvers=("spiffe://us-east.acme/approver/dpo-who-never-approved",),
    expires_ms=TIME_MS + 10**11,
)


def forgeries(link: Link) -> dict[str, list[Leaf]]:
    """Document leaves as somebody would write them who holds us-east's keys, and eu-west's not."""
    signed = link.signed
    policy, grant, accept, *approvals = link.agreement()
    replace = msgspec.structs.replace

    def invented(**changes: Any) -> Leaf:
        return Leaf(replace(grant.header, terms=INVENTED, **changes))

    # us-east signs another half over the same id and hash is impossible; over other terms it is another grant.
    other = make_terms(purpose="INVENTED purpose")
    body = replace(signed.body, terms=other, terms_hash=other.hash().hex(), grant=_grant(other), approvals=0)
    own_half = sign(Purpose.EXPORT, "us-east", canonical(body), signing_key("us-east"))
    forged_half = sign(Purpose.IMPORT, "us-east", signed.accepted.body, signing_key("us-east"))
    forged = msgspec.structs.replace(accept.header)
    never = sign_approval(other.hash(), approver("us-east", "mallory"), TIME_MS - HOUR_MS + 5_000)
    acceptance = document_leaf(
        Kind.ACCEPT, forged_half.encode_file(), side=Side.EGRESS, time_ms=TIME_MS, actor=forged.actor,
        source_region="us-east", destination_region="eu-west", grant_id=forged.grant_id, terms_hash=forged.terms_hash,
        bridge=forged.bridge, stream=forged.stream, destination_stream=forged.destination_stream,
    )  # fmt: skip
    return {
        "invented terms beside the document": [policy, invented(), accept, *approvals],
        "invented terms and no document": [policy, invented(document=b""), accept, *approvals],
        "no document": [policy, Leaf(replace(grant.header, document=b"")), accept, *approvals],
        "no acceptance": [policy, grant, *approvals],
        "an acceptance that the source signed": [policy, grant, acceptance, *approvals],
        "no approval of the source": [policy, grant, accept, approvals[1]],
        "no approval of the destination": [policy, grant, accept, approvals[0]],
        "an approval of other terms": [policy, grant, accept, paper_leaf(never, signed), approvals[1]],
        "another half of the source": [policy, paper_leaf(own_half, signed), accept, *approvals],
        "no policy": [grant, accept, *approvals],
        "another region's policy": [
            paper_leaf(policy_document("eu-west"), signed), grant, accept, *approvals,
        ],
    }  # fmt: skip


def _grant(terms: Any) -> str:
    from policy.terms import grant_id

    return grant_id(terms.hash())


def is_readable(leaf: Leaf) -> bool:
    """Whether anybody reads it: a GRANT of version 2 with terms of its own is no leaf, whoever writes it."""
    try:
        encode_leaf(leaf)
    except RequestError as error:
        assert "has no terms beside the signed document" in error.sentence
        return False
    return True


CASES = sorted(forgeries(Link()))


@pytest.mark.parametrize("case", CASES)
def test_terms_that_nobody_signed_are_found_and_proved_by_nothing(
    tmp_path: Path, case: str, tally: Tally
) -> None:
    link = Link()
    leaves = forgeries(link)[case]
    intents = link.intent()
    written: list[Any] = [
        leaf if is_readable(leaf) else EncodedLeaf(leaf.header, _encode(leaf)) for leaf in leaves
    ]
    folder = write(tmp_path, iter([written, intents, [link.ack(intents)]]))
    report = verify_log(folder, trust())
    steps = {finding.step for finding in report.findings}
    assert steps & {7, 10}, report.findings
    assert (6 in steps) == (not all(map(is_readable, leaves)))
    with pytest.raises(FelixError):
        check_proof(prove(folder, trust(), STREAM, 0, 1), trust())
    found, _ = read_agreements(
        trust(),
        Origin.parse(EGRESS_ORIGIN),
        enumerate(filter(is_readable, leaves)),
        lambda header: read_document(header, MemoryFiles({})),
    )
    agreement = found.agreement(link.grant_id)
    # What the register would print is signed, or nothing is printed.
    assert agreement is None or agreement.legal_fields.purpose == "analytics"
    assert agreement is None or not any("never" in each or "mallory" in each for each in agreement.approvers)
    tally("leaves whose terms nobody signed", 1)


def test_the_honest_log_verifies_and_its_proof_names_who_approved(tmp_path: Path) -> None:
    link = Link()
    intents = link.intent()
    folder = write(tmp_path, iter([link.agreement(), intents, [link.ack(intents)]]))
    assert verify_log(folder, trust()).ok
    approved = check_proof(prove(folder, trust(), STREAM, 0, 1), trust()).approved
    assert approved is not None and approved.terms.purpose == "analytics"
    assert approved.approvers == ("spiffe://eu-west.acme/approver/dpo", "spiffe://us-east.acme/approver/dpo")
    assert (approved.source_country, approved.destination_country) == ("US", "IE")
