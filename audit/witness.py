"""Witnesses: cosigning another party's checkpoints, never two histories. Pure over a `WitnessStore` port.

Per log, a witness remembers the last checkpoint that it cosigned, *durably before* it signs the next. It signs only
what continues that one: a smaller tree, another root at the same size, or a consistency proof that does not hold is
refused with `ForkError`, which carries both notes. Two roots at one size convict the log: it signed both. Sources:
https://c2sp.org/tlog-cosignature, https://c2sp.org/tlog-witness. `cosign` blocks where its store does; calls for one
log must not overlap. Callers: region (for a bridge's egress log), bridge (for a region's ingress log), cli.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, Protocol

from audit.checkpoint import Checkpoint, SignedCheckpoint, open_checkpoint
from audit.errors import RolledBackError
from audit.merkle import PROOF_HASHES_MAX, verify_consistency
from audit.note import Algorithm, NoteSigner, VerifierKey, encode_note, parse_note, unbounded
from audit.tile_disk import Folder
from felix.errors import Code, RequestError, TamperError, UnavailableError
from felix.storage.disk import SHARED_FILES
from felix.storage.port import Files

_SUFFIX: Final = ".checkpoint"


class ForkError(RolledBackError):
    """A log did not show that it continues what was cosigned. `cosigned` and `offered` are both signed by it."""

    def __init__(self, sentence: str, cosigned: bytes, offered: bytes) -> None:
        super().__init__(sentence, hint="Keep both checkpoints: each is signed by the log.")
        self.cosigned = cosigned
        self.offered = offered


class WitnessStore(Protocol):
    """Remembers one note per origin."""

    def last(self, origin: str) -> bytes | None:
        """The last note put for this origin."""
        ...

    def swap(self, origin: str, before: bytes | None, note: bytes) -> None:
        """Replace `before`, which `last` gave; durable on return. Raises UnavailableError(CONFLICT) where it is no longer the last one,
        with nothing changed, and UnavailableError where the store does not answer, perhaps with the note in it."""
        ...

    def confirm(self, origin: str, note: bytes) -> None:
        """`note`, which `last` gave, is about to be signed again: as durable on return as after `swap`. Raises as that does."""
        ...


def superseded(origin: str) -> UnavailableError:
    """What a swap is refused with whose note is no longer the last one."""
    return UnavailableError(
        f"Another checkpoint of {origin} was cosigned in the same moment.",
        code=Code.CONFLICT,
        hint="Ask for the last one, and bring a proof from there.",
        retry_after_ms=100,
    )


class MemoryWitnessStore:
    """The twin of the others in memory."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def last(self, origin: str) -> bytes | None:
        return self._notes.get(origin)

    def swap(self, origin: str, before: bytes | None, note: bytes) -> None:
        if self.last(origin) != before:
            raise superseded(origin)
        self._notes[origin] = note

    def confirm(self, origin: str, note: bytes) -> None:
        pass


class DiskWitnessStore:
    """One file per origin, named by the SHA-256 of the origin, replaced atomically. One process has the folder."""

    def __init__(self, folder: Path, files: Files = SHARED_FILES) -> None:
        self._folder = Folder(folder, files)

    def last(self, origin: str) -> bytes | None:
        return self._folder.read(_name(origin))

    def swap(self, origin: str, before: bytes | None, note: bytes) -> None:
        if self.last(origin) != before:
            raise superseded(origin)
        self._folder.write(_name(origin), note)
        self._folder.flush()

    def confirm(self, origin: str, note: bytes) -> None:
        # Where flushing failed the file is there already, and may be lost in a crash.
        self._folder.flush()

    def notes(self) -> Iterator[bytes]:
        """The notes of all origins. Raises TamperError or OSError for those that cannot be read, once all others were given."""
        failed: Exception | None = None
        for name in self._folder.names(""):
            if name.endswith(_SUFFIX):
                try:
                    note = self._folder.read(name)
                except (TamperError, OSError) as error:
                    failed = error
                    continue
                if note is not None:
                    yield note
        if failed is not None:
            raise failed


def _name(origin: str) -> str:
    return sha256(origin.encode()).hexdigest() + _SUFFIX


def _open_held(note: bytes, keys: tuple[VerifierKey, ...]) -> SignedCheckpoint:
    """What was cosigned last. One that a key signed beyond the end that its region gave it since was good when it was stored: the log goes on from there, or is another history. Raises
    TamperError."""
    try:
        return open_checkpoint(note, keys)
    except TamperError:
        return open_checkpoint(note, unbounded(keys))


class Witness:
    """Cosigns the checkpoints of the logs whose keys it was given.

    - What is stored for an origin is signed by that log and was consistent with all that was stored before.
    - Once a key of a log has ended, it brings nothing further here, also not up to its end: whoever stole it would have another history cosigned, and the log itself kept out for good.
    - A cosignature exists only for a checkpoint that was stored first.
    """

    def __init__(
        self,
        signer: NoteSigner,
        logs: Iterable[VerifierKey],
        store: WitnessStore,
        now_s: Callable[[], int],
        *,
        also: Iterable[NoteSigner] = (),
    ) -> None:
        """`also`: further keys of the same name that cosign beside `signer` (ML-DSA-44)."""
        self._signers = (signer, *also)
        assert all(each.key.algorithm is not Algorithm.ED25519 for each in self._signers)
        self._logs: dict[str, tuple[VerifierKey, ...]] = {}
        self._store = store
        self._now_s = now_s
        self.follow_all(logs)

    @property
    def key(self) -> VerifierKey:
        """A key under which this witness's cosignatures verify."""
        return self._signers[0].key

    def trust(self, key: VerifierKey) -> None:
        """Take another log in, or a log's other key. Raises RequestError(CONFLICT) where its origin has another key of
        that algorithm already."""
        held = self._logs.get(key.name, ())
        if key in held:
            return
        if any(each.algorithm is key.algorithm for each in held):
            raise RequestError(f"The log {key.name} is known under another key.", code=Code.CONFLICT)
        self._logs[key.name] = (*held, key)

    def follow(self, keys: Sequence[VerifierKey]) -> None:
        """Take these as all keys of a log, in place of those that were known: its region's bundle names them now. Raises
        RequestError(CONFLICT) where two of one algorithm may sign the same checkpoints."""
        (name,) = {key.name for key in keys}
        for at, key in enumerate(keys):
            if any(other.algorithm is key.algorithm and other.meets(key) for other in keys[:at]):
                raise RequestError(
                    f"The log {name} has two keys for the same checkpoints.", code=Code.CONFLICT
                )
        self._logs[name] = tuple(keys)

    def follow_all(self, keys: Iterable[VerifierKey]) -> None:
        """`follow` for each log that one of these keys is of."""
        by_name: dict[str, list[VerifierKey]] = {}
        for key in keys:
            by_name.setdefault(key.name, []).append(key)
        for held in by_name.values():
            self.follow(held)

    @property
    def origins(self) -> list[str]:
        """The logs that are cosigned here, sorted."""
        return sorted(self._logs)

    def keys_of(self, origin: str) -> tuple[VerifierKey, ...]:
        """The keys of a log as they are known now; none of an unknown one."""
        return self._logs.get(origin, ())

    def last(self, origin: str) -> Checkpoint | None:
        """The last checkpoint cosigned for this log: the one that the next proof has to start from."""
        note = self._last_note(origin)
        return None if note is None else note.checkpoint

    def last_note(self, origin: str) -> bytes | None:
        """The same as a signed note, for whoever verifies a log against this witness's memory."""
        return self._store.last(origin)

    def origin_of(self, data: bytes) -> str:
        """Whose checkpoint this says it is. Raises RequestError(NOT_FOUND) for an unknown log, TamperError."""
        origin = parse_note(data).text.partition("\n")[0]
        if origin not in self._logs:
            raise RequestError(
                f"The log {origin[:200]!r} is not one that is cosigned here.", code=Code.NOT_FOUND
            )
        return origin

    def cosign(self, data: bytes, proof: Sequence[bytes]) -> bytes:
        """Cosign a checkpoint note. `proof`: consistency from `last(origin)`; empty for the first or the same one.

        Returns the note with this witness's cosignature added. Raises RequestError(NOT_FOUND) for an unknown log,
        TamperError where the note's signature does not hold, ForkError where it does not continue the last one.
        """
        origin = self.origin_of(data)
        offered = open_checkpoint(data, self._logs[origin])
        held = self._store.last(origin)
        last = None if held is None else _open_held(held, self._logs[origin])
        if last is not None:
            self._check_continues(last, offered, proof)
        elif proof:
            raise TamperError(
                f"Nothing of {origin} was cosigned yet, so its first checkpoint needs no proof."
            )
        if last is None or last.checkpoint != offered.checkpoint:
            self._require_key_of_now(offered)
        # Durable before signing: after a crash between the two, nothing older can be signed any more. Only the log's
        # own signatures are kept: a line under any other name is a text that the sender chose.
        bare = offered.known_note()
        if last is None or last.checkpoint != offered.checkpoint:
            self._store.swap(origin, held, encode_note(bare))
        elif held is not None:
            self._store.confirm(origin, held)
        now_s = self._now_s()
        return encode_note(bare.with_signatures(signer.cosign(bare.text, now_s) for signer in self._signers))

    def _require_key_of_now(self, offered: SignedCheckpoint) -> None:
        """Raises TamperError where the log has keys that sign on, and none of them has signed this one."""
        origin = offered.checkpoint.origin
        if all(key.to_size is not None for key in self._logs[origin]):
            return
        if all(by.key.to_size is not None for by in offered.signed):
            raise TamperError(
                f"The checkpoint of {origin} at {offered.checkpoint.size} leaves is signed with keys that have ended, and with none of those that sign the log now.",
                hint="Start what writes the log with its keys of now: it signs its newest checkpoint with them. Where that is done: somebody else has the former keys.",
            )

    def _last_note(self, origin: str) -> SignedCheckpoint | None:
        key, data = self._logs.get(origin), self._store.last(origin)
        return None if key is None or data is None else _open_held(data, key)

    def _check_continues(
        self, last: SignedCheckpoint, offered: SignedCheckpoint, proof: Sequence[bytes]
    ) -> None:
        old, new = last.checkpoint, offered.checkpoint
        notes = encode_note(last.note), encode_note(offered.known_note())
        if new.size < old.size:
            raise ForkError(
                f"The log {old.origin} was rolled back: {old.size} leaves were cosigned, it offers {new.size}.",
                *notes,
            )
        if new.size == old.size and new.root != old.root:
            raise ForkError(f"The log {old.origin} has two roots for {old.size} leaves.", *notes)
        if len(proof) > PROOF_HASHES_MAX:
            raise TamperError(f"A consistency proof of {len(proof)} hashes is none.")
        try:
            verify_consistency(old.size, old.root, new.size, new.root, proof)
        except TamperError as error:
            raise ForkError(
                f"The log {old.origin} does not show that its {new.size} leaves continue the {old.size} cosigned.",
                *notes,
            ) from error
