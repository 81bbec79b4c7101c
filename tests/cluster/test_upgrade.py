"""A rolling upgrade, as docs/clusters.md has it: two regions of three brokers and their bridge, of an earlier commit, become today's one by one.

FELIX_UPGRADE_FROM (`make upgrade FROM=REVISION`) names the commit. Everything is founded, granted and begun by its code. Beside each upgraded
broker, under load: the leaders of a stream, a queue and the transactions are killed in turn, so that the older ones lead the newer ones' copies and the other way
round. What clients were told stands, what crossed is in both logs, and both logs verify.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bridge_mesh import STREAM, flight, until
from cluster.clustered_mesh import ProcessMesh
from cluster.history import History
from cluster.load import Load, stored_in
from cluster.members import shard_records
from cluster.processes import own_places, write_cluster
from cluster.transaction_load import TransactionLoad
from cluster.view_load import ViewLoad
from e2e.command_mesh import environment as of_command
from etcd_process import EtcdProcess, running_etcd
from region_peer import client

from cli.process import read_state
from region.cluster.records import ShardRecord
from region.folder import RegionFolder

FROM = os.environ.get("FELIX_UPGRADE_FROM", "")
ROOT = Path(__file__).parents[2]
BROKERS = ("b1", "b2", "b3")
ORDERS = "acme/ops/orders"
TOGETHER = ("acme/ops/together0", "acme/ops/together1")
VIEWS = ("acme/ops/jobs", "acme/ops/read", "acme/ops/prices")
LEASE_S = 3
STEP = 60
"""Records that cross beside each step."""

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.fault,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(not FROM, reason="minutes: make upgrade FROM=REVISION"),
]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The tree of the earlier commit."""
    tree = tmp_path / "earlier"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", FROM], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    return tree


def environment(tree: Path, home: Path) -> dict[str, str]:
    """Of a process of that tree."""
    return of_command(home, PYTHONPATH=f"{tree}:{tree / 'tests'}")


def found(tree: Path, home: Path) -> tuple[RegionFolder, RegionFolder]:
    """Both regions, founded by the code of `tree`."""
    script = (
        "import sys; from pathlib import Path; from bridge_mesh import found_regions; "
        "from felix.runtime.real import now_ms; found_regions(Path(sys.argv[1]), now_ms())"
    )
    subprocess.run([sys.executable, "-c", script, home], cwd=tree, env=environment(tree, home), check=True)
    return RegionFolder.of("us-east", home), RegionFolder.of("eu-west", home)


def clients_of_before_are_served(tree: Path, home: Path) -> None:
    """By the earlier code's commands, at brokers of today's."""

    def felix(*words: str, given: bytes = b"") -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", *words],
            cwd=tree,
            env={**environment(tree, home), "FELIX_REGION": "us-east"},
            input=given,
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{words}: {done.stdout.decode()}{done.stderr.decode()}"
        return done.stdout.decode()

    felix("stream", "create", "acme/ops/before", "--replicas", "3")
    felix("stream", "publish", "acme/ops/before", given=b"one\ntwo\nthree\n")
    read = felix("stream", "subscribe", "acme/ops/before", "--from", "earliest", "--count", "3")
    assert [word in read for word in ("one", "two", "three")] == [True] * 3
    felix("queue", "create", "acme/ops/before-jobs", "--replicas", "3")
    felix("queue", "put", "acme/ops/before-jobs", "a job")
    assert "a job" in felix("queue", "consume", "acme/ops/before-jobs", "--count", "1")
    felix("cache", "create", "acme/ops/before-prices", "--replicas", "3")
    felix("cache", "put", "acme/ops/before-prices", "tea", "4")
    assert "4" in felix("cache", "get", "acme/ops/before-prices", "tea")
    assert "b3" in felix("region", "status", "us-east")


@dataclass
class Upgraded:
    """Processes by region and broker; which tree each is of."""

    home: Path
    folders: dict[str, RegionFolder]
    etcds: dict[str, EtcdProcess]
    trees: dict[tuple[str, str], Path]
    running: dict[tuple[str, str], subprocess.Popen[bytes]] = field(default_factory=dict)

    def begin(self, region: str, broker: str) -> None:
        tree = self.trees[region, broker]
        said = self.home / f"{region}-{broker}.log"
        words = ("--log-level", "info", "region", "up", region, "--broker", broker)
        with said.open("ab") as log:
            self.running[region, broker] = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *words],
                cwd=tree,
                env=environment(tree, self.home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def serves(self, region: str, broker: str) -> bool:
        process = self.running[region, broker]
        said = self.home / f"{region}-{broker}.log"
        assert process.poll() is None, (
            f"{broker} ended with {process.returncode}:\n{said.read_text()[-3000:]}"
        )
        state = read_state(self.folders[region].pid_of(broker))
        return state is not None and state.get("pid") == process.pid

    async def start(self, region: str, *brokers: str) -> None:
        for broker in brokers:
            self.begin(region, broker)
        for broker in brokers:
            await until(lambda broker=broker: self.serves(region, broker), f"{broker} of {region}")  # type: ignore[misc]

    async def end(self, region: str, broker: str, number: signal.Signals) -> None:
        process = self.running.pop((region, broker))
        process.send_signal(number)
        code = await asyncio.to_thread(process.wait, 120)
        assert code in (0, -number), code

    async def upgrade(self, region: str, broker: str) -> None:
        await self.end(region, broker, signal.SIGTERM)
        self.trees[region, broker] = ROOT
        await self.start(region, broker)
        await self.in_sync(region)

    async def lead_others(self, region: str, stream: str) -> None:
        """The leader of a stream is killed, and comes back as what it was."""
        leader = await until(lambda: self.leader(region, stream), f"a leader of {stream}")
        await self.end(region, leader, signal.SIGKILL)
        await until(lambda: self.leader(region, stream) not in ("", leader), f"another leader of {stream}")
        await self.start(region, leader)
        await self.in_sync(region)

    def records(self, region: str) -> list[ShardRecord]:
        return shard_records(self.etcds[region], region)

    def leader(self, region: str, stream: str) -> str:
        leaders = {each.leader for each in self.records(region) if each.stream == stream}
        return leaders.pop() or "" if len(leaders) == 1 else ""

    async def in_sync(self, region: str) -> None:
        await until(
            lambda: all(sorted(each.isr) == sorted(each.replicas) for each in self.records(region)),
            f"all copies of {region} in sync",
        )

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@contextmanager
def two_regions_of(tree: Path, home: Path) -> Iterator[Upgraded]:
    us, eu = found(tree, home)
    folders = {"us-east": us, "eu-west": eu}
    with contextlib.ExitStack() as stack:
        etcds = {}
        for region, folder in folders.items():
            own = home / f"etcd-{region}"
            own.mkdir()
            etcds[region] = stack.enter_context(running_etcd(own))
            places = own_places(len(BROKERS))
            write_cluster(
                folder, [etcds[region].endpoint.removeprefix("http://")], places, lease=f"{LEASE_S}s"
            )
        trees = {(region, broker): tree for region in folders for broker in BROKERS}
        upgraded = Upgraded(home, folders, etcds, trees)
        try:
            yield upgraded
        finally:
            upgraded.close()


@asynccontextmanager
async def agent_of(tree: Path, mesh: ProcessMesh) -> AsyncIterator[None]:
    with (mesh.home / "agent.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(tree / "tests" / "bridge" / "agent_child.py"),
            str(mesh.write_config()),
            cwd=tree,
            env=environment(tree, mesh.home),
            stdin=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@pytest.mark.parametrize("first", ["us-east", "eu-west"])
async def test_two_regions_and_their_bridge_are_upgraded_one_process_after_the_other(
    tmp_path: Path, earlier: Path, first: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with two_regions_of(earlier, home) as regions:
        mesh = ProcessMesh(home, regions.folders["us-east"], regions.folders["eu-west"])
        for region in regions.folders:
            await regions.start(region, *BROKERS)
        await mesh.enact_policies()
        await mesh.create(replicas=3)
        async with mesh.operator("eu-west") as operator:
            await operator.create_stream(STREAM, replicas=3)
        await mesh.grant()
        history, published = History(), 0
        transactions, views = TransactionLoad(TOGETHER, 1, 7, pause_s=0.1), ViewLoad(*VIEWS)

        async def step() -> None:
            nonlocal published
            await mesh.publish([flight(published + number) for number in range(STEP)], batch=10)
            published += STEP
            await load.goes_on(60)
            await transactions.goes_on(5)
            await views.goes_on(20)
            await mesh.crossed(published)

        async with AsyncExitStack() as stack:
            one, two, three, four = [
                await stack.enter_async_context(client(regions.folders["us-east"])) for _ in range(4)
            ]
            for stream in (ORDERS, *TOGETHER):
                await one.create_stream(stream, replicas=3)
            load = Load(one, ORDERS, history, pause_s=0.01)
            agent = await stack.enter_async_context(AsyncExitStack())
            await agent.enter_async_context(agent_of(earlier, mesh))
            async with (
                views.going_on(two, three),
                load.going_on(writers=2, readers=2),
                transactions.going_on([four]),
            ):
                await step()
                for region in (first, *({"us-east", "eu-west"} - {first})):
                    for broker in BROKERS:
                        await regions.upgrade(region, broker)
                        print(f"{region} {broker} is upgraded; {published} records crossed", flush=True)
                        await step()
                        for stream in (ORDERS, VIEWS[0], "felix/system/transactions", STREAM):
                            if region == "us-east" or stream == STREAM:
                                await regions.lead_others(region, stream)
                                await step()
                    if region == first:
                        await agent.aclose()
                        await agent.enter_async_context(agent_of(ROOT, mesh))
                        print("the agent is upgraded", flush=True)
                        await step()
            history.check(await stored_in(one, ORDERS))
            await transactions.check(one)
            await views.check(one)
            print(f"{len(history.acknowledged)} records, {transactions}, {views}")
            await asyncio.to_thread(clients_of_before_are_served, earlier, home)
            flights = await mesh.read("eu-west", published)
            assert mesh.numbers(flights) == list(range(published)), "each once, and in order"

            await until(lambda: mesh.is_logged(published), "a checkpoint over all that arrived")
            await agent.aclose()
    assert mesh.reconcile() == published
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok
