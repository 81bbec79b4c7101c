"""The streams that this broker hosts: their open shards, by name.

`StreamTable` follows the catalog: what stands there is opened, what is marked as deleted there is closed and
removed from disk. Missing metadata alone deletes nothing. What an error of the disk has stopped is opened again (`_open_again`), with all that was
acknowledged, or stays stopped. Memory comes out of one budget: what an ephemeral stream was promised and what a
durable shard takes by being open are reserved when a stream is opened, or it is refused; the newest records of durable shards take what is
left, when there are some, and give way again (region.log.ring_pool).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final, Protocol
from weakref import WeakValueDictionary

import msgspec

from felix.batch import BatchHeader
from felix.bounded import BoundedMap
from felix.errors import Code, FelixError, NotLeaderError, RequestError, UnavailableError
from felix.frames import FrameType, frame_header
from felix.messages import ShardState, StreamState, StreamTraffic
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.settings import Views
from felix.told import Told
from region.at_once import at_once
from region.budget import Budget
from region.log.companions import shard_of
from region.log.copies import Copies
from region.log.directory import LogDirectory
from region.log.epochs import next_epoch
from region.log.errors import REOPENED_MS, StorageFailedError
from region.log.left import Left, what_is_missing
from region.log.open_logs import OpenLogs
from region.log.reopener import Reopener, Tried
from region.log.ring_pool import RingPool
from region.log.seal import MakeSeal
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardHooks, ShardLog, ShardSettings
from region.log.shard_settings import always_allowed
from region.metadata.records import (
    REMOVED_REMEMBERED_MAX,
    SHARDS_MAX,
    Stream,
    StreamConfig,
    is_replicated,
    min_in_sync,
    rests_on_commits,
)
from region.offload import check_offload
from region.work_lists import WorkLists

log = logging.getLogger("felix.region.streams")

HOT_BYTES: Final = 8 << 20
"""Of a durable shard's newest records in memory, at most: subscribers that keep up never read the disk."""
SHARD_BYTES: Final = 32 << 10
"""Of the ring budget for each durable shard that is open, whether it is used or not: twice what an idle one was measured to take, so that
the number of shards is bounded by memory as all else is (`python -m benchmarks shards`)."""

FOREIGN_ROOM_PART: Final = 4
"""One part of so many of the ring budget is left by streams that are made for another region: this region's people make theirs there."""

COMPACTED_SEGMENTS: Final = SegmentLimits(segment_bytes_max=32 << 20, segment_age_ms=600_000)
"""Only closed segments are compacted, so those of a compacted stream are closed sooner."""
OFFLOADED_SEGMENTS: Final = SegmentLimits(segment_bytes_max=64 << 20, segment_age_ms=3_600_000)
"""What is read back is fetched segment by segment, and what was written is in the store an hour later."""
COMPANION_RING_BYTES: Final = 128 << 10
"""Of a companion log in memory. It is read once, when it is opened."""

MEASURED_AT_ONCE: Final = 2_000
"""Streams whose bytes on the disk are summed up in one go, of those that were written to since: where there are more, the others the next time."""
UNANSWERED_S: Final = 10.0
"""A disk that has not answered for so long is said to, as of copies (region.replication.leader.HUNG_MS)."""
TENDED_AT_ONCE: Final = 250
"""Streams that are looked at in one go for what hardly ever is to be done, so that idle ones cost a broker the same however many there are:
a segment without a retention that has grown old, producers that were silent for a week, objects of a stream that is no longer offloaded."""
SHARDS_AT_ONCE: Final = 16
"""Shards of a stream that are opened together: as many as there are threads that create shards."""
CLOSED_AT_ONCE: Final = 8
"""Streams that are closed together at the end: the disk has something to do while another one's answers are looked at."""


def delivery_frame(header: BatchHeader) -> bytes:
    """What stands before a batch on an event stream: one encoding serves every subscriber."""
    return frame_header(FrameType.BATCH, header.total_length)


def shard_settings(config: StreamConfig, ring_bytes: int) -> ShardSettings:
    """What the catalog's settings mean for a shard."""
    compaction = config.views.compacted
    deduplication = config.views.deduplication
    if compaction is not None and deduplication is not None:
        # Which ids were seen is read from the records: they stay as long as their ids are asked for.
        compaction = msgspec.structs.replace(
            compaction, lag_ms=max(compaction.lag_ms, deduplication.window_ms)
        )
    return ShardSettings(
        config.durability,
        config.retention,
        COMPACTED_SEGMENTS if compaction else OFFLOADED_SEGMENTS if config.views.offload else SegmentLimits(),
        compaction=compaction,
        offload=config.views.offload,
        ring_bytes_max=ring_bytes,
        deduplication=config.views.deduplication,
    )


class Altering(Protocol):
    """A view of a stream whose settings may be altered while it serves."""

    def prepare(self, views: Views) -> None:
        """These are about to be written; `altered` follows, written or not. Raises FelixError where they cannot be served."""

    def altered(self) -> None:
        """Go by the settings in the stream's record from now on."""


FULL_AGAIN_MS: Final = 1_000
"""Whoever asked for what found no room on the disk, or for a shard that had none to be opened, asks again after this."""
ELSEWHERE_RETRY_MS: Final = 100
"""A client that asked the wrong broker retries after this: the shard may be on its way here."""


class Leading(Protocol):
    """Which streams this broker leads, where it is one of several (region.clustered)."""

    def epochs(self, record: Stream) -> dict[int, int]:
        """The epoch of each shard of a stream that this broker leads; empty where another one does, or nobody yet."""

    def leader_of(self, record: Stream, shard: int) -> str:
        """The broker that leads a shard; empty while none does."""

    def members(self, record: Stream, shard: int) -> tuple[list[str], list[str]]:
        """The brokers that have copies of a shard, and those of them that are in sync."""

    def copies(self, record: Stream, number: int) -> Copies | None:
        """What a shard's log, or the companion of this number, is led by here that has other copies; None for a stream of one. Raises
        UnavailableError where it is not led here."""

    async def forget(self, incarnation: str) -> None:
        """A stream was deleted: its folder is about to go."""

    def not_leader(self, record: Stream, shard: int) -> NotLeaderError:
        """What is answered for a shard that is not served here."""


def not_serving(name: StreamName, number: int, why: FelixError) -> UnavailableError:
    """The refusal of what a shard was asked that does not serve; nothing was done. What passes by itself says so, to whoever asks again: that another broker
    leads it by now, or that this one stops."""
    if isinstance(why, NotLeaderError) and why.stream:
        return why.with_traceback(None)
    if why.code is Code.NOT_LEADER:
        return NotLeaderError(
            f"Shard {number} of {name} is not led here any more. Nothing was done.",
            hint="Ask the shard's new leader.",
            retry_after_ms=ELSEWHERE_RETRY_MS,
            stream=str(name),
        )
    if why.code is Code.SHUTTING_DOWN:
        return UnavailableError(why.sentence, code=why.code, hint=why.hint, retry_after_ms=ELSEWHERE_RETRY_MS)
    if why.code is Code.DISK_FULL:
        return UnavailableError(
            f"Shard {number} of {name} does not serve yet: there was no room on the disk to open it.",
            code=why.code,
            hint="Make room; it is opened by itself within seconds.",
            retry_after_ms=FULL_AGAIN_MS,
        )
    if isinstance(why, StorageFailedError) or _passes(why):
        return UnavailableError(
            f"Shard {number} of {name} does not serve: {why.sentence}",
            code=why.code,
            hint=why.hint,
            retry_after_ms=REOPENED_MS,
        )
    return UnavailableError(f"Shard {number} of {name} does not serve: {why}", code=Code.SHARD_STOPPED)


def about_to_be_served(name: StreamName) -> UnavailableError:
    """The refusal of what a stream was asked whose logs are being closed and opened again; nothing was done."""
    return UnavailableError(f"{name} is about to be served again.", retry_after_ms=ELSEWHERE_RETRY_MS)


Replica = ShardLog | FelixError
"""A broker's view of a shard: its log, or the reason why it does not serve."""


class HostedStream:
    """One incarnation of a stream. `replicas` are the shards that are served here, by number; any other has another broker."""

    __slots__ = (
        "_leading",
        "ceased",
        "closing",
        "companions",
        "deleted",
        "delivered_bytes",
        "delivered_records",
        "epochs",
        "incarnation",
        "is_settling",
        "left",
        "name",
        "record",
        "removed",
        "replicas",
        "ring_taken",
        "stored_bytes",
        "text",
        "tried",
        "views",
    )

    def __init__(
        self,
        name: StreamName,
        record: Stream,
        replicas: dict[int, Replica],
        ring_taken: int,
        start: bytes,
        leading: Leading | None = None,
        epochs: dict[int, int] | None = None,
    ) -> None:
        self.name = name
        self._leading = leading
        self.epochs = epochs or {}
        """of the shards that are led here, where this broker is one of several"""
        self.text = str(name)
        """The name, which streams are in order of."""
        self.record = record
        self.incarnation = self._incarnation(start)
        self.replicas = replicas
        self.ring_taken = ring_taken
        self.deleted = False
        """Whether it is served here no more, for good: also where the broker ends."""
        self.removed = False
        """Whether its records go, so that nobody opens it again."""
        self.ceased = False
        """Whether this broker has just stopped serving it: whoever has it open is to be told."""
        self.delivered_bytes = 0
        self.delivered_records = 0
        self.stored_bytes = 0
        """On the disk, when it was last looked at."""
        self.is_settling = False
        """Whether what must be in its shards first is being put there: nobody else finds them yet."""
        self.left: dict[int, Left] = {}
        """Of logs that were closed and not opened since, shards and companions: what has to be in them."""
        self.tried = -1
        """The log that is being opened to see whether it can be; -1: none."""
        self.companions: list[int] = []
        """Numbers of the companion logs that are open (StreamTable.open_companion)."""
        self.closing: list[Callable[[], Awaitable[None]]] = []
        """Called before the shards are closed, newest first: what the views of this incarnation must put in order."""
        self.views: list[Altering] = []
        """Who serves the stream by its settings beside its shards."""

    def begin(self, replicas: dict[int, Replica], ring_taken: int, epochs: dict[int, int]) -> None:
        """Serve these shards. Of several brokers each election begins an incarnation of an ephemeral stream, as each start of one does."""
        self.replicas, self.ring_taken, self.epochs = replicas, ring_taken, epochs
        if epochs:
            self.incarnation = self._incarnation(b"%d" % max(epochs.values()))

    def _incarnation(self, start: bytes) -> bytes:
        """What clients know the stream's records by. What an ephemeral stream held before is gone, and its offsets
        begin again: to them it is another incarnation after every start of the broker."""
        kept = bytes.fromhex(self.record.incarnation)
        return hashlib.sha256(kept + start).digest()[: len(kept)] if self.ephemeral else kept

    @property
    def ephemeral(self) -> bool:
        return self.record.config.durability.kind == "ephemeral"

    @property
    def compacts(self) -> bool:
        """Whether records go that later ones of their keys have superseded, or some have gone so already."""
        return self.record.config.views.compacted is not None or any(
            shard.compacted_to for shard in self.serving
        )

    @property
    def shard_count(self) -> int:
        """How many shards the stream has, on whichever brokers."""
        return self.record.config.shards

    def find(self, number: int) -> ShardLog | FelixError:
        """A shard's log, or the error for its callers: there is no such shard (INVALID), it does not serve (SHARD_STOPPED), or
        another broker serves it (NOT_LEADER).
        """
        if self.is_settling:
            return self._not_yet(number)
        found = self.replicas.get(number)
        if isinstance(found, ShardLog):
            return found
        if isinstance(found, FelixError) and found.code is Code.NOT_LEADER and self._leading is not None:
            # What keeps it from being led may be another thing by now.
            return self._leading.not_leader(self.record, number)
        if found is not None:
            return not_serving(self.name, number, found)
        if 0 <= number < self.shard_count:
            return self._not_yet(number)
        return RequestError(
            f"{self.name} has no shard {number}: it has {self.shard_count}, from 0 on.",
            hint="Describe the stream, and send each record to the shard of its key.",
        )

    def _not_yet(self, number: int) -> FelixError:
        """What is answered for a shard that is not served here, or not now."""
        if self._leading is not None:
            return self._leading.not_leader(self.record, number)
        return about_to_be_served(self.name)

    @property
    def is_served(self) -> bool:
        """Whether this broker serves all of its shards now, also by what it has heard since it began to."""
        leads = self._leading is None or self._leading.epochs(self.record) == self.epochs
        return leads and len(self.serving) == self.shard_count

    @property
    def unproved(self) -> list[int]:
        """The logs whose disk had failed, and of which nobody has seen since whether they have all that was acknowledged."""
        return sorted(number for number, left in self.left.items() if left.failed)

    @property
    def failed(self) -> list[int]:
        """The shards that an error of the disk has stopped, or kept from being opened."""
        return [
            number for number, each in self.replicas.items() if isinstance(_why(each), StorageFailedError)
        ]

    @property
    def unopened(self) -> list[int]:
        """The shards that could not be opened for what passes, and is no error of the disk: they are to be tried again."""
        return [
            number for number, each in self.replicas.items() if isinstance(each, FelixError) and _passes(each)
        ]

    @property
    def elsewhere(self) -> FelixError | None:
        """What is answered where another broker serves the stream, or nobody yet; None where this one does."""
        return None if self.replicas else self._not_yet(0)

    def shard(self, number: int) -> ShardLog:
        """Raises what `find` gives where it gives an error."""
        found = self.find(number)
        if isinstance(found, FelixError):
            raise found
        return found

    def alter(self, record: Stream) -> None:
        """Take over changed settings while the shards serve."""
        self.record = record
        for shard in self.serving:
            shard.alter(shard_settings(record.config, shard.settings.ring_bytes_max))
        self.settle_views()

    def settle_views(self) -> None:
        """The views go by the settings that the stream has: after a change, and where one that was prepared did not come."""
        for view in self.views:
            view.altered()

    @property
    def serving(self) -> list[ShardLog]:
        """The shards that are open here, in order of their number."""
        return [shard for shard in self.replicas.values() if isinstance(shard, ShardLog)]

    def traffic(self) -> StreamTraffic:
        """What went through since the start, and what is held."""
        shards = self.serving
        counters = [shard.counters for shard in shards]
        return StreamTraffic(
            str(self.name),
            self.shard_count,
            sum(each.records for each in counters),
            sum(each.appended_bytes for each in counters),
            self.delivered_records,
            self.delivered_bytes,
            sum(shard.disk_bytes for shard in shards),
            sum(shard.ring_bytes for shard in shards),
            sum(shard.pending_bytes for shard in shards),
            len(self.replicas) - len(shards) + sum(shard.failure is not None for shard in shards),
        )

    @property
    def rests_on_commits(self) -> bool:
        """Whether an acknowledgement needs no lease: copies that count have what it is of, and they follow nobody else."""
        return rests_on_commits(self.record.config)

    def describe(self, *, detail: bool, fence: FelixError | None = None) -> StreamState:
        """As clients see it; with `detail`, the state of every shard. `fence`: why this broker may not say how far its logs go."""
        config = self.record.config
        return StreamState(
            str(self.name),
            self.incarnation,
            self.shard_count,
            config.durability,
            config.retention,
            config.ring_bytes,
            self.record.created_ms,
            [self._state(number, fence) for number in range(self.shard_count)] if detail else [],
            config.views,
            config.replicas,
            min_in_sync(config) if is_replicated(config) else 0,
            config.acks,
        )

    def _state(self, number: int, fence: FelixError | None) -> ShardState:
        state = self._state_alone(number)
        if fence is not None and state.leader_epoch:
            state = _shard_state(number, fence)
        if self._leading is None:
            return state
        leader = self._leading.leader_of(self.record, number)
        replicas, in_sync = self._leading.members(self.record, number)
        return msgspec.structs.replace(state, leader=leader, replicas=replicas, in_sync=in_sync)

    def _state_alone(self, number: int) -> ShardState:
        found = self.find(number)
        if self._leading is not None and isinstance(found, NotLeaderError):
            return ShardState(number, 0, 0, 0, 0, stopped="" if found.address else str(found))
        return _shard_state(number, found)


def _shard_state(number: int, shard: ShardLog | FelixError) -> ShardState:
    if isinstance(shard, FelixError):
        return ShardState(number, 0, 0, 0, 0, stopped=str(shard))
    return ShardState(
        number,
        shard.log_start_offset,
        shard.high_watermark,
        shard.log_end_offset,
        shard.epochs.current,
        shard.disk_bytes or shard.ring_bytes,
        shard.segment_count,
        str(shard.failure or ""),
    )


class _LackingError(UnavailableError):
    """A log has lost what was acknowledged: it stays stopped until a restart."""

    default_code = Code.SHARD_STOPPED


def _passes(why: FelixError) -> bool:
    """Whether what keeps a shard from being opened passes, and nothing is wrong with its log: no room on the disk, too many open files, a read that the disk did not answer, a key service
    that does not. An error of the disk is for `StreamTable.reopener`."""
    return isinstance(why, UnavailableError) and not isinstance(
        why, (StorageFailedError, _LackingError, NotLeaderError)
    )


def _why(replica: Replica | None) -> FelixError | None:
    """Why a log does not serve; None where it does, or is not open."""
    return replica.failure if isinstance(replica, ShardLog) else replica


def least_bytes(config: StreamConfig) -> int:
    """Of the ring budget, for all shards of a stream: reserved as long as it is open."""
    ephemeral = config.durability.kind == "ephemeral"
    return (config.ring_bytes if ephemeral else SHARD_BYTES) * config.shards


def _text(stream: HostedStream) -> str:
    return stream.text


def _places(name: StreamName) -> tuple[tuple[str, ...], ...]:
    """What streams are counted by."""
    return (name.tenant,), (name.tenant, name.namespace)


class StreamTable:
    """Opens, keeps and closes hosted streams. `refusal` says why nothing may be appended to any of them now, or None.

    Nothing here that one stream's coming or going asks for looks at all the others.
    """

    def __init__(
        self,
        directory: LogDirectory,
        ring_budget: Budget,
        make_seal: MakeSeal,
        refusal: Callable[[], FelixError | None] = always_allowed,
        runtime: Runtime = REAL,
        open_logs: OpenLogs | None = None,
        leading: Leading | None = None,
    ) -> None:
        """`open_logs`: who bounds how many logs have files open. `leading`: which streams are served here, where there are several
        brokers; without it, all are.
        """
        self._leading = leading
        self._directory = directory
        self._make_seal = make_seal
        self._ring_budget = ring_budget
        self._rings = RingPool(ring_budget)
        self._open_logs = OpenLogs() if open_logs is None else open_logs
        self._refusal = refusal
        self._runtime = runtime
        self._start = runtime.random.randbytes(16)
        """Of this start of the broker."""
        self._streams: dict[StreamName, HostedStream] = {}
        # In order, for listings; and how many a tenant and each of its namespaces has.
        self._ordered: list[HostedStream] = []
        self._counts: Counter[tuple[str, ...]] = Counter()
        # Bytes on the disk, by tenant, as far as streams were measured; and those that are to be measured again.
        self._stored: Counter[str] = Counter()
        self._full: dict[ShardLog, None] = {}
        """those that found no room on the disk when they were written to last"""
        self._full_told = Told(runtime.clock.monotonic)
        self._unmeasured: dict[HostedStream, None] = {}
        # The streams that each round-robin pass processed last.
        self._swept: list[HostedStream] = []
        self._offloaded: list[HostedStream] = []
        self._work: WorkLists[HostedStream] = WorkLists()
        # Locks go with who holds them or waits for them.
        self._busy: WeakValueDictionary[StreamName, asyncio.Lock] = WeakValueDictionary()
        # Incarnations that were removed here of late: a record that was read before must not bring one back.
        self._removed: BoundedMap[str, bool] = BoundedMap(REMOVED_REMEMBERED_MAX)
        self.before_opening: list[Callable[[StreamName, Stream], Awaitable[None]]] = []
        """Awaited before the logs of a stream are opened: what they need. Where one raises, the stream is not served."""
        self.before_found: list[Callable[[StreamName, list[ShardLog], list[int]], Awaitable[None]]] = []
        """Called with a stream's open shards before anybody can find them by its name: what must stand before they are read; and with the numbers of those that are not open, and
        may have records that stand behind nothing yet."""
        self.before_serving: list[Callable[[HostedStream], Awaitable[None]]] = []
        """Called with a stream whose shards are open, before anybody is told of it: what must be in them first."""
        self._watchers: list[Callable[[HostedStream], None]] = []
        self.reopener: Reopener[HostedStream] = Reopener(runtime, self._open_again)
        """Of streams with a log that an error of the disk has stopped."""
        self.offload_refused = 0
        """Offload runs that the configuration does not allow."""

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[HostedStream]:
        return iter(list(self._streams.values()))

    def get(self, name: StreamName) -> HostedStream | None:
        return self._streams.get(name)

    def count(self, *place: str) -> int:
        """How many streams a tenant, or a tenant's namespace, has."""
        return self._counts[place]

    def listed(self, prefix: str, after: str) -> Iterator[HostedStream]:
        """The streams whose name begins with `prefix` and comes behind `after`, in order of their names as text."""
        ordered = self._ordered
        at = max(bisect_left(ordered, prefix, key=_text), bisect_right(ordered, after, key=_text))
        for stream in islice(ordered, at, None):
            if not stream.text.startswith(prefix):
                return
            yield stream

    def _add(self, stream: HostedStream) -> None:
        name = stream.name
        self._streams[name] = stream
        insort(self._ordered, stream, key=_text)
        for place in _places(name):
            self._counts[place] += 1
        self._work.place(stream, stream.record.config)
        self._begin_measuring(stream)
        self._changed(stream)

    def _drop(self, stream: HostedStream) -> None:
        name = stream.name
        stream.deleted = True
        del self._streams[name]
        self._work.remove(stream)
        del self._ordered[bisect_left(self._ordered, stream.text, key=_text)]
        self._store(stream, 0)
        for place in _places(name):
            self._counts[place] -= 1
            if not self._counts[place]:
                del self._counts[place]
        self._changed(stream)

    def on_change(self, watcher: Callable[[HostedStream], None]) -> None:
        """Call `watcher` with each stream that came, went (`deleted`), or is served by this broker now or no longer, after those that
        asked before."""
        self._watchers.append(watcher)

    def _changed(self, stream: HostedStream) -> None:
        for watcher in self._watchers:
            watcher(stream)

    async def open(self, record: Stream) -> HostedStream:
        """Open the stream of this record, if it is not open yet.

        Raises UnavailableError(LIMIT_MEMORY), or what opening a log raises; a damaged shard does not keep the
        others from serving (its state says why it does not). RequestError(NOT_FOUND) where this incarnation was
        removed meanwhile.
        """
        name = StreamName.parse(record.name)
        async with self._busy.setdefault(name, asyncio.Lock()):
            if record.incarnation in self._removed:
                raise RequestError(f"The stream {name} was deleted.", code=Code.NOT_FOUND)
            held = self._streams.get(name)
            if held is not None:
                if held.record.incarnation == record.incarnation:
                    if record.revision >= held.record.revision:
                        held.alter(record)
                        self._work.place(held, record.config)
                    if self._leading is None and (held.unopened or not held.replicas):
                        await self._serve_again(held, {})
                    return held
                if held.record.revision > record.revision:
                    return held  # the record is older than what is served
                await self._close(held)
            stream = HostedStream(name, record, {}, 0, self._start, self._leading)
            if self._leading is None:
                await self._serve(stream, {})
            elif epochs := self._leading.epochs(record):
                try:
                    await self._serve(stream, epochs)
                except FelixError as error:
                    log.error("stream %s is led here, and cannot be opened: %s", name, error)
            self._add(stream)
        return stream

    async def _serve(self, stream: HostedStream, epochs: dict[int, int]) -> None:
        """Open the stream's shards, each in the epoch that `epochs` says, else in one that is due. Raises as `open`; then none is."""
        name, record = stream.name, stream.record
        for prepare in self.before_opening:
            await prepare(name, record)
        taken = self._reserve(name, record.config)
        replicas: dict[int, Replica] = {}

        async def open_shard(number: int) -> None:
            if self._leading is not None and number not in epochs:
                replicas[number] = self._leading.not_leader(record, number)
                return
            replicas[number] = await self._open_shard(stream, number, epochs.get(number, 0))

        try:
            await at_once(SHARDS_AT_ONCE, open_shard, range(record.config.shards))
            shards = [each for each in replicas.values() if isinstance(each, ShardLog)]
            unsettled = await self._unsettled(stream, replicas)
            for prepare_shards in self.before_found:
                await prepare_shards(name, shards, unsettled)
            stream.is_settling = True
            stream.begin(dict(sorted(replicas.items())), taken, epochs)
            for settle in self.before_serving:
                await settle(stream)
            for shard in stream.serving:
                stream.left.pop(shard.identity.shard, None)
        except BaseException:
            stream.begin({}, 0, {})
            await self._close_logs(stream, list(replicas))
            self._ring_budget.give(taken)
            raise
        finally:
            stream.is_settling = False

    async def _unsettled(self, stream: HostedStream, replicas: dict[int, Replica]) -> list[int]:
        """The shards that could not be opened here, and have notes of records that may be in them, or may have: they did not let themselves be asked."""
        incarnation, loop = bytes.fromhex(stream.record.incarnation), asyncio.get_running_loop()
        found = []
        for number, each in sorted(replicas.items()):
            if not isinstance(each, FelixError) or isinstance(each, NotLeaderError) or stream.ephemeral:
                continue
            try:
                has_notes = await loop.run_in_executor(
                    self._directory.commit_pool,
                    self._directory.has_notes,
                    stream.name,
                    incarnation,
                    number,
                )
            except OSError:
                has_notes = True
            if has_notes:
                found.append(number)
        return found

    async def release(self, name: StreamName) -> None:
        """Close the logs of a stream that is to be opened as copies. Raises UnavailableError where its disk has failed, and nobody has seen yet whether
        all that was acknowledged is there."""
        await self.reassign(name)
        held = self._streams.get(name)
        if held is not None and held.unproved:
            raise UnavailableError(f"the disk of {name} has failed, and its logs are not open again")

    async def reassign(self, name: StreamName) -> None:
        """Serve the stream from now on, or no longer, as its leader may be another one. Raises as `open` where it cannot be served."""
        leading = self._leading
        if leading is None:
            return
        async with self._busy.setdefault(name, asyncio.Lock()):
            held = self._streams.get(name)
            if held is None:
                return
            if (epochs := leading.epochs(held.record)) == held.epochs:
                if held.unopened:
                    await self._serve_again(held, epochs)
                return
            if held.replicas:
                await self._cease(held)
                # What was being written may have to be committed first: whoever leads tells when it is.
                epochs = leading.epochs(held.record)
            if epochs:
                await self._serve(held, epochs)
                self._begin_measuring(held)
            self._changed(held)

    async def _serve_again(self, stream: HostedStream, epochs: dict[int, int]) -> None:
        """Serve all of its shards, where those can be opened by now that could not. Raises as `open`."""
        for number in stream.unopened:
            if (why := await self._try_log(stream, number, epochs)) is not None:
                # What is answered, and said in the status, is why it cannot be opened now.
                stream.replicas[number] = why
                if stream.failed:
                    self.reopener.failed(stream)
                return
        await self._serve_anew(stream, epochs)
        if not stream.unopened:
            log.info("all shards of stream %s could be opened now, and are served", stream.name)

    async def _try_log(self, stream: HostedStream, number: int, epochs: dict[int, int]) -> FelixError | None:
        """Why a shard or companion that is not open still cannot be opened; None where it can. Those that serve are not disturbed before it is of use."""
        stream.tried = number
        try:
            if number > SHARDS_MAX:
                await self._open_companion(stream, number)
            elif isinstance(
                found := await self._open_shard(stream, number, epochs.get(number, 0), is_again=True),
                FelixError,
            ):
                return found
            await self._close_logs(stream, [number])
        except FelixError as error:
            return error
        finally:
            stream.tried = -1
        return None

    async def _serve_anew(self, stream: HostedStream, epochs: dict[int, int]) -> None:
        """Close what is open of it, and open all. Raises as `open`; then none is."""
        if stream.replicas:
            await self._cease(stream)
        await self._serve(stream, epochs)
        self._begin_measuring(stream)
        self._changed(stream)

    # -- after its disk has failed ---------------------------------------------------------------------

    def _look_whether_failed(self, stream: HostedStream, shard: ShardLog) -> None:
        """An open log of the stream has stopped, or not. Copies are opened again by whoever keeps them."""
        if isinstance(shard.failure, StorageFailedError) and not shard.has_copies and not stream.deleted:
            self.reopener.failed(stream)

    async def _open_again(self, stream: HostedStream) -> Tried:
        async with self._busy.setdefault(stream.name, asyncio.Lock()):
            if stream.deleted:
                return Tried.OVER
            epochs = {} if self._leading is None else self._leading.epochs(stream.record)
            if self._leading is not None and (not epochs or (stream.replicas and epochs != stream.epochs)):
                # Another broker leads it, or this one in another epoch: then `reassign` opens what is there.
                return Tried.OVER
            try:
                why = await self._try_again(stream, epochs)
            except FelixError as error:
                why = error
            except Exception as error:
                log.exception("stream %s could not be opened again", stream.name)
                why = FelixError(f"{type(error).__name__}: {error}")
            if why is None and not self._failed_logs(stream):
                return self._told_open(stream)
            log.warning(
                "stream %s: its logs cannot be opened again, which is tried in %d s: %s",
                stream.name,
                self.reopener.next_pause_s(stream),
                why or "its disk has failed again",
            )
            return Tried.FAILED

    async def _try_again(self, stream: HostedStream, epochs: dict[int, int]) -> FelixError | None:
        """Serve all of its shards, where those can be opened that had failed; what keeps one from that, and may pass. Raises as `open`."""
        failed = self._failed_logs(stream)
        for number in failed:
            if (why := _why(stream.replicas.get(number))) is not None:
                # From here on nobody uses it, and the others serve on.
                stream.replicas[number] = why
        await self._close_logs(stream, failed)
        for number in failed:
            found = await self._try_log(stream, number, epochs)
            if isinstance(found, UnavailableError) and not isinstance(found, _LackingError):
                if isinstance(found, StorageFailedError) and number in stream.replicas:
                    # What keeps it from being opened now, which may be another reason than what had stopped it.
                    stream.replicas[number] = found
                return found
        if failed or not stream.replicas:
            await self._serve_anew(stream, epochs)
        return None

    def _failed_logs(self, stream: HostedStream) -> list[int]:
        """Shards and companions that an error of the disk has stopped, open or not."""
        incarnation = bytes.fromhex(stream.record.incarnation)
        companions = [
            number
            for number in stream.companions
            if number in stream.left
            or _why(self._directory.find(stream.name, incarnation, number)) is not None
        ]
        return [*stream.failed, *companions]

    def _told_open(self, stream: HostedStream) -> Tried:
        """All that could be opened is; some may have lost what was acknowledged."""
        if unproved := stream.unproved:
            numbers = ", ".join(map(str, unproved))
            log.error("stream %s: log %s is not opened again before a restart", stream.name, numbers)
            return Tried.OVER
        if unopened := stream.unopened:
            numbers = ", ".join(map(str, unopened))
            log.warning("stream %s: shard %s is not open again yet, and is tried again", stream.name, numbers)
            return Tried.OPENED
        log.warning("stream %s: its disk had failed, and its logs are open again", stream.name)
        return Tried.OPENED

    async def _close_logs(self, stream: HostedStream, numbers: Iterable[int]) -> list[FelixError]:
        """Close these, of shards and companions. What has to be in them when they are opened again is known from here on. Why some were not closed
        in order."""
        errors: list[FelixError] = []
        incarnation = bytes.fromhex(stream.record.incarnation)
        for number in numbers:
            shard = self._directory.find(stream.name, incarnation, number)
            try:
                await self._directory.close_shard(stream.name, incarnation, number)
            except FelixError as error:
                log.error("%s shard %d does not close in order: %s", stream.name, number, error)
                errors.append(error)
            if shard is not None and not shard.has_copies and not stream.ephemeral:
                stream.left[number] = shard.left()
        return errors

    async def _cease(self, stream: HostedStream) -> None:
        """Serve none of the stream's shards any more: what comes is refused from here on, what is under way is answered."""
        numbers = [*stream.replicas, *stream.companions]
        stream.replicas, stream.companions, stream.epochs = {}, [], {}
        stream.ceased = True
        self._changed(stream)
        stream.ceased = False
        await self._close_views(stream)
        await self._close_logs(stream, numbers)
        self._ring_budget.give(stream.ring_taken)
        stream.ring_taken = 0
        self._store(stream, 0)

    def check_room(self, name: StreamName, config: StreamConfig) -> None:
        """Raises UnavailableError(LIMIT_MEMORY) where a stream with these settings could not be opened now."""
        self._check_room(name, least_bytes(config))

    def check_foreign_room(self, name: StreamName, config: StreamConfig) -> None:
        """Raises UnavailableError(LIMIT_MEMORY) where a stream made for another region would take what is left for this one's."""
        budget = self._ring_budget
        kept = budget.limit_bytes // FOREIGN_ROOM_PART
        if least_bytes(config) > self._rings.room_bytes - kept:
            raise UnavailableError(
                f"{name} would be made for another region, and the ring budget's last quarter is for this region's streams.",
                code=Code.LIMIT_MEMORY,
                hint=f"Make {name} here first, delete streams, or raise limits.ring_budget.",
                retry_after_ms=30_000,
            )

    def _check_room(self, name: StreamName, wanted: int) -> None:
        if wanted > self._rings.room_bytes:
            raise UnavailableError(
                f"{name} needs {wanted} bytes of memory for its shards, and {self._rings.room_bytes} of "
                f"{self._ring_budget.limit_bytes} are left.",
                code=Code.LIMIT_MEMORY,
                hint="Give it fewer shards or a smaller ring, delete streams, or raise limits.ring_budget.",
            )

    def _reserve(self, name: StreamName, config: StreamConfig) -> int:
        """The ring bytes that were taken for all shards of a stream. Raises as `check_room`."""
        wanted = least_bytes(config)
        self._check_room(name, wanted)
        taken = self._rings.make_room(wanted) and self._ring_budget.take(wanted)
        assert taken
        return wanted

    async def _open_shard(
        self, stream: HostedStream, number: int, epoch: int, *, is_again: bool = False
    ) -> ShardLog | FelixError:
        """`epoch`: to lead it in; 0: a new one, that this broker chooses, or that which it had before its disk failed. `is_again`: what keeps it from being
        opened was said."""
        level = logging.DEBUG if is_again else logging.ERROR
        name, record = stream.name, stream.record
        incarnation = bytes.fromhex(record.incarnation)
        config = record.config
        settings = shard_settings(
            config, config.ring_bytes if config.durability.kind == "ephemeral" else HOT_BYTES
        )
        hooks = ShardHooks(
            frame_prefix=delivery_frame,
            refusal=always_allowed if rests_on_commits(config) else self._refusal,
            runtime=self._runtime,
            rings=self._rings,
            open_logs=self._open_logs,
        )
        if settings.durability.kind != "ephemeral":
            seal = self._make_seal(name, incarnation, number)
            hooks = replace(
                hooks, seal=seal.seal, open_batch=seal.open_batch, commitment=seal.commitment, tag=seal.tag
            )
        if self._leading is not None and (copies := self._leading.copies(record, number)) is not None:
            # Its epoch has begun with its election.
            return await self._directory.lead_shard(name, incarnation, number, settings, hooks, copies)
        try:
            shard = await self._directory.open_shard(name, incarnation, number, settings, hooks)
            await self._require_all(stream, number, shard)
        except FelixError as error:
            log.log(level, "%s shard %d does not serve: %s", name, number, error)
            return error
        left = stream.left.get(number)
        if epoch:
            try:
                await shard.begin_epoch(epoch)
            except FelixError as error:
                log.log(level, "%s shard %d does not serve in epoch %d: %s", name, number, epoch, error)
                await self._directory.close_shard(name, incarnation, number)
                return error
            return shard
        # A new epoch at every start, so that later readers see where a restored log diverges from the original.
        if settings.durability.kind != "ephemeral":
            if left is None or not left.epoch or left.epoch != shard.epochs.current:
                shard.begin_epoch_later()
        elif not shard.epochs.current:
            await shard.begin_epoch(next_epoch(0, hooks.clock_ms(), hooks.runtime.random))
        if shard.report.cut_bytes:
            log.warning("%s shard %d: %s", name, number, shard.report)
        return shard

    async def open_companion(self, stream: HostedStream, number: int) -> ShardLog | None:
        """A log beside the stream's shards, for what a view has to remember: same folder, keys, durability, copies and deletion.

        `number` is above every shard's, and open once; None where the stream is ephemeral, whose views are too. Of several brokers
        the leader opens it, in the epoch of the shard that `number` ends with. Raises UnavailableError(LIMIT_MEMORY),
        RequestError(NOT_FOUND) where the incarnation is being closed, NotLeaderError where it is not served here, and what opening
        a log raises: then it is not open.
        """
        assert number > SHARDS_MAX
        if stream.deleted:
            raise RequestError(f"The stream {stream.name} was deleted.", code=Code.NOT_FOUND)
        if (elsewhere := stream.elsewhere) is not None:
            raise elsewhere
        if number == stream.tried:
            raise about_to_be_served(stream.name)
        if stream.ephemeral:
            return None
        if not self._rings.make_room(SHARD_BYTES) or not self._ring_budget.take(SHARD_BYTES):
            raise UnavailableError(
                f"A view of {stream.name} needs {SHARD_BYTES} bytes of the broker's ring budget, which is used up.",
                code=Code.LIMIT_MEMORY,
                hint="Delete streams, or raise limits.ring_budget.",
            )
        stream.ring_taken += SHARD_BYTES
        stream.companions.append(number)
        try:
            companion = await self._open_companion(stream, number)
        except BaseException:
            await self.close_companion(stream, number)
            raise
        if number not in stream.companions:
            await self._directory.close_shard(stream.name, stream.incarnation, number)
            raise UnavailableError(
                f"{stream.name} was closed while a log of its views was opened.", code=Code.SHUTTING_DOWN
            )
        stream.left.pop(number, None)
        companion.has_failed = partial(self._look_whether_failed, stream, companion)
        self._look_whether_failed(stream, companion)
        return companion

    async def _open_companion(self, stream: HostedStream, number: int) -> ShardLog:
        settings = ShardSettings(
            shard_settings(stream.record.config, COMPANION_RING_BYTES).durability,
            ring_bytes_max=COMPANION_RING_BYTES,
        )
        seal = self._make_seal(stream.name, stream.incarnation, number)
        hooks = ShardHooks(
            seal.seal,
            seal.open_batch,
            seal.commitment,
            refusal=self._refusal,
            runtime=self._runtime,
            rings=self._rings,
            open_logs=self._open_logs,
        )
        if self._leading is not None:
            copies = self._leading.copies(stream.record, number)
            if copies is not None:
                # Its epoch has begun with its shard's election.
                return await self._directory.lead_shard(
                    stream.name, stream.incarnation, number, settings, hooks, copies
                )
        companion = await self._directory.open_shard(stream.name, stream.incarnation, number, settings, hooks)
        await self._require_all(stream, number, companion)
        epoch = stream.epochs.get(shard_of(number), 0)
        if epoch or not companion.epochs.current:
            await companion.begin_epoch(epoch or 1)
        return companion

    async def _require_all(self, stream: HostedStream, number: int, log: ShardLog) -> None:
        """Raises where a log that was open before in this process lacks what was acknowledged; then it is closed."""
        left = stream.left.get(number)
        if left is not None and (missing := what_is_missing(log.committed_point, left.acknowledged)):
            await self._directory.close_shard(stream.name, bytes.fromhex(stream.record.incarnation), number)
            stream.left[number] = left._replace(failed=True)
            raise _LackingError(
                f"Log {number} of {stream.name} {missing}.",
                hint="It is not opened again before a restart. Look after the disk, and restore what a backup has.",
            )

    async def close_companion(self, stream: HostedStream, number: int) -> None:
        """Close a companion whose view could not be opened, so that it can be opened later. The others are closed with their stream,
        and for them this does nothing."""
        if number not in stream.companions:
            return
        stream.companions.remove(number)
        stream.ring_taken -= SHARD_BYTES
        self._ring_budget.give(SHARD_BYTES)
        await self._close_logs(stream, [number])

    def stored_bytes(self) -> dict[str, int]:
        """What the shards hold on disk, by tenant: of the streams that were written to as it is now, MEASURED_AT_ONCE of them. Once a
        second, not per batch.
        """
        for stream in list(islice(self._unmeasured, MEASURED_AT_ONCE)):
            del self._unmeasured[stream]
            if not stream.deleted:
                self._measure(stream)
        return dict(self._stored)

    def _room_changed(self, shard: ShardLog) -> None:
        """A shard found the disk full, or room on it. Of all shards it is said once, and not with each change of a disk that is nearly full."""
        if shard.has_copies:
            return
        if shard.is_full:
            self._full[shard] = None
            if self._full_told.begins():
                log.error("%s", self._no_room()[0])
            return
        self._full.pop(shard, None)
        if not self._found_full() and self._full_told.ends():
            log.warning("there is room on the disk again, and what is published is taken")

    def _found_full(self) -> list[ShardLog]:
        for shard in [each for each in self._full if not each.is_full]:
            del self._full[shard]
        return list(self._full)

    def problems(self) -> list[str]:
        """That the disk has failed, is full, or does not answer, in one line each, where shards wait for it. Those that have copies say so themselves."""
        return [*self._failed(), *self._no_room(), *self._unopened(), *self._unanswered()]

    def _failed(self) -> list[str]:
        told: list[str] = []
        waiting = [
            (stream, number)
            for stream in self._ordered
            if self.reopener.is_waiting(stream)
            for number in self._failed_logs(stream)
        ]
        if waiting:
            stream, number = waiting[0]
            shards, more = ("1 log does", "") if len(waiting) == 1 else (f"{len(waiting)} logs do", ", …")
            told.append(
                f"The disk has failed: {shards} not serve ({stream.text} shard {shard_of(number)}{more}). What is there is opened again by itself, if it can be."
            )
        for stream in self._ordered:
            unproved = set(stream.unproved).difference(stream.unopened)
            if unproved and not self.reopener.is_waiting(stream):
                shards = ", ".join(sorted({str(shard_of(number)) for number in unproved}))
                told.append(
                    f"The disk has failed, and what was acknowledged in {stream.text} shard {shards} is not all there any more, or is damaged: it is not opened "
                    "again before a restart. Restore what a backup has, or restart the broker to go on with what is there."
                )
        return told

    def _unanswered(self) -> list[str]:
        waiting = [
            (shard.unanswered_s, shard.identity)
            for stream in self._ordered
            for shard in stream.serving
            if not shard.has_copies and shard.unanswered_s > UNANSWERED_S
        ]
        if not waiting:
            return []
        longest_s, first = max(waiting, key=lambda each: each[0])
        shards, more = ("1 shard waits", "") if len(waiting) == 1 else (f"{len(waiting)} shards wait", ", …")
        return [
            f"The disk has not answered for {longest_s:.0f} s: {shards} for it ({first.stream} shard {first.shard}{more}). What is published there is answered "
            "once it does."
        ]

    def _no_room(self) -> list[str]:
        full = [each.identity for each in self._found_full()]
        unopened = [(name, number) for name, number, why in self._waiting() if why.code is Code.DISK_FULL]
        places = [*((each.stream, each.shard) for each in full), *unopened]
        if not places:
            return []
        shards = "1 shard takes" if len(places) == 1 else f"{len(places)} shards take"
        name, number = places[0]
        more = ", …" if len(places) > 1 else ""
        return [
            f"The disk is full: {shards} nothing that is published ({name} shard {number}{more}). Reading goes on; publishing does once there is room."
        ]

    def _waiting(self) -> Iterator[tuple[str, int, FelixError]]:
        """The shards that could not be opened for what passes, and why."""
        for stream in self._ordered:
            for number in stream.unopened:
                if (why := _why(stream.replicas[number])) is not None:
                    yield stream.text, number, why

    def _unopened(self) -> list[str]:
        waiting = [each for each in self._waiting() if each[2].code is not Code.DISK_FULL]
        if not waiting:
            return []
        name, number, why = waiting[0]
        shards, more = ("1 shard", "") if len(waiting) == 1 else (f"{len(waiting)} shards", ", …")
        return [
            f"{shards} could not be opened ({name} shard {number}{more}), which is tried again by itself: {why}"
        ]

    def _begin_measuring(self, stream: HostedStream) -> None:
        """Its shards are others than before."""
        if stream.failed:
            self.reopener.failed(stream)
        for shard in stream.serving:
            shard.has_failed = partial(self._look_whether_failed, stream, shard)
            self._look_whether_failed(stream, shard)
            shard.disk_bytes_changed = partial(self._unmeasured.__setitem__, stream, None)
            shard.room_changed = partial(self._room_changed, shard)
        self._measure(stream)

    def _measure(self, stream: HostedStream) -> None:
        self._store(stream, sum(shard.disk_bytes for shard in stream.serving))

    def _store(self, stream: HostedStream, held: int) -> None:
        tenant = stream.name.tenant
        self._stored[tenant] += held - stream.stored_bytes
        if not self._stored[tenant]:
            del self._stored[tenant]
        stream.stored_bytes = held

    def _turn(self, last: list[HostedStream], count: int) -> list[HostedStream]:
        """The next streams in round-robin order, at most `count`."""
        ordered = self._ordered
        at = bisect_right(ordered, last[-1].text, key=_text) if len(last) == count else 0
        return ordered[at : at + count]

    def retaining(self) -> Iterator[HostedStream]:
        """The streams whose retention waits for what was acknowledged."""
        return iter(list(self._work.acked))

    async def sweep(self, now_ms: int) -> None:
        """Apply every retention; of streams without retention by time or size, process the next ones in round-robin order."""
        self._swept = self._turn(self._swept, TENDED_AT_ONCE)
        for stream in {**self._work.expiring, **dict.fromkeys(self._swept)}:
            for shard in stream.serving:
                try:
                    await shard.sweep(now_ms)
                except FelixError as error:
                    log.error("retention of %s: %s", stream.name, error)

    async def compact(self, now_ms: int) -> None:
        """Compact the shards that are due, one after the other."""
        for stream in list(self._work.compacted):
            for shard in stream.serving:
                if stream.deleted or shard.has_copies or not shard.compaction_due(now_ms):
                    # Of several copies each is compacted by itself, led or not (region.replicas).
                    continue
                try:
                    report = await self._directory.compact(shard, now_ms)
                except FelixError as error:
                    if error.code is not Code.SHUTTING_DOWN:
                        log.error("compaction of %s shard %d: %s", stream.name, shard.identity.shard, error)
                    continue
                if report is not None:
                    log.info("%s shard %d was compacted: %s", stream.name, shard.identity.shard, report)

    async def offload(self, now_ms: int, allowed: tuple[str, ...]) -> None:
        """Offload the shards that are due, one after the other; `allowed`: what the region's configuration allows."""
        self._offloaded = self._turn(self._offloaded, TENDED_AT_ONCE)
        # Of one that is no longer offloaded, objects may be left to delete.
        for stream in {**self._work.offloaded, **dict.fromkeys(self._offloaded)}:
            wanted = stream.record.config.views.offload
            for shard in stream.serving:
                if stream.deleted or not shard.offload_due(now_ms):
                    continue
                url = wanted.url if wanted else ""
                try:
                    if wanted is not None:
                        await asyncio.to_thread(check_offload, url, allowed)
                except RequestError as error:
                    # It was allowed once; what is there may still be read, and deleted.
                    log.error("offload of %s shard %d: %s", stream.name, shard.identity.shard, error)
                    self.offload_refused += 1
                    shard.offload_later(now_ms)
                    url = ""
                try:
                    await self._directory.offload(shard, now_ms, url)
                except FelixError as error:
                    if error.code is not Code.SHUTTING_DOWN:
                        log.error("offload of %s shard %d: %s", stream.name, shard.identity.shard, error)

    async def remove(self, name: StreamName, incarnation: str) -> None:
        """Close this incarnation and delete its records: it is marked as deleted in the catalog."""
        async with self._busy.setdefault(name, asyncio.Lock()):
            self._removed.put(incarnation, True)
            held = self._streams.get(name)
            if held is not None and held.record.incarnation == incarnation:
                held.removed = True
                with suppress(FelixError):
                    # It goes, whatever its disk says.
                    await self._close(held)
            if self._leading is not None:
                await self._leading.forget(incarnation)
            await self._directory.delete_stream(name, bytes.fromhex(incarnation))

    async def is_closed(self, name: StreamName, incarnation: str) -> bool:
        """Whether nothing of this incarnation is open, once what is under way with streams of this name is done."""
        async with self._busy.setdefault(name, asyncio.Lock()):
            held = self._streams.get(name)
            return held is None or held.record.incarnation != incarnation

    async def remove_marked(self, marked: Container[str]) -> None:
        """Remove what the disk still has of these incarnations, as after a deletion that this broker was down for. What the disk has is asked,
        since marks stay for ever."""
        stored = await asyncio.get_running_loop().run_in_executor(
            self._directory.commit_pool, self._directory.stored
        )
        for stream in stored:
            if stream.incarnation.hex() in marked:
                await self.remove(stream.name, stream.incarnation.hex())

    async def _close(self, stream: HostedStream) -> None:
        self.reopener.drop(stream)
        self._drop(stream)
        await self._close_views(stream)
        errors = await self._close_logs(stream, (*stream.replicas, *stream.companions))
        self._ring_budget.give(stream.ring_taken)
        if errors:
            raise errors[0]

    async def _close_views(self, stream: HostedStream) -> None:
        while stream.closing:
            try:
                await stream.closing.pop()()
            except FelixError as error:
                log.error("a view of %s does not close in order: %s", stream.name, error)
        stream.views.clear()

    async def close(self) -> None:
        """Close every stream, with everything acknowledged on disk."""
        await self.reopener.close()
        await at_once(CLOSED_AT_ONCE, self._close, list(self._streams.values()))
