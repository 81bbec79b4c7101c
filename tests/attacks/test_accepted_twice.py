"""A truncation is accepted twice: of what was shown before the first word, at another offset, with an earlier date. The link goes on from the
word under which records crossed. The destination accepts one, with or without a cut: that begins nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_f08_truncation import accept, checked, link, numbered, source_put_back
from bridge_mesh import BRIDGE, STREAM, Mesh, two_regions
from slow_runs import only_slow

from audit.leaf import Kind
from felix.errors import Code, RequestError
from felix.messages import CutState, LinkState
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
                await mesh.put(region, "standing", word(mesh, held, "us-east", 3, now_ms()))
            assert refused.value.code is Code.CONFLICT
            with pytest.raises(
                RequestError, match="is for us-east to say, its source; this is signed by eu-west"
            ):
                await mesh.put(region, "standing", word(mesh, held, "eu-west", 3, now_ms()))
        await mesh.publish(numbered(1_000, 4))
        await link(agent, "active", 17)
        assert await mesh.arrived() == 22
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    checked(mesh)


@only_slow
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


async def brought(mesh: Mesh, held: LinkState, signer: str, offset: int, at: int) -> None:
    """Both regions have the word, as a bridge brings what stands elsewhere already."""
    bridge = SpiffeId("us-east", "acme", "bridge", BRIDGE)
    for region in ("us-east", "eu-west"):
        document = word(mesh, held, signer, offset, at).encode_file()
        await mesh.nodes[region].services.governance.put(bridge, "standing", document)


@only_slow
async def test_of_two_words_that_came_before_anything_crossed_the_first_signed_holds(
    mesh: Mesh, tmp_path: Path
) -> None:
    await source_put_back(mesh, tmp_path / "older")
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
    now = now_ms()
    for offset, at in ((5, now + 1), (4, now)):
        await brought(mesh, held, "us-east", offset, at)
    async with mesh.agent() as agent:
        await link(agent, "active", 13)
        assert await mesh.arrived() == 19, "from offset 4 on"
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    checked(mesh)


async def test_a_destination_that_accepts_what_nobody_found_has_nothing_cross_again(
    mesh: Mesh, tally: Tally
) -> None:
    """Nor does its word keep a truncation that is found later from being accepted by the source."""
    await mesh.create()
    grant = await mesh.grant()
    await mesh.publish(numbered(0, 10))
    async with mesh.agent() as agent:
        held = await link(agent, "active", 10)
        assert held.grant == grant and held.incarnation
        never = msgspec.structs.replace(held, cut=CutState(held.incarnation, 1, 0))
        for ago_ms in (0, 3_600_000):
            await brought(mesh, never, "eu-west", 0, now_ms() - ago_ms)
            tally("acceptances of truncations that never were", 1)
        await mesh.publish(numbered(100, 2))
        assert (await link(agent, "active", 12)).incarnation == held.incarnation
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
        await mesh.start(region)
    await mesh.publish(numbered(200, 2))
    async with mesh.agent() as agent:
        assert (await link(agent, "active", 14)).incarnation == held.incarnation
    assert await mesh.arrived() == 14
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    checked(mesh)
    assert not mesh.headers(mesh.egress_folder, Kind.GAP)


async def test_the_source_accepts_what_the_destination_accepted_before_it(mesh: Mesh, tmp_path: Path) -> None:
    await source_put_back(mesh, tmp_path / "older")
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        await brought(mesh, held, "eu-west", 0, now_ms() - 3_600_000)
        again = await link(agent, "truncated")
        assert again.cut == held.cut
        await accept(mesh, held)
        await link(agent, "active", 13)
        assert await mesh.arrived() == 18, "from offset 5 on"
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    checked(mesh)


@only_slow
async def test_a_bridge_that_knows_of_none_goes_on_by_the_word_that_another_carried_under(
    mesh: Mesh, tmp_path: Path
) -> None:
    """Records crossed under the word that was signed later; then the bridge is replaced, and the new one's log knows of neither."""
    await source_put_back(mesh, tmp_path / "older")
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        await accept(mesh, held)
        await link(agent, "active", 13)
        # Each broker has others besides, as after a restored store.
        for ago_ms in (600_000, 500_000):
            await brought(mesh, held, "us-east", 5, now_ms() - ago_ms)
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
