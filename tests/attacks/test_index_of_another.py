"""Whoever hands a log over chooses its `index`, which nobody signs: `prove` reads none. It goes through the leaves, and says of a record that it
did not cross only where what it read is what the checkpoint signs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.conftest import Tally
from attacks.test_files_without_end import MADE, bounded
from audit_log import EGRESS_ORIGIN, STREAM, Link, trust
from crossing_logs import write_log

from audit.leaf import encode_leaf
from audit.proof import check_proof, prove
from audit.range_index import INDEX_PATH, ROW_BYTES, bundle_rows
from audit.tile import bundle_path, decode_bundle, encode_bundle
from audit.tile_disk import Folder
from audit.tlog_proof import prove_leaves
from audit.verify import verify_log
from felix.errors import Code, FelixError, RequestError, TamperError

BATCHES = 150


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of two bundles; of each batch of two records one stays."""
    link = Link()
    batches = [(made := link.intent(2, (1,)), [link.ack(made)]) for _ in range(BATCHES)]
    appends = [link.agreement(), *(append for batch in batches for append in batch)]
    write_log(tmp_path / "log", EGRESS_ORIGIN, appends, cosign=True)
    return tmp_path / "log"


def answer(log: Path, offset: int) -> str:
    """What is said of a record, by both kinds of proof."""
    said = []
    for make in (
        lambda: (
            f"crossed, answered: {check_proof(prove(Folder(log), trust(), STREAM, 0, offset), trust()).ack is not None}"
        ),
        lambda: f"crossed, answered: {len(prove_leaves(Folder(log), trust(), STREAM, 0, offset)) == 2}",
    ):
        try:
            said.append(make())
        except RequestError as error:
            assert error.code is Code.NOT_FOUND
            said.append("withheld" if "withheld" in error.sentence else "not there")
    assert len(set(said)) == 1
    return said[0]


def cut(data: bytes) -> bytes:
    """Without every other row, among them one of each kind."""
    rows = [data[at : at + ROW_BYTES] for at in range(0, len(data), ROW_BYTES)]
    return b"".join(rows[::2])


@pytest.mark.parametrize("lie", [lambda _: bundle_rows(0, []), cut, lambda _: b"", lambda _: b"x" * 999])
def test_an_index_that_leaves_leaves_out_hides_no_crossing(
    lie: Callable[[bytes], bytes], log: Path, tally: Tally
) -> None:
    honest = [answer(log, offset) for offset in (0, 1, 2 * BATCHES - 2, 2 * BATCHES)]
    assert honest == ["crossed, answered: True", "withheld", "crossed, answered: True", "not there"]
    index = log / INDEX_PATH
    index.write_bytes(lie(index.read_bytes()))
    assert verify_log(Folder(log), trust()).ok
    assert [answer(log, offset) for offset in (0, 1, 2 * BATCHES - 2, 2 * BATCHES)] == honest
    tally("answers from a log with another index", len(honest))


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_an_index_without_end_is_not_read(made: Callable[[Path], None], log: Path, tally: Tally) -> None:
    os.remove(log / INDEX_PATH)
    made(log / INDEX_PATH)
    with bounded():
        assert answer(log, 0) == "crossed, answered: True"
    tally("files in place of an index", 1)


def test_of_a_log_with_another_leaf_in_it_nothing_is_said_not_to_have_crossed(
    log: Path, tally: Tally
) -> None:
    """One leaf of the copy takes the place of the INTENT, or of its ACK: no answer follows from it."""
    path = log / bundle_path(0)
    leaves = [bytes(each) for each in decode_bundle(path.read_bytes(), 256)]
    for at in [number for number, each in enumerate(leaves) if number > 4][:3]:
        path.write_bytes(encode_bundle([*leaves[:at], encode_leaf(Link().deny()), *leaves[at + 1 :]]))
        for offset in (0, 2 * BATCHES):
            with pytest.raises(TamperError, match="root"):
                prove(Folder(log), trust(), STREAM, 0, offset)
            with pytest.raises(FelixError):
                prove_leaves(Folder(log), trust(), STREAM, 0, offset)
        tally("leaves exchanged in a copy", 1)
