"""Sealing at rest: a shard's log meets the region's keyring. Called in the log's threads, never on the loop."""

from __future__ import annotations

from threading import Lock
from typing import Final

from felix.batch import Batch
from felix.bounded import BoundedMap
from felix.names import StreamName
from keys.envelope import open_batch
from keys.keyring import ShardSealer
from keys.shared import RegionKeys

SEALERS_MAX: Final = 4
"""Of one shard at once: the present leader epoch's, and those of older ones whose batches compaction seals again."""


class KeyringSeal:
    """One shard's seal. A data key belongs to one leader epoch, so each epoch has a sealer of its own.

    Appends and a compaction may seal at the same time; in one epoch they share its sealer, which counts for both.
    """

    __slots__ = ("_incarnation", "_keyring", "_lock", "_sealer", "_sealers", "_shard", "_stream")

    def __init__(self, keyring: RegionKeys, stream: StreamName, incarnation: bytes, shard: int) -> None:
        self._keyring = keyring
        self._stream = stream
        self._incarnation = incarnation
        self._shard = shard
        # The one that sealed for the newest epoch, and all that are kept, in order of last use.
        self._sealer: ShardSealer | None = None
        self._sealers: BoundedMap[int, ShardSealer] = BoundedMap(SEALERS_MAX)
        self._lock = Lock()

    def seal(self, batch: Batch) -> Batch:
        """The batch as it stands on disk. Raises what the keyring raises."""
        return self._of_epoch(batch.header.leader_epoch).seal(batch)

    def _of_epoch(self, epoch: int) -> ShardSealer:
        with self._lock:
            sealer = self._sealers.use(epoch)
            if sealer is None:
                sealer = self._keyring.sealer(self._stream, self._incarnation, self._shard, epoch)
                self._sealers.put(epoch, sealer)
            if self._sealer is None or epoch > self._sealer.epoch:
                self._sealer = sealer
            return sealer

    def open_batch(self, batch: Batch) -> Batch:
        """The batch as it was published, whatever key it names. Raises what the keyring raises, TamperError."""
        header = batch.header
        key = self._keyring.opening_key(
            self._stream, self._incarnation, self._shard, header.leader_epoch, header.key_id
        )
        return open_batch(key, batch)

    def commitment(self) -> bytes:
        """The commitment of the key in use, for a new segment's header; empty before the first batch."""
        key = self._sealer.data_key() if self._sealer is not None else None
        return key.commitment() if key is not None else b""

    def tag(self, purpose: str, data: bytes) -> bytes:
        """See LogSeal. Raises what the keyring raises."""
        return self._keyring.tag(self._stream, self._incarnation, self._shard, purpose, data)
