"""The records of a cluster: what they hold, when they are valid, how they stand in the metadata store.

JSON, as the catalog's records are (region.metadata.records). Pure; used by everything that reads or changes them.

Invariants:
- `decode_*` gives back what `encode` was given, or raises CorruptionError that names the key; unknown fields are passed over;
- a shard's leader is in its `isr`, unless it has yielded; `isr` and `elr` have no member in common, and all are among `replicas` and
  `target`; `elr` has members only while `isr` has fewer than `min`;
- a registration that stands in `isr`, `elr` or `failed` is the one that the broker had when it was written, never a later one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from audit.unclean_leaf import UncleanElection
from felix.errors import CorruptionError, RequestError
from felix.names import StreamName, parse_region
from region.log.offload import ListPointer
from region.metadata.records import REPLICAS_MAX, SHARDS_MAX, Keys, decode

EPOCH_MAX: Final = (1 << 32) - 1
"""An epoch has 32 bits in the log and on the wire."""
BROKERS_MAX: Final = 128
"""Brokers of one region: a plan looks at each pair of broker and shard, and every broker keeps a link to every other."""
ELECTION_CHARS: Final = 16
"""An election id is 64 random bits in hex: of two elections of one epoch, one by a store that was put back, the ids differ."""
FOLDER_CHARS: Final = 32
WORD_CHARS_MAX: Final = 255
"""A host's name, a zone, a version, an address, a lock's identity."""
SENTENCE_CHARS_MAX: Final = 1_000
NUMBER_MAX: Final = (1 << 53) - 1
"""Registrations: JSON's largest whole number that every reader has."""
_HEX: Final = re.compile(r"[0-9a-f]+")
_SHARD_KEY: Final = re.compile(r"([0-9a-f]{32})/([0-9]{3})")

ShardDurability = Literal["fsync", "interval"]
YieldReason = Literal["failed", "hung", "corrupt", "drain", "move", "clock", "unreachable", "stuck"]
"""Why a leader yields. failed, hung: its disk; corrupt: its copy; clock: too far from the others'; unreachable: too few members of its
sets reach it; stuck: it does not get to serve."""
CANNOT_SERVE: Final[frozenset[YieldReason]] = frozenset({"failed", "hung", "corrupt"})
"""Reasons for which a copy is not elected again under the registration that it yielded with."""


class ShardId(NamedTuple):
    """A shard by the incarnation of its stream (hex) and its number."""

    incarnation: str
    number: int


class Yielded(msgspec.Struct, frozen=True):
    """The leader of `epoch` has stopped serving for good in that epoch."""

    epoch: int
    why: YieldReason


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who has a shard, its record log and companion logs alike. Broker ids are keys, numbers of their starts are values.

    `leader`: empty while nobody can lead (vacant). `isr`: in-sync set: has all that is committed, and every commit waits for it.
    `elr`: eligible leader replicas: have all that is committed, but commits do not wait for them. `failed`: cannot serve under that
    registration. `min`: in-sync members that a commit needs. `durability`: what an acknowledgement of a member means, and so what it
    survived. Both are in force as they stand here, not as in the catalog. `offloaded`: which list of segments in a store is in force; its
    leader's. `target`: the replicas that a move leads to; the first of
    `replicas`, and of `target`, is to lead. `unclean`: the last epoch whose leader may have lacked what was committed; 0: none.
    """

    stream: str
    epoch: int
    election: str
    leader: str = ""
    yielded: Yielded | None = None
    replicas: tuple[str, ...]
    isr: dict[str, int]
    elr: dict[str, int] = {}
    failed: dict[str, int] = {}
    min: int
    durability: ShardDurability = "fsync"
    unclean: int = 0
    offloaded: ListPointer | None = None
    target: tuple[str, ...] = ()

    def members(self) -> dict[str, int]:
        """`isr` and `elr`: all that have everything that is committed."""
        return self.isr | self.elr


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A broker that has been registered, alive or not.

    `folder`: random id of its data folder (hex). `registration`: number of its last start. `boot`: of the machine at that start. `clean`:
    the registration that ended in order, with all that it had acknowledged on the disk. `whole_since`: first registration with this
    folder: what it acknowledged with `fsync` since then it has. `kept_since`: first registration since which nothing unsynced can have
    been lost: what it acknowledged with `interval` since then it has. `drain`: shards are to be moved away.
    """

    folder: str
    registration: int
    boot: str
    clean: int = 0
    whole_since: int
    kept_since: int
    host: str
    zone: str = ""
    drain: bool = False
    version: str = ""


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a broker says of itself. `open`: its logs have been recovered. `reaches`: the brokers it hears from. `features`: of the
    protocol between brokers. `skew_ms`: of its wall clock from the median of the others'."""

    open: bool = False
    reaches: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    skew_ms: int = 0


class BrokerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A broker that is alive: the record goes with its lease. `lock`: `FolderLock.identity` of its data folder, empty where unknown.
    `lease_ms`: how long it may stay silent; 0 where it does not say."""

    registration: int
    folder: str
    lock: str = ""
    host: str
    client_address: str
    peer_address: str
    lease_ms: int = 0
    health: Health = Health()


class PulseRecord(msgspec.Struct, frozen=True):
    """A counter that a broker raises while it runs, first in its folder, then here: an old copy of the one or the other differs."""

    pulse: int


class ControllerRecord(msgspec.Struct, frozen=True):
    """The broker that places and elects; the record goes with its lease, and its create revision is the term."""

    broker: str
    registration: int


class FrozenRecord(msgspec.Struct, frozen=True):
    """The store went back to an earlier state: nothing is placed or elected until it has been reconciled. `folders`: of brokers that have had to begin with other
    data folders since, the ids of those that the store knew, once a run that reconciles has begun to write the others in their place."""

    by: str
    why: str
    folders: dict[str, str] = {}


class RebalanceRecord(msgspec.Struct, frozen=True):
    """Copies are to be moved until each broker has its share, as an operator said. Whoever is the controller goes on with it, and removes it once nothing
    is left to move."""

    by: str


Record = (
    ShardRecord | NodeRecord | BrokerRecord | PulseRecord | ControllerRecord | FrozenRecord | RebalanceRecord
)
_Record = TypeVar("_Record", bound=msgspec.Struct)


class ClusterKeys:
    """The keys of a region's cluster, made in one place. Prefixes end in a slash."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.prefix = Keys(region).prefix
        self.nodes = f"{self.prefix}nodes/"
        self.brokers = f"{self.prefix}brokers/"
        self.pulses = f"{self.prefix}pulse/"
        self.shards = f"{self.prefix}shards/"
        self.controller = f"{self.prefix}controller"
        self.rebalance = f"{self.prefix}rebalance"
        self.unclean = f"{self.prefix}unclean/"
        self.frozen = Keys(region).frozen()
        self.audit_home = f"{self.prefix}audit_home"
        """of where the audit log is (region.cluster.member)"""
        self.alone = f"{self.prefix}registered"
        """of the last broker that served the region alone, or of the last of a cluster (region.metadata.registration)"""

    def node(self, broker: str) -> str:
        """Of a broker that has been registered."""
        return self.nodes + parse_region(broker)

    def broker(self, broker: str) -> str:
        """Of a broker that is alive."""
        return self.brokers + parse_region(broker)

    def pulse(self, broker: str) -> str:
        """Of a broker's counter of life."""
        return self.pulses + parse_region(broker)

    def shard(self, shard: ShardId) -> str:
        """Of a shard's record. Numbers sort as text."""
        key = f"{shard.incarnation}/{shard.number:03}"
        if not _SHARD_KEY.fullmatch(key) or not 0 <= shard.number < SHARDS_MAX:
            raise RequestError(
                f"{key[:80]!r} is no shard: expected 32 hex digits and a number below {SHARDS_MAX}."
            )
        return self.shards + key

    def shard_of(self, key: str) -> ShardId:
        """The shard whose record stands under `key`. Raises CorruptionError."""
        match = _SHARD_KEY.fullmatch(key.removeprefix(self.shards))
        if not key.startswith(self.shards) or match is None or int(match[2]) >= SHARDS_MAX:
            raise _invalid(key, "the key is no shard's")
        return ShardId(match[1], int(match[2]))

    def unclean_election(self, said: UncleanElection) -> str:
        """Of the statement of an unclean election, until it has its leaf."""
        return f"{self.unclean}{said.incarnation}/{said.shard:03}/{said.epoch:010}.{said.election}"

    def broker_of(self, key: str) -> str:
        """The broker whose record stands under `key`, of `nodes`, `brokers` or `pulses`. Raises CorruptionError."""
        broker = key.rpartition("/")[2]
        _check_brokers("brokers", (broker,), 1, key)
        return broker


def encode(record: Record, key: str) -> bytes:
    """JSON of a record that is to stand under `key`. Raises CorruptionError where no reader would accept it: nothing such is written."""
    _check(record, key)
    return msgspec.json.encode(record)


def decode_shard(value: bytes, key: str) -> ShardRecord:
    """A shard's record, checked."""
    return _checked(value, ShardRecord, key)


def decode_node(value: bytes, key: str) -> NodeRecord:
    """A registered broker's record, checked."""
    return _checked(value, NodeRecord, key)


def decode_broker(value: bytes, key: str) -> BrokerRecord:
    """A living broker's record, checked."""
    return _checked(value, BrokerRecord, key)


def decode_pulse(value: bytes, key: str) -> PulseRecord:
    """A broker's counter of life, checked."""
    return _checked(value, PulseRecord, key)


def decode_controller(value: bytes, key: str) -> ControllerRecord:
    """The controller's record, checked."""
    return _checked(value, ControllerRecord, key)


def decode_frozen(value: bytes, key: str) -> FrozenRecord:
    """The mark of a store that went back, checked."""
    return _checked(value, FrozenRecord, key)


def decode_rebalance(value: bytes, key: str) -> RebalanceRecord:
    """An operator's word that copies are to be evened out, checked."""
    return _checked(value, RebalanceRecord, key)


def _checked(value: bytes, kind: type[_Record], key: str) -> _Record:
    record = decode(value, kind, key)
    _check(record, key)
    return record


def _check(record: msgspec.Struct, key: str) -> None:
    match record:
        case ShardRecord():
            _check_shard(record, key)
        case NodeRecord():
            _check_node(record, key)
        case BrokerRecord():
            _check_numbers(key, registration=record.registration)
            _check_hex("folder", record.folder, FOLDER_CHARS, key)
            _check_words((record.lock, record.host, record.client_address, record.peer_address), key)
            _check_brokers("brokers that it reaches", record.health.reaches, BROKERS_MAX, key)
            _check_words(record.health.features, key)
        case PulseRecord():
            if record.pulse < 0:
                raise _invalid(key, f"its pulse is {record.pulse}")
        case ControllerRecord():
            _check_brokers("controllers", (record.broker,), 1, key)
            _check_numbers(key, registration=record.registration)
        case FrozenRecord():
            _check_brokers("writers", (record.by,), 1, key)
            if len(record.why) > SENTENCE_CHARS_MAX:
                raise _invalid(key, f"its reason has {len(record.why)} characters")
            _check_brokers("brokers with other folders", record.folders, BROKERS_MAX, key)
            for folder in record.folders.values():
                _check_hex("folder", folder, FOLDER_CHARS, key)
        case RebalanceRecord():
            _check_words((record.by,), key)


def _check_shard(record: ShardRecord, key: str) -> None:
    try:
        StreamName.parse(record.stream)
    except RequestError as error:
        raise _invalid(key, str(error)) from error
    if not 1 <= record.epoch <= EPOCH_MAX or not 0 <= record.unclean <= record.epoch:
        raise _invalid(key, f"its epoch is {record.epoch}, its last unclean one {record.unclean}")
    if record.yielded and not 1 <= record.yielded.epoch <= record.epoch:
        raise _invalid(key, f"epoch {record.yielded.epoch} has been yielded, but its epoch is {record.epoch}")
    _check_hex("election id", record.election, ELECTION_CHARS, key)
    _check_brokers("replicas", record.replicas, REPLICAS_MAX, key)
    _check_brokers("replicas of its target", record.target, REPLICAS_MAX, key)
    if not record.replicas:
        raise _invalid(key, "it has no replicas")
    for name in ("isr", "elr", "failed"):
        members = getattr(record, name)
        _check_brokers(f"members of {name}", members, 2 * REPLICAS_MAX, key)
        _check_numbers(key, **members)
        if strangers := members.keys() - {*record.replicas, *record.target}:
            raise _invalid(key, f"{', '.join(sorted(strangers))} of {name} are none of its replicas")
    if record.isr.keys() & record.elr.keys():
        raise _invalid(key, "isr and elr have a member in common")
    if not 1 <= record.min <= REPLICAS_MAX:
        raise _invalid(key, f"its min is {record.min}; 1 to {REPLICAS_MAX} are allowed")
    if record.elr and len(record.isr) >= record.min:
        raise _invalid(key, f"elr has members, although isr has {len(record.isr)} and min is {record.min}")
    has_yielded = record.yielded is not None and record.yielded.epoch == record.epoch
    if record.leader and record.leader not in record.isr and not has_yielded:
        raise _invalid(key, f"its leader {record.leader} is not in isr")


def _check_node(record: NodeRecord, key: str) -> None:
    _check_hex("folder", record.folder, FOLDER_CHARS, key)
    _check_words((record.boot, record.host, record.zone, record.version), key)
    _check_numbers(
        key,
        registration=record.registration,
        whole_since=record.whole_since,
        kept_since=record.kept_since,
    )
    if not record.whole_since <= record.kept_since <= record.registration:
        raise _invalid(
            key,
            f"registration {record.registration}, kept since {record.kept_since}, whole since {record.whole_since}: they must not rise",
        )
    if not 0 <= record.clean <= record.registration:
        raise _invalid(
            key, f"registration {record.clean} ended in order, but the last is {record.registration}"
        )


def _check_brokers(what: str, brokers: Collection[str], at_most: int, key: str) -> None:
    if len(brokers) > at_most or len(set(brokers)) != len(brokers):
        raise _invalid(key, f"{len(brokers)} {what}; at most {at_most}, all different, are allowed")
    for broker in brokers:
        try:
            parse_region(broker)
        except RequestError as error:
            raise _invalid(key, f"{broker[:80]!r} is no broker's id") from error


def _check_numbers(key: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if not 1 <= number <= NUMBER_MAX:
            raise _invalid(key, f"{name} is {number}")


def _check_hex(what: str, text: str, chars: int, key: str) -> None:
    if len(text) != chars or not _HEX.fullmatch(text):
        raise _invalid(key, f"its {what} is {text[:80]!r}; {chars} hex digits are expected")


def _check_words(words: Iterable[str], key: str) -> None:
    for word in words:
        if len(word) > WORD_CHARS_MAX:
            raise _invalid(
                key, f"{word[:40]!r}… has {len(word)} characters; at most {WORD_CHARS_MAX} are allowed"
            )


def _invalid(key: str, why: str) -> CorruptionError:
    return CorruptionError(
        f"The metadata record {key} is not valid: {why}.",
        hint="It was changed by something other than Felix; put the record right, or put back a backup.",
    )
