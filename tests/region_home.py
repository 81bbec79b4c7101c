"""Regions for tests: founded for real in a temporary folder, brokers in this process on free loopback ports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from felix.address import Address
from felix.runtime.real import now_ms
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


@asynccontextmanager
async def running(folder: RegionFolder, **changes: object) -> AsyncIterator[Node]:
    """A broker of the region, in this process. `changes` replace fields of its configuration."""
    config: RegionConfig = msgspec.structs.replace(load_config(folder.config), **changes)
    node = await Node.start(folder, config)
    try:
        write_profile(folder, config.region, config.mesh, node.address)
        yield node
    finally:
        await node.stop()
