"""The measurement of caches: put and get, every system with the same keys and values in the same run.

Per round, system and concurrency, on a new cache: every key is put, then got, over one connection, so many calls under way
at once. A value says which put of its key it is, so a get that answers an older value, or another key's, is found; in the end all
keys are read again and compared with what was put last.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.peers import running_peers
from benchmarks.systems import CACHES, SYSTEMS, CacheClient, Place, cache_client
from cli.benchmark.figures import Latency, LatencySpread, Spread, rate_per_second
from cli.benchmark.measurement import WHOLE_TIMEOUT_S, Machine, machine
from cli.benchmark.processes import Processes, next_message, send_whole
from cli.benchmark.roles import WARM_SHARE, broker

STAMP_BYTES: Final = 16
"""At the head of a value: its key's number and which put it is."""


class CachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `calls`: of each operation and concurrency; a concurrency of 1 makes `lone_calls`."""

    systems: Sequence[str] = CACHES
    concurrency: Sequence[int] = (1, 32)
    value_bytes: int = 256
    keys: int = 1_000
    calls: int = 5_000
    lone_calls: int = 500
    repeats: int = 3
    budget_s: float = 120.0
    engine: str = "qh3"


class CacheCase(msgspec.Struct, frozen=True, order=True):
    """One system with so many calls under way."""

    concurrency: int
    system: str

    def __str__(self) -> str:
        return f"{self.system}, {self.concurrency} at once"


class CacheAccount(msgspec.Struct, frozen=True, kw_only=True):
    """In calls."""

    put: int = 0
    got: int = 0
    missing: int = 0
    """gets that found nothing where something was put"""
    stale: int = 0
    """gets that found another value than the newest acknowledged one"""
    differing: int = 0
    """keys that in the end have another value than the one put last"""

    @property
    def is_lossless(self) -> bool:
        """True where every get was right."""
        return not (self.missing or self.stale or self.differing)

    def __add__(self, other: CacheAccount) -> CacheAccount:
        return CacheAccount(
            put=self.put + other.put,
            got=self.got + other.got,
            missing=self.missing + other.missing,
            stale=self.stale + other.stale,
            differing=self.differing + other.differing,
        )


class CacheResult(msgspec.Struct, frozen=True, kw_only=True):
    """One case over all rounds; `felix_get`, `felix_put`: Felix's calls/s over this system's, round by round."""

    case: CacheCase
    promise: str
    repeats: int
    get_per_second: Spread
    put_per_second: Spread
    get: LatencySpread | None
    put: LatencySpread | None
    felix_get: Spread | None
    felix_put: Spread | None
    account: CacheAccount


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m benchmarks cache --json` prints."""

    machine: Machine
    plan: CachePlan
    seconds: float
    versions: dict[str, str]
    skipped: list[str]
    results: list[CacheResult]

    @property
    def is_lossless(self) -> bool:
        return all(result.account.is_lossless for result in self.results)


class Operate(msgspec.Struct, frozen=True):
    """Make the cache, put and get, and remove it."""

    system: str
    cache: str
    concurrency: int
    keys: int
    value_bytes: int
    calls: int


class Operated(msgspec.Struct, frozen=True, kw_only=True):
    """One round."""

    get_per_second: float
    put_per_second: float
    get: Latency | None
    put: Latency | None
    account: CacheAccount


async def operate(pipe: Pipe, place: Place) -> None:
    """Carry out each Operate."""
    pipe.send(None)
    while (command := await next_message(pipe)) is not None:
        client = cache_client(command.system, place, command.cache)
        await client.open()
        try:
            found = await _Calls(client, command).run()
        finally:
            await client.close()
        send_whole(pipe, found)


class _Calls:
    """Puts and gets of one cache. Task n of `concurrency` has every `concurrency`th key, so it knows what it put last."""

    def __init__(self, client: CacheClient, wanted: Operate) -> None:
        self._client = client
        self._wanted = wanted
        self._newest = [0] * wanted.keys
        self._filling = bytes(range(256)) * (wanted.value_bytes // 256 + 1)
        self._put = self._got = self._missing = self._stale = 0

    def _value(self, key: int) -> bytes:
        stamp = key.to_bytes(8) + self._newest[key].to_bytes(8)
        return stamp + self._filling[: self._wanted.value_bytes - STAMP_BYTES]

    async def run(self) -> Operated:
        put_rate, put = await self._phase(self._one_put)
        get_rate, get = await self._phase(self._one_get)
        differing = 0
        for key, newest in enumerate(self._newest):
            value = await self._client.get(f"key-{key}") if newest else None
            differing += bool(newest) and (value is None or bytes(value) != self._value(key))
        account = CacheAccount(
            put=self._put, got=self._got, missing=self._missing, stale=self._stale, differing=differing
        )
        return Operated(get_per_second=get_rate, put_per_second=put_rate, get=get, put=put, account=account)

    async def _phase(self, one: Callable[[int], Coroutine[Any, Any, None]]) -> tuple[float, Latency | None]:
        wanted = self._wanted
        events: list[tuple[int, int]] = []
        times_ns: list[int] = []
        left = wanted.calls

        async def calls(caller: int) -> None:
            nonlocal left
            key = caller
            while left > 0:
                left -= 1
                begun_ns = time.monotonic_ns()
                await one(key)
                now_ns = time.monotonic_ns()
                events.append((now_ns, 1))
                times_ns.append(now_ns - begun_ns)
                key += wanted.concurrency
                if key >= wanted.keys:
                    key = caller

        await asyncio.gather(*map(calls, range(wanted.concurrency)))
        return rate_per_second(events, WARM_SHARE), Latency.of(times_ns)

    async def _one_put(self, key: int) -> None:
        self._newest[key] += 1
        await self._client.put(f"key-{key}", self._value(key))
        self._put += 1

    async def _one_get(self, key: int) -> None:
        value = await self._client.get(f"key-{key}")
        self._got += 1
        if value is None:
            self._missing += self._newest[key] > 0
        else:
            self._stale += bytes(value) != self._value(key)


def measure_cache(
    plan: CachePlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> CacheReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for a while.

    Raises UnavailableError where a process fails or does not finish.
    """
    begun = time.monotonic()
    rounds: dict[CacheCase, dict[int, Operated]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as home,
        running_peers(Path(home) / "peers", {SYSTEMS[name].server for name in plan.systems}) as peers,
        Processes(begun + WHOLE_TIMEOUT_S, what="The measurement of caches") as processes,
    ):
        systems = [name for name in plan.systems if SYSTEMS[name].server in ("", *peers.ports)]
        processes.answer(processes.start(broker, Path(home), plan.engine))
        client = processes.start(operate, Place(home=Path(home), engine=plan.engine, ports=peers.ports))
        processes.answer(client)
        count = 0
        for number in range(plan.repeats):
            for concurrency in plan.concurrency:
                if number and time.monotonic() - begun >= plan.budget_s:
                    break
                for system in systems if number % 2 == 0 else reversed(systems):
                    case = CacheCase(concurrency, system)
                    said(f"{case}, round {number + 1} of {plan.repeats}")
                    count += 1
                    calls = plan.lone_calls if concurrency == 1 else plan.calls
                    client.send(
                        Operate(system, f"cache-{count}", concurrency, plan.keys, plan.value_bytes, calls)
                    )
                    rounds.setdefault(case, {})[number] = processes.answer(client)
    return CacheReport(
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        versions=peers.versions,
        skipped=peers.skipped,
        results=[_result(case, taken, rounds) for case, taken in rounds.items()],
    )


def _result(
    case: CacheCase, taken: dict[int, Operated], rounds: dict[CacheCase, dict[int, Operated]]
) -> CacheResult:
    beside = rounds.get(msgspec.structs.replace(case, system="felix-fsync"), {})
    both = [number for number in taken if number in beside and case.system != "felix-fsync"]
    gets = [beside[number].get_per_second / taken[number].get_per_second for number in both]
    puts = [beside[number].put_per_second / taken[number].put_per_second for number in both]
    return CacheResult(
        case=case,
        promise=SYSTEMS[case.system].promise,
        repeats=len(taken),
        get_per_second=Spread.of([each.get_per_second for each in taken.values()]),
        put_per_second=Spread.of([each.put_per_second for each in taken.values()]),
        get=LatencySpread.of([each.get for each in taken.values()]),
        put=LatencySpread.of([each.put for each in taken.values()]),
        felix_get=Spread.of(gets) if gets else None,
        felix_put=Spread.of(puts) if puts else None,
        account=sum((each.account for each in taken.values()), CacheAccount()),
    )
