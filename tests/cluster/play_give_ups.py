"""Publishers, transactions and the command give up soon, and publish again, while brokers are killed and stand still.

    python -m cluster.play_give_ups FOLDER [--rounds N] [--seed S]

An id that is published until it is acknowledged is in the log once, at the offset that each answer names. Of a transaction, whose staging and commits are given up and asked for
again, both streams have all or nothing; an id that one transaction after the other publishes, until one is known to be committed, is there once. Of what the synchronous publisher was given, all is in the log, or was said to be refused.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

from cluster.members import Members, serving
from cluster.played import play_as_asked
from e2e.command_mesh import command, environment
from etcd_process import running_etcd
from region_peer import client

import felix
import felix.sync
from felix.errors import Code, FelixError, RequestError, UnavailableError

IDS, LEFT, RIGHT, PLAIN, LINES, WORK = (
    f"acme/ops/{name}" for name in ("ids", "left", "right", "plain", "lines", "work")
)
STREAMS: Final = (IDS, LEFT, RIGHT, PLAIN, LINES, WORK)
WAIT_S: Final = 120.0
LINE_COUNT: Final = 30_000
PART: Final = b"x" * 150_000
"""Of a record of a transaction: some of them are staged before the commit."""


class Play:
    def __init__(self, members: Members, home: Path, seed: int) -> None:
        self.members, self.home, self.random = members, home, Random(seed)
        self.counts = Counter[str]()
        self.is_over = False
        self.told: dict[str, set[int]] = {}
        self.committed: set[int] = set()
        self.aborted: set[int] = set()
        self.given = 0
        self.refused: list[bytes] = []
        self.number = self.worked = 0

    # -- the clients ---------------------------------------------------------------------------------------

    async def identified(self, name: str) -> None:
        """Each id until it is acknowledged, by publishers that give up soon; some of them twice although they are."""
        number = 0
        while not self.is_over:
            async with client(self.members.folder) as region:
                with suppress(FelixError):
                    async with region.stream(IDS).publisher(
                        deadline_ms=self.random.randrange(200, 1_500)
                    ) as publisher:
                        until = time.monotonic() + self.random.uniform(1, 5)
                        while time.monotonic() < until and not self.is_over:
                            ids = [f"{name}:{number + each}" for each in range(20)]
                            number += 20
                            await asyncio.gather(
                                *(self.one_id(publisher, each) for each in ids), return_exceptions=True
                            )
            for each in [f"{name}:{each}" for each in range(number) if f"{name}:{each}" not in self.told]:
                # By another producer, or process.
                async with client(self.members.folder) as region:
                    while True:
                        try:
                            at = await region.stream(IDS).publish(each.encode(), message_id=each)
                        except FelixError:
                            self.counts["ids: by another one again"] += 1
                            continue
                        self.told.setdefault(each, set()).add(at)
                        break

    async def one_id(self, publisher: felix.Publisher, name: str) -> None:
        for _ in range(3):
            try:
                at = await publisher.publish(name.encode(), message_id=name)
            except UnavailableError as error:
                self.counts[f"ids {error.code.name}"] += 1
                continue
            self.told.setdefault(name, set()).add(at)
            if self.random.random() < 0.8:
                return

    async def transacted(self) -> None:
        async with client(self.members.folder, request_timeout_s=1.0) as region:
            while not self.is_over:
                self.number += 1
                await self.one_transaction(region, self.number)

    async def one_transaction(self, region: felix.RegionClient, number: int) -> None:
        transaction = region.transaction(timeout_s=30)

        async def again(work: Callable[[], Awaitable[Any]], what: str) -> None:
            while True:
                try:
                    await work()
                    return
                except UnavailableError as error:
                    self.counts[f"{what} {error.code.name}"] += 1

        try:
            await again(transaction.begin, "begin")
            for stream in (LEFT, RIGHT):
                for part in range(5):
                    payload = b"%d:%d:" % (number, part) + PART
                    await again(lambda s=stream, p=payload: transaction.publish(s, p), "staged")  # type: ignore[misc]
            work = f"work{self.worked}"
            await again(lambda: transaction.publish(WORK, work.encode(), message_id=work), "staged")
            if self.random.random() < 0.4:
                with suppress(UnavailableError):
                    await transaction.commit()
                    self.committed.add(number)
                    self.worked += 1
                # Else what became of it is not known, and nobody asks: the next transaction has the same id.
                return
            await again(transaction.commit, "commit")
            self.committed.add(number)
            self.worked += 1
            self.counts["committed"] += 1
        except RequestError as error:
            self.counts[f"transaction {error.code.name}"] += 1
            if error.code in (Code.TRANSACTION_ABORTED, Code.TRANSACTION_FENCED):
                self.aborted.add(number)

    def synchronous(self) -> None:
        """In a thread of its own."""
        profile = felix.load_profile("us-east", home=self.members.folder.root.parent)
        with felix.sync.connect(profile=profile) as region:
            while not self.is_over:
                linger = self.random.choice((0, 1, 20))
                publisher = region.stream(PLAIN).publisher(
                    batch_records=self.random.randrange(1, 50),
                    linger_ms=linger,
                    deadline_ms=self.random.randrange(300, 2_000),
                    on_refused=lambda refusal: self.refused.extend(
                        bytes(record.payload) for record in refusal.records()
                    ),
                )
                until = time.monotonic() + 10
                while time.monotonic() < until and not self.is_over:
                    payload = b"%d" % self.given
                    try:
                        publisher.send(payload)
                        self.given += 1
                    except FelixError as error:
                        self.counts[f"sync {error.code.name}"] += 1
                    if self.random.random() < 0.003:
                        try:
                            publisher.flush()
                        except FelixError as error:
                            self.counts[f"sync flush {error.code.name}"] += 1
                    time.sleep(0.002)
                try:
                    publisher.close()
                except FelixError as error:
                    self.counts[f"sync close {error.code.name}"] += 1

    async def published_lines(self) -> None:
        """The command, ended by signals and killed; gone on with as it says, or from the last line that is known."""
        count, begin = LINE_COUNT, 1
        file = self.home / "lines.jsonl"
        file.write_text("".join(json.dumps({"id": f"l{each}"}) + "\n" for each in range(1, count + 1)))
        words = ["stream", "publish", LINES, "--file", str(file), "--message-id", "id", "--region", "us-east", "--json", "--linger", "1ms"]  # fmt: skip
        while True:
            process = await asyncio.create_subprocess_exec(
                *command(*words, "--from-line", str(begin)),
                env=environment(self.members.folder.root.parent),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            said = asyncio.ensure_future(process.communicate())
            await asyncio.wait([said], timeout=self.random.uniform(0.8, 3.0))
            if not said.done():
                process.send_signal(self.random.choice((signal.SIGINT, signal.SIGKILL)))
                await asyncio.wait([said], timeout=self.random.uniform(0, 2))
            if not said.done():
                process.send_signal(signal.SIGINT)
            out = (await said)[0].decode()
            self.counts[f"lines: exit {process.returncode}"] += 1
            if found := re.search(r'"next_line": (\d+)', out):
                begin = int(found[1])
            if process.returncode == 0:
                assert begin == count + 1, out
                return
            if self.is_over and begin > count:
                return

    # -- what happens --------------------------------------------------------------------------------------

    async def round(self, number: int) -> None:
        members, random = self.members, self.random
        what = random.choice(("kill leader", "kill leader", "freeze leader", "freeze all", "kill any"))
        self.counts[what] += 1
        stream = random.choice([IDS, LEFT, PLAIN, "felix/system/transactions"])
        name = await members.leader(stream) or random.choice(list(members.running))
        if what == "kill any":
            name = random.choice(list(members.running))
        if what.startswith("kill"):
            members.kill(name)
            await asyncio.sleep(random.uniform(0, 3))
            await members.start(name)
        else:
            frozen = list(members.running) if what == "freeze all" else [name]
            for each in frozen:
                members.freeze(each)
            await asyncio.sleep(random.uniform(0.5, 3.5))
            for each in frozen:
                members.thaw(each)
        await asyncio.sleep(random.uniform(0, 2))
        print(f"  {number}: {what} {name}, {dict(self.counts)}", flush=True)

    # -- the judgement -------------------------------------------------------------------------------------

    async def stored(self, region: felix.RegionClient, stream: str) -> list[bytes]:
        end = (await region.describe_stream(stream)).state[0].high_watermark
        found: list[bytes] = []
        async with asyncio.timeout(WAIT_S), region.stream(stream).subscribe("earliest") as records:
            while len(found) < end:
                found.append(bytes((await anext(records)).payload))
        return found

    async def check(self) -> None:
        async with client(self.members.folder) as region:
            ids = await self.stored(region, IDS)
            twice = [each for each, times in Counter(ids).items() if times > 1]
            assert not twice, f"ids that are there twice: {twice[:5]}"
            at = {each.decode(): offset for offset, each in enumerate(ids)}
            wrong = {name: (told, at.get(name)) for name, told in self.told.items() if told != {at.get(name)}}
            assert not wrong, f"ids that are not where the answer said: {list(wrong.items())[:5]}"
            parts: dict[str, Counter[int]] = {}
            for stream in (LEFT, RIGHT):
                found = [payload.split(b":", 2)[:2] for payload in await self.stored(region, stream)]
                assert len({tuple(each) for each in found}) == len(found), f"parts twice in {stream}"
                parts[stream] = Counter(int(each[0]) for each in found)
            assert parts[LEFT] == parts[RIGHT], "a part of a transaction"
            assert set(parts[LEFT].values()) <= {5}, parts[LEFT]
            assert self.committed <= parts[LEFT].keys(), self.committed - parts[LEFT].keys()
            assert not self.aborted & parts[LEFT].keys(), self.aborted & parts[LEFT].keys()
            work = Counter(await self.stored(region, WORK))
            assert set(work.values()) <= {1}, work.most_common(3)
            assert {b"work%d" % each for each in range(self.worked)} <= work.keys()
            plain = Counter(await self.stored(region, PLAIN))
            refused = set(self.refused)
            lost = [n for n in range(self.given) if b"%d" % n not in plain and b"%d" % n not in refused]
            assert not lost, f"given, not refused, and not there: {lost[:10]} of {len(lost)}"
            doubled = [each for each, times in plain.items() if times > 1]
            assert not doubled, f"of the synchronous publisher, there twice: {doubled[:5]}"
            lines = Counter(await self.stored(region, LINES))
            assert set(lines.values()) == {1} and len(lines) == LINE_COUNT, lines.most_common(3)
            print(
                f"  {len(ids)} ids, {len(self.committed)} committed, {len(self.aborted)} aborted, {len(parts[LEFT])} there, {self.given} given, {len(refused)} refused, "
                f"{len(plain)} there, {len(lines)} lines",
                flush=True,
            )


async def play(folder: Path, rounds: int, seed: int) -> None:
    (folder / "etcd").mkdir(parents=True)
    with running_etcd(folder / "etcd") as etcd:
        async with serving(folder, etcd, lease_s=2) as members:
            made = Play(members, folder, seed)
            async with client(members.folder) as region:
                views = felix.Views(deduplication=felix.Deduplication(window_ms=3_600_000, ids_max=1_000_000))
                for stream in STREAMS:
                    given = {"views": views} if stream in (IDS, LINES, WORK) else {}
                    await region.create_stream(stream, replicas=3, **given)  # type: ignore[arg-type]
            tasks = [asyncio.ensure_future(made.identified(f"p{each}")) for each in range(2)]
            tasks += [asyncio.ensure_future(made.transacted()), asyncio.ensure_future(made.published_lines())]
            tasks.append(asyncio.ensure_future(asyncio.to_thread(made.synchronous)))
            for number in range(rounds):
                await made.round(number)
                for task in tasks:
                    if task.done():
                        task.result()
            made.is_over = True
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*tasks)
                await made.check()
            print(f"seed {seed} holds: {dict(made.counts)}", flush=True)


if __name__ == "__main__":
    sys.exit(play_as_asked(play, __doc__, rounds=8))
