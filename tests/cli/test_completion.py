"""What a shell proposes, and which region a command is about where none is named."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from e2e.command_mesh import command, environment
from region_home import make_region
from typer.testing import CliRunner

from cli.completion import SCRIPTS, proposals, root_command
from cli.exits import EXIT_USAGE, exit_code
from cli.main import app
from cli.setting import choose_region, default_region, set_default_region
from felix import __version__
from felix.errors import Code, RequestError


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two regions; no broker runs."""
    made = tmp_path_factory.mktemp("home")
    for region in ("us-east", "eu-west"):
        make_region(made, region)
    return made


@pytest.fixture(autouse=True)
def in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(home))
    monkeypatch.delenv("FELIX_REGION", raising=False)
    set_default_region("")


def proposed(*words: str) -> list[str]:
    return [value for value, _ in proposals(root_command(), words)]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["str"], ["stream"]),
        (["stream", "des"], ["describe"]),
        (["stream", "describe", "-r", "us-east", "--as", ""], ["operator"]),
        (["stream", "describe", "--region", ""], ["eu-west", "us-east"]),
        (["stream", "describe", "x", "-r", "us"], ["us-east"]),
        (["region", "up", "e"], ["eu-west"]),
        (["region", "init", ""], []),
        (["use", ""], ["eu-west", "us-east"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["bridge", "explain", ""], ["stream"]),
        (["bridge", "allow", "stream", "a/b/c", "--basis", "s"], ["scc", "same-jurisdiction"]),
        (["bridge", "allow", "stream", "a/b/c", "--to", "eu"], ["eu-west"]),
        (["fly", ""], []),
        (["stream", "fly", ""], []),
        (["doctor", "extra", ""], []),
    ],
)  # fmt: skip
def test_what_may_stand_there_is_proposed(words: Sequence[str], found: list[str]) -> None:
    assert proposed(*words) == found


def test_commands_and_options_are_proposed_without_those_for_programs() -> None:
    assert {"region", "stream", "use"} <= set(proposed("")) and "_complete" not in proposed("")
    assert {"--shards", "--region", "--help"} <= set(proposed("stream", "create", "a/b/c", "--"))
    assert proposed("--ver") == ["--version"]


def test_a_shell_gets_lines_and_no_error(home: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", 'source <("$@" completion bash); felix() { "$FELIX_PYTHON" -m cli.main "$@"; }; '
         'COMP_WORDS=(felix region up us); COMP_CWORD=3; _felix_complete; echo "${COMPREPLY[@]}"', "-", *command()],
        capture_output=True, text=True, check=True, env=environment(home, FELIX_PYTHON=command()[0]),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("us-east\n", "")
    assert all("felix _complete" in script for script in SCRIPTS.values())


def test_a_region_is_chosen_by_option_then_variable_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="several regions"):
        choose_region()
    said = CliRunner().invoke(app, ["use", "eu-west"])
    assert said.exit_code == 0 and "eu-west is used" in said.output
    assert choose_region() == "eu-west"
    monkeypatch.setenv("FELIX_REGION", "us-east")
    assert choose_region() == "us-east"
    assert choose_region("eu-west") == "eu-west"
    assert "FELIX_REGION is us-east" in CliRunner().invoke(app, ["use"]).output
    monkeypatch.setenv("FELIX_REGION", "mars")
    with pytest.raises(RequestError) as refused:
        choose_region()
    assert refused.value.code is Code.NOT_FOUND and "FELIX_REGION" in refused.value.hint
    monkeypatch.delenv("FELIX_REGION")
    assert CliRunner().invoke(app, ["use", "--clear"]).exit_code == 0
    assert default_region() == ""


def test_a_region_without_a_mesh_is_told_what_one_is_and_the_whole_command() -> None:
    refused = CliRunner().invoke(app, ["region", "init", "dublin"]).exception
    assert isinstance(refused, RequestError) and exit_code(refused) == EXIT_USAGE
    assert "may exchange records with each other" in refused.sentence
    assert refused.hint.endswith("felix region init dublin --mesh acme")


def test_the_version_is_a_command_too() -> None:
    said = CliRunner().invoke(app, ["version"])
    assert said.output == CliRunner().invoke(app, ["--version"]).output == f"felix {__version__}\n"


def test_only_a_region_that_exists_can_be_the_default() -> None:
    assert isinstance(CliRunner().invoke(app, ["use", "mars"]).exception, RequestError)
    assert default_region() == ""


def test_commands_that_name_no_region_take_the_default() -> None:
    set_default_region("eu-west")
    for words in (["region", "down"], ["bridge", "down"]):
        refused = CliRunner().invoke(app, words).exception
        assert isinstance(refused, RequestError) and "eu-west" in f"{refused.sentence}", words
