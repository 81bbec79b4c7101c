"""For all tests: where a run must not skip for want of a system part, such a skip fails it."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schedule
import slow_runs
from hypothesis import HealthCheck, settings
from long_runs import IS_LONG
from processor_time import recorded
from rewritten import compile_share
from slow_disk import slow_down
from slow_news import hear_late
from swept import note, sweep
from swept import tmp_path as tmp_path

from felix.collector import collector_paused

# `make test` tries the same examples everywhere, also where Hypothesis sees a CI; `make test-long` tries others each time.
# A busy machine generates slowly.
settings.register_profile(
    "felix",
    deadline=None,
    print_blob=True,
    derandomize=not IS_LONG,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("felix")
slow_down()
hear_late()

REQUIRE = "FELIX_REQUIRE_PARTS"
"""Set by .ci/run, which installs the parts first: Java, etcd, chromium, systemd's and Prometheus' tools, and every package of the `dev` extra."""

RECORD_COSTS = "FELIX_RECORD_COSTS"
"""Set to write down what each file costs in `make test` (schedule.COSTS)."""

WANTED = (
    "could not import",
    "no chromium",
    "no etcd",
    "no etcdctl",
    "no Java",
    "no systemd-analyze",
    "no promtool",
)
"""How skips begin or what they contain that a full machine must not have."""

_missing: list[str] = []


@pytest.fixture(autouse=True)
def felix_log_level() -> Iterator[None]:
    """Commands that a test calls in this process set how much is logged; the next test starts as if there had been none."""
    logger = logging.getLogger("felix")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The process's Spark session: it can have no second one, and starting it takes seconds."""
    pytest.importorskip("pyspark")
    from audit.spark.java import JavaError, find_java
    from audit.spark.session import open_session

    try:
        find_java()
    except JavaError as error:
        pytest.skip(f"no Java that Spark can use: {error}")
    with open_session("local[2]", small=True) as session:
        yield session


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before all tests are collected by several processes: each compiles some of them."""
    worker = getattr(session.config, "workerinput", None)
    if worker is not None and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        compile_share(session.config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for cycles only among what tests make. Of 7,000 tests and all that they import nothing becomes garbage, and looking at it
    each time took a twentieth of what the tests compute; each process holds all of them."""
    with collector_paused():
        yield
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those of `make test`, or those of `make test-slow`. Unit by unit, what costs most first; within a unit the order stays."""
    slow_runs.choose(config, items)
    costs, unit = schedule.costs(), schedule.unit_of
    strays = {
        path
        for item in items
        if "spark" in getattr(item, "fixturenames", ())
        and (path := unit(item.nodeid)) not in schedule.WITH_SPARK
    }
    if strays:
        raise pytest.UsageError(
            f"{', '.join(sorted(strays))}: takes the `spark` fixture, and would start a JVM of its own beside that of {schedule.SPARK}, "
            "because schedule.TAKES_SPARK does not find it in the text. Name the argument `spark: Any` where a function begins."
        )
    items.sort(key=lambda item: (-costs.get(unit(item.nodeid), 0), unit(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: hand units out in that order."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False

    class LoadUnitScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return schedule.unit_of(nodeid)

    return LoadUnitScheduling(config, log)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write down what the test takes, with what is set up for it, where that is asked for."""
    with recorded(item.nodeid):
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Remember failures, and skips that name a missing part."""
    outcome = yield
    report = outcome.get_result()
    note(item, report)
    if report.skipped and isinstance(report.longrepr, tuple) and os.environ.get(REQUIRE):
        reason = report.longrepr[2]
        if any(wanted in reason for wanted in WANTED):
            _missing.append(f"{item.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the run where a part was missing; remove what passed leaves behind."""
    sweep()
    if _missing and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which part was missing, and where; and keep what each file cost, where that is asked for."""
    for line in _missing:
        terminalreporter.write_line(f"skipped where {REQUIRE} is set: {line}", red=True)
    if os.environ.get(RECORD_COSTS) and not slow_runs.IS_SLOW:
        reports = [each for kind in terminalreporter.stats.values() for each in kind]
        schedule.record(
            (each.nodeid, each.duration) for each in reports if isinstance(each, pytest.TestReport)
        )
