"""What the regions signed: the terms of every transfer, from which all tables take their legal fields, and the revocations.

The document leaves of each log are read again on the driver, one after the other, and handed to `audit.agreement`, which verifies
every signature under the keys of the region that it speaks for. A row stands for one terms hash whose export grant,
acceptance and approvals are all there and hold: nothing in it is a leaf's own word.

A revocation counts where one of the grant's two regions signed it. Anybody else's ends nothing, whatever leaf it has.

Version 1 leaves hold terms that nobody's signature was checked for. Such terms give a row too, with `signed` false and every
legal field empty; what the leaf claims stands in `unsigned`, name by name, for a person to read and for nothing to be
computed from. They are for crossings of version 1 in the same log, and for nothing else.

Who may call: `audit.spark.report`.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from audit.agreement import OUTLAWED, Agreement, Agreements, Stop
from audit.continuity import GRANTS_MAX
from audit.crossed import Derived
from audit.document_leaf import read_document
from audit.keys_in_log import KeysInLog
from audit.leaf import DOCUMENT_KINDS, Header, Kind, Leaf, Terms, decode_leaf
from audit.merkle import TILE_WIDTH
from audit.origin import Origin
from audit.spark.files import open_files
from audit.spark.frame import frame_of
from audit.spark.stops import Ranks, Seen, Words, as_of, remember
from audit.spark.stops import rows as stop_rows
from audit.spark.verification import OpenedLog, keys_of
from audit.tile import Files
from audit.trust import Trust
from audit.unjudged import Unjudged
from policy.grant import NEVER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("felix.audit.spark")

_INDEXES_AT_ONCE: Final = 1 << 16
"""Of how many leaves of a log the driver is told at once which are documents."""

_ARRIVED_MAX: Final = 100_000
"""Of pairs of a grant and a stream under which something arrived, about which policies are asked."""
_PLACE: Final = (
    "terms_hash string, grant_id string, source_region string, destination_region string, stream string, actor string, "
    "time_ms bigint, log string, leaf_index bigint"
)
_LEGAL: Final = (
    "purpose string, basis string, article string, mechanism string, reference string, assessment string, "
    "categories array<string>, data_subjects array<string>, exporter string, importer string, source_country string, "
    "source_jurisdiction string, destination_country string, destination_jurisdiction string, owner string, "
    "drawn_up_by string, approvers array<string>, accepted_by string, not_before_ms bigint, expires_ms bigint, "
    "lineage array<struct<field:string,action:string,output:string>>, keep_others boolean, filter string, format string, "
    "key_rule string, headers array<string>, trace boolean, wildcard boolean, onward boolean, "
    "rate_bytes_per_second bigint, budget_bytes bigint, signed boolean, unsigned array<string>"
)
_NAMES: Final = tuple(item.split()[0] for item in f"{_PLACE}, {_LEGAL}".split(", "))
LEGAL_FIELDS: Final = _NAMES[9:]
"""What a row says besides where it was read."""


_REVOCATION: Final = "log string, grant_id string, leaf_index bigint"
_STOP: Final = (
    "source_region string, stop_key string, word string, from_ms bigint, until_ms bigint, stop_log string, known_leaf bigint, "
    "least_ms bigint, most_ms bigint, may_wait boolean, told_to_ms bigint, "
    "sure_from_ms bigint, sure_until_ms bigint"
)


class FirstCrossing(NamedTuple):
    """The first INTENT or ingress ACK under a grant that a report is about: its leaf, and its time (ms)."""

    leaf: int
    time_ms: int


class Granted(NamedTuple):
    """A link that a grant lets records cross by: both regions signed, and each has its approvals."""

    source_region: str
    destination_region: str
    bridge: str


class LogDocuments(NamedTuple):
    """What one log's documents say. `terms`: rows of `_NAMES`; `revocations`: the log, the grant, the index of the REVOKE leaf;
    `derived`: which incarnation goes on from which (`audit.crossed`); `stops`: what a region's own log says that it forbade to leave it."""

    terms: list[tuple[Any, ...]]
    revocations: list[tuple[str, str, int]]
    derived: dict[bytes, Derived]
    stops: tuple[Stop, ...] = ()
    unjudged: tuple[tuple[str, int, str], ...] = ()
    """of grants whose documents could not be judged: the log, a leaf, in words"""
    seen: Mapping[bytes, Seen] = MappingProxyType({})
    """the leaves of its documents, of a region's own log"""
    crossed: frozenset[str] = frozenset()
    """hashes of terms (hex) of which the row is as of a first crossing in this log"""
    doubted: bytes = b""
    """of the leaves whose document was not believed here, as `audit.verify.Report.doubted`"""
    granted: Mapping[Granted, str] = MappingProxyType({})
    """with the first of the grants, by id"""
    ranks: Ranks = MappingProxyType({})
    """of its policies"""
    unasked: int = 0
    """of how many grants and streams, under which something arrived, the region's policies were not asked"""


class Signed(NamedTuple):
    """The same of all logs. `terms`: one row per terms hash; `revocations`: one per REVOKE leaf that ends its grant; `stops`: one per
    `Stop` and other region's log (`audit.spark.stops`); None: there is none, as in most reports, which then ask for nothing."""

    terms: DataFrame
    revocations: DataFrame
    derived: Mapping[bytes, Derived]
    stops: DataFrame | None
    words: Words | None = None
    """by which of them is found what is about a leaf"""
    unjudged: tuple[tuple[str, int, str], ...] = ()
    doubted: Mapping[str, bytes] = MappingProxyType({})
    """the same by log, of those that have documents"""
    granted: Mapping[Granted, str] = MappingProxyType({})
    """of all logs"""
    unasked: int = 0
    """of all logs"""


def _row(place: Mapping[str, Any], legal: Mapping[str, Any]) -> tuple[Any, ...]:
    said = {**place, **legal}
    return tuple(said.get(name) for name in _NAMES)


def _signed(agreement: Agreement) -> dict[str, Any]:
    """The legal fields of an agreement. Texts that are empty are None, as everywhere in tables."""
    terms, fields = agreement.terms, agreement.legal_fields
    source, destination = agreement.place(terms.from_region), agreement.place(terms.to_region)
    found = {name: getattr(fields, name) for name in LEGAL_FIELDS if hasattr(fields, name)} | {
        "lineage": [
            {"field": item.field, "action": item.action, "output": item.output or item.field}
            for item in fields.lineage
        ],
        "source_country": source[0],
        "source_jurisdiction": source[1],
        "destination_country": destination[0],
        "destination_jurisdiction": destination[1],
        "drawn_up_by": terms.drawn_up_by,
        "approvers": agreement.approvers,
        "accepted_by": agreement.accepted_by,
        "format": terms.transform.format.value,
        "key_rule": terms.transform.key.value,
        "headers": terms.transform.headers,
        "trace": terms.transform.trace,
        "signed": True,
    }
    return {
        name: list(value) if isinstance(value, tuple) else None if value == "" else value
        for name, value in found.items()
    }


def _claimed(terms: Terms) -> list[str]:
    """What a version 1 leaf says, name by name."""
    return [
        f"{name}: {', '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in msgspec.to_builtins(terms).items()
        if value not in ("", 0, None, ()) and name != "lineage"
    ]


def _leaves(log: OpenedLog, indexes: Iterable[int]) -> Iterator[tuple[int, Leaf]]:
    """These leaves, in order."""
    files, number, bundle = open_files(log.path), -1, list[memoryview]()
    for index in indexes:
        if index // TILE_WIDTH != number:
            number = index // TILE_WIDTH
            bundle = log.bundles.read_bundle(files, number)
        yield index, decode_leaf(bundle[index % TILE_WIDTH])


def rows_of(
    origin: str,
    leaves: Iterable[tuple[int, Leaf]],
    files: Files,
    trust: Trust,
    crossed: Mapping[str, FirstCrossing] = MappingProxyType({}),
    keys: KeysInLog | None = None,
    arrived: Sequence[tuple[str, str]] = (),
) -> LogDocuments:
    """The rows of one log, from its document leaves in order, with their indexes; `files` has documents beside the log. `crossed`: by grant
    the first record that the tables are about: who approved and accepted is told as of then, where that is complete. Whoever signed later
    did not let it cross. `keys`: of the log; None: no former key counts in it. `arrived`: grants and streams of which something arrived by other logs."""
    agreements, unjudged = Agreements(trust, Origin.parse(origin), keys), Unjudged(origin)
    then: dict[str, Agreement] = {}
    waiting = deque(sorted((first, grant_id) for grant_id, first in crossed.items()))

    def look(index: int) -> None:
        """Remember what stood before each first crossing that this leaf is behind."""
        while waiting and waiting[0][0].leaf < index:
            first, grant_id = waiting.popleft()
            try:
                found = agreements.agreement(grant_id, first.time_ms)
            except Exception as error:
                log.warning("%s", unjudged.sentence(error, f"The grant {grant_id} of leaf {first.leaf}"))
                continue
            if found is not None and found.complete:
                then[grant_id] = found

    read: dict[str, tuple[int, Leaf]] = {}
    claims: dict[str, tuple[int, Leaf]] = {}
    seen: dict[bytes, Seen] = {}
    is_region, doubted = Origin.parse(origin).bridge is None, sha256()
    for index, leaf in leaves:
        look(index)
        # What does not hold about a document, or cannot be judged, is a finding of the verification, and the document is not believed.
        try:
            wrong = agreements.take(index, leaf, lambda header: read_document(header, files))
        except OSError:
            raise
        except Exception as error:
            wrong = [unjudged.sentence(error, f"Leaf {index}")]
        if wrong:
            doubted.update(index.to_bytes(8))
        if is_region and not wrong and leaf.version > 1:
            remember(seen, index, leaf.header)
        if leaf.header.kind is Kind.GRANT and not wrong:
            held = claims if leaf.version == 1 else read
            # Of those that nobody signed as many as the verifier holds: more are a finding there.
            if held is read or len(held) < GRANTS_MAX:
                held.setdefault(leaf.header.grant_id, (index, leaf))
    look(NEVER)
    rows, told = list[tuple[Any, ...]](), list[tuple[str, int, str]]()
    granted = dict[Granted, str]()
    for grant_id, (index, leaf) in sorted(read.items()):
        try:
            agreement = then.get(grant_id) or agreements.agreement(grant_id)
            if agreement is not None and agreement.complete:
                terms = agreement.terms
                place = _place(origin, index, leaf.header) | {
                    "terms_hash": agreement.terms_hash.hex(), "source_region": terms.from_region, "destination_region": terms.to_region,
                    "stream": terms.stream, "actor": terms.drawn_up_by,
                }  # fmt: skip
                rows.append(_row(place, _signed(agreement)))
                granted.setdefault(Granted(terms.from_region, terms.to_region, terms.bridge), grant_id)
        except Exception as error:
            told.append((origin, index, unjudged.sentence(error, f"The grant {grant_id} of leaf {index}")))
    for _, (index, leaf) in sorted(claims.items()):
        if leaf.header.terms is not None:
            claimed = {"signed": False, "unsigned": _claimed(leaf.header.terms)}
            rows.append(_row(_place(origin, index, leaf.header), claimed))
    revocations = [
        (origin, grant_id, index)
        for grant_id in agreements.grants()
        for index in agreements.revocations(grant_id)
    ]
    stops, unasked = agreements.stops() if is_region else (), 0
    try:
        outlawed, unasked = agreements.outlawed_stops(arrived)
        stops = (*stops, *outlawed)
    except Exception as error:
        told.append((origin, 0, unjudged.sentence(error, "What the policies forbade")))
    crossed_under = frozenset(agreement.terms_hash.hex() for agreement in then.values())
    return LogDocuments(
        rows,
        revocations,
        agreements.crossed.derived,
        stops,
        tuple(told),
        seen,
        crossed_under,
        doubted.digest(),
        granted,
        agreements.policy_ranks(),
        unasked,
    )


def _place(origin: str, index: int, header: Header) -> dict[str, Any]:
    return {
        "terms_hash": header.terms_hash.hex(), "grant_id": header.grant_id, "source_region": header.source_region,
        "destination_region": header.destination_region, "stream": header.stream, "actor": header.actor,
        "time_ms": header.time_ms, "log": origin, "leaf_index": index,
    }  # fmt: skip


_ENVELOPE: Final = "source_region, destination_region, bridge, stream, destination_stream, shard, incarnation, grant_id, terms_hash, envelope_sha256"
"""What an INTENT and its answers have in common: a log speaks for its own region alone, so no third region's leaf meets another pair's."""


def _first_crossings(
    leaves: DataFrame, since_ms: int | None, until_ms: int | None
) -> dict[str, dict[str, FirstCrossing]]:
    """By log and grant, of the crossings of which a leaf is within these times: the INTENT, the arrival or the receipt. A record may leave
    before a time and arrive behind it, and by two clocks that are apart hours lie between. Of grants that have a GRANT leaf there, and of
    so many as the verification holds: under a grant beyond those nothing crosses lawfully."""
    within = f"time_ms >= {since_ms or 0} AND time_ms < {NEVER - 1 if until_ms is None else until_ms}"
    # Of all times a receipt's INTENT is among them, and nothing is to be put together.
    is_whole = since_ms is None and until_ms is None
    answered = f"max(kind = 'ACK' AND {within}) OVER (PARTITION BY {_ENVELOPE})"
    found: dict[str, dict[str, FirstCrossing]] = defaultdict(dict)
    rows = leaves.sparkSession.sql(
        f"""
        WITH crossings AS (
            SELECT *, {"false" if is_whole else answered} AS answered
            FROM {{leaves}} WHERE version > 1 AND kind IN ('INTENT', 'ACK')
            AND grant_id IN (SELECT grant_id FROM {{leaves}} WHERE kind = 'GRANT')
        )
        SELECT log, grant_id, min(struct(leaf_index, time_ms)) AS first
        FROM crossings WHERE (kind = 'INTENT' OR side = 'ingress') AND ({within} OR (kind = 'INTENT' AND answered))
        GROUP BY log, grant_id
        """,  # noqa: S608  # numbers
        leaves=leaves,
    )
    for row in rows.toLocalIterator():
        if len(found[row["log"]]) < GRANTS_MAX:
            found[row["log"]][row["grant_id"]] = FirstCrossing(*row["first"])
    return found


def read_signed(
    spark: SparkSession,
    leaves: DataFrame,
    logs: Sequence[OpenedLog],
    trust: Trust,
    since_ms: int | None = None,
    until_ms: int | None = None,
) -> Signed:
    """What all logs' documents say. Of signed terms that stand in several logs one row: the first log's whose documents are complete,
    those in which something crossed before others, and egress logs before others. Claims of version 1 are for crossings of version 1 of the same log and grant, where nobody signed
    such terms: one row for each hash and pair of regions. `leaves`: as the source gives them. Approvals and acceptances are those that stood
    before the first crossing from `since_ms` on and before `until_ms`, where one is named."""
    crossings = _first_crossings(leaves, since_ms, until_ms)
    kinds = ", ".join(f"'{kind.name}'" for kind in sorted(DOCUMENT_KINDS))
    places = spark.sql(
        f"""
        SELECT log, array_sort(collect_list(leaf_index)) AS indexes
        FROM {{leaves}} WHERE kind IN ({kinds}) GROUP BY log, leaf_index DIV {_INDEXES_AT_ONCE} ORDER BY log, min(leaf_index)
        """,  # noqa: S608  # constants
        leaves=leaves,
    )
    opened, found = {log.checkpoint.origin: log for log in logs}, dict[str, LogDocuments]()
    regions = [origin for origin in opened if Origin.parse(origin).bridge is None]
    arrived, unlisted = _arrived(leaves, {Origin.parse(origin).region for origin in regions})
    # Part by part: a log may have any number of documents, and all of them count.
    for origin, rows in groupby(places.toLocalIterator(), key=itemgetter("log")):
        log = opened[origin]
        named = _leaves(log, (index for row in rows for index in row["indexes"]))
        read_ = Origin.parse(origin)
        said_of = arrived.get(read_.region, ()) if read_.bridge is None else ()
        found[origin] = rows_of(
            origin,
            named,
            open_files(log.path),
            trust,
            crossings.get(origin, {}),
            keys_of(log, trust),
            said_of,
        )
    signed: dict[str, tuple[Any, ...]] = {}
    of_crossings: set[str] = set()
    claims: dict[tuple[str, ...], tuple[Any, ...]] = {}
    revocations: list[tuple[str, str, int]] = []
    derived: dict[bytes, Derived] = {}
    ranks, newest_ms = {origin: read.ranks for origin, read in found.items()}, _newest_ms(leaves, found)
    said = {
        origin: tuple(as_of(stop, origin, ranks, newest_ms) for stop in read.stops)
        for origin, read in found.items()
    }
    stops = stop_rows(
        said,
        {origin: found[origin].seen if origin in found else {} for origin in regions},
    )
    unjudged: list[tuple[str, int, str]] = []
    for origin in sorted(found, key=lambda origin: (Origin.parse(origin).bridge is None, origin)):
        read = found[origin]
        revocations += read.revocations
        derived |= read.derived
        unjudged += read.unjudged
        for row in read.terms:
            if row[_NAMES.index("signed")]:
                is_of_crossing = row[0] in read.crossed and row[0] not in of_crossings
                if is_of_crossing or row[0] not in signed:
                    signed[row[0]] = row
                if is_of_crossing:
                    of_crossings.add(row[0])
            else:
                claims.setdefault(tuple(row[_NAMES.index(name)] for name in _CLAIMED_FOR), row)
    crossed = _crossed_under_claims(leaves) if claims else set()
    kept: dict[tuple[str, ...], tuple[Any, ...]] = {}
    for key, row in claims.items():
        if key in crossed and row[0] not in signed:
            kept.setdefault(key[2:], row)
    terms = [signed[key] for key in sorted(signed)] + [kept[key] for key in sorted(kept)]
    frames = signed_frames(spark, terms, revocations, derived, list(stops))
    doubted = {origin: read.doubted for origin, read in found.items()}
    granted = dict[Granted, str]()
    for origin in sorted(found):
        granted = {**found[origin].granted, **granted}
    unasked = unlisted + sum(read.unasked for read in found.values())
    return frames._replace(
        words=Words(said), unjudged=tuple(unjudged), doubted=doubted, granted=granted, unasked=unasked
    )


def _arrived(leaves: DataFrame, sources: Collection[str]) -> tuple[dict[str, list[tuple[str, str]]], int]:
    """The grants and streams under which something arrived out of these regions, whose own logs are given, by region: those of the most arrivals first; and how many more there are."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    rows = leaves.sparkSession.sql(
        f"""
        SELECT source_region, grant_id, stream, count(*) AS arrivals, count(*) OVER () AS pairs FROM {{leaves}}
        WHERE version > 1 AND kind = 'ACK' AND side = 'ingress' AND records > 0 AND grant_id IS NOT NULL AND stream IS NOT NULL
        GROUP BY source_region, grant_id, stream ORDER BY arrivals DESC, source_region, grant_id, stream LIMIT {_ARRIVED_MAX}
        """,  # noqa: S608  # of this module
        leaves=leaves,
    ).collect()
    for row in rows:
        if row["source_region"] in sources:
            found[row["source_region"]].append((row["grant_id"], row["stream"]))
    return found, rows[0]["pairs"] - len(rows) if rows else 0


def _newest_ms(leaves: DataFrame, found: Mapping[str, LogDocuments]) -> dict[str, int]:
    """The latest time that each log shows; asked only where it matters."""
    if not any(
        stop.word == OUTLAWED and stop.until_ms is None for read in found.values() for stop in read.stops
    ):
        return {}
    rows = leaves.sparkSession.sql(
        "SELECT log, max(time_ms) AS latest FROM {leaves} GROUP BY log", leaves=leaves
    )
    return {row["log"]: row["latest"] for row in rows.collect()}


_CLAIMED_FOR: Final = ("log", "grant_id", "terms_hash", "source_region", "destination_region")


def _crossed_under_claims(leaves: DataFrame) -> set[tuple[str, ...]]:
    """Under what records crossed or arrived by leaves of version 1."""
    found = leaves.where("version = 1 AND kind IN ('INTENT', 'ACK')").select(*_CLAIMED_FOR).distinct()
    return {tuple(row) for row in found.collect()}


def signed_frames(
    spark: SparkSession,
    terms: Sequence[tuple[Any, ...]],
    revocations: Sequence[tuple[str, str, int]],
    derived: Mapping[bytes, Derived],
    stops: Sequence[tuple[Any, ...]] = (),
) -> Signed:
    """These rows as the queries take them."""
    return Signed(
        frame_of(spark, terms, f"{_PLACE}, {_LEGAL}"),
        frame_of(spark, revocations, _REVOCATION),
        derived,
        frame_of(spark, stops, _STOP) if stops else None,
    )
