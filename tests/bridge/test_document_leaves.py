"""Signed documents and their leaves: before they are in force, before they are brought, once each, whenever an agent dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest
from bridge_mesh import POLICIES, Mesh, flight, two_regions, until

from audit.errors import AuditUnavailableError
from audit.leaf import DOCUMENT_KINDS, Header, Kind
from bridge.failpoint import DOCUMENT_STEPS
from felix.errors import FelixError
from policy.grant import StandingAction
from policy.residency import parse_policy, sign_policy

BEFORE_CROSSING = (Kind.POLICY, Kind.GRANT, Kind.ACCEPT, Kind.APPROVE)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def once(headers: list[Header]) -> list[Header]:
    """The document leaves of a log, in order; each document stands there once."""
    found = [header for header in headers if header.kind in DOCUMENT_KINDS]
    digests = [header.document_sha256 for header in found]
    assert len(digests) == len(set(digests))
    return found


def in_order(headers: list[Header], crossing: Kind, approvals: int) -> None:
    """All that a grant rests on stands before the first record under it."""
    kinds = [header.kind for header in headers]
    first = kinds.index(crossing)
    for kind in BEFORE_CROSSING:
        assert kind in kinds[:first], kind
    assert kinds[:first].count(Kind.APPROVE) >= approvals


async def settled(mesh: Mesh) -> None:
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)


async def test_each_log_has_the_leaf_of_each_document_before_the_first_record(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(20)])
    await mesh.deny("us-east", "acme/ops/crew")
    await mesh.deny("eu-west", "acme/ops/crew")
    grant = await mesh.grant()
    async with mesh.agent() as agent:
        await mesh.crossed(20)
        pause = await mesh.stand("us-east", grant, StandingAction.PAUSE, 1)
        # A word that another one takes the place of before the agent hears of it is brought nowhere.
        digest = sha256(pause.encode_file()).digest()
        await until(lambda: digest in agent.context.ledger.documents, "the pause in the egress log")
        await mesh.stand("us-east", grant, StandingAction.RESUME, 2)
        await mesh.stand("eu-west", grant, StandingAction.REVOKE, 1)
        books = [node.services.governance.book for node in mesh.nodes.values()]
        assert books
        await until(
            lambda: all(
                node.services.governance.book.is_revoked_by(grant, "eu-west") for node in mesh.nodes.values()
            ),
            "the revocation in both regions",
        )
        await until(
            lambda: all(len(node.services.governance.book.denies()) == 2 for node in mesh.nodes.values()),
            "both deny entries in both regions",
        )
        for region, node in mesh.nodes.items():
            logged, alone = node.services.governance.logged, region == "eu-west"
            await until(
                lambda logged=logged, alone=alone: (
                    sum(digest not in logged for digest in agent.context.ledger.documents) == alone
                ),
                "every document but the source's policy in the other region's log",
            )
    await settled(mesh)
    own = mesh.us.root / "data" / "audit"
    logs = {folder: mesh.headers(folder) for folder in (mesh.egress_folder, mesh.ingress_folder, own)}
    documents = {}
    for folder, headers in logs.items():
        found = once(headers)
        documents[folder] = {h.document_sha256 for h in found if h.kind is not Kind.POLICY}
        kinds = {header.kind for header in found}
        assert kinds == DOCUMENT_KINDS
        assert all(header.terms is None for header in found)
    in_order(logs[mesh.egress_folder], Kind.INTENT, 2)
    in_order(logs[mesh.ingress_folder], Kind.ACK, 2)
    # What crossed stands in both regions' logs, and in the egress log.
    assert documents[mesh.egress_folder] == documents[mesh.ingress_folder] == documents[own]
    assert mesh.verify_egress().ok
    assert mesh.verify_ingress().ok


async def test_a_policy_that_changes_while_a_link_runs_has_its_leaf_first(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(0)])
    await mesh.grant()
    async with mesh.agent() as agent:
        await mesh.crossed(1)
        for region in ("us-east", "eu-west"):
            text = POLICIES[region].replace("revision: 1", "revision: 2")
            document = sign_policy(parse_policy(text, region), mesh.key(region))
            await mesh.put(region, "policy", document)
            digest = mesh.nodes[region].services.governance.policy
            assert digest is not None and digest.revision == 2
        await until(lambda: len(agent.context.ledger.documents) >= 6, "the policy's leaf in the egress log")
        await mesh.publish([flight(1)])
        await mesh.crossed(2)
    await settled(mesh)
    for folder, crossing in ((mesh.egress_folder, Kind.INTENT), (mesh.ingress_folder, Kind.ACK)):
        headers = [h for h in mesh.headers(folder) if h.kind in (crossing, Kind.POLICY)]
        assert [h.policy_version for h in headers if h.kind is Kind.POLICY] == [1, 2]
        assert headers[-1].kind is crossing
    assert mesh.verify_egress().ok


async def test_nothing_is_brought_nor_crosses_while_the_egress_log_takes_no_leaf(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.create()
    await mesh.publish([flight(0)])
    grant = await mesh.grant()
    async with mesh.agent() as agent:
        await until(lambda: agent.context.trail is not None, "the egress log")

        async def full(*_: object) -> int:
            raise AuditUnavailableError("Its disk is full.")

        trail = agent.context.trail
        assert trail is not None
        with monkeypatch.context() as patch:
            patch.setattr(trail, "append", full)
            before = len(agent.context.ledger.documents)
            await asyncio.sleep(2.5)
            if not before:
                assert await mesh.arrived() == 0
                held = mesh.nodes["us-east"].services.governance.book.list(0)
                assert all(view.accepted is None for view in held if view.grant == grant)
        await mesh.crossed(1)
    await settled(mesh)
    in_order(mesh.headers(mesh.egress_folder), Kind.INTENT, 2)


async def test_a_document_that_the_store_holds_without_a_leaf_gets_one_before_it_allows(mesh: Mesh) -> None:
    """The store's administrator puts a genuine grant there by hand."""
    await mesh.create()
    body, export, accepted = mesh.sign_grant()
    governance = mesh.nodes["eu-west"].services.governance
    await mesh.agree("us-east", body, export, accepted)
    catalog = mesh.nodes["eu-west"].broker.catalog
    for side, name, document in (
        ("export", body.grant, export),
        ("import", f"{body.grant}.eu-west", accepted),
    ):
        await catalog.put_document("grants", side, name, document.encode_file(), revision=0)  # type: ignore[arg-type]
    await until(lambda: any(view.grant == body.grant for view in governance.book.list(0)), "the grant")
    await settled(mesh)
    found = once(mesh.headers(mesh.ingress_folder))
    assert [h.kind for h in found if h.grant_id == body.grant] == [Kind.GRANT, Kind.ACCEPT]
    assert all(h.actor == "spiffe://eu-west.acme/broker/b1" for h in found if h.grant_id == body.grant)


async def test_no_document_gets_a_second_leaf_after_a_restart(mesh: Mesh) -> None:
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("eu-west", body, export, accepted)
    for _ in range(2):
        await mesh.stop("eu-west")
        (mesh.eu.root / "data" / "governance" / "logged").unlink(missing_ok=True)
        await mesh.start("eu-west")
        await mesh.agree("eu-west", body, export, accepted)
    await settled(mesh)
    assert len(once(mesh.headers(mesh.ingress_folder))) == 5


async def test_nothing_is_allowed_by_a_document_that_the_log_did_not_take(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, export, accepted = mesh.sign_grant()
    node = mesh.nodes["eu-west"]

    async def failing(*_: object) -> int:
        raise AuditUnavailableError("Its disk failed.")

    monkeypatch.setattr(node.services.governance.trail, "append", failing)
    for kind, document in (("export", export), ("import", accepted)):
        with pytest.raises(FelixError, match="Its disk failed"):
            await mesh.put("eu-west", kind, document)
    with pytest.raises(FelixError, match="Its disk failed"):
        await mesh.deny("eu-west", "acme/ops/*")
    policy = parse_policy(POLICIES["eu-west"].replace("revision: 1", "revision: 2"), "eu-west")
    with pytest.raises(FelixError, match="Its disk failed"):
        await mesh.put("eu-west", "policy", sign_policy(policy, mesh.key("eu-west")))
    governance = node.services.governance
    assert not governance.book.list(0)
    assert governance.book.denies(), "what forbids is in force at once"
    assert governance.policy is not None and governance.policy.revision == 1


@pytest.mark.fault
@pytest.mark.parametrize("step", DOCUMENT_STEPS)
async def test_killed_at_each_step_a_document_has_one_leaf_and_it_comes_first(mesh: Mesh, step: str) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(10)])
    await mesh.grant()
    ends: list[int | None] = []
    for times in (1, 1, 2):
        child = await mesh.child(f"{step}:{times}")
        try:
            async with asyncio.timeout(120):
                # Later ones may find that everything is logged and brought.
                await until(lambda c=child: c.returncode is not None or _complete(mesh), "the child's end")
            ends.append(child.returncode)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        # What the destination was brought stands in the egress log.
    assert ends[0] == -9
    async with mesh.agent() as agent:
        await until(lambda: agent.context.trail is not None, "the egress log")
        await mesh.crossed(10)
    await settled(mesh)
    headers = mesh.headers(mesh.egress_folder)
    once(headers)
    in_order(headers, Kind.INTENT, 2)
    in_order(mesh.headers(mesh.ingress_folder), Kind.ACK, 2)
    egress = mesh.verify_egress()
    assert egress.ok, egress.findings


async def _complete(mesh: Mesh) -> bool:
    return await mesh.arrived() >= 10
