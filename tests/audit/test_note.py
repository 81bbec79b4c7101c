"""Signed notes and checkpoints: the specification's own example, round trips, and what is refused."""

from __future__ import annotations

from base64 import b64decode
from hashlib import sha256

import pytest
from audit_log import COLLIDING, colliding, key, log_signer, witness_signer
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PublicKey
from hypothesis import given
from hypothesis import strategies as st

from audit.checkpoint import Checkpoint, open_checkpoint
from audit.note import (
    NOTE_BYTES_MAX,
    Algorithm,
    Note,
    NoteSigner,
    VerifierKey,
    check_key_name,
    encode_note,
    encode_signatures,
    parse_note,
    parse_signatures,
    signed_message,
    verify_note,
)
from felix.errors import FelixError, RequestError, TamperError
from keys.post_quantum import MlDsaKey

# The cosigned checkpoint that https://c2sp.org/tlog-cosignature shows.
COSIGNED_EXAMPLE = (
    "example.com/behind-the-sofa\n"
    "20852163\n"
    "CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n"
    "\n"
    "— example.com/behind-the-sofa "
    "Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
    "— witness.example.com/w1 "
    "jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2oyin1nPZqhf5nNo0xUe+mbIUBkBIfZ+qnA==\n"
).encode()

# A verifier key and a note signed with it, from the documentation of golang.org/x/mod/sumdb/note.
GO_VKEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_NOTE = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
).encode()


def test_the_documented_note_of_another_implementation_verifies() -> None:
    known = VerifierKey.parse(GO_VKEY)
    assert str(known) == GO_VKEY and known.key_id.hex() == "c74f20a3"
    note = parse_note(GO_NOTE)
    (verified,) = verify_note(note, [known])
    assert verified.key == known and verified.time_s is None
    assert encode_note(note) == GO_NOTE
    with pytest.raises(TamperError, match="does not hold"):
        verify_note(Note(note.text.replace("problem,", "problem;"), note.signatures), [known])


def test_the_specification_example_is_read_as_it_says() -> None:
    note = parse_note(COSIGNED_EXAMPLE)
    checkpoint = Checkpoint.parse(note.text)
    assert (checkpoint.origin, checkpoint.size) == ("example.com/behind-the-sofa", 20852163)
    assert checkpoint.root == b64decode("CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=")
    assert checkpoint.text() == note.text and encode_note(note) == COSIGNED_EXAMPLE
    witness = note.signatures[1]
    assert witness.name == "witness.example.com/w1" and len(witness.data) == 8 + 64
    assert int.from_bytes(witness.data[:8], "big") == 1679315147, "the time that the specification shows"


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_verifier_key_goes_round(algorithm: Algorithm) -> None:
    public = MlDsaKey.from_seed(b"4" * 32).public if algorithm.is_post_quantum else key(4).verify_key.public
    verifier = VerifierKey("eu-west.acme/witness", algorithm, public)
    assert VerifierKey.parse(str(verifier)) == verifier


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "name+00000000",
        "name+00000000+AAAA",
        "na me+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeumann+c74f20a4+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TX",
        "PeterNeumann+c74f20a3+BRpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
    ],
)
def test_what_is_no_verifier_key_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"verifier key|note key"):
        VerifierKey.parse(text)


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\u2003b", "a\tb", "a\x00b"])
def test_a_name_with_spaces_or_plus_names_no_key(name: str) -> None:
    with pytest.raises(RequestError):
        check_key_name(name)


def test_unknown_signatures_and_bad_cosignatures_are_ignored_and_bad_lines_of_the_log_refuse() -> None:
    log, witness, stranger = log_signer(), witness_signer(), witness_signer("stranger", seed=9)
    text = Checkpoint(log.key.name, 3, b"r" * 32).text()
    note = Note(text, (log.sign(text), stranger.cosign(text, 5), witness.cosign(text, 7)))
    signed = open_checkpoint(encode_note(note), log.key, [witness.key])
    assert [(by.key, by.time_s) for by in signed.cosigned] == [(witness.key, 7)]
    other = Checkpoint(log.key.name, 4, b"r" * 32).text()
    bad = Note(text, (log.sign(text), witness.cosign(other, 7)))
    assert open_checkpoint(encode_note(bad), log.key).cosigned == ()
    opened = open_checkpoint(encode_note(bad), log.key, [witness.key])
    assert opened.cosigned == () and opened.broken == (witness.key.name,)
    assert witness.key.name in opened.told() and not signed.told()
    assert opened.known_note() == Note(text, (log.sign(text),))
    with pytest.raises(TamperError, match=r"us-east\.acme/bridge/us-to-eu does not hold"):
        open_checkpoint(encode_note(Note(text, (log.sign(text), log.sign(other)))), log.key, [witness.key])


def test_each_key_of_one_name_and_id_is_tried() -> None:
    """Two keys of one name and id are found in seconds (keys.note_key). Which stands first decides nothing."""
    text = Checkpoint(log_signer().key.name, 3, b"r" * 32).text()
    for name in COLLIDING:
        algorithm = Algorithm.COSIGNATURE if name.endswith("/witness") else Algorithm.ED25519
        one, two = (NoteSigner.from_key(name, each, algorithm) for each in colliding(name))
        assert one.key.key_id == two.key.key_id and one.key.public != two.key.public
        for keys in ((one.key, two.key), (two.key, one.key)):
            for signer in (one, two):
                if algorithm is Algorithm.ED25519:
                    note = encode_note(Note(text, (signer.sign(text),)))
                    assert [by.key for by in open_checkpoint(note, keys).signed] == [signer.key]
                else:
                    note = encode_note(Note(text, (log_signer().sign(text), signer.cosign(text, 7))))
                    opened = open_checkpoint(note, log_signer().key, keys)
                    assert [by.key for by in opened.cosigned] == [signer.key] and not opened.broken
        # Known alone, a key refutes the other one's lines: of a log they refuse the note, of a witness they count for nothing.
        if algorithm is Algorithm.ED25519:
            with pytest.raises(TamperError, match="does not hold"):
                open_checkpoint(encode_note(Note(text, (one.sign(text),))), two.key)


def test_a_note_that_no_known_key_signed_is_refused() -> None:
    log, witness = log_signer(), witness_signer()
    text = Checkpoint(log.key.name, 3, b"r" * 32).text()
    with pytest.raises(TamperError, match="no signature of a known key"):
        open_checkpoint(encode_note(Note(text, (log_signer(seed=5).sign(text),))), log.key)
    with pytest.raises(TamperError, match="not signed by the log's own key"):
        open_checkpoint(encode_note(Note(text, (witness.cosign(text, 1),))), log.key, [witness.key])


def test_a_checkpoint_of_another_log_is_refused() -> None:
    log = log_signer()
    text = Checkpoint("another.example/log", 3, b"r" * 32).text()
    with pytest.raises(TamperError, match=r"another\.example/log"):
        open_checkpoint(encode_note(Note(text, (log.sign(text),))), log.key)


def test_a_cosignature_and_a_signature_by_one_key_are_not_taken_for_each_other() -> None:
    plain = NoteSigner.from_key("name", key(6), Algorithm.ED25519)
    cosigner = NoteSigner.from_key("name", key(6), Algorithm.COSIGNATURE)
    assert plain.key.key_id != cosigner.key.key_id
    line = plain.sign("text\n")
    with pytest.raises(TamperError):
        cosigner.key.verify("text\n", line.data)
    with pytest.raises(TamperError):
        plain.key.verify("text\n", cosigner.cosign("text\n", 1).data)


def ml_dsa(name: str, seed: bytes) -> NoteSigner:
    return NoteSigner.from_ml_dsa(name, MlDsaKey.from_seed(seed * 32))


def test_an_ml_dsa_message_is_laid_out_as_the_specification_says() -> None:
    signer = ml_dsa("example.com/w", b"1")
    text = Checkpoint("example.com/log", 258, b"r" * 32).text()
    expected = (
        b"subtree/v1\n\0"
        + b"\x0dexample.com/w"
        + (1679315147).to_bytes(8, "big")
        + b"\x0fexample.com/log"
        + bytes(8)
        + b"\0\0\0\0\0\0\x01\x02"
        + b"r" * 32
    )
    assert signed_message(signer.key, text, 1679315147) == expected
    line = signer.cosign(text, 1679315147)
    assert len(line.data) == 8 + 2420 and line.data[:8] == expected[26:34]
    # Checked with the library alone: nothing of ours between the bytes above and the signature.
    MLDSA44PublicKey.from_public_bytes(signer.key.public).verify(line.data[8:], expected)
    material = b"example.com/w\n\x06" + signer.key.public
    assert signer.key.key_id == sha256(material).digest()[:4]
    assert b64decode(str(signer.key).split("+", 2)[2]) == b"\x06" + signer.key.public


def test_a_log_signs_with_both_algorithms_and_either_is_enough_or_one_is_demanded() -> None:
    log, quantum, witness = log_signer(), ml_dsa(log_signer().key.name, b"2"), ml_dsa("w.example/1", b"3")
    text = Checkpoint(log.key.name, 3, b"r" * 32).text()
    both = Note(text, (log.sign(text), quantum.sign(text, 5), witness.cosign(text, 7)))
    keys = (log.key, quantum.key)
    signed = open_checkpoint(encode_note(both), keys, [witness.key])
    assert [by.key for by in signed.signed] == list(keys), "the log's own ML-DSA line is no cosignature"
    assert [(by.key, by.time_s) for by in signed.cosigned] == [(witness.key, 7)]
    only_ed25519 = Note(text, (log.sign(text), witness.cosign(text, 7)))
    assert open_checkpoint(encode_note(only_ed25519), keys).checkpoint.size == 3
    with pytest.raises(TamperError, match="not signed by the log's own key"):
        open_checkpoint(encode_note(only_ed25519), quantum.key, [witness.key])
    other = Checkpoint(log.key.name, 4, b"r" * 32).text()
    bad = Note(text, (log.sign(text), quantum.sign(other, 5)))
    with pytest.raises(TamperError, match="does not hold"):
        open_checkpoint(encode_note(bad), keys)


def test_an_ml_dsa_cosignature_without_a_time_does_not_count() -> None:
    log, witness = log_signer(), ml_dsa("w.example/1", b"3")
    text = Checkpoint(log.key.name, 3, b"r" * 32).text()
    untimed = witness.sign(text)
    assert witness.key.verify(text, untimed.data) == 0
    note = Note(text, (log.sign(text), untimed))
    assert open_checkpoint(encode_note(note), log.key, [witness.key]).cosigned == ()


def test_an_ml_dsa_signature_is_of_one_name_time_origin_size_and_root() -> None:
    witness, twin = ml_dsa("w.example/1", b"3"), ml_dsa("w.example/2", b"3")
    text = Checkpoint("example.com/log", 3, b"r" * 32).text()
    line = witness.cosign(text, 7)
    assert witness.key.verify(text, line.data) == 7
    for key_, changed, data in (
        (twin.key, text, line.data),
        (witness.key, text, bytes(7) + b"\x08" + line.data[8:]),
        (witness.key, Checkpoint("example.com/log2", 3, b"r" * 32).text(), line.data),
        (witness.key, Checkpoint("example.com/log", 4, b"r" * 32).text(), line.data),
        (witness.key, Checkpoint("example.com/log", 3, b"s" * 32).text(), line.data),
        (witness.key, text, line.data[:-1]),
        (witness.key, text, line.data + b"\0"),
        (witness.key, "text\n", line.data),
        (witness.key, text, b""),
    ):
        with pytest.raises(TamperError):
            key_.verify(changed, data)


def test_sixteen_ml_dsa_signatures_fit_a_note() -> None:
    log = log_signer()
    text = Checkpoint(log.key.name, 3, b"r" * 32).text()
    witnesses = [ml_dsa(f"w.example/{at:02}", bytes([at + 1])) for at in range(16)]
    note = Note(text, (log.sign(text), *(witness.cosign(text, 7) for witness in witnesses)))
    signed = open_checkpoint(encode_note(note), log.key, [witness.key for witness in witnesses])
    assert len(signed.cosigned) == 16
    lines = note.signatures[1:]
    assert parse_signatures(encode_signatures(lines)) == lines


def test_signature_lines_alone_have_no_text_before_them() -> None:
    for data in (b"", b"\n", b"text\n\n\xe2\x80\x94 name AAAAAAA=\n", b"\n\n\xe2\x80\x94 name AAAAAAA=\n"):
        with pytest.raises(TamperError):
            parse_signatures(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text\n",
        b"text\n\n",
        b"text\n\n\xe2\x80\x94 name AAAAAA==",
        b"text\n\n- name AAAAAAA=\n",
        b"text\n\n\xe2\x80\x94 name AAAA\n",
        b"text\n\n\xe2\x80\x94 name AAAAAAA\n",
        b"text\n\n\xe2\x80\x94 name AAAAAAB=\n",
        b"text\n\n\xe2\x80\x94 na+me AAAAAAA=\n",
        b"text\n\n\xe2\x80\x94  AAAAAAA=\n",
        b"te\x01xt\n\n\xe2\x80\x94 name AAAAAAA=\n",
        b"te\xffxt\n\n\xe2\x80\x94 name AAAAAAA=\n",
        b"text\r\n\r\n\xe2\x80\x94 name AAAAAAA=\r\n",
        b"text\n\n" + b"\xe2\x80\x94 name AAAAAAA=\n" * 65,
        b"a" * (NOTE_BYTES_MAX + 1),
    ],
)
def test_what_is_no_note_is_refused(data: bytes) -> None:
    with pytest.raises(TamperError):
        parse_note(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "origin\n",
        "origin\n1\n",
        "origin\n1\n\n",
        "origin\n01\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "origin\n-1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "origin\n\u0661\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "origin\n99999999999999999999\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "origin\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2=\n",
        "origin\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2J=\n",
        "origin\n1\nAAAA\n",
        "origin\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=",
        "origin\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\nextension\n",
    ],
)
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(TamperError):
        Checkpoint.parse(text)


@given(
    st.integers(1, 2**62), st.binary(min_size=32, max_size=32), st.lists(st.sampled_from(["a", "b c", "—"]))
)
def test_checkpoints_go_round(size: int, root: bytes, extensions: list[str]) -> None:
    checkpoint = Checkpoint("origin", size, root, tuple(extensions))
    assert Checkpoint.parse(checkpoint.text()) == checkpoint


@given(st.data())
def test_no_flipped_bit_of_a_signed_checkpoint_passes(data: st.DataObject) -> None:
    log, witness = log_signer(), witness_signer()
    text = Checkpoint(log.key.name, 3, b"r" * 32).text()
    whole = encode_note(Note(text, (log.sign(text), witness.cosign(text, 7))))
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        signed = open_checkpoint(bytes(changed), log.key, [witness.key])
    except FelixError:
        return
    assert signed.cosigned == (), "only a witness whose name or key id was changed is ignored"
    assert signed.note.text == text


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_note(data: bytes) -> None:
    for candidate in (data, b"text\n\n\xe2\x80\x94 " + data):
        try:
            parse_note(candidate)
        except TamperError:
            continue
