"""The checkpoints of one open log: the newest, those that witnesses have cosigned, and the one that witnesses are shown; signing them.

Invariants:
- a checkpoint is durable before anybody is shown it;
- what is added was signed by the log and cosigned by a known witness, and the log continues it; lines under unknown names are not kept;
- no newer checkpoint costs the cosignatures that one before it has collected: of those that are cosigned each is kept that says of its cosigners, as
  parties, what no larger one does (audit.kept_notes), in whatever order they come;
- whoever brings a note chooses its lines, the log's own as well: these are put back before it is kept, and one that lacks any that cannot be given any more takes
  no place of others;
- a party's lines take PARTY_LINES_MAX and PARTY_BYTES_MAX of a note at most, so nobody crowds the others out;
- what says nothing new is not written.

Callers: audit.trail and audit.opening. What reads or writes files blocks, from any thread:
`begin`, `write`, `add_cosigned`, `take_cosigned`, `with_cosigned`, `check_continues` and `consistency_proof`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

from audit.checkpoint import Checkpoint, SignedCheckpoint, claimed_size, open_checkpoint
from audit.cosigned_notes import join, notes_at
from audit.errors import VERIFY_HINT, RolledBackError
from audit.kept_notes import Cosigned, Cosigner, keep, parties, party_of
from audit.merkle import EMPTY_ROOT, consistency_proof, root_from_nodes
from audit.note import (
    Note,
    NoteSigner,
    Signature,
    VerifierKey,
    encode_note,
    encode_signatures,
    parse_note,
    signs_from,
)
from audit.tile import CHECKPOINT_PATH, COSIGNED_PATH, KEPT_MAX, KEPT_PATH, WITNESSED_PATH, TileHashes
from audit.tile_disk import Folder
from felix.errors import Code, FelixError, RequestError, TamperError
from felix.runtime.port import Clock

log = logging.getLogger("felix.audit.checkpoint_disk")

ROUND_MS: Final = 5_000
"""How long all witnesses are shown the same checkpoint, so that one note collects their cosignatures; a bridge asks
every 3 s. Once all that are expected have cosigned, the next one may follow at once."""
PARTY_LINES_MAX: Final = 4
PARTY_BYTES_MAX: Final = 8 << 10
"""Of one party's cosignatures on one note: two keys of each algorithm, an ML-DSA-44 line having 3,300 bytes and its name. Of the 64 lines and
128 KiB of a note (audit.note) there is room for 15 parties that take all of it, and for some 30 with a key of each algorithm."""


class LogKeys(NamedTuple):
    """The keys of a log, all of one name: its origin."""

    signers: tuple[NoteSigner, ...]
    """every one signs each checkpoint"""
    earlier: tuple[VerifierKey, ...] = ()
    """signed before these, each up to its size"""

    @property
    def key(self) -> VerifierKey:
        """A key under which checkpoints verify that are signed now."""
        return self.signers[0].key

    @property
    def signing(self) -> tuple[VerifierKey, ...]:
        """Every key that signs checkpoints now."""
        return tuple(signer.key for signer in self.signers)

    @property
    def known(self) -> tuple[VerifierKey, ...]:
        """Every key under which a checkpoint may verify."""
        return (*self.signing, *self.earlier)


class KeptCheckpoints(NamedTuple):
    """What a log's folder has of checkpoints."""

    newest: SignedCheckpoint
    cosigned: SignedCheckpoint | None
    """the newest that a witness has cosigned"""
    witnessed: SignedCheckpoint | None
    """of the others that are kept, the one with the most cosigners"""


class _Said(NamedTuple):
    size: int
    by: frozenset[Cosigner]
    note: Note
    is_whole: bool


class CheckpointFiles:
    """The checkpoints of one open log. Sizes in leaves."""

    def __init__(
        self,
        keys: LogKeys,
        witnesses: tuple[VerifierKey, ...],
        folder: Folder,
        kept: KeptCheckpoints,
        clock: Clock,
    ) -> None:
        self.witnesses = witnesses
        self._known_keys, self._signers = keys.known, keys.signers
        self._ended = tuple(key for key in keys.earlier if key.to_size is not None)
        self._signs_from = signs_from(self._ended)
        self._clock = clock
        self._cosigners_expected = 1
        self._is_stale = False
        self._lock = threading.Lock()
        # Held while files are written; the one above only for the values.
        self._files_lock = threading.Lock()
        self.begin(folder, kept)

    def begin(self, folder: Folder, kept: KeptCheckpoints) -> None:
        """Go on from what the folder has. Blocks. Raises TamperError, RolledBackError where what is kept besides does not fit the log."""
        with self._files_lock:
            # The publisher writes tiles meanwhile: which names are not durable yet, each knows of its own.
            own = folder.beside()
            written = {path: own.read(path) for path in (COSIGNED_PATH, WITNESSED_PATH, KEPT_PATH)}
            held = {each.note.text: each for each in (kept.witnessed, kept.cosigned) if each is not None}
            for note in notes_at(KEPT_PATH, data).values() if (data := written[KEPT_PATH]) else ():
                signed = self.read(note)
                check_continues(own, kept.newest.checkpoint, signed.checkpoint)
                same = held.get(signed.note.text)
                held[signed.note.text] = signed if same is None else self._merge(same, signed)
            with self._lock:
                self._folder, self._newest = own, kept.newest
                self._held = self._keep(held.values())
                # What stands in the files; what is not needed any more may stay there.
                self._written = written
                self._offered, self._offered_at = kept.newest, self._clock.monotonic() - ROUND_MS / 1000

    @property
    def newest(self) -> Checkpoint:
        """The newest that is durable."""
        return self._newest.checkpoint

    @property
    def cosigned_size(self) -> int:
        """Of the newest that a witness has cosigned; 0 where there is none."""
        held = self._held
        return held[0].checkpoint.size if held else 0

    def note(self) -> bytes:
        """The newest that is durable, a signed note."""
        return encode_note(self._newest.note)

    def write(self, signed: SignedCheckpoint) -> None:
        """Keep the log's newest checkpoint, and show it from then on."""
        with self._files_lock:
            self._folder.write(CHECKPOINT_PATH, encode_note(signed.note))
            self._folder.flush()
            with self._lock:
                self._newest = signed

    def sign_where_keys_meet(self) -> None:
        """Where the newest is the last of keys that have ended, have those that sign from there on sign it, too: a witness takes nothing else of a log whose keys were changed. Blocks."""
        newest = self._newest
        if self._ended and newest.checkpoint.size == self._signs_from:
            signed = self._with_own_lines(newest)
            if signed is not newest:
                self.write(signed)
                self.offer_newest()

    def expect_cosigners(self, number: int) -> None:
        """How many cosigners a checkpoint is shown to before the next one follows it (see `offer`)."""
        with self._lock:
            self._cosigners_expected = max(1, number)

    def offer(self, at_least: int = 0) -> bytes:
        """The checkpoint that witnesses are to cosign now: the same for all of them until the expected number of parties has, or
        ROUND_MS went by. Who says that it has cosigned `at_least` leaves already is shown the newest, where that has as many; for the
        others the round goes on, so that nobody ends it alone. Makes no checkpoint. With the log's own lines alone: others' are nothing to a witness."""
        with self._lock:
            offered, newest = self._offered, self._newest
            if offered.note.text != newest.note.text:
                held = self._of_text(offered.note.text)
                count = 0 if held is None else len(parties(self._cosigners(held)))
                over = (self._clock.monotonic() - self._offered_at) * 1000 >= ROUND_MS
                if over or count >= self._cosigners_expected:
                    self._offered, self._offered_at = newest, self._clock.monotonic()
            # A size that the log does not have is made up.
            is_ahead = self._offered.checkpoint.size < at_least <= newest.checkpoint.size
            shown = newest if is_ahead else self._offered
        return encode_note(shown.note.signed_by(shown.checkpoint.origin))

    def offer_newest(self) -> None:
        """Begin a new round with the newest."""
        with self._lock:
            self._offered, self._offered_at = self._newest, self._clock.monotonic()

    def with_kept_lines(self, data: bytes) -> bytes:
        """This checkpoint note of the log's own with the cosignatures that are kept of it: who brings some sees which are not there."""
        note = parse_note(data)
        with self._lock:
            held = self._of_text(note.text)
        return data if held is None else encode_note(note.with_signatures(by.line for by in held.cosigned))

    def is_cosigned_by(self, data: bytes, keys: Iterable[VerifierKey]) -> bool:
        """True where the log holds a cosignature of each of these keys for this checkpoint note of its own. Whoever brought one chose its lines, so
        one of a witness's keys does not say that the log has what the others signed."""
        asked = set(keys)
        return bool(asked) and not self._lacking(parse_note(data).text, asked)

    def lacking(self, data: bytes, keys: Iterable[VerifierKey]) -> tuple[VerifierKey, ...]:
        """Of these keys, those of which the log has no cosignature of this checkpoint note of its own; none where it has all of them on a larger one, for which
        this one need not be kept."""
        note, asked = parse_note(data), tuple(dict.fromkeys(keys))
        if self.size_cosigned_by(asked) > Checkpoint.parse(note.text).size:
            return ()
        lacking = self._lacking(note.text, asked)
        return tuple(key for key in asked if key in lacking)

    def size_cosigned_by(self, keys: Iterable[VerifierKey]) -> int:
        """Of the largest checkpoint on which each of these keys has a cosignature here; 0 where there is none, or no key."""
        asked = set(keys)
        sizes = (
            each.checkpoint.size for each in self.cosigned() if asked <= {by.key for by in each.cosigned}
        )
        return max(sizes, default=0) if asked else 0

    def _lacking(self, text: str, asked: Iterable[VerifierKey]) -> set[VerifierKey]:
        with self._lock:
            held = self._of_text(text)
        return set(asked).difference(() if held is None else (by.key for by in held.cosigned))

    def cosigned(self) -> tuple[SignedCheckpoint, ...]:
        """Those that are kept of what known witnesses cosigned, for whoever asks for a quorum: the newest first."""
        with self._lock:
            return self._known_now()

    def read_cosigned(self, data: bytes) -> SignedCheckpoint:
        """One of this log that a known witness cosigned, without the lines of others.

        Raises TamperError where a signature does not hold or no known witness signed.
        """
        added = self.read(data)
        if not added.cosigned:
            raise TamperError(
                f"That checkpoint carries no cosignature of a known witness. {added.told()}".strip()
            )
        # Lines under unknown names are whatever the sender chose: they are not kept.
        return added._replace(note=added.known_note())

    def with_cosigned(self, added: SignedCheckpoint, *, signs: bool = True) -> SignedCheckpoint | None:
        """What is to be kept of this checkpoint once what `read_cosigned` gave is added to what is kept; None where nothing is new. `signs`:
        lines of the log that are left out are put back. Raises RolledBackError where it is not a checkpoint of this log as it is. Blocks on disk, and on
        the log's keys."""
        with self._lock:
            held, newest = self._known_now(), self._newest
            same = self._of_text(added.note.text)
        self.check_continues(added.checkpoint)
        if same is None:
            # Whoever brings it may have left out lines of the log.
            own = newest if newest.note.text == added.note.text else added
            same = self.read(encode_note(own.note.signed_by(added.checkpoint.origin)))
        merged = self._merge(self._with_own_lines(same) if signs else same, added)
        if merged.note == same.note:
            return None
        others = [each for each in held if each.note.text != merged.note.text]
        return merged if any(each is merged for each in self._keep((*others, merged))) else None

    def add_cosigned(self, added: SignedCheckpoint, *, signs: bool = True) -> None:
        """Keep what `read_cosigned` gave. `signs`: as `with_cosigned`, and of those that are kept besides, too. Raises RolledBackError where it is not a
        checkpoint of this log as it is."""
        with self._files_lock:
            merged = self.with_cosigned(added, signs=signs)
            if merged is None:
                return
            with self._lock:
                newest = self._newest
                others = [each for each in self._known_now() if each.note.text != merged.note.text]
            if signs:
                others = list(map(self._with_own_lines, others))
            held = self._keep((*others, merged))
            self._write_kept(held)
            if merged.note.text == newest.note.text:
                newest = self._merge(newest, merged)
                self._folder.write(CHECKPOINT_PATH, encode_note(newest.note))
            self._folder.flush()
            with self._lock:
                self._newest, self._held = newest, held

    def _write_kept(self, held: tuple[SignedCheckpoint, ...]) -> None:
        """What is still needed of a file stands in another one, durably, before that is replaced."""
        first, *rest = held
        most = max(rest, key=lambda each: len(parties(self._cosigners(each))), default=None)
        newest, written = encode_note(first.note), self._written
        witnessed = written[WITNESSED_PATH] if most is None else encode_note(most.note)
        others = [encode_note(each.note) for each in rest if each is not most]
        kept = written[KEPT_PATH]
        there = set() if not kept else set(notes_at(KEPT_PATH, kept).values())
        others_stand = there.issuperset(others)
        is_moved = most is not None and witnessed != written[WITNESSED_PATH]
        if is_moved:
            # It comes from another file, where it stays until it stands here; and what stood here is not needed.
            stays = others_stand and witnessed in (written[COSIGNED_PATH], *there)
            is_safe = stays and self._is_said(written[WITNESSED_PATH], rest)
        else:
            is_safe = others_stand or newest == written[COSIGNED_PATH]
        if not is_safe:
            # All of them stand there before either of the two is replaced.
            self._write(KEPT_PATH, join(encode_note(each.note) for each in held))
            self._folder.flush()
            others_stand = False
        if witnessed is not None:
            self._write(WITNESSED_PATH, witnessed)
        if is_moved and is_safe:
            # Of two names that are not durable yet, the later one alone may be there after a power failure.
            self._folder.flush()
        self._write(COSIGNED_PATH, newest)
        if others and not others_stand:
            self._folder.flush()
            self._write(KEPT_PATH, join(others))

    def _is_said(self, data: bytes | None, by: Iterable[SignedCheckpoint]) -> bool:
        """Whether these say all that this note may say."""
        try:
            return data is None or self._says_nothing(parse_note(data), map(self._said, by))
        except TamperError:
            return True

    def _with_own_lines(self, signed: SignedCheckpoint) -> SignedCheckpoint:
        """With a line of each key that signs now, of a checkpoint whose root was compared; as it is where they do not sign. These lines have the time 0:
        that no larger tree was known when they were signed they cannot say (c2sp.org/tlog-cosignature)."""
        lacking = self._keys_at(signed.checkpoint.size) - {by.key for by in signed.signed}
        signers = [signer for signer in self._signers if signer.key in lacking]
        if not signers:
            return signed
        try:
            lines = [signer.sign(signed.note.text) for signer in signers]
            return self.read(encode_note(signed.note.with_signatures(lines)))
        except Exception as error:  # a key service's own
            log.warning("%s: lines of the log were not put back: %s", self.newest.origin, error)
            return signed

    def _keys_at(self, size: int) -> frozenset[VerifierKey]:
        """Which keys of the log signed a checkpoint of so many leaves, or would."""
        if size >= self._signs_from:
            return frozenset(signer.key for signer in self._signers)
        ends = ((key, key.to_size or 0) for key in self._ended)
        return frozenset(key for key, to_size in ends if key.from_size <= size < to_size)

    def _is_whole(self, signed: SignedCheckpoint) -> bool:
        return self._keys_at(signed.checkpoint.size) <= {by.key for by in signed.signed}

    def _write(self, path: str, data: bytes) -> None:
        if self._written[path] != data:
            self._folder.write(path, data)
            self._written[path] = data

    def covering(self, notes: Iterable[bytes]) -> list[bytes]:
        """Of cosigned notes that came from elsewhere, in whatever order, those that say what no larger one of them does, and KEPT_MAX at most of
        those that say so by lines of keys alone that are not known yet; the largest first. Whether they are of this log's tree is not asked, it need not be here yet.
        What a line claims counts for nothing before it is verified; but a note is not verified whose claims a larger one meets."""
        found, unknown = list[_Said](), 0
        left = list[bytes]()
        for data in sorted(dict.fromkeys(notes), key=claimed_size, reverse=True):
            try:
                note = parse_note(data)
                if self._says_nothing(note, found):
                    continue
                signed = self.read(data)
            except TamperError:
                continue
            if not signed.cosigned or self._says_nothing(signed.known_note(), found):
                unknown += 1
                if unknown > KEPT_MAX:
                    continue
            if signed.cosigned:
                found.append(self._said(signed))
            left.append(data)
        return left

    def take_cosigned(self, notes: Iterable[bytes]) -> list[bytes]:
        """Keep what counts of cosigned notes of this log that came from elsewhere, in whatever order: each as `add_cosigned`, and what is none is skipped. Returns those
        with lines of keys that are not known yet, KEPT_MAX at most. Blocks on disk."""
        unknown = list[bytes]()
        for data in sorted(dict.fromkeys(notes), key=claimed_size, reverse=True):
            with self._lock:
                found = list(map(self._said, self._known_now()))
            try:
                if self._says_nothing(parse_note(data), found):
                    continue
                signed = self.read(data)
                if signed.cosigned:
                    # Whether it is led here is not known: nothing is signed.
                    self.add_cosigned(signed._replace(note=signed.known_note()), signs=False)
                if (not signed.cosigned or self._unknown(signed.note)) and len(unknown) < KEPT_MAX:
                    unknown.append(data)
            except FelixError as error:
                log.warning("%s: a cosigned checkpoint is not taken over: %s", self.newest.origin, error)
        return unknown

    def _said(self, signed: SignedCheckpoint) -> _Said:
        return _Said(signed.checkpoint.size, self._cosigners(signed), signed.note, self._is_whole(signed))

    def _says_nothing(self, note: Note, found: Iterable[_Said]) -> bool:
        size, claimed = Checkpoint.parse(note.text).size, self._claimed(note)
        lines = {(line.name, line.key_id) for line in note.signatures}
        for other_size, by, other, is_whole in found:
            if other.text == note.text:
                # A further key of the same party is one line more.
                if claimed <= by and lines <= {(line.name, line.key_id) for line in other.signatures}:
                    return True
            elif is_whole and size <= other_size and claimed <= by:
                return True
        return False

    def _claimed(self, note: Note) -> frozenset[Cosigner]:
        """Who has cosigned it, if all of its lines hold."""
        own = note.text.partition("\n")[0]
        keys = (*self._known_keys, *self.witnesses)
        found = set[Cosigner]()
        for line in note.signatures:
            # Keys of one name and id may be of several algorithms.
            algorithms = {key.algorithm for key in keys if (key.name, key.key_id) == (line.name, line.key_id)}
            party = _signer(line.name, own)
            found.update((party, algorithm) for algorithm in algorithms)
            if not algorithms:
                # Of a witness that is not known yet, or no more.
                found.add((party, line.key_id))
        return frozenset(found)

    def _cosigners(self, signed: SignedCheckpoint) -> frozenset[Cosigner]:
        """Who cosigned it, and with what the log signed it: one with fewer lines of the log does not stand for one with more."""
        own = signed.checkpoint.origin
        found: set[Cosigner] = {
            (_signer(by.key.name, own), by.key.algorithm) for by in (*signed.cosigned, *signed.signed)
        }
        # Of what algorithm an unknown key is, nobody knows: its lines stand for no other key's.
        found.update((_signer(line.name, own), line.key_id) for line in self._unknown(signed.note))
        return frozenset(found)

    def _unknown(self, note: Note) -> list[Signature]:
        """Its lines of keys that are not known yet, or no more."""
        keys = {(key.name, key.key_id) for key in (*self._known_keys, *self.witnesses)}
        return [line for line in note.signatures if (line.name, line.key_id) not in keys]

    def _keep(self, found: Iterable[SignedCheckpoint]) -> tuple[SignedCheckpoint, ...]:
        weighed = (
            Cosigned(each.checkpoint.size, self._cosigners(each), each, self._is_whole(each))
            for each in found
        )
        return tuple(each.note for each in keep(weighed, KEPT_MAX))

    def _of_text(self, text: str) -> SignedCheckpoint | None:
        """Under the lock."""
        return next((each for each in self._known_now() if each.note.text == text), None)

    def _known_now(self) -> tuple[SignedCheckpoint, ...]:
        """What is kept, with the cosignatures of those who are known by now. Under the lock."""
        if self._is_stale:
            self._is_stale = False
            self._held = self._keep(map(self._read_again, self._held))
        return self._held

    def _read_again(self, held: SignedCheckpoint) -> SignedCheckpoint:
        try:
            return self.read(encode_note(held.note))
        except TamperError:
            # It held when it was taken; another key of that name and id does not take it back.
            return held

    def _merge(self, to: SignedCheckpoint, more: SignedCheckpoint) -> SignedCheckpoint:
        """With the lines of both, each key's once, and of a party as many as it may have: those that were there before go first."""
        held = {by.key for by in (*to.signed, *to.cosigned)}
        new = [by.line for by in (*more.signed, *more.cosigned) if by.key not in held]
        own, taken, added = to.checkpoint.origin, dict[str, list[Signature]](), list[Signature]()
        for line in to.note.signatures:
            taken.setdefault(party_of(line.name, own), []).append(line)
        for line in more.note.signatures:
            if line not in new:
                continue
            lines = taken.setdefault(party_of(line.name, own), [])
            size = len(encode_signatures((*lines, line)))
            if line.name == own or (len(lines) < PARTY_LINES_MAX and size <= PARTY_BYTES_MAX):
                lines.append(line)
                added.append(line)
        return self.read(encode_note(to.note.with_signatures(added))) if added else to

    def read(self, note: bytes) -> SignedCheckpoint:
        """A checkpoint that this log signed. Raises TamperError where it did not."""
        return open_checkpoint(note, self._known_keys, self.witnesses)

    def trust_witnesses(self, keys: Iterable[VerifierKey]) -> None:
        """Take more witnesses in: their cosignatures count from now on."""
        with self._lock:
            witnesses = tuple(dict.fromkeys((*self.witnesses, *keys)))
            # What is kept may have their lines; it is read again when it is asked for.
            self._is_stale = self._is_stale or len(witnesses) > len(self.witnesses)
            self.witnesses = witnesses

    def consistency_proof(self, old: int, new: int) -> list[bytes]:
        """The proof that `new` leaves continue the first `old`; `new` is the size of a checkpoint. Blocks on disk.

        Raises RequestError(OFFSET_OUT_OF_RANGE).
        """
        size = self.newest.size
        if not 0 <= old <= new <= size:
            raise RequestError(
                f"The log has a checkpoint of {size} leaves; there is no proof from {old} to {new}.",
                code=Code.OFFSET_OUT_OF_RANGE,
            )
        return consistency_proof(old, new, TileHashes(self._folder, new))

    def check_holds(self, size: int, root: bytes) -> None:
        """Raises RolledBackError unless the log's first `size` leaves have this root. Blocks on disk."""
        self.check_continues(Checkpoint(self.newest.origin, size, root))

    def check_continues(self, before: Checkpoint) -> None:
        """Raises RolledBackError unless the log continues this one. Blocks on disk."""
        check_continues(self._folder, self.newest, before)


def _signer(name: str, own: str) -> str:
    """The party of a line's name, on a note of the log `own`; none where it is the log itself."""
    return "" if name == own else party_of(name, own)


def sign_checkpoint(checkpoint: Checkpoint, signers: Iterable[NoteSigner], now_s: int) -> SignedCheckpoint:
    """The checkpoint with a line of every signer; an ML-DSA-44 line says that it is of now."""
    text = checkpoint.text()
    note = Note(text, tuple(signer.sign(text, now_s) for signer in signers))
    return SignedCheckpoint(checkpoint, note, ())


def check_continues(folder: Folder, current: Checkpoint, before: Checkpoint) -> None:
    """Raises RolledBackError unless the tree of `current`, on disk, continues `before`."""
    if before.size > current.size:
        raise RolledBackError(
            f"The audit log {current.origin} has {current.size} leaves where {before.size} were signed before: "
            "it was rolled back.",
            hint=VERIFY_HINT,
        )
    root = root_from_nodes(before.size, TileHashes(folder, current.size)) if before.size else EMPTY_ROOT
    if root != before.root:
        raise RolledBackError(
            f"The audit log {current.origin} differs from what was signed at {before.size} leaves.",
            hint=VERIFY_HINT,
        )
