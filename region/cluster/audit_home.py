"""Where a region's audit log is: the record `audit_home` of a cluster, and how it may change.

Invariant: it changes once at most, from the disk of one broker to copies (decision 0132), and then a key of the log has signed what it changed
to. Whoever writes the metadata store cannot have a second history begun by it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Self

import msgspec

from felix.errors import CorruptionError
from felix.settings import Durability
from keys.signing import SigningKey, VerifyKey
from region.metadata.records import AUDIT_STREAM, Stream, StreamConfig
from region.metadata.transaction import Entry

_PURPOSE: Final = "audit-log-copied"


class Before(msgspec.Struct, frozen=True):
    """A log that one broker's disk had before it was copied. `broker`: whose; `size`, `root` (hex): its last checkpoint there; `signature`:
    Ed25519, by a key of the log, over this and the stream that it goes on as."""

    broker: str
    size: int
    root: str
    signature: bytes = b""


class AuditHome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the region's audit log is: `broker`, the one whose disk has it, in regions of before brokers copied it; else the incarnation of the
    stream that has its leaves, and its copies. `before`: where it was until then; None where it began as a stream."""

    broker: str
    incarnation: str = ""
    replicas: int = 0
    created_ms: int = 0
    before: Before | None = None

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """As the store has it. Raises CorruptionError."""
        return cls.decode(entry.value, entry.key)

    @classmethod
    def decode(cls, value: bytes | str, where: str) -> Self:
        """As it stands in `where`. Raises CorruptionError."""
        try:
            return msgspec.json.decode(value, type=cls)
        except msgspec.MsgspecError as error:
            raise CorruptionError(f"{where} does not say where the audit log is: {error}.") from error

    def encode(self) -> str:
        """JSON, as it stands in the store and in brokers' folders."""
        return msgspec.json.encode(self).decode()

    @property
    def stream(self) -> Stream | None:
        """The stream that has the leaves; None where one broker's disk has them."""
        if not self.incarnation:
            return None
        return Stream(
            name=str(AUDIT_STREAM),
            incarnation=self.incarnation,
            created_ms=self.created_ms,
            config=StreamConfig(durability=Durability("fsync"), replicas=self.replicas),
        )

    def signed(self, region: str, key: SigningKey) -> Self:
        """With its signature. `key`: the one that signs the log."""
        assert self.before is not None
        signature = key.sign(_PURPOSE, self._signed_bytes(region))
        return msgspec.structs.replace(self, before=msgspec.structs.replace(self.before, signature=signature))

    def continues(self, known: str) -> bool:
        """Whether it says of itself that it is the log that was `known`, on one broker's disk."""
        return (
            self.before is not None
            and self.incarnation != ""
            and known == AuditHome(self.before.broker).encode()
        )

    def follows(self, known: str, region: str, keys: Iterable[VerifyKey]) -> bool:
        """Whether this is the log that was `known`, on one broker's disk, and one of `keys` signed that it goes on here."""
        before = self.before
        if before is None or not self.continues(known):
            return False
        message = self._signed_bytes(region)
        return any(key.holds(_PURPOSE, message, before.signature) for key in keys)

    def _signed_bytes(self, region: str) -> bytes:
        assert self.before is not None
        before = msgspec.structs.replace(self.before, signature=b"")
        return msgspec.json.encode((region, msgspec.structs.replace(self, before=before)), order="sorted")
