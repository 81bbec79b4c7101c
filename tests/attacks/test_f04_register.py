"""F4: the register prints no legal field that nobody signed.

The finding: whoever holds the egress key writes a GRANT leaf with any purpose, basis, approvers and expiry beside the real
terms hash, and the register printed them. Tried here, for each side's log: the leaf's own terms instead of documents,
each document left out, each damaged, each signed by the wrong region, approvals of other terms; and leaves of version 1,
whose terms nobody signed. The register's rows are made from what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256

import msgspec
import pytest
from audit_log import EGRESS_ORIGIN, INGRESS_ORIGIN, trust
from signed_grants import approver, grant_leaves, signed_grant

from audit.leaf import Kind, Leaf, Side, Terms, decode_leaf, encode_leaf
from audit.spark.agreements import _NAMES, rows_of
from audit.tile import MemoryFiles
from felix.errors import RequestError
from policy.approval import sign_approval

ORIGINS = {Side.EGRESS: EGRESS_ORIGIN, Side.INGRESS: INGRESS_ORIGIN}
INVENTED = Terms(
    purpose="INVENTED purpose", basis="adequacy", article="GDPR 45", reference="INVENTED-1",
    approvers=("spiffe://us-east.acme/approver/dpo-who-never-approved",), expires_ms=1 << 42,
)  # fmt: skip
OWN_WORDS = (
    "terms_hash",
    "grant_id",
    "source_region",
    "destination_region",
    "stream",
    "actor",
    "time_ms",
    "log",
)


def rows(leaves: list[Leaf], side: Side) -> list[dict[str, object]]:
    """As the report makes them, which leaves out what cannot be read."""
    read = []
    for leaf in leaves:
        try:
            read.append(decode_leaf(encode_leaf(leaf)) if leaf.version > 1 else leaf)
        except RequestError:
            assert leaf.header.terms == INVENTED
    found = rows_of(ORIGINS[side], enumerate(read), MemoryFiles({}), trust()).terms
    return [dict(zip(_NAMES, row, strict=True)) for row in found]


def with_document(leaf: Leaf, document: bytes) -> Leaf:
    header = msgspec.structs.replace(
        leaf.header, document=document, document_sha256=sha256(document).digest()
    )
    return Leaf(header, b"", leaf.version)


def forgeries(side: Side) -> Iterator[tuple[str, list[Leaf]]]:
    """Document leaves of a grant as somebody with the log's key might write them, without the others' signatures."""
    signed = signed_grant()
    leaves = grant_leaves(signed, side)
    grant = next(at for at, leaf in enumerate(leaves) if leaf.header.kind is Kind.GRANT)
    own = Leaf(msgspec.structs.replace(leaves[grant].header, terms=INVENTED), b"", leaves[grant].version)
    yield "invented terms alone", [with_document(own, b"{}")]
    yield "invented terms beside the documents", [*leaves[:grant], own, *leaves[grant + 1 :]]
    for at, leaf in enumerate(leaves):
        name = f"{leaf.header.kind.name} {at}"
        yield f"without {name}", [*leaves[:at], *leaves[at + 1 :]]
        document = leaf.header.document
        for place in range(len(document) // 7, len(document), len(document) // 7):
            damaged = document[:place] + bytes([document[place] ^ 1]) + document[place + 1 :]
            yield (
                f"{name} damaged at {place}",
                [*leaves[:at], with_document(leaf, damaged), *leaves[at + 1 :]],
            )
        yield f"{name} empty", [*leaves[:at], with_document(leaf, b"{}"), *leaves[at + 1 :]]
    other = signed_grant(purpose="marketing")
    approvals = [leaf for leaf in leaves if leaf.header.kind is Kind.APPROVE]
    rest = [leaf for leaf in leaves if leaf.header.kind is not Kind.APPROVE]
    for approval in other.approvals:
        moved = [with_document(leaf, approval.encode_file()) for leaf in approvals]
        yield "approvals of other terms", [*rest, *moved]
    # One region's approver signs for both: the other side has nobody.
    for region in ("us-east", "eu-west"):
        alone = sign_approval(
            signed.terms.hash(), approver(region, "second"), signed.body.signed_at
        ).encode_file()
        mine = [leaf for leaf in approvals if region.encode() in leaf.header.document]
        yield f"approved by {region} alone", [*rest, *mine, with_document(mine[0], alone)]


@pytest.mark.parametrize("side", Side)
def test_no_row_is_signed_unless_both_regions_and_their_approvers_signed(
    side: Side, tally: Callable[[str, int], None]
) -> None:
    (row,) = rows(grant_leaves(signed_grant(), side), side)
    assert row["signed"] is True and row["purpose"] == signed_grant().terms.purpose
    tried = 0
    for name, leaves in forgeries(side):
        for found in rows(leaves, side):
            # A byte may be changed where nothing is signed (white space, a comment's case): then it is the same row.
            assert "damaged" in name and found["signed"] is True, name
            assert {key: found[key] for key in found if key not in OWN_WORDS} == {
                key: row[key] for key in row if key not in OWN_WORDS
            }, name
        tried += 1
    tally("forged sets of documents", tried)


@pytest.mark.parametrize("side", Side)
def test_what_a_version_1_leaf_claims_is_listed_as_a_claim_and_in_no_legal_field(
    side: Side, tally: Callable[[str, int], None]
) -> None:
    leaf = next(leaf for leaf in grant_leaves(signed_grant(), side) if leaf.header.kind is Kind.GRANT)
    header = msgspec.structs.replace(leaf.header, terms=INVENTED, document=b"", document_sha256=b"")
    (row,) = rows([Leaf(header, b"", 1)], side)
    legal = {
        name: row[name] for name in _NAMES if name not in (*OWN_WORDS, "leaf_index", "signed", "unsigned")
    }
    assert row["signed"] is False and set(legal.values()) == {None}
    assert isinstance(row["unsigned"], list)
    assert "purpose: INVENTED purpose" in row["unsigned"]
    assert f"approvers: {INVENTED.approvers[0]}" in row["unsigned"]
    tally("legal fields left empty", len(legal))
