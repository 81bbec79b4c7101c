"""The embedded store on a disk that fails or hangs for a moment: it goes on by itself, with all that was acknowledged and nothing that was refused."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from disks.play_store import IN_DOUBT, Play
from disks.store_oracle import Oracle

import felix.reopening
from felix.errors import UnavailableError
from region.metadata import embedded
from region.metadata.embedded import EmbeddedStore
from region.metadata.port import OutcomeUnknownError
from region.metadata.transaction import Put

KINDS = [
    ("sync", "metadata.db-wal"),
    ("sync", "metadata.db"),
    ("write", "metadata.db-wal"),
    ("write", "metadata.db"),
    ("read", "metadata.db"),
    ("folder", "-"),
    ("remove", "metadata.db"),
    ("truncate", "metadata.db"),
]
WAIT_S = 30.0


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened again after 50 ms."""
    monkeypatch.setattr(felix.reopening, "REOPEN_MS_MIN", 50)
    monkeypatch.setattr(felix.reopening, "REOPEN_MS_MAX", 200)


def oracle_of(play: Play) -> Oracle:
    assert isinstance(play.judge, Oracle)
    return play.judge


@pytest.mark.fault
def test_each_call_of_sqlite_may_fail_once_and_all_goes_on_without_a_restart(tmp_path: Path) -> None:
    play = Play(tmp_path, 1)
    try:
        play.start()
        play.until_done()
        for call, path in KINDS:
            for number in (errno.EIO, errno.ENOSPC):
                play.disk.fail(call, path, number, skip=len(play.disk.failed()) % 3)
                # Also as it is opened again.
                time.sleep(0.1)
                play.disk.fail_each([(call, path, number, 0, 1, 0), ("sync", "-", errno.EIO, 2, 1, 0)])
                time.sleep(0.1)
                play.disk.heal()
                play.until_done()
        assert oracle_of(play).opened_again >= 3 and len(play.disk.failed()) >= 10
        assert oracle_of(play).starts == 1
        play.end()
        for _ in range(2):
            play.disk.cut()
            play.start()
            play.until_done()
            play.end()
    finally:
        play.kill()
    assert oracle_of(play).starts == 3


@pytest.mark.fault
def test_what_a_failed_sync_dropped_is_not_believed_when_the_process_is_killed_then_and_the_power_goes(
    tmp_path: Path,
) -> None:
    play = Play(tmp_path, 2, drops=100, forgets=0)
    try:
        for _ in range(4):
            play.start()
            play.until_done()
            play.disk.fail("sync", "metadata.db-wal", errno.EIO, times=1_000)
            time.sleep(0.1)
            play.end()
            play.disk.heal()
            play.start()
            play.until_done()
            play.end()
            play.disk.cut()
        play.finish()
    finally:
        play.kill()
    assert oracle_of(play).starts == 9


@pytest.mark.fault
def test_a_change_in_doubt_that_is_in_the_log_is_not_refused_and_then_there(tmp_path: Path) -> None:
    play = Play(tmp_path, 3, drops=100, forgets=0)
    try:
        play.start()
        for _ in range(6):
            play.until_done()
            opened = oracle_of(play).opened_again
            play.disk.fail_each(IN_DOUBT)
            limit = time.monotonic() + WAIT_S
            while oracle_of(play).opened_again == opened:
                assert time.monotonic() < limit
                time.sleep(0.02)
                play.look()
            play.disk.heal()
        play.until_done()
        play.end()
        play.finish()
    finally:
        play.kill()
    assert oracle_of(play).starts == 2


def error(code: int, sentence: str) -> sqlite3.OperationalError:
    made = sqlite3.OperationalError(sentence)
    made.sqlite_errorcode = code
    return made


def fails(_: object) -> None:
    raise error(sqlite3.SQLITE_IOERR, "disk I/O error")


def looks_damaged(_: object) -> None:
    raise error(sqlite3.SQLITE_CORRUPT, "database disk image is malformed")


async def stop(store: EmbeddedStore) -> None:
    with pytest.raises(UnavailableError, match="opened again by itself"):
        await store._in_worker(fails)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.01)


async def test_it_says_that_it_has_stopped_refuses_at_once_and_goes_on(tmp_path: Path, soon: None) -> None:
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        await store.transact([], [Put("/a", b"1")])
        watched = store.watch("/a", 2)
        assert (await anext(watched)).revision == 2
        waiting = asyncio.ensure_future(anext(watched))
        lease = await store.grant(60_000)
        assert store.trouble() == ""
        await stop(store)
        assert "disk I/O error" in store.trouble() and not store.hung()
        with pytest.raises(UnavailableError) as refused:
            await store.get("/a")
        assert refused.value.retry_after_ms and not isinstance(refused.value, OutcomeUnknownError)
        await lease.renew()
        await until(lambda: store.opened_again == 1)
        assert store.trouble() == ""
        assert (await store.transact([], [Put("/a", b"2", lease=lease.id)])).revision == 3
        assert (await waiting).revision == 3, "who waited was not told of it, and missed nothing"
        await watched.aclose()


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with another's change behind it"])
@pytest.mark.parametrize("is_there", [True, False])
async def test_who_made_a_change_whose_commit_failed_hears_whether_it_happened(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch, is_there: bool, others: bool
) -> None:
    """SQLite says that the commit failed, and the log has it, or not."""

    def open_again(store: EmbeddedStore, *, original: Any = EmbeddedStore._open_again) -> Any:
        found = original(store)
        if others:
            # The next of those who wait for the worker, on a busy machine before the loop hears that the file is open.
            assert store._database is not None
            store._database.transact([], [Put("/b", b"")])
        return found

    monkeypatch.setattr(EmbeddedStore, "_open_again", open_again)

    class Failing(sqlite3.Connection):
        told = False

        def execute(self, statement: str, *rest: Any) -> sqlite3.Cursor:
            if statement == "COMMIT" and Failing.told:
                Failing.told = False
                super().execute("COMMIT" if is_there else "ROLLBACK")
                raise error(sqlite3.SQLITE_IOERR, "disk I/O error")
            return super().execute(statement, *rest)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Failing))
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        await store.transact([], [Put("/a", b"1")])
        Failing.told = True
        if is_there:
            assert (await store.transact([], [Put("/a", b"2")])).revision == 3
        else:
            with pytest.raises(UnavailableError, match="it was not made") as refused:
                await store.transact([], [Put("/a", b"2")])
            assert not isinstance(refused.value, OutcomeUnknownError)
        entry = await store.get("/a")
        assert entry is not None and entry.value == (b"2" if is_there else b"1")
        # Nobody can say within the time.
        monkeypatch.setattr(embedded, "OUTCOME_S", 0.05)
        monkeypatch.setattr(felix.reopening, "REOPEN_MS_MIN", 500)
        Failing.told = True
        with pytest.raises(OutcomeUnknownError, match="made or not"):
            await store.transact([], [Put("/a", b"3")])
        # What came behind it does not take its place.
        with pytest.raises(UnavailableError, match="may have been made or not"):
            await store.transact([], [Put("/a", b"4")])
        await until(lambda: store.opened_again == 2)
        entry = await store.get("/a")
        assert entry is not None and entry.value == (b"3" if is_there else b"1")


@pytest.mark.parametrize("is_there", [True, False])
async def test_two_changes_whose_commits_fail_one_after_the_other_are_not_taken_for_each_other(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """The second one waited for the worker, and fails before the loop hears that the file was opened again for the first."""
    second: list[embedded._Doubt] = []

    class Failing(sqlite3.Connection):
        told = False

        def execute(self, statement: str, *rest: Any) -> sqlite3.Cursor:
            if statement == "COMMIT" and Failing.told:
                Failing.told = False
                super().execute("COMMIT" if is_there else "ROLLBACK")
                raise error(sqlite3.SQLITE_IOERR, "disk I/O error")
            return super().execute(statement, *rest)

    def open_again(store: EmbeddedStore, *, original: Any = EmbeddedStore._open_again) -> Any:
        found = original(store)
        if not second:
            Failing.told = True
            with pytest.raises(embedded._DoubtError) as failed:
                store._work(lambda database: database.transact([], [Put("/b", b"")]))
            second.append(failed.value.doubt)
        return found

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Failing))
    monkeypatch.setattr(EmbeddedStore, "_open_again", open_again)
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        await store.transact([], [Put("/a", b"1")])
        Failing.told = True
        if is_there:
            assert (await store.transact([], [Put("/a", b"2")])).revision == 3
        else:
            with pytest.raises(UnavailableError, match="it was not made"):
                await store.transact([], [Put("/a", b"2")])
        async with asyncio.timeout(WAIT_S):
            await second[0].settled.wait()
        assert second[0].happened == is_there
        await until(lambda: store.opened_again == 2)
        assert (await store.get("/b") is not None) == is_there


async def test_a_lease_that_is_given_back_while_the_disk_fails_is_swept_afterwards(
    tmp_path: Path, soon: None
) -> None:
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        lease = await store.grant(3_600_000)
        await store.transact([], [Put("/bound", b"", lease=lease.id)])
        await stop(store)
        with pytest.raises(UnavailableError):
            await lease.revoke()
        await until(lambda: store.opened_again == 1)
        async with asyncio.timeout(WAIT_S):
            while await store.get("/bound") is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_file_that_has_less_than_was_acknowledged_stays_closed_and_says_so(
    tmp_path: Path, soon: None
) -> None:
    path = tmp_path / "metadata.db"
    async with await EmbeddedStore.open(path) as store:
        await store.transact([], [Put("/a", b"1")])
        await store.backup(tmp_path / "before.db")
        await store.transact([], [Put("/a", b"2")])
        await stop(store)
        with (
            closing(sqlite3.connect(tmp_path / "before.db")) as before,
            closing(sqlite3.connect(path)) as now,
        ):
            before.backup(now)
        await until(lambda: "not opened again before a restart" in store.trouble())
        assert "changes up to 3 were acknowledged" in store.trouble() and "backup" in store.trouble()
        with pytest.raises(UnavailableError):
            await store.get("/a")
        assert not store.opened_again
    async with await EmbeddedStore.open(path) as store:
        assert await store.get("/a") is not None, "a restart goes on with what is there"


async def test_damage_is_told_from_a_disk_that_does_not_give_the_file_for_a_moment(
    tmp_path: Path, soon: None
) -> None:
    path = tmp_path / "metadata.db"
    async with await EmbeddedStore.open(path) as store:
        for number in range(200):
            await store.transact([], [Put(f"/a/{number:04}", bytes(200))])
        with pytest.raises(UnavailableError):
            await store._in_worker(looks_damaged)
        await until(lambda: store.opened_again == 1)
        assert await store.get("/a/0000") is not None

        def damage(database: embedded._Database) -> None:
            database.bring_in()
            raw = bytearray(path.read_bytes())
            for position in range(4096, len(raw), 4096):
                raw[position : position + 16] = b"\xa5" * 16
            path.write_bytes(raw)
            fails(database)

        with pytest.raises(UnavailableError):
            await store._in_worker(damage)
        await until(lambda: "not opened again before a restart" in store.trouble())
        assert "damaged" in store.trouble() or "malformed" in store.trouble()


async def test_another_folder_in_its_place_is_left_alone_until_its_own_is_back(
    tmp_path: Path, soon: None
) -> None:
    folder, aside = tmp_path / "data", tmp_path / "aside"
    async with await EmbeddedStore.open(folder / "metadata.db") as store:
        await store.transact([], [Put("/a", b"1")])
        folder.rename(aside)
        await stop(store)
        folder.mkdir()
        await asyncio.sleep(0.3)
        assert store.trouble() and not list(folder.iterdir())
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        await asyncio.sleep(0.3)
        assert store.trouble(), "a copy is not the folder"
        shutil.rmtree(folder)
        aside.rename(folder)
        await until(lambda: store.opened_again == 1)
        entry = await store.get("/a")
        assert entry is not None and entry.value == b"1"


async def test_a_disk_that_hangs_is_told_and_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("felix.storage.disk_waits.HUNG_S", 0.1)
    goes_on = threading.Event()
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        hanging = asyncio.ensure_future(store._in_worker(lambda _: goes_on.wait()))
        writing = asyncio.ensure_future(store.transact([], [Put("/a", b"1")]))
        await until(lambda: "waits for its disk" in store.hung())
        assert store.trouble() == store.hung() and not writing.done()
        goes_on.set()
        await hanging
        assert (await writing).succeeded and not store.trouble()


async def test_a_log_that_sqlite_cannot_bring_into_the_database_does_not_grow_without_an_end(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite keeps to itself that its checkpoints fail: the change is made, and the store is opened again."""

    class Failing(sqlite3.Connection):
        told = False

        def execute(self, statement: str, *rest: Any) -> sqlite3.Cursor:
            if Failing.told and "wal_checkpoint" in statement:
                raise error(sqlite3.SQLITE_IOERR, "disk I/O error")
            return super().execute(statement, *rest)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Failing))
    monkeypatch.setattr(embedded, "LOG_BYTES_MAX", 1 << 20)
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        Failing.told = True
        number = 0
        while not store.trouble():
            number += 1
            assert (await store.transact([], [Put("/a", os.urandom(50_000))])).revision == number + 1
            assert number < 100
        await asyncio.sleep(0.3)
        assert store.trouble() and not store.opened_again
        Failing.told = False
        await until(lambda: store.opened_again == 1)
        entry = await store.get("/a")
        assert entry is not None and entry.mod_revision == number + 1


async def test_the_name_of_a_new_log_is_synced_whatever_sqlite_makes_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the sync of a folder that it cannot open, or that fails, for done; and the log would go with the power."""
    synced: list[bool] = []

    def fsync(file: int, sync=os.fsync) -> None:  # type: ignore[no-untyped-def]
        if os.path.isdir(f"/proc/self/fd/{file}"):
            synced.append((tmp_path / "metadata.db-wal").exists())
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    async with await EmbeddedStore.open(tmp_path / "metadata.db"):
        assert synced[-1]
    fails = False

    def failing(file: int, sync=os.fsync) -> None:  # type: ignore[no-untyped-def]
        if fails and (tmp_path / "metadata.db-wal").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(file)

    monkeypatch.setattr(os, "fsync", failing)
    fails = True
    with pytest.raises(UnavailableError):
        await EmbeddedStore.open(tmp_path / "metadata.db")
    fails = False
    await (await EmbeddedStore.open(tmp_path / "metadata.db")).close()
