"""The program under examples/spark/ runs, twice, and its sums are those of the stream."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.test_sdk_examples import ROOT, environment

PROGRAMS = ROOT / "examples" / "spark"
RUN_S = 240
"""Far more than Spark takes to start and to add up 5,000 orders, on a busy machine."""
__all__ = ["environment"]

pytest.importorskip("pyspark")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(2 * RUN_S)
def test_a_second_run_adds_the_next_day(environment: dict[str, str], tmp_path: Path) -> None:
    named = re.findall(r"^\| `([\w.]+)` \|", (PROGRAMS / "README.md").read_text(), re.M)
    assert set(named) == {path.name for path in PROGRAMS.glob("*.py")}
    for orders in (5000, 10000):
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / "revenue.py"), str(tmp_path / "state")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"in the stream: {orders} orders" in done.stdout
