"""What a step of a replication core asks for, and the events that a step is about. Values.

The order of `Ready`'s fields is the contract: cuts and epochs are on the disk before anything else happens; frames are given to the file
before they are sent on, and sent on before they are synced (L2, D4). What rests on a sync is sent by the step that hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from region.cluster.records import ShardRecord, YieldReason
from region.log.point import LogPoint
from region.replication.history import EpochStart, History
from region.replication.messages import Frame, Message


class Truncate(NamedTuple):
    """Cut the log at `point`, and have that on the disk with the next sync. Where it ends there already, epochs that began there go."""

    log: int
    point: LogPoint


class Lost(NamedTuple):
    """Records of a leader before, from `begin` to before `end`, that its successor does not have. They are cut: nothing committed is among
    them, unless they are `given_up` (the record says that a leader was elected that may have lacked what was committed); with `acks: leader`, what was
    acknowledged may be (`told_early`)."""

    log: int
    begin: int
    end: int
    given_up: bool = False
    told_early: bool = False


class Begin(NamedTuple):
    """Have all that the log holds, and then that this epoch begins, on the disk; answer with `Begun` for all logs at once (N1)."""

    log: int
    start: EpochStart


class Write(NamedTuple):
    """Give frames to the file; `starts`: epochs that begin with them."""

    log: int
    prev: LogPoint
    frames: tuple[Frame, ...]
    starts: tuple[EpochStart, ...]


class Send(NamedTuple):
    """To another broker; it may be lost."""

    peer: str
    message: Message


class Sync(NamedTuple):
    """Answer with `Synced`, with the same `cuts`."""

    log: int
    cuts: int


class Read(NamedTuple):
    """Read at most `size` bytes of frames, one frame at least; answer with `FramesRead`. Each counts `beside` bytes more than it has. `paced`: so many
    of them wait for the pace of copies."""

    peer: str
    ask: int
    log: int
    begin: LogPoint
    end: LogPoint
    size: int
    paced: int = 0
    beside: int = 0


class CopyFrom(NamedTuple):
    """Copy the log's segments from this broker, aside, sync and put them in place; answer with `Copied`."""

    peer: str
    log: int


class Keep(NamedTuple):
    """Keep the commit point in the folder."""

    log: int
    point: LogPoint


class Trim(NamedTuple):
    """Let go of what stands before `point`."""

    log: int
    point: LogPoint


class Swap(NamedTuple):
    """Put `record` in place of `before`, which was last changed at `revision`, if it still stands; answer with `SwapAnswered` for the same `attempt`."""

    attempt: int
    revision: int
    before: ShardRecord
    record: ShardRecord


@dataclass(slots=True)
class Ready:
    """What is to be done, in this order."""

    truncate: list[Truncate] = field(default_factory=list)
    begin: list[Begin] = field(default_factory=list)
    write: list[Write] = field(default_factory=list)
    send: list[Send] = field(default_factory=list)
    sync: list[Sync] = field(default_factory=list)
    copy: list[CopyFrom] = field(default_factory=list)
    read: list[Read] = field(default_factory=list)
    keep: list[Keep] = field(default_factory=list)
    trim: list[Trim] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    """logs whose commit point rose: wake their readers, answer their appends"""
    swap: Swap | None = None
    deposed: bool = False
    """it leads no longer: what waits for a commit is answered "outcome unknown" (L5)"""
    lost: list[Lost] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)


# -- events --------------------------------------------------------------------------------------------


class RecordRead(NamedTuple):
    """The shard's record as it stood in the store at revision `as_of`, last changed at `revision`."""

    record: ShardRecord
    revision: int
    as_of: int


class Begun(NamedTuple):
    """Every log is synced, and this epoch's beginning stands in its history on the disk."""

    epoch: int


class Written(NamedTuple):
    """The leader's own appends are in the file."""

    log: int
    prev: LogPoint
    frames: tuple[Frame, ...]


class Synced(NamedTuple):
    """A sync has returned: all up to `point` is on the disk."""

    log: int
    point: LogPoint
    cuts: int


class FramesRead(NamedTuple):
    """Frames from `begin` on, for a follower. Empty: they are not there (any more)."""

    peer: str
    ask: int
    log: int
    begin: LogPoint
    frames: tuple[Frame, ...]


class Copied(NamedTuple):
    """A log was replaced by a copy, all of it on the disk, or, before `commit`, in a store."""

    log: int
    start: LogPoint
    end: LogPoint
    history: History
    commit: LogPoint = LogPoint(0)


class FilesSeen(NamedTuple):
    """What compaction and a store have left of a log's files: `Log` says what the points are."""

    log: int
    frames_from: LogPoint
    fixed_to: LogPoint


class CopyFailed(NamedTuple):
    """A copy did not come about; the log is as it was."""

    log: int


class CopyWanted(NamedTuple):
    """The log here is damaged, and cannot be repaired but by a copy of the leader's."""

    log: int


class Trimmed(NamedTuple):
    """The leader let go of what stood before `point`, at most its commit point."""

    log: int
    point: LogPoint


class DiskFailed(NamedTuple):
    """A write or a sync failed; nothing is known of what it was to make durable. `why`: failed or corrupt."""

    log: int
    why: YieldReason = "failed"


class Received(NamedTuple):
    """From another broker."""

    peer: str
    message: Message


class Linked(NamedTuple):
    """The link to another broker is up, or down."""

    peer: str
    up: bool


class Outcome(Enum):
    """What came of a swap."""

    APPLIED = "applied"
    REFUSED = "refused"
    """it was not applied and never will be"""
    UNKNOWN = "unknown"


class SwapAnswered(NamedTuple):
    """`revision`: the one that an applied swap made."""

    attempt: int
    outcome: Outcome
    revision: int = 0


class Living(NamedTuple):
    """Brokers that are alive in the store, with their registrations. All copies of a broker may be told with the same mapping: nobody changes it."""

    brokers: Mapping[str, int]


class MinWanted(NamedTuple):
    """The catalog asks for this `min`; the leader carries it into the record (R9)."""

    minimum: int


class YieldAsked(NamedTuple):
    """A drain, a clock that is off, or damage that was found."""

    why: YieldReason


class Leaving(NamedTuple):
    """The broker is about to stop: whoever leads is not to wait for its acknowledgements any more."""


class Tick(NamedTuple):
    """Time has passed. Every TICK_MS, or less often where the process could not; none before `ReplicaCore.rests_until_ms`."""


Event = (
    RecordRead | Begun | Written | Synced | FramesRead | Copied | CopyFailed | CopyWanted | FilesSeen | Trimmed | DiskFailed | Received
    | Linked | SwapAnswered | Living | MinWanted | YieldAsked | Leaving | Tick
)  # fmt: skip
