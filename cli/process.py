"""Processes of Felix on this machine: which run, how they are started apart, and how they are stopped.

A process holds a lock on its pid file for as long as it lives, so a pid file that a crash left behind can be distinguished from
a live one, even if its pid was reused.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from felix.errors import Code, RequestError, UnavailableError
from felix.storage.port import has_failed, is_full

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
FAILURE: Final = "felix: "
"""What the line begins with that says why a command failed; its hint, then its code, stand below, as far in."""
FAILURE_LINES_MAX: Final = 8
"""How many such lines there are at most."""
LAST_BYTES_MAX: Final = 64 << 10
"""Of a log, where a process's last words are looked for."""
RECORD_BYTES: Final = 512
"""What a process says of itself, filled up with spaces, has as a rule less."""
LOCK_TIMEOUT_S: Final = 0.5
"""Longer than anybody who asks whether a process runs holds its lock."""
START_REFUSED_S: Final = 15.0
"""Longer than a process runs that is refused as it starts, on a busy machine too."""


class PidFile:
    """This process's claim to be the one that runs. Keep it until the end."""

    def __init__(self, path: Path, what: str, how_to_stop: str, *, wait_s: float = LOCK_TIMEOUT_S) -> None:
        """Raises RequestError(CONFLICT), with the command `how_to_stop`, where another process runs after `wait_s`."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file: IO[str] = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
        try:
            self._lock(wait_s)
        except OSError as error:
            state = read_state(path) or {}
            self._file.close()
            raise RequestError(
                f"{what} runs already, as process {state.get('pid', '?')}.",
                code=Code.CONFLICT,
                hint=f"Stop it first: {how_to_stop}.",
            ) from error
        self.path = path
        self._write("")

    def _lock(self, wait_s: float) -> None:
        """Raises OSError where another process keeps the lock; one that only looks lets go at once."""
        limit = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() >= limit:
                    raise
                time.sleep(0.01)

    def announce(self, **state: Any) -> None:
        """Say that the process serves now, and where. On a disk with no room for it, which a later start has where an earlier one had it, or one that fails, the
        process serves all the same."""
        if not self._write(json.dumps({"pid": os.getpid(), **state})):
            logging.getLogger("felix.cli.process").warning(
                "%s cannot be written, its disk is full or fails: `status` and `down` do not find this process.",
                self.path,
            )

    def close(self) -> None:
        """The process is about to end."""
        self._write("")
        self._file.close()

    def _write(self, text: str) -> bool:
        """In place: the next process needs the room, also on a disk that is full by then."""
        data = text.ljust(RECORD_BYTES).encode()
        try:
            os.pwrite(self._file.fileno(), data, 0)
            os.ftruncate(self._file.fileno(), len(data))
        except OSError as error:
            if not is_full(error) and not has_failed(error):
                raise
            return False
        return True


def read_state(path: Path) -> dict[str, Any] | None:
    """The record of a live process; None if none runs or it has not written its record yet."""
    try:
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                text = file.read()
                state: dict[str, Any] | None = json.loads(text) if text.strip() else None
                return state
            return None
    except (OSError, ValueError):
        return None


def start_detached(
    command: Sequence[str],
    pid_file: Path,
    log_file: Path,
    what: str,
    how_to_stop: str,
    *,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start `felix COMMAND` apart from this terminal and wait until it serves. Raises UnavailableError.

    `how_to_stop`: the command that stops one that runs already. `environment`: of the new process, if not as this one's.
    """
    if (state := read_state(pid_file)) is not None:
        raise RequestError(
            f"{what} runs already, as process {state.get('pid', '?')}.",
            code=Code.CONFLICT,
            hint=f"Stop it first: {how_to_stop}.",
        )
    log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    start = log_file.stat().st_size if log_file.exists() else 0
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    limit = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < limit:
        state = read_state(pid_file)
        if state is not None and state.get("pid") == process.pid:
            return state
        if process.poll() is not None:
            with log_file.open("rb") as log:
                log.seek(start)
                said = last_words(log.read().decode(errors="replace"))
            raise UnavailableError(
                f"{what} ended before it served: {said.sentence}",
                hint=f"{said.hint} See {log_file}.".lstrip(),
            )
        time.sleep(0.05)
    process.terminate()
    raise UnavailableError(f"{what} did not serve within {START_TIMEOUT_S:.0f} s.", hint=f"See {log_file}.")


class LastWords(NamedTuple):
    """Why a process ended, as its log has it last: what `cli.main` says of a failure, else the last line."""

    sentence: str
    hint: str


def failure(said: Path) -> LastWords | None:
    """Why a process failed that ended, as the end of its log has it; None where it ended in order. Raises OSError."""
    with said.open("rb") as file:
        file.seek(max(0, said.stat().st_size - LAST_BYTES_MAX))
        log = file.read().decode(errors="replace")
    begins = [line.startswith(FAILURE) for line in log.strip().splitlines()]
    # Its hint and its code stand below.
    return last_words(log) if any(begins[-FAILURE_LINES_MAX:]) else None


def last_words(log: str) -> LastWords:
    """Pure."""
    lines = log.strip().splitlines() or ["it said nothing."]
    for at in reversed(range(len(lines))):
        if lines[at].startswith(FAILURE):
            more = [line.strip() for line in lines[at + 1 :] if line.startswith(" " * len(FAILURE))]
            return LastWords(lines[at].removeprefix(FAILURE), " ".join(more[:-1]))
    return LastWords(lines[-1], "")


def stop(pid_file: Path, what: str) -> int:
    """Ask a process to stop, and wait until it has. Returns its id. Raises RequestError(NOT_FOUND)."""
    state = read_state(pid_file)
    if state is None:
        raise RequestError(f"{what} does not run.", code=Code.NOT_FOUND)
    pid = int(state["pid"])
    os.kill(pid, signal.SIGTERM)
    limit = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < limit:
        if read_state(pid_file) is None:
            return pid
        time.sleep(0.05)
    raise UnavailableError(
        f"{what} (process {pid}) did not stop within {STOP_TIMEOUT_S:.0f} s.",
        hint="It may be waiting for its disk; look at its log before you end it by force.",
    )
