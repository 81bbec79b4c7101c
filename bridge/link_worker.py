"""The worker: the actor of one link. It carries one granted shard to one region, for as long as the plan says so, one session after the other.

One session, in the numbers of docs/bridges.md (bridge.link_session):

1. the plan says that the grant holds, and its GRANT leaf stands in the egress log;
2. the source hands out the link's secrets; 3. the destination answers its position;
4. the source is subscribed to from there, and the policy by which it lets the link read stands in the egress log; then per batch
5. open, 6. judge and transform, 7. seal (bridge.crossing), 8. append WITHHELD and INTENT leaves,
9. once they are durable, send; 10. verify the receipt and append the ACK leaf.

Whatever ends a session, the next one begins again with 1, and learns from the egress log and the destination where to
go on (bridge.link_opening). Several envelopes are on the way at once (bridge.link.SendWindow); leaves of many batches share a sync.

Invariant: a refusal is in the egress log as a DENY leaf, and what is said of the link says why it does not run.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import suppress
from typing import Final

from audit.leaf import Header, Kind, Leaf, Side
from audit.position import LinkShard
from bridge.endpoint import RegionEndpoint
from bridge.link import Denials, LinkEvent, LinkPhase, advance
from bridge.link_context import LinkContext, LinkMemory, LinkStats
from bridge.link_session import LeftError, LinkSession
from bridge.plan import PlannedLink, Verdict
from felix.backoff import Backoff, BackoffPolicy
from felix.errors import Code, FelixError, UnavailableError
from felix.messages import (
    LinkState,
    ShardState,
    StreamState,
)

log = logging.getLogger("felix.bridge.link_worker")

DENIED_AGAIN: Final = BackoffPolicy(first_ms=1_000, ceiling_ms=30_000)
"""After a refusal: a changed plan wakes the link at once, so this is for what the plan does not see."""
LOST_AGAIN: Final = BackoffPolicy(first_ms=100, ceiling_ms=5_000)
"""After a lost session or a full disk."""
DENIED_FAMILIES: Final = (2, 3, 5, 6, 7)
"""Hundreds of codes that are refusals, and not outages."""
SENTENCE_CHARS_MAX: Final = 2_000
REASON_CHARS_MAX: Final = 4_000
"""Of what is said of a link: what a message takes."""
INTERRUPT_S: Final = 1.0
"""How long a session that is to end may take to see it: less than a region that does not answer may keep it waiting."""
KEPT_SAID: Final = 1_000
"""Records that stay in a row before a link that let some cross says so: a filter may well leave that many out."""

EVENT_OF: Final = {
    Verdict.PAUSE: LinkEvent.PAUSE,
    Verdict.DENY: LinkEvent.REFUSE,
    Verdict.STOP: LinkEvent.END,
}
"""What a planned link that is not to run is told; every other verdict holds it."""


def may_run(row: PlannedLink) -> bool:
    """Whether the plan says that the link runs, and of which shard."""
    return row.verdict is Verdict.RUN and row.shard >= 0 and row.export is not None


def link_shard_of(context: LinkContext, row: PlannedLink) -> LinkShard:
    """The name of a row's link in the egress log."""
    return LinkShard(
        str(context.bridge),
        context.source.region,
        row.destination_region,
        row.stream,
        row.shard,
        row.destination_stream,
    )


def state_at_rest(context: LinkContext, row: PlannedLink, high_watermark: int, notice: str) -> LinkState:
    """What is said of a link that never was to run: the plan's reason, and what crossed before this process began. `high_watermark`: -1 where nobody asked for it. Where the
    destination stands it says as a link opens."""
    crossed, withheld, filtered = context.ledger.sums(link_shard_of(context, row))
    return LinkState(
        grant=row.grant,
        stream=row.stream,
        shard=max(0, row.shard),
        from_region=context.source.region,
        to_region=row.destination_region,
        bridge=str(context.bridge),
        state=advance(LinkPhase.WAITING, EVENT_OF.get(row.verdict, LinkEvent.HOLD)).value,
        reason=_joined(row.reason, notice)[:REASON_CHARS_MAX],
        position=-1,
        high_watermark=high_watermark,
        crossed=crossed,
        withheld=withheld - filtered,
        filtered=filtered,
        reported_ms=context.clock_ms(),
    )


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
        self._memory = LinkMemory()
        self._wake = asyncio.Event()
        self._planned = asyncio.Event()
        self._leaving = False
        self._denials = Denials()
        self._waiting_since_ms = 0
        """when the source was first seen to have more than the destination; 0 while it has not"""
        self._backoff = Backoff(LOST_AGAIN, context.runtime.random)
        self._denied_backoff = Backoff(DENIED_AGAIN, context.runtime.random)
        self._session: LinkSession | None = None
        """the one that stands"""
        self._running: asyncio.Task[None] | None = None
        self._interrupted: FelixError | None = None
        """why it is ended, wherever it is"""
        self._between = asyncio.Event()
        """set while none does"""
        self._between.set()

    # -- what the agent calls --------------------------------------------------------------------------

    @property
    def stats(self) -> LinkStats:
        """What the link counts."""
        return self._memory.stats

    @property
    def in_session(self) -> bool:
        """Whether it reads from the source and sends to the destination now, or is about to."""
        return self._session is not None

    @property
    def link_shard(self) -> LinkShard:
        """The link's name in the egress log."""
        return link_shard_of(self._context, self.row)

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
        high = self._memory.high
        high[stream.incarnation] = state.high_watermark
        while len(high) > 4:
            del high[next(iter(high))]
        stats = self.stats
        position = max(0, stats.position)
        if state.high_watermark <= position:
            self._waiting_since_ms = 0
        elif not self._waiting_since_ms:
            self._waiting_since_ms = self._context.clock_ms()
        stats.high_watermark = state.high_watermark
        records = state.high_watermark - state.log_start
        behind = max(0, state.high_watermark - position)
        # By its share of the records: the sizes of single batches are not asked for.
        stats.lag_bytes = state.size_bytes * min(behind, records) // records if records > 0 else 0

    @property
    def is_leaving(self) -> bool:
        """True once it was told to end; it does not begin again."""
        return self._leaving

    def wake(self) -> None:
        """Something that held the link may have changed."""
        self._wake.set()

    def retry(self) -> None:
        """What kept it from a session is over: do not wait for the next try."""
        self._planned.set()

    async def interrupt(self, error: FelixError) -> None:
        """End the session that stands, if one does, whatever it waits for: no region that does not answer keeps another's links from going on."""
        if self._session is not None and self._running is not None:
            self._session.fail(error)
            await asyncio.wait({self._running}, timeout=INTERRUPT_S)
            if self._running is not None:
                self._interrupted = error
                self._running.cancel()
        await self._between.wait()

    def leave(self) -> None:
        """The agent stops: finish what is on the way, then end."""
        self._leaving = True
        self._planned.set()
        self._wake.set()

    def report(self, notice: str | None = None) -> LinkState:
        """What the link says of itself. `notice`: the context's, from who asked for it already."""
        row, memory, stats, context = self.row, self._memory, self.stats, self._context
        window = None if self._session is None else self._session.window
        # Under a grant that has ended nothing is still to cross, however far the stream goes on; nor by a bridge that stands by.
        has_ended = self._ended_by in (Code.GRANT_REVOKED, Code.GRANT_EXPIRED)
        known = stats.sessions > 0 and not has_ended and not stats.stands_by
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
            reason=_joined(
                memory.alarm,
                memory.truncation,
                self.reason,
                self._stays(),
                context.notice() if notice is None else notice,
            )[:REASON_CHARS_MAX],
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
            cut=memory.cut if self.phase is LinkPhase.TRUNCATED else None,
            incarnation=memory.incarnation,
        )

    def _stays(self) -> str:
        """What is to be said where nothing crosses though the link is active."""
        memory = self._memory
        is_all = not self._context.ledger.grant(self.row.grant).crossed_records
        if self.phase is not LinkPhase.ACTIVE or not memory.kept or not (is_all or memory.kept >= KEPT_SAID):
            return ""
        what = "No record has crossed under this grant" if is_all else "No record crosses"
        return (
            f"{what}: the last {memory.kept} stayed. {memory.kept_for} See felix bridge plan {self.row.grant}; what stayed "
            "crosses under a better grant with felix bridge resend."
        )

    def rest(self) -> None:
        """The plan says that the link does not run, and why."""
        row = self.row
        self.stats.stands_by = False
        self.step(EVENT_OF.get(row.verdict, LinkEvent.HOLD), row.reason, row.code)

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
            self.step(LinkEvent.ALLOW, "Opening.")
            pause_ms = 0
            try:
                await self._open(row)
            except LeftError:
                continue
            except FelixError as error:
                pause_ms = self._ended(error)
            except OSError as error:
                # Its own disk, or too many open files: nobody refused anything.
                pause_ms = self._ended(UnavailableError(f"The agent's own files do not answer: {error}."))
            except Exception as error:
                log.exception("the link of %s shard %d failed", row.stream, row.shard)
                self.step(LinkEvent.REFUSE, f"The agent failed: {type(error).__name__}: {error}")
                pause_ms = self._denied_backoff.next_ms()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_ms / 1000):
                    await self._planned.wait()

    def step(self, event: LinkEvent, reason: str, code: int = 0) -> None:
        """This happened to the link, and what is to be said of it."""
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
        self.stats.stands_by = error.code is Code.STANDBY
        if error.code is Code.POSITION_GAP:
            # What landed longer ago than the destination remembers is not asked for again.
            self._memory.ask_again = False
        if code // 100 not in DENIED_FAMILIES or isinstance(error, UnavailableError):
            self.step(LinkEvent.LOST, str(error))
            return self._backoff.next_ms(error.retry_after_ms)
        if error.code is Code.PAUSED:
            self.step(LinkEvent.PAUSE, str(error))
        elif error.code in (Code.GRANT_EXPIRED, Code.GRANT_REVOKED, Code.BUDGET_EXHAUSTED):
            self.step(LinkEvent.END, str(error), error.code)
        elif error.code is Code.OFFSET_OUT_OF_RANGE:
            self.step(LinkEvent.GAP, str(error))
        elif error.code in (Code.TRUNCATED, Code.TRUNCATION_UNKNOWN):
            self.step(LinkEvent.TRUNCATE, str(error))
            if not error.told:
                # The GAP leaf says it, where records are gone; nobody refused anything.
                return self._denied_backoff.next_ms(error.retry_after_ms)
        else:
            self.step(LinkEvent.REFUSE, str(error))
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

    async def _open(self, row: PlannedLink) -> None:
        """One session. Raises what ends it."""
        context, endpoint = self._context, self._endpoint
        if endpoint is None:
            raise UnavailableError(row.reason or "The destination is not configured.")
        trail = context.open_trail()
        context.source.link()
        endpoint.link()
        self._session = LinkSession(self, context, endpoint, self._memory, self._wake)
        self._between.clear()
        self._interrupted = None
        self._running = asyncio.ensure_future(self._session.run(trail, row))
        try:
            await self._running
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self._interrupted is None or (own is not None and own.cancelling()):
                raise
            raise self._interrupted from None
        finally:
            self._session.close()
            self._session = self._running = None
            self._between.set()

    def crossed(self) -> None:
        """A receipt held: what was in the way before is over."""
        self._backoff.reset()
        self._denied_backoff.reset()
        self._denials.forget()
        if self.phase is LinkPhase.GAP:
            self.step(LinkEvent.OPENED, "")
        self.reason = ""


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
