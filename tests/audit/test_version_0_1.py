"""Logs and proofs that version 0.1 wrote still verify, and whoever changes one is still found."""

from __future__ import annotations

from pathlib import Path

import pytest
from version_0_1 import EGRESS, EU_WEST, US_EAST, lay_out, trust_of

from audit.proof import check_proof
from audit.tile_disk import Folder
from audit.trust import Trust
from audit.verify import verify_log
from felix.errors import TamperError
from keys.bundle import decode_bundle


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return lay_out(tmp_path)


@pytest.mark.parametrize(
    ("log", "origin", "leaves"),
    [
        (EGRESS, "us-east.acme/bridge/us-east-to-eu-west", 18),
        (US_EAST, "us-east.acme/audit", 4),
        (EU_WEST, "eu-west.acme/audit", 8),
    ],
)
def test_a_log_of_version_0_1_verifies(home: Path, log: str, origin: str, leaves: int) -> None:
    report = verify_log(Folder(home / log), trust_of(home), origin=origin, cosignatures_min=1)
    assert report.findings == []
    assert report.size == leaves
    assert report.cosigned_size == leaves


@pytest.mark.parametrize("log", [EGRESS, US_EAST, EU_WEST])
def test_every_changed_byte_of_a_bundle_of_version_0_1_is_found(home: Path, log: str) -> None:
    trust, folder = trust_of(home), home / log
    bundles = sorted((folder / "tile" / "entries").glob("*.p/*"), key=lambda path: int(path.name))
    widest = bundles[-1]
    whole = widest.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        widest.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        assert verify_log(Folder(folder), trust).findings, f"byte {at} of {len(whole)} was changed unnoticed"
    widest.write_bytes(whole)
    assert not verify_log(Folder(folder), trust).findings


def test_a_proof_of_version_0_1_is_read_and_holds(home: Path) -> None:
    proven = check_proof((home / "record.proof.json").read_bytes(), trust_of(home), cosignatures_min=1)
    assert (proven.stream, proven.shard, proven.offset) == ("acme/ops/departures", 0, 17)
    assert proven.receipt is not None
    assert proven.receipt.destination_region == "eu-west"


def test_a_proof_of_version_0_1_needs_the_keys_of_the_destination(home: Path) -> None:
    source_alone = Trust.of([decode_bundle((home / "us-east" / "bundle.json").read_bytes()).bundle])
    with pytest.raises(TamperError):
        check_proof((home / "record.proof.json").read_bytes(), source_alone, cosignatures_min=0)
