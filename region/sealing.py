"""Sealing at rest: a shard's log meets the region's keyring. Called in the log's threads, never on the loop."""

from __future__ import annotations

from felix.batch import Batch
from felix.names import StreamName
from keys.envelope import open_batch
from keys.keyring import Keyring, ShardSealer


class KeyringSeal:
    """One shard's seal. A data key belongs to one leader epoch, so a new epoch takes a new sealer."""

    __slots__ = ("_incarnation", "_keyring", "_sealer", "_shard", "_stream")

    def __init__(self, keyring: Keyring, stream: StreamName, incarnation: bytes, shard: int) -> None:
        self._keyring = keyring
        self._stream = stream
        self._incarnation = incarnation
        self._shard = shard
        self._sealer: ShardSealer | None = None

    def seal(self, batch: Batch) -> Batch:
        """The batch as it stands on disk. Raises what the keyring raises."""
        sealer = self._sealer
        if sealer is None or sealer.epoch != batch.header.leader_epoch:
            sealer = self._keyring.sealer(
                self._stream, self._incarnation, self._shard, batch.header.leader_epoch
            )
            self._sealer = sealer
        return sealer.seal(batch)

    def open_batch(self, batch: Batch) -> Batch:
        """The batch as it was published, whatever key it names. Raises what the keyring raises, TamperError."""
        return open_batch(self._keyring.data_key(batch.header.key_id), batch)

    def commitment(self) -> bytes:
        """The commitment of the key in use, for a new segment's header; empty before the first batch."""
        key = self._sealer.data_key() if self._sealer is not None else None
        return key.commitment() if key is not None else b""
