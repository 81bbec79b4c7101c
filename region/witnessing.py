"""Witnessing between regions: this region cosigns others' checkpoints, and gives out its own to be cosigned.

Requests of other regions' bridges are bounded: frequent requests cannot make this region write checkpoints, sync its disk or
keep files. Invariants: a checkpoint that is given out is one that the audit log has made by its own timer; a log is cosigned by
one call at a time, in a thread; a caller that asks too often is refused with LIMIT_RATE and the time after which to retry.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from audit.checkpoint import note_size
from audit.submission import Submissions
from audit.trail import Trail
from audit.witness import Witness
from felix.errors import Code, UnavailableError
from felix.messages import CheckpointAnswer, Witnessed
from felix.names import SpiffeId
from felix.pace import Pace
from felix.runtime.port import Clock

CHECKPOINTS_PER_S: Final = 1.0
"""Answers with a checkpoint to one other region: an agent asks every 3 s."""
OWN_CHECKPOINTS_PER_S: Final = 8.0
"""The same to this region's own bridges, which ask once for each destination."""
CHECKPOINTS_BURST: Final = 32
"""Two rounds of an agent with 16 destinations. At these two paces cosignatures of this region's checkpoints are brought, too."""
COSIGNATURES_PER_S: Final = 1.0
"""Of one log, for one region that brings its checkpoints: an agent brings one every 3 s."""
COSIGNATURES_BURST: Final = 16
WAITING_MAX: Final = 4
"""Calls about one log that wait for the one before; and of another region that bring cosignatures."""
OWN_WAITING_MAX: Final = CHECKPOINTS_BURST
"""The same of this region's own bridges: what is refused here is not brought again."""
ASKERS_MAX: Final = 10_000
"""Regions and logs whose pace is remembered."""


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
        self._waiting: Counter[str] = Counter()
        self._checkpoints = Pace(CHECKPOINTS_PER_S, CHECKPOINTS_BURST, ASKERS_MAX, clock.monotonic)
        self._own_checkpoints = Pace(OWN_CHECKPOINTS_PER_S, CHECKPOINTS_BURST, ASKERS_MAX, clock.monotonic)
        self._brought = Pace(CHECKPOINTS_PER_S, CHECKPOINTS_BURST, ASKERS_MAX, clock.monotonic)
        self._own_brought = Pace(OWN_CHECKPOINTS_PER_S, CHECKPOINTS_BURST, ASKERS_MAX, clock.monotonic)
        self._bringing: Counter[str] = Counter()
        self._keeping = asyncio.Lock()
        self._cosignatures = Pace(COSIGNATURES_PER_S, COSIGNATURES_BURST, ASKERS_MAX, clock.monotonic)

    async def cosign(self, actor: SpiffeId, checkpoint: bytes, proof: list[bytes]) -> Witnessed:
        """Cosign another region's checkpoint (audit.witness). Raises ForkError where it is another history, and
        UnavailableError(LIMIT_RATE) where this log is brought too often.

        Nothing is cosigned while this region's own log may not be written: another broker would not remember what this one
        cosigned.
        """
        if (refused := self._trail.held_back()) is not None:
            raise refused
        origin = self.witness.origin_of(checkpoint)
        self._require_pace(self._cosignatures, f"{actor.region} {origin}", "cosign one log")
        if self._waiting[origin] >= WAITING_MAX:
            raise UnavailableError(
                f"{WAITING_MAX} calls about the log {origin} wait here already.",
                code=Code.LIMIT_RATE,
                retry_after_ms=1_000,
            )
        self._waiting[origin] += 1
        try:
            async with self._locks.setdefault(origin, asyncio.Lock()):
                note = await asyncio.to_thread(self.witness.cosign, checkpoint, proof)
        finally:
            self._waiting[origin] -= 1
        return Witnessed(note_size(note), note)

    async def witnessed_size(self, origin: str) -> Witnessed:
        """How far this region has cosigned an origin, and the log's checkpoint there; 0 where not at all."""
        note = await asyncio.to_thread(self.witness.last_note, origin)
        return Witnessed(0) if note is None else Witnessed(note_size(note), note)

    async def checkpoint(self, actor: SpiffeId, from_size: int) -> CheckpointAnswer:
        """The checkpoint that witnesses are to cosign now, and the proof that it continues `from_size` leaves."""
        pace = self._own_checkpoints if actor.region == self._region else self._checkpoints
        self._require_pace(pace, actor.region, "give a checkpoint")
        note = self._trail.checkpoints.offer(at_least=from_size)
        size = note_size(note)
        proof: list[bytes] = []
        if 0 < from_size <= size:
            proof = await asyncio.to_thread(self._trail.checkpoints.consistency_proof, from_size, size)
        return CheckpointAnswer(note, size, proof)

    async def put_cosignature(self, actor: SpiffeId, cosigned: bytes) -> None:
        """Keep another region's cosignature of this region's checkpoint. Raises UnavailableError(LIMIT_RATE) where `actor` brings them too often."""
        is_own = actor.region == self._region
        self._require_pace(self._own_brought if is_own else self._brought, actor.region, "keep cosignatures")
        if self._bringing[actor.region] >= (OWN_WAITING_MAX if is_own else WAITING_MAX):
            raise UnavailableError(
                f"Too many cosignatures that {actor.region} brought wait here already.",
                code=Code.LIMIT_RATE,
                retry_after_ms=1_000,
            )
        self._bringing[actor.region] += 1
        try:
            # One after the other, so that those that wait for a commit take one thread.
            async with self._keeping:
                await asyncio.to_thread(self._trail.add_cosigned, cosigned)
        finally:
            self._bringing[actor.region] -= 1

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

    def _require_pace(self, pace: Pace, who: str, what: str) -> None:
        wait_ms = pace.take(who)
        if wait_ms:
            raise UnavailableError(
                f"{self._region} was asked to {what} too often.", code=Code.LIMIT_RATE, retry_after_ms=wait_ms
            )
