"""What a follower of a shard decides: `FollowerCore.step(event, now)` gives a `Ready`. Pure: no clock, no loop, no network, no callback.

A follower asks the leader where to go on (`Follow`), with all that it has on its disk (F8); does what `Placed` says; takes frames where
its log ends and nowhere else (F2), syncs, and then acknowledges (F4). It never speaks to a leader of an epoch older than one it knows (F1).
Each question has a number, and only what carries the newest one's is taken (F7): a placement that comes late would let it cut what is
committed.

It cuts its log only where a leader's history of epochs says so, and never below its own commit point (F3): that would be corruption, so it stops.
Only a record that says `unclean`, of an epoch later than all it holds, lets it.

Invariants (asserted after each step in the simulator): commit <= durable; at most one question is open; nothing is acknowledged that is not on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

from region.cluster.records import ShardRecord
from region.log.point import LogPoint
from region.replication.history import BEGINNING, parting
from region.replication.messages import (
    Action,
    Append,
    Commit,
    Durable,
    Follow,
    FromLeader,
    LogPlace,
    Placed,
    Placement,
    Status,
)  # fmt: skip
from region.replication.ready import (
    Copied,
    CopyFailed,
    CopyFrom,
    CopyWanted,
    DiskFailed,
    Leaving,
    Linked,
    Lost,
    Ready,
    Received,
    RecordRead,
    Send,
    Sync,
    Synced,
    Tick,
    Trim,
    Truncate,
    Write,
)  # fmt: skip
from region.replication.replica import Log, Replica, all_but

ASK_AGAIN_MS: Final = 500
"""A question that has had no answer for so long is asked anew."""
ON_ITS_WAY_MS: Final = 100
"""Whoever is asked to ask, and has done so less long ago, does not yet ask again: the two have crossed. Some round trips."""
COPY_AGAIN_MS_MAX: Final = 30_000
"""A copy that came to nothing is asked for after ASK_AGAIN_MS, then after twice as long each time, up to this: each costs the leader a look at its log."""
COPIES_BEFORE_ALARM: Final = 3
"""So often in a row a copy may come to nothing before a person is told: a link that ends, or a leader that changes, ends one."""


class FollowerCore:
    """Of one shard on one broker, for all leaders that it follows."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.leader = ""
        """whom it follows; empty: nobody"""
        self.epoch = 0
        self.ask = 0
        self.placed = False
        self.record: ShardRecord | None = None
        self._waits = False
        """for syncs, before it may ask"""
        self._older: dict[int, int] = {}
        """per log, the epoch below which the leader asked for older ones"""
        self._told: dict[int, LogPoint] = {}
        """per log, the leader's commit point"""
        self._asked_ms = 0
        self._again_ms = 0
        """when the open question is asked anew"""
        self._copies_failed = 0
        """in a row"""
        self._not_before_ms = 0

    def step(self, event: object, now: int, ready: Ready | None = None) -> Ready:
        """One event at `now` (ms of a clock that does not go back). What is to be done is added to `ready` where it is given."""
        ready = Ready() if ready is None else ready
        if not self.replica.stopped:
            handle = self._handlers.get(type(event))
            if handle is not None:
                handle(self, event, now, ready)
        return ready

    # -- whom it follows -------------------------------------------------------------------------------

    def _read(self, event: RecordRead, now: int, ready: Ready) -> None:
        record = event.record
        self.record = record
        if self.replica.fence.stale(record.epoch):
            return
        me = self.replica.broker
        if (
            record.leader in ("", me)
            or record.yielded is not None
            or me not in (*record.replicas, *record.target)
        ):
            self.leave()
        elif (record.leader, record.epoch) != (self.leader, self.epoch):
            self._follow(record.leader, record.epoch, now, ready)

    def leave(self) -> None:
        """Follow nobody."""
        self.leader, self.epoch, self.placed, self._waits = "", 0, False, False

    def _follow(self, leader: str, epoch: int, now: int, ready: Ready) -> None:
        self.leader, self.epoch = leader, epoch
        self._older.clear()
        self._copies_failed = self._not_before_ms = 0
        self._ask(now, ready)

    def _ask(self, now: int, ready: Ready) -> None:
        """F8: only when all that it has is on its disk."""
        replica = self.replica
        self.placed, self._waits = False, False
        self._asked_ms, self._again_ms = now, now + ASK_AGAIN_MS
        self._told.clear()
        self.ask += 1
        if self.replica.copying:
            return
        if not self._may_tell_ends():
            self._waits = True
            for log in replica.logs.values():
                if log.durable < log.end:
                    self._sync(log, now, ready)
            return
        places = []
        for log in replica.logs.values():
            starts, complete = log.history.newest(self._older.get(log.number, 0))
            places.append(LogPlace(log.number, log.start, log.end, starts, complete))
        fence = replica.fence
        message = Follow(
            fence.epoch, fence.election, replica.registration, replica.folder, self.ask, tuple(places)
        )
        ready.send.append(Send(self.leader, message))

    def _may_tell_ends(self) -> bool:
        """F8, R4."""
        return self.replica.synced

    # -- messages --------------------------------------------------------------------------------------

    def _received(self, event: Received, now: int, ready: Ready) -> None:
        peer, message = event
        assert isinstance(message, FromLeader)
        if not self._listens_to(peer, message, now, ready):
            return
        if isinstance(message, Append):
            self._append(message, now, ready)
        elif isinstance(message, Commit):
            if self.placed and message.ask == self.ask and message.registration == self.replica.registration:
                self._hear_commit(self.replica.logs[message.log], message.commit, ready)
        elif isinstance(message, Placed):
            self._take_place(message, now, ready)
        elif self._is_on_its_way(now):
            # Where it was lost it is asked anew soon.
            self._again_ms = self._asked_ms + ON_ITS_WAY_MS
        elif now >= self._not_before_ms:
            self._ask(now, ready)

    def _is_on_its_way(self, now: int) -> bool:
        """Whether a question was asked so lately that whoever leads may not have it yet."""
        return (
            not (self.placed or self._waits or self.replica.copying) and now - self._asked_ms < ON_ITS_WAY_MS
        )

    def _listens_to(self, peer: str, message: FromLeader, now: int, ready: Ready) -> bool:
        """F1. The caller has seen that the epoch is known."""
        if self._is_stale(message):
            ready.send.append(Send(peer, self.replica.stale_answer()))
            return False
        record = self.record
        if record is None or (peer, message.epoch) != (record.leader, record.epoch):
            return False
        if peer != self.leader or message.epoch != self.epoch:
            self._follow(peer, message.epoch, now, ready)
            return False
        return True

    def _is_stale(self, message: FromLeader) -> bool:
        return self.replica.fence.stale(message.epoch)

    def _is_answer(self, message: Placed) -> bool:
        """F7: to the last question, once, of this start of the broker."""
        return (
            not self.placed and message.ask == self.ask and message.registration == self.replica.registration
        )

    def _take_place(self, message: Placed, now: int, ready: Ready) -> None:
        if not self._is_answer(message) or self.replica.copying or self._waits:
            return
        logs = self.replica.logs
        if any(place.action is Action.OLDER for place in message.logs):
            for place in message.logs:
                if place.action is Action.OLDER:
                    told, _ = logs[place.log].history.newest(self._older.get(place.log, 0))
                    self._older[place.log] = told[0].epoch
            self._ask(now, ready)
            return
        if not all(self._may_cut(logs[place.log], place) for place in message.logs):
            self._refuse_cut(message, ready)
            return
        copies = [
            place
            for place in message.logs
            if place.action is Action.COPY or not self._can_cut(logs[place.log], place.point)
        ]
        if copies:
            for place in copies:
                self.replica.copying |= {place.log}
                ready.copy.append(CopyFrom(self.leader, place.log))
            return
        self.placed = True
        for place in message.logs:
            log = logs[place.log]
            if place.point < log.end:
                if place.point.offset < log.end.offset:
                    is_told = self.replica.may_be_told(log, place.point)
                    ready.lost.append(
                        Lost(log.number, place.point.offset, log.end.offset, self._is_given_up(log), is_told)
                    )
                log.cut(place.point)
                ready.truncate.append(Truncate(log.number, place.point))
                self._sync(log, now, ready)
            else:
                if log.history.last.start >= place.point and log.history.last.epoch:
                    # Begun here with nothing behind it. What comes may be of an older epoch; one that goes on comes again.
                    log.history.truncate(place.point)
                    ready.truncate.append(Truncate(log.number, place.point))
                self._acknowledge(log, ready)

    def _can_cut(self, log: Log, point: LogPoint) -> bool:
        """Whether it ends there already, or the files are such that it can. After an unclean election what is given up may have been compacted, or
        be in a store alone: then the log is begun anew as the leader's."""
        return point >= log.end or point >= log.fixed_to

    def _may_cut(self, log: Log, place: Placement) -> bool:
        """F3. A copy is looked at when it is known where it ends."""
        return place.action is Action.COPY or place.point >= self.must_keep(log)

    def must_keep(self, log: Log) -> LogPoint:
        """F3: nothing before this point may go: the commit point, or the beginning where the record says that what was committed here is
        given up."""
        return BEGINNING if self._is_given_up(log) else log.commit

    def _is_given_up(self, log: Log) -> bool:
        return (
            self.record is not None
            and self.record.epoch >= self.epoch
            and self.record.unclean > log.history.last.epoch
        )

    def _refuse_cut(self, message: Placed, ready: Ready) -> None:
        if self.record is None or self.record.epoch < message.epoch:
            # The record that may allow it has not been read: ask again later.
            return
        self.replica.failed = "corrupt"
        ready.alarms.append("the leader's history asks for a cut below what is committed here")

    def _append(self, message: Append, now: int, ready: Ready) -> None:
        if not self._is_for_this_place(message):
            return
        log = self.replica.logs[message.log]
        if message.frames[-1].end <= log.end:
            # Sent twice by the network: of one leader, at one place, it is what the log has.
            self._hear_commit(log, message.commit, ready)
            return
        if not self._fits(log, message):
            self._ask(now, ready)
            return
        log.take(message.frames, message.starts)
        ready.write.append(Write(log.number, message.prev, message.frames, message.starts))
        self._sync(log, now, ready)
        self._acknowledge_early(log, ready)
        self._hear_commit(log, message.commit, ready)
        self._trim(log, message.start, ready)

    def _is_for_this_place(self, message: Append) -> bool:
        """F7."""
        return self.placed and message.ask == self.ask and message.registration == self.replica.registration

    def _fits(self, log: Log, message: Append) -> bool:
        """F2."""
        return message.prev == log.end and message.prev_epoch == log.history.epoch_before(log.end)

    def _acknowledge_early(self, log: Log, ready: Ready) -> None:
        """F4: never; what would be told here is told by `_synced`."""

    def _hear_commit(self, log: Log, commit: LogPoint, ready: Ready) -> None:
        self._told[log.number] = max(commit, self._told.get(log.number, commit))
        self._advance(log, ready)

    def _advance(self, log: Log, ready: Ready) -> None:
        """The commit point is the leader's, as far as this disk has it, where this log is known to be equal to the leader's."""
        if not self.placed:
            return
        point = min(self._told.get(log.number, log.commit), log.durable)
        if point > log.commit:
            log.commit = point
            ready.committed.append(log.number)

    def _trim(self, log: Log, start: LogPoint, ready: Ready) -> None:
        """F5: at most to its own commit point."""
        point = min(start, log.commit)
        if point > log.start:
            log.start = point
            ready.trim.append(Trim(log.number, point))

    # -- the disk --------------------------------------------------------------------------------------

    def _sync(self, log: Log, now: int, ready: Ready) -> None:
        if log.syncing_since < 0:
            log.syncing_since = now
        ready.sync.append(Sync(log.number, log.cuts))

    def _synced(self, event: Synced, now: int, ready: Ready) -> None:
        if self._waits:
            if self.replica.synced:
                self._ask(now, ready)
            return
        if self.placed:
            log = self.replica.logs[event.log]
            self._acknowledge(log, ready)
            self._advance(log, ready)

    def _acknowledge(self, log: Log, ready: Ready) -> None:
        """F4: what is on the disk."""
        replica = self.replica
        message = Durable(
            self.epoch, replica.fence.election, replica.registration, self.ask, log.number, log.durable
        )
        ready.send.append(Send(self.leader, message))

    def _copied(self, event: Copied, now: int, ready: Ready) -> None:
        log = self.replica.logs[event.log]
        self.replica.copying = all_but(self.replica.copying, event.log)
        if event.end < self.must_keep(log):
            self.replica.failed = "corrupt"
            ready.alarms.append("a copy of the leader's log ends below what is committed here")
            return
        if self._is_given_up(log):
            parted = parting(log.history.starts, True, log.end, event.history, event.end)
            begin = parted.offset if isinstance(parted, LogPoint) else log.start.offset
            if begin < log.end.offset:
                ready.lost.append(Lost(log.number, begin, log.end.offset, True))
        log.cuts += 1
        log.history, log.start, log.end, log.durable = event.history, event.start, event.end, event.end
        log.commit = max(min(log.commit, event.end), event.start, event.commit)
        log.kept = min(log.kept, event.end)
        log.syncing_since = -1
        self._copies_failed = 0
        if not self.replica.copying and self.leader:
            self._older.clear()
            self._ask(now, ready)

    def _copy_wanted(self, event: CopyWanted, now: int, ready: Ready) -> None:
        """Until it is done nothing is acknowledged, so that the leader goes on without this copy."""
        if self.placed:
            self.ask += 1
            self.placed = False
            self.replica.copying |= {event.log}
            ready.copy.append(CopyFrom(self.leader, event.log))

    def _copy_failed(self, event: CopyFailed, now: int, ready: Ready) -> None:
        self.replica.copying = all_but(self.replica.copying, event.log)
        self._copies_failed += 1
        self._not_before_ms = now + min(COPY_AGAIN_MS_MAX, ASK_AGAIN_MS << min(self._copies_failed - 1, 8))
        if self._copies_failed == COPIES_BEFORE_ALARM:
            ready.alarms.append(
                f"log {event.log} cannot be begun as its leader's: it is tried again, and this copy is not in sync before that is done"
            )

    def _disk_failed(self, event: DiskFailed, now: int, ready: Ready) -> None:
        """R11: nothing more before the logs are opened again, which cuts or writes again what a failed sync may have left."""
        ready.alarms.append(f"log {event.log} failed: {event.why}")
        if self.leader:
            self._say_failed(self.replica.logs[event.log], ready)

    def _say_failed(self, log: Log, ready: Ready) -> None:
        replica = self.replica
        message = Durable(
            self.epoch, replica.fence.election, replica.registration, self.ask, log.number, log.durable, Status.FAILED
        )  # fmt: skip
        ready.send.append(Send(self.leader, message))

    def _leaving(self, event: Leaving, now: int, ready: Ready) -> None:
        """As for a failed disk, it is out of the in-sync set at once, and not when its link has been down for a while; nothing is lost here."""
        if self.leader and self.placed:
            self._say_failed(next(iter(self.replica.logs.values())), ready)
        self.leave()
        self.replica.failed = "leaving"

    # -- time ------------------------------------------------------------------------------------------

    def _linked(self, event: Linked, now: int, ready: Ready) -> None:
        if event.peer == self.leader and event.up:
            self._ask(now, ready)

    @property
    def is_quiescent(self) -> bool:
        """Whether time alone gives it nothing to do: no question is open that it would ask again."""
        return not self.leader or self.placed or self._waits or self.replica.stopped

    def _tick(self, event: Tick, now: int, ready: Ready) -> None:
        if not self.is_quiescent and now >= max(self._again_ms, self._not_before_ms):
            self._ask(now, ready)

    _handlers: ClassVar[dict[type, Callable[[Any, Any, int, Ready], None]]] = {
        RecordRead: _read,
        Received: _received,
        Synced: _synced,
        Copied: _copied,
        CopyFailed: _copy_failed,
        CopyWanted: _copy_wanted,
        DiskFailed: _disk_failed,
        Leaving: _leaving,
        Linked: _linked,
        Tick: _tick,
    }
