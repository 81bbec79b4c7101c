"""What one region shows this bridge: listed once, then followed.

The region's broker says with each list which revision it is of, and answers a later question once there is another one. A broker
of the version before gives no revision; it is asked again every POLL_S. After a reconnect the same question is asked again:
a revision is of what is shown, whichever broker says it.

A region that always has something new is listed at a steady pace, and the more slowly the more is new: it is another's, and may
say what it likes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from bridge.document_sync import Documents, list_documents
from bridge.endpoint import RegionEndpoint
from felix.connection import RegionConnection
from felix.errors import FelixError
from felix.messages import ListDocuments
from felix.rate import TokenBucket
from felix.runtime.port import Runtime

log = logging.getLogger("felix.bridge.document_feed")

POLL_S: Final = 1.0
"""How often a broker is asked that cannot say when there is something new, and after an error."""
LIST_PER_S: Final = 1.0
"""How often documents of one region are listed that change all the time, after LIST_BURST: as often as where they are polled."""
LIST_BURST: Final = 20
"""A grant is five documents that come one after the other, and a few grants may be given at once."""
NEW_DOCUMENTS: Final = 500
"""So many documents of a list that were not in the one before count as one list more: each has a signature to verify, which took 0.3 ms."""
WAIT_MS: Final = 20_000
"""How long the broker is asked to wait for something new: well below what a request may take."""
SESSION_LOOK_S: Final = 0.1
"""How often is looked whether there is a session again."""


class DocumentFeed:
    """One region's documents. `changed` is called after each list that differs from the one before; `failed` with what kept the
    region from being heard."""

    def __init__(
        self,
        endpoint: RegionEndpoint,
        kinds: tuple[str, ...],
        runtime: Runtime,
        changed: Callable[[], None],
        failed: Callable[[FelixError], None],
        signers: Collection[str] = (),
        is_own: bool = False,
    ) -> None:
        """`signers`: regions of which each has room of its own in the list. `is_own`: it is the agent's own region."""
        self.held: Documents | None = None
        """What the region said last, by kind and id; None before it said anything."""
        self._endpoint = endpoint
        self._kinds = kinds
        self._signers = signers
        self._is_own = is_own
        self._changed = changed
        self._failed = failed
        self._monotonic_s = runtime.clock.monotonic
        self._pace = TokenBucket(LIST_PER_S, LIST_BURST, self._monotonic_s())
        self._look = asyncio.Event()

    def look(self) -> None:
        """There may be something new: where the region is polled, ask now."""
        self._look.set()

    async def run(self) -> None:
        """List, follow, and go on for ever."""
        while True:
            try:
                if self._endpoint.is_up:
                    await self._follow(self._endpoint.connection())
                await self._pause(POLL_S if self._endpoint.is_up else SESSION_LOOK_S)
            except FelixError as error:
                self._failed(error)
                await asyncio.sleep(POLL_S)
            except Exception:
                log.exception("reading the documents of %s failed", self._endpoint.region)
                await asyncio.sleep(POLL_S)

    async def _follow(self, connection: RegionConnection) -> None:
        """List, and again whenever there is something new; returns where the broker cannot say so."""
        # Nor does a region come round the pace by a new session, or as a broker that gives no revision.
        await asyncio.sleep(self._pace.wait_s(self._monotonic_s()))
        while True:
            held, revision = await list_documents(connection, self._kinds, self._signers, self._is_own)
            if held != self.held:
                self._pace.charge(_new_in(held, self.held or {}) / NEW_DOCUMENTS, self._monotonic_s())
                self.held = held
                self._changed()
            if not revision:
                return
            known = revision
            while known == revision:
                # A region that answers at once, whatever is asked, is asked at the same pace.
                await asyncio.sleep(self._pace.wait_s(self._monotonic_s()))
                self._pace.charge(1, self._monotonic_s())
                known = await _next_revision(connection, revision)

    async def _pause(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._look.wait()
        self._look.clear()


def _new_in(held: Documents, before: Documents) -> int:
    """How many documents are in this list and were not in the one before."""
    return sum(
        before.get(kind, {}).get(name) != data
        for kind, listed in held.items()
        for name, data in listed.items()
    )


async def _next_revision(connection: RegionConnection, known: bytes) -> bytes:
    """Another revision than is known, as soon as there is one; the same one after WAIT_MS. Raises what the region refuses it
    with, UnavailableError."""
    return (await connection.request(ListDocuments("deny", "", 1, known, WAIT_MS))).revision
