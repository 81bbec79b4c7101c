"""A process that changes an embedded metadata store for as long as it lives, and writes down what it was told: for tests of disks that fail.

    python store_writer.py DATABASE JOURNAL SEED FIRST

Changes are numbered from FIRST on.

The journal, a line each: `start REVISION` and `has KEY N` of each key as it starts; `begin N KEY -` (it goes) or `begin N KEY +` before a change of that key, and of `/last`, which gets N; then `done N REVISION`, `refused N` or `unknown N`; `seen REVISION N` of each change
as a watcher sees it, which follows again by itself; `loaded REVISION` where it had to load; `stopped`, `open`: as `trouble` says.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from contextlib import aclosing
from pathlib import Path

import felix.reopening

felix.reopening.REOPEN_MS_MIN, felix.reopening.REOPEN_MS_MAX = 150, 600

from felix.errors import FelixError, UnavailableError  # noqa: E402
from region.metadata import embedded  # noqa: E402
from region.metadata.embedded import EmbeddedStore  # noqa: E402
from region.metadata.port import CompactedError, OutcomeUnknownError  # noqa: E402
from region.metadata.transaction import Delete, Put, Write  # noqa: E402

embedded.OUTCOME_S = 1.5
embedded.SOUND_ALONE_MS = 500
KEYS = 40


async def write(database: Path, journal: Path, seed: int, first: int) -> None:
    chance = random.Random(seed)
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(*words: object) -> None:
        os.write(out, (" ".join(map(str, words)) + "\n").encode())

    store = await EmbeddedStore.open(database, history_events_max=200)
    number = first
    found = await store.load("")
    for entry in found.entries:
        if entry.key != "/bound":
            say("has", entry.key, entry.value.decode().split(".")[0])
    say("start", found.revision)

    async def follow() -> None:
        at = (await store.load("/last")).revision
        say("loaded", at)
        while True:
            try:
                async with aclosing(store.watch("/last", at + 1)) as changes:
                    async for change in changes:
                        at = change.revision
                        entry = change.events[0].entry
                        say("seen", at, "-" if entry is None else entry.value.decode())
            except CompactedError:
                at = (await store.load("/last")).revision
                say("loaded", at)
            except UnavailableError:
                await asyncio.sleep(0.05)

    async def look() -> None:
        told = ""
        while True:
            now = store.trouble()
            if bool(now) != bool(told):
                say("stopped" if now else "open")
            told = now
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(follow()), asyncio.create_task(look())]
    lease = None
    while all(not task.done() for task in tasks):
        number += 1
        key = f"/k/{chance.randrange(KEYS)}"
        value = f"{number}." * chance.choice((1, 1, 20, 2_000))
        writes: list[Write] = [Put("/last", str(number).encode())]
        gone = chance.random() < 0.2
        writes.append(Delete(key) if gone else Put(key, value.encode()))
        say("begin", number, key, "-" if gone else "+")
        try:
            result = await store.transact([], writes)
            say("done", number, result.revision)
        except OutcomeUnknownError:
            say("unknown", number)
        except UnavailableError:
            say("refused", number)
            await asyncio.sleep(chance.choice((0, 0.02, 0.1)))
        if chance.random() < 0.05:
            try:
                lease = await store.grant(1_000, keep=False)
                await store.transact([], [Put("/bound", b"", lease=lease.id)])
            except FelixError:
                pass
        if chance.random() < 0.1:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.result()


if __name__ == "__main__":
    import logging

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    asyncio.run(write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
