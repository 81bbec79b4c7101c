"""Two terms of one grant id, which whoever draws them up can find with 2^40 hashes. The first ones stand: nobody's log is wrong for what
was on its way under them, and no broker takes the others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
from attacks.test_half_signed_again import crossing
from audit_log import EGRESS_ORIGIN, INGRESS_ORIGIN, TIME_MS, trust
from bridge_mesh import two_regions
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from signed_grants import (
    grant_leaves,
    make_terms,
    opened_policy,
    paper_leaf,
    policy_document,
    signed_grant,
    signing_key,
)

from audit.agreement import read_agreements
from audit.leaf import Side
from audit.origin import Origin
from bridge.said import Said
from felix.errors import Code, RequestError
from keys.signing import SigningKey
from policy.grant import GrantBook, open_export, sign_export
from policy.signed import SignedDocument

Tally = Callable[[str, int], None]


@pytest.fixture
def one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every grant has the same id."""
    for module in ("policy.terms", "policy.grant_documents", "policy.approval"):
        monkeypatch.setattr(f"{module}.grant_id", lambda terms_hash: "g-" + "a" * 16)


@pytest.mark.parametrize("side", list(Side))
def test_other_terms_of_the_same_id_change_no_log(one_id: None, side: Side, tally: Tally) -> None:
    first, other = (signed_grant.__wrapped__(purpose=purpose) for purpose in ("operations", "something else"))
    assert first.grant == other.grant and first.terms.hash() != other.terms.hash()
    own = Origin.parse(EGRESS_ORIGIN if side is Side.EGRESS else INGRESS_ORIGIN)
    leaves = [*grant_leaves(first, side), paper_leaf(other.export, other, side, TIME_MS + 1)]
    found, problems = read_agreements(trust(), own, enumerate(leaves), lambda header: header.document)
    assert problems == []
    assert found.judge(crossing(first, side, TIME_MS + 2)) == []
    agreed = found.agreement(first.grant)
    assert agreed is not None and agreed.terms == first.terms
    assert found.judge(crossing(other, side, TIME_MS + 3)), "under the others nothing may stand"
    tally("terms of one id", 1)


def export_of(purpose: str, at: int, key: Ed25519PrivateKey | None = None) -> SignedDocument:
    policy = opened_policy(policy_document("us-east"))
    return sign_export(make_terms(purpose=purpose), policy, key or signing_key("us-east"), at)


def test_a_book_goes_by_the_terms_that_were_signed_first(one_id: None, tally: Tally) -> None:
    """In whatever order they come; of these terms by the export that was signed last."""
    documents = [
        export_of(*each) for each in (("one", TIME_MS), ("other", TIME_MS + 1), ("one", TIME_MS + 2))
    ]
    for exports in permutations(documents):
        book = GrantBook(exports, trust().policy_keys, trust().anchors)
        (grant,) = book.grants()
        assert book.half(grant) == open_export(documents[2], trust().policy_keys)
    tally("terms of one id", 6)


@pytest.mark.parametrize("key", ["one key", "another key"])
def test_an_agent_goes_by_the_terms_that_its_log_has(one_id: None, key: str, tally: Tally) -> None:
    """However early the source dates the others, and though it lists these alone, or signs them with another key."""
    new = None if key == "one key" else SigningKey.generate().private_key
    first, other, again = (
        export_of(*each) for each in (("one", TIME_MS), ("other", 0, new), ("one", TIME_MS + 1, new))
    )
    said = Said()
    for document in (first, other, again):
        said.take(document)
        assert [said.refuses(each) for each in (first, other, again)] == [False, True, False]
    tally("terms of one id", 3)


async def test_no_broker_takes_other_terms_of_the_same_id(one_id: None, tmp_path: Path, tally: Tally) -> None:
    async with two_regions(tmp_path) as mesh:
        _, first, _ = mesh.sign_grant()
        body, other, accepted = mesh.sign_grant(purpose="something else")
        for region in ("us-east", "eu-west"):
            await mesh.put(region, "export", first)
            before = mesh.documents(region, "export")
            for kind, half in (("export", other), ("import", accepted)):
                with pytest.raises(RequestError) as refused:
                    await mesh.put(region, kind, half)
                assert refused.value.code in (Code.CONFLICT, Code.GRANT_MISMATCH)
            assert mesh.documents(region, "export") == before
            assert body.grant in mesh.nodes[region].services.governance.book.grants()
    tally("terms of one id", 2)
