"""Watchers of a cache that never diverge: writers change keys, watchers come and go, the broker is killed, and all copies are equal.

python examples/demos/cache_watchers.py [CHANGES]
"""

import asyncio
import sys
from random import Random

from own_region import OwnRegion, Summary, say

import felix

CACHE = "acme/web/sessions"
WRITERS = 3
MIRRORS = 4
KEYS = 40  # of each writer
KILLS = 2


class Watcher:
    """Follows every change, and checks that no key ever goes back. It leaves now and then, and resumes where it was."""

    def __init__(self) -> None:
        self.seen = self.backwards = self.resumes = 0
        self.copy: dict[bytes, bytes] = {}
        self._versions: dict[bytes, int] = {}
        self._position: felix.Position | None = None

    async def follow(self, cache: felix.Cache, leave_after: int) -> None:
        while True:
            before = self.seen
            async with cache.watch(resume=self._position) as watch:
                async for change in watch:
                    self._take(change)
                    self._position = change.position or self._position
                    if self.seen - before >= leave_after and change.position is not None:
                        break
            self.resumes += 1

    def _take(self, change: felix.Change) -> None:
        if change.kind == "reset":
            self.copy.clear()
        elif change.kind != "ready":
            self.seen += 1
            self.backwards += change.version < self._versions.get(change.key, 0)
            self._versions[change.key] = change.version
            if change.value is None:
                self.copy.pop(change.key, None)
            else:
                self.copy[change.key] = change.value


async def write(cache: felix.Cache, who: int, changes: int, model: dict[bytes, bytes]) -> None:
    """Puts and deletes keys of its own; the model has what was acknowledged last."""
    chance = Random(who)  # noqa: S311 - nothing secret
    for number in range(changes):
        key = b"user/%d/%d" % (who, chance.randrange(KEYS))
        if chance.random() < 0.2:
            await cache.delete(key)
            model.pop(key, None)
        else:
            model[key] = b"%d" % number
            await cache.put(key, model[key])


async def equal(copies: list[dict[bytes, bytes] | felix.Mirror], model: dict[bytes, bytes]) -> list[bool]:
    """Which copies are equal to the model, once all are, or after a minute."""
    for _ in range(600):
        found = [dict(copy) == model for copy in copies]
        if all(found):
            break
        await asyncio.sleep(0.1)
    return found


async def run(own: OwnRegion, changes: int) -> int:
    summary = Summary("Cache watchers that never diverge")
    model: dict[bytes, bytes] = {}
    async with own.connect() as writer, own.connect() as reader:
        cache = await writer.create_cache(CACHE)
        mirrors = [reader.cache(CACHE).mirror() for _ in range(MIRRORS)]
        for mirror in mirrors:
            await mirror.open()
        watcher = Watcher()
        following = asyncio.ensure_future(watcher.follow(reader.cache(CACHE), max(1, changes // 10)))
        say(f"{WRITERS} writers, {MIRRORS} mirrors, and a watcher that leaves and resumes")
        for part in range(KILLS + 1):
            writing = asyncio.gather(
                *(write(cache, who, changes // WRITERS // (KILLS + 1), model) for who in range(WRITERS))
            )
            if part:
                await asyncio.sleep(0.05)
                await asyncio.to_thread(own.kill)
                say("SIGKILL of the broker, with changes on their way; felix region up")
                await asyncio.to_thread(own.up)
            await asyncio.wait_for(writing, 300)

        say("one that begins only now")
        late = reader.cache(CACHE).mirror()
        await late.open()
        found = await equal([*mirrors, late, watcher.copy], model)
        if following.done():
            following.result()
        following.cancel()
        stored = {key: entry.value async for key, entry in cache.scan()}
        for mirror in (*mirrors, late):
            await mirror.close()

    summary.figure("changes acknowledged", changes // WRITERS // (KILLS + 1) * WRITERS * (KILLS + 1))
    summary.must("keys in the cache", len(stored), len(model))
    summary.must("the cache is what was acknowledged", stored == model, True)
    for number in range(MIRRORS):
        summary.must(f"mirror {number + 1} is the same", found[number], True)
    summary.must("the late one is the same", found[MIRRORS], True)
    summary.must("the watcher that came and went is the same", found[MIRRORS + 1], True)
    summary.must("times that it saw a key go back", watcher.backwards, 0)
    summary.figure("changes that it saw", watcher.seen)
    summary.figure("times that it resumed", watcher.resumes)
    return summary.end()


def main(changes: int = 6_000) -> int:
    with OwnRegion() as own:
        return asyncio.run(run(own, changes))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
