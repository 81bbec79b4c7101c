"""Copies of a log that goes on while it is copied: they verify, at the checkpoint that was read, wherever it goes on in between."""

from __future__ import annotations

import shutil
import threading
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from audit_log import EGRESS_ORIGIN, Link, log_signer, trust, witness_signer

from audit.checkpoint import note_size
from audit.cosigned_notes import join, notes_at
from audit.document_leaf import document_path
from audit.errors import RolledBackError
from audit.leaf import DOCUMENT_BYTES_MAX, Leaf
from audit.log_copy_disk import LACKING_PATH, Copied, copy_log
from audit.note import Note, Signature, encode_note, parse_note
from audit.tile import (
    CHECKPOINT_PATH,
    COSIGNED_PATH,
    KEPT_MAX,
    KEPT_PATH,
    WITNESSED_PATH,
    MemoryFiles,
    bundle_path,
    find_bundle,
    partial_widths,
    tile_path,
)
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.tree_head import TreeHead
from audit.verify import verify_log
from audit.witness import MemoryWitnessStore, Witness
from audit.witness_policy import WitnessPolicy
from felix.errors import RequestError, TamperError

QUIET = TrailSettings(checkpoint_interval_ms=3_600_000, checkpoint_leaves=1 << 30)


class Log:
    """A log that another broker writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._signer = witness_signer("eu-west.acme/witness")
        self.trail = Trail.open(path, log_signer(EGRESS_ORIGIN), witnesses=[self._signer.key], settings=QUIET)
        self._witness = Witness(self._signer, [self.trail.key], MemoryWitnessStore(), lambda: 1_800_000_000)
        self._link, self._size = Link(), 0
        self._waiting: list[threading.Event] = []
        self.append(self._link.agreement())

    def append(self, leaves: list[Leaf]) -> None:
        durable = threading.Event()
        self.trail.append_nowait(leaves, lambda *_: durable.set())
        self._waiting.append(durable)

    def go_on(self, batches: int) -> None:
        """So many batches more, and a checkpoint, which is cosigned."""
        for _ in range(batches):
            self.append(self._link.intent())
        for durable in self._waiting:
            assert durable.wait(timeout=60)
        self._waiting.clear()
        note = self.trail.publish()
        proof = self.trail.checkpoints.consistency_proof(self._size, note_size(note)) if self._size else []
        self._size = note_size(note)
        self.trail.add_cosigned(self._witness.cosign(note, proof))


class Going(Folder):
    """The log goes on before each file that is read, as long as it is told to."""

    def __init__(self, log: Log, times: int) -> None:
        super().__init__(log.path)
        self._log, self._times = log, times

    def read(self, path: str) -> bytes | None:
        if self._times:
            self._times -= 1
            self._log.go_on(7)
        return super().read(path)


@pytest.fixture
def log(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Log(tmp_path / "log")
    made.go_on(300)
    yield made
    made.trail.close()


def copy(source: Folder, to: Path) -> Copied:
    made = copy_log(source, Folder(to), trust())
    report = verify_log(Folder(to), trust())
    assert report.ok, report.findings[:3]
    assert report.size == made.size
    return made


def test_a_log_that_goes_on_while_it_is_copied_verifies_and_its_copy_goes_on(
    log: Log, tmp_path: Path
) -> None:
    first = copy(Going(log, 40), tmp_path / "copy")
    assert first.before == 0 and first.missing == 0
    second = copy(Going(log, 3), tmp_path / "copy")
    assert second.before == first.size < second.size
    assert copy(Folder(log.path), tmp_path / "copy").before == second.size
    assert not (tmp_path / "copy" / "wal").exists()


def test_a_copy_that_was_broken_off_goes_on(log: Log, tmp_path: Path) -> None:
    class Broken(Folder):
        def write(self, path: str, data: bytes) -> None:
            if path == bundle_path(1, 49) or path == CHECKPOINT_PATH:
                raise OSError("no space left")
            super().write(path, data)

    with pytest.raises(OSError, match="no space"):
        copy_log(Folder(log.path), Broken(tmp_path / "copy"), trust())
    assert not (tmp_path / "copy" / CHECKPOINT_PATH).exists()
    written = (tmp_path / "copy" / bundle_path(0)).stat().st_mtime_ns
    copy(Folder(log.path), tmp_path / "copy")
    assert (tmp_path / "copy" / bundle_path(0)).stat().st_mtime_ns == written


@pytest.mark.parametrize("path", [bundle_path(0), "tile/0/000", CHECKPOINT_PATH])
def test_what_does_not_hold_is_not_written(log: Log, tmp_path: Path, path: str) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(log.path, spoilt)
    data = bytearray((spoilt / path).read_bytes())
    data[40] ^= 1
    (spoilt / path).write_bytes(data)
    if path == "tile/0/000":
        # Its own tiles are made from the leaves, which hold.
        copy(Folder(spoilt), tmp_path / "copy")
        return
    with pytest.raises(TamperError):
        copy_log(Folder(spoilt), Folder(tmp_path / "copy"), trust())
    assert [each.name for each in (tmp_path / "copy").rglob("*") if each.is_file()] in ([], ["lock"])


def test_a_copy_is_not_exchanged_for_another_history_by_one_false_tile(tmp_path: Path) -> None:
    """Whoever signs the log gives the copy two histories, and the tile that would show it from the first one."""
    logs = [Log(tmp_path / name) for name in "ab"]
    logs[0].go_on(280)
    logs[1].go_on(250)
    logs[1]._link.time_ms += 777
    logs[1].go_on(300)
    for log in logs:
        log.trail.close()
    copied = copy(Folder(logs[0].path), tmp_path / "copy")
    held = {path: path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    part = Folder(logs[0].path).read(tile_path(0, 1, copied.size % 256))
    assert part is not None
    forged = logs[1].path / tile_path(0, 1)
    forged.write_bytes(part + forged.read_bytes()[len(part) :])
    with pytest.raises(RolledBackError, match="is another one"):
        copy_log(Folder(logs[1].path), Folder(tmp_path / "copy"), trust())
    assert {path: path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()} == held


class Exchanged(Folder):
    """A log that is exchanged for another one once so many files of it were read."""

    def __init__(self, log: Path, other: Path, reads: int) -> None:
        super().__init__(log)
        self._other, self._left = Folder(other), reads

    def read(self, path: str) -> bytes | None:
        self._left -= 1
        return super().read(path) if self._left >= 0 else self._other.read(path)


@pytest.mark.parametrize("reads", range(9))
def test_a_copy_of_a_log_that_is_exchanged_meanwhile_verifies_or_is_none_and_goes_on(
    tmp_path: Path, reads: int
) -> None:
    """Also where it was broken off with files of the other log's in it."""
    logs = [Log(tmp_path / name) for name in "ab"]
    logs[0].go_on(300)
    logs[1].go_on(250)
    logs[1]._link.time_ms += 777
    logs[1].go_on(280)
    for log in logs:
        log.trail.close()
    for log, other in (logs, reversed(logs)):
        to = tmp_path / f"copy-of-{log.path.name}"
        try:
            copy(Exchanged(log.path, other.path, reads), to)
        except (TamperError, RolledBackError):
            assert not (to / CHECKPOINT_PATH).exists()
        else:
            continue
        copy(Folder(log.path), to)


def test_one_process_at_a_time_copies_into_a_folder(log: Log, tmp_path: Path) -> None:
    class Second(Folder):
        def write(self, path: str, data: bytes) -> None:
            if path == CHECKPOINT_PATH:
                with pytest.raises(RequestError, match="Another process copies"):
                    copy_log(Folder(log.path), Folder(self.path), trust())
            super().write(path, data)

    copy_log(Folder(log.path), Second(tmp_path / "copy"), trust())
    assert copy(Folder(log.path), tmp_path / "copy").before


@pytest.mark.parametrize("at", [CHECKPOINT_PATH, COSIGNED_PATH])
def test_a_copy_that_is_broken_off_between_its_notes_verifies(log: Log, tmp_path: Path, at: str) -> None:
    copy(Folder(log.path), tmp_path / "copy")
    log.go_on(5)

    class Broken(Folder):
        def write(self, path: str, data: bytes) -> None:
            if path == at:
                raise OSError("no space left")
            super().write(path, data)

    with pytest.raises(OSError, match="no space"):
        copy_log(Folder(log.path), Broken(tmp_path / "copy"), trust())
    report = verify_log(Folder(tmp_path / "copy"), trust())
    assert report.ok, report.findings[:3]
    copy(Folder(log.path), tmp_path / "copy")


def test_a_document_that_was_lacking_comes_with_a_later_copy(log: Log, tmp_path: Path) -> None:
    document = b"d" * (DOCUMENT_BYTES_MAX + 1)
    digest = sha256(document).digest()
    header = log._link.agreement()[0].header
    log.append([Leaf(msgspec.structs.replace(header, document=b"", document_sha256=digest))])
    log.go_on(260)
    assert copy_log(Folder(log.path), Folder(tmp_path / "copy"), trust()).missing == 1
    log.go_on(1)
    assert copy_log(Folder(log.path), Folder(tmp_path / "copy"), trust()).missing == 1
    Folder(log.path).write(document_path(digest), document)
    assert copy_log(Folder(log.path), Folder(tmp_path / "copy"), trust()).missing == 0
    assert Folder(tmp_path / "copy").read(document_path(digest)) == document


@pytest.mark.parametrize("damaged", [b"ab\n0", b"\xff"])
def test_a_copy_whose_list_of_documents_is_damaged_says_so(log: Log, tmp_path: Path, damaged: bytes) -> None:
    copy(Folder(log.path), tmp_path / "copy")
    Folder(tmp_path / "copy").write(LACKING_PATH, damaged)
    with pytest.raises(TamperError, match="no list of hashes"):
        copy_log(Folder(log.path), Folder(tmp_path / "copy"), trust())


def test_a_name_of_any_length_is_no_width() -> None:
    names = {
        bundle_path(0, 3): b"",
        f"tile/entries/000.p/{'9' * 5_000}": b"",
        "tile/entries/000.p/\u0663": b"",
    }
    assert partial_widths(MemoryFiles(names), "entries", 0) == [3]


def test_no_copy_is_taken_back_and_no_log_is_written_over(log: Log, tmp_path: Path) -> None:
    shutil.copytree(log.path, tmp_path / "older")
    log.go_on(5)
    copy(Folder(log.path), tmp_path / "copy")
    with pytest.raises(RolledBackError, match="older copy"):
        copy_log(Folder(tmp_path / "older"), Folder(tmp_path / "copy"), trust())
    with pytest.raises(RequestError, match="no copy"):
        copy_log(Folder(tmp_path / "copy"), Folder(log.path), trust())
    with pytest.raises(RequestError, match="no checkpoint"):
        copy_log(MemoryFiles(), Folder(tmp_path / "copy"), trust())


def test_a_bundle_is_found_though_all_that_were_listed_are_gone() -> None:
    data = b"\x00\x01a" * 12

    class Replaced(MemoryFiles):
        """What is listed is replaced by a wider one before it is read, for a while."""

        def names(self, folder: str) -> list[str]:
            found = super().names(folder)
            (path,) = self.files
            width = min(12, int(path.rpartition("/")[2]) + 3)
            self.files = {bundle_path(0, width): data[: 3 * width]}
            return found

    found = find_bundle(Replaced({bundle_path(0, 3): data[:9]}), 0, 2)
    assert found is not None and len(found) == 2
    assert find_bundle(MemoryFiles({bundle_path(0, 1): data[:3]}), 0, 2) is None


@pytest.mark.parametrize("served", ["stripped", "older"])
def test_a_copy_keeps_a_cosigned_note_that_the_log_serves_no_more(
    log: Log, tmp_path: Path, served: str
) -> None:
    """The log's owner cuts the witness's line out of its notes, or serves the cosigned note of before."""
    older = Folder(log.path).read(COSIGNED_PATH)
    log.go_on(5)
    copy(Folder(log.path), tmp_path / "copy")
    shutil.copytree(log.path, tmp_path / "served")
    held = Folder(log.path).read(COSIGNED_PATH)
    assert held is not None and older is not None
    stripped = b"".join(
        line for line in held.splitlines(keepends=True) if b" eu-west.acme/witness " not in line
    )
    assert stripped != held
    for path in (CHECKPOINT_PATH, COSIGNED_PATH) if served == "stripped" else (COSIGNED_PATH,):
        (tmp_path / "served" / path).write_bytes(stripped if served == "stripped" else older)
    copy(Folder(tmp_path / "served"), tmp_path / "copy")
    assert Folder(tmp_path / "copy").read(COSIGNED_PATH) == held
    log.go_on(5)
    copy(Folder(log.path), tmp_path / "copy")
    assert Folder(tmp_path / "copy").read(COSIGNED_PATH) == Folder(log.path).read(COSIGNED_PATH)


@pytest.mark.parametrize("lost", range(6))
def test_a_copy_that_is_broken_off_among_its_notes_loses_none(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """ap-south cosigned a beginning of the log, which serves that note no more; the copy ends at its n-th note."""
    south = witness_signer("ap-south.acme/witness")
    base = parse_note((tmp_path / "log" / CHECKPOINT_PATH).read_bytes())
    text = base.text
    held = encode_note(Note(text, (base.signatures[0], south.cosign(text, 1_800_000_000))))
    trusted, to = trust("us-east", "eu-west", "ap-south"), Folder(tmp_path / "copy")
    shutil.copytree(log.path, tmp_path / "served")
    (tmp_path / "served" / COSIGNED_PATH).write_bytes(held)
    copy_log(Folder(tmp_path / "served"), to, trusted)
    log.go_on(5)
    left = lost
    write = Folder.write

    def breaks_off(folder: Folder, path: str, data: bytes) -> None:
        nonlocal left
        if path.startswith("checkpoint"):
            left -= 1
            if left < 0:
                raise OSError("no more")
        write(folder, path, data)

    monkeypatch.setattr(Folder, "write", breaks_off)
    try:
        copy_log(Folder(log.path), to, trusted)
    except OSError:
        assert left < 0
    monkeypatch.undo()
    for _ in range(2):
        report = verify_log(to, trusted)
        assert report.ok and report.cosigners["ap-south"] == note_size(held)
        copy_log(Folder(log.path), to, trusted)
    assert report.cosigners["eu-west"] == report.size > note_size(held)


def test_a_copy_keeps_the_line_of_a_witness_of_whom_only_a_policy_knows(log: Log, tmp_path: Path) -> None:
    """The log's owner cuts it out, or puts one there of the same name that does not hold."""
    outside = witness_signer("harbour.example/w", 91)
    held = parse_note((tmp_path / "log" / COSIGNED_PATH).read_bytes())
    signed = held.with_signatures([outside.cosign(held.text, 1_800_000_000)])
    shutil.copytree(log.path, tmp_path / "served")
    for path in (CHECKPOINT_PATH, COSIGNED_PATH):
        (tmp_path / "served" / path).write_bytes(encode_note(signed))
    to = Folder(tmp_path / "copy")
    made = copy_log(Folder(tmp_path / "served"), to, trust())
    assert made.unverified == {"harbour.example/w"} and not made.let_go
    policy = WitnessPolicy.parse(f"witness w {outside.key}\nquorum w\nlog {log.trail.key}\n".encode())
    size = verify_log(to, trust().under(policy)).cosigned_size
    assert size == made.size
    log.go_on(5)
    assert not copy_log(Folder(log.path), to, trust(), witnesses=policy.witness_keys).unverified
    report = verify_log(to, trust().under(policy))
    assert report.ok and report.cosigned_size == size < report.size
    newest = parse_note(Folder(log.path).read(CHECKPOINT_PATH) or b"")
    forged = signed.signatures[-1]._replace(data=bytes(72))
    shutil.copytree(log.path, tmp_path / "forged")
    (tmp_path / "forged" / COSIGNED_PATH).write_bytes(encode_note(newest.with_signatures([forged])))
    # It stops nobody's copy, and is no cosignature in it.
    assert not copy_log(Folder(tmp_path / "forged"), to, trust(), witnesses=policy.witness_keys).unverified
    assert b64encode(outside.key.key_id + bytes(72)) not in (to.read(COSIGNED_PATH) or b"").split()
    assert verify_log(to, trust().under(policy)).cosigned_size == size


@pytest.mark.parametrize("cosigners", [(), ("eu-west.acme/witness",)])
def test_a_note_of_another_history_that_the_log_serves_ends_the_copy_whoever_cosigned_it(
    log: Log, tmp_path: Path, cosigners: tuple[str, ...]
) -> None:
    """Also where a note of a larger tree has all of its cosignatures: the copy would be without the proof that the log has two histories."""
    log.go_on(30)
    text = TreeHead(EGRESS_ORIGIN, 8, bytes(range(32))).text()
    lines = [log_signer(EGRESS_ORIGIN).sign(text, 1_800_000_000)]
    lines += [witness_signer(name).cosign(text, 1_800_000_000) for name in cosigners]
    Folder(log.path).write(WITNESSED_PATH, encode_note(Note(text, tuple(lines))))
    assert not verify_log(Folder(log.path), trust()).ok
    with pytest.raises(RolledBackError, match="its first 8 leaves are not those that were signed before"):
        copy_log(Folder(log.path), Folder(tmp_path / "copy"), trust())
    assert Folder(tmp_path / "copy").read(CHECKPOINT_PATH) is None


def test_a_note_of_another_history_among_the_copys_own_ends_the_copy(log: Log, tmp_path: Path) -> None:
    copy = Folder(tmp_path / "copy")
    copy_log(Folder(log.path), copy, trust())
    text = TreeHead(EGRESS_ORIGIN, 1, bytes(range(32))).text()
    copy.write(
        WITNESSED_PATH, encode_note(Note(text, (log_signer(EGRESS_ORIGIN).sign(text, 1_800_000_000),)))
    )
    log.go_on(3)
    with pytest.raises(RolledBackError, match="its first 1 leaves are not those that were signed before"):
        copy_log(Folder(log.path), copy, trust())


def test_a_copy_of_as_many_notes_as_it_may_keep_goes_on_wherever_it_is_broken_off(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each note stands once in the list, which otherwise had one more than whoever reads it takes."""
    log.go_on(1)
    source = Folder(log.path)
    note = parse_note(source.read(CHECKPOINT_PATH) or b"")
    mine = [line for line in note.signatures if line.name == EGRESS_ORIGIN]
    notes = [
        encode_note(Note(note.text, (*mine, Signature(f"stranger-{number}", bytes(4), bytes(64)))))
        for number in range(KEPT_MAX - 1)
    ]
    source.write(KEPT_PATH, join(notes))
    write = Folder.write
    broken_off = 0
    for number in range(4):
        to, left = Folder(tmp_path / f"copy-{number}"), number

        def breaks_off(folder: Folder, path: str, data: bytes) -> None:
            nonlocal left
            left -= path.startswith("checkpoint")
            if left < 0:
                raise OSError("no more")
            write(folder, path, data)

        monkeypatch.setattr(Folder, "write", breaks_off)
        try:
            copy_log(source, to, trust())
        except OSError:
            broken_off += 1
        monkeypatch.undo()
        copied = copy_log(source, to, trust())
        assert len(copied.unverified) == KEPT_MAX - 1 and not copied.let_go
        assert len(notes_at(KEPT_PATH, to.read(KEPT_PATH) or b"")) >= KEPT_MAX - 2
    assert broken_off == 4


def test_a_copys_list_of_notes_that_cannot_be_read_is_not_taken_for_an_empty_one(
    log: Log, tmp_path: Path
) -> None:
    copy = Folder(tmp_path / "copy")
    copy_log(Folder(log.path), copy, trust())
    copy.write(KEPT_PATH, b"half a note")
    with pytest.raises(TamperError, match="cannot be read") as refused:
        copy_log(Folder(log.path), copy, trust())
    assert "another folder" in (refused.value.hint or "")
    assert copy.read(KEPT_PATH) == b"half a note"
