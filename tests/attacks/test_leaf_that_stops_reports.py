"""One leaf that is whole, signed and cosigned, and of which no report can be made: numbers that no calendar or column has.

Whoever keeps a log writes such a leaf once, and it stays below a cosigned checkpoint for ever. Numbers that only a mistake or an
attack can have are no leaf; what a leaf may lawfully say, any report can show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, files_of, world
from crossing_logs import CREW, DEPARTURES, START_MS, World, trust, write_world

from audit import leaf as leaf_module
from audit.leaf import LEAF_COLUMNS, TIME_MS_MAX, GapKind, Kind, Leaf, Side, decode_leaf, encode_leaf
from audit.spark.exceptions import BREACH
from audit.spark.report import EXIT_CLEAN, run_report
from audit.spark.table import AFTER_CALENDAR, COUNT_MAX, iso
from audit.verify import verify_log
from cli.output import iso as iso_of_commands
from felix.batch import OFFSET_MAX
from felix.errors import CorruptionError, RequestError

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


def test_the_largest_numbers_that_a_leaf_may_say_are_reported(
    spark: Any, tmp_path: Path, tally: Tally
) -> None:
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    world.batch(DEPARTURES, 0, START_MS, 10, withheld=0.0)
    for shard in (5, 6, (1 << 31) - 1):
        common = world.granted(DEPARTURES, shard) | {"first_offset": 0, "last_offset": OFFSET_MAX}
        gap = world.header(Kind.GAP, Side.EGRESS, START_MS, DEPARTURES, gap=GapKind.RETENTION, **common)
        world.egress.append([Leaf(gap)])
    for time_ms in (0, TIME_MS_MAX):
        world.batch(DEPARTURES, 7, time_ms, 2, withheld=1.0, receipt=False, arrives=False)
        world.egress[-1] = [leaf for leaf in world.egress[-1] if leaf.header.kind is Kind.WITHHELD]
        world.deny(CREW, time_ms, 501, "No grant.", records=NATURAL_MAX, record_bytes=NATURAL_MAX)
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    rows = result.report.exceptions.records()
    assert result.exit_code == EXIT_CLEAN and not [row for row in rows if row["severity"] == BREACH]
    assert [row["records"] for row in rows if row["exception"] == "gap-retention"] == [COUNT_MAX]
    tally("leaves with the largest numbers", 7)
