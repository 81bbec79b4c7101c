"""A cache under kills: writers that live through them, one that is killed itself, and a mirror across all.

Settled: every key has the value of its last acknowledged mutation; a counter counted every acknowledged increment once, though
increments were asked again after lost answers, and at most one per kill of its writer that nobody was told of; a mirror kept by a watch
ends up equal to the cache.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from region_peer import until
from soak.harness import Books, Worker

import felix

CACHE = "acme/soak/sessions"
COUNTED = b"counted-by-worker"
WRITERS = 4
KEYS = 12
PACE_S = 0.005


class CachePart:
    """See the module."""

    name = "cache"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._model: dict[bytes, bytes] = {}
        self._mutations = 0
        self._unknown = 0
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._mirror: felix.Mirror | None = None
        self._worker: Worker | None = None

    async def start(self, region: felix.RegionClient) -> list[Worker]:
        cache = await region.create_cache(CACHE, shards=2)
        self._mirror = cache.mirror()
        await self._mirror.open()
        self._tasks = [asyncio.ensure_future(self._write(cache, who)) for who in range(WRITERS)]
        self._worker = Worker(self._home, "cache_worker", "counter", CACHE)
        return [self._worker]

    def progress(self) -> int:
        for task in self._tasks:
            if task.done():
                task.result()
        return self._mutations

    async def _write(self, cache: felix.Cache, who: int) -> None:
        chance = Random(who)
        at = 0
        while not self._over.is_set():
            at += 1
            key = b"%d/%d" % (who, chance.randrange(KEYS))
            what = chance.choice(("put", "put", "delete", "swap", "count"))
            try:
                await self._mutate(cache, key, what, b"%d %d" % (who, at))
            except felix.UnavailableError:
                # Asked for as long as the client asks: whether it was carried out shows in the cache alone.
                self._unknown += 1
                await self._look(cache, key)
            self._mutations += 1
            await asyncio.sleep(PACE_S)

    async def _mutate(self, cache: felix.Cache, key: bytes, what: str, value: bytes) -> None:
        held = self._model.get(key)
        if what == "delete":
            await cache.delete(key)
            self._model.pop(key, None)
        elif what == "count":
            key += b"#"
            number = await cache.increment(key)
            expected = int(self._model.get(key, b"0")) + 1
            assert number == expected, f"{key!r} counted to {number}, not to {expected}"
            self._model[key] = b"%d" % number
        elif what == "swap":
            entry = await cache.get(key)
            assert (entry.value if entry else None) == held, f"{key!r} is {entry}, not {held!r}"
            version = await cache.compare_and_set(key, value, version=entry.version if entry else 0)
            assert version is not None, f"nobody else writes {key!r}"
            self._model[key] = value
        else:
            await cache.put(key, value)
            self._model[key] = value

    async def _look(self, cache: felix.Cache, key: bytes) -> None:
        for each in (key, key + b"#"):
            while True:
                try:
                    entry = await cache.get(each)
                except felix.UnavailableError:
                    continue
                break
            if entry is None:
                self._model.pop(each, None)
            else:
                self._model[each] = entry.value

    async def stop(self) -> None:
        self._over.set()
        async with asyncio.timeout(120):
            await asyncio.gather(*self._tasks)
        assert self._worker is not None
        await asyncio.to_thread(self._worker.end)

    async def settle(self, region: felix.RegionClient) -> Books:
        assert self._mirror is not None
        assert self._worker is not None
        cache = region.cache(CACHE)
        held = {key: entry.value async for key, entry in cache.scan()}
        counted = int(held.pop(COUNTED, b"0"))
        problems = []
        if wrong := {
            key for key in held.keys() | self._model.keys() if held.get(key) != self._model.get(key)
        }:
            problems.append(f"{len(wrong)} keys differ from the model")
        numbers = [int(line.split()[1]) for line in self._worker.lines()]
        runs = [line.split()[0] for line in self._worker.lines()]
        for at in range(1, len(numbers)):
            step = numbers[at] - numbers[at - 1]
            # Within a run every number follows the last one; a killed run may have counted once more, unseen.
            if step != 1 and (runs[at] == runs[at - 1] or not 1 <= step <= 1 + self._worker.kills):
                problems.append(f"the counter went from {numbers[at - 1]} to {numbers[at]}")
        if numbers and not numbers[-1] <= counted <= numbers[-1] + 1:
            problems.append(f"the counter stands at {counted}, the last acknowledged number is {numbers[-1]}")
        if counted > len(numbers) + self._worker.kills + 1:
            problems.append(f"{counted} counted, {len(numbers)} acknowledged, {self._worker.kills} kills")
        whole = {**held, COUNTED: b"%d" % counted}
        mirror = self._mirror
        try:
            await until(lambda: dict(mirror) == whole, 120)
        except TimeoutError:
            problems.append("the mirror differs from the cache")
        await mirror.close()
        figures = {
            "mutations": self._mutations,
            "asked in vain": self._unknown,
            "keys": len(held),
            "counted": counted,
            "acknowledged increments of the worker": len(numbers),
        }
        return Books(figures, problems)
