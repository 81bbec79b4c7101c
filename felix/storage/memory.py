"""A disk in memory that behaves as disks do on their bad days, the twin of `felix.storage.disk`.

A `MemoryDisk` outlives the processes that use it; each has a `MemoryFiles` of its own (`mount`). What was written and what was
synced are kept apart:

- `kill` ends the process: its descriptors and locks go, every byte that it wrote stays, synced or not;
- `lose_power` ends it too, and of what was not synced any part may be gone: of a folder the newest changes of its names, of a
  file any of the sectors written since, each write for itself (a write may be torn between two sectors); with `removals_first`, names
  that were taken away are gone though older changes are not on the disk;
- `flip` changes one bit; `room_bytes` is what may still be written; `on_call` may fail any call, or hold it up. A `sync` that
  fails drops what it should have made durable: as on Linux, another `sync` will not bring it back.

One lock makes every call one step, so that threads may share it as they share a disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Final

from felix.errors import Code, UnavailableError
from felix.runtime.port import Random

SECTOR_BYTES: Final = 512
"""The unit that a disk writes completely or not at all, in bytes."""
ROOM_BYTES: Final = 1 << 40
"""Of a disk that nobody means to fill."""

OnCall = Callable[[str, Path], None]
"""Called with a call's name and path before it has any effect; what it raises is what the call raises."""


@dataclass(slots=True)
class _File:
    data: bytearray = field(default_factory=bytearray)
    """as its readers see it"""
    synced: bytearray = field(default_factory=bytearray)
    """as it stands on the disk"""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """since the last sync: bytes written at a position, or (None) that the file was cut to this length"""


@dataclass(slots=True)
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[tuple[str, _File | _Folder | None, str]] = field(default_factory=list)
    """since the last sync: the name that was given (to None: taken away), and the name that the same step took away"""


def _change(data: bytearray, position: int, written: bytes | None) -> None:
    if written is None:
        if position <= len(data):
            del data[position:]
        else:
            data.extend(bytes(position - len(data)))
        return
    if len(data) < position:
        data.extend(bytes(position - len(data)))
    data[position : position + len(written)] = written


def _sectors(position: int, written: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(written):
        until = min(len(written), (position + at) // SECTOR_BYTES * SECTOR_BYTES + SECTOR_BYTES - position)
        yield position + at, written[at:until]
        at = until


def _rename(entries: dict[str, _File | _Folder], step: tuple[str, _File | _Folder | None, str]) -> None:
    name, node, gone = step
    if gone:
        entries.pop(gone, None)
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _used_bytes(folder: _Folder) -> int:
    return sum(
        len(node.data) if isinstance(node, _File) else _used_bytes(node) for node in folder.entries.values()
    )


def _settled(folder: _Folder) -> _Folder:
    """The same with everything in it durable."""
    for node in folder.entries.values():
        if isinstance(node, _Folder):
            _settled(node)
        else:
            node.synced = bytearray(node.data)
            node.pending.clear()
    folder.synced = dict(folder.entries)
    folder.pending.clear()
    return folder


class MemoryDisk:
    """What outlives a process."""

    def __init__(self, room_bytes: int = ROOM_BYTES) -> None:
        self.room_bytes = room_bytes
        self.on_call: OnCall | None = None
        self._root = _Folder()
        self.lock = RLock()
        """Held for one step of one process."""
        self._mounted: MemoryFiles | None = None

    def mount(self, files: type[MemoryFiles] | None = None) -> MemoryFiles:
        """The view of the next process; the one before ends. `files`: a process that does something else."""
        with self.lock:
            self.kill()
            self._mounted = (files or MemoryFiles)(self)
            return self._mounted

    @property
    def mounted(self) -> MemoryFiles:
        """The view of the process that runs now."""
        assert self._mounted is not None, "a process runs"
        return self._mounted

    def kill(self) -> None:
        """The process ends at this moment; what it wrote is still in the page cache."""
        with self.lock:
            if self._mounted is not None:
                self._mounted.end()
                self._mounted = None

    def lose_power(self, random: Random, *, removals_first: bool = False) -> None:
        """The process ends, and the page cache with it; chance says what of it had reached the disk."""
        with self.lock:
            self.kill()
            size_bytes = self.room_bytes + _used_bytes(self._root)
            self._drop(self._root, random, removals_first)
            self.room_bytes = size_bytes - _used_bytes(self._root)

    def copy(self, folder: Path) -> object:
        """What a backup of the folder, taken now, has: for `put_back`."""
        with self.lock:
            return deepcopy(self.folder(folder))

    def put_back(self, folder: Path, copy: object) -> None:
        """The process ends, and the folder is as it was when the copy was taken, durably."""
        with self.lock:
            self.kill()
            assert isinstance(copy, _Folder)
            above, older = self.folder(folder.parent), _settled(deepcopy(copy))
            above.entries[folder.name] = above.synced[folder.name] = older

    def flip(self, path: Path, bit: int) -> None:
        """Change one bit of a file, as it is read and as it is on the disk."""
        with self.lock:
            found = self.find(path)
            if not isinstance(found, _File):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            for data in (found.data, found.synced):
                if bit // 8 < len(data):
                    data[bit // 8] ^= 1 << bit % 8

    def files(self) -> list[Path]:
        """Every file, in order."""
        with self.lock:
            return sorted(self._below(self._root, Path("/")))

    def _below(self, folder: _Folder, path: Path) -> Iterator[Path]:
        for name, node in folder.entries.items():
            if isinstance(node, _Folder):
                yield from self._below(node, path / name)
            else:
                yield path / name

    def _drop(self, folder: _Folder, random: Random, removals_first: bool) -> None:
        # How much had been written without being asked for differs: often nothing, often all, and anything between.
        steps = len(folder.pending)
        kept = random.choice((0, steps, random.randint(0, steps)))
        for number, step in enumerate(folder.pending):
            if number < kept or (removals_first and step[1] is None):
                _rename(folder.synced, step)
        folder.pending.clear()
        folder.entries = dict(folder.synced)
        for name in sorted(folder.entries):
            node = folder.entries[name]
            if isinstance(node, _Folder):
                self._drop(node, random, removals_first)
                continue
            share = random.choice((0.0, 0.5, 1.0))
            for position, written in node.pending:
                if written is None:
                    if random.random() < share:
                        _change(node.synced, position, None)
                    continue
                for at, sector in _sectors(position, written):
                    if random.random() < share:
                        _change(node.synced, at, sector)
            node.pending.clear()
            node.data = bytearray(node.synced)

    def find(self, path: Path) -> _File | _Folder | None:
        """What is at `path`; None where nothing is."""
        node: _File | _Folder | None = self._root
        for name in path.parts[1:]:
            if not isinstance(node, _Folder):
                return None
            node = node.entries.get(name)
        return node

    def folder(self, path: Path) -> _Folder:
        """Raises FileNotFoundError, NotADirectoryError."""
        found = self.find(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if not isinstance(found, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return found


@dataclass(slots=True)
class _Opened:
    file: _File
    path: Path
    flags: int


class _Lock:
    def __init__(self, disk: MemoryDisk, locked: set[Path], folder: Path) -> None:
        self._disk, self._locked, self._folder = disk, locked, folder
        self._node: _File | _Folder | None = disk.find(folder)
        self.identity = str(folder)

    def is_elsewhere(self) -> bool:
        return self._node is not None and self._disk.find(self._folder) is not self._node

    def release(self) -> None:
        self._node = None
        self._locked.discard(self._folder)


class _Step:
    """One step of a process: the disk's lock, which it has when this is entered."""

    __slots__ = ("_lock",)

    def __init__(self, disk: MemoryDisk) -> None:
        self._lock = disk.lock

    def __enter__(self) -> None:
        """It was taken before."""

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class MemoryFiles:
    """`felix.storage.port.Files` of one process. Made by `MemoryDisk.mount`; every call fails once the process has ended."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._step = _Step(disk)
        self._open: dict[int, _Opened] = {}
        self._next = 3
        self._locked: set[Path] = set()
        self._ended = False

    def end(self) -> None:
        """The process ends."""
        self._ended = True
        self._open.clear()
        self._locked.clear()

    def open(self, path: Path, flags: int) -> int:
        with self._call("open", path):
            folder = self._disk.folder(path.parent)
            found = folder.entries.get(path.name)
            if isinstance(found, _Folder):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if found is None:
                if not flags & os.O_CREAT:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
                found = _File()
                self._name(folder, (path.name, found, ""))
            elif flags & os.O_CREAT and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            if flags & os.O_TRUNC and found.data:
                self._write(found, 0, None)
            descriptor, self._next = self._next, self._next + 1
            self._open[descriptor] = _Opened(found, path, flags)
            return descriptor

    def close(self, descriptor: int) -> None:
        opened = self._opened(descriptor)
        # As of a disk: the number is free, whatever it says.
        with suppress(OSError), self._call("close", opened.path):
            pass
        self._open.pop(descriptor, None)

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        opened = self._opened(descriptor)
        with self._call("pwritev", opened.path):
            self._check_writable(opened)
            written = b"".join(buffers)
            data = opened.file.data
            # What is overwritten has its room already.
            fits = max(0, len(data) - position) + max(0, self._disk.room_bytes - max(0, position - len(data)))
            if written and not fits:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(opened.path))
            written = written[:fits]
            if written:
                self._write(opened.file, position, written)
            return len(written)

    def pread(self, descriptor: int, length: int, position: int) -> bytes:
        opened = self._opened(descriptor)
        with self._call("pread", opened.path):
            if opened.flags & os.O_ACCMODE == os.O_WRONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return bytes(opened.file.data[position : position + length])

    def truncate(self, descriptor: int, length: int) -> None:
        opened = self._opened(descriptor)
        with self._call("truncate", opened.path):
            self._check_writable(opened)
            if length - len(opened.file.data) > self._disk.room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(opened.path))
            if length != len(opened.file.data):
                self._write(opened.file, length, None)

    def size(self, descriptor: int) -> int:
        opened = self._opened(descriptor)
        with self._call("size", opened.path):
            return len(opened.file.data)

    def sync(self, descriptor: int) -> None:
        opened = self._opened(descriptor)
        try:
            with self._call("sync", opened.path):
                for position, written in opened.file.pending:
                    _change(opened.file.synced, position, written)
        finally:
            # After a failure too: the kernel marks the pages clean and never reports the failure again.
            opened.file.pending.clear()

    def sync_folder(self, folder: Path) -> None:
        with self._call("sync_folder", folder):
            found = self._disk.folder(folder)
            found.synced = dict(found.entries)
            found.pending.clear()

    def names(self, folder: Path) -> list[str]:
        with self._call("names", folder):
            return sorted(self._disk.folder(folder).entries)

    def exists(self, path: Path) -> bool:
        with self._call("exists", path):
            return self._disk.find(path) is not None

    def is_folder(self, path: Path) -> bool:
        with self._call("is_folder", path):
            return isinstance(self._disk.find(path), _Folder)

    def make_folder(self, folder: Path) -> None:
        with self._call("make_folder", folder):
            for path in reversed((folder, *folder.parents)):
                found = self._disk.find(path)
                if found is None:
                    self._name(self._disk.folder(path.parent), (path.name, _Folder(), ""))
                elif not isinstance(found, _Folder):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    def rename(self, source: Path, target: Path) -> None:
        with self._call("rename", source):
            assert source.parent == target.parent, "a name changes within its folder"
            folder = self._disk.folder(source.parent)
            node = folder.entries.get(source.name)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
            if isinstance(folder.entries.get(target.name), _Folder):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
            self._free(folder.entries.get(target.name))
            self._name(folder, (target.name, node, source.name))

    def remove(self, path: Path) -> None:
        with self._call("remove", path):
            found = self._disk.find(path)
            if isinstance(found, _Folder):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if found is not None:
                self._free(found)
                self._name(self._disk.folder(path.parent), (path.name, None, ""))

    def remove_folder(self, folder: Path) -> None:
        with self._call("remove_folder", folder):
            found = self._disk.find(folder)
            if isinstance(found, _Folder):
                self._free(found)
                self._name(self._disk.folder(folder.parent), (folder.name, None, ""))

    def free_bytes(self, folder: Path) -> int:
        with self._call("free_bytes", folder):
            self._disk.folder(folder)
            return self._disk.room_bytes

    def lock(self, folder: Path) -> _Lock:
        self.make_folder(folder)
        with self._call("lock", folder):
            if folder in self._locked:
                raise UnavailableError(f"The folder {folder} is in use.", code=Code.CONFLICT)
            self._locked.add(folder)
            return _Lock(self._disk, self._locked, folder)

    def _call(self, name: str, path: Path) -> _Step:
        """One call: what `on_call` does, then the step under the disk's lock."""
        disk = self._disk
        if disk.on_call is not None:
            disk.on_call(name, path)
        disk.lock.acquire()
        if self._ended:
            disk.lock.release()
            raise OSError(errno.EIO, "the process has ended", str(path))
        return self._step

    def _opened(self, descriptor: int) -> _Opened:
        opened = self._open.get(descriptor)
        if opened is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return opened

    def _check_writable(self, opened: _Opened) -> None:
        if opened.flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _write(self, file: _File, position: int, written: bytes | None) -> None:
        before = len(file.data)
        _change(file.data, position, written)
        file.pending.append((position, written))
        self._disk.room_bytes -= len(file.data) - before

    def _free(self, node: _File | _Folder | None) -> None:
        if isinstance(node, _File):
            self._disk.room_bytes += len(node.data)
        elif node is not None:
            for each in node.entries.values():
                self._free(each)

    def _name(self, folder: _Folder, step: tuple[str, _File | _Folder | None, str]) -> None:
        _rename(folder.entries, step)
        folder.pending.append(step)
