"""The agent dies at each of its steps, and both brokers once: every record arrives once, announced once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.command_mesh import BRIDGE, DESTINATION, SOURCE, CommandMesh, until
from long_runs import count
from warm.process import WarmProcess

from audit.leaf import Kind, iter_entries
from bridge.failpoint import STEPS

pytestmark = pytest.mark.fault

STREAM = "acme/ops/killed"
ROUND = 40
BATCH = 10
LAST_S = 60.0
STOPS = STEPS[:: count(3, 1)]
"""Where the agent dies: at every third of its steps in `make test`, where tests/bridge/test_kill.py takes each."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandMesh]:
    """A mesh of its own: processes are killed in it. No agent yet."""
    mesh = CommandMesh(tmp_path_factory.mktemp("killed"))
    try:
        mesh.found()
        mesh.up()
        mesh.enact_policies()
        yield mesh
    finally:
        mesh.close()


def flights(first: int, count: int) -> list[bytes]:
    return [
        json.dumps({"flight": number, "tailnum": f"N{number}"} if number % 9 else {"flight": number}).encode()
        for number in range(first, first + count)
    ]


def publish(mesh: CommandMesh, first: int, count: int) -> None:
    """In batches of BATCH records, so that a step is come to several times."""
    for at in range(first, first + count, BATCH):
        mesh.send(STREAM, flights(at, BATCH))


def agent(mesh: CommandMesh, failpoint: str = "") -> WarmProcess:
    more = {"FELIX_FAILPOINT": failpoint} if failpoint else {}
    return mesh.spawn(
        "--log-level", "info", "bridge", "up", BRIDGE, "--region", SOURCE, log=mesh.agent_log, **more
    )


def test_every_record_crosses_once_whatever_dies(mesh: CommandMesh) -> None:
    mesh.create(STREAM)
    mesh.prepare(STREAM)
    published = 0
    for step in STOPS:
        publish(mesh, published, ROUND)
        published += ROUND
        process = agent(mesh, step if step == "cosign" else f"{step}:2")
        assert process.wait(timeout=LAST_S) == -signal.SIGKILL, (step, mesh.agent_log.read_text()[-2000:])
    kills = len(STOPS)
    # And each broker, while records cross.
    process = agent(mesh)
    for region in (SOURCE, DESTINATION):
        before = mesh.size(DESTINATION, STREAM)
        publish(mesh, published, ROUND)
        published += ROUND
        until(lambda before=before: mesh.size(DESTINATION, STREAM) > before, "a record on its way")  # type: ignore[misc]
        mesh.kill(region)
        kills += 1
        mesh.up(region)
        publish(mesh, published, BATCH)
        published += BATCH
    wanted = [number for number in range(published) if number % 9]
    mesh.arrived(STREAM, len(wanted))
    until(lambda: mesh.links(STREAM)[0].position == published, "the last position")
    # The agent carries each region's log to the other one.
    until(lambda: not mesh.felix("audit", "verify", code=None).code, "logs that are all cosigned")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LAST_S) == 0
    arrived = [row["value"]["flight"] for row in mesh.read(DESTINATION, STREAM, len(wanted))]
    assert arrived == wanted
    assert mesh.size(DESTINATION, STREAM) == len(wanted)
    mesh.down()
    announced = offsets(mesh, mesh.egress, Kind.INTENT)
    assert announced == wanted, "one INTENT for each record, and none for another"
    assert offsets(mesh, mesh.egress, Kind.WITHHELD) == [n for n in range(published) if not n % 9]
    assert offsets(mesh, mesh.ingress, Kind.ACK) == wanted
    acknowledged = sum(leaf.header.records for leaf in mesh.leaves(mesh.egress, Kind.ACK, stream=STREAM))
    assert acknowledged == len(wanted)
    verified = mesh.felix("audit", "verify", "--json").json()["items"]
    assert len(verified) == 3
    assert all(report["ok"] for report in verified)
    assert [report["unanswered"] for report in verified] == [0, 0, 0]
    print(f"{kills} kills, {published} records published, {len(wanted)} crossed")


def offsets(mesh: CommandMesh, log: Path, kind: Kind) -> list[int]:
    """Source offsets in the entries of the log's leaves, in the order of the log."""
    return [entry.offset for leaf in mesh.leaves(log, kind, stream=STREAM) for entry in iter_entries(leaf)]
