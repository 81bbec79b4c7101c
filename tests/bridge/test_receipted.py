"""How long a region's log has to be by the receipts that it gave: those of before the session, and no later one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bridge import receipted
from bridge.receipted import LATE_S, Receipted
from felix.errors import Code, CorruptionError, UnavailableError


class Region:
    """A destination whose log has so many leaves in its checkpoint; receipts name the leaves in `received`, the newest last."""

    region = "eu-west"

    def __init__(self, size: int, received: list[int]) -> None:
        self.size, self.received = size, received
        self.asked = 0
        self._link = object()

    def link(self) -> object:
        return self._link

    def connection(self) -> Any:
        return SimpleNamespace(request=self._request)

    def begin_session(self) -> None:
        self._link = object()

    async def _request(self, message: object) -> Any:
        self.asked += 1
        return SimpleNamespace(size=self.size)


class Agent:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        self._receipted = Receipted(SimpleNamespace(clock=clock))  # type: ignore[arg-type]
        monkeypatch.setattr(
            receipted, "newest_receipt", lambda trail, ledger, region: self.region.received or None
        )
        monkeypatch.setattr(receipted, "_ingress_index", lambda trail, received: received[-1])
        self.region: Region

    async def look(self, region: Region) -> Code | None:
        self.region = region
        try:
            await self._receipted.check(region, None, None)  # type: ignore[arg-type]
        except (UnavailableError, CorruptionError) as error:
            return error.code
        return None


async def test_what_is_received_in_a_session_is_not_asked_for_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, region = Agent(monkeypatch), Region(0, [])
    assert await agent.look(region) is None
    region.received.append(7)
    assert await agent.look(region) is None and not region.asked
    region.begin_session()
    region.size = 8
    assert await agent.look(region) is None
    region.received.append(30)
    assert await agent.look(region) is None and region.asked == 1


async def test_a_checkpoint_that_is_late_is_waited_for_though_more_is_received_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, region = Agent(monkeypatch), Region(5, [7])
    for _ in range(5):
        assert await agent.look(region) is Code.UNAVAILABLE
        agent.now_s += 1
        # Always a second behind.
        region.received.append(region.received[-1] + 10)
    region.size = 8
    assert await agent.look(region) is None


async def test_a_log_that_stays_behind_was_put_back_until_the_link_with_the_receipt_is_found_truncated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, region = Agent(monkeypatch), Region(5, [3, 7])
    assert await agent.look(region) is Code.UNAVAILABLE
    agent.now_s += LATE_S
    assert await agent.look(region) is Code.ROLLED_BACK
    region.received.pop()
    assert await agent.look(region) is None
