"""F13: the metadata store's administrator puts a bundle of his own in place of another region's. No broker believes it, whichever machine it is on."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from bridge_mesh import ACCEPTED_BY, APPROVER, POLICIES, STREAM, Mesh, two_regions, until
from region_home import begin_anew, make_region
from slow_runs import only_slow

from audit.leaf import Kind
from audit.origin import region_origin
from audit.verify import verify_log
from felix.errors import Code, FelixError, RequestError
from felix.identity_file import load_identity
from felix.messages import DescribeRegion, PutDocument
from felix.names import StreamName
from felix.runtime.real import now_ms
from keys.bundle import RegionBundle, SignedBundle, decode_bundle, sign_bundle
from keys.key_file import load_signing_key, save_signing_key
from keys.pin import NUMBER_MAX, UNCOMPARED, Pin, decode_pin, sign_pin
from keys.signing import SigningKey
from policy.approval import sign_approval
from policy.grant import (
    DenyEntry,
    ExportGrant,
    Standing,
    StandingAction,
    open_export,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import parse_policy
from policy.signed import SignedDocument
from region.bootstrap import issue_identity, trust_region
from region.config import load_config
from region.folder import RegionFolder
from region.governance.service import Governance
from region.governance.trusted_regions import TrustedRegions
from region.metadata.transaction import Delete, Put, Write
from region.trust.signing_keys import change_signing_keys
from region.trust.trusted_bundles import pinned_bundles, signed_pins

Tally = Callable[[str, int], None]
NAME = StreamName.parse(STREAM)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        yield mesh


def governance(mesh: Mesh) -> Governance:
    return mesh.nodes["us-east"].services.governance


def problems(mesh: Mesh) -> list[str]:
    """Those about regions: a policy under a key that was given up is one, too, until it is signed again."""
    return [each for each in governance(mesh).problems if "residency policy" not in each]


def allowed(mesh: Mesh, grant: str) -> Code | None:
    """Why us-east's broker hands nothing out; None where it does."""
    try:
        governance(mesh).check_export(mesh.bridge_id, grant, NAME, "read")
    except FelixError as error:
        return error.code
    return None


async def write(mesh: Mesh, *writes: Write) -> None:
    """As whoever administers us-east's metadata store."""
    catalog = mesh.nodes["us-east"].broker.catalog
    for each in writes:
        await catalog.store.transact([], [each])
    revision = (await catalog.store.load(catalog.keys.prefix)).revision
    await mesh.nodes["us-east"].services.requests._mirror.wait_for(revision)


async def on_another_machine(
    mesh: Mesh, *, files: bool = False, copies: bool = False, pin: bool = False
) -> None:
    """us-east's broker starts with the same store, where its folder was copied before `felix region trust`. What is left of the machine
    on which that ran: its pin `files`, the broker's own `copies`, the `pin` in the store. The audit log is on none of them: it has pins, too."""
    if not pin:
        await write(mesh, Delete(keys(mesh).pin("eu-west")))
    await mesh.stop("us-east")
    for name in ("eu-west.json", "eu-west.pin"):
        if not files:
            (mesh.us.trusted / name).unlink()
    if not copies:
        shutil.rmtree(mesh.us.root / "data" / "governance")
    begin_anew(mesh.us, "audit")
    await mesh.start("us-east")


def keys(mesh: Mesh):  # type: ignore[no-untyped-def]
    return mesh.nodes["us-east"].broker.catalog.keys


class Forger:
    """Whoever administers the store, with a region of his own that he calls eu-west."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.folder = make_region(mesh.home / "forged", "eu-west")
        issue_identity(self.folder, load_config(self.folder.config), "approver", APPROVER, now_ms())
        self.bundle = decode_bundle(self.folder.bundle.read_bytes())
        self.key = load_signing_key(self.folder.policy_key)

    def bundle_in_its_place(self) -> Put:
        return Put(keys(self.mesh).trusted("eu-west"), self.bundle.encode())

    def pin(self, number: int, by: str = "us-east") -> Put:
        pin = Pin(by=by, mesh="acme", number=number, bundle=self.bundle)
        return Put(keys(self.mesh).pin("eu-west"), sign_pin(pin, self.key).encode())

    async def grant(self) -> str:
        """us-east's own half and approval, and the forger's for eu-west; each is put where it is taken."""
        mesh = self.mesh
        us, eu = (parse_policy(POLICIES[name], name) for name in ("us-east", "eu-west"))
        export = sign_export(mesh.terms(), us, mesh.key("us-east"), now_ms())
        trusted = {"us-east": mesh.bundle("us-east").policy_keys, "eu-west": self.bundle.bundle.policy_keys}
        body = open_export(export, trusted)
        await mesh.put("us-east", "export", export)
        await mesh.put("us-east", "approval", mesh.sign_approval("us-east", body.terms_hash))
        accepted = sign_import(export, eu, self.key.private_key, trusted, ACCEPTED_BY, now_ms())
        approver = load_identity(self.folder.identity(APPROVER))
        approval = sign_approval(bytes.fromhex(body.terms_hash), approver, now_ms())
        for kind, document in (("import", accepted), ("approval", approval)):
            with pytest.raises(FelixError):
                await mesh.put("us-east", kind, document)
        return body.grant


@pytest.mark.parametrize(
    "pinned_too", [pytest.param(False, marks=only_slow), True], ids=["a bundle", "a bundle and a pin"]
)
@pytest.mark.parametrize("left", ["nothing", "files", "copies", "pin"])
async def test_a_forged_bundle_is_believed_nowhere(
    mesh: Mesh, left: str, pinned_too: bool, tally: Tally
) -> None:
    forger = Forger(mesh)
    await on_another_machine(mesh, **{} if left == "nothing" else {left: True})
    await write(
        mesh, forger.bundle_in_its_place(), *([forger.pin(now_ms() + 3_600_000)] if pinned_too else [])
    )
    for _ in ("running", "restarted"):
        grant = await forger.grant()
        assert allowed(mesh, grant) is not None
        held = governance(mesh).bundles.get("eu-west")
        assert held == (None if left == "nothing" else mesh.bundle("eu-west"))
        await mesh.stop("us-east")
        await mesh.start("us-east")
    tally("forged bundles", 2)


async def test_who_is_not_believed_is_a_problem_until_somebody_trusts_it(mesh: Mesh) -> None:
    await on_another_machine(mesh)
    async with mesh.operator("us-east") as client:
        (problem,) = (await client.request(DescribeRegion())).alarms
        assert (
            "eu-west is not trusted here" in problem and "felix region trust FILE --region us-east" in problem
        )
        with pytest.raises(RequestError, match="Nobody compared") as refused:
            await client.request(PutDocument("bundle", mesh.eu.bundle.read_bytes()))
        assert "felix region trust" in refused.value.hint
        pin = trust_region(mesh.us, decode_bundle(mesh.eu.bundle.read_bytes()), now_ms())
        assert pin is not None
        await client.request(PutDocument("pin", pin.encode()))
        assert not (await client.request(DescribeRegion())).alarms
    assert governance(mesh).bundles["eu-west"] == mesh.bundle("eu-west")


async def test_a_pin_reaches_brokers_that_have_no_file_and_no_copy(mesh: Mesh) -> None:
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("us-east", body, export, accepted)
    await on_another_machine(mesh, pin=True)
    assert governance(mesh).bundles["eu-west"] == mesh.bundle("eu-west")
    await until(lambda: allowed(mesh, body.grant) is None, "the grant")


# -- keys that change ------------------------------------------------------------------------------------


def change_policy_key(mesh: Mesh) -> SignedBundle:
    """eu-west signs with another policy key from now on; its bundle as people compare it again."""
    folder: RegionFolder = mesh.eu
    key, before = SigningKey.generate(), mesh.bundle("eu-west")
    folder.policy_key.unlink()
    save_signing_key(key, folder.policy_key)
    changed = msgspec.structs.replace(
        before, issued_ms=before.issued_ms + 10_000, policy_keys=(key.verify_key.public,)
    )
    signed = sign_bundle(changed, key)
    folder.bundle.write_bytes(signed.encode())
    return signed


async def trust(mesh: Mesh, bundle: SignedBundle, machine: RegionFolder | None = None) -> None:
    """`felix region trust` on a machine, us-east's broker up on another one; None: on the same."""
    pin = trust_region(machine or mesh.us, bundle, now_ms())
    assert pin is not None
    async with mesh.operator("us-east") as client:
        await client.request(PutDocument("pin", pin.encode()))


async def test_a_machine_with_an_older_pin_takes_the_one_compared_later_and_never_goes_back(
    mesh: Mesh,
) -> None:
    catalog = mesh.nodes["us-east"].broker.catalog
    store = {name: await catalog.store.get(name) for name in (keys(mesh).pin("eu-west"), keys(mesh).trusted("eu-west"))}  # fmt: skip
    elsewhere = RegionFolder(mesh.home / "elsewhere")
    shutil.copytree(mesh.us.root, elsewhere.root, ignore=shutil.ignore_patterns("data", "run"))
    new = change_policy_key(mesh)
    await trust(mesh, new, elsewhere)
    assert governance(mesh).bundles["eu-west"] == new.bundle
    old = decode_bundle((mesh.us.trusted / "eu-west.json").read_bytes()).bundle
    assert old != new.bundle, "this machine's file is the older one"
    await mesh.stop("us-east")
    await mesh.start("us-east")
    assert governance(mesh).bundles["eu-west"] == new.bundle
    await write(mesh, *(Put(name, entry.value) for name, entry in store.items() if entry is not None))
    for _ in ("running", "restarted"):
        assert governance(mesh).bundles["eu-west"] == new.bundle
        await mesh.stop("us-east")
        await mesh.start("us-east")
    async with mesh.operator("us-east") as client:
        with pytest.raises(RequestError, match="later than this pin says"):
            await client.request(PutDocument("pin", (mesh.us.trusted / "eu-west.pin").read_bytes()))
    # Nor where the older file is trusted again there, and nobody compares.
    mesh.us.pin("eu-west").unlink()
    held = decode_bundle((mesh.us.trusted / "eu-west.json").read_bytes())
    pin = trust_region(mesh.us, held, now_ms() + 1_000, is_compared=False)
    assert pin is not None and pin.pin.number == UNCOMPARED
    async with mesh.operator("us-east") as client:
        with pytest.raises(RequestError, match="later than this pin says"):
            await client.request(PutDocument("pin", pin.encode()))
    await mesh.stop("us-east")
    await mesh.start("us-east")
    assert governance(mesh).bundles["eu-west"] == new.bundle


async def test_a_successor_by_a_former_key_takes_the_place_of_nothing_that_was_compared_since(
    mesh: Mesh,
) -> None:
    elsewhere = RegionFolder(mesh.home / "elsewhere")
    shutil.copytree(mesh.us.root, elsewhere.root, ignore=shutil.ignore_patterns("data", "run"))
    elsewhere.pin("eu-west").unlink()
    former = load_signing_key(mesh.eu.policy_key)
    held = decode_bundle((elsewhere.trusted / "eu-west.json").read_bytes()).bundle
    new = change_policy_key(mesh)
    await trust(mesh, new)
    forged = sign_bundle(msgspec.structs.replace(held, issued_ms=now_ms() + 3_600_000), former)
    pin = trust_region(elsewhere, forged, now_ms() + 3_600_000, is_compared=False)
    assert pin is not None and pin.pin.number == UNCOMPARED
    async with mesh.operator("us-east") as client:
        with pytest.raises(RequestError, match="later than this pin says"):
            await client.request(PutDocument("pin", pin.encode()))
    assert governance(mesh).bundles["eu-west"] == new.bundle


async def test_a_pin_in_the_brokers_own_folder_counts_against_an_earlier_one_in_the_store(
    mesh: Mesh,
) -> None:
    own, keep = mesh.bundle("us-east"), SimpleNamespace(keep_trusted=lambda kept: None)
    before = decode_pin((mesh.us.trusted / "eu-west.pin").read_bytes(), own)
    new = change_policy_key(mesh)
    after = trust_region(mesh.us, new, now_ms())
    assert after is not None
    store = SimpleNamespace(
        pins=lambda: {"eu-west": before.encode()}, trusted=lambda: {"eu-west": before.pin.bundle.encode()}
    )
    regions = TrustedRegions(
        own, cast(Any, store), lambda: pinned_bundles(mesh.us), lambda logs: None, cast(Any, keep),
        signed=signed_pins(mesh.us, own),
    )  # fmt: skip
    regions.read()
    assert regions.bundles["eu-west"] == new.bundle


THEN = pytest.mark.parametrize(
    "then",
    [
        "runs",
        *(pytest.param(between, marks=only_slow) for between in ("restarts", "lost its copies")),
        "lost copies and snapshot",
    ],
)


@THEN
@pytest.mark.parametrize("what", ["pause", "deny", "revoke"])
async def test_what_a_region_forbade_stays_forbidden_when_its_keys_change(
    mesh: Mesh, what: str, then: str
) -> None:
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("us-east", body, export, accepted)
    await until(lambda: allowed(mesh, body.grant) is None, "the grant")
    if what == "deny":
        entry = DenyEntry(streams="acme/ops/*", peer="*", region="eu-west", sequence=1, at=now_ms(), by="a")
        await mesh.put("us-east", "deny", sign_deny(entry, mesh.key("eu-west")))
    else:
        standing = Standing(
            grant=body.grant, action=StandingAction(what), region="eu-west", sequence=1, at=now_ms(), by="a"
        )
        await mesh.put("us-east", "standing", sign_standing(standing, mesh.key("eu-west")))
    refused = allowed(mesh, body.grant)
    assert refused is not None
    await trust(mesh, change_policy_key(mesh))
    # eu-west accepts the same terms again, under its new key.
    trusted = {name: mesh.bundle(name).policy_keys for name in ("us-east", "eu-west")}
    policy = parse_policy(POLICIES["eu-west"], "eu-west")
    again = sign_import(export, policy, mesh.key("eu-west"), trusted, ACCEPTED_BY, now_ms() + 1)
    await mesh.put("us-east", "import", again)
    if then != "runs":
        await mesh.stop("us-east")
        forgets = {"restarts": "none", "lost its copies": "*.document"}.get(then, "*")
        for path in (mesh.us.root / "data" / "governance").glob(forgets):
            path.unlink()
        await mesh.start("us-east")
    assert allowed(mesh, body.grant) is refused
    if what == "pause":
        await mesh.stand("us-east", body.grant, StandingAction.RESUME, 2)
        assert allowed(mesh, body.grant) is Code.PAUSED, "us-east's own word lifts nothing of eu-west's"
        resume = Standing(
            grant=body.grant, action=StandingAction.RESUME, region="eu-west", sequence=2, at=now_ms(), by="a"
        )
        await mesh.put("us-east", "standing", sign_standing(resume, mesh.key("eu-west")))
        await until(lambda: allowed(mesh, body.grant) is None, "the newer word under the new key")


async def test_a_former_key_says_nothing_new(mesh: Mesh) -> None:
    """Who has the key that eu-west gave up, and writes the store: what eu-west said before stays, and nothing comes to it."""
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("us-east", body, export, accepted)
    await mesh.stand("us-east", body.grant, StandingAction.RESUME, 1)
    former = mesh.key("eu-west")
    standing = Standing(
        grant=body.grant, action=StandingAction.PAUSE, region="eu-west", sequence=1, at=now_ms(), by="a"
    )
    await mesh.put("us-east", "standing", sign_standing(standing, former))
    await trust(mesh, change_policy_key(mesh))
    lifted = msgspec.structs.replace(standing, action=StandingAction.RESUME, sequence=2)
    place = keys(mesh).document("revocations", "state", "lifted")
    await write(mesh, Put(place, sign_standing(lifted, former).encode_file()))
    assert allowed(mesh, body.grant) is not None
    await mesh.stop("us-east")
    await mesh.start("us-east")
    assert allowed(mesh, body.grant) is not None


async def test_a_successor_of_the_far_future_that_a_thief_signed_before_there_were_pins_keeps_nobody_out(
    mesh: Mesh,
) -> None:
    """It lies in us-east's folder as `trust` of before took it, and gets a pin after the upgrade; then eu-west's new key is compared."""
    held = decode_bundle((mesh.us.trusted / "eu-west.json").read_bytes()).bundle
    thiefs = sign_bundle(
        msgspec.structs.replace(held, issued_ms=NUMBER_MAX), load_signing_key(mesh.eu.policy_key)
    )
    await from_before(mesh, files=True)
    (mesh.us.trusted / "eu-west.json").write_bytes(thiefs.encode())
    await mesh.stop("us-east")
    await mesh.start("us-east")
    pin = trust_region(mesh.us, thiefs, now_ms(), is_compared=False)
    assert pin is not None and pin.pin.number == UNCOMPARED
    async with mesh.operator("us-east") as client:
        await client.request(PutDocument("pin", pin.encode()))
    new = change_policy_key(mesh)
    await trust(mesh, new)
    for _ in ("running", "restarted"):
        assert governance(mesh).bundles["eu-west"] == new.bundle
        await mesh.stop("us-east")
        await mesh.start("us-east")


async def test_no_successor_is_taken_that_is_issued_in_the_future(mesh: Mesh) -> None:
    held = mesh.bundle("eu-west")
    ahead = sign_bundle(
        msgspec.structs.replace(held, issued_ms=now_ms() + 3_600_000), load_signing_key(mesh.eu.policy_key)
    )
    async with mesh.operator("us-east") as client:
        with pytest.raises(RequestError, match="minutes ahead of the clock"):
            await client.request(PutDocument("bundle", ahead.encode()))
    await write(mesh, Put(keys(mesh).trusted("eu-west"), ahead.encode()))
    assert governance(mesh).bundles["eu-west"] == held


# -- a store that has an earlier pin ---------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["the pin", "pin and bundle", "all since a backup"])
async def test_a_broker_puts_the_pin_that_it_goes_by_back_and_never_an_earlier_one(
    mesh: Mesh, lost: str
) -> None:
    """It was compared on another machine: what this broker's folder has is the earlier one, under the key that a thief has."""
    catalog = mesh.nodes["us-east"].broker.catalog
    pin, bundle = keys(mesh).pin("eu-west"), keys(mesh).trusted("eu-west")
    backup = {name: entry.value for name in (pin, bundle) if (entry := await catalog.store.get(name))}
    old = mesh.bundle("eu-west")
    elsewhere = RegionFolder(mesh.home / "elsewhere")
    shutil.copytree(mesh.us.root, elsewhere.root, ignore=shutil.ignore_patterns("data", "run"))
    new = change_policy_key(mesh)
    await trust(mesh, new, elsewhere)
    assert not problems(mesh)
    if lost == "all since a backup":
        await write(mesh, *(Put(name, value) for name, value in backup.items()))
    else:
        await write(mesh, Delete(pin), *([Delete(bundle)] if lost == "pin and bundle" else []))
    if lost != "pin and bundle":
        (problem,) = problems(mesh)
        there = "an earlier pin" if lost == "all since a backup" else "no pin"
        assert f"The metadata store has {there} of eu-west" in problem
        assert "felix region trust --region us-east" in problem
    await mesh.stop("us-east")
    await mesh.start("us-east")
    assert governance(mesh).bundles["eu-west"] == new.bundle and not problems(mesh)
    # So one that joins believes the same.
    await mesh.stop("us-east")
    for name in ("governance", "audit"):
        begin_anew(mesh.us, name)
    for name in ("eu-west.json", "eu-west.pin"):
        (mesh.us.trusted / name).unlink()
    await mesh.start("us-east")
    assert governance(mesh).bundles["eu-west"] == new.bundle != old
    assert not problems(mesh)


async def test_the_operator_of_a_pin_puts_it_back_while_brokers_run(mesh: Mesh) -> None:
    pin = (mesh.us.trusted / "eu-west.pin").read_bytes()
    await write(mesh, Delete(keys(mesh).pin("eu-west")))
    assert problems(mesh)
    async with mesh.operator("us-east") as client:
        await client.request(PutDocument("pin", pin))
    assert not problems(mesh)


@pytest.mark.parametrize("snapshot", [True, False], ids=["with the log's snapshot", "without"])
async def test_a_backup_of_before_the_comparison_takes_nothing_back_as_long_as_the_log_goes_on(
    mesh: Mesh, tmp_path: Path, snapshot: bool
) -> None:
    await mesh.stop("us-east")
    shutil.copytree(mesh.us.root, tmp_path / "backup")
    await mesh.start("us-east")
    new = change_policy_key(mesh)
    await trust(mesh, new)
    await mesh.stop("us-east")
    shutil.move(mesh.us.root / "data" / "audit", tmp_path / "audit")
    logged = (mesh.us.root / "data" / "governance" / "logged").read_bytes()
    shutil.rmtree(mesh.us.root)
    shutil.copytree(tmp_path / "backup", mesh.us.root)
    shutil.rmtree(mesh.us.root / "data" / "audit")
    shutil.move(tmp_path / "audit", mesh.us.root / "data" / "audit")
    if snapshot:
        (mesh.us.root / "data" / "governance" / "logged").write_bytes(logged)
    for _ in ("restored", "restarted"):
        await mesh.start("us-east")
        assert governance(mesh).bundles["eu-west"] == new.bundle and not problems(mesh)
        await mesh.stop("us-east")
    await mesh.start("us-east")
    # Each pin has one leaf, which names who put it, and the log verifies.
    folder = mesh.us.root / "data" / "audit"
    leaves = [leaf for leaf in mesh.leaves(folder, Kind.KEY) if leaf.header.action == "pinned"]
    assert len(leaves) == 2
    assert leaves[1].header.actor == "spiffe://us-east.acme/operator/operator"
    assert new.bundle.fingerprint() in leaves[1].header.sentence
    origin = region_origin("us-east", "acme")
    assert not verify_log(mesh.log_files(folder), mesh.trust, origin=origin, cosignatures_min=0).findings


# -- pins under a policy key that the region itself gave up ------------------------------------------------


def change_own_keys(mesh: Mesh) -> None:
    """us-east, which is stopped, has other signing keys from now on, by the command."""
    config = load_config(mesh.us.config)
    change_signing_keys(mesh.us, config, now_ms(), without=["us-east.acme/bridge/us-to-eu"])


@pytest.mark.parametrize("signer", ["kept", "not kept"])
@pytest.mark.parametrize("ahead", [pytest.param("an hour", marks=only_slow), "highest"])
@pytest.mark.parametrize("whose", ["forged", "real"])
async def test_what_a_thief_pinned_under_a_key_given_up_gives_way_to_what_is_compared_now(
    mesh: Mesh, whose: str, ahead: str, signer: str
) -> None:
    """He had us-east's own policy key and wrote the store. `signer`: a release kept the number of a pin without the pin."""
    forger, real = Forger(mesh), decode_bundle(mesh.eu.bundle.read_bytes())
    number = NUMBER_MAX if ahead == "highest" else now_ms() + 3_600_000
    pinned = forger.bundle if whose == "forged" else real
    by_thief = sign_pin(
        Pin(by="us-east", mesh="acme", number=number, bundle=pinned), load_signing_key(mesh.us.policy_key)
    )
    await write(
        mesh, Put(keys(mesh).pin("eu-west"), by_thief.encode()), Put(keys(mesh).trusted("eu-west"), pinned.encode())
    )  # fmt: skip
    await mesh.stop("us-east")
    change_own_keys(mesh)
    if signer == "not kept":
        kept = mesh.us.root / "data" / "governance" / "trusted"
        believed = msgspec.json.decode(kept.read_bytes())
        assert believed["eu-west"].pop("pin")
        kept.write_bytes(msgspec.json.encode(believed))
    await mesh.start("us-east")
    assert governance(mesh).bundles["eu-west"] == pinned.bundle, "until a pin of now comes"
    compared = real if whose == "forged" else change_policy_key(mesh)
    # Nor does one of now take its place that nobody compared.
    key = load_signing_key(mesh.us.policy_key)
    uncompared = sign_pin(Pin(by="us-east", mesh="acme", number=UNCOMPARED, bundle=compared), key)
    async with mesh.operator("us-east") as client:
        with pytest.raises(RequestError, match="later than this pin says"):
            await client.request(PutDocument("pin", uncompared.encode()))
    await trust(mesh, compared)
    # The thief writes his pin again.
    for _ in ("running", "restarted"):
        assert governance(mesh).bundles["eu-west"] == compared.bundle and not problems(mesh)
        await write(mesh, Put(keys(mesh).pin("eu-west"), by_thief.encode()))
        assert governance(mesh).bundles["eu-west"] == compared.bundle and problems(mesh)
        await mesh.stop("us-east")
        await mesh.start("us-east")
    # Among pins under the keys of now the numbers count.
    earlier = sign_pin(Pin(by="us-east", mesh="acme", number=UNCOMPARED + 1, bundle=pinned), key)
    async with mesh.operator("us-east") as client:
        with pytest.raises(RequestError, match="later than this pin says"):
            await client.request(PutDocument("pin", earlier.encode()))
    await write(mesh, Put(keys(mesh).pin("eu-west"), earlier.encode()))
    assert governance(mesh).bundles["eu-west"] == compared.bundle and problems(mesh)


@pytest.mark.parametrize("kept", ["the log", "nothing"])
async def test_of_two_pins_that_nobody_compared_the_log_says_which_holds_and_the_store_does_not(
    mesh: Mesh, kept: str
) -> None:
    """eu-west's key was stolen and changed, then us-east's own was changed: its broker goes by one of these bundles, the folder of another machine by the
    other one, both with a pin that nobody compared under the key of now."""
    elsewhere = RegionFolder(mesh.home / "elsewhere")
    shutil.copytree(mesh.us.root, elsewhere.root, ignore=shutil.ignore_patterns("data", "run"))
    former = decode_bundle((elsewhere.trusted / "eu-west.json").read_bytes())
    new = change_policy_key(mesh)
    await trust(mesh, new)
    await mesh.stop("us-east")
    change_own_keys(mesh)
    await mesh.start("us-east")
    shutil.copy(mesh.us.policy_key, elsewhere.policy_key)
    shutil.copy(mesh.us.bundle, elsewhere.bundle)
    real = trust_region(mesh.us, new, now_ms(), is_compared=False)
    other = trust_region(elsewhere, former, now_ms(), is_compared=False)
    assert real is not None and other is not None
    assert real.pin.number == other.pin.number == UNCOMPARED
    async with mesh.operator("us-east") as client:
        await client.request(PutDocument("pin", real.encode()))
        with pytest.raises(RequestError, match="later than this pin says"):
            await client.request(PutDocument("pin", other.encode()))
    assert governance(mesh).bundles["eu-west"] == new.bundle and not problems(mesh)
    if kept == "nothing":
        # Whoever writes the store has got hold of the other machine's pin: a broker without log and copies goes by its folder.
        shown = "The metadata store"
        pin = Put(keys(mesh).pin("eu-west"), other.encode())
        await write(mesh, pin, Put(keys(mesh).trusted("eu-west"), former.encode()))
        assert governance(mesh).bundles["eu-west"] == new.bundle, "while it runs"
    else:
        # The other machine's folder, by somebody's mistake.
        shown = "This broker's folder"
        for folder_file in ("eu-west.json", "eu-west.pin"):
            shutil.copy(elsewhere.trusted / folder_file, mesh.us.trusted / folder_file)
    await mesh.stop("us-east")
    shutil.rmtree(mesh.us.root / "data" / "governance")
    if kept == "nothing":
        begin_anew(mesh.us, "audit")
    await mesh.start("us-east")
    for _ in ("began anew", "restarted"):
        assert governance(mesh).bundles["eu-west"] == new.bundle
        (problem,) = problems(mesh)
        assert problem.startswith(f"{shown} has a pin of eu-west with another bundle")
        assert "felix region trust FILE --region us-east --fingerprint" in problem
        await mesh.stop("us-east")
        await mesh.start("us-east")
    # What people compare ends it.
    await trust(mesh, new)
    for _ in ("runs", "restarted"):
        assert governance(mesh).bundles["eu-west"] == new.bundle and not problems(mesh)
        await mesh.stop("us-east")
        await mesh.start("us-east")


async def test_a_region_that_changes_its_own_key_goes_on_with_what_it_compared_before(mesh: Mesh) -> None:
    """Not with the older file in this broker's folder; and who pins the same again needs not compare it."""
    elsewhere = RegionFolder(mesh.home / "elsewhere")
    shutil.copytree(mesh.us.root, elsewhere.root, ignore=shutil.ignore_patterns("data", "run"))
    new = change_policy_key(mesh)
    await trust(mesh, new, elsewhere)
    await mesh.stop("us-east")
    change_own_keys(mesh)
    await mesh.start("us-east")
    (problem,) = problems(mesh)
    assert governance(mesh).bundles["eu-west"] == new.bundle and "no pin of eu-west" in problem
    pin = trust_region(mesh.us, new, now_ms(), is_compared=False)
    assert pin is not None and pin.pin.number == UNCOMPARED
    async with mesh.operator("us-east") as client:
        await client.request(PutDocument("pin", pin.encode()))
    for _ in ("running", "restarted"):
        assert governance(mesh).bundles["eu-west"] == new.bundle and not problems(mesh)
        await mesh.stop("us-east")
        await mesh.start("us-east")


# -- from a release that signed no pins ------------------------------------------------------------------


async def from_before(mesh: Mesh, *, files: bool) -> None:
    """The store has bundles and no pins, nor has the audit log; the broker has copies, but none of whom it believed."""
    await write(mesh, Delete(keys(mesh).pin("eu-west")))
    await mesh.stop("us-east")
    (mesh.us.trusted / "eu-west.pin").unlink()
    (mesh.us.root / "data" / "governance" / "trusted").unlink()
    begin_anew(mesh.us, "audit")
    if not files:
        (mesh.us.trusted / "eu-west.json").unlink()
    await mesh.start("us-east")


@pytest.mark.parametrize("files", [True, False], ids=["with a file", "without"])
async def test_a_region_of_before_goes_on_with_what_it_believed_and_takes_nothing_more(
    mesh: Mesh, files: bool
) -> None:
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("us-east", body, export, accepted)
    await from_before(mesh, files=files)
    await until(lambda: allowed(mesh, body.grant) is None, "the grant")
    forger, real = Forger(mesh), mesh.bundle("eu-west")
    third = make_region(mesh.home, "ap-south")
    await write(
        mesh,
        forger.bundle_in_its_place(),
        Put(keys(mesh).trusted("ap-south"), third.bundle.read_bytes()),
    )
    for _ in ("running", "restarted"):
        assert governance(mesh).bundles.get("eu-west") == real
        assert "ap-south" not in governance(mesh).bundles
        await mesh.stop("us-east")
        await mesh.start("us-east")
    # Signed once, as the upgrade asks for, it holds on every machine.
    await trust(mesh, decode_bundle(mesh.eu.bundle.read_bytes()))
    shutil.rmtree(mesh.us.trusted)
    mesh.us.trusted.mkdir()
    await mesh.stop("us-east")
    shutil.rmtree(mesh.us.root / "data" / "governance")
    await mesh.start("us-east")
    assert governance(mesh).bundles.get("eu-west") == real


async def test_a_file_that_was_put_there_by_hand_counts_as_before(mesh: Mesh) -> None:
    """A folder without a policy key, or of a release that signed no pins."""
    await from_before(mesh, files=True)
    new: RegionBundle = change_policy_key(mesh).bundle
    shutil.copy(mesh.eu.bundle, mesh.us.trusted / "eu-west.json")
    async with mesh.operator("us-east") as client:
        await client.request(PutDocument("bundle", mesh.eu.bundle.read_bytes()))
    await until(lambda: governance(mesh).bundles["eu-west"] == new, "the pinned bundle")


# -- what a thief of a policy key said with the highest number --------------------------------------------

HIGHEST = (1 << 53) - 1


class Words:
    """What eu-west says of one grant, by pauses or by deny entries, under one key or another, and us-east keeps."""

    def __init__(self, mesh: Mesh, what: str, body: ExportGrant, export: SignedDocument) -> None:
        self.mesh, self.what, self.body, self.export = mesh, what, body, export

    def sign(self, key: SigningKey, number: int, *, forbids: bool) -> SignedDocument:
        if self.what == "deny":
            entry = DenyEntry(
                streams="acme/ops/*", peer="*", region="eu-west", sequence=number, at=now_ms(), by="a", lifted=not forbids
            )  # fmt: skip
            return sign_deny(entry, key.private_key)
        action = StandingAction.PAUSE if forbids else StandingAction.RESUME
        standing = Standing(
            grant=self.body.grant, action=action, region="eu-west", sequence=number, at=now_ms(), by="a"
        )
        return sign_standing(standing, key.private_key)

    async def say(self, key: SigningKey, number: int, *, forbids: bool) -> None:
        kind = "deny" if self.what == "deny" else "standing"
        await self.mesh.put("us-east", kind, self.sign(key, number, forbids=forbids))

    async def into_store(self, key: SigningKey, number: int, *, forbids: bool) -> None:
        section = ("denies" if self.what == "deny" else "revocations", "state", f"x{number}{forbids}")
        document = self.sign(key, number, forbids=forbids)
        await write(self.mesh, Put(keys(self.mesh).document(*section), document.encode_file()))

    async def change_key(self) -> SigningKey:
        """Another key from now on: us-east compared it, and eu-west accepted the terms again."""
        await trust(self.mesh, change_policy_key(self.mesh))
        await self.accept_again()
        return load_signing_key(self.mesh.eu.policy_key)

    async def accept_again(self) -> None:
        trusted = {name: self.mesh.bundle(name).policy_keys for name in ("us-east", "eu-west")}
        policy = parse_policy(POLICIES["eu-west"], "eu-west")
        again = sign_import(self.export, policy, self.mesh.key("eu-west"), trusted, ACCEPTED_BY, now_ms() + 1)
        await self.mesh.put("us-east", "import", again)

    def refused(self) -> Code | None:
        return allowed(self.mesh, self.body.grant)

    async def again(self, then: str) -> None:
        if then != "runs":
            await self.mesh.stop("us-east")
            forgets = {"restarts": "none", "lost its copies": "*.document"}.get(then, "*")
            for path in (self.mesh.us.root / "data" / "governance").glob(forgets):
                path.unlink()
            await self.mesh.start("us-east")


@pytest.fixture(params=["pause", "deny"])
async def words(mesh: Mesh, request: pytest.FixtureRequest) -> Words:
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("us-east", body, export, accepted)
    await until(lambda: allowed(mesh, body.grant) is None, "the grant")
    return Words(mesh, request.param, body, export)


@THEN
async def test_a_region_lifts_under_its_new_key_what_a_thief_of_the_former_one_forbade(
    words: Words, then: str
) -> None:
    former = load_signing_key(words.mesh.eu.policy_key)
    await words.say(former, HIGHEST, forbids=True)
    refused = words.refused()
    assert refused is not None
    new = await words.change_key()
    await words.again(then)
    assert words.refused() is refused, "until eu-west speaks again"
    await words.into_store(former, HIGHEST, forbids=False)
    assert words.refused() is refused, "who has the former key lifts nothing"
    await words.say(new, 1, forbids=False)
    await until(lambda: words.refused() is None, "the word under the new key")
    await words.again(then)
    await until(lambda: words.refused() is None, "the word under the new key")
    # What is said from now on goes by the numbers of the new key's words.
    await words.say(new, 2, forbids=True)
    assert words.refused() is refused
    await words.into_store(former, HIGHEST, forbids=False)
    await words.again(then)
    assert words.refused() is refused
    await words.say(new, 3, forbids=False)
    await until(lambda: words.refused() is None, "the next word")


@THEN
async def test_what_a_thief_lifted_while_its_key_was_trusted_lifts_nothing_that_comes_under_the_next(
    words: Words, then: str
) -> None:
    former = load_signing_key(words.mesh.eu.policy_key)
    await words.say(former, HIGHEST, forbids=False)
    new = await words.change_key()
    await words.say(new, 1, forbids=True)
    refused = words.refused()
    assert refused is not None
    await words.again(then)
    assert words.refused() is refused
    await words.change_key()
    assert words.refused() is refused, "neither of the two is a key of now"
    await words.again(then)
    assert words.refused() is refused


@THEN
async def test_a_key_that_comes_back_lifts_nothing_by_what_it_said_before(words: Words, then: str) -> None:
    before = words.mesh.eu.bundle.read_bytes()
    former, pem = load_signing_key(words.mesh.eu.policy_key), words.mesh.eu.policy_key.read_bytes()
    await words.say(former, 9, forbids=False)
    new = await words.change_key()
    await words.say(new, 1, forbids=True)
    refused = words.refused()
    assert refused is not None
    await trust(words.mesh, decode_bundle(before))
    words.mesh.eu.bundle.write_bytes(before)
    words.mesh.eu.policy_key.chmod(0o600)
    words.mesh.eu.policy_key.write_bytes(pem)
    await words.accept_again()
    assert words.refused() is refused
    await words.again(then)
    assert words.refused() is refused
    await words.say(former, 10, forbids=False)
    await until(lambda: words.refused() is None, "the later word")


async def test_two_keys_that_a_region_has_at_once_go_by_their_numbers(words: Words) -> None:
    """And whichever is given up, nothing opens by that alone."""
    one, two = load_signing_key(words.mesh.eu.policy_key), SigningKey.generate()
    bundle = words.mesh.bundle("eu-west")
    both = msgspec.structs.replace(
        bundle, issued_ms=bundle.issued_ms + 1, policy_keys=(one.verify_key.public, two.verify_key.public)
    )
    await trust(words.mesh, sign_bundle(both, one))
    await words.say(two, 5, forbids=False)
    await words.say(one, 6, forbids=True)
    refused = words.refused()
    assert refused is not None
    await words.say(two, 4, forbids=False)
    assert words.refused() is refused
    left = msgspec.structs.replace(both, issued_ms=both.issued_ms + 1, policy_keys=both.policy_keys[1:])
    await trust(words.mesh, sign_bundle(left, two))
    assert words.refused() is not None
