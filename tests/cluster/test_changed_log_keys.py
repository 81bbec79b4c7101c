"""A region of several brokers changes the keys of its own audit log, of which each of them has a copy."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from cluster.audited import home_of, key_leaf, log_of, retried, shows, trail_of, verified
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until

from audit.checkpoint import note_size, open_checkpoint
from audit.leaf import read_header
from audit.note import Note, NoteSigner, encode_note, parse_note
from audit.signer_disk import load_signers
from audit.trust import RegionTrust
from cli.stopped_region import StoppedRegion
from felix.errors import Code, RequestError, TamperError
from felix.runtime.real import now_ms
from region.changed_log_key import LOG_KEY_CHANGED
from region.log_keys import ChangedKeys, change_log_keys
from region.metadata.etcd import EtcdConfig, EtcdStore
from region.metadata.records import Keys
from region.metadata.transaction import Delete
from region.trusted_bundles import own_bundle

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd

ORIGIN = "us-east.acme/ingress"


async def change(region: ClusteredRegion, **more: Any) -> ChangedKeys:
    """In a thread, as the command asks the store on an event loop of its own."""
    store = StoppedRegion(region.folder, region.config)
    return await asyncio.to_thread(
        change_log_keys, region.folder, region.config, now_ms(), store=store, **more
    )


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
        await retried(lambda number=number: trail_of(region, home).append([key_leaf(number)]))
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


async def test_a_copy_that_is_new_begins_anew_after_a_change_and_may_be_cut_off_at_that(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """Its first checkpoint, of no leaves, is under a key that begins later."""
    async with serving(tmp_path, etcd, 3) as region:
        await append(region, *range(3))
        await region.stop()
        await change(region)
        shutil.rmtree(log_of(region, "b3").path)
        await region.start("b3")  # alone: it hears nothing of the others
        await region.stop("b3")
        assert note_size(checkpoint_of(region, "b3")) == 0
        await region.start("b1", "b2", "b3")
        await said(region)
        await append(region, 100)
        assert len(verified(region, "b3")) == 5


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


@pytest.mark.parametrize("is_elected", [False, True])
async def test_where_the_store_has_lost_the_word_a_broker_with_the_folder_of_before_ends_by_the_leaf(
    tmp_path: Path, etcd: EtcdProcess, is_elected: bool
) -> None:
    """It follows, and reads the leaves behind what it can verify; or it is to go on with the log, and signs nothing."""
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
        put_back(region, before)
        await region.start("b3")
        node = region.nodes["b3"]
        if is_elected:
            home = await home_of(region)
            await region.stop(home)
        ended = await asyncio.wait_for(node.ended(), 60)
        assert ended.code is Code.CONFIG_INVALID and "its keys were changed" in ended.sentence
        assert not region.clustered("b3").has_audit_log
        assert note_size(checkpoint_of(region, "b3")) == 3
        signed = open_checkpoint(checkpoint_of(region, "b3"), tuple(old))
        assert {by.key for by in signed.signed} == old, "as it was before the change"
