"""An audit log on one broker's disk becomes the one that brokers copy: one history, wherever it was cut off, and whoever meddles (decision 0132)."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster.audited import home_of, key_leaf, log_of, retried, shows, trail_of, verified
from cluster.clustered_region import ClusteredRegion
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until
from slow_runs import only_slow

from audit import copied_disk
from audit.checkpoint import note_size
from audit.document_leaf import document_path
from audit.errors import RolledBackError
from audit.leaf import encode_for_log, read_header
from audit.note import Algorithm, NoteSigner, encode_note, parse_note
from audit.tile import COPIED_PATH, WAL_FOLDER
from audit.trust import Trust
from felix.batch import Batch, NewRecord, encode_batch
from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.runtime.real import REAL
from felix.storage.disk import PRIVATE_FILES
from keys.signing import SigningKey
from region import reconciliation
from region.cluster.audit_home import AuditHome, Before
from region.cluster.mirror import ClusterMirror
from region.cluster.node_file import NodeFile
from region.cluster.records import ClusterKeys, ShardId, ShardRecord, encode
from region.evidence import audit_log
from region.evidence import opening as evidence
from region.evidence.copying_audit_log import Plan, copy_audit_log
from region.inventory import take_inventory
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.transaction import Delete, Put
from region.reconciling import Reconciler
from region.trust.log_keys import change_log_keys
from region.trust.trusted_bundles import own_bundle

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd

KEYS = ClusterKeys("us-east")
LEAVES = 300
"""More than a bundle has."""
DOCUMENT = b"long" * 200_000


@asynccontextmanager
async def store_of(etcd: EtcdProcess) -> AsyncIterator[EtcdStore]:
    store = await EtcdStore.open(EtcdConfig(endpoints=(etcd.endpoint.removeprefix("http://"),)))
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def one_disk(home: Path, etcd: EtcdProcess, brokers: int = 2) -> AsyncIterator[ClusteredRegion]:
    """A region whose audit log is on the disk of b1, with LEAVES leaves and a long document; b1 was stopped."""
    region = ClusteredRegion(home, etcd, brokers)
    async with store_of(etcd) as store:
        await store.transact([], [Put(KEYS.audit_home, AuditHome("b1").encode().encode())])
    try:
        await region.start("b1")
        await region.heard()
        trail = trail_of(region, "b1")
        await asyncio.to_thread(trail.keep_document, DOCUMENT)
        await trail.append([key_leaf(number) for number in range(LEAVES)])
        await region.stop()
        assert len(verified(region, "b1")) == LEAVES
        yield region
    finally:
        await region.stop()


async def copied(region: ClusteredRegion, etcd: EtcdProcess, *, dry_run: bool = False) -> Plan:
    own = own_bundle(region.folder, region.config)
    async with store_of(etcd) as store:
        return await copy_audit_log(store, region.folder, region.config, own, REAL, dry_run=dry_run)


async def reconciled(region: ClusteredRegion, store: EtcdStore) -> reconciliation.Plan:
    """The store fits what the folders of both brokers know, from now on."""
    reports: dict[str, reconciliation.FolderReport] = {}
    for broker in ("b1", "b2"):
        data = region.folder.root / region.config.of_broker(broker).data
        told = await asyncio.to_thread(take_inventory, "us-east", broker, data, REAL)
        assert told is not None
        reports[broker] = told
    reconciler = Reconciler(store, "us-east", REAL, lambda sentence: None)
    try:
        await reconciler.open()
        plan = await reconciler.plan(reports, reports, ())
        await reconciler.write(plan)
        return plan
    finally:
        await reconciler.close()


@contextlib.contextmanager
def cut_off(monkeypatch: pytest.MonkeyPatch, *calls: tuple[Any, str, int]) -> Iterator[None]:
    """Each of these functions fails once it was called so often."""
    with monkeypatch.context() as patched:
        for owner, name, count in calls:
            left, function = iter(range(count)), getattr(owner, name)

            def failing(*args: Any, left: Iterator[int] = left, function: Any = function, **more: Any) -> Any:
                if next(left, None) is None:
                    raise UnavailableError("Cut off.")
                return function(*args, **more)

            patched.setattr(owner, name, failing)
        yield


async def troubled(region: ClusteredRegion, broker: str, sentence: str) -> None:
    await until(lambda: any(sentence in each for each in region.clustered(broker).alarms([])), 60)


async def test_a_log_on_one_disk_goes_on_as_copies_wherever_that_was_cut_off(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "BATCH_BYTES", 20_000)
    witness = NoteSigner.from_key("witness.example/w", SigningKey.generate(), Algorithm.COSIGNATURE)
    monkeypatch.setattr(Trust, "witnesses_for", lambda trust, name: {witness.key: "w"})
    monkeypatch.setattr(evidence, "witnesses_of", lambda bundles, name: (witness.key,))
    async with one_disk(tmp_path, etcd) as region:
        before = verified(region, "b1")
        assert await copied(region, etcd, dry_run=True) == Plan("b1", LEAVES, 2)
        # Before the store says so, nothing was done.
        with (
            cut_off(monkeypatch, (AuditHome, "signed", 0)),
            pytest.raises(UnavailableError, match="Cut off"),
        ):
            await copied(region, etcd)
        await region.start("b1", "b2")
        trail = trail_of(region, "b1")
        assert await trail.append([key_leaf(LEAVES)]) == LEAVES
        note = parse_note(await asyncio.to_thread(trail.publish))
        cosigned = encode_note(note.with_signatures([witness.cosign(note.text, 1_700_000_000)]))
        await asyncio.to_thread(trail.add_cosigned, cosigned)
        await troubled(region, "b2", "is on the disk of broker b1 alone")
        with pytest.raises(UnavailableError, match="is alive"):
            await copied(region, etcd)
        await region.stop("b1")
        # The other broker runs on, and is told to be restarted.
        assert await copied(region, etcd) == Plan("b1", LEAVES + 1, 2)
        await troubled(region, "b2", "restart it")
        await region.stop("b2")
        with pytest.raises(RequestError, match="copy the audit log of us-east already"):
            await copied(region, etcd)
        # Its folder is a copy from then on.
        with (
            cut_off(monkeypatch, (copied_disk, "segment_name", 0)),
            pytest.raises(UnavailableError, match="Cut off"),
        ):
            await region.start("b1")
        log = log_of(region, "b1")
        assert log.read(COPIED_PATH) and log.names(WAL_FOLDER)
        assert len(verified(region, "b1")) == LEAVES + 1
        for calls in (
            (audit_log, "_parts", 0),
            (audit_log, "_batch_from", 0),
            (audit_log, "_batch_from", 2),
            (audit_log, "_Checkpoint", 0),
        ):
            with cut_off(monkeypatch, calls):
                await region.start("b1")
                await troubled(region, "b1", "Cut off")
                clustered = region.clustered("b1")
                assert not clustered.has_audit_log
                for asked in (partial(clustered.drain, on=True), clustered.retire):
                    with pytest.raises(RequestError, match="broker b1 alone had is in felix/system/audit"):
                        await asked("b1")
                await region.stop("b1")
            assert len(verified(region, "b1")) == LEAVES + 1
        await region.start("b1", "b2")
        assert await home_of(region) == "b1"
        assert not log.names(WAL_FOLDER)
        assert await retried(lambda: trail_of(region, "b1").append([key_leaf(LEAVES + 1)])) == LEAVES + 1
        for name in region.nodes:
            await shows(region, name, LEAVES + 2)
        leaves = verified(region, "b1")
        assert (
            leaves
            == verified(region, "b2")
            == [*before, *(encode_for_log(key_leaf(each)).data for each in (LEAVES, LEAVES + 1))]
        )
        path = document_path(audit_log.sha256(DOCUMENT).digest())
        await until((log_of(region, "b2").path / path).exists)
        # Another one goes on with it, also where the disk of before is lost.
        incarnation = region.clustered("b1").member.audit.incarnation
        shards = region.clustered("b1").member.mirror.view.shards
        await until(lambda: len(shards[ShardId(incarnation, 0)].isr) == 2, 60)
        await until(lambda: shards[ShardId(incarnation, 0)].min == 2, 60)
        assert not region.clustered("b1").member.alone_has_audit("b1")
        await region.stop("b1")
        shutil.rmtree(log.path)
        await region.start("b1")
        await shows(region, "b1", LEAVES + 2)
        await home_of(region)
        assert verified(region, "b1") == leaves


async def test_an_older_folder_and_a_store_that_was_changed_begin_no_second_history(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with one_disk(tmp_path, etcd) as region, store_of(etcd) as store:
        older = tmp_path / "older"
        shutil.copytree(log_of(region, "b1").path, older)
        await region.start("b1", "b2")
        await trail_of(region, "b1").append([key_leaf(LEAVES)])
        await region.stop()
        # Whoever writes the store has no key of the log.
        root = "00" * 32
        forged = AuditHome("", "ab" * 16, 2, 1, Before("b1", LEAVES, root))
        for each in (
            forged,
            forged.signed("us-east", SigningKey.generate()),
            msgspec.structs.replace(forged, before=None),
        ):
            await store.transact([], [Put(KEYS.audit_home, each.encode().encode())])
            for broker in ("b1", "b2"):
                with pytest.raises(CorruptionError, match="names another audit log"):
                    await region.start(broker)
        was = AuditHome("b1").encode().encode()
        await store.transact([], [Put(KEYS.audit_home, was)])
        await copied(region, etcd)
        now = await store.get(KEYS.audit_home)
        assert now is not None
        # The folder of before its last leaf, and one with leaves that came later.
        log = log_of(region, "b1").path
        log.rename(tmp_path / "newest")
        shutil.copytree(older, log)
        with pytest.raises(
            RolledBackError, match=f"has {LEAVES} leaves, and it went on as copies from {LEAVES + 1}"
        ):
            await region.start("b1")
        shutil.rmtree(log)
        shutil.copytree(tmp_path / "newest", log)
        await region.start("b1", "b2")
        assert await home_of(region) == "b1"
        await region.stop()
        # A store that was put back, and the folder of a broker that knows better.
        await store.transact([], [Put(KEYS.audit_home, was)])
        for broker in ("b1", "b2"):
            with pytest.raises(CorruptionError, match="names another audit log"):
                await region.start(broker)
        assert (await reconciled(region, store)).notes[0].startswith("The store does not say where")
        put_back = await store.get(KEYS.audit_home)
        assert put_back is not None and put_back.value == now.value
        assert not (await reconciled(region, store)).audit_home
        await region.start("b1", "b2")
        await home_of(region)
        assert note_size(trail_of(region, "b1").checkpoint()) == LEAVES + 1


@only_slow
async def test_one_change_is_signed_of_a_log_though_the_store_is_put_back_before_it_is_done(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_disk(tmp_path, etcd) as region, store_of(etcd) as store:
        await region.start("b1", "b2")
        await region.stop()
        was = AuditHome("b1").encode().encode()
        # The store has not heard of it, and the broker writes no more alone.
        with (
            cut_off(monkeypatch, (ClusterMirror, "commit", 0)),
            pytest.raises(UnavailableError, match="Cut off"),
        ):
            await copied(region, etcd)
        with pytest.raises(CorruptionError, match="names another audit log") as refused:
            await region.start("b1")
        assert "copy-audit-log" in refused.value.hint
        file = NodeFile(PRIVATE_FILES, log_of(region, "b1").path.parent, REAL.random)
        known = file.load()
        assert await copied(region, etcd) == Plan("b1", LEAVES, 2)
        first = await store.get(KEYS.audit_home)
        assert first is not None and first.value == known.audit.encode()
        await region.start("b2")
        await region.stop()
        shard = Delete(KEYS.shard(ShardId(AuditHome.of(first).incarnation, 0)))
        # Run again on a store of before.
        await store.transact([], [Put(KEYS.audit_home, was), shard])
        # Another folder than that of the signature.
        other = msgspec.json.decode(known.audit)
        other["before"]["size"] -= 1
        file.save(msgspec.structs.replace(known, audit=msgspec.json.encode(other).decode()))
        with pytest.raises(RequestError, match="goes on as copies from 299 leaves, and it has 300 now"):
            await copied(region, etcd)
        file.save(known)
        assert await copied(region, etcd) == Plan("b1", LEAVES, 2)
        again = await store.get(KEYS.audit_home)
        assert again is not None and again.value == first.value
        # Reconciled instead: it is led by the broker that has it.
        await store.transact([], [Put(KEYS.audit_home, was), shard])
        plan = await reconciled(region, store)
        assert not plan.losses and [each.copies for each in plan.shards] == [("b1",)]
        assert not any(each.changes for each in (await reconciled(region, store)).shards)
        # The same amid what is written into the stream.
        monkeypatch.setattr(audit_log, "BATCH_BYTES", 20_000)
        with cut_off(monkeypatch, (audit_log, "_batch_from", 2)):
            await region.start("b1")
            await troubled(region, "b1", "Cut off")
            await region.stop()
        await store.transact([], [Put(KEYS.audit_home, was), shard])
        with pytest.raises(RequestError, match="goes on as copies already") as refused_copy:
            await copied(region, etcd)
        assert "reconcile" in refused_copy.value.hint
        assert not (await reconciled(region, store)).losses
        await region.start("b1", "b2")
        assert await home_of(region) == "b1"
        await shows(region, "b2", LEAVES)


@only_slow
async def test_an_ill_broker_that_leads_the_stream_first_gets_nobody_to_sign_another_log(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_disk(tmp_path, etcd) as region, store_of(etcd) as store:
        await region.start("b1", "b2")
        await region.stop()
        await copied(region, etcd)
        entry = await store.get(KEYS.audit_home)
        assert entry is not None
        shard = ShardId(AuditHome.of(entry).incarnation, 0)
        key = KEYS.shard(shard)
        right = await store.get(key)
        assert right is not None
        # It has the store say that it has all, and it has nothing.
        record = msgspec.json.decode(right.value, type=ShardRecord)
        wrong = msgspec.structs.replace(record, replicas=("b2",), isr={"b2": 1})
        await store.transact([], [Put(key, encode(wrong, key))])
        await region.start("b2")
        await troubled(region, "b2", "Not all leaves that broker b1 alone had")
        assert not region.clustered("b2").has_audit_log
        await region.stop()
        # It leads, and writes other leaves.
        await store.transact([], [Put(key, right.value)])

        def junk(files: object, at: int, end: int) -> Batch:
            return encode_batch([NewRecord(payload=b"junk")])

        with monkeypatch.context() as patched:
            patched.setattr(audit_log, "_batch_from", junk)
            patched.setattr(audit_log, "_Checkpoint", None)
            await region.start("b1")
            await troubled(region, "b1", "NoneType")
            await region.stop()
        await region.start("b1")
        await troubled(region, "b1", "has other leaves from 0 on")
        assert not region.clustered("b1").has_audit_log
        assert len(verified(region, "b1")) == LEAVES


@only_slow
async def test_a_log_whose_keys_were_changed_on_one_disk_ends_a_folder_of_before_once_it_is_copied(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """No word in the store says so, and the command's leaf stands in front of the end."""
    async with one_disk(tmp_path, etcd) as region:
        bundle, secrets = region.folder.bundle.read_bytes(), tmp_path / "secrets"
        shutil.copytree(region.folder.secrets, secrets)
        size = change_log_keys(region.folder, region.config, REAL.clock.now_ms(), store=None).size
        assert size == LEAVES + 1
        await copied(region, etcd)
        await region.start("b1", "b2")
        await until(lambda: note_size(trail_of(region, "b2").checkpoint()) > size, 60)
        changes = [header.action for leaf in verified(region, "b2") if (header := read_header(leaf))][-2:]
        assert changes == ["rotated", "log-key-changed"]
        await region.stop("b2")
        shutil.rmtree(log_of(region, "b2").path)
        after, kept = region.folder.bundle.read_bytes(), tmp_path / "after"
        shutil.copytree(region.folder.secrets, kept)
        region.folder.bundle.write_bytes(bundle)
        shutil.copytree(secrets, region.folder.secrets, dirs_exist_ok=True)
        await region.start("b2")
        ended = await asyncio.wait_for(region.nodes["b2"].ended(), 60)
        assert ended.code is Code.CONFIG_INVALID and "its keys were changed" in ended.sentence
        assert note_size(log_of(region, "b2").read("checkpoint") or b"") <= size
        await region.stop("b2")
        region.folder.bundle.write_bytes(after)
        shutil.copytree(kept, region.folder.secrets, dirs_exist_ok=True)
        await region.start("b2")
        await shows(region, "b2", size + 1)
