"""The durable trail: one audit log being written. Append leaves, get them durable, tiled and checkpointed.

Two workers (felix.runtime.port) behind one lock, each with a thread on a real machine, nothing of it on an event loop:

- the *writer* takes all that waits, appends it to the write-ahead file with one `fdatasync`, and calls back;
- the *publisher* takes what is durable into the tree, writes tiles and entry bundles, and on a timer or a count a
  checkpoint. Then the write-ahead segments that full bundles have replaced are removed.

Invariants:
- an append's leaves are durable before its `done` is called; they are all there after a crash, or none;
- indexes are given in the order of `append_nowait`, and never again to other leaves once durable;
- tiles and bundles are durable, names included, before the checkpoint that covers them; a checkpoint is durable
  before anybody is shown it; every checkpoint continues the ones before;
- what waits is bounded by `pending_bytes_max`; beyond it, and after any failure of disk or signer, an append is
  refused with AuditUnavailableError, so that nothing crosses. A failed sync is never retried.
- opening never drops a leaf below a checkpoint: it recovers, or raises CorruptionError (with ROLLED_BACK where
  the log is shorter than what was signed);
- a leaf that cannot be read (none is written any more) stays what it is: hashed, in the tree, named in `unreadable`.
  It moves no position, and stops neither opening nor appending.

A log that several brokers have copies of (`copied`) has no write-ahead file: its leaves are committed elsewhere, and the trail's files follow
(region.audit_log). There
- an append counts, and is in the tree, once it is committed on the copies: `take` brings what others wrote, `Copies` what is appended here;
- only who leads the copies signs; its checkpoint is committed on them before anybody is shown it, and the others write the same one (`show`);
- a checkpoint whose root is another than that of the leaves here stops the trail.

Callers: bridge (egress), region (ingress). `open` and `close`, `consistency_proof` and `add_cosigned` block.
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
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from audit.checkpoint import Checkpoint, SignedCheckpoint, open_checkpoint
from audit.document_disk import keep_document
from audit.document_leaf import stands_beside
from audit.errors import VERIFY_HINT, AuditUnavailableError, RolledBackError
from audit.leaf import EncodedLeaf, Header, Leaf, encode_for_log, read_header
from audit.merkle import EMPTY_ROOT, TILE_HEIGHT, TILE_WIDTH, Tree, leaf_hash, root_from_nodes
from audit.merkle import consistency_proof as prove_consistency
from audit.note import Note, NoteSigner, VerifierKey, encode_note, parse_note
from audit.position import Crossing, LinkShard, Positions, ShardName
from audit.range_index import INDEX_PATH, ROW_BYTES, bundle_rows, bundles_indexed, cut_index
from audit.tile import (
    CHECKPOINT_PATH,
    COSIGNED_PATH,
    WAL_FOLDER,
    WITNESSED_PATH,
    TileHashes,
    read_bundle,
    read_entries,
    read_tree,
)
from audit.tile_disk import Folder
from audit.tree_disk import TreeFiles
from audit.unjudged import Unjudged
from audit.wal_disk import SEGMENT_BYTES_MAX, Recovery, Torn, Wal, segment_name, segments
from felix.errors import Code, CorruptionError, FelixError, RequestError, TamperError, UnavailableError
from felix.runtime.port import Clock, Runtime
from felix.runtime.real import REAL
from felix.storage.disk import SHARED_FILES
from felix.storage.port import Files, FolderLock

log = logging.getLogger("felix.audit.trail")

APPEND_LEAVES_MAX: Final = 4_096
"""Leaves of one append: a batch of 65,536 records has about 75."""
SNAPSHOT_LEAVES: Final = 16_384
"""Opening reads at most about so many leaves for the positions after a crash."""
SNAPSHOT_PATH: Final = "positions"
FOLDERS_ABOVE: Final = 3
"""How many folders above a log's own may be as new as the log: `bridges/NAME/egress` in a region's folder."""
ROUND_MS: Final = 5_000
"""How long all witnesses are shown the same checkpoint, so that one note collects their cosignatures; a bridge asks
every 3 s. Once all that are expected have cosigned, the next one may follow at once."""
COPIED_APPEND_BYTES_MAX: Final = 16_000_000
"""Of one append to a log that has copies: a batch of 65,536 records has 4.5 MB of leaves."""
COPIED_PATH: Final = "copied"
"""Stands in the folder of a log that several brokers have copies of: nobody writes into it alone."""
_RETRY_MS: Final = 50
_REFUSED_RETRY_MS: Final = 1_000

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
        """A checkpoint that a witness has cosigned."""

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
        signers: tuple[NoteSigner, ...],
        earlier: tuple[VerifierKey, ...],
        settings: TrailSettings,
        state: _Opened,
        wal: Wal | None,
        refusal: Callable[[], str],
        runtime: Runtime,
    ) -> None:
        self._folder, self._folder_lock, self._signers, self._settings = folder, lock, signers, settings
        self._earlier = earlier
        self._known_keys = (*self.keys, *earlier)
        self._witnesses = state.witnesses
        self._wal = wal
        self._refusal = refusal
        self._runtime, self._clock = runtime, runtime.clock
        self.recovered: Torn | None = state.torn
        """what opening cut from the write-ahead file, if anything"""
        self._lock = threading.Lock()
        # Checkpoint files: written by the publisher and by add_cosigned.
        self._files_lock = threading.Lock()
        self._cosigners_expected = 1
        self._closing = False
        self._begin(state)

    def _begin(self, state: _Opened) -> None:
        # All below is guarded by _lock, down to the publisher's own.
        self._queue: list[_Waiting] = []
        self._synced: deque[tuple[bytes, Header | None]] = deque()
        self._size = self._durable = state.tree.size
        self._pending_bytes = 0
        self._positions = state.positions
        self._current, self._cosigned = state.checkpoint, state.cosigned
        self._offered, self._offered_at = state.checkpoint, self._clock.monotonic() - ROUND_MS / 1000
        self._witnessed = state.witnessed
        self._publish_wanted = state.tree.size > state.checkpoint.checkpoint.size
        self._writer_ended = False
        self._failure: AuditUnavailableError | None = None
        # Of a log that has copies.
        self._copies: Copies | None = None
        self._admits = False
        self._in_flight = 0
        self._lost = False
        self._shown: SignedCheckpoint | None = None
        self._unkept: FelixError | None = None
        self._lacks_newest = state.tree.size < state.checkpoint.checkpoint.size

        # The publisher's own: nobody else touches these after the workers run, but for asking how many leaves the tree has.
        self._checkpoint_due: float | None = None
        self._tree = state.tree
        self._tree_positions = Positions.decode(state.positions.encode(0, b""))[0]
        self._snapshot_size = state.snapshot_size

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
        files: Files = SHARED_FILES,
        runtime: Runtime = REAL,
        copied: bool = False,
    ) -> Trail:
        """Open the log in this folder, or begin one; recover what a crash left. Blocks.

        `signer`: the log's key; its name is the log's origin. `also`: further keys of the same name that sign each
        checkpoint beside it (ML-DSA-44). `earlier`: keys that signed before these, each up to its size. `cosigned`: notes that
        witnesses remember of this log; a log that does not reach them, or differs, is not opened.
        `refusal`: why nothing may be appended or signed now, empty where it may: whoever else may write a log of this name
        meanwhile would make another history of it. Asked from several threads, often. `copied`: several brokers have copies of it; until
        `lead`, it takes what they have and signs nothing.

        Raises RequestError(CONFLICT) where another process has it open, or it is of the other kind, CorruptionError where leaves are damaged,
        RolledBackError where it is shorter than what was signed, TamperError where files do not fit each other.
        """
        settings = settings or TrailSettings()
        signers = (signer, *also)
        assert len({each.key.name for each in signers}) == 1, "a log's keys have one name"
        before = tuple(key for key in earlier if all(key != each.key for each in signers))
        try:
            lock = files.lock(path)
        except UnavailableError as error:
            raise RequestError(
                f"The audit log {path} is open in another process.",
                code=Code.CONFLICT,
                hint="Stop that one first; a log has one writer.",
            ) from error
        try:
            folder = Folder(path, files)
            _require_kind(folder, copied=copied)
            opening = _Opening(folder, signers, before, tuple(witnesses), runtime.clock)
            state = opening.open(tuple(cosigned), copied=copied)
            wal = None
            if not copied:
                wal = Wal(
                    path / WAL_FOLDER, state.tree.size, files, segment_bytes_max=settings.segment_bytes_max
                )
            trail = cls(folder, lock, signers, before, settings, state, wal, refusal, runtime)
        except BaseException:
            lock.release()
            raise
        if trail.unreadable:
            log.error(
                "%s has %d leaves that cannot be read, the first is %d: `felix audit verify` lists them.",
                trail.key.name, len(trail.unreadable), trail.unreadable[0],
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
        return self._signers[0].key

    @property
    def keys(self) -> tuple[VerifierKey, ...]:
        """Every key that signs the log's checkpoints."""
        return tuple(signer.key for signer in self._signers)

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
            refused = self._positions.refuses(headers)
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
        if self._closing:
            raise AuditUnavailableError(f"The audit log {self.key.name} is being closed.")

    # Asking

    def status(self) -> TrailStatus:
        """Where the log is; for metrics."""
        with self._lock:
            return TrailStatus(
                self._size,
                self._durable,
                self._current.checkpoint.size,
                0 if self._cosigned is None else self._cosigned.checkpoint.size,
                self._pending_bytes,
                "" if self._failure is None else str(self._failure),
            )

    @property
    def failure(self) -> AuditUnavailableError | None:
        """Why the log takes no leaves, where it has stopped or may not be written now: then nothing may cross. For every
        decision, so cheap."""
        return self._failure or self.held_back()

    @property
    def stopped(self) -> AuditUnavailableError | None:
        """Why the log has stopped; None where it has not. A log that has copies can be opened again (`reopen`)."""
        return self._failure

    def held_back(self) -> AuditUnavailableError | None:
        """Why the log may not be written now, though nothing is wrong with it; None where it may."""
        why = self._refusal()
        if not why and self._wal is None and not self._admits:
            why = "This broker is about to go on with it"
        if not why:
            return None
        return AuditUnavailableError(
            f"The audit log {self.key.name} is not written now: {why}.",
            hint="Nothing crosses meanwhile; it goes on by itself.",
            retry_after_ms=_REFUSED_RETRY_MS,
        )

    def last_intent(self, key: LinkShard) -> Crossing | None:
        """The newest durable INTENT of this link shard."""
        with self._lock:
            return self._positions.last_intent(key)

    def last_ack(self, key: LinkShard) -> Crossing | None:
        """The newest durable ACK of this link shard."""
        with self._lock:
            return self._positions.last_ack(key)

    def arrived_below(self, shard: ShardName, incarnation: bytes) -> int:
        """`Positions.arrived_below` of what is durable."""
        with self._lock:
            return self._positions.arrived_below(shard, incarnation)

    def newest_incarnation(self, shard: ShardName) -> bytes:
        """`Positions.newest_incarnation` of what is durable."""
        with self._lock:
            return self._positions.newest_incarnation(shard)

    def unanswered(self, key: LinkShard) -> tuple[Crossing, ...]:
        """Durable INTENTs without an ACK, oldest first."""
        with self._lock:
            return self._positions.unanswered(key)

    def charged_bytes(self, grant_id: str) -> int:
        """Bytes of records announced (egress) or appended (ingress) under this grant, in durable leaves."""
        with self._lock:
            return self._positions.charged_bytes(grant_id)

    @property
    def unreadable(self) -> tuple[int, ...]:
        """Indexes of leaves that cannot be read; whoever runs the log must be told of them."""
        with self._lock:
            return tuple(self._positions.unreadable)

    def link_shards(self) -> list[LinkShard]:
        """Every link shard that this log has a position of."""
        with self._lock:
            return self._positions.keys()

    def checkpoint(self) -> bytes:
        """The newest durable checkpoint, a signed note. Does not block."""
        with self._lock:
            return encode_note(self._current.note)

    def consistency_proof(self, old: int, new: int) -> list[bytes]:
        """The proof that `new` leaves continue the first `old`; `new` is the size of a checkpoint. Blocks on disk.

        Raises RequestError(OFFSET_OUT_OF_RANGE).
        """
        with self._lock:
            size = self._current.checkpoint.size
        if not 0 <= old <= new <= size:
            raise RequestError(
                f"The log has a checkpoint of {size} leaves; there is no proof from {old} to {new}.",
                code=Code.OFFSET_OUT_OF_RANGE,
            )
        return prove_consistency(old, new, TileHashes(self._folder, new))

    @property
    def lacks_newest(self) -> bool:
        """Whether this copy lacks the leaves of its newest entry bundle, which `take` is to bring first."""
        return self._lacks_newest

    @property
    def readable_size(self) -> int:
        """How many leaves the checkpoint covers whose files are here: all, but in a copy that lacks its newest entry bundle and has not taken
        those leaves from the other copies yet."""
        with self._lock:
            size = self._current.checkpoint.size
            return size // TILE_WIDTH * TILE_WIDTH if self._lacks_newest else size

    # Checkpoints

    def publish(self, timeout_s: float = 30.0) -> bytes:
        """Checkpoint all that is durable now, without waiting for the timer. Returns the note. Blocks."""
        with self._lock:
            wanted = self._durable
            if self._current.checkpoint.size >= wanted or (self._wal is None and self._copies is None):
                return encode_note(self._current.note)
            self._publish_wanted = True
            self._unkept = None
        self._publisher.wake()
        self._publisher.wait(lambda: self._covers(wanted) or self._unpublished() is not None, timeout_s)
        if not self._covers(wanted):
            raise self._unpublished() or AuditUnavailableError(
                f"The audit log {self.key.name} made no checkpoint in {timeout_s} s."
            )
        return self.checkpoint()

    def _unpublished(self) -> FelixError | None:
        """Why no checkpoint is made now; None where one may come."""
        return self.failure if self._copies is None else self._failure or self._unkept

    def _covers(self, size: int) -> bool:
        return self._current.checkpoint.size >= size

    def leaves(self, start: int = 0) -> Iterator[tuple[int, memoryview]]:
        """Every leaf from index `start` on that is durable at the first step, with its index. Blocks, as `publish` does."""
        self.publish()
        size = self.readable_size
        yield from read_entries(self.files, start, size, size)

    def expect_cosigners(self, number: int) -> None:
        """How many cosigners a checkpoint is shown to before the next one follows it (see `offer`)."""
        with self._lock:
            self._cosigners_expected = max(1, number)

    def offer(self, at_least: int = 0) -> bytes:
        """The checkpoint that witnesses are to cosign now: the same for all of them until the expected number has, or
        ROUND_MS went by, or one of them has cosigned `at_least` leaves already. Does not block, makes no checkpoint."""
        with self._lock:
            offered, current = self._offered, self._current
            if offered.note.text != current.note.text:
                held = self._cosigned
                count = len(cosigners(held)) if held and held.note.text == offered.note.text else 0
                over = (self._clock.monotonic() - self._offered_at) * 1000 >= ROUND_MS
                # A size that the log does not have is no reason: nobody can end rounds with made-up numbers.
                outrun = offered.checkpoint.size < at_least <= current.checkpoint.size
                if over or count >= self._cosigners_expected or outrun:
                    self._offered, self._offered_at = current, self._clock.monotonic()
            return encode_note(self._offered.note)

    def is_cosigned_by(self, data: bytes, keys: Iterable[VerifierKey]) -> bool:
        """True where the log holds a cosignature of one of these keys for this checkpoint note of its own."""
        text, known = data.decode().rpartition("\n\n")[0] + "\n", set(keys)
        with self._lock:
            held = self._cosigned
        return held is not None and held.note.text == text and any(by.key in known for by in held.cosigned)

    def cosigned(self) -> tuple[SignedCheckpoint, ...]:
        """Checkpoints that known witnesses cosigned, for whoever asks for a quorum: the newest one, and the newest one
        that has more cosignatures."""
        with self._lock:
            return tuple(held for held in (self._cosigned, self._witnessed) if held is not None)

    def add_cosigned(self, data: bytes) -> None:
        """Keep a checkpoint of this log that a known witness cosigned. Blocks on disk.

        Raises TamperError where a signature does not hold or no known witness signed, RolledBackError where it is
        not a checkpoint of this log as it is.
        """
        added = open_checkpoint(data, self._known_keys, self._witnesses)
        if not added.cosigned:
            raise TamperError("That checkpoint carries no cosignature of a known witness.")
        # Lines under unknown names are whatever the sender chose: they are not kept.
        added = added._replace(note=added.known_note())
        if (copies := self._copies) is not None:
            _check_continues(self._folder, self._current.checkpoint, added.checkpoint)
            copies.keep_cosigned(encode_note(added.note))
        with self._files_lock:
            with self._lock:
                current, cosigned = self._current, self._cosigned
            _check_continues(self._folder, current.checkpoint, added.checkpoint)
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
            if added.note.text == current.note.text:
                current = self._merge(current, added)
                self._folder.write(CHECKPOINT_PATH, encode_note(current.note))
            self._folder.flush()
            with self._lock:
                self._current, self._cosigned = current, added

    def _merge(self, to: SignedCheckpoint, more: SignedCheckpoint) -> SignedCheckpoint:
        ids = {(by.key.name, by.key.key_id) for by in more.cosigned}
        lines = [line for line in more.note.signatures if (line.name, line.key_id) in ids]
        return open_checkpoint(encode_note(to.note.with_signatures(lines)), self._known_keys, self._witnesses)

    def trust_witnesses(self, keys: Iterable[VerifierKey]) -> None:
        """Take more witnesses in: their cosignatures count from now on."""
        with self._lock:
            self._witnesses = tuple(dict.fromkeys((*self._witnesses, *keys)))

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
        """Go on from the files, after the log has stopped, as a start does: what they lack comes from the copies. Blocks. Raises OSError and as `open`;
        then it can be tried again."""
        assert self._wal is None and self._failure is not None and self._copies is None
        self._writer.join()
        self._publisher.join()
        if self._in_flight:
            raise AuditUnavailableError(
                f"The audit log {self.key.name} waits for what became of earlier leaves."
            )
        folder = Folder(self._folder.path, self._folder.storage)
        opening = _Opening(folder, self._signers, self._earlier, self._witnesses, self._clock)
        state = opening.open((), copied=True)
        with self._lock:
            self._folder = folder
            self._begin(state)
        self._start()

    def check_holds(self, size: int, root: bytes) -> None:
        """Raises RolledBackError unless the log's first `size` leaves have this root. Blocks."""
        _check_continues(self._folder, self._current.checkpoint, Checkpoint(self.key.name, size, root))

    def check_continues(self, note: bytes) -> None:
        """Raises RolledBackError unless the log continues a checkpoint that was signed before, TamperError where it did not sign that. Blocks."""
        before = open_checkpoint(note, self._known_keys, self._witnesses).checkpoint
        _check_continues(self._folder, self._current.checkpoint, before)

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
        size = self._tree.size
        return size >= self._durable and (size < self._current.checkpoint.size or not self._lacks_newest)

    def show(self, note: bytes, timeout_s: float = 60.0) -> None:
        """Take over the checkpoint that another broker has signed over exactly the leaves that were taken. Blocks.

        Raises TamperError where the log did not sign it, AuditUnavailableError where it is not of these leaves: then the trail has stopped.
        """
        signed = open_checkpoint(note, self._known_keys, self._witnesses)
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
            assert self._copies is None and not self._lacks_newest
            self._copies, self._unkept, self._lost = copies, None, False
            self._size = self._durable

    def admit(self) -> None:
        """Append from now on."""
        with self._lock:
            assert self._copies is not None
            self._admits = True
            # Nobody is offered less than whoever led before has shown.
            self._offered, self._offered_at = self._current, self._clock.monotonic()

    def follow(self) -> None:
        """Append and sign nothing any more: another broker leads the copies, or nobody."""
        with self._lock:
            self._copies, self._admits = None, False
        self._writer.wake()

    @property
    def files(self) -> Folder:
        """The log's files, for finding leaves in it (audit.proof.find_leaves)."""
        return self._folder

    def close(self) -> None:
        """Make everything accepted durable, checkpoint it, and let go of the folder. Blocks. Safe to call twice."""
        with self._lock:
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
            taken, self._queue = self._queue, []
            ends = self._closing and not taken
        if self._failure is None and taken:
            self._write_group(taken)
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

    def _write_group(self, taken: list[_Waiting]) -> None:
        if self._wal is None:
            self._hand_over(taken)
            taken.clear()
            return
        try:
            self._wal.append([waiting.leaves for waiting in taken])
        except Exception as error:  # a leaf that may not be durable must never count
            self._fail("its disk failed", error)
            return
        try:
            with self._lock:
                for waiting in taken:
                    self._take_in(waiting.first, waiting.leaves, waiting.headers)
        except Exception as error:  # a writer that ended without a word would keep everybody waiting
            self._fail("its positions failed", error)
            return
        self._publisher.wake()
        _call_done(taken, None)
        taken.clear()

    def _take_in(self, first: int, leaves: Sequence[bytes], headers: Sequence[Header | None]) -> None:
        """They are durable. Under the lock."""
        for at, (leaf, header) in enumerate(zip(leaves, headers, strict=True)):
            self._positions.apply(first + at, header)
            self._synced.append((leaf, header))
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
            hint="Repair the cause and start again; what was acknowledged is kept.",
        )
        failure.__cause__ = error
        with self._lock:
            self._failure = self._failure or failure
        self._writer.wake()
        self._publisher.wake()

    # The publisher

    def _publish_due(self) -> float | None:
        """A step: what is durable into the tree, and a checkpoint where one is due."""
        try:
            return self._take_and_publish()
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
        for leaf, header in taken:
            self._tree_positions.apply(self._tree.size, header)
            self._tree.take(leaf, header)
            if self._lacks_newest and self._tree.size == self._current.checkpoint.size:
                self._restore_newest()
        if shown is not None:
            self._write_shown(shown)
        uncovered = max(0, self._tree.size - self._current.checkpoint.size)
        if uncovered and self._checkpoint_due is None:
            self._put_off()
        with self._lock:
            self._pending_bytes -= sum(len(leaf) for leaf, _ in taken)
        due_s = self._checkpoint_due
        overdue = due_s is not None and self._clock.monotonic() >= due_s
        if uncovered and (wanted or overdue or ended or uncovered >= self._settings.checkpoint_leaves):
            # Who leads copies commits the checkpoint on them, so that no other reason to wait counts there.
            if (self._refusal() if self._wal is not None else copies is None) or not self._publish(copies):
                # Looked at again after another interval, or when the log is opened again.
                self._put_off()
            else:
                self._checkpoint_due = None
        if ended and not taken:
            self._write_snapshot()
            return None
        if ended:
            return 0.0
        return math.inf if self._checkpoint_due is None else self._checkpoint_due - self._clock.monotonic()

    def _put_off(self) -> None:
        self._checkpoint_due = self._clock.monotonic() + self._settings.checkpoint_interval_ms / 1000

    def _publish(self, copies: Copies | None) -> bool:
        """Sign what is in the tree, and show it; False where the copies did not take the checkpoint, which nobody is shown then."""
        tree = self._tree
        tree.write_edge()
        checkpoint = Checkpoint(self.key.name, tree.size, tree.root())
        signed = sign_checkpoint(checkpoint, self._signers, self._clock.now_ms() // 1000)
        if copies is not None:
            try:
                copies.keep_note(encode_note(signed.note))
            except (FelixError, TimeoutError) as error:
                with self._lock:
                    self._unkept = (
                        error
                        if isinstance(error, FelixError)
                        else UnavailableError(
                            f"The checkpoint of {tree.size} leaves was not committed in time."
                        )
                    )
                log.warning(
                    "%s: the checkpoint of %d leaves is not committed: %s", self.key.name, tree.size, error
                )
                return False
        self._write_checkpoint(signed)
        return True

    def _restore_newest(self) -> None:
        """The leaves of the newest bundle came from the copies again."""
        self._check_root(self._current.checkpoint)
        self._tree.write_edge()
        with self._lock:
            self._lacks_newest = False

    def _check_root(self, checkpoint: Checkpoint) -> None:
        if (checkpoint.size, checkpoint.root) != (self._tree.size, self._tree.root()):
            raise RolledBackError(
                f"The leaves of {self.key.name} here differ from what was signed at {checkpoint.size} leaves.",
                hint=VERIFY_HINT,
            )

    def _write_shown(self, signed: SignedCheckpoint) -> None:
        self._check_root(signed.checkpoint)
        self._tree.write_edge()
        self._write_checkpoint(signed)
        self._checkpoint_due = None
        with self._lock:
            if self._shown is signed:
                self._shown = None

    def _write_checkpoint(self, signed: SignedCheckpoint) -> None:
        tree, folder = self._tree, self._folder
        with self._files_lock:
            folder.write(CHECKPOINT_PATH, encode_note(signed.note))
            folder.flush()
            with self._lock:
                self._current = signed
        tree.tidy()
        if self._wal is not None:
            self._wal.remove_below(tree.size // TILE_WIDTH * TILE_WIDTH)
        if tree.size - self._snapshot_size >= SNAPSHOT_LEAVES:
            self._write_snapshot()

    def _write_snapshot(self) -> None:
        size = self._current.checkpoint.size
        if size == self._tree.size and size > self._snapshot_size:
            self._folder.write(SNAPSHOT_PATH, self._tree_positions.encode(size, self._tree.last_leaf_hash))
            self._snapshot_size = size


def cosigners(signed: SignedCheckpoint) -> set[str]:
    """The names under which it was cosigned: a witness that has keys of two algorithms is one."""
    return {by.key.name for by in signed.cosigned}


def sign_checkpoint(checkpoint: Checkpoint, signers: Iterable[NoteSigner], now_s: int) -> SignedCheckpoint:
    """The checkpoint with a line of every signer; an ML-DSA-44 line says that it is of now."""
    text = checkpoint.text()
    note = Note(text, tuple(signer.sign(text, now_s) for signer in signers))
    return SignedCheckpoint(checkpoint, note, ())


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


def _require_kind(folder: Folder, *, copied: bool) -> None:
    """Raises RequestError(CONFLICT) where a log that several brokers have copies of is to be written alone, or the other way round."""
    if copied and folder.names(WAL_FOLDER):
        raise RequestError(
            f"The audit log {folder.path} was written by one broker alone, and brokers do not copy it.",
            code=Code.CONFLICT,
            hint="Move the folder aside: the leaves come from the other brokers.",
        )
    if copied and folder.read(COPIED_PATH) is None:
        _mark_copied(folder)
    elif not copied and folder.read(COPIED_PATH) is not None:
        raise RequestError(
            f"The audit log {folder.path} is one of several brokers' copies: written here alone, it would be another history.",
            code=Code.CONFLICT,
            hint="Write it through the region's brokers.",
        )


def become_copied(path: Path, size: int, root: bytes, files: Files = SHARED_FILES) -> None:
    """Have the log in this folder, which one process alone wrote, be one of several brokers' copies from now on. Blocks. What was cut off is finished
    by the next call.

    Raises RequestError(CONFLICT) where another process has it open, RolledBackError where its last checkpoint is another one than that of `size` leaves
    and `root`, or where it has leaves behind that; CorruptionError where its write-ahead file is damaged.
    """
    folder = Folder(path, files)
    try:
        lock = files.lock(path)
    except UnavailableError as error:
        raise RequestError(f"The audit log {path} is open in another process.", code=Code.CONFLICT) from error
    try:
        if folder.read(COPIED_PATH) is None:
            note = folder.read(CHECKPOINT_PATH)
            # A folder that takes the place of a lost one has nothing, and gets all from the other copies.
            is_new = note is None and not segments(files, path / WAL_FOLDER)
            signed = None if note is None else Checkpoint.parse(parse_note(note).text)
            recovery = Recovery(path / WAL_FOLDER, size, files)
            for _ in recovery:
                pass
            is_same = signed is not None and (signed.size, signed.root, recovery.size) == (size, root, size)
            if not is_same and not is_new:
                has = 0 if signed is None else max(signed.size, recovery.size)
                raise RolledBackError(
                    f"The audit log {path} has {has} leaves, and it went on as copies from {size} with another checkpoint.",
                    hint="This is not the folder that the log was in then. Put that one back; `felix audit verify` tells them apart.",
                )
            _mark_copied(folder)
        # All of it is in bundles, under the checkpoint.
        for first in segments(files, path / WAL_FOLDER):
            files.remove(path / WAL_FOLDER / segment_name(first))
        folder.remove_folder(WAL_FOLDER)
        folder.flush()
    finally:
        lock.release()


def _mark_copied(folder: Folder) -> None:
    folder.write(
        COPIED_PATH, b"Several brokers have copies of this log; its leaves are in felix/system/audit.\n"
    )
    folder.flush()


def _check_continues(folder: Folder, current: Checkpoint, before: Checkpoint) -> None:
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


class _Opened(NamedTuple):
    """The state of a log that was opened, before its threads run."""

    witnesses: tuple[VerifierKey, ...]
    tree: TreeFiles
    positions: Positions
    snapshot_size: int
    checkpoint: SignedCheckpoint
    cosigned: SignedCheckpoint | None
    witnessed: SignedCheckpoint | None
    torn: Torn | None


class _Opening:
    """Recovery, step by step; see `open`."""

    def __init__(
        self,
        folder: Folder,
        signers: tuple[NoteSigner, ...],
        earlier: tuple[VerifierKey, ...],
        witnesses: tuple[VerifierKey, ...],
        clock: Clock,
    ) -> None:
        self._folder, self._signers, self._witnesses = folder, signers, witnesses
        self._clock = clock
        self._keys = (*(signer.key for signer in signers), *earlier)
        self._name = signers[0].key.name
        self._wal_path = folder.path / WAL_FOLDER
        self._unjudged = Unjudged(self._name)

    def open(self, remembered: tuple[bytes, ...], *, copied: bool = False) -> _Opened:
        """Recover. The numbers are those of docs/audit.md, "Opening a log"."""
        # 1. The newest checkpoint, signed by this log's key.
        signed = self._read_checkpoint()
        checkpoint = signed.checkpoint
        # 2. Its right edge from the tiles gives its root.
        tree = read_tree(self._folder, checkpoint.size)
        if tree.root() != checkpoint.root:
            raise TamperError(
                f"The tiles of {checkpoint.origin} do not give the root of its checkpoint at {checkpoint.size} leaves.",
                hint=VERIFY_HINT,
            )
        # 3. Everything that was cosigned lies below it, with the same roots.
        self._check_remembered(checkpoint, remembered)
        cosigned = self._check_own(COSIGNED_PATH, checkpoint)
        witnessed = self._check_own(WITNESSED_PATH, checkpoint)
        # 4. The leaves of the last, partial bundle are those of the tiles. Where several brokers have copies of the log, one that has not got them
        # begins at the last full bundle: the tree has to come to the checkpoint's root again.
        if copied and not self._has_newest(tree):
            tree = read_tree(self._folder, tree.size // TILE_WIDTH * TILE_WIDTH)
        bundle = self._read_bundle(tree)
        # 5. Positions, from the snapshot and the leaves after it.
        positions, snapshot_size = self._read_positions(tree.size)
        self._mend_index(tree.size)
        # 6. The write-ahead file from the checkpoint on; what lies below it must be the same leaves.
        state = _Opened(
            self._witnesses,
            TreeFiles(self._folder, tree, bundle),
            positions,
            snapshot_size,
            signed,
            cosigned,
            witnessed,
            None,
        )
        # What is behind the checkpoint comes from the copies.
        return state if copied else self._replay(state, bundle)

    def _read_checkpoint(self) -> SignedCheckpoint:
        data = self._folder.read(CHECKPOINT_PATH)
        if data is not None:
            return open_checkpoint(data, self._keys, self._witnesses)
        if self._folder.names(WAL_FOLDER) or self._folder.names("tile") or self._folder.names(COSIGNED_PATH):
            raise RolledBackError(
                f"The audit log {self._name} has leaves and no checkpoint: the file was removed.",
                hint=VERIFY_HINT,
            )
        signed = sign_checkpoint(
            Checkpoint(self._name, 0, EMPTY_ROOT), self._signers, self._clock.now_ms() // 1000
        )
        # A log that is gone with its folder would be taken for a new one here, and for rolled back by whoever cosigned it.
        for above in list(self._folder.path.parents)[:FOLDERS_ABOVE]:
            with suppress(PermissionError):  # what we may not read we have not made
                self._folder.storage.sync_folder(above)
        self._folder.write(CHECKPOINT_PATH, encode_note(signed.note))
        self._folder.flush()
        return signed

    def _check_remembered(self, checkpoint: Checkpoint, remembered: tuple[bytes, ...]) -> None:
        for data in remembered:
            before = open_checkpoint(data, self._keys, self._witnesses)
            _check_continues(self._folder, checkpoint, before.checkpoint)

    def _check_own(self, path: str, checkpoint: Checkpoint) -> SignedCheckpoint | None:
        own = self._folder.read(path)
        if own is None:
            return None
        cosigned = open_checkpoint(own, self._keys, self._witnesses)
        _check_continues(self._folder, checkpoint, cosigned.checkpoint)
        return cosigned

    def _has_newest(self, tree: Tree) -> bool:
        """Whether the newest entry bundle, if one is not full, is there as it was signed."""
        try:
            self._read_bundle(tree)
        except TamperError as error:
            log.warning(
                "%s: the newest entry bundle is written again from the other copies: %s",
                self._name,
                error.sentence,
            )
            return False
        return True

    def _read_bundle(self, tree: Tree) -> list[bytes]:
        if not tree.edge[0]:
            return []
        bundle = [bytes(leaf) for leaf in read_bundle(self._folder, tree.size // TILE_WIDTH, tree.size)]
        for at, (leaf, expected) in enumerate(zip(bundle, tree.edge[0], strict=True)):
            if leaf_hash(leaf) != expected:
                number = tree.size // TILE_WIDTH * TILE_WIDTH + at
                raise TamperError(
                    f"Leaf {number} in its entry bundle is not the one in the tree.", hint=VERIFY_HINT
                )
        return bundle

    def _read_positions(self, size: int) -> tuple[Positions, int]:
        positions, start = Positions(), 0
        data = self._folder.read(SNAPSHOT_PATH)
        if data is not None:
            try:
                found, at, last_hash = Positions.decode(data)
                if 0 < at <= size and TileHashes(self._folder, size)(0, at - 1) == last_hash:
                    positions, start = found, at
            except CorruptionError:
                pass  # a shortcut that does not hold is not taken
        for number, leaf in read_entries(self._folder, start, size, size):
            self._apply(positions, number, read_header(leaf))
        return positions, start

    def _apply(self, positions: Positions, number: int, header: Header | None) -> None:
        """A leaf that stands in the log keeps it from being opened for nothing that it says: what cannot be judged moves no position, as
        what cannot be read."""
        try:
            positions.apply(number, header)
        except Exception as error:
            self._unjudged.sentence(error, f"Leaf {number}")
            positions.apply(number, None)

    def _mend_index(self, size: int) -> None:
        full = size >> TILE_HEIGHT
        index = self._folder.read(INDEX_PATH) or b""
        indexed = bundles_indexed(index)
        kept = cut_index(index, full) if indexed else b""
        if kept != index:
            self._folder.write(INDEX_PATH, kept)
        # The last bundle's rows may be torn, so they are written once more; twice does no harm.
        for number in range(max(0, indexed - 1), full) if indexed < full or len(index) % ROW_BYTES else ():
            headers = [read_header(leaf) for leaf in read_bundle(self._folder, number, size)]
            self._folder.append(INDEX_PATH, bundle_rows(number, headers))

    def _replay(self, state: _Opened, bundle: list[bytes]) -> _Opened:
        """`bundle`: the newest leaves below the checkpoint."""
        size = state.checkpoint.checkpoint.size
        recovery = Recovery(self._wal_path, size, self._folder.storage)
        if size and (not recovery.firsts or recovery.firsts[0] > size):
            raise RolledBackError(
                f"The audit log {self._name} has no write-ahead file that reaches its checkpoint at {size}.",
                hint=VERIFY_HINT,
            )
        bundle_start = size - len(bundle)
        for number, leaf in recovery:
            if number < size:
                if number >= bundle_start and leaf != bundle[number - bundle_start]:
                    raise TamperError(
                        f"Leaf {number} in the write-ahead file is not the one in the tree.", hint=VERIFY_HINT
                    )
                continue
            header = read_header(leaf)
            self._apply(state.positions, number, header)
            state.tree.take(leaf, header)
        if recovery.size < size:
            raise RolledBackError(
                f"The audit log {self._name} ends at leaf {recovery.size}, its checkpoint covers {size}.",
                hint=VERIFY_HINT,
            )
        recovery.settle()
        self._folder.flush()
        state.tree.tidy()
        return state._replace(torn=recovery.torn)
