"""F5: who counts as a witness, and who may name a log.

(a) A log cosigned by its own region counts as cosigned by nobody. (b) A region counts once, however many keys it has.
(c) A bundle that names another region's log or witness is none, and an update that changes who may speak is refused.
(d) So no witness ever learns another key for a log, whichever bundle it reads first.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from attacks.conftest import Tally
from audit_log import (
    EGRESS_ORIGIN,
    INGRESS_ORIGIN,
    POLICY_SEEDS,
    REGION_ORIGIN,
    Link,
    key,
    log_signer,
    region_bundle,
    trust,
    witness_signer,
)
from bridge_mesh import Mesh, two_regions, until

from audit.note import Algorithm, NoteSigner
from audit.proof import check_proof, prove
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.trust import RegionTrust, Trust
from audit.verify import verify_log
from audit.witness import MemoryWitnessStore, Witness
from bridge.agent import Agent
from felix.errors import Code, FelixError, RequestError, TamperError
from felix.messages import PutDocument
from felix.runtime.real import now_ms
from keys.bundle import AuditKey, RegionBundle, check_update, decode_bundle, sign_bundle
from keys.hybrid import HybridKeyPair
from keys.key_file import load_signing_key
from region.bootstrap import trust_region
from region.folder import RegionFolder

OWN_WITNESS = witness_signer("us-east.acme/witness")
SECOND = NoteSigner.from_key("us-east.acme/second-witness", key(30), Algorithm.COSIGNATURE)
EU_SECOND = NoteSigner.from_key("eu-west.acme/second-witness", key(31), Algorithm.COSIGNATURE)
AP = NoteSigner.from_key("ap-south.acme/witness", key(32), Algorithm.COSIGNATURE)
OUTSIDE = NoteSigner.from_key("witness.example/w1", key(33), Algorithm.COSIGNATURE)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as found:
        yield found


def write(path: Path, *cosigners: NoteSigner) -> Folder:
    """An egress log of us-east that these cosigned."""
    trail = Trail.open(
        path,
        log_signer(EGRESS_ORIGIN),
        witnesses=[signer.key for signer in cosigners],
        settings=TrailSettings(checkpoint_interval_ms=3_600_000),
    )
    link = Link()
    for each in (link.agreement(), intents := link.intent(), [link.ack(intents)]):
        ended = threading.Event()
        trail.append_nowait(each, lambda first, error, ended=ended: ended.set())  # type: ignore[misc]
        assert ended.wait(30)
    note = trail.publish()
    for signer in cosigners:
        trail.add_cosigned(Witness(signer, [trail.key], MemoryWitnessStore(), lambda: 1).cosign(note, []))
    trail.close()
    return Folder(path)


def with_witnesses(region: str, *signers: NoteSigner) -> RegionBundle:
    bundle = region_bundle(region)
    more = tuple(AuditKey(signer.key.name, "cosigner", signer.key.public) for signer in signers)
    return msgspec.structs.replace(bundle, audit_keys=(*bundle.audit_keys, *more))


def test_only_other_regions_and_outside_witnesses_count_and_each_once(tmp_path: Path, tally: Tally) -> None:
    """(a) and (b): every set of cosigners out of six keys of four parties, one of which is the log's own region."""
    trusted = Trust.of(
        [
            with_witnesses("us-east", SECOND),
            with_witnesses("eu-west", EU_SECOND),
            with_witnesses("ap-south", AP),
        ],
        [OUTSIDE.key],
    )
    parties = {
        OWN_WITNESS: "", SECOND: "", witness_signer(): "eu-west", EU_SECOND: "eu-west", AP: "ap-south",
        OUTSIDE: OUTSIDE.key.name,
    }  # fmt: skip
    tried = 0
    for count in range(len(parties) + 1):
        for chosen in itertools.combinations(parties, count):
            tried += 1
            folder = write(tmp_path / str(tried), *chosen)
            expected = sorted({parties[signer] for signer in chosen} - {""})
            report = verify_log(folder, trusted, cosignatures_min=len(expected))
            assert report.ok and sorted(report.cosigners) == expected
            assert not verify_log(folder, trusted, cosignatures_min=len(expected) + 1).ok
            proof = prove(folder, trusted, Link().key.stream, 0, 1)
            assert [
                who for who, _ in check_proof(proof, trusted, cosignatures_min=len(expected)).cosigned
            ] == expected
            with pytest.raises(TamperError, match="are required"):
                check_proof(proof, trusted, cosignatures_min=len(expected) + 1)
    tally("sets of cosigners", tried)


def test_one_cosignature_is_asked_for_unless_one_says_otherwise(tmp_path: Path) -> None:
    alone, own = write(tmp_path / "alone"), write(tmp_path / "own", OWN_WITNESS)
    for folder in (alone, own):
        assert 1 in {finding.step for finding in verify_log(folder, trust()).findings}
        assert verify_log(folder, trust(), cosignatures_min=0).ok
        with pytest.raises(TamperError):
            check_proof(prove(folder, trust(), Link().key.stream, 0, 1), trust())
    if pytest.importorskip("pyspark"):
        from audit.spark.verification import open_log

        with pytest.raises(TamperError, match="other than us-east cosigned"):
            open_log(str(own.path), trust())


def test_one_key_under_two_names_is_nobodys(tmp_path: Path) -> None:
    """A witness key of eu-west, or of the log's own region, in ap-south's bundle: the text signed is the same. And an own key of
    another kind, which ap-south calls its witness's, counts for nobody here."""
    regions = [region_bundle("us-east"), region_bundle("eu-west")]
    for borrowed, owner in ((witness_signer(), "eu-west"), (OWN_WITNESS, "us-east")):
        ap = region_bundle(
            "ap-south", audit_keys=(AuditKey("ap-south.acme/w", "cosigner", borrowed.key.public),)
        )
        with pytest.raises(RequestError, match=f"for the region {owner} and for the region ap-south"):
            Trust.of([*regions, ap])
    own = NoteSigner.from_key("ap-south.acme/w", key(1), Algorithm.COSIGNATURE)
    ap = region_bundle("ap-south", audit_keys=(AuditKey(own.key.name, "cosigner", own.key.public),))
    only_own = write(tmp_path / "own", own)
    assert verify_log(only_own, Trust.of([*regions, ap]), cosignatures_min=0).cosigners == {}


FOREIGN = (
    REGION_ORIGIN,
    EGRESS_ORIGIN,
    INGRESS_ORIGIN,
    "eu-west.acme/witness",
    "ap-south.other/audit",
    "ap-south.acme",
)


@pytest.mark.parametrize("role", ["log", "cosigner"])
def test_a_bundle_that_names_anothers_things_is_refused_wherever_it_is_read(role: str, tally: Tally) -> None:
    """(c): ap-south's successor bundle names us-east's log and eu-west's witness with its own keys."""
    policy = key(POLICY_SEEDS["ap-south"])
    for name in FOREIGN:
        entry = AuditKey(name, role, key(40).verify_key.public)  # type: ignore[arg-type]
        bundle = region_bundle("ap-south", audit_keys=(entry,), issued_ms=2_000_000_000_000)
        with pytest.raises(RequestError, match="speaks for itself alone") as caught:
            sign_bundle(bundle, policy)
        assert caught.value.code is Code.WRONG_REGION
        # A signer of their own lets it pass; the reader does not.
        signed = msgspec.json.encode(
            {
                "bundle": msgspec.to_builtins(bundle),
                "signature": policy.sign("region-bundle", bundle.signed_bytes()),
            }
        )
        with pytest.raises(RequestError, match="speaks for itself alone"):
            decode_bundle(signed)
        with pytest.raises(AssertionError):
            RegionTrust(bundle)
    tally("foreign names in a bundle", 3 * len(FOREIGN))


def test_a_log_verifies_under_its_own_region_whatever_else_is_trusted(tmp_path: Path) -> None:
    folder = write(tmp_path, witness_signer())
    for regions in itertools.permutations(("us-east", "eu-west", "ap-south")):
        assert verify_log(folder, trust(*regions)).ok
    assert {finding.step for finding in verify_log(folder, trust("eu-west", "ap-south")).findings} == {1}


def test_a_successor_signed_by_a_stolen_policy_key_changes_nothing_that_speaks(tally: Tally) -> None:
    held, policy = region_bundle("ap-south"), key(POLICY_SEEDS["ap-south"])
    other = key(50).verify_key.public
    successors: list[dict[str, object]] = [
        {"policy_keys": (other, *held.policy_keys)},
        {"receipt_keys": (*held.receipt_keys, other)},
        {"audit_keys": (AuditKey("ap-south.acme/witness", "cosigner", other),)},
        {"import_key": HybridKeyPair.generate().public.encoded},
        {"country": "US"},
    ]
    for changes in successors:
        update = sign_bundle(region_bundle("ap-south", issued_ms=held.issued_ms + 1, **changes), policy)
        with pytest.raises(TamperError):
            check_update(held, update)
    new_log = (*held.audit_keys, AuditKey("ap-south.acme/bridge/new", "log", other))
    check_update(
        held, sign_bundle(region_bundle("ap-south", issued_ms=held.issued_ms + 1, audit_keys=new_log), policy)
    )
    tally("successors of a stolen policy key", len(successors))


def test_neither_broker_nor_agent_counts_its_own_regions_witness(tmp_path: Path) -> None:
    """(a), where logs are kept: a cosignature of the own region is not even taken in."""
    mesh = Mesh.make(tmp_path)
    for region in ("us-east", "eu-west"):
        counted = mesh.trust.witnesses_for(region)
        assert counted and all(key.name.startswith(("us-east", "eu-west")) for key in counted)
        assert not [key for key in counted if key.name.startswith(f"{region}.")]


async def test_a_running_mesh_cosigns_across_and_keeps_to_it(mesh: Mesh) -> None:
    """The three logs of a mesh are each cosigned by the other region and by nobody else; own cosignatures are refused."""
    await mesh.create()
    await mesh.grant()
    await mesh.publish([b'{"flight": 1, "tailnum": "N1"}'])
    async with mesh.agent() as agent:
        await mesh.crossed(1)
        assert isinstance(agent, Agent) and agent.context.trail is not None
        own = RegionTrust(mesh.bundle("us-east")).witnesses
        assert not set(own) & set(agent.context.trail.checkpoints.witnesses)
        await until(
            lambda: mesh.verify_egress().cosigners and mesh.verify_ingress().cosigners,
            "cosignatures both ways",
        )
    for region in ("us-east", "eu-west"):
        trail = mesh.nodes[region].services.governance.trail
        assert not [each for each in trail.checkpoints.witnesses if each.name.startswith(f"{region}.")]
    assert mesh.verify_egress(cosignatures_min=1).cosigners.keys() == {"eu-west"}
    assert mesh.verify_ingress(cosignatures_min=1).cosigners.keys() == {"us-east"}


async def test_no_witness_learns_another_key_for_a_log_and_pins_hold(mesh: Mesh, tally: Tally) -> None:
    """(d) and the fingerprint: bundles are put as an operator puts them, and as the store's administrator does."""
    node = mesh.nodes["eu-west"]
    held = mesh.bundle("us-east")
    us: RegionFolder = mesh.us
    policy = load_signing_key(us.policy_key)
    other = key(51).verify_key.public
    changed = msgspec.structs.replace(held, issued_ms=held.issued_ms + 10_000, receipt_keys=(other,))
    update = sign_bundle(changed, policy)
    async with mesh.operator("eu-west") as client:
        with pytest.raises(FelixError, match="other receipt keys"):
            await client.request(PutDocument("bundle", update.encode()))
        # Once an operator compared the fingerprint and pinned it, the same bundle is taken.
        pin = trust_region(mesh.eu, update, now_ms())
        assert pin is not None
        await client.request(PutDocument("pin", pin.encode()))
    await until(lambda: node.services.governance.bundles["us-east"] == changed, "the pinned bundle")
    own = msgspec.structs.replace(
        mesh.bundle("eu-west"), receipt_keys=(other,), issued_ms=held.issued_ms + 10_000
    )
    forged = sign_bundle(own, load_signing_key(mesh.eu.policy_key)).encode()
    revision = await node.services.governance._intake._catalog.put_trusted("eu-west", forged)
    await node.services.governance._intake._mirror.wait_for(revision)
    assert node.services.governance.bundles["eu-west"] == mesh.bundle("eu-west")
    tally("bundles put", 3)
