"""Checkpoints: what a log says about itself, signed. Pure. Source: https://c2sp.org/tlog-checkpoint.

A checkpoint is a signed note of origin, size and root hash. The log signs with keys named as its origin, Ed25519 and
ML-DSA-44 side by side; witnesses add cosignatures. Invariants: `Checkpoint.parse(c.text()) == c`; what `open_checkpoint`
gave has no extension line: no log of Felix writes any, an ML-DSA-44 signature does not cover them, and whoever keeps
the checkpoints of others must not keep a text that they chose. Callers: audit.trail, audit.witness, audit.verify,
audit.proof.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from audit.merkle import EMPTY_ROOT
from audit.note import Note, Verified, VerifierKey, broken_line, check_note, parse_note
from audit.tree_head import TreeHead, parse_tree_head
from felix.errors import TamperError

LogKey = VerifierKey | tuple[VerifierKey, ...]
"""What a log's checkpoints verify under: one key, or several of one name (an Ed25519 and an ML-DSA-44 one; one that is
being changed). Any of them will do; who demands a certain one gives that one alone."""


def keys_of(log_key: LogKey) -> tuple[VerifierKey, ...]:
    """The log's keys, one or more, all of one name."""
    keys = (log_key,) if isinstance(log_key, VerifierKey) else log_key
    assert keys and len({key.name for key in keys}) == 1
    return keys


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tree of the log `origin` at `size` leaves has this root."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def text(self) -> str:
        """The note's text, with its last newline."""
        return TreeHead(self.origin, self.size, self.root, self.extensions).text()

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """Read a note's text. Raises TamperError where it is not a checkpoint, or one of no leaves with another root than theirs."""
        checkpoint = cls(*parse_tree_head(text))
        if not checkpoint.size and checkpoint.root != EMPTY_ROOT:
            raise TamperError(
                f"The checkpoint of {checkpoint.origin[:200]} has no leaves, and a root that is not theirs."
            )
        return checkpoint


class SignedCheckpoint(NamedTuple):
    """A checkpoint that its log signed, its note as it came, and whose signatures hold."""

    checkpoint: Checkpoint
    note: Note
    cosigned: tuple[Verified, ...]
    """witnesses"""
    signed: tuple[Verified, ...] = ()
    """keys of the log"""
    broken: tuple[str, ...] = ()
    """names of known witnesses under which a line stands that does not hold: no cosignature, and nothing else. Whoever brings a note
    can write such lines, and a witness makes them of good ones by changing its keys"""
    seen_by: tuple[str, ...] = ()
    """regions whose own witnesses cosigned it, whether or not they count among those that are asked for (audit.trust.LogTrust.open)"""

    def known_note(self) -> Note:
        """The note with the lines that were verified and no others: what strangers appended is not kept."""
        known = {by.line for by in (*self.signed, *self.cosigned)}
        return Note(self.note.text, tuple(line for line in self.note.signatures if line in known))

    def told(self) -> str:
        """That lines do not hold, as a sentence for a person; empty where all do."""
        if not self.broken:
            return ""
        return f"Not a cosignature, since it does not hold: a line of {', '.join(self.broken)}."


def open_checkpoint(data: bytes, log_key: LogKey, witnesses: Iterable[VerifierKey] = ()) -> SignedCheckpoint:
    """Read and verify a checkpoint note: signed by the log, its origin the name of the log's key.

    A cosignature that does not hold is none, as if its witness were unknown (`SignedCheckpoint.broken`): no witness decides whether
    another's log opens. A bad line of any of the log's own keys refuses the note. Each line is tried with all keys of its name and id.
    A key of the log counts for checkpoints of the sizes that it covers, and for one of no leaves, with which every new copy begins, whichever key signs the log by then. An ML-DSA-44 line without a time is no cosignature: it does
    not say when. Raises TamperError.
    """
    keys = keys_of(log_key)
    note = parse_note(data)
    witnesses = tuple(witnesses)
    checked = check_note(note, (*keys, *witnesses))
    own = {(key.name, key.key_id) for key in keys}
    for line in checked.broken:
        if (line.name, line.key_id) in own:
            raise broken_line(line)
    if not checked.verified:
        names = ", ".join(sorted({key.name for key in (*keys, *witnesses)}))
        raise TamperError(f"The note carries no signature of a known key ({names} is known).")
    checkpoint = Checkpoint.parse(note.text)
    if checkpoint.origin != keys[0].name:
        raise TamperError(
            f"The checkpoint is of the log {checkpoint.origin[:200]!r}, expected {keys[0].name!r}."
        )
    ours = tuple(by for by in checked.verified if by.key in keys)
    signed = tuple(by for by in ours if not checkpoint.size or by.key.covers(checkpoint.size))
    if ours and not signed:
        raise TamperError(
            f"The checkpoint of {checkpoint.origin} has {checkpoint.size} leaves, which the key that signed it may not sign: "
            f"{_span(ours[0].key)}.",
            hint="The log's keys were changed. Whoever has the one before signs nothing behind its end, and the new one nothing before.",
        )
    if not signed:
        raise TamperError(f"The checkpoint of {checkpoint.origin} is not signed by the log's own key.")
    if checkpoint.extensions:
        raise TamperError(
            f"The checkpoint of {checkpoint.origin} has {len(checkpoint.extensions)} extension lines, which are not taken.",
            hint="Felix's logs have none; a log that writes them can say anything there.",
        )
    cosigned = tuple(by for by in checked.verified if by.key not in keys and by.time_s)
    broken = tuple(sorted({line.name for line in checked.broken}))
    return SignedCheckpoint(checkpoint, note, cosigned, signed, broken)


def _span(key: VerifierKey) -> str:
    end = "on" if key.to_size is None else f"to {key.to_size}"
    return f"it signs from {key.from_size} leaves {end}"


def note_size(note: bytes) -> int:
    """The size in a checkpoint note's second line, without verifying it: of a log's own, which was when it was made."""
    return int(note.split(b"\n", 2)[1])


def claimed_size(data: bytes) -> int:
    """As `note_size`, of bytes that may be no note; 0 where they are none."""
    try:
        return note_size(data)
    except (ValueError, IndexError):
        return 0


def notes_of(notes: Iterable[bytes], origin: str) -> tuple[bytes, ...]:
    """Those of these notes that are checkpoints of this log. Whoever knows which log it is says so once the log is open: asked before, who serves it could name another."""
    return tuple(note for note in notes if origin_of(note) == origin)


def origin_of(note: bytes) -> str:
    """Which log's checkpoint this says that it is; empty if it is no note."""
    try:
        return parse_note(note).text.partition("\n")[0]
    except TamperError:
        return ""
