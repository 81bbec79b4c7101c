"""Notifications to a service manager: that this process starts, serves or stops, and that its event loop runs.

The protocol is sd_notify(3): datagrams of `KEY=VALUE` lines to the unix socket that NOTIFY_SOCKET names, `@` in front
standing for a name in Linux's abstract namespace. WATCHDOG_USEC says within which time it wants to hear again.

Invariants: each message carries the whole state, so the next one replaces one for which the socket had no room; sending never
blocks the event loop; without a service manager, nothing is sent. Used only by commands that serve.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, MutableMapping
from enum import Enum
from types import TracebackType
from typing import Final, Self

from felix.tasks import end_tasks
from felix.visible import visible

log = logging.getLogger("felix.notify")

BEAT_S: Final = 10.0
"""How often the state is sent: a status that people read need not be newer."""
BEATS_PER_WATCHDOG: Final = 3
"""So many beats fall within the watchdog's time, that one which comes late or is lost ends nothing."""
EXTEND_US: Final = 60_000_000
"""A start may take this much longer from each beat on: recovering many shards outlasts a manager's patience, and one
that hangs sends no beats."""


class Phase(Enum):
    """What the process does now."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


def encode_state(phase: Phase, status: str, *, watched: bool) -> bytes:
    """One message: the lines for a phase. Pure. `status` is shown to people and stays on one line, whatever is in it."""
    lines = [f"STATUS={visible(status)}"]
    match phase:
        case Phase.STARTING:
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTEND_US}")
        case Phase.SERVING:
            lines.append("READY=1")
        case Phase.STOPPING:
            lines.append("STOPPING=1")
    if watched:
        lines.append("WATCHDOG=1")
    return "\n".join(lines).encode()


class Notifier:
    """`async with` it around start and stop; call `serving` and `stopping` as they come about."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        """`address`: a socket's path, or `@` and an abstract name; empty: nothing is sent. `watchdog_s` 0: there is no
        watchdog.
        """
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watched = watchdog_s > 0
        self._beat_s = min(BEAT_S, watchdog_s / BEATS_PER_WATCHDOG) if self._watched else BEAT_S
        self._phase = Phase.STARTING
        self._describe: Callable[[], str] = lambda: self._phase.value
        self._socket: socket.socket | None = None
        self._beats: asyncio.Task[None] | None = None

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] | None = None) -> Notifier:
        """As the manager asked. The variables are taken out, so that a child process does not speak for this one."""
        environ = os.environ if environ is None else environ
        address = environ.pop("NOTIFY_SOCKET", "")
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        if address and address[0] not in "/@":
            log.warning("NOTIFY_SOCKET %s is no unix socket; the service manager is told nothing", address)
            return cls()
        meant = not pid or pid == str(os.getpid())
        return cls(address, int(watchdog_us) / 1e6 if meant and watchdog_us.isdecimal() else 0.0)

    async def __aenter__(self) -> Self:
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            self._beats = asyncio.create_task(self._beat())
            self._tell()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beats is not None:
            await end_tasks(self._beats)
        if self._socket is not None:
            self._socket.close()

    def serving(self, describe: Callable[[], str]) -> None:
        """It serves from now on. `describe` is called on the event loop with each beat; its text is the status."""
        self._phase, self._describe = Phase.SERVING, describe
        self._tell()

    def stopping(self) -> None:
        """It has begun to stop."""
        self._phase, self._describe = Phase.STOPPING, lambda: self._phase.value
        self._tell()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            self._tell()

    def _tell(self) -> None:
        if self._socket is None:
            return
        try:
            status = self._describe()
        except Exception:
            # A bug in the status text: the event loop still runs, and that is what the watchdog watches.
            log.exception("what the process does could not be described")
            status = self._phase.value
        try:
            self._socket.sendto(encode_state(self._phase, status, watched=self._watched), self._address)
        except OSError as error:
            log.warning("the service manager could not be told: %s", error.strerror or error)
