"""docs/two-organisations.md, followed by two people: two homes, and where the machine allows it two network namespaces.

Each side runs its own blocks in its own folder. A file reaches the other side only where the page says that it is sent, and of
the telephone call nothing but the fingerprint.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from ports import claim_port
from warm.commands import warm_command

from cli.process import read_state
from policy.signed import SignedDocument

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "two-organisations.md").read_text()
BLOCK_S: Final = 120
"""Far more than a block takes: seconds."""
HOSTS: Final = {"Acme": "10.77.0.1", "Globex": "10.77.0.2"}
OTHER: Final = {"Acme": "Globex", "Globex": "Acme"}


class Step(NamedTuple):
    """What one side does: it runs commands, or sends a file to the other."""

    side: str
    commands: str
    sends: str


def steps() -> list[Step]:
    """The page from top to bottom."""
    found = re.finditer(
        r"^```sh at (?P<side>\w+)\n(?P<commands>.*?)^```|\*\*(?P<sender>\w+) sends `(?P<file>[^`]+)` to \w+\.\*\*",
        PAGE,
        re.M | re.S,
    )
    return [
        Step(each["side"] or each["sender"], each["commands"] or "", each["file"] or "") for each in found
    ]


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@contextmanager
def two_networks() -> Iterator[dict[str, str]]:
    """A network namespace for each side, joined by a cable; empty where the machine does not allow them."""
    names = {side: f"felix-{side.lower()}-{os.getpid()}" for side in HOSTS}
    cable = {side: f"fx{side[0].lower()}{os.getpid()}" for side in HOSTS}
    a, b = names.values()
    try:
        made = shutil.which("ip") is not None and all(ip("netns", "add", name) for name in (a, b))
        made = made and ip(
            "link",
            "add",
            cable["Acme"],
            "netns",
            a,
            "type",
            "veth",
            "peer",
            "name",
            cable["Globex"],
            "netns",
            b,
        )
        for side, name in names.items():
            made = made and ip("-n", name, "addr", "add", f"{HOSTS[side]}/24", "dev", cable[side])
            made = made and ip("-n", name, "link", "set", cable[side], "up")
            made = made and ip("-n", name, "link", "set", "lo", "up")
        yield names if made else {}
    finally:
        for name in names.values():
            ip("netns", "del", name)


class Two:
    """The two people, their folders and their networks."""

    def __init__(self, path: Path, networks: dict[str, str]) -> None:
        self.path, self.networks = path, networks
        self.ports = {side: claim_port() for side in HOSTS}
        for side in HOSTS:
            (path / side / "bin").mkdir(parents=True)
            felix = path / side / "bin" / "felix"
            felix.write_text(f'#!/bin/sh\nexec {shlex.join(warm_command(within=self._within(side)))} "$@"\n')
            felix.chmod(0o755)

    def _within(self, side: str) -> list[str]:
        return ["ip", "netns", "exec", self.networks[side]] if self.networks else []

    def run(self, side: str, commands: str, **environment: str) -> str:
        """Commands at one side, as the page has them; what they printed. Fails at the first that ends otherwise than with 0."""
        if not self.networks:
            for each, host in HOSTS.items():
                commands = commands.replace(f"{host}:7443", f"127.0.0.1:{self.ports[each]}")
        env = {
            **os.environ,
            "PATH": f"{self.path / side / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "FELIX_HOME": str(self.path / side / "home"),
            **environment,
        }
        env.pop("FELIX_REGION", None)
        done = subprocess.run(
            [*self._within(side), "bash", "-eu", "-o", "pipefail", "-c", commands],
            cwd=self.path / side,
            env=env,
            capture_output=True,
            text=True,
            timeout=BLOCK_S,
            check=False,
        )
        assert done.returncode == 0, f"{side}: {commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def read_out(self, side: str) -> str:
        """What the operator there reads out."""
        return self.run(side, "felix region bundle --fingerprint").strip()

    def close(self) -> None:
        for pid_file in self.path.glob("*/home/**/*.pid"):
            left = read_state(pid_file)
            if left is not None:
                os.kill(left["pid"], signal.SIGTERM)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with two_networks() as networks:
        people = Two(tmp_path, networks)
        try:
            yield people
        finally:
            people.close()


@pytest.mark.slow
def test_two_people_follow_the_guide_from_nothing_to_the_first_crossing(two: Two) -> None:
    said: dict[str, str] = {"Acme": "", "Globex": ""}
    for step in steps():
        if step.sends:
            shutil.copy(two.path / step.side / step.sends, two.path / OTHER[step.side])
            continue
        call = {"FINGERPRINT": two.read_out(OTHER[step.side])} if "$FINGERPRINT" in step.commands else {}
        if call:
            assert call["FINGERPRINT"] in said[OTHER[step.side]].split("Next:")[0], (
                "it is that of `region init`"
            )
        said[step.side] += two.run(step.side, step.commands, **call)
    records = [json.loads(line) for line in said["Globex"].splitlines() if line.startswith("{")]
    assert [(each["station"], each["rain_mm"]) for each in records] == [("SEA", 10.9), ("PDX", 0.8)]
    assert not {each["keeper"] for each in records} & {"Ada", "Bob"}
    grant = SignedDocument.parse((two.path / "Globex" / "readings.grant").read_bytes())
    terms = json.loads(grant.body)["terms"]
    assert (terms["exporter"], terms["importer"]) == ("Acme Inc.", "Globex Ltd.")
    for side in HOSTS:
        assert "DOES NOT VERIFY" not in said[side] and "verif" in said[side], said[side]


def test_the_guide_has_both_sides_and_says_what_is_sent() -> None:
    found = steps()
    assert {each.side for each in found} == set(HOSTS)
    assert [each.sends for each in found if each.sends] == [
        "eu-west.offer",
        "us-east.offer",
        "readings.grant",
    ]
