"""A publisher writes a record of which the transfer is as long as a batch may be: the destination has no room for its seal, or makes it longer as it compresses it anew; or one whose key is longer
than any client encodes. No link stops for it."""

from __future__ import annotations

import random
import struct
from bisect import bisect_right
from pathlib import Path

import pytest
from attacks.conftest import Tally
from bridge_mesh import STREAM, flight, two_regions, until

from audit.leaf import Kind
from felix.batch import (
    BATCH_BYTES_MAX,
    HEADER_BYTES,
    KEY_BYTES_MAX,
    Batch,
    Parts,
    batch_of,
    encode_headers,
    expanded,
    plain_body,
)
from felix.errors import RequestError
from felix.provenance import PATH_HEADER
from keys.envelope import SEAL_BYTES, SEALABLE_BYTES_MAX
from policy.transform import KeyRule, build_spec
from region.crossing.inspected import _compress
from region.crossing.link_slot import ENVELOPES_MAX
from region.log.admission import misfit

pytestmark = pytest.mark.timeout(120)

PATH_BYTES = struct.calcsize(">HHI") + len(PATH_HEADER) + len("us-east")
"""Headers of a record that crosses: its path alone."""
PIECES = 64
BESIDE_BYTES = HEADER_BYTES + 4 + 4 + PATH_BYTES
"""Of a batch of one such record, all but its payload: two columns besides."""


@pytest.mark.parametrize("room", [-1, 0, 1, SEAL_BYTES - 1, SEAL_BYTES])
async def test_a_batch_that_leaves_no_room_for_its_seal_stops_no_link(
    tmp_path: Path, room: int, tally: Tally
) -> None:
    """`room`: what the batch that crosses leaves of the limit."""
    payload = b'{"id":"%s"}' % (b"x" * (BATCH_BYTES_MAX - BESIDE_BYTES - room - len(b'{"id":""}')))
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant(transform=build_spec(keep=["id"]))
        await mesh.publish([payload, b'{"id":"after"}'], batch=1)
        async with mesh.agent() as agent:
            await until(lambda: agent.links() and agent.links()[0].position == 2, "all was dealt with", 30)
            crossed = await mesh.arrived()
        assert crossed == (2 if room >= SEAL_BYTES else 1)
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        assert mesh.verify_egress().ok and mesh.verify_ingress().ok
    tally("batches of the largest size", 1)


async def test_a_key_that_no_client_encodes_stops_no_link(
    tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker reads no body, so a publisher's own code may write it, where the grant lets keys cross as they are."""
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant(transform=build_spec(keep=["id"], key=KeyRule.KEEP))
        async with mesh.operator("us-east") as client:
            publisher = client.stream(STREAM)
            with monkeypatch.context() as patch:
                for module in ("felix.batch", "felix.payload"):
                    patch.setattr(f"{module}.KEY_BYTES_MAX", 1 << 20)
                await publisher.publish(b'{"id":1}', key=b"k" * (KEY_BYTES_MAX + 1))
            await publisher.publish(b'{"id":2}', key=b"k")
        async with mesh.agent() as agent:
            await until(lambda: agent.links() and agent.links()[0].position == 2, "all was dealt with", 30)
            assert await mesh.arrived() == 1
    tally("keys that no client encodes", 1)


async def test_a_batch_that_crosses_in_more_pieces_than_may_be_on_the_way_stops_no_link(
    tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kilobyte of short values in lists becomes 52 MB of pseudonyms, which is cut until each piece fits a batch: 16 times and, as its records are shaped, more. Here each record is cut off."""
    monkeypatch.setattr("bridge.crossing.SEALABLE_BYTES_MAX", 700)
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant()
        await mesh.publish([flight(number) for number in range(PIECES)], batch=PIECES)
        async with mesh.agent() as agent:
            await until(
                lambda: agent.links() and agent.links()[0].position == PIECES, "all was dealt with", 60
            )
            assert await mesh.arrived() == PIECES
            assert [(link.state, link.crossed) for link in agent.links()] == [("active", PIECES)]
            for region in ("us-east", "eu-west"):
                await mesh.stop(region)
        intents = mesh.headers(mesh.egress_folder, Kind.INTENT)
        assert len(intents) > 2 * ENVELOPES_MAX
        assert mesh.verify_egress().ok and mesh.verify_ingress().ok
    tally("batches that cross in many pieces", 1)


def noise_of_few_symbols() -> bytes:
    """Of which a frame that is made in steps is 20 kB longer than one that is made in one piece, and one of a higher level 30 kB."""
    rng, symbols = random.Random(11), bytes(at % 8 for at in range(256))

    def noise(size: int) -> bytes:
        return rng.randbytes(size).translate(symbols)

    unit, made = noise(480_000), b""
    while len(made) < 2_600_000:
        at = rng.randrange(len(unit) // 2)
        again = rng.random() < 0.3
        made += unit[at : at + rng.randrange(2_000, 60_000)] if again else noise(rng.randrange(5_000, 80_000))
    return made


@pytest.mark.parametrize("room", [0, 1_000])
def test_what_a_bridge_compressed_into_a_batch_the_destination_does_too(room: int, tally: Tally) -> None:
    """Compressed anew in other pieces, or at another level, it may be too long, and nothing would ever cross behind it."""
    headers = encode_headers({PATH_HEADER: b"us-east"})
    noise, tail = noise_of_few_symbols(), random.Random(1).randbytes(1 << 17)

    def batch_with(size: int) -> Batch:
        """With so much at its end that no frame makes shorter."""
        return batch_of(
            Parts([noise[: 1 << 20], noise[1 << 20 :], tail[:size]], None, [headers] * 3), compress=1
        )

    def body_bytes(size: int) -> int:
        try:
            return len(batch_with(size).body)
        except RequestError:
            return BATCH_BYTES_MAX

    batch = batch_with(bisect_right(range(len(tail)), SEALABLE_BYTES_MAX - room, key=body_bytes) - 1)
    assert 0 <= SEALABLE_BYTES_MAX - room - len(batch.body) < 1_000
    stepped = _compress(expanded(batch))
    while True:
        try:
            next(stepped)
        except StopIteration as ended:
            made = ended.value
            break
    assert plain_body(made) == plain_body(batch) and misfit(made) is None
    tally("batches of the largest size", 1)
