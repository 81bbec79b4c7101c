"""docs/queues.md: its example and commands run as they stand; docs/wire.md has every message of a queue with its fields."""

from __future__ import annotations

import ast
import asyncio
import re
import types
from pathlib import Path

import msgspec
import pytest
from e2e.command_mesh import felix_command
from region_home import make_region, running

from felix import queue_messages
from felix.messages import Message
from region.queue import shard, state
from region.queue.service import JOBS_MAX

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "queues.md").read_text()
WIRE = (DOCS / "wire.md").read_text().split("## Queues")[1].split("\n## ")[0]
STRUCTS = [
    held
    for held in vars(queue_messages).values()
    if isinstance(held, type) and issubclass(held, Message) and held is not Message
]


async def test_the_example_and_every_command_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with running(make_region(tmp_path, "us-east")):
        blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.S | re.M)
        assert len(blocks) == 2
        for line in "".join(blocks).splitlines():
            words = re.findall(r"'[^']*'|\S+", line)
            await asyncio.to_thread(felix_command, tmp_path, *(word.strip("'") for word in words[1:]))
        (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
        code = compile(example, "docs/queues.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        async with asyncio.timeout(120):
            await types.FunctionType(code, {"__name__": "example"})()


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda held: held.__name__)
def test_every_message_stands_with_its_fields(struct: type[msgspec.Struct]) -> None:
    (row,) = re.findall(rf"^\| `{struct.__struct_config__.tag}` \|.*$", WIRE, re.M)
    for name in struct.__struct_fields__:
        assert f"`{name}`" in row, f"{struct.__name__} is described without {name}"


def test_the_numbers_named_are_those_of_the_code() -> None:
    for number in (state.READY_MAX, state.TRACKED_MAX, shard.TRACKED_FREE, JOBS_MAX, state.FINISHED_MAX):
        assert f"{number:,}" in PAGE, number
    assert f"{shard.JOB_BYTES_MAX:,}" in WIRE
    assert f"{queue_messages.RUNS_MAX:,}" in WIRE and f"{JOBS_MAX:,}" in WIRE
    for header in (shard.PRIORITY, shard.DELAY, shard.DELIVER_AT, shard.DEAD_STREAM, shard.DEAD_SHARD):
        assert f"`{header}`" in PAGE
