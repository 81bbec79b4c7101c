"""A destination that says it has what it does not have: what it keeps from crossing so is in no leaf of its own.

It can answer any position when a link opens, and bits for what crossed before a resend. An honest agent under a grant that its log
does not know yet begins there. It writes down what it takes on trust, and the report holds the ingress log to that
(tests/spark/test_truncation_report.py). And it can go back on its word once a grant was renewed: the agent's log must account for each offset once
all the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.chance import Chance
from attacks.conftest import Tally
from audit_log import INCARNATION, Link
from bridge_mesh import Mesh, flight, two_regions, until

from audit.accounting import Accounts
from audit.leaf import GapKind, Kind, Leaf
from audit.position import Positions
from bridge.ledger import Ledger
from felix.errors import RequestError
from region.crossing.ingest import IngestStream
from region.crossing.link_slot import LinkRecord, Position

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


NO_OFFSETS: tuple[dict[str, int], ...] = (
    {"position": -5},
    {"position": 1 << 63, "logged": (1 << 63) + 1},
    {"logged": -2},
    {"logged": (1 << 64) - 1},
    {"crossed_from": -1},
)


@pytest.mark.parametrize("said", NO_OFFSETS)
async def test_what_a_destination_answers_that_is_no_offset_opens_no_link_and_writes_no_leaf(
    mesh: Mesh, tally: Tally, monkeypatch: pytest.MonkeyPatch, said: dict[str, int]
) -> None:
    told = IngestStream._told
    monkeypatch.setattr(
        IngestStream, "_told", lambda stream, opened: msgspec.structs.replace(told(stream, opened), **said)
    )
    await mesh.create()
    await mesh.publish([flight(1)])
    await mesh.grant()
    async with mesh.agent() as agent:
        stopped = await until(
            lambda: next((each for each in agent.links() if "Expected `int`" in each.reason), None),
            f"the refusal; now {agent.links()}",
        )
        assert stopped.cut is None
    assert await mesh.arrived() == 0
    assert mesh.headers(mesh.egress_folder, Kind.GAP, Kind.INTENT) == []
    tally("answers of a destination that are no offsets", 1)


class Log:
    """An egress log, what an agent knows of it, and what a verifier finds about how it accounts for offsets."""

    def __init__(self) -> None:
        self.link, self.ledger, self.positions, self.accounts = Link(), Ledger(), Positions(), Accounts()
        self.found: list[str] = []
        self.leaves = 0

    def write(self, *leaves: Leaf) -> None:
        for leaf in leaves:
            header = leaf.header
            self.ledger.apply(header)
            self.positions.apply(self.leaves, header)
            if header.kind is Kind.ACK:
                self.found += self.accounts.answer(header)
            elif header.kind is Kind.GAP:
                self.found += self.accounts.gap(header, self.leaves, lambda: True)
            else:
                self.found += self.accounts.intent(leaf, self.leaves, lambda: True)
            self.leaves += 1

    def announce(self, count: int) -> list[Leaf]:
        """A batch, in an envelope of its own."""
        intents = [
            Leaf(msgspec.structs.replace(leaf.header, envelope_sha256=b"%032d" % self.leaves), leaf.entries)
            for leaf in self.link.intent(count)
        ]
        self.write(*intents)
        return intents

    def gap(self, count: int, kind: GapKind) -> list[Leaf]:
        """Offsets that are gone, and with their leaf that of the envelope without records by which the destination goes on behind them."""
        gap = self.link.gap(count, kind)
        moved = self.link.header(
            Kind.INTENT,
            first_offset=gap.header.first_offset,
            last_offset=gap.header.last_offset,
            source_batch_sha256=sha256(b"").digest(),
            envelope_sha256=b"%032d" % self.leaves,
        )
        self.write(gap, Leaf(moved))
        return [Leaf(moved)]


def test_wherever_a_destination_says_that_it_is_another_grant_cuts_nothing_in_two(
    chance: Chance, tally: Tally
) -> None:
    """Gaps and batches, some of them answered, and then another grant that goes on anywhere behind the last answer, also inside a gap."""
    random, again = chance(14), 0
    for _ in range(200):
        log, answered_to = Log(), 0
        link = log.link
        for grant in range(5):
            link.grant_id = f"g-{grant}"
            if grant:
                account = log.ledger.shard(link.key, INCARNATION)
                assert account is not None
                position = random.randint(answered_to, account.accounted_to + 3)
                known = account.known_to(position, log.positions.unanswered(link.key))
                again += known < min(position, account.accounted_to)
                link.offset = min(known, position)
                if known < position:
                    log.write(link.gap(position - known, GapKind.ELSEWHERE))
            waiting: list[list[Leaf]] = []
            for _ in range(random.randrange(1, 6)):
                if random.random() < 0.4:
                    kind = random.choice((GapKind.RETENTION, GapKind.COMPACTION))
                    waiting.append(log.gap(random.randrange(1, 6), kind))
                else:
                    waiting.append(log.announce(random.randrange(1, 6)))
            for intents in waiting[: random.randrange(3)]:
                ack = link.ack(intents)
                log.write(ack)
                answered_to = (ack.header.last_offset or 0) + 1
        assert log.found == []
        held, size, last = Ledger.decode(log.ledger.encode(3, b"h" * 32))
        assert held.encode(size, last) == log.ledger.encode(3, last)
    assert again > 50
    tally("grants that began again inside of a gap or batch", again)


def test_wherever_another_bridge_brought_a_link_to_it_goes_on_under_the_same_grant_and_accounts_for_each_offset_once(
    chance: Chance, tally: Tally
) -> None:
    """Of what this bridge announced some has its receipt, some landed and lost it, some another one brought, and some is sent again; or the place is inside of a range that was announced in one
    piece, and then nothing is written."""
    random, replaced, refused = chance(15), 0, 0
    for _ in range(200):
        log, brought = Log(), 0
        link = log.link
        for _ in range(6):
            waiting: list[list[Leaf]] = []
            for _ in range(random.randrange(1, 6)):
                if random.random() < 0.3:
                    waiting.append(log.gap(random.randrange(1, 5), GapKind.RETENTION))
                else:
                    waiting.append(log.announce(random.randrange(1, 5)))
            ends = [intents[-1].header.last_offset or 0 for intents in waiting]
            landed = random.randrange(len(waiting) + 1)
            answered = random.randrange(landed + 1)
            for intents in waiting[:answered]:
                log.write(link.ack(intents))
            if landed:
                brought = ends[landed - 1] + 1
            account = log.ledger.shard(link.key, INCARNATION)
            assert account is not None
            position = random.randint(brought, account.accounted_to + 3)
            announced = log.positions.unanswered(link.key)
            try:
                known = account.brought_from(position, brought, announced)
            except RequestError:
                refused += 1
                assert not {brought, *(end + 1 for end in ends)} & {position}
                position = known = random.choice([brought, *(end + 1 for end in ends[landed:])])
                known = account.brought_from(position, brought, announced)
            if position > known:
                replaced += known < account.accounted_to
                after, link.offset = link.offset, known
                log.write(link.gap(position - known, GapKind.ELSEWHERE))
                link.offset = max(after, position)
                assert all(each.first_offset >= position for each in log.positions.unanswered(link.key))
            # What lies behind is sent again as it was.
            for intents, end in zip(waiting, ends, strict=True):
                if end >= position and end >= brought:
                    log.write(link.ack(intents))
                    brought = end + 1
        assert log.found == []
        held, size, last = Ledger.decode(log.ledger.encode(3, b"h" * 32))
        assert held.encode(size, last) == log.ledger.encode(3, last)
        live = [unit for shard in log.accounts._shards.values() for unit in shard.units]
        assert all(before.last + 1 == after.first for before, after in pairwise(live)), "each offset once"
    assert replaced > 100 and refused > 50
    tally("ranges that were announced and another bridge brought", replaced)
