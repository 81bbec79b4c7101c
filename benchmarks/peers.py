"""Peers: the systems that Felix is measured beside, as server processes of their own on this machine's loopback.

A server listens on a free port of 127.0.0.1, keeps its files in a folder of the measurement, and is ended by its
process id. What is not installed is left out with a sentence that says how to get it; nothing is installed here.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from cli.benchmark.processes import HOST
from felix.errors import UnavailableError
from felix.extras import MESH, install_command

START_S: Final = 20.0
"""What a server has for opening its port: much more than it needs, for a busy machine."""
END_S: Final = 5.0

REDIS: Final = "redis"
REDIS_SYNCED: Final = "redis-aof"
NATS: Final = "nats"


class Server(NamedTuple):
    """One kind of peer: its executable, the Python package of its client, how to get them, how to start it."""

    executable: str
    client: str
    package: str
    arguments: Sequence[str]
    """After the executable; {port} and {folder} are filled in."""


SERVERS: Final = {
    REDIS: Server(
        "redis-server",
        "redis",
        "redis-server",
        ("--bind", HOST, "--port", "{port}", "--dir", "{folder}", "--save", "", "--appendonly", "no"),
    ),
    # Synced before it answers, as an `fsync` stream is.
    REDIS_SYNCED: Server(
        "redis-server",
        "redis",
        "redis-server",
        (
            *("--bind", HOST, "--port", "{port}", "--dir", "{folder}", "--save", ""),
            *("--appendonly", "yes", "--appendfsync", "always"),
        ),
    ),
    NATS: Server(
        "nats-server",
        "nats",
        "nats-server",
        ("--addr", HOST, "--port", "{port}", "--jetstream", "--store_dir", "{folder}"),
    ),
}


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """What runs: ports by name of the server; and, for what does not, why and how to change that."""

    ports: dict[str, int]
    versions: dict[str, str]
    skipped: list[str]


def reason_missing(name: str) -> str:
    """Why this server cannot be measured here, with what to do; empty where it can."""
    server = SERVERS[name]
    if shutil.which(server.executable) is None:
        return f"{name} is left out: {server.executable} is not installed (apt-get install {server.package})"
    if find_spec(server.client) is None:
        return f"{name} is left out: its Python client is not installed ({install_command(MESH, 'peers')})"
    return ""


@contextmanager
def running_peers(folder: Path, wanted: Collection[str]) -> Iterator[Peers]:
    """Start those of `wanted` (keys of SERVERS) that are installed, and end them. Raises UnavailableError where one
    that is installed does not come up."""
    ports: dict[str, int] = {}
    versions: dict[str, str] = {}
    skipped: list[str] = []
    with ExitStack() as running:
        for name in SERVERS:
            if name not in wanted:
                continue
            reason = reason_missing(name)
            if reason:
                skipped.append(reason)
                continue
            place = folder / name
            place.mkdir(parents=True)
            ports[name] = running.enter_context(_running(SERVERS[name], place))
            versions[name] = _version(SERVERS[name].executable)
        yield Peers(ports=ports, versions=versions, skipped=skipped)


@contextmanager
def _running(server: Server, folder: Path) -> Iterator[int]:
    port = _free_port()
    words = [word.format(port=port, folder=folder) for word in server.arguments]
    log = folder / "server.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [server.executable, *words], stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=folder
        )
    try:
        _await_port(server.executable, process, port, log)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _await_port(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            socket.create_connection((HOST, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    said = log.read_text(errors="replace")[-500:].strip()
    raise UnavailableError(
        f"{name} did not open its port{': ' + said if said else ''}.", hint="Start it by hand to see why."
    )


def _version(executable: str) -> str:
    """As the server says it, in one line."""
    said = subprocess.run(
        [executable, "--version"], capture_output=True, text=True, check=False, timeout=START_S
    )
    words = (said.stdout or said.stderr).split()
    return next(
        (word.removeprefix("v=").removeprefix("v") for word in words if any(map(str.isdigit, word))), ""
    )
