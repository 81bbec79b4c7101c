"""How long another region's audit log has to be by the receipts that it gave, whichever link has them.

A receipt names the leaf of its range, and is given once that is durable. So a region whose log has not that leaf was put back to a backup, also where nothing crossed by the link that
asks, and where the log has grown past the leaf's place since: what crosses now, and what is cosigned, would make another history of its log, beside which the newest copy could not be put back any
more. The region shows the leaf, included in the checkpoint that it shows; a broker of before shows the checkpoint alone. Receipts behind which a link was found truncated say nothing: there an
operator decides (bridge.link_opening). Caller: bridge.agent.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from audit.checkpoint import Checkpoint
from audit.leaf import decode_leaf, read_header
from audit.merkle import leaf_hash, verify_inclusion
from audit.note import parse_note
from audit.position import Crossing
from audit.receipt import read_unverified
from audit.trail import Trail
from bridge.endpoint import RegionEndpoint
from bridge.ledger import Ledger
from felix.errors import Code, CorruptionError, FelixError, TamperError, UnavailableError
from felix.link import Link
from felix.messages import CheckpointAnswer, GetCheckpoint
from felix.runtime.port import Runtime

LATE_S: Final = 10.0
"""How long a log may show no checkpoint of a leaf that is durable: it makes one each second, after a start once all brokers have its leaves."""
AGAIN_MS: Final = 500


class Received(NamedTuple):
    """What a receipt is for."""

    leaf: int
    envelope_sha256: bytes


class _Short(NamedTuple):
    link: Link
    asked: Received
    since_s: float


class Receipted:
    """Of one agent. What was received before a session is asked for in it, once: what is put back ends the session, and what is received meanwhile has its checkpoint a little later."""

    def __init__(self, runtime: Runtime) -> None:
        self._clock_s = runtime.clock.monotonic
        self._held: dict[str, Link] = {}
        """by region the session in which its log was seen to reach"""
        self._short: dict[str, _Short] = {}
        """the sessions in which it was not, with the leaf that is asked for, since when"""

    async def check(self, endpoint: RegionEndpoint, trail: Trail, ledger: Ledger) -> None:
        """Raises CorruptionError(ROLLED_BACK) where the region's log has not the leaf of the newest receipt, UnavailableError where it may only be late. Blocks for the files in a thread."""
        region, link = endpoint.region, endpoint.link()
        if self._held.get(region) is link:
            return
        newest = newest_receipt(trail, ledger, region)
        received = None if newest is None else await asyncio.to_thread(_received, trail, newest)
        if received is None:
            self._reaches(region, link)
            return
        short = self._short.get(region)
        if short is None or short.link is not link:
            short = _Short(link, received, self._clock_s())
        # No later one, which may have no checkpoint yet; an earlier one where a link was found truncated since.
        short = short._replace(asked=min(short.asked, received))
        leaf = short.asked.leaf
        answer = await endpoint.connection().request(GetCheckpoint(leaf + 1, leaf))
        hint = f"Have {region} restore its log's newest copy; nothing crosses until then. Where there is none, docs/operations.md says how to go on."
        if answer.size > leaf:
            if answer.leaf is not None and not _has(answer, short.asked):
                raise CorruptionError(
                    f"{region} gave a receipt for leaf {leaf:,} of its audit log, which has another leaf there: it was rolled back, and went on from there.",
                    code=Code.ROLLED_BACK,
                    hint=hint,
                )
            self._reaches(region, link)
            return
        self._short[region] = short
        said = f"{region} gave a receipt for leaf {leaf:,} of its audit log, whose newest checkpoint has {answer.size:,} leaves"
        if self._clock_s() - short.since_s < LATE_S:
            raise UnavailableError(f"{said}.", retry_after_ms=AGAIN_MS)
        raise CorruptionError(f"{said}: it was rolled back.", code=Code.ROLLED_BACK, hint=hint)

    def _reaches(self, region: str, link: Link) -> None:
        self._held[region] = link
        self._short.pop(region, None)


def newest_receipt(trail: Trail, ledger: Ledger, region: str) -> Crossing | None:
    """The newest ACK from this region behind which its link was not found truncated; None where there is none."""
    found = (
        ack
        for key in trail.positions.link_shards()
        if key.destination_region == region and (ack := trail.positions.last_ack(key)) is not None
        if (account := ledger.shard(key, ack.incarnation)) is None
        or not any(first <= ack.last_offset <= last for first, last in account.truncated)
    )
    return max(found, key=lambda ack: ack.number, default=None)


def _received(trail: Trail, ack: Crossing) -> Received | None:
    """Blocks. None of a leaf that is not durable yet, or cannot be read."""
    for _, data in trail.leaves(ack.number):
        try:
            return Received(
                read_unverified(decode_leaf(data).header.receipt).ingress_index, ack.envelope_sha256
            )
        except FelixError:
            return None
    return None


def _has(answer: CheckpointAnswer, received: Received) -> bool:
    """Whether the log that is shown has the leaf that the receipt is for: by its envelope, and by the proof that it stands there. Whose checkpoint it is, whoever cosigns it asks."""
    header = None if answer.leaf is None else read_header(answer.leaf)
    if answer.leaf is None or header is None or header.envelope_sha256 != received.envelope_sha256:
        return False
    try:
        checkpoint = Checkpoint.parse(parse_note(answer.checkpoint).text)
        verify_inclusion(
            leaf_hash(answer.leaf), received.leaf, checkpoint.size, answer.leaf_proof, checkpoint.root
        )
    except TamperError:
        return False
    return checkpoint.size == answer.size
