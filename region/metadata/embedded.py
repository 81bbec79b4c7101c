"""The embedded metadata store: SQLite, for a region of one broker on one machine. Nothing to start, nothing to run.

Invariants:
- an acknowledged transaction is on the disk: WAL mode with `synchronous=FULL` syncs the log at every commit;
- one process at a time: a lock file beside the database is held for as long as the store is open;
- all SQLite work happens in one worker thread; the event loop never waits for the disk;
- after a failed read or write of the disk the store stops. It does not retry a sync and then acknowledge;
- a full disk takes small writes all the same (room is kept in the file, and old history is given up), so that streams can be
  deleted, and retentions shortened, to make room;
- what is read at a start is on the disk before anybody is told of it.

Put the file on a local disk: file locks and syncs of network file systems do not keep these promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, Self, TypeVar

from felix.errors import Code, CorruptionError, FelixError, RequestError
from felix.files import sync_folder
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.storage import sqlite_errors
from felix.storage.disk import HeldError, lock_file
from felix.storage.port import is_full
from region.metadata.local import (
    BATCH_BYTES_MAX,
    BATCH_EVENTS_MAX,
    HISTORY_BYTES_MAX,
    HISTORY_EVENTS_MAX,
    HISTORY_SLACK,
    Batch,
    LocalStore,
    check_revision,
    unavailable,
)
from region.metadata.port import FIRST_REVISION, PAGE_BYTES_MAX
from region.metadata.transaction import (
    Change,
    Compare,
    Delete,
    Entry,
    Event,
    Page,
    Put,
    TransactResult,
    Write,
    encode_key,
    prefix_end,
)

_Answer = TypeVar("_Answer")
_HistoryRow = tuple[int, int, bytes, bytes | None, int, int]

_APPLICATION_ID: Final = 0x46454C58  # "FELX", in the file's header, so that `file` and we can tell
_FORMAT: Final = 1
_WRITE_BYTES: Final = 1 << 20
_BUSY_MS: Final = 5_000
"""How long a commit waits for somebody who reads the file with another program, such as a backup."""
ROOM_PAGES: Final = 128
"""Pages that the file keeps free for writes on a full disk, with which an operator makes room: some hundred of them."""
DISK_ROOM_BYTES: Final = 4 << 20
"""A disk with less room than this counts as full: the file does not grow on it."""
_PAGE_BYTES: Final = 4_096
_SCHEMA: Final = """
CREATE TABLE state (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE entries (
    key BLOB PRIMARY KEY, value BLOB NOT NULL,
    create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL, lease INTEGER NOT NULL
);
CREATE INDEX entries_by_lease ON entries (lease) WHERE lease != 0;
CREATE TABLE history (
    revision INTEGER NOT NULL, position INTEGER NOT NULL, key BLOB NOT NULL,
    value BLOB, create_revision INTEGER NOT NULL, lease INTEGER NOT NULL,
    PRIMARY KEY (revision, position)
);
CREATE TABLE leases (id INTEGER PRIMARY KEY, ttl_ms INTEGER NOT NULL);
"""


def _full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lock(path: Path) -> int:
    """Take the lock beside the database. Raises RequestError(CONFLICT) that names who has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return lock_file(path.with_name(path.name + ".lock"))
    except HeldError as error:
        raise RequestError(
            f"The metadata store {path} is in use by another process (pid {error.holder}); "
            "an embedded store serves one broker.",
            code=Code.CONFLICT,
            hint="Stop that broker first, or give this one its own state folder. "
            "Several brokers of one region need etcd (docs/metadata.md).",
        ) from None


def _write_again(path: Path) -> None:
    """Have what SQLite takes from its write-ahead log on the disk before it does. A process that was killed between a write and its sync left it in
    the page cache alone, and where a sync failed the kernel calls pages clean that it could not write: they reach the disk only if they are
    written once more. Overwriting takes no room. Blocks; nobody has the file open. Raises OSError."""
    log = path.with_name(path.name + "-wal")
    if not log.exists():
        return
    with log.open("r+b", buffering=0) as file:
        position = 0
        while data := os.pread(file.fileno(), _WRITE_BYTES, position):
            position += os.pwrite(file.fileno(), data, position)
        os.fsync(file.fileno())
    sync_folder(path.parent)


DAMAGED_HINT: Final = "Look at the disk, and restart the broker: one that could not be read for a moment looks the same. If it stays so, keep the file, and put back a backup (docs/metadata.md)."


class _Database:
    """The connection and every statement. Lives in the worker thread; nothing here awaits."""

    def __init__(self, path: Path, history_events_max: int, history_bytes_max: int) -> None:
        self._path = path
        self._events_max = history_events_max
        self._bytes_max = history_bytes_max
        self._db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1_000)
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise
        self._revision = self._state("revision")
        self._compacted = self._state("compacted")
        self._events, self._bytes = self._db.execute(
            "SELECT count(*), coalesce(sum(length(value)), 0) FROM history"
        ).fetchone()
        self._keep_room()

    def _prepare(self) -> None:
        db = self._db
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != _APPLICATION_ID:
            raise RequestError(
                f"{self._path} is an SQLite database of another program.",
                code=Code.CONFIG_INVALID,
                hint="Give the metadata store a path of its own.",
            )
        if tables and version != _FORMAT:
            raise RequestError(
                f"The metadata store {self._path} has format {version}; this Felix reads format {_FORMAT}.",
                code=Code.UNSUPPORTED,
                hint="Start the Felix version that wrote it.",
            )
        (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise unavailable(
                str(self._path), f"its file system allows no write-ahead log ({mode})", "Use a local disk."
            )
        db.execute("PRAGMA synchronous=FULL")
        if tables:
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise CorruptionError(
                    f"The metadata store {self._path} is damaged: {verdict}.",
                    hint=DAMAGED_HINT,
                )
            return
        with self._transaction():
            # No executescript: it commits what came before it.
            for statement in _SCHEMA.split(";"):
                if statement.strip():
                    db.execute(statement)
            db.executemany(
                "INSERT INTO state VALUES (?, ?)", [("revision", FIRST_REVISION), ("compacted", 0)]
            )
            db.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={_FORMAT}")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _state(self, name: str) -> int:
        row = self._db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise CorruptionError(
                f"The metadata store {self._path} has no {name}.",
                hint="Put back a backup (docs/metadata.md).",
            )
        return int(row[0])

    def close(self) -> None:
        self._db.close()

    def get(self, key: str) -> Entry | None:
        row = self._db.execute(
            "SELECT value, create_revision, mod_revision, lease FROM entries WHERE key = ?", (key.encode(),)
        ).fetchone()
        return None if row is None else Entry(key, *row)

    def range(self, prefix: str, limit: int, after: str) -> Page:
        low, high = encode_key(prefix, "prefix"), prefix_end(prefix.encode())
        rows = self._db.execute(
            "SELECT key, value, create_revision, mod_revision, lease FROM entries "
            "WHERE key >= ? AND key > ? AND (? IS NULL OR key < ?) ORDER BY key",
            (low, after.encode(), high, high),
        )
        found: list[Entry] = []
        size = 0
        for key, value, created, modified, lease in rows:
            size += len(value)
            if len(found) == limit or (found and size > PAGE_BYTES_MAX):
                rows.close()
                return Page(tuple(found), self._revision, more=True)
            found.append(Entry(key.decode(), value, created, modified, lease))
        return Page(tuple(found), self._revision, more=False)

    def transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        if not all(compare.holds(self.get(compare.key)) for compare in compares):
            return TransactResult(False, self._revision)
        self._change(lambda: self._write(writes))
        return TransactResult(True, self._revision)

    def _keep_room(self) -> None:
        """Give the database free pages, and the write-ahead log as many: on a full disk, writes go where these are."""
        with contextlib.suppress(sqlite3.OperationalError):
            (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
            if free >= ROOM_PAGES:
                return
            # Of a try that was cut off.
            self._db.execute("DROP TABLE IF EXISTS room")
            if self._is_tight():
                return
            with self._transaction():
                self._db.execute("CREATE TABLE room (bytes BLOB)")
                self._db.execute("INSERT INTO room VALUES (zeroblob(?))", (2 * ROOM_PAGES * _PAGE_BYTES,))
            # Only here does the file take its place on the disk.
            self._start_log_anew()
            self._db.execute("DROP TABLE room")

    def _is_tight(self) -> bool:
        """Whether the disk is full, or so nearly that what the write-ahead log holds might not fit into the database."""
        disk = os.statvfs(self._path)
        return disk.f_bavail * disk.f_frsize < DISK_ROOM_BYTES

    def _start_log_anew(self) -> None:
        """Bring what the write-ahead log holds into the database: the log is then written from its start, in its own place."""
        with contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()

    def _change(self, change: Callable[[], None]) -> None:
        """Commit `change`; on a full disk in the room that is kept for that, or else where older history was."""
        if not (self._commit(change) or self._commit(change)):
            self._commit(lambda: self._compact(self._events // 2, self._bytes_max))
            if not self._commit(change):
                raise _full_disk()
        self._keep_room()

    def _commit(self, change: Callable[[], None]) -> bool:
        """Whether there was room for `change`."""
        try:
            with self._counted(), self._transaction():
                change()
                (pages,) = self._db.execute("PRAGMA page_count").fetchone()
                if pages * _PAGE_BYTES > self._path.stat().st_size and self._is_tight():
                    # The write-ahead log may have room for it, and would then never get it into the database.
                    raise _full_disk()
        except OSError as error:
            if not is_full(error):
                raise
        except sqlite3.OperationalError as error:
            if not sqlite_errors.is_full(error):
                raise
        else:
            return True
        self._start_log_anew()
        return False

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Put the counters in memory back where the transaction on the disk did not happen."""
        before = self._revision, self._compacted, self._events, self._bytes
        try:
            yield
        except BaseException:
            self._revision, self._compacted, self._events, self._bytes = before
            raise

    def _write(self, writes: Sequence[Write]) -> None:
        revision = self._revision + 1
        position = 0
        for write in writes:
            key = write.key.encode()
            old = self._db.execute("SELECT create_revision FROM entries WHERE key = ?", (key,)).fetchone()
            if isinstance(write, Put):
                value, lease = bytes(write.value), write.lease
                created = revision if old is None else old[0]
                self._db.execute(
                    "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)",
                    (key, value, created, revision, lease),
                )
                self._bytes += len(value)
                event: _HistoryRow = (revision, position, key, value, created, lease)
            elif old is not None:
                self._db.execute("DELETE FROM entries WHERE key = ?", (key,))
                event = (revision, position, key, None, 0, 0)
            else:
                continue
            self._db.execute("INSERT INTO history VALUES (?, ?, ?, ?, ?, ?)", event)
            position += 1
        if position:
            self._revision = revision
            self._events += position
            self._db.execute("UPDATE state SET value = ? WHERE name = 'revision'", (revision,))
            # Once a bound is exceeded by a tenth: one large deletion instead of one per write.
            if (
                self._events > self._events_max + self._events_max // HISTORY_SLACK
                or self._bytes > self._bytes_max + self._bytes_max // HISTORY_SLACK
            ):
                self._compact(self._events_max, self._bytes_max)

    def _compact(self, events_max: int, bytes_max: int) -> None:
        """Drop the oldest revisions, until no more is left than that; the newest revision always stays."""
        compacted = self._compacted
        rows = self._db.execute(
            "SELECT revision, count(*), coalesce(sum(length(value)), 0) FROM history "
            "WHERE revision < ? GROUP BY revision ORDER BY revision",
            (self._revision,),
        )
        for revision, events, size in rows:
            if self._events <= events_max and self._bytes <= bytes_max:
                break
            compacted = revision
            self._events -= events
            self._bytes -= size
        rows.close()
        self._db.execute("DELETE FROM history WHERE revision <= ?", (compacted,))
        self._db.execute("UPDATE state SET value = ? WHERE name = 'compacted'", (compacted,))
        self._compacted = compacted

    def changes(self, prefix: str, from_revision: int) -> Batch:
        check_revision(from_revision, self._compacted, self._revision)
        low, high = prefix.encode(), prefix_end(prefix.encode())
        rows = self._db.execute(
            "SELECT revision, key, value, create_revision, lease FROM history WHERE revision >= ? "
            "AND key >= ? AND (? IS NULL OR key < ?) ORDER BY revision, position",
            (from_revision, low, high, high),
        )
        found: list[Change] = []
        events: list[Event] = []
        current = size = 0
        for count, (revision, key, value, created, lease) in enumerate(rows):
            if revision != current and events:
                found.append(Change(current, tuple(events)))
                events = []
                if count >= BATCH_EVENTS_MAX or size >= BATCH_BYTES_MAX:
                    rows.close()
                    return Batch(found, revision, more=True)
            current = revision
            name = key.decode()
            entry = None if value is None else Entry(name, value, created, revision, lease)
            events.append(Event(name, entry))
            size += 0 if value is None else len(value)
        if events:
            found.append(Change(current, tuple(events)))
        return Batch(found, self._revision + 1, more=False)

    def leases(self) -> list[tuple[int, int]]:
        return self._db.execute("SELECT id, ttl_ms FROM leases").fetchall()

    def add_lease(self, lease_id: int, ttl_ms: int) -> None:
        self._change(lambda: self._remember(lease_id, ttl_ms))

    def _remember(self, lease_id: int, ttl_ms: int) -> None:
        self._db.execute("INSERT INTO leases VALUES (?, ?)", (lease_id, ttl_ms))

    def expire(self, lease_ids: Sequence[int]) -> None:
        def forget() -> None:
            for lease_id in lease_ids:
                keys = self._db.execute(
                    "SELECT key FROM entries WHERE lease = ? AND lease != 0 ORDER BY key", (lease_id,)
                ).fetchall()
                self._write([Delete(key.decode()) for (key,) in keys])
                self._db.execute("DELETE FROM leases WHERE id = ?", (lease_id,))

        self._change(forget)

    def copy_to(self, target: Path) -> None:
        try:
            self._db.execute("VACUUM INTO ?", (str(target),))
        except sqlite3.OperationalError as error:
            raise RequestError(
                f"The backup of {self._path} to {target} failed: {error}.",
                hint="Name a file that does not exist, in a folder with room.",
            ) from error


class EmbeddedStore(LocalStore):
    """Open with `await EmbeddedStore.open(path)`; `close` lets go of the file and its lock."""

    def __init__(self, path: Path, worker: Executor, runtime: Runtime) -> None:
        super().__init__(str(path), runtime)
        self.path = path
        self._worker = worker
        self._database: _Database | None = None
        self._lock_descriptor = -1
        self._stopped_by = ""

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        history_events_max: int = HISTORY_EVENTS_MAX,
        history_bytes_max: int = HISTORY_BYTES_MAX,
        runtime: Runtime = REAL,
    ) -> Self:
        """Open the database file, making it and its folder where missing.

        Raises RequestError(CONFLICT) where another process has it open, CorruptionError where it is damaged.
        Leases found in it get their whole TTL again: their holders may still be there.
        """
        worker = runtime.pool(1, "felix-metadata")
        store = cls(path, worker, runtime)

        def start() -> tuple[_Database, list[tuple[int, int]]]:
            store._lock_descriptor = _lock(path)
            _write_again(path)
            database = _Database(path, history_events_max, history_bytes_max)
            return database, database.leases()

        try:
            store._database, leases = await store._in_worker(start)
        except BaseException:
            await store._release()
            raise
        now_ms = runtime.clock.boot_ms()
        for lease_id, ttl_ms in leases:
            store._deadlines.grant(lease_id, ttl_ms, now_ms)
        if leases:
            store._start_sweeper()
        return store

    async def backup(self, target: Path) -> None:
        """A consistent copy of the store as of now, while it serves. `target` must not exist."""
        self._check_open()
        database = self._open_database()
        await self._in_worker(lambda: database.copy_to(target))

    async def _in_worker(self, work: Callable[[], _Answer]) -> _Answer:
        """Run in the worker thread; SQLite's errors become ours."""
        if self._stopped_by:
            raise self._stopped()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except FelixError:
            raise
        except sqlite3.OperationalError as error:
            code = sqlite_errors.result_code(error)
            if sqlite_errors.is_full(error):
                raise self._full() from error
            if code == sqlite3.SQLITE_BUSY:
                raise unavailable(
                    self.where, "another program holds its file", "Close what has the file open."
                ) from error
            if code == sqlite3.SQLITE_IOERR:
                self._stopped_by = str(error)
                raise self._stopped() from error
            raise unavailable(
                self.where, str(error), "Check that the file is there and that this user may write to it."
            ) from error
        except sqlite3.DatabaseError as error:
            raise CorruptionError(
                f"The metadata store {self.where} cannot be read: {error}.",
                hint=DAMAGED_HINT,
            ) from error
        except OSError as error:
            if is_full(error):
                raise self._full() from error
            raise unavailable(
                self.where, str(error), "Check that the folder exists and that this user may write to it."
            ) from error

    def _full(self) -> Exception:
        return unavailable(self.where, "the disk is full", "Make room; it goes on by itself.", Code.DISK_FULL)

    def _stopped(self) -> Exception:
        return unavailable(
            self.where,
            f"it stopped after an error of its disk ({self._stopped_by})",
            "Check the disk, then restart the broker; what was acknowledged is on it.",
        )

    def _open_database(self) -> _Database:
        assert self._database is not None
        return self._database

    async def _get(self, key: str) -> Entry | None:
        database = self._open_database()
        return await self._in_worker(lambda: database.get(key))

    async def _range(self, prefix: str, limit: int, after: str) -> Page:
        database = self._open_database()
        return await self._in_worker(lambda: database.range(prefix, limit, after))

    async def _commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        database = self._open_database()
        wake = self._wake()

        def commit() -> TransactResult:
            result = database.transact(compares, writes)
            # From here, not from the caller: it may have been cancelled while this ran.
            wake()
            return result

        return await self._in_worker(commit)

    def _wake(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop ended while the disk was busy
                loop.call_soon_threadsafe(self._signal)

        return wake

    async def _changes(self, prefix: str, from_revision: int) -> Batch:
        database = self._open_database()
        return await self._in_worker(lambda: database.changes(prefix, from_revision))

    async def _remember_lease(self, lease_id: int, ttl_ms: int) -> None:
        database = self._open_database()
        await self._in_worker(lambda: database.add_lease(lease_id, ttl_ms))

    async def _expire(self, lease_ids: Sequence[int]) -> None:
        database = self._open_database()
        wake = self._wake()

        def expire() -> None:
            database.expire(lease_ids)
            wake()

        await self._in_worker(expire)

    async def _release(self) -> None:
        def stop() -> None:
            if self._database is not None:
                self._database.close()
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

        await asyncio.get_running_loop().run_in_executor(self._worker, stop)
        self._worker.shutdown(wait=False)
