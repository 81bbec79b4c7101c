"""The Containerfile and compose.yaml, held to this tree and to the command line. No container engine is asked.

What an engine would add is not shown here: that the base image is there, and that the two files mean to it what they mean to us.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_words import DEPLOY, UnknownWordError, check_words
from e2e.command_mesh import environment, until
from ports import claim_port
from typer.testing import CliRunner

from bridge.config import load_config
from cli.exits import exit_code
from cli.main import app
from felix.errors import FelixError
from region.folder import RegionFolder

ROOT = DEPLOY.parent
FOLDER = DEPLOY / "container"
FELIX = "/opt/felix/bin/felix"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
INSTRUCTIONS = ("ARG", "FROM", "COPY", "RUN", "ENV", "USER", "VOLUME", "WORKDIR", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT")  # fmt: skip


def containerfile() -> list[tuple[str, str]]:
    """Instructions and what follows them; continued lines joined."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.M).replace("\\\n", "")
    found = [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]
    assert all(len(line) == 2 and line[0] in INSTRUCTIONS for line in found), found
    return found  # type: ignore[return-value]


def last_stage() -> list[tuple[str, str]]:
    lines = containerfile()
    return lines[max(number for number, (word, _) in enumerate(lines) if word == "FROM") :]


# -- Containerfile -------------------------------------------------------------------------------------


def test_every_process_is_started_without_a_shell() -> None:
    for word, rest in containerfile():
        if word in ("RUN", "ENTRYPOINT", "HEALTHCHECK"):
            command = json.loads(rest[rest.index("[") :])
            assert command and all(isinstance(each, str) for each in command), rest
            assert not any(shell in command for shell in ("sh", "bash", "/bin/sh")), rest


def test_what_is_copied_is_there_and_every_package_is_copied() -> None:
    copied = set()
    for word, rest in containerfile():
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            copied |= set(sources)
    for source in copied:
        assert (ROOT / source).exists(), source
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], *wheel["force-include"], "pyproject.toml", "hatch_build.py"} <= copied
    assert {"sdk", "felix"} <= copied, "felix-sdk, and what sdk/felix links to"


def test_the_process_is_nobody_and_owns_nothing_but_its_state() -> None:
    stage = last_stage()
    assert ("USER", "10001:10001") in stage
    assert not any(word == "COPY" and "--chown" in rest for word, rest in stage)
    owned = [rest for word, rest in stage if word == "RUN" and "--owner=10001" in rest]
    assert len(owned) == 1 and json.loads(owned[0])[-1] == "/var/lib/felix"
    assert stage.index(("USER", "10001:10001")) > max(
        number for number, (word, _) in enumerate(stage) if word in ("COPY", "RUN")
    )


def test_the_health_check_and_the_entry_point_are_commands_of_felix() -> None:
    stage = dict(last_stage())
    _, check = stage["HEALTHCHECK"].split("CMD ")
    program, *words = json.loads(check)
    assert program == FELIX
    check_words(words)
    entry = json.loads(stage["ENTRYPOINT"])
    assert entry[0] == FELIX
    for service in SERVICES.values():
        check_words([*entry[1:], *service["command"]])


def test_the_locked_packages_are_those_that_were_tested() -> None:
    pins = re.compile(r"^([a-z0-9-]+)==(\S+)", re.M)
    tested = dict(pins.findall((ROOT / "requirements.lock").read_text()))
    locked = dict(pins.findall((FOLDER / "requirements.lock").read_text()))
    assert locked.items() <= tested.items()
    mesh = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"][
        "custom"
    ]
    sdk = tomllib.loads((ROOT / "sdk" / "pyproject.toml").read_text())["project"]
    lines = [*mesh["dependencies"], *sdk["dependencies"], *sdk["optional-dependencies"]["service"]]
    needed = {re.split(r"[\[<>=;]", line)[0] for line in lines}
    assert needed <= locked.keys()
    for line in (FOLDER / "requirements.lock").read_text().splitlines():
        assert not line or line.startswith((" ", "#")) or line.endswith("\\"), f"{line} has no hash"


# -- compose -------------------------------------------------------------------------------------------

SERVICE_KEYS = {
    "image", "build", "user", "read_only", "tmpfs", "cap_drop", "security_opt", "pids_limit", "init", "restart",
    "stop_grace_period", "command", "volumes", "networks", "ports", "healthcheck",
}  # fmt: skip
"""Those of the Compose specification that are used; an unknown one is a slip."""


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service.keys() <= SERVICE_KEYS
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["user"] == "10001:10001" and service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_names_is_declared(name: str) -> None:
    service = SERVICES[name]
    assert (FOLDER / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert set(service["networks"]) <= COMPOSE["networks"].keys()
    for volume in service["volumes"]:
        source, target = volume.split(":")
        assert (FOLDER / source).is_dir() if source.startswith(".") else source in COMPOSE["volumes"]
        assert target.startswith("/var/lib/felix")
    if "healthcheck" in service:
        kind, program, *words = service["healthcheck"]["test"]
        assert (kind, program) == ("CMD", FELIX)
        check_words(words)


def test_only_the_agent_reaches_both_regions() -> None:
    networks = {name: set(service["networks"]) for name, service in SERVICES.items()}
    assert not networks["us-east"] & networks["eu-west"]
    assert networks["us-to-eu"] & networks["us-east"] and networks["us-to-eu"] & networks["eu-west"]


def test_no_region_shares_its_state() -> None:
    sources = [volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]]
    assert len(sources) == len(set(sources))


def test_the_agents_configuration_names_the_services() -> None:
    config = load_config(FOLDER / "us-to-eu" / "bridge.yaml")
    assert config.source_addresses == ("us-east:7443",) and config.source in SERVICES
    assert [each.addresses for each in config.destinations] == [("eu-west:7443",)]
    assert config.name in SERVICES


# -- the same commands, as processes of this machine ------------------------------------------------------


def felix(home: Path, *words: str) -> tuple[int, str]:
    """Run `felix WORDS` in this process: exit code, and what was said. Only what serves has to be a process of its own."""
    done = CliRunner().invoke(app, words, env={"FELIX_HOME": str(home)})
    if isinstance(done.exception, FelixError):
        return exit_code(done.exception), done.exception.sentence
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


@pytest.fixture
def state(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """What docs/production.md makes before the first `up`; each service has a folder in place of its volume."""
    homes = {name: tmp_path / name for name in SERVICES}
    for home in homes.values():
        home.mkdir()
    ports = {name: claim_port() for name in ("us-east", "eu-west")}
    for name, port in ports.items():
        init = ("region", "init", name, "--mesh", "acme", "--country", "US" if name == "us-east" else "IE")
        assert felix(homes[name], *init, "--listen", f"0.0.0.0:{port}", "--health", "127.0.0.1:0")[0] == 0
    us, eu = (RegionFolder.of(name, homes[name]) for name in ports)
    assert felix(homes["us-east"], "identity", "issue", "us-to-eu", "--kind", "bridge")[0] == 0
    for home, bundle in ((homes["us-east"], eu.bundle), (homes["eu-west"], us.bundle)):
        there = RegionFolder.of(bundle.parent.name, bundle.parent.parent)
        _, told = felix(there.root.parent, "region", "bundle", "--fingerprint")
        assert felix(home, "region", "trust", str(bundle), "--fingerprint", told.strip(), "--offline")[0] == 0
    agent = homes["us-to-eu"] / "us-to-eu"
    (agent / "identities").mkdir(parents=True)
    (agent / "trusted").mkdir()
    for source in us.identities.glob("us-to-eu.*"):
        (agent / "identities" / source.name).write_bytes(source.read_bytes())
        (agent / "identities" / source.name).chmod(0o600)
    (agent / "bundle.json").write_bytes(us.bundle.read_bytes())
    (agent / "trusted" / "eu-west.json").write_bytes(eu.bundle.read_bytes())
    text = (FOLDER / "us-to-eu" / "bridge.yaml").read_text().replace("0.0.0.0:8090", "127.0.0.1:0")
    for name, port in ports.items():
        text = text.replace(f"{name}:7443", f"127.0.0.1:{port}")
    (agent / "bridge.yaml").write_text(text)
    yield homes


def test_the_services_come_up_and_their_health_checks_say_so(state: dict[str, Path]) -> None:
    def here(name: str, words: list[str]) -> list[str]:
        return [word.replace("/var/lib/felix", str(state[name])) for word in words]

    checks = {
        name: here(name, service.get("healthcheck", {}).get("test", ["", "", "region", "ready"])[2:])
        for name, service in SERVICES.items()
    }
    code, said = felix(state["us-east"], *checks["us-east"])
    assert code == 4 and "The broker of us-east does not run" in said
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "cli.main", *here(name, service["command"])],
            env=environment(state[name]),
            stderr=subprocess.DEVNULL,
        )
        for name, service in SERVICES.items()
    ]
    try:
        for name, check in checks.items():
            until(
                lambda name=name, check=check: felix(state[name], *check)[0] == 0,
                f"the health check of {name}",
            )
        running[1].terminate()  # eu-west: the agent lives, and says that it does not do its work
        assert running[1].wait(60) == 0
        until(
            lambda: felix(state["us-to-eu"], *checks["us-to-eu"])[0] == 4,
            "the agent's word that its destination is gone",
        )
        _, reason = felix(state["us-to-eu"], *checks["us-to-eu"])
        assert reason.startswith("The bridge us-to-eu does not serve: ") and "eu-west" in reason
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(60)


def test_a_health_check_of_another_word_would_be_found() -> None:
    with pytest.raises(UnknownWordError):
        check_words(["region", "healthy"])
