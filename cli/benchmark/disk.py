"""What the disk alone takes for one durable write."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from cli.benchmark.figures import Latency

WRITE_BYTES: Final = 512
"""About what one sealed record of 256 bytes takes in the log."""


def measure_sync(folder: Path, count: int = 300) -> Latency:
    """Append and fdatasync, over and over, in a file of `folder`. Raises OSError."""
    path = folder / "sync-probe"
    data = os.urandom(WRITE_BYTES)
    times = []
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    try:
        for _ in range(count):
            begun = time.perf_counter_ns()
            os.write(descriptor, data)
            os.fdatasync(descriptor)
            times.append(time.perf_counter_ns() - begun)
    finally:
        os.close(descriptor)
        path.unlink()
    found = Latency.of(times)
    assert found is not None
    return found
