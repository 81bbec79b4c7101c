"""A region of several brokers changes the keys of its own audit log, of which each of them has a copy."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bridge_mesh import flight
from cluster.audited import home_of, key_leaf, log_of, retried, shows, trail_of, verified
from cluster.clustered_mesh import two_clusters
from cluster.clustered_region import ClusteredRegion, serving
from cluster.processes import kill, running, several
from e2e.command_mesh import felix_command
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until
from slow_runs import only_slow

from audit.checkpoint import note_size, open_checkpoint
from audit.leaf import Kind, read_header
from audit.merkle import Tree, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note, parse_note
from audit.origin import region_origin
from audit.signer_disk import load_signers
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.trust import RegionTrust, Trust
from audit.verify import verify_log
from audit.witness import ForkError, MemoryWitnessStore, Witness
from cli.stopped_region import StoppedRegion
from felix.errors import Code, RequestError, TamperError
from felix.messages import PutDocument
from felix.runtime.real import now_ms
from keys.bundle import decode_bundle
from keys.key_file import load_signing_key
from keys.signing import SigningKey
from region.bootstrap import trust_region
from region.cluster.records import ShardId
from region.config import load_config
from region.evidence.audit_log import AuditLog
from region.metadata.catalog import Catalog
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.records import Keys
from region.metadata.transaction import Delete
from region.trust.changed_log_key import LOG_KEY_CHANGED
from region.trust.log_key_store import tell_ended
from region.trust.log_keys import ChangedKeys, change_log_keys
from region.trust.trusted_bundles import own_bundle

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd

ORIGIN = region_origin("us-east", "acme")


async def change(region: ClusteredRegion, **more: Any) -> ChangedKeys:
    """In a thread, as the command asks the store on an event loop of its own."""

    def work() -> ChangedKeys:
        with StoppedRegion(region.folder, region.config) as store:
            return change_log_keys(region.folder, region.config, now_ms(), store=store, **more)

    return await asyncio.to_thread(work)


def keep(region: ClusteredRegion, kept: Path) -> None:
    shutil.copytree(region.folder.secrets, kept / "secrets", dirs_exist_ok=True)
    shutil.copy(region.folder.bundle, kept)


def put_back(region: ClusteredRegion, kept: Path) -> None:
    shutil.copytree(kept / "secrets", region.folder.secrets, dirs_exist_ok=True)
    shutil.copy(kept / "bundle.json", region.folder.bundle)


def signers_of(region: ClusteredRegion) -> list[NoteSigner]:
    name = log_name(region)
    return list(load_signers(name, region.folder.audit_key, region.folder.audit_ml_dsa_key))


def log_name(region: ClusteredRegion) -> str:
    return own_bundle(region.folder, region.config).audit_keys[0].name


def checkpoint_of(region: ClusteredRegion, name: str) -> bytes:
    return log_of(region, name).read("checkpoint") or b""


def changes_in(leaves: list[bytes]) -> list[int]:
    headers = map(read_header, leaves)
    return [
        at for at, header in enumerate(headers) if header is not None and header.action == LOG_KEY_CHANGED
    ]


async def append(region: ClusteredRegion, *numbers: int) -> None:
    home = await home_of(region)
    for number in numbers:
        await retried(partial(trail_of(region, home).append, [key_leaf(number)]))
    await asyncio.to_thread(trail_of(region, home).publish)
    for name in region.nodes:
        await shows(region, name, note_size(trail_of(region, home).checkpoint()))


async def said(region: ClusteredRegion) -> None:
    """Wait until every broker has the leaf of the change under a checkpoint."""

    def has() -> bool:
        key = signers_of(region)[0].key
        return all(
            any(by.key == key for by in signed.signed)
            for name in region.nodes
            for signed in [trail_of(region, name).checkpoints.read(trail_of(region, name).checkpoint())]
        )

    await until(has, 60)


async def test_the_log_goes_on_under_the_new_keys_on_every_broker(tmp_path: Path, etcd: EtcdProcess) -> None:
    async with serving(tmp_path, etcd, 3) as region:
        await append(region, *range(5))
        names, before = sorted(region.nodes), own_bundle(region.folder, region.config)
        older = trail_of(region, "b1").checkpoint()
        await region.stop()
        sizes = {name: note_size(checkpoint_of(region, name)) for name in names}
        old = signers_of(region)
        changed = await change(region)
        assert changed.size == max(sizes.values()) == 5
        own = changed.signed.bundle
        assert not {signer.key.public for signer in old} & {
            signer.key.public for signer in signers_of(region)
        }

        await region.start(*names)
        await said(region)
        await append(region, 100)
        for name in names:
            leaves = verified(region, name)
            assert changes_in(leaves) == [5] and len(leaves) == 7, "one leaf says so, behind the end"
        # What was signed before holds under either bundle, and what is signed now under the new one alone.
        newest = checkpoint_of(region, "b2")
        for bundle in (own, before):
            open_checkpoint(older, RegionTrust(bundle).log_keys(log_name(region)))
        with pytest.raises(TamperError):
            open_checkpoint(newest, RegionTrust(before).log_keys(log_name(region)))
        # Whoever has the former keys signs nothing behind the end.
        text = parse_note(newest).text
        forged = encode_note(Note(text, tuple(signer.sign(text, now_ms() // 1000) for signer in old)))
        with pytest.raises(TamperError, match="may not sign"):
            open_checkpoint(forged, RegionTrust(own).log_keys(log_name(region)))

        # Any broker goes on with it, one that stood still, one with an emptied folder, and all after a restart.
        home = await home_of(region)
        await region.stop(home)
        await append(region, 101)
        shutil.rmtree(log_of(region, home).path)
        await region.start(home)
        await append(region, 102)
        await region.stop()
        await region.start(*names)
        await append(region, 103)
        for name in names:
            assert changes_in(verified(region, name)) == [5] and len(verified(region, name)) == 10

        # And once more.
        await region.stop()
        again = await change(region)
        assert (
            again.size == 10
            and len([key for key in again.signed.bundle.audit_keys if key.role == "log"]) == 6
        )
        await region.start(*names)
        await said(region)
        await append(region, 104)
        for name in names:
            assert changes_in(verified(region, name)) == [5, 10]


@only_slow
async def test_a_copy_that_is_new_begins_anew_after_a_change_and_may_be_cut_off_at_that(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first checkpoint, of no leaves, is under a key that begins later, and may have ended since."""
    async with serving(tmp_path, etcd, 3) as region:
        await append(region, *range(3))
        await region.stop()
        await change(region)
        shutil.rmtree(log_of(region, "b3").path)
        with monkeypatch.context() as cut_off:
            cut_off.setattr(AuditLog, "_read_checkpoints", nothing)
            await region.start("b3")
            await region.stop("b3")
        assert note_size(checkpoint_of(region, "b3")) == 0
        assert (await change(region)).size == 3
        await region.start("b1", "b2", "b3")
        await said(region)
        await append(region, 100)
        assert len(verified(region, "b3")) == 5


async def nothing(*_: object) -> None:
    pass


async def remove_word(region: ClusteredRegion) -> None:
    endpoint = region.etcd.endpoint.removeprefix("http://")
    store = await EtcdStore.open(EtcdConfig(endpoints=(endpoint,)))
    await store.transact([], [Delete(Keys("us-east").log_keys())])
    await store.close()


async def test_a_broker_with_the_folder_of_before_does_not_start_and_says_what_to_do(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 3) as region:
        before, between, after = (tmp_path / name for name in ("before", "between", "after"))
        await append(region, *range(3))
        keep(region, before)
        await region.stop()
        await change(region)
        keep(region, between)
        await change(region)
        keep(region, after)
        # None runs with the keys of now, nor has any: the store says so, of each change.
        for kept in (before, between):
            put_back(region, kept)
            for name in ("b1", "b2", "b3"):
                with pytest.raises(RequestError, match="other keys sign the log now") as refused:
                    await region.start(name)
                assert refused.value.code is Code.CONFIG_INVALID and "secrets/audit.pem" in refused.value.hint
        assert {note_size(checkpoint_of(region, name)) for name in ("b1", "b2", "b3")} == {3}
        put_back(region, after)
        await region.start("b1", "b2")
        await said(region)
        put_back(region, before)
        with pytest.raises(RequestError, match="other keys sign the log now"):
            await region.start("b3")
        put_back(region, after)
        await region.start("b3")
        await append(region, 100)
        assert changes_in(verified(region, "b3")) == [3]
        # A copy that has what the new key signed is not opened with the former ones, whatever the store says.
        await region.stop("b3")
        await remove_word(region)
        put_back(region, before)
        with pytest.raises(RequestError, match="does not name") as refused:
            await region.start("b3")
        assert "secrets/audit.pem" in refused.value.hint


@pytest.mark.parametrize("is_elected", [False, pytest.param(True, marks=only_slow)])
async def test_where_the_store_has_lost_the_word_a_broker_with_the_folder_of_before_ends_by_the_leaf(
    tmp_path: Path, etcd: EtcdProcess, is_elected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows, and reads the leaves behind what it can verify; or it is to go on with the log, and signs nothing."""
    if is_elected:
        monkeypatch.setattr(AuditLog, "_look_ahead", nothing)
    async with serving(tmp_path, etcd, 3) as region:
        before, after = tmp_path / "before", tmp_path / "after"
        await append(region, *range(3))
        keep(region, before)
        await region.stop()
        old = {signer.key for signer in signers_of(region)}
        await change(region)
        await remove_word(region)
        keep(region, after)
        await region.start("b1", "b2")
        await said(region)
        names = ["b3"]
        if is_elected:
            # Neither of those that are left has a checkpoint of after the change, and one of them is elected.
            await region.stop("b1")
            shutil.rmtree(log_of(region, "b1").path)
            names.append("b1")
        put_back(region, before)
        await region.start(*names)
        if is_elected:
            await in_sync(region, "b2")
            await region.stop("b2")
        ended = [asyncio.ensure_future(region.nodes[name].ended()) for name in names]
        await asyncio.wait(ended, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert ended[0].done() or ended[-1].done()
        for each in (each for each in ended if each.done()):
            assert (
                each.result().code is Code.CONFIG_INVALID
                and "its keys were changed" in each.result().sentence
            )
        assert not any(region.clustered(name).has_audit_log for name in names)
        assert [note_size(checkpoint_of(region, name)) for name in names] == [3] * len(names)
        assert {by.key for by in open_checkpoint(checkpoint_of(region, "b3"), tuple(old)).signed} == old


async def in_sync(region: ClusteredRegion, home: str) -> None:
    """Wait until all copies of the log are."""
    member = region.clustered(home).member
    stream = member.audit.stream
    assert stream is not None
    async with asyncio.timeout(60):
        await member.until(lambda: len(member.mirror.view.shards[ShardId(stream.incarnation, 0)].isr) == 3)


async def test_a_broker_that_stood_still_while_the_keys_were_changed_does_not_go_on_with_the_log(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """Its lease was over, so the command did not see it; it is back, and elected, before any broker with the keys of now."""
    async with serving(tmp_path, etcd, 3) as region:
        await append(region, *range(3))
        endpoint = region.etcd.endpoint.removeprefix("http://")
        store = await EtcdStore.open(EtcdConfig(endpoints=(endpoint,)))
        own = own_bundle(region.folder, region.config)
        await tell_ended(
            Catalog(store, "us-east"), own, load_signing_key(region.folder.audit_key), b"n" * 32, now_ms()
        )
        await store.close()
        home = await home_of(region)
        others = {name: node for name, node in region.nodes.items() if name != home}
        await region.stop(home)
        first, *_ = await asyncio.wait(
            [asyncio.ensure_future(node.ended()) for node in others.values()],
            timeout=60, return_when=asyncio.FIRST_COMPLETED,
        )  # fmt: skip
        assert [task.result().code for task in first] == [Code.CONFIG_INVALID]
        assert "other keys sign the log now" in first.pop().result().sentence
        assert not any(region.clustered(name).has_audit_log for name in others)
        assert {note_size(checkpoint_of(region, name)) for name in others} == {3}


@only_slow
async def test_the_folders_of_brokers_may_be_on_several_machines(tmp_path: Path, etcd: EtcdProcess) -> None:
    async with serving(tmp_path, etcd, 3) as region:
        await append(region, *range(3))
        await region.stop("b3")
        await append(region, 3)
        await region.stop()
        notes = {name: checkpoint_of(region, name) for name in region.names}
        data = {name: log_of(region, name).path.parent for name in region.names}
        for name in ("b1", "b3"):
            data[name].rename(tmp_path / name)
        with pytest.raises(RequestError, match="brokers b1, b3"):
            await change(region)
        changed = await change(region, copies={name: notes[name] for name in ("b1", "b3")})
        assert changed.size == 4 and note_size(notes["b3"]) == 3
        for name in ("b1", "b3"):
            (tmp_path / name).rename(data[name])
        await region.start("b3", "b1", "b2")
        await said(region)
        await append(region, 100)
        for name in region.names:
            assert changes_in(verified(region, name)) == [4]


@only_slow
async def test_where_a_copy_that_was_not_at_hand_went_further_the_log_is_still_one_and_that_broker_says_so(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 3) as region:
        await append(region, *range(3))
        await region.stop()
        older = tmp_path / "older"
        for name in ("b1", "b2"):
            shutil.copytree(log_of(region, name).path, older / name)
        await region.start(*region.names)
        await append(region, 3, 4)
        await region.stop()
        before = RegionTrust(own_bundle(region.folder, region.config))
        for name in ("b1", "b2"):
            shutil.rmtree(log_of(region, name).path)
            shutil.copytree(older / name, log_of(region, name).path)
        # What another region has cosigned of it says that it went further.
        shown = checkpoint_of(region, "b3")
        with pytest.raises(RequestError, match="is known to have had 5 leaves"):
            await change(region, without=["b3"], remembered=[shown])
        witness = Witness(witness_of("eu-west"), before.logs, MemoryWitnessStore(), lambda: now_ms() // 1000)
        witness.cosign(shown, [])
        changed = await change(region, without=["b3"])
        assert changed.size == 3
        own = RegionTrust(changed.signed.bundle)
        with pytest.raises(TamperError, match="may not sign"):
            open_checkpoint(shown, own.log_keys(log_name(region)))

        await region.start("b1", "b2")
        with pytest.raises(
            RequestError, match="has a checkpoint of 5 leaves under keys that sign up to 3"
        ) as refused:
            await region.start("b3")
        assert refused.value.code is Code.CONFIG_INVALID and "Move that folder aside" in refused.value.hint
        assert checkpoint_of(region, "b3") == shown
        log_of(region, "b3").path.rename(tmp_path / "aside")
        await region.start("b3")
        await said(region)
        await append(region, 100)
        for name in region.names:
            leaves = verified(region, name)
            # The leaves of before are those that were shown, and the change stands behind all of them.
            assert changes_in(leaves) == [5] and len(leaves) == 7
        tree = Tree()
        for leaf in verified(region, "b3")[:5]:
            tree.add(leaf_hash(leaf))
        assert tree.root() == open_checkpoint(shown, before.log_keys(log_name(region))).checkpoint.root
        # Whoever remembers that checkpoint is told of it.
        trust = Trust.of([changed.signed.bundle])
        report = verify_log(log_of(region, "b1"), trust, cosignatures_min=0, remembered=(shown,))
        assert [finding.path for finding in report.findings] == ["remembered checkpoint 1"]
        # Who has cosigned that checkpoint goes on from it, and from no other history.
        witness.follow(own.log_keys(log_name(region)))
        trail = trail_of(region, "b1")
        proof = trail.checkpoints.consistency_proof(5, 7)
        with pytest.raises(ForkError):
            witness.cosign(trail.checkpoint(), [])
        witness.cosign(trail.checkpoint(), proof)
        last = witness.last(log_name(region))
        assert last is not None and last.size == 7


async def test_a_region_that_trusts_this_one_takes_the_new_bundle_and_goes_on_cosigning(
    tmp_path: Path,
) -> None:
    async with two_clusters(tmp_path) as mesh:
        eu, us = mesh.clusters["eu-west"], mesh.clusters["us-east"]

        def cosigned() -> bool:
            trails = [trail_of(eu, name) for name in eu.nodes if eu.clustered(name).has_audit_log]
            return any(trail.checkpoints.cosigned_size == trail.status().durable > 0 for trail in trails)

        await mesh.create()
        await mesh.publish([flight(number) for number in range(50)])
        await mesh.grant()
        async with mesh.agent():
            await mesh.crossed(50)
            await until(lambda: mesh.headers(mesh.ingress_folder, Kind.ACK), 60)
            await until(cosigned, 60)
        await eu.stop()
        changed = await change(eu)
        await eu.start(*eu.names)
        await until(lambda: changes_in(leaves_at(mesh.ingress_folder)), 60)
        # Records cross before us-east has the new bundle; it cosigns nothing of this log.
        await mesh.publish([flight(number) for number in range(50, 80)])
        async with mesh.agent():
            await mesh.crossed(80)
            assert trail_of(eu, await home_of(eu)).checkpoints.cosigned_size <= changed.size
            pin = trust_region(us.folder, changed.signed, now_ms())
            assert pin is not None
            async with us.client("b1") as client:
                await client.request(PutDocument("pin", pin.encode()))
            await mesh.publish([flight(number) for number in range(80, 100)])
            await mesh.crossed(100)
            await until(lambda: len(mesh.headers(mesh.ingress_folder, Kind.ACK)) >= 3, 60)
            await until(cosigned, 60)
    assert mesh.reconcile() == 100
    assert mesh.verify_egress().ok
    report = mesh.verify_ingress(1)
    assert report.ok and report.cosigned_size > changed.size + 1


def leaves_at(log: Path) -> list[bytes]:
    files = Folder(log)
    size = note_size(files.read("checkpoint") or b"")
    return [bytes(leaf) for _, leaf in read_entries(files, 0, size, size)]


async def test_the_command_changes_them_while_the_regions_processes_are_stopped(tmp_path: Path) -> None:
    folder = several(tmp_path, 3, lease="2s")
    config = load_config(folder.config)
    logs = [folder.root / data / "audit" for data in config.data_folders]
    command = ("region", "change-log-keys", "--region", "us-east")

    async def key_changes(size: int) -> None:
        """Every copy has so many leaves of changes, under a checkpoint of the keys of now, and verifies."""
        key = load_signers(ORIGIN, folder.audit_key, folder.audit_ml_dsa_key)[0].key
        bundle = decode_bundle(folder.bundle.read_bytes()).bundle

        def has(log: Path) -> bool:
            note = Folder(log).read("checkpoint")
            if note is None:
                return False
            signed = open_checkpoint(note, RegionTrust(bundle).log_keys(ORIGIN))
            return any(by.key == key for by in signed.signed) and len(changes_in(leaves_at(log))) == size

        await until(lambda: all(map(has, logs)), 60)
        for log in logs:
            assert verify_log(Folder(log), Trust.of([bundle]), cosignatures_min=0).ok

    async def deny(number: int) -> None:
        await asyncio.to_thread(
            felix_command, tmp_path, "bridge", "deny", "stream", f"acme/ops/s{number}", "--to", "eu-west", "--region", "us-east"
        )  # fmt: skip

    async with running(folder):
        await deny(1)
        refused = await asyncio.to_thread(felix_command, tmp_path, *command, code=1)
        assert "runs here" in refused.err
    said = await asyncio.to_thread(felix_command, tmp_path, *command)
    assert "copy bundle.json, secrets/audit.pem and secrets/audit.mldsa.pem" in said.out
    async with running(folder):
        await key_changes(1)
        await kill(folder, "b1")
        await deny(2)
        await key_changes(1)
    # A machine whose folder was not replaced.
    before = tmp_path / "before"
    shutil.copytree(folder.secrets, before / "secrets")
    shutil.copy(folder.bundle, before)
    await asyncio.to_thread(felix_command, tmp_path, *command)
    shutil.copytree(before / "secrets", folder.secrets, dirs_exist_ok=True)
    shutil.copy(before / "bundle.json", folder.bundle)
    refused = await asyncio.to_thread(felix_command, tmp_path, "region", "up", "us-east", "--detach", code=4)
    assert "other keys sign the log now" in refused.err
    await asyncio.to_thread(felix_command, tmp_path, "region", "down", "us-east", code=None)


def witness_of(region: str) -> NoteSigner:
    return NoteSigner.from_key(
        f"{region}.acme/witness", SigningKey.from_seed(b"w" * 32), Algorithm.COSIGNATURE
    )
