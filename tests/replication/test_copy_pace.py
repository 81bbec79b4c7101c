"""The pace of copies, on simulated time."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from felix.runtime.simulated import SimulatedLoop, simulated
from region.replication.copy_pace import BURST_S, COPY_RATE_BYTES, TURN_S_MAX, CopyPace
from region.replication.leader import COPY_BYTES_MAX

RATE = 1 << 20
PIECE = 1 << 18


def played(takers: int, pieces: int, *, read: int = PIECE) -> list[float]:
    """When each piece of each of `takers` was sent, in s, in order."""
    loop = SimulatedLoop(Random(1))
    sent: list[float] = []

    async def copy(pace: CopyPace) -> None:
        for _ in range(pieces):
            await pace.take(PIECE)
            pace.give_back(PIECE - read)
            sent.append(loop.time() - begun)

    async def work() -> None:
        nonlocal begun
        begun = loop.time()
        pace = CopyPace(RATE, simulated(loop, 0).clock)
        await asyncio.gather(*(copy(pace) for _ in range(takers)))

    begun = 0.0
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
    return sent


@pytest.mark.parametrize("takers", [1, 3])
def test_all_copies_together_come_at_the_rate(takers: int) -> None:
    sent = played(takers, 40 // takers)
    # The first comes of the burst, and the last is not paid for any more.
    assert sent[-1] == pytest.approx((len(sent) - 1) * PIECE / RATE - BURST_S, abs=0.01)


def test_what_lacks_little_waits_for_nothing() -> None:
    assert played(1, 100, read=40)[-1] == 0


def test_after_a_pause_no_more_than_two_messages_leave_in_a_row() -> None:
    assert COPY_RATE_BYTES * BURST_S <= 1.05 * COPY_BYTES_MAX, "one of the burst, and one that goes into debt"


def test_nothing_waits_for_more_than_its_turn_however_many_copies_are_made() -> None:
    sent = played(1_000, 2)
    assert sent[-1] <= 2 * TURN_S_MAX + 0.01
