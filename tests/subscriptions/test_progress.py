"""How far a subscription has come in a shard: what it holds stays small, however its consumers behave."""

from __future__ import annotations

from long_runs import count

from felix.settings import Retries, SubscriptionSettings
from region.subscriptions.progress import WAITING_MAX, Progress

NOW = 1_700_000_000_000


def test_delays_of_every_length_leave_few_kinds_of_waiting_records() -> None:
    """Every acknowledgement and every look at what is due walks them all."""
    progress = Progress(bytes(8), SubscriptionSettings(retries=Retries(attempts_max=0)))
    progress.move(0)
    progress.assign(1)
    records = count(2_000, 5_000)
    progress.delivered(0, records, NOW)
    for offset in range(records):
        delay_ms = 1_000_000 + 70_001 * offset
        progress.nack([(offset, offset + 1)], delay_ms, "no", NOW)
        (kind,) = (kind for kind, ranges in progress._waiting.items() if offset in ranges)
        assert kind.due_ms >= NOW + delay_ms, "never too early"
    assert progress.waiting_count == records
    assert len(progress._waiting) <= WAITING_MAX + 64
    due = progress.again(NOW + 3 * (1_000_000 + 70_001 * records))
    assert sum(following - first for again in due for first, following in again.ranges) == records
