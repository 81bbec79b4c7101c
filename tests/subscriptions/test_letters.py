"""Which record a dead letter stands for: where a log lost its end, others may stand in that place."""

from __future__ import annotations

import pytest

from felix.batch import Record
from region.subscriptions.letters import Letter

DEAD = {"felix.dead.reason": b"no", "felix.dead.offset": b"7"}


def letter(payload: bytes = b"a", key: bytes | None = b"k", **headers: bytes) -> Letter:
    return Letter(Record(3, 2_000, key, {**DEAD, "trace": b"1", **headers}, payload), 0, 7)


def record(
    payload: bytes = b"a", key: bytes | None = b"k", trace: bytes = b"1", time_ms: int = 1_000
) -> Record:
    return Record(7, time_ms, key, {"trace": trace, "felix.delay": b"5"}, payload)


def test_a_dead_letter_stands_for_the_record_that_it_was() -> None:
    assert letter().is_of(record())
    assert letter(key=None).is_of(record(key=None))


@pytest.mark.parametrize(
    "other", [None, record(payload=b"b"), record(key=b"other"), record(key=None), record(trace=b"2")]
)
def test_it_stands_for_no_other(other: Record | None) -> None:
    assert not letter().is_of(other)


def test_one_that_did_not_fit_is_held_to_its_key_and_time() -> None:
    stub = letter(b"", **{"felix.dead.gone": b"1"})
    assert stub.is_of(record(payload=b"large"))
    assert not stub.is_of(record(payload=b"large", key=b"other"))
    assert not stub.is_of(record(payload=b"large", time_ms=3_000)), "written after it died"
