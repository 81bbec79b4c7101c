"""The checkpoints of other logs that this region has cosigned: in the metadata store, in files of the broker's folder, and of several brokers in
the stream of the audit log.

The store alone has room for one memory of a region, whichever broker cosigns: a note takes the place of the one that was read, or not at
all. The others are for the day on which the store is put back to an earlier state. Each is held to the other, and the one that knows
more counts, so an older copy of one does not let a witness sign a history a second time.

Invariants, where brokers copy the audit log (region.evidence.audit_log, decision 0155):
- a note is committed in that stream before anything is signed by it: durable on every copy in sync;
- a broker takes every note that is committed there into its file, and is home only after that. So whoever may cosign has all that was;
- each note of a log in the stream continues the one before, also one of which it was not known whether it was committed;
- once the stream has a note of a log, the metadata store decides nothing: whatever stands there is not even read, and is written over;
- nothing is called a fork that a key at hand does not confirm for both notes; a note of the stream that such a key refutes is skipped.

Called in threads, never on the event loop: each call waits for the store, and for the copies. What became of a write that was not answered is not
known, and it is an error: nothing is signed, and the next call reads again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from hashlib import sha256
from threading import Lock
from typing import Any, Final, Protocol, TypeVar

from audit.checkpoint import Checkpoint, open_checkpoint
from audit.note import VerifierKey, broken_line, check_note, parse_note, unbounded
from audit.witness import DiskWitnessStore, ForkError, superseded
from felix.errors import TamperError, UnavailableError
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from region.metadata.port import MetadataStore
from region.metadata.records import Keys
from region.metadata.transaction import Entry, ModRevision, Put

log = logging.getLogger("felix.region.witness")

ANSWER_S: Final = 30.0
"""The store's own limits are shorter; beyond this the broker is going down."""

_T = TypeVar("_T")


class WitnessCopies(Protocol):
    """What is asked of `region.evidence.audit_log.AuditLog`, in threads."""

    def given(self, origin: str) -> bytes | None:
        """What was given last to be committed since this broker is home, whether it is or not."""
        ...

    def copy(self, origin: str, before: bytes | None, note: bytes) -> None:
        """Commit a note in the stream; `before`: what was given, or is known to be committed there. Blocks. Raises UnavailableError where it is not committed,
        or not known to be, and with CONFLICT where that is no longer the last one."""
        ...


class WitnessMemory:
    """A `WitnessStore` (audit.witness). Made on the event loop that the metadata store belongs to."""

    def __init__(
        self, store: MetadataStore, region: str, files: DiskWitnessStore, runtime: Runtime = REAL
    ) -> None:
        self.copies: WitnessCopies | None = None
        """None where brokers do not copy the audit log. Set before anything is cosigned"""
        self.keys_of: Callable[[str], tuple[VerifierKey, ...]] = lambda origin: ()
        """a log's keys, as far as they are known here: `audit.witness.Witness.keys_of`. Set once the witness is made"""
        self._store = store
        self._keys = Keys(region)
        self._files = files
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        """held while a file, or what follows here, is changed"""
        self._copied: dict[str, bytes] = {}
        """by origin, the note that is known to be committed in the stream"""
        self._parted: dict[str, ForkError] = {}
        """logs of which two roots for one size were cosigned, or were to be"""

    def move_in(self) -> None:
        """Bring what the files know, and the store does not, into the store: what Felix 0.1 remembered, or what a store that was put back lost.

        Raises UnavailableError. A file that holds no checkpoint, or contradicts the store, stays, and stops the cosigning of its log alone.
        """
        for held in self._files.notes():
            try:
                origin = _head(held).origin
                entry, note = self._newest(origin)
            except (TamperError, ForkError) as error:
                log.error("what was cosigned last of a log is not known: %s", error)
                continue
            if entry is None or entry.value != note:
                self._put(origin, entry, note)

    def last(self, origin: str) -> bytes | None:
        """The note that knows most; the file's where the store does not answer, for `swap` asks again. Raises ForkError where store and file
        contradict each other: the log signed both."""
        try:
            _, note = self._newest(origin)
        except UnavailableError:
            return self._here(origin)
        return note

    def swap(self, origin: str, before: bytes | None, note: bytes) -> None:
        """Replace `before`; on return committed in the stream, and on the disk of the store and of this broker. Raises UnavailableError."""
        known = self._known(origin)
        entry, held = self._newest(origin)
        if held != before:
            raise superseded(origin)
        if self.copies is not None and (known != note or self._copied.get(origin) != note):
            # First: a broker that is home no more can commit nothing, and whoever is has taken what was committed.
            self.copies.copy(origin, known, note)
            self.take(note)
        if entry is None or entry.value != note:
            self._put(origin, entry, note)
        with self._lock:
            self._file(origin, note)

    def confirm(self, origin: str, note: bytes) -> None:
        """Bring a note that only some of them have to all of them: after a crash between two of them, or where one was put back."""
        self.swap(origin, note, note)

    # -- in the stream ---------------------------------------------------------------------------------

    def take(self, note: bytes) -> None:
        """Take what is committed in the stream into the file, if it says more. Raises OSError."""
        self.take_all((note,))

    def take_all(self, notes: Iterable[bytes]) -> None:
        """`take` each of them: in any order, and of each log the largest alone is written. Raises OSError.

        One that cannot be read, or that a key of its log refutes, is skipped. One that no known key signed is taken: the keys that are known
        here may be those of before, and what was cosigned must not be forgotten."""
        found: dict[str, list[tuple[Checkpoint, bytes]]] = {}
        for note in dict.fromkeys(notes):
            try:
                checkpoint = _head(note)
            except TamperError as error:
                log.error(
                    "a note in the stream of the audit log, of what was cosigned, is skipped: %s", error
                )
                continue
            found.setdefault(checkpoint.origin, []).append((checkpoint, note))
        for each in found.values():
            each.sort(key=lambda pair: pair[0].size, reverse=True)
            size = -1
            for checkpoint, note in each:
                if checkpoint.size < size:
                    break
                try:
                    self._check_not_refuted(checkpoint.origin, note)
                except TamperError as error:
                    log.error(
                        "a note in the stream of the audit log, of what was cosigned of %s, is skipped: %s",
                        checkpoint.origin, error,
                    )  # fmt: skip
                    continue
                # Others of this size, too: two roots for one size are not to be overlooked.
                size = checkpoint.size
                self._take(checkpoint, note)

    def _take(self, checkpoint: Checkpoint, note: bytes) -> None:
        with self._lock:
            known = self._copied.get(checkpoint.origin)
            if known is None or _head(known).size <= checkpoint.size:
                self._copied[checkpoint.origin] = note
            try:
                self._file(checkpoint.origin, note)
            except (TamperError, ForkError) as error:
                # It stops the cosigning of this log, and not the audit log.
                log.error("what was cosigned last of a log is not known: %s", error)

    def copied(self) -> dict[str, bytes]:
        """By origin, what is known to be committed in the stream. Also called on the event loop."""
        return self._copied.copy()

    def uncopied(self) -> list[bytes]:
        """What the files know, and the stream, as far as it was taken, does not: from before brokers copied notes."""
        found = []
        for note in self._files.notes():
            try:
                checkpoint = _head(note)
                self._check_not_refuted(checkpoint.origin, note)
            except TamperError as error:
                log.error("what was cosigned last of a log is not known: %s", error)
                continue
            known = self.copied().get(checkpoint.origin)
            if known is None or _head(known).size < checkpoint.size:
                found.append(note)
        return found

    def _file(self, origin: str, note: bytes) -> None:
        """Have the file say no less than `note`. Raises TamperError and ForkError."""
        held = self._files.last(origin)
        if held == note:
            self._files.confirm(origin, note)
            return
        if held is not None:
            try:
                ahead = self._compare(origin, held, note)
            except ForkError as error:
                self._parted[origin] = error
                raise
            if ahead > 0:
                return
        self._files.swap(origin, held, note)

    # -- in the store ----------------------------------------------------------------------------------

    def _put(self, origin: str, entry: Entry | None, note: bytes | None) -> None:
        assert note is not None
        key = self._key(origin)
        compare = ModRevision(key, entry.mod_revision if entry else 0)
        if not self._await(self._store.transact([compare], [Put(key, note)])).succeeded:
            raise superseded(origin)

    def _known(self, origin: str) -> bytes | None:
        """What the stream has last, or may have."""
        given = None if self.copies is None else self.copies.given(origin)
        return given or self._copied.get(origin)

    def _here(self, origin: str) -> bytes | None:
        """What the stream and the file know. A file knows more after a stream was cut short, with a loss that a person accepted."""
        if (parted := self._parted.get(origin)) is not None:
            raise parted
        known, filed = self._known(origin), self._files.last(origin)
        if known is None or filed is None or known == filed:
            return known or filed
        return filed if self._compare(origin, filed, known) > 0 else known

    def _newest(self, origin: str) -> tuple[Entry | None, bytes | None]:
        """The store's entry, and the note that counts."""
        # The store first: what it has from another broker may be in the stream by then, and not the other way round.
        entry, here = self._await(self._store.get(self._key(origin))), self._here(origin)
        if entry is None or here is None or entry.value == here:
            return entry, here or (entry.value if entry else None)
        if self._known(origin) is not None:
            log.warning(
                "the metadata store says something else of what was cosigned of %s than the stream of the audit log, which counts: the store was put back, "
                "did not take the last one, or somebody else wrote there; it is written over with the next checkpoint",
                origin,
            )  # fmt: skip
            return entry, here
        self._check_believable(origin, here, entry.value)
        ahead = self._compare(origin, here, entry.value)
        if ahead > 0:
            log.warning(
                "the metadata store remembers %d leaves less of %s than this broker: the store was put back to an earlier state, or did not take the last one",
                ahead, origin,
            )  # fmt: skip
        return entry, entry.value if ahead < 0 else here

    def _check_believable(self, origin: str, here: bytes, stored: bytes) -> None:
        """What the store says does not count for more than what stands here, nor for a fork, unless the log signed it. Raises TamperError."""
        ours, keys = _head(here), self.keys_of(origin)
        try:
            theirs = _head(stored)
            self._check_not_refuted(origin, stored)
            if theirs.origin != origin:
                raise TamperError(f"It is of the log {theirs.origin[:200]!r}.")
            if ours.size == theirs.size and ours.root != theirs.root:
                if not keys:
                    raise TamperError(
                        "It has another root than this broker's, and no key of the log is known."
                    )
                open_checkpoint(stored, keys)
        except TamperError as error:
            raise TamperError(
                f"What the metadata store says was cosigned of {origin} cannot be believed: {error}",
                hint="Somebody else wrote there. Keep a copy of the record, and delete it: this broker's own memory is written there again.",
            ) from error

    def _key(self, origin: str) -> str:
        return self._keys.witness(sha256(origin.encode()).hexdigest())

    def _await(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            answer: _T = self._runtime.ask(work, self._loop, ANSWER_S)
            return answer
        except TimeoutError as error:
            raise UnavailableError("The metadata store does not answer.") from error

    # -- keys ------------------------------------------------------------------------------------------

    def _check_not_refuted(self, origin: str, note: bytes) -> None:
        """Raises TamperError where a line under the name and id of known keys of the log holds by none of them, or where it is no note."""
        if broken := check_note(parse_note(note), self.keys_of(origin)).broken:
            raise broken_line(broken[0])

    def _compare(self, origin: str, one: bytes, other: bytes) -> int:
        """How many leaves more `one` has. Raises ForkError, and TamperError where one of them is no checkpoint, or not the log's by the keys
        that are known."""
        first, second = _head(one), _head(other)
        if first.size == second.size and first.root != second.root:
            if keys := self.keys_of(origin):
                for note in (one, other):
                    # Also one that a key signed beyond the end that its region gave it since: it was cosigned here.
                    open_checkpoint(note, unbounded(keys))
            raise ForkError(
                f"The log {origin} has two roots for {first.size} leaves, and both were cosigned here.",
                other,
                one,
            )
        return first.size - second.size


def _head(note: bytes) -> Checkpoint:
    return Checkpoint.parse(parse_note(note).text)
