"""Lineage: source stream → bridge → destination stream, and what becomes of each field on the way.

Fields and what is done to them are those of the grant's terms, never guessed from data, which the logs do not
hold. Where the terms let other fields cross unchanged, one row with the field `*` says so. Keys and headers cross
too, and have rows of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from audit.spark.table import Column, Type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OTHER_FIELDS: Final = "*"
"""Stands for every field that the terms do not name."""

COLUMNS: Final = (
    Column("source_region", Type.TEXT, "From region"),
    Column("stream", Type.TEXT, "Stream"),
    Column("bridge", Type.TEXT, "Bridge"),
    Column("destination_region", Type.TEXT, "To region"),
    Column("destination_stream", Type.TEXT, "Stream at the destination"),
    Column("terms_hash", Type.TEXT, "Terms hash"),
    Column(
        "part",
        Type.TEXT,
        "Part of the record",
        "field (of the payload), payload (where it is not read), key, header",
    ),
    Column("field", Type.TEXT, "Field", "* stands for all fields that the terms do not name"),
    Column(
        "action",
        Type.TEXT,
        "What is done",
        "keep, drop, mask, hash or pseudonymize; mask:4 leaves four characters at the end readable",
    ),
    Column("output", Type.TEXT, "Field at the destination"),
    Column("records", Type.COUNT, "Records crossed"),
)


def fields(transfers: DataFrame) -> DataFrame:
    """One row per transfer of the register that moved records, and field."""
    return transfers.sparkSession.sql(
        f"""
        WITH listed AS (
            SELECT source_region, stream, bridge, destination_region, destination_stream, terms_hash, records,
                   posexplode(concat(
                       transform(coalesce(lineage, array()), r -> named_struct(
                           'part', 'field', 'field', r.field, 'action', r.action, 'output', r.output)),
                       array(named_struct(
                           'part', CASE WHEN format = 'opaque' THEN 'payload' ELSE 'field' END,
                           'field', '{OTHER_FIELDS}',
                           'action', CASE WHEN keep_others THEN 'keep' ELSE 'drop' END,
                           'output', '{OTHER_FIELDS}'
                       )),
                       array(named_struct('part', 'key', 'field', 'key', 'action', key_rule, 'output', 'key')),
                       transform(coalesce(headers, array()), h -> named_struct(
                           'part', 'header', 'field', h, 'action', 'keep', 'output', h)),
                       CASE WHEN trace THEN array(named_struct(
                           'part', 'header', 'field', 'traceparent', 'action', 'keep', 'output', 'traceparent'
                       )) ELSE array() END,
                       array(named_struct(
                           'part', 'header', 'field', '{OTHER_FIELDS}', 'action', 'drop', 'output', '{OTHER_FIELDS}'
                       ))
                   )) AS (place, rule)
            FROM {{transfers}} WHERE terms_found AND (records > 0 OR delivered > 0)
        )
        SELECT source_region, stream, bridge, destination_region, destination_stream, terms_hash, records,
               rule.part AS part, rule.field AS field, rule.action AS action,
               CASE WHEN rule.action = 'drop' THEN NULL ELSE rule.output END AS output
        FROM listed
        ORDER BY source_region, stream, destination_region, destination_stream, bridge, terms_hash, place
        """,  # noqa: S608  # a constant of this module
        transfers=transfers,
    )
