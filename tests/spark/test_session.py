"""Sessions: the settings, what travels to executors, and a master that is none. Spark starts on the
wheel's Java in tests/docs/test_getting_started.py."""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from slow_runs import only_slow

from audit.spark.session import (
    SHIPPED_PACKAGES,
    SparkStartError,
    _launch_environment,
    default_master,
    is_local,
    open_session,
    quiet_gateway,
    settings,
    zip_packages,
)
from felix.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]


def test_a_jvm_that_is_gone_leaves_no_stack_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    py4j = pytest.importorskip("py4j.java_gateway")
    # A session of this process is open in other tests, and keeps the log as quiet.
    monkeypatch.setattr(logging.getLogger(), "filters", [])

    def told(path: str) -> None:
        record = logging.LogRecord(
            "root", logging.ERROR, path, 1, "Exception while sending command.", (), None
        )
        logging.getLogger().handle(record)

    with quiet_gateway():
        told(py4j.__file__)
        assert not caplog.records
        told(__file__)
    told(py4j.__file__)
    assert len(caplog.records) == 2


def test_a_local_session_listens_on_loopback_alone(tmp_path: Path) -> None:
    chosen = settings("local[2]", tmp_path)
    assert chosen["spark.driver.bindAddress"] == chosen["spark.driver.host"] == "127.0.0.1"
    assert chosen["spark.ui.enabled"] == chosen["spark.eventLog.enabled"] == "false"
    assert chosen["spark.sql.session.timeZone"] == "UTC"


def test_a_user_whom_the_machine_does_not_name_has_a_name_and_a_home_for_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, where the process runs under a number alone: Java has `?` for a home then, and Spark does not start."""
    for name in ("HADOOP_USER_NAME", "SPARK_USER"):
        monkeypatch.delenv(name, raising=False)
    home = f"-Duser.home={tmp_path}"
    assert home not in settings("local[2]", tmp_path)["spark.driver.extraJavaOptions"].split()
    assert "SPARK_USER" not in _launch_environment(tmp_path, "local[2]")

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert home in settings("local[2]", tmp_path)["spark.driver.extraJavaOptions"].split()
    chosen = _launch_environment(tmp_path, "local[2]")
    assert chosen["HADOOP_USER_NAME"] == chosen["SPARK_USER"] == "felix"
    monkeypatch.setenv("HADOOP_USER_NAME", "reports")
    assert _launch_environment(tmp_path, "local[2]")["HADOOP_USER_NAME"] == "reports"


def test_a_cluster_keeps_its_own_addresses_and_partitions(tmp_path: Path) -> None:
    chosen = settings("spark://head:7077", tmp_path, {"spark.executor.memory": "2g"}, small=True)
    assert chosen["spark.master"] == "spark://head:7077"
    assert chosen["spark.executor.memory"] == "2g"
    assert not {"spark.driver.host", "spark.local.dir", "spark.sql.shuffle.partitions"} & set(chosen)


@pytest.mark.parametrize(
    ("master", "local"), [("local", True), ("local[4]", True), ("spark://h:1", False), ("yarn", False)]
)
def test_masters_of_this_machine_are_told_apart(master: str, local: bool) -> None:
    assert is_local(master) is local
    assert is_local(default_master())


def test_what_executors_need_travels_as_one_zip(tmp_path: Path) -> None:
    first, second = zip_packages(tmp_path / "a.zip"), zip_packages(tmp_path / "b.zip")
    assert first.read_bytes() == second.read_bytes()
    names = zipfile.ZipFile(first).namelist()
    assert {name.partition("/")[0] for name in names} == set(SHIPPED_PACKAGES)
    assert {"audit/spark/source.py", "audit/spark/page.css", "felix/errors.py"} <= set(names)


@pytest.mark.spark
def test_an_executor_finds_the_source_in_the_zip_alone(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    archive = zip_packages(tmp_path / "felix.zip")
    script = (
        f"import sys; sys.path.insert(0, {str(archive)!r}); import audit.spark.source as s; print(s.__file__)"
    )
    shown = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert shown.stdout.startswith(str(archive))


@pytest.mark.spark
def test_a_second_context_in_one_process_is_refused(spark: Any) -> None:
    with pytest.raises(RequestError, match="already has a Spark context"), open_session():
        pass


def run_script(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )


REFUSED = """
from audit.spark.session import open_session
from felix.errors import FelixError
try:
    with open_session("nonsense://127.0.0.1:1", small=True):
        pass
except FelixError as error:
    print(type(error).__name__, error.sentence, error.hint)
"""


@only_slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_master_that_is_none_is_an_error_with_what_to_do() -> None:
    said = run_script(REFUSED)
    assert said.stdout.startswith(SparkStartError.__name__), said.stdout + said.stderr
    assert "nonsense://127.0.0.1:1" in said.stdout
