"""What a broker without a lease says of its logs: nothing, as another one may lead them. It was the leader, and its log may end before the next leader's."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.clustered_region import serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import batch_frame, raw_peer, until

from felix.errors import Code, UnavailableError
from felix.messages import ListStreams, OpenPublisher, StreamPage

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
STREAM = "acme/ops/orders"


async def test_it_says_neither_that_a_sequence_has_a_gap_nor_how_far_its_log_goes(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that is told of a gap numbers anew what is not acknowledged, and sends it to the next leader, which may have it already."""
    async with serving(tmp_path, etcd, 2) as region:
        async with region.client("b1") as client:
            await client.create_stream(STREAM, replicas=2)
            await region.in_sync("b1", STREAM)
            await client.stream(STREAM).publish(b"x")
        leader = region.leader("b1", STREAM)
        place = region.config.of_broker(leader).own_place
        assert place is not None
        address = place.client_address
        async with raw_peer(region.folder, (address.host, address.port)) as peer:
            publishing = peer.open_stream()
            await peer.ask(OpenPublisher(STREAM), 1, publishing)

            async def refused(correlation: int) -> Code:
                peer.send(batch_frame([b"y"], correlation, producer=7, sequence=5), publishing)
                await until(lambda: peer.errors(correlation))
                return peer.errors(correlation)[0].code

            async def told() -> tuple[int, str]:
                answer = await peer.ask(ListStreams(STREAM, "", 1), 100)
                assert isinstance(answer, StreamPage)
                peer.frames[peer.control].clear()
                return answer.streams[0].state[0].high_watermark, answer.streams[0].state[0].stopped

            assert await refused(2) is Code.SEQUENCE_GAP and await told() == (1, "")
            lost = UnavailableError("The lease is over.", code=Code.NOT_LEADER)
            monkeypatch.setattr(region.clustered(leader).member, "refusal", lambda: lost)
            assert await refused(3) is Code.NOT_LEADER
            assert await told() == (0, "The lease is over.")
            monkeypatch.undo()
            assert await refused(4) is Code.SEQUENCE_GAP and await told() == (1, "")
