"""The copies that this broker has of streams: which they are, and the host and links that keep them (region.replication).

It follows the records of shards and the catalog: a shard that names this broker among its replicas, or as one that it moves to, is opened as a
copy; one that names it no more is closed and deleted; one of a deleted stream is let go of before its folder goes. What moved away while this
broker was down is deleted once all that the record names are in sync.

A stream of one copy is opened by the broker that leads it, not as a copy, until it is to move or to have more copies: then its logs are closed
and opened as copies, in the epoch that is led (`adopt`). What was a copy once stays one, also where it is the only one.

Order: `open` once the broker is registered and before streams are opened; `start` once it is alive; `close` once they are closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

from felix.bounded import BoundedMap
from felix.errors import CorruptionError, FelixError, UnavailableError
from felix.lazy_event import LazyThreadEvent
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.storage.port import Files
from felix.tasks import end_tasks
from felix.transaction_messages import TRANSACTIONS_STREAM
from region.at_once import at_once
from region.cluster.election import has_yielded
from region.cluster.member import ClusterMember
from region.cluster.records import ShardDurability, ShardId, ShardRecord
from region.log.compactor import WorkEndedError
from region.log.companions import RECORDS, JournalKind, kind_of, log_number, shard_of
from region.log.copies import Copies
from region.log.directory import shard_place
from region.log.errors import storage_error
from region.log.maintenance import COMPACTION_AGAIN_MS, OFFLOAD_AGAIN_MS, OFFLOAD_AGAIN_MS_MAX
from region.log.open_logs import OpenLogs
from region.log.scrub import Scrub
from region.log.seal import MakeSeal
from region.log.segment import ShardIdentity
from region.log.segment_limits import SegmentLimits
from region.log.shard_settings import ShardSettings
from region.log.shared_offload import ReplacedListError, SharedLists
from region.metadata.records import (
    AUDIT_STREAM,
    REMOVED_REMEMBERED_MAX,
    Stream,
    StreamConfig,
    is_replicated,
    min_in_sync,
    one_copy_since,
)
from region.replication.copy_maintenance import OffloadNews
from region.replication.copy_pace import COPY_RATE_BYTES
from region.replication.disk import LogPlan, damaged_folder, kept_name, parse_kept_name
from region.replication.host import Links, ReplicaHost
from region.replication.hosted import ShardPlan
from region.replication.repairer import Source

log = logging.getLogger("felix.region.replicas")

COPIES_AT_ONCE: Final = 16
"""Opened at any moment: a new one waits for a dozen syncs, which the disk takes together with those of others."""
RETRY_S: Final = 10.0
"""A copy that could not be opened is tried again after this: a disk may have room by then."""
GIVE_UP_S: Final = 3.0
"""An election takes two transactions; a store that answers no sooner does not hold up a stop, and leases end by themselves."""
GIVE_UP_LOOK_S: Final = 0.02
ASIDE_SHOWN: Final = 3
"""Folders that a sentence names."""


class SystemStream(NamedTuple):
    """A stream of the region's own, of one shard: its record, and the kinds of its logs (region.log.companions)."""

    record: Stream
    logs: tuple[int, ...]


class Folders(Protocol):
    """What is needed of `region.log.directory.LogDirectory`."""

    commit_pool: Executor
    creation_pool: Executor
    read_pool: Executor
    list_pool: Executor
    maintenance_pool: Executor
    files: Files

    @property
    def copies(self) -> Path: ...

    def shard_folder(self, name: StreamName, incarnation: bytes, shard: int) -> Path: ...

    async def make_folder(self, name: StreamName, incarnation: bytes, shard: int) -> Path: ...

    def has_notes(self, name: StreamName, incarnation: bytes, shard: int) -> bool: ...

    async def delete_copy(self, folders: Sequence[Path], kept: Sequence[Path]) -> None: ...


def kinds_of(stream: Stream) -> tuple[int, ...]:
    """The logs of each shard of a stream, whether somebody uses them yet or not: all copies have the same. Whether a stream is a queue or
    a cache is decided when it is created."""
    config = stream.config
    if stream.name == str(TRANSACTIONS_STREAM):
        return (RECORDS, JournalKind.TRANSACTIONS)
    if config.views.cache is not None:
        return (RECORDS,)
    return (RECORDS, JournalKind.SUBSCRIPTIONS if config.views.queue is None else JournalKind.QUEUE)


def shard_durability(config: StreamConfig) -> ShardDurability:
    """What an acknowledgement of a copy means."""
    return "fsync" if config.durability.kind == "fsync" else "interval"


def is_kept_elsewhere(record: ShardRecord) -> bool:
    """Whether what another broker has of the shard is needed by nobody: it is led, all that are to have it are in sync, and no leader may have lacked
    anything."""
    return (
        bool(record.leader)
        and not record.target
        and not record.unclean
        and {*record.isr} == {*record.replicas}
    )


class Replicas:
    """One per broker of a cluster. One event loop, no locks."""

    def __init__(
        self,
        member: ClusterMember,
        region: str,
        folders: Folders,
        links: Links,
        streams: Mapping[StreamName, Stream],
        *,
        settings: Callable[[StreamConfig], ShardSettings],
        make_seal: MakeSeal,
        open_logs: OpenLogs,
        runtime: Runtime,
        system: Mapping[StreamName, SystemStream] = MappingProxyType({}),
        source: Source | None = None,
        scrub: Scrub | None = None,
        copy_rate: int = COPY_RATE_BYTES,
    ) -> None:
        """`source`, `scrub`, `copy_rate`: as `ReplicaHost` has them. `streams`: the catalog, as it is known now. `system`: streams that no catalog has. `settings`: what a stream's mean for its shards' records. `make_seal`: what opens and seals
        a log's batches, for its stream, incarnation and number."""
        self._member = member
        self._region = region
        self._folders = folders
        self._streams = streams
        self._system = system
        self.host = ReplicaHost(
            member.broker,
            member.mirror,
            links,
            files=folders.files,
            commit_pool=folders.commit_pool,
            opening_pool=folders.creation_pool,
            read_pool=folders.read_pool,
            list_pool=folders.list_pool,
            runtime=runtime,
            sync_failed=member.registry.sync_failed,
            open_logs=open_logs,
            compaction_pool=folders.maintenance_pool,
            source=source,
            scrub=scrub,
            copy_rate=copy_rate,
            compacts=self._compacts,
            lists=self._lists,
        )
        self._settings = settings
        # What is asked of stores ends with it.
        self._ending = LazyThreadEvent()
        self._make_seal = make_seal
        self._runtime = runtime
        self._compact_after_ms: dict[ShardId, int] = {}
        """copies of which a pass failed: not before this"""
        self._offload_after_ms: dict[ShardId, int] = {}
        """copies whose list could not be read or followed: not before this"""
        self._offload_seen: dict[ShardId, OffloadNews] = {}
        """what copies that follow have done already"""
        self._names: dict[str, str] = {}
        """of the streams that have copies here, by incarnation"""
        self._adopted: set[str] = set()
        """incarnations of streams that are to have one copy, and whose logs are copies here"""
        self._found: set[ShardId] = set()
        """shards of which this broker had something when it started, and that were not opened since: what moved away meanwhile is among them"""
        self.release: Callable[[StreamName], Awaitable[None]] | None = None
        """what has a stream that is a copy now not be opened otherwise; None before streams are"""
        self.notes_from: Callable[[ShardIdentity, Mapping[int, bytes]], Awaitable[int | None]] | None = None
        """from which offset on a copy with these annotations keeps its notes; None before streams are opened"""
        self._wanted: set[str] = set()
        self._forgotten: BoundedMap[str, bool] = BoundedMap(REMOVED_REMEMBERED_MAX)
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """per incarnation: held while its copies are opened, dropped or forgotten; a lock goes with who holds it or waits for it"""
        self._news = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        member.on_assigned(self.look_at)

    async def open(self) -> None:
        """Open the copies that the records name, all that they hold synced."""
        self._found = await asyncio.get_running_loop().run_in_executor(
            self._folders.commit_pool, self._make_copies
        )
        self._adopted |= {shard.incarnation for shard in self._found}
        registry = self._member.registry
        await self.host.open(
            [],
            registration=registry.registration,
            folder=registry.folder,
            registered_at=max(registry.registered_revision, self._member.mirror.view.revision),
        )
        registry.on_lease(self.host.leased)
        for name in [*self._system, *self._streams]:
            self.look_at(str(name))
        await self._open_wanted()

    def _make_copies(self) -> set[ShardId]:
        """The folder of what is known of copies; the shards of which there is something."""
        files, folder = self._folders.files, self._folders.copies
        if not files.exists(folder):
            files.make_folder(folder)
            files.sync_folder(folder.parent)
        return {kept[0] for kept in map(parse_kept_name, files.names(folder)) if kept}

    def start(self) -> None:
        """Lead and follow."""
        self.host.start()
        self._work = asyncio.get_running_loop().create_task(self._follow(), name="replicas")

    async def give_up(self) -> None:
        """Before the broker stops: yield what it leads to other copies in sync, then leave the in-sync sets of what others lead, so that
        nobody waits for it. GIVE_UP_S at most; what nobody else could lead stays."""
        try:
            async with asyncio.timeout(GIVE_UP_S):
                self.host.give_up("drain")
                while self.host.yielding or not self._are_led_elsewhere() or not self.host.is_placed:  # noqa: ASYNC110 - of a swap's answer no event comes here
                    await asyncio.sleep(GIVE_UP_LOOK_S)
                self.host.leave()
                while self._is_waited_for():  # noqa: ASYNC110
                    await asyncio.sleep(GIVE_UP_LOOK_S)
        except TimeoutError:
            log.warning("other brokers have not taken over from this one within %.0f s", GIVE_UP_S)

    def _are_led_elsewhere(self) -> bool:
        view, broker = self._member.mirror.view, self._member.broker
        return not any(has_yielded(record) for record in view.shards.values() if record.leader == broker)

    def _is_waited_for(self) -> bool:
        """Whether another broker leads a shard, and has this one in sync."""
        view, broker = self._member.mirror.view, self._member.broker
        return any(
            broker in record.isr and record.leader in view.alive
            for record in view.shards.values()
            if record.leader != broker and len(record.isr) > 1
        )

    async def close(self) -> None:
        """Close all copies, what they hold synced."""
        self._ending.set()
        if self._work is not None:
            await end_tasks(self._work)
        await self.host.close()

    def on_led(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each stream of which a shard is led here now, or no longer."""

        def changed(shard: ShardId) -> None:
            if (name := self._names.get(shard.incarnation)) is not None:
                listener(name)

        self.host.on_change(changed)

    # -- what streams ask ------------------------------------------------------------------------------

    def name_of(self, shard: ShardId) -> str:
        """The stream of a shard that this broker has a copy of."""
        return self._names.get(shard.incarnation, shard.incarnation)

    def keeps(self, record: Stream) -> bool:
        """Whether this broker opens a stream's logs as copies only: it is to have several, or had, or moves."""
        return is_replicated(record.config) or record.incarnation in self._adopted

    def serves(self, record: Stream, stopped: Container[int] = ()) -> bool:
        """Whether all shards of a stream but those that are `stopped` are led here, and all that they had at their elections is committed."""
        return all(
            self.host.serves(ShardId(record.incarnation, number))
            for number in range(record.config.shards)
            if number not in stopped
        )

    def gauges(self) -> dict[str, float]:
        """How many copies this broker has, how many of them need a person, and what became of damage. From every thread."""
        repairs = self.host.repairs
        return {
            "copies": len(self.host.shards),
            "copies_alarmed": len(self.host.alarms),
            "copies_cut_records": self.host.cut_records,
            "copies_opened_again": self.host.reopener.opened,
            "copies_damaged_segments": repairs.damaged,
            "copies_damaged_found": repairs.found,
            "copies_repaired_segments": repairs.repaired,
            "scrub_checked_bytes": repairs.checked_bytes,
            "scrub_rounds": repairs.rounds,
            "scrub_round_percent": 100 * repairs.progress,
        }

    def set_aside(self, broker: str) -> list[str]:
        """As a sentence: the folders here that hold what is left of damaged copies, and which of them are needed no more; none where there are none."""
        found = self.host.aside()
        if not found:
            return []
        shown = ", ".join(
            f"{aside.path} (shard {shard.number} of {self.name_of(shard)}, "
            f"{'in sync again: may be removed' if self.host.is_in_sync(shard) else 'not in sync yet: keep it'})"
            for shard, aside in found[:ASIDE_SHOWN]
        )
        more = f" and {len(found) - ASIDE_SHOWN:,} more" if len(found) > ASIDE_SHOWN else ""
        size = sum(aside.size for _, aside in found)
        return [f"Broker {broker} set damaged logs aside, {size:,} bytes that nothing reads: {shown}{more}."]

    def lag_records(self, record: Stream, number: int) -> int:
        """How far the furthest copy of a shard that is led here is behind."""
        return self.host.lag_records(ShardId(record.incarnation, number), RECORDS)

    def lags(self) -> Counter[str]:
        """How many records the copies at each broker lack of what is led here."""
        return self.host.lags(RECORDS)

    def lead(self, record: Stream, number: int) -> Copies:
        """What a shard's log, or the journal of this number beside it, is led by. Raises UnavailableError where it is not led here."""
        return self.host.lead(ShardId(record.incarnation, shard_of(number)), kind_of(number))

    async def forget(self, incarnation: str) -> None:
        """Have no copies of this incarnation of a stream any more: it was deleted. Nobody leads it here."""
        self._forgotten.put(incarnation, True)
        async with self._changing.setdefault(incarnation, asyncio.Lock()):
            self._names.pop(incarnation, None)
            self._adopted.discard(incarnation)
            self._found = {shard for shard in self._found if shard.incarnation != incarnation}
            for shard in [each for each in self.host.shards if each.incarnation == incarnation]:
                await self.host.remove(shard)
            await asyncio.get_running_loop().run_in_executor(
                self._folders.commit_pool, self._forget_kept, incarnation
            )

    def _forget_kept(self, incarnation: str) -> None:
        # What a crash leaves behind does no harm: an incarnation never comes back.
        files, folder = self._folders.files, self._folders.copies
        for name in files.names(folder) if files.exists(folder) else ():
            if name.startswith(f"{incarnation}-"):
                files.remove(folder / name)

    def _record_of(self, shard: ShardId) -> Stream | None:
        name = self._names.get(shard.incarnation)
        record = None if name is None else self._streams.get(StreamName.parse(name))
        return record if record is not None and record.incarnation == shard.incarnation else None

    def _lists(self, shard: ShardId) -> SharedLists:
        """Of one shard that has copies here. Raises UnavailableError where its stream was deleted meanwhile."""
        known = self._names.get(shard.incarnation)
        if known is None:
            raise UnavailableError(f"The stream of shard {shard.number} is not here any more.")
        name, incarnation = StreamName.parse(known), bytes.fromhex(shard.incarnation)
        identity = ShardIdentity(self._region, str(name), incarnation, shard.number)
        return SharedLists(
            shard_place(identity), self._make_seal(name, incarnation, shard.number).tag, self._ending
        )

    # -- compaction ------------------------------------------------------------------------------------

    def _compacts(self, shard: ShardId, number: int) -> bool:
        record = self._record_of(shard)
        return (
            number == RECORDS and record is not None and self._settings(record.config).compaction is not None
        )

    async def compact(self) -> None:
        """Compact the copies of this broker that are due, led here or not, one after the other."""
        for shard in self.host.shards:
            record = self._record_of(shard)
            if record is None:
                continue
            compaction = self._settings(record.config).compaction
            now_ms = self._runtime.clock.now_ms()
            if (
                compaction is None
                or now_ms < self._compact_after_ms.get(shard, 0)
                or not self.host.maintenance.compaction_due(shard, RECORDS, compaction)
            ):
                continue
            incarnation = bytes.fromhex(shard.incarnation)
            seal = self._make_seal(StreamName.parse(record.name), incarnation, shard.number)
            identity = ShardIdentity(self._region, record.name, incarnation, shard.number)
            notes_from = None if self.notes_from is None else partial(self.notes_from, identity)
            try:
                report = await self.host.maintenance.compact(
                    shard, RECORDS, compaction, seal.seal, seal.open_batch, notes_from
                )
            except WorkEndedError:
                continue
            except (FelixError, OSError) as error:
                self._compact_after_ms[shard] = now_ms + COMPACTION_AGAIN_MS
                log.error("compaction of the copy of %s shard %d: %s", record.name, shard.number, error)
            else:
                self._compact_after_ms.pop(shard, None)
                if report is not None:
                    log.info("the copy of %s shard %d was compacted: %s", record.name, shard.number, report)

    # -- offload ---------------------------------------------------------------------------------------

    async def offload(self) -> None:
        """Have the copies that follow know what their leaders have put into a store, and let local files of it go, one after the other."""
        for shard in self.host.shards:
            record = self._record_of(shard)
            offload = None if record is None else record.config.views.offload
            now_ms = self._runtime.clock.now_ms()
            if record is None or offload is None or now_ms < self._offload_after_ms.get(shard, 0):
                continue
            news = self.host.maintenance.offload_news(shard)
            if news is None:
                continue
            try:
                if news == self._offload_seen.get(shard):
                    # What this list does not have comes with another one; how much stays here may have been altered.
                    await self.host.maintenance.drop_offloaded(shard, offload.local_bytes)
                    continue
                listed = await asyncio.to_thread(self._lists(shard).read, news.pointer)
                now = self.host.maintenance.offload_news(shard)
                if now is not None and now.pointer == news.pointer:
                    end = await self.host.maintenance.follow_offload(shard, listed, offload.local_bytes)
                    self._offload_seen[shard] = OffloadNews(news.pointer, end)
            except ReplacedListError:
                # Its leader has moved on, and the record that says so is on its way here.
                self._offload_after_ms[shard] = now_ms + OFFLOAD_AGAIN_MS
            except (FelixError, OSError) as error:
                self._offload_after_ms[shard] = now_ms + OFFLOAD_AGAIN_MS_MAX
                log.warning("offload of the copy of %s shard %d: %s", record.name, shard.number, error)
            else:
                self._offload_after_ms.pop(shard, None)

    # -- which copies there are ------------------------------------------------------------------------

    def look_at(self, name: str) -> None:
        """A stream, or the records of its shards, may be another than before."""
        self._wanted.add(name)
        self._news.set()

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(RETRY_S if self._wanted else None):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            try:
                await self._open_wanted()
            except Exception:
                # A mistake of ours: what changes next is followed all the same.
                log.exception("copies could not be opened")

    async def _open_wanted(self) -> None:
        names, self._wanted = self._wanted, set()
        await at_once(COPIES_AT_ONCE, self._open_stream, sorted(names))

    async def _open_stream(self, name: str) -> None:
        parsed = StreamName.parse(name)
        own = self._system.get(parsed)
        record = self._streams.get(parsed) if own is None else own.record
        if record is None or (own is None and not self.keeps(record) and not self._is_to_move(record)):
            return
        try:
            if own is None:
                await self._adopt(parsed, record)
            await self._open_copies(record, kinds_of(record) if own is None else own.logs)
        except (FelixError, OSError) as error:
            log.error("a copy of %s cannot be opened: %s", name, error)
            # One that is damaged stays so.
            if not isinstance(error, CorruptionError):
                self._wanted.add(name)

    def _records(self, stream: Stream) -> list[tuple[ShardId, ShardRecord]]:
        """Of the stream's shards, those that name this broker."""
        shards = (ShardId(stream.incarnation, number) for number in range(stream.config.shards))
        view = self._member.mirror.view.shards
        return [
            (shard, record)
            for shard in shards
            if (record := view.get(shard)) is not None
            and self._member.broker in (*record.replicas, *record.target)
        ]

    def _is_to_move(self, stream: Stream) -> bool:
        """Whether the records ask for another copy of a stream that is to have one."""
        return not one_copy_since(stream.config) and any(
            record.target or len(record.replicas) > 1 for _, record in self._records(stream)
        )

    async def _adopt(self, name: StreamName, stream: Stream) -> None:
        """Before a stream's logs are opened as copies: whoever has them open as the only ones closes them, and opens them so no more. Raises
        UnavailableError where that has to wait."""
        if all(self.host.replica(shard) is not None for shard, _ in self._records(stream)):
            return
        is_new = not self.keeps(stream)
        self._adopted.add(stream.incarnation)
        try:
            if self.release is not None:
                await self.release(name)
            loop = asyncio.get_running_loop()
            if await loop.run_in_executor(self._folders.commit_pool, self._has_notes, name, stream):
                raise UnavailableError("records that came from another region wait for their audit leaf")
        except UnavailableError:
            self._adopted.discard(stream.incarnation)
            if self.release is not None:
                with suppress(UnavailableError):
                    await self.release(name)
            raise
        if is_new:
            log.info("%s is kept as a copy from now on: it moves, or gets more copies", name)

    def _has_notes(self, name: StreamName, stream: Stream) -> bool:
        """Whether a log that is to be a copy has records that no reader may see yet (region.log.ahead): copies have no such notes."""
        incarnation = bytes.fromhex(stream.incarnation)
        return any(
            self._folders.has_notes(name, incarnation, number) for number in range(stream.config.shards)
        )

    async def _open_copies(self, stream: Stream, kinds: Sequence[int]) -> None:
        shards = [ShardId(stream.incarnation, number) for number in range(stream.config.shards)]
        async with self._changing.setdefault(stream.incarnation, asyncio.Lock()):
            await at_once(COPIES_AT_ONCE, partial(self._open_copy, stream, kinds), shards)

    async def _open_copy(self, stream: Stream, kinds: Sequence[int], shard: ShardId) -> None:
        view = self._member.mirror.view
        record = view.shards.get(shard)
        if record is None or stream.incarnation in self._forgotten:
            return
        if self._member.broker not in (*record.replicas, *record.target):
            replica = self.host.replica(shard)
            is_frozen = view.revision_of(view.keys.frozen) or (replica and replica.fence.frozen)
            if is_frozen and (replica or shard in self._found):
                # The records may be those of a store that was put back, and this copy the only one that is left.
                self._wanted.add(stream.name)
            elif replica:
                await self._drop(stream, shard)
            elif shard in self._found and is_kept_elsewhere(record):
                await self._delete(stream, shard, kinds)
            return
        if self.host.replica(shard) is not None:
            self._want_min(stream, shard)
            self.host.limit_segments(shard, RECORDS, self._settings(stream.config).segments)
            return
        self._names[stream.incarnation] = stream.name
        led = record.epoch, record.election
        await self.host.add(await self._plan(stream, shard, kinds, led))
        self._found.discard(shard)
        self._want_min(stream, shard)

    def _want_min(self, stream: Stream, shard: ShardId) -> None:
        # Of the audit log it says that all of it is in the stream (region.evidence.audit_log).
        if stream.name != str(AUDIT_STREAM):
            self.host.want_min(shard, min_in_sync(stream.config))

    def _kept(self, shard: ShardId, number: int) -> Path:
        return self._folders.copies / kept_name(shard, number)

    async def _drop(self, stream: Stream, shard: ShardId) -> None:
        """The shard has moved away: the record names this broker neither as a replica nor, so, as a member of a set."""
        if self.host.is_used(shard):
            # The stream's logs are still being closed here.
            self._wanted.add(stream.name)
            return
        kinds = [plan.number for plan in self.host.plans(shard)]
        await self.host.remove(shard)
        # A turn that began before may have ended meanwhile.
        for remembered in (self._compact_after_ms, self._offload_after_ms, self._offload_seen):
            remembered.pop(shard, None)
        await self._delete(stream, shard, kinds)

    async def _delete(self, stream: Stream, shard: ShardId, kinds: Sequence[int]) -> None:
        """Delete the logs of a shard that others have, and that nobody has open here."""
        self._found.discard(shard)
        if not any(each.incarnation == stream.incarnation for each in (*self.host.shards, *self._found)):
            self._adopted.discard(stream.incarnation)
        logs = [self._log_folder(stream, shard, kind) for kind in kinds]
        folders = [folder for each in logs for folder in (each, damaged_folder(each))]
        # What tells of a copy whose folder is gone goes behind it.
        await self._folders.delete_copy(folders, [self._kept(shard, kind) for kind in kinds])
        log.info("the copy of shard %d of %s has moved away and is deleted", shard.number, stream.name)

    def _log_folder(self, stream: Stream, shard: ShardId, kind: int) -> Path:
        incarnation = bytes.fromhex(shard.incarnation)
        return self._folders.shard_folder(
            StreamName.parse(stream.name), incarnation, log_number(kind, shard.number)
        )

    async def _plan(
        self, stream: Stream, shard: ShardId, kinds: Sequence[int], led: tuple[int, str]
    ) -> ShardPlan:
        incarnation = bytes.fromhex(stream.incarnation)
        name = StreamName.parse(stream.name)
        plans = []
        for kind in kinds:
            number = log_number(kind, shard.number)
            identity = ShardIdentity(self._region, stream.name, incarnation, number)
            folder, gone = self._folders.shard_folder(name, incarnation, number), None
            try:
                await self._folders.make_folder(name, incarnation, number)
            except CorruptionError as error:
                # Whoever opens it says so, and whether others have it.
                gone = error
            except OSError as error:
                raise storage_error(error, Path(stream.name)) from error
            limits = self._settings(stream.config).segments if kind == RECORDS else SegmentLimits()
            plans.append(
                LogPlan(kind, folder, identity, limits, kept_in=self._folders.copies, led=led, gone=gone)
            )
        return ShardPlan(
            shard,
            tuple(plans),
            shard_durability(stream.config),
            answers_early=stream.config.acks == "leader",
        )
