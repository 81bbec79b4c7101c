"""The books of `python -m benchmarks queue` and `cache` find what they must find."""

from __future__ import annotations

import pytest

from benchmarks.caching import CacheAccount
from benchmarks.queueing import QueueAccount, settle_queue


def test_jobs_that_were_each_finished_once_are_lossless() -> None:
    assert settle_queue(4, [2, 0, 3, 1], damaged=0, left=0) == QueueAccount(put=4, finished=4)
    assert settle_queue(4, [2, 0, 3, 1], damaged=0, left=0).is_lossless


@pytest.mark.parametrize(
    ("finished", "damaged", "left"),
    [
        ([0, 1, 2], 0, 0),  # one was lost
        ([0, 1, 2, 3, 3], 0, 0),  # one was handed out twice
        ([0, 1, 2, 2], 0, 0),  # one for another
        ([0, 1, 2, 3], 1, 0),
        ([0, 1, 2, 3], 0, 1),  # acknowledged, but the queue does not know
    ],
)
def test_anything_else_is_not(finished: list[int], damaged: int, left: int) -> None:
    assert not settle_queue(4, finished, damaged=damaged, left=left).is_lossless


def test_accounts_add_up() -> None:
    assert QueueAccount(put=2, finished=2) + QueueAccount(put=3, finished=2, lost=1) == QueueAccount(
        put=5, finished=4, lost=1
    )
    assert (CacheAccount(put=1, got=2) + CacheAccount(got=1, stale=1)) == CacheAccount(put=1, got=3, stale=1)


@pytest.mark.parametrize("wrong", [{"missing": 1}, {"stale": 1}, {"differing": 1}])
def test_a_cache_that_answers_wrongly_is_found(wrong: dict[str, int]) -> None:
    assert CacheAccount(put=9, got=9).is_lossless
    assert not CacheAccount(put=9, got=9, **wrong).is_lossless
