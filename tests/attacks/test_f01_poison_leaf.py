"""F1: one envelope from a granted bridge must not stop a region, nor its log, for ever.

Tried as found: an ingest stream that begins at 2^63-1, and an empty envelope whose last offset no leaf can say. And from
the other end: a log that an earlier version left with such a leaf in it opens, goes on, and is reported.
"""

from __future__ import annotations

import shutil
import struct
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from audit_log import STREAM as LOG_STREAM
from audit_log import Link, log_signer, trust
from bridge_mesh import STREAM, Mesh, two_regions
from rogue_agent import Wild, granted, rogue_agent

from audit.leaf import EncodedLeaf, Kind, Side, decode_leaf, encode_leaf
from audit.note import Algorithm, NoteSigner
from audit.origin import region_origin
from audit.proof import Wanted, find_leaves
from audit.range_index import INDEX_PATH
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.verify import verify_log
from felix.batch import OFFSET_MAX
from felix.errors import CorruptionError, FelixError
from felix.names import StreamName
from keys.key_file import load_signing_key

Tally = Callable[[str, int], None]
ENGINES = ("qh3", "aioquic")
START_FOUND = (1 << 63) - 1
LAST_FOUND = (1 << 63) + 5


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


@pytest.mark.parametrize("engine", ENGINES)
async def test_offsets_that_no_leaf_can_say_are_refused_and_the_region_starts_again(
    mesh: Mesh, engine: str, tally: Tally
) -> None:
    await mesh.stop("eu-west")
    await mesh.start("eu-west", engine=engine)
    grant = await granted(mesh)
    tried = 0
    for number, (start, last) in enumerate(
        [
            (START_FOUND, None),
            (1 << 63, None),
            ((1 << 64) - 1, None),
            (-1, None),
            (OFFSET_MAX, LAST_FOUND),
            (OFFSET_MAX, OFFSET_MAX + 1),
            (0, LAST_FOUND),
            (OFFSET_MAX - 5, (1 << 64) - 1),
        ]
    ):
        async with rogue_agent(mesh, grant, engine=engine, incarnation=bytes([number]) * 16) as agent:
            with pytest.raises(FelixError):
                await agent.open(start=start)
                assert last is not None, "the beginning was taken"
                agent.send_nothing(start, last)
                await agent.receipt()
            tried += 1
    # The highest offset there is does cross, and is the last.
    async with rogue_agent(mesh, grant, engine=engine, incarnation=b"e" * 16) as agent:
        await agent.open(start=OFFSET_MAX)
        receipt = await agent.cross([Wild(b"{}")])
        assert receipt.last_offset == OFFSET_MAX
    await mesh.stop("eu-west")
    assert mesh.verify_ingress().ok
    await mesh.start("eu-west", engine=engine)
    async with rogue_agent(mesh, grant, engine=engine) as agent:
        await agent.open()
        await agent.cross([Wild(b"{}")])
    await mesh.stop("eu-west")
    assert mesh.verify_ingress().ok
    acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
    assert [ack.last_offset for ack in acks] == [OFFSET_MAX, 0]
    tally("offsets beyond the last", tried)


def poison() -> bytes:
    """The leaf that was found: sound but for one offset, as the encoder of version 0.1 let it pass."""
    link = Link()
    (leaf,) = link.delivery(link.intent())
    data = bytearray(encode_leaf(leaf))
    header_length = struct.unpack_from(">H", data, 4)[0]
    head = msgspec.msgpack.decode(data[8 : 8 + header_length])
    head |= {"last_offset": LAST_FOUND, "records": 0, "record_bytes": 0}
    head.pop("destination_first_offset"), head.pop("destination_last_offset")
    packed = msgspec.msgpack.encode(head)
    found = struct.pack(">2sBBHH", b"FL", 1, 0, len(packed), 0) + packed
    with pytest.raises(CorruptionError):
        decode_leaf(found)
    return found


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("before", [0, 3, 255, 256, 300])
def test_a_log_with_a_leaf_that_cannot_be_read_opens_goes_on_and_says_so(
    tmp_path: Path, before: int, clean: bool, tally: Tally
) -> None:
    signer, link = log_signer(), Link()
    quiet = TrailSettings(checkpoint_interval_ms=3_600_000)
    trail = Trail.open(tmp_path / "log", signer, settings=quiet)
    header = link.deny().header
    append(trail, [EncodedLeaf(header, encode_leaf(link.deny()))] * before)
    append(trail, [EncodedLeaf(header, poison())])
    append(trail, [EncodedLeaf(header, encode_leaf(link.deny()))] * 2)
    path = tmp_path / "log"
    if clean:
        trail.close()
        # Whoever wrote such a leaf took it for readable, and left a snapshot that says so, of another version.
        (path / "positions").unlink()
    else:
        path = Path(shutil.copytree(path, tmp_path / "killed", ignore=shutil.ignore_patterns("*.new")))
        trail.close()
    for size in (before + 3, before + 4):
        again = Trail.open(path, signer, settings=quiet)
        assert again.status().size == size and again.positions.unreadable == (before,)
        append(again, [EncodedLeaf(header, encode_leaf(link.deny()))])
        again.publish()
        # What looks for leaves passes it by.
        files = Folder(path)
        for index in (files.read(INDEX_PATH), None):
            found = find_leaves(files, size + 1, index, Kind.ACK, Side.INGRESS, Wanted(LOG_STREAM, 0, 0))
            assert not list(found)
        again.close()
    report = verify_log(Folder(path), trust(), cosignatures_min=0)
    assert [(finding.step, finding.leaf) for finding in report.findings] == [(6, before)]
    assert report.size == before + 5
    tally("logs with an unreadable leaf", 1)


def append(trail: Trail, leaves: list[EncodedLeaf]) -> None:
    if not leaves:
        return
    ended = threading.Event()
    failed: list[object] = []
    trail.append_nowait(leaves, lambda index, error: (failed.append(error), ended.set()))  # type: ignore[func-returns-value]
    assert ended.wait(30) and failed == [None]


async def test_a_region_with_such_a_log_starts_and_takes_records(mesh: Mesh, tally: Tally) -> None:
    grant = await granted(mesh)
    await mesh.stop("eu-west")
    key = load_signing_key(mesh.eu.audit_key)
    signer = NoteSigner.from_key(region_origin("eu-west", "acme"), key, Algorithm.ED25519)
    trail = Trail.open(mesh.ingress_folder, signer)
    append(trail, [EncodedLeaf(Link().deny().header, poison())])
    trail.close()
    (mesh.ingress_folder / "positions").unlink(missing_ok=True)
    await mesh.start("eu-west")
    async with rogue_agent(mesh, grant) as agent:
        await agent.open()
        await agent.cross([Wild(b"{}")])
        await agent.cross([Wild(b"{}"), Wild(b"{}")])
    assert mesh.nodes["eu-west"].broker.streams.get(StreamName.parse(STREAM)) is not None
    await mesh.stop("eu-west")
    report = mesh.verify_ingress()
    assert {finding.step for finding in report.findings} == {6} and report.steps[5].findings == 1
    tally("regions started on such a log", 1)
