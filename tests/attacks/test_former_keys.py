"""eu-west's policy and receipt keys are in other hands, and it ended them: what they signed before stands, and nothing that the thief signs.

The thief holds, besides, every key of us-east's logs, as its operator does, and a third region cosigns what it has not seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from audit_log import (
    EGRESS_ORIGIN,
    INGRESS_ORIGIN,
    POLICY_SEEDS,
    RECEIPT_KEY,
    REGION_ORIGIN,
    STREAM,
    TIME_MS,
    Link,
    key,
    log_signer,
    region_bundle,
    trust,
    witness_signer,
)
from signed_grants import ACCEPTOR, opened_policy, paper_leaf, policy_document, signed_grant

from audit.agreement import Agreements
from audit.checkpoint import Checkpoint
from audit.cosigned_notes import COSIGNED_PATHS
from audit.keys_in_log import keys_of_log
from audit.leaf import Leaf, Side, encode_leaf
from audit.merkle import Tree, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note
from audit.origin import Origin
from audit.proof import check_proof, prove
from audit.receipt import open_receipt, read_unverified, sign_receipt
from audit.stream_statement import Epoch, StreamStatement, open_statement, sign_statement
from audit.tile import MemoryFiles, bundle_path, encode_bundle, tile_path
from audit.tlog_proof import check_leaf, decode_proof, encode_proof, prove_leaves
from audit.trust import RegionTrust, Trust
from audit.verify import Report, verify_log
from audit.witness_policy import WitnessPolicy
from felix.errors import RequestError, TamperError
from keys.bundle import FormerKeys, KeyEnd, RegionBundle, check_update, decode_bundle, sign_bundle
from keys.pin import Pin, decode_pin, sign_pin
from keys.signing import SigningKey
from policy.grant import DenyEntry, Standing, StandingAction, sign_deny, sign_import, sign_standing
from policy.residency import parse_policy, sign_policy
from policy.signed import SignatureError, SignedDocument, verify

FORMER, NOW = key(POLICY_SEEDS["eu-west"]), key(40)
NEW_RECEIPT_KEY = key(41)


class Story:
    """What us-east's bridge writes: a grant and two batches before eu-west ends its keys, its half signed again and two batches after."""

    def __init__(self) -> None:
        self.link = Link()
        self.before = [*self.link.agreement(), *self.batch(RECEIPT_KEY), *self.batch(RECEIPT_KEY)]
        self.after = [
            paper_leaf(accepted(NOW), self.link.signed),
            *self.batch(NEW_RECEIPT_KEY),
            *self.batch(NEW_RECEIPT_KEY),
        ]

    def batch(self, signer: SigningKey) -> list[Leaf]:
        intents = self.link.intent()
        return [*intents, under(signer, self.link.ack(intents))]

    @property
    def leaves(self) -> list[Leaf]:
        return [*self.before, *self.after]

    @property
    def size(self) -> int:
        return len(self.before)


def under(signer: SigningKey, ack: Leaf) -> Leaf:
    """The ACK with its receipt signed by this key."""
    receipt = sign_receipt(read_unverified(ack.header.receipt), signer)
    return Leaf(msgspec.structs.replace(ack.header, receipt=receipt))


def accepted(signer: SigningKey, at: int = TIME_MS) -> SignedDocument:
    """eu-west's half of the grant, under this key."""
    signed = signed_grant()
    policy = opened_policy(policy_document("eu-west"))
    return sign_import(signed.export, policy, signer.private_key, trust().policy_keys, ACCEPTOR, at)


def root_of(leaves: Iterable[Leaf]) -> bytes:
    tree = Tree()
    for leaf in leaves:
        tree.add(leaf_hash(encode_leaf(leaf)))
    return tree.root()


def log_of(
    leaves: Sequence[Leaf], *cosigners: str, origin: str = EGRESS_ORIGIN, outside: NoteSigner | None = None
) -> MemoryFiles:
    """The log with these leaves, signed by its key and cosigned by these regions, or by one outside witness alone."""
    data, tree = [encode_leaf(leaf) for leaf in leaves], Tree()
    for each in data:
        tree.add(leaf_hash(each))
    assert len(data) < 256
    found = {bundle_path(0, len(data)): encode_bundle(data)}
    for tile in tree.partial_tiles():
        found[tile_path(tile.level, tile.number, tile.width)] = tile.hashes
    text = Checkpoint(origin, len(data), tree.root()).text()
    witnesses = [witness_signer(f"{name}.acme/witness") for name in cosigners or ("eu-west",)]
    if outside is not None:
        witnesses = [outside]
    cosigned = (each.cosign(text, TIME_MS // 1000 + 3_600) for each in witnesses)
    found["checkpoint"] = encode_note(Note(text, (log_signer(origin).sign(text), *cosigned)))
    return MemoryFiles(found)


def ended(*ends: KeyEnd) -> RegionBundle:
    """eu-west's bundle after the change."""
    former = FormerKeys(
        policy_keys=(FORMER.verify_key.public,), receipt_keys=(RECEIPT_KEY.verify_key.public,), ends=ends
    )
    now = region_bundle(
        "eu-west",
        issued_ms=TIME_MS + 1,
        policy_keys=(NOW.verify_key.public,),
        receipt_keys=(NEW_RECEIPT_KEY.verify_key.public,),
    )
    return now.with_former((former,))


def trusting(bundle: RegionBundle, *others: str) -> Trust:
    return Trust.of([bundle, *map(region_bundle, ("us-east", *others))])


@cache
def story() -> Story:
    return Story()


@cache
def end() -> KeyEnd:
    return KeyEnd(EGRESS_ORIGIN, story().size, root_of(story().before))


def sentences(report: Report) -> list[str]:
    return [finding.sentence for finding in report.findings]


# -- the honest log ----------------------------------------------------------------------------------------


def test_the_log_over_the_change_verifies_under_the_new_bundle_alone() -> None:
    files, trusted = log_of(story().leaves), trusting(ended(end()))
    assert verify_log(files, trusted).ok, sentences(verify_log(files, trusted))
    for offset in range(12):
        proof = prove(files, trusted, STREAM, 0, offset)
        proven = check_proof(proof, trusted)
        assert proven.receipt is not None and proven.approved is not None
        assert (b'"felix/proof/3"' in proof) == (offset < 6)
        for each in prove_leaves(files, trusted, STREAM, 0, offset):
            check_leaf(each, trusted)


def test_without_the_end_the_former_keys_count_for_nothing() -> None:
    """As before there were ends: a region that leaves its keys' ends out denies what it signed, and the verifier says which key."""
    report = verify_log(log_of(story().leaves), trusting(ended()))
    assert not report.ok
    assert any("names no end of it in this log" in sentence for sentence in sentences(report))
    assert {8, 10} <= {finding.step for finding in report.findings}


def test_a_proof_from_before_the_change_holds_after_it() -> None:
    files = log_of(story().before)
    for offset in range(6):
        proof = prove(files, trust(), STREAM, 0, offset)
        assert check_proof(proof, trusting(ended(end()))).receipt is not None
        for each in prove_leaves(files, trust(), STREAM, 0, offset):
            check_leaf(each, trusting(ended(end())))


@pytest.mark.parametrize("kept", [7, 8, 9])
def test_an_older_copy_of_the_log_verifies_where_the_region_cosigned_it(kept: int) -> None:
    copy = story().before[:kept]
    assert verify_log(log_of(copy), trusting(ended(end()))).ok
    # A third region's cosignature does not say what eu-west had seen.
    report = verify_log(log_of(copy, "ap-south"), trusting(ended(end()), "ap-south"))
    assert report.ok == (len(copy) == story().size)


def test_the_report_takes_terms_and_crossings_from_it() -> None:
    pytest.importorskip("pyspark")
    from audit.spark.agreements import rows_of
    from audit.spark.source import check_bundle

    files, trusted = log_of(story().leaves), trusting(ended(end()))
    size = len(story().leaves)
    checkpoint = Checkpoint(EGRESS_ORIGIN, size, root_of(story().leaves))
    keys = keys_of_log(Trust.decode(trusted.encode()), checkpoint, files, {"eu-west": size}, size)
    found = list(check_bundle(files, 0, size, keys))
    assert not [each.problem for each in found if each.problem]
    documents = rows_of(EGRESS_ORIGIN, enumerate(story().leaves), files, trusted, keys=keys)
    assert len(documents.terms) == 1 and not documents.unjudged
    without = rows_of(EGRESS_ORIGIN, enumerate(story().leaves[: story().size]), files, trusted)
    assert not without.terms, "no former key counts where none of the log is asked for"


def test_a_second_change_keeps_the_first_end() -> None:
    later = key(50)
    last = KeyEnd(EGRESS_ORIGIN, len(story().leaves), root_of(story().leaves))
    first = ended(end())
    again = msgspec.structs.replace(
        first.with_former((*first.former, FormerKeys(policy_keys=(NOW.verify_key.public,), ends=(last,)))),
        policy_keys=(later.verify_key.public,),
    )
    leaves = [*story().leaves, paper_leaf(accepted(later), story().link.signed)]
    assert verify_log(log_of(leaves), trusting(again)).ok
    more = [*leaves, paper_leaf(accepted(NOW, TIME_MS + 5), story().link.signed)]
    assert not verify_log(log_of(more), trusting(again)).ok


# -- the thief ---------------------------------------------------------------------------------------------


def stolen(what: str) -> list[Leaf]:
    """What the thief of both keys and us-east's operator put behind each other, in the place where it stands."""
    link, signed = Link(), signed_grant()
    if what == "half":
        return [paper_leaf(accepted(FORMER, TIME_MS + 7), signed)]
    if what == "pause":
        word = Standing(
            grant=signed.grant,
            action=StandingAction.PAUSE,
            region="eu-west",
            sequence=1,
            at=TIME_MS,
            by="bob",
        )
        return [paper_leaf(sign_standing(word, FORMER.private_key), signed)]
    if what == "policy":
        text = policy_document("eu-west").body.decode().replace("revision: 1", "revision: 9")
        policy = sign_policy(parse_policy(text, "eu-west"), FORMER.private_key)
        return [paper_leaf(policy, signed)]
    assert what == "receipt"
    link.offset, link.time_ms = 12, TIME_MS + 1_000
    intents = link.intent()
    return [*intents, under(RECEIPT_KEY, link.ack(intents))]


WHAT = ("half", "pause", "policy", "receipt")


@pytest.mark.parametrize("what", WHAT)
def test_what_a_thief_signs_behind_the_end_is_found(what: str, tally: Tally) -> None:
    trusted = trusting(ended(end()))
    for at in range(story().size, len(story().leaves) + 1):
        leaves = [*story().leaves[:at], *stolen(what), *story().leaves[at:]]
        if what == "receipt" and at != len(story().leaves):
            continue
        report = verify_log(log_of(leaves), trusted)
        (sentence,) = (each for each in sentences(report) if "gave up at" in each)
        assert f"gave up at {story().size:,} leaves of this log" in sentence
    tally("leaves under a former key behind its end", 1)


def test_nothing_crosses_by_a_half_behind_the_end(tally: Tally) -> None:
    """eu-west never accepted. The thief does, with its former key, and us-east's operator lets records cross by it."""
    link = Link()
    honest = [leaf for leaf in link.agreement() if leaf.header.kind.name != "ACCEPT"]
    bundle = ended(KeyEnd(EGRESS_ORIGIN, len(honest), root_of(honest)))
    intents = link.intent()
    leaves = [*honest, *stolen("half"), *intents, under(NEW_RECEIPT_KEY, link.ack(intents))]
    trusted = trusting(bundle)
    report = verify_log(log_of(leaves), trusted)
    assert any("no ACCEPT leaf stands before it" in each for each in sentences(report))
    with pytest.raises(TamperError, match="gave up"):
        prove(log_of(leaves), trusted, STREAM, 0, 0)
    proof = prove(log_of(leaves), trust_of_before(), STREAM, 0, 0)
    with pytest.raises(TamperError, match="gave up"):
        check_proof(proof, trusted)
    tally("crossings by a half behind the end", 2)


def trust_of_before() -> Trust:
    """By whoever has not heard of the change, but of the new receipt key."""
    both = (RECEIPT_KEY.verify_key.public, NEW_RECEIPT_KEY.verify_key.public)
    return Trust.of([region_bundle("eu-west", receipt_keys=both), region_bundle("us-east")])


@pytest.mark.parametrize("origin", [REGION_ORIGIN, INGRESS_ORIGIN])
def test_a_former_key_counts_in_no_log_that_is_not_listed(origin: str, tally: Tally) -> None:
    side = Side.EGRESS if origin == REGION_ORIGIN else Side.INGRESS
    cosigner = "eu-west" if origin == REGION_ORIGIN else "us-east"
    leaves = Link().agreement(side)
    files = log_of(leaves, cosigner, origin=origin)
    assert verify_log(files, trust()).ok
    report = verify_log(files, trusting(ended(end())))
    assert any("names no end of it in this log" in each for each in sentences(report))
    listed = KeyEnd(origin, len(leaves), root_of(leaves))
    assert verify_log(files, trusting(ended(end(), listed))).ok
    tally("former keys in a log that is not listed", 1)


def rewritten(what: str) -> list[Leaf]:
    """us-east's operator writes the log anew, with what the thief signed below the end."""
    at = len(Link().agreement())
    forged = stolen(what)
    if what == "receipt":
        # In the place of the second batch, of other records: eu-west has none of them.
        link = Link()
        link.agreement(), link.ack(link.intent())
        other = link.intent(2)
        forged = [*other, under(RECEIPT_KEY, link.ack(other))]
        return [*story().before[: at + 2], *forged]
    return [*story().before[:at], *forged, *story().before[at:-1]]


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("longer", [0, 3], ids=["as long", "longer"])
def test_a_log_written_anew_below_the_end_is_found_though_a_third_region_cosigns_it(
    what: str, longer: int, tally: Tally
) -> None:
    forged = rewritten(what)
    link = Link()
    link.offset, link.destination_offset, link.time_ms = 6, 6, TIME_MS + 5_000
    if what == "receipt":
        link.offset = link.destination_offset = 5
    for _ in range(longer):
        intents = link.intent()
        forged += [*intents, under(NEW_RECEIPT_KEY, link.ack(intents))]
    files = log_of(forged, "ap-south")
    assert len(forged) >= story().size
    trusted = trusting(ended(end()), "ap-south")
    report = verify_log(files, trusted)
    assert any("nothing shows that these are the leaves" in each for each in sentences(report)), sentences(
        report
    )
    before = Trust.of([*trust_bundles_of_before(), region_bundle("ap-south")])
    for offset in (0, 3):
        proof = prove(files, before, STREAM, 0, offset)
        check_proof(proof, before)
        with pytest.raises(TamperError, match=r"nothing shows|gave up"):
            check_proof(proof, trusted)
        for each in prove_leaves(files, before, STREAM, 0, offset)[1:]:
            with pytest.raises(TamperError, match=r"nothing shows|gave up"):
                check_leaf(each, trusted)
    tally("logs written anew below the end", 1)


def trust_bundles_of_before() -> list[RegionBundle]:
    both = (RECEIPT_KEY.verify_key.public, NEW_RECEIPT_KEY.verify_key.public)
    return [region_bundle("eu-west", receipt_keys=both), region_bundle("us-east")]


US_FORMER, US_NOW = key(POLICY_SEEDS["us-east"]), key(60)


def us_ended() -> RegionBundle:
    """us-east's bundle after it gave its policy key up, in its own log where the story's first part ends."""
    former = FormerKeys(policy_keys=(US_FORMER.verify_key.public,), ends=(end(),))
    now = region_bundle("us-east", issued_ms=TIME_MS + 1, policy_keys=(US_NOW.verify_key.public,))
    return now.with_former((former,))


def test_a_regions_own_log_written_anew_proves_nothing_under_its_former_key(tally: Tally) -> None:
    """The thief has us-east's former policy key and its log's key, and a third region cosigns: the log is refused, and so is each proof from it."""
    trusted = Trust.of([us_ended(), *map(region_bundle, ("eu-west", "ap-south"))])
    before = Trust.of([*map(region_bundle, ("us-east", "eu-west", "ap-south"))])
    forged = rewritten("receipt")
    link = Link()
    link.offset, link.destination_offset, link.time_ms = 5, 5, TIME_MS + 5_000
    for _ in range(2):
        intents = link.intent()
        forged += [*intents, under(RECEIPT_KEY, link.ack(intents))]
    files = log_of(forged, "ap-south")
    assert len(forged) > end().size and not verify_log(files, trusted).ok
    for offset in (0, 3):
        proof = prove(files, before, STREAM, 0, offset)
        check_proof(proof, before)
        with pytest.raises(TamperError, match="nothing shows"):
            check_proof(proof, trusted)
    tally("proofs from an own log written anew below the end", 2)


def test_proofs_from_a_regions_own_log_hold_over_the_end_of_its_key() -> None:
    """Those of before the change, whose checkpoint does not go further than the end; and those of after it, which carry the path."""
    trusted = Trust.of([us_ended(), region_bundle("eu-west")])
    for kept in (story().size - 1, story().size):
        files = log_of(story().before[:kept])
        check_proof(prove(files, trust(), STREAM, 0, 0), trusted)
    link = Link()
    leaves = [*link.agreement()]
    for _ in range(3):
        intents = link.intent()
        leaves += [*intents, under(RECEIPT_KEY, link.ack(intents))]
    assert root_of(leaves[: end().size]) == end().root and len(leaves) > end().size
    proof = prove(log_of(leaves), trusted, STREAM, 0, 0)
    assert b'"felix/proof/3"' in proof
    check_proof(proof, trusted)


def test_a_log_written_anew_and_cut_short_of_the_end_is_found(tally: Tally) -> None:
    """Below the end there is no root to compare: eu-west's own cosignature must stand on it, and it cosigns no two histories."""
    forged = rewritten("half")[: story().size - 1]
    trusted = trusting(ended(end()), "ap-south")
    report = verify_log(log_of(forged, "ap-south"), trusted)
    assert any("nothing shows" in each for each in sentences(report))
    tally("logs written anew and cut short", 1)


@pytest.mark.parametrize("name", ["eu-west", "eu-west/witness", "witness.example"])
@pytest.mark.parametrize("how", ["named", "policy"])
def test_an_outside_witness_that_is_called_like_a_region_is_not_that_region(
    name: str, how: str, tally: Tally
) -> None:
    """Whoever runs a witness chooses its name. That eu-west had cosigned the leaves below its keys' end, it does not say."""
    witness = NoteSigner.from_key(name, key(77), Algorithm.COSIGNATURE)

    def judged(bundles: Iterable[RegionBundle]) -> Trust:
        if how == "named":
            return Trust.of(bundles, [witness.key])
        return Trust.of(bundles).under(WitnessPolicy.parse(f"witness w {witness.key}\nquorum w\n".encode()))

    trusted = judged([ended(end()), region_bundle("us-east")])
    before = judged(trust_bundles_of_before())
    for what in WHAT:
        short = log_of(rewritten(what)[: story().size - 1], outside=witness)
        report = verify_log(short, trusted)
        assert any("nothing shows" in each for each in sentences(report)), sentences(report)
        assert "eu-west" not in report.cosigners
        link, forged = Link(), rewritten(what)
        link.offset = link.destination_offset = 5 if what == "receipt" else 6
        link.time_ms = TIME_MS + 5_000
        for _ in range(3):
            intents = link.intent()
            forged += [*intents, under(NEW_RECEIPT_KEY, link.ack(intents))]
        files = log_of(forged, outside=witness)
        for offset in (0, 3):
            with pytest.raises(TamperError, match=r"nothing shows|gave up"):
                check_proof(prove(files, before, STREAM, 0, offset), trusted)
            for each in prove_leaves(files, before, STREAM, 0, offset)[1:]:
                with pytest.raises(TamperError, match=r"nothing shows|gave up"):
                    check_leaf(each, trusted)
    both = log_of(story().leaves, outside=witness)
    assert verify_log(both, trusted).ok, "it counts as what it is"
    tally("logs cosigned by a witness that is called like a region", 2 * len(WHAT))


def test_an_outside_witness_and_the_region_that_it_is_called_like_are_two() -> None:
    witness = NoteSigner.from_key("eu-west", key(77), Algorithm.COSIGNATURE)
    log = Trust.of([region_bundle("us-east"), region_bundle("eu-west")], [witness.key]).log(EGRESS_ORIGIN)
    text = Checkpoint(EGRESS_ORIGIN, 5, root_of(story().before[:5])).text()
    signers = (witness, witness_signer("eu-west.acme/witness"))
    cosigned = (each.cosign(text, 1) for each in signers)
    opened = log.open(encode_note(Note(text, (log_signer(EGRESS_ORIGIN).sign(text), *cosigned))))
    assert log.cosigners(opened.cosigned) == ("eu-west", "outside witness eu-west")


OUTSIDE = NoteSigner.from_key("witness.example", key(77), Algorithm.COSIGNATURE)
POLICIES = {
    "no policy": "",
    "outside alone": f"witness w {OUTSIDE.key}\nquorum w\n",
    "third region alone": f"witness a {witness_signer('ap-south.acme/witness').key}\nquorum a\n",
}
"""None lists eu-west's witness."""


def judged_by(policy: str, bundles: Iterable[RegionBundle]) -> Trust:
    text = POLICIES[policy]
    if not text:
        return Trust.of(bundles, [OUTSIDE.key])
    return Trust.of(bundles).under(WitnessPolicy.parse(text.encode()))


def noted(leaves: Sequence[Leaf], signers: Iterable[NoteSigner]) -> bytes:
    text = Checkpoint(EGRESS_ORIGIN, len(leaves), root_of(leaves)).text()
    cosigned = (each.cosign(text, TIME_MS // 1000 + 3_600) for each in signers)
    return encode_note(Note(text, (log_signer(EGRESS_ORIGIN).sign(text), *cosigned)))


def signers_of(names: str) -> list[NoteSigner]:
    known = {"e": witness_signer("eu-west.acme/witness"), "a": witness_signer("ap-south.acme/witness")}
    return [OUTSIDE if name == "o" else known[name] for name in names]


REGIONS = ("us-east", "ap-south")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_without_the_region_does_not_hide_what_it_had_cosigned(policy: str) -> None:
    """Which cosignatures are asked for is one question, what eu-west had seen another: copies and proofs of before the change hold after it."""
    before = judged_by(policy, map(region_bundle, ("eu-west", *REGIONS)))
    lower = KeyEnd(EGRESS_ORIGIN, 8, root_of(story().before[:8]))
    for kept, at in ((7, end()), (8, end()), (9, end()), (9, lower)):
        copy = story().before[:kept]
        files = log_of(copy)
        files.files["checkpoint"] = noted(copy, signers_of("eao"))
        trusted = judged_by(policy, [ended(at), *map(region_bundle, REGIONS)])
        report = verify_log(files, trusted)
        # The last ACK stands behind the lower end.
        assert report.ok == (at == end()), sentences(report)
        assert ("eu-west" in report.cosigners) == (policy == "no policy")
        check_proof(prove(files, before, STREAM, 0, 0), trusted)
        for each in prove_leaves(files, before, STREAM, 0, 0):
            check_leaf(each, trusted)


def test_the_report_asks_the_region_whatever_a_policy_counts(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from audit.spark.verification import keys_of, open_log, verify_whole

    trusted = judged_by("outside alone", [ended(end()), *map(region_bundle, REGIONS)])
    for signers, holds in (("eao", True), ("ao", False)):
        copy = story().before[:8]
        files = log_of(copy)
        files.files["checkpoint"] = noted(copy, signers_of(signers))
        for name, data in files.files.items():
            path = tmp_path / signers / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        log = open_log(str(tmp_path / signers), trusted)
        assert [each.name for each in log.cosigners] == ["witness.example"]
        assert (FORMER.verify_key.public in keys_of(log, trusted).policy_keys_at(0)["eu-west"]) == holds
        assert verify_whole(log, trusted, 1, ()).ok == holds


@pytest.mark.parametrize("policy", ["outside alone", "third region alone"])
def test_what_a_policy_counts_shows_nothing_of_what_the_region_saw(policy: str, tally: Tally) -> None:
    """eu-west's cosignature is not there, or the line that is called its does not hold: a copy cut short of the end shows nothing."""
    trusted = judged_by(policy, [ended(end()), *map(region_bundle, REGIONS)])
    copy = story().before[:8]
    thief = NoteSigner.from_key("eu-west.acme/witness", key(78), Algorithm.COSIGNATURE)
    for signers in (signers_of("ao"), [*signers_of("ao"), thief]):
        files = log_of(copy)
        files.files["checkpoint"] = noted(copy, signers)
        assert any("nothing shows" in each for each in sentences(verify_log(files, trusted)))
        with pytest.raises(TamperError, match="nothing shows"):
            prove_leaves(files, trusted, STREAM, 0, 0)
    tally("copies that those whom a policy counts cosigned alone", 2)


@pytest.mark.parametrize("policy", ["no policy", "outside alone"])
def test_every_tlog_proof_that_is_made_holds_whoever_cosigned_which_checkpoint(
    policy: str, tally: Tally
) -> None:
    """Three regions and an outside witness: the newest checkpoint and the one before are cosigned by different ones."""
    trusted = judged_by(policy, [ended(end()), *map(region_bundle, REGIONS)])
    log, made = trusted.log(EGRESS_ORIGIN), 0
    for kept in (story().size - 1, story().size, len(story().leaves)):
        leaves = story().leaves[:kept]
        files = log_of(leaves)
        for newest, older in (("e", "a"), ("a", "e"), ("o", "eo"), ("ao", "eo")):
            files.files["checkpoint"] = noted(leaves, signers_of(newest))
            files.files[COSIGNED_PATHS[0]] = noted(leaves[:-1], signers_of(older))
            for offset in (0, 3, 11):
                try:
                    proofs = prove_leaves(files, trusted, STREAM, 0, offset)
                except RequestError:
                    assert offset >= kept // 3 * 3 - 3, "it had not crossed by then"
                    continue
                except TamperError as error:
                    # A shorter copy has no path to the end: there eu-west must have seen the checkpoint.
                    assert kept < story().size and "nothing shows" in error.sentence
                    continue
                for each in proofs:
                    note = decode_proof(each).checkpoint
                    if not log.missing(log.open(note).cosigned, 1):
                        check_leaf(each, trusted)
                        made += 1
    assert made > 20
    tally("tlog-proofs over the end of a key", made)


def test_a_tlog_proof_shows_by_its_path_what_no_cosignature_does(tally: Tally) -> None:
    """A third region alone cosigned the log: the ACK of before the end carries its path under the end's root, and every change of it is refused."""
    trusted = trusting(ended(end()), "ap-south")
    files = log_of(story().leaves, "ap-south")
    tried = 0
    for offset in (0, 3, 6):
        intent, ack = prove_leaves(files, trusted, STREAM, 0, offset)
        assert check_leaf(intent, trusted).receipt is None and check_leaf(ack, trusted).receipt is not None
        proof = decode_proof(ack)
        assert proof.extra is not None
        assert proof.extra.startswith(b"felix/tlog-proof/3\0") == (offset < 6)
        if offset >= 6:
            continue
        start = 19 + 8 + 4 + int.from_bytes(proof.extra[27:31])
        hashes = proof.extra[start]
        path, entries = proof.extra[start + 1 :][: 32 * hashes], proof.extra[start + 1 :][32 * hashes :]
        head, first = proof.extra[:start], path[:32]
        changed = [
            head + bytes([hashes]) + bytes(32) + path[32:] + entries,
            head + bytes([hashes]) + path[:-32] + entries,
            head + bytes([hashes - 1]) + path[:-32] + entries,
            head + bytes([hashes + 1]) + path + first + entries,
            head + bytes([hashes]) + path[32:] + first + entries,
            head + bytes([0]) + entries,
            head + bytes([255]) + path + entries,
            head + bytes([hashes]) + path,
            head,
            b"felix/tlog-proof/2\0" + head[19:] + entries,
        ]
        for extra in changed:
            if extra == proof.extra:  # one hash, turned round
                continue
            with pytest.raises(TamperError):
                check_leaf(encode_proof(proof._replace(extra=extra)), trusted)
            tried += 1
        other = decode_proof(intent)
        assert other.extra is not None
        leaf = other.extra[27:]
        extra = head[:27] + len(leaf).to_bytes(4) + leaf + bytes([hashes]) + path
        with pytest.raises(TamperError, match="no receipt is for"):
            check_leaf(encode_proof(other._replace(extra=extra)), trusted)
        # By whoever has not heard of the change there is no end to show.
        with pytest.raises(TamperError, match="no trusted bundle names an end"):
            check_leaf(ack, Trust.of([*trust_bundles_of_before(), region_bundle("ap-south")]))
    tally("changes of a path in a tlog-proof", tried)


def test_no_proof_is_made_of_a_receipt_behind_the_end(tally: Tally) -> None:
    leaves = [*story().leaves, *stolen("receipt")]
    files, trusted = log_of(leaves), trusting(ended(end()))
    with pytest.raises(TamperError, match="gave up at"):
        prove_leaves(files, trusted, STREAM, 0, 12)
    with pytest.raises(TamperError, match="gave up at"):
        check_proof(prove(files, trusted, STREAM, 0, 12), trusted)
    tally("receipts behind the end to be proved", 2)


def test_a_thief_of_the_witness_key_besides_is_found_in_the_log(tally: Tally) -> None:
    """eu-west's cosignature is the thief's own, and the root at the end is not: the log does not verify."""
    forged = [*rewritten("half"), *story().after]
    report = verify_log(log_of(forged, "eu-west"), trusting(ended(end())))
    assert any("nothing shows" in each for each in sentences(report))
    tally("logs cosigned by the thief of a witness key", 1)


HIGHEST = (1 << 53) - 1
MUCH_LATER_MS = 60_000


def pause(signer: SigningKey, sequence: int, *, goes_on: bool = False) -> SignedDocument:
    action = StandingAction.RESUME if goes_on else StandingAction.PAUSE
    word = Standing(
        grant=signed_grant().grant, action=action, region="eu-west", sequence=sequence, at=TIME_MS, by="bob"
    )
    return sign_standing(word, signer.private_key)


def deny(signer: SigningKey, sequence: int, *, goes_on: bool = False) -> SignedDocument:
    entry = DenyEntry(
        streams="acme/ops/*",
        peer="*",
        region="eu-west",
        sequence=sequence,
        at=TIME_MS,
        by="bob",
        lifted=goes_on,
    )
    return sign_deny(entry, signer.private_key)


@pytest.mark.parametrize("word", [pause, deny])
@pytest.mark.parametrize("goes_on", [True, False], ids=["lifts", "forbids"])
def test_a_word_under_the_key_of_now_counts_before_the_highest_number_of_a_former_one(
    word: Callable[..., SignedDocument], goes_on: bool, tally: Tally
) -> None:
    """The thief had the key before anybody knew, and said the opposite with the highest number there is: as brokers have it, eu-west's next word counts."""
    link, signed = Link(), signed_grant()
    before = [*link.agreement(), paper_leaf(word(FORMER, HIGHEST, goes_on=not goes_on), signed)]
    link.time_ms += MUCH_LATER_MS
    said = paper_leaf(word(NOW, 1, goes_on=goes_on), signed, time_ms=link.time_ms)
    link.time_ms += MUCH_LATER_MS
    intents = link.intent()
    leaves = [*before, said, *intents, under(NEW_RECEIPT_KEY, link.ack(intents))]
    trusted = trusting(ended(KeyEnd(EGRESS_ORIGIN, len(before), root_of(before))))
    report = verify_log(log_of(leaves), trusted)
    assert report.ok == goes_on, sentences(report)
    assert goes_on or any("paused" in each or "den" in each for each in sentences(report))
    # Also where the end was raised over it (felix region change-signing-keys --raise-ends).
    raised = trusting(ended(KeyEnd(EGRESS_ORIGIN, len(leaves), root_of(leaves))))
    assert verify_log(log_of(leaves), raised).ok == goes_on
    tally("words with the highest number under a former key", 1)


def test_a_half_under_the_key_of_now_counts_before_a_later_one_under_a_former_key(tally: Tally) -> None:
    """The thief's half is of the grant's last moment and asks for more approvals than there are: it stops nothing of what eu-west signs again."""
    link, signed = Link(), signed_grant()
    asks = policy_document("eu-west", 4)
    late = sign_import(
        signed.export,
        opened_policy(asks),
        FORMER.private_key,
        trust().policy_keys,
        ACCEPTOR,
        signed.terms.expires - 1,
    )
    before = [*link.agreement(), paper_leaf(late, signed)]
    link.time_ms += MUCH_LATER_MS
    intents = link.intent()
    crossing = [*intents, under(NEW_RECEIPT_KEY, link.ack(intents))]
    again = [paper_leaf(accepted(NOW), signed, time_ms=link.time_ms)]
    trusted = trusting(ended(KeyEnd(EGRESS_ORIGIN, len(before), root_of(before))))
    assert not verify_log(log_of([*before, *crossing]), trusted).ok
    report = verify_log(log_of([*before, *again, *crossing]), trusted)
    assert report.ok, sentences(report)
    tally("halves of the future under a former key", 1)


def test_a_path_of_another_leaf_shows_nothing(tally: Tally) -> None:
    """The path to the end's root is of this very leaf."""
    trusted = trusting(ended(end()), "ap-south")
    honest = msgspec.json.decode(prove(log_of(story().leaves), trusted, STREAM, 0, 0))
    before = Trust.of([*trust_bundles_of_before(), region_bundle("ap-south")])
    forged = msgspec.json.decode(prove(log_of(rewritten("half"), "ap-south"), before, STREAM, 0, 0))
    forged["format"] = honest["format"]
    tried = 0
    for included in (*forged["documents"], forged["ack"]):
        for other in (*honest["documents"], honest["ack"]):
            if "ended_path" in other:
                included["ended_path"] = other["ended_path"]
                with pytest.raises(TamperError):
                    check_proof(msgspec.json.encode(forged), trusted)
                tried += 1
    tally("paths of other leaves", tried)


def test_every_change_of_a_path_under_an_end_is_refused(tally: Tally) -> None:
    trusted = trusting(ended(end()), "ap-south")
    # eu-west's own cosignature is not there: the paths alone show it.
    files = log_of(story().leaves, "ap-south")
    proof = prove(files, trusted, STREAM, 0, 0)
    assert check_proof(proof, trusted).receipt is not None
    tried = 0

    def refused(change: Callable[[dict[str, Any]], None]) -> None:
        nonlocal tried
        altered = msgspec.json.decode(proof)
        change(altered)
        with pytest.raises(TamperError):
            check_proof(msgspec.json.encode(altered), trusted)
        tried += 1

    places = [
        ("ack", None),
        *(("documents", at) for at in range(len(msgspec.json.decode(proof)["documents"]))),
    ]
    for name, number in places:

        def of(document: dict[str, Any], name: str = name, number: int | None = number) -> dict[str, Any]:
            found: dict[str, Any] = document[name] if number is None else document[name][number]
            return found

        if "ended_path" not in of(msgspec.json.decode(proof)):
            refused(lambda d: of(d).update(ended_path=[]))
            continue
        refused(lambda d: of(d).pop("ended_path"))
        refused(lambda d: of(d)["ended_path"].pop())
        refused(lambda d: of(d)["ended_path"].reverse())
        refused(lambda d: of(d)["ended_path"].append(of(d)["ended_path"][0]))
    refused(lambda d: d.update(format="felix/proof/2"))
    refused(lambda d: d["intent"].update(ended_path=d["intent"]["path"]))
    tally("changes of a path under an end", tried)


def test_a_former_key_that_a_successor_brings_needs_comparing(tally: Tally) -> None:
    """Whoever has eu-west's policy key of now signs a successor: no key comes back by it, and none gets more than it had."""
    trusted = ended(end())
    mine = key(60)
    policy, receipt = FORMER.verify_key.public, RECEIPT_KEY.verify_key.public
    higher = KeyEnd(EGRESS_ORIGIN, 1 << 40, bytes(32))
    (held,) = trusted.former

    def with_former(*former: FormerKeys) -> RegionBundle:
        return trusted.with_former(former)

    successors = [
        with_former(held, FormerKeys(policy_keys=(mine.verify_key.public,), ends=(higher,))),
        with_former(held, FormerKeys(receipt_keys=(mine.verify_key.public,), ends=(end(),))),
        with_former(msgspec.structs.replace(held, ends=(higher,))),
        with_former(msgspec.structs.replace(held, ends=(*held.ends, msgspec.structs.replace(higher, log=REGION_ORIGIN)))),
        with_former(msgspec.structs.replace(held, ends=())),
        with_former(msgspec.structs.replace(held, policy_keys=(policy, mine.verify_key.public))),
        with_former(msgspec.structs.replace(held, receipt_keys=())),
        with_former(),
        msgspec.structs.replace(with_former(msgspec.structs.replace(held, policy_keys=())), policy_keys=(NOW.verify_key.public, policy)),
        msgspec.structs.replace(with_former(msgspec.structs.replace(held, receipt_keys=())), receipt_keys=(NEW_RECEIPT_KEY.verify_key.public, receipt)),
        msgspec.structs.replace(with_former(), policy_keys=(policy,)),
    ]  # fmt: skip
    for number, successor in enumerate(successors):
        later = msgspec.structs.replace(successor, issued_ms=trusted.issued_ms + 1)
        assert later.fingerprint() != trusted.fingerprint(), number
        signer = NOW if NOW.verify_key.public in later.policy_keys else FORMER
        with pytest.raises(TamperError, match="has "):
            check_update(trusted, sign_bundle(later, signer))
    # And what needs no comparing goes on as before.
    check_update(trusted, sign_bundle(msgspec.structs.replace(trusted, issued_ms=trusted.issued_ms + 1), NOW))
    with pytest.raises(RequestError, match="that it names"):
        sign_bundle(msgspec.structs.replace(trusted, issued_ms=trusted.issued_ms + 1), FORMER)
    tally("successors that bring a key back", len(successors))


def test_a_former_key_is_used_for_nothing_again() -> None:
    bundle = ended(end())
    policy, receipt = FORMER.verify_key.public, RECEIPT_KEY.verify_key.public
    for changes in (
        {"policy_keys": (NOW.verify_key.public, policy)},
        {"receipt_keys": (receipt,)},
        {"receipt_keys": (policy,)},
    ):
        with pytest.raises(RequestError, match="former key twice, or as a key of now"):
            sign_bundle(msgspec.structs.replace(bundle, **changes), NOW)
    read = decode_bundle(sign_bundle(bundle, NOW).encode()).bundle
    assert read == bundle and read.format == 2
    assert {policy, receipt} <= read.public_keys() & read.compared_keys()


def test_brokers_and_agents_take_nothing_new_under_a_former_key(tally: Tally) -> None:
    """They ask for the keys of now alone, wherever a leaf may stand."""
    eu = RegionTrust(ended(end()))
    (ack,) = [leaf for leaf in stolen("receipt") if leaf.header.receipt]
    with pytest.raises(TamperError, match="none of eu-west's receipt keys"):
        open_receipt(ack.header.receipt, eu.receipt_keys)
    statement = StreamStatement(
        region="eu-west", stream=STREAM, incarnation=b"i" * 16, shards=1, shard=0, log_start=0, log_end=1,
        epochs=(Epoch(1, 0),), time_ms=TIME_MS,
    )  # fmt: skip
    with pytest.raises(TamperError, match="none of eu-west's receipt keys"):
        open_statement(sign_statement(statement, RECEIPT_KEY), eu.receipt_keys)
    with pytest.raises(SignatureError, match="none of eu-west's policy keys"):
        verify(accepted(FORMER), {"eu-west": eu.policy_keys})
    pin = Pin(by="eu-west", mesh="acme", number=1, bundle=sign_bundle(region_bundle("us-east"), key(POLICY_SEEDS["us-east"])))  # fmt: skip
    assert decode_pin(sign_pin(pin, NOW).encode(), eu.bundle).pin == pin
    with pytest.raises(TamperError, match="not signed by a policy key of eu-west"):
        decode_pin(sign_pin(pin, FORMER).encode(), eu.bundle)
    former = sign_bundle(region_bundle("eu-west", issued_ms=TIME_MS + 9), FORMER)
    with pytest.raises(TamperError, match="a policy key that had ended"):
        check_update(eu.bundle, former)
    tally("what a thief of a former key brings", 5)


def test_agreements_without_the_logs_keys_take_no_former_key() -> None:
    agreements = Agreements(trusting(ended(end())), Origin.parse(EGRESS_ORIGIN))
    found = [
        problem
        for index, leaf in enumerate(story().before)
        for problem in agreements.take(index, leaf, lambda header: header.document)
    ]
    assert len(found) == 1 and "nothing shows" in found[0]
