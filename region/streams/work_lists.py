"""Streams by what their settings ask for from time to time, so that a pass visits those alone and not all that there are. Pure.

Invariant: a stream is in the lists that its settings of now ask for, from `place` to `remove`; each in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from region.metadata.records import StreamConfig

T = TypeVar("T", bound=Hashable)


class WorkLists(Generic[T]):
    """Of one broker's streams. The lists are dictionaries for their order; only `place` and `remove` change them."""

    def __init__(self) -> None:
        self.expiring: dict[T, None] = {}
        """Records go by their age, by size, or once they are acknowledged."""
        self.acked: dict[T, None] = {}
        """Of these the ones whose retention waits for what was acknowledged."""
        self.compacted: dict[T, None] = {}
        self.offloaded: dict[T, None] = {}

    def place(self, stream: T, config: StreamConfig) -> None:
        """The stream came, or its settings are these from now on."""
        retention, views = config.retention, config.views
        for wanted, streams in (
            (bool(retention.age_ms or retention.size_bytes or retention.acked), self.expiring),
            (retention.acked, self.acked),
            (views.compacted is not None, self.compacted),
            (views.offload is not None, self.offloaded),
        ):
            if wanted:
                streams[stream] = None
            else:
                streams.pop(stream, None)

    def remove(self, stream: T) -> None:
        """The stream went."""
        for streams in (self.expiring, self.acked, self.compacted, self.offloaded):
            streams.pop(stream, None)
