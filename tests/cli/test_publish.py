"""`felix stream create` and `publish` with conditions, message ids, linger and compression, as a person types them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest
import typer.testing
from e2e.command_mesh import ROOT, until
from region_home import make_region, running

import felix
from cli.main import app
from felix.errors import OffsetMismatchError, RequestError, UnavailableError
from felix.messages import ShardState, StreamState


class Command:
    """Runs commands in this process, against a broker in another thread."""

    def ended(self, *words: str, stdin: str = "") -> click.testing.Result:
        return typer.testing.CliRunner().invoke(app, words, input=stdin)

    def __call__(self, *words: str, stdin: str = "") -> str:
        result = self.ended(*words, stdin=stdin)
        if result.exception is not None:
            raise result.exception
        return result.stdout


@pytest.fixture(scope="module")
def felix_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """One broker for all tests here; each has a stream of its own."""
    home = tmp_path_factory.mktemp("home")
    folder = make_region(home, "us-east")
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
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FELIX_HOME", str(home))
            yield Command()
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> str:
    return f"acme/ops/test-{zlib.crc32(request.node.name.encode()):08x}"


def ends(felix_command: Command, stream: str) -> list[int]:
    state = json.loads(felix_command("stream", "describe", stream, "--json"))
    return [shard["high_watermark"] for shard in state["state"]]


def test_conditions_and_message_ids(felix_command: Command, stream: str) -> None:
    felix_command("stream", "create", stream, "--deduplicate", "10m", "--deduplicate-ids", "50")
    assert "message ids remembered for 10m, 50 per shard" in felix_command("stream", "describe", stream)
    felix_command("stream", "publish", stream, "--expect-offset", "0", stdin="a\nb\n")
    with pytest.raises(OffsetMismatchError, match="ends at offset 2"):
        felix_command("stream", "publish", stream, "--expect-offset", "0", stdin="c\n")
    lines = '{"id": "x"}\n{"id": "y"}\n{"id": "x"}\n'
    for _ in range(2):
        felix_command("stream", "publish", stream, "--message-id", "id", stdin=lines)
    assert ends(felix_command, stream) == [4]
    with pytest.raises(RequestError, match="Line 1 has no field 'uuid'"):
        felix_command("stream", "publish", stream, "--message-id", "uuid", stdin=lines)
    with pytest.raises(RequestError, match="goes with --expect-offset"):
        felix_command("stream", "publish", stream, "--shard", "0", stdin="c\n")
    with pytest.raises(RequestError, match="no line"):
        felix_command("stream", "publish", stream, "--expect-offset", "4", stdin="")


def test_until_end_leaves_out_no_shard_whose_end_nobody_told(
    felix_command: Command, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    felix_command("stream", "create", stream, "--shards", "2")
    felix_command("stream", "publish", stream, stdin="a\nb\nc\nd\n")
    real = felix.RegionClient.describe_stream

    async def describe(client: felix.RegionClient, name: str) -> StreamState:
        state = await real(client, name)
        # As while an election has left the shards with two leaders.
        return msgspec.structs.replace(
            state, state=[ShardState(0, 0, 0, 0, 0, leader="b2", replicas=["b2"]), *state.state[1:]]
        )

    monkeypatch.setattr(felix.RegionClient, "describe_stream", describe)
    with pytest.raises(UnavailableError, match=f"where shard 0 of {stream} ends: .*led by b2"):
        felix_command("stream", "subscribe", stream, "--until-end")
    felix_command("stream", "subscribe", stream, "--until-end", "--shard", "1")


def test_linger_and_levels(felix_command: Command, stream: str) -> None:
    felix_command("stream", "create", stream)
    lines = "".join(f'{{"reading": {n}, "sensor": "north gate"}}\n' for n in range(500))
    felix_command("stream", "publish", stream, "--compress", "--level", "9", "--linger", "5ms", stdin=lines)
    assert felix_command("stream", "subscribe", stream, "--from", "earliest", "--until-end") == lines
    # All there is where no beginning is named; nothing, at once, where the beginning is no earlier than the end.
    assert felix_command("stream", "subscribe", stream, "--until-end") == lines
    for start in ("latest", "@500", "2100-01-01T00:00Z"):
        assert felix_command("stream", "subscribe", stream, "--from", start, "--until-end") == ""
    (shard,) = json.loads(felix_command("stream", "describe", stream, "--json"))["state"]
    assert shard["high_watermark"] == 500
    assert shard["size_bytes"] < len(lines) // 3


def test_namespaces(felix_command: Command) -> None:
    stream = "acme/auto/typed"
    felix_command("namespace", "set", "acme/auto", "--shards", "2", "--durability", "interval:50ms")
    said = felix_command("namespace", "show", "acme/auto")
    assert "made by their first use: 2 shards, interval:50ms" in said
    felix_command("stream", "publish", stream, stdin="one\n")
    assert sum(ends(felix_command, stream)) == 1
    assert "acme/auto" in felix_command("namespace", "list")
    felix_command("namespace", "clear", "acme/auto")
    with pytest.raises(RequestError, match="Nothing is set"):
        felix_command("namespace", "show", "acme/auto")


def test_an_invalid_line_ends_it_with_the_line_to_go_on_from_or_is_skipped_into_a_file(
    felix_command: Command, stream: str, tmp_path: Path
) -> None:
    felix_command("stream", "create", stream)
    lines = '{"t": "a"}\r\n\n{"t": "b"}\n{"t": null}\nno json\n{"t": "c"}'
    ended = felix_command.ended("stream", "publish", stream, "--key-field", "t", stdin=lines)
    assert isinstance(ended.exception, RequestError)
    assert "Line 4 has a field 't' that is null" in ended.exception.sentence
    assert "2 records" in ended.stdout and "shard 0 through offset 1" in ended.stdout
    assert "1 blank line left out" in ended.stdout and "go on with --from-line 4" in ended.stdout
    skipped = tmp_path / "skipped.jsonl"
    said = json.loads(
        felix_command(
            "stream", "publish", stream, "--key-field", "t", "--from-line", "4",
            "--skip-invalid", str(skipped), "--json", stdin=lines,
        )
    )  # fmt: skip
    assert {name: said[name] for name in ("records", "invalid", "next_line", "offsets", "ended")} == {
        "records": 1, "invalid": 2, "next_line": 7, "offsets": {"0": 2}, "ended": "end",
    }  # fmt: skip
    left = [json.loads(line) for line in skipped.read_text().splitlines()]
    assert [(row["line"], row["text"]) for row in left] == [(4, '{"t": null}'), (5, "no json")]
    assert left[0]["reason"] == "has a field 't' that is null"
    printed = felix_command("stream", "subscribe", stream, "--from", "earliest", "--until-end")
    assert printed == '{"t": "a"}\n{"t": "b"}\n{"t": "c"}\n'
    with pytest.raises(RequestError, match="no line 8: the input has 6"):
        felix_command("stream", "publish", stream, "--from-line", "8", stdin=lines)
    with pytest.raises(RequestError, match="cannot be written: Is a directory"):
        felix_command("stream", "publish", stream, "--skip-invalid", str(tmp_path), stdin=lines)


def test_a_line_that_is_no_record_for_its_size_is_skipped_with_its_beginning(
    felix_command: Command, stream: str, tmp_path: Path
) -> None:
    felix_command("stream", "create", stream)
    skipped = tmp_path / "skipped.jsonl"
    lines = f"a\n{'b' * (1 << 20)}\n{'c' * (3 << 20)}\nd\n"
    felix_command("stream", "publish", stream, "--skip-invalid", str(skipped), stdin=lines)
    assert ends(felix_command, stream) == [2]
    left = [json.loads(line) for line in skipped.read_text().splitlines()]
    assert [(row["line"], len(row["text"]), row.get("bytes")) for row in left] == [
        (2, 1 << 20, None),
        (3, 1024, 3 << 20),
    ]


def spawn(*words: str, stdout: int = subprocess.PIPE, **how: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "cli.main", *words],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        **how,
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, ("stream", "publish")),
        (signal.SIGTERM, ("stream", "publish")),
        (signal.SIGTERM, ("queue", "put")),
    ],
    ids=["SIGINT", "SIGTERM", "jobs"],
)
def test_a_pipe_is_published_line_by_line_and_a_signal_says_what_was(
    felix_command: Command, stream: str, number: signal.Signals, words: tuple[str, str]
) -> None:
    felix_command(words[0], "create", stream)
    # A shell starts what runs in the background with SIGINT ignored; so does this test, where it is to stay so.
    ignored = number is not signal.SIGINT
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        process = spawn(*words, stream, "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdin is not None
    for count in (1, 2):
        process.stdin.write(b"line\n")
        process.stdin.flush()
        until(lambda count=count: ends(felix_command, stream) == [count], f"line {count}")  # type: ignore[misc]
    if ignored:
        process.send_signal(signal.SIGINT)
    process.stdin.write(b"line\nwithout its e")
    process.stdin.flush()
    until(lambda: ends(felix_command, stream) == [3], "line 3")
    process.send_signal(number)
    # The pipe stays open meanwhile: what ends it is the signal.
    process.wait(60)
    out, err = process.communicate()
    assert process.returncode == 128 + number, err
    said = json.loads(out)
    assert (said["records"], said["offsets"], said["next_line"]) == (3, {"0": 2}, 4)
    assert (said["ended"], said["unacknowledged"]) == (number.name, 0)
    assert b"Traceback" not in err


def test_a_full_disk_and_a_reader_who_leaves_lose_nothing_that_was_acknowledged(
    felix_command: Command, stream: str
) -> None:
    felix_command("stream", "create", stream)
    with open("/dev/full", "wb") as full:
        publishing = spawn("stream", "publish", stream, stdout=full.fileno())
        _, err = publishing.communicate(b"a\nb\n", timeout=60)
        assert publishing.returncode == 1 and b"2 records" in err and b"shard 0 through offset 1" in err
        assert b"No space left" in err and b"Traceback" not in err
        jobs = f"{stream}-jobs"
        felix_command("queue", "create", jobs)
        felix_command("queue", "put", jobs, stdin="job\n")
        ended = [
            spawn("stream", "subscribe", stream, "--from", "earliest", "--until-end", stdout=full.fileno()),
            spawn("queue", "consume", jobs, "--count", "1", stdout=full.fileno()),
        ]
        for process in ended:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 1, err
            assert b"Standard output cannot be written: No space left on device. 0 records" in err
            assert b"Traceback" not in err and b"Exception ignored" not in err
    state = json.loads(felix_command("queue", "describe", jobs, "--json"))
    assert (state["ready"] + state["leased"] + state["delayed"], state["acked"]) == (1, 0)
    reader = spawn("stream", "subscribe", stream, "--from", "earliest")
    assert reader.stdout is not None and reader.stdin is not None
    # Each record comes at once, though the subscription goes on; then the reader leaves.
    assert reader.stdout.readline() + reader.stdout.readline() == b"a\nb\n"
    reader.stdout.close()
    felix_command("stream", "publish", stream, stdin="c\n")
    assert reader.wait(60) == 0
    assert reader.stderr is not None and reader.stderr.read() == b""
