"""The effect of a record of a cache's stream on its key, and the records that have these effects. Pure.

A record without TOMBSTONE_HEADER puts its payload under its key; with it, the key is gone, and the header's value says why. The
time of its expiry stands in EXPIRES_HEADER, in ms since the Unix epoch as decimal digits (0: never); without that header it
is what the cache was made with, from the time of the append on. Records without a key are no concern of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from felix.batch import TOMBSTONE_HEADER, Batch, NewRecord, decode_records, encode_batch

EXPIRES_HEADER: Final = "felix.expires-at"
OPERATION_HEADER: Final = "felix.operation"
"""The id of an operation that must not be carried out twice (16 bytes)."""
EXPIRES_DIGITS_MAX: Final = 16
"""Beyond the year 300,000."""
RECORD_BYTES: Final = 128
"""Around a record's key and value in a batch: columns and the headers of this module."""


class Reason(IntEnum):
    """What happened to a key."""

    PUT = 0
    DELETED = 1
    EXPIRED = 2
    EVICTED = 3


class Change(NamedTuple):
    """One record's effect. `value` is empty unless `reason` is PUT; times in ms, 0 for never."""

    key: bytes
    value: bytes
    expires_at_ms: int
    reason: Reason
    operation: bytes = b""


_WORDS: Final = {reason: reason.name.lower().encode() for reason in Reason}
_REASONS: Final = {word: reason for reason, word in _WORDS.items() if reason is not Reason.PUT}
_GONE: Final = {reason: {TOMBSTONE_HEADER: word} for reason, word in _WORDS.items()}


def encode_changes(changes: Iterable[Change], *, default_ttl: bool) -> Batch:
    """One batch with these changes. With `default_ttl`, values that never expire are marked. Raises
    RequestError(BATCH_TOO_LARGE).
    """
    return encode_batch([_record(change, default_ttl) for change in changes])


def _record(change: Change, default_ttl: bool) -> NewRecord:
    if change.reason is not Reason.PUT:
        return NewRecord(b"", change.key, _GONE[change.reason])
    headers: dict[str, bytes] | None = None
    if change.expires_at_ms or default_ttl:
        headers = {EXPIRES_HEADER: b"%d" % change.expires_at_ms}
    if change.operation:
        headers = {**(headers or {}), OPERATION_HEADER: change.operation}
    return NewRecord(change.value, change.key, headers)


def decode_changes(batch: Batch, ttl_ms: int) -> list[tuple[int, Change]]:
    """The effects of a plain batch, by offset. `ttl_ms` is the cache's own, 0 for none. Raises RequestError(BATCH_MALFORMED)."""
    found: list[tuple[int, Change]] = []
    for offset, time_ms, key, headers, payload in decode_records(batch):
        if key is None:
            continue
        if not headers:
            found.append(
                (offset, Change(bytes(key), bytes(payload), time_ms + ttl_ms if ttl_ms else 0, Reason.PUT))
            )
            continue
        word = headers.get(TOMBSTONE_HEADER)
        if word is not None:
            found.append((offset, Change(bytes(key), b"", 0, _REASONS.get(word, Reason.DELETED))))
            continue
        expires = headers.get(EXPIRES_HEADER, b"")
        if expires.isdigit() and len(expires) <= EXPIRES_DIGITS_MAX:
            expires_at_ms = int(expires)
        else:
            expires_at_ms = time_ms + ttl_ms if ttl_ms else 0
        operation = headers.get(OPERATION_HEADER, b"")
        found.append((offset, Change(bytes(key), bytes(payload), expires_at_ms, Reason.PUT, operation[:16])))
    return found
