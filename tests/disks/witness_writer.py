"""An outside witness's state that advances for as long as its process lives, which writes down what it was told: for tests of disks that fail.

    python witness_writer.py FOLDER JOURNAL SEED FIRST

The journal, a line each: `has ORIGIN SIZE` of each log as it starts, then `start`; `begin N ORIGIN SIZE`, then `done N`, `refused N` or `conflict N SIZE` (so many leaves are stored).
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from pathlib import Path

from audit.note import Algorithm, NoteSigner
from audit.witness_sqlite import ConflictError, Held, WitnessState
from felix.errors import UnavailableError
from keys.signing import SigningKey

LOGS = 5


def root_of(size: int) -> bytes:
    return hashlib.sha256(b"%d" % size).digest()


def write(folder: Path, journal: Path, seed: int, number: int) -> None:
    chance = random.Random(seed)
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(*words: object) -> None:
        os.write(out, (" ".join(map(str, words)) + "\n").encode())

    state = WitnessState.open(folder, serve=True)
    held: dict[str, int] = {}
    for log in state.logs():
        held[log.origin] = log.held.size
        say("has", log.origin, log.held.size)
    say("start")
    while True:
        number += 1
        origin = f"log.example/{chance.randrange(LOGS)}"
        try:
            if origin not in held:
                key = NoteSigner.from_key(origin, SigningKey.generate(), Algorithm.ED25519).key
                if state.log(origin) is None:
                    state.add_log(origin, key)
                held[origin] = 0
            size = held[origin] + chance.choice((1, 3, 300))
            say("begin", number, origin, size)
            start = Held(held[origin], root_of(held[origin]) if held[origin] else None)
            state.advance(origin, start, size, root_of(size), b"note")
            held[origin] = size
            say("done", number)
        except ConflictError as error:
            assert error.held.root == root_of(error.held.size)
            held[origin] = error.held.size
            say("conflict", number, error.held.size)
        except UnavailableError:
            say("refused", number)
            time.sleep(0.02)
        if chance.random() < 0.2:
            time.sleep(0.01)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
