"""A region's log says whom it trusts, in KEY leaves that carry pins. Whoever keeps the log writes any leaf; only what the region's policy key signed, and the
leaf repeats rightly, is no finding, by `verify` and by the report alike."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_former_keys import US_FORMER, US_NOW, log_of, root_of
from audit_log import POLICY_SEEDS, REGION_ORIGIN, TIME_MS, Link, key, region_bundle
from crossing_logs import five_days, trust, write_world
from slow_runs import only_slow

from audit.document_leaf import document_path, stands_beside
from audit.leaf import Leaf
from audit.pin_leaf import pin_leaf
from audit.spark.report import EXIT_DIFFERENCES, run_report
from audit.tile import MemoryFiles
from audit.trust import Trust
from audit.verify import PIN_FAILS, Report, verify_log
from keys.bundle import AuditKey, FormerKeys, KeyEnd, RegionBundle, sign_bundle
from keys.pin import Pin, SignedPin, sign_pin
from keys.signing import SigningKey

OPERATOR = "spiffe://us-east.acme/operator/operator"


def pin(
    of: str = "eu-west",
    by: str = "us-east",
    signer: SigningKey | None = None,
    bundle: RegionBundle | None = None,
) -> SignedPin:
    other = sign_bundle(bundle or region_bundle(of), key(POLICY_SEEDS[of]))
    made = Pin(by=by, mesh="acme", number=TIME_MS, bundle=other)
    return sign_pin(made, signer or key(POLICY_SEEDS[by]))


def leaf(signed: SignedPin | None = None, **said: object) -> Leaf:
    made = pin_leaf(signed or pin(), time_ms=TIME_MS, actor=OPERATOR)
    return Leaf(msgspec.structs.replace(made.header, **said))


def verified(*leaves: Leaf, trusted: Trust | None = None, beside: dict[str, bytes] | None = None) -> Report:
    """us-east's own log with these leaves."""
    files = log_of(leaves, origin=REGION_ORIGIN)
    return verify_log(MemoryFiles(files.files | (beside or {})), trusted or trust())


def found(report: Report) -> list[tuple[int, int | None, str]]:
    return [(each.step, each.leaf, each.name) for each in report.findings]


def any_bytes(seed: int, count: int) -> bytes:
    return b"".join(sha256(bytes([seed, at])).digest() for at in range(count // 32))


def long_pin() -> SignedPin:
    """One that has no room in its leaf."""
    bridges = tuple(
        AuditKey(f"eu-west.acme/bridge/b{number}", "log", any_bytes(number, 1_312), "ml-dsa-44")
        for number in range(16)
    )
    bundle = region_bundle("eu-west")
    return pin(bundle=msgspec.structs.replace(bundle, audit_keys=(*bundle.audit_keys, *bridges)))


def test_pins_that_hold_are_verified_documents() -> None:
    later = pin("ap-south")
    other_key = Leaf(msgspec.structs.replace(leaf().header, action="made", document=b"", document_sha256=b""))
    report = verified(leaf(), other_key, leaf(later))
    assert report.ok and (report.documents, report.steps[9].checked) == (2, 2)
    signed = long_pin()
    document = signed.encode()
    assert stands_beside(document)
    made = leaf(signed)
    path = document_path(made.header.document_sha256)
    assert verified(made, beside={path: document}).ok
    assert "neither in the leaf nor beside" in verified(made).findings[0].sentence
    assert "does not hold the document" in verified(made, beside={path: document[:-1]}).findings[0].sentence


def changed_bundle() -> SignedPin:
    """The bundle in it is not what eu-west signed."""
    made = pin()
    bundle = msgspec.structs.replace(made.bundle, country="CN")
    signed = msgspec.structs.replace(made.pin.bundle, bundle=bundle)
    return sign_pin(msgspec.structs.replace(made.pin, bundle=signed), key(POLICY_SEEDS["us-east"]))


NAMED = region_bundle("ap-south").fingerprint()
FORGED: dict[str, tuple[Callable[[], Leaf], str]] = {
    "a stranger's signature": (lambda: leaf(pin(signer=key(77))), "not signed by a policy key of us-east"),
    "the other region's": (lambda: leaf(pin(signer=key(POLICY_SEEDS["eu-west"]))), "not signed by a policy"),
    "a receipt key's": (lambda: leaf(pin(signer=key(6))), "not signed by a policy key of us-east"),
    "a log key's": (lambda: leaf(pin(signer=key(7))), "not signed by a policy key of us-east"),
    "a changed bundle": (lambda: leaf(changed_bundle()), "The bundle of eu-west"),
    "another region's pin": (
        lambda: leaf(pin("ap-south", by="eu-west"), source_region="us-east", destination_region="us-east"),
        "A pin by eu-west.acme; this is us-east.acme",
    ),
    "no pin": (lambda: leaf(document=b"", document_sha256=b""), "neither in the leaf nor beside"),
    "no pin's shape": (lambda: as_pinned(b"{}"), "not a region's pin"),
    "another key id": (lambda: leaf(key_id=b"k" * 16), "differ in key_id"),
    "another fingerprint": (
        lambda: leaf(sentence=f"eu-west has {NAMED}."),
        "the fingerprint in its sentence",
    ),
    "one more fingerprint": (
        lambda: leaf(sentence=f"{leaf().header.sentence} It was {NAMED}."),
        "the fingerprint in its sentence",
    ),
    "no fingerprint": (lambda: leaf(sentence="eu-west is trusted."), "the fingerprint in its sentence"),
}


def as_pinned(document: bytes) -> Leaf:
    return leaf(document=document, document_sha256=sha256(document).digest())


@pytest.mark.parametrize("what", FORGED)
def test_a_pin_that_does_not_hold_is_found_by_its_name(what: str, tally: Tally) -> None:
    made, sentence = FORGED[what]
    report = verified(leaf(), made())
    assert found(report) == [(10, 1, PIN_FAILS)]
    assert report.findings[0].sentence.startswith("KEY, pinned: ") and sentence in report.findings[0].sentence
    tally("pins in logs that do not hold", 1)


# -- under a policy key that the region gave up --------------------------------------------------------------

BEFORE = leaf(pin(signer=US_FORMER))


def gave_up(*ends: KeyEnd) -> Trust:
    former = FormerKeys(policy_keys=(US_FORMER.verify_key.public,), ends=ends)
    now = region_bundle("us-east", issued_ms=TIME_MS + 1, policy_keys=(US_NOW.verify_key.public,))
    return Trust.of([now.with_former((former,)), *map(region_bundle, ("eu-west", "ap-south"))])


def test_a_pin_of_before_the_change_of_the_policy_key_holds_below_the_end_and_nowhere_else(
    tally: Tally,
) -> None:
    after = leaf(pin(signer=US_NOW))
    end = KeyEnd(REGION_ORIGIN, 1, root_of([BEFORE]))
    assert verified(BEFORE, after, trusted=gave_up(end)).ok
    behind = verified(BEFORE, after, leaf(pin("ap-south", signer=US_FORMER)), trusted=gave_up(end))
    assert found(behind) == [(10, 2, PIN_FAILS)] and "gave up at 1 leaves" in behind.findings[0].sentence
    unlisted = verified(BEFORE, after, trusted=gave_up())
    assert found(unlisted) == [(10, 0, PIN_FAILS)] and "names no end of it" in unlisted.findings[0].sentence
    # Written anew below the end.
    anew = verified(leaf(pin("ap-south", signer=US_FORMER)), after, trusted=gave_up(end))
    assert (10, 0, PIN_FAILS) in found(anew)
    # With the bundle of before, what was pinned after the change is nobody's.
    assert found(verified(BEFORE, after)) == [(10, 1, PIN_FAILS)]
    tally("pins under a former key", 4)


# -- what else stands in logs --------------------------------------------------------------------------------


def test_other_key_leaves_with_a_document_and_pins_in_a_bridges_log_are_judged_as_before() -> None:
    assert verified(leaf(action="renewed")).ok
    link = Link()
    pinned = leaf(source_region="us-east", destination_region="us-east")
    report = verify_log(log_of([*link.agreement(), pinned]), trust())
    assert [(each.step, each.name) for each in report.findings] == [(6, "")], "it has no place there"


@only_slow
def test_the_report_names_it_as_the_verification_does(spark: Any, tmp_path: Path, tally: Tally) -> None:
    def run(name: str, *pins: SignedPin) -> Any:
        world = five_days(4)
        world.ingress.append([pin_leaf(each, time_ms=TIME_MS, actor=OPERATOR) for each in pins])
        where = tmp_path / name
        return run_report(write_world(where, world), where / "out", trust=trust(), session=spark), world

    def breaches(result: Any) -> list[dict[str, Any]]:
        return [row for row in result.report.exceptions.records() if row["severity"] == "breach"]

    honest, _ = run("honest", pin("us-east", by="eu-west"))
    assert not breaches(honest)
    forged, world = run("forged", pin("us-east", by="eu-west", signer=key(77)))
    (row,) = breaches(forged)
    index = sum(map(len, world.ingress)) - 1
    assert (row["exception"], row["first_leaf"], forged.exit_code) == (PIN_FAILS, index, EXIT_DIFFERENCES)
    tally("reports of a pin that does not hold", 1)
