"""Witnessing between regions: this region cosigns others' checkpoints, and gives out its own to be cosigned.

Requests of bridges are bounded: frequent requests cannot make this region write checkpoints, sync its disk or keep files. Each bridge has
its share of what its region has, so one of them does not use up what the others need. Invariants:

- a checkpoint that is given out is one that the audit log has made by its own timer;
- however often it is asked how far a log is cosigned, READS_AT_ONCE threads ask the store, and not more often than every READ_PAUSE_S of one log; who asks waits,
  and is not refused: an agent asks once for each shard of a link that it opens;
- a log is cosigned by one call at a time, in a thread, and so are cosignatures of this region's log kept;
- a call counts until its thread has ended, whether or not its caller waits for it;
- a caller that asks too often is refused with LIMIT_RATE and the time after which to retry.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from audit.checkpoint import note_size
from audit.leaf import Kind, Side, read_header
from audit.merkle import TILE_WIDTH, inclusion_proof
from audit.submission import Submissions
from audit.tile import Files, TileHashes, read_bundle
from audit.trail import Trail
from audit.witness import Witness
from felix.errors import Code, UnavailableError
from felix.messages import LOGGED_UNTOLD, CheckpointAnswer, Witnessed
from felix.names import SpiffeId
from felix.pace import Pace
from felix.runtime.port import Clock

T = TypeVar("T")

CHECKPOINTS_PER_S: Final = 1.0
"""Answers with a checkpoint to one bridge of another region: an agent asks every 3 s."""
OWN_CHECKPOINTS_PER_S: Final = 8.0
"""The same to one of this region's own bridges, which asks once for each destination."""
CHECKPOINTS_BURST: Final = 32
"""Two rounds of an agent with 16 destinations. At these two paces cosignatures of this region's checkpoints are brought, too."""
COSIGNATURES_PER_S: Final = 1.0
"""Of one log, for one bridge that brings its checkpoints: an agent brings one every 3 s."""
COSIGNATURES_BURST: Final = 16
COVER_S: Final = 3.0
"""How long a checkpoint that is asked for may take; it is made anyway, and asked for again."""
WAITING_MAX: Final = 4
"""Calls of one bridge about one log that wait for the one before; and of another region's bridge that brings cosignatures."""
OWN_WAITING_MAX: Final = CHECKPOINTS_BURST
"""The same of one of this region's own bridges: what is refused here is not brought again."""
READS_AT_ONCE: Final = 2
"""Threads that all questions how far logs are cosigned take together: a store that is slow keeps the others free."""
READ_PAUSE_S: Final = 0.02
"""Between two reads of what was cosigned of one log. All who ask meanwhile get what the next one finds."""
SHARES: Final = 4
"""So many times what one bridge may, all bridges of its region may together."""
ASKERS_MAX: Final = 10_000
"""Bridges, and regions, whose pace is remembered. A region that makes itself more bridges than that has no more for it than its own pace."""


class _Paces:
    """One pace for each bridge, and a larger one for all bridges of a region."""

    __slots__ = ("_bridges", "_regions")

    def __init__(self, per_s: float, burst: int, clock: Clock) -> None:
        self._bridges = Pace(per_s, burst, ASKERS_MAX, clock.monotonic)
        self._regions = Pace(SHARES * per_s, SHARES * burst, ASKERS_MAX, clock.monotonic)

    def take(self, actor: SpiffeId, about: str = "") -> int:
        """0 where the bridge may go on, else after how many ms it may ask again. What is refused it takes nothing from its region."""
        return self._bridges.take(f"{actor} {about}") or self._regions.take(f"{actor.region} {about}")


class _Line:
    """Calls of bridges that wait for their turn: so many of one bridge, and SHARES times as many of its region."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()

    def has_room(self, actor: SpiffeId, most: int, about: str = "") -> bool:
        bridge, region = _shares(actor, about)
        return self._waiting[bridge] < most and self._waiting[region] < SHARES * most

    async def call(self, turn: asyncio.Lock, actor: SpiffeId, call: Callable[[], T], about: str = "") -> T:
        """Make this call in a thread, when it is its turn. Where the caller hangs up before, it is not made; later, the turn and the
        place in the line are given up once the thread has ended."""
        shares = _shares(actor, about)
        self._waiting.update(shares)
        try:
            await turn.acquire()
            try:
                thread = asyncio.get_running_loop().run_in_executor(None, call)
            except BaseException:
                turn.release()
                raise
        except BaseException:
            self._leave(shares)
            raise

        def ended(_: asyncio.Future[T]) -> None:
            turn.release()
            self._leave(shares)
            if not thread.cancelled():
                # Where the caller has hung up, nobody else asks what became of it.
                thread.exception()

        thread.add_done_callback(ended)
        # Unlike the future itself, this may be cancelled while the thread runs.
        await asyncio.wait([thread])
        return thread.result()

    def _leave(self, shares: tuple[str, str]) -> None:
        self._waiting.subtract(shares)
        for each in shares:
            if not self._waiting[each]:
                del self._waiting[each]


class _Reads(Generic[T]):
    """Reads for callers that ask for the same: one read answers all who asked before it began, so none is answered with what was true before its question.
    The names are bounded by whoever asks."""

    __slots__ = ("_clock", "_ended", "_read", "_threads", "_turns", "_waiting")

    def __init__(self, read: Callable[[str], T], clock: Clock) -> None:
        self._read, self._clock = read, clock
        self._threads = asyncio.Semaphore(READS_AT_ONCE)
        self._turns: dict[str, asyncio.Lock] = {}
        self._ended: dict[str, float] = {}
        self._waiting: dict[str, asyncio.Task[T]] = {}
        """reads that have not begun"""

    async def read(self, name: str) -> T:
        """What is read of this name, in a thread. A caller that hangs up ends no read of others."""
        task = self._waiting.get(name)
        if task is None:
            task = self._waiting[name] = asyncio.get_running_loop().create_task(self._next(name), name="read")
            # Where all callers have hung up, nobody asks what became of it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _next(self, name: str) -> T:
        async with self._turns.setdefault(name, asyncio.Lock()):
            await asyncio.sleep(self._ended.get(name, -READ_PAUSE_S) + READ_PAUSE_S - self._clock.monotonic())
            async with self._threads:
                del self._waiting[name]
                try:
                    return await asyncio.to_thread(self._read, name)
                finally:
                    self._ended[name] = self._clock.monotonic()


def _shares(actor: SpiffeId, about: str) -> tuple[str, str]:
    return f"{actor} {about}", f"{actor.region} {about}"


class Witnessing:
    """One per broker, beside its audit log."""

    def __init__(
        self, witness: Witness, trail: Trail, region: str, clock: Clock, submissions: Submissions | None
    ) -> None:
        """`submissions`: of this region's log to outside witnesses."""
        self.witness = witness
        self._submissions = submissions
        self._trail = trail
        self._region = region
        self._locks: dict[str, asyncio.Lock] = {}
        self._checkpoints = _Paces(CHECKPOINTS_PER_S, CHECKPOINTS_BURST, clock)
        self._own_checkpoints = _Paces(OWN_CHECKPOINTS_PER_S, CHECKPOINTS_BURST, clock)
        self._brought = _Paces(CHECKPOINTS_PER_S, CHECKPOINTS_BURST, clock)
        self._own_brought = _Paces(OWN_CHECKPOINTS_PER_S, CHECKPOINTS_BURST, clock)
        self._cosignatures = _Paces(COSIGNATURES_PER_S, COSIGNATURES_BURST, clock)
        self._reads = _Reads(witness.last_note, clock)
        self._cosigning = _Line()
        self._bringing = _Line()
        self._keeping = asyncio.Lock()
        self._covering: asyncio.Future[bytes] | None = None

    async def cosign(self, actor: SpiffeId, checkpoint: bytes, proof: list[bytes]) -> Witnessed:
        """Cosign another region's checkpoint (audit.witness). Raises ForkError where it is another history, and
        UnavailableError(LIMIT_RATE) where this log is brought too often.

        Nothing is cosigned while this region's own log may not be written: another broker would not remember what this one
        cosigned.
        """
        if (refused := self._trail.held_back()) is not None:
            raise refused
        origin = self.witness.origin_of(checkpoint)
        self._require_pace(self._cosignatures, actor, "cosign one log", origin)
        if not self._cosigning.has_room(actor, WAITING_MAX, origin):
            raise _crowded(f"Too many calls about the log {origin} wait here already.")
        turn = self._locks.setdefault(origin, asyncio.Lock())
        note = await self._cosigning.call(turn, actor, lambda: self.witness.cosign(checkpoint, proof), origin)
        return Witnessed(note_size(note), note)

    async def witnessed_size(self, origin: str) -> Witnessed:
        """How far this region has cosigned an origin, and the log's checkpoint there; 0 where not at all, or where it cosigns no log of this name."""
        if not self.witness.keys_of(origin):
            # Names are whatever the caller chose: none of them costs a thread, or is remembered.
            return Witnessed(0)
        note = await self._reads.read(origin)
        return Witnessed(0) if note is None else Witnessed(note_size(note), note)

    async def checkpoint(
        self, actor: SpiffeId, from_size: int, leaf: int = LOGGED_UNTOLD
    ) -> CheckpointAnswer:
        """The checkpoint that witnesses are to cosign now, with the cosignatures that are kept of it, and the proof that it continues `from_size` leaves. `leaf`: one that a receipt
        names to the bridge that asks; of other leaves it is told nothing. Raises UnavailableError where a durable leaf gets no checkpoint now."""
        pace = self._own_checkpoints if actor.region == self._region else self._checkpoints
        self._require_pace(pace, actor, "give a checkpoint")
        await self._cover(leaf)
        note = self._trail.checkpoints.offer(at_least=from_size)
        size = note_size(note)
        proof: list[bytes] = []
        if 0 < from_size <= size:
            proof = await asyncio.to_thread(self._trail.checkpoints.consistency_proof, from_size, size)
        shown = CheckpointAnswer(self._trail.checkpoints.with_kept_lines(note), size, proof)
        if not LOGGED_UNTOLD < leaf < size:
            return shown
        data, included = await asyncio.to_thread(_brought_by, str(actor), self._trail.files, leaf, size)
        return msgspec.structs.replace(shown, leaf=data, leaf_proof=included)

    async def _cover(self, leaf: int) -> None:
        """Have a checkpoint of a leaf that is durable: without one whoever has its receipt would take the log for one that was put back, and say so for good. All who ask wait for the
        same."""
        trail = self._trail
        if not trail.checkpoints.newest.size <= leaf < trail.status().durable:
            return
        if self._covering is None:
            self._covering = asyncio.ensure_future(asyncio.to_thread(trail.publish, COVER_S))
            self._covering.add_done_callback(self._covered)
        await asyncio.shield(self._covering)

    def _covered(self, covering: asyncio.Future[bytes]) -> None:
        self._covering = None
        if not covering.cancelled():
            # Where all who asked have hung up, nobody asks what became of it.
            covering.exception()

    async def put_cosignature(self, actor: SpiffeId, cosigned: bytes) -> None:
        """Keep another region's cosignature of this region's checkpoint. Raises UnavailableError(LIMIT_RATE) where `actor` brings them too often."""
        is_own = actor.region == self._region
        self._require_pace(self._own_brought if is_own else self._brought, actor, "keep cosignatures")
        if not self._bringing.has_room(actor, OWN_WAITING_MAX if is_own else WAITING_MAX):
            raise _crowded(f"Too many cosignatures that bridges of {actor.region} brought wait here already.")
        # One after the other, so that those that wait for a commit take one thread.
        await self._bringing.call(self._keeping, actor, lambda: self._trail.add_cosigned(cosigned))

    def gauges(self) -> dict[str, float]:
        """How far the outside witnesses are with this region's log; empty where there are none."""
        statuses = [] if self._submissions is None else self._submissions.status()
        if not statuses:
            return {}
        return {
            "audit_witnesses": len(statuses),
            "audit_witnesses_failing": sum(bool(each.failures) for each in statuses),
            "audit_witness_leaves_least": min(each.size for each in statuses),
            "audit_witness_lag_ms": max(each.lag_ms for each in statuses),
        }

    def _require_pace(self, pace: _Paces, who: SpiffeId, what: str, about: str = "") -> None:
        wait_ms = pace.take(who, about)
        if wait_ms:
            raise UnavailableError(
                f"{self._region} was asked to {what} too often.", code=Code.LIMIT_RATE, retry_after_ms=wait_ms
            )


def _crowded(sentence: str) -> UnavailableError:
    return UnavailableError(sentence, code=Code.LIMIT_RATE, retry_after_ms=1_000)


def _brought_by(bridge: str, files: Files, index: int, size: int) -> tuple[bytes, list[bytes]]:
    """A leaf of a log of `size` leaves and its proof of inclusion, if it is about what this bridge brought; else nothing. Blocks on disk. Raises TamperError."""
    data = read_bundle(files, index // TILE_WIDTH, size)[index % TILE_WIDTH]
    header = read_header(data)
    if header is None or (header.kind, header.side, header.bridge) != (Kind.ACK, Side.INGRESS, bridge):
        return b"", []
    return bytes(data), inclusion_proof(index, size, TileHashes(files, size))
