"""What a broker of several answers by: who leads a stream, what is asked of another broker, and what one broker of it alone does.

Used by the broker and its sessions; a region of one broker has none of it. Invariant: what is refused here has not been begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import msgspec

from felix.errors import Code, FelixError, NotLeaderError, RequestError
from felix.messages import (
    BrokerState,
    Cosign,
    DescribeMesh,
    DestroyRetiredRoots,
    ExplainCrossing,
    GetCheckpoint,
    ListDocuments,
    ListLinks,
    Message,
    PutCosignature,
    PutDocument,
    RenewIdentity,
    ReportLinks,
    RotateKeys,
    ShardMove,
    ShardMoves,
    WitnessedSize,
)
from felix.names import StreamName
from region.cluster import condition, draining, registration, transactions
from region.cluster.assignments import Leader
from region.cluster.election import LogEnd, Unopened
from region.cluster.member import ClusterMember
from region.cluster.membership import is_enough, place_of
from region.cluster.problems import (
    NOTHING_HEARD,
    Ends,
    Found,
    Survey,
    living_copies,
    may_be_uneven,
    no_links,
    placed_nowhere,
    survey,
    uneven_leaders,
    vacancy,
    wrong_clock,
)
from region.cluster.records import ShardId, ShardRecord
from region.cluster.transactions import Reason, Refusal
from region.copies.copy_ends import CopyEnds
from region.copies.copy_troubles import CopyTroubles
from region.copies.peer_requests import AnswerT, PeerRequest, PeerRequests
from region.copies.replicas import Replicas
from region.evidence.audit_log import AuditLog
from region.log.copies import Copies
from region.log.epochs import elected_epoch
from region.log.store_calls import silence_problems
from region.metadata.records import AUDIT_STREAM, Stream, is_replicated, one_copy_since
from region.replication.leader import DETACHED_MS

log = logging.getLogger("felix.region.cluster")

RETRY_MS: Final = 25
"""A client that asked the wrong broker, or one that is about to lead, retries after this; the SDK waits twice as long each time. A leader that
stops in order is followed within some tens of milliseconds."""
NO_LINK_MS: Final = 10_000
"""How long two brokers have had no link, beyond a lease, before a person is told: one that died is not alive any more by then."""
OTHERS_S: Final = 1.0
"""How long a broker is waited for that is asked for what it knows alone: bridges, and what copies lack."""
LEADERS_STAND_MS: Final = 60_000
"""How long no shard has had another leader before a person is told that they are uneven: brokers that are restarted one by one hand over sooner. A plan is
made for that so seldom, too."""
DEFAULT_REPLICAS: Final = 3
"""With three copies, one may be away for maintenance while another fails."""
_RECOVER_HINTS: Final = {
    Reason.NOT_NAMED: "Name each with --lost, if its data is lost for good; else bring it back.",
    Reason.TOO_EARLY: "Wait so long, or say --powered-off if those machines surely run no more.",
    Reason.STILL_LEADS: "Nothing has to be recovered.",
    Reason.STILL_ALIVE: "It is elected by itself once its logs are open; wait for it.",
    Reason.NOT_REGISTERED: "Name a broker that is up and has a copy:",
    Reason.BEHIND: "Name the copy that has the most with --from; `felix region status` gives the command.",
    Reason.NO_REPORT: "Try again: it may be starting. If its copy is lost, stop it, and name it with --lost.",
}
MOVES_SHOWN: Final = 100
"""Of what a rebalancing would move: more than a person reads, and within one answer."""
HEARD_S: Final = 2.0
"""How long a rebalancing waits for what was said of brokers just before."""
PLACED_S: Final = 10.0
"""How long whoever creates a stream waits until a broker leads it."""

_WITH_AUDIT_LOG: Final = frozenset(
    (
        PutDocument,
        ListDocuments,
        RenewIdentity,
        Cosign,
        WitnessedSize,
        GetCheckpoint,
        PutCosignature,
        DescribeMesh,
        ExplainCrossing,
        RotateKeys,
        DestroyRetiredRoots,
        ReportLinks,
        ListLinks,
    )
)
"""What writes a leaf, or goes by which documents have theirs, and what agents say of their links: the broker with the audit log alone answers it."""


class ListBridges(PeerRequest, frozen=True, tag="list_bridges"):
    """Which of the region's bridges have a session with a broker."""


class BridgesListed(msgspec.Struct, frozen=True, array_like=True):
    names: list[str]


class ListLags(PeerRequest, frozen=True, tag="list_lags"):
    """How many records the copies of what a broker leads lack, by the broker that has them."""


class LagsListed(msgspec.Struct, frozen=True, array_like=True):
    records: dict[str, int]


class Clustered:
    """One per broker of a cluster."""

    def __init__(self, member: ClusterMember) -> None:
        self.member = member
        self.replicas: Replicas | None = None
        """The copies of streams with more than one; None while the broker is being opened."""
        self.requests: PeerRequests | None = None
        """What is asked of the other brokers; None while the broker is being opened."""
        self.ends: CopyEnds | None = None
        """How far copies go, asked of the brokers that have them; None while the broker is being opened."""
        self.troubles: CopyTroubles | None = None
        """What is wrong with copies at other brokers; None while the broker is being opened."""
        self.audit: AuditLog | None = None
        """The audit log, where brokers copy it."""
        self.receives: Callable[[StreamName], bool] = lambda name: False
        """Whether records of another region may arrive in a stream."""
        self.disk_problems: Callable[[], list[str]] = list
        """What is wrong with this broker's disks, of streams without copies."""
        self._planned_at, self._uneven_leaders = (-1, 0), list[str]()
        """of the last plan that was made for a remark: which leaders it was about, and for how long these had stood; and the remark"""

    @property
    def has_audit_log(self) -> bool:
        """Whether this broker writes the region's audit log. Without its lease it does not: another one may have gone on with it."""
        if self.member.audit.stream is not None:
            return self.audit is not None and self.audit.is_home and self.member.refusal() is None
        return self.audit_home == self.member.broker

    @property
    def audit_home(self) -> str:
        """The broker that writes the region's audit log: whoever leads its stream, empty while nobody does; in a region of before brokers
        copied it, the one whose disk has it."""
        stream = self.member.audit.stream
        return self.member.audit.broker if stream is None else self.leader_of(stream, 0)

    @property
    def has_no_audit_copy(self) -> bool:
        """Whether others have copies of the region's audit log and this broker has none: what is on its disk of a former one stays as it is. From any thread."""
        stream = self.member.audit.stream
        replicas = frozenset[str]() if stream is None else self.replicas_of(stream)
        return bool(replicas) and self.member.broker not in replicas

    def epochs(self, record: Stream) -> dict[int, int]:
        """The epoch of each shard, where this broker leads the stream; empty where it does not, or has not all committed yet that it had
        when it was elected. A shard that nobody can lead keeps no other from being served, and has none."""
        stopped: frozenset[int] = frozenset()
        if self.keeps(record):
            stopped = self._stopped(record)
            if self.replicas is None or not self.replicas.serves(record, stopped):
                return {}
        return self.member.assignments.epochs(record.incarnation, record.config.shards, stopped)

    def _stopped(self, record: Stream) -> frozenset[int]:
        """The shards of a stream that nobody leads, and nobody can by rule."""
        view = self.member.mirror.view
        return frozenset(
            number
            for number in range(record.config.shards)
            for shard in (ShardId(record.incarnation, number),)
            # While a leader that has stopped stands in the record, it may be about to be followed by another; that changes the record.
            if (held := view.shards.get(shard)) is not None and not held.leader and vacancy(view, shard)
        )

    def keeps(self, record: Stream) -> bool:
        """Whether this broker opens a stream's logs as copies only (region.copies.replicas)."""
        return is_replicated(record.config) if self.replicas is None else self.replicas.keeps(record)

    def copies(self, record: Stream, number: int) -> Copies | None:
        """What a shard's log, or the companion of this number, is led by here that may have other copies; None for a stream of one that never
        had several. Raises UnavailableError where it is not led here."""
        if self.replicas is None or not self.keeps(record):
            return None
        return self.replicas.lead(record, number)

    async def forget(self, incarnation: str) -> None:
        """A stream was deleted: its folder is about to go."""
        if self.replicas is not None:
            await self.replicas.forget(incarnation)

    def not_leader(self, record: Stream, shard: int) -> NotLeaderError:
        """What a broker answers that does not serve a shard: who does, where somebody is known to."""
        leader = self.member.assignments.leader(record.incarnation, shard)
        view, known = self.member.mirror.view, ShardId(record.incarnation, shard)
        held = view.shards.get(known)
        if leader is None or not leader.address:
            nowhere = placed_nowhere(view) if held is None else None
            why = nowhere.why if nowhere else vacancy(view, known)
            return NotLeaderError(
                f"No broker leads shard {shard} of {record.name} at the moment{': ' if why else ''}{why}.",
                hint=nowhere.way
                if nowhere
                else "`felix region status` says how to go on."
                if why
                else "Try again: a new stream is placed within a second. Else `felix region status` says what is wrong.",
                retry_after_ms=RETRY_MS,
                stream=record.name,
            )
        if leader.broker == self.member.broker:
            refusal = self.member.refusal()
            # A leader serves once what it was elected with is committed.
            lacks = held is not None and len(held.isr) < held.min
            waits = (
                "not served yet: fewer copies are in sync than a record needs"
                if lacks
                else "about to be served here"
            )
            return NotLeaderError(
                f"Shard {shard} of {record.name} is {waits}." if refusal is None else refusal.sentence,
                hint="`felix region status` says what is wrong." if lacks or refusal is not None else "",
                retry_after_ms=RETRY_MS,
                stream=record.name,
                epoch=leader.epoch,
            )
        return NotLeaderError(
            f"Shard {shard} of {record.name} is led by broker {leader.broker}, at {leader.address}.",
            hint="Ask there; the SDK does.",
            retry_after_ms=RETRY_MS,
            stream=record.name,
            leader=leader.broker,
            address=leader.address,
            epoch=leader.epoch,
        )

    def default_replicas(self) -> int:
        """Copies of a new stream where neither it nor region.yaml says how many: DEFAULT_REPLICAS, but no two on one host, which would
        outlive no more than one. Of a region of one machine, 1."""
        hosts = {node.host for node in self.member.mirror.view.nodes.values()}
        return max(1, min(DEFAULT_REPLICAS, len(hosts)))

    def leader_of(self, record: Stream, shard: int) -> str:
        """The broker that leads a shard; empty while none does."""
        leader = self.leader(record, shard)
        return "" if leader is None else leader.broker

    def leader(self, record: Stream, shard: int) -> Leader | None:
        """Who leads a shard, and in which epoch; None while nobody does."""
        return self.member.assignments.leader(record.incarnation, shard)

    def placed_on(self, record: Stream) -> str:
        """The broker that has a stream's records, whether it leads now or not; empty before it is placed."""
        return self.member.assignments.placed(record.incarnation)

    def replicas_of(self, record: Stream) -> frozenset[str]:
        """The brokers that have copies of the stream; empty before it is placed."""
        return frozenset(self.members(record, 0)[0])

    async def hear_problems(self, records: Iterable[Stream]) -> Found:
        """As `problems`, once the brokers that are alive have said how far their copies go of what nobody can lead by rule, and what is wrong
        with their copies."""
        surveyed = self._survey(records)
        shards = surveyed.asks_for_ends()
        others, heard = await asyncio.gather(
            self._hear_troubles(), asyncio.gather(*map(self._hear_ends, shards))
        )
        found = self._found(surveyed, dict(zip(shards, heard, strict=True)))
        return Found([*found.problems, *others], [*found.remarks, *await self._uneven()])

    async def _uneven(self) -> list[str]:
        """That leaders are uneven, where that has stood for a while."""
        member, view = self.member, self.member.mirror.view
        stand_ms = member.leaders_stand_ms()
        if stand_ms < LEADERS_STAND_MS or member.may_be_out_of_date() or not may_be_uneven(view):
            return []
        if self._planned_at[0] != view.leaders_since or stand_ms - self._planned_at[1] >= LEADERS_STAND_MS:
            self._planned_at = view.leaders_since, stand_ms
            self._uneven_leaders = list(uneven_leaders(view, await member.controls.planned(), member.region))
        return self._uneven_leaders

    def problems(self, records: Iterable[Stream]) -> Found:
        """What is wrong with the region, the most serious first, and what an operator has it be, as this broker knows: from the records, so each
        broker says the same, and of the copies that it has itself. `records`: the catalog's streams."""
        return self._found(self._survey(records), NOTHING_HEARD)

    def _survey(self, records: Iterable[Stream]) -> Survey:
        own = self.member.audit.stream
        return survey(self.member.mirror.view, (*records, *([own] if own is not None else [])))

    def _found(self, surveyed: Survey, ends: Mapping[ShardId, Ends]) -> Found:
        """With what this broker alone knows."""
        found = surveyed.found(self.member.region, ends, is_out_of_date=self.member.may_be_out_of_date())
        own = self.member.audit.stream
        problems = [*self._store_troubles(), *found.problems]
        if own is None and len(self.member.brokers) > 1:
            problems.append(self._one_disk())
        aside = [] if self.replicas is None else self.replicas.set_aside(self.member.broker)
        return Found([*problems, *self.own_troubles()], [*found.remarks, *aside])

    def own_troubles(self, to: str = "") -> list[str]:
        """What is wrong with the copies that this broker has, with its clock, and with its links. `to`: another broker that asks for it."""
        broker = self.member.broker
        # Who asks this broker itself is told of its stores and disks besides.
        told = (
            [f"Broker {broker}: {problem}" for problem in (*silence_problems(), *self.disk_problems())]
            if to
            else []
        )
        if self.replicas is not None:
            told += (
                f"The copy of shard {shard.number} of {self.replicas.name_of(shard)} at broker {broker}: {sentence.removesuffix('.')}."
                for shard, sentence in sorted(self.replicas.host.alarms.items())
            )
        if self.audit is not None and self.audit.trouble:
            told.append(f"The audit log's copy at broker {broker}: {self.audit.trouble}")
        if self.requests is not None:
            ahead = {
                peer: self.requests.clock_ahead_ms(peer) for peer in self.member.brokers if peer != broker
            }
            if clock := wrong_clock(broker, {peer: ms for peer, ms in ahead.items() if ms is not None}):
                told.append(clock)
            alive = self.member.mirror.view.alive
            told += no_links(
                broker,
                {
                    peer: apart
                    for peer, apart in self.requests.apart().items()
                    if peer in alive
                    and apart[0] >= alive[peer].lease_ms + NO_LINK_MS
                    # Of two that both can say so, one does.
                    and (to == "" or broker < peer)
                },
            )
        return told

    async def _hear_troubles(self) -> list[str]:
        """The same, of the other brokers."""
        return [] if self.troubles is None else await self.troubles.hear(sorted(self.member.brokers))

    def alarms(self, records: Iterable[Stream]) -> list[str]:
        """The problems alone."""
        return self.problems(records).problems

    def _store_troubles(self) -> Iterator[str]:
        """What keeps this broker from knowing, or saying, more than what was so a while ago."""
        member = self.member
        silent_ms, since_ms = member.unanswered()
        refusal = member.refusal()
        if silent_ms:
            since = datetime.fromtimestamp(since_ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            served = (
                "Streams of several copies with --acks quorum are written and read for a quarter of an hour at most; others, caches, durable "
                "subscriptions, workers of queues and transactions wait"
                if refusal is not None
                else "What is led is served until the lease ends"
            )
            yield (
                f"The metadata store has not answered broker {member.broker} for {silent_ms // 1_000} s (since {since}). {served}; no shard gets another "
                "leader, no stream is created, nothing moves, and a broker that stops cannot start. Have etcd answer again; where `felix region "
                "up` runs it, it is started again by itself. What else is said here was so then."
            )
        elif refusal is not None:
            yield refusal.sentence
        for name, member_ms in member.silent_members().items():
            yield (
                f"The member {name} of the metadata store has not answered broker {member.broker} for {member_ms // 1_000} s. While more than half "
                "of its members answer, nothing waits for this one. Start it again; where its process hangs, end that first (kill -9)."
            )
        if not silent_ms and not member.mirror.is_current:
            yield (
                f"Broker {member.broker} cannot follow what changes in the metadata store. What is said here of brokers and shards was so "
                "before. Have more than half of etcd's members answer."
            )
        view = member.mirror.view
        is_told = view.frozen is not None or view.keys.frozen in view.unreadable
        if not is_told and (went_back := member.alarms.get("frozen")):
            yield f"The metadata store went back: {went_back}."

    def _one_disk(self) -> str:
        """What a person should do about an audit log without copies, as this broker knows it."""
        home, shards = self.member.audit.broker, self.member.mirror.view.shards.values()
        if any(record.stream == str(AUDIT_STREAM) for record in shards):
            return f"Broker {self.member.broker} was started before the audit log got copies: restart it, or nothing crosses here once another broker than {home} leads that."
        return f"The audit log is on the disk of broker {home} alone, and lost with it: felix region copy-audit-log has the others copy it."

    def gauges(self) -> dict[str, float]:
        """Of the broker as a whole, and where it is the controller of the region, by name. From every thread."""
        member = self.member
        view = member.mirror.view
        # Of a store that went back nobody answers for anything, though it answers.
        is_answered = member.refusal() is None or view.frozen is not None
        found = condition.counts(view, member.broker, self.audit_home, is_answered=is_answered)
        return found if self.replicas is None else found | self.replicas.gauges()

    def out_of_sync(self) -> str:
        """Why not every copy of this broker is in sync, as a sentence without its end; empty where all are. From every thread."""
        member = self.member
        return condition.out_of_sync(member.mirror.view, member.broker, member.registry.registration)

    def shard_gauges(self, record: Stream, number: int) -> dict[str, float]:
        """Of a shard that is served here and has several copies; empty for one copy. From every thread."""
        if self.replicas is None or not is_replicated(record.config):
            return {}
        replicas, in_sync = self.members(record, number)
        return {
            "copies": len(replicas),
            "copies_in_sync": len(in_sync),
            "copy_lag_records": self.replicas.lag_records(record, number),
        }

    def leaders(
        self, streams: Mapping[StreamName, Stream], concerned: Callable[[StreamName], bool]
    ) -> dict[StreamName, str]:
        """Of these streams those that are concerned and have copies, or move, each with the broker that serves it if one does; empty where none leads all of
        its shards."""
        found = {}
        for name, record in streams.items():
            if not concerned(name):
                continue
            members = (self.members(record, number)[0] for number in range(record.config.shards))
            if is_replicated(record.config) or any(len(each) > 1 for each in members):
                by = {self.leader_of(record, number) for number in range(record.config.shards)}
                found[name] = by.pop() if len(by) == 1 else ""
        return found

    def members(self, record: Stream, shard: int) -> tuple[list[str], list[str]]:
        """The brokers that have copies of a shard, and those of them that are in sync."""
        return self.member.assignments.members(record.incarnation, shard)

    def unclean(self, record: Stream, shard: int) -> int:
        """The last epoch of a shard whose leader may have lacked what was acknowledged; 0: none."""
        return self.member.assignments.unclean(record.incarnation, shard)

    async def states(self, records: Iterable[Stream]) -> list[BrokerState]:
        """Every broker that was ever registered, with how many of these streams it has."""
        lags = await self._lags()
        member, home = self.member, self.audit_home
        view, leads, copies, alone = member.mirror.view, Counter[str](), Counter[str](), Counter[str]()
        staying, in_sync = set(), Counter[str]()
        for record in records:
            placed = member.assignments.placed(record.incarnation)
            leads[placed] += 1
            if self.why_it_stays(record):
                staying.add(record.incarnation)
                # What is in memory goes on elsewhere once its broker has stopped, without what it held.
                alone[placed] += record.config.durability.kind != "ephemeral"
        for shard, held in view.shards.items():
            if shard.incarnation not in staying:
                copies.update({*held.replicas, *held.target})
                in_sync.update(held.isr.keys())
        stuck = {broker: len(draining.bound(view, {broker}, staying)) for broker in draining.drained_of(view)}
        return [
            BrokerState(
                broker,
                address,
                leads[broker],
                broker == member.controller,
                broker == home,
                copies[broker],
                alone[broker],
                broker in view.nodes and view.nodes[broker].drain,
                in_sync[broker],
                lags[broker],
                stuck.get(broker, 0),
            )
            for broker, address in member.brokers.items()
        ]

    def why_it_stays(self, record: Stream) -> str:
        """What a stream is whose only copy cannot be moved, nor be joined by others; empty where it can."""
        if is_replicated(record.config):
            return ""
        arrives = self.receives(StreamName.parse(record.name))
        return one_copy_since(record.config) or ("fed by another region" if arrives else "")

    def tell_others(self, bridges: Callable[[], list[str]]) -> None:
        """Tell the other brokers, when they ask, which `bridges` have a session here, and what copies lack of what is led here."""
        assert self.requests is not None

        async def listed(peer: str, asked: ListBridges) -> BridgesListed:
            return BridgesListed(bridges())

        async def lags(peer: str, asked: ListLags) -> LagsListed:
            return LagsListed(self._own_lags())

        self.requests.serve(ListBridges, listed)
        self.requests.serve(ListLags, lags)

    async def bridges(self, own: list[str]) -> list[str]:
        """The region's bridges that have a session with some broker. `own`: with this one. One that does not answer soon is left out."""
        told = await self._told(ListBridges(), BridgesListed)
        return sorted({*own, *(name for each in told for name in each.names)})

    def _own_lags(self) -> Counter[str]:
        return Counter() if self.replicas is None else self.replicas.lags()

    async def _lags(self) -> Counter[str]:
        """How many records the copies at each broker lack, as the leaders say that answer soon."""
        return sum(
            (Counter(each.records) for each in await self._told(ListLags(), LagsListed)), self._own_lags()
        )

    async def _told(self, request: PeerRequest, answer: type[AnswerT]) -> list[AnswerT]:
        """What the other brokers say that are up, and answer soon."""
        requests = self.requests
        if requests is None:
            return []
        others = [
            broker
            for broker in self.member.brokers
            if broker != self.member.broker and requests.is_up(broker)
        ]
        asked = (requests.ask(broker, request, answer, timeout_s=OTHERS_S) for broker in others)
        told = await asyncio.gather(*asked, return_exceptions=True)
        return [each for each in told if isinstance(each, answer)]

    @property
    def moving(self) -> int:
        """Shards whose copies are on their way to other brokers."""
        return sum(record.target != () for record in self.member.mirror.view.shards.values())

    def require_room(self, records: Iterable[Stream], broker: str, beside: Sequence[str]) -> None:
        """Raises RequestError(CONFLICT) where copies of `broker` would have nowhere to go, were those `beside` it drained, too. A broker that nobody knows
        has none."""
        view, leaving = self.member.mirror.view, {broker, *beside}
        staying = {record.incarnation for record in records if self.why_it_stays(record)}
        found = draining.bound(view, leaving, staying)
        if found:
            have = sorted(leaving | draining.drained_with(view, found))
            raise RequestError(
                f"What {' and '.join(have)} {'has' if len(have) == 1 else 'have'} cannot all go: {draining.sentence(found)}.",
                code=Code.CONFLICT,
                hint=draining.way_out(view, found, leaving, self.member.region),
            )

    async def drain(self, broker: str, *, on: bool, require: Callable[[], None] = lambda: None) -> None:
        """Have a broker's copies moved away, or no longer. `require`: raises where it is not to be, as the records are each time.

        Raises RequestError(NOT_FOUND) for one that was never registered, CONFLICT where not all of the audit log that it alone had is in its stream,
        what `require` raises, and what the store raises.
        """
        mirror = self.member.mirror
        if on:
            self._require_audit_log_elsewhere(broker)
        while True:
            require()
            made = registration.drain(mirror.view, broker, on=on)
            if isinstance(made, Refusal):
                raise RequestError(made.sentence, code=Code.NOT_FOUND, hint=self._brokers_hint())
            result = await mirror.commit(made)
            if result is not None and result.succeeded:
                return

    def _brokers_hint(self) -> str:
        return f"The region's brokers are {', '.join(sorted(self.member.mirror.view.nodes))}."

    async def retire(self, broker: str) -> None:
        """A broker is gone for good. Raises RequestError(NOT_FOUND, CONFLICT), and what the store raises."""
        member = self.member
        self._require_audit_log_elsewhere(broker)
        if broker == member.audit.broker:
            raise RequestError(
                f"Broker {broker} alone has the region's audit log.",
                code=Code.CONFLICT,
                hint="Have others copy it first, with its folder: felix region copy-audit-log.",
            )
        while True:
            made = registration.retire(member.mirror.view, broker)
            if isinstance(made, Refusal):
                if made.reason is Reason.NOT_REGISTERED:
                    raise RequestError(made.sentence, code=Code.NOT_FOUND, hint=self._brokers_hint())
                raise RequestError(
                    made.sentence,
                    code=Code.CONFLICT,
                    hint=f"Move what it has with `felix region drain {broker}`, or give up copies that are lost for good, then stop it.",
                )
            result = await member.mirror.commit(made)
            # Where the answer was lost, what is there now says whether it happened.
            if (result is not None and result.succeeded) or (
                result is None and broker not in member.mirror.view.nodes
            ):
                log.warning("broker %s is retired", broker)
                return

    def _require_audit_log_elsewhere(self, broker: str) -> None:
        member = self.member
        if member.audit.before is not None and member.alone_has_audit(broker):
            raise RequestError(
                f"Not all of the audit log that broker {broker} alone had is in {AUDIT_STREAM} and at another broker yet.",
                code=Code.CONFLICT,
                hint=f"Have broker {broker} run, with its data folder, until `felix region status` has no problem.",
            )

    async def recover(
        self,
        record: Stream,
        number: int,
        winner: str,
        lost: Sequence[str],
        *,
        powered_off: bool,
        by: str,
    ) -> str:
        """Have `winner` lead a shard although it may lack what was committed; a note of what was done. Raises RequestError(NOT_FOUND, CONFLICT),
        and what the store raises. `by`: the operator (SPIFFE id), for both logs."""
        member, shard = self.member, ShardId(record.incarnation, number)
        mirror = member.mirror
        tried: dict[str, tuple[ShardRecord, int, dict[str, LogEnd | Unopened]]] = {}
        while True:
            ends = await self._hear_ends(shard)
            view = mirror.view
            if shard not in view.shards:
                raise RequestError(f"{record.name} has no shard {number}.", code=Code.NOT_FOUND)
            before, election = view.shards[shard], member.election_id()
            epoch = elected_epoch(before.epoch, election)
            made = transactions.recover(
                view,
                shard,
                winner,
                lost,
                election,
                silent_ms={name: member.controls.silent_ms(name) for name in lost},
                detached_ms=DETACHED_MS if is_replicated(record.config) or len(before.members()) > 1 else 0,
                powered_off=powered_off,
                ends=ends,
                by=by,
            )
            if isinstance(made, Refusal):
                hint = _RECOVER_HINTS.get(made.reason, "")
                if made.reason is Reason.NOT_REGISTERED:
                    living = [name for name in before.replicas if view.brokers.registration(name)]
                    hint += f" {', '.join(living) or 'none'}."
                elif made.reason is Reason.STILL_LEADS and len(before.isr) < before.min:
                    hint = (
                        f"It is written to once {before.min} copies are in sync, and {len(before.isr)} {'is' if len(before.isr) == 1 else 'are'}: start the brokers that are "
                        f"away; where a folder is lost for good: felix region up {member.region} --broker BROKER --replace-folder."
                    )
                raise RequestError(made.sentence, code=Code.CONFLICT, hint=hint)
            tried[election] = before, epoch, ends
            result = await mirror.commit(made)
            if result is not None and result.succeeded:
                break
            held = mirror.view.shards.get(shard)
            if held is not None and held.election in tried:
                # It happened, and its answer was lost.
                before, epoch, ends = tried[held.election]
                break
        given_up = ", ".join(sorted({*before.members(), *lost} - {winner})) or "none"
        log.error(
            "%s has shard %d of %s led by broker %s in epoch %d, whatever was committed before: given up are the copies at %s",
            by,
            number,
            record.name,
            winner,
            epoch,
            given_up,
        )
        own = ends.get(winner)
        has = f" with {own}" if isinstance(own, LogEnd) else ""
        cut = "".join(
            f" {broker} cuts {' and '.join(lost)}."
            for broker, end in sorted(ends.items())
            if isinstance(own, LogEnd) and isinstance(end, LogEnd) and (lost := end.beyond(own))
        )
        return (
            f"Broker {winner} leads shard {number} of {record.name} in epoch {epoch}{has}.{cut} What its copy lacks is lost; where a copy that "
            "was given up comes back, it counts and cuts what it had beyond that."
        )

    async def _hear_ends(self, shard: ShardId) -> dict[str, LogEnd | Unopened]:
        """How far the copies of a shard go at the brokers that are alive."""
        view = self.member.mirror.view
        record = view.shards.get(shard)
        if record is None or self.ends is None:
            return {}
        return await self.ends.hear(shard, sorted(living_copies(view, record)))

    async def rebalance(self, *, dry_run: bool, since: int, by: str) -> ShardMoves:
        """Move copies until each broker has its share: it is written down, so that the next controller goes on with it. Raises NotLeaderError where another
        broker is the controller, which one of an earlier release moves copies by, and what the store raises. `since`: a revision from which moves that ended
        are counted. `by`: the operator."""
        member = self.member
        if not member.controls.term and not dry_run:
            address = member.assignments.address(member.controller) if member.controller else ""
            raise NotLeaderError(
                f"Broker {member.controller or 'none'} is the region's controller, which moves copies.",
                hint="Ask there; the SDK does." if address else "Try again: there is one within a lease.",
                retry_after_ms=RETRY_MS,
                leader=member.controller,
                address=address,
            )
        if not since:
            await self._hear_of_moves()
        found = await self._moves(since)
        if not dry_run:
            while True:
                result = await member.mirror.commit(transactions.rebalance(member.mirror.view, by))
                if result is not None and result.succeeded:
                    break
            found = msgspec.structs.replace(found, is_asked=True)
        return found

    async def _hear_of_moves(self) -> None:
        """Wait until what operators said of brokers and rebalancings up to now counts here, at whichever broker they said it: one may have taken a drain back just before.
        Where changes cannot be followed, what is known counts."""
        mirror = self.member.mirror
        keys = mirror.view.keys
        found, revision = await mirror.find([keys.rebalance, *map(keys.node, mirror.view.nodes)])
        mirror.absorb(found, revision)
        newest = max((entry.mod_revision for entry in found.values() if entry is not None), default=0)
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                # The plan goes by what the watch has brought.
                await mirror.until(lambda: mirror.view.revision >= newest)

    async def stop_rebalancing(self, *, since: int, by: str) -> ShardMoves:
        """End what `rebalance` began, at whichever broker: once it returns, nothing begins to move because of it. What moves arrives: to take a copy back that is
        being made would be a move of its own. Raises what the store raises. `by`: the operator, for the log."""
        mirror, ended = self.member.mirror, ""
        await self._hear_of_moves()
        while (asked := mirror.view.rebalance) is not None:
            ended = asked.by
            result = await mirror.commit(transactions.rebalanced(mirror.view))
            if result is not None and result.succeeded:
                break
        if ended:
            log.warning("%s ended the rebalancing that %s asked for", by, ended)
        return msgspec.structs.replace(await self._moves(since), is_asked=ended != "")

    async def _moves(self, since: int) -> ShardMoves:
        """What a rebalancing would move next, what moves, and what has moved since a revision."""
        planned, view = await self.member.controls.planned(), self.member.mirror.view
        unled = {shard for shard in view.shards if vacancy(view, shard)}
        moves = [
            ShardMove(record.stream, shard.number, list(place_of(record)), list(then))
            for shard, record in sorted(view.shards.items())
            if shard not in unled
            and (then := planned.get(shard, ())) != place_of(record)
            and is_enough(record, then)
        ]
        under_way = sum(record.target != () for shard, record in view.shards.items() if shard not in unled)
        moved = sum(revision > since for revision in view.arrived.values()) if since else 0
        return ShardMoves(
            moves[:MOVES_SHOWN], len(moves), under_way, len(unled), moved, view.revision, view.rebalance is not None
        )  # fmt: skip

    async def placed(self, record: Stream) -> None:
        """Wait until somebody leads the stream, for PLACED_S at most: it exists whether or not."""
        try:
            async with asyncio.timeout(PLACED_S):
                await self.member.until(
                    lambda: all(self.leader_of(record, shard) for shard in range(record.config.shards))
                )
        except TimeoutError:
            pass

    def may_hold_arrivals(self, record: Stream, broker: str = "") -> bool:
        """Whether this broker's disk, or another's, and no other one may have records of a stream that came over a border, and have no leaf yet."""
        return not is_replicated(record.config) and self.placed_on(record) == (broker or self.member.broker)

    def refusal(self, asked: type[Message]) -> FelixError | None:
        """Why this broker does not answer a request, whatever it says; None where it does. Another region's bridge that may ask it learns one
        address more: that of the broker with the audit log."""
        if asked in _WITH_AUDIT_LOG and not self.has_audit_log:
            return self._no_audit_log()
        return None

    def _no_audit_log(self) -> NotLeaderError:
        home, stream = self.audit_home, self.member.audit.stream
        address = self.member.assignments.address(home)
        if stream is not None and (home == self.member.broker or not address):
            return NotLeaderError(
                f"Broker {home} is about to go on with the region's audit log."
                if home
                else "No broker leads the region's audit log at the moment.",
                hint="Try again: a broker is elected within a lease, while more than half of those that have copies run "
                "(`felix region status`).",
                retry_after_ms=RETRY_MS,
                stream=stream.name,
            )
        return NotLeaderError(
            f"Broker {home} writes the region's audit log, and {self.member.broker} does not.",
            hint="Ask there; the SDK does." if address else f"Start broker {home}.",
            retry_after_ms=RETRY_MS if address else 1_000,
            leader=home,
            address=address,
        )
