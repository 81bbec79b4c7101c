"""The transfer register: one row per link, stream and terms.

What lives here: the Spark queries for the register. Invariant: a legal field (purpose, basis, article, reference,
categories, entities, countries, approvers, acceptance) is what the regions signed, verified (`audit.spark.agreements`), or it is
empty. Nothing is inferred, and nothing is a leaf's own word.

Who may call: `audit.spark.report`, notebooks. Input everywhere: the `leaves` of `prepare` and the `terms` of
`audit.spark.agreements.read_signed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from audit.spark.begun_again import BEGUN_AGAIN
from audit.spark.reconciliation import PASSED_BY
from audit.spark.table import Column, Type, pattern_to_regex, total

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PLACE_FIELDS: Final = (
    "terms_hash", "grant_id", "source_region", "destination_region", "stream", "actor", "time_ms", "log", "leaf_index",
)  # fmt: skip
"""Where the terms were stated: the GRANT leaf of the log that they were read from."""

COLUMNS: Final = (
    Column("source_region", Type.TEXT, "From region"),
    Column("source_country", Type.TEXT, "From country", "as the signed policy says"),
    Column("source_jurisdiction", Type.TEXT, "From jurisdiction", "as the signed policy says"),
    Column("destination_region", Type.TEXT, "To region"),
    Column("destination_country", Type.TEXT, "To country", "as the signed policy says"),
    Column("destination_jurisdiction", Type.TEXT, "To jurisdiction", "as the signed policy says"),
    Column("exporter", Type.TEXT, "Exporter"),
    Column("importer", Type.TEXT, "Importer"),
    Column("bridge", Type.TEXT, "Bridge", "the SPIFFE id of the agent"),
    Column("stream", Type.TEXT, "Stream"),
    Column("destination_stream", Type.TEXT, "Stream at the destination"),
    Column("purpose", Type.TEXT, "Purpose"),
    Column("basis", Type.TEXT, "Legal basis"),
    Column("article", Type.TEXT, "Article"),
    Column("mechanism", Type.TEXT, "Mechanism", "which clauses, decision or derogation exactly"),
    Column("reference", Type.TEXT, "Reference"),
    Column("assessment", Type.TEXT, "Transfer assessment"),
    Column("categories", Type.LIST, "Data categories"),
    Column("data_subjects", Type.LIST, "Data subjects"),
    Column("owner", Type.TEXT, "Owner"),
    Column("drawn_up_by", Type.TEXT, "Drawn up by"),
    Column("approvers", Type.LIST, "Approvers", "whose signatures over the terms hold, of both regions"),
    Column("accepted_by", Type.TEXT, "Accepted by"),
    Column("grant_ids", Type.LIST, "Grants", "export and import grant"),
    Column("terms_hash", Type.TEXT, "Terms hash"),
    Column(
        "terms_found",
        Type.FLAG,
        "Terms found",
        "true where signed documents with this hash stand in the logs, and hold",
    ),
    Column("unsigned", Type.LIST, "Claims that nobody signed", "what leaves of version 1 say of the terms"),
    Column(
        "version_1", Type.FLAG, "In leaves of version 1", "of Felix 0.1: for their terms nobody had to sign"
    ),
    Column("not_before", Type.TIME, "Valid from"),
    Column("expires", Type.TIME, "Valid until"),
    Column("filter", Type.TEXT, "Filter"),
    Column("format", Type.TEXT, "Format", "json: fields as the lineage says; opaque: payloads cross unread"),
    Column("key_rule", Type.TEXT, "Record key"),
    Column("headers", Type.LIST, "Headers that cross"),
    Column("trace", Type.FLAG, "Trace context crosses"),
    Column("wildcard", Type.FLAG, "Wildcard"),
    Column(
        "onward",
        Type.FLAG,
        "Records of third regions may cross",
        "which the source had from them; what the destination does with these records its own grants say",
    ),
    Column("budget_bytes", Type.COUNT, "Budget, bytes", "that may cross altogether; 0: any number"),
    Column("rate_bytes_per_second", Type.COUNT, "Rate, bytes per second", "0: any number"),
    Column("policy_versions", Type.LIST, "Policy versions"),
    Column("policy_hashes", Type.LIST, "Policy hashes"),
    Column("first_time", Type.TIME, "First crossing", "or arrival, where the egress log is not here"),
    Column("last_time", Type.TIME, "Last crossing", "or arrival, where the egress log is not here"),
    Column("records", Type.COUNT, "Records crossed", "from INTENT leaves; each record has exactly one"),
    Column("record_bytes", Type.COUNT, "Bytes crossed: keys, headers and payloads"),
    Column("acknowledged", Type.COUNT, "Records with a receipt", "from egress ACK leaves"),
    Column("delivered", Type.COUNT, "Records delivered", "from ingress ACK leaves"),
    Column("withheld", Type.COUNT, "Records withheld"),
    Column(
        "unanswered",
        Type.COUNT,
        "Records announced, not answered",
        "under these terms, and again under those that followed or by another bridge: whether they had arrived nobody signed",
    ),
    Column("unanswered_bytes", Type.COUNT, "Bytes announced, not answered"),
    Column("denied", Type.COUNT, "Attempts denied"),
    Column("offsets", Type.LIST, "Source offsets", "incarnation/shard:first-last"),
    Column("source_key_ids", Type.LIST, "Source keys"),
    Column("destination_key_ids", Type.LIST, "Destination keys"),
    Column("commitment_key_ids", Type.LIST, "Commitment keys"),
    Column("egress_log", Type.TEXT, "Egress log"),
    Column("egress_leaves", Type.TEXT, "Egress leaves", "first-last index"),
    Column("egress_checkpoint", Type.TEXT, "Egress checkpoint", "size and root"),
    Column(
        "egress_cosigners",
        Type.LIST,
        "Egress cosigners",
        "and up to where, if not to the last of these leaves",
    ),
    Column("ingress_log", Type.TEXT, "Ingress log"),
    Column("ingress_leaves", Type.TEXT, "Ingress leaves", "first-last index"),
    Column("ingress_checkpoint", Type.TEXT, "Ingress checkpoint", "size and root"),
    Column(
        "ingress_cosigners",
        Type.LIST,
        "Ingress cosigners",
        "and up to where, if not to the last of these leaves",
    ),
    Column("verification", Type.TEXT, "Verification"),
    Column("reconciliation", Type.TEXT, "Reconciliation"),
)


WORTH: Final = (
    "NOT terms_found",
    "source_region",
    "destination_region",
    "stream",
    "first_seen",
    "bridge",
    "terms_hash",
)
"""The order of what a report lists of a register that is too long: transfers under signed terms first."""


def prepare(leaves: DataFrame, terms: DataFrame) -> DataFrame:
    """The leaves as the reports read them: where a leaf names a grant and no terms, the terms hash of that grant by its signed
    documents (`terms`, of `read_signed`); of version 1, what its own link's leaves claim.

    A DENY leaf names the grant that was *claimed*. It gets the grant's terms only where the grant is for its stream:
    whoever is refused must not lend the attempt the legal basis of something else."""
    fits = "leaves.kind <> 'DENY' OR leaves.stream RLIKE {}.streams"
    return leaves.sparkSession.sql(
        f"""
        WITH signed AS (
            SELECT grant_id, min(terms_hash) AS known, min({pattern_to_regex("stream")}) AS streams
            -- An id is 80 bits of the hash: of two terms with one id it is not known which is meant.
            FROM {{terms}} WHERE signed GROUP BY grant_id HAVING count(*) = 1
        ),
        claimed AS (
            SELECT grant_id, source_region, destination_region, min(terms_hash) AS known, min({pattern_to_regex("stream")}) AS streams
            FROM {{terms}} WHERE NOT signed GROUP BY grant_id, source_region, destination_region HAVING count(*) = 1
        )
        SELECT leaves.* EXCEPT (terms_hash),
               coalesce(
                   leaves.terms_hash,
                   CASE WHEN {fits.format("signed")} THEN signed.known END,
                   CASE WHEN {fits.format("claimed")} THEN claimed.known END
               ) AS terms_hash
        FROM {{leaves}} AS leaves
        LEFT JOIN signed ON leaves.version > 1 AND leaves.grant_id = signed.grant_id
        LEFT JOIN claimed ON leaves.version = 1 AND leaves.grant_id = claimed.grant_id
            AND leaves.source_region = claimed.source_region AND leaves.destination_region = claimed.destination_region
        """,  # noqa: S608  # columns' names
        leaves=leaves,
        terms=terms,
    )


def within(leaves: DataFrame, since_ms: int | None, until_ms: int | None) -> DataFrame:
    """The leaves made at `since_ms` or later and before `until_ms`."""
    if since_ms is not None:
        leaves = leaves.where(f"time_ms >= {int(since_ms)}")
    if until_ms is not None:
        leaves = leaves.where(f"time_ms < {int(until_ms)}")
    return leaves


def transfers(leaves: DataFrame, terms: DataFrame) -> DataFrame:
    """The register's rows, but for what is known of whole logs (checkpoints, cosigners, verification): one for each
    link and terms under which records crossed, arrived or were withheld, and from when to when there was any of it (`first_seen`,
    `last_seen`). What was only denied is no transfer, and
    stands among the exceptions.

    `leaves` are those of the window, `terms` those of the whole logs: a grant made before the window rules
    crossings inside it.
    """
    return leaves.sparkSession.sql(
        f"""
        WITH said AS (
            -- A region's own log names who was refused, and no bridge: it is the same one where the actor carries.
            SELECT * EXCEPT (bridge), CASE WHEN kind = 'DENY' THEN coalesce(bridge, actor) ELSE bridge END AS bridge,
                      kind = 'INTENT' AND side = 'egress' AND NOT {BEGUN_AGAIN} AS is_intent,
                      kind = 'WITHHELD' AND side = 'egress' AND NOT ({PASSED_BY}) AND NOT {BEGUN_AGAIN} AS is_withheld,
                      kind = 'INTENT' AND side = 'egress' AND {BEGUN_AGAIN} AS is_unanswered,
                      kind = 'ACK' AND side = 'egress' AS is_receipt,
                      kind = 'ACK' AND side = 'ingress' AS is_arrival,
                      kind = 'DENY' AS is_denial
            FROM {{leaves}} WHERE kind IN ('INTENT', 'WITHHELD', 'ACK', 'DENY')
        ),
        ranges AS (
            SELECT source_region, destination_region, bridge, stream, terms_hash, incarnation, shard,
                   min(first_offset) AS first_offset, max(last_offset) AS last_offset
            FROM said WHERE is_intent OR is_withheld OR is_arrival GROUP BY ALL
        ),
        offsets AS (
            SELECT source_region, destination_region, bridge, stream, terms_hash,
                   transform(
                       array_sort(collect_list(struct(incarnation, shard, first_offset, last_offset))),
                       r -> concat(left(r.incarnation, 8), '/', r.shard, ':', r.first_offset, '-', r.last_offset)
                   ) AS offsets
            FROM ranges GROUP BY ALL
        ),
        sums AS (
            SELECT source_region, destination_region, bridge, stream, terms_hash,
                   max(destination_stream) FILTER (WHERE NOT is_denial) AS destination_stream,
                   array_sort(collect_set(destination_stream) FILTER (WHERE NOT is_denial)) AS destination_streams,
                   array_sort(collect_set(grant_id)) AS grant_ids,
                   array_sort(collect_set(policy_version)) AS versions,
                   array_sort(collect_set(policy_hash)) AS policy_hashes,
                   -- Only what has records crossed: an empty envelope moves a position on, and nothing else.
                   coalesce(
                       min(time_ms) FILTER (WHERE is_intent AND records > 0),
                       min(time_ms) FILTER (WHERE is_arrival AND records > 0),
                       min(time_ms) FILTER (WHERE is_receipt AND records > 0)
                   ) AS first_time,
                   coalesce(
                       max(time_ms) FILTER (WHERE is_intent AND records > 0),
                       max(time_ms) FILTER (WHERE is_arrival AND records > 0),
                       max(time_ms) FILTER (WHERE is_receipt AND records > 0)
                   ) AS last_time,
                   coalesce(
                       min(time_ms) FILTER (WHERE is_intent OR is_withheld), min(time_ms) FILTER (WHERE is_arrival),
                       min(time_ms) FILTER (WHERE is_receipt)
                   ) AS first_seen,
                   coalesce(
                       max(time_ms) FILTER (WHERE is_intent OR is_withheld), max(time_ms) FILTER (WHERE is_arrival),
                       max(time_ms) FILTER (WHERE is_receipt)
                   ) AS last_seen,
                   coalesce(sum(records) FILTER (WHERE is_intent), 0) AS records,
                   coalesce(sum(record_bytes) FILTER (WHERE is_intent), 0) AS record_bytes,
                   {total("records", "is_receipt")} AS acknowledged,
                   coalesce(sum(records) FILTER (WHERE is_arrival), 0) AS delivered,
                   coalesce(sum(records) FILTER (WHERE is_withheld), 0) AS withheld,
                   coalesce(sum(records) FILTER (WHERE is_unanswered), 0) AS unanswered,
                   coalesce(sum(record_bytes) FILTER (WHERE is_unanswered), 0) AS unanswered_bytes,
                   count(*) FILTER (WHERE is_denial) AS denied,
                   bool_or(version = 1 AND NOT is_denial) AS version_1,
                   array_sort(collect_set(source_key_id)) AS source_key_ids,
                   array_sort(collect_set(destination_key_id)) AS destination_key_ids,
                   array_sort(collect_set(commitment_key_id)) AS commitment_key_ids
            FROM said GROUP BY source_region, destination_region, bridge, stream, terms_hash
            HAVING count_if(NOT is_denial) > 0
        ),
        -- A region's own log may hold denials of the same link; the log of the crossings goes before it.
        spans AS (
            SELECT source_region, destination_region, bridge, stream, terms_hash, side,
                   struct(min(is_denial) AS only_denials, log, min(leaf_index) AS first, max(leaf_index) AS last) AS span
            FROM said GROUP BY source_region, destination_region, bridge, stream, terms_hash, side, log
        ),
        places AS (
            SELECT source_region, destination_region, bridge, stream, terms_hash,
                   min(span) FILTER (WHERE side = 'egress') AS egress,
                   min(span) FILTER (WHERE side = 'ingress') AS ingress
            FROM spans GROUP BY source_region, destination_region, bridge, stream, terms_hash
        )
        SELECT sums.*,
               places.egress.log AS egress_log, places.egress.first AS egress_first_leaf,
               places.egress.last AS egress_last_leaf,
               places.ingress.log AS ingress_log, places.ingress.first AS ingress_first_leaf,
               places.ingress.last AS ingress_last_leaf,
               coalesce(offsets.offsets, array()) AS offsets,
               transform(sums.versions, v -> cast(v AS string)) AS policy_versions,
               coalesce(terms.signed, false) AS terms_found,
               terms.* EXCEPT ({", ".join(PLACE_FIELDS)}, signed)
        FROM sums
        LEFT JOIN offsets ON sums.source_region = offsets.source_region
            AND sums.destination_region = offsets.destination_region
            AND sums.bridge <=> offsets.bridge AND sums.stream <=> offsets.stream
            AND sums.terms_hash <=> offsets.terms_hash
        JOIN places ON sums.source_region = places.source_region
            AND sums.destination_region = places.destination_region
            AND sums.bridge <=> places.bridge AND sums.stream <=> places.stream
            AND sums.terms_hash <=> places.terms_hash
        LEFT JOIN {{terms}} AS terms ON sums.terms_hash = terms.terms_hash
            AND sums.source_region = terms.source_region AND sums.destination_region = terms.destination_region
        ORDER BY sums.source_region, sums.destination_region, sums.stream, first_seen, sums.bridge, sums.terms_hash
        """,  # noqa: S608  # names of columns, from this module
        leaves=leaves,
        terms=terms,
    )
