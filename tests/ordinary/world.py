"""Three regions and the bridges between them, driven by random sequences of what operators do. Real brokers and agents
in this process, over loopback; real files.

A sequence is drawn from a seed: the same seed draws the same operations. What the brokers and agents do meanwhile is theirs,
so a sequence played again may interleave otherwise. Whatever a region refuses is an answer, not a failure: what counts is
that the logs verify and agree when the sequence is over (`ordinary.evidence`).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import msgspec
from bridge_mesh import until
from ordinary.evidence import Envelope
from ports import claim_port
from region_home import running

import felix
from audit.origin import Origin, egress_origin, region_origin
from audit.trust import Trust
from bridge.agent import Agent
from bridge.config import BridgeConfig, DestinationConfig
from felix.address import Address
from felix.client import RegionClient
from felix.errors import FelixError
from felix.identity_file import load_identity
from felix.messages import ListDocuments, PutDocument
from felix.profile import Profile
from felix.runtime.real import now_ms
from keys.bundle import RegionBundle, decode_bundle
from keys.key_file import load_signing_key
from policy.approval import Document, sign_approval
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
from policy.residency import ResidencyPolicy, parse_policy, sign_policy
from policy.signed import SignedDocument
from policy.terms import Basis, GrantTerms
from policy.transform import build_spec
from policy.truncation import Truncation
from region.bootstrap import found_region, issue_identity, trust_region
from region.config import load_config
from region.folder import RegionFolder
from region.node import Node

STREAMS: Final = ("acme/ops/departures", "acme/ops/departures", "acme/ops/departures", "acme/ops/crew")
"""Few, so that operations meet; one may stand here several times."""
NO_STREAM: Final = "acme/ops/none"
COPIES: Final = ("", "", "acme/ops/copy")
"""Under which name a granted stream arrives; empty: its own."""
APPROVERS: Final = ("dpo", "ciso")
"""Who may approve in each region."""
PLACES: Final = (("US", "US"), ("IE", "EU"), ("IN", "IN"))
"""Country and jurisdiction of the regions, in their order."""
STEPS: Final = 30
SETTLE_S: Final = 5.0
"""How long a sequence waits, at most, for its links to stand still."""
QUIET_S: Final = 0.3
BEGIN_S: Final = 300.0
"""How long a session may take to stand, and then the first record to cross; half a second on a quiet machine, and more than a minute on one with a
load of 60."""

_POLICY: Final = """
version: 1
name: {region}
revision: {revision}
region: {region}
regions:
{regions}
classes:
  operational: {{description: Flights., streams: [acme/ops/*]}}
exports:
  - name: out
    classes: [operational]
    to: {{regions: [{others}]}}
    bases: [scc]
    keys: [pseudonymize, keep]
    lifetime: 90d
    approvals: {leaving}
    approvers: [{named}]
    onward: true
imports:
  - name: in
    classes: [operational]
    from: {{regions: [{others}]}}
    bases: [scc]
    keys: [pseudonymize, keep]
    lifetime: 90d
    onward: true
    approvals: {arriving}
    approvers: [{named}]
deny:
  - {{name: stays, streams: [{stays}], because: It stays where it is.}}
"""


@dataclass
class Granted:
    """A grant that somebody made, and how far its paperwork got."""

    body: ExportGrant
    export: SignedDocument
    accepted: bool = False
    approved: set[tuple[str, str]] = field(default_factory=set)
    """Who approved it, and in which region."""
    revoked: bool = False
    paused: set[str] = field(default_factory=set)

    @property
    def terms(self) -> GrantTerms:
        return self.body.terms


class Asked(NamedTuple):
    """What a region's policy asks for: approvals of what leaves and of what arrives; `named`: whose count, all where it is empty; `stays`: what does not cross."""

    leaving: int = 1
    arriving: int = 0
    named: tuple[str, ...] = ()
    stays: str = NO_STREAM

    def approvers(self, number: int) -> tuple[str, ...]:
        """The first of those who count."""
        return (self.named or APPROVERS)[:number]


class World:
    """One mesh of three regions. `number` makes its names its own, so that one report can show many."""

    def __init__(self, home: Path, number: int) -> None:
        self.home, self.number = home, number
        self.regions = [f"us-{number}", f"eu-{number}", f"ap-{number}"]
        """Those that run. The first two are sources; where each lies is in `PLACES`."""
        self.bridges = dict.fromkeys(self.regions[:2], "carrier")
        """The bridge of each source, to both other regions."""
        self.ended: dict[str, Path] = {}
        """Logs that go on no more, of bridges and regions that others took the place of."""
        self.random = Random(number)
        self.history: list[str] = []
        self.doing = ""
        """The operation that is under way."""
        self.counts: Counter[str] = Counter()
        self.grants: list[Granted] = []
        self.denied: list[tuple[str, str]] = []
        self.nodes: dict[str, Node] = {}
        self.agents: dict[str, Agent] = {}
        self.published = 0
        self._clients: dict[str, RegionClient] = {}
        self._ports: dict[str, int] = {}
        self._stack: dict[str, Any] = {}
        self._sequence = 0
        self.backups: dict[str, Path] = {}
        """Cold copies, by the region or the egress log that they are of."""
        self.copies: dict[str, Path] = {}
        """What `felix audit copy` made, by the log that it is of."""
        self.lost: set[Envelope] = set()
        """What stood in the part of a log that is gone for good: the others' logs show it, and this one does not."""
        self.forked: set[str] = set()
        """Origins whose older copy others may have cosigned further, before the newest one was put back."""
        self.alarms = 0
        """Links that were seen to stand still because a log was rolled back."""
        self.wrong: list[str] = []
        """What was seen during the sequence that must not be."""
        self._revision = 0
        self._asks: dict[str, Asked] = {}
        """By region: what its newest policy asks for."""

    # -- regions ---------------------------------------------------------------------------------------

    def folder(self, region: str) -> RegionFolder:
        return RegionFolder.of(region, self.home)

    def bundle(self, region: str) -> RegionBundle:
        return decode_bundle(self.folder(region).bundle.read_bytes()).bundle

    @property
    def names(self) -> list[str]:
        """Of all regions that there were."""
        return [path.parent.name for path in self.home.glob("*/bundle.json")]

    @property
    def sources(self) -> list[str]:
        return self.regions[:2]

    def others(self, region: str) -> list[str]:
        return [other for other in self.regions if other != region]

    def found(self, region: str) -> None:
        folder = self.folder(region)
        country, jurisdiction = PLACES[self.regions.index(region)]
        found_region(
            folder, region=region, mesh="acme", country=country, jurisdiction=jurisdiction, entity=f"Acme {country}",
            listen=Address("127.0.0.1", 0), health=None, now_ms=now_ms(),
        )  # fmt: skip
        for name in APPROVERS:
            self.issue(region, "approver", name)
        if region in self.sources:
            self.issue(region, "bridge", self.bridges[region])

    def issue(self, region: str, kind: str, name: str) -> None:
        folder = self.folder(region)
        issue_identity(folder, load_config(folder.config), kind, name, now_ms())

    async def exchange_bundles(self) -> None:
        """Each region's bundle goes to the others, as with `felix region trust`."""
        for region in self.regions:
            for other in self.others(region):
                file = self.folder(other).bundle.read_bytes()
                pin = trust_region(self.folder(region), decode_bundle(file), now_ms())
                assert pin is not None
                if self.is_up(region):
                    await (await self.client(region)).request(PutDocument("pin", pin.encode()))

    def write_policy(self, region: str) -> ResidencyPolicy:
        """A newer one than all before."""
        self._revision += 1
        asked = self._asks.setdefault(region, Asked())
        countries = "\n".join(
            f"  {name}: {{country: {at}, jurisdiction: {of}}}"
            for name, (at, of) in zip(self.regions, PLACES, strict=True)
        )
        text = _POLICY.format(
            region=region, regions=countries, others=", ".join(self.others(region)), revision=self._revision,
            leaving=asked.leaving, arriving=asked.arriving, named=", ".join(asked.named), stays=asked.stays,
        )  # fmt: skip
        return parse_policy(text, region)

    async def apply_policies(self) -> None:
        for region in self.regions:
            await self.apply_policy(region)

    async def apply_policy(self, region: str) -> None:
        await self.put(region, "policy", sign_policy(self.write_policy(region), self.key(region)))

    async def policy(self, region: str) -> ResidencyPolicy:
        """The one in force, as commands ask the region for it."""
        answer = await (await self.client(region)).request(ListDocuments("policy"))
        ((_, body),) = answer.documents.items()
        return parse_policy(SignedDocument.parse(body).body.decode(), region)

    @property
    def alone(self) -> list[str]:
        """The regions of one broker."""
        return self.regions

    def addresses(self, region: str) -> tuple[str, ...]:
        """Where its brokers are."""
        return (f"127.0.0.1:{self._ports[region]}",)

    def is_up(self, region: str) -> bool:
        return region in self._stack

    async def start(self, region: str) -> None:
        if region not in self._ports:
            self._ports[region] = claim_port()
        context = running(self.folder(region), listen=Address("127.0.0.1", self._ports[region]))
        self.nodes[region] = await context.__aenter__()
        self._stack[region] = context

    async def stop(self, region: str) -> None:
        await self.leave(region)
        context = self._stack.pop(region, None)
        if context is not None:
            await context.__aexit__(None, None, None)

    async def leave(self, region: str) -> None:
        """End the operator's session."""
        client = self._clients.pop(region, None)
        if client is not None:
            await client.close()

    async def start_agent(self, region: str) -> None:
        config = BridgeConfig(
            name=self.bridges[region], source=region, mesh="acme", source_addresses=self.addresses(region),
            destinations=tuple(
                DestinationConfig(region=other, addresses=self.addresses(other))
                for other in self.others(region)
            ),
        )  # fmt: skip
        self.agents[region] = await Agent.start(config, self.folder(region).root)

    async def start_agents(self) -> None:
        for region in self.sources:
            await self.start_agent(region)

    async def stop_agents(self) -> None:
        for region in self.sources:
            await self.stop_agent(region)

    async def admit_bridge(self, region: str) -> None:
        """The rights of the source's bridge to what may be granted."""
        streams = sorted({*STREAMS, *filter(None, COPIES)})
        client = await self.client(region)
        await client.put_rights(self.bridge_id(region), [f"bridge-read {stream}" for stream in streams])

    def bridge_id(self, source: str) -> str:
        return f"spiffe://{source}.acme/bridge/{self.bridges[source]}"

    async def stop_agent(self, region: str) -> None:
        agent = self.agents.pop(region, None)
        if agent is not None:
            await agent.stop()

    async def client(self, region: str) -> RegionClient:
        """An operator's session that stands as long as the broker does."""
        held = self._clients.get(region)
        if held is None:
            profile = Profile(
                region=region, mesh="acme", addresses=self.addresses(region),
                authority=self.bundle(region).root_pem.encode(),
                identity=load_identity(self.folder(region).identity("operator")), server_name=f"{region}.acme",
            )  # fmt: skip
            held = self._clients[region] = felix.connect(profile=profile, connect_timeout_s=BEGIN_S)
            await held.__aenter__()
        return held

    async def put(self, region: str, kind: str, document: Document) -> None:
        client = await self.client(region)
        await client.request(PutDocument(kind, document.encode_file()))

    def key(self, region: str) -> Any:
        return load_signing_key(self.folder(region).policy_key).private_key

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    # -- a whole sequence ------------------------------------------------------------------------------

    async def play(self, operations: Mapping[Operation, float], steps: int = STEPS) -> None:
        """Found the mesh, take so many steps of these operations, by their weights, let it settle, stop it."""
        try:
            for region in self.regions:
                await asyncio.to_thread(self.found, region)
            await self.exchange_bundles()
            for region in self.regions:
                await self.start(region)
            await self.apply_policies()
            for region in self.sources:
                await self.admit_bridge(region)
                await self.start_agent(region)
            await self.begin()
            for _ in range(steps):
                await self.step(operations)
            await self.settle(SETTLE_S)
            await self.look_back()
        finally:
            await self.stop_agents()
            for region in self.regions:
                await self.stop(region)

    async def look_back(self) -> None:
        """What must hold while all still runs; `wrong` tells what does not."""

    async def begin(self) -> None:
        """One stream that crosses, so that every sequence has something to break."""
        source = self.random.choice(self.sources)
        await (await self.client(source)).create_stream(STREAMS[0], shards=1)
        target = self.random.choice(self.others(source))
        said = await self._allow(
            source,
            target,
            STREAMS[0],
            "",
            transform=build_spec(pseudonymize=["tailnum"]),
            expires=now_ms() + 3_600_000,
        )
        grant = self.grants[0]
        if not grant.accepted:
            said += f"; {await self._accept(grant)}; {await self._approve(grant, source, APPROVERS[0])}"
        self.history.append(f"begin: {said}")
        publisher = (await self.client(source)).stream(STREAMS[0])
        await publisher.publish(b'{"flight":0,"carrier":"UA","tailnum":"N1"}', key=b"first")
        agent = self.agents[source]
        await until(lambda: any(link.crossed for link in agent.links()), "a first crossing", BEGIN_S)

    async def step(self, operations: Mapping[Operation, float]) -> None:
        """One operation that applies now; a region's refusal is noted."""
        choice, weights = zip(*operations.items(), strict=True)
        while True:
            (operation,) = self.random.choices(choice, weights)
            self.doing = operation.__name__
            try:
                said = await operation(self)
            except FelixError as error:
                said = f"refused: {error.sentence}"
            if said is None:
                continue
            self.counts[self.doing] += 1
            self.history.append(f"{self.doing}: {said}")
            self.doing = ""
            return

    async def settle(self, most_s: float = 1.5) -> str:
        """Wait until links that can run have caught up; no longer than `most_s`."""
        loop = asyncio.get_running_loop()
        end, quiet_since, before = loop.time() + most_s, loop.time(), None
        while loop.time() < end:
            now = [
                (link.grant, link.stream, link.shard, link.state, link.position, link.lag_records)
                for agent in self.agents.values()
                for link in agent.links()
            ]
            if now != before:
                before, quiet_since = now, loop.time()
            moving = any(state in ("opening", "active") and lag for *_, state, _, lag in now)
            if not moving and loop.time() - quiet_since >= QUIET_S:
                break
            await asyncio.sleep(0.05)
        return f"{len(self.history)} operations so far"

    # -- operations: each returns what it did, or None where there is nothing to do it to ----------------

    def _pick_grant(self, condition: Callable[[Granted], bool]) -> Granted | None:
        fitting = [
            grant
            for grant in self.grants
            if {grant.terms.from_region, grant.terms.to_region} <= {*self.regions} and condition(grant)
        ]
        return self.random.choice(fitting) if fitting else None

    async def create(self) -> str | None:
        region, stream = self.random.choice(self.sources), self.random.choice(STREAMS)
        await (await self.client(region)).create_stream(stream, shards=self.random.choice((1, 1, 2)))
        return f"{stream} in {region}"

    async def delete(self) -> str | None:
        """A source stream or one that arrived; what is granted again is made again, by its next record or `create`."""
        region = self.random.choice(self.regions)
        client = await self.client(region)
        held = [each.stream async for each in client.list_streams() if each.stream.startswith("acme/ops/")]
        if not held:
            return None
        stream = self.random.choice(sorted(held))
        await self.forget(region, stream)
        return f"{stream} in {region}"

    async def forget(self, region: str, stream: str) -> None:
        """Delete it."""
        await (await self.client(region)).delete_stream(stream)

    async def publish(self) -> str | None:
        region = self.random.choice(self.sources)
        client = await self.client(region)
        held = [each.stream async for each in client.list_streams() if each.stream in STREAMS]
        if not held:
            return None
        stream, count = self.random.choice(sorted(held)), self.random.randint(1, 40)
        records = self.draw_records(count)
        batch = self.random.choice((3, 40))
        await self.publish_all(region, stream, [records[at : at + batch] for at in range(0, count, batch)])
        return f"{count} records to {stream} in {region}"

    def draw_records(self, count: int) -> list[bytes]:
        """Each with a flight of its own; some lack what most grants pseudonymize."""
        records = []
        for _ in range(count):
            self.published += 1
            record = {"flight": self.published, "carrier": self.random.choice(("UA", "DL")), "tailnum": "N1"}
            if self.random.random() < 0.1:
                del record["tailnum"]
            records.append(json.dumps(record).encode())
        return records

    async def publish_all(self, region: str, stream: str, groups: list[list[bytes]]) -> None:
        """Group after group, the records of one at once."""
        publisher = (await self.client(region)).stream(stream)
        for group in groups:
            await asyncio.gather(*(publisher.publish(record, key=record[:12]) for record in group))

    async def allow(self) -> str | None:
        source = self.random.choice(self.sources)
        target, stream = self.random.choice(self.others(source)), self.random.choice(STREAMS)
        return await self._allow(source, target, stream, self.random.choice(COPIES))

    async def _allow(self, source: str, target: str, stream: str, arrives: str, **more: Any) -> str:
        now = now_ms()
        lasts_ms = self.random.choice((3_600_000,) * 5 + (3_000,))
        terms = GrantTerms(**{
            "stream": stream, "from_region": source, "to_region": target, "destination_stream": arrives,
            "bridge": self.bridge_id(source), "purpose": f"analytics {len(self.grants)}", "basis": Basis.SCC,
            "reference": "SCC-2026-014", "exporter": "Acme US", "importer": "Acme", "owner": "operations",
            "drawn_up_by": f"spiffe://{source}.acme/operator/operator", "not_before": now - 1_000,
            "expires": now + lasts_ms,
            "transform": build_spec(
                pseudonymize=self.random.choice(([], ["tailnum"], ["tailnum"], ["tailnumber"])),
                filter_=self.random.choice(("", "", 'carrier == "UA"')),
            ),
            "onward": self.random.random() < 0.5,
            **more,
        })  # fmt: skip
        export = sign_export(terms, await self.policy(source), self.key(source), now)
        await self.put(source, "export", export)
        body = open_export(export, {source: self.bundle(source).policy_keys})
        grant = Granted(body, export)
        self.grants.append(grant)
        said = f"{body.grant}: {stream} from {source} to {target} as {arrives or stream}, for {lasts_ms} ms"
        if self.random.random() < 0.8:
            said += f"; {await self._accept(grant)}"
            leaving, arriving = self._asks[source], self._asks[target]
            for name in leaving.approvers(leaving.leaving):
                said += f"; {await self._approve(grant, source, name)}"
            for name in arriving.approvers(arriving.arriving):
                said += f"; {await self._approve(grant, target, name)}"
        return said

    async def accept(self) -> str | None:
        grant = self._pick_grant(lambda grant: not grant.accepted)
        return None if grant is None else await self._accept(grant)

    async def _accept(self, grant: Granted) -> str:
        to, source = grant.terms.to_region, grant.terms.from_region
        trusted = {source: self.bundle(source).policy_keys}
        by = f"spiffe://{to}.acme/operator/operator"
        accepted = sign_import(grant.export, await self.policy(to), self.key(to), trusted, by, now_ms())
        await self.put(to, "export", grant.export)
        await self.put(to, "import", accepted)
        grant.accepted = True
        return f"accepted in {to}"

    async def accept_again(self) -> str | None:
        """The destination's half signed once more, under the policy that its region has by now."""
        grant = self._pick_grant(lambda grant: grant.accepted and not grant.revoked)
        return None if grant is None else f"{grant.body.grant} {await self._accept(grant)}"

    async def allow_again(self) -> str | None:
        """The source's half signed once more: the same terms, the same grant, under the policy of by now."""
        grant = self._pick_grant(lambda grant: not grant.revoked)
        if grant is None:
            return None
        source, target = grant.terms.from_region, grant.terms.to_region
        export = sign_export(grant.terms, await self.policy(source), self.key(source), now_ms())
        await self.put(source, "export", export)
        grant.export = export
        if grant.accepted and self.random.random() < 0.5:
            await self.put(target, "export", export)
        return f"{grant.body.grant} signed in {source}"

    async def change_policy(self) -> str | None:
        """Another number of approvals, of what leaves or of what arrives, and other people whose approvals count; and now and then a stream that may not cross any more, or may again."""
        region, named = (
            self.random.choice(self.regions),
            self.random.choice(((), (), *((n,) for n in APPROVERS))),
        )
        leaving = 1 if named else self.random.choice((1, 1, 2))
        stays = self.random.choice((NO_STREAM, NO_STREAM, *STREAMS, *filter(None, COPIES)))
        self._asks[region] = Asked(leaving, self.random.choice((0, 0, 1)), named, stays)
        await self.apply_policy(region)
        return f"{region} asks for {self._asks[region]}"

    async def approve(self) -> str | None:
        region, name = self.random.choice(self.regions), self.random.choice(APPROVERS)
        grant = self._pick_grant(
            lambda grant: (
                region in (grant.terms.from_region, grant.terms.to_region)
                and (region, name) not in grant.approved
            )
        )
        return None if grant is None else await self._approve(grant, region, name)

    async def _approve(self, grant: Granted, region: str, name: str) -> str:
        who = load_identity(self.folder(region).identity(name))
        await self.put(region, "approval", sign_approval(bytes.fromhex(grant.body.terms_hash), who, now_ms()))
        grant.approved.add((region, name))
        return f"{grant.body.grant} approved by {name} in {region}"

    async def renew(self) -> str | None:
        """The same stream under the same name there, again: after the old one ended, or beside it."""
        grant = self._pick_grant(lambda grant: grant.accepted)
        if grant is None:
            return None
        terms = grant.terms
        return await self._allow(terms.from_region, terms.to_region, terms.stream, terms.destination_stream)

    async def _stand(
        self, grant: Granted, action: StandingAction, region: str, truncation: Truncation | msgspec.UnsetType = msgspec.UNSET
    ) -> str:  # fmt: skip
        standing = Standing(
            grant=grant.body.grant, action=action, region=region, sequence=self.next_sequence(), at=now_ms(),
            by=f"operator of {region}", reason="a sequence", truncation=truncation,
        )  # fmt: skip
        await self.put(region, "standing", sign_standing(standing, self.key(region)))
        return f"{grant.body.grant} by {region}"

    def _end(self, grant: Granted) -> str:
        return self.random.choice((grant.terms.from_region, grant.terms.to_region))

    async def pause(self) -> str | None:
        grant = self._pick_grant(lambda grant: grant.accepted)
        if grant is None:
            return None
        region = self._end(grant)
        grant.paused.add(region)
        return await self._stand(grant, StandingAction.PAUSE, region)

    async def resume(self) -> str | None:
        grant = self._pick_grant(lambda grant: bool(grant.paused))
        if grant is None:
            return None
        return await self._stand(grant, StandingAction.RESUME, grant.paused.pop())

    async def revoke(self) -> str | None:
        grant = self._pick_grant(lambda grant: grant.accepted and not grant.revoked)
        if grant is None:
            return None
        grant.revoked = True
        return await self._stand(grant, StandingAction.REVOKE, self._end(grant))

    async def accept_truncation(self) -> str | None:
        """What `felix bridge resume GRANT --accept-truncation` signs, for a link that stands still for it."""
        for region, agent in sorted(self.agents.items()):
            for link in agent.links():
                grant = self._pick_grant(lambda grant, wanted=link.grant: grant.body.grant == wanted)  # type: ignore[misc]
                if link.cut is None or grant is None:
                    continue
                cut = Truncation(
                    stream=link.stream, shard=link.shard, incarnation=link.cut.incarnation.hex(), epoch=link.cut.epoch,
                    offset=link.cut.offset,
                )  # fmt: skip
                return await self._stand(grant, StandingAction.ACCEPT_TRUNCATION, region, cut)
        return None

    async def resend(self) -> str | None:
        """What `felix bridge resend GRANT --from OFFSET` signs."""
        grant = self._pick_grant(lambda grant: grant.accepted and not grant.revoked)
        if grant is None:
            return None
        region, stream = grant.terms.from_region, grant.terms.stream
        state = await (await self.client(region)).describe_stream(stream)
        shard = self.random.randrange(state.shards)
        live = await self.live_incarnation(region, grant.body.grant, stream, shard, state.incarnation)
        first = self.random.choice((0, 0, self.random.randint(0, max(0, state.state[shard].high_watermark))))
        back = Truncation(
            stream=stream, shard=shard, incarnation=live.hex(), epoch=0, offset=max(first, state.state[shard].log_start),
        )  # fmt: skip
        return f"from {first}: {await self._stand(grant, StandingAction.RESEND, region, back)}"

    async def live_incarnation(
        self, region: str, grant: str, stream: str, shard: int, incarnation: bytes
    ) -> bytes:
        """What a shard crosses under now."""
        book = self.nodes[region].services.governance.book
        return book.live_incarnation(grant, stream, shard, incarnation).incarnation

    async def deny(self) -> str | None:
        region, stream = self.random.choice(self.regions), self.random.choice(STREAMS)
        self.denied.append((region, stream))
        return await self._deny(region, stream, lifted=False)

    async def lift(self) -> str | None:
        standing = [each for each in self.denied if each[0] in self.regions]
        if not standing:
            return None
        lifted = self.random.choice(standing)
        self.denied.remove(lifted)
        return await self._deny(*lifted, lifted=True)

    async def _deny(self, region: str, stream: str, *, lifted: bool) -> str:
        entry = DenyEntry(
            streams=stream, peer="*", region=region, sequence=self.next_sequence(), at=now_ms(),
            by=f"operator of {region}", lifted=lifted,
        )  # fmt: skip
        await self.put(region, "deny", sign_deny(entry, self.key(region)))
        return f"{stream} by {region}"

    async def restart_broker(self) -> str | None:
        if not self.alone:
            return None
        region = self.random.choice(self.alone)
        await self.stop(region)
        await self.start(region)
        return region

    async def restart_agent(self) -> str | None:
        region = self.random.choice(self.sources)
        await self.stop_agent(region)
        await self.start_agent(region)
        return region

    async def renew_identity(self) -> str | None:
        region = self.random.choice(self.sources)
        await self.stop_agent(region)
        await asyncio.to_thread(self.issue, region, "bridge", self.bridges[region])
        if self.random.random() < 0.8:
            await self.exchange_bundles()
        await self.start_agent(region)
        return region

    def keep_logs_alone(self) -> None:
        """Delete what takes much room and no report reads, once all is judged."""

    def findings_of_its_own(self) -> list[str]:
        """What does not hold of what this kind of mesh has beside its logs, once all is stopped."""
        return []

    # -- logs ------------------------------------------------------------------------------------------

    @property
    def trust(self) -> Trust:
        return Trust.of(self.bundle(region) for region in self.names)

    def logs(self) -> dict[str, Path]:
        """Every log that was written, by its origin."""
        found = {region_origin(region, "acme"): self.audit_log(region) for region in self.regions}
        found |= {
            egress_origin(region, "acme", self.bridges[region]): self.egress_log(region)
            for region in self.sources
        }
        return {
            origin: path for origin, path in (self.ended | found).items() if (path / "checkpoint").exists()
        }

    def audit_log(self, region: str) -> Path:
        return self.folder(region).root / "data" / "audit"

    def egress_log(self, source: str) -> Path:
        return self.folder(source).root / "bridges" / self.bridges[source] / "egress"

    def keys_begin(self, origin: str) -> int:
        """From how many leaves on the log's keys of now sign: a shorter copy is none that its writer opens."""
        keys = self.bundle(Origin.parse(origin).region).audit_keys
        return max((key.from_size for key in keys if key.name == origin), default=0)

    def notes_of(self, origin: str, region: str = "*") -> list[bytes]:
        """The checkpoints of a log that regions, or one of them, remember to have cosigned."""
        found = (
            path
            for folder in ("data", "data/*")
            for path in self.home.glob(f"{region}/{folder}/witness/*.checkpoint")
        )
        notes = [path.read_bytes() for path in found]
        return [note for note in notes if note.startswith(origin.encode() + b"\n")]


Operation = Callable[[World], Awaitable[str | None]]
"""Says what it did, or None where there is nothing to do it to."""
