"""Backoff: grows, stays within its bounds, listens to the peer."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.backoff import ELECTION_WAIT_MS_MAX, ELECTION_WAITS, Backoff, BackoffPolicy
from felix.errors import NotLeaderError, RequestError, UnavailableError


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


def test_whoever_waits_for_a_leader_asks_again_soon_and_not_for_ever() -> None:
    backoff = Backoff(BackoffPolicy(first_ms=50, ceiling_ms=5_000), Random(1))
    nobody_leads = NotLeaderError("Nobody leads.", retry_after_ms=25)
    waits = [backoff.after_ms(nobody_leads) for _ in range(ELECTION_WAITS)]
    assert waits[0] <= 50 and max(waits) <= ELECTION_WAIT_MS_MAX
    assert sum(waits) > 10_000, "two leases of 5 s"
    assert backoff.after_ms(nobody_leads) >= 2_500, "then as after any failure"
    backoff.reset()
    assert backoff.after_ms(nobody_leads) <= 50
    assert backoff.after_ms(NotLeaderError("Later.", retry_after_ms=700)) == 700
    assert [backoff.after_ms(UnavailableError("No room.")) > 2_500 for _ in range(8)][-1]


def test_whoever_waited_for_a_leader_asks_soon_again_once_one_is_elected_and_once_for_each_election() -> None:
    backoff = Backoff(BackoffPolicy(first_ms=50, ceiling_ms=5_000), Random(1))
    nobody_leads = NotLeaderError("Nobody leads.", retry_after_ms=25)
    soon, sooner = (
        NotLeaderError("It is about to be served.", retry_after_ms=25, epoch=each) for each in (7, 8)
    )
    for _ in range(20):
        backoff.after_ms(nobody_leads)
    waits = [backoff.after_ms(soon) for _ in range(20)]
    assert waits[0] <= 50 and all(wait >= ELECTION_WAIT_MS_MAX // 2 for wait in waits[3:])
    assert backoff.after_ms(sooner) <= 50
    assert backoff.after_ms(soon) > 50, "one that has not heard of the election yet"
    backoff.reset()
    backoff.after_ms(nobody_leads)
    assert backoff.after_ms(sooner) > 50, "it is no news"


def test_a_policy_that_cannot_be_is_refused() -> None:
    for first, ceiling in ((0, 1), (5, 4)):
        with pytest.raises(RequestError):
            BackoffPolicy(first_ms=first, ceiling_ms=ceiling)
