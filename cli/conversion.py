"""A region of one broker becomes, in place, one of several, which begins with that broker (`felix region to-cluster`).

A run that was cut off is finished by the next one. Order:

1. The metadata are copied into etcd (one that is begun for it, where the region had the embedded store), and the keyring to where the
   broker keeps its own. Until here the region is as it was, its broker may start, and the next run begins anew.
2. `CONVERTING` and `node` in the folder that the broker will have: from here on a broker that serves alone refuses to start.
3. What is in `data` moves there.
4. The broker, and the shards of its streams, are written into etcd, from what that folder has (region.reconciliation).
5. region.yaml names the broker in `cluster:`.

Nothing is deleted: the embedded store stays in the broker's folder, and `keys/` where it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from cli.output import note
from cli.several import ETCD_FOLDER, start_etcd
from felix import __version__
from felix.address import Address
from felix.errors import Code, RequestError, UnavailableError
from felix.runtime.real import REAL
from felix.storage.begun import BegunFolder
from felix.storage.disk import LOCK_NAME, PRIVATE_FILES, FileLock
from felix.storage.release_mark import mark_release, require_release
from felix.storage.small_file import TEMPORARY_SUFFIX
from region.begun_folders import begun_folders
from region.cluster.audit_home import AuditHome
from region.cluster.node_file import NAME as NODE
from region.cluster.node_file import NodeFile
from region.cluster.records import ClusterKeys
from region.config import MetadataConfig, RegionConfig
from region.folder import STREAMS, RegionFolder
from region.inventory import take_inventory
from region.metadata.embedded import EmbeddedStore
from region.metadata.genesis import ROOT
from region.metadata.port import MetadataStore
from region.metadata.transaction import OPERATIONS_MAX, TRANSACTION_BYTES_MAX, Absent, Delete, Entry, Put
from region.reconciling import Reconciler
from region.startup.store import open_store

METADATA: Final = "metadata.db"
"""The embedded store, in the data folder."""
KEYS: Final = "keys"
"""Of a broker's data folder: the keyring that it had before keys were shared."""
STAGED: Final = "keys.new"
CONVERTING: Final = "converting"
"""In a broker's data folder: the region is being made one of several brokers, and its metadata are in etcd."""
_DROPPED: Final = f"{ETCD_FOLDER}.dropped"
_BATCH_BYTES: Final = TRANSACTION_BYTES_MAX // 2

Step = Callable[[str], None]


async def convert(
    folder: RegionFolder, config: RegionConfig, etcd: Address | None, step: Step = lambda done: None
) -> None:
    """Steps 1 to 4. `etcd`: where an etcd of the region's own is to listen; None where it has one. `step`: called after each.

    Raises RequestError(CONFLICT) where the region is none that can be converted, UnavailableError where its broker runs, or a folder is not the one that was begun.
    """
    data = folder.root / config.data
    own = data / config.broker
    for path in (data, own):
        require_release(PRIVATE_FILES, path, __version__)
    _check(data, own, is_begun=_is_begun(own))
    _refuse_mounts(data)
    alone = msgspec.structs.replace(config, cluster=None)
    if not _is_begun(own):
        # What is not mounted would be lost, as what then stands in etcd has it.
        _require(begun_folders(folder, alone))
    async with AsyncExitStack() as stack:
        try:
            stack.enter_context(FileLock(locked := _streams(data, own)))
        except RequestError as error:
            raise UnavailableError(error.sentence, hint="Stop the region's broker first.") from error
        # Only now does nobody else convert it: until then another run may have moved all of it, and made anew what is locked.
        if locked != _streams(data, own):
            raise UnavailableError(
                "Another `felix region to-cluster` has just run.", hint="Run this one again."
            )
        is_begun = _is_begun(own)
        _check(data, own, is_begun=is_begun)
        if etcd is not None:
            if not is_begun:
                _drop_etcd(folder.root)
            (folder.root / ETCD_FOLDER).mkdir(mode=0o700, exist_ok=True)
            PRIVATE_FILES.sync_folder(folder.root)
            metadata = MetadataConfig(kind="etcd", endpoints=(str(etcd),))
            config = msgspec.structs.replace(config, metadata=metadata)
            stack.push_async_callback((await start_etcd(folder, config)).end)
        store = await open_store(folder, config, REAL)
        stack.push_async_callback(store.close)
        if not is_begun:
            if etcd is not None:
                await _copy_metadata(data / METADATA, store, config.region)
            else:
                await _refuse_served(store, config.region)
            _copy_keys(folder.keys, own)
            step("copied")
            # It moves with all else; an earlier release has no business there from now on.
            mark_release(PRIVATE_FILES, data, __version__)
            _mark(own)
        step("marked")
        _move(data, own, step)
        step("moved")
        moved = msgspec.structs.replace(alone, data=str(own))
        _require(each for each in begun_folders(folder, moved) if each.path != own)
        await _write(folder, config, own, store)
        step("written")


def _require(folders: Iterable[BegunFolder]) -> None:
    for each in folders:
        each.require()


def _refuse_mounts(data: Path) -> None:
    """A disk that is mounted in the data folder does not move with what is in that: the region would be neither the one nor the other."""
    for path in sorted(data.iterdir()) if data.is_dir() else ():
        if path.is_mount():
            raise RequestError(
                f"A disk is mounted at {path}, and what is in {data} moves into the folder of the broker.",
                code=Code.CONFLICT,
                hint=f"Unmount it, put what is on it into {path} itself, and run this again. Afterwards it can be put on the disk again, mounted at that place in the broker's folder.",
            )


def _is_begun(own: Path) -> bool:
    return (own / CONVERTING).exists() and (own / NODE).exists()


def _streams(data: Path, own: Path) -> Path:
    """Where the logs are, whose lock says that nobody else serves or converts them."""
    return own / STREAMS if (own / STREAMS).is_dir() else data / STREAMS


def _drop_etcd(root: Path) -> None:
    """What a run that was cut off had copied. Its etcd may still be about to end: it ends in a folder of another name."""
    _clear_dropped(root)
    if (root / ETCD_FOLDER).exists():
        (root / ETCD_FOLDER).rename(root / f"{_DROPPED}.{os.getpid()}")
        _clear_dropped(root)


def _clear_dropped(root: Path) -> None:
    for dropped in root.glob(f"{_DROPPED}.*"):
        shutil.rmtree(dropped, ignore_errors=True)


def _check(data: Path, own: Path, *, is_begun: bool) -> None:
    others = sorted(path.parent.name for path in data.glob(f"*/{NODE}") if path.parent != own or not is_begun)
    strange = sorted(path.name for path in own.glob("*")) if own.is_dir() and not is_begun else []
    strange = [
        name for name in strange if name not in (KEYS, STAGED, CONVERTING, f"{NODE}{TEMPORARY_SUFFIX}")
    ]
    if others or strange:
        raise RequestError(
            f"{data} has the folder of a broker of several: {', '.join(others) or own.name}.",
            code=Code.CONFLICT,
            hint="This command is for a region that one broker has served. Put cluster: back into region.yaml.",
        )
    if not is_begun and not (data / STREAMS).is_dir():
        raise RequestError(
            "The region has never been served.",
            hint=f"Begin it with several: felix region up {data.parent.name} --brokers 3.",
        )


async def _copy_metadata(path: Path, store: MetadataStore, region: str) -> None:
    """Everything but who serves. The etcd is a new one."""
    embedded = await EmbeddedStore.open(path)
    try:
        entries = (await embedded.load(ROOT)).entries
    finally:
        await embedded.close()
    alone = ClusterKeys(region).alone
    kept = [each for each in entries if not each.lease and each.key != alone]
    for batch in _batches(kept):
        await store.transact(
            [Absent(each.key) for each in batch], [Put(each.key, each.value) for each in batch]
        )
    if len((await store.load(ROOT)).entries) != len(kept):
        raise UnavailableError("The metadata did not get into etcd as they are.", hint="Try again.")
    note(f"{len(kept):,} records are in etcd")


def _batches(entries: Iterable[Entry]) -> Iterable[list[Entry]]:
    batch: list[Entry] = []
    held = 0
    for each in entries:
        size = 2 * len(each.key) + len(each.value)
        if batch and (len(batch) == OPERATIONS_MAX or held + size > _BATCH_BYTES):
            yield batch
            batch, held = [], 0
        batch.append(each)
        held += size
    if batch:
        yield batch


async def _refuse_served(store: MetadataStore, region: str) -> None:
    if (await store.range(ClusterKeys(region).brokers, limit=1)).entries:
        raise UnavailableError(
            f"A broker serves {region}, or its lease has not ended yet.",
            code=Code.SERVED_ELSEWHERE,
            hint="Stop it, and try again after its lease (metadata.lease).",
        )


def _copy_keys(keys: Path, own: Path) -> None:
    """The keyring and its roots, whole or not at all."""
    files = PRIVATE_FILES
    if not files.exists(own):
        files.make_folder(own)
    for name in (STAGED, KEYS):
        shutil.rmtree(own / name, ignore_errors=True)
    shutil.copytree(keys, own / STAGED)
    for path in sorted((own / STAGED).rglob("*")):
        _sync(path)
    _sync(own / STAGED)
    files.rename(own / STAGED, own / KEYS)
    files.sync_folder(own)
    files.sync_folder(own.parent)


def _sync(path: Path) -> None:
    if path.is_dir():
        PRIVATE_FILES.sync_folder(path)
        return
    with path.open("rb") as held:
        PRIVATE_FILES.sync(held.fileno())


def _mark(own: Path) -> None:
    (own / CONVERTING).touch(mode=0o600)
    PRIVATE_FILES.sync_folder(own)
    file = NodeFile(PRIVATE_FILES, own, REAL.random)
    # A broker that was registered once, in order: the shards are written under that registration.
    file.save(msgspec.structs.replace(file.load(), registration=1, intended=1))


def _move(data: Path, own: Path, step: Step) -> None:
    files = PRIVATE_FILES
    _drop_lock(data / STREAMS, own / STREAMS)
    left = [path for path in sorted(data.iterdir()) if path != own]
    twice = [path.name for path in left if (own / path.name).exists()]
    if twice:
        raise RequestError(
            f"{', '.join(twice)} is in {data} and in {own}: only what is in the second is the region's.",
            code=Code.CONFLICT,
            hint=f"A start that was refused made what is in {data}. Move it elsewhere, and run this again.",
        )
    for path in left:
        files.rename(path, own / path.name)
        step(f"moved {path.name}")
    # Where it went first: what is in neither folder would be lost.
    files.sync_folder(own)
    files.sync_folder(data)


def _drop_lock(streams: Path, moved: Path) -> None:
    """A start that was refused, while the logs moved away, may have made their folder anew, for its lock."""
    if moved.is_dir() and streams.is_dir() and all(path.name == LOCK_NAME for path in streams.iterdir()):
        shutil.rmtree(streams)


async def _write(folder: RegionFolder, config: RegionConfig, own: Path, store: MetadataStore) -> None:
    keys = ClusterKeys(config.region)
    await store.transact([], [Delete(keys.alone)])
    # One disk has the audit log, and goes on with it: it is one history.
    home = AuditHome(config.broker).encode().encode()
    await store.transact([Absent(keys.audit_home)], [Put(keys.audit_home, home)])
    report = take_inventory(config.region, config.broker, own, REAL)
    assert report is not None
    reconciler = Reconciler(store, config.region, REAL, note)
    try:
        await reconciler.open()
        plan = await reconciler.plan({config.broker: report}, (), ())
        for sentence in plan.losses:
            note(sentence)
        await reconciler.write(plan)
    finally:
        await reconciler.close()


def finish(folder: RegionFolder, config: RegionConfig) -> None:
    """region.yaml names the broker: nothing is left to be done."""
    _clear_dropped(folder.root)
    (folder.root / config.data / config.broker / CONVERTING).unlink(missing_ok=True)
