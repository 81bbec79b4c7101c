"""What a broker's disks have of its streams, and what is wrong with them: bytes by tenant, shards that found no room, those that wait."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Final

from felix.errors import Code, CorruptionError, FelixError
from felix.names import StreamName
from felix.runtime.port import Clock
from felix.told import Told
from region.log.companions import shard_of
from region.log.shard import ShardLog
from region.streams.hosted import HostedStream, why_stopped
from region.streams.index import StreamIndex

log = logging.getLogger("felix.region.streams")

MEASURED_AT_ONCE: Final = 2_000
"""Streams whose bytes on the disk are summed up in one go, of those that were written to since: where there are more, the others the next time."""
UNANSWERED_S: Final = 10.0
"""A disk that has not answered for so long is said to, as of copies (region.replication.leader.HUNG_MS)."""


def _counted(count: int, one: str, several: str) -> tuple[str, str]:
    """So many, in words; and what stands behind the first of them, which is named."""
    return (f"1 {one}", "") if count == 1 else (f"{count} {several}", ", …")


class StreamDisks:
    """Of the streams in `index`. `awaited`: the logs of a stream that are to be opened again; None where it waits for none."""

    def __init__(
        self, index: StreamIndex, clock: Clock, awaited: Callable[[HostedStream], list[int] | None]
    ) -> None:
        self._index, self._awaited = index, awaited
        # Bytes on the disk, by tenant, as far as streams were measured; and those that are to be measured again.
        self._stored: Counter[str] = Counter()
        self._unmeasured: dict[HostedStream, None] = {}
        self._full: dict[ShardLog, None] = {}
        """those that found no room on the disk when they were written to last"""
        self._full_told = Told(clock.monotonic)
        self.unremoved: dict[str, StreamName] = {}
        """by incarnation: deleted streams that the disk has still; no more than it had folders"""

    def begin(self, stream: HostedStream) -> None:
        """Its shards are others than before."""
        for shard in stream.serving:
            shard.disk_bytes_changed = partial(self._unmeasured.__setitem__, stream, None)
            shard.room_changed = partial(self._room_changed, shard)
        self._measure(stream)

    def drop(self, stream: HostedStream) -> None:
        """None of its shards is served here any more."""
        self._store(stream, 0)

    def stored_bytes(self) -> dict[str, int]:
        """What the shards hold on disk, by tenant: of the streams that were written to as it is now, MEASURED_AT_ONCE of them. Once a
        second, not per batch.
        """
        for stream in list(islice(self._unmeasured, MEASURED_AT_ONCE)):
            del self._unmeasured[stream]
            if not stream.deleted:
                self._measure(stream)
        return dict(self._stored)

    def _measure(self, stream: HostedStream) -> None:
        self._store(stream, sum(shard.disk_bytes for shard in stream.serving))

    def _store(self, stream: HostedStream, held: int) -> None:
        tenant = stream.name.tenant
        self._stored[tenant] += held - stream.stored_bytes
        if not self._stored[tenant]:
            del self._stored[tenant]
        stream.stored_bytes = held

    def _room_changed(self, shard: ShardLog) -> None:
        """A shard found the disk full, or room on it. Of all shards it is said once, and not with each change of a disk that is nearly full."""
        if shard.has_copies:
            return
        if shard.is_full:
            self._full[shard] = None
            if self._full_told.begins():
                log.error("%s", self._no_room()[0])
            return
        self._full.pop(shard, None)
        if not self._found_full() and self._full_told.ends():
            log.warning("there is room on the disk again, and what is published is taken")

    def _found_full(self) -> list[ShardLog]:
        for shard in [each for each in self._full if not each.is_full]:
            del self._full[shard]
        return list(self._full)

    def problems(self) -> list[str]:
        """That the disk has failed, is full, or does not answer, and that logs on it are damaged, in one line each. Those that have copies say so themselves."""
        return [
            *self._failed(),
            *self._refused(),
            *self._left_there(),
            *self._no_room(),
            *self._unopened(),
            *self._unanswered(),
        ]

    def _left_there(self) -> list[str]:
        if not self.unremoved:
            return []
        names = sorted(map(str, self.unremoved.values()))
        of = (
            f"{names[0]}, which is" if len(names) == 1 else f"{len(names)} streams ({names[0]}, …), which are"
        )
        return [
            f"The disk has failed: the records of {of} deleted, are not removed from it yet. They are removed by themselves once it works."
        ]

    def _failed(self) -> list[str]:
        told: list[str] = []
        waiting = [(stream, number) for stream in self._index for number in self._awaited(stream) or ()]
        if waiting:
            stream, number = waiting[0]
            shards, more = _counted(len(waiting), "log does", "logs do")
            told.append(
                f"The disk has failed: {shards} not serve ({stream.text} shard {shard_of(number)}{more}). What is there is opened again by itself, if it can be."
            )
        for stream in self._index:
            unproved = set(stream.unproved).difference(stream.unopened)
            if unproved and self._awaited(stream) is None:
                shards = ", ".join(sorted({str(shard_of(number)) for number in unproved}))
                told.append(
                    f"The disk has failed, and what was acknowledged in {stream.text} shard {shards} is not all there any more, or is damaged: it is not opened "
                    "again before a restart. Restore what a backup has, or restart the broker to go on with what is there."
                )
        return told

    def _refused(self) -> list[str]:
        found = [
            (stream.text, number, why)
            for stream in self._index
            for number, each in (*stream.replicas.items(), *stream.refused.items())
            if isinstance(why := why_stopped(each), CorruptionError) and number not in stream.unproved
        ]
        if not found:
            return []
        name, number, why = found[0]
        logs, more = _counted(len(found), "log does", "logs do")
        return [
            f"{logs} not serve, damaged or gone ({name} shard {shard_of(number)}{more}), and what is put back counts once the broker starts again: {why}"
        ]

    def _unanswered(self) -> list[str]:
        waiting = [
            (shard.unanswered_s, shard.identity)
            for stream in self._index
            for shard in stream.serving
            if not shard.has_copies and shard.unanswered_s > UNANSWERED_S
        ]
        if not waiting:
            return []
        longest_s, first = max(waiting, key=lambda each: each[0])
        shards, more = _counted(len(waiting), "shard waits", "shards wait")
        return [
            f"The disk has not answered for {longest_s:.0f} s: {shards} for it ({first.stream} shard {first.shard}{more}). What is published there is answered "
            "once it does."
        ]

    def _no_room(self) -> list[str]:
        full = [each.identity for each in self._found_full()]
        unopened = [(name, number) for name, number, why in self._waiting() if why.code is Code.DISK_FULL]
        places = [*((each.stream, each.shard) for each in full), *unopened]
        if not places:
            return []
        shards, more = _counted(len(places), "shard takes", "shards take")
        name, number = places[0]
        return [
            f"The disk is full: {shards} nothing that is published ({name} shard {number}{more}). Reading goes on; publishing does once there is room."
        ]

    def _waiting(self) -> Iterator[tuple[str, int, FelixError]]:
        """The shards that could not be opened for what passes, and why."""
        for stream in self._index:
            for number in stream.unopened:
                if (why := why_stopped(stream.replicas[number])) is not None:
                    yield stream.text, number, why

    def _unopened(self) -> list[str]:
        waiting = [each for each in self._waiting() if each[2].code is not Code.DISK_FULL]
        if not waiting:
            return []
        name, number, why = waiting[0]
        shards, more = _counted(len(waiting), "shard", "shards")
        return [
            f"{shards} could not be opened ({name} shard {number}{more}), which is tried again by itself: {why}"
        ]
