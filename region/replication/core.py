"""A broker's replica of one shard, leading or following: `ReplicaCore.step(event, now)`. Pure.

It brings each event to the core that it concerns, in the order in which the two must hear it: the fence first, then the leader, which
gives up an epoch that is over, then the follower.

A core to which time alone gives nothing to do before a certain time *rests* until then: it needs no ticks until something else happens, or the
broker is without a lease for DETACHED_MS. One that rests for good is *quiescent*, as a quiesced range of CockroachDB is. Whether a peer is still
there is judged by the link to it, once for all shards.

Invariants:
- a peer is heard as what the record, as it was read, says that it is, in an epoch that a record or a log of this replica tells of;
- a tick of a core that rests asks for nothing before DETACHED_MS after the lease (asserted in the simulator).
"""

from __future__ import annotations

from typing import Final

from region.replication.follower import FollowerCore
from region.replication.leader import LeaderCore
from region.replication.messages import Follow, FromFollower
from region.replication.ready import (
    Copied,
    CopyFailed,
    DiskFailed,
    FilesSeen,
    Keep,
    Linked,
    Living,
    Ready,
    Received,
    RecordRead,
    Send,
    Synced,
    Tick,
)
from region.replication.replica import Replica

KEEP_MS: Final = 1_000
"""The commit point that stands in the folder is at most so old: after a start, F3 goes by it."""
FOR_GOOD: Final = 1 << 62
"""Behind every time (ms) that a clock tells: whoever rests until then is woken by an event alone."""


class ReplicaCore:
    """See the module. `replica` is what both sides stand on; nobody else changes it."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.leader = LeaderCore(replica)
        self.follower = FollowerCore(replica)
        self._read: RecordRead | None = None
        """the newest that was taken"""
        self._revision = 0
        self._as_of = 0
        self._kept_ms = 0
        self._alarmed = ""
        self._peers: tuple[str, ...] = ()
        self._ahead: tuple[Received, ...] = ()
        """questions in an epoch that nothing here has told of yet, each peer's newest: they are looked at once a record does"""
        self.rests_until_ms = 0
        """before then time alone gives it nothing to do; 0: each tick may"""

    def go_on_from(self, before: ReplicaCore) -> None:
        """Before the first event: this is the same copy in the same process, whose logs have failed and are open again with all that they had
        acknowledged. It leads no epoch twice, knows no older one and no older record, and its commit point does not fall. Whoever leads hears no question
        that has not a higher number than those before, and what was answered to those is not taken here."""
        self.replica.fence = before.replica.fence
        self.replica.lost, self.replica.lost_in = before.replica.lost, before.replica.lost_in
        for number, log in self.replica.logs.items():
            log.commit = max(log.commit, min(before.replica.logs[number].commit, log.end))
        self.follower.ask = before.follower.ask
        self._revision, self._as_of = before._revision, before._as_of

    @property
    def is_quiescent(self) -> bool:
        """Whether time alone gives it nothing to do, however much of it passes."""
        return self.rests_until_ms == FOR_GOOD

    def hears(self, peer: str) -> bool:
        """Whether the newest record read gives this broker a part in the shard; nobody else is heard. Nobody is before a record was read (R7)."""
        return peer in self._peers

    def _is_known(self, epoch: int, election: str) -> bool:
        """Whether a message speaks in an epoch that a record, or a log of this replica, has told of.

        What a message alone says is believed of nobody: a number made up would keep the shard from every later leader. Whoever is behind
        hears of an epoch from its watch, and is asked again meanwhile; until then it acknowledges nothing to the newer leader, and the
        older one has nobody's acknowledgement of those who know better.
        """
        fence = self.replica.fence
        return epoch < fence.epoch or (epoch, election) == (fence.epoch, fence.election)

    def step(self, event: object, now: int) -> Ready:
        """One event at `now` (ms of a clock that does not go back)."""
        ready = Ready()
        kind = type(event)
        if self.rests_until_ms and kind is not Tick:
            if self._is_slept_through(event):
                self.leader.step(event, now, ready)
                return ready
            self.rests_until_ms = 0
            self.leader.wake(now, ready)
        if kind is Synced:
            assert isinstance(event, Synced)
            log = self.replica.logs[event.log]
            if not log.synced(event.point, event.cuts):
                return ready
        elif kind is FilesSeen:
            assert isinstance(event, FilesSeen)
            seen = self.replica.logs[event.log]
            seen.frames_from, seen.fixed_to = event.frames_from, event.fixed_to
            return ready
        elif kind is RecordRead:
            assert isinstance(event, RecordRead)
            if not self._take_record(event):
                return self._done(ready)
        elif kind is Received:
            assert isinstance(event, Received)
            message = event.message
            if not self.hears(event.peer):
                return ready
            if not self._is_known(message.epoch, message.election):
                self._look_at_later(event)
                return ready
            if isinstance(message, FromFollower):
                self.leader.step(event, now, ready)
                return self._done(ready)
        elif kind is Tick:
            self._keep(now, ready)
        led = self.leader.leads
        self.leader.step(event, now, ready)
        if kind is DiskFailed:
            assert isinstance(event, DiskFailed)
            if not led:
                self.follower.step(event, now, ready)
            self.replica.failed = event.why
        elif not self.leader.leads:
            self.follower.step(event, now, ready)
        elif kind is Received:
            assert isinstance(event, Received)
            if self.replica.fence.stale(event.message.epoch):
                ready.send.append(Send(event.peer, self.replica.stale_answer()))
        elif self.follower.leader:
            self.follower.leave()
        if kind is RecordRead and self._ahead:
            self._look_at_ahead(now, ready)
        if kind in (Copied, CopyFailed) and self._read and not (self.replica.copying or self.leader.leads):
            # Who has a log copied leads nothing: an election that was read meanwhile counts now.
            self.leader.step(self._read, now, ready)
        if kind is Tick:
            self.rests_until_ms = self._next_ms(now)
        return self._done(ready)

    def _look_at_later(self, event: Received) -> None:
        """Of an election its followers may hear before its leader does. What they ask then is believed no earlier than it is elsewhere."""
        if type(event.message) is Follow and event.message.epoch > self.replica.fence.epoch:
            self._ahead = (*(each for each in self._ahead if each.peer != event.peer), event)

    def _look_at_ahead(self, now: int, ready: Ready) -> None:
        ahead, self._ahead = self._ahead, ()
        for event in ahead:
            message = event.message
            if not self._is_known(message.epoch, message.election):
                self._look_at_later(event)
            elif self.hears(event.peer):
                self.leader.step(event, now, ready)

    def _is_slept_through(self, event: object) -> bool:
        """Whether what a core at rest is told gives it nothing to do, now or later: who is alive, and, where it does not lead, whose link is down."""
        return type(event) is Living or (type(event) is Linked and not event.up and not self.leader.leads)

    def _next_ms(self, now: int) -> int:
        """Before when time alone gives it nothing to do; 0: it may at each tick."""
        replica = self.replica
        if (
            replica.copying
            or not self.leader.is_quiescent(now)
            or not (self.leader.leads or self.follower.is_quiescent)
        ):
            return 0
        is_kept = all(log.kept >= log.commit for log in replica.logs.values())
        return FOR_GOOD if is_kept else self._kept_ms + KEEP_MS

    def _take_record(self, event: RecordRead) -> bool:
        """R7: nothing older than this broker's registration says anything to it. Reads come in the store's order: revisions that fall
        are those of a store that went back (R10)."""
        if event.as_of < self._as_of:
            self.replica.fence.freeze(
                f"the store was at revision {self._as_of} and is at {event.as_of}: it went back"
            )
        if event.as_of < self.replica.registered_at or event.revision < self._revision:
            return False
        self._as_of = event.as_of
        self._revision = event.revision
        self._read = event
        record = event.record
        self._peers = tuple({*record.replicas, *record.target, *record.members()} - {self.replica.broker})
        self.replica.fence.read(record)
        replica = self.replica
        if record.leader != replica.broker and record.isr.get(replica.broker) == replica.registration:
            replica.lost = False
        return True

    def _keep(self, now: int, ready: Ready) -> None:
        if now - self._kept_ms < KEEP_MS:
            return
        self._kept_ms = now
        for log in self.replica.logs.values():
            if log.kept < log.commit:
                log.kept = log.commit
                ready.keep.append(Keep(log.number, log.commit))

    def _done(self, ready: Ready) -> Ready:
        frozen = self.replica.fence.frozen
        if frozen and not self._alarmed:
            self._alarmed = frozen
            ready.alarms.append(frozen)
            self.leader.step(None, 0, ready)
        return ready
