"""The checkpoints of one open log: the newest, those that witnesses have cosigned, and the one that witnesses are shown; signing them.

Invariants:
- a checkpoint is durable before anybody is shown it;
- what is added was signed by the log and cosigned by a known witness, and the log continues it; lines under unknown names are not kept;
- a cosigned checkpoint that comes first does not cost the cosignatures that the one before it has collected.

Callers: audit.trail and audit.opening. What reads or writes files blocks, from any thread:
`write`, `add_cosigned`, `check_continues` and `consistency_proof`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

from audit.checkpoint import Checkpoint, SignedCheckpoint, open_checkpoint
from audit.errors import VERIFY_HINT, RolledBackError
from audit.merkle import EMPTY_ROOT, consistency_proof, root_from_nodes
from audit.note import Note, NoteSigner, VerifierKey, encode_note
from audit.tile import CHECKPOINT_PATH, COSIGNED_PATH, WITNESSED_PATH, TileHashes
from audit.tile_disk import Folder
from felix.errors import Code, RequestError, TamperError
from felix.runtime.port import Clock

ROUND_MS: Final = 5_000
"""How long all witnesses are shown the same checkpoint, so that one note collects their cosignatures; a bridge asks
every 3 s. Once all that are expected have cosigned, the next one may follow at once."""


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
    """the newest that has more cosignatures than that"""


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
        self._known_keys = keys.known
        self._clock = clock
        self._cosigners_expected = 1
        self._lock = threading.Lock()
        # Held while files are written; the one above only for the values.
        self._files_lock = threading.Lock()
        self.begin(folder, kept)

    def begin(self, folder: Folder, kept: KeptCheckpoints) -> None:
        """Go on from what the folder has."""
        with self._files_lock, self._lock:
            # The publisher writes tiles meanwhile: which names are not durable yet, each knows of its own.
            self._folder = folder.beside()
            self._newest, self._cosigned, self._witnessed = kept
            self._offered, self._offered_at = kept.newest, self._clock.monotonic() - ROUND_MS / 1000

    @property
    def newest(self) -> Checkpoint:
        """The newest that is durable."""
        return self._newest.checkpoint

    @property
    def cosigned_size(self) -> int:
        """Of the newest that a witness has cosigned; 0 where there is none."""
        return 0 if self._cosigned is None else self._cosigned.checkpoint.size

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

    def expect_cosigners(self, number: int) -> None:
        """How many cosigners a checkpoint is shown to before the next one follows it (see `offer`)."""
        with self._lock:
            self._cosigners_expected = max(1, number)

    def offer(self, at_least: int = 0) -> bytes:
        """The checkpoint that witnesses are to cosign now: the same for all of them until the expected number has, or
        ROUND_MS went by, or one of them has cosigned `at_least` leaves already. Makes no checkpoint."""
        with self._lock:
            offered, newest = self._offered, self._newest
            if offered.note.text != newest.note.text:
                held = self._cosigned
                count = len(cosigners(held)) if held and held.note.text == offered.note.text else 0
                over = (self._clock.monotonic() - self._offered_at) * 1000 >= ROUND_MS
                # A size that the log does not have is no reason: nobody can end rounds with made-up numbers.
                outrun = offered.checkpoint.size < at_least <= newest.checkpoint.size
                if over or count >= self._cosigners_expected or outrun:
                    self._offered, self._offered_at = newest, self._clock.monotonic()
            return encode_note(self._offered.note)

    def offer_newest(self) -> None:
        """Begin a new round with the newest."""
        with self._lock:
            self._offered, self._offered_at = self._newest, self._clock.monotonic()

    def is_cosigned_by(self, data: bytes, keys: Iterable[VerifierKey]) -> bool:
        """True where the log holds a cosignature of one of these keys for this checkpoint note of its own."""
        text, known = data.decode().rpartition("\n\n")[0] + "\n", set(keys)
        held = self._cosigned
        return held is not None and held.note.text == text and any(by.key in known for by in held.cosigned)

    def cosigned(self) -> tuple[SignedCheckpoint, ...]:
        """Those that known witnesses cosigned, for whoever asks for a quorum: the newest one, and the newest one
        that has more cosignatures."""
        with self._lock:
            return tuple(held for held in (self._cosigned, self._witnessed) if held is not None)

    def read_cosigned(self, data: bytes) -> SignedCheckpoint:
        """One of this log that a known witness cosigned, without the lines of others.

        Raises TamperError where a signature does not hold or no known witness signed.
        """
        added = open_checkpoint(data, self._known_keys, self.witnesses)
        if not added.cosigned:
            raise TamperError(
                f"That checkpoint carries no cosignature of a known witness. {added.told()}".strip()
            )
        # Lines under unknown names are whatever the sender chose: they are not kept.
        return added._replace(note=added.known_note())

    def add_cosigned(self, added: SignedCheckpoint) -> None:
        """Keep what `read_cosigned` gave. Raises RolledBackError where it is not a checkpoint of this log as it is."""
        with self._files_lock:
            newest, cosigned = self._newest, self._cosigned
            self.check_continues(added.checkpoint)
            if cosigned is not None and added.checkpoint.size < cosigned.checkpoint.size:
                return
            if cosigned is not None and added.note.text == cosigned.note.text:
                added = self._merge(cosigned, added)
            elif cosigned is not None and len(cosigners(cosigned)) > len(cosigners(added)):
                # The first cosignature of a new one must not cost those that the one before has collected.
                self._folder.write(WITNESSED_PATH, encode_note(cosigned.note))
                with self._lock:
                    self._witnessed = cosigned
            self._folder.write(COSIGNED_PATH, encode_note(added.note))
            if added.note.text == newest.note.text:
                newest = self._merge(newest, added)
                self._folder.write(CHECKPOINT_PATH, encode_note(newest.note))
            self._folder.flush()
            with self._lock:
                self._newest, self._cosigned = newest, added

    def _merge(self, to: SignedCheckpoint, more: SignedCheckpoint) -> SignedCheckpoint:
        return self.read(encode_note(to.note.with_signatures(by.line for by in more.cosigned)))

    def read(self, note: bytes) -> SignedCheckpoint:
        """A checkpoint that this log signed. Raises TamperError where it did not."""
        return open_checkpoint(note, self._known_keys, self.witnesses)

    def trust_witnesses(self, keys: Iterable[VerifierKey]) -> None:
        """Take more witnesses in: their cosignatures count from now on."""
        with self._lock:
            self.witnesses = tuple(dict.fromkeys((*self.witnesses, *keys)))

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


def cosigners(signed: SignedCheckpoint) -> set[str]:
    """The names under which it was cosigned: a witness that has keys of two algorithms is one."""
    return {by.key.name for by in signed.cosigned}


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
