"""The mesh with regions of several brokers among its three, and what operators do to those: brokers stopped, killed, drained, added and taken away,
folders lost, copies made and dropped, keys rotated, the store put back, a region of one broker turned into one of several.

Beside the logs it is counted what was acknowledged and what arrived: of a stream of such a region every acknowledged record is there, once, unless the
operator gave it up, and nothing arrived that no leaf tells of.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bridge_mesh import until
from e2e.command_mesh import felix_command
from ordinary.cluster import BROKERS, Cluster, free_address
from ordinary.evidence import read_leaves, size_of
from ordinary.world import STREAMS, World

from audit.leaf import Kind
from audit.origin import region_origin
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.verify import BEFORE_CHANGE, verify_log
from cli.conversion import convert, finish
from cli.several import ETCD_FOLDER, free_etcd, name_brokers
from felix.errors import FelixError, RequestError, UnavailableError
from felix.messages import ListDocuments, StreamState
from felix.page import pages
from felix.peer import TrustBundle
from policy.approval import Document, parse_document
from policy.grant import GrantBook
from region.config import load_config

MESHES: Final = ((0,), (1,), (2,), (0, 1), (0, 2))
"""Which regions have several brokers from the beginning, by their places. Each costs three processes and an etcd."""
WAIT_S: Final = 30.0
"""How long an operator waits for copies, or for an acknowledgement, before he does something else."""
END_S: Final = 60.0
"""The same at the end, where all brokers run."""


class Held(NamedTuple):
    """A stream that was published to, as it was made."""

    region: str
    stream: str
    incarnation: bytes


class Several(World):
    """One mesh of three regions, of which some have several brokers."""

    def __init__(self, home: Path, number: int) -> None:
        super().__init__(home, number)
        self.begin_with = self.random.choice(MESHES)
        self.clusters: dict[str, Cluster] = {}
        self.acknowledged: dict[Held, set[int]] = {}
        """Flights, by the stream that has them."""
        self.given_up: set[tuple[str, str]] = set()
        """Streams of which an operator accepted a loss, or that were deleted, by region and name: fewer records may be there."""
        self.arrived: dict[tuple[str, str], int] = {}
        """Records of streams that only bridges write to, when the agents had stopped."""
        self.with_log: dict[str, str] = {}
        """Of regions of before brokers copied the audit log: the broker that has it."""

    # -- regions ---------------------------------------------------------------------------------------

    @property
    def alone(self) -> list[str]:
        return [region for region in self.regions if region not in self.clusters]

    def found(self, region: str) -> None:
        super().found(region)
        if self.regions.index(region) in self.begin_with:
            cluster = self.clusters[region] = Cluster(self.folder(region))
            cluster.make()

    def addresses(self, region: str) -> tuple[str, ...]:
        cluster = self.clusters.get(region)
        return super().addresses(region) if cluster is None else cluster.addresses

    def is_up(self, region: str) -> bool:
        cluster = self.clusters.get(region)
        return super().is_up(region) if cluster is None else bool(cluster.running)

    async def start(self, region: str) -> None:
        cluster = self.clusters.get(region)
        await (super().start(region) if cluster is None else cluster.start_all())

    async def stop(self, region: str) -> None:
        cluster = self.clusters.get(region)
        if cluster is None:
            await super().stop(region)
        else:
            await self.leave(region)
            await cluster.stop_all()

    async def put(self, region: str, kind: str, document: Document) -> None:
        """Asked again while the audit log is led anew, as an operator does: what was written is recognised."""

        async def is_put() -> bool:
            await super(Several, self).put(region, kind, document)
            return True

        if not await self.is_within(is_put, END_S):
            await super().put(region, kind, document)

    def pick(self, condition: Callable[[Cluster], Any] = lambda cluster: True) -> Cluster | None:
        """A region of several brokers of which this holds."""
        fitting = [cluster for _, cluster in sorted(self.clusters.items()) if condition(cluster)]
        return self.random.choice(fitting) if fitting else None

    async def is_within(self, condition: Callable[[], Awaitable[object]], seconds: float = WAIT_S) -> bool:
        """Whether it comes to hold. What is asked may be unavailable meanwhile."""

        async def holds() -> object:
            with suppress(UnavailableError):
                return await condition()
            return False

        try:
            await until(holds, "", seconds)
        except AssertionError:
            return False
        return True

    async def call_anew(self) -> None:
        """A region's addresses changed: agents and operators are told them."""
        for region in self.clusters:
            await self.leave(region)
        await self.stop_agents()
        await self.start_agents()

    # -- what else is counted --------------------------------------------------------------------------

    async def create(self) -> str | None:
        region, stream = self.random.choice(self.sources), self.random.choice(STREAMS)
        if region not in self.clusters:
            return await super().create()
        shards, copies = self.random.choice((1, 1, 2)), self.random.choice((0, 0, 0, 1, 2))
        await (await self.client(region)).create_stream(stream, shards=shards, replicas=copies)
        return f"{stream} in {region}, {copies or 'all'} copies"

    async def forget(self, region: str, stream: str) -> None:
        self.given_up.add((region, stream))
        await super().forget(region, stream)

    async def publish_all(self, region: str, stream: str, groups: list[list[bytes]]) -> None:
        client = await self.client(region)
        before = await client.describe_stream(stream)
        publisher, done = client.stream(stream), set[int]()

        async def publish(record: bytes) -> None:
            await publisher.publish(record, key=record[:12])
            done.add(_flight(record))

        try:
            async with asyncio.timeout(WAIT_S):
                for group in groups:
                    for failure in await asyncio.gather(*map(publish, group), return_exceptions=True):
                        if isinstance(failure, BaseException):
                            raise failure
        except TimeoutError:
            self.history.append(f"publish: {len(done)} were acknowledged within {WAIT_S:.0f} s")
        finally:
            await self._acknowledge(region, before, done)

    async def _acknowledge(self, region: str, before: StreamState, done: set[int]) -> None:
        self.acknowledged.setdefault(Held(region, before.stream, before.incarnation), set()).update(done)

    async def transact(self) -> str | None:
        """Records for two streams, or for one twice, as one transaction."""
        region = self.random.choice(self.sources)
        client = await self.client(region)
        held = sorted([each.stream async for each in client.list_streams() if each.stream in STREAMS])
        if not held:
            return None
        streams = [self.random.choice(held) for _ in range(2)]
        drawn = [self.draw_records(self.random.randint(1, 5)) for _ in streams]
        states = [await client.describe_stream(stream) for stream in streams]
        try:
            async with asyncio.timeout(WAIT_S), client.transaction(timeout_s=WAIT_S) as transaction:
                for stream, records in zip(streams, drawn, strict=True):
                    for record in records:
                        await transaction.publish(stream, record, key=record[:12])
        except TimeoutError:
            return f"{streams} in {region}: not committed within {WAIT_S:.0f} s"
        for state, records in zip(states, drawn, strict=True):
            await self._acknowledge(region, state, set(map(_flight, records)))
        return f"{sum(map(len, drawn))} records to {', '.join(streams)} in {region}"

    async def live_incarnation(
        self, region: str, grant: str, stream: str, shard: int, incarnation: bytes
    ) -> bytes:
        if region not in self.clusters:
            return await super().live_incarnation(region, grant, stream, shard, incarnation)
        client, documents = await self.client(region), list[Document]()
        for kind in ("export", "import", "approval", "standing", "deny"):
            asked = ListDocuments(kind)
            async for page in pages(client, asked, "documents", lambda page: max(page.documents)):
                documents += [parse_document(body) for body in page.documents.values()]
        bundles = {name: self.bundle(name) for name in self.names}
        book = GrantBook(
            documents,
            {name: bundle.policy_keys for name, bundle in bundles.items()},
            TrustBundle(bundle.anchor() for bundle in bundles.values()),
        )
        crossed = [
            link.incarnation
            for link in await client.list_links()
            if (link.stream, link.shard) == (stream, shard) and link.incarnation
        ]
        return book.incarnations(grant, stream, shard, incarnation, crossed)[-1].incarnation

    # -- the end ---------------------------------------------------------------------------------------

    async def look_back(self) -> None:
        """All brokers run again. Then each acknowledged record is there, and none twice; and what arrived is counted."""
        for cluster in self.clusters.values():
            for name in sorted(cluster.away):
                await cluster.start(name)
        await self.settle(5.0)
        await self.stop_agents()
        for region, cluster in sorted(self.clusters.items()):
            client = await self.client(region)
            if not await self.is_within(cluster.is_in_sync, END_S):
                self.history.append(f"end: not all copies of {region} are in sync")
            states = [each async for each in client.list_streams() if each.stream.startswith("acme/ops/")]
            for state in states:
                if (region, state.stream) in self.given_up:
                    continue
                wanted = self.acknowledged.get(Held(region, state.stream, state.incarnation), set())
                there = sum(each.high_watermark - each.log_start for each in state.state)
                await self._must_have(region, state.stream, wanted, there)
                if not self._is_written(region, state.stream):
                    self.arrived[region, state.stream] = sum(each.high_watermark for each in state.state)

    def _is_written(self, region: str, stream: str) -> bool:
        """Whether anybody but bridges may write to it."""
        return region in self.sources and stream in STREAMS

    async def _must_have(self, region: str, stream: str, wanted: set[int], there: int) -> None:
        """`there`: records in all, which are read, so that one that is twice is seen wherever it stands."""
        found: Counter[int] = Counter()
        missing = set(wanted)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                async with (await self.client(region)).stream(stream).subscribe(start="earliest") as records:
                    while missing or found.total() < there:
                        flight = _flight(bytes((await anext(records)).payload))
                        found[flight] += 1
                        missing.discard(flight)
        if missing:
            self.wrong.append(
                f"{len(missing)} of {len(wanted)} records are missing in {stream} of {region}, which acknowledged them: "
                f"{sorted(missing)[:20]}"
            )
        if found.total() < there:
            self.wrong.append(f"{found.total()} of {there} records can be read in {stream} of {region}")
        if self._is_written(region, stream):
            twice = sorted(flight for flight, count in found.items() if count > 1)
            arrives = any(
                (grant.terms.to_region, grant.terms.destination_stream or grant.terms.stream)
                == (region, stream)
                for grant in self.grants
            )
            if twice and not arrives:
                self.wrong.append(f"records are twice in {stream} of {region}: {twice[:20]}")

    def keep_logs_alone(self) -> None:
        for cluster in self.clusters.values():
            data = cluster.folder.root / "data"
            for folder in (cluster.folder.root / ETCD_FOLDER, *data.glob("*/streams")):
                shutil.rmtree(folder)

    def findings_of_its_own(self) -> list[str]:
        return [*self._copies(), *self._arrivals()]

    def _copies(self) -> list[str]:
        """Every broker's copy of an audit log verifies, and is the beginning of the longest one."""
        found = []
        for region in self.clusters:
            origin, longest = region_origin(region, "acme"), self.audit_log(region)
            for path in self._logs_of(region):
                if path == longest:
                    continue
                report = verify_log(Folder(path), self.trust, origin=origin, cosignatures_min=0)
                # A copy that a broker left behind is of before, and says so.
                found += [
                    f"{path}: step {each.step}, leaf {each.leaf}: {each.sentence}"
                    for each in report.findings
                    if each.name != BEFORE_CHANGE
                ]
                size = size_of(path)
                if _leaves(path, size) != _leaves(longest, size):
                    found.append(f"{path} and {longest} are two histories")
        return found

    def _arrivals(self) -> list[str]:
        found = []
        for region in self.clusters:
            told: Counter[str] = Counter()
            for leaf in read_leaves(self.audit_log(region)):
                header = leaf.header
                if header.kind is Kind.ACK and header.destination_region == region:
                    told[header.destination_stream or header.stream] += header.records
            found += [
                f"{stream} of {region} has {count} records, and leaves tell of {told[stream]}"
                for (where, stream), count in self.arrived.items()
                if where == region and count != told[stream]
            ]
        return found

    def audit_log(self, region: str) -> Path:
        if region not in self.clusters:
            return super().audit_log(region)
        return max(self._logs_of(region), key=size_of, default=self.clusters[region].data("b1") / "audit")

    def _logs_of(self, region: str) -> list[Path]:
        data = self.folder(region).root / "data"
        return sorted(path.parent for path in data.glob("*/audit/checkpoint"))


def _flight(record: bytes) -> int:
    flight: int = json.loads(record)["flight"]
    return flight


def _leaves(path: Path, size: int) -> list[bytes]:
    return [bytes(data) for _, data in read_entries(Folder(path), 0, size, size)]


# -- operations: each returns what it did, or None where there is nothing to do it to ------------------------


def _whole(cluster: Cluster) -> bool:
    """Whether all brokers run: only then is another one taken away, as an operator does."""
    return not cluster.away and len(cluster.running) > 1


async def restart_one(world: Several) -> str | None:
    """In order, as for a new version."""
    cluster = world.pick(_whole)
    if cluster is None:
        return None
    name = world.random.choice(sorted(cluster.running))
    await cluster.stop(name)
    await cluster.start(name)
    return f"{name} of {cluster.region}"


async def kill_one(world: Several) -> str | None:
    """SIGKILL; it is started again at once, or later."""
    cluster = world.pick(_whole)
    if cluster is None:
        return None
    name = world.random.choice(sorted(cluster.running))
    await cluster.kill(name)
    if world.random.random() < 0.5:
        await cluster.start(name)
        return f"{name} of {cluster.region}"
    cluster.away.add(name)
    return f"{name} of {cluster.region}, which stays away"


async def stop_one(world: Several) -> str | None:
    """In order, for longer."""
    cluster = world.pick(_whole)
    if cluster is None:
        return None
    name = world.random.choice(sorted(cluster.running))
    await cluster.stop(name)
    cluster.away.add(name)
    return f"{name} of {cluster.region}"


async def bring_back(world: Several) -> str | None:
    cluster = world.pick(lambda cluster: cluster.away)
    if cluster is None:
        return None
    name = world.random.choice(sorted(cluster.away))
    await cluster.start(name)
    return f"{name} of {cluster.region}"


async def kill_all(world: Several) -> str | None:
    """All brokers of a region at once, as where the power went."""
    cluster = world.pick()
    if cluster is None:
        return None
    for name in list(cluster.running):
        await cluster.kill(name)
    await cluster.stop_etcd()
    await cluster.start_all()
    return cluster.region


async def drain(world: Several) -> str | None:
    cluster = world.pick(lambda cluster: not cluster.drained and _whole(cluster))
    if cluster is None:
        return None
    name = world.random.choice(sorted(cluster.running))
    client = await world.client(cluster.region)
    await client.drain_broker(name, partly=True)
    cluster.drained.add(name)
    said = f"{name} of {cluster.region}"
    if world.random.random() < 0.5:
        said += (
            ", and its copies are gone"
            if await _is_empty(world, cluster, name)
            else ", and it has copies still"
        )
    return said


async def _is_empty(world: Several, cluster: Cluster, name: str) -> bool:
    async def has_none() -> bool:
        state = await (await world.client(cluster.region)).describe()
        return not state.moving and all(not each.copies for each in state.brokers if each.broker == name)

    return await world.is_within(has_none)


async def undrain(world: Several) -> str | None:
    cluster = world.pick(lambda cluster: cluster.drained)
    if cluster is None:
        return None
    name = cluster.drained.pop()
    await (await world.client(cluster.region)).drain_broker(name, drain=False)
    return f"{name} of {cluster.region}"


async def rebalance(world: Several) -> str | None:
    cluster = world.pick()
    if cluster is None:
        return None
    moves = await (await world.client(cluster.region)).rebalance()
    return f"{moves.total} shards of {cluster.region}"


async def alter_copies(world: Several) -> str | None:
    cluster = world.pick()
    if cluster is None:
        return None
    client = await world.client(cluster.region)
    held = sorted(
        [each.stream async for each in client.list_streams() if each.stream.startswith("acme/ops/")]
    )
    if not held:
        return None
    stream, copies = world.random.choice(held), world.random.randint(1, len(cluster.names))
    await client.alter_stream(stream, replicas=copies)
    return f"{copies} of {stream} in {cluster.region}"


async def lose_folder(world: Several) -> str | None:
    """A broker's disk is gone for good: it gets a new folder, and what only it had is given up by name."""
    cluster = world.pick(_whole)
    if cluster is None:
        return None
    region = cluster.region
    names = sorted(cluster.running.keys() - {world.with_log.get(region)})
    if not names or not await world.is_within(cluster.is_in_sync):
        return f"not all copies of {region} are in sync"
    name = world.random.choice(names)
    await cluster.kill(name)
    alone = [each for each in await cluster.shards() if set(each.replicas) == {name}]
    shutil.rmtree(cluster.data(name))
    world.given_up |= {(region, each.stream) for each in alone}
    await cluster.start(name, "--replace-folder")
    said = f"that of {name} of {region}"
    client = await world.client(region)
    for stream in sorted({each.stream for each in alone}):
        shards = sum(each.stream == stream for each in alone)
        for number in range(shards):

            async def is_recovered(stream: str = stream, number: int = number) -> bool:
                # Until the store knows that its copies are gone it is refused.
                with suppress(RequestError):
                    await client.recover_shard(stream, number, name, lost=[name], powered_off=True)
                    return True
                return False

            said += f"; {stream} shard {number} recovered: {await world.is_within(is_recovered)}"
    return said


async def add_broker(world: Several) -> str | None:
    """One more; the others and the agents learn of it at their next start."""
    cluster = world.pick(lambda cluster: len(cluster.names) <= BROKERS and _whole(cluster))
    if cluster is None:
        return None
    before = cluster.names
    cluster.scale(len(before) + 1)
    (new,) = (name for name in cluster.names if name not in before)
    await cluster.start(new)
    await world.call_anew()
    return f"{new} of {cluster.region}"


async def take_broker_away(world: Several) -> str | None:
    """The last one, where there are more than new streams have copies: drained, stopped, retired."""
    cluster = world.pick(
        lambda cluster: (
            len(cluster.names) > BROKERS
            and _whole(cluster)
            and cluster.names[-1] != world.with_log.get(cluster.region)
            and not cluster.drained - {cluster.names[-1]}
        )
    )
    if cluster is None:
        return None
    name, client = cluster.names[-1], await world.client(cluster.region)
    cluster.drained.discard(name)
    await client.drain_broker(name, partly=True)
    if not await _is_empty(world, cluster, name):
        await client.drain_broker(name, drain=False)
        return f"{name} of {cluster.region} keeps copies, so it stays"
    await cluster.stop(name)
    cluster.scale(len(cluster.names) - 1)
    await world.call_anew()
    await (await world.client(cluster.region)).retire_broker(name)
    return f"{name} of {cluster.region}"


async def rotate(world: Several) -> str | None:
    region, level = world.random.choice(world.regions), world.random.choice(("data", "data", "root"))
    return f"{level} in {region}: {await (await world.client(region)).rotate_keys(level)}"


async def save_store(world: Several) -> str | None:
    cluster = world.pick()
    if cluster is None:
        return None
    await cluster.save_store()
    return cluster.region


async def put_store_back(world: Several) -> str | None:
    """By docs/clusters.md: the newest snapshot, then what the folders have; and what was given since is given again."""
    cluster = world.pick(lambda cluster: cluster.snapshot.exists())
    if cluster is None:
        return None
    region = cluster.region
    client = await world.client(region)
    held = {(each.stream, each.incarnation) async for each in client.list_streams()}
    await world.leave(region)
    for name in list(cluster.running):
        await cluster.stop(name)
    told = await cluster.put_store_back()
    cluster.away.clear()
    await cluster.start_all()
    client = await world.client(region)
    for each in [each async for each in client.list_streams()]:
        if (each.stream, each.incarnation) not in held:
            # Deleted since: it is there again, and empty.
            world.given_up.add((region, each.stream))
    world.given_up |= {
        (region, line.split()[1]) for line in told.splitlines() if line.startswith("lost: acme/ops/")
    }
    for name in cluster.names:
        with suppress(FelixError):
            await client.drain_broker(name, drain=False)
    cluster.drained.clear()
    await world.exchange_bundles()
    await world.apply_policy(region)
    if region in world.sources:
        await world.admit_bridge(region)
    for grant in world.grants:
        if region in (grant.terms.from_region, grant.terms.to_region):
            grant.accepted, grant.approved = False, set()
    return f"{region}: {' / '.join(told.splitlines())}"


async def to_cluster(world: Several) -> str | None:
    """A region of one broker becomes one of several, and gets two more brokers."""
    if not world.alone:
        return None
    region = world.random.choice(world.alone)
    await world.stop(region)
    folder = world.folder(region)
    config = load_config(folder.config)
    etcd = free_etcd(free_address)
    await convert(folder, config, etcd)
    name_brokers(folder, config, config.broker, 1, free_address, etcd=etcd)
    finish(folder, config)
    cluster = world.clusters[region] = Cluster(folder)
    cluster.set_lease()
    world.with_log[region] = config.broker
    world.backups.pop(region, None)
    await cluster.start_all()
    cluster.scale(BROKERS)
    for name in cluster.names[1:]:
        await cluster.start(name)
    await world.call_anew()
    return region


async def copy_audit_log(world: Several) -> str | None:
    """The audit log of a region that one broker had served gets copies."""
    cluster = world.pick(lambda cluster: cluster.region in world.with_log)
    if cluster is None:
        return None
    region = cluster.region
    await world.leave(region)
    await cluster.stop_all()
    told = await asyncio.to_thread(felix_command, world.home, "region", "copy-audit-log", region)
    cluster.away.clear()
    await cluster.start_all()

    async def has_no_problem() -> bool:
        return not (await (await world.client(region)).describe()).alarms

    # Until then one folder alone has the log.
    if not await world.is_within(has_no_problem, END_S):
        return f"{region}: not done yet: {' '.join(told.out.splitlines())}"
    del world.with_log[region]
    return f"{region}: {' '.join(told.out.splitlines())}"


OF_SEVERAL: Final[dict[Callable[[Several], Awaitable[str | None]], float]] = {
    restart_one: 1.5, kill_one: 2, stop_one: 0.7, bring_back: 4, kill_all: 0.7, drain: 1.5, undrain: 3, rebalance: 1,
    alter_copies: 2, lose_folder: 1, add_broker: 0.7, take_broker_away: 0.7, rotate: 1, save_store: 1, put_store_back: 0.7,
    to_cluster: 0.3, copy_audit_log: 1, Several.transact: 1.5,
}  # fmt: skip
