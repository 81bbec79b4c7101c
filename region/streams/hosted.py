"""One incarnation of a stream as this broker has it: its shards that are open here, and what is answered for the others."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import msgspec

from felix.errors import Code, CorruptionError, FelixError, NotLeaderError, RequestError, UnavailableError
from felix.messages import ShardState, StreamState, StreamTraffic
from felix.names import StreamName
from felix.settings import Views
from region.log.copies import Copies
from region.log.errors import REOPENED_MS, StorageFailedError
from region.log.left import Left
from region.log.shard import ShardLog
from region.metadata.records import Stream, is_replicated, min_in_sync, rests_on_commits
from region.streams.settings import shard_settings

FULL_AGAIN_MS: Final = 1_000
"""Whoever asked for what found no room on the disk, or for a shard that had none to be opened, asks again after this."""
ELSEWHERE_RETRY_MS: Final = 100
"""A client that asked the wrong broker retries after this: the shard may be on its way here."""


class Altering(Protocol):
    """A view of a stream whose settings may be altered while it serves."""

    def prepare(self, views: Views) -> None:
        """These are about to be written; `altered` follows, written or not. Raises FelixError where they cannot be served."""

    def altered(self) -> None:
        """Go by the settings in the stream's record from now on."""


class Leading(Protocol):
    """Which streams this broker leads, where it is one of several (region.clustered)."""

    def epochs(self, record: Stream) -> dict[int, int]:
        """The epoch of each shard of a stream that this broker leads; empty where another one does, or nobody yet."""

    def leader_of(self, record: Stream, shard: int) -> str:
        """The broker that leads a shard; empty while none does."""

    def members(self, record: Stream, shard: int) -> tuple[list[str], list[str]]:
        """The brokers that have copies of a shard, and those of them that are in sync."""

    def unclean(self, record: Stream, shard: int) -> int:
        """The last epoch of a shard whose leader may have lacked what was acknowledged; 0: none."""

    def copies(self, record: Stream, number: int) -> Copies | None:
        """What a shard's log, or the companion of this number, is led by here that has other copies; None for a stream of one. Raises
        UnavailableError where it is not led here."""

    async def forget(self, incarnation: str) -> None:
        """A stream was deleted: its folder is about to go."""

    def not_leader(self, record: Stream, shard: int) -> NotLeaderError:
        """What is answered for a shard that is not served here."""


class LackingError(UnavailableError):
    """A log has lost what was acknowledged: it stays stopped until a restart."""

    default_code = Code.SHARD_STOPPED


def _passes(why: FelixError) -> bool:
    """Whether what keeps a shard from being opened passes, and nothing is wrong with its log: no room on the disk, too many open files, a read that the disk did not answer, a key service
    that does not. An error of the disk is for `StreamTable.reopener`."""
    return isinstance(why, UnavailableError) and not isinstance(
        why, (StorageFailedError, LackingError, NotLeaderError)
    )


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
        "refused",
        "removed",
        "replicas",
        "ring_taken",
        "stored_bytes",
        "takes_dead_letters",
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
        self.takes_dead_letters = False
        """Whether dead letters came since this broker serves it: they wait for a person, and not for workers."""
        self.is_settling = False
        """Whether what must be in its shards first is being put there: nobody else finds them yet."""
        self.left: dict[int, Left] = {}
        """Of logs that were closed and not opened since, shards and companions: what has to be in them."""
        self.tried = -1
        """The log that is being opened to see whether it can be; -1: none."""
        self.companions: list[int] = []
        """Numbers of the companion logs that are open (StreamTable.open_companion)."""
        self.refused: dict[int, CorruptionError] = {}
        """Companion logs that could not be opened when they were asked for last, since they are damaged or gone."""
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
            number
            for number, each in self.replicas.items()
            if isinstance(why_stopped(each), StorageFailedError)
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
        unclean = self._leading.unclean(self.record, number)
        return msgspec.structs.replace(
            state, leader=leader, replicas=replicas, in_sync=in_sync, unclean=unclean
        )

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
        store_only_bytes=shard.store_only_bytes,
    )


def why_stopped(replica: Replica | None) -> FelixError | None:
    """Why a log does not serve; None where it does, or is not open."""
    return replica.failure if isinstance(replica, ShardLog) else replica
