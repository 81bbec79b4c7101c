"""Frames of a copy, asked of another broker by one whose own are damaged, and answered (region.replication.repairer).

Invariants: a peer is given what is committed of a shard that its record gives it a part in, by a copy that is in sync, and nothing else; what comes is
looked at by who takes it, as the frames of a leader are.
"""

from __future__ import annotations

from typing import Final

import msgspec

from felix.batch import OFFSET_MAX
from felix.errors import Code, ProtocolError
from region.cluster.records import ShardId
from region.copies.peer_requests import PeerRequest, PeerRequests
from region.log.point import LogPoint
from region.log.segment import ANNOTATION_BYTES_MAX, ANNOTATION_SLOTS_MAX
from region.replication.host import ReplicaHost
from region.replication.repairer import Fetched, Wanted
from region.replication.wire import decode_entries, encode_entries

ANSWER_S: Final = 5.0
"""A megabyte of a segment is read and sent in far less; another copy is asked then."""


class FramesAsk(PeerRequest, frozen=True, tag="copied-frames"):
    """Committed frames of a log, from one point to another; points are offset and note."""

    incarnation: str
    shard: int
    log: int
    begin: LogPoint
    end: LogPoint
    with_annotations: bool


class FramesTold(msgspec.Struct, frozen=True, array_like=True):
    """The first of them, as region.replication.wire has entries, and the annotations in force where they begin."""

    annotations: dict[int, bytes]
    entries: bytes


class CopiedFrames:
    """Of one broker: asks others, and answers them."""

    def __init__(self, requests: PeerRequests) -> None:
        self._requests = requests

    def serve(self, host: ReplicaHost) -> None:
        """Answer from the copies here."""

        async def told(peer: str, asked: FramesAsk) -> FramesTold:
            if not asked.begin < asked.end or min(asked.begin) < 0 or asked.end.offset > OFFSET_MAX + 1:
                raise ProtocolError(f"Broker {peer} asks for no range of a log.", code=Code.FRAME_MALFORMED)
            shard = ShardId(asked.incarnation, asked.shard)
            wanted = Wanted(shard, asked.log, asked.begin, asked.end, asked.with_annotations)
            fetched = await host.reads.for_repair(peer, wanted)
            return FramesTold(fetched.annotations, encode_entries(fetched.frames))

        self._requests.serve(FramesAsk, told)

    async def fetch(self, peer: str, wanted: Wanted) -> Fetched:
        """For `Repairer`. Raises the peer's refusal, UnavailableError, ProtocolError."""
        shard, log, begin, end, with_annotations = wanted
        asked = FramesAsk(shard.incarnation, shard.number, log, begin, end, with_annotations)
        try:
            told = await self._requests.ask(peer, asked, FramesTold, timeout_s=ANSWER_S)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                f"Broker {peer} answers what cannot be read: {error}.", code=Code.FRAME_MALFORMED
            ) from error
        if len(told.annotations) > ANNOTATION_SLOTS_MAX:
            raise ProtocolError(
                f"Broker {peer} tells of {len(told.annotations)} annotations.", code=Code.FRAME_MALFORMED
            )
        for slot, annotation in told.annotations.items():
            if not 0 <= slot < 1 << 64 or not 0 < len(annotation) <= ANNOTATION_BYTES_MAX:
                raise ProtocolError(
                    f"Broker {peer} tells of an annotation of {len(annotation)} bytes in slot {slot}.",
                    code=Code.FRAME_MALFORMED,
                )
        return Fetched(told.annotations, decode_entries(told.entries))
