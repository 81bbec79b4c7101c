"""One leaf that is whole, signed and cosigned, and of which no report can be made: numbers that no calendar or column has.

Whoever keeps a log writes such a leaf once, and it stays below a cosigned checkpoint for ever. Numbers that only a mistake or an
attack can have are no leaf; what a leaf may lawfully say, any report can show (tests/attacks/test_words_held_back.py makes one).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, files_of, world
from audit_log import trust

from audit import leaf as leaf_module
from audit.leaf import LEAF_COLUMNS, TIME_MS_MAX, Kind, Leaf, decode_leaf, encode_leaf
from audit.spark.table import iso
from audit.verify import verify_log
from cli.output import iso as iso_of_commands
from felix.errors import CorruptionError, RequestError
from policy.quantity import AFTER_CALENDAR

INT_COLUMNS = [name for name, kind in LEAF_COLUMNS if kind == "int" and name != "version"]
NATURAL_MAX = (1 << 63) - 1


def deny(**fields: Any) -> Leaf:
    leaf = next(leaf for leaf in dict(world())[EGRESS] if leaf.header.kind is Kind.DENY)
    return Leaf(msgspec.structs.replace(leaf.header, **fields))


@pytest.mark.parametrize("name", [*INT_COLUMNS, "time_ms"])
def test_no_leaf_says_a_number_that_reports_have_no_room_for(
    name: str, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    largest = TIME_MS_MAX if name == "time_ms" else (1 << 31) - 1
    more = {"parts": largest} if name == "part" else {}
    fits = deny(**more, **{name: largest - (name == "part")})
    assert decode_leaf(encode_leaf(fits)) == fits
    for value in (largest + 1, 1 << 40, NATURAL_MAX):
        lie = deny(**{**({"parts": NATURAL_MAX} if name == "part" else {}), name: value})
        if value <= largest:
            continue
        with pytest.raises(RequestError):
            encode_leaf(lie)
        with monkeypatch.context() as rogue:
            # Its own code writes what it likes; the readers are ours.
            data = leaf_module._encode(lie)
            rogue.setattr("attacks.test_one_party_alone.encoded", lambda leaf, d=data, x=lie: d if leaf is x else encode_leaf(leaf))  # fmt: skip
            files = files_of(EGRESS, [*dict(world())[EGRESS], lie])
        with pytest.raises(CorruptionError):
            decode_leaf(data)
        assert {found.step for found in verify_log(files, trust()).findings} == {6}
        tally("numbers without a calendar or a column", 1)


def test_a_time_that_somebody_signed_is_told_whatever_it_is() -> None:
    for time_ms in (TIME_MS_MAX + 1, NATURAL_MAX, 1 << 64):
        assert iso(time_ms) == iso_of_commands(time_ms) == AFTER_CALENDAR
    assert iso(TIME_MS_MAX) == "9999-12-31T23:59:59.999Z"
