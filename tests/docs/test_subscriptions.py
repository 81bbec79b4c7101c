"""docs/subscriptions.md: its example and commands run as they stand; its settings and numbers are those of the code."""

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
from region_peer import client

from felix.settings import Retries, SubscriptionSettings
from felix.subscription import CREDIT_BYTES_MIN
from region.subscriptions.entries import RANGES_MAX
from region.subscriptions.progress import DYING_MAX
from region.subscriptions.service import SUBSCRIPTIONS_MAX
from region.views.dead_letter import DEAD_SUBSCRIPTION

PAGE = (Path(__file__).parents[2] / "docs" / "subscriptions.md").read_text()
DEPARTURES = "acme/ops/departures"


async def test_the_commands_run(tmp_path: Path) -> None:
    async with running(make_region(tmp_path, "us-east")) as node, client(node.folder) as region:
        await region.create_stream(DEPARTURES)
        await region.stream(DEPARTURES).publish_many([b"%d" % n for n in range(11)])
        blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.S | re.M)
        for line in "".join(blocks).splitlines():
            await asyncio.to_thread(felix_command, tmp_path, *line.split()[1:])
        await region.stream(DEPARTURES).delete_subscription("billing")


async def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with running(make_region(tmp_path, "us-east")) as node, client(node.folder) as region:
        await region.create_stream(DEPARTURES)
        await region.stream(DEPARTURES).publish(b"AA 1")
        (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
        code = compile(example, "docs/subscriptions.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        async with asyncio.timeout(120):
            await types.FunctionType(code, {"__name__": "example"})()
        state = await region.stream(DEPARTURES).describe_subscription("billing")
        assert state.shards[0].committed == 1


def test_every_setting_is_in_the_table() -> None:
    named = set(re.findall(r"^\| `([a-z_.]+)` \|", PAGE, re.M))
    wanted = {field.name for field in msgspec.structs.fields(SubscriptionSettings)} - {"retries"}
    assert wanted | {f"retries.{field.name}" for field in msgspec.structs.fields(Retries)} <= named


def test_the_numbers_are_those_of_the_code() -> None:
    numbers = (SUBSCRIPTIONS_MAX, DYING_MAX, RANGES_MAX, CREDIT_BYTES_MIN, SubscriptionSettings().unacked_max)
    for number in numbers:
        assert f"{number:,}" in PAGE, number
    assert f"`{DEAD_SUBSCRIPTION}`" in PAGE
