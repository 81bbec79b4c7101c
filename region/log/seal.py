"""What seals a log's batches at rest: a port, which region.streams.sealing implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from felix.batch import Batch
from felix.names import StreamName


class LogSeal(Protocol):
    """Seals and opens one log's batches, in the log's threads."""

    def seal(self, batch: Batch) -> Batch:
        """As it stands on disk."""
        ...

    def open_batch(self, batch: Batch) -> Batch:
        """As it was before."""
        ...

    def commitment(self) -> bytes:
        """To the key that the next segment is sealed with: 32 bytes, zeros where nothing is sealed yet."""
        ...

    def tag(self, purpose: str, data: bytes) -> bytes:
        """What only who has the stream's key can say of `data`, about this log."""
        ...


MakeSeal = Callable[[StreamName, bytes, int], LogSeal]
"""For stream, incarnation and the log's number."""
