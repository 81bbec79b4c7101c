"""Handing a data key to a bridge: sealed to the bridge's own public key, for one grant, and good for opening only.

The broker seals the 32 secret bytes (keys.hybrid) with `info` binding region, stream, incarnation, shard, epoch, key id, grant
id, hash of terms and the bridge's SPIFFE id. The caller decides whether a bridge may have a key before it calls this module.
Pure. The broker seals, the bridge agent opens.
"""

from __future__ import annotations

from dataclasses import dataclass

from felix.context import bind
from felix.errors import TamperError
from felix.names import SpiffeId, StreamName
from keys.envelope import SECRET_BYTES, DataKey
from keys.errors import KeyScopeError
from keys.hybrid import HybridKeyPair, HybridPublicKey


@dataclass(frozen=True, slots=True)
class HandoffScope:
    """What a data key is handed over for. `terms_hash` is the SHA-256 of the grant's terms, 32 bytes."""

    key_id: bytes
    region: str
    stream: StreamName
    incarnation: bytes
    shard: int
    epoch: int
    grant_id: str
    terms_hash: bytes
    bridge: SpiffeId

    def info(self) -> bytes:
        """All of it, as HPKE's `info`."""
        return bind(
            "data-key-handoff",
            self.key_id,
            self.region,
            str(self.stream),
            self.incarnation,
            self.shard,
            self.epoch,
            self.grant_id,
            self.terms_hash,
            str(self.bridge),
        )

    def what(self) -> str:
        """The scope in words, for errors."""
        return f"the data key {self.key_id.hex()} of {self.stream}, shard {self.shard}, for {self.bridge} under grant {self.grant_id}"


def scope_of(data_key: DataKey, *, grant_id: str, terms_hash: bytes, bridge: SpiffeId) -> HandoffScope:
    """The scope in which `data_key` is handed to `bridge`."""
    return HandoffScope(
        data_key.key_id,
        data_key.region,
        data_key.stream,
        data_key.incarnation,
        data_key.shard,
        data_key.epoch,
        grant_id,
        terms_hash,
        bridge,
    )


def seal_data_key(data_key: DataKey, scope: HandoffScope, recipient: HybridPublicKey) -> bytes:
    """The data key, for `recipient` alone. Raises KeyScopeError where key and scope differ, or the bridge is foreign."""
    if scope != scope_of(data_key, grant_id=scope.grant_id, terms_hash=scope.terms_hash, bridge=scope.bridge):
        raise KeyScopeError(f"Data key {data_key.key_id.hex()} is not {scope.what()}.")
    if scope.bridge.kind != "bridge" or scope.bridge.region != data_key.region:
        raise KeyScopeError(
            f"A data key of {data_key.region} goes to bridges of {data_key.region} only, not to {scope.bridge}.",
            hint="A bridge agent runs in the source region's trust domain.",
        )
    return recipient.seal(data_key.secret, scope.info())


def open_data_key(sealed: bytes, scope: HandoffScope, pair: HybridKeyPair) -> DataKey:
    """The data key as the agent uses it: it opens batches and cannot seal any.

    Raises TamperError(TAMPERED) where it was sealed for anything but `scope`, KeyScopeError for a foreign key id.
    """
    secret = pair.open(sealed, scope.info(), scope.what())
    if len(secret) != SECRET_BYTES:
        raise TamperError(f"What was sealed as {scope.what()} has {len(secret)} bytes, not {SECRET_BYTES}.")
    key = DataKey(
        scope.key_id, scope.region, scope.stream, scope.incarnation, scope.shard, scope.epoch, secret
    )
    key.claim_sealer()
    return key
