"""Runs `felix` commands, and Python scripts of tests, as processes of their own, forked from this one, which has imported what they need.

A command costs a second of processor time before it does anything, nearly all of it imports, and the tests call hundreds.
Here a command is a process as ever (its own arguments, environment, folder, standard streams, signals, exit code); only its
imports are shared. What is read before or while Python imports (PYTHONPATH, COLUMNS) is this server's: tests of such things
run the true command. For scripts, PYTHONPATH is read anew.

Serves until standard input ends, whose other end `warm.commands` holds; it writes the path of its socket to standard output.
A request is one JSON object {argv, env, cwd, ignored} and a line feed (`argv` begins with `felix`, or with a script's path), with the three standard streams beside it. The answers
are two lines: the process's id, and its exit code, negative for a signal. Where the caller goes before the end, its command is
killed.
"""

from __future__ import annotations

import array
import gc
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

REQUEST_BYTES_MAX = 1 << 18
"""Of one read; a longer request takes several."""


def import_commands() -> None:
    """What commands import when they are called, and what most of them import later."""
    import typer.main

    from cli.commands import COMMANDS
    from cli.main import app

    for module in {entry.module for entry in COMMANDS.values()}:
        import_module(module)
    for module in (
        "bridge.agent",
        "felix.client",
        "felix.transport.native",
        "region.node",
        "rich.progress",
        "uvloop",
    ):
        import_module(module)
    typer.main.get_command(app).make_context("felix", ["stream", "list"])  # typer imports what reads words


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The request, and the descriptors of its standard streams. Raises ConnectionError."""
    data, streams = b"", array.array("i")
    while not data.endswith(b"\n"):
        part, beside, _, _ = connection.recvmsg(REQUEST_BYTES_MAX, socket.CMSG_SPACE(3 * streams.itemsize))
        if not part:
            raise ConnectionError("the caller left in the middle of its request")
        data += part
        for _, _, held in beside:
            streams.frombytes(held)
    request: dict[str, Any] = json.loads(data)
    return request, list(streams)


class Detached:
    """The part of subprocess.Popen that `cli.process.start_detached` uses: the command that is to run apart, forked from the one that
    starts it, where a true one imports everything anew. tests/packaging/test_wheels.py starts a true one."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        start_new_session: bool,
        env: Mapping[str, str] | None,
    ) -> None:
        assert command[:3] == [sys.executable, "-m", "cli.main"] and stdin == subprocess.DEVNULL
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if start_new_session:
            os.setsid()
        for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), stdout.fileno(), stderr.fileno())):
            os.dup2(stream, number)
        logging.root.handlers.clear()
        sys.argv = ["felix", *command[3:]]
        code = 1
        try:
            from cli.main import main

            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """How it ended; None: it runs."""
        if self._code is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self._code = 1
        return self._code

    def terminate(self) -> None:
        """SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)


def become(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Be the command. Never returns."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    for each in request["ignored"]:
        signal.signal(each, signal.SIG_IGN)
    if sys.argv[0] != "felix":
        sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    from cli import process
    from cli.main import main

    process.subprocess = SimpleNamespace(Popen=Detached, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
    main()
    raise AssertionError("main ends the process")


def keep(connection: socket.socket, pid: int) -> None:
    """Say which process a command is, and how it ended."""
    connection.sendall(b"%d\n" % pid)

    def kill_where_the_caller_leaves() -> None:
        with suppress(ConnectionError, ProcessLookupError):
            if not connection.recv(1):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill_where_the_caller_leaves, daemon=True).start()
    # It stays a zombie until this process ends, so that its id is nobody else's while the thread may use it.
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    connection.sendall(b"%d\n" % code)


def answer(connection: socket.socket) -> None:
    """In a process of its own for each connection: fork the command and stay with it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams = receive(connection)
    pid = os.fork()
    if not pid:
        connection.close()
        become(request, streams)
    for stream in streams:
        os.close(stream)
    with suppress(ConnectionError):  # the caller left
        keep(connection, pid)
    os._exit(0)


def serve(folder: Path) -> None:
    """Answer until standard input ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        print(folder / "socket", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if not os.fork():
                listener.close()
                answer(connection)
            connection.close()


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "slow_disk.py"))["slow_down"]()
    runpy.run_path(str(Path(__file__).parents[1] / "slow_news.py"))["hear_late"]()
    import_commands()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that answer
    place, server = Path(tempfile.mkdtemp(prefix="felix-warm-")), os.getpid()
    try:
        serve(place)
    finally:
        if os.getpid() == server:
            (place / "socket").unlink()
            place.rmdir()
