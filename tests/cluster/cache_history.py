"""What clients of a cache were told, held against one register for each key: get and compare-and-set are linearizable.

A version says where its write stands in the key's order, so the order is not searched for: writes stand by their versions, each get behind the write
that it found. What is left to ask is whether that order is one of the calls' times. Values are written once, by one call.
Every rule has a name, and tests/cluster/test_cache_history.py has histories for each that it must refuse.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, islice
from typing import Final, NamedTuple

import felix
from felix import FelixError

SHOWN_MAX: Final = 3
ABSENT: Final = (0, b"")
"""Version and value of a key that is not there."""


class Got(NamedTuple):
    """A get: from `at` to `until`."""

    key: str
    at: float
    until: float
    version: int
    value: bytes


class Swap(NamedTuple):
    """A compare-and-set of `expected` by `value`. `version`: what it was answered; None: the key has another version; `until` of one whose answer never
    came is infinite, and its version 0."""

    key: str
    at: float
    until: float
    expected: int
    value: bytes
    version: int | None

    @property
    def is_unknown(self) -> bool:
        return self.until == math.inf


class CacheHistory:
    """Of one cache in which nothing is deleted, nor expires."""

    def __init__(self) -> None:
        self.got: list[Got] = []
        self.swaps: list[Swap] = []

    @property
    def stored(self) -> int:
        """How many swaps were answered as stored."""
        return sum(bool(each.version) for each in self.swaps)

    def check(self) -> None:
        """Raises AssertionError with every rule that was broken, by its name."""
        broken = []
        for key in sorted({each.key for each in (*self.got, *self.swaps)}):
            one = Register(
                [each for each in self.got if each.key == key],
                [each for each in self.swaps if each.key == key],
            )
            broken += [
                f"{name}: {key}: {what}"
                for name, rule in RULES.items()
                for what in islice(rule(one), SHOWN_MAX)
            ]
        assert not broken, "\n".join(broken)


class Register:
    """One key."""

    def __init__(self, got: Sequence[Got], swaps: Sequence[Swap]) -> None:
        self.got, self.swaps = got, swaps
        self.by_value = {each.value: each for each in swaps}
        self.values: dict[int, set[bytes]] = defaultdict(set, {0: {b""}})
        """by version, what stood under it as somebody was told"""
        self.writes: dict[int, Swap] = {}
        """by version, also of those whose answer never came and that were found"""
        for swap in swaps:
            if swap.version:
                self.values[swap.version].add(swap.value)
                self.writes[swap.version] = swap
        for get in got:
            self.values[get.version].add(get.value)
            if get.value in self.by_value:
                self.writes.setdefault(get.version, self.by_value[get.value])

    def timed(self) -> list[tuple[float, float, int, bool]]:
        """Of each call that says where in the order it stands: from, until, version, whether it wrote that one."""
        return [(each.at, each.until, each.version, False) for each in self.got] + [
            (each.at, each.until, version, True) for version, each in self.writes.items()
        ]


def invented(one: Register) -> Iterator[str]:
    for get in one.got:
        if (get.version, get.value) == ABSENT:
            continue
        swap = one.by_value.get(get.value)
        if swap is None:
            yield f"{get.value!r} was found, and nobody wrote it"
        elif swap.version is None:
            yield f"{get.value!r} was found, and it was refused"


def two_values(one: Register) -> Iterator[str]:
    for version, values in one.values.items():
        if len(values) > 1:
            yield f"version {version} is {sorted(values)}"


def written_twice(one: Register) -> Iterator[str]:
    seen: dict[bytes, int] = {}
    for version, values in sorted(one.values.items()):
        for value in values:
            if seen.setdefault(value, version) != version:
                yield f"{value!r} stands under {seen[value]} and {version}"


def forked(one: Register) -> Iterator[str]:
    """Of those that were compared with one version, one alone is stored."""
    over: dict[int, int] = {}
    for version, swap in sorted(one.writes.items()):
        if over.setdefault(swap.expected, version) != version:
            yield f"{over[swap.expected]} and {version} were both stored over {swap.expected}"


def not_compared(one: Register) -> Iterator[str]:
    """What was stored stands right behind what it was compared with."""
    known = [0, *sorted(one.writes)]
    for version, swap in one.writes.items():
        before = known[bisect_left(known, version) - 1]
        if swap.expected != before and swap.expected in one.values:
            yield f"{version} was stored over {swap.expected}, and {before} stood there"
        elif swap.expected >= version:
            yield f"{version} was stored over {swap.expected}"


def goes_back(one: Register) -> Iterator[str]:
    """What begins after another call's answer stands where that one does or behind it, and a write behind it."""
    ended = sorted((until, version) for _, until, version, _ in one.timed())
    times = [until for until, _ in ended]
    newest = list(accumulate((version for _, version in ended), max))
    for at, _, version, wrote in one.timed():
        index = bisect_left(times, at)
        if index and (version < newest[index - 1] or (wrote and version == newest[index - 1])):
            yield f"{'wrote' if wrote else 'found'} version {version} from {at} on, and {newest[index - 1]} was told before"


def refused_in_vain(one: Register) -> Iterator[str]:
    """A compare-and-set is refused only if the key had another version at some time meanwhile."""
    told = {0: -math.inf}
    """by version, when it was first surely there"""
    for _, until, version, _ in one.timed():
        told[version] = min(until, told.get(version, math.inf))
    versions = sorted(one.writes)
    begun = [*accumulate((one.writes[version].at for version in reversed(versions)), min)][::-1]
    """when the first of the writes from here on began"""
    unknown = min((each.at for each in one.swaps if each.is_unknown), default=math.inf)
    for swap in one.swaps:
        if swap.version is not None or told.get(swap.expected, math.inf) >= swap.at:
            continue
        later = bisect_right(versions, swap.expected)
        if min(unknown, begun[later] if later < len(begun) else math.inf) >= swap.until:
            yield f"{swap.value!r} was refused over {swap.expected}, and nothing else stood there by {swap.until}"


Rule = Callable[[Register], Iterator[str]]
RULES: Final[dict[str, Rule]] = {
    "invented": invented,
    "two values": two_values,
    "written twice": written_twice,
    "forked": forked,
    "not compared": not_compared,
    "goes back": goes_back,
    "refused in vain": refused_in_vain,
}


async def contend(
    cache: felix.Cache, name: str, keys: Sequence[str], history: CacheHistory, pause_s: float = 0.002
) -> None:
    """Get a key and swap what was found, for ever, and note it."""
    number = 0
    while True:
        number += 1
        key, value = keys[number % len(keys)], f"{name}/{number}".encode()
        try:
            version = await get(cache, key, history)
        except FelixError:
            await asyncio.sleep(pause_s)
            continue
        at, place = time.monotonic(), len(history.swaps)
        # Noted before it is known what comes of it: whoever cancels this asks for nothing any more.
        history.swaps.append(Swap(key, at, math.inf, version, value, 0))
        with suppress(FelixError):
            stored = await cache.compare_and_set(key, value, version=version)
            history.swaps[place] = Swap(key, at, time.monotonic(), version, value, stored)
        await asyncio.sleep(pause_s)


async def get(cache: felix.Cache, key: str, history: CacheHistory) -> int:
    """Note what is found; its version."""
    at = time.monotonic()
    entry = await cache.get(key)
    version, value = ABSENT if entry is None else (entry.version, bytes(entry.value))
    history.got.append(Got(key, at, time.monotonic(), version, value))
    return version
