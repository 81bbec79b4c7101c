"""What forbids or lifts, and the metadata store lost, is put back there: every broker judges by it, also one that begins anew.

The store may have been restored from a backup, or its administrator has taken a document out. Brokers that accepted the document go by it all the
same (region.governance.lasting). One of them, the one that writes the audit log, puts it back.

Invariants: what is put back has taken no other document's place in the store; a word is put back once in PUT_BACK_AGAIN_S at most, whoever takes
it out again; of a grant that the store does not hold nothing is put back, so that what ended long ago may be removed; no other region
gets more room by it. On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from felix.bounded import BoundedMap
from felix.errors import Code, FelixError
from felix.runtime.port import Clock
from felix.tasks import end_tasks
from policy.signed import SignedDocument
from region.governance.document_watch import DocumentWatch
from region.governance.held_documents import STORED, HeldDocuments
from region.governance.trusted_regions import TrustedRegions
from region.metadata.catalog import Catalog
from region.metadata.mirror import CatalogMirror
from region.trust.held_document import grant_of
from region.trust.trust_store import NEWEST_MAX

log = logging.getLogger("felix.region.governance")

LOST_FOR_S: Final = 1.0
"""A store that is restored changes document by document; and who removes a grant takes its words out first, or its halves."""
EACH_S: Final = 0.05
"""Between two of them: every broker judges anew at each."""
PUT_BACK_AGAIN_S: Final = 3_600
FAILED_S: Final = 10.0
"""How soon it is tried again where the store does not answer."""


class PutBack:
    """One per broker."""

    def __init__(
        self,
        held: HeldDocuments,
        regions: TrustedRegions,
        catalog: Catalog,
        mirror: CatalogMirror,
        watch: DocumentWatch,
        writes_log: Callable[[], bool],
        clock: Clock,
    ) -> None:
        """`watch` is told of each change. `writes_log`: whether this broker writes the audit log now."""
        self._held = held
        self._regions = regions
        self._catalog = catalog
        self._mirror = mirror
        self._watch = watch
        self._writes_log = writes_log
        self._clock_s = clock.monotonic
        self._put_s: BoundedMap[str, float] = BoundedMap(NEWEST_MAX)
        """by name in the store, when it was put back last"""
        self._looked_at: object = None
        """what was lost when that was looked at last"""
        self._work: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Put back what is lost, now and at each change."""
        self._work = asyncio.get_running_loop().create_task(self._run(), name="put back")

    async def close(self) -> None:
        """Put back no more."""
        if self._work is not None:
            await end_tasks(self._work)

    async def _run(self) -> None:
        while True:
            await self._watch.until(self._has_news)
            await asyncio.sleep(LOST_FOR_S)
            self._looked_at = self._held.lost()
            try:
                await self._put_back()
            except Exception as error:
                level = logging.ERROR if isinstance(error, FelixError) else logging.CRITICAL
                log.log(level, "what the metadata store lost is not put back yet: %s", error)
                self._looked_at = None
                await asyncio.sleep(FAILED_S)

    def _has_news(self) -> bool:
        return self._held.lost() is not self._looked_at and self._has_work()

    def _has_work(self) -> bool:
        return self._mirror.is_current and self._writes_log() and any(self._held.lost().values())

    async def _put_back(self) -> None:
        """One by one. Raises UnavailableError where the store does not answer."""
        for kind, lost in self._held.lost().items():
            for name, document in lost.items():
                await asyncio.sleep(0)
                put_s = self._put_s.use(name)
                if put_s is not None and self._clock_s() - put_s < PUT_BACK_AGAIN_S:
                    continue
                if not self._has_work() or name not in self._held.lost()[kind]:
                    continue
                if self._has_place(kind, document):
                    await self._put(kind, name, document)
                    await asyncio.sleep(EACH_S)

    async def _put(self, kind: str, name: str, document: SignedDocument) -> None:
        try:
            await self._catalog.put_document(*STORED[kind], name, document.encode_file())
        except FelixError as error:
            if error.code not in (Code.ALREADY_EXISTS, Code.CONFLICT):
                raise
            return
        self._put_s.put(name, self._clock_s())
        log.warning(
            "the metadata store had lost a %s of %s, %s: it is put back",
            document.purpose, document.region, name,
        )  # fmt: skip

    def _has_place(self, kind: str, document: SignedDocument) -> bool:
        """Whether it would be taken if somebody brought it now."""
        region = document.region
        if region not in self._regions.bundles:
            return False
        if kind == "standing" and not self._held.ends_of(grant_of(document)):
            return False
        return region == self._regions.own.region or self._held.has_room(document)
