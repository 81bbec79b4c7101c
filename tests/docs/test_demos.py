"""The programs under examples/demos/ run, small, and reconcile; one that does not reconcile says so with its exit code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from long_runs import only_long
from warm.commands import warm_command, warm_script

ROOT = Path(__file__).parents[2]
DEMOS = ROOT / "examples" / "demos"
SHARED = "own_region.py"
SMALL = {
    "slow_consumer.py": ["1000"],
    "rights_live.py": ["50"],
    "two_tenants.py": ["50"],
    "restart.py": ["1"],
    "cache_watchers.py": ["450"],
    "orders_pipeline.py": ["150", "2"],
}
QUICK = ("rights_live.py", "orders_pipeline.py")
"""Those that every run plays; `make test-long` plays all."""
RUN_S = 240
"""Far more than any of them takes, on a busy machine."""
RUN = """
import json, runpy, sys
import own_region
own_region.FELIX, sys.argv = json.loads(sys.argv[1]), sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A demo as it stands, with commands whose imports are done."""


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(DEMOS))), "COLUMNS": "120"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)


@pytest.mark.parametrize(
    "program", [pytest.param(each, marks=[] if each in QUICK else only_long) for each in SMALL]
)
def test_demo_reconciles(program: str, tmp_path: Path) -> None:
    runner = tmp_path / "run.py"
    runner.write_text(RUN)
    done = run(*warm_script(runner, json.dumps(warm_command()), str(DEMOS / program), *SMALL[program]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every figure reconciles." in done.stdout


def test_a_figure_that_does_not_reconcile_is_the_exit_code() -> None:
    done = run(
        sys.executable,
        "-c",
        "import own_region as o; s = o.Summary('t'); s.must('records', 9, 10); exit(s.end())",
    )
    assert done.returncode == 6
    assert "1 figures do not reconcile" in done.stdout


def test_each_demo_is_in_the_index_with_its_page() -> None:
    programs = {path.name for path in DEMOS.glob("*.py")} - {SHARED}
    listed = dict(re.findall(r"^\| `([\w.]+)` \| \[([\w.-]+)\]", (DEMOS / "README.md").read_text(), re.M))
    assert set(listed) == programs == set(SMALL)
    for program, page in listed.items():
        assert page == program.replace("_", "-").replace(".py", ".md")
        assert f"make demo-{page.removesuffix('.md')}" in (DEMOS / page).read_text()
