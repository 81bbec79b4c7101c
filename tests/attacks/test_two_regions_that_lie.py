"""Two regions agree to lie: they hold every key of both, and write a crossing out of the egress log afterwards.

Without anybody outside they can: the statement "nothing else went through" is theirs together. With an outside witness
that a verifier asks for they cannot: it keeps the newest checkpoint, over the published protocol, and cosigns no other
history, whatever they send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from audit_log import egress_appends, log_signer, trust, witness_signer
from witness_logs import body, post, serving

from audit.checkpoint import open_checkpoint
from audit.leaf import Kind, Leaf
from audit.merkle import PROOF_HASHES_MAX
from audit.note import encode_note, parse_note
from audit.submission import Submission
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.verify import verify_log
from audit.witness_client import WitnessTarget
from audit.witness_policy import WitnessPolicy
from felix.errors import FelixError

Tally = Callable[[str, int], None]
LOG, EU = log_signer(), witness_signer()
QUIET = TrailSettings(checkpoint_interval_ms=3_600_000)


def write(path: Path, appends: list[list[Leaf]], submit: Callable[[Trail], None] | None = None) -> Folder:
    """The log with these leaves, cosigned by the other region, and by whoever `submit` asks."""
    with closing(Trail.open(path, LOG, witnesses=[EU.key], settings=QUIET)) as trail:
        for leaves in appends:
            ended = threading.Event()
            trail.append_nowait(leaves, lambda first, error, ended=ended: ended.set())  # type: ignore[misc]
            assert ended.wait(30)
        note = parse_note(trail.publish())
        trail.add_cosigned(encode_note(note.with_signatures([EU.cosign(note.text, 1_760_000_000)])))
        if submit is not None:
            submit(trail)
    return Folder(path)


def without_one_crossing(appends: list[list[Leaf]]) -> list[list[Leaf]]:
    """The same history less its last batch: INTENT, and ACK with the receipt. What stays is whole by itself."""
    last = max(at for at, leaves in enumerate(appends) if leaves[-1].header.kind is Kind.INTENT)
    return appends[:last]


def test_both_regions_rewrite_a_log_that_only_they_have_seen(tmp_path: Path) -> None:
    """ "can, because": nobody else has cosigned. The cell of the table, so that it is not claimed otherwise."""
    true = write(tmp_path / "true", list(egress_appends(20)))
    rewritten = write(tmp_path / "rewritten", without_one_crossing(list(egress_appends(20))))
    assert verify_log(true, trust()).ok and verify_log(rewritten, trust()).ok
    assert verify_log(rewritten, trust()).size < verify_log(true, trust()).size


def test_an_outside_witness_that_is_asked_for_finds_it(tmp_path: Path, tally: Tally) -> None:
    appends = list(egress_appends(20))
    with serving(tmp_path / "w") as witness:
        keys = tuple(signer.key for signer in witness.state.signers)
        witness.state.add_log(LOG.key.name, LOG.key)
        lines = "".join(f"witness w{at} {key}\n" for at, key in enumerate(keys))
        judged = trust().under(WitnessPolicy.parse(f"{lines}group w all w0 w1\nquorum w\n".encode()))

        def submit(trail: Trail) -> None:
            trail.checkpoints.trust_witnesses(keys)
            Submission(trail, WitnessTarget(f"http://127.0.0.1:{witness.port}", keys)).submit()

        true = write(tmp_path / "true", appends, submit)
        assert verify_log(true, judged).ok
        cut = without_one_crossing(appends)
        refused = []

        def attempt(trail: Trail) -> None:
            trail.checkpoints.trust_witnesses(keys)
            try:
                Submission(trail, WitnessTarget(f"http://127.0.0.1:{witness.port}", keys)).submit()
            except FelixError as error:
                refused.append(str(error))

        # Shorter; as long again, with other leaves; longer, with the crossing gone.
        fill = list(egress_appends(60))[len(cut) + 2 :]
        for number, forged in enumerate((cut, [*cut, *fill[:3]], [*cut, *fill])):
            try:
                log = write(tmp_path / f"forged-{number}", forged, attempt)
            except FelixError as error:
                pytest.fail(f"the forger's own log did not open: {error}")
            report = verify_log(log, judged)
            assert not report.ok and any("quorum" in finding.sentence for finding in report.findings)
        assert len(refused) == 3
        # And by hand: every old size, with proofs of their own making and with none.
        held = witness.state.logs()[0].held
        forged_note = (tmp_path / "forged-2" / "checkpoint").read_bytes()
        size = open_checkpoint(forged_note, LOG.key).checkpoint.size
        answers = [
            post(witness.port, body(old, proof, forged_note)).status
            for old in range(size + 1)
            for proof in ([], [held.root or b""], [b"x" * 32] * min(5, PROOF_HASHES_MAX))
        ]
        assert 200 not in answers and set(answers) <= {409, 422, 400}
        # Its cosignatures of the true log, put under the forged checkpoint, do not hold.
        stolen = [
            line
            for line in parse_note((true.path / "checkpoint").read_bytes()).signatures
            if line.name == keys[0].name
        ]
        assert len(stolen) == 2
        note = parse_note(forged_note)
        (tmp_path / "forged-2" / "checkpoint").write_bytes(encode_note(note.with_signatures(stolen)))
        assert not verify_log(Folder(tmp_path / "forged-2"), judged).ok
        tally("forged submissions refused", len(answers) + len(refused))
