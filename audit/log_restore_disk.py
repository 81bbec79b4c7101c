"""Putting a copy of a log in the log's place, so that its owner goes on with it: after a lost or damaged disk. Blocks.

Invariants:

- what is put there is a copy that `audit.log_copy_disk` makes anew beside the place: nothing of it that was not held to a checkpoint which the log signed;
- it continues whatever is known to have been signed: what witnesses remember, and the signed notes in the folder that stands there. A shorter log, or one of
  another history, takes nobody's place;
- leaves that the folder's write-ahead file has behind the copy's end were durable, and something may have crossed by them: they come along, or nothing is done;
- while it lasts the log is open in no other process;
- what stands there is moved aside, and never changed. Broken off at any point, it goes on when it is called again.

Callers: cli.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from audit.checkpoint import Checkpoint, claimed_size, notes_of
from audit.cosigned_notes import COSIGNED_PATHS, notes_at
from audit.document_leaf import DOCUMENTS_FOLDER
from audit.errors import RolledBackError
from audit.log_copy_disk import LACKING_PATH, copy_log
from audit.merkle import EMPTY_ROOT, root_from_nodes
from audit.note import signs_from
from audit.tile import CHECKPOINT_PATH, COPIED_PATH, WAL_FOLDER, Files, TileHashes, read_entries
from audit.tile_disk import Folder
from audit.trust import LogTrust, Trust
from audit.wal_disk import Recovery, encode_append, segment_name
from felix.errors import Code, CorruptionError, RequestError, TamperError
from felix.storage import port
from felix.storage.disk import LOCK_NAME, SHARED_FILES
from felix.storage.port import write_all

STAGED: Final = ".restoring"
REPLACED: Final = ".replaced"
"""Behind the folder's name: where the copy is made, and where what stood there is moved to."""


class Restored(NamedTuple):
    """What the folder has now."""

    origin: str
    size: int
    """leaves under its checkpoint"""
    carried: int
    """further leaves, of the write-ahead file that stood there"""
    missing: int
    """documents that neither the copy nor what stood there has"""
    replaced: Path | None
    """where what stood there is now"""


def restore_log(
    source: Files,
    path: Path,
    trust: Trust,
    remembered: Iterable[bytes] = (),
    progress: Callable[[int, int], None] = lambda _, __: None,
    files: port.Files = SHARED_FILES,
    *,
    origin: str = "",
) -> Restored:
    """Put the copy at `source` in the place `path`, as the log that its owner opens and goes on with. `remembered`: notes that witnesses have; those of other logs are left aside.
    `origin`: which log has its place there, where that is known. `progress(leaves, of)`.

    Raises RequestError where `source` is no copy of this log or is changed meanwhile, the log is open, or brokers copy it; RolledBackError where more, or something else, was signed
    before; TamperError for what does not hold; CorruptionError for a write-ahead file that cannot be read. Nothing is changed at `path` then.
    """
    data = source.read(CHECKPOINT_PATH)
    if data is None or source.names(WAL_FOLDER):
        raise RequestError(
            "There is no copy of an audit log: it has no checkpoint."
            if data is None
            else "This is a log that is written, and no copy.",
            code=Code.NOT_FOUND if data is None else Code.CONFLICT,
            hint="Name a folder that `felix audit copy` wrote.",
        )
    log = trust.log_of(data)
    checkpoint = log.open(data).checkpoint
    if origin and origin != log.name:
        raise _another(path, origin, log)
    if path.is_mount():
        raise _mounted(path)
    before = [log.open_kept(note).checkpoint for note in notes_of(remembered, log.name)]
    lock = Folder(path, files).lock(hint="Stop the broker, or the bridge, that writes it.")
    try:
        standing = _standing(path, files)
        if standing is not None:
            before += _signed_there(standing, log, checkpoint.size)
        # The copy's own tiles say so, which nothing holds to its root yet: enough to refuse before anything is copied.
        _require_continues(source, before, checkpoint)
        staged = Folder(path.with_name(path.name + STAGED), files)
        files.remove_folder(staged.path)
        try:
            made = copy_log(source if standing is None else _With(source, standing), staged, trust, progress)
            if staged.read(CHECKPOINT_PATH) != data:
                raise RequestError(
                    f"The copy of {log.name} was changed while it was read: it has another checkpoint than at first.",
                    code=Code.CONFLICT,
                    hint="Wait until nobody copies into it any more, and restore again.",
                )
            _require_continues(staged, before, checkpoint)
            carried = _write_wal(staged, standing, checkpoint.size)
            _require_reaches_keys(log, made.size + carried)
            staged.remove(LACKING_PATH)
            staged.flush()
        except BaseException:
            files.remove_folder(staged.path)
            raise
        replaced = _replace(path, staged.path, standing, files)
        return Restored(log.name, made.size, carried, made.missing, replaced)
    finally:
        lock.release()


def _require_reaches_keys(log: LogTrust, size: int) -> None:
    """What is put in the log's place is signed by its keys of now, and they sign nothing of fewer leaves than where they begin."""
    begin = signs_from(log.keys)
    if size < begin:
        raise RolledBackError(
            f"The log {log.name} would have {size:,} leaves, and its keys were changed at {begin:,}: the copy is of before that.",
            hint="Bring a later copy.",
        )


class _With:
    """A copy, and beside it the documents of the folder that stands there, which are held to their hashes as the copy's are."""

    def __init__(self, source: Files, standing: Folder) -> None:
        self._source, self._standing = source, standing

    def read(self, path: str) -> bytes | None:
        data = self._source.read(path)
        if data is None and path.startswith(f"{DOCUMENTS_FOLDER}/"):
            with suppress(TamperError):
                data = self._standing.read(path)
        return data

    def names(self, folder: str) -> list[str]:
        return self._source.names(folder)


def _standing(path: Path, files: port.Files) -> Folder | None:
    """What is to be replaced: what is at `path`, or what a call that was broken off has moved aside; None where there is neither."""
    here, aside = Folder(path, files), Folder(path.with_name(path.name + REPLACED), files)
    is_here, is_aside = any(name != LOCK_NAME for name in here.names("")), files.exists(aside.path)
    if is_here and is_aside:
        raise RequestError(
            f"{aside.path} is there, from an earlier restore.",
            code=Code.CONFLICT,
            hint="Move it elsewhere, and keep it until the log's copies verify.",
        )
    standing = here if is_here else aside if is_aside else None
    if standing is not None and standing.read(COPIED_PATH) is not None:
        raise RequestError(
            f"The audit log {path} is one of several brokers' copies, and is not written here alone.",
            code=Code.CONFLICT,
            hint="Move the folder aside and start the broker: the leaves come from the other brokers.",
        )
    return standing


def _signed_there(standing: Folder, log: LogTrust, size: int) -> list[Checkpoint]:
    """What the log signed, as far as the folder has it. What does not read says nothing, unless it claims more leaves than the copy has."""
    found = list[Checkpoint]()
    for path in (CHECKPOINT_PATH, *COSIGNED_PATHS):
        notes = list[bytes]()
        with suppress(TamperError):
            notes += notes_at(path, standing.read(path) or b"").values()
        for note in filter(None, notes):
            try:
                found.append(log.open_kept(note).checkpoint)
            except TamperError:
                name = note.partition(b"\n")[0].decode(errors="replace")
                if claimed_size(note) and name != log.name:
                    raise _another(standing.path, name, log) from None
                if claimed_size(note) > size:
                    raise RolledBackError(
                        f"{standing.path / path} says {claimed_size(note)} leaves, and the copy has {size}.",
                        hint="Its signature does not hold. If the file is damaged, move the folder aside, and restore again.",
                    ) from None
    return found


def _mounted(path: Path) -> RequestError:
    return RequestError(
        f"A disk is mounted at {path}, so no other folder can take its place.",
        code=Code.CONFLICT,
        hint=f"Copy what is on it to a folder elsewhere (cp -a), restore into that one, and put what is then in it on the disk, in place of what is there: {path} has to have all of it, and nothing else.",
    )


def _another(path: Path, name: str, log: LogTrust) -> RequestError:
    return RequestError(
        f"{path} is the place of the log {name[:200]}, and this is a copy of {log.name}.",
        code=Code.CONFLICT,
        hint="Name the folder of that log.",
    )


def _require_continues(files: Files, before: Iterable[Checkpoint], now: Checkpoint) -> None:
    """Raises RolledBackError where the tree of `now`, whose tiles these are, does not continue one of these."""
    for each in before:
        if each.size > now.size:
            raise RolledBackError(
                f"The copy of {now.origin} has {now.size} leaves, and {each.size} were signed before.",
                hint="Look for a newer copy: a shorter log is never accepted.",
            )
        root = root_from_nodes(each.size, TileHashes(files, now.size)) if each.size else EMPTY_ROOT
        if root != each.root:
            raise RolledBackError(
                f"The copy of {now.origin} is of another history: its first {each.size} leaves are not those that were signed before.",
                hint="Keep both, with the checkpoint that says so: the log has signed two histories.",
            )


def _write_wal(staged: Folder, standing: Folder | None, size: int) -> int:
    """The write-ahead file from the checkpoint on. Returns how many leaves it has: those of the folder that stands there, behind the copy's end."""
    data = b"" if standing is None else b"".join(_behind(standing, staged, size))
    storage, folder = staged.storage, staged.path / WAL_FOLDER
    storage.make_folder(folder)
    descriptor = storage.open(folder / segment_name(size), os.O_WRONLY | os.O_CREAT)
    try:
        write_all(storage, descriptor, (data,), 0)
        storage.sync(descriptor)
    finally:
        storage.close(descriptor)
    storage.sync_folder(folder)
    storage.sync_folder(staged.path)
    recovery = Recovery(folder, size, storage)
    return sum(1 for _ in recovery)


def _behind(standing: Folder, staged: Folder, size: int) -> list[bytes]:
    """The records of the leaves that the folder's write-ahead file has behind the copy's end. Raises RolledBackError where it does not fit the copy."""
    recovery = Recovery(standing.path / WAL_FOLDER, size, standing.storage)
    first, found, below = recovery.size, list[bytes](), dict[int, bytes]()
    if first > size:
        raise RolledBackError(
            f"The write-ahead file in {standing.path} begins at leaf {first}, and the copy has {size} leaves: {first} were signed before.",
            hint="Look for a newer copy: a shorter log is never accepted.",
        )
    try:
        for number, leaf in recovery:
            if number >= size:
                found.append(encode_append([leaf], number, size))
            else:
                below[number] = leaf
    except CorruptionError as error:
        raise CorruptionError(
            f"The write-ahead file in {standing.path} is damaged, and may have leaves behind the copy's {size}. {error.sentence}",
            hint="Look for a newer copy. If there is none, move the folder aside and restore again: what crossed by those leaves the other regions' logs have.",
        ) from error
    for number, entry in read_entries(staged, first, size, size) if found else ():
        if below[number] != entry:
            raise RolledBackError(
                f"Leaf {number} in the write-ahead file in {standing.path} is not the one in the copy.",
                hint="Keep both: the log has two histories, or one of them is damaged.",
            )
    return found


def _replace(path: Path, staged: Path, standing: Folder | None, files: port.Files) -> Path | None:
    """Put it in place, durably; its bytes and names are. Returns where what stood there is."""
    aside = None if standing is None else path.with_name(path.name + REPLACED)
    try:
        if standing is not None and standing.path == path:
            assert aside is not None
            files.rename(path, aside)
        else:
            # Our lock alone.
            files.remove_folder(path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        # A folder of the same disk, mounted there.
        files.remove_folder(staged)
        raise _mounted(path) from error
    try:
        files.rename(staged, path)
    except OSError as error:
        raise RequestError(
            f"{path} was made anew by another process while the copy was put there: {error.strerror or error}.",
            code=Code.CONFLICT,
            hint="Stop the broker, or the bridge, that did, move its folder aside, and restore again.",
        ) from error
    files.sync_folder(path.parent)
    return aside
