"""The region's metadata store: opened, and proved to be this region's."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from pathlib import Path

from audit.note import Algorithm
from audit.origin import region_origin
from audit.trust import RegionTrust
from felix.errors import Code, RequestError
from felix.runtime.port import Runtime
from keys.bundle import RegionBundle
from keys.key_file import load_signing_key
from keys.signing import VerifyKey
from region.config import RegionConfig
from region.folder import RegionFolder
from region.metadata.embedded import EmbeddedStore
from region.metadata.etcd import EtcdConfig, EtcdStore, EtcdTls
from region.metadata.genesis import claim_or_verify, region_prefix, sign_genesis
from region.metadata.port import MetadataStore
from region.metadata.registration import Holder


async def open_store(folder: RegionFolder, config: RegionConfig, runtime: Runtime) -> MetadataStore:
    """The region's metadata store, as its configuration says. Raises what opening it raises."""
    settings, base = config.metadata, folder.root
    if settings.kind == "embedded":
        return await EmbeddedStore.open(base / config.data / "metadata.db", runtime=runtime)

    def path(text: str) -> Path | None:
        return base / text if text else None

    password = ""
    if settings.password_file:
        try:
            password = (await asyncio.to_thread((base / settings.password_file).read_text)).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise RequestError(
                f"The file with the metadata store's password, {base / settings.password_file}, cannot be read: {why}.",
                code=Code.CONFIG_INVALID,
                hint="Put it there, or name another with metadata.password_file.",
            ) from error
    tls = EtcdTls(path(settings.ca), path(settings.cert), path(settings.key)) if settings.ca else None
    return await EtcdStore.open(
        EtcdConfig(endpoints=settings.endpoints, tls=tls, user=settings.user, password=password)
    )


async def claim(
    store: MetadataStore, folder: RegionFolder, config: RegionConfig, *, own: RegionTrust, now_ms: int
) -> None:
    """The store is this region's, from its first use on. Raises what `claim_or_verify` raises."""
    audit_key = await asyncio.to_thread(load_signing_key, folder.audit_key)
    root = hashlib.sha256(own.bundle.root_pem.encode()).hexdigest()
    genesis = sign_genesis(config.region, config.mesh, root, now_ms, audit_key)
    await claim_or_verify(store, genesis, audit_key.verify_key, _earlier_log_keys(config, own))


def log_keys(folder: RegionFolder, config: RegionConfig, own: RegionBundle) -> list[VerifyKey]:
    """The Ed25519 keys of the region's own audit log, the one that signs it first. Blocks."""
    return [load_signing_key(folder.audit_key).verify_key, *_earlier_log_keys(config, RegionTrust(own))]


def _earlier_log_keys(config: RegionConfig, own: RegionTrust) -> list[VerifyKey]:
    return [
        VerifyKey(key.public)
        for key in own.logs
        if key.name == region_origin(config.region, config.mesh) and key.algorithm is Algorithm.ED25519
    ]


async def refuse_several(store: MetadataStore, region: str) -> None:
    """Raises RequestError where several brokers have the region's records: one alone would begin its streams anew."""
    nodes = await store.range(f"{region_prefix(region)}nodes/", limit=1)
    if nodes.entries:
        raise served_by_several(region)


def served_by_several(region: str) -> RequestError:
    """Why a broker does not serve the region alone."""
    return RequestError(
        f"{region} is served by several brokers, whose records are on their disks: one alone would begin its streams anew.",
        code=Code.CONFLICT,
        hint=f"Keep cluster: in region.yaml, and metadata: with its etcd. Where `felix region to-cluster {region}` was cut off, run it again.",
    )


def holder(folder: RegionFolder, config: RegionConfig, lock: str, since_ms: int) -> Holder:
    """This process, as the one that serves the region alone."""
    return Holder(
        broker=config.broker,
        host=socket.gethostname(),
        process=os.getpid(),
        folder=str(folder.root),
        lock=lock,
        lease_ms=config.metadata.lease,
        since_ms=since_ms,
    )
