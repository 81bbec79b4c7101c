"""Exceptions: what was refused, what stayed behind, and what a reader should look at.

Three kinds of severity, because they ask for different answers:

- `breach`   the log shows a crossing that its own terms do not allow, or breaks a rule that every log keeps (steps 7
             and 10 of the verification: `rule-broken`, where nothing above says it better);
- `refused`  a control worked: something was tried and did not happen;
- `notice`   allowed, and worth knowing: wildcards, onward transfers, gaps, revocations, destroyed keys.

Alike events are one row with a count and the leaves of the first and last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from audit.spark.begun_again import BEGUN_AGAIN
from audit.spark.reconciliation import PASSED_BY
from audit.spark.table import COUNT_MAX, Column, Type, pattern_to_regex

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from audit.spark.agreements import Signed

BREACH: Final = "breach"
REFUSED: Final = "refused"
NOTICE: Final = "notice"

COLUMNS: Final = (
    Column("severity", Type.TEXT, "Severity"),
    Column("exception", Type.TEXT, "Exception"),
    Column("source_region", Type.TEXT, "From region"),
    Column("destination_region", Type.TEXT, "To region"),
    Column("stream", Type.TEXT, "Stream"),
    Column("grant_id", Type.TEXT, "Grant"),
    Column("actor", Type.TEXT, "Who", "SPIFFE id"),
    Column("action", Type.TEXT, "What"),
    Column("rule", Type.TEXT, "Rule"),
    Column("code", Type.COUNT, "Code", "docs/errors.md"),
    Column("sentence", Type.TEXT, "In words"),
    Column("events", Type.COUNT, "Events"),
    Column("records", Type.COUNT, "Records"),
    Column("first_time", Type.TIME, "First"),
    Column("last_time", Type.TIME, "Last"),
    Column("log", Type.TEXT, "Log"),
    Column("first_leaf", Type.COUNT, "First leaf"),
    Column("last_leaf", Type.COUNT, "Last leaf"),
)

BROUGHT_MS: Final = 60_000
"""How long the source's word may take to the destination, clocks that differ included; what arrives later arrived against it. A
bridge brings it within seconds, and lets nothing across meanwhile."""

_DENIALS: Final = {
    501: "grant-missing",
    502: "grant-invalid",
    503: "grant-expired",
    504: "grant-not-yet",
    505: "grant-revoked",
    506: "grant-mismatch",
    507: "loop-refused",
    508: "budget-exhausted",
}
"""felix.errors.Code of a DENY leaf to the exception's name; any other code is plainly `denied`."""


def found(leaves: DataFrame, all_leaves: DataFrame, signed: Signed, story: DataFrame) -> DataFrame:
    """The exceptions of the window, each leaf's by itself; what the source forbade and the destination was not told is looked for in the
    source's own log. `all_leaves` and `signed` are of the whole logs: a revocation before
    the window forbids crossings inside it. `story`: what the verification's steps 7 and 10 found in whole logs (log, leaf_index,
    sentence).

    Of version 2, what ends a grant is a revocation that one of its regions signed. Leaves of version 1 have no documents: there
    the log's own word is all there is, and it holds for crossings of version 1 alone, as in the verification.
    """
    denial = "CASE code " + " ".join(f"WHEN {code} THEN '{name}'" for code, name in _DENIALS.items())
    return leaves.sparkSession.sql(
        f"""
        WITH revocations AS (
            SELECT log, grant_id, leaf_index, false AS claimed FROM {{revocations}}
            UNION ALL
            SELECT log, grant_id, leaf_index, true FROM {{all_leaves}} WHERE kind = 'REVOKE' AND version = 1
        ),
        revoked AS (
            SELECT log, grant_id, claimed, min(leaf_index) AS revoked_leaf FROM revocations GROUP BY ALL
        ),
        crossed AS (
            SELECT leaves.*, terms.signed, terms.expires_ms AS ends_ms,
                   terms.not_before_ms AS begins_ms, revoked.revoked_leaf
            FROM {{leaves}} AS leaves
            LEFT JOIN {{terms}} AS terms ON leaves.terms_hash = terms.terms_hash
            LEFT JOIN revoked ON leaves.log = revoked.log AND leaves.grant_id = revoked.grant_id
                AND (leaves.version = 1) = revoked.claimed
            WHERE leaves.kind = 'INTENT' AND leaves.side = 'egress'
        ),
        events AS (
            SELECT '{BREACH}' AS severity, 'crossed-without-terms' AS exception, *,
                   'Records crossed under terms for which no signed, accepted and approved grant stands in these logs.' AS words
            FROM crossed WHERE signed IS NULL
            UNION ALL
            SELECT '{NOTICE}', 'terms-unsigned', *,
                   'Records crossed under terms that leaves of version 1 state: whether anybody signed them is not shown.'
            FROM crossed WHERE NOT signed
            UNION ALL
            SELECT '{BREACH}', 'crossed-after-expiry', *, 'Records crossed after the grant had expired.'
            FROM crossed WHERE ends_ms > 0 AND time_ms >= ends_ms
            UNION ALL
            SELECT '{BREACH}', 'crossed-before-start', *, 'Records crossed before the grant was valid.'
            FROM crossed WHERE time_ms < begins_ms
            UNION ALL
            SELECT '{BREACH}', 'crossed-after-revocation', *,
                   'Records crossed after the log had recorded the revocation of their grant.'
            FROM crossed WHERE leaf_index > revoked_leaf
            UNION ALL
            SELECT '{NOTICE}', 'onward-transfer', *,
                   concat('Records that had been in ', array_join(path, ', '), ' crossed onward.')
            FROM crossed WHERE size(path) > 1
            UNION ALL
            SELECT '{NOTICE}', 'announced-again', *,
                   'Announced, never answered, and announced again under the grant that followed: it had not arrived.'
            FROM crossed WHERE {BEGUN_AGAIN}
        ),
        gathered AS (
            SELECT severity, exception, source_region, destination_region, stream, grant_id,
                   bridge AS actor, CAST(NULL AS STRING) AS action, CAST(NULL AS STRING) AS rule,
                   CAST(NULL AS INT) AS code, words AS sentence, records, time_ms, log, leaf_index
            FROM events
            UNION ALL
            SELECT '{BREACH}', 'rule-broken', leaves.source_region, leaves.destination_region, leaves.stream,
                   leaves.grant_id, coalesce(leaves.bridge, leaves.actor), CAST(NULL AS STRING), CAST(NULL AS STRING),
                   CAST(NULL AS INT), story.sentence, leaves.records, leaves.time_ms, leaves.log, leaves.leaf_index
            FROM {{story}} AS story JOIN {{all_leaves}} AS leaves
                ON story.log = leaves.log AND story.leaf_index = leaves.leaf_index
            LEFT ANTI JOIN (SELECT log, leaf_index FROM events WHERE severity = '{BREACH}') AS told
                ON story.log = told.log AND story.leaf_index = told.leaf_index
            UNION ALL
            SELECT '{BREACH}', concat('arrived-though-', word), leaves.source_region, destination_region, stream, grant_id,
                   bridge, CAST(NULL AS STRING), CAST(NULL AS STRING), CAST(NULL AS INT),
                   concat('Records arrived more than a minute after ', leaves.source_region, ' had ', word,
                       ' it, by its own log: its word had not been brought to the destination.'),
                   records, time_ms, log, leaf_index
            FROM {{leaves}} AS leaves JOIN {{stops}} AS stops ON leaves.source_region = stops.source_region
            WHERE kind = 'ACK' AND side = 'ingress' AND records > 0
                AND time_ms >= from_ms + {BROUGHT_MS} AND (until_ms IS NULL OR time_ms < until_ms - {BROUGHT_MS})
                AND (grant_id = stop_grant OR (stop_grant = '' AND (peer = '' OR peer = destination_region)
                     AND stream RLIKE {pattern_to_regex("streams")}))
            UNION ALL
            SELECT '{REFUSED}', {denial} ELSE 'denied' END, source_region, destination_region, stream, grant_id,
                   actor, action, rule, code, sentence, 0, time_ms, log, leaf_index
            FROM {{leaves}} WHERE kind = 'DENY'
            UNION ALL
            SELECT '{REFUSED}', concat('withheld-', reason), source_region, destination_region, stream, grant_id,
                   bridge, 'cross', rule, code, sentence, records, time_ms, log, leaf_index
            FROM {{leaves}} WHERE kind = 'WITHHELD' AND side = 'egress' AND NOT ({PASSED_BY})
            UNION ALL
            SELECT '{NOTICE}', 'resend', source_region, destination_region, stream, grant_id, actor, action, rule, code,
                   'The source region had records that had stayed cross under this grant.', 0, time_ms, log, leaf_index
            FROM {{leaves}} WHERE kind = 'STANDING' AND action = 'resend'
            UNION ALL
            SELECT '{NOTICE}', concat('gap-', gap), source_region, destination_region, stream, grant_id,
                   bridge, 'read', NULL, code,
                   coalesce(sentence, 'Source offsets could not be read any more, and did not cross.'),
                   last_offset - first_offset + 1, time_ms, log, leaf_index
            FROM {{leaves}} WHERE kind = 'GAP'
            UNION ALL
            SELECT '{NOTICE}', 'grant-ended', source_region, destination_region, stream, grant_id,
                   actor, 'revoke', rule, code, coalesce(sentence, 'A grant was revoked before its time.'), 0,
                   time_ms, log, leaf_index
            FROM {{leaves}} LEFT SEMI JOIN revocations USING (log, leaf_index) WHERE kind = 'REVOKE'
            UNION ALL
            SELECT '{NOTICE}', 'revocation-without-effect', source_region, destination_region, stream, grant_id,
                   actor, 'revoke', rule, code,
                   'As far as this log shows, neither region of the grant signed this revocation: it ends nothing.', 0,
                   time_ms, log, leaf_index
            FROM {{leaves}} LEFT ANTI JOIN revocations USING (log, leaf_index) WHERE kind = 'REVOKE'
            UNION ALL
            SELECT '{NOTICE}', 'key-destroyed', source_region, destination_region, stream, grant_id,
                   actor, action, NULL, code, concat('Key ', key_id, ' was destroyed.'), 0, time_ms, log, leaf_index
            FROM {{leaves}} WHERE kind = 'KEY' AND action = 'destroyed'
            UNION ALL
            SELECT '{NOTICE}', 'wildcard-grant', source_region, destination_region, stream, grant_id,
                   actor, 'grant', NULL, NULL, 'The grant names streams by a pattern, not one by one.', 0,
                   time_ms, log, leaf_index
            FROM {{terms}} WHERE wildcard
            UNION ALL
            SELECT '{NOTICE}', 'onward-allowed', source_region, destination_region, stream, grant_id,
                   actor, 'grant', NULL, NULL, 'The grant lets the destination transfer the records onward.', 0,
                   time_ms, log, leaf_index
            FROM {{terms}} WHERE onward
        )
        SELECT * FROM gathered
        """,  # noqa: S608  # constants of this module
        leaves=leaves,
        all_leaves=all_leaves,
        terms=signed.terms,
        revocations=signed.revocations,
        stops=signed.stops,
        story=story,
    )


def listed(leaves: DataFrame, all_leaves: DataFrame, signed: Signed, story: DataFrame) -> DataFrame:
    """What `found` finds, in order, alike events in one row of `COLUMNS`."""
    gathered = found(leaves, all_leaves, signed, story)
    return leaves.sparkSession.sql(
        f"""
        SELECT severity, exception, source_region, destination_region, stream, grant_id, actor, action, rule, code,
               sentence, count(*) AS events,
               -- Leaves may say that any number is missing: what is more than a column holds is shown as the most that it does.
               coalesce(try_sum(records), CASE WHEN count(records) > 0 THEN {COUNT_MAX} END) AS records, min(time_ms) AS first_time,
               max(time_ms) AS last_time, log, min(leaf_index) AS first_leaf, max(leaf_index) AS last_leaf
        FROM {{gathered}}
        GROUP BY severity, exception, source_region, destination_region, stream, grant_id, actor, action, rule, code,
                 sentence, log
        ORDER BY CASE severity WHEN '{BREACH}' THEN 0 WHEN '{REFUSED}' THEN 1 ELSE 2 END, exception,
                 first_time, log, first_leaf, sentence, stream, actor
        """,  # noqa: S608  # constants of this module
        gathered=gathered,
    )
