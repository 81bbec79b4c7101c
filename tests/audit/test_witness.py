"""Witnesses: cosign what continues, refuse what does not, remember before signing."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_log import log_signer, witness_signer

from audit.checkpoint import Checkpoint, open_checkpoint
from audit.merkle import Tree, consistency_proof, leaf_hash
from audit.note import Note, NoteSigner, VerifierKey, encode_note
from audit.witness import DiskWitnessStore, ForkError, MemoryWitnessStore, Witness, WitnessStore
from felix.errors import Code, CorruptionError, RequestError, TamperError, UnavailableError

NOW_S = 1_760_000_000


class Log:
    """A log that can be told to lie."""

    def __init__(self, word: bytes = b"leaf") -> None:
        self.signer = log_signer()
        self.hashes: list[bytes] = []
        self.word = word

    def grow(self, size: int) -> Log:
        for at in range(len(self.hashes), size):
            self.hashes.append(leaf_hash(b"%s %d" % (self.word, at)))
        return self

    def node(self, level: int, index: int) -> bytes:
        tree = Tree()
        for hash_ in self.hashes[index << level : (index + 1) << level]:
            tree.add(hash_)
        return tree.root()

    def note(self, size: int, signer: NoteSigner | None = None) -> bytes:
        tree = Tree()
        for hash_ in self.hashes[:size]:
            tree.add(hash_)
        text = Checkpoint(self.signer.key.name, size, tree.root()).text()
        return encode_note(Note(text, ((signer or self.signer).sign(text),)))

    def proof(self, old: int, new: int) -> list[bytes]:
        return consistency_proof(old, new, self.node)


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> WitnessStore:
    return MemoryWitnessStore() if request.param == "memory" else DiskWitnessStore(tmp_path / "witness")


def test_a_note_takes_the_place_of_the_one_that_was_read_or_not_at_all(store: WitnessStore) -> None:
    store.swap("log", None, b"1")
    for wrong in (None, b"0", b"2"):
        with pytest.raises(UnavailableError) as refused:
            store.swap("log", wrong, b"2")
        assert refused.value.code is Code.CONFLICT and store.last("log") == b"1"
    store.swap("log", b"1", b"2")
    assert store.last("log") == b"2" and store.last("other") is None


def witness_of(store: WitnessStore) -> Witness:
    return Witness(witness_signer(), [log_signer().key], store, lambda: NOW_S)


def test_a_log_that_grows_is_cosigned(store: WitnessStore) -> None:
    witness, log = witness_of(store), Log().grow(100)
    assert witness.last(log.signer.key.name) is None
    old = 0
    for size in (0, 1, 5, 5, 64, 100):
        cosigned = witness.cosign(log.note(size), log.proof(old, size))
        signed = open_checkpoint(cosigned, log.signer.key, [witness.key])
        assert [(by.key, by.time_s) for by in signed.cosigned] == [(witness.key, NOW_S)]
        last = witness.last(log.signer.key.name)
        assert last is not None and last.size == size
        old = size


def test_a_rollback_is_refused_with_both_notes(store: WitnessStore) -> None:
    witness, log = witness_of(store), Log().grow(10)
    witness.cosign(log.note(10), [])
    with pytest.raises(ForkError, match="10 leaves were cosigned, it offers 9") as caught:
        witness.cosign(log.note(9), [])
    assert caught.value.code is Code.ROLLED_BACK
    assert open_checkpoint(caught.value.cosigned, log.signer.key).checkpoint.size == 10
    assert open_checkpoint(caught.value.offered, log.signer.key).checkpoint.size == 9


def test_another_root_of_the_same_size_is_refused(store: WitnessStore) -> None:
    witness = witness_of(store)
    witness.cosign(Log().grow(10).note(10), [])
    with pytest.raises(ForkError, match="two roots"):
        witness.cosign(Log(b"fork").grow(10).note(10), [])


def test_a_fork_is_refused_whatever_proof_it_brings(store: WitnessStore) -> None:
    witness, honest, fork = witness_of(store), Log().grow(20), Log(b"fork").grow(20)
    witness.cosign(honest.note(10), [])
    for proof in (fork.proof(10, 20), honest.proof(10, 20), [], [b"x" * 32]):
        with pytest.raises(ForkError, match="does not show"):
            witness.cosign(fork.note(20), proof)
    with pytest.raises(TamperError):
        witness.cosign(honest.note(20), [b"x" * 32] * 200)
    witness.cosign(honest.note(20), honest.proof(10, 20))


def test_what_was_remembered_holds_after_a_restart(tmp_path: Path) -> None:
    log = Log().grow(20)
    witness_of(DiskWitnessStore(tmp_path)).cosign(log.note(10), [])
    again = witness_of(DiskWitnessStore(tmp_path))
    with pytest.raises(ForkError):
        again.cosign(log.note(9), [])
    again.cosign(log.note(20), log.proof(10, 20))


def test_nothing_is_signed_before_it_is_remembered() -> None:
    class Failing(MemoryWitnessStore):
        def swap(self, origin: str, before: bytes | None, note: bytes) -> None:
            raise OSError(28, "No space left on device")

    signed: list[str] = []
    signer = witness_signer()
    counting = NoteSigner(signer.key, lambda text: signed.append(text) or signer.sign_message(text))  # type: ignore[func-returns-value]
    witness = Witness(counting, [log_signer().key], Failing(), lambda: NOW_S)
    with pytest.raises(OSError, match="No space"):
        witness.cosign(Log().grow(3).note(3), [])
    assert signed == []


def test_an_unknown_log_and_a_forged_note_are_refused(store: WitnessStore) -> None:
    witness = Witness(witness_signer(), [], store, lambda: NOW_S)
    log = Log().grow(3)
    with pytest.raises(RequestError, match="not one that is cosigned here"):
        witness.cosign(log.note(3), [])
    witness.trust(log.signer.key)
    with pytest.raises(TamperError):
        witness.cosign(log.note(3, log_signer(seed=8)), [])
    with pytest.raises(TamperError, match="needs no proof"):
        witness.cosign(log.note(3), [b"x" * 32])
    witness.cosign(log.note(3), [])


def test_an_origin_keeps_its_key(store: WitnessStore) -> None:
    witness = witness_of(store)
    witness.trust(log_signer().key)
    with pytest.raises(RequestError, match="another key"):
        witness.trust(log_signer(seed=8).key)


def between(key: VerifierKey, from_size: int, to_size: int | None) -> VerifierKey:
    return VerifierKey(key.name, key.algorithm, key.public, from_size, to_size)


@pytest.mark.parametrize("stands_at", [0, 5, 10])
@pytest.mark.parametrize("offered", [5, 8, 10])
def test_who_has_a_key_that_ended_has_no_other_history_cosigned_up_to_its_end_either(
    store: WitnessStore, stands_at: int, offered: int
) -> None:
    """Of all that the key may have signed, the witness knows no root: the log itself shows what its keys of now have signed."""
    log, thief = Log().grow(12), Log().grow(5)
    thief.word = b"other"
    thief.grow(12)
    old, new = log.signer, log_signer(seed=77)
    witness = Witness(witness_signer(), [old.key], store, lambda: NOW_S)
    if stands_at:
        witness.cosign(log.note(stands_at), [])
    witness.follow([between(old.key, 0, 10), between(new.key, 10, None)])
    proof = thief.proof(stands_at, offered) if 0 < stands_at < offered else []
    if (stands_at, offered) == (5, 5):
        witness.cosign(log.note(5), [])  # what it has cosigned, once more
    else:
        with pytest.raises(CorruptionError):
            witness.cosign(thief.note(offered), proof)
    # And the log goes on, from the checkpoint where its keys meet as well.
    for size in (10, 12):
        last = witness.last(log.signer.key.name)
        start = 0 if last is None else last.size
        witness.cosign(log.note(size, new), log.proof(start, size) if 0 < start < size else [])


def test_a_log_all_of_whose_keys_have_ended_is_cosigned_to_its_end(store: WitnessStore) -> None:
    log = Log().grow(10)
    witness = Witness(witness_signer(), [between(log.signer.key, 0, 10)], store, lambda: NOW_S)
    assert open_checkpoint(witness.cosign(log.note(10), []), log.signer.key).checkpoint.size == 10
