"""Verification at rest: what is whole is called whole, and every changed byte is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log.building import (
    IDENTITY,
    SMALL,
    append,
    batch_of,
    compact,
    keyed,
    masked,
    open_disk,
    placed,
    write_batches,
)
from long_runs import count
from msgspec.structs import replace

from felix.batch import FLAG_SEALED, Batch
from felix.errors import TamperError
from felix.settings import Retention
from region.log.disk import DiskLog
from region.log.durable_mark import MARK_NAME
from region.log.frame import Frame
from region.log.segment import ShardIdentity
from region.log.segment_limits import SegmentLimits
from region.log.verify import ShardVerdict, verify_shard


def verdict_of(folder: Path) -> ShardVerdict:
    return verify_shard(folder, IDENTITY)


def filled(folder: Path, batches: int = 30) -> DiskLog:
    log = open_disk(folder, limits=SMALL)
    for at in range(batches):
        write_batches(log, [batch_of(b"payload %d" % at * 10)], time_ms=1_000 + at)
        log.sync()
    return log


def test_a_whole_log_is_whole_and_counted(tmp_path: Path) -> None:
    filled(tmp_path).close()
    seen = []
    verdict = verify_shard(tmp_path, IDENTITY, progress=seen.append)
    assert verdict.is_whole and not verdict.findings
    assert (verdict.batches, verdict.records, verdict.log_start, verdict.log_end) == (30, 30, 0, 30)
    assert verdict.segments > 2 and verdict.segment_bytes > sum(seen) > 0


def test_a_compacted_log_with_retention_and_reopening_is_whole(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=SegmentLimits(segment_bytes_max=1_500))
    for at in range(60):
        append(log, keyed((b"k%d" % (at % 9), b"v" * 50), (None, b"x" * 9)), 1_000 + at)
    compact(log, now_ms=5_000)
    log.delete_old(Retention(size_bytes=4_000), 5_000, below=log.end_offset)
    log.close()
    verdict = verdict_of(tmp_path)
    assert verdict.is_whole and not verdict.findings, verdict.findings
    assert verdict.compacted_segments and verdict.log_start > 0
    assert verify_shard(tmp_path, IDENTITY, open_batch=masked).findings[0].what == "it is not sealed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    log = open_disk(folder, limits=SegmentLimits(segment_bytes_max=700))
    for at in range(12):
        append(log, keyed((b"k%d" % (at % 3), b"v" * 20), (None, b"x")), 1_000 + at)
    compact(log, now_ms=5_000)
    append(log, keyed((b"k1", b"last")), 5_000)
    log.close()
    return folder


@given(data=st.data())
@settings(max_examples=count(200, 600), deadline=None)
def test_a_change_of_any_bit_of_a_segment_is_damage(whole: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(whole.glob("*.seg"))))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    try:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        assert not verdict_of(whole).is_whole
    finally:
        path.write_bytes(content)


def test_every_missing_segment_and_every_cut_end_is_damage(whole: Path) -> None:
    assert verdict_of(whole).is_whole
    for path in sorted(whole.glob("*.seg")):
        content = path.read_bytes()
        for left in (b"", content[: len(content) // 2], content[:-1]):
            path.write_bytes(left)
            assert not verdict_of(whole).is_whole
        path.unlink()
        assert not verdict_of(whole).is_whole
        path.write_bytes(content)


def test_a_torn_tail_and_leftovers_are_notes(tmp_path: Path) -> None:
    log = filled(tmp_path)
    write_batches(log, [batch_of(b"never acknowledged")])
    log.abandon()
    path = max(tmp_path.glob("*.seg"))
    path.write_bytes(path.read_bytes()[:-3])
    (tmp_path / "x.seg.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_bytes(b"a person was here")
    min(tmp_path.glob("*.idx")).write_bytes(b"rubbish")
    before = {found.name: found.read_bytes() for found in tmp_path.iterdir()}
    verdict = verdict_of(tmp_path)
    assert verdict.is_whole and verdict.torn_bytes > 0 and len(verdict.findings) == 4, verdict.findings
    assert {found.name: found.read_bytes() for found in tmp_path.iterdir()} == before, "nothing is changed"
    open_disk(tmp_path).close()
    assert verdict_of(tmp_path).torn_bytes == 0


def test_small_files_that_do_not_decode_are_notes(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.save_producers(b"no snapshot")
    log.close()
    (tmp_path / "epochs").write_bytes(b"rubbish")
    (tmp_path / MARK_NAME).write_bytes(b"rubbish")
    verdict = verdict_of(tmp_path)
    assert verdict.is_whole
    assert {Path(finding.file).name for finding in verdict.findings} == {"epochs", MARK_NAME, "producers"}


def test_another_shards_segment_and_times_that_go_back_are_damage(tmp_path: Path) -> None:
    log = open_disk(tmp_path / "one")
    log.write(
        [Frame(placed(batch_of(b"a"), 0, 2_000, 3), 0, 3), Frame(placed(batch_of(b"b"), 1, 1_000, 2), 1, 2)],
        0,
    )
    log.close()
    found = [finding.what for finding in verdict_of(tmp_path / "one").findings if finding.is_damage]
    assert found == ["its append time 1000 is before 2000", "its leader epoch 2 is before 3"]
    other = verify_shard(tmp_path / "one", ShardIdentity("eu-west", *IDENTITY[1:]))
    assert "it belongs to" in other.findings[0].what and not other.is_whole


def test_a_batch_that_cannot_be_opened_is_damage(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    ready = placed(batch_of(b"sealed, so to say"), 0)
    log.write([Frame(Batch(replace(ready.header, flags=FLAG_SEALED), ready.body), 0, 0)], 0)
    log.close()

    def opens(batch: Batch) -> Batch:
        return Batch(replace(batch.header, flags=0), batch.body)

    def fails(batch: Batch) -> Batch:
        raise TamperError("It was changed.")

    assert verify_shard(tmp_path, IDENTITY, open_batch=opens).opened == 1
    verdict = verify_shard(tmp_path, IDENTITY, open_batch=fails)
    assert not verdict.is_whole and verdict.findings[0].what == "It was changed"
