"""A broker's own certificate holds by the clock that it has now, whichever it had when it was issued."""

from __future__ import annotations

from pathlib import Path

import pytest
from region_home import us_east

from felix.expiry import ExpiryWatch
from felix.transport.port import ServerTls
from keys.authority import RegionAuthority, load_authority
from region.broker_certificate import BrokerCertificate
from region.config import load_config

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
WEEK_MS = 7 * DAY_MS


@pytest.mark.parametrize(
    ("wrong_by_ms", "is_issued_anew"),
    [
        (0, False),
        (60_000, False),
        (HOUR_MS, False),
        (DAY_MS + HOUR_MS, True),
        (300 * DAY_MS, True),
        (-HOUR_MS, False),
        (-WEEK_MS - HOUR_MS, True),
    ],
)
async def test_a_certificate_of_a_wrong_clock_is_replaced_once_the_clock_is_right(
    tmp_path: Path, wrong_by_ms: int, is_issued_anew: bool
) -> None:
    folder = us_east(tmp_path)
    config = load_config(folder.config)

    def load() -> RegionAuthority:
        return load_authority(folder.authority, config.region, config.mesh)

    right_ms = load().lives()["issuing"][0] + 30 * DAY_MS
    now_ms = right_ms + wrong_by_ms
    certificate = BrokerCertificate(config, load, load(), b"", ExpiryWatch(), lambda: now_ms)
    first = certificate.identity
    taken = list[ServerTls]()
    now_ms = right_ms
    await certificate.renew(taken.append)
    assert (certificate.identity is not first, len(taken)) == (is_issued_anew, is_issued_anew)
    held = certificate.identity
    assert held.not_before_ms <= right_ms < held.not_after_ms
    await certificate.renew(taken.append)
    assert certificate.identity is held
