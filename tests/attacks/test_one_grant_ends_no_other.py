"""One region's word about one grant is all that it ends: whatever error a grant's documents lead to, the agent plans every other grant,
and a broker's other sessions hear of what changed.

The errors here are made up. The one that was found, a time that no calendar has, is in test_time_without_calendar.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attacks.conftest import Tally
from audit_log import BRIDGE, TIME_MS, trust
from signed_grants import signed_grant

from bridge.plan import Verdict, plan_links
from felix.errors import Code, FelixError
from felix.messages import StreamState
from felix.names import SpiffeId
from felix.settings import Durability, Retention
from policy.grant import GrantBook
from region.broker import Broker

STREAMS = ("acme/ops/one", "acme/ops/two", "acme/ops/three")


@pytest.mark.parametrize("asked", ["_view", "_agreement", "accepted_truncations"])
@pytest.mark.parametrize("ill", range(len(STREAMS)))
def test_an_error_in_one_grant_is_that_grants_stop(
    ill: int, asked: str, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    signed = [signed_grant(stream=name) for name in STREAMS]
    documents = [each for one in signed for each in (one.export, one.accepted, *one.approvals)]
    book = GrantBook(documents, trust().policy_keys, trust().anchors)
    honest = getattr(GrantBook, asked)

    def broken(self: GrantBook, about: Any, *rest: Any) -> Any:
        if getattr(about, "grant", about) == signed[ill].grant:
            raise OverflowError("date value out of range")
        return honest(self, about, *rest)

    monkeypatch.setattr(GrantBook, asked, broken)
    streams = {
        name: StreamState(name, b"i" * 16, 2, Durability(), Retention(), 0, 0) for name in STREAMS
    }  # fmt: skip
    rows = plan_links(book, SpiffeId.parse(BRIDGE), streams, ["eu-west"], TIME_MS)
    for number, one in enumerate(signed):
        own = [(row.shard, row.verdict, row.code) for row in rows if row.grant == one.grant]
        well = [(0, Verdict.RUN, 0), (1, Verdict.RUN, 0)]
        assert own == ([(-1, Verdict.STOP, Code.INTERNAL)] if number == ill else well)
    tally("grants that cannot be judged", 1)


def test_a_session_that_fails_keeps_no_other_from_a_revocation(tally: Tally) -> None:
    heard: list[int] = []
    ended: list[tuple[int, Code]] = []

    class Session:
        identity = SpiffeId.parse(BRIDGE)

        def __init__(self, number: int) -> None:
            self.number = number

        def rights_changed(self) -> None:
            heard.append(self.number)
            if self.number % 2:
                raise OverflowError("date value out of range")

        def fail(self, error: FelixError) -> None:
            ended.append((self.number, error.code))

    broker: Any = SimpleNamespace(sessions={Session(number) for number in range(8)})
    Broker.recheck_sessions(broker)
    assert sorted(heard) == list(range(8))
    # What one may still do is not known, so it may nothing.
    assert sorted(ended) == [(number, Code.INTERNAL) for number in (1, 3, 5, 7)]
    tally("sessions that fail", 4)
