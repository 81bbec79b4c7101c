"""How closed segments are looked at for damage, whether somebody reads them or not (region.replication.repairer). Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

SCRUB_RATE_BYTES: Final = 20 << 20
"""A second: a tenth of what a disk reads, and little of a core."""
SCRUB_EVERY_MS: Final = 7 * 24 * 3_600_000
"""Disks lose few bits in a week, and two of them hardly the same ones."""


class Scrub(NamedTuple):
    """Bytes a second, and how often all of them, in ms."""

    rate_bytes: int = SCRUB_RATE_BYTES
    every_ms: int = SCRUB_EVERY_MS
