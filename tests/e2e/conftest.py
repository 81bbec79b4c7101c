"""One mesh of real processes for all end-to-end tests that do not break it; those that take it down have one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.command_mesh import CommandMesh, running_mesh


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandMesh]:
    """Both brokers and the agent up, policies in force. Tests use streams of their own."""
    with running_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        yield mesh
