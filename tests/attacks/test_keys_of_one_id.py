"""What a region's keys do to other people's logs: keys of one name and id, keys of others that it names as its own, keys that anybody signs by.

(a) Whatever a witness changes its keys to, and in whatever order it names them, a log that it cosigned opens, is copied, and verifies by
the cosignatures that hold. (b) A log whose keys have one id verifies under both orders of them. (c) No region takes anybody's
cosignature away, nor takes one for its own, by an update that nobody compared. (d) Such updates are not taken in the first place.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_counted_cosignatures import ALL, AP, EU, OUTSIDE, write
from audit_log import EGRESS_ORIGIN, POLICY_SEEDS, SEEDS, STREAM, colliding, key, log_signer, region_bundle
from region_home import make_region, running
from witness_logs import Log

import felix
from audit.log_copy_disk import copy_log
from audit.note import Algorithm, NoteSigner, VerifierKey
from audit.proof import check_proof, prove
from audit.spark.verification import open_log
from audit.tile import CHECKPOINT_PATH, COSIGNED_PATH
from audit.tile_disk import Folder
from audit.tlog_proof import check_leaf, prove_leaves
from audit.trail import Trail
from audit.trust import RegionTrust, Trust, parties_of, witnesses_of
from audit.verify import verify_log
from audit.witness import MemoryWitnessStore, Witness
from audit.witness_policy import WitnessPolicy, format_policy
from felix.errors import FelixError, RequestError, TamperError
from felix.identity_file import load_identity
from felix.messages import PutDocument
from felix.names import SpiffeId
from felix.profile import Profile
from felix.runtime.real import now_ms
from keys.bundle import (
    AuditKey,
    RegionBundle,
    SignedBundle,
    changes_beyond_fingerprint,
    changes_of,
    check_update,
    decode_bundle,
    sign_bundle,
)
from keys.key_file import load_signing_key
from keys.signing import SigningKey
from region.bootstrap import trust_region
from region.config import load_config

WITNESS = "ap-south.acme/witness"
ONE, TWO = (NoteSigner.from_key(WITNESS, each, Algorithm.COSIGNATURE) for each in colliding(WITNESS))
US, EU_WEST, AP_SOUTH = (region_bundle(name) for name in ("us-east", "eu-west", "ap-south"))


def as_before(bundle: RegionBundle, policy: SigningKey) -> SignedBundle:
    """Signed as bundles were before two keys of one id were refused."""
    return SignedBundle(bundle, policy.sign("region-bundle", bundle.signed_bytes()))


def ap_south(*witnesses: NoteSigner, issued_ms: int = AP_SOUTH.issued_ms) -> RegionBundle:
    keys = tuple(AuditKey(each.key.name, "cosigner", each.key.public) for each in witnesses)
    return region_bundle("ap-south", audit_keys=keys, issued_ms=issued_ms)


def later(bundle: RegionBundle, *more: AuditKey) -> RegionBundle:
    return msgspec.structs.replace(
        bundle, issued_ms=bundle.issued_ms + 1, audit_keys=(*bundle.audit_keys, *more)
    )


def signed(bundle: RegionBundle) -> SignedBundle:
    return sign_bundle(bundle, key(POLICY_SEEDS[bundle.region]))


def is_taken(before: RegionBundle, after: RegionBundle, known: dict[bytes, str]) -> bool:
    try:
        check_update(before, as_before(after, key(POLICY_SEEDS[before.region])), known)
    except FelixError:
        return False
    return True


@pytest.mark.parametrize(
    "named", [(ONE, TWO), (TWO, ONE), (ONE,), (TWO,)], ids=["one,two", "two,one", "one", "two"]
)
def test_no_witness_that_changes_its_keys_closes_a_log_that_it_cosigned(
    named: tuple[NoteSigner, ...], tmp_path: Path
) -> None:
    """(a): ap-south cosigned with one of two keys that have one id. Everybody who opens the log, with whatever ap-south names now."""
    log = write(tmp_path / "log", {EU: [ALL], TWO: [ALL]})
    trusted = Trust.of([US, EU_WEST, ap_south(*named)])
    holds = TWO in named
    for cosignatures_min in (0, 1, 2):
        report = verify_log(log, trusted, cosignatures_min=cosignatures_min)
        assert report.ok is (holds or cosignatures_min < 2)
        assert set(report.cosigners) == ({"eu-west", "ap-south"} if holds else {"eu-west"})
        # It is told, and decides nothing.
        assert (WITNESS in report.steps[0].note) is not holds
    open_log(str(log.path), trusted)
    assert check_proof(prove(log, trusted, STREAM, 0, 1), trusted).cosigned
    assert check_leaf(prove_leaves(log, trusted, STREAM, 0, 1)[0], trusted).cosigned
    copy = Folder(tmp_path / "copy")
    copy_log(log, copy, trusted)
    copy_log(log, copy, trusted)
    assert verify_log(copy, trusted).ok
    # Its own files, as the broker or agent that writes it opens them.
    for path in (log.path, copy.path):
        assert (path / COSIGNED_PATH).exists()
    witnesses = [EU.key, *(each.key for each in named)]
    trail = Trail.open(log.path, log_signer(EGRESS_ORIGIN), witnesses=witnesses)
    held = {by.key for each in trail.checkpoints.cosigned() for by in each.cosigned}
    trail.close()
    assert held == ({EU.key, TWO.key} if holds else {EU.key})


def test_a_cosignature_that_does_not_hold_is_not_taken_in_and_takes_no_good_one_along(tmp_path: Path) -> None:
    """(a), where cosignatures are brought: with none that holds the note is refused, and says by whose line; else the good ones are kept."""
    log = write(tmp_path, {EU: [ALL], TWO: [ALL]})
    cosigned = log.read(COSIGNED_PATH) or b""
    for path in (CHECKPOINT_PATH, COSIGNED_PATH):
        (tmp_path / path).write_bytes(bare(cosigned))
    trail = Trail.open(tmp_path, log_signer(EGRESS_ORIGIN), witnesses=[EU.key, ONE.key])
    try:
        with pytest.raises(TamperError, match=rf"no cosignature of a known witness.*{WITNESS}"):
            trail.add_cosigned(without(cosigned, EU.key.name))
        trail.add_cosigned(cosigned)
        (kept,) = trail.checkpoints.cosigned()
        assert [by.key for by in kept.cosigned] == [EU.key] and not kept.broken
        assert WITNESS.encode() not in trail.checkpoint()
    finally:
        trail.close()


def bare(note: bytes) -> bytes:
    """Without anybody's cosignature."""
    return without(note, EU.key.name, WITNESS)


def without(note: bytes, *names: str) -> bytes:
    lines = note.split(b"\n")
    return b"\n".join(line for line in lines if not any(f"— {name} ".encode() in line for name in names))


LOG_ONE, LOG_TWO = (
    NoteSigner.from_key(EGRESS_ORIGIN, each, Algorithm.ED25519) for each in colliding(EGRESS_ORIGIN)
)


def test_the_order_in_which_a_region_names_a_logs_keys_decides_nothing(tmp_path: Path) -> None:
    """(b): two keys of one id under a new bridge's log, in the other order later. Neither update is taken uncompared any more, and a log, a
    proof and a witness's memory under either hold as before."""
    keys = (
        AuditKey(EGRESS_ORIGIN, "log", LOG_ONE.key.public, to_size=0),
        AuditKey(EGRESS_ORIGIN, "log", LOG_TWO.key.public),
    )
    founding = msgspec.structs.replace(
        US, audit_keys=tuple(each for each in US.audit_keys if each.name != EGRESS_ORIGIN)
    )
    first = later(founding, *keys)
    turned = msgspec.structs.replace(
        first, issued_ms=first.issued_ms + 1, audit_keys=(*founding.audit_keys, *keys[::-1])
    )
    assert first.fingerprint() == turned.fingerprint()
    with pytest.raises(TamperError, match="in another order"):
        check_update(first, as_before(turned, key(POLICY_SEEDS["us-east"])))
    with pytest.raises(RequestError, match=f"two keys of {EGRESS_ORIGIN} with one key id"):
        signed(first)
    log = Log(EGRESS_ORIGIN)
    log.signer = LOG_TWO
    store = MemoryWitnessStore()
    Witness(EU, [LOG_TWO.key], store, lambda: 7).cosign(log.note(9), [])
    note = store.last(EGRESS_ORIGIN) or b""
    for bundle in (first, turned):
        last = Witness(EU, RegionTrust(bundle).logs, store, lambda: 7).last(EGRESS_ORIGIN)
        assert last is not None and last.size == 9
        assert Trust.of([bundle, EU_WEST]).log(EGRESS_ORIGIN).open(note).checkpoint == last


def named_as_logs(bundle: RegionBundle, *keys: bytes) -> RegionBundle:
    domain = f"{bundle.region}.acme"
    return later(bundle, *(AuditKey(f"{domain}/bridge/n{at}", "log", each) for at, each in enumerate(keys)))


def test_who_was_cosigned_takes_no_cosignature_back(tmp_path: Path, tally: Tally) -> None:
    """(c): us-east names the keys of its cosigners as logs of new bridges. Its logs, and proofs that others hold, are as cosigned as before."""
    after = named_as_logs(US, EU.key.public, OUTSIDE.key.public)
    assert after.fingerprint() == US.fingerprint()
    log = write(tmp_path / "log", {EU: [ALL], OUTSIDE: [ALL]})
    policy = WitnessPolicy.parse(f"witness o {OUTSIDE.key}\nquorum o\n".encode())
    proof = prove(log, Trust.of([US, EU_WEST]), STREAM, 0, 1)
    for bundle in (US, after):
        for trusted in (
            Trust.of([bundle, EU_WEST]),
            Trust.of([bundle, EU_WEST], [OUTSIDE.key]),
            Trust.of([bundle, EU_WEST]).under(policy),
        ):
            assert verify_log(log, trusted).ok
            check_proof(proof, trusted)
        assert EU.key in witnesses_of((bundle, EU_WEST), "us-east")
    assert verify_log(log, Trust.of([after, EU_WEST], [OUTSIDE.key]), cosignatures_min=2).ok
    # Nor as further keys of that very log, which an auditor may be given in a newer bundle.
    further = [
        AuditKey(EGRESS_ORIGIN, "log", each, to_size=0) for each in (EU.key.public, OUTSIDE.key.public)
    ]
    for each in further:
        trusted = Trust.of([later(US, each), EU_WEST], [OUTSIDE.key])
        assert verify_log(log, trusted, cosignatures_min=2).ok
    # A key that signed as the log's cosigns nothing under any other name.
    own = NoteSigner.from_key("w.example/own", key(SEEDS[EGRESS_ORIGIN]), Algorithm.COSIGNATURE)
    log = write(tmp_path / "own", {own: [ALL]})
    assert not verify_log(log, Trust.of([US, EU_WEST], [own.key])).ok
    tally("keys of cosigners that a region names as its own logs'", 2)


def test_no_region_takes_an_outside_witnesss_cosignature_for_its_own(tmp_path: Path) -> None:
    """(c): by naming its key as a log that is no bridge's, which changed the fingerprint and was taken without comparing it."""
    before = ap_south(AP)
    other = later(before, AuditKey("ap-south.acme/other", "log", OUTSIDE.key.public))
    assert other.fingerprint() != before.fingerprint()
    with pytest.raises(TamperError, match=r"the new log ap-south\.acme/other, which is no bridge's"):
        check_update(before, signed(other))
    log = write(tmp_path, {OUTSIDE: [ALL]})
    policy = WitnessPolicy.parse(f"witness o {OUTSIDE.key}\nquorum o\n".encode())
    bridge = named_as_logs(before, OUTSIDE.key.public)
    report = verify_log(log, Trust.of([US, EU_WEST, bridge]).under(policy))
    assert report.ok and set(report.cosigners) == {OUTSIDE.key.name}


def test_no_witness_becomes_another_party_by_naming_its_own_key_as_a_bridges_log(tmp_path: Path) -> None:
    """(c): ap-south's witness key, under an outside name in somebody's policy, stays ap-south's."""
    before = ap_south(AP)
    alias = VerifierKey("w.example/x", Algorithm.COSIGNATURE, AP.key.public)
    policy = WitnessPolicy.parse(f"witness x {alias}\nquorum x\n".encode())
    for bundle in (before, named_as_logs(before, AP.key.public)):
        assert Trust.of([US, EU_WEST, bundle]).under(policy).log(EGRESS_ORIGIN).witnesses == {
            alias: "ap-south"
        }


def test_an_update_that_nobody_compares_adds_logs_of_bridges_and_nothing_else(tally: Tally) -> None:
    """(d): each has a key that is nobody's yet, behind what was there. With the whole bundle compared, any of these may be trusted."""
    before = msgspec.structs.replace(
        AP_SOUTH,
        audit_keys=(
            *AP_SOUTH.audit_keys,
            AuditKey("ap-south.acme/witness2", "cosigner", key(60).verify_key.public),
            AuditKey("ap-south.acme/bridge/a", "log", key(61).verify_key.public),
            AuditKey("ap-south.acme/bridge/b", "log", key(62).verify_key.public),
        ),
    )
    fresh = AuditKey("ap-south.acme/bridge/c", "log", key(63).verify_key.public)
    known = parties_of((US, EU_WEST), [OUTSIDE.key])
    assert is_taken(before, later(before, fresh), known) and not changes_of(
        before, later(before, fresh), known
    )
    stolen = {*known, *before.public_keys()}
    for public in stolen:
        after = later(before, AuditKey(fresh.name, "log", public))
        assert after.fingerprint() == before.fingerprint()
        assert not is_taken(before, after, known), known.get(public)
        # The fingerprint says nothing of it: the whole bundle's is compared.
        assert changes_beyond_fingerprint(before, after, known)
        if public in known:
            assert changes_beyond_fingerprint(None, after, known)
    own = before.audit_keys
    orders = [(*own[:-2], own[-1], own[-2]), (own[1], own[0], *own[2:]), (*own[::-1],)]
    for keys in orders:
        after = msgspec.structs.replace(later(before, fresh), audit_keys=(*keys, fresh))
        assert not is_taken(before, after, known)
    for name in ("ap-south.acme/other", "ap-south.acme/bridges/c", "ap-south.acme/audit/c"):
        assert not is_taken(before, later(before, AuditKey(name, "log", fresh.public)), known)
    tally("updates that nobody compares", len(stolen) + len(orders) + 3)


def test_no_regions_uncompared_word_decides_about_anothers_update(tally: Tally) -> None:
    """(d): ap-south names the public key of eu-west's next bridge log first, as its own bridge's. eu-west's update is taken, and its later ones."""
    theirs = key(63).verify_key.public
    named = named_as_logs(AP_SOUTH, theirs)
    assert is_taken(AP_SOUTH, named, parties_of((US, EU_WEST)))
    known = parties_of((US, named), [OUTSIDE.key])
    first = later(EU_WEST, AuditKey("eu-west.acme/bridge/new", "log", theirs))
    second = later(first, AuditKey("eu-west.acme/bridge/other", "log", key(64).verify_key.public))
    for before, after in ((EU_WEST, first), (first, second), (EU_WEST, second)):
        assert is_taken(before, after, known)
        assert not changes_beyond_fingerprint(before, after, known)
    assert not changes_beyond_fingerprint(None, second, known)
    # What people compared of ap-south stays its own, and an outside witness's key that one's.
    taken = {*AP_SOUTH.compared_keys(), OUTSIDE.key.public}
    for public in taken:
        assert not is_taken(EU_WEST, named_as_logs(EU_WEST, public), known)
    tally("updates that nobody compares", 3 + len(taken))


def test_a_log_whose_key_another_region_names_too_verifies_by_the_policy_that_is_printed(
    tmp_path: Path,
) -> None:
    """(c): a policy lists a public key once, and here under the other one's name."""
    (own,) = (each for each in US.audit_keys if each.name == EGRESS_ORIGIN)
    named = named_as_logs(AP_SOUTH, own.public)
    regions = [RegionTrust(each) for each in (named, EU_WEST, US)]
    printed = format_policy(
        (each for region in regions for each in region.logs),
        {region.region: region.witnesses for region in regions},
    )
    assert f"# left out: {EGRESS_ORIGIN} has the public key of ap-south.acme/bridge/n0" in printed
    trusted = Trust(regions).under(WitnessPolicy.parse(printed.encode()))
    assert verify_log(write(tmp_path, {EU: [ALL]}), trusted).ok
    # A key that the policy lists nowhere is not listed.
    other = later(US, AuditKey("us-east.acme/bridge/n", "log", key(63).verify_key.public))
    policy = WitnessPolicy.parse(printed.encode())
    with pytest.raises(TamperError, match="does not list the log"):
        Trust.of([named, EU_WEST, other]).under(policy).log("us-east.acme/bridge/n")


@pytest.mark.parametrize("role", ["cosigner", "log"])
def test_no_bundle_is_trusted_newly_with_keys_that_can_be_taken_for_each_other(role: str) -> None:
    one, two = (ONE, TWO) if role == "cosigner" else (LOG_ONE, LOG_TWO)
    region = one.key.name.partition(".")[0]
    held = msgspec.structs.replace(region_bundle(region), audit_keys=())
    sizes = [{}, {}] if role == "cosigner" else [{"to_size": 5}, {"from_size": 5}]
    first, second = (
        AuditKey(each.key.name, role, each.key.public, **size)
        for each, size in zip((one, two), sizes, strict=True)
    )  # type: ignore[arg-type]
    assert first.key_id == one.key.key_id
    both = later(held, first, second)
    with pytest.raises(RequestError, match="with one key id"):
        signed(both)
    # It is still read: what was trusted before counts, with both keys.
    old = as_before(both, key(POLICY_SEEDS[region]))
    assert decode_bundle(old.encode()) == old
    twice = later(held, first, AuditKey(f"{region}.acme/x", role, first.public))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="names one key as"):
        signed(twice)


@pytest.mark.parametrize("kind", ["policy_keys", "receipt_keys", "log", "cosigner"])
def test_no_bundle_is_trusted_newly_with_a_key_by_which_anybody_signs(kind: str) -> None:
    """One constant signature holds under the neutral point, for every message: the region could deny each receipt, and each cosignature."""
    neutral = b"\1" + bytes(31)
    audit = (AuditKey("eu-west.acme/bridge/n", kind, neutral),) if kind in ("log", "cosigner") else ()  # type: ignore[arg-type]
    changes: dict[str, object] = (
        {"audit_keys": (*EU_WEST.audit_keys, *audit)} if audit else {kind: (*getattr(EU_WEST, kind), neutral)}
    )
    bundle = msgspec.structs.replace(EU_WEST, **changes)
    with pytest.raises(RequestError, match="small order"):
        signed(bundle)
    old = as_before(bundle, key(POLICY_SEEDS["eu-west"])).encode()
    if not audit:
        with pytest.raises(RequestError, match="small order"):
            decode_bundle(old)
        return
    # A log's key comes uncompared: trusted before, it stops nobody, and nothing holds under it.
    trusted = RegionTrust(decode_bundle(old).bundle)
    assert all(each.public != neutral for each in (*trusted.logs, *trusted.witnesses))
    assert trusted.witnesses == RegionTrust(EU_WEST).witnesses


async def test_a_broker_starts_with_such_a_bundle_of_before_and_takes_no_new_one(tmp_path: Path) -> None:
    """ap-south's bundle names two witness keys of one id; it has cosigned with one of them, and then names them in the other order."""
    us, ap = make_region(tmp_path, "us-east"), make_region(tmp_path, "ap-south")
    made, policy = decode_bundle(ap.bundle.read_bytes()).bundle, load_signing_key(ap.policy_key)
    rest = tuple(each for each in made.audit_keys if each.role != "cosigner")
    one, two = (AuditKey(WITNESS, "cosigner", each.key.public) for each in (ONE, TWO))
    # And a key that is none, as the log of a bridge.
    neutral = AuditKey("ap-south.acme/bridge/n", "log", b"\1" + bytes(31))
    before = as_before(msgspec.structs.replace(made, audit_keys=(*rest, one, two, neutral)), policy)
    after = as_before(
        msgspec.structs.replace(made, issued_ms=made.issued_ms + 1, audit_keys=(*rest, two, one, neutral)),
        policy,
    )
    own = decode_bundle(us.bundle.read_bytes()).bundle
    trust_region(us, before, made.issued_ms)
    async with running(us) as node:
        trail = node.services.governance.trail
        witness = Witness(TWO, RegionTrust(own).logs, MemoryWitnessStore(), lambda: 1_790_000_000)
        await node.services.governance.witnessing.put_cosignature(
            SpiffeId("ap-south", "acme", "bridge", "b"), witness.cosign(trail.publish(), [])
        )
        profile = Profile(
            region="us-east", mesh="acme", addresses=(str(node.address),), authority=own.root_pem.encode(),
            identity=load_identity(us.identity("operator")), server_name="us-east.acme",
        )  # fmt: skip
        async with felix.connect(profile=profile) as client:
            for bundle in (
                after,
                as_before(msgspec.structs.replace(before.bundle, issued_ms=made.issued_ms + 2), policy),
            ):
                with pytest.raises(FelixError, match=r"another order|one key id"):
                    await client.request(PutDocument("bundle", bundle.encode()))
    audit = us.root / load_config(us.config).data / "audit"
    for bundle in (before, after):
        # Also where somebody had trusted the other order, before there was this rule.
        trust_region(us, bundle, now_ms())
        async with running(us) as node:
            (cosigned, *_) = node.services.governance.trail.checkpoints.cosigned()
            assert [by.key for by in cosigned.cosigned] == [TWO.key]
        assert verify_log(Folder(audit), Trust.of([own, bundle.bundle])).ok
