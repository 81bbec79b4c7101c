"""What a command loads: its own parts alone, counted in modules, since times differ from machine to machine."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from e2e.command_mesh import ROOT, environment
from ports import claim_port
from region_home import make_region

import felix
from cli.commands import COMMANDS
from cli.exits import EXIT_UNAVAILABLE

HEAVY = (
    "aioquic",
    "qh3",
    "pyspark",
    "cryptography",
    "grpc",
    "opentelemetry",
    "yaml",
    "asyncio",
    "rich",
    "msgspec",
)


def loaded(*words: str) -> set[str]:
    """Every module that is loaded where `felix WORDS` ends."""
    program = (
        "import sys\nsys.argv = ['felix', *sys.argv[1:]]\nimport cli.main\n"
        "try: cli.main.main()\nexcept SystemExit: pass\nprint(*sys.modules, sep='\\n', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=True,
        env=environment(ROOT),
    )
    assert done.stdout, "the command ran"
    return set(done.stderr.split())


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("--version",)])
def test_help_and_version_load_no_command_and_nothing_heavy(words: tuple[str, ...]) -> None:
    found = loaded(*words)
    assert {each for each in found if each.startswith("cli.")} <= {
        "cli.main",
        "cli.command",
        "cli.commands",
        "cli.exits",
        "cli.form",
        "cli.values",
    }
    assert not found.intersection(HEAVY)
    assert len(found) < 250, "what Python and typer load is about 200 modules"


def test_a_command_loads_neither_the_broker_nor_the_agent_nor_other_commands() -> None:
    found = loaded("stream", "list", "--help")
    assert not found.intersection(
        ("region.node", "region.config", "bridge.agent", "audit.verify", "pyspark", "yaml")
    )
    assert not found.intersection(("opentelemetry.sdk", "rich.progress", "grpc"))
    assert not found.intersection(
        f"cli.{name}" for name in ("bench", "audit", "bridge", "demo", "top", "queue")
    )
    found = loaded("bridge", "list", "--help")
    assert not found.intersection(
        ("region.node", "bridge.agent", "bridge.link_worker", "region.config", "cli.bench")
    )


def test_a_command_that_runs_loads_no_conversion_of_values_that_need_none() -> None:
    for words in (("completion", "bash"), ("region", "status"), ("stream", "list", "--help")):
        assert not loaded(*words).intersection(("pydantic", "pydantic_core", "typer._adapters")), words


def test_a_client_loads_what_it_needs_to_connect_and_ask_and_no_more(tmp_path: Path) -> None:
    """Up to the handshake; there is no broker. What only checks others' certificates, serves or draws is not loaded."""
    profile = make_region(tmp_path, "us-east").root / "profile.json"
    profile.write_text(profile.read_text().replace("127.0.0.1:0", f"127.0.0.1:{claim_port()}"))
    code = (
        "import sys, cli.main\nsys.argv = ['felix', *sys.argv[1:]]\n"
        "try: cli.main.main()\nexcept SystemExit as ended: print(ended.code)\n"
        "print(*sys.modules, sep='\\n', file=sys.stderr)\n"
    )
    for words in (
        ["stream", "list"],
        ["cache", "get", "acme/ops/gates", "a1"],
        ["queue", "describe", "acme/ops/jobs"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words, "-o", "json"],
            capture_output=True,
            text=True,
            check=True,
            env=environment(tmp_path),
        )
        assert done.stdout == f"{EXIT_UNAVAILABLE}\n", "it came as far as the handshake"
        found = set(done.stderr.split())
        assert "felix.transport.native" in found
        assert not {
            each
            for each in found
            if each.split(".")[0] in ("rich", "yaml", "region", "audit", "keys", "bridge")
        } - {"region", "region.folder"}
        assert not found.intersection(
            ("cryptography.x509", "felix.peer", "felix.transport.certificate", "felix.transport.portable")
        )


def test_the_table_names_what_exists() -> None:
    for name, entry in COMMANDS.items():
        found = getattr(importlib.import_module(entry.module), entry.name)
        assert isinstance(found, typer.Typer) or callable(found), name


def test_every_public_name_of_the_sdk_is_found_and_no_other() -> None:
    for name in felix.__all__:
        assert getattr(felix, name) is not None
    assert sorted(felix.__all__) == sorted([*felix._MODULES, "__version__"])
    assert set(felix.__all__) <= set(dir(felix))
    with pytest.raises(AttributeError, match="nothing"):
        _ = felix.nothing


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_the_caller_closed_is_taken_by_no_socket(tmp_path: Path, closed: str) -> None:
    """Else what is printed goes into whatever was opened next, and libuv ends the process."""
    folder = make_region(tmp_path, "us-east")
    port = claim_port()
    folder.profile.write_text(folder.profile.read_text().replace(":0", f":{port}"))
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-m", "cli.main", "stream", "list"],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == EXIT_UNAVAILABLE, done.stderr
    assert "2>&-" in closed or done.stderr.startswith("felix: "), done.stderr
    assert "Traceback" not in done.stderr
