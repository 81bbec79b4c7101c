"""What an egress log says that the destination had before: its own log must have it.

Two kinds of leaves take the destination's word, and a destination may lie, or the agent that writes them:

- WITHHELD with the reason `crossed-before`: a resend passes these records by. Each of them must have arrived under an incarnation
  that theirs goes on from (`audit.crossed`, with the documents of all logs);
- GAP of the kind `elsewhere`: another bridge brought these offsets. Arrivals under the same incarnation must cover them; of those of the
  bridge that says so, under whichever grant, only the records that they list count: an empty envelope of its own says nothing of
  what others brought.

One row for each shard goes to a worker, which reads the leaves again; a set of offsets takes a bit each. Who may call:
`audit.spark.report`, where there are such leaves. Executors import this module by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from audit.bundle_roots import BundleRoots
from audit.crossed import Crossed, Derived
from audit.leaf import Kind, Leaf, iter_entries
from audit.spark.comparison import FINDINGS, LeafReader, not_judged
from audit.unjudged import Unjudged
from felix.errors import FelixError
from felix.ranges import RangeSet

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_NAMES: Final = ("source_region", "destination_region", "stream", "destination_stream", "shard")
"""A shard as the destination has it, over all incarnations and bridges."""
_SHARD: Final = ", ".join(_NAMES)
_WORDS: Final = {
    "passed-by": "Passed by in a resend as if they had crossed before; the ingress log",
    "elsewhere": "Left out as if another bridge had brought them; the ingress log",
}


class _Arrived:
    """What the ingress log has of one shard."""

    def __init__(
        self, derived: Mapping[bytes, Derived], ends: Collection[str], bridges: Collection[str]
    ) -> None:
        """`ends`: the shard's two regions. Nobody else says where it goes on. `bridges`: those that say that others brought records."""
        self._crossed = Crossed()
        for incarnation, found in derived.items():
            if found.by in ends:
                self._crossed.derive(incarnation, *found)
        self._bridges = frozenset(bridges)
        self._brought: defaultdict[bytes, defaultdict[str, RangeSet]] = defaultdict(
            lambda: defaultdict(RangeSet)
        )
        """by incarnation, and by the bridge"""
        self._listed: defaultdict[bytes, RangeSet] = defaultdict(RangeSet)
        """the records that arrived through one of `bridges`"""

    def take(self, leaf: Leaf) -> None:
        """Its next ACK leaf."""
        self._crossed.take(leaf)
        header = leaf.header
        first, following = _range(leaf)
        self._brought[header.incarnation][header.bridge].add(first, following)
        if header.bridge not in self._bridges:
            return
        listed = self._listed[header.incarnation]
        if header.records == following - first:
            listed.add(first, following)
        else:
            for entry in iter_entries(leaf):
                listed.add(entry.offset, entry.offset + 1)

    def lacks(self, leaf: Leaf) -> list[tuple[int, int]]:
        """Which of the offsets that an egress leaf is about did not arrive: ranges, both ends included."""
        header = leaf.header
        if header.kind is not Kind.GAP:
            return [(offset, offset) for offset in self._crossed.lacks(leaf)]
        brought = self._brought[header.incarnation]
        counting = [found for bridge, found in brought.items() if bridge != header.bridge]
        missing = [_range(leaf)]
        for found in (*counting, self._listed[header.incarnation]):
            missing = [lacking for each in missing for lacking in found.missing(*each)]
        return [(first, following - 1) for first, following in missing]


def _range(leaf: Leaf) -> tuple[int, int]:
    """The offsets that a leaf is about: the first, and the one after the last."""
    first, last = leaf.header.first_offset, leaf.header.last_offset
    assert first is not None and last is not None
    return first, last + 1


def _missing(
    reader: LeafReader, derived: Mapping[bytes, Derived], row: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], list[tuple[int, int]]]]:
    """Each place that is about offsets of which nothing says that they arrived, with these."""
    bridges = {place["bridge"] for place in row["trusting"] if place["what"] == "elsewhere"}
    arrived = _Arrived(derived, (row["source_region"], row["destination_region"]), bridges)
    for place in row["arrived"] or ():
        arrived.take(reader.leaf(place["log"], place["leaf_index"], place["entries_sha256"]))
    for place in row["trusting"]:
        missing = arrived.lacks(reader.leaf(place["log"], place["leaf_index"], place["entries_sha256"]))
        if missing:
            yield place, missing


def _places(is_ahead: str) -> str:
    """SQL: where a shard's leaves stand."""
    return f"""array_sort(collect_list(struct(leaf_index, log, entries_sha256, bridge, incarnation,
        CASE kind WHEN 'GAP' THEN 'elsewhere' ELSE 'passed-by' END AS what, {is_ahead} AS is_ahead)))"""


def _said(place: Mapping[str, Any]) -> dict[str, str]:
    """Status and sentence of what is missing."""
    ahead = place["is_ahead"]
    ends = " that was given may end before they arrived." if ahead else " does not have them."
    return {"status": "open" if ahead else "differs", "sentence": _WORDS[place["what"]] + ends}


def _of(place: Mapping[str, Any]) -> dict[str, Any]:
    """What a finding says of the link that a leaf is of."""
    return {"bridge": place["bridge"], "incarnation": place["incarnation"]}


def _look(
    logs: Mapping[str, tuple[str, BundleRoots]], derived: Mapping[bytes, Derived], fields: Any
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        reader, unjudged = LeafReader(logs), Unjudged("looking for what had arrived")
        for batch in batches:
            for row in batch.to_pylist():
                shard = {name: row[name] for name in _NAMES} | {"status": "differs"}
                try:
                    made = [
                        {
                            **shard, **_of(place), **_said(place), "finding": f"{place['what']}-without-arrival", "first_offset": missing[0][0],
                            "last_offset": missing[-1][1], "records": sum(last - first + 1 for first, last in missing),
                            "egress_leaf": place["leaf_index"],
                        }
                        for place, missing in _missing(reader, derived, row)
                    ]  # fmt: skip
                except (FelixError, OSError):
                    raise
                except Exception as error:
                    said = not_judged(unjudged, error, "What is said to have arrived before")
                    links = {tuple(_of(place).items()) for place in row["trusting"]}
                    made = [{**shard, **dict(link), **said} for link in sorted(links)]
                if made:
                    yield pa.RecordBatch.from_pylist(made, schema=fields)

    return work


def unfounded(
    leaves: DataFrame,
    trusting: DataFrame,
    logs: Mapping[str, tuple[str, BundleRoots]],
    derived: Mapping[bytes, Derived],
) -> DataFrame:
    """A finding for each leaf of `trusting` (`reconciliation.perhaps_before`) about offsets that did not arrive. `logs` is path and bundles of each log, by origin."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    places = leaves.sparkSession.sql(
        f"""
        WITH trusting AS (SELECT {_SHARD}, {_places("is_ahead")} AS trusting FROM {{trusting}} GROUP BY {_SHARD}),
             arrived AS (
                 SELECT {_SHARD}, {_places("false")} AS arrived FROM {{leaves}}
                 WHERE side = 'ingress' AND kind = 'ACK' AND first_offset IS NOT NULL GROUP BY {_SHARD}
             )
        SELECT * FROM trusting LEFT JOIN arrived USING ({_SHARD})
        """,  # noqa: S608  # constants
        leaves=leaves,
        trusting=trusting,
    )
    kind = StructType.fromDDL(FINDINGS)
    assert isinstance(kind, StructType)
    fields = to_arrow_schema(kind, timezone="UTC")
    return places.mapInArrow(_look(dict(logs), dict(derived), fields), FINDINGS)
