"""Rounds of faults of a disk with the small files of a broker on it: the embedded metadata store, the key file, or an outside witness.

    python -m disks.play_store FOLDER [--of store|keys|witness] [--rounds N] [--seed S]

A process changes them for as long as it lives (`store_writer`, `key_writer`, `witness_writer`). In each round some calls of it fail, or hang (volatile_disk); then the disk is
well again, and the process has to go on by itself within seconds; or it is killed, at any moment, and in half of those the power goes. What it was told is judged by an
oracle after each round. Exit code 1 where something did not hold. It needs gcc.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from disks.key_oracle import REGION
from disks.key_oracle import Oracle as KeyOracle
from disks.store_oracle import Oracle
from disks.witness_oracle import Oracle as WitnessOracle
from volatile_disk import VolatileDisk

from audit.witness_sqlite import init_witness
from keys.keyring import create_keyring

ROOT: Final = Path(__file__).parents[2]
AGAIN_S: Final = 20.0
"""Within this something is done again, once the disk is well."""
CALLS: Final = (
    "sync",
    "sync",
    "sync",
    "write",
    "write",
    "read",
    "open",
    "remove",
    "truncate",
    "folder",
    "rename",
)
ERRORS: Final = (errno.EIO, errno.EIO, errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EROFS)


Fault = tuple[str, str, int, int, int, int]
"""As `VolatileDisk.fail_each` has it."""


def drawn(chance: random.Random, paths: Sequence[str]) -> list[Fault]:
    """What fails in a round: one call or some, once, a few times, or all of them."""
    found: list[Fault] = []
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        number = chance.choice(ERRORS) if chance.random() < 0.9 else 0
        skip, times = chance.choice((0, 0, 1, 3, 10, 30)), chance.choice((1, 1, 1, 2, 5, 1_000))
        found.append((chance.choice(CALLS), chance.choice(paths), number, skip, times, 0 if number else 1))
    return found


class Judge(Protocol):
    done: int
    starts: int
    number: int

    def take(self, lines: list[str]) -> None: ...


IN_DOUBT: Final[list[Fault]] = [
    ("sync", "metadata.db-wal", errno.EIO, 0, 1, 0),
    ("write", "metadata.db$", errno.EIO, 0, 3, 0),
]
"""A commit fails at its end, and SQLite cannot bring the log into the database as it is closed: so what is in doubt is there when it is opened again."""


class Play:
    """Of one seed: `round` after `round`."""

    program = "disks/store_writer.py"
    paths: tuple[str, ...] = ("-", "-", "metadata.db", "metadata.db-wal", "metadata.db-wal")
    in_doubt: Sequence[Fault] = IN_DOUBT

    def __init__(self, home: Path, seed: int, *, drops: int = 60, forgets: int = 40) -> None:
        """`drops`, `forgets`: see VolatileDisk."""
        self.home = home
        self.prepare()
        self.disk = VolatileDisk(home / "disk", home / "aside", seed, drops=drops, forgets=forgets)
        self.chance = self.disk.random
        self.journal = home / "journal"
        self.out = home / "out"
        self.judge: Judge = self.oracle()
        self.counts: Counter[str] = Counter()
        self._read = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def prepare(self) -> None:
        """What is there before the first start."""

    def oracle(self) -> Judge:
        return Oracle()

    def target(self) -> Path:
        return self.home / "disk" / "metadata.db"

    def start(self) -> None:
        self._starts = self.judge.starts
        with self.out.open("ab") as out:
            self._process = subprocess.Popen(
                [
                    sys.executable, str(ROOT / "tests" / self.program), str(self.target()), str(self.journal),
                    str(self.chance.randrange(1 << 30)), str(self.judge.number),
                ],
                env=os.environ | self.disk.environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=out, stderr=out, cwd=ROOT,
            )  # fmt: skip
        self.counts["started"] += 1

    def look(self) -> None:
        """Take what was told since; raises AssertionError."""
        if not self.journal.exists():
            return
        with self.journal.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self.judge.take(whole.decode().splitlines())

    def until_done(self) -> None:
        """Something is done again."""
        self.look()
        before, limit = self.judge.done, time.monotonic() + AGAIN_S
        while self.judge.done < before + 3:
            assert self._process is not None
            if self._process.poll() is not None:
                self.look()
                assert self.judge.starts == self._starts, f"it ended: {self.out.read_text()[-3_000:]}"
                # A start may fail on a disk that fails.
                assert time.monotonic() < limit, f"it does not start: {self.out.read_text()[-3_000:]}"
                self.counts["starts that failed"] += 1
                self.start()
            assert time.monotonic() < limit, f"it does not go on: {self.out.read_text()[-3_000:]}"
            time.sleep(0.02)
            self.look()

    def drawn(self) -> list[Fault]:
        """What fails now."""
        if self.in_doubt and self.chance.random() < 0.3:
            return list(self.in_doubt)
        return drawn(self.chance, self.paths)

    def round(self) -> None:
        chance = self.chance
        if self._process is None:
            self.start()
            if chance.random() < 0.8:
                self.until_done()
        self.disk.fail_each(self.drawn())
        time.sleep(chance.choice((0.02, 0.1, 0.3, 0.8)))
        if chance.random() < 0.3:
            # Also as it is opened again.
            self.disk.fail_each(self.drawn())
            time.sleep(chance.choice((0.1, 0.3)))
        how = chance.random()
        if how < 0.5:
            self.disk.heal()
            self.until_done()
            self.counts["went on"] += 1
            if how < 0.25:
                return
        self.end()
        self.disk.heal()
        if chance.random() < 0.6:
            self.disk.cut()
            self.counts["power cuts"] += 1

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def end(self) -> None:
        self.kill()
        self.look()

    def finish(self) -> None:
        """Once more, on a disk that is well."""
        self.disk.heal()
        if self._process is None:
            self.start()
        self.until_done()
        self.end()
        self.counts["failed calls"] = len(self.disk.failed())


class KeyPlay(Play):
    program = "disks/key_writer.py"
    paths = ("-", "keys.log", "keys.log", ".new", "/roots/")
    in_doubt = ()

    def prepare(self) -> None:
        create_keyring(self.target(), REGION)

    def oracle(self) -> Judge:
        return KeyOracle()

    def target(self) -> Path:
        return self.home / "disk" / "keys"


class WitnessPlay(Play):
    program = "disks/witness_writer.py"
    paths = ("-", "state.db", "state.db", "state.db-journal", "state.db-journal", "witness.json")
    in_doubt = ()

    def prepare(self) -> None:
        init_witness(self.target(), "witness.example")

    def oracle(self) -> Judge:
        return WitnessOracle()

    def target(self) -> Path:
        return self.home / "disk" / "witness"


PLAYS: Final[dict[str, type[Play]]] = {"store": Play, "keys": KeyPlay, "witness": WitnessPlay}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", choices=tuple(PLAYS), default="store")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    total: Counter[str] = Counter()
    failed = 0
    for seed in range(told.seed, told.seed + told.seeds):
        home = told.folder / f"{told.of}-{seed}"
        play = PLAYS[told.of](home, seed)
        try:
            for _ in range(told.rounds):
                play.round()
            play.finish()
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {error}", flush=True)
            play.kill()
        else:
            shutil.rmtree(home)
        total += play.counts + Counter(
            {name: value for name, value in vars(play.judge).items() if isinstance(value, int)}
        )
        print(seed, dict(play.counts), flush=True)
    print({name: value for name, value in total.items() if not name.startswith("_")}, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
