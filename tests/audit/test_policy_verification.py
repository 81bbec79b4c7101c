"""Verifying logs and proofs under a tlog-policy: its logs, its witnesses, its quorum; and post-quantum keys demanded."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from audit_log import (
    STREAM,
    egress_appends,
    key,
    log_signer,
    region_bundle,
    trust,
    witness_signer,
)

from audit.leaf import Leaf
from audit.note import NoteSigner, VerifierKey, encode_note, parse_note
from audit.proof import check_proof, prove
from audit.spark.verification import open_log
from audit.tile import CHECKPOINT_PATH
from audit.tile_disk import Folder
from audit.tlog_proof import check_leaf, prove_leaves
from audit.trail import Trail, TrailSettings
from audit.trust import Trust
from audit.verify import Report, verify_log
from audit.witness_policy import WitnessPolicy, format_policy
from felix.errors import CorruptionError, RequestError, TamperError
from keys.bundle import AuditKey
from keys.post_quantum import MlDsaKey

LOG, EU = log_signer(), witness_signer()
LOG_PQ = NoteSigner.from_ml_dsa(LOG.key.name, MlDsaKey.from_seed(b"l" * 32))
EU_PQ = NoteSigner.from_ml_dsa(EU.key.name, MlDsaKey.from_seed(b"e" * 32))
OUT = witness_signer("witness.example/w1", seed=77)
OUT_PQ = NoteSigner.from_ml_dsa("witness.example/w1", MlDsaKey.from_seed(b"o" * 32))
OWN = witness_signer("us-east.acme/witness", seed=78)
QUIET = TrailSettings(checkpoint_interval_ms=3_600_000)


def bundles() -> Trust:
    """The two regions' bundles as the tests have them, with ML-DSA-44 keys besides."""
    us, eu = region_bundle("us-east"), region_bundle("eu-west")
    return Trust.of(
        (
            region_bundle(
                "us-east",
                audit_keys=(*us.audit_keys, AuditKey(LOG.key.name, "log", LOG_PQ.key.public, "ml-dsa-44")),
            ),
            region_bundle(
                "eu-west",
                audit_keys=(*eu.audit_keys, AuditKey(EU.key.name, "cosigner", EU_PQ.key.public, "ml-dsa-44")),
            ),
        )
    )


def write(path: Path, rounds: list[tuple[list[Leaf], list[NoteSigner]]], *, quantum: bool = True) -> Folder:
    """A log; after each round of leaves, its checkpoint is cosigned by these."""
    everybody = [signer.key for signer in (EU, EU_PQ, OUT, OUT_PQ, OWN)]
    trail = Trail.open(path, LOG, also=[LOG_PQ] if quantum else [], witnesses=everybody, settings=QUIET)
    for leaves, cosigners in rounds:
        ended = threading.Event()
        trail.append_nowait(leaves, lambda first, error, ended=ended: ended.set())  # type: ignore[misc]
        assert ended.wait(30)
        note = parse_note(trail.publish())
        if cosigners:
            lines = [cosigner.cosign(note.text, 1_760_000_000) for cosigner in cosigners]
            trail.add_cosigned(encode_note(note.with_signatures(lines)))
    trail.close()
    return Folder(path)


def leaves(number: int = 10) -> list[Leaf]:
    return [leaf for append in egress_appends(number) for leaf in append]


def policy(text: str) -> WitnessPolicy:
    return WitnessPolicy.parse(text.encode())


def verify(log: Folder, text: str) -> Report:
    return verify_log(log, bundles().under(policy(text)))


def holds(log: Folder, text: str) -> bool:
    """All of verify, check-proof (both formats) and the report's driver say the same."""
    judged = bundles().under(policy(text))
    report = verify_log(log, judged)
    assert not {finding.step for finding in report.findings} - {1}, report.findings
    answers = [report.ok]
    for prove_and_check in (
        lambda: check_proof(prove(log, judged, STREAM, 0, 0), judged),
        lambda: check_leaf(prove_leaves(log, judged, STREAM, 0, 0)[0], judged),
        lambda: open_log(str(log.path), judged),
    ):
        try:
            prove_and_check()
        except TamperError:
            answers.append(False)
        else:
            answers.append(True)
    assert len(set(answers)) == 1, answers
    return answers[0]


def test_the_quorum_of_a_policy_is_asked_for_everywhere(tmp_path: Path) -> None:
    log = write(tmp_path, [(leaves(), [EU, OUT])])
    eu, out = f"witness eu {EU.key}\n", f"witness out {OUT.key}\n"
    assert holds(log, eu + "quorum eu\n")
    assert holds(log, out + "quorum out\n"), "an outside witness that no bundle names"
    assert holds(log, eu + out + "group both all eu out\nquorum both\n")
    assert holds(log, eu + out + f"witness q {OUT_PQ.key}\ngroup some 2 eu out q\nquorum some\n")
    assert not holds(log, eu + out + f"witness q {OUT_PQ.key}\ngroup each all eu out q\nquorum each\n")
    assert not holds(log, f"witness q {EU_PQ.key}\nquorum q\n")
    assert holds(log, "quorum none\n")
    report = verify(log, f"witness q {EU_PQ.key}\nquorum q\n")
    assert "no quorum" not in str(report.findings) and "the witness q" in report.findings[0].sentence


def test_a_policy_that_lists_logs_takes_no_other_and_no_other_key(tmp_path: Path) -> None:
    log = write(tmp_path, [(leaves(), [EU])])
    assert holds(log, f"log {LOG.key}\nquorum none\n")
    other = VerifierKey("us-east.acme/bridge/other", LOG.key.algorithm, key(55).verify_key.public)
    forged = VerifierKey(LOG.key.name, LOG.key.algorithm, key(56).verify_key.public)
    for listed, sentence in ((other, "does not list"), (forged, "does not name")):
        assert sentence in verify(log, f"log {listed}\nquorum none\n").findings[0].sentence


def test_post_quantum_signatures_of_the_log_and_of_witnesses_can_be_demanded(tmp_path: Path) -> None:
    demanded = format_policy([LOG.key, LOG_PQ.key], {"eu": [EU.key, EU_PQ.key]}, post_quantum=True)
    assert str(LOG.key) not in demanded and str(EU.key) not in demanded
    assert holds(write(tmp_path / "both", [(leaves(), [EU, EU_PQ])]), demanded)
    assert not holds(write(tmp_path / "witness", [(leaves(), [EU])]), demanded)
    log = write(tmp_path / "log", [(leaves(), [EU, EU_PQ])], quantum=False)
    assert "not signed by the log's own key" in verify(log, demanded).findings[0].sentence
    either = format_policy([LOG.key, LOG_PQ.key], {"eu": [EU.key, EU_PQ.key]})
    assert holds(log, either)


def test_the_logs_own_region_is_no_witness_even_where_a_policy_names_it(tmp_path: Path) -> None:
    log = write(tmp_path, [(leaves(), [OWN])])
    assert not holds(log, f"witness own {OWN.key}\nquorum own\n")
    renamed = NoteSigner.from_ml_dsa("witness.example/w9", MlDsaKey.from_seed(b"l" * 32))
    assert renamed.key.public == LOG_PQ.key.public
    note = parse_note((log.path / CHECKPOINT_PATH).read_bytes())
    assert {line.key_id for line in note.signatures} >= {LOG_PQ.key.key_id}
    (log.path / CHECKPOINT_PATH).write_bytes(
        encode_note(note.with_signatures([renamed.cosign(note.text, 1)]))
    )
    assert not holds(log, f"witness own {renamed.key}\nquorum own\n")


def test_a_quorum_counts_on_one_checkpoint_and_the_well_cosigned_one_before_is_kept(tmp_path: Path) -> None:
    first, second, third = leaves()[:7], leaves()[7:14], leaves()[14:]
    both = f"witness eu {EU.key}\nwitness out {OUT.key}\ngroup both all eu out\nquorum both\n"
    apart = write(tmp_path / "apart", [(first, [EU]), (second, [OUT]), (third, [])])
    assert not holds(apart, both), "two cosignatures of two checkpoints are no quorum"
    kept = write(tmp_path / "kept", [(first, [EU, OUT]), (second, [EU]), (third, [])])
    assert holds(kept, both)
    report = verify(kept, both)
    assert (report.cosigned_size, report.size) == (7, len(leaves()))
    (kept.path / "checkpoint.witnessed").unlink()
    assert not holds(kept, both)


def test_the_kept_checkpoint_cannot_be_another_history(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [(leaves()[:7], [EU, OUT]), (leaves()[7:], [EU])])
    fork = write(tmp_path / "fork", [(leaves()[1:8], [EU, OUT]), (leaves()[8:], [EU])])
    forked = (fork.path / "checkpoint.witnessed").read_bytes()
    (log.path / "checkpoint.witnessed").write_bytes(forked)
    report = verify_log(log, bundles())
    assert {finding.step for finding in report.findings} == {2}
    with pytest.raises(CorruptionError, match="another root"):
        open_log(str(log.path), bundles())


def test_a_policy_of_bundles_is_one_that_can_be_read_and_says_any_region(tmp_path: Path) -> None:
    held = bundles()
    text = format_policy(
        [log for name in held.regions for log in held.region(name).logs],
        {name: held.region(name).witnesses for name in held.regions},
    )
    parsed = policy(text)
    assert LOG.key in parsed.log_keys and parsed.is_met([EU_PQ.key]) and not parsed.is_met([])
    assert policy(format_policy([], {})).is_met([])


def test_what_is_written_as_a_policy_is_read_whatever_keys_and_names_there_are(tmp_path: Path) -> None:
    """Several keys of one algorithm; one key under two names; regions that are called as members and groups would be."""
    other = witness_signer("eu.acme/second", seed=79).key
    alias = VerifierKey("eu.acme/third", EU.key.algorithm, EU.key.public)
    taken = VerifierKey("ap-south.acme/bridge/x", LOG.key.algorithm, LOG.key.public)
    text = format_policy(
        [LOG.key, LOG_PQ.key, taken],
        {
            "eu": [EU.key, EU_PQ.key, other, alias],
            "eu-cosignature": [OUT.key],
            "quorum": [],
            "none": [OWN.key],
        },
    )
    parsed = policy(text)
    assert parsed.log_keys == (LOG.key, LOG_PQ.key)
    assert parsed.witness_keys == (EU.key, EU_PQ.key, other, OUT.key, OWN.key)
    assert all(parsed.is_met([each]) for each in parsed.witness_keys) and not parsed.is_met([])
    for left_out, holder in ((taken, LOG), (alias, EU)):
        assert f"# left out: {left_out.name} has the public key of {holder.key.name}" in text.split("\n")


def test_without_a_policy_cosignatures_are_counted_as_before(tmp_path: Path) -> None:
    log = write(tmp_path, [(leaves(), [])])
    with pytest.raises(TamperError, match="0 trusted regions"):
        check_proof(prove(log, trust(), STREAM, 0, 0), trust())
    with pytest.raises(RequestError):
        prove(log, trust(), STREAM, 0, 10**9)
