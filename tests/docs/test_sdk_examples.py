"""The programs under examples/sdk/ run, in the order of their README, against a region made by the command line."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.command_mesh import felix_command
from warm.commands import warm_script

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "sdk"
RUN_S = 60


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        warm_script(*command), env=environment, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    held = {**os.environ, "FELIX_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    felix_command(
        tmp_path, "region", "init", "us-east", "--mesh", "acme", "--listen", "127.0.0.1:0", "--health", "none"
    )
    felix_command(tmp_path, "region", "up", "us-east", "--detach")
    try:
        yield held
    finally:
        felix_command(tmp_path, "region", "down", "us-east")


def test_programs_run(environment: dict[str, str]) -> None:
    named = re.findall(r"^\| `([\w.]+)` \|", (PROGRAMS / "README.md").read_text(), re.M)
    assert set(named) == {path.name for path in PROGRAMS.glob("*.py")}
    said = {name: run(environment, str(PROGRAMS / name)) for name in named}
    assert "1000 readings published" in said["publish.py"]
    assert "'s0': 143" in said["subscribe.py"]
    assert '{"sensor": "s0", "value": -1}' in said["in_a_script.py"]
