"""A region alone signs receipts for more records than their ranges have offsets: sums of them overflow a report's columns."""

from __future__ import annotations

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, files_of
from audit_log import Link, key, trust

from audit.leaf import Leaf
from audit.receipt import read_unverified, sign_receipt
from audit.spark import register
from audit.spark.table import COUNT_MAX, Table
from audit.verify import verify_log


@pytest.mark.parametrize("records", [4, 1 << 40, 1 << 62])
def test_a_receipt_for_more_records_than_offsets_is_a_finding(records: int, tally: Tally) -> None:
    link = Link()
    intents = link.intent(3)
    ack = link.ack(intents)
    receipt = msgspec.structs.replace(read_unverified(ack.header.receipt), records=records)
    signer = next(
        each
        for each in map(key, range(32))
        if sign_receipt(read_unverified(ack.header.receipt), each) == ack.header.receipt
    )
    lie = Leaf(msgspec.structs.replace(ack.header, records=records, receipt=sign_receipt(receipt, signer)))
    found = verify_log(files_of(EGRESS, [*link.agreement(), *intents, lie]), trust()).findings
    assert any(each.step == 8 and "not so many offsets" in each.sentence for each in found)
    tally("receipts for more records than offsets", 1)


def test_a_total_is_at_most_what_a_column_holds() -> None:
    at = [column.name for column in register.COLUMNS].index("acknowledged")
    row = tuple(COUNT_MAX if number == at else None for number in range(len(register.COLUMNS)))
    assert Table("register", "", register.COLUMNS, (row, row)).total("acknowledged") == COUNT_MAX
