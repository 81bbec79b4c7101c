"""What a region answers to somebody who may not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

from e2e.command_mesh import CommandMesh

from felix.errors import FelixError


def refusal_of(mesh: CommandMesh, work: Coroutine[Any, Any, object]) -> FelixError:
    """Run what must be refused, in this mesh's home; the refusal."""
    before = os.environ.get("FELIX_HOME")
    os.environ["FELIX_HOME"] = str(mesh.home)
    try:
        asyncio.run(work)
    except FelixError as error:
        return error
    finally:
        if before is None:
            del os.environ["FELIX_HOME"]
        else:
            os.environ["FELIX_HOME"] = before
    raise AssertionError("It was not refused.")
