"""A proof from a log that has no say: leaves of a crossing, whole and well signed, in a log of somebody else.

Whoever keeps a log may append what he likes to it, and whoever cosigns it sees no leaf. So the destination, which has copies of
all documents and signs receipts, can write the source's INTENT into a log of its own, and a third region can write both ends'.
"""

from __future__ import annotations

import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, INGRESS, REGION, files_of
from audit_log import STREAM, Link, trust

from audit.leaf import Kind, Side
from audit.proof import check_proof, prove
from audit.tlog_proof import check_leaf, prove_leaves
from audit.verify import verify_log
from felix.errors import TamperError


@pytest.mark.parametrize(("log", "side"), [(INGRESS, Side.INGRESS), (REGION, Side.EGRESS)])
def test_only_the_bridges_own_log_proves_what_it_carried(log: str, side: Side, tally: Tally) -> None:
    """The destination alone in its log; and the agent's INTENT is not its region's to say."""
    link = Link()
    intents = link.intent(3)
    own = [leaf for leaf in link.agreement() if leaf.header.kind is Kind.POLICY]
    files = files_of(log, [*own, *link.agreement(side), *intents, link.ack(intents)])
    assert {found.step for found in verify_log(files, trust()).findings} >= {6}
    with pytest.raises(TamperError, match="not that log's to say"):
        check_proof(prove(files, trust(), STREAM, 0, 1), trust())
    proofs = prove_leaves(files, trust(), STREAM, 0, 1)
    assert len(proofs) == 2
    for proof in proofs:
        with pytest.raises(TamperError, match="not that log's to say"):
            check_leaf(proof, trust())
    tally("proofs from a log that has no say", 1 + len(proofs))


def test_the_bridges_own_log_does() -> None:
    link = Link()
    intents = link.intent(3)
    files = files_of(EGRESS, [*link.agreement(), *intents, link.ack(intents)])
    assert check_proof(prove(files, trust(), STREAM, 0, 1), trust()).receipt is not None
    for proof in prove_leaves(files, trust(), STREAM, 0, 1):
        assert any("both regions signed" in each for each in check_leaf(proof, trust()).unsupported)
