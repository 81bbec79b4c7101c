"""The worker: the actor of one link. It carries one granted shard to one region, for as long as the plan says so.

One session, in the numbers of docs/bridges.md:

1. the plan says that the grant holds, and its GRANT leaf stands in the egress log;
2. the source hands out the link's secrets; 3. the destination answers its position;
4. the source is subscribed to from there, and the policy by which it lets the link read stands in the egress log; then per batch
5. open, 6. judge and transform, 7. seal (bridge.crossing), 8. append WITHHELD and INTENT leaves,
9. once they are durable, send; 10. verify the receipt and append the ACK leaf.

Whatever ends a session, the next one begins again with 1, and learns from the egress log and the destination where to
go on. Several envelopes are on the way at once (bridge.link.SendWindow); leaves of many batches share a sync.

Invariants: nothing is sent before its leaves are durable; no INTENT under a grant that does not hold by this clock; the
source never waits; what is held here is bounded by the limits of the configuration.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import msgspec
from opentelemetry.trace import Span

from audit.crossed import CROSSED_AHEAD, CROSSED_BEFORE, OffsetSet, crossed_before
from audit.errors import AuditUnavailableError
from audit.leaf import EMPTY_RANGE_BYTES, GapKind, Header, Kind, Leaf, Side
from audit.position import LinkShard
from audit.receipt import differences, open_receipt
from audit.stream_statement import Cut, StreamStatement, cut_of, open_statement
from audit.trail import Trail
from bridge.budget import fits_budget, rate_limit
from bridge.config import LimitsConfig
from bridge.crossing import (
    Route,
    SealedRange,
    compile_terms,
    gap_leaf,
    nothing_leaf,
    open_sealed,
    range_entries,
    range_leaves,
    seal_nothing,
    seal_ranges,
    sort_records,
)
from bridge.endpoint import RegionEndpoint
from bridge.failpoint import Failpoints
from bridge.ledger import Ledger, ShardAccount
from bridge.link import Announced, Denials, LinkEvent, LinkPhase, OnTheWay, SendWindow, Todo, advance
from bridge.plan import PlannedLink, Verdict
from bridge.tracing import CrossingTracing
from bridge.wire import IngestChannel, SealedBatch, SealedFeed
from felix.backoff import Backoff, BackoffPolicy
from felix.batch import BatchHeader, decode_header
from felix.errors import Code, CorruptionError, FelixError, ProtocolError, RequestError, UnavailableError
from felix.frames import GapBody, GapReason
from felix.identity import Identity
from felix.messages import (
    CutState,
    DescribeStream,
    GetDataKey,
    GetLinkSecret,
    GetStreamStatement,
    LinkState,
    OpenIngest,
    ShardState,
    StreamState,
)
from felix.names import SpiffeId, StreamName
from felix.rate import TokenBucket
from felix.runtime.port import Runtime
from keys.envelope import DataKey
from keys.handoff import HandoffScope, open_data_key
from keys.hybrid import HybridKeyPair
from keys.link import LinkSecrets, LinkSecretScope, open_link_secrets
from keys.transfer import TransferScope, seal_transfer_key
from policy.terms import GrantTerms
from policy.transform import Transform
from policy.truncation import Accepted, Live, chain, other_chain

_NO_ENTRIES_SHA256: Final = hashlib.sha256().digest()

log = logging.getLogger("felix.bridge.link_worker")

DENIED_AGAIN: Final = BackoffPolicy(first_ms=1_000, ceiling_ms=30_000)
"""After a refusal: a changed plan wakes the link at once, so this is for what the plan does not see."""
LOST_AGAIN: Final = BackoffPolicy(first_ms=100, ceiling_ms=5_000)
"""After a lost session or a full disk."""
DRAIN_S: Final = 3.0
"""How long receipts are waited for when a link ends in order."""
DATA_KEYS_MAX: Final = 64
"""Data keys of one link in memory: one per leader epoch and rotation, and old ones are seldom read again."""
IDLE_S: Final = 0.25
"""How soon a link that nothing wakes looks at clock and plan: a grant that expires stops within this."""
DENIED_FAMILIES: Final = (2, 3, 5, 6, 7)
"""Hundreds of codes that are refusals, and not outages."""
SENTENCE_CHARS_MAX: Final = 2_000
KEPT_SAID: Final = 1_000
"""Records that stay in a row before a link that let some cross says so: a filter may well leave that many out."""

_GAP_KINDS: Final = {
    GapReason.RETENTION: GapKind.RETENTION,
    GapReason.RING: GapKind.RETENTION,
    GapReason.TRUNCATED: GapKind.RETENTION,
    GapReason.RECREATED: GapKind.INCARNATION,
    GapReason.COMPACTED: GapKind.COMPACTION,
}


EVENT_OF: Final = {
    Verdict.PAUSE: LinkEvent.PAUSE,
    Verdict.DENY: LinkEvent.REFUSE,
    Verdict.STOP: LinkEvent.END,
}
"""What a planned link that is not to run is told; every other verdict holds it."""


def may_run(row: PlannedLink) -> bool:
    """Whether the plan says that the link runs, and of which shard."""
    return row.verdict is Verdict.RUN and row.shard >= 0 and row.export is not None


@dataclass(slots=True)
class LinkContext:
    """What all links of an agent share. `trail` is None until the egress log is open."""

    bridge: SpiffeId
    identity: Identity
    handoff: HybridKeyPair
    source: RegionEndpoint
    limits: LimitsConfig
    failpoints: Failpoints
    runtime: Runtime
    log_grant: Callable[[PlannedLink], Awaitable[None]]
    check_history: Callable[[RegionEndpoint], Awaitable[None]]
    require_allowed: Callable[[PlannedLink, int], None]
    tracing: CrossingTracing | None = None
    held: Callable[[], str] = lambda: ""
    """why nothing new may cross though the grants allow it: no quorum of witnesses"""
    notice: Callable[[], str] = lambda: ""
    """what people should know besides: witnesses that are behind"""
    trail: Trail | None = None
    trail_reason: str = "The egress log is not open yet."
    ledger: Ledger = field(default_factory=Ledger)
    rates: dict[str, TokenBucket | None] = field(default_factory=dict)

    def clock_ms(self) -> int:
        return self.runtime.clock.now_ms()

    def open_trail(self) -> Trail:
        """Raises AuditUnavailableError where there is none: then nothing crosses."""
        if self.trail is None:
            raise AuditUnavailableError(self.trail_reason, retry_after_ms=500)
        return self.trail

    def append(self, leaves: list[Leaf], done: Callable[[int, FelixError | None], None]) -> None:
        """Accept leaves; `done` is called on the loop once they are durable. Raises AuditUnavailableError."""
        self.open_trail().append_nowait(leaves, done, asyncio.get_running_loop())
        for leaf in leaves:
            self.ledger.apply(leaf.header)


class SourceShard(NamedTuple):
    """What the source states that a shard is, as signed and as read; and what it crossed under, the newest last."""

    signed: bytes
    statement: StreamStatement
    lives: tuple[Live, ...]
    accepted: Mapping[str, tuple[Accepted, ...]]
    """what the last follows from"""

    @property
    def live(self) -> Live:
        """What it crosses under now."""
        return self.lives[-1]

    @property
    def begins_at(self) -> int:
        """The source offset at which that begins: the log's start, or where a truncation was accepted."""
        accepted = self.live.accepted
        return self.statement.log_start if accepted is None else accepted.truncation.offset


class _Left(Exception):
    """The plan no longer says that the link runs."""


@dataclass(slots=True)
class LinkStats:
    """What a link counts; offsets in records, times in ms."""

    crossed: int = 0
    withheld: int = 0
    filtered: int = 0
    gaps: int = 0
    envelopes: int = 0
    resent: int = 0
    sessions: int = 0
    denied: int = 0
    position: int = 0
    high_watermark: int = 0
    lag_bytes: int = -1
    answered_append_ms: int = 0


class LinkWorker:
    """One link. `run` it as a task once it may run; `take_plan` tells it what the plan says now."""

    def __init__(self, context: LinkContext, endpoint: RegionEndpoint | None, row: PlannedLink) -> None:
        self._context = context
        self._endpoint = endpoint
        self.row = row
        self.phase = LinkPhase.WAITING
        self.reason = "The link has just begun."
        self._ended_by = 0
        """the code of why it stopped, whether the plan or a broker said so; 0 while it has not"""
        self.alarm = ""
        self.truncation = ""
        """what the source or the destination no longer has, until the link is opened behind it"""
        self.stats = LinkStats()
        self._wake = asyncio.Event()
        self._planned = asyncio.Event()
        self._leaving = False
        self._failed: FelixError | None = None
        self._held_back: FelixError | None = None
        """why no INTENT may be announced now, by what the egress log has and by this clock"""
        self._denials = Denials()
        self._ask_again = True
        self._incarnation = b""
        """that the link crosses under, or crossed when it last opened"""
        self._not_there: set[bytes] = set()
        """incarnations by which the destination does not go on: of two words that end one, another bridge may have carried under either"""
        self._high: dict[bytes, int] = {}
        self._waiting_since_ms = 0
        """when the source was first seen to have more than the destination; 0 while it has not"""
        self._kept = 0
        """records that stayed since one crossed"""
        self._kept_for = ""
        """why the newest of them did"""
        self.cut: CutState | None = None
        """What an operator is to decide about, while the link is truncated."""
        self._backoff = Backoff(LOST_AGAIN, context.runtime.random)
        self._denied_backoff = Backoff(DENIED_AGAIN, context.runtime.random)
        # Of the session that stands.
        self.in_session = False
        self._feed: SealedFeed | None = None
        self._channel: IngestChannel | None = None
        self._window: SendWindow | None = None
        self._route: Route | None = None
        self._source: SourceShard | None = None
        self._own_before: OffsetSet | None = None
        self._before: OffsetSet | None = None
        """what crossed before a resend, by the egress log and by the destination"""
        self._held: SealedBatch | GapBody | None = None
        self._data_keys: dict[bytes, DataKey] = {}
        self._secrets: LinkSecrets | None = None
        self._transform: Transform | None = None
        self._append_times: dict[int, int] = {}
        self._spans: dict[int, Span | None] = {}

    # -- what the agent calls --------------------------------------------------------------------------

    @property
    def link_shard(self) -> LinkShard:
        """The link's name in the egress log."""
        row = self.row
        return LinkShard(
            str(self._context.bridge),
            self._context.source.region,
            row.destination_region,
            row.stream,
            row.shard,
            row.destination_stream,
        )

    def take_plan(self, row: PlannedLink) -> None:
        """The newest row; a changed verdict takes effect at once."""
        held = self.row
        changed = (row.verdict, row.reason, row.accepted) != (held.verdict, held.reason, held.accepted)
        self.row = row
        if changed:
            self._planned.set()
            self._wake.set()

    def take_shard(self, stream: StreamState, state: ShardState) -> None:
        """What the source says of the shard, for the lag."""
        self._high[stream.incarnation] = state.high_watermark
        while len(self._high) > 4:
            del self._high[next(iter(self._high))]
        stats = self.stats
        if state.high_watermark <= stats.position:
            self._waiting_since_ms = 0
        elif not self._waiting_since_ms:
            self._waiting_since_ms = self._context.clock_ms()
        stats.high_watermark = state.high_watermark
        records = state.high_watermark - state.log_start
        behind = max(0, state.high_watermark - stats.position)
        # By its share of the records: the sizes of single batches are not asked for.
        stats.lag_bytes = state.size_bytes * min(behind, records) // records if records > 0 else 0

    @property
    def is_leaving(self) -> bool:
        """True once it was told to end; it does not begin again."""
        return self._leaving

    def wake(self) -> None:
        """Something that held the link may have changed."""
        self._wake.set()

    def leave(self) -> None:
        """The agent stops: finish what is on the way, then end."""
        self._leaving = True
        self._planned.set()
        self._wake.set()

    def report(self) -> LinkState:
        """What the link says of itself."""
        row, stats, context = self.row, self.stats, self._context
        window = self._window
        # Under a grant that has ended nothing is still to cross, however far the stream goes on.
        known = stats.sessions > 0 and self._ended_by not in (Code.GRANT_REVOKED, Code.GRANT_EXPIRED)
        behind = max(0, stats.high_watermark - stats.position)
        lag_ms = -1
        if known and not behind:
            lag_ms = 0
        elif known:
            # Of what waits, the oldest came after what was answered last, and no later than it was first seen to wait.
            since_ms = max(stats.answered_append_ms, self._waiting_since_ms)
            lag_ms = max(0, context.clock_ms() - since_ms) if since_ms else -1
        crossed, withheld, filtered = context.ledger.sums(self.link_shard)
        return LinkState(
            grant=row.grant,
            stream=row.stream,
            shard=max(0, row.shard),
            from_region=context.source.region,
            to_region=row.destination_region,
            bridge=str(context.bridge),
            state=self.phase.value,
            reason=_joined(self.alarm, self.truncation, self.reason, self._stays(), context.notice())[:4000],
            position=window.position if window is not None else stats.position,
            high_watermark=stats.high_watermark,
            lag_records=behind if known else -1,
            lag_bytes=stats.lag_bytes if known else -1,
            lag_ms=lag_ms,
            # By the egress log, so an agent that starts again goes on counting.
            crossed=crossed,
            withheld=withheld - filtered,
            filtered=filtered,
            reported_ms=context.clock_ms(),
            cut=self.cut if self.phase is LinkPhase.TRUNCATED else None,
            incarnation=self._incarnation,
        )

    def _stays(self) -> str:
        """What is to be said where nothing crosses though the link is active."""
        is_all = not self._context.ledger.grant(self.row.grant).crossed_records
        if self.phase is not LinkPhase.ACTIVE or not self._kept or not (is_all or self._kept >= KEPT_SAID):
            return ""
        what = "No record has crossed under this grant" if is_all else "No record crosses"
        return (
            f"{what}: the last {self._kept} stayed. {self._kept_for} See felix bridge plan {self.row.grant}; what stayed "
            "crosses under a better grant with felix bridge resend."
        )

    def rest(self) -> None:
        """The plan says that the link does not run, and why."""
        row = self.row
        self._step(EVENT_OF.get(row.verdict, LinkEvent.HOLD), row.reason, row.code)

    # -- the actor -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `leave`."""
        while not self._leaving:
            self._planned.clear()
            row = self.row
            if not may_run(row):
                self.rest()
                await self._planned.wait()
                continue
            self._step(LinkEvent.ALLOW, "Opening.")
            pause_ms = 0
            try:
                await self._session(row)
            except _Left:
                continue
            except FelixError as error:
                pause_ms = self._ended(error)
            except Exception as error:
                log.exception("the link of %s shard %d failed", row.stream, row.shard)
                self._step(LinkEvent.REFUSE, f"The agent failed: {type(error).__name__}: {error}")
                pause_ms = self._denied_backoff.next_ms()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_ms / 1000):
                    await self._planned.wait()

    def _step(self, event: LinkEvent, reason: str, code: int = 0) -> None:
        before, said = self.phase, self.reason
        self.phase = advance(before, event)
        self.reason = reason
        self._ended_by = code if event is LinkEvent.END else 0
        if self.phase is not before or (reason and reason != said):
            row = self.row
            log.info(
                "link %s %s/%d to %s: %s → %s. %s", row.grant, row.stream, row.shard, row.destination_region,
                before.value, self.phase.value, reason,
            )  # fmt: skip

    def _ended(self, error: FelixError) -> int:
        """A session ended with an error: say so, write a DENY leaf where it is a refusal. Returns the pause in ms."""
        code = int(error.code)
        if error.code is Code.POSITION_GAP:
            # What landed longer ago than the destination remembers is not asked for again.
            self._ask_again = False
        if code // 100 not in DENIED_FAMILIES or isinstance(error, UnavailableError):
            self._step(LinkEvent.LOST, str(error))
            return self._backoff.next_ms(error.retry_after_ms)
        if error.code is Code.PAUSED:
            self._step(LinkEvent.PAUSE, str(error))
        elif error.code in (Code.GRANT_EXPIRED, Code.GRANT_REVOKED, Code.BUDGET_EXHAUSTED):
            self._step(LinkEvent.END, str(error), error.code)
        elif error.code is Code.OFFSET_OUT_OF_RANGE:
            self._step(LinkEvent.GAP, str(error))
        elif error.code is Code.TRUNCATED:
            self._step(LinkEvent.TRUNCATE, str(error))
            if not error.told:
                # The GAP leaf says it; nobody refused anything.
                return self._denied_backoff.next_ms(error.retry_after_ms)
        else:
            self._step(LinkEvent.REFUSE, str(error))
        self._deny(error)
        return self._denied_backoff.next_ms(error.retry_after_ms)

    def _deny(self, error: FelixError) -> None:
        if not self._denials.is_new(int(error.code), error.sentence):
            return
        row, context = self.row, self._context
        self.stats.denied += 1
        header = Header(
            kind=Kind.DENY,
            side=Side.EGRESS,
            time_ms=context.clock_ms(),
            source_region=context.source.region,
            destination_region=row.destination_region,
            bridge=str(context.bridge),
            stream=row.stream,
            shard=max(0, row.shard),
            grant_id=row.grant,
            actor=str(context.bridge),
            action="carry",
            rule=error.code.name.lower().replace("_", "-"),
            code=int(error.code),
            sentence=_sentence(error),
        )
        try:
            context.append([Leaf(header)], lambda index, failure: None)
        except FelixError as failure:
            log.error("the egress log took no DENY leaf: %s", failure)

    # -- one session -----------------------------------------------------------------------------------

    async def _session(self, row: PlannedLink) -> None:
        """Raises what ends it; _Left where the plan does."""
        context = self._context
        if self._endpoint is None:
            raise UnavailableError(row.reason or "The destination is not configured.")
        trail = context.open_trail()
        source, endpoint = context.source, self._endpoint
        source.link()
        endpoint.link()
        self._failed = self._held_back = None
        self.in_session = True
        try:
            await context.check_history(endpoint)
            await context.log_grant(row)  # 1
            stream = await self._describe()
            self._source = await self._take_statement(row, stream)
            self._log_old_incarnation(stream)
            self._check_source(self._source)
            await self._take_crossed(trail, self._source)
            await self._take_secrets(row, stream)  # 2
            await self._open_channel(self._first_epoch(trail))  # 3
            assert self._channel is not None and self._window is None
            self._check_destination(trail)
            self._log_elsewhere(trail)
            self._window = self._begin(trail)
            self.stats.position = self._window.position
            next_offset = self._window.next_offset
            self._feed = await source.connection().at_leader(  # 4
                StreamName.parse(row.stream),
                lambda link: SealedFeed.open(
                    link,
                    row.stream,
                    row.grant,
                    shard=row.shard,
                    offset=next_offset,
                    incarnation=stream.incarnation,
                    credit_bytes=int(context.limits.read_ahead),
                    arrived=self._wake,
                ),
            )
            if self._feed.subscribed.incarnation != stream.incarnation:
                raise UnavailableError(
                    f"{row.stream} was made anew while the link opened.", retry_after_ms=50
                )
            context.require_allowed(row, context.clock_ms())
            self.stats.sessions += 1
            self.truncation, self.cut, self._incarnation = "", None, self._source.live.incarnation
            self._step(LinkEvent.OPENED, "")
            await self._carry()
        finally:
            self._close_session()

    def _close_session(self) -> None:
        if self._feed is not None:
            self._feed.close()
        if self._channel is not None:
            self._channel.close()
        self._feed = self._channel = self._window = self._route = self._held = self._source = None
        self._own_before = self._before = None
        self._secrets = self._transform = None
        self._data_keys.clear()
        self._append_times.clear()
        for span in self._spans.values():
            CrossingTracing.end(span, "the session ended before the receipt came")
        self._spans.clear()
        self.in_session = False

    async def _describe(self) -> StreamState:
        row = self.row
        stream = await self._context.source.connection().request(DescribeStream(row.stream))
        if row.shard >= len(stream.state):
            raise ProtocolError(f"The source does not describe shard {row.shard} of {row.stream}.")
        self.take_shard(stream, stream.state[row.shard])
        return stream

    def _log_old_incarnation(self, stream: StreamState) -> None:
        """What was not read of an incarnation that is gone, as far as is known, gets its GAP leaf."""
        context, row = self._context, self.row
        assert self._source is not None
        lives = {each.incarnation for each in self._source.lives}
        for incarnation, account in context.ledger.incarnations(self.link_shard).items():
            high = self._high.get(incarnation, 0)
            if incarnation not in lives and account.accounted_to < high:
                self.alarm = (
                    f"{row.stream} was made anew; offsets {account.accounted_to} to {high - 1} of the old one "
                    "were never read."
                )
                log.error("%s", self.alarm)
                self.stats.gaps += high - account.accounted_to
                template = self._template(incarnation)
                leaf = gap_leaf(
                    template, GapKind.INCARNATION, account.accounted_to, high - 1, context.clock_ms()
                )
                context.append([leaf], lambda index, error: None)

    def _template(self, incarnation: bytes) -> Header:
        row, context = self.row, self._context
        assert row.export is not None
        return Header(
            kind=Kind.GAP,
            side=Side.EGRESS,
            time_ms=context.clock_ms(),
            source_region=context.source.region,
            destination_region=row.destination_region,
            bridge=str(context.bridge),
            stream=row.stream,
            destination_stream=row.destination_stream,
            shard=row.shard,
            incarnation=incarnation,
            grant_id=row.grant,
            terms_hash=bytes.fromhex(row.export.terms_hash),
        )

    async def _take_secrets(self, row: PlannedLink, stream: StreamState) -> None:
        context = self._context
        assert row.export is not None
        answer = await context.source.connection().request(
            GetLinkSecret(row.grant, row.stream, context.handoff.public.encoded)
        )
        scope = LinkSecretScope(
            context.source.region,
            StreamName.parse(row.stream),
            stream.incarnation,
            row.grant,
            bytes.fromhex(row.export.terms_hash),
            context.bridge,
        )
        self._secrets = open_link_secrets(answer.sealed, scope, context.handoff)
        self._transform = compile_terms(row.export.terms, self._secrets)

    async def _take_statement(self, row: PlannedLink, stream: StreamState) -> SourceShard:
        """What the source signs that the shard is. Raises TamperError, UnavailableError where it was made anew meanwhile."""
        source = self._context.source
        answer = await source.connection().request(GetStreamStatement(row.grant, row.stream, row.shard))
        statement = open_statement(answer.statement, source.trust.receipt_keys)
        said = (statement.region, statement.stream, statement.shard)
        if said != (source.region, row.stream, row.shard):
            raise ProtocolError(f"The source stated what another shard is: {said}.", code=Code.TAMPERED)
        if statement.incarnation != stream.incarnation:
            raise UnavailableError(f"{row.stream} was made anew while the link opened.", retry_after_ms=50)
        lives = self._lives(statement.incarnation, row)
        return SourceShard(answer.statement, statement, lives, row.accepted)

    def _lives(self, incarnation: bytes, row: PlannedLink) -> tuple[Live, ...]:
        """What the shard crossed under, by what was accepted, by what has leaves and by what the destination refused; the newest last."""
        begun, source = self._context.ledger.incarnations(self.link_shard), self._context.source.region
        lives = chain(incarnation, row.accepted, source, begun)
        if lives[-1].incarnation not in self._not_there:
            return lives
        other = other_chain(lives, row.accepted, source, begun, self._not_there)
        if not other:
            self._not_there.clear()
        return other or lives

    async def _take_crossed(self, trail: Trail, source: SourceShard) -> None:
        """After a resend: what crossed before it, by the egress log. Reads the whole log, on another thread."""
        lives = source.lives
        if not any(each.accepted is not None and each.accepted.is_resend for each in lives):
            return
        name = self.link_shard.shard_name

        def find() -> OffsetSet:
            return crossed_before((data for _, data in trail.leaves()), name, lives)

        self._own_before = await asyncio.to_thread(find)

    def _check_source(self, source: SourceShard) -> None:
        """Raises CorruptionError(TRUNCATED) where the source no longer has what was read of it, after the GAP leaf of that."""
        ledger, live = self._context.ledger, source.live
        for each in reversed(source.lives):
            account = ledger.shard(self.link_shard, each.incarnation)
            if account is not None and account.read:
                break
        else:
            return
        cut = cut_of(source.statement, account.read)
        if each is not live:
            # It was accepted that the link goes on, and it has not begun to: no later than where the histories part.
            most = account.accounted_to if cut is None else min(cut.offset, account.accounted_to)
            goes_on = cut is None or live.accepted is None or not live.accepted.is_resend
            if source.begins_at <= most and goes_on:
                return
            cut = Cut(source.statement.epoch_at(most), most)
        if cut is None:
            return
        row, last = self.row, account.accounted_to - 1
        said = (
            f"{row.stream} shard {row.shard} was cut back to offset {cut.offset}, where its epoch {cut.epoch} begins: offsets "
            f"{cut.offset} to {last}, the newest of epoch {account.read[-1].epoch}, had been announced, and are not there as they crossed."
        )
        raise self._truncated(said, each.incarnation, account, cut, source)

    def _check_destination(self, trail: Trail) -> None:
        """Raises CorruptionError(TRUNCATED) where the destination no longer has what it gave receipts for."""
        source, channel = self._source, self._channel
        assert source is not None and channel is not None
        last, at = trail.positions.last_ack(self.link_shard), channel.opened.position
        account = self._context.ledger.shard(self.link_shard, source.live.incarnation)
        had = channel.opened.logged
        if last is not None and last.incarnation == source.live.incarnation:
            had = max(had, last.last_offset + 1)
        if had <= at:
            return
        row = self.row
        said = (
            f"{row.destination_region} had {row.stream} shard {row.shard} up to offset {had - 1}, and now has what lies below "
            f"{at}: {row.destination_stream} was deleted there, restored from an older copy, or lost records."
        )
        cut = Cut(source.statement.epoch_at(at), at)
        raise self._truncated(said, source.live.incarnation, account, cut, source)

    def _log_elsewhere(self, trail: Trail) -> None:
        """Offsets that this log knows nothing of, and the destination says that it has: another bridge brought them, or it is not so.
        The GAP leaf says whose word it is, and the report holds the ingress log to it. Where another bridge brought a part of what this
        one announced, or the destination goes back into what this one has as a gap, it begins where that batch or gap does: none counts
        in part (`audit.accounting`)."""
        source, channel, context, row = self._source, self._channel, self._context, self.row
        assert source is not None and channel is not None
        account = context.ledger.shard(self.link_shard, source.live.incarnation)
        position, live = channel.opened.position, source.live.incarnation
        announced = (each for each in trail.positions.unanswered(self.link_shard) if each.incarnation == live)
        known = source.begins_at if account is None else account.known_to(position, announced)
        # Under the grant that it accounts for, a destination that is further is refused (bridge.link).
        if position <= known or (account is not None and account.grant_id == row.grant):
            return
        template = msgspec.structs.replace(
            self._template(source.live.incarnation),
            sentence=f"{row.destination_region} says that it has them; this bridge did not bring them.",
        )
        leaf = gap_leaf(template, GapKind.ELSEWHERE, known, position - 1, context.clock_ms())
        context.append([leaf], lambda index, error: None)

    def _truncated(
        self, said: str, incarnation: bytes, account: ShardAccount | None, cut: Cut, source: SourceShard
    ) -> CorruptionError:
        """The link stops until an operator decides: alarm, GAP leaf (once), and the error that ends the session. Without an
        account another bridge carried before, and this one's log has nothing to say of it."""
        context, row = self._context, self.row
        self.truncation = said
        self.cut = CutState(source.live.incarnation, cut.epoch, cut.offset)
        if account is not None and (cut.offset, last := account.accounted_to - 1) not in account.truncated:
            log.error("link %s %s/%d: %s", row.grant, row.stream, row.shard, said)
            self.stats.gaps += last + 1 - cut.offset
            template = msgspec.structs.replace(
                self._template(incarnation),
                source_epoch=account.read[-1].epoch if account.read else 0,
                sentence=said,
            )
            leaf = gap_leaf(template, GapKind.TRUNCATION, cut.offset, last, context.clock_ms())
            context.append([leaf], lambda index, error: None)
        return CorruptionError(
            said,
            code=Code.TRUNCATED,
            hint="Put the newest copy back; or go on from there, which the logs of both regions will say: felix bridge "
            f"resume {row.grant} --accept-truncation.",
        )

    def _first_epoch(self, trail: Trail) -> int:
        """The epoch of what is likely to be sent first; `_deal` opens anew where it is another."""
        source = self._source
        assert source is not None
        account = self._context.ledger.shard(self.link_shard, source.live.incarnation)
        first = account.accounted_to if account is not None else source.begins_at
        first = min([first, *(found.first_offset for found in self._unanswered(trail))])
        return source.statement.epoch_at(first)

    def _unanswered(self, trail: Trail) -> list[Announced]:
        """INTENTs of this grant and incarnation without an ACK."""
        assert self._source is not None
        live = self._source.live.incarnation
        return [
            Announced(found.first_offset, found.last_offset, found.envelope_sha256)
            for found in trail.positions.unanswered(self.link_shard)
            if found.incarnation == live and found.grant_id == self.row.grant
        ]

    async def _open_channel(self, epoch: int) -> None:
        """The ingest stream for one source epoch; an older one of this session is closed."""
        context, row, endpoint, source = self._context, self.row, self._endpoint, self._source
        assert endpoint is not None and row.export is not None and source is not None
        assert self._secrets is not None and self._transform is not None
        if self._channel is not None:
            self._channel.close()
        scope = TransferScope(
            context.source.region,
            row.destination_region,
            StreamName.parse(row.stream),
            source.live.incarnation,
            StreamName.parse(row.destination_stream),
            row.shard,
            epoch,
            row.grant,
            bytes.fromhex(row.export.terms_hash),
            context.bridge,
        )
        import_key = endpoint.bundle.hybrid_import_key()
        self._route = route = Route.of(
            row.export, scope, self._secrets, self._transform, context.identity, import_key.encoded
        )
        sealed = seal_transfer_key(route.key, import_key, context.identity)
        request = OpenIngest(
            row.grant,
            context.source.region,
            row.stream,
            row.shard,
            row.shards,
            source.live.incarnation,
            epoch,
            sealed.sealed,
            sealed.signature,
            source.signed,
        )
        try:
            self._channel = await endpoint.connection().at_leader(
                StreamName.parse(row.destination_stream),
                lambda link: IngestChannel.open(link, request, self._received, self._fail),
            )
        except RequestError as error:
            if error.code is Code.CONFLICT:
                self._not_there.add(source.live.incarnation)
            raise
        except CorruptionError as error:
            if error.code is Code.TRUNCATED:
                # Only the destination knows of it (another agent carried before): all that is held would cross again.
                at = source.statement.log_start
                self.cut = CutState(source.live.incarnation, source.statement.epoch_at(at), at)
                self.truncation = str(error)
            raise
        opened = self._channel.opened
        if self._own_before is not None:
            self._before = OffsetSet()
            self._before.update(self._own_before)
            self._before.add(opened.crossed_from, int.from_bytes(opened.crossed, "little"))
        if opened.destination != row.destination_stream:
            raise RequestError(
                f"{row.destination_region} would write to {opened.destination}, the grant says "
                f"{row.destination_stream}.",
                code=Code.GRANT_MISMATCH,
            )

    def _begin(self, trail: Trail) -> SendWindow:
        """Where to go on: what the destination has recorded, and what the egress log says."""
        assert self._channel is not None and self._source is not None
        opened, limits = self._channel.opened, self._context.limits
        account = self._context.ledger.shard(self.link_shard, self._source.live.incarnation)
        return SendWindow(
            position=opened.position,
            accounted_to=(
                account.accounted_to if account is not None and account.grant_id == self.row.grant else None
            ),
            # Before that offset nobody knows any more what stayed for having crossed before.
            unanswered=[each for each in self._unanswered(trail) if each.first_offset >= opened.crossed_from],
            envelopes_max=min(limits.envelopes, opened.envelopes_max),
            credit_bytes=min(limits.on_the_way, opened.credit_bytes),
            ask_again=self._ask_again,
        )

    async def _carry(self) -> None:
        """Batch after batch, until something ends it."""
        context = self._context
        feed, window = self._feed, self._window
        assert feed is not None and window is not None and self.row.export is not None
        terms = self.row.export.terms
        monotonic = context.runtime.clock.monotonic
        rate = context.rates.setdefault(self.row.grant, rate_limit(terms.rate_bytes, monotonic()))
        while True:
            self._wake.clear()
            if self._failed is not None:
                raise self._failed
            if self._leaving or self.row.verdict is not Verdict.RUN or self._goes_back():
                await self._drain()
                raise _Left
            if self._held_back is not None:
                await self._drain()
                raise self._held_back
            if context.clock_ms() >= terms.expires:
                await self._drain()
                raise RequestError(f"The grant {self.row.grant} has expired.", code=Code.GRANT_EXPIRED)
            if context.clock_ms() < terms.not_before:
                await self._drain()
                raise RequestError(
                    f"The grant {self.row.grant} has not begun by this clock.", code=Code.GRANT_NOT_YET
                )
            pause_s = IDLE_S
            if window.has_room:
                wait_s = rate.wait_s(monotonic()) if rate is not None else 0.0
                held = context.held()
                if held:
                    # Receipts of what is on its way are still taken; nothing else is begun.
                    self.reason = held
                elif wait_s:
                    self.reason = f"Held to the grant's rate of {terms.rate_bytes} bytes per second."
                    pause_s = min(IDLE_S, wait_s)
                else:
                    if self._held is None:
                        try:
                            self._held = feed.take_nowait()
                        except RequestError:
                            # The source refuses from now on; for what crossed before, receipts are still taken.
                            await self._drain()
                            raise
                    if self._held is not None:
                        await self._deal(self._held, rate)
                        # Others have their turn between two batches.
                        await asyncio.sleep(0)
                        continue
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    def _goes_back(self) -> bool:
        """Whether the shard crosses under another incarnation by now: a resend was asked for."""
        source = self._source
        assert source is not None
        if self.row.accepted == source.accepted:
            return False
        lives = self._lives(source.statement.incarnation, self.row)
        return lives[-1].incarnation != source.live.incarnation

    async def _drain(self) -> None:
        """The link ends in order: nothing new is begun, receipts of what was sent are still taken."""
        window = self._window
        assert window is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while not window.is_empty and self._failed is None:
                    self._wake.clear()
                    await self._wake.wait()

    async def _deal(self, item: SealedBatch | GapBody, rate: TokenBucket | None) -> None:
        window, feed = self._window, self._feed
        assert window is not None and feed is not None and self._route is not None
        if isinstance(item, GapBody):
            self._held = None
            if item.shard == self.row.shard:
                self._gap(item.next_offset, _GAP_KINDS[GapReason(item.reason)])
            return
        header = decode_header(item.body)
        if header.shard != self.row.shard:
            raise ProtocolError(f"The source delivered a batch of shard {header.shard}.")
        if header.next_offset <= window.next_offset:
            self._held = None
            feed.consumed(item.frame_bytes)
            return
        if header.base_offset > window.next_offset:
            self._gap(header.base_offset, GapKind.COMPACTION)
            return
        if header.leader_epoch != self._route.key.scope.epoch or self._is_beyond(header):
            if not window.is_empty:
                # The transfer key is of one epoch, and what crossed before a resend is told page by page: what is on the way
                # is answered first.
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._wake.wait()
                return
            await self._open_channel(header.leader_epoch)
            assert self._channel is not None
            if self._channel.opened.position != window.position:
                raise UnavailableError("The destination's position moved; the link opens anew.")
        self._held = None
        if not await self._cross(item, header, rate):
            self._held = item
            return
        feed.consumed(item.frame_bytes)

    def _is_beyond(self, header: BatchHeader) -> bool:
        """Whether the destination has not said yet if records of this batch crossed before a resend."""
        assert self._channel is not None
        opened = self._channel.opened
        end = opened.position + CROSSED_AHEAD
        return opened.crossed_more and header.next_offset > end and opened.position < header.base_offset

    async def _cross(self, item: SealedBatch, header: BatchHeader, rate: TokenBucket | None) -> bool:
        """Steps 5 to 8 for one batch. False where the grant does not hold any more; then the rest of it stays."""
        context, window, route = self._context, self._window, self._route
        assert window is not None and route is not None
        at = context.failpoints.at
        at("read")
        data_key = self._data_keys.get(header.key_id)
        if data_key is None:
            data_key = await self._take_data_key(header)
        opened = open_sealed(item.body, data_key)  # 5
        at("open")
        sorted_ = sort_records(opened, route, self._before)  # 6
        at("transform")
        for sealed in seal_ranges(sorted_, route, window.next_offset):  # 7
            terms = route.terms
            todo = window.judge(sealed.first_offset, sealed.last_offset)
            if todo is Todo.SKIP:
                continue
            entries = range_entries(sealed, route)
            way = OnTheWay(
                sealed.first_offset,
                sealed.last_offset,
                sealed.records,
                sealed.envelope,
                sealed.envelope_sha256,
                hashlib.sha256(entries).digest(),
                todo is Todo.RESEND,
            )
            if todo is Todo.CROSS:
                now = context.clock_ms()
                if not self._may_announce(route, now):
                    # Asked again here: between the last time and now a key was waited for. The loop ends in order.
                    return False
                charge = sealed.record_bytes or EMPTY_RANGE_BYTES
                self._require_budget(terms, charge)
                if context.tracing is not None:
                    self._spans[sealed.last_offset] = context.tracing.begin(
                        self.row.stream, terms.from_region, terms.to_region, opened.records or ()
                    )
                self._announce(sealed, entries, way, route, now)  # 8
                self._append_times[sealed.last_offset] = header.append_time_ms
                if rate is not None:
                    rate.charge(charge, context.runtime.clock.monotonic())
            else:
                self.stats.resent += 1
                window.put(way)
                window.durable(way)
                self._send()
        return True

    def _require_budget(self, terms: GrantTerms, charge: int) -> None:
        """Raises RequestError(BUDGET_EXHAUSTED) where the grant has not so many bytes left."""
        charged = self._context.ledger.grant(self.row.grant).charged_bytes
        if not fits_budget(terms.budget_bytes, charged, charge):
            raise RequestError(
                f"The grant {self.row.grant} has used up its budget of {terms.budget_bytes} bytes: {charged} are "
                f"charged, and the next range counts {charge}.",
                code=Code.BUDGET_EXHAUSTED,
                hint="Make a new grant with a new budget.",
            )

    async def _take_data_key(self, header: BatchHeader) -> DataKey:
        context, row = self._context, self.row
        assert row.export is not None
        answer = await context.source.connection().request(
            GetDataKey(
                row.grant,
                row.stream,
                header.key_id,
                context.handoff.public.encoded,
                header.shard,
                header.leader_epoch,
            )
        )
        scope = HandoffScope(
            header.key_id,
            context.source.region,
            StreamName.parse(row.stream),
            answer.incarnation,
            answer.shard,
            answer.epoch,
            row.grant,
            bytes.fromhex(row.export.terms_hash),
            context.bridge,
        )
        while len(self._data_keys) >= DATA_KEYS_MAX:
            del self._data_keys[next(iter(self._data_keys))]
        key = self._data_keys[header.key_id] = open_data_key(answer.sealed, scope, context.handoff)
        return key

    def _may_announce(self, route: Route, now_ms: int) -> bool:
        """Whether an INTENT of this time is one under a grant that holds, by all that its log has: a clock may have been set back, or a word
        come, since the link was opened."""
        terms = route.terms
        if self.row.verdict is not Verdict.RUN or not terms.not_before <= now_ms < terms.expires:
            return False
        try:
            self._context.require_allowed(self.row, now_ms)
        except UnavailableError as error:
            self._held_back = error
        return self._held_back is None

    def _announce(
        self, sealed: SealedRange, entries: bytes, way: OnTheWay, route: Route, now_ms: int
    ) -> None:
        """Step 8: the leaves, all in one append and of the time that was asked for; the envelope waits until they are
        durable."""
        context, window, stats = self._context, self._window, self.stats
        assert window is not None
        leaves = range_leaves(sealed, entries, route, now_ms)
        window.put(way)
        context.append(leaves, partial(self._durable, window, way))
        context.failpoints.at("intent-appended")
        for leaf in leaves:
            if leaf.header.kind is Kind.WITHHELD:
                stats.withheld += leaf.header.records
                stats.filtered += leaf.header.records if leaf.header.reason == "filtered" else 0
                if leaf.header.reason != CROSSED_BEFORE:
                    self._kept += leaf.header.records
                    self._kept_for = leaf.header.sentence
        if sealed.records:
            self._kept = 0

    def _gap(self, next_offset: int, kind: GapKind) -> None:
        """Offsets below `next_offset` are gone: a leaf, an alarm, and an empty envelope, so that nothing is papered over."""
        context, window, route = self._context, self._window, self._route
        assert window is not None and route is not None
        now = context.clock_ms()
        if not self._may_announce(route, now):
            return
        leap = window.leap(next_offset)
        if leap is None:
            return
        if leap.announced is None:
            self._require_budget(route.terms, EMPTY_RANGE_BYTES)
        cover, last = leap.cover_first, next_offset - 1
        envelope, digest = seal_nothing(route, cover, last)
        window.put(way := OnTheWay(cover, last, 0, envelope, digest, _NO_ENTRIES_SHA256, False))
        self.alarm = f"Offsets {cover} to {last} are gone at the source ({kind.value})."
        log.error("link %s %s/%d: %s", self.row.grant, self.row.stream, self.row.shard, self.alarm)
        self._step(LinkEvent.GAP, self.alarm)
        self.stats.gaps += next_offset - cover
        leaves: list[Leaf] = []
        if leap.leaf_first < next_offset:
            leaves.append(gap_leaf(route.template, kind, leap.leaf_first, last, now))
        if leaves or leap.announced is None or leap.announced.envelope_sha256 != digest:
            leaves.append(nothing_leaf(route, cover, last, digest, now))
            context.append(leaves, partial(self._durable, window, way))
        else:
            window.durable(way)
            self._send()

    # -- called back on the loop -----------------------------------------------------------------------

    def _fail(self, error: FelixError) -> None:
        """The session ends with this; the first one counts."""
        if self._failed is None:
            self._failed = error
        self._wake.set()

    def _durable(self, window: SendWindow, way: OnTheWay, index: int, error: FelixError | None) -> None:
        """Step 9: its leaves are durable, so the envelope may leave."""
        if error is not None:
            self._fail(error)
            return
        self._context.failpoints.at("intent-durable")
        window.durable(way)
        if window is self._window:
            self._send()

    def _send(self) -> None:
        window, channel = self._window, self._channel
        assert window is not None and channel is not None
        if self._failed is not None:
            return
        try:
            for way in window.sendable():
                channel.send(way.envelope)
                self.stats.envelopes += 1
                if self._context.failpoints.is_at("sent"):
                    # What was queued leaves at the end of this turn; the process must not die before.
                    asyncio.get_running_loop().call_later(0.005, self._context.failpoints.at, "sent")
        except FelixError as error:
            self._fail(error)

    def _received(self, next_offset: int, receipt: bytes) -> None:
        """Step 10: a receipt came."""
        window = self._window
        if window is None or self._failed is not None:
            return
        try:
            self._context.failpoints.at("receipt")
            way = window.answered(next_offset)
            self._acknowledge(way, receipt)
        except FelixError as error:
            self._fail(error)
            return
        CrossingTracing.end(self._spans.pop(way.last_offset, None))
        stats = self.stats
        stats.position = window.position
        stats.crossed += way.records
        appended = self._append_times.pop(way.last_offset, 0)
        stats.answered_append_ms = max(stats.answered_append_ms, appended)
        self._backoff.reset()
        self._denied_backoff.reset()
        self._denials.forget()
        if self.phase is LinkPhase.GAP:
            self._step(LinkEvent.OPENED, "")
        self.reason = ""
        self._wake.set()
        self._send()

    def _acknowledge(self, way: OnTheWay, data: bytes) -> None:
        """Verify the receipt against what was sent, and append the ACK leaf. Raises what does not hold."""
        context, route, endpoint = self._context, self._route, self._endpoint
        assert route is not None and endpoint is not None
        receipt = open_receipt(data, endpoint.trust.receipt_keys)
        ack = msgspec.structs.replace(
            route.template,
            kind=Kind.ACK,
            time_ms=context.clock_ms(),
            first_offset=way.first_offset,
            last_offset=way.last_offset,
            records=way.records,
            envelope_sha256=way.envelope_sha256,
            destination_first_offset=receipt.destination_first_offset,
            destination_last_offset=receipt.destination_last_offset,
            attempt=2 if way.is_again else 1,
            receipt=data,
        )
        wrong = differences(receipt, ack)
        if receipt.entries_sha256 != way.entries_sha256:
            # One that names no records is of a broker of before, and would not show which of them arrived.
            wrong.append("entries_sha256")
        if wrong:
            raise ProtocolError(
                f"{endpoint.region} signed a receipt for something else than was sent: {', '.join(wrong)} differ.",
                code=Code.TAMPERED,
            )
        context.append([Leaf(ack)], self._acknowledged)
        context.failpoints.at("ack-appended")

    def _acknowledged(self, index: int, error: FelixError | None) -> None:
        if error is not None:
            self._fail(error)


def _joined(*said: str) -> str:
    """What is to be said, one after the other; what a later one begins with is said once."""
    kept = [
        each
        for at, each in enumerate(said)
        if each and not any(later.startswith(each) for later in said[at + 1 :])
    ]
    return " ".join(kept)


def _sentence(error: FelixError) -> str:
    """A refusal's sentence for a leaf. What a broker said is its text: a hash of it stands in the log, the code says why."""
    if not error.told:
        return error.sentence[:SENTENCE_CHARS_MAX]
    digest = hashlib.sha256(error.sentence.encode()).hexdigest()
    return f"A region refused it with {error.code.name}; its sentence is sha256:{digest}."
