"""A copy of a log takes the log's place: what comes back, what is refused, and that nothing is lost wherever it is broken off."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from audit_log import EGRESS_ORIGIN, Link, log_signer, trust, witness_signer

from audit.checkpoint import note_size
from audit.document_leaf import document_path
from audit.errors import RolledBackError
from audit.leaf import DOCUMENT_BYTES_MAX, Leaf
from audit.log_copy_disk import LACKING_PATH, copy_log
from audit.log_restore_disk import REPLACED, STAGED, Restored, restore_log
from audit.note import NoteSigner
from audit.tile import CHECKPOINT_PATH, COPIED_PATH, WAL_FOLDER
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.verify import verify_log
from audit.wal_disk import segment_name, segments
from felix.errors import CorruptionError, FelixError, RequestError
from felix.storage.disk import LOCK_NAME, SHARED_FILES, DiskFiles

QUIET = TrailSettings(checkpoint_interval_ms=3_600_000, checkpoint_leaves=1 << 30)
EU = witness_signer()


class Log:
    """The log of a bridge, in a folder that may be lost."""

    def __init__(self, path: Path, signer: NoteSigner | None = None) -> None:
        self.path, self._signer, self._link = path, signer or log_signer(EGRESS_ORIGIN), Link()
        self.trail: Trail
        self.open()
        self.put(self._link.agreement())

    def open(self) -> None:
        self.trail = Trail.open(self.path, self._signer, witnesses=[EU.key], settings=QUIET)

    def put(self, leaves: list[Leaf]) -> None:
        ended = threading.Event()
        self.trail.append_nowait(leaves, lambda *_: ended.set())
        assert ended.wait(30)

    def grow(self, batches: int = 1) -> bytes:
        for _ in range(batches):
            intents = self._link.intent()
            self.put(intents)
            self.put([self._link.ack(intents)])
        return self.trail.publish()

    def tear(self) -> None:
        """Leaves are durable that no checkpoint covers, and the machine stops."""
        folder = self.path.with_name("torn")
        self.put(self._link.intent())
        shutil.copytree(self.path, folder)
        self.trail.close()
        shutil.rmtree(self.path)
        folder.rename(self.path)

    def copy(self, name: str = "copy") -> Folder:
        made = Folder(self.path.with_name(name))
        copy_log(Folder(self.path), made, trust())
        return made

    def restore(self, copy: Folder, *remembered: bytes, files: DiskFiles = SHARED_FILES) -> Restored:
        return restore_log(copy, self.path, trust(), remembered, files=files, origin=EGRESS_ORIGIN)

    def goes_on(self) -> int:
        """How many leaves it opens with; then it grows, and verifies."""
        self.open()
        durable = self.trail.status().durable
        self.grow()
        self.trail.close()
        report = verify_log(Folder(self.path), trust(), cosignatures_min=0)
        assert report.ok, report.findings
        return durable


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "log")
    yield made
    made.trail.close()


@pytest.mark.parametrize("batches", [3, 140])
def test_a_log_whose_disk_is_lost_goes_on_from_its_copy(log: Log, batches: int) -> None:
    log.grow(batches)
    size = note_size(log.grow())
    copy = log.copy()
    log.trail.close()
    shutil.rmtree(log.path)
    log.path.mkdir()
    made = log.restore(copy)
    assert made == Restored(EGRESS_ORIGIN, size, 0, 0, None)
    assert {each.name for each in log.path.parent.iterdir()} == {"log", "copy"}
    assert log.goes_on() == size


@pytest.mark.parametrize("kept", [("checkpoint", "wal"), ("wal",)])
def test_leaves_that_were_durable_behind_the_copy_come_along(log: Log, kept: tuple[str, ...]) -> None:
    log.grow(2)
    copy = log.copy()
    size = note_size(log.trail.checkpoint())
    log.tear()
    for each in log.path.iterdir():
        if each.is_dir() and each.name not in kept:
            shutil.rmtree(each)
        elif each.name not in kept:
            each.unlink()
    with pytest.raises(FelixError):
        log.open()
    was = {
        each: each.read_bytes() for each in log.path.rglob("*") if each.is_file() and each.name != LOCK_NAME
    }
    made = log.restore(copy)
    assert made.carried > 0
    aside = log.path.with_name(log.path.name + REPLACED)
    assert made.replaced == aside
    for each, data in was.items():
        assert (aside / each.relative_to(log.path)).read_bytes() == data
    assert log.goes_on() == size + made.carried


def test_a_shorter_copy_is_refused_whoever_remembers_more(log: Log) -> None:
    log.grow()
    copy = log.copy()
    newest = log.grow()
    log.trail.close()
    for lost in (False, True):
        if lost:
            shutil.rmtree(log.path)
        with pytest.raises(RolledBackError, match="signed before"):
            log.restore(copy, *[newest] * lost)
        assert not log.path.with_name(log.path.name + STAGED).exists()
    # Nobody knows of more.
    log.restore(copy)


def test_a_copy_that_the_write_ahead_file_does_not_reach_down_to_is_refused(log: Log) -> None:
    log.grow()
    copy = log.copy()
    log.trail.close()
    (log.path / CHECKPOINT_PATH).unlink()
    wal = log.path / WAL_FOLDER
    for first in segments(SHARED_FILES, wal):
        (wal / segment_name(first)).rename(wal / segment_name(512))
    with pytest.raises(RolledBackError, match="begins at leaf 512"):
        log.restore(copy)


def test_another_history_another_log_and_what_is_no_copy_are_refused(log: Log, tmp_path: Path) -> None:
    log.grow(3)
    copy = log.copy()
    with pytest.raises(RequestError, match="open in another process"):
        log.restore(copy)
    with pytest.raises(RequestError, match="no copy"):
        restore_log(Folder(log.path), tmp_path / "new", trust())
    with pytest.raises(RequestError, match="no checkpoint"):
        restore_log(Folder(tmp_path / "nothing"), tmp_path / "new", trust())
    with pytest.raises(RequestError, match="is the place of the log other"):
        restore_log(copy, tmp_path / "new", trust(), origin="other")
    fork = Log(tmp_path / "fork")
    fork.put([Link().deny()])
    note = fork.grow()
    fork.trail.close()
    with pytest.raises(RolledBackError, match="another history"):
        restore_log(copy, fork.path, trust())
    with pytest.raises(RolledBackError, match="another history"):
        restore_log(copy, tmp_path / "new", trust(), [note])
    strange = Log(tmp_path / "strange", log_signer("us-east.acme/audit"))
    strange.trail.publish()
    strange.trail.close()
    with pytest.raises(RequestError, match="is the place of the log"):
        restore_log(copy, strange.path, trust())
    log.trail.close()
    (log.path / COPIED_PATH).write_bytes(b"")
    with pytest.raises(RequestError, match="several brokers"):
        log.restore(copy)


class Served:
    """A copy whose server gives another checkpoint at the second reading."""

    def __init__(self, files: Folder, checkpoints: list[bytes]) -> None:
        self._files, self._checkpoints = files, checkpoints

    def read(self, path: str) -> bytes | None:
        if path != CHECKPOINT_PATH:
            return self._files.read(path)
        return self._checkpoints.pop(0) if len(self._checkpoints) > 1 else self._checkpoints[0]

    def names(self, folder: str) -> list[str]:
        return self._files.names(folder)


def test_what_was_asked_of_the_copy_is_what_is_put_in_place(log: Log) -> None:
    """Another checkpoint than the one that was held to what was signed before: an older one, and that of no leaves first."""
    none = (log.path / "checkpoint").read_bytes()
    older = log.grow(3)
    first = Folder(log.path.with_name("first"))
    copy_log(Folder(log.path), first, trust())
    newer = log.grow(3)
    second = log.copy("second")
    log.trail.close()
    shutil.rmtree(log.path)
    for files, checkpoints in ((first, [newer, older]), (second, [none, newer])):
        with pytest.raises(RequestError, match="changed while it was read"):
            restore_log(Served(files, checkpoints), log.path, trust(), origin=EGRESS_ORIGIN)
        assert not log.path.with_name(log.path.name + STAGED).exists()
        assert Folder(log.path).read(CHECKPOINT_PATH) is None


def test_what_was_changed_in_a_copy_is_not_put_in_place(log: Log) -> None:
    log.grow(2)
    copy = log.copy()
    log.trail.close()
    bundle = next(each for each in (copy.path / "tile" / "entries").rglob("*") if each.is_file())
    data = bundle.read_bytes()
    bundle.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    was = (log.path / CHECKPOINT_PATH).read_bytes()
    with pytest.raises(CorruptionError):
        log.restore(copy)
    assert (log.path / CHECKPOINT_PATH).read_bytes() == was
    log.goes_on()


@pytest.mark.parametrize("damage", ["not a note\n", "{origin}\n999\nAAAA\n\nx\n"])
def test_a_damaged_checkpoint_that_stands_there_says_nothing_unless_it_claims_more(
    log: Log, damage: str
) -> None:
    log.grow(2)
    copy = log.copy()
    log.trail.close()
    (log.path / CHECKPOINT_PATH).write_text(damage.format(origin=EGRESS_ORIGIN))
    if "999" in damage:
        with pytest.raises(RolledBackError, match="says 999 leaves"):
            log.restore(copy)
    else:
        log.restore(copy)
        log.goes_on()


def test_documents_that_the_copy_lacks_come_from_what_stood_there(log: Log) -> None:
    document = b"d" * (DOCUMENT_BYTES_MAX + 1)
    path = document_path(sha256(document).digest())
    header = Link().agreement()[0].header
    log.put([Leaf(msgspec.structs.replace(header, document=b"", document_sha256=sha256(document).digest()))])
    log.grow()
    log.trail.close()
    copy = log.copy()
    Folder(log.path).write(path, document)
    assert log.restore(copy).missing == 0
    assert Folder(log.path).read(path) == document
    assert not (log.path / LACKING_PATH).exists()


class Failing(DiskFiles):
    """Ends with the n-th change of a name or of a folder, and does nothing any more."""

    def __init__(self, at: int) -> None:
        super().__init__(0o666, 0o777)
        self._left = at

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        self._count()
        super().sync_folder(folder)

    def remove_folder(self, folder: Path) -> None:
        self._count()
        super().remove_folder(folder)


def test_broken_off_anywhere_it_is_whole_when_it_is_called_again(log: Log, tmp_path: Path) -> None:
    log.grow(2)
    copy = log.copy()
    size = note_size(log.trail.checkpoint())
    log.tear()
    kept, aside = tmp_path / "kept", log.path.with_name(log.path.name + REPLACED)
    shutil.copytree(log.path, kept)
    for at in range(100):
        try:
            log.restore(copy, files=Failing(at))
            ended = True
        except KeyboardInterrupt:
            ended = False
            if not (aside.exists() and (log.path / CHECKPOINT_PATH).exists()):
                log.restore(copy)
        log.open()
        assert log.trail.status().durable == size + 1
        log.trail.close()
        for each in kept.rglob("*"):
            if each.is_file() and each.name != LOCK_NAME:
                assert (aside / each.relative_to(kept)).read_bytes() == each.read_bytes()
        shutil.rmtree(log.path)
        shutil.rmtree(aside)
        shutil.copytree(kept, log.path)
        if ended:
            break
    assert 10 < at < 99
