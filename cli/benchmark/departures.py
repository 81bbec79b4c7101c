"""Departures: records like flights that say which they are, and the ledger that finds what became of them on the way.

A record's `flight` is its sequence number within the shard, and everything else but the time of its making follows
from that; so each record that arrives is compared whole, field by field, with what the grant lets through: the tail
number as a stable pseudonym, `hour` and `minute` dropped. Every `WITHHELD_EACH`th record has no tail number to
pseudonymize, and must not arrive at all: the transform fails closed.

Pure: clocks are read by the callers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from cli.benchmark.accounting import Made
from felix.batch import Record

PSEUDONYMIZED: Final = "tailnum"
DROPPED: Final = ("hour", "minute")
WITHHELD_EACH: Final = 250
TAILS: Final = 4_044
"""Aircraft; as many as left New York City in 2013."""
_CARRIERS: Final = ("UA", "AA", "B6", "DL", "EV", "MQ", "US", "WN")
_ORIGINS: Final = ("EWR", "LGA", "JFK")
_DESTINATIONS: Final = (
    "IAH",
    "MIA",
    "BQN",
    "ATL",
    "ORD",
    "FLL",
    "IAD",
    "MCO",
    "PBI",
    "TPA",
    "LAX",
    "SFO",
    "BOS",
)


class Departure(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The payload, as JSON: some 340 bytes at the source."""

    flight: int
    made_ns: int
    """this machine's monotonic clock"""
    year: int
    month: int
    day: int
    dep_time: int
    sched_dep_time: int
    dep_delay: int
    arr_time: int
    sched_arr_time: int
    arr_delay: int
    carrier: str
    origin: str
    dest: str
    air_time: int
    distance: int
    time_hour: str
    tailnum: str = ""
    hour: int = -1
    minute: int = -1


def departure(sequence: int, made_ns: int) -> Departure:
    """The departure with this number, as it is at the source."""
    month, day, hour = 1 + sequence % 12, 1 + sequence % 28, 5 + sequence % 18
    return Departure(
        sequence,
        made_ns,
        2013,
        month,
        day,
        517 + sequence % 1_000,
        515 + sequence % 1_000,
        sequence % 90 - 10,
        830 + sequence % 900,
        819 + sequence % 900,
        sequence % 70 - 20,
        _CARRIERS[sequence % len(_CARRIERS)],
        _ORIGINS[sequence % len(_ORIGINS)],
        _DESTINATIONS[sequence % len(_DESTINATIONS)],
        60 + sequence % 400,
        200 + sequence % 2_400,
        f"2013-{month:02}-{day:02}T{hour:02}:00:00Z",
        "" if is_withheld(sequence) else tail_number(sequence),
        hour,
        sequence % 60,
    )


def is_withheld(sequence: int) -> bool:
    """True where the record has nothing to pseudonymize and must stay."""
    return sequence % WITHHELD_EACH == WITHHELD_EACH - 1


def withheld_below(sequence: int) -> int:
    """How many of the records [0, sequence) must stay."""
    return sequence // WITHHELD_EACH


def tail_number(sequence: int) -> str:
    """The aircraft's tail number at the source."""
    return f"N{10_000 + sequence * 7 % TAILS}UA"


def payloads_of(made: Made) -> list[bytes]:
    """The payloads of a batch."""
    encode = msgspec.json.encode
    return [
        encode(departure(sequence, made.made_ns)) for sequence in range(made.first, made.first + made.records)
    ]


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """What arrived, in records, and what was wrong with it."""

    delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    damaged: int = 0
    """not what the grant's transform makes of the record, or made at another time"""
    leaked: int = 0
    """with its tail number as it was, or a dropped field; or a record that had to stay"""
    misplaced: int = 0
    """delivered with another offset than its place among those that crossed"""

    @property
    def is_clean(self) -> bool:
        return not (
            self.lost or self.duplicated or self.reordered or self.damaged or self.leaked or self.misplaced
        )


class _ShardTally:
    """One shard, as far as it arrived."""

    __slots__ = ("expected", "firsts", "made", "missing", "received")

    def __init__(self) -> None:
        self.made: list[Made] = []
        self.firsts: list[int] = []
        self.expected = 0
        self.received = 0
        self.missing: set[int] = set()


class DepartureLedger:
    """The books of the destination: `publish` what was made, `receive` every record as delivered, then `close`."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(Departure).decode
        self._tallies: dict[int, _ShardTally] = {}
        self._pseudonyms: dict[str, str] = {}
        self._tails: dict[str, str] = {}
        self._duplicated = self._reordered = self._damaged = self._leaked = self._misplaced = 0

    def _tally(self, shard: int) -> _ShardTally:
        return self._tallies.setdefault(shard, _ShardTally())

    def publish(self, batches: Iterable[Made]) -> None:
        """Batches that were acknowledged, in the order of their sequence numbers."""
        for made in batches:
            tally = self._tally(made.shard)
            tally.made.append(made)
            tally.firsts.append(made.first)

    def receive(self, shard: int, records: Iterable[Record]) -> None:
        """Records of one shard of the destination."""
        tally = self._tally(shard)
        for record in records:
            if record.offset != tally.received:
                self._misplaced += 1
            tally.received += 1
            try:
                arrived = self._decode(record.payload)
            except msgspec.MsgspecError:
                self._damaged += 1
                continue
            self._take(tally, arrived)

    def _take(self, tally: _ShardTally, arrived: Departure) -> None:
        sequence = arrived.flight
        batch = bisect_right(tally.firsts, sequence) - 1
        if batch < 0 or sequence >= tally.made[batch].first + tally.made[batch].records:
            self._damaged += 1
            return
        source = departure(sequence, tally.made[batch].made_ns)
        if is_withheld(sequence) or arrived.tailnum == source.tailnum or arrived.hour + arrived.minute != -2:
            self._leaked += 1
            return
        wanted = msgspec.structs.replace(source, tailnum=arrived.tailnum, hour=-1, minute=-1)
        pseudonym = self._pseudonyms.setdefault(source.tailnum, arrived.tailnum)
        tail = self._tails.setdefault(arrived.tailnum, source.tailnum)
        if arrived != wanted or pseudonym != arrived.tailnum or tail != source.tailnum:
            self._damaged += 1
        self._in_turn(tally, sequence)

    def _in_turn(self, tally: _ShardTally, sequence: int) -> None:
        if sequence >= tally.expected:
            tally.missing.update(each for each in range(tally.expected, sequence) if not is_withheld(each))
            tally.expected = sequence + 1
        elif sequence in tally.missing:
            tally.missing.remove(sequence)
            self._reordered += 1
        else:
            self._duplicated += 1

    def close(self) -> Arrivals:
        """How the books stand; may be asked again after more."""
        lost = 0
        for tally in self._tallies.values():
            end = tally.made[-1].first + tally.made[-1].records if tally.made else 0
            lost += len(tally.missing) + sum(not is_withheld(each) for each in range(tally.expected, end))
        return Arrivals(
            delivered=sum(tally.received for tally in self._tallies.values()),
            lost=lost,
            duplicated=self._duplicated,
            reordered=self._reordered,
            damaged=self._damaged,
            leaked=self._leaked,
            misplaced=self._misplaced,
        )


def crossing_of(batches: Sequence[Made]) -> dict[int, int]:
    """How many records of these batches must cross, by shard."""
    found: dict[int, int] = {}
    for made in batches:
        end = made.first + made.records
        found[made.shard] = (
            found.get(made.shard, 0) + made.records - (withheld_below(end) - withheld_below(made.first))
        )
    return found
