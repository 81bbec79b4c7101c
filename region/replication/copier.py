"""Both sides of a log's copy (COPY), for one replica: as a follower it asks the leader and gives the log's worker what comes; as the leader it
answers. Event loop only.

What is asked for next, and which answer counts, says `copying`.

Invariants:
- of a log that the core wants copied one copy is under way, until the worker is told to begin the log anew or the core that it failed;
- what a store alone has is named by a list of that leader's own epoch, or the log is not begun: a list of before may name what an unclean election gave up;
- who leads answers for that epoch and election alone, and reads a piece only once the link to the follower has room for it, at the pace of copies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Final, Protocol

from felix.errors import FelixError
from region.cluster.records import ShardId
from region.log.errors import NotLocalError
from region.log.offload import ListPointer
from region.log.point import LogPoint
from region.log.segment_state import SegmentState
from region.log.shared_offload import SharedLists
from region.replication.copy_pace import CopyPace
from region.replication.copying import Copying, Replace
from region.replication.core import ReplicaCore
from region.replication.disk import ReplicaDisk
from region.replication.log_worker import Collected, LogWorker
from region.replication.origin import Beginning, encode_beginning
from region.replication.ready import CopyFailed, CopyFrom
from region.replication.wire import (
    ORIGIN_BYTES_MAX,
    OriginAsked,
    OriginTold,
    PieceAsked,
    PieceTold,
    Told,
)  # fmt: skip

log = logging.getLogger("felix.region.replication")

PIECE_BYTES_MAX: Final = 256 << 10
"""Of a closed segment, in one answer: the next is asked for once it is there, so that smaller ones would be as slow as the way is long."""


class Links(Protocol):
    """What copies need of `links.PeerLinks`."""

    def send(self, peer: str, shard: ShardId, message: Told) -> None: ...

    async def room(self, peer: str) -> None: ...


class Copier:
    """See the module."""

    def __init__(
        self,
        shard: ShardId,
        core: ReplicaCore,
        workers: Mapping[int, LogWorker],
        links: Links,
        read_pool: Executor,
        list_pool: Executor,
        pace: CopyPace,
        *,
        leads: Callable[[], bool],
        producers: Callable[[int], bytes],
        failed: Callable[[CopyFailed], None],
        fetch: Callable[[int, SegmentState], Awaitable[None]],
        offloaded: Callable[[], ListPointer | None],
        lists: Callable[[], SharedLists],
        begin_task: Callable[[Awaitable[None]], None],
    ) -> None:
        """`leads`: whether this replica commits as leader. `producers`: what is known of those of a log, as it stands in its folder. `failed`
        tells the core. `fetch` brings a segment of a log that is led here back from its store. `offloaded`: the list in force; `lists` reads it. `begin_task` has work
        done beside."""
        self._shard = shard
        self._core = core
        self._workers = workers
        self._links = links
        self._read_pool = read_pool
        self._list_pool = list_pool
        self._pace = pace
        self._leads = leads
        self._producers = producers
        self._failed = failed
        self._fetch = fetch
        self._offloaded = offloaded
        self._lists = lists
        self._begin_task = begin_task
        self._under_way: dict[int, Copying] = {}

    # As a follower

    def begin(self, copy: CopyFrom, now: int) -> None:
        """Ask the leader where its log begins, at `now` (ms)."""
        fence, replica = self._core.replica.fence, self._core.replica
        asked = OriginAsked(
            fence.epoch, fence.election, replica.registration, self._core.follower.ask, copy.log
        )
        self._under_way[copy.log] = Copying(copy.peer, asked, now)
        self._links.send(copy.peer, self._shard, asked)

    def take(self, peer: str, told: OriginTold | PieceTold) -> None:
        """A leader's answer; nothing happens where it is to no question that stands."""
        asked, replica = told.asked, self._core.replica
        copying, fence = self._under_way.get(asked.log), replica.fence
        if (
            copying is None
            or not copying.awaits(peer, told)
            or (asked.epoch, asked.election) != (fence.epoch, fence.election)
        ):
            return
        job = None
        try:
            job = copying.take(told, self._core.follower.must_keep(replica.logs[asked.log]))
        except FelixError as error:
            log.error("broker %s says where a log begins so that it cannot be read: %s", peer, error)
        if job is None:
            self.fail(asked.log)
            return
        if isinstance(job, Replace):
            if job.beginning.start is not None:
                self._begin_task(self._replace_listed(asked.log, copying, job.beginning, job.beginning.start))
                return
            del self._under_way[asked.log]
        self._workers[asked.log].put(job)

    async def _replace_listed(
        self, number: int, copying: Copying, beginning: Beginning, start: LogPoint
    ) -> None:
        """Begin the log behind what the list in force says is in the store. Where that does not reach, it is asked again, as by then it may."""
        pointer, listed = self._offloaded(), None
        if pointer is not None and pointer.epoch == copying.epoch:
            try:
                listed = await asyncio.get_running_loop().run_in_executor(
                    self._list_pool,
                    lambda: self._lists().read(pointer).between(start, beginning.origin.point.offset),
                )
            except (FelixError, OSError) as error:
                log.warning("shard %s: what is in the store cannot be read: %s", self._shard, error)
        if self._under_way.get(number) is not copying:
            return
        if listed is None:
            self.fail(number)
            return
        del self._under_way[number]
        self._workers[number].put(Replace(beginning, listed))

    def go_on(self, collected: Collected, now: int) -> None:
        """The disk has what came: ask for the next bytes, or begin the log anew once all have come."""
        number = collected.log
        copying = self._under_way.get(number)
        wanted = None if copying is None else copying.go_on(collected.job, now)
        if copying is None or wanted is None:
            return
        if isinstance(wanted, Replace):
            del self._under_way[number]
            self._workers[number].put(wanted)
        else:
            self._links.send(copying.leader, self._shard, wanted)

    def fail(self, number: int) -> None:
        """The log cannot be begun so, or not now."""
        self._under_way.pop(number, None)
        self._failed(CopyFailed(number))

    def fail_late(self, now: int) -> None:
        """Give up what a leader has left without an answer."""
        for number, copying in list(self._under_way.items()):
            if copying.is_late(now):
                self.fail(number)

    # As the leader

    def _is_led(self, asked: OriginAsked | PieceAsked) -> bool:
        leader = self._core.leader
        return (
            asked.log in self._workers
            and self._leads()
            and (asked.epoch, asked.election) == (leader.epoch, leader.election)
        )

    async def tell_origin(self, peer: str, asked: OriginAsked) -> None:
        """Where the log begins; an empty answer where it cannot be begun at `peer` as it is."""
        if not self._is_led(asked):
            return
        disk, payload = self._workers[asked.log].disk, b""
        try:
            payload = encode_beginning(await self._beginning(asked.log, disk))
        except (FelixError, OSError) as error:
            log.warning("log %s cannot be begun at %s as it is: %s", disk.plan.folder, peer, error)
        if len(payload) > ORIGIN_BYTES_MAX:
            log.error(
                "what log %s begins with has %d bytes, and is not copied", disk.plan.folder, len(payload)
            )
            payload = b""
        self._links.send(peer, self._shard, OriginTold(asked, payload))

    async def _beginning(self, number: int, disk: ReplicaDisk) -> Beginning:
        tell = partial(disk.told_beginning, self._producers(number))
        return await asyncio.get_running_loop().run_in_executor(self._read_pool, tell)

    async def tell_piece(self, peer: str, asked: PieceAsked) -> None:
        """Bytes of a closed segment, once the link has room for them and it is their turn."""
        await self._links.room(peer)
        await self._pace.take(PIECE_BYTES_MAX)
        if not self._is_led(asked):
            return
        disk, data = self._workers[asked.log].disk, b""
        read = partial(disk.read_piece, asked.base_offset, asked.generation, asked.position, PIECE_BYTES_MAX)
        try:
            try:
                data = await asyncio.get_running_loop().run_in_executor(self._read_pool, read)
            except NotLocalError as error:
                # A log that was compacted once, and is offloaded now.
                await self._fetch(asked.log, error.segment)
                data = await asyncio.get_running_loop().run_in_executor(self._read_pool, read)
        except (OSError, FelixError) as error:
            log.warning("a segment of log %s cannot be copied: %s", disk.plan.folder, error)
        self._pace.give_back(PIECE_BYTES_MAX - len(data))
        self._links.send(peer, self._shard, PieceTold(asked, data))
