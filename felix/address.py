"""Addresses: a host and a port, as configurations write them. Pure; used by all code that listens or connects."""

from __future__ import annotations

from typing import NamedTuple, Self

from felix.errors import Code, RequestError


class Address(NamedTuple):
    """A host (name, IPv4 or IPv6, the latter without brackets) and a UDP or TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Where to listen: `host:port`, IPv6 in brackets; port 0 takes a free one. Raises RequestError(CONFIG_INVALID)."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise RequestError(
                f"{text!r} is not an address: expected host:port, as in 127.0.0.1:7443 or [::1]:7443.",
                code=Code.CONFIG_INVALID,
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
