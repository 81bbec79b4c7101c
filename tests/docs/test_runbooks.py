"""The commands of docs/runbooks/, each page run in order against a mesh that was broken as the page says.

One mesh serves all pages, in one test: two regions and an agent as processes. What a page restores must let records cross and
logs verify again. Commands that only ask run in this process; a command is repeated until it ends as the page says, since
links and agents take their time.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deploy_words import check_words
from ports import claim_port
from typer.testing import CliRunner
from warm.process import WarmProcess

import keys.authority
from cli.exits import exit_code
from cli.main import app
from cli.process import read_state
from felix.errors import FelixError
from felix.runtime.real import now_ms
from keys.authority import load_authority, save_issuing
from region.bootstrap import issue_identity
from region.config import load_config
from region.folder import RegionFolder

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "runbooks"
PAGES = sorted(FOLDER.glob("*.md"))
STREAM = "acme/ops/departures"
BRIDGE = "us-east-to-eu-west"
WAIT_S = 60.0

POLICY = """\
version: 1
name: {region}
revision: 1
region: {region}
regions:
  us-east: {{country: US, jurisdiction: US}}
  eu-west: {{country: IE, jurisdiction: EU}}
classes:
  operational: {{description: Flights., streams: [acme/ops/*]}}
{rule}
    classes: [operational]
    bases: [scc]
    keys: [pseudonymize]
    lifetime: 90d
    approvals: 0
"""
RULES = {
    "us-east": "exports:\n  - name: to-eu\n    to: {jurisdictions: [EU]}",
    "eu-west": "imports:\n  - name: from-us\n    from: {regions: [us-east]}",
}


def commands(page: str, heading: str = "") -> list[tuple[str, int]]:
    """Each command of a page's `sh` blocks, or of one section's, and the exit code that its comment names."""
    text = (FOLDER / f"{page}.md").read_text()
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = []
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.M | re.S):
        for line in block.splitlines():
            code = re.search(r"# exit code (\d+)$", line)
            found.append((re.sub(r"\s+# .*", "", line.strip()), int(code[1]) if code else 0))
    return found


class Mesh:
    """Two regions and an agent under one home, with a stream that is granted."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.home = place / "home"
        self.backup = place / "backup"
        self.us = RegionFolder.of("us-east", self.home)
        self.published = 0
        self.bridge = BRIDGE
        self.environment = {
            "FELIX_HOME": str(self.home),
            "BACKUP": str(self.backup),
            "PYTHONPATH": str(ROOT),
            "GRANT": "",
            "WITNESSES": str(place / "witnesses"),
        }
        self.witnesses: dict[str, WarmProcess] = {}
        """those that serve, by folder"""

    # -- commands --------------------------------------------------------------------------------------

    def felix(self, *words: str) -> tuple[int, str]:
        """Run `felix WORDS` in this process: how it ended, and what it said."""
        done = CliRunner().invoke(app, words, env=self.environment)
        if isinstance(done.exception, FelixError):
            return exit_code(done.exception), f"{done.exception.sentence} {done.exception.hint}"
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output

    def run(self, line: str, wanted: int = 0) -> str:
        """A command as a page has it, until it ends so; what it prints goes into the file behind `>`."""
        line, _, into = line.partition(" > ")
        said = self._run(line, wanted)
        if into:
            (self.place / into).write_text(said)
        return said

    def _run(self, line: str, wanted: int) -> str:
        limit = time.monotonic() + WAIT_S
        while True:
            if line.startswith("felix "):
                words = shlex.split(line)[1:]
                for name, value in self.environment.items():
                    words = [word.replace(f"${name}", value) for word in words]
                if words[:2] == ["witness", "serve"]:
                    return self.serve(words)
                code, said = self.felix(*words)
            else:
                done = subprocess.run(
                    ["bash", "-c", line],
                    cwd=self.place,
                    env={**os.environ, **self.environment},
                    capture_output=True,
                    text=True,
                )
                code, said = done.returncode, done.stdout + done.stderr
            # A machine so busy that `--detach` gave up waiting has started the process all the same.
            if code == wanted or ("--detach" in line and wanted == 0 and "runs already" in said):
                return said
            assert time.monotonic() < limit, f"{line}\nended with {code}, not {wanted}: {said[-2000:]}"
            time.sleep(0.2)

    def serve(self, words: list[str]) -> str:
        """A witness as a service: `felix witness serve`, which goes on."""
        log = self.place / f"witness-{len(self.witnesses)}.log"
        with log.open("wb") as file:
            served = WarmProcess(
                "felix", *words, env={**os.environ, **self.environment}, cwd=self.place, log=file
            )
        self.witnesses[words[-1]] = served
        limit = time.monotonic() + WAIT_S
        while " serves at " not in log.read_text():
            assert served.poll() is None and time.monotonic() < limit, log.read_text()
            time.sleep(0.05)
        return log.read_text()

    def have_witnesses(self, *witnesses: tuple[str, str]) -> None:
        """Name these in region.yaml and bridge.yaml, in place of those before: by folder, and where each listens."""
        named = []
        for folder, place in witnesses:
            told = json.loads(self.run(f"felix witness list --dir {folder} --json"))
            named.append({"url": f"http://{place}/", "keys": told["verifier_keys"]})
        line = f"witnesses: {json.dumps(named)}"
        for path, indent in ((self.us.config, "  "), (self.us.bridge(self.bridge) / "bridge.yaml", "")):
            text = re.sub(rf"^{indent}witnesses: .*\n", "", path.read_text(), flags=re.M)
            if not indent:
                text += f"\n{line}\n"
            elif re.search(r"^audit:$", text, re.M):
                text = re.sub(r"^audit:$", f"audit:\n  {line}", text, flags=re.M)
            else:
                text += f"\naudit:\n  {line}\n"
            path.write_text(text)

    def follow(self, page: str, heading: str = "") -> None:
        """Run the commands of a page, or of one of its sections."""
        for line, code in commands(page, heading):
            self.run(line, code)

    # -- the mesh --------------------------------------------------------------------------------------

    def found(self) -> None:
        for region in ("us-east", "eu-west"):
            self.run(
                f"felix region init {region} --mesh acme --entity 'Acme {region}' --listen 127.0.0.1:{claim_port()} --health none"
            )
        self.run(f"felix identity issue {BRIDGE} --kind bridge --region us-east")
        for region, other in (("us-east", "eu-west"), ("eu-west", "us-east")):
            told = self.run(f"felix region bundle --region {other} --fingerprint").strip()
            self.run(
                f"felix region trust $FELIX_HOME/{other}/bundle.json --region {region} --fingerprint '{told}' --offline"
            )
            self.run(f"felix region up {region} --detach")
            policy = self.place / f"{region}.yaml"
            policy.write_text(POLICY.format(region=region, rule=RULES[region]))
            self.run(f"felix policy apply {policy} --region {region}")
        self.run(f"felix stream create {STREAM} --region us-east")
        granted = self.run(
            f"felix bridge allow stream {STREAM} --to eu-west --purpose analytics --basis scc "
            f"--reference SCC-2026-014 --expires 30d --out {self.place}/first.grant --region us-east --json"
        )
        self.environment["GRANT"] = json.loads(granted)["grant"]
        self.run(f"felix bridge accept {self.place}/first.grant --yes --region eu-west")
        self.run("felix bridge up --to eu-west --detach --region us-east")

    def links(self) -> list[dict[str, Any]]:
        code, said = self.felix("bridge", "status", "--region", "us-east", "--json")
        found: list[dict[str, Any]] = json.loads(said)["items"] if code == 0 else []
        return found

    def publish(self, count: int) -> None:
        """Publish, and wait until the bridge of now has carried it all to the destination."""
        path = self.place / "flights.jsonl"
        path.write_text("".join(f'{{"flight": {self.published + n}}}\n' for n in range(count)))
        self.run(f"felix stream publish {STREAM} --file {path} --region us-east")
        self.published += count
        limit = time.monotonic() + WAIT_S
        while not any(
            link["state"] == "active"
            and link["lag_records"] == 0
            and link["bridge"].endswith(f"/{self.bridge}")
            for link in self.links()
        ):
            assert time.monotonic() < limit, json.dumps(self.links(), indent=1)
            time.sleep(0.1)

    def stop_agent(self) -> None:
        """The agent of the region in trouble, if it runs; a busy machine takes its time to end it."""
        limit = time.monotonic() + WAIT_S
        while read_state(self.us.bridge(self.bridge) / "agent.pid") is not None:
            assert time.monotonic() < limit, f"{self.bridge} does not end"
            self.felix("bridge", "down", self.bridge, "--region", "us-east")

    def down(self) -> None:
        """The region in trouble: its agent and its broker, if they run."""
        self.stop_agent()
        limit = time.monotonic() + WAIT_S
        while read_state(self.us.broker_pid) is not None:
            assert time.monotonic() < limit, "the broker does not end"
            self.felix("region", "down", "us-east")

    def close(self) -> None:
        for witness in self.witnesses.values():
            witness.kill()
        for pid_file in self.home.glob("**/*.pid"):
            state = read_state(pid_file)
            if state is not None:
                os.kill(state["pid"], signal.SIGTERM)


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mesh]:
    monkeypatch.chdir(tmp_path)
    mesh = Mesh(tmp_path)
    try:
        mesh.found()
        yield mesh
    finally:
        mesh.close()


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("FELIX_RUNBOOKS"), reason="minutes: make runbooks")
def test_each_page_brings_back_a_mesh_that_was_broken_so(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    us = mesh.us
    mesh.publish(20)
    mesh.down()
    shutil.copytree(us.root, mesh.backup / "us-east")

    shutil.rmtree(us.root / "data")
    mesh.follow("lost-disk", "A broker's disk")
    mesh.publish(5)

    egress = us.bridge(BRIDGE) / "egress"
    mesh.stop_agent()
    kept = mesh.backup / egress.relative_to(mesh.home)
    shutil.rmtree(kept)
    egress.rename(kept)
    mesh.follow("lost-disk", "An agent's disk")
    mesh.publish(1)

    mesh.down()
    shutil.rmtree(us.root / "data" / "streams")
    shutil.copytree(mesh.backup / "us-east" / "data" / "streams", us.root / "data" / "streams")
    mesh.run("felix region up us-east --detach")
    mesh.run(f"felix bridge up {BRIDGE} --detach --region us-east")
    mesh.follow("restored-backup")
    mesh.publish(3)

    mesh.follow("leaked-log-key", "The keys")
    mesh.environment["FINGERPRINT"] = mesh.run(
        "felix region bundle --fingerprint --whole --region us-east"
    ).strip()
    mesh.follow("leaked-log-key", "The other regions")
    mesh.publish(2)

    mesh.follow("leaked-witness-key", "The region")
    mesh.environment["FINGERPRINT"] = mesh.run("felix region bundle --fingerprint --region us-east").strip()
    mesh.follow("leaked-witness-key", "The other regions")
    mesh.publish(2)

    mesh.follow("changed-signing-keys", "The region")
    for name, region in (("FINGERPRINT", "us-east"), ("OTHER_FINGERPRINT", "eu-west")):
        mesh.environment[name] = mesh.run(f"felix region bundle --fingerprint --region {region}").strip()
    mesh.follow("changed-signing-keys", "The other regions")
    policy = mesh.place / "us-east.yaml"
    policy.write_text(policy.read_text().replace("revision: 1\n", "revision: 2\n"))
    mesh.follow("changed-signing-keys", "What is to stand")
    mesh.publish(2)

    old, new = (str(mesh.place / "witnesses" / name) for name in ("w1", "w2"))
    places = [f"127.0.0.1:{claim_port()}" for _ in range(2)]
    mesh.environment["PLACE"] = places[1]
    mesh.run("felix audit policy --signing --bundle $FELIX_HOME/us-east/bundle.json > before.policy")
    mesh.run(f"felix witness init witness.example/w1 --dir {old}")
    mesh.run(f"felix witness add-log --from {mesh.place}/before.policy --dir {old}")
    mesh.run(f"felix witness serve --listen {places[0]} --dir {old}")
    mesh.have_witnesses((old, places[0]))
    mesh.follow("changed-witness-key", "The new witness")
    mesh.have_witnesses((old, places[0]), (new, places[1]))
    mesh.follow("changed-witness-key", "The logs' owners")
    key = json.loads(mesh.run(f"felix witness list --dir {new} --json"))["verifier_keys"][0]
    (mesh.place / "new.policy").write_text(f"witness w2 {key}\nquorum w2\n")
    mesh.publish(1)
    mesh.follow("changed-witness-key", "Those who verify")
    mesh.witnesses.pop(old).kill()
    mesh.have_witnesses((new, places[1]))
    mesh.follow("changed-witness-key", "The old one goes")
    mesh.publish(2)

    mesh.follow("leaked-bridge-key")
    mesh.bridge = "us-to-eu-2"
    mesh.publish(2)

    mesh.follow("full-disk")

    (us.authority / "root.key").unlink()
    mesh.follow("lost-root-key", "The authority's root key")
    mesh.down()
    shutil.rmtree(us.keys / "roots")
    mesh.follow("lost-root-key", "A root key of the data")

    us.identity("operator").unlink()
    mesh.follow("lost-operator")
    text = us.config.read_text().replace("operators: [alice]", "operators: [operator]")
    us.config.write_text(text)

    mesh.down()
    shutil.copy(mesh.backup / "us-east" / "authority" / "root.key", us.authority / "root.key")
    config = load_config(us.config)
    with monkeypatch.context() as patched:
        patched.setattr(keys.authority, "ISSUING_LIFETIME", timedelta(seconds=1))
        save_issuing(load_authority(us.authority, "us-east", "acme").renew_issuing(now_ms()), us.authority)
    for kind, name in (("operator", "operator"), ("bridge", mesh.bridge)):
        issue_identity(us, config, kind, name, now_ms())
    mesh.run("felix region up us-east --detach", 4)  # the issuing certificate is over
    mesh.follow("expired-certificates")
    mesh.publish(1)
    mesh.run("felix audit verify --region us-east")


def test_every_page_is_listed_and_run() -> None:
    index = (FOLDER / "README.md").read_text()
    here = Path(__file__).read_text()
    for page in PAGES:
        if page.name == "README.md":
            continue
        assert f"]({page.name})" in index and f'follow("{page.stem}"' in here, page.name
        for line, _ in commands(page.stem):
            if line.startswith("felix "):
                check_words(shlex.split(line.partition(" > ")[0])[1:])
