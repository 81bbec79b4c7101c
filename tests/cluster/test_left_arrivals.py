"""A broker that could not open a stream, whose only copy another one has by now: it keeps no document from its leaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bridge_mesh import STREAM, flight, until
from cluster.clustered_mesh import two_clusters

from audit.leaf import Kind
from felix.errors import UnavailableError
from policy.grant import StandingAction
from region.streams.table import StreamTable

pytestmark = pytest.mark.etcd


async def test_a_revocation_waits_for_no_broker_that_a_stream_left_before_it_was_opened_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_clusters(tmp_path, 3, source=1) as mesh:
        cluster = mesh.clusters["eu-west"]
        await mesh.create()
        async with mesh.operator("eu-west") as client:
            await client.create_stream(STREAM, replicas=1)
        leader = mesh.leader("eu-west")
        serve: Any = StreamTable._serve

        async def no_room(table: Any, stream: Any, epochs: dict[int, int]) -> None:
            if stream.text == STREAM and table._leading.member.broker == leader:
                raise UnavailableError("No room.")
            await serve(table, stream, epochs)

        await cluster.stop(leader)
        with monkeypatch.context() as patch:
            patch.setattr(StreamTable, "_serve", no_room)
            await cluster.start(leader)
            await cluster.drain(leader)
            await until(lambda: mesh.leader("eu-west") not in ("", leader), "another leader")
            await until(lambda: mesh.led("eu-west"), "the stream's logs")
        grant = await mesh.grant()
        await mesh.publish([flight(number) for number in range(10)])
        async with mesh.agent():
            await mesh.crossed(10)
            await mesh.stand("eu-west", grant, StandingAction.REVOKE)
            # A drained broker may have no copy of the log any more.
            other = next(name for name in cluster.names if name != leader)
            folder = mesh.eu.root / "data" / other / "audit"
            await until(lambda: mesh.headers(folder, Kind.REVOKE), "the leaf of the revocation", 40)
