"""All shards under one data folder, and the threads that serve them.

Layout: `<data>/lock`, `<data>/<tenant>~<namespace>~<name>~<incarnation hex>/<shard>/`. A part of a stream's
name has no `~` (felix.names), so folder names parse back to what they were made from; they fit a file name
(at most 224 bytes). Folders of names that do not parse are left alone and not listed.

Invariants: one process holds the folder (`Files.lock`), and goes by its path only while it is there (`felix.storage.held`); a stream's folder is deleted on explicit request
only, never because something else does not know it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, ParamSpec, TypeVar

from felix.errors import Code, FelixError, RequestError
from felix.lazy_event import LazyThreadEvent
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.storage.disk import DiskFiles
from felix.storage.held import HeldFiles
from felix.storage.port import Files
from felix.storage.small_file import load_checked, read_file, save_checked
from region.log.ahead import AHEAD_NAMES
from region.log.begun_shards import BegunShards, require_folder
from region.log.clean_stop import save_clean_stop, take_clean_stop
from region.log.compaction import CompactionReport
from region.log.compactor import WorkEndedError
from region.log.copies import Copies
from region.log.durable_mark import MARK_NAME
from region.log.offload import OFFLOADED_NAME, OffloadState, decode_offload, encode_offload, object_url
from region.log.offloader import FETCHED_BYTES_MAX, RATE_BYTES, FetchedCache, OffloadReport
from region.log.segment import ShardIdentity
from region.log.shard import ShardHooks, ShardLog, ShardSettings, ShardStore
from region.log.shared_offload import delete_all
from region.log.store_calls import ended_by

log = logging.getLogger("felix.region.log")

P = ParamSpec("P")
T = TypeVar("T")

COMMIT_THREADS_MAX: Final = 4
"""Syncs of different shards overlap; a disk gains nothing from more of them at once."""
CREATION_THREADS_MAX: Final = 16
"""A new shard waits for eight syncs of its own, which the disk takes together with those of others. Commits do not wait behind them."""
READ_THREADS_MAX: Final = 4
"""Catching-up readers wait for each other rather than for syncs: reads have threads of their own."""

OFFLOAD_THREADS_MAX: Final = 4
"""One upload at a time for each store, which may take hours: one store hardly waits for another."""
FETCH_THREADS_MAX: Final = 4
"""Readers of what is in stores wait for each other, and for no upload; readers of what is local for none of them."""

LIST_THREADS_MAX: Final = 1
"""New copies read lists of what is in a store: neither reads nor uploads wait for these."""
DELETION_THREADS_MAX: Final = 1
"""Streams' objects are deleted one after the other: there may be a hundred thousand, for which nothing else waits."""

COPIES: Final = "copies"
"""Beside the folder of logs: what is known of copies outside of their own folders."""
_SEPARATOR: Final = "~"
_DELETED_SUFFIX: Final = ".deleted"


class StoredStream(NamedTuple):
    """A stream that has a folder here: name, incarnation (16 bytes) and the shards kept."""

    name: StreamName
    incarnation: bytes
    shards: tuple[int, ...]


def folder_name(name: StreamName, incarnation: bytes) -> str:
    """The folder of a stream's incarnation."""
    assert len(incarnation) == 16
    return _SEPARATOR.join((name.tenant, name.namespace, name.name, incarnation.hex()))


def parse_folder_name(text: str) -> tuple[StreamName, bytes] | None:
    """What a folder name says, or None where it is not one of ours."""
    parts = text.split(_SEPARATOR)
    try:
        name, incarnation = StreamName(*parts[:3]), bytes.fromhex(parts[3])
    except (FelixError, TypeError, ValueError, IndexError):
        return None
    return (name, incarnation) if text == _own_name(name, incarnation) else None


def _own_name(name: StreamName, incarnation: bytes) -> str | None:
    return folder_name(name, incarnation) if len(incarnation) == 16 else None


def stored_streams(data: Path, files: Files) -> list[StoredStream]:
    """The streams that have a folder in `data`, in the order of their names. Blocking."""
    found = []
    for name in files.names(data):
        parsed = parse_folder_name(name)
        if parsed and files.is_folder(data / name):
            shards = sorted(int(shard) for shard in files.names(data / name) if shard.isdecimal())
            found.append(StoredStream(*parsed, tuple(shards)))
    return found


def offload_base(url: str, identity: ShardIdentity) -> str:
    """Where a shard's objects are below a store's URL."""
    return object_url(url, shard_place(identity))


def shard_place(identity: ShardIdentity) -> str:
    """A shard's place below any store: one that no other shard, incarnation or region has."""
    folder = folder_name(StreamName.parse(identity.stream), identity.incarnation)
    return f"{identity.region}/{folder}/{identity.shard:05d}"


def _clean_name(name: StreamName, incarnation: bytes, shard: int) -> str:
    return f"{folder_name(name, incarnation)}/{shard:05d}"


def shard_folder(data: Path, name: StreamName, incarnation: bytes, shard: int) -> Path:
    """Where a shard, or a journal beside it, is kept."""
    return data / folder_name(name, incarnation) / f"{shard:05d}"


class _Prepared(Executor):
    """A pool whose work does something else first: one visit to a thread for both."""

    def __init__(self, pool: Executor, first: Callable[[], None]) -> None:
        self._pool, self._first = pool, first

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        def both() -> T:
            self._first()
            return fn(*args, **kwargs)

        return self._pool.submit(both)


class LogDirectory:
    """The logs of one broker. Construct on the event loop; `close` stops every shard and lets go of the folder."""

    def __init__(
        self,
        data: Path,
        region: str,
        *,
        files: Files | None = None,
        offload_rate_bytes: int = RATE_BYTES,
        fetched_bytes_max: int = FETCHED_BYTES_MAX,
        runtime: Runtime = REAL,
    ) -> None:
        files = files or DiskFiles()
        self._lock = files.lock(data)
        self._data = data
        self.files: Files = HeldFiles(files, self._lock, data, self.copies)
        try:
            # Shards that were closed in order, by the last stop or since.
            self._clean = take_clean_stop(self.files, data, self._lock.identity)
            self._begun = BegunShards(self.files, data)
        except BaseException:
            # The next start may be in this process.
            self._lock.release()
            raise
        self._region = region
        self.commit_pool = runtime.pool(COMMIT_THREADS_MAX, "log-commit")
        self.creation_pool = runtime.pool(CREATION_THREADS_MAX, "log-creation")
        self.read_pool = runtime.pool(READ_THREADS_MAX, "log-read")
        self.list_pool = runtime.pool(LIST_THREADS_MAX, "log-lists")
        self.maintenance_pool = runtime.pool(1, "log-maintenance")
        self._fetch_pool = runtime.pool(FETCH_THREADS_MAX, "log-fetch")
        self._deletion_pool = runtime.pool(DELETION_THREADS_MAX, "log-deletions")
        self._store = ShardStore(
            runtime.pool(OFFLOAD_THREADS_MAX, "log-offload"),
            FetchedCache(fetched_bytes_max, self.files),
            offload_rate_bytes,
            runtime.clock,
            self._fetch_pool,
        )
        self._open: dict[tuple[StreamName, bytes, int], ShardLog] = {}
        self._opening: set[tuple[StreamName, bytes, int]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        # The folders of streams whose names no crash takes back, as far as that was seen to by this process.
        self._lasting: set[Path] = set()
        # Set once this closes: what is asked of stores for no open shard ends then.
        self._ending = LazyThreadEvent()
        # Held while objects of a deleted stream are deleted: two threads may come to it.
        self._finishing = Lock()
        # Held while it is written which shards were begun.
        self._saving = Lock()
        self.commit_pool.submit(self._finish_deletions)

    @property
    def shards(self) -> tuple[ShardLog, ...]:
        """The open shards, failed ones included."""
        return tuple(self._open.values())

    @property
    def lock_identity(self) -> str:
        """`FolderLock.identity` of the folder's lock."""
        return self._lock.identity

    @property
    def copies(self) -> Path:
        """The folder for what is known of copies of shards outside of their own folders."""
        return self._data.parent / COPIES

    def stored(self) -> list[StoredStream]:
        """The streams that have a folder here, in the order of their names. Blocking."""
        return stored_streams(self._data, self.files)

    def shard_folder(self, name: StreamName, incarnation: bytes, shard: int) -> Path:
        """Where a shard is kept."""
        return shard_folder(self._data, name, incarnation, shard)

    def has_notes(self, name: StreamName, incarnation: bytes, shard: int) -> bool:
        """Whether a shard's folder has notes, of which some may not be released (region.log.ahead). Blocks. Raises OSError."""
        folder = self.shard_folder(name, incarnation, shard)
        return any(
            self.files.exists(folder / each) and bool(read_file(self.files, folder / each))
            for each in AHEAD_NAMES
        )

    async def open_shard(
        self,
        name: StreamName,
        incarnation: bytes,
        shard: int,
        settings: ShardSettings,
        hooks: ShardHooks,
        *,
        full_verify: bool = False,
    ) -> ShardLog:
        """Open a shard, making its folder if it has none. Each is open once.

        Raises CorruptionError where it must not serve, UnavailableError where the disk does not let it,
        RequestError(CONFLICT) where it is open already.
        """
        key = (name, incarnation, shard)
        if key in self._open or key in self._opening:
            raise RequestError(f"Shard {shard} of {name} is open already.", code=Code.CONFLICT)
        self._opening.add(key)
        try:
            log = await self._open_log(*key, settings, hooks, full_verify)
        finally:
            self._opening.discard(key)
        self._open[key] = log
        return log

    async def _open_log(
        self,
        name: StreamName,
        incarnation: bytes,
        shard: int,
        settings: ShardSettings,
        hooks: ShardHooks,
        full_verify: bool,
    ) -> ShardLog:
        folder = None
        synced = False
        pool: Executor = self.commit_pool
        stream = folder_name(name, incarnation)
        if settings.durability.kind != "ephemeral":
            folder = self.shard_folder(name, incarnation, shard)
            clean_name = _clean_name(name, incarnation, shard)
            synced = clean_name in self._clean
            self._clean.discard(clean_name)
            first = partial(self._prepare, folder, shard, was_begun=self._begun.has(stream, shard))
            # New, or of a process that was killed: either way it waits for syncs, and no commit is to wait behind it.
            pool = _Prepared(self.commit_pool if synced else self.creation_pool, first)
        log = await ShardLog.open(
            folder,
            ShardIdentity(self._region, str(name), incarnation, shard),
            settings,
            hooks,
            commit_pool=self.commit_pool,
            read_pool=self.read_pool,
            opening_pool=pool,
            store=self._store,
            files=self.files,
            full_verify=full_verify,
            synced=synced,
        )
        if folder is not None:
            self._begun.add(stream, shard)
        return log

    def _prepare(self, folder: Path, shard: int, *, was_begun: bool) -> None:
        """Raises CorruptionError where a shard that was begun is gone; OSError."""
        if was_begun:
            require_folder(self.files, folder, shard)
        self._make(folder)

    def _make(self, folder: Path) -> None:
        """Create a shard's folder so that a crash does not undo it, unless it is complete already. Raises OSError."""
        if self.files.exists(folder / MARK_NAME):
            return
        self.files.make_folder(folder)
        self.files.sync_folder(folder.parent)
        if folder.parent not in self._lasting:
            # From the stream's name up to that of the broker's own folder, which may be as new as the shard.
            for above in (self._data, self._data.parent, self._data.parent.parent):
                self.files.sync_folder(above)
            self._lasting.add(folder.parent)

    async def make_folder(self, name: StreamName, incarnation: bytes, shard: int) -> Path:
        """A shard's folder, whose name no crash takes back. Raises CorruptionError where the shard was begun and is gone, OSError."""
        folder, stream = self.shard_folder(name, incarnation, shard), folder_name(name, incarnation)
        prepare = partial(self._prepare, folder, shard, was_begun=self._begun.has(stream, shard))
        await asyncio.get_running_loop().run_in_executor(self.creation_pool, prepare)
        # Whoever asks opens the log by itself: that it was closed in order before says nothing of its next end, and that it was begun is told elsewhere.
        self._clean.discard(_clean_name(name, incarnation, shard))
        self._begun.discard(stream, shard)
        return folder

    async def lead_shard(
        self,
        name: StreamName,
        incarnation: bytes,
        shard: int,
        settings: ShardSettings,
        hooks: ShardHooks,
        copies: Copies,
    ) -> ShardLog:
        """Open a shard that other brokers have copies of, and that this one leads. Raises as `ShardLog.lead`, and RequestError(CONFLICT)
        where it is open already."""
        key = (name, incarnation, shard)
        if key in self._open or key in self._opening:
            copies.released()
            raise RequestError(f"Shard {shard} of {name} is open already.", code=Code.CONFLICT)
        self._opening.add(key)
        try:
            self._open[key] = log = await ShardLog.lead(
                ShardIdentity(self._region, str(name), incarnation, shard),
                settings,
                hooks,
                copies,
                read_pool=self.read_pool,
                store=self._store,
                files=self.files,
            )
        finally:
            self._opening.discard(key)
        return log

    @property
    def fetched_bytes(self) -> int:
        """Bytes of fetched segments on the local disk."""
        return self._store.cache.held_bytes

    @property
    def fetched_bytes_max(self) -> int:
        return self._store.cache.bytes_max

    async def offload(self, shard: ShardLog, now_ms: int, url: str) -> OffloadReport:
        """One turn of offload of one of this folder's shards to a place of its own below `url`, or of deleting alone where
        that is empty; raises as `ShardLog.offload` does."""
        return await shard.offload(now_ms, offload_base(url, shard.identity) if url else "")

    async def compact(self, shard: ShardLog, now_ms: int) -> CompactionReport | None:
        """One pass of compaction over one of this folder's shards; raises as `ShardLog.compact` does."""
        return await shard.compact(now_ms, self.maintenance_pool)

    def find(self, name: StreamName, incarnation: bytes, shard: int) -> ShardLog | None:
        """A shard that is open, failed or not."""
        return self._open.get((name, incarnation, shard))

    async def close_shard(self, name: StreamName, incarnation: bytes, shard: int) -> None:
        """Close a shard; one that is not open is closed already. It is closed to the end also where nobody waits for it any more."""
        log = self._open.pop((name, incarnation, shard), None)
        if log:
            closing = asyncio.ensure_future(self._close(name, log))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)

    async def _close(self, name: StreamName, log: ShardLog) -> None:
        await log.close()
        if log.failure is None and log.settings.durability.kind != "ephemeral" and not log.has_copies:
            self._clean.add(_clean_name(name, log.identity.incarnation, log.identity.shard))

    async def delete_copy(self, folders: Sequence[Path], kept: Sequence[Path]) -> None:
        """Delete the logs of a shard that this broker has no copy of any more, then the files `kept`; nobody has them open. Objects in stores
        stay: others have the shard."""
        for folder in folders:
            if folder.name.isdecimal():
                self._begun.discard(folder.parent.name, int(folder.name))
        # Before they go: after a crash they would be taken for lost.
        await self.remember_begun()
        await asyncio.get_running_loop().run_in_executor(self.commit_pool, self._delete_copy, folders, kept)

    def _delete_copy(self, folders: Sequence[Path], kept: Sequence[Path]) -> None:
        for folder in folders:
            # Renamed first: a crash in the middle leaves no half of a log under its name.
            deleted = folder.with_name(folder.name + _DELETED_SUFFIX)
            if self.files.exists(deleted):
                self.files.remove_folder(deleted)
            if self.files.exists(folder):
                self.files.rename(folder, deleted)
                self.files.sync_folder(folder.parent)
                self._remove_folder(deleted)
        for file in kept:
            if self.files.exists(file):
                self.files.remove(file)

    async def delete_stream(self, name: StreamName, incarnation: bytes) -> None:
        """Delete every shard of this incarnation, data and all. Cannot be undone. Raises OSError where something is left on the disk: called again, it goes on; so
        does the next start."""
        for key in [key for key in self._open if key[:2] == (name, incarnation)]:
            await self._open.pop(key).close()
        self._lasting.discard(self._data / folder_name(name, incarnation))
        self._begun.discard_stream(folder_name(name, incarnation))
        await asyncio.get_running_loop().run_in_executor(self.commit_pool, self._delete, name, incarnation)

    def _delete(self, name: StreamName, incarnation: bytes) -> None:
        folder = self._data / folder_name(name, incarnation)
        deleted = folder.with_name(folder.name + _DELETED_SUFFIX)
        if self.files.exists(folder):
            # Renamed first: a crash in the middle leaves no half of a stream under its name.
            self.files.rename(folder, deleted)
        elif not self.files.exists(deleted):
            return
        self.files.sync_folder(self._data)
        if self._shed(deleted):
            self._deletion_pool.submit(self._finish_deletion, deleted)

    def _finish_deletions(self) -> None:
        """What a crash, or a store that did not answer, left of deletions that were asked for."""
        for folder in self._doomed():
            # What stays keeps its name of a deleted stream: the next start tries again.
            with suppress(OSError):
                if self._shed(folder):
                    self._deletion_pool.submit(self._finish_deletion, folder)

    def _doomed(self) -> list[Path]:
        return [
            self._data / name
            for name in self.files.names(self._data)
            if name.endswith(_DELETED_SUFFIX) and parse_folder_name(name.removesuffix(_DELETED_SUFFIX))
        ]

    def retry_deletions(self) -> None:
        """Ask stores again to delete what was deleted here. Blocks for as long as they take; in a thread."""
        for folder in self._doomed():
            self._finish_deletion(folder)

    def _shed(self, deleted: Path) -> bool:
        """Remove all of a deleted stream's folder but the names of its objects in stores; whether there are any. Raises OSError."""
        files, left = self.files, False
        for shard in (deleted / name for name in files.names(deleted)):
            if not files.exists(shard / OFFLOADED_NAME):
                files.remove_folder(shard)
                continue
            left = True
            for held in files.names(shard):
                if held != OFFLOADED_NAME:
                    files.remove(shard / held)
        if not left:
            files.remove_folder(deleted)
        return left

    def _remove_folder(self, folder: Path) -> None:
        # What stays keeps its name of a deleted stream: the next start tries again.
        with suppress(OSError):
            self.files.remove_folder(folder)

    def _finish_deletion(self, deleted: Path) -> None:
        """Delete a deleted stream's objects, then the last of its folder. Called again where a store does not answer, and goes on from there."""
        try:
            with self._finishing, ended_by(self._ending):
                failures = [
                    failure
                    for shard in self.files.names(deleted)
                    if (failure := self._delete_objects(deleted / shard)) is not None
                ]
                if failures:
                    raise failures[0]
                self.files.remove_folder(deleted)
        except WorkEndedError:
            return
        except (OSError, FelixError) as error:
            if self.files.exists(deleted):
                log.error("objects of a deleted stream are left in their store, %s: %s", deleted.name, error)

    def _delete_objects(self, shard: Path) -> OSError | FelixError | None:
        """What holds up the deletion of one shard's objects; its file then names those that are left."""
        path = shard / OFFLOADED_NAME
        try:
            payload = load_checked(self.files, path)
            known = decode_offload(payload) if payload else OffloadState()
            left, failure = delete_all(known)
            if failure is None:
                self.files.remove(path)
            elif left != known:
                save_checked(self.files, path, encode_offload(left))
        except (OSError, FelixError) as error:
            return error
        return failure

    async def remember_begun(self) -> None:
        """Have it on the disk which shards were begun. Called from time to time; what keeps it from being written is tried again at the next call."""
        if self._begun.is_saved:
            return
        loop, taken = asyncio.get_running_loop(), self._begun.taken()
        try:
            # Behind no commit, and behind no pass of compaction, which takes minutes.
            await loop.run_in_executor(self.creation_pool, self._save_begun, taken)
        except OSError as error:
            log.debug("which shards were begun could not be written: %s", error)

    def _save_begun(self, taken: tuple[int, bytes]) -> None:
        with self._saving:
            self._begun.save(taken)

    async def close(self) -> None:
        """Close every shard, the threads and the lock."""
        self._ending.set()
        shards, self._open = self._open, {}
        results: list[object] = await asyncio.gather(
            *(self._close(name, log) for (name, _, _), log in shards.items()),
            *self._closing,
            return_exceptions=True,
        )
        self.creation_pool.shutdown()
        self.commit_pool.shutdown()
        self.read_pool.shutdown()
        self.list_pool.shutdown()
        self.maintenance_pool.shutdown()
        for pool in (self._store.pool, self._fetch_pool, self._deletion_pool):
            pool.shutdown(cancel_futures=True)
        try:
            if not self._begun.is_saved:
                self._begun.save(self._begun.taken())
            save_clean_stop(self.files, self._data, self._lock.identity, self._clean)
        except OSError as error:
            # It is only a shortcut: the next start syncs what it keeps.
            log.warning("the next start will take longer: %s", error)
        self._lock.release()
        for result in results:
            if isinstance(result, BaseException):
                raise result
