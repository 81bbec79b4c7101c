"""The measurement of a failover: how long writers wait when the broker that leads their stream is killed, or is stopped in order.

Three brokers and their etcd are processes of this machine; one stream has three copies, and one client writes single records into it, some at once. The
leader is ended again and again. SIGKILL is a machine that is lost: nobody starts the broker again until another one leads. SIGTERM is a rolling restart:
the broker hands on what it leads, ends, and is started again. Before the next one all copies are in sync.

A pause is the longest time without an acknowledgement, from the last one before the signal until all copies are in sync again, so that what the
broker's return costs counts too. In the end everything is read back: each acknowledged record is there once, in order, at the offset that it was acknowledged with.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

import felix
from benchmarks.brokers import LOOK_S, Brokers, all_in_sync, in_time
from cli.benchmark.accounting import Account, Ledger, Made, checksum_of, fillers, payloads_of
from cli.benchmark.figures import Spread
from cli.benchmark.measurement import Machine, machine
from cli.benchmark.roles import STILL_S, bench_client
from felix.batch import NewRecord
from felix.errors import FelixError
from felix.publisher import Publisher

ENGINE: Final = "qh3"
STREAM: Final = "bench/cluster/failover"
BROKERS: Final = 3
IN_FLIGHT: Final = 16
"""Records that wait for their acknowledgement at once."""
PACE_S: Final = 0.01
"""Between an acknowledgement and the next record of the same writer: some hundred records a second, all of which are kept to be settled."""
PAYLOAD_BYTES: Final = 64
GOES_ON: Final = 200
"""Acknowledgements after a fault, before the next one: more than can have been on their way."""
DEADLINE_MS: Final = 600_000
"""A record is tried for so long: what is lost is to be seen, not given up."""
STEP_TIMEOUT_S: Final = 180.0
"""However slow the machine is: a step that takes longer never ends."""
SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM)


class FailoverPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `kills`: how often the leader is ended by each signal; `lease_ms` 0: as long as by default."""

    kills: int = 5
    lease_ms: int = 0


class Pauses(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that writers waited, each time; by which signal."""

    signal: str
    seconds: Spread


class FailoverReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks failover --json` prints. `undisturbed_s`: the longest time without an acknowledgement while nothing was ended."""

    kind: str
    machine: Machine
    plan: FailoverPlan
    seconds: float
    lease_ms: int
    undisturbed_s: float
    pauses: list[Pauses]
    account: Account


def longest_gap_ns(times_ns: Sequence[int], since_ns: int) -> int:
    """The longest time between two that follow each other, from the last one up to `since_ns` on. Times in ns, in order. Pure."""
    before = [at for at in times_ns if at <= since_ns][-1:]
    after = [at for at in times_ns if at > since_ns]
    return max((later - earlier for earlier, later in pairwise([*before, *after])), default=0)


class _Writer:
    """Writes until it is told to end, and keeps the books."""

    def __init__(self, publisher: Publisher) -> None:
        self.made: list[Made] = []
        self.misplaced = 0
        self.acknowledged = 0
        self.times_ns: list[int] = []
        """of acknowledgements, since somebody forgot those before"""
        self._publisher = publisher
        self._filling = fillers(PAYLOAD_BYTES)
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Until the block ends; then everything that was sent is acknowledged."""
        self._tasks = [asyncio.ensure_future(self._work()) for _ in range(IN_FLIGHT)]
        try:
            yield
            self._is_over = True
            async with in_time("All that was sent is acknowledged", STEP_TIMEOUT_S):
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def goes_on(self) -> None:
        """So many more records are acknowledged."""
        wanted = self.acknowledged + GOES_ON
        while self.acknowledged < wanted:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(LOOK_S)

    async def _work(self) -> None:
        while not self._is_over:
            made = Made(0, len(self.made), 1, time.monotonic_ns())
            self.made.append(made)
            records = list(map(NewRecord, payloads_of(made, self._filling)))
            receipt = await self._publisher.publish_batch(records, 0)
            self.times_ns.append(time.monotonic_ns())
            self.acknowledged += 1
            if (receipt.base_offset, receipt.records) != (made.first, 1):
                self.misplaced += 1
            await asyncio.sleep(PACE_S)


def measure_failover(
    plan: FailoverPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> FailoverReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for minutes.

    Raises UnavailableError where a process fails or the region does not recover, RequestError where there is no etcd.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as name:
        brokers = Brokers(Path(name), BROKERS, lease_ms=plan.lease_ms)
        said("three brokers start")
        with brokers.running():
            undisturbed_s, pauses, account = asyncio.run(_measure(plan, brokers, said))
    return FailoverReport(
        kind="failover",
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        lease_ms=brokers.lease_ms,
        undisturbed_s=undisturbed_s,
        pauses=pauses,
        account=account,
    )


async def _measure(
    plan: FailoverPlan, brokers: Brokers, said: Callable[[str], None]
) -> tuple[float, list[Pauses], Account]:
    async with bench_client(brokers.home, ENGINE) as client:
        await client.create_stream(STREAM, replicas=BROKERS)
        await all_in_sync(client, STREAM, BROKERS)
        taken: dict[signal.Signals, list[float]] = {each: [] for each in SIGNALS}
        async with client.stream(STREAM).publisher(deadline_ms=DEADLINE_MS) as publisher:
            writer = _Writer(publisher)
            async with writer.going_on():
                await writer.goes_on()
                writer.times_ns.clear()
                for _ in range(5):
                    await writer.goes_on()
                undisturbed_s = longest_gap_ns(writer.times_ns, 0) / 1e9
                for number in range(plan.kills):
                    for each in SIGNALS:
                        said(f"{each.name} to the leader, {number + 1} of {plan.kills}")
                        async with in_time(
                            f"The region has recovered from {each.name} to its leader", STEP_TIMEOUT_S
                        ):
                            taken[each].append(await _pause(each, client, brokers, writer))
        said("everything is read back")
        account = await _read_back(client, writer)
    pauses = [Pauses(signal=each.name, seconds=Spread.of(found)) for each, found in taken.items()]
    return undisturbed_s, pauses, account


async def _pause(
    number: signal.Signals, client: felix.RegionClient, brokers: Brokers, writer: _Writer
) -> float:
    """End the leader, and wait until all is well again. Seconds without an acknowledgement."""
    leader = await _leader(client)
    pid = brokers.pid_of(leader)
    del writer.times_ns[:-1]
    since_ns = time.monotonic_ns()
    if number is signal.SIGKILL:
        with brokers.nobody_starts_again():
            os.kill(pid, number)
            await writer.goes_on()
    else:
        os.kill(pid, number)
    await brokers.started_again(leader, pid)
    await all_in_sync(client, STREAM, BROKERS)
    await writer.goes_on()
    return longest_gap_ns(writer.times_ns, since_ns) / 1e9


async def _leader(client: felix.RegionClient) -> str:
    """The broker that leads, by the region's status: there is one stream."""
    while True:
        with suppress(FelixError):
            leading = [each.broker for each in (await client.describe()).brokers if each.leads]
            if len(leading) == 1:
                return leading[0]
        await asyncio.sleep(LOOK_S)


async def _read_back(client: felix.RegionClient, writer: _Writer) -> Account:
    """Settle the books: the whole stream, and what must not come behind it."""
    ledger, made = Ledger(PAYLOAD_BYTES), writer.made
    end = 0
    async with client.stream(STREAM).subscribe("earliest", on_gap="raise") as subscription:
        with suppress(TimeoutError):
            batches = aiter(subscription.batches())
            while True:
                async with asyncio.timeout(STILL_S if end < len(made) else 0.5):
                    batch = await anext(batches)
                ledger.receive(0, ((record.offset, record.payload) for record in batch.records()))
                end = batch.next_offset
    return ledger.close({0: len(made)}, checksum_of(made, fillers(PAYLOAD_BYTES)), writer.misplaced)
