"""What a process knows of a cluster: its records as they stood at some revision, from a snapshot, the changes since, and single reads.

Pure. Invariants: a record is never replaced by an older one of the same key, except by `load`, which is how a store that was put back to
an earlier state comes in; a record that cannot be read is known by name only, and nothing is decided on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from audit.unclean_leaf import UncleanElection
from felix.errors import CorruptionError
from region.cluster.election import Brokers
from region.cluster.records import (
    BrokerRecord,
    ClusterKeys,
    ControllerRecord,
    FrozenRecord,
    NodeRecord,
    PulseRecord,
    RebalanceRecord,
    ShardId,
    ShardRecord,
    decode_broker,
    decode_controller,
    decode_frozen,
    decode_node,
    decode_pulse,
    decode_rebalance,
    decode_shard,
)
from region.metadata.transaction import Change, Entry, Snapshot


class ClusterView:
    """The records of a region's cluster. Read its tables; change it by `load`, `apply` and `absorb` alone."""

    def __init__(self, keys: ClusterKeys) -> None:
        self.keys = keys
        self.revision = 0
        self.nodes: dict[str, NodeRecord] = {}
        self.alive: dict[str, BrokerRecord] = {}
        self.pulses: dict[str, PulseRecord] = {}
        self.shards: dict[ShardId, ShardRecord] = {}
        self.controller: ControllerRecord | None = None
        self.frozen: FrozenRecord | None = None
        self.rebalance: RebalanceRecord | None = None
        self.unclean: dict[str, UncleanElection] = {}
        """unclean elections that have no leaf in the audit log yet, by key"""
        self.arrived: dict[ShardId, int] = {}
        """where a move of a shard was seen to end as it was meant: the revision of the last one"""
        self.leaders_since = 0
        """the revision at which a shard was last seen to have another leader than before; of a load, that of the snapshot"""
        self.unreadable: dict[str, str] = {}
        """by key, why; such as a later version's record"""
        self._revisions: dict[str, int] = {}
        self._read_at: dict[str, int] = {}

    @property
    def brokers(self) -> Brokers:
        """Those that were registered, and those that are alive."""
        return Brokers(self.nodes, self.alive)

    def is_registered(self, broker: str, registration: int, folder: str) -> bool:
        """Whether `broker` was registered with this folder, under this registration or one before: of a later one the record may not be read yet."""
        node = self.nodes.get(broker)
        return node is not None and node.folder == folder and registration >= node.registration

    def revision_of(self, key: str) -> int:
        """At which revision what is known of `key` was written; 0 where it is absent."""
        return self._revisions.get(key, 0)

    def load(self, snapshot: Snapshot) -> None:
        """The records are those of `snapshot`, whatever was known before."""
        before, arrived = self.shards.copy(), self.arrived.copy()
        for table in (
            self.arrived,
            self.nodes,
            self.alive,
            self.pulses,
            self.shards,
            self.unclean,
            self.unreadable,
            self._revisions,
            self._read_at,
        ):
            table.clear()
        self.controller, self.frozen, self.rebalance = None, None, None
        self.revision = self.leaders_since = snapshot.revision
        for entry in snapshot.entries:
            self._put(entry.key, entry)
        for shard in self.shards:
            if arrived.get(shard, snapshot.revision + 1) <= snapshot.revision:
                self.arrived[shard] = arrived[shard]
            self._look_for_arrival(shard, before.get(shard))

    def apply(self, change: Change) -> None:
        """The next change of the store."""
        for event in change.events:
            self._take(event.key, event.entry, change.revision)
        self.revision = max(self.revision, change.revision)

    def absorb(self, entries: Mapping[str, Entry | None], revision: int) -> None:
        """Single keys as they stood at `revision`, which the watch may not have reached."""
        for key, entry in entries.items():
            self._take(key, entry, revision)

    def _take(self, key: str, entry: Entry | None, revision: int) -> None:
        if revision >= self._read_at.get(key, 0) and revision >= self._revisions.get(key, 0):
            # Of an absent key nothing else says since when it is known to be absent.
            self._read_at[key] = revision
            self._put(key, entry)

    def _look_for_arrival(self, shard: ShardId, before: ShardRecord | None) -> None:
        record = self.shards[shard]
        if before is not None and before.target and not record.target and record.replicas == before.target:
            self.arrived[shard] = self._revisions[self.keys.shard(shard)]

    def _put(self, key: str, entry: Entry | None) -> None:
        keys = self.keys
        if entry is None:
            self._revisions.pop(key, None)
        else:
            self._revisions[key] = entry.mod_revision
        self.unreadable.pop(key, None)
        try:
            if key.startswith(keys.shards):
                shard = keys.shard_of(key)
                before = self.shards.pop(shard, None)
                if entry is None:
                    self.arrived.pop(shard, None)
                else:
                    self.shards[shard] = decode_shard(entry.value, key)
                    if before is not None and before.leader != self.shards[shard].leader:
                        self.leaders_since = entry.mod_revision
                    self._look_for_arrival(shard, before)
            elif key.startswith(keys.nodes):
                broker = keys.broker_of(key)
                self.nodes.pop(broker, None)
                if entry is not None:
                    self.nodes[broker] = decode_node(entry.value, key)
            elif key.startswith(keys.brokers):
                broker = keys.broker_of(key)
                self.alive.pop(broker, None)
                if entry is not None:
                    self.alive[broker] = decode_broker(entry.value, key)
            elif key.startswith(keys.pulses):
                broker = keys.broker_of(key)
                self.pulses.pop(broker, None)
                if entry is not None:
                    self.pulses[broker] = decode_pulse(entry.value, key)
            elif key.startswith(keys.unclean):
                self.unclean.pop(key, None)
                if entry is not None:
                    self.unclean[key] = UncleanElection.decode(entry.value, key)
            elif key == keys.controller:
                self.controller = None
                if entry is not None:
                    self.controller = decode_controller(entry.value, key)
            elif key == keys.frozen:
                self.frozen = None
                if entry is not None:
                    self.frozen = decode_frozen(entry.value, key)
            elif key == keys.rebalance:
                self.rebalance = None
                if entry is not None:
                    self.rebalance = decode_rebalance(entry.value, key)
        except CorruptionError as error:
            self.unreadable[key] = error.sentence
