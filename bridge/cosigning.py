"""Checkpoints are cosigned both ways: the egress log by each destination, and each region's own log by the other.

Invariant: one region that does not answer, or answers what nobody thought of, keeps no other from being cosigned. On the event loop. Caller:
bridge.agent, each COSIGN_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from audit.asked import REGION_PAUSE_MS_MAX, Asked, answered_note, name_keys
from audit.checkpoint import note_size
from audit.note import parse_note
from audit.witness import WitnessStore
from bridge.endpoint import RegionEndpoint
from bridge.link_context import LinkContext
from bridge.reasons import Reasons
from bridge.region_log import Askings, cosign_region_log
from felix.errors import Code, FelixError, TamperError, UnavailableError
from felix.messages import Cosign, WitnessedSize
from felix.tasks import end_tasks

log = logging.getLogger("felix.bridge.cosigning")

COSIGN_S: Final = 3.0
CROWDED: Final = (Code.CONFLICT, Code.LIMIT_RATE)
"""What a cosignature is kept away by for as long as others go on: shown, where another failure that ends by itself is not."""
COSIGN_WAIT_S: Final = 10.0
"""How long a round waits for regions to cosign before the ledger's snapshot is written and the next one begins with the others."""


class _Uncosigned(NamedTuple):
    """Why cosigning with a region fails: a bundle that was not given again, others that are always first, or lines that it leaves out."""

    since_ms: int
    """of the monotonic clock"""
    sentence: str


class Cosigning:
    """One per agent."""

    def __init__(
        self,
        context: LinkContext,
        endpoints: Mapping[str, RegionEndpoint],
        mesh: str,
        shown: WitnessStore,
        check_receipts: Callable[[RegionEndpoint], Awaitable[None]],
        reasons: Reasons,
    ) -> None:
        """`shown`: the newest checkpoints of the regions' own logs that this agent had cosigned. `check_receipts`: raises where a region's log lacks what it
        gave receipts for."""
        self._context = context
        self._endpoints = endpoints
        self._mesh = mesh
        self._shown = shown
        self._check_receipts = check_receipts
        self._reasons = reasons
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._askings: Askings = {}
        self._uncosigned: dict[str, _Uncosigned] = {}
        """regions with which cosigning fails"""

    def failed_ms(self) -> dict[str, int]:
        """For how long cosigning with each other region has failed; 0 where it does not."""
        now_ms, failed = self._context.monotonic_ms(), self._uncosigned
        others = (region for region, each in self._endpoints.items() if each is not self._context.source)
        return {region: now_ms - failed[region].since_ms if region in failed else 0 for region in others}

    def troubles(self) -> list[str]:
        """With whom it fails, a sentence each."""
        failed_ms = self.failed_ms()
        return [
            f"Cosigning with {region} has failed for {failed_ms[region] // 1000} s: {each.sentence}"
            for region, each in sorted(self._uncosigned.items())
        ]

    async def close(self) -> None:
        """End what is under way."""
        await end_tasks(*self._under_way.values())

    async def round(self, *, final: bool = False) -> None:
        """The egress log by every destination; each region's own log by the other. `final`: up to the last leaf.

        All at once: one that does not answer is not waited for in the next round, and delays no other. What is under way before
        the final round is ended, since it may be about an older checkpoint.
        """
        if final:
            await end_tasks(*self._under_way.values())
        for region, endpoint in self._endpoints.items():
            if endpoint is not self._context.source and endpoint.is_up and region not in self._under_way:
                self._under_way[region] = asyncio.ensure_future(self._cosign_with(region, endpoint, final))
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=None if final else COSIGN_WAIT_S)

    async def _cosign_with(self, region: str, endpoint: RegionEndpoint, final: bool) -> None:
        source = self._context.source
        failed = list[str]()
        try:
            # One that fails keeps no other from being cosigned.
            failed += await self._why(f"cosigning with {region}", self._cosign_egress(endpoint, final))
            for of, witness in ((endpoint, source), (source, endpoint)):
                if endpoint.is_up and source.is_up:
                    work = self._cosign_region_log(of, witness)
                    failed += await self._why(f"cosigning the log of {of.region} by {witness.region}", work)
            if any(failed):
                held = self._uncosigned.get(region)
                since_ms = self._context.monotonic_ms() if held is None else held.since_ms
                self._uncosigned[region] = _Uncosigned(since_ms, " ".join(filter(None, failed)))
            elif not failed:
                self._uncosigned.pop(region, None)
        except Exception:
            # A full disk, or a mistake of ours: the next round tries again, or nothing is witnessed any more.
            log.exception("cosigning with %s failed", region)
        finally:
            del self._under_way[region]

    async def _cosign_region_log(self, of: RegionEndpoint, witness: RegionEndpoint) -> None:
        if of is not self._context.source and self._context.trail is not None:
            # Once a log that was put back is cosigned as it goes on, its newest copy is another history.
            await self._check_receipts(of)
        await cosign_region_log(
            of, witness, self._mesh, self._askings, self._context.monotonic_ms(), self._shown
        )

    async def _why(self, what: str, work: Awaitable[None]) -> list[str]:
        """What `work` failed with, as the status shows it: empty where it ends by itself. None where it did not fail."""
        try:
            await work
        except FelixError as error:
            self._reasons.say(what, error)
            if error.code is Code.ROLLED_BACK:
                log.error("%s: %s", what, error)
            ends_by_itself = isinstance(error, UnavailableError) and error.code not in CROWDED
            return ["" if ends_by_itself else f"{error.sentence} {error.hint}".strip()]
        except OSError as error:
            self._reasons.say(what, error)
            return [f"{what} failed: {error}"]
        except Exception as error:
            # An answer that nobody thought of, or a mistake of ours: shown, and no other log is left out for it.
            sentence = f"{what} failed: {type(error).__name__}: {str(error)[:300]}".rstrip(": ")
            if self._reasons.is_new(what, sentence):
                log.exception("%s failed", what)
            return [sentence]
        return []

    async def _cosign_egress(self, witness: RegionEndpoint, final: bool) -> None:
        trail = self._context.trail
        if trail is None:
            return
        self._context.require_whole(witness.region)
        connection = witness.connection()
        answer = await connection.request(WitnessedSize(trail.key.name))
        newest = await asyncio.to_thread(trail.publish)
        note = trail.checkpoints.offer(at_least=note_size(newest) if final else answer.size)
        size = note_size(note)
        if not size:
            return
        text, keys = parse_note(note).text, witness.trust.witnesses
        asked = self._askings.setdefault((trail.key.name, witness.region), Asked(REGION_PAUSE_MS_MAX))
        if answer.size >= size and trail.checkpoints.is_cosigned_by(note, keys):
            asked.stands()
            return
        failure = asked.failure(text, self._context.monotonic_ms())
        if failure is not None and not final:
            raise failure.with_traceback(None)
        proof: list[bytes] = []
        if 0 < answer.size < size:
            proof = await asyncio.to_thread(trail.checkpoints.consistency_proof, answer.size, size)
        cosigned = await connection.request(Cosign(note, proof))
        try:
            answered_note(cosigned.cosigned, text, "the egress log", witness.region)
            await asyncio.to_thread(trail.add_cosigned, cosigned.cosigned)
            if lacking := trail.checkpoints.lacking(note, keys):
                raise TamperError(
                    f"{witness.region} answered, and the egress log has no line that holds of {name_keys(lacking)}, which its bundle names."
                )
        except FelixError as error:
            if not isinstance(error, UnavailableError):
                asked.failed(text, error, self._context.monotonic_ms())
            raise
        asked.stands()
        self._context.failpoints.at("cosign")
