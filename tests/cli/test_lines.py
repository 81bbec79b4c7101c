"""Lines of an input, and the records they become: pure."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import felix
from cli.lines import LINE_BYTES_MAX, InvalidLineError, LineParser, LineSplitter, LongLine
from cli.publish import RUNS_MAX, Tally
from felix.batch import MESSAGE_ID_HEADER, NewRecord
from felix.publisher_core import PublishProgress


def split(pieces: list[bytes]) -> list[object]:
    splitter = LineSplitter()
    lines: list[object] = [line for piece in pieces for line in splitter.feed(piece)]
    return [*lines, *splitter.finish()]


@given(st.lists(st.text("ab\r\n", max_size=6).map(str.encode), max_size=8))
def test_lines_are_the_same_however_the_input_is_cut(pieces: list[bytes]) -> None:
    whole = b"".join(pieces).split(b"\n")
    last = whole.pop()
    wanted = [line.removesuffix(b"\r") for line in whole] + ([last.removesuffix(b"\r")] if last else [])
    assert split(pieces) == split([b"".join(pieces)]) == wanted


@pytest.mark.parametrize("cut", [1 << 14, LINE_BYTES_MAX, 8 << 20])
def test_a_line_that_is_too_long_keeps_its_beginning_and_its_size(cut: int) -> None:
    data = b"a\n" + b"x" * (LINE_BYTES_MAX + 1) + b"\n" + b"y" * LINE_BYTES_MAX + b"\nb"
    lines = split([data[at : at + cut] for at in range(0, len(data), cut)])
    assert lines[1] == LongLine(b"x" * 1024, LINE_BYTES_MAX + 1)
    assert [lines[0], lines[2], lines[3]] == [b"a", b"y" * LINE_BYTES_MAX, b"b"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"id": null}', "has a field 'id' that is null"),
        (b'{"other": 1}', "has no field 'id'"),
        (b"[1]", "is not a JSON object"),
        (b'{"id": "\xff"}', "is not a JSON object"),
        (b"[" * 100_000, "is not a JSON object"),
        (b'{"id": "' + b"k" * 5_000 + b'"}', "4,096 are allowed"),
        (LongLine(b"x", LINE_BYTES_MAX + 7), "bytes, and 1,048,576 are allowed"),
    ],
)
def test_an_invalid_line_says_its_number_and_why(line: bytes | LongLine, why: str) -> None:
    with pytest.raises(InvalidLineError) as caught:
        LineParser("id").parse(3054, line)
    assert caught.value.number == 3054 and why in caught.value.why
    assert caught.value.sentence.startswith("Line 3054 ")


def test_a_line_without_its_key_names_every_way_out() -> None:
    with pytest.raises(InvalidLineError) as caught:
        LineParser("id").parse(3, b'{"other": 1}')
    assert "--key-field" in caught.value.hint and "--skip-invalid FILE" in caught.value.hint


def test_fields_become_key_and_message_id() -> None:
    parser = LineParser("n", "id", {"h": b"x"})
    assert [parser.parse(1, line) for line in (b'{"id": "a", "n": 7}', b"", b'{"id": "b", "n": [1, 2]}')] == [
        NewRecord(b'{"id": "a", "n": 7}', b"7", {"h": b"x", MESSAGE_ID_HEADER: b"a"}),
        None,
        NewRecord(b'{"id": "b", "n": [1, 2]}', b"[1,2]", {"h": b"x", MESSAGE_ID_HEADER: b"b"}),
    ]
    for parser, key in (
        (LineParser("n", headers={"h": b"x"}), b"7"),
        (LineParser(headers={"h": b"x"}), None),
    ):
        assert parser.parse(1, b'{"n":7}') == NewRecord(b'{"n":7}', key, {"h": b"x"})
    with pytest.raises(InvalidLineError, match="has no message id in its field 'id': A message id is"):
        LineParser("", "id").parse(1, b'{"id": ""}')


class Asked:
    """A publisher that only says how far it has come."""

    def __init__(self) -> None:
        self.progress = PublishProgress(0, 0, 0, {})


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 60))
def test_the_line_to_go_on_from_is_the_first_without_an_acknowledged_record(
    published: list[bool], acknowledged: int
) -> None:
    tally, publisher = Tally(0), Asked()
    lines = [number for number, is_record in enumerate(published, 1) if is_record]
    for number, is_record in enumerate(published, 1):
        if is_record:
            tally.publish(number, 1, cast(felix.Publisher, publisher))
        tally.line = number
    acknowledged = min(acknowledged, len(lines))
    tally.progress = PublishProgress(len(lines), acknowledged, acknowledged, {})
    assert tally.next_line == [*lines, len(published) + 1][acknowledged]


def test_what_a_tally_keeps_of_blank_lines_is_bounded_by_what_is_unacknowledged() -> None:
    tally, publisher = Tally(0), Asked()
    for record in range(5 * RUNS_MAX):
        publisher.progress = PublishProgress(record, record - 3, record - 3, {})
        tally.publish(2 * record + 1, 1, cast(felix.Publisher, publisher))
    assert len(tally.runs) <= RUNS_MAX
    tally.progress = PublishProgress(tally.records, tally.records - 2, tally.records - 2, {})
    assert tally.next_line == 2 * (tally.records - 2) + 1
