"""The key file of a region on disk: wrapped keys and their states, appended, synced, and rewritten whole when needed.

File `keys.log`, mode 0600, beside `keys.lock`, which is locked as long as a store is open::

    prefix   `felix/key-store/1`, a zero byte, then the region's name behind its length (u32)
    entry    length u32, its complement u32, XXH3-64 of the body u64, body (keys.hierarchy)
    …

Invariants:
- `append` returns only after `fdatasync`; `rewrite` puts a whole new file in place in one step;
- an entry that a crash cut off was never acknowledged, so it is cut away at opening and reported (`cut_bytes`);
  damage anywhere else is CorruptionError: a key is never dropped silently;
- what is read at opening is on the disk before anybody uses it: a killed process leaves entries and the file's name in the page cache alone, and where
  a sync failed the kernel calls pages clean that it could not write. So the last of them are written once more and synced, with the folder;
- after a failed write or sync nothing more is written: what is on the disk is no longer known. `open_again` puts a whole new file in place, with what its owner
  knows to be acknowledged: nothing of the old one is believed, and what was refused is not in the new one.

Blocks on the disk. One process, one thread at a time: the keyring serializes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from felix.context import bind
from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.files import PRIVATE, commit_file, create_file, read_file, stage_file, sync_folder
from felix.runtime.real import REAL
from felix.storage.disk import is_elsewhere
from felix.storage.disk_waits import DiskWaits

KEY_FILE: Final = "keys.log"
LOCK_FILE: Final = "keys.lock"
KEY_FILE_BYTES_MAX: Final = 1 << 30
"""Some three million data keys; read whole at opening."""
ENTRY_BYTES_MAX: Final = 16_384
"""The largest entry is a wrapped key of a few hundred bytes with its names."""
UNSYNCED_BYTES_MAX: Final = 1 << 20
"""Appended at most before a sync: what is written again at the next opening."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_ENTRY: Final = struct.Struct(">IIQ")
_BLOCK_BYTES: Final = 512
"""Disks write whole sectors: what a crash leaves unwritten within a file's length reads as zeros from one on."""


def _prefix(region: str) -> bytes:
    return bind("key-store", region)


def _frame(body: bytes) -> bytes:
    assert 0 < len(body) <= ENTRY_BYTES_MAX
    return _ENTRY.pack(len(body), len(body) ^ 0xFFFFFFFF, xxhash.xxh3_64_intdigest(body)) + body


def decode_entries(data: bytes, start: int, where: str) -> tuple[list[bytes], int]:
    """The bodies of all whole entries from `start` on, and where the last of them ends; what follows is torn.

    Raises CorruptionError where the file is damaged rather than cut off. Pure.
    """
    bodies: list[bytes] = []
    at = start
    while at < len(data):
        if len(data) - at < _ENTRY.size:
            break
        length, complement, checksum = _ENTRY.unpack_from(data, at)
        end = at + _ENTRY.size + length
        sound = length ^ 0xFFFFFFFF == complement and 0 < length <= ENTRY_BYTES_MAX
        if sound and end > len(data):
            break
        body = data[at + _ENTRY.size : end]
        if not sound or xxhash.xxh3_64_intdigest(body) != checksum:
            if _never_written(data, at):
                break
            raise CorruptionError(
                f"{where} is damaged at byte {at}.",
                hint="Restore it from a backup that is not older than the newest data; do not cut it by hand.",
            )
        bodies.append(body)
        at = end
    return bodies, at


def _never_written(data: bytes, at: int) -> bool:
    """True where the file is zeros to its end from `at`, or from a sector's start within the last entry."""
    zeros_from = len(data.rstrip(b"\0"))
    sector = -(-max(zeros_from, at) // _BLOCK_BYTES) * _BLOCK_BYTES
    return zeros_from <= at or (sector < len(data) and len(data) - at <= _ENTRY.size + ENTRY_BYTES_MAX)


def create_store(folder: Path, region: str, bodies: Iterable[bytes]) -> None:
    """Write a region's first key file. Raises RequestError(ALREADY_EXISTS): it never overwrites."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    create_file(folder / KEY_FILE, _prefix(region) + b"".join(map(_frame, bodies)), PRIVATE)


def read_entries(folder: Path, region: str) -> list[bytes]:
    """The bodies of a key file's whole entries, without its lock: for who only looks. Raises RequestError, CorruptionError."""
    path = folder / KEY_FILE
    data = read_file(path, "the key file", bytes_max=KEY_FILE_BYTES_MAX, private=True)
    prefix = _prefix(region)
    if not data.startswith(prefix):
        raise _foreign(path, region, data)
    return decode_entries(data, len(prefix), str(path))[0]


def _foreign(path: Path, region: str, data: bytes) -> RequestError | CorruptionError:
    if data.startswith(_prefix("")[:-4]):
        return RequestError(
            f"{path} is the key file of another region than {region}.",
            code=Code.WRONG_REGION,
            hint="Keys never move between regions.",
        )
    return CorruptionError(f"{path} does not begin like a key file.", hint="Restore it from its backup.")


class KeyStore:
    """An open key file, locked against every other process.

    - `bodies` is what it held at opening; `cut_bytes` is how much of a torn tail was cut away;
    - `failure` is why it takes nothing, empty where it does.
    """

    def __init__(
        self, folder: Path, region: str, *, monotonic: Callable[[], float] = REAL.clock.monotonic
    ) -> None:
        """Raises RequestError: NOT_FOUND, FORBIDDEN, CONFLICT where a process has it open, WRONG_REGION;
        CorruptionError."""
        self._path = folder / KEY_FILE
        self._waits = DiskWaits(monotonic)
        self._region = region
        self._broken = ""
        self._file = -1
        self._lock = -1
        if not self._path.exists():
            raise RequestError(
                f"There is no key file {self._path}.",
                code=Code.NOT_FOUND,
                hint="Initialise the region first, or restore its keys from a backup.",
            )
        self._lock = _lock(folder / LOCK_FILE)
        try:
            # Leftovers of a rewrite that a crash interrupted; they were never the key file.
            for leftover in folder.glob(f".{KEY_FILE}.*.new"):
                leftover.unlink()
            data = read_file(self._path, "the key file", bytes_max=KEY_FILE_BYTES_MAX, private=True)
            prefix = _prefix(region)
            if not data.startswith(prefix):
                raise _foreign(self._path, region, data)
            self.bodies, end = decode_entries(data, len(prefix), str(self._path))
            self.cut_bytes = len(data) - end
            try:
                self._make_durable(data, end)
                self._file = _open_to_append(self._path)
            except OSError as error:
                raise self._unwritable(error) from error
        except BaseException:
            self.close()
            raise

    def _make_durable(self, data: bytes, end: int) -> None:
        """All that was read up to `end` is on the disk on return, and what follows is cut away. Every opening has done so, and nothing is appended
        behind a sync that failed: so only the last bytes are in doubt."""
        begin = max(0, end - UNSYNCED_BYTES_MAX)
        # Not the one that is kept open: what is written to that one goes to the end.
        file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if end < len(data):
                os.ftruncate(file, end)
            while begin < end:
                begin += os.pwrite(file, data[begin:end], begin)
            os.fsync(file)
        finally:
            os.close(file)
        sync_folder(self._path.parent)

    def _unwritable(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"{self._path} cannot be written: {error}.",
            code=Code.DISK_FULL if error.errno in _FULL else Code.UNAVAILABLE,
            hint="Nothing was changed. Make room or repair the disk, then try again.",
        )

    @property
    def failure(self) -> str:
        """Why it takes nothing, as a sentence; empty where it does. From any thread."""
        return str(self._refusal()) if self._broken else ""

    def trouble(self) -> str:
        """Why it takes nothing, or that its disk does not answer, with what to do; empty where neither is so. From any thread."""
        if self._broken:
            return self.failure
        told = self._waits.told(str(self._path))
        return f"{told} What needs a new key waits; it goes on by itself. Look at the disk." if told else ""

    def append(self, bodies: Iterable[bytes]) -> None:
        """Add entries; they are durable when this returns. Raises UnavailableError (DISK_FULL where there is no room)."""
        self._require_sound()
        with self._waits.asked():
            self._append(b"".join(map(_frame, bodies)))

    def _append(self, frames: bytes) -> None:
        before = os.fstat(self._file).st_size
        try:
            if self._write(frames):
                return
        except OSError as error:
            if error.errno not in _FULL:
                raise self._break(error) from error
        # The disk is full: what was written of it is taken back, and the store stays as it was.
        try:
            os.ftruncate(self._file, before)
            os.fsync(self._file)
        except OSError as error:
            raise self._break(error) from error
        raise UnavailableError(
            f"{self._path} cannot grow: the disk is full.",
            code=Code.DISK_FULL,
            hint="Make room; no new data key can be made until then.",
        )

    def _write(self, frames: bytes) -> bool:
        """At the end, and durable; False where there was room for a part. Raises OSError."""
        for start in range(0, len(frames), UNSYNCED_BYTES_MAX):
            part = frames[start : start + UNSYNCED_BYTES_MAX]
            if os.write(self._file, part) != len(part):
                return False
            os.fdatasync(self._file)
        return True

    def rewrite(self, bodies: Iterable[bytes]) -> None:
        """Put a file with these entries in place of the old one, in one step.

        Raises UnavailableError where the new file cannot be written: the old one stays, or it is not known which of them is there, and `failure` says so.
        """
        self._require_sound()
        with self._waits.asked():
            self._replace(bodies)

    def _replace(self, bodies: Iterable[bytes]) -> None:
        data = _prefix(self._region) + b"".join(map(_frame, bodies))
        try:
            staged = stage_file(self._path, data, PRIVATE)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            # Before it takes the old one's place: afterwards nothing may be missing for going on with it.
            file = _open_to_append(staged)
        except OSError as error:
            with suppress(OSError):
                staged.unlink()
            raise self._unwritable(error) from error
        try:
            commit_file(staged, self._path)
        except OSError as error:
            _close(file)
            with suppress(OSError):
                staged.unlink()
            raise self._break(error) from error
        _close(self._file)
        self._file = file

    def open_again(self, bodies: Iterable[bytes]) -> None:
        """Go on after a failure, with a new file of these entries: all that was acknowledged, and nothing else. Raises UnavailableError; then it can be tried
        again."""
        assert self._broken
        with self._waits.asked():
            try:
                self._require_there()
            except OSError as error:
                raise self._unwritable(error) from error
            self._replace(bodies)
        self._broken = ""

    def _require_there(self) -> None:
        """Raises OSError where another folder is at the path: moved, unmounted, or with another one mounted over it."""
        if is_elsewhere(self._path.with_name(LOCK_FILE), self._lock):
            raise OSError(
                errno.ENODEV, "it is not in the folder that was opened any more", str(self._path.parent)
            )

    def close(self) -> None:
        """Give up file and lock; again is no error."""
        for handle in (self._file, self._lock):
            if handle >= 0:
                _close(handle)
        self._file = self._lock = -1

    def _break(self, error: OSError) -> UnavailableError:
        self._broken = str(error)
        return self._refusal()

    def _refusal(self) -> UnavailableError:
        return UnavailableError(
            f"{self._path} could not be written ({self._broken}), so it is not known what it holds now.",
            hint="Look at the disk. The file is written anew by itself, with all keys that were ever given out; until then there are no new ones.",
            retry_after_ms=1_000,
        )

    def _require_sound(self) -> None:
        if self._broken:
            raise self._refusal()
        if self._file < 0:
            raise UnavailableError(f"{self._path} is closed.", code=Code.SHUTTING_DOWN)


class MemoryKeyStore:
    """The twin of `KeyStore` in memory: `entries` is its file, which outlives it, and everything is durable at once."""

    cut_bytes = 0
    failure = ""

    def __init__(self, entries: list[bytes]) -> None:
        self._entries = entries
        self.bodies = list(entries)

    def append(self, bodies: Iterable[bytes]) -> None:
        """Add entries."""
        self._entries += bodies

    def rewrite(self, bodies: Iterable[bytes]) -> None:
        """Put these in place of the old ones."""
        self._entries[:] = bodies

    def trouble(self) -> str:
        """None."""
        return ""

    def open_again(self, bodies: Iterable[bytes]) -> None:
        """As `rewrite`."""
        self.rewrite(bodies)

    def close(self) -> None:
        """Nothing is held."""


def _open_to_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _close(handle: int) -> None:
    """What was to last was synced before."""
    with suppress(OSError):
        os.close(handle)


def _lock(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with suppress(OSError):
            os.close(handle)
        raise RequestError(
            f"{path.parent} is in use by another process.",
            code=Code.CONFLICT,
            hint="One broker has a region's keys open at a time; ask it (felix keys …) instead.",
        ) from None
    return handle
