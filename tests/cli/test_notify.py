"""The service manager's side is a real unix datagram socket; what it hears is compared line by line."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from cli.notify import EXTEND_US, Notifier, Phase, encode_state

WAIT_S = 30.0


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listening:
        listening.bind("\0" + address[1:] if address.startswith("@") else address)
        listening.settimeout(WAIT_S)
        yield listening


async def heard(listening: socket.socket) -> list[str]:
    return (await asyncio.to_thread(listening.recv, 4096)).decode().split("\n")


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_a_service_says_that_it_starts_serves_and_stops(kind: str, tmp_path: Path) -> None:
    address = str(tmp_path / "notify") if kind == "path" else f"@felix-test-{os.getpid()}"
    with manager(address) as listening:
        async with Notifier.from_environment({"NOTIFY_SOCKET": address}) as notifier:
            assert await heard(listening) == ["STATUS=starting", f"EXTEND_TIMEOUT_USEC={EXTEND_US}"]
            notifier.serving(lambda: "serves at 127.0.0.1:7443")
            assert await heard(listening) == ["STATUS=serves at 127.0.0.1:7443", "READY=1"]
            notifier.stopping()
            assert await heard(listening) == ["STATUS=stopping", "STOPPING=1"]


async def test_a_watched_service_says_again_and_again_that_its_event_loop_turns(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    sessions = iter(range(100))
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000", "WATCHDOG_PID": str(os.getpid())}
    with manager(address) as listening:
        async with Notifier.from_environment(environ) as notifier:
            notifier.serving(lambda: f"{next(sessions)} sessions")
            assert (await heard(listening))[0] == "STATUS=starting"
            for number in range(3):
                assert await heard(listening) == [f"STATUS={number} sessions", "READY=1", "WATCHDOG=1"]
    assert environ == {}  # a child process does not speak for its parent


async def test_a_watchdog_that_is_meant_for_another_process_hears_nothing(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000", "WATCHDOG_PID": "1"}
    with manager(address) as listening:
        async with Notifier.from_environment(environ):
            assert "WATCHDOG=1" not in await heard(listening)


async def test_where_nobody_asked_nothing_is_sent() -> None:
    async with Notifier.from_environment({"WATCHDOG_USEC": "60000"}) as notifier:
        notifier.serving(lambda: pytest.fail("nobody asked"))
        notifier.stopping()


async def test_a_socket_of_another_kind_is_named_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with Notifier.from_environment({"NOTIFY_SOCKET": "vsock:2:9999"}) as notifier:
        notifier.serving(lambda: pytest.fail("nobody can hear it"))
    assert "vsock:2:9999 is no unix socket" in caplog.text


async def test_a_manager_that_does_not_listen_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = str(tmp_path / "notify")
    async with Notifier(address) as notifier:
        notifier.serving(lambda: "serves")
        assert "could not be told: No such file or directory" in caplog.text
        with manager(address) as listening:
            notifier.serving(lambda: "serves")
            assert "READY=1" in await heard(listening)


async def test_a_full_socket_does_not_block_the_event_loop_and_the_next_message_says_it_all(
    tmp_path: Path,
) -> None:
    address = str(tmp_path / "notify")
    with manager(address) as listening:
        async with Notifier(address) as notifier:
            for _ in range(10_000):  # no queue of datagrams is as long
                notifier.serving(lambda: "serves")
            listening.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    listening.recv(4096)
            listening.settimeout(WAIT_S)
            notifier.stopping()
            assert await heard(listening) == ["STATUS=stopping", "STOPPING=1"]


async def test_a_status_that_cannot_be_made_costs_no_heartbeat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = str(tmp_path / "notify")
    with manager(address) as listening:
        async with Notifier(address, watchdog_s=0.06) as notifier:
            await heard(listening)
            notifier.serving(lambda: str(1 // 0))
            for _ in range(2):
                assert await heard(listening) == ["STATUS=serving", "READY=1", "WATCHDOG=1"]
    assert "ZeroDivisionError" in caplog.text


def test_a_status_cannot_say_anything_else_to_the_manager() -> None:
    said = encode_state(Phase.STOPPING, "gone\nMAINPID=1\nWATCHDOG=trigger", watched=False)
    assert said.split(b"\n") == [b"STATUS=gone\\nMAINPID=1\\nWATCHDOG=trigger", b"STOPPING=1"]
