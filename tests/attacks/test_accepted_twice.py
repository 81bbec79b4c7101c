"""A truncation is accepted twice: of what was shown before the first word, at another offset, by the other region, with an earlier date. The
link goes on from the word under which records crossed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attacks.test_f08_truncation import accept, checked, link, numbered, source_put_back
from bridge_mesh import BRIDGE, STREAM, Mesh, two_regions

from felix.errors import Code, RequestError
from felix.messages import LinkState
from felix.names import SpiffeId
from felix.runtime.real import now_ms
from policy.grant import Standing, StandingAction, sign_standing
from policy.signed import SignedDocument
from policy.truncation import Truncation
from region.bootstrap import issue_identity
from region.config import load_config

OTHER = "us-to-eu-2"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        issue_identity(mesh.us, load_config(mesh.us.config), "bridge", OTHER, now_ms())
        yield mesh


def word(mesh: Mesh, held: LinkState, region: str, offset: int, at: int) -> SignedDocument:
    """A region's signed acceptance of what `held` shows, from this offset on."""
    assert held.cut is not None
    cut = Truncation(
        stream=held.stream,
        shard=held.shard,
        incarnation=held.cut.incarnation.hex(),
        epoch=held.cut.epoch,
        offset=offset,
    )
    standing = Standing(
        grant=held.grant,
        action=StandingAction.ACCEPT_TRUNCATION,
        region=region,
        sequence=1,
        at=at,
        by="bob",
        truncation=cut,
    )
    return sign_standing(standing, mesh.key(region))


async def test_a_truncation_accepted_twice_is_accepted_once(mesh: Mesh, tmp_path: Path) -> None:
    await source_put_back(mesh, tmp_path / "older")
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        await accept(mesh, held)
        await link(agent, "active", 13)
        before = mesh.documents("us-east", "standing")
        assert len(before) == 1
        await accept(mesh, held)
        assert mesh.documents("us-east", "standing") == before
        for region in ("us-east", "eu-west"):
            with pytest.raises(
                RequestError, match="goes on from offset 5 by an accepted truncation of us-east"
            ) as refused:
                await mesh.put(region, "standing", word(mesh, held, region, 3, now_ms()))
            assert refused.value.code is Code.CONFLICT
        await mesh.publish(numbered(1_000, 4))
        await link(agent, "active", 17)
        assert await mesh.arrived() == 22
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    checked(mesh)


async def test_no_later_word_nor_one_of_an_earlier_date_is_another_history(
    mesh: Mesh, tmp_path: Path
) -> None:
    """The two regions accept at once, or one dates its word back: whichever word crossed first holds, in every restart."""
    await source_put_back(mesh, tmp_path / "older")
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        await accept(mesh, held)
        await link(agent, "active", 13)
        # As a bridge brings what the other region signed, before that region heard of the first word.
        for at in (now_ms() - 3_600_000, now_ms()):
            for region in ("us-east", "eu-west"):
                bridge = SpiffeId("us-east", "acme", "bridge", BRIDGE)
                document = word(mesh, held, "eu-west", 2, at).encode_file()
                await mesh.nodes[region].services.governance.put(bridge, "standing", document)
        await mesh.publish(numbered(1_000, 4))
        await link(agent, "active", 17)
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
        await mesh.start(region)
    await mesh.publish(numbered(2_000, 3))
    async with mesh.agent() as agent:
        await link(agent, "active", 20)
        assert await mesh.arrived() == 25
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    checked(mesh)


async def test_of_two_words_that_came_before_anything_crossed_the_first_signed_holds(
    mesh: Mesh, tmp_path: Path
) -> None:
    await source_put_back(mesh, tmp_path / "older")
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
    now = now_ms()
    for region, offset, at in (("us-east", 5, now + 1), ("eu-west", 4, now)):
        # Each broker hears its own operator first.
        await mesh.put(region, "standing", word(mesh, held, region, offset, at))
    async with mesh.agent() as agent:
        await link(agent, "active", 13)
        assert await mesh.arrived() == 19, "from offset 4 on"
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    checked(mesh)


async def test_a_bridge_that_knows_of_none_goes_on_by_the_word_that_another_carried_under(
    mesh: Mesh, tmp_path: Path
) -> None:
    """Records crossed under the word that was signed later; then the bridge is replaced, and the new one's log knows of neither."""
    await source_put_back(mesh, tmp_path / "older")
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        await accept(mesh, held)
        await link(agent, "active", 13)
        bridge = SpiffeId("us-east", "acme", "bridge", BRIDGE)
        # Each broker has another one besides, as after a restored store.
        for region, ago_ms in (("us-east", 600_000), ("eu-west", 500_000)):
            document = word(mesh, held, "eu-west", 5, now_ms() - ago_ms).encode_file()
            await mesh.nodes[region].services.governance.put(bridge, "standing", document)
        await mesh.publish(numbered(1_000, 2))
        await link(agent, "active", 15)
    for region in ("us-east", "eu-west"):
        await mesh.stand(region, held.grant, StandingAction.REVOKE, 9)
    other = f"spiffe://us-east.acme/bridge/{OTHER}"
    async with mesh.operator("us-east") as client:
        await client.put_rights(other, [f"bridge-read {STREAM}"])
    await mesh.grant(bridge=other)
    await mesh.publish(numbered(2_000, 2))
    async with mesh.agent(name=OTHER) as agent:
        await link(agent, "active", 17)
        assert await mesh.arrived() == 22
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert mesh.verify_ingress().ok
