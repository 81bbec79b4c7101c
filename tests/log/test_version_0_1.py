"""Logs that version 0.1 wrote are read as they are, go on in today's format, and are copied like any other."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import msgspec
import pytest
from log.building import IDENTITY, batch_of, masked, open_disk, placed
from msgspec.structs import astuple
from typer.testing import CliRunner
from version_0_1 import SHARDS, lay_out

from cli.log import app
from felix.batch import HEADER_BYTES, Batch, decode_batch, decode_records
from region.log.disk import DiskLog
from region.log.frame import Frame
from region.log.point import LogPoint
from region.log.recovery import Recovered
from region.log.segment_limits import SegmentLimits
from region.log.verify import verify_shard

LIMITS = SegmentLimits(segment_bytes_max=1_200)
FOLDERS = ("rolled", "trimmed", "crashed", "compacted")


class Expected(msgspec.Struct):
    """What version 0.1 itself read."""

    start: int
    end: int
    segments: int
    records: list[tuple[int, str | None, str]]
    annotations: dict[int, str]
    epochs: list[tuple[int, int]]
    producers: dict[int, list[tuple[int, int, int, int, int]]]
    cut_bytes: int
    clean_to: int
    tombstones_from: int


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    with tarfile.open(SHARDS) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def expected(shards: Path) -> dict[str, Expected]:
    return msgspec.json.decode(
        (shards / "expected.json").read_bytes(), type=dict[str, Expected], strict=False
    )


def copied(shards: Path, name: str, target: Path) -> Path:
    shutil.copytree(shards / name, target / name)
    return target / name


def opened(folder: Path) -> tuple[DiskLog, Recovered]:
    return DiskLog.open(folder, IDENTITY, now_ms=2_000, limits=LIMITS)


def read(log: DiskLog) -> list[tuple[int, str | None, str]]:
    found: list[tuple[int, str | None, str]] = []
    offset = log.start_offset
    while batches := log.read(offset, 1 << 20, log.end_offset):
        for batch in batches:
            plain = masked(Batch(batch.header, batch.data[HEADER_BYTES:]))
            found += [
                (
                    one.offset,
                    None if one.key is None else bytes(one.key).decode(),
                    bytes(one.payload).decode(),
                )
                for one in decode_records(decode_batch(plain.encode()))
            ]
            offset = batch.header.next_offset
    return found


def frames_of(log: DiskLog, point: LogPoint) -> list[tuple[int, bytes, int, bytes]]:
    found: list[tuple[int, bytes, int, bytes]] = []
    while frames := log.read_frames(point, 700, log.end_point):
        for one in frames:
            body = bytes(one.batch.body) if one.batch else b""
            found.append((one.base_offset, body, one.slot, one.annotation))
            point = (
                LogPoint(one.batch.header.next_offset)
                if one.batch
                else LogPoint(point.offset, point.note + 1)
            )
    assert point == log.end_point
    return found


def write(log: DiskLog, times: int) -> None:
    for _ in range(times):
        offset, epoch = log.end_offset, log.epochs.current
        batch = masked(placed(batch_of(b"today" * 30), offset, 1_800_000_000_000, epoch))
        log.write([Frame(batch, offset, epoch), Frame(None, offset + 1, epoch, 3, b"@%d" % offset)], 2_000)
        log.sync()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_shard_of_version_0_1_is_read_as_that_version_read_it(
    name: str, shards: Path, expected: dict[str, Expected], tmp_path: Path
) -> None:
    folder, wanted = copied(shards, name, tmp_path), expected[name]
    verdict = verify_shard(folder, IDENTITY)
    assert verdict.is_whole and bool(verdict.torn_bytes) == (name == "crashed")
    log, found = opened(folder)
    assert found.report.cut_bytes == wanted.cut_bytes
    assert (log.start_offset, log.end_offset, log.segment_count) == (
        wanted.start,
        wanted.end,
        wanted.segments,
    )
    assert read(log) == wanted.records
    assert log.annotations == {slot: note.encode() for slot, note in wanted.annotations.items()}
    assert [tuple(one) for one in found.epochs.starts] == wanted.epochs
    known = {producer: [astuple(one) for one in batches[-32:]] for producer, batches in found.producers}
    assert known == wanted.producers
    assert (log.compaction.clean_to, log.compaction.tombstones_from) == (
        wanted.clean_to,
        wanted.tombstones_from,
    )
    log.close()


@pytest.mark.parametrize("name", FOLDERS)
def test_it_goes_on_in_todays_format_and_every_place_keeps_its_point(
    name: str, shards: Path, tmp_path: Path
) -> None:
    folder = copied(shards, name, tmp_path)
    log, _ = opened(folder)
    old, end = log.segments, log.end_point
    assert all(one.header.head is None for one in old)
    before = [] if name == "compacted" else frames_of(log, log.start_point)
    write(log, 12)
    assert log.segments[-1].header.head == (1, len(log.annotations)), "behind the position that was last"
    after = frames_of(log, end)
    log.close()
    assert verify_shard(folder, IDENTITY).is_whole
    log, _ = opened(folder)
    assert frames_of(log, end) == after
    assert [one.base_point for one in log.segments[: len(old)]] == [one.base_point for one in old]
    if name != "compacted":
        assert frames_of(log, log.start_point) == before + after
        copy = open_disk(tmp_path / "copy", limits=LIMITS, origin=log.origin(b""))
        while frames := log.read_frames(copy.end_point, 900, log.end_point):
            copy.write_frames(copy.end_point, frames, 2_000)
        assert frames_of(copy, copy.start_point) == before + after
        assert (copy.annotations, copy.epochs.starts) == (log.annotations, log.epochs.starts)
        copy.close()
        assert verify_shard(tmp_path / "copy", IDENTITY).findings == []
    log.truncate(end)
    assert log.end_point == end
    log.close()


def test_positions_at_the_seam_of_old_segments_are_counted_once(shards: Path, tmp_path: Path) -> None:
    log, _ = opened(copied(shards, "rolled", tmp_path))
    seams = [one.base_point for one in log.segments[1:] if one.base_note]
    assert len(seams) > 2, "some segments end with positions"
    for seam in seams:
        (last,) = log.read_frames(LogPoint(seam.offset, seam.note - 1), 1, seam)
        assert last.batch is None and log.read_frames(seam, 1, seam) == []
        (following,) = log.read_frames(seam, 1, log.end_point)
        assert following.base_offset == seam.offset
    log.close()


@pytest.mark.parametrize("region", ["us-east", "eu-west"])
def test_all_logs_of_a_region_of_version_0_1_verify_and_open_with_its_keys(
    region: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(lay_out(tmp_path)))
    result = CliRunner().invoke(app, ["verify", "--open", "--json", "--region", region])
    assert result.exit_code == 0, result.output
    verdicts = msgspec.json.decode(result.stdout)
    assert verdicts["whole"] is True
    assert all(not each["findings"] for each in verdicts["items"]), verdicts
