"""A region that is dissolved, sold or hostile: from `felix region untrust` on none of its bridges comes in, nothing that it signs allows anything, and no copy of before
brings the trust back. What it signed until then verifies as before."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attacks.test_f13_unpinned_bundles import allowed, governance, keys, write
from bridge_mesh import Mesh, flight, two_regions, until
from typer.testing import CliRunner, Result

from audit.leaf import Kind
from audit.origin import region_origin
from audit.pin_leaf import WITHDRAWN
from audit.verify import verify_log
from cli.main import app
from felix.address import Address
from felix.errors import Code, FelixError, RequestError
from felix.messages import PutDocument
from keys.bundle import decode_bundle
from keys.pin import decode_pin
from region.bootstrap import write_profile
from region.metadata.transaction import Delete, Put
from region.trust.trusted_bundles import former_bundles, pinned_bundles


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    monkeypatch.delenv("FELIX_REGION", raising=False)
    async with two_regions(tmp_path) as mesh:
        for region in ("us-east", "eu-west"):
            write_profile(mesh.folder(region), region, "acme", Address("127.0.0.1", mesh.ports[region]))
        await mesh.create()
        yield mesh


async def felix(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(words))


def is_cosigned(mesh: Mesh) -> bool:
    own = mesh.log_files(mesh.us.root / "data" / "audit")
    found = verify_log(own, mesh.trust, origin=region_origin("us-east", "acme"), cosignatures_min=0)
    return "eu-west" in found.cosigners and "eu-west" in mesh.verify_egress().cosigners


async def untrust(*words: str, other: str = "eu-west", region: str = "us-east") -> Result:
    return await felix("region", "untrust", other, "--region", region, "--yes", *words)


def refusal(result: Result) -> FelixError:
    assert isinstance(result.exception, FelixError), (result.output, result.exception)
    return result.exception


async def test_a_destination_that_is_not_trusted_any_more_gets_nothing_and_what_it_got_verifies(
    mesh: Mesh,
) -> None:
    grant = await mesh.grant()
    async with mesh.agent() as agent:
        await mesh.publish([flight(at) for at in range(100)])
        await mesh.crossed(100)
        # What us-east's logs rest on afterwards is what eu-west cosigned while it was trusted.
        await until(lambda: is_cosigned(mesh), "eu-west's cosignature of each log of us-east")
        error = refusal(await untrust())
        assert error.code is Code.CONFLICT and grant in error.sentence, "while a grant stands"
        assert "eu-west" in governance(mesh).bundles
        said = await untrust("--revoke", "eu-west is dissolved")
        assert said.exit_code == 0, (said.output, said.exception)
        assert "eu-west" not in governance(mesh).bundles
        await mesh.publish([flight(at) for at in range(100, 120)])
        await until(lambda: all(each.state != "active" for each in agent.links()), "the link's stop")

        # The other side hears that the grant is revoked, as of any.
        async def heard() -> bool:
            return any(
                b"eu-west is dissolved" in body for body in mesh.documents("eu-west", "standing").values()
            )

        await until(heard, "the revocation in eu-west")
    assert await mesh.arrived() == 100
    assert allowed(mesh, grant) is not None
    await mesh.stop("us-east")
    await mesh.stop("eu-west")
    leaf = mesh.headers(mesh.us.root / "data" / "audit", Kind.KEY)[-1]
    assert leaf.action == WITHDRAWN and leaf.actor == "spiffe://us-east.acme/operator/operator"
    assert mesh.bundle("eu-west").fingerprint() in leaf.sentence
    assert mesh.reconcile() == 100
    # By the folder alone: the logs of us-east rest on eu-west's receipts and cosignatures.
    assert list(former_bundles(mesh.us)) == ["eu-west"] and not pinned_bundles(mesh.us)
    shutil.rmtree(mesh.eu.root)
    said = await felix("audit", "verify", "--region", "us-east", "--wait", "0s")
    assert said.exit_code == 0, said.output


async def test_a_source_that_is_not_trusted_any_more_brings_nothing_and_its_sessions_end(mesh: Mesh) -> None:
    await mesh.grant()
    async with mesh.agent() as agent:
        await mesh.publish([flight(0)])
        await mesh.crossed(1)
        sessions = mesh.nodes["eu-west"].broker.sessions
        assert any(str(each.identity) == str(mesh.bridge_id) for each in sessions)
        said = await untrust("--revoke", "sold", other="us-east", region="eu-west")
        assert said.exit_code == 0, (said.output, said.exception)
        await until(
            lambda: (
                not any(str(each.identity) == str(mesh.bridge_id) and not each.ended for each in sessions)
            ),
            "the end of the session of us-east's bridge",
        )
        await mesh.publish([flight(1)])
        await until(lambda: not agent._sessions()["eu-west"], "the agent's knowledge that it is refused")
    assert await mesh.arrived() == 1
    with pytest.raises(FelixError):
        await mesh.grant(purpose="another")


@pytest.mark.parametrize("lost", ["pin", "pin and bundle", "all since a backup", "broker's memory"])
async def test_nothing_of_before_brings_the_trust_back(mesh: Mesh, lost: str) -> None:
    catalog = mesh.nodes["us-east"].broker.catalog
    pin, bundle = keys(mesh).pin("eu-west"), keys(mesh).trusted("eu-west")
    backup = {name: entry.value for name in (pin, bundle) if (entry := await catalog.store.get(name))}
    trusted = {path: path.read_bytes() for path in mesh.us.trusted.iterdir()}
    assert (await untrust()).exit_code == 0
    assert await catalog.store.get(bundle) is None, (
        "brokers of before cannot read the pin, and need the bundle"
    )
    if lost == "all since a backup":
        await write(mesh, *(Put(name, value) for name, value in backup.items()))
    elif lost != "broker's memory":
        await write(mesh, Delete(pin), *([Put(bundle, backup[bundle])] if lost == "pin" else []))
    assert "eu-west" not in governance(mesh).bundles
    # The bridge's pin of before, which an agent or a thief of the store brings, and the other region's bundle.
    old = decode_pin(backup[pin], mesh.bundle("us-east"))
    for kind, body in (("pin", backup[pin]), ("bundle", old.pin.bundle.encode())):
        async with mesh.operator("us-east") as client:
            with pytest.raises(RequestError):
                await client.request(PutDocument(kind, body))
    await mesh.stop("us-east")
    if lost == "broker's memory":
        # The folder of another machine, which has the bundle of before, and a store of before: the audit log says it.
        shutil.rmtree(mesh.us.root / "data" / "governance")
        for path, data in trusted.items():
            path.write_bytes(data)
    await mesh.start("us-east")
    assert "eu-west" not in governance(mesh).bundles
    stored = await mesh.nodes["us-east"].broker.catalog.store.get(pin)
    assert stored is not None and decode_pin(stored.value, mesh.bundle("us-east")).is_withdrawn, (
        "it is put back"
    )


async def test_it_is_trusted_again_by_comparing_alone(mesh: Mesh) -> None:
    assert (await untrust()).exit_code == 0
    assert "already" in (await untrust()).output
    path = str(mesh.eu.bundle)
    error = refusal(await felix("region", "trust", path, "--region", "us-east", "--yes"))
    assert "Nobody compared" in error.sentence and "took its trust in eu-west back" in error.sentence
    told = decode_bundle(mesh.eu.bundle.read_bytes()).bundle.fingerprint()
    said = await felix("region", "trust", path, "--region", "us-east", "--fingerprint", told)
    assert said.exit_code == 0, (said.output, said.exception)
    assert governance(mesh).bundles["eu-west"] == mesh.bundle("eu-west")
    await mesh.grant()
    async with mesh.agent():
        await mesh.publish([flight(0)])
        await mesh.crossed(1)
    folder = mesh.us.root / "data" / "audit"
    await mesh.stop("us-east")
    actions = [leaf.action for leaf in mesh.headers(folder, Kind.KEY) if "pin" in leaf.action]
    assert actions == ["pinned", WITHDRAWN, "pinned"]


async def test_it_is_signed_where_the_policy_key_is_and_told_as_soon_as_a_broker_answers(mesh: Mesh) -> None:
    assert refusal(await untrust(other="ap-south")).code is Code.NOT_FOUND
    assert "itself" in refusal(await untrust(other="us-east")).sentence
    elsewhere = mesh.us.policy_key.rename(mesh.home / "policy.pem")
    assert "no policy key" in refusal(await untrust()).sentence
    elsewhere.rename(mesh.us.policy_key)
    await mesh.stop("us-east")
    assert "--offline" in refusal(await untrust()).hint
    assert list(pinned_bundles(mesh.us)) == ["eu-west"], "nothing was changed"
    assert (await untrust("--offline")).exit_code == 0
    await mesh.start("us-east")
    assert "eu-west" not in governance(mesh).bundles
