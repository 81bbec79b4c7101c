"""The first seeds of the transport over a network and a kernel that fail. `make simulate WORLD=transport` runs more."""

from __future__ import annotations

from collections import Counter

import pytest
from aioquic.quic.recovery import QuicPacketRecovery
from long_runs import count
from transport.wire_world import StoodStillError, play

from felix.transport.driver_connection import DriverConnection
from felix.transport.port import ENGINE_NAMES

SEEDS = count(4, 200)
PAIRS = [(client, server) for client in ENGINE_NAMES for server in ENGINE_NAMES]


@pytest.mark.parametrize("engines", PAIRS, ids="-to-".join)
def test_what_was_sent_arrives_once_the_faults_have_ended(engines: tuple[str, str]) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        counts += play(seed, engines).counts
    assert counts["sent"] > 100 * SEEDS
    assert counts["lost"] and counts["paused"], "of the kinds of fault, those that every few seeds have"


def _nothing(*_: object, **__: object) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "seed"),
    [
        (DriverConnection, "_drained", 3),
        (QuicPacketRecovery, "on_loss_detection_timeout", 12),
    ],
    ids=["nobody is told that the backlog fell", "no probe is sent"],
)
def test_a_transport_that_forgets_to_go_on_is_found_out(
    owner: type, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, _nothing)
    with pytest.raises(StoodStillError, match="nothing moved for 30 s"):
        play(seed, ("aioquic", "aioquic"))
