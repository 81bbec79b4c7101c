"""A log that several brokers have copies of: nothing counts, and nothing is signed, that is not committed; what others have signed is taken
over where it is of the same leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from audit_log import Link, log_signer, trust

from audit import trail as trail_module
from audit.checkpoint import note_size, open_checkpoint
from audit.errors import AuditUnavailableError, RolledBackError
from audit.leaf import Header, Leaf, encode_for_log
from audit.merkle import Tree, leaf_hash
from audit.position import Positions
from audit.tile import bundle_path, read_entries
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.verify import verify_log
from felix.errors import Code, FelixError, RequestError, UnavailableError

QUIET = TrailSettings(checkpoint_interval_ms=3_600_000, checkpoint_leaves=1 << 30)
LINK = Link()


class Committed:
    """`audit.trail.Copies` of one process: what is committed, once `commit` is called or `at_once` holds."""

    def __init__(self) -> None:
        self.at_once = True
        self.leaves: list[bytes] = []
        self.notes: list[bytes] = []
        self.cosigned: list[bytes] = []
        self.documents: list[bytes] = []
        self.refusal: FelixError | None = None
        self._waiting: list[tuple[int, list[bytes], Callable[[FelixError | None], None]]] = []

    def append(self, first: int, leaves: Sequence[bytes], done: Callable[[FelixError | None], None]) -> None:
        self._waiting.append((first, list(leaves), done))
        if self.at_once:
            self.commit()

    def commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first, leaves, done in waiting:
            if self.refusal is not None or first != len(self.leaves):
                done(self.refusal or RequestError("another offset", code=Code.OFFSET_MISMATCH))
                continue
            self.leaves += leaves
            done(None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def keep_note(self, note: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.notes.append(note)

    def keep_cosigned(self, note: bytes) -> None:
        self.cosigned.append(note)

    def keep_document(self, document: bytes) -> None:
        self.documents.append(document)


def open_copy(path: Path) -> Trail:
    return Trail.open(path, log_signer(), settings=QUIET, copied=True)


def lead(trail: Trail, copies: Committed) -> None:
    """As whoever is elected does: all that is committed is taken, then signed, then appended to."""
    at = trail.status().durable
    if at < len(copies.leaves):
        trail.take(at, copies.leaves[at:])
        trail.settled()
    trail.lead(copies)
    trail.publish()
    trail.admit()


def leaf(number: int) -> Leaf:
    denied = LINK.deny()
    return Leaf(msgspec.structs.replace(denied.header, time_ms=denied.header.time_ms + number))


def root_of(leaves: Sequence[bytes]) -> bytes:
    tree = Tree()
    for each in leaves:
        tree.add(leaf_hash(each))
    return tree.root()


async def test_what_is_not_committed_is_neither_told_nor_signed(tmp_path: Path) -> None:
    copies = Committed()
    trail = open_copy(tmp_path)
    lead(trail, copies)
    assert await trail.append([leaf(0)]) == 0
    copies.at_once = False
    waiting = asyncio.ensure_future(trail.append([leaf(1)]))
    while not copies.waiting:  # noqa: ASYNC110 - the writer hands it over
        await asyncio.sleep(0.001)
    assert note_size(await asyncio.to_thread(trail.publish)) == 1
    assert not waiting.done() and trail.status().durable == 1
    copies.commit()
    assert await waiting == 1
    assert note_size(await asyncio.to_thread(trail.publish)) == 2
    for note in copies.notes:
        signed = open_checkpoint(note, log_signer().key).checkpoint
        assert signed.root == root_of(copies.leaves[: signed.size])
    await asyncio.to_thread(trail.close)


async def test_a_checkpoint_that_is_not_committed_is_shown_to_nobody(tmp_path: Path) -> None:
    copies = Committed()
    trail = open_copy(tmp_path)
    lead(trail, copies)
    await trail.append([leaf(0)])
    copies.refusal = UnavailableError("it is led elsewhere")
    with pytest.raises(UnavailableError, match="led elsewhere"):
        await asyncio.to_thread(trail.publish)
    assert note_size(trail.checkpoint()) == note_size(trail.checkpoints.offer()) == 0
    assert note_size((tmp_path / "checkpoint").read_bytes()) == 0
    assert trail.failure is None
    copies.refusal = None
    assert note_size(await asyncio.to_thread(trail.publish)) == 1
    await asyncio.to_thread(trail.close)


@pytest.mark.parametrize("grows", [False, True])
async def test_a_checkpoint_that_was_often_refused_leaves_what_it_and_the_one_before_need(
    tmp_path: Path, grows: bool
) -> None:
    copies = Committed()
    trail = open_copy(tmp_path)
    lead(trail, copies)
    for number in range(3):
        await trail.append([leaf(number)])
    shown = await asyncio.to_thread(trail.publish)
    await trail.append([leaf(3)])
    for number in range(4):
        copies.refusal = UnavailableError("too few copies are in sync")
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(trail.publish)
        copies.refusal = None
        if grows:
            await trail.append([leaf(4 + number)])
    size = note_size(await asyncio.to_thread(trail.publish))
    assert size == len(copies.leaves)
    assert verify_log(Folder(tmp_path), trust(), cosignatures_min=0).ok
    for each in (note_size(shown), size):
        assert (tmp_path / bundle_path(0, each)).exists()
    await asyncio.to_thread(trail.close)
    again = open_copy(tmp_path)
    assert note_size(again.checkpoint()) == size
    again.close()


async def test_leaves_whose_outcome_is_not_known_come_from_the_copies_and_keep_their_place(
    tmp_path: Path,
) -> None:
    copies = Committed()
    trail = open_copy(tmp_path)
    lead(trail, copies)
    copies.refusal = UnavailableError("it is led elsewhere")
    with pytest.raises(AuditUnavailableError, match="not known whether"):
        await trail.append([leaf(0)])
    trail.follow()
    with pytest.raises(AuditUnavailableError, match="about to go on"):
        await trail.append([leaf(0)])
    # It was committed all the same, and so was another one, by who led next.
    copies.leaves += [encode_for_log(leaf(0)).data, encode_for_log(leaf(1)).data]
    copies.refusal = None
    await asyncio.to_thread(lead, trail, copies)
    assert await trail.append([leaf(2)]) == 2
    await asyncio.to_thread(trail.close)
    size = note_size((tmp_path / "checkpoint").read_bytes())
    assert [bytes(each) for _, each in read_entries(Folder(tmp_path), 0, size, size)] == copies.leaves[:size]


async def test_appends_after_one_that_was_refused_get_the_places_that_are_free(tmp_path: Path) -> None:
    copies = Committed()
    trail = open_copy(tmp_path)
    lead(trail, copies)
    copies.refusal = UnavailableError("too few copies")
    refused = [asyncio.ensure_future(trail.append([leaf(0)])) for _ in range(3)]
    await asyncio.wait(refused)
    assert all(isinstance(each.exception(), AuditUnavailableError) for each in refused)
    copies.refusal = None
    assert await trail.append([leaf(0)]) == 0
    assert trail.status().pending_bytes < 4_096
    await asyncio.to_thread(trail.close)


async def test_a_leaf_that_moves_no_position_because_of_a_mistake_stops_the_log_and_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Committed()
    trail = open_copy(tmp_path)
    lead(trail, copies)

    def fails(positions: Positions, number: int, header: Header | None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Positions, "apply", fails)
    with pytest.raises(AuditUnavailableError, match="has stopped: its positions failed"):
        await trail.append([leaf(0)])
    assert trail.failure is not None and trail.status().durable == 0
    await asyncio.to_thread(trail.close)


async def test_a_copy_has_the_same_files_and_goes_on_from_them(tmp_path: Path) -> None:
    copies = Committed()
    trail, copy = open_copy(tmp_path / "home"), open_copy(tmp_path / "copy")
    lead(trail, copies)
    taken = 0
    for count in (1, 300, 3, 600):
        await trail.append([leaf(number) for number in range(count)])
        note = await asyncio.to_thread(trail.publish)
        copy.take(taken, copies.leaves[taken:])
        taken += count
        await asyncio.to_thread(copy.show, note)
    for name in ("home", "copy"):
        report = verify_log(Folder(tmp_path / name), trust(), cosignatures_min=0)
        assert report.ok and report.size == 904, report.findings
    assert (tmp_path / "home/checkpoint").read_bytes() == (tmp_path / "copy/checkpoint").read_bytes()
    assert (tmp_path / "home/index").read_bytes() == (tmp_path / "copy/index").read_bytes()
    assert copy.checkpoints.offer(at_least=904) == trail.checkpoint()
    trail.follow()
    await asyncio.to_thread(copy.close)
    copy = open_copy(tmp_path / "copy")
    await asyncio.to_thread(lead, copy, copies)
    assert await copy.append([leaf(0)]) == 904
    for each in (trail, copy):
        await asyncio.to_thread(each.close)


async def test_a_checkpoint_over_other_leaves_stops_the_copy(tmp_path: Path) -> None:
    copies = Committed()
    trail, copy = open_copy(tmp_path / "home"), open_copy(tmp_path / "copy")
    lead(trail, copies)
    await trail.append([leaf(0)])
    note = await asyncio.to_thread(trail.publish)
    copy.take(0, [copies.leaves[0][:-1] + b"?"])
    with pytest.raises(AuditUnavailableError, match="differ from what was signed"):
        await asyncio.to_thread(copy.show, note)
    assert copy.failure is not None and note_size(copy.checkpoint()) == 0
    for each in (trail, copy):
        await asyncio.to_thread(each.close)


async def test_a_checkpoint_that_is_written_too_late_is_not_held_against_later_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, notes = Committed(), list[bytes]()
    trail, copy = open_copy(tmp_path / "home"), open_copy(tmp_path / "copy")
    lead(trail, copies)
    for number in range(2):
        await trail.append([leaf(number)])
        notes.append(await asyncio.to_thread(trail.publish))
    take, begun, goes_on = copy._published.tree.take, threading.Event(), threading.Event()

    def slow(data: bytes, header: Header | None) -> None:
        begun.set()
        goes_on.wait(60)
        take(data, header)

    monkeypatch.setattr(copy._published.tree, "take", slow)
    copy.take(0, copies.leaves[:1])
    await asyncio.to_thread(begun.wait, 60)
    with pytest.raises(AuditUnavailableError, match="was not written in"):
        await asyncio.to_thread(copy.show, notes[0], 0.0)
    copy.take(1, copies.leaves[1:])
    goes_on.set()
    await asyncio.to_thread(copy.show, notes[1])
    assert copy.checkpoint() == notes[1] and copy.status().failure == ""
    for each in (trail, copy):
        await asyncio.to_thread(each.close)


async def test_a_copy_that_stopped_is_opened_again_and_takes_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk was full for a moment."""
    copies = Committed()
    trail, copy = open_copy(tmp_path / "home"), open_copy(tmp_path / "copy")
    lead(trail, copies)
    await trail.append([leaf(0)])
    first = await asyncio.to_thread(trail.publish)
    copy.take(0, copies.leaves)
    await asyncio.to_thread(copy.show, first)
    await trail.append([leaf(1)])
    second = await asyncio.to_thread(trail.publish)

    def full(path: str, data: bytes) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(copy._folder, "write", full)
        copy.take(1, copies.leaves[1:])
        with pytest.raises(AuditUnavailableError, match="No space left"):
            await asyncio.to_thread(copy.show, second)
    assert copy.stopped is not None
    await asyncio.to_thread(copy.reopen)
    assert copy.stopped is None and copy.checkpoint() == first and copy.status().durable == 1
    copy.take(1, copies.leaves[1:])
    await asyncio.to_thread(copy.show, second)
    assert copy.checkpoint() == second
    for each in (trail, copy):
        await asyncio.to_thread(each.close)
    assert verify_log(Folder(tmp_path / "copy"), trust(), cosignatures_min=0).ok


async def test_a_checkpoint_of_another_history_is_not_continued(tmp_path: Path) -> None:
    notes = list[bytes]()
    trails = [open_copy(tmp_path / name) for name in ("one", "other")]
    for number, each in enumerate(trails):
        lead(each, Committed())
        await each.append([leaf(number)])
        notes.append(await asyncio.to_thread(each.publish))
        await each.append([leaf(5)])
        await asyncio.to_thread(each.publish)
    for each, own, others in zip(trails, notes, reversed(notes), strict=True):
        each.check_continues(own)
        with pytest.raises(RolledBackError, match="differs"):
            each.check_continues(others)
        await asyncio.to_thread(each.close)


async def test_a_crash_between_the_commit_and_the_files_costs_nothing(tmp_path: Path) -> None:
    """The files of a copy are as old as its last checkpoint: the rest comes from what is committed."""
    copies = Committed()
    trail = open_copy(tmp_path)
    lead(trail, copies)
    await trail.append([leaf(0)])
    await asyncio.to_thread(trail.publish)
    await trail.append([leaf(number) for number in range(700)])
    trail._fail("the power is gone", OSError())  # what was committed is in no tile, but those that were full
    await asyncio.to_thread(trail.close)
    trail = open_copy(tmp_path)
    assert trail.status().durable == 1
    await asyncio.to_thread(lead, trail, copies)
    assert note_size(trail.checkpoint()) == 701
    report = verify_log(Folder(tmp_path), trust(), cosignatures_min=0)
    assert report.ok and report.size == 701, report.findings
    await asyncio.to_thread(trail.close)


def test_a_log_is_written_by_one_broker_or_copied_by_several_and_never_both(tmp_path: Path) -> None:
    Trail.open(tmp_path / "one", log_signer()).close()
    with pytest.raises(RequestError, match="written by one broker alone"):
        open_copy(tmp_path / "one")
    open_copy(tmp_path / "several").close()
    with pytest.raises(RequestError, match="one of several brokers' copies"):
        Trail.open(tmp_path / "several", log_signer())


async def test_an_append_that_is_longer_than_the_copies_take_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = encode_for_log(leaf(0))
    monkeypatch.setattr(trail_module, "COPIED_APPEND_BYTES_MAX", 2 * len(one.data))
    copies = Committed()
    trail = open_copy(tmp_path)
    lead(trail, copies)
    with pytest.raises(RequestError) as told:
        await trail.append([one] * 3)
    assert told.value.code is Code.BATCH_TOO_LARGE and not copies.leaves
    assert await trail.append([one] * 2) == 0
    await asyncio.to_thread(trail.close)


@pytest.mark.parametrize("harm", ["gone", "torn", "changed", "long"])
@pytest.mark.parametrize("size", [3, 256, 300, 600])
async def test_a_copy_without_its_newest_bundle_opens_and_takes_those_leaves_from_the_copies(
    tmp_path: Path, size: int, harm: str
) -> None:
    copies, whole = Committed(), size // 256 * 256
    trail = open_copy(tmp_path)
    lead(trail, copies)
    await trail.append([leaf(number) for number in range(size)])
    note = await asyncio.to_thread(trail.publish)
    await asyncio.to_thread(trail.close)
    if size > whole:
        bundle = tmp_path / bundle_path(size // 256, size - whole)
        data = bundle.read_bytes()
        bundle.unlink()
        if harm != "gone":
            half = len(data) // 2
            changed = data[:half] + bytes((data[half] ^ 1,)) + data[half + 1 :]
            bundle.write_bytes({"torn": data[:half], "changed": changed, "long": data * 2}[harm])
    copy = open_copy(tmp_path)
    assert copy.checkpoint() == note and copy.status().durable == copy.readable_size == whole
    assert copy.lacks_newest is (size > whole)
    await asyncio.to_thread(lead, copy, copies)
    assert not copy.lacks_newest and copy.checkpoint() == note and copy.readable_size == size
    assert [bytes(data) for _, data in copy.leaves()] == copies.leaves
    await copy.append([leaf(size)])
    await asyncio.to_thread(copy.close)
    report = verify_log(Folder(tmp_path), trust(), cosignatures_min=0)
    assert report.ok and report.size == size + 1, report.findings


async def test_a_copy_without_its_newest_bundle_takes_no_other_leaves_and_signs_nothing(
    tmp_path: Path,
) -> None:
    copies = Committed()
    trail = open_copy(tmp_path)
    lead(trail, copies)
    await trail.append([leaf(number) for number in range(3)])
    note = await asyncio.to_thread(trail.publish)
    await asyncio.to_thread(trail.close)
    (tmp_path / bundle_path(0, 3)).unlink()
    for taken in (copies.leaves[:2], [*copies.leaves[:2], encode_for_log(leaf(7)).data]):
        copy = open_copy(tmp_path)
        copy.take(0, taken)
        if len(taken) == 3:
            with pytest.raises(AuditUnavailableError, match="differ from what was signed"):
                await asyncio.to_thread(copy.settled)
        else:
            await asyncio.to_thread(copy.settled)
            with pytest.raises(AssertionError):
                copy.lead(copies)
        assert copy.lacks_newest
        await asyncio.to_thread(copy.close)
        assert (tmp_path / "checkpoint").read_bytes() == note
        assert not (tmp_path / bundle_path(0, 2)).exists() and not (tmp_path / bundle_path(0, 3)).exists()
