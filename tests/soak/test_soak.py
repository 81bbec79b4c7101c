"""Broker and workers are killed under load, and every part's books settle. `make soak` kills a hundred times and more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from long_runs import count
from soak.caches import CachePart
from soak.harness import Part, soak
from soak.pipelines import PipelinePart
from soak.queues import QueuePart
from soak.streams import StreamPart
from soak.subscriptions import SubscriptionPart
from soak.transactions import TransactionPart

PARTS: dict[str, Callable[[Path], Part]] = {
    "streams": StreamPart,
    "queues": QueuePart,
    "cache": CachePart,
    "subscriptions": SubscriptionPart,
    "transactions": TransactionPart,
    "pipelines": PipelinePart,
}
KILLS = count(2, 6)
SOAK_KILLS = int(os.environ.get("FELIX_SOAK_KILLS", "100"))


@pytest.mark.fault
async def test_a_few_kills_over_everything_at_once(tmp_path: Path) -> None:
    figures = await soak(tmp_path, KILLS, [make(tmp_path) for make in PARTS.values()])
    assert figures["kills"]["broker"] and figures["kills"]["workers"]


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.skipif("FELIX_SOAK_KILLS" not in os.environ, reason="make soak runs this")
@pytest.mark.parametrize("name", PARTS)
async def test_a_few_kills_of_one_part(name: str, tmp_path: Path) -> None:
    figures = await soak(tmp_path, KILLS, [PARTS[name](tmp_path)])
    assert figures["kills"]["broker"] and figures["kills"]["workers"]


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif("FELIX_SOAK_KILLS" not in os.environ, reason="make soak runs this")
async def test_a_hundred_kills_over_everything_at_once(tmp_path: Path) -> None:
    figures = await soak(tmp_path, SOAK_KILLS, [make(tmp_path) for make in PARTS.values()])
    print(json.dumps(figures, indent=2))
