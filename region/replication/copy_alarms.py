"""What needs a person of the copies of a broker: the newest sentence of each shard, as long as its cause is there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from felix.runtime.port import Clock
from region.cluster.records import ShardId
from region.log.companions import RECORDS
from region.replication.hosted import Hosted
from region.replication.ready import Lost

log = logging.getLogger("felix.region.replication")

CUT_SHOWN_MS: Final = 24 * 3_600_000
"""That records were cut which publishers may have been told of needs a person, who looks once a day; then the log has it."""


class CopyAlarms:
    """See the module. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self.shown: dict[ShardId, str] = {}
        """the newest of each shard"""
        self.cut_records = 0
        """records that a leader before had written here and that were cut, since its successor did not have them"""
        self._clock = clock
        self._over: dict[ShardId, Callable[[], bool]] = {}

    def tell(self, shard: ShardId, sentence: str, is_over: Callable[[], bool] | None = None) -> None:
        """Show a sentence in place of the shard's last one. `is_over`: whether the cause has gone; None: it goes with this process, or with the copy."""
        self.shown[shard] = sentence
        self._over.pop(shard, None)
        if is_over is not None:
            self._over[shard] = is_over
        log.error("shard %s: %s", shard, sentence)

    def look(self) -> None:
        """Drop those whose cause has gone."""
        for shard, is_over in list(self._over.items()):
            if is_over():
                log.info("shard %s: no longer: %s", shard, self.drop(shard))

    def drop(self, shard: ShardId) -> str:
        """Show nothing of a shard any more; what was shown."""
        self._over.pop(shard, None)
        return self.shown.pop(shard, "")

    def note_lost(self, hosted: Hosted, lost: Lost) -> None:
        """What was cut here: an alarm where somebody may have been told of it."""
        in_log = lost.log == RECORDS
        what = f"{'records' if in_log else 'entries'} {lost.begin} to {lost.end - 1}{'' if in_log else ' of its journal'} were cut"
        if in_log:
            self.cut_records += lost.end - lost.begin
        if lost.given_up:
            self._tell_of_cut(
                hosted.shard,
                f"{what}, which clients may have been told of: the shard goes on from a copy that lacked them",
            )
        elif not in_log:
            log.info("shard %s: %s, which nobody was told of", hosted.shard, what)
        elif lost.told_early:
            self._tell_of_cut(
                hosted.shard,
                f"{what}, which the leader that followed did not have: with acks leader, publishers may have been told that they are there",
            )
        else:
            log.info("shard %s: %s, which the leader that followed did not have", hosted.shard, what)

    def _tell_of_cut(self, shard: ShardId, sentence: str) -> None:
        shown_until = self._clock.boot_ms() + CUT_SHOWN_MS
        self.tell(shard, sentence, lambda: self._clock.boot_ms() >= shown_until)
