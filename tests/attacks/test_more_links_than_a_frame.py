"""Nobody's keys, or another region's: a bridge has more links than one report's frame holds, by a pattern's streams or by acceptances of exports
that nobody made. It goes on hearing its own region, and what another region makes up costs it a bounded number of rows and no task."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from bridge_mesh import Mesh, flight, two_regions, until

from audit.leaf import Kind
from bridge import link_table
from bridge.plan import UNFOUNDED_MAX
from felix.errors import Code, RequestError
from felix.messages import ReportLinks
from felix.names import SpiffeId
from policy.grant import ImportGrant, StandingAction
from policy.signed import Purpose, canonical, decode_body, sign
from policy.terms import grant_id
from region.governance.service import Governance

Tally = Callable[[str, int], None]
pytestmark = pytest.mark.timeout(300)


def made_up(mesh: Mesh, count: int) -> dict[str, bytes]:
    """Genuine acceptances by eu-west of exports that there are none of, for the mesh's bridge."""
    _, _, accepted = mesh.sign_grant()
    half = decode_body(accepted, ImportGrant, Purpose.IMPORT)
    found = {}
    for number in range(count):
        terms_hash = hashlib.sha256(b"%d" % number).digest()
        body = msgspec.structs.replace(half, grant=grant_id(terms_hash), terms_hash=terms_hash.hex())
        document = sign(Purpose.IMPORT, "eu-west", canonical(body), mesh.key("eu-west"))
        found[f"{body.grant}.eu-west"] = document.encode_file()
    return found


async def test_an_agent_with_many_links_reports_them_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.publish([flight(0)])
        grant = await mesh.grant()
        honest, more = Governance.documents, made_up(mesh, 3 * UNFOUNDED_MAX)

        def listed(governance: Governance, identity: SpiffeId, kind: str) -> dict[str, bytes]:
            shown = honest(governance, identity, kind)
            is_told = (
                kind == "import"
                and identity.kind == "bridge"
                and governance is mesh.nodes["eu-west"].services.governance
            )
            return shown | more if is_told else shown

        monkeypatch.setattr(Governance, "documents", listed)
        # Of what would be a thousand links of some 270 bytes, here with fewer and longer ones.
        at_rest = link_table.state_at_rest
        monkeypatch.setattr(
            link_table,
            "state_at_rest",
            lambda *about: msgspec.structs.replace(at_rest(*about), reason="why " * 1_000),
        )
        async with mesh.agent() as agent:
            await mesh.crossed(1)
            await until(lambda: len(agent.links()) == 1 + UNFOUNDED_MAX, "as many rows as are shown")
            assert len(agent._links.workers) == 1
            async with mesh.operator("us-east") as client:

                async def board() -> bool:
                    return len(await client.list_links()) == 1 + UNFOUNDED_MAX

                await until(board, "all of them on the board")
                # More than a frame holds is refused where it is made, and ends no session.
                with pytest.raises(RequestError) as refused:
                    await client.request(ReportLinks(agent.links()))
                assert refused.value.code is Code.FRAME_TOO_LARGE
                assert await client.list_links()
            await mesh.stand("us-east", grant, StandingAction.PAUSE)
            await until(lambda: mesh.leaves(mesh.egress_folder, Kind.STANDING), "the pause in the egress log")
            await until(lambda: mesh.documents("eu-west", "standing"), "the pause at the other region")
    tally("links", 1 + UNFOUNDED_MAX)
