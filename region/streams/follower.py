"""The follower of the catalog's streams: it opens those that came and closes those that went, also when another broker wrote it.

Invariant: a stream that could not be opened, or be removed from the disk, is tried again with the next change, which may be what makes room, and every RETRY_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from felix.errors import FelixError, RequestError
from felix.names import StreamName
from region.at_once import at_once
from region.metadata.mirror import CatalogMirror, MirrorChange
from region.streams.hosted import HostedStream
from region.streams.table import StreamTable

log = logging.getLogger("felix.region.stream_follower")

REASSIGNED_AT_ONCE: Final = 16
"""Streams: where a broker is gone, another one leads hundreds of shards from one moment to the next, and each waits for a few syncs."""
RETRY_S: Final = 10.0
"""What kept a stream from being opened may pass by itself: a key service that did not answer, too many open files."""


class StreamFollower:
    """One per broker. It notes what changes from the moment that it is made; `run` acts on it."""

    def __init__(
        self, streams: StreamTable, mirror: CatalogMirror, deleted: Callable[[StreamName], None]
    ) -> None:
        """`deleted` is told of each stream that was."""
        self._streams = streams
        self._deleted = deleted
        self._mirror = mirror
        # Names and incarnations of changed catalog records that were not processed yet.
        self._wanted: set[StreamName] = set()
        self._gone: set[str] = set()
        self._assigned: set[StreamName] = set()
        self._changed = asyncio.Event()
        mirror.on_change(self._note)
        # Also one that was open before, and could not be opened again as a whole.
        streams.on_change(self.opened)

    def retry(self, name: StreamName) -> None:
        """A stream that could not be opened: try again later."""
        self._wanted.add(name)

    def opened(self, stream: HostedStream) -> None:
        """A stream was opened: what could not be for a reason that passes is tried again later."""
        if stream.unopened and not stream.deleted:
            self.retry(stream.name)

    def assigned(self, name: str) -> None:
        """A stream's leader may be another one."""
        self._assigned.add(StreamName.parse(name))
        self._changed.set()

    def look(self) -> None:
        """What kept a stream from being opened may have passed."""
        self._changed.set()

    def _note(self, change: MirrorChange) -> None:
        if change.section == "streams":
            self._wanted.add(StreamName.parse(change.name))
        elif change.section == "deleted":
            self._gone.add(change.name)
        else:
            return
        self._changed.set()

    async def run(self) -> None:
        """Follow, for ever."""
        while True:
            with suppress(TimeoutError):
                # Also where nothing waits yet: what is to be tried again may come without a change.
                async with asyncio.timeout(RETRY_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._follow_once()
            except Exception:
                # A mistake of ours: what changes next is followed all the same.
                log.exception("the catalog's streams could not be followed")

    async def _follow_once(self) -> None:
        """The streams that changed since, and those that could not be opened, or removed, then."""
        await self._streams.remove_left()
        while self._gone:
            deleted = self._mirror.deleted_streams.get(self._gone.pop())
            if deleted is None:
                continue
            name = StreamName.parse(deleted.name)
            held = self._streams.get(name)
            if held is not None and held.record.incarnation == deleted.incarnation:
                await self._streams.remove(held.name, deleted.incarnation)
            self._deleted(name)
        for name in sorted(self._wanted):
            self._wanted.discard(name)
            record = self._mirror.streams.get(name)
            if record is None:
                continue
            try:
                self.opened(await self._streams.open(record))
                # What is led here and could not be served is tried again below, and later.
                self._assigned.add(name)
            except RequestError as error:
                log.info("stream %s: %s", record.name, error)
            except FelixError as error:
                log.error("stream %s cannot be opened: %s", record.name, error)
                self._wanted.add(name)
        assigned, self._assigned = self._assigned, set()
        await at_once(REASSIGNED_AT_ONCE, self._reassign, sorted(assigned))

    async def _reassign(self, name: StreamName) -> None:
        try:
            await self._streams.reassign(name)
        except FelixError as error:
            log.error("stream %s is led here, and cannot be opened: %s", name, error)
            # With the next change, which may be what makes room.
            self._assigned.add(name)
            return
        held = self._streams.get(name)
        if held is not None and held.unopened:
            self._assigned.add(name)
