"""An application's input for a record: payload, key and message id, checked. Pure.

Errors say what to hand in instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from felix.batch import KEY_BYTES_MAX, MESSAGE_ID_BYTES_MAX, MESSAGE_ID_HEADER, Headers
from felix.errors import Code, RequestError

RECORD_OVERHEAD_BYTES: Final = 12
"""Overhead of a record in a batch, in bytes: one entry in each of the three columns."""

Payload = bytes | bytearray | memoryview
RecordKey = bytes | bytearray | memoryview
"""Of a record; a view too, as the records of a received batch have it."""
MessageId = bytes | str


def with_message_id(headers: Headers | None, message_id: MessageId) -> Headers:
    """The headers with the message id among them. Raises RequestError where it is empty or too long."""
    try:
        raw = message_id.encode() if isinstance(message_id, str) else message_id
    except UnicodeEncodeError as error:
        raise RequestError(f"This message id is no text: {error}.") from error
    if not isinstance(raw, bytes) or not 0 < len(raw) <= MESSAGE_ID_BYTES_MAX:
        raise RequestError(
            f"A message id is text or bytes, 1 to {MESSAGE_ID_BYTES_MAX} bytes long, not {message_id!r:.80}."
        )
    return {**(headers or {}), MESSAGE_ID_HEADER: raw}


def message_id_of(headers: Headers | None) -> bytes | None:
    """The message id among the headers, if there is one."""
    return headers.get(MESSAGE_ID_HEADER) if headers else None


def paired(
    payloads: Iterable[Payload], keys: Iterable[RecordKey | None] | None
) -> Iterator[tuple[Payload, RecordKey | None]]:
    """Payloads with their keys. Raises RequestError where there are not as many of both."""
    if keys is None:
        for payload in payloads:
            yield payload, None
        return
    try:
        yield from zip(payloads, keys, strict=True)
    except ValueError as error:
        raise RequestError("There are not as many keys as payloads.") from error


def payload_bytes(payload: object) -> bytes:
    """The payload as immutable bytes. Raises RequestError if it is not bytes-like."""
    if type(payload) is bytes:
        return payload
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise RequestError(
        f"A payload is bytes, not {type(payload).__name__}.",
        hint="Encode it first, as in text.encode() or json.dumps(value).encode().",
    )


def key_bytes(key: object) -> bytes:
    """The key as immutable bytes. Raises RequestError if it is not bytes-like, or too long."""
    if type(key) is not bytes:
        if not isinstance(key, bytes | bytearray | memoryview):
            raise RequestError(
                f"A key is bytes, not {type(key).__name__}.",
                hint="Encode it first, as in text.encode() or str(number).encode().",
            )
        key = bytes(key)
    if len(key) > KEY_BYTES_MAX:
        raise RequestError(
            f"A key has {len(key)} bytes; {KEY_BYTES_MAX} are allowed.", code=Code.BATCH_TOO_LARGE
        )
    return key
