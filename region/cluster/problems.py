"""What is wrong with a region of several brokers, for a person, as each of its brokers knows it from the records: the most serious first. Pure.

A problem ends once somebody has done something, or by itself. A remark is as an operator has it, such as a broker that is drained, and stays for as
long; so whoever waits until there is no problem does not wait for ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from region.cluster import draining, transactions
from region.cluster.clocks import CLOCK_OFF_MS_MAX
from region.cluster.election import LogEnd, Unopened, candidates, may_ask_for_ends
from region.cluster.membership import is_enough, is_replaced
from region.cluster.records import ShardId, ShardRecord
from region.cluster.view import ClusterView
from region.metadata.records import AUDIT_STREAM, Stream, is_replicated

SHOWN: Final = 3
"""Shards that a sentence names."""
GROUPS_SHOWN: Final = 5
"""Reasons why nobody leads a shard that are told one by one."""


FROM_BEFORE: Final = (
    "That is from before: the metadata store does not answer this broker, or has only just begun to. Ask again once it has for a while, and give up "
    "nothing until then."
)
"""In place of what a person would do about brokers that may live."""


class Found(NamedTuple):
    """Sentences, and of problems the command to go on with where there is one."""

    problems: list[str]
    remarks: list[str]


NOTHING: Final = Found([], [])
Ends = Mapping[str, LogEnd | Unopened]
"""How far the copies of a shard go, by broker; who did not say is left out."""
NOTHING_HEARD: Final[Mapping[ShardId, Ends]] = MappingProxyType({})


class _Shard(NamedTuple):
    stream: Stream
    id: ShardId
    record: ShardRecord | None

    def __str__(self) -> str:
        return f"{self.stream.name} shard {self.id.number}"


class _Why(NamedTuple):
    """Why nobody leads shards that have one way on: the audit log's is its own."""

    sentence: str
    is_audit: bool


class Survey(NamedTuple):
    """A region's shards as the records have them, walked once (`survey`): for what is to be asked about them, and for what is then said."""

    view: ClusterView
    shards: list[_Shard]
    groups: Mapping[_Why, list[_Shard]]
    """those that nobody can lead by rule, by the reason"""
    soon: list[_Shard]
    """those that are about to be led"""

    def asks_for_ends(self) -> list[ShardId]:
        """Of which shards to hear how far their copies go: those for which a command is given that chooses one."""
        return [
            found[0].id
            for _, found in _largest(self.groups)
            if found[0].record and len(living_copies(self.view, found[0].record)) > 1
        ]

    def found(
        self,
        region: str,
        ends: Mapping[ShardId, Ends] = NOTHING_HEARD,
        *,
        is_out_of_date: bool = False,
    ) -> Found:
        """`ends`: how far copies go, of shards that `asks_for_ends` named. `is_out_of_date`: the records may be those of before, and brokers that
        are not alive there may live. Then nothing is advised that gives up what they have."""
        view = self.view
        away, away_remarks = _away(view, is_out_of_date=is_out_of_date)
        copies, copies_remarks = _copies(view, self.shards)
        problems = [
            *_frozen(view, region),
            *_led_by_nobody(self, region, None if is_out_of_date else ends),
            *_below_min(view, self.shards, region, is_out_of_date=is_out_of_date),
            *away,
            *copies,
            *unreadable(view.unreadable),
        ]
        return Found(problems, [*away_remarks, *copies_remarks, *_rebalancing(view, region)])


def wrong_clock(broker: str, ahead_ms: Mapping[str, int]) -> str:
    """What a broker says of its own clock where most others' are further from it than CLOCK_OFF_MS_MAX; else nothing. `ahead_ms`: how far it is ahead of each of them."""
    off = {peer: ms for peer, ms in ahead_ms.items() if abs(ms) > CLOCK_OFF_MS_MAX}
    if 2 * len(off) <= len(ahead_ms):
        return ""
    nearest = min(off.values(), key=abs)
    way = "ahead of" if nearest > 0 else "behind"
    # Of two, nobody can say which.
    which = ". Set it right" if len(ahead_ms) > 1 else ", and one of the two is wrong. Set that one right"
    return (
        f"The clock of broker {broker} is {abs(nearest) // 1_000:,} s {way} that of {', '.join(sorted(off))}{which}: by it, certificates and "
        "grants begin and end at the wrong time, and clients may be refused there; "
        + (
            "its streams go by the others' clocks meanwhile."
            if len(ahead_ms) > 1
            else "so do retention, expiries and leases of jobs."
        )
    )


def no_links(broker: str, apart: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """What a broker says of others that are alive and that it has no link with. `apart`: of each for how long (ms), and why, where it knows."""
    for peer, (ms, why) in sorted(apart.items()):
        yield (
            f"Brokers {broker} and {peer} are both alive, and have had no link for {ms // 1_000:,} s{': ' if why else '. '}{why.rstrip('.')}{'. ' if why else ''}"
            "Neither's copies follow the other's. Look at the network between them, and at their clocks."
        )


def unreadable(found: Mapping[str, str]) -> Iterator[str]:
    """The first keys, each by itself: whoever can write the store makes as many as he likes."""
    first = sorted(found.items())[:GROUPS_SHOWN]
    yield from (f"{key} cannot be read: {why}" for key, why in first)
    if len(found) > len(first):
        yield f"{len(found) - len(first):,} more keys of the metadata store cannot be read."


def survey(view: ClusterView, streams: Iterable[Stream]) -> Survey:
    """`streams`: all of the region, with those that stand in no catalog."""
    shards = _shards(view, streams)
    return Survey(view, shards, *_vacant(view, shards))


def look(
    view: ClusterView,
    streams: Iterable[Stream],
    region: str,
    ends: Mapping[ShardId, Ends] = NOTHING_HEARD,
) -> Found:
    """What is wrong, of a survey that nobody else needs."""
    return survey(view, streams).found(region, ends)


def _shards(view: ClusterView, streams: Iterable[Stream]) -> list[_Shard]:
    return [
        _Shard(stream, shard, view.shards.get(shard))
        for stream in streams
        for number in range(stream.config.shards)
        for shard in (ShardId(stream.incarnation, number),)
        if view.keys.shard(shard) not in view.unreadable
    ]


def vacancy(view: ClusterView, shard: ShardId) -> str:
    """Why nobody can lead a shard by rule; empty where somebody leads it, or is about to."""
    record = view.shards.get(shard)
    if record is None or not transactions.leader_has_stopped(view, record) or _is_elected(view, record):
        return ""
    return transactions.reasons_vacant(view, shard)


class Nowhere(NamedTuple):
    """Why a new stream is placed on no broker, without an end, and what a person does."""

    why: str
    way: str


def placed_nowhere(view: ClusterView) -> Nowhere | None:
    """None where some broker may have copies, or comes alive by itself."""
    alive, drained = sorted(view.alive), draining.drained_of(view)
    if not alive or not drained.issuperset(alive):
        return None
    away = ", ".join(sorted(view.nodes.keys() - drained - view.alive.keys()))
    return Nowhere(
        "each broker that is alive is drained, and gets no copies",
        f"`felix region undrain {alive[0]}` lets one have them again{', or start ' if away else ''}{away}.",
    )


def _is_elected(view: ClusterView, record: ShardRecord) -> bool:
    return bool(candidates(record, view.brokers)) or may_ask_for_ends(record, view.brokers)


def _frozen(view: ClusterView, region: str) -> Iterator[str]:
    if view.frozen is not None:
        yield (
            f"The metadata store is older than the brokers' folders: {view.frozen.why}. Nothing is placed or elected. Put the newest backup of it "
            f"back, stop all brokers, and run `felix region reconcile {region} --dry-run`."
        )


def _rebalancing(view: ClusterView, region: str) -> Iterator[str]:
    if view.rebalance is not None:
        yield (
            f"Copies and leaders are being moved until each broker has its share, as {view.rebalance.by} asked: `felix region rebalance --dry-run "
            f"--region {region}` shows what is left, `felix region rebalance --stop --region {region}` ends it."
        )


def may_be_uneven(view: ClusterView) -> bool:
    """Whether a plan is worth making to say whether leaders are uneven (`uneven_leaders`): some broker leads fewer than another one, and nothing is under way that
    changes that by itself, or keeps it so. A look at each shard."""
    if view.frozen is not None or view.rebalance is not None:
        return False
    if any(broker not in view.alive and not node.drain for broker, node in view.nodes.items()):
        return False
    for record in view.shards.values():
        if record.target or len(record.isr) < len(record.replicas):
            return False
        if transactions.leader_has_stopped(view, record):
            return False
    leads = _leads(view, (record.leader for record in view.shards.values())).values()
    return bool(leads) and max(leads) - min(leads) > 1


def uneven_leaders(
    view: ClusterView, planned: Mapping[ShardId, tuple[str, ...]], region: str
) -> Iterator[str]:
    """That some brokers lead more than they would after a rebalancing, with the command. `planned`: where that would have each shard, the leader first."""
    leads = _leads(view, (record.leader for record in view.shards.values()))
    then = _leads(
        view,
        (
            place[0] if (place := planned.get(shard, ())) and is_enough(record, place) else record.leader
            for shard, record in view.shards.items()
        ),
    )
    # Each hand-over to a broker that leads fewer makes the sum of the squares less.
    if sum(count**2 for count in then.values()) >= sum(count**2 for count in leads.values()):
        return
    most, fewest = max(leads, key=lambda name: leads[name]), min(leads, key=lambda name: leads[name])
    copied = sum(
        not {*place} <= {*record.replicas} and is_enough(record, place)
        for shard, record in view.shards.items()
        if (place := planned.get(shard, ()))
    )
    # Of a stream with one copy nobody else may lead without a copy of it: a region that was one broker's is evened out so.
    how = f" For that {copied:,} shard{' is' if copied == 1 else 's are'} copied first." if copied else ""
    yield (
        f"Leaders are uneven: broker {most} leads {leads[most]:,} of {sum(leads.values()):,} shards, broker {fewest} leads "
        f"{leads[fewest] or 'none'}. `felix region rebalance --region {region}` evens them out, to {max(then.values()):,} at one broker at most.{how}"
    )


def _leads(view: ClusterView, leaders: Iterable[str]) -> dict[str, int]:
    """How many shards each broker leads that may lead some, by name."""
    counted = Counter(leaders)
    return {
        broker: counted[broker]
        for broker, node in sorted(view.nodes.items())
        if broker in view.alive and not node.drain
    }


def _vacant(view: ClusterView, shards: Iterable[_Shard]) -> tuple[dict[_Why, list[_Shard]], list[_Shard]]:
    """Shards that nobody can lead by rule, by the reason, and those that are about to be led."""
    groups: defaultdict[_Why, list[_Shard]] = defaultdict(list)
    soon: list[_Shard] = []
    for shard in shards:
        record = shard.record
        if record is None:
            soon.append(shard)
        elif transactions.leader_has_stopped(view, record):
            begins_anew = shard.stream.config.durability.kind == "ephemeral" and bool(view.alive)
            if begins_anew or _is_elected(view, record):
                soon.append(shard)
            else:
                why = transactions.reasons_vacant(view, shard.id)
                groups[_Why(why, record.stream == str(AUDIT_STREAM))].append(shard)
    return groups, soon


def _largest(groups: Mapping[_Why, list[_Shard]]) -> list[tuple[_Why, list[_Shard]]]:
    return sorted(groups.items(), key=lambda item: -len(item[1]))[:GROUPS_SHOWN]


def _led_by_nobody(survey: Survey, region: str, ends: Mapping[ShardId, Ends] | None) -> Iterator[str]:
    """`ends` None: what is known is from before."""
    view, groups, soon = survey.view, survey.groups, survey.soon
    for why, found in _largest(groups):
        way = FROM_BEFORE if ends is None else _go_on(view, found[0], region, ends.get(found[0].id, {}))
        yield f"Nobody leads {_named(found)}: {why.sentence}. {way}".rstrip()
    if len(groups) > GROUPS_SHOWN:
        yield f"Nobody leads shards for {len(groups) - GROUPS_SHOWN:,} more reasons."
    new = [shard for shard in soon if shard.record is None]
    if new and view.frozen is None and (nowhere := placed_nowhere(view)):
        soon = [shard for shard in soon if shard.record is not None]
        yield f"Nobody leads {_named(new)}: {nowhere.why}. {nowhere.way}"
    if soon and view.frozen is None:
        yield f"Nobody leads {_named(soon)} yet: a broker is about to."
    elif soon:
        yield f"Nobody leads {_named(soon)}: nothing is elected before the region is reconciled."


def living_copies(view: ClusterView, record: ShardRecord) -> list[str]:
    """The brokers that have copies and are alive."""
    replicas = dict.fromkeys((*record.replicas, *record.target))
    return [broker for broker in replicas if view.brokers.registration(broker)]


def _go_on(view: ClusterView, shard: _Shard, region: str, ends: Ends) -> str:
    """What a person does about a shard that nobody can lead by rule."""
    record = shard.record
    assert record is not None
    away, failed = _missing_members(view, record)
    unopened = {broker: end.why for broker in failed if isinstance(end := ends.get(broker), Unopened)}
    bring = _bring_back(away, failed, unopened)
    if not away and failed and len(unopened) < len(failed):
        return f"{bring}."
    if record.stream == str(AUDIT_STREAM):
        if not bring:
            return _LEAVES_GIVEN_UP
        return (
            f"{bring}: more than half of its copies are needed. Give up no data folder of these (--replace-folder) that can be had back: without any of "
            "them this log ends for good."
        )
    living = [broker for broker in living_copies(view, record) if broker not in failed]
    if living:
        return _recover(view, shard, region, ends, living, bring, is_failed=bool(failed))
    if len(away) == 1:
        return f"{bring}; only if its disk is lost: `felix region up {region} --broker {away[0]} --replace-folder`."
    return f"{bring}."


_LEAVES_GIVEN_UP: Final = (
    "It is led by no copy that may lack leaves, and each folder that surely had all of them was given up: what is left to do is in docs/operations.md, "
    '"When a region\'s audit log is gone for good".'
)


def _missing_members(view: ClusterView, record: ShardRecord) -> tuple[list[str], list[str]]:
    """The members of the sets that are not alive, and those that are and whose copy failed."""
    members = sorted(record.members())
    away = [member for member in members if not view.brokers.registration(member)]
    return away, [member for member in members if member in record.failed and member not in away]


def _bring_back(away: Sequence[str], failed: Sequence[str], unopened: Mapping[str, str]) -> str:
    """What has the members lead again, without an end; empty where there is none that could. `unopened`: why copies that failed are not opened."""
    if away:
        return f"Start {', '.join(away)}"
    if not failed or len(unopened) < len(failed):
        return f"Restart {', '.join(failed)}" if failed else ""
    # A repair of what the disk damaged is looked at when the broker starts.
    why = " ".join(f"{broker} cannot open its copy: {why}" for broker, why in unopened.items())
    return f"{why} If what is damaged there can be put back, do so and restart {', '.join(failed)}"


def _recover(
    view: ClusterView,
    shard: _Shard,
    region: str,
    ends: Ends,
    living: Sequence[str],
    bring: str,
    *,
    is_failed: bool,
) -> str:
    """The command that has one of the `living` copies be the shard, and what is lost by it, after what is to be tried before (`bring`). `is_failed`:
    a member that is alive has a copy that failed."""
    record = shard.record
    assert record is not None
    told = {broker: end for broker in living if isinstance(end := ends.get(broker), LogEnd)}
    winner = max(living, key=lambda broker: _preference(view, record, broker, told))
    # Whoever follows the shard again later cuts what it has beyond that copy; who is alive says how much that is.
    cut = {
        broker: lost for broker, end in told.items() if winner in told and (lost := end.beyond(told[winner]))
    }
    silent = sorted(
        broker
        for broker in {*record.replicas, *record.target} - record.members().keys()
        if not view.brokers.registration(broker)
    )
    given_up = dict.fromkeys((*sorted(record.members()), *silent, *cut))
    options = "".join(f" --lost {broker}" for broker in given_up if broker != winner)
    way = f"felix region recover-shard {record.stream} {shard.id.number} --from {winner}{options} --accept-loss --region {region}"
    has = f"{', '.join(f'{broker} has {end}' for broker, end in sorted(told.items()))}. " if told else ""
    has += "".join(
        f"With the copy of {winner}, {broker} loses {' and '.join(what)}. "
        for broker, what in sorted(cut.items())
    )
    if bring:
        more = f", and start {', '.join(silent)}, which may have more" if is_failed and silent else ""
        return f"{has}{bring}{more}; only if what was there is lost: `{way}`."
    if silent:
        return f"{has}Start {', '.join(silent)}, which may have more; only if that is lost, too: `{way}`."
    return f"{has}What was there was given up; without it goes on: `{way}`."


def _preference(
    view: ClusterView, record: ShardRecord, broker: str, told: Mapping[str, LogEnd]
) -> tuple[object, ...]:
    """Higher is better: a copy goes by what it has where that was heard. Else a member of the sets comes first, then one in a folder that was never replaced: whoever has
    begun with an empty one may have nothing. Then the order of the replicas."""
    end, node = told.get(broker), view.nodes[broker]
    is_member = not is_replaced(node, record.members().get(broker, 0))
    order = [*record.replicas, *record.target].index(broker)
    rank = () if end is None else end.rank
    return end is not None, rank, is_member, node.whole_since == 1, -order


def _below_min(
    view: ClusterView, shards: Iterable[_Shard], region: str, *, is_out_of_date: bool
) -> Iterator[str]:
    found = {
        shard.id: shard
        for shard in shards
        if (record := shard.record) is not None
        and len(record.isr) < record.min
        and not transactions.leader_has_stopped(view, record)
    }
    short = draining.short(view, found)
    if short:
        named = _named([found.pop(each.shard) for each in short])
        way = FROM_BEFORE if is_out_of_date else draining.way_out(view, short, frozenset(), region)
        yield f"Nothing is written to {named}: {draining.sentence(short)}. {way}"
    if not found:
        return
    away = sorted({broker for shard in found for broker in view.shards[shard].replicas} - view.alive.keys())
    way = (
        FROM_BEFORE
        if is_out_of_date
        else f"Start {', '.join(away)}."
        if away
        else "Their copies catch up, or wait for a disk, as is said below."
    )
    yield f"Nothing is written to {_named([*found.values()])}: fewer copies are in sync than a record needs. {way}"


def _away(view: ClusterView, *, is_out_of_date: bool) -> tuple[list[str], list[str]]:
    """A line for each broker that is not alive; remarks of those that an operator drained."""
    problems, remarks = [], []
    has = Counter(
        broker
        for record in view.shards.values()
        for broker in {record.leader, *record.replicas, *record.target, *record.members()}
    )
    for broker, node in sorted(view.nodes.items()):
        if broker in view.alive or view.keys.broker(broker) in view.unreadable:
            continue
        copies = (
            f"copies of {has[broker]:,} shard{'' if has[broker] == 1 else 's'}"
            if has[broker]
            else "no copies"
        )
        state = "was stopped and is not alive" if node.clean == node.registration else "is not alive"
        if node.drain:
            way = f" If it is gone for good: `felix region retire {broker}`."
            remarks.append(
                f"Broker {broker} {state}, is drained, and has {copies}.{'' if has[broker] or is_out_of_date else way}"
            )
        else:
            gone = "" if not has[broker] else f"`felix region drain {broker}`, then "
            way = f"Start it; if it is gone for good: {gone}`felix region retire {broker}`."
            problems.append(
                f"Broker {broker} {state}, and has {copies}. {FROM_BEFORE if is_out_of_date else way}"
            )
    return problems, remarks


def _copies(view: ClusterView, shards: Iterable[_Shard]) -> tuple[list[str], list[str]]:
    """Shards with fewer copies in sync than they are to have, by the reason."""
    nodes, alive = view.nodes, view.alive
    usable = {broker for broker in alive if broker in nodes and not nodes[broker].drain}
    behind: list[_Shard] = []
    away: defaultdict[tuple[str, ...], list[_Shard]] = defaultdict(list)
    drained: defaultdict[tuple[str, ...], list[_Shard]] = defaultdict(list)
    for shard in shards:
        record, wanted = shard.record, shard.stream.config.replicas
        if record is None or not is_replicated(shard.stream.config) or len(record.isr) >= wanted:
            continue
        has = {*record.replicas, *record.target}
        missing = has - record.isr.keys()
        if missing & alive.keys() or (not missing and usable - has):
            behind.append(shard)
            continue
        without = missing or nodes.keys() - has
        gone = tuple(sorted(broker for broker in without if broker not in nodes or not nodes[broker].drain))
        if gone:
            away[gone].append(shard)
        elif len(record.isr) >= record.min:  # else it is told as a problem
            drained[tuple(sorted(without))].append(shard)
    problems = [
        f"Too few copies while {_are(brokers)} not alive: {_named(found, _standing)}."
        for brokers, found in sorted(away.items())
    ]
    if behind:
        problems.append(f"Not every copy is in sync: {_named(behind, _standing)}.")
    remarks = [
        f"Fewer copies while {_are(brokers)} drained, which is normal: {_named(found, _standing)}."
        if brokers
        else f"Fewer copies, as the region has {len(nodes)} brokers: {_named(found, _standing)}."
        for brokers, found in sorted(drained.items())
    ]
    return problems, remarks


def _are(brokers: Iterable[str]) -> str:
    names = tuple(brokers)
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _standing(shard: _Shard) -> str:
    assert shard.record is not None
    in_sync = ", ".join(sorted(shard.record.isr)) or "none"
    return f"{shard} has {len(shard.record.isr)} of {shard.stream.config.replicas} ({in_sync})"


def _named(shards: Sequence[_Shard], said: Callable[[_Shard], str] = str) -> str:
    more = f" and {len(shards) - SHOWN:,} more" if len(shards) > SHOWN else ""
    return ", ".join(map(said, shards[:SHOWN])) + more
