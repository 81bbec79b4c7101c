"""The region's metadata, as a broker knows it: the store, the keys that wrap streams' keys, the catalog; of several brokers, its place among them."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Protocol

from audit.trust import RegionTrust
from felix import __version__
from felix.errors import Code, RequestError, UnavailableError
from felix.storage.disk import boot_id
from keys.keyring import Keyring, open_provider
from keys.reopening import KeyFile
from keys.shared import RegionKeys, SharedKeyring, find_first_root, open_copies
from keys.store import KEY_FILE, KeyStore
from region.cluster.key_rotation import KeyRotation
from region.cluster.member import ClusterMember
from region.cluster.node_file import NodeFile
from region.cluster.registration import Start
from region.cluster.registry import Address
from region.cluster.stream_keys import StreamKeys
from region.clustered import Clustered
from region.evidence.copying_audit_log import AUDIT_COPIES
from region.key_service import KeyringRotation, Rotation
from region.metadata.catalog import Catalog
from region.metadata.genesis import region_prefix
from region.metadata.mirror import CatalogMirror
from region.metadata.port import MetadataStore
from region.metadata.registration import Registration, is_holder
from region.startup.ground import Ground
from region.startup.store import claim, holder, log_keys, open_store, refuse_several
from region.streams.erasure import Destruction, SharedDestruction
from region.trust.log_key_store import require_log_key_of_now


class Registered(Protocol):
    """Who may be told that another process serves the region now."""

    def refusal(self) -> UnavailableError | None: ...


@dataclass(frozen=True, slots=True)
class Keys:
    """What opens and seals records: the keyring, its files, and how its keys are rotated."""

    keyring: RegionKeys
    files: list[KeyFile]
    rotation: Rotation
    alone: Keyring | None
    """the same keyring, of a broker that is the region's only one"""
    shared: StreamKeys | None
    """the keys of streams that several brokers share"""
    destruction: Destruction | None
    """how such keys are destroyed"""


@dataclass(frozen=True, slots=True)
class Metadata:
    """`clustered`, of one of several brokers; `registration`, of one alone in a store that several processes may open."""

    store: MetadataStore
    catalog: Catalog
    mirror: CatalogMirror
    keys: Keys
    registration: Registration | None
    clustered: Clustered | None

    @property
    def registered(self) -> Registered | None:
        """Who says whether this broker may write; None where nobody else can."""
        return self.registration if self.clustered is None else self.clustered.member


async def open_metadata(ground: Ground, *, replace_folder: bool) -> Metadata:
    """Open the store, as this region's, and take the broker's place. Raises what these raise."""
    folder, config, runtime, machine, stack = (
        ground.folder, ground.config, ground.runtime, ground.machine, ground.stack,
    )  # fmt: skip
    alone: Keyring | None = None
    if config.cluster is None:
        alone = await asyncio.to_thread(machine.open_keys, folder.keys, config.region, runtime=runtime)
        stack.callback(alone.close)
    store = machine.store or await open_store(folder, config, runtime)
    stack.push_async_callback(store.close)
    await claim(store, folder, config, own=RegionTrust(ground.own), now_ms=runtime.clock.now_ms())
    registration: Registration | None = None
    clustered: Clustered | None = None
    if alone is None:
        clustered = await _join(ground, store, replace=replace_folder)
        keys = await _share_keys(ground, store, clustered.member)
        # A machine that was stopped and goes on may have done so twice, from one image.
        clustered.member.on_lease(keys.keyring.rotate_data)
    else:
        keys = Keys(alone, [alone], KeyringRotation(alone), alone, None, None)
        if config.metadata.kind == "etcd":
            await refuse_several(store, config.region)
            # Before the audit log is opened, which may sign.
            registration = await Registration.open(
                store,
                config.region,
                holder(folder, config, ground.directory.lock_identity, runtime.clock.now_ms()),
            )
            stack.push_async_callback(registration.close)
    catalog = Catalog(store, config.region)
    if clustered is not None:
        # Registered by now: who changes the keys of the log sees this broker, or this broker what was told.
        await require_log_key_of_now(catalog, ground.own)
    mirror = CatalogMirror(store, config.region, runtime)
    await mirror.start()
    stack.push_async_callback(mirror.close)
    return Metadata(store, catalog, mirror, keys, registration, clustered)


def why_not(registered: Registered | None) -> str:
    """Why a broker may not write, as a sentence without its end; empty where it may."""
    refusal = None if registered is None else registered.refusal()
    return "" if refusal is None else refusal.sentence.removesuffix(".")


async def _join(ground: Ground, store: MetadataStore, *, replace: bool) -> Clustered:
    """Become a member of the region's cluster. Raises as `ClusterMember.open`, and RequestError where the region was served by one broker
    alone: what that one has, this one has not."""
    config, runtime = ground.config, ground.runtime
    cluster, place = config.cluster, config.own_place
    assert cluster is not None and place is not None
    served = await store.get(region_prefix(config.region) + "registered")
    if served is not None and is_holder(served.value):
        raise RequestError(
            f"{config.region} was served by one broker, whose records are on its disk: several brokers would begin its streams anew.",
            code=Code.CONFLICT,
            hint=f"Start it without cluster: in region.yaml, or turn it into one of several: felix region to-cluster {config.region}.",
        )
    address = str(place.client_address)
    member = await ClusterMember.open(
        store,
        config.region,
        Start(
            config.broker,
            place.host or socket.gethostname(),
            boot_id(),
            ground.directory.lock_identity,
            zone=place.zone,
            version=__version__,
        ),
        NodeFile(ground.machine.files, ground.data, runtime.random),
        Address(address, address),
        lease_ms=cluster.lease,
        audit_copies=min(AUDIT_COPIES, len(cluster.brokers)),
        log_keys=await asyncio.to_thread(log_keys, ground.folder, config, ground.own),
        runtime=runtime,
        replace=replace,
    )
    ground.stack.push_async_callback(member.close)
    return Clustered(member)


async def _share_keys(ground: Ground, store: MetadataStore, member: ClusterMember) -> Keys:
    """The keys that the brokers of a cluster share, and their rotation. Raises as `StreamKeys.open`, and what opening a key file raises."""
    folder, config, runtime, stack = ground.folder, ground.config, ground.runtime, ground.stack
    region, own_folder = config.region, ground.data / "keys"

    def open_files() -> tuple[SharedKeyring, KeyStore]:
        own = None
        if (own_folder / KEY_FILE).exists():
            # Of a release in which each broker had a keyring of its own.
            own = ground.machine.open_keys(own_folder, region, runtime=runtime)
            stack.callback(own.close)
        copies = open_copies(own_folder, region, monotonic=runtime.clock.monotonic)
        stack.callback(copies.close)
        provider = open_provider(folder.keys, region, runtime)
        return SharedKeyring(region, provider, own, former=folder.keys, runtime=runtime), copies

    keyring, copies = await asyncio.to_thread(open_files)
    shared = StreamKeys(
        store,
        keyring,
        copies,
        lambda: find_first_root(folder.keys, region, keyring.provider),
        config.broker,
        runtime,
    )
    stack.push_async_callback(shared.close)
    rotation = KeyRotation(store, shared, config.broker, lambda: member.brokers, runtime)
    await shared.open()
    await rotation.start()
    stack.push_async_callback(rotation.close)
    files: list[KeyFile] = [shared, *([keyring.own] if keyring.own is not None else [])]
    return Keys(keyring, files, rotation, None, shared, SharedDestruction(rotation))
