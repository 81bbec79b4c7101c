"""Listings come in pages, and the SDK reads them to the end."""

from pathlib import Path

import pytest
from region_home import make_region, running

import felix
from felix.messages import KeyPage, ListKeys


async def test_keys_come_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with running(make_region(tmp_path, "us-east")), felix.connect("us-east") as client:
        await client.create_stream("acme/ops/rotated")
        stream = client.stream("acme/ops/rotated")
        for number in range(7):
            await stream.publish(str(number).encode())
            await client.rotate_keys("data")
        whole = await client.list_keys()
        assert len(whole) == 1 + 1 + 7  # root, stream, data
        paged: list[bytes] = []
        while True:
            page = await client.request(ListKeys("", len(paged), 2))
            assert isinstance(page, KeyPage)
            assert len(page.keys) <= 2
            paged += [key.id for key in page.keys]
            if not page.more:
                break
        assert paged == [key.id for key in whole]
