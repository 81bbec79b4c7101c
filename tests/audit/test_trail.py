"""The durable trail: appended, synced, checkpointed, recovered, refused."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from audit_log import Link, egress_appends, log_signer, trust, witness_signer

from audit.checkpoint import note_size, open_checkpoint
from audit.errors import AuditUnavailableError, RolledBackError
from audit.leaf import Leaf, decode_leaf
from audit.note import NoteSigner, encode_note, parse_note
from audit.tile import read_bundle
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.verify import verify_log
from audit.wal_disk import RECORD_HEADER_BYTES, Record, read_segment, segments
from audit.witness import MemoryWitnessStore, Witness
from felix.errors import Code, CorruptionError, RequestError, TamperError
from felix.storage.disk import SHARED_FILES, DiskFiles
from keys.post_quantum import MlDsaKey

QUIET = TrailSettings(checkpoint_interval_ms=3_600_000, checkpoint_leaves=1 << 30)
"""Checkpoints only when they are asked for, and on closing."""


def append(trail: Trail, leaves: list[Leaf]) -> int:
    """Append and wait, without an event loop."""
    ended, outcome = threading.Event(), list[AuditUnavailableError | None]()

    def done(first: int, error: AuditUnavailableError | None) -> None:
        outcome.append(error)
        ended.set()

    first = trail.append_nowait(leaves, done)
    assert ended.wait(30)
    if outcome[0] is not None:
        raise outcome[0]
    return first


class WalFiles(DiskFiles):
    """Makes the write-ahead file durable by this call; everything else as ever."""

    def __init__(self, sync: Callable[[int], None]) -> None:
        super().__init__()
        self._sync = sync
        self._wal: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        (self._wal.add if path.suffix == ".wal" else self._wal.discard)(descriptor)
        return descriptor

    def sync(self, descriptor: int) -> None:
        (self._sync if descriptor in self._wal else super().sync)(descriptor)


def open_trail(path: Path, **more: object) -> Trail:
    return Trail.open(path, log_signer(), **({"settings": QUIET} | more))  # type: ignore[arg-type]


def leaves_on_disk(path: Path) -> list[Leaf]:
    folder = Folder(path)
    data = folder.read("checkpoint")
    assert data is not None
    size = open_checkpoint(data, log_signer().key).checkpoint.size
    return [
        decode_leaf(leaf) for number in range(-(-size // 256)) for leaf in read_bundle(folder, number, size)
    ]


async def test_what_is_appended_is_durable_and_verifies(tmp_path: Path) -> None:
    trail = Trail.open(tmp_path, log_signer())
    appends = list(egress_appends(300))
    indexes = [await trail.append(leaves) for leaves in appends]
    assert indexes == [sum(map(len, appends[:at])) for at in range(len(appends))]
    await asyncio.to_thread(trail.close)
    assert leaves_on_disk(tmp_path) == [leaf for leaves in appends for leaf in leaves]
    report = verify_log(Folder(tmp_path), trust(), cosignatures_min=0)
    assert report.ok, report.findings
    assert report.size == sum(map(len, appends)) and report.uncovered == 0


async def test_many_appends_share_a_sync(tmp_path: Path) -> None:
    syncs, first_began, go_on = [], threading.Event(), threading.Event()

    def slow_sync(descriptor: int) -> None:
        syncs.append(descriptor)
        first_began.set()
        go_on.wait(30)
        os.fdatasync(descriptor)

    trail = open_trail(tmp_path, files=WalFiles(slow_sync))
    appends = list(egress_appends(1))
    waits = [asyncio.ensure_future(trail.append(leaves)) for leaves in appends]
    await asyncio.to_thread(first_began.wait, 30)
    link = Link(shard=1)
    waits += [asyncio.ensure_future(trail.append([link.deny()])) for _ in range(100)]
    await asyncio.sleep(0)
    go_on.set()
    sizes = [*map(len, appends), *[1] * 100]
    assert sorted(await asyncio.gather(*waits)) == [sum(sizes[:at]) for at in range(len(sizes))]
    assert len(syncs) < 10
    await asyncio.to_thread(trail.close)


def test_done_comes_after_the_sync_and_never_before(tmp_path: Path) -> None:
    synced = []

    def sync(descriptor: int) -> None:
        os.fdatasync(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    trail = open_trail(tmp_path, files=WalFiles(sync))
    for leaves in egress_appends(20):
        before = len(synced)
        append(trail, leaves)
        assert len(synced) > before
    trail.close()


def test_a_failed_sync_stops_the_trail_and_nothing_is_acknowledged(tmp_path: Path) -> None:
    calls = 0

    def failing(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(5, "Input/output error")
        os.fdatasync(descriptor)

    trail, link = open_trail(tmp_path, files=WalFiles(failing)), Link()
    append(trail, [link.grant()])
    append(trail, link.intent())
    with pytest.raises(AuditUnavailableError, match="stopped") as caught:
        append(trail, link.intent())
    assert caught.value.code is Code.AUDIT_UNAVAILABLE
    with pytest.raises(AuditUnavailableError):
        append(trail, link.intent())
    assert calls == 3, "a failed sync is not tried again"
    with pytest.raises(AuditUnavailableError):
        trail.publish()
    trail.close()
    again = open_trail(tmp_path)
    assert again.status().size >= 2
    again.close()


class FailsOnce(DiskFiles):
    """The nth call fails that looks at the disk; what is open is known."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.left, self.opened = fails_at, set[int]()

    def open(self, path: Path, flags: int) -> int:
        self._look()
        descriptor = super().open(path, flags)
        self.opened.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self.opened.discard(descriptor)
        super().close(descriptor)

    def size(self, descriptor: int) -> int:
        self._look()
        return super().size(descriptor)

    def sync_folder(self, folder: Path) -> None:
        self._look()
        super().sync_folder(folder)

    def _look(self) -> None:
        self.left -= 1
        if not self.left:
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize("has_leaves", [False, True])
def test_a_log_that_cannot_be_opened_for_its_disk_leaves_nothing_open(
    tmp_path: Path, has_leaves: bool
) -> None:
    if has_leaves:
        trail = open_trail(tmp_path)
        append(trail, [Link().grant()])
        trail.close()
    failed = 0
    while True:
        files = FailsOnce(failed + 1)
        try:
            trail = open_trail(tmp_path, files=files)
        except OSError:
            assert not files.opened
            failed += 1
        else:
            break
    trail.close()
    assert failed > 5


def test_a_full_trail_refuses_and_takes_again_once_it_caught_up(tmp_path: Path) -> None:
    go_on = threading.Event()

    def stuck(descriptor: int) -> None:
        go_on.wait(30)
        os.fdatasync(descriptor)

    settings = TrailSettings(checkpoint_interval_ms=1, pending_bytes_max=20_000)
    trail, link = open_trail(tmp_path, files=WalFiles(stuck), settings=settings), Link()
    ended = []
    with pytest.raises(AuditUnavailableError, match="waiting for its disk") as caught:
        for _ in range(1_000):
            trail.append_nowait([link.deny()], lambda first, error: ended.append(first))
    assert caught.value.retry_after_ms
    assert trail.status().pending_bytes <= 20_000
    go_on.set()
    for _ in range(6_000):
        if not trail.status().pending_bytes:
            break
        threading.Event().wait(0.005)
    append(trail, [link.deny()])
    trail.close()
    assert ended == list(range(len(ended)))


async def test_a_receiver_that_fails_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    """On the writer's thread and on the loop."""
    trail = open_trail(tmp_path)
    loop, heard = asyncio.get_running_loop(), asyncio.Event()

    def failing(first: int, error: AuditUnavailableError | None) -> None:
        raise ArithmeticError("a mistake")

    first, second, third, fourth = list(egress_appends(4))[:4]
    trail.append_nowait(first, failing)
    trail.append_nowait(second, failing, loop)
    trail.append_nowait(third, lambda first, error: heard.set(), loop)
    async with asyncio.timeout(120):
        await heard.wait()
        await trail.append(fourth)
    assert trail.failure is None
    await asyncio.to_thread(trail.close)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    trail = open_trail(tmp_path)
    with pytest.raises(RequestError, match="open in another process") as caught:
        open_trail(tmp_path)
    assert caught.value.code is Code.CONFLICT
    trail.close()
    open_trail(tmp_path).close()


def test_a_closed_trail_takes_nothing(tmp_path: Path) -> None:
    trail = open_trail(tmp_path)
    trail.close()
    with pytest.raises(AuditUnavailableError, match="closed"):
        append(trail, [Link().grant()])


def test_leaves_that_cannot_be_written_are_refused_whole(tmp_path: Path) -> None:
    trail, link = open_trail(tmp_path), Link()
    wrong = Leaf(link.header(link.deny().header.kind))
    with pytest.raises(RequestError):
        append(trail, [link.grant(), wrong])
    with pytest.raises(RequestError, match="1 to"):
        append(trail, [])
    assert trail.status().size == 0
    trail.close()


def copy_of_live(trail: Trail, source: Path, target: Path) -> Path:
    """The files as a killed process leaves them. The trail goes on meanwhile, so a file that is being written may vanish."""

    def copy(file: str, beside: str) -> None:
        with suppress(FileNotFoundError):
            shutil.copy2(file, beside)

    shutil.copytree(source, target, copy_function=copy)
    return target


def test_positions_survive_a_crash_and_a_clean_end(tmp_path: Path) -> None:
    trail, link = open_trail(tmp_path / "a"), Link()
    append(trail, [link.grant()])
    first = link.intent()
    append(trail, first)
    append(trail, [link.ack(first)])
    trail.publish()
    second, third = link.intent(4, withhold=(1,)), link.intent()
    append(trail, second)
    append(trail, third)

    def check(trail: Trail) -> None:
        intent, ack = trail.positions.last_intent(link.key), trail.positions.last_ack(link.key)
        assert intent is not None and ack is not None
        assert (intent.first_offset, intent.last_offset, intent.records, intent.number) == (7, 9, 3, 5)
        assert (ack.first_offset, ack.last_offset, ack.number) == (0, 2, 2)
        assert [crossing.first_offset for crossing in trail.positions.unanswered(link.key)] == [3, 7]
        assert trail.positions.link_shards() == [link.key]
        assert trail.positions.last_intent(Link(shard=9).key) is None

    check(trail)
    crashed = open_trail(copy_of_live(trail, tmp_path / "a", tmp_path / "b"))
    check(crashed)
    crashed.close()
    trail.close()
    again = open_trail(tmp_path / "a")
    check(again)
    again.close()
    (tmp_path / "a" / "positions").write_bytes(b"nonsense")
    again = open_trail(tmp_path / "a")
    check(again)
    again.close()


def test_a_long_batch_has_one_position_over_all_its_parts(tmp_path: Path) -> None:
    trail, link = open_trail(tmp_path), Link()
    append(trail, [link.grant()])
    leaves = link.intent(2_500)
    assert len(leaves) == 3
    append(trail, leaves)
    crossing = trail.positions.last_intent(link.key)
    assert crossing is not None
    assert (crossing.first_offset, crossing.last_offset, crossing.records, crossing.leaves) == (
        0,
        2_499,
        2_500,
        3,
    )
    append(trail, [link.ack(leaves)])
    assert trail.positions.unanswered(link.key) == ()
    trail.close()


def test_the_write_ahead_file_cut_at_every_byte_recovers_whole_appends(tmp_path: Path) -> None:
    live = tmp_path / "live"
    trail, link = open_trail(live), Link()
    append(trail, [link.grant()])
    trail.publish()
    appends = [link.intent(2, withhold=(0,)), link.intent(1)]
    append(trail, appends[0] + appends[1])
    append(trail, [link.ack(appends[0])])
    copy_of_live(trail, live, tmp_path / "crashed")
    trail.close()
    (segment,) = (tmp_path / "crashed" / "wal").iterdir()
    data = segment.read_bytes()
    appends_end = [cut_at(data, leaves) for leaves in (1, 4, 5)]
    assert appends_end[-1] == len(data)
    for length in range(len(data) + 1):
        found = list(read_segment(data[:length], segment.name, 0, True))
        whole = [record for record in found if isinstance(record, Record)]
        ends = [end for end in appends_end if end <= length]
        assert len(whole) == {0: 0, 1: 1, 2: 4, 3: 5}[len(ends)], "an append is there whole or not at all"
        assert (len(found) > len(whole)) == (length not in (0, *appends_end))
    for length in sorted({*range(0, len(data), 211), *(end + by for end in appends_end for by in (-1, 0))}):
        target = tmp_path / f"cut-{length}"
        shutil.copytree(tmp_path / "crashed", target)
        (target / "wal" / segment.name).write_bytes(data[:length])
        if length < appends_end[0]:
            with pytest.raises(RolledBackError) as caught:
                open_trail(target)
            assert caught.value.code is Code.ROLLED_BACK
            continue
        again = open_trail(target)
        size = again.status().size
        assert size == 1 if length < appends_end[1] else size == (4 if length < appends_end[2] else 5)
        assert (again.recovered is None) == (length in appends_end)
        assert append(again, [Link(shard=1).grant()]) == size
        again.close()
        report = verify_log(Folder(target), trust(), cosignatures_min=0)
        # The grants here stand without their documents, which step 7 finds; recovery is about all the others.
        assert {finding.step for finding in report.findings} <= {7} and report.size == size + 1


def cut_at(data: bytes, leaves: int) -> int:
    """The byte behind so many records."""
    at = 0
    for _ in range(leaves):
        at += RECORD_HEADER_BYTES + int.from_bytes(data[at + 8 : at + 12], "big")
    return at


def test_damage_below_what_a_later_record_calls_durable_is_no_torn_tail(tmp_path: Path) -> None:
    live = tmp_path / "live"
    trail, link = open_trail(live), Link()
    for _ in range(4):
        append(trail, [link.deny()])
    crashed = copy_of_live(trail, live, tmp_path / "crashed")
    trail.close()
    (segment,) = (crashed / "wal").iterdir()
    data = segment.read_bytes()
    for leaf, opens in ((0, False), (2, False), (3, True)):
        changed = bytearray(data)
        changed[cut_at(data, leaf) + 50] ^= 1
        segment.write_bytes(changed)
        if opens:
            again = open_trail(crashed)
            assert again.status().size == 3 and again.recovered is not None
            again.close()
        else:
            with pytest.raises(CorruptionError, match=f"leaf {leaf} was durable"):
                open_trail(crashed)


def test_a_crash_between_tiles_and_checkpoint_loses_nothing(tmp_path: Path) -> None:
    live = tmp_path / "live"
    trail, link = open_trail(live), Link()
    for _ in range(700):
        trail.append_nowait([link.deny()], lambda first, error: None)
    append(trail, [link.deny()])
    # Full tiles of 512 leaves may be there, the checkpoint still says 0.
    crashed = copy_of_live(trail, live, tmp_path / "crashed")
    trail.close()
    again = open_trail(crashed)
    assert again.status().size == 701
    again.publish()
    again.close()
    assert verify_log(Folder(crashed), trust(), cosignatures_min=0).ok


def test_every_file_is_durable_before_the_checkpoint_that_covers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    write, flush = Folder.write, Folder.flush

    def noting_write(self: Folder, path: str, data: bytes) -> None:
        write(self, path, data)
        events.append(("write", path))

    def noting_flush(self: Folder) -> None:
        flush(self)
        events.append(("flush", ""))

    monkeypatch.setattr(Folder, "write", noting_write)
    monkeypatch.setattr(Folder, "flush", noting_flush)
    trail, link = open_trail(tmp_path), Link()
    for _ in range(5):
        for _ in range(100):
            trail.append_nowait([link.deny()], lambda first, error: None)
        append(trail, [link.deny()])
        trail.publish()
    trail.close()
    not_flushed: set[str] = set()
    checkpoints = 0
    for event, path in events:
        if event == "flush":
            not_flushed.clear()
        elif path == "checkpoint":
            assert not any(name.startswith("tile/") for name in not_flushed)
            checkpoints += 1
        else:
            not_flushed.add(path)
    assert checkpoints >= 6 and any(path.startswith("tile/entries/") for _, path in events)


def test_segments_that_full_bundles_replace_are_removed(tmp_path: Path) -> None:
    settings = TrailSettings(checkpoint_interval_ms=3_600_000, segment_bytes_max=10_000)
    trail, link = open_trail(tmp_path, settings=settings), Link()
    for _ in range(600):
        append(trail, [link.deny()])
    trail.close()
    firsts = segments(SHARED_FILES, tmp_path / "wal")
    assert firsts[0] > 400 and firsts[-1] <= 600
    assert firsts[0] <= 512, "what only a partial bundle holds stays in the write-ahead file"
    again = open_trail(tmp_path, settings=settings)
    assert again.status().size == 600
    again.close()
    assert verify_log(Folder(tmp_path), trust(), cosignatures_min=0).ok
    assert [name for name in Folder(tmp_path).names("tile/entries") if name.endswith(".p")] == ["002.p"]


def cosign(trail: Trail, witness: Witness) -> bytes:
    note = trail.checkpoint()
    checkpoint = open_checkpoint(note, trail.key).checkpoint
    last = witness.last(trail.key.name)
    return witness.cosign(
        note, trail.checkpoints.consistency_proof(last.size if last else 0, checkpoint.size)
    )


def test_a_log_shorter_than_what_was_cosigned_does_not_open(tmp_path: Path) -> None:
    witness = Witness(witness_signer(), [log_signer().key], MemoryWitnessStore(), lambda: 1_760_000_000)
    trail, link = open_trail(tmp_path / "log", witnesses=[witness.key]), Link()
    append(trail, [link.grant()])
    trail.publish()
    append(trail, link.intent())
    shutil.copytree(tmp_path / "log", tmp_path / "older")
    trail.publish()
    trail.add_cosigned(cosign(trail, witness))
    assert trail.status().cosigned == 2
    trail.close()

    remembered = witness.last_note(log_signer().key.name)
    assert remembered is not None
    trail = open_trail(tmp_path / "log", witnesses=[witness.key], cosigned=[remembered])
    assert trail.status().cosigned == 2
    trail.close()
    with pytest.raises(RolledBackError, match="rolled back") as caught:
        open_trail(tmp_path / "older", witnesses=[witness.key], cosigned=[remembered])
    assert caught.value.code is Code.ROLLED_BACK
    shutil.copy(tmp_path / "log" / "checkpoint.cosigned", tmp_path / "older" / "checkpoint.cosigned")
    with pytest.raises(RolledBackError):
        open_trail(tmp_path / "older", witnesses=[witness.key])


def test_a_log_that_differs_from_what_was_cosigned_does_not_open(tmp_path: Path) -> None:
    witness = Witness(witness_signer(), [log_signer().key], MemoryWitnessStore(), lambda: 1)
    trail, link = open_trail(tmp_path / "a"), Link()
    append(trail, [link.grant()])
    trail.publish()
    cosign(trail, witness)
    trail.close()
    trail = open_trail(tmp_path / "b")
    append(trail, [link.deny()])
    trail.close()
    remembered = witness.last_note(log_signer().key.name)
    assert remembered is not None
    with pytest.raises(RolledBackError, match="differs"):
        open_trail(tmp_path / "b", cosigned=[remembered])


@pytest.mark.parametrize("removed", ["checkpoint", "wal", "tile/0", "tile/entries"])
def test_a_log_without_one_of_its_parts_does_not_open(tmp_path: Path, removed: str) -> None:
    trail = open_trail(tmp_path)
    append(trail, [Link().grant()])
    trail.close()
    path = tmp_path / removed
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with pytest.raises((RolledBackError, TamperError)):
        open_trail(tmp_path)


def test_a_name_that_the_tree_gets_while_a_cosignature_is_kept_is_still_made_durable(tmp_path: Path) -> None:
    """The publisher writes tiles while another thread keeps what a witness cosigned."""
    synced: list[str] = []

    class Interleaved(DiskFiles):
        trail: Trail | None = None

        def sync_folder(self, folder: Path) -> None:
            super().sync_folder(folder)
            synced.append(folder.name)
            trail, self.trail = self.trail, None
            if trail is not None:
                trail.files.write("tile/9/000", bytes(32))

    files = Interleaved(0o666, 0o777)
    witness = Witness(witness_signer(), [log_signer().key], MemoryWitnessStore(), lambda: 1)
    with closing(open_trail(tmp_path, witnesses=[witness.key], files=files)) as trail:
        append(trail, [Link().grant()])
        trail.publish()
        note = cosign(trail, witness)
        files.trail = trail
        trail.add_cosigned(note)
        assert "9" not in synced
        append(trail, [Link().grant()])
        trail.publish()
        assert "9" in synced


def test_a_foreign_cosignature_is_not_kept(tmp_path: Path) -> None:
    witness = Witness(witness_signer(), [log_signer().key], MemoryWitnessStore(), lambda: 1)
    other = witness_signer("apac.acme/witness", seed=7)
    trail = open_trail(tmp_path, witnesses=[other.key])
    append(trail, [Link().grant()])
    trail.publish()
    with pytest.raises(TamperError, match="no cosignature of a known witness"):
        trail.add_cosigned(cosign(trail, witness))
    trail.close()


def test_two_witnesses_stand_on_one_checkpoint(tmp_path: Path) -> None:
    signers = [witness_signer(), witness_signer("apac.acme/witness", seed=7)]
    witnesses = [Witness(signer, [log_signer().key], MemoryWitnessStore(), lambda: 1) for signer in signers]
    trail = open_trail(tmp_path, witnesses=[witness.key for witness in witnesses])
    append(trail, [Link().grant()])
    trail.publish()
    for witness in witnesses:
        trail.add_cosigned(cosign(trail, witness))
    signed = open_checkpoint(trail.checkpoint(), trail.key, [witness.key for witness in witnesses])
    assert len(signed.cosigned) == 2
    trail.close()
    data = Folder(tmp_path).read("checkpoint.cosigned")
    assert data is not None
    assert len(open_checkpoint(data, log_signer().key, [w.key for w in witnesses]).cosigned) == 2


def test_consistency_is_proved_between_checkpoints_only(tmp_path: Path) -> None:
    trail, link = open_trail(tmp_path), Link()
    append(trail, [link.grant()])
    with pytest.raises(RequestError) as caught:
        trail.checkpoints.consistency_proof(0, 1)
    assert caught.value.code is Code.OFFSET_OUT_OF_RANGE
    trail.publish()
    assert trail.checkpoints.consistency_proof(0, 1) == []
    trail.close()


def test_the_timer_makes_a_checkpoint(tmp_path: Path) -> None:
    trail = open_trail(tmp_path, settings=TrailSettings(checkpoint_interval_ms=5))
    append(trail, [Link().grant()])
    for _ in range(2_000):
        if trail.status().checkpoint == 1:
            break
        threading.Event().wait(0.005)
    assert trail.status().checkpoint == 1
    trail.close()


def test_a_signer_that_fails_stops_the_trail(tmp_path: Path) -> None:
    signer = log_signer()
    trail = open_trail(tmp_path)
    trail.close()
    broken = type(signer)(signer.key, lambda data: (_ for _ in ()).throw(OSError("key service is away")))
    trail = Trail.open(tmp_path, broken, settings=QUIET)
    append(trail, [Link().grant()])
    with pytest.raises(AuditUnavailableError, match="cannot be checkpointed"):
        trail.publish()
    with pytest.raises(AuditUnavailableError):
        append(trail, [Link().deny()])
    trail.close()


def test_a_trail_that_may_not_be_written_takes_and_signs_nothing_and_goes_on_by_itself(
    tmp_path: Path,
) -> None:
    why = ""
    trail = Trail.open(tmp_path, log_signer(), settings=QUIET, refusal=lambda: why)
    append(trail, [Link().grant()])
    signed = trail.publish()
    append(trail, [Link().deny()])
    why = "another broker may serve"
    with pytest.raises(AuditUnavailableError, match="another broker may serve"):
        append(trail, [Link().deny()])
    with pytest.raises(AuditUnavailableError, match="another broker may serve"):
        trail.publish()
    assert trail.failure is not None and trail.checkpoint() == signed
    why = ""
    assert trail.failure is None and note_size(trail.publish()) == 2
    trail.close()


def test_the_timer_signs_nothing_while_the_trail_may_not_be_written(tmp_path: Path) -> None:
    asked, allowed = threading.Semaphore(0), threading.Event()

    def refusal() -> str:
        if threading.current_thread().name != "audit-publisher":
            return ""
        asked.release()
        return "" if allowed.is_set() else "not now"

    trail = Trail.open(tmp_path, log_signer(), settings=TrailSettings(1, 1 << 30), refusal=refusal)
    append(trail, [Link().grant()])
    for _ in range(3):
        assert asked.acquire(timeout=30)
    assert note_size(trail.checkpoint()) == 0
    allowed.set()
    with closing(trail):
        assert note_size(trail.publish()) == 1


WRITER = """
import sys
from pathlib import Path
from audit_log import Link, log_signer
from audit.trail import Trail, TrailSettings

trail, link = Trail.open(Path(sys.argv[1]), log_signer(), settings=TrailSettings(checkpoint_interval_ms=20)), Link()
print(trail.status().size, flush=True)

def done(first, error):
    sys.stdout.write(f"{first}\\n")
    sys.stdout.flush()

trail.append_nowait([link.grant()], done)
while True:
    for leaves in (link.intent(50), [link.deny()]):
        try:
            trail.append_nowait(leaves, done)
        except Exception:
            pass
"""


@pytest.mark.fault
def test_a_killed_process_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    acknowledged = -1
    for lines in (1, 40, 700):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        assert int(process.stdout.readline()) > acknowledged
        for _ in range(lines):
            acknowledged = int(process.stdout.readline())
        process.kill()
        for line in process.stdout.read().splitlines():
            acknowledged = int(line)
        process.wait(30)
        process.stdout.close()
    trail = open_trail(tmp_path)
    assert trail.status().size > acknowledged > 740
    trail.publish()
    trail.close()
    report = verify_log(Folder(tmp_path), trust(), cosignatures_min=0)
    assert report.size > acknowledged
    # Each run begins its link anew, so offsets repeat; every hash and leaf must hold all the same.
    assert {finding.step for finding in report.findings} <= {7}


def test_checkpoints_are_signed_with_both_algorithms_and_a_log_may_take_the_second_later(
    tmp_path: Path,
) -> None:
    signer = log_signer()
    quantum = NoteSigner.from_ml_dsa(signer.key.name, MlDsaKey.from_seed(b"q" * 32))
    with closing(open_trail(tmp_path)) as trail:
        append(trail, [Link().grant()])
        only = trail.publish()
    assert [by.key for by in open_checkpoint(only, (signer.key, quantum.key)).signed] == [signer.key]
    with closing(open_trail(tmp_path, also=[quantum])) as trail:
        assert trail.keys == (signer.key, quantum.key)
        append(trail, [Link().grant()])
        signed = open_checkpoint(trail.publish(), quantum.key)
        assert signed.checkpoint.size == 2 and signed.signed[0].time_s
    open_trail(tmp_path).close()


def test_one_checkpoint_is_offered_until_all_that_are_expected_have_cosigned_it(tmp_path: Path) -> None:
    one, two = witness_signer("one.example/w", 2), witness_signer("two.example/w", 3)
    with closing(open_trail(tmp_path, witnesses=[one.key, two.key])) as trail:
        trail.checkpoints.expect_cosigners(2)
        append(trail, [Link().grant()])
        trail.publish()
        offered = trail.checkpoints.offer()
        text = parse_note(offered).text
        append(trail, [Link().grant()])
        trail.publish()
        assert trail.checkpoints.offer() == offered, "the second witness is shown what the first one was"
        trail.add_cosigned(encode_note(parse_note(offered).with_signatures([one.cosign(text, 5)])))
        assert trail.checkpoints.offer() == offered
        assert trail.checkpoints.is_cosigned_by(offered, [one.key]) and not trail.checkpoints.is_cosigned_by(
            offered, [two.key]
        )
        trail.add_cosigned(encode_note(parse_note(offered).with_signatures([two.cosign(text, 6)])))
        (both,) = trail.checkpoints.cosigned()
        assert {by.key.name for by in both.cosigned} == {"one.example/w", "two.example/w"}
        following = trail.checkpoints.offer()
        assert parse_note(following).text.split("\n")[1] == "2"
        again = parse_note(following)
        trail.add_cosigned(encode_note(again.with_signatures([one.cosign(again.text, 7)])))
        newest, most = trail.checkpoints.cosigned()
        assert (newest.checkpoint.size, most.checkpoint.size) == (2, 1)
        assert len(most.cosigned) == 2, "what the one before had collected is kept"
    with closing(open_trail(tmp_path, witnesses=[one.key, two.key])) as trail:
        assert [held.checkpoint.size for held in trail.checkpoints.cosigned()] == [2, 1]


def test_a_round_ends_by_its_time_and_a_witness_that_has_more_is_shown_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_trail(tmp_path)) as trail:
        trail.checkpoints.expect_cosigners(2)
        append(trail, [Link().grant()])
        trail.publish()
        first = trail.checkpoints.offer()
        append(trail, [Link().grant()])
        newest = trail.publish()
        assert trail.checkpoints.offer() == first != newest
        assert trail.checkpoints.offer(at_least=3) == first, "the log has no third leaf"
        assert trail.checkpoints.offer(at_least=2) == newest
        assert trail.checkpoints.offer() == first, "for the others the round goes on"
        with monkeypatch.context() as over:
            over.setattr("audit.checkpoint_disk.ROUND_MS", 0)
            assert trail.checkpoints.offer() == newest
        append(trail, [Link().grant()])
        newest = trail.publish()
        assert trail.checkpoints.offer() != newest
        monkeypatch.setattr("audit.checkpoint_disk.ROUND_MS", 0)
        assert trail.checkpoints.offer() == newest
