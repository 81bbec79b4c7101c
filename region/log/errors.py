"""What a log refuses, and why: offsets that it does not hold, segments that are elsewhere, disks that are full or failed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.storage.port import is_exhausted, is_full
from region.log.segment_state import SegmentState

FULL_RETRY_MS: Final = 250
"""While the disk is full, one append in this time is let through to find out whether there is room."""


READ_RETRY_MS: Final = 1_000
"""A read that its disk did not answer is tried again after this: a device that is reset takes seconds."""


REOPENED_MS: Final = 1_000
"""Whoever asked for what its disk's error has stopped asks again after this."""


class OffsetOutOfRangeError(RequestError):
    """The offset is not in the log: `first_offset` is the oldest one held, `next_offset` the one to come."""

    default_code = Code.OFFSET_OUT_OF_RANGE

    def __init__(self, offset: int, first_offset: int, next_offset: int) -> None:
        super().__init__(
            f"Offset {offset} is not in the log, which holds {first_offset} to {next_offset}.",
            hint=f"Go on from {first_offset}; what was before it is gone."
            if offset < first_offset
            else f"The next record will be {next_offset}.",
        )
        self.offset = offset
        self.first_offset = first_offset
        self.next_offset = next_offset


class NotLocalError(Exception):
    """The segment is in a store only, and no copy of it is fetched: fetch it, and read again."""

    def __init__(self, segment: SegmentState) -> None:
        super().__init__(str(segment.path))
        self.segment = segment


class SegmentDamagedError(CorruptionError):
    """A segment's file is not what was written: `path`, and the offset from which on it cannot be read."""

    def __init__(self, path: Path, position: int, offset: int, what: str) -> None:
        super().__init__(
            f"Damage in {path} at byte {position} (offset {offset}): {what}.",
            hint="The shard does not serve. Restore the file from a replica or a backup; nothing was changed.",
        )
        self.path = path
        self.position = position
        self.offset = offset


class StorageFailedError(UnavailableError):
    """A sync failed, or a write left the file in an unknown state: this log must not be used any more. Whoever has it open opens it again after a while
    (felix.reopening), so that asking again may do."""

    default_code = Code.SHARD_STOPPED

    def __init__(
        self, sentence: str, *, hint: str = "Look after the disk. It is opened again by itself, if it can be."
    ) -> None:
        super().__init__(sentence, hint=hint, retry_after_ms=REOPENED_MS)


def disk_full() -> UnavailableError:
    """The answer to a write that found no room."""
    return UnavailableError(
        "The disk is full: nothing was written.",
        code=Code.DISK_FULL,
        hint="Free some room or shorten the stream's retention; writing resumes by itself.",
        retry_after_ms=FULL_RETRY_MS,
    )


class TooManyFilesError(UnavailableError):
    """A file could not be opened because the process has too many open: nothing was done, and it passes."""


def too_many_files(error: OSError, folder: Path) -> TooManyFilesError:
    """The answer to whoever needed another one."""
    return TooManyFilesError(
        f"{folder} cannot be used now: {error.strerror}.",
        hint="Let the broker open more files: LimitNOFILE= of its service, ulimit -n.",
        retry_after_ms=FULL_RETRY_MS,
    )


def read_failed(error: OSError, folder: Path) -> UnavailableError:
    """The answer to whoever reads what the disk does not give now: nothing was changed, and it may pass."""
    return UnavailableError(
        f"{error.filename or folder} cannot be read now: {error.strerror or error}.",
        hint="It is tried again by itself. Where it goes on, look after the disk.",
        retry_after_ms=READ_RETRY_MS,
    )


def storage_error(error: OSError, folder: Path) -> UnavailableError:
    """What an OSError in a shard's folder means to the callers above: StorageFailedError where it does not pass."""
    if is_full(error):
        return disk_full()
    if is_exhausted(error):
        return too_many_files(error, folder)
    return StorageFailedError(
        f"{error.filename or folder} cannot be used: {error.strerror or error}.",
        hint="Look after the disk or its permissions. It is opened again by itself, if it can be.",
    )


def compacted(segment: SegmentState, offset: int) -> RequestError:
    """The answer to whoever asks for frames of a segment that compaction wrote: it has holes, and no positions."""
    return RequestError(
        f"What follows offset {offset} was compacted up to {segment.next_offset}.",
        code=Code.UNSUPPORTED,
        hint="Copy the closed segments, and go on behind them.",
    )
