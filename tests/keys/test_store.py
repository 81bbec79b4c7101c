"""The key file: torn tails, damage, full disks, and the lock."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path

import pytest
from disks.key_oracle import Oracle
from disks.play_store import KeyPlay
from hypothesis import given
from hypothesis import strategies as st

from felix.errors import Code, CorruptionError, FelixError, RequestError, UnavailableError
from keys.store import (
    KEY_FILE,
    UNSYNCED_BYTES_MAX,
    KeyStore,
    _frame,
    create_store,
    decode_entries,
    read_entries,
)

BODIES = [b"first entry", b"the second one, a bit longer" * 10, b"third"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_store(tmp_path, "us-east", BODIES[:1])
    store = KeyStore(tmp_path, "us-east")
    store.append(BODIES[1:2])
    store.append(BODIES[2:])
    store.close()
    return tmp_path


def read(folder: Path) -> tuple[list[bytes], int]:
    store = KeyStore(folder, "us-east")
    store.close()
    return store.bodies, store.cut_bytes


def test_what_was_appended_is_read_back_in_order(folder: Path) -> None:
    assert read(folder) == (BODIES, 0)
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_tail_torn_at_every_byte_is_cut_and_the_rest_is_kept(folder: Path) -> None:
    path = folder / KEY_FILE
    whole = path.read_bytes()
    ends = [len(whole) - 16 - len(BODIES[2]), len(whole)]
    for length in range(ends[0], ends[1]):
        path.write_bytes(whole[:length])
        assert read(folder) == (BODIES[:2], length - ends[0])
        assert path.stat().st_size == ends[0]
        store = KeyStore(folder, "us-east")
        store.append([b"again"])
        store.close()
        assert read(folder) == ([*BODIES[:2], b"again"], 0)


@pytest.mark.parametrize("zeros", [1, 15, 16, 40, 511, 512, 5000])
def test_a_tail_of_zeros_is_a_torn_one(folder: Path, zeros: int) -> None:
    path = folder / KEY_FILE
    path.write_bytes(path.read_bytes() + bytes(zeros))
    assert read(folder) == (BODIES, zeros)


def test_a_last_entry_of_which_only_the_first_sectors_were_written_is_torn(folder: Path) -> None:
    store = KeyStore(folder, "us-east")
    start = (folder / KEY_FILE).stat().st_size
    store.append([b"x" * 2000])
    store.close()
    path = folder / KEY_FILE
    whole = path.read_bytes()
    for sector in range(-(-start // 512), len(whole) // 512 + 1):
        path.write_bytes(whole[: sector * 512].ljust(len(whole), b"\0"))
        assert read(folder)[0] == BODIES
        path.write_bytes(whole)


def test_any_changed_bit_before_the_end_is_corruption_and_nothing_is_cut(folder: Path) -> None:
    path = folder / KEY_FILE
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (0, 7):
            changed = whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]
            path.write_bytes(changed)
            with pytest.raises(FelixError) as caught:
                read(folder)
            assert caught.value.code in (Code.CORRUPTION, Code.WRONG_REGION)
            assert path.read_bytes() == changed


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=8), st.data())
def test_reading_any_prefix_gives_whole_entries_only(bodies: list[bytes], data: st.DataObject) -> None:
    frames = [_frame(body) for body in bodies]
    whole = b"".join(frames)
    length = data.draw(st.integers(0, len(whole)))
    found, end = decode_entries(whole[:length], 0, "here")
    assert found == bodies[: len(found)]
    assert end == sum(map(len, frames[: len(found)])) <= length
    assert len(found) == len(bodies) or end + len(frames[len(found)]) > length


@given(st.binary(max_size=200))
def test_bytes_that_are_no_entries_are_refused_or_torn(data: bytes) -> None:
    try:
        found, end = decode_entries(data, 0, "here")
    except CorruptionError:
        return
    assert end <= len(data)
    assert found == [] or end > 0


def test_a_file_that_is_something_else_is_refused(folder: Path) -> None:
    (folder / KEY_FILE).write_bytes(b"something else")
    with pytest.raises(CorruptionError, match="does not begin like a key file"):
        read(folder)
    (folder / KEY_FILE).write_bytes(b"")
    with pytest.raises(CorruptionError):
        read(folder)


def test_a_key_file_that_others_may_read_is_refused(folder: Path) -> None:
    (folder / KEY_FILE).chmod(0o644)
    with pytest.raises(RequestError, match="chmod 600"):
        read(folder)
    (folder / KEY_FILE).chmod(0o600)
    assert read(folder)[0] == BODIES


def test_a_second_opening_is_refused_until_the_first_is_closed(folder: Path) -> None:
    store = KeyStore(folder, "us-east")
    with pytest.raises(RequestError, match="in use by another process") as caught:
        KeyStore(folder, "us-east")
    assert caught.value.code is Code.CONFLICT
    store.close()
    store.close()
    read(folder)
    with pytest.raises(UnavailableError, match="is closed"):
        store.append([b"x"])


@pytest.mark.parametrize("part", [0, 7])
def test_a_full_disk_refuses_the_entry_takes_back_its_part_and_stays_usable(
    folder: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyStore(folder, "us-east")
    write = os.write

    def full(handle: int, data: bytes) -> int:
        if part:
            return write(handle, data[:part])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(os, "write", full)
        with pytest.raises(UnavailableError) as caught:
            store.append([b"does not fit"])
    assert caught.value.code is Code.DISK_FULL
    store.append([b"fits again"])
    store.close()
    assert read(folder) == ([*BODIES, b"fits again"], 0)


def test_after_a_failed_sync_nothing_more_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore(folder, "us-east")

    def failing_sync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", failing_sync)
        with pytest.raises(UnavailableError, match="written anew by itself"):
            store.append([b"x"])
    with pytest.raises(UnavailableError):
        store.append([b"y"])
    with pytest.raises(UnavailableError):
        store.rewrite([b"y"])
    store.close()
    assert b"y" not in read(folder)[0]


def test_a_rewrite_replaces_everything_and_appending_goes_on_behind_it(folder: Path) -> None:
    store = KeyStore(folder, "us-east")
    store.rewrite([b"only"])
    store.append([b"and one more"])
    store.close()
    assert read(folder) == ([b"only", b"and one more"], 0)


def test_creating_never_overwrites(folder: Path) -> None:
    with pytest.raises(RequestError) as caught:
        create_store(folder, "us-east", [])
    assert caught.value.code is Code.ALREADY_EXISTS
    assert read(folder)[0] == BODIES


def test_what_a_failed_sync_left_in_the_page_cache_is_on_the_disk_before_it_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are sealed with it, and acknowledged: with the power it would go, and they could not be read."""
    entry = b"a data key"
    with monkeypatch.context() as failing:

        def fails(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        failing.setattr(os, "fdatasync", fails)
        store = KeyStore(folder, "us-east")
        with pytest.raises(UnavailableError):
            store.append([entry])
        store.close()
    path = folder / KEY_FILE
    whole, unsynced, names = path.read_bytes(), set(range(path.stat().st_size)), True

    def pwrite(file: int, data: bytes, position: int, write=os.pwrite) -> int:  # type: ignore[no-untyped-def]
        written.extend(range(position, position + len(data)))
        return int(write(file, data, position))

    def fsync(file: int, sync=os.fsync) -> None:  # type: ignore[no-untyped-def]
        nonlocal names
        if os.path.isdir(f"/proc/self/fd/{file}"):
            names = False
        unsynced.difference_update(written)
        sync(file)

    written: list[int] = []
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    store = KeyStore(folder, "us-east")
    assert store.bodies == [*BODIES, entry]
    # The kernel calls the pages clean: a sync alone does nothing for them.
    assert not unsynced & set(range(whole.index(entry) - 16, len(whole))) and not names
    store.append([b"another"])
    store.close()
    assert read(folder) == ([*BODIES, entry, b"another"], 0)


@pytest.mark.parametrize(("error", "code"), [(errno.EIO, Code.UNAVAILABLE), (errno.ENOSPC, Code.DISK_FULL)])
def test_a_key_file_that_cannot_be_made_durable_is_not_used(
    folder: Path, error: int, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", fails)
        with pytest.raises(UnavailableError) as caught:
            KeyStore(folder, "us-east")
    assert caught.value.code is code
    assert read(folder) == (BODIES, 0)


def test_many_entries_at_once_are_synced_in_parts_and_all_taken_back_where_there_is_no_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is in doubt after a sync that failed is never more than what the next opening writes again."""
    many = [b"%06d" % number * 2_000 for number in range(300)]
    store, whole = KeyStore(folder, "us-east"), (folder / KEY_FILE).read_bytes()
    syncs: list[int] = []

    def fdatasync(file: int) -> None:
        syncs.append(os.fstat(file).st_size)
        if len(syncs) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(UnavailableError):
        store.append(many)
    assert (folder / KEY_FILE).read_bytes() == whole
    store.append(many)
    store.close()
    ends = [len(whole), *syncs[3:]]
    assert len(ends) == 5 and max(b - a for a, b in itertools.pairwise(ends)) <= UNSYNCED_BYTES_MAX
    assert read(folder) == ([*BODIES, *many], 0)


def eio(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_it_goes_on_with_what_was_acknowledged_and_what_was_refused_is_gone(
    folder: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyStore(folder, "us-east")
    store.append([b"acknowledged"])
    with monkeypatch.context() as failing:
        failing.setattr(os, call, eio)
        with pytest.raises(UnavailableError) as refused:
            store.append([b"refused"])
        assert refused.value.retry_after_ms and store.failure == store.trouble() != ""
        # Also where the disk fails still, wherever it does.
        for stage in ("fsync", "replace", "open"):
            with monkeypatch.context() as still:
                still.setattr(*((Path, stage) if stage == "replace" else (os, stage)), eio)
                with pytest.raises(UnavailableError):
                    store.open_again([*BODIES, b"acknowledged"])
                assert store.failure
    store.open_again([*BODIES, b"acknowledged"])
    assert not store.trouble()
    store.append([b"after"])
    store.close()
    assert read(folder) == ([*BODIES, b"acknowledged", b"after"], 0)
    assert not list(folder.glob(".keys.log*"))


def test_nothing_of_the_old_file_is_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync of it proves nothing any more: the new one is another file, written and synced as a whole."""
    store, before = KeyStore(folder, "us-east"), (folder / KEY_FILE).stat().st_ino
    held = (folder / KEY_FILE).open("rb")
    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", eio)
        with pytest.raises(UnavailableError):
            store.append([b"refused"])
    synced: list[tuple[int, int]] = []

    def fsync(file: int, sync=os.fsync) -> None:  # type: ignore[no-untyped-def]
        sync(file)
        synced.append((os.fstat(file).st_ino, os.fstat(file).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    store.open_again(BODIES)
    made = (folder / KEY_FILE).stat()
    assert made.st_ino != before and synced[0] == (made.st_ino, made.st_size)
    assert synced[1][0] == folder.stat().st_ino
    held.close()
    store.close()


def test_a_new_file_that_may_be_in_place_is_not_taken_for_refused_nor_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyStore(folder, "us-east")
    with monkeypatch.context() as failing:

        def fails_on_folders(file: int, sync=os.fsync) -> None:  # type: ignore[no-untyped-def]
            if os.path.isdir(f"/proc/self/fd/{file}"):
                eio()
            sync(file)

        failing.setattr(os, "fsync", fails_on_folders)
        with pytest.raises(UnavailableError, match="not known what it holds"):
            store.rewrite([b"other"])
    assert read_entries(folder, "us-east") == [b"other"]
    store.open_again(BODIES)
    assert read_entries(folder, "us-east") == BODIES
    store.append([b"after"])
    store.close()
    assert read(folder) == ([*BODIES, b"after"], 0)


def test_a_rewrite_that_may_open_no_more_files_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had taken the old file's place before, and the store knew no more what it holds."""
    store, opened = KeyStore(folder, "us-east"), os.open

    def exhausted(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_APPEND:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as failing:
        failing.setattr(os, "open", exhausted)
        with pytest.raises(UnavailableError, match="Nothing was changed"):
            store.rewrite([b"other"])
    assert not store.failure and read_entries(folder, "us-east") == BODIES
    assert not list(folder.glob(".keys.log*"))
    store.append([b"after"])
    store.close()


def test_another_folder_in_its_place_is_not_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, aside = KeyStore(folder, "us-east"), folder.with_name("aside")
    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", eio)
        with pytest.raises(UnavailableError):
            store.append([b"refused"])
    folder.rename(aside)
    create_store(folder, "us-east", [b"another"])
    (folder / "keys.lock").touch()
    with pytest.raises(UnavailableError, match="not in the folder that was opened"):
        store.open_again(BODIES)
    assert read_entries(folder, "us-east") == [b"another"]
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    aside.rename(folder)
    store.open_again(BODIES)
    store.close()
    assert read(folder) == (BODIES, 0)


def test_a_disk_that_does_not_answer_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    store = KeyStore(folder, "us-east", monotonic=lambda: now_s)
    seen: list[str] = []

    def hangs(file: int) -> None:
        nonlocal now_s
        seen.append(store.trouble())
        now_s += 25
        seen.append(store.trouble())

    monkeypatch.setattr(os, "fdatasync", hangs)
    store.append([b"late"])
    assert seen[0] == "" and "has not answered for 20 s" in seen[1]
    assert not store.trouble() and not store.failure
    store.close()


@pytest.mark.fault
def test_keys_on_a_disk_whose_calls_fail_one_after_the_other(tmp_path: Path) -> None:
    """A process makes, rotates and destroys keys without a pause, and goes on by itself each time; then its power goes."""
    play = KeyPlay(tmp_path, 1)
    try:
        play.start()
        play.until_done()
        for call in ("sync", "write", "open", "rename", "folder", "truncate"):
            for number in (errno.EIO, errno.ENOSPC, errno.EMFILE):
                play.disk.fail_each([(call, "keys.log", number, 1, 2, 0), (call, "/keys", number, 5, 1, 0)])
                time.sleep(0.1)
                play.disk.heal()
                play.until_done()
        assert isinstance(play.judge, Oracle)
        assert play.judge.starts == 1 and play.judge.opened_again >= 3, vars(play.judge)
        play.end()
        play.disk.cut()
        play.finish()
    finally:
        play.kill()
