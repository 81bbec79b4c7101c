"""What one grant announced and another one announced again: batches without an answer when the next grant took over.

A bridge that stops between an INTENT and its envelope's receipt goes on, under the same grant, with that very envelope. Under
another grant, whose terms may differ, it cannot: the link begins where the destination stands, and whatever had been announced
from there on had not arrived. The new leaves account for these offsets; the old ones say what was meant to cross, and are counted
nowhere. `audit.continuity` keeps the same rule for one log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from audit.spark.shard_key import SHARD, same

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BEGUN_AGAIN: Final = "begun_again"
"""Column: the leaf covers offsets from which another grant began later, and no log has an answer to it."""
COVERS: Final = (
    "side = 'egress' AND kind IN ('INTENT', 'WITHHELD', 'GAP') AND first_offset IS NOT NULL "
    "AND NOT (kind = 'GAP' AND gap <=> 'truncation')"
)
"""SQL: the leaf accounts for source offsets. A truncation says of some that were accounted for that the source lost them afterwards."""
FOLLOWED: Final = "followed"
"""Column: another grant took over the leaf's shard later."""


def mark(leaves: DataFrame) -> DataFrame:
    """The leaves, with the columns `begun_again` and `followed`; false for leaves that cover no source offset."""
    later = (
        f"OVER (PARTITION BY {SHARD} ORDER BY leaf_index ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)"
    )
    return leaves.sparkSession.sql(
        f"""
        WITH covering AS (
            SELECT {SHARD}, envelope_sha256, log, leaf_index, first_offset, grant_id,
                   grant_id <> lag(grant_id) OVER (PARTITION BY {SHARD} ORDER BY leaf_index) AS begins
            FROM {{leaves}}
            WHERE {COVERS}
        ),
        judged AS (
            SELECT *, min(CASE WHEN begins THEN first_offset END) {later} AS next_begins FROM covering
        ),
        answered AS (SELECT DISTINCT {SHARD}, envelope_sha256 FROM {{leaves}} WHERE kind = 'ACK'),
        marked AS (
            SELECT judged.log, judged.leaf_index,
                   judged.next_begins <= judged.first_offset AND answered.envelope_sha256 IS NULL AS {BEGUN_AGAIN},
                   true AS {FOLLOWED}
            FROM judged LEFT JOIN answered
                ON {same("judged", "answered")} AND judged.envelope_sha256 = answered.envelope_sha256
            WHERE judged.next_begins IS NOT NULL
        )
        SELECT leaves.*, coalesce(marked.{BEGUN_AGAIN}, false) AS {BEGUN_AGAIN}, coalesce(marked.{FOLLOWED}, false) AS {FOLLOWED}
        FROM {{leaves}} AS leaves
        LEFT JOIN marked ON leaves.log = marked.log AND leaves.leaf_index = marked.leaf_index
        """,  # noqa: S608
        leaves=leaves,
    )
