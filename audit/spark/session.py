"""One Spark session for a report: small, local and quiet unless a master is named.

What lives here: starting and stopping PySpark. `open_session` is a context manager; inside it there is a
session, after it neither a JVM nor a temporary file is left. One session per process (Spark allows no more);
a session that somebody else started is refused rather than stopped under them.

Who may call: `audit.spark.report`, tests, notebooks.
"""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from audit.spark.java import Java, find_java, make_overlay
from felix.errors import Code, RequestError, UnavailableError
from felix.extras import MESH, install_command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHIPPED_PACKAGES: Final = ("felix", "keys", "policy", "audit")
"""What executors import to decode and verify leaves; `import-linter` keeps `audit` from needing more."""

LOCAL_CORES_MAX: Final = 8
"""A local report shares the machine with a broker; past this the driver, not the scan, is the limit."""
SHUFFLE_PARTITIONS_LOCAL: Final = 4
"""Spark's default of 200 is made for clusters; locally each partition costs about 10 ms and holds little."""
CODE_CACHE_MIB: Final = 240
"""Of address space, as a JVM has it that compiles in all tiers. One that compiles lightly has 48 by default: a session fills them with
its eighth report, and from then on drops compiled code and compiles it again."""
NAMELESS: Final = "felix"
"""Who runs a report for Spark and Hadoop, where the machine has no name for its user."""
STOP_TIMEOUT_S: Final = 20.0
"""A JVM whose input closed ends within a second or two; one that hangs is killed."""
LOG_TAIL_BYTES: Final = 4_096
"""How much of the JVM's own log is searched for the reason of a failed start."""
_START_HINT: Final = (
    "Check the master's address, and that the cluster runs the same Spark version as the pyspark here."
)

_LOGGING: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{ISO8601} %p %c{1}: %m%n%ex
"""


class SparkMissingError(RequestError):
    """PySpark, or what it needs, is not installed."""

    default_code = Code.UNSUPPORTED


class SparkStartError(UnavailableError):
    """The JVM or the cluster did not come up. The sentence quotes what it wrote."""


def is_local(master: str) -> bool:
    """True for masters that run in this process's own JVM (`local`, `local[4]`)."""
    return master.partition("[")[0] == "local"


def default_master() -> str:
    """`local[n]` with the cores this process may use, at least 2, so that a slow file does not stall the rest."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"local[{max(2, min(cores, LOCAL_CORES_MAX))}]"


def _source_root() -> Path:
    """The folder that holds the packages, whether installed or a checkout."""
    return Path(__file__).resolve().parents[2]


def zip_packages(target: Path) -> Path:
    """The Python sources that executors need, as one importable zip at `target`.

    Deterministic: same sources, same bytes. Returns `target`.
    """
    root = _source_root()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in SHIPPED_PACKAGES:
            for path in sorted((root / package).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    member = zipfile.ZipInfo(path.relative_to(root).as_posix())
                    member.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(member, path.read_bytes())
    return target


def settings(
    master: str, work: Path, extra: Mapping[str, str] | None = None, *, small: bool = False
) -> dict[str, str]:
    """Spark's settings for a report. `work` holds everything temporary; `extra` wins over what is here.

    `small`: a local job of few rows, where starting and compiling is most of the time. It then runs queries
    interpreted, on one shuffle partition, in a JVM that compiles once and lightly.
    """
    chosen = {
        "spark.app.name": "felix audit report",
        "spark.master": master,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Each query's plan is written out for a page that nobody serves: in the short form, which takes less time.
        "spark.sql.ui.explainMode": "simple",
        "spark.eventLog.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        # Sums over 64-bit counters must fail loudly, never wrap.
        "spark.sql.ansi.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.warehouse.dir": (work / "warehouse").as_uri(),
        "spark.driver.extraJavaOptions": f"-Duser.timezone=UTC -Djava.io.tmpdir={work} "
        f"-Dlog4j2.configurationFile={(work / 'log4j2.properties').as_uri()}",
    }
    if not has_name():
        chosen["spark.driver.extraJavaOptions"] += f" -Duser.home={work}"
    if is_local(master):
        chosen |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.local.dir": str(work / "local"),
            "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS_LOCAL),
            "spark.default.parallelism": str(SHUFFLE_PARTITIONS_LOCAL),
        }
    if small and is_local(master):
        chosen["spark.driver.extraJavaOptions"] += (
            f" -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize={CODE_CACHE_MIB}m -XX:+UseSerialGC"
        )
        chosen |= {
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.autoBroadcastJoinThreshold": "-1",
            "spark.sql.shuffle.partitions": "1",
            "spark.default.parallelism": "1",
        }
    return chosen | dict(extra or {})


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """PySpark reads its environment when the JVM starts; whatever was there before comes back after."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def quiet_gateway() -> Iterator[None]:
    """Py4J writes a stack into the process's log where the JVM has gone, or somebody pressed Ctrl-C, besides raising what its caller tells."""

    def is_not_its(record: logging.LogRecord) -> bool:
        return Path(record.pathname).parts[-2:] != ("py4j", "java_gateway.py")

    # It logs at the root, which asks its own filters of its own records alone.
    root = logging.getLogger()
    root.addFilter(is_not_its)
    try:
        yield
    finally:
        root.removeFilter(is_not_its)


def has_name() -> bool:
    """Whether this machine's list of users names the one of this process. In a container often none does, and Java, which looks there and
    nowhere else, has neither a name for Spark nor a home for its files: it does not start."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return True


def _launch_environment(java_home: Path, master: str) -> dict[str, str]:
    search = [str(_source_root()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    chosen = {
        "JAVA_HOME": str(java_home),
        # Workers import the same packages as the driver, from the same place.
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(search)),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # The driver plans in this Python too; a cluster whose executors have theirs elsewhere names it.
        "PYSPARK_PYTHON": sys.executable
        if is_local(master)
        else os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    if is_local(master):
        chosen["SPARK_LOCAL_IP"] = "127.0.0.1"
    if not has_name():
        chosen |= {name: os.environ.get(name, NAMELESS) for name in ("HADOOP_USER_NAME", "SPARK_USER")}
    return chosen


def _reason(log: Path, error: Exception) -> str:
    """The first line of the JVM's log that names an error, or else the first line of `error`."""
    with suppress(OSError):
        for line in log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").splitlines():
            if "Exception" in line or "Error" in line:
                return line.strip()
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require_spark() -> None:
    """Raises SparkMissingError where something of the extra `spark` is not installed, with what installs it. Loads none of Felix' own
    modules that need it: call it before them."""
    missing = []
    for module in ("pyspark", "pyarrow", "jinja2"):
        try:
            __import__(module)
        except ImportError:
            missing.append(module)
    if missing:
        raise SparkMissingError(
            f"Reports need {' and '.join(missing)}, and this Python does not have {'them' if missing[1:] else 'it'}.",
            hint=install_command(MESH, "spark"),
        )


@contextmanager
def open_session(
    master: str | None = None,
    *,
    java: Java | None = None,
    extra: Mapping[str, str] | None = None,
    small: bool = False,
) -> Iterator[SparkSession]:
    """A Spark session for the `with` block, local by default.

    `master` is any Spark master URL (`local[2]`, `spark://host:7077`, `k8s://…`, `yarn`); for one that is not
    local, the packages in SHIPPED_PACKAGES travel to the executors as a zip. `extra` are further Spark
    settings; `small` as in `settings`. Raises SparkMissingError, JavaError, SparkStartError, or RequestError where this process already
    has a Spark context.
    """
    require_spark()
    # PySpark warns of pandas 3 where it is installed; nothing here hands a frame to pandas.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        raise RequestError(
            "This process already has a Spark context.",
            code=Code.CONFLICT,
            hint="Stop it first (SparkContext.stop), or run the report in a process of its own.",
        )
    launch: Any = launch_gateway  # PySpark leaves it untyped
    master = master or default_master()
    java = java or find_java()
    with tempfile.TemporaryDirectory(prefix="felix-report-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        overlay = make_overlay(java, work / "java")
        (work / "log4j2.properties").write_text(_LOGGING)
        conf = SparkConf(loadDefaults=False)
        for key, value in sorted(settings(master, work, extra, small=small).items()):
            conf.set(key, value)
        log = work / "jvm.log"
        with _environment(_launch_environment(overlay, master)), log.open("wb") as sink:
            try:
                gateway = launch(conf, {"stdout": sink, "stderr": sink})
            except Exception as error:
                raise SparkStartError(
                    f"Spark did not start with master {master} on Java {java.version} ({java.executable}): "
                    f"{_reason(log, error)}",
                    hint=_START_HINT,
                ) from error
            try:
                context = SparkContext(conf=conf, gateway=gateway)
            except Exception as error:
                _end(gateway, SparkContext)
                raise SparkStartError(
                    f"Spark's master {master} did not take the job: {_reason(log, error)}", hint=_START_HINT
                ) from error
        try:
            if not is_local(master):
                context.addPyFile(str(zip_packages(work / "felix-packages.zip")))
            session = SparkSession(context)
            with quiet_gateway():
                try:
                    yield session
                finally:
                    session.stop()
        finally:
            _end(gateway, SparkContext)


def _end(gateway: Any, context_kind: Any) -> None:
    """Ends the JVM that was started here and forgets it, so that a later session starts its own."""
    gateway.shutdown()
    process = gateway.proc
    if process is not None:
        # The JVM ends by itself when its standard input closes.
        process.stdin.close()
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    context_kind._gateway = None
    context_kind._jvm = None
