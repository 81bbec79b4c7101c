"""What the leader of a shard decides: `LeaderCore.step(event, now)` gives a `Ready`. Pure: no clock, no loop, no network, no callback.

    IDLE -> ELECTED -> PREPARING -> SERVING, and from each of them -> YIELDED -> IDLE, or -> IDLE

- ELECTED: the record names this broker under its own registration, for an epoch that this process never led (N0). It has all logs synced and the
  epoch begun (N1), and answers nobody before.
- PREPARING: followers are placed (N2). What was held at the election is being committed.
- SERVING: all that was held at the election is committed (N3). Appends are taken while enough members are in sync (L4).
- YIELDED: it has stopped for good in this epoch, and writes so until a later record is read.

A leader that answers early (`acks: leader`) and gives up of its own accord hands over in two steps: first it answers nothing more before it is
committed; it yields once all that it may have answered is committed, so that every member of `isr` has it (`_give_up`).

What is committed (R1): in every record that may stand, every member of `isr` has it durable under the registration recorded there, there are
at least `min` of them, and `elr` is empty. This needs no lease: a successor is one of these members, and refuses this epoch once it knows of
its own. It ends DETACHED_MS after the lease (R12).

Invariants (asserted after each step in the simulator): the commit point never falls and never exceeds what is durable here; a
follower's frames in flight are within IN_FLIGHT_GROUPS_MAX and IN_FLIGHT_BYTES_MAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final

import msgspec

from region.cluster.membership import (
    is_target_in_sync,
    with_expanded,
    with_min,
    with_shrunk,
    with_yield,
    without,
)
from region.cluster.records import CANNOT_SERVE, ShardRecord, YieldReason
from region.cluster.registration import LEASE_MARGIN_MS
from region.log.point import LogPoint
from region.replication.history import BEGINNING, EpochStart, Parting, parting
from region.replication.messages import (
    Action,
    Append,
    Commit,
    Durable,
    Follow,
    Frame,
    LogPlace,
    Placed,
    Placement,
    Probe,
    Status,
)  # fmt: skip
from region.replication.ready import (
    Begin,
    Begun,
    DiskFailed,
    FramesRead,
    Linked,
    Living,
    MinWanted,
    Outcome,
    Read,
    Ready,
    Received,
    RecordRead,
    Send,
    SwapAnswered,
    Sync,
    Synced,
    Tick,
    Trimmed,
    Written,
    YieldAsked,
)  # fmt: skip
from region.replication.replica import Log, Replica, all_but
from region.replication.standing import Standing

TICK_MS: Final = 100
"""How often time is looked at: a fifth of the shortest of the times below."""
REPLICA_LAG_MS: Final = 2_000
"""A member that has not been caught up for so long leaves the in-sync set: the longest that one slow follower holds up a commit."""
LINK_DOWN_MS: Final = 1_000
"""A member whose link is down for so long leaves: nothing reaches it, and a reconnection takes less."""
PROBE_MS: Final = 500
"""A follower that was sent something and has not answered for so long is asked to ask again."""
SWAP_RETRY_MS: Final = 500
"""Between two tries of a swap: the store answers within milliseconds, or is away."""
OPENING_MS: Final = 30_000
"""A copy of a new shard may take so long to be opened before it leaves: while nothing was written, it holds no commit up, and whoever makes many
shards has many copies opened. Whoever is linked and says nothing of a shard for so long is not reached."""
EXPAND_BACKOFF_MS: Final = 5_000
"""A member that left is let in again after this, times how often it left; a link that flaps would change the record each second."""
EXPAND_BACKOFF_MS_MAX: Final = 60_000
HUNG_MS: Final = 10_000
"""A disk that has not answered for so long may never do."""
BELOW_MIN_MS: Final = 5_000
"""A leader below `min`, which has not reached a missing member for so long since that is alive, gives somebody else the chance."""
UNREACHABLE_PAUSE_MS: Final = 60_000
"""Between two yields for that reason: where nobody reaches anybody, shards would go in circles."""
DETACHED_MS: Final = 900_000
"""Commits go on for a quarter of an hour without the store: longer than restarts of etcd, shorter than an operator's patience with
a shard that he has to recover from elsewhere."""
CUT_OFF_MS: Final = 5_000
"""A leader without its lease, which an in-sync copy has not answered for so long, gives up: it can neither commit nor leave that copy out, and whoever
waits for it may find another leader elsewhere. Longer than a slow copy may take, and than a link takes to come back."""
HAND_OVER_MS: Final = 1_000
"""Of what it answered early a leader that gives up waits so long for the slowest copy in sync; then one that has it leads, without those that have
not. Some syncs and round trips, and less than a stop in order waits in all (region.copies.replicas.GIVE_UP_S)."""
IN_FLIGHT_GROUPS_MAX: Final = 32
"""Groups of frames sent to a follower and not acknowledged: some syncs' worth. Behind that it reads from the leader's log."""
IN_FLIGHT_BYTES_MAX: Final = 8 << 20
"""Bytes of them: four of the largest groups."""
APPEND_BYTES_MAX: Final = 2 << 20
"""Frames of one message."""
COPY_BYTES_MAX: Final = 64 << 10
"""The same, of a copy that nobody waits for: the event loop is at it for a millisecond or two, in which nobody is answered."""
FRAME_COST_BYTES: Final = 4 << 10
"""What a frame of such a copy costs beside its bytes, in bytes that cost as much: read, checked, encoded, decoded, checked and written one by one."""
COPY_IN_FLIGHT_BYTES_MAX: Final = 1 << 20
"""Of such a copy: where its disk, the link or the processors are slow, it waits for them, and publishers not behind it."""


class Phase(Enum):
    """Where a leader is; see the module."""

    IDLE = "idle"
    ELECTED = "elected"
    PREPARING = "preparing"
    SERVING = "serving"
    YIELDED = "yielded"


def cost_of(frames: Sequence[Frame]) -> int:
    """What frames of a copy that nobody waits for count at its pace, in bytes."""
    return sum(frame.size for frame in frames) + FRAME_COST_BYTES * len(frames)


@dataclass(slots=True)
class FollowerLog:
    """A follower's copy of one log, as far as its leader knows. `durable`: acknowledged since it was placed. `sent`: frames up to there
    were sent. `told`: the commit point that it was told. `reading`: frames are being read for it. `written`: what frames cost (`cost_of`) that were written
    since it was placed, were not sent when they were, and were not read for it yet."""

    durable: LogPoint
    sent: LogPoint
    told: LogPoint
    reading: bool = False
    written: int = 0
    flight: list[tuple[LogPoint, int]] = field(default_factory=list)
    flight_bytes: int = 0

    def fly(self, end: LogPoint, size: int) -> None:
        """Frames up to `end` are on their way."""
        self.flight.append((end, size))
        self.flight_bytes += size
        self.sent = end

    def land(self, point: LogPoint) -> None:
        """It has all up to `point`."""
        self.durable = max(self.durable, point)
        while self.flight and self.flight[0][0] <= point:
            self.flight_bytes -= self.flight.pop(0)[1]

    def has_room(self, bytes_max: int = IN_FLIGHT_BYTES_MAX) -> bool:
        """Whether more may be sent, with so many bytes in flight at most."""
        return len(self.flight) < IN_FLIGHT_GROUPS_MAX and self.flight_bytes < bytes_max


@dataclass(frozen=True, slots=True)
class HandingOver:
    """A leader that answered early is to give up, since `since_ms`. `answered`: per log, the furthest that it may have answered."""

    why: YieldReason
    since_ms: int
    answered: dict[int, LogPoint]


@dataclass(slots=True)
class Follower:
    """A follower, as far as its leader knows in this epoch. `logs`: empty until it was placed. `caught_up_ms`: it had then all that
    the log had then. `mark`: where the logs ended at `mark_ms`; once it has that, it was caught up then. `goal`: once it has that, it may be let in (R3).
    `joined`: the record has it in sync; `left`: how often it stopped being so. `acknowledged`: how far it did so under `folder`."""

    caught_up_ms: int
    registration: int = 0
    ask: int = 0
    folder: str = ""
    logs: dict[int, FollowerLog] = field(default_factory=dict)
    heard_ms: int = 0
    probed_ms: int = 0
    down_since: int = -1
    mark: dict[int, LogPoint] = field(default_factory=dict)
    mark_ms: int = 0
    goal: dict[int, LogPoint] = field(default_factory=dict)
    joined: bool = False
    left: int = 0
    back_after_ms: int = 0
    acknowledged: dict[int, LogPoint] = field(default_factory=dict)
    lost: bool = False

    def is_read_for(self) -> bool:
        """Whether it has acknowledged all that it was sent, and waits for what is being read: it owes no answer."""
        copies = self.logs.values()
        return any(copy.reading for copy in copies) and not any(copy.flight for copy in copies)

    def has(self, points: dict[int, LogPoint]) -> bool:
        """Whether it has acknowledged all these."""
        return all(
            (log := self.logs.get(number)) is not None and log.durable >= point
            for number, point in points.items()
        )


class LeaderCore:
    """Of one shard on one broker, for all epochs that it leads."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.phase = Phase.IDLE
        self.epoch = 0
        self.election = ""
        self.standing: Standing | None = None
        self.held: dict[int, LogPoint] = {}
        """per log, its end at the election"""
        self.followers: dict[str, Follower] = {}
        self._attempts = 0
        self._swap_after_ms = 0
        self._min_wanted = 0
        self._living: Mapping[str, int] = {}
        self._below_since = -1
        self._elected_ms = -1
        self._unreachable_ms = -UNREACHABLE_PAUSE_MS
        self._yield: YieldReason | None = None
        self._handing: HandingOver | None = None
        self._left_behind: dict[str, int] = {}
        """members, by registration, that leave the sets with the yield: they lack what was answered"""
        self._ticked_ms = -1
        self._early: tuple[Received, ...] = ()
        """who asked where to go on before the epoch was begun, each one's newest question"""
        # Values, since an empty set takes 216 bytes in each copy.
        self._unlinked: frozenset[str] = frozenset()
        """brokers whose link went down, also while another one led"""
        self._conflicting: frozenset[str] = frozenset()
        """followers with an epoch of another election, in this epoch"""

    # -- what it answers -------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether an epoch is led, or was and is being given up."""
        return self.phase is not Phase.IDLE

    @property
    def gives_up(self) -> bool:
        """Whether an epoch is being given up, and the record does not say so yet."""
        return self.phase is Phase.YIELDED or self._handing is not None

    @property
    def commits(self) -> bool:
        """Whether the commit point may rise."""
        return self.phase is Phase.PREPARING or self.phase is Phase.SERVING

    def may_append(self) -> bool:
        """Whether appends are taken: they could be committed with what is known (L4)."""
        return self.phase is Phase.SERVING and self._enough()

    def may_answer(self, now: int) -> bool:
        """Whether what rests on no commit may be answered (L1)."""
        return (
            self.phase is Phase.SERVING
            and self._handing is None
            and now < self.replica.lease.until_ms - LEASE_MARGIN_MS
        )

    # -- steps -----------------------------------------------------------------------------------------

    def step(self, event: object, now: int, ready: Ready | None = None) -> Ready:
        """One event at `now` (ms of a clock that does not go back). What is to be done is added to `ready` where it is given."""
        ready = Ready() if ready is None else ready
        fence = self.replica.fence
        if self.leads and (fence.frozen or fence.stale(self.epoch)):
            self._depose(ready)
        handle = self._handlers.get(type(event))
        if handle is not None:
            handle(self, event, now, ready)
        if self._handing is not None:
            self._end_hand_over(now, ready)
        return ready

    def wake(self, now: int, ready: Ready) -> None:
        """Something happens after a rest: it is told the time first, as if it had been ticked all the while. Not where no tick was left out."""
        if self.leads and now - self._ticked_ms > TICK_MS:
            self.step(Tick(), now, ready)

    # -- elections -------------------------------------------------------------------------------------

    def _read(self, event: RecordRead, now: int, ready: Ready) -> None:
        record, standing = event.record, self.standing
        if standing is not None:
            if not self._names_us(record):
                if event.revision > standing.revision:
                    self._depose(ready)
            else:
                is_own = standing.is_sent(record)
                if standing.read(record, event.revision):
                    if is_own:
                        # The watch was faster than the answer.
                        self._swap_after_ms = now
                    self._settled(now, ready)
        if self.phase is Phase.IDLE and self._may_lead(record):
            self._elect(record, event.revision, now, ready)
            if record.unclean == record.epoch > self.replica.lost_in:
                self.replica.lost = False
            if self.replica.lost:
                ready.begin.clear()
                self._stop("corrupt", now, ready)

    def _names_us(self, record: ShardRecord) -> bool:
        """Whether the epoch that is led is still led by this broker."""
        replica = self.replica
        return (
            (record.epoch, record.leader) == (self.epoch, replica.broker)
            and record.yielded is None
            and record.isr.get(replica.broker) == replica.registration
        )

    def _may_lead(self, record: ShardRecord) -> bool:
        """N0, R6: elected under this very registration, and for an epoch that this process did not lead."""
        replica = self.replica
        return (
            record.leader == replica.broker
            and record.yielded is None
            and record.isr.get(replica.broker) == replica.registration
            and record.epoch == replica.fence.epoch
            and record.epoch > replica.fence.led
            and not replica.stopped
            and not replica.copying
        )

    def _elect(self, record: ShardRecord, revision: int, now: int, ready: Ready) -> None:
        replica = self.replica
        replica.fence.led = record.epoch
        self.phase = Phase.ELECTED
        self.epoch, self.election = record.epoch, record.election
        self.standing = Standing(record, revision, self._attempts)
        self.followers = {}
        self._conflicting = frozenset()
        self._below_since = -1
        self._yield = None
        self._handing, self._left_behind = None, {}
        self._early = ()
        self._ticked_ms = self._elected_ms = now
        self.held = {number: log.end for number, log in replica.logs.items()}
        for number, log in replica.logs.items():
            start = EpochStart(self.epoch, self.election, log.end)
            if log.history.last.epoch < self.epoch:
                log.history.begin(start)
            log.syncing_since = now
            ready.begin.append(Begin(number, start))

    def _begun(self, event: Begun, now: int, ready: Ready) -> None:
        if self.phase is not Phase.ELECTED or event.epoch != self.epoch:
            return
        assert self.standing is not None
        self.phase = Phase.PREPARING
        for log in self.replica.logs.values():
            log.durable, log.syncing_since = log.end, -1
        early, self._early = self._early, ()
        have_asked = {asked.peer for asked in early}
        for peer in self._members():
            self._follower(peer, now)
            if peer not in have_asked:
                self._ask_to_follow(peer, ready)
        for asked in early:
            self._received(asked, now, ready)
        self._advance(ready)
        # Who is to lead in its place may have been named before this one began.
        self._hand_over(now, ready)

    def _hand_over(self, now: int, ready: Ready) -> None:
        """Yield where a move leads to another leader, and all that it leads to is in sync."""
        assert self.standing is not None
        record = self.standing.record
        if is_target_in_sync(record) and record.target[0] != self.replica.broker:
            self._give_up("move", now, ready)

    def _give_up(self, why: YieldReason, now: int, ready: Ready) -> None:
        """Let another one lead, of its own accord. What was answered early is first to be on every copy that may lead: in this epoch, and, of a
        leader before, what was held at the election."""
        if not self.replica.answers_early:
            self._stop(why, now, ready)
        elif self._handing is None:
            answered = {
                number: max(log.durable, self.held[number]) for number, log in self.replica.logs.items()
            }
            self._handing = HandingOver(why, now, answered)

    def _end_hand_over(self, now: int, ready: Ready) -> None:
        """Yield once all that was answered is committed; after HAND_OVER_MS once another one has it all, and without those that lack it. Where nobody
        else could lead any more, stay."""
        handing, standing = self._handing, self.standing
        assert handing is not None and standing is not None
        others = self._others_alive()
        if not others:
            self._handing = None
        elif all(self.replica.logs[number].commit >= end for number, end in handing.answered.items()):
            self._stop(handing.why, now, ready)
        elif now - handing.since_ms >= HAND_OVER_MS:
            able = [member for member, number in others.items() if self._has(member, number, handing)]
            if able:
                self._left_behind = without(standing.record.isr, [self.replica.broker, *able])
                self._stop(handing.why, now, ready)

    def _has(self, member: str, registration: int, handing: HandingOver) -> bool:
        """Whether a member has all that was answered on its disk."""
        for number, end in handing.answered.items():
            held = self._held_by(member, registration, self.replica.logs[number])
            if held is None or held < end:
                return False
        return True

    def _others_alive(self) -> dict[str, int]:
        """Who else may be elected: members of the sets that are alive under the registration that is recorded."""
        assert self.standing is not None
        others = without(self.standing.record.members(), [self.replica.broker])
        return {member: number for member, number in others.items() if self._living.get(member) == number}

    def _hangs(self, now: int, ready: Ready) -> None:
        """The disk does not answer. Who is alone stays: it goes on once the disk does, and of several whose disks hang the last one leads then."""
        assert self.standing is not None
        failed = self.standing.record.failed
        if any(failed.get(member) != number for member, number in self._others_alive().items()):
            self._stop("hung", now, ready)

    def _depose(self, ready: Ready) -> None:
        """The epoch is lost, or given up and known to be: nothing of it is answered any more."""
        if self.standing is not None:
            self._attempts = self.standing.attempts
        self.phase = Phase.IDLE
        self.standing = None
        self._handing = None
        self.followers = {}
        ready.deposed = True

    def _stop(self, why: YieldReason, now: int, ready: Ready) -> None:
        """Stop for good in this epoch, *then* write so."""
        if self.phase is Phase.YIELDED:
            # A disk that fails after a drain began must be told of, too.
            if self._yield is not None and self._yield not in CANNOT_SERVE and why in CANNOT_SERVE:
                self._yield = why
            return
        self.phase = Phase.YIELDED
        self._yield = why
        if self._handing is not None:
            self.replica.handed_over = self.epoch, self._handing.answered
        self._handing = None
        self.followers = {}
        ready.deposed = True
        # Nobody serves the shard until this stands: it does not wait because of what was wanted before.
        self._swap_after_ms = now
        self._change(now, ready)

    # -- writing ---------------------------------------------------------------------------------------

    def _written(self, event: Written, now: int, ready: Ready) -> None:
        log = self.replica.logs[event.log]
        assert event.prev == log.end, (event.prev, log.end)
        log.take(event.frames, ())
        size = sum(frame.size for frame in event.frames)
        may_send = self.phase is Phase.SERVING and size <= APPEND_BYTES_MAX
        for peer, follower in self.followers.items():
            copy = follower.logs.get(event.log)
            if copy is None:
                continue
            if may_send and copy.sent == event.prev and not copy.reading and copy.has_room():
                self._append(peer, follower, log, copy, event.frames, size, ready)
            else:
                copy.written += cost_of(event.frames)
        self._sync(log, now, ready)

    def _sync(self, log: Log, now: int, ready: Ready) -> None:
        if log.syncing_since < 0:
            log.syncing_since = now
        ready.sync.append(Sync(log.number, log.cuts))

    def _synced(self, event: Synced, now: int, ready: Ready) -> None:
        if self.commits:
            self._advance(ready)

    def _trimmed(self, event: Trimmed, now: int, ready: Ready) -> None:
        log = self.replica.logs[event.log]
        assert event.point <= log.commit
        log.start = max(log.start, event.point)

    def _disk_failed(self, event: DiskFailed, now: int, ready: Ready) -> None:
        if self.leads:
            self._stop(event.why, now, ready)

    def _append(
        self,
        peer: str,
        follower: Follower,
        log: Log,
        copy: FollowerLog,
        frames: tuple[Frame, ...],
        size: int,
        ready: Ready,
    ) -> None:
        prev = copy.sent
        ready.send.append(
            Send(
                peer,
                Append(
                    self.epoch,
                    self.election,
                    follower.registration,
                    follower.ask,
                    log.number,
                    prev,
                    log.history.epoch_before(prev),
                    log.commit,
                    log.start,
                    log.history.within(prev, frames[-1].end),
                    frames,
                ),
            )
        )
        copy.fly(frames[-1].end, size)
        copy.told = log.commit

    def _catch_up(self, peer: str, follower: Follower, log: Log, ready: Ready) -> None:
        """Read for a follower what it lacks, where it has room and nothing is being read."""
        copy = follower.logs[log.number]
        if copy.sent == log.end or copy.reading:
            return
        size, beside, paced = APPEND_BYTES_MAX, 0, 0
        if self._is_paced(peer):
            size, beside = COPY_BYTES_MAX, FRAME_COST_BYTES
            paced = max(0, size - copy.written)
        if copy.has_room(COPY_IN_FLIGHT_BYTES_MAX if paced else IN_FLIGHT_BYTES_MAX):
            copy.reading = True
            ready.read.append(Read(peer, follower.ask, log.number, copy.sent, log.end, size, paced, beside))

    def _is_paced(self, peer: str) -> bool:
        """Whether nobody waits for this copy: it is not in sync, and enough others are."""
        assert self.standing is not None
        return self._enough() and not any(peer in record.isr for record in self.standing.all)

    def _frames_read(self, event: FramesRead, now: int, ready: Ready) -> None:
        follower = self.followers.get(event.peer)
        if follower is None or follower.ask != event.ask or event.log not in follower.logs:
            return
        copy, log = follower.logs[event.log], self.replica.logs[event.log]
        copy.reading = False
        if event.begin != copy.sent:
            return
        if not event.frames:
            # Let go of since it was placed: it has to ask again, and will be told to copy.
            self._forget(event.peer, follower, now, ready)
            return
        size = sum(frame.size for frame in event.frames)
        copy.written = max(0, copy.written - cost_of(event.frames))
        self._append(event.peer, follower, log, copy, event.frames, size, ready)
        self._catch_up(event.peer, follower, log, ready)

    # -- commits ---------------------------------------------------------------------------------------

    def _enough(self) -> bool:
        """Whether each record that may stand has its `min` members, and nobody set aside."""
        assert self.standing is not None
        return all(len(record.isr) >= record.min and not record.elr for record in self.standing.all)

    def _held_by(self, member: str, registration: int, log: Log) -> LogPoint | None:
        """How far this member has the log durable, under the registration that is recorded (R7); None: nothing is known."""
        if member == self.replica.broker:
            return log.durable if registration == self.replica.registration else None
        follower = self.followers.get(member)
        if follower is None or follower.registration != registration:
            return None
        copy = follower.logs.get(log.number)
        return None if copy is None else copy.durable

    def _committed(self, log: Log) -> LogPoint:
        """R1: durable on every member of every record that may stand. The present commit point where that says no more."""
        assert self.standing is not None
        lowest: LogPoint | None = None
        for record in self.standing.all:
            for member, registration in record.isr.items():
                held = self._held_by(member, registration, log)
                if held is None or held <= log.commit:
                    return log.commit
                if lowest is None or held < lowest:
                    lowest = held
        return log.commit if lowest is None else lowest

    def _advance(self, ready: Ready) -> None:
        if not self.commits or not self._enough():
            return
        for log in self.replica.logs.values():
            point = self._committed(log)
            if point > log.commit:
                log.commit = point
                ready.committed.append(log.number)
        if self.phase is Phase.PREPARING and self._prepared():
            self.phase = Phase.SERVING
        for number in ready.committed:
            self._tell_commit(self.replica.logs[number], ready)

    def _prepared(self) -> bool:
        """N3: all that was held at the election is committed."""
        return all(self.replica.logs[number].commit >= end for number, end in self.held.items())

    def _tell_commit(self, log: Log, ready: Ready) -> None:
        """Tell it to those whom no frames will tell."""
        for peer, follower in self.followers.items():
            copy = follower.logs.get(log.number)
            if copy is not None and copy.sent == log.end and copy.told < log.commit:
                copy.told = log.commit
                ready.send.append(
                    Send(
                        peer,
                        Commit(
                            self.epoch,
                            self.election,
                            follower.registration,
                            follower.ask,
                            log.number,
                            log.commit,
                        ),
                    )
                )

    # -- followers -------------------------------------------------------------------------------------

    def _members(self) -> list[str]:
        """All brokers that have the shard, or are to have it, but this one."""
        assert self.standing is not None
        record = self.standing.record
        return [
            broker
            for broker in dict.fromkeys((*record.replicas, *record.target))
            if broker != self.replica.broker
        ]

    def _follower(self, peer: str, now: int) -> Follower:
        if peer not in self.followers:
            assert self.standing is not None
            in_sync = peer in self.standing.record.isr
            down_since = now if peer in self._unlinked else -1
            self.followers[peer] = Follower(
                now, mark_ms=now, heard_ms=now, joined=in_sync, down_since=down_since
            )
        return self.followers[peer]

    def _ask_to_follow(self, peer: str, ready: Ready) -> None:
        ready.send.append(Send(peer, Probe(self.epoch, self.election)))

    def _forget(self, peer: str, follower: Follower, now: int, ready: Ready) -> None:
        """Where it stands is not known any more: it is to ask again."""
        follower.logs = {}
        follower.goal = {}
        follower.probed_ms = now
        self._ask_to_follow(peer, ready)

    def _received(self, event: Received, now: int, ready: Ready) -> None:
        peer, message = event
        if isinstance(message, Follow):
            if self.phase is Phase.ELECTED:
                self._early = (*(each for each in self._early if each.peer != peer), event)
                return
            self._follow(peer, message, now, ready)
        elif isinstance(message, Durable):
            self._durable(peer, message, now, ready)

    def _follow(self, peer: str, follow: Follow, now: int, ready: Ready) -> None:
        if not self.commits or peer not in self._members():
            return
        follower = self._follower(peer, now)
        if (follow.registration, follow.ask) <= (follower.registration, follower.ask):
            return
        if follow.registration != follower.registration:
            follower.goal = {}
        follower.registration, follower.ask = follow.registration, follow.ask
        follower.logs = {}
        follower.heard_ms = now
        self._look_for_loss(peer, follower, follow, now, ready)
        follower.folder = follow.folder
        placements = []
        for place in follow.logs:
            placement = self._place(place)
            if placement is None:
                self._conflict(peer, ready)
                return
            placements.append(placement)
        if all(placement.action is Action.APPEND for placement in placements):
            follower.logs = {
                placement.log: FollowerLog(
                    # R4, F8: an end that is only told counts for nothing; it is acknowledged once it has been compared.
                    durable=LogPoint(-1),
                    sent=placement.point,
                    # That nothing is committed needs not be told.
                    told=BEGINNING,
                )
                for placement in placements
            }
        ready.send.append(
            Send(peer, Placed(self.epoch, self.election, follow.registration, follow.ask, tuple(placements)))
        )
        for number in follower.logs:
            self._catch_up(peer, follower, self.replica.logs[number], ready)

    def _conflict(self, peer: str, ready: Ready) -> None:
        """One copy with an epoch of another election is one that was damaged, or put back: it alone is not followed up. Half of the copies
        speak for it that the store went back."""
        if peer in self._conflicting:
            return
        assert self.standing is not None
        self._conflicting |= {peer}
        replicas = self.standing.record.replicas
        if 2 * len(self._conflicting.intersection(replicas)) >= len(replicas):
            self.replica.fence.freeze(
                f"{' and '.join(sorted(self._conflicting))} have epochs of other elections: the store went back"
            )
        else:
            ready.alarms.append(
                f"the copy at {peer} has an epoch of another election, and is not in sync: stop {peer}, remove the shard's folder there, "
                "and start it; the copy is built anew from the leader's"
            )

    def _place(self, place: LogPlace) -> Placement | None:
        """What a follower has to do with a log that stands there. None: it has an epoch of another election."""
        log = self.replica.logs[place.log]
        point = parting(place.starts, place.complete, place.end, log.history, log.end)
        if point is Parting.CONFLICT:
            return None
        if point is Parting.OLDER:
            return Placement(place.log, Action.OLDER, place.starts[0].start, log.start)
        assert isinstance(point, LogPoint)
        if point < log.start or point < place.start or point < log.frames_from:
            return Placement(place.log, Action.COPY, log.start, log.start)
        return Placement(place.log, Action.APPEND, point, log.start)

    def _look_for_loss(self, peer: str, follower: Follower, follow: Follow, now: int, ready: Ready) -> None:
        """R8: whoever ends below what it acknowledged in this epoch, in the same folder, has lost what it said was on its disk."""
        if self.replica.durability != "fsync" or follower.folder != follow.folder:
            follower.acknowledged = {}
            return
        for place in follow.logs:
            if place.end < follower.acknowledged.get(place.log, place.end):
                ready.alarms.append(f"{peer} has lost what it acknowledged of log {place.log}")
                follower.acknowledged = {}
                assert self.standing is not None
                follower.lost = any(peer in record.members() for record in self.standing.all)
                self._change(now, ready)
                return

    def _durable(self, peer: str, durable: Durable, now: int, ready: Ready) -> None:
        follower = self.followers.get(peer)
        if (
            not self.commits
            or follower is None
            or not self._is_of_its_last_question(follower, durable)
            or durable.log not in follower.logs
            or durable.status is Status.STALE
        ):
            return
        if durable.status is Status.FAILED:
            follower.logs = {}
            follower.caught_up_ms = now - REPLICA_LAG_MS - 1
            self._change(now, ready)
            return
        log, copy = self.replica.logs[durable.log], follower.logs[durable.log]
        follower.heard_ms = now
        copy.land(durable.point)
        follower.acknowledged[durable.log] = max(
            durable.point, follower.acknowledged.get(durable.log, durable.point)
        )
        self._mark(follower, now)
        self._catch_up(peer, follower, log, ready)
        self._advance(ready)
        if copy.told < log.commit:
            self._tell_commit(log, ready)
        self._change(now, ready)

    def _is_of_its_last_question(self, follower: Follower, durable: Durable) -> bool:
        """F7: of this epoch, this start of the broker, and the place that it was given last."""
        return (
            durable.epoch == self.epoch
            and durable.registration == follower.registration
            and durable.ask == follower.ask
        )

    def _mark(self, follower: Follower, now: int) -> None:
        """When it was caught up last: it has now all that the logs had then."""
        logs = self.replica.logs
        ends = {number: log.end for number, log in logs.items()}
        if follower.has(ends):
            follower.caught_up_ms = follower.mark_ms = now
            follower.mark = {}
        elif not follower.mark or follower.has(follower.mark):
            if follower.mark:
                follower.caught_up_ms = follower.mark_ms
            follower.mark, follower.mark_ms = ends, now

    def _linked(self, event: Linked, now: int, ready: Ready) -> None:
        if event.up:
            self._unlinked = all_but(self._unlinked, event.peer)
        else:
            self._unlinked |= {event.peer}
            self._early = tuple(each for each in self._early if each.peer != event.peer)
        if not self.commits or event.peer not in self._members():
            return
        follower = self._follower(event.peer, now)
        if event.up:
            follower.down_since = -1
            follower.heard_ms = now
            self._forget(event.peer, follower, now, ready)
        elif follower.down_since < 0:
            follower.down_since = now

    # -- the record ------------------------------------------------------------------------------------

    def _change(self, now: int, ready: Ready) -> None:
        """Send the swap that is wanted, or settle one that may have happened. One at a time."""
        standing = self.standing
        if standing is None or standing.waiting or now < self._swap_after_ms or self.phase is Phase.ELECTED:
            return
        wanted = self._wanted(standing.record, now)
        if wanted is None:
            if not standing.unsettled:
                return
            # The one read, written once more: whatever is still on its way inside the store fails then (R2).
            wanted = standing.record
        ready.swap = standing.swap(wanted)
        self._swap_after_ms = now + SWAP_RETRY_MS

    def _wanted(self, record: ShardRecord, now: int) -> ShardRecord | None:
        """The record that should stand in place of this one; None where it is well."""
        if self.phase is Phase.YIELDED:
            assert self._yield is not None
            behind = [
                member for member, number in self._left_behind.items() if record.isr.get(member) == number
            ]
            return with_yield(with_shrunk(record, behind) if behind else record, self._yield)
        lost = [
            peer for peer, follower in self.followers.items() if follower.lost and peer in record.members()
        ]
        if lost:
            return msgspec.structs.replace(
                record, isr=without(record.isr, lost), elr=without(record.elr, lost)
            )
        late = [
            member for member in record.isr if member != self.replica.broker and self._is_late(member, now)
        ]
        if late:
            return with_shrunk(record, late)
        if self._min_wanted not in (0, record.min) and self._min_wanted <= len(record.replicas):
            return with_min(record, self._min_wanted)
        for peer, follower in self.followers.items():
            if self._may_join(peer, follower, record, now):
                return with_expanded(record, peer, follower.registration)
        return None

    def _is_late(self, member: str, now: int) -> bool:
        """L6."""
        follower = self._follower(member, now)
        return now - follower.caught_up_ms > REPLICA_LAG_MS or 0 <= follower.down_since < now - LINK_DOWN_MS

    def _may_join(self, peer: str, follower: Follower, record: ShardRecord, now: int) -> bool:
        """L6, R3: in every log it has what was committed, what was held at the election, and what was written when it had these."""
        if (
            not follower.logs
            or record.isr.get(peer) == follower.registration
            or follower.lost
            or (now < follower.back_after_ms and self._enough())
            or follower.down_since >= 0
            or peer not in (*record.replicas, *record.target)
        ):
            return False
        if not follower.goal:
            if follower.has(self._least()):
                follower.goal = {number: log.end for number, log in self.replica.logs.items()}
            else:
                return False
        return follower.has(follower.goal) and follower.has(self._least())

    def _least(self) -> dict[int, LogPoint]:
        """Whoever joins has at least this."""
        return {number: max(log.commit, self.held[number]) for number, log in self.replica.logs.items()}

    def _answered(self, event: SwapAnswered, now: int, ready: Ready) -> None:
        if self.standing is None or not self.standing.answered(event):
            return
        if event.outcome is Outcome.APPLIED:
            self._swap_after_ms = now
        self._settled(now, ready)

    def _settled(self, now: int, ready: Ready) -> None:
        """What may stand has changed."""
        assert self.standing is not None
        record = self.standing.record
        if self.phase is Phase.YIELDED:
            if record.yielded is not None:
                self._depose(ready)
            return
        for peer, follower in self.followers.items():
            if peer in record.isr:
                follower.joined = True
            elif follower.joined:
                follower.joined = False
                # One that has not asked yet was not there, so that it does not come and go.
                if follower.ask:
                    follower.left += 1
                    follower.back_after_ms = now + min(
                        EXPAND_BACKOFF_MS * follower.left, EXPAND_BACKOFF_MS_MAX
                    )
            if follower.lost and not any(peer in each.members() for each in self.standing.all):
                follower.lost = False
        # Of whoever has no copy any more nothing is heard: that its link came up neither.
        named = {peer for each in self.standing.all for peer in (*each.replicas, *each.target)}
        self.followers = {peer: each for peer, each in self.followers.items() if peer in named}
        for peer in sorted(named - self.followers.keys() - {self.replica.broker}):
            # Where it was given up and is wanted again before it, or this leader, has read of the one, it takes itself for followed, and waits.
            self._ask_to_follow(peer, ready)
        self._hand_over(now, ready)
        self._advance(ready)

    # -- time ------------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: int, ready: Ready) -> None:
        if self.phase is Phase.IDLE:
            return
        if now - self._ticked_ms > REPLICA_LAG_MS // 4 + TICK_MS:
            # R23: what arrived meanwhile is not heard yet. Who is late is asked anew.
            for follower in self.followers.values():
                follower.caught_up_ms = follower.heard_ms = now
                if follower.down_since >= 0:
                    follower.down_since = now
        self._ticked_ms = now
        if any(0 <= log.syncing_since < now - HUNG_MS for log in self.replica.logs.values()):
            self._hangs(now, ready)
        if self.commits:
            if now > self.replica.lease.until_ms + DETACHED_MS:
                self._stop("unreachable", now, ready)
                return
            is_new = self._is_new(now)
            for peer, follower in self.followers.items():
                if is_new and not follower.ask:
                    follower.caught_up_ms = follower.mark_ms = now
                if self._is_caught_up(follower):
                    # It owes no answer either.
                    follower.caught_up_ms = follower.heard_ms = now
                elif follower.is_read_for():
                    follower.heard_ms = now
                elif max(follower.heard_ms, follower.probed_ms) + PROBE_MS < now and follower.down_since < 0:
                    self._forget(peer, follower, now, ready)
            if self._is_cut_off(now):
                self._stop("unreachable", now, ready)
                return
            self._look_for_others(now, ready)
        self._change(now, ready)

    def _is_new(self, now: int) -> bool:
        """Whether nothing was ever written, and copies may still be about to be opened."""
        return now - self._elected_ms < OPENING_MS and all(
            log.end == BEGINNING for log in self.replica.logs.values()
        )

    def _is_caught_up(self, follower: Follower) -> bool:
        """Whether it has acknowledged all that the logs have."""
        return bool(follower.logs) and follower.has(
            {number: log.end for number, log in self.replica.logs.items()}
        )

    def is_quiescent(self, now: int) -> bool:
        """Whether time alone gives it nothing to do before DETACHED_MS after the lease: nothing is being synced, the record is as it should be,
        and each copy has everything and is in sync, or is cut off and counts for nothing. How silent a copy is says its link, not this shard."""
        if self.phase is Phase.IDLE:
            return True
        standing = self.standing
        if self.phase is not Phase.SERVING or standing is None or standing.unsettled or not self._enough():
            return False
        if self._handing is not None:
            return False
        record = standing.record
        return (
            all(log.syncing_since < 0 for log in self.replica.logs.values())
            and self.followers.keys() >= without(record.isr, [self.replica.broker]).keys()
            and all(self._is_at_rest(peer, each, record) for peer, each in self.followers.items())
            and self._wanted(record, now) is None
        )

    def _is_at_rest(self, peer: str, follower: Follower, record: ShardRecord) -> bool:
        if peer in record.isr:
            return (
                follower.down_since < 0
                and record.isr[peer] == follower.registration
                and self._is_caught_up(follower)
            )
        return follower.down_since >= 0

    def _is_cut_off(self, now: int) -> bool:
        """Whether nothing can be committed, by whatever this leader does: its lease is over, and a copy that counts is silent."""
        assert self.standing is not None
        return now > self.replica.lease.until_ms and any(
            self._is_late(member, now - CUT_OFF_MS)
            for record in self.standing.all
            for member in record.isr
            if member != self.replica.broker
        )

    def _look_for_others(self, now: int, ready: Ready) -> None:
        """R21: below `min` while missing members live that this one does not reach: they may reach each other. Whoever is reached is waited for: its
        copy is being opened, or catches up, and no other leader would have it sooner."""
        assert self.standing is not None
        record = self.standing.record
        missing = (
            [] if len(record.isr) >= record.min else [each for each in record.elr if each in self._living]
        )
        if all(self._reaches(member, now) for member in missing):
            self._below_since = -1
            return
        if self._below_since < 0:
            self._below_since = now
        if now - self._below_since >= BELOW_MIN_MS and now - self._unreachable_ms >= UNREACHABLE_PAUSE_MS:
            self._unreachable_ms = now
            self._stop("unreachable", now, ready)

    def _reaches(self, member: str, now: int) -> bool:
        follower = self._follower(member, now)
        return follower.down_since < 0 and now - follower.heard_ms < OPENING_MS

    def _alive(self, event: Living, now: int, ready: Ready) -> None:
        self._living = event.brokers

    def _wish(self, event: MinWanted, now: int, ready: Ready) -> None:
        self._min_wanted = event.minimum
        self._change(now, ready)

    def _asked(self, event: YieldAsked, now: int, ready: Ready) -> None:
        """With nobody else eligible it stays, unless it cannot serve anyway."""
        if self.standing is None or self.phase is Phase.YIELDED:
            return
        if event.why == "hung":
            # Who has just been elected may have waited for its disk before.
            if now >= self._elected_ms + HUNG_MS:
                self._hangs(now, ready)
        elif event.why in CANNOT_SERVE:
            self._stop(event.why, now, ready)
        elif self._others_alive():
            self._give_up(event.why, now, ready)

    _handlers: ClassVar[dict[type, Callable[[Any, Any, int, Ready], None]]] = {
        RecordRead: _read,
        Begun: _begun,
        Written: _written,
        Synced: _synced,
        FramesRead: _frames_read,
        Trimmed: _trimmed,
        DiskFailed: _disk_failed,
        Received: _received,
        Linked: _linked,
        SwapAnswered: _answered,
        Living: _alive,
        MinWanted: _wish,
        YieldAsked: _asked,
        Tick: _tick,
    }
