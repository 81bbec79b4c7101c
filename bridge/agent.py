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
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from audit.asked import REGION_PAUSE_MS_MAX, Asked, answered_note, name_keys
from audit.checkpoint import note_size
from audit.note import Algorithm, NoteSigner, parse_note
from audit.origin import egress_origin
from audit.quorum import Quorum
from audit.submission import Submissions, SubmissionStatus
from audit.trail import Trail, TrailStatus
from audit.trail_reopening import LOOK_S, TrailReopening
from audit.trust import RegionTrust, witnesses_of
from audit.witness import DiskWitnessStore
from audit.witness_policy import WitnessPolicy
from bridge.config import BridgeConfig, BridgePaths, paths_of
from bridge.document_feed import DocumentFeed
from bridge.document_sync import KINDS, Documents, DocumentSync
from bridge.documents import POLICY, EgressDocuments
from bridge.egress_disk import open_egress, read_ledger, read_words, save_ledger
from bridge.endpoint import RegionEndpoint
from bridge.failpoint import Failpoints
from bridge.health import AgentCollector
from bridge.history import require_continued
from bridge.ledger import Ledger
from bridge.link_context import LinkContext, LinkStats
from bridge.link_table import LinkTable
from bridge.pins import Pins, list_pins
from bridge.plan import Known, Plan, PlannedLink, Planner, hold_back
from bridge.receipted import Receipted
from bridge.region_log import Askings, check_region_log, cosign_region_log
from bridge.source_streams import SourceStreams, describe_each
from bridge.tracing import CrossingTracing
from felix.errors import Code, CorruptionError, FelixError, RequestError, TamperError, UnavailableError
from felix.expiry import Life, Stage, stage_of, until_text
from felix.health import HealthServer
from felix.identity import Identity
from felix.identity_file import load_identity
from felix.link import Link
from felix.messages import (
    Cosign,
    LinkState,
    ReportLinks,
    Witnessed,
    WitnessedSize,
)
from felix.names import SpiffeId, StreamName, trust_domain
from felix.page import in_frames
from felix.peer import TrustBundle
from felix.periodic import every
from felix.profile import Profile
from felix.renewal import request_renewal, store_renewed
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.steps import Steps
from felix.storage.disk import SHARED_FILES
from felix.storage.port import Files
from felix.structs import prepare_structs
from felix.tasks import end_tasks
from felix.transport.port import Engine
from keys.bundle import RegionBundle, decode_bundle
from keys.hybrid import HybridKeyPair
from keys.key_file import load_key_pair, load_ml_dsa_key, load_signing_key
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey
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
COSIGN_S: Final = 3.0
CROWDED: Final = (Code.CONFLICT, Code.LIMIT_RATE)
"""What a cosignature is kept away by for as long as others go on: shown, where another failure that ends by itself is not."""
COSIGN_WAIT_S: Final = 10.0
"""How long a round waits for regions to cosign before the ledger's snapshot is written and the next one begins with the others."""
QUORUM_S: Final = 0.5
"""How often is looked whether a quorum of witnesses has cosigned."""
WITNESS_LAG_MS: Final = 60_000
"""A witness that is this far behind is named in the links' reports."""
RENEW_S: Final = 30.0
"""How often identity and bundles are read again, so that renewed ones are taken."""
PINS_LOOK_S: Final = 1.0
"""How soon after a session with the source region begins is asked whom that trusts; then every RENEW_S."""
EGRESS_HINT: Final = "Restore the log's newest copy; nothing crosses until then."
TRAIL_AGAIN_S: Final = 1.0
"""How often the egress log is tried while another process has it open."""
CLOSE_S: Final = 10.0
"""How long an orderly end waits for links, and again for the last cosignatures."""
PROBLEMS_MAX: Final = 100
"""Documents that are not believed and are logged one by one, at each change."""


class _Uncosigned(NamedTuple):
    """Why cosigning with a region fails: a bundle that was not given again, others that are always first, or lines that it leaves out."""

    since_ms: int
    """of the monotonic clock"""
    sentence: str


class AgentFiles(NamedTuple):
    """What an agent reads from disk when it starts."""

    identity: Identity
    handoff: HybridKeyPair
    egress_key: SigningKey
    egress_ml_dsa_key: MlDsaKey | None
    bundles: dict[str, RegionBundle]


def load_files(config: BridgeConfig, paths: BridgePaths) -> AgentFiles:
    """Read and check them. Blocks. Raises RequestError with the file that is missing or wrong."""
    identity = load_identity(paths.identity)
    wanted = SpiffeId(config.source, config.mesh, "bridge", config.name)
    if identity.spiffe_id != wanted:
        raise RequestError(
            f"{paths.identity} is of {identity.spiffe_id}; this bridge is {wanted}.", code=Code.CONFIG_INVALID
        )
    bundles = {
        region: _load_bundle(path, region, config.mesh)
        for region, path in ((config.source, paths.bundle), *paths.trusted.items())
    }
    named = bool(config.egress_ml_dsa_key)
    ml_dsa_key = (
        load_ml_dsa_key(paths.egress_ml_dsa_key) if named or paths.egress_ml_dsa_key.exists() else None
    )
    return AgentFiles(
        identity, load_key_pair(paths.handoff_key), load_signing_key(paths.egress_key), ml_dsa_key, bundles
    )


def load_quorum(config: BridgeConfig, base: Path, own: RegionBundle) -> Quorum:
    """The quorum that nothing crosses without. `own`: of the region whose log it is. Blocks. Raises RequestError."""
    wanted = config.require_quorum
    assert wanted is not None
    policy = wanted.load(base)
    _check_quorum(policy, own)
    return Quorum(policy, wanted.max_lag)


def _check_quorum(policy: WitnessPolicy, own: RegionBundle) -> None:
    """That no witness of the policy is the own region's, by its name or by any key of the region. Raises RequestError."""
    domain, held = f"{trust_domain(own.region, own.mesh)}/", RegionTrust(own).public_keys
    for key in policy.witness_keys:
        if key.name.startswith(domain) or key.public in held:
            told = "a witness" if key.name.startswith(domain) else "whose key is one"
            raise RequestError(
                f"The policy of require_quorum names {key.name}, {told} of the region whose log it is.",
                code=Code.CONFIG_INVALID,
                hint="A region does not vouch for itself; name other regions' witnesses, or outside ones.",
            )


def _load_bundle(path: Path, region: str, mesh: str) -> RegionBundle:
    try:
        bundle = decode_bundle(path.read_bytes()).bundle
    except OSError as error:
        raise RequestError(
            f"The bundle of {region} cannot be read from {path}: {error.strerror or error}.",
            code=Code.NOT_FOUND,
            hint="Have that region export its bundle, and trust it with `felix region trust`.",
        ) from error
    if (bundle.region, bundle.mesh) != (region, mesh):
        raise RequestError(f"{path} is the bundle of {bundle.region}.{bundle.mesh}, not of {region}.{mesh}.")
    return bundle


def region_profile(
    bundle: RegionBundle, addresses: tuple[str, ...], server_name: str, identity: Identity, engine: str
) -> Profile:
    """How a region of this bundle is reached."""
    return Profile(
        region=bundle.region,
        mesh=bundle.mesh,
        addresses=addresses,
        authority=bundle.root_pem.encode(),
        identity=identity,
        server_name=server_name,
        engine=engine,
    )


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
        self.base = base
        self.paths = paths_of(config, base)
        self.health: HealthServer | None = None
        self._runtime = runtime
        self._storage = storage
        self._clock_ms = runtime.clock.now_ms
        self._files = files
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
        self._reasons: dict[str, str] = {}
        self._feeds = {region: self._new_feed(region, each) for region, each in self._endpoints.items()}
        self._book = GrantBook()
        self._book_of: object = None
        self._submissions: Submissions | None = None
        self._opening: asyncio.Future[tuple[Trail, Ledger]] | None = None
        """of the egress log, until that is in use"""
        self._failed_trail: Trail | None = None
        """the egress log, while it is opened again"""
        self._is_log_broken = False
        """Whether the egress log cannot be opened, for another reason than that another process has it."""
        self._pins = Pins(self.paths.trusted)
        self._pinned_as: Link | None = None
        """the session in which the source region was asked last whom it trusts"""
        self._pins_due_s = 0.0
        self._renewing = asyncio.Lock()
        self._expiry_told = Stage.FRESH
        self._expiry_reasons: set[Code] = set()
        """why the identity could not be renewed, as far as it was told at this stage: each once"""
        self._comparing: dict[str, asyncio.Lock] = {}
        """by destination: one that does not answer keeps the links to no other from opening"""
        self._compared: dict[str, tuple[Link, Link]] = {}
        """The sessions with source and destination in which both regions' logs were compared with what the other cosigned."""
        self._cosigning: dict[str, asyncio.Task[None]] = {}
        self._askings: Askings = {}
        self._receipted = Receipted(runtime)
        self._shown = DiskWitnessStore(self.paths.egress.with_name("regions"), storage)
        """the newest checkpoints of the regions' own logs that this agent had cosigned"""
        self._uncosigned: dict[str, _Uncosigned] = {}
        """regions with which cosigning fails"""

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
                self._trail_status,
                self._log_failed,
                self._sessions,
                self.witnesses,
                self._uncosigned_ms,
                self._quorum_lag_ms,
                lambda: (self._files.identity.not_after_ms - self._clock_ms()) / 1000,
            )
            self.health = HealthServer(config.health.host, config.health.port, collector, self.not_ready)
        for region, endpoint in self._endpoints.items():
            endpoint.start()
            self._spawn(self._feeds[region].run())
        for work in (
            self._keep_log(),
            self._plan_loop(),
            every(REPORT_S, self._report, "reporting links failed", log),
            every(LAG_S, self._look_at_shards, "shards could not be looked at", log),
            every(COSIGN_S, self._cosign, "cosigning failed", log),
            every(RENEW_S, self._renew, "identity and bundles could not be read again", log),
            every(PINS_LOOK_S, self._take_pins, "the source region's pins could not be taken", log),
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
        await self._close_opened()
        trail = self.context.trail or self._failed_trail
        if trail is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._cosign_all(final=True)
        await end_tasks(*self._cosigning.values())
        if trail is not None:
            self.context.trail, self.context.trail_reason = None, "The agent is stopping."
            self._failed_trail = None
            if self._submissions is not None:
                await asyncio.to_thread(self._submissions.stop)
            await asyncio.to_thread(trail.close)
            try:
                await asyncio.to_thread(save_ledger, trail, at_once=True)
            except OSError as error:
                # A shortcut of the next start, which reads the log without it.
                log.warning("the ledger's snapshot was not written: %s", error)
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

    def _trail_status(self) -> TrailStatus | None:
        trail = self.context.trail or self._failed_trail
        return None if trail is None else trail.status()

    def _log_failed(self) -> bool:
        status = self._trail_status()
        return self._is_log_broken if status is None else bool(status.failure)

    def _monotonic_ms(self) -> int:
        return int(self._runtime.clock.monotonic() * 1000)

    def _quorum_lag_ms(self) -> int | None:
        return None if self._quorum is None else self._quorum.lag_ms(self._monotonic_ms())

    def _sessions(self) -> dict[str, bool]:
        return {region: endpoint.is_up for region, endpoint in self._endpoints.items()}

    # -- the egress log --------------------------------------------------------------------------------

    async def _keep_log(self) -> None:
        """Open it, and again where its disk failed."""
        await self._open_log()
        trail = self.context.open_trail()
        reopening = TrailReopening(trail, self._runtime.clock)

        async def look() -> None:
            if reopening.is_due():
                await self._open_again(trail, reopening)

        await every(LOOK_S, look, "the egress log could not be opened again", log)

    async def _open_again(self, trail: Trail, reopening: TrailReopening) -> None:
        """First all links end: they go by what it accepted, and some of that may not be in it. Nothing crosses before the ledger is that of what is."""
        context, failure = self.context, trail.stopped
        assert failure is not None
        context.trail, context.trail_reason, self._failed_trail = None, str(failure), trail
        workers = self._links.workers
        await asyncio.gather(*(worker.interrupt(failure.with_traceback(None)) for worker in workers))
        is_open = await asyncio.to_thread(reopening.open)
        while is_open and trail.stopped is None:
            try:
                context.ledger = await asyncio.to_thread(read_ledger, trail)
                break
            except (FelixError, OSError) as error:
                context.trail_reason = f"The egress log cannot be read: {error}"
                self._say("the ledger", error)
            await asyncio.sleep(TRAIL_AGAIN_S)
        context.trail, self._failed_trail = trail, None
        for worker in self._links.workers:
            worker.retry()

    async def _open_log(self) -> None:
        """Open it, or wait for whoever has it open."""
        config, files, context = self.config, self._files, self.context
        origin = egress_origin(config.source, config.mesh, config.name)
        signer = NoteSigner.from_key(origin, files.egress_key, Algorithm.ED25519)
        ml_dsa = files.egress_ml_dsa_key
        also = [NoteSigner.from_ml_dsa(origin, ml_dsa)] if ml_dsa is not None else []
        outside = [each.target(self.base) for each in config.witnesses]
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
                        self.paths.egress,
                        signer,
                        witnesses,
                        also,
                        earlier,
                        memory=self.paths.egress_begun,
                        files=self._storage,
                        runtime=self._runtime,
                    )
                )
                trail, context.ledger = await asyncio.shield(self._opening)
                trail.checkpoints.expect_cosigners(len(config.destinations) + len(config.witnesses))
                self._submissions = Submissions(trail, outside, self._runtime)
                self._submissions.start()
                self._egress_documents.recall(await asyncio.to_thread(read_words, trail, context.ledger))
                context.trail, self._opening, self._is_log_broken = trail, None, False
                log.info("the egress log %s is open, %d leaves", self.paths.egress, trail.status().durable)
                return
            except FelixError as error:
                if str(error) != context.trail_reason:
                    log.warning("the egress log cannot be opened: %s", error)
                context.trail_reason, self._is_log_broken = str(error), error.code is not Code.CONFLICT
            except Exception as error:
                # A disk, or a mistake of ours: nobody else would open it.
                sentence = f"The egress log {self.paths.egress} cannot be opened: {error}."
                if sentence != context.trail_reason:
                    log.warning("%s", sentence, exc_info=not isinstance(error, OSError))
                context.trail_reason, self._is_log_broken = sentence, True
            await self._close_opened()
            await asyncio.sleep(TRAIL_AGAIN_S)

    async def _close_opened(self) -> None:
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
                self._say("plan", error)
            except Exception:
                log.exception("planning failed")
            # Nor does what is new.
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._soon.wait()
                    await asyncio.sleep(COLLECT_S)
            self._soon.clear()

    def _say(self, what: str, error: FelixError | OSError) -> None:
        """Log a failure of a loop, once for each sentence."""
        sentence = str(error)
        if self._reasons.get(what) != sentence:
            self._reasons[what] = sentence
            log.warning("%s: %s", what, error)

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
            lambda error: self._say(f"documents of {region}", error),
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
            self._say("documents", error)
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
            self._say("report", error)

    async def _cosign(self) -> None:
        await self._cosign_all()
        trail = self.context.trail
        if trail is not None:
            try:
                await asyncio.to_thread(save_ledger, trail)
            except (FelixError, OSError) as error:
                self._say("the ledger's snapshot was not written", error)

    async def _look_for_quorum(self) -> None:
        assert self._quorum is not None
        trail, before = self.context.trail, self._held()
        if trail is not None:
            self._quorum.update(self._monotonic_ms(), trail.checkpoints.cosigned(), trail.status().durable)
        if bool(self._held()) is not bool(before):
            log.warning("%s", self._held() or "A quorum of witnesses has cosigned; links go on.")
            for worker in self._links.workers:
                worker.wake()

    def _held(self) -> str:
        return "" if self._quorum is None else self._quorum.refuses(self._monotonic_ms())

    def _notice(self) -> str:
        log_status = self._trail_status()
        behind = [status for status in self.witnesses() if status.lag_ms >= WITNESS_LAG_MS]
        said = [] if log_status is None else list(filter(None, [log_status.failure]))
        said += [
            f"The witness {status.witness} is {status.lag_ms // 1000} s behind: {status.sentence or 'it does not answer'}"
            for status in behind
        ]
        failed_ms = self._uncosigned_ms()
        said += [
            f"Cosigning with {region} has failed for {failed_ms[region] // 1000} s: {each.sentence}"
            for region, each in sorted(self._uncosigned.items())
        ]
        return " ".join(said)

    def witnesses(self) -> list[SubmissionStatus]:
        """How far each outside witness is."""
        return [] if self._submissions is None else self._submissions.status()

    def _uncosigned_ms(self) -> dict[str, int]:
        """For how long cosigning with each other region has failed; 0 where it does not."""
        now_ms, failed = self._monotonic_ms(), self._uncosigned
        others = (region for region, each in self._endpoints.items() if each is not self.context.source)
        return {region: now_ms - failed[region].since_ms if region in failed else 0 for region in others}

    async def _cosign_all(self, *, final: bool = False) -> None:
        """The egress log by every destination; each region's own log by the other. `final`: up to the last leaf.

        All at once: one that does not answer is not waited for in the next round, and delays no other. What is under way before
        the final round is ended, since it may be about an older checkpoint.
        """
        if final:
            await end_tasks(*self._cosigning.values())
        for region, endpoint in self._endpoints.items():
            if endpoint is not self.context.source and endpoint.is_up and region not in self._cosigning:
                self._cosigning[region] = asyncio.ensure_future(self._cosign_with(region, endpoint, final))
        if self._cosigning:
            await asyncio.wait(self._cosigning.values(), timeout=None if final else COSIGN_WAIT_S)

    async def _cosign_with(self, region: str, endpoint: RegionEndpoint, final: bool) -> None:
        source = self.context.source
        failed = list[str]()
        try:
            # One that fails keeps no other from being cosigned.
            failed += await self._why(f"cosigning with {region}", self._cosign_egress(endpoint, final))
            for of, witness in ((endpoint, source), (source, endpoint)):
                if endpoint.is_up and source.is_up:
                    work = self._cosign_region_log(of, witness)
                    failed += await self._why(f"cosigning the log of {of.region} by {witness.region}", work)
            if any(failed):
                held = self._uncosigned.get(region)
                since_ms = self._monotonic_ms() if held is None else held.since_ms
                self._uncosigned[region] = _Uncosigned(since_ms, " ".join(filter(None, failed)))
            elif not failed:
                self._uncosigned.pop(region, None)
        except Exception:
            # A full disk, or a mistake of ours: the next round tries again, or nothing is witnessed any more.
            log.exception("cosigning with %s failed", region)
        finally:
            del self._cosigning[region]

    async def _cosign_region_log(self, of: RegionEndpoint, witness: RegionEndpoint) -> None:
        if of is not self.context.source and self.context.trail is not None:
            # Once a log that was put back is cosigned as it goes on, its newest copy is another history.
            await self._check_receipts(of)
        await cosign_region_log(
            of, witness, self.config.mesh, self._askings, self._monotonic_ms(), self._shown
        )

    async def _why(self, what: str, work: Awaitable[None]) -> list[str]:
        """What `work` failed with, as the status shows it: empty where it ends by itself. None where it did not fail."""
        try:
            await work
        except FelixError as error:
            self._say(what, error)
            if error.code is Code.ROLLED_BACK:
                log.error("%s: %s", what, error)
            ends_by_itself = isinstance(error, UnavailableError) and error.code not in CROWDED
            return ["" if ends_by_itself else f"{error.sentence} {error.hint}".strip()]
        except OSError as error:
            self._say(what, error)
            return [f"{what} failed: {error}"]
        except Exception as error:
            # An answer that nobody thought of, or a mistake of ours: shown, and no other log is left out for it.
            sentence = f"{what} failed: {type(error).__name__}: {str(error)[:300]}".rstrip(": ")
            if self._reasons.get(what) != sentence:
                self._reasons[what] = sentence
                log.exception("%s failed", what)
            return [sentence]
        return []

    async def _cosign_egress(self, witness: RegionEndpoint, final: bool) -> None:
        trail = self.context.trail
        if trail is None:
            return
        self.context.require_whole(witness.region)
        connection = witness.connection()
        answer = await connection.request(WitnessedSize(trail.key.name))
        newest = await asyncio.to_thread(trail.publish)
        note = trail.checkpoints.offer(at_least=note_size(newest) if final else answer.size)
        size = note_size(note)
        if not size:
            return
        text, keys = parse_note(note).text, witness.trust.witnesses
        asked = self._askings.setdefault((trail.key.name, witness.region), Asked(REGION_PAUSE_MS_MAX))
        if answer.size >= size and trail.checkpoints.is_cosigned_by(note, keys):
            asked.stands()
            return
        failure = asked.failure(text, self._monotonic_ms())
        if failure is not None and not final:
            raise failure.with_traceback(None)
        proof: list[bytes] = []
        if 0 < answer.size < size:
            proof = await asyncio.to_thread(trail.checkpoints.consistency_proof, answer.size, size)
        cosigned = await connection.request(Cosign(note, proof))
        try:
            answered_note(cosigned.cosigned, text, "the egress log", witness.region)
            await asyncio.to_thread(trail.add_cosigned, cosigned.cosigned)
            if lacking := trail.checkpoints.lacking(note, keys):
                raise TamperError(
                    f"{witness.region} answered, and the egress log has no line that holds of {name_keys(lacking)}, which its bundle names."
                )
        except FelixError as error:
            if not isinstance(error, UnavailableError):
                asked.failed(text, error, self._monotonic_ms())
            raise
        asked.stands()
        self.context.failpoints.at("cosign")

    async def _renew_identity(self) -> None:
        """Ask the source region for the next certificate once it is due; the file is read again below."""
        held = self._files.identity
        now_ms = self._clock_ms()
        if not held.renewal_due(now_ms):
            return
        source = self.config.source
        try:
            root_pem = self._files.bundles[source].root_pem.encode()
            renewed = await request_renewal(
                self._endpoints[source].connection(), held, root_pem, self._clock_ms
            )
            await asyncio.to_thread(store_renewed, renewed, held, self.paths.identity)
        except (FelixError, OSError) as error:
            stage = stage_of(Life(held.not_before_ms, held.not_after_ms), now_ms)
            why = error.code if isinstance(error, FelixError) else Code.STATE
            if stage is not self._expiry_told:
                self._expiry_told, self._expiry_reasons = stage, set()
            if why not in self._expiry_reasons:
                self._expiry_reasons.add(why)
                log.warning(
                    "%s %s, and could not be renewed: %s",
                    held.spiffe_id, until_text(held.not_after_ms, now_ms), error,
                )  # fmt: skip
            return
        self._expiry_told = Stage.FRESH
        log.info("%s renewed its identity", held.spiffe_id)

    async def _take_pins(self) -> None:
        """Whom the source region trusts now, as its operator compared it on whichever machine."""
        source = self.config.source
        endpoint, now_s = self._endpoints[source], self._runtime.clock.monotonic()
        if not endpoint.is_up or (endpoint.link() is self._pinned_as and now_s < self._pins_due_s):
            return
        self._pinned_as, self._pins_due_s = endpoint.link(), now_s + RENEW_S
        try:
            found = await list_pins(endpoint.connection())
        except FelixError as error:
            # A broker of before lists none; the files count alone then.
            log.info("%s does not say whom it trusts: %s", source, error)
            return
        if await asyncio.to_thread(self._pins.take, found, self._files.bundles[source]):
            await self._read_files()

    async def _renew(self) -> None:
        """A renewed identity or bundle is taken without a restart: sessions are made anew with it."""
        await self._renew_identity()
        await self._read_files()

    async def _read_files(self) -> None:
        async with self._renewing:
            await self._read_files_alone()

    async def _read_files_alone(self) -> None:
        try:
            files = await asyncio.to_thread(load_files, self.config, self.paths)
            newest = {region: self._pins.newest(region, bundle) for region, bundle in files.bundles.items()}
            files = files._replace(bundles=newest)
            if self._quorum is not None:
                _check_quorum(self._quorum.policy, files.bundles[self.config.source])
        except (FelixError, OSError) as error:
            self._say("renewal", error)
            return
        held = self._files
        for region, endpoint in self._endpoints.items():
            bundle = files.bundles[region]
            if files.identity.chain_pem != held.identity.chain_pem or bundle != held.bundles[region]:
                log.info("a renewed identity or bundle is taken; the session with %s begins anew", region)
                endpoint.take_identity(files.identity, bundle)
        self._files = files
        self.context.identity = files.identity
        if self.context.trail is not None:
            self.context.trail.checkpoints.trust_witnesses(
                witnesses_of(files.bundles.values(), self.config.source)
            )


def _require_egress(trail: Trail, known: Witnessed, witness: str) -> None:
    """Raises RolledBackError where the egress log is not the one that the witness cosigned. Blocks on disk."""
    current = trail.publish()
    proof = trail.checkpoints.consistency_proof(known.size, note_size(current))
    require_continued(known.cosigned, current, proof, log="the egress log", witness=witness, hint=EGRESS_HINT)
