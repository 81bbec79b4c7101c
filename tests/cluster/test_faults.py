"""Three brokers and three members of etcd on machines of their own: killed, stopped, parted in one direction or both, without power, without their
store. What was acknowledged is never lost, never stands twice, and every reader sees one order (cluster.play_faults).

FELIX_FAULT_ROUNDS (`make faults ROUNDS=n`): how many rounds of all kinds of faults; without it two of the worst are played. With it, a region of one
broker for each ten rounds becomes several brokers' (cluster.play_conversion), another one is backed up while it serves, and put back (cluster.play_backup), shards are recovered (cluster.play_given_up) and older stores reconciled
(cluster.play_reconciled) while whoever takes part is killed, clients give up soon and publish again (cluster.play_give_ups), and rebalancings are ended
(cluster.play_stops), beside brokers that are killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster.machines import in_namespaces, why_not
from e2e.command_mesh import ROOT
from etcd_process import etcd_binary

ROUNDS = int(os.environ.get("FELIX_FAULT_ROUNDS", "0"))
SHORT = ("--rounds", "2", "--only", "all_brokers_lose_power", "the_leader_is_alone")


@pytest.mark.etcd
@pytest.mark.fault
@pytest.mark.slow
def test_whatever_fails_nothing_acknowledged_is_lost_and_all_is_served_again(tmp_path: Path) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    if reason := why_not():
        pytest.skip(reason)
    asked = ("--rounds", str(ROUNDS), "--seed", str(time.time_ns())) if ROUNDS else SHORT
    play = [sys.executable, "-m", "cluster.play_faults", str(tmp_path), *asked]
    done = subprocess.run(
        in_namespaces(play),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdout=None if ROUNDS else subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, (done.stdout or b"").decode()[-8_000:]


@pytest.mark.etcd
@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.skipif(not ROUNDS, reason="make faults runs this")
@pytest.mark.parametrize(
    ("play", "on_machines"),
    [
        ("cluster.play_conversion", False),
        ("cluster.play_backup", True),
        ("cluster.play_given_up", False),
        ("cluster.play_reconciled", False),
        ("cluster.play_give_ups", False),
        ("cluster.play_stops", False),
    ],
)
def test_whatever_is_done_to_a_region_nothing_of_before_is_lost(
    tmp_path: Path, play: str, on_machines: bool
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    if on_machines and (reason := why_not()):
        pytest.skip(reason)
    seed = time.time_ns() % 1_000_000_000
    for number in range(seed, seed + max(1, ROUNDS // 10)):
        words = [sys.executable, "-m", play, str(tmp_path / str(number)), "--seed", str(number)]
        (tmp_path / str(number)).mkdir()
        subprocess.run(
            in_namespaces(words) if on_machines else words,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            check=True,
        )
