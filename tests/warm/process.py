"""A `felix` command or a script as a process that a test kills: forked from `warm.server`, with nothing between it and the test.

`warm.commands` has a process of its own that hands signals on, which a SIGKILL would end in its place.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from warm.commands import warm_socket


class WarmProcess:
    """The part of subprocess.Popen that tests of kills use. Its standard input is empty; it ends with this process, or before."""

    def __init__(
        self, program: str | Path, *words: str, env: Mapping[str, str], cwd: Path, log: IO[bytes]
    ) -> None:
        """`program` is `felix` or a script; `log` takes what it writes to both streams."""
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(warm_socket())
        request = {"argv": [str(program), *words], "env": dict(env), "cwd": str(cwd), "ignored": []}
        with open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), log.fileno(), log.fileno()]
            data = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._connection, [data], streams)
            self._connection.sendall(data[sent:])
        self._said = b""
        self.returncode: int | None = None
        while b"\n" not in self._said:
            self._read()
        pid, _, self._said = self._said.partition(b"\n")
        self.pid = int(pid)

    def _read(self) -> None:
        part = self._connection.recv(64)
        assert part, "the server of commands ended"
        self._said += part

    def poll(self) -> int | None:
        """How it ended, negative for a signal; None: it runs."""
        while self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._read()
            if self._said.endswith(b"\n"):
                self.returncode = int(self._said)
                self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """How it ended. Raises TimeoutExpired after so many seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                assert timeout is not None
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            select.select([self._connection], [], [], left)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)
