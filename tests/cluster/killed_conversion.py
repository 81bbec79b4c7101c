"""`felix region to-cluster`, of us-east unless REGION says another one, killed with SIGKILL before one of its writes.

    python -m cluster.killed_conversion KILL TOLD [REGION]

`KILL`: before which write, counted from 1 on; 0: before none. A write is whatever changes the disk or the store: a file that is opened to be written, what is
written into it, cut, synced or renamed, a folder that is made, synced or removed, a transaction of etcd. They are told in the file TOLD, a line each.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ports import claim_port

import cli.to_cluster
from cli.main import main
from felix.address import Address
from region.metadata.etcd import EtcdStore

_WRITING = os.O_WRONLY | os.O_RDWR
_CALLS = ("pwritev", "pwrite", "write", "fsync", "fdatasync", "ftruncate", "fchmod")


class Kills:
    """`before` counts a write, and ends the process in its place where it is the one."""

    def __init__(self, kill: int, told: Path) -> None:
        self._kill = kill
        self._told = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._write = os.write
        self._count = 0

    def before(self, what: str) -> None:
        self._count += 1
        if self._count == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        self._write(self._told, f"{what}\n".encode())

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            # What goes to the terminal is lost with it.
            if arguments[0] not in (1, 2, self._told):
                self.before(name)
            return call(*arguments, **named)

        return counted

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit event of the interpreter, which comes before what it tells of."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and not str(path).startswith("/dev/"):
                self.before(f"open {path}")
        elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.chmod", "os.utime"):
            self.before(f"{event} {arguments[0]}")


def begin(kill: int, told: Path) -> None:
    kills = Kills(kill, told)
    for name in _CALLS:
        setattr(os, name, kills.wrapped(name, getattr(os, name)))
    # A copy is written by calls that none of these sees.
    shutil.copyfileobj = kills.wrapped("copy", shutil.copyfileobj)
    transact = EtcdStore.transact

    async def counted(self: EtcdStore, *arguments: Any, **named: Any) -> Any:
        kills.before("transaction")
        answer = await transact(self, *arguments, **named)
        kills.before("answer of a transaction")
        return answer

    EtcdStore.transact = counted  # type: ignore[method-assign]
    sys.addaudithook(kills.heard)


def free_address(port: int, taken: list[Address], kind: socket.SocketKind) -> Address:
    """Of the tests' own ports: others of this machine take those that Felix begins with."""
    return Address("127.0.0.1", claim_port())


if __name__ == "__main__":
    cli.to_cluster.free_address = free_address  # type: ignore[attr-defined]
    begin(int(sys.argv[1]), Path(sys.argv[2]))
    sys.argv = ["felix", "region", "to-cluster", *(sys.argv[3:] or ["us-east"])]
    main()
