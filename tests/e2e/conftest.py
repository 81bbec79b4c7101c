"""One mesh of real processes for all end-to-end tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.command_mesh import CommandMesh


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandMesh]:
    """Both brokers and the agent up, policies in force. Tests use streams of their own."""
    mesh = CommandMesh(tmp_path_factory.mktemp("mesh"))
    try:
        mesh.found()
        mesh.up()
        mesh.enact_policies()
        mesh.agent_up()
        yield mesh
    finally:
        mesh.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes the mesh down comes last, and finds in its logs what all others did."""
    items.sort(key=lambda item: item.path.name == "test_tampering.py" and item.path.parent.name == "e2e")
