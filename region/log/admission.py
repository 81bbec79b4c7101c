"""Admission: which of the batches that are brought to a shard's log go into it, and what the others are answered with.

Three questions, in this order: may the batch be in a log at all (its size, its body's checksum), is it new (the producer's sequence,
the message ids), does the log end where its publisher expects it. Pure: offsets and time come in, nothing is written here.

Invariants:
- a batch that is refused or repeated leaves producers and ids as they were, but for one that was wholly repeated by its ids: its
  producer's sequence goes on behind it;
- what is admitted counts at once, so that batches on their way are decided against; `rollback` takes it back, `settle` says what
  will not be taken back: what is committed.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from felix.batch import BATCH_BYTES_MAX, FLAG_SEALED, NO_KEY_ID, Batch, BatchHeader, body_checksum
from felix.errors import Code, FelixError, OffsetMismatchError, RequestError
from felix.settings import Deduplication
from keys.envelope import SEAL_BYTES
from region.log.message_ids import Identified, MessageIds, Sifted, message_ids, repeated_offsets, sift
from region.log.producers import Decision, ProducerTable, Remembered, Verdict, refusal
from region.log.segment import ShardIdentity


class Appended(msgspec.Struct, frozen=True, gc=False):
    """Where a batch stands. For a repeated one, where its first copy does.

    `offsets`, one per record, where deduplication left some out, so that they do not follow each other.
    """

    base_offset: int
    append_time_ms: int
    duplicate: bool = False
    offsets: tuple[int, ...] = ()


class Admitted(msgspec.Struct, frozen=True):
    """`batch` goes into the log as it is here, where the log ends. `left_out`: records that their ids say are there already."""

    batch: Batch
    answer: Appended
    left_out: int = 0


class Repeated(msgspec.Struct, frozen=True):
    """All of it is in the log, or on its way there. `by_ids`: so say its records' ids, not the producer's sequence."""

    answer: Appended
    by_ids: bool = False
    left_out: int = 0

    @property
    def end(self) -> int:
        """The offset after the last record that it is answered with."""
        return max(self.answer.offsets, default=self.answer.base_offset) + 1


class Admission:
    """One per shard."""

    __slots__ = ("identity", "ids", "producers")

    def __init__(
        self, identity: ShardIdentity, producers: ProducerTable, deduplication: Deduplication | None
    ) -> None:
        self.identity = identity
        self.producers = producers
        self.ids = MessageIds(deduplication) if deduplication else None

    def alter(self, deduplication: Deduplication | None) -> None:
        """Other bounds of the window of ids, from now on. One that begins here does not know what was appended before."""
        if deduplication is None:
            self.ids = None
        elif self.ids is None:
            self.ids = MessageIds(deduplication)
        else:
            self.ids.window_ms = deduplication.window_ms
            self.ids.ids_max = deduplication.ids_max

    def admit(
        self,
        batch: Batch,
        log_end: int,
        epoch: int,
        now_ms: int,
        *,
        expected_offset: int | None = None,
        as_it_is: bool = False,
    ) -> Admitted | Repeated | FelixError:
        """Decide of a plain batch that passed `misfit`, and count it where it is admitted.

        `as_it_is`: no record is left out for its message id, nor refused for it. With `expected_offset` only a log that ends there takes what is new.
        """
        ids: list[bytes | None] | None = None
        sifted: Sifted | None = None
        window = self.ids
        if window is not None:
            try:
                ids = message_ids(batch, as_it_is=as_it_is)
                if ids is not None and not as_it_is:
                    sifted = sift(batch, ids, window, log_end, now_ms)
            except RequestError as error:
                return error
        header = batch.header
        if header.producer_id:
            decision = self.producers.decide(
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                header.records,
                shortened=window is not None,
            )
            if decision.verdict is Verdict.DUPLICATE:
                return Repeated(self._first_copy(header, decision, ids, now_ms))
            # What is all in the log already is answered whatever its sequence: the log has no trace of a repetition.
            settled = sifted is not None and sifted.batch is None and decision.verdict is not Verdict.FENCED
            if decision.verdict is not Verdict.ACCEPT and not settled:
                return refusal(header.producer_id, header.base_sequence, decision)
            if settled and decision.verdict is Verdict.ACCEPT:
                # Nothing of it will be in the log: it ends where the producer's next batch begins.
                end = header.base_sequence + header.records
                self._count(header, end, end, log_end, now_ms)
        answer = Appended(log_end, now_ms)
        left_out = 0
        if sifted is not None and sifted.batch is not batch:
            left_out = header.records - (sifted.batch.header.records if sifted.batch else 0)
            if sifted.batch is None:
                return Repeated(Appended(sifted.offsets[0], now_ms, True, sifted.offsets), True, left_out)
            batch, header = sifted.batch, sifted.batch.header
            answer = Appended(log_end, now_ms, offsets=sifted.offsets)
        if expected_offset is not None and expected_offset != log_end:
            return self._mismatch(expected_offset, log_end)
        if header.producer_id:
            self._count(header, header.base_sequence, header.base_sequence + header.records, log_end, now_ms)
        if window is not None and ids is not None:
            window.record(
                sifted.fresh
                if sifted is not None
                else (
                    Identified(found, offset, now_ms)
                    for offset, found in enumerate(ids, log_end)
                    if found is not None
                )
            )
        numbered = replace(
            header,
            shard=self.identity.shard,
            base_offset=log_end,
            append_time_ms=now_ms,
            leader_epoch=epoch,
            key_id=NO_KEY_ID,
        )
        return Admitted(Batch(numbered, batch.body), answer, left_out)

    def settle(self, committed: int, now_ms: int) -> None:
        """What is below `committed` will not be rolled back."""
        self.producers.settle(committed)
        if self.ids is not None:
            self.ids.settle(now_ms)

    def rollback(self, offset: int) -> None:
        """What was admitted from `offset` on is not in the log after all."""
        self.producers.rollback(offset)
        if self.ids is not None:
            self.ids.rollback(offset)

    def _count(
        self, header: BatchHeader, base_sequence: int, next_sequence: int, offset: int, now_ms: int
    ) -> None:
        self.producers.record(
            header.producer_id,
            Remembered(header.producer_epoch, base_sequence, next_sequence, offset, now_ms),
        )

    def _first_copy(
        self, header: BatchHeader, decision: Decision, ids: list[bytes | None] | None, now_ms: int
    ) -> Appended:
        """Where the first copy of a batch stands, or what was kept of it."""
        first = decision.first
        assert first is not None
        whole = first.next_sequence - first.base_sequence == header.records
        if self.ids is None or ids is None or whole:
            return Appended(first.base_offset, first.append_time_ms, duplicate=True)
        offsets = repeated_offsets(ids, self.ids, first, now_ms)
        return Appended(offsets[0], first.append_time_ms, True, offsets)

    def _mismatch(self, expected_offset: int, log_end: int) -> OffsetMismatchError:
        return OffsetMismatchError(
            f"The log of shard {self.identity.shard} of {self.identity.stream} ends at offset {log_end}, not at "
            f"{expected_offset}; nothing was appended.",
            hint="Read what came in between, decide again, and expect the new end.",
            log_end=log_end,
        )


def misfit(batch: Batch) -> RequestError | None:
    """Why a batch can be in no log; None where it can."""
    header = batch.header
    if len(batch.body) != header.body_length or body_checksum(batch.body) != header.body_checksum:
        # Once written it would look like damage, and stop the shard for everybody.
        return RequestError(
            "The batch's body is not the one that its header was made for.", code=Code.BATCH_MALFORMED
        )
    if header.flags & FLAG_SEALED:
        return RequestError("The batch is sealed already; a shard takes plain batches and seals them itself.")
    if header.total_length + SEAL_BYTES > BATCH_BYTES_MAX:
        return RequestError(
            f"A batch of {header.total_length} bytes leaves no room for its seal; "
            f"{BATCH_BYTES_MAX - SEAL_BYTES} are allowed.",
            code=Code.BATCH_TOO_LARGE,
            hint="Publish smaller batches.",
        )
    return None
