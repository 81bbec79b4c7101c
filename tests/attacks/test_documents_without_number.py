"""Document leaves without end, as two regions may write them in good faith: the newest count in a report as the first do."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from attacks.conftest import Tally
from audit_log import EGRESS_ORIGIN, REGION_ORIGIN, trust
from long_runs import only_long

from audit.crossed import Derived
from audit.spark import agreements
from audit.spark.agreements import LogDocuments, read_signed

pytestmark = [pytest.mark.spark, only_long]

LEAVES = 200_100
"""Of one log: a word a minute for 139 days."""


def test_a_report_reads_every_document_leaf_in_order(
    spark: Any, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Leaves and signatures are left out: of each log, which indexes are read."""
    seen: dict[str, int] = {}

    def count(origin: str, leaves: Iterable[int], *_: object) -> LogDocuments:
        assert origin not in seen
        seen[origin] = 0
        for index in leaves:
            assert index == seen[origin] + 1, "in order, and none left out"
            seen[origin] += 1
        return LogDocuments([], [], {origin.encode(): Derived(b"", None)})

    monkeypatch.setattr(agreements, "_leaves", lambda _, indexes: indexes)
    monkeypatch.setattr(agreements, "rows_of", count)
    logs: Any = [
        SimpleNamespace(path="none", checkpoint=SimpleNamespace(origin=origin)) for origin in (REGION_ORIGIN, EGRESS_ORIGIN)
    ]  # fmt: skip
    leaves = spark.range(LEAVES + 2).selectExpr(
        f"if(id > 1, '{REGION_ORIGIN}', '{EGRESS_ORIGIN}') AS log",
        f"if(id > 1, {LEAVES + 2} - id, id + 1) AS leaf_index",
        "if(id = 1, 'ACK', 'STANDING') AS kind",
        "'egress' AS side",
        "2 AS version",
        "0L AS time_ms",
        "'g-none' AS grant_id",
    )
    read = read_signed(spark, leaves, logs, trust())
    assert seen == {REGION_ORIGIN: LEAVES, EGRESS_ORIGIN: 1}
    assert list(read.derived) == [EGRESS_ORIGIN.encode(), REGION_ORIGIN.encode()], (
        "what links say comes first"
    )
    tally("document leaves of a report", LEAVES + 1)
