"""Rounds of faults over three brokers and three members of etcd, each a process on a machine of its own (cluster.machines), under load.

    python -m cluster.play_faults FOLDER [--rounds N] [--seed S] [--only FAULT …]

Run it in namespaces of its own, as tests/cluster/test_faults.py does. In each round one fault happens, drawn by the seed from all of them; then
records have to be acknowledged and read again, transactions committed, jobs done, what a durable subscription and a cache were told confirmed, and all
copies to be in sync. In the end all brokers are killed once more, and the histories are judged (cluster.history, cluster.transaction_history, cluster.view_load).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from cluster.audit_load import AuditLoad
from cluster.failing_syncs import TOLD_BY
from cluster.history import History
from cluster.load import Load, stored_in
from cluster.machines import Machine, begin_network, cut_power
from cluster.played_broker import AHEAD_BY, BROKER_LIFE_S, set_clock
from cluster.processes import write_cluster
from cluster.transaction_load import TransactionLoad
from cluster.view_load import ViewLoad
from e2e.command_mesh import ROOT, command, environment
from etcd_process import etcd_binary
from region_home import make_region
from region_peer import client

import felix
from cli.process import read_state
from cli.several import log_file
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.messages import ListStreams
from felix.runtime.real import now_ms
from region.folder import RegionFolder

T = TypeVar("T")
STREAM: Final = "acme/ops/orders"
TOGETHER: Final = ("acme/ops/together0", "acme/ops/together1")
"""Streams of transactions."""
QUEUE: Final = "acme/ops/jobs"
VIEWS: Final = (QUEUE, "acme/ops/read", "acme/ops/prices")
"""A queue, a stream with a durable subscription, a cache."""
BROKERS: Final = ("b1", "b2", "b3")
PORT: Final = 7443
LEASE_S: Final = 3
AWAY_S: Final = 60.0
"""As long as restarts of etcd's machines take."""
GOES_ON: Final = 60
"""Records that are acknowledged and read after a fault, before the next one."""
TRANSACTIONS: Final = 5
"""That are committed after a fault, before the next one."""
TRANSACTION_PAUSE_S: Final = 0.1
OF_VIEWS: Final = 20
"""Jobs, records of a subscription and values of a cache that are confirmed after a fault, before the next one."""
DOCUMENTS: Final = 2
"""That are taken after a fault, before the next one."""
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
LIFE_S: Final = 30
"""Of a broker's certificate, where it is to end soon."""
FULL_S: Final = 2.0
"""How long a disk is full at least."""
HANGS_S: Final = 12.0
"""How long a disk hangs at most, where that has to end by itself: longer than a leader waits for a sync."""
PLAYED: Final = "cluster.played_broker"
REOPENED_S: Final = 8.0
"""By then a broker has opened a copy again whose disk had failed once."""
PAUSE_S: Final = 0.01
"""Between a writer's answers: a few hundred records a second in all, of which a long run can hold the history."""
WAIT_S: Final = 120.0
UNAVAILABLE: Final = 4
"""The exit code of a command that what it needs did not answer."""


class Etcd:
    """Three members, of which any may be gone."""

    def __init__(self, machines: Sequence[Machine], home: Path) -> None:
        self.machines = dict(zip(("e1", "e2", "e3"), machines, strict=True))
        self._home = home
        self._binary = etcd_binary()
        self.token = "first"

    @property
    def endpoints(self) -> list[str]:
        """`host:port` of each."""
        return [f"{machine.address}:2379" for machine in self.machines.values()]

    @property
    def cluster(self) -> str:
        """As --initial-cluster wants it."""
        return ",".join(f"{name}=http://{each.address}:2380" for name, each in self.machines.items())

    def start(self, *names: str) -> None:
        assert self._binary is not None
        for name in names or tuple(self.machines):
            machine = self.machines[name]
            client_url, peer_url = f"http://{machine.address}:2379", f"http://{machine.address}:2380"
            machine.start(
                [
                    self._binary,
                    f"--name={name}",
                    f"--data-dir={machine.folder / 'data'}",
                    f"--listen-client-urls={client_url}",
                    f"--advertise-client-urls={client_url}",
                    f"--listen-peer-urls={peer_url}",
                    f"--initial-advertise-peer-urls={peer_url}",
                    f"--initial-cluster={self.cluster}",
                    f"--initial-cluster-token={self.token}",
                    "--heartbeat-interval=100",
                    "--election-timeout=1000",
                    "--logger=zap",
                    "--log-level=warn",
                ],
                os.environ,
                self._home / f"{name}.log",
            )

    def ctl(self, *words: str) -> str:
        """Run etcdctl at the members that answer."""
        binary = etcd_binary("etcdctl")
        assert binary is not None
        done = subprocess.run(
            [binary, "--command-timeout=5s", *words],
            capture_output=True,
            text=True,
            env={**os.environ, "ETCDCTL_API": "3"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def put_back(self, snapshot: Path) -> None:
        """All members end, and begin anew with what the snapshot has."""
        binary = etcd_binary("etcdutl")
        assert binary is not None
        self.token = f"{self.token}+"
        for machine in self.machines.values():
            machine.kill()
        for name, machine in self.machines.items():
            shutil.rmtree(machine.folder / "data")
            subprocess.run(
                [
                    binary,
                    "snapshot",
                    "restore",
                    str(snapshot),
                    f"--name={name}",
                    f"--data-dir={machine.folder / 'data'}",
                    f"--initial-cluster={self.cluster}",
                    f"--initial-cluster-token={self.token}",
                    f"--initial-advertise-peer-urls=http://{machine.address}:2380",
                ],
                check=True,
                capture_output=True,
            )
        self.start()

    async def serves(self) -> None:
        """Wait until a write is taken."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(AssertionError):
                    await asyncio.to_thread(
                        self.ctl, f"--endpoints={','.join(self.endpoints)}", "put", "play", "1"
                    )
                    return
                await asyncio.sleep(0.2)

    def leader(self) -> str:
        """The member that leads; the first where nobody says so."""
        for name, machine in self.machines.items():
            with contextlib.suppress(AssertionError):
                said = self.ctl(
                    f"--endpoints={machine.address}:2379", "endpoint", "status", "--write-out=fields"
                )
                fields = dict(line.split('" : ') for line in said.splitlines() if '" : ' in line)
                if fields['"MemberID'] == fields['"Leader']:
                    return name
        return "e1"


class Play:
    """Everything that is there while faults happen."""

    def __init__(self, home: Path, seed: int) -> None:
        begin_network()
        self.seed = seed
        self.home = home
        self.random = random.Random(seed)
        self.folder: RegionFolder = make_region(home, "us-east", at_ms=now_ms() - 2 * DAY_MS)
        disks = home / "disks"
        disks.mkdir()
        self.brokers = {
            name: Machine(11 + number, self.folder.root / "data" / name, disks / f"{name}.img")
            for number, name in enumerate(BROKERS)
        }
        members = [
            Machine(21 + number, home / "etcd" / str(number), disks / f"e{number}.img") for number in range(3)
        ]
        self.etcd = Etcd(members, home)
        places = {name: f"{machine.address}:{PORT}" for name, machine in self.brokers.items()}
        write_cluster(self.folder, self.etcd.endpoints, places, lease=f"{LEASE_S}s")
        self.history = History()
        self.region: felix.RegionClient
        self.load: Load
        self.transactions = TransactionLoad(TOGETHER, 1, seed, pause_s=TRANSACTION_PAUSE_S)
        self.views = ViewLoad(*VIEWS)
        self.life = ""
        """how many seconds the certificate of a broker holds that is started; empty: as ever"""
        self.audit = AuditLoad(self.folder)
        self.clients: dict[str, felix.RegionClient] = {}

    # -- brokers ---------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        for name in names or BROKERS:
            said = log_file(self.folder, name)
            said.parent.mkdir(parents=True, exist_ok=True)
            self.failing(name).unlink(missing_ok=True)
            felix_words = command("--log-level", "info", "region", "up", "us-east", "--broker", name)
            self.brokers[name].start(
                [PLAYED if word == "cli.main" else word for word in felix_words],
                environment(
                    self.home,
                    PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}",
                    **{
                        TOLD_BY: str(self.failing(name)),
                        AHEAD_BY: str(self.clock(name)),
                        BROKER_LIFE_S: self.life,
                    },
                ),
                said,
            )

    def failing(self, name: str) -> Path:
        """The file that makes the next sync of this broker fail."""
        return self.home / f"{name}.fails"

    def clock(self, name: str) -> Path:
        """The file that says how wrong this broker's clock is."""
        return self.home / f"{name}.clock"

    def is_serving(self, name: str) -> bool:
        process = self.brokers[name].process
        if process is not None and process.poll() == UNAVAILABLE:
            self.brokers[name].process = None
            self.start(name)
        elif process is not None and process.poll() is not None:
            raise AssertionError(f"{name} ended with {process.returncode}:\n{self.words(name)}")
        process = self.brokers[name].process
        state = read_state(self.folder.pid_of(name))
        return process is not None and state is not None and state.get("pid") == process.pid

    def words(self, name: str) -> str:
        """The end of what a broker said."""
        return log_file(self.folder, name).read_text()[-3_000:]

    async def serve(self, *names: str) -> None:
        """Wait until they do. Whoever did not get through to the store at its start is started again, as services are."""
        async with asyncio.timeout(WAIT_S):
            while not all(self.is_serving(name) for name in names or BROKERS):  # noqa: ASYNC110 - no event is set for it
                await asyncio.sleep(0.05)

    async def start_again(self, *names: str) -> None:
        self.start(*names)
        await self.serve(*names)

    async def leader(self, stream: str = STREAM) -> str:
        """Who says that it leads, and may."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for name, region in self.clients.items():
                    with contextlib.suppress(FelixError, ValueError, TimeoutError):
                        async with asyncio.timeout(1):
                            (state,) = (await region.connection.request(ListStreams(stream, "", 1))).streams
                        # Who leads is named by all; the epoch is known to whoever does.
                        if state.state[0].leader_epoch and not state.state[0].stopped:
                            return name
                await asyncio.sleep(0.05)

    async def led(self) -> tuple[str, list[str]]:
        """The leader, and the others."""
        leader = await self.leader()
        return leader, [name for name in BROKERS if name != leader]

    async def in_sync(self) -> None:
        seen: object = None
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    with contextlib.suppress(FelixError):
                        states = [
                            (await self.region.describe_stream(stream)).state[0]
                            for stream in (STREAM, *TOGETHER, *VIEWS)
                        ]
                        seen = states
                        if all(
                            not each.stopped and sorted(each.in_sync) == sorted(BROKERS) for each in states
                        ):
                            return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not all copies are in sync again: {seen}") from None

    def cut(self, one: str, *others: str, back: bool = True) -> None:
        """What `one` sends to the others, brokers or members, is lost; `back`: and what they send to it."""
        known = self.brokers | self.etcd.machines
        known[one].cut_off(known[other] for other in others)
        if back:
            for other in others:
                known[other].cut_off([known[one]])

    def heal(self) -> None:
        for machine in (*self.brokers.values(), *self.etcd.machines.values()):
            machine.heal()
            machine.go_on()
            machine.make_room()
        for name in BROKERS:
            set_clock(self.clock(name), 0)

    # -- a play ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """All is up, and clients are at work."""
        self.etcd.start()
        await self.etcd.serves()
        self.start()
        await self.serve()
        async with AsyncExitStack() as stack:
            self.region = await stack.enter_async_context(client(self.folder))
            profile = felix.load_profile("us-east", home=self.home)
            for name, machine in self.brokers.items():
                alone = replace(profile, addresses=(f"{machine.address}:{PORT}",))
                self.clients[name] = await stack.enter_async_context(
                    felix.connect(
                        profile=alone, backoff=felix.BackoffPolicy(first_ms=5, ceiling_ms=100),
                        request_timeout_s=2,
                    )
                )  # fmt: skip
            for stream in (STREAM, *TOGETHER):
                await self.region.create_stream(stream, replicas=3)
            self.load = Load(self.region, STREAM, self.history, pause_s=PAUSE_S)
            writer, one, other = [await stack.enter_async_context(client(self.folder)) for _ in range(3)]
            async with (
                self.views.going_on(one, other),
                self.load.going_on(writers=2, readers=2, brokers=self.clients),
                self.transactions.going_on([writer]),
                self.audit.going_on(self.region),
            ):
                await self.transactions.goes_on(1)
                await self.views.goes_on(1)
                await self.audit.goes_on(1)
                await self.in_sync()
                yield
            # What was told and is nowhere written goes with its process.
            await all_brokers_are_killed(self)
            self.history.check(await stored_in(self.region, STREAM))
            await self.transactions.check(self.region)
            await self.views.check(self.region)
            await self.audit.check([machine.folder / "audit" for machine in self.brokers.values()])

    async def home_of_the_audit_log(self) -> str:
        """The broker that writes it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(FelixError):
                    brokers = (await self.region.describe()).brokers
                    if found := [each.broker for each in brokers if each.has_audit_log]:
                        return found[0]
                await asyncio.sleep(0.1)

    async def controller(self) -> str:
        """The broker that places and elects."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(FelixError):
                    brokers = (await self.region.describe()).brokers
                    if found := [each.broker for each in brokers if each.is_controller]:
                        return found[0]
                await asyncio.sleep(0.1)

    async def round(self, name: str) -> float:
        """One fault; seconds without an acknowledgement, at the longest."""
        began = time.monotonic()
        await FAULTS[name](self)
        self.heal()
        try:
            await self.load.goes_on(GOES_ON)
            await self.transactions.goes_on(TRANSACTIONS)
            await self.views.goes_on(OF_VIEWS)
            await self.audit.goes_on(DOCUMENTS)
            await self.in_sync()
        except (TimeoutError, AssertionError) as error:
            said = "\n".join(f"-- {broker}\n{self.words(broker)}" for broker in BROKERS)
            raise AssertionError(f"after {name}: {error!r}\n{said}") from error
        ats = [began, *(each.at for each in self.history.acknowledged if each.at > began)]
        return max(after - before for before, after in itertools.pairwise(ats))


Fault = Callable[[Play], Awaitable[None]]


async def _lease(more_s: float = 1.0) -> None:
    await asyncio.sleep(LEASE_S + more_s)


async def the_leader_is_killed(play: Play) -> None:
    leader, _ = await play.led()
    play.brokers[leader].kill()
    await play.start_again(leader)


async def the_leader_is_killed_and_stays_away(play: Play) -> None:
    leader, _ = await play.led()
    play.brokers[leader].kill()
    await play.load.goes_on(GOES_ON)
    await play.start_again(leader)


async def a_follower_is_killed(play: Play) -> None:
    _, others = await play.led()
    name = play.random.choice(others)
    play.brokers[name].kill()
    await play.start_again(name)


async def all_brokers_are_killed(play: Play) -> None:
    for machine in play.brokers.values():
        machine.kill()
    await play.start_again()


async def the_leader_stands_still(play: Play) -> None:
    """For longer than its lease; then it goes on as if it led."""
    leader, _ = await play.led()
    play.brokers[leader].signal(signal.SIGSTOP)
    await _lease()
    play.brokers[leader].signal(signal.SIGCONT)


async def a_follower_stands_still(play: Play) -> None:
    _, others = await play.led()
    name = play.random.choice(others)
    play.brokers[name].signal(signal.SIGSTOP)
    await _lease()
    play.brokers[name].signal(signal.SIGCONT)


async def the_leader_loses_power(play: Play) -> None:
    leader, _ = await play.led()
    await asyncio.to_thread(cut_power, [play.brokers[leader]])
    await play.start_again(leader)


async def all_brokers_lose_power(play: Play) -> None:
    await asyncio.to_thread(cut_power, list(play.brokers.values()))
    await play.start_again()


async def everything_loses_power(play: Play) -> None:
    """Brokers and store, at one moment."""
    await asyncio.to_thread(cut_power, [*play.brokers.values(), *play.etcd.machines.values()])
    play.etcd.start()
    await play.etcd.serves()
    await play.start_again()


async def the_leader_does_not_reach_a_follower(play: Play) -> None:
    leader, others = await play.led()
    play.cut(leader, play.random.choice(others), back=False)
    await _lease()


async def a_follower_does_not_reach_the_leader(play: Play) -> None:
    leader, others = await play.led()
    play.cut(play.random.choice(others), leader, back=False)
    await _lease()


async def the_leader_and_a_follower_are_parted(play: Play) -> None:
    leader, others = await play.led()
    play.cut(leader, play.random.choice(others))
    await _lease()


async def the_leader_reaches_no_follower(play: Play) -> None:
    """Its lease goes on: it has to yield."""
    leader, others = await play.led()
    play.cut(leader, *others)
    await play.load.goes_on(GOES_ON)


async def the_leader_hears_no_follower(play: Play) -> None:
    leader, others = await play.led()
    for other in others:
        play.cut(other, leader, back=False)
    await play.load.goes_on(GOES_ON)


async def the_leader_does_not_reach_the_store(play: Play) -> None:
    leader, _ = await play.led()
    play.cut(leader, *play.etcd.machines, back=False)
    await _lease(3)


async def the_leader_is_alone(play: Play) -> None:
    """Without peers and store; clients reach it."""
    leader, others = await play.led()
    play.cut(leader, *others, *play.etcd.machines)
    await _lease(2)
    await play.load.goes_on(GOES_ON)


async def the_stores_leader_is_killed(play: Play) -> None:
    name = await asyncio.to_thread(play.etcd.leader)
    play.etcd.machines[name].kill()
    await _lease()
    play.etcd.start(name)


async def a_member_of_the_store_stands_still(play: Play) -> None:
    machine = play.random.choice(list(play.etcd.machines.values()))
    machine.signal(signal.SIGSTOP)
    await _lease()
    machine.signal(signal.SIGCONT)


async def the_store_loses_its_quorum(play: Play) -> None:
    """For longer than a lease: two of three members."""
    names = play.random.sample(list(play.etcd.machines), 2)
    for name in names:
        play.etcd.machines[name].kill()
    await _lease(4)
    play.etcd.start(*names)
    await play.etcd.serves()


async def the_store_is_away(play: Play, seconds: float = 3 * LEASE_S) -> None:
    """What is acknowledged meanwhile is told."""
    for machine in play.etcd.machines.values():
        machine.signal(signal.SIGSTOP)
    before = len(play.history.acknowledged)
    await asyncio.sleep(seconds / 2)
    half = len(play.history.acknowledged)
    await asyncio.sleep(seconds / 2)
    after = len(play.history.acknowledged)
    for machine in play.etcd.machines.values():
        machine.signal(signal.SIGCONT)
    print(f"store away for {seconds:g} s: {half - before} and {after - half} acknowledged in its halves")
    await play.etcd.serves()


async def the_store_is_away_and_the_leader_killed(play: Play) -> None:
    """Nobody can be elected until it is back."""
    leader, _ = await play.led()
    for machine in play.etcd.machines.values():
        machine.signal(signal.SIGSTOP)
    play.brokers[leader].kill()
    await _lease(2)
    for machine in play.etcd.machines.values():
        machine.signal(signal.SIGCONT)
    await play.start_again(leader)


async def the_store_is_away_for_a_minute(play: Play) -> None:
    await the_store_is_away(play, AWAY_S)


async def the_stores_members_restart_in_turn(play: Play) -> None:
    """As for an update of etcd: the next one once the last serves."""
    for name, machine in play.etcd.machines.items():
        await asyncio.to_thread(machine.stop)
        play.etcd.start(name)
        await play.etcd.serves()


async def the_brokers_restart_in_turn(play: Play) -> None:
    """As for an update of Felix: the next one once all copies are in sync. No publish fails: a writer that is told so ends the play."""
    for name, machine in play.brokers.items():
        await asyncio.to_thread(machine.stop)
        await play.start_again(name)
        await play.in_sync()


async def the_store_goes_back(play: Play) -> None:
    """It is put back from a backup of before two elections, and the region is reconciled from the brokers' folders."""
    snapshot = play.home / "snapshot"
    snapshot.unlink(missing_ok=True)
    endpoint = f"--endpoints={play.etcd.endpoints[0]}"
    await asyncio.to_thread(play.etcd.ctl, endpoint, "snapshot", "save", str(snapshot))
    for _ in range(2):
        leader, _ = await play.led()
        play.brokers[leader].kill()
        await play.load.goes_on(GOES_ON)
        await play.start_again(leader)
        await play.in_sync()
    await play.load.goes_on(GOES_ON)
    for machine in play.brokers.values():
        if play.random.random() < 0.5:
            await asyncio.to_thread(machine.stop)
        else:
            machine.kill()
    await asyncio.to_thread(play.etcd.put_back, snapshot)
    await play.etcd.serves()
    said = await asyncio.to_thread(
        subprocess.run,
        command("region", "reconcile", "us-east"),
        env=environment(play.home),
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    await play.start_again()


async def _disks_are_full(play: Play, names: Sequence[str], *, kill: str = "") -> None:
    """For a while; `kill`: this broker ends meanwhile. Once views go on, whoever leads the queue is killed: what it told its workers has to be written."""
    for name in names:
        await asyncio.to_thread(play.brokers[name].fill)
    await asyncio.sleep(FULL_S + play.random.random())
    if kill:
        play.brokers[kill].kill()
    for name in names:
        play.brokers[name].make_room()
    if kill:
        await play.start_again(kill)
    await play.views.goes_on(OF_VIEWS)
    leader = await play.leader(QUEUE)
    play.brokers[leader].kill()
    await play.start_again(leader)


async def a_disk_is_full(play: Play) -> None:
    """That of whoever leads the queue."""
    await _disks_are_full(play, [await play.leader(QUEUE)])


async def two_disks_are_full(play: Play) -> None:
    await _disks_are_full(play, play.random.sample(BROKERS, 2))


async def all_disks_are_full(play: Play) -> None:
    await _disks_are_full(play, BROKERS)


async def all_disks_are_full_and_a_broker_is_killed(play: Play) -> None:
    await _disks_are_full(play, BROKERS, kill=play.random.choice(BROKERS))


async def the_leaders_disk_hangs(play: Play) -> None:
    """Until somebody else leads, and beyond: it gives way, though its lease goes on."""
    leader, _ = await play.led()
    await asyncio.to_thread(play.brokers[leader].hang)
    await play.load.goes_on(GOES_ON)
    await asyncio.to_thread(play.brokers[leader].go_on)


async def a_followers_disk_hangs(play: Play) -> None:
    _, others = await play.led()
    machine = play.brokers[play.random.choice(others)]
    await asyncio.to_thread(machine.hang)
    await play.load.goes_on(GOES_ON)
    await asyncio.to_thread(machine.go_on)


async def the_queues_leaders_disk_hangs_and_it_loses_power(play: Play) -> None:
    """Its processes are gone while writes and syncs of theirs wait."""
    machine = play.brokers[leader := await play.leader(QUEUE)]
    await asyncio.to_thread(machine.hang)
    await asyncio.sleep(HANGS_S * play.random.random())
    machine.signal(signal.SIGSTOP)
    await asyncio.to_thread(machine.go_on)
    await asyncio.to_thread(cut_power, [machine])
    await play.start_again(leader)


async def all_disks_hang(play: Play) -> None:
    for machine in play.brokers.values():
        await asyncio.to_thread(machine.hang)
    await asyncio.sleep(HANGS_S * play.random.random())
    for machine in play.brokers.values():
        await asyncio.to_thread(machine.go_on)


async def _until_a_sync_fails(play: Play, names: Sequence[str], what: str) -> None:
    for name in names:
        play.failing(name).write_text(what)
    async with asyncio.timeout(WAIT_S):
        while all(play.failing(name).exists() for name in names):  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0.05)


async def _a_sync_fails(play: Play, names: Sequence[str], what: str = "") -> None:
    """The next one of each, of a path with `what` in it. Then the power goes, and with it all that was not synced: also what a later sync of the
    same file is taken for."""
    await _until_a_sync_fails(play, names, what)
    if len(names) == 1:
        await play.load.goes_on(GOES_ON)
    else:
        # Where one or two have stopped, the others have perhaps nothing to sync.
        await asyncio.sleep(5 * play.random.random())
    if play.random.random() < 0.5:
        # By then what has failed is open again, and confirms.
        await asyncio.sleep(REOPENED_S)
    await asyncio.to_thread(cut_power, [play.brokers[name] for name in names])
    await play.start_again(*names)


async def a_sync_of_the_leader_fails(play: Play) -> None:
    leader, _ = await play.led()
    await _a_sync_fails(play, [leader], ".seg")


async def a_sync_fails(play: Play) -> None:
    """Whatever is synced next, by whichever broker."""
    await _a_sync_fails(play, [play.random.choice(BROKERS)])


async def a_sync_of_each_broker_fails(play: Play) -> None:
    await _a_sync_fails(play, BROKERS)


async def a_sync_of_the_leader_fails_and_it_stands_still(play: Play) -> None:
    """About when it opens its copy again; then it loses its power."""
    leader, _ = await play.led()
    await _until_a_sync_fails(play, [leader], ".seg")
    await asyncio.sleep(REOPENED_S * play.random.random())
    play.brokers[leader].signal(signal.SIGSTOP)
    await _lease()
    play.brokers[leader].signal(signal.SIGCONT)
    await asyncio.sleep(REOPENED_S * play.random.random())
    await asyncio.to_thread(cut_power, [play.brokers[leader]])
    await play.start_again(leader)


async def a_sync_of_the_leader_fails_and_the_others_are_killed(play: Play) -> None:
    """About when it opens its copy again: nobody else is there to lead."""
    leader, others = await play.led()
    await _until_a_sync_fails(play, [leader], ".seg")
    await asyncio.sleep(REOPENED_S * play.random.random())
    for name in others:
        play.brokers[name].kill()
    await asyncio.sleep(REOPENED_S * play.random.random())
    await play.start_again(play.random.choice(others))
    await play.load.goes_on(GOES_ON)
    await play.start_again(*(name for name in others if play.brokers[name].process is None))


async def _asked(ask: Callable[[], Awaitable[T]], codes: Sequence[Code] = ()) -> T:
    """What an operator is answered, who asks again where a broker is away, or for these reasons."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await ask()
            except UnavailableError:
                pass
            except RequestError as error:
                if error.code not in codes:
                    raise
            await asyncio.sleep(0.2)


async def _something_else(play: Play, name: str) -> None:
    """What may happen to a broker while an operator's word is carried out."""
    await asyncio.sleep(play.random.random())
    machine = play.brokers[name]
    match play.random.choice(("killed", "stands still", "fails", "power")):
        case "killed":
            machine.kill()
            await play.start_again(name)
        case "stands still":
            machine.signal(signal.SIGSTOP)
            await _lease()
            machine.signal(signal.SIGCONT)
        case "fails":
            play.failing(name).write_text("")
            await asyncio.sleep(REOPENED_S * play.random.random())
        case _:
            await asyncio.to_thread(cut_power, [machine])
            await play.start_again(name)


async def a_broker_is_drained_beside_faults(play: Play) -> None:
    """Of itself, and of another one; then it may have copies again."""
    drained, other, _ = play.random.sample(BROKERS, 3)
    await _asked(lambda: play.region.drain_broker(drained))
    for name in play.random.sample([drained, other], 2):
        await _something_else(play, name)
    if play.random.random() < 0.5:
        await play.load.goes_on(GOES_ON)
    await _asked(lambda: play.region.drain_broker(drained, drain=False))


async def leaders_are_evened_out_and_the_controller_is_killed(play: Play) -> None:
    """The word goes on with the next one, and ends."""
    leader, _ = await play.led()
    play.brokers[leader].kill()
    await play.start_again(leader)
    await play.in_sync()
    await _asked(play.region.rebalance)
    state = await _asked(play.region.describe)
    controller = next((each.broker for each in state.brokers if each.is_controller), leader)
    await asyncio.sleep(0.2 * play.random.random())
    play.brokers[controller].kill()
    await play.start_again(controller)

    async def ends(*, in_order: bool) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                moves = await _asked(lambda: play.region.rebalance(dry_run=True))
                if not (moves.is_asked or moves.under_way or (in_order and moves.total)):
                    return
                await asyncio.sleep(0.2)

    # It may have ended before the controller did, whose shards are led unevenly since.
    await ends(in_order=False)
    await _asked(play.region.rebalance)
    await ends(in_order=True)


async def keys_are_rotated_beside_faults(play: Play) -> None:
    """Data keys, of all and of a stream, and the root, which takes all brokers."""
    _, others = await play.led()
    going = asyncio.ensure_future(_something_else(play, play.random.choice(BROKERS)))
    await _asked(lambda: play.region.rotate_keys("data"))
    await _asked(lambda: play.region.rotate_keys("data", STREAM))
    await _asked(lambda: play.region.rotate_keys("root"), (Code.CONFLICT,))
    await going
    await _something_else(play, play.random.choice(others))
    said = await _asked(lambda: play.region.rotate_keys("root"), (Code.CONFLICT,))
    print(f"rotated: {said}")


async def the_disk_of_the_audit_logs_home_hangs(play: Play) -> None:
    home = await play.home_of_the_audit_log()
    await asyncio.to_thread(play.brokers[home].hang)
    await play.audit.goes_on(DOCUMENTS)
    await asyncio.to_thread(play.brokers[home].go_on)


async def the_controllers_disk_hangs_and_a_leader_is_killed(play: Play) -> None:
    """Whoever is the controller by then elects another one."""
    controller = await play.controller()
    await asyncio.to_thread(play.brokers[controller].hang)
    await asyncio.sleep(HANGS_S * play.random.random())
    leader = await play.leader(QUEUE)
    if leader != controller:
        play.brokers[leader].kill()
        await _lease(2)
        await play.start_again(leader)
    await asyncio.to_thread(play.brokers[controller].go_on)


async def _has_no_copies(play: Play, name: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(FelixError):
                states = [
                    state
                    for each in (STREAM, *TOGETHER, *VIEWS)
                    for state in (await play.region.describe_stream(each)).state
                ]
                if all(name not in state.replicas for state in states):
                    return
            await asyncio.sleep(0.1)


async def a_disk_hangs_below_copies_that_are_made(play: Play) -> None:
    """Of whoever gets them, or of whoever leads; then it goes on, or its power goes."""
    new, other, _ = play.random.sample(BROKERS, 3)
    await _asked(lambda: play.region.drain_broker(new))
    await _has_no_copies(play, new)
    await play.load.goes_on(GOES_ON)
    await _asked(lambda: play.region.drain_broker(new, drain=False))
    await asyncio.sleep(1.5 * play.random.random())
    machine = play.brokers[play.random.choice([new, new, other])]
    await asyncio.to_thread(machine.hang)
    await play.load.goes_on(GOES_ON)
    await play.audit.goes_on(1)
    await asyncio.sleep(HANGS_S * play.random.random())
    if play.random.random() < 0.5:
        name = next(name for name, each in play.brokers.items() if each is machine)
        machine.signal(signal.SIGSTOP)
        await asyncio.to_thread(machine.go_on)
        await asyncio.to_thread(cut_power, [machine])
        await play.start_again(name)
    else:
        await asyncio.to_thread(machine.go_on)


async def a_clock_is_wrong(play: Play) -> None:
    """By an hour; a leader is killed meanwhile. Then it is right again, and nothing has to be restarted."""
    name = play.random.choice([await play.home_of_the_audit_log(), *BROKERS])
    set_clock(play.clock(name), play.random.choice((HOUR_MS, -HOUR_MS)))
    await play.load.goes_on(GOES_ON)
    await play.views.goes_on(OF_VIEWS)
    leader, _ = await play.led()
    play.brokers[leader].kill()
    await play.load.goes_on(GOES_ON)
    await play.start_again(leader)
    await asyncio.sleep(LEASE_S * play.random.random())


async def a_broker_starts_with_a_wrong_clock(play: Play) -> None:
    """Of an hour; then it is right again, and nothing has to be restarted."""
    name = play.random.choice(BROKERS)
    play.brokers[name].kill()
    set_clock(play.clock(name), play.random.choice((HOUR_MS, -HOUR_MS)))
    await play.start_again(name)
    await asyncio.sleep(2 * LEASE_S)
    state = await _asked(play.region.describe)
    assert any(f"The clock of broker {name}" in each for each in state.alarms), state.alarms


async def a_broker_is_away_for_a_certificate(play: Play) -> None:
    """It stands still until its own and those of the others have ended, and the region issues by another one."""
    play.life = str(LIFE_S)
    await the_brokers_restart_in_turn(play)
    play.life = ""
    name = play.random.choice(BROKERS)
    play.brokers[name].signal(signal.SIGSTOP)
    said = await asyncio.to_thread(
        subprocess.run, command("identity", "renew-issuing", "--region", "us-east"),
        env=environment(play.home), capture_output=True, text=True,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    await asyncio.sleep(LIFE_S + 5)
    play.brokers[name].signal(signal.SIGCONT)
    await play.load.goes_on(GOES_ON)
    await play.in_sync()
    await the_brokers_restart_in_turn(play)


FAULTS: Final[dict[str, Fault]] = {
    fault.__name__: fault
    for fault in (
        the_leader_is_killed, the_leader_is_killed_and_stays_away, a_follower_is_killed, all_brokers_are_killed, the_leader_stands_still,
        a_follower_stands_still, the_leader_loses_power, all_brokers_lose_power, everything_loses_power, the_leader_does_not_reach_a_follower,
        a_follower_does_not_reach_the_leader, the_leader_and_a_follower_are_parted, the_leader_reaches_no_follower,
        the_leader_hears_no_follower, the_leader_does_not_reach_the_store, the_leader_is_alone, the_stores_leader_is_killed,
        a_member_of_the_store_stands_still, the_store_loses_its_quorum, the_store_is_away, the_store_is_away_and_the_leader_killed,
        the_store_is_away_for_a_minute, the_stores_members_restart_in_turn, the_brokers_restart_in_turn, the_store_goes_back,
        a_disk_is_full, two_disks_are_full, all_disks_are_full, all_disks_are_full_and_a_broker_is_killed,
        the_leaders_disk_hangs, a_followers_disk_hangs, the_queues_leaders_disk_hangs_and_it_loses_power, all_disks_hang,
        a_sync_of_the_leader_fails, a_sync_fails, a_sync_of_each_broker_fails,
        a_sync_of_the_leader_fails_and_it_stands_still, a_sync_of_the_leader_fails_and_the_others_are_killed,
        the_disk_of_the_audit_logs_home_hangs, the_controllers_disk_hangs_and_a_leader_is_killed, a_disk_hangs_below_copies_that_are_made,
        a_clock_is_wrong, a_broker_starts_with_a_wrong_clock, a_broker_is_away_for_a_certificate,
        a_broker_is_drained_beside_faults, leaders_are_evened_out_and_the_controller_is_killed, keys_are_rotated_beside_faults,
    )
}  # fmt: skip


def drawn(play: Play, rounds: int, only: Sequence[str]) -> list[str]:
    """As many as are asked for: all of them in some order, then again."""
    names = list(only or FAULTS)
    found: list[str] = []
    while len(found) < rounds:
        found += play.random.sample(names, len(names))
    return found[:rounds]


async def run(play: Play, rounds: int, only: Sequence[str]) -> None:
    pauses: dict[str, list[float]] = defaultdict(list)
    try:
        async with play.going_on():
            for number, name in enumerate(drawn(play, rounds, only)):
                began = time.monotonic()
                pause = await play.round(name)
                pauses[name].append(pause)
                took = time.monotonic() - began
                print(
                    f"{number + 1}/{rounds} {name}: {pause:.1f} s without an acknowledgement, {took:.1f} s in all",
                    flush=True,
                )
    finally:
        # A process whose writes wait does not end, also where it is killed.
        for machine in play.brokers.values():
            machine.go_on()
    for name, found in sorted(pauses.items()):
        print(
            f"{name}: {len(found)} times, pause {statistics.median(found):.1f} s, at most {max(found):.1f} s"
        )
    print(
        f"{len(play.history.acknowledged)} acknowledged, {play.transactions}; {play.views}; {play.audit}; {rounds} rounds, the histories hold"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Rounds of faults over brokers and a store on machines of their own."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=())
    asked = parser.parse_args()
    play = Play(asked.folder, asked.seed)
    asyncio.run(run(play, asked.rounds, asked.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
