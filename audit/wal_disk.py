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
`fdatasync`; a failed write or sync raises OSError and the file is never used again. Recovery cuts what follows
the last whole append only where nothing shows that it was durable: a later record that names it as durable,
or a checkpoint above it, makes it damage (CorruptionError, RolledBackError) and not a torn tail.
Callers: audit.trail, audit.verify (reading).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import xxhash

from audit.errors import VERIFY_HINT
from audit.leaf import LEAF_BYTES_MAX
from audit.tile_disk import sync_folder
from felix.errors import CorruptionError

SEGMENT_BYTES_MAX: Final = 64 << 20
"""A segment is rolled when it is longer: recovery reads what is kept, usually two segments."""
RECORD_HEADER_BYTES: Final = 36
_RECORD: Final = Struct(">4sB3sIQQQ")
_MAGIC: Final = b"FXwl"
_CONTINUES: Final = 1
_SUFFIX: Final = ".wal"
_CHUNK_BYTES: Final = 1 << 20
"""What one write call is given: the kernel copies it while other threads run."""

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
    return int(digits) if name.endswith(_SUFFIX) and len(digits) == 20 and digits.isdecimal() else None


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
    """True where a later record says that leaf `number` was durable. Only that tells damage from a torn write."""
    at = data.find(_MAGIC, start)
    while at >= 0:
        record = read_record(data, at)
        if record is not None and record.number >= record.durable > number:
            return True
        at = data.find(_MAGIC, at + 1 if record is None else record.end)
    return False


class Wal:
    """The open segment, at its end. `size` is the index of the next leaf."""

    def __init__(
        self,
        folder: Path,
        size: int,
        *,
        sync: Callable[[int], None] = os.fdatasync,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
    ) -> None:
        """Go on in the last segment of `folder`, or start one at `size`. The folder was recovered before."""
        self._folder, self._sync, self._segment_bytes_max = folder, sync, segment_bytes_max
        self.size = size
        folder.mkdir(parents=True, exist_ok=True)
        firsts = segments(folder)
        self._open(firsts[-1] if firsts else size)

    def _open(self, first: int) -> None:
        path = self._folder / segment_name(first)
        fresh = not path.exists()
        self._file = path.open("ab", buffering=0)
        self._bytes = self._file.tell()
        if fresh:
            sync_folder(self._folder)
            sync_folder(self._folder.parent)

    def append(self, appends: Sequence[Sequence[bytes]]) -> None:
        """Write these appends and return once they are durable. Raises OSError; then this object is done for."""
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
        self._sync(self._file.fileno())
        if self._bytes >= self._segment_bytes_max:
            self._file.close()
            self._open(self.size)

    def _write(self, data: bytes) -> None:
        self._bytes += len(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def remove_below(self, index: int) -> None:
        """Remove the segments whose leaves all lie below `index`; never the open one."""
        firsts = segments(self._folder)
        for first, following in pairwise(firsts):
            if following <= index:
                (self._folder / segment_name(first)).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Everything appended is durable already."""
        self._file.close()


def segments(folder: Path) -> list[int]:
    """The first indexes of the segments in a folder, ascending."""
    if not folder.is_dir():
        return []
    firsts = (segment_first(path.name) for path in folder.iterdir())
    return sorted(first for first in firsts if first is not None)


class Recovery:
    """Reads what a crash left: iterate over its (index, leaf) pairs, then look at `size` and `torn`.

    The torn tail stays in the file until `cut`.
    """

    def __init__(self, folder: Path, start: int) -> None:
        """`start`: where the log begins in case there is no segment at all."""
        self._folder = folder
        self.firsts = segments(folder)
        self.size = self.firsts[0] if self.firsts else start
        self.torn: Torn | None = None

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        if self.firsts:
            # Whole records of a killed process, and the segment's name, may stand in the page cache alone; from here on they count.
            sync_folder(self._folder)
            sync_folder(self._folder.parent)
            with (self._folder / segment_name(self.firsts[-1])).open("r+b") as file:
                os.fsync(file.fileno())
        for at, first in enumerate(self.firsts):
            name = segment_name(first)
            if first != self.size:
                raise CorruptionError(
                    f"The audit log's file before wal/{name} ends at leaf {self.size}, so leaves are missing.",
                    hint=VERIFY_HINT,
                )
            data = (self._folder / name).read_bytes()
            for found in read_segment(data, name, first, at == len(self.firsts) - 1):
                if isinstance(found, Torn):
                    self.torn = found
                else:
                    yield found.number, found.leaf
                    self.size = found.number + 1

    def cut(self) -> None:
        """Cut the torn tail, if there is one. Only after `size` was checked against every checkpoint."""
        if self.torn is None:
            return
        with (self._folder / self.torn.segment).open("r+b") as file:
            file.truncate(self.torn.at)
            os.fsync(file.fileno())
