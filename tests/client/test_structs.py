"""Structs that several threads decode for the first time at once, in a process of its own: what goes wrong there ends it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest

from audit.witness_server import WitnessServer
from bridge.agent import Agent
from region.node import Node

RACE = """
import msgspec, sys, threading
from felix.structs import prepare_structs
sys.setswitchinterval(1e-6)
for _ in range(100):
    inner = msgspec.defstruct("Inner", [(f"f{at}", "int") for at in range(8)])
    outer = msgspec.defstruct("Outer", [("inner", inner), *((f"g{at}", "int | None") for at in range(8))])
    data = msgspec.json.encode({"inner": {f"f{at}": at for at in range(8)}, **{f"g{at}": at for at in range(8)}})
    prepare_structs()
    together = threading.Barrier(4)
    def decode():
        together.wait()
        assert msgspec.json.decode(data, type=outer).g7 == 7
    threads = [threading.Thread(target=decode) for _ in range(4)]
    for each in threads: each.start()
    for each in threads: each.join()
    del inner, outer
print("decoded")
"""


def test_threads_that_decode_a_struct_first_at_once_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "decoded\n"), done.stderr


@pytest.mark.parametrize("start", [Node.start, Agent.start, WitnessServer.start])
async def test_brokers_agents_and_witnesses_prepare_before_they_do_anything_else(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PreparedError(Exception):
        pass

    def prepared() -> None:
        raise PreparedError

    monkeypatch.setattr(f"{start.__module__}.prepare_structs", prepared)
    with pytest.raises(PreparedError):
        await start(*(Mock() for _ in range(1 if start is WitnessServer.start else 2)))
