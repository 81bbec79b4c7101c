"""The region's audit log where several brokers have copies of it: who goes on with it, and how the copies come to be (decision 0112).

The leaves are a stream of the region's own, `felix/system/audit`, that stands in no catalog: one record a leaf, its offset the leaf's index, one
batch an append; one that is too long for a batch stands in the log of documents first, and who is home next finishes it. Beside them are two logs of the same shard: documents that are too long for their leaf, and checkpoints. The three are led by
one broker, the log's *home*. Each broker that has copies keeps the log's files (`audit.trail`) by what is committed.

Invariants:
- a leaf counts, and is in a tree, once it is committed: durable on every copy in sync, of which there are at least `min_in_sync`;
- a checkpoint is signed by the home alone, over committed leaves, and is committed itself before anybody is shown it; who is home next has taken
  it, compared its root, and signed all that is committed, before it answers for the log: so no size is below, and no root other than, one
  that was shown;
- what others cosigned of this one is committed before it is kept, and compared before that; who reads takes what counts, in whatever order it stands, and
  what is let go of there was written again before;
- what this region is to cosign of other logs (region.evidence.witness_memory) is committed among the checkpoints before it is signed, and who is home has
  taken all of it; what is let go of there was written again before;
- who signs has asked whether its key is the log's still, after it has taken all leaves and before it signs: a leaf, or the metadata store, says so where the log's keys were changed
  (region.trust.changed_log_key);
- a document is committed before its leaf is appended, and a leaf before the checkpoint that covers it;
- on a broker that is not home the files end at a checkpoint of the home's;
- of a log that one broker's disk had before (decision 0132), that broker alone is home until all of it is in the shard.

Order: `start` once the copies are opened; `close` before they are closed. Event loop; `Leading` is called from the trail's threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Final, NamedTuple, Protocol

import msgspec

from audit.checkpoint import claimed_size, note_size
from audit.document_disk import keep_document, read_named
from audit.document_leaf import DOCUMENTS_FOLDER, document_path
from audit.errors import RolledBackError
from audit.leaf import LEAF_BYTES_MAX, read_header
from audit.note import encode_note
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.trail import APPEND_LEAVES_MAX, Trail
from audit.witness import superseded
from felix.batch import Batch, NewRecord, decode_payloads, encode_batch
from felix.errors import Code, CorruptionError, FelixError, TamperError, UnavailableError
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.settings import FSYNC
from felix.tasks import end_tasks
from region.cluster.audit_home import Before
from region.cluster.records import ShardId, YieldReason
from region.log.companions import AUDIT_CHECKPOINTS, RECORDS, log_number
from region.log.copies import Copies
from region.log.errors import OffsetOutOfRangeError
from region.log.frame import Frame as LogFrame
from region.log.point import LogPoint
from region.log.seal import LogSeal
from region.log.shard import Appended, ShardHooks, ShardLog, ShardSettings
from region.metadata.records import AUDIT_STREAM, Stream, min_in_sync
from region.replication.messages import Frame
from region.trust.changed_log_key import LOG_KEY_CHANGED, says_changed

log = logging.getLogger("felix.region.audit_log")

LEAVES: Final = RECORDS
DOCUMENTS: Final = 16
CHECKPOINTS: Final = AUDIT_CHECKPOINTS
LOGS: Final = (LEAVES, DOCUMENTS, CHECKPOINTS)
"""Their kinds among the shard's logs, above those of views' journals (region.log.companions)."""
RING_BYTES: Final = 1 << 20
"""Of each of them in memory: they are read when a broker has to catch up."""
READ_BYTES: Final = 4 << 20
"""Read at a time from a copy."""
FOLLOW_S: Final = 0.25
"""How often a broker that is not home looks for what is committed."""
RETRY_S: Final = 1.0
"""A log that could not be taken on is tried again after this."""
LET_LEAD_S: Final = 5.0
"""A broker that is elected, and is not home after trying for so long, lets another one lead."""
COMMIT_S: Final = 60.0
"""How long the trail waits for a checkpoint or a document to be committed."""
CLOSE_S: Final = 5.0
"""How long a broker that stops waits for its last checkpoint."""
BATCH_BYTES: Final = 900_000
"""Of leaves, in one batch (felix.batch.BATCH_BYTES_MAX)."""
AGAIN_S: Final = 0.25
"""How soon the rest of a long append is tried again that the copies did not take."""
PART_BYTES: Final = 512 << 10
"""Of a document, in one record: a batch has 1 MiB at most (felix.batch.BATCH_BYTES_MAX)."""
PARTS_MAX: Final = 64
"""More than the longest append has (audit.trail.COPIED_APPEND_BYTES_MAX), and a document."""
WITNESSED_MAX: Final = 1024
"""Notes of other logs that are held while they are read, each below 128 KiB and most of some hundred bytes: of those of one log the largest is
written into a file, and no other."""
COSIGNED_MAX: Final = 256
"""Cosigned notes of the log itself that are held while they are read: then those that say nothing of their own are let go of (audit.kept_notes)."""
OWN_MAX: Final = 256
"""The log's own checkpoints that are held while they are read: then the largest that it signed is looked for, and no signature of the others is verified."""
_OVER: Final = frozenset((Code.NOT_LEADER, Code.SHARD_STOPPED, Code.SHUTTING_DOWN))
"""Nothing more is taken by this broker."""
_MARK: Final = LOG_KEY_CHANGED.encode()
"""In each leaf that says that the log's keys were changed, and in few others."""
CHECKPOINTS_BYTES: Final = 64 << 20
"""Checkpoints are let go of beyond this: of each log the newest alone is needed."""


class _Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """`cosigned`: by others. `witnessed`: of another log, as this region cosigns it; then `cosigned` is set, too, for a release that does not know
    of it refuses such a one by its origin, and goes on."""

    note: bytes
    cosigned: bool
    witnessed: bool = False


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Of a document, or of the leaves of a long append: the SHA-256 of all of it, which part, of how many. `first`: of an append, the index of its
    first leaf; else -1."""

    digest: bytes
    number: int
    parts: int
    data: bytes
    first: int = -1


# Made here: msgspec learns a type at its first use, not safely on two threads.
_checkpoint: Final = msgspec.msgpack.Decoder(_Checkpoint)
_part: Final = msgspec.msgpack.Decoder(_Part)
_leaves: Final = msgspec.msgpack.Decoder(list[bytes])


class Host(Protocol):
    """What is asked of whoever has the copies (region.replication.host)."""

    def serves(self, shard: ShardId) -> bool: ...

    def committed(self, shard: ShardId, number: int) -> LogPoint: ...

    async def read_committed(
        self, shard: ShardId, number: int, begin: LogPoint, size: int
    ) -> tuple[Frame, ...]: ...

    def let_lead(self, shard: ShardId, why: YieldReason) -> None: ...

    def want_min(self, shard: ShardId, minimum: int) -> None: ...

    def on_change(self, listener: Callable[[ShardId], None]) -> None: ...


class Directory(Protocol):
    """What is asked of `region.log.directory.LogDirectory`."""

    async def lead_shard(
        self,
        name: StreamName,
        incarnation: bytes,
        shard: int,
        settings: ShardSettings,
        hooks: ShardHooks,
        copies: Copies,
    ) -> ShardLog: ...

    async def close_shard(self, name: StreamName, incarnation: bytes, shard: int) -> None: ...


class Witnessed(Protocol):
    """What is asked of `region.evidence.witness_memory.WitnessMemory`, in threads."""

    def take(self, note: bytes) -> None: ...

    def take_all(self, notes: Sequence[bytes]) -> None: ...

    def copied(self) -> dict[str, bytes]: ...

    def uncopied(self) -> list[bytes]: ...


class _Append(NamedTuple):
    first: int
    leaves: Sequence[bytes]
    done: Callable[[FelixError | None], None]

    def answered(self, result: Appended | FelixError) -> None:
        self.done(result if isinstance(result, FelixError) else None)


class Leading:
    """`audit.trail.Copies`: what the home commits."""

    def __init__(
        self,
        logs: dict[int, ShardLog],
        runtime: Runtime,
        memory: Witnessed,
        cosigned: Callable[[], Sequence[bytes]] = tuple,
    ) -> None:
        """`cosigned`: the log's own cosigned notes that are kept, the largest last."""
        self._cosigned = cosigned
        self._logs = logs
        self._memory = memory
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Append] = deque()
        self._long: asyncio.Task[None] | None = None
        self._last: dict[str, _Checkpoint] = {}
        """what was given to be committed last: by origin, and the log's own and a cosigned one under no log's name"""
        self._trim_beyond = CHECKPOINTS_BYTES

    def append(self, first: int, leaves: Sequence[bytes], done: Callable[[FelixError | None], None]) -> None:
        """As `audit.trail.Copies`."""
        try:
            self._loop.call_soon_threadsafe(self._put, _Append(first, leaves, done))
        except RuntimeError:
            done(UnavailableError("The broker has stopped."))

    def _put(self, append: _Append) -> None:
        self._queue.append(append)
        self._begin()

    def _begin(self) -> None:
        """One after the other, as far as they are not long."""
        while self._queue and self._long is None:
            append = self._queue.popleft()
            batches = _batches(append.leaves)
            if len(batches) > 1:
                self._long = self._loop.create_task(self._append_long(append, batches), name="long append")
                self._long.add_done_callback(partial(self._ended, append))
                return
            try:
                self._logs[LEAVES].append_nowait(batches[0], append.answered, expected_offset=append.first)
            except FelixError as error:
                append.done(error)

    async def _append_long(self, append: _Append, batches: Sequence[Batch]) -> None:
        await self._write(DOCUMENTS, _parts(msgspec.msgpack.encode(list(append.leaves)), append.first))
        await finish(self._logs[LEAVES], append.first, batches)

    def _ended(self, append: _Append, task: asyncio.Task[None]) -> None:
        self._long = None
        error = UnavailableError("It is led here no more.") if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, FelixError):
            log.error("a long append failed", exc_info=error)
            error = UnavailableError(f"It could not be written: {error}.")
        append.done(error)
        self._begin()

    async def close(self) -> None:
        """Append nothing more."""
        if self._long is not None:
            await end_tasks(self._long)

    def keep_note(self, note: bytes) -> None:
        self._keep_checkpoint("", _Checkpoint(note, False))

    def keep_cosigned(self, note: bytes) -> None:
        self._keep_checkpoint(" cosigned", _Checkpoint(note, True))

    def given(self, origin: str) -> bytes | None:
        """What of another log was given to be committed last, whether it is or not."""
        checkpoint = self._last.get(origin)
        return None if checkpoint is None else checkpoint.note

    def keep_witnessed(self, origin: str, before: bytes | None, note: bytes) -> None:
        """As `region.evidence.witness_memory.WitnessCopies.copy`."""
        self._ask(self.write_witnessed(origin, before, note))

    async def write_witnessed(self, origin: str, before: bytes | None, note: bytes) -> None:
        """The same, on the event loop."""
        if (self.given(origin) or self._memory.copied().get(origin)) != before:
            raise superseded(origin)
        self._last[origin] = checkpoint = _Checkpoint(note, True, witnessed=True)
        await self._write(CHECKPOINTS, [msgspec.msgpack.encode(checkpoint)])

    def _keep_checkpoint(self, name: str, checkpoint: _Checkpoint) -> None:
        # Before it is written: `trim` then knows it wherever it stands.
        self._last[name] = checkpoint
        self._keep(CHECKPOINTS, [msgspec.msgpack.encode(checkpoint)])

    def keep_document(self, document: bytes) -> None:
        self._keep(DOCUMENTS, _parts(document, -1))

    def _keep(self, kind: int, payloads: Sequence[bytes]) -> None:
        self._ask(self._write(kind, payloads))

    def _ask(self, work: Coroutine[None, None, None]) -> None:
        try:
            self._runtime.ask(work, self._loop, COMMIT_S)
        except TimeoutError as error:
            raise UnavailableError(f"It was not committed on the copies within {COMMIT_S:.0f} s.") from error

    async def _write(self, kind: int, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            await self._logs[kind].append(encode_batch([NewRecord(payload=payload)]))

    async def trim(self) -> None:
        """Let go of checkpoints that nobody needs any more."""
        checkpoints = self._logs[CHECKPOINTS]
        if checkpoints.disk_bytes <= self._trim_beyond or "" not in self._last:
            return
        end = checkpoints.high_watermark
        try:
            for name in self._memory.copied() | self._last:
                # Read when it is its turn, with nothing awaited before it is given to the log: one that was given meanwhile must not have an
                # older one behind it.
                await self._write(CHECKPOINTS, [msgspec.msgpack.encode(self._newest(name))])
            # What was given last may not be kept yet; what earlier homes gave is. A release that goes by the last one finds the largest there.
            for note in self._cosigned():
                await self._write(CHECKPOINTS, [msgspec.msgpack.encode(_Checkpoint(note, True))])
        except UnavailableError:
            # Too few copies are in sync. Nothing goes before it stands behind.
            return
        await checkpoints.trim(end)
        # Whatever could not go, as it is being read: it is not written again and again.
        self._trim_beyond = CHECKPOINTS_BYTES + checkpoints.disk_bytes

    def _newest(self, name: str) -> _Checkpoint:
        """What was given last under this name, or is known to be committed of the log of this name."""
        given = self._last.get(name)
        return given or _Checkpoint(self._memory.copied()[name], True, witnessed=True)


def _origin(note: bytes) -> str:
    return note.partition(b"\n")[0].decode()


def _batches(leaves: Sequence[bytes]) -> list[Batch]:
    """The same each time: who finishes an append begins where a batch ends."""
    cut: list[list[NewRecord]] = [[]]
    size = 0
    for leaf in leaves:
        if cut[-1] and size + len(leaf) > BATCH_BYTES:
            cut.append([])
            size = 0
        cut[-1].append(NewRecord(payload=leaf))
        size += len(leaf)
    return [encode_batch(records) for records in cut]


def _parts(data: bytes, first: int) -> list[bytes]:
    digest, starts = sha256(data).digest(), range(0, len(data), PART_BYTES)
    return [
        msgspec.msgpack.encode(_Part(digest, number, len(starts), data[start : start + PART_BYTES], first))
        for number, start in enumerate(starts)
    ]


def _batch_from(files: Folder, at: int, end: int) -> Batch:
    """The next leaves of a log's files, as many as one append may have. Blocks."""
    records: list[NewRecord] = []
    size = 0
    for _, leaf in read_entries(files, at, min(end, at + APPEND_LEAVES_MAX), end):
        if records and size + len(leaf) > BATCH_BYTES:
            break
        records.append(NewRecord(payload=bytes(leaf)))
        size += len(leaf)
    return encode_batch(records)


def _keep_beside(files: Folder, digest: bytes, document: bytes) -> None:
    """Where it does not stand there already, whatever stands in its place. Raises OSError."""
    path = document_path(digest)
    try:
        if files.read(path) != document:
            keep_document(files, document)
    except TamperError as error:
        # No file: nothing takes its place without a person. A leaf that names it lacks its document on this broker.
        log.error("a document of the audit log cannot be kept: %s", error)


def _leaves_of(files: Folder, begin: int, end: int, size: int) -> list[bytes]:
    return [bytes(leaf) for _, leaf in read_entries(files, begin, end, size)]


async def finish(log: ShardLog, first: int, batches: Sequence[Batch]) -> None:
    """Append those batches of an append from leaf `first` on that the log does not have. Raises the refusal, where nothing of it stands or
    this broker takes no more: what has begun is tried again until then."""
    at = first
    for batch in batches:
        while log.log_end_offset <= at:
            try:
                await log.append(batch, expected_offset=at)
            except UnavailableError as error:
                if at == first or error.code in _OVER:
                    raise
                await asyncio.sleep(AGAIN_S)
        at += batch.header.records


class AuditLog:
    """One per broker of a region whose brokers copy the log."""

    def __init__(
        self,
        record: Stream,
        host: Host,
        directory: Directory,
        trail: Trail,
        copies: Callable[[int], Copies],
        make_seal: Callable[[int], LogSeal],
        hooks: Callable[[LogSeal], ShardHooks],
        *,
        has_key: Callable[[], Awaitable[None]],
        taken: Callable[[], Awaitable[None]],
        refusal: Callable[[], FelixError | None],
        see_log_key: Callable[[bytes, int], None],
        may_sign: Callable[[], Awaitable[None]],
        became_home: Callable[[], None],
        witnessed: Witnessed,
        before: Before | None = None,
        runtime: Runtime,
    ) -> None:
        """`copies`: what one of the logs is led by, by its kind. `make_seal` and `hooks`: of one of the logs, by its number. `has_key`: awaited before
        anything is opened: the stream's key is there. `taken`: awaited where the files have more of other brokers' leaves, before this
        one is home; where it raises, it is not. `refusal`: why this broker may never be home again. `see_log_key`: told of each leaf that says that another key signs the log, by
        that key's id and the leaf's index; `may_sign`: awaited once all leaves are taken, before this broker signs. Both raise where it is never to. `became_home`: called once it is. `witnessed`: what this region has cosigned of other logs. `before`: where the log was before it was copied; None where it began so."""
        self.is_home = False
        """whether this broker answers for the log"""
        self.trouble = ""
        """why it is not home, or not up to date, though it could be"""
        self._incarnation = bytes.fromhex(record.incarnation)
        self._shard = ShardId(record.incarnation, 0)
        self._min = min_in_sync(record.config)
        self._host = host
        self._directory = directory
        self._trail = trail
        self._copies = copies
        self._seals = {kind: make_seal(log_number(kind, 0)) for kind in LOGS}
        self._hooks = hooks
        self._has_key = has_key
        self._is_keyed = False
        self._taken = taken
        self._refusal = refusal
        self._see_log_key = see_log_key
        self._may_sign = may_sign
        self._became_home = became_home
        self._memory = witnessed
        self._leading: Leading | None = None
        """what is committed with while this broker is home"""
        self._before = before
        self._is_before_checked = before is None
        self._runtime = runtime
        self._read_to = {kind: LogPoint(0) for kind in (DOCUMENTS, CHECKPOINTS)}
        self._parts: dict[bytes, dict[int, bytes]] = {}
        self._long: tuple[int, list[bytes]] | None = None
        """the newest append that was too long for a batch: its first leaf's index, and its leaves"""
        self._has_unread = False
        """whether a record among the documents could not be read, which may have been of such an append"""
        self._newest: bytes | None = None
        """the newest checkpoint that was read and not shown here"""
        self._unread_to = 0
        """the size of the largest note among the log's own that no key signed which is known here; those of before a change of the log's keys are all that the folder of then names"""
        self._looked_to = 0
        """up to which leaf the reason was looked for"""
        self._cosigned: list[bytes] = []
        """what was read of cosigned notes of this log and is not taken over: larger than what is shown here, or by nobody who is known yet"""
        self._cosigners_known: tuple[object, ...] = ()
        """when that was tried last"""
        self._witnessed: list[bytes] = []
        """what was read of other logs and the memory has not got yet"""
        self._failing_since: float | None = None
        self._parted: FelixError | None = None
        """why what is committed is another history than that of the files here"""
        self._news = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        host.on_change(lambda shard: self._news.set() if shard == self._shard else None)

    def start(self) -> None:
        """Follow, and lead where this broker is elected."""
        self._work = asyncio.get_running_loop().create_task(self._run(), name="audit log")

    async def close(self) -> None:
        """Lead no more."""
        await self.checkpoint()
        if self._work is not None:
            await end_tasks(self._work)

    async def checkpoint(self) -> None:
        """Before this broker stops: what is committed has its checkpoint, where the copies still take one."""
        if self.is_home:
            with suppress(FelixError):
                await asyncio.to_thread(self._trail.publish, CLOSE_S)

    def given(self, origin: str) -> bytes | None:
        """As `region.evidence.witness_memory.WitnessCopies`."""
        leading = self._leading
        return None if leading is None else leading.given(origin)

    def copy(self, origin: str, before: bytes | None, note: bytes) -> None:
        """As `region.evidence.witness_memory.WitnessCopies`; refused on a broker that is not home."""
        leading = self._leading
        if leading is None:
            raise UnavailableError(
                "Another broker goes on with the audit log, and cosigns.", retry_after_ms=500
            )
        leading.keep_witnessed(origin, before, note)

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            try:
                if (refusal := self._refusal()) is not None:
                    raise refusal
                if self._trail.stopped is not None:
                    # A disk that was full may have room again.
                    await asyncio.to_thread(self._trail.reopen)
                if not self._is_keyed:
                    await self._has_key()
                    self._is_keyed = True
                if self._host.serves(self._shard):
                    await self._lead()
                else:
                    await self._take_shown()
                    if self._trail.lacks_newest:
                        raise UnavailableError(
                            "The newest entry bundle of this broker's copy of the audit log is missing or damaged.",
                            hint="It is written again from the other brokers' copies once these are reached.",
                        )
                self.trouble, self._failing_since = "", None
                await self._pause(FOLLOW_S)
            except Exception as error:
                self._failing_since = self._failing_since or now()
                if self._host.serves(self._shard) and now() - self._failing_since >= LET_LEAD_S:
                    self._host.let_lead(self._shard, "stuck")
                # Also a mistake of ours: another broker can go on, and this one is told of.
                if str(error) != self.trouble:
                    self.trouble = str(error)
                    known = isinstance(error, FelixError)
                    log.error("the audit log is not up to date here: %s", error, exc_info=not known)
                # Opening its files anew reads thousands of leaves.
                await self._pause(RETRY_S if self._trail.stopped is None else LET_LEAD_S)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    # -- home ------------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        """Be home until another broker is elected."""
        logs: dict[int, ShardLog] = {}
        leading = Leading(logs, self._runtime, self._memory, self._cosigned_notes)
        try:
            for kind in LOGS:
                # All of a log is committed before it is led.
                logs[kind] = await self._directory.lead_shard(
                    AUDIT_STREAM,
                    self._incarnation,
                    log_number(kind, 0),
                    ShardSettings(FSYNC, ring_bytes_max=RING_BYTES),
                    self._hooks(self._seals[kind]),
                    self._copies(kind),
                )
            await self._while_served(self._take_over(leading, logs))
            self._trail.admit()
            self._leading = leading
            self.is_home = True
            self.trouble = ""
            log.info("this broker goes on with the audit log, from leaf %d", self._trail.status().durable)
            self._became_home()
            # Not before all of it is in the stream: others go by that (ClusterMember.alone_has_audit).
            self._host.want_min(self._shard, self._min)
            signed = self._trail.status().checkpoint
            while self._host.serves(self._shard):
                if self._trail.stopped is not None:
                    raise self._trail.stopped
                if self._trail.status().checkpoint > signed:
                    # What fails for want of room fails with a checkpoint.
                    self._failing_since = None
                await self._while_served(self._take_cosigned())
                await self._while_served(leading.trim())
                await self._pause(RETRY_S)
        finally:
            self.is_home = False
            self._leading = None
            self._trail.follow()
            await asyncio.shield(asyncio.ensure_future(self._close(leading, logs)))

    async def _take_over(self, leading: Leading, logs: Mapping[int, ShardLog]) -> None:
        if self._before is not None and not self._host.committed(self._shard, CHECKPOINTS).offset:
            await self._bring_in(self._before, logs)
        await self._catch_up(logs[LEAVES])
        await self._may_sign()
        self._trail.lead(leading)
        await asyncio.to_thread(self._trail.publish)
        await self._check_before()
        for note in await asyncio.to_thread(self._memory.uncopied):
            origin = _origin(note)
            await leading.write_witnessed(origin, self._memory.copied().get(origin), note)
            await asyncio.to_thread(self._memory.take, note)
        await self._taken()

    async def _bring_in(self, before: Before, logs: Mapping[int, ShardLog]) -> None:
        """Write into the shard what one broker's disk alone had: documents, then leaves under their indexes, then the checkpoint that covers them, which
        ends it. What an earlier run wrote is compared. Raises UnavailableError on a broker that has not got it all."""
        trail, files, size = self._trail, self._trail.files, before.size
        if min(note_size(trail.checkpoint()), trail.readable_size) < size:
            raise UnavailableError(
                f"Not all leaves that broker {before.broker} alone had are in {AUDIT_STREAM} yet.",
                hint=f"Broker {before.broker} goes on with that: start it, with its data folder.",
            )
        await asyncio.to_thread(trail.checkpoints.check_holds, size, bytes.fromhex(before.root))
        at = logs[LEAVES].log_end_offset
        await self._compare(at, before)
        if not at:
            for name in await asyncio.to_thread(files.names, DOCUMENTS_FOLDER):
                # What is none is no leaf's, and was reported (region.evidence.stray_documents).
                document = await asyncio.to_thread(read_named, files, name)
                for part in _parts(document or b"", -1):
                    await logs[DOCUMENTS].append(encode_batch([NewRecord(payload=part)]))
        while at < size:
            self.trouble = f"{at} of the {size} leaves that broker {before.broker} alone had are in {AUDIT_STREAM}; nothing crosses until all are."
            batch = await asyncio.to_thread(_batch_from, files, at, size)
            await logs[LEAVES].append(batch, expected_offset=at)
            at += batch.header.records
        notes = [_Checkpoint(trail.checkpoint(), False)]
        notes += [_Checkpoint(note, True) for note in self._cosigned_notes()]
        # The largest with the checkpoint; others in batches before it would say that all is there.
        first, *more = _batches([msgspec.msgpack.encode(each) for each in (notes[0], *reversed(notes[1:]))])
        for batch in (first, *more):
            await logs[CHECKPOINTS].append(batch)
        log.info("the audit log's %d leaves of before are in %s", size, AUDIT_STREAM)

    async def _compare(self, end: int, before: Before) -> None:
        """What stands in the stream is the beginning of what the files have. Raises CorruptionError."""
        at = 0
        while at < end:
            for first, leaves in await self._read(LEAVES, LogPoint(at)):
                kept = await asyncio.to_thread(
                    _leaves_of, self._trail.files, first, first + len(leaves), before.size
                )
                if first != at or kept != leaves:
                    raise CorruptionError(
                        f"{AUDIT_STREAM} has other leaves from {first} on than the audit log that broker {before.broker} alone had.",
                        hint="Another broker wrote them: find out which, and run `felix audit verify` on this one's copy.",
                    )
                at += len(leaves)

    async def _check_before(self) -> None:
        """Once what is shown reaches as far: it is the log that one broker's disk had. Raises RolledBackError."""
        before = self._before
        if self._is_before_checked or before is None or note_size(self._trail.checkpoint()) < before.size:
            return
        try:
            await asyncio.to_thread(
                self._trail.checkpoints.check_holds, before.size, bytes.fromhex(before.root)
            )
        except RolledBackError as error:
            self._parted = error
            raise
        self._is_before_checked = True

    async def _while_served(self, work: Coroutine[None, None, None]) -> None:
        """Raises UnavailableError once this broker is to lead no more: what it has appended and could not commit is answered when the logs are
        closed, and until they are the broker cannot say that another one may lead."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((task,), timeout=FOLLOW_S))[0]:
                if not self._host.serves(self._shard):
                    raise UnavailableError("Another broker is to go on with the audit log.")
            task.result()
        finally:
            if not task.done():
                await end_tasks(task)

    async def _close(self, leading: Leading, logs: dict[int, ShardLog]) -> None:
        await leading.close()
        for kind in logs:
            await self._directory.close_shard(AUDIT_STREAM, self._incarnation, log_number(kind, 0))

    async def _catch_up(self, leaves: ShardLog) -> None:
        """Take all that is committed. Raises RolledBackError where that is less than what was signed."""
        await self._take_shown()
        end = self._host.committed(self._shard, LEAVES).offset
        signed = max(note_size(self._newest or self._trail.checkpoint()), self._trail.status().durable)
        if signed > end:
            raise RolledBackError(
                f"The audit log has {end} leaves, and {signed} were signed: it was rolled back.",
                hint="Bring back the brokers that have the others, and run `felix audit verify` on each one's copy.",
            )
        if (
            self._has_unread
            and end > signed
            and not self._is_of_long(end)
            and await self._may_have_begun(end)
        ):
            raise CorruptionError(
                f"The audit log's last leaves, up to {end}, may be the beginning of an append whose rest cannot be read: a record among its documents is none.",
                hint="Run `felix audit verify` on the copies of the other brokers, and ask for help: what is signed is whole.",
            )
        if self._long is not None and await self._has_begun(*self._long):
            first, whole = self._long
            await finish(leaves, first, _batches(whole))
            end = leaves.committed_offset
        self._long = None
        await self._take_leaves(end)

    def _is_of_long(self, end: int) -> bool:
        """Whether the append that was read last, whole, is what the log ends with."""
        return self._long is not None and self._long[0] < end <= self._long[0] + len(self._long[1])

    async def _may_have_begun(self, end: int) -> bool:
        """Whether the log may end amid an append: any batch of one but its last has no room for one more leaf."""
        at = await self._append_around(end - 1)
        (_, leaves), *_ = await self._read(LEAVES, LogPoint(at))
        return sum(map(len, leaves)) + LEAF_BYTES_MAX > BATCH_BYTES

    async def _has_begun(self, first: int, leaves: list[bytes]) -> bool:
        """Whether the first batch of a long append stands where it was to stand."""
        count = _batches(leaves)[0].header.records
        found = await self._read(LEAVES, LogPoint(first))
        return bool(found) and found[0] == (first, leaves[:count])

    # -- what is committed -----------------------------------------------------------------------------

    async def _take_shown(self) -> None:
        """Take what the newest checkpoint covers, as far as it is known to be committed."""
        await self._read_checkpoints()
        await self._read_documents()
        if self._trail.lacks_newest:
            signed = note_size(self._trail.checkpoint())
            if self._host.committed(self._shard, LEAVES).offset >= signed:
                await self._take_leaves(signed)
                log.warning(
                    "the newest entry bundle of the audit log was missing or damaged here; its leaves came from the stream"
                )
                await self._taken()
        if self._newest is not None:
            size = note_size(self._newest)
            if self._host.committed(self._shard, LEAVES).offset >= size:
                await self._take_leaves(size)
                await asyncio.to_thread(self._trail.show, self._newest)
                self._newest = None
                await self._taken()
        await self._take_cosigned()
        if not self._trail.lacks_newest:
            await self._look_ahead()
            await self._check_before()

    async def _take_leaves(self, end: int) -> None:
        trail = self._trail
        begin = trail.status().durable
        if trail.lacks_newest:
            # The files begin at a full bundle, anywhere in an append.
            begin = await self._append_around(begin)
        while (at := trail.status().durable) < end:
            taken = 0
            for first, leaves in await self._read(LEAVES, LogPoint(min(begin, at))):
                if first + len(leaves) > end:
                    break
                self._look_at(first, leaves)
                trail.take(max(first, at), leaves[max(0, at - first) :])
                taken += len(leaves)
            begin = end
            if not taken:
                raise CorruptionError(
                    f"This broker's copy of the audit log has no append that ends at leaf {end}, and the log was signed there.",
                    hint="Run `felix audit verify` on the copies of the other brokers.",
                )
            await asyncio.to_thread(trail.settled)

    def _look_at(self, first: int, leaves: Sequence[bytes]) -> None:
        """Before they are taken: does one say that other keys sign the log? Raises what `see_log_key` does."""
        for index, leaf in enumerate(leaves, first):
            if _MARK in leaf:
                header = read_header(leaf)
                if header is not None and says_changed(header):
                    self._see_log_key(header.key_id, index)

    async def _look_ahead(self) -> None:
        """Where checkpoints come that no key signed which is known here: do the leaves that these are of say why? They are not taken. Raises what `see_log_key` does."""
        end = min(self._unread_to, self._host.committed(self._shard, LEAVES).offset)
        at = max(self._looked_to, self._trail.status().durable)
        while at < end:
            read = await self._read(LEAVES, LogPoint(at))
            for first, leaves in read:
                self._look_at(first, leaves)
            if not read:
                break
            at = read[-1][0] + len(read[-1][1])
            self._looked_to = at

    async def _append_around(self, index: int) -> int:
        """Where the append begins that has this leaf. Raises CorruptionError where none does."""
        for first in range(index, max(-1, index - APPEND_LEAVES_MAX), -1):
            # Nothing else is read from.
            with suppress(OffsetOutOfRangeError):
                await self._host.read_committed(self._shard, LEAVES, LogPoint(first), 1)
                return first
        raise CorruptionError(
            f"This broker's copy of the audit log has no append with leaf {index}.",
            hint="Run `felix audit verify` on the copies of the other brokers.",
        )

    async def _read_checkpoints(self) -> None:
        if self._parted is not None:
            raise self._parted
        shown, older, own = note_size(self._trail.checkpoint()), None, list[bytes]()
        async for payload in self._payloads(CHECKPOINTS):
            try:
                found = _checkpoint.decode(payload)
            except msgspec.DecodeError as error:
                # Nobody writes it again: what cannot be read once cannot be read later.
                log.error("a record among the audit log's checkpoints is none, and is skipped: %s", error)
                continue
            if found.witnessed:
                # Which of them counts, and whether it is a note at all, the memory says: the last one need not be the largest.
                self._witnessed.append(found.note)
                if len(self._witnessed) >= WITNESSED_MAX:
                    await self._take_witnessed()
            elif found.cosigned:
                self._cosigned.append(found.note)
                self._cosigners_known = ()
                if len(self._cosigned) >= COSIGNED_MAX:
                    self._cosigned = await asyncio.to_thread(self._trail.checkpoints.covering, self._cosigned)
            else:
                own.append(found.note)
                if len(own) >= OWN_MAX:
                    own = await asyncio.to_thread(self._signed, own, shown)
        await self._take_witnessed()
        for note in await asyncio.to_thread(self._signed, own, shown):
            if note_size(note) > note_size(self._newest or self._trail.checkpoint()):
                self._newest = note
            elif note_size(note) <= shown:
                older = note
        if older is not None:
            try:
                await asyncio.to_thread(self._trail.check_continues, older)
            except (RolledBackError, TamperError) as error:
                self._parted = error
                raise
        if self._newest is not None and note_size(self._newest) < self._trail.status().durable:
            # Signed here, of leaves that stand here; whether it was committed was not known then.
            self._newest = None

    def _signed(self, notes: Sequence[bytes], shown: int) -> list[bytes]:
        """Of notes that stand there as the log's own, the largest that it signed, and the largest of those of no more than `shown` leaves. What is in front
        of them and is no note, or was not signed by the log, is skipped: it says nothing of it. Verifies no more signatures than it has to; in a thread."""
        found = list[bytes]()
        for note in sorted(dict.fromkeys(notes), key=claimed_size, reverse=True):
            if found and claimed_size(note) > shown:
                continue
            try:
                self._trail.checkpoints.read(note)
            except TamperError as error:
                log.error(
                    "a checkpoint that stands among the audit log's own is not its own, and is skipped: %s",
                    error,
                )
                self._unread_to = max(self._unread_to, claimed_size(note))
                continue
            found.append(note)
            if claimed_size(note) <= shown:
                break
        return found

    async def _take_cosigned(self) -> None:
        """Those that are not larger than what is shown, once more when other witnesses are known."""
        known = self._trail.checkpoints.witnesses
        if not self._cosigned or known == self._cosigners_known:
            return
        shown = note_size(self._trail.checkpoint())
        ahead, ready = list[bytes](), list[bytes]()
        for note in self._cosigned:
            # Whether it is a note at all, the log says that takes it.
            (ahead if claimed_size(note) > shown else ready).append(note)
        self._cosigned = [*ahead, *await asyncio.to_thread(self._trail.take_cosigned, ready)]
        self._cosigners_known = () if ahead else known

    def _cosigned_notes(self) -> list[bytes]:
        kept = [encode_note(each.note) for each in self._trail.checkpoints.cosigned()]
        return [*self._cosigned, *reversed(kept)]

    async def _take_witnessed(self) -> None:
        if self._witnessed:
            await asyncio.to_thread(self._memory.take_all, tuple(self._witnessed))
            self._witnessed.clear()

    async def _read_documents(self) -> None:
        async for payload in self._payloads(DOCUMENTS):
            try:
                part = _part.decode(payload)
                whole = self._take_part(part)
                if whole is None:
                    continue
                leaves = _leaves.decode(whole) if part.first >= 0 else None
            except (msgspec.DecodeError, CorruptionError) as error:
                # Nobody writes it again. Whether it was of an append that has begun is asked before this broker goes on with the log.
                log.error("a record among the audit log's documents is none, and is skipped: %s", error)
                self._has_unread = True
                continue
            if leaves is not None:
                self._long = part.first, leaves
            else:
                await asyncio.to_thread(_keep_beside, self._trail.files, part.digest, whole)

    def _take_part(self, part: _Part) -> bytes | None:
        """The whole that this was the last part of; None where others are missing. Raises CorruptionError for what is no part of anything."""
        if not (0 <= part.number < part.parts <= PARTS_MAX):
            raise CorruptionError(f"It is part {part.number} of {part.parts}.")
        held = self._parts.setdefault(part.digest, {})
        held[part.number] = part.data
        if held.keys() != set(range(part.parts)):
            if len(self._parts) > PARTS_MAX:
                # Of one that was never finished: its leaf was not written.
                del self._parts[next(iter(self._parts))]
            return None
        del self._parts[part.digest]
        whole = b"".join(held[number] for number in range(part.parts))
        if sha256(whole).digest() != part.digest:
            raise CorruptionError(f"Its parts are not those of {part.digest.hex()}.")
        return whole

    async def _payloads(self, kind: int) -> AsyncIterator[bytes]:
        """What a log has behind what was read of it before."""
        while True:
            frames = await self._host.read_committed(self._shard, kind, self._read_to[kind], READ_BYTES)
            if not frames:
                return
            for _, payloads in await asyncio.to_thread(self._open, kind, frames):
                for payload in payloads:
                    yield payload
            self._read_to[kind] = frames[-1].end

    async def _read(self, kind: int, begin: LogPoint) -> list[tuple[int, list[bytes]]]:
        frames = await self._host.read_committed(self._shard, kind, begin, READ_BYTES)
        return await asyncio.to_thread(self._open, kind, frames)

    def _open(self, kind: int, frames: Sequence[Frame]) -> list[tuple[int, list[bytes]]]:
        """In a thread: the records of each batch, with the first one's offset."""
        found = []
        for frame in frames:
            body = frame.body
            assert isinstance(body, LogFrame)
            if body.batch is not None:
                plain = self._seals[kind].open_batch(body.batch)
                found.append((body.base_offset, [bytes(payload) for payload in decode_payloads(plain)]))
        return found
