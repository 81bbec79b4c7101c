"""What a broker shows of itself: numbers with their limits, for metrics and the health page. Read on any thread."""

from __future__ import annotations

from collections.abc import Callable

from felix.errors import FelixError
from felix.transport.intake import HELD_BYTES_MAX
from felix.transport.port import Listener
from region.broker import Broker
from region.cache.service import CacheService
from region.governance.service import Governance
from region.log.directory import LogDirectory
from region.log.store_calls import silent_stores
from region.queue.service import QueueService
from region.relay import RelayService
from region.subscriptions.service import SubscriptionService
from region.transactions.coordinator import Coordinator
from region.transactions.open_transactions import OPEN_MAX


class BrokerGauges:
    """One per broker."""

    def __init__(
        self,
        broker: Broker,
        directory: LogDirectory,
        governance: Governance,
        caches: CacheService,
        queues: QueueService,
        subscriptions: SubscriptionService,
        transactions: Coordinator,
        listener: Listener,
        relays: RelayService,
        not_ready: Callable[[], str],
    ) -> None:
        """`not_ready`: why the broker does not serve, or an empty string."""
        self._broker = broker
        self._directory = directory
        self._governance = governance
        self._caches = caches
        self._queues = queues
        self._subscriptions = subscriptions
        self._transactions = transactions
        self._listener = listener
        self._relays = relays
        self._not_ready = not_ready

    def values(self) -> dict[str, float]:
        """Of the broker as a whole, by name."""
        status, clustered = self._governance.trail.status(), self._broker.clustered
        # A former copy of the audit log goes no further: that its newest leaves are not cosigned is nobody's matter.
        copied = clustered is None or not clustered.has_no_audit_copy
        return {
            "ready": float(not self._not_ready()),
            **self._broker.gauges(),
            **self._subscriptions.gauges(),
            **self._listener_gauges(),
            **({} if clustered is None else clustered.gauges()),
            **self._relays.gauges(),
            **({} if self._broker.own_files is None else self._broker.own_files.gauges()),
            "offload_cache_bytes": self._directory.fetched_bytes,
            "offload_cache_bytes_limit": self._directory.fetched_bytes_max,
            "offload_refused": self._broker.streams.maintenance.offload_refused,
            "offload_stores_silent": len(silent_stores()),
            "streams_opened_again": self._broker.streams.reopener.opened,
            "audit_leaves": status.durable if copied else 0,
            "audit_checkpoint_leaves": status.checkpoint if copied else 0,
            "audit_cosigned_leaves": status.cosigned if copied else 0,
            "audit_pending_bytes": status.pending_bytes,
            "audit_failed": float(bool(status.failure)),
            **{name: value if copied else 0 for name, value in self._governance.witnessing.gauges().items()},
            "transactions_open": len(self._transactions.open),
            "transactions_open_limit": OPEN_MAX,
            "transactions_owed": self._transactions.owed_count,
            "transactions_committed": self._transactions.committed,
            "transactions_aborted": self._transactions.aborted,
            "transactions_timed_out": self._transactions.open.timed_out,
        }

    def _listener_gauges(self) -> dict[str, float]:
        """Connections, those that have not authenticated yet, and what was read and not processed yet, with their limits."""
        listener, limits = self._listener, self._broker.transport_limits
        return {
            "connections": listener.connection_count,
            "connections_limit": limits.connections_max,
            "strangers": listener.stranger_count,
            "strangers_limit": limits.handshakes_pending_max,
            "stranger_bytes": listener.stranger_bytes,
            "stranger_bytes_limit": limits.strangers_bytes_max,
            "strangers_evicted": listener.strangers_evicted,
            "intake_bytes": listener.intake_bytes,
            "intake_bytes_limit": HELD_BYTES_MAX,
            "intake_dropped_bytes": listener.intake_dropped_bytes,
        }

    def shards(self) -> list[tuple[str, int, dict[str, float]]]:
        """Of each shard: stream, number, values by name."""
        found: list[tuple[str, int, dict[str, float]]] = []
        for stream in self._broker.streams:
            for number, shard in stream.replicas.items():
                if isinstance(shard, FelixError):
                    found.append((str(stream.name), number, {"stopped": 1.0}))
                    continue
                counters = shard.counters
                values: dict[str, float] = {
                    "log_start_offset": shard.log_start_offset,
                    "high_watermark": shard.high_watermark,
                    "disk_bytes": shard.disk_bytes,
                    "ring_bytes": shard.ring_bytes,
                    "ring_bytes_limit": shard.settings.ring_bytes_max,
                    "pending_bytes": shard.pending_bytes,
                    "pending_bytes_limit": shard.settings.pending_bytes_max,
                    "appended_batches": counters.batches,
                    "appended_records": counters.records,
                    "appended_bytes": counters.appended_bytes,
                    "syncs": counters.syncs,
                    "sync_seconds": counters.sync_ns / 1e9,
                    "segments": shard.segment_count,
                    "segments_deleted": counters.segments_deleted,
                    "remote_bytes": shard.remote_bytes,
                    "offload_waiting_bytes": shard.offload_waiting_bytes,
                    "offloaded_segments": counters.offloaded_segments,
                    "offloaded_bytes": counters.offloaded_bytes,
                    "offload_failed": counters.offload_failed,
                    "fetched_segments": counters.fetched_segments,
                    "fetched_bytes": counters.fetched_bytes,
                    "dirty_bytes": shard.dirty_bytes,
                    "compacted_to": shard.compacted_to,
                    "compactions": counters.compactions,
                    "compactions_failed": counters.compactions_failed,
                    "compaction_read_bytes": counters.compaction_read_bytes,
                    "compaction_written_bytes": counters.compaction_written_bytes,
                    "compaction_removed_records": counters.compaction_removed_records,
                    "compaction_seconds": counters.compaction_ns / 1e9,
                    "stopped": float(shard.failure is not None),
                    "full": float(shard.is_full),
                    **self._caches.stats(stream, number),
                }
                if self._broker.clustered is not None:
                    values |= self._broker.clustered.shard_gauges(stream.record, number)
                deduplication = shard.settings.deduplication
                if deduplication is not None:
                    values["message_ids"] = shard.message_ids
                    values["message_ids_limit"] = deduplication.ids_max
                    values["repeated_ids"] = counters.repeated_ids
                values |= self._queues.gauges(stream, number)
                found.append((str(stream.name), number, values))
        return found
