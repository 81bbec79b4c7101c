"""F12: a third region signs the import half of a grant that is not its own, and puts it where the real one stands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bridge_mesh import STREAM, Mesh, two_regions
from region_home import make_region
from region_peer import raw_peer

from felix.errors import Code, FelixError, RequestError
from felix.identity_file import load_identity
from felix.messages import PutDocument
from felix.names import StreamName
from felix.runtime.real import now_ms
from keys.bundle import decode_bundle
from keys.key_file import load_signing_key
from policy.grant import GrantState, ImportGrant
from policy.signed import Purpose, SignedDocument, canonical, sign
from region.bootstrap import issue_identity, trust_region
from region.config import load_config
from region.folder import RegionFolder

Tally = Callable[[str, int], None]
BRIDGE_ID = "spiffe://ap-south.acme/bridge/mallory"


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


@pytest.fixture
async def third(mesh: Mesh) -> RegionFolder:
    """ap-south: trusted by us-east, with a bridge of its own."""
    folder = make_region(mesh.home, "ap-south")
    issue_identity(folder, load_config(folder.config), "bridge", "mallory", now_ms())
    pin = trust_region(mesh.us, decode_bundle(folder.bundle.read_bytes()), now_ms())
    assert pin is not None
    async with mesh.operator("us-east") as client:
        await client.request(PutDocument("pin", pin.encode()))
    return folder


def half_of(third: RegionFolder, genuine: SignedDocument, **changes: Any) -> SignedDocument:
    """ap-south's own "import" under the id of somebody else's grant."""
    body = msgspec.json.decode(genuine.body, type=ImportGrant)
    fields = {
        "to_region": "ap-south", "bridge": BRIDGE_ID, "accepted_by": "spiffe://ap-south.acme/operator/mallory",
        "approvals": 0, "signed_at": body.signed_at + 1_000, **changes,
    }  # fmt: skip
    key = load_signing_key(third.policy_key).private_key
    return sign(Purpose.IMPORT, "ap-south", canonical(msgspec.structs.replace(body, **fields)), key)


@pytest.mark.parametrize("engine", ["qh3", "aioquic"])
async def test_a_third_regions_half_takes_no_place(
    mesh: Mesh, third: RegionFolder, tally: Tally, engine: str
) -> None:
    await mesh.create()
    body, export, accepted = mesh.sign_grant()
    identity = load_identity(third.identity("mallory"))
    governance = mesh.nodes["us-east"].services.governance
    catalog = mesh.nodes["us-east"].broker.catalog

    async def bring(document: SignedDocument, number: int) -> FelixError | None:
        node = mesh.nodes["us-east"]
        async with raw_peer(mesh.us, node.address, identity=identity, engine=engine) as peer:
            try:
                await peer.ask(PutDocument("import", document.encode_file()), number)
            except RequestError as error:
                return error
        return None

    # Before the export grant is there, nobody can tell; it stands beside, under its own name.
    await bring(half_of(third, accepted), 1)
    await mesh.agree("us-east", body, export, accepted)
    # Afterwards it is refused, whatever it claims.
    claims: tuple[dict[str, Any], ...] = (
        {},
        {"terms_hash": "0" * 64},
        {"from_region": "us-east", "destination_stream": "acme/ops/stolen"},
        {"stream": "acme/ops/*"},
    )
    for number, changes in enumerate(claims, 2):
        error = await bring(half_of(third, accepted, **changes), number)
        assert error is not None and error.code in (Code.GRANT_MISMATCH, Code.FORBIDDEN), error
    # Nor does it sign for eu-west, nor for a grant to which us-east is no end.
    moved = half_of(
        third, accepted, to_region="eu-west", accepted_by="spiffe://eu-west.acme/operator/mallory"
    )
    for document in (moved, half_of(third, accepted, from_region="ap-north")):
        assert await bring(document, 9) is not None
    held = {document.id for document in await catalog.list_documents("grants", "import")}
    assert f"{body.grant}.eu-west" in held
    view = governance.book.get(body.grant, now_ms())
    assert view.state is GrantState.ACTIVE
    assert view.accepted is not None and view.accepted.to_region == "eu-west"
    assert (
        governance.check_export(mesh.bridge_id, body.grant, StreamName.parse(STREAM), "read").grant
        == body.grant
    )
    tally("false halves", len(claims) + 3)


async def test_the_own_regions_second_acceptance_is_the_one_that_was_signed_last(mesh: Mesh) -> None:
    """An older acceptance cannot be played again over a newer one."""
    await mesh.create()
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("us-east", body, export, accepted)
    half = msgspec.json.decode(accepted.body, type=ImportGrant)

    def again(signed_at: int) -> SignedDocument:
        changed = canonical(msgspec.structs.replace(half, approvals=2, signed_at=signed_at))
        return sign(Purpose.IMPORT, "eu-west", changed, mesh.key("eu-west"))

    governance = mesh.nodes["us-east"].services.governance
    await mesh.put("us-east", "import", again(half.signed_at + 5))
    found = governance.book.get(body.grant, now_ms()).accepted
    assert found is not None and found.approvals == 2
    with pytest.raises(RequestError) as refused:
        await mesh.put("us-east", "import", accepted)
    assert refused.value.code is Code.CONFLICT
    with pytest.raises(FelixError) as waiting:
        governance.check_export(mesh.bridge_id, body.grant, StreamName.parse(STREAM), "read")
    assert waiting.value.code is Code.NOT_APPROVED
