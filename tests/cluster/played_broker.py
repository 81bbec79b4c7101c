"""`felix` as plays run it, on a machine that misbehaves when it is told to: a sync fails (cluster.failing_syncs), the clock is wrong, certificates are short.

The clock is the one that people have (`time.time_ns`); what runs since the machine's start goes on.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

from cluster.failing_syncs import TOLD_BY, Syncs, install

import keys.authority
import region.node
from cli.main import main

AHEAD_BY: Final = "TESTS_CLOCK_AHEAD"
"""A file with milliseconds by which this machine's clock is ahead (`set_clock`)."""
BROKER_LIFE_S: Final = "TESTS_BROKER_LIFE_S"
"""How long a broker's certificate holds; without it as ever."""
RENEW_CHECK_S: Final = 1.0
_MS: Final = struct.Struct("<q")


def set_clock(file: Path, ahead_ms: int) -> None:
    """By so much is the clock of whoever is told by this file ahead from now on."""
    with file.open("r+b" if file.exists() else "w+b") as opened:
        opened.write(_MS.pack(ahead_ms))


def shift_clock(file: Path) -> None:
    """This process goes by it from now on."""
    if not file.exists():
        set_clock(file, 0)
    with file.open("rb") as opened:
        told = mmap.mmap(opened.fileno(), _MS.size, access=mmap.ACCESS_READ)
    real = time.time_ns
    time.time_ns = lambda: real() + _MS.unpack_from(told)[0] * 1_000_000
    time.time = lambda: time.time_ns() / 1e9


if __name__ == "__main__":
    install(Syncs(Path(os.environ[TOLD_BY])))
    shift_clock(Path(os.environ[AHEAD_BY]))
    region.node.RENEW_CHECK_S = RENEW_CHECK_S  # type: ignore[misc]
    if life_s := os.environ.get(BROKER_LIFE_S):
        keys.authority.IDENTITY_LIFETIME["broker"] = timedelta(seconds=float(life_s))
    main()
