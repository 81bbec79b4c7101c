"""A destination that says it has what it does not have: what it keeps from crossing so is in no leaf of its own.

It can answer any position when a link opens, and bits for what crossed before a resend. An honest agent under a grant that its log
does not know yet begins there. It writes down what it takes on trust, and the report holds the ingress log to that
(tests/spark/test_truncation_report.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from attacks.conftest import Tally
from bridge_mesh import Mesh, flight, two_regions, until

from audit.leaf import GapKind, Kind
from region.ingest import IngestStream
from region.link_slot import LinkRecord, Position

RECORDS, CLAIMED = 10, 7


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def test_what_a_destination_says_that_it_has_stands_in_the_egress_log_as_its_word(
    mesh: Mesh, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = IngestStream._recorded

    def lying(stream: IngestStream, *asked: Any) -> LinkRecord:
        record = recorded(stream, *asked)
        return record._replace(position=Position(max(CLAIMED, record.position.next_offset)))

    monkeypatch.setattr(IngestStream, "_recorded", lying)
    await mesh.create()
    for number in range(RECORDS):
        # Batches of one record: a position inside of a batch is another matter.
        await mesh.publish([flight(number)])
    await mesh.grant()
    async with mesh.agent():
        await until(lambda: len(mesh.headers(mesh.egress_folder, Kind.ACK)) >= RECORDS - CLAIMED, "the rest")
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    (gap,) = mesh.headers(mesh.egress_folder, Kind.GAP)
    assert (gap.gap, gap.first_offset, gap.last_offset) == (GapKind.ELSEWHERE, 0, CLAIMED - 1)
    assert min(header.first_offset or 0 for header in mesh.headers(mesh.ingress_folder, Kind.ACK)) == CLAIMED
    tally("offsets that a destination claims", CLAIMED)
