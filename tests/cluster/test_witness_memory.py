"""What a region of several brokers has cosigned, when its metadata store alone is put back and another broker goes on with the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from cluster.audited import home_of, key_leaf
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until
from slow_runs import only_slow
from witness_logs import Log

from audit.checkpoint import note_size
from audit.witness import DiskWitnessStore, ForkError
from felix.errors import UnavailableError
from felix.names import SpiffeId
from region.cluster.records import ShardId, ShardRecord
from region.evidence import audit_log
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.records import Keys
from region.metadata.transaction import Delete, Put

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd

ACTOR = SpiffeId("eu-west", "acme", "bridge", "us-to-eu")


class Scene:
    """A region, and a log of elsewhere with two histories that part behind 3 leaves."""

    def __init__(self, region: ClusteredRegion, store: EtcdStore) -> None:
        self.region, self.store = region, store
        self.log, self.fork = Log(), Log()
        for each in (self.log, self.fork):
            each.head(3)
        self.fork.word = b"fork"
        self.key = Keys("us-east").witness(sha256(self.log.origin.encode()).hexdigest())

    async def cosign(self, name: str, log: Log, old: int, size: int) -> None:
        witnessing = self.region.nodes[name].services.governance.witnessing
        witnessing.witness.trust(log.signer.key)
        proof = log.proof(old, size) if old else []
        await witnessing.cosign(ACTOR, log.note(size), proof)

    async def cosigned(self, log: Log, old: int, size: int) -> str:
        """By whoever is home, once it can, with a proof from what it says that it has; who that is."""
        async with asyncio.timeout(60):
            while True:
                home = await home_of(self.region)
                witnessing = self.region.nodes[home].services.governance.witnessing
                witnessing.witness.trust(log.signer.key)
                known = (await witnessing.witnessed_size(log.origin)).size
                assert known in (old, size)
                try:
                    await self.cosign(home, log, known % size, size)
                except UnavailableError:
                    await asyncio.sleep(0.2)
                else:
                    return home

    async def refuses(self, name: str, old: int, size: int) -> None:
        """The other history, whatever of it is offered."""
        for begin in {0, old}:
            with pytest.raises(ForkError):
                await self.cosign(name, self.fork, begin, size)

    def files(self) -> dict[str, list[int]]:
        """What stands beside the store in each broker's folder."""
        root, config = self.region.folder.root, self.region.config
        return {
            name: [
                note_size(note)
                for note in DiskWitnessStore(root / config.of_broker(name).data / "witness").notes()
            ]
            for name in self.region.names
        }

    async def stored(self) -> bytes | None:
        entry = await self.store.get(self.key)
        return None if entry is None else entry.value

    async def put_back(self, note: bytes | None) -> None:
        await self.store.transact([], [Delete(self.key) if note is None else Put(self.key, note)])

    async def has_left(self, name: str, seen_by: str) -> None:
        """Wait until no commit of the audit log waits for a broker."""
        async with asyncio.timeout(60):
            await self.region.clustered(seen_by).member.until(lambda: name not in self.record(seen_by).isr)

    async def is_in_sync(self, name: str) -> None:
        """Wait until every commit of the audit log waits for a broker that runs, as all know, and its logs are open."""
        registration = self.region.clustered(name).member.registry.registration

        def is_so() -> bool:
            views = [self.region.clustered(each).member.mirror.view for each in self.region.nodes]
            return all(
                view.shards[self.shard(name)].isr.get(name) == registration and view.alive[name].health.open
                for view in views
            )

        await until(is_so, 60)

    def shard(self, seen_by: str) -> ShardId:
        """That of the audit log."""
        stream = self.region.clustered(seen_by).member.audit.stream
        assert stream is not None
        return ShardId(stream.incarnation, 0)

    def record(self, seen_by: str) -> ShardRecord:
        """Of the audit log, as a running broker knows it."""
        return self.region.clustered(seen_by).member.mirror.view.shards[self.shard(seen_by)]


@asynccontextmanager
async def cosigning(tmp_path: Path, etcd: EtcdProcess) -> AsyncIterator[Scene]:
    async with serving(tmp_path, etcd) as region:
        store = await EtcdStore.open(EtcdConfig((etcd.endpoint.removeprefix("http://"),)))
        try:
            yield Scene(region, store)
        finally:
            await store.close()


@pytest.mark.parametrize("is_deleted", [False, True], ids=["an-earlier-note", "deleted"])
async def test_another_home_signs_no_second_history_when_the_stores_record_is_put_back(
    tmp_path: Path, etcd: EtcdProcess, is_deleted: bool
) -> None:
    async with cosigning(tmp_path, etcd) as scene:
        await scene.cosigned(scene.log, 0, 3)
        early = await scene.stored()
        home = await scene.cosigned(scene.log, 3, 6)
        await until(lambda: set(map(tuple, scene.files().values())) == {(6,)}, 30)
        await scene.put_back(None if is_deleted else early)
        await scene.refuses(home, 3, 6)
        await scene.region.stop(home)
        later = await home_of(scene.region)
        assert later != home
        await scene.put_back(None if is_deleted else early)
        await scene.refuses(later, 3, 6)
        await scene.refuses(later, 3, 7)
        assert await scene.cosigned(scene.log, 6, 8) == later
        stored = await scene.stored()
        assert stored is not None and note_size(stored) == 8, "the store knows it again"


async def test_what_was_cosigned_while_a_broker_was_away_is_known_to_it_before_it_is_home(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with cosigning(tmp_path, etcd) as scene:
        region = scene.region
        home = await scene.cosigned(scene.log, 0, 3)
        early = await scene.stored()
        await until(
            lambda: (
                sorted(scene.record(home).replicas) == sorted(scene.record(home).isr) == list(region.names)
            ),
            60,
        )
        for name in region.names:
            await scene.is_in_sync(name)
        # Of two that are in sync the earlier replica is elected.
        away, other = (name for name in scene.record(home).replicas if name != home)
        await region.stop(away)
        await scene.has_left(away, home)
        assert await scene.cosigned(scene.log, 3, 6) == home, "nobody waits for who is away"
        await until(lambda: scene.files()[other] == [6], 30)
        assert scene.files()[away] != [6]
        await scene.put_back(early)
        await region.start(away)
        await scene.is_in_sync(away)
        await scene.put_back(early)
        await region.stop(home)
        assert await home_of(region) == away
        await scene.refuses(away, 3, 6)
        assert await scene.cosigned(scene.log, 6, 7) == away


async def test_nothing_is_signed_that_no_other_copy_has_and_no_other_history_in_its_place(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "COMMIT_S", 1.0)
    async with cosigning(tmp_path, etcd) as scene:
        region = scene.region
        home = await scene.cosigned(scene.log, 0, 3)
        others = [name for name in region.names if name != home]
        await until(lambda: set(map(tuple, scene.files().values())) == {(3,)}, 30)
        await region.stop(*others)
        with pytest.raises(UnavailableError):
            await scene.cosign(home, scene.log, 3, 6)
        stored = await scene.stored()
        assert stored is not None and note_size(stored) == 3
        assert set(map(tuple, scene.files().values())) == {(3,)}
        with pytest.raises((ForkError, UnavailableError)):
            await scene.cosign(home, scene.fork, 3, 5)
        await region.start(*others)
        later = await scene.cosigned(scene.log, 3, 6)
        await scene.refuses(later, 3, 6)
        await until(lambda: set(map(tuple, scene.files().values())) == {(6,)}, 30)


async def test_a_later_note_that_somebody_put_into_the_store_does_not_count(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with cosigning(tmp_path, etcd) as scene:
        home = await scene.cosigned(scene.log, 0, 6)
        await scene.put_back(scene.fork.note(7))
        await scene.refuses(home, 7, 8)
        assert await scene.cosigned(scene.log, 6, 7) == home


@only_slow
async def test_a_cosigned_note_outlives_the_letting_go_of_old_checkpoints(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "CHECKPOINTS_BYTES", 6_000)
    async with cosigning(tmp_path, etcd) as scene:
        region = scene.region
        await scene.cosigned(scene.log, 0, 3)
        early = await scene.stored()
        home = await scene.cosigned(scene.log, 3, 6)
        shard = scene.shard(home)
        replicas = region.clustered(home).replicas
        assert replicas is not None
        committed = replicas.host.committed(shard, audit_log.CHECKPOINTS)
        trail = region.nodes[home].services.governance.trail

        def start() -> int:
            return replicas.host._hosted[shard].core.replica.logs[audit_log.CHECKPOINTS].start.offset

        # It is let go of once a second at most, and not while it is read.
        for number in range(2_000):
            await trail.append([key_leaf(number)])
            await asyncio.to_thread(trail.publish)
            if start() >= committed.offset:
                break
        assert start() >= committed.offset, "the append of the note is gone"
        # Files of before, and the store: what is known now is from the stream alone.
        later = [name for name in region.names if name != home]
        await region.stop(*later)
        root, config = region.folder.root, region.config
        for name in later:
            for file in (root / config.of_broker(name).data / "witness").iterdir():
                file.unlink()
        await region.start(*later)
        for name in later:
            await scene.is_in_sync(name)
        await scene.put_back(early)
        await region.stop(home)
        await scene.refuses(await home_of(region), 3, 6)
