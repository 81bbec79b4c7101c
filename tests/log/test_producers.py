"""Producers' sequences: accept, duplicate, gap, forgotten, fenced; rollback, bounds and snapshots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from felix.batch import OFFSET_MAX
from felix.errors import Code
from region.log.producers import (
    BATCHES_REMEMBERED,
    PRODUCERS_MAX,
    SNAPSHOT_BYTES_LEAST,
    ProducerTable,
    Remembered,
    Verdict,
    decode_snapshot,
    refusal,
    shorten_snapshot,
)


def append(
    table: ProducerTable, producer: int, epoch: int, sequence: int, offset: int, time_ms: int = 0
) -> None:
    assert table.decide(producer, epoch, sequence, 10).verdict is Verdict.ACCEPT
    table.record(producer, Remembered(epoch, sequence, sequence + 10, offset, time_ms))


def test_verdicts() -> None:
    table = ProducerTable()
    for number in range(BATCHES_REMEMBERED + 8):
        append(table, 7, 1, 10 * number, 100 + 10 * number)
        table.settle(110 + 10 * number)
    end = 10 * (BATCHES_REMEMBERED + 8)
    assert table.decide(7, 1, end, 10).verdict is Verdict.ACCEPT
    repeated = table.decide(7, 1, end - 10, 10)
    assert repeated.verdict is Verdict.DUPLICATE and repeated.first is not None
    assert repeated.first.base_offset == end + 90
    assert table.decide(7, 1, end - 10, 9).verdict is Verdict.FORGOTTEN
    assert table.decide(7, 1, 0, 10).verdict is Verdict.FORGOTTEN
    assert table.decide(7, 1, end + 10, 10).verdict is Verdict.GAP
    assert table.decide(7, 0, end, 10).verdict is Verdict.FENCED
    assert table.decide(7, 2, end, 10).verdict is Verdict.GAP
    assert table.decide(7, 2, 0, 10).verdict is Verdict.ACCEPT
    assert table.decide(8, 0, 10, 10).verdict is Verdict.GAP
    assert table.decide(0, 0, 999, 10).verdict is Verdict.ACCEPT


def test_refusals_carry_their_codes_and_what_was_expected() -> None:
    table = ProducerTable()
    append(table, 7, 1, 0, 0)
    gap = refusal(7, 50, table.decide(7, 1, 50, 1))
    assert gap.code is Code.SEQUENCE_GAP and "10 is next" in gap.sentence
    assert refusal(7, 10, table.decide(7, 0, 10, 1)).code is Code.PRODUCER_FENCED


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=40), st.integers(0, 40))
def test_rollback_of_the_unsettled_leaves_the_table_as_it_was(
    appends: list[tuple[int, bool]], settled: int
) -> None:
    def fill(table: ProducerTable, part: list[tuple[int, bool]], offset: int) -> int:
        for producer, new_epoch in part:
            known = dict(table).get(producer)
            epoch, sequence = (known[-1].epoch, known[-1].next_sequence) if known else (0, 0)
            if new_epoch:
                epoch, sequence = epoch + 1, 0
            append(table, producer, epoch, sequence, offset)
            offset += 10
        return offset

    table, expected = ProducerTable(), ProducerTable()
    end = fill(table, appends[:settled], 0)
    fill(expected, appends[:settled], 0)
    table.settle(end)
    expected.settle(end)
    fill(table, appends[settled:], end)
    table.rollback(end)
    remembered = {producer: batches[-BATCHES_REMEMBERED:] for producer, batches in table}
    assert remembered == {producer: batches[-BATCHES_REMEMBERED:] for producer, batches in expected}


def test_bounds_by_count_and_age() -> None:
    table = ProducerTable(producers_max=3, age_ms=100)
    for producer in range(1, 6):
        append(table, producer, 0, 0, 10 * producer, time_ms=producer)
        table.settle(10 * producer + 10)
    assert sorted(producer for producer, _ in table) == [3, 4, 5]
    append(table, 3, 0, 10, 100, time_ms=200)
    table.settle(110)
    assert table.expire(150) == 2
    assert [producer for producer, _ in table] == [3]
    for number in range(2 * BATCHES_REMEMBERED):
        append(table, 3, 0, 20 + 10 * number, 110 + 10 * number)
        table.settle(120 + 10 * number)
    assert all(len(batches) <= BATCHES_REMEMBERED + 1 for _, batches in table)


def test_snapshot_holds_what_is_below_its_offset() -> None:
    table = ProducerTable()
    append(table, 7, 1, 0, 0)
    append(table, 7, 1, 10, 10)
    append(table, 8, 0, 0, 20)
    again, offset = decode_snapshot(table.encode(20))
    assert offset == 20
    assert dict(again) == {7: (Remembered(1, 0, 10, 0, 0), Remembered(1, 10, 20, 10, 0))}
    assert again.decide(7, 1, 20, 10).verdict is Verdict.ACCEPT


def test_the_largest_snapshot_is_shortened_to_what_fits_and_keeps_the_newest() -> None:
    table = ProducerTable()
    offset = OFFSET_MAX - PRODUCERS_MAX * 3
    for producer in range(PRODUCERS_MAX):
        for number in range(3):
            batch = Remembered(2**31, 2**62 + number, 2**62 + number + 1, offset, 2**42)
            table.record(2**62 + producer, batch)
            offset += 1
    whole = table.encode(offset)
    shortened = shorten_snapshot(whole, SNAPSHOT_BYTES_LEAST + 10_000)
    assert len(whole) > SNAPSHOT_BYTES_LEAST + 10_000 >= len(shortened)
    found, at = decode_snapshot(shortened)
    kept = {producer: len(batches) for producer, batches in found}
    assert at == offset
    assert len(kept) == PRODUCERS_MAX
    assert kept[2**62] == 1
    assert kept[2**62 + PRODUCERS_MAX - 1] == 3
    assert {producer: batches[-1] for producer, batches in found} == {
        producer: batches[-1] for producer, batches in table
    }
    assert shorten_snapshot(whole, len(whole)) == whole
