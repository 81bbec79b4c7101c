"""One session of a link: from its channels' opening until something ends it. See bridge.link_worker for the steps by their numbers.

Invariants: nothing is sent before its leaves are durable; no INTENT under a grant that does not hold by this clock; the source never waits; what is
held here is bounded by the limits of the configuration. On the event loop. Caller: bridge.link_worker, which makes one anew for each session.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import msgspec
from opentelemetry.trace import Span

from audit.crossed import CROSSED_AHEAD, CROSSED_BEFORE, OffsetSet
from audit.leaf import EMPTY_RANGE_BYTES, GapKind, Kind, Leaf
from audit.receipt import differences, open_receipt
from audit.trail import Trail
from bridge.budget import fits_budget, rate_limit
from bridge.crossing import (
    Packed,
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
from bridge.link import Announced, LinkEvent, OnTheWay, SendWindow, Todo
from bridge.link_context import LARGE_BYTES, STEP_S, Link, LinkContext, LinkMemory
from bridge.link_opening import LinkOpening
from bridge.places import Place, Places, Turns
from bridge.plan import PlannedLink, Verdict
from bridge.tracing import CrossingTracing
from bridge.wire import IngestChannel, SealedBatch, SealedFeed
from felix.batch import BatchHeader, decode_header
from felix.errors import Code, CorruptionError, FelixError, ProtocolError, RequestError, UnavailableError
from felix.frames import GapBody, GapReason
from felix.messages import CutState, GetDataKey, GetLinkSecret, IngestOpened, OpenIngest, StreamState
from felix.names import StreamName
from felix.rate import TokenBucket
from felix.steps import Steps
from keys.envelope import DataKey
from keys.handoff import HandoffScope, open_data_key
from keys.link import LinkSecrets, LinkSecretScope, open_link_secrets
from keys.transfer import TransferScope, seal_transfer_key
from policy.terms import GrantTerms
from policy.transform import Transform

_NO_ENTRIES_SHA256: Final = hashlib.sha256().digest()

log = logging.getLogger("felix.bridge.link_session")

DRAIN_S: Final = 3.0
"""How long receipts are waited for when a link ends in order."""
DATA_KEYS_MAX: Final = 64
"""Data keys of one link in memory: one per leader epoch and rotation, and old ones are seldom read again."""
SETTLE_S: Final = 0.02
"""How soon a session that begins looks again whether what was announced before is durable."""
IDLE_S: Final = 0.25
"""How soon a link that nothing wakes looks at clock and plan: a grant that expires stops within this."""

IDLE_TURN_S: Final = 0.0005
"""An iteration of the event loop that took no longer had nothing else to do."""

T = TypeVar("T")

_GAP_KINDS: Final = {
    GapReason.RETENTION: GapKind.RETENTION,
    GapReason.RING: GapKind.RETENTION,
    GapReason.TRUNCATED: GapKind.RETENTION,
    GapReason.RECREATED: GapKind.INCARNATION,
    GapReason.COMPACTED: GapKind.COMPACTION,
}


class LeftError(Exception):
    """The plan no longer says that the link runs."""


class _InterruptedError(Exception):
    """It stopped to say so while a batch was worked on."""


async def _settled(trail: Trail) -> None:
    """What an earlier session of the link announced is durable: the ledger has it from when the log accepted it, the log's positions only from then on, and
    a session that begins in between would not know its envelopes again. Raises AuditUnavailableError where the log takes nothing now."""
    accepted = trail.status().size
    while True:
        if (failure := trail.failure) is not None:
            raise failure.with_traceback(None)
        if trail.status().durable >= accepted:
            return
        await asyncio.sleep(SETTLE_S)


class LinkSession:
    """`run` it once, and `close` it whatever it ended with."""

    def __init__(
        self,
        link: Link,
        context: LinkContext,
        endpoint: RegionEndpoint,
        memory: LinkMemory,
        wake: asyncio.Event,
    ) -> None:
        """`wake`: set when anything may have changed for the session."""
        self._link, self._context, self._endpoint, self._memory = link, context, endpoint, memory
        self._wake = wake
        self._opening = LinkOpening(link, context, memory)
        self._failed: FelixError | None = None
        self._held_back: FelixError | None = None
        """why no INTENT may be announced now, by what the egress log has and by this clock"""
        self._feed: SealedFeed | None = None
        self._channel: IngestChannel | None = None
        self._window: SendWindow | None = None
        self._route: Route | None = None
        self._own_before: OffsetSet | None = None
        self._before: OffsetSet | None = None
        """what crossed before a resend, by the egress log and by the destination"""
        self._held: SealedBatch | GapBody | None = None
        self._data_keys: dict[bytes, DataKey] = {}
        self._secrets: LinkSecrets | None = None
        self._transform: Transform | None = None
        self._turn: Place | None = None
        """that it has, or waits for"""
        self._worked_from = 0.0
        """since when it has worked in this turn, by the monotonic clock"""
        self._append_times: dict[int, int] = {}
        self._spans: dict[int, Span | None] = {}

    @property
    def window(self) -> SendWindow | None:
        """What is on the way; None until the channels stand."""
        return self._window

    async def run(self, trail: Trail, row: PlannedLink) -> None:
        """Raises what ends it; LeftError where the plan does."""
        context, opening = self._context, self._opening
        source = context.source
        await _settled(trail)
        context.require_whole(row.destination_region, self._link.link_shard)
        await context.check_history(self._endpoint)
        await context.log_grant(row)  # 1
        stream = await opening.describe()
        await opening.take_statement(row, stream)
        opening.log_old_incarnation()
        opening.check_source()
        self._own_before = await opening.crossed_before(trail)
        await self._take_secrets(row, stream)  # 2
        await self._open_channel(opening.first_epoch(trail))  # 3
        assert self._channel is not None
        opened = self._channel.opened
        opening.check_own_log(opened)
        opening.check_destination(trail, opened)
        # What this link lost is said first: there an operator decides.
        await context.check_receipts(self._endpoint)
        # Before the log is told that nobody asks for some of them any more.
        unanswered = opening.unanswered(trail, opened)
        opening.log_elsewhere(trail, opened)
        self._window = self._begin(opened, unanswered)
        self._memory.stats.position = self._window.position
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
            raise UnavailableError(f"{row.stream} was made anew while the link opened.", retry_after_ms=50)
        context.require_allowed(row, context.clock_ms())
        memory = self._memory
        memory.stats.sessions += 1
        memory.truncation, memory.cut, memory.incarnation = "", None, opening.source.live.incarnation
        memory.stats.stands_by = False
        self._link.step(LinkEvent.OPENED, "")
        await self._carry()

    def close(self) -> None:
        """Let the channels go. What comes of the session later does nothing."""
        if self._feed is not None:
            self._feed.close()
        if self._channel is not None:
            self._channel.close()
        self._feed = self._channel = self._window = self._route = None
        self._secrets = self._transform = None
        self._data_keys.clear()
        for span in self._spans.values():
            CrossingTracing.end(span, "the session ended before the receipt came")
        self._spans.clear()

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

    async def _open_channel(self, epoch: int) -> None:
        """The ingest stream for one source epoch; an older one of this session is closed."""
        context, row, endpoint, source = self._context, self._link.row, self._endpoint, self._opening.source
        assert row.export is not None
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
                lambda link: IngestChannel.open(link, request, self._received, self.fail),
            )
        except RequestError as error:
            if error.code is Code.CONFLICT:
                self._memory.not_there.add(source.live.incarnation)
            raise
        except CorruptionError as error:
            if error.code is Code.TRUNCATED:
                # Only the destination knows of it (another agent carried before): all that is held would cross again.
                at = self._opening.goes_back_to
                self._memory.cut = CutState(source.live.incarnation, source.statement.epoch_at(at), at)
                self._memory.truncation = str(error)
            elif error.code is Code.TRUNCATION_UNKNOWN:
                # Nothing to accept: that would begin another history than the one that landed.
                self._memory.truncation, self._memory.cut = str(error), None
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

    def _begin(self, opened: IngestOpened, unanswered: list[Announced]) -> SendWindow:
        """Where to go on: what the destination has recorded, and what the egress log says."""
        limits = self._context.limits
        account = self._context.ledger.shard(self._link.link_shard, self._opening.source.live.incarnation)
        return SendWindow(
            position=opened.position,
            accounted_to=(
                account.accounted_to
                if account is not None and account.grant_id == self._link.row.grant
                else None
            ),
            # Before that offset nobody knows any more what stayed for having crossed before.
            unanswered=[each for each in unanswered if each.first_offset >= opened.crossed_from],
            envelopes_max=min(limits.envelopes, opened.envelopes_max),
            credit_bytes=min(limits.on_the_way, opened.credit_bytes),
            ask_again=self._memory.ask_again,
        )

    async def _carry(self) -> None:
        """Batch after batch, until something ends it."""
        context = self._context
        feed, window = self._feed, self._window
        assert feed is not None and window is not None and self._link.row.export is not None
        terms = self._link.row.export.terms
        monotonic = context.runtime.clock.monotonic
        rate = context.rates.setdefault(self._link.row.grant, rate_limit(terms.rate_bytes, monotonic()))
        while True:
            self._wake.clear()
            if self._failed is not None:
                raise self._failed
            if (
                self._link.is_leaving
                or self._link.row.verdict is not Verdict.RUN
                or self._opening.goes_back()
            ):
                await self._drain()
                raise LeftError
            if self._held_back is not None:
                await self._drain()
                raise self._held_back
            try:
                context.require_whole(self._link.row.destination_region, self._link.link_shard)
            except CorruptionError:
                await self._drain()
                raise
            if context.clock_ms() >= terms.expires:
                await self._drain()
                raise RequestError(f"The grant {self._link.row.grant} has expired.", code=Code.GRANT_EXPIRED)
            if context.clock_ms() < terms.not_before:
                await self._drain()
                raise RequestError(
                    f"The grant {self._link.row.grant} has not begun by this clock.", code=Code.GRANT_NOT_YET
                )
            pause_s = IDLE_S
            if window.has_room:
                wait_s = rate.wait_s(monotonic()) if rate is not None else 0.0
                held = context.held()
                if held:
                    # Receipts of what is on its way are still taken; nothing else is begun.
                    self._link.reason = held
                elif wait_s:
                    self._link.reason = f"Held to the grant's rate of {terms.rate_bytes} bytes per second."
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
            if item.shard == self._link.row.shard:
                self._gap(item.next_offset, _GAP_KINDS[GapReason(item.reason)])
            return
        header = decode_header(item.body)
        if header.shard != self._link.row.shard:
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
        """Steps 5 to 8 for one batch. False where the grant does not hold any more, its rate asks for a pause, or what it has become waits already; then the rest of it stays."""
        self._context.failpoints.at("read")
        data_key = self._data_keys.get(header.key_id)
        if data_key is None:
            data_key = await self._take_data_key(header)
        try:
            async with self._place(header.plain_length):
                await self._take_turn()
                return await self._cross_stepped(item, header, data_key, rate)
        except _InterruptedError:
            return False
        finally:
            self._leave_turn()

    @asynccontextmanager
    async def _place(self, plain_bytes: int) -> AsyncIterator[None]:
        """Wait for one, where the batch is a large one. Raises as `_require_going`."""
        if plain_bytes <= LARGE_BYTES:
            yield
            return
        large = self._context.large
        place = self._ask(large)
        try:
            while not place.given.is_set():
                self._require_going()
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await place.given.wait()
            yield
        finally:
            large.leave(place)

    async def _take_turn(self) -> None:
        """Wait until no other link works on a batch, in fair order: for a step of each of them at most. Raises as `_require_going`."""
        self._turn = turn = self._ask(self._context.turns)
        has_waited = not turn.given.is_set()
        await turn.given.wait()
        self._worked_from = self._context.runtime.clock.monotonic()
        if has_waited:
            self._require_going()

    def _leave_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._context.turns.leave(turn, self._context.runtime.clock.monotonic() - self._worked_from)

    def _ask(self, places: Places | Turns) -> Place:
        row = self._link.row
        return places.ask(row.share, row.stream)

    def _require_going(self) -> None:
        """Raises _InterruptedError where the link is to stop, and what ends the session."""
        if self._failed is not None:
            raise self._failed
        if self._link.is_leaving or self._link.row.verdict is not Verdict.RUN:
            raise _InterruptedError

    async def _cross_stepped(
        self, item: SealedBatch, header: BatchHeader, data_key: DataKey, rate: TokenBucket | None
    ) -> bool:
        """As `_cross`. Raises _InterruptedError where the link is to stop."""
        context, window, route, at = self._context, self._window, self._route, self._context.failpoints.at
        assert window is not None and route is not None
        opened = await self._stepped(open_sealed(item.body, data_key))  # 5
        at("open")
        sorted_ = await self._stepped(sort_records(opened, route, self._before))  # 6
        at("transform")
        for sealed in await self._stepped(seal_ranges(sorted_, route, window.next_offset)):  # 7
            if window.is_crowded:
                # The batch is cut in the same places once more when there is room, and the rest of it crosses then.
                return False
            is_new = window.is_new(sealed.last_offset)
            packed = await self._stepped(range_entries(sealed, route, withheld=is_new))
            # Only now: while that was made the grant may have ended.
            terms, now = route.terms, context.clock_ms()
            if is_new and not self._may_cross(route, now, rate):
                # Before the window goes on: the rest of the batch is dealt with again.
                return False
            todo = window.judge(sealed.first_offset, sealed.last_offset)
            if todo is Todo.SKIP:
                continue
            way = OnTheWay(
                sealed.first_offset,
                sealed.last_offset,
                sealed.records,
                sealed.envelope,
                sealed.envelope_sha256,
                packed.entries_sha256,
                sealed.path,
                todo is Todo.RESEND,
            )
            if todo is Todo.CROSS:
                charge = sealed.record_bytes or EMPTY_RANGE_BYTES
                self._require_budget(terms, charge)
                if context.tracing is not None:
                    self._spans[sealed.last_offset] = context.tracing.begin(
                        self._link.row.stream, terms.from_region, terms.to_region, opened.records or ()
                    )
                self._announce(sealed, packed, way, route, now)  # 8
                self._append_times[sealed.last_offset] = header.append_time_ms
                if rate is not None:
                    rate.charge(charge, context.runtime.clock.monotonic())
            else:
                self._memory.stats.resent += 1
                window.put(way)
                window.durable(way)
                self._send()
        return True

    async def _stepped(self, steps: Steps[T]) -> T:
        """What the steps end with. However much there is to do for a batch, others have as long as it, where they want it. Raises as `_require_going`."""
        monotonic = self._context.runtime.clock.monotonic
        begun = monotonic()
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                found: T = ended.value
                return found
            held_s = monotonic() - begun
            if held_s >= STEP_S:
                await self._give_way(held_s)
                begun = monotonic()

    async def _give_way(self, held_s: float) -> None:
        """First whoever else is on the event loop, while no link works; then other links, one at a time."""
        await self._let_others(held_s)
        self._worked_from = self._context.runtime.clock.monotonic()
        self._leave_turn()
        await self._take_turn()

    async def _let_others(self, held_s: float) -> None:
        monotonic = self._context.runtime.clock.monotonic
        now = monotonic()
        end = now + held_s
        while now < end:
            before = now
            await asyncio.sleep(0)
            self._require_going()
            now = monotonic()
            if now - before < IDLE_TURN_S:
                return

    def _require_budget(self, terms: GrantTerms, charge: int) -> None:
        """Raises RequestError(BUDGET_EXHAUSTED) where the grant has not so many bytes left."""
        charged = self._context.ledger.grant(self._link.row.grant).charged_bytes
        if not fits_budget(terms.budget_bytes, charged, charge):
            raise RequestError(
                f"The grant {self._link.row.grant} has used up its budget of {terms.budget_bytes} bytes: {charged} are "
                f"charged, and the next range counts {charge}.",
                code=Code.BUDGET_EXHAUSTED,
                hint="Make a new grant with a new budget.",
            )

    async def _take_data_key(self, header: BatchHeader) -> DataKey:
        context, row = self._context, self._link.row
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

    def _may_cross(self, route: Route, now_ms: int, rate: TokenBucket | None) -> bool:
        """Asked again for each range: while a key was waited for, or others had their turn, the grant may have ended, other links of it have charged its rate, and what
        is asked before each batch may have changed, of which the next turn says why."""
        context, row = self._context, self._link.row
        try:
            context.require_whole(row.destination_region, self._link.link_shard)
        except CorruptionError:
            return False
        if context.held() or not self._may_announce(route, now_ms):
            return False
        return rate is None or not rate.wait_s(self._context.runtime.clock.monotonic())

    def _may_announce(self, route: Route, now_ms: int) -> bool:
        """Whether an INTENT of this time is one under a grant that holds, by all that its log has: a clock may have been set back, or a word
        come, since the link was opened."""
        terms = route.terms
        if self._link.row.verdict is not Verdict.RUN or not terms.not_before <= now_ms < terms.expires:
            return False
        try:
            self._context.require_allowed(self._link.row, now_ms)
        except UnavailableError as error:
            self._held_back = error
        return self._held_back is None

    def _announce(
        self, sealed: SealedRange, packed: Packed, way: OnTheWay, route: Route, now_ms: int
    ) -> None:
        """Step 8: the leaves, all in one append and of the time that was asked for; the envelope waits until they are
        durable."""
        context, window, stats = self._context, self._window, self._memory.stats
        assert window is not None
        leaves = range_leaves(sealed, packed, route, now_ms)
        window.put(way)
        context.append(leaves, partial(self._durable, window, way))
        context.failpoints.at("intent-appended")
        for leaf in leaves:
            if leaf.header.kind is Kind.WITHHELD:
                stats.withheld += leaf.header.records
                stats.filtered += leaf.header.records if leaf.header.reason == "filtered" else 0
                if leaf.header.reason != CROSSED_BEFORE:
                    self._memory.kept += leaf.header.records
                    self._memory.kept_for = leaf.header.sentence
        if sealed.records:
            self._memory.kept = 0

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
        cover, last = leap.cover_first, next_offset - 1
        envelope, digest = seal_nothing(route, cover, last)
        is_new = leap.announced is None or leap.announced.envelope_sha256 != digest
        if is_new:
            # Also where a shorter one was announced before the gap grew: it has a leaf of its own, in both logs.
            self._require_budget(route.terms, EMPTY_RANGE_BYTES)
        window.put(way := OnTheWay(cover, last, 0, envelope, digest, _NO_ENTRIES_SHA256, (), False))
        self._memory.alarm = f"Offsets {cover} to {last} are gone at the source ({kind.value})."
        log.error(
            "link %s %s/%d: %s",
            self._link.row.grant,
            self._link.row.stream,
            self._link.row.shard,
            self._memory.alarm,
        )
        self._link.step(LinkEvent.GAP, self._memory.alarm)
        self._memory.stats.gaps += next_offset - cover
        leaves: list[Leaf] = []
        if leap.leaf_first < next_offset:
            leaves.append(gap_leaf(route.template, kind, leap.leaf_first, last, now))
        if leaves or is_new:
            leaves.append(nothing_leaf(route, cover, last, digest, now))
            context.append(leaves, partial(self._durable, window, way))
        else:
            window.durable(way)
            self._send()

    def fail(self, error: FelixError) -> None:
        """The session ends with this; the first one counts."""
        if self._failed is None:
            self._failed = error
        self._wake.set()

    def _durable(self, window: SendWindow, way: OnTheWay, index: int, error: FelixError | None) -> None:
        """Step 9: its leaves are durable, so the envelope may leave."""
        if error is not None:
            self.fail(error)
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
                self._memory.stats.envelopes += 1
                if self._context.failpoints.is_at("sent"):
                    # What was queued leaves at the end of this turn; the process must not die before.
                    asyncio.get_running_loop().call_later(0.005, self._context.failpoints.at, "sent")
        except FelixError as error:
            self.fail(error)

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
            self.fail(error)
            return
        CrossingTracing.end(self._spans.pop(way.last_offset, None))
        stats = self._memory.stats
        stats.position = window.position
        stats.crossed += way.records
        appended = self._append_times.pop(way.last_offset, 0)
        stats.answered_append_ms = max(stats.answered_append_ms, appended)
        self._link.crossed()
        self._wake.set()
        self._send()

    def _acknowledge(self, way: OnTheWay, data: bytes) -> None:
        """Verify the receipt against what was sent, and append the ACK leaf. Raises what does not hold."""
        context, route, endpoint = self._context, self._route, self._endpoint
        assert route is not None
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
            path=way.path,
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
            self.fail(error)
