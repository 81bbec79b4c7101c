"""Rounds of faults of a disk, with a bridge agent and two regions of one broker in processes of their own, under load.

    unshare --net --mount --pid --fork --kill-child --mount-proc python -m disks.play_agent FOLDER [--region | --streams | --witness]
        [--rounds N] [--seed S] [--only FAULT …] [--at MOMENT …] [--judge N]

The disk is an ext4 of its own, on which the agent's folder is, the destination's audit log (`--region`) or its streams (`--streams`), or an outside witness without whose cosignatures nothing
crosses (`--witness`). In each round one fault happens at one moment, drawn by the seed from all pairs; then all that was acknowledged has to cross, without a restart, and
the process has to be ready. After every ten rounds, and in the end, all is judged: each record at the destination once and in order, one INTENT and one ACK of each, nothing there without a
leaf, logs that verify. Calls of Python fail by `failing_disk`, those of SQLite by `failing_calls.c`. It needs root on Linux, loop devices, `mkfs.ext4`, `fsfreeze`, and gcc for a witness. Exit code 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cluster.machines import FILLED_AT_ONCE, FILLER, cut_off
from e2e.command_mesh import BRIDGE, DESTINATION, ROOT, SOURCE, CommandMesh, environment, until
from ports import claim_port

import felix
from audit.leaf import Kind, iter_entries
from felix.errors import FelixError

STREAM: Final = "acme/ops/crossing"
HOLD_S: Final = 3.0
"""How long most faults last."""
HANG_S: Final = 14.0
"""How long a disk hangs: longer than it takes until that is said."""
AGAIN_S: Final = 60.0
"""Within this everything goes on once a fault is over."""
LINES_MAX: Final = 150
"""Of the log, for one fault."""
DISK_BYTES: Final = 192 << 20


def run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True)
    assert not check or not done.returncode, f"{' '.join(words)}: {done.stderr}"
    return done


class Disk:
    """The folder of an agent, on an ext4 of its own."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self.image = folder, image
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        kept = folder.with_name(f"{folder.name}.kept")
        if folder.exists():
            folder.rename(kept)
        folder.mkdir(parents=True, exist_ok=True)
        self.mount()
        (folder / "lost+found").rmdir()
        if kept.exists():
            shutil.copytree(kept, folder, dirs_exist_ok=True)
            run("sync", "-f", str(folder))

    def mount(self) -> None:
        run("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.folder))

    def unmount(self, *how: str) -> None:
        limit = time.monotonic() + 30
        while run("umount", *how, str(self.folder), check=False).returncode:
            assert time.monotonic() < limit, "it cannot be unmounted"
            time.sleep(0.05)

    def fill(self) -> None:
        with (self.folder / FILLER).open("ab") as file:
            for size in FILLED_AT_ONCE:
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)

    def make_room(self) -> None:
        (self.folder / FILLER).unlink(missing_ok=True)

    def freeze(self) -> None:
        run("fsfreeze", "--freeze", str(self.folder))

    def thaw(self) -> None:
        run("fsfreeze", "--unfreeze", str(self.folder))

    def cut(self) -> None:
        """Its power: what was not synced is gone at the next mount."""
        cut_off(self.folder)


class Load(threading.Thread):
    """Publishes to the source, a few hundred records a second, each acknowledged."""

    def __init__(self, mesh: CommandMesh) -> None:
        super().__init__(daemon=True)
        self.mesh = mesh
        self.acknowledged = 0
        self.paused = threading.Event()
        self.over = False
        self.failed = 0

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with felix.connect(profile=self.mesh.profile(SOURCE)) as client:
            publisher = client.stream(STREAM)
            while not self.over:
                if self.paused.is_set():
                    await asyncio.sleep(0.05)
                    continue
                first = self.acknowledged
                made = [
                    json.dumps({"flight": number, "tailnum": f"N{number}"}).encode()
                    for number in range(first, first + 5)
                ]
                while made:
                    done = await asyncio.gather(*map(publisher.publish, made), return_exceptions=True)
                    failed = [each for each in done if isinstance(each, BaseException)]
                    if failed:
                        raise failed[0]
                    break
                self.acknowledged += 5
                await asyncio.sleep(0.03)


class Play:
    log = "egress"
    wal = "/egress/wal/"
    whole = f"/{BRIDGE}/"
    is_worn = False

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.random = home, random.Random(seed)
        self.mesh = CommandMesh(home)
        self.told = home / "faults"
        self.said = home / "agent.out"
        self.process: subprocess.Popen[bytes] | None = None
        self.health = f"127.0.0.1:{claim_port()}"
        self.findings: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.revoked: list[tuple[str, str]] = []
        self.revoked_sizes: dict[str, int] = {}

    # -- the process whose disk fails -------------------------------------------------------------------

    words: Sequence[str] = ("bridge", "up", BRIDGE, "--region", SOURCE)
    worn = "has stopped"
    """in the log of a process whose next failure is waited for longer"""

    @property
    def log_folder(self) -> Path:
        return self.disk.folder / "egress"

    def start_agent(self) -> None:
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "failing_disk", "--log-level", "info", *self.words],
                env=environment(
                    self.home, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", TESTS_FAILING_DISK=str(self.told)
                ),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=ROOT,
            )

    def kill_agent(self, number: int = signal.SIGKILL) -> int | None:
        if self.process is None:
            return None
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.process = None
        return code

    def tell(self, *faults: dict[str, Any]) -> None:
        beside = self.told.with_suffix(".new")
        Path(f"{self.told}.done").unlink(missing_ok=True)
        beside.write_text("".join(json.dumps(each) + "\n" for each in faults))
        beside.replace(self.told)

    @property
    def was_hit(self) -> int:
        done = Path(f"{self.told}.done")
        return len(done.read_text().splitlines()) if done.exists() else 0

    def page(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://{self.health}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return str(error.read().decode())
        except OSError as error:
            return f"no page: {error}"

    def not_ready(self) -> str:
        page = self.page("/readyz")
        try:
            return str(json.loads(page)["reason"])
        except ValueError:
            return page

    def metric(self, name: str) -> float | None:
        for line in self.page("/metrics").splitlines():
            if line.split("{")[0].split(" ")[0] == name:
                return float(line.rsplit(" ", 1)[1])
        return None

    def used(self) -> tuple[float, int]:
        """Seconds of processor time, and bytes of memory."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return ticks / os.sysconf("SC_CLK_TCK"), pages * 4096

    # -- life ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        mesh = self.mesh
        mesh.found()
        config = mesh.us.bridge(BRIDGE) / "bridge.yaml"
        config.write_text(config.read_text() + f"health: {self.health}\n")
        self.disk = Disk(mesh.us.bridge(BRIDGE), self.home / "agent.img")
        mesh.up()
        mesh.enact_policies()
        mesh.create(STREAM)
        self.grant = mesh.prepare(STREAM)
        self.start_agent()
        until(lambda: self.not_ready() == "", "an agent that is ready")
        self.load = Load(mesh)
        self.load.start()
        self.crossed_all()

    def crossed(self) -> int:
        return self.mesh.size(DESTINATION, STREAM)

    def crossed_all(self, timeout_s: float = AGAIN_S) -> bool:
        """Whether all that was acknowledged by now is at the destination in time."""
        wanted, limit = self.load.acknowledged, time.monotonic() + timeout_s
        while time.monotonic() < limit:
            with contextlib.suppress(FelixError):
                if self.crossed() >= wanted:
                    return True
            time.sleep(0.2)
        return False

    def finding(self, text: str) -> None:
        print(f"    !! {text}", flush=True)
        self.findings.append(text)

    # -- a round ---------------------------------------------------------------------------------------

    def round(self, number: int, moment: str, fault: str) -> None:
        began = time.monotonic()
        if self.is_worn:
            # A log that fails again soon is tried after a longer pause.
            self.kill_agent(self.random.choice((signal.SIGTERM, signal.SIGKILL)))
            self.is_worn = False
        if self.process is None or self.process.poll() is not None:
            self.start_agent()
            until(lambda: self.not_ready() == "", "an agent that is ready")
        said_before = self.said.stat().st_size
        held = getattr(self, f"fault_{fault}")
        used_s, _ = self.used()
        row: dict[str, Any] = {"round": number, "moment": moment, "fault": fault}
        with contextlib.ExitStack() as stack:
            after = getattr(self, f"at_{moment}")()
            if after is not None:
                stack.callback(after)
            observed: list[str] = []
            held(observed)
            row["observed"] = observed
        ended_s = time.monotonic()
        row["code"] = None
        if self.process is not None and self.process.poll() is not None:
            row["code"] = self.process.returncode
            self.process = None
        if self.process is None:
            self.start_agent()
        is_again = self.crossed_all()
        row["again_s"] = round(time.monotonic() - ended_s, 1)
        if not is_again:
            why = self.not_ready()
            row["stuck"] = why
            links = [(link.state, link.reason) for link in self.mesh.links(STREAM)]
            self.finding(f"{moment}/{fault}: did not go on in {AGAIN_S:.0f} s: {why!r} {links}")
            code = self.kill_agent(signal.SIGTERM)
            row["stopped_code"] = code
            self.start_agent()
            if not self.crossed_all():
                links = [(link.state, link.reason) for link in self.mesh.links(STREAM)]
                raise AssertionError(f"not even with a restart: {self.not_ready()!r} {links}")
            row["restart"] = True
        now_s, now = self.used()
        took_s = time.monotonic() - began
        row["cpu"] = round((now_s - used_s if now_s >= used_s else now_s) / took_s, 2)
        row["mb"] = now >> 20
        row["lines"] = self.said.read_bytes()[said_before:].count(b"\n")
        if row["lines"] > LINES_MAX:
            self.finding(f"{moment}/{fault}: {row['lines']} lines of log in {took_s:.0f} s")
        if row["cpu"] > 0.8:
            self.finding(f"{moment}/{fault}: {row['cpu']} of a processor over {took_s:.0f} s")
        text = self.said.read_bytes()[said_before:].decode(errors="replace")
        self.is_worn = self.worn in text
        if "Traceback" in text:
            self.finding(f"{moment}/{fault}: a trace in the log")
        if not self.settled():
            self.finding(f"{moment}/{fault}: not ready afterwards: {self.not_ready()}")
        self.rows.append(row)
        with (self.home / "rows.json").open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        print(
            f"{number:4} {moment:10} {fault:22} again {row['again_s']:5.1f} s  cpu {row['cpu']:.2f}  {row['mb']} MB  "
            f"{row['lines']:3} lines  code {row['code']}  {'RESTART ' if row.get('restart') else ''}"
            f"{' | '.join(sorted({each[:110] for each in row['observed'] if each}))}",
            flush=True,
        )

    def settled(self) -> bool:
        limit = time.monotonic() + 20
        while self.not_ready():
            if time.monotonic() > limit:
                return False
            time.sleep(0.2)
        return True

    def watch(self, seconds: float, observed: list[str]) -> None:
        """What the health page says meanwhile."""
        limit = time.monotonic() + seconds
        while True:
            reason = self.not_ready()
            if not observed or observed[-1] != reason:
                observed.append(reason)
            left = limit - time.monotonic()
            if left <= 0:
                failed = self.metric("felix_bridge_audit_failed")
                observed.append(f"audit_failed={failed}")
                return
            time.sleep(min(0.5, left))

    # -- moments ---------------------------------------------------------------------------------------

    def at_crossing(self) -> None:
        time.sleep(self.random.random())

    def at_opening(self) -> None:
        """A region's broker is killed and started, so that sessions and links open under the fault."""
        region = DESTINATION
        self.mesh.kill(region)
        starting = threading.Thread(target=self.mesh.up, args=(region,))
        starting.start()
        return starting.join  # type: ignore[return-value]

    def at_start(self) -> None:
        self.kill_agent(self.random.choice((signal.SIGKILL, signal.SIGTERM)))
        time.sleep(0.5)
        self.start_agent()
        time.sleep(self.random.uniform(0.5, 2.0))

    def at_cosigning(self) -> None:
        # Each three seconds: somewhere in it.
        time.sleep(self.random.uniform(0, 3))

    def at_certificate(self) -> None:
        """A new certificate of the bridge, which the agent takes within 30 s; and new data keys of the stream's tenant."""
        self.mesh.felix("identity", "issue", BRIDGE, "--kind", "bridge", "--region", SOURCE)

    def at_pause(self) -> Any:
        """The grant is paused, and resumed under the fault."""
        self.mesh.felix("bridge", "pause", self.grant, "--region", SOURCE)
        time.sleep(1.0)
        resuming = threading.Thread(
            target=lambda: self.mesh.felix("bridge", "resume", self.grant, "--region", SOURCE, code=None)
        )
        resuming.start()

        def after() -> None:
            resuming.join()
            self.mesh.felix("bridge", "resume", self.grant, "--region", SOURCE, code=None)

        return after

    def at_revoking(self) -> Any:
        """Another stream's grant is made and revoked while it crosses; it has to be revoked at the destination in the end."""
        stream = f"acme/ops/revoked{self.random.randrange(1 << 40)}"
        self.mesh.create(stream)
        grant = self.mesh.prepare(stream)
        self.mesh.send(stream, [b'{"flight": 1, "tailnum": "N1"}'] * 50)
        self.mesh.arrived(stream, 50)
        self.mesh.send(stream, [b'{"flight": 2, "tailnum": "N2"}'] * 50)
        revoking = threading.Thread(
            target=lambda: self.mesh.felix(
                "bridge", "revoke", grant, "--region", SOURCE, "--reason", "a test", code=None
            )
        )
        revoking.start()
        time.sleep(self.random.random() * 0.2)

        def after() -> None:
            revoking.join()
            self.revoked.append((stream, grant))

        return after

    # -- faults ----------------------------------------------------------------------------------------

    def fault_full(self, observed: list[str]) -> None:
        self.disk.fill()
        self.watch(HOLD_S + self.random.random() * 3, observed)
        self.disk.make_room()

    def _shim(self, observed: list[str], hold_s: float = HOLD_S, **fault: Any) -> None:
        self.tell({"times": 1, "error": "EIO", **fault})
        self.watch(hold_s, observed)
        observed.append(f"hit {self.was_hit}")
        self.tell()

    def fault_write_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="write", path=self.wal)

    def fault_sync_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="sync", path=self.wal)

    def fault_tile_sync_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="sync", path=f"{self.log}/tile")

    def fault_checkpoint_sync_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="sync", path=f"{self.log}/checkpoint")

    def fault_cosigned_sync_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="sync", path=f"{self.log}/cosigned", hold_s=5)

    def fault_shown_sync_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="sync", path="/regions/", hold_s=5)

    def fault_folder_sync_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="sync_folder", path=f"/{self.log}")

    def fault_rename_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="rename", path=f"/{self.log}")

    def fault_open_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="open", path=f"/{self.log}")

    def fault_read_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="read", path=f"/{self.log}", times=3, hold_s=5)

    def fault_read_only(self, observed: list[str]) -> None:
        """Each call that writes is refused, for a while, as after a remount."""
        self.tell(*(
            {"call": call, "path": self.whole, "error": "EROFS"}
            for call in ("write", "truncate", "rename", "remove")
        ), {"call": "sync", "path": self.whole, "error": "EROFS"})  # fmt: skip
        self.watch(HOLD_S, observed)
        self.tell()

    def fault_broken_for_long(self, observed: list[str]) -> None:
        """Everything fails for 20 s."""
        self.tell(*(
            {"call": call, "path": self.whole, "error": "EIO"}
            for call in ("open", "write", "sync", "sync_folder", "truncate", "rename", "remove", "read")
        ))  # fmt: skip
        self.watch(20, observed)
        self.tell()

    def fault_sync_hangs(self, observed: list[str]) -> None:
        self.tell({"call": "sync", "path": self.wal, "hang_s": HANG_S, "times": 1})
        self.watch(HANG_S, observed)
        observed.append(f"hit {self.was_hit}")
        self.tell()

    def fault_disk_hangs(self, observed: list[str]) -> None:
        self.disk.freeze()
        try:
            self.watch(HANG_S, observed)
        finally:
            self.disk.thaw()

    def fault_power(self, observed: list[str]) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.disk.cut()
        self.kill_agent()
        self.disk.unmount()
        self.disk.mount()

    def fault_sync_fails_then_power(self, observed: list[str]) -> None:
        self._shim(observed, call="sync", path=self.wal, hold_s=self.random.choice((0.3, 2, 8)))
        self.fault_power(observed)

    def fault_kill(self, observed: list[str]) -> None:
        self.kill_agent()

    def fault_aborted(self, observed: list[str]) -> None:
        """The kernel makes the file system read-only after an error; somebody mounts it anew below the agent."""
        run("mount", "-o", "remount,abort", str(self.disk.folder), check=False)
        self.watch(HOLD_S, observed)
        began = time.monotonic()
        observed.append(f"SIGTERM {self.kill_agent(signal.SIGTERM)} in {time.monotonic() - began:.0f} s")
        self.disk.unmount()
        run("e2fsck", "-fy", str(self.disk.image), check=False)
        self.disk.mount()

    def fault_unmounted(self, observed: list[str]) -> None:
        """The disk goes from below the agent, and comes back."""
        self.disk.unmount("-l")
        self.watch(HOLD_S, observed)
        self.disk.mount()

    def fault_moved_away(self, observed: list[str]) -> None:
        egress = self.log_folder
        egress.rename(egress.with_name("elsewhere"))
        self.watch(HOLD_S, observed)
        if egress.exists():
            observed.append(f"made anew: {sorted(each.name for each in egress.iterdir())}")
            shutil.rmtree(egress)
        egress.with_name("elsewhere").rename(egress)

    def fault_mounted_over(self, observed: list[str]) -> None:
        """An older copy of the log's folder is mounted over it for a while."""
        older = self.home / "older"
        shutil.rmtree(older, ignore_errors=True)
        shutil.copytree(self.log_folder, older)
        time.sleep(2)
        run("mount", "--bind", str(older), str(self.log_folder))
        self.watch(6, observed)
        run("umount", str(self.log_folder))

    def fault_descriptors(self, observed: list[str]) -> None:
        assert self.process is not None
        pid = self.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        count = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, hard))
        try:
            self.watch(HOLD_S + 2, observed)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    def fault_clock_ahead(self, observed: list[str]) -> None:
        self.tell({"clock_ms": 3_600_000 * self.random.choice((1, 24, 24 * 400))})
        self.watch(HOLD_S, observed)
        self.tell()

    def fault_clock_behind(self, observed: list[str]) -> None:
        self.tell({"clock_ms": -3_600_000 * self.random.choice((1, 24, 24 * 400))})
        self.watch(HOLD_S, observed)
        self.tell()

    # -- the judgement ---------------------------------------------------------------------------------

    def judge(self) -> None:
        self.load.paused.set()
        time.sleep(0.5)
        assert self.crossed_all(), f"not everything crossed: {self.not_ready()}"
        wanted = self.load.acknowledged
        until(lambda: not self.mesh.felix("audit", "verify", code=None).code, "logs that are all cosigned")
        self.judge_all(wanted)
        until(lambda: self.not_ready() == "", "an agent that is ready")
        self.load.paused.clear()

    def judge_all(self, wanted: int) -> None:
        """Of so many records, with the process that is broken ended in order, and started again."""
        assert self.crossed() == wanted, (self.crossed(), wanted)
        found = self.arrived(wanted)
        assert found == list(range(wanted)), f"another order or another record: {first_difference(found)}"
        code = self.kill_agent(signal.SIGTERM)
        assert code in (0, 143), code
        self.judge_logs(wanted)
        self.start_agent()

    def judge_logs(self, wanted: int) -> None:
        announced = self.offsets(self.mesh.egress, Kind.INTENT)
        assert announced == list(range(wanted)), f"INTENT: {first_difference(announced)}"
        logged = self.offsets(self.mesh.ingress, Kind.ACK)
        assert logged == list(range(wanted)), f"ACK: {first_difference(logged)}"
        verified = self.mesh.felix("audit", "verify", "--json").json()["items"]
        assert all(report["ok"] for report in verified), verified
        for stream, grant in self.revoked:
            leaves = self.mesh.leaves(self.mesh.egress, Kind.REVOKE)
            assert any(leaf.header.grant_id == grant for leaf in leaves), f"{grant} has no REVOKE leaf"
            said = self.offsets(self.mesh.egress, Kind.INTENT, stream)
            there = self.offsets(self.mesh.ingress, Kind.ACK, stream)
            assert said[: len(there)] == there == list(range(len(there))), (stream, said, there)
            assert self.revoked_sizes[stream] == len(there), (stream, self.revoked_sizes[stream], there)
        unanswered = sum(report["unanswered"] for report in verified)
        # Of a grant that was revoked what was announced may have no answer.
        assert unanswered <= len(self.revoked), verified
        print(
            f"  judged: {wanted} records, each once and in order; {len(self.revoked)} grants revoked; logs hold",
            flush=True,
        )

    def arrived(self, count: int) -> list[int]:
        self.revoked_sizes = {stream: self.mesh.size(DESTINATION, stream) for stream, _ in self.revoked}

        async def work(client: Any) -> list[int]:
            found: list[int] = []
            async with asyncio.timeout(120):
                async for record in client.stream(STREAM).subscribe(start="earliest"):
                    found.append(json.loads(bytes(record.payload))["flight"])
                    if len(found) == count:
                        break
            return found

        return self.mesh.ask(DESTINATION, work)

    def offsets(self, log: Path, kind: Kind, stream: str = STREAM) -> list[int]:
        return [
            entry.offset
            for leaf in self.mesh.leaves(log, kind, stream=stream)
            for entry in iter_entries(leaf)
        ]


class RegionPlay(Play):
    """The same of the audit log of the destination, a region of one broker."""

    log = "audit"
    wal = "/audit/wal/"
    whole = "/data/audit/"
    words = ("region", "up", DESTINATION)

    @property
    def log_folder(self) -> Path:
        return self.disk.folder

    def begin(self) -> None:
        mesh = self.mesh
        mesh.found()
        config = mesh.eu.root / "region.yaml"
        text = config.read_text()
        config.write_text(
            "".join(
                f"health: {self.health}\n" if line.startswith("health:") else line
                for line in text.splitlines(keepends=True)
            )
        )
        assert self.health in config.read_text(), text
        self.disk = Disk(mesh.eu.root / "data" / self.log, self.home / f"{self.log}.img")
        mesh.up(SOURCE)
        self.start_agent()
        until(lambda: self.not_ready() == "", "a broker that is ready")
        mesh.enact_policies()
        mesh.create(STREAM)
        self.grant = mesh.prepare(STREAM)
        mesh.agent_up()
        self.load = Load(mesh)
        self.load.start()
        self.crossed_all()

    def metric(self, name: str) -> float | None:
        return super().metric(name.replace("felix_bridge_", "felix_"))

    def at_opening(self) -> Any:
        state = json.loads(self.mesh.agent_pid_file.read_text())
        os.kill(state["pid"], signal.SIGKILL)
        time.sleep(0.5)
        starting = threading.Thread(target=self.mesh.agent_up)
        starting.start()
        return starting.join

    at_certificate = Play.at_crossing
    fault_shown_sync_fails = Play.fault_sync_fails

    def fault_moved_away(self, observed: list[str]) -> None:
        """It is a mount point. Who starts while it is gone begins another log, and is for a person."""
        if self.process is not None and self.metric("felix_bridge_audit_failed") is not None:
            self.fault_unmounted(observed)

    def fault_unmounted(self, observed: list[str]) -> None:
        if self.process is not None and self.metric("felix_bridge_audit_failed") is not None:
            super().fault_unmounted(observed)

    def judge(self) -> None:
        self.load.paused.set()
        time.sleep(0.5)
        assert self.crossed_all(), f"not everything crossed: {self.not_ready()}"
        self.mesh.agent_down()
        assert self.settled(), self.not_ready()
        self.judge_all(self.load.acknowledged)
        until(lambda: self.not_ready() == "", "a broker that is ready")
        self.mesh.agent_up()
        self.load.paused.clear()


class StreamsPlay(RegionPlay):
    """The same of the streams of the destination, each of one copy."""

    log = "streams"
    wal = ".seg"
    whole = "/data/streams/"
    worn = "disk had failed"

    def fault_unmounted_and_needed(self, observed: list[str]) -> None:
        """A sync fails while the folder is away: what is opened again has to wait for it."""
        if self.process is None or self.metric("felix_bridge_audit_failed") is None:
            return
        self.disk.unmount("-l")
        self._shim(observed, call="sync", path=self.wal, hold_s=8)
        left = sorted(each.name for each in self.disk.folder.iterdir())
        if left:
            self.finding(f"made in another folder: {left}")
        self.disk.mount()


class WitnessPlay(Play):
    """The same of an outside witness without whose cosignatures nothing crosses."""

    log = ""
    wal = "state.db"
    whole = "/witness/"

    @property
    def words(self) -> Sequence[str]:  # type: ignore[override]
        return ("witness", "serve", "--dir", str(self.folder), "--listen", f"127.0.0.1:{self.port}")

    @property
    def log_folder(self) -> Path:
        return self.folder

    def begin(self) -> None:
        mesh = self.mesh
        mesh.found()
        self.port = claim_port()
        self.folder = self.home / "witness"
        made = mesh.felix("witness", "init", "w.example/w1", "--dir", str(self.folder)).out
        keys = [line for line in made.splitlines() if line.startswith("w.example/w1+")]
        logs = self.home / "logs.policy"
        bundles = [word for each in (mesh.us, mesh.eu) for word in ("--bundle", str(each.bundle))]
        logs.write_text(mesh.felix("audit", "policy", "--signing", *bundles).out)
        mesh.felix("witness", "add-log", "--from", str(logs), "--dir", str(self.folder))
        self.disk = Disk(self.folder, self.home / "witness.img")
        self.library = self.home / "failing.so"
        run(
            "gcc", "-shared", "-fPIC", "-O1", "-o", str(self.library),
            str(Path(__file__).parents[1] / "failing_calls.c"), "-ldl",
        )  # fmt: skip
        policy = mesh.us.bridge(BRIDGE) / "witnesses.policy"
        policy.write_text(f"witness w {keys[0]}\nquorum w\n")
        config = mesh.us.bridge(BRIDGE) / "bridge.yaml"
        config.write_text(
            f"{config.read_text()}health: {self.health}\nwitnesses:\n  - url: http://127.0.0.1:{self.port}/\n"
            f"    keys: {json.dumps(keys)}\nrequire_quorum: {{policy: {policy}, max_lag: 3s}}\n"
        )
        mesh.up()
        mesh.enact_policies()
        mesh.create(STREAM)
        self.grant = mesh.prepare(STREAM)
        self.start_agent()
        mesh.agent_up()
        until(lambda: self.not_ready() == "", "an agent that is ready")
        self.load = Load(mesh)
        self.load.start()
        self.crossed_all()

    def start_agent(self) -> None:
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", "--log-level", "info", *self.words],
                env=environment(self.home, LD_PRELOAD=str(self.library), TESTS_FAILING_CALLS=str(self.told)),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=ROOT,
            )

    def tell(self, *faults: dict[str, Any]) -> None:
        """One at a time: `call path errno times hang_s`."""
        Path(f"{self.told}.done").unlink(missing_ok=True)
        self.told.unlink(missing_ok=True)
        if faults:
            one = faults[0]
            beside = self.told.with_suffix(".new")
            number = getattr(errno, one["error"]) if one.get("error") else 0
            beside.write_text(
                f"{one['call']} {one['path'] or '/witness/'} {number} {one.get('times', 1_000_000)} {one.get('hang_s', 0)}\n"
            )
            beside.replace(self.told)

    def cosigned(self) -> int:
        """What the egress log shows of the witness."""
        return int(self.metric("felix_bridge_witness_leaves") or 0)

    def watch(self, seconds: float, observed: list[str]) -> None:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            reason = self.not_ready()
            if not observed or observed[-1] != reason:
                observed.append(reason)
            time.sleep(0.5)
        observed.append(f"failures={self.metric('felix_bridge_witness_failures')}")

    def round(self, number: int, moment: str, fault: str) -> None:
        before = self.cosigned()
        super().round(number, moment, fault)
        listed = self.mesh.felix("witness", "list", "--dir", str(self.folder), "--json").json()["items"]
        sizes = {each["origin"]: each["size"] for each in listed}
        egress = next(size for origin, size in sizes.items() if BRIDGE in origin)
        assert egress >= before, f"the witness forgot: {egress} of {before}"

    def at_opening(self) -> Any:
        return RegionPlay.at_opening(self)  # type: ignore[arg-type]

    at_certificate = at_pause = at_revoking = Play.at_cosigning

    def fault_moved_away(self, observed: list[str]) -> None:
        self.fault_unmounted(observed)

    def fault_journal_sync_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="sync", path="state.db-journal", hold_s=6)

    def fault_state_sync_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="sync", path="state.db", hold_s=6)

    def fault_state_write_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="write", path="state.db", hold_s=6)

    def fault_state_open_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="open", path="state.db-journal", hold_s=6)

    def fault_state_unlink_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="remove", path="state.db-journal", hold_s=6)

    def fault_state_read_fails(self, observed: list[str]) -> None:
        self._shim(observed, call="read", path="state.db", times=5, hold_s=6)

    def judge(self) -> None:
        self.load.paused.set()
        time.sleep(0.5)
        assert self.crossed_all(), f"not everything crossed: {self.not_ready()}"
        wanted = self.load.acknowledged
        until(
            lambda: self.cosigned() >= (self.metric("felix_bridge_audit_leaves") or 0),
            "a witness that has all",
        )
        self.mesh.agent_down()
        code = self.kill_agent(signal.SIGTERM)
        assert code in (0, 143), code
        assert self.arrived(wanted) == list(range(wanted))
        self.judge_logs(wanted)
        self.start_agent()
        self.mesh.agent_up()
        until(lambda: self.not_ready() == "", "an agent that is ready")
        self.load.paused.clear()


def first_difference(found: Sequence[int]) -> str:
    for at, number in enumerate(found):
        if at != number:
            return f"at {at}: {list(found[max(0, at - 3) : at + 5])} of {len(found)}"
    return f"{len(found)} of them"


STREAMED: Final = (
    "full", "write_fails", "sync_fails", "folder_sync_fails", "rename_fails", "open_fails", "read_fails", "read_only", "broken_for_long", "sync_hangs",
    "disk_hangs", "power", "sync_fails_then_power", "kill", "unmounted", "unmounted_and_needed", "mounted_over", "descriptors",
)  # fmt: skip
WITNESSED: Final = (
    "full", "sync_hangs", "disk_hangs", "power", "kill", "aborted", "unmounted", "descriptors", "journal_sync_fails", "state_sync_fails",
    "state_write_fails", "state_open_fails", "state_unlink_fails", "state_read_fails", "read_only",
)  # fmt: skip


def names(kind: str) -> list[str]:
    return [name.removeprefix(f"{kind}_") for name in vars(Play) if name.startswith(f"{kind}_")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--at", nargs="*", default=[])
    parser.add_argument("--region", action="store_true")
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--witness", action="store_true")
    asked = parser.parse_args()
    run("ip", "link", "set", "lo", "up")
    kind = (
        StreamsPlay
        if asked.streams
        else RegionPlay
        if asked.region
        else WitnessPlay
        if asked.witness
        else Play
    )
    play = kind(asked.folder, asked.seed)
    faults = asked.only or list(WITNESSED if asked.witness else STREAMED if asked.streams else names("fault"))
    drawn = [(moment, fault) for fault in faults for moment in asked.at or names("at")]
    play.random.shuffle(drawn)
    try:
        play.begin()
        for number in range(asked.rounds):
            moment, fault = drawn[number % len(drawn)]
            play.round(number, moment, fault)
            if number % asked.judge == asked.judge - 1:
                play.judge()
        play.judge()
    finally:
        if hasattr(play, "load"):
            play.load.over = True
        play.kill_agent()
        play.mesh.close()
        with contextlib.suppress(Exception):
            play.disk.unmount("-l")
    print(f"{len(play.rows)} rounds, {play.load.acknowledged} records; findings:")
    for finding, count in Counter(play.findings).items():
        print(f"  {count} x {finding}")
    sys.exit(bool(play.findings))


if __name__ == "__main__":
    main()
