from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.errors import RequestError
from policy.quantity import DURATION_MS_MAX, SIZE_BYTES_MAX, Duration, Instant, Rate, Size


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("50ms", 50),
        ("1.5s", 1500),
        ("2m", 120_000),
        ("12h", 43_200_000),
        ("90d", 7_776_000_000),
        ("1w", 604_800_000),
    ],
)
def test_durations_become_milliseconds(text: str, ms: int) -> None:
    assert Duration.parse(text) == ms


@pytest.mark.parametrize(
    ("text", "size"), [("0B", 0), ("10GB", 10**10), ("64MiB", 64 << 20), ("1.5kB", 1500), ("2 TiB", 2 << 40)]
)
def test_sizes_become_bytes(text: str, size: int) -> None:
    assert Size.parse(text) == size


def test_a_rate_is_a_size_per_second() -> None:
    assert Rate.parse("5MB/s") == 5_000_000
    assert str(Rate(5_000_000)) == "5MB/s"


@pytest.mark.parametrize(
    "text", ["", "90", "d", "-1d", "1 fortnight", "1.5ms", "٣d", "1e3s", "9" * 40 + "d", "101" * 9 + "w"]
)
def test_what_is_no_duration_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(RequestError, match="expected a number with ms, s, m, h, d or w"):
        Duration.parse(text)


@pytest.mark.parametrize("text", ["10", "10gb", "10 G", "0.5B", "99999999TiB", "10GB/s"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is not a size"):
        Size.parse(text)


@pytest.mark.parametrize("text", ["5MB", "5/s", "5MB/m", "/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is not a rate"):
        Rate.parse(text)


@given(st.integers(0, DURATION_MS_MAX), st.integers(0, SIZE_BYTES_MAX))
def test_what_is_shown_parses_back(ms: int, size: int) -> None:
    assert len(str(Duration(ms))) <= 32
    assert Duration.parse(str(Duration(ms))) == ms
    assert Size.parse(str(Size(size))) == size
    assert Rate.parse(str(Rate(size))) == size


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1970-01-01", "1970-01-01T00:00:00Z"),
        ("2026-12-31", "2026-12-31T00:00:00Z"),
        ("2026-12-31T18:00Z", "2026-12-31T18:00:00Z"),
        ("2026-12-31T18:00:00.5+02:00", "2026-12-31T16:00:00.500Z"),
    ],
)
def test_an_instant_has_a_zone_or_is_midnight_utc(text: str, shown: str) -> None:
    assert str(Instant.parse(text)) == shown
    assert Instant.parse(shown) == Instant.parse(text)


@pytest.mark.parametrize(
    "text", ["", "2026", "2026-13-01", "2026-12-31T18:00", "tomorrow", "1969-12-31", "2026-12-31 18:00Z"]
)
def test_what_is_no_instant_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="expected a date or a time with its zone"):
        Instant.parse(text)
