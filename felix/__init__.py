"""What both ends of the wire share, and the client SDK, whose face this is.

`felix.connect` is where an application begins (felix.client); `felix.sync` is the same for scripts and notebooks.
"""

from felix.backoff import BackoffPolicy
from felix.batch import NewRecord, Record
from felix.cache import FOREVER, Cache, Change, Entry, Mirror, Position, Watch
from felix.client import RegionClient, Stream, connect
from felix.connection import SessionInfo
from felix.consumer import Consumer, ConsumerBatch, ConsumerRecord
from felix.errors import (
    Code,
    CorruptionError,
    FelixError,
    OffsetMismatchError,
    ProtocolError,
    RequestError,
    UnavailableError,
)
from felix.frames import GapReason
from felix.identity import Identity, load_identity
from felix.messages import Durability, Retention, ShardState, StreamState
from felix.names import SpiffeId, StreamName
from felix.profile import Profile, felix_home, load_profile
from felix.publisher import Publisher, Receipt, Refusal
from felix.queue import Job, Queue, QueueConsumer
from felix.settings import (
    Deduplication,
    NamespaceSettings,
    Retries,
    RetriesChange,
    SubscriptionSettings,
    Views,
)
from felix.subscription import Gap, GapError, ReceivedBatch, Subscription
from felix.transaction import Transaction, TransactionRecord

__all__ = [
    "FOREVER",
    "BackoffPolicy",
    "Cache",
    "Change",
    "Code",
    "Consumer",
    "ConsumerBatch",
    "ConsumerRecord",
    "CorruptionError",
    "Deduplication",
    "Durability",
    "Entry",
    "FelixError",
    "Gap",
    "GapError",
    "GapReason",
    "Identity",
    "Job",
    "Mirror",
    "NamespaceSettings",
    "NewRecord",
    "OffsetMismatchError",
    "Position",
    "Profile",
    "ProtocolError",
    "Publisher",
    "Queue",
    "QueueConsumer",
    "Receipt",
    "ReceivedBatch",
    "Record",
    "Refusal",
    "RegionClient",
    "RequestError",
    "Retention",
    "Retries",
    "RetriesChange",
    "SessionInfo",
    "ShardState",
    "SpiffeId",
    "Stream",
    "StreamName",
    "StreamState",
    "Subscription",
    "SubscriptionSettings",
    "Transaction",
    "TransactionRecord",
    "UnavailableError",
    "Views",
    "Watch",
    "connect",
    "felix_home",
    "load_identity",
    "load_profile",
]
