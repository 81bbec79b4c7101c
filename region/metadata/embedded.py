"""The embedded metadata store: SQLite, for a region of one broker on one machine. Nothing to start, nothing to run.

Invariants:
- an acknowledged transaction is on the disk: WAL mode with `synchronous=FULL` syncs the log at every commit;
- one process at a time: a lock file beside the database is held for as long as the store is open;
- all SQLite work happens in one worker thread; the event loop never waits for the disk;
- after a failed read or write of the disk the store stops, and is opened again by itself (see below). It does not retry a sync and then acknowledge;
- a full disk takes small writes all the same (room is kept in the file, and old history is given up), so that streams can be
  deleted, and retentions shortened, to make room;
- what is read at a start, or once it is opened again, is on the disk before anybody is told of it.

Opening again, after the pauses of `felix.reopening` and in the steps of a start:
1. every connection is closed, so that nothing is taken from SQLite's memory; whether the folder is still the one that was locked is looked at;
2. what the write-ahead log holds is written once more and synced, and the folder: a failed sync leaves pages in the page cache that the kernel
   calls clean and never writes;
3. the file is opened and looked through, and the log brought into it, which is synced;
4. its revision has to be the last one that was acknowledged, or the one of the transaction whose commit failed: whoever waits for that one hears now whether it
   happened. A file that has less stays closed until a restart.

Put the file on a local disk: file locks and syncs of network file systems do not keep these promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, Self, TypeVar

from felix.errors import Code, CorruptionError, FelixError, RequestError, UnavailableError
from felix.files import sync_folder
from felix.reopening import SOUND_ALONE_MS, Reopening
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.storage import sqlite_errors
from felix.storage.disk import HeldError, is_elsewhere, lock_file
from felix.storage.disk_waits import DiskWaits
from felix.storage.port import is_full, lacks_resources
from region.metadata.lease import cancel_and_wait
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
from region.metadata.port import FIRST_REVISION, PAGE_BYTES_MAX, OutcomeUnknownError
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

log = logging.getLogger("felix.region.metadata")

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
LOG_BYTES_MAX: Final = 16 << 20
"""Of the write-ahead log. SQLite brings it into the database at 4 MiB, and says nothing where it cannot: the log would grow without an end."""
OUTCOME_S: Final = 10.0
"""How long whoever made a change waits to hear whether it happened, where its commit failed: the first try to open the store again comes before."""
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
        return lock_file(_lock_of(path))
    except HeldError as error:
        raise RequestError(
            f"The metadata store {path} is in use by another process (pid {error.holder}); "
            "an embedded store serves one broker.",
            code=Code.CONFLICT,
            hint="Stop that broker first, or give this one its own state folder. "
            "Several brokers of one region need etcd (docs/metadata.md).",
        ) from None


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _write_again(path: Path) -> None:
    """Have what SQLite takes from its write-ahead log on the disk before it does, or that there is none. A process that was killed between a write and
    its sync left it in the page cache alone, and where a sync failed the kernel calls pages clean that it could not write: they reach the disk only if
    they are written once more. Overwriting takes no room. Blocks; nobody has the file open. Raises OSError."""
    log = _log_of(path)
    if log.exists():
        with log.open("r+b", buffering=0) as file:
            position = 0
            while data := os.pread(file.fileno(), _WRITE_BYTES, position):
                position += os.pwrite(file.fileno(), data, position)
            os.fsync(file.fileno())
    sync_folder(path.parent)


def _read_through(path: Path) -> None:
    """Raises OSError where the disk does not give all of the store's files."""
    for each in (path, _log_of(path)):
        with contextlib.suppress(FileNotFoundError), each.open("rb", buffering=0) as file:
            while file.read(_WRITE_BYTES):
                pass


@contextlib.contextmanager
def _unless_full_or_busy() -> Iterator[None]:
    """What helps a disk that is full, and has no room for it, or is kept from it by who reads the file: it is left for later."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if not (sqlite_errors.is_full(error) or sqlite_errors.is_busy(error)):
            raise


class _Doubt:
    """A transaction whose commit failed: it is known once the store is open again whether it happened. `revision`: the one that it would have."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self.settled = asyncio.Event()
        self.happened: bool | None = None
        """None also once it is settled: the store is not opened again"""


class _DoubtError(Exception):
    """Of the worker: COMMIT failed, and the transaction may be in the write-ahead log all the same."""

    def __init__(self, revision: int) -> None:
        super().__init__(revision)
        self.doubt = _Doubt(revision)


DAMAGED_HINT: Final = "Look at the disk, and restart the broker: one that could not be read for a moment looks the same. If it stays so, keep the file, and put back a backup (docs/metadata.md)."


class _Database:
    """The connection and every statement. Lives in the worker thread; nothing here awaits."""

    def __init__(self, path: Path, history_events_max: int, history_bytes_max: int) -> None:
        self.trouble: BaseException | None = None
        """what failed beside a change that was made: the disk is not to be trusted"""
        self._path = path
        self._events_max = history_events_max
        self._bytes_max = history_bytes_max
        self._revision = 0
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
        with self._noting():
            self._keep_room()

    @property
    def revision(self) -> int:
        """Of the last transaction that was acknowledged."""
        return self._revision

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
        db.execute(f"PRAGMA journal_size_limit={LOG_BYTES_MAX}")
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
        before = self._revision
        try:
            yield
            self._end_transaction(before)
        except BaseException:
            if self._db.in_transaction:
                with self._noting():
                    self._db.execute("ROLLBACK")
            raise

    def _end_transaction(self, before: int) -> None:
        """Raises _DoubtError where the disk fails and it has a revision: the log may have it, on the disk or in the page cache. Where it is full the log has
        it not: the frame that commits is written last."""
        try:
            self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if self._revision == before or not sqlite_errors.is_of_disk(error):
                raise
            raise _DoubtError(self._revision) from error

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """For what is done beside a change: it may not fail for whoever asked for that, and has the store opened again."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self.trouble = error
        except _DoubtError as error:
            self.trouble = error.__cause__

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

    def bring_in(self) -> None:
        """Have all that the write-ahead log holds in the database, and on the disk. Raises sqlite3.Error; not where there is no room for it, or somebody
        reads the file."""
        with _unless_full_or_busy():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _bound_log(self) -> None:
        """Raises what kept SQLite from bringing a long log into the database. It keeps that to itself."""
        if _log_of(self._path).stat().st_size > LOG_BYTES_MAX:
            with _unless_full_or_busy():
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _keep_room(self) -> None:
        """Give the database free pages, and the write-ahead log as many: on a full disk, writes go where these are."""
        with _unless_full_or_busy():
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
        with _unless_full_or_busy():
            self._db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()

    def _change(self, change: Callable[[], None]) -> None:
        """Commit `change`; on a full disk in the room that is kept for that, or else where older history was."""
        if not (self._commit(change) or self._commit(change)):
            self._commit(lambda: self._compact(self._events // 2, self._bytes_max))
            if not self._commit(change):
                raise _full_disk()
        with self._noting():
            self._keep_room()
            self._bound_log()

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

    def __init__(
        self, path: Path, worker: Executor, runtime: Runtime, history_events_max: int, history_bytes_max: int
    ) -> None:
        super().__init__(str(path), runtime)
        self.path = path
        self._worker = worker
        self._history = history_events_max, history_bytes_max
        self._loop = asyncio.get_running_loop()
        self._database: _Database | None = None
        self._lock_descriptor = -1
        self._failure = ""
        """why it has stopped; empty where it has not. Set in the worker, so that nothing that waits for it goes on with what has failed"""
        self._is_over = False
        """it is not opened again before a restart"""
        self._doubt: _Doubt | None = None
        self._waits = DiskWaits(runtime.clock.monotonic)
        self._reopening = Reopening(sound_ms=SOUND_ALONE_MS)
        self._reopener: asyncio.Task[None] | None = None
        self._opened_again = 0

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
        store = cls(path, worker, runtime, history_events_max, history_bytes_max)

        def start() -> list[tuple[int, int]]:
            store._lock_descriptor = _lock(path)
            store._database = store._open_file()
            leases = store._database.leases()
            if store._database.trouble is not None:
                store._stop(store._database.trouble)
            return leases

        try:
            leases = await store._translated(start)
        except BaseException:
            await store._release()
            raise
        store._take_leases(leases)
        return store

    def _open_file(self) -> _Database:
        """In the worker. Raises OSError, sqlite3.Error, CorruptionError, RequestError."""
        _write_again(self.path)
        database = _Database(self.path, *self._history)
        try:
            # For the name of a new write-ahead log: SQLite keeps to itself that its own sync of the folder failed.
            sync_folder(self.path.parent)
        except BaseException:
            database.close()
            raise
        return database

    def _take_leases(self, leases: Sequence[tuple[int, int]]) -> None:
        """Those in the file that are not known: their holders may still be there, or were never told of them."""
        now_ms = self.clock.boot_ms()
        for lease_id, ttl_ms in leases:
            if not self._deadlines.is_known(lease_id):
                self._deadlines.grant(lease_id, ttl_ms, now_ms)
        if leases:
            self._start_sweeper()

    async def backup(self, target: Path) -> None:
        """A consistent copy of the store as of now, while it serves. `target` must not exist."""
        self._check_open()
        await self._in_worker(lambda database: database.copy_to(target))

    # What the disk does

    def trouble(self) -> str:
        """See MetadataStore."""
        return str(self._stopped()) if self._failure else self.hung()

    def hung(self) -> str:
        """See MetadataStore."""
        told = "" if self._failure else self._waits.told(f"The metadata store {self.where}")
        return (
            f"{told} What is changed or asked of it is answered once the disk does; it goes on by itself. Look at the disk."
            if told
            else ""
        )

    @property
    def opened_again(self) -> int:
        """See MetadataStore."""
        return self._opened_again

    async def _in_worker(self, work: Callable[[_Database], _Answer]) -> _Answer:
        """Run in the worker thread; SQLite's errors become ours, and _DoubtError."""
        return await self._translated(lambda: self._work(work))

    def _work(self, work: Callable[[_Database], _Answer]) -> _Answer:
        """In the worker."""
        if self._failure:
            raise self._stopped()
        assert self._database is not None
        try:
            with self._waits.asked():
                answer = work(self._database)
        except _DoubtError as error:
            assert error.__cause__ is not None
            self._stop(error.__cause__, error.doubt)
            raise
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, OSError) and lacks_resources(error):
                raise
            if isinstance(error, sqlite3.Error) and not sqlite_errors.is_of_disk(error):
                raise
            self._stop(error)
            raise self._stopped() from error
        if self._database.trouble is not None:
            self._stop(self._database.trouble)
        return answer

    async def _translated(self, work: Callable[[], _Answer]) -> _Answer:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except sqlite3.OperationalError as error:
            if sqlite_errors.is_full(error):
                raise self._full() from error
            if sqlite_errors.is_busy(error):
                raise unavailable(
                    self.where, "another program holds its file", "Close what has the file open."
                ) from error
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

    def _stopped(self) -> UnavailableError:
        if self._is_over:
            return UnavailableError(
                f"The metadata store {self.where} has stopped, and is not opened again before a restart: {self._failure}",
                hint="Look at the disk. Put back a backup (docs/metadata.md), or restart the broker to go on with what is there.",
            )
        return unavailable(
            self.where,
            f"it stopped after an error of its disk ({self._failure})"
            + ("" if self._doubt is None else "; what was being changed then may have been made or not"),
            "It is opened again by itself, with all that was acknowledged. Look at the disk.",
        )

    # Opening again

    def _stop(self, error: BaseException, doubt: _Doubt | None = None) -> None:
        """In the worker: nothing more is asked of the file, and it is opened again."""
        assert not self._failure
        self._failure, self._doubt = str(error), doubt
        with contextlib.suppress(RuntimeError):  # the loop ended while the disk was busy
            self._loop.call_soon_threadsafe(self._begin_reopening)

    def _begin_reopening(self) -> None:
        if self._closed:
            return
        log.error("%s", self._stopped())
        self._reopening.failed(self.clock.boot_ms())
        self._reopener = self._loop.create_task(self._reopen(), name="opening the metadata store again")

    async def _reopen(self) -> None:
        reopening = self._reopening
        while True:
            await asyncio.sleep(max(0, reopening.due_ms - self.clock.boot_ms()) / 1_000)
            try:
                doubt, revision, leases = await self._loop.run_in_executor(self._worker, self._open_again)
            except CorruptionError as error:
                self._failure, self._is_over = error.sentence, True
                log.error("%s", self._stopped())
                self._settle(self._doubt, None)
                return
            except (sqlite3.Error, OSError, FelixError) as error:
                reopening.failed(self.clock.boot_ms())
                log.error(
                    "the metadata store %s could not be opened again, and is tried in %d s: %s",
                    self.where, reopening.pause_ms // 1_000, error,
                )  # fmt: skip
                continue
            break
        reopening.opened(self.clock.boot_ms())
        self._opened_again += 1
        log.warning("the metadata store %s is open again, and goes on", self.where)
        self._settle(doubt, revision)
        self._take_leases(leases)
        # Who watches has not seen what was in doubt, and may have been refused.
        self._signal()

    def _settle(self, doubt: _Doubt | None, revision: int | None) -> None:
        """Tell who made the change in doubt; `revision`: what was found. Another one may be in doubt by now, and stays so."""
        if doubt is not None:
            if self._doubt is doubt:
                self._doubt = None
            doubt.happened = None if revision is None else revision == doubt.revision
            doubt.settled.set()

    def _open_again(self) -> tuple[_Doubt | None, int, list[tuple[int, int]]]:
        """In the worker; what was in doubt, and the revision and the leases that the file has, before anything that waits for the worker changes them, or fails. Raises CorruptionError where it is damaged, or has less than was acknowledged; else it can be tried
        again."""
        assert self._database is not None
        self._require_there()
        with contextlib.suppress(sqlite3.Error):
            # SQLite brings what was acknowledged into the database, as far as the disk lets it.
            self._database.close()
        try:
            database = self._open_checked()
        except (CorruptionError, sqlite3.DatabaseError) as error:
            if isinstance(error, sqlite3.Error) and not sqlite_errors.may_be_disk(error):
                raise
            # A disk that does not give the file for a moment looks the same.
            _read_through(self.path)
            try:
                database = self._open_checked()
            except sqlite3.DatabaseError as again:
                if not sqlite_errors.may_be_disk(again):
                    raise
                raise CorruptionError(f"it is damaged: {again}.") from again
        leases = database.leases()
        doubt, revision = self._doubt, database.revision
        self._database, self._failure = database, ""
        return doubt, revision, leases

    def _open_checked(self) -> _Database:
        assert self._database is not None
        known, doubt = self._database.revision, self._doubt
        database = self._open_file()
        try:
            database.bring_in()
            if database.trouble is not None:
                raise database.trouble
            if database.revision not in (known, known if doubt is None else doubt.revision):
                raise CorruptionError(
                    f"its revision is {database.revision}, and changes up to {known} were acknowledged."
                )
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.close()
            raise
        return database

    def _require_there(self) -> None:
        """Raises OSError where another folder is at the path: moved, unmounted, or with another one mounted over it."""
        if is_elsewhere(_lock_of(self.path), self._lock_descriptor):
            raise OSError(errno.ENODEV, "it is not the folder that was opened", str(self.path.parent))
        # SQLite would make a new one.
        self.path.stat()

    async def _outcome(self, doubt: _Doubt) -> TransactResult:
        """What became of a transaction whose commit failed. Raises UnavailableError where it did not happen, OutcomeUnknownError where that is not
        known in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUTCOME_S):
                await doubt.settled.wait()
        if doubt.happened:
            return TransactResult(True, doubt.revision)
        if doubt.happened is None:
            raise OutcomeUnknownError(
                f"The disk of the metadata store {self.where} failed as a change was committed: it may have been made or not.",
                hint="The store is opened again by itself. Read before writing again.",
                retry_after_ms=1_000,
            )
        raise unavailable(
            self.where,
            "its disk failed as the change was committed, and it was not made",
            "Try again; look at the disk.",
        )

    # The port

    async def _get(self, key: str) -> Entry | None:
        return await self._in_worker(lambda database: database.get(key))

    async def _range(self, prefix: str, limit: int, after: str) -> Page:
        return await self._in_worker(lambda database: database.range(prefix, limit, after))

    async def _commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        wake = self._wake()

        def commit(database: _Database) -> TransactResult:
            result = database.transact(compares, writes)
            # From here, not from the caller: it may have been cancelled while this ran.
            wake()
            return result

        try:
            return await self._in_worker(commit)
        except _DoubtError as error:
            return await self._outcome(error.doubt)

    def _wake(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop ended while the disk was busy
                loop.call_soon_threadsafe(self._signal)

        return wake

    async def _changes(self, prefix: str, from_revision: int) -> Batch:
        return await self._in_worker(lambda database: database.changes(prefix, from_revision))

    async def _remember_lease(self, lease_id: int, ttl_ms: int) -> None:
        # Where its commit fails it may stand in the file: nothing is bound to it, and it runs out.
        await self._in_worker(lambda database: database.add_lease(lease_id, ttl_ms))

    async def _expire(self, lease_ids: Sequence[int]) -> None:
        wake = self._wake()

        def expire(database: _Database) -> None:
            database.expire(lease_ids)
            wake()

        try:
            await self._in_worker(expire)
        except _DoubtError as error:
            # Again is no error: what happened is not done twice.
            raise self._stopped() from error

    async def _release(self) -> None:
        def stop() -> None:
            if self._database is not None:
                self._database.close()
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

        await cancel_and_wait(self._reopener)
        self._settle(self._doubt, None)
        await asyncio.get_running_loop().run_in_executor(self._worker, stop)
        self._worker.shutdown(wait=False)
