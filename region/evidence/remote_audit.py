"""The region's audit log on another broker's disk: what leads a stream here appends its leaves over the brokers' links, and asks what the log has.

Leaves go in groups: one request is under way for each asker, and takes along whatever came meanwhile. An answer may be lost: then the group is
asked for again, and the log is looked through from where it ended when the group was first asked for; what stands there is not appended twice, and
has the index that it had. Whoever has the log answers in `region.evidence.audit_server`.

Invariants:
- an asker holds WAITING_BYTES_MAX of leaves at most, and says so by refusing more;
- while the broker with the log is not reached, nothing may cross here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from audit.agreement import STANDING_GRACE_MS
from audit.crossed import Arrived, OffsetSet
from audit.errors import AuditUnavailableError
from audit.leaf import EncodedLeaf, Kind, Leaf, encode_for_log
from audit.position import ShardName
from audit.trail import Done, TrailStatus
from felix.bounded import BoundedMap
from felix.errors import Code, FelixError
from felix.names import SpiffeId, StreamName
from felix.news import News
from felix.tasks import TaskSet, end_tasks
from keys.transfer import TransferScope
from policy.truncation import Live
from region.copies.peer_requests import ASK_S, ASKED_MAX, AnswerT, PeerRequest, PeerRequests
from region.evidence.arrival_index import Place
from region.evidence.audit_port import FoundAck
from region.evidence.audit_requests import (
    AGAIN_S,
    DIGESTS_MAX,
    AckFound,
    AppendLeaves,
    ArrivedBelow,
    AwaitLeaves,
    ChargedBytes,
    CrossedBefore,
    FindAck,
    LeavesAppended,
    LeavesStand,
    NumberTold,
    OffsetsTold,
)
from region.evidence.document_log import KNOWN_MS_MAX

log = logging.getLogger("felix.region.audit")

ToldT = TypeVar("ToldT")

WAITING_BYTES_MAX: Final = 64 << 20
"""Leaves that wait for the broker with the log: as many as region.crossing.arrivals lets wait."""
GROUP_BYTES_MAX: Final = 4 << 20
"""Leaves of one request, unless those of one range are more."""
READ_S: Final = 600.0
"""How long an answer may take that is read from the whole log; a link that goes down ends the wait."""
CLOCK_AHEAD_MS_MAX: Final = 5_000
"""How far a broker's clock may be ahead of that of the broker with the log, and records still arrive: the leaves that a crossing is judged by have the other one's times.
Half of what verification allows (audit.agreement.STANDING_GRACE_MS); the other half is for how long a broker goes on before it hears of a document's leaf."""
assert CLOCK_AHEAD_MS_MAX + KNOWN_MS_MAX + 1_000 < STANDING_GRACE_MS, (
    "and a second until it is seen who writes the log"
)
REFUSALS_AHEAD_MS_MAX: Final = 30_000
"""The same for refusals, below what that broker takes (region.evidence.audit_server): one that it refuses by its date would keep all leaves behind it waiting,
also once the clock is right."""
READS_OF_BRIDGE_MAX: Final = ASKED_MAX // 8
"""Questions of one bridge's links for which the log may be read; more wait here. The log is read for one of them at a time."""
GRANTS_REMEMBERED_MAX: Final = 10_000
"""Grants of which is known what arrived under them without asking; of another one it is asked when a link is opened."""
CLOSE_S: Final = 2.0
"""How long a broker that stops waits for leaves that it took."""


class _Waiting(NamedTuple):
    leaves: list[bytes]
    since: int
    done: Done
    size: int


class _Home:
    """Who has the log, and asking it."""

    def __init__(self, region: str, requests: PeerRequests, home: Callable[[], str]) -> None:
        self.region = region
        self.requests = requests
        self.home = home

    def unreached(self) -> AuditUnavailableError | None:
        """Why the log cannot be asked now."""
        home = self.home()
        if home and self.requests.is_up(home):
            return None
        if not home:
            return AuditUnavailableError(
                f"No broker goes on with the audit log of {self.region} at the moment.",
                hint="Nothing crosses until one is elected: more than half of those that have copies have to run.",
                retry_after_ms=500,
            )
        return AuditUnavailableError(
            f"Broker {home} has the audit log of {self.region}, and broker {self.requests.own} does not reach it.",
            hint=f"Nothing crosses here until it does: start broker {home}.",
            retry_after_ms=500,
        )

    async def reached(self) -> str:
        """Wait until the broker that has the log is reached; who that is."""
        while self.unreached() is not None:
            await self.requests.news.following.wait()
        return self.home()

    async def until_answered(
        self,
        ask: Callable[[str], Awaitable[ToldT]],
        what_waits: str,
        failed: Callable[[FelixError], None] = lambda error: None,
    ) -> ToldT:
        """Ask the broker that has the log, whoever that is by then, until it answers. A refusal, or an answer that was lost, is told to `failed`; it
        is logged with `what_waits`, once while it stays the same."""
        told = ""
        while True:
            home = await self.reached()
            try:
                return await ask(home)
            except FelixError as error:
                failed(error)
                if error.sentence != told:
                    told = error.sentence
                    log.warning("%s for broker %s: %s", what_waits, home, error)
                await asyncio.sleep(max(AGAIN_S, (error.retry_after_ms or 0) / 1_000))


class RemoteAudit:
    """`AuditPort` of a broker that has not got the log; where brokers copy the log, of each, whoever is home. On the event loop, but for `failure` and `status`."""

    def __init__(self, region: str, requests: PeerRequests, home: Callable[[], str]) -> None:
        self._home = _Home(region, requests, home)
        self.arrivals = RemoteArrivals(self)
        self.leaves = RemoteLeaves(self._home)
        self._queue: deque[_Waiting] = deque()
        self._pending_bytes = 0
        self._size = 0
        self.charged: BoundedMap[str, int] = BoundedMap(GRANTS_REMEMBERED_MAX)
        """the bytes that arrived under a grant, as the last answers said"""
        self._refused: AuditUnavailableError | None = None
        """why the log took no leaves when it was asked last"""
        self._news = News()
        self._brought = News()
        self._task: asyncio.Task[None] | None = None

    @property
    def failure(self) -> AuditUnavailableError | None:
        """As `AuditPort`."""
        return self._home.unreached() or self._refused

    def status(self) -> TrailStatus:
        """As `AuditPort`: as of the last answer."""
        failure = self.failure
        return TrailStatus(
            self._size, self._size, 0, 0, self._pending_bytes, "" if failure is None else str(failure)
        )

    def append_nowait(
        self, leaves: Sequence[Leaf | EncodedLeaf], done: Done, loop: asyncio.AbstractEventLoop | None = None
    ) -> int:
        """As `AuditPort`. `done` is called on the loop once they stand, however long that takes; never after `close`. No refusal is taken while this
        broker's clock is far ahead of the log's."""
        if any(leaf.header.kind is Kind.DENY for leaf in leaves):
            self._require_near_clock()
        encoded = [(leaf if isinstance(leaf, EncodedLeaf) else encode_for_log(leaf)).data for leaf in leaves]
        size = sum(map(len, encoded))
        if self._pending_bytes + size > WAITING_BYTES_MAX:
            raise self.failure or AuditUnavailableError(
                f"{self._pending_bytes} bytes of leaves wait for broker {self._home.home()}, which has the audit log; {WAITING_BYTES_MAX} may.",
                hint="Nothing crosses until it has caught up; try again.",
                retry_after_ms=100,
            )
        self._queue.append(_Waiting(encoded, self._size, done, size))
        self._pending_bytes += size
        self._news.tell()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._bring(), name="leaves to the audit log")
        return -1

    async def _bring(self) -> None:
        while True:
            await self._news.until(lambda: bool(self._queue))
            taken, size = [self._queue.popleft()], 0
            while self._queue and (size := size + taken[-1].size) + self._queue[0].size <= GROUP_BYTES_MAX:
                taken.append(self._queue.popleft())
            answer = await self._append([each.leaves for each in taken], min(each.since for each in taken))
            for each, index in zip(taken, answer.indexes, strict=True):
                self._pending_bytes -= each.size
                try:
                    each.done(index, None)
                except Exception:
                    # A mistake of ours in what one leaf is for: the others go on.
                    log.exception("what follows a leaf failed")
            self._brought.tell()

    async def _append(self, groups: list[list[bytes]], since: int) -> LeavesAppended:
        """Ask until they stand."""
        again = False

        def failed(error: FelixError) -> None:
            nonlocal again
            # It may have been carried out, wholly or in part.
            again = True
            if error.code is not Code.DISCONNECTED:
                self._refused = AuditUnavailableError(
                    f"The audit log takes no leaves: {error.sentence}", hint=error.hint, retry_after_ms=500
                )

        answer = await self._home.until_answered(
            lambda home: self.ask_append(home, AppendLeaves(groups, since, again)), "leaves wait", failed
        )
        self._refused = None
        return answer

    async def ask_append(self, home: str, request: AppendLeaves) -> LeavesAppended:
        """Ask once. Raises the refusal, UnavailableError where the outcome is unknown."""
        answer = await self._home.requests.ask(home, request, LeavesAppended)
        self._size = max(self._size, answer.size)
        for grant, charged in answer.charged.items():
            # Two requests may be answered in another order than they were carried out.
            self.charged.put(grant, max(charged, self.charged.use(grant) or 0))
        return answer

    def _require_near_clock(self) -> None:
        home = self._home.home()
        ahead_ms = self.requests.clock_ahead_ms(home) or 0
        if ahead_ms > REFUSALS_AHEAD_MS_MAX:
            raise AuditUnavailableError(
                f"The clock of broker {self.requests.own} is {ahead_ms / 1_000:.1f} s ahead of that of broker {home}, which has the audit log and takes no "
                "refusal of such a time.",
                hint="Set the clocks of both machines right.",
                retry_after_ms=1_000,
            )

    def home_now(self) -> str:
        """Who has the log. Raises AuditUnavailableError where it is not reached."""
        if (unreached := self._home.unreached()) is not None:
            raise unreached
        return self._home.home()

    @property
    def requests(self) -> PeerRequests:
        return self._home.requests

    async def close(self) -> None:
        """Bring what waits, for CLOSE_S at most; the next start does what is left, but for refusals."""
        await self.leaves.close()
        try:
            async with asyncio.timeout(CLOSE_S if self.failure is None else 0):
                await self._brought.until(lambda: not self._pending_bytes)
        except TimeoutError:
            log.warning("%d bytes of leaves were not brought to the audit log", self._pending_bytes)
        if self._task is not None:
            await end_tasks(self._task)
        self._queue.clear()


class RemoteArrivals:
    """`ArrivalLog` of a broker that has not got the log."""

    def __init__(self, audit: RemoteAudit) -> None:
        self._audit = audit
        self._reading: dict[tuple[object, ...], asyncio.Task[Any]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """of bridges for which questions are under way"""

    def refusal(self) -> FelixError | None:
        """As `ArrivalLog`: this broker's clock gives the times of what arrives here, and may not be far ahead of the log's. A clock that is behind harms
        no honest log: a document that stops something counts from its leaf on, and the broker itself goes by its own clock."""
        requests = self._audit.requests
        home = self._audit.home_now()
        ahead_ms = requests.clock_ahead_ms(home)
        if ahead_ms is None:
            return AuditUnavailableError(
                f"Broker {requests.own} does not know yet what the clock of broker {home}, which has the audit log, says.",
                hint="It does with that one's next beat.",
                retry_after_ms=200,
            )
        if ahead_ms <= CLOCK_AHEAD_MS_MAX:
            return None
        return AuditUnavailableError(
            f"The clock of broker {requests.own} is {ahead_ms / 1_000:.1f} s ahead of that of broker {home}, which has the audit log; "
            f"{CLOCK_AHEAD_MS_MAX // 1_000} s may be, or what arrives could stand in the log as if it had come after a document that stops it.",
            hint="Set the clocks of both machines right; nothing arrives here until then.",
            retry_after_ms=1_000,
        )

    async def append_missing(self, since: int, groups: Sequence[list[EncodedLeaf]]) -> list[int]:
        """As `ArrivalLog`. Raises UnavailableError where an answer was lost: asked again, it appends what is missing still."""
        missing: list[int] = []
        for first, part in _parts(groups):
            request = AppendLeaves([[leaf.data for leaf in leaves] for leaves in part], since, again=True)
            answer = await self._audit.ask_append(self._audit.home_now(), request)
            missing += [first + number for number in answer.missing]
        return missing

    async def find_ack(self, scope: TransferScope, source_offset: int) -> FoundAck | None:
        """As `ArrivalLog`."""
        return (await self._ask(FindAck(Place.of(scope, source_offset)), AckFound)).found

    async def crossed_before(self, bridge: SpiffeId, name: ShardName, lives: Sequence[Live]) -> OffsetSet:
        """As `ArrivalLog`."""
        what = str(bridge), name, tuple(lives)
        return await self._shared(what, partial(self._pages, bridge, name, lives))

    async def _pages(self, bridge: SpiffeId, name: ShardName, lives: Sequence[Live]) -> OffsetSet:
        found, chunk = OffsetSet(), 0
        while True:
            asked = CrossedBefore(str(bridge), name, list(lives), chunk)
            page = (await self._ask(asked, OffsetsTold, timeout_s=READ_S)).page
            await asyncio.to_thread(found.take, page)
            if page.end <= chunk:
                return found
            chunk = page.end

    async def arrived_below(self, bridge: SpiffeId, name: ShardName, incarnation: bytes) -> Arrived:
        """As `ArrivalLog`."""
        asked = ArrivedBelow(str(bridge), name, incarnation)
        what = str(bridge), name, incarnation
        told = await self._shared(what, partial(self._ask, asked, NumberTold, timeout_s=READ_S))
        return Arrived(told.number, told.brought)

    async def _shared(self, what: tuple[object, ...], ask: Callable[[], Awaitable[ToldT]]) -> ToldT:
        """A question for which the log may be read, shared by all who ask the same, and READS_OF_BRIDGE_MAX of each bridge at a time: it stays under way at the broker
        with the log when it is given up here, and a bridge that opens links again and again would leave no room there for leaves."""
        task: asyncio.Task[ToldT] | None = self._reading.get(what)
        if task is None:
            task = self._reading[what] = asyncio.ensure_future(self._in_turn(str(what[0]), ask))
            task.add_done_callback(
                lambda done: (self._reading.pop(what, None), done.cancelled() or done.exception())
            )
        return await asyncio.shield(task)

    async def _in_turn(self, bridge: str, ask: Callable[[], Awaitable[ToldT]]) -> ToldT:
        async with self._turns.setdefault(bridge, asyncio.Semaphore(READS_OF_BRIDGE_MAX)):
            return await ask()

    async def charged_bytes(self, grant: str) -> int:
        """As `ArrivalLog`."""
        return (await self._ask(ChargedBytes(grant), NumberTold)).number

    def charged_at_least(self, grant: str) -> int:
        """As `ArrivalLog`: by the answers to leaves."""
        return self._audit.charged.use(grant) or 0

    async def _ask(self, request: PeerRequest, answer: type[AnswerT], *, timeout_s: float = ASK_S) -> AnswerT:
        home = self._audit.home_now()
        return await self._audit.requests.ask(home, request, answer, timeout_s=timeout_s)

    async def close(self) -> None:
        """As `ArrivalLog`."""
        await end_tasks(*self._reading.values())


def _parts(groups: Sequence[list[EncodedLeaf]]) -> Iterable[tuple[int, list[list[EncodedLeaf]]]]:
    """In parts of GROUP_BYTES_MAX, each with the number of its first group."""
    first, part, size = 0, list[list[EncodedLeaf]](), 0
    for number, leaves in enumerate(groups):
        more = sum(len(leaf.data) for leaf in leaves)
        if part and size + more > GROUP_BYTES_MAX:
            yield first, part
            first, part, size = number, [], 0
        part.append(leaves)
        size += more
    if part:
        yield first, part


class RemoteLeaves:
    """Which documents have their leaf, asked of the broker that writes them (governance.leaves.Neighbours)."""

    writes_here: Final = False

    def __init__(self, home: _Home) -> None:
        self._home = home
        self._asked: dict[bool, dict[bytes, asyncio.Future[bool | None]]] = {}
        self._leaves: dict[bytes, int] = {}
        """indexes of leaves of which nobody here was told yet"""
        self._tasks = TaskSet()

    async def all_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """Nothing: the broker that writes the leaf waits for the others."""

    def leaf_of(self, digest: bytes) -> int | None:
        """As the broker that wrote it said; once."""
        return self._leaves.pop(digest, None)

    def written(self, digest: bytes) -> None:
        """Nothing: nobody told this broker anything."""

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool | None:
        """Whether a document has its leaf; None while that is being written. Waits for the broker that writes it; with `passed`, also for the leaf, for a while. Questions of one
        moment share a request."""
        loop = asyncio.get_running_loop()
        asked = self._asked.get(passed)
        if asked is None or len(asked) >= DIGESTS_MAX:
            asked = self._asked[passed] = {}
            self._tasks.begin(self._ask(passed, asked))
        return await asyncio.shield(asked.setdefault(digest, loop.create_future()))

    async def _ask(self, passed: bool, asked: dict[bytes, asyncio.Future[bool | None]]) -> None:
        await asyncio.sleep(0)
        if self._asked.get(passed) is asked:
            del self._asked[passed]
        request = AwaitLeaves(list(asked), passed)
        answer = await self._home.until_answered(
            lambda home: self._home.requests.ask(home, request, LeavesStand),
            "which documents have their leaf waits",
        )
        stand, writing = set(answer.digests), set(answer.writing)
        self._leaves |= {digest: leaf for digest, leaf in answer.leaves.items() if digest in asked}
        for digest, waiting in asked.items():
            if not waiting.done():
                waiting.set_result(None if digest in writing else digest in stand)

    async def close(self) -> None:
        """Ask no more."""
        await self._tasks.end()
