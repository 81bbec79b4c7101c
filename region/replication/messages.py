"""What brokers say to each other about one shard. Values; their bytes are those of `wire`.

A follower asks (`Follow`), numbered; its leader answers exactly that question (`Placed`), and all that follows carries its number, so
that what was meant for an earlier place is told apart (F7).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from region.log.point import LogPoint
from region.replication.history import EpochStart


class Frame(NamedTuple):
    """An entry of a log, the same on every copy. `end`: the point behind it; `body` is what `DiskLog.write_frames` takes, never looked at."""

    epoch: int
    end: LogPoint
    size: int
    body: object


class LogPlace(NamedTuple):
    """Where a follower's log stands, all of it on its disk (F8). `complete`: it knows of no epochs older than `starts`."""

    log: int
    start: LogPoint
    end: LogPoint
    starts: tuple[EpochStart, ...]
    complete: bool


class Follow(NamedTuple):
    """A follower's question. `ask` counts its questions; `folder` tells whether its disk is still the one that acknowledged."""

    epoch: int
    election: str
    registration: int
    folder: str
    ask: int
    logs: tuple[LogPlace, ...]


class Action(Enum):
    """What a follower has to do with a log."""

    APPEND = "append"
    """cut at the point, if it ends behind it, and take what comes"""
    COPY = "copy"
    """what comes next was let go of, or is not there as frames: copy segments"""
    OLDER = "older"
    """tell epochs older than the ones told"""


class Placement(NamedTuple):
    """The leader's answer for one log. `start`: where its own begins."""

    log: int
    action: Action
    point: LogPoint
    start: LogPoint


class Placed(NamedTuple):
    """The leader's answer to question `ask` of a follower's `registration`."""

    epoch: int
    election: str
    registration: int
    ask: int
    logs: tuple[Placement, ...]


class Probe(NamedTuple):
    """A leader that does not know where its follower stands: ask."""

    epoch: int
    election: str


class Append(NamedTuple):
    """Frames of one log, from `prev` on, before which stands something of `prev_epoch`. `starts`: epochs that begin with them.
    `commit`: the leader's commit point. `start`: where its log begins."""

    epoch: int
    election: str
    registration: int
    ask: int
    log: int
    prev: LogPoint
    prev_epoch: int
    commit: LogPoint
    start: LogPoint
    starts: tuple[EpochStart, ...]
    frames: tuple[Frame, ...]


class Commit(NamedTuple):
    """The leader's commit point, where no frames go that would carry it."""

    epoch: int
    election: str
    registration: int
    ask: int
    log: int
    commit: LogPoint


class Status(Enum):
    """How a follower fared."""

    OK = "ok"
    STALE = "it knows a newer epoch"
    FAILED = "its disk failed"


class Durable(NamedTuple):
    """The follower has the log up to `point` on its disk, equal to the leader's of `epoch`. STALE: `epoch` is the newest it knows."""

    epoch: int
    election: str
    registration: int
    ask: int
    log: int
    point: LogPoint
    status: Status = Status.OK


FromLeader = Placed | Probe | Append | Commit
FromFollower = Follow | Durable
Message = FromLeader | FromFollower
