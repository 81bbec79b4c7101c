"""The agent: one process, one identity, one egress log; it keeps links running as the signed documents say.

It follows the documents of its grants in each region, carries to one what the other signed, plans, and tells its workers, at
each change and every second; it reports its links to its own region; every few seconds it has checkpoints cosigned both ways.

Invariants: an agent without an open egress log carries nothing, and of several agents of one identity only the one that
holds the log's lock does; a document is brought nowhere, and nothing crosses under it, before its leaf is durable in that log;
REVOKE is written only after the last link under that grant has ended; a log that the
destination remembers as longer is rolled back, and nothing crosses to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Final

from audit.checkpoint import note_size
from audit.quorum import Quorum
from audit.submission import SubmissionStatus
from audit.trail import Trail
from audit.witness import DiskWitnessStore
from bridge.agent_files import AgentFiles, load_files, load_quorum, region_profile
from bridge.config import BridgeConfig, paths_of
from bridge.cosigning import COSIGN_S, Cosigning
from bridge.document_feed import DocumentFeed
from bridge.document_sync import KINDS, Documents, DocumentSync
from bridge.documents import POLICY, EgressDocuments
from bridge.egress_log import EgressLog
from bridge.endpoint import RegionEndpoint
from bridge.failpoint import Failpoints
from bridge.health import AgentCollector
from bridge.history import require_continued
from bridge.link_context import LinkContext, LinkStats
from bridge.link_table import LinkTable
from bridge.plan import Known, Plan, PlannedLink, Planner, hold_back
from bridge.reasons import Reasons
from bridge.receipted import Receipted
from bridge.region_log import check_region_log
from bridge.renewal import AgentRenewal
from bridge.source_streams import SourceStreams, describe_each
from bridge.tracing import CrossingTracing
from felix.errors import Code, CorruptionError, FelixError, RequestError, UnavailableError
from felix.health import HealthServer
from felix.link import Link
from felix.messages import (
    LinkState,
    ReportLinks,
    Witnessed,
    WitnessedSize,
)
from felix.names import StreamName
from felix.page import in_frames
from felix.peer import TrustBundle
from felix.periodic import every
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.steps import Steps
from felix.storage.disk import SHARED_FILES
from felix.storage.port import Files
from felix.structs import prepare_structs
from felix.tasks import end_tasks
from felix.transport.port import Engine
from policy.grant import GrantBook
from policy.signed import Trusted

log = logging.getLogger("felix.bridge.agent")

PLAN_S: Final = 1.0
"""How often is planned where no document changed: time ends grants too, and streams grow."""
SOON_S: Final = 0.1
"""The same while there is no session with the source, or a document waits for its leaf."""
COLLECT_S: Final = 0.02
"""Documents that come together, of several regions, are planned by once."""
REPORT_S: Final = 1.0
LAG_S: Final = 1.0
"""How often is looked how far the streams go of which links run."""
QUORUM_S: Final = 0.5
"""How often is looked whether a quorum of witnesses has cosigned."""
WITNESS_LAG_MS: Final = 60_000
"""A witness that is this far behind is named in the links' reports."""
EGRESS_HINT: Final = "Restore the log's newest copy; nothing crosses until then."
CLOSE_S: Final = 10.0
"""How long an orderly end waits for links, and again for the last cosignatures."""
PROBLEMS_MAX: Final = 100
"""Documents that are not believed and are logged one by one, at each change."""


class Agent:
    """Made and begun by `start`; ended by `stop`."""

    def __init__(
        self,
        config: BridgeConfig,
        base: Path,
        files: AgentFiles,
        quorum: Quorum | None,
        *,
        engine: Engine | None,
        runtime: Runtime,
        storage: Files,
    ) -> None:
        """`quorum`: without whose cosignatures nothing crosses."""
        self.config = config
        self.paths = paths_of(config, base)
        self.health: HealthServer | None = None
        self._runtime = runtime
        self._clock_ms = runtime.clock.now_ms
        self._reasons = Reasons(log)
        self._quorum = quorum
        reached = (
            (config.source, config.source_addresses, config.source_server_name),
            *((each.region, each.addresses, each.server_name) for each in config.destinations),
        )
        self._endpoints = {
            region: RegionEndpoint(
                region_profile(files.bundles[region], addresses, server_name, files.identity, config.engine),
                files.bundles[region],
                engine,
                runtime,
                is_own=region == config.source,
            )
            for region, addresses, server_name in reached
        }
        self.context = LinkContext(
            bridge=files.identity.spiffe_id,
            identity=files.identity,
            handoff=files.handoff,
            source=self._endpoints[config.source],
            limits=config.limits,
            failpoints=Failpoints.of(os.environ),
            runtime=runtime,
            log_grant=self._log_grant,
            check_history=self._check_history,
            check_receipts=self._check_receipts,
            require_allowed=self._require_allowed,
            held=self._held,
            notice=self._notice,
            tracing=CrossingTracing() if config.tracing.exporter != "none" else None,
        )
        self._egress_documents = EgressDocuments(self.context)
        self._document_sync = DocumentSync(
            self._clock_ms, self._egress_documents.is_logged, self._documents_brought
        )
        self._links = LinkTable(self.context, self._endpoints)
        self._planner = Planner(
            self.context.bridge, [each.region for each in config.destinations], config.limits.links
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._soon = asyncio.Event()
        self._egress_documents.is_newer = self._soon.is_set
        self._known = Known({})
        self._streams = SourceStreams()
        """the source's streams, when the links were last planned"""
        self._reported_in: Link | None = None
        """the session in which links were reported last"""
        self._feeds = {region: self._new_feed(region, each) for region, each in self._endpoints.items()}
        self._book = GrantBook()
        self._book_of: object = None
        self._comparing: dict[str, asyncio.Lock] = {}
        """by destination: one that does not answer keeps the links to no other from opening"""
        self._compared: dict[str, tuple[Link, Link]] = {}
        """The sessions with source and destination in which both regions' logs were compared with what the other cosigned."""
        self._receipted = Receipted(runtime)
        self._shown = DiskWitnessStore(self.paths.egress.with_name("regions"), storage)
        """the newest checkpoints of the regions' own logs that this agent had cosigned"""
        self._cosigning = Cosigning(
            self.context, self._endpoints, config.mesh, self._shown, self._check_receipts, self._reasons
        )
        self._renewal = AgentRenewal(config, base, self.paths, files, self._endpoints, self.context, quorum)
        self._egress = EgressLog(
            config,
            base,
            self.paths,
            files,
            storage,
            self.context,
            self._links,
            self._egress_documents,
            quorum,
            self._reasons,
        )

    # -- life ------------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: BridgeConfig,
        base: Path,
        *,
        engine: Engine | None = None,
        runtime: Runtime = REAL,
        storage: Files = SHARED_FILES,
    ) -> Agent:
        """Read the files and begin. `base` is the folder of bridge.yaml, `storage` what the egress log is in. Raises RequestError
        where the files are not as they must be.
        """
        prepare_structs()
        files = await asyncio.to_thread(load_files, config, paths_of(config, base))
        quorum = None
        if config.require_quorum is not None:
            quorum = await asyncio.to_thread(load_quorum, config, base, files.bundles[config.source])
        agent = cls(config, base, files, quorum, engine=engine, runtime=runtime, storage=storage)
        try:
            agent._begin()
        except BaseException:
            await agent.stop()
            raise
        return agent

    def _begin(self) -> None:
        config = self.config
        if config.health is not None:
            collector = AgentCollector(
                self._stats,
                self._egress.status,
                self._egress.is_failed,
                self._sessions,
                self._egress.witnesses,
                self._cosigning.failed_ms,
                self._quorum_lag_ms,
                lambda: (self._renewal.files.identity.not_after_ms - self._clock_ms()) / 1000,
            )
            self.health = HealthServer(config.health.host, config.health.port, collector, self.not_ready)
        for region, endpoint in self._endpoints.items():
            endpoint.start()
            self._spawn(self._feeds[region].run())
        for work in (
            self._egress.keep(),
            self._plan_loop(),
            every(REPORT_S, self._report, "reporting links failed", log),
            every(LAG_S, self._look_at_shards, "shards could not be looked at", log),
            every(COSIGN_S, self._cosign, "cosigning failed", log),
            self._renewal.keep(),
            self._renewal.follow_pins(),
        ):
            self._spawn(work)
        if self._quorum is not None:
            failure = "looking for a quorum of witnesses failed"
            self._spawn(every(QUORUM_S, self._look_for_quorum, failure, log))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def stop(self) -> None:
        """Finish what is on the way, have the last checkpoint cosigned, close. Safe to call twice."""
        await end_tasks(*self._tasks)
        self._tasks.clear()
        await self._document_sync.close()
        for worker in self._links.workers:
            worker.leave()
        running = self._links.running
        if running:
            await asyncio.wait(running, timeout=CLOSE_S)
        await end_tasks(*running)
        self._links.clear()
        await self._egress.close_opened()
        if self._egress.trail is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._cosigning.round(final=True)
        await self._cosigning.close()
        await self._egress.close()
        for endpoint in self._endpoints.values():
            await endpoint.close()
        if self.health is not None:
            await asyncio.to_thread(self.health.close)
            self.health = None

    # -- what others ask -------------------------------------------------------------------------------

    def links(self) -> list[LinkState]:
        """Every planned link as it stands, by grant, stream and shard."""
        return [state for state, _ in self._links.states()]

    def counts(self) -> tuple[int, int]:
        """Links that are active, and all that are planned."""
        return self._links.counts()

    def stats(self, grant: str, stream: str, shard: int) -> LinkStats:
        """What one link counted. Raises RequestError(NOT_FOUND)."""
        found = self._links.find(grant, stream, shard)
        if found is None:
            raise RequestError(f"There is no link {grant} {stream}/{shard}.", code=Code.NOT_FOUND)
        return found

    def not_ready(self) -> str:
        """Why the agent does not do its work, or an empty string: the egress log, a session, or a link that stands still."""
        context = self.context
        if context.trail is None:
            return context.trail_reason
        failure = context.trail.status().failure or self._held()
        if failure:
            return failure
        for endpoint in self._endpoints.values():
            if not endpoint.is_up:
                return endpoint.reason
        return self._links.stands_still()

    def _stats(self) -> list[tuple[LinkState, LinkStats]]:
        return self._links.states()

    def _quorum_lag_ms(self) -> int | None:
        return None if self._quorum is None else self._quorum.lag_ms(self.context.monotonic_ms())

    def _sessions(self) -> dict[str, bool]:
        return {region: endpoint.is_up for region, endpoint in self._endpoints.items()}

    # -- the egress log --------------------------------------------------------------------------------

    async def _check_history(self, endpoint: RegionEndpoint) -> None:
        """Raises CorruptionError(ROLLED_BACK) where the region cosigned what is not in this log, and where one of the two
        regions cosigned what is not in the other's."""
        trail = self.context.open_trail()
        known = await endpoint.connection().request(WitnessedSize(trail.key.name))
        durable = trail.status().durable
        if known.size > durable:
            raise CorruptionError(
                f"{endpoint.region} cosigned {known.size} leaves of the egress log, which has {durable}: it was rolled "
                "back.",
                code=Code.ROLLED_BACK,
                hint=EGRESS_HINT,
            )
        source = self.context.source
        async with self._comparing.setdefault(endpoint.region, asyncio.Lock()):
            sessions = (source.link(), endpoint.link())
            if self._compared.get(endpoint.region) != sessions:
                if known.cosigned:
                    await asyncio.to_thread(_require_egress, trail, known, endpoint.region)
                await check_region_log(endpoint, source, self.config.mesh, self._shown)
                await check_region_log(source, endpoint, self.config.mesh, self._shown)
                self._compared[endpoint.region] = sessions

    async def _check_receipts(self, endpoint: RegionEndpoint) -> None:
        """Raises CorruptionError(ROLLED_BACK) where the region's log has not all that it gave receipts for."""
        await self._receipted.check(endpoint, self.context.open_trail(), self.context.ledger)

    async def _log_grant(self, row: PlannedLink) -> None:
        """All that a link's grant rests on stands in the egress log, durable on return, and both regions were brought what
        they lacked. Raises UnavailableError, OSError."""
        await self._egress_documents.log(self._is_busy)
        self._egress_documents.require_logged(row.grant)
        self._send_documents(row.destination_region)
        if self._document_sync.is_between(self.config.source, row.destination_region):
            raise UnavailableError(
                f"Documents of {self.config.source} and {row.destination_region} are on their way between them.",
                retry_after_ms=100,
            )

    def _require_allowed(self, row: PlannedLink, now_ms: int) -> None:
        self._egress_documents.require_allowed(
            StreamName.parse(row.stream), row.destination_region, row.grant, now_ms
        )

    def _is_busy(self, grant: str) -> bool:
        """Whether a link under this grant is in session, or its way is not at its end yet."""
        return any(worker.in_session for worker in self._links.workers if worker.row.grant == grant)

    # -- documents, plan, links ------------------------------------------------------------------------

    async def _plan_loop(self) -> None:
        while True:
            pause_s = PLAN_S
            try:
                if not self.context.source.is_up:
                    pause_s = SOON_S
                else:
                    await self._make_book()
                    await self._bring_documents()
                    # A revocation whose last link is about to end does not wait for the next round.
                    if self._egress_documents.is_waiting:
                        pause_s = SOON_S
                    await self._plan()
            except FelixError as error:
                self._reasons.say("plan", error)
            except Exception:
                log.exception("planning failed")
            # Nor does what is new.
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._soon.wait()
                    await asyncio.sleep(COLLECT_S)
            self._soon.clear()

    def _new_feed(self, region: str, endpoint: RegionEndpoint) -> DocumentFeed:
        """Each region is followed by itself: none of them keeps another from being heard. Nor does one in the source's list, which is
        where the agent hears of all of them; of another region's list it needs what that region signed."""
        is_source = endpoint is self.context.source
        kinds = (*KINDS, POLICY) if is_source else KINDS
        return DocumentFeed(
            endpoint,
            kinds,
            self._runtime,
            self._soon.set,
            lambda error: self._reasons.say(f"documents of {region}", error),
            tuple(self._endpoints) if is_source else (region,),
            is_source,
        )

    @property
    def _documents(self) -> dict[str, Documents]:
        """What every region said last that said anything."""
        return {region: feed.held for region, feed in self._feeds.items() if feed.held is not None}

    @property
    def _policy_keys(self) -> Trusted:
        """Of every region that this one trusts, those of now."""
        return {region: endpoint.bundle.policy_keys for region, endpoint in self._endpoints.items()}

    async def _bring_documents(self) -> None:
        """Their leaves into the egress log, then on the way to each region what the other one signed."""
        try:
            await self._egress_documents.log(self._is_busy)
        except (FelixError, OSError) as error:
            # What is not in the log is brought nowhere; what forbids counts for the links all the same.
            self._reasons.say("documents", error)
        for region in self._endpoints:
            self._send_documents(region)

    def _send_documents(self, region: str) -> None:
        """To a destination what the source signed, and back."""
        source, endpoint = self.context.source, self._endpoints.get(region)
        documents = self._documents
        here, there = documents.get(source.region), documents.get(region)
        if endpoint is None or endpoint is source or here is None or there is None:
            return
        for giver, taker, signer, to in ((here, there, source, endpoint), (there, here, endpoint, source)):
            if to.is_up:
                self._document_sync.send(giver, taker, signer.region, to.connection(), self._policy_keys)

    def _documents_brought(self, taken: int) -> None:
        self.context.failpoints.at("documents-brought")
        if taken:
            # It is read back at once.
            for feed in self._feeds.values():
                feed.look()

    async def _make_book(self) -> None:
        """Anew where a document changed, the egress log has another word, or a region is trusted by another bundle."""
        listed, bundles = self._documents, [endpoint.bundle for endpoint in self._endpoints.values()]
        if self._book_of == (listed, self._egress_documents.said.changes, bundles):
            return
        trusted = self._policy_keys
        anchors = TrustBundle(bundle.anchor() for bundle in bundles)
        self._book = await self._egress_documents.read(listed, trusted, anchors)
        # What a region said is never changed: it says something else.
        self._book_of = (listed, self._egress_documents.said.changes, bundles)
        problems = self._book.problems
        for problem in problems[:PROBLEMS_MAX]:
            log.error("a document of %s is not believed: %s", problem.document.region, problem.sentence)
        if len(problems) > PROBLEMS_MAX:
            log.error("%d more documents are not believed", len(problems) - PROBLEMS_MAX)
        self._hold_back()

    async def _plan(self) -> None:
        """Tell the workers what the book says."""
        connection = self.context.source.connection()
        known = await self._streams.list_known(
            connection, self._book, self.context.bridge, self._known.streams
        )
        self._known = known
        steps = self._planner.plan(self._book, known, self._clock_ms())
        await self._links.tell(await self._stepped(steps), known.streams)

    async def _stepped(self, steps: Steps[Plan]) -> Plan:
        """What the steps end with; all else of the agent has its turn in between."""
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                plan: Plan = ended.value
                return plan
            await asyncio.sleep(0)

    def _hold_back(self) -> None:
        """Links that the book does not let run any more hear of it before anything of it is written or asked: a pause holds for them from
        its leaf on, however many documents stand behind it."""
        destinations, now = [each.region for each in self.config.destinations], self._clock_ms()
        self._links.hold_back(lambda row: hold_back(self._book, self.context.bridge, destinations, row, now))

    async def _look_at_shards(self) -> None:
        """How far the streams go of which links run or ran under a pattern: each that is named by a grant is described for the plan."""
        source, described = self.context.source, self._known.streams
        names = [
            name
            for name in sorted(self._links.followed_streams())
            if name in described and not described[name].state
        ]
        if source.is_up and names:
            await describe_each(source.connection(), names, self._links.hear)

    # -- reporting, cosigning, renewal -----------------------------------------------------------------

    async def _report(self) -> None:
        source = self.context.source
        if not source.is_up:
            return
        session, before = source.link(), self._reported_in
        try:
            # Part by part: a pattern may name a thousand streams.
            for part in in_frames(self._links.reports(anew=session is not before)):
                self._reported_in = None
                await source.connection().request(ReportLinks(part))
            self._reported_in = session
        except FelixError as error:
            self._reasons.say("report", error)

    async def _cosign(self) -> None:
        await self._cosigning.round()
        await self._egress.save_snapshot()

    async def _look_for_quorum(self) -> None:
        assert self._quorum is not None
        trail, before = self.context.trail, self._held()
        if trail is not None:
            self._quorum.update(
                self.context.monotonic_ms(), trail.checkpoints.cosigned(), trail.status().durable
            )
        if bool(self._held()) is not bool(before):
            log.warning("%s", self._held() or "A quorum of witnesses has cosigned; links go on.")
            for worker in self._links.workers:
                worker.wake()

    def _held(self) -> str:
        return "" if self._quorum is None else self._quorum.refuses(self.context.monotonic_ms())

    def _notice(self) -> str:
        log_status = self._egress.status()
        behind = [status for status in self.witnesses() if status.lag_ms >= WITNESS_LAG_MS]
        said = [] if log_status is None else list(filter(None, [log_status.failure]))
        said += [
            f"The witness {status.witness} is {status.lag_ms // 1000} s behind: {status.sentence or 'it does not answer'}"
            for status in behind
        ]
        return " ".join([*said, *self._cosigning.troubles(), *self._renewal.troubles()])

    def witnesses(self) -> list[SubmissionStatus]:
        """How far each outside witness is."""
        return self._egress.witnesses()


def _require_egress(trail: Trail, known: Witnessed, witness: str) -> None:
    """Raises RolledBackError where the egress log is not the one that the witness cosigned. Blocks on disk."""
    current = trail.publish()
    proof = trail.checkpoints.consistency_proof(known.size, note_size(current))
    require_continued(known.cosigned, current, proof, log="the egress log", witness=witness, hint=EGRESS_HINT)
