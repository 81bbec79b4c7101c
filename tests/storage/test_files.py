"""`felix.storage.port.Files`: what holds for the disk and for its twin in memory, held against each other."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from felix.errors import Code, UnavailableError
from felix.storage.disk import DiskFiles
from felix.storage.memory import MemoryDisk
from felix.storage.port import Files, is_exhausted, is_full, write_all
from felix.storage.small_file import create_durably, load_checked, read_file, save_checked

NEW = os.O_RDWR | os.O_CREAT


@pytest.fixture(params=["disk", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "disk":
        return DiskFiles()
    memory = MemoryDisk().mount()
    memory.make_folder(tmp_path)
    return memory


def content(files: Files, path: Path) -> bytes | None:
    return read_file(files, path)


def test_what_is_written_at_a_position_is_read_there_and_a_hole_reads_as_zeros(
    files: Files, tmp_path: Path
) -> None:
    descriptor = files.open(tmp_path / "one", NEW)
    assert files.pwritev(descriptor, [b"ab", memoryview(b"cd")], 3) == 4
    assert files.pwritev(descriptor, [b"X"], 4) == 1
    assert files.size(descriptor) == 7
    assert files.pread(descriptor, 100, 0) == b"\0\0\0aXcd"
    assert files.pread(descriptor, 2, 5) == b"cd"
    assert files.pread(descriptor, 2, 7) == b""
    files.truncate(descriptor, 4)
    files.truncate(descriptor, 6)
    assert files.pread(descriptor, 100, 0) == b"\0\0\0a\0\0"
    files.sync(descriptor)
    files.close(descriptor)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        files.size(descriptor)


def test_what_a_descriptor_was_not_opened_for_is_refused(files: Files, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.open(tmp_path / "one", os.O_RDONLY)
    with pytest.raises(FileNotFoundError):
        files.open(tmp_path / "no folder" / "one", NEW)
    files.close(files.open(tmp_path / "one", NEW))
    with pytest.raises(FileExistsError):
        files.open(tmp_path / "one", NEW | os.O_EXCL)
    with pytest.raises(IsADirectoryError):
        files.open(tmp_path, os.O_RDWR)
    reader = files.open(tmp_path / "one", os.O_RDONLY)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        files.pwritev(reader, [b"a"], 0)
    writer = files.open(tmp_path / "one", os.O_WRONLY)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        files.pread(writer, 1, 0)
    files.close(reader)
    files.close(writer)


def test_names_come_go_and_change_and_who_has_a_file_open_reads_on(files: Files, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    files.make_folder(folder)
    files.make_folder(folder)
    assert files.is_folder(folder) and files.names(tmp_path) == ["a"] and files.names(folder) == []
    for name, data in (("two", b"2"), ("one", b"1")):
        descriptor = files.open(folder / name, NEW)
        write_all(files, descriptor, (data,), 0)
        files.close(descriptor)
    files.sync_folder(folder)
    assert files.names(folder) == ["one", "two"] and not files.is_folder(folder / "one")
    held = files.open(folder / "two", os.O_RDONLY)
    files.rename(folder / "one", folder / "two")
    assert files.names(folder) == ["two"] and content(files, folder / "two") == b"1"
    assert files.pread(held, 9, 0) == b"2"
    files.close(held)
    files.remove(folder / "two")
    files.remove(folder / "two")
    assert not files.exists(folder / "two") and files.names(folder) == []
    with pytest.raises(FileNotFoundError):
        files.rename(folder / "two", folder / "three")
    files.rename(tmp_path / "a", tmp_path / "z")
    assert files.names(tmp_path) == ["z"] and files.names(tmp_path / "z") == ["b"]
    files.remove_folder(tmp_path / "z")
    files.remove_folder(tmp_path / "z")
    assert files.names(tmp_path) == []
    for missing in (files.names, files.sync_folder, files.free_bytes):
        with pytest.raises(FileNotFoundError):
            missing(tmp_path / "z")
    assert files.free_bytes(tmp_path) > 1 << 20


def test_a_folder_has_one_holder_at_a_time(files: Files, tmp_path: Path) -> None:
    lock = files.lock(tmp_path / "data")
    with pytest.raises(UnavailableError) as refused:
        files.lock(tmp_path / "data")
    assert refused.value.code is Code.CONFLICT
    lock.release()
    lock.release()
    files.lock(tmp_path / "data").release()


def test_a_small_file_is_whole_or_not_there_and_a_damaged_one_says_nothing(
    files: Files, tmp_path: Path
) -> None:
    path = tmp_path / "small"
    assert load_checked(files, path) is None
    save_checked(files, path, b"first")
    save_checked(files, path, b"second")
    assert load_checked(files, path) == b"second" and files.names(tmp_path) == ["small"]
    descriptor = files.open(path, os.O_RDWR)
    files.pwritev(descriptor, [b"S"], 16)
    files.close(descriptor)
    assert load_checked(files, path) is None


def test_many_buffers_are_written_in_turn(files: Files, tmp_path: Path) -> None:
    buffers = [bytes([number % 256]) * (number % 3) for number in range(2_500)]
    descriptor = create_durably(files, tmp_path / "many", buffers)
    assert files.pread(descriptor, 10_000, 0) == b"".join(buffers)
    files.close(descriptor)


Call = Callable[[Files], object]


def any_call(random: Random, root: Path) -> Call:
    """One call on a few names, by chance."""
    names = [root / name for name in ("a", "b", "c/d", "c/e")]
    path, other = random.choice(names), random.choice(names)
    position, length = random.randrange(0, 1_500), random.randrange(0, 1_500)
    data = random.randbytes(length)

    def write(files: Files) -> object:
        descriptor = files.open(path, NEW)
        try:
            return files.pwritev(descriptor, [data[:100], data[100:]], position)
        finally:
            files.close(descriptor)

    def cut(files: Files) -> object:
        descriptor = files.open(path, os.O_RDWR)
        try:
            files.truncate(descriptor, position)
            files.sync(descriptor)
            return files.size(descriptor)
        finally:
            files.close(descriptor)

    return random.choice(
        [
            write,
            write,
            cut,
            lambda files: content(files, path),
            lambda files: files.names(path.parent),
            lambda files: files.exists(path),
            lambda files: files.remove(path),
            lambda files: files.rename(path, path.parent / other.name),
            lambda files: files.make_folder(root / "c"),
            lambda files: files.sync_folder(path.parent),
            lambda files: files.remove_folder(root / "c") if not position % 10 else None,
        ]
    )


def outcome(call: Call, files: Files) -> object:
    try:
        return call(files)
    except OSError as error:
        return type(error)


@pytest.mark.parametrize("seed", range(8))
def test_the_twin_answers_every_call_as_the_disk_does(seed: int, tmp_path: Path) -> None:
    disk, memory, random = DiskFiles(), MemoryDisk().mount(), Random(seed)
    memory.make_folder(tmp_path)
    for _ in range(300):
        call = any_call(random, tmp_path)
        assert outcome(call, memory) == outcome(call, disk)
    for name in ("a", "b", "c/d", "c/e"):
        assert content(memory, tmp_path / name) == content(disk, tmp_path / name)


def test_a_folder_is_locked_on_a_full_disk_and_nobody_has_it_after_a_start_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds it stands in the file for people: a lock that stayed behind would keep out the next try of the same process."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("felix.storage.disk.os.pwrite", full)
    lock = DiskFiles().lock(tmp_path / "data")
    with pytest.raises(UnavailableError):
        DiskFiles().lock(tmp_path / "data")
    lock.release()
    DiskFiles().lock(tmp_path / "data").release()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE])
def test_a_file_whose_name_could_not_be_synced_is_not_said_to_lack_room(error: int) -> None:
    """Whoever hears of a full disk, or of too few descriptors, goes on as if nothing had been made."""
    disk = MemoryDisk()
    files = disk.mount()

    def fail(call: str, path: Path) -> None:
        if call == "sync_folder":
            raise OSError(error, os.strerror(error), str(path))

    disk.on_call = fail
    with pytest.raises(OSError, match="could not be synced") as caught:
        save_checked(files, Path("/one"), b"new")
    assert not is_full(caught.value) and not is_exhausted(caught.value)
    disk.on_call = None
    assert load_checked(files, Path("/one")) == b"new"


def test_a_descriptor_is_let_go_of_once_whatever_the_disk_says(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of NFS, whose `close` tells errors: the number is another file's next, which nobody closes who had it before."""
    first = files.open(tmp_path / "one", NEW)
    if isinstance(files, DiskFiles):
        close = os.close

        def failing(descriptor: int) -> None:
            close(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr("felix.storage.disk.os.close", failing)
    else:

        def fail(call: str, path: Path) -> None:
            if call == "close":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

        files._disk.on_call = fail  # type: ignore[attr-defined]
    files.close(first)
    monkeypatch.undo()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        files.close(first)
