"""Reading around what a disk does not give."""

from __future__ import annotations

import errno
import os
from random import Random

import pytest
from long_runs import count

from region.log.unread import UNREAD_BLOCK_BYTES, AroundUnread


class Sectors:
    """A file of which some blocks cannot be read."""

    def __init__(self, data: bytes, bad: set[int], error: int = errno.EIO) -> None:
        self.data, self.bad, self.error, self.calls = data, bad, error, 0

    def size(self, descriptor: int) -> int:
        return len(self.data)

    def pread(self, descriptor: int, length: int, position: int) -> bytes:
        self.calls += 1
        had = self.data[position : position + length]
        if had and self.bad & {at // UNREAD_BLOCK_BYTES for at in range(position, position + len(had))}:
            raise OSError(self.error, os.strerror(self.error))
        return had


@pytest.mark.parametrize("seed", range(count(20, 500)))
def test_of_whatever_is_read_bad_blocks_alone_are_zeros(seed: int) -> None:
    random = Random(seed)
    blocks = random.randrange(1, 9)
    data = random.randbytes(blocks * UNREAD_BLOCK_BYTES - random.randrange(UNREAD_BLOCK_BYTES))
    files = Sectors(data, {block for block in range(blocks) if random.random() < 0.3})
    reads = AroundUnread(files)
    given = bytearray(data)
    for block in files.bad:
        begin, end = block * UNREAD_BLOCK_BYTES, min(len(data), (block + 1) * UNREAD_BLOCK_BYTES)
        given[begin:end] = bytes(end - begin)
    for _ in range(20):
        position = random.randrange(len(data) + 100)
        length = random.randrange(1, 3 * UNREAD_BLOCK_BYTES)
        assert reads.pread(0, length, position) == given[position : position + length]
    reads.pread(0, len(data), 0)
    assert (reads.error is not None) == bool(files.bad)


def test_of_much_that_is_read_a_bad_block_costs_few_reads() -> None:
    data = Random(1).randbytes(256 * UNREAD_BLOCK_BYTES)
    files = Sectors(data, {77})
    AroundUnread(files).pread(0, len(data), 0)
    assert files.calls <= 2 * 8 + 1


def test_other_errors_are_the_callers() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        AroundUnread(Sectors(bytes(10), {0}, errno.EBADF)).pread(0, 10, 0)
