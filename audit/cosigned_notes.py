"""Notes of a log that others cosigned: where they lie, and which of them a copy keeps. Pure over a `Files` port.

A log keeps those that say of their cosigners what no larger one does (audit.kept_notes), the newest and the one with the most cosigners in files of
their own (`COSIGNED_PATH`, `WITNESSED_PATH`). A copy keeps more: whoever serves a log chooses what it shows, and would rather have it
forgotten who cosigned it up to where. Invariants of what `choose` gives:

- of each note that goes in, what it says stands in one that comes out: of no smaller tree, with all of its cosignatures that hold;
- that goes for who cosigned; what a note says of the tree is held to it before (`stated`), or a note of another history would go unseen;
- so it is for lines of keys that are not known here, as far as a line of the same key stands for it. Such notes are let go first where there are
  more than KEPT_MAX, the smallest first, and are named;
- then those that say nothing more of who cosigned, as parties: a party that cosigns with ever other keys makes room of its own. Then as
  audit.kept_notes says, and these are named, too.

Callers: audit.log_copy_disk, audit.verify, audit.proof, audit.spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from audit.checkpoint import Checkpoint
from audit.kept_notes import Cosigned, Cosigner, least
from audit.note import check_note, encode_note
from audit.tile import COSIGNED_PATH, KEPT_MAX, KEPT_PATH, WITNESSED_PATH, Files
from audit.trust import LogTrust
from felix.errors import Code, RequestError, TamperError

COSIGNED_PATHS: Final = (COSIGNED_PATH, WITNESSED_PATH, KEPT_PATH)
"""In the order in which they are read: the newest note before those that it replaces."""


def notes_at(path: str, data: bytes) -> dict[str, bytes]:
    """The notes of the file at this path, by what to call them. Raises TamperError where it is no list of notes."""
    if path != KEPT_PATH:
        return {path: data}
    # A checkpoint's text has no empty line; so texts and signatures take turns.
    pieces = data.removesuffix(b"\n").split(b"\n\n")
    if len(pieces) % 2 or len(pieces) > 2 * KEPT_MAX:
        raise TamperError(f"It is no list of {KEPT_MAX} signed notes at most.")
    return {
        f"{path}, note {at // 2 + 1}": b"%s\n\n%s\n" % (pieces[at], pieces[at + 1])
        for at in range(0, len(pieces), 2)
    }


def readable_notes(files: Files, paths: Iterable[str]) -> Iterator[bytes]:
    """The notes at these paths. A list of notes that is none says nothing: whoever opens the log says so. Raises TamperError as `Files.read`."""
    for path in paths:
        data = files.read(path)
        if data is not None:
            with suppress(TamperError):
                yield from notes_at(path, data).values()


_KeyId = tuple[str, bytes]


class _Weighed(NamedTuple):
    size: int
    known: int
    """cosigners that count"""
    keys: frozenset[_KeyId]
    """that cosigned it, or are said to have, and those of the log that signed it"""
    unknown: frozenset[_KeyId]
    """those among them that are not known here"""
    by: frozenset[Cosigner]
    """who cosigned it, of those that are known, and with what the log signed it"""
    is_cosigned: bool
    """by anybody, as far as its lines say"""
    note: bytes


class Chosen(NamedTuple):
    """What a copy is to have: each note once."""

    newest: bytes
    most: bytes
    """the one with the most cosigners that count; may be the newest"""
    others: tuple[bytes, ...]
    unverified: frozenset[str]
    """names of keys that are not known here, whose lines stand on them"""
    let_go: frozenset[str]
    """names of keys of whose lines some were let go that no note of no fewer leaves has"""


def choose(log: LogTrust, own: Iterable[bytes], served: Iterable[bytes]) -> Chosen | None:
    """Of a copy's own notes, and of those that the log serves; None where nobody cosigned any. `log.witnesses`: every key that is known. A line that
    does not hold is left out. Raises TamperError where a served note is not the log's, RequestError where so many parties cosigned that there is no
    room for the newest note of each."""
    found = [weighed for note in own if (weighed := _weigh_own(log, note)) is not None]
    found += [_weigh(log, note) for note in served]
    # Of equals the first: the copy's own.
    found.sort(key=lambda each: (each.size, len(each.keys)), reverse=True)
    kept = list[_Weighed]()
    for each in found:
        if each.is_cosigned and not any(each.keys <= other.keys for other in kept):
            kept.append(each)
    if not kept:
        return None
    newest = max(kept, key=lambda each: (each.known > 0, each.size))
    most = max(kept, key=lambda each: (each.known, each.size))
    others = [each for each in kept if each is not newest and each is not most]
    let_go = set[str]()
    while len(kept) > KEPT_MAX:
        smallest = _goes_first(others, kept)
        if smallest is None:
            raise RequestError(
                f"More than {KEPT_MAX} cosigned checkpoints of {log.name} each say what no other does.",
                code=Code.LIMIT_MEMORY,
                hint="Copy into another folder, and keep this copy.",
            )
        others.remove(smallest)
        kept.remove(smallest)
        let_go |= {name for name, _ in smallest.unknown}
        if not _is_said(smallest, kept):
            let_go |= {name for name, _ in smallest.keys if name != log.name}
    unverified = {name for each in kept for name, _ in each.unknown}
    return Chosen(
        newest.note,
        most.note,
        tuple(each.note for each in others),
        frozenset(unverified),
        frozenset(let_go),
    )


def stated(log: LogTrust, own: Iterable[bytes], served: Iterable[bytes]) -> frozenset[Checkpoint]:
    """What a copy's own notes and those that the log serves say of its tree, whoever cosigned them: each as `choose` takes it, and it raises as that does.
    A log of one history has all of them as its beginnings. Raises TamperError, too, for an own note of this log that does not hold under the keys
    that are trusted now: left out, it would be lost."""
    found = []
    for note in own:
        if (weighed := _weigh_own(log, note)) is not None:
            found.append(weighed.note)
        elif note.startswith(log.name.encode() + b"\n"):
            raise TamperError(
                "A note of the copy is not signed by any key that the bundle names for its log now, and was when it was copied.",
                hint="Keep this copy with the bundle of then, and copy into another folder.",
            )
    return frozenset(log.open(note).checkpoint for note in (*found, *served))


def join(notes: Iterable[bytes]) -> bytes:
    """As `notes_at` reads them from KEPT_PATH."""
    return b"\n".join(notes)


def _goes_first(others: Sequence[_Weighed], kept: Sequence[_Weighed]) -> _Weighed | None:
    """Of `others`, the largest first, the one that costs least."""
    for says_nothing in (_has_lines_elsewhere, _is_said):
        found = next((each for each in reversed(others) if says_nothing(each, kept)), None)
        if found is not None:
            return found
    among = [Cosigned(each.size, each.by, each) for each in kept]
    smallest = least(among)
    return None if smallest is None or smallest.note not in others else smallest.note


def _has_lines_elsewhere(each: _Weighed, kept: Iterable[_Weighed]) -> bool:
    """Whether all of its lines that hold stand on a note of no smaller tree."""
    keys = each.keys - each.unknown
    return any(other is not each and other.size >= each.size and keys <= other.keys for other in kept)


def _is_said(each: _Weighed, kept: Iterable[_Weighed]) -> bool:
    """Whether all who cosigned it have cosigned one of no smaller tree, with keys of the same algorithms."""
    return any(other is not each and other.size >= each.size and each.by <= other.by for other in kept)


def _weigh(log: LogTrust, data: bytes) -> _Weighed:
    """Without the lines that do not hold. Raises TamperError where the note is not the log's."""
    opened = log.open(data)
    broken = check_note(opened.note, log.witnesses).broken
    if broken:
        lines_held = tuple(line for line in opened.note.signatures if line not in broken)
        data = encode_note(opened.note._replace(signatures=lines_held))
    known = {(key.name, key.key_id) for key in log.witnesses}
    lines = {(line.name, line.key_id) for line in opened.note.signatures if line.name != log.name}
    # A line of a known key that says no time is no cosignature.
    unknown, held = lines - known, {(by.key.name, by.key.key_id) for by in opened.cosigned}
    # Whoever serves it chooses which lines of the log stand there, too.
    own = {(by.key.name, by.key.key_id) for by in opened.signed}
    return _Weighed(
        opened.checkpoint.size,
        len(log.cosigners(opened.cosigned)),
        frozenset(held | unknown | own),
        frozenset(unknown),
        frozenset((log.witnesses[by.key], by.key.algorithm) for by in opened.cosigned)
        | {("", by.key.algorithm) for by in opened.signed},
        bool(held or unknown),
        data,
    )


def _weigh_own(log: LogTrust, data: bytes) -> _Weighed | None:
    """None where it is not the log's."""
    try:
        return _weigh(log, data)
    except TamperError:
        return None
