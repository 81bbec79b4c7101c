"""What one grant announced and another one announced again: batches without an answer when the next grant took over.

A bridge that stops between an INTENT and its envelope's receipt goes on, under the same grant, with that very envelope. Under
another grant, whose terms may differ, it cannot: the link begins where the destination stands, and whatever had been announced
from there on had not arrived. The new leaves account for these offsets; the old ones say what was meant to cross, and are counted
nowhere. So it is with what another bridge brought meanwhile, under a grant of its own: a GAP leaf (`elsewhere`) takes its place.

Which leaves these are is the verification's word (`audit.accounting`, for one log at a time): there is no second rule here. Added is
only what one log cannot know: whether another one has an answer to such a batch after all. Then it counts, and is a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from audit.spark.frame import frame_of
from audit.spark.shard_key import SHARD, same

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from audit.verify import Report as VerificationReport

BEGUN_AGAIN: Final = "begun_again"
"""Column: another grant announced the leaf's offsets again, or another bridge brought them, and no log has an answer to its batch. It counts nowhere."""
ANSWERED_YET: Final = "answered_yet"
"""Column: another grant announced the leaf's offsets again, or another bridge brought them, and yet a log has an answer to its batch."""
FOLLOWED: Final = "followed"
"""Column: the INTENT's batch had no ACK when another grant, or another bridge, took over behind it: nobody asks for its receipt any more."""
COVERS: Final = (
    "side = 'egress' AND kind IN ('INTENT', 'WITHHELD', 'GAP') AND first_offset IS NOT NULL "
    "AND NOT (kind = 'GAP' AND gap <=> 'truncation')"
)
"""SQL: the leaf accounts for source offsets. A truncation says of some that were accounted for that the source lost them afterwards."""


def mark(leaves: DataFrame, reports: Sequence[VerificationReport]) -> DataFrame:
    """The leaves, with the columns above. `reports`: what the verification of each log found."""
    again = [
        (report.origin, each.leaf, each.envelope_sha256.hex() or None, True)
        for report in reports
        for each in report.announced_again
    ] + [(report.origin, leaf, None, False) for report in reports for leaf in report.followed]
    if not again:
        return leaves.selectExpr(
            "*", f"false AS {BEGUN_AGAIN}", f"false AS {ANSWERED_YET}", f"false AS {FOLLOWED}"
        )
    spark = leaves.sparkSession
    return spark.sql(
        f"""
        WITH answered AS (SELECT DISTINCT {SHARD}, envelope_sha256 FROM {{leaves}} WHERE kind = 'ACK'),
        placed AS (
            SELECT {", ".join("leaves." + name for name in ("log", "leaf_index", *SHARD.split(", ")))}, told.envelope, told.again
            FROM {{leaves}} AS leaves JOIN {{told}} AS told ON leaves.log = told.log AND leaves.leaf_index = told.leaf_index
        ),
        marked AS (
            SELECT placed.log, placed.leaf_index, bool_or(placed.again AND answered.envelope_sha256 IS NULL) AS {BEGUN_AGAIN},
                   bool_or(placed.again AND answered.envelope_sha256 IS NOT NULL) AS {ANSWERED_YET}, bool_or(NOT placed.again) AS {FOLLOWED}
            FROM placed LEFT JOIN answered
                ON {same("placed", "answered")} AND placed.envelope = answered.envelope_sha256
            GROUP BY placed.log, placed.leaf_index
        )
        SELECT leaves.*, {", ".join(f"coalesce(marked.{name}, false) AS {name}" for name in (BEGUN_AGAIN, ANSWERED_YET, FOLLOWED))}
        FROM {{leaves}} AS leaves
        LEFT JOIN marked ON leaves.log = marked.log AND leaves.leaf_index = marked.leaf_index
        """,  # noqa: S608
        leaves=leaves,
        told=frame_of(spark, again, "log string, leaf_index bigint, envelope string, again boolean"),
    )
