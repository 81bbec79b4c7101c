"""The audit log's write-ahead file: leaves in order, made durable in groups. Blocking; called from one thread.

Segments `wal/<first index, 20 digits>.wal`, records behind each other, big-endian::

    0   magic "FXwl"     4
    4   flags            1    1: the append goes on in the next record
    5   reserved         3    zero
    8   length           4    of the leaf
    12  index            8    of the leaf
    20  durable          8    leaves known durable when this record was written
    28  checksum         8    XXH3-64 of bytes 0..28 and the leaf
    36  leaf

Invariants: records of one append are all there after a crash, or none of them; `append` returns after
`fdatasync`; a failed write or sync raises OSError and the file is never used again, but for a write that finds no room: what there was
room for is cut off, and the same appends may be tried again. Recovery cuts what follows
the last whole append only where nothing shows that it was durable: a later record that names it as durable,
or a checkpoint above it, makes it damage (CorruptionError, RolledBackError) and not a torn tail.
Callers: audit.trail, audit.verify (reading).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import xxhash

from audit.errors import VERIFY_HINT
from audit.leaf import LEAF_BYTES_MAX
from felix.errors import CorruptionError
from felix.storage.port import Files, is_full, lacks_resources, write_all
from felix.storage.small_file import read_file

SEGMENT_BYTES_MAX: Final = 64 << 20
"""A segment is rolled when it is longer: recovery reads what is kept, usually two segments."""
RECORD_HEADER_BYTES: Final = 36
_RECORD: Final = Struct(">4sB3sIQQQ")
_MAGIC: Final = b"FXwl"
_CONTINUES: Final = 1
_SUFFIX: Final = ".wal"
_CHUNK_BYTES: Final = 1 << 20
"""What one write call is given: the kernel copies it while other threads run."""

LOOKS_MAX: Final = 1 << 16
"""Places behind what does not read that look like records, as they overlap, and are none. A crash leaves a few. Each may have as many bytes as a leaf to be hashed, and a file
has room for twenty million."""

_CHECKSUM_AT: Final = RECORD_HEADER_BYTES - 8
assert _RECORD.size == RECORD_HEADER_BYTES


def encode_append(leaves: Sequence[bytes], first: int, durable: int) -> bytes:
    """The records of one append, the first leaf having the index `first`."""
    parts: list[bytes] = []
    for at, leaf in enumerate(leaves):
        flags = _CONTINUES if at < len(leaves) - 1 else 0
        head = _RECORD.pack(_MAGIC, flags, b"", len(leaf), first + at, durable, 0)[:_CHECKSUM_AT]
        checksum = xxhash.xxh3_64(head)
        checksum.update(leaf)
        parts += (head, checksum.digest(), leaf)
    return b"".join(parts)


class WalFullError(Exception):
    """The disk has no room for the appends: nothing of them is in the file, which is as it was."""


class Record(NamedTuple):
    """One record as read: the leaf's number, whether its append goes on, the leaf, and where the record ends."""

    number: int
    continues: bool
    durable: int
    leaf: bytes
    end: int


def read_record(data: bytes, at: int) -> Record | None:
    """The record at `at`, None where there is no whole one."""
    if at + RECORD_HEADER_BYTES > len(data):
        return None
    magic, flags, reserved, length, number, durable, checksum = _RECORD.unpack_from(data, at)
    end = at + RECORD_HEADER_BYTES + length
    if (
        magic != _MAGIC
        or flags & ~_CONTINUES
        or reserved != b"\0\0\0"
        or length > LEAF_BYTES_MAX
        or end > len(data)
    ):
        return None
    leaf = data[at + RECORD_HEADER_BYTES : end]
    found = xxhash.xxh3_64(data[at : at + _CHECKSUM_AT])
    found.update(leaf)
    if found.intdigest() != checksum:
        return None
    return Record(number, bool(flags), durable, leaf, end)


def segment_name(first: int) -> str:
    """The file name of the segment whose first leaf has this index."""
    return f"{first:020d}{_SUFFIX}"


def segment_first(name: str) -> int | None:
    """The first index of the segment with this file name; None for another file."""
    digits = name.removesuffix(_SUFFIX)
    return (
        int(digits)
        if name.endswith(_SUFFIX) and len(digits) == 20 and digits.isascii() and digits.isdecimal()
        else None
    )


class Torn(NamedTuple):
    """What recovery cut: `bytes` of `segment` from `at` on, `leaves` of them whole but of an unfinished append."""

    segment: str
    at: int
    bytes: int
    leaves: int


def read_segment(data: bytes, name: str, first: int, last_segment: bool) -> Iterator[Record | Torn]:
    """The records of whole appends, then, in the last segment only, at most one `Torn`.

    Raises CorruptionError where what does not read cannot be a torn tail.
    """
    group: list[Record] = []
    at, number, whole_at = 0, first, 0
    while at < len(data):
        record = read_record(data, at)
        if record is None or record.number != number:
            break
        group.append(record)
        at, number = record.end, number + 1
        if not record.continues:
            yield from group
            group, whole_at = [], at
    if whole_at == len(data):
        return
    if not last_segment or _named_durable(data, whole_at, number - len(group)):
        raise CorruptionError(
            f"The audit log's file wal/{name} is damaged at byte {at}: leaf {number} was durable and does not read.",
            hint=VERIFY_HINT,
        )
    yield Torn(name, whole_at, len(data) - whole_at, len(group))


def _named_durable(data: bytes, start: int, number: int) -> bool:
    """True where a later record says that leaf `number` was durable. Only that tells damage from a torn write; and what no write leaves, torn or not, is damage."""
    at, looks = data.find(_MAGIC, start), 0
    while at >= 0:
        record = read_record(data, at)
        if record is not None and record.number >= record.durable > number:
            return True
        looks += record is None
        if looks > LOOKS_MAX:
            return True
        at = data.find(_MAGIC, at + 1 if record is None else record.end)
    return False


class Wal:
    """The open segment, at its end. `size` is the index of the next leaf."""

    def __init__(
        self,
        folder: Path,
        size: int,
        files: Files,
        *,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        require_there: Callable[[], None] = lambda: None,
    ) -> None:
        """Go on in the last segment of `folder`, or start one at `size`. The folder was recovered before. `require_there` raises OSError where another folder is at the path
        by now, in which a new segment would be made, and old ones removed."""
        self._folder, self._files, self._segment_bytes_max = folder, files, segment_bytes_max
        self._require_there = require_there
        self.size = size
        files.make_folder(folder)
        firsts = segments(files, folder)
        self._file: int | None = None
        try:
            self._open(firsts[-1] if firsts else size)
        except BaseException:
            # It may be tried again, for as long as the disk fails.
            with suppress(OSError):
                self.close()
            raise

    def _open(self, first: int) -> None:
        path = self._folder / segment_name(first)
        fresh = not self._files.exists(path)
        self._begin(self._files.open(path, os.O_RDWR | os.O_CREAT), fresh=fresh)

    def _begin(self, file: int, *, fresh: bool) -> None:
        self._file = file
        self._bytes = self._files.size(file)
        if fresh:
            self._files.sync_folder(self._folder)
            self._files.sync_folder(self._folder.parent)

    def append(self, appends: Sequence[Sequence[bytes]]) -> None:
        """Write these appends and return once they are durable. Raises WalFullError, with which the same, and more behind them, may be tried
        again; OSError, with which this object is done for."""
        size, end = self.size, self._bytes
        try:
            self._write_all(appends)
        except OSError as error:
            if not is_full(error):
                raise
            self.size, self._bytes = size, end
            assert self._file is not None
            self._files.truncate(self._file, end)
            raise WalFullError(str(error)) from error
        assert self._file is not None
        self._files.sync(self._file)
        if self._bytes >= self._segment_bytes_max:
            self._roll()

    def _roll(self) -> None:
        path = self._folder / segment_name(self.size)
        self._require_there()
        try:
            file = self._files.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if lacks_resources(error):
                # It goes on in this one, and is rolled behind a later append.
                return
            raise
        assert self._file is not None
        self._files.close(self._file)
        self._begin(file, fresh=True)
        self._require_there()

    def _write_all(self, appends: Sequence[Sequence[bytes]]) -> None:
        durable, group, group_bytes = self.size, list[bytes](), 0
        for leaves in appends:
            data = encode_append(leaves, self.size, durable)
            self.size += len(leaves)
            group.append(data)
            group_bytes += len(data)
            if group_bytes >= _CHUNK_BYTES:
                self._write(b"".join(group))
                group, group_bytes = [], 0
        self._write(b"".join(group))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._bytes = write_all(self._files, self._file, (data,), self._bytes)

    def remove_below(self, index: int) -> None:
        """Remove the segments whose leaves all lie below `index`; never the open one."""
        self._require_there()
        firsts = segments(self._files, self._folder)
        for first, following in pairwise(firsts):
            if following <= index:
                self._files.remove(self._folder / segment_name(first))

    def close(self) -> None:
        """Close the file. Everything appended is durable already. Repeating it does nothing."""
        if self._file is not None:
            self._files.close(self._file)
            self._file = None


def segments(files: Files, folder: Path) -> list[int]:
    """The first indexes of the segments in a folder, ascending."""
    if not files.is_folder(folder):
        return []
    firsts = (segment_first(name) for name in files.names(folder))
    return sorted(first for first in firsts if first is not None)


class Recovery:
    """Reads what a crash left: iterate over its (index, leaf) pairs, then look at `size` and `torn`.

    What reads counts once `settle` returned, which also cuts the torn tail.
    """

    def __init__(self, folder: Path, start: int, files: Files, end: int | None = None) -> None:
        """`start`: where the log begins in case there is no segment at all. `end`: so many leaves were durable, and whoever appended what stands behind them
        was told that it is not there: it is cut as a torn tail is."""
        self._folder, self._files, self._end = folder, files, end
        self._behind: list[int] = []
        """segments behind `end`"""
        self.firsts = segments(files, folder)
        self.size = self.firsts[0] if self.firsts else start
        self.torn: Torn | None = None
        self._unsure: tuple[int, bytes] | None = None
        """where in the last segment leaves begin that no record names as durable, and their bytes"""

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for at, first in enumerate(self.firsts):
            name = segment_name(first)
            if first != self.size:
                raise CorruptionError(
                    f"The audit log's file before wal/{name} ends at leaf {self.size}, so leaves are missing.",
                    hint=VERIFY_HINT,
                )
            data = read_file(self._files, self._folder / name)
            assert data is not None
            durable, end, starts = 0, 0, deque[tuple[int, int]]()
            for found in read_segment(data, name, first, at == len(self.firsts) - 1):
                if isinstance(found, Torn):
                    self.torn = found
                    continue
                if found.number == self._end:
                    self.torn = Torn(name, end, len(data) - end, 0)
                    self._behind = self.firsts[at + 1 :]
                    break
                starts.append((found.number, end))
                durable, end = max(durable, found.durable), found.end
                while starts and starts[0][0] < durable:
                    starts.popleft()
                yield found.number, found.leaf
                self.size = found.number + 1
            self._unsure = (starts[0][1], data[starts[0][1] : end]) if starts else None
            if self._behind:
                del self.firsts[at + 1 :]
                break

    def settle(self) -> None:
        """Cut the torn tail, and make durable what was read. Only after `size` was checked against every checkpoint.

        Records of a killed process, and the segment's name, may stand in the page cache alone. Where a sync had failed the
        kernel calls them clean, and another sync would do nothing: so they are written once more.
        """
        if not self.firsts:
            return
        # The last one first: what is left of them has no hole.
        for first in reversed(self._behind):
            self._files.remove(self._folder / segment_name(first))
        self._files.sync_folder(self._folder)
        self._files.sync_folder(self._folder.parent)
        file = self._files.open(self._folder / segment_name(self.firsts[-1]), os.O_RDWR)
        try:
            if self.torn is not None:
                self._files.truncate(file, self.torn.at)
            if self._unsure is not None:
                at, data = self._unsure
                write_all(self._files, file, (data,), at)
            if self._end is not None:
                self._cut_again(file)
            self._files.sync(file)
        finally:
            self._files.close(file)

    def _cut_again(self, file: int) -> None:
        """A try before this one may have cut what was refused, and its sync have failed: the same length once more would change nothing, and what is on the disk
        come back behind the next leaves."""
        end = self._files.size(file)
        try:
            write_all(self._files, file, (b"\0",), end)
        except OSError as error:
            if not is_full(error):
                raise
        self._files.truncate(file, end)
