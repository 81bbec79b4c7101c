"""docs/wire.md names every frame with its number and limit, every message with its fields, every flag and reason."""

import re
from pathlib import Path

import msgspec
import pytest

from felix import batch, consumer_messages, messages
from felix.frames import _BYTES_MAX, FrameType, GapReason

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
STRUCTS = [
    held
    for held in {**vars(messages), **vars(consumer_messages)}.values()
    if isinstance(held, type)
    and issubclass(held, messages.Message)
    and held not in (messages.Message, messages.Request, messages.Repeatable)
]
FOLDED = {"subscribe": "Subscribing", "start": "Subscribing", "open_ingest": "Ingest"}
"""Messages whose fields stand in the text of a section instead of a table's row."""


def test_frames_stand_in_the_table_with_number_and_limit() -> None:
    rows = dict(re.findall(r"^\| ([A-Z]+) \| (0x[0-9a-f]{2} \| [\d,]+) \|", PAGE, re.M))
    assert rows == {kind.name: f"{kind.value:#04x} | {_BYTES_MAX[kind]:,}" for kind in FrameType}


def test_gap_reasons_and_flags_have_their_numbers() -> None:
    reasons = re.findall(r"^\| ([A-Z]+) \| (\d) \|", PAGE, re.M)
    assert {(reason.name, str(reason.value)) for reason in GapReason} == set(reasons)
    flags = re.findall(r"^\| ([A-Z]+) \| (0x0\d) \| the body", PAGE, re.M)
    named = {
        name.removeprefix("FLAG_"): value for name, value in vars(batch).items() if name.startswith("FLAG_")
    }
    assert {name: int(value, 16) for name, value in flags} == named


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda held: held.__name__)
def test_messages_are_named_with_their_fields(struct: type[msgspec.Struct]) -> None:
    tag = str(struct.__struct_config__.tag)
    if tag in FOLDED:
        where = PAGE.split(f"## {FOLDED[tag]}\n")[1].split("\n## ")[0]
    else:
        lines = [line for line in PAGE.splitlines() if f"`{tag}`" in line]
        assert lines, f"{tag} is not named"
        where = "\n".join(lines)
    for name in struct.__struct_fields__:
        assert f"`{name}`" in where, f"{tag} is described without its field {name}"


def tag_of(message: type[messages.Message]) -> str:
    return str(message.__struct_config__.tag)


def test_every_request_is_in_the_table_with_its_answer() -> None:
    table = PAGE.split("### Requests")[1].split("| part or answer |")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|.*\| `(\w+)`[^|]*\|$", table, re.M)
    found = {name: answer for names, answer in rows for name in re.findall(r"\w+", names)}
    assert found == {tag_of(request): tag_of(answer) for request, answer in messages.ANSWERS.items()}
