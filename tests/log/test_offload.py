"""Offload: what is in a store is read through the same log, local files go only after it, whatever fails."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import fsspec
import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from log.building import (
    IDENTITY,
    FailingFiles,
    batch_of,
    first_segment,
    masked,
    open_disk,
    payloads_of,
    placed,
    restore_shard,
)
from log.test_compaction import Crash, CrashingFiles

from felix.batch import decode_batch, decode_records
from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.lazy_event import LazyThreadEvent
from felix.names import StreamName
from felix.runtime.real import REAL
from felix.settings import Offload, Retention
from felix.storage.disk import DiskFiles
from felix.storage.port import Files
from felix.storage.small_file import load_checked
from keys import link
from region.log import fsspec_store as store
from region.log.directory import LogDirectory, offload_base
from region.log.disk import DiskLog
from region.log.epochs import EpochStart
from region.log.errors import NotLocalError, OffsetOutOfRangeError
from region.log.frame import Frame
from region.log.offload import (
    FETCHED_SUFFIX,
    OFFLOADED_NAME,
    Manifest,
    Offloaded,
    decode_manifest,
    decode_offload,
    encode_manifest,
    object_url,
)
from region.log.offloader import (
    FetchedCache,
    Gap,
    History,
    Offloader,
    Throttle,
    _chain,
    _gaps_below,
    check_object,
    fetch,
)
from region.log.point import LogPoint
from region.log.producer_snapshots import SNAPSHOT_SUFFIX
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardHooks, ShardLog, ShardSettings, ShardStore, WorkEndedError
from region.log.verify import verify_shard

SMALL = SegmentLimits(segment_bytes_max=1_000)
SECRET = bytes(range(32))


def tag(purpose: str, data: bytes) -> bytes:
    """As a broker that has the stream's key makes it."""
    return link.tag(SECRET, purpose, data, *IDENTITY)


HOOKS = ShardHooks(seal=masked, open_batch=masked, tag=tag)


@pytest.fixture
def place() -> str:
    return f"memory://felix/{uuid4().hex}"


def filled(folder: Path, batches: int = 30) -> DiskLog:
    log = open_disk(folder, limits=SMALL)
    for at in range(batches):
        append(log, b"%d" % at)
    return log


def append(log: DiskLog, payload: bytes, time_ms: int = 1_000) -> None:
    batch = placed(batch_of(payload * 20), log.end_offset, time_ms)
    log.write([Frame(batch, batch.header.base_offset, 0)], time_ms)
    log.sync()


def offload(
    log: DiskLog,
    base: str,
    local_bytes: int = 0,
    files: Files | None = None,
    epochs: tuple[EpochStart, ...] = (),
) -> object:
    offloader = Offloader(
        log, files or DiskFiles(), base, local_bytes, writer=nullcontext(), pace=store.no_pace, tag=tag
    )
    return offloader.run(log.end_offset, epochs, upload=True)


def read_all(log: DiskLog, cache: FetchedCache | None = None) -> list[bytes]:
    """Every payload, fetching what is not here."""
    cache = cache or FetchedCache()
    found, offset = [], log.start_offset
    while True:
        try:
            batches = log.read(offset, 4_096, log.end_offset)
        except NotLocalError as error:
            assert error.segment.remote is not None
            fetch(DiskFiles(), error.segment.remote, error.segment.fetched_path, cache, store.no_pace)
            continue
        if not batches:
            return found
        for batch in batches:
            found += [bytes(record.payload) for record in decode_records(decode_batch(batch.data))]
            offset = batch.header.next_offset


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """A store that does not answer."""

    def fails(*_: object, **__: object) -> None:
        raise UnavailableError("The store does not answer.")

    with monkeypatch.context() as patch:
        for name in names or ("put_file", "put_bytes", "get_bytes", "digest_of", "get_file", "delete"):
            patch.setattr(store, name, fails)
        yield


# -- one log -------------------------------------------------------------------------------------------


def test_what_is_offloaded_is_read_through_the_same_log(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path)
    everything = read_all(log)
    segments = log.segment_count
    offload(log, place)
    assert len(list(tmp_path.glob("*.seg"))) == 1, "the one that is written to"
    assert log.segment_count == segments and log.bytes_held == log.segments[-1].segment_bytes
    assert read_all(log) == everything
    assert log.offset_for_time(0, log.end_offset) == 0
    for index in tmp_path.glob("*.idx"):
        index.unlink()
    log.close()
    again = open_disk(tmp_path, limits=SMALL)
    assert again.segment_count == segments and not list(tmp_path.glob("*.fetched"))
    assert read_all(again) == everything
    append(again, b"more")
    assert len(read_all(again)) == len(everything) + 1
    again.close()


def test_only_what_is_beyond_the_local_bytes_goes(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path)
    total = log.bytes_held
    offload(log, place, local_bytes=total)
    assert log.bytes_held == total and log.remote_bytes > 0
    offload(log, place, local_bytes=total // 2)
    assert total // 2 - 2_000 < log.bytes_held <= total // 2
    log.close()


def test_a_copy_that_differs_counts_for_nothing(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path)
    real = store.digest_of
    with monkeypatch.context() as patch:
        patch.setattr(store, "digest_of", lambda url, pace: real(url)._replace(sha256="0" * 64))
        with pytest.raises(UnavailableError, match="not what was written"):
            offload(log, place)
    assert not log.offload.segments and len(list(tmp_path.glob("*.seg"))) == log.segment_count
    offload(log, place)
    assert log.offload.segments
    log.close()


def test_a_changed_object_is_found_at_the_read_and_by_verification(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path)
    offload(log, place)
    entry = log.offload.segments[0]
    with fsspec.open(entry.url, "rb") as reader:
        content = reader.read()
    with fsspec.open(entry.url, "wb") as writer:
        writer.write(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptionError, match="were uploaded"):
        read_all(log)
    log.close()
    assert verify_shard(tmp_path, IDENTITY).is_whole, "without looking there"
    verdict = verify_shard(tmp_path, IDENTITY, check_object=check_object)
    assert not verdict.is_whole and verdict.objects_compared == verdict.offloaded_segments - 1


def test_a_damaged_local_segment_is_not_uploaded(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path)
    path = first_segment(tmp_path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError):
        offload(log, place)
    assert store.list_names(place) == []
    log.close()


def test_retention_deletes_objects_too_also_after_a_store_was_away(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path)
    offload(log, place)
    before = len(store.list_names(place))
    log.delete_old(Retention(size_bytes=1_500), 1_000, below=log.end_offset)
    assert log.start_offset > 0 and len(log.offload.pending_deletion) >= 2
    with failing(monkeypatch), pytest.raises(UnavailableError):
        offload(log, place)
    log.close()
    log = open_disk(tmp_path, limits=SMALL)
    offload(log, place)
    assert not log.offload.pending_deletion
    left = store.list_names(place)
    assert len(left) == 2 * len(log.offload.segments) < before
    read_all(log)
    log.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_store_that_deletes_nothing_holds_up_no_upload_and_no_other_store(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    log = filled(tmp_path)
    offload(log, place)
    log.delete_old(Retention(size_bytes=1_500), 1_000, below=log.end_offset)
    doomed = set(log.offload.pending_deletion)
    # `elsewhere`: the stream is offloaded to another store by now, and the first one is gone for good.
    newer = f"{place}-b" if elsewhere else place
    for at in range(30):
        append(log, b"%d" % at)
    deleted = store.delete

    def refuses(url: str) -> None:
        if url.startswith(f"{place}/"):
            raise UnavailableError("The store deletes nothing.")
        deleted(url)

    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", refuses)
        with pytest.raises(UnavailableError, match="deletes nothing"):
            offload(log, newer)
        assert all(segment.remote is not None for segment in log.segments[:-1])
        assert (
            log.bytes_held == log.segments[-1].segment_bytes and set(log.offload.pending_deletion) == doomed
        )
        log.delete_old(Retention(size_bytes=2_000), 1_000, below=log.end_offset)
        assert set(log.offload.pending_deletion) > doomed
        with pytest.raises(UnavailableError, match="deletes nothing"):
            offload(log, newer)
        left = {url for url in log.offload.pending_deletion if not url.startswith(f"{place}/")}
        assert not left
    offload(log, newer)
    assert not log.offload.pending_deletion
    read_all(log)
    log.close()


def test_a_lost_list_of_what_is_elsewhere_is_damage(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path)
    offload(log, place)
    log.close()
    path = tmp_path / OFFLOADED_NAME
    content = path.read_bytes()
    path.unlink()
    assert not verify_shard(tmp_path, IDENTITY).is_whole
    with pytest.raises(CorruptionError):
        open_disk(tmp_path)
    path.write_bytes(content[:-1])
    assert not verify_shard(tmp_path, IDENTITY).is_whole
    with pytest.raises(CorruptionError, match="offloaded"):
        open_disk(tmp_path)
    path.write_bytes(content)
    open_disk(tmp_path).close()


def test_a_lost_folder_is_made_anew_from_the_store(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/store"
    folder = tmp_path / "shard"
    log = filled(folder)
    everything = read_all(log)
    log.write([Frame(None, log.end_offset, 0, 5, b"where a source stands")], 1_000)
    log.roll(1_000)
    append(log, b"last offloaded")
    log.roll(1_000)
    append(log, b"too young")
    offload(log, place)
    log.close()
    with pytest.raises(RequestError) as refused:
        restore_shard(place, folder, IDENTITY, DiskFiles(), tag)
    assert refused.value.code is Code.CONFLICT
    shutil.rmtree(folder)
    restore_shard(place, folder, IDENTITY, DiskFiles(), tag)
    again = open_disk(folder, limits=SMALL)
    assert read_all(again) == [*everything, b"last offloaded" * 20]
    assert again.annotations == {5: b"where a source stands"}
    append(again, b"goes on")
    again.roll(1_000)
    offload(again, place)
    again.close()
    verdict = verify_shard(folder, IDENTITY, check_object=check_object)
    assert verdict.is_whole and not [one for one in verdict.findings if one.is_damage]
    with pytest.raises(RequestError) as nothing:
        restore_shard(object_url(place, "elsewhere"), tmp_path / "new", IDENTITY, DiskFiles(), tag)
    assert nothing.value.code is Code.NOT_FOUND
    with pytest.raises(CorruptionError):
        restore_shard(place, tmp_path / "other", IDENTITY._replace(shard=4), DiskFiles(), tag)


@pytest.mark.parametrize("fewer", [False, True])
def test_a_history_that_was_given_up_is_not_restored_behind_the_one_that_replaced_it(
    tmp_path: Path, place: str, fewer: bool
) -> None:
    folder, backup = tmp_path / "folder", tmp_path / "backup"
    log = filled(folder)
    offload(log, place, epochs=(EpochStart(7, 0),))
    log.close()
    shutil.copytree(folder, backup)
    log = open_disk(folder, limits=SMALL)
    for at in range(100, 150 if fewer else 190):
        append(log, b"%d" % at)
    # Without a restart its epoch is still the first one's; with one it is its own.
    for at in range(190, 200):
        append(log, b"%d" % at)
    offload(log, place, epochs=(EpochStart(7, 0), *([EpochStart(8, 60)] if fewer else [])))
    log.close()
    # The folder is put back, and the log goes on in an epoch of its own.
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    log = open_disk(folder, limits=SMALL)
    for at in range(300, 320):
        append(log, b"%d" % at)
    offload(log, place, epochs=(EpochStart(7, 0), EpochStart(9, 30)))
    wanted, end = read_all(log), log.segments[-1].base_offset
    log.close()
    shutil.rmtree(folder)
    restored = restore_shard(place, folder, IDENTITY, DiskFiles(), tag)
    assert (restored.start, restored.end) == (0, end)
    log = open_disk(folder, limits=SMALL)
    assert read_all(log) == wanted[:end]
    log.close()


def test_epochs_that_a_long_history_forgot_leave_no_segment_out(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path)
    offload(log, place, epochs=(EpochStart(1, 0), EpochStart(2, 9)))
    for at in range(30):
        append(log, b"%d" % at)
    offload(log, place, epochs=(EpochStart(2, 9), EpochStart(3, 40), EpochStart(4, 55)))
    for at in range(30):
        append(log, b"%d" % at)
    offload(log, place, epochs=(EpochStart(3, 40), EpochStart(4, 55), EpochStart(5, 70)))
    end = log.segments[-1].base_offset
    log.close()
    shutil.rmtree(tmp_path)
    restored = restore_shard(place, tmp_path, IDENTITY, DiskFiles(), tag)
    assert (restored.start, restored.end) == (0, end)


def test_a_restoration_that_was_broken_off_is_done_again_and_no_log_begins_beside_it(tmp_path: Path) -> None:
    place, folder = f"file://{tmp_path}/store", tmp_path / "shard"
    log = filled(folder)
    offload(log, place)
    wanted, end = read_all(log), log.segments[-1].base_offset
    log.close()
    refused = 0
    for calls in range(100):
        shutil.rmtree(folder)
        with suppress(Crash):
            restore_shard(place, folder, IDENTITY, CrashingFiles(calls), tag)
            break
        if any(folder.glob("*.seg")):
            open_disk(folder, limits=SMALL).close()
        elif (folder / OFFLOADED_NAME).exists():
            refused += 1
            assert not verify_shard(folder, IDENTITY).is_whole
            with pytest.raises(CorruptionError, match="felix log restore"):
                open_disk(folder, limits=SMALL)
            restore_shard(place, folder, IDENTITY, DiskFiles(), tag)
            again = open_disk(folder, limits=SMALL)
            assert read_all(again) == wanted[:end]
            again.close()
    assert refused > 4


def test_a_log_that_was_begun_anew_writes_over_nothing_of_the_one_before(tmp_path: Path, place: str) -> None:
    """A broker began where the folder was lost, before anybody restored it."""
    folder = tmp_path / "shard"
    log = filled(folder)
    offload(log, place, epochs=(EpochStart(7, 0),))
    wanted, end = read_all(log), log.segments[-1].base_offset
    log.close()
    shutil.rmtree(folder)
    log = filled(folder, 12)
    offload(log, place, epochs=(EpochStart(9, 0),))
    newer, newer_end = read_all(log), log.segments[-1].base_offset
    log.close()
    shutil.rmtree(folder)
    with pytest.raises(RequestError, match="no history of epoch 8") as unknown:
        restore_shard(place, folder, IDENTITY, DiskFiles(), tag, epoch=8)
    assert "9, 7" in (unknown.value.hint or "") and not folder.exists()
    restored = restore_shard(place, folder, IDENTITY, DiskFiles(), tag)
    assert (restored.history, restored.others) == (History(9, newer_end), (History(7, end),))
    log = open_disk(folder, limits=SMALL)
    assert read_all(log) == newer[:newer_end]
    log.close()
    shutil.rmtree(folder)
    restored = restore_shard(place, folder, IDENTITY, DiskFiles(), tag, epoch=7)
    assert (restored.history, restored.others) == (History(7, end), (History(9, newer_end),))
    log = open_disk(folder, limits=SMALL)
    assert read_all(log) == wanted[:end]
    assert log.epochs.current > 9, "no epoch is given twice, whichever history goes on"
    log.close()


def test_what_a_restored_log_goes_on_from_stays_in_the_store_until_it_is_there_anew(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shard"
    log = filled(folder)
    offload(log, place, epochs=(EpochStart(7, 0),))
    wanted, end = read_all(log), log.segments[-1].base_offset
    log.close()
    shutil.rmtree(folder)
    restore_shard(place, folder, IDENTITY, DiskFiles(), tag)
    log = open_disk(folder, limits=SMALL)
    append(log, b"goes on")
    log.roll(1_000)
    append(log, b"too young")
    history = (EpochStart(7, 0), EpochStart(8, end))
    with failing(monkeypatch, "put_file"):
        for _ in range(3):
            with pytest.raises(UnavailableError):
                offload(log, place, epochs=history)
    log.close()
    shutil.rmtree(folder)
    restore_shard(place, folder, IDENTITY, DiskFiles(), tag)
    log = open_disk(folder, limits=SMALL)
    assert read_all(log) == wanted[:end]
    append(log, b"goes on")
    log.roll(1_000)
    for _ in range(2):
        offload(log, place, epochs=history)
    known = {url.rpartition("/")[2] for url in log.offload.urls}
    assert {name.removesuffix(".json") for name in store.list_names(place)} == known
    log.close()


def test_a_restored_log_goes_to_the_store_though_nobody_has_written_its_producers_down(
    tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "shard"
    log = filled(folder)
    offload(log, place)
    log.close()
    shutil.rmtree(folder)
    restore_shard(place, folder, IDENTITY, DiskFiles(), tag)
    log = open_disk(folder, limits=SMALL)
    append(log, b"goes on")
    log.roll(1_000)
    append(log, b"is cut")
    log.truncate(LogPoint(log.end_offset - 1))
    offload(log, place, epochs=(EpochStart(8, 0),))
    assert [one.is_local for one in log.segments[:-1]] == [False] * (log.segment_count - 1)
    log.close()


def test_deletions_that_end_halfway_leave_no_hole(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path / "shard")
    offload(log, place)
    end = log.segments[-1].base_offset
    log.delete_old(Retention(size_bytes=1_500), 1_000, below=log.end_offset)
    doomed = log.offload.pending_deletion
    assert len(doomed) > 2
    log.save_offload(msgspec.structs.replace(log.offload, pending_deletion=doomed[::-1]))
    left, real = 2, store.delete

    def ending(url: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise UnavailableError("The store does not answer.")
        real(url)

    with monkeypatch.context() as patch, pytest.raises(UnavailableError):
        patch.setattr(store, "delete", ending)
        offload(log, place)
    log.close()
    assert restore_shard(place, tmp_path / "new", IDENTITY, DiskFiles(), tag).end == end


def test_an_upload_that_was_broken_off_and_begins_again_is_not_deleted(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path)
    offloader = Offloader(log, DiskFiles(), place, 0, writer=nullcontext(), pace=store.no_pace, tag=tag)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "digest_of", lambda *_: store.Digest(0, ""))
        with pytest.raises(UnavailableError):
            offload(log, place)
    offloader.give_up()
    assert len(log.offload.pending_deletion) == 1 and not log.offload.begun
    for _ in range(2):
        offload(log, place)
    assert not log.offload.pending_deletion
    assert len(read_all(log)) == 30


def test_a_gap_in_the_store_is_restored_behind_once_that_is_accepted(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path / "shard")
    everything = read_all(log)
    offload(log, place)
    first, gone = log.offload.segments[0], log.offload.segments[2]
    store.delete(gone.manifest_url)
    log.close()
    with pytest.raises(CorruptionError, match="are missing") as refused:
        restore_shard(place, tmp_path / "new", IDENTITY, DiskFiles(), tag)
    assert f"--accept-gap begins the log at offset {gone.next_offset}." in refused.value.hint
    assert not (tmp_path / "new").exists(), "nothing was written"
    told = restore_shard(place, tmp_path / "new", IDENTITY, DiskFiles(), tag, accept_gap=True)
    assert told.gaps == (Gap(gone.base_offset, gone.next_offset),) and told.start == gone.next_offset
    restored = open_disk(tmp_path / "new", limits=SMALL)
    assert restored.start_offset == gone.next_offset
    assert read_all(restored) == everything[gone.next_offset : restored.end_offset]
    # It goes on like any other, and what was left out goes with what retention lets go of next.
    for at in range(10):
        append(restored, b"%d" % at)
    epochs = (EpochStart(1, restored.end_offset),)
    offload(restored, place, epochs=epochs)
    assert store.is_there(first.url)
    restored.trim(restored.segments[1].base_offset, 1_000)
    offload(restored, place, epochs=epochs)
    assert not store.is_there(first.url)
    assert verify_shard(tmp_path / "new", IDENTITY, check_object=check_object).is_whole
    restored.close()


@pytest.mark.parametrize(
    ("spans", "chosen", "gaps"),
    [
        # Copies that ended their segments elsewhere: of the two that end at 20, one goes on further back.
        (((0, 10), (10, 20), (15, 20), (20, 30)), ((0, 10), (10, 20), (20, 30)), ()),
        (((0, 10), (10, 20), (5, 20), (20, 30)), ((0, 10), (10, 20), (20, 30)), ()),
        (((0, 10), (12, 20), (20, 30)), ((12, 20), (20, 30)), ((10, 12),)),
        (((0, 10), (12, 20), (25, 30), (30, 40)), ((25, 30), (30, 40)), ((10, 12), (20, 25))),
        # What reaches beyond where the rest begins is no gap, but is left out all the same.
        (((0, 15), (10, 20), (20, 30)), ((10, 20), (20, 30)), ()),
    ],
)
def test_a_chain_goes_as_far_back_as_there_are_segments(
    tmp_path: Path,
    spans: tuple[tuple[int, int], ...],
    chosen: tuple[tuple[int, int], ...],
    gaps: tuple[tuple[int, int], ...],
) -> None:
    log = filled(tmp_path, 1)
    header = log.segments[0].header
    log.close()
    manifests = [
        Manifest(
            Offloaded(
                f"memory://x/{begin}-{end}", replace(header, base_offset=begin).encode(), end, 1, 1, ""
            ),
            (),
        )
        for begin, end in spans
    ]
    for each in itertools.permutations(manifests):
        found = _chain(each)
        assert tuple((one.segment.base_offset, one.segment.next_offset) for one in found) == chosen
        assert _gaps_below(found[0].segment.base_offset, each) == gaps


def rewritten(log: DiskLog, at: int, change: Callable[[Manifest], Manifest]) -> None:
    """The store's administrator has another manifest stand beside an object."""
    url = log.offload.segments[at].manifest_url
    store.put_bytes(encode_manifest(change(decode_manifest(store.get_bytes(url), url))), url)


def far_end(manifest: Manifest) -> Manifest:
    """As if the segment held all that follows it, too."""
    return msgspec.structs.replace(
        manifest, segment=msgspec.structs.replace(manifest.segment, next_offset=1_000_000)
    )


def without_tag(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, tag="")


@pytest.mark.parametrize("at", [0, 2, -1])
@pytest.mark.parametrize(
    "change",
    [
        far_end,
        lambda one: msgspec.structs.replace(one, epochs=(EpochStart(7, 0),)),
        lambda one: msgspec.structs.replace(
            one, segment=msgspec.structs.replace(one.segment, last_time_ms=one.segment.last_time_ms + 1)
        ),
        lambda one: msgspec.structs.replace(one, tag="00" * 32),
        lambda one: one.with_tag(lambda purpose, data: link.tag(SECRET, purpose, data, "another shard")),
    ],
    ids=["end", "epochs", "time", "tag", "tag-of-another-shard"],
)
@pytest.mark.parametrize("unverified", [False, True])
def test_a_manifest_that_the_stores_administrator_rewrote_restores_nothing(
    tmp_path: Path, place: str, at: int, change: Callable[[Manifest], Manifest], unverified: bool
) -> None:
    log = filled(tmp_path / "shard")
    offload(log, place)
    rewritten(log, at, change)
    log.close()
    with pytest.raises(CorruptionError, match="not written by a broker"):
        restore_shard(place, tmp_path / "new", IDENTITY, DiskFiles(), tag, unverified=unverified)
    assert not (tmp_path / "new").exists()


def test_manifests_without_a_tag_need_an_explicit_word_and_are_counted(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path / "shard")
    offload(log, place)
    segments = len(log.offload.segments)
    rewritten(log, 1, without_tag)
    log.close()
    with pytest.raises(RequestError, match=f"1 of {segments} manifests .* no tag") as refused:
        restore_shard(place, tmp_path / "new", IDENTITY, DiskFiles(), tag)
    assert "--unverified" in refused.value.hint and not (tmp_path / "new").exists()
    restored = restore_shard(place, tmp_path / "new", IDENTITY, DiskFiles(), tag, unverified=True)
    again = open_disk(tmp_path / "new", limits=SMALL)
    assert (restored.untagged, restored.start, restored.end) == (1, 0, again.end_offset)
    again.close()


@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_false_far_end_without_a_tag_is_found_at_the_segment_itself(
    tmp_path: Path, place: str, at: int
) -> None:
    log = filled(tmp_path / "shard")
    offload(log, place)
    rewritten(log, at, lambda one: far_end(without_tag(one)))
    log.close()
    with pytest.raises(CorruptionError, match="its manifest states"):
        restore_shard(place, tmp_path / "new", IDENTITY, DiskFiles(), tag, unverified=True)
    assert not list((tmp_path / "new").glob("*.seg")), "it still counts as lost"


def test_the_end_that_is_left_where_the_newest_segments_were_taken_away_is_told(
    tmp_path: Path, place: str
) -> None:
    log = filled(tmp_path / "shard")
    offload(log, place)
    left, gone = log.offload.segments[-3], log.offload.segments[-2:]
    for one in gone:
        store.delete(one.manifest_url)
    log.close()
    restored = restore_shard(place, tmp_path / "new", IDENTITY, DiskFiles(), tag)
    assert (restored.end, restored.last_time_ms) == (left.next_offset, left.last_time_ms)
    again = open_disk(tmp_path / "new", limits=SMALL)
    assert again.end_offset == restored.end
    again.close()


@pytest.mark.parametrize(
    "other", ["{url}/../../../root.key", "{url}.2", "{place}/root.key", "file:///root.key"]
)
def test_a_manifest_speaks_for_the_object_that_it_stands_beside(
    tmp_path: Path, place: str, other: str
) -> None:
    log = filled(tmp_path / "shard")
    offload(log, place)
    one = log.offload.segments[2]
    log.close()
    url = other.format(url=one.url, place=place)
    manifest = decode_manifest(store.get_bytes(one.manifest_url), one.manifest_url)
    changed = msgspec.structs.replace(manifest, segment=msgspec.structs.replace(one, url=url))
    store.put_bytes(encode_manifest(changed), one.manifest_url)
    with pytest.raises(CorruptionError, match=one.manifest_url):
        restore_shard(place, tmp_path / "new", IDENTITY, DiskFiles(), tag)
    assert not (tmp_path / "new").exists()


def test_the_cache_of_fetched_segments_is_bounded(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path)
    offload(log, place)
    cache = FetchedCache(2_500)
    for _ in range(2):
        read_all(log, cache)
        held = sum(path.stat().st_size for path in tmp_path.glob("*.fetched"))
        assert held == cache.held_bytes <= 2_500
    cache.forget(tmp_path)
    assert cache.held_bytes == 0 and not list(tmp_path.glob("*.fetched"))
    log.close()


def test_a_throttle_ends_when_it_is_asked_to() -> None:
    end = LazyThreadEvent()
    pace = Throttle(1_000, end, REAL.clock)
    pace(1)
    end.set()
    with pytest.raises(WorkEndedError):
        pace(10_000_000)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("/srv/felix", "scheme"),
        ("s4://bucket/x", "no scheme that fsspec knows"),
        ("simplecache::file:///srv", "::"),
        ("file:///srv/../etc", "without"),
        ("file://srv/felix", "no absolute path"),
        ("file:felix", "no absolute path"),
        ("local://~/felix", "no absolute path"),
        ("s3://key:secret@bucket/x", "password"),
        ("sftp://host/x", "package"),
    ],
)
def test_what_is_no_store_is_refused_with_its_reason(url: str, why: str) -> None:
    if url.startswith("sftp"):
        pytest.importorskip("fsspec")
        try:
            import paramiko  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("its package is installed")
    with pytest.raises(RequestError, match=why) as refused:
        store.check_url(url)
    assert refused.value.code is Code.CONFIG_INVALID and "secret" not in str(refused.value)


def test_a_prefix_allows_what_lies_below_it_and_nothing_beside_it() -> None:
    allowed = ("file:///srv/felix", "s3://bucket/")
    assert store.is_allowed("file:///srv/felix", allowed)
    assert store.is_allowed("file:///srv/felix/deep/er", allowed)
    assert store.is_allowed("s3://bucket/x", allowed)
    assert not store.is_allowed("file:///srv/felix-other", allowed)
    assert not store.is_allowed("s3://bucket2/x", allowed)
    assert not store.is_allowed("file:///srv", allowed)
    assert not store.is_allowed("file:///srv/felix", ())


# -- against a list, with crashes and a store that fails -----------------------------------------------


class OffloadedLogAgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="felix-log-"))
        self.place = f"memory://model/{uuid4().hex}"
        self.log = open_disk(self.folder, limits=SMALL)
        self.cache = FetchedCache(3_000)
        self.records: list[bytes] = []
        self.start = 0

    @rule(payloads=st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=12))
    def append(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            append(self.log, payload)
            self.records.append(payload * 20)

    @rule(local_bytes=st.integers(0, 5_000))
    def offload(self, local_bytes: int) -> None:
        offload(self.log, self.place, local_bytes)
        assert self.log.bytes_held <= max(local_bytes, self.log.segments[-1].segment_bytes)

    @rule(calls=st.integers(0, 25), local_bytes=st.integers(0, 3_000))
    def crash_in_an_offload(self, calls: int, local_bytes: int) -> None:
        crashing = CrashingFiles(calls)
        whole, self.log._files = self.log._files, crashing
        try:
            offload(self.log, self.place, local_bytes, crashing)
        except Crash:
            pass
        finally:
            self.log._files = whole
        self.log.abandon()
        self.log = open_disk(self.folder, limits=SMALL)

    @rule(good=st.integers(0, 12))
    def store_fails_in_an_offload(self, good: int) -> None:
        left = [good]

        def sometimes(real: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise UnavailableError("The store does not answer.")
                return real(*arguments)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("put_file", "put_bytes", "get_bytes", "digest_of", "delete"):
                patch.setattr(store, name, sometimes(getattr(store, name)))
            with suppress(UnavailableError):
                offload(self.log, self.place)

    @rule(kept=st.integers(1_000, 5_000))
    def retain(self, kept: int) -> None:
        self.log.delete_old(Retention(size_bytes=kept), 1_000, below=self.log.end_offset)
        self.start = self.log.start_offset

    @rule(calls=st.integers(0, 8))
    def crash_in_retention(self, calls: int) -> None:
        whole, self.log._files = self.log._files, CrashingFiles(calls)
        try:
            self.log.delete_old(Retention(size_bytes=2_000), 1_000, below=self.log.end_offset)
        except Crash:
            pass
        finally:
            self.log._files = whole
        self.log.abandon()
        self.log = open_disk(self.folder, limits=SMALL)
        assert self.log.start_offset >= self.start
        self.start = self.log.start_offset

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = open_disk(self.folder, limits=SMALL)

    @rule(data=st.data())
    def lose_an_index(self, data: st.DataObject) -> None:
        indexes = sorted(self.folder.glob("*.idx"))
        if indexes:
            data.draw(st.sampled_from(indexes)).unlink()

    @invariant()
    def same_records(self) -> None:
        assert read_all(self.log, self.cache) == self.records[self.start :]

    @invariant()
    def nothing_is_in_the_store_that_nobody_knows(self) -> None:
        known = {url.rpartition("/")[2] for url in self.log.offload.urls}
        assert {name.removesuffix(".json") for name in store.list_names(self.place)} <= known

    def teardown(self) -> None:
        self.log.close()
        verdict = verify_shard(self.folder, IDENTITY, check_object=check_object)
        assert verdict.is_whole, verdict.findings
        shutil.rmtree(self.folder)


TestOffloadedLogAgainstList = OffloadedLogAgainstList.TestCase
TestOffloadedLogAgainstList.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


# -- the shard -----------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(
    folder: Path, place: str, local_bytes: int = 0, files: Files | None = None
) -> AsyncIterator[ShardLog]:
    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(2) as moving:
        shard = await ShardLog.open(
            folder,
            IDENTITY,
            ShardSettings(segments=SMALL, offload=Offload(place, local_bytes), ring_bytes_max=500),
            HOOKS,
            commit_pool=pool,
            read_pool=pool,
            store=ShardStore(moving, FetchedCache(4_000)),
            files=files,
        )
        try:
            yield shard
        finally:
            await shard.close()


async def everything(shard: ShardLog) -> list[bytes]:
    found: list[bytes] = []
    offset = shard.log_start_offset
    while entries := await shard.read(offset, 2_000):
        found += payloads_of(entries, offset)
        offset = entries[-1].next_offset
    return found


async def test_readers_and_writers_go_on_while_segments_move(tmp_path: Path, place: str) -> None:
    async with serving(tmp_path, place) as shard:
        wanted: list[bytes] = []
        stop = asyncio.Event()

        async def follow() -> int:
            rounds = 0
            while not stop.is_set():
                count = len(wanted)
                assert (await everything(shard))[:count] == wanted[:count]
                rounds += 1
                # What is in memory is read without a wait.
                await asyncio.sleep(0)
            return rounds

        readers = [asyncio.create_task(follow()) for _ in range(3)]
        for at in range(120):
            await shard.append(batch_of(b"%d" % at * 40))
            wanted.append(b"%d" % at * 40)
            if at % 20 == 19:
                await shard.offload(0, place)
        stop.set()
        assert all(rounds > 0 for rounds in await asyncio.gather(*readers))
        assert shard.counters.fetched_segments > 0 and shard.failure is None
        assert shard.counters.offloaded_segments == shard.segment_count - 1
        assert shard.offload_waiting_bytes == 0


async def test_a_store_that_is_away_holds_up_nothing_that_is_local(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, place) as shard:
        for at in range(20):
            await shard.append(batch_of(b"%d" % at * 40))
        await shard.offload(0, place)
        for at in range(20, 40):
            await shard.append(batch_of(b"%d" % at * 40))
        with failing(monkeypatch):
            assert shard.offload_due(0)
            with pytest.raises(UnavailableError):
                await shard.offload(0, place)
            assert not shard.offload_due(999) and shard.offload_due(1_000)
            with pytest.raises(UnavailableError):
                await shard.offload(1_000, place)
            assert not shard.offload_due(2_999), "longer each time"
            assert shard.counters.offload_failed == 2 and shard.offload_waiting_bytes > 0
            await shard.append(batch_of(b"goes on"))
            assert payloads_of(await shard.read(30, 100)) and shard.failure is None
            with pytest.raises(UnavailableError):
                await shard.read(0, 100)
            assert shard.failure is None
        assert len(await everything(shard)) == 41
        await shard.offload(5_000, place)
        assert shard.offload_waiting_bytes == 0 and not shard.offload_due(5_000)


async def test_what_was_uploaded_before_a_turn_failed_is_counted(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, place) as shard:
        for at in range(40):
            await shard.append(batch_of(b"%d" % at * 40))
        real, calls = store.put_file, list[str]()

        def twice(files: Files, source: Path, url: str, pace: store.Pace = store.no_pace) -> store.Digest:
            calls.append(url)
            if len(calls) > 2:
                raise UnavailableError("The store is full.")
            return real(files, source, url, pace)

        monkeypatch.setattr(store, "put_file", twice)
        with pytest.raises(UnavailableError, match="full"):
            await shard.offload(0, place)
        assert (shard.counters.offloaded_segments, shard.counters.offload_failed) == (2, 1)
        assert shard.counters.offloaded_bytes > 0


async def test_a_full_disk_refuses_fetches_and_turns_and_nothing_is_lost(tmp_path: Path, place: str) -> None:
    files = FailingFiles()
    async with serving(tmp_path, place, files=files) as shard:
        for at in range(20):
            await shard.append(batch_of(b"%d" % at * 40))
        await shard.offload(0, place)
        for at in range(20, 40):
            await shard.append(batch_of(b"%d" % at * 40))
        files.room_left = 0
        with pytest.raises(UnavailableError) as refused:
            await shard.read(0, 100)
        assert refused.value.code is Code.DISK_FULL and shard.failure is None
        await shard.append(batch_of(b"what is free is for appends"))
        files.small_error = errno.ENOSPC
        with pytest.raises(UnavailableError) as refused:
            await shard.offload(0, place)
        assert refused.value.code is Code.DISK_FULL and shard.failure is None
        assert shard.offload_waiting_bytes > 0
        files.room_left, files.small_error = None, 0
        await shard.offload(10_000, place)
        assert len(await everything(shard)) == 41 and shard.offload_waiting_bytes == 0


async def test_a_changed_object_fails_its_readers_and_not_the_shard(tmp_path: Path, place: str) -> None:
    async with serving(tmp_path, place) as shard:
        for at in range(20):
            await shard.append(batch_of(b"%d" % at * 40))
        await shard.offload(0, place)
        names = store.list_names(place)
        store.put_bytes(b"something else", object_url(place, names[0]))
        with pytest.raises(CorruptionError):
            await shard.read(0, 100)
        await shard.append(batch_of(b"goes on"))
        assert shard.failure is None


def deleted_in(data: Path) -> tuple[Path, list[str]]:
    """The folder of the deleted stream, and the files that are left in it."""
    (deleted,) = data.glob("*.deleted")
    return deleted, [path.name for path in deleted.rglob("*") if path.is_file()]


async def test_deleting_a_stream_deletes_its_objects_and_nothing_else_does(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, incarnation = StreamName.parse(IDENTITY.stream), IDENTITY.incarnation
    wanted = ShardSettings(segments=SMALL, offload=Offload(place, 0))
    base = offload_base(place, IDENTITY)
    directory = LogDirectory(tmp_path, IDENTITY.region)
    shard = await directory.open_shard(name, incarnation, IDENTITY.shard, wanted, HOOKS)
    for at in range(20):
        await shard.append(batch_of(b"%d" % at * 40))
    await directory.offload(shard, 0, place)
    objects = store.list_names(base)
    assert len(objects) > 4
    # Left by a history that was given up, when the folder was put back to a backup.
    for left in (f"{30:020d}.seg", f"{30:020d}.seg.json"):
        store.put_bytes(b"left", object_url(base, left))
    objects = store.list_names(base)
    await directory.close()
    directory = LogDirectory(tmp_path, IDENTITY.region)
    await directory.open_shard(name, incarnation, IDENTITY.shard, wanted, HOOKS)
    assert store.list_names(base) == objects, "a stop and a start delete nothing"
    with failing(monkeypatch):
        await directory.delete_stream(name, incarnation)
        await asyncio.to_thread(directory.retry_deletions)
        # The deletion also goes on in a thread of its own; closing waits for it.
        await directory.close()
    deleted, left = deleted_in(tmp_path)
    assert left == [OFFLOADED_NAME], "local records are gone"
    assert store.list_names(base) == objects
    directory = LogDirectory(tmp_path, IDENTITY.region)
    await asyncio.to_thread(directory.retry_deletions)
    await directory.close()
    assert store.list_names(base) == [] and not deleted.exists()


async def test_an_object_that_a_broken_upload_left_goes_once_the_stream_is_not_offloaded_any_more(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, place) as shard:
        for at in range(20):
            await shard.append(batch_of(b"%d" % at * 40))
        with failing(monkeypatch, "put_bytes"), pytest.raises(UnavailableError):
            await shard.offload(0, place)
        assert len(store.list_names(place)) == 1
        shard.alter(replace(shard.settings, offload=None))
        for now_ms in (10**6, 2 * 10**6):
            if shard.offload_due(now_ms):
                await shard.offload(now_ms, "")
        assert store.list_names(place) == [] and not shard.offload_due(3 * 10**6)


async def test_deleting_a_stream_deletes_what_a_history_of_before_left_though_nothing_else_is_in_the_store(
    tmp_path: Path, place: str
) -> None:
    name, incarnation = StreamName.parse(IDENTITY.stream), IDENTITY.incarnation
    wanted = ShardSettings(segments=SMALL, offload=Offload(place, 0), retention=Retention(size_bytes=1))
    base = offload_base(place, IDENTITY)
    directory = LogDirectory(tmp_path, IDENTITY.region)
    shard = await directory.open_shard(name, incarnation, IDENTITY.shard, wanted, HOOKS)
    for at in range(20):
        await shard.append(batch_of(b"%d" % at * 40))
    await directory.offload(shard, 0, place)
    await shard.sweep(1_000)
    await directory.offload(shard, 0, place)
    assert store.list_names(base) == [], "retention let go of all of it"
    left = f"{30:020d}-{7:010d}.seg"
    store.put_bytes(b"left", object_url(base, left))
    await directory.delete_stream(name, incarnation)
    await asyncio.to_thread(directory.retry_deletions)
    await directory.close()
    assert store.list_names(base) == []


def has_deleted(data: Path) -> bool:
    return any(data.glob("*.deleted"))


async def test_a_deleted_stream_goes_from_one_store_though_another_one_is_away(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, incarnation = StreamName.parse(IDENTITY.stream), IDENTITY.incarnation
    other = f"memory://felix/{uuid4().hex}"
    directory = LogDirectory(tmp_path, IDENTITY.region)
    shards: list[str] = []
    for number in range(2):
        wanted = ShardSettings(segments=SMALL, offload=Offload(place, 0))
        shard = await directory.open_shard(name, incarnation, number, wanted, HOOKS)
        for store_url in (place, other):
            shard.alter(replace(shard.settings, offload=Offload(store_url, 0)))
            for at in range(20):
                await shard.append(batch_of(b"%d" % at * 40))
            await directory.offload(shard, 0, store_url)
            shards.append(offload_base(store_url, shard.identity))
    assert all(map(store.list_names, shards))
    real = store.delete
    is_away = True

    def delete(url: str) -> None:
        if is_away and url.startswith(place):
            raise UnavailableError("The store is away.")
        real(url)

    monkeypatch.setattr(store, "delete", delete)
    await directory.delete_stream(name, incarnation)
    await asyncio.to_thread(directory.retry_deletions)
    assert [bool(store.list_names(base)) for base in shards] == [True, False] * 2
    is_away = False
    await asyncio.to_thread(directory.retry_deletions)
    await directory.close()
    assert not any(map(store.list_names, shards)) and not has_deleted(tmp_path)


async def test_a_deletion_goes_on_where_a_store_that_fails_now_and_then_ended_it(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, incarnation = StreamName.parse(IDENTITY.stream), IDENTITY.incarnation
    directory = LogDirectory(tmp_path, IDENTITY.region)
    wanted = ShardSettings(segments=SMALL, offload=Offload(place, 0))
    shard = await directory.open_shard(name, incarnation, IDENTITY.shard, wanted, HOOKS)
    for at in range(40):
        await shard.append(batch_of(b"%d" % at * 40))
    await directory.offload(shard, 0, place)
    base = offload_base(place, IDENTITY)
    count = len(store.list_names(base))
    assert count > 10
    real, calls = store.delete, 0

    def delete(url: str) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise UnavailableError("Not now.")
        real(url)

    monkeypatch.setattr(store, "delete", delete)
    await directory.delete_stream(name, incarnation)
    for _ in range(count):
        await asyncio.to_thread(directory.retry_deletions)
    await directory.close()
    assert store.list_names(base) == [] and not has_deleted(tmp_path)


def test_a_store_that_lists_late_what_was_deleted_is_no_store_that_fails(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path)
    offload(log, place)
    before = store.list_names(place)
    log.delete_old(Retention(size_bytes=1), 1_000, below=log.end_offset)
    assert log.offload.pending_deletion
    with monkeypatch.context() as patch:
        patch.setattr(store, "list_names", lambda _: before)
        offload(log, place)
    assert store.list_names(place) == [] and not log.offload.pending_deletion
    log.close()


async def test_nothing_is_kept_of_what_retention_lets_go_of_while_it_is_fetched(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, place) as shard:
        for at in range(20):
            await shard.append(batch_of(b"%d" % at * 40))
        await shard.offload(0, place)
        assert shard._files is not None
        disk, real = shard._files.disk, store.get_file

        def slowly(*arguments: object) -> store.Digest:
            disk.delete_old(Retention(size_bytes=1), 1_000, below=disk.end_offset)
            return real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "get_file", slowly)
        with pytest.raises(OffsetOutOfRangeError):
            await shard.read(0, 2_000)
        assert not [name for name in DiskFiles().names(tmp_path) if name.endswith(FETCHED_SUFFIX)]
        assert shard._files.reader._store.cache.held_bytes == 0


@pytest.mark.parametrize("how", ["killed", "full"])
async def test_a_repeated_batch_is_known_where_its_segment_went_to_the_store_before_anybody_wrote_its_producer_down(
    tmp_path: Path, place: str, how: str
) -> None:
    """The snapshot that follows each roll was not written: the process was killed between the two, or the disk had no room."""

    class WithoutSnapshots(DiskFiles):
        is_full = True

        def open(self, path: Path, flags: int) -> int:
            if self.is_full and flags & os.O_CREAT and SNAPSHOT_SUFFIX in path.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().open(path, flags)

        def remove(self, path: Path) -> None:
            super().remove(path)
            self.is_full = self.is_full and path.suffix != ".seg"

    files, folder, killed = WithoutSnapshots(), tmp_path / "a", tmp_path / "b"
    async with serving(folder, place, files=files) as shard:
        first = await shard.append(batch_of(b"once" * 30, producer=7))
        for at in range(20):
            await shard.append(batch_of(b"%d" % at * 40, producer=8, sequence=at))
        if how == "full":
            await shard.offload(0, place)
            assert not shard._files.disk.segments[0].is_local  # type: ignore[union-attr]
        shutil.copytree(folder, killed)
    folder, killed = killed, tmp_path / "c"
    if how == "killed":
        async with serving(folder, place) as shard:
            await shard.offload(0, place)
            assert not shard._files.disk.segments[0].is_local  # type: ignore[union-attr]
            shutil.copytree(folder, killed)
        folder = killed
    async with serving(folder, place) as shard:
        again = await shard.append(batch_of(b"once" * 30, producer=7))
        assert again.duplicate and again.base_offset == first.base_offset


async def test_closing_ends_an_upload(tmp_path: Path, place: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        shard = await ShardLog.open(
            tmp_path,
            IDENTITY,
            ShardSettings(segments=SegmentLimits(segment_bytes_max=100_000), offload=Offload(place, 0)),
            HOOKS,
            commit_pool=pool,
            read_pool=pool,
            store=ShardStore(pool, rate_bytes=1),
        )
        for _ in range(5):
            await shard.append(batch_of(b"x" * 60_000))
        # At this rate it would take a day.
        upload = asyncio.create_task(shard.offload(0, place))
        await asyncio.sleep(0.05)
        await shard.close()
        with pytest.raises(UnavailableError) as ended:
            await upload
        assert ended.value.code is Code.SHUTTING_DOWN
    payload = load_checked(DiskFiles(), tmp_path / OFFLOADED_NAME)
    assert payload is not None and decode_offload(payload).segments == ()
