"""docs/cache.md: its examples run as they stand; docs/wire.md has every message of a cache with number and fields."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import types
from pathlib import Path

import msgspec
import pytest
from e2e.command_mesh import felix_command
from region_home import make_region, running

from felix import cache_messages

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cache.md").read_text()
WIRE = (DOCS / "wire.md").read_text().split("## Caches")[1].split("\n## ")[0]
STRUCTS = [
    held
    for held in vars(cache_messages).values()
    if isinstance(held, type)
    and issubclass(held, cache_messages.Positional)
    and held is not cache_messages.Positional
]


async def test_every_example_and_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    assert len(examples) == 6
    async with running(make_region(tmp_path, "us-east")):
        for number, example in enumerate(examples):
            code = compile(example, f"docs/cache.md example {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            async with asyncio.timeout(120):
                if code.co_flags & inspect.CO_COROUTINE:
                    await types.FunctionType(code, {"__name__": "example"})()
                else:
                    await asyncio.to_thread(exec, code, {"__name__": "example"})
        (commands,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.S | re.M)
        for line in commands.splitlines():
            await asyncio.to_thread(felix_command, tmp_path, *line.split()[1:])


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda held: held.__name__)
def test_every_message_stands_with_its_number_and_fields(struct: type[msgspec.Struct]) -> None:
    (row,) = re.findall(rf"^\| `{struct.__name__}` \| {struct.__struct_config__.tag} \|.*$", WIRE, re.M)
    for name in struct.__struct_fields__:
        assert f"`{name}`" in row, f"{struct.__name__} is described without {name}"


def test_the_numbers_named_are_those_of_the_code() -> None:
    from felix.frames import CALL_BYTES_MAX, FRAME_HEADER_BYTES
    from region.cache.state import ENTRY_BYTES, OPERATIONS_MAX

    assert f"{cache_messages.VALUE_BYTES_MAX:,}" in WIRE and f"{cache_messages.KEYS_MAX:,}" in WIRE
    assert f"{CALL_BYTES_MAX + FRAME_HEADER_BYTES:,}" in WIRE
    assert f"{OPERATIONS_MAX:,}" in WIRE and f"{OPERATIONS_MAX:,}" in PAGE
    assert f"{ENTRY_BYTES} bytes" in PAGE
