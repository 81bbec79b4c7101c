"""Leaves of unclean elections: that acknowledged records may be lost stands in the region's audit log, whoever decided so.

The transaction that has a shard led from such a copy writes a statement beside its record (region.cluster.transactions). The broker that writes the region's audit
log gives each statement that it finds one leaf, and takes it out of the store once that is durable: once, over restarts and over changes of who writes the log, by the
statement's hash (region.evidence.document_log). Also of a stream that was deleted meanwhile. On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from audit.leaf import Leaf
from audit.trail import Trail
from audit.unclean_leaf import UncleanElection, unclean_leaf
from felix.errors import FelixError
from felix.names import SpiffeId
from felix.tasks import end_tasks
from region.cluster.mirror import ClusterMirror
from region.cluster.transactions import Transaction, unchanged
from region.evidence.document_log import DocumentLog
from region.governance.pin_leaves import log_document
from region.metadata.transaction import Change, Delete, Snapshot

log = logging.getLogger("felix.region.governance")

AGAIN_S: Final = 1.0
"""How soon is tried again to take a statement out of a store that did not answer."""


class UncleanLeaves:
    """One per broker of several. `writes_here`: whether the region's audit log is this broker's to write."""

    def __init__(
        self,
        mirror: ClusterMirror,
        identity: SpiffeId,
        trail: Trail,
        logged: DocumentLog,
        writes_here: Callable[[], bool],
        now_ms: Callable[[], int],
    ) -> None:
        self._mirror = mirror
        self._identity = identity
        self._trail = trail
        self._logged = logged
        self._writes_here = writes_here
        self._now_ms = now_ms
        self._writing: asyncio.Task[None] | None = None
        self._closed = False

    def follow(self) -> None:
        """Look now, and at each change of the cluster's records."""
        self._mirror.on_change(self._changed)
        self.look()

    def _changed(self, change: Snapshot | Change) -> None:
        self.look()

    def look(self) -> None:
        """Write the leaves that the log lacks, where it is written here."""
        if self._mirror.view.unclean and self._writing is None and not self._closed and self._writes_here():
            self._writing = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        unclean = self._mirror.view.unclean
        try:
            while unclean and self._writes_here():
                key, said = min(unclean.items())
                if not await log_document(
                    self._logged, said.encode(), partial(self._leaf, said),
                    f"the unclean election of shard {said.shard} of {said.stream}", self._trail, self._writes_here,
                ):  # fmt: skip
                    return
                await self._take_out(key)
        finally:
            self._writing = None

    async def _take_out(self, key: str) -> None:
        """It has its leaf. Where the store does not answer it is found again, and no second leaf is written."""
        view = self._mirror.view
        try:
            await self._mirror.commit(Transaction((unchanged(view, key),), (Delete(key),)))
        except FelixError as error:
            log.warning(
                "the statement of an unclean election has its leaf, and stays in the store for now: %s", error
            )
            await asyncio.sleep(AGAIN_S)

    def _leaf(self, said: UncleanElection) -> Leaf:
        return unclean_leaf(
            said, region=self._identity.region, time_ms=self._now_ms(), writer=str(self._identity)
        )

    async def close(self) -> None:
        """A leaf that is being written is given up; the next start writes it, or whoever goes on with the log."""
        self._closed = True
        if self._writing is not None:
            await end_tasks(self._writing)
