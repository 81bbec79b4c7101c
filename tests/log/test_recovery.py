"""Recovery: a torn tail is cut and reported, damage is refused, and nothing acknowledged is ever cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log.building import IDENTITY, SMALL, batch_of, open_disk, placed, stored, write_batches

from felix.errors import CorruptionError
from felix.settings import Retention
from felix.storage.disk import DiskFiles
from region.log.disk import DiskLog
from region.log.durable_mark import MARK_NAME
from region.log.frame import Frame
from region.log.point import LogPoint
from region.log.recovery import evidence_beyond, judge_tail, recover
from region.log.segment import NOTE_PIECE_BYTES_MAX, Kind, ShardIdentity, encode_entry_header
from region.log.segment_scan import WINDOW_BYTES


def only_segment(folder: Path) -> Path:
    (path,) = folder.glob("*.seg")
    return path


def crash_with_unsynced_group(folder: Path, synced: list[list[bytes]], unsynced: list[bytes]) -> int:
    """Groups that were synced, then one that was written only; the position at which that one begins."""
    log = open_disk(folder)
    for group in synced:
        write_batches(log, [batch_of(payload) for payload in group])
        log.sync()
    position = log.bytes_held
    write_batches(log, [batch_of(payload) for payload in unsynced])
    log.abandon()
    return position


def test_torn_tail_at_every_byte_of_the_last_batch_is_cut_and_reported(tmp_path: Path) -> None:
    source = tmp_path / "source"
    begins = crash_with_unsynced_group(source, [[b"one"], [b"two"]], [b"three, torn"])
    whole = only_segment(source).read_bytes()
    for length in range(begins, len(whole)):
        folder = tmp_path / str(length)
        shutil.copytree(source, folder)
        only_segment(folder).write_bytes(whole[:length])
        log = open_disk(folder)
        assert stored(log) == [b"one", b"two"]
        assert log.report.cut_bytes == length - begins
        if length > begins:
            assert (log.report.cut_from_offset, log.report.cut_position) == (2, begins)
            assert log.report.cut_file.endswith(".seg") and log.report.cut_reason
        write_batches(log, [batch_of(b"after")])
        log.close()
        again = open_disk(folder)
        assert stored(again) == [b"one", b"two", b"after"]
        assert again.report.cut_bytes == 0
        again.close()


def test_torn_tail_with_garbage_at_every_byte_is_cut(tmp_path: Path) -> None:
    source = tmp_path / "source"
    begins = crash_with_unsynced_group(source, [[b"one"], [b"two"]], [b"three, torn"])
    whole = only_segment(source).read_bytes()
    for at in range(begins, len(whole)):
        folder = tmp_path / str(at)
        shutil.copytree(source, folder)
        only_segment(folder).write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        log = open_disk(folder)
        assert stored(log) == [b"one", b"two"]
        assert log.report.cut_bytes == len(whole) - begins
        log.close()


@pytest.mark.parametrize("mark_survives", [True, False])
def test_flip_of_every_byte_inside_is_reported_and_refused(tmp_path: Path, mark_survives: bool) -> None:
    folder = tmp_path / "shard"
    tail = crash_with_unsynced_group(folder, [[b"one", b"uno"], [b"two"]], [b"three"])
    path = only_segment(folder)
    whole = path.read_bytes()
    if not mark_survives:
        (folder / MARK_NAME).unlink()
    for at in range(tail):
        damaged = whole[:at] + bytes([whole[at] ^ 0x01]) + whole[at + 1 :]
        path.write_bytes(damaged)
        with pytest.raises(CorruptionError) as refused:
            recover(folder, IDENTITY, files=DiskFiles())
        assert str(path) in refused.value.sentence
        assert "offset" in refused.value.sentence
        assert path.read_bytes() == damaged, "a refused log is not changed"


def test_acknowledged_tail_is_never_cut(tmp_path: Path) -> None:
    """Every byte of the last batch, once it was synced: missing or flipped, the shard refuses."""
    folder = tmp_path / "shard"
    log = open_disk(folder)
    write_batches(log, [batch_of(b"one")])
    log.sync()
    begins = log.bytes_held
    write_batches(log, [batch_of(b"two, acknowledged")])
    log.sync()
    log.abandon()
    path = only_segment(folder)
    whole = path.read_bytes()
    for at in range(begins, len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(CorruptionError, match="acknowledged"):
                recover(folder, IDENTITY, files=DiskFiles())
            assert path.read_bytes() == damaged


def test_power_loss_that_keeps_only_the_end_of_an_unsynced_group_is_a_torn_tail(tmp_path: Path) -> None:
    """Pages of one group reach the disk in any order: a whole batch behind a torn one proves no sync."""
    folder = tmp_path / "shard"
    begins = crash_with_unsynced_group(folder, [[b"one"]], [b"two", b"three", b"four"])
    path = only_segment(folder)
    whole = bytearray(path.read_bytes())
    whole[begins + 60] ^= 0xFF
    path.write_bytes(whole)
    log = open_disk(folder)
    assert stored(log) == [b"one"]
    assert log.report.cut_bytes == len(whole) - begins
    log.close()


@given(
    synced=st.lists(st.lists(st.binary(max_size=900), min_size=1, max_size=4), max_size=4),
    torn=st.lists(st.binary(max_size=2_000), min_size=1, max_size=6),
    data=st.data(),
)
@settings(max_examples=120, deadline=None)
def test_any_pages_lost_from_an_unsynced_group_leave_all_that_was_synced(
    synced: list[list[bytes]], torn: list[bytes], data: st.DataObject
) -> None:
    """A loss of power on an honest disk: any sectors of the open group, any length of it, and a mark of any age."""
    with TemporaryDirectory(prefix="felix-log-") as temporary:
        folder = Path(temporary)
        log = open_disk(folder)
        marks = [(folder / MARK_NAME).read_bytes()]
        for group in synced:
            write_batches(log, [batch_of(payload) for payload in group])
            log.sync()
            marks.append((folder / MARK_NAME).read_bytes())
        begins = log.bytes_held
        write_batches(log, [batch_of(payload) for payload in torn])
        log.abandon()
        path = only_segment(folder)
        whole = bytearray(path.read_bytes())
        lost = data.draw(st.sets(st.integers(begins // 512, len(whole) // 512)))
        for sector in lost:
            start, end = max(begins, sector * 512), min(len(whole), sector * 512 + 512)
            whole[start:end] = bytes(end - start)
        del whole[data.draw(st.integers(begins, len(whole))) :]
        path.write_bytes(whole)
        (folder / MARK_NAME).write_bytes(data.draw(st.sampled_from(marks)))
        log = open_disk(folder)
        expected = [payload for group in synced for payload in group]
        held = stored(log)
        assert held[: len(expected)] == expected
        assert held[len(expected) :] == torn[: len(held) - len(expected)]
        log.close()


def test_later_group_proves_that_a_damaged_one_was_synced_even_with_a_stale_mark(tmp_path: Path) -> None:
    """Power is lost, the mark on disk is old: the next group's entry still says what had been synced."""
    folder = tmp_path / "shard"
    log = open_disk(folder)
    write_batches(log, [batch_of(b"one")])
    log.sync()
    stale = (folder / MARK_NAME).read_bytes()
    second = log.bytes_held
    write_batches(log, [batch_of(b"two")])
    log.sync()
    write_batches(log, [batch_of(b"three")])
    log.abandon()
    (folder / MARK_NAME).write_bytes(stale)
    path = only_segment(folder)
    whole = bytearray(path.read_bytes())
    whole[second + 150] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CorruptionError, match="acknowledged"):
        recover(folder, IDENTITY, files=DiskFiles())


def test_an_entry_at_the_end_of_what_is_read_at_a_time_is_evidence_once(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    header, path = log.segments[0].header, only_segment(tmp_path)
    log.close()

    def note(synced_to: int, size: int) -> bytes:
        return encode_entry_header(
            Kind.NOTE, base_offset=0, leader_epoch=1, synced_to=synced_to, batch_length=0, slot=0,
            annotation=bytes(size), salt=header.salt,
        )  # fmt: skip

    whole, cut_off = note(7, 100), note(9, NOTE_PIECE_BYTES_MAX)
    path.write_bytes(data := bytes(WINDOW_BYTES - 30_000 - len(whole)) + whole + cut_off)
    files = DiskFiles()
    descriptor = files.open(path, os.O_RDONLY)
    assert evidence_beyond(files, descriptor, header, 0, len(data)) == (9, 2)
    files.close(descriptor)


def test_entry_inside_a_payload_is_no_evidence(tmp_path: Path) -> None:
    """A producer who sends the bytes of another shard's entry cannot make a torn tail look like damage."""
    other = tmp_path / "other"
    crash_with_unsynced_group(other, [[b"x"] * 3, [b"y"]], [b"z"])
    forged = only_segment(other).read_bytes()
    folder = tmp_path / "shard"
    begins = crash_with_unsynced_group(folder, [[b"one"]], [forged])
    path = only_segment(folder)
    path.write_bytes(path.read_bytes()[:-1])
    log = open_disk(folder)
    assert log.report.cut_position == begins
    log.close()


def test_every_way_to_lose_a_whole_segment_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    log = open_disk(source, limits=SMALL)
    for number in range(40):
        write_batches(log, [batch_of(b"%d" % number * 50)])
        log.sync()
    log.close()
    names = sorted(path.name for path in source.glob("*.seg"))
    assert len(names) > 3
    for name in names:
        folder = tmp_path / name
        shutil.copytree(source, folder)
        (folder / name).unlink()
        with pytest.raises(CorruptionError):
            recover(folder, IDENTITY, files=DiskFiles())


def test_damage_in_a_closed_segment_is_found_by_full_verification_and_by_reading(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=SMALL)
    for number in range(40):
        write_batches(log, [batch_of(b"%d" % number * 50)])
        log.sync()
    log.close()
    first = min(tmp_path.glob("*.seg"))
    data = bytearray(first.read_bytes())
    data[data.index(b"1" * 50)] ^= 1
    first.write_bytes(data)
    with pytest.raises(CorruptionError, match=first.name):
        recover(tmp_path, IDENTITY, files=DiskFiles(), full=True)
    log = open_disk(tmp_path, limits=SMALL)
    with pytest.raises(CorruptionError, match=first.name):
        stored(log)
    log.close()


def test_closed_segment_cut_short_is_refused(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=SMALL)
    for number in range(40):
        write_batches(log, [batch_of(b"%d" % number * 50)])
        log.sync()
    log.close()
    first = min(tmp_path.glob("*.seg"))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=first.name):
        recover(tmp_path, IDENTITY, files=DiskFiles())


def test_damaged_or_missing_indexes_lose_nothing(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=SMALL)
    for number in range(40):
        write_batches(log, [batch_of(b"%d" % number * 50)])
        log.sync()
    expected = stored(log)
    log.close()
    indexes = sorted(tmp_path.glob("*.idx"))
    good = indexes[0].read_bytes()
    indexes[0].write_bytes(good[:-1] + b"\xff")
    indexes[1].unlink()
    log = open_disk(tmp_path, limits=SMALL)
    assert log.report.indexes_rebuilt == 2
    assert stored(log) == expected
    assert indexes[0].read_bytes() == good
    log.close()


def test_shard_of_another_region_or_incarnation_is_refused(tmp_path: Path) -> None:
    open_disk(tmp_path).close()
    for other in (
        IDENTITY._replace(region="eu-west"),
        IDENTITY._replace(incarnation=bytes(16)),
        IDENTITY._replace(shard=4),
        ShardIdentity("us-east", "acme/payments/cards", IDENTITY.incarnation, 3),
    ):
        with pytest.raises(CorruptionError, match="belongs to"):
            recover(tmp_path, other, files=DiskFiles())


def test_interrupted_deletion_is_finished(tmp_path: Path) -> None:
    class Interrupted(DiskFiles):
        def remove(self, path: Path) -> None:
            if path.suffix == ".seg":
                raise OSError(5, "the power went")
            super().remove(path)

    log = open_disk(tmp_path, Interrupted(), limits=SMALL)
    for number in range(40):
        write_batches(log, [batch_of(b"%d" % number * 50)])
        log.sync()
    with pytest.raises(OSError, match="power"):
        log.delete_old(Retention(size_bytes=4_000), 2_000, below=log.end_offset)
    start = log.start_offset
    log.abandon()
    assert start > 0 and (tmp_path / f"{0:020d}.seg").exists()
    log = open_disk(tmp_path, limits=SMALL)
    assert log.start_offset == start
    assert not (tmp_path / f"{0:020d}.seg").exists()
    log.close()


def test_annotations_survive_roll_retention_and_restart(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=SMALL)
    first = placed(batch_of(b"crossed"), 0)
    log.write([Frame(first, 0, 0, 7, b"us-east@41"), Frame(None, 1, 0, 8, b"ap-south@9")], 1_000)
    log.write([Frame(None, 1, 0, 7, b"us-east@55")], 1_000)
    log.sync()
    for number in range(40):
        write_batches(log, [batch_of(b"%d" % number * 50)])
        log.sync()
    assert log.delete_old(Retention(size_bytes=1), 2_000, below=log.end_offset) > 0
    log.close()
    log = open_disk(tmp_path, limits=SMALL)
    assert log.annotations == {7: b"us-east@55", 8: b"ap-south@9"}
    log.close()


def test_a_slot_that_was_freed_stays_free_over_roll_truncation_and_restart(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=SMALL)
    log.write([Frame(placed(batch_of(b"crossed"), 0), 0, 0, 7, b"old"), Frame(None, 1, 0, 8, b"new")], 1_000)
    log.write([Frame(None, 1, 0, 7)], 1_000)
    assert log.annotations == {8: b"new"}
    log.sync()
    log.close()
    log = open_disk(tmp_path, limits=SMALL)
    assert log.annotations == {8: b"new"}
    for number in range(40):
        write_batches(log, [batch_of(b"%d" % number * 50)])
    log.sync()
    assert log.segment_count > 2
    log.write([Frame(None, log.end_offset, 0, 8)], 1_000)
    log.sync()
    log.close()
    log = open_disk(tmp_path, limits=SMALL)
    assert log.annotations == {}
    log.truncate(LogPoint(log.end_offset - 1))
    assert log.annotations == {8: b"new"}, "the freeing goes with what it came after"
    log.close()


def test_annotation_and_its_batch_stay_or_go_together(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    log.write([Frame(placed(batch_of(b"one"), 0), 0, 0, 1, b"position 1")], 1_000)
    log.sync()
    log.write([Frame(placed(batch_of(b"two"), 1), 1, 0, 1, b"position 2")], 1_000)
    log.abandon()
    path = only_segment(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    log = open_disk(tmp_path)
    assert stored(log) == [b"one"]
    assert log.annotations == {1: b"position 1"}
    log.close()


@pytest.mark.parametrize(
    ("position", "size", "evidence", "readable", "beyond", "refused"),
    [
        (100, 100, 100, True, 0, False),
        (100, 150, 100, True, 0, False),
        (100, 150, 100, True, 2, False),
        (100, 150, 101, True, 0, True),
        (100, 100, 150, True, 0, True),
        (100, 150, 64, False, 0, False),
        (100, 150, 64, False, 1, True),
        (100, 150, 120, False, 1, True),
    ],
)
def test_judgement_of_a_tail(
    position: int, size: int, evidence: int, readable: bool, beyond: int, refused: bool
) -> None:
    verdict = judge_tail(
        position=position,
        segment_bytes=size,
        evidence=evidence,
        mark_readable=readable,
        entries_beyond=beyond,
    )
    assert (verdict is not None) == refused


def test_opening_twice_changes_nothing(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    write_batches(log, [batch_of(b"one"), batch_of(b"two")])
    log.close()
    before = only_segment(tmp_path).read_bytes()
    for _ in range(3):
        log, recovered = DiskLog.open(tmp_path, IDENTITY, now_ms=5)
        assert recovered.report.cut_bytes == 0
        log.close()
    assert only_segment(tmp_path).read_bytes() == before
