"""A streaming query whose driver is killed again and again while publishing goes on: every record once, in both sinks."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from long_runs import count
from shared_spark import SLOW_WORKER, shared_session
from slow_runs import only_slow
from spark import two_sinks
from spark_region import SparkRegion

pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyspark")

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.fault]

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("FELIX_SPARK_KILLS", count(1, 5)))
STEP_S = 150.0
"""Far longer than a driver takes to start and to write something, on a busy machine."""
DRIVERS_MAX = 3
"""How many drivers may be started for a step. One that stands still is killed as any other; the run's warnings then have what its threads did."""


class Driver:
    """`two_sinks.py` with everything that it starts, in a process group of its own."""

    def __init__(self, region: SparkRegion, stream: str, folder: Path) -> None:
        script = Path(__file__).with_name("two_sinks.py")
        self.log = folder / "driver.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(region.home), stream, str(folder), "run"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL for driver, JVM and workers at once; nothing where they have ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text()[-4000:]

    def stands_still(self) -> str:
        """Its processes, and the threads of those that tell: Python by `two_sinks.py`, Java by itself."""
        found, logs = list[str](), [self.log]
        with suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            for each in (top, *top.children(recursive=True)):
                with suppress(psutil.Error):
                    words = " ".join(each.cmdline())[:200]
                    found.append(f"{each.pid} of {each.ppid()}, {each.status()}, {each.cpu_times()}: {words}")
                    if each == top:
                        each.send_signal(signal.SIGUSR1)
                    elif each.name() == "java":
                        each.send_signal(signal.SIGQUIT)
                        logs.append(Path(f"/proc/{each.pid}/fd/1"))
        time.sleep(5)
        for path in logs:
            with suppress(OSError):
                found.append(path.read_text(errors="replace")[-60_000:])
        return "\n".join(found)


def written(folder: Path) -> int:
    """Records in the table so far; 0 before there is one."""
    try:
        with sqlite3.connect(f"file:{folder / 'table.sqlite'}?mode=ro", uri=True) as database:
            found: int = database.execute("SELECT count(*) FROM records").fetchone()[0]
            return found
    except sqlite3.OperationalError:
        return 0


@contextmanager
def publishing(region: SparkRegion, stream: str) -> Iterator[list[int]]:
    """Numbers from 0 on, in small steps, until the block ends; then the list holds how many there are."""
    stop, count = threading.Event(), [0]

    def publish() -> None:
        while not stop.wait(0.02):
            region.publish(stream, count[0], count[0] + 10)
            count[0] += 10

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()


def run_and_kill(region: SparkRegion, stream: str, folder: Path, after_s: float, count: list[int]) -> None:
    """Let a driver write something, then kill it `after_s` later, wherever it is."""
    before = written(folder)
    for _ in range(DRIVERS_MAX):
        driver = Driver(region, stream, folder)
        try:
            if has_written(driver, folder, before + 500):
                time.sleep(after_s)
                return
            if driver.process.poll() is None:
                state = f"{written(folder) - before} written since it started, {count[0]} published"
                warnings.warn(f"A driver stood still: {state}\n{driver.stands_still()}", stacklevel=1)
            else:
                assert SLOW_WORKER in driver.said(), driver.said()
        finally:
            driver.kill()
    raise AssertionError(f"{DRIVERS_MAX} drivers wrote nothing:\n{driver.said()}")


def has_written(driver: Driver, folder: Path, wanted: int) -> bool:
    """Wait until the table has so many records. False: the driver has ended, or stands still."""
    limit = time.monotonic() + STEP_S
    while written(folder) < wanted:
        if driver.process.poll() is not None or time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def drain(region: SparkRegion, stream: str, folder: Path, spark: Any) -> None:
    """Let a driver read all there is: in this process, where Spark has started, from the checkpoints of those that were killed."""
    limit = time.monotonic() + STEP_S
    while True:
        try:
            with shared_session(spark):
                return two_sinks.main(str(region.home), stream, folder, "drain")
        except SystemExit as ended:
            if SLOW_WORKER not in str(ended) or time.monotonic() > limit:
                raise


@only_slow
@pytest.mark.timeout(STEP_S * (DRIVERS_MAX * KILLS + 2))
def test_nothing_is_lost_or_doubled_however_often_the_driver_is_killed(
    region: SparkRegion, tmp_path: Path, spark: Any
) -> None:
    stream, chance = region.stream(), random.Random(7)
    with publishing(region, stream) as count:
        for _ in range(KILLS):
            run_and_kill(region, stream, tmp_path, chance.random(), count)
    total = count[0]
    drain(region, stream, tmp_path, spark)

    with sqlite3.connect(tmp_path / "table.sqlite") as database:
        upserted = database.execute("SELECT shard, place, text FROM records ORDER BY shard, place").fetchall()
    in_files = files_that_count(tmp_path / "out")
    ends = {each.shard: each.high_watermark for each in region.client.describe_stream(stream).state}
    places = [(shard, offset) for shard in sorted(ends) for offset in range(ends[shard])]
    for found in (upserted, in_files):
        assert len(found) == total
        assert [(shard, offset) for shard, offset, _ in found] == places
        assert sorted(int(text) for _, _, text in found) == list(range(total))


def files_that_count(folder: Path) -> list[tuple[int, int, str]]:
    """The rows of the files that the sink committed, as any reader of its metadata counts them."""
    log, names = folder / "_spark_metadata", {}
    for entry in log.iterdir():
        if entry.name.startswith(".") or not entry.name.split(".")[0].isdigit():
            continue
        for line in entry.read_text().splitlines()[1:]:
            held = json.loads(line)
            names[held["path"]] = None
    rows: list[tuple[int, int, str]] = []
    for name in names:
        table = pq.read_table(name.removeprefix("file://"))
        rows += zip(*(table.column(each).to_pylist() for each in ("shard", "offset", "text")), strict=True)
    return sorted(rows)
