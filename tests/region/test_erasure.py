"""Keys that are destroyed: nothing of them is left, and one leaf says so, whenever a crash comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audit_log import log_signer
from erased import key_leaves, scan
from region_home import make_region, running
from region_peer import until

import felix
from audit.errors import AuditUnavailableError
from audit.leaf import Header, Leaf
from audit.trail import Trail
from felix.errors import Code, CorruptionError, RequestError
from felix.names import StreamName
from keys.errors import KeyDestroyedError, KeyProviderError
from keys.keyring import ROOTS, Keyring, create_keyring, open_keyring
from region.folder import RegionFolder
from region.metadata.catalog import Catalog
from region.metadata.destroyed_keys import DestroyedKeys, Held
from region.metadata.memory import MemoryStore
from region.metadata.records import DestroyedKey, StreamConfig
from region.metadata.transaction import Compare, TransactResult, Write
from region.node import Node
from region.streams.erasure import Erasure, KeyringDestruction

CREW = StreamName.parse("acme/ops/crew")
KEPT = StreamName.parse("acme/ops/kept")
LIFE, OTHER_LIFE = b"i" * 16, b"j" * 16
OPERATOR = "spiffe://us-east.acme/operator/alice"
CANARY = b"the patient's name is a canary"


def wrapped_of(keyring: Keyring, stream: StreamName) -> list[bytes]:
    """Every wrapped key of a stream: its own, and its data keys."""
    tree = keyring._tree
    keys = [entry for entry in tree.streams.values() if entry.stream == str(stream)]
    data = [entry for entry in tree.data.values() if entry.stream_key_id in {key.key_id for key in keys}]
    return [entry.wrapped for entry in (*keys, *data)]


async def publish(client: felix.RegionClient, *names: StreamName) -> None:
    for name in names:
        await client.create_stream(name)
        await client.stream(name).publish(CANARY)


def audit_of(folder: RegionFolder) -> Path:
    """Where the region's audit log lies."""
    (note,) = folder.root.rglob("audit/checkpoint")
    return note.parent


def keyring_of(node: Node) -> Keyring:
    keyring = node.services.governance.keys._keyring
    assert isinstance(keyring, Keyring)
    return keyring


async def test_a_deleted_streams_key_is_in_no_byte_of_the_regions_folder_and_one_leaf_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = make_region(tmp_path, "us-east")
    async with running(folder) as node, felix.connect("us-east") as client:
        await publish(client, CREW, KEPT)
        await client.rotate_keys("data")
        await client.stream(CREW).publish(CANARY)
        secrets = wrapped_of(keyring_of(node), CREW)
        assert len(secrets) == 3 and all(secrets)
        assert scan(folder.root, *secrets)[1]
        incarnation = (await client.describe_stream(CREW)).incarnation
        said = await client.delete_stream(CREW)
        (key,) = (key for key in await client.list_keys(str(CREW)) if key.level == "stream")
        assert key.state == "destroyed" and f"Its key {key.id.hex()} is destroyed, and leaf " in said
        scanned, found = scan(folder.root, *secrets, CANARY)
        assert found == [] and scanned > 10_000
        await client.delete_stream(KEPT)
        await client.rotate_keys("root")
        (old,) = (key.id for key in await client.list_keys() if key.state == "decrypt-only")
        assert "Retired root key " in await client.destroy_retired_roots()
        assert await client.destroy_retired_roots() == "There is no retired root key."
        assert not (folder.keys / ROOTS / f"{old.hex()}.key").exists()
        assert {key.state for key in await client.list_keys() if key.id == old} == {"destroyed"}
        path = audit_of(folder)
    async with running(folder) as node:
        await node.broker.erasure.look()  # type: ignore[union-attr]
    leaves = key_leaves(path)
    assert [leaf.stream for leaf in leaves] == [str(CREW), str(KEPT), ""]
    assert (leaves[0].key_id, leaves[0].incarnation) == (key.id, incarnation)
    assert leaves[2].key_id == old and all("/operator/" in leaf.actor for leaf in leaves)


async def test_a_key_of_a_stream_that_was_deleted_before_is_destroyed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = make_region(tmp_path, "us-east")
    async with running(folder) as node, felix.connect("us-east") as client:
        await publish(client, CREW)
        secrets = wrapped_of(keyring_of(node), CREW)
        path = audit_of(folder)
        # As a release did that left the keys where they were.
        erasure = node.broker.erasure
        assert erasure is not None
        await erasure.close()
        await node.broker.catalog.delete_stream(CREW, deleted_ms=1)
    assert scan(folder.root, *secrets)[1]
    async with running(folder) as node:
        erasure = node.broker.erasure
        assert erasure is not None
        await until(lambda: [key.state for key in erasure.shown()] == ["destroyed"])
    assert scan(folder.root, *secrets, CANARY)[1] == []
    (leaf,) = key_leaves(path)
    assert leaf.stream == str(CREW) and leaf.actor == ""


# -- crashes -------------------------------------------------------------------------------------------


class CutOff(BaseException):
    """The process ends here."""


class Cuts:
    """Ends the process before the `at`-th write: what is on the disk then is what the write before it left."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def step(self) -> None:
        """A write begins."""
        self.seen += 1
        if self.seen == self.at:
            raise CutOff


class CutStore(MemoryStore):
    cuts: Cuts | None = None

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        if self.cuts is not None:
            self.cuts.step()
        return await super().transact(compares, writes)


def cut_off(cuts: Cuts, owner: Any, name: str) -> None:
    """Have a method of a part end the process before it writes."""
    real = getattr(owner, name)

    def called(*args: Any) -> Any:
        cuts.step()
        return real(*args)

    setattr(owner, name, called)


class World:
    """A region's metadata, keys and audit log on a disk, and a broker that begins with them again and again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = CutStore()
        self.catalog = Catalog(self.store, "us-east")
        create_keyring(home / "keys", "us-east")

    async def play(
        self, doing: Callable[[Erasure, Keyring], Awaitable[None]], cuts: Cuts | None = None
    ) -> bool:
        """Start, do this, stop; whether it came to the end."""
        keyring = open_keyring(self.home / "keys", "us-east")
        trail = await asyncio.to_thread(Trail.open, self.home / "audit", log_signer())
        ledger = DestroyedKeys(self.store, "us-east")
        await ledger.load()
        marks = {mark.incarnation: mark for mark in await self.catalog.deleted_streams()}

        async def is_closed(_: StreamName, __: str) -> bool:
            return True

        erasure = Erasure(
            KeyringDestruction(keyring, ledger, lambda: marks, is_closed), trail, "us-east", lambda: 5
        )
        try:
            if cuts is not None:
                self.store.cuts = cuts
                cut_off(cuts, trail, "append")
                cut_off(cuts, keyring._store, "append")
                cut_off(cuts, keyring._store, "rewrite")
                cut_off(cuts, keyring._provider, "destroy")
            await doing(erasure, keyring)
            return True
        except CutOff:
            return False
        finally:
            self.store.cuts = None
            keyring.close()
            await asyncio.to_thread(trail.close)

    async def has_stream(self, name: StreamName, incarnation: bytes) -> None:
        await self.catalog.create_stream(name, StreamConfig(), incarnation=incarnation, created_ms=1)

        async def write(_: Erasure, keyring: Keyring) -> None:
            keyring.data_key_for_writing(name, incarnation, 0, 1)

        await self.play(write)

    def leaves(self) -> list[Header]:
        return key_leaves(self.home / "audit")


def destroyed_in(keyring: Keyring) -> dict[bytes, str]:
    """The destroyed root and stream keys, each with its stream."""
    return {
        key.key_id: key.stream for key in keyring.list() if key.level != "data" and key.state == "destroyed"
    }


async def test_a_crash_at_any_write_leaves_one_leaf_for_each_key_and_no_key_once_the_broker_has_started(
    tmp_path: Path,
) -> None:
    async def erase(erasure: Erasure, _: Keyring) -> None:
        await erasure.look()
        await erasure._destruction.begin_roots(OPERATOR)
        await erasure.look()

    for at in range(1, 20):
        world = World(tmp_path / str(at))
        await world.catalog.create_stream(CREW, StreamConfig(), incarnation=LIFE, created_ms=1)

        async def begin(erasure: Erasure, keyring: Keyring) -> None:
            keyring.data_key_for_writing(CREW, LIFE, 0, 1)
            keyring.data_key_for_writing(KEPT, OTHER_LIFE, 0, 1)
            keyring.rotate_root()

        await world.play(begin)
        await world.catalog.delete_stream(CREW, deleted_ms=2, by=OPERATOR)
        ended = await world.play(erase, Cuts(at))
        told = {leaf.key_id for leaf in world.leaves()}

        async def again(erasure: Erasure, keyring: Keyring, told: set[bytes] = told) -> None:
            # No leaf of what was not done.
            assert told <= destroyed_in(keyring).keys()
            await erase(erasure, keyring)

        found: dict[bytes, str] = {}

        async def judge(erasure: Erasure, keyring: Keyring, found: dict[bytes, str] = found) -> None:
            await erase(erasure, keyring)
            found.update(destroyed_in(keyring))
            with pytest.raises(KeyDestroyedError):
                keyring.link_secrets(CREW, LIFE, "g", bytes(32), "p")
            keyring.link_secrets(KEPT, OTHER_LIFE, "g", bytes(32), "p")

        await world.play(again)
        await world.play(judge)
        assert sorted(found.values()) == ["", str(CREW)]
        leaves = world.leaves()
        assert {leaf.key_id: leaf.stream for leaf in leaves} == found and len(leaves) == 2
        assert {leaf.actor for leaf in leaves} == {OPERATOR}
        if ended:
            # A record, the key, how long the log is, its leaf, which one; and of a root its file.
            assert at == 5 + 6 + 1
            return
    raise AssertionError("it never came to the end")


async def test_a_leaf_whose_append_may_have_been_done_is_looked_for_and_not_written_again(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.has_stream(CREW, LIFE)
    await world.catalog.delete_stream(CREW, deleted_ms=2, by=OPERATOR)

    async def lose(erasure: Erasure, keyring: Keyring) -> None:
        trail, append = erasure._trail, erasure._trail.append

        async def lost(leaves: Sequence[Leaf]) -> int:
            await append(leaves)
            raise AuditUnavailableError("It is not known.")

        trail.append = lost  # type: ignore[method-assign, assignment]
        with pytest.raises(AuditUnavailableError):
            await erasure.look()
        assert [key.state for key in erasure.shown()] == ["destroying"]
        trail.append = append  # type: ignore[method-assign]
        await erasure.look()
        assert [key.state for key in erasure.shown()] == ["destroyed"]

    await world.play(lose)
    assert len(world.leaves()) == 1


async def test_a_root_that_wraps_a_key_is_not_destroyed(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.has_stream(CREW, LIFE)

    async def refused(erasure: Erasure, keyring: Keyring) -> None:
        active = keyring._tree.active_root()
        assert (
            active is not None
            and await erasure.destroy_retired_roots(OPERATOR) == "There is no retired root key."
        )
        with pytest.raises(RequestError) as told:
            keyring.destroy_root(active)
        assert told.value.code is Code.CONFLICT and "rotate root" in told.value.hint

    await world.play(refused)
    assert world.leaves() == []


async def test_whoever_deletes_may_go_while_the_leaf_is_on_its_way(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.has_stream(CREW, LIFE)
    mark = await world.catalog.delete_stream(CREW, deleted_ms=2, by=OPERATOR)

    async def leave(erasure: Erasure, _: Keyring) -> None:
        append, appending, goes_on = erasure._trail.append, asyncio.Event(), asyncio.Event()
        sent = list[asyncio.Task[int]]()

        async def sent_late(leaves: Sequence[Leaf]) -> int:
            await goes_on.wait()
            return await append(leaves)

        async def slow(leaves: Sequence[Leaf]) -> int:
            # Cancelling the wait does not take the leaves back.
            sent.append(asyncio.ensure_future(sent_late(leaves)))
            appending.set()
            return await asyncio.shield(sent[-1])

        erasure._trail.append = slow  # type: ignore[method-assign, assignment]
        deleting = asyncio.ensure_future(erasure.stream_deleted(mark))
        await asyncio.sleep(0)
        erasure.start()
        await appending.wait()
        deleting.cancel()
        await asyncio.wait([deleting])
        goes_on.set()
        await until(lambda: [key.state for key in erasure.shown()] == ["destroyed"])
        await erasure.close()
        await asyncio.gather(*sent)

    await world.play(leave)
    assert len(world.leaves()) == 1


async def test_a_key_whose_logs_were_open_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("region.streams.erasure.AGAIN_S", 0.01)
    world = World(tmp_path)
    await world.has_stream(CREW, LIFE)
    await world.catalog.delete_stream(CREW, deleted_ms=2, by=OPERATOR)

    async def wait(erasure: Erasure, _: Keyring) -> None:
        asked = 0

        async def is_closed(_: StreamName, __: str) -> bool:
            nonlocal asked
            asked += 1
            return asked > 2

        assert isinstance(erasure._destruction, KeyringDestruction)
        erasure._destruction._is_closed = is_closed
        erasure.start()
        await until(lambda: [key.state for key in erasure.shown()] == ["destroyed"])
        await erasure.close()

    await world.play(wait)
    assert len(world.leaves()) == 1


async def test_a_record_of_a_key_in_use_and_one_of_no_key_keep_no_other_from_its_leaf(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.has_stream(CREW, LIFE)
    await world.catalog.delete_stream(CREW, deleted_ms=2, by=OPERATOR)

    async def foreign(erasure: Erasure, keyring: Keyring) -> None:
        active = keyring._tree.active_root()
        assert active is not None
        ledger = erasure._destruction.ledger
        await ledger.add(DestroyedKey(key=active.hex(), level="root", at_ms=1))
        with pytest.raises(CorruptionError):
            await ledger.add(DestroyedKey(key="no key", level="stream", stream=str(KEPT), at_ms=1))
        await erasure.look()
        assert active not in {key.id for key in erasure.shown()}
        assert active not in destroyed_in(keyring)

    await world.play(foreign)
    assert [leaf.stream for leaf in world.leaves()] == [str(CREW)]


@pytest.mark.parametrize(
    "changed",
    [
        {"by": "Whose records these were. " * 20},
        {"by": "spiffe://us-east.acme/operator/\u202e"},
        {"stream": "no stream at all"},
        {"stream": ""},
        {"incarnation": ""},
        {"level": "root"},
        {"since": -1},
    ],
    ids=str,
)
async def test_a_record_with_any_other_text_than_names_is_no_brokers(changed: dict[str, object]) -> None:
    good = DestroyedKey(
        key="ab" * 16, level="stream", stream=str(KEPT), incarnation=LIFE.hex(), by=OPERATOR, at_ms=1
    )
    store = MemoryStore()
    ledger = DestroyedKeys(store, "us-east")
    with pytest.raises(CorruptionError, match=good.key):
        await ledger.add(msgspec.structs.replace(good, **changed))
    assert not ledger.all()
    other = msgspec.structs.replace(good, key="cd" * 16)
    assert (await ledger.add(other)).record == other
    heard = DestroyedKeys(store, "us-east")
    await heard.load()
    assert [held.record for held in heard.all()] == [other]


async def test_a_record_that_gets_no_leaf_keeps_no_other_from_its_own(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.has_stream(CREW, LIFE)
    await world.has_stream(KEPT, OTHER_LIFE)
    for name in (CREW, KEPT):
        await world.catalog.delete_stream(name, deleted_ms=2, by=OPERATOR)

    async def fails_once(erasure: Erasure, _: Keyring) -> None:
        write, tried = erasure._write, list[str]()

        async def failing(held: Held) -> None:
            tried.append(held.record.stream)
            if len(tried) == 1:
                raise RequestError("It has no leaf.")
            await write(held)

        erasure._write = failing  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="It has no leaf"):
            await erasure.look()
        assert sorted(tried) == [str(CREW), str(KEPT)]

    await world.play(fails_once)
    assert len(world.leaves()) == 1


async def test_a_key_that_cannot_be_destroyed_yet_is_not_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("region.streams.erasure.WAIT_S", 0.01)
    world = World(tmp_path)
    await world.has_stream(CREW, LIFE)
    mark = await world.catalog.delete_stream(CREW, deleted_ms=2, by=OPERATOR)

    async def fails(erasure: Erasure, keyring: Keyring) -> None:
        def destroy(*_: object) -> list[bytes]:
            raise KeyProviderError("The disk is full.")

        keyring.destroy = destroy  # type: ignore[method-assign]
        with pytest.raises(KeyProviderError):
            await erasure.look()
        assert " is destroyed or about to be: " in await erasure.stream_deleted(mark)

    await world.play(fails)
    assert world.leaves() == []
