"""Which brokers have which shards: copies on different hosts and zones, as many on each broker as on the others, and few moves.

Rules, the first before the later ones:
1. a broker has one copy of a shard at most, and none while it is drained;
2. two copies share a host only where there are too few hosts;
3. copies are spread over the zones as evenly as hosts allow;
4. a copy stays where it is, unless 1 to 3 or the balance of the brokers ask for a move; for balance alone, one call moves at most the
   share of one broker: where N brokers are balanced and one more joins, at most 1/(N+1) of the copies move;
5. each broker is to lead as many shards as the others.

A plan of thousands of shards takes longer than an event loop can wait: `Planning` makes it by slices, `plan` at once. New streams need
none: `place` looks at the loads of all brokers and at the new shards alone, and moves nothing.

A stream is placed `together`, all of its shards on the same brokers and with one leader, or `spread`, each by itself. Streams that
share a group are placed as one, if they are placed together; those that already have different places keep them. Pure and
deterministic: the same brokers, wishes and present places give the same plan, in whatever order they come.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from region.cluster.records import ShardId

Places = Mapping[ShardId, tuple[str, ...]]
"""The replicas of each shard; the first is to lead."""


@dataclass(frozen=True, slots=True)
class Site:
    """A broker and where it stands. A drained one has nothing; one that is not alive keeps what it has and gets nothing more."""

    broker: str
    host: str
    zone: str = ""
    drain: bool = False
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted for a stream: the numbers of its shards, and of copies of each. `groups`: of streams that are to have one place,
    where they are not `spread` and want as many copies; the first is joined before the second, and so on. `stays`: once it is placed, none
    of its copies moves, come what may."""

    incarnation: str
    shards: int
    replicas: int
    spread: bool = False
    groups: tuple[str, ...] = ()
    stays: bool = False


@dataclass(slots=True, eq=False)
class _Unit:
    """Shards that are placed as one. `weight`: their number."""

    name: str
    shards: tuple[ShardId, ...]
    weight: int
    wanted: int
    replicas: list[str]
    is_new: bool
    groups: tuple[str, ...]
    stays: bool = False

    @property
    def cost(self) -> int:
        """Copies that a move of one of this unit's copies moves: none where nothing was written yet."""
        return 0 if self.is_new else self.weight


class Planning:
    """A plan in the making. What it was begun with, it keeps: later changes ask for another one."""

    def __init__(self, sites: Iterable[Site], wishes: Iterable[Wish], current: Places) -> None:
        self.current = current
        self._places: dict[ShardId, tuple[str, ...]] | None = None
        self._work = self._make(list(sites), list(wishes))

    def advance(self, looks_max: float) -> dict[ShardId, tuple[str, ...]] | None:
        """Go on for about so many looks at a broker or a copy, some microseconds each. The plan, once it is made."""
        for looks in self._work:
            looks_max -= looks
            if looks_max <= 0:
                break
        return self._places

    def _make(self, sites: Sequence[Site], wishes: Sequence[Wish]) -> Iterator[int]:
        usable = _usable(sites)
        units: list[_Unit] = []
        for wish in sorted(wishes, key=lambda wish: wish.incarnation):
            units += _units(wish, self.current)
            yield wish.shards
        units = _grouped(units)
        if not usable:
            self._places = {shard: () for unit in units for shard in unit.shards}
            return
        made = _Plan(usable, [unit for unit in units if unit.is_new or not unit.stays])
        for unit in units:
            if unit.stays and not unit.is_new:
                made.have(unit)
        yield from made.make()
        self._places = {shard: tuple(unit.replicas) for unit in units for shard in unit.shards}


def plan(sites: Iterable[Site], wishes: Iterable[Wish], current: Places) -> dict[ShardId, tuple[str, ...]]:
    """Replicas for every wanted shard, those that stay where they are included. Empty where no broker can have any."""
    places = Planning(sites, wishes, current).advance(math.inf)
    assert places is not None
    return places


def place(sites: Iterable[Site], wishes: Iterable[Wish], current: Places) -> dict[ShardId, tuple[str, ...]]:
    """Replicas for those shards of `wishes` that have none in `current`, by rules 1 to 3, on the brokers that have and lead the fewest.
    `wishes` hold every stream that shares a group with a new one, `current` the places of all shards. Empty where no broker can have any."""
    usable = _usable(sites)
    made = _Plan(usable, ())
    leads: Counter[str] = Counter()
    for replicas, count in Counter(current.values()).items():
        for broker in replicas:
            if broker in usable:
                made.load[broker] += count
        if replicas:
            leads[replicas[0]] += count
    places: dict[ShardId, tuple[str, ...]] = {}
    ordered = sorted(wishes, key=lambda wish: wish.incarnation)
    for unit in _grouped([unit for wish in ordered for unit in _units(wish, current)]):
        new = [shard for shard in unit.shards if not current.get(shard)]
        if not new:
            continue
        unit.replicas = [broker for broker in dict.fromkeys(unit.replicas) if broker in usable]
        made.place(unit, leads)
        places |= dict.fromkeys(new, tuple(unit.replicas))
    return places


def _usable(sites: Iterable[Site]) -> dict[str, Site]:
    return {site.broker: site for site in sorted(sites, key=lambda site: site.broker) if not site.drain}


def _grouped(units: list[_Unit]) -> list[_Unit]:
    for level in range(max((len(unit.groups) for unit in units), default=0)):
        units = _joined(units, level)
    return units


def _units(wish: Wish, current: Places) -> Iterator[_Unit]:
    shards = [ShardId(wish.incarnation, number) for number in range(wish.shards)]
    for group in [(shard,) for shard in shards] if wish.spread else [tuple(shards)]:
        replicas = list(current.get(group[0], ()))
        name = f"{wish.incarnation}/{group[0].number}"
        yield _Unit(
            name,
            group,
            len(group),
            wish.replicas,
            replicas,
            is_new=not replicas,
            groups=() if wish.spread else wish.groups,
            stays=wish.stays,
        )


def _joined(units: Sequence[_Unit], level: int) -> list[_Unit]:
    """Those of one group that want as many copies as one unit, where its first that is placed stands; one that stands elsewhere stays
    by itself."""

    def joins(unit: _Unit) -> tuple[str, int] | None:
        return (unit.groups[level], unit.wanted) if len(unit.groups) > level else None

    first: dict[tuple[str, int], _Unit] = {}
    for unit in units:
        if not unit.is_new and (group := joins(unit)):
            first.setdefault(group, unit)
    found: list[_Unit] = []
    for unit in units:
        group = joins(unit)
        joined = first.setdefault(group, unit) if group else unit
        # On the same brokers: who leads may differ, after an election that not every copy of each was in sync for.
        if joined is unit or not (unit.is_new or set(unit.replicas) == set(joined.replicas)):
            found.append(unit)
            continue
        joined.shards += unit.shards
        joined.weight += unit.weight
    return found


class _Plan:
    """Its methods yield how much they looked at, as often as a slice may end."""

    def __init__(self, sites: Mapping[str, Site], units: Sequence[_Unit]) -> None:
        self.sites = sites
        self.open = [broker for broker, site in sites.items() if site.alive]
        self.host = {broker: site.host for broker, site in sites.items()}
        self.zone = {broker: site.zone for broker, site in sites.items()}
        self.hosts = len({*self.host.values()})
        self.zones = len({*self.zone.values()})
        self.units = units
        self.load: Counter[str] = Counter(dict.fromkeys(sites, 0))
        self.leads: Counter[str] = Counter()

    def have(self, unit: _Unit) -> None:
        """Count what stays where it is."""
        for broker in unit.replicas:
            if broker in self.sites:
                self.load[broker] += unit.weight
        self.leads[unit.replicas[0]] += unit.weight

    def make(self) -> Iterator[int]:
        for unit in self.units:
            unit.replicas = [broker for broker in dict.fromkeys(unit.replicas) if broker in self.sites]
            for broker in unit.replicas:
                self.load[broker] += unit.weight
            yield 1
        for unit in self.units:
            yield self._resize(unit)
        for unit in self.units:
            yield self._spread(unit)
        yield from self._balance()
        yield from self._choose_leaders()

    def place(self, unit: _Unit, leads: Counter[str]) -> None:
        """As many copies as are wanted; of a unit that has none yet, the one on the broker that leads the fewest leads."""
        is_new = not unit.replicas
        self._resize(unit)
        if is_new and unit.replicas:
            self._spread(unit)
            unit.replicas.sort(key=lambda broker: (leads[broker], _affinity(unit.name, broker)))
            leads[unit.replicas[0]] += unit.weight

    def _resize(self, unit: _Unit) -> int:
        """As many copies as are wanted and brokers can have."""
        wanted = min(unit.wanted, len({*self.open, *unit.replicas}))
        looks = len(unit.replicas)
        while len(unit.replicas) > wanted:
            # The leader stays. Which of the others has the most beside it?
            gone = min(unit.replicas[1:], key=lambda broker: self._dispensable(unit, broker))
            unit.replicas.remove(gone)
            self.load[gone] -= unit.weight
            looks += len(unit.replicas)
        while len(unit.replicas) < wanted:
            best = self._best(unit)
            unit.replicas.append(best)
            self.load[best] += unit.weight
            looks += len(self.open)
        return looks

    def _dispensable(self, unit: _Unit, broker: str) -> tuple[int, int, int, str]:
        hosts, zones = self._beside(unit, broker, without=broker)
        return -hosts, -zones, -self.load[broker], broker

    def _best(self, unit: _Unit) -> str:
        """For one more copy: the broker with the fewest beside it, then with the fewest copies."""
        ranks = [
            (*self._beside(unit, broker), self.load[broker])
            for broker in self.open
            if broker not in unit.replicas
        ]
        least = min(ranks)
        others = (broker for broker in self.open if broker not in unit.replicas)
        equal = [broker for broker, rank in zip(others, ranks, strict=True) if rank == least]
        return equal[0] if len(equal) == 1 else of_equals(equal, unit.name)

    def _spread(self, unit: _Unit) -> int:
        """Move copies while that puts fewer of them on one host, or in one zone."""
        looks = len(unit.replicas)
        while True:
            crowding = self._crowding(unit)
            if crowding <= self._least_crowding(len(unit.replicas)):
                return looks
            looks += len(unit.replicas) * len(self.open)
            found = min(
                (
                    (
                        self._crowding_with(unit, crowding, old, new),
                        self.load[new],
                        _affinity(unit.name, new),
                        old,
                        new,
                    )
                    for old in unit.replicas
                    for new in self.open
                    if new not in unit.replicas
                ),
                default=None,
            )
            if found is None or found[0] >= crowding:
                return looks
            self._replace(unit, found[3], found[4])

    def _balance(self) -> Iterator[int]:
        """Move copies from the brokers with the most to those with the fewest, as long as that evens them out."""
        held: dict[str, dict[_Unit, None]] = {broker: {} for broker in self.sites}
        for unit in self.units:
            for broker in unit.replicas:
                held[broker][unit] = None
        yield len(self.units)
        left = sum(self.load.values()) // len(self.sites)  # one broker's share
        barred: set[tuple[str, str]] = set()
        while True:
            found = yield from self._evening(held, left, barred)
            if found is None:
                if not barred:
                    return
                # What barred a pair may have moved away since. Without it nothing is barred in vain twice.
                barred.clear()
                found = yield from self._evening(held, left, barred)
                if found is None:
                    return
            unit, old, new = found
            self._replace(unit, old, new)
            del held[old][unit]
            held[new][unit] = None
            left -= unit.cost

    def _evening(
        self, held: Mapping[str, Iterable[_Unit]], left: int, barred: set[tuple[str, str]]
    ) -> Generator[int, None, tuple[_Unit, str, str] | None]:
        """A unit to move, from where to where. `barred`: pairs of brokers of which no unit could."""
        order = sorted(self.sites, key=lambda broker: (self.load[broker], broker))
        for old in reversed(order):
            for new in order:
                gap = self.load[old] - self.load[new]
                if gap <= 1:
                    break
                if (old, new) in barred or new not in self.open:
                    continue
                looks = 1
                for unit in held[old]:
                    looks += 1
                    fits = unit.weight < gap and unit.cost <= left and new not in unit.replicas
                    if fits and self._beside(unit, new, without=old) <= self._beside(unit, old, without=old):
                        yield looks
                        return unit, old, new
                yield looks
                barred.add((old, new))
        return None

    def _choose_leaders(self) -> Iterator[int]:
        """The first of the replicas is to lead: hand on from brokers that lead the most, along those that can take over, to one that
        leads fewer. Who leads now goes on where nothing is gained."""
        leads: dict[str, dict[_Unit, None]] = {broker: {} for broker in self.sites}
        for unit in self.units:
            if unit.replicas:
                leads[unit.replicas[0]][unit] = None
        yield len(self.units)
        load = {
            broker: sum(unit.weight for unit in units) + self.leads[broker] for broker, units in leads.items()
        }
        for _ in range(len(self.units) * len(self.sites)):
            path: list[tuple[_Unit, str, str]] = []
            for broker in sorted(self.sites, key=lambda broker: (-load[broker], broker)):
                path = yield from self._path(broker, leads, load)
                if path:
                    break
            if not path:
                return
            for unit, old, new in path:
                unit.replicas.remove(new)
                unit.replicas.insert(0, new)
                del leads[old][unit]
                leads[new][unit] = None
                load[old] -= unit.weight
                load[new] += unit.weight

    def _path(
        self, start: str, leads: Mapping[str, Mapping[_Unit, None]], load: Mapping[str, int]
    ) -> Generator[int, None, list[tuple[_Unit, str, str]]]:
        """Hand-overs that take one unit's weight from `start` and give it to the nearest broker that leads less by more than that."""
        yield len(leads[start])
        fewest = min(load[broker] for broker in self.open) if self.open else 0
        for weight in sorted({unit.weight for unit in leads[start]}):
            if load[start] - fewest <= weight:
                break
            came: dict[str, tuple[_Unit, str]] = {}
            ahead = deque([start])
            while ahead:
                at = ahead.popleft()
                looks = 1
                for unit in leads[at]:
                    looks += 1
                    if unit.weight != weight:
                        continue
                    for broker in unit.replicas[1:]:
                        if broker == start or broker in came or broker not in self.open:
                            continue
                        came[broker] = (unit, at)
                        ahead.append(broker)
                        if load[start] - load[broker] > weight:
                            yield looks
                            return _back(start, broker, came)
                yield looks
        return []

    def _crowding(self, unit: _Unit) -> tuple[int, int]:
        """How badly copies share hosts, then zones: 0 for each pair that does not."""
        beside = [self._beside(unit, broker, without=broker) for broker in unit.replicas]
        return sum(hosts for hosts, _ in beside), sum(zones for _, zones in beside)

    def _crowding_with(self, unit: _Unit, crowding: tuple[int, int], old: str, new: str) -> tuple[int, int]:
        """How badly, were `new` in the place of `old`."""
        less, more = self._beside(unit, old, without=old), self._beside(unit, new, without=old)
        # Each pair counts twice, once from either side.
        return crowding[0] + 2 * (more[0] - less[0]), crowding[1] + 2 * (more[1] - less[1])

    def _beside(self, unit: _Unit, broker: str, *, without: str = "") -> tuple[int, int]:
        """How many of a unit's copies, but that on `without`, share the host of `broker`, and its zone."""
        host, zone = self.host[broker], self.zone[broker]
        hosts = zones = 0
        for other in unit.replicas:
            if other != without:
                hosts += self.host[other] == host
                zones += self.zone[other] == zone
        return hosts, zones

    def _least_crowding(self, copies: int) -> tuple[int, int]:
        """Of so many copies, were each host and zone to take as many as it likes."""
        return _least(copies, self.hosts), _least(copies, self.zones)

    def _replace(self, unit: _Unit, old: str, new: str) -> None:
        unit.replicas[unit.replicas.index(old)] = new
        self.load[old] -= unit.weight
        self.load[new] += unit.weight


def _back(start: str, end: str, came: Mapping[str, tuple[_Unit, str]]) -> list[tuple[_Unit, str, str]]:
    path = []
    while end != start:
        unit, before = came[end]
        path.append((unit, before, end))
        end = before
    return path


def _least(copies: int, places: int) -> int:
    """Ordered pairs that share a place where they are spread evenly."""
    each, more = divmod(copies, places)
    return more * (each + 1) * each + (places - more) * each * (each - 1)


def of_equals(brokers: Iterable[str], name: str) -> str:
    """One of brokers that are equally good for `name`, the same whoever asks."""
    return min(brokers, key=lambda broker: _affinity(name, broker))


def _affinity(name: str, broker: str) -> int:
    """Rendezvous hash: among brokers that are equally good, each name has an order of its own."""
    return xxhash.xxh64_intdigest(f"{name} {broker}".encode())
