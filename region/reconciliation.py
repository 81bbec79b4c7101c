"""What makes a metadata store that was put back to an earlier state fit what the brokers' data folders know (R10).

Each broker's folder says how often it was registered, its pulse, and how far its copy of each log goes (`FolderReport`); from all of them, and
what the store has, `reconcile` makes a plan. Order: 1. no broker is alive; 2. `freeze`, with the folders that 3. lets the store forget; 3. the brokers' registrations and pulses; 4. the
records of shards, each above every epoch that a folder knows; 5. `retired`: brokers that were retired since are forgotten again; 6. `thaw`. A crash
between leaves the region frozen; the plan is made anew.

Invariants:
- nothing is cut or deleted, neither in the store, but what it says of a broker that was retired, nor in a folder;
- a shard is led from a copy that has all that was committed in each of its logs, as far as the folders that were heard can tell: what it
  lacks stands in fewer copies, heard or away, than a commit needs. Where that cannot be told, the plan says what may be lost
  (`Plan.losses`);
- the audit log goes on from such a copy alone: it is led by nobody before it would become a second history. Until all of a log that one broker's
  disk had is in the stream (decision 0132), it goes on from that broker.

Pure; used by `felix region reconcile`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from audit.unclean_leaf import UncleanElection
from region.cluster import membership, registration
from region.cluster.audit_home import Before
from region.cluster.records import (
    EPOCH_MAX,
    FrozenRecord,
    NodeRecord,
    PulseRecord,
    ShardDurability,
    ShardId,
    ShardRecord,
    encode,
)
from region.cluster.transactions import (
    Reason,
    Refusal,
    Transaction,
    state_unclean,
    unchanged,
    unclean_election,
)
from region.cluster.view import ClusterView
from region.log.companions import AUDIT_CHECKPOINTS, RECORDS
from region.log.point import LogPoint
from region.metadata.records import AUDIT_STREAM, REPLICAS_MAX, Stream, is_replicated, min_in_sync
from region.metadata.transaction import Absent, Delete, ModRevision, Put, Write
from region.replication.history import EpochStart, History, Parting, parting

RECONCILE_GAP: Final = 1 << 26
"""Numbers of epochs skipped where a store went back: those of more elections than can have happened that no folder heard of, each of
which takes half of `CHANCE_MAX` (region.log.epochs) on average. At the end of the numbers, half of those that are left."""

BEGINNING: Final = LogPoint(0)


class LogTold(msgspec.Struct, frozen=True, kw_only=True):
    """One log of a copy. `epoch`, `election`: of its last entry (0 and empty in an empty log; no election in a log of one copy). `end`: behind
    its last entry, all of which is on the disk. `kept`: what is surely committed. `starts`: where its epochs begin; empty in a log of one copy."""

    kind: int
    epoch: int = 0
    election: str = ""
    end: LogPoint = BEGINNING
    kept: LogPoint = BEGINNING
    starts: tuple[EpochStart, ...] = ()


class ShardTold(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's copy of a shard. `stream`: its name, as the folder says it. `damaged`: why it cannot be read."""

    stream: str
    incarnation: str
    number: int
    logs: tuple[LogTold, ...] = ()
    damaged: str = ""

    @property
    def epoch(self) -> int:
        """The last epoch of which it has anything."""
        return max((log.epoch for log in self.logs), default=0)

    @property
    def has_records(self) -> bool:
        """Whether anything was ever written to it."""
        return any(log.epoch or log.end > BEGINNING for log in self.logs)


class AuditTold(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's files of the audit log. `signed`: the leaves that the newest checkpoint covers; `documents`: below it, the SHA-256 of each
    signed document (hex) and its kind. `damaged`: why they cannot be read; then `documents` says nothing."""

    signed: int = 0
    documents: dict[str, str] = {}
    damaged: str = ""


class FolderReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one broker's data folder has, while nobody writes to it. `registration`, `intended`, `pulse`, `audit`, `retired`, `audit_copies`,
    `audit_epoch`: as in its file `node`."""

    region: str
    broker: str
    folder: str
    registration: int
    intended: int
    pulse: int
    host: str
    boot: str
    version: str
    made_ms: int
    shards: tuple[ShardTold, ...] = ()
    audit: str = ""
    audit_log: AuditTold = AuditTold()
    retired: dict[str, str] = {}
    audit_copies: dict[str, str] = {}
    audit_epoch: int = 0

    @property
    def number(self) -> int:
        """The highest registration that a start from this folder has tried."""
        return max(self.registration, self.intended)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What becomes of one shard. `copies`: those that have all, by broker, none where it is led by nobody; `before`: None where the store has no record of it."""

    shard: ShardId
    before: ShardRecord | None
    after: ShardRecord
    copies: tuple[str, ...]
    unclean: UncleanElection | None = None
    """what the audit log is to be told, where the copies may lack what was acknowledged"""

    @property
    def changes(self) -> bool:
        """Whether its record is to be written."""
        return self.before != self.after


@dataclass(slots=True)
class Plan:
    """`nodes` and `pulses`: as they are to be. `notes`: what an operator should know. `losses`: what was acknowledged and may be lost, cannot
    be served again, or is served again although it was deleted; it needs his word. `audit_home`: where the audit log is (region.cluster.audit_home), to be
    written in place of what the store has at `audit_revision` (0: nothing); empty where the store says it."""

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    pulses: dict[str, int] = field(default_factory=dict)
    shards: list[ShardPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    audit_home: str = ""
    audit_revision: int = 0
    retired: list[str] = field(default_factory=list)
    """brokers of which the store is to know nothing any more"""


def reconcile(
    view: ClusterView,
    streams: Mapping[str, Stream],
    deleted: Collection[str],
    reports: Mapping[str, FolderReport],
    expected: Iterable[str],
    *,
    without: Collection[str],
    retired: Collection[str] = (),
    configured: Collection[str] = (),
    audit_before: Before | None = None,
    election: Callable[[], str],
) -> Plan | Refusal:
    """What is to be written. `streams`: those of the catalog and of the region itself, by incarnation; `deleted`: incarnations with the mark of
    a deletion; `expected`: brokers that may have records, beside those that the store knows; `without`: those whose folders will not be heard;
    `retired`: those that had no copy any more when they were taken away, beside those that folders know to be; `configured`:
    the brokers that region.yaml names, empty where that is not known; `audit_before`: where the audit log
    was before it was copied; `election`: gives a fresh election id."""
    expected = set(expected)
    known_retired = _known_retired(view, reports, expected) - set(retired)
    gone = {*retired, *known_retired}
    left_out = {broker: report for broker, report in reports.items() if broker in retired}
    reports = {broker: report for broker, report in reports.items() if broker not in gone}
    noted, seen = _audit_copies(reports), _audit_epoch(reports)
    missing = sorted({*view.nodes, *expected, *noted} - reports.keys() - {*without, *gone})
    if missing:
        return Refusal(
            Reason.NO_REPORT,
            f"Of {', '.join(missing)} no folder was heard, and it may have more than the others.",
        )
    if named := sorted(reports.keys() & {*without}):
        return Refusal(Reason.CHANGED, f"The folder of {', '.join(named)} was heard, so it is not away.")
    plan = Plan()
    plan.notes += (
        f"Broker {broker} was retired, as the folders of others know: it stays so, and its folder, if there is one, is left as it is."
        for broker in sorted(known_retired)
    )
    for broker, report in sorted(reports.items()):
        if refusal := _broker(plan, view, report):
            return refusal
        if report.audit_log.damaged:
            plan.notes.append(
                f"Broker {broker}'s copy of the audit log cannot be read: {report.audit_log.damaged}"
            )
    signed = max(((report.audit_log.signed, broker) for broker, report in reports.items()), default=(0, ""))
    # Until all of the log is in its stream, that broker alone can go on with it.
    alone = audit_before if audit_before is not None and _has_all_leaves(reports, audit_before) else None
    told: dict[ShardId, dict[str, ShardTold]] = {}
    for broker, report in sorted(reports.items()):
        for each in report.shards:
            told.setdefault(ShardId(each.incarnation, each.number), {})[broker] = each
    known = {
        *view.shards,
        *(
            ShardId(stream.incarnation, number)
            for stream in streams.values()
            for number in range(stream.config.shards)
        ),
    }
    for shard in sorted(known):
        if shard.incarnation not in deleted:
            stream = streams.get(shard.incarnation)
            one = _known(plan, view, shard, stream, told.get(shard, {}), without, gone, noted, seen)
            _shard(plan, view, one, signed, alone, election)
            _left_out(plan, one, left_out)
    _unknown(plan, told, {shard.incarnation for shard in known} | set(deleted))
    _stay_retired(plan, view, gone)
    plan.notes += (
        f"Broker {broker} is registered again, and region.yaml does not name it. If it was retired, and had no copy any more, say --retired {broker}. "
        f"{_retire_again(broker)}"
        for broker in sorted({*view.nodes, *plan.nodes} - {*gone, *configured})
        if configured
    )
    return plan


def _audit_copies(reports: Mapping[str, FolderReport]) -> dict[str, str]:
    """The brokers whose copies of the audit log were in sync last, as the folders know it, each with the folder that it had."""
    newest = _audit_epoch(reports)
    found: dict[str, str] = {}
    for _, report in sorted(reports.items()):
        if report.audit_epoch == newest:
            found |= report.audit_copies
    return found


def _audit_epoch(reports: Mapping[str, FolderReport]) -> int:
    """The newest epoch of the audit log that a broker saw in the store: its leader may have written nothing in it."""
    return max((report.audit_epoch for report in reports.values()), default=0)


def _known_retired(
    view: ClusterView, reports: Mapping[str, FolderReport], expected: Collection[str]
) -> set[str]:
    """The brokers that others saw being retired, with the folder that store and folders have of them. Of one that is expected, an operator says it: its
    name may have been given anew since."""
    found = set()
    for by, report in reports.items():
        for broker, folder in report.retired.items():
            own, node = reports.get(broker), view.nodes.get(broker)
            if (
                broker not in expected
                and broker != by
                and (own is None or own.folder == folder)
                and (node is None or node.folder == folder)
                and (own is not None or node is not None)
            ):
                found.add(broker)
    return found


def _left_out(plan: Plan, known: _Known, reports: Mapping[str, FolderReport]) -> None:
    """Whether a folder that is left out, as an operator says that its broker was retired, has more of a shard than those that count."""
    if not known.is_durable:
        return
    most = max(
        (_ends(each).get(RECORDS, (0, BEGINNING)) for each in known.told.values()), default=(0, BEGINNING)
    )
    for broker, report in sorted(reports.items()):
        for each in report.shards:
            if ShardId(each.incarnation, each.number) == known.shard and (
                each.damaged or _ends(each).get(RECORDS, (0, BEGINNING)) > most
            ):
                plan.losses.append(
                    f"{known.what}: the folder of {broker} may have more of it than any other, and is left out because {broker} is said to be retired."
                )


def _stay_retired(plan: Plan, view: ClusterView, gone: set[str]) -> None:
    """Have the store forget those that no shard names; of others, say how they are retired again."""
    after = view.shards | {each.shard: each.after for each in plan.shards}
    for broker in sorted(gone & view.nodes.keys()):
        naming = sorted(
            record.stream for record in after.values() if broker in {*record.replicas, *record.target}
        )
        if not naming:
            plan.retired.append(broker)
            continue
        plan.notes.append(
            f"Broker {broker} was retired, and is registered again, as {naming[0]} names it. {_retire_again(broker)}"
        )


def _retire_again(broker: str) -> str:
    return f"To retire it once the region is served: `felix region drain {broker}`, then `felix region retire {broker}`."


def _without_retired(record: ShardRecord, gone: set[str]) -> ShardRecord:
    """The record without brokers that were retired since; as it is where it names no other."""
    replicas = tuple(broker for broker in record.replicas if broker not in gone)
    target = tuple(broker for broker in record.target if broker not in gone)
    if not (replicas or target) or gone.isdisjoint({*record.replicas, *record.target}):
        return record
    return msgspec.structs.replace(
        record,
        leader="" if record.leader in gone else record.leader,
        replicas=replicas or target,
        target=target if replicas else (),
        isr=membership.without(record.isr, gone),
        elr=membership.without(record.elr, gone),
        failed=membership.without(record.failed, gone),
    )


def _has_all_leaves(reports: Mapping[str, FolderReport], before: Before) -> bool:
    """Whether the log that a broker's disk alone had is there, and nobody has heard of more leaves."""
    own = reports.get(before.broker)
    return (
        own is not None
        and not own.audit_log.damaged
        and own.audit_log.signed == before.size == max(each.audit_log.signed for each in reports.values())
    )


def _broker(plan: Plan, view: ClusterView, report: FolderReport) -> Refusal | None:
    broker, number = report.broker, report.number
    node, pulse = view.nodes.get(broker), view.pulses.get(broker)
    there = 0 if pulse is None else pulse.pulse
    is_same = node is not None and node.folder == report.folder
    if node is not None and (
        node.registration > number or (is_same and node.registration == number and there > report.pulse)
    ):
        return Refusal(
            Reason.OLD_FOLDER,
            f"The folder of broker {broker} that was heard is older than what the store knows of it.",
        )
    if not number:
        return None
    plan.nodes[broker] = NodeRecord(
        folder=report.folder,
        registration=number,
        boot=report.boot,
        # What the folder has was synced when it was heard, and nobody has written to it since.
        clean=number,
        whole_since=node.whole_since if node is not None and is_same else number,
        kept_since=number,
        host=report.host,
        zone="" if node is None else node.zone,
        drain=node is not None and node.drain,
        version=report.version,
    )
    plan.pulses[broker] = report.pulse
    return None


@dataclass(frozen=True, slots=True)
class _Known:
    """What the store and the folders that were heard say of one shard."""

    shard: ShardId
    name: str
    """of its stream"""
    stored: ShardRecord | None
    """the store's record"""
    before: ShardRecord | None
    """the same, without brokers that were retired since"""
    stream: Stream | None
    told: Mapping[str, ShardTold]
    damaged: Mapping[str, str]
    """brokers whose copy cannot be read, and why"""
    whole: Mapping[str, ShardTold]
    """copies that may be led"""
    away: Sequence[str]
    """brokers whose copies cannot be had: not heard, or damaged"""
    former: Sequence[str]
    """brokers whose folder was lost since the backup: it may have had what nobody else has"""
    since: Sequence[str]
    """of another stream: brokers whose folder was lost since the backup, and of which nobody knows whether they had got a copy"""
    emptied: Sequence[str]
    """of an audit log that nobody may lead: brokers whose copy has nothing now, so that nobody knows what it had"""
    missing: int
    """copies that were not heard"""
    minimum: int
    """copies that a commit needs"""
    has_copies: bool
    seen: int
    """the newest epoch that a broker saw in the store; 0 where none keeps it"""

    @property
    def what(self) -> str:
        """As a person calls it."""
        return f"{self.name} shard {self.shard.number}"

    @property
    def why(self) -> str:
        """Why copies cannot be read; empty where all can."""
        return "; ".join(
            f"the copy of {each} cannot be read: {self.damaged[each]}" for each in sorted(self.damaged)
        )

    @property
    def is_audit(self) -> bool:
        return self.name == str(AUDIT_STREAM)

    @property
    def is_durable(self) -> bool:
        return self.stream is None or self.stream.config.durability.kind != "ephemeral"

    @property
    def owner(self) -> str:
        """Who has it where there is one copy."""
        return "" if self.before is None else self.before.replicas[0]

    @property
    def last(self) -> int:
        """The newest epoch that a folder knows."""
        return max((self.seen, *(each.epoch for each in self.told.values())))

    @property
    def next_epoch(self) -> int:
        """Above every epoch that can have been."""
        top = max(self.last, 0 if self.before is None else self.before.epoch)
        return top + max(1, min(RECONCILE_GAP, (EPOCH_MAX - top) // 2))


def _known(
    plan: Plan,
    view: ClusterView,
    shard: ShardId,
    stream: Stream | None,
    told: Mapping[str, ShardTold],
    without: Collection[str],
    gone: set[str],
    noted: Mapping[str, str],
    seen: int,
) -> _Known:
    """`noted`, `seen`: of the audit log, who had copies of it with which folders, and in which epoch, as a broker saw it last."""
    stored = view.shards.get(shard)
    before = None if stored is None else _without_retired(stored, gone)
    assert before is not None or stream is not None
    damaged = {broker: each.damaged for broker, each in told.items() if each.damaged}
    whole = {broker: each for broker, each in told.items() if broker in plan.nodes and not each.damaged}
    away = sorted({*without, *damaged})
    has_copies = stream is not None and is_replicated(stream.config)
    if before is not None:
        has_copies = has_copies or len(before.replicas) > 1
    former = [
        broker
        for broker in sorted({*told, *(() if before is None else before.replicas)})
        if broker in view.nodes
        and broker in plan.nodes
        and (not _is_of_store(view, plan, broker) or _was_replaced_since(view, before, broker))
    ]
    name = before.stream if before is not None else stream.name if stream is not None else ""
    if name == str(AUDIT_STREAM):
        # Who got a copy after the backup is in no record of it.
        former += [
            broker
            for broker, folder in sorted(noted.items())
            if broker in plan.nodes and plan.nodes[broker].folder != folder and broker not in former
        ]
        since = []
    else:
        since = [
            broker
            for broker in sorted(view.nodes.keys() - {*former, *told, *gone})
            if broker in plan.nodes and not _is_of_store(view, plan, broker)
        ]
    emptied: list[str] = []
    if before is not None and before.stream == str(AUDIT_STREAM) and _may_be_led_by_nobody(before):
        # Nobody has filled a copy since: one that has nothing lost it, or never had any.
        emptied = [
            broker
            for broker in before.replicas
            if broker in plan.nodes
            and broker not in former
            and not (broker in told and (told[broker].has_records or told[broker].damaged))
        ]
    missing = len(away) + len(former) + len(emptied)
    if before is None and stream is not None and has_copies:
        # The store does not say who had the others.
        missing = max(missing, stream.config.replicas - len(whole))
    return _Known(
        shard=shard,
        name=name,
        stored=stored,
        before=before,
        stream=stream,
        told=told,
        damaged=damaged,
        whole=whole,
        away=away,
        former=former,
        since=since,
        emptied=emptied,
        missing=missing,
        minimum=before.min if before is not None else min_in_sync(stream.config) if stream is not None else 1,
        has_copies=has_copies,
        seen=seen if name == str(AUDIT_STREAM) else 0,
    )


def _shard(
    plan: Plan,
    view: ClusterView,
    known: _Known,
    signed: tuple[int, str],
    alone: Before | None,
    election: Callable[[], str],
) -> None:
    """1. The audit log goes on from the broker whose disk alone had it, while it is being brought in. 2. Copies that may have all that was committed
    are found; a shard that no folder has is placed as a new one, or is there again and empty. 3. Where they may be elsewhere, nobody leads it.
    4. What they may lack is said; of the audit log nothing may be. 5. They are its record."""
    before = known.before
    winners, doubt = _best(
        {broker: each for broker, each in known.whole.items() if each.has_records},
        known.minimum,
        known.missing,
        {broker for broker in known.whole if _is_of_store(view, plan, broker)},
    )
    if (
        known.is_audit
        and alone is not None
        and not known.away
        and not known.former
        and _is_being_brought_in(known.told, winners, alone)
    ):
        plan.shards.append(_brought_in_by(alone.broker, plan, known, election()))
        return
    winners = _as_before(winners, before)[:REPLICAS_MAX]
    if not winners:
        elsewhere = known.missing if known.is_audit else len(known.away)
        if before is None and not known.damaged and (elsewhere < known.minimum or not known.is_durable):
            # It is placed as a new one: nothing that was acknowledged can be elsewhere.
            return
        replicas = () if before is None else before.replicas
        winners = [broker for broker in replicas if broker in plan.nodes and broker not in known.damaged]
        if not known.told and not known.away and known.is_durable and before is not None:
            plan.notes.append(
                f"{known.what} has no folder at any broker: nothing was written to it, what it had was given up, or it was deleted since; or the folders are of a backup "
                "beside which it was moved. It is there, and empty; "
                "`felix stream delete` deletes it."
            )
    if not winners or (not known.has_copies and known.owner in known.away):
        who = known.owner if known.owner in known.away else ", ".join(known.away)
        plan.losses.append(
            f"{known.what} is led by nobody until {who or 'a folder with its copy'}, which may have its records, is back and the region is "
            "reconciled again" + (f" ({known.why})." if known.why else ".")
        )
        plan.shards.append(_led_by_nobody(plan, view, known, winners, election()))
        return
    doubt = _doubt(known, winners, doubt, signed)
    if doubt and known.is_audit:
        plan.losses.append(
            f"The audit log is led by nobody: {doubt}. Without those leaves it would be a second history; bring them back, and reconcile again."
            + (
                " A broker's former folder has to be back before this is accepted; later it is refused, unless the store's backup is put back once more."
                if known.former
                else ""
            )
        )
        plan.shards.append(_led_by_nobody(plan, view, known, winners, election()))
        return
    if doubt:
        plan.losses.append(f"{known.what}: {doubt}; what {winners[0]} lacks of it is lost.")
    elif before is not None and (gone := _gone(view, plan, before, known.told)):
        plan.losses.append(
            f"{known.what}: {', '.join(gone)} had a copy at the backup and {'has' if len(gone) == 1 else 'have'} none now, so it has fewer "
            f"copies since, or was deleted. If it was deleted, its records come back from {', '.join(winners)}: delete it again, "
            f"`felix stream delete {known.name}`, before clients come in."
        )
    if before is not None and _fits(before, winners, plan, known.last):
        plan.shards.append(ShardPlan(known.shard, known.stored, before, tuple(winners)))
        return
    isr = {broker: plan.nodes[broker].registration for broker in winners}
    after = _record(
        known.name, known.next_epoch, election(), before, known.stream, winners, isr, known.minimum, unclean=doubt != ""
    )  # fmt: skip
    said = _unclean(known, after, winners[0], doubt) if doubt else None
    plan.shards.append(ShardPlan(known.shard, known.stored, after, tuple(winners), said))


def _unclean(known: _Known, after: ShardRecord, winner: str, doubt: str) -> UncleanElection:
    end = _ends(known.whole[winner]).get(RECORDS)
    return unclean_election(
        known.shard, after, "reconciled", winner, None if end is None else end[1].offset,
        given_up={*known.away, *known.former} - {winner}, why=doubt,
    )  # fmt: skip


def _led_by_nobody(
    plan: Plan, view: ClusterView, known: _Known, winners: Sequence[str], election: str
) -> ShardPlan:
    """Whoever was in sync at the backup could be elected by what the record said then."""
    before, places = known.before, winners
    if before is None:
        brokers = [broker for broker in known.away if broker in view.nodes]
        places = (winners or sorted(known.damaged) or brokers or sorted(plan.nodes))[:REPLICAS_MAX]
    elif _fits(before, (), plan, known.last):
        return ShardPlan(known.shard, known.stored, before, ())
    after = _record(
        known.name, known.next_epoch, election, before, known.stream, places, {}, known.minimum, unclean=False
    )
    return ShardPlan(known.shard, known.stored, after, ())


def _doubt(known: _Known, winners: Sequence[str], doubt: str, signed: tuple[int, str]) -> str:
    """Why the winners may lack something that was committed; empty where they have all. `doubt`: what the copies alone say."""
    winner = winners[0]
    doubt = doubt or _more_than(known.whole, winner)
    minimum, those, missing = known.minimum, _those(known), known.missing
    if known.since:
        # There are no more copies than the stream has: those that are equal are some of them.
        replicas = max(
            0 if known.before is None else len(known.before.replicas),
            0 if known.stream is None else known.stream.config.replicas,
        )
        missing = min(missing + len(known.since), max(missing, replicas - len(winners)))
        if missing > known.missing:
            those += [f"one that {broker} got since, in a folder that it lost" for broker in known.since]
    if known.has_copies and missing >= minimum:
        doubt = (
            f"a record was acknowledged once {minimum} {'copy' if minimum == 1 else 'copies'} had it, and those may have been "
            f"{', '.join(those) if len(those) >= missing else 'in folders that were not heard'}"
            + (f" ({known.why})" if known.why else "")
        )
    leaves = _ends(known.whole[winner]).get(RECORDS) if winner in known.whole else None
    if known.is_audit and signed[0] > (0 if leaves is None else leaves[1].offset):
        doubt = f"broker {signed[1]} has a checkpoint of {signed[0]} leaves, more than any copy has now"
    return doubt


def _is_being_brought_in(told: Mapping[str, ShardTold], winners: Collection[str], alone: Before) -> bool:
    """Whether the log that one broker's disk had is not all in its stream yet, and nothing there is from elsewhere: its checkpoint is written last."""
    for each in told.values():
        ends = {log.kind: log.end for log in each.logs}
        if (
            ends.get(AUDIT_CHECKPOINTS, BEGINNING) > BEGINNING
            or ends.get(RECORDS, BEGINNING).offset > alone.size
        ):
            return False
        if each.has_records and alone.broker not in winners:
            return False
    return True


def _brought_in_by(broker: str, plan: Plan, known: _Known, election: str) -> ShardPlan:
    before = known.before
    if before is not None and _fits(before, (broker,), plan, known.last):
        return ShardPlan(known.shard, known.stored, before, (broker,))
    isr, minimum = {broker: plan.nodes[broker].registration}, 1 if before is None else before.min
    after = _record(
        str(AUDIT_STREAM), known.next_epoch, election, before, None, (broker,), isr, minimum, unclean=False
    )
    return ShardPlan(known.shard, known.stored, after, (broker,))


def _as_before(winners: Collection[str], before: ShardRecord | None) -> list[str]:
    """Those first that had a copy at the backup: a record names REPLICAS_MAX."""
    replicas = () if before is None else before.replicas
    return sorted(winners, key=lambda broker: (broker not in replicas, broker))


def _those(known: _Known) -> list[str]:
    """Where the copies may have been that cannot be had."""
    return [
        *known.away,
        *(f"the folder that {broker} had before" for broker in known.former),
        *(f"a copy that {broker} had before" for broker in known.emptied),
    ]


def _gone(view: ClusterView, plan: Plan, before: ShardRecord, told: Mapping[str, ShardTold]) -> list[str]:
    """Who had a copy at the backup and has none, where no other broker has it instead."""
    if not told or len(told) >= len(before.replicas):
        return []
    return [broker for broker in sorted(before.isr.keys() - told.keys()) if _is_of_store(view, plan, broker)]


def _is_of_store(view: ClusterView, plan: Plan, broker: str) -> bool:
    """Whether the folder that was heard of it is the one that it had when the store was saved."""
    before = view.nodes.get(broker)
    if before is None or broker not in plan.nodes:
        return False
    # A run that was cut off may have written the other one in its place.
    forgotten = {} if view.frozen is None else view.frozen.folders
    return forgotten.get(broker, before.folder) == plan.nodes[broker].folder


def _was_replaced_since(view: ClusterView, before: ShardRecord | None, broker: str) -> bool:
    """Whether the broker was in sync with a folder that the store has forgotten since, as where an operator gave it up after the store was put back."""
    in_sync = None if before is None else before.members().get(broker)
    return in_sync is not None and in_sync < view.nodes[broker].whole_since


def _more_than(copies: Mapping[str, ShardTold], winner: str) -> str:
    """Whose copy had more that was committed than that of `winner` has."""
    ends = {log.kind: log.end for log in copies[winner].logs} if winner in copies else {}
    for broker, each in sorted(copies.items()):
        if any(log.kept > ends.get(log.kind, BEGINNING) for log in each.logs):
            return f"broker {broker} had more than any copy has now"
    return ""


def _record(
    name: str,
    epoch: int,
    election: str,
    before: ShardRecord | None,
    stream: Stream | None,
    winners: Sequence[str],
    isr: dict[str, int],
    minimum: int,
    *,
    unclean: bool,
) -> ShardRecord:
    replicas = tuple(winners) if before is None else before.replicas
    room = max(len(replicas), len(winners))
    durability: ShardDurability = "fsync"
    if before is not None:
        durability = before.durability
    elif stream is not None and stream.config.durability.kind != "fsync":
        durability = "interval"
    # Those that have all first, in the order that they had; then the others, which are brought up from them.
    order = [broker for broker in replicas if broker in winners]
    order += [broker for broker in winners if broker not in order]
    order += [broker for broker in replicas if broker not in order]
    return ShardRecord(
        stream=name,
        epoch=epoch,
        election=election,
        replicas=tuple(order[: min(room, REPLICAS_MAX)]),
        isr=isr,
        min=minimum,
        durability=durability,
        unclean=epoch if unclean else 0 if before is None else before.unclean,
    )


def _may_be_led_by_nobody(record: ShardRecord) -> bool:
    """Whether no copy surely has all that is committed, as a run that reconciled said, or as those that had it lost it."""
    return not (record.leader or record.members() or record.target)


def _fits(before: ShardRecord, winners: Sequence[str], plan: Plan, told: int) -> bool:
    """Whether the record is what an earlier run made of it, or would be as good."""
    return (
        not before.leader
        and before.isr == {broker: plan.nodes[broker].registration for broker in winners}
        and not before.elr
        and not before.target
        and before.epoch > told
    )


def _best(
    copies: Mapping[str, ShardTold], minimum: int, away: int, same: Collection[str]
) -> tuple[list[str], str]:
    """The copies that have all, and why that is not sure, or nothing. `minimum`: copies that a commit needs; `away`: how many may have what no
    other has; `same`: copies that were not begun anew since the backup."""
    if not copies:
        return [], ""
    ends = {broker: _ends(each) for broker, each in sorted(copies.items())}
    kinds = sorted({kind for found in ends.values() for kind in found})
    at = {broker: [found.get(kind, (0, BEGINNING)) for kind in kinds] for broker, found in ends.items()}
    compared = [_Compared({broker: _log(each, kind) for broker, each in copies.items()}) for kind in kinds]

    def lacks(broker: str) -> bool:
        """Whether others have committed what it has not, or may have."""
        for logs in compared:
            for all_ in logs.beyond(broker):
                having = [
                    other
                    for other in all_
                    if not (other in same and _was_behind(copies, other, logs.epoch(other)))
                ]
                if having and len(having) + away >= minimum:
                    return True
        return False

    why = ""
    sure = [broker for broker in at if not any(logs.lacks_committed(broker) for logs in compared)]
    safe = [broker for broker in sure if not lacks(broker)]
    if not safe:
        safe = sure or list(at)
        why = f"of {', '.join(at)} none surely has every log to its end"
    most = max(at[broker] for broker in safe)
    whole = [broker for broker in safe if at[broker] == most]
    # One epoch that was elected twice, before and after the store went back, has two contents.
    elections = {broker: {log.kind: log.election for log in copies[broker].logs} for broker in whole}
    if any(elections[broker] != elections[whole[0]] for broker in whole):
        why = f"{', '.join(whole)} have epoch {max(epoch for epoch, _ in most)} of two elections"
        whole = [broker for broker in whole if elections[broker] == elections[whole[0]]]
    return whole, why


class _Compared:
    """What the copies of one log have in common. `logs`: by broker."""

    def __init__(self, logs: Mapping[str, LogTold]) -> None:
        self._logs = logs
        # What one copy knows to be committed, and another has otherwise, that one has in vain.
        self._ends = {
            broker: min(
                [log.end]
                + [
                    shared
                    for other in logs
                    if other != broker
                    and (shared := self._shared(broker, other)) is not None
                    and min(logs[other].kept, logs[other].end) > shared
                ]
            )
            for broker, log in logs.items()
        }

    def epoch(self, broker: str) -> int:
        """The last one of which a copy has anything."""
        return self._logs[broker].epoch

    def _shared(self, one: str, other: str) -> LogPoint | None:
        """Up to where two copies are equal; None where their histories do not say."""
        mine, theirs = self._logs[one], self._logs[other]
        if BEGINNING in (mine.end, theirs.end):
            return BEGINNING
        if not mine.starts or not theirs.starts:
            return None
        found = parting(theirs.starts, True, theirs.end, History(mine.starts), mine.end)
        return None if isinstance(found, Parting) else found

    def _has_more(self, broker: str, than: str) -> bool:
        """Whether it may have committed what the other copy lacks."""
        shared = self._shared(broker, than)
        if shared is not None:
            return self._ends[broker] > shared
        mine, theirs = self._logs[broker], self._logs[than]
        return (mine.epoch, mine.end) > (theirs.epoch, theirs.end)

    def beyond(self, broker: str) -> list[list[str]]:
        """For each thing that others have and this copy lacks: who has it."""
        having = [other for other in self._logs if other != broker and self._has_more(other, broker)]
        found = []
        for each in having:
            parts = self._shared(each, broker)
            found.append([other for other in having if parts is None or self._has_same(other, each, parts)])
        return found

    def _has_same(self, one: str, other: str, behind: LogPoint) -> bool:
        """Whether two copies have the same behind a point that both reach beyond."""
        shared = self._shared(one, other)
        return one == other or shared is None or shared > behind

    def lacks_committed(self, broker: str) -> bool:
        """Whether another copy has what is surely committed, and this one has not."""
        return any(
            (shared := self._shared(broker, other)) is not None and min(log.kept, log.end) > shared
            for other, log in self._logs.items()
            if other != broker
        )


def _log(copy: ShardTold, kind: int) -> LogTold:
    return next((log for log in copy.logs if log.kind == kind), LogTold(kind=kind))


def _was_behind(copies: Mapping[str, ShardTold], broker: str, epoch: int) -> bool:
    """Whether a copy lacks in another log what was committed before `epoch`: then it was brought up in that epoch, and what it has of it was
    committed without it or not at all."""
    ends = {log.kind: log.end for log in copies[broker].logs}
    return any(
        log.epoch < epoch and log.kept > ends.get(log.kind, BEGINNING)
        for each in copies.values()
        for log in each.logs
    )


def _ends(copy: ShardTold) -> dict[int, tuple[int, LogPoint]]:
    return {log.kind: (log.epoch, log.end) for log in copy.logs}


def _unknown(plan: Plan, told: Mapping[ShardId, Mapping[str, ShardTold]], known: Collection[str]) -> None:
    found: dict[str, tuple[str, set[str]]] = {}
    for shard, copies in sorted(told.items()):
        if shard.incarnation in known:
            continue
        for broker, each in copies.items():
            if each.has_records and each.stream:
                found.setdefault(shard.incarnation, (each.stream, set()))[1].add(broker)
    for incarnation, (stream, brokers) in sorted(found.items(), key=lambda item: item[1][0]):
        plan.losses.append(
            f"{stream} ({incarnation}) was created after the backup: its records stay on the disks of {', '.join(sorted(brokers))}, and "
            "nothing serves them."
        )


# What is written


def audit_home(view: ClusterView, plan: Plan) -> Transaction | None:
    """Where the audit log is, put back; None where the store says it."""
    if not plan.audit_home:
        return None
    key = view.keys.audit_home
    return Transaction(
        (ModRevision(key, plan.audit_revision), unchanged(view, view.keys.frozen)),
        (Put(key, plan.audit_home.encode()),),
    )


def freeze(view: ClusterView, by: str, plan: Plan) -> Transaction | None:
    """Nothing is placed or elected from now on, and what `brokers` lets the store forget is remembered until the end; None where that is so. No broker may be alive."""
    key = view.keys.frozen
    held = view.frozen
    folders = {
        broker: before.folder
        for broker, node in plan.nodes.items()
        if (before := view.nodes.get(broker)) is not None and before.folder != node.folder
    }
    if held is not None:
        # What an earlier run found there was of the store that was put back.
        folders |= held.folders
        if folders == held.folders:
            return None
    record = (
        FrozenRecord(
            by, "The metadata store was put back to an earlier state, and is being reconciled.", folders
        )
        if held is None
        else FrozenRecord(held.by, held.why, folders)
    )
    return Transaction((unchanged(view, key), *_nobody(view)), (Put(key, encode(record, key)),))


def _nobody(view: ClusterView) -> list[Absent]:
    return [Absent(view.keys.broker(broker)) for broker in view.nodes]


def brokers(view: ClusterView, plan: Plan) -> list[Transaction]:
    """The registrations and pulses, a transaction for each broker of which something is to be changed."""
    made = []
    for broker, node in sorted(plan.nodes.items()):
        key, pulse = view.keys.node(broker), view.keys.pulse(broker)
        writes: list[Write] = []
        if view.nodes.get(broker) != node:
            writes.append(Put(key, encode(node, key)))
        if view.pulses.get(broker) != PulseRecord(plan.pulses[broker]):
            writes.append(Put(pulse, encode(PulseRecord(plan.pulses[broker]), pulse)))
        if writes:
            compares = [unchanged(view, key) for key in (key, pulse, view.keys.frozen)]
            made.append(Transaction((*compares, Absent(view.keys.broker(broker))), tuple(writes)))
    return made


def shards(view: ClusterView, plan: Plan) -> list[Transaction]:
    """The records of shards, a transaction each. After `brokers`: compared is what that wrote."""
    made = []
    for each in plan.shards:
        if each.changes:
            key = view.keys.shard(each.shard)
            compares = [unchanged(view, key), unchanged(view, view.keys.frozen)]
            compares += [unchanged(view, view.keys.node(broker)) for broker in sorted(each.after.isr)]
            said = [] if each.unclean is None else [state_unclean(view.keys, each.unclean)]
            made.append(Transaction(tuple(compares), (Put(key, encode(each.after, key)), *said)))
    return made


def retired(view: ClusterView, plan: Plan) -> list[Transaction]:
    """That brokers are gone for good, as before the store went back. After `shards`, none of which names them then."""
    made = [registration.retire(view, broker) for broker in plan.retired if broker in view.nodes]
    return [each for each in made if isinstance(each, Transaction)]


def thaw(view: ClusterView) -> Transaction:
    """The region was reconciled: place and elect again. A rebalancing of before is not gone on with."""
    keys = view.keys
    gone = [keys.frozen, *([keys.rebalance] if view.revision_of(keys.rebalance) else [])]
    return Transaction(tuple(unchanged(view, key) for key in gone), tuple(map(Delete, gone)))
