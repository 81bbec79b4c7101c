"""A leader or follower core of one shard with one or two logs, and what it is told, for traces written by hand."""

from __future__ import annotations

from typing import Any

from region.cluster.records import ShardRecord
from region.log.point import LogPoint
from region.replication.core import ReplicaCore
from region.replication.history import BEGINNING, EpochStart, History
from region.replication.messages import (
    Action,
    Append,
    Commit,
    Durable,
    Follow,
    Frame,
    LogPlace,
    Message,
    Placed,
    Placement,
)  # fmt: skip
from region.replication.ready import (
    Begun,
    Ready,
    Received,
    RecordRead,
    Swap,
    Synced,
    Tick,
    Written,
)  # fmt: skip
from region.replication.replica import Log, Replica

FOLDER = "f" * 32


def election(epoch: int) -> str:
    return f"{epoch:016x}"


def record(
    epoch: int = 1, leader: str = "a", isr: str = "a1 b1 c1", elr: str = "", minimum: int = 2, **more: Any
) -> ShardRecord:
    """`isr` and `elr` as broker and registration: "a1 b5"."""
    replicas = more.pop("replicas", ("a", "b", "c"))
    return ShardRecord(
        stream="acme/test/orders", epoch=epoch, election=more.pop("election", election(epoch)), leader=leader, replicas=replicas,
        isr=members(isr), elr=members(elr), min=minimum, **more,
    )  # fmt: skip


def members(told: str) -> dict[str, int]:
    return {each[0]: int(each[1:]) for each in told.split()}


def frames(epoch: int, begin: int, number: int = 1, size: int = 10) -> tuple[Frame, ...]:
    return tuple(Frame(epoch, LogPoint(begin + at + 1), size, (epoch, begin + at)) for at in range(number))


class Shard:
    """One core, at a time that the test moves."""

    def __init__(
        self,
        broker: str,
        registration: int = 1,
        *,
        logs: int = 1,
        starts: tuple[tuple[int, int], ...] = (),
        end: int = 0,
        **more: Any,
    ) -> None:
        """`starts`: epochs with the offsets at which they begin in each log, which ends at `end`."""
        self.now = 1_000
        history = [EpochStart(epoch, election(epoch), LogPoint(at)) for epoch, at in starts]
        self.replica = Replica(
            broker, registration, FOLDER, more.pop("registered_at", 0), "fsync",
            {number: Log(number, History(history), end=LogPoint(end), commit=LogPoint(more.get("commit", 0))) for number in range(logs)},
        )  # fmt: skip
        self.core = ReplicaCore(self.replica)
        self.leader, self.follower = self.core.leader, self.core.follower
        self.revision = 10
        self.replica.lease.until_ms = 10_000_000

    @property
    def log(self) -> Log:
        return self.replica.logs[0]

    def tell(self, event: object) -> Ready:
        return self.core.step(event, self.now)

    def read(self, record: ShardRecord, revision: int = 0) -> Ready:
        self.revision = revision or self.revision + 1
        return self.tell(RecordRead(record, self.revision, self.revision))

    def lead(self, told: ShardRecord) -> Ready:
        """The record, and the epoch's beginning on the disk."""
        assert self.read(told).begin
        return self.tell(Begun(told.epoch))

    def hear(self, peer: str, message: Message) -> Ready:
        return self.tell(Received(peer, message))

    def sync(self) -> Ready:
        """All logs; what the last one answers."""
        ready = Ready()
        for log in self.replica.logs.values():
            ready = self.tell(Synced(log.number, log.end, log.cuts))
        return ready

    def write(self, number: int = 1, log: int = 0) -> Ready:
        prev = self.replica.logs[log].end
        return self.tell(Written(log, prev, frames(self.leader.epoch, prev.offset, number)))

    def tick(self, ms: int = 100) -> Ready:
        self.now += ms
        return self.tell(Tick())

    def wait(self, ms: int) -> list[Ready]:
        return [self.tick() for _ in range(ms // 100)]

    def place(
        self,
        peer: str,
        end: int = 0,
        *,
        registration: int = 1,
        ask: int = 1,
        epoch: int = 0,
        starts: tuple[tuple[int, int], ...] = (),
        folder: str = FOLDER,
    ) -> Ready:
        """A follower asks, with all its logs at `end`."""
        history = tuple(EpochStart(each, election(each), LogPoint(at)) for each, at in starts)
        return self.hear(
            peer,
            Follow(
                epoch, election(epoch) if epoch else "", registration, folder, ask,
                tuple(LogPlace(log, BEGINNING, LogPoint(end), history, True) for log in self.replica.logs),
            ),
        )  # fmt: skip

    def ack(
        self, peer: str, end: int, *, registration: int = 1, ask: int = 1, epoch: int = 0, log: int = 0
    ) -> Ready:
        epoch = epoch or self.leader.epoch
        return self.hear(peer, Durable(epoch, election(epoch), registration, ask, log, LogPoint(end)))

    def commit(self, log: int = 0) -> int:
        return self.replica.logs[log].commit.offset


def sent(ready: Ready, kind: type) -> list[Any]:
    return [each.message for each in ready.send if isinstance(each.message, kind)]


def swaps(readies: list[Ready]) -> list[Swap]:
    return [ready.swap for ready in readies if ready.swap is not None]


def placed(
    epoch: int, point: int, *, ask: int, registration: int = 1, action: Action = Action.APPEND
) -> Placed:
    return Placed(
        epoch, election(epoch), registration, ask, (Placement(0, action, LogPoint(point), BEGINNING),)
    )


def append(
    epoch: int,
    prev: int,
    prev_epoch: int,
    number: int = 1,
    *,
    ask: int,
    commit: int = 0,
    registration: int = 1,
    start: int = 0,
) -> Append:
    begun = (EpochStart(epoch, election(epoch), LogPoint(prev)),) if prev_epoch != epoch else ()
    return Append(
        epoch, election(epoch), registration, ask, 0, LogPoint(prev), prev_epoch, LogPoint(commit), LogPoint(start), begun,
        frames(epoch, prev, number),
    )  # fmt: skip


def commit(epoch: int, point: int, *, ask: int) -> Commit:
    return Commit(epoch, election(epoch), 1, ask, 0, LogPoint(point))
