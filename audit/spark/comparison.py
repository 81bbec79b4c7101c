"""Two sides of one envelope, record by record: what only one of them has, and what differs.

For envelopes that their digests do not show to be alike (`audit.spark.reconciliation`). A row that says where their
leaves stand goes to a worker, the worker reads these leaves from the logs' files, and only what differs comes back:
record entries never travel through Spark. Each leaf that is read again must be the one that was verified, by the
the hash of its bundle; a log that changes while a report is made ends the report.

Who may call: `audit.spark.report`. Executors import this module by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from audit.bundle_roots import BundleRoots
from audit.leaf import Leaf, decode_leaf
from audit.merkle import TILE_WIDTH
from audit.spark.files import open_files
from audit.tile import Files
from audit.unjudged import Unjudged
from felix.bounded import BoundedMap
from felix.errors import FelixError, TamperError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

BUNDLES_KEPT: Final = 4
"""Entry bundles in a worker's memory, some 16 MB each at most: envelopes come in order, so neighbours share them."""
TASKS_PER_CORE: Final = 4
"""Parts of the work: several per core, so that one long part does not keep the others waiting."""

_ENTRY: Final = Struct(">QqI32s16s")
FINDINGS: Final = (
    "status string, finding string, source_region string, destination_region string, bridge string, stream string, "
    "destination_stream string, incarnation string, shard bigint, first_offset bigint, last_offset bigint, records bigint, egress_leaf bigint, "
    "ingress_leaf bigint, envelope_sha256 string, sentence string"
)
"""Columns of the rows that workers make (`reconciliation.FINDING_COLUMNS`)."""
_WORDS: Final = {
    "record-not-delivered": "Announced in the egress log; not in the ingress log.",
    "record-not-announced": "In the ingress log; never announced in the egress log.",
    "commitment-differs": "The two logs commit to different contents for this record.",
}

Entries = dict[int, tuple[bytes, int]]
"""By source offset: the packed entry, and the index of its leaf."""


def unlike_records(
    egress: Mapping[int, tuple[bytes, int]], ingress: Mapping[int, tuple[bytes, int]]
) -> Iterator[tuple[str, int, int | None, int | None]]:
    """(finding, offset, egress leaf, ingress leaf) for each record that is not the same on both sides, by offset."""
    for offset in sorted(egress.keys() | ingress.keys()):
        sent, got = egress.get(offset), ingress.get(offset)
        if sent is None:
            assert got is not None
            yield "record-not-announced", offset, None, got[1]
        elif got is None:
            yield "record-not-delivered", offset, sent[1], None
        elif sent[0] != got[0]:
            yield "commitment-differs", offset, sent[1], got[1]


class LeafReader:
    """Reads leaves of verified logs again. `logs`: path and bundles of each, by origin."""

    def __init__(self, logs: Mapping[str, tuple[str, BundleRoots]]) -> None:
        self._logs = logs
        self._files: dict[str, Files] = {}
        self._bundles: BoundedMap[tuple[str, int], list[memoryview]] = BoundedMap(BUNDLES_KEPT)

    def leaf(self, log: str, index: int, entries_sha256: str | None) -> Leaf:
        """A leaf. Raises TamperError where it is not the one that was verified, or its entries are not those with this SHA-256 (in hex)."""
        path, bundles = self._logs[log]
        key = log, index // TILE_WIDTH
        bundle = self._bundles.use(key)
        if bundle is None:
            files = self._files.setdefault(log, open_files(path))
            bundle = bundles.read_bundle(files, key[1])
            self._bundles.put(key, bundle)
        leaf = decode_leaf(bundle[index % TILE_WIDTH])
        if (sha256(leaf.entries).hexdigest() if leaf.entries else None) != entries_sha256:
            raise TamperError(f"Leaf {index} of {log} changed while the report was made.")
        return leaf


def _listed(reader: LeafReader, places: Iterable[Mapping[str, Any]], side: str) -> Entries:
    found: Entries = {}
    for place in places:
        if place["side"] == side:
            index = place["leaf_index"]
            leaf = reader.leaf(place["log"], index, place["entries_sha256"])
            for fields in _ENTRY.iter_unpack(leaf.entries):
                # An envelope that stands in a log twice is a finding of its own.
                found.setdefault(fields[0], (_ENTRY.pack(*fields), index))
    return found


def not_judged(unjudged: Unjudged, error: Exception, what: str) -> dict[str, Any]:
    """Of a finding's fields those that say so."""
    return {"finding": "not-judged", "sentence": unjudged.sentence(error, what)}


def _compare(
    logs: Mapping[str, tuple[str, BundleRoots]], fields: Any
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        reader, unjudged = LeafReader(logs), Unjudged("comparing records")
        for batch in batches:
            for row in batch.to_pylist():
                place = {name: row[name] for name in fields.names if name in row} | {"status": "differs"}
                try:
                    sides = (_listed(reader, row["places"], side) for side in ("egress", "ingress"))
                    made = [
                        {
                            **place, "finding": finding, "first_offset": offset, "last_offset": offset,
                            "records": 1, "egress_leaf": sent, "ingress_leaf": got, "sentence": _WORDS[finding],
                        }
                        for finding, offset, sent, got in unlike_records(*sides)
                    ]  # fmt: skip
                except (FelixError, OSError):
                    raise
                except Exception as error:
                    made = [{**place, **not_judged(unjudged, error, "An envelope")}]
                if made:
                    yield pa.RecordBatch.from_pylist(made, schema=fields)

    return work


def compare_records(places: DataFrame, logs: Mapping[str, tuple[str, BundleRoots]]) -> DataFrame:
    """A finding for each record of these envelopes that differs. `places` is `reconciliation.places(…)`; `logs` is path
    and bundles of each log, by origin."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    # Given explicitly: Spark would make one task of what looks small, and is a great deal of reading.
    parts = max(1, places.sparkSession.sparkContext.defaultParallelism) * TASKS_PER_CORE
    spread = places.repartitionByRange(parts, "first_leaf").sortWithinPartitions("first_leaf")
    kind = StructType.fromDDL(FINDINGS)
    assert isinstance(kind, StructType)
    fields = to_arrow_schema(kind, timezone="UTC")
    return spread.mapInArrow(_compare(dict(logs), fields), FINDINGS)
