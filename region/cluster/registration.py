"""How a broker joins its region: under a number that no other start has, from a folder that is neither an old copy nor another's.

The folder and the store each hold the folder's id, the number of its last registration and a pulse; the folder's file is always written
first, and synced. So at a start the store is where the file is, or one step behind; further on, the folder is an older copy of itself;
further back, the store is, whichever folder of the broker it has. Copies that are younger than one pulse are not noticed.

Order of a start: 1. `intend`: the file with the next number, synced. 2. Its transaction. 3. `registered`: the file again, synced. 4. The
logs are opened, and everything that recovery kept is synced. 5. `announce`: alive, under a lease; from now on the broker may be elected,
so it must know the shard records at a revision not below that of 2, and none of them may be older than its logs
(`transactions.went_back`). Whoever lost its lease announces itself again, with the same number. Every `PULSE_MS`: `raise_pulse`, the file,
then its transaction. At the end in order: everything is synced, then `stop`.

Pure: what is to be written is returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from region.cluster.records import BrokerRecord, NodeRecord, PulseRecord, ShardRecord, encode
from region.cluster.transactions import Reason, Refusal, Transaction, unchanged
from region.cluster.view import ClusterView
from region.metadata.transaction import Compare, Delete, Put, Write

PULSE_MS: Final = 10_000
"""A folder that was copied longer ago than this is recognised. Each pulse costs the folder a sync and the store a transaction."""
RETIRED_REMEMBERED_MAX: Final = 128
"""Brokers that a folder knows to be retired, the newest; as many as a region may have."""
LEASE_MARGIN_MS: Final = 250
"""What rests on no commit is answered until so long before the lease ends: clocks run at rates that differ by less than 1 %."""


class FolderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The file `node` of a data folder. `intended`: the highest number that any start from this folder has tried, at least
    `registration`, the last that succeeded. `pulse`: what the store holds, or is about to. `sync_failed`: what this registration
    acknowledged without a sync may be gone from the page cache, although the machine runs on. `audit`: where the region's audit log is, as this
    folder saw it first, or what was signed since that it goes on as (audit_home.AuditHome); empty before. `retired`: the folders of
    brokers that were retired while this one followed the store, by broker, the newest last. `audit_copies`: the folders of the brokers whose copies of the audit
    log were in sync in epoch `audit_epoch` of it, as this one followed the store last, by broker."""

    folder: str
    registration: int = 0
    intended: int = 0
    pulse: int = 0
    sync_failed: bool = False
    audit: str = ""
    retired: dict[str, str] = {}
    audit_copies: dict[str, str] = {}
    audit_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a broker. `boot`: id of its machine's boot; `lock`: `FolderLock.identity` of its folder, empty where that proves
    nothing, as over a network."""

    broker: str
    host: str
    boot: str
    lock: str
    zone: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """First the file, synced; then the transaction."""

    file: FolderRecord
    transaction: Transaction


def intend(view: ClusterView, file: FolderRecord, start: Start, *, replace: bool = False) -> Step | Refusal:
    """The next registration. `replace`: this folder is new and takes the place of the one that was recorded, whose data is lost.

    Refused with `retry` while another process may be alive under the same name.
    """
    keys, name = view.keys, start.broker
    node, alive = view.nodes.get(name), view.alive.get(name)
    # An earlier try to replace may have happened, although its answer was lost.
    replace = replace and (node is None or node.folder != file.folder)
    if refusal := _unreadable(view, name) or _misplaced(view, file, start, replace=replace):
        return refusal
    compares: list[Compare] = [unchanged(view, keys.node(name)), unchanged(view, keys.pulse(name))]
    writes: list[Write] = []
    if alive is not None:
        if replace or not is_dead_for_certain(alive, start):
            return Refusal(
                Reason.STILL_ALIVE,
                f"Broker {name} is alive on {alive.host}, or was a moment ago.",
                retry=True,
            )
        writes.append(Delete(keys.broker(name)))
        compares.append(unchanged(view, keys.broker(name)))
        if view.controller is not None and view.controller.broker == name:
            # The controller's record goes with the same lease: nobody else would be the controller until that ends.
            writes.append(Delete(keys.controller))
            compares.append(unchanged(view, keys.controller))
    number = next_number(file, node)
    file = msgspec.structs.replace(file, intended=number)
    record = NodeRecord(
        folder=file.folder,
        registration=number,
        boot=start.boot,
        clean=0 if node is None or replace else node.clean,
        whole_since=number if node is None or replace else node.whole_since,
        kept_since=number if node is None or replace else kept_since(file, node, start.boot, number),
        host=start.host,
        zone=start.zone,
        drain=node is not None and node.drain,
        version=start.version,
    )
    writes.append(Put(keys.node(name), encode(record, keys.node(name))))
    if replace and name in view.pulses:
        writes.append(Put(keys.pulse(name), encode(PulseRecord(file.pulse), keys.pulse(name))))
    return Step(file, Transaction(tuple(compares), tuple(writes)))


def is_dead_for_certain(alive: BrokerRecord, start: Start) -> bool:
    """Whether the broker that stands as alive held the lock on our folder, which is ours now."""
    return start.lock != "" and alive.lock == start.lock


def next_number(file: FolderRecord, node: NodeRecord | None) -> int:
    """A registration that no start has had: also one that was intended, and of which nobody knows what came of it, may have."""
    return max(file.registration, file.intended, 0 if node is None else node.registration) + 1


def kept_since(file: FolderRecord, node: NodeRecord, boot: str, number: int) -> int:
    """The first registration since which no unsynced byte can have been lost, where `number` is the one that begins."""
    if file.sync_failed:
        return number
    if node.clean == node.registration or (boot and node.boot == boot):
        return node.kept_since
    return number


def registered(file: FolderRecord) -> FolderRecord:
    """The registration that the file intended is done."""
    return msgspec.structs.replace(file, registration=file.intended, sync_failed=False)


def after_failed_sync(file: FolderRecord) -> FolderRecord:
    """The file, to be written before the leader's word that its copy failed: that word may never reach the store."""
    return msgspec.structs.replace(file, sync_failed=True)


def announce(
    view: ClusterView, file: FolderRecord, broker: str, record: BrokerRecord, lease: int
) -> Transaction | Refusal:
    """Alive, under a lease: for the first time after a registration, or again after a lease was lost.

    `registered` in the store belongs to brokers that serve a region alone (region.metadata.registration): changed here, it refuses one
    that is just starting beside a cluster, and compared, it refuses us beside one that just has.
    """
    assert record.registration == file.registration
    if refusal := _unreadable(view, broker) or superseded(view, file, broker):
        return refusal
    keys = view.keys
    return Transaction(
        (
            unchanged(view, keys.node(broker)),
            unchanged(view, keys.broker(broker)),
            unchanged(view, keys.alone),
        ),
        (
            Put(keys.broker(broker), encode(record, keys.broker(broker)), lease),
            Put(keys.alone, encode(record, keys.alone)),
        ),
    )


def raise_pulse(view: ClusterView, file: FolderRecord, broker: str) -> Step | Refusal:
    """The next pulse, or the last once more where the store has not got it."""
    if refusal := superseded(view, file, broker):
        return refusal
    if _pulse(view, broker) == file.pulse:
        file = msgspec.structs.replace(file, pulse=file.pulse + 1)
    key = view.keys.pulse(broker)
    return Step(
        file,
        Transaction(
            (unchanged(view, key), unchanged(view, view.keys.node(broker))),
            (Put(key, encode(PulseRecord(file.pulse), key)),),
        ),
    )


def stop(view: ClusterView, file: FolderRecord, broker: str) -> Step | Refusal:
    """The end in order of this registration: everything that was acknowledged is synced, and nothing more will be acknowledged. After a
    failed sync there is none, only the end of the lease."""
    step = raise_pulse(view, file, broker)
    if isinstance(step, Refusal) or file.sync_failed:
        return step
    key = view.keys.node(broker)
    clean = msgspec.structs.replace(view.nodes[broker], clean=file.registration)
    return Step(
        step.file,
        Transaction(
            step.transaction.compares,
            (*step.transaction.writes, Put(key, encode(clean, key)), Delete(view.keys.broker(broker))),
        ),
    )


def drain(view: ClusterView, broker: str, *, on: bool) -> Transaction | Refusal:
    """An operator's word that a broker's shards are to be moved away, or no longer.

    To drain, it compares all brokers: of two that would leave too few between them, the later word finds the earlier one.
    """
    node = view.nodes.get(broker)
    if node is None:
        return Refusal(Reason.NOT_REGISTERED, f"Broker {broker} was never registered, or was retired.")
    key = view.keys.node(broker)
    compared = sorted(view.nodes) if on else [broker]
    return Transaction(
        tuple(unchanged(view, view.keys.node(name)) for name in compared),
        (Put(key, encode(msgspec.structs.replace(node, drain=on), key)),),
    )


def retire(view: ClusterView, broker: str) -> Transaction | Refusal:
    """An operator's word that a broker is gone for good: nothing waits for it, and its name may be given anew. No shard may name it, and it
    may not be alive."""
    keys = view.keys
    if broker not in view.nodes:
        return Refusal(Reason.NOT_REGISTERED, f"Broker {broker} was never registered, or was retired.")
    if broker in view.alive:
        return Refusal(Reason.STILL_ALIVE, f"Broker {broker} is alive on {view.alive[broker].host}.")
    named = [
        record.stream
        for record in view.shards.values()
        if broker in (record.leader, *record.replicas, *record.target, *record.isr, *record.elr)
    ]
    if named:
        return Refusal(
            Reason.STILL_LEADS,
            f"Broker {broker} has {'a copy of a shard' if len(named) == 1 else f'copies of {len(named):,} shards, one of them'} of {min(named)}.",
        )
    writes: list[Write] = [Delete(keys.node(broker))]
    compares: list[Compare] = [
        unchanged(view, keys.node(broker)),
        unchanged(view, keys.broker(broker)),
        unchanged(view, keys.pulse(broker)),
    ]
    if broker in view.pulses:
        writes.append(Delete(keys.pulse(broker)))
    return Transaction(tuple(compares), tuple(writes))


def with_brokers(file: FolderRecord, known: Mapping[str, str], changed: Mapping[str, bool]) -> FolderRecord:
    """The file once it is known which brokers came and went. `known`: their folders as they stood before; `changed`: whose record was written (True)
    or deleted, which is nobody's doing but an operator's who retired it."""
    retired = {broker: folder for broker, folder in file.retired.items() if broker not in changed}
    retired |= {
        broker: known[broker] for broker, is_there in changed.items() if not is_there and broker in known
    }
    newest = dict(list(retired.items())[-RETIRED_REMEMBERED_MAX:])
    return file if newest == file.retired else msgspec.structs.replace(file, retired=newest)


def with_audit_copies(
    file: FolderRecord, record: ShardRecord, nodes: Mapping[str, NodeRecord]
) -> FolderRecord:
    """The file once `record` of the audit log was written. One of a store that went back says nothing."""
    if record.epoch < file.audit_epoch:
        return file
    copies = {
        broker: nodes[broker].folder
        for broker, registration in sorted(record.members().items())
        if broker in nodes and registration >= nodes[broker].whole_since
    }
    if (copies, record.epoch) == (file.audit_copies, file.audit_epoch):
        return file
    return msgspec.structs.replace(file, audit_copies=copies, audit_epoch=record.epoch)


def _misplaced(view: ClusterView, file: FolderRecord, start: Start, *, replace: bool) -> Refusal | None:
    """Whether this folder may not go on from what the store knows of the broker."""
    name, node = start.broker, view.nodes.get(start.broker)
    if owner := next(
        (each for each, known in view.nodes.items() if known.folder == file.folder != "" and each != name), ""
    ):
        return Refusal(
            Reason.OTHER_FOLDER,
            f"The data folder of broker {name} is that of broker {owner}. Stop both, put {owner}'s back where it was, and {name}'s own here.",
        )
    # Before its folder is called the wrong one: whoever follows that with the newest folder gives up what only it has.
    if node is not None and (refusal := _newer_than_recorded(view, file, name, node)):
        return refusal
    if replace:
        if file.registration:
            return Refusal(
                Reason.OTHER_FOLDER,
                f"The folder of broker {name} is to be replaced by a new one, and the one in data/ has been registered before: move it elsewhere first, and "
                "keep it until all copies are in sync.",
            )
        return None
    if node is None:
        return _unknown(view, name) if file.registration else None
    if node.folder != file.folder:
        way_back = (
            "Put it back"
            if file.registration
            else "What is here now was made by this start and holds nothing: put the other one in its place, not into it"
        )
        return Refusal(
            Reason.OTHER_FOLDER,
            f"Broker {name} had another data folder. {way_back}: with it the broker goes on where it was. If it is lost, `felix region up "
            f"{view.keys.region} --broker {name} --replace-folder` gives it up.",
        )
    highest = max(file.registration, file.intended)
    if node.registration > highest:
        return _old_folder(view, name)
    if node.registration < file.registration:
        return _old_store(view, name)
    return _pulse_of(view, file, name)


def superseded(view: ClusterView, file: FolderRecord, broker: str) -> Refusal | None:
    """Whether the registration that this process has is not the broker's any more, or the store is older than its folder."""
    node = view.nodes.get(broker)
    if node is None or node.registration < file.registration:
        return _old_store(view, broker)
    if node.folder != file.folder or node.registration != file.registration:
        return Refusal(
            Reason.SUPERSEDED,
            f"Broker {broker} was started again elsewhere, as registration {node.registration}.",
        )
    return _pulse_of(view, file, broker)


def _pulse_of(view: ClusterView, file: FolderRecord, broker: str) -> Refusal | None:
    there = _pulse(view, broker)
    if there > file.pulse:
        return _old_folder(view, broker)
    if there < file.pulse - 1:
        return _old_store(view, broker)
    return None


def _pulse(view: ClusterView, broker: str) -> int:
    pulse = view.pulses.get(broker)
    return 0 if pulse is None else pulse.pulse


def _old_folder(view: ClusterView, broker: str) -> Refusal:
    return Refusal(
        Reason.OLD_FOLDER,
        f"The data folder of broker {broker} is an older copy: the broker has run since it was made. Put its newest folder back. If that is lost, "
        f"move this one out of data/, and `felix region up {view.keys.region} --broker {broker} --replace-folder` gives the newest up.",
    )


def _newer_than_recorded(
    view: ClusterView, file: FolderRecord, broker: str, node: NodeRecord
) -> Refusal | None:
    """Whether a folder took the place of the one that the store has, and the store has forgotten it. It is none of another broker's, whose
    numbers are its own."""
    is_known = any(each.folder == file.folder for each in view.nodes.values())
    if is_known or file.registration <= node.registration:
        return None
    refusal = _old_store(view, broker)
    return dataclasses.replace(
        refusal,
        sentence=f"{refusal.sentence} It has another data folder of this broker, as of start {node.registration}, and this one has start "
        f"{file.registration}. Only if the broker was retired and its name given anew, put the folder of its new life back instead.",
    )


def _unknown(view: ClusterView, broker: str) -> Refusal:
    """A folder that was registered, of a broker that the store does not have."""
    refusal = _old_store(view, broker)
    if not view.nodes:
        return refusal
    return dataclasses.replace(
        refusal,
        sentence=f"The metadata store does not know broker {broker}. If it was retired, move its data folder away: it begins with a new one. "
        f"Else: {refusal.sentence}",
    )


def _old_store(view: ClusterView, broker: str) -> Refusal:
    return Refusal(
        Reason.OLD_STORE,
        f"The metadata store is older than the data folder of broker {broker}: it was put back from a backup, or lost. "
        f"Put the newest store back; where there is none, stop all brokers: `felix region reconcile {view.keys.region} --dry-run` says what makes it fit.",
    )


def _unreadable(view: ClusterView, broker: str) -> Refusal | None:
    """Whether a broker that knows no cluster serves the region, or a record that decides about us is of a later version."""
    keys = view.keys
    for key in view.unreadable:
        if key.startswith(keys.brokers) or key in (keys.node(broker), keys.pulse(broker)):
            return Refusal(
                Reason.OLD_BROKER,
                f"{key} is not a record of this version: a broker of another version serves the region.",
                retry=True,
            )
    return None
