"""A bridge between two regions of several brokers, all of them processes: every broker of both regions and the agent are killed while it carries.
What was published arrives once and in order, and the logs of both regions say so to the record.

FELIX_FAULT_ROUNDS (`make faults ROUNDS=n`): how often all of them are killed; there the stream has three copies in both regions, else one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from bridge_mesh import STREAM, flight, found_regions, until
from cluster.clustered_mesh import ProcessMesh
from cluster.processes import kill, running, several
from etcd_process import etcd_binary

from felix.runtime.real import now_ms

ROUNDS = int(os.environ.get("FELIX_FAULT_ROUNDS", "0"))
COPIES = 3 if ROUNDS else 1
BROKERS = 3 if ROUNDS else 2
STEP = 150
"""Records that are published between two faults."""


@pytest.mark.etcd
@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="signals of Linux")
async def test_brokers_of_both_regions_and_the_agent_are_killed_and_every_record_crosses_once(
    tmp_path: Path,
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    us, eu = found_regions(tmp_path, now_ms())
    for folder in (us, eu):
        several(tmp_path, BROKERS, lease="2s", founded=folder)
    mesh = ProcessMesh(tmp_path, us, eu)
    async with AsyncExitStack() as stack:
        for folder in (us, eu):
            await stack.enter_async_context(running(folder))
        await mesh.enact_policies()
        for region in ("us-east", "eu-west"):
            # Of two brokers the one with the audit log has this one: what crosses is led by the other.
            async with mesh.operator(region) as client:
                await client.create_stream("acme/ops/first")
        await mesh.create(replicas=COPIES)
        async with mesh.operator("eu-west") as client:
            await client.create_stream(STREAM, replicas=COPIES)
        await mesh.grant()
        agent = await mesh.child()
        published = 0
        try:

            async def carry_on() -> None:
                nonlocal published
                await mesh.publish([flight(published + number) for number in range(STEP)], batch=10)
                published += STEP

            await carry_on()
            await mesh.crossed(STEP)
            names = [f"b{number}" for number in range(BROKERS, 0, -1)]
            faults = [(folder, name) for name in names for folder in (us, eu)]
            for _ in range(max(1, ROUNDS)):
                for folder, name in faults:
                    carrying = asyncio.ensure_future(carry_on())
                    await kill(folder, name)
                    await carrying
                agent.kill()
                await agent.wait()
                await carry_on()
                agent = await mesh.child()
            await mesh.crossed(published)
            found = await mesh.read("eu-west", published)
            assert mesh.numbers(found) == list(range(published)), "each once, and in order"

            await until(lambda: mesh.is_logged(published), "a checkpoint over all that arrived")
        finally:
            if agent.returncode is None:
                assert agent.stdin is not None
                agent.stdin.close()
                await agent.wait()
    assert mesh.reconcile() == published
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok
