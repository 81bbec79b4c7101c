"""Ports that stay a test's own, also while the broker or store behind them is stopped.

A port that the kernel chose (a bind to port 0) goes back to the kernel when its socket closes, and any other process may be given it before the
test starts its broker again. These ports lie below the range that kernels choose from, and a lock on a file keeps other test processes off them.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import socket
from pathlib import Path
from typing import IO, Final

FIRST: Final = 20_000
"""Above the ports of well-known services, as a rule."""
LAST: Final = 32_767
"""Linux gives out ports from 32,768 on, macOS and the registry of port numbers from 49,152 on."""
_LOCKS: Final = Path("/tmp") / f"felix-test-ports-{os.getuid()}"
"""One place for all test processes, whatever their TMPDIR."""
_claimed: Final[list[IO[bytes]]] = []
"""Held open until the process ends: closing a file gives up its lock."""


def _is_free(port: int) -> bool:
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def claim_port() -> int:
    """A port of 127.0.0.1, for UDP and TCP, that no other caller of this function gets while this process lives."""
    _LOCKS.mkdir(exist_ok=True)
    ports = range(FIRST, LAST + 1)
    # From anywhere on: whoever was told the port of a test that has ended should not meet the next one there.
    begin = random.SystemRandom().randrange(len(ports))
    for port in itertools.chain(ports[begin:], ports[:begin]):
        lock = (_LOCKS / str(port)).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        if _is_free(port):
            _claimed.append(lock)
            return port
        lock.close()
    raise RuntimeError(f"no port from {FIRST} to {LAST} is free")
