"""Leaves over the brokers' links: each stands once and has the index that it had, however often answers and links are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from audit_log import INGRESS_ORIGIN, Link, log_signer
from bridge_mesh import until
from msgspec.structs import replace

from audit import crossed as crossed_module
from audit.checkpoint import note_size
from audit.crossed import PAGE_CHUNKS, Arrived
from audit.errors import AuditUnavailableError
from audit.leaf import (
    EncodedLeaf,
    Header,
    Kind,
    Leaf,
    Side,
    decode_leaf,
    encode_for_log,
    encode_leaf,
    read_header,
)
from audit.position import ShardName
from audit.tile import read_entries
from audit.trail import Trail
from felix.batch import OFFSET_MAX
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.messages import LOGGED_UNTOLD
from felix.names import SpiffeId, StreamName
from policy.truncation import Accepted, Live, Truncation
from region.copies import peer_requests
from region.copies.peer_requests import PeerRequest, PeerRequests
from region.crossing.ingest import IngestService
from region.evidence import audit_server, home_leaves
from region.evidence.arrival_index import ArrivalIndex
from region.evidence.audit_port import FoundAck
from region.evidence.audit_requests import (
    DIGESTS_MAX,
    AckFound,
    AppendLeaves,
    ArrivedBelow,
    AwaitLeaves,
    LeavesAppended,
    LeavesStand,
    NumberTold,
    PassedTold,
    StreamsPassed,
)
from region.evidence.audit_server import AuditServer
from region.evidence.document_log import DocumentLog
from region.evidence.home_leaves import PASSED_REMEMBERED_MAX, HomeLeaves
from region.evidence.remote_audit import (
    CLOCK_AHEAD_MS_MAX,
    READS_OF_BRIDGE_MAX,
    REFUSALS_AHEAD_MS_MAX,
    WAITING_BYTES_MAX,
    RemoteAudit,
)
from region.replication.wire import Answered, Asked

ARRIVES = StreamName.parse("acme/ops/departures")


class Wire:
    """The link between two brokers, as PeerLinks has it. `lose`: asked for each message, whether it is lost, and the link with it."""

    def __init__(self) -> None:
        self.ends = {name: PeerRequests(name) for name in ("b1", "b2")}
        self.up = True
        self.ahead_ms: int | None = 0
        self.lose = lambda message: False
        for name, requests in self.ends.items():
            requests.links = _End(self, name)  # type: ignore[assignment]

    def deliver(self, to: str, sender: str, message: Asked | Answered) -> None:
        if not self.up:
            return
        if self.lose(message):
            self.cut()
            asyncio.get_running_loop().call_soon(self.join)
        else:
            self.ends[to].requested(sender, message)

    def cut(self) -> None:
        self.up = False
        for name, requests in self.ends.items():
            requests.linked("b1" if name == "b2" else "b2", up=False)

    def join(self) -> None:
        self.up = True
        for name, requests in self.ends.items():
            requests.linked("b1" if name == "b2" else "b2", up=True)


class _End:
    def __init__(self, wire: Wire, own: str) -> None:
        self._wire, self._own = wire, own

    def is_up(self, peer: str) -> bool:
        return self._wire.up

    def ahead_of(self, peer: str) -> int | None:
        return self._wire.ahead_ms

    def request(self, peer: str, message: Asked | Answered) -> bool:
        if self._wire.up:
            asyncio.get_running_loop().call_soon(self._wire.deliver, peer, self._own, message)
        return self._wire.up


NOW_MS = 1_800_000_000_000
"""At the broker with the log."""


class Region:
    """b1 has the log, b2 brings leaves."""

    def __init__(self, folder: Path) -> None:
        self.wire = Wire()
        self.trail = Trail.open(folder / "audit", log_signer(INGRESS_ORIGIN))
        self.logged = DocumentLog.open(self.trail, folder / "logged")
        self.brokers = {"b1": "here", "b2": "there"}
        self.copied: dict[StreamName, str] = {}
        self.told: dict[str, PassedTold] = {}
        self.leaves = HomeLeaves(
            "b1",
            lambda: self.brokers,
            lambda broker: iter((ARRIVES,)),
            lambda broker: self.wire.up,
            lambda concerned: {name: self.copied[name] for name in filter(concerned, self.copied)},
            self.passed,
        )
        self.server = AuditServer(
            self.wire.ends["b1"],
            self.trail,
            ArrivalIndex(self.trail),
            self.logged,
            self.leaves,
            lambda: NOW_MS,
        )
        self.remote = RemoteAudit("eu-west", self.wire.ends["b2"], lambda: "b1")

    async def passed(self, broker: str, asked: StreamsPassed) -> PassedTold:
        """What a leader says of its streams with copies."""
        return self.told[broker]

    def arrived(self) -> list[int]:
        """The first source offset of each range in the log."""
        size = note_size(self.trail.publish())
        headers = [read_header(data) for _, data in read_entries(self.trail.files, 0, size, size)]
        return [
            header.first_offset
            for header in headers
            if header is not None and header.kind is Kind.ACK and header.first_offset is not None
        ]

    async def close(self) -> None:
        await self.remote.close()
        for requests in self.wire.ends.values():
            await requests.close()
        await asyncio.to_thread(self.trail.close)


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[Region]:
    made = Region(tmp_path)
    yield made
    await made.close()


def ranges(count: int) -> list[list[EncodedLeaf]]:
    """The ACK leaves of so many ranges of one shard, in order."""
    link = Link()
    return [[encode_for_log(leaf) for leaf in link.delivery(link.intent(3))] for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
async def test_a_leaf_whose_answer_was_lost_stands_once_and_has_its_index(region: Region, seed: int) -> None:
    random, said = Random(seed), dict[int, list[int]]()
    region.wire.lose = lambda message: random.random() < 0.3
    for number, leaves in enumerate(ranges(30)):
        region.remote.append_nowait(
            leaves, lambda index, error, number=number: said.setdefault(number, []).append(index)
        )  # type: ignore[misc]
        if random.random() < 0.5:
            await asyncio.sleep(0)
    await until(lambda: len(said) == 30, "an index for each range")
    found = region.arrived()
    assert found == sorted(set(found)) and len(found) == 30, "each once, in order"
    assert said == {number: [number] for number in range(30)}


async def test_a_leaf_that_cannot_be_read_whole_is_refused_and_the_log_verifies(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of it changed in turn, and cut off at each: what is taken can be read."""
    (whole,) = (leaf.data for group in ranges(1) for leaf in group)
    ask, taken = region.wire.ends["b2"].ask, 0
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    swapped = whole[:-136] + whole[-68:] + whole[-136:-68]
    leaf = decode_leaf(whole)
    header = replace(leaf.header, record_bytes=0, payload_bytes=leaf.header.record_bytes)
    old = encode_leaf(Leaf(header, leaf.entries, 1))
    for number, data in enumerate([swapped, old, *changed, *(whole[:at] for at in range(0, len(whole), 7))]):
        # In a thread, as many of them are.
        monkeypatch.setattr(audit_server, "CHECKED_AT_ONCE_BYTES", (64 << 10) * (number % 2))
        try:
            await ask("b1", AppendLeaves([[data]], 0, False), LeavesAppended)
        except RequestError as refused:
            assert refused.code is Code.FORBIDDEN
        else:
            assert number > 1
            taken += 1
    size = note_size(region.trail.publish())
    assert size <= taken
    for _, data in read_entries(region.trail.files, 0, size, size):
        assert decode_leaf(data).version == 2


async def test_a_range_that_was_settled_while_its_leaves_waited_is_not_written_again(region: Region) -> None:
    """Its stream was led anew before the first request was answered."""
    said: list[int] = []
    (leaves,) = ranges(1)
    region.wire.cut()
    region.remote.append_nowait(leaves, lambda index, error: said.append(index))
    await asyncio.sleep(0)
    region.wire.up = True
    assert await region.remote.arrivals.append_missing(0, [leaves]) == [0]
    region.wire.join()
    await until(lambda: said, "its index")
    assert said == [0] and len(region.arrived()) == 1
    assert await region.remote.arrivals.append_missing(0, [leaves]) == []


async def test_without_a_link_nothing_may_cross_and_little_is_kept(region: Region) -> None:
    region.wire.cut()
    failure = region.remote.failure
    assert isinstance(failure, AuditUnavailableError) and "start broker b1" in failure.hint
    (leaves,) = ranges(1)
    size = sum(len(leaf.data) for leaf in leaves)
    for _ in range(WAITING_BYTES_MAX // size):
        region.remote.append_nowait(leaves, lambda index, error: None)
    with pytest.raises(AuditUnavailableError):
        region.remote.append_nowait(leaves, lambda index, error: None)
    with pytest.raises(AuditUnavailableError):
        await region.remote.arrivals.charged_bytes("a-grant")


async def test_only_what_arrived_or_was_refused_is_taken_from_another_broker(region: Region) -> None:
    async def asked(leaf: Leaf) -> FelixError | None:
        try:
            await region.wire.ends["b2"].ask(
                "b1", AppendLeaves([[encode_for_log(leaf).data]], 0, again=False), LeavesAppended
            )
        except FelixError as error:
            return error
        return None

    link = Link()
    intent = link.intent(3)

    def deny(side: Side, source: str, destination: str) -> Leaf:
        return Leaf(
            Header(
                kind=Kind.DENY, side=side, time_ms=1, source_region=source, destination_region=destination,
                actor="a", action="subscribe", rule="forbidden", code=1, sentence="No.",
            )
        )  # fmt: skip

    misplaced = (
        deny(Side.INGRESS, "eu-west", "us-east"),
        deny(Side.EGRESS, "us-east", "eu-west"),
        deny(Side.EGRESS, "us-east", "ap-south"),
    )
    here = deny(Side.INGRESS, "us-east", "eu-west")
    more = (
        replace(here.header, time_ms=NOW_MS + audit_server.REFUSED_AHEAD_MS_MAX + 1),
        replace(here.header, records=5),
        replace(here.header, document_sha256=b"d" * 32),
    )
    for leaf in (link.grant(), *intent, *misplaced, *map(Leaf, more)):
        refused = await asked(leaf)
        assert isinstance(refused, RequestError) and refused.code is Code.FORBIDDEN
    ahead = Leaf(replace(here.header, time_ms=NOW_MS + audit_server.REFUSED_AHEAD_MS_MAX))
    for leaf in (here, deny(Side.EGRESS, "eu-west", "us-east"), ahead):
        assert await asked(leaf) is None
    assert await asked(link.delivery(intent)[0]) is None
    assert len(region.arrived()) == 1


async def test_a_request_that_nobody_serves_is_refused_with_a_sentence(region: Region) -> None:
    class Unknown(PeerRequest, frozen=True, tag="unknown"):
        pass

    with pytest.raises(FelixError, match="does not know"):
        await region.wire.ends["b2"].ask("b1", Unknown(), LeavesAppended)


async def test_a_documents_leaf_waits_until_the_other_broker_has_let_pass_what_it_stops(
    region: Region,
) -> None:
    digest = b"d" * 32
    assert not await region.remote.leaves.has_leaf(digest, passed=False)
    waiting = asyncio.ensure_future(region.leaves.all_passed(digest, lambda name: False, lambda: True))
    await asyncio.sleep(0)
    assert not waiting.done()
    follows = asyncio.ensure_future(region.remote.leaves.has_leaf(digest, passed=True))
    await waiting
    assert not follows.done(), "the leaf does not stand yet"
    region.logged.learn(digest, 7)
    assert await follows
    assert region.remote.leaves.leaf_of(digest) == 7, "where it stands"
    assert await region.remote.leaves.has_leaf(digest, passed=False)


async def test_a_documents_leaf_waits_for_a_broker_that_is_gone_only_where_records_may_lack_theirs(
    region: Region, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash left a range without its leaf, which the broker writes once it is back: not behind a revocation."""
    monkeypatch.setattr(home_leaves, "LOOK_S", 0.001)
    region.brokers["b2"] = ""
    digest = b"d" * 32
    await region.leaves.all_passed(digest, lambda name: False, lambda: True)
    waiting = asyncio.ensure_future(
        region.leaves.all_passed(digest, lambda name: name == ARRIVES, lambda: True)
    )
    await until(lambda: "waits for broker b2" in caplog.text, "the sentence about it")
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    region.brokers["b2"] = "there"
    follows = asyncio.ensure_future(region.remote.leaves.has_leaf(digest, passed=True))
    await waiting
    region.logged.learn(digest)
    assert await follows


async def test_what_the_log_says_of_a_shard_is_told_as_it_is_read_there(region: Region) -> None:
    groups = ranges(5)
    region.remote.append_nowait([leaf for leaves in groups for leaf in leaves], lambda index, error: None)
    await until(lambda: len(region.arrived()) == 5, "all ranges")
    here, there = ArrivalIndex(region.trail), region.remote.arrivals
    header = groups[0][0].header
    name: Any = ShardName.of(header)
    bridge = SpiffeId.parse(header.bridge)
    assert await there.charged_bytes(header.grant_id) == await here.charged_bytes(header.grant_id) > 0
    assert (
        await there.arrived_below(bridge, name, header.incarnation)
        == await here.arrived_below(bridge, name, header.incarnation)
        == Arrived(15, 15)
    )
    other = SpiffeId.parse(f"{bridge}-2")
    assert await there.arrived_below(other, name, header.incarnation) == Arrived(15, 0)
    # Another incarnation, of which the log alone knows.
    assert await there.arrived_below(bridge, name, b"x" * 16) == Arrived(0, 0)
    scope: Any = SimpleNamespace(
        source_region=header.source_region,
        destination_region=header.destination_region,
        stream=header.stream,
        shard=header.shard,
        destination=header.destination_stream,
        incarnation=header.incarnation,
    )
    found = await there.find_ack(scope, 6)
    assert found == await here.find_ack(scope, 6)
    assert found is not None and found.leaf == 2
    assert await there.find_ack(scope, 7) is None
    cut = Truncation(stream=header.stream, shard=0, incarnation=header.incarnation.hex(), epoch=0, offset=9)
    lives = [Live(header.incarnation, None), Live(b"n" * 16, Accepted(cut, "us-east", 5, is_resend=True))]
    before = await there.crossed_before(bridge, name, lives)
    assert before.page(0, 20) == (await here.crossed_before(bridge, name, lives)).page(0, 20)
    assert before.next == 15


async def test_what_a_process_asked_for_that_is_gone_is_told_to_the_one_after_it(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed while the log committed slowly: its successor counts in a grant's budget what the log is about to have."""
    groups = ranges(20)
    header = groups[0][0].header
    append, waiting = region.trail.append_nowait, list[Any]()
    monkeypatch.setattr(region.trail, "append_nowait", lambda *arguments: waiting.append(arguments) or 0)
    for leaves in groups:
        region.remote.append_nowait(leaves, lambda index, error: None)
    await until(lambda: len(waiting) == len(groups), "that the log is asked")
    region.wire.cut()
    region.wire.join()
    after = RemoteAudit("eu-west", region.wire.ends["b2"], lambda: "b1").arrivals
    bridge, name = SpiffeId.parse(header.bridge), ShardName.of(header)
    charged = asyncio.ensure_future(after.charged_bytes(header.grant_id))
    below = asyncio.ensure_future(after.arrived_below(bridge, name, header.incarnation))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not charged.done() and not below.done()
    for arguments in waiting:
        append(*arguments)
    assert await charged == region.trail.positions.charged_bytes(header.grant_id) > 0
    assert (await below).below == 3 * len(groups)
    monkeypatch.undo()
    await after.close()


async def test_what_other_brokers_took_under_a_grant_is_heard_with_each_leaf_and_when_a_link_is_opened(
    region: Region,
) -> None:
    """The stream was led elsewhere meanwhile, or another one under the same pattern is."""
    groups = ranges(4)
    grant = groups[0][0].header.grant_id
    there: Any = SimpleNamespace(audit=region.remote, arrivals=region.remote.arrivals)
    broker: Any = SimpleNamespace(region="eu-west", mesh="acme", broker_id="b2")
    none: Any = None
    service = IngestService(broker, there, none, none, none)
    meter = await service.meter(grant)
    assert meter.taken_bytes == there.arrivals.charged_at_least(grant) == 0
    await region.trail.append(groups[0])
    assert await service.meter(grant) is meter
    assert meter.taken_bytes == region.trail.positions.charged_bytes(grant) > 0
    for leaves in groups[1:3]:
        await region.trail.append(leaves)
    said: list[int] = []
    meter.take(sum(leaf.header.charged_bytes for leaf in groups[3]))
    region.remote.append_nowait(groups[3], lambda index, error: said.append(index))
    await until(lambda: said, "its index")
    charged = sum(leaf.header.charged_bytes for leaves in groups for leaf in leaves)
    assert there.arrivals.charged_at_least(grant) == region.trail.positions.charged_bytes(grant) == charged
    meter.hear(there.arrivals.charged_at_least(grant))
    assert meter.taken_bytes == charged, "what it took itself counts once"
    service.close()


async def test_a_documents_leaf_waits_for_streams_with_copies_until_who_leads_one_has_let_pass_what_it_stops(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its leader is gone, the next one has not yet written the leaves of what that had taken, and then has."""
    monkeypatch.setattr(home_leaves, "AGAIN_S", 0.001)
    monkeypatch.setattr(home_leaves, "SILENT_S", 0.0)
    region.brokers.pop("b2")
    region.copied = {ARRIVES: "", StreamName.parse("acme/ops/else"): ""}
    waiting = asyncio.ensure_future(
        region.leaves.all_passed(b"d" * 32, lambda name: name == ARRIVES, lambda: True)
    )
    await until(lambda: f"waits for {ARRIVES}" in caplog.text, "the sentence about it")
    region.told["b3"] = PassedTold(known=True, streams=[])
    region.copied[ARRIVES] = "b3"
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    region.told["b3"] = PassedTold(known=True, streams=[str(ARRIVES)])
    await waiting


async def test_a_documents_leaf_does_not_wait_for_a_stream_that_is_deleted_or_whose_leader_never_saw_it(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_leaves, "AGAIN_S", 0.001)
    region.brokers.pop("b2")
    region.copied = {ARRIVES: ""}
    waiting = asyncio.ensure_future(region.leaves.all_passed(b"d" * 32, lambda name: True, lambda: False))
    await asyncio.sleep(0)
    assert not waiting.done()
    region.copied.clear()
    await waiting
    monkeypatch.setattr(home_leaves, "SILENT_S", 0.0)
    region.copied, region.told = {ARRIVES: "b3"}, {"b3": PassedTold(known=False, streams=[])}
    await region.leaves.all_passed(b"d" * 32, lambda name: True, lambda: False)


async def test_two_leaders_that_bring_one_range_at_once_leave_one_leaf(region: Region) -> None:
    """The one of before had it committed, and does not know yet that another one leads: the new one writes what it finds without a leaf. The old one may
    know of a longer log than its range."""
    said: list[int] = []
    leaves, later = ranges(2)
    data = [leaf.data for leaf in leaves]
    region.remote.append_nowait(leaves, lambda index, error: said.append(index))
    serve = region.server._append
    answers = await asyncio.gather(
        serve("b2", AppendLeaves([data], 0, again=False)),
        serve("b3", AppendLeaves([data], 0, again=True)),
        serve("b4", AppendLeaves([data, [leaf.data for leaf in later]], 0, again=False)),
    )
    assert [answer.indexes[0] for answer in answers] == [0, 0, 0]
    late = await serve("b2", AppendLeaves([data], answers[-1].size, again=False))
    assert (late.indexes, late.missing) == ([0], [])
    region.server.append_nowait(leaves, lambda index, error: said.append(index))
    await until(lambda: said == [0, 0], "the index that it has")
    assert len(region.arrived()) == 2


async def test_what_the_broker_with_the_log_led_itself_and_another_settles_leaves_one_leaf(
    region: Region,
) -> None:
    said: list[int] = []
    (leaves,) = ranges(1)
    region.server.append_nowait(leaves, lambda index, error: said.append(index), asyncio.get_running_loop())
    answer = await region.server._append("b3", AppendLeaves([[leaf.data for leaf in leaves]], 0, again=True))
    assert (answer.indexes, said) == ([0], [0])
    assert len(region.arrived()) == 1


async def test_what_the_broker_with_the_log_brings_itself_stands_in_the_order_in_which_it_came(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first range it has to look whether it stands, of the others it knows that they do not."""
    groups = ranges(3)
    monkeypatch.setattr(region.server, "_may_stand", lambda leaves: leaves[0] is groups[0][0])
    said: list[int] = []
    for leaves in groups:
        region.server.append_nowait(
            leaves, lambda index, error: said.append(index), asyncio.get_running_loop()
        )
    await until(lambda: len(said) == 3, "the index of each")
    assert said == [0, 1, 2] and region.arrived() == [0, 3, 6]


async def test_what_the_broker_with_the_log_brings_itself_waits_for_a_log_that_cannot_be_read(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit_server, "AGAIN_S", 0.001)
    first, second = ranges(2)
    monkeypatch.setattr(region.server, "_may_stand", lambda leaves: True)
    read, failures = ArrivalIndex.find_groups, [OSError("a disk hangs"), UnavailableError("It is read.")]

    async def find_groups(index: ArrivalIndex, *asked: Any) -> dict[int, int]:
        if failures:
            raise failures.pop()
        return await read(index, *asked)

    monkeypatch.setattr(ArrivalIndex, "find_groups", find_groups)
    said: list[int] = []
    for leaves in (first, second, first):
        region.server.append_nowait(
            leaves, lambda index, error: said.append(index), asyncio.get_running_loop()
        )
    await until(lambda: len(said) == 3, "the index of each")
    assert sorted(said) == [0, 0, 1] and region.arrived() == [0, 3] and "a disk hangs" in caplog.text


async def test_a_leaf_does_not_wait_for_ever_for_a_broker_that_never_saw_the_document(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_leaves, "SILENT_S", 0.0)
    monkeypatch.setattr(home_leaves, "LOOK_S", 0.01)
    region.wire.cut()
    is_stored = True
    waiting = asyncio.ensure_future(region.leaves.all_passed(b"d" * 32, lambda name: True, lambda: is_stored))
    await asyncio.sleep(0)
    assert not waiting.done(), "it may have leaves on their way"
    region.wire.join()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done(), "it sees the document still"
    is_stored = False
    await waiting
    is_stored = True
    await region.leaves.all_passed(b"e" * 32, lambda name: False, lambda: True)


async def test_a_leaf_waits_for_a_broker_that_has_seen_the_document_and_waits_itself(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream there does not open, and holds a range without its leaf: behind a revocation it would be held against the log."""
    digest = b"d" * 32
    assert not await region.remote.leaves.has_leaf(digest, passed=False)
    monkeypatch.setattr(home_leaves, "LOOK_S", 0.001)
    waiting = asyncio.ensure_future(region.leaves.all_passed(digest, lambda name: False, lambda: False))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    # It asks no more: another document took the place of this one before it started again.
    monkeypatch.setattr(home_leaves, "SILENT_S", 0.0)
    await waiting


async def test_nobody_is_told_that_a_document_has_no_leaf_while_that_is_being_written(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the time of before it was written, and may stand: what goes on without it could stand behind it."""
    digest = b"d" * 32
    monkeypatch.setattr(audit_server, "FOLLOW_S", 0.01)
    region.logged._writing[digest] = 0
    for passed in (False, True):
        assert await region.remote.leaves.has_leaf(digest, passed=passed) is None
    region.logged.lacks(digest)
    assert await region.remote.leaves.has_leaf(digest, passed=True) is False
    region.logged.learn(digest)
    assert await region.remote.leaves.has_leaf(digest, passed=False) is True


async def test_of_many_documents_is_asked_a_few_times_while_their_leaves_are_written(region: Region) -> None:
    """Each answer is one to all of them."""
    digests = [sha256(b"%d" % number).digest() for number in range(DIGESTS_MAX)]
    questions = 0

    def count(message: Asked | Answered) -> bool:
        nonlocal questions
        questions += isinstance(message, Asked)
        return False

    async def follow(digest: bytes) -> None:
        while not await region.remote.leaves.has_leaf(digest, passed=True):
            pass

    region.wire.lose = count
    follows = asyncio.gather(*map(follow, digests))
    for digest in digests:
        await asyncio.sleep(0.0005)
        region.logged.learn(digest)
    await follows
    assert questions < 200


@pytest.mark.parametrize("chunks", [PAGE_CHUNKS, 1], ids=["one page", "many pages"])
async def test_what_crossed_before_a_resend_is_told_wherever_a_source_says_that_its_records_lie(
    region: Region, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets are the source's word: a bit for each from 0 on would take all memory of both brokers."""
    monkeypatch.setattr(crossed_module, "PAGE_CHUNKS", chunks)
    link, firsts = Link(), (5, 1 << 20, 1 << 40, OFFSET_MAX - 10)
    for first in firsts:
        link.offset = first
        leaves = [encode_for_log(leaf) for leaf in link.delivery(link.intent(3))]
        region.remote.append_nowait(leaves, lambda index, error: None)
    await until(lambda: len(region.arrived()) == len(firsts), "all ranges")
    header = leaves[0].header
    name, bridge = ShardName.of(header), SpiffeId.parse(header.bridge)
    cut = Truncation(stream=header.stream, shard=0, incarnation=header.incarnation.hex(), epoch=0, offset=0)
    lives = [Live(header.incarnation, None), Live(b"n" * 16, Accepted(cut, "us-east", 5, is_resend=True))]
    asked: list[Asked] = []

    def count(message: Asked | Answered) -> bool:
        if isinstance(message, Asked):
            asked.append(message)
        return False

    region.wire.lose = count
    before = await region.remote.arrivals.crossed_before(bridge, name, lives)
    for first in firsts:
        assert [offset for offset in range(first - 1, first + 4) if offset in before] == [
            *range(first, first + 3)
        ]
    assert before.next == firsts[-1] + 3
    assert len(asked) == (1 if chunks > 1 else len(firsts))


async def test_an_answer_that_is_too_long_is_refused_with_a_sentence(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_requests, "ASK_BYTES_MAX", 100)

    class Long(PeerRequest, frozen=True, tag="long"):
        pass

    async def answer(peer: str, asked: Long) -> AckFound:
        return AckFound(FoundAck(1, bytes(200)))

    region.wire.ends["b1"].serve(Long, answer)
    with pytest.raises(UnavailableError, match="100 fit"):
        await region.wire.ends["b2"].ask("b1", Long(), AckFound)


async def test_a_broker_that_asks_for_many_documents_is_refused_and_what_is_remembered_for_it_is_bounded(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_server, "FOLLOW_S", 0.01)
    asker = region.wire.ends["b2"]
    for digests in ([bytes(32)] * (DIGESTS_MAX + 1), [b"short"]):
        with pytest.raises(FelixError, match="asks what broker b1 does not know"):
            await asker.ask("b1", AwaitLeaves(digests, passed=True), LeavesStand)
    for turn in range(25):
        digests = [sha256(b"%d %d" % (turn, number)).digest() for number in range(DIGESTS_MAX)]
        assert not (await asker.ask("b1", AwaitLeaves(digests, passed=True), LeavesStand)).digests
    assert len(region.leaves._passed) == PASSED_REMEMBERED_MAX < 25 * DIGESTS_MAX


@pytest.mark.parametrize("ahead_ms", [-60_000, 0, CLOCK_AHEAD_MS_MAX])
async def test_a_clock_that_is_near_or_behind_the_logs_stops_nothing(region: Region, ahead_ms: int) -> None:
    region.wire.ahead_ms = ahead_ms
    assert region.remote.arrivals.refusal() is None


async def test_nothing_arrives_where_the_clock_is_ahead_of_the_logs_or_not_known_to_be_right(
    region: Region,
) -> None:
    arrivals = region.remote.arrivals
    region.wire.ahead_ms = CLOCK_AHEAD_MS_MAX + 1
    refusal = arrivals.refusal()
    assert isinstance(refusal, AuditUnavailableError)
    assert "clock of broker b2" in refusal.sentence and "broker b1" in refusal.sentence
    region.wire.ahead_ms = None
    assert isinstance(arrivals.refusal(), AuditUnavailableError)
    assert region.remote.failure is None, "what was taken before still gets its leaves"


async def test_a_refusal_of_a_clock_that_is_far_ahead_keeps_no_other_leaf_waiting(region: Region) -> None:
    def refused(time_ms: int) -> Leaf:
        return Leaf(
            Header(
                kind=Kind.DENY, side=Side.INGRESS, time_ms=time_ms, source_region="us-east", destination_region="eu-west",
                actor="a", action="subscribe", rule="forbidden", code=1, sentence="No.",
            )
        )  # fmt: skip

    stands: list[int] = []
    region.wire.ahead_ms = 3_600_000
    with pytest.raises(AuditUnavailableError, match="s ahead of that of broker b1"):
        region.remote.append_nowait([refused(NOW_MS + 3_600_000)], lambda index, error: None)
    (leaves,) = ranges(1)
    region.remote.append_nowait(leaves, lambda index, error: stands.append(index))
    await until(lambda: len(stands) == 1, "the arrival's leaf")
    for near in (REFUSALS_AHEAD_MS_MAX, None):
        region.wire.ahead_ms = near
        region.remote.append_nowait([refused(NOW_MS)], lambda index, error: stands.append(index))
    await until(lambda: len(stands) == 3, "the leaves of both refusals")


async def test_a_bridge_that_opens_links_and_goes_leaves_room_for_leaves(region: Region) -> None:
    """Each opening may have the log read, and what was asked stays under way there. A source may name any incarnation."""
    header = ranges(1)[0][0].header
    name, bridge = ShardName.of(header), SpiffeId.parse(header.bridge)
    asked, may_answer = list[bytes](), asyncio.Event()

    async def slow(peer: str, request: ArrivedBelow) -> NumberTold:
        asked.append(request.incarnation)
        await may_answer.wait()
        return NumberTold(7)

    region.wire.ends["b1"].serve(ArrivedBelow, slow)
    arrivals = region.remote.arrivals
    incarnations = [bytes([number]) * 16 for number in range(READS_OF_BRIDGE_MAX + 1)]
    for _ in range(10):
        opened = [asyncio.ensure_future(arrivals.arrived_below(bridge, name, each)) for each in incarnations]
        await asyncio.sleep(0)
        for each in opened:
            each.cancel()
    last = asyncio.ensure_future(arrivals.arrived_below(bridge, name, incarnations[-1]))
    assert await arrivals.charged_bytes(header.grant_id) == 0, "others are answered"
    assert asked == incarnations[:-1]
    may_answer.set()
    assert await last == Arrived(7, LOGGED_UNTOLD), "a broker of before does not say who brought it"
    assert asked == incarnations
