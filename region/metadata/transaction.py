"""What goes to a metadata store and comes back from it: keys, entries, compares, writes and changes, and the bounds on them.

Values only, so that code which decides on a transaction needs no store. Pure; `port` says what a store does with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from felix.errors import RequestError

KEY_BYTES_MAX: Final = 512
"""The longest key of ours (a stream's shard) has about 250 bytes; keys are held in memory by every store."""
VALUE_BYTES_MAX: Final = 1 << 20
"""etcd accepts requests of 1.5 MiB by default; a record and its transaction fit in."""
OPERATIONS_MAX: Final = 128
"""Compares, and writes, of one transaction: etcd's default `--max-txn-ops`."""
TRANSACTION_BYTES_MAX: Final = 5 << 18
"""1.25 MiB of keys and values in one transaction: below etcd's default `--max-request-bytes` with room for framing."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value. `lease` is 0 where none is bound."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Entries in key order as of `revision`. With `more`, the next page starts after the last key."""

    entries: tuple[Entry, ...]
    revision: int
    more: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything under a prefix. A watch from `revision + 1` brings it up to date, whatever changed while loading."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class ModRevision:
    """Holds while the key was last changed at `revision`; 0 means that the key is absent."""

    key: str
    revision: int

    def holds(self, entry: Entry | None) -> bool:
        """Whether it holds of the key's entry."""
        return (0 if entry is None else entry.mod_revision) == self.revision


@dataclass(frozen=True, slots=True)
class Absent:
    """Holds while there is no such key."""

    key: str

    def holds(self, entry: Entry | None) -> bool:
        """Whether it holds of the key's entry."""
        return entry is None


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Holds while the key exists with exactly this value."""

    key: str
    value: bytes

    def holds(self, entry: Entry | None) -> bool:
        """Whether it holds of the key's entry."""
        return entry is not None and entry.value == self.value


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key. `lease` binds it to a lease; 0 unbinds it from the one it had."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; an absent one is no error and makes no event."""

    key: str


Compare = ModRevision | Absent | ValueIs
Write = Put | Delete


@dataclass(frozen=True, slots=True)
class TransactResult:
    """`revision`: the one this transaction made, or the store's present one where it changed nothing."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Event:
    """One key changed. `entry` is None where it was deleted."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Change:
    """All events of one revision under the watched prefix. Resume from `revision + 1`."""

    revision: int
    events: tuple[Event, ...]


def _refuse(sentence: str, hint: str = "") -> RequestError:
    return RequestError(sentence, hint=hint)


def encode_key(key: str, what: str = "key") -> bytes:
    """UTF-8 of a key or prefix, bounded. Raises RequestError(INVALID)."""
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise _refuse(f"A metadata {what} is not valid Unicode text: {key[:80]!r}.") from None
    if len(encoded) > KEY_BYTES_MAX:
        raise _refuse(
            f"The metadata {what} {key[:60]!r}… has {len(encoded)} bytes; at most {KEY_BYTES_MAX} are allowed."
        )
    if any(byte < 0x20 or byte == 0x7F for byte in encoded):
        raise _refuse(f"The metadata {what} {key[:80]!r} contains a control character.")
    return encoded


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key after all keys with this prefix; None where there is no end (an empty prefix)."""
    trimmed = prefix.rstrip(b"\xff")
    return None if not trimmed else trimmed[:-1] + bytes([trimmed[-1] + 1])


def check_transaction(compares: Sequence[Compare], writes: Sequence[Write]) -> None:
    """Raises RequestError(INVALID) for what no store accepts; the sentence names the bound."""
    for what, operations in (("compares", len(compares)), ("writes", len(writes))):
        if operations > OPERATIONS_MAX:
            raise _refuse(
                f"A metadata transaction with {operations} {what} was refused; at most {OPERATIONS_MAX} are allowed.",
                "Split it, and make each part correct by itself.",
            )
    total = 0
    for operation in (*compares, *writes):
        key_bytes = len(encode_key(operation.key))
        if not key_bytes:
            raise _refuse("A metadata key is empty.")
        value_bytes = len(operation.value) if isinstance(operation, Put | ValueIs) else 0
        if value_bytes > VALUE_BYTES_MAX:
            raise _refuse(
                f"The value for metadata key {operation.key!r} has {value_bytes} bytes; "
                f"at most {VALUE_BYTES_MAX} are allowed.",
                "Metadata holds configuration and signed documents; data belongs in a stream.",
            )
        total += key_bytes + value_bytes
    if total > TRANSACTION_BYTES_MAX:
        raise _refuse(
            f"A metadata transaction of {total} bytes was refused; at most {TRANSACTION_BYTES_MAX} are allowed.",
            "Split it, and make each part correct by itself.",
        )
    keys = [write.key for write in writes]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _refuse(f"A metadata transaction writes the key {twice!r} twice.", "Write each key once.")
