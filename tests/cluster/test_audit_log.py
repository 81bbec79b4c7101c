"""The audit log of a region of several brokers: copied to them, written by one, gone on with by another."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster.audited import home_of, key_leaf, log_of, retried, shows, trail_of, verified
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until
from slow_runs import only_slow

from audit import published_disk
from audit.checkpoint import Checkpoint, note_size
from audit.document_leaf import document_path
from audit.leaf import encode_for_log
from audit.merkle import Tree, leaf_hash
from audit.tile import bundle_path
from audit.tile_disk import Folder
from felix.batch import Batch
from felix.errors import CorruptionError, FelixError, UnavailableError
from region.cluster.node_file import NodeFile
from region.cluster.records import ShardId
from region.evidence import audit_log
from region.evidence.audit_log import Leading
from region.log.directory import folder_name
from region.log.shard import ShardLog
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.records import AUDIT_STREAM
from region.metadata.transaction import Delete, Put

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd


async def test_each_broker_has_the_log_and_another_goes_on_with_it(tmp_path: Path, etcd: EtcdProcess) -> None:
    async with serving(tmp_path, etcd, 3) as region:
        home = await home_of(region)
        trail = region.nodes[home].services.governance.trail
        assert [await trail.append([key_leaf(number)]) for number in range(5)] == list(range(5))
        note = await asyncio.to_thread(trail.publish)
        assert note_size(note) == 5
        trails = {name: node.services.governance.trail for name, node in region.nodes.items()}
        await until(lambda: all(note_size(each.checkpoint()) == 5 for each in trails.values()), 30)
        assert len({each.checkpoint() for each in trails.values()}) == 1
        await trail.append([key_leaf(5)])
        await region.stop(home)
        assert len(verified(region, home)) == 6, "who stops in order leaves nothing without a checkpoint"
        other = await home_of(region)
        assert other != home
        assert await trails[other].append([key_leaf(6)]) == 6
        await region.start(home)
        await until(lambda: note_size(region.nodes[home].services.governance.trail.checkpoint()) == 7, 30)


async def test_a_copy_whose_folders_are_gone_or_behind_gets_the_rest_from_the_others(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 3) as region:
        home = await home_of(region)
        trail = trail_of(region, home)
        behind, gone = (name for name in region.nodes if name != home)
        for number in range(5):
            await retried(lambda number=number: trail.append([key_leaf(number)]))
        for name in (behind, gone):
            await shows(region, name, 5)
        older = tmp_path / "older"
        await region.stop(behind)
        shutil.copytree(log_of(region, behind).path, older)
        await region.start(behind)
        for number in range(5, 305, 10):
            # Refused, and not written, while copies are slow.
            leaves = [key_leaf(each) for each in range(number, number + 10)]
            await retried(lambda leaves=leaves: trail.append(leaves))
        await shows(region, behind, 305)
        # As where the power went between the commit and the tiles, and where a disk was replaced.
        await region.stop(behind)
        shutil.rmtree(log_of(region, behind).path)
        shutil.copytree(older, log_of(region, behind).path)
        await region.start(behind)
        await shows(region, behind, 305)
        await region.stop(gone)
        shutil.rmtree(log_of(region, gone).path)
        audited = region.clustered(home).member.audit.stream
        assert audited is not None
        data = region.folder.root / region.config.of_broker(gone).data / "streams"
        shutil.rmtree(data / folder_name(AUDIT_STREAM, bytes.fromhex(audited.incarnation)))
        await region.start(gone)
        await shows(region, gone, 305)
        # One file alone is lost; it begins amid an append.
        await region.stop(behind)
        (log_of(region, behind).path / bundle_path(1, 305 - 256)).unlink()
        await region.start(behind)
        await until(lambda: not trail_of(region, behind).lacks_newest, 60)
        whole = verified(region, home)
        assert len(whole) == 305 and verified(region, behind) == verified(region, gone) == whole


async def test_a_long_document_is_beside_every_copy_before_its_leaf(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 3) as region:
        trail = trail_of(region, home := await home_of(region))
        document = b"long" * 200_000
        await asyncio.to_thread(trail.keep_document, document)
        await trail.append([key_leaf(0)])
        for name in region.nodes:
            await shows(region, name, 1)
            path = log_of(region, name).path / document_path(sha256(document).digest())
            await until(path.exists)
            assert path.read_bytes() == document
        other = next(name for name in region.nodes if name != home)
        with pytest.raises(UnavailableError, match="written by broker"):
            await asyncio.to_thread(trail_of(region, other).keep_document, document)


async def test_an_append_of_many_batches_is_finished_by_who_goes_on_or_was_not_begun(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "BATCH_BYTES", 600)
    write, begun = audit_log.finish, asyncio.Event()

    async def stop_after_the_first(log: ShardLog, first: int, batches: Sequence[Batch]) -> None:
        await write(log, first, batches[:1])
        begun.set()
        await asyncio.Event().wait()

    async with serving(tmp_path, etcd, 3) as region:
        home = await home_of(region)
        trail = trail_of(region, home)
        assert await trail.append([key_leaf(number) for number in range(10)]) == 0
        monkeypatch.setattr(audit_log, "finish", stop_after_the_first)
        lost = asyncio.ensure_future(trail.append([key_leaf(number) for number in range(10, 20)]))
        after = asyncio.ensure_future(trail.append([key_leaf(20)]))
        await begun.wait()
        assert note_size(await asyncio.to_thread(trail.publish)) == 10, "a part is in no tree"
        monkeypatch.setattr(audit_log, "finish", write)
        await region.stop(home)
        for each in (lost, after):
            with pytest.raises(UnavailableError, match="not known whether"):
                await each
        other = await home_of(region)
        assert trail_of(region, other).status().durable == 20
        assert await trail_of(region, other).append([key_leaf(20)]) == 20
        await region.start(home)
        for name in region.nodes:
            await shows(region, name, 21)
        leaves = verified(region, home)
        assert leaves == [encode_for_log(key_leaf(number)).data for number in range(21)]


def answer_before_it_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule left out: a leaf counts as soon as it was handed over."""
    append = Leading.append

    def at_once(
        self: Leading, first: int, leaves: Sequence[bytes], done: Callable[[FelixError | None], None]
    ) -> None:
        append(self, first, leaves, lambda error: None)
        done(None)

    monkeypatch.setattr(Leading, "append", at_once)


@pytest.mark.parametrize("is_left_out", [False, pytest.param(True, marks=only_slow)])
async def test_what_one_broker_alone_has_is_not_signed_so_that_another_may_go_on_without_it(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch, is_left_out: bool
) -> None:
    signed: list[Checkpoint] = []

    def record(checkpoint: Checkpoint, *more: Any) -> Any:
        signed.append(checkpoint)
        return sign(checkpoint, *more)

    sign = published_disk.sign_checkpoint
    monkeypatch.setattr(published_disk, "sign_checkpoint", record)
    if is_left_out:
        answer_before_it_is_committed(monkeypatch)
    async with serving(tmp_path, etcd, 3) as region:
        home = await home_of(region)
        others = [name for name in region.nodes if name != home]
        trail = trail_of(region, home)
        await trail.append([key_leaf(0)])
        for name in region.nodes:
            await shows(region, name, 1)
        # The others hear nothing any more, and acknowledge nothing.
        for name in others:
            replicas = region.clustered(name).replicas
            assert replicas is not None
            monkeypatch.setattr(replicas.host, "heard", lambda peer, said: None)
        lost = asyncio.ensure_future(trail.append([key_leaf(1)]))
        ended = trail.status
        await until(lambda: ended().size == 2)
        if is_left_out:
            await until(lambda: signed[-1].size == 2)
            assert committed_leaves(region, home) == 1, "what is signed may be lost"
            return
        await region.stop(home)
        with contextlib.suppress(UnavailableError):
            await lost
        for name in others:
            replicas = region.clustered(name).replicas
            assert replicas is not None
            monkeypatch.setattr(replicas.host, "heard", type(replicas.host).heard.__get__(replicas.host))
        # Who was elected while the other one did not hear it may let that one lead.
        await until(lambda: home_now(region) != "", 60)
        await retried(lambda: trail_of(region, home_now(region) or others[0]).append([key_leaf(2)]))
        other = await home_of(region)
        size = trail_of(region, other).status().durable
        await region.start(home)
        for name in region.nodes:
            await shows(region, name, size)
        leaves = verified(region, home)
        assert leaves == verified(region, other)
        assert all(each.root == root_of(leaves[: each.size]) for each in signed)


@pytest.mark.parametrize("is_for_good", [False, True], ids=["for a moment", "for good"])
async def test_a_home_whose_files_cannot_be_written_is_home_again_or_lets_another_lead(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch, is_for_good: bool
) -> None:
    """Its copy of the stream has a disk that works, so it goes on leading that."""
    monkeypatch.setattr(audit_log, "LET_LEAD_S", 0.5)
    async with serving(tmp_path, etcd, 3) as region:
        home = await home_of(region)
        trail, is_full = trail_of(region, home), asyncio.Event()
        write = Folder.write

        def full(folder: Folder, path: str, data: bytes) -> None:
            if is_full.is_set() and folder.path == trail.files.path:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(folder, path, data)

        monkeypatch.setattr(Folder, "write", full)
        await retried(lambda: trail.append([key_leaf(0)]))
        is_full.set()
        with contextlib.suppress(FelixError):
            await trail.append([key_leaf(1)])
            await asyncio.to_thread(trail.publish)
        await until(lambda: trail.stopped is not None, 30)
        if not is_for_good:
            is_full.clear()
        await until(lambda: not region.clustered(home).has_audit_log, 30)
        if is_for_good:
            await until(lambda: home_now(region) not in ("", home), 60)
        later = await home_of(region)
        await retried(lambda: trail_of(region, later).append([key_leaf(2)]))
        await asyncio.to_thread(trail_of(region, later).publish)
        if is_for_good:
            await until(lambda: "No space left" in str(region.clustered(home).alarms([])), 30)
        is_full.clear()
        await shows(region, home, note_size(trail_of(region, later).checkpoint()))
        assert verified(region, home) == verified(region, later)


async def test_a_store_that_names_no_audit_log_any_more_or_another_one_begins_no_second_history(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, etcd, 3, started=2) as region:
        home = await home_of(region)
        for number in range(3):
            await retried(lambda number=number: trail_of(region, home).append([key_leaf(number)]))  # type: ignore[misc]
        await asyncio.to_thread(trail_of(region, home).publish)
        for name in region.nodes:
            await shows(region, name, 3)
        member = region.clustered(home).member
        audited, keys = member.audit, member.mirror.view.keys
        assert audited.stream is not None
        key, shard = keys.audit_home, keys.shard(ShardId(audited.stream.incarnation, 0))
        await region.stop()
        store = await EtcdStore.open(EtcdConfig(endpoints=(etcd.endpoint.removeprefix("http://"),)))
        try:
            before = await store.get(key)
            await store.transact([], [Delete(key)])
            with pytest.raises(CorruptionError, match="does not say where the region's audit log is"):
                await region.start("b3")
            await region.start("b1")
            found = await store.get(key)
            assert before is not None and found is not None and found.value == before.value, "it puts it back"
            await region.stop()
            other = msgspec.structs.replace(audited, incarnation="ab" * 16)
            await store.transact([], [Delete(shard), Put(key, msgspec.json.encode(other))])
            with pytest.raises(CorruptionError, match="names another audit log"):
                await region.start("b1")
        finally:
            await store.close()
        # Folders that do not know it: who has leaves that were signed goes on with nothing that lacks them.
        loaded = NodeFile.load
        monkeypatch.setattr(NodeFile, "load", lambda self: msgspec.structs.replace(loaded(self), audit=""))
        await region.start("b1", "b2")
        await until(
            lambda: any("rolled back" in str(region.clustered(name).alarms([])) for name in region.nodes), 60
        )
        assert not any(region.clustered(name).has_audit_log for name in region.nodes)
        assert len(verified(region, home)) == 3


def home_now(region: ClusteredRegion) -> str:
    return next((name for name in region.nodes if region.clustered(name).has_audit_log), "")


def committed_leaves(region: ClusteredRegion, name: str) -> int:
    clustered = region.clustered(name)
    stream, replicas = clustered.member.audit.stream, clustered.replicas
    assert stream is not None and replicas is not None
    return replicas.host.committed(ShardId(stream.incarnation, 0), audit_log.LEAVES).offset


def root_of(leaves: Sequence[bytes]) -> bytes:
    tree = Tree()
    for leaf in leaves:
        tree.add(leaf_hash(leaf))
    return tree.root()


async def test_a_record_among_its_documents_that_is_none_stops_no_broker(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 3) as region:
        trail = trail_of(region, home := await home_of(region))
        await trail.append([key_leaf(0)])
        leading = region.clustered(home).audit._leading
        assert leading is not None
        await leading._write(audit_log.DOCUMENTS, [b"\xc1", msgspec.msgpack.encode([1, 2])])
        document = b"long" * 20_000
        await asyncio.to_thread(trail.keep_document, document)
        await trail.append([key_leaf(1)])
        for name in region.nodes:
            await shows(region, name, 2)
            await until((log_of(region, name).path / document_path(sha256(document).digest())).exists)
        await region.stop(home)
        other = await home_of(region)
        assert await trail_of(region, other).append([key_leaf(2)]) == 2
        await region.start(home)
        await shows(region, home, 3)
