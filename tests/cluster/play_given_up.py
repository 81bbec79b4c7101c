"""A shard is recovered from a copy that lacks what was acknowledged, and whoever takes part is killed meanwhile: the command, brokers, members of etcd.

    python -m cluster.play_given_up FOLDER [--rounds N] [--seed S]

What another copy has is there, once and in order; the command can be repeated; the audit log has one leaf UNCLEAN for each election of which the records say
so; a broker whose copy was given up comes back, and all copies are equal. One publisher goes on through everything, and what it was told stands.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Final

from cluster.audit_load import AuditLoad
from cluster.members import Members, serving
from e2e.command_mesh import command, environment
from etcd_process import EtcdProcess, running_members
from region_peer import client, payloads

from audit.checkpoint import note_size
from audit.leaf import Kind, decode_header
from audit.tile import CHECKPOINT_PATH, read_entries
from audit.tile_disk import Folder
from felix.errors import FelixError

BEFORE: Final = 20
"""Records that all copies have."""
ALONE: Final = 10
"""Records that one copy has, which is given up."""
WAIT_S: Final = 120.0
KILLED: Final = ("command", "winner", "other", "asked", "member", "all members", "nobody")


class Play:
    """One region, and rounds of it."""

    def __init__(self, members: Members, etcd: list[EtcdProcess], seed: int) -> None:
        self.members, self.etcd, self.random = members, etcd, Random(seed)
        self.counts = Counter[str]()
        self.unclean: dict[str, int] = {}
        """by stream, the epoch of which its record says that it may lack something"""

    async def until(self, holds: Callable[[], Awaitable[object]]) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                with suppress(FelixError, AssertionError):
                    if await holds():
                        return
                await asyncio.sleep(0.1)

    async def round(self, number: int) -> None:
        members, random = self.members, self.random
        stream = f"acme/ops/s{number}"
        async with client(members.folder) as region:
            await region.create_stream(stream, replicas=3, min_in_sync=1)
            await self.until(lambda: members.is_well(stream))
            for each in range(BEFORE):
                await region.stream(stream).publish(b"%d" % each)
            lost = await members.leader(stream)
            others = [name for name in members.places if name != lost]
            for name in others:
                members.kill(name)
            for each in range(ALONE):
                await region.stream(stream).publish(b"alone%d" % each)
        members.kill(lost)
        await members.start(*others)
        winner, other = random.sample(others, 2)
        what = random.choice(KILLED)
        self.counts[what] += 1
        words = ["region", "recover-shard", stream, "0", "--from", winner, "--lost", lost, "--accept-loss", "--powered-off", "--region", "us-east"]  # fmt: skip
        said = await self.recovered_beside(what, words, winner, other)
        tries = 1
        while not self.is_done(said, winner):
            tries += 1
            assert tries < 60, said
            await asyncio.sleep(0.5)
            said = await self.run(words)
        self.counts["tries"] += tries
        published = [b"%d" % each for each in range(BEFORE)]
        async with client(members.folder) as region:
            async with region.stream(stream).publisher() as publisher:
                for each in range(10):
                    record = b"after%d" % each
                    assert await publisher.publish(record) == len(published), "what another copy has is there"
                    published.append(record)
            assert await payloads(region, stream, len(published)) == published
            await members.start(lost)
            await self.until(lambda: members.is_well(stream))
            assert await payloads(region, stream, len(published)) == published
            # Each copy leads once.
            for name in random.sample(list(members.places), 3):
                if await members.leader(stream) == name:
                    members.kill(name)
                    await self.until(lambda: self.led(stream))
                    assert await payloads(region, stream, len(published)) == published
                    await members.start(name)
                    await self.until(lambda: members.is_well(stream))
        (record,) = (await members.records())[stream]
        self.unclean[stream] = record.unclean
        await self.until(self.leaves_are_there)
        print(
            f"{number}: killed {what}, {tries} tries, epoch {record.unclean}: {said.strip().splitlines()[-1][:150] if said.strip() else ''}",
            flush=True,
        )

    async def led(self, stream: str) -> bool:
        return await self.members.leader(stream) in self.members.running

    def is_done(self, said: str, winner: str) -> bool:
        return bool(re.search(rf"Broker {winner} leads shard|{winner} leads the shard", said))

    async def recovered_beside(self, what: str, words: list[str], winner: str, other: str) -> str:
        members, random = self.members, self.random
        process = await asyncio.create_subprocess_exec(
            *command(*words), env=environment(members.folder.root.parent), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )  # fmt: skip
        await asyncio.sleep(random.uniform(0.3, 2.5))
        again: list[str] = []
        dead: list[EtcdProcess] = []
        if what == "command":
            with suppress(ProcessLookupError):
                process.kill()
        elif what in ("winner", "other", "asked"):
            name = {"winner": winner, "other": other}.get(what) or random.choice((winner, other))
            members.kill(name)
            again.append(name)
        elif what == "member":
            dead = [random.choice(self.etcd)]
        elif what == "all members":
            dead = list(self.etcd)
        for each in dead:
            each.kill()
        await asyncio.sleep(random.uniform(0, 1))
        for each in dead:
            each.start()
        self.members.ask_at(random.choice(self.etcd))
        for name in again:
            await members.start(name)
        async with asyncio.timeout(WAIT_S):
            out = (await process.communicate())[0].decode()
        self.counts["done at once" if self.is_done(out, winner) else "not done at once"] += 1
        return out

    async def run(self, words: list[str]) -> str:
        done = await asyncio.to_thread(
            subprocess.run,
            command(*words),
            env=environment(self.members.folder.root.parent),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        return done.stdout + done.stderr

    async def leaves_are_there(self) -> bool:
        """One for each election of which a record says so; never two."""
        found = Counter[tuple[str, int]]()
        for name in self.members.places:
            log = Folder(self.members._folders[name].root / "data" / name / "audit")
            here = Counter[tuple[str, int]]()
            size = await asyncio.to_thread(_size, log)
            for _, entry in read_entries(log, 0, size, size):
                header = decode_header(entry)
                if header.kind is Kind.UNCLEAN:
                    here[header.stream, header.source_epoch] += 1
            assert all(count == 1 for count in here.values()), here
            found |= here
        by_stream = Counter(stream for stream, _ in found)
        for stream, epoch in self.unclean.items():
            if not found[stream, epoch]:
                return False
            if by_stream[stream] != 1:
                raise SystemExit(f"{stream} has leaves of several elections: {found}")
        return True


def _size(log: Folder) -> int:
    note = log.read(CHECKPOINT_PATH)
    return 0 if note is None else note_size(note)


async def play(folder: Path, rounds: int, seed: int) -> None:
    with ExitStack() as stack:
        etcd = stack.enter_context(running_members(folder / "etcd"))
        async with serving(folder, etcd[0], lease_s=2, others=etcd[1:]) as members:
            made = Play(members, etcd, seed)
            began = time.monotonic()
            for number in range(rounds):
                await made.round(number)
            audit = AuditLoad(members.folder)
            await audit.check(
                [members._folders[name].root / "data" / name / "audit" for name in members.places]
            )
            print(f"seed {seed} holds: {dict(made.counts)}, {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    (asked.folder / "etcd").mkdir(parents=True)
    asyncio.run(play(asked.folder, asked.rounds, asked.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
