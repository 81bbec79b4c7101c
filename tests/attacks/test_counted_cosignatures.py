"""Whose cosignatures are counted, and on what.

(a) So many as are required must stand on one checkpoint: who cosigned a smaller one has not seen what is behind it. (b) A cosignature does
not cover its signer's name, so one key that two parties name would count for both: no verifier takes that, and no region. (c) No key
of the log's own region counts, whatever it is for, and under whatever name. (d) What is behind the cosigned checkpoint is told.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from attacks.conftest import Tally
from attacks.test_f05_witnesses_and_names import AP, OUTSIDE
from audit_log import (
    EGRESS_ORIGIN,
    POLICY_SEEDS,
    STREAM,
    Link,
    key,
    log_signer,
    region_bundle,
    witness_signer,
)
from bridge_mesh import Mesh, two_regions

from audit.allowance import crosses
from audit.checkpoint import Checkpoint, note_size, open_checkpoint
from audit.merkle import EMPTY_ROOT
from audit.note import Algorithm, Note, NoteSigner, Signature, VerifierKey, encode_note, parse_note
from audit.proof import check_proof, prove
from audit.spark.verification import open_log
from audit.tile import KEPT_PATH
from audit.tile_disk import Folder
from audit.tlog_proof import check_leaf, prove_leaves
from audit.trail import Trail, TrailSettings
from audit.trust import RegionTrust, Trust
from audit.verify import UNCOSIGNED, Report, verify_log
from audit.witness_policy import WitnessPolicy
from bridge.agent_files import load_quorum
from bridge.config import BridgeConfig
from felix.errors import Code, FelixError, RequestError, TamperError
from felix.messages import PutDocument
from felix.runtime.real import now_ms
from keys.bundle import AuditKey, RegionBundle, decode_bundle, sign_bundle
from region.bootstrap import trust_region

EU = witness_signer()
BATCHES = 3
DOCUMENTS, ALL = 0, 2 * BATCHES
"""Appends after which is cosigned: the grant's documents, and everything."""


def write(path: Path, cosigned_at: Mapping[NoteSigner, Iterable[int]]) -> Folder:
    """An egress log of us-east, and `checkpoint.kept` as its owner may serve it: with every note that somebody cosigned after these
    appends."""
    cosigners, notes = list(cosigned_at), list[bytes]()
    trail = Trail.open(
        path,
        log_signer(EGRESS_ORIGIN),
        witnesses=[signer.key for signer in cosigners],
        settings=TrailSettings(checkpoint_interval_ms=3_600_000),
    )
    link = Link()
    appends = [link.agreement()]
    for _ in range(BATCHES):
        appends += [intents := link.intent(), [link.ack(intents)]]
    for at, leaves in enumerate(appends):
        ended = threading.Event()
        trail.append_nowait(leaves, lambda first, error, ended=ended: ended.set())  # type: ignore[misc]
        assert ended.wait(30)
        by = [signer for signer in cosigners if at in cosigned_at[signer]]
        if by:
            note = parse_note(trail.publish())
            cosigned = note.with_signatures([signer.cosign(note.text, 2_000_000_000) for signer in by])
            notes.append(encode_note(cosigned))
            trail.add_cosigned(notes[-1])
    trail.publish()
    trail.close()
    (path / KEPT_PATH).write_bytes(b"\n".join(notes))
    return Folder(path)


def behind(size: int) -> tuple[int, int, int]:
    """Of the log that `write` makes: leaves in all, crossings behind this size, and their records."""
    link = Link()
    leaves = link.agreement()
    for _ in range(BATCHES):
        leaves = [*leaves, *(intents := link.intent()), link.ack(intents)]
    crossed = [leaf.header for leaf in leaves[size:] if crosses(leaf.header)]
    return len(leaves), len(crossed), sum(header.records for header in crossed)


def with_ap(*outside: VerifierKey) -> Trust:
    ap = region_bundle("ap-south", audit_keys=(AuditKey(AP.key.name, "cosigner", AP.key.public),))
    return Trust.of([region_bundle("us-east"), region_bundle("eu-west"), ap], outside)


def judge(log: Folder, trusted: Trust, cosignatures_min: int) -> Report:
    """Both kinds of proof of a record, and the report's driver, say of the log what its verification says."""
    report = verify_log(log, trusted, cosignatures_min=cosignatures_min)
    assert {finding.step for finding in report.findings} <= {1}
    answers = list[bool]()
    for ask in (
        lambda: open_log(str(log.path), trusted, cosignatures_min),
        lambda: check_proof(prove(log, trusted, STREAM, 0, 1), trusted, cosignatures_min=cosignatures_min),
        lambda: check_leaf(
            prove_leaves(log, trusted, STREAM, 0, 1)[0], trusted, cosignatures_min=cosignatures_min
        ),
    ):
        try:
            ask()
        except TamperError:
            answers.append(False)
        else:
            answers.append(True)
    assert answers[0] == report.ok
    # It crossed behind the documents: where only these are cosigned, its proof is refused.
    is_whole = report.ok and report.cosigned_size == report.size
    assert answers[1:] == [is_whole] * 2
    return report


def told(report: Report) -> list[tuple[int, int]]:
    """The notice of what is not cosigned: its first leaf, and the records that crossed from there on."""
    return [(notice.leaf, notice.records) for notice in report.notices if notice.name == UNCOSIGNED]


def test_two_cosigners_of_two_checkpoints_are_not_two_of_one(tmp_path: Path) -> None:
    """(a): ap-south saw the documents alone, before anything crossed; the log's owner serves its note beside eu-west's."""
    log = write(tmp_path, {EU: [ALL], AP: [DOCUMENTS]})
    report = judge(log, with_ap(), 2)
    assert not report.ok and report.cosigned_size == 0 and not told(report)
    assert report.cosigners == {"eu-west": report.size, "ap-south": 5}
    assert (
        "1 trusted regions or witnesses other than us-east cosigned it, 2 are required"
        in report.findings[0].sentence
    )
    assert judge(log, with_ap(), 1).ok


def test_the_largest_checkpoint_that_all_of_them_cosigned_is_how_far_the_log_is_cosigned(
    tmp_path: Path,
) -> None:
    log = write(tmp_path, {EU: [DOCUMENTS, ALL], AP: [DOCUMENTS]})
    size, crossings, records = behind(5)
    report = judge(log, with_ap(), 2)
    assert report.ok and (report.cosigned_size, report.size) == (5, size)
    assert told(report) == [(5, records)] and crossings == BATCHES
    assert told(judge(log, with_ap(), 1)) == []
    whole = write(tmp_path / "whole", {EU: [ALL], AP: [ALL]})
    report = judge(whole, with_ap(), 2)
    assert report.ok and report.cosigned_size == size and not told(report)


def test_leaves_that_nobody_cosigned_are_told(tmp_path: Path) -> None:
    """(d): 5 of 11 leaves are cosigned, and all that crossed stands behind them."""
    log = write(tmp_path, {EU: [DOCUMENTS]})
    size, crossings, records = behind(5)
    report = judge(log, with_ap(), 1)
    assert report.ok and report.cosigned_size == 5 and told(report) == [(5, records)]
    (notice,) = report.notices
    assert f"The last {size - 5} of {size} leaves" in notice.sentence
    assert f"by {crossings} of them {records} records crossed" in notice.sentence
    # Who asks for no cosignature is told of none; who asks by a policy is told as well.
    assert told(verify_log(log, with_ap(), cosignatures_min=0)) == []
    policy = WitnessPolicy.parse(f"witness eu {EU.key}\nquorum eu\n".encode())
    assert told(verify_log(log, with_ap().under(policy))) == [(5, records)]


def thief() -> RegionBundle:
    """ap-south names eu-west's witness key, which is in eu-west's bundle for all to read, as its own."""
    bundle = region_bundle("ap-south", audit_keys=(AuditKey(AP.key.name, "cosigner", EU.key.public),))
    return decode_bundle(sign_bundle(bundle, key(POLICY_SEEDS["ap-south"])).encode()).bundle


def test_a_key_that_two_parties_name_is_taken_for_neither(tmp_path: Path) -> None:
    """(b): eu-west's line, under another name and on a second copy of its note, holds without any private key; so nobody counts by it."""
    log = write(tmp_path, {EU: [ALL]})
    named = VerifierKey(AP.key.name, Algorithm.COSIGNATURE, EU.key.public)
    note = parse_note((tmp_path / KEPT_PATH).read_bytes())
    (line,) = (each for each in note.signatures if each.name == EU.key.name)
    own = [each for each in note.signatures if each.name == EGRESS_ORIGIN]
    relabelled = Signature(named.name, named.key_id, line.data)
    (tmp_path / KEPT_PATH).write_bytes(encode_note(Note(note.text, (*own, relabelled))))
    # The line is good: where ap-south alone is trusted, it is ap-south's.
    alone = Trust.of([region_bundle("us-east"), thief()])
    assert verify_log(log, alone).cosigners == {"ap-south": note_size(encode_note(note))}
    for regions, outside, parties in (
        ((region_bundle("eu-west"), thief()), [], "eu-west and for the region ap-south"),
        ((region_bundle("eu-west"),), [as_outside("w.example/x", 2)], "eu-west and for the outside witness w.example/x"),
        ((), [as_outside("v.example/x", 2), as_outside("w.example/x", 2)], "v.example/x and for the outside witness w"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=parties) as caught:
            Trust.of([region_bundle("us-east"), *regions], outside)
        assert caught.value.code is Code.CONFLICT


async def test_a_region_trusts_no_bundle_with_anothers_witness_key(tmp_path: Path) -> None:
    """(b), where a bundle comes in: nothing that two regions here name stops anybody's verification later."""
    async with two_regions(tmp_path) as mesh:
        witness = RegionTrust(mesh.bundle("us-east")).witnesses[0]
        bundle = region_bundle(
            "ap-south", mesh="acme", audit_keys=(AuditKey(AP.key.name, "cosigner", witness.public),)
        )
        signed = sign_bundle(bundle, key(POLICY_SEEDS["ap-south"]))
        async with mesh.operator("eu-west") as client:
            with pytest.raises(
                FelixError, match="cosigns for the region us-east and for the region ap-south"
            ):
                pin = trust_region(mesh.eu, signed, now_ms())
                assert pin is not None
                await client.request(PutDocument("pin", pin.encode()))
        assert "ap-south" not in mesh.nodes["eu-west"].services.governance.bundles
        assert isinstance(mesh, Mesh) and mesh.trust.regions == ("eu-west", "us-east")


def as_outside(name: str, seed: int) -> VerifierKey:
    return VerifierKey(name, Algorithm.COSIGNATURE, key(seed).verify_key.public)


OWN_KEYS = {"log": 1, "witness": 4, "receipt": 6, "policy": POLICY_SEEDS["us-east"]}
"""Seeds of us-east's keys."""


@pytest.mark.parametrize("role", OWN_KEYS)
def test_no_key_of_the_logs_own_region_counts_under_any_name(role: str, tmp_path: Path) -> None:
    """(c): us-east cosigns its own log as an outside witness that it made up, or as ap-south."""
    seed = OWN_KEYS[role]
    assert key(seed).verify_key.public in RegionTrust(region_bundle("us-east")).public_keys
    signer = NoteSigner.from_key("w.example/x", key(seed), Algorithm.COSIGNATURE)
    log = write(tmp_path / "outside", {signer: [ALL]})
    policy = WitnessPolicy.parse(f"witness x {signer.key}\nquorum x\n".encode())
    regions = (region_bundle("us-east"), region_bundle("eu-west"))
    report = verify_log(log, Trust.of(regions).under(policy))
    assert not report.ok and report.cosigners == {} and report.cosigned_size == 0
    if role != "witness":  # that key cosigns for us-east, so it is no outside witness's at all
        report = verify_log(log, Trust.of(regions, [signer.key]))
        assert not report.ok and report.cosigners == {}
        as_ap = NoteSigner.from_key(AP.key.name, key(seed), Algorithm.COSIGNATURE)
        log = write(tmp_path / "ap", {as_ap: [ALL]})
        ap = region_bundle("ap-south", audit_keys=(AuditKey(AP.key.name, "cosigner", as_ap.key.public),))
        assert verify_log(log, Trust.of([*regions, ap]), cosignatures_min=0).cosigners == {}
    else:
        with pytest.raises(
            RequestError, match=r"cosigns for the region us-east and for the outside witness w\.example/x"
        ):
            Trust.of(regions, [signer.key])


def test_another_regions_key_under_an_outside_name_counts_for_that_region(tmp_path: Path) -> None:
    """eu-west's receipt key is called an outside witness: both cosignatures are eu-west's, so they are one."""
    signer = NoteSigner.from_key("w.example/x", key(3), Algorithm.COSIGNATURE)
    log = write(tmp_path, {EU: [ALL], signer: [ALL], OUTSIDE: [ALL]})
    regions = (region_bundle("us-east"), region_bundle("eu-west"))
    assert not verify_log(log, Trust.of(regions, [signer.key]), cosignatures_min=2).ok
    report = judge(log, Trust.of(regions, [signer.key, OUTSIDE.key]), 2)
    assert report.ok and report.cosigners.keys() == {"eu-west", OUTSIDE.key.name}
    assert not judge(log, Trust.of(regions, [signer.key, OUTSIDE.key]), 3).ok


@pytest.mark.parametrize("role", OWN_KEYS)
def test_an_agent_asks_for_no_quorum_by_its_own_regions_keys(role: str) -> None:
    """(c), at the bridge: whatever the key is called in the policy of `require_quorum`."""

    def load(*witnesses: VerifierKey) -> WitnessPolicy:
        lines = [f"witness w{at} {witness}" for at, witness in enumerate(witnesses)]
        names = " ".join(f"w{at}" for at in range(len(witnesses)))
        policy = WitnessPolicy.parse("\n".join([*lines, f"group g all {names}", "quorum g", ""]).encode())
        wanted = SimpleNamespace(load=lambda base: policy, policy="p", max_lag=1_000)
        config = cast(BridgeConfig, SimpleNamespace(require_quorum=wanted))
        return load_quorum(config, Path(), region_bundle("us-east")).policy

    assert load(EU.key, OUTSIDE.key).is_met([EU.key, OUTSIDE.key])
    for name in ("w.example/x", "us-east.acme/witness"):
        with pytest.raises(RequestError, match="of the region whose log it is") as caught:
            load(EU.key, as_outside(name, OWN_KEYS[role]))
        assert caught.value.code is Code.CONFIG_INVALID


def test_a_region_that_names_an_outside_witnesss_key_as_its_bridges_log_stops_no_verification(
    tmp_path: Path, tally: Tally
) -> None:
    """Such a key comes with a bundle that nobody compared. The witness stays who it is, and the region has cosigned nothing."""
    named = AuditKey("ap-south.acme/bridge/x/egress", "log", OUTSIDE.key.public)
    both = AuditKey(AP.key.name, "cosigner", AP.key.public)
    regions = [region_bundle("us-east"), region_bundle("eu-west")]
    before, after = (region_bundle("ap-south", audit_keys=keys) for keys in ((both,), (both, named)))
    assert before.fingerprint() == after.fingerprint()
    for number, (by, parties) in enumerate(
        (
            ((AP, OUTSIDE), {"ap-south", OUTSIDE.key.name}),
            ((EU, OUTSIDE), {"eu-west", OUTSIDE.key.name}),
        )
    ):
        log = write(tmp_path / str(number), {each: [ALL] for each in by})
        for bundle in (before, after):
            report = verify_log(log, Trust.of([*regions, bundle], [OUTSIDE.key]), cosignatures_min=2)
            assert report.ok and set(report.cosigners) == parties
    tally("outside witnesses whose key a region names as a bridge's log", 2)


def test_who_is_not_trusted_may_cosign_last(tmp_path: Path) -> None:
    """The log keeps whom it knows; who verifies it knows fewer, and counts them as if the others were not there."""
    log = write(tmp_path, {EU: [4], OUTSIDE: [4], AP: [ALL]})
    (tmp_path / KEPT_PATH).unlink()
    without_ap = Trust.of([region_bundle("us-east"), region_bundle("eu-west")])
    report = verify_log(log, without_ap)
    assert report.ok and report.cosigned_size == 9 < report.size and told(report)
    assert [each.name for each in open_log(str(log.path), without_ap, 1).cosigners] == ["eu-west"]


def test_verification_and_report_name_the_furthest_that_somebody_cosigned(tmp_path: Path) -> None:
    log = write(tmp_path, {EU: [DOCUMENTS, 4], AP: [DOCUMENTS]})
    (tmp_path / KEPT_PATH).unlink()
    assert verify_log(log, with_ap()).cosigners == {"eu-west": 9, "ap-south": 5}
    opened = open_log(str(log.path), with_ap(), 1)
    assert {each.name: each.size for each in opened.cosigners} == {"eu-west": 9, "ap-south": 5}


def test_a_cosigned_checkpoint_of_no_leaves_covers_none(tmp_path: Path) -> None:
    trail = Trail.open(
        tmp_path,
        log_signer(EGRESS_ORIGIN),
        witnesses=[EU.key],
        settings=TrailSettings(checkpoint_interval_ms=3_600_000),
    )
    note = parse_note(trail.checkpoint())
    trail.add_cosigned(encode_note(note.with_signatures([EU.cosign(note.text, 1)])))
    assert judge_empty(tmp_path), "nothing is there that anybody could write anew"
    ended = threading.Event()
    trail.append_nowait(Link().agreement(), lambda first, error: ended.set())
    assert ended.wait(30)
    trail.publish()
    trail.close()
    report = verify_log(Folder(tmp_path), with_ap())
    assert not report.ok and "is cosigned as required" in report.findings[0].sentence
    with pytest.raises(TamperError, match="is cosigned as required"):
        open_log(str(tmp_path), with_ap(), 1)


def judge_empty(path: Path) -> bool:
    report = verify_log(Folder(path), with_ap())
    return report.ok and report.size == 0 and report.cosigners == {"eu-west": 0}


def test_a_checkpoint_of_no_leaves_has_one_root() -> None:
    signer = log_signer(EGRESS_ORIGIN)
    honest = Checkpoint(EGRESS_ORIGIN, 0, EMPTY_ROOT).text()
    assert Checkpoint.parse(honest).size == 0
    forged = Checkpoint(EGRESS_ORIGIN, 0, b"x" * 32).text()
    with pytest.raises(TamperError, match="no leaves"):
        open_checkpoint(encode_note(Note(forged, (signer.sign(forged),))), signer.key)
