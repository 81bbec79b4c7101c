"""What names one shard of a stream on its way to one destination stream, in one incarnation: columns that every leaf of it shares."""

from __future__ import annotations

from typing import Final

SHARD_KEY: Final = (
    "source_region",
    "destination_region",
    "bridge",
    "stream",
    "destination_stream",
    "incarnation",
    "shard",
)
SHARD: Final = ", ".join(SHARD_KEY)
ENVELOPE_KEY: Final = (*SHARD_KEY, "envelope_sha256")
"""What names one envelope."""
ENVELOPE: Final = ", ".join(ENVELOPE_KEY)


def same(left: str, right: str, names: tuple[str, ...] = SHARD_KEY) -> str:
    """SQL: whether two rows have the same values there, nulls included."""
    return " AND ".join(f"{left}.{name} <=> {right}.{name}" for name in names)
