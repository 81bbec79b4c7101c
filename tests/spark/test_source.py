"""The data source in Spark: rows, entries, and damage found where it is read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from audit_log import trust
from crossing_logs import read_leaves

from audit.leaf import LEAF_COLUMNS, leaf_row
from audit.spark.report import _read
from audit.spark.verification import open_log

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def reader(spark: Any) -> Any:
    from audit.spark.source import AuditSource

    spark.dataSource.register(AuditSource)
    return spark.read.format("felix_audit")


def test_every_leaf_is_a_row_with_its_fields(reader: Any, logs: list[Path]) -> None:
    names = [name for name, _ in LEAF_COLUMNS]
    rows = reader.option("path", str(logs[0])).option("bundles", "1").load().orderBy("leaf_index").collect()
    leaves = read_leaves(logs[0])
    assert [row["leaf_index"] for row in rows] == list(range(len(leaves)))
    for row, leaf in zip(rows, leaves, strict=True):
        expected = leaf_row(leaf)
        found = row.asDict(recursive=True)
        if expected["lineage"] is not None:
            expected["lineage"] = [
                dict(zip(("field", "action", "output"), rule, strict=True)) for rule in expected["lineage"]
            ]
        assert {name: found[name] for name in names} == expected


def test_entries_come_only_when_they_are_asked_for(reader: Any, logs: list[Path], spark: Any) -> None:
    read = spark.read.format("felix_audit").option("path", str(logs[1]))
    assert "entries" not in read.load().columns
    frame = read.option("entries", "true").load().where("entries IS NOT NULL")
    listed = (
        frame.selectExpr("inline(entries)")
        .selectExpr("count(*) AS records", "sum(size) AS bytes")
        .collect()[0]
    )
    leaves = read_leaves(logs[1])
    assert listed["records"] == sum(leaf.entry_count for leaf in leaves)
    assert listed["bytes"] == sum(leaf.header.record_bytes for leaf in leaves if leaf.entries)


def test_a_schema_without_columns_or_with_unknown_ones_is_refused(spark: Any, logs: list[Path]) -> None:
    from pyspark.sql.types import StructType

    for schema, problem in ((StructType(), "no column of"), ("leafindex bigint", "no column 'leafindex'")):
        with pytest.raises(Exception, match=problem):
            spark.read.format("felix_audit").option("path", str(logs[0])).schema(schema).load().count()


def test_a_prefix_can_be_read(spark: Any, logs: list[Path]) -> None:
    assert (
        spark.read.format("felix_audit").option("path", str(logs[0])).option("size", "7").load().count() == 7
    )


def test_damage_ends_the_job_by_default_and_is_a_row_where_asked(
    spark: Any, logs: list[Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(logs[0], tmp_path / "log"))
    bundle = path / "tile/entries/000"
    data = bytearray(bundle.read_bytes())
    data[-5] ^= 1
    bundle.write_bytes(data)
    read = spark.read.format("felix_audit").option("path", str(path))
    with pytest.raises(Exception, match=r"Leaf 255 .* is not what was logged"):
        read.load().count()
    bad = read.option("tampered", "rows").load().where("problem IS NOT NULL").collect()
    assert [(row["leaf_index"], row["kind"]) for row in bad] == [(255, None)]


def test_rows_have_the_name_that_was_verified_whatever_the_checkpoint_says_by_then(
    spark: Any, logs: list[Path], tmp_path: Path
) -> None:
    """Whoever serves two logs by URL gives the one the other's checkpoint once both were verified."""
    paths = [Path(shutil.copytree(path, tmp_path / path.name)) for path in logs]
    opened = [open_log(str(path), trust()) for path in paths]
    notes = [(path / "checkpoint").read_bytes() for path in paths]
    for path, note in zip(paths, reversed(notes), strict=True):
        (path / "checkpoint").write_bytes(note)
    rows = _read(spark, opened).select("log", "leaf_index", "problem", "side").collect()
    for log, path in zip(opened, logs, strict=True):
        assert [
            (row["leaf_index"], row["side"])
            for row in rows
            if row["log"] == log.checkpoint.origin and row["problem"] is None
        ] == [(index, leaf.header.side.name.lower()) for index, leaf in enumerate(read_leaves(path))]
