"""Logs of random worlds as the report's queries see them: many logs in one Spark job, and which leaves it calls breaches.

Each log is a report of its own: grants and terms hashes get the log's name before them, so that no log's documents count for
another. The rows are those that the source makes, the queries those of `audit.spark`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from attacks import world_logs

from audit.leaf import LEAF_COLUMNS, Leaf, Side, leaf_row
from audit.spark import exceptions, register
from audit.spark.agreements import _NAMES, LogDocuments, signed_frames
from audit.spark.begun_again import BEGUN_AGAIN
from audit.verify import OVER_BUDGET

_ASKED: Final = frozenset(
    [
        "kind",
        "side",
        "time_ms",
        "source_region",
        "destination_region",
        "bridge",
        "stream",
        "grant_id",
        "terms_hash",
        "version",
        "records",
        "first_offset",
        "envelope_sha256",
        "last_offset",
        "actor",
        "action",
        "rule",
        "code",
        "sentence",
        "reason",
        "gap",
        "key_id",
        "path",
        "receipt",
        "document",
    ]
)
"""What the queries of exceptions read of a leaf."""
SCHEMA: Final = "log string, leaf_index bigint, " + ", ".join(
    f"{name} {kind}" for name, kind in LEAF_COLUMNS if name in _ASKED
)
_SCOPED: Final = ("grant_id", "terms_hash")

Breaches = dict[tuple[str, int], set[str]]
"""What a leaf is called, by log and index."""


class Logs:
    """Logs to report on, until `breaches` is asked."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._terms: list[tuple[Any, ...]] = []
        self._revocations: list[tuple[str, str, int]] = []
        self._story: list[tuple[str, int, str, str]] = []
        self.count = 0

    def add(
        self,
        name: str,
        leaves: Sequence[Leaf],
        documents: LogDocuments,
        story: Iterable[tuple[int, str]],
        over_budget: Iterable[tuple[int, str]],
    ) -> None:
        """One log. `documents`: what its documents say; `story`: what the verifier found, by leaf; `over_budget`: what it found about budgets."""

        def scoped(row: dict[str, Any]) -> dict[str, Any]:
            return row | {key: f"{name} {row[key]}" for key in _SCOPED if row[key]} | {"log": name}

        for index, leaf in enumerate(leaves):
            row = leaf_row(leaf)
            self._rows.append(scoped({key: row[key] for key in _ASKED} | {"leaf_index": index}))
        self._terms += [
            tuple(scoped(dict(zip(_NAMES, row, strict=True))).values()) for row in documents.terms
        ]
        self._revocations += [(name, f"{name} {grant}", index) for _, grant, index in documents.revocations]
        self._story += [(name, index, sentence, exceptions.RULE_BROKEN) for index, sentence in story]
        self._story += [(name, index, sentence, OVER_BUDGET) for index, sentence in over_budget]
        self.count += 1

    def breaches(self, spark: Any) -> Breaches:
        """The breaches that the report lists, leaf by leaf. The logs are forgotten."""
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StructType

        schema = to_arrow_schema(StructType.fromDDL(SCHEMA), timezone="UTC")
        rows = spark.createDataFrame(pa.Table.from_pylist(self._rows, schema=schema))
        # One log each and one side: nothing is announced again that another log could have an answer to.
        signed = signed_frames(spark, self._terms, self._revocations, {})
        leaves = (
            register.prepare(rows, signed.terms).selectExpr("*", f"false AS {BEGUN_AGAIN}").localCheckpoint()
        )
        columns = "log string, leaf_index bigint, sentence string, exception string"
        story = spark.createDataFrame(self._story, columns)
        found: Breaches = defaultdict(set)
        listed = exceptions.found(leaves, leaves, signed, story).where(f"severity = '{exceptions.BREACH}'")
        for row in listed.select("log", "leaf_index", "exception").collect():
            found[row["log"], row["leaf_index"]].add(row["exception"])
        self.__init__()  # type: ignore[misc]
        return dict(found)


def wanted(
    world: dict[str, Any],
    log: dict[str, Any],
    at: int,
    now: int,
    crossing: dict[str, Any],
    may_stand: bool,
    has_terms: Sequence[bool],
) -> set[str]:
    """What the report must call this crossing, as docs/reports.md says; nothing, where it may stand. `has_terms`: of each grant,
    `world_logs.has_terms`."""
    if may_stand:
        return set()
    named = set()
    if log["side"] is Side.EGRESS:
        number = crossing["grant"]
        terms = world["grants"][number]["terms"]
        if crossing["other_hash"] or not has_terms[number]:
            named.add("crossed-without-terms")
        else:
            named |= {"crossed-after-expiry"} if now >= terms["expires"] else set()
            named |= {"crossed-before-start"} if now < terms["not_before"] else set()
        if world_logs.is_revoked(world, log, at, number):
            named.add("crossed-after-revocation")
    return named or {"rule-broken"}
