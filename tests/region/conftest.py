from __future__ import annotations

import pytest
from region_fixtures import founded, node, operator

from felix.transport.port import ENGINE_NAMES
from region.folder import RegionFolder

__all__ = ["node", "operator"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RegionFolder:
    return founded(tmp_path_factory, "orders-svc")


@pytest.fixture(params=ENGINE_NAMES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
