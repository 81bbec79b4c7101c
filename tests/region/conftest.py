from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from region_home import make_region, running
from region_peer import client

import felix
from felix.transport.port import ENGINE_NAMES
from region.config import load_config
from region.folder import RegionFolder
from region.founding import issue_identity
from region.node import Node, now_ms


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RegionFolder:
    """A founded region with an operator and an application's identity; its data are each test's own."""
    folder = make_region(tmp_path_factory.mktemp("home"), "us-east")
    issue_identity(folder, load_config(folder.config), "client", "orders-svc", now_ms())
    return folder


@pytest.fixture(params=ENGINE_NAMES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def node(folder: RegionFolder, tmp_path: Path) -> AsyncIterator[Node]:
    """A broker of the region on its own data."""
    async with running(folder, data=str(tmp_path / "data")) as made:
        yield made


@pytest.fixture
async def operator(node: Node) -> AsyncIterator[felix.RegionClient]:
    async with client(node.folder) as made:
        yield made
