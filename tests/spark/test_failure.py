"""What Spark ends a report with, as words and an exit code: never a stack of Java or Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crossing_logs import DEPARTURES, START_MS, World, trust, write_world

from felix.errors import TamperError

pytest.importorskip("pyspark")
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PythonException

import audit.spark.report as reports
from audit.leaf import Leaf
from audit.spark.failure import ReportFailedError, in_words
from audit.spark.report import REFUSED_NAME, ReportRefusedError, run_report
from audit.tile import bundle_path

TASK = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/opt/audit/spark/source.py", line 410, in read
    yield from reader.read(part)
{0}
"""
CHAIN = """KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/opt/felix/storage/disk.py", line 40, in open
    return os.open(path, flags)
           ^^^^^^^^^^^^^^^^^^^^
PermissionError: [Errno 13] Permission denied: '/logs/egress/tile/entries/000'
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TASK.format(CHAIN), "PermissionError: [Errno 13] Permission denied: '/logs/egress/tile/entries/000'."),
        (TASK.format("MemoryError: "), "MemoryError: ."),
        ("Job aborted due to stage failure: lost.\n\nJVM stacktrace:\norg.apache.spark.SparkException", "Job aborted due to stage failure: lost."),
        ("", "Spark did not say why."),
    ],
)  # fmt: skip
def test_what_keeps_a_report_from_being_made_is_said_in_one_line(text: str, said: str) -> None:
    for error in (PythonException(text), Py4JNetworkError(text)):
        told = in_words(error)
        assert isinstance(told, ReportFailedError) and told.sentence == f"No report was made: {said}"
    long = in_words(PythonException("x" * 10_000))
    assert long is not None and len(long.sentence) < 500


def test_a_log_that_does_not_hold_is_no_failure_of_spark() -> None:
    for name in ("felix.errors.TamperError", "audit.errors.RolledBackError"):
        told = in_words(PythonException(TASK.format(f"{name}: Leaf 7 changed.")))
        assert isinstance(told, TamperError) and told.sentence == "Leaf 7 changed."
    assert in_words(ValueError("felix.errors.TamperError: x")) is None


@pytest.mark.spark
def test_a_log_that_changes_while_its_records_are_compared_is_refused(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(leaves: list[Leaf]) -> list[Leaf]:
        entries = bytearray(leaves[0].entries)
        entries[30] ^= 1
        return [Leaf(leaves[0].header, bytes(entries)), *leaves[1:]]

    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    world.batch(DEPARTURES, 0, START_MS, 5, withheld=0.0, change=other)
    logs = write_world(tmp_path, world)
    compare = reports.compare_records

    def later(*args: Any) -> Any:
        bundle = logs[1] / bundle_path(0, sum(map(len, world.ingress)))
        data = bytearray(bundle.read_bytes())
        data[-1] ^= 1
        bundle.write_bytes(data)
        return compare(*args)

    monkeypatch.setattr(reports, "compare_records", later)
    with pytest.raises(ReportRefusedError, match="it changed meanwhile, or is served differently"):
        run_report(logs, tmp_path / "out", trust=trust(), session=spark)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [REFUSED_NAME]
