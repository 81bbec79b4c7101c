"""A policy that lets more, and honest parties: nothing crosses by it before its leaf stands in the egress log, and before it begins by
the clock that writes that log. Else the log would be wrong for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bridge_mesh import POLICIES, Mesh, flight, two_regions, until
from runtimes import with_wall

from audit.leaf import Kind
from bridge import document_feed
from felix.runtime.real import now_ms
from policy.residency import parse_policy, sign_policy

pytestmark = pytest.mark.timeout(300)

RECORDS = 5
BEHIND_MS = 3_000
"""How far the agent's clock is behind that of its region's broker."""


def strict(text: str) -> str:
    """Only a ciso's approval counts, and there is none."""
    return text.replace("approvals: 1", "approvals: 1\n    approvers: [ciso]")


async def put_policy(mesh: Mesh, text: str) -> None:
    await mesh.put("us-east", "policy", sign_policy(parse_policy(text, "us"), mesh.key("us-east")))


def is_refused(agent: Any) -> bool:
    return any("approv" in link.reason for link in agent.links())


def kinds(mesh: Mesh) -> Sequence[tuple[str, int]]:
    """Of the egress log: policies by revision, and what crossed."""
    wanted = (Kind.POLICY, Kind.INTENT)
    return [
        (header.kind.name, header.policy_version)
        for header in mesh.headers(mesh.egress_folder)
        if header.kind in wanted
    ]


async def test_a_policy_that_lets_more_has_its_leaf_before_anything_crosses_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = POLICIES["us-east"]
    monkeypatch.setitem(POLICIES, "us-east", strict(text))
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.publish([flight(number) for number in range(RECORDS)])
        await mesh.grant()
        may_list = asyncio.Event()
        may_list.set()
        listed = document_feed.list_documents
        being_told = 0

        async def late(*args: Any, **named: Any) -> Any:
            nonlocal being_told
            await may_list.wait()
            being_told += 1
            try:
                return await listed(*args, **named)
            finally:
                being_told -= 1

        monkeypatch.setattr(document_feed, "list_documents", late)
        async with mesh.agent() as agent:
            await until(lambda: is_refused(agent), "the source refuses")
            # As with very many documents, or a slow network: the broker goes by its new policy, and the agent has not been told of it.
            may_list.clear()
            await until(lambda: not being_told, "no listing is under way that could tell of it")
            await put_policy(mesh, text.replace("revision: 1", "revision: 2"))
            await until(
                lambda: any("in the egress log (revision 1)" in link.reason for link in agent.links()),
                "the source lets it cross, and the agent waits",
            )
            assert await mesh.arrived() == 0
            may_list.set()
            await mesh.crossed(RECORDS)
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        found = kinds(mesh)
        assert found.index(("POLICY", 2)) < [kind for kind, _ in found].index("INTENT")
        assert mesh.verify_egress().ok
        assert mesh.verify_ingress().ok


async def test_a_policy_begins_for_a_link_by_the_clock_that_writes_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = POLICIES["us-east"]
    monkeypatch.setitem(POLICIES, "us-east", strict(text))
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.publish([flight(number) for number in range(RECORDS)])
        await mesh.grant()
        async with mesh.agent(with_wall(lambda: now_ms() - BEHIND_MS)) as agent:
            await until(lambda: is_refused(agent), "the source refuses")
            begins = datetime.fromtimestamp((now_ms() + 1_000) // 1_000, UTC).isoformat()
            await put_policy(mesh, text.replace("revision: 1", f"revision: 2\nvalid_from: {begins}"))
            await mesh.crossed(RECORDS)
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        report = mesh.verify_egress()
        assert report.ok, [finding.sentence for finding in report.findings]
