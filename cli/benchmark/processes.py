"""Processes of a measurement: each role is a coroutine in a process of its own, with a pipe to the parent.

So the roles share the machine as they do in earnest, and none waits for another's interpreter lock. A role runs
on the event loop that `felix` itself uses, and ends when the parent closes its end of the pipe.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

from felix.errors import UnavailableError

HOST: Final = "127.0.0.1"
END_TIMEOUT_S: Final = 5.0
"""What a role has for ending in order, before it is ended by force."""


class Processes:
    """Starts roles as processes, takes their answers until the time `until`, and ends them all, whatever happened."""

    def __init__(self, until: float, *, what: str) -> None:
        # Forked from a process that has imported what they run and does nothing else: imports are most of a short role's time.
        self._context = multiprocessing.get_context("forkserver")
        self._until = until
        self._what = what
        self._started: list[tuple[Any, Pipe]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_exception: object) -> None:
        # The newest first: clients leave before the broker does.
        for process, pipe in reversed(self._started):
            pipe.close()
            process.join(END_TIMEOUT_S)
            if process.is_alive():
                process.terminate()
                process.join(END_TIMEOUT_S)

    def start(self, role: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> Pipe:
        """Run `role(pipe, *arguments)` in a new process; what comes back is our end of the pipe."""
        ours, theirs = self._context.Pipe()
        self._context.set_forkserver_preload(["__main__", role.__module__, "uvloop"])
        process = self._context.Process(target=_run, args=(role, theirs, arguments), daemon=True)
        # Ctrl-C reaches the whole group, and the parent ends its roles in order: they inherit that it is blocked, by the process
        # that forks them. The tracker that `start` would start unblocks it, so it runs before.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._started.append((process, ours))
        return ours

    def pid_of(self, pipe: Pipe) -> int:
        """The process at the other end."""
        return next(int(process.pid) for process, ours in self._started if ours is pipe)

    def kill(self, pipe: Pipe) -> None:
        """Send SIGKILL to the process at the other end, and wait until it is gone."""
        process = next(process for process, ours in self._started if ours is pipe)
        process.kill()
        process.join()

    def pair(self) -> tuple[Pipe, Pipe]:
        """A pipe between two roles."""
        ours, theirs = self._context.Pipe()
        return ours, theirs

    def answer(self, pipe: Pipe) -> Any:
        """What the role sends next. Raises UnavailableError where it fails, or the time is over."""
        left = max(0.0, self._until - time.monotonic())
        if not pipe.poll(left):
            raise UnavailableError(
                f"{self._what} did not finish in its time.", hint="Try less data, or a quieter machine."
            )
        try:
            return pipe.recv()
        except EOFError:
            raise UnavailableError(f"A process of {self._what} failed; see its output.") from None


def _run(role: Callable[..., Coroutine[Any, Any, None]], pipe: Pipe, arguments: tuple[Any, ...]) -> None:
    try:
        import uvloop
    except ImportError:
        run = asyncio.run
    else:
        run = uvloop.run
    # The parent gave up, and has no use for the answer.
    with suppress(BrokenPipeError, ConnectionResetError):
        run(role(pipe, *arguments))


async def next_message(pipe: Pipe) -> Any:
    """The parent's next message, or None once it has closed its end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(pipe.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    try:
        # Readable, and what is sent here is small: this does not block.
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def send_whole(pipe: Pipe, message: Any) -> None:
    """Send what may be longer than the pipe holds. Blocks until the other end, which must be reading, has taken it."""
    # The loop's readers have made it non-blocking, and do so again.
    os.set_blocking(pipe.fileno(), True)
    pipe.send(message)


async def until_parent_is_done(pipe: Pipe) -> None:
    """The parent closes its end of the pipe when it has what it wants."""
    while await next_message(pipe) is not None:
        pass
