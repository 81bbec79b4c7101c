"""Back from an upgrade, by the steps of docs/operations.md: the source's folder is that of before, but for the newest audit logs; and upgraded again."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest
from attacks.test_f08_truncation import accept, link
from bridge_mesh import BRIDGE, STREAM, flight, two_regions, until

import felix
from audit.leaf import Kind
from audit.receipt import Receipt
from keys.signing import SigningKey
from region.crossing import ingest

JOBS, CREW = "acme/ops/jobs", "acme/ops/crew"


async def test_a_source_that_went_back_to_its_backup_goes_on_with_its_newest_logs(tmp_path: Path) -> None:
    async with two_regions(tmp_path / "home") as mesh:
        await mesh.create()
        await mesh.grant()
        async with mesh.operator("us-east") as region:
            await region.create_queue(JOBS)
            await region.create_stream(CREW)
            await region.stream(CREW).create_subscription("desk")
            for number in range(4):
                await region.stream(CREW).publish(b"%d" % number)
                await region.queue(JOBS).put(b"%d" % number)
            assert await taken(region, 2) == [b"0", b"1"]
        async with mesh.agent():
            await mesh.publish([flight(number) for number in range(20)])
            await mesh.crossed(20)
            await until((mesh.us.root / "data/witness").is_dir, "the source has cosigned the other log")
        root, backup, aside = mesh.us.root, tmp_path / "backup", tmp_path / "aside"
        await mesh.stop("us-east")
        shutil.copytree(root, backup)
        await mesh.start("us-east")
        async with mesh.agent():
            await mesh.publish([flight(number) for number in range(100, 120)])
            await mesh.crossed(40)
        async with mesh.operator("us-east") as region:
            assert await taken(region, 2) == [b"2", b"3"]
            assert await read(region, 4) == [b"%d" % number for number in range(4)]
        await mesh.stop("us-east")

        # Steps 1 to 3.
        root.rename(aside)
        shutil.copytree(backup, root)
        for part in ("data/audit", "data/witness", "bridges"):
            shutil.rmtree(root / part)
            shutil.copytree(aside / part, root / part)
        (root / "bridges" / BRIDGE / "egress" / "release").unlink()
        await mesh.start("us-east")
        async with mesh.operator("us-east") as region:
            # As they were.
            assert await taken(region, 2) == [b"2", b"3"]
            assert await read(region, 4) == [b"%d" % number for number in range(4)]
        async with mesh.agent() as agent:
            await mesh.publish([flight(number) for number in range(200, 230)])
            held = await link(agent, "truncated")
            assert "offset 20" in held.reason and "--accept-truncation" in held.reason
            assert await mesh.arrived() == 40
            # Step 4.
            await accept(mesh, held)
            await mesh.crossed(70)
        # And upgraded again.
        await mesh.stop("us-east")
        await mesh.start("us-east")
        async with mesh.agent():
            await mesh.publish([flight(number) for number in range(300, 310)])
            await mesh.crossed(80)
            await until(
                lambda: (
                    sum(each.records for each in mesh.headers(mesh.ingress_folder, Kind.ACK)) == 80
                    and mesh.verify_egress(1).ok
                    and mesh.verify_ingress(1).ok
                ),
                "both logs with all that crossed, cosigned",
            )
        assert mesh.reconcile() == 80
        assert mesh.numbers(await mesh.read("eu-west", 80)) == [
            *range(20), *range(100, 120), *range(200, 230), *range(300, 310)
        ]  # fmt: skip
        acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
        assert len({each.incarnation for each in acks}) == 2, "what had these offsets before has another one"
        assert [each.action for each in mesh.headers(mesh.ingress_folder, Kind.STANDING)] == [
            "accept-truncation"
        ]
        assert STREAM in {each.stream for each in acks}


async def test_a_destination_of_a_later_release_is_accused_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receipts have a field that this agent has no name for: nothing is settled by them, and nothing is tampered with."""
    sign = ingest.sign_receipt

    def later(receipt: Receipt, key: SigningKey) -> bytes:
        signed = msgspec.msgpack.decode(sign(receipt, key))
        body = msgspec.msgpack.encode({**msgspec.msgpack.decode(signed["body"]), "of_later": 1})
        return msgspec.msgpack.encode({**signed, "body": body, "signature": key.sign("receipt", body)})

    async with two_regions(tmp_path / "home") as mesh:
        await mesh.create()
        await mesh.grant()
        await mesh.publish([flight(number) for number in range(20)])
        with monkeypatch.context() as patch:
            patch.setattr(ingest, "sign_receipt", later)
            async with mesh.agent() as agent:
                await mesh.crossed(20)
                held = await until(
                    lambda: next((each for each in agent.links() if "later release" in each.reason), None),
                    "a link that says so",
                )
                assert held.state == "waiting" and "upgrade whoever says so" in held.reason
        assert not mesh.headers(mesh.egress_folder, Kind.DENY, Kind.ACK)
        assert not mesh.headers(mesh.ingress_folder, Kind.DENY)
        async with mesh.agent() as agent:
            await link(agent, "active", 20)
            await until(lambda: mesh.headers(mesh.egress_folder, Kind.ACK), "what arrived is settled")
        assert mesh.reconcile() == 20 and mesh.verify_egress().ok and mesh.verify_ingress().ok


async def taken(region: felix.RegionClient, count: int) -> list[bytes]:
    """The payloads of so many jobs, each done."""
    found = []
    async with asyncio.timeout(60), region.queue(JOBS).consume(prefetch=1) as worker:
        async for job in worker:
            found.append(bytes(job.payload))
            await job.ack()
            if len(found) == count:
                break
    return found


async def read(region: felix.RegionClient, count: int) -> list[bytes]:
    """So many records of the durable subscription, acknowledged."""
    found = []
    async with asyncio.timeout(60), region.stream(CREW).consumer("desk") as consumer:
        async for record in consumer:
            found.append(bytes(record.payload))
            await consumer.ack(record)
            if len(found) == count:
                break
    return found
