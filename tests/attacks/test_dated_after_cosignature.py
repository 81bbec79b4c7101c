"""When something crossed is the word of who keeps the log, and not later than the first cosignature that covers it. A party that dates leaves later than that, into a grant's
window that has not begun or into another window of a report, is told of by whoever has a cosignature of then: the log's newest, one that it keeps, or one that was remembered.

Tried: each party of a link, in each log that it signs, each kind of leaf that says that something crossed, dated a minute to eight days after the cosignature.
"""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, INGRESS, ORIGINS, WITNESS, world
from attacks.test_one_party_alone import files_of as files_cosigned
from audit_log import STREAM, TIME_MS, log_signer, trust, witness_signer

from audit.checkpoint import Checkpoint
from audit.cosigned_times import SLACK_MS
from audit.leaf import Kind, Leaf
from audit.note import Note, encode_note
from audit.proof import check_proof, prove
from audit.tile import MemoryFiles
from audit.tlog_proof import check_leaf, prove_leaves
from audit.verify import DATED_LATE, Notice, verify_log

COSIGNED_MS = TIME_MS + 3_600_000
"""When the logs are cosigned."""
LATER_MS = (SLACK_MS + 1_000, 3_600_000, 8 * 86_400_000)


def files_of(log: str, leaves: list[Leaf]) -> MemoryFiles:
    return files_cosigned(log, leaves, cosigned_ms=COSIGNED_MS)


def dated(log: str, kind: Kind, time_ms: int) -> list[Leaf]:
    """The world's log, with all its leaves of one kind at this time."""
    return [
        msgspec.structs.replace(leaf, header=msgspec.structs.replace(leaf.header, time_ms=time_ms))
        if leaf.header.kind is kind
        else leaf
        for leaf in dict(world())[log]
    ]


def told(log: str, leaves: list[Leaf], remembered: tuple[bytes, ...] = ()) -> list[Notice]:
    report = verify_log(files_of(log, leaves), trust(), remembered=remembered)
    assert report.findings == [] and report.ok
    return [notice for notice in report.notices if notice.name == DATED_LATE]


@pytest.mark.parametrize("log", [EGRESS, INGRESS])
def test_leaves_that_are_dated_after_the_cosignature_are_told(log: str, tally: Tally) -> None:
    assert told(log, list(dict(world())[log])) == []
    kinds = [Kind.INTENT, Kind.ACK] if log == EGRESS else [Kind.ACK]
    for kind, by_ms in product(kinds, LATER_MS):
        leaves = dated(log, kind, COSIGNED_MS + by_ms)
        late = [at for at, leaf in enumerate(leaves) if leaf.header.kind is kind]
        found = told(log, leaves)
        assert (
            found[0].leaf == late[0]
            and f" {by_ms // 1000:,} s after {WITNESS[log]} cosigned it" in found[0].sentence
        )
        crossed = 0 if (log, kind) == (EGRESS, Kind.ACK) else sum(leaves[at].header.records for at in late)
        assert sum(notice.records for notice in found) == crossed
        tally("leaves dated after a cosignature", len(late))


def note_of(log: str, leaves: list[Leaf], time_s: int) -> bytes:
    """What a witness remembers: the log as it was, cosigned then."""
    whole = files_of(log, leaves).read("checkpoint")
    assert whole is not None
    text = Checkpoint.parse(whole.decode().partition("\n\n")[0] + "\n").text()
    cosigner = witness_signer(f"{WITNESS[log]}.acme/witness")
    return encode_note(Note(text, (log_signer(ORIGINS[log]).sign(text), cosigner.cosign(text, time_s))))


def test_what_was_remembered_shows_it_once_the_log_has_a_later_cosignature(tally: Tally) -> None:
    """A log keeps the newest: to it, and to who has nothing else, all that was dated ahead comes right."""
    leaves = dated(EGRESS, Kind.INTENT, COSIGNED_MS - 60_000)
    assert told(EGRESS, leaves) == []
    found = told(EGRESS, leaves, (note_of(EGRESS, leaves, TIME_MS // 1000),))
    crossed = sum(leaf.header.records for leaf in leaves if leaf.header.kind is Kind.INTENT)
    assert sum(notice.records for notice in found) == crossed and all(
        "3,540 s after eu-west cosigned it" in notice.sentence for notice in found
    )
    tally("remembered cosignatures of before", 1)


def test_a_proof_says_that_it_does_not_show_when(tally: Tally) -> None:
    for kind in (Kind.INTENT, Kind.ACK):
        files = files_of(EGRESS, dated(EGRESS, kind, COSIGNED_MS + 86_400_000))
        proven = check_proof(prove(files, trust(), STREAM, 1, 0), trust())
        assert [each.partition(":")[0] for each in proven.unsupported] == ["when it crossed"]
        leaves = [check_leaf(each, trust()) for each in prove_leaves(files, trust(), STREAM, 1, 0)]
        late = [any(each.startswith("when it crossed") for each in leaf.unsupported) for leaf in leaves]
        assert late == [kind is Kind.INTENT, kind is Kind.ACK]
        tally("proofs of leaves dated after a cosignature", 3)
    honest = files_of(EGRESS, list(dict(world())[EGRESS]))
    assert check_proof(prove(honest, trust(), STREAM, 1, 0), trust()).unsupported == ()
