"""In which order test files are run, and which of them by the same process: for `pytest -n`.

A file's tests stay together, since they share brokers and regions; so do the tests that use Spark, of all files, in one process, since each process
starts a JVM of its own, and a JVM's first report costs as much as five later ones. `make test-slow` is mostly such tests, and has two of these processes.
What costs most is begun first, so that at the end no process works alone at a long file.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import slow_runs

COSTS = Path(__file__).with_name("costs.json")
"""Seconds by unit, where it takes some; `FELIX_RECORD_COSTS=1 make test` writes it anew."""
COST_LEAST_S = 2.0
"""Shorter files fill the gaps in whatever order."""
SPARK = "tests with Spark"
SPARK_ELSEWHERE = "tests with Spark outside tests/spark" if slow_runs.IS_SLOW else SPARK
WITH_SPARK = {SPARK, SPARK_ELSEWHERE}
UNITS = {
    SPARK: ("tests/spark/",),
    "tests/e2e": ("tests/e2e/test_crossing.py", "tests/e2e/test_refusal.py"),
}
"""Files that share more than a process: Spark's session, as all other tests do that take the `spark` fixture, and the mesh of tests/e2e/conftest.py."""
TAKES_SPARK = re.compile(r"^(def |async def | {4}).*\bspark: \w", re.M)
SHARES_MORE = "scope="
"""In the text of a file with fixtures that several of its tests share: these stay with those of them that take Spark."""
ROOT = Path(__file__).parents[1]


def unit_of(nodeid: str) -> str:
    """What is run by one process without a pause: a file, or several, or parts of them, that share what is dear."""
    path, _, test = nodeid.partition("::")
    unit = next((unit for unit, files in UNITS.items() if path.startswith(files)), None)
    if unit is not None:
        return unit
    taking = _taking_spark(path)
    return SPARK_ELSEWHERE if taking is None or test.partition("[")[0] in taking else path


@cache
def _taking_spark(path: str) -> frozenset[str] | None:
    """The tests of a file that take Spark, themselves or by a fixture of the file; None: all belong together, since fixtures are shared.
    Read from its text: who hands out tests knows no fixtures."""
    text = (ROOT / path).read_text()
    if not TAKES_SPARK.search(text):
        return frozenset()
    if SHARES_MORE in text:
        return None
    functions = [
        each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    takes = {each.name: {arg.arg for arg in each.args.args + each.args.kwonlyargs} for each in functions}
    found = {"spark"}
    while more := {name for name, taken in takes.items() if taken & found} - found:
        found |= more
    return frozenset(found)


def costs() -> dict[str, float]:
    """Seconds by unit as they were recorded."""
    held: dict[str, float] = json.loads(COSTS.read_text())
    return held


def record(durations: Iterable[tuple[str, float]]) -> None:
    """Write COSTS anew for what ran, from the seconds of each phase of each test; what did not run keeps its cost."""
    found: Counter[str] = Counter()
    for nodeid, seconds in durations:
        found[unit_of(nodeid)] += seconds  # type: ignore[assignment]
    rows = Counter(costs() | {unit: round(seconds) for unit, seconds in found.items()})
    kept = {unit: seconds for unit, seconds in rows.most_common() if seconds >= COST_LEAST_S}
    COSTS.write_text(json.dumps(kept, indent=1) + "\n")
