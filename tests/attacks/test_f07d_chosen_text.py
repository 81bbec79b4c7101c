"""F7d: a checkpoint that is cosigned carries text of the other side's choice into the witness's and the log's files.

The sender has the log's own keys: a rogue agent signs its egress log's checkpoints with whatever extension lines it
likes, and appends signature lines under names and with bytes of its choice.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
from audit_log import Link, log_signer, witness_signer

from audit.checkpoint import Checkpoint, open_checkpoint
from audit.merkle import EMPTY_ROOT
from audit.note import Note, NoteSigner, Signature, encode_note, parse_note
from audit.trail import Trail
from audit.witness import DiskWitnessStore, Witness
from felix.errors import TamperError
from keys.post_quantum import MlDsaKey

Tally = Callable[[str, int], None]
SECRET = "SSN-078-05-1120"
NOW_S = 1_760_000_000


def held(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def forms(text: str) -> list[bytes]:
    return [text.encode(), b64encode(text.encode()).rstrip(b"=")[:-1]]


def test_extension_lines_are_refused_and_nothing_of_them_is_kept(tmp_path: Path, tally: Tally) -> None:
    log = log_signer()
    quantum = NoteSigner.from_ml_dsa(log.key.name, MlDsaKey.from_seed(b"q" * 32))
    witness = Witness(witness_signer(), [log.key, quantum.key], DiskWitnessStore(tmp_path), lambda: NOW_S)
    tried = 0
    for extensions in ((SECRET,), (SECRET, "x" * 30_000), ("—" + SECRET,)):
        text = Checkpoint(log.key.name, 0, EMPTY_ROOT, extensions).text()
        for lines in ((log.sign(text),), (quantum.sign(text, 5),), (log.sign(text), quantum.sign(text, 5))):
            with pytest.raises(TamperError, match="extension"):
                witness.cosign(encode_note(Note(text, lines)), [])
            tried += 1
    assert SECRET.encode() not in held(tmp_path)
    assert witness.last(log.key.name) is None
    tally("checkpoints with extension lines", tried)


def test_lines_under_names_that_nobody_knows_are_not_kept_by_the_witness(
    tmp_path: Path, tally: Tally
) -> None:
    log = log_signer()
    witness = Witness(witness_signer(), [log.key], DiskWitnessStore(tmp_path), lambda: NOW_S)
    text = Checkpoint(log.key.name, 0, EMPTY_ROOT).text()
    chosen = [
        Signature(SECRET, b"1234", b"x" * 64),
        Signature(log.key.name, b"1234", SECRET.encode() * 100),
        Signature("name", b"1234", SECRET.encode()),
    ]
    cosigned = witness.cosign(encode_note(Note(text, (log.sign(text), *chosen))), [])
    signed = open_checkpoint(cosigned, log.key, [witness.key])
    assert len(signed.note.signatures) == 2 and len(signed.cosigned) == 1
    for form in forms(SECRET):
        assert form not in held(tmp_path) and form not in cosigned
    tally("chosen signature lines", len(chosen))


def test_lines_under_names_that_nobody_knows_are_not_kept_by_the_log(tmp_path: Path, tally: Tally) -> None:
    log, witness = log_signer(), witness_signer()
    trail = Trail.open(tmp_path, log, witnesses=[witness.key])
    try:
        trail.append_nowait([Link().grant()], lambda index, error: None)
        note = parse_note(trail.publish())
        cosignature = witness.cosign(note.text, NOW_S)
        chosen = Signature(SECRET, b"1234", SECRET.encode() * 100)
        trail.add_cosigned(encode_note(note.with_signatures([cosignature, chosen])))
        assert open_checkpoint(trail.checkpoint(), log.key, [witness.key]).cosigned
    finally:
        trail.close()
    for form in forms(SECRET):
        assert form not in held(tmp_path)
    tally("chosen signature lines", 1)
