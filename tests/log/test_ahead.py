"""Notes beside a shard's log: what is there after a crash, and what is not any more once it is done."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from felix.storage.disk import DiskFiles
from region.log import ahead
from region.log.ahead import AHEAD_NAMES, Ahead, Note, decode_notes, encode_note


class Unsynced(DiskFiles):
    """For what is about bytes and not about the disk."""

    def sync(self, descriptor: int) -> None: ...


def held(folder: Path) -> list[int]:
    """The numbers of what the next start finds."""
    return [note.number for note in Ahead(folder, DiskFiles()).read()]


def test_what_is_written_and_not_released_is_read_again(tmp_path: Path) -> None:
    notes = Ahead(tmp_path, DiskFiles())
    notes.write([Note(0, b"one"), Note(1, b"")])
    notes.write([Note(2, b"FXah" * 9)])
    assert Ahead(tmp_path, DiskFiles()).read() == [Note(0, b"one"), Note(1, b""), Note(2, b"FXah" * 9)]
    notes.released = 2
    notes.tidy()
    assert held(tmp_path) == [0, 1, 2]
    notes.released = 3
    notes.tidy()
    assert held(tmp_path) == []
    notes.close()


def test_a_cut_or_changed_file_gives_the_notes_that_are_whole(tmp_path: Path) -> None:
    random, records = Random(4), [encode_note(Note(number, bytes([number]) * number)) for number in range(20)]
    data = b"".join(records)
    ends = [sum(map(len, records[: number + 1])) for number in range(len(records))]
    for _ in range(300):
        cut = random.randrange(len(data) + 1)
        assert [note.number for note in decode_notes(data[:cut])] == [
            number for number, end in enumerate(ends) if end <= cut
        ]
        at = random.randrange(len(data))
        changed = data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]
        hit = next(number for number, end in enumerate(ends) if at < end)
        assert [note.number for note in decode_notes(changed)] == [n for n in range(20) if n != hit]


def test_a_disk_without_room_leaves_nothing_behind(tmp_path: Path) -> None:
    class Full(DiskFiles):
        room = 100

        def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
            whole = b"".join(buffers)
            if position + len(whole) <= self.room:
                return super().pwritev(descriptor, [whole], position)
            if position < self.room:
                return super().pwritev(descriptor, [whole[: self.room - position]], position)
            raise OSError(errno.ENOSPC, "no room")

    files = Full()
    notes = Ahead(tmp_path, files)
    notes.write([Note(0, b"a")])
    with pytest.raises(OSError, match="no room"):
        notes.write([Note(1, bytes(200))])
    files.room = 1_000
    notes.write([Note(2, b"c")])
    assert held(tmp_path) == [0, 2]
    notes.close()


def test_the_files_take_turns_once_the_other_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "AHEAD_BYTES_MAX", 1_000)
    notes, window = Ahead(tmp_path, Unsynced()), 5
    for number in range(200):
        notes.write([Note(number, bytes(100))])
        notes.released = max(0, number - window)
        assert set(range(notes.released, number + 1)) <= set(held(tmp_path))
        assert (
            sum((tmp_path / name).stat().st_size for name in AHEAD_NAMES if (tmp_path / name).exists())
            < 4_000
        )
    # Nothing is released for long: one file grows, and nothing is lost.
    for number in range(200, 260):
        notes.write([Note(number, bytes(100))])
    assert set(range(notes.released, 260)) <= set(held(tmp_path))
    notes.close()


def test_what_a_start_has_dealt_with_is_let_go_of(tmp_path: Path) -> None:
    before = Ahead(tmp_path, DiskFiles())
    before.write([Note(7, b"old")])
    before.close()
    after = Ahead(tmp_path, DiskFiles())
    assert after.read() == [Note(7, b"old")]
    after.clear()
    after.write([Note(0, b"new")])
    assert held(tmp_path) == [0]
    after.close()
