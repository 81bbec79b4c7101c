"""Two regions and an agent as separate processes, driven by nothing but the `felix` command; for end-to-end tests.

Every process is started through the command line and stopped by its id. Commands never show a traceback: `felix`
asserts it for each one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from e2e.relay import Relay
from ports import claim_port
from warm.commands import warm_command
from warm.process import WarmProcess

import felix
from audit.leaf import Kind, Leaf, decode_leaf
from audit.tile import read_entries
from audit.tile_disk import Folder
from cli.process import read_state
from felix.client import RegionClient
from felix.identity_file import load_identity
from felix.messages import LinkState, PutDocument
from felix.profile import Profile, load_profile
from keys.bundle import decode_bundle
from keys.key_file import load_signing_key
from policy.approval import sign_approval
from policy.grant import open_export, sign_export, sign_import
from policy.residency import parse_policy
from policy.terms import Basis, GrantTerms
from policy.transform import build_spec
from region.folder import RegionFolder

ROOT = Path(__file__).parents[2]
MESH = "acme"
SOURCE = "us-east"
DESTINATION = "eu-west"
BRIDGE = "us-east-to-eu-west"
APPROVER = "dpo"
WAIT_S = 120.0
COMMAND_TIMEOUT_S = 580.0
"""A hung command fails its test just before the test's own limit does; a report on a busy machine takes minutes."""

T = TypeVar("T")

POLICIES = {
    SOURCE: """\
version: 1
name: us-east
revision: 1
region: us-east
regions:
  us-east: {country: US, jurisdiction: US}
  eu-west: {country: IE, jurisdiction: EU}
classes:
  operational: {description: Flights., streams: [acme/ops/*]}
  personal: {description: People., streams: [acme/hr/*]}
exports:
  - name: to-eu
    classes: [operational]
    to: {jurisdictions: [EU]}
    bases: [scc]
    keys: [pseudonymize, hash, drop, keep]
    lifetime: 90d
    approvals: 1
""",
    DESTINATION: """\
version: 1
name: eu-west
revision: 1
region: eu-west
regions:
  us-east: {country: US, jurisdiction: US}
  eu-west: {country: IE, jurisdiction: EU}
classes:
  operational: {description: Flights., streams: [acme/ops/*]}
imports:
  - name: from-us
    classes: [operational]
    from: {regions: [us-east]}
    bases: [scc]
    keys: [pseudonymize, hash, drop, keep]
    lifetime: 90d
""",
}


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def command(*words: str) -> list[str]:
    """The argument list of `felix WORDS`."""
    return [sys.executable, "-m", "cli.main", *words]


def environment(home: Path, **more: str) -> dict[str, str]:
    """What a command sees: this checkout, that home, and nothing of Felix that the caller's shell has set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FELIX_")}
    return {**kept, "FELIX_HOME": str(home), "PYTHONPATH": str(ROOT), **more}


def felix_command(
    home: Path,
    *words: str,
    code: int | Sequence[int] | None = 0,
    stdin: bytes = b"",
    cwd: Path | None = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
    **more: str,
) -> Said:
    """Run `felix WORDS` to its end. `code`: what it must end with, None for anything; `more`: environment variables.

    Its imports are done (warm.commands), unless a variable is given that is read by more than Felix.
    """
    warm = all(name.startswith("FELIX_") for name in more)
    done = subprocess.run(
        warm_command(*words) if warm else command(*words),
        input=stdin,
        capture_output=True,
        env=environment(home, **more),
        cwd=cwd or ROOT,
        timeout=timeout_s,
    )
    # A long sentence is broken into lines where there is no terminal, too; here it is one line again.
    told = re.sub(r" ?\n(?=\S)", " ", done.stderr.decode(errors="replace"))
    said = Said(done.returncode, done.stdout.decode(errors="replace"), told)
    shown = f"felix {' '.join(words)} ended with {said.code}:\n{said.out[-3000:]}\n{said.err[-3000:]}"
    assert "Traceback" not in said.err + said.out, shown
    if code is not None:
        wanted = (code,) if isinstance(code, int) else code
        assert said.code in wanted, shown
    return said


def until(condition: Callable[[], T], what: str, timeout_s: float = WAIT_S) -> T:
    """Wait until `condition` gives something true, and return it."""
    limit = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < limit, (
            f"{what} did not come about within {timeout_s:.0f} s; last: {found!r}"
        )
        time.sleep(0.05)


class CommandMesh:
    """`found`, then `up`; `close` at the end. Ports stay the same over restarts."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.us = RegionFolder.of(SOURCE, home)
        self.eu = RegionFolder.of(DESTINATION, home)
        self.relay: Relay
        self._processes: list[WarmProcess] = []

    def felix(self, *words: str, **how: Any) -> Said:
        """See `felix_command`."""
        return felix_command(self.home, *words, **how)

    def folder(self, region: str) -> RegionFolder:
        return self.us if region == SOURCE else self.eu

    # -- life ------------------------------------------------------------------------------------------

    def found(self) -> None:
        """Both regions founded, the bridge issued, trust exchanged; the agent's way to the destination is recorded."""
        ports = {}
        for region in (SOURCE, DESTINATION):
            ports[region] = claim_port()
            listen = f"127.0.0.1:{ports[region]}"
            self.felix(
                "region",
                "init",
                region,
                "--mesh",
                MESH,
                "--entity",
                f"Acme {region}",
                "--listen",
                listen,
                "--health",
                "none",
            )
        self.felix("identity", "issue", BRIDGE, "--kind", "bridge", "--region", SOURCE)
        for region in (SOURCE, DESTINATION):
            self.felix("identity", "issue", APPROVER, "--kind", "approver", "--region", region)
        for region, other in ((SOURCE, DESTINATION), (DESTINATION, SOURCE)):
            fingerprint = self.felix("region", "bundle", "--region", other, "--fingerprint").out.strip()
            bundle = RegionFolder.of(other, self.home).bundle
            self.felix(
                "region", "trust", str(bundle), "--region", region, "--fingerprint", fingerprint, "--offline"
            )
        self.relay = Relay(ports[DESTINATION])
        self.write_agent_config(BRIDGE, ports[SOURCE], self.relay.port)

    def write_agent_config(self, name: str, source_port: int, destination_port: int) -> Path:
        folder = self.us.bridge(name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "bridge.yaml"
        path.write_text(
            f"name: {name}\nmesh: {MESH}\nsource: {SOURCE}\nsource_addresses: ['127.0.0.1:{source_port}']\n"
            f"home: ../..\negress: bridges/{name}/egress\n"
            f"destinations:\n  - region: {DESTINATION}\n    addresses: ['127.0.0.1:{destination_port}']\n"
        )
        return path

    def up(self, *regions: str) -> None:
        for region in regions or (SOURCE, DESTINATION):
            self.felix("region", "up", region, "--detach")

    def down(self, *regions: str) -> None:
        for region in regions or (SOURCE, DESTINATION):
            self.felix("region", "down", region)

    def agent_up(self) -> None:
        self.felix("bridge", "up", BRIDGE, "--detach", "--region", SOURCE)

    def agent_down(self) -> None:
        self.felix("bridge", "down", BRIDGE, "--region", SOURCE)

    def enact_policies(self) -> None:
        for region, text in POLICIES.items():
            self.enact(region, text)

    def enact(self, region: str, text: str, **how: Any) -> Said:
        path = self.home / f"policy-{region}.yaml"
        path.write_text(text)
        return self.felix("policy", "apply", str(path), **how)

    def kill(self, region: str) -> None:
        """SIGKILL to a region's broker, by its id, and wait until it is gone."""
        pid = self.state(region)["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: read_state(self.folder(region).broker_pid) is None, f"the end of process {pid}")

    def state(self, region: str) -> dict[str, Any]:
        state = read_state(self.folder(region).broker_pid)
        assert state is not None, f"the broker of {region} does not run"
        return state

    @property
    def agent_pid_file(self) -> Path:
        return self.us.bridge(BRIDGE) / "agent.pid"

    @property
    def agent_log(self) -> Path:
        return self.us.bridge(BRIDGE) / "agent.log"

    def spawn(self, *words: str, log: Path, **more: str) -> WarmProcess:
        """`felix WORDS` in the foreground of a child process, its output in `log`."""
        with log.open("ab") as file:
            process = WarmProcess("felix", *words, env=environment(self.home, **more), cwd=ROOT, log=file)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Stop everything that this mesh started, each process by its id."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for path in sorted(self.home.glob("*/bridges/*/agent.pid")) + sorted(
            self.home.glob("*/run/broker.pid")
        ):
            state = read_state(path)
            if state is not None:
                with suppress(ProcessLookupError):
                    os.kill(state["pid"], signal.SIGTERM)
                for _ in range(100):
                    if read_state(path) is None:
                        break
                    time.sleep(0.1)
                else:
                    with suppress(ProcessLookupError):
                        os.kill(state["pid"], signal.SIGKILL)
        if hasattr(self, "relay"):
            self.relay.close()

    # -- grants and streams ----------------------------------------------------------------------------

    def create(self, stream: str, shards: int = 1) -> None:
        self.ask(SOURCE, lambda client: client.create_stream(stream, shards=shards))

    def allow(self, stream: str, *more: str, code: int = 0, expires: str = "30d") -> str:
        """The export grant; its id (empty where it was refused)."""
        said = self.felix(
            "bridge", "allow", "stream", stream, "--to", DESTINATION, "--purpose", "analytics",
            "--basis", "scc", "--reference", "SCC-2026-014", "--expires", expires,
            "--out", str(self.grant_file(stream)), "--region", SOURCE, "--json", *more, code=code,
        )  # fmt: skip
        return str(said.json()["grant"]) if not code else ""

    def grant_file(self, stream: str) -> Path:
        return self.home / f"{stream.replace('/', '-')}.grant"

    def accept(self, path: Path, **how: Any) -> Said:
        out = path.with_suffix(".acceptance")
        return self.felix(
            "bridge", "accept", str(path), "--out", str(out), "--region", DESTINATION, "--yes", **how
        )

    def approve(self, grant: str, region: str, **how: Any) -> Said:
        return self.felix("bridge", "approve", grant, "--as", APPROVER, "--yes", "--region", region, **how)

    def grant(self, stream: str, *more: str, expires: str = "30d") -> str:
        """Both halves, and an approval on each side."""
        grant = self.allow(stream, *more, expires=expires)
        self.accept(self.grant_file(stream))
        for region in (SOURCE, DESTINATION):
            self.approve(grant, region)
        return grant

    def prepare(self, stream: str, expires_ms: int = 30 * 86_400_000) -> str:
        """A grant as `grant` makes it, without the commands: for tests of something else, which are faster so."""
        now = time.time_ns() // 1_000_000
        terms = GrantTerms(
            stream=stream, from_region=SOURCE, to_region=DESTINATION, bridge=f"spiffe://{SOURCE}.{MESH}/bridge/{BRIDGE}",
            purpose="analytics", basis=Basis.SCC, reference="SCC-2026-014", exporter="Acme Inc.", importer="Acme Ltd.",
            owner="operations", drawn_up_by=f"spiffe://{SOURCE}.{MESH}/operator/operator", not_before=now, expires=now + expires_ms,
            transform=build_spec(pseudonymize=["tailnum"]),
        )  # fmt: skip
        policies = {region: parse_policy(text, region) for region, text in POLICIES.items()}
        keys = {region: load_signing_key(self.folder(region).policy_key).private_key for region in POLICIES}
        trusted = {
            region: decode_bundle(self.folder(region).bundle.read_bytes()).bundle.policy_keys
            for region in POLICIES
        }
        export = sign_export(terms, policies[SOURCE], keys[SOURCE], now)
        accepted = sign_import(
            export,
            policies[DESTINATION],
            keys[DESTINATION],
            trusted,
            f"spiffe://{DESTINATION}.{MESH}/operator/operator",
            now,
        )
        self.grant_file(stream).write_bytes(export.encode_file())
        approvals = {
            region: sign_approval(terms.hash(), load_identity(self.folder(region).identity(APPROVER)), now)
            for region in POLICIES
        }

        async def put(client: RegionClient) -> None:
            await client.request(PutDocument("export", export.encode_file()))
            await client.request(PutDocument("approval", approvals[SOURCE].encode_file()))
            held = (await client.list_rights()).get(terms.bridge, [])
            await client.put_rights(terms.bridge, [*held, f"bridge-read {stream}"])

        async def take(client: RegionClient) -> None:
            await client.request(PutDocument("export", export.encode_file()))
            await client.request(PutDocument("import", accepted.encode_file()))
            await client.request(PutDocument("approval", approvals[DESTINATION].encode_file()))

        self.ask(SOURCE, put)
        self.ask(DESTINATION, take)
        return open_export(export, trusted).grant

    def publish(self, stream: str, payloads: Sequence[bytes], key_field: str = "") -> None:
        """Through the command, from its standard input."""
        key = ("--key-field", key_field) if key_field else ()
        data = b"".join(payload + b"\n" for payload in payloads)
        said = self.felix("stream", "publish", stream, "--region", SOURCE, "--json", *key, stdin=data)
        assert said.json()["records"] == len(payloads)

    def profile(self, region: str, identity: str = "") -> Profile:
        return load_profile(region, identity=identity, home=self.home)

    def read(self, region: str, stream: str, count: int) -> list[dict[str, Any]]:
        """So many records through `felix stream subscribe --json`."""
        if not count:
            return []
        said = self.felix(
            "stream", "subscribe", stream, "--from", "earliest", "--count", str(count), "--json", "--region", region
        )  # fmt: skip
        return [json.loads(line) for line in said.out.splitlines()]

    def ask(
        self, region: str, what: Callable[[RegionClient], Coroutine[Any, Any, T]], identity: str = ""
    ) -> T:
        """One thing, in a session of its own. Polls and preparations; what is tested goes through the command."""

        async def work() -> T:
            async with felix.connect(profile=self.profile(region, identity)) as client:
                return await what(client)

        return asyncio.run(work())

    def send(self, stream: str, payloads: Sequence[bytes]) -> None:
        """Publish, each record acknowledged."""

        async def work(client: RegionClient) -> None:
            async with client.stream(stream).publisher() as publisher:
                for payload in payloads:
                    await publisher.send(payload)
                await publisher.flush()

        self.ask(SOURCE, work)

    def size(self, region: str, stream: str) -> int:
        """Records in a stream, over all shards; 0 where there is no such stream."""

        async def work(client: RegionClient) -> int:
            async for state in client.list_streams():
                if state.stream == stream:
                    return sum(shard.high_watermark for shard in state.state)
            return 0

        return self.ask(region, work)

    def arrived(self, stream: str, count: int) -> None:
        """Wait until so many records are at the destination."""
        until(lambda: self.size(DESTINATION, stream) >= count, f"{count} records of {stream}")

    def links(self, stream: str) -> list[LinkState]:
        """What the agent last reported of the stream's links."""
        return [link for link in self.ask(SOURCE, RegionClient.list_links) if link.stream == stream]

    def link_state(self, stream: str, state: str) -> LinkState:
        """Wait until the stream's links are all in a state; the first of them."""

        def found() -> LinkState | None:
            links = self.links(stream)
            return links[0] if links and all(link.state == state for link in links) else None

        held = until(found, f"a link of {stream} that is {state}")
        assert held is not None
        return held

    # -- the logs --------------------------------------------------------------------------------------

    @property
    def egress(self) -> Path:
        return self.us.bridge(BRIDGE) / "egress"

    @property
    def ingress(self) -> Path:
        return self.eu.root / "data" / "audit"

    @property
    def own_log(self) -> Path:
        """What the source region's broker writes."""
        return self.us.root / "data" / "audit"

    def leaves(self, log: Path, *kinds: Kind, stream: str = "") -> list[Leaf]:
        return [
            leaf
            for leaf in leaves_of(log)
            if (not kinds or leaf.header.kind in kinds) and stream in ("", leaf.header.stream)
        ]

    def leaf(self, log: Path, kind: Kind, stream: str, code: int = 0) -> Leaf:
        """Wait until a checkpoint covers such a leaf; the first one."""

        def found() -> Leaf | None:
            held = (leaf for leaf in self.leaves(log, kind, stream=stream) if leaf.header.code == code)
            return next(held, None)

        held = until(found, f"a {kind.name} leaf of {stream} with code {code} in {log}")
        assert held is not None
        return held


def leaves_of(log: Path) -> Iterator[Leaf]:
    """Every leaf that the log's checkpoint covers."""
    files = Folder(log)
    note = files.read("checkpoint")
    size = int(note.split(b"\n", 2)[1]) if note else 0
    return (decode_leaf(data) for _, data in read_entries(files, 0, size, size))


@contextmanager
def running_mesh(home: Path) -> Iterator[CommandMesh]:
    """Both brokers and the agent up, policies in force; all of it stopped at the end."""
    mesh = CommandMesh(home)
    try:
        mesh.found()
        mesh.up()
        mesh.enact_policies()
        mesh.agent_up()
        yield mesh
    finally:
        mesh.close()
