"""A process that makes and destroys keys for as long as it lives, and writes down what it was told: for tests of disks that fail.

    python key_writer.py FOLDER JOURNAL SEED FIRST

Operations are numbered from FIRST on. The journal, a line each: `has ID SECRET STREAM` of each data key that can be used as it starts (a hash of the secret), then `start`; `begin N key STREAM`,
`begin N destroy STREAM` or `begin N rotate`, then `done N ID SECRET`, `done N` or `refused N`; `open` once the file is opened again, and `lost ID` of a key that cannot be used then.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import sys
import time
from pathlib import Path

from disks.key_oracle import REGION

import felix.reopening

felix.reopening.REOPEN_MS_MIN, felix.reopening.REOPEN_MS_MAX = 150, 600

from felix.errors import FelixError, UnavailableError  # noqa: E402
from felix.names import StreamName  # noqa: E402
from felix.runtime.real import REAL  # noqa: E402
from keys import reopening  # noqa: E402
from keys.errors import KeyDestroyedError  # noqa: E402
from keys.keyring import KeyState, open_keyring  # noqa: E402
from keys.reopening import KeyFileReopening  # noqa: E402

reopening.SOUND_ALONE_MS = 500


def write(folder: Path, journal: Path, seed: int, number: int) -> None:
    chance = random.Random(seed)
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(*words: object) -> None:
        os.write(out, (" ".join(map(str, words)) + "\n").encode())

    keyring = open_keyring(folder, REGION)
    again = KeyFileReopening(keyring, REAL.clock)

    def secret(number: bytes) -> str:
        return hashlib.sha256(keyring.data_key(number).secret).hexdigest()[:16]

    def used(number: bytes) -> str:
        """Also where a root key cannot be read for a moment."""
        while True:
            try:
                return secret(number)
            except UnavailableError:
                time.sleep(0.02)

    held: dict[bytes, str] = {}
    for each in keyring.list():
        if each.level == "data" and each.state is not KeyState.DESTROYED:
            held[each.key_id] = used(each.key_id)
            say("has", each.key_id.hex(), held[each.key_id], each.stream.rpartition("/")[2])
    say("start")
    opened = 0
    while True:
        if again.is_due():
            again.open()
        if again.opened > opened:
            opened = again.opened
            say("open")
            for key_id, known in list(held.items()):
                keyring._data_keys.pop(key_id)
                try:
                    if used(key_id) != known:
                        say("lost", key_id.hex())
                except KeyDestroyedError:
                    held.pop(key_id)
                except FelixError:
                    say("lost", key_id.hex())
        number += 1
        place = chance.randrange(30)
        stream, incarnation = StreamName.parse(f"acme/ops/s{place}"), bytes(15) + bytes([place])
        if chance.random() < 0.03:
            # One that is destroyed never has a key again.
            stream, incarnation = StreamName.parse(f"acme/ops/d{number}"), number.to_bytes(16, "big")
        how = chance.random()
        try:
            if how < 0.02:
                doomed = sorted(
                    {each.stream for each in keyring.list() if each.stream.startswith("acme/ops/d")}
                )
                if not doomed:
                    continue
                name = doomed[chance.randrange(len(doomed))]
                say("begin", number, "destroy", name.rpartition("/")[2])
                keyring.destroy(StreamName.parse(name))
                say("done", number)
            elif how < 0.04:
                say("begin", number, "rotate")
                keyring.rotate_root()
                say("done", number)
            else:
                say("begin", number, "key", str(stream).rpartition("/")[2])
                key = keyring.data_key_for_writing(stream, incarnation, 0, 1)
                held[key.key_id] = hashlib.sha256(key.secret).hexdigest()[:16]
                say("done", number, key.key_id.hex(), held[key.key_id])
        except UnavailableError:
            say("refused", number)
            time.sleep(0.02)
        if chance.random() < 0.2:
            time.sleep(0.01)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
