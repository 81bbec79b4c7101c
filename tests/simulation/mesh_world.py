"""Two whole regions and the agent of their bridge, on three machines: brokers with governance, keys and audit logs, real documents.

What is held when all is over: both audit logs verify by the product's verifier, and continue what the regions cosigned; what the
ingress log has as arrived was announced, each offset once and in order, under a grant that was in force; the destination's stream is what the
source acknowledged, in order, once; and where a grant is in force at the end, all of it arrived. No nonce was used twice.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

import msgspec
from bridge_mesh import BRIDGE, STREAM, Mesh, flight, found_regions
from simulation.clients import CLIENT, STREAMS, Balances, Invoices, RegionUser
from simulation.nonces import nonces
from simulation.script import Script, Step
from simulation.world import RUN_S_MAX, START_MS, Client, Host, InvariantError, World

import felix
from audit.leaf import Kind
from audit.tile_disk import Folder
from bridge.agent import Agent
from bridge.config import BridgeConfig, DestinationConfig
from felix.address import Address
from felix.client import RegionClient
from felix.errors import FelixError
from felix.identity_file import load_identity
from felix.profile import Profile
from felix.runtime.simulated import SimulatedLoop, simulated
from felix.transport.memory import MemoryEngine
from keys.file_provider import FileKeyProvider
from keys.keyring import Keyring
from keys.store import KeyStore, MemoryKeyStore
from policy.grant import StandingAction
from region.config import load_config
from region.folder import RegionFolder
from region.limits.budget import Budget
from region.metadata.memory import MemoryStore
from region.node import Node
from region.startup.ground import Machine

REGIONS: Final = {"us-east": "us", "eu-west": "eu"}
"""By region, the host that its broker runs on."""
AGENT, OPERATOR = "agent", "operator"
PORT: Final = 7443
BURSTS, BURST_MAX = 6, 4
LOOK_S: Final = 0.25
ORDERLY_S: Final = 60.0
"""What is promised is looked at after so long without faults: checkpoints and cosignatures come every few seconds."""


@cache
def founded() -> tuple[Path, RegionFolder, RegionFolder]:
    """Two regions' folders with identities and bundles. Nothing writes them afterwards, so that all runs share them."""
    home = Path(tempfile.mkdtemp(prefix="felix-simulated-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    us, eu = found_regions(home, START_MS)
    return home, us, eu


@cache
def key_entries(region: str) -> tuple[bytes, ...]:
    """What is in a region's key file when it was founded."""
    store = KeyStore(folder_of(region).keys, region)
    try:
        return tuple(store.bodies)
    finally:
        store.close()


def folder_of(region: str) -> RegionFolder:
    _, us, eu = founded()
    return us if region == "us-east" else eu


@dataclass
class SimulatedMesh(Mesh):
    """`bridge_mesh.Mesh` over what a world simulates."""

    world: Any = None

    @asynccontextmanager
    async def operator(self, region: str) -> AsyncIterator[RegionClient]:
        async with felix.connect(
            profile=self.profile(region),
            engine=MemoryEngine(self.world.network, OPERATOR),
            connect_timeout_s=RUN_S_MAX,
            request_timeout_s=RUN_S_MAX,
            runtime=self.world.operator_runtime,
        ) as client:
            yield client

    def profile(self, region: str) -> Profile:
        folder = self.folder(region)
        return Profile(
            region=region,
            mesh="acme",
            addresses=(f"{REGIONS[region]}:{PORT}",),
            authority=self.bundle(region).root_pem.encode(),
            identity=load_identity(folder.identity("operator")),
            server_name=f"{region}.acme",
        )

    def log_files(self, folder: Path) -> Folder:
        host = AGENT if folder == self.egress_folder else "eu"
        return Folder(folder, self.world.hosts[host].disk.mounted)

    def bridge_config(self, **changes: Any) -> BridgeConfig:
        return BridgeConfig(
            name=BRIDGE,
            source="us-east",
            mesh="acme",
            source_addresses=(f"us:{PORT}",),
            destinations=(DestinationConfig(region="eu-west", addresses=(f"eu:{PORT}",)),),
        )


class OutlivingStore(MemoryStore):
    """A broker that ends, or cannot start, leaves it as it is."""

    async def close(self) -> None:
        """It is another machine's."""


class RegionHost(Host):
    """A region's broker. Its metadata store is another machine's, which does not fail; its keys are kept by one, too."""

    def __init__(self, world: MeshWorld, region: str) -> None:
        super().__init__(world, REGIONS[region])
        self.region = region
        self.mesh = world.mesh
        self.store = OutlivingStore(runtime=self.runtime)
        self.keys = list(key_entries(region))
        self.keep_folder(folder_of(region).root)
        self.node: Node | None = None

    def comes_back(self, path: Path) -> bool:
        """The logs of streams do, and the audit log; what is known of documents waits for a start."""
        return "streams" in path.parts or "audit" in path.parts

    def budgets(self) -> Iterable[Budget]:
        return self.node.broker.budgets.all() if self.node is not None else ()

    async def serve(self) -> None:
        folder, files = folder_of(self.region), self.mount()
        config = msgspec.structs.replace(
            load_config(folder.config), listen=Address(self.name, PORT), health=None
        )
        machine = Machine(
            files, files, MemoryEngine(self.world.network, self.name), self.store, partial(self._keyring)
        )
        node = await Node.start(folder, config, self.runtime, machine)
        self.node = self.mesh.nodes[self.region] = node

    def _keyring(self, folder: Path, region: str, **more: Any) -> Keyring:
        roots = FileKeyProvider(folder / "roots", region, self.runtime.random)
        return Keyring(region, roots, MemoryKeyStore(self.keys), **more)


class AgentHost(Host):
    """The bridge's agent, with its egress log."""

    def __init__(self, world: MeshWorld) -> None:
        super().__init__(world, AGENT)
        self.mesh = world.mesh
        self.keep_folder(folder_of("us-east").root)
        self.agent: Agent

    def comes_back(self, path: Path) -> bool:
        return True

    async def serve(self) -> None:
        self.agent = await Agent.start(
            self.mesh.bridge_config(),
            folder_of("us-east").root,
            engine=MemoryEngine(self.world.network, AGENT),
            runtime=self.runtime,
            storage=self.mount(),
        )


class Departures(Client):
    """Publishes at the source, while an operator revokes grants, agrees to others, pauses and resumes."""

    name: ClassVar[str] = "departures"
    world: MeshWorld

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.acknowledged: dict[int, int] = {}
        self.refused: set[int] = set()
        self.sequence = 0

    @classmethod
    def draw(cls, random: Random) -> list[Step]:
        steps = [
            Step(cls.name, "publish", random.choice((0.0, 0.05, 1.0)), number=random.randint(1, BURST_MAX))
            for _ in range(BURSTS)
        ]
        for _ in range(random.choice((0, 0, 1, 2))):
            what = random.choice(("revoke", "pause"))
            where = random.choice(tuple(REGIONS))
            steps.insert(random.randrange(len(steps)), Step(cls.name, what, random.random(), where))
        return steps

    async def run(self) -> None:
        mesh, number = self.world.mesh, 0
        async with mesh.operator("us-east") as client:
            stream = client.stream(STREAM)
            for step in self.steps:
                await asyncio.sleep(step.after_s)
                if step.what != "publish":
                    await self.govern(step)
                    continue
                burst = range(number, number := number + step.number)
                await asyncio.gather(*(self._publish(stream, each) for each in burst))

    async def _publish(self, stream: felix.Stream, number: int) -> None:
        try:
            offset = await stream.publish(flight(number))
        except FelixError as error:
            self.world.note(f"given up {number}: {error.code.name}")
            self.refused.add(number)
            return
        self.world.note(f"acknowledged {number} at {offset}")
        self.world.count("acknowledged")
        self.acknowledged[number] = offset

    async def govern(self, step: Step) -> None:
        """End the grant in force and agree to the next, or hold it for a while."""
        world, mesh = self.world, self.world.mesh
        world.count(step.what)
        if step.what == "pause":
            for action in (StandingAction.PAUSE, StandingAction.RESUME):
                self.sequence += 1
                await world.until_done(partial(mesh.stand, step.where, world.grant, action, self.sequence))
                world.note(f"{step.where}: {action} {world.grant}")
                await asyncio.sleep(1.0)
            return
        # The next half is signed before: its documents cross while the other is being ended.
        ended = world.grant
        await world.until_done(partial(mesh.stand, step.where, ended, StandingAction.REVOKE))
        world.note(f"{step.where}: revoked {ended}")
        world.revoked.append(ended)
        await world.agree()


class MeshWorld(World):
    """See the module."""

    kinds = (Departures, Invoices, Balances)
    # Less than a grant lasts.
    jumps_ms = (-60_000, -1, 1_000, 60_000)

    def __init__(self, seed: int, loop: SimulatedLoop, script: Script) -> None:
        super().__init__(seed, loop, script)
        home, us, eu = founded()
        self.operator_runtime = self.client_runtime = simulated(loop, START_MS)
        self.mesh = SimulatedMesh(home, us, eu, now_ms=self.operator_runtime.clock.now_ms, world=self)
        self.grant = ""
        self.revoked: list[str] = []

    @classmethod
    def party(cls, random: Random) -> list[type[Client]]:
        """Who publishes what crosses; often with others beside."""
        return [Departures, *random.choice(((), (Invoices,), (Balances,)))]

    @classmethod
    def targets(cls) -> tuple[str, ...]:
        return (*REGIONS.values(), AGENT)

    def peers(self, name: str) -> list[str]:
        if name == AGENT:
            return list(REGIONS.values())
        return [AGENT, OPERATOR, CLIENT] if name == "us" else [AGENT, OPERATOR]

    def profile(self) -> Profile:
        """Of clients beside."""
        return self.mesh.profile("us-east")

    def make(self) -> Iterable[Host]:
        for region in REGIONS:
            yield RegionHost(self, region)
        yield AgentHost(self)

    async def begin(self) -> None:
        await self.mesh.enact_policies()
        await self.mesh.create()
        async with self.mesh.operator("us-east") as client:
            for kind in self.joining:
                if issubclass(kind, RegionUser):
                    await client.create_stream(kind.stream, views=STREAMS[kind.stream])
        await self.agree()

    async def agree(self) -> None:
        """Both halves of a grant, and both sides' approvals."""
        mesh = self.mesh
        body, export, accepted = mesh.sign_grant(purpose=f"analytics {len(self.revoked)}")
        await self.until_done(partial(mesh.put, "us-east", "export", export))
        await self.until_done(partial(mesh.put, "eu-west", "export", export))
        await self.until_done(partial(mesh.put, "eu-west", "import", accepted))
        for region in REGIONS:
            approval = mesh.sign_approval(region, body.terms_hash)
            await self.until_done(partial(mesh.put, region, "approval", approval))
        self.grant = body.grant
        self.note(f"agreed to {len(self.revoked)}")

    async def until_done(self, ask: Any) -> None:
        """Asked again by an operator who was refused for a reason that passes."""
        while True:
            try:
                await ask()
                return
            except FelixError as error:
                self.note(f"refused: {error.code.name}")
                await asyncio.sleep(LOOK_S)

    # -- what must hold --------------------------------------------------------------------------------

    async def check(self) -> None:
        await super().check()
        wanted = await self._source()
        arrived = await self._arrived(len(wanted))
        if arrived != wanted:
            raise InvariantError(f"the source has {wanted}, the destination {arrived}")
        # Until both logs have a checkpoint of all of it.
        await asyncio.sleep(ORDERLY_S)
        self._check_logs(len(wanted))
        self._check_nonces()

    async def _source(self) -> list[int]:
        departures = next(each for each in self.clients if isinstance(each, Departures))
        end = (await self.mesh.describe("us-east")).state[0].high_watermark
        found = self.mesh.numbers(await self.mesh.read("us-east", end))
        if len(set(found)) != len(found):
            raise InvariantError(f"twice at the source: {found}")
        for number, offset in departures.acknowledged.items():
            if offset >= len(found) or found[offset] != number:
                raise InvariantError(f"{number} was acknowledged at {offset} and is not there: {found}")
        return found

    async def _arrived(self, wanted: int) -> list[int]:
        """What is in the destination's stream, once that is no less."""
        if not wanted:
            return []
        try:
            async with asyncio.timeout(RUN_S_MAX):
                while await self.mesh.arrived() < wanted:  # noqa: ASYNC110 - seconds cost nothing here
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            host = self.hosts[AGENT]
            assert isinstance(host, AgentHost)
            why = [f"{link.state}: {link.reason}" for link in host.agent.links()]
            raise InvariantError(
                f"{await self.mesh.arrived()} of {wanted} crossed; {host.agent.not_ready() or why}"
            ) from None
        return self.mesh.numbers(await self.mesh.read("eu-west", await self.mesh.arrived()))

    def _check_nonces(self) -> None:
        for name in REGIONS.values():
            found = Counter(nonces(self.hosts[name].disk))
            twice = [
                f"{counter.hex()} of key {key.hex()}" for (key, counter), count in found.items() if count > 1
            ]
            if twice:
                raise InvariantError(f"{name} has sealed with a nonce twice: {twice}")
            self.count("sealed", len(found))

    def _check_logs(self, records: int) -> None:
        mesh = self.mesh
        for report in (mesh.verify_egress(), mesh.verify_ingress()):
            if not report.ok:
                raise InvariantError(f"{report.origin} does not verify: {report.findings}")
            if report.uncovered:
                raise InvariantError(f"{report.uncovered} leaves of {report.origin} have no checkpoint")
        announced = {
            (leaf.header.grant_id, leaf.header.first_offset, leaf.header.last_offset, leaf.header.part): leaf
            for leaf in mesh.leaves(mesh.egress_folder, Kind.INTENT)
        }
        following, ended = 0, set[str]()
        for leaf in mesh.leaves(mesh.ingress_folder, Kind.ACK, Kind.REVOKE):
            header = leaf.header
            if header.kind is Kind.REVOKE:
                ended.add(header.grant_id)
                continue
            if header.grant_id in ended:
                raise InvariantError(f"arrived under {header.grant_id}, which had been revoked: {header}")
            key = (header.grant_id, header.first_offset, header.last_offset, header.part)
            if key not in announced or announced[key].entries != leaf.entries:
                raise InvariantError(f"arrived and was not announced so: {header}")
            if header.part == 0:
                if header.first_offset != following:
                    raise InvariantError(f"offset {header.first_offset} arrived after {following - 1}")
                assert header.last_offset is not None
                following = header.last_offset + 1
        if following != records:
            raise InvariantError(f"the ingress log has {following} of {records} records")
        self.count("crossed", following)
