"""What somebody wrote into the metadata store that is no record: it keeps nothing else from being listed, and status names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridge_mesh import until
from region_home import make_region, running
from region_peer import client

from region.metadata.transaction import Put

JUNK = {
    "quotas/" + "x" * 300: b"{}",
    "quotas/us-east.acme/nobody": b"{}",
    "quotas/acme": b"junk",
    "rights/x": b"{}",
    "rights/us-east.acme/operator/thief": b"junk",
}


@pytest.mark.parametrize("more", [0, 500])
async def test_junk_beside_records_keeps_nothing_from_being_told(tmp_path: Path, more: int) -> None:
    folder = make_region(tmp_path, "us-east")
    async with running(folder) as node, client(folder) as operator:
        rights, quotas = await operator.list_rights(), await operator.list_quotas()
        catalog = node.broker.catalog
        junk = JUNK | {f"rights/{number}": b"{" for number in range(more)}
        writes = [Put(catalog.keys.prefix + name, data) for name, data in junk.items()]
        for at in range(0, len(writes), 100):
            await catalog.store.transact([], writes[at : at + 100])
        mirror = node.services.requests._mirror
        await until(lambda: len(mirror.faults) == len(junk), "all of it was read")
        assert await operator.list_rights() == rights
        assert [each.name for each in await operator.list_quotas()] == [each.name for each in quotas]
        alarms = (await operator.describe()).alarms
        assert sum("cannot be read" in each for each in alarms) >= min(len(junk), 5)
        if len(junk) > 5:
            assert any(f"{len(junk) - 5:,} more keys" in each for each in alarms)
