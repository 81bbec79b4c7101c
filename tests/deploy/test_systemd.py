"""The units under deploy/systemd: judged by systemd's own tools, and their commands run under a real notify socket."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest
from deploy_words import DEPLOY, UnknownWordError, check_words
from e2e.command_mesh import environment
from ports import claim_port
from region_home import make_region

from audit.witness_sqlite import init_witness
from felix.runtime.real import now_ms
from region.bootstrap import issue_identity
from region.config import load_config

UNITS = DEPLOY / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
WAIT_S = 120.0
EXPOSURE_MAX = 15
"""Tenths of what `systemd-analyze security` calls the overall exposure: what remains is the network and the host's files."""

analyze = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(analyze is None, reason="no systemd-analyze on this machine")


def lines(unit: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.M)


def words(unit: Path) -> list[str]:
    (line,) = lines(unit, "ExecStart")
    return shlex.split(line)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units beside each other, with a command that is on every machine in place of Felix's."""
    folder = tmp_path_factory.mktemp("units")
    for unit in (*SERVICES, *UNITS.glob("*.timer")):
        (folder / unit.name).write_text(unit.read_text().replace("/opt/felix/bin/felix", "/bin/true"))
    return folder


@needs_systemd
def test_systemd_finds_nothing_wrong(installed: Path) -> None:
    assert analyze is not None
    done = subprocess.run(
        [
            analyze,
            "verify",
            "--man=no",
            "--generators=no",
            *(f"./{unit.name}" for unit in installed.iterdir()),
        ],
        cwd=installed,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_a_service_is_exposed_to_little(unit: Path, installed: Path) -> None:
    assert analyze is not None
    done = subprocess.run(
        [analyze, "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", f"./{unit.name}"],
        cwd=installed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@needs_systemd
def test_the_users_of_the_services_are_those_that_sysusers_makes() -> None:
    done = subprocess.run(
        ["systemd-sysusers", "--dry-run", str(UNITS / "felix.sysusers.conf")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = set(re.findall(r"^u (\S+)", (UNITS / "felix.sysusers.conf").read_text(), re.M))
    assert made == {user for unit in SERVICES for user in lines(unit, "User")}


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_a_service_calls_a_command_that_there_is(unit: Path) -> None:
    program, *rest = words(unit)
    assert program == "/opt/felix/bin/felix"
    check_words(rest)


def test_a_command_that_there_is_not_would_be_found() -> None:
    with pytest.raises(UnknownWordError):
        check_words(["region", "up", "us-east", "--for-ever"])
    with pytest.raises(UnknownWordError):
        check_words(["region", "upp", "us-east"])


class Started:
    """A service's process and its manager, which reads at once: the socket has room for few messages."""

    def __init__(self, process: subprocess.Popen[str], manager: socket.socket) -> None:
        self.process = process
        self._manager = manager
        self._messages: SimpleQueue[list[str]] = SimpleQueue()
        Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while message := self._manager.recv(4096):
            self._messages.put(message.decode().split("\n"))

    def hear(self, wanted: str) -> list[list[str]]:
        """All messages up to the first that has a line which begins so."""
        found: list[list[str]] = []
        while not found or not any(line.startswith(wanted) for line in found[-1]):
            found.append(self._messages.get(timeout=WAIT_S))
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._manager.shutdown(socket.SHUT_RD)


def start(unit: Path, instance: str, home: Path, state: dict[str, Path], address: str) -> Started:
    """What systemd would do: the unit's command, with a socket to say how it goes."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind("\0" + address[1:] if address.startswith("@") else address)
    command = [word.replace("%i", instance) for word in words(unit)[1:]]
    for there, here in state.items():
        command = [word.replace(there, str(here)) for word in command]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *command],
        env=environment(home, NOTIFY_SOCKET=address, WATCHDOG_USEC="600000"),
        stderr=subprocess.PIPE,
        text=True,
    )
    return Started(process, manager)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """Broker, agent and witness side by side. The agent's source does not run: that is no reason not to serve."""
    home = tmp_path_factory.mktemp("home")
    us, eu = make_region(home, "us-east"), make_region(home, "eu-west")
    issue_identity(eu, load_config(eu.config), "bridge", "eu-to-us", now_ms())
    (eu.trusted / "us-east.json").write_bytes(us.bundle.read_bytes())
    (eu.root / "bridge.yaml").write_text(
        f"{{name: eu-to-us, mesh: acme, source: eu-west, source_addresses: ['127.0.0.1:{claim_port()}'],\n"
        f"destinations: [{{region: us-east, addresses: ['127.0.0.1:{claim_port()}']}}]}}\n"
    )
    witness = home / "felix-witness"
    init_witness(witness / "w1", "witness.example/w1")
    port = claim_port()
    started = {
        "broker": start(UNITS / "felix-broker@.service", "us-east", home, {}, str(home / "b.sock")),
        "agent": start(
            UNITS / "felix-bridge@.service", "eu-west", home, {"/var/lib/felix-bridge": home}, f"@{home}/a"
        ),
        "witness": start(
            UNITS / "felix-witness.service",
            "",
            home,
            {"/var/lib/felix-witness": witness, "127.0.0.1:7480": Path(f"127.0.0.1:{port}")},
            str(home / "w.sock"),
        ),
    }
    yield started
    for service in started.values():
        service.close()


SERVED = {
    "broker": "STATUS=us-east serves at 127.0.0.1:",
    "agent": "STATUS=There is no session with eu-west",
    "witness": "STATUS=witness.example/w1 serves at http://127.0.0.1:",
}


@pytest.mark.parametrize("name", SERVED)
def test_a_service_is_ready_when_it_serves_and_watched_from_then_on(
    name: str, services: dict[str, Started]
) -> None:
    service = services[name]
    *before, _ = service.hear("READY=1")
    assert all("STATUS=starting" in message for message in before)
    *_, serving = service.hear(SERVED[name])
    assert serving[1:] == ["READY=1", "WATCHDOG=1"]


@pytest.mark.parametrize("name", SERVED)
def test_sigterm_ends_a_service_in_order(name: str, services: dict[str, Started]) -> None:
    service = services[name]
    service.hear("READY=1")
    service.process.terminate()
    service.hear("STOPPING=1")
    _, said = service.process.communicate(timeout=WAIT_S)
    assert service.process.returncode == 0, said
    assert "Traceback" not in said


def test_every_service_restarts_and_every_daemon_is_watched() -> None:
    for unit in SERVICES:
        kind = lines(unit, "Type")
        if kind == ["notify"]:
            assert lines(unit, "Restart") == ["on-failure"] and lines(unit, "WatchdogSec"), unit.name
        else:
            assert kind == ["oneshot"] and (UNITS / f"{unit.stem}.timer").exists(), unit.name


def test_a_report_that_differs_or_is_refused_fails_its_unit() -> None:
    from audit.spark.report import EXIT_DIFFERENCES, EXIT_REFUSED

    allowed = {int(code) for code in lines(UNITS / "felix-report@.service", "SuccessExitStatus")}
    assert allowed == {11} and not allowed & {EXIT_DIFFERENCES, EXIT_REFUSED}
