"""The program under examples/spark/ runs, twice, and its sums are those of the stream."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from docs.test_sdk_examples import ROOT, environment
from shared_spark import shared_session
from slow_runs import only_slow

PROGRAMS = ROOT / "examples" / "spark"
__all__ = ["environment"]

pytest.importorskip("pyspark")


@pytest.mark.slow
@pytest.mark.spark
@only_slow
def test_a_second_run_adds_the_next_day(
    environment: dict[str, str],
    tmp_path: Path,
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a program, but in this process: Spark has started here already."""
    named = re.findall(r"^\| `([\w.]+)` \|", (PROGRAMS / "README.md").read_text(), re.M)
    assert set(named) == {path.name for path in PROGRAMS.glob("*.py")}
    monkeypatch.setattr(sys, "argv", ["revenue.py", str(tmp_path / "state")])
    for orders in (5000, 10000):
        with shared_session(spark, FELIX_HOME=environment["FELIX_HOME"]), pytest.raises(SystemExit) as end:
            runpy.run_path(str(PROGRAMS / "revenue.py"), run_name="__main__")
        said = capsys.readouterr().out
        assert end.value.code == 0, said
        assert f"in the stream: {orders} orders" in said
