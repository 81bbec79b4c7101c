"""Regions for tests: founded for real in a temporary folder, brokers in this process on free loopback ports."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import msgspec

from felix.address import Address
from felix.runtime.real import now_ms
from felix.storage.begun import SUFFIX
from region.bootstrap import found_region, write_profile
from region.config import RegionConfig, load_config
from region.folder import RegionFolder
from region.node import Node

COUNTRIES = {"us-east": ("US", "US"), "eu-west": ("IE", "EU"), "ap-south": ("IN", "IN")}


def make_region(home: Path, region: str, mesh: str = "acme", at_ms: int | None = None) -> RegionFolder:
    """A founded region; its broker would listen on a free port. `at_ms`: when it was founded; None: now."""
    country, jurisdiction = COUNTRIES[region]
    folder = RegionFolder.of(region, home)
    found_region(
        folder,
        region=region,
        mesh=mesh,
        country=country,
        jurisdiction=jurisdiction,
        entity=f"Acme {country}",
        listen=Address("127.0.0.1", 0),
        health=None,
        now_ms=now_ms() if at_ms is None else at_ms,
    )
    return folder


def copied(found: Callable[[Path], object], home: Path) -> None:
    """Put into `home` what `found` puts into a folder, once for all tests of this process: regions with the same keys for each.

    Of what a test of brokers computes, a fifth was to found its regions, some twenty files each that are synced with their folders.
    """
    shutil.copytree(_first(found), home, dirs_exist_ok=True)


@cache
def _first(found: Callable[[Path], object]) -> Path:
    home = Path(tempfile.mkdtemp(prefix="felix-regions-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    found(home)
    return home


def us_east(home: Path) -> RegionFolder:
    """A copy of the one region us-east that this process founds for its tests."""
    copied(_found_us_east, home)
    return RegionFolder.of("us-east", home)


def _found_us_east(home: Path) -> None:
    make_region(home, "us-east")


def begin_anew(folder: RegionFolder, name: str) -> None:
    """Remove a folder of the region's data, and what remembers it, as on a machine that never had it."""
    shutil.rmtree(folder.root / "data" / name)
    (folder.root / "data" / f"{name}{SUFFIX}").unlink(missing_ok=True)


def forget_other_data(folder: RegionFolder, config: RegionConfig) -> None:
    """Of a region that several tests share, each with data of its own: another's are not what this broker lacks."""
    if not (folder.root / config.data).exists():
        (folder.root / f"data{SUFFIX}").unlink(missing_ok=True)


@asynccontextmanager
async def running(folder: RegionFolder, **changes: object) -> AsyncIterator[Node]:
    """A broker of the region, in this process. `changes` replace fields of its configuration."""
    config: RegionConfig = msgspec.structs.replace(load_config(folder.config), **changes)
    forget_other_data(folder, config)
    node = await Node.start(folder, config)
    try:
        write_profile(folder, config.region, config.mesh, node.address)
        yield node
    finally:
        await node.stop()
