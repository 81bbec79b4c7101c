"""In which order test files are run, and which of them by the same process: for `pytest -n`.

A file's tests stay together, since they share brokers and regions; so do the files that use Spark, in two processes, since each starts a JVM of
its own, and a JVM's first queries cost most. What costs most is begun first, so that at the end no process works alone at a long file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

COSTS = Path(__file__).with_name("costs.json")
"""Seconds by unit, where it takes some; `FELIX_RECORD_COSTS=1 make test` writes it anew."""
COST_LEAST_S = 2.0
"""Shorter files fill the gaps in whatever order."""
SPARK, SPARK_ELSEWHERE = WITH_SPARK = "tests/spark", "tests with Spark elsewhere"
"""Two halves that take about as long."""
UNITS = {
    SPARK: ("tests/spark/",),
    "tests/e2e": ("tests/e2e/test_crossing.py", "tests/e2e/test_refusal.py"),
}
"""Files that share more than a process: Spark's session, as all other files do that take the `spark` fixture, and the mesh of tests/e2e/conftest.py."""
TAKES_SPARK = re.compile(r"^(def |async def | {4}).*\bspark: \w", re.M)
ROOT = Path(__file__).parents[1]


def unit_of(nodeid: str) -> str:
    """What is run by one process without a pause: a file, or several that share what is dear."""
    path = nodeid.split("::", 1)[0]
    return next((unit for unit, files in UNITS.items() if path.startswith(files)), None) or _alone(path)


@cache
def _alone(path: str) -> str:
    """The unit of a file that no unit names. Read from its text: who hands out tests knows no fixtures."""
    return SPARK_ELSEWHERE if TAKES_SPARK.search((ROOT / path).read_text()) else path


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
