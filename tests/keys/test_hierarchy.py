"""The tree of keys, its states and its entries."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.errors import Code, CorruptionError, RequestError
from keys.errors import KeyDestroyedError
from keys.hierarchy import (
    TRANSITIONS,
    DataEntry,
    Hierarchy,
    KeyEvent,
    KeyState,
    RootEntry,
    StreamEntry,
    decode_entry,
    encode_entry,
    next_state,
)
from keys.key_id import KeyKind, new_key_id


def key_id(kind: KeyKind, number: int = 0, region: str = "us-east") -> bytes:
    return new_key_id(region, kind, number.to_bytes(11, "big"))


ROOT = RootEntry(key_id(KeyKind.ROOT), KeyState.ACTIVE, 1)
STREAM = StreamEntry(key_id(KeyKind.STREAM), "a/b/c", b"i" * 16, ROOT.key_id, b"w", KeyState.ACTIVE, 2)
DATA = DataEntry(key_id(KeyKind.DATA), STREAM.key_id, 0, 1, b"w", b"c" * 32, 3)


@pytest.mark.parametrize("state", KeyState)
@pytest.mark.parametrize("event", KeyEvent)
def test_a_state_changes_only_along_the_table(state: KeyState, event: KeyEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        expected = KeyDestroyedError if state is KeyState.DESTROYED else RequestError
        with pytest.raises(expected):
            next_state(state, event)


def test_nothing_leads_out_of_destroyed_and_everything_leads_there() -> None:
    assert not [event for state, event in TRANSITIONS if state is KeyState.DESTROYED]
    for state in set(KeyState) - {KeyState.DESTROYED}:
        assert next_state(state, KeyEvent.DESTROY) is KeyState.DESTROYED


@pytest.mark.parametrize("entry", [ROOT, STREAM, DATA], ids=["root", "stream", "data"])
def test_entries_come_back_as_they_were(entry: RootEntry | StreamEntry | DataEntry) -> None:
    assert decode_entry(encode_entry(entry)) == entry


@given(st.binary(max_size=100))
def test_bytes_that_are_no_entry_are_corruption(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_entry(data)


def test_a_tree_written_out_builds_itself_again() -> None:
    tree = Hierarchy("us-east")
    for entry in (ROOT, STREAM, DATA):
        tree.apply(entry)
    again = Hierarchy("us-east")
    for each in tree.entries():
        again.apply(each)
    assert again == tree
    assert again.active_root() == ROOT.key_id
    assert again.wrapped_under(ROOT.key_id) == [STREAM]


@pytest.mark.parametrize(
    "entries",
    [
        [STREAM],
        [ROOT, DATA],
        [ROOT, RootEntry(key_id(KeyKind.ROOT, 1), KeyState.ACTIVE, 1)],
        [RootEntry(key_id(KeyKind.ROOT, region="eu-west"), KeyState.ACTIVE, 1)],
        [RootEntry(key_id(KeyKind.DATA), KeyState.ACTIVE, 1)],
        [ROOT, StreamEntry(STREAM.key_id, "no name", b"i" * 16, ROOT.key_id, b"w", KeyState.ACTIVE, 1)],
        [ROOT, STREAM, StreamEntry(key_id(KeyKind.STREAM, 1), "a/b/c", b"i" * 16, ROOT.key_id, b"w", KeyState.ACTIVE, 1)],
        [ROOT, STREAM, StreamEntry(STREAM.key_id, "a/b/d", b"i" * 16, ROOT.key_id, b"w", KeyState.ACTIVE, 1)],
        [ROOT, StreamEntry(STREAM.key_id, "a/b/c", b"i" * 16, ROOT.key_id, b"", KeyState.ACTIVE, 1)],
        [ROOT, StreamEntry(STREAM.key_id, "a/b/c", b"i" * 16, ROOT.key_id, b"w", KeyState.PENDING, 1)],
        [ROOT, StreamEntry(STREAM.key_id, "a/b/c", b"i" * 16, ROOT.key_id, b"w", KeyState.DESTROYED, 1)],
        [ROOT, STREAM, StreamEntry(STREAM.key_id, "a/b/c", b"i" * 16, b"", b"", KeyState.DESTROYED, 1), STREAM],
        [ROOT, STREAM, DATA, DATA],
        [ROOT, STREAM, DataEntry(DATA.key_id, STREAM.key_id, 0, 1, b"", b"", 1)],
    ],
    ids=[
        "stream without root", "data without stream", "two active roots", "foreign root", "wrong kind", "bad name",
        "second key of an incarnation", "key moved to another stream", "active without bytes", "pending stream key",
        "destroyed with bytes", "back from destruction", "data twice", "data without bytes",
    ],
)  # fmt: skip
def test_entries_that_break_the_tree_are_corruption(
    entries: list[RootEntry | StreamEntry | DataEntry],
) -> None:
    tree = Hierarchy("us-east")
    for entry in entries[:-1]:
        tree.apply(entry)
    with pytest.raises(CorruptionError) as caught:
        tree.apply(entries[-1])
    assert caught.value.code is Code.CORRUPTION


def test_the_documentation_prints_the_table_that_the_code_runs_on() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "keys.md").read_text()
    section = text.split("## States\n")[1].split("\n## ")[0]
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in section.splitlines()
        if "|" in line
    ]
    assert rows[2:] == [(str(state), str(event), str(after)) for (state, event), after in TRANSITIONS.items()]
