"""The region's audit log on another broker's disk: what leads a stream there appends its leaves over the brokers' links, and asks what the log has.

`RemoteAudit`, `RemoteArrivals` and `RemoteLeaves` are the asking side, `AuditServer` the side that has the log. Leaves go in groups: one request is
under way for each asker, and takes along whatever came meanwhile. An answer may be lost: then the group is asked for again, and the log is looked
through from where it ended when the group was first asked for; what stands there is not appended twice, and has the index that it had.

Invariants:
- only a broker of this region is served, and only for leaves of what arrived or was refused; documents and keys get theirs where the log is;
- of one asker one group after the other is appended, and so of one shard that arrives, whoever asks: a question that comes later knows of all
  that was asked before. A stream's leaders, one after the other, may bring the same ranges;
- an asker holds WAITING_BYTES_MAX of leaves at most, and says so by refusing more;
- while the broker with the log is not reached, nothing may cross here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from audit.agreement import STANDING_GRACE_MS
from audit.crossed import OffsetSet, Page
from audit.errors import AuditUnavailableError
from audit.leaf import EncodedLeaf, Kind, Leaf, encode_for_log, read_header
from audit.position import ShardName
from audit.trail import Done, Trail, TrailStatus
from felix.bounded import BoundedMap
from felix.errors import Code, FelixError, RequestError
from felix.names import SpiffeId, StreamName
from felix.news import News
from felix.tasks import end_tasks
from keys.transfer import TransferScope
from policy.truncation import Live
from region.arrival_index import ArrivalIndex, Place, is_arrival
from region.audit_port import FoundAck
from region.document_log import KNOWN_MS_MAX, DocumentLog
from region.peer_requests import ASK_S, ASKED_MAX, AnswerT, PeerRequest, PeerRequests

log = logging.getLogger("felix.region.audit")

ToldT = TypeVar("ToldT")

WAITING_BYTES_MAX: Final = 64 << 20
"""Leaves that wait for the broker with the log: as many as region.arrivals lets wait."""
GROUP_BYTES_MAX: Final = 4 << 20
"""Leaves of one request, unless those of one range are more."""
AGAIN_S: Final = 0.2
"""How soon a group is asked for again that was refused or lost."""
FOLLOW_S: Final = 1.0
"""How long the broker with the log waits with its answer for a leaf that does not stand yet: what was answered is to be fresh still (KNOWN_MS_MAX)."""
DIGESTS_MAX: Final = 1_000
"""Documents of one question."""
STREAMS_MAX: Final = 1_000
"""Streams of one question."""
STAND_SHARE: Final = 16
"""A question is answered once one in so many of its documents has its leaf: answered at each, a thousand documents would be asked for a thousand times."""
COLLECT_S: Final = 0.05
"""How often a question about several documents is looked at while their leaves are written."""
READ_S: Final = 600.0
"""How long an answer may take that is read from the whole log; a link that goes down ends the wait."""
CLOCK_AHEAD_MS_MAX: Final = 5_000
"""How far a broker's clock may be ahead of that of the broker with the log, and records still arrive: the leaves that a crossing is judged by have the other one's times.
Half of what verification allows (audit.agreement.STANDING_GRACE_MS); the other half is for how long a broker goes on before it hears of a document's leaf."""
assert CLOCK_AHEAD_MS_MAX + KNOWN_MS_MAX + 1_000 < STANDING_GRACE_MS, (
    "and a second until it is seen who writes the log"
)
assert 1_000 * FOLLOW_S < KNOWN_MS_MAX
READS_OF_BRIDGE_MAX: Final = ASKED_MAX // 8
"""Questions of one bridge's links for which the log may be read; more wait here. The log is read for one of them at a time."""
TELLING_MAX: Final = 4
"""Sets of offsets that are kept because their next page will be asked for. For one that is not kept the log is read again."""
PASSED_REMEMBERED_MAX: Final = 20_000
"""Documents that wait for their leaf, of which is known which brokers have let pass what they stop; and as many, which brokers asked."""
GRANTS_REMEMBERED_MAX: Final = 10_000
"""Grants of which is known what arrived under them without asking; of another one it is asked when a link is opened."""
CLOSE_S: Final = 2.0
"""How long a broker that stops waits for leaves that it took."""
SILENT_S: Final = 60.0
"""A broker that is reached asks every second for the leaf of a document that it has seen; as long as a policy's leaf waits (governance.leaves)."""
LOOK_S: Final = 5.0
"""How often is looked whether a broker that is waited for is back."""

_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class AppendLeaves(PeerRequest, frozen=True, tag="append_leaves"):
    """Groups of leaves, each whole or not at all. `since`: none of them stands below this index. `again`: they may have been asked for before."""

    groups: list[list[bytes]]
    since: int
    again: bool


class LeavesAppended(msgspec.Struct, frozen=True, array_like=True):
    """The index of each group's first leaf; which groups were not there before; the log's size; the bytes that arrived under each grant of these
    groups, whoever brought them."""

    indexes: list[int]
    missing: list[int]
    size: int
    charged: dict[str, int] = {}


class FindAck(PeerRequest, frozen=True, tag="find_ack"):
    """Which ACK leaf begins at a source offset (region.arrival_index.Place)."""

    place: Place


class AckFound(msgspec.Struct, frozen=True, array_like=True):
    """`found` is None where there is none."""

    found: FoundAck | None


class ArrivedBelow(PeerRequest, frozen=True, tag="arrived_below"):
    """Below which source offset a shard arrived under an incarnation."""

    bridge: str
    name: ShardName
    incarnation: bytes


class CrossedBefore(PeerRequest, frozen=True, tag="crossed_before"):
    """What arrived of a shard before the newest of `lives` began, from a chunk of offsets on: a page of it."""

    bridge: str
    name: ShardName
    lives: list[Live]
    chunk: int


class OffsetsTold(msgspec.Struct, frozen=True, array_like=True):
    page: Page


class ChargedBytes(PeerRequest, frozen=True, tag="charged_bytes"):
    """Bytes that arrived under a grant."""

    grant: str


class NumberTold(msgspec.Struct, frozen=True, array_like=True):
    number: int


class AwaitLeaves(PeerRequest, frozen=True, tag="await_leaves"):
    """Which of these documents have their leaf. `passed`: what each of them stops, and was taken before at the asker, has its leaves; then the
    answer waits for FOLLOW_S at most."""

    digests: Annotated[list[_Digest], msgspec.Meta(max_length=DIGESTS_MAX)]
    passed: bool


class StreamsPassed(PeerRequest, frozen=True, tag="streams_passed"):
    """Into which of these streams, of several copies each, nothing is on its way any more that a document stops, as who leads them says."""

    digest: _Digest
    streams: Annotated[list[str], msgspec.Meta(max_length=STREAMS_MAX)]


class PassedTold(msgspec.Struct, frozen=True, array_like=True):
    """`known`: whether the document is judged by there; `streams`: those that are served there, all that arrived before with its leaf."""

    known: bool
    streams: list[str]


class LeavesStand(msgspec.Struct, frozen=True, array_like=True):
    """The documents that have their leaf, and those whose leaf is being written: it may stand already."""

    digests: list[bytes]
    writing: list[bytes] = []


# -- asking --------------------------------------------------------------------------------------------


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
        """As `AuditPort`. `done` is called on the loop once they stand, however long that takes; never after `close`."""
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

    async def arrived_below(self, bridge: SpiffeId, name: ShardName, incarnation: bytes) -> int:
        """As `ArrivalLog`."""
        asked = ArrivedBelow(str(bridge), name, incarnation)
        what = str(bridge), name, incarnation
        return (await self._shared(what, partial(self._ask, asked, NumberTold, timeout_s=READ_S))).number

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
        self._tasks: set[asyncio.Task[None]] = set()

    async def all_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """Nothing: the broker that writes the leaf waits for the others."""

    def written(self, digest: bytes) -> None:
        """Nothing: nobody told this broker anything."""

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool | None:
        """Whether a document has its leaf; None while that is being written. Waits for the broker that writes it; with `passed`, also for the leaf, for a while. Questions of one
        moment share a request."""
        loop = asyncio.get_running_loop()
        asked = self._asked.get(passed)
        if asked is None or len(asked) >= DIGESTS_MAX:
            asked = self._asked[passed] = {}
            task = loop.create_task(self._ask(passed, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
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
        for digest, waiting in asked.items():
            if not waiting.done():
                waiting.set_result(None if digest in writing else digest in stand)

    async def close(self) -> None:
        """Ask no more."""
        await end_tasks(*self._tasks)


# -- serving -------------------------------------------------------------------------------------------


class HomeLeaves:
    """The broker with the log: a document's leaf waits until the others have let pass what it stops (governance.leaves.Neighbours)."""

    writes_here: Final = True

    def __init__(
        self,
        own: str,
        brokers: Callable[[], Mapping[str, str]],
        streams_of: Callable[[str], Iterable[StreamName]],
        is_up: Callable[[str], bool],
        copied: Callable[[Callable[[StreamName], bool]], Mapping[StreamName, str]],
        ask: Callable[[str, StreamsPassed], Awaitable[PassedTold]],
    ) -> None:
        """`brokers`: every broker of the region, with the address of each that is alive. `streams_of`: those of which a broker's disk may have
        records without a leaf, and no other one's. `is_up`: whether a link to one stands. `copied`: of the streams that are asked for those with several
        copies, each with the broker that leads it, or none. `ask` asks a broker, which may be this one."""
        self._own = own
        self._copied = copied
        self._ask = ask
        self._brokers = brokers
        self._streams_of = streams_of
        self._is_up = is_up
        self._passed: BoundedMap[bytes, set[str]] = BoundedMap(PASSED_REMEMBERED_MAX)
        self._asked: BoundedMap[bytes, dict[str, float]] = BoundedMap(PASSED_REMEMBERED_MAX)
        """when each broker asked last for a document's leaf, by the loop's clock"""
        self._news = News()

    def heard(self, digests: Iterable[bytes], broker: str, *, passed: bool) -> None:
        """Another broker has seen these documents, and lets pass what they stop; `passed`: at it nothing is on its way any more that they stop."""
        # What is forgotten for another is said again: whoever asked asks until the leaf stands.
        now, is_news = asyncio.get_running_loop().time(), False
        for digest in digests:
            asked = self._asked.use(digest)
            if asked is None:
                self._asked.put(digest, {broker: now})
            else:
                asked[broker] = now
            if passed:
                held = self._passed.use(digest) or set()
                if broker not in held:
                    held.add(broker)
                    self._passed.put(digest, held)
                    is_news = True
        if is_news:
            self._news.tell()

    def written(self, digest: bytes) -> None:
        """It has its leaf."""
        self._passed.pop(digest)
        self._asked.pop(digest)

    async def all_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """Wait for every other broker that is alive, or has a stream in which that may have arrived: it writes the leaves that a crash left there,
        or a disk that is full, and behind a revocation these would be held against the log for ever. One that is reached and has not asked for the leaf for
        SILENT_S has not seen the document; it is waited for where it has such a stream, unless another document has taken the place of this one in the
        store: then it never will."""
        await self._all_brokers_passed(digest, leads_to, is_stored)
        await self._all_copied_passed(digest, leads_to, is_stored)

    async def _all_copied_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """The same of streams with copies: whoever leads one says so while it does. What its leader of before had taken has its leaf before the stream is
        served again."""
        told, now = False, asyncio.get_running_loop().time
        silent_from = now() + SILENT_S
        copied = self._copied(leads_to)
        while copied:
            led, wanted, unknown = defaultdict[str, list[str]](list), set(copied), set[str]()
            for name, leader in sorted(copied.items()):
                led[leader].append(str(name))
            for leader, names in led.items():
                if not leader or not self._is_up(leader):
                    continue
                with suppress(FelixError):
                    answer = await self._ask(leader, StreamsPassed(digest, names[:STREAMS_MAX]))
                    wanted -= {StreamName.parse(name) for name in answer.streams}
                    if not answer.known and not is_stored():
                        unknown.update(names)
            if not wanted:
                return
            if now() >= silent_from:
                if unseen := sorted(name for name in wanted if str(name) in unknown):
                    log.warning(
                        "a document's leaf no longer waits for %s, whose leader knows nothing of it", ", ".join(map(str, unseen[:3]))
                    )  # fmt: skip
                    wanted.difference_update(unseen)
                elif not told:
                    log.warning(
                        "a document's leaf waits for %s, where records may have arrived without a leaf: have it served again, or delete it",
                        ", ".join(map(str, sorted(wanted)[:3])),
                    )  # fmt: skip
                    told = True
            await asyncio.sleep(AGAIN_S)
            copied = self._copied(wanted.__contains__)

    async def _all_brokers_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        told, now = False, asyncio.get_running_loop().time
        began = now()

        def may_not_see(broker: str) -> bool:
            asked = (self._asked.use(digest) or {}).get(broker, began)
            return (
                self._is_up(broker)
                and now() - asked >= SILENT_S
                and not (is_stored() and any(map(leads_to, self._streams_of(broker))))
            )

        while missing := self._missing(digest, leads_to):
            gone = sorted(broker for broker in missing if not self._brokers().get(broker))
            if gone and not told:
                log.warning(
                    "a document's leaf waits for broker %s, which is not there and may have records without a leaf: start it, or delete its streams",
                    ", ".join(gone),
                )  # fmt: skip
                told = True
            if not gone and all(map(may_not_see, missing)):
                log.warning(
                    "a document's leaf no longer waits for broker %s, which says nothing of it",
                    ", ".join(missing),
                )
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.following.wait()

    def _missing(self, digest: bytes, leads_to: Callable[[StreamName], bool]) -> list[str]:
        passed = self._passed.use(digest) or set()
        return [
            broker
            for broker, address in self._brokers().items()
            if broker != self._own
            and broker not in passed
            and (address or any(map(leads_to, self._streams_of(broker))))
        ]

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool | None:
        """Never asked here."""
        raise AssertionError("the log is here")


class MovingLeaves:
    """`governance.leaves.Neighbours` where brokers copy the log, and any of them may go on with it."""

    def __init__(self, here: HomeLeaves, elsewhere: RemoteLeaves, is_home: Callable[[], bool]) -> None:
        self._here, self._elsewhere, self._is_home = here, elsewhere, is_home

    @property
    def writes_here(self) -> bool:
        return self._is_home()

    async def all_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """As whoever writes leaves does."""
        if self._is_home():
            await self._here.all_passed(digest, leads_to, is_stored)

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool | None:
        """As the broker that is home says."""
        return await self._elsewhere.has_leaf(digest, passed=passed)

    def written(self, digest: bytes) -> None:
        """It has its leaf."""
        self._here.written(digest)


class AuditServer:
    """The broker with the log answers the others; its own leaves it takes as theirs (`AuditPort`): a stream that it led, and leads again, may have
    had them written while they waited."""

    def __init__(
        self,
        region: str,
        requests: PeerRequests,
        trail: Trail,
        arrivals: ArrivalIndex,
        logged: DocumentLog,
        leaves: HomeLeaves,
        is_home: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_home`: whether this broker writes the log now; while it does not, nobody is answered."""
        self._region = region
        self._is_home = is_home
        self._trail, self._arrivals, self._logged, self._leaves = trail, arrivals, logged, leaves
        self._appending: WeakValueDictionary[str | ShardName, asyncio.Lock] = WeakValueDictionary()
        """by asker, and by shard"""
        self._own_under_way: Counter[ShardName] = Counter()
        """groups of this broker's own that are accepted and not durable"""
        self._own_news = News()
        self._own: dict[asyncio.Task[None], asyncio.Lock] = {}
        """groups of this broker's own that wait, each with its shard's lock: what comes after it waits for it, also before it has begun"""
        self._telling: BoundedMap[tuple[object, ...], Iterator[Page]] = BoundedMap(TELLING_MAX)
        """by what the next question will be: the pages that are left"""
        for request, handler in (
            (AppendLeaves, self._append),
            (FindAck, self._find_ack),
            (ArrivedBelow, self._arrived_below),
            (CrossedBefore, self._crossed_before),
            (ChargedBytes, self._charged_bytes),
            (AwaitLeaves, self._await_leaves),
        ):
            requests.serve(request, partial(self._answer, handler))

    async def _answer(
        self, handler: Callable[[str, Any], Awaitable[msgspec.Struct]], peer: str, asked: Any
    ) -> msgspec.Struct:
        if not self._is_home():
            raise AuditUnavailableError(
                "This broker does not write the audit log now.",
                hint="Ask again: another one may go on with it.",
                retry_after_ms=200,
            )
        return await handler(peer, asked)

    @property
    def failure(self) -> AuditUnavailableError | None:
        """As `AuditPort`."""
        return self._trail.failure

    def status(self) -> TrailStatus:
        """As `AuditPort`."""
        return self._trail.status()

    def append_nowait(
        self, leaves: Sequence[Leaf | EncodedLeaf], done: Done, loop: asyncio.AbstractEventLoop | None = None
    ) -> int:
        """As `AuditPort`."""
        encoded = [leaf if isinstance(leaf, EncodedLeaf) else encode_for_log(leaf) for leaf in leaves]
        name = _shard_of(encoded)
        if name is None or (name not in self._appending and not self._may_stand(encoded)):
            return self._append_at_once(name, encoded, done, loop)
        if (failure := self._trail.failure) is not None:
            raise failure
        task = asyncio.get_running_loop().create_task(self._append_own(name, encoded, done))
        self._own[task] = self._appending.setdefault(name, asyncio.Lock())
        task.add_done_callback(self._own.pop)
        return -1

    def _append_at_once(
        self,
        name: ShardName | None,
        leaves: list[EncodedLeaf],
        done: Done,
        loop: asyncio.AbstractEventLoop | None,
    ) -> int:
        if name is None:
            return self._trail.append_nowait(leaves, done, loop)

        def stands(first: int, error: AuditUnavailableError | None) -> None:
            self._own_under_way[name] -= 1
            if not self._own_under_way[name]:
                del self._own_under_way[name]
            self._own_news.tell()
            done(first, error)

        index = self._trail.append_nowait(leaves, stands, loop)
        self._own_under_way[name] += 1
        return index

    async def _append_own(self, name: ShardName, leaves: list[EncodedLeaf], done: Done) -> None:
        """Until they stand, as another broker asks until they do."""
        told = ""
        async with self._in_turn(name):
            while True:
                try:
                    if found := await self._arrivals.find_groups(0, [leaves]):
                        break
                    self._append_at_once(name, leaves, done, asyncio.get_running_loop())
                    return
                except (FelixError, OSError) as error:
                    if str(error) != told:
                        told = str(error)
                        log.warning("leaves of this broker's own streams wait: %s", error)
                    await asyncio.sleep(AGAIN_S)
        done(found[0], None)

    @asynccontextmanager
    async def _in_turn(self, *names: str | ShardName) -> AsyncIterator[None]:
        """Nobody else appends of these meanwhile, and all that was accepted of them before is durable."""
        async with AsyncExitStack() as stack:
            for name in names:
                await stack.enter_async_context(self._appending.setdefault(name, asyncio.Lock()))
            await self._own_news.until(lambda: not any(name in self._own_under_way for name in names))
            yield

    async def close(self) -> None:
        """Append no more of what this broker took; the next start does."""
        await end_tasks(*self._own)
        await self._arrivals.close()

    async def _append(self, peer: str, request: AppendLeaves) -> LeavesAppended:
        groups = [[self._checked(peer, data) for data in group] for group in request.groups]
        shards = sorted({name for group in groups if (name := _shard_of(group)) is not None})
        async with self._in_turn(peer, *shards):
            indexes: dict[int, int] = {}
            if request.again or any(self._may_stand(group) for group in groups):
                indexes = await self._arrivals.find_groups(request.since, groups)
            for number, group in enumerate(groups):
                if number not in indexes and self._may_stand(group):
                    # Who leads the stream now may have brought it before the asker of before knew how far the log was.
                    found = await self._arrivals.find_place(Place.of_leaf(group[0].header))
                    if found is not None:
                        indexes[number] = found.leaf
            missing = [number for number in range(len(groups)) if number not in indexes]
            if missing:
                indexes |= await self._append_all({number: groups[number] for number in missing})
        ordered = [indexes[number] for number in range(len(groups))]
        grants = {group[0].header.grant_id for group in groups if is_arrival(group[0].header)}
        charged = {grant: self._trail.charged_bytes(grant) for grant in grants}
        return LeavesAppended(ordered, missing, self._trail.status().durable, charged)

    async def _append_all(self, groups: dict[int, list[EncodedLeaf]]) -> dict[int, int]:
        """They share a sync. Raises the first refusal: then some may stand, and some not."""
        loop = asyncio.get_running_loop()
        waiting: dict[int, asyncio.Future[int]] = {}
        refusal: FelixError | None = None
        for number, leaves in groups.items():
            future: asyncio.Future[int] = loop.create_future()

            def done(
                first: int, error: AuditUnavailableError | None, future: asyncio.Future[int] = future
            ) -> None:
                if future.done():
                    return
                if error is None:
                    future.set_result(first)
                else:
                    future.set_exception(error)

            try:
                self._trail.append_nowait(leaves, done, loop)
            except FelixError as error:
                refusal = error
                break
            waiting[number] = future
        found = await asyncio.gather(*waiting.values(), return_exceptions=True)
        refusal = next((each for each in found if isinstance(each, FelixError)), refusal)
        if refusal is not None:
            raise refusal
        return {number: future.result() for number, future in waiting.items()}

    def _checked(self, peer: str, data: bytes) -> EncodedLeaf:
        """A leaf that a leader writes. Raises RequestError for any other."""
        header = read_header(data)
        allowed = header is not None and (
            (is_arrival(header) and header.destination_region == self._region)
            or (
                header.kind is Kind.DENY and self._region in (header.source_region, header.destination_region)
            )
        )
        if header is None or not allowed:
            raise RequestError(
                f"Broker {peer} brings a leaf that is not about what arrived or was refused there.",
                code=Code.FORBIDDEN,
            )
        return EncodedLeaf(header, data)

    def _may_stand(self, group: list[EncodedLeaf]) -> bool:
        """Whether the log may have a range: what arrived of its shard goes further. Cheap; ranges of a shard come in order."""
        header = group[0].header
        if not is_arrival(header):
            return False
        assert header.first_offset is not None
        return self._trail.arrived_below(ShardName.of(header), header.incarnation) > header.first_offset

    async def _told_all(self, peer: str) -> None:
        """Wait until what a broker asked to be appended before is in the log, or refused. A process of it that is gone may have: what is asked for
        the one that came after it would lack that."""
        async with self._appending.setdefault(peer, asyncio.Lock()):
            pass

    async def _find_ack(self, peer: str, asked: FindAck) -> AckFound:
        await self._told_all(peer)
        return AckFound(await self._arrivals.find_place(asked.place))

    async def _arrived_below(self, peer: str, asked: ArrivedBelow) -> NumberTold:
        await self._told_all(peer)
        return NumberTold(
            await self._arrivals.arrived_below(SpiffeId.parse(asked.bridge), asked.name, asked.incarnation)
        )

    async def _crossed_before(self, peer: str, asked: CrossedBefore) -> OffsetsTold:
        what = peer, asked.bridge, asked.name, tuple(asked.lives)
        pages = self._telling.pop((*what, asked.chunk)) if asked.chunk else None
        if pages is None:
            await self._told_all(peer)
            bridge = SpiffeId.parse(asked.bridge)
            found = await self._arrivals.crossed_before(bridge, asked.name, asked.lives)
            pages = found.pages(asked.chunk)
        page = await asyncio.to_thread(next, pages)
        if page.end:
            self._telling.put((*what, page.end), pages)
        return OffsetsTold(page)

    async def _charged_bytes(self, peer: str, asked: ChargedBytes) -> NumberTold:
        await self._told_all(peer)
        return NumberTold(await self._arrivals.charged_bytes(asked.grant))

    async def _await_leaves(self, peer: str, asked: AwaitLeaves) -> LeavesStand:
        def stand() -> list[bytes]:
            return [digest for digest in asked.digests if digest in self._logged]

        lacking = [digest for digest in asked.digests if digest not in self._logged]
        self._leaves.heard(lacking, peer, passed=asked.passed)
        if asked.passed:
            enough = 1 + len(asked.digests) // STAND_SHARE
            with suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_S):
                    while len(stand()) < enough:
                        await self._logged.news.following.wait()
                        if enough > 1:
                            await asyncio.sleep(COLLECT_S)
        return LeavesStand(stand(), list(filter(self._logged.may_stand, asked.digests)))


def _shard_of(group: list[EncodedLeaf]) -> ShardName | None:
    """The shard that leaves of an arrival are about; None for other leaves."""
    header = group[0].header
    return ShardName.of(header) if is_arrival(header) else None
