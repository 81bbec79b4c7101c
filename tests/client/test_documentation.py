"""Every example of docs/sdk.md, run in order against a real broker."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import types
from pathlib import Path

import msgspec
import pytest

from felix.address import Address
from felix.runtime.real import now_ms
from region.bootstrap import found_region, write_profile
from region.config import load_config
from region.folder import RegionFolder
from region.node import Node

PAGE = Path(__file__).parents[2] / "docs" / "sdk.md"


async def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    assert len(examples) >= 8
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = RegionFolder(tmp_path / "us-east")
    found_region(
        folder,
        region="us-east",
        mesh="acme",
        country="US",
        jurisdiction="US",
        entity="Acme Inc",
        listen=Address("127.0.0.1", 0),
        health=None,
        now_ms=now_ms(),
    )
    config = msgspec.structs.replace(load_config(folder.config), listen=Address("127.0.0.1", 0))
    node = await Node.start(folder, config)
    try:
        write_profile(folder, "us-east", "acme", node.address)
        for number, example in enumerate(examples):
            code = compile(example, f"docs/sdk.md example {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            async with asyncio.timeout(120):
                if code.co_flags & inspect.CO_COROUTINE:
                    await types.FunctionType(code, {"__name__": "example"})()
                else:
                    await asyncio.to_thread(exec, code, {"__name__": "example"})
    finally:
        await node.stop()
