"""`felix queue` against a running region: what is printed, as text and as JSON, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.command_mesh import felix_command
from ports import claim_port
from typer.testing import CliRunner

from cli.lines import InvalidLineError
from cli.main import app
from cli.queue import _age
from felix.errors import Code, FelixError

NAME = "acme/ops/mails"


class Said:
    """What a command printed."""

    def __init__(self, out: str, err: str) -> None:
        self.out, self.err = out, err


class Home:
    """Commands in this process, which spares each of them a start; the broker is one of its own."""

    def felix(self, *words: str, stdin: bytes = b"", refused: Code | None = None) -> Said:
        result = CliRunner().invoke(app, list(words), input=stdin)
        if refused is not None:
            assert isinstance(result.exception, FelixError) and result.exception.code is refused
        elif result.exception is not None:
            raise result.exception
        return Said(result.stdout, result.stderr)

    def queue(self, *words: str, stdin: bytes = b"", refused: Code | None = None) -> Said:
        return self.felix("queue", words[0], NAME, *words[1:], stdin=stdin, refused=refused)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    listen = f"127.0.0.1:{claim_port()}"
    felix_command(
        tmp_path, "region", "init", "us-east", "--mesh", "acme", "--listen", listen, "--health", "none"
    )
    felix_command(tmp_path, "region", "up", "us-east", "--detach")
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    monkeypatch.delenv("FELIX_REGION", raising=False)
    try:
        yield Home()
    finally:
        felix_command(tmp_path, "region", "down", "us-east")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (740, "740ms"),
        (14_003, "14s"),
        (200_900, "3m 20s"),
        (3_600_000, "1h"),
        (7_500_000, "2h 5m"),
        (349_300_000, "4d 1h"),
    ],
)
def test_an_age_has_the_two_units_that_count(ms: int, text: str) -> None:
    assert _age(ms) == text


def test_a_queue_from_create_to_delete(home: Home, tmp_path: Path) -> None:
    assert NAME in home.queue("create", "--attempts", "2", "--retry", "10ms", "--visibility", "1m").out
    assert json.loads(home.felix("queue", "list", "--json").out)["items"][0]["stream"] == NAME
    assert NAME in home.felix("queue", "list", "acme/").out
    said = home.queue("alter", "--retry", "20ms", "--attempts", "2").out
    assert "attempts 2" in said and "retries after 20ms" in said
    home.queue("alter", refused=Code.INVALID)
    home.queue("alter", "--ordered", refused=Code.CONFIG_INVALID)
    lines = b'{"id": "a"}\n\n{"id": "b"}\n{"id": "c"}\n'
    said = json.loads(home.queue("put", "--key-field", "id", "--json", stdin=lines).out)
    assert (said["kind"], said["records"], said["blank"], said["ended"]) == ("Publication", 3, 1, "end")
    # What is wrong ends it with the line to go on from; told so, it goes into a file, and the rest is put in.
    mixed, left = b'{"id": "x"}\nno json\n{"id": "y"}\n', tmp_path / "left.jsonl"
    other = "acme/ops/mixed"
    home.felix("queue", "create", other)
    ended = CliRunner().invoke(app, ["queue", "put", other, "--key-field", "id"], input=mixed)
    assert isinstance(ended.exception, InvalidLineError) and "go on with --from-line 2" in ended.stdout
    said = json.loads(
        home.felix(
            "queue", "put", other, "--key-field", "id", "--from-line", "2", "--skip-invalid", str(left),
            "--delay", "10m", "--json", stdin=mixed,
        ).out
    )  # fmt: skip
    assert (said["records"], said["invalid"], len(left.read_text().splitlines())) == (1, 1, 1)
    shown = json.loads(home.felix("queue", "peek", other, "--json").out)["items"]
    assert [(each["key"], each["phase"]) for each in shown] == [("x", "ready"), ("y", "delayed")]
    assert home.queue("put", "later", "--delay", "10m").out == f"1 job is in {NAME}\n"
    home.queue("put", "first", "--priority", "9", "--key", "k")

    # By hand: lease, acknowledge, give back; what is lost is said with the exit code of a failure.
    leased = json.loads(home.queue("lease", "--json").out)
    assert (leased["value"], leased["key"], leased["attempts"]) == ("first", "k", 1)
    home.queue("ack", leased["job"])
    handle, payload = home.queue("lease", "--visibility", "30s").out.rstrip().split("\t")
    assert json.loads(payload) == {"id": "a"}
    home.queue("nack", handle, "--delay", "0s", "--reason", "no paper")
    home.queue("ack", handle, refused=Code.LEASE_LOST)
    home.queue("ack", "first", refused=Code.INVALID)
    shown = json.loads(home.queue("peek", "--json").out)
    assert [each["phase"] for each in shown["items"]] == ["ready", "ready", "ready", "delayed"]
    assert "delayed" in home.queue("peek", "-n", "4").out

    # A command per job: what fails twice is a dead letter with what the command said.
    said = home.queue(
        "consume", "--exec", 'grep -q \'"b"\' || { echo "not mine: $FELIX_JOB_KEY" >&2; exit 4; }',
        "--until-empty", "--workers", "2",
    )  # fmt: skip
    assert "1 job done" in said.err and "exit code 4: not mine: c" in said.err
    state = json.loads(home.queue("describe", "--json").out)
    assert (state["ready"], state["delayed"], state["dead"], state["acked"]) == (0, 1, 2, 2)
    assert "dead (acme/ops/mails.dead)" in home.queue("describe").out
    letter = json.loads(home.felix("queue", "peek", f"{NAME}.dead", "--json").out)["items"][0]
    assert letter["headers"]

    assert json.loads(home.queue("redrive", "--records", "1", "--json").out)["count"] == 1
    assert "1 dead letter is back" in home.queue("redrive").out
    printed = home.queue("consume", "--count", "2").out.splitlines()
    assert sorted(json.loads(line)["id"] for line in printed) == ["a", "c"]

    assert "1 record of" in home.queue("purge", "--yes").out
    home.queue("delete", "--yes")
    home.queue("describe", refused=Code.NOT_FOUND_OR_FORBIDDEN)
