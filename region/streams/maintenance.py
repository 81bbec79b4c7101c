"""What is done to streams from time to time: retention, compaction, and copies of segments to a store elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Final

from felix.errors import Code, FelixError, RequestError
from felix.tasks import end_tasks
from region.log.directory import LogDirectory
from region.log.store_calls import store_of
from region.metadata.records import StreamConfig
from region.streams.hosted import HostedStream
from region.streams.index import StreamIndex
from region.streams.offload import check_offload
from region.streams.work_lists import WorkLists

log = logging.getLogger("felix.region.streams")

TENDED_AT_ONCE: Final = 250
"""Streams that are looked at in one go for what hardly ever is to be done, so that idle ones cost a broker the same however many there are:
a segment without a retention that has grown old, producers that were silent for a week, objects of a stream that is no longer offloaded."""


OFFLOAD_WAIT_S: Final = 1.0
"""A pass waits so long for what it began: a turn with one store may take hours, and the others have theirs meanwhile."""


class StreamMaintenance:
    """Of the streams in `index`. A pass visits those whose settings ask for it, and the next ones of all the others in turn."""

    def __init__(self, directory: LogDirectory, index: StreamIndex) -> None:
        self._directory, self._index = directory, index
        self._work: WorkLists[HostedStream] = WorkLists()
        # The streams that each round-robin pass processed last.
        self._swept: list[HostedStream] = []
        self._offloaded: list[HostedStream] = []
        # By store: the turn that is under way there.
        self._offloading: dict[str, asyncio.Task[None]] = {}
        self.offload_refused = 0
        """Offload runs that the configuration does not allow."""

    def place(self, stream: HostedStream, config: StreamConfig) -> None:
        """The stream came, or its settings are these from now on."""
        self._work.place(stream, config)

    def remove(self, stream: HostedStream) -> None:
        """The stream went."""
        self._work.remove(stream)

    def retaining(self) -> Iterator[HostedStream]:
        """The streams whose retention waits for what was acknowledged."""
        return iter(list(self._work.acked))

    async def sweep(self, now_ms: int) -> None:
        """Apply every retention; of streams without retention by time or size, process the next ones in round-robin order."""
        self._swept = self._index.turn(self._swept, TENDED_AT_ONCE)
        for stream in {**self._work.expiring, **dict.fromkeys(self._swept)}:
            for shard in stream.serving:
                try:
                    await shard.sweep(now_ms)
                except FelixError as error:
                    log.error("retention of %s: %s", stream.name, error)

    async def compact(self, now_ms: int) -> None:
        """Compact the shards that are due, one after the other."""
        for stream in list(self._work.compacted):
            for shard in stream.serving:
                if stream.deleted or shard.has_copies or not shard.compaction_due(now_ms):
                    # Of several copies each is compacted by itself, led or not (region.copies.replicas).
                    continue
                try:
                    report = await self._directory.compact(shard, now_ms)
                except FelixError as error:
                    if error.code is not Code.SHUTTING_DOWN:
                        log.error("compaction of %s shard %d: %s", stream.name, shard.identity.shard, error)
                    continue
                if report is not None:
                    log.info("%s shard %d was compacted: %s", stream.name, shard.identity.shard, report)

    async def offload(self, now_ms: int, allowed: tuple[str, ...]) -> None:
        """Offload the shards that are due, those of one store one after the other. What takes long goes on beside the passes
        that follow. `allowed`: what the region's configuration allows."""
        self._offloaded = self._index.turn(self._offloaded, TENDED_AT_ONCE)
        by_store: dict[str, list[HostedStream]] = {}
        # Of one that is no longer offloaded, objects may be left to delete.
        for stream in {**self._work.offloaded, **dict.fromkeys(self._offloaded)}:
            wanted = stream.record.config.views.offload
            by_store.setdefault(store_of(wanted.url) if wanted else "", []).append(stream)
        # A store that hangs, or is slow, holds up its own streams alone.
        for place, streams in by_store.items():
            if place not in self._offloading:
                self._offloading[place] = asyncio.ensure_future(self._offload(streams, now_ms, allowed))
        if self._offloading:
            await asyncio.wait(self._offloading.values(), timeout=OFFLOAD_WAIT_S)
        ended = {place: task for place, task in self._offloading.items() if task.done()}
        for place in ended:
            del self._offloading[place]
        for task in ended.values():
            task.result()

    async def close(self) -> None:
        """End what is under way."""
        await end_tasks(*self._offloading.values())

    async def _offload(self, streams: Iterable[HostedStream], now_ms: int, allowed: tuple[str, ...]) -> None:
        for stream in streams:
            wanted = stream.record.config.views.offload
            for shard in stream.serving:
                if stream.deleted or not shard.offload_due(now_ms):
                    continue
                url = wanted.url if wanted else ""
                try:
                    if wanted is not None:
                        await asyncio.to_thread(check_offload, url, allowed)
                except RequestError as error:
                    # It was allowed once; what is there may still be read, and deleted.
                    log.error("offload of %s shard %d: %s", stream.name, shard.identity.shard, error)
                    self.offload_refused += 1
                    shard.offload_later(now_ms)
                    url = ""
                try:
                    await self._directory.offload(shard, now_ms, url)
                except FelixError as error:
                    if error.code is not Code.SHUTTING_DOWN:
                        log.error("offload of %s shard %d: %s", stream.name, shard.identity.shard, error)
