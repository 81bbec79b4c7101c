"""What a log begins with: what its first segment holds before any entry of its own, and what recovery would find there. Pure.

`region.log.disk` begins logs so, and `region.log.adoption` copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from region.log.epochs import EpochHistory
from region.log.origin import Origin
from region.log.producers import ProducerTable, decode_snapshot
from region.log.recovery import Recovered
from region.log.segment import Kind, SegmentHeader, encode_entry_header


def encode_beginning(header: SegmentHeader, annotations: Mapping[int, bytes]) -> list[bytes]:
    """What a new segment begins with: its header, and the last annotation of every slot, so that retention never loses one."""
    encoded = header.encode()
    copies = [
        encode_entry_header(
            Kind.POSITION,
            base_offset=header.base_offset,
            leader_epoch=0,
            synced_to=len(encoded),
            batch_length=0,
            slot=slot,
            annotation=annotation,
            salt=header.salt,
        )
        for slot, annotation in annotations.items()
    ]
    return [encoded, *copies]


def beginning(origin: Origin) -> Recovered:
    """What recovery would find of a log that has just begun. Raises CorruptionError."""
    point = origin.point
    producers = (
        decode_snapshot(origin.producers)[0] if origin.producers else ProducerTable(settled=point.offset)
    )
    producers.rollback(point.offset)
    return Recovered(
        [],
        dict(origin.annotations),
        EpochHistory([one for one in origin.epochs if one.start_offset < point.offset]),
        producers,
    )
