"""What a region does not believe, and does not tell: forged trust, taken-back documents, floods of refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from bridge_mesh import ACCEPTED_BY, BRIDGE, POLICIES, STREAM, Mesh, two_regions, until
from region_home import make_region
from region_peer import raw_peer

from audit.errors import AuditUnavailableError
from audit.leaf import Kind, Leaf
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.identity_file import load_identity
from felix.messages import (
    DataKeySealed,
    DocumentPage,
    GetDataKey,
    LinkState,
    ListDocuments,
    PutDocument,
    Start,
    Subscribe,
)
from felix.names import SpiffeId, StreamName
from felix.runtime.real import REAL, now_ms
from keys.bundle import decode_bundle
from keys.hybrid import HybridKeyPair
from keys.key_file import load_signing_key
from policy.grant import DenyEntry, Standing, StandingAction, sign_deny, sign_import, sign_standing
from policy.residency import parse_policy, sign_policy
from policy.signed import Purpose, SignedDocument, decode_body
from region.bootstrap import issue_identity
from region.config import load_config
from region.crossing.export import ExportService
from region.governance.denials import DENY_LEAVES_MAX, _Denied
from region.governance.held_documents import HeldDocuments
from region.governance.service import CUT_OFF_MS_MAX, Governance
from region.metadata.catalog import Catalog
from region.metadata.records import PolicyPointer, encode
from region.metadata.transaction import Put

NAME = StreamName.parse(STREAM)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def governance(mesh: Mesh, region: str = "us-east") -> Governance:
    return mesh.nodes[region].services.governance


def catalog(mesh: Mesh, region: str = "us-east") -> Catalog:
    return mesh.nodes[region].broker.catalog


async def granted(mesh: Mesh) -> str:
    """Both halves in the source, and the bridge's right to read there."""
    await mesh.create()
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("us-east", body, export, accepted)
    governance(mesh).check_export(mesh.bridge_id, body.grant, NAME, "read")
    return body.grant


def refusal(mesh: Mesh, grant: str) -> FelixError:
    with pytest.raises(FelixError) as refused:
        governance(mesh).check_export(mesh.bridge_id, grant, NAME, "read")
    return refused.value


# -- what a metadata administrator may try -------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
async def test_a_revocation_that_is_deleted_from_the_store_stays(mesh: Mesh, restart: bool) -> None:
    grant = await granted(mesh)
    await mesh.stand("us-east", grant, StandingAction.REVOKE)
    assert refusal(mesh, grant).code is Code.GRANT_REVOKED
    (document,) = await catalog(mesh).list_documents("revocations", "state")
    await catalog(mesh).delete_document("revocations", "state", document.id)
    held = mesh.nodes["us-east"].services.requests._mirror
    await until(lambda: not held.documents("revocations", "state"), "the deletion")
    if restart:
        await mesh.stop("us-east")
        await mesh.start("us-east")
    assert refusal(mesh, grant).code is Code.GRANT_REVOKED


async def test_what_became_of_another_grant_is_no_reason_under_this_one(mesh: Mesh) -> None:
    ended = await granted(mesh)
    await mesh.stand("us-east", ended, StandingAction.REVOKE)
    assert "revoked" in str(refusal(mesh, ended))
    said = str(refusal(mesh, "g-" + "a" * 16))
    assert ended not in said and "no grant" in said


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
async def test_an_older_policy_that_is_put_back_allows_nothing(mesh: Mesh, restart: bool) -> None:
    grant = await granted(mesh)
    policy = parse_policy(POLICIES["us-east"].replace("revision: 1", "revision: 2"), "us-east.yaml")
    await mesh.put("us-east", "policy", sign_policy(policy, mesh.key("us-east")))
    await until(lambda: (found := governance(mesh).policy) and found.revision == 2, "the new policy")
    store = catalog(mesh)
    pointer = await store.store.get(store.keys.policy_pointer())
    assert pointer is not None
    await store.store.transact([], [Put(store.keys.policy_pointer(), encode(PolicyPointer(1)))])
    if restart:
        await mesh.stop("us-east")
        await mesh.start("us-east")
    await until(lambda: governance(mesh).policy is None, "the older policy's refusal")
    assert refusal(mesh, grant).code is Code.RESIDENCY_DENIED
    # The operator puts a newer one in force, and all is well.
    newer = parse_policy(POLICIES["us-east"].replace("revision: 1", "revision: 3"), "us-east.yaml")
    await mesh.put("us-east", "policy", sign_policy(newer, mesh.key("us-east")))
    await until(lambda: governance(mesh).policy is not None, "the newer policy")
    governance(mesh).check_export(mesh.bridge_id, grant, NAME, "read")


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
async def test_the_other_half_of_a_grant_cannot_be_forged_with_a_bundle_of_ones_own(
    mesh: Mesh, tmp_path: Path, restart: bool
) -> None:
    """The administrator founds a region of the same name, and puts its bundle where the real one's stands."""
    await mesh.create()
    body, export, _ = mesh.sign_grant()
    await mesh.put("us-east", "export", export)
    false = make_region(tmp_path / "false", "eu-west")
    key = load_signing_key(false.policy_key).private_key
    trusted = {"us-east": mesh.bundle("us-east").policy_keys}
    accepted = sign_import(
        export, parse_policy(POLICIES["eu-west"], "eu"), key, trusted, ACCEPTED_BY, now_ms()
    )
    store = catalog(mesh)
    entry = await store.store.get(store.keys.trusted("eu-west"))
    assert entry is not None
    await store.put_trusted("eu-west", false.bundle.read_bytes(), revision=entry.mod_revision)
    revision = await store.put_document("grants", "import", body.grant, accepted.encode_file(), revision=0)
    if restart:
        await mesh.stop("us-east")
        await mesh.start("us-east")
    else:
        await mesh.nodes["us-east"].services.requests._mirror.wait_for(revision.revision)
    assert refusal(mesh, body.grant).code in (Code.GRANT_INVALID, Code.GRANT_MISSING)
    held = governance(mesh).bundles["eu-west"]
    assert held == mesh.bundle("eu-west") != decode_bundle(false.bundle.read_bytes()).bundle


async def test_documents_that_cannot_be_taken_in_allow_nothing(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A book that cannot be made must not leave the one before in force: what failed may have been a revocation."""
    grant = await granted(mesh)

    def broken(*_: object) -> object:
        raise MemoryError

    monkeypatch.setattr(HeldDocuments, "sort", broken)
    await catalog(mesh).put_trusted("ap-south", b"{}")
    await until(lambda: "ap-south" in mesh.nodes["us-east"].services.requests._mirror.trusted(), "the change")
    assert refusal(mesh, grant).code in (Code.GRANT_MISSING, Code.RESIDENCY_DENIED)


class Clock:
    """The real clock, of which so many ms more have passed since the boot."""

    def __init__(self, passed_ms: Callable[[], int]) -> None:
        self._passed_ms = passed_ms

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL.clock, name)

    def boot_ms(self) -> int:
        return REAL.clock.boot_ms() + self._passed_ms()


def test_refusals_have_leaves_after_the_wall_clock_was_set_back() -> None:
    denied, hour_ms = _Denied(0), 3_600_000
    refusal = ("read", STREAM, "", 0)
    assert denied.is_due(refusal, hour_ms)
    assert not denied.is_due(refusal, hour_ms + 1)
    assert denied.is_due(refusal, 1), "and not in an hour"


async def test_a_store_that_is_cut_off_stops_what_it_might_have_revoked(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await granted(mesh)
    broker, mirror = mesh.nodes["us-east"].broker, mesh.nodes["us-east"].services.requests._mirror
    passed, wall = 0, broker.clock_ms()
    clock: Any = Clock(lambda: passed)
    monkeypatch.setattr(broker, "runtime", msgspec.structs.replace(broker.runtime, clock=clock))
    monkeypatch.setattr(broker, "clock_ms", lambda: wall)
    mirror._follower.is_current = False
    governance(mesh).check_export(mesh.bridge_id, grant, NAME, "read")
    # The wall clock may be set back meanwhile.
    passed, wall = CUT_OFF_MS_MAX + 1, wall - 1_000
    assert isinstance(refusal(mesh, grant), UnavailableError)
    mirror._follower.is_current = True
    governance(mesh).check_export(mesh.bridge_id, grant, NAME, "read")


# -- what a peer may try -------------------------------------------------------------------------------


async def test_made_up_grants_do_not_fill_the_log(mesh: Mesh) -> None:
    issue_identity(mesh.us, load_config(mesh.us.config), "client", "web", now_ms())
    identity = load_identity(mesh.us.identity("web"))
    node = mesh.nodes["us-east"]
    async with raw_peer(mesh.us, node.address, identity=identity) as peer:
        for number in range(1, 3 * DENY_LEAVES_MAX + 1):
            made_up = f"g-{''.join(chr(ord('a') + digit) for digit in divmod(number, 26)):a>16}"
            with pytest.raises(RequestError):
                await peer.ask(
                    Subscribe(STREAM, Start("earliest"), credit_bytes=1 << 21, grant=made_up), number
                )
    held = governance(mesh).denials._peers[identity.spiffe_id]
    assert held.left_out == 2 * DENY_LEAVES_MAX
    await mesh.stop("us-east")
    assert len(mesh.headers(mesh.us.root / "data" / "audit", Kind.DENY)) == DENY_LEAVES_MAX


async def test_a_bridge_of_another_region_is_told_of_its_own_grants_only(mesh: Mesh) -> None:
    """Neither policy nor bundles, and no deny entries before it has a grant."""
    await mesh.deny("eu-west", "acme/payments/*")
    node, identity = mesh.nodes["eu-west"], load_identity(mesh.us.identity(BRIDGE))
    async with raw_peer(mesh.eu, node.address, identity=identity, region="eu-west") as peer:
        for number, kind in enumerate(("policy", "bundle"), 1):
            with pytest.raises(RequestError) as refused:
                await peer.ask(ListDocuments(kind), number)
            assert refused.value.code is Code.FORBIDDEN
        for number, kind in enumerate(("export", "import", "approval", "standing", "deny"), 10):
            page = await peer.ask(ListDocuments(kind), number)
            assert isinstance(page, DocumentPage) and not page.documents and not page.more
        _, export, _ = mesh.sign_grant()
        await mesh.put("eu-west", "export", export)
        denied = await peer.ask(ListDocuments("deny"), 20)
        assert isinstance(denied, DocumentPage)
        assert len(denied.documents) == 1


async def test_a_region_has_no_say_in_grants_that_are_not_its_own(mesh: Mesh) -> None:
    """Such a standing changed nothing before, either; but it was kept, verified at each change, and had no end."""

    def standing(grant: str, region: str) -> bytes:
        body = Standing(
            grant=grant,
            action=StandingAction.PAUSE,
            region=region,
            sequence=1,
            at=now_ms(),
            by="m",
            reason="",
        )
        return sign_standing(body, mesh.key(region)).encode_file()

    await granted(mesh)
    node, identity = mesh.nodes["us-east"], load_identity(mesh.us.identity(BRIDGE))
    async with raw_peer(mesh.us, node.address, identity=identity) as peer:
        with pytest.raises(RequestError) as refused:
            await peer.ask(PutDocument("standing", standing("g-" + "a" * 16, "eu-west")), 1)
        assert refused.value.code is Code.GRANT_MISSING
    assert not await catalog(mesh).list_documents("revocations", "state")


async def test_another_region_cannot_fill_the_store_with_documents(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("region.governance.held_documents.PEER_DOCUMENTS_MAX", 3)
    grant = await granted(mesh)
    node, identity = mesh.nodes["us-east"], load_identity(mesh.us.identity(BRIDGE))

    def standing(sequence: int, action: StandingAction) -> PutDocument:
        body = Standing(
            grant=grant, action=action, region="eu-west", sequence=sequence, at=now_ms(), by="m", reason=""
        )
        return PutDocument("standing", sign_standing(body, mesh.key("eu-west")).encode_file())

    def denial() -> PutDocument:
        body = DenyEntry(
            streams="acme/*/*", peer="us-east", region="eu-west", sequence=1, at=now_ms(), by="m"
        )
        return PutDocument("deny", sign_deny(body, mesh.key("eu-west")).encode_file())

    def stored() -> list[int]:
        found = node.services.governance.documents(
            SpiffeId("us-east", "acme", "operator", "operator"), "standing"
        ).values()
        return sorted(
            decode_body(SignedDocument.parse(data), Standing, Purpose.STANDING).sequence for data in found
        )

    first = standing(1, StandingAction.PAUSE)
    async with raw_peer(mesh.us, node.address, identity=identity) as peer:
        await peer.ask(first, 1)
        with pytest.raises(UnavailableError) as refused:
            await peer.ask(denial(), 2)
        assert refused.value.code is Code.LIMIT_MEMORY
        # What takes the place of an earlier word needs no room of its own.
        await peer.ask(standing(2, StandingAction.RESUME), 3)
        assert stored() == [1, 2]
        await peer.ask(standing(3, StandingAction.PAUSE), 4)
        assert stored() == [2, 3], "what was replaced is removed where there is no room"
        await peer.ask(standing(4, StandingAction.RESUME), 5)
        governance(mesh).check_export(mesh.bridge_id, grant, NAME, "read")
        # The removed pause comes again: it is not in force, nor kept.
        leaves = governance(mesh).audit_state()[1]
        await peer.ask(first, 6)
        assert (stored(), governance(mesh).audit_state()[1]) == ([3, 4], leaves)
        governance(mesh).check_export(mesh.bridge_id, grant, NAME, "read")
        # A revocation is always taken.
        await peer.ask(standing(5, StandingAction.REVOKE), 7)
    assert refusal(mesh, grant).code is Code.GRANT_REVOKED


# -- the log -------------------------------------------------------------------------------------------


async def test_a_grant_has_one_leaf_however_often_it_is_brought(mesh: Mesh) -> None:
    _, export, _ = mesh.sign_grant()
    for _ in range(3):
        await mesh.put("eu-west", "export", export)
    await mesh.stop("eu-west")
    assert len(mesh.headers(mesh.ingress_folder, Kind.GRANT)) == 1


async def test_no_grant_comes_in_force_without_its_leaf(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    await mesh.create()
    body, export, accepted = mesh.sign_grant()

    async def failing(*_: object) -> int:
        raise AuditUnavailableError("Its disk failed.")

    with monkeypatch.context() as failing_log:
        failing_log.setattr(governance(mesh).trail, "append", failing)
        with pytest.raises(FelixError, match="Its disk failed"):
            await mesh.put("us-east", "export", export)
        assert refusal(mesh, body.grant).code is Code.GRANT_MISSING
    # The store has it: once the log takes its leaf it is in force, without being put again.
    await until(lambda: governance(mesh).book.half(body.grant) is not None, "the grant")
    await mesh.agree("us-east", body, export, accepted)
    governance(mesh).check_export(mesh.bridge_id, body.grant, NAME, "read")


async def test_nothing_is_handed_out_once_the_log_has_stopped(mesh: Mesh) -> None:
    grant = await granted(mesh)
    governance(mesh).trail._fail("a test", OSError("no disk"))
    assert refusal(mesh, grant).code is Code.AUDIT_UNAVAILABLE


# -- keys and the board --------------------------------------------------------------------------------


async def test_keys_of_a_deleted_stream_are_not_handed_out_for_a_new_one_of_its_name(mesh: Mesh) -> None:
    grant = await granted(mesh)
    await mesh.publish([b"{}"])
    keyring = governance(mesh).keys._keyring
    old = next(key.key_id for key in keyring.list(NAME) if key.level == "data")
    pair = HybridKeyPair.generate()
    export = mesh.nodes["us-east"].services.export
    request = GetDataKey(grant, STREAM, old, pair.public.encoded)
    assert isinstance(await export.data_key(mesh.bridge_id, request), DataKeySealed)
    async with mesh.operator("us-east") as client:
        await client.delete_stream(STREAM)
        await client.create_stream(STREAM)
    with pytest.raises(FelixError) as refused:
        await export.data_key(mesh.bridge_id, request)
    # Which one says whether the old key is destroyed already.
    assert refused.value.code in (Code.KEY_SCOPE, Code.KEY_UNKNOWN, Code.KEY_DESTROYED)


async def test_a_grant_that_is_revoked_while_the_keyring_is_asked_gives_no_key(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await granted(mesh)
    await mesh.publish([b"{}"])
    keyring, asked, go_on = governance(mesh).keys._keyring, asyncio.Event(), asyncio.Event()
    found = keyring.data_key(next(key.key_id for key in keyring.list(NAME) if key.level == "data"))
    loop = asyncio.get_running_loop()

    def slow(_: bytes) -> object:
        loop.call_soon_threadsafe(asked.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        return found

    monkeypatch.setattr(keyring, "data_key", slow)
    request = GetDataKey(grant, STREAM, found.key_id, HybridKeyPair.generate().public.encoded)
    asking = asyncio.ensure_future(mesh.nodes["us-east"].services.export.data_key(mesh.bridge_id, request))
    await asked.wait()
    await mesh.stand("us-east", grant, StandingAction.REVOKE)
    go_on.set()
    with pytest.raises(FelixError) as refused:
        await asking
    assert refused.value.code is Code.GRANT_REVOKED


async def test_a_revocation_whose_leaf_takes_long_is_told_to_the_bridge_that_waits(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await granted(mesh)
    watch, append = governance(mesh).watch, governance(mesh).logged.append
    writing, go_on = asyncio.Event(), asyncio.Event()

    async def slow(file: bytes, leaf: Leaf) -> None:
        writing.set()
        await go_on.wait()
        await append(file, leaf)

    monkeypatch.setattr(governance(mesh).logged, "append", slow)
    revoking = asyncio.ensure_future(mesh.stand("us-east", grant, StandingAction.REVOKE))
    await writing.wait()
    known = watch.revision(mesh.bridge_id)
    waiting = asyncio.ensure_future(watch.wait(mesh.bridge_id, known, 20_000))
    await asyncio.sleep(0)
    go_on.set()
    await waiting
    assert watch.revision(mesh.bridge_id) != known
    assert governance(mesh).documents(mesh.bridge_id, "standing")
    await revoking


async def test_one_bridge_cannot_report_for_the_link_of_another(mesh: Mesh) -> None:
    link = LinkState(
        grant="g", stream=STREAM, shard=0, from_region="us-east", to_region="eu-west", bridge=str(mesh.bridge_id),
        state="denied", reason="A test.", position=0, high_watermark=0, lag_records=0, lag_bytes=0, lag_ms=0,
        crossed=0, withheld=0, filtered=0, reported_ms=0,
    )  # fmt: skip
    other = SpiffeId("us-east", "acme", "bridge", "other")
    export = mesh.nodes["us-east"].services.export
    export.report(mesh.bridge_id, [link])
    export.report(other, [msgspec.structs.replace(link, bridge=str(other), state="active")])
    assert link in export.links()
    with pytest.raises(RequestError):
        export.report(other, [link])


async def test_who_reported_longest_ago_makes_room_on_the_board_of_links(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("region.crossing.export.BRIDGES_MAX", 2)
    monkeypatch.setattr("region.crossing.export.LINKS_MAX", 2)
    node = mesh.nodes["us-east"]
    export = ExportService(node.broker, node.services.governance, *[cast(Any, None)] * 2)
    for number in (1, 2, 1, 3):
        bridge = SpiffeId("us-east", "acme", "bridge", f"b{number}")
        export.report(
            bridge,
            [
                LinkState(
                    grant="g", stream=STREAM, shard=shard, from_region="us-east", to_region="eu-west",
                    bridge=str(bridge), state="active",
                )
                for shard in range(3)
            ],
        )  # fmt: skip
    assert [(link.bridge[-2:], link.shard) for link in export.links()] == [
        ("b1", 1), ("b3", 1), ("b1", 2), ("b3", 2),
    ]  # fmt: skip
