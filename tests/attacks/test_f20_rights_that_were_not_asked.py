"""F20, in parts: a report of links without a right to it, dead letters after their maker's right is gone, and places that a
stream keeps after its end (the last sentence of F14)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from bridge_mesh import BRIDGE, STREAM, Mesh, two_regions, until
from region_fixtures import founded, node, operator  # noqa: F401 - fixtures
from region_peer import client, encode_request, raw_peer

import felix
from felix.errors import Code, RequestError
from felix.frames import FrameType
from felix.identity_file import load_identity
from felix.messages import OpenIngest, ReportLinks
from felix.names import StreamName
from felix.transport.port import ENGINE_NAMES
from keys.key_id import KeyKind, new_key_id
from keys.transfer import TransferKey, TransferScope, seal_transfer_key
from region.folder import RegionFolder
from region.node import Node

Tally = Callable[[str, int], None]
JOBS, LETTERS, OWN = "acme/ops/jobs", "acme/ops/letters", "acme/ops/jobs.dead"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RegionFolder:
    return founded(tmp_path_factory, "worker")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def test_a_report_of_no_links_is_refused_and_takes_no_place(mesh: Mesh, tally: Tally) -> None:
    """From an operator, from another region's bridge, and from one's own bridge, whom it is allowed: no place is taken."""
    cases = [
        ("us-east", mesh.us.identity("operator"), Code.FORBIDDEN),
        ("eu-west", mesh.us.identity(BRIDGE), Code.FORBIDDEN),
        ("us-east", mesh.us.identity(BRIDGE), None),
    ]
    for region, identity, code in cases:
        target = mesh.nodes[region]
        async with raw_peer(
            mesh.folder(region), target.address, identity=load_identity(identity), region=region
        ) as peer:
            if code is None:
                await peer.ask(ReportLinks([]), 1)
            else:
                with pytest.raises(RequestError) as refused:
                    await peer.ask(ReportLinks([]), 1)
                assert refused.value.code is code
        assert not target.services.export._links
    tally("empty reports of links", len(cases))


async def test_dead_letters_stop_once_their_maker_may_not_publish(
    node: Node,  # noqa: F811
    operator: felix.RegionClient,  # noqa: F811
    folder: RegionFolder,
    tally: Tally,
) -> None:
    """They go to the queue's own dead letters instead, and nothing is lost; with the right back they flow again."""

    async def kill(count: int) -> None:
        jobs = operator.queue(JOBS)
        await jobs.put_many([b"%d" % n for n in range(count)])
        leased = 0
        while leased < count:
            for job in await jobs.lease(100, wait=5):
                job.nack(reason="never")
                leased += 1
        await jobs.flush()

    def held(name: str) -> int:
        stream = node.broker.streams.get(StreamName.parse(name))
        return 0 if stream is None else stream.shard(0).high_watermark

    async with client(folder, "worker") as worker:
        maker = worker.session.identity
        await operator.put_rights(maker, ["admin acme/ops/*", "publish acme/ops/*"])
        await worker.create_queue(JOBS, attempts=1, dead_letter=LETTERS)
    await kill(10)
    await until(lambda: held(LETTERS) == 10, "letters in the named stream")
    await operator.put_rights(maker, ["admin acme/ops/*"])
    await kill(20)
    await until(lambda: held(OWN) == 20, "letters in the queue's own")
    assert held(LETTERS) == 10
    await operator.put_rights(maker, ["publish acme/ops/*"])
    await kill(5)
    await until(lambda: held(LETTERS) == 15, "letters in the named stream again")
    assert held(OWN) == 20
    tally("dead letters of a maker without the right", 20)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_streams_that_end_in_order_or_are_reset_give_their_places_back(
    mesh: Mesh, engine: str, tally: Tally
) -> None:
    """More ingest streams one after the other than a session may have at once: each is ended on both sides."""
    await mesh.stop("eu-west")
    await mesh.start("eu-west", engine=engine)
    await mesh.create()
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("eu-west", body, export, accepted)
    stream_name = StreamName.parse(STREAM)
    scope = TransferScope(
        "us-east", "eu-west", stream_name, b"i" * 16, stream_name, 0, 1, body.grant, bytes.fromhex(body.terms_hash),
        mesh.bridge_id,
    )  # fmt: skip
    key = TransferKey(new_key_id("us-east", KeyKind.TRANSFER, b"r" * 11), scope, b"k" * 32)
    target = mesh.nodes["eu-west"]
    count = 250
    identity = load_identity(mesh.us.identity(BRIDGE))
    async with raw_peer(mesh.eu, target.address, identity=identity, engine=engine, region="eu-west") as peer:
        sealed = seal_transfer_key(key, mesh.bundle("eu-west").hybrid_import_key(), identity)
        request = OpenIngest(
            body.grant,
            "us-east",
            STREAM,
            0,
            1,
            scope.incarnation,
            1,
            sealed.sealed,
            sealed.signature,
            mesh.statement(),
        )
        for number in range(count):
            stream = peer.peer.open_stream(bidirectional=True)
            peer.send(encode_request(request), stream)
            await until(
                lambda stream=stream: peer.frames.get(stream) or peer.closed_with,
                "an answer",
            )
            assert peer.of(FrameType.ANSWER, stream), (number, peer.closed_with, peer.errors(None, stream))
            if number % 2:
                peer.send(b"", stream, end=True)
            else:
                peer.peer.reset_stream(stream, 0)
            await until(lambda stream=stream: stream not in peer.peer._streams.states, "its end")
    tally("ingest streams on one session", count)
