"""Stream statements: signed by one region, read under that region's keys alone, and what they say of a cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.signed_body import ReceiptKeys
from audit.stream_statement import (
    EPOCHS_MAX,
    STATEMENT_BYTES_MAX,
    Cut,
    Epoch,
    Span,
    StreamStatement,
    cut_of,
    open_statement,
    parts_below,
    sign_statement,
)
from felix.errors import TamperError
from keys.signing import SigningKey

KEY, OTHER = SigningKey.generate(), SigningKey.generate()
KEYS = ReceiptKeys.of("us-east", "us-east.acme/audit", [KEY.verify_key.public])


def stated(**changes: Any) -> StreamStatement:
    fields: dict[str, Any] = {
        "region": "us-east",
        "stream": "acme/ops/departures",
        "incarnation": bytes(range(16)),
        "shards": 2,
        "shard": 1,
        "log_start": 3,
        "log_end": 30,
        "epochs": (Epoch(5, 0), Epoch(9, 10), Epoch(12, 20)),
        "time_ms": 1,
    }
    return StreamStatement(**{**fields, **changes})


def test_a_statement_reads_as_it_was_signed() -> None:
    assert open_statement(sign_statement(stated(), KEY), KEYS) == stated()
    longest = tuple(
        Epoch((1 << 32) - EPOCHS_MAX + number, (1 << 62) + number) for number in range(EPOCHS_MAX)
    )
    big = stated(epochs=longest, log_end=(1 << 63) - 1, stream="a" * 63 + "/" + "b" * 63 + "/" + "c" * 63)
    assert len(sign_statement(big, KEY)) <= STATEMENT_BYTES_MAX
    assert open_statement(sign_statement(big, KEY), KEYS) == big


def test_no_other_key_no_other_region_and_no_changed_byte_is_believed() -> None:
    signed = sign_statement(stated(), KEY)
    with pytest.raises(TamperError, match="none of us-east's"):
        open_statement(sign_statement(stated(), OTHER), KEYS)
    with pytest.raises(TamperError, match="eu-west"):
        open_statement(sign_statement(stated(region="eu-west"), KEY), KEYS)
    with pytest.raises(TamperError):
        open_statement(bytes(STATEMENT_BYTES_MAX + 1), KEYS)
    for at in range(len(signed)):
        changed = bytearray(signed)
        changed[at] ^= 1
        with pytest.raises(TamperError):
            open_statement(bytes(changed), KEYS)


@pytest.mark.parametrize(
    "changes",
    [
        {"shard": 2},
        {"log_start": 31},
        {"epochs": (Epoch(5, 0), Epoch(5, 10))},
        {"epochs": (Epoch(5, 10), Epoch(9, 0))},
    ],
)
def test_what_no_shard_can_be_is_no_statement(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"epochs do not rise|does not have"):
        stated(**changes)


@pytest.mark.parametrize(
    ("read", "cut"),
    [
        ([(12, 30)], None),
        ([(12, 31)], Cut(12, 30)),
        ([(9, 20)], None),
        ([(9, 21)], Cut(12, 20)),
        ([(5, 10)], None),
        ([(5, 17)], Cut(9, 10)),
        ([(5, 10), (7, 17)], Cut(9, 10)),
        ([(5, 8), (7, 17)], Cut(9, 8)),
        ([(5, 10), (9, 15), (10, 25)], Cut(12, 15)),
        ([(7, 10)], Cut(5, 3)),
        ([(13, 30)], Cut(5, 3)),
        ([(4, 2)], Cut(5, 2)),
    ],
)
def test_where_a_history_parts_from_what_was_read(read: list[tuple[int, int]], cut: Cut | None) -> None:
    assert cut_of(stated(), [Span(*each) for each in read]) == cut


@given(st.data())
def test_a_log_that_is_cut_back_any_number_of_times_is_always_found(data: st.DataObject) -> None:
    """Against a model: a log of (epoch, number) pairs, read up to somewhere, then put back to a copy of any time."""
    log: list[tuple[int, int]] = []
    starts: list[Epoch] = []
    copies: list[tuple[list[tuple[int, int]], list[Epoch]]] = []
    read: list[tuple[int, int]] = []
    number = 0
    for epoch in range(1, data.draw(st.integers(2, 8))):
        if copies and data.draw(st.booleans()):
            kept, of = data.draw(st.sampled_from(copies))
            log, starts = list(kept), list(of)
        while starts and starts[-1].first_offset >= len(log):
            starts.pop()
        starts.append(Epoch(epoch, len(log)))
        # What is read again later was compared first: only a history that holds is read on.
        statement = stated(log_start=0, log_end=len(log), epochs=tuple(starts))
        holds = read == log[: len(read)]
        if read:
            spans = [
                Span(one, 1 + max(at for at, each in enumerate(read) if each[0] == one))
                for one in _epochs(read)
            ]
            found = cut_of(statement, spans)
            assert (found is None) == holds
            alone = cut_of(statement, spans[-1:])
            assert (alone is None) == holds, "the newest epoch alone tells whether; older ones tell where"
            if found is not None:
                common = sum(1 for _ in _common(read, log))
                assert found.offset == common if common else found.offset <= common
                assert common <= parts_below(statement, spans[-1])
        for _ in range(data.draw(st.integers(0, 4))):
            number += 1
            log.append((epoch, number))
            if data.draw(st.booleans()):
                copies.append((list(log), list(starts)))
        copies.append((list(log), list(starts)))
        if holds:
            read = log[: data.draw(st.integers(len(read), len(log)))]


def _epochs(read: list[tuple[int, int]]) -> list[int]:
    return sorted({epoch for epoch, _ in read})


def _common(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found = []
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        found.append(one)
    return found
