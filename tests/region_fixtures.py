"""Fixtures of tests with one region and one broker. A conftest.py imports them under the names that its tests use, and
makes the `folder` that they stand on with `founded`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from region_home import make_region, running
from region_peer import client

import felix
from felix.runtime.real import now_ms
from region.bootstrap import issue_identity
from region.config import load_config
from region.folder import RegionFolder
from region.node import Node


def founded(tmp_path_factory: pytest.TempPathFactory, *names: str) -> RegionFolder:
    """A founded region with an operator and an identity for each application; its data are each test's own."""
    folder = make_region(tmp_path_factory.mktemp("home"), "us-east")
    for name in names:
        issue_identity(folder, load_config(folder.config), "client", name, now_ms())
    return folder


@pytest.fixture
async def node(folder: RegionFolder, tmp_path: Path) -> AsyncIterator[Node]:
    """A broker of the region on its own data."""
    async with running(folder, data=str(tmp_path / "data")) as made:
        yield made


@pytest.fixture
async def operator(node: Node) -> AsyncIterator[felix.RegionClient]:
    """The operator's client of it."""
    async with client(node.folder) as made:
        yield made
