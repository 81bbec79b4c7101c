"""A free port on this machine, for what is to listen here."""

from __future__ import annotations

import socket
from typing import Final

from felix.address import Address

LOCAL: Final = "127.0.0.1"


def free_address(port: int, taken: list[Address], kind: socket.SocketKind) -> Address:
    """The first port from this one on that no region has and no process listens at now."""
    ports = {address.port for address in taken}
    while port in ports or not _is_free(port, kind):
        port += 1
    return Address(LOCAL, port)


def _is_free(port: int, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_INET, kind) as probe:
        try:
            probe.bind((LOCAL, port))
        except OSError:
            return False
    return True
