"""What a publisher was told and what a reader saw, held against each other: the judge of a replicated stream."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class History:
    """Of one shard and one publisher, which sends the numbers from 0 on, several at a time, in their order."""

    sent: int = 0
    acknowledged: dict[int, int] = field(default_factory=dict)
    """number to offset"""
    read: list[tuple[int, int]] = field(default_factory=list)
    """(offset, number), as one subscription gave them, while things went wrong"""

    def next_number(self) -> int:
        self.sent += 1
        return self.sent - 1

    def check(self, stored: list[tuple[int, int]]) -> None:
        """`stored`: (offset, number), the whole shard at the end.

        - nothing that was acknowledged is lost, and it stands where it was said to;
        - nothing stands twice, and nothing that was not sent;
        - the numbers stand in the order in which they were sent;
        - what was read while things went wrong is what stands there, in order and without a hole.
        """
        offsets = [offset for offset, _ in stored]
        numbers = [number for _, number in stored]
        assert offsets == list(range(len(stored))), "offsets with holes"
        assert numbers == sorted(set(numbers)), "a number stands twice, or out of order"
        assert set(numbers) <= set(range(self.sent)), "a number that was never sent"
        places = {number: offset for offset, number in stored}
        lost = {n: offset for n, offset in self.acknowledged.items() if places.get(n) != offset}
        assert not lost, f"acknowledged, and not where it was said to stand: {lost}"
        assert self.read == stored[: len(self.read)], "what was read is not what stands there"
