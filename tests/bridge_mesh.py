"""Two regions and a bridge for tests: real brokers in this process, real documents, a real agent."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from ports import claim_port
from region_home import copied, make_region, running
from warm.commands import warm_script

import felix
from audit.leaf import Header, Kind, Leaf, decode_leaf
from audit.origin import egress_origin, region_origin
from audit.stream_statement import Epoch, StreamStatement, sign_statement
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.trust import Trust
from audit.verify import Report, verify_log
from bridge.agent import Agent
from bridge.config import BridgeConfig, DestinationConfig
from felix.address import Address
from felix.client import RegionClient
from felix.identity_file import load_identity
from felix.messages import PutDocument, StreamState
from felix.names import SpiffeId, StreamName
from felix.profile import Profile
from felix.runtime.port import Runtime
from felix.runtime.real import REAL, now_ms
from keys.bundle import RegionBundle, decode_bundle
from keys.key_file import load_signing_key
from policy.approval import Approval, Document, sign_approval
from policy.grant import (
    DenyEntry,
    ExportGrant,
    Standing,
    StandingAction,
    open_export,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import parse_policy, sign_policy
from policy.signed import SignedDocument
from policy.terms import Basis, GrantTerms
from policy.transform import build_spec
from region.bootstrap import issue_identity, trust_region
from region.config import load_config
from region.folder import RegionFolder
from region.node import Node

BRIDGE = "us-to-eu"
STREAM = "acme/ops/departures"
WAIT_S = 120.0
APPROVER = "dpo"
ACCEPTED_BY = "spiffe://eu-west.acme/operator/operator"

POLICIES = {
    "us-east": """
version: 1
name: us-east
revision: 1
region: us-east
regions:
  us-east: {country: US, jurisdiction: US}
  eu-west: {country: IE, jurisdiction: EU}
classes:
  operational: {description: Flights., streams: [acme/ops/*]}
exports:
  - name: to-eu
    classes: [operational]
    to: {jurisdictions: [EU]}
    bases: [scc]
    keys: [pseudonymize, hash, drop, keep]
    headers: [note, kind]
    trace: true
    opaque: true
    lifetime: 90d
    approvals: 1
    onward: true
    wildcards: true
""",
    "eu-west": """
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
    headers: [note, kind]
    trace: true
    opaque: true
    lifetime: 90d
    onward: true
    wildcards: true
""",
}


def flight(number: int, **more: object) -> bytes:
    """A record of about 400 bytes, as a flight is."""
    return json.dumps(
        {
            "year": 2013, "month": 1, "day": 1 + number % 28, "dep_time": 517 + number % 1000,
            "sched_dep_time": 515, "dep_delay": number % 90 - 10, "arr_time": 830, "sched_arr_time": 819,
            "arr_delay": 11, "carrier": "UA", "flight": number, "tailnum": f"N{14228 + number % 4000}",
            "origin": "EWR", "dest": "IAH", "air_time": 227, "distance": 1400, "hour": 5, "minute": 15,
            "time_hour": "2013-01-01T05:00:00Z", "remarks": "on time, no remarks to be made of this one",
            **more,
        }
    ).encode()  # fmt: skip


async def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait until `condition` holds (it may be async), and return what it gave."""
    found: Any = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = condition()
                if isinstance(found, Awaitable):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{what} did not come about within {timeout_s} s; last: {found!r}") from None


def found_regions(home: Path, at_ms: int) -> tuple[RegionFolder, RegionFolder]:
    """Both regions' folders, which trust each other, with a bridge and an approver each."""
    us, eu = make_region(home, "us-east", at_ms=at_ms), make_region(home, "eu-west", at_ms=at_ms)
    issue_identity(us, load_config(us.config), "bridge", BRIDGE, at_ms)
    for folder in (us, eu):
        issue_identity(folder, load_config(folder.config), "approver", APPROVER, at_ms)
    trust_region(us, decode_bundle(eu.bundle.read_bytes()), at_ms)
    trust_region(eu, decode_bundle(us.bundle.read_bytes()), at_ms)
    return us, eu


def _found_now(home: Path) -> None:
    found_regions(home, now_ms())


def mesh_terms(now: int, **changes: Any) -> GrantTerms:
    """Terms between the mesh's two regions, valid for an hour from a minute ago on."""
    fields: dict[str, Any] = {
        "stream": STREAM,
        "from_region": "us-east",
        "to_region": "eu-west",
        "bridge": f"spiffe://us-east.acme/bridge/{BRIDGE}",
        "purpose": "analytics",
        "basis": Basis.SCC,
        "reference": "SCC-2026-014",
        "exporter": "Acme Inc",
        "importer": "Acme Ltd",
        "owner": "flight operations",
        "drawn_up_by": "spiffe://us-east.acme/operator/operator",
        "not_before": now - 60_000,
        "expires": now + 3_600_000,
        "transform": build_spec(pseudonymize=["tailnum"], drop=["hour", "minute"]),
    }
    return GrantTerms(**{**fields, **changes})


@dataclass
class Mesh:
    """Both regions' folders and brokers. `ports` stay the same over restarts."""

    home: Path
    us: RegionFolder
    eu: RegionFolder
    nodes: dict[str, Node] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    now_ms: Callable[[], int] = now_ms
    """The clock of whoever signs."""
    _stack: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, home: Path) -> Mesh:
        copied(_found_now, home)
        return cls(home, RegionFolder.of("us-east", home), RegionFolder.of("eu-west", home))

    def folder(self, region: str) -> RegionFolder:
        return self.us if region == "us-east" else self.eu

    async def start(self, region: str, **changes: Any) -> Node:
        if region not in self.ports:
            self.ports[region] = claim_port()
        context = running(self.folder(region), listen=Address("127.0.0.1", self.ports[region]), **changes)
        node = await context.__aenter__()
        self._stack[region], self.nodes[region] = context, node
        return node

    async def stop(self, region: str) -> None:
        context = self._stack.pop(region, None)
        if context is not None:
            await context.__aexit__(None, None, None)

    def addresses(self, region: str) -> tuple[str, ...]:
        """Where a region's brokers are."""
        return (f"127.0.0.1:{self.ports[region]}",)

    def first_addresses(self, region: str) -> tuple[str, ...]:
        """Of these, where operators and the agent of the region begin."""
        return self.addresses(region)

    def profile(self, region: str) -> Profile:
        folder = self.folder(region)
        return Profile(
            region=region,
            mesh="acme",
            addresses=self.first_addresses(region),
            authority=self.bundle(region).root_pem.encode(),
            identity=load_identity(folder.identity("operator")),
            server_name=f"{region}.acme",
        )

    @asynccontextmanager
    async def operator(self, region: str) -> AsyncIterator[RegionClient]:
        async with felix.connect(profile=self.profile(region)) as client:
            yield client

    def bundle(self, region: str) -> RegionBundle:
        return decode_bundle(self.folder(region).bundle.read_bytes()).bundle

    # -- documents -------------------------------------------------------------------------------------

    def key(self, region: str) -> Any:
        return load_signing_key(self.folder(region).policy_key).private_key

    async def put(self, region: str, kind: str, document: Document) -> None:
        async with self.operator(region) as client:
            await client.request(PutDocument(kind, document.encode_file()))

    def documents(self, region: str, kind: str) -> dict[str, bytes]:
        """What the region's broker holds of a kind, by id."""
        operator = SpiffeId(region, "acme", "operator", "operator")
        return self.nodes[region].services.governance.documents(operator, kind)

    async def enact_policies(self) -> None:
        for region in POLICIES:
            await self.enact_policies_of(region)

    async def enact_policies_of(self, region: str) -> None:
        policy = parse_policy(POLICIES[region], f"{region}.yaml")
        await self.put(region, "policy", sign_policy(policy, self.key(region)))

    def terms(self, **changes: Any) -> GrantTerms:
        return mesh_terms(self.now_ms(), **changes)

    def sign_grant(self, **changes: Any) -> tuple[ExportGrant, SignedDocument, SignedDocument]:
        """Both halves, not put anywhere."""
        terms = self.terms(**changes)
        us, eu = (parse_policy(POLICIES[name], name) for name in ("us-east", "eu-west"))
        export = sign_export(terms, us, self.key("us-east"), self.now_ms())
        trusted = {name: self.bundle(name).policy_keys for name in ("us-east", "eu-west")}
        accepted = sign_import(export, eu, self.key("eu-west"), trusted, ACCEPTED_BY, self.now_ms())
        return open_export(export, trusted), export, accepted

    async def grant(self, **changes: Any) -> str:
        """What each side signs is put there; the document_sync does the rest."""
        return (await self.put_grant(**changes)).grant

    async def put_grant(self, **changes: Any) -> ExportGrant:
        """As `grant`; all of what the source signed."""
        body, export, accepted = self.sign_grant(**changes)
        await self.put("us-east", "export", export)
        await self.put("eu-west", "export", export)
        await self.put("eu-west", "import", accepted)
        for region in ("us-east", "eu-west"):
            await self.put(region, "approval", self.sign_approval(region, body.terms_hash))
        return body

    def sign_approval(self, region: str, terms_hash: str, name: str = APPROVER) -> Approval:
        """By an approver of the region, whose identity is in its folder."""
        return sign_approval(
            bytes.fromhex(terms_hash), load_identity(self.folder(region).identity(name)), self.now_ms()
        )

    async def agree(
        self, region: str, body: ExportGrant, export: SignedDocument, accepted: SignedDocument
    ) -> None:
        """All documents of a grant, both sides' approvals among them, into one region; no document_sync is needed."""
        await self.put(region, "export", export)
        await self.put(region, "import", accepted)
        for signer in ("us-east", "eu-west"):
            await self.put(region, "approval", self.sign_approval(signer, body.terms_hash))

    async def stand(
        self, region: str, grant: str, action: StandingAction, sequence: int = 1
    ) -> SignedDocument:
        standing = Standing(
            grant=grant,
            action=action,
            region=region,
            sequence=sequence,
            at=self.now_ms(),
            by="alice",
            reason="a test",
        )
        document = sign_standing(standing, self.key(region))
        await self.put(region, "standing", document)
        return document

    async def deny(self, region: str, streams: str, sequence: int = 1, lifted: bool = False) -> None:
        entry = DenyEntry(
            streams=streams,
            peer="*",
            region=region,
            sequence=sequence,
            at=self.now_ms(),
            by="alice",
            lifted=lifted,
        )
        await self.put(region, "deny", sign_deny(entry, self.key(region)))

    def statement(self, region: str = "us-east", **changes: Any) -> bytes:
        """A stream statement that the region signs; one that its broker would make for some stream with one epoch."""
        fields: dict[str, Any] = {
            "region": region,
            "stream": STREAM,
            "incarnation": b"i" * 16,
            "shards": 1,
            "shard": 0,
            "log_start": 0,
            "log_end": 1 << 40,
            "epochs": (Epoch(1, 0),),
            "time_ms": self.now_ms(),
        }
        fields.update(changes)
        fields["log_end"] = max(fields["log_end"], fields["log_start"])
        return sign_statement(StreamStatement(**fields), load_signing_key(self.folder(region).receipt_key))

    # -- streams and records ---------------------------------------------------------------------------

    async def create(self, stream: str = STREAM, shards: int = 1, **more: Any) -> None:
        async with self.operator("us-east") as client:
            await client.create_stream(stream, shards=shards, **more)
            await client.put_rights(str(self.bridge_id), [f"bridge-read {stream}"])

    async def publish(self, payloads: list[bytes], stream: str = STREAM, batch: int = 50) -> None:
        async with self.operator("us-east") as client:
            publisher = client.stream(stream)
            for at in range(0, len(payloads), batch):
                await asyncio.gather(*(publisher.publish(payload) for payload in payloads[at : at + batch]))

    async def describe(self, region: str, stream: str = STREAM) -> StreamState:
        async with self.operator(region) as client:
            return await client.describe_stream(stream)

    async def arrived(self, stream: str = STREAM) -> int:
        """Records in the destination's stream, over all shards; 0 where there is none yet."""
        node = self.nodes["eu-west"]
        hosted = node.broker.streams.get(StreamName.parse(stream))
        return 0 if hosted is None else sum(shard.high_watermark for shard in hosted.serving)

    async def read(self, region: str, count: int, stream: str = STREAM) -> list[felix.Record]:
        """The first `count` records, over all shards."""
        found: list[felix.Record] = []
        if not count:
            return found
        async with self.operator(region) as client, asyncio.timeout(WAIT_S):
            async for record in client.stream(stream).subscribe(start="earliest"):
                found.append(record)
                if len(found) == count:
                    break
        return found

    # -- the bridge ------------------------------------------------------------------------------------

    @property
    def bridge_id(self) -> SpiffeId:
        return SpiffeId("us-east", "acme", "bridge", BRIDGE)

    def bridge_config(self, **changes: Any) -> BridgeConfig:
        config = BridgeConfig(
            name=BRIDGE,
            source="us-east",
            mesh="acme",
            source_addresses=self.first_addresses("us-east"),
            destinations=(DestinationConfig(region="eu-west", addresses=self.addresses("eu-west")),),
        )
        return msgspec.structs.replace(config, **changes)

    @asynccontextmanager
    async def agent(self, runtime: Runtime = REAL, **changes: Any) -> AsyncIterator[Agent]:
        agent = await Agent.start(self.bridge_config(**changes), self.us.root, runtime=runtime)
        try:
            yield agent
        finally:
            await agent.stop()

    def write_config(self, name: str = BRIDGE) -> Path:
        """A bridge.yaml for an agent in another process."""
        path = self.us.root / f"{name}.yaml"
        path.write_text(
            f"name: {name}\nmesh: acme\nsource: us-east\n"
            f"source_addresses: {list(self.first_addresses('us-east'))}\n"
            f"destinations:\n  - region: eu-west\n    addresses: {list(self.addresses('eu-west'))}\n"
        )
        return path

    async def child(self, failpoint: str = "", name: str = BRIDGE) -> asyncio.subprocess.Process:
        """An agent in a process of its own. End it by closing its standard input, or let its failpoint kill it."""
        return await asyncio.create_subprocess_exec(
            *warm_script(Path(__file__).parent / "bridge" / "agent_child.py", str(self.write_config(name))),
            env={**os.environ, "FELIX_FAILPOINT": failpoint, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def crossed(self, count: int, stream: str = STREAM) -> None:
        """Wait until so many records are at the destination."""

        async def found() -> bool:
            return await self.arrived(stream) >= count

        await until(found, f"{count} records at the destination")

    def numbers(self, records: list[felix.Record]) -> list[int]:
        """The flight numbers of records, in order."""
        return [json.loads(bytes(record.payload))["flight"] for record in records]

    # -- the two logs ----------------------------------------------------------------------------------

    @property
    def trust(self) -> Trust:
        return Trust.of(self.bundle(region) for region in ("us-east", "eu-west"))

    @property
    def egress_folder(self) -> Path:
        return self.us.root / "bridges" / BRIDGE / "egress"

    @property
    def ingress_folder(self) -> Path:
        return self.eu.root / "data" / "audit"

    def log_files(self, folder: Path) -> Folder:
        """An audit log's files."""
        return Folder(folder)

    def verify_egress(self, cosignatures_min: int = 0) -> Report:
        return verify_log(
            self.log_files(self.egress_folder),
            self.trust,
            origin=egress_origin("us-east", "acme", BRIDGE),
            cosignatures_min=cosignatures_min,
        )

    def verify_ingress(self, cosignatures_min: int = 0) -> Report:
        return verify_log(
            self.log_files(self.ingress_folder),
            self.trust,
            origin=region_origin("eu-west", "acme"),
            cosignatures_min=cosignatures_min,
        )

    def leaves(self, folder: Path, *kinds: Kind) -> list[Leaf]:
        """The log's leaves of these kinds; what its checkpoint covers."""
        files = self.log_files(folder)
        note = files.read("checkpoint")
        size = int(note.split(b"\n", 2)[1]) if note else 0
        found = [decode_leaf(data) for _, data in read_entries(files, 0, size, size)]
        return [leaf for leaf in found if not kinds or leaf.header.kind in kinds]

    def headers(self, folder: Path, *kinds: Kind) -> list[Header]:
        return [leaf.header for leaf in self.leaves(folder, *kinds)]

    def reconcile(self) -> int:
        """Egress INTENT entries equal ingress ACK entries, byte for byte and in order; returns the records."""
        egress = self.entries(self.egress_folder, Kind.INTENT)
        ingress = self.entries(self.ingress_folder, Kind.ACK)
        assert egress == ingress
        return sum(len(entries) for entries in egress.values())

    def entries(self, folder: Path, kind: Kind) -> dict[tuple[str, int, bytes], list[bytes]]:
        found: dict[tuple[str, int, bytes], list[bytes]] = {}
        for leaf in self.leaves(folder, kind):
            key = (leaf.header.stream, leaf.header.shard, leaf.header.incarnation)
            held = found.setdefault(key, [])
            held += [leaf.entries[at : at + 68] for at in range(0, len(leaf.entries), 68)]
        return found


@asynccontextmanager
async def two_regions(home: Path) -> AsyncIterator[Mesh]:
    """Both brokers up, policies in force."""
    mesh = Mesh.make(home)
    try:
        await mesh.start("us-east")
        await mesh.start("eu-west")
        await mesh.enact_policies()
        yield mesh
    finally:
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
