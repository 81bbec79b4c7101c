"""A log's owner alone: a checkpoint that names 2^40 leaves which are not there. A witness cosigns a first checkpoint unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, ORIGINS, MemoryFiles
from audit_log import TIME_MS, log_signer, trust, witness_signer

from audit.checkpoint import Checkpoint
from audit.note import Note, encode_note
from audit.spark.verification import open_log
from audit.tile import tile_path
from audit.verify import MISSING_BUNDLES_MAX, Report, verify_log
from felix.errors import TamperError

ROOT = b"r" * 32
EDGE = {tile_path(5, 0, 1): ROOT}
"""All that the tree of 2^40 leaves has at its right edge: a hash that its owner made up."""


def checkpoint_of(size: int) -> dict[str, bytes]:
    text = Checkpoint(ORIGINS[EGRESS], size, ROOT).text()
    cosigned = witness_signer("eu-west.acme/witness").cosign(text, TIME_MS // 1000)
    return {"checkpoint": encode_note(Note(text, (log_signer(ORIGINS[EGRESS]).sign(text), cosigned)))}


def verify(files: dict[str, bytes], bundles: int) -> Report:
    """Verifies, and stops a verification that goes through more bundles than these."""
    asked: list[int] = []

    def progress(done: int, _: int) -> None:
        asked.append(done)
        assert len(asked) <= bundles, "the verification goes through leaves that are not there"

    return verify_log(MemoryFiles(files), trust(), progress=progress)


@pytest.mark.parametrize("size", [1 << 20, 1 << 40, (1 << 62) + 77])
def test_a_log_whose_end_is_not_there_is_one_finding(size: int) -> None:
    report = verify(checkpoint_of(size), 0)
    [found] = report.findings
    assert not report.ok and found.step == 5 and f"does not reach to the {size} leaves" in found.sentence


def test_what_is_missing_is_not_gone_through_without_end(tmp_path: Path, tally: Tally) -> None:
    """The edge of the tree is there, invented, and has the root that is signed."""
    files = checkpoint_of(1 << 40) | EDGE
    report = verify(files, MISSING_BUNDLES_MAX)
    assert not report.ok and not report.left_off
    assert any(f"leaves from {MISSING_BUNDLES_MAX * 256} on" in found.sentence for found in report.findings)
    tally("checkpoints of leaves that are not there", 1)
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TamperError, match="is missing"):
        open_log(str(tmp_path), trust())
