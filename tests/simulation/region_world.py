"""One broker and its clients.

The broker is the real one: sessions, streams, logs, recovery, queues, caches, subscriptions. What needs a folder of certificates
(governance, audit) is left out, which keeps a run short; simulation.mesh_world has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from simulation.clients import CLIENT, STREAMS, Balances, Billing, Invoices, Orders, RegionUser
from simulation.script import Script, Step
from simulation.world import START_MS, Client, Host, InvariantError, World

from felix.address import Address
from felix.batch import Batch
from felix.errors import FelixError, UnavailableError
from felix.identity import Binding, Identity, Proof
from felix.messages import OpenCache, OpenConsumer, OpenQueue, OpenTransactions, WatchCache
from felix.names import SpiffeId, StreamName
from felix.peer import Peer, TrustAnchor, TrustBundle, verify_chain
from felix.profile import Profile
from felix.runtime.simulated import SimulatedLoop, simulated
from felix.settings import Views
from felix.transaction_messages import TRANSACTIONS_STREAM
from felix.transport.port import ServerTls, TransportLimits
from keys.authority import RegionAuthority, create_authority
from region.broker import Broker
from region.cache import watch
from region.cache.service import CacheService
from region.config import RegionConfig
from region.limits.budget import Budget, Budgets
from region.log.directory import LogDirectory
from region.metadata.catalog import Catalog
from region.metadata.memory import MemoryStore
from region.metadata.mirror import CatalogMirror
from region.metadata.records import StreamConfig
from region.queue.service import QueueService
from region.queue.worker import queue_opener
from region.relay import RelayService
from region.session.client_session import ClientSession, Services
from region.session.requests import Requests, ViewTraffic
from region.streams.follower import StreamFollower
from region.streams.table import StreamTable
from region.subscriptions.service import SubscriptionService
from region.transactions.applier import Participant
from region.transactions.coordinator import Coordinator
from region.transactions.participants import QueueParticipant, SubscriptionParticipant
from region.transactions.service import TransactionService

HOST: Final = "broker"
PORT: Final = 7443
SERVER_NAME: Final = "b1.us-east.acme"
FOLDER: Final = Path("/streams")
FENCED: Final = 0.2
"""In so many seeds the broker may not write for a while, as one whose lease in the metadata store is in doubt: its logs say no time after which to try again."""
FENCES_MAX: Final = 3
REST_S: Final = 1.0
"""After which a broker knows that clients are gone."""
STATE: Final = frozenset({"cache", "ring"})
"""Budgets of what is there without anybody asking for it."""


@cache
def authority() -> RegionAuthority:
    return create_authority("us-east", "acme", START_MS)


@cache
def anchor() -> TrustAnchor:
    return authority().anchor()


@cache
def holder(chain_pem: bytes) -> Peer:
    """Whose certificate it is. All runs have the same few, so each is verified once."""
    return verify_chain(chain_pem, TrustBundle([anchor()]), START_MS)


@cache
def identity(kind: str, name: str) -> Identity:
    names = [SERVER_NAME] if kind == "broker" else []
    return authority().issue_identity(SpiffeId("us-east", "acme", kind, name), START_MS, dns_names=names)


class Plain:
    """A stream that is kept unsealed: the seal has tests of its own."""

    def seal(self, batch: Batch) -> Batch:
        return batch

    open_batch = seal

    def commitment(self) -> bytes:
        return b""

    def tag(self, purpose: str, data: bytes) -> bytes:
        return b""


def verify(proof: Proof, binding: Binding) -> Peer:
    """Who proves itself: each signature is looked at, a certificate only when it is seen first."""
    peer = holder(proof.chain_pem)
    peer.public_key.verify(proof.signature, binding.message(), ec.ECDSA(hashes.SHA256()))
    return peer


class Trusting:
    """What sessions ask of governance where there is none."""

    def trusts(self, region: str) -> bool:
        return True


class BrokerHost(Host):
    """The broker's machine. The metadata store is another one's, which does not fail."""

    def __init__(self, world: World, name: str, wanted: Mapping[str, Views]) -> None:
        """`wanted`: the streams that are used: each costs its part of every start."""
        super().__init__(world, name)
        self.store = MemoryStore(runtime=self.runtime)
        self.wanted = wanted
        self.broker: Broker | None = None
        self.fences = 0
        """so many faults that keep it from writing are under way"""

    def refusal(self) -> FelixError | None:
        return UnavailableError("The broker may not write.") if self.fences else None

    def comes_back(self, path: Path) -> bool:
        return True

    def budgets(self) -> Iterable[Budget]:
        return self.broker.budgets.all() if self.broker is not None else ()

    async def serve(self) -> None:
        budgets = Budgets()
        directory = LogDirectory(FOLDER, "us-east", files=self.mount(), runtime=self.runtime)
        streams = StreamTable(directory, budgets.ring, lambda *_: Plain(), self.refusal, self.runtime)
        catalog, mirror = Catalog(self.store, "us-east"), CatalogMirror(self.store, "us-east")
        await mirror.start()
        config = RegionConfig(
            region="us-east",
            mesh="acme",
            country="US",
            listen=Address(HOST, PORT),
            broker="b1",
            operators=("operator",),
        )
        self.broker = broker = Broker(
            config,
            streams=streams,
            catalog=catalog,
            budgets=budgets,
            transport_limits=TransportLimits(),
            runtime=self.runtime,
        )
        nothing: Any = None
        governance: Any = Trusting()
        self.caches = CacheService(broker)
        queues = QueueService(broker)
        self.subscriptions = SubscriptionService(broker, catalog, mirror, queues)
        participants: dict[str, Participant] = {
            "subscription": SubscriptionParticipant(broker, self.subscriptions),
            "queue": QueueParticipant(broker, queues),
        }
        self.transactions = transactions = Coordinator(broker, participants)
        self.queues = queues
        follower = StreamFollower(streams, mirror, lambda name: None)
        records = {record.name: record for record in await catalog.list_streams()}
        if (system := records.pop(str(TRANSACTIONS_STREAM), None)) is not None:
            follower.opened(await streams.open(system))
        await transactions.start(streams)
        for record in records.values():
            follower.opened(await streams.open(record))
        for name, views in self.wanted.items():
            if streams.get(StreamName.parse(name)) is None:
                await broker.create_stream(StreamName.parse(name), StreamConfig(shards=1, views=views))
        await self.subscriptions.start()
        await transactions.started()
        self.following = asyncio.ensure_future(follower.run())
        services = Services(
            broker,
            verify,
            governance,
            nothing,
            Requests(broker, nothing, nothing, catalog, mirror, self.subscriptions, ViewTraffic([], list)),
            nothing,
            {
                OpenConsumer: self.subscriptions.open,
                OpenCache: self.caches.open,
                WatchCache: watch.opener(self.caches),
                OpenQueue: queue_opener(queues),
                OpenTransactions: TransactionService(broker, transactions).open,
            },
            RelayService(broker, None, 0),
        )
        server = identity("broker", "b1")
        await self.world.engine(HOST).listen(
            HOST, PORT, ServerTls(server.chain_pem, server.key_pem()), lambda: ClientSession(services)
        )


class RegionWorld(World):
    """One broker; clients that publish, read, work, and keep values."""

    def __init__(self, seed: int, loop: SimulatedLoop, script: Script) -> None:
        super().__init__(seed, loop, script)
        self.client_runtime = simulated(loop, START_MS)

    kinds: ClassVar[tuple[type[Client], ...]] = (Orders, Invoices, Balances, Billing)
    streams: ClassVar[dict[str, Views] | None] = None
    """What clients use; None: what those that take part do."""

    @classmethod
    def party(cls, random: Random) -> list[type[Client]]:
        found = super().party(random)
        return [Orders, *found] if Billing in found and Orders not in found else found

    @classmethod
    def targets(cls) -> tuple[str, ...]:
        return (HOST,)

    @classmethod
    def draw(cls, random: Random) -> Script:
        # Behind everything else, so that seeds without these stay what they were.
        script = list(super().draw(random))
        if random.random() < FENCED:
            for _ in range(random.randint(1, FENCES_MAX)):
                at = random.randint(0, sum(step.who == "fault" for step in script))
                after_s, lasts_s = (scale * random.random() for scale in (0.5, 0.5))
                script.insert(at, Step("fault", "fence", after_s, HOST, lasts_s, random.getrandbits(2)))
        return tuple(script)

    async def fault(self, step: Step) -> None:
        if step.what != "fence":
            await super().fault(step)
            return
        host = self.hosts[step.where]
        assert isinstance(host, BrokerHost)
        if step.number:
            # First something is refused that was decided before: journals are read again, and wait until they take entries.
            await super().fault(step._replace(what="full", number=0, lasts_s=step.lasts_s))
        host.fences += 1
        await asyncio.sleep(step.lasts_s)
        host.fences -= 1

    def peers(self, name: str) -> list[str]:
        return [CLIENT]

    def make(self) -> Iterable[Host]:
        names = sorted({kind.stream for kind in self.joining if issubclass(kind, RegionUser)})
        yield BrokerHost(self, HOST, self.streams or {name: STREAMS[name] for name in names})

    def profile(self) -> Profile:
        return Profile(
            region="us-east",
            mesh="acme",
            addresses=(f"{HOST}:{PORT}",),
            authority=anchor().root_pem,
            identity=identity("operator", "operator"),
            server_name=SERVER_NAME,
        )

    # -- what must hold --------------------------------------------------------------------------------

    async def check(self) -> None:
        """And what clients' calls took of the broker's buffers is given back once they are gone."""
        await super().check()
        await asyncio.sleep(REST_S)
        for budget in self.hosts[HOST].budgets():
            if budget.used_bytes and budget.name not in STATE:
                raise InvariantError(f"{budget.used_bytes} bytes of {budget.name} were never given back")
