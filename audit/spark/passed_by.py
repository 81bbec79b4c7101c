"""What a resend passes by: each of these records must have arrived before it, by the destination's own log.

That a record crossed before is the egress log's word alone: the agent takes it from its own receipts and from what the
destination says, and either may lie. So the offsets that WITHHELD leaves with the reason `crossed-before` list are looked for among
the arrivals of the same shard, under the incarnations that theirs goes on from (`audit.crossed`, with the documents of all logs).

One row for each shard goes to a worker, which reads the leaves again; a set of offsets takes a bit each. Who may call:
`audit.spark.report`, where there are such leaves. Executors import this module by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from audit.crossed import Crossed, OffsetSet
from audit.leaf import iter_entries
from audit.position import ShardName
from audit.spark.comparison import FINDINGS, LeafReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

Derived = Mapping[bytes, tuple[bytes, int | None]]

_NAMES: Final = ("source_region", "destination_region", "stream", "destination_stream", "shard")
"""A shard as the destination has it, over all incarnations and bridges."""
_SHARD: Final = ", ".join(_NAMES)
_PLACE: Final = "array_sort(collect_list(struct(leaf_index, log, entries_sha256, bridge, incarnation)))"


def _missing(
    reader: LeafReader, derived: Derived, row: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], list[int]]]:
    """Each place that passes by records of which nothing says that they arrived, with their offsets."""
    crossed = Crossed()
    for incarnation, (ended, truncated_at) in derived.items():
        crossed.derive(incarnation, ended, truncated_at)
    for place in row["arrived"] or ():
        crossed.take(reader.leaf(place["log"], place["leaf_index"], place["entries_sha256"]))
    known: dict[bytes, OffsetSet] = {}
    for place in row["passed"]:
        leaf = reader.leaf(place["log"], place["leaf_index"], place["entries_sha256"])
        incarnation = leaf.header.incarnation
        if incarnation not in known:
            known[incarnation] = crossed.before(ShardName.of(leaf.header), incarnation)
        missing = [entry.offset for entry in iter_entries(leaf) if entry.offset not in known[incarnation]]
        if missing:
            yield place, missing


def _look(
    logs: Mapping[str, tuple[str, int]], derived: Derived, fields: Any
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        reader = LeafReader(logs)
        for batch in batches:
            for row in batch.to_pylist():
                made = [
                    {
                        **{name: row[name] for name in _NAMES}, "bridge": place["bridge"], "incarnation": place["incarnation"],
                        "status": "differs", "finding": "passed-by-without-arrival", "first_offset": missing[0],
                        "last_offset": missing[-1], "records": len(missing), "egress_leaf": place["leaf_index"],
                        "sentence": "Passed by in a resend as if they had crossed before; the ingress log does not have them.",
                    }
                    for place, missing in _missing(reader, derived, row)
                ]  # fmt: skip
                if made:
                    yield pa.RecordBatch.from_pylist(made, schema=fields)

    return work


def unfounded(
    leaves: DataFrame, passed: DataFrame, logs: Mapping[str, tuple[str, int]], derived: Derived
) -> DataFrame:
    """A finding for each leaf of `passed` with records that did not arrive. `logs` is path and size of each log, by origin."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    places = leaves.sparkSession.sql(
        f"""
        WITH passed AS (SELECT {_SHARD}, {_PLACE} AS passed FROM {{passed}} GROUP BY {_SHARD}),
             arrived AS (
                 SELECT {_SHARD}, {_PLACE} AS arrived FROM {{leaves}}
                 WHERE side = 'ingress' AND kind = 'ACK' AND records > 0 GROUP BY {_SHARD}
             )
        SELECT * FROM passed LEFT JOIN arrived USING ({_SHARD})
        """,  # noqa: S608  # constants
        leaves=leaves,
        passed=passed,
    )
    kind = StructType.fromDDL(FINDINGS)
    assert isinstance(kind, StructType)
    fields = to_arrow_schema(kind, timezone="UTC")
    return places.mapInArrow(_look(dict(logs), dict(derived), fields), FINDINGS)
