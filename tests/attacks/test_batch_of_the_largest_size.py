"""A publisher writes a record of which the transfer is as long as a batch may be: the destination has no room for its seal. No link stops for it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from attacks.conftest import Tally
from bridge_mesh import two_regions, until

from felix.batch import BATCH_BYTES_MAX, HEADER_BYTES
from felix.provenance import PATH_HEADER
from keys.envelope import SEAL_BYTES
from policy.transform import build_spec

pytestmark = pytest.mark.timeout(120)

PATH_BYTES = struct.calcsize(">HHI") + len(PATH_HEADER) + len("us-east")
"""Headers of a record that crosses: its path alone."""
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
        async with mesh.agent():
            await until(mesh.arrived, "something arrived", 20)
            await until(lambda: mesh.agent_position() == 2, "all was dealt with", 20)
    tally("batches of the largest size", 1)
