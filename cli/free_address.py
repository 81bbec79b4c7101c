"""A free port on this machine, for what is to listen here."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

from cli.setting import known_regions
from felix.address import Address
from felix.errors import FelixError
from region.folder import RegionFolder

LOCAL: Final = "127.0.0.1"


def free_address(port: int, taken: list[Address], kind: socket.SocketKind) -> Address:
    """The first port from this one on that no region has, also one that is not running, and no process listens at now."""
    ports = {address.port for address in taken} | _ports_of_regions()
    while port in ports or not _is_free(port, kind):
        port += 1
    return Address(LOCAL, port)


def _ports_of_regions() -> set[int]:
    """The ports that the regions of this machine's home folder name: of brokers, of their health, of etcd."""
    from region.config import load_config

    ports = set[int]()
    for region in known_regions():
        # One whose configuration cannot be read says so when it is asked for.
        with suppress(FelixError):
            config = load_config(RegionFolder.of(region).config)
            brokers = () if config.cluster is None else config.cluster.brokers
            named = [config.listen, config.health]
            named += [address for each in brokers for address in (each.listen, each.health)]
            ports |= {address.port for address in named if address is not None}
            for endpoint in config.metadata.endpoints:
                ports.add(Address.parse(endpoint).port)
    return ports


def _is_free(port: int, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_INET, kind) as probe:
        try:
            probe.bind((LOCAL, port))
        except OSError:
            return False
    return True
