"""Crossing: one sealed batch of the source, and what of it leaves; opened here as the destination opens it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from departures import DAY, terms
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.leaf import Kind, Leaf, decode_leaf, encode_leaf, iter_entries, pack_entries
from bridge.budget import rate_limit
from bridge.crossing import (
    FILTERED,
    LOOP,
    ONWARD,
    PATH_UNKNOWN,
    TRANSFORM_FAILED,
    OpenedBatch,
    Packed,
    Route,
    SealedRange,
    Steps,
    compile_terms,
    open_sealed,
    range_entries,
    range_leaves,
    seal_nothing,
    seal_ranges,
    sort_records,
)
from bridge.link import OnTheWay, SendWindow
from bridge.link_context import LARGE_AT_ONCE, LARGE_BYTES, STEP_S, LinkContext
from bridge.link_session import LinkSession
from bridge.places import Places, Turns
from bridge.plan import Verdict
from bridge.wire import SealedBatch
from felix.batch import (
    BRIDGED_EPOCH,
    HEADERS_MAX,
    KEY_BYTES_MAX,
    Batch,
    NewRecord,
    Parts,
    body_checksum,
    decode_batch,
    decode_records,
    encode_batch,
)
from felix.batch import batch_of as batch_of_parts
from felix.errors import Code, TamperError, UnavailableError
from felix.names import SpiffeId, StreamName
from felix.peer import Peer
from felix.provenance import PATH_HEADER, UNION_REGIONS_MAX
from felix.steps import finished
from keys.authority import create_authority
from keys.envelope import SEALABLE_BYTES_MAX, BatchSealer, DataKey
from keys.key_id import KeyKind, new_key_id
from keys.link import LinkSecrets
from keys.transfer import TransferScope, decode_envelope, open_envelope
from policy.grant import ExportGrant
from policy.terms import GrantTerms, grant_id
from policy.transform import KeyRule, build_spec

NOW = 1_760_000_000_000
STREAM = StreamName.parse("acme/ops/departures")
INCARNATION = b"i" * 16
AGENT = create_authority("us-east", "acme", NOW).issue_identity(
    SpiffeId("us-east", "acme", "bridge", "us-to-eu"), NOW
)
PEER = Peer(AGENT.spiffe_id, AGENT.private_key.public_key(), NOW + DAY)
SECRETS = LinkSecrets(b"l" * 32, b"f" * 32)
APPENDED_MS = NOW - 5_000


def leaves_of(sealed: SealedRange, route: Route) -> list[Leaf]:
    packed = finished(range_entries(sealed, route))
    return [decode_leaf(each.data) for each in range_leaves(sealed, packed, route, NOW)]


def export_of(wanted: GrantTerms) -> ExportGrant:
    found = wanted.hash()
    return ExportGrant(
        grant=grant_id(found),
        terms=wanted,
        terms_hash=found.hex(),
        approvals=0,
        separate=False,
        policy_revision=1,
        policy_hash="0" * 64,
        signed_at=NOW,
    )


def route(**changes: Any) -> Route:
    export = export_of(terms(**changes))
    scope = TransferScope(
        "us-east", "eu-west", STREAM, INCARNATION, STREAM, 0, 3, export.grant,
        bytes.fromhex(export.terms_hash), AGENT.spiffe_id,
    )  # fmt: skip
    return Route.of(export, scope, SECRETS, compile_terms(export.terms, SECRETS), AGENT, b"import key")


def data_key() -> DataKey:
    return DataKey(
        new_key_id("us-east", KeyKind.DATA, b"d" * 11), "us-east", STREAM, INCARNATION, 0, 3, b"k" * 32
    )


def sealed(batch: Batch, base: int = 100) -> bytes:
    header = msgspec.structs.replace(
        batch.header, base_offset=base, append_time_ms=APPENDED_MS, leader_epoch=3
    )
    return BatchSealer(data_key()).seal(batch.with_header(header)).encode()


def batch_of(records: list[NewRecord], **more: Any) -> bytes:
    return sealed(encode_batch(records), **more)


def departure(number: int, **more: object) -> bytes:
    return json.dumps({"flight": number, "tailnum": f"N{number}", "hour": 5, "minute": 7, **more}).encode()


def opened(records: list[NewRecord], *, bridged: bool = False) -> OpenedBatch:
    """`bridged`: a bridge brought them to the source."""
    batch = encode_batch(records)
    if bridged:
        batch = batch.with_header(msgspec.structs.replace(batch.header, producer_epoch=BRIDGED_EPOCH))
    return finished(open_sealed(sealed(batch), data_key()))


def crossed(batch: OpenedBatch, way: Route, first_offset: int = 0) -> list[SealedRange]:
    return finished(seal_ranges(finished(sort_records(batch, way)), way, first_offset))


def cross(
    way: Route, records: list[NewRecord], first_offset: int = 0, *, bridged: bool = False
) -> list[SealedRange]:
    return crossed(opened(records, bridged=bridged), way, first_offset)


def arrived(way: Route, ranges: list[SealedRange]) -> list[tuple[int, Any]]:
    """Source offset and payload of what the destination finds in the envelopes."""
    found = []
    for each in ranges:
        envelope = decode_envelope(each.envelope)
        assert envelope.hash == each.envelope_sha256
        crossing = open_envelope(way.key, envelope, PEER)
        if crossing.batch is not None:
            for offset, record in zip(crossing.source_offsets, decode_records(crossing.batch), strict=True):
                found.append((offset, json.loads(bytes(record.payload) or b"null")))
    return found


def entries_of(leaves: list[Leaf], kind: Kind) -> list[int]:
    return [entry.offset for leaf in leaves if leaf.header.kind is kind for entry in iter_entries(leaf)]


def withheld_for(leaves: list[Leaf]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for leaf in leaves:
        if leaf.header.kind is Kind.WITHHELD:
            held = found.setdefault(leaf.header.reason, [])
            held += [entry.offset for entry in iter_entries(leaf)]
    return found


def test_what_crosses_is_transformed_and_named_by_its_source_offset() -> None:
    way = route()
    (only,) = cross(way, [NewRecord(departure(number)) for number in range(5)])
    found = arrived(way, [only])
    assert [offset for offset, _ in found] == [100, 101, 102, 103, 104]
    assert [record["flight"] for _, record in found] == [0, 1, 2, 3, 4]
    assert all("hour" not in record and not record["tailnum"].startswith("N") for _, record in found)


def test_the_destination_makes_the_same_entries_from_what_arrives() -> None:
    way = route()
    (only,) = cross(way, [NewRecord(departure(number), key=b"key-%d" % (number % 3)) for number in range(20)])
    crossing = open_envelope(way.key, decode_envelope(only.envelope), PEER)
    assert crossing.batch is not None
    records = [
        record._replace(offset=offset)
        for offset, record in zip(crossing.source_offsets, decode_records(crossing.batch), strict=True)
    ]
    (leaf,) = leaves_of(only, way)
    assert leaf.entries == pack_entries(records, way.committer)
    assert {record.timestamp_ms for record in records} == {APPENDED_MS}


def test_what_stays_is_withheld_with_its_reason_and_the_rest_crosses() -> None:
    way = route(transform=build_spec(pseudonymize=["tailnum"], filter_="flight < 10"))
    there = {PATH_HEADER: b"eu-west,ap-south"}
    records = [
        NewRecord(departure(1)),
        NewRecord(departure(50)),
        NewRecord(b"not json"),
        NewRecord(departure(2), headers=there),
        NewRecord(departure(3), headers={PATH_HEADER: b"ap-south"}),
        NewRecord(departure(4), headers={PATH_HEADER: b"\xff"}),
        NewRecord(departure(5)),
    ]
    (only,) = cross(way, records, bridged=True)
    leaves = leaves_of(only, way)
    assert withheld_for(leaves) == {
        TRANSFORM_FAILED: [102],
        FILTERED: [101],
        LOOP: [103, 105],
        ONWARD: [104],
    }
    assert entries_of(leaves, Kind.INTENT) == [100, 106]
    assert [offset for offset, _ in arrived(way, [only])] == [100, 106]
    assert [leaf.header.kind for leaf in leaves][-1] is Kind.INTENT


def test_onward_transfer_crosses_where_the_grant_says_so_and_the_path_grows() -> None:
    way = route(onward=True)
    (only,) = cross(way, [NewRecord(departure(1), headers={PATH_HEADER: b"ap-south"})], bridged=True)
    crossing = open_envelope(way.key, decode_envelope(only.envelope), PEER)
    assert crossing.batch is not None
    (record,) = decode_records(crossing.batch)
    assert record.headers[PATH_HEADER] == b"ap-south,us-east"
    assert leaves_of(only, way)[0].header.path == ("ap-south", "us-east")


@pytest.mark.parametrize(
    "path", [b"cn-north,ap-south", b"eu-west", b"us-east", b"never-was", b"", b"\xff", b"a,b"]
)
@pytest.mark.parametrize(
    "numbered", [{}, {"producer_id": 7, "producer_epoch": BRIDGED_EPOCH}], ids=["plain", "numbered"]
)
def test_regions_that_a_producer_names_itself_are_told_to_nobody_and_its_record_stays(
    path: bytes, numbered: dict[str, int]
) -> None:
    way = route(onward=True)
    records = [NewRecord(departure(1)), NewRecord(departure(2), headers={PATH_HEADER: path})]
    batch = finished(open_sealed(sealed(encode_batch(records, **numbered)), data_key()))
    (only,) = crossed(batch, way)
    leaves = leaves_of(only, way)
    assert withheld_for(leaves) == {PATH_UNKNOWN: [101]}
    assert leaves[0].header.code == Code.LOOP_REFUSED and "no bridge brought it" in leaves[0].header.sentence
    assert leaves[-1].header.path == ("us-east",) and entries_of(leaves, Kind.INTENT) == [100]
    assert [offset for offset, _ in arrived(way, [only])] == [100]


def test_an_intent_names_all_regions_that_its_records_had_been_in() -> None:
    way = route(onward=True)
    paths = (b"ap-south", b"sa-east,ap-south", None)
    records = [
        NewRecord(departure(number), headers={} if path is None else {PATH_HEADER: path})
        for number, path in enumerate(paths)
    ]
    (only,) = cross(way, records, bridged=True)
    assert leaves_of(only, way)[-1].header.path == ("ap-south", "sa-east", "us-east")
    (own,) = cross(way, records[2:])
    assert leaves_of(own, way)[-1].header.path == ("us-east",)
    (stays,) = cross(way, [NewRecord(b"no")])
    assert leaves_of(stays, way)[-1].header.path == ()


def test_a_batch_whose_records_had_been_in_more_regions_than_a_leaf_names_is_halved() -> None:
    way = route(onward=True)
    records = [
        NewRecord(departure(number), headers={PATH_HEADER: b"r-%d" % number})
        for number in range(UNION_REGIONS_MAX)
    ]
    ranges = cross(way, records, bridged=True)
    assert len(ranges) == 2 and sum(each.records for each in ranges) == UNION_REGIONS_MAX
    named = [leaves_of(each, way)[-1].header.path for each in ranges]
    assert {region for path in named for region in path} == {
        "us-east",
        *(f"r-{n}" for n in range(UNION_REGIONS_MAX)),
    }
    (whole,) = cross(way, records[1:], bridged=True)
    assert len(whole.path) == UNION_REGIONS_MAX


def test_where_nothing_crosses_an_empty_envelope_moves_the_position() -> None:
    way = route()
    (only,) = cross(way, [NewRecord(b"no"), NewRecord(b"no")])
    assert arrived(way, [only]) == []
    withheld, intent = leaves_of(only, way)
    assert (withheld.header.records, intent.header.records) == (2, 0)
    assert (intent.header.first_offset, intent.header.last_offset) == (100, 101)


def test_a_batch_whose_body_is_no_list_of_records_is_withheld_as_a_whole() -> None:
    batch = encode_batch([NewRecord(departure(number)) for number in range(3)])
    body = b"\xff" * len(batch.body)
    broken = Batch(msgspec.structs.replace(batch.header, body_checksum=body_checksum(body)), body)
    way = route()
    found = crossed(finished(open_sealed(sealed(broken), data_key())), way)
    leaves = [leaf for each in found for leaf in leaves_of(each, way)]
    assert withheld_for(leaves) == {TRANSFORM_FAILED: [100, 101, 102]}
    assert arrived(way, found) == []


def test_a_changed_batch_is_not_opened() -> None:
    data = bytearray(batch_of([NewRecord(departure(1))]))
    other = replace_body_byte(bytes(data))
    with pytest.raises(TamperError):
        finished(open_sealed(other, data_key()))


def replace_body_byte(data: bytes) -> bytes:
    """One byte of the ciphertext changed, the checksums made right again: only the seal can tell."""
    batch = decode_batch(data)
    body = bytearray(batch.body)
    body[20] ^= 1
    header = msgspec.structs.replace(batch.header, body_checksum=body_checksum(bytes(body)))
    return Batch(header, bytes(body)).encode()


def test_a_record_that_is_too_large_with_its_path_stays_and_its_leaf_says_so() -> None:
    note = "x" * (SEALABLE_BYTES_MAX - 4 - len('{"note":""}'))
    way = route(transform=build_spec())
    (only,) = cross(way, [NewRecord(json.dumps({"note": note}, separators=(",", ":")).encode())])
    leaves = leaves_of(only, way)
    assert withheld_for(leaves) == {TRANSFORM_FAILED: [100]}
    assert arrived(way, [only]) == []


def test_a_record_that_would_have_more_headers_than_fit_with_its_path_stays() -> None:
    names = [f"h{number}" for number in range(HEADERS_MAX)]
    way = route(transform=build_spec(headers=names))
    records = [
        NewRecord(departure(number), None, dict.fromkeys(names[:many], b"1"))
        for number, many in enumerate((HEADERS_MAX, HEADERS_MAX - 1))
    ]
    (only,) = cross(way, records)
    assert withheld_for(leaves_of(only, way)) == {TRANSFORM_FAILED: [100]}
    assert [offset for offset, _ in arrived(way, [only])] == [101]


def test_a_record_whose_key_no_client_encodes_stays_where_keys_cross_as_they_are() -> None:
    """The broker reads no body: a publisher's own code may put any key into one."""
    records = Parts([departure(0), departure(1)], [b"k" * (KEY_BYTES_MAX + 1), b"k" * KEY_BYTES_MAX], None)
    for rule, stay in ((KeyRule.KEEP, {TRANSFORM_FAILED: [100]}), (KeyRule.HASH, {})):
        way = route(transform=build_spec(key=rule))
        batch = finished(open_sealed(sealed(batch_of_parts(records)), data_key()))
        (only,) = crossed(batch, way)
        assert withheld_for(leaves_of(only, way)) == stay
        assert [offset for offset, _ in arrived(way, [only])] == ([101] if stay else [100, 101])


def test_a_batch_that_grows_beyond_the_wire_is_halved_always_in_the_same_places() -> None:
    # The batch fits the wire as it is, and no longer once each record carries its path.
    way = route(transform=build_spec(key=KeyRule.KEEP))
    records = [NewRecord(departure(number, note="x" * 320)) for number in range(2_600)]
    ranges = cross(way, records)
    assert len(ranges) > 1
    assert [each.first_offset for each in ranges[1:]] == [each.next_offset for each in ranges[:-1]]
    assert [offset for offset, _ in arrived(way, ranges)] == list(range(100, 2_700))
    rest = cross(way, records, first_offset=ranges[1].first_offset)
    assert [each.envelope for each in rest] == [each.envelope for each in ranges[1:]]


def test_an_empty_envelope_covers_a_gap() -> None:
    way = route()
    data, digest = seal_nothing(way, 10, 90)
    envelope = decode_envelope(data)
    assert (envelope.header.base_offset, envelope.header.last_offset, envelope.header.records) == (10, 90, 0)
    assert envelope.hash == digest
    assert open_envelope(way.key, envelope, PEER).batch is None


payloads = st.one_of(
    st.builds(departure, st.integers(0, 100)),
    st.binary(max_size=20),
    st.builds(lambda flight: json.dumps({"flight": flight}).encode(), st.integers(0, 100)),
)
headers = st.sampled_from([None, {PATH_HEADER: b"ap-south"}, {PATH_HEADER: b"eu-west"}, {"other": b"x"}])
batches = st.lists(
    st.builds(NewRecord, payloads, st.none() | st.binary(max_size=5), headers), min_size=1, max_size=30
)


@settings(max_examples=100, deadline=None)
@given(records=batches, onward=st.booleans(), bridged=st.booleans(), cut=st.integers(0, 30))
def test_every_record_is_in_one_leaf_and_the_same_batch_gives_the_same_bytes(
    records: list[NewRecord], onward: bool, bridged: bool, cut: int
) -> None:
    way = route(onward=onward, transform=build_spec(pseudonymize=["tailnum"], filter_="flight < 50"))
    first = 100 + min(cut, len(records) - 1)
    ranges = cross(way, records, first_offset=first, bridged=bridged)
    leaves = [leaf for each in ranges for leaf in leaves_of(each, way)]
    for leaf in leaves:
        encode_leaf(leaf)
    crossing = entries_of(leaves, Kind.INTENT)
    staying = [offset for offsets in withheld_for(leaves).values() for offset in offsets]
    assert sorted(crossing + staying) == list(range(first, 100 + len(records)))
    assert [offset for offset, _ in arrived(way, ranges)] == crossing
    # Another seal of the same batch, as after a restart, with another counter and time.
    twin = route(onward=onward, transform=way.terms.transform)
    again = cross(twin, records, first_offset=first, bridged=bridged)
    assert [each.envelope for each in again] == [each.envelope for each in ranges]


def link_row() -> Any:
    row = SimpleNamespace(
        grant="g",
        stream="acme/ops/departures",
        shard=0,
        destination_region="eu-west",
        verdict=Verdict.RUN,
        share="acme/ops/*",
    )
    return SimpleNamespace(row=row, link_shard=None, is_leaving=False)


def context_of(way: Route, monotonic: Callable[[], float]) -> Any:
    """What a session asks besides, where everything is allowed and nobody else works."""
    return SimpleNamespace(
        failpoints=SimpleNamespace(at=lambda _: None),
        clock_ms=lambda: way.terms.not_before,
        runtime=SimpleNamespace(clock=SimpleNamespace(monotonic=monotonic)),
        require_allowed=lambda row, now_ms: None,
        require_whole=lambda region, link: None,
        held=str,
        large=Places(1),
        turns=Turns(STEP_S),
        ledger=SimpleNamespace(grant=lambda _: SimpleNamespace(charged_bytes=0)),
        tracing=None,
    )


async def _costly(*, is_leaving: bool = False) -> tuple[int, list[int], bool]:
    """A link takes a batch of two kilobytes, to which rules are applied 80,000 times, by a clock that goes on by a step's time whenever it is read: how many turns others had, what was
    announced, and whether the batch is held still. `is_leaving`: the link is to stop, from the first of these turns on."""
    way, announced = route(transform=build_spec(pseudonymize=["ids[]"])), list[int]()
    numbers = b'{"ids":[' + b",".join([b"1"] * 4_000) + b"]}"
    item = SealedBatch(4_000, memoryview(sealed(encode_batch([NewRecord(numbers)] * 20, compress=True))))
    ticks = count()
    context = context_of(way, lambda: next(ticks) * STEP_S)
    link, other = link_row(), SimpleNamespace()

    class Session(LinkSession):
        def _announce(self, sealed: SealedRange, *_: Any) -> None:
            announced.append(sealed.records)

    session = Session(link, context, other, other, asyncio.Event())  # type: ignore[arg-type]
    feed: Any = SimpleNamespace(consumed=lambda _: None)
    channel: Any = SimpleNamespace(opened=SimpleNamespace(position=100, crossed_more=False))
    session._feed, session._channel, session._route = feed, channel, way
    session._window = SendWindow(
        position=100, accounted_to=None, unanswered=(), envelopes_max=24, credit_bytes=1 << 20
    )
    session._data_keys[decode_batch(item.body).header.key_id] = data_key()
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1
            link.is_leaving = is_leaving

    other_work = asyncio.ensure_future(take_turns())
    await session._deal(item, None)
    other_work.cancel()
    return turns, announced, session._held is item


async def test_a_small_batch_that_holds_much_work_keeps_nobody_else_of_the_agent_waiting() -> None:
    turns, announced, _ = await _costly()
    assert sum(announced) == 20
    assert turns >= 20, "others have one after each record of that size at the latest"


async def test_a_link_that_is_to_stop_leaves_the_batch_that_it_is_working_on() -> None:
    turns, announced, is_held = await _costly(is_leaving=True)
    assert (announced, is_held) == ([], True)
    assert turns < 5


async def test_a_batch_that_becomes_many_times_as_long_waits_in_part_and_each_of_its_records_crosses_once() -> (
    None
):
    """What waits for receipts is held in memory, of each link; the rest is made again, cut in the same places, once there is room."""
    way, window = (
        route(),
        SendWindow(position=100, accounted_to=None, unanswered=(), envelopes_max=24, credit_bytes=1_000),
    )
    announced, most = list[tuple[int, int]](), 0
    context = context_of(way, lambda: 0.0)

    class Session(LinkSession):
        def _announce(self, sealed: SealedRange, packed: Packed, held: OnTheWay, *_: Any) -> None:
            nonlocal most
            announced.append((sealed.first_offset, sealed.last_offset))
            window.put(held)
            window.durable(held)
            most = max(most, window._bytes)

    session = Session(link_row(), context, SimpleNamespace(), SimpleNamespace(), asyncio.Event())  # type: ignore[arg-type]
    feed: Any = SimpleNamespace(consumed=lambda _: None)
    channel: Any = SimpleNamespace(opened=SimpleNamespace(position=100, crossed_more=False))
    session._feed, session._channel, session._route, session._window = feed, channel, way, window
    item = SealedBatch(4_000, memoryview(batch_of([NewRecord(departure(number)) for number in range(64)])))
    session._data_keys[decode_batch(item.body).header.key_id] = data_key()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.crossing.SEALABLE_BYTES_MAX", 1_000)
        patch.setattr("bridge.link.AHEAD_BYTES", 1_000)
        rounds = 0
        while rounds == 0 or session._held is not None:
            await session._deal(item, None)
            rounds += 1
            for sent in window.sendable():
                window.answered(sent.last_offset + 1)
            while not window.is_empty:
                for sent in window.sendable():
                    window.answered(sent.last_offset + 1)
    assert rounds > 2 and most < 1_000 + 1_000 + 2_000
    assert [first for first, _ in announced] == [100, *(last + 1 for _, last in announced[:-1])]
    assert announced[-1][1] == 163


async def test_large_batches_of_a_stream_with_many_shards_keep_no_other_grant_waiting_for_more_than_one_each() -> (
    None
):
    """Nor where the stream is granted to many regions: its publisher has one share, as whoever publishes to another one."""
    large = LinkContext.__dataclass_fields__["large"].default_factory()
    context: Any = SimpleNamespace(large=large)
    worked, other, done = list[str](), SimpleNamespace(), asyncio.Event()

    def session(grant: str, shard: int) -> LinkSession:
        link = link_row()
        link.row = SimpleNamespace(
            grant=f"{grant}-{shard % 10}",
            stream=f"acme/ops/{grant}",
            shard=shard,
            verdict=Verdict.RUN,
            share=f"acme/ops/{grant}",
        )
        made = LinkSession(link, context, other, other, asyncio.Event())  # type: ignore[arg-type]
        return made

    async def carry(link: LinkSession, grant: str, batches: int) -> None:
        for _ in range(batches):
            if done.is_set():
                return
            async with link._place(LARGE_BYTES + 1):
                await asyncio.sleep(0.01)
                worked.append(grant)

    others = [asyncio.ensure_future(carry(session("costly", shard), "costly", 1_000)) for shard in range(50)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(30):
        await carry(session("mine", 0), "mine", 5)
    done.set()
    await asyncio.gather(*others)
    between = "".join(grant[0] for grant in worked).split("m")[1:-1]
    assert len(between) >= 4 and max(map(len, between)) <= LARGE_AT_ONCE


async def test_what_the_rate_holds_back_once_its_key_is_there_crosses_later() -> None:
    """Both links of a grant ask the rate before they wait for a key; the second one is held, and loses nothing."""
    way, rate, now = route(rate_bytes=1_000), rate_limit(1_000, 0.0), [0.0]
    keys = asyncio.Barrier(2)
    context = context_of(way, lambda: now[0])
    link = link_row()
    item = SealedBatch(4_000, memoryview(batch_of([NewRecord(departure(number)) for number in range(40)])))

    class Session(LinkSession):
        def __init__(self) -> None:
            other: Any = SimpleNamespace()
            super().__init__(link, context, other, other, asyncio.Event())
            self.announced: list[tuple[int, int]] = []
            self.consumed: list[int] = []
            feed: Any = SimpleNamespace(consumed=self.consumed.append)
            channel: Any = SimpleNamespace(opened=SimpleNamespace(position=100, crossed_more=False))
            self._feed, self._channel, self._route = feed, channel, way
            self._window = SendWindow(
                position=100, accounted_to=None, unanswered=(), envelopes_max=24, credit_bytes=1 << 20
            )

        async def _take_data_key(self, header: Any) -> DataKey:
            await keys.wait()
            key = self._data_keys[header.key_id] = data_key()
            return key

        def _announce(self, sealed: SealedRange, *_: Any) -> None:
            self.announced.append((sealed.first_offset, sealed.last_offset))

    assert rate is not None
    links = Session(), Session()
    async with asyncio.timeout(60):
        await asyncio.gather(*(each._deal(item, rate) for each in links))
    ahead, held = links if links[0].announced else links[::-1]
    assert (ahead.announced, ahead.consumed, ahead._held) == ([(100, 139)], [4_000], None)
    assert (held.announced, held.consumed, held._held) == ([], [], item)
    now[0] += rate.wait_s(now[0])
    await held._deal(item, rate)
    assert (held.announced, held.consumed, held._held) == ([(100, 139)], [4_000], None)


async def test_costly_batches_in_many_shards_of_a_stream_take_no_more_turns_than_the_batches_of_another_grant() -> (
    None
):
    """Also small ones, which need no place: whose links are many has no more of the agent than whose link is one."""
    worked, ticks, done = list[str](), count(), asyncio.Event()
    context: Any = SimpleNamespace(
        failpoints=SimpleNamespace(at=lambda _: None),
        clock_ms=lambda: 0,
        runtime=SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: next(ticks) / 128)),
        large=Places(1),
        turns=LinkContext.__dataclass_fields__["turns"].default_factory(),
    )

    class Session(LinkSession):
        async def _cross_stepped(self, item: Any, header: Any, *_: Any) -> bool:
            return await self._stepped(self._works(item))

        def _works(self, grant: str) -> Steps[bool]:
            for _ in range(10):
                worked.append(grant)
                yield
            return True

    def session(grant: str, shard: int) -> Session:
        link, other = link_row(), SimpleNamespace()
        stream = f"acme/ops/{grant}"
        link.row = SimpleNamespace(grant=grant, stream=stream, shard=shard, verdict=Verdict.RUN, share=stream)
        made = Session(link, context, other, other, asyncio.Event())  # type: ignore[arg-type]
        made._data_keys[b"k"] = data_key()
        return made

    async def carry(link: Session, grant: str, batches: int) -> None:
        for _ in range(batches):
            if not done.is_set():
                await link._cross(grant, SimpleNamespace(key_id=b"k", plain_length=1_000), None)  # type: ignore[arg-type]

    others = [asyncio.ensure_future(carry(session("costly", shard), "costly", 1_000)) for shard in range(30)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        await carry(session("mine", 0), "mine", 5)
    done.set()
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    between = "".join(grant[0] for grant in worked).split("m")[1:-1]
    assert len(between) == 49 and max(map(len, between)) <= 2


@pytest.mark.parametrize("why", ["paused", "leaving", "failed"])
async def test_a_link_that_is_to_stop_while_it_waits_for_its_turn_works_no_more(why: str) -> None:
    """What was announced before a pause is not sent again after it either."""
    context: Any = SimpleNamespace(
        failpoints=SimpleNamespace(at=lambda _: None),
        runtime=SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: 0.0)),
        turns=Turns(STEP_S),
    )
    link, other, worked = link_row(), SimpleNamespace(), list[str]()

    class Session(LinkSession):
        async def _cross_stepped(self, *_: Any) -> bool:
            worked.append(why)
            return True

    session = Session(link, context, other, other, asyncio.Event())  # type: ignore[arg-type]
    session._data_keys[b"k"] = data_key()
    header: Any = SimpleNamespace(key_id=b"k", plain_length=1_000)
    works = context.turns.ask("acme/ops/other", "acme/ops/other")
    waits = asyncio.ensure_future(session._cross(other, header, None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    if why == "paused":
        link.row.verdict = Verdict.PAUSE
    elif why == "leaving":
        link.is_leaving = True
    else:
        session.fail(UnavailableError("The session is over."))
    context.turns.leave(works, 0.0)
    if why == "failed":
        with pytest.raises(UnavailableError):
            await waits
    else:
        assert await waits is False
    assert not worked
    assert context.turns.ask("acme/ops/other", "acme/ops/other").given.is_set(), "the turn is given on"
