"""Both sides of a batch, however each cut it into leaves: one digest where they agree, single records where they do not."""

from __future__ import annotations

import random
from pathlib import Path
from struct import Struct
from typing import Any

import msgspec
import pytest
from crossing_logs import (
    DEPARTURES,
    INCARNATION,
    START_MS,
    World,
    trust,
    write_world,
)
from hypothesis import given
from hypothesis import strategies as st
from slow_runs import only_slow

from audit.leaf import ENTRY_BYTES, Kind, Leaf, Side
from audit.spark.comparison import LeafReader, unlike_records
from audit.spark.report import EXIT_DIFFERENCES, EXIT_ONE_SIDE, run_report
from audit.spark.source import BatchDigests
from audit.spark.verification import open_log
from felix.errors import TamperError

ENTRY = st.binary(min_size=2, max_size=2)


@given(st.dictionaries(st.integers(0, 20), ENTRY), st.dictionaries(st.integers(0, 20), ENTRY))
def test_exactly_what_differs_is_found(sent: dict[int, bytes], got: dict[int, bytes]) -> None:
    found = list(unlike_records(*({at: (entry, 7) for at, entry in side.items()} for side in (sent, got))))
    assert [offset for _, offset, _, _ in found] == sorted(
        offset for offset in sent.keys() | got.keys() if sent.get(offset) != got.get(offset)
    )
    for finding, offset, egress, ingress in found:
        assert (egress is None, ingress is None) == (offset not in sent, offset not in got)
        expected = {(False, True): "record-not-delivered", (True, False): "record-not-announced"}
        assert finding == expected.get((egress is None, ingress is None), "commitment-differs")


def parts(entries: bytes, cuts: list[int], side: Side = Side.EGRESS) -> list[Leaf]:
    header = World().header(
        Kind.INTENT if side is Side.EGRESS else Kind.ACK, side, START_MS, DEPARTURES, shard=1, incarnation=INCARNATION,
        envelope_sha256=b"e" * 32,
    )  # fmt: skip
    ends = [*cuts, len(entries) // ENTRY_BYTES]
    begins = [0, *cuts]
    return [
        Leaf(
            msgspec.structs.replace(header, part=number, parts=len(ends)),
            entries[begin * ENTRY_BYTES : end * ENTRY_BYTES],
        )
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]


@given(
    st.integers(1, 40), st.lists(st.integers(1, 39), unique=True), st.lists(st.integers(1, 39), unique=True)
)
def test_a_batch_has_one_digest_however_it_is_cut(count: int, left: list[int], right: list[int]) -> None:
    entries = random.Random(count).randbytes(count * ENTRY_BYTES)
    found = []
    for cuts, side in ((left, Side.EGRESS), (right, Side.INGRESS)):
        digests, leaves = BatchDigests(), parts(entries, sorted(cut for cut in cuts if cut < count), side)
        said = [digests.take(leaf) for leaf in leaves]
        assert all(each is None for each in said[:-1]), "the last leaf alone carries it"
        found.append(said[-1])
    assert found[0] == found[1] is not None


def test_a_batch_of_which_a_leaf_was_not_read_has_no_digest() -> None:
    leaves = parts(bytes(30 * ENTRY_BYTES), [10, 20])
    for read in (
        leaves[1:],
        leaves[::2],
        [leaves[0], leaves[2], leaves[1]],
        [leaves[1], leaves[0], leaves[2]],
    ):
        digests = BatchDigests()
        assert [digests.take(leaf) for leaf in read] == [None] * len(read)


@only_slow
@pytest.mark.spark
def test_batches_that_both_sides_cut_differently_reconcile_and_one_changed_record_in_them_is_named(
    spark: Any, tmp_path: Path
) -> None:
    def cut(leaves: list[Leaf], room: int = 700) -> list[Leaf]:
        """The same batch in other leaves."""
        first, last = leaves[0].header, leaves[-1].header
        assert first.first_offset is not None and first.destination_first_offset is not None
        entries = b"".join(leaf.entries for leaf in leaves)
        made, before, to = [], first.first_offset, first.destination_first_offset
        parts = [entries[at : at + room * ENTRY_BYTES] for at in range(0, len(entries), room * ENTRY_BYTES)]
        for number, part in enumerate(parts):
            listed = [fields[0] for fields in Struct(">Q60x").iter_unpack(part)]
            end = last.last_offset if number == len(parts) - 1 else listed[-1]
            header = msgspec.structs.replace(
                first, part=number, parts=len(parts), first_offset=before, last_offset=end, records=len(listed),
                record_bytes=sum(fields[0] for fields in Struct(">16xI48x").iter_unpack(part)),
                destination_first_offset=to, destination_last_offset=to + len(listed) - 1,
            )  # fmt: skip
            made.append(Leaf(header, part))
            assert end is not None
            before, to = end + 1, to + len(listed)
        return made

    def change_one(leaves: list[Leaf]) -> list[Leaf]:
        first, second, *rest = cut(leaves)
        changed = bytearray(second.entries)
        changed[5 * ENTRY_BYTES + 25] ^= 1
        return [first, msgspec.structs.replace(second, entries=bytes(changed)), *rest]

    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    for number in range(3):
        world.batch(DEPARTURES, 0, START_MS + number, 2_000, change=cut)
    sides = [
        [leaf.header.records for leaf in leaves if leaf.header.kind is kind]
        for kind, leaves in ((Kind.INTENT, world.egress[1]), (Kind.ACK, world.ingress[1]))
    ]
    assert sides[0] != sides[1] and sum(sides[0]) == sum(sides[1]), "otherwise this tests nothing"
    alike = run_report(write_world(tmp_path / "a", world), tmp_path / "out-a", trust=trust(), session=spark)
    assert alike.report.findings.rows == ()
    assert {row["status"] for row in alike.report.reconciliation.records()} == {"reconciled"}
    assert alike.exit_code in (EXIT_ONE_SIDE, EXIT_DIFFERENCES)
    world.batch(DEPARTURES, 0, START_MS + 10, 2_000, withheld=0, change=change_one)
    unlike = run_report(write_world(tmp_path / "b", world), tmp_path / "out-b", trust=trust(), session=spark)
    (found,) = unlike.report.findings.records()
    offset = 6_000 + world.ingress[-1][0].header.records + 5
    assert (found["finding"], found["first_offset"], found["records"]) == ("commitment-differs", offset, 1)
    assert unlike.exit_code == EXIT_DIFFERENCES


def test_a_leaf_that_changed_since_it_was_verified_ends_the_report(tmp_path: Path) -> None:
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    world.batch(DEPARTURES, 0, START_MS)
    path = write_world(tmp_path, world)[1]
    bundles = open_log(str(path), trust()).bundles
    reader = LeafReader({"log": (str(path), bundles)})
    with pytest.raises(TamperError, match="changed while the report was made"):
        reader.leaf("log", 1, "00" * 32)
