"""The broker with the region's audit log answers the others (`region.evidence.remote_audit` asks), and takes its own leaves as theirs.

Invariants:
- only a broker of this region is served, and only for leaves of what arrived or was refused; documents and keys get theirs where the log is;
- of one asker one group after the other is appended, and so of one shard that arrives, whoever asks: a question that comes later knows of all
  that was asked before. A stream's leaders, one after the other, may bring the same ranges;
- while this broker does not write the log, nobody is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from audit.crossed import Page
from audit.errors import AuditUnavailableError
from audit.leaf import VERSION, EncodedLeaf, Header, Kind, Leaf, decode_leaf, encode_for_log
from audit.origin import Origin
from audit.position import ShardName
from audit.trail import Done, Trail, TrailStatus
from felix.bounded import BoundedMap
from felix.errors import Code, CorruptionError, FelixError, RequestError
from felix.names import SpiffeId
from felix.news import News
from felix.tasks import end_tasks
from region.copies.peer_requests import PeerRequests
from region.evidence.arrival_index import ArrivalIndex, Place, is_arrival
from region.evidence.audit_requests import (
    AGAIN_S,
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
from region.evidence.document_log import KNOWN_MS_MAX, DocumentLog
from region.evidence.home_leaves import HomeLeaves
from region.evidence.remote_audit import REFUSALS_AHEAD_MS_MAX

log = logging.getLogger("felix.region.audit")

FOLLOW_S: Final = 1.0
"""How long the broker with the log waits with its answer for a leaf that does not stand yet: what was answered is to be fresh still (KNOWN_MS_MAX)."""
assert 1_000 * FOLLOW_S < KNOWN_MS_MAX
STAND_SHARE: Final = 16
"""A question is answered once one in so many of its documents has its leaf: answered at each, a thousand documents would be asked for a thousand times."""
CHECKED_AT_ONCE_BYTES: Final = 64 << 10
"""Leaves of so many bytes, a thousand records, are looked at on the event loop, in a third of a millisecond; more of them in a thread."""
COLLECT_S: Final = 0.05
"""How often a question about several documents is looked at while their leaves are written."""
REFUSED_AHEAD_MS_MAX: Final = 60_000
"""How far ahead of this broker's clock a refusal may be dated: reports go by a log's latest time, and no leaf is taken back."""
assert REFUSALS_AHEAD_MS_MAX < REFUSED_AHEAD_MS_MAX, "who brings them waits until they are taken"
REFUSAL_FIELDS: Final = (
    "kind", "side", "time_ms", "source_region", "destination_region", "stream", "grant_id", "actor", "action",
    "rule", "code", "sentence",
)  # fmt: skip
"""What a refusal's leaf has (region.governance.denials)."""
TELLING_MAX: Final = 4
"""Sets of offsets that are kept because their next page will be asked for. For one that is not kept the log is read again."""


class AuditServer:
    """The broker with the log answers the others; its own leaves it takes as theirs (`AuditPort`): a stream that it led, and leads again, may have
    had them written while they waited."""

    def __init__(
        self,
        requests: PeerRequests,
        trail: Trail,
        arrivals: ArrivalIndex,
        logged: DocumentLog,
        leaves: HomeLeaves,
        now_ms: Callable[[], int],
        is_home: Callable[[], bool] = lambda: True,
    ) -> None:
        """`now_ms`: this broker's clock. `is_home`: whether this broker writes the log now; while it does not, nobody is answered."""
        self._origin = Origin.parse(trail.key.name)
        self._now_ms, self._is_home = now_ms, is_home
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
        async with self._in_turn(peer):
            groups = await self._checked(peer, request.groups)
            shards = sorted({name for group in groups if (name := _shard_of(group)) is not None})
            async with self._in_turn(*shards):
                return await self._append_checked(groups, request)

    async def _append_checked(self, groups: list[list[EncodedLeaf]], request: AppendLeaves) -> LeavesAppended:
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
        charged = {grant: self._trail.positions.charged_bytes(grant) for grant in grants}
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

    async def _checked(self, peer: str, groups: list[list[bytes]]) -> list[list[EncodedLeaf]]:
        """Leaves that a leader writes, each whole: one that cannot be read would have the log verify never again. Raises RequestError for any
        other."""

        def check() -> list[list[EncodedLeaf]]:
            return [[self._checked_leaf(peer, data) for data in group] for group in groups]

        is_little = sum(len(data) for group in groups for data in group) <= CHECKED_AT_ONCE_BYTES
        return check() if is_little else await asyncio.to_thread(check)

    def _checked_leaf(self, peer: str, data: bytes) -> EncodedLeaf:
        try:
            leaf = decode_leaf(data)
        except CorruptionError as error:
            raise RequestError(
                f"Broker {peer} brings a leaf that cannot be read: {error.sentence}", code=Code.FORBIDDEN
            ) from error
        header = leaf.header
        is_theirs = is_arrival(header) or header.kind is Kind.DENY
        if leaf.version != VERSION or not is_theirs or self._origin.misplaced(header):
            raise RequestError(
                f"Broker {peer} brings a leaf that is not about what arrived or was refused there.",
                code=Code.FORBIDDEN,
            )
        if header.kind is Kind.DENY:
            self._check_refusal(peer, leaf)
        return EncodedLeaf(header, data)

    def _check_refusal(self, peer: str, leaf: Leaf) -> None:
        header = leaf.header
        if leaf.entries or header != Header(**{name: getattr(header, name) for name in REFUSAL_FIELDS}):
            raise RequestError(
                f"Broker {peer} brings a refusal's leaf that says more than a refusal does.",
                code=Code.FORBIDDEN,
            )
        if header.time_ms > self._now_ms() + REFUSED_AHEAD_MS_MAX:
            raise RequestError(
                f"Broker {peer} brings a refusal's leaf that is dated {(header.time_ms - self._now_ms()) // 1_000} s ahead of this broker's clock.",
                code=Code.FORBIDDEN,
                hint="Set the clocks of both machines right.",
            )

    def _may_stand(self, group: list[EncodedLeaf]) -> bool:
        """Whether the log may have a range: what arrived of its shard goes further. Cheap; ranges of a shard come in order."""
        header = group[0].header
        if not is_arrival(header):
            return False
        assert header.first_offset is not None
        return (
            self._trail.positions.arrived_below(ShardName.of(header), header.incarnation)
            > header.first_offset
        )

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
            *await self._arrivals.arrived_below(SpiffeId.parse(asked.bridge), asked.name, asked.incarnation)
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
        found = stand()
        leaves = {digest: leaf for digest in found if (leaf := self._logged.leaf_of(digest)) is not None}
        return LeavesStand(found, list(filter(self._logged.may_stand, asked.digests)), leaves)


def _shard_of(group: list[EncodedLeaf]) -> ShardName | None:
    """The shard that leaves of an arrival are about; None for other leaves."""
    header = group[0].header
    return ShardName.of(header) if is_arrival(header) else None
