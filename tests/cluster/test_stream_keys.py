"""Stream keys that the brokers of a region share: over SQLite and etcd, each broker with a folder and a copy of the region's root key."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Literal, cast

import msgspec
import pytest
from etcd_process import EtcdProcess, etcd
from long_runs import count
from msgspec.structs import replace
from region_peer import until

from felix.batch import Batch, NewRecord, encode_batch
from felix.errors import Code, CorruptionError, FelixError, RequestError, TamperError, UnavailableError
from felix.names import StreamName
from felix.runtime.real import REAL
from keys.errors import KeyProviderError
from keys.file_provider import FileKeyProvider
from keys.hierarchy import KeyState
from keys.key_id import RANDOM_BYTES, KeyKind, kind_of, new_key_id
from keys.keyring import ROOTS, create_keyring, open_keyring
from keys.shared import SharedKeyring, find_first_root, open_copies
from keys.store import KEY_FILE
from keys.stream_key import ROOTS_MAX, Root, Roots, StreamKey, decode_roots, decode_stream_key
from region.cluster import key_rotation, stream_keys
from region.cluster.key_rotation import KeyRotation
from region.cluster.stream_keys import StreamKeys
from region.metadata.catalog import Catalog
from region.metadata.embedded import EmbeddedStore
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.memory import MemoryStore
from region.metadata.port import MetadataStore, OutcomeUnknownError
from region.metadata.records import DeletedStream, DestroyedKey, StreamConfig, encode
from region.metadata.transaction import Compare, Delete, Entry, Event, Put, TransactResult, Write
from region.streams.erasure import Erasure, SharedDestruction
from region.streams.sealing import KeyringSeal

__all__ = ["etcd"]  # the fixture, by its name

ORDERS = StreamName.parse("acme/payments/orders")
CARDS = StreamName.parse("acme/payments/cards")
LIFE, OTHER_LIFE = b"i" * 16, b"j" * 16


class Brokers:
    """Brokers of one region. Each has a folder of its own, and the region's keys as they were copied to its machine."""

    def __init__(self, store: MetadataStore, home: Path) -> None:
        self.store = store
        self.home = home
        self.region = f"r{uuid.uuid4().hex[:12]}"
        self.catalog = Catalog(store, self.region)
        self.running: dict[str, StreamKeys] = {}
        self.rotations: dict[str, KeyRotation] = {}
        self.registered: set[str] = set()
        create_keyring(home / "first", self.region)

    def folder(self, name: str) -> Path:
        return self.home / name / "data"

    def root_folder(self, name: str) -> Path:
        copied = self.home / name / "region"
        if not copied.exists():
            shutil.copytree(self.home / "first", copied)
        return copied

    async def start(self, *names: str) -> StreamKeys:
        """Start these; the last of them."""
        for name in names:
            folder, roots = self.folder(name), self.root_folder(name)
            provider = FileKeyProvider(roots / ROOTS, self.region)
            own = open_keyring(folder, self.region) if (folder / KEY_FILE).exists() else None
            keys = StreamKeys(
                self.store,
                SharedKeyring(self.region, provider, own, former=roots),
                open_copies(folder, self.region),
                lambda roots=roots, provider=provider: find_first_root(roots, self.region, provider),  # type: ignore[misc]
                name,
                REAL,
            )
            rotation = KeyRotation(self.store, keys, name, self.addresses, REAL)
            try:
                await keys.open()
            except BaseException:
                await keys.close()
                raise
            await rotation.start()
            self.running[name], self.rotations[name] = keys, rotation
            self.registered.add(name)
        return keys

    async def stop(self, *names: str) -> None:
        """Stop these; all where none is named."""
        for name in names or tuple(self.running):
            await self.rotations.pop(name).close()
            await self.running.pop(name).close()

    def addresses(self) -> dict[str, str]:
        return {name: "127.0.0.1:7443" if name in self.running else "" for name in self.registered}

    def bring_roots(self, source: str, *names: str) -> None:
        """Copy root keys from one broker's machine to others'."""
        for path in (self.root_folder(source) / ROOTS).glob("*.key"):
            for name in names:
                shutil.copy2(path, self.root_folder(name) / ROOTS / path.name)

    async def create(self, name: StreamName, incarnation: bytes) -> None:
        await self.catalog.create_stream(name, StreamConfig(), incarnation=incarnation, created_ms=1)

    def key(self, incarnation: bytes = LIFE) -> str:
        return self.catalog.keys.stream_key(incarnation.hex())

    async def record(self, incarnation: bytes = LIFE) -> bytes | None:
        entry = await self.store.get(self.key(incarnation))
        return None if entry is None else entry.value

    async def put(self, key: str, value: bytes) -> None:
        await self.store.transact([], [Put(key, value)])

    def knows(self, name: str, incarnation: bytes = LIFE) -> StreamKey | None:
        return self.running[name].keyring.find(incarnation)

    def copies(self, name: str) -> bytes:
        return (self.folder(name) / "shared" / KEY_FILE).read_bytes()


@pytest.fixture(params=["embedded", pytest.param("etcd", marks=pytest.mark.etcd)])
async def brokers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Brokers]:
    store: MetadataStore
    if request.param == "etcd":
        process: EtcdProcess = request.getfixturevalue("etcd")
        store = await EtcdStore.open(EtcdConfig((process.endpoint,)))
    else:
        store = await EmbeddedStore.open(tmp_path / "metadata.db")
    made = Brokers(store, tmp_path)
    try:
        yield made
    finally:
        await made.stop()
        await store.close()


def batch(payload: bytes, *, offset: int = 0, shard: int = 0, epoch: int = 1) -> Batch:
    made = encode_batch([NewRecord(payload)], shard=shard)
    return made.with_header(replace(made.header, base_offset=offset, leader_epoch=epoch))


def seal_of(keys: StreamKeys, shard: int = 0, name: StreamName = ORDERS, life: bytes = LIFE) -> KeyringSeal:
    return KeyringSeal(keys.keyring, name, life, shard)


async def test_a_damaged_key_file_of_before_keeps_no_broker_from_starting(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    keys = await brokers.start("a")
    await keys.ensure(ORDERS, LIFE)
    sealed = seal_of(keys).seal(batch(b"x"))
    await brokers.stop()
    path = brokers.root_folder("a") / KEY_FILE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    keys = await brokers.start("a")
    assert seal_of(keys).open_batch(sealed) == batch(b"x")
    assert "which is of before its brokers shared keys, cannot be read" in caplog.text


async def test_what_one_broker_seals_every_other_opens_also_after_all_were_started_again(
    brokers: Brokers,
) -> None:
    await brokers.start("a", "b", "c")
    for name in "abc":
        await brokers.running[name].ensure(ORDERS, LIFE)
    sealed = [
        (shard, seal_of(brokers.running[name], shard).seal(batch(b"x", shard=shard, epoch=epoch)))
        for epoch, name in enumerate("abca", 1)
        for shard in range(3)
    ]
    assert {kind_of(one.header.key_id) for _, one in sealed} == {KeyKind.DERIVED}
    assert len({one.header.key_id for _, one in sealed}) == len(sealed)
    for is_again in (False, True):
        if is_again:
            await brokers.stop()
            await brokers.start("c", "a", "b")
        for name in "abc":
            for shard, one in sealed:
                opened = seal_of(brokers.running[name], shard).open_batch(one)
                assert opened == batch(b"x", shard=shard, epoch=one.header.leader_epoch)


async def test_each_log_and_each_start_draws_a_key_of_its_own(brokers: Brokers) -> None:
    keys = await brokers.start("a")
    await keys.ensure(ORDERS, LIFE)
    sealed = [seal.seal(batch(b"x")) for seal in (seal_of(keys), seal_of(keys)) for _ in range(2)]
    first = seal_of(keys)
    sealed.append(first.seal(batch(b"x")))
    keys.keyring.rotate_data()
    sealed.append(first.seal(batch(b"x")))
    await brokers.stop()
    sealed.append(seal_of_started(await brokers.start("a")).seal(batch(b"x")))
    assert len({one.header.key_id for one in sealed}) == 5
    nonces = {(one.header.key_id, bytes(one.body[:8])) for one in sealed}
    assert len(nonces) == len(sealed)


def seal_of_started(keys: StreamKeys) -> KeyringSeal:
    # Known from the copy, before the stream is opened.
    assert keys.keyring.find(LIFE) is not None
    return seal_of(keys)


async def test_of_many_first_keys_one_is_the_streams_and_no_other_seals(brokers: Brokers) -> None:
    await brokers.start("a", "b", "c")
    names = [(StreamName.parse(f"acme/ops/s{number}"), bytes([number]) * 16) for number in range(8)]
    await asyncio.gather(
        *(keys.ensure(name, life) for name, life in names for keys in brokers.running.values())
    )
    for name, life in names:
        known = {brokers.knows(broker, life) for broker in "abc"}
        assert len(known) == 1 and None not in known
        sealed = seal_of(brokers.running["b"], name=name, life=life).seal(batch(b"x"))
        assert seal_of(brokers.running["c"], name=name, life=life).open_batch(sealed) == batch(b"x")


async def test_no_plain_key_stands_in_the_store_or_in_a_copy(brokers: Brokers) -> None:
    keys = await brokers.start("a")
    await keys.ensure(ORDERS, LIFE)
    known = brokers.knows("a")
    assert known is not None
    secret = known.secret(brokers.region, keys.keyring.provider)
    entries = (await brokers.store.load(f"/felix/1/{brokers.region}/")).entries
    for data in (*(entry.value for entry in entries), brokers.copies("a")):
        for written in (secret, secret.hex().encode()):
            assert written not in data


async def test_a_deleted_streams_key_is_gone_from_the_store_and_from_every_broker_also_one_that_was_down(
    brokers: Brokers,
) -> None:
    await brokers.start("a", "b", "c")
    for name, life in ((ORDERS, LIFE), (CARDS, OTHER_LIFE)):
        await brokers.create(name, life)
        for keys in brokers.running.values():
            await keys.ensure(name, life)
    sealed = seal_of(brokers.running["a"]).seal(batch(b"x"))
    known = brokers.knows("a")
    assert known is not None
    await brokers.stop("c")
    await brokers.catalog.delete_stream(ORDERS, deleted_ms=2)
    assert await brokers.record() is None and await brokers.record(OTHER_LIFE) is not None
    await until(lambda: not any(brokers.knows(name) for name in "ab"))
    assert known.key.encode() in brokers.copies("c")
    await brokers.start("c")
    await until(lambda: not any(known.key.encode() in brokers.copies(name) for name in "abc"))
    for name in "abc":
        assert brokers.knows(name, OTHER_LIFE)
        with pytest.raises(RequestError, match="deleted"):
            seal_of(brokers.running[name]).open_batch(sealed)
        with pytest.raises(RequestError, match="was deleted") as refused:
            await brokers.running[name].ensure(ORDERS, LIFE)
        assert refused.value.code is Code.NOT_FOUND
    assert await brokers.record() is None


async def test_a_deleted_streams_key_that_is_put_back_is_not_used_and_is_removed(brokers: Brokers) -> None:
    await brokers.start("a", "b")
    await brokers.create(ORDERS, LIFE)
    for keys in brokers.running.values():
        await keys.ensure(ORDERS, LIFE)
    kept = await brokers.record()
    assert kept is not None
    await brokers.stop("b")
    mark = await brokers.catalog.delete_stream(ORDERS, deleted_ms=2)
    await until(lambda: not brokers.knows("a"))
    # One that runs hears of it again; one that was down finds the store as its copy has it, and never hears of the deletion.
    await brokers.put(brokers.key(), kept)
    await brokers.start("b")
    assert not brokers.knows("b") and mark.key.encode() not in brokers.copies("b")
    async with asyncio.timeout(30):
        while await brokers.record() is not None:  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0.001)
    # Where the mark was taken away as well, who carried the deletion out knows it still.
    await brokers.store.transact(
        [], [Delete(brokers.catalog.keys.deleted(LIFE.hex())), Put(brokers.key(), kept)]
    )
    with pytest.raises(RequestError, match="was deleted"):
        await brokers.running["a"].ensure(ORDERS, LIFE)
    assert not brokers.knows("a") and mark.key.encode() not in brokers.copies("a")


@pytest.mark.parametrize("asked_max", [0, 16])
async def test_a_mark_of_a_stream_that_is_there_takes_no_key(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked_max: int
) -> None:
    monkeypatch.setattr(stream_keys, "MARKS_ASKED_MAX", asked_max)
    await brokers.start("a", "b")
    await brokers.create(ORDERS, LIFE)
    for keys in brokers.running.values():
        await keys.ensure(ORDERS, LIFE)
    kept, mark = await brokers.record(), brokers.catalog.keys.deleted(LIFE.hex())
    assert kept is not None
    forged = DeletedStream(name=str(ORDERS), incarnation=LIFE.hex(), deleted_ms=1)
    for value in (b"?", encode(forged)):
        await brokers.put(mark, value)
        await brokers.put(brokers.key(), kept)
        entry = await brokers.store.get(brokers.key())
        assert entry is not None
        await until(
            lambda revision=entry.mod_revision: min(k._settled for k in brokers.running.values()) >= revision
        )  # type: ignore[misc]
        assert brokers.knows("a") and brokers.knows("b") and await brokers.record() == kept
    assert "says that acme/payments/orders was deleted, which is there" in caplog.text
    await brokers.stop("b")
    await brokers.start("b")
    assert brokers.knows("b")
    # Nor does it keep what the store lost from being put back, or a retired root from being destroyed.
    await brokers.store.transact([], [Delete(brokers.key())])
    async with asyncio.timeout(30):
        while await brokers.record() != kept:  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0.001)
    await brokers.stop("b")
    brokers.registered.remove("b")
    old = brokers.running["a"].roots.active.key
    await brokers.rotations["a"].rotate_root()
    assert [root.hex() for root in await brokers.rotations["a"].destroy_retired_roots("")] == [old]
    # The deletion itself is one all the same.
    await brokers.catalog.delete_stream(ORDERS, deleted_ms=2)
    await until(lambda: not brokers.knows("a"))
    assert await brokers.record() is None


async def test_marks_of_deletions_are_loaded_at_once_where_many_keys_are_new(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_keys, "MARKS_ASKED_MAX", 1)
    await brokers.start("a")
    await brokers.create(ORDERS, LIFE)
    for name, life in ((ORDERS, LIFE), (CARDS, OTHER_LIFE)):
        await brokers.running["a"].ensure(name, life)
    kept = await brokers.record()
    assert kept is not None
    await brokers.stop()
    await brokers.catalog.delete_stream(ORDERS, deleted_ms=2)
    await brokers.put(brokers.key(), kept)
    await brokers.start("a", "b")
    for name in "ab":
        assert not brokers.knows(name) and brokers.knows(name, OTHER_LIFE)


async def test_a_deleted_streams_key_that_is_put_back_is_not_wrapped_under_the_next_root(
    brokers: Brokers,
) -> None:
    keys = await brokers.start("a")
    await brokers.create(ORDERS, LIFE)
    for name, life in ((ORDERS, LIFE), (CARDS, OTHER_LIFE)):
        await keys.ensure(name, life)
    kept = await brokers.record()
    assert kept is not None
    await brokers.catalog.delete_stream(ORDERS, deleted_ms=2)
    await until(lambda: not brokers.knows("a"))
    # Nobody who follows the store removes it meanwhile.
    async with keys._draining:
        await brokers.put(brokers.key(), kept)
        rotation = brokers.rotations["a"]
        roots = keys.roots
        made = await asyncio.to_thread(rotation._make_root)
        assert await rotation._rewrap(made) == 1
        assert roots == keys.roots and await brokers.record() == kept
        other = await brokers.record(OTHER_LIFE)
        assert other is not None and made.key.encode() in other


async def test_a_key_that_the_store_lost_is_put_back_as_it_was(brokers: Brokers) -> None:
    await brokers.start("a", "b")
    await brokers.running["a"].ensure(ORDERS, LIFE)
    kept = await brokers.record()
    assert kept is not None
    await until(lambda: brokers.knows("b"))
    await brokers.store.transact([], [Delete(brokers.key())])
    async with asyncio.timeout(30):
        while await brokers.record() != kept:  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0.001)
    await brokers.stop()
    # A store that was put back to before there were keys.
    await brokers.store.transact([], [Delete(brokers.key()), Delete(brokers.catalog.keys.key_roots())])
    await brokers.start("a")
    assert await brokers.record() == kept
    assert (await brokers.start("d")).keyring.find(LIFE) == brokers.knows("a")


async def test_a_second_key_under_an_incarnation_is_never_used_by_who_has_the_first(brokers: Brokers) -> None:
    keys = await brokers.start("a")
    await keys.ensure(ORDERS, LIFE)
    sealed, first = seal_of(keys).seal(batch(b"x")), brokers.knows("a")
    await brokers.stop()
    # The store went back, and a broker that has no copy made the stream's key anew.
    await brokers.store.transact([], [Delete(brokers.key())])
    await (await brokers.start("b")).ensure(ORDERS, LIFE)
    second = brokers.knows("b")
    keys = await brokers.start("a")
    assert (
        brokers.knows("a") == first and second is not None and first is not None and second.key != first.key
    )
    assert "another key for acme/payments/orders" in str(keys.faults[LIFE.hex()])
    assert seal_of(keys).open_batch(sealed) == batch(b"x")
    with pytest.raises(TamperError, match="cannot be opened"):
        seal_of(brokers.running["b"]).open_batch(sealed)


async def test_records_that_were_changed_are_refused_by_who_reads_them_first_and_by_who_knows_better(
    brokers: Brokers,
) -> None:
    keys = await brokers.start("a")
    for name, life in ((ORDERS, LIFE), (CARDS, OTHER_LIFE)):
        await keys.ensure(name, life)
    good, other = await brokers.record(), await brokers.record(OTHER_LIFE)
    assert good is not None and other is not None
    known = brokers.knows("a")
    fresh = await brokers.start("b")
    await brokers.stop("b")
    shutil.rmtree(brokers.folder("b"))
    changed = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 7)]
    changed += [good + b" ", good[:-1], b"", b"{}", other]
    # In one broker's eyes one after the other; each is another revision.
    for value in changed:
        await brokers.put(brokers.key(), value)
    await brokers.put(brokers.key(OTHER_LIFE), good)
    await until(lambda: OTHER_LIFE.hex() in keys.faults)
    assert brokers.knows("a") == known and keys.faults.keys() == {LIFE.hex(), OTHER_LIFE.hex()}
    fresh = await brokers.start("b")
    assert not fresh.keyring.records()
    for value in changed:
        await brokers.put(brokers.key(), value)
        with pytest.raises(FelixError) as refused:
            await fresh.ensure(ORDERS, LIFE)
        assert isinstance(refused.value, CorruptionError | TamperError | KeyProviderError | RequestError)
        assert fresh.keyring.find(LIFE) is None
    await brokers.put(brokers.key(), good)
    await fresh.ensure(ORDERS, LIFE)
    assert brokers.knows("b") == known and LIFE.hex() not in fresh.faults


async def test_a_key_of_another_stream_does_not_stand_in(brokers: Brokers) -> None:
    keys = await brokers.start("a")
    await keys.ensure(ORDERS, LIFE)
    with pytest.raises(
        CorruptionError, match="is the key of acme/payments/orders, not of acme/payments/cards"
    ):
        await keys.ensure(CARDS, LIFE)
    # A batch of another stream, shard or epoch is not opened with it either.
    sealed = seal_of(keys).seal(batch(b"x"))
    await keys.ensure(CARDS, OTHER_LIFE)
    header = sealed.header
    for seal, moved in (
        (seal_of(keys, name=CARDS, life=OTHER_LIFE), sealed),
        (seal_of(keys, 1), sealed.with_header(replace(header, shard=1))),
        (seal_of(keys), sealed.with_header(replace(header, leader_epoch=2))),
        (seal_of(keys), sealed.with_header(replace(header, base_offset=1))),
    ):
        with pytest.raises(TamperError):
            seal.open_batch(moved)


async def test_a_broker_without_the_regions_root_key_or_with_another_one_is_told_so(brokers: Brokers) -> None:
    keys = await brokers.start("a")
    await keys.ensure(ORDERS, LIFE)
    (root,) = (brokers.root_folder("b") / ROOTS).glob("*.key")
    kept = root.read_bytes()
    root.unlink()
    with pytest.raises(KeyProviderError, match="is not in this broker's key provider") as refused:
        await brokers.start("b")
    assert f"keys/roots/{root.name}" in refused.value.hint
    # Another key under the same id: the file is whole, and of another secret.
    body = kept[:-40] + bytes(32)
    root.write_bytes(body + hashlib.sha256(body).digest()[:8])
    root.chmod(0o600)
    with pytest.raises(KeyProviderError, match="has another key under the id"):
        await brokers.start("b")
    root.write_bytes(kept)
    await brokers.start("b")
    assert brokers.knows("b") == brokers.knows("a")


async def test_what_else_stands_beside_the_keys_keeps_nobody_from_following(brokers: Brokers) -> None:
    keys = await brokers.start("a")
    start = brokers.catalog.keys.stream_key("")
    for name in ("x", "z" * 32, "ab" * 17):
        await brokers.put(start + name, b"{}")
        await brokers.store.transact([], [Delete(start + name)])
        await brokers.put(start + name, b"{}")
    await keys.ensure(ORDERS, LIFE)
    await brokers.start("b")
    await brokers.create(CARDS, OTHER_LIFE)
    await brokers.running["b"].ensure(CARDS, OTHER_LIFE)
    await until(lambda: brokers.knows("a", OTHER_LIFE))
    assert not keys.faults


async def test_while_the_store_is_away_no_first_key_is_made_and_it_is_made_once_it_is_back(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = await brokers.start("a")
    await keys.ensure(ORDERS, LIFE)

    async def away(*_: object) -> None:
        raise UnavailableError("The metadata store does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(brokers.store, "_get", away)
        patch.setattr(brokers.store, "_transact", away)
        patch.setattr(brokers.store, "_range", away)
        # What is known is served on.
        await keys.ensure(ORDERS, LIFE)
        sealed = seal_of(keys).seal(batch(b"x"))
        with pytest.raises(UnavailableError, match="does not answer"):
            await keys.ensure(CARDS, OTHER_LIFE)
        with pytest.raises(UnavailableError, match="does not answer"):
            await brokers.start("b")
    await keys.ensure(CARDS, OTHER_LIFE)
    await brokers.start("b")
    assert seal_of(brokers.running["b"]).open_batch(sealed) == batch(b"x")


async def test_what_a_broker_sealed_with_a_keyring_of_its_own_stays_readable_and_its_key_becomes_the_streams(
    brokers: Brokers,
) -> None:
    create_keyring(brokers.folder("a"), brokers.region)
    own = open_keyring(brokers.folder("a"), brokers.region)
    before = KeyringSeal(own, ORDERS, LIFE, 0).seal(batch(b"old"))
    await brokers.create(CARDS, OTHER_LIFE)
    KeyringSeal(own, CARDS, OTHER_LIFE, 0).seal(batch(b"deleted since"))
    await brokers.catalog.delete_stream(CARDS, deleted_ms=2)
    stream_key = next(key.key_id for key in own.list(ORDERS) if key.level == "stream")
    own.close()
    for _ in range(2):
        keys = await brokers.start("a")
        await keys.ensure(ORDERS, LIFE)
        known = brokers.knows("a")
        assert known is not None and known.key_id == stream_key
        assert await brokers.record(OTHER_LIFE) is None
        assert seal_of(keys).open_batch(before) == batch(b"old")
        assert keys.keyring.own is not None
        states = {key.stream: key.state for key in keys.keyring.own.list() if key.level == "stream"}
        assert states == {str(ORDERS): KeyState.ACTIVE, str(CARDS): KeyState.DESTROYED}
        after = seal_of(keys).seal(batch(b"new"))
        other = await brokers.start("b")
        await other.ensure(ORDERS, LIFE)
        assert seal_of(other).open_batch(after) == batch(b"new")
        assert seal_of(other).open_batch(before) == batch(b"old")
        # It is what the batch says: of this shard and this epoch.
        moved = before.with_header(replace(before.header, leader_epoch=2))
        with pytest.raises(TamperError):
            seal_of(other).open_batch(moved)
        await brokers.stop()
    (page,) = (await brokers.store.load(brokers.catalog.keys.stored_keys(LIFE.hex()))).entries
    at = page.value.index(b'"wrapped":"') + 20
    changed = bytearray(page.value)
    changed[at] = ord("A") if changed[at] != ord("A") else ord("B")
    await brokers.put(page.key, bytes(changed))
    other = await brokers.start("b")
    await other.ensure(ORDERS, LIFE)
    with pytest.raises(TamperError):
        seal_of(other).open_batch(before)
    await brokers.create(ORDERS, LIFE)
    keys = await brokers.start("a")
    await brokers.catalog.delete_stream(ORDERS, deleted_ms=3)
    await until(lambda: not brokers.knows("b"))
    own = keys.keyring.own
    assert own is not None
    await until(lambda: all(key.state is KeyState.DESTROYED for key in own.list() if key.level == "stream"))
    with pytest.raises(RequestError, match="destroyed"):
        seal_of(keys).open_batch(before)
    async with asyncio.timeout(30):
        while (await brokers.store.load(brokers.catalog.keys.stored_keys(LIFE.hex()))).entries:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_data_keys_are_rotated_at_every_broker_through_any_of_them(brokers: Brokers) -> None:
    await brokers.start("a", "b", "c")
    seals = {}
    for name in "abc":
        for stream, life in ((ORDERS, LIFE), (CARDS, OTHER_LIFE)):
            await brokers.running[name].ensure(stream, life)
            seals[name, stream] = seal_of(brokers.running[name], name=stream, life=life)

    def ids() -> dict[tuple[str, StreamName], bytes]:
        return {place: seal.seal(batch(b"x")).header.key_id for place, seal in seals.items()}

    first = ids()
    assert ids() == first
    assert await brokers.rotations["b"].rotate_data(ORDERS) == (
        "Every broker takes fresh data keys for acme/payments/orders with its next batches."
    )
    second = ids()
    assert {place for place in first if second[place] != first[place]} == {(name, ORDERS) for name in "abc"}
    await brokers.rotations["c"].rotate_data(None)
    third = ids()
    assert not set(third.values()) & set(second.values())
    await brokers.stop("a")
    await brokers.rotations["b"].rotate_data(None)
    assert ids()["c", CARDS] != third["c", CARDS]


async def test_a_broker_that_does_not_confirm_a_rotation_is_named_and_follows_later(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 0.2)
    await brokers.start("a", "b")
    keys = brokers.running["b"]
    await keys.ensure(ORDERS, LIFE)
    seal = seal_of(keys)
    first = seal.seal(batch(b"x")).header.key_id
    await brokers.rotations["b"].close()
    said = await brokers.rotations["a"].rotate_data(ORDERS)
    assert "Not confirmed within" in said and "b: they follow once they reach the metadata store" in said
    again = KeyRotation(brokers.store, keys, "b", brokers.addresses, REAL)
    again._hear(Event(*await entry_of(brokers, brokers.catalog.keys.key_rotated())))
    again._task = asyncio.create_task(again._follow())
    brokers.rotations["b"] = again
    again._wake.set()
    await until(lambda: seal.seal(batch(b"x")).header.key_id != first)


async def entry_of(brokers: Brokers, key: str) -> tuple[str, Entry | None]:
    return key, await brokers.store.get(key)


async def roots_of(brokers: Brokers) -> dict[str, str]:
    """The root that wraps each stream's key."""
    entries = (await brokers.store.load(brokers.catalog.keys.stream_key(""))).entries
    return {
        record.stream: record.root
        for record in (msgspec.json.decode(e.value, type=StreamKey) for e in entries)
    }


async def test_the_root_is_rotated_once_every_broker_holds_the_next_one(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 0.2)
    monkeypatch.setattr(key_rotation, "LOOK_S", 0.01)
    await brokers.start("a", "b", "c")
    for keys in brokers.running.values():
        await keys.ensure(ORDERS, LIFE)
    sealed = seal_of(brokers.running["a"]).seal(batch(b"x"))
    old = brokers.running["a"].roots.active.key
    with pytest.raises(
        RequestError, match="b, c of the region's brokers have not said that they hold it"
    ) as told:
        await brokers.rotations["a"].rotate_root()
    assert told.value.code is Code.CONFLICT and "from the region folder of a into theirs" in told.value.hint
    assert brokers.running["a"].roots.active.key == old
    brokers.bring_roots("a", "b")
    await brokers.stop("c")
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 30.0)
    asked = asyncio.create_task(brokers.rotations["b"].rotate_root())
    brokers.bring_roots("a", "c")
    await brokers.start("c")
    rotated = await asked
    new = rotated.new_root.hex()
    assert rotated.old_root.hex() == old and rotated.stream_keys == 1 and new != old
    assert await roots_of(brokers) == {str(ORDERS): new}
    await until(lambda: all(known and known.root == new for known in map(brokers.knows, "abc")))
    # What the old root wrapped is gone from the copies, too: it is no longer needed, and may be destroyed.
    await until(
        lambda: not any(old.encode() in line for name in "abc" for line in stream_lines(brokers, name))
    )
    await brokers.stop()
    for name in "abc":
        (brokers.root_folder(name) / ROOTS / f"{old}.key").unlink()
    for name in "abc":
        keys = await brokers.start(name)
        assert seal_of(keys).open_batch(sealed) == batch(b"x")
    await brokers.running["c"].ensure(CARDS, OTHER_LIFE)
    assert set((await roots_of(brokers)).values()) == {new}


def stream_lines(brokers: Brokers, name: str) -> list[bytes]:
    """The copies of stream keys, without that of the roots."""
    return [part.split(b"}")[0] for part in brokers.copies(name).split(b'{"stream"')[1:]]


async def test_a_roots_rotation_that_a_crash_cut_off_is_finished_by_the_next_call(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await brokers.start("a")
    names = [(StreamName.parse(f"acme/ops/s{number}"), bytes([number]) * 16) for number in range(70)]
    for name, life in names:
        await brokers.running["a"].ensure(name, life)
    rotation, old = brokers.rotations["a"], brokers.running["a"].roots.active.key

    async def crash(*_: object) -> None:
        raise UnavailableError("The broker died.")

    for step in ("_activate", "_rewrap"):
        with monkeypatch.context() as patch:
            patch.setattr(rotation, step, crash)
            with pytest.raises(UnavailableError, match="died"):
                await rotation.rotate_root()
        await brokers.stop()
        await brokers.start("a")
        rotation = brokers.rotations["a"]
    roots = brokers.running["a"].roots
    assert [root.state for root in roots.roots] == [KeyState.DECRYPT_ONLY, KeyState.ACTIVE]
    await brokers.running["a"].ensure(ORDERS, LIFE)
    done = await rotation.rotate_root()
    assert done == (bytes.fromhex(old), roots.active.key_id, 70, ())
    assert set((await roots_of(brokers)).values()) == {roots.active.key}
    await until(lambda: all(record.root != old for record in brokers.running["a"].keyring.records()))
    assert (await rotation.rotate_root()).old_root == roots.active.key_id


async def test_roots_that_the_store_shows_as_they_were_before_are_put_right(brokers: Brokers) -> None:
    await brokers.start("a")
    key = brokers.catalog.keys.key_roots()
    before = await brokers.store.get(key)
    await brokers.rotations["a"].rotate_root()
    after = await brokers.store.get(key)
    assert before is not None and after is not None
    for is_running in (True, False):
        if not is_running:
            await brokers.stop()
        await brokers.put(key, before.value)
        if not is_running:
            await brokers.start("a")
        async with asyncio.timeout(30):
            while (found := await brokers.store.get(key)) is None or found.value != after.value:  # noqa: ASYNC110 - no event is set for it
                await asyncio.sleep(0.001)
    await brokers.running["a"].ensure(ORDERS, LIFE)
    assert (await roots_of(brokers))[str(ORDERS)] == brokers.running["a"].roots.active.key


async def rotated(brokers: Brokers, *names: str) -> str:
    """Rotate the root, with its file brought to these brokers' machines while the rotation waits for them. The id of the root of before."""
    first, *others = names
    keys = brokers.running[first]
    old = keys.roots.active.key
    rotating = asyncio.ensure_future(brokers.rotations[first].rotate_root())
    await until(lambda: rotating.done() or keys.roots.in_state(KeyState.PENDING))
    brokers.bring_roots(first, *others)
    with suppress(RequestError):
        await rotating
    if brokers.running[first].roots.active.key == old:
        await brokers.rotations[first].rotate_root()
    return old


def remove_root(brokers: Brokers, root: str, *names: str) -> None:
    for name in names:
        (brokers.root_folder(name) / ROOTS / f"{root}.key").unlink()


async def test_a_broker_that_was_down_while_keys_were_wrapped_anew_is_named_and_needs_the_old_root_no_more(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 0.5)
    monkeypatch.setattr(key_rotation, "LOOK_S", 0.01)
    await brokers.start("a", "b", "c")
    for keys in brokers.running.values():
        await keys.ensure(ORDERS, LIFE)
    sealed = seal_of(brokers.running["c"]).seal(batch(b"x"))
    rotation, rewrap = brokers.rotations["a"], brokers.rotations["a"]._rewrap

    async def without_c(root: Root) -> int:
        await brokers.stop("c")
        return await rewrap(root)

    old = brokers.running["a"].roots.active
    with pytest.raises(RequestError, match="have not said that they hold it"):
        await rotation.rotate_root()
    brokers.bring_roots("a", "b", "c")
    monkeypatch.setattr(rotation, "_rewrap", without_c)
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 5.0)
    done = await rotation.rotate_root()
    assert done.stream_keys == 1 and done.behind == ("c",)
    monkeypatch.setattr(rotation, "_rewrap", rewrap)
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 0.1)
    # Asked again, it is the same rotation, and no other root is made.
    assert await rotation.rotate_root() == (old.key_id, done.new_root, 0, ("c",))
    # Also where the old root's file was removed too early, the store has what this broker can open.
    remove_root(brokers, old.key, "a", "b", "c")
    await brokers.stop("a", "b")
    c = await brokers.start("c")
    assert not c.faults and seal_of(c).open_batch(sealed) == batch(b"x")
    await brokers.start("a", "b")
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 30.0)
    assert not await brokers.rotations["b"]._behind(c.roots.active)


@pytest.mark.parametrize("made_up", [0, ROOTS_MAX - 1])
async def test_a_retired_root_that_was_taken_off_the_list_does_not_come_back(
    brokers: Brokers, made_up: int
) -> None:
    await brokers.start("a", "b")
    key = brokers.catalog.keys.key_roots()
    await brokers.running["a"].ensure(ORDERS, LIFE)
    before = await brokers.record()
    assert before is not None
    old = await rotated(brokers, "a", "b")
    await until(lambda: all(known and known.root != old for known in map(brokers.knows, "ab")))
    new = brokers.running["a"].roots.active
    entry = await brokers.store.get(key)
    assert entry is not None
    (retired,) = decode_roots(entry.value, brokers.region, "the store").in_state(KeyState.DECRYPT_ONLY)
    for is_running in (True, False):
        # Roots that nobody has push nothing out of what is remembered.
        others = [
            Root(
                new_key_id(brokers.region, KeyKind.ROOT, bytes([number]) * RANDOM_BYTES).hex(),
                KeyState.DECRYPT_ONLY,
                (1 << 53) - 1,
                b"x" * 60,
            )
            for number in range(made_up)
        ]
        await brokers.put(key, Roots((new, *others)).encode())
        await until(lambda: all(len(keys.roots.roots) == 1 + made_up for keys in brokers.running.values()))
        await brokers.put(brokers.key(), before)
        if not is_running:
            await brokers.stop()
        swapped = Roots(
            (
                msgspec.structs.replace(retired, state=KeyState.ACTIVE),
                msgspec.structs.replace(new, state=KeyState.DECRYPT_ONLY),
            )
        )
        await brokers.put(key, swapped.encode())
        if not is_running:
            await brokers.start("a", "b")
        async with asyncio.timeout(30):
            while (found := await brokers.store.get(key)) is None or found.value == swapped.encode():  # noqa: ASYNC110 - no event is set for it
                await asyncio.sleep(0.001)
        for keys in brokers.running.values():
            assert (await keys.renew_roots()).active == new
        number = b"kl"[is_running : is_running + 1] * 16
        name = StreamName.parse(f"acme/ops/s{int(is_running)}")
        await brokers.running["b"].ensure(name, number)
        assert (await roots_of(brokers))[str(name)] == new.key != old
        assert all(known and known.root == new.key for known in map(brokers.knows, "ab"))
        async with asyncio.timeout(30):
            while await brokers.record() == before:  # noqa: ASYNC110 - no event is set for it
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("is_removed_first", [True, False])
async def test_a_record_that_the_store_shows_as_it_was_before_a_roots_rotation_is_put_right(
    brokers: Brokers, is_running: bool, is_removed_first: bool
) -> None:
    await brokers.start("a", "b")
    for keys in brokers.running.values():
        await keys.ensure(ORDERS, LIFE)
    sealed = seal_of(brokers.running["a"]).seal(batch(b"x"))
    before = await brokers.record()
    assert before is not None
    old = await rotated(brokers, "a", "b")
    after = await brokers.record()
    await until(lambda: all(known and known.root != old for known in map(brokers.knows, "ab")))
    if is_removed_first:
        remove_root(brokers, old, "a", "b")
    if not is_running:
        await brokers.stop()
    await brokers.put(brokers.key(), before)
    if not is_running:
        await brokers.start("a", "b")
    async with asyncio.timeout(30):
        while await brokers.record() != after:  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0.001)
    if not is_removed_first:
        remove_root(brokers, old, "a", "b")
    await brokers.stop()
    brokers.bring_roots("a", "c")
    await brokers.start("a", "b", "c")
    for keys in brokers.running.values():
        await keys.ensure(ORDERS, LIFE)
        assert seal_of(keys).open_batch(sealed) == batch(b"x") and not keys.faults


async def test_streams_come_and_go_while_the_root_is_rotated(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "LOOK_S", 0.01)
    await brokers.start("a", "b")
    names = [(StreamName.parse(f"acme/ops/s{number}"), bytes([number]) * 16) for number in range(40)]
    for name, life in names[:20]:
        await brokers.create(name, life)
        await brokers.running["a"].ensure(name, life)
    sealed = seal_of(brokers.running["a"], name=names[0][0], life=names[0][1]).seal(batch(b"x"))

    async def change() -> None:
        for (gone, _), (name, life) in zip(names[1:20], names[20:], strict=False):
            await brokers.catalog.delete_stream(gone, deleted_ms=1)
            await brokers.create(name, life)
            await brokers.running["b"].ensure(name, life)

    changing = asyncio.create_task(change())
    await until(lambda: brokers.knows("a", names[22][1]))
    for turn in range(2):
        asked = asyncio.create_task(brokers.rotations["ab"[turn]].rotate_root())
        await until(lambda: all(keys.roots.in_state(KeyState.PENDING) for keys in brokers.running.values()))
        brokers.bring_roots("a", "b")
        brokers.bring_roots("b", "a")
        await asked
    await changing
    active = brokers.running["a"].roots.active.key
    await brokers.rotations["a"]._rewrap(brokers.running["a"].roots.active)
    assert set((await roots_of(brokers)).values()) == {active}
    assert (await roots_of(brokers)).keys() == {str(name) for name, _ in (names[0], *names[20:39])}
    for keys in brokers.running.values():
        assert seal_of(keys, name=names[0][0], life=names[0][1]).open_batch(sealed) == batch(b"x")


class LossyStore(MemoryStore):
    """Answers of writes are lost, before or after they were carried out, as a seed says."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self.lossy = True

    async def _transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        for _ in range(self._random.randrange(3)):
            await asyncio.sleep(0)
        is_lost = self.lossy and self._random.random() < 0.3
        if is_lost and self._random.random() < 0.5:
            raise OutcomeUnknownError("The answer was lost, with the request.")
        result = await super()._transact(compares, writes)
        if is_lost:
            raise OutcomeUnknownError("The answer was lost.")
        return result


@pytest.mark.parametrize("seed", range(count(6, 100)))
async def test_whatever_is_lost_a_stream_has_one_key_and_everybody_opens_what_anybody_sealed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "LOOK_S", 0.01)
    random = Random(seed)
    store = LossyStore(random)
    brokers = Brokers(store, tmp_path)
    sealed: dict[int, list[Batch]] = {}
    gone: set[int] = set()

    def place(number: int) -> tuple[StreamName, bytes]:
        return StreamName.parse(f"acme/ops/s{number}"), bytes([number]) * 16

    async def delete(number: int) -> None:
        name, life = place(number)
        # The stream stands in the catalog only in order to be deleted.
        with suppress(RequestError):
            await brokers.create(name, life)
        with suppress(RequestError):
            await brokers.catalog.delete_stream(name, deleted_ms=1)

    async def act() -> None:
        name = random.choice("abc")
        number = random.randrange(6)
        match random.choice(("seal", "seal", "seal", "restart", "delete", "root", "data")):
            case "seal" if number not in gone and name in brokers.running:
                keys = brokers.running[name]
                await keys.ensure(*place(number))
                stream, life = place(number)
                sealed.setdefault(number, []).append(seal_of(keys, name=stream, life=life).seal(batch(b"x")))
            case "restart":
                if name in brokers.running:
                    await brokers.stop(name)
                await brokers.start(name)
            case "delete" if number not in gone and random.random() < 0.3:
                gone.add(number)
                await delete(number)
            case "root" if name in brokers.running and len(brokers.running) == len(brokers.registered):
                await brokers.rotations[name].rotate_root()
            case "data" if name in brokers.running:
                await brokers.rotations[name].rotate_data(None)

    # Brokers of one machine: a root that one makes the others hold.
    shutil.rmtree(brokers.root_folder("a") / ROOTS)
    shutil.copytree(tmp_path / "first" / ROOTS, brokers.root_folder("a") / ROOTS)
    for name in "bc":
        shutil.rmtree(brokers.root_folder(name) / ROOTS)
        (brokers.root_folder(name) / ROOTS).symlink_to(brokers.root_folder("a") / ROOTS)
    for _ in range(60):
        with suppress(UnavailableError):
            await act()
    store.lossy = False
    for name in "abc":
        if name not in brokers.running:
            await brokers.start(name)
    for number in gone:
        await delete(number)
    await brokers.rotations["a"].rotate_root()
    for number in sealed.keys() - gone:
        stream, life = place(number)
        for keys in brokers.running.values():
            await keys.ensure(stream, life)
            for one in sealed[number]:
                assert seal_of(keys, name=stream, life=life).open_batch(one) == batch(b"x")
    lives = [place(number)[1] for number in gone]
    await until(lambda: not any(brokers.knows(name, life) for name in "abc" for life in lives))
    ids = [one.header.key_id for batches in sealed.values() for one in batches]
    assert len(set(ids)) == len(ids)
    await brokers.stop()
    await store.close()


async def owed(brokers: Brokers, name: str) -> set[str]:
    """Whose leaf is due, as a broker knows."""
    return {held.record.key for held in await SharedDestruction(brokers.rotations[name]).carry_out()}


@pytest.mark.parametrize("life", ["00" * 16, "ab" * 16])
async def test_a_leaf_of_a_deleted_streams_key_is_due_once_every_broker_has_let_go_of_it(
    brokers: Brokers, life: str
) -> None:
    await brokers.start("a", "b", "c")
    await brokers.create(ORDERS, LIFE)
    await brokers.create(CARDS, OTHER_LIFE)
    for keys in brokers.running.values():
        await keys.ensure(ORDERS, LIFE)
    known = brokers.knows("a")
    assert known is not None
    await brokers.stop("c")
    mark = await brokers.catalog.delete_stream(ORDERS, deleted_ms=2, by="spiffe://eu.acme/operator/x")
    # What has no key yet has none to destroy.
    assert (await brokers.catalog.delete_stream(CARDS, deleted_ms=3)).key == ""
    assert mark.key == known.key
    ledger = brokers.rotations["a"].ledger
    await until(lambda: ledger.find(mark.key) is not None)
    (held,) = ledger.all()
    assert (held.record.stream, held.record.incarnation, held.record.by) == (
        str(ORDERS), LIFE.hex(), "spiffe://eu.acme/operator/x",
    )  # fmt: skip
    rotation = brokers.rotations["a"]
    await until(lambda: rotation.holding(held.created) == ("c",))
    assert await owed(brokers, "a") == set()
    # A record of a key that is in use gets no leaf: whoever put it there is no broker.
    await brokers.start("c")
    await brokers.create(CARDS, bytes(16))
    for keys in brokers.running.values():
        await keys.ensure(CARDS, bytes(16))
    live = brokers.knows("a", bytes(16))
    assert live is not None
    made_up = DestroyedKey(key=live.key, level="stream", stream=str(CARDS), incarnation=life, at_ms=1)
    await ledger.add(made_up)
    # Nor does one of a key that no stream was deleted with.
    never = DestroyedKey(key="ab" * 16, level="stream", stream=str(CARDS), incarnation="00" * 16, at_ms=1)
    await ledger.add(never)
    added = await ledger.add(
        msgspec.structs.replace(
            never, key="cd" * 16, incarnation=LIFE.hex(), by="spiffe://eu.acme/operator/x"
        )
    )
    # Nor one of a mark that cannot be read, and it keeps no other from its leaf.
    unread = msgspec.structs.replace(never, key="ef" * 16, incarnation="11" * 16)
    assert (await brokers.store.transact([], [Put(brokers.catalog.keys.deleted("11" * 16), b"?")])).succeeded
    added = await ledger.add(unread)
    await until(lambda: rotation.holding(max(held.created, added.created)) == ())
    assert known.key.encode() not in b"".join(brokers.copies(name) for name in "abc")
    assert await owed(brokers, "a") == {mark.key}
    await until(lambda: brokers.rotations["c"].ledger.find(added.record.key) is not None)
    assert await owed(brokers, "c") == {mark.key}
    # Once its stream is deleted, the record is a new one, which every broker has to have carried out.
    await brokers.catalog.delete_stream(CARDS, deleted_ms=4)
    entry = await brokers.store.get(brokers.catalog.keys.destroyed_key(live.key))
    assert entry is not None and entry.create_revision > added.created
    await until(lambda: rotation.holding(entry.create_revision) == ())
    assert await owed(brokers, "a") == {mark.key, live.key}


async def test_a_record_of_a_key_in_use_under_another_level_gets_no_leaf_and_is_not_listed(
    brokers: Brokers,
) -> None:
    keys = await brokers.start("a")
    await brokers.create(ORDERS, LIFE)
    await keys.ensure(ORDERS, LIFE)
    rotation, live = brokers.rotations["a"], brokers.knows("a")
    assert live is not None
    data = seal_of(keys).seal(batch(b"x")).header.key_id.hex()
    by = "spiffe://eu.acme/operator/x"
    named: list[tuple[Literal["root", "stream"], str]] = [
        ("stream", keys.roots.active.key), ("stream", data), ("stream", live.key), ("root", "f0" + data[2:])
    ]  # fmt: skip
    for number, (level, key) in enumerate(named):
        # Whoever writes the metadata store writes the mark of a deletion, too.
        stream, life = (str(ORDERS), f"{number:032x}") if level == "stream" else ("", "")
        if life:
            mark = DeletedStream(name=stream, incarnation=life, by=by, deleted_ms=1, key=key)
            await brokers.put(brokers.catalog.keys.deleted(life), encode(mark))
        record = DestroyedKey(key=key, level=level, stream=stream, incarnation=life, by=by, at_ms=1)
        held = await rotation.ledger.add(record)
        await until(lambda revision=held.created: rotation.holding(revision) == ())  # type: ignore[misc]
        assert await owed(brokers, "a") == set(), (level, key)
    erasure = Erasure(SharedDestruction(rotation), cast("Any", None), brokers.region, REAL.clock.now_ms)
    assert erasure.shown() == []


async def test_retired_roots_are_destroyed_at_every_broker_once_no_copy_needs_them(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 0.2)
    monkeypatch.setattr(key_rotation, "LOOK_S", 0.01)
    # The first of them was the region's only broker once, and has a keyring of that time; so has the region's folder.
    ring = open_keyring(brokers.home / "first", brokers.region)
    before = KeyringSeal(ring, ORDERS, LIFE, 0).seal(batch(b"old"))
    KeyringSeal(ring, CARDS, OTHER_LIFE, 0).seal(batch(b"old"))
    wrapped = {entry.stream: entry.wrapped for entry in ring.live_streams()}
    ring.close()
    shutil.copytree(brokers.home / "first", brokers.folder("a"))
    await brokers.create(ORDERS, LIFE)
    await brokers.create(CARDS, OTHER_LIFE)
    keys = await brokers.start("a", "b", "c")
    assert await brokers.rotations["a"].destroy_retired_roots("") == []
    old = brokers.running["a"].roots.active.key
    with suppress(RequestError):
        await brokers.rotations["a"].rotate_root()
    brokers.bring_roots("a", "b", "c")
    with pytest.raises(RequestError, match="A rotation of the root key is under way: no root key was"):
        await brokers.rotations["b"].destroy_retired_roots("")
    await until(lambda: brokers.rotations["c"]._followed["c"].roots != (old,))
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 5.0)
    await brokers.rotations["a"].rotate_root()
    # What is deleted goes from those keyrings, too.
    await brokers.catalog.delete_stream(CARDS, deleted_ms=5)
    deleted = brokers.rotations["a"].ledger
    await until(lambda: len(deleted) == 1 and brokers.rotations["a"].holding(deleted.newest) == ())
    everything = [path for path in brokers.home.rglob("*") if path.is_file() and "first" not in path.parts]
    assert not [path for path in everything if wrapped[str(CARDS)] in path.read_bytes()]
    assert [path for path in everything if wrapped[str(ORDERS)] in path.read_bytes()]
    await brokers.stop("c")
    (root,) = await brokers.rotations["b"].destroy_retired_roots("spiffe://eu.acme/operator/x")
    assert root.hex() == old
    rotation = brokers.rotations["a"]
    await until(lambda: rotation.ledger.find(old) is not None)
    held = rotation.ledger.find(old)
    assert held is not None and held.record.level == "root"
    await until(lambda: rotation.holding(held.created) == ("c",))
    assert old not in await owed(brokers, "a")
    assert brokers.running["a"].roots.find(old) is None
    keys = await brokers.start("c")
    await until(lambda: rotation.holding(held.created) == ())
    assert await owed(brokers, "a") >= {old}
    assert not list(brokers.home.rglob(f"{old}.key"))[1:]  # the untouched first folder, which no broker has
    for name in "abc":
        await brokers.running[name].ensure(ORDERS, LIFE)
        assert seal_of(brokers.running[name]).open_batch(before) == batch(b"old")
    await brokers.stop()
    keys = await brokers.start("a")
    assert seal_of(keys).open_batch(before) == batch(b"old")


async def test_a_made_up_record_of_the_root_in_use_keeps_no_other_key_from_its_destruction(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    # Brokers of one machine.
    for name in "ab":
        (brokers.home / name).mkdir()
        (brokers.home / name / "region").symlink_to(brokers.home / "first")
    await brokers.start("a", "b")
    await brokers.create(ORDERS, LIFE)
    await brokers.create(CARDS, OTHER_LIFE)
    for keys in brokers.running.values():
        await keys.ensure(ORDERS, LIFE)
        await keys.ensure(CARDS, OTHER_LIFE)
    sealed, kept = seal_of(keys, name=CARDS, life=OTHER_LIFE).seal(batch(b"x")), await brokers.record()
    assert kept is not None
    rotation, provider = brokers.rotations["a"], keys.keyring.provider
    record = decode_stream_key(kept, brokers.region, "The administrator's copy")
    assert record.secret(brokers.region, provider)
    old = keys.roots.active.key
    await rotation.rotate_root()
    # The metadata store's administrator names the root that is in use now, with a leaf that nobody wrote.
    active = rotation._shared.roots.active.key
    by = "spiffe://eu.acme/operator/x"
    await rotation.ledger.add(DestroyedKey(key=active, level="root", by=by, at_ms=1, leaf=3))
    deleted = await brokers.catalog.delete_stream(ORDERS, deleted_ms=2, by=by)
    assert [root.hex() for root in await rotation.destroy_retired_roots(by)] == [old]
    file = brokers.home / "first" / ROOTS / f"{old}.key"
    for key in (deleted.key, old):
        await until(lambda key=key: rotation.ledger.find(key) is not None)  # type: ignore[misc]
        held = rotation.ledger.find(key)
        assert held is not None
        await until(lambda held=held: rotation.holding(held.created, held.record.key) == ())  # type: ignore[misc]
    assert not file.exists() and file.with_name(f"{active}.key").exists()
    with pytest.raises(FelixError):
        record.secret(brokers.region, FileKeyProvider(file.parent, brokers.region))
    assert await owed(brokers, "a") == {deleted.key, old}
    assert f"Root key {active} is in use here" in caplog.text
    forged = rotation.ledger.find(active)
    assert forged is not None and rotation.holding(forged.created, active) == ("a", "b")
    # Once that root is retired itself, its record is a new one, which every broker has to have carried out.
    await rotation.rotate_root()
    assert [root.hex() for root in await rotation.destroy_retired_roots(by)] == [active]
    await until(lambda: (held := rotation.ledger.find(active)) is not None and held.created > forged.created)
    made = rotation.ledger.find(active)
    assert made is not None and made.record.leaf is None
    await until(lambda: rotation.holding(made.created, active) == ())
    assert not file.with_name(f"{active}.key").exists()
    assert await owed(brokers, "a") == {deleted.key, old, active}
    await brokers.stop()
    await brokers.start("a")
    assert seal_of(brokers.running["a"], name=CARDS, life=OTHER_LIFE).open_batch(sealed) == batch(b"x")


async def test_a_root_that_cannot_be_destroyed_keeps_no_other_and_is_not_said_to_be(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rotation, "LOOK_S", 0.01)
    monkeypatch.setattr("region.streams.erasure.WAIT_S", 0.2)
    keys = await brokers.start("a")
    await keys.ensure(ORDERS, LIFE)
    rotation = brokers.rotations["a"]
    olds = []
    for _ in range(2):
        olds.append(keys.roots.active.key)
        await rotation.rotate_root()
    destroy = keys.keyring.destroy_root

    def failing(key_id: bytes) -> None:
        if key_id.hex() == olds[0]:
            raise KeyProviderError("The disk can only be read.")
        destroy(key_id)

    keys.keyring.destroy_root = failing  # type: ignore[method-assign]
    erasure = Erasure(SharedDestruction(rotation), cast("Any", None), brokers.region, REAL.clock.now_ms)
    said = await erasure.destroy_retired_roots("")
    assert said.startswith("2 retired root keys are to be destroyed, and not gone yet at a: ")
    folder = brokers.root_folder("a") / ROOTS
    await until(lambda: not (folder / f"{olds[1]}.key").exists())
    assert (folder / f"{olds[0]}.key").exists() and await owed(brokers, "a") == set()
    keys.keyring.destroy_root = destroy  # type: ignore[method-assign]
    await until(lambda: not rotation.holding(rotation.ledger.newest))
    assert not (folder / f"{olds[0]}.key").exists() and await owed(brokers, "a") == {*olds}


async def test_a_broker_that_may_need_a_retired_root_keeps_it_from_being_destroyed(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await brokers.start("a")
    await brokers.running["a"].ensure(ORDERS, LIFE)
    await brokers.rotations["a"].rotate_root()
    brokers.bring_roots("a", "b")
    await brokers.start("b")
    await until(lambda: "b" in brokers.rotations["a"]._followed)
    await brokers.stop("b")
    monkeypatch.setattr(key_rotation, "CONFIRM_S", 0.2)
    followed = brokers.rotations["a"]._followed
    followed["b"] = msgspec.structs.replace(
        followed["b"], under=(brokers.running["a"].roots.roots[0].key, "0")
    )
    with pytest.raises(RequestError, match="at b may be under a retired root key: no root key was") as told:
        await brokers.rotations["a"].destroy_retired_roots("")
    assert told.value.code is Code.CONFLICT and "until it names none" in told.value.hint


async def test_copies_whose_disk_failed_for_a_moment_are_written_anew_and_what_was_refused_is_copied_then(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = await brokers.start("a")
    await keys.ensure(ORDERS, LIFE)

    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", fails)
        with pytest.raises(UnavailableError, match="written anew by itself"):
            await keys.ensure(CARDS, OTHER_LIFE)
    assert keys.failure and "keys.log" in keys.trouble()
    assert brokers.knows("a", OTHER_LIFE) is None, "what is not copied is not used"
    sealed = seal_of(keys).seal(batch(b"x"))
    await asyncio.to_thread(keys.open_again)
    assert not keys.trouble()
    await keys.ensure(CARDS, OTHER_LIFE)
    await brokers.stop()
    for number in (LIFE, OTHER_LIFE):
        entry = await brokers.store.get(brokers.key(number))
        assert entry is not None and entry.value in brokers.copies("a")
        await brokers.store.transact([], [Delete(entry.key)])
    keys = await brokers.start("a")
    assert seal_of(keys).open_batch(sealed) == batch(b"x")
