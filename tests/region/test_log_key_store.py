"""The word in the metadata store that a key of the log has ended: told while no broker is alive, and asked for by brokers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from region_home import make_region

from felix.errors import Code, RequestError
from keys.bundle import RegionBundle, decode_bundle
from keys.key_file import load_signing_key
from keys.signing import SigningKey
from region.cluster.audit_home import AuditHome
from region.cluster.records import ClusterKeys
from region.metadata.catalog import Catalog
from region.metadata.memory import MemoryStore
from region.metadata.transaction import Delete, Put
from region.trust import log_key_store
from region.trust.changed_log_key import ended_word
from region.trust.log_key_store import require_log_key_of_now, require_stopped, tell_ended, told_successor

NEXT = b"n" * 32


class Scene:
    def __init__(self, root: Path) -> None:
        folder = make_region(root, "us-east")
        self.own: RegionBundle = decode_bundle(folder.bundle.read_bytes()).bundle
        self.key = load_signing_key(folder.audit_key)
        self.store = MemoryStore()
        self.catalog = Catalog(self.store, "us-east")

    async def words(self) -> bytes | None:
        entry = await self.store.get(self.catalog.keys.log_keys())
        return None if entry is None else entry.value


async def test_a_word_is_told_once_beside_what_others_have_written(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await require_log_key_of_now(scene.catalog, scene.own)
    await scene.store.transact([], [Put(scene.catalog.keys.log_keys(), b"junk")])
    await require_log_key_of_now(scene.catalog, scene.own)
    for _ in range(2):
        await tell_ended(scene.catalog, scene.own, scene.key, NEXT, 1)
        told = await scene.words()
        assert ended_word(told, scene.own)
    with pytest.raises(RequestError) as refused:
        await require_log_key_of_now(scene.catalog, scene.own)
    assert refused.value.code is Code.CONFIG_INVALID and "secrets/audit.pem" in refused.value.hint
    await tell_ended(scene.catalog, scene.own, scene.key, NEXT, 2)
    assert await scene.words() == told and await told_successor(scene.catalog, scene.own) == NEXT
    # On another machine, with the same folder of before: two bundles would name two keys for what comes.
    with pytest.raises(RequestError, match="names another one than this would make") as refused:
        await tell_ended(scene.catalog, scene.own, scene.key, b"o" * 32, 2)
    assert refused.value.code is Code.CONFLICT and "--begin-anew" in refused.value.hint
    assert await scene.words() == told
    await tell_ended(scene.catalog, scene.own, scene.key, b"o" * 32, 2, anew=True)
    assert await told_successor(scene.catalog, scene.own) == b"o" * 32


async def test_a_word_that_others_write_over_each_time_is_not_taken_for_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, put = Scene(tmp_path), Catalog.put_log_keys

    async def late(self: Catalog, words: bytes, *, revision: int) -> int:
        await self.store.transact([], [Put(self.keys.log_keys(), b"junk")])
        return await put(self, words, revision=revision)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "put_log_keys", late)
        with pytest.raises(RequestError, match="written by others, 3 times") as refused:
            await tell_ended(scene.catalog, scene.own, scene.key, NEXT, 1)
        assert refused.value.code is Code.CONFLICT
    await tell_ended(scene.catalog, scene.own, scene.key, NEXT, 1)
    await tell_ended(scene.catalog, scene.own, SigningKey.generate(), NEXT, 1, anew=True)
    assert ended_word(await scene.words(), scene.own)


async def test_a_log_that_is_on_the_disk_of_one_broker_has_its_keys_changed_there(tmp_path: Path) -> None:
    scene, keys = Scene(tmp_path), ClusterKeys("us-east")
    await scene.store.transact([], [Put(keys.audit_home, AuditHome("b7").encode().encode())])
    with pytest.raises(RequestError, match="on the disk of broker b7 alone"):
        await require_stopped(scene.store, "us-east", 0)
    await scene.store.transact([], [Put(keys.audit_home, AuditHome("", "00" * 16, 3).encode().encode())])
    await require_stopped(scene.store, "us-east", 0)


async def test_brokers_that_are_alive_are_named_and_one_that_was_killed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, keys = Scene(tmp_path), ClusterKeys("us-east")
    monkeypatch.setattr(log_key_store, "LOOK_S", 0.0)
    await require_stopped(scene.store, "us-east", 0)
    for name in ("b2", "b1"):
        await scene.store.transact([], [Put(keys.broker(name), b"")])
    with monkeypatch.context() as patch:
        patch.setattr(log_key_store, "SLACK_S", 0.0)
        with pytest.raises(RequestError, match="are running: b1, b2") as refused:
            await require_stopped(scene.store, "us-east", 0)
        assert refused.value.code is Code.CONFLICT and "felix region down" in refused.value.hint
    waiting = asyncio.ensure_future(require_stopped(scene.store, "us-east", 60_000))
    for name in ("b2", "b1"):
        await asyncio.sleep(0)
        assert not waiting.done()
        await scene.store.transact([], [Delete(keys.broker(name))])
    await waiting
