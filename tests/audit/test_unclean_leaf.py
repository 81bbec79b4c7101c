"""Leaves of unclean elections: what the statement says, and nothing else."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec
import pytest

from audit.leaf import SENTENCE_CHARS_MAX, Header, Kind, Leaf, decode_leaf, encode_leaf
from audit.unclean_leaf import (
    BROKERS_MAX,
    WHY_CHARS_MAX,
    UncleanElection,
    mistake,
    told,
    unclean_leaf,
)
from felix.errors import CorruptionError, RequestError

OPERATOR = "spiffe://us-east.acme/operator/alice"
WRITER = "spiffe://us-east.acme/broker/b1"


def statement(**more: Any) -> UncleanElection:
    fields: dict[str, Any] = {
        "stream": "acme/ops/orders",
        "incarnation": "ab" * 16,
        "shard": 3,
        "epoch": 9,
        "election": "0123456789abcdef",
        "cause": "recovered",
        "leader": "b2",
        "end": 20,
        "given_up": ("b1", "b3"),
        "powered_off": True,
        "by": OPERATOR,
    }
    return UncleanElection(**(fields | more))


def leaf(said: UncleanElection) -> Leaf:
    return unclean_leaf(said, region="us-east", time_ms=5, writer=WRITER)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cause": "power-cut", "by": "", "given_up": (), "powered_off": False, "end": None},
        {"cause": "reconciled", "by": "", "why": "those may have been b1, b3"},
    ],
)
def test_a_statement_goes_round_and_its_leaf_agrees(more: dict[str, Any]) -> None:
    said = statement(**more)
    again = decode_leaf(encode_leaf(leaf(said)))
    assert again == leaf(said) and UncleanElection.decode(again.header.document, "it") == said
    assert mistake(again.header) == ""
    assert again.header.actor == (said.by or WRITER)


def test_the_sentence_names_what_may_be_lost_and_who_had_it() -> None:
    assert statement().sentence == (
        "Broker b2, whose copy ends before record 20, leads shard 3 of acme/ops/orders from epoch 9 on, and may lack what was acknowledged before. "
        "Given up: b1, b3 (said to be powered off)."
    )
    alone = statement(end=None, given_up=(), why="no copy is sure to have them all").sentence
    assert alone.startswith("Broker b2 leads shard 3") and alone.endswith(
        "Given up: nobody's copy. No copy is sure to have them all."
    )


@pytest.mark.parametrize(
    "more",
    [
        {"given_up": tuple(f"us-east-broker-{number:03}" for number in range(BROKERS_MAX))},
        {"cause": "reconciled", "by": "", "why": "x" * WHY_CHARS_MAX, "given_up": ("b" * 63,) * 16},
        {
            "stream": "/".join(["s" * 63] * 3),
            "shard": (1 << 31) - 1,
            "epoch": (1 << 32) - 1,
            "end": (1 << 63) - 1,
            "election": "f" * 64,
            "leader": "b" * 63,
            "given_up": ("b" * 63,) * BROKERS_MAX,
            "by": f"spiffe://us-east.acme/operator/{'a' * 63}",
            "why": "\0" * WHY_CHARS_MAX,
        },
    ],
)
def test_the_longest_statement_has_a_leaf_too(more: dict[str, Any]) -> None:
    said = statement(**more)
    header = decode_leaf(encode_leaf(leaf(said))).header
    assert UncleanElection.decode(header.document, "it") == said and mistake(header) == ""
    assert header.sentence.startswith(f"Broker {said.leader}") and told(header) == {
        "sentence": header.sentence
    }


@pytest.mark.parametrize("powered_off", [True, False])
@pytest.mark.parametrize("why", ["", "w" * WHY_CHARS_MAX, "ŉ" * WHY_CHARS_MAX])
@pytest.mark.parametrize("name", [*range(15, 64, 8)])
def test_a_sentence_that_is_shortened_has_whole_names_how_many_more_and_what_is_said_of_all(
    name: int, why: str, powered_off: bool
) -> None:
    """A name that is cut is another broker's, and two statements that differ in what is cut off are told alike."""
    brokers = tuple(f"b{number:03}".ljust(name, "x") for number in range(BROKERS_MAX))
    sentence = statement(given_up=brokers, why=why, powered_off=powered_off).sentence
    assert len(sentence) <= SENTENCE_CHARS_MAX
    names = sentence.partition("Given up: ")[2].partition(" and ")[0].split(", ")
    assert names == list(brokers[: len(names)]) and len(names) >= 15
    assert f" and {BROKERS_MAX - len(names)} more" in sentence
    assert ("(said to be powered off)" in sentence) == powered_off
    assert ("…" in sentence) == bool(why)


def test_a_statement_that_says_a_thing_twice_is_found() -> None:
    """One reader of JSON takes the first, and another the last."""
    header, whole = leaf(statement()).header, statement().encode()
    for data in (whole[:-1] + b',"leader":"b1"}', whole.replace(b":", b": ", 1)):
        assert UncleanElection.decode(data, "it").stream == "acme/ops/orders"
        changed = msgspec.structs.replace(header, document=data, document_sha256=sha256(data).digest())
        assert mistake(changed) == "UNCLEAN: Its document is not written as a statement is."


def test_what_is_shown_of_a_leaf_is_what_its_statement_says() -> None:
    header = msgspec.structs.replace(leaf(statement()).header, sentence="Nothing was lost.")
    assert mistake(header) == "" and told(header) == {"sentence": statement().sentence}
    assert told(msgspec.structs.replace(header, document=b"{}")) == {}
    assert told(msgspec.structs.replace(header, kind=Kind.DENY)) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", "acme/ops/others"),
        ("shard", 4),
        ("source_epoch", 8),
        ("incarnation", b"i" * 16),
        ("actor", WRITER),
        ("action", "reconcile"),
    ],
)
def test_a_leaf_that_says_something_else_than_its_statement_is_found(name: str, value: object) -> None:
    header: Header = msgspec.structs.replace(leaf(statement()).header, **{name: value})
    assert decode_leaf(encode_leaf(Leaf(header))).header == header
    assert mistake(header) == f"UNCLEAN: leaf and statement differ in {name}."


@pytest.mark.parametrize(
    "change",
    [
        {"stream": "no name"},
        {"leader": "B 2"},
        {"given_up": ["b1", "../b3"]},
        {"by": "alice"},
        {"cause": "chance"},
        {"epoch": 0},
        {"incarnation": "ab"},
        {"of_later": 1},
    ],
)
def test_what_is_no_statement_is_neither_read_nor_written(change: dict[str, Any]) -> None:
    data = msgspec.json.encode(msgspec.to_builtins(statement()) | change)
    with pytest.raises(CorruptionError, match="is no statement of an unclean election"):
        UncleanElection.decode(data, "it")
    header = msgspec.structs.replace(
        leaf(statement()).header, document=data, document_sha256=sha256(data).digest()
    )
    assert "UNCLEAN: Its document is no statement" in mistake(header)
    if "of_later" not in change:
        with pytest.raises(CorruptionError):
            statement(**change).encode()


def test_it_needs_its_statement_and_is_of_version_2() -> None:
    whole = leaf(statement()).header
    assert whole.kind is Kind.UNCLEAN
    with pytest.raises(RequestError, match="needs document"):
        encode_leaf(Leaf(msgspec.structs.replace(whole, document=b"")))
    with pytest.raises(RequestError, match="version 1 has no kind UNCLEAN"):
        encode_leaf(Leaf(whole, b"", 1))
