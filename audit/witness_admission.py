"""Who gets a connection to a witness, where strangers want them all. Pure. Caller: audit.witness_server.

- One address has `of_one` at most; of IPv6 a /64 counts as one, since whoever has an address there has 2^64 of them.
- Where all are taken, who has fewer than the network that has the most takes the oldest one of that. A network is an IPv4 /24, or an IPv6 /48. So who has
  one connection, and needs it for as long as a request takes, has it for as long as as many newer ones come from other networks as there are connections.
- The operator's clients, by address or network, have a reserve that strangers do not get, no bound for one address, and lose no connection to anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Generic, NamedTuple, TypeVar

from felix.errors import Code, RequestError

Network = IPv4Network | IPv6Network

ONE_PREFIX: Final = {4: 32, 6: 64}
"""By IP version: what one stranger has, at the least"""
WIDE_PREFIX: Final = {4: 24, 6: 48}
"""and what he may well have."""

T = TypeVar("T", bound=Hashable)


class Limits(NamedTuple):
    """Connections: in all, of one address or /64, and of all those the ones that are kept for the operator's clients, where he names any."""

    all: int
    of_one: int
    reserved: int


class _Peer(NamedTuple):
    one: str
    wide: str
    is_client: bool


class Admitted(NamedTuple, Generic[T]):
    """Whether a connection is taken, and another one that ends for it."""

    is_taken: bool
    evicted: T | None = None


class Admission(Generic[T]):
    """The connections that there are: `admit`, and `add` what was admitted; `remove` once it is over."""

    def __init__(self, limits: Limits, clients: Sequence[Network] = ()) -> None:
        self._clients = tuple(clients)
        self._all, self._of_one = limits.all, limits.of_one
        self._of_strangers = max(1, limits.all - limits.reserved) if clients else limits.all
        self._peers: dict[T, _Peer] = {}
        """the oldest first"""
        self._ones: Counter[str] = Counter()
        self._wides: Counter[str] = Counter()
        """of strangers alone, both"""

    def admit(self, address: str) -> Admitted[T]:
        """Whether a connection from this address is taken. What ends for it is removed already."""
        peer = self._peer(address)
        if not peer.is_client and self._ones[peer.one] >= self._of_one:
            return Admitted(False)
        strangers = self._wides.total()
        if len(self._peers) < self._all and (peer.is_client or strangers < self._of_strangers):
            return Admitted(True)
        most = max(self._wides, key=self._wides.__getitem__, default="")
        if not strangers or (not peer.is_client and self._wides[peer.wide] >= self._wides[most]):
            return Admitted(False)
        oldest = next(each for each, of in self._peers.items() if not of.is_client and of.wide == most)
        self.remove(oldest)
        return Admitted(True, oldest)

    def add(self, connection: T, address: str) -> None:
        """It was admitted."""
        peer = self._peers[connection] = self._peer(address)
        if not peer.is_client:
            self._ones[peer.one] += 1
            self._wides[peer.wide] += 1

    def remove(self, connection: T) -> None:
        """It is over. Safe to call twice."""
        peer = self._peers.pop(connection, None)
        if peer is None or peer.is_client:
            return
        for counted, key in ((self._ones, peer.one), (self._wides, peer.wide)):
            counted[key] -= 1
            if not counted[key]:
                del counted[key]

    def _peer(self, text: str) -> _Peer:
        try:
            # A zone names an interface of this machine, and is no part of whose address it is.
            address = ip_address(text.partition("%")[0])
        except ValueError:
            return _Peer(text, text, False)
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        one, wide = (
            str(ip_network((address, prefix[address.version]), strict=False))
            for prefix in (ONE_PREFIX, WIDE_PREFIX)
        )
        return _Peer(one, wide, any(address in client for client in self._clients))


def parse_clients(texts: Sequence[str]) -> tuple[Network, ...]:
    """Addresses and networks of an operator's clients. Raises RequestError(CONFIG_INVALID)."""
    found = list[Network]()
    for text in texts:
        try:
            found.append(ip_network(text))
        except ValueError as error:
            raise RequestError(
                f"{text[:120]!r} is no address and no network: {error}.", code=Code.CONFIG_INVALID
            ) from error
    return tuple(found)
