"""A cluster's records as they stand in the metadata store, followed by a watch; and the transactions on them.

One watch over the whole of the region's prefix: what one transaction changed is seen at once, and all in the order of the store's
revisions. What lies outside of a cluster's records is passed over.

Invariants: listeners are told of a snapshot first, then of each change, in order and each once, and of a snapshot again wherever the
watch cannot go on; they run in the event loop, right after `view` has the change, and must return quickly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from felix.news import News
from felix.runtime.port import Runtime
from region.cluster.records import ClusterKeys
from region.cluster.transactions import Transaction
from region.cluster.view import ClusterView
from region.metadata.following import Follower
from region.metadata.port import MetadataStore, OutcomeUnknownError
from region.metadata.transaction import Change, Entry, Put, Snapshot, TransactResult

log = logging.getLogger("felix.region.cluster")

Listener = Callable[[Snapshot | Change], None]


class ClusterMirror:
    """Begin with `start`, end with `close`; the store stays open. One event loop, no locks."""

    def __init__(self, store: MetadataStore, region: str, runtime: Runtime) -> None:
        self.view = ClusterView(ClusterKeys(region))
        self._store = store
        self._listeners: list[Listener] = []
        self._news = News()
        self._follower = Follower(
            "The cluster's records",
            store,
            self.view.keys.prefix,
            runtime.random,
            revision=lambda: self.view.revision,
            load=self._load,
            apply=self._apply,
        )

    @property
    def is_current(self) -> bool:
        """False while changes cannot be followed: `view` has what was so before."""
        return self._follower.is_current

    def on_change(self, listener: Listener) -> None:
        """Tell `listener` of all that is known from now on. To be told of everything, before `start`."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Load everything, then follow. Raises UnavailableError."""
        await self._follower.start()

    async def close(self) -> None:
        """Follow no more."""
        await self._follower.close()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what a change of the records brings about. Bound it with a timeout."""
        await self._news.until(holds)

    async def commit(self, made: Transaction) -> TransactResult | None:
        """Send a transaction; None where its answer was lost. What it wrote, or what it met instead, is known in `view` afterwards.

        Raises UnavailableError where it was not sent, or where it is not known what it met, and LeaseLostError.
        """
        try:
            result = await self._store.transact(made.compares, made.writes)
        except OutcomeUnknownError:
            result = None
        if result is None or not result.succeeded:
            self.absorb(*await self.find(compare.key for compare in made.compares))
        else:
            self.absorb(entries_of(made, result), result.revision)
        return result

    async def find(self, keys: Iterable[str]) -> tuple[dict[str, Entry | None], int]:
        """Keys as they stood at the revision, or later. Raises UnavailableError."""
        # A page says at which revision a key is absent, which `get` does not.
        wanted = tuple(dict.fromkeys(keys))
        pages = [await self._store.range(key, limit=1) for key in wanted]
        found = {
            key: next((entry for entry in page.entries if entry.key == key), None)
            for key, page in zip(wanted, pages, strict=True)
        }
        return found, min((page.revision for page in pages), default=0)

    def absorb(self, entries: Mapping[str, Entry | None], revision: int) -> None:
        """Take over single keys before the watch brings them. Listeners are not told: to them the watch will."""
        self.view.absorb({key: entry for key, entry in entries.items() if self._is_ours(key)}, revision)
        self._news.tell()

    async def _load(self) -> None:
        snapshot = await self._store.load(self.view.keys.prefix)
        snapshot = Snapshot(
            tuple(entry for entry in snapshot.entries if self._is_ours(entry.key)), snapshot.revision
        )
        self.view.load(snapshot)
        self._tell(snapshot)

    def _apply(self, change: Change) -> None:
        change = Change(change.revision, tuple(event for event in change.events if self._is_ours(event.key)))
        self.view.apply(change)
        if change.events:
            self._tell(change)
        else:
            self._news.tell()

    def _tell(self, known: Snapshot | Change) -> None:
        self._news.tell()
        for listener in self._listeners:
            try:
                listener(known)
            except Exception:
                # One listener's mistake must not keep the others from seeing brokers come and go.
                log.exception("a listener to the cluster's records failed")

    def _is_ours(self, key: str) -> bool:
        keys = self.view.keys
        return key.startswith((keys.nodes, keys.brokers, keys.pulses, keys.shards, keys.unclean)) or key in (
            keys.controller,
            keys.frozen,
            keys.rebalance,
            keys.alone,
        )


def entries_of(made: Transaction, result: TransactResult) -> dict[str, Entry | None]:
    """What stands under the keys that a transaction wrote, right after it. Create revisions of keys that were there are not known."""
    return {
        write.key: Entry(write.key, write.value, result.revision, result.revision, write.lease)
        if isinstance(write, Put)
        else None
        for write in made.writes
    }
