"""One broker's replicas on real logs, links and metadata: feeds each shard's `ReplicaCore` with what happens, and does what it says.

Disk work goes to the logs' workers (`log_worker`), messages to the links (`links`), changes of records to the metadata store, all in the order
of `Ready`'s fields where that matters. A log's jobs keep their order, and the core asks for data on the disk only once the worker has reported it.

Invariants:
- a core sees one event at a time, on the event loop;
- from the moment that a leader is deposed until those who led its logs have released them, its core gets no events but of what they wrote. So
  the core and the file agree before the first frames for a follower come, and nobody reads what is cut;
- a copy whose disk has failed is opened again where nobody uses its logs, and its record does not say that it leads. What comes of the old logs is not
  heard any more; the new ones have all that the old ones had acknowledged, or the copy stays stopped;
- a message that no replica here could mean is refused before a core sees it;
- a follower's frames that wait for the disk are bounded (FOLLOWER_WAITING_BYTES_MAX); region.log.shard bounds a leader's appends.

Order: `open` after the registry's `open`; `add` and `remove` at any time; `start` after its `announce`; `close` before its `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from felix.errors import Code, CorruptionError, FelixError, UnavailableError
from felix.runtime.port import Runtime
from felix.storage.port import Files
from felix.tasks import TaskSet, end_tasks
from region.cluster.election import JournalEnd, LogEnd, has_yielded
from region.cluster.mirror import ClusterMirror
from region.cluster.records import ShardId, YieldReason
from region.cluster.registration import LEASE_MARGIN_MS
from region.cluster.transactions import Refusal, change
from region.log.companions import RECORDS
from region.log.errors import StorageFailedError
from region.log.open_logs import OpenLogs
from region.log.point import LogPoint
from region.log.reopener import Reopener, Tried
from region.log.scrub import Scrub
from region.log.segment_limits import SegmentLimits
from region.log.shared_offload import SharedLists
from region.metadata.lease import Lease
from region.metadata.transaction import Change, Snapshot
from region.replication.copier import Copier
from region.replication.copier import Links as CopierLinks
from region.replication.copies import HostedCopies
from region.replication.copy_alarms import CopyAlarms
from region.replication.copy_maintenance import CopyMaintenance
from region.replication.copy_pace import COPY_RATE_BYTES, CopyPace
from region.replication.copy_reads import CopyReads
from region.replication.core import ReplicaCore
from region.replication.disk import Aside, LogPlan, ReplicaDisk
from region.replication.eligibility import Eligibility
from region.replication.history import BEGINNING
from region.replication.hosted import RETRY_MS, Hosted, ShardPlan, not_leader, what_was_lost
from region.replication.leader import DETACHED_MS, HUNG_MS, TICK_MS
from region.replication.log_worker import Collected, DiskFull, LogBegun, LogWorker
from region.replication.log_worker import Told as WorkerTold
from region.replication.messages import Follow, Frame, Message, Placed, Probe
from region.replication.opening import CopyOpener, what_is_lost
from region.replication.ready import (
    Begun,
    CopyFailed,
    CopyWanted,
    DiskFailed,
    FilesSeen,
    Leaving,
    Linked,
    Living,
    MinWanted,
    Outcome,
    Ready,
    Received,
    RecordRead,
    Swap,
    SwapAnswered,
    Synced,
    Tick,
    Trimmed,
    Written,
    YieldAsked,
)  # fmt: skip
from region.replication.repairer import NO_SOURCE, Repairer, Source
from region.replication.replica import BrokerLease, Replica
from region.replication.wire import (
    OriginAsked,
    OriginTold,
    PieceAsked,
    PieceTold,
    Said,
)  # fmt: skip

log = logging.getLogger("felix.region.replication")

FOLLOWER_WAITING_BYTES_MAX: Final = 32 << 20
"""Frames of one log that wait for a follower's disk. A leader has four times less on its way; more of them come of leaders that followed
each other quickly."""
HUNG_LOOK_MS: Final = 1_000
"""Between two looks at whether disks answer."""
FULL_AGAIN_MS: Final = 60_000
"""A leader whose disk is full, or takes no repair, lets another one lead once in so long: where all are so, the shard does not go round among them."""


class Links(CopierLinks, Protocol):
    """What the host needs of `links.PeerLinks`."""

    def know(self, addresses: Mapping[str, str], brokers: Collection[str]) -> None: ...


def no_lists(shard: ShardId) -> SharedLists:
    """Of copies that are not offloaded."""
    raise UnavailableError(f"Shard {shard.number} is not offloaded here.")


class ReplicaHost:
    """See the module. One event loop, no locks."""

    def __init__(
        self,
        broker: str,
        mirror: ClusterMirror,
        links: Links,
        *,
        files: Files,
        commit_pool: Executor,
        read_pool: Executor,
        runtime: Runtime,
        sync_failed: Callable[[], Awaitable[None]] | None = None,
        open_logs: OpenLogs | None = None,
        opening_pool: Executor | None = None,
        compaction_pool: Executor | None = None,
        source: Source | None = None,
        scrub: Scrub | None = None,
        copy_rate: int = COPY_RATE_BYTES,
        compacts: Callable[[ShardId, int], bool] | None = None,
        lists: Callable[[ShardId], SharedLists] = no_lists,
        list_pool: Executor | None = None,
    ) -> None:
        """`list_pool`: where new copies read what is in a store; None: `read_pool`. `sync_failed`: `Registry.sync_failed`. `opening_pool`: where copies are opened, beside what is written to others; None: `commit_pool`. `compaction_pool`: of passes of compaction, and of the scrub; None: of `read_pool`. `source`: how other
        copies are asked for what is damaged here; None: nobody is. `scrub`: how closed segments are looked at; None: they are not.
        `copy_rate`: bytes a second of copies that are not in sync. `compacts`: whether a log's copies are compacted; None: none are. `lists`: what
        reads and writes what a shard's copies have in a store together."""
        self.unopened: dict[ShardId, str] = {}
        """copies that are here and cannot be opened: why"""
        self.reopener: Reopener[ShardId] = Reopener(runtime, self._open_again)
        """of copies whose disk has failed"""
        self._hung_looked_ms = 0
        self._broker = broker
        self._mirror = mirror
        self._links = links
        self._lists = lists
        self._files = files
        self._commit_pool, self._list_pool = commit_pool, list_pool or read_pool
        self._read_pool = read_pool
        self._runtime = runtime
        self._sync_failed = sync_failed
        self._compacts = compacts
        self._folder = ""
        self._registered_at = 0
        self._listeners: list[Callable[[ShardId], None]] = []
        self._hosted: dict[ShardId, Hosted] = {}
        self._ticking: dict[ShardId, Hosted] = {}
        """those that are not quiescent"""
        self._living: dict[str, int] = {}
        """as all copies were told"""
        self._lease: Lease | None = None
        self._broker_lease = BrokerLease()
        self._registration = 0
        self._is_started = self._is_leaving = self._is_closed = False
        self._tasks = TaskSet()
        self._ticks: asyncio.Task[None] | None = None
        self._pace = CopyPace(copy_rate, runtime.clock)
        self.repairs = Repairer(
            self,
            NO_SOURCE if source is None else source,
            files=files,
            pool=read_pool,
            scrub_pool=compaction_pool or read_pool,
            runtime=runtime,
            scrub=scrub,
            alarm=self._alarm_of_damage,
        )
        self.maintenance = CopyMaintenance(
            broker, self._hosted, mirror, self.repairs, compaction_pool or read_pool, self._disk_failed
        )
        self.reads = CopyReads(
            broker,
            self._hosted,
            links,
            self._pace,
            self.repairs,
            read_pool,
            is_in_sync=self.is_in_sync,
            step=self._step,
            disk_failed=self._disk_failed,
        )
        self._alarms = CopyAlarms(runtime.clock)
        self._eligibility = Eligibility(broker, mirror, self._hosted, self.unopened)
        self._opener = CopyOpener(
            broker,
            mirror,
            files=files,
            runtime=runtime,
            open_logs=OpenLogs() if open_logs is None else open_logs,
            pool=opening_pool or commit_pool,
            closing_pool=commit_pool,
        )
        mirror.on_change(self._mirrored)

    # -- a broker's life -------------------------------------------------------------------------------

    async def open(
        self, plans: Sequence[ShardPlan], *, registration: int, folder: str, registered_at: int
    ) -> None:
        """Know this start of the broker, and `add` these. `registered_at`: a revision of the store not below that which registered it."""
        self._registration, self._folder, self._registered_at = registration, folder, registered_at
        self._eligibility.registration = registration
        for plan in plans:
            await self.add(plan)

    async def add(self, plan: ShardPlan) -> None:
        """Have a copy of a shard; all that its logs then hold is on the disk. One that lost what it had is taken out of the shard's sets first,
        and one that cannot be opened where others remain: its damaged logs are set aside, and built anew from the leader's. Raises CorruptionError where
        nobody else has a copy, OSError, and what the store raises."""
        assert plan.shard not in self._hosted
        try:
            disks = await self._opener.open(plan)
        except CorruptionError as error:
            self._alarms.shown[plan.shard] = error.sentence
            await self._opener.leave_sets(plan.shard, if_alone=False)
            record = self._mirror.view.shards.get(plan.shard)
            if record is None or not record.members().keys() - {self._broker}:
                self.unopened[plan.shard] = error.sentence
                if self._is_started:
                    self._hear_records([plan.shard])
                raise
            disks = await self._opener.open(plan, anew=True)
            self.repairs.found += 1
            self._alarms.drop(plan.shard)
        lost = what_is_lost(plan, disks)
        if lost:
            log.error("shard %s: %s", plan.shard, lost)
            try:
                await self._opener.leave_sets(plan.shard, if_alone=True)
            except BaseException:
                await self._opener.abandon(disks)
                raise
        self._host(plan, disks, lost=bool(lost))

    def _host(
        self,
        plan: ShardPlan,
        disks: Mapping[int, ReplicaDisk],
        *,
        lost: bool = False,
        before: Hosted | None = None,
    ) -> None:
        """Have a copy with these logs. `lost`: what it had acknowledged is gone. `before`: the same copy, whose logs had failed."""
        record = self._mirror.view.shards.get(plan.shard)
        replica = Replica(
            self._broker, self._registration, self._folder, self._registered_at, plan.durability,
            {number: disk.beginning() for number, disk in disks.items()}, lease=self._broker_lease, lost=lost,
            lost_in=0 if record is None else record.epoch, answers_early=plan.answers_early,
        )  # fmt: skip
        hosted = Hosted(plan, ReplicaCore(replica), {})
        if before is not None:
            hosted.core.go_on_from(before.core)
        for number, disk in disks.items():
            hosted.workers[number] = LogWorker(
                disk, self._commit_pool, self._runtime, partial(self._worked, hosted)
            )
        hosted.copier = Copier(
            plan.shard, hosted.core, hosted.workers, self._links, self._read_pool, self._list_pool,
            self._pace,
            leads=lambda: hosted.leads,
            producers=hosted.producers,
            failed=partial(self._step, hosted),
            fetch=partial(self.reads.fetch, hosted),
            offloaded=partial(self.maintenance.listed, plan.shard),
            lists=partial(self._lists, plan.shard),
            begin_task=partial(self._begin_task, hosted),
        )  # fmt: skip
        self._hosted[plan.shard] = hosted
        if self.unopened.pop(plan.shard, ""):
            self._alarms.drop(plan.shard)
        if self._is_started:
            self._step(hosted, Living(self._living))
            self._hear_records([plan.shard])
            if before is not None:
                self.want_min(plan.shard, before.min_wanted)

    async def remove(self, shard: ShardId) -> None:
        """Have no copy of a shard any more; its files stay. Whoever leads it has been closed."""
        await self.reopener.forget(shard)
        hosted = self._hosted.pop(shard, None)
        self._ticking.pop(shard, None)
        self._alarms.drop(shard)
        self.unopened.pop(shard, None)
        if hosted is not None:
            hosted.broken = "it is not here any more"
            await self._opener.close(hosted, hosted.broken, in_order=False)

    # -- after its disk has failed ---------------------------------------------------------------------

    def _may_be_reopened(self, hosted: Hosted) -> bool:
        """Whether nobody uses what has failed, and whoever led with it says in the record that it does no more."""
        if hosted.is_abandoned:
            return True
        replica, record = hosted.core.replica, self._mirror.view.shards.get(hosted.shard)
        if record is None or replica.failed != "failed" or replica.fence.frozen or hosted.broken:
            return False
        if hosted.led or hosted.is_settling or hosted.core.leader.leads:
            return False
        return record.leader != self._broker or has_yielded(record)

    async def _open_again(self, shard: ShardId) -> Tried:
        """Open the logs of a copy whose disk has failed as after a restart. From here on what was under way for it is over. Where that fails it is tried
        again later; where a log is damaged, or ends before what was acknowledged, nothing more is done before a restart."""
        hosted = self._hosted.get(shard)
        if hosted is None:
            return Tried.OVER
        if self._is_leaving or not self._may_be_reopened(hosted):
            return Tried.NOT_YET
        try:
            if not hosted.is_abandoned:
                hosted.broken = "its disk has failed"
                self._ticking.pop(shard, None)
                # What is in these files, or in the page cache, is all that there is: the logs that failed know no better.
                hosted.ends = {number: hosted.acknowledged(number) for number in hosted.workers}
                await self._opener.close(hosted, hosted.broken, in_order=False)
                hosted.is_abandoned = True
            plans = tuple(hosted.workers[log.number].disk.plan for log in hosted.plan.logs)
            plan = replace(hosted.plan, logs=plans)
            disks, why = {}, ""
            try:
                disks = await self._opener.open(plan)
            except CorruptionError as error:
                why = error.sentence
                await self._opener.leave_sets(shard, if_alone=False)
            lost = what_was_lost(hosted, disks) if disks else ""
            # What is built anew because it was lost is no less than it was.
            if disks and not lost and not hosted.core.replica.lost:
                lost = what_is_lost(plan, disks)
            if lost:
                why = lost
                await self._opener.abandon(disks)
                await self._opener.leave_sets(shard, if_alone=True)
        except Exception as error:
            log.warning(
                "shard %s: its logs cannot be opened again, which is tried in %d s: %s",
                shard, self.reopener.next_pause_s(shard), error, exc_info=not isinstance(error, OSError | FelixError),
            )  # fmt: skip
            return Tried.FAILED
        if why:
            self._alarms.tell(
                shard, f"its disk has failed, and its logs are not opened again before a restart: {why}"
            )
            return Tried.OVER
        log.warning("shard %s: its logs are open again; no longer: %s", shard, self._alarms.drop(shard))
        for number, disk in disks.items():
            # They may have been altered meanwhile.
            disk.limit_segments(hosted.workers[number].disk.plan.limits)
        self._host(plan, disks, before=hosted)
        if self._is_leaving:
            self._step(self._hosted[shard], Leaving())
        return Tried.OPENED

    def start(self) -> None:
        """Lead and follow. The mirror has reached the registration, and the broker is alive."""
        self._is_started = True
        self._read_lease(self._now())
        self._know_peers()
        self._hear_records([*self._hosted, *self.unopened])
        self._ticks = asyncio.get_running_loop().create_task(self._tick(), name="replication ticks")
        self.repairs.start()

    async def close(self) -> None:
        """Do nothing more; close the logs, all that they hold synced where their disks take it."""
        await self._stop("the broker stops", in_order=True)

    async def abandon(self) -> None:
        """Do nothing more, and sync nothing: as where the process ends."""
        await self._stop("the broker is gone", in_order=False)

    async def _stop(self, why: str, *, in_order: bool) -> None:
        self._is_closed = True
        if self._ticks is not None:
            await end_tasks(self._ticks)
        await self.repairs.close()
        await self.reopener.close()
        await self._eligibility.close()
        await self._tasks.end()
        for hosted in self._hosted.values():
            self._depose(hosted, UnavailableError(f"The shard has stopped: {why}.", code=Code.SHUTTING_DOWN))
            await self._opener.close(hosted, why, in_order=in_order)

    # -- what others ask -------------------------------------------------------------------------------

    @property
    def alarms(self) -> dict[ShardId, str]:
        """What needs a person, the newest of each shard."""
        return self._alarms.shown

    @property
    def cut_records(self) -> int:
        """As `CopyAlarms.cut_records`."""
        return self._alarms.cut_records

    @property
    def registration(self) -> int:
        """This start of the broker."""
        return self._registration

    def replica(self, shard: ShardId) -> Replica | None:
        """What is known of a copy here; to be looked at only."""
        hosted = self._hosted.get(shard)
        return None if hosted is None else hosted.core.replica

    def end_of(self, shard: ShardId) -> LogEnd | None:
        """How far a copy here goes, led or not; None where it is not open, or `why_unknown` says why nobody knows."""
        hosted = self._hosted.get(shard)
        if hosted is None or hosted.has_failed:
            return None
        records, *journals = (
            JournalEnd(number, log.history.epoch_before(log.end), (log.end.offset, log.end.note))
            for number, log in sorted(hosted.core.replica.logs.items())
        )
        begun = hosted.core.replica.logs[RECORDS].history.find(records.epoch)
        election = begun.election if begun else ""
        return LogEnd(self._registration, records.epoch, election, records.end, tuple(journals))

    def why_unknown(self, shard: ShardId) -> str:
        """Why nobody knows how far a copy here goes: it cannot be opened, or its disk has failed. Empty where it is open, or not here."""
        if why := self.unopened.get(shard, ""):
            return why
        hosted = self._hosted.get(shard)
        return self.alarms.get(shard, "it has failed") if hosted is not None and hosted.has_failed else ""

    @property
    def shards(self) -> list[ShardId]:
        """Of which this broker has copies."""
        return list(self._hosted)

    def on_change(self, listener: Callable[[ShardId], None]) -> None:
        """Call `listener` with each shard that `serves` says something else of than before."""
        self._listeners.append(listener)

    def serves(self, shard: ShardId) -> bool:
        """Whether it is led here, and its logs may be led: all that they had at the election is committed."""
        hosted = self._hosted.get(shard)
        return hosted is not None and hosted.serves

    def epoch(self, shard: ShardId) -> int:
        """The epoch in which it is led here; 0 where `serves` is not true."""
        hosted = self._hosted.get(shard)
        return hosted.core.leader.epoch if hosted is not None and hosted.serves else 0

    def lag_records(self, shard: ShardId, number: int) -> int:
        """How far the furthest copy is behind what is written here, where the shard is led here; else 0. From every thread."""
        hosted = self._hosted.get(shard)
        if hosted is None or not hosted.serves:
            return 0
        return max(hosted.lags(number).values(), default=0)

    def lags(self, number: int) -> Counter[str]:
        """Of each broker with copies of what is led here: how many records of the logs of this number it has not acknowledged, in all."""
        found = Counter[str]()
        for hosted in self._hosted.values():
            if hosted.serves:
                found.update(hosted.lags(number))
        return found

    def lead(self, shard: ShardId, number: int) -> HostedCopies:
        """What a log of a shard is led by, until it is released. Raises UnavailableError where the shard does not serve here, or not all that
        the log has is committed yet."""
        hosted = self._hosted.get(shard)
        if (
            hosted is None
            or not hosted.serves
            or number in hosted.led
            or not hosted.core.replica.logs[number].is_committed
        ):
            raise not_leader(shard)

        def released() -> None:
            del hosted.led[number]
            self._settle(hosted)
            self._tell(hosted)

        copies = hosted.led[number] = HostedCopies(
            number,
            hosted.core.replica.logs[number],
            hosted.workers[number],
            happened=partial(self._step, hosted),
            failed=partial(self._failed, hosted),
            full=partial(self._full, hosted),
            refusal=partial(self._refusal, hosted),
            released=released,
            # What a view has told, it has told for good: its journal is never answered early.
            may_answer=(lambda: hosted.core.leader.may_answer(self._now()))
            if hosted.answers_early and number == RECORDS
            else None,
            repair=partial(self.repairs.repair, shard, number),
            offloaded=partial(self.maintenance.listed, shard),
            point_to=partial(self.maintenance.point_to, hosted),
            lists=partial(self._lists, shard),
        )
        return copies

    def _refusal(self, hosted: Hosted) -> UnavailableError | None:
        """Why a shard that is led here takes no appends now."""
        if not hosted.serves:
            return not_leader(hosted.shard)
        if hosted.core.leader.may_append():
            return None
        return UnavailableError(
            f"Shard {hosted.shard.number} has too few copies in sync for what is written to be committed; nothing was written.",
            hint="The brokers that have its other copies must be up and catch up; felix region status shows them.",
            retry_after_ms=RETRY_MS,
        )

    def _failed(self, hosted: Hosted, failed: DiskFailed, error: FelixError) -> None:
        hosted.workers[failed.log].halt(error.sentence, is_disk_error=isinstance(error, StorageFailedError))
        self._begin_task(hosted, self._disk_failed(hosted, failed))

    def _full(self, hosted: Hosted, copies: HostedCopies, error: FelixError) -> None:
        self._alarms.tell(
            hosted.shard,
            "its disk is full: nothing is written there until there is room",
            lambda: not copies.is_full,
        )
        self._hand_over(hosted)

    def hand_over(self, shard: ShardId) -> None:
        """A damaged segment cannot be repaired, as the disk takes nothing: who leads here lets another one lead, where somebody else is in sync."""
        if (hosted := self._hosted.get(shard)) is not None:
            self._hand_over(hosted)

    def _hand_over(self, hosted: Hosted) -> None:
        """Whoever has room, or a disk that works, leads, where somebody else is in sync."""
        now = self._now()
        if hosted.core.leader.leads and now >= hosted.full_again_ms:
            hosted.full_again_ms = now + FULL_AGAIN_MS
            # A reason that brokers of earlier releases know.
            self.let_lead(hosted.shard, "stuck")

    async def read_committed(
        self, shard: ShardId, number: int, begin: LogPoint, size: int
    ) -> tuple[Frame, ...]:
        """As `CopyReads.committed`."""
        return await self.reads.committed(shard, number, begin, size)

    def disks(self, shard: ShardId) -> dict[int, ReplicaDisk]:
        """The logs of a copy here, by number; none where there is none, or where it has stopped."""
        hosted = self._hosted.get(shard)
        if hosted is None or hosted.broken or hosted.core.replica.failed:
            return {}
        return {number: worker.disk for number, worker in hosted.workers.items()}

    def aside(self) -> list[tuple[ShardId, Aside]]:
        """What was set aside of logs of copies here, and was not removed yet. From the event loop."""
        return [
            (shard, worker.disk.aside)
            for shard, hosted in self._hosted.items()
            for worker in hosted.workers.values()
            # Also by hand; there are none as a rule, so this asks the disk nothing.
            if worker.disk.aside is not None and self._files.exists(worker.disk.aside.path)
        ]

    def is_copying(self, shard: ShardId, number: int) -> bool:
        """Whether a log here is about to be begun anew with what its leader has."""
        hosted = self._hosted.get(shard)
        return hosted is not None and number in hosted.core.replica.copying

    def in_sync(self, shard: ShardId) -> list[str]:
        """The other brokers whose copies are in sync, the leader first."""
        view = self._mirror.view
        record = view.shards.get(shard)
        if record is None:
            return []
        others = [member for member in record.isr if member != self._broker and member in view.alive]
        return sorted(others, key=lambda member: member != record.leader)

    def is_in_sync(self, shard: ShardId) -> bool:
        """Whether this broker's copy is."""
        record = self._mirror.view.shards.get(shard)
        return record is not None and record.isr.get(self._broker) == self._registration

    def may_be_compacted(self, shard: ShardId, number: int) -> bool:
        """Whether copies of a log are compacted, or the one here was."""
        disk = self.disks(shard).get(number)
        was_compacted = disk is not None and disk.log.compaction.clean_to > 0
        return was_compacted or (self._compacts is not None and self._compacts(shard, number))

    def copy_anew(self, shard: ShardId, number: int) -> bool:
        """Have the whole log copied from its leader; where this broker leads, it lets another one lead first. False where nobody else is in sync."""
        hosted = self._hosted.get(shard)
        if hosted is None or not self.in_sync(shard):
            return False
        self._step(hosted, YieldAsked("move") if hosted.core.leader.leads else CopyWanted(number))
        return True

    def committed(self, shard: ShardId, number: int) -> LogPoint:
        """How far a log of a copy here is known to be committed."""
        hosted = self._hosted.get(shard)
        return BEGINNING if hosted is None else hosted.core.replica.logs[number].commit

    def want_min(self, shard: ShardId, minimum: int) -> None:
        """The catalog asks for this `min` (R9); of a shard that is not here nobody asks it here."""
        hosted = self._hosted.get(shard)
        # Asked for each shard of a stream at each change of one of them.
        if hosted is not None and hosted.min_wanted != minimum and self._is_started:
            hosted.min_wanted = minimum
            self._step(hosted, MinWanted(minimum))

    def plans(self, shard: ShardId) -> list[LogPlan]:
        """Where the logs of a copy are."""
        return [worker.disk.plan for worker in self._hosted[shard].workers.values()]

    def is_used(self, shard: ShardId) -> bool:
        """Whether somebody leads logs of a shard here, or has not released them yet."""
        hosted = self._hosted.get(shard)
        return hosted is not None and (bool(hosted.led) or hosted.is_settling or hosted.core.leader.leads)

    @property
    def leads(self) -> int:
        """Shards that are led here, and those that are being given up."""
        return sum(self.is_used(shard) for shard in self._hosted)

    @property
    def yielding(self) -> bool:
        """Whether a shard is being given up of which the record does not say so yet."""
        return any(hosted.core.leader.gives_up for hosted in self._hosted.values())

    def give_up(self, why: YieldReason) -> None:
        """Yield what is led here, where somebody else is eligible: a drain, a clock that is off. What was answered early is committed first."""
        for hosted in self._hosted.values():
            self._step(hosted, YieldAsked(why))

    def let_lead(self, shard: ShardId, why: YieldReason) -> None:
        """Yield one shard, as `give_up`: whoever is to serve it here cannot."""
        if (hosted := self._hosted.get(shard)) is not None:
            self._step(hosted, YieldAsked(why))

    @property
    def is_placed(self) -> bool:
        """Whether every copy that follows somebody has been told where it stands: before that, its leader knows nothing of it."""
        return all(
            hosted.core.follower.placed or not hosted.core.follower.leader
            for hosted in self._hosted.values()
            if not hosted.core.leader.leads and not hosted.core.replica.stopped
        ) and not any(hosted.is_settling for hosted in self._hosted.values())

    def leave(self) -> None:
        """Follow nobody any more, and tell those who lead not to wait for this broker. Before it stops."""
        self._is_leaving = True
        for hosted in self._hosted.values():
            self._step(hosted, Leaving())

    def leased(self, lease: Lease | None) -> None:
        """For `Registry.on_lease`."""
        self._lease = lease

    def linked(self, peer: str, up: bool) -> None:
        """For `PeerLinks`."""
        for hosted in self._hosted.values():
            self._step(hosted, Linked(peer, up))

    def heard(self, peer: str, said: Said) -> None:
        """For `PeerLinks`."""
        hosted = self._hosted.get(said.shard)
        if hosted is None or not self._is_started or hosted.broken:
            return
        message = said.message
        if not hosted.core.hears(peer):
            return
        if isinstance(message, OriginAsked):
            self._begin_task(hosted, hosted.copier.tell_origin(peer, message))
        elif isinstance(message, PieceAsked):
            self._begin_task(hosted, hosted.copier.tell_piece(peer, message))
        elif hosted.is_settling:
            # What is said while a shard settles is lost; it is said again.
            return
        elif isinstance(message, OriginTold | PieceTold):
            hosted.copier.take(peer, message)
        elif self._is_meant(hosted, message):
            if isinstance(message, Follow | Placed):
                self._look_at_files(hosted)
            self._step(hosted, Received(peer, message))

    def _look_at_files(self, hosted: Hosted) -> None:
        for number, worker in hosted.workers.items():
            seen = FilesSeen(number, worker.disk.frames_from, worker.disk.log.fixed_to)
            known = hosted.core.replica.logs[number]
            if (seen.frames_from, seen.fixed_to) != (known.frames_from, known.fixed_to):
                self._step(hosted, seen)

    def _is_meant(self, hosted: Hosted, message: Message) -> bool:
        """Whether a message speaks of the logs that are here, and is not too much."""
        logs = hosted.core.replica.logs
        if isinstance(message, Probe):
            return True
        if isinstance(message, Follow | Placed):
            numbers = [place.log for place in message.logs]
            return sorted(numbers) == sorted(logs)
        if message.log not in logs:
            return False
        return hosted.workers[message.log].waiting_bytes <= FOLLOWER_WAITING_BYTES_MAX

    # -- steps -----------------------------------------------------------------------------------------

    def _now(self) -> int:
        return self._runtime.clock.boot_ms()

    def _step(self, hosted: Hosted, event: object) -> None:
        if self._is_closed or hosted.broken or not self._is_started:
            return
        if hosted.is_settling and not isinstance(event, Written | Trimmed):
            hosted.put_off.append(event)
            return
        try:
            ready = hosted.core.step(event, self._now())
            self._carry_out(hosted, ready)
        except Exception as error:
            self._break(hosted, type(event).__name__, error)
        else:
            if hosted.core.is_quiescent:
                self._ticking.pop(hosted.shard, None)
            else:
                self._ticking[hosted.shard] = hosted
            if ready.deposed:
                self._depose(hosted, not_leader(hosted.shard))
            for number in ready.committed:
                if number in hosted.led:
                    hosted.led[number].moved()
            if hosted.answers_early and isinstance(event, Synced):
                for copies in hosted.led.values():
                    copies.moved()
        self._tell(hosted)

    def _tell(self, hosted: Hosted) -> None:
        if hosted.serves != hosted.was_led:
            hosted.was_led = hosted.serves
            for listener in self._listeners:
                listener(hosted.shard)

    def _break(self, hosted: Hosted, at: str, error: Exception) -> None:
        """A mistake of ours: what was about to be done is half done, and the copy must not go on. Where it leads, the others are let lead."""
        log.error("shard %s fails at %s", hosted.shard, at, exc_info=error)
        if hosted.broken:
            return
        hosted.broken = f"{type(error).__name__}: {error}"
        self._ticking.pop(hosted.shard, None)
        self._alarms.tell(hosted.shard, f"it has stopped by a mistake of its own ({hosted.broken})")
        for worker in hosted.workers.values():
            worker.halt(hosted.broken)
        self._depose(hosted, not_leader(hosted.shard))
        self._tell(hosted)
        self._eligibility.look_whether_elected_in_vain(hosted.shard)

    def _carry_out(self, hosted: Hosted, ready: Ready) -> None:
        workers = hosted.workers
        for lost in ready.lost:
            self._alarms.note_lost(hosted, lost)
        for cut in ready.truncate:
            workers[cut.log].put(cut)
        if ready.begin:
            hosted.to_begin = {begin.log: begin.start.epoch for begin in ready.begin}
        for begin in ready.begin:
            workers[begin.log].put(begin)
        for write in ready.write:
            workers[write.log].put(write)
        for send in ready.send:
            self._links.send(send.peer, hosted.shard, send.message)
        for sync in ready.sync:
            workers[sync.log].put(sync)
        for copy in ready.copy:
            hosted.copier.begin(copy, self._now())
        for read in ready.read:
            cuts = hosted.core.replica.logs[read.log].cuts
            self._begin_task(hosted, self.reads.for_follower(hosted, read, cuts))
        for keep in ready.keep:
            workers[keep.log].put(keep)
        for trim in ready.trim:
            workers[trim.log].put(trim)
        if ready.swap is not None:
            self._begin_task(hosted, self._swap(hosted, ready.swap))
        for alarm in ready.alarms:
            self._alarms.tell(
                hosted.shard, alarm, None if hosted.core.replica.stopped else lambda: hosted.is_whole
            )

    def _alarm_of_damage(self, shard: ShardId, sentence: str, is_over: Callable[[], bool]) -> None:
        if shard in self._hosted:
            self._alarms.tell(shard, sentence, is_over)

    def _begin_task(self, hosted: Hosted, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._break(hosted, "work beside its steps", error)

        self._tasks.begin(run(), name="replication")

    # -- who leads its logs ----------------------------------------------------------------------------

    def _depose(self, hosted: Hosted, why: FelixError) -> None:
        """L5: what is not committed is not answered as if it were."""
        hosted.is_settling = bool(hosted.led)
        for copies in hosted.led.values():
            copies.depose(why)

    def _settle(self, hosted: Hosted) -> None:
        """Once nobody has the logs of a shard that was deposed, hear the rest."""
        if hosted.is_settling and not hosted.led:
            hosted.is_settling = False
            while hosted.put_off and not hosted.is_settling:
                self._step(hosted, hosted.put_off.pop(0))

    # -- the disk --------------------------------------------------------------------------------------

    def _worked(self, hosted: Hosted, told: WorkerTold) -> None:
        if self._is_closed or hosted.broken:
            return
        if isinstance(told, LogBegun):
            # Of an epoch that was lost before its beginning was on the disk it says nothing of the one that is led now.
            if hosted.to_begin.get(told.log) == told.epoch:
                del hosted.to_begin[told.log]
                if not hosted.to_begin:
                    self._step(hosted, Begun(told.epoch))
        elif isinstance(told, DiskFailed):
            self._begin_task(hosted, self._disk_failed(hosted, told))
        elif isinstance(told, DiskFull):
            worker = hosted.workers[told.log]
            self._alarms.tell(
                hosted.shard,
                f"its disk is full ({worker.full}): what it is to write waits, and goes on once there is room",
                lambda: not worker.full,
            )
            self._hand_over(hosted)
        elif isinstance(told, Collected):
            hosted.copier.go_on(told, self._now())
        elif isinstance(told, CopyFailed):
            hosted.copier.fail(told.log)
        else:
            self._step(hosted, told)

    async def _disk_failed(self, hosted: Hosted, failed: DiskFailed) -> None:
        """First that goes to the folder's file (where an `interval` log was acknowledged unsynced), then to the core, which tells the store."""
        if self._sync_failed is not None and hosted.core.replica.durability != "fsync":
            try:
                await self._sync_failed()
            except OSError as error:
                log.error("that a sync failed cannot be written down: %s", error)
        for worker in hosted.workers.values():
            worker.halt("another log of the shard failed")
        had_failed = hosted.core.replica.failed
        self._step(hosted, failed)
        if hosted.broken:
            return
        # In place of what the core says of it, which does not know why.
        worker = hosted.workers[failed.log]
        passes = worker.is_disk_error and failed.why == "failed"
        if failed.why != "failed":
            self.reopener.drop(hosted.shard)
        elif passes and not had_failed:
            self.reopener.failed(hosted.shard)
        told = "; its logs are opened again by themselves, if they can be" if passes else ""
        self._alarms.tell(hosted.shard, f"its disk has failed: {worker.failure}{told}")

    def limit_segments(self, shard: ShardId, number: int, limits: SegmentLimits) -> None:
        """Close the segments of a log by these limits from now on."""
        if (hosted := self._hosted.get(shard)) is not None:
            hosted.workers[number].disk.limit_segments(limits)

    # -- the metadata store ----------------------------------------------------------------------------

    def _mirrored(self, known: Snapshot | Change) -> None:
        if not self._is_started or self._is_closed:
            return
        keys = self._mirror.view.keys
        if isinstance(known, Snapshot):
            self._know_peers()
            self._hear_records([*self._hosted, *self.unopened])
            return
        names = {event.key for event in known.events}
        self._hear_records([keys.shard_of(name) for name in names if name.startswith(keys.shards)])
        if any(name.startswith((keys.brokers, keys.nodes)) for name in names):
            self._know_peers()

    def _hear_records(self, shards: Sequence[ShardId]) -> None:
        view = self._mirror.view
        for shard in shards:
            hosted, record = self._hosted.get(shard), view.shards.get(shard)
            if hosted is None:
                # Elected as one of its sets: nobody else knows that it cannot be opened.
                self._eligibility.look_whether_elected_in_vain(shard)
            elif record is not None:
                key = view.keys.shard(shard)
                self._step(hosted, RecordRead(record, view.revision_of(key), view.revision))
                self._eligibility.look(hosted)

    def _know_peers(self) -> None:
        view = self._mirror.view
        self._links.know(
            {broker: record.peer_address for broker, record in view.alive.items()}, view.nodes.keys()
        )
        living = view.brokers.registrations()
        if living == self._living:
            # What a broker says of itself changes its record, too.
            return
        self._living = living
        for hosted in self._hosted.values():
            self._step(hosted, Living(living))

    async def _swap(self, hosted: Hosted, swap: Swap) -> None:
        view = self._mirror.view
        made = change(view, hosted.shard, self._broker, swap.before, swap.revision, swap.record)
        if isinstance(made, Refusal):
            if made.sentence != hosted.unchanged:
                # It is tried again and again while the watch shows nothing else.
                hosted.unchanged = made.sentence
                log.info("shard %s: its record is not changed: %s", hosted.shard, made.sentence)
            self._step(hosted, SwapAnswered(swap.attempt, Outcome.REFUSED))
            return
        outcome, revision = Outcome.UNKNOWN, 0
        try:
            result = await self._mirror.commit(made)
        except FelixError as error:
            # Not sent, or sent and not heard of: the larger set stands until it is known.
            if hosted.unchanged != error.code.name:
                hosted.unchanged = error.code.name
                log.warning(
                    "shard %s: what came of a change of its record is not known: %s", hosted.shard, error
                )
        else:
            hosted.unchanged = ""
            if result is not None:
                outcome = Outcome.APPLIED if result.succeeded else Outcome.REFUSED
                revision = result.revision
        self._step(hosted, SwapAnswered(swap.attempt, outcome, revision))

    # -- time ------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_MS / 1_000)
            now = self._now()
            self._read_lease(now)
            self._alarms.look()
            if now >= self._hung_looked_ms + HUNG_LOOK_MS:
                self._hung_looked_ms = now
                for hosted in list(self._hosted.values()):
                    self._look_whether_hung(hosted)
                    self._eligibility.look(hosted)
            is_detached = now > self._broker_lease.until_ms + DETACHED_MS
            for hosted in list((self._hosted if is_detached else self._ticking).values()):
                if now < hosted.core.rests_until_ms and not is_detached:
                    continue
                hosted.copier.fail_late(now)
                if not hosted.is_settling:
                    self._step(hosted, Tick())

    def _look_whether_hung(self, hosted: Hosted) -> None:
        """A write, too, may never return, of which the core knows nothing before it does: whoever leads gives way as where a sync does not."""
        hung, hangs = hosted.is_hung, hosted.hangs
        hosted.hangs = hung
        if hosted.broken or not hung:
            return
        if not hangs:
            self._alarms.tell(
                hosted.shard,
                f"its disk has not answered for {HUNG_MS // 1_000} s: what it is to write waits, and goes on if it does",
                lambda: not hosted.is_hung,
            )
        if hosted.core.leader.leads:
            self.let_lead(hosted.shard, "hung")

    def _read_lease(self, now: int) -> None:
        known = self._broker_lease
        until_ms = 0 if self._lease is None else now + self._lease.remaining_ms()
        if until_ms <= now or until_ms - known.until_ms <= TICK_MS:
            return
        was_over = now >= known.until_ms - LEASE_MARGIN_MS
        known.until_ms = until_ms
        if was_over:
            # What is durable here waits for nothing else where it is answered early.
            for hosted in self._hosted.values():
                if hosted.answers_early:
                    for copies in hosted.led.values():
                        copies.moved()
