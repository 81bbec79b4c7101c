"""Leaves of pins: whom this region trusts, and since when, stands in its own audit log, as its policies do.

What counts does not wait for its leaf. The broker that writes the region's audit log gives each pin that it goes by one leaf, of the kind KEY: once,
over restarts too. A store and copies of before the comparison, put back beside a log that goes on, so make no broker believe what was believed
then (region.evidence.document_log). On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from hashlib import sha256
from typing import Final

from audit.leaf import Leaf
from audit.pin_leaf import pin_leaf
from audit.trail import Trail
from felix.errors import FelixError
from felix.names import SpiffeId
from felix.tasks import end_tasks
from keys.pin import SignedPin
from region.broker import Broker
from region.evidence.document_log import DocumentLog

log = logging.getLogger("felix.region.governance")

AGAIN_S: Final = 1.0
"""How soon a leaf is tried again that the audit log did not take."""
WAIT_S: Final = 10.0
"""How long whoever brings a pin waits for its leaf. It counts before that."""


async def until_taken(
    append: Callable[[], Awaitable[object]], what: str, trail: Trail, writes_here: Callable[[], bool]
) -> bool:
    """Call `append` until the audit log takes it; False where the log is written here no more, or by nobody before a restart."""
    told = ""
    while writes_here():
        try:
            await append()
        except (FelixError, OSError) as error:
            if str(error) != told:
                told = str(error)
                log.error("the audit log did not take %s: %s", what, error)
            if trail.is_over:
                return False  # nothing crosses any more
            await asyncio.sleep(AGAIN_S)
        else:
            return True
    return False


async def log_document(
    logged: DocumentLog,
    document: bytes,
    leaf: Callable[[], Leaf],
    what: str,
    trail: Trail,
    writes_here: Callable[[], bool],
) -> bool:
    """Give a document that nobody waits for its leaf, once; False where the log is written here no more, or by nobody before a restart."""
    if await until_taken(lambda: logged.append(document, leaf), what, trail, writes_here):
        return True
    if not writes_here():
        # Whoever goes on with the log writes it, and this broker asks nobody whether it stands: as one that never tried, it crosses on.
        logged.lacks(sha256(document).digest())
    return False


class PinLeaves:
    """One per broker. `writes_here`: whether the region's audit log is this broker's to write."""

    def __init__(
        self,
        broker: Broker,
        region: str,
        mesh: str,
        trail: Trail,
        logged: DocumentLog,
        writes_here: Callable[[], bool],
    ) -> None:
        self._broker = broker
        self._identity = SpiffeId(region, mesh, "broker", broker.broker_id)
        self._trail = trail
        self._logged = logged
        self._writes_here = writes_here
        self._stand: set[bytes] = set()
        """signatures of pins that have their leaf"""
        self._writing: dict[bytes, asyncio.Task[None]] = {}
        self._actors: dict[bytes, SpiffeId] = {}

    def log_soon(self, pins: Iterable[SignedPin]) -> None:
        """Write the leaves that these lack, where the log is written here."""
        for pin in pins:
            name = pin.signature
            if name not in self._stand and name not in self._writing and self._writes_here():
                self._writing[name] = asyncio.ensure_future(self._write(pin))

    def name_actor(self, pin: SignedPin, actor: SpiffeId) -> None:
        """The pin's leaf, if it gets one, is to say that `actor` put it."""
        if pin.signature not in self._stand:
            self._actors[pin.signature] = actor

    async def wait(self, pin: SignedPin) -> None:
        """Until a pin has its leaf, where that is being written here; no longer than WAIT_S."""
        if (task := self._writing.get(pin.signature)) is not None:
            await asyncio.wait({task}, timeout=WAIT_S)

    async def _write(self, pin: SignedPin) -> None:
        try:
            await self._append(pin)
        finally:
            del self._writing[pin.signature]

    async def _append(self, pin: SignedPin) -> None:
        if await log_document(
            self._logged, pin.encode(), lambda: self._leaf(pin),
            f"the pin of {pin.bundle.region}", self._trail, self._writes_here,
        ):  # fmt: skip
            self._stand.add(pin.signature)
            self._actors.pop(pin.signature, None)

    def _leaf(self, pin: SignedPin) -> Leaf:
        actor = self._actors.get(pin.signature) or self._identity
        return pin_leaf(pin, time_ms=self._broker.clock_ms(), actor=str(actor))

    async def close(self) -> None:
        """Leaves that are being written are given up; the next start writes them."""
        await end_tasks(*self._writing.values())
