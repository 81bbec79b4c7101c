"""Entries of a replicated log, for tests: batches with their final header, positions."""

from __future__ import annotations

from msgspec.structs import replace

from felix.batch import Batch, NewRecord, encode_batch
from region.log.frame import Frame
from region.log.segment import ShardIdentity

INCARNATION = bytes(range(16))
IDENTITY = ShardIdentity("us-east", "acme/payments/orders", INCARNATION, 0)


def batch(offset: int, epoch: int, records: int = 1, payload: bytes = b"") -> Batch:
    made = encode_batch([NewRecord(payload or f"{offset + at}".encode()) for at in range(records)])
    header = replace(made.header, base_offset=offset, leader_epoch=epoch, append_time_ms=1_000)
    return Batch(header, made.body)


def entry(
    offset: int, epoch: int, records: int = 1, annotation: bytes = b"", slot: int = 0, payload: bytes = b""
) -> Frame:
    return Frame(batch(offset, epoch, records, payload), offset, epoch, slot, annotation)


def keyed(offset: int, epoch: int, *keys: bytes) -> Frame:
    """A batch with a record of each key."""
    made = encode_batch([NewRecord(b"%d" % offset + b"." * 60, key) for key in keys])
    header = replace(made.header, base_offset=offset, leader_epoch=epoch, append_time_ms=1_000)
    return Frame(Batch(header, made.body), offset, epoch)


def position(offset: int, epoch: int, annotation: bytes = b"", slot: int = 0) -> Frame:
    return Frame(None, offset, epoch, slot, annotation)
