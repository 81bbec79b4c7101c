"""Durability as people write it."""

from __future__ import annotations

import pytest

from felix.errors import Code, RequestError
from region.log.durability import Durability, Kind


@pytest.mark.parametrize("text", ["fsync", "ephemeral", "interval:50ms", "interval:60000ms"])
def test_text_round_trip(text: str) -> None:
    assert str(Durability.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "FSYNC", "interval", "interval:0ms", "interval:60001ms", "interval:5s", "none"]
)
def test_what_is_no_durability_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        Durability.parse(text)
    assert refused.value.code is Code.CONFIG_INVALID


def test_interval_goes_with_its_kind_only() -> None:
    with pytest.raises(RequestError):
        Durability(Kind.FSYNC, 5)
