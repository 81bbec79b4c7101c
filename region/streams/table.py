"""The streams that this broker hosts: their open shards, by name.

`StreamTable` follows the catalog: what stands there is opened, what is marked as deleted there is closed and
removed from disk. Missing metadata alone deletes nothing. What an error of the disk has stopped is opened again (`_open_again`), with all that was
acknowledged, or stays stopped. Memory comes out of one budget: what an ephemeral stream was promised and what a
durable shard takes by being open are reserved when a stream is opened, or it is refused; the newest records of durable shards take what is
left, when there are some, and give way again (region.log.ring_pool).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from felix.bounded import BoundedMap
from felix.errors import Code, CorruptionError, FelixError, NotLeaderError, RequestError, UnavailableError
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from region.at_once import at_once
from region.limits.budget import Budget
from region.log.companions import shard_of
from region.log.directory import LogDirectory
from region.log.epochs import next_epoch
from region.log.errors import StorageFailedError
from region.log.left import what_is_missing
from region.log.open_logs import OpenLogs
from region.log.reopener import Reopener, Tried
from region.log.ring_pool import RingPool
from region.log.seal import MakeSeal
from region.log.shard import ShardHooks, ShardLog, ShardSettings
from region.log.shard_settings import always_allowed
from region.metadata.records import (
    REMOVED_REMEMBERED_MAX,
    SHARDS_MAX,
    Stream,
    StreamConfig,
    rests_on_commits,
)
from region.streams.disks import StreamDisks
from region.streams.hosted import (
    HostedStream,
    LackingError,
    Leading,
    Replica,
    about_to_be_served,
    why_stopped,
)
from region.streams.index import StreamIndex
from region.streams.maintenance import StreamMaintenance
from region.streams.settings import (
    COMPANION_RING_BYTES,
    HOT_BYTES,
    SHARD_BYTES,
    delivery_frame,
    least_bytes,
    shard_settings,
)

log = logging.getLogger("felix.region.streams")

FOREIGN_ROOM_PART: Final = 4
"""One part of so many of the ring budget is left by streams that are made for another region: this region's people make theirs there."""

SHARDS_AT_ONCE: Final = 16
"""Shards of a stream that are opened together: as many as there are threads that create shards."""
CLOSED_AT_ONCE: Final = 8
"""Streams that are closed together at the end: the disk has something to do while another one's answers are looked at."""


class StreamTable:
    """Opens, keeps and closes hosted streams. `refusal` says why nothing may be appended to any of them now, or None.

    Nothing here that one stream's coming or going asks for looks at all the others.
    """

    def __init__(
        self,
        directory: LogDirectory,
        ring_budget: Budget,
        make_seal: MakeSeal,
        refusal: Callable[[], FelixError | None] = always_allowed,
        runtime: Runtime = REAL,
        open_logs: OpenLogs | None = None,
        leading: Leading | None = None,
    ) -> None:
        """`open_logs`: who bounds how many logs have files open. `leading`: which streams are served here, where there are several
        brokers; without it, all are.
        """
        self._leading = leading
        self._directory = directory
        self._make_seal = make_seal
        self._ring_budget = ring_budget
        self._rings = RingPool(ring_budget)
        self._open_logs = OpenLogs() if open_logs is None else open_logs
        self._refusal = refusal
        self._runtime = runtime
        self._start = runtime.random.randbytes(16)
        """Of this start of the broker."""
        self.index = StreamIndex()
        self.maintenance = StreamMaintenance(directory, self.index)
        self.disks = StreamDisks(self.index, runtime.clock, self._awaited)
        # Locks go with who holds them or waits for them.
        self._busy: WeakValueDictionary[StreamName, asyncio.Lock] = WeakValueDictionary()
        # Incarnations that were removed here of late: a record that was read before must not bring one back.
        self._removed: BoundedMap[str, bool] = BoundedMap(REMOVED_REMEMBERED_MAX)
        self.before_opening: list[Callable[[StreamName, Stream], Awaitable[None]]] = []
        """Awaited before the logs of a stream are opened: what they need. Where one raises, the stream is not served."""
        self.before_found: list[Callable[[StreamName, list[ShardLog], list[int]], Awaitable[None]]] = []
        """Called with a stream's open shards before anybody can find them by its name: what must stand before they are read; and with the numbers of those that are not open, and
        may have records that stand behind nothing yet."""
        self.before_serving: list[Callable[[HostedStream], Awaitable[None]]] = []
        """Called with a stream whose shards are open, before anybody is told of it: what must be in them first."""
        self._watchers: list[Callable[[HostedStream], None]] = []
        self.reopener: Reopener[HostedStream] = Reopener(runtime, self._open_again)
        """Of streams with a log that an error of the disk has stopped."""

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[HostedStream]:
        return iter(self.index)

    def get(self, name: StreamName) -> HostedStream | None:
        return self.index.get(name)

    def _add(self, stream: HostedStream) -> None:
        self.index.add(stream)
        self.maintenance.place(stream, stream.record.config)
        self._begin_watching(stream)
        self._changed(stream)

    def _drop(self, stream: HostedStream) -> None:
        stream.deleted = True
        self.index.drop(stream)
        self.maintenance.remove(stream)
        self.disks.drop(stream)
        self._changed(stream)

    def on_change(self, watcher: Callable[[HostedStream], None]) -> None:
        """Call `watcher` with each stream that came, went (`deleted`), or is served by this broker now or no longer, after those that
        asked before."""
        self._watchers.append(watcher)

    def _changed(self, stream: HostedStream) -> None:
        for watcher in self._watchers:
            watcher(stream)

    async def open(self, record: Stream) -> HostedStream:
        """Open the stream of this record, if it is not open yet.

        Raises UnavailableError(LIMIT_MEMORY), or what opening a log raises; a damaged shard does not keep the
        others from serving (its state says why it does not). RequestError(NOT_FOUND) where this incarnation was
        removed meanwhile.
        """
        name = StreamName.parse(record.name)
        async with self._busy.setdefault(name, asyncio.Lock()):
            if record.incarnation in self._removed:
                raise RequestError(f"The stream {name} was deleted.", code=Code.NOT_FOUND)
            held = self.index.get(name)
            if held is not None:
                if held.record.incarnation == record.incarnation:
                    if record.revision >= held.record.revision:
                        held.alter(record)
                        self.maintenance.place(held, record.config)
                    if self._leading is None and (held.unopened or not held.replicas):
                        await self._serve_again(held, {})
                    return held
                if held.record.revision > record.revision:
                    return held  # the record is older than what is served
                await self._close(held)
            stream = HostedStream(name, record, {}, 0, self._start, self._leading)
            if self._leading is None:
                await self._serve(stream, {})
            elif epochs := self._leading.epochs(record):
                try:
                    await self._serve(stream, epochs)
                except FelixError as error:
                    log.error("stream %s is led here, and cannot be opened: %s", name, error)
            self._add(stream)
        return stream

    async def _serve(self, stream: HostedStream, epochs: dict[int, int]) -> None:
        """Open the stream's shards, each in the epoch that `epochs` says, else in one that is due. Raises as `open`; then none is."""
        name, record = stream.name, stream.record
        for prepare in self.before_opening:
            await prepare(name, record)
        taken = self._reserve(name, record.config)
        replicas: dict[int, Replica] = {}

        async def open_shard(number: int) -> None:
            if self._leading is not None and number not in epochs:
                replicas[number] = self._leading.not_leader(record, number)
                return
            replicas[number] = await self._open_shard(stream, number, epochs.get(number, 0))

        try:
            await at_once(SHARDS_AT_ONCE, open_shard, range(record.config.shards))
            shards = [each for each in replicas.values() if isinstance(each, ShardLog)]
            unsettled = await self._unsettled(stream, replicas)
            for prepare_shards in self.before_found:
                await prepare_shards(name, shards, unsettled)
            stream.is_settling = True
            stream.begin(dict(sorted(replicas.items())), taken, epochs)
            for settle in self.before_serving:
                await settle(stream)
            for shard in stream.serving:
                stream.left.pop(shard.identity.shard, None)
        except BaseException:
            stream.begin({}, 0, {})
            await self._close_logs(stream, list(replicas))
            self._ring_budget.give(taken)
            raise
        finally:
            stream.is_settling = False

    async def _unsettled(self, stream: HostedStream, replicas: dict[int, Replica]) -> list[int]:
        """The shards that could not be opened here, and have notes of records that may be in them, or may have: they did not let themselves be asked."""
        incarnation, loop = bytes.fromhex(stream.record.incarnation), asyncio.get_running_loop()
        found = []
        for number, each in sorted(replicas.items()):
            if not isinstance(each, FelixError) or isinstance(each, NotLeaderError) or stream.ephemeral:
                continue
            try:
                has_notes = await loop.run_in_executor(
                    self._directory.commit_pool,
                    self._directory.has_notes,
                    stream.name,
                    incarnation,
                    number,
                )
            except OSError:
                has_notes = True
            if has_notes:
                found.append(number)
        return found

    async def release(self, name: StreamName) -> None:
        """Close the logs of a stream that is to be opened as copies. Raises UnavailableError where its disk has failed, and nobody has seen yet whether
        all that was acknowledged is there."""
        await self.reassign(name)
        held = self.index.get(name)
        if held is not None and held.unproved:
            raise UnavailableError(f"the disk of {name} has failed, and its logs are not open again")

    async def reassign(self, name: StreamName) -> None:
        """Serve the stream from now on, or no longer, as its leader may be another one. Raises as `open` where it cannot be served."""
        leading = self._leading
        if leading is None:
            return
        async with self._busy.setdefault(name, asyncio.Lock()):
            held = self.index.get(name)
            if held is None:
                return
            if (epochs := leading.epochs(held.record)) == held.epochs:
                if held.unopened:
                    await self._serve_again(held, epochs)
                return
            if held.replicas:
                await self._cease(held)
                # What was being written may have to be committed first: whoever leads tells when it is.
                epochs = leading.epochs(held.record)
            if epochs:
                await self._serve(held, epochs)
                self._begin_watching(held)
            self._changed(held)

    async def _serve_again(self, stream: HostedStream, epochs: dict[int, int]) -> None:
        """Serve all of its shards, where those can be opened by now that could not. Raises as `open`."""
        for number in stream.unopened:
            if (why := await self._try_log(stream, number, epochs)) is not None:
                # What is answered, and said in the status, is why it cannot be opened now.
                stream.replicas[number] = why
                if stream.failed:
                    self.reopener.failed(stream)
                return
        await self._serve_anew(stream, epochs)
        if not stream.unopened:
            log.info("all shards of stream %s could be opened now, and are served", stream.name)

    async def _try_log(self, stream: HostedStream, number: int, epochs: dict[int, int]) -> FelixError | None:
        """Why a shard or companion that is not open still cannot be opened; None where it can. Those that serve are not disturbed before it is of use."""
        stream.tried = number
        try:
            if number > SHARDS_MAX:
                await self._open_companion(stream, number)
            elif isinstance(
                found := await self._open_shard(stream, number, epochs.get(number, 0), is_again=True),
                FelixError,
            ):
                return found
            await self._close_logs(stream, [number])
        except FelixError as error:
            return error
        finally:
            stream.tried = -1
        return None

    async def _serve_anew(self, stream: HostedStream, epochs: dict[int, int]) -> None:
        """Close what is open of it, and open all. Raises as `open`; then none is."""
        if stream.replicas:
            await self._cease(stream)
        await self._serve(stream, epochs)
        self._begin_watching(stream)
        self._changed(stream)

    # -- after its disk has failed ---------------------------------------------------------------------

    def _look_whether_failed(self, stream: HostedStream, shard: ShardLog) -> None:
        """An open log of the stream has stopped, or not. Copies are opened again by whoever keeps them."""
        if isinstance(shard.failure, StorageFailedError) and not shard.has_copies and not stream.deleted:
            self.reopener.failed(stream)

    async def _open_again(self, stream: HostedStream) -> Tried:
        async with self._busy.setdefault(stream.name, asyncio.Lock()):
            if stream.deleted:
                return Tried.OVER
            epochs = {} if self._leading is None else self._leading.epochs(stream.record)
            if self._leading is not None and (not epochs or (stream.replicas and epochs != stream.epochs)):
                # Another broker leads it, or this one in another epoch: then `reassign` opens what is there.
                return Tried.OVER
            try:
                why = await self._try_again(stream, epochs)
            except FelixError as error:
                why = error
            except Exception as error:
                log.exception("stream %s could not be opened again", stream.name)
                why = FelixError(f"{type(error).__name__}: {error}")
            if why is None and not self._failed_logs(stream):
                return self._told_open(stream)
            log.warning(
                "stream %s: its logs cannot be opened again, which is tried in %d s: %s",
                stream.name,
                self.reopener.next_pause_s(stream),
                why or "its disk has failed again",
            )
            return Tried.FAILED

    async def _try_again(self, stream: HostedStream, epochs: dict[int, int]) -> FelixError | None:
        """Serve all of its shards, where those can be opened that had failed; what keeps one from that, and may pass. Raises as `open`."""
        failed = self._failed_logs(stream)
        for number in failed:
            if (why := why_stopped(stream.replicas.get(number))) is not None:
                # From here on nobody uses it, and the others serve on.
                stream.replicas[number] = why
        await self._close_logs(stream, failed)
        for number in failed:
            found = await self._try_log(stream, number, epochs)
            if isinstance(found, UnavailableError) and not isinstance(found, LackingError):
                if isinstance(found, StorageFailedError) and number in stream.replicas:
                    # What keeps it from being opened now, which may be another reason than what had stopped it.
                    stream.replicas[number] = found
                return found
        if failed or not stream.replicas:
            await self._serve_anew(stream, epochs)
        return None

    def _failed_logs(self, stream: HostedStream) -> list[int]:
        """Shards and companions that an error of the disk has stopped, open or not."""
        incarnation = bytes.fromhex(stream.record.incarnation)
        companions = [
            number
            for number in stream.companions
            if number in stream.left
            or why_stopped(self._directory.find(stream.name, incarnation, number)) is not None
        ]
        return [*stream.failed, *companions]

    def _awaited(self, stream: HostedStream) -> list[int] | None:
        """The logs that are to be opened again; None where the stream waits for none."""
        return self._failed_logs(stream) if self.reopener.is_waiting(stream) else None

    def _told_open(self, stream: HostedStream) -> Tried:
        """All that could be opened is; some may have lost what was acknowledged."""
        if unproved := stream.unproved:
            numbers = ", ".join(map(str, unproved))
            log.error("stream %s: log %s is not opened again before a restart", stream.name, numbers)
            return Tried.OVER
        if unopened := stream.unopened:
            numbers = ", ".join(map(str, unopened))
            log.warning("stream %s: shard %s is not open again yet, and is tried again", stream.name, numbers)
            return Tried.OPENED
        log.warning("stream %s: its disk had failed, and its logs are open again", stream.name)
        return Tried.OPENED

    async def _close_logs(self, stream: HostedStream, numbers: Iterable[int]) -> list[FelixError]:
        """Close these, of shards and companions. What has to be in them when they are opened again is known from here on. Why some were not closed
        in order."""
        errors: list[FelixError] = []
        incarnation = bytes.fromhex(stream.record.incarnation)
        for number in numbers:
            shard = self._directory.find(stream.name, incarnation, number)
            try:
                await self._directory.close_shard(stream.name, incarnation, number)
            except FelixError as error:
                log.error("%s shard %d does not close in order: %s", stream.name, number, error)
                errors.append(error)
            if shard is not None and not shard.has_copies and not stream.ephemeral:
                stream.left[number] = shard.left()
        return errors

    async def _cease(self, stream: HostedStream) -> None:
        """Serve none of the stream's shards any more: what comes is refused from here on, what is under way is answered."""
        numbers = [*stream.replicas, *stream.companions]
        stream.replicas, stream.companions, stream.epochs = {}, [], {}
        stream.ceased = True
        self._changed(stream)
        stream.ceased = False
        await self._close_views(stream)
        await self._close_logs(stream, numbers)
        self._ring_budget.give(stream.ring_taken)
        stream.ring_taken = 0
        self.disks.drop(stream)

    def check_room(self, name: StreamName, config: StreamConfig) -> None:
        """Raises UnavailableError(LIMIT_MEMORY) where a stream with these settings could not be opened now."""
        self._check_room(name, least_bytes(config))

    def check_foreign_room(self, name: StreamName, config: StreamConfig) -> None:
        """Raises UnavailableError(LIMIT_MEMORY) where a stream made for another region would take what is left for this one's."""
        budget = self._ring_budget
        kept = budget.limit_bytes // FOREIGN_ROOM_PART
        if least_bytes(config) > self._rings.room_bytes - kept:
            raise UnavailableError(
                f"{name} would be made for another region, and the ring budget's last quarter is for this region's streams.",
                code=Code.LIMIT_MEMORY,
                hint=f"Make {name} here first, delete streams, or raise limits.ring_budget.",
                retry_after_ms=30_000,
            )

    def _check_room(self, name: StreamName, wanted: int) -> None:
        if wanted > self._rings.room_bytes:
            raise UnavailableError(
                f"{name} needs {wanted} bytes of memory for its shards, and {self._rings.room_bytes} of "
                f"{self._ring_budget.limit_bytes} are left.",
                code=Code.LIMIT_MEMORY,
                hint="Give it fewer shards or a smaller ring, delete streams, or raise limits.ring_budget.",
            )

    def _reserve(self, name: StreamName, config: StreamConfig) -> int:
        """The ring bytes that were taken for all shards of a stream. Raises as `check_room`."""
        wanted = least_bytes(config)
        self._check_room(name, wanted)
        taken = self._rings.make_room(wanted) and self._ring_budget.take(wanted)
        assert taken
        return wanted

    async def _open_shard(
        self, stream: HostedStream, number: int, epoch: int, *, is_again: bool = False
    ) -> ShardLog | FelixError:
        """`epoch`: to lead it in; 0: a new one, that this broker chooses, or that which it had before its disk failed. `is_again`: what keeps it from being
        opened was said."""
        level = logging.DEBUG if is_again else logging.ERROR
        name, record = stream.name, stream.record
        incarnation = bytes.fromhex(record.incarnation)
        config = record.config
        settings = shard_settings(
            config, config.ring_bytes if config.durability.kind == "ephemeral" else HOT_BYTES
        )
        hooks = ShardHooks(
            frame_prefix=delivery_frame,
            refusal=always_allowed if rests_on_commits(config) else self._refusal,
            runtime=self._runtime,
            rings=self._rings,
            open_logs=self._open_logs,
        )
        if settings.durability.kind != "ephemeral":
            seal = self._make_seal(name, incarnation, number)
            hooks = replace(
                hooks, seal=seal.seal, open_batch=seal.open_batch, commitment=seal.commitment, tag=seal.tag
            )
        if self._leading is not None and (copies := self._leading.copies(record, number)) is not None:
            # Its epoch has begun with its election.
            return await self._directory.lead_shard(name, incarnation, number, settings, hooks, copies)
        try:
            shard = await self._directory.open_shard(name, incarnation, number, settings, hooks)
            await self._require_all(stream, number, shard)
        except FelixError as error:
            log.log(level, "%s shard %d does not serve: %s", name, number, error)
            return error
        left = stream.left.get(number)
        if epoch:
            try:
                await shard.begin_epoch(epoch)
            except FelixError as error:
                log.log(level, "%s shard %d does not serve in epoch %d: %s", name, number, epoch, error)
                await self._directory.close_shard(name, incarnation, number)
                return error
            return shard
        # A new epoch at every start, so that later readers see where a restored log diverges from the original.
        if settings.durability.kind != "ephemeral":
            if left is None or not left.epoch or left.epoch != shard.epochs.current:
                shard.begin_epoch_later()
        elif not shard.epochs.current:
            await shard.begin_epoch(next_epoch(0, hooks.clock_ms(), hooks.runtime.random))
        if shard.report.cut_bytes:
            log.warning("%s shard %d: %s", name, number, shard.report)
        return shard

    async def open_companion(self, stream: HostedStream, number: int) -> ShardLog | None:
        """A log beside the stream's shards, for what a view has to remember: same folder, keys, durability, copies and deletion.

        `number` is above every shard's, and open once; None where the stream is ephemeral, whose views are too. Of several brokers
        the leader opens it, in the epoch of the shard that `number` ends with. Raises UnavailableError(LIMIT_MEMORY),
        RequestError(NOT_FOUND) where the incarnation is being closed, NotLeaderError where it is not served here, and what opening
        a log raises: then it is not open.
        """
        assert number > SHARDS_MAX
        if stream.deleted:
            raise RequestError(f"The stream {stream.name} was deleted.", code=Code.NOT_FOUND)
        if (elsewhere := stream.elsewhere) is not None:
            raise elsewhere
        if number == stream.tried:
            raise about_to_be_served(stream.name)
        if stream.ephemeral:
            return None
        if not self._rings.make_room(SHARD_BYTES) or not self._ring_budget.take(SHARD_BYTES):
            raise UnavailableError(
                f"A view of {stream.name} needs {SHARD_BYTES} bytes of the broker's ring budget, which is used up.",
                code=Code.LIMIT_MEMORY,
                hint="Delete streams, or raise limits.ring_budget.",
            )
        stream.ring_taken += SHARD_BYTES
        stream.companions.append(number)
        stream.refused.pop(number, None)
        try:
            companion = await self._open_companion(stream, number)
        except BaseException as error:
            if isinstance(error, CorruptionError):
                stream.refused[number] = error
            await self.close_companion(stream, number)
            raise
        if number not in stream.companions:
            await self._directory.close_shard(stream.name, stream.incarnation, number)
            raise UnavailableError(
                f"{stream.name} was closed while a log of its views was opened.", code=Code.SHUTTING_DOWN
            )
        stream.left.pop(number, None)
        companion.has_failed = partial(self._look_whether_failed, stream, companion)
        self._look_whether_failed(stream, companion)
        return companion

    async def _open_companion(self, stream: HostedStream, number: int) -> ShardLog:
        settings = ShardSettings(
            shard_settings(stream.record.config, COMPANION_RING_BYTES).durability,
            ring_bytes_max=COMPANION_RING_BYTES,
        )
        seal = self._make_seal(stream.name, stream.incarnation, number)
        hooks = ShardHooks(
            seal.seal,
            seal.open_batch,
            seal.commitment,
            refusal=self._refusal,
            runtime=self._runtime,
            rings=self._rings,
            open_logs=self._open_logs,
        )
        if self._leading is not None:
            copies = self._leading.copies(stream.record, number)
            if copies is not None:
                # Its epoch has begun with its shard's election.
                return await self._directory.lead_shard(
                    stream.name, stream.incarnation, number, settings, hooks, copies
                )
        companion = await self._directory.open_shard(stream.name, stream.incarnation, number, settings, hooks)
        await self._require_all(stream, number, companion)
        epoch = stream.epochs.get(shard_of(number), 0)
        if epoch or not companion.epochs.current:
            await companion.begin_epoch(epoch or 1)
        return companion

    async def _require_all(self, stream: HostedStream, number: int, log: ShardLog) -> None:
        """Raises where a log that was open before in this process lacks what was acknowledged; then it is closed."""
        left = stream.left.get(number)
        if left is not None and (missing := what_is_missing(log.committed_point, left.acknowledged)):
            await self._directory.close_shard(stream.name, bytes.fromhex(stream.record.incarnation), number)
            stream.left[number] = left._replace(failed=True)
            raise LackingError(
                f"Log {number} of {stream.name} {missing}.",
                hint="It is not opened again before a restart. Look after the disk, and restore what a backup has.",
            )

    async def close_companion(self, stream: HostedStream, number: int) -> None:
        """Close a companion whose view could not be opened, so that it can be opened later. The others are closed with their stream,
        and for them this does nothing."""
        if number not in stream.companions:
            return
        stream.companions.remove(number)
        stream.ring_taken -= SHARD_BYTES
        self._ring_budget.give(SHARD_BYTES)
        await self._close_logs(stream, [number])

    def _begin_watching(self, stream: HostedStream) -> None:
        """Its shards are others than before."""
        if stream.failed:
            self.reopener.failed(stream)
        for shard in stream.serving:
            shard.has_failed = partial(self._look_whether_failed, stream, shard)
            self._look_whether_failed(stream, shard)
        self.disks.begin(stream)

    async def remove(self, name: StreamName, incarnation: str) -> str:
        """Close this incarnation and delete its records: it is marked as deleted in the catalog. Why they are on the disk still, where it does not remove them: that is tried again
        (`remove_left`), and at the next start."""
        async with self._busy.setdefault(name, asyncio.Lock()):
            self._removed.put(incarnation, True)
            held = self.index.get(name)
            if held is not None and held.record.incarnation == incarnation:
                held.removed = True
                with suppress(FelixError):
                    # It goes, whatever its disk says.
                    await self._close(held)
            if self._leading is not None:
                await self._leading.forget(incarnation)
            return await self._remove_records(name, incarnation)

    async def _remove_records(self, name: StreamName, incarnation: str) -> str:
        try:
            await self._directory.delete_stream(name, bytes.fromhex(incarnation))
        except OSError as error:
            if incarnation not in self.disks.unremoved:
                log.error("%s is deleted, and its records cannot be removed from the disk: %s", name, error)
                self.disks.unremoved[incarnation] = name
            return str(error)
        if self.disks.unremoved.pop(incarnation, None) is not None:
            log.warning("the records of %s, which is deleted, are removed from the disk", name)
        return ""

    async def remove_left(self) -> None:
        """Remove records of deleted streams that the disk did not remove before."""
        for incarnation, name in list(self.disks.unremoved.items()):
            async with self._busy.setdefault(name, asyncio.Lock()):
                await self._remove_records(name, incarnation)

    async def is_closed(self, name: StreamName, incarnation: str) -> bool:
        """Whether nothing of this incarnation is open, once what is under way with streams of this name is done."""
        async with self._busy.setdefault(name, asyncio.Lock()):
            held = self.index.get(name)
            return held is None or held.record.incarnation != incarnation

    async def remove_marked(self, marked: Container[str]) -> None:
        """Remove what the disk still has of these incarnations, as after a deletion that this broker was down for. What the disk has is asked,
        since marks stay for ever."""
        stored = await asyncio.get_running_loop().run_in_executor(
            self._directory.commit_pool, self._directory.stored
        )
        for stream in stored:
            if stream.incarnation.hex() in marked:
                await self.remove(stream.name, stream.incarnation.hex())

    async def _close(self, stream: HostedStream) -> None:
        self.reopener.drop(stream)
        self._drop(stream)
        await self._close_views(stream)
        errors = await self._close_logs(stream, (*stream.replicas, *stream.companions))
        self._ring_budget.give(stream.ring_taken)
        if errors:
            raise errors[0]

    async def _close_views(self, stream: HostedStream) -> None:
        while stream.closing:
            try:
                await stream.closing.pop()()
            except FelixError as error:
                log.error("a view of %s does not close in order: %s", stream.name, error)
        stream.views.clear()

    async def close(self) -> None:
        """Close every stream, with everything acknowledged on disk."""
        await self.reopener.close()
        await at_once(CLOSED_AT_ONCE, self._close, list(self.index))
