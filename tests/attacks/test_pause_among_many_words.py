"""The destination operator alone: a pause that it lists to the bridge among thousands of other words, while its own broker goes on taking envelopes. What
forbids holds for the links before anything of the list has its leaf, and what any region says next is looked at before the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from attacks.conftest import Tally
from audit_log import trust
from bridge_mesh import flight, two_regions, until
from egress_documents import egress_documents
from signed_grants import deny_entry, signed_grant

from bridge.documents import EgressDocuments, Paper
from felix.names import SpiffeId
from felix.runtime.real import now_ms
from policy.grant import DenyEntry, Standing, StandingAction, sign_deny, sign_standing
from policy.signed import Purpose

ENTRIES = 20


async def test_a_pause_stops_the_link_before_the_words_behind_it_have_their_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    written = EgressDocuments._append
    gate = asyncio.Event()

    async def slow(self: EgressDocuments, paper: Paper) -> bool:
        if paper.document.purpose is Purpose.DENY:
            await gate.wait()
        return await written(self, paper)

    monkeypatch.setattr(EgressDocuments, "_append", slow)
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.publish([flight(0)])
        grant = await mesh.grant()
        async with mesh.agent() as agent:
            await mesh.crossed(1)
            key, governance = mesh.key("eu-west"), mesh.nodes["eu-west"].services.governance
            said = Standing(
                grant=grant, action=StandingAction.PAUSE, region="eu-west", sequence=1, at=now_ms(), by="x"
            )
            more = {"standing": {f"{grant}.zz": sign_standing(said, key).encode_file()}, "deny": {}}
            for number in range(ENTRIES):
                entry = DenyEntry(
                    streams=f"acme/x/s{number}",
                    peer="us-east",
                    region="eu-west",
                    sequence=1,
                    at=now_ms(),
                    by="x",
                )
                more["deny"][f"d.{number}"] = sign_deny(entry, key).encode_file()
            honest = governance.documents

            def listed(identity: SpiffeId, kind: str) -> dict[str, bytes]:
                return dict(honest(identity, kind)) | (
                    more.get(kind, {}) if identity.kind == "bridge" else {}
                )

            monkeypatch.setattr(governance, "documents", listed)
            governance.watch.changed()
            await until(lambda: agent.links()[0].state == "paused", "the link to hear of the pause")
            assert not gate.is_set(), "none of the words behind the pause has its leaf"
            await mesh.publish([flight(1)])
            gate.set()
            await until(lambda: len(agent.context.ledger.documents) > ENTRIES, "the leaves of all words")
            assert await mesh.arrived() == 1
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        assert mesh.verify_egress().ok and mesh.verify_ingress().ok
    tally("words behind a pause", ENTRIES)


async def test_what_a_region_says_next_is_looked_at_before_the_rest_is_written(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    signed = signed_grant()
    keys, anchors = trust().policy_keys, trust().anchors
    entries = [deny_entry(f"acme/ops/s{number}", "eu-west") for number in range(ENTRIES)]
    documents = [signed.export, signed.accepted, *signed.approvals, *entries]
    egress = egress_documents()
    logged = egress._context.ledger.documents
    listed = {"deny": {str(number): each.encode_file() for number, each in enumerate(documents)}}
    policy = {"policy": {"policy": signed.source_policy.encode_file()}}
    await egress.read({"us-east": policy, "eu-west": listed}, keys, anchors)

    async def append(self: EgressDocuments, paper: Paper) -> bool:
        logged.add(paper.digest)
        return True

    monkeypatch.setattr(EgressDocuments, "_append", append)
    total = 1 + len(documents)
    egress.is_newer = lambda: True
    assert await egress.log(lambda _: False) == 1
    assert egress.is_waiting and len(logged) == 1
    egress.is_newer = lambda: False
    assert await egress.log(lambda _: False) == total - 1 and not egress.is_waiting
    tally("words that waited for what came next", total - 1)
