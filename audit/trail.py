"""The durable trail: one audit log being written. Append leaves, get them durable, tiled and checkpointed.

Two workers (felix.runtime.port) behind one lock, each with a thread on a real machine, nothing of it on an event loop:

- the *writer* takes all that waits, appends it to the write-ahead file with one `fdatasync`, and calls back;
- the *publisher* takes what is durable into the tree, writes tiles and entry bundles, and on a timer or a count a
  checkpoint. Then the write-ahead segments that full bundles have replaced are removed.

Invariants:
- an append's leaves are durable before its `done` is called; they are all there after a crash, or none;
- indexes are given in the order of `append_nowait`, and never again to other leaves once durable;
- every checkpoint continues the ones before (audit.published_disk and audit.checkpoint_disk write them);
- what waits is bounded by `pending_bytes_max`; beyond it, and after any failure of disk or signer, an append is
  refused with AuditUnavailableError, so that nothing crosses. A failed sync is never retried: the log is opened again (`reopen`), with all that was durable, and without
  what was refused.
- a full disk, or too many open files, is no failure: what was accepted waits for room, in its order, and is tried again; meanwhile an append is refused, and `status` says why. A
  log that has copies stops, and is opened again (`reopen`).
- a leaf that cannot be read (none is written any more) stays what it is: hashed, in the tree, named in `positions.unreadable`.
  It moves no position, and stops neither opening (audit.opening) nor appending.

A log that several brokers have copies of (`copied`) has no write-ahead file: its leaves are committed elsewhere, and the trail's files follow
(region.evidence.audit_log). There
- an append counts, and is in the tree, once it is committed on the copies: `take` brings what others wrote, `Copies` what is appended here;
- only who leads the copies signs; its checkpoint is committed on them before anybody is shown it, and the others write the same one (`show`);
- a cosigned checkpoint that says something new, and no other, is committed with all of its cosignatures that are held, before it is kept; the others take
  what is committed in whatever order it stands (`take_cosigned`);
- a checkpoint whose root is another than that of the leaves here stops the trail.

Callers: bridge (egress), region (ingress). `open`, `close` and `add_cosigned` block.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from audit.checkpoint import SignedCheckpoint
from audit.checkpoint_disk import CheckpointFiles, LogKeys
from audit.copied_disk import require_kind
from audit.document_disk import keep_document
from audit.document_leaf import stands_beside
from audit.durable_positions import DurablePositions
from audit.errors import AuditUnavailableError
from audit.leaf import EncodedLeaf, Header, Leaf, encode_for_log, read_header
from audit.merkle import TILE_WIDTH
from audit.note import NoteSigner, VerifierKey, encode_note
from audit.opening import Opened, Opening
from audit.published_disk import PublishedTree
from audit.tile import WAL_FOLDER, read_entries
from audit.tile_disk import Folder
from audit.wal_disk import SEGMENT_BYTES_MAX, Torn, Wal, WalFullError
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.storage.disk import SHARED_FILES
from felix.storage.disk_waits import DiskWaits
from felix.storage.port import Files, FolderLock, is_exhausted, lacks_resources
from felix.told import Told

log = logging.getLogger("felix.audit.trail")

APPEND_LEAVES_MAX: Final = 4_096
"""Leaves of one append: a batch of 65,536 records has about 75."""
COPIED_APPEND_BYTES_MAX: Final = 16_000_000
"""Of one append to a log that has copies: a batch of 65,536 records has 4.5 MB of leaves."""
_RETRY_MS: Final = 50
_REFUSED_RETRY_MS: Final = 1_000
FULL_RETRY_MS: Final = 250
"""A full disk is tried again after this."""
_REOPENED: Final = "Look at its disk. A broker or an agent that runs tries to open the log again by itself, at first after some seconds; what was acknowledged is kept."
_LEAVES: Final = "leaves"
_TREE: Final = "tiles"

Done = Callable[[int, AuditUnavailableError | None], None]
"""Called with the index of the append's first leaf, and the reason where it did not become durable."""


@dataclass(frozen=True, slots=True)
class TrailSettings:
    """How often to checkpoint, and how much may wait."""

    checkpoint_interval_ms: int = 1_000
    """after the first leaf that the last checkpoint does not cover"""
    checkpoint_leaves: int = 4_096
    """so many uncovered leaves make a checkpoint at once"""
    pending_bytes_max: int = 64 << 20
    """leaves accepted that are not yet in the tree; on top, one bundle (16 MiB at most) is held"""
    segment_bytes_max: int = SEGMENT_BYTES_MAX


class TrailStatus(NamedTuple):
    """For metrics and `status`. Sizes in leaves."""

    size: int
    durable: int
    checkpoint: int
    cosigned: int
    pending_bytes: int
    failure: str


class Copies(Protocol):
    """What commits a log on its copies, for as long as they are led here. All but `append` blocks until it is committed, and raises
    UnavailableError where it is not, or where that is not known. Called from the trail's threads."""

    def append(self, first: int, leaves: Sequence[bytes], done: Callable[[FelixError | None], None]) -> None:
        """Commit these, where the log ends at `first`, all or none; then `done`, in the order of the calls. Does not block."""

    def keep_note(self, note: bytes) -> None:
        """A checkpoint that is to be shown."""

    def keep_cosigned(self, note: bytes) -> None:
        """A checkpoint that witnesses have cosigned, with all of their lines that are held."""

    def keep_document(self, document: bytes) -> None:
        """A document that is to stand beside the log."""


class _Waiting(NamedTuple):
    first: int
    leaves: list[bytes]
    headers: list[Header]
    done: Done
    loop: asyncio.AbstractEventLoop | None


class Trail:
    """One open audit log. Make it with `open`."""

    def __init__(
        self,
        folder: Folder,
        lock: FolderLock,
        keys: LogKeys,
        witnesses: tuple[VerifierKey, ...],
        settings: TrailSettings,
        state: Opened,
        wal: Wal | None,
        refusal: Callable[[], str],
        unsigned: Callable[[], str],
        runtime: Runtime,
    ) -> None:
        self._folder, self._folder_lock, self._keys, self._settings = folder, lock, keys, settings
        self._wal = wal
        self._refusal, self._unsigned = refusal, unsigned
        self._runtime, self._clock = runtime, runtime.clock
        self.recovered: Torn | None = state.torn
        """what opening cut from the write-ahead file, if anything"""
        self._lock = threading.Lock()
        self.checkpoints = CheckpointFiles(keys, witnesses, folder, state.checkpoints, runtime.clock)
        """written by the publisher and by add_cosigned; asked by anybody"""
        self._cosigned_lock = threading.Lock()
        """held from the comparison until it is kept: of two cosignatures that cross, the second is added to the first"""
        self._closing = False
        self._waits_for_room = True
        self._reopening_lock = threading.Lock()
        """held while it is opened again, which an orderly end waits for"""
        self._begin(state)

    def _begin(self, state: Opened) -> None:
        # All below is guarded by _lock, down to the publisher's own.
        self._queue: list[_Waiting] = []
        self._synced: deque[tuple[bytes, Header | None]] = deque()
        self._size = self._durable = state.tree.size
        self._pending_bytes = 0
        self.positions = DurablePositions(state.positions)
        """what the durable leaves say"""
        self._publish_wanted = state.tree.size > state.checkpoints.newest.checkpoint.size
        self._writer_ended = False
        self._failure: AuditUnavailableError | None = None
        self._full: AuditUnavailableError | None = None
        """of what waits for room on the disk"""
        self._lacking_room: set[str] = set()
        self._full_told = Told(self._clock.monotonic)
        self._waits = DiskWaits(self._clock.monotonic)
        # The writer's own: what finds no room.
        self._unwritten: list[_Waiting] = []
        # Of a log that has copies.
        self._copies: Copies | None = None
        self._admits = False
        self._in_flight = 0
        self._lost = False
        self._shown: SignedCheckpoint | None = None
        self._unkept: FelixError | None = None

        # The publisher's own: nobody else touches these after the workers run, but for asking how many leaves the tree has.
        self._checkpoint_due: float | None = None
        self._published = PublishedTree(self._folder, self._keys, self.checkpoints, self._wal, state)

        self._writer = self._runtime.worker(self._write, "audit-writer")
        self._publisher = self._runtime.worker(self._publish_due, "audit-publisher")

    @classmethod
    def open(
        cls,
        path: Path,
        signer: NoteSigner,
        *,
        also: Iterable[NoteSigner] = (),
        earlier: Iterable[VerifierKey] = (),
        witnesses: Iterable[VerifierKey] = (),
        cosigned: Iterable[bytes] = (),
        settings: TrailSettings | None = None,
        refusal: Callable[[], str] = lambda: "",
        unsigned: Callable[[], str] | None = None,
        files: Files = SHARED_FILES,
        runtime: Runtime = REAL,
        copied: bool = False,
    ) -> Trail:
        """Open the log in this folder, or begin one; recover what a crash left. Blocks.

        `signer`: the log's key; its name is the log's origin. `also`: further keys of the same name that sign each
        checkpoint beside it (ML-DSA-44). `earlier`: keys that signed before these, each up to its size. `cosigned`: notes that
        witnesses remember of this log; a log that does not reach them, or differs, is not opened.
        `refusal`: why nothing may be appended or signed now, empty where it may: whoever else may write a log of this name
        meanwhile would make another history of it. Asked from several threads, often. `unsigned`: why no checkpoint may be made of what it has, where that is not the same. `copied`: several brokers have copies of it; until
        `lead`, it takes what they have and signs nothing.

        Raises RequestError(CONFLICT) where another process has it open, or it is of the other kind, CorruptionError where leaves are damaged,
        RolledBackError where it is shorter than what was signed, TamperError where files do not fit each other.
        """
        settings = settings or TrailSettings()
        signers = (signer, *also)
        assert len({each.key.name for each in signers}) == 1, "a log's keys have one name"
        keys = LogKeys(signers, tuple(key for key in earlier if all(key != each.key for each in signers)))
        known = tuple(witnesses)
        folder = Folder(path, files)
        lock = folder.lock(hint="Stop that one first; a log has one writer.")
        wal: Wal | None = None
        try:
            require_kind(folder, copied=copied)
            opening = Opening(folder, keys, known, runtime.clock)
            state = opening.open(tuple(cosigned), copied=copied)
            if not copied:
                wal = _open_wal(folder, state, settings)
            trail = cls(
                folder, lock, keys, known, settings, state, wal, refusal, unsigned or refusal, runtime
            )
            if not copied:
                trail.checkpoints.sign_where_keys_meet()
        except BaseException:
            if wal is not None:
                with suppress(OSError):
                    wal.close()
            lock.release()
            raise
        if unreadable := trail.positions.unreadable:
            log.error(
                "%s has %d leaves that cannot be read, the first is %d: `felix audit verify` lists them.",
                trail.key.name, len(unreadable), unreadable[0],
            )  # fmt: skip
        trail._start()
        return trail

    def _start(self) -> None:
        # In this order: the writer wakes the publisher.
        self._publisher.start()
        self._writer.start()

    @property
    def key(self) -> VerifierKey:
        """A key under which the log's checkpoints verify; its name is the log's origin."""
        return self._keys.key

    @property
    def keys(self) -> tuple[VerifierKey, ...]:
        """Every key that signs the log's checkpoints."""
        return self._keys.signing

    # Appending

    def append_nowait(
        self, leaves: Sequence[Leaf | EncodedLeaf], done: Done, loop: asyncio.AbstractEventLoop | None = None
    ) -> int:
        """Accept these leaves, all or none; `done` is called once they are durable, or never will be.

        `done` runs on `loop`, or where that is None on the trail's writer thread (be quick there). Returns the index
        that the first leaf will have; it counts only once `done` was called without an error. Does not block.

        Raises RequestError for leaves that cannot be written, AuditUnavailableError where the trail is full,
        closed or failed: then nothing may cross.
        """
        if not 0 < len(leaves) <= APPEND_LEAVES_MAX:
            raise RequestError(f"One append has 1 to {APPEND_LEAVES_MAX} leaves, this one {len(leaves)}.")
        ready = [leaf if isinstance(leaf, EncodedLeaf) else encode_for_log(leaf) for leaf in leaves]
        encoded, headers = [leaf.data for leaf in ready], [leaf.header for leaf in ready]
        size = sum(map(len, encoded))
        if self._wal is None and size > COPIED_APPEND_BYTES_MAX:
            raise RequestError(
                f"{len(encoded)} leaves of {size} bytes are one append; a log that brokers have copies of takes "
                f"{COPIED_APPEND_BYTES_MAX} bytes at once.",
                code=Code.BATCH_TOO_LARGE,
            )
        with self._lock:
            self._check_open()
            if self._lost:
                raise AuditUnavailableError(
                    f"The audit log {self.key.name} waits for what became of earlier leaves.",
                    retry_after_ms=_RETRY_MS,
                )
            if self._pending_bytes and self._pending_bytes + size > self._settings.pending_bytes_max:
                raise AuditUnavailableError(
                    f"The audit log {self.key.name} has {self._pending_bytes} bytes waiting for its disk; "
                    f"{self._settings.pending_bytes_max} may.",
                    hint="Nothing crosses until it has caught up; try again.",
                    retry_after_ms=_RETRY_MS,
                )
            refused = self.positions.refuses(headers)
            if refused:
                raise AuditUnavailableError(
                    f"The audit log {self.key.name} takes no more: {refused}.", retry_after_ms=_RETRY_MS
                )
            first = self._size
            self._size += len(encoded)
            self._pending_bytes += size
            self._queue.append(_Waiting(first, encoded, headers, done, loop))
        self._writer.wake()
        return first

    async def append(self, leaves: Sequence[Leaf | EncodedLeaf]) -> int:
        """Append and wait until durable. Returns the first leaf's index. Errors as `append_nowait`.

        Cancelling the wait does not take the leaves back.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()

        def done(first: int, error: AuditUnavailableError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(first)
            else:
                future.set_exception(error)

        self.append_nowait(leaves, done, loop)
        return await future

    def _check_open(self) -> None:
        if (failure := self.failure) is not None:
            raise failure
        self._check_closing()

    def _check_closing(self) -> None:
        if self._closing:
            raise AuditUnavailableError(f"The audit log {self.key.name} is being closed.")

    # Asking

    def status(self) -> TrailStatus:
        """Where the log is; for metrics."""
        with self._lock:
            return TrailStatus(
                self._size,
                self._durable,
                self.checkpoints.newest.size,
                self.checkpoints.cosigned_size,
                self._pending_bytes,
                str(self._failure or self._full or self._hung()),
            )

    @property
    def hung(self) -> str:
        """That its disk does not answer, where that is so; else empty."""
        with self._lock:
            return self._hung()

    def _hung(self) -> str:
        told = self._waits.told(f"The audit log {self.key.name}")
        return f"{told} Nothing crosses until it does; it goes on by itself." if told else ""

    @property
    def failure(self) -> AuditUnavailableError | None:
        """Why the log takes no leaves, where it has stopped or may not be written now: then nothing may cross. For every
        decision, so cheap."""
        return self._failure or self._full or self.held_back()

    @property
    def stopped(self) -> AuditUnavailableError | None:
        """Why the log has stopped; None where it has not."""
        return self._failure

    @property
    def may_reopen(self) -> bool:
        """Whether it has stopped, and may be opened again (`reopen`): where its disk has failed, and not where something is wrong with what it says, or with us."""
        failure = self._failure
        return failure is not None and self._is_passing(failure)

    @property
    def is_over(self) -> bool:
        """Whether it has stopped, and takes nothing any more before a restart."""
        failure = self._failure
        return failure is not None and not self._is_passing(failure)

    def _is_passing(self, failure: AuditUnavailableError) -> bool:
        return self._wal is None or isinstance(failure.__cause__, OSError)

    def held_back(self) -> AuditUnavailableError | None:
        """Why the log may not be written now, though nothing is wrong with it; None where it may."""
        return self._held_back(self._refusal())

    def _held_back(self, why: str) -> AuditUnavailableError | None:
        if not why and self._wal is None and not self._admits:
            why = "This broker is about to go on with it"
        if not why:
            return None
        return AuditUnavailableError(
            f"The audit log {self.key.name} is not written now: {why}.",
            hint="Nothing crosses meanwhile; it goes on by itself.",
            retry_after_ms=_REFUSED_RETRY_MS,
        )

    def checkpoint(self) -> bytes:
        """The newest durable checkpoint, a signed note. Does not block."""
        return self.checkpoints.note()

    @property
    def lacks_newest(self) -> bool:
        """Whether this copy lacks the leaves of its newest entry bundle, which `take` is to bring first."""
        return self._published.lacks_newest

    @property
    def readable_size(self) -> int:
        """How many leaves the checkpoint covers whose files are here: all, but in a copy that lacks its newest entry bundle and has not taken
        those leaves from the other copies yet."""
        # Opening again changes both.
        with self._lock:
            size = self.checkpoints.newest.size
            return size // TILE_WIDTH * TILE_WIDTH if self.lacks_newest else size

    # Checkpoints

    def publish(self, timeout_s: float = 30.0) -> bytes:
        """Checkpoint all that is durable now, without waiting for the timer. Returns the note. Blocks."""
        with self._lock:
            wanted = self._durable
            if self.checkpoints.newest.size >= wanted or (self._wal is None and self._copies is None):
                return self.checkpoint()
            self._publish_wanted = True
            self._unkept = None
        self._publisher.wake()
        self._publisher.wait(
            lambda: self.checkpoints.newest.size >= wanted or self._unpublished() is not None, timeout_s
        )
        if self.checkpoints.newest.size < wanted:
            raise self._unpublished() or AuditUnavailableError(
                f"The audit log {self.key.name} made no checkpoint in {timeout_s} s."
            )
        return self.checkpoint()

    def _unpublished(self) -> FelixError | None:
        """Why no checkpoint is made now; None where one may come."""
        if self._copies is not None:
            return self._failure or self._unkept
        return self._failure or self._full or self._held_back(self._unsigned())

    def leaves(self, start: int = 0) -> Iterator[tuple[int, memoryview]]:
        """Every leaf from index `start` on that is durable at the first step, with its index. Blocks, as `publish` does."""
        self.publish()
        size = self.readable_size
        yield from read_entries(self.files, start, size, size)

    def add_cosigned(self, data: bytes) -> None:
        """Keep a checkpoint of this log that a known witness cosigned, where it says anything new. Blocks on disk, and until it is committed.

        Raises TamperError where a signature does not hold or no known witness signed, RolledBackError where it is
        not a checkpoint of this log as it is, UnavailableError where it is not committed.
        """
        added = self.checkpoints.read_cosigned(data)
        with self._cosigned_lock:
            if self._wal is None:
                copies, merged = self._copies, self.checkpoints.with_cosigned(added)
                if copies is None:
                    raise self.failure or AuditUnavailableError(
                        f"The audit log {self.key.name} is not led here."
                    )
                if merged is None:
                    return
                copies.keep_cosigned(encode_note(merged.note))
                added = merged
            self.checkpoints.add_cosigned(added)

    def take_cosigned(self, notes: Iterable[bytes]) -> list[bytes]:
        """Cosigned checkpoints that are committed on the copies, none larger than the newest that is shown here, in whatever order. Returns those
        with lines of keys that are not known yet. Blocks on disk."""
        with self._cosigned_lock:
            return self.checkpoints.take_cosigned(notes)

    # Copies

    @property
    def copied(self) -> bool:
        """Whether several brokers have copies of it."""
        return self._wal is None

    @property
    def follows(self) -> bool:
        """Whether other brokers sign the log now, or nobody, and this one takes what they have."""
        return self._wal is None and not self._admits

    def reopen(self) -> None:
        """Go on from the files, after the log has stopped, as a start does. What they lack comes from the copies; where there are none, all that was durable is there,
        and what was refused since is cut. Blocks. Raises OSError and as `open`; then it can be tried again."""
        with self._reopening_lock, self._cosigned_lock:
            self._check_closing()
            assert self._failure is not None and self._copies is None
            self._writer.join()
            self._publisher.join()
            if self._in_flight:
                raise AuditUnavailableError(
                    f"The audit log {self.key.name} waits for what became of earlier leaves."
                )
            try:
                self._open_again(self._folder.beside())
            except Exception as error:
                self._fail_again(error)
                raise
            self._start()

    def _open_again(self, folder: Folder) -> None:
        copied = self.copied
        folder.require_there()
        if self._wal is not None:
            with suppress(OSError):
                self._wal.close()
        opening = Opening(folder, self._keys, self.checkpoints.witnesses, self._clock)
        # No checkpoint that was shown may be another one now.
        remembered = () if copied else (self.checkpoint(),)
        state = opening.open(remembered, copied=copied, durable=None if copied else self._durable)
        wal = None if copied else _open_wal(folder, state, self._settings)
        with self._lock:
            self._folder, self._wal = folder, wal
            self.checkpoints.begin(folder, state.checkpoints)
            self._begin(state)

    def _fail_again(self, error: Exception) -> None:
        """It stays stopped, and says why of now."""
        assert self._failure is not None
        failure = AuditUnavailableError(
            f"The audit log {self.key.name} has stopped, and could not be opened again: {error} Nothing crosses.",
            hint=_REOPENED,
        )
        failure.__cause__ = self._failure.__cause__
        with self._lock:
            self._failure = failure

    def check_continues(self, note: bytes) -> None:
        """Raises RolledBackError unless the log continues a checkpoint that was signed before, TamperError where it did not sign that. Blocks."""
        self.checkpoints.check_continues(self.checkpoints.read(note).checkpoint)

    def keep_document(self, document: bytes) -> None:
        """Keep a document beside the log where it is too long for its leaf, before that is appended. Blocks. Raises OSError,
        UnavailableError."""
        if not stands_beside(document):
            return
        copies = self._copies
        if self._wal is None:
            if copies is None:
                raise self.failure or AuditUnavailableError(f"The audit log {self.key.name} is not led here.")
            copies.keep_document(document)
        keep_document(self._folder, document)

    def take(self, first: int, leaves: Sequence[bytes]) -> None:
        """Leaves that are committed on the copies, and that this one has not, from index `first` on. Nobody appends here meanwhile."""
        assert self._wal is None
        headers = [read_header(leaf) for leaf in leaves]
        with self._lock:
            assert first == self._durable and not self._admits, (first, self._durable)
            self._take_in(first, leaves, headers)
            self._size = self._durable
            self._pending_bytes += sum(map(len, leaves))
        self._publisher.wake()

    def settled(self, timeout_s: float = 60.0) -> None:
        """Return once all that was taken is in the tree. Blocks. Raises AuditUnavailableError."""
        self._publisher.wait(lambda: self._is_settled() or self._failure is not None, timeout_s)
        if self._failure is not None:
            raise self._failure

    def _is_settled(self) -> bool:
        size = self._published.size
        return size >= self._durable and (size < self.checkpoints.newest.size or not self.lacks_newest)

    def show(self, note: bytes, timeout_s: float = 60.0) -> None:
        """Take over the checkpoint that another broker has signed over exactly the leaves that were taken. Blocks.

        Raises TamperError where the log did not sign it, AuditUnavailableError where it is not of these leaves: then the trail has stopped.
        """
        signed = self.checkpoints.read(note)
        size = signed.checkpoint.size
        with self._lock:
            assert self._copies is None and size == self._durable, (size, self._durable)
            self._shown = signed
        self._publisher.wake()
        self._publisher.wait(lambda: self._shown is None or self._failure is not None, timeout_s)
        if self._failure is not None:
            raise self._failure
        with self._lock:
            # One that is late must not meet later leaves: it would be held against them.
            is_late, self._shown = self._shown is not None, None
        if is_late:
            raise AuditUnavailableError(f"The audit log {self.key.name} was not written in {timeout_s} s.")

    def lead(self, copies: Copies) -> None:
        """Sign from now on, over what is committed: this broker leads the copies, and has taken all that they have."""
        with self._lock:
            assert self._copies is None and not self.lacks_newest
            self._copies, self._unkept, self._lost = copies, None, False
            self._size = self._durable

    def admit(self) -> None:
        """Append from now on."""
        with self._lock:
            assert self._copies is not None
            self._admits = True
            # Nobody is offered less than whoever led before has shown.
            self.checkpoints.offer_newest()

    def follow(self) -> None:
        """Append and sign nothing any more: another broker leads the copies, or nobody."""
        with self._lock:
            self._copies, self._admits = None, False
        self._writer.wake()

    @property
    def files(self) -> Folder:
        """The log's files, for finding leaves in it (audit.proof.find_leaves)."""
        return self._folder

    def end_waiting(self) -> None:
        """The process ends: what waits for room on a full disk is refused from now on, so that nobody who closes before the log waits for it."""
        with self._lock:
            self._waits_for_room = False
        self._writer.wake()

    def close(self) -> None:
        """Make everything accepted durable, checkpoint it, and let go of the folder. Blocks. Safe to call twice."""
        with self._reopening_lock, self._lock:
            self._closing = True
        self._writer.wake()
        self._writer.join()
        self._publisher.join()
        if self._wal is not None:
            self._wal.close()
        self._folder_lock.release()

    # The writer

    def _write(self) -> float | None:
        """A step: make all that waits durable, and say so."""
        with self._lock:
            taken, self._queue = self._unwritten + self._queue, []
            self._unwritten, ends = [], self._closing and not taken
        if self._failure is None and taken and not self._write_group(taken):
            self._unwritten = taken
            return FULL_RETRY_MS / 1000
        if self._failure is None and not ends:
            with self._lock:
                more = bool(self._queue) or self._closing
            return 0.0 if more else math.inf
        if self._failure is not None:
            with self._lock:
                taken += self._queue
                self._queue = []
            _call_done(taken, self._failure)
        with self._lock:
            self._writer_ended = True
        self._publisher.wake()
        return None

    def _write_group(self, taken: list[_Waiting]) -> bool:
        """False where the disk has no room for it yet."""
        if self._wal is None:
            self._hand_over(taken)
            taken.clear()
            return True
        try:
            with self._waits.asked(_LEAVES):
                self._wal.append([waiting.leaves for waiting in taken])
        except WalFullError as error:
            if self._closing or not self._waits_for_room:
                self._fail("it ends while its disk is full", error)
                return True
            self._wait_for_room(_LEAVES, error)
            return False
        except Exception as error:  # a leaf that may not be durable must never count
            self._fail("its disk failed", error)
            return True
        self._has_room(_LEAVES)
        try:
            with self._lock:
                for waiting in taken:
                    self._take_in(waiting.first, waiting.leaves, waiting.headers)
        except Exception as error:  # a writer that ended without a word would keep everybody waiting
            self._fail("its positions failed", error)
            return True
        self._publisher.wake()
        _call_done(taken, None)
        taken.clear()
        return True

    def _take_in(self, first: int, leaves: Sequence[bytes], headers: Sequence[Header | None]) -> None:
        """They are durable. Under the lock."""
        self.positions.apply(first, headers)
        self._synced.extend(zip(leaves, headers, strict=True))
        self._durable = first + len(leaves)

    def _hand_over(self, taken: list[_Waiting]) -> None:
        """To whoever leads the copies."""
        for waiting in taken:
            with self._lock:
                copies = self._copies
                self._in_flight += 1
            if copies is None:
                self._answered(
                    waiting, AuditUnavailableError(f"The audit log {self.key.name} is not led here any more.")
                )
            else:
                copies.append(waiting.first, waiting.leaves, partial(self._answered, waiting))

    def _answered(self, waiting: _Waiting, error: FelixError | None) -> None:
        """What became of an append to the copies. One that failed may be there all the same: whoever leads next takes it from them."""
        refused: AuditUnavailableError | None = None
        if error is not None:
            refused = AuditUnavailableError(
                f"The audit log {self.key.name} did not take the leaf, or it is not known whether it did: {error}",
                hint="Ask again: what was written is recognised.",
                retry_after_ms=_RETRY_MS,
            )
            refused.__cause__ = error
        try:
            with self._lock:
                self._in_flight -= 1
                self._lost = self._lost or error is not None
                if error is None and waiting.first == self._durable:
                    self._take_in(waiting.first, waiting.leaves, waiting.headers)
                else:
                    self._pending_bytes -= sum(map(len, waiting.leaves))
                if self._lost and not self._in_flight and not self._queue:
                    self._lost, self._size = False, self._durable
        except Exception as failure:  # whoever appended would wait for ever
            self._fail("its positions failed", failure)
            refused = self._failure
        self._publisher.wake()
        _call_done([waiting], refused)

    def _fail(self, why: str, error: BaseException) -> None:
        failure = AuditUnavailableError(
            f"The audit log {self.key.name} has stopped: {why} ({error}). Nothing crosses.",
            hint=_REOPENED
            if isinstance(error, OSError)
            else "Repair the cause and start again; what was acknowledged is kept.",
        )
        failure.__cause__ = error
        with self._lock:
            self._failure = self._failure or failure
        self._writer.wake()
        self._publisher.wake()

    def _wait_for_room(self, what: str, error: BaseException) -> None:
        """The disk had none for `what`, or the process too many files open: it is tried again."""
        with self._lock:
            self._lacking_room.add(what)
            if self._full is not None:
                # One sentence for as long as it lasts: whoever asks again and again says it once.
                return
            self._full = AuditUnavailableError(
                f"The audit log {self.key.name} waits for {'more files to open' if _is_exhausted(error) else 'room on its disk'} ({error}). Nothing crosses.",
                hint="Let the process open more files (LimitNOFILE= of its service, ulimit -n); it goes on by itself."
                if _is_exhausted(error)
                else "Make room; it goes on by itself.",
                retry_after_ms=FULL_RETRY_MS,
            )
            is_said = self._full_told.begins()
        if is_said:
            log.error("%s", self._full)

    def _has_room(self, what: str) -> None:
        if what not in self._lacking_room:
            return
        with self._lock:
            self._lacking_room.discard(what)
            if self._lacking_room:
                return
            self._full = None
            is_said = self._full_told.ends()
        if is_said:
            log.warning("the audit log %s has room again, and goes on", self.key.name)

    # The publisher

    def _publish_due(self) -> float | None:
        """A step: what is durable into the tree, and a checkpoint where one is due."""
        try:
            wait_s = self._take_and_publish()
            self._has_room(_TREE)
            return wait_s
        except OSError as error:
            if self._wal is None or self._writer_ended or not lacks_resources(error):
                self._fail("it cannot be checkpointed", error)
                return None
            # What was to be signed is, as soon as it can be.
            self._checkpoint_due = self._clock.monotonic() if self._published.uncovered else None
            self._wait_for_room(_TREE, error)
            return FULL_RETRY_MS / 1000
        except Exception as error:  # whatever it was, no checkpoint is better than a wrong one
            self._fail("it cannot be checkpointed", error)
            return None

    def _take_and_publish(self) -> float | None:
        with self._lock:
            taken, self._synced = self._synced, deque()
            wanted, self._publish_wanted = self._publish_wanted, False
            if self._failure is not None:
                return None
            ended, shown, copies = self._writer_ended, self._shown, self._copies
        self._take_all(taken)
        if shown is not None:
            self._write_shown(shown)
        uncovered = self._published.uncovered
        if uncovered and self._checkpoint_due is None:
            self._put_off()
        due_s = self._checkpoint_due
        overdue = due_s is not None and self._clock.monotonic() >= due_s
        if uncovered and (wanted or overdue or ended or uncovered >= self._settings.checkpoint_leaves):
            # Who leads copies commits the checkpoint on them, so that no other reason to wait counts there.
            if (self._unsigned() if self._wal is not None else copies is None) or not self._publish(copies):
                # Looked at again after another interval, or when the log is opened again.
                self._put_off()
            else:
                self._checkpoint_due = None
        if ended and not taken:
            self._published.write_snapshot()
            return None
        if ended:
            return 0.0
        return math.inf if self._checkpoint_due is None else self._checkpoint_due - self._clock.monotonic()

    def _take_all(self, taken: deque[tuple[bytes, Header | None]]) -> None:
        """Into the tree; what is not there when this raises is taken again."""
        begin, count = self._published.size, len(taken)
        try:
            self._published.write_full()
            for leaf, header in taken:
                with self._waits.asked(_TREE):
                    self._published.take(leaf, header)
        except OSError:
            count = self._published.size - begin
            raise
        finally:
            with self._lock:
                self._pending_bytes -= sum(len(leaf) for leaf, _ in islice(taken, count))
                self._synced.extendleft(reversed(list(islice(taken, count, None))))

    def _put_off(self) -> None:
        self._checkpoint_due = self._clock.monotonic() + self._settings.checkpoint_interval_ms / 1000

    def _publish(self, copies: Copies | None) -> bool:
        """Sign what is in the tree, and show it; False where the copies did not take the checkpoint, which nobody is shown then."""
        with self._waits.asked(_TREE):
            signed = self._published.sign(self._clock.now_ms() // 1000)
        size = signed.checkpoint.size
        if copies is not None:
            try:
                copies.keep_note(encode_note(signed.note))
            except (FelixError, TimeoutError) as error:
                with self._lock:
                    self._unkept = (
                        error
                        if isinstance(error, FelixError)
                        else UnavailableError(f"The checkpoint of {size} leaves was not committed in time.")
                    )
                log.warning(
                    "%s: the checkpoint of %d leaves is not committed: %s", self.key.name, size, error
                )
                return False
        with self._waits.asked(_TREE):
            self._published.write(signed)
        return True

    def _write_shown(self, signed: SignedCheckpoint) -> None:
        self._published.write_signed_elsewhere(signed)
        self._checkpoint_due = None
        with self._lock:
            if self._shown is signed:
                self._shown = None


def _open_wal(folder: Folder, state: Opened, settings: TrailSettings) -> Wal:
    return Wal(
        folder.path / WAL_FOLDER,
        state.tree.size,
        folder.storage,
        segment_bytes_max=settings.segment_bytes_max,
        require_there=folder.require_there,
    )


def _call_done(taken: list[_Waiting], error: AuditUnavailableError | None) -> None:
    """Call back: one wake-up per event loop, however many appends it waits for."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Waiting]] = {}
    own = []
    for waiting in taken:
        if waiting.loop is None:
            own.append(waiting)
        else:
            by_loop.setdefault(waiting.loop, []).append(waiting)
    _run_done(own, error)
    for loop, group in by_loop.items():
        # A loop that was closed meanwhile waits for nothing any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_run_done, group, error)


def _run_done(group: list[_Waiting], error: AuditUnavailableError | None) -> None:
    """One caller's mistake must not keep the others waiting, nor end the writer."""
    for waiting in group:
        try:
            waiting.done(waiting.first, error)
        except Exception:
            log.exception("the receiver of an append's answer failed")


def _is_exhausted(error: BaseException) -> bool:
    return isinstance(error, OSError) and is_exhausted(error)
