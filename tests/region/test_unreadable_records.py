"""What somebody wrote into the metadata store that is no record: it keeps nothing else from being listed, and status names it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from bridge_mesh import until
from region_home import make_region, running
from region_peer import client

from felix.messages import CreateSubscription
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


@pytest.mark.parametrize(
    ("what", "field", "value"),
    [
        ("streams", "created_ms", 1 << 64),
        ("streams", "created_ms", -1),
        ("streams", "incarnation", "x" * 300),
        ("subscriptions", "created_ms", 1 << 64),
        ("subscriptions", "creator", "x" * 300),
        ("subscriptions", "dead_letter_by", "x" * 300),
    ],
)
async def test_a_record_that_no_message_has_room_for_keeps_no_other_from_being_listed(
    tmp_path: Path, what: str, field: str, value: object
) -> None:
    folder = make_region(tmp_path, "us-east")
    async with running(folder) as node, client(folder) as operator:
        for name in ("acme/ops/a", "acme/ops/b"):
            await operator.create_stream(name)
            await operator.connection.request(CreateSubscription(name, "s"))
        store, prefix = node.broker.catalog.store, node.broker.catalog.keys.prefix
        entry = (await store.load(f"{prefix}{what}/acme/ops/a")).entries[0]
        changed = msgspec.json.decode(entry.value) | {field: value}
        await store.transact(
            [],
            [
                Put(
                    entry.key,
                    msgspec.json.encode(changed) if value != 1 << 64 else json.dumps(changed).encode(),
                )
            ],
        )
        mirror = node.services.requests._mirror
        await until(lambda: entry.key in mirror.faults, "it was read")
        assert [each.stream async for each in operator.list_streams()] == ["acme/ops/a", "acme/ops/b"]
        assert len([each async for each in operator.list_subscriptions()]) == 2
        assert any(entry.key in each for each in (await operator.describe()).alarms)
