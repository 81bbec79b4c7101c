"""A rogue agent hides bytes inside the zstd frame of a batch. One body has any number of frames, which decompress alike: blocks of no bytes, and how what is
there is cut into blocks (RFC 8878, 3.1.1.2). No leaf commits to that, no size counts it. So none of it is kept: the destination makes the frame anew.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zstandard
from bridge_mesh import STREAM, Mesh, two_regions
from rogue_agent import Wild, granted, rogue_agent

from felix.batch import FLAG_ZSTD, Batch, decode_batch
from felix.frames import FrameDecoder
from felix.names import StreamName
from policy.transform import build_spec

Tally = Callable[[str, int], None]
Squeeze = Callable[[bytes], bytes]
SECRET = b"SSN 078-05-1120, card 4111111111111111. " * 1_000
RAW, RLE, COMPRESSED = 0, 1, 2


def block(kind: int, size: int, content: bytes, *, last: bool = False) -> bytes:
    return struct.pack("<I", size << 3 | kind << 1 | last)[:3] + content


def head(body: bytes) -> bytes:
    """Of a frame in one segment, with its content's size in four bytes."""
    return b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", len(body))


def in_runs_of_none(body: bytes) -> bytes:
    """A byte in each run that is none long."""
    return head(body) + b"".join(block(RLE, 0, bytes([byte])) for byte in SECRET) + block(RAW, len(body), body, last=True)  # fmt: skip


def in_lengths_of_blocks(body: bytes) -> bytes:
    """Two bits in the length of each block."""
    cut, at = b"", 0
    for byte in SECRET[: len(body) // 16]:
        for shift in range(0, 8, 2):
            size = 1 + (byte >> shift & 3)
            cut += block(RAW, size, body[at : at + size])
            at += size
    return head(body) + cut + block(RAW, len(body) - at, body[at:], last=True)


def in_the_level(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(body)


def with_a_checksum(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(body)


FRAMES: dict[str, Squeeze] = {
    "runs of no bytes": in_runs_of_none,
    "lengths of blocks": in_lengths_of_blocks,
    "another level": in_the_level,
    "a checksum": with_a_checksum,
}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def stored(mesh: Mesh, offset: int) -> Batch:
    """The batch as the destination has it, and hands it to consumers."""
    hosted = mesh.nodes["eu-west"].broker.streams.get(StreamName.parse(STREAM))
    assert hosted is not None
    entries = await hosted.shard(0).read(offset, 1)
    (frame,) = FrameDecoder().feed(entries[0].data)
    return decode_batch(frame.body)


async def test_nothing_of_a_senders_frame_is_kept_but_its_records(mesh: Mesh, tally: Tally) -> None:
    grant = await granted(mesh, transform=build_spec(keep=["id"]))
    records = [Wild(b'{"id":%d}' % number) for number in range(1_000)]
    kept: list[tuple[int, bytes]] = []
    for number, squeeze in enumerate([None, *FRAMES.values()]):
        async with rogue_agent(mesh, grant, incarnation=bytes([number]) * 16) as agent:
            await agent.open()
            receipt = await agent.cross(records, compress=True, squeeze=squeeze)
        assert receipt.destination_first_offset is not None
        batch = await stored(mesh, receipt.destination_first_offset)
        kept.append((batch.header.flags & FLAG_ZSTD, bytes(batch.body)))
    assert len(set(kept)) == 1, "whatever frame it came in, the destination has the one that it made"
    assert len(kept[0][1]) < len(in_runs_of_none(b"")) // 4
    await mesh.stop("eu-west")
    assert mesh.verify_ingress().ok
    tally("frames that hide bytes", len(FRAMES))


async def test_a_body_that_no_frame_makes_shorter_is_kept_as_it_is(mesh: Mesh) -> None:
    grant = await granted(mesh, transform=build_spec(keep=["id"]))
    async with rogue_agent(mesh, grant) as agent:
        await agent.open()
        await agent.cross([Wild(b'{"id":1}')], squeeze=in_runs_of_none)
    batch = await stored(mesh, 0)
    assert not batch.header.flags & FLAG_ZSTD
    assert len(batch.body) < 100
    (record,) = await mesh.read("eu-west", 1)
    assert bytes(record.payload) == b'{"id":1}'
