"""Which of the words of several policy keys of a region counts, what a broker keeps of them over a restart, and its first start."""

from __future__ import annotations

import errno
import os
import random
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pytest

from felix.errors import Code, UnavailableError
from felix.runtime.real import REAL
from felix.storage.disk import PRIVATE_FILES
from felix.storage.port import Files
from keys.signing import SigningKey
from policy.grant import DenyEntry, Standing, StandingAction, sign_deny, sign_standing
from policy.signed import SignedDocument
from region.trust.trust_store import Memory, Newest, place_of

GRANT, HIGHEST = "g-aaaaaaaaaaaaaaaa", (1 << 53) - 1
KEYS = {name: SigningKey.generate() for name in ("k1", "k2", "k3")}


class Said(NamedTuple):
    """A word of a region: the key that signed it, its number, and where its leaf stands; None where it has none yet."""

    key: str
    number: int
    forbids: bool
    leaf: int | None

    def document(self, what: str) -> SignedDocument:
        key = KEYS[self.key].private_key
        if what == "deny":
            entry = DenyEntry(
                streams="acme/ops/*", peer="*", region="eu-west", sequence=self.number, at=1, by="a", lifted=not self.forbids
            )  # fmt: skip
            return sign_deny(entry, key)
        action = StandingAction.PAUSE if self.forbids else StandingAction.RESUME
        standing = Standing(grant=GRANT, action=action, region="eu-west", sequence=self.number, at=1, by="a")
        return sign_standing(standing, key)


def pause(key: str, number: int, leaf: int | None) -> Said:
    return Said(key, number, True, leaf)


def resume(key: str, number: int, leaf: int | None) -> Said:
    return Said(key, number, False, leaf)


def counts(said: tuple[Said, ...], now: tuple[str, ...], what: str = "stand") -> Said:
    """The word that counts, in whichever order a broker takes them."""
    documents = {each.document(what): each for each in said}
    trusted = {"eu-west": tuple(KEYS[name].verify_key.public for name in now)}
    found = set[SignedDocument]()
    for order in permutations(documents):
        newest = Newest()
        for document in order:
            newest.take(document)
        found.update(newest.in_force(trusted, lambda document: documents[document].leaf))
    (one,) = found
    return documents[one]


CASES = {
    "one key goes by numbers": ((pause("k1", 2, 0), resume("k1", 3, 1)), ("k1",), 1),
    "whatever came last": ((resume("k1", 3, 0), pause("k1", 2, 1)), ("k1",), 0),
    "a former key's word stays": ((pause("k1", HIGHEST, 0),), ("k2",), 0),
    "and is lifted by a later one": ((pause("k1", HIGHEST, 0), resume("k2", 1, 1)), ("k2",), 1),
    "by none that came before it": ((pause("k1", 1, 1), resume("k2", 2, 0)), ("k2",), 0),
    "by none under another former key": ((pause("k1", 1, 0), resume("k2", 2, 1)), ("k3",), 0),
    "nor while its own leaf is missing": ((pause("k1", 1, None), resume("k2", 1, 5)), ("k2",), 0),
    "nor where the lifting's is not known": ((pause("k1", 1, 0), resume("k2", 2, None)), ("k2",), 0),
    "a former lifting lifts nothing": ((resume("k1", HIGHEST, 0), pause("k2", 1, 1)), ("k2",), 1),
    "nor once all are former": ((resume("k1", HIGHEST, 0), pause("k2", 1, 1)), ("k3",), 1),
    "nor where its key comes back": ((resume("k1", HIGHEST, 0), pause("k2", 1, 1)), ("k1",), 1),
    "two keys of now go by numbers": ((pause("k1", 5, 1), resume("k2", 6, 0)), ("k1", "k2"), 1),
    "of two former ones each is lifted": (
        (pause("k1", HIGHEST, 0), pause("k2", 1, 1), resume("k3", 1, 2)),
        ("k3",),
        2,
    ),
    "or none": ((pause("k1", HIGHEST, 0), resume("k3", 1, 1), pause("k2", 1, 2)), ("k3",), 2),
    "nobody's keys are known": ((pause("k1", 1, 0), resume("k2", 2, 1)), (), 0),
}


@pytest.mark.parametrize("what", ["stand", "deny"])
@pytest.mark.parametrize("case", CASES)
def test_which_word_counts(case: str, what: str) -> None:
    said, now, which = CASES[case]
    assert counts(said, now, what) == said[which]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_opens_but_by_a_word_under_a_key_of_now(seed: int) -> None:
    """A region says what it likes, under the keys that it has then, and changes them. Where something is forbidden, a word of the key that forbade
    with a higher number lifts it, or one under a key of now that came later."""
    chance = random.Random(seed)
    said, now = list[Said](), ("k1",)
    for leaf in range(4):
        now = tuple(chance.sample(sorted(KEYS), chance.choice((1, 1, 2))))
        said.append(Said(chance.choice(now), chance.randrange(6), chance.random() < 0.5, leaf))
    found = counts(tuple(said), now)
    for word in said:
        if word.forbids and not found.forbids:
            lifts = [other for other in said if not other.forbids]
            assert any(
                (other.key == word.key and other.number > word.number)
                or (other.key in now and (other.leaf or 0) > (word.leaf or 0))
                or ({other.key, word.key} <= set(now) and other.number > word.number)
                for other in lifts
            )


def test_a_later_word_of_one_key_outranks_and_one_under_another_key_only_where_both_are_of_now() -> None:
    newest, trusted = Newest(), {"eu-west": (KEYS["k2"].verify_key.public,)}
    newest.take(pause("k1", 5, 0).document("stand"))
    assert newest.outranks(resume("k1", 4, None).document("stand"), trusted)
    assert not newest.outranks(resume("k2", 1, None).document("stand"), trusted)
    both = {"eu-west": tuple(KEYS[name].verify_key.public for name in ("k1", "k2"))}
    assert newest.outranks(resume("k2", 1, None).document("stand"), both)


def test_the_newest_word_of_each_key_is_kept_over_a_restart(tmp_path: Path) -> None:
    memory, newest = Memory(tmp_path / "governance"), Newest()
    kept = [pause("k1", HIGHEST, 0).document("stand"), resume("k2", 1, 1).document("stand")]
    for document in (pause("k1", 3, 0).document("stand"), *kept):
        key = newest.take(document)
        assert key is not None
        memory.keep(key, document.encode_file())
    memory.close()
    found = Memory(tmp_path / "governance").load().documents
    assert sorted(found) == sorted(document.encode_file() for document in kept)
    assert {place_of(document) for document in kept} != {None}


class Faulty:
    """The disk, which refuses one kind of call."""

    def __init__(self, call: str, number: int) -> None:
        self._call, self._number = call, number

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            return self._refuse
        return getattr(PRIVATE_FILES, name)

    def _refuse(self, *given: Any) -> int:
        if self._call == "open" and not given[1] & os.O_CREAT:
            return PRIVATE_FILES.open(*given)
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("call", ["make_folder", "open", "sync", "rename", "sync_folder"])
@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, Code.DISK_FULL), (errno.EACCES, Code.UNAVAILABLE)]
)
def test_a_first_start_that_cannot_be_recorded_does_not_begin(
    tmp_path: Path, call: str, number: int, code: Code
) -> None:
    folder = tmp_path / "governance"
    faulty = Memory(folder, files=cast("Files", Faulty(call, number)))
    with pytest.raises(UnavailableError) as refused:
        faulty.load()
    faulty.close()
    assert refused.value.code is code
    assert (
        str(folder / "trusted") in refused.value.sentence and "start the broker again" in refused.value.hint
    )
    again = Memory(folder)
    assert again.load().trusted == b"", "not from before"
    again.close()


def test_a_first_start_that_was_killed_while_it_wrote_is_no_start_of_before(tmp_path: Path) -> None:
    folder = tmp_path / "governance"
    folder.mkdir()
    (folder / "trusted.tmp").write_bytes(b"")
    memory = Memory(folder)
    assert memory.load().trusted == b""
    memory.close()


class FailingFiles:
    """The disk of this machine, whose new files fail while they are told to."""

    def __init__(self) -> None:
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        if name == "sync" and self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return getattr(PRIVATE_FILES, name)


def test_a_copy_that_could_not_be_kept_is_told_and_tried_again(tmp_path: Path) -> None:
    """It was said in the log, and a start knew nothing of it."""
    files = FailingFiles()
    now_ms = [0]
    clock = type("Clock", (), {"boot_ms": lambda self: now_ms[0]})()
    runtime = msgspec.structs.replace(REAL, clock=clock)
    memory = Memory(tmp_path / "governance", runtime, cast(Files, files))
    memory.load()
    documents = {(f"deny-{number}",): b"%d" % number for number in range(3)}
    files.fails = True
    for key, document in documents.items():
        memory.keep(key, document)
    memory.keep_policy(b"policy")
    memory._writer.submit(int).result()
    assert "4 of the signed documents" in memory.trouble() and "look at the disk" in memory.trouble()
    memory.look()
    memory._writer.submit(int).result()
    assert memory.trouble(), "not before its time"
    files.fails = False
    now_ms[0] += 5_000
    memory.look()
    memory._writer.submit(int).result()
    assert memory.trouble() == ""
    files.fails = True
    memory.keep(("deny-0",), b"later")
    memory._writer.submit(int).result()
    files.fails = False
    memory.close()
    remembered = Memory(tmp_path / "governance").load()
    assert sorted(remembered.documents) == [b"1", b"2", b"later"] and remembered.policy == b"policy"
