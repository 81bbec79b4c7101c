"""How long nobody acknowledges when a leader is killed while a member of etcd hangs, beside the same with all members well.

    python -m cluster.play_hanging_member FOLDER [--rounds N] [--lease SECONDS]

Three members of etcd and three brokers are processes of this machine. In every other round one member is stopped (SIGSTOP, its connections stay open),
the one behind that of the round before, so that watches stand there; at once the leader of a stream of three copies is killed. A pause is the time
from there to the next acknowledgement of a record that was sent afterwards. Then all go on, until all copies are in sync.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from cluster.members import Members, serving
from etcd_process import EtcdProcess, running_members
from region_peer import client

import felix

STREAM = "acme/ops/orders"
WAIT_S = 180.0


async def is_well(members: Members) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(AssertionError):
                if await members.is_well(STREAM):
                    return
            await asyncio.sleep(0.2)


async def pause_s(members: Members, publisher: felix.Publisher, hangs: EtcdProcess | None) -> float:
    leader = await members.leader(STREAM)
    await publisher.publish(b"before")
    if hangs is not None:
        hangs.freeze()
    try:
        members.kill(leader)
        killed = time.monotonic()
        async with asyncio.timeout(WAIT_S):
            await publisher.publish(b"after")
        taken = time.monotonic() - killed
    finally:
        if hangs is not None:
            hangs.thaw()
    await members.start(leader)
    await is_well(members)
    return taken


async def play(folder: Path, rounds: int, lease_s: int) -> None:
    taken: dict[bool, list[float]] = {False: [], True: []}
    async with AsyncExitStack() as stack:
        etcd = stack.enter_context(running_members(folder))
        members = await stack.enter_async_context(serving(folder, etcd[0], lease_s=lease_s, others=etcd[1:]))
        region = await stack.enter_async_context(client(members.folder))
        await region.create_stream(STREAM, replicas=3)
        await is_well(members)
        publisher = await stack.enter_async_context(region.stream(STREAM).publisher(deadline_ms=600_000))
        for _, member in zip(range(rounds), itertools.cycle(etcd), strict=False):
            for hangs in (None, member):
                pause = await pause_s(members, publisher, hangs)
                taken[hangs is not None].append(pause)
                print(f"{'one hangs' if hangs else 'all are well'}: {pause:.2f} s", flush=True)
    for does_hang, pauses in taken.items():
        print(
            f"lease {lease_s} s, {'one member hangs' if does_hang else 'all members well'}: median {statistics.median(pauses):.2f} s "
            f"({statistics.median(pauses) / lease_s:.2f} leases), worst {max(pauses):.2f} s ({max(pauses) / lease_s:.2f} leases) of {len(pauses)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lease", type=int, default=5)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(play(given.folder, given.rounds, given.lease))


if __name__ == "__main__":
    main()
