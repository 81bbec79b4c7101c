"""The measurement of a new copy: how long publishers wait for their acknowledgements while a full stream gets one copy more.

Three brokers and their etcd are processes of this machine. One stream has two copies and is filled, in batches of 64 KiB, before anything is measured. Then one
client publishes small durable records into it at an even pace, whether or not earlier ones are acknowledged, and each is timed from when it was due: for
a while before, until the third copy is in sync, and for a while after, as records then wait for three copies. All three phases are of one run, so what
else the machine does is in each of them.

On one machine three brokers share its processors and its disk, and what was just written is read from memory, not from the disk. In the end everything is
read back: each acknowledged record is there once, in order, unchanged, at its offset.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

import felix
from benchmarks.brokers import Brokers, all_in_sync
from cli.benchmark.accounting import Account, Ledger, Made, checksum_of, fillers, payloads_of
from cli.benchmark.figures import Latency, LatencySpread, Spread
from cli.benchmark.measurement import Machine, machine
from cli.benchmark.roles import STILL_S, bench_client
from felix.batch import NewRecord
from felix.collector import keep_what_is_there
from felix.errors import FelixError, UnavailableError
from felix.publisher import Publisher
from policy.quantity import Size

ENGINE: Final = "qh3"
BROKERS: Final = 3
COPIES: Final = 2
"""Before the new one."""
FILL_BYTES: Final = 4096
FILL_RECORDS: Final = 16
"""Records of FILL_BYTES in a batch: 64 KiB, so that the stream is full soon and its copy is of bytes, not of frames."""
BATCH_BYTES: Final = FILL_BYTES * FILL_RECORDS
FILLING: Final = 8
"""Batches that wait for their acknowledgement at once while the stream is filled."""
PHASES: Final = ("before", "during", "after")
SETTLE_S: Final = 3.0
"""At the pace, before the first phase: what filling left to be done is over, and nothing is cold."""
LOOK_S: Final = 0.2
"""Between two looks at the copies in sync, in all phases alike."""
DEADLINE_MS: Final = 600_000
"""A record is tried for so long: what is lost is to be seen, not given up."""
COPY_TIMEOUT_S: Final = 1_800.0
"""However slow the machine is: a copy that takes longer never ends."""


class NewCopyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `gib` that the stream holds, `seconds` before and after, `per_second` records of `payload_bytes`; `copy_rate`: `storage.copy_rate` in
    bytes per second, 0: as by default."""

    gib: float = 1.0
    seconds: float = 20.0
    per_second: float = 200.0
    payload_bytes: int = 256
    repeats: int = 1
    copy_rate: int = 0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round: latencies by phase, and what the copy took."""

    latencies: dict[str, Latency]
    copied_bytes: int
    copy_s: float
    account: Account


class PhaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One phase over all rounds; `worst_us` of each round. Ratios are against the phase before, of the same round."""

    phase: str
    latency: LatencySpread
    worst_us: Spread
    p50_ratio: Spread
    p99_ratio: Spread


class NewCopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks new-copy --json` prints. `copy_s`: from the request until the copy is in sync; `copy_rate` in bytes per second."""

    kind: str
    machine: Machine
    plan: NewCopyPlan
    seconds: float
    phases: list[PhaseResult]
    copy_s: Spread
    copy_rate: Spread
    account: Account


class _Load:
    """Records at an even pace until it is told to end; its latencies, since somebody took them."""

    def __init__(self, publisher: Publisher, plan: NewCopyPlan, base_offset: int) -> None:
        """`base_offset`: of its first record."""
        self.made: list[Made] = []
        self.misplaced = 0
        self.payload_bytes = plan.payload_bytes
        self._publisher = publisher
        self._plan = plan
        self._base_offset = base_offset
        self._filling = fillers(plan.payload_bytes)
        self._times_ns: list[tuple[int, int]] = []
        """when each was due, and how long it took"""
        self._is_over = False

    def latency(self, since_ns: int, until_ns: int) -> Latency:
        """Of the records that were due from `since_ns` on and before `until_ns`, all of which are acknowledged."""
        found = Latency.of([took for due, took in self._times_ns if since_ns <= due < until_ns])
        assert found is not None
        return found

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Until the block ends; then everything that was sent is acknowledged."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pace(group))
            try:
                yield
            finally:
                self._is_over = True

    async def _pace(self, group: asyncio.TaskGroup) -> None:
        begun_ns, number = time.monotonic_ns(), 0
        while not self._is_over:
            due_ns = begun_ns + int(number * 1e9 / self._plan.per_second)
            number += 1
            wait_ns = due_ns - time.monotonic_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
            group.create_task(self._publish(due_ns))

    async def _publish(self, due_ns: int) -> None:
        made = Made(0, len(self.made), 1, due_ns)
        self.made.append(made)
        records = list(map(NewRecord, payloads_of(made, self._filling)))
        receipt = await self._publisher.publish_batch(records, 0)
        self._times_ns.append((due_ns, time.monotonic_ns() - due_ns))
        if (receipt.base_offset - self._base_offset, receipt.records) != (made.first, 1):
            self.misplaced += 1


def measure_new_copy(
    plan: NewCopyPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> NewCopyReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for minutes.

    Raises UnavailableError where a process fails or the copy is not made, RequestError where there is no etcd.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as name:
        brokers = Brokers(Path(name), BROKERS)
        if plan.copy_rate:
            with brokers.folder.config.open("a", encoding="utf-8") as config:
                config.write(f"\nstorage:\n  copy_rate: {Size(plan.copy_rate)}\n")
        said("three brokers start")
        with brokers.running():
            rounds = asyncio.run(_measure(plan, brokers, said))
    return report_of(plan, rounds, seconds=time.monotonic() - begun)


def report_of(plan: NewCopyPlan, rounds: list[Round], *, seconds: float) -> NewCopyReport:
    """What was measured, in the order of the rounds. Pure."""
    account = Account()
    for each in rounds:
        account += each.account
    return NewCopyReport(
        kind="new-copy",
        machine=machine(),
        plan=plan,
        seconds=seconds,
        phases=[_result(phase, rounds) for phase in PHASES],
        copy_s=Spread.of([each.copy_s for each in rounds]),
        copy_rate=Spread.of([each.copied_bytes / each.copy_s for each in rounds]),
        account=account,
    )


def _result(phase: str, rounds: list[Round]) -> PhaseResult:
    pairs = [(each.latencies[phase], each.latencies[PHASES[0]]) for each in rounds]
    spread = LatencySpread.of([held for held, _ in pairs])
    assert spread is not None
    return PhaseResult(
        phase=phase,
        latency=spread,
        worst_us=Spread.of([held.max_us for held, _ in pairs]),
        p50_ratio=Spread.of([held.p50_us / before.p50_us for held, before in pairs]),
        p99_ratio=Spread.of([held.p99_us / before.p99_us for held, before in pairs]),
    )


async def _measure(plan: NewCopyPlan, brokers: Brokers, said: Callable[[str], None]) -> list[Round]:
    async with bench_client(brokers.home, ENGINE) as client:
        rounds = []
        for number in range(plan.repeats):
            stream, which = f"bench/cluster/new-copy-{number}", f"round {number + 1} of {plan.repeats}"
            await client.create_stream(stream, replicas=COPIES)
            await all_in_sync(client, stream, COPIES)
            rounds.append(await _round(plan, client, stream, _saying(said, which)))
            await client.delete_stream(stream)
        return rounds


def _saying(said: Callable[[str], None], which: str) -> Callable[[str], None]:
    return lambda text: said(f"{text}, {which}")


async def _round(
    plan: NewCopyPlan, client: felix.RegionClient, stream: str, said: Callable[[str], None]
) -> Round:
    async with client.stream(stream).publisher(deadline_ms=DEADLINE_MS) as publisher:
        said(f"{plan.gib:g} GiB are written")
        filled, misplaced = await _fill(publisher, max(1, int(plan.gib * (1 << 30)) // BATCH_BYTES))
        base_offset = len(filled) * FILL_RECORDS
        load = _Load(publisher, plan, base_offset)
        # This process keeps books of all that; a walk over them in a phase would be in its latencies.
        keep_what_is_there()
        async with load.going_on():
            said("before")
            await _look(client, stream, SETTLE_S)
            begun_ns = time.monotonic_ns()
            await _look(client, stream, plan.seconds)
            said("the copy is made")
            asked_ns = time.monotonic_ns()
            await client.alter_stream(stream, replicas=COPIES + 1)
            await _look(client, stream, COPY_TIMEOUT_S, until_copies=COPIES + 1)
            made_ns = time.monotonic_ns()
            said("after")
            await _look(client, stream, plan.seconds)
            ended_ns = time.monotonic_ns()
    said("everything is read back")
    account = await _read_back(client, stream, filled, load, misplaced)
    times_ns = (begun_ns, asked_ns, made_ns, ended_ns)
    return Round(
        latencies={
            phase: load.latency(since, until)
            for phase, (since, until) in zip(PHASES, pairwise(times_ns), strict=True)
        },
        copied_bytes=len(filled) * BATCH_BYTES,
        copy_s=(made_ns - asked_ns) / 1e9,
        account=account,
    )


async def _fill(publisher: Publisher, batches: int) -> tuple[list[Made], int]:
    """Write so many batches; what was made, and how many records were acknowledged at a wrong offset."""
    made: list[Made] = []
    filling = fillers(FILL_BYTES)
    misplaced = 0

    async def work() -> None:
        nonlocal misplaced
        while len(made) < batches:
            batch = Made(0, len(made) * FILL_RECORDS, FILL_RECORDS, time.monotonic_ns())
            made.append(batch)
            receipt = await publisher.publish_batch(list(map(NewRecord, payloads_of(batch, filling))), 0)
            if (receipt.base_offset, receipt.records) != (batch.first, FILL_RECORDS):
                misplaced += FILL_RECORDS

    await asyncio.gather(*(work() for _ in range(FILLING)))
    return made, misplaced


async def _look(client: felix.RegionClient, stream: str, seconds: float, *, until_copies: int = 0) -> None:
    """Look at the copies in sync for so long; or until there are so many, and raise UnavailableError where that takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(FelixError):
            (state,) = (await client.describe_stream(stream)).state
            if len(state.in_sync) == until_copies:
                return
        await asyncio.sleep(LOOK_S)
    if until_copies:
        raise UnavailableError(
            f"{stream} did not have {until_copies} copies in sync within {seconds:.0f} s.",
            hint="Try a quieter machine, or fewer GiB.",
        )


async def _read_back(
    client: felix.RegionClient, stream: str, filled: list[Made], load: _Load, misplaced: int
) -> Account:
    """Settle the books: what filled the stream, then what was timed, and what must not come behind it."""
    fill, timed = Ledger(FILL_BYTES), Ledger(load.payload_bytes)
    base_offset = len(filled) * FILL_RECORDS
    whole, end = base_offset + len(load.made), 0
    async with client.stream(stream).subscribe("earliest", on_gap="raise") as subscription:
        with suppress(TimeoutError):
            batches = aiter(subscription.batches())
            while True:
                async with asyncio.timeout(STILL_S if end < whole else 0.5):
                    batch = await anext(batches)
                if batch.next_offset <= base_offset:
                    fill.receive(0, ((record.offset, record.payload) for record in batch.records()))
                else:
                    timed.receive(
                        0, ((record.offset - base_offset, record.payload) for record in batch.records())
                    )
                end = batch.next_offset
    return fill.close({0: base_offset}, checksum_of(filled, fillers(FILL_BYTES)), misplaced) + timed.close(
        {0: len(load.made)}, checksum_of(load.made, fillers(load.payload_bytes)), load.misplaced
    )
