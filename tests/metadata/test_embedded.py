"""What only the embedded store must stand: other processes, crashes, damaged and full disks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from small_disk import fill, small_disk

from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from region.metadata.embedded import EmbeddedStore
from region.metadata.port import CompactedError
from region.metadata.transaction import Delete, Put

ROOT = Path(__file__).parents[2]

HOLD = """
import asyncio, sys
from pathlib import Path
from region.metadata.embedded import EmbeddedStore

async def hold():
    store = await EmbeddedStore.open(Path(sys.argv[1]))
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(hold())
"""

WRITE = """
import asyncio, sys
from pathlib import Path
from region.metadata.embedded import EmbeddedStore
from region.metadata.transaction import Delete, Put

async def write():
    store = await EmbeddedStore.open(Path(sys.argv[1]), history_events_max=100)
    for number in range(1_000_000):
        result = await store.transact([], [Put(f"/a/{number % 50}", b"%d" % number), Put("/last", b"%d" % number)])
        print(number, result.revision, flush=True)

asyncio.run(write())
"""


def spawn(program: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def end(process: subprocess.Popen[str]) -> str:
    """Kill it; answers what it had still said, whole lines only."""
    assert process.stdout is not None
    os.kill(process.pid, signal.SIGKILL)
    output = process.stdout.read()
    process.stdout.close()
    process.wait(timeout=30)
    return output[: output.rfind("\n") + 1]


@pytest.mark.fault
async def test_a_second_process_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    holder = spawn(HOLD, path)
    try:
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == "open\n"
        with pytest.raises(RequestError) as caught:
            await EmbeddedStore.open(path)
        assert caught.value.code is Code.CONFLICT
        assert f"pid {holder.pid}" in str(caught.value) and "Stop that broker first" in caught.value.hint
    finally:
        end(holder)
    async with await EmbeddedStore.open(path) as store:
        assert not (await store.load("")).entries, "a killed process holds nothing"
        with pytest.raises(RequestError):
            await EmbeddedStore.open(path)


@pytest.mark.fault
async def test_nothing_acknowledged_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    for _ in range(3):
        writer = spawn(WRITE, path)
        assert writer.stdout is not None
        lines = [await asyncio.to_thread(writer.stdout.readline) for _ in range(150)]
        lines += end(writer).splitlines()
        last, revision = map(int, lines[-1].split())
        async with await EmbeddedStore.open(path, history_events_max=100) as store:
            entry = await store.get("/last")
            assert entry is not None and entry.mod_revision >= revision
            assert int(entry.value) - last == entry.mod_revision - revision
            snapshot = await store.load("/a/")
            assert max(one.mod_revision for one in snapshot.entries) == entry.mod_revision, (
                "whole transactions"
            )
            with pytest.raises(CompactedError):
                await anext(store.watch("", 2))


async def test_everything_is_there_after_reopening_with_history_and_leases(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "metadata.db"
    async with await EmbeddedStore.open(path) as store:
        first = await store.transact([], [Put("/a", b"1")])
        lease = await store.grant(1_000, keep=False)
        await store.transact([], [Put("/bound", b"", lease=lease.id)])
    async with await EmbeddedStore.open(path) as store:
        changes = store.watch("", first.revision)
        assert (await anext(changes)).revision == first.revision
        assert (await anext(changes)).events[0].key == "/bound"
        async with asyncio.timeout(120):
            gone = await anext(changes)
        assert gone.events[0].key == "/bound" and gone.events[0].entry is None, "nobody renewed it"
        await changes.aclose()


async def test_history_is_bounded_by_events_and_by_bytes(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    async with await EmbeddedStore.open(path, history_events_max=1_000, history_bytes_max=100_000) as store:
        for number in range(40):
            await store.transact([], [Put("/a", bytes(10_000) + b"%d" % number)])
    with contextlib.closing(sqlite3.connect(path)) as database:
        [(kept, size)] = database.execute("SELECT count(*), sum(length(value)) FROM history").fetchall()
    assert 1 <= kept <= 11 and size <= 110_000


async def test_a_backup_is_a_store(tmp_path: Path) -> None:
    target = tmp_path / "backup.db"
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        await store.transact([], [Put("/a", b"1")])
        await store.backup(target)
        with pytest.raises(RequestError, match="failed"):
            await store.backup(target)
        await store.transact([], [Put("/a", b"2")])
        before = (await store.load("")).revision
    async with await EmbeddedStore.open(target) as restored:
        entry = await restored.get("/a")
        assert entry is not None and entry.value == b"1"
        with pytest.raises(CompactedError, match="put back to an earlier state"):
            await anext(restored.watch("", before + 1))


async def test_what_is_no_store_of_ours_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_bytes(b"this is not a database, and long enough to be read as one" * 10)
    with pytest.raises(CorruptionError, match="cannot be read"):
        await EmbeddedStore.open(text)
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE birds (name TEXT)")
    before = other.read_bytes()
    with pytest.raises(RequestError, match="another program"):
        await EmbeddedStore.open(other)
    assert other.read_bytes() == before
    newer = tmp_path / "newer.db"
    await (await EmbeddedStore.open(newer)).close()
    with contextlib.closing(sqlite3.connect(newer)) as database:
        database.execute("PRAGMA user_version=9")
    with pytest.raises(RequestError, match="format 9; this Felix reads format 1") as caught:
        await EmbeddedStore.open(newer)
    assert caught.value.code is Code.UNSUPPORTED


async def test_a_damaged_page_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    async with await EmbeddedStore.open(path) as store:
        for number in range(200):
            await store.transact([], [Put(f"/a/{number:04}", bytes(200))])
    raw = bytearray(path.read_bytes())
    for position in range(4096, len(raw), 4096):
        raw[position : position + 16] = b"\xa5" * 16
    path.write_bytes(raw)
    with pytest.raises(CorruptionError):
        await EmbeddedStore.open(path)


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="Check that the folder exists"):
        await EmbeddedStore.open(tmp_path / "file" / "metadata.db")


async def test_a_full_disk_refuses_writes_keeps_reads_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    """The database is given a page limit, which SQLite answers exactly like a full disk."""
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        await store.transact([], [Put("/a", b"1")])
        await store._in_worker(lambda database: database._db.execute("PRAGMA max_page_count=40").fetchone())
        with pytest.raises(UnavailableError) as caught:
            for number in range(100):
                await store.transact([], [Put(f"/b/{number}", bytes(50_000))])
        assert caught.value.code is Code.DISK_FULL
        before = await store.load("")
        assert before.entries[0].value == b"1"
        await store._in_worker(
            lambda database: database._db.execute("PRAGMA max_page_count=100000").fetchone()
        )
        after = await store.transact([], [Put("/c", bytes(50_000))])
        assert after.revision == before.revision + 1, "the refused write left no trace"


async def test_a_full_disk_takes_small_writes_as_long_as_it_is_full(tmp_path: Path) -> None:
    kept: dict[str, bytes] = {}
    with small_disk(tmp_path / "disk", "16m") as disk:
        path = disk / "metadata.db"
        async with await EmbeddedStore.open(path, history_events_max=500) as store:
            for number in range(500):
                kept[f"/s/{number}"] = bytes(300)
                await store.transact([], [Put(f"/s/{number}", bytes(300))])
            ballast = fill(disk)
            for number in range(3_000):
                key = f"/s/{number % 500}"
                if number % 3:
                    kept[key] = b"%d" % number * 50
                    await store.transact([], [Put(key, kept[key])])
                else:
                    kept.pop(key, None)
                    await store.transact([], [Delete(key)])
            with pytest.raises(UnavailableError, match="the disk is full"):
                await store.transact([], [Put(f"/large/{number}", bytes(50_000)) for number in range(25)])
            kept["/last"] = b"1"
            await store.transact([], [Put("/last", b"1")])
        async with await EmbeddedStore.open(path) as store:
            found = await store.load("")
            assert {entry.key: bytes(entry.value) for entry in found.entries} == kept
            for key in list(kept):
                await store.transact([], [Delete(key)])
            assert not (await store.load("")).entries
            ballast.unlink()
            await store.transact([], [Put(f"/large/{number}", bytes(50_000)) for number in range(25)])


async def test_a_transaction_that_fails_at_its_end_leaves_no_trace(tmp_path: Path) -> None:
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        await store.transact([], [Put("/a", b"1")])
        await store._in_worker(
            lambda database: database._db.execute(
                "CREATE TEMP TRIGGER fail AFTER UPDATE ON main.state BEGIN SELECT RAISE(ABORT, 'on purpose'); END"
            ).fetchone()
        )
        with pytest.raises(CorruptionError, match="on purpose"):
            await store.transact([], [Put("/a", b"2"), Put("/b", b"2")])
        await store._in_worker(lambda database: database._db.execute("DROP TRIGGER fail").fetchone())
        snapshot = await store.load("")
        assert [(entry.key, entry.value) for entry in snapshot.entries] == [("/a", b"1")]
        assert (await store.transact([], [Put("/a", b"3")])).revision == snapshot.revision + 1 == 3


async def test_a_cancelled_writer_leaves_the_store_whole(tmp_path: Path) -> None:
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        changes = store.watch("/a", 2)
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0.05)
        writing = asyncio.create_task(store.transact([], [Put("/a", b"1")]))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        async with asyncio.timeout(120):
            if await store.get("/a") is None:  # cancelled before it began
                await store.transact([], [Put("/a", b"1")])
            assert (await waiting).revision == 2, "watchers hear of it although its writer went away"
        await changes.aclose()


async def test_a_start_on_a_full_disk_lets_go_of_the_lock_and_says_what_is_the_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("region.metadata.embedded.os.pwrite", full)
        store = await EmbeddedStore.open(tmp_path / "metadata.db")
        await store.close()
        patched.setattr("region.metadata.embedded.os.open", full)
        with pytest.raises(UnavailableError, match="the disk is full") as caught:
            await EmbeddedStore.open(tmp_path / "metadata.db")
        assert caught.value.code is Code.DISK_FULL
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        await store.transact([], [Put("/a", b"1")])


async def test_what_a_killed_process_left_in_the_page_cache_is_written_again_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its sync had failed the kernel calls the pages clean, and a sync alone would do nothing."""
    path = tmp_path / "metadata.db"
    writer = spawn(WRITE, path)
    assert writer.stdout is not None
    for _ in range(20):
        await asyncio.to_thread(writer.stdout.readline)
    end(writer)
    log = path.with_name("metadata.db-wal")
    size = log.stat().st_size
    assert size
    written, synced = 0, list[int]()

    def pwrite(file: int, data: bytes, position: int, write=os.pwrite) -> int:  # type: ignore[no-untyped-def]
        nonlocal written
        if os.path.samestat(os.fstat(file), log.stat()):
            assert position == written and not synced
            written += len(data)
        return int(write(file, data, position))

    def fsync(file: int, sync=os.fsync) -> None:  # type: ignore[no-untyped-def]
        if log.exists() and os.path.samestat(os.fstat(file), log.stat()):
            synced.append(written)
        sync(file)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    connect = sqlite3.connect

    def connected(*arguments: object, **named: object) -> sqlite3.Connection:
        assert synced[:1] == [size]
        return connect(*arguments, **named)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(sqlite3, "connect", connected)
    async with await EmbeddedStore.open(path) as store:
        assert await store.get("/last") is not None
