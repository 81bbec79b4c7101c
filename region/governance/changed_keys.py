"""Leaves of the region's changed policy and receipt keys, where the command could write none: in a log of which several brokers have copies. On the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial

from audit.trail import Trail
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.names import SpiffeId
from felix.tasks import end_tasks
from keys.bundle import RegionBundle
from region.broker import Broker
from region.document_log import DocumentLog
from region.governance.pin_leaves import until_taken
from region.signing_key_leaves import STALE_HINT, KeyLeaf, stale_key, unlogged

log = logging.getLogger("felix.region.governance")


class ChangedKeys:
    """One per broker. `writes_here`: whether the region's audit log is this broker's to write. `instead`: as `region.signing_key_leaves.stale_key`."""

    def __init__(
        self,
        broker: Broker,
        own: RegionBundle,
        trail: Trail,
        logged: DocumentLog,
        writes_here: Callable[[], bool],
        instead: Collection[bytes] = (),
    ) -> None:
        self._broker = broker
        self._own = own
        self._identity = SpiffeId(own.region, own.mesh, "broker", broker.broker_id)
        self._trail = trail
        self._logged = logged
        self._writes_here = writes_here
        self._instead = instead
        self._writing: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    @property
    def problem(self) -> str:
        """A sentence where the log has got the leaf of a later change, while this broker runs with the bundle of before."""
        return stale_key(self._own, self._logged.signing_keys, self._instead)

    @property
    def refusal(self) -> UnavailableError | None:
        """Why this broker takes nothing any more, and never writes the log: its copy has got the leaf of a later change since it started."""
        return UnavailableError(self.problem, hint=STALE_HINT) if self._over.is_set() else None

    def look(self) -> None:
        """After the log has got leaves: does this broker have the keys of now? Raises `refusal`, here and from now on, where it has not."""
        if not self._over.is_set() and self.problem:
            self._over.set()
            log.error("this broker ends: %s", self.problem)
        if (refusal := self.refusal) is not None:
            raise refusal

    async def ended(self) -> FelixError:
        """Wait until this broker may go on no more; why, as its next start says."""
        await self._over.wait()
        return RequestError(self.problem, code=Code.CONFIG_INVALID, hint=STALE_HINT)

    def log_soon(self) -> None:
        """Write the leaves that the log lacks, where it is written here."""
        if self._writing is None and self._writes_here():
            lacking = unlogged(self._own, self._logged.signing_keys, self._instead)
            if lacking:
                self._writing = asyncio.ensure_future(self._write(lacking))

    async def _write(self, lacking: list[KeyLeaf]) -> None:
        try:
            for said in lacking:
                leaf = said.leaf(self._own.region, self._broker.clock_ms(), str(self._identity))
                await until_taken(
                    partial(self._logged.append_key, leaf),
                    f"the change of the region's {said.role} key", self._trail, self._writes_here,
                )  # fmt: skip
        finally:
            self._writing = None

    async def close(self) -> None:
        """Leaves that are being written are given up; the next start writes them."""
        if self._writing is not None:
            await end_tasks(self._writing)
