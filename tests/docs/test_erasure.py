"""docs/erasure.md: its example and commands run as they stand."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import types
from pathlib import Path

import pytest
from e2e.command_mesh import felix_command
from region_home import make_region, running

PAGE = (Path(__file__).parents[2] / "docs" / "erasure.md").read_text()


async def test_the_example_and_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with running(make_region(tmp_path, "us-east")):
        (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
        code = compile(example, "docs/erasure.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        async with asyncio.timeout(120):
            await types.FunctionType(code, {"__name__": "example"})()
        (commands,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.S | re.M)
        said = [
            await asyncio.to_thread(felix_command, tmp_path, *line.split()[1:])
            for line in commands.splitlines()
        ]
    last = json.loads(said[-1].out.splitlines()[-1])
    assert (last["key"], last["value"]) == ("p-8", "") and "felix.tombstone" in last["headers"]
