"""Notes that are on the disk before the batches that they stand for: what a crash leaves open is done from them.

A note is bytes that the log does not look into. Who appends a batch with a note has something to do once the batch is
durable (region.crossing.arrivals writes its audit leaves), and releases the note when that is done. After a crash `read` gives every
note that was not released: for each of them the batch may be in the log, or not.

Two files in the shard's folder, `ahead-0` and `ahead-1`: one is written until it is full, then the other, once all of its
notes are released. Records, big-endian::

    0   magic "FXah"     4     16 checksum   8    XXH3-64 of bytes 0..16 and the note
    4   length           4     24 note
    8   number           8

Invariants: `write` returns after the sync; a note is in the file before any byte of its batch is in the log; a write that
fails leaves nothing behind; numbers rise. What does not decode is a write that a crash cut off: its batch was never written.
Blocking: threads only, one at a time, but for `released`, which any thread may set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import xxhash

from felix.storage.port import Files, write_all
from felix.storage.small_file import read_file

AHEAD_NAMES: Final = ("ahead-0", "ahead-1")
AHEAD_BYTES_MAX: Final = 4 << 20
"""After so many bytes the other file is written, where it is free: what a start has to read stays small."""

_MAGIC: Final = b"FXah"
_RECORD: Final = Struct(">4sIQQ")
_CHECKSUM_AT: Final = _RECORD.size - 8


class Note(NamedTuple):
    """One note. Its number is the shard's, in the order of appending."""

    number: int
    data: bytes


def encode_note(note: Note) -> bytes:
    """The record of a note."""
    head = _RECORD.pack(_MAGIC, len(note.data), note.number, 0)[:_CHECKSUM_AT]
    checksum = xxhash.xxh3_64(head)
    checksum.update(note.data)
    return b"".join((head, checksum.digest(), note.data))


def decode_notes(data: bytes) -> list[Note]:
    """Every note that stands whole in a file's bytes, also behind a record that does not."""
    found: list[Note] = []
    at = data.find(_MAGIC)
    while 0 <= at <= len(data) - _RECORD.size:
        _, length, number, checksum = _RECORD.unpack_from(data, at)
        end = at + _RECORD.size + length
        whole = end <= len(data)
        if whole:
            state = xxhash.xxh3_64(data[at : at + _CHECKSUM_AT])
            state.update(data[at + _RECORD.size : end])
            whole = state.intdigest() == checksum
        if whole:
            found.append(Note(number, data[at + _RECORD.size : end]))
        at = data.find(_MAGIC, end if whole else at + 1)
    return found


@dataclass(slots=True)
class _Half:
    name: str
    descriptor: int = -1
    size_bytes: int = 0
    end: int = 0
    """the number after its last note"""


class Ahead:
    """The notes of one shard. `read` and `clear` come before the first `write`."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files = folder, files
        self._halves = [_Half(name) for name in AHEAD_NAMES]
        self._active = 0
        self.released = 0
        """notes with a number below are released; the rest may still be asked for after a crash"""

    def read(self) -> list[Note]:
        """What is held, in the order of its numbers."""
        data = (read_file(self._files, self._folder / half.name) or b"" for half in self._halves)
        return sorted(note for each in data for note in decode_notes(each))

    def clear(self) -> None:
        """Let go of all that `read` gave: it is done."""
        for half in self._halves:
            if self._files.exists(self._folder / half.name):
                self._open(half)
                self._empty(half)

    def write(self, notes: Sequence[Note]) -> None:
        """Make these durable. Raises OSError, with nothing of them left unless that fails, too."""
        half, other = self._halves[self._active], self._halves[1 - self._active]
        if half.size_bytes >= AHEAD_BYTES_MAX and other.end <= self.released:
            self._active = 1 - self._active
            half = other
            self._empty(half)
        self._open(half)
        try:
            end = write_all(
                self._files, half.descriptor, [encode_note(note) for note in notes], half.size_bytes
            )
            self._files.sync(half.descriptor)
        except OSError:
            self._files.truncate(half.descriptor, half.size_bytes)
            raise
        half.size_bytes, half.end = end, notes[-1].number + 1

    def tidy(self) -> None:
        """Empty the files where every note in them is released. Losing this to a crash does no harm."""
        for half in self._halves:
            if half.end <= self.released:
                self._empty(half)

    def close(self) -> None:
        """Close the files."""
        for half in self._halves:
            if half.descriptor >= 0:
                self._files.close(half.descriptor)
                half.descriptor = -1

    def _open(self, half: _Half) -> None:
        if half.descriptor >= 0:
            return
        path = self._folder / half.name
        descriptor = self._files.open(path, os.O_RDWR | os.O_CREAT)
        try:
            # Also where it was there: whoever made it may not have come to sync its name.
            self._files.sync_folder(self._folder)
            half.size_bytes = self._files.size(descriptor)
        except OSError:
            self._files.close(descriptor)
            raise
        half.descriptor = descriptor

    def _empty(self, half: _Half) -> None:
        if half.size_bytes:
            self._files.truncate(half.descriptor, 0)
            half.size_bytes = 0
