"""Proofs as c2sp.org/tlog-proof: the format from its text, checked by the steps it names, and by an independent reader."""

from __future__ import annotations

import threading
from base64 import b64decode, b64encode
from hashlib import sha256

import pytest
from audit_log import STREAM, egress_appends, log_signer, trust, witness_signer
from hypothesis import given
from hypothesis import strategies as st

from audit.leaf import Kind
from audit.note import parse_note, verify_note
from audit.proof import check_proof
from audit.tile_disk import Folder
from audit.tlog_proof import (
    WITHOUT_DOCUMENTS_UNSUPPORTED,
    TlogProof,
    check_leaf,
    decode_proof,
    encode_proof,
    is_tlog_proof,
    prove_leaves,
)
from audit.trail import Trail, TrailSettings
from audit.witness import MemoryWitnessStore, Witness
from felix.errors import RequestError, TamperError

SIGNER, WITNESS = log_signer(), witness_signer()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("log")
    witness = Witness(WITNESS, [SIGNER.key], MemoryWitnessStore(), lambda: 1_760_000_000)
    trail = Trail.open(
        path, SIGNER, witnesses=[WITNESS.key], settings=TrailSettings(checkpoint_interval_ms=3_600_000)
    )
    for leaves in egress_appends(150):
        ended = threading.Event()
        trail.append_nowait(leaves, lambda first, error, ended=ended: ended.set())  # type: ignore[misc]
        assert ended.wait(30)
    trail.add_cosigned(witness.cosign(trail.publish(), []))
    trail.close()
    return Folder(path)


def root_by_the_book(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """RFC 6962, 2.1.1, read backwards: which side each hash is on follows from index and size."""
    sides: list[bool] = []
    low, high, at = 0, size, index
    while high - low > 1:
        split = 1
        while split * 2 < high - low:
            split *= 2
        right = at >= low + split
        sides.append(right)
        low, high = (low + split, high) if right else (low, low + split)
    found = sha256(b"\0" + leaf).digest()
    assert len(sides) == len(path)
    for right, sibling in zip(reversed(sides), path, strict=True):
        found = sha256(b"\1" + (sibling + found if right else found + sibling)).digest()
    return found


def test_a_reader_that_knows_only_the_specification_verifies_both_proofs(log: Folder) -> None:
    for offset in (0, 3, 100, 400):
        proofs = prove_leaves(log, trust(), STREAM, 0, offset)
        assert len(proofs) == 2
        for data in proofs:
            head, _, checkpoint = data.partition(b"\n\n")
            first, extra, index, *path = head.decode().split("\n")
            assert first == "c2sp.org/tlog-proof@v1"
            assert extra.startswith("extra ") and index.startswith("index ")
            carried = b64decode(extra[6:])
            leaf = carried[len("felix/tlog-proof/1\0") + 8 :]
            if carried.startswith(b"felix/tlog-proof/2"):
                leaf = leaf[4 : 4 + int.from_bytes(leaf[:4], "big")]
            note = parse_note(checkpoint)
            assert len(verify_note(note, [SIGNER.key, WITNESS.key])) == 2
            _, size, root = note.text.split("\n")[:3]
            hashes = [b64decode(line) for line in path]
            assert root_by_the_book(leaf, int(index[6:]), int(size), hashes) == b64decode(root)


def test_both_proofs_of_a_record_are_of_one_envelope_and_the_second_has_the_receipt(log: Folder) -> None:
    intent, ack = (check_leaf(data, trust()) for data in prove_leaves(log, trust(), STREAM, 0, 3))
    assert (intent.kind, ack.kind) == (Kind.INTENT.name, Kind.ACK.name)
    assert intent.header.envelope_sha256 == ack.header.envelope_sha256
    assert intent.entry is not None and intent.entry.offset == 3 and intent.receipt is None
    assert ack.receipt is not None and ack.receipt.first_offset <= 3 <= ack.receipt.last_offset
    assert ack.entry == intent.entry and ack.unsupported == WITHOUT_DOCUMENTS_UNSUPPORTED
    assert intent.cosigned == (("eu-west", 1_760_000_000),)


def test_no_changed_byte_of_a_proof_passes_with_another_meaning(log: Folder) -> None:
    for data in prove_leaves(log, trust(), STREAM, 0, 3):
        whole = check_leaf(data, trust())
        for at in range(0, len(data), 5):
            changed = bytearray(data)
            changed[at] ^= 1 << at % 7
            try:
                found = check_leaf(bytes(changed), trust())
            except TamperError:
                continue
            # The offset that is meant may be changed to another one of the same leaf: that is another true proof.
            assert found.header == whole.header and found.index == whole.index


def test_the_receipt_is_for_the_record_that_is_meant_and_not_for_another_of_its_range(log: Folder) -> None:
    """The audit log's batches leave records out: one that stayed lies in the range of a receipt all the same."""
    crossed = [offset for offset in range(40) if _crossed(log, offset)]
    stayed = next(offset for offset in range(40) if offset not in crossed and offset + 1 in crossed)
    neighbour = next(offset for offset in (stayed + 1, stayed - 1) if _range_of(log, offset, stayed))
    data = prove_leaves(log, trust(), STREAM, 0, neighbour)[1]
    proof = decode_proof(data)
    assert proof.extra is not None
    magic = len("felix/tlog-proof/2\0")
    meant = proof.extra[:magic] + stayed.to_bytes(8, "big") + proof.extra[magic + 8 :]
    with pytest.raises(TamperError, match="it stayed"):
        check_leaf(encode_proof(proof._replace(extra=meant)), trust())
    # Its entries changed, cut short, or left out: never the record's arrival.
    end = magic + 12 + int.from_bytes(proof.extra[magic + 8 : magic + 12], "big")
    forged = bytearray(proof.extra)
    forged[end : end + 8] = stayed.to_bytes(8, "big")
    for extra in (bytes(forged), proof.extra[:-68], proof.extra[:-1], proof.extra[:end]):
        with pytest.raises(TamperError):
            check_leaf(encode_proof(proof._replace(extra=extra)), trust())
    alone = b"felix/tlog-proof/1\0" + stayed.to_bytes(8, "big") + proof.extra[magic + 12 : end]
    with pytest.raises(TamperError, match="other records"):
        check_leaf(encode_proof(proof._replace(extra=alone)), trust())


def _crossed(log: Folder, offset: int) -> bool:
    try:
        return bool(prove_leaves(log, trust(), STREAM, 0, offset))
    except RequestError:
        return False


def _range_of(log: Folder, offset: int, other: int) -> bool:
    """Whether the receipt for this record is for a range in which another one lies."""
    if not _crossed(log, offset):
        return False
    receipt = check_leaf(prove_leaves(log, trust(), STREAM, 0, offset)[1], trust()).receipt
    return receipt is not None and receipt.first_offset <= other <= receipt.last_offset


def test_the_leaf_must_be_there_and_be_about_the_offset(log: Folder) -> None:
    data = prove_leaves(log, trust(), STREAM, 0, 3)[0]
    proof = decode_proof(data)
    assert proof.extra is not None
    for extra in (None, b"", proof.extra[:10], b"other" + proof.extra, proof.extra[:-1], proof.extra[:19]):
        with pytest.raises(TamperError):
            check_leaf(encode_proof(proof._replace(extra=extra)), trust())
    magic = len("felix/tlog-proof/1\0")
    other = proof.extra[:magic] + (99).to_bytes(8, "big") + proof.extra[magic + 8 :]
    with pytest.raises(TamperError, match="offset 99"):
        check_leaf(encode_proof(proof._replace(extra=other)), trust())
    with pytest.raises(TamperError, match="not cosigned"):
        check_leaf(data, trust(), cosignatures_min=2)
    with pytest.raises(TamperError):
        check_proof(data, trust())
    assert is_tlog_proof(data) and not is_tlog_proof(b"{}")


HASHES = st.lists(st.binary(min_size=32, max_size=32), max_size=60).map(tuple)


@given(
    st.one_of(st.none(), st.binary(max_size=100)), st.integers(0, 2**63 - 1), HASHES, st.binary(max_size=100)
)
def test_files_go_round(extra: bytes | None, index: int, path: tuple[bytes, ...], checkpoint: bytes) -> None:
    proof = TlogProof(extra, index, path, checkpoint)
    assert decode_proof(encode_proof(proof)) == proof


HASH = b64encode(b"h" * 32).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "c2sp.org/tlog-proof@v1",
        "c2sp.org/tlog-proof@v1\n",
        "c2sp.org/tlog-proof@v1\n\n",
        "c2sp.org/tlog-proof@v2\nindex 0\n\n",
        "c2sp.org/tlog-proof@v1\nindex 00\n\n",
        "c2sp.org/tlog-proof@v1\nindex\n\n",
        "c2sp.org/tlog-proof@v1\nindex 1 \n\n",
        "c2sp.org/tlog-proof@v1\nindex -1\n\n",
        "c2sp.org/tlog-proof@v1\nindex 1\nextra AAAA\n\n",
        "c2sp.org/tlog-proof@v1\nextra AAB=\nindex 1\n\n",
        "c2sp.org/tlog-proof@v1\nextra AAAA\nextra AAAA\nindex 1\n\n",
        f"c2sp.org/tlog-proof@v1\nindex 1\n{HASH} \n\n",
        "c2sp.org/tlog-proof@v1\nindex 1\nAAAA\n\n",
        f"c2sp.org/tlog-proof@v1\nindex 1\n{(HASH + chr(10)) * 200}\n\n",
        f"c2sp.org/tlog-proof@v1\r\nindex 1\r\n{HASH}\r\n\r\n",
        "c2sp.org/tlog-proof@v1\nindex \u0661\n\n",
        "x" * (1 << 21),
    ],
)
def test_what_is_no_proof_is_refused(text: str) -> None:
    with pytest.raises(TamperError):
        decode_proof(text.encode())


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_proof(data: bytes) -> None:
    for candidate in (
        data,
        b"c2sp.org/tlog-proof@v1\n" + data,
        b"c2sp.org/tlog-proof@v1\nindex 1\n\n" + data,
    ):
        try:
            check_leaf(candidate, trust())
        except TamperError:
            continue
        pytest.fail("arbitrary bytes were taken for a proof")
