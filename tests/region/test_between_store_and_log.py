"""A signed document reaches the store first, and then the log. What ends a broker between the two, a store that refuses or a disk that
fails, leaves no leaf of what is not in force, and nothing in the store without a leaf for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from bridge_mesh import POLICIES, STREAM, Mesh, two_regions, until

from audit.leaf import Kind
from felix.errors import FelixError, RequestError, UnavailableError
from felix.names import SpiffeId, StreamName
from felix.runtime.real import now_ms
from policy.approval import Document
from policy.grant import DenyEntry, ExportGrant, Standing, StandingAction, half_rank, sign_deny, sign_standing
from policy.residency import parse_policy, sign_policy
from policy.signed import Purpose, SignedDocument, canonical, decode_body, sign
from region.bootstrap import issue_identity
from region.config import load_config
from region.governance.service import Governance
from region.trust.held_document import digest_of

NAME = StreamName.parse(STREAM)
MORE: dict[str, tuple[Kind, bool]] = {
    "half": (Kind.GRANT, True),
    "policy": (Kind.POLICY, True),
    "approval": (Kind.APPROVE, True),
    "pause": (Kind.STANDING, False),
    "deny": (Kind.DENY_ENTRY, False),
    "revoke": (Kind.REVOKE, False),
}
"""What is put, the kind of its leaf, and whether records may cross while it waits for that."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def governance(mesh: Mesh) -> Governance:
    return mesh.nodes["us-east"].services.governance


def allowed(mesh: Mesh, grant: str) -> bool:
    try:
        governance(mesh).check_export(mesh.bridge_id, grant, NAME, "read")
    except FelixError:
        return False
    return True


class Granted:
    """A grant that carries, in us-east, and what may be said about it."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.body, self.export, self.accepted = mesh.sign_grant()
        self.operator = SpiffeId("us-east", mesh.bridge_id.mesh, "operator", "admin")

    async def made(self) -> Granted:
        await self.mesh.create()
        await self.mesh.agree("us-east", self.body, self.export, self.accepted)
        assert allowed(self.mesh, self.body.grant)
        return self

    def again(self, later: int = 1, **changes: object) -> SignedDocument:
        body = msgspec.structs.replace(self.body, signed_at=self.body.signed_at + later, **changes)  # type: ignore[arg-type]
        return sign(Purpose.EXPORT, "us-east", canonical(body), self.mesh.key("us-east"))

    def document(self, what: str) -> tuple[str, Document]:
        """A kind of document, and one of it."""
        grant, at, key = self.body.grant, now_ms(), self.mesh.key("us-east")
        if what == "half":
            return "export", self.again(approvals=2)
        if what == "policy":
            text = POLICIES["us-east"].replace("revision: 1", "revision: 2")
            return "policy", sign_policy(parse_policy(text, "p"), key)
        if what == "approval":
            folder = self.mesh.folder("us-east")
            issue_identity(folder, load_config(folder.config), "approver", "second", at)
            return "approval", self.mesh.sign_approval("us-east", self.body.terms_hash, "second")
        if what == "deny":
            entry = DenyEntry(streams="acme/ops/*", peer="*", region="us-east", sequence=1, at=at, by="a")
            return "deny", sign_deny(entry, key)
        standing = Standing(
            grant=grant, action=StandingAction(what), region="us-east", sequence=1, at=at, by="a"
        )
        return "standing", sign_standing(standing, key)

    async def put(self, kind: str, document: Document) -> str:
        return await governance(self.mesh).put(self.operator, kind, document.encode_file())

    def leaves(self, document: Document) -> int:
        digest = digest_of(document)
        headers = self.mesh.headers(
            self.mesh.folder("us-east").root / "data" / "audit", *(kind for kind, _ in MORE.values())
        )
        return sum(header.document_sha256 == digest for header in headers)


@pytest.mark.parametrize("what", MORE)
async def test_what_the_store_refuses_has_no_leaf(
    mesh: Mesh, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = await Granted(mesh).made()
    kind, document = granted.document(what)
    catalog = governance(mesh)._intake._catalog

    async def refuse(*_: object, **__: object) -> None:
        raise UnavailableError("The store has no room.")

    with monkeypatch.context() as full:
        full.setattr(catalog, "put_document", refuse)
        full.setattr(catalog, "put_policy", refuse)
        with pytest.raises(UnavailableError, match="no room"):
            await granted.put(kind, document)
    assert digest_of(document) not in governance(mesh).logged
    assert governance(mesh)._judgement.leaves._actors == {}
    assert allowed(mesh, granted.body.grant), "and what was in force before is in force"
    await mesh.stop("us-east")
    assert granted.leaves(document) == 0


@pytest.mark.parametrize("what", MORE)
async def test_what_is_killed_between_the_two_gets_its_leaf_at_the_next_start(
    mesh: Mesh, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = await Granted(mesh).made()
    kind, document = granted.document(what)
    before = governance(mesh)
    reached = asyncio.Event()

    async def killed(*_: object) -> bool:
        reached.set()
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr("region.governance.intake.DRAIN_MS", 100)
    monkeypatch.setattr(before.logged, "append", killed)
    putting = asyncio.ensure_future(granted.put(kind, document))
    await reached.wait()
    await until(lambda: digest_of(document) in before._judgement.leaves._writing, "the store has it")
    assert allowed(mesh, granted.body.grant) is MORE[what][1], "what forbids, at once; the rest with its leaf"
    if what in ("half", "policy"):
        shown = before.documents(mesh.bridge_id, kind)
        assert shown and document.encode_file() not in shown.values(), "a bridge sees what is in force"
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    await mesh.stop("us-east")
    assert granted.leaves(document) == 0
    await mesh.start("us-east")
    after = governance(mesh)
    await until(lambda: digest_of(document) in after.logged and not after._judgement._waiting, "its leaf")
    assert allowed(mesh, granted.body.grant) is (what in ("policy", "approval"))
    await mesh.stop("us-east")
    assert granted.leaves(document) == 1


async def test_no_half_takes_the_place_of_one_that_outranks_it(mesh: Mesh) -> None:
    """Of two that were signed in the same ms as well: whoever verifies the log asks the one of the higher rank."""
    granted = await Granted(mesh).made()
    one, other = sorted(
        (granted.again(approvals=2), granted.again(approvals=3)),
        key=lambda each: half_rank(decode_body(each, ExportGrant, Purpose.EXPORT)),
    )
    await granted.put("export", other)
    with pytest.raises(RequestError, match="an older one"):
        await granted.put("export", one)
    await mesh.stop("us-east")
    assert (granted.leaves(other), granted.leaves(one)) == (1, 0)


async def test_of_two_halves_that_are_put_at_once_the_store_has_the_one_that_the_log_asks(mesh: Mesh) -> None:
    granted = await Granted(mesh).made()
    halves = [granted.again(later, approvals=later) for later in (3, 2)]
    done = await asyncio.gather(*(granted.put("export", each) for each in halves), return_exceptions=True)
    stored = await governance(mesh)._intake._catalog.document("grants", "export", granted.body.grant)
    assert stored is not None
    refused = [half for half, result in zip(halves, done, strict=True) if isinstance(result, RequestError)]
    assert refused and stored.document not in [half.encode_file() for half in refused]
    await mesh.stop("us-east")
    assert [granted.leaves(half) for half in halves] == [int(half not in refused) for half in halves]
