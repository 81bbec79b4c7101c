from __future__ import annotations

import pytest
from region_fixtures import founded, node, operator

from region.folder import RegionFolder

__all__ = ["node", "operator"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RegionFolder:
    return founded(tmp_path_factory, "worker")
