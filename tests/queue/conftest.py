from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from region_home import make_region, running
from region_peer import client

import felix
from region.config import load_config
from region.folder import RegionFolder
from region.founding import issue_identity
from region.node import Node, now_ms


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RegionFolder:
    """A founded region with an operator and an application's identity; its data are each test's own."""
    folder = make_region(tmp_path_factory.mktemp("home"), "us-east")
    issue_identity(folder, load_config(folder.config), "client", "worker", now_ms())
    return folder


@pytest.fixture
async def node(folder: RegionFolder, tmp_path: Path) -> AsyncIterator[Node]:
    async with running(folder, data=str(tmp_path / "data")) as made:
        yield made


@pytest.fixture
async def operator(node: Node) -> AsyncIterator[felix.RegionClient]:
    async with client(node.folder) as made:
        yield made
