"""What a broker keeps beside its logs in files of its own, and how their disk treats it: the embedded metadata store, key files, and copies of signed documents.

The store opens itself again (region.metadata.embedded); key files are opened again from here (keys.reopening), and copies tried again. Caller: region.node, once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from felix.runtime.port import Clock
from felix.told import Told
from keys.reopening import KeyFile, KeyFileReopening
from region.metadata.port import MetadataStore
from region.trust.trust_store import Memory

log = logging.getLogger("felix.region.own_files")


class OwnFiles:
    """One per broker."""

    def __init__(
        self, store: MetadataStore, key_files: Sequence[KeyFile], memory: Memory, clock: Clock
    ) -> None:
        self._store = store
        self._memory = memory
        self._keys = [KeyFileReopening(each, clock) for each in key_files]
        self._hung_told = Told(clock.monotonic)

    def not_ready(self) -> str:
        """What their disk keeps the broker from, with what to do; empty where nothing. From any thread."""
        return next(filter(None, [self._store.trouble(), *(each.trouble() for each in self._keys)]), "")

    def problems(self) -> list[str]:
        """What their disk keeps from working, a sentence each with what to do. From any thread."""
        troubles = [self._store.trouble(), *(each.trouble() for each in self._keys), self._memory.trouble()]
        return [*filter(None, troubles)]

    def gauges(self) -> dict[str, float]:
        """For metrics."""
        return {
            "metadata_failed": float(bool(self._store.trouble())),
            "metadata_opened_again": self._store.opened_again,
            "keys_failed": float(any(each.trouble() for each in self._keys)),
            "keys_opened_again": sum(each.opened for each in self._keys),
        }

    async def look(self) -> None:
        """Say in the log what begins and what is over, and open again what is due."""
        if hung := self._store.hung():
            if self._hung_told.begins():
                log.error("%s", hung)
        elif self._hung_told.ends():
            log.warning("the disk of the metadata store answers again")
        self._memory.look()
        for each in self._keys:
            if each.is_due():
                await asyncio.to_thread(each.open)
