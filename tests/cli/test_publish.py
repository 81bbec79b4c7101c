"""`felix stream create` and `publish` with conditions, message ids, linger and compression, as a person types them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.testing
from region_home import make_region, running

from cli.main import app
from felix.errors import OffsetMismatchError, RequestError

STREAM = "acme/ops/typed"


class Command:
    """Runs commands in this process, against a broker in another thread."""

    def __call__(self, *words: str, stdin: str = "") -> str:
        result = typer.testing.CliRunner().invoke(app, words, input=stdin)
        if result.exception is not None:
            raise result.exception
        return result.stdout


@pytest.fixture
def felix_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = make_region(tmp_path, "us-east")
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with running(folder):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield Command()
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


def ends(felix_command: Command) -> list[int]:
    state = json.loads(felix_command("stream", "describe", STREAM, "--json"))
    return [shard["high_watermark"] for shard in state["state"]]


def test_conditions_and_message_ids(felix_command: Command) -> None:
    felix_command("stream", "create", STREAM, "--deduplicate", "10m", "--deduplicate-ids", "50")
    assert "message ids remembered for 10m, 50 per shard" in felix_command("stream", "describe", STREAM)
    felix_command("stream", "publish", STREAM, "--expect-offset", "0", stdin="a\nb\n")
    with pytest.raises(OffsetMismatchError, match="ends at offset 2"):
        felix_command("stream", "publish", STREAM, "--expect-offset", "0", stdin="c\n")
    lines = '{"id": "x"}\n{"id": "y"}\n{"id": "x"}\n'
    for _ in range(2):
        felix_command("stream", "publish", STREAM, "--message-id", "id", stdin=lines)
    assert ends(felix_command) == [4]
    with pytest.raises(RequestError, match="Line 1 has no field 'uuid'"):
        felix_command("stream", "publish", STREAM, "--message-id", "uuid", stdin=lines)
    with pytest.raises(RequestError, match="goes with --expect-offset"):
        felix_command("stream", "publish", STREAM, "--shard", "0", stdin="c\n")
    with pytest.raises(RequestError, match="no line"):
        felix_command("stream", "publish", STREAM, "--expect-offset", "4", stdin="")


def test_linger_and_levels(felix_command: Command) -> None:
    felix_command("stream", "create", STREAM)
    lines = "".join(f'{{"reading": {n}, "sensor": "north gate"}}\n' for n in range(500))
    felix_command("stream", "publish", STREAM, "--compress", "--level", "9", "--linger", "5ms", stdin=lines)
    assert felix_command("stream", "subscribe", STREAM, "--from", "earliest", "--until-end") == lines
    (shard,) = json.loads(felix_command("stream", "describe", STREAM, "--json"))["state"]
    assert shard["high_watermark"] == 500
    assert shard["size_bytes"] < len(lines) // 3


def test_namespaces(felix_command: Command) -> None:
    felix_command("namespace", "set", "acme/ops", "--shards", "2", "--durability", "interval:50ms")
    said = felix_command("namespace", "show", "acme/ops")
    assert "made by their first use: 2 shards, interval:50ms" in said
    felix_command("stream", "publish", STREAM, stdin="one\n")
    assert sum(ends(felix_command)) == 1
    assert "acme/ops" in felix_command("namespace", "list")
    felix_command("namespace", "clear", "acme/ops")
    with pytest.raises(RequestError, match="Nothing is set"):
        felix_command("namespace", "show", "acme/ops")
