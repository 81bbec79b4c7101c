"""Retention: whole segments, oldest first, never the active one, never what a limit promises to keep."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from log.building import batch_of, serving
from runtimes import with_wall

from felix.errors import UnavailableError
from felix.settings import EPHEMERAL, Retention
from region.log.retention import AGE_PARTS, SegmentSpan, plan_deletion
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardHooks, ShardSettings

SPANS = [SegmentSpan(100 * at, 100 * at + 100, 1_000, 10 * at) for at in range(5)]


def test_by_age() -> None:
    assert plan_deletion(SPANS, Retention(age_ms=100), 111) == 2
    assert plan_deletion(SPANS, Retention(age_ms=100), 100) == 0
    assert plan_deletion(SPANS, Retention(age_ms=100), 10**9) == 4


def test_by_bytes() -> None:
    assert plan_deletion(SPANS, Retention(size_bytes=3_000), 0) == 2
    assert plan_deletion(SPANS, Retention(size_bytes=3_001), 0) == 1
    assert plan_deletion(SPANS, Retention(size_bytes=1), 0) == 4


def test_without_limits_nothing_goes() -> None:
    assert plan_deletion(SPANS, Retention(), 10**12) == 0


@given(
    st.lists(st.tuples(st.integers(1, 999), st.integers(0, 50)), min_size=1, max_size=20),
    st.integers(0, 500),
    st.integers(0, 9_999),
    st.integers(0, 2_000),
)
def test_promises(parts: list[tuple[int, int]], age_ms: int, size_bytes: int, now_ms: int) -> None:
    spans, time_ms = [], 0
    for at, (size, later) in enumerate(parts):
        time_ms += later
        spans.append(SegmentSpan(at, at + 1, size, time_ms))
    count = plan_deletion(spans, Retention(age_ms, size_bytes), now_ms)
    assert 0 <= count < len(spans)
    kept = sum(span.segment_bytes for span in spans[count:])
    for span in spans[:count]:
        young = not age_ms or span.last_time_ms + age_ms >= now_ms
        assert not young or (size_bytes and kept >= size_bytes)


def test_what_is_not_acknowledged_stays_whatever_its_age_and_size() -> None:
    aged, large = Retention(age_ms=1, acked=True), Retention(size_bytes=1, acked=True)
    for retention in (aged, large):
        assert plan_deletion(SPANS, retention, 10**9, hold=0) == 0
        assert plan_deletion(SPANS, retention, 10**9, hold=299) == 2
        assert plan_deletion(SPANS, retention, 10**9, hold=300) == 3
        assert plan_deletion(SPANS, retention, 10**9, hold=None) == 4, "without subscriptions, time decides"
    assert plan_deletion(SPANS, Retention(age_ms=100, acked=True), 111, hold=10**9) == 2, (
        "its time must be up, too"
    )
    assert plan_deletion(SPANS, Retention(age_ms=1), 10**9, hold=0) == 4, (
        "who did not ask for it does not wait"
    )


async def test_a_shard_keeps_everything_until_it_is_told_what_is_acknowledged(tmp_path: Path) -> None:
    settings = ShardSettings(
        retention=Retention(age_ms=100, acked=True), segments=SegmentLimits(segment_bytes_max=500)
    )
    clock = [1_000]
    async with serving(tmp_path, settings, ShardHooks(runtime=with_wall(lambda: clock[0]))) as shard:
        for _ in range(20):
            await shard.append(batch_of(b"x" * 200))
        clock[0] = 100_000
        assert await shard.sweep(100_000) == 0
        shard.hold_from(7)
        await shard.sweep(100_000)
        assert 0 < shard.log_start_offset <= 7
        shard.hold_from(None)
        await shard.sweep(100_000)
        assert shard.log_start_offset == shard.high_watermark == 20


async def test_an_ephemeral_shard_waits_for_acknowledgements_too() -> None:
    settings = ShardSettings(EPHEMERAL, retention=Retention(age_ms=100, acked=True))
    async with serving(None, settings, ShardHooks(runtime=with_wall(lambda: 1_000))) as shard:
        for _ in range(10):
            await shard.append(batch_of(b"x"))
        await shard.sweep(100_000)
        assert shard.log_start_offset == 0
        shard.hold_from(4)
        await shard.sweep(100_000)
        assert shard.log_start_offset == 4


async def test_records_of_a_quiet_stream_go_soon_after_their_age(tmp_path: Path) -> None:
    clock = [1_000]
    settings = ShardSettings(retention=Retention(age_ms=1_000))
    async with serving(tmp_path, settings, ShardHooks(runtime=with_wall(lambda: clock[0]))) as shard:
        for at in range(40):
            clock[0] = 1_000 + 50 * at
            await shard.append(batch_of(b"%d" % at))
            await shard.sweep(clock[0])
            oldest = clock[0] - 1_000 - 1_000 // AGE_PARTS - 50
            assert 1_000 + 50 * shard.log_start_offset >= oldest, "at its age and an eighth, and one sweep"
            assert shard.log_start_offset <= max(0, (clock[0] - 2_000) // 50 + 1), "and not before its age"
        assert shard.segment_count <= AGE_PARTS + 2
        clock[0] += 1_200
        await shard.sweep(clock[0])
        assert shard.log_start_offset == shard.high_watermark == 40
        assert shard.segment_count == 1
        syncs = shard.counters.segments_deleted
        await shard.sweep(clock[0] + 10**6)
        assert shard.counters.segments_deleted == syncs, "nothing is left to go"


async def test_what_is_altered_counts_from_now_on(tmp_path: Path) -> None:
    async with serving(tmp_path, ShardSettings(), ShardHooks(runtime=with_wall(lambda: 1_000))) as shard:
        for at in range(10):
            await shard.append(batch_of(b"%d" % at))
        assert await shard.sweep(10**6) == 0
        shard.alter(ShardSettings(retention=Retention(age_ms=10)))
        assert await shard.sweep(10**6) == 1
        assert shard.log_start_offset == 10


async def test_a_producer_whose_records_all_went_goes_on_after_a_crash(tmp_path: Path) -> None:
    clock = [1_000]
    settings = ShardSettings(retention=Retention(age_ms=1_000))
    hooks = ShardHooks(runtime=with_wall(lambda: clock[0]))
    async with serving(tmp_path, settings, hooks) as shard:
        await shard.append(batch_of(b"first", producer=7))
        clock[0] = 100_000
        assert await shard.sweep(clock[0]) == 1
        # Nothing is written in order at the end.
        shard.stop(UnavailableError("as if killed"))
    async with serving(tmp_path, settings, hooks) as shard:
        again = await shard.append(batch_of(b"first", producer=7))
        assert again.duplicate and again.base_offset == 0
        assert (await shard.append(batch_of(b"second", producer=7, sequence=1))).base_offset == 1
