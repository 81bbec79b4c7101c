"""Machines of a small network on one kernel: each has a network namespace of its own, behind a bridge, and a disk whose power can be cut.

All of it lives in namespaces (network, mounts, processes) that `in_namespaces` makes, and is gone with them. It needs root on Linux, `ip`,
`nsenter`, `unshare`, `mkfs.ext4` and loop devices.

- What one machine sends to another is dropped by giving it a hardware address for the other that nobody has: in one direction, without a word
  to either, also for connections that stand.
- A disk is an ext4 of its own in a file, which a file beside what a process writes fills to the last block, and which hangs while it is frozen. A power cut is EXT4_IOC_SHUTDOWN without writing its journal out: what was not synced is gone at
  the next mount, as on a disk whose power failed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

NETWORK: Final = "10.77.0"
CLIENT: Final = f"{NETWORK}.1"
"""Where the play itself is: it reaches every machine."""
DISK_BYTES: Final = 512 << 20
"""Sparse: a play writes some tens of MB."""
FILLER: Final = "filler"
FILLED_AT_ONCE: Final = tuple(1 << bits for bits in range(26, 11, -2))
"""Bytes: down to a block."""
NOBODY: Final = "02:00:00:00:00:99"
"""A hardware address that no machine has."""
END_S: Final = 60.0
_SHUTDOWN: Final = 0x8004587D
"""EXT4_IOC_SHUTDOWN: _IOR('X', 125, u32)."""
_NO_LOG_FLUSH: Final = 2
_UNSHARE: Final = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def why_not() -> str:
    """Why machines cannot be made here; empty where they can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "machines with networks and disks of their own need root on Linux"
    for name in ("ip", "nsenter", "unshare", "mkfs.ext4", "mount", "fsfreeze"):
        if shutil.which(name) is None:
            return f"machines with networks and disks of their own need the command {name}"
    tried = subprocess.run(
        [*_UNSHARE, "ip", "link", "add", "felix0", "type", "bridge"], capture_output=True, text=True
    )
    if tried.returncode:
        return f"this kernel makes no network namespaces with bridges here: {tried.stderr.strip()}"
    if not os.path.exists("/dev/loop-control"):
        return "disks whose power can be cut need loop devices"
    return ""


def in_namespaces(command: Sequence[str]) -> list[str]:
    """The command, alone with its children in a network, a table of mounts and a table of processes."""
    return [*_UNSHARE, *command]


def begin_network() -> None:
    """The bridge; once, in new namespaces."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "felix0", "type", "bridge")
    _run("ip", "addr", "add", f"{CLIENT}/24", "dev", "felix0")
    _run("ip", "link", "set", "felix0", "up")


class Machine:
    """One of them. `folder`: where its disk is seen; what is below it lies on a disk of its own."""

    def __init__(self, number: int, folder: Path, image: Path) -> None:
        """`number`: 2 to 250, the last part of its address."""
        self.address: Final = f"{NETWORK}.{number}"
        self.folder: Final = folder
        self._image: Final = image
        self._cut: set[str] = set()
        self._hangs = False
        self.process: subprocess.Popen[bytes] | None = None
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._await_namespace()
        link = f"machine{number}"
        _run(
            "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(self._holder.pid)
        )
        _run("ip", "link", "set", link, "master", "felix0", "up")
        for words in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            self._ip(*words.split())
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        folder.mkdir(parents=True, exist_ok=True)
        self._mount()
        (folder / "lost+found").rmdir()

    def _await_namespace(self) -> None:
        ours, limit = os.readlink("/proc/self/ns/net"), time.monotonic() + END_S
        while os.readlink(f"/proc/{self._holder.pid}/ns/net") == ours:
            assert time.monotonic() < limit, "unshare does not begin"
            time.sleep(0.005)

    def _ip(self, *words: str) -> None:
        _run("nsenter", "-t", str(self._holder.pid), "--net", "ip", *words)

    # -- its network -----------------------------------------------------------------------------------

    def cut_off(self, others: Iterable[Machine]) -> None:
        """What this machine sends to the others is lost from now on; what they send arrives."""
        for other in others:
            self._ip("neigh", "replace", other.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
            self._cut.add(other.address)

    def heal(self) -> None:
        """What it sends arrives again."""
        for address in self._cut:
            self._ip("neigh", "del", address, "dev", "eth0")
        self._cut.clear()

    # -- its disk --------------------------------------------------------------------------------------

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.folder))

    def _unmount(self) -> None:
        limit = time.monotonic() + END_S
        while (
            done := subprocess.run(["umount", str(self.folder)], capture_output=True, text=True)
        ).returncode:
            assert time.monotonic() < limit, done.stderr
            time.sleep(0.02)

    def fill(self) -> None:
        """From now on its disk has no room: what is in last blocks of files may still grow by some bytes."""
        with (self.folder / FILLER).open("ab") as file:
            for size in FILLED_AT_ONCE:
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)

    def make_room(self) -> None:
        """Its disk has room again, if it was full."""
        (self.folder / FILLER).unlink(missing_ok=True)

    def hang(self) -> None:
        """What is written to its disk waits from now on, syncs too; what is read is answered."""
        _run("fsfreeze", "--freeze", str(self.folder))
        self._hangs = True

    def go_on(self) -> None:
        """Its disk goes on, if it hung."""
        if self._hangs:
            _run("fsfreeze", "--unfreeze", str(self.folder))
            self._hangs = False

    # -- its process -----------------------------------------------------------------------------------

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Run a command in the machine's network; what it says goes to `log`."""
        assert self.process is None
        with log.open("ab") as said:
            self.process = subprocess.Popen(
                ["nsenter", "-t", str(self._holder.pid), "--net", "--", *command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def signal(self, number: signal.Signals) -> None:
        """To its process, if there is one."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def stop(self) -> None:
        """SIGTERM, and wait until it has ended."""
        self.signal(signal.SIGTERM)
        if self.process is not None:
            self.process.wait(END_S)
            self.process = None

    def kill(self) -> None:
        """SIGKILL; what it wrote stays in the kernel's page cache."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(END_S)
            self.process = None


def cut_power(machines: Sequence[Machine]) -> None:
    """Of all these at one moment: their processes are gone, and what they had not synced."""
    # A process whose disk is gone must not get to say so to anybody.
    for machine in machines:
        machine.signal(signal.SIGSTOP)
    for machine in machines:
        cut_off(machine.folder)
    for machine in machines:
        machine.kill()
    for machine in machines:
        machine._unmount()
        machine._mount()


def cut_off(folder: Path) -> None:
    """The file system at this folder writes nothing any more, its journal neither."""
    disk = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(disk, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    finally:
        os.close(disk)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
