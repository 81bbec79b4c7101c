"""The notes of ranges after a crash: what landed gets its leaves, once, however often a start is tried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from audit_log import INGRESS_ORIGIN, STREAM, Link, log_signer
from bridge_mesh import until

from audit.checkpoint import note_size
from audit.leaf import Kind, Leaf, encode_for_log, read_header
from audit.tile import read_entries
from audit.trail import Trail, TrailStatus
from felix.errors import Code, CorruptionError, UnavailableError
from felix.names import SpiffeId
from region.crossing.arrivals import LeafQueue, decode_arrival, encode_arrival, notes_from, settle
from region.crossing.grant_meter import GrantMeter
from region.crossing.link_slot import Landed, LinkRecord, Position, link_slot
from region.evidence.arrival_index import ArrivalIndex
from region.log.ahead import Note

SLOT = link_slot("us-east", STREAM, 0)


class Shard:
    """What `settle` asks of a shard: its notes, and the link's record."""

    has_copies = False

    def __init__(self, landed: Landed, live: bytes, *notes: bytes) -> None:
        record = LinkRecord("us-east", STREAM, live, live, 0, 1, 9, Position(9, (landed,)))
        self.annotations = {SLOT: record.encode()}
        self.notes = [Note(number, data) for number, data in enumerate(notes)]
        self.identity = SimpleNamespace(region="eu-west", stream=STREAM, shard=0)
        self.log: list[bytes] = []
        """the notes in the log of one with copies"""
        self.fails = 0

    async def read_notes(self, offset: int, wanted: Callable[[bytes], bool]) -> list[bytes]:
        return [
            data for data in self.log if decode_arrival(data).landed.base_offset == offset and wanted(data)
        ]

    def take_notes_found(self) -> list[Note]:
        return self.notes

    async def clear_notes(self) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("no")
        self.notes = []


@pytest.fixture
async def trail(tmp_path: Path) -> AsyncIterator[Trail]:
    trail = Trail.open(tmp_path, log_signer(INGRESS_ORIGIN))
    yield trail
    await asyncio.to_thread(trail.close)


def delivery(link: Link, records: int = 3) -> tuple[Landed, list[Leaf]]:
    first, base = link.offset, link.destination_offset
    return Landed(first, base, records), link.delivery(link.intent(records))


def note(landed: Landed, leaves: list[Leaf], *, durable: int = 0, accepted: int = 0) -> bytes:
    status = TrailStatus(accepted, durable, 0, 0, 0, "")
    trail: Any = SimpleNamespace(status=lambda: status)
    return encode_arrival(SLOT, landed, trail, [encode_for_log(leaf) for leaf in leaves])


async def settled(shard: Shard, trail: Trail) -> int:
    held: Any = shard
    return await settle(held, ArrivalIndex(trail), meter, SpiffeId("eu-west", "acme", "broker", "b1"))


async def meter(grant: str) -> GrantMeter:
    return GrantMeter(0)


def arrived(trail: Trail) -> list[int | None]:
    size = note_size(trail.publish())
    headers = [read_header(data) for _, data in read_entries(trail.files, 0, size, size)]
    return [header.first_offset for header in headers if header is not None and header.kind is Kind.ACK]


async def test_a_start_that_is_tried_again_writes_no_second_leaf(trail: Trail) -> None:
    """Leaves before it were accepted by the log, and gone with the crash: their indexes are given anew."""
    landed, leaves = delivery(Link())
    shard = Shard(landed, leaves[0].header.incarnation, note(landed, leaves, accepted=5))
    shard.fails = 2
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            await settled(shard, trail)
    assert await settled(shard, trail) == 0
    assert arrived(trail) == [0]


async def test_a_note_of_another_incarnation_did_not_land(trail: Trail) -> None:
    """After a resend a range without records may have the place that one had before it; the crash came before it landed."""
    landed, leaves = delivery(Link())
    header = msgspec.structs.replace(leaves[0].header, incarnation=b"2" * 16)
    again = note(landed, [Leaf(header, leaves[0].entries)])
    assert await settled(Shard(landed, leaves[0].header.incarnation, again), trail) == 0
    assert arrived(trail) == []


async def test_a_note_that_was_refused_is_none_of_what_landed_in_its_place(trail: Trail) -> None:
    """The disk was full; the range came again in another envelope, and only the note of the first one was left by the crash."""
    landed, leaves = delivery(Link())
    header = msgspec.structs.replace(leaves[0].header, envelope_sha256=b"e" * 32)
    refused = note(landed, [Leaf(header, leaves[0].entries)])
    await trail.append(leaves)
    assert await settled(Shard(landed, header.incarnation, refused), trail) == 0
    assert arrived(trail) == [0]


async def test_a_leader_that_is_elected_writes_the_leaves_that_its_copys_notes_have_and_the_log_lacks(
    trail: Trail,
) -> None:
    link = Link()
    ranges = [delivery(link) for _ in range(3)]
    await trail.append(ranges[0][1])
    live = ranges[0][1][0].header.incarnation
    shard = Shard(ranges[-1][0], live)
    shard.has_copies, shard.log = True, [note(landed, leaves) for landed, leaves in ranges]
    position = Position(9, tuple(landed for landed, _ in ranges))
    shard.annotations[SLOT] = LinkRecord("us-east", STREAM, live, live, 0, 1, 9, position).encode()
    assert await settled(shard, trail) == 2
    assert arrived(trail) == [0, 3, 6]
    shard.log = []
    assert await settled(shard, trail) == 0, "whose leaves stand needs no note"


async def test_notes_stay_from_the_first_range_on_whose_leaf_does_not_stand(trail: Trail) -> None:
    link = Link()
    ranges = [delivery(link) for _ in range(3)]
    live = ranges[0][1][0].header.incarnation
    position = Position(9, tuple(landed for landed, _ in ranges))
    record = LinkRecord("us-east", STREAM, live, live, 0, 1, 9, position).encode()
    annotations = {SLOT: record, 7: b"what is no link's"}
    own: Any = SimpleNamespace(region="eu-west", stream=STREAM, shard=0)
    index, broker = ArrivalIndex(trail), SpiffeId("eu-west", "acme", "broker", "b1")
    for landed, leaves in ranges:
        assert await notes_from(annotations, own, index, broker) == landed.base_offset
        await trail.append(leaves)
    assert await notes_from(annotations, own, index, broker) is None


async def test_a_copy_that_has_a_range_and_neither_its_leaf_nor_its_note_is_not_served(trail: Trail) -> None:
    landed, leaves = delivery(Link())
    shard = Shard(landed, leaves[0].header.incarnation)
    shard.has_copies = True
    with pytest.raises(CorruptionError, match="neither its leaf nor the note"):
        await settled(shard, trail)


async def test_leaves_that_wait_are_bounded_and_all_come_in_the_end(
    trail: Trail, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link()
    ranges = [[encode_for_log(leaf) for leaf in delivery(link)[1]] for _ in range(3)]
    held = sum(len(leaf.data) for leaves in ranges for leaf in leaves)
    monkeypatch.setattr("region.crossing.arrivals.WAITING_BYTES_MAX", held)
    queue, said = LeafQueue(trail), list[int]()

    def full(*_: object) -> int:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(trail, "append_nowait", full)
        for leaves in ranges:
            queue.check_room()
            queue.put(leaves, lambda index, error: said.append(index))
        with pytest.raises(UnavailableError) as caught:
            queue.check_room()
        assert caught.value.code is Code.LIMIT_MEMORY
    await until(lambda: said == [-1, 0, 1, 2], "the leaves")
    queue.check_room()


async def test_leaves_that_were_accepted_and_not_written_are_brought_again_in_their_order() -> None:
    """As by a log that stopped, and was opened again by its process."""
    waiting: list[tuple[str, Callable[[int, Exception | None], None]]] = []
    is_stopped = False

    class Log:
        def append_nowait(self, leaves: list[Any], done: Any, loop: object) -> int:
            if is_stopped:
                raise UnavailableError("it has stopped")
            waiting.append((leaves[0].name, done))
            return 0

    def answer(error: Exception | None) -> None:
        taken = waiting.copy()
        waiting.clear()
        for at, (_, done) in enumerate(taken):
            done(-1 if error else at, error)

    log: Any = Log()
    queue, said = LeafQueue(log), list[tuple[str, int]]()

    def put(name: str) -> None:
        leaf: Any = SimpleNamespace(data=b"leaf", name=name)
        queue.put([leaf], lambda index, error: said.append((name, index)))

    put("a")
    put("b")
    is_stopped = True
    answer(UnavailableError("a sync failed"))
    put("c")
    assert said[:2] == [("a", -1), ("b", -1)]
    is_stopped = False
    await until(lambda: [name for name, _ in waiting] == ["a", "b", "c"], "all of them, in their order")
    answer(None)
    assert said[-3:] == [("a", 0), ("b", 1), ("c", 2)]
    queue.check_room()
    queue.close()
