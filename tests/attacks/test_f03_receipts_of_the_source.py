"""F3: the source signs the destination's receipts with its own receipt key. Verifier, proof and report refuse them.

Whoever reads a log of us-east that crossed to eu-west needs both regions' bundles, so both regions' receipt keys are
always at hand: what counts is that they are never taken for one another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from attacks.conftest import Tally
from audit_log import (
    EGRESS_ORIGIN,
    RECEIPT_KEY,
    STREAM,
    Link,
    key,
    log_signer,
    region_bundle,
    trust,
    witness_signer,
)

from audit.keys_in_log import KeysInLog
from audit.leaf import Kind, Leaf
from audit.proof import check_proof, prove
from audit.receipt import Receipt, read_unverified, sign_receipt
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.trust import Trust
from audit.verify import verify_log
from audit.witness import MemoryWitnessStore, Witness
from felix.errors import TamperError
from keys.signing import SigningKey

SOURCE_KEYS: dict[str, SigningKey] = {
    "the source's receipt key": key(6),
    "the source's policy key": key(8),
    "the egress log's key": key(1),
    "the source's own log key": key(7),
    "the source's witness key": key(4),
}
"""What the operator of us-east and its agent hold."""


def resigned(leaf: Leaf, signer: SigningKey, **changes: object) -> Leaf:
    """The ACK with a receipt that says the same, signed by another key."""
    receipt = msgspec.structs.replace(read_unverified(leaf.header.receipt), **changes)
    return Leaf(msgspec.structs.replace(leaf.header, receipt=sign_receipt(receipt, signer)), leaf.entries)


def appends(signer: SigningKey, **changes: object) -> Iterator[list[Leaf]]:
    link = Link()
    yield link.agreement()
    for _ in range(3):
        intents = link.intent()
        yield intents
        yield [resigned(link.ack(intents), signer, **changes)]


def write(path: Path, leaves: Iterator[list[Leaf]]) -> Folder:
    trail = Trail.open(
        path, log_signer(EGRESS_ORIGIN), settings=TrailSettings(checkpoint_interval_ms=3_600_000)
    )
    witness = Witness(witness_signer(), [trail.key], MemoryWitnessStore(), lambda: 1_760_000_000)
    trail.checkpoints.trust_witnesses([witness.key])
    for each in leaves:
        ended = threading.Event()
        trail.append_nowait(each, lambda first, error, ended=ended: ended.set())  # type: ignore[misc]
        assert ended.wait(30)
    trail.add_cosigned(witness.cosign(trail.publish(), []))
    trail.close()
    return Folder(path)


def test_the_honest_log_verifies(tmp_path: Path) -> None:
    folder = write(tmp_path, appends(RECEIPT_KEY))
    assert verify_log(folder, trust()).ok
    assert check_proof(prove(folder, trust(), STREAM, 0, 1), trust()).receipt is not None


@pytest.mark.parametrize("signer", SOURCE_KEYS.values(), ids=SOURCE_KEYS)
def test_no_key_of_the_source_signs_a_receipt_of_the_destination(
    tmp_path: Path, signer: SigningKey, tally: Tally
) -> None:
    folder = write(tmp_path, appends(signer))
    orders = (
        trust("us-east", "eu-west"),
        trust("eu-west", "us-east"),
        trust("us-east", "eu-west", "ap-south"),
    )
    for trusted in orders:
        report = verify_log(folder, trusted)
        assert [finding.step for finding in report.findings] == [8, 8, 8], report.findings
        with pytest.raises(TamperError, match="none of eu-west's receipt keys"):
            check_proof(prove(folder, trusted, STREAM, 0, 1), trusted)
    tally("receipts by the source", 3 * len(orders))


@pytest.mark.parametrize(
    "changes", [{"destination_region": "us-east"}, {"ingress_origin": EGRESS_ORIGIN}, {"ingress_origin": "x"}]
)
@pytest.mark.parametrize("signer", [key(6), RECEIPT_KEY], ids=["source", "destination"])
def test_a_receipt_names_its_own_region_and_that_regions_log(
    tmp_path: Path, signer: SigningKey, changes: dict[str, object]
) -> None:
    folder = write(tmp_path, appends(signer, **changes))
    assert {finding.step for finding in verify_log(folder, trust()).findings} == {8}


def test_a_region_that_lists_anothers_receipt_key_gains_nothing(tmp_path: Path) -> None:
    """us-east's bundle names eu-west's receipt key as its own, or hers is in nobody's: each bundle speaks for itself."""
    us, eu = map(region_bundle, ("us-east", "eu-west"))
    copied = msgspec.structs.replace(us, receipt_keys=(*us.receipt_keys, *eu.receipt_keys))
    forged = write(tmp_path / "forged", appends(key(6)))
    assert not verify_log(forged, Trust.of([copied, eu])).ok
    genuine = write(tmp_path / "genuine", appends(RECEIPT_KEY, destination_region="us-east"))
    assert not verify_log(genuine, Trust.of([copied, eu])).ok


def test_the_spark_source_refuses_them_too(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from audit.spark.source import check_bundle

    folder = write(tmp_path, appends(key(6)))
    keys = KeysInLog(Trust.decode(trust().encode()), EGRESS_ORIGIN)
    found = list(check_bundle(folder, 0, 11, keys))
    acks = [each for each in found if each.leaf is not None and each.leaf.header.kind is Kind.ACK]
    assert len(acks) == 3 and all("none of eu-west's receipt keys" in str(each.problem) for each in acks)


def test_receipts_of_all_trusted_regions_at_once_hold_for_their_own_region_alone(tally: Tally) -> None:
    """Every region signs a receipt for every region: only those on the diagonal open."""
    bundles = {
        name: region_bundle(name, receipt_keys=(key(seed).verify_key.public,))
        for name, seed in (("us-east", 20), ("eu-west", 21), ("ap-south", 22))
    }
    keys = KeysInLog(Trust.of(bundles.values()), EGRESS_ORIGIN)
    link = Link()
    base = read_unverified(link.ack(link.intent()).header.receipt)
    tried = 0
    for seed, signer in ((20, "us-east"), (21, "eu-west"), (22, "ap-south")):
        for region in bundles:
            for log in bundles:
                tried += 1
                receipt: Receipt = msgspec.structs.replace(
                    base, destination_region=region, ingress_origin=f"{log}.acme/audit"
                )
                data = sign_receipt(receipt, key(seed))
                if signer == region == log:
                    assert keys.open_receipt(data, 0) == receipt
                else:
                    with pytest.raises(TamperError):
                        keys.open_receipt(data, 0)
    tally("receipts by every region for every region", tried)
