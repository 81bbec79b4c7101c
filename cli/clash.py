"""Which process has an address that a broker, an agent or a page needs: by the records of this home's processes, else by the
kernel's.

A port conflict is reported with its cause: which address, who has it, and what to do. Blocks on the disk; Linux alone says which
process has a port, and only of processes that the user may look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final, NamedTuple

from cli.agent import agents_here
from cli.process import read_state
from cli.setting import known_regions
from felix.address import Address
from felix.errors import AddressInUseError, RequestError
from region.folder import RegionFolder

_TCP_LISTENS: Final = "0A"
"""State of a listening socket in /proc/net/tcp."""


class Holder(NamedTuple):
    """The process that has an address, and how to stop it; `stop` is empty if it is not Felix's."""

    who: str
    stop: str


@contextmanager
def told(change: str) -> Iterator[None]:
    """Around what takes an address: a clash says who has it. `change`: how to take another one, as a sentence."""
    try:
        yield
    except AddressInUseError as error:
        held = holder(Address.parse(error.address), error.transport)
        there = held.who if held is not None else "a process that this user may not look at"
        ending = f"Stop that one ({held.stop}), or " if held is not None and held.stop else "Stop it, or "
        raise RequestError(
            f"{error.address} ({error.transport}) is taken by {there}.",
            code=error.code,
            hint=ending + change,
        ) from error


def holder(address: Address, transport: str) -> Holder | None:
    """The owner of the address on this machine: a broker or an agent of this home by its record, else a process. None:
    unknown.
    """
    for region in known_regions():
        state = read_state(RegionFolder.of(region).broker_pid) or {}
        for field, what in (("address", "the broker"), ("health", "the health page")):
            if _is_at(str(state.get(field) or ""), address) and (field == "address") is (transport == "UDP"):
                whose = f"{what} of {region}, process {state['pid']}"
                return Holder(whose, f"felix region down {region}")
    for files in agents_here():
        state = read_state(files.pid) or {}
        if transport == "TCP" and _is_at(str(state.get("health") or ""), address):
            whose = f"the health page of the bridge {files.name} of {files.region}, process {state['pid']}"
            return Holder(whose, files.how_to_stop)
    found = _process_at(address, transport)
    return None if found is None else Holder(found, "")


def _is_at(record: str, address: Address) -> bool:
    """Whether who announced this address has the other one, too."""
    if not record:
        return False
    held = Address.parse(record)
    return held.port == address.port and _covers(_literal(held.host), _literal(address.host))


def _covers(held: IPv4Address | IPv6Address | None, wanted: IPv4Address | IPv6Address | None) -> bool:
    """Whether a socket at `held` is in the way of one at `wanted`; a name that is no number may be any address."""
    return held is None or wanted is None or held == wanted or held.is_unspecified or wanted.is_unspecified


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_listening(process: int, address: Address) -> bool | None:
    """Whether it is this process, one of ours, that listens at an address (TCP); None where the system does not tell who does."""
    inodes = _sockets_at(address, "TCP")
    if not inodes:
        return None
    try:
        return any(str(file.readlink()) in inodes for file in Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return False  # it has ended


def _sockets_at(address: Address, transport: str) -> set[str]:
    inodes = set[str]()
    for name in (transport.lower(), f"{transport.lower()}6"):
        with suppress(OSError):
            inodes |= set(_inodes(Path(f"/proc/net/{name}").read_text(), address, transport))
    return inodes


def _process_at(address: Address, transport: str) -> str | None:
    """`process 4242 (nginx)`; None where the kernel does not say, or says it to others only."""
    inodes = _sockets_at(address, transport)
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(file.readlink()) in inodes for file in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return None


def _inodes(table: str, address: Address, transport: str) -> Iterator[str]:
    """Of the sockets of /proc/net/udp or tcp that are in the way of one at this address: `socket:[inode]`. Pure."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        host, _, port = fields[1].partition(":")
        if int(port, 16) != address.port or (transport == "TCP" and fields[3] != _TCP_LISTENS):
            continue
        # Words of 32 bits, in the byte order of the machine.
        words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
        if _covers(ip_address(b"".join(words)), _literal(address.host)):
            yield f"socket:[{fields[9]}]"
