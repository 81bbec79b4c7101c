"""Jobs that a transaction is about to acknowledge: nobody else gets them before it is known whether it does."""

from __future__ import annotations

import pytest

from felix.settings import QueueSettings
from region.queue.state import Phase, QueueState

JOB = [(0, 1, 1)]
"""The lease of the first record."""


@pytest.fixture
def state() -> QueueState:
    """Three records; the first is leased until 100."""
    state = QueueState(QueueSettings())
    state.take_up_run(3, 0, 0)
    record = state.next_ready()
    assert record is not None
    state.lease(record, 100, 1, 0)
    state.leased([record], 100, 1)
    return state


def next_of(state: QueueState) -> int:
    record = state.next_ready()
    assert record is not None
    return record.offset


def test_a_reserved_job_outlives_its_lease_and_is_settled(state: QueueState) -> None:
    assert state.reserve(JOB) == []
    state.tick(1_000_000)
    assert state.tracked[0].phase is Phase.LEASED and next_of(state) == 1
    state.settle(JOB, 1_000_000)
    assert 0 in state.done and not state.leased_by


def test_a_heartbeat_of_its_worker_does_not_let_it_run_out(state: QueueState) -> None:
    state.reserve(JOB)
    assert state.extend(JOB, 50)[1] == []
    state.tick(60)
    assert state.tracked[0].phase is Phase.LEASED


def test_a_reserved_job_is_neither_given_back_nor_reserved_again(state: QueueState) -> None:
    state.reserve(JOB)
    assert state.reserve(JOB) == [0]
    assert state.nack(JOB, 0, 10)[1] == [0]
    assert state.release(JOB, 10)[1] == [0]
    assert state.tracked[0].phase is Phase.LEASED and state.tracked[0].open


def test_once_the_transaction_is_given_up_the_lease_is_what_it_was(state: QueueState) -> None:
    state.reserve(JOB)
    state.tick(200)
    state.unreserve([(0, 1, 7)])
    state.tick(201)
    assert state.tracked[0].phase is Phase.LEASED, "of another lease"
    state.unreserve(JOB)
    state.tick(202)
    assert state.tracked[0].phase is Phase.READY
    assert state.reserve(JOB) == [] and state.tracked[0].phase is Phase.LEASED, "nobody else got it meanwhile"


def test_either_all_jobs_are_reserved_or_none(state: QueueState) -> None:
    assert state.reserve([*JOB, (1, 1, 1)]) == [1]
    assert not state.tracked[0].reserved
