"""Offsets of a stream as Spark keeps and splits them.

Pure. A *bound* is what an option says (earliest, latest, or offsets by shard); *positions* are offsets by shard, resolved
against a stream as it is; an *offset* in Spark's sense is the positions of all shards together with the incarnation that
they count in: that is what stands in a query's checkpoint, as JSON::

    {"incarnation": "9f0c…", "shards": {"0": 120, "1": 97}}

Invariants:

- a range is [first, end) of one shard. It bounds offsets, not records: compaction leaves holes;
- the same start, end and wish for partitions give the same ranges in the same order, so that a batch that is repeated
  after a restart is cut as it was the first time;
- positions of another incarnation are never compared with these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

from felix.errors import Code, RequestError
from felix.messages import StreamState

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

Word = Literal["earliest", "latest"]
Bound = str | Mapping[int, int | str]
"""`earliest`, `latest`, or one of them or an offset for every shard."""
Positions = Mapping[int, int]


class Range(NamedTuple):
    """Offsets [first, end) of a shard."""

    shard: int
    first: int
    end: int


class Offset(NamedTuple):
    """Where a query stands: the offset that comes next, by shard, in one incarnation of the stream (hex)."""

    incarnation: str
    shards: Positions

    def json(self) -> dict[str, Any]:
        """For Spark's checkpoint. Shards in order, since Spark compares offsets as text."""
        return {
            "incarnation": self.incarnation,
            "shards": {str(shard): self.shards[shard] for shard in sorted(self.shards)},
        }

    @classmethod
    def of_json(cls, held: Any) -> Offset:
        """Raises RequestError where it is not an offset of this data source."""
        try:
            incarnation, shards = held["incarnation"], held["shards"]
            bytes.fromhex(incarnation)
            positions = {int(shard): next_offset for shard, next_offset in shards.items()}
            if not positions or any(type(each) is not int or each < 0 for each in positions.values()):
                raise ValueError(held)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RequestError(
                f"The checkpoint holds {str(held)[:200]!r}, which is no offset of a Felix stream.",
                hint="Was this checkpoint written by a query over another source? Give this query one of its own.",
            ) from error
        return cls(incarnation, positions)


def bound_of(value: Any) -> Bound:
    """A bound from JSON: a shard's number to an offset, `earliest` or `latest`. Raises ValueError."""
    if not isinstance(value, dict) or not value:
        raise ValueError("not a map of shards")
    bound: dict[int, int | str] = {}
    for shard, place in value.items():
        if not (shard.isascii() and shard.isdecimal()):
            raise ValueError(f"{shard!r} is not a shard")
        if place not in (EARLIEST, LATEST) and (type(place) is not int or place < 0):
            raise ValueError(f"{place!r} is not an offset")
        bound[int(shard)] = place
    return bound


def earliest(state: StreamState) -> dict[int, int]:
    """Where each shard's log begins."""
    return {shard.shard: shard.log_start for shard in state.state}


def latest(state: StreamState) -> dict[int, int]:
    """Where each shard's log ends, for readers."""
    return {shard.shard: shard.high_watermark for shard in state.state}


def resolve(bound: Bound, state: StreamState, option: str) -> dict[int, int]:
    """The positions that a bound means now. Raises RequestError naming the option: shards that are missing or do not
    exist, an offset that is not written yet."""
    first, last = earliest(state), latest(state)
    if isinstance(bound, str):
        return first if bound == EARLIEST else last
    missing, unknown = sorted(set(last) - set(bound)), sorted(set(bound) - set(last))
    if missing or unknown:
        problem = f"says nothing of shard {missing[0]}" if missing else f"names shard {unknown[0]}"
        raise RequestError(
            f"The option {option!r} {problem}; {state.stream} has {len(last)} shards, from 0.",
            code=Code.CONFIG_INVALID,
        )
    positions = {}
    for shard, place in sorted(bound.items()):
        if isinstance(place, str):
            positions[shard] = first[shard] if place == EARLIEST else last[shard]
            continue
        if place > last[shard]:
            raise RequestError(
                f"The option {option!r} names offset {place} of shard {shard}, and {state.stream} is written up to "
                f"{last[shard]} there.",
                code=Code.OFFSET_OUT_OF_RANGE,
            )
        positions[shard] = place
    return positions


def ranges_between(start: Positions, end: Positions) -> list[Range]:
    """What lies between, by shard; shards with nothing between are left out."""
    return [
        Range(shard, start[shard], end[shard])
        for shard in sorted(end)
        if start.get(shard, end[shard]) < end[shard]
    ]


def split(ranges: Sequence[Range], pieces_min: int) -> list[Range]:
    """The ranges, cut so that there are at least `pieces_min` where there are that many offsets, of about one size."""
    total = sum(each.end - each.first for each in ranges)
    if pieces_min <= len(ranges) or not total:
        return list(ranges)
    found: list[Range] = []
    for shard, first, end in ranges:
        size = end - first
        # Rounded up, so that the pieces of all shards are not fewer than asked for.
        pieces = min(size, -(-size * pieces_min // total))
        cuts = [first + size * piece // pieces for piece in range(pieces + 1)]
        found += [Range(shard, a, b) for a, b in pairwise(cuts)]
    return found


def limited(start: Positions, end: Positions, offsets_max: int) -> dict[int, int]:
    """An end at most `offsets_max` offsets behind `start` in all shards together.

    Each shard in which something waits gets one offset, and of the others a share by what waits in it. Where the limit is smaller than
    such shards are many, they take turns: `start` moves on by the limit, and with it who comes first. So no shard is passed over for ever.
    """
    waiting = {shard: end[shard] - start[shard] for shard in sorted(end) if end[shard] > start[shard]}
    total = sum(waiting.values())
    if total <= offsets_max:
        return dict(end)
    if offsets_max < len(waiting):
        first, count = sum(start.values()), max(end) + 1
        turns = sorted(waiting, key=lambda shard: (shard - first) % count)
        shares = dict.fromkeys(turns[:offsets_max], 1)
    else:
        spare, others = offsets_max - len(waiting), total - len(waiting)
        shares = {shard: 1 + (size - 1) * spare // others for shard, size in waiting.items()}
        left = offsets_max - sum(shares.values())
        for shard in sorted(waiting, key=lambda shard: (-waiting[shard], shard)):
            if left and shares[shard] < waiting[shard]:
                shares[shard] += 1
                left -= 1
    return {shard: start[shard] + shares.get(shard, 0) if shard in waiting else end[shard] for shard in end}


def offsets_for_bytes(state: StreamState, start: Positions, end: Positions, bytes_max: int) -> int:
    """About how many offsets between `start` and `end` make `bytes_max` bytes, by the mean size of what each log holds;
    at least 1."""
    waiting = size = 0.0
    for shard in state.state:
        number = max(0, end.get(shard.shard, 0) - start.get(shard.shard, 0))
        held = shard.log_end - shard.log_start
        waiting += number
        size += number * ((shard.size_bytes + shard.store_only_bytes) / held if held > 0 else 0.0)
    return max(1, int(waiting * bytes_max / size)) if size > bytes_max else max(1, int(waiting))
