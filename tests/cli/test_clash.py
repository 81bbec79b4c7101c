"""Who has an address that is taken, and a region that has moved from where an agent looks for it: each said with what to do."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from prometheus_client.registry import CollectorRegistry
from region_home import make_region
from rich.console import Console

from bridge.config import BridgeConfig, DestinationConfig
from cli.agent import moved
from cli.clash import _inodes, holder, told
from cli.output import note
from cli.process import PidFile, last_words, read_state
from felix.address import Address
from felix.errors import AddressInUseError, Code, RequestError
from felix.health import HealthServer
from region.bootstrap import write_profile

UDP_TABLE = """\
   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  10: 0100007F:1D13 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 1001 2 0000000000000000 0
  11: 0200007F:1D13 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 1002 2 0000000000000000 0
  12: 00000000:1D13 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 1003 2 0000000000000000 0
  13: 0100007F:1D14 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 1004 2 0000000000000000 0
"""
"""As /proc/net/udp has it on a machine whose words begin with the lowest byte: 127.0.0.1, 127.0.0.2 and every address, port 7443; 7444."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    monkeypatch.delenv("FELIX_REGION", raising=False)
    return tmp_path


@contextmanager
def bound(kind: socket.SocketKind) -> Iterator[Address]:
    with socket.socket(socket.AF_INET, kind) as held:
        held.bind(("127.0.0.1", 0))
        if kind is socket.SOCK_STREAM:
            held.listen()
        yield Address("127.0.0.1", held.getsockname()[1])


def clash(address: Address, transport: str) -> RequestError:
    with pytest.raises(RequestError) as caught, told("set another one."):
        raise AddressInUseError(str(address), transport)
    return caught.value


def test_the_sockets_in_the_way_are_those_at_the_address_and_at_every_address() -> None:
    assert list(_inodes(UDP_TABLE, Address("127.0.0.1", 7443), "UDP")) == ["socket:[1001]", "socket:[1003]"]
    assert len(list(_inodes(UDP_TABLE, Address("0.0.0.0", 7443), "UDP"))) == 3
    assert not list(_inodes(UDP_TABLE, Address("127.0.0.1", 80), "UDP"))


@pytest.mark.parametrize(("kind", "transport"), [(socket.SOCK_DGRAM, "UDP"), (socket.SOCK_STREAM, "TCP")])
def test_a_process_that_is_not_felix_is_named_by_its_number(
    home: Path, kind: socket.SocketKind, transport: str
) -> None:
    with bound(kind) as address:
        error = clash(address, transport)
    assert f"{address} ({transport}) is taken by process {os.getpid()} (" in error.sentence
    assert error.hint == "Stop it, or set another one." and error.code is Code.CONFIG_INVALID
    assert "may not look at" in clash(address, transport).sentence, "nobody has it any more"


def test_a_broker_and_an_agent_of_this_home_are_named_by_their_records(home: Path) -> None:
    us = make_region(home, "us-east")
    agent = us.bridge("us-to-eu") / "agent.pid"
    agent.parent.mkdir(parents=True)
    (agent.parent / "bridge.yaml").write_text("")
    records = PidFile(us.broker_pid, "us-east", ""), PidFile(agent, "us-to-eu", "")
    try:
        records[0].announce(address="127.0.0.1:7443", health="127.0.0.1:8080")
        records[1].announce(health="127.0.0.1:9090")
        error = clash(Address("127.0.0.1", 7443), "UDP")
        assert (
            "the broker of us-east, process" in error.sentence and "felix region down us-east" in error.hint
        )
        assert "health page of us-east" in clash(Address("0.0.0.0", 8080), "TCP").sentence
        error = clash(Address("localhost", 9090), "TCP")
        assert "health page of the bridge us-to-eu of us-east" in error.sentence
        assert "felix bridge down us-to-eu --region us-east" in error.hint
        assert holder(Address("127.0.0.1", 7443), "TCP") is None, "another transport is not in the way"
    finally:
        for record in records:
            record.close()


async def test_what_listens_says_which_address_it_could_not_have() -> None:
    with bound(socket.SOCK_STREAM) as address, pytest.raises(AddressInUseError) as caught:
        HealthServer(address.host, address.port, CollectorRegistry(), lambda: "")
    assert (caught.value.address, caught.value.transport) == (str(address), "TCP")


def test_why_a_process_ended_is_its_last_failure_without_the_lines_around_it() -> None:
    log = "2026-11-22 INFO felix: serves\nfelix: It is so.\n       Do that.\n       (config-invalid, 309)\nbye\n"
    assert last_words(f"felix: Before.\n       (x, 1)\n{log}") == ("It is so.", "Do that.")
    assert last_words("felix: Alone.\n       (x, 1)\n") == ("Alone.", "")
    assert last_words("Killed\n") == ("Killed", "") and last_words("")[0]


def test_an_agent_that_looks_for_a_region_at_a_port_that_it_left_is_told_so(home: Path) -> None:
    for region, port in (("us-east", 7443), ("eu-west", 7444)):
        make_region(home, region)
        write_profile_of(home, region, port)
    config = BridgeConfig(
        name="b", source="us-east", mesh="acme", source_addresses=("127.0.0.1:7443",),
        destinations=(DestinationConfig(region="eu-west", addresses=("127.0.0.1:7444",)),),
    )  # fmt: skip
    assert moved(config) == []
    write_profile_of(home, "eu-west", 7555)
    (sentence,) = moved(config)
    assert "looks for eu-west at 127.0.0.1:7444, and it is at 127.0.0.1:7555 now" in sentence
    assert "felix bridge up b --to eu-west --region us-east" in sentence
    write_profile_of(home, "us-east", 7556)
    assert len(moved(config)) == 2
    elsewhere = msgspec.structs.replace(config, source_addresses=("us.example.org:7443",))
    assert len(moved(elsewhere)) == 1, "another name of a host may be the same machine"


def write_profile_of(home: Path, region: str, port: int) -> None:
    from region.folder import RegionFolder

    write_profile(RegionFolder.of(region, home), region, "acme", Address("127.0.0.1", port))


def test_a_process_says_of_itself_what_has_the_room_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it starts, and is found, on a disk that is full by then."""
    path = tmp_path / "broker.pid"
    sizes = set()
    for _ in range(2):
        pid = PidFile(path, "The broker", "")
        sizes.add(path.stat().st_size)
        assert read_state(path) is None, "it does not serve yet"
        pid.announce(address="127.0.0.1:7443")
        sizes.add(path.stat().st_size)
        assert (read_state(path) or {})["address"] == "127.0.0.1:7443"
        pid.close()
        sizes.add(path.stat().st_size)
        assert read_state(path) is None
    assert len(sizes) == 1

    for number in (errno.ENOSPC, errno.EIO, errno.EROFS):

        def fails(*_: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("cli.process.os.pwrite", fails)
        pid = PidFile(tmp_path / f"first{number}.pid", "The broker", "")
        pid.announce(address="127.0.0.1:7443")
        pid.close()


def test_a_note_that_finds_no_room_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's log is often on the disk that it writes to."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("cli.output.err", Console(file=full, stderr=True))
        note("us-east serves")
        with suppress(OSError):
            full.close()
