"""Which cosigned notes of a log a copy keeps (audit.cosigned_notes)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from hashlib import sha256

import pytest
from audit_log import EGRESS_ORIGIN, log_signer, trust, witness_signer
from hypothesis import given
from hypothesis import strategies as st

from audit import note as note_module
from audit.checkpoint import Checkpoint
from audit.cosigned_notes import Chosen, choose, join, notes_at
from audit.note import Note, NoteSigner, Signature, encode_note, parse_note
from audit.tile import KEPT_MAX, KEPT_PATH
from audit.trust import LogTrust
from felix.errors import RequestError, TamperError

KNOWN = {name: witness_signer(f"{name}.acme/witness") for name in ("eu-west", "ap-south")}
OUTSIDE = {
    name: witness_signer(name, seed) for name, seed in (("harbour.example/w", 91), ("quay.example/w", 92))
}
SIGNERS = KNOWN | OUTSIDE


@pytest.fixture(autouse=True, scope="module")
def lines_verified_once() -> Iterator[None]:
    """Whether a key makes a line hold says the line alone, and a hundred kept notes are looked at again with each that is served."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(note_module, "_verify_line", cache(note_module._verify_line))
        yield


def log(*outside: str) -> LogTrust:
    found = trust("us-east", "eu-west", "ap-south").log(EGRESS_ORIGIN)
    more = {OUTSIDE[name].key: name for name in outside}
    return replace(found, witnesses={**found.witnesses, **more})


@cache
def line(signer: NoteSigner, text: str) -> Signature:
    return signer.cosign(text, 1_800_000_000)


@cache
def note(size: int, *by: str, forged: tuple[str, ...] = ()) -> bytes:
    """The log's checkpoint of so many leaves, cosigned by these; `forged`: lines of these names that do not hold."""
    text = Checkpoint(EGRESS_ORIGIN, size, sha256(b"%d" % size).digest()).text()
    lines = [log_signer(EGRESS_ORIGIN).sign(text), *(line(SIGNERS[name], text) for name in by)]
    for name in forged:
        held = line(SIGNERS[name], text)
        lines.append(held._replace(data=bytes(len(held.data))))
    return encode_note(Note(text, tuple(lines)))


def own(chosen: Chosen | None) -> list[bytes]:
    return [] if chosen is None else list(dict.fromkeys((chosen.newest, chosen.most, *chosen.others)))


def covers(data: bytes, log_: LogTrust) -> tuple[int, frozenset[str]]:
    opened = log_.open(data)
    return opened.checkpoint.size, frozenset(log_.cosigners(opened.cosigned))


def test_a_note_stays_that_says_what_no_newer_one_does() -> None:
    """The finding's: ap-south cosigned 60 leaves, eu-west 50; the log serves only the note of 60."""
    first = choose(log(), [], [note(50, "eu-west")])
    assert own(first) == [note(50, "eu-west")]
    then = choose(log(), own(first), [note(60, "ap-south")])
    assert own(then) == [note(60, "ap-south"), note(50, "eu-west")]
    last = choose(log(), own(then), [note(70, "ap-south", "eu-west"), note(55, "eu-west")])
    assert own(last) == [note(70, "ap-south", "eu-west")]


def test_a_line_of_a_key_that_is_not_known_is_not_cut_out() -> None:
    held = note(50, "eu-west", "harbour.example/w")
    for served in (note(50, "eu-west"), note(60, "eu-west"), note(60, "eu-west", "quay.example/w")):
        assert held in own(choose(log(), [held], [served]))
    # Whether it holds cannot be told: a line of the same key stands for it. With the key it can.
    forged = note(60, "eu-west", forged=("harbour.example/w",))
    assert own(choose(log(), [held], [forged])) == [forged]
    assert own(choose(log("harbour.example/w"), [held], [forged])) == [note(60, "eu-west"), held]
    # One that was taken while the key was not known loses that line alone.
    sound = choose(log("harbour.example/w"), [forged], [note(55, "ap-south")])
    assert own(sound) == [note(60, "eu-west"), note(55, "ap-south")]


def test_notes_without_cosignatures_are_not_kept() -> None:
    assert choose(log(), [note(5)], [note(6)]) is None
    assert own(choose(log(), [note(5)], [note(4, "eu-west")])) == [note(4, "eu-west")]
    assert own(choose(log(), [b"no note\n"], [note(4, "eu-west")])) == [note(4, "eu-west")]


def test_ever_other_names_push_out_no_line_that_was_verified() -> None:
    """A log that lists a stranger of another name each time."""
    text_of = {size: parse_note(note(size, "eu-west")) for size in range(1, 3 * KEPT_MAX)}
    held = [note(200, "eu-west", "ap-south"), note(300, "eu-west")]
    let_go = set[str]()
    for size, base in text_of.items():
        stranger = Signature(f"stranger-{size}", b"abcd", b"x" * 72)
        chosen = choose(log(), held, [encode_note(base.with_signatures([stranger]))])
        held = own(chosen)
        assert chosen is not None
        let_go |= chosen.let_go
        assert len(held) <= KEPT_MAX
    assert held[:2] == [note(300, "eu-west"), note(200, "eu-west", "ap-south")]
    assert let_go and let_go <= {f"stranger-{size}" for size in text_of}


def test_more_than_is_kept_is_refused_where_each_says_something_of_its_own() -> None:
    # A smaller note must say what no larger one does: so there are as many witnesses as notes.
    signers = [witness_signer(f"w{number}.example/w", 100 + number) for number in range(KEPT_MAX + 1)]
    found = log()
    found = replace(found, witnesses={signer.key: signer.key.name for signer in signers})
    notes = []
    for number, signer in enumerate(signers):
        base = parse_note(note(number + 1))
        notes.append(encode_note(base.with_signatures([line(signer, base.text)])))
    assert len(own(choose(found, notes[:-1], []))) == KEPT_MAX
    with pytest.raises(RequestError, match="each say what no other does"):
        choose(found, notes[:-1], notes[-1:])


def test_a_party_with_ever_other_keys_pushes_out_nobody_else_and_stops_no_copy() -> None:
    keys = [witness_signer("ap-south.acme/witness", 100 + number) for number in range(9)]
    parties = {signer.key: "ap-south" for signer in keys}
    found = replace(log(), witnesses={**parties, KNOWN["eu-west"].key: "eu-west"})
    held = [note(3, "eu-west")]
    for size, some in enumerate(itertools.combinations(keys, 4), 5):
        base = parse_note(note(size))
        chosen = choose(
            found, held, [encode_note(base.with_signatures([line(by, base.text) for by in some]))]
        )
        assert chosen is not None and not chosen.let_go
        held = own(chosen)
        assert len(held) <= KEPT_MAX
    assert covers(held[0], found) == (130, frozenset({"ap-south"}))
    assert note(3, "eu-west") in held


def test_beyond_the_room_goes_what_the_fewest_parties_cosigned_and_they_are_named() -> None:
    signers = [witness_signer(f"w{number}.example/w", 100 + number) for number in range(7)]
    found = replace(log(), witnesses={signer.key: signer.key.name for signer in signers})
    sets = [some for count in range(1, 8) for some in itertools.combinations(signers, count)]
    notes = []
    for size, some in zip(range(200, 0, -1), sets, strict=False):
        base = parse_note(note(size))
        notes.append(encode_note(base.with_signatures([line(by, base.text) for by in some])))
    chosen = choose(found, [], notes)
    assert chosen is not None and chosen.let_go
    counts = {len(covers(each, found)[1]) for each in own(chosen)}
    assert len(own(chosen)) == KEPT_MAX and counts == {1, 2, 3, 4, 5, 6, 7}
    assert {covers(each, found) for each in own(chosen)} >= {
        (size, frozenset({signer.key.name})) for size, signer in zip(range(200, 0, -1), signers, strict=False)
    }


@st.composite
def rounds(draw: st.DrawFn) -> list[list[bytes]]:
    some = st.builds(
        lambda size, by, forged: note(size, *sorted(by), forged=tuple(sorted(forged - by))),
        st.integers(1, 9),
        st.frozensets(st.sampled_from(sorted(SIGNERS))),
        st.frozensets(st.sampled_from(sorted(OUTSIDE))),
    )
    return draw(st.lists(st.lists(some, max_size=2), min_size=1, max_size=8))


@given(rounds())
def test_no_cosignature_that_holds_is_ever_lost(served: list[list[bytes]]) -> None:
    """Whatever the log serves, round after round."""
    held: list[bytes] = []
    for notes in served:
        before = held
        held = own(choose(log(), held, notes))
        for data in (*before, *notes):
            size, by = covers(data, log())
            if by:
                assert any(
                    larger >= size and also >= by for larger, also in (covers(each, log()) for each in held)
                )
        # None of them is there for nothing.
        assert len(held) <= 9 * 2 ** len(SIGNERS)


def test_notes_are_read_as_they_were_joined() -> None:
    notes = [note(9, "eu-west", "harbour.example/w"), note(8, "ap-south"), note(7, "eu-west")]
    for count in range(1, 4):
        assert list(notes_at(KEPT_PATH, join(notes[:count])).values()) == notes[:count]
    assert list(notes_at(KEPT_PATH, join(notes))) == [f"checkpoint.kept, note {n}" for n in (1, 2, 3)]
    assert notes_at("checkpoint", notes[0]) == {"checkpoint": notes[0]}
    for damaged in (b"", b"\n", join(notes)[:40], join([notes[0]] * (KEPT_MAX + 1))):
        with pytest.raises(TamperError, match="no list"):
            notes_at(KEPT_PATH, damaged)
