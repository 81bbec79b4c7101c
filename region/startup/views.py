"""What clients have beside streams (queues, caches, subscriptions, transactions), and what a session's requests are handed to."""

from __future__ import annotations

from dataclasses import dataclass

from felix.messages import (
    OpenCache,
    OpenConsumer,
    OpenIngest,
    OpenQueue,
    OpenRelay,
    OpenTransactions,
    WatchCache,
)
from region.cache import watch
from region.cache.service import CacheService
from region.queue.service import QueueService
from region.queue.worker import queue_opener
from region.relay import RelayService
from region.session.client_session import Services
from region.session.renewal import IdentityRenewal
from region.session.requests import Requests, ViewTraffic
from region.startup.governing import Governing
from region.startup.ground import Ground
from region.startup.metadata import Metadata
from region.startup.serving import Serving
from region.subscriptions.service import SubscriptionService
from region.transactions.applier import Participant
from region.transactions.coordinator import Coordinator
from region.transactions.lanes import Lanes
from region.transactions.participants import QueueParticipant, SubscriptionParticipant
from region.transactions.service import TransactionService
from region.transactions.stream_leaders import StreamLeaders


@dataclass(frozen=True, slots=True)
class Views:
    """`lanes`: of transactions over several brokers."""

    caches: CacheService
    queues: QueueService
    subscriptions: SubscriptionService
    transactions: Coordinator
    lanes: Lanes | None
    services: Services


def open_views(ground: Ground, metadata: Metadata, serving: Serving, governing: Governing) -> Views:
    """Make them; none is served yet."""
    broker, clustered, peers = serving.broker, metadata.clustered, serving.peers
    governance, mirror = governing.governance, metadata.mirror
    caches, queues = CacheService(broker), QueueService(broker)
    subscriptions = SubscriptionService(broker, metadata.catalog, mirror, queues)
    participants: dict[str, Participant] = {
        "subscription": SubscriptionParticipant(broker, subscriptions),
        "queue": QueueParticipant(broker, queues),
    }
    leaders: StreamLeaders | None = None
    lanes: Lanes | None = None
    if clustered is not None and peers is not None:
        leaders = StreamLeaders(broker, clustered, peers.requests)
    transactions = Coordinator(broker, participants, leaders=leaders)
    if clustered is not None and peers is not None:
        lanes = Lanes(broker, clustered, peers.requests, participants, transactions.may_be_decided)
        serving.streams.before_serving.append(transactions.lead)
    relays = RelayService(broker, clustered, ground.relays_max)
    ground.stack.callback(relays.close)
    services = Services(
        broker,
        governance.verify,
        governance,
        governing.export,
        Requests(
            broker,
            governance,
            governing.export,
            metadata.catalog,
            mirror,
            subscriptions,
            ViewTraffic([subscriptions.traffic, queues.traffic], caches.traffic),
        ),
        # The authority is read each time: a renewed issuing certificate is taken without a restart.
        IdentityRenewal(broker, lambda: ground.authority().without_root_key(), governance.keys.record),
        {
            OpenIngest: governing.ingest.open,
            OpenTransactions: TransactionService(broker, transactions).open,
            OpenConsumer: subscriptions.open,
            OpenCache: caches.open,
            WatchCache: watch.opener(caches),
            OpenQueue: queue_opener(queues),
            OpenRelay: relays.open,
        },
        relays,
    )
    return Views(caches, queues, subscriptions, transactions, lanes, services)
