"""What each of several brokers may let through of one limit: its share, by what all of them want.

Each broker tells the others once a second what is used there of each limit, and takes its own share from what all told; nobody asks anybody
before a use. Shares of the same told values add up to 1. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Annotated, Final

import msgspec

from felix.messages import ClientId
from felix.quota import Scope

ACCOUNTS_TOLD_MAX: Final = 2_000
"""Tenants and identities that one broker tells of, who wait first. Of more than that, the last ones count as unused there."""
NAME_CHARS_MAX: Final = 512
"""Of an identity's SPIFFE id."""
FLOOR_PARTS: Final = 20
"""What nobody uses keeps a twentieth of an even share, so that who begins there is slow for two turns, and does not stand."""
HEADROOM: Final = 1.25
"""Who does not wait wants a quarter more than it uses, so that it may grow."""
CLIENTS_TOLD_MAX: Final = 20_000
"""Clients that one broker names, over all accounts: some 200 KB. Of accounts beyond that, which have more clients than the others, each session
counts, as of clients without an id."""
SILENT_S: Final = 3.0
"""A broker that is alive and was not heard for so long may have its even share, or more: everybody goes back to that."""

Key = tuple[Scope, str]


class Use(msgspec.Struct, frozen=True, array_like=True):
    """Of one tenant or identity at one broker: what it uses of limited rates, each second, `inf` where it waits for more; and what it holds of
    limited counts. `clients`: the ids of those whose sessions it holds, where they are limited and not too many: who has sessions at several brokers is one
    client."""

    scope: Scope
    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
    rates: dict[str, float]
    held: dict[str, int]
    clients: list[ClientId] = []


class Told(msgspec.Struct, frozen=True):
    """What a broker said last, and when (seconds of the hearer's clock)."""

    uses: Mapping[Key, Use]
    at: float


def fair_shares(wants: Sequence[float]) -> list[float]:
    """Parts of 1, by what each wants, in parts of the limit: whoever wants less gets it, the others as much as each other, nobody less than the floor;
    what is left is for all."""
    count = len(wants)
    floor = 1 / (FLOOR_PARTS * count)
    shares, left = [floor] * count, 1 - floor * count
    wanting = sorted((want, number) for number, want in enumerate(wants) if want > floor)
    for place, (want, number) in enumerate(wanting):
        gets = min(want - floor, left / (len(wanting) - place))
        shares[number] += gets
        left -= gets
    return [share + left / count for share in shares]


class Region:
    """What a broker knows of the others. `own`: its id."""

    def __init__(self, own: str) -> None:
        self.own = own
        self._told: dict[str, Told] = {}
        self._brokers: list[str] = [own]
        self._is_heard = True

    def hear(self, broker: str, uses: Iterable[Use], now: float) -> None:
        """What a broker says of itself."""
        self._told[broker] = Told({(use.scope, use.name): use for use in uses}, now)

    def look(self, alive: Collection[str], now: float) -> None:
        """Which brokers serve, and whether all of them were heard."""
        self._brokers = sorted({self.own, *alive})
        self._told = {broker: told for broker, told in self._told.items() if broker in self._brokers}
        self._is_heard = all(
            broker in self._told and now - self._told[broker].at < SILENT_S
            for broker in self._brokers
            if broker != self.own
        )

    @property
    def even_share(self) -> float:
        """Where nobody wants more than another, or not all are heard."""
        return 1 / len(self._brokers)

    def is_even(self, key: Key) -> bool:
        """Whether nobody, this broker among them, told of a use."""
        return not any(key in told.uses for told in self._told.values())

    def share(self, key: Key, rate: str, limit: int) -> float:
        """This broker's part of a rate."""
        if not self._is_heard or self.is_even(key):
            return self.even_share
        wants = []
        for broker in self._brokers:
            told = self._told.get(broker)
            use = None if told is None else told.uses.get(key)
            used = 0.0 if use is None else use.rates.get(rate, 0.0)
            wants.append(used if used == inf else HEADROOM * used / limit)
        return fair_shares(wants)[self._brokers.index(self.own)]

    def elsewhere(self, key: Key) -> dict[str, int]:
        """What the other brokers hold, as they said last; of sessions those that are beyond one of each client that they name (`clients_elsewhere`)."""
        found: dict[str, int] = {}
        for broker, told in self._told.items():
            if broker != self.own and (use := told.uses.get(key)) is not None:
                for what, amount in use.held.items():
                    named = len(set(use.clients)) if what == "sessions" else 0
                    found[what] = found.get(what, 0) + max(0, amount - named)
        return found

    def clients_elsewhere(self, key: Key) -> frozenset[bytes]:
        """The clients that have sessions at the other brokers, as far as those name them."""
        return frozenset(
            client
            for broker, told in self._told.items()
            if broker != self.own and (use := told.uses.get(key)) is not None
            for client in use.clients
        )

    def rates_elsewhere(self, key: Key) -> dict[str, float]:
        """What passes each second at the others, as far as they do not wait."""
        found: dict[str, float] = {}
        for broker, told in self._told.items():
            if broker != self.own and (use := told.uses.get(key)) is not None:
                for rate, used in use.rates.items():
                    if used != inf:
                        found[rate] = found.get(rate, 0.0) + used
        return found
