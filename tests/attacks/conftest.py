"""For attacks: how many cases to try, where random numbers come from, and what was tried, counted and printed at the end.

Each file here takes one finding, or one claim, and tries to break it with the keys and the place of the party that
would gain. `FELIX_ATTACK_SCALE` multiplies the cases of a run (1 in `make test` and in `make attack`), `FELIX_ATTACK_SEED` draws others
(chance.py). `make attack` repeats those that draw, for as long as there is time (run.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.chance import Chance, chance_of_run
from attacks.tallies import BEGAN, FOLDER, Phase, claims, counts, encode, tried

SCALE = "FELIX_ATTACK_SCALE"
RECORD = "FELIX_ATTACK_RECORD"
"""Names a file to which each phase of each test is written; the summary is then left to whoever reads it."""
PLAN = "FELIX_ATTACK_PLAN"
"""Names a file with a Plan."""
TALLY, DRAWS = "tally", "draws"

Tally = Callable[[str, int], None]


class Plan(msgspec.Struct, frozen=True):
    """How long a round may take."""

    until_s: float
    """Unix time"""
    seconds: dict[str, float]
    """that are left for each test"""


@pytest.fixture(scope="session")
def attack_scale() -> int:
    """How many times the quick number of cases are tried."""
    return max(1, int(os.environ.get(SCALE, "1")))


@pytest.fixture(scope="session")
def chance() -> Chance:
    """Random numbers: `chance(75)` are the same in each run, unless the run has a seed. Whoever takes it is repeated by `make attack`."""
    return chance_of_run()


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Say what was tried and how often: `tally("envelopes refused", 812)`. It is printed at the end of the run."""

    def count(what: str, number: int) -> None:
        assert number > 0, f"nothing was tried: {what}"
        record_property(TALLY, (what, number))

    return count


class Recorder:
    """Keeps what pytest says of the attacks, and writes it down at once where that is asked for."""

    def __init__(self, path: str | None) -> None:
        self.phases: list[Phase] = []
        self._path = None if path is None else Path(path)

    def _keep(self, phase: Phase) -> None:
        if FOLDER not in phase.test.partition("::")[0]:
            return
        self.phases.append(phase)
        if self._path is not None:
            with self._path.open("ab") as record:
                record.write(encode(phase))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._keep(Phase(nodeid, BEGAN))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = report.user_properties
        counted: list[Any] = [said for name, said in told if name == TALLY and report.when == "call"]
        self._keep(
            Phase(
                report.nodeid,
                report.when or "",
                report.outcome,
                report.duration,
                tuple((what, number) for what, number in counted),
                any(name == DRAWS for name, _ in told),
            )
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What was tried, file by file, and the table."""
        tests = tried(self.phases)
        if self._path is not None or not tests:
            return
        terminalreporter.section("what the attacks tried")
        for line in counts(tests):
            terminalreporter.write_line(line.text, red=line.is_bad)
        terminalreporter.section("what the evidence states, and against whom (docs/claims.md)")
        for line in claims(tests):
            terminalreporter.write_line(line.text, red=line.is_bad)


def pytest_configure(config: pytest.Config) -> None:
    """With xdist, the process that hands out tests hears of all of them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(os.environ.get(RECORD)), "felix-attacks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark which tests draw, in what is reported of them."""
    for item in items:
        if "chance" in getattr(item, "fixturenames", ()):
            item.user_properties.append((DRAWS, True))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Do not begin what would not end in time."""
    if path := os.environ.get(PLAN):
        plan = msgspec.json.decode(Path(path).read_bytes(), type=Plan)
        if time.time() + plan.seconds.get(item.nodeid, 0) > plan.until_s:
            pytest.skip("would not end in time")
