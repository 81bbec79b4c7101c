"""The yardstick measures: small, but all of it, in its own processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.benchmark.raw_quic import measure_echo, measure_relay, measure_sync
from felix.errors import UnavailableError
from felix.transport.port import ENGINE_NAMES


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_a_relay_and_an_echo_are_measured(engine: str, tmp_path: Path) -> None:
    relay = measure_relay(engine, 5000, 1_000_000, warm_bytes=100_000)
    assert relay.total_bytes >= 1_000_000
    assert relay.bytes_per_second > 0
    echo = measure_echo(engine, count=50)
    assert 0 < echo.p50_us <= echo.p99_us
    synced = measure_echo(engine, count=50, synced_in=tmp_path)
    assert 0 < synced.p50_us <= synced.p99_us
    assert measure_sync(tmp_path, count=50).p50_us > 0


def test_a_measurement_that_takes_too_long_ends() -> None:
    with pytest.raises(UnavailableError, match="did not finish"):
        measure_echo("qh3", timeout_s=0.05)
