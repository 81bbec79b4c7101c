"""A broker's process is killed (SIGKILL) while it appends: nothing acknowledged is lost, order is kept."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from log.building import IDENTITY, masked, payloads_of
from long_runs import count

from felix.batch import Batch, decode_batch
from region.log.disk import DiskLog
from region.log.ring import Entry

ROOT = Path(__file__).parents[2]
KILLS = count(10, 24)


def append_until_killed(folder: Path, run: int, acknowledgements: int) -> list[tuple[int, str]]:
    """Start the child, kill it after so many acknowledgements, and give back all that it wrote out whole."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    child = subprocess.Popen(
        [sys.executable, "-m", "log.appending_child", str(folder), str(run)],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line)
        if len(lines) == acknowledgements:
            child.kill()
    child.wait()
    pairs = [line.decode().split() for line in lines if line.endswith(b"\n")]
    return [(int(offset), payload) for offset, payload in pairs]


@pytest.mark.fault
@pytest.mark.slow
def test_sigkill_loses_nothing_acknowledged(tmp_path: Path) -> None:
    chance = random.Random(20)
    acknowledged: dict[int, str] = {}
    for run in range(KILLS):
        for offset, payload in append_until_killed(tmp_path, run, chance.randrange(1, 400)):
            assert offset not in acknowledged
            acknowledged[offset] = payload
        log = DiskLog.open(tmp_path, IDENTITY, now_ms=0, full_verify=run % 6 == 0)[0]
        held = everything(log)
        annotations = log.annotations
        log.close()
        for offset, payload in acknowledged.items():
            assert held[offset] == payload
        by_publisher: dict[str, int] = {}
        for payload in held:
            publisher, sequence = payload.rsplit(".", 1)
            assert int(sequence) == by_publisher.get(publisher, -1) + 1, "in order, without a hole"
            by_publisher[publisher] = int(sequence)
        for slot, annotation in annotations.items():
            last = max(at for at, payload in enumerate(held) if payload.split(".")[1] == str(slot))
            assert annotation.decode() == held[last], "an annotation is as new as its batch"
    assert len(acknowledged) > KILLS


def everything(log: DiskLog) -> list[str]:
    """The payload of every record, by offset."""
    found: list[str] = []
    while batches := log.read(len(found), 1 << 20, log.end_offset):
        for batch in batches:
            plain = masked(Batch(batch.header, decode_batch(batch.data).body))
            (payload,) = payloads_of([Entry(0, 0, 0, plain.encode())])
            found.append(payload[: len(payload) // 20].decode())
    return found
