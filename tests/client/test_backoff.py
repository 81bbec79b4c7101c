"""Backoff: grows, stays within its bounds, listens to the peer."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.backoff import Backoff, BackoffPolicy
from felix.errors import RequestError


@given(
    seed=st.integers(), first=st.integers(1, 1_000), factor=st.integers(1, 100), rounds=st.integers(1, 100)
)
def test_each_wait_lies_in_the_upper_half_of_a_ceiling_that_doubles(
    seed: int, first: int, factor: int, rounds: int
) -> None:
    policy = BackoffPolicy(first_ms=first, ceiling_ms=first * factor)
    backoff = Backoff(policy, Random(seed))
    for failure in range(rounds):
        ceiling = min(first * factor, first << failure)
        assert ceiling / 2 - 1 <= backoff.next_ms() <= ceiling
    backoff.reset()
    assert backoff.next_ms() <= first


def test_what_the_peer_asks_for_is_kept_also_above_the_ceiling() -> None:
    backoff = Backoff(BackoffPolicy(first_ms=1, ceiling_ms=10), Random(1))
    assert backoff.next_ms(500) == 500


def test_a_policy_that_cannot_be_is_refused() -> None:
    for first, ceiling in ((0, 1), (5, 4)):
        with pytest.raises(RequestError):
            BackoffPolicy(first_ms=first, ceiling_ms=ceiling)
