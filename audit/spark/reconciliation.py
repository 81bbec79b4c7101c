"""Reconciliation: what left, what was acknowledged, what arrived, and every difference between them.

What lives here: the Spark queries that hold egress logs against ingress logs. They always read whole logs: a
receipt may come after any window, and a hole is a hole whenever it was made.

How, in this order:

A shard is one of a stream on its way to one destination stream, in one incarnation: a stream that crosses under two names
is accounted for under each.

1. per transfer envelope, INTENT leaves (egress), receipts (egress ACK) and arrivals (ingress ACK) are joined on
   link, stream, incarnation, shard and the envelope's SHA-256; ranges, counts, bytes and the SHA-256 of all the
   envelope's entries (`batch_sha256`: the same however each side cut it into leaves) are compared;
2. envelopes that this does not show to be alike are compared record by record, commitment by commitment, where the
   leaves stand (`audit.spark.comparison`): records are never shuffled, and logs that agree are never read again;
3. records that a resend passes by must have arrived before it, under an incarnation that it goes on from, and offsets that another
   bridge brought must have arrived (`audit.spark.arrived_before`): an egress log takes the destination's word for it, and the ingress
   log has them or it is not so;
4. per shard, the source offsets that INTENT, WITHHELD and GAP leaves cover must follow each other without a hole
   and without two INTENT leaves, or a GAP and anything else, over the same offset, and covered = crossed + withheld + passed by in a
   resend + gaps. These are ranges and sums; that each single offset is accounted for once is the verification's word
   (`audit.accounting`): where it says otherwise of a leaf, its shard differs. A link may go on
   further ahead where another grant begins; what lies between is counted as skipped. It may begin again where the grant before it was
   not answered any more (`audit.spark.begun_again`); what was announced twice so counts once.

An INTENT later than its shard's last receipt may be in flight while the log is copied; it is reported as `open`,
which is neither reconciled nor a difference. So is, for good, what was announced again and not answered: it counts once for the
accounting, and whether it had arrived is the destination's word alone.

Logs of a link in use are never of one moment, so what one of them shows and the other, as it was given, does not reach is `open`, too:

- a receipt that names a leaf behind the end of the ingress log;
- an arrival behind all that the egress log has of its shard and cannot take back (what another grant may still announce again can be),
  where no receipt in that log names this leaf of the ingress log or a later one at which the ingress log has what the receipt is for: an
  INTENT is durable before anything arrives, so a log with such a receipt has the INTENT. What else the destination signs of its log accuses nobody;
- what is taken on trust (step 3), where nothing that was announced behind it has arrived in the ingress log as given.

The first only as long as the destination, in its log or in another receipt, says no time `APART_MS` after that of the receipt: no other clock
accuses it. The second until a receipt shows otherwise: when something arrived is the destination's word alone, and accuses no agent. The third as
long as none of the link's logs shows a time `APART_MS` later. A leaf that is taken on trust is no later than any leaf behind it in its log, whatever
time it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from audit.crossed import CROSSED_BEFORE
from audit.leaf import GapKind
from audit.origin import Origin
from audit.spark.begun_again import ANSWERED_YET, BEGUN_AGAIN, COVERS, FOLLOWED
from audit.spark.shard_key import ENVELOPE, ENVELOPE_KEY, SHARD, SHARD_KEY, same
from audit.spark.table import Column, Type, one_row_each, total

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RECONCILED: Final = "reconciled"
OPEN: Final = "open"
DIFFERS: Final = "differs"
VERSION_1: Final = "of version 0.1"
"""Its records crossed in leaves of version 1, for which nobody had to sign anything and which anybody with the logs' keys can write today; and
whoever asked for the report did not say that these leaves are known to be old."""
ONE_SIDE: Final = "one side only"
"""The counterpart's log was not among those given: nothing to hold this one against."""

WORST_FIRST: Final = (DIFFERS, VERSION_1, ONE_SIDE, OPEN, RECONCILED)
"""What a register's row says of all its shards is the first of these that one of them has."""

WORTH: Final = (f"status <> '{DIFFERS}'", "acknowledged = 0", *SHARD_KEY)
"""The order of what a report lists of a reconciliation that is too long: what differs first, then where the destination signed receipts."""

PASSED_BY: Final = f"kind = 'WITHHELD' AND reason <=> '{CROSSED_BEFORE}'"
"""Leaves about records that a resend leaves out, since they crossed before it: nothing that was withheld from anybody."""
TAKEN_ON_TRUST: Final = (
    f"side = 'egress' AND ({PASSED_BY} OR (kind = 'GAP' AND gap <=> '{GapKind.ELSEWHERE}'))"
)
"""Leaves of an egress log that say what the destination had before."""

COLUMNS: Final = (
    Column("source_region", Type.TEXT, "From region"),
    Column("destination_region", Type.TEXT, "To region"),
    Column("bridge", Type.TEXT, "Bridge"),
    Column("stream", Type.TEXT, "Stream"),
    Column("destination_stream", Type.TEXT, "Stream at the destination"),
    Column("incarnation", Type.TEXT, "Incarnation"),
    Column("shard", Type.COUNT, "Shard"),
    Column("first_offset", Type.COUNT, "First offset"),
    Column("last_offset", Type.COUNT, "Last offset"),
    Column("covered", Type.COUNT, "Offsets covered", "by INTENT, WITHHELD and GAP leaves together"),
    Column("crossed", Type.COUNT, "Records crossed"),
    Column("withheld", Type.COUNT, "Records withheld"),
    Column(
        "passed_by", Type.COUNT, "Records passed by", "left out of a resend, since they crossed before it"
    ),
    Column("gap", Type.COUNT, "Offsets in gaps", "declared by GAP leaves"),
    Column("skipped", Type.COUNT, "Offsets skipped", "left out where one grant ended and another began"),
    Column(
        "unanswered",
        Type.COUNT,
        "Records announced, not answered",
        "announced again under the grant that followed, or left to another bridge: whether they had arrived nobody signed",
    ),
    Column(
        "unaccounted", Type.COUNT, "Offsets unaccounted", "covered - crossed - withheld - passed_by - gap"
    ),
    Column("acknowledged", Type.COUNT, "Records with a receipt"),
    Column("delivered", Type.COUNT, "Records delivered"),
    Column("crossed_bytes", Type.COUNT, "Bytes crossed"),
    Column("delivered_bytes", Type.COUNT, "Bytes delivered"),
    Column(
        "version_1", Type.FLAG, "In leaves of version 1", "of Felix 0.1: for their terms nobody had to sign"
    ),
    Column("findings", Type.COUNT, "Differences"),
    Column("open", Type.COUNT, "Open"),
    Column("status", Type.TEXT, "Status"),
)

FINDING_COLUMNS: Final = (
    Column("status", Type.TEXT, "Status", "open or differs"),
    Column("finding", Type.TEXT, "Finding"),
    Column("source_region", Type.TEXT, "From region"),
    Column("destination_region", Type.TEXT, "To region"),
    Column("bridge", Type.TEXT, "Bridge"),
    Column("stream", Type.TEXT, "Stream"),
    Column("destination_stream", Type.TEXT, "Stream at the destination"),
    Column("incarnation", Type.TEXT, "Incarnation"),
    Column("shard", Type.COUNT, "Shard"),
    Column("first_offset", Type.COUNT, "First offset"),
    Column("last_offset", Type.COUNT, "Last offset"),
    Column("records", Type.COUNT, "Records"),
    Column("egress_leaf", Type.COUNT, "Egress leaf"),
    Column("ingress_leaf", Type.COUNT, "Ingress leaf"),
    Column("envelope_sha256", Type.TEXT, "Envelope"),
    Column("sentence", Type.TEXT, "In words"),
)

LONG_UNANNOUNCED: Final = "arrival-long-unannounced"
"""Who kept the leaf back, or dated one falsely, these logs do not show; a report that has it is not clean."""
APART_MS: Final = 3_600_000
"""How far apart the logs of a link may be: an auditor copies one after the other, and clocks of two regions differ. What was done longer
before the latest moment that one of them shows is missing where another lacks it."""

_ARRIVING: Final = ", ".join(name for name in SHARD_KEY if name != "bridge")
"""At the destination a shard has one place, whichever bridge brings it."""


class LogEnd(NamedTuple):
    """Where a log that was given ends."""

    origin: str
    size: int
    time_ms: int
    """the latest that one of its leaves says"""


class Given:
    """Which logs a report was given. An egress log is one bridge's: that of another bridge between the same regions says
    nothing of this one. What a leaf calls itself counts for nothing: a log is the other side where it was given, whether
    or not it has a leaf about the crossing."""

    def __init__(self, logs: Iterable[LogEnd]) -> None:
        """`logs`: those that verified."""
        parsed = [(Origin.parse(log.origin), log) for log in logs]
        self._bridge_ends = {str(origin.bridge): log for origin, log in parsed if origin.bridge is not None}
        self._region_ends = {origin.region: log for origin, log in parsed if origin.bridge is None}

    def has_egress_of(self, bridge: str) -> bool:
        """Whether the bridge's egress log is among them."""
        return bridge in self._bridge_ends

    @property
    def egress(self) -> str:
        """SQL: whether the egress log of a row's bridge is among them."""
        return _is_one_of("bridge", sorted(self._bridge_ends))

    @property
    def ingress(self) -> str:
        """SQL: whether the own log of a row's destination is among them."""
        return _is_one_of("destination_region", sorted(self._region_ends))

    @property
    def ingress_size(self) -> str:
        """SQL: how many leaves the own log of a row's destination has; null: it was not given."""
        return _by("destination_region", {name: end.size for name, end in self._region_ends.items()})

    def may_lack(self, time: str) -> str:
        """SQL: whether what was done at this time (ms) may be missing in a log of a row's link because the log was read before."""
        bridges = {name: end.time_ms for name, end in self._bridge_ends.items()}
        ends = (
            _by("bridge", bridges),
            self._region_end("source_region"),
            self._region_end("destination_region"),
        )
        return self._is_within(time, *ends)

    def ingress_may_lack(self, time: str, latest: str) -> str:
        """SQL: whether the destination's own log may have been read before this time (ms), where the destination says both, and the `latest`
        that it says elsewhere: what others date accuses it of nothing."""
        return self._is_within(time, self._region_end("destination_region"), latest)

    def _region_end(self, column: str) -> str:
        return _by(column, {name: end.time_ms for name, end in self._region_ends.items()})

    @staticmethod
    def _is_within(time: str, *ends: str) -> str:
        return f"coalesce({time} >= greatest({', '.join(ends)}, 0) - {APART_MS}, false)"


def _by(column: str, values: Mapping[str, int]) -> str:
    """SQL: the number that belongs to a row's name there; null where there is none."""
    # Parsed names have no quotes.
    cases = "".join(f" WHEN '{name}' THEN {value}" for name, value in sorted(values.items()))
    return f"CASE {column}{cases} END" if cases else "CAST(NULL AS BIGINT)"


def _is_one_of(column: str, names: Sequence[str]) -> str:
    # Parsed names have no quotes.
    listed = ", ".join(f"'{name}'" for name in names)
    return f"coalesce({column} IN ({listed}), false)" if names else "false"


_SAID: Final = ("grant_id", "terms_hash", "source_epoch")
"""What both sides say of an envelope besides its range, counts and records."""


def _said() -> str:
    return "concat_ws(' ', " + ", ".join(f"coalesce(CAST({name} AS STRING), '-')" for name in _SAID) + ")"


def envelopes(leaves: DataFrame, given: Given) -> DataFrame:
    """One row per envelope that any leaf names, with both sides' counts (null: that side has no such leaf)."""

    def side(prefix: str, more: str = "") -> str:
        mine = f"FILTER (WHERE is_{prefix})"
        # A receipt lists no records, so nothing holds its leaf to a number of bytes.
        listed = "CAST(NULL AS BIGINT)" if prefix == "receipt" else f"sum(record_bytes) {mine}"
        return f"""
            min(first_offset) {mine} AS {prefix}_first, max(last_offset) {mine} AS {prefix}_last,
            CASE WHEN bool_or(is_{prefix}) THEN {total("records", f"is_{prefix}")} END AS {prefix}_records, {listed} AS {prefix}_bytes,
            min(leaf_index) {mine} AS {prefix}_leaf, nullif(count(*) {mine}, 0) AS {prefix}_leaves, max(parts) {mine} AS {prefix}_parts,
            max(batch_sha256) {mine} AS {prefix}_digest, max(receipt_leaf) {mine} AS {prefix}_told, max(receipt_ms) {mine} AS {prefix}_signed,
            max(time_ms) {mine} AS {prefix}_time, max(grant_id) {mine} AS {prefix}_grant,
            min(destination_first_offset) {mine} AS {prefix}_to_first, max(destination_last_offset) {mine} AS {prefix}_to_last,
            nullif(array_join(array_sort(collect_set({_said()}) {mine}), '; '), '') AS {prefix}_said,
            nullif(array_join(array_sort(collect_set(array_join(path, ', ')) {mine}), '; '), '') AS {prefix}_path{more}"""

    # Of a batch all leaves are announced again, or none.
    again = "".join(
        f", bool_or({name}) FILTER (WHERE is_intent) AS {name}"
        for name in (BEGUN_AGAIN, ANSWERED_YET, FOLLOWED)
    )
    # The sides are told apart within one grouping: three groupings that are joined are planned three times as long, and sort all rows again.
    return leaves.sparkSession.sql(
        f"""
        WITH sided AS (
                 SELECT *, kind = 'INTENT' AND side = 'egress' AS is_intent, kind = 'ACK' AND side = 'egress' AS is_receipt,
                        kind = 'ACK' AND side = 'ingress' AS is_arrival
                 FROM {{leaves}} WHERE (kind = 'INTENT' AND side = 'egress') OR (kind = 'ACK' AND side IN ('egress', 'ingress'))
             ),
             envelopes AS (
                 SELECT {ENVELOPE}, {side("intent", again)}, {side("receipt")}, {side("arrival")}
                 FROM sided GROUP BY {ENVELOPE}
             ),
             told AS (
                 SELECT {SHARD}, grant_id, max(last_offset) AS told FROM {{leaves}} WHERE {COVERS} GROUP BY {SHARD}, grant_id
             ),
        covered AS (
            SELECT envelopes.*, told.told FROM envelopes LEFT JOIN told ON {same("envelopes", "told")} AND envelopes.arrival_grant <=> told.grant_id
        ),
        placed AS (
            SELECT *, {given.egress} AS has_egress, {given.ingress} AS has_ingress,
                   max(receipt_last) OVER (PARTITION BY {SHARD}) AS last_receipt,
                   max(receipt_told) FILTER (WHERE receipt_told = arrival_leaf) OVER (PARTITION BY bridge, destination_region) AS last_told,
                   coalesce(receipt_told >= {given.ingress_size}, false) AND {given.ingress_may_lack("receipt_signed", "last_signed")} AS ingress_ends
            FROM (SELECT *, max(receipt_signed) OVER (PARTITION BY destination_region) AS last_signed FROM covered)
        ),
        ended AS (
            SELECT *, intent_leaf IS NULL AND coalesce(arrival_first > coalesce(greatest(last_receipt, told), -1)
                   AND arrival_leaf > coalesce(last_told, -1), false) AS egress_ends
            FROM placed
        )
        SELECT *, egress_ends AND NOT {given.may_lack("arrival_time")} AS is_long_ago,
               max(arrival_last) FILTER (WHERE NOT egress_ends) OVER (PARTITION BY {SHARD}) AS last_arrival
        FROM ended
        """,  # noqa: S608
        leaves=leaves,
    )


def _finding(status: str, name: str, sentence: str, where: str) -> str:
    """SQL: the finding of a row where the condition `where` is true, else null. `status` and `sentence` are SQL."""
    return f"CASE WHEN {where} THEN named_struct('status', {status}, 'finding', '{name}', 'sentence', {sentence}) END"


def envelope_findings(sides: DataFrame) -> DataFrame:
    """Step 1: what is missing on a side, or counted differently. `sides` is `envelopes(…)`."""
    place = f"""{SHARD}, coalesce(intent_first, receipt_first, arrival_first) AS first_offset,
                coalesce(intent_last, receipt_last, arrival_last) AS last_offset,
                coalesce(intent_records, receipt_records, arrival_records) AS records,
                coalesce(intent_leaf, receipt_leaf) AS egress_leaf, arrival_leaf AS ingress_leaf, envelope_sha256"""
    late = "CASE WHEN intent_first > coalesce({last}, -1) THEN 'open' ELSE 'differs' END"
    # Nobody asks for the receipt of a grant that another one, or another bridge, followed: the ingress log says whether it arrived, as far as it goes.
    unasked = f"""CASE WHEN {FOLLOWED} AND (NOT has_ingress OR intent_first > coalesce(last_arrival, -1)) THEN 'open'
                  ELSE {late.format(last="last_receipt")} END"""
    cases = [
        _finding(
            unasked, "intent-without-receipt",
            "'Announced in the egress log; no receipt of the destination follows.'",
            f"intent_leaf IS NOT NULL AND receipt_leaf IS NULL AND NOT {BEGUN_AGAIN} AND NOT ({FOLLOWED} AND arrival_leaf IS NOT NULL)",
        ),
        _finding(
            late.format(last="last_arrival"), "intent-without-arrival",
            "'Announced in the egress log; the ingress log does not have it.'",
            f"intent_leaf IS NOT NULL AND receipt_leaf IS NULL AND arrival_leaf IS NULL AND has_ingress AND NOT {BEGUN_AGAIN}",
        ),
        _finding(
            "'differs'", "announced-again-though-answered",
            "'Announced again under the grant that followed, or left to another bridge, as if it had not arrived; and it had.'",
            ANSWERED_YET,
        ),
        _finding(
            "CASE WHEN ingress_ends THEN 'open' ELSE 'differs' END", "receipt-without-arrival",
            "CASE WHEN ingress_ends THEN concat('The destination gave a receipt for leaf ', receipt_told, ' of its ingress log; the log that was given ends before it.') "
            "ELSE 'The destination gave a receipt; its ingress log does not have the records.' END",
            "receipt_leaf IS NOT NULL AND arrival_leaf IS NULL AND has_ingress",
        ),
        _finding(
            "'differs'", "receipt-without-intent",
            "'The egress log has a receipt for records that it never announced.'",
            "receipt_leaf IS NOT NULL AND intent_leaf IS NULL",
        ),
        _finding(
            "CASE WHEN egress_ends THEN 'open' ELSE 'differs' END", "arrival-without-intent",
            "CASE WHEN egress_ends THEN 'The ingress log has records behind those with which the egress log ends that was given.' "
            "ELSE 'The ingress log has records that the egress log never announced.' END",
            "arrival_leaf IS NOT NULL AND intent_leaf IS NULL AND has_egress AND NOT is_long_ago",
        ),
        _finding(
            "'open'", LONG_UNANNOUNCED,
            "'The ingress log has records that the egress log as given does not announce, an hour and more before the latest time of a log of the link.'",
            "arrival_leaf IS NOT NULL AND intent_leaf IS NULL AND has_egress AND is_long_ago",
        ),
        _finding(
            "'differs'", "count-differs",
            "concat('Announced ', intent_records, ' records; the ingress log has ', arrival_records, '.')",
            "intent_records <> arrival_records",
        ),
        _finding(
            "'differs'", "receipt-count-differs",
            "concat('Announced ', intent_records, ' records; the receipt is for ', receipt_records, '.')",
            "intent_records <> receipt_records AND receipt_leaves = 1",
        ),
        _finding(
            "'differs'", "receipt-records-differ",
            "'The receipt is for other records than were announced.'",
            "intent_records = receipt_records AND intent_digest <> receipt_digest",
        ),
        _finding(
            "'differs'", "arrival-moved",
            "concat('The receipt names leaf ', receipt_told, ' of the ingress log; it stands at ', arrival_leaf, ': the log is not the one of then.')",
            "receipt_leaves = 1 AND receipt_told <> arrival_leaf",
        ),
        _finding(
            "'differs'", "place-differs",
            "concat('The receipt says that they have the offsets ', coalesce(CAST(receipt_to_first AS STRING), 'none'), ' to ', "
            "coalesce(CAST(receipt_to_last AS STRING), 'none'), ' there; the ingress log says ', coalesce(CAST(arrival_to_first AS STRING), 'none'), ' to ', "
            "coalesce(CAST(arrival_to_last AS STRING), 'none'), '.')",
            "receipt_leaves = 1 AND receipt_records = arrival_records AND NOT "
            "(receipt_to_first <=> arrival_to_first AND receipt_to_last <=> arrival_to_last)",
        ),
        _finding(
            "'differs'", "range-differs",
            "concat('Announced ', intent_first, ' to ', intent_last, '; the ingress log has ', arrival_first, ' to ', arrival_last, '.')",
            "intent_first <> arrival_first OR intent_last <> arrival_last",
        ),
        _finding(
            "'differs'", "terms-differ",
            "concat('Announced as ', intent_said, '; the ingress log has ', arrival_said, '.')",
            "intent_said <> arrival_said",
        ),
        _finding(
            "'differs'", "path-differs",
            "concat('Announced as records that had been in ', coalesce(intent_path, receipt_path), '; by the ingress log they had been in ', arrival_path, '.')",
            "coalesce(intent_path, receipt_path) <> arrival_path",
        ),
        _finding(
            "'differs'", "bytes-differ",
            "concat('Announced ', intent_bytes, ' bytes; the ingress log has ', arrival_bytes, '.')",
            "intent_records = arrival_records AND intent_bytes <> arrival_bytes",
        ),
        _finding(
            "'differs'", "duplicate-intent", "'The same envelope was announced more than once.'",
            "intent_leaves > intent_parts",
        ),
        _finding(
            "'differs'", "duplicate-receipt", "'The egress log has more than one receipt for the same envelope.'",
            "receipt_leaves > receipt_parts",
        ),
        _finding(
            "'differs'", "duplicate-arrival", "'The destination appended the same envelope more than once.'",
            "arrival_leaves > arrival_parts",
        ),
        # Neither crossed nor not crossed: the destination may have taken them and kept silent, to be sent less under stricter terms.
        _finding(
            f"'{OPEN}'", "announced-not-answered",
            "'Announced, and announced again under the grant that followed, or left to another bridge, since the destination said that they had not arrived. "
            "Nobody signed that.'",
            f"intent_leaf IS NOT NULL AND intent_records > 0 AND {BEGUN_AGAIN}",
        ),
    ]  # fmt: skip
    return sides.sparkSession.sql(f"SELECT {place}, {one_row_each(cases)} FROM {{sides}}", sides=sides)  # noqa: S608


def perhaps_before(leaves: DataFrame, trusting: DataFrame, sides: DataFrame, given: Given) -> DataFrame:
    """The leaves of `TAKEN_ON_TRUST`, each with `is_ahead`: whether the ingress log as given may end before what it says had arrived. It
    does not where something has arrived that the egress log announced behind the leaf. A time that is ahead of those of leaves behind it
    counts as the earliest of theirs."""
    return trusting.sparkSession.sql(
        f"""
        WITH later AS (
            SELECT log, leaf_index,
                   min(time_ms) OVER (PARTITION BY log ORDER BY leaf_index DESC) AS by_ms
            FROM {{leaves}} WHERE log IN (SELECT log FROM {{trusting}})
        )
        SELECT trusting.*, leaf_index >= coalesce(reached, 0) AND {given.may_lack("coalesce(by_ms, time_ms)")} AS is_ahead
        FROM {{trusting}} AS trusting LEFT JOIN later USING (log, leaf_index) LEFT JOIN (
            SELECT bridge, destination_region, max(intent_leaf) AS reached FROM {{sides}} WHERE arrival_leaf IS NOT NULL GROUP BY ALL
        ) USING (bridge, destination_region)
        """,  # noqa: S608
        leaves=leaves,
        trusting=trusting,
        sides=sides,
    )


def unlike_envelopes(sides: DataFrame) -> DataFrame:
    """Step 2, first half: the envelopes that are not shown alike by their digests, to be compared by record.

    A side whose digest is missing, or is one of several (the envelope stands in the log twice), shows nothing.
    """
    return sides.where(
        """intent_leaf IS NOT NULL AND arrival_leaf IS NOT NULL AND NOT (
               intent_digest <=> arrival_digest AND intent_digest IS NOT NULL
               AND intent_leaves = intent_parts AND arrival_leaves = arrival_parts)"""
    ).select(*ENVELOPE_KEY)


def places(leaves: DataFrame, unlike: DataFrame) -> DataFrame:
    """Step 2, second half, for `audit.spark.comparison`: where the leaves of these envelopes stand, on both sides."""
    return leaves.sparkSession.sql(
        f"""
        SELECT {", ".join("leaves." + name for name in ENVELOPE_KEY)}, min(leaves.leaf_index) AS first_leaf,
               array_sort(collect_list(struct(leaves.side, leaves.part, leaves.leaf_index, leaves.log,
                   leaves.entries_sha256))) AS places
        FROM {{leaves}} AS leaves JOIN {{unlike}} AS unlike ON {same("leaves", "unlike", ENVELOPE_KEY)}
        WHERE (leaves.kind = 'INTENT' AND leaves.side = 'egress') OR (leaves.kind = 'ACK' AND leaves.side = 'ingress')
        GROUP BY {", ".join("leaves." + name for name in ENVELOPE_KEY)}
        """,  # noqa: S608
        leaves=leaves,
        unlike=unlike,
    )


def _covered(leaves: DataFrame) -> DataFrame:
    """Egress leaves that cover source offsets, each with how far the ones before it reach.

    What another grant announced again covers nothing any more.
    """
    before = f"""OVER (PARTITION BY {SHARD} ORDER BY first_offset, last_offset, leaf_index
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"""
    return leaves.sparkSession.sql(
        f"""
        SELECT *, max(last_offset) {before} AS reached,
               max(CASE WHEN kind = 'INTENT' THEN last_offset END) {before} AS announced,
               max(CASE WHEN kind = 'GAP' THEN last_offset END) {before} AS missing,
               max(CASE WHEN kind = 'GAP' OR records > 0 THEN last_offset END) {before} AS told,
               last(grant_id, true) {before} AS grant_before
        FROM {{leaves}}
        WHERE {COVERS} AND NOT {BEGUN_AGAIN}
        """,  # noqa: S608
        leaves=leaves,
    )


def coverage_findings(leaves: DataFrame) -> DataFrame:
    """Step 4, by place: holes that no GAP leaf declares, offsets announced twice, arrivals twice."""
    before = f"""OVER (PARTITION BY {_ARRIVING} ORDER BY first_offset, last_offset, leaf_index
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"""

    def at(name: str, first: str, last: str, sentence: str) -> str:
        return f"""named_struct('status', 'differs', 'finding', '{name}', 'first_offset', {first}, 'last_offset', {last},
            'records', ({last}) - ({first}) + 1, 'sentence', '{sentence}')"""

    undeclared = at(
        "undeclared-gap", "reached + 1", "first_offset - 1", "Source offsets that no leaf accounts for, between two that do."
    )  # fmt: skip
    announced = at(
        "announced-twice", "first_offset", "least(announced, last_offset)", "Source offsets that two INTENT leaves cover."
    )  # fmt: skip
    other = "CASE WHEN kind = 'GAP' THEN told WHEN records > 0 THEN missing END"
    accounted = at(
        "accounted-twice", "first_offset", f"least({other}, last_offset)", "Source offsets that a GAP leaf and another leaf account for."
    )  # fmt: skip
    delivered = at(
        "delivered-twice", "first_offset", "least(reached, last_offset)", "Source offsets that the destination appended twice."
    )  # fmt: skip
    cases = [
        f"CASE WHEN first_offset > reached + 1 AND coalesce(grant_id, grant_before) <=> grant_before THEN {undeclared} END",
        f"CASE WHEN kind = 'INTENT' AND first_offset <= announced THEN {announced} END",
        f"CASE WHEN first_offset <= {other} THEN {accounted} END",
    ]
    return leaves.sparkSession.sql(
        f"""
        SELECT {SHARD}, leaf_index AS egress_leaf, CAST(NULL AS BIGINT) AS ingress_leaf, envelope_sha256, {one_row_each(cases)}
        FROM {{covered}}
        UNION ALL
        SELECT {SHARD}, NULL, leaf_index, envelope_sha256, {one_row_each([delivered])}
        FROM (SELECT *, max(last_offset) {before} AS reached FROM {{leaves}}
              WHERE side = 'ingress' AND kind = 'ACK')
        WHERE first_offset <= reached
        """,  # noqa: S608
        leaves=leaves,
        covered=_covered(leaves),
    )


def _stands_from(first: Mapping[str, int]) -> str:
    """SQL: whether a leaf stands at its log's index there or behind it."""
    if not first:
        return "false"
    # Parsed names have no quotes.
    cases = " ".join(f"WHEN '{log}' THEN leaf_index >= {index}" for log, index in first.items())
    return f"CASE log {cases} ELSE false END"


def shards(
    leaves: DataFrame,
    findings: DataFrame,
    miscounted: DataFrame,
    given: Given,
    version_1: Sequence[str],
    uncounted: Mapping[str, int],
) -> DataFrame:
    """One row per link, stream, incarnation and shard: the sums, the accounting, the status. `miscounted`: the leaves (log,
    leaf_index) with which, by the verification, source offsets are not accounted for once. `version_1`: the logs whose leaves of version 1
    are not accepted. `uncounted`: of logs with more link shards than the verification counts the first leaf about one that it does not:
    such a shard differs, since nobody knows whether its offsets are accounted for once."""
    return leaves.sparkSession.sql(
        f"""
        WITH sums AS (
            SELECT {SHARD}, min(first_offset) AS first_offset, max(last_offset) AS last_offset,
                   coalesce(sum(records) FILTER (WHERE side = 'egress' AND kind = 'INTENT'), 0) AS crossed,
                   coalesce(sum(records) FILTER (WHERE side = 'egress' AND kind = 'WITHHELD'), 0)
                       - coalesce(sum(records) FILTER (WHERE side = 'egress' AND {PASSED_BY}), 0) AS withheld,
                   coalesce(sum(records) FILTER (WHERE side = 'egress' AND {PASSED_BY}), 0) AS passed_by,
                   {total("records", "side = 'egress' AND kind = 'ACK'")} AS acknowledged,
                   coalesce(sum(records) FILTER (WHERE side = 'ingress' AND kind = 'ACK'), 0) AS delivered,
                   coalesce(sum(record_bytes) FILTER (WHERE side = 'egress' AND kind = 'INTENT'), 0)
                       AS crossed_bytes,
                   coalesce(sum(record_bytes) FILTER (WHERE side = 'ingress' AND kind = 'ACK'), 0)
                       AS delivered_bytes,
                   coalesce(sum(unanswered), 0) AS unanswered,
                   bool_or(version = 1) AS version_1, bool_or(version = 1 AND {_is_one_of("log", version_1)}) AS is_of_version_1,
                   coalesce(bool_and(is_uncounted) FILTER (WHERE side = 'egress'), false)
                       OR coalesce(bool_and(is_uncounted) FILTER (WHERE side = 'ingress'), false) AS is_uncounted
            FROM (
                SELECT {SHARD}, log, version, side, reason, record_bytes, records,
                       CASE WHEN NOT {BEGUN_AGAIN} THEN first_offset END AS first_offset,
                       CASE WHEN NOT {BEGUN_AGAIN} THEN last_offset END AS last_offset,
                       CASE WHEN NOT {BEGUN_AGAIN} THEN kind END AS kind,
                       CASE WHEN {BEGUN_AGAIN} AND kind = 'INTENT' THEN records END AS unanswered,
                       CASE WHEN NOT (gap <=> '{GapKind.TRUNCATION}') THEN {_stands_from(uncounted)} END AS is_uncounted
                FROM {{leaves}} WHERE kind IN ('INTENT', 'ACK') OR (side = 'egress' AND kind IN ('WITHHELD', 'GAP'))
            )
            GROUP BY {SHARD}
        ),
        reach AS (
            SELECT {SHARD},
                   sum(greatest(0, last_offset - greatest(first_offset, coalesce(reached + 1, first_offset)) + 1))
                       AS covered,
                   coalesce(sum(greatest(0, last_offset - greatest(first_offset, coalesce(missing + 1, first_offset))
                       + 1)) FILTER (WHERE kind = 'GAP'), 0) AS gap,
                   coalesce(sum(first_offset - reached - 1) FILTER (
                       WHERE first_offset > reached + 1 AND NOT coalesce(grant_id, grant_before) <=> grant_before
                   ), 0) AS skipped
            FROM {{covered}} GROUP BY {SHARD}
        ),
        counted AS (
            SELECT {SHARD}, count(*) FILTER (WHERE status = '{DIFFERS}') AS findings,
                   count(*) FILTER (WHERE status = '{OPEN}') AS open
            FROM {{findings}} GROUP BY {SHARD}
        ),
        broken AS (
            SELECT {SHARD}, true AS is_broken FROM {{leaves}} LEFT SEMI JOIN {{miscounted}} USING (log, leaf_index) GROUP BY {SHARD}
        ),
        joined AS (
            SELECT sums.*, sums.is_uncounted OR coalesce(broken.is_broken, false) AS is_broken, coalesce(reach.covered, 0) AS covered, coalesce(reach.gap, 0) AS gap,
                   coalesce(reach.skipped, 0) AS skipped,
                   coalesce(reach.covered - sums.crossed - sums.withheld - sums.passed_by - reach.gap, 0) AS unaccounted,
                   coalesce(counted.findings, 0) AS findings, coalesce(counted.open, 0) AS open
            FROM sums
            LEFT JOIN reach ON {same("sums", "reach")}
            LEFT JOIN counted ON {same("sums", "counted")}
            LEFT JOIN broken ON {same("sums", "broken")}
        )
        SELECT *,
               CASE WHEN findings > 0 OR unaccounted <> 0 OR is_broken THEN '{DIFFERS}'
                    WHEN is_of_version_1 THEN '{VERSION_1}'
                    WHEN NOT ({given.egress} AND {given.ingress}) THEN '{ONE_SIDE}'
                    WHEN open > 0 THEN '{OPEN}'
                    ELSE '{RECONCILED}' END AS status
        FROM joined ORDER BY {SHARD}
        """,  # noqa: S608
        leaves=leaves,
        findings=findings,
        miscounted=miscounted,
        covered=_covered(leaves),
    )


def _link(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["source_region"], row["destination_region"], row["bridge"], row["stream"]


def states_by_stream(shards: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], str]:
    """The worst status of each stream's shards, each bridge and each stream at the destination by itself: what one bridge did is said
    of no other."""
    states: dict[tuple[Any, ...], str] = {}
    for row in shards:
        key = (*_link(row), row["destination_stream"])
        states[key] = min(row["status"], states.get(key, row["status"]), key=WORST_FIRST.index)
    return states


def worst_state(row: Mapping[str, Any], states: Mapping[tuple[Any, ...], str]) -> str | None:
    """Of a register's row, by all names that its records had at the destination; None where no shard of it was listed."""
    names = row["destination_streams"] or [None]
    found = {states[key] for name in names if (key := (*_link(row), name)) in states}
    return min(found, key=WORST_FIRST.index, default=None)


def in_order(findings: DataFrame) -> DataFrame:
    """Findings in a total order: differences first, then by place."""
    return findings.orderBy(
        findings.status, *SHARD_KEY, "first_offset", "last_offset", "finding", "envelope_sha256", "egress_leaf",
        "ingress_leaf",
    )  # fmt: skip
