"""The state folder that version 0.1 wrote (tests/vectors/version-0.1), laid out anew for a test."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Final

from audit.trust import Trust
from keys.bundle import decode_bundle

FOLDER: Final = Path(__file__).parent / "vectors" / "version-0.1"
HOME: Final = FOLDER / "home.tar.xz"
SHARDS: Final = FOLDER / "shards.tar.xz"
"""Folders of single shards, with what that version read from them."""

EGRESS: Final = "us-east/bridges/us-east-to-eu-west/egress"
US_EAST: Final = "us-east/data/audit"
EU_WEST: Final = "eu-west/data/audit"


def lay_out(folder: Path) -> Path:
    """Unpack it into a new folder, which is returned: the FELIX_HOME of then."""
    home = folder / "home"
    with tarfile.open(HOME) as archive:
        archive.extractall(home, filter="data")
    return home


def trust_of(home: Path) -> Trust:
    """In both regions, by the bundles of then."""
    return Trust.of(
        decode_bundle((home / region / "bundle.json").read_bytes()).bundle
        for region in ("us-east", "eu-west")
    )
