"""The audit log on one broker's disk becomes the one that brokers copy (`felix region copy-audit-log`, decision 0132).

While that broker is stopped, its log gets its last checkpoint, and it is signed with the log's key that the log goes on as a stream of the region's
own, from these leaves. That stands in the broker's data folder (its file `node`) before one transaction, compared with what was read, says it in the
metadata store. From then on that broker alone goes on with the log: at its start its files become a copy (`audit.copied_disk.become_copied`), and once
it leads the stream it writes the leaves there before it is home (`region.evidence.audit_log`); other copies follow. Nothing else is signed meanwhile, and
nothing deleted.

Invariant: one change is signed of a log. Where the store was put back, or did not answer, the one that the folder knows is said again; the broker does
not start on a store that says otherwise.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import msgspec

from audit.checkpoint import Checkpoint
from audit.note import parse_note
from audit.origin import region_origin
from audit.signer_disk import load_signers
from audit.tile import CHECKPOINT_PATH, COPIED_PATH
from audit.trail import Trail
from audit.trust import RegionTrust
from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.runtime.port import Runtime
from felix.storage.disk import PRIVATE_FILES
from keys.bundle import RegionBundle
from keys.key_file import load_signing_key
from region.begun_folders import begun_log
from region.cluster.audit_home import AuditHome, Before
from region.cluster.mirror import ClusterMirror
from region.cluster.node_file import NodeFile
from region.cluster.records import ELECTION_CHARS, ClusterKeys, ShardId, ShardRecord, encode
from region.cluster.registry import EXPIRY_SLACK_MS
from region.cluster.transactions import Transaction, unchanged
from region.config import RegionConfig
from region.folder import AUDIT, RegionFolder
from region.metadata.port import MetadataStore
from region.metadata.records import AUDIT_STREAM, INCARNATION_BYTES
from region.metadata.transaction import Absent, ModRevision, Put

AUDIT_COPIES: Final = 3
"""Brokers that have copies of the audit log, where the region has so many: any one may be lost."""

_PUT_BACK: Final = (
    "Stop every broker, and put the store right by what their folders know: felix region reconcile."
)


class Plan(NamedTuple):
    """What is to be done: whose disk has the log, how many leaves, and how many brokers are to have copies."""

    broker: str
    leaves: int
    replicas: int


async def where(store: MetadataStore, region: str) -> AuditHome:
    """Where the audit log of a region of several brokers is. Raises RequestError(NOT_FOUND) where no broker was ever started."""
    entry = await store.get(ClusterKeys(region).audit_home)
    if entry is None:
        raise RequestError(
            f"{region} has no audit log yet.",
            code=Code.NOT_FOUND,
            hint="It begins with copies; start its brokers.",
        )
    return AuditHome.of(entry)


async def copy_audit_log(
    store: MetadataStore,
    folder: RegionFolder,
    config: RegionConfig,
    own: RegionBundle,
    runtime: Runtime,
    *,
    dry_run: bool,
) -> Plan:
    """Have the log go on as a stream with copies. `config`: as it was read, with all brokers. The lock of the broker's data folder is held by the
    caller. Raises RequestError(CONFLICT) where it is one, or went on as one and the store was put back, UnavailableError where the broker is alive,
    or the folder of the log is not the one that was begun, CorruptionError where its folder knows another log, what opening the log raises, and what the store raises: asked again, it is done or it finds
    it done.
    """
    assert config.cluster is not None
    mirror = ClusterMirror(store, config.region, runtime)
    await mirror.start()
    try:
        view = mirror.view
        keys = view.keys
        entry = await store.get(keys.audit_home)
        home = AuditHome("") if entry is None else AuditHome.of(entry)
        if entry is None or home.stream is not None:
            raise RequestError(f"Brokers copy the audit log of {config.region} already.", code=Code.CONFLICT)
        broker, replicas = home.broker, min(AUDIT_COPIES, len(config.cluster.brokers))
        if replicas < 2:
            raise RequestError(
                f"{config.region} has one broker, and each copy is on a broker of its own.",
                code=Code.CONFLICT,
                hint="Give it more first: felix region scale 3.",
            )
        await _ended(mirror, broker)
        node_file = NodeFile(PRIVATE_FILES, folder.root / config.of_broker(broker).data, runtime.random)
        known = await asyncio.to_thread(_known, node_file, broker)
        checkpoint = await asyncio.to_thread(
            _last_checkpoint, folder, config.of_broker(broker), own, signs=not dry_run
        )
        before = Before(broker, checkpoint.size, checkpoint.root.hex())
        if known is not None:
            _require_same(known, before)
        plan = Plan(broker, checkpoint.size, replicas if known is None else known.replicas)
        if dry_run:
            return plan
        after = known
        if after is None:
            incarnation = runtime.random.randbytes(INCARNATION_BYTES).hex()
            after = AuditHome("", incarnation, replicas, runtime.clock.now_ms(), before).signed(
                config.region, await asyncio.to_thread(load_signing_key, folder.audit_key)
            )
            await asyncio.to_thread(_remember, node_file, after)
        shard = ShardId(after.incarnation, 0)
        record = ShardRecord(
            stream=str(AUDIT_STREAM),
            epoch=1,
            election=runtime.random.randbytes(ELECTION_CHARS // 2).hex(),
            replicas=(broker,),
            isr={broker: view.nodes[broker].registration},
            # Its leader asks for more once there are more copies.
            min=1,
        )
        result = await mirror.commit(
            Transaction(
                (
                    ModRevision(keys.audit_home, entry.mod_revision),
                    unchanged(view, keys.node(broker)),
                    Absent(keys.broker(broker)),
                    Absent(keys.frozen),
                    Absent(keys.shard(shard)),
                ),
                (
                    Put(keys.audit_home, after.encode().encode()),
                    Put(keys.shard(shard), encode(record, keys.shard(shard))),
                ),
            )
        )
        if result is None or not result.succeeded:
            raise UnavailableError(
                "The metadata store was changed meanwhile, or its answer was lost.",
                hint="Run the command again: it says whether it was done.",
            )
        return plan
    finally:
        await mirror.close()


def _known(node_file: NodeFile, broker: str) -> AuditHome | None:
    """What was signed before of the log on the broker's disk, as its folder knows it; None where nothing was. Blocks."""
    told = node_file.load().audit
    if told in ("", AuditHome(broker).encode()):
        return None
    known = AuditHome.decode(told, f"The data folder of broker {broker}")
    if known.before is None or known.before.broker != broker:
        raise CorruptionError(
            f"The metadata store says that broker {broker} alone has the region's audit log, and its data folder knows another one ({told}).",
            code=Code.ROLLED_BACK,
            hint=_PUT_BACK,
        )
    return known


def _require_same(known: AuditHome, now: Before) -> None:
    """Raises RequestError(CONFLICT) where the log is not as it was when it was signed how it goes on."""
    before = known.before
    assert before is not None
    if (before.size, before.root) != (now.size, now.root):
        raise RequestError(
            f"It was signed that the audit log of broker {now.broker} goes on as copies from {before.size:,} leaves, and it has {now.size:,} now, "
            "with another checkpoint.",
            code=Code.CONFLICT,
            hint="This is not the folder that the log was in then. Put that one back; `felix audit verify` tells them apart.",
        )


def _remember(node_file: NodeFile, home: AuditHome) -> None:
    """Before the store says it: whatever becomes of the store, no other change is signed. Blocks."""
    node_file.save(msgspec.structs.replace(node_file.load(), audit=home.encode()))


async def _ended(mirror: ClusterMirror, broker: str) -> None:
    """Wait until the broker's lease has ended: its folder's lock, which we hold, says that its process has."""
    view = mirror.view
    if broker not in view.nodes:
        raise RequestError(
            f"Broker {broker}, which has the audit log, was never registered.",
            code=Code.NOT_FOUND,
            hint="Start it once.",
        )
    try:
        async with asyncio.timeout((_lease_ms(mirror, broker) + EXPIRY_SLACK_MS) / 1_000):
            await mirror.until(lambda: broker not in view.alive)
    except TimeoutError:
        raise UnavailableError(
            f"Broker {broker} is alive on {view.alive[broker].host}.",
            code=Code.SERVED_ELSEWHERE,
            hint="Stop it first; the others may run.",
        ) from None


def _lease_ms(mirror: ClusterMirror, broker: str) -> int:
    alive = mirror.view.alive.get(broker)
    return 0 if alive is None else alive.lease_ms


def _last_checkpoint(
    folder: RegionFolder, config: RegionConfig, own: RegionBundle, *, signs: bool
) -> Checkpoint:
    """Of the log that the broker wrote alone: all its leaves are under it. Without `signs` it is the one that is there."""
    path = folder.root / config.data / AUDIT
    if not path.is_dir():
        raise RequestError(
            f"The audit log is on the disk of broker {config.broker}, and {path} is not on this machine.",
            code=Code.NOT_FOUND,
            hint=f"Run the command where broker {config.broker} runs.",
        )
    # An empty folder where its disk is not mounted would be signed for a log of no leaves, and there is no way back.
    begun_log(folder, config).require()
    if not (path / CHECKPOINT_PATH).exists():
        raise RequestError(
            f"There is no audit log in {path}, and broker {config.broker} began one: its disk is not mounted, or somebody moved what was in it.",
            code=Code.NOT_FOUND,
            hint="Nothing was signed. Put the folder back, or its backup, and run this again.",
        )
    if (path / COPIED_PATH).exists():
        raise RequestError(
            f"The audit log {path} goes on as copies already, and the metadata store says that broker {config.broker} alone has it: the store was put back.",
            code=Code.CONFLICT,
            hint=_PUT_BACK,
        )
    origin = region_origin(config.region, config.mesh)
    signers = load_signers(origin, folder.audit_key, folder.audit_ml_dsa_key)
    earlier = RegionTrust(own).earlier_keys(origin, (signer.key for signer in signers))
    trail = Trail.open(
        path,
        signers[0],
        also=signers[1:],
        earlier=earlier,
        refusal=lambda: "" if signs else "it is only looked at",
    )
    try:
        return Checkpoint.parse(parse_note(trail.publish() if signs else trail.checkpoint()).text)
    finally:
        trail.close()
