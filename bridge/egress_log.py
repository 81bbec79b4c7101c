"""The agent's egress log while it runs: opened, opened again where its disk failed, submitted to outside witnesses, and closed.

Invariant: `context.trail` is None whenever the log is not open, or is not known to be what the ledger says; then nothing crosses. On the event loop. Caller:
bridge.agent.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from audit.note import Algorithm, NoteSigner
from audit.origin import egress_origin
from audit.quorum import Quorum
from audit.submission import Submissions, SubmissionStatus
from audit.trail import Trail, TrailStatus
from audit.trail_reopening import LOOK_S, TrailReopening
from audit.trust import RegionTrust, witnesses_of
from bridge.agent_files import AgentFiles
from bridge.config import BridgeConfig, BridgePaths
from bridge.documents import EgressDocuments
from bridge.egress_disk import open_egress, read_ledger, read_words, save_ledger
from bridge.ledger import Ledger
from bridge.link_context import LinkContext
from bridge.link_table import LinkTable
from bridge.reasons import Reasons
from felix.errors import Code, FelixError
from felix.periodic import every
from felix.storage.port import Files

log = logging.getLogger("felix.bridge.egress_log")

TRAIL_AGAIN_S: Final = 1.0
"""How often the egress log is tried while another process has it open."""


class EgressLog:
    """One per agent."""

    def __init__(
        self,
        config: BridgeConfig,
        base: Path,
        paths: BridgePaths,
        files: AgentFiles,
        storage: Files,
        context: LinkContext,
        links: LinkTable,
        documents: EgressDocuments,
        quorum: Quorum | None,
        reasons: Reasons,
    ) -> None:
        self._config = config
        self._base = base
        self._paths = paths
        self._files = files
        self._storage = storage
        self._context = context
        self._links = links
        self._documents = documents
        self._quorum = quorum
        self._reasons = reasons
        self._submissions: Submissions | None = None
        self._opening: asyncio.Future[tuple[Trail, Ledger]] | None = None
        """until it is in use"""
        self._failed: Trail | None = None
        """while it is opened again"""
        self._is_broken = False
        """Whether it cannot be opened, for another reason than that another process has it."""

    # -- how it is -------------------------------------------------------------------------------------

    @property
    def trail(self) -> Trail | None:
        """The log, also while it is opened again."""
        return self._context.trail or self._failed

    def status(self) -> TrailStatus | None:
        """None before it was open."""
        return None if self.trail is None else self.trail.status()

    def is_failed(self) -> bool:
        """Whether it cannot be written, or not be opened for another reason than that another process has it."""
        status = self.status()
        return self._is_broken if status is None else bool(status.failure)

    def witnesses(self) -> list[SubmissionStatus]:
        """How far each outside witness is."""
        return [] if self._submissions is None else self._submissions.status()

    # -- its life --------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Open it, and again where its disk failed."""
        await self._open()
        trail = self._context.open_trail()
        reopening = TrailReopening(trail, self._context.runtime.clock)

        async def look() -> None:
            if reopening.is_due():
                await self._open_again(trail, reopening)

        await every(LOOK_S, look, "the egress log could not be opened again", log)

    async def _open_again(self, trail: Trail, reopening: TrailReopening) -> None:
        """First all links end: they go by what it accepted, and some of that may not be in it. Nothing crosses before the ledger is that of what is."""
        context, failure = self._context, trail.stopped
        assert failure is not None
        context.trail, context.trail_reason, self._failed = None, str(failure), trail
        workers = self._links.workers
        await asyncio.gather(*(worker.interrupt(failure.with_traceback(None)) for worker in workers))
        is_open = await asyncio.to_thread(reopening.open)
        while is_open and trail.stopped is None:
            try:
                context.ledger = await asyncio.to_thread(read_ledger, trail)
                break
            except (FelixError, OSError) as error:
                context.trail_reason = f"The egress log cannot be read: {error}"
                self._reasons.say("the ledger", error)
            await asyncio.sleep(TRAIL_AGAIN_S)
        context.trail, self._failed = trail, None
        for worker in self._links.workers:
            worker.retry()

    async def _open(self) -> None:
        """Open it, or wait for whoever has it open."""
        config, files, context = self._config, self._files, self._context
        origin = egress_origin(config.source, config.mesh, config.name)
        signer = NoteSigner.from_key(origin, files.egress_key, Algorithm.ED25519)
        ml_dsa = files.egress_ml_dsa_key
        also = [NoteSigner.from_ml_dsa(origin, ml_dsa)] if ml_dsa is not None else []
        outside = [each.target(self._base) for each in config.witnesses]
        witnesses = [
            *witnesses_of(files.bundles.values(), config.source),
            *(key for target in outside for key in target.keys),
            *(self._quorum.policy.witness_keys if self._quorum is not None else ()),
        ]
        while True:
            try:
                own = RegionTrust(files.bundles[config.source])
                earlier = own.earlier_keys(origin, (each.key for each in (signer, *also)))
                self._opening = asyncio.ensure_future(
                    asyncio.to_thread(
                        open_egress,
                        self._paths.egress,
                        signer,
                        witnesses,
                        also,
                        earlier,
                        memory=self._paths.egress_begun,
                        files=self._storage,
                        runtime=self._context.runtime,
                    )
                )
                trail, context.ledger = await asyncio.shield(self._opening)
                trail.checkpoints.expect_cosigners(len(config.destinations) + len(config.witnesses))
                self._submissions = Submissions(trail, outside, self._context.runtime)
                self._submissions.start()
                self._documents.recall(await asyncio.to_thread(read_words, trail, context.ledger))
                context.trail, self._opening, self._is_broken = trail, None, False
                log.info("the egress log %s is open, %d leaves", self._paths.egress, trail.status().durable)
                return
            except FelixError as error:
                if str(error) != context.trail_reason:
                    log.warning("the egress log cannot be opened: %s", error)
                context.trail_reason, self._is_broken = str(error), error.code is not Code.CONFLICT
            except Exception as error:
                # A disk, or a mistake of ours: nobody else would open it.
                sentence = f"The egress log {self._paths.egress} cannot be opened: {error}."
                if sentence != context.trail_reason:
                    log.warning("%s", sentence, exc_info=not isinstance(error, OSError))
                context.trail_reason, self._is_broken = sentence, True
            await self.close_opened()
            await asyncio.sleep(TRAIL_AGAIN_S)

    async def close_opened(self) -> None:
        """Let go of a log that was opened, or is still being opened, and is not in use."""
        opening, self._opening = self._opening, None
        if opening is None:
            return
        await asyncio.wait((opening,))
        if opening.exception() is not None:
            # Whoever waited for it tells why.
            return
        trail, _ = opening.result()
        if self._submissions is not None:
            await asyncio.to_thread(self._submissions.stop)
            self._submissions = None
        await asyncio.to_thread(trail.close)

    async def save_snapshot(self) -> None:
        """The ledger's, for the next start."""
        trail = self._context.trail
        if trail is not None:
            try:
                await asyncio.to_thread(save_ledger, trail)
            except (FelixError, OSError) as error:
                self._reasons.say("the ledger's snapshot was not written", error)

    async def close(self) -> None:
        """Let go of it for good, with all that it accepted."""
        trail = self.trail
        if trail is None:
            return
        self._context.trail, self._context.trail_reason = None, "The agent is stopping."
        self._failed = None
        if self._submissions is not None:
            await asyncio.to_thread(self._submissions.stop)
        await asyncio.to_thread(trail.close)
        try:
            await asyncio.to_thread(save_ledger, trail, at_once=True)
        except OSError as error:
            # A shortcut of the next start, which reads the log without it.
            log.warning("the ledger's snapshot was not written: %s", error)
