"""The kernel, which both ends of the wire share, and the client SDK, whose public names are here. A contract in pyproject.toml
says which module belongs to which.

`felix.connect` is where an application begins (felix.client); `felix.sync` is the same for scripts and notebooks.

A name is imported from its module when it is first asked for: what only needs one module of this package, as most
commands of `felix` do, does not wait for the whole client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from felix.backoff import BackoffPolicy
    from felix.batch import NewRecord, Record
    from felix.cache import FOREVER, Cache, Change, Entry, Mirror, Position, Watch
    from felix.client import RegionClient, connect
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
    from felix.identity import Identity
    from felix.identity_file import load_identity
    from felix.messages import ShardState, StreamState
    from felix.names import SpiffeId, StreamName
    from felix.profile import Profile, felix_home, load_profile
    from felix.publisher import Publisher
    from felix.publisher_core import PublishProgress, Receipt, Refusal
    from felix.queue import Job, Queue, QueueConsumer
    from felix.settings import (
        Deduplication,
        Durability,
        NamespaceSettings,
        Retention,
        Retries,
        RetriesChange,
        SubscriptionSettings,
        Views,
    )
    from felix.stream import Stream
    from felix.subscription import Gap, GapError, ReceivedBatch, Subscription
    from felix.transaction import Transaction, TransactionRecord

_NAMES: Final = {
    "felix.backoff": "BackoffPolicy",
    "felix.batch": "NewRecord Record",
    "felix.cache": "FOREVER Cache Change Entry Mirror Position Watch",
    "felix.client": "RegionClient connect",
    "felix.connection": "SessionInfo",
    "felix.consumer": "Consumer ConsumerBatch ConsumerRecord",
    "felix.errors": "Code CorruptionError FelixError OffsetMismatchError ProtocolError RequestError UnavailableError",
    "felix.frames": "GapReason",
    "felix.identity": "Identity",
    "felix.identity_file": "load_identity",
    "felix.messages": "ShardState StreamState",
    "felix.names": "SpiffeId StreamName",
    "felix.profile": "Profile felix_home load_profile",
    "felix.publisher": "Publisher",
    "felix.publisher_core": "PublishProgress Receipt Refusal",
    "felix.queue": "Job Queue QueueConsumer",
    "felix.settings": "Deduplication Durability NamespaceSettings Retention Retries RetriesChange SubscriptionSettings Views",
    "felix.stream": "Stream",
    "felix.subscription": "Gap GapError ReceivedBatch Subscription",
    "felix.transaction": "Transaction TransactionRecord",
}
"""Each name of `__all__`, by the module that it stands in."""
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

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
    "PublishProgress",
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
    "__version__",
    "connect",
    "felix_home",
    "load_identity",
    "load_profile",
]


def __getattr__(name: str) -> Any:
    """A public name, imported now and kept. Raises AttributeError."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
