"""The measurement of a dead broker that led many shards: how long after its lease each is led, served and written again.

Three brokers and their etcd are processes of this machine. Streams of some shards have three copies each; every shard has records. The other two brokers
are stopped in order, so that one leads all, and started again; once all copies are in sync that one is killed, and nobody starts it again. A record for each
shard is given to publishers that are open, and waits. Times count from when the store has no lease of the dead broker any more, as a watch of the store tells
it: until the last election is written, until the new leaders say that they serve every shard, until every record is acknowledged.
In the end everything is read back: each acknowledged record is there once, in order, at the offset that it was acknowledged with.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

import felix
from benchmarks.brokers import Brokers, in_time
from benchmarks.process_use import ProcessUse
from cli.benchmark.accounting import Account, Ledger, Made, checksum_of, fillers, payloads_of
from cli.benchmark.figures import Spread
from cli.benchmark.measurement import Machine, machine
from cli.benchmark.roles import REGION, STILL_S, bench_client
from felix.batch import NewRecord
from felix.errors import FelixError, UnavailableError
from felix.publisher import Publisher
from felix.runtime.real import REAL
from region.cluster.mirror import ClusterMirror
from region.config import load_config
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.transaction import Change, Snapshot

ENGINE: Final = "qh3"
BROKERS: Final = 3
SHARDS_OF_A_STREAM: Final = 50
"""One client has 100 publishers at a broker: 5,000 shards at most."""
PAYLOAD_BYTES: Final = 64
RECORDS_BEFORE: Final = 2
DEADLINE_MS: Final = 600_000
"""A record is tried for so long: what is lost is to be seen, not given up."""
STEP_TIMEOUT_S: Final = 240.0
"""However slow the machine is: a step that takes longer never ends."""
GATHERED_MAX: Final = 5
"""So often it is tried to have one broker lead all."""
ASK_S: Final = 0.02
"""Between two questions whether a stream is served."""


class DeadLeaderPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `shards`: that the killed broker leads; `kills`: how often; `lease_ms` 0: as long as by default."""

    shards: int = 500
    kills: int = 3
    lease_ms: int = 0


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one kill since the store had no lease of the dead broker; `gone`: until then, since the kill. `cpu`: processor time of the other
    brokers until the last acknowledgement."""

    gone: float
    elected_first: float
    elected_last: float
    served_last: float
    written_first: float
    written_last: float
    cpu: float


class DeadLeaderReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks failover --shards N --json` prints, by what was waited for."""

    kind: str
    machine: Machine
    plan: DeadLeaderPlan
    seconds: float
    lease_ms: int
    taken: dict[str, Spread]
    account: Account


class _Store:
    """What the store says of brokers and shards, and when it said so."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self.gone_ns: dict[str, int] = {}
        """per broker, when its lease's record went last"""
        self.elected_ns: list[int] = []
        """when records of shards changed their leader, since somebody forgot those before"""
        self._leaders: dict[object, str] = {}
        self._mirror = mirror
        self.view = mirror.view
        mirror.on_change(self._noted)

    def _noted(self, known: Snapshot | Change) -> None:
        now_ns, view = time.monotonic_ns(), self.view
        if isinstance(known, Change):
            for event in known.events:
                if event.key.startswith(view.keys.brokers):
                    name = view.keys.broker_of(event.key)
                    if name not in view.alive:
                        self.gone_ns[name] = now_ns
        leaders: dict[object, str] = {shard: record.leader for shard, record in view.shards.items()}
        changed = sum(leader not in ("", self._leaders.get(shard)) for shard, leader in leaders.items())
        self.elected_ns += [now_ns] * changed
        self._leaders = leaders

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Raises UnavailableError where it does not come to hold."""
        async with in_time(what, STEP_TIMEOUT_S):
            await self._mirror.until(holds)

    def led_by(self, broker: str) -> int:
        return sum(record.leader == broker and not record.yielded for record in self.view.shards.values())

    def are_in_sync(self, count: int) -> bool:
        """Whether there are so many shards, all with three copies in sync."""
        shards = self.view.shards.values()
        return len(shards) >= count and all(
            record.leader and len(record.isr) == BROKERS
            for record in shards
            if len(record.replicas) == BROKERS
        )


@asynccontextmanager
async def _watched(brokers: Brokers) -> AsyncIterator[_Store]:
    endpoints = load_config(brokers.folder.config).metadata.endpoints
    async with await EtcdStore.open(EtcdConfig(endpoints=tuple(endpoints))) as store:
        mirror = ClusterMirror(store, REGION, REAL)
        seen = _Store(mirror)
        await mirror.start()
        try:
            yield seen
        finally:
            await mirror.close()


class _Writer:
    """Writes one record after the other into each shard of one stream, and keeps the books."""

    def __init__(self, stream: str, shards: int, publisher: Publisher) -> None:
        self.stream = stream
        self.shards = shards
        self.misplaced = 0
        self._counts = [0] * shards
        self._made: list[Made] = []
        self._publisher = publisher
        self._filling = fillers(PAYLOAD_BYTES)

    async def write(self) -> list[int]:
        """A record into each shard, at once; when each was acknowledged."""
        return await asyncio.gather(*map(self._write, range(self.shards)))

    async def _write(self, shard: int) -> int:
        made = Made(shard, self._counts[shard], 1, time.monotonic_ns())
        self._counts[shard] += 1
        self._made.append(made)
        receipt = await self._publisher.publish_batch(
            list(map(NewRecord, payloads_of(made, self._filling))), shard
        )
        if (receipt.base_offset, receipt.records) != (made.first, 1):
            self.misplaced += 1
        return time.monotonic_ns()

    async def read_back(self, client: felix.RegionClient) -> Account:
        """Settle the books: the whole stream, and what must not come behind it."""
        ledger, wanted, got = Ledger(PAYLOAD_BYTES), len(self._made), 0
        async with client.stream(self.stream).subscribe("earliest", on_gap="raise") as subscription:
            with suppress(TimeoutError):
                batches = aiter(subscription.batches())
                while True:
                    async with asyncio.timeout(STILL_S if got < wanted else 0.5):
                        batch = await anext(batches)
                    records = [(record.offset, record.payload) for record in batch.records()]
                    ledger.receive(batch.shard, records)
                    got += len(records)
        return ledger.close(
            dict(enumerate(self._counts)), checksum_of(self._made, self._filling), self.misplaced
        )


def sizes_of(shards: int) -> list[int]:
    """Shards of each stream. Pure."""
    whole, rest = divmod(shards, SHARDS_OF_A_STREAM)
    return [SHARDS_OF_A_STREAM] * whole + [rest] * (rest > 0)


def measure_dead_leader(
    plan: DeadLeaderPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> DeadLeaderReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for minutes.

    Raises UnavailableError where a process fails or the region does not recover, RequestError where there is no etcd.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as name:
        brokers = Brokers(Path(name), BROKERS, lease_ms=plan.lease_ms)
        said("three brokers start")
        with brokers.running():
            rounds, account = asyncio.run(_measure(plan, brokers, said))
    return report_of(plan, rounds, account, seconds=time.monotonic() - begun, lease_ms=brokers.lease_ms)


def report_of(
    plan: DeadLeaderPlan, rounds: Sequence[Taken], account: Account, *, seconds: float, lease_ms: int
) -> DeadLeaderReport:
    """What was measured. Pure."""
    return DeadLeaderReport(
        kind="dead-leader",
        machine=machine(),
        plan=plan,
        seconds=seconds,
        lease_ms=lease_ms,
        taken={name: Spread.of([getattr(each, name) for each in rounds]) for name in Taken.__struct_fields__},
        account=account,
    )


async def _measure(
    plan: DeadLeaderPlan, brokers: Brokers, said: Callable[[str], None]
) -> tuple[list[Taken], Account]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(bench_client(brokers.home, ENGINE))
        store = await stack.enter_async_context(_watched(brokers))
        said(f"{plan.shards} shards are made")
        writers = []
        for number, shards in enumerate(sizes_of(plan.shards)):
            stream = f"bench/dead/leader-{number:03d}"
            await client.create_stream(stream, shards=shards, replicas=BROKERS)
            publisher = client.stream(stream).publisher(deadline_ms=DEADLINE_MS)
            writers.append(_Writer(stream, shards, await stack.enter_async_context(publisher)))
        for _ in range(RECORDS_BEFORE):
            await _write_all(writers)
        rounds = []
        for number in range(plan.kills):
            said(f"kill {number + 1} of {plan.kills}: one broker is to lead all")
            leader = await _gather(plan.shards, client, brokers, store, writers)
            said(f"kill {number + 1} of {plan.kills}")
            rounds.append(await _kill(leader, plan.shards, client, brokers, store, writers))
        await store.until("All copies are in sync", lambda: store.are_in_sync(plan.shards))
        said("everything is read back")
        account = Account()
        for writer in writers:
            account += await writer.read_back(client)
        return rounds, account


async def _write_all(writers: Sequence[_Writer]) -> list[int]:
    async with in_time("A record in each shard is acknowledged", STEP_TIMEOUT_S):
        found = await asyncio.gather(*(writer.write() for writer in writers))
    return [at for each in found for at in each]


async def _gather(
    shards: int, client: felix.RegionClient, brokers: Brokers, store: _Store, writers: Sequence[_Writer]
) -> str:
    """Have one broker lead all. One that loses its lease meanwhile, as on a busy machine, loses what it led: then another one is tried."""
    for _ in range(GATHERED_MAX):
        leader = await _gathered(shards, client, brokers, store, writers)
        if leader in store.view.alive and store.led_by(leader) >= shards:
            return leader
    raise UnavailableError(
        f"No broker led all {shards} shards until the others were back.",
        hint="Try a longer lease, a quieter machine, or fewer shards.",
    )


async def _gathered(
    shards: int, client: felix.RegionClient, brokers: Brokers, store: _Store, writers: Sequence[_Writer]
) -> str:
    """Stop all brokers but the one that leads most, and start them again; that one leads all."""
    await store.until("All copies are in sync", lambda: store.are_in_sync(shards))
    leader = max(brokers.names, key=store.led_by)
    before = {name: brokers.pid_of(name) for name in brokers.names if name != leader}
    with brokers.nobody_starts_again():
        for name, pid in before.items():
            os.kill(pid, signal.SIGTERM)
            await store.until(f"Broker {name} has stopped", lambda name=name: name not in store.view.alive)  # type: ignore[misc]
        await store.until(f"Broker {leader} leads all", lambda: store.led_by(leader) >= shards)
    for name, pid in before.items():
        await brokers.started_again(name, pid)
    await store.until("All copies are in sync", lambda: store.are_in_sync(shards))
    await _served(client, writers, "")
    await _write_all(writers)
    return leader


async def _kill(
    leader: str,
    shards: int,
    client: felix.RegionClient,
    brokers: Brokers,
    store: _Store,
    writers: Sequence[_Writer],
) -> Taken:
    pid = brokers.pid_of(leader)
    others = [brokers.pid_of(name) for name in brokers.names if name != leader]
    with brokers.nobody_starts_again():
        store.elected_ns.clear()
        before_s = sum(ProcessUse.of(other).cpu_s for other in others)
        killed_ns = time.monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        writing = asyncio.ensure_future(_write_all(writers))
        serving = asyncio.ensure_future(_served(client, writers, leader))
        try:
            await store.until(f"Broker {leader} has no lease", lambda: leader not in store.view.alive)
            await store.until("All shards are led", lambda: not store.led_by(leader))
            written_ns, served_ns = sorted(await writing), await serving
        finally:
            writing.cancel()
            serving.cancel()
        cpu_s = sum(ProcessUse.of(other).cpu_s for other in others) - before_s
    gone_ns, elected_ns = store.gone_ns[leader], sorted(store.elected_ns)
    if len(elected_ns) < shards:
        raise UnavailableError(f"Only {len(elected_ns)} of {shards} shards were elected anew.")

    def since(at_ns: int) -> float:
        return (at_ns - gone_ns) / 1e9

    await brokers.started_again(leader, pid)
    return Taken(
        gone=(gone_ns - killed_ns) / 1e9,
        elected_first=since(elected_ns[0]),
        elected_last=since(elected_ns[-1]),
        served_last=since(served_ns),
        written_first=since(written_ns[0]),
        written_last=since(written_ns[-1]),
        cpu=cpu_s,
    )


async def _served(client: felix.RegionClient, writers: Sequence[_Writer], dead: str) -> int:
    """When the last shard was said to be served by another broker than the dead one, by that broker."""

    async def served(writer: _Writer) -> int:
        while True:
            with suppress(FelixError):
                state = (await client.describe_stream(writer.stream)).state
                if all(each.leader != dead and each.leader_epoch and not each.stopped for each in state):
                    return time.monotonic_ns()
            await asyncio.sleep(ASK_S)

    async with in_time("Each stream is served", STEP_TIMEOUT_S):
        return max(await asyncio.gather(*map(served, writers)))
