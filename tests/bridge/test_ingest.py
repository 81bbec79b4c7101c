"""The destination against an agent that does what ours never would: a real identity, a real grant, and raw envelopes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from bridge_mesh import BRIDGE, STREAM, Mesh, two_regions, until
from region_peer import RawPeer, encode_request, raw_peer

from audit.crossed import OffsetSet
from audit.leaf import Kind
from audit.receipt import Receipt, open_receipt
from felix.batch import NewRecord, decode_header, encode_batch
from felix.errors import Code, FelixError, ProtocolError, RequestError, UnavailableError
from felix.frames import FRAME_HEADER_BYTES, FrameType, encode_frame
from felix.identity_file import load_identity
from felix.messages import IngestOpened, OpenIngest, decode_answer, decode_error
from felix.names import StreamName
from felix.provenance import PATH_HEADER
from felix.steps import finished
from keys.key_id import KeyKind, new_key_id
from keys.transfer import TransferKey, TransferScope, seal_envelope, seal_transfer_key
from policy.quantity import Size
from policy.transform import TransformSpec
from region.config import LimitsConfig
from region.crossing.ingest import CHECK_STEP_OFFSETS, INGEST_WINDOW_BYTES, _check_new
from region.log.producers import ProducerTable
from region.log.shard import ShardLog


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def wrapped(payload: bytes) -> bytes:
    """As the grant's terms ask for: a JSON object, and nothing else of it matters here."""
    return b'{"is":"%s"}' % payload


class Rogue:
    """One session of the bridge at the destination."""

    def __init__(self, mesh: Mesh, peer: RawPeer, grant: str, terms_hash: bytes) -> None:
        self.mesh, self.peer = mesh, peer
        scope = TransferScope(
            "us-east", "eu-west", StreamName.parse(STREAM), b"i" * 16, StreamName.parse(STREAM), 0, 1, grant,
            terms_hash, mesh.bridge_id,
        )  # fmt: skip
        self.key = TransferKey(new_key_id("us-east", KeyKind.TRANSFER, b"r" * 11), scope, b"k" * 32)

    def begin(self) -> int:
        """Ask for an ingest stream."""
        scope = self.key.scope
        sealed = seal_transfer_key(
            self.key, self.mesh.bundle("eu-west").hybrid_import_key(), self.peer.identity
        )
        request = OpenIngest(
            scope.grant_id,
            "us-east",
            STREAM,
            0,
            1,
            scope.incarnation,
            1,
            sealed.sealed,
            sealed.signature,
            self.mesh.statement(),
        )
        stream = self.peer.peer.open_stream(bidirectional=True)
        self.peer.send(encode_request(request), stream)
        return stream

    async def opened(self, stream: int) -> IngestOpened:
        """Raises what it is refused with."""
        await until(lambda: self.peer.frames.get(stream) or self.peer.closed_with, "an answer")
        self._raise(stream)
        answer = decode_answer(self.peer.of(FrameType.ANSWER, stream)[0].body)
        assert isinstance(answer, IngestOpened)
        return answer

    async def open(self) -> int:
        stream = self.begin()
        await self.opened(stream)
        return stream

    def _raise(self, stream: int) -> None:
        errors: list[FelixError] = [
            decode_error(frame.body) for frame in self.peer.of(FrameType.ERROR, stream)
        ] + (self.peer.errors(0) if self.peer.closed_with else [])
        if errors:
            raise errors[0]

    def send(
        self, stream: int, base: int, payloads: list[bytes], path: bytes = b"us-east", producer: int = 0
    ) -> None:
        batch = encode_batch(
            [NewRecord(wrapped(payload), None, {PATH_HEADER: path}) for payload in payloads],
            shard=0,
            producer_id=producer,
            producer_epoch=9 if producer else 0,
        )
        last = base + len(payloads) - 1
        sealed = seal_envelope(
            self.key, self.peer.identity, base_offset=base, last_offset=last, batch=batch,
            source_offsets=range(base, last + 1),
        )  # fmt: skip
        self.peer.send(encode_frame(FrameType.TRANSFER, sealed.encode()), stream)

    async def receipt(self, stream: int, count: int = 1) -> Receipt:
        """The last of so many. Raises what the broker refuses instead."""
        await until(
            lambda: (
                len(self.peer.of(FrameType.RECEIPT, stream)) >= count
                or self.peer.of(FrameType.ERROR, stream)
                or self.peer.closed_with
            ),
            "a receipt",
        )
        self._raise(stream)
        frame = self.peer.of(FrameType.RECEIPT, stream)[count - 1]
        return open_receipt(bytes(frame.body[8:]), self.mesh.trust.region("eu-west").receipt_keys)


@asynccontextmanager
async def rogue(mesh: Mesh, grant: str, terms_hash: bytes) -> AsyncIterator[Rogue]:
    node = mesh.nodes["eu-west"]
    identity = load_identity(mesh.us.identity(BRIDGE))
    async with raw_peer(mesh.eu, node.address, identity=identity, region="eu-west") as peer:
        yield Rogue(mesh, peer, grant, terms_hash)


async def granted(mesh: Mesh) -> tuple[str, bytes]:
    body, export, accepted = mesh.sign_grant(transform=TransformSpec())
    await mesh.agree("eu-west", body, export, accepted)
    return body.grant, bytes.fromhex(body.terms_hash)


def destination(mesh: Mesh) -> ShardLog:
    hosted = mesh.nodes["eu-west"].broker.streams.get(StreamName.parse(STREAM))
    assert hosted is not None
    return hosted.shard(0)


@contextmanager
def slow_disk(shard: ShardLog, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Syncs of this shard hang until the block ends."""
    assert shard._files is not None
    disk, gate = shard._files.disk, threading.Event()
    sync = disk.sync

    def hanging() -> None:
        gate.wait(60)
        sync()

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", hanging)
        try:
            yield
        finally:
            gate.set()


async def test_a_second_stream_waits_for_what_the_first_has_on_its_way(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would read a position from before that append, and take the same records in twice."""
    grant = await granted(mesh)
    async with rogue(mesh, *grant) as first, rogue(mesh, *grant) as second:
        stream = await first.open()
        first.send(stream, 0, [b"0"])
        await first.receipt(stream)
        shard = destination(mesh)
        with slow_disk(shard, monkeypatch):
            first.send(stream, 1, [b"1", b"2"])
            await until(lambda: shard.log_end_offset == 3, "an append on its way")
            again = second.begin()
            await until(lambda: first.peer.of(FrameType.ERROR, stream), "the first stream's end")
            assert not second.peer.frames.get(again)
        opened = await second.opened(again)
        assert opened.position == 3
        second.send(again, 1, [b"1", b"2"])
        receipt = await second.receipt(again)
        assert (receipt.destination_first_offset, receipt.destination_last_offset) == (1, 2)
        second.send(again, 3, [b"3"])
        await second.receipt(again, 2)
    assert [bytes(record.payload) for record in await mesh.read("eu-west", 4)] == [
        wrapped(payload) for payload in (b"0", b"1", b"2", b"3")
    ]
    await mesh.stop("eu-west")
    acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
    assert [(ack.first_offset, ack.last_offset) for ack in acks] == [(0, 0), (1, 2), (3, 3)]
    # What the records themselves said, in the leaf and in the receipt.
    assert {ack.path for ack in acks} == {("us-east",)} and receipt.path_sha256 == sha256(b"us-east").digest()


async def test_a_range_without_an_answer_is_not_answered_before_it_is_durable(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await granted(mesh)
    async with rogue(mesh, *grant) as agent:
        stream = await agent.open()
        agent.send(stream, 0, [b"0"])
        await agent.receipt(stream)
        with slow_disk(destination(mesh), monkeypatch):
            agent.send(stream, 1, [b"1"])
            agent.send(stream, 1, [b"1"])
            with pytest.raises(ProtocolError, match="before it was answered"):
                await agent.receipt(stream, 2)
    await mesh.stop("eu-west")
    acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
    assert [(ack.first_offset, ack.last_offset) for ack in acks] == [(0, 0), (1, 1)]


async def test_leaves_that_are_on_their_way_are_bounded_also_where_a_disk_stands_still(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An envelope of 200 kB may have 4.4 MB of leaves, and so many again in the note beside the stream; a window has 24."""
    monkeypatch.setattr("region.crossing.ingest.LEAVES_BYTES_MAX", 1_000)
    grant, sent = await granted(mesh), 0
    async with rogue(mesh, *grant) as agent:
        stream = await agent.open()
        agent.send(stream, 0, [b"0"])
        await agent.receipt(stream)
        shard = destination(mesh)
        with slow_disk(shard, monkeypatch):
            for sent in range(1, 9):
                agent.send(stream, sent, [b"%d" % sent])
            await until(lambda: shard.log_end_offset > 1, "an append on its way")
            await asyncio.sleep(0.5)
            assert shard.log_end_offset <= 4, "a leaf has some 700 bytes"
        await agent.receipt(stream, 1 + sent)
        # What was sent again has no note, and is bounded as well.
        for again in range(1, 9):
            agent.send(stream, again, [b"%d" % again])
        await agent.receipt(stream, 1 + 2 * sent)
    await mesh.stop("eu-west")
    acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
    assert [ack.first_offset for ack in acks] == list(range(9)) and mesh.verify_ingress().ok


@pytest.mark.parametrize("waits_for", ["a rate", "room for leaves"])
async def test_who_is_cut_off_while_an_envelope_waits_takes_it_no_more(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """What was revoked or denied meanwhile it does not know."""
    body, export, accepted = mesh.sign_grant(
        transform=TransformSpec(), **({"rate_bytes": 50} if waits_for == "a rate" else {})
    )
    await mesh.agree("eu-west", body, export, accepted)
    async with rogue(mesh, body.grant, bytes.fromhex(body.terms_hash)) as agent:
        stream = await agent.open()
        agent.send(stream, 0, [b"0" * 100])
        await agent.receipt(stream)
        shard, broker = destination(mesh), mesh.nodes["eu-west"].broker
        if waits_for != "a rate":
            monkeypatch.setattr("region.crossing.ingest.LEAVES_BYTES_MAX", 0)
        with slow_disk(shard, monkeypatch):
            for base in (1, 2):
                agent.send(stream, base, [b"%d" % base * 60])
            await asyncio.sleep(0.5)
            end = shard.log_end_offset
            assert end < 3, "it waits"
            cut_off = UnavailableError("Cut off.", code=Code.NOT_LEADER)
            monkeypatch.setattr(type(broker), "fence", lambda _: cut_off)
        with pytest.raises(UnavailableError, match="Cut off"):
            await agent.receipt(stream, 3)
        assert shard.log_end_offset == end
        monkeypatch.undo()


def test_what_crossed_before_a_resend_is_looked_for_in_small_steps() -> None:
    """Between two steps others may have their turn: an envelope has 65,536 records at most, 15 ms of looking."""
    before = OffsetSet()
    before.add(1 << 17, 1)
    assert len(list(_check_new(before, range(1 << 16)))) == (1 << 16) // CHECK_STEP_OFFSETS
    assert finished(_check_new(before, range(1 << 16))) is True
    with pytest.raises(RequestError, match="source offset 131072 crossed before"):
        finished(_check_new(before, range((1 << 17) - 60_000, (1 << 17) + 5_000)))


async def test_no_receipt_for_contents_that_never_landed(mesh: Mesh) -> None:
    grant = await granted(mesh)
    async with rogue(mesh, *grant) as agent:
        stream = await agent.open()
        agent.send(stream, 0, [b"true"])
        receipt = await agent.receipt(stream)
        agent.send(stream, 0, [b"true"])
        again = await agent.receipt(stream, 2)
        assert (again.envelope_sha256, again.ingress_index) == (
            receipt.envelope_sha256,
            receipt.ingress_index,
        )
        agent.send(stream, 0, [b"false"])
        with pytest.raises(RequestError, match="another envelope") as refused:
            await agent.receipt(stream, 3)
        assert refused.value.code is Code.POSITION_GAP


async def test_after_a_crash_before_the_leaf_only_what_landed_gets_one(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The append is durable, its leaf is not: the range is asked for once more, first with other contents."""
    grant = await granted(mesh)
    trail = mesh.nodes["eu-west"].services.governance.trail
    async with rogue(mesh, *grant) as agent:
        stream = await agent.open()
        with monkeypatch.context() as patch:

            def crash(*_: object) -> int:
                raise UnavailableError("The log is gone.")

            patch.setattr(trail, "append_nowait", crash)
            agent.send(stream, 0, [b"true"])
            with pytest.raises(UnavailableError, match="The log is gone"):
                await agent.receipt(stream)
        stream = await agent.open()
        agent.send(stream, 0, [b"fals"])
        with pytest.raises(RequestError, match="another envelope"):
            await agent.receipt(stream)
        stream = await agent.open()
        agent.send(stream, 0, [b"true"])
        assert (await agent.receipt(stream)).destination_first_offset == 0
        assert destination(mesh).log_end_offset == 1
    await mesh.stop("eu-west")
    assert len(mesh.headers(mesh.ingress_folder, Kind.ACK)) == 1


async def test_an_agent_cannot_fence_a_producer_of_the_destination(mesh: Mesh) -> None:
    grant = await granted(mesh)
    async with rogue(mesh, *grant) as agent:
        stream = await agent.open()
        agent.send(stream, 0, [b"0"], producer=77)
        agent.send(stream, 1, [b"1"], producer=77)
        await agent.receipt(stream, 2)
        assert destination(mesh).producers_snapshot() == ProducerTable().encode(2)


async def test_what_a_bridge_brought_is_told_from_what_a_producer_publishes_there(mesh: Mesh) -> None:
    """So that the next bridge knows whose word a record's path is."""
    grant = await granted(mesh)
    async with rogue(mesh, *grant) as agent:
        stream = await agent.open()
        agent.send(stream, 0, [b"0"], producer=77)
        await agent.receipt(stream)
    async with mesh.operator("eu-west") as client:
        await client.stream(STREAM).publish(b"1")
    entries = await destination(mesh).read(0, 1 << 20)
    assert [decode_header(each.data, FRAME_HEADER_BYTES).is_bridged for each in entries] == [True, False]


@pytest.mark.parametrize("path", [b"us-east,ap-south", b"eu-west,us-east", b"eu-west", b"", b"US"])
async def test_records_that_lie_about_where_they_come_from_are_refused(mesh: Mesh, path: bytes) -> None:
    grant = await granted(mesh)
    async with rogue(mesh, *grant) as agent:
        stream = await agent.open()
        agent.send(stream, 0, [b"0"], path=path)
        with pytest.raises(RequestError) as refused:
            await agent.receipt(stream)
        assert refused.value.code is Code.LOOP_REFUSED
        assert destination(mesh).log_end_offset == 0


async def test_envelopes_cost_nothing_before_a_stream_is_opened(mesh: Mesh) -> None:
    grant = await granted(mesh)
    async with rogue(mesh, *grant) as agent:
        stream = agent.peer.peer.open_stream(bidirectional=True)
        agent.peer.send(encode_frame(FrameType.TRANSFER, bytes(1 << 20))[: 1 << 19], stream)
        with pytest.raises(ProtocolError) as ended:
            await agent.receipt(stream)
        assert ended.value.code is Code.FRAME_UNKNOWN


async def test_ingest_windows_come_out_of_one_budget_and_go_back(tmp_path: Path) -> None:
    mesh = Mesh.make(tmp_path)
    try:
        await mesh.start("us-east")
        await mesh.start("eu-west", limits=LimitsConfig(ingest_budget=Size(INGEST_WINDOW_BYTES)))
        await mesh.enact_policies()
        grant = await granted(mesh)
        budget = mesh.nodes["eu-west"].broker.budgets.ingest
        async with rogue(mesh, *grant) as first, rogue(mesh, *grant) as second:
            await first.open()
            assert budget.used_bytes == INGEST_WINDOW_BYTES
            with pytest.raises(UnavailableError, match="ingest budget") as refused:
                await second.open()
            assert refused.value.code is Code.LIMIT_MEMORY
        await until(lambda: not budget.used_bytes, "the window's return")
        async with rogue(mesh, *grant) as third:
            await third.open()
    finally:
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
    assert not mesh.headers(mesh.ingress_folder, Kind.DENY), "a full budget is no refusal of residency"


async def test_a_mistake_in_an_answer_does_not_keep_the_link_waiting(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await granted(mesh)
    async with rogue(mesh, *grant) as agent:
        stream = await agent.open()
        with monkeypatch.context() as patch:

            def broken(*_: object) -> bytes:
                raise ArithmeticError("a mistake")

            patch.setattr("region.crossing.ingest.sign_receipt", broken)
            agent.send(stream, 0, [b"0"])
            with pytest.raises(FelixError, match="ArithmeticError"):
                await agent.receipt(stream)
        stream = await agent.open()
        agent.send(stream, 0, [b"0"])
        assert (await agent.receipt(stream)).ingress_index >= 0
