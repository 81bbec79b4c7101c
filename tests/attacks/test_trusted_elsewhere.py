"""A region's policy key is on a machine where none of its brokers and agents run, and eu-west's key was stolen and changed: what is compared there
reaches them all, and a command that told nobody says so."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.test_f13_unpinned_bundles import allowed, change_policy_key, governance
from bridge_mesh import ACCEPTED_BY, POLICIES, Mesh, flight, two_regions, until
from slow_runs import only_slow
from typer.testing import CliRunner, Result

import bridge.renewal
from bridge.agent_files import load_files
from bridge.config import paths_of
from bridge.pins import Pins
from cli.exits import EXIT_UNAVAILABLE, exit_code
from cli.form import Form
from cli.grants import known_bundles
from cli.main import app
from cli.trust import _trusted
from felix.address import Address
from felix.errors import Code, FelixError, RequestError
from felix.messages import ListDocuments, PutDocument
from felix.names import SpiffeId
from felix.runtime.real import now_ms
from keys.bundle import FormerKeys, KeyEnd, RegionBundle, SignedBundle, decode_bundle, sign_bundle
from keys.key_file import load_signing_key
from keys.pin import UNCOMPARED, Pin, decode_pin, sign_pin
from keys.signing import SigningKey
from policy.grant import sign_import
from policy.residency import parse_policy, sign_policy
from policy.signed import SignedDocument
from region.bootstrap import trust_region, write_profile
from region.folder import RegionFolder
from region.trust.trusted_bundles import keep_pin, read_pin


class Machines:
    """us-east's broker and agent run in `mesh.us`, without the policy key; `operator` has it, and is where commands are run."""

    def __init__(self, mesh: Mesh, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mesh, self._patch = mesh, monkeypatch
        write_profile(mesh.us, "us-east", "acme", Address("127.0.0.1", mesh.ports["us-east"]))
        self.operator = RegionFolder(path / "operators" / "us-east")
        shutil.copytree(mesh.us.root, self.operator.root, ignore=shutil.ignore_patterns("data", "run"))
        mesh.us.policy_key.unlink()
        monkeypatch.delenv("FELIX_REGION", raising=False)

    async def trust(self, *words: str, on: RegionFolder | None = None, form: Form = "table") -> Result:
        """`felix region trust`, on the operator's machine unless another is named; its output as `-o FORM` has it."""
        self._patch.setenv("FELIX_HOME", str((on or self.operator).root.parent))
        command = ["region", "trust", *words, "--region", "us-east", "-o", form]
        return await asyncio.to_thread(CliRunner().invoke, app, command)

    async def compare(self, bundle: SignedBundle, on: RegionFolder | None = None) -> Result:
        path = self.mesh.home / "compared"
        path.write_bytes(bundle.encode())
        return await self.trust(str(path), "--fingerprint", bundle.bundle.fingerprint(), "--yes", on=on)


@pytest.fixture
async def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        yield Machines(mesh, tmp_path, monkeypatch)


async def test_brokers_elsewhere_learn_of_what_is_compared(machines: Machines) -> None:
    new = change_policy_key(machines.mesh)
    said = await machines.compare(new)
    assert said.exit_code == 0 and "us-east trusts eu-west" in said.output, said.output
    for _ in ("running", "restarted"):
        assert governance(machines.mesh).bundles["eu-west"] == new.bundle
        await machines.mesh.stop("us-east")
        await machines.mesh.start("us-east")


async def test_what_no_broker_was_told_is_handed_over_later(machines: Machines) -> None:
    mesh, new = machines.mesh, change_policy_key(machines.mesh)
    await mesh.stop("us-east")
    said = await machines.compare(new)
    assert isinstance(said.exception, FelixError) and exit_code(said.exception) == EXIT_UNAVAILABLE
    assert "no broker of us-east was told yet" in said.exception.sentence
    await mesh.start("us-east")
    assert governance(mesh).bundles["eu-west"] != new.bundle, "nobody told it"
    said = await machines.trust()
    assert said.exit_code == 0 and new.bundle.fingerprint() in said.output, said.output
    assert governance(mesh).bundles["eu-west"] == new.bundle
    # Or by the same command again, as people do.
    newer = change_policy_key(mesh)
    await mesh.stop("us-east")
    assert (await machines.compare(newer)).exit_code != 0
    await mesh.start("us-east")
    assert (await machines.trust(str(mesh.home / "compared"))).exit_code == 0
    assert governance(mesh).bundles["eu-west"] == newer.bundle


async def test_a_machine_without_the_policy_key_takes_what_was_compared_and_nothing_else(
    machines: Machines,
) -> None:
    mesh, new = machines.mesh, change_policy_key(machines.mesh)
    other = change_policy_key(mesh)
    assert (await machines.compare(new)).exit_code == 0
    refused = await machines.compare(other, on=mesh.us)
    assert isinstance(refused.exception, RequestError) and refused.exception.code is Code.CONFLICT
    assert (await machines.compare(new, on=mesh.us)).exit_code == 0
    own = mesh.bundle("us-east")
    assert decode_bundle((mesh.us.trusted / "eu-west.json").read_bytes()) == new
    assert read_pin(mesh.us, own, "eu-west") == read_pin(machines.operator, own, "eu-west")
    # Without a file, each machine has what was compared last.
    assert (await machines.compare(other)).exit_code == 0
    said = await machines.trust(on=mesh.us)
    assert said.exit_code == 0 and other.bundle.fingerprint() in said.output, said.output
    assert decode_bundle((mesh.us.trusted / "eu-west.json").read_bytes()) == other


async def test_what_a_broker_refuses_leaves_the_folder_as_it_was(machines: Machines) -> None:
    mesh, own = machines.mesh, machines.mesh.bundle("us-east")
    second = RegionFolder(mesh.home / "second" / "us-east")
    shutil.copytree(machines.operator.root, second.root)
    former = decode_bundle((second.trusted / "eu-west.json").read_bytes())
    new = change_policy_key(mesh)
    assert (await machines.compare(new)).exit_code == 0
    before = {path: path.read_bytes() for path in second.trusted.iterdir()}
    # As in a folder of before there were pins.
    for files in (before, {path: data for path, data in before.items() if path.suffix == ".json"}):
        for path in before.keys() - files.keys():
            path.unlink()
        path = mesh.home / "former.json"
        path.write_bytes(former.encode())
        refused = await machines.trust(str(path), "--yes", on=second)
        assert isinstance(refused.exception, RequestError) and refused.exception.code is Code.CONFLICT
        assert files == {path: path.read_bytes() for path in second.trusted.iterdir()}
    taken = await machines.trust(on=second)
    assert taken.exit_code == 0, taken.exception
    assert read_pin(second, own, "eu-west") == read_pin(machines.operator, own, "eu-west")
    assert decode_bundle((second.trusted / "eu-west.json").read_bytes()) == new


async def test_a_pin_that_conflicts_is_neither_taken_nor_given_until_one_is_compared(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, own = machines.mesh, machines.mesh.bundle("us-east")
    new, there = change_policy_key(mesh), governance(mesh).documents(mesh.bridge_id, "pin")
    held = decode_pin(there["eu-west"], own)
    number = held.pin.number
    signed = sign_pin(
        Pin(by="us-east", mesh="acme", number=number, bundle=new),
        load_signing_key(machines.operator.policy_key),
    )
    keep_pin(machines.operator, signed)
    path = machines.operator.trusted / "eu-west.json"
    pins = Pins({"eu-west": path})
    for _ in range(2):
        assert not pins.take(there, own)
    assert sum("neither was compared later" in each.message for each in caplog.records) == 1
    for _ in range(2):
        said = await machines.trust()
        assert isinstance(said.exception, RequestError) and said.exception.code is Code.CONFLICT
        assert "--fingerprint" in said.exception.hint
        assert governance(mesh).bundles["eu-west"] == held.bundle
        assert read_pin(machines.operator, own, "eu-west") == signed
    assert (await machines.compare(new)).exit_code == 0
    assert governance(mesh).bundles["eu-west"] == new.bundle
    assert (await machines.trust()).exit_code == 0
    assert Pins({"eu-west": mesh.us.trusted / "eu-west.json"}).take(
        governance(mesh).documents(mesh.bridge_id, "pin"), own
    )


async def accept_again(mesh: Mesh, export: SignedDocument) -> None:
    """eu-west signs its policy and its half again, under its new key."""
    policy = parse_policy(POLICIES["eu-west"].replace("revision: 1", "revision: 2"), "eu-west")
    await mesh.put("eu-west", "policy", sign_policy(policy, mesh.key("eu-west")))
    trusted = {name: mesh.bundle(name).policy_keys for name in ("us-east", "eu-west")}
    again = sign_import(export, policy, mesh.key("eu-west"), trusted, ACCEPTED_BY, now_ms())
    for region in ("eu-west", "us-east"):
        await mesh.put(region, "import", again)


@pytest.mark.parametrize(
    "when",
    [
        "runs",
        pytest.param("starts", marks=only_slow),
        "with a folder that it cannot write to",
        "hears of it late",
    ],
)
async def test_an_agent_goes_on_after_the_other_region_has_changed_its_policy_key(
    machines: Machines, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = machines.mesh
    monkeypatch.setattr(bridge.renewal, "RENEW_S", 0.2)
    monkeypatch.setattr(bridge.renewal, "PINS_LOOK_S", 0.1)
    policy_key = machines.operator.policy_key
    shutil.copy(policy_key, mesh.us.policy_key)
    body, export, accepted = mesh.sign_grant()
    for region in ("us-east", "eu-west"):
        await mesh.agree(region, body, export, accepted)
    mesh.us.policy_key.unlink()
    await mesh.publish([flight(number) for number in range(5)])
    before = (mesh.us.trusted / "eu-west.json").read_bytes()

    async def change() -> None:
        new = change_policy_key(mesh)
        await mesh.stop("eu-west")
        await mesh.start("eu-west")
        assert (await machines.compare(new)).exit_code == 0
        await accept_again(mesh, export)
        await until(lambda: allowed(mesh, body.grant) is None, "the grant")

    async with mesh.agent():
        await mesh.crossed(5)
        if when == "runs":
            await change()
            await mesh.publish([flight(number) for number in range(5, 10)])
            await mesh.crossed(10)
    if when != "runs":
        if when == "hears of it late":
            # It has judged what both regions list by the bundle of before.
            listed = bridge.renewal.list_pins

            async def late(connection: Any) -> dict[str, bytes]:
                await asyncio.sleep(3)
                return await listed(connection)

            monkeypatch.setattr(bridge.renewal, "list_pins", late)
        elif when != "starts":

            def fail(*_: object) -> None:
                raise OSError("read-only")

            monkeypatch.setattr("bridge.pins._keep", fail)
        await change()
        await mesh.publish([flight(number) for number in range(5, 10)])
        async with mesh.agent():
            await mesh.crossed(10)
    is_kept = (mesh.us.trusted / "eu-west.json").read_bytes() != before
    assert is_kept is (when != "with a folder that it cannot write to")


async def test_an_agent_takes_no_earlier_pin_and_none_that_its_region_did_not_sign(
    machines: Machines,
) -> None:
    mesh, own = machines.mesh, machines.mesh.bundle("us-east")
    path = mesh.us.trusted / "eu-west.json"
    earlier = mesh.us.pin("eu-west").read_bytes()
    new = change_policy_key(mesh)
    later = trust_region(machines.operator, new, now_ms())
    assert later is not None
    pins = Pins({"eu-west": path})
    assert pins.take({"eu-west": later.encode()}, own)
    by_eu = mesh.eu.pin("us-east").read_bytes()
    for found in (earlier, by_eu, b"{}", later.encode()):
        assert not Pins({"eu-west": path}).take({"eu-west": found}, own)
    assert decode_bundle(path.read_bytes()) == new


async def test_a_bundle_that_is_put_back_beside_its_pin_counts_for_no_agent(machines: Machines) -> None:
    """By a backup, or a script that copies the bundle of before at each start. The pin on the disk is no earlier than the brokers', so they give the agent nothing."""
    mesh = machines.mesh
    path, config = mesh.us.trusted / "eu-west.json", mesh.bridge_config()
    former = path.read_bytes()
    files = load_files(config, paths_of(config, mesh.us.root))
    assert files.bundles["eu-west"] == decode_bundle(former).bundle and not files.unpinned
    new = change_policy_key(mesh)
    assert (await machines.compare(new)).exit_code == 0
    assert (await machines.trust(on=mesh.us)).exit_code == 0
    other = change_policy_key(mesh)  # later than what was compared, and compared by nobody
    for put in (former, other.encode()):
        path.write_bytes(put)
        files = load_files(config, paths_of(config, mesh.us.root))
        assert files.bundles["eu-west"] == new.bundle
        (said,) = files.unpinned
        assert str(path) in said and "felix region trust" in said
        # Nor for who verifies on this machine, nor in what `felix region trust` shows.
        assert known_bundles(mesh.us)["eu-west"] == new.bundle
    path.write_bytes(new.encode())
    assert not load_files(config, paths_of(config, mesh.us.root)).unpinned
    # Of what was trusted before there were pins the later bundle counts.
    key = load_signing_key(machines.operator.policy_key)
    uncompared = sign_pin(Pin(by="us-east", mesh="acme", number=UNCOMPARED, bundle=new), key)
    mesh.us.pin("eu-west").write_bytes(uncompared.encode())
    for put, counts in ((former, new), (other.encode(), other)):
        path.write_bytes(put)
        assert load_files(config, paths_of(config, mesh.us.root)).bundles["eu-west"] == counts.bundle


async def test_bundles_of_both_regions_that_are_put_back_count_for_no_agent(machines: Machines) -> None:
    """Both regions have changed their policy keys; a secret of before brings both bundles at each start. By its own region's of before no pin of now holds."""
    mesh, config = machines.mesh, machines.mesh.bridge_config()
    paths = paths_of(config, mesh.us.root)
    own_path, path = mesh.us.bundle, mesh.us.trusted / "eu-west.json"
    secret = {each: each.read_bytes() for each in (own_path, path)}
    new = change_policy_key(mesh)
    assert (await machines.compare(new)).exit_code == 0
    assert (await machines.trust(on=mesh.us)).exit_code == 0
    async with mesh.agent() as agent:
        await agent._renewal.renew()
    # us-east changes its key as well. Until somebody compares again, the pin beside is under the former one.
    own = mesh.bundle("us-east")
    changed = changed_own(own)
    own_path.write_bytes(changed.encode())
    for put, counts in ((secret[path], new), (new.encode(), new)):
        path.write_bytes(put)
        files = load_files(config, paths)
        assert (files.bundles["us-east"], files.bundles["eu-west"]) == (changed.bundle, counts.bundle)
    other = change_policy_key(mesh)
    path.write_bytes(other.encode())
    assert load_files(config, paths).bundles["eu-west"] == other.bundle, "a former key holds up no later one"
    path.write_bytes(new.encode())
    async with mesh.agent() as agent:
        await agent._renewal.renew()
        assert agent._renewal.troubles() == []
        for each, data in secret.items():
            each.write_bytes(data)
        await agent._renewal.renew()
        assert agent._renewal.files.bundles == {"us-east": changed.bundle, "eu-west": new.bundle}
        (said,) = agent._renewal.troubles()
        assert str(own_path) in said and str(path) in said
    files = load_files(config, paths)
    assert files.bundles == {"us-east": changed.bundle, "eu-west": new.bundle}, "also at its next start"
    assert len(files.unpinned) == 2
    # Who means it removes what the agent remembers.
    paths.bundle_held.unlink()
    assert load_files(config, paths).bundles["us-east"] == own
    own_path.write_bytes(changed.encode())
    path.write_bytes(new.encode())
    assert not load_files(config, paths).unpinned


def changed_own(own: RegionBundle) -> SignedBundle:
    """us-east's bundle with another policy key; the one of before ended."""
    key = SigningKey.generate()
    former = FormerKeys(policy_keys=own.policy_keys, ends=(KeyEnd("us-east.acme/audit", 5, b"r" * 32),))
    changed = msgspec.structs.replace(
        own, issued_ms=own.issued_ms + 10_000, policy_keys=(key.verify_key.public,)
    )
    return sign_bundle(changed.with_former((former,)), key)


async def test_pins_are_listed_to_agents_of_the_region_alone(machines: Machines) -> None:
    service = governance(machines.mesh)
    assert service.documents(machines.mesh.bridge_id, "pin").keys() == {"eu-west"}
    foreign = SpiffeId("eu-west", "acme", "bridge", "eu-to-us")
    with pytest.raises(FelixError):
        service.documents(foreign, "pin")
    async with machines.mesh.operator("us-east") as client:
        pin = (machines.operator.trusted / "eu-west.pin").read_bytes()
        await client.request(PutDocument("pin", pin))
        assert (await client.request(ListDocuments("pin"))).documents.keys() == {"eu-west"}


async def test_whom_a_folder_trusts_is_shown_with_the_keys_that_each_region_gave_up(
    machines: Machines,
) -> None:
    mesh = machines.mesh
    before = mesh.bundle("eu-west")
    said = await machines.trust()
    assert "eu-west" in said.output and "none" in said.output, said.output
    new = change_policy_key(mesh)
    ends = (KeyEnd("eu-west.acme/audit", 7, b"r" * 32), KeyEnd("us-east.acme/audit", 5, b"r" * 32))
    former = FormerKeys(policy_keys=before.policy_keys, ends=ends)
    key = load_signing_key(mesh.eu.policy_key)
    new = sign_bundle(new.bundle.with_former((former,)), key)
    compared = await machines.compare(new)
    assert "policy, up to their ends in 2 logs" in compared.output, "before it is trusted"
    said = await machines.trust(form="wide")
    assert "policy, up to their" in said.output, said.output
    (shown,) = json.loads((await machines.trust(form="json")).stdout)["items"]
    assert (shown["kind"], shown["region"]) == ("TrustedRegion", "eu-west")
    assert shown["fingerprint"] == new.bundle.fingerprint() and shown["compared_ms"] <= now_ms()
    assert shown["told"] and not shown["taken"], "it is given again"
    (ended,) = shown["former_keys"]
    assert [each["log"] for each in ended["ends"]] == [end.log for end in ends] and not ended["receipt_keys"]
    # What was trusted before there were pins was compared nobody knows when.
    uncompared = Pin(by="us-east", mesh="acme", number=UNCOMPARED, bundle=new)
    own_key = load_signing_key(machines.operator.policy_key)
    machines.operator.pin("eu-west").write_bytes(sign_pin(uncompared, own_key).encode())
    assert _trusted(machines.operator, mesh.bundle("us-east"))[0].compared_in_words == "at an unknown time"
