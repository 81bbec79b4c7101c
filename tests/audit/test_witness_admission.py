"""Who gets a connection to a witness, where strangers want all of them."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from audit.witness_admission import Admission, Limits, parse_clients
from felix.errors import RequestError

LIMITS = Limits(512, 64, 64)


class Door:
    """Numbers connections, and holds what an admission says."""

    def __init__(self, limits: Limits = LIMITS, *clients: str) -> None:
        self.admission: Admission[int] = Admission(limits, parse_clients(clients))
        self.open: dict[int, str] = {}
        self._next = 0

    def connect(self, address: str) -> int | None:
        admitted = self.admission.admit(address)
        if not admitted.is_taken:
            assert admitted.evicted is None
            return None
        if admitted.evicted is not None:
            del self.open[admitted.evicted]
        self._next += 1
        self.admission.add(self._next, address)
        self.open[self._next] = address
        return self._next

    def close(self, connection: int) -> None:
        self.admission.remove(connection)
        self.admission.remove(connection)
        del self.open[connection]


def test_of_ipv6_a_stranger_is_whoever_has_a_64() -> None:
    door = Door()
    taken = [door.connect(f"2001:db8::{at:x}") for at in range(200)]
    assert sum(each is not None for each in taken) == 64
    assert door.connect("2001:db8:0:1::1") is not None, "the next /64"
    assert door.connect("::ffff:192.0.2.1") is not None
    for _ in range(63):
        door.connect("192.0.2.1")
    assert door.connect("::ffff:192.0.2.1") is None, "an IPv4 address, however it is written"
    for _ in range(64):
        door.connect("fe80::1%eth0")
    assert door.connect("fe80::2%eth1") is None


@pytest.mark.parametrize(
    "strangers",
    [
        [f"198.51.100.{at % 8}" for at in range(512)],
        [f"2001:db8:0:{at % 8:x}::1" for at in range(512)],
        [f"10.0.{at % 8}.1" for at in range(512)],
        [f"10.{at // 256}.{at % 256}.1" for at in range(512)],
    ],
    ids=["eight of one /24", "eight of one /48", "eight networks", "512 networks"],
)
def test_who_has_all_of_them_loses_the_oldest_to_who_has_none(strangers: list[str]) -> None:
    door = Door()
    assert all(door.connect(each) is not None for each in strangers)
    held = door.connect("203.0.113.7")
    assert held is not None and len(door.open) == 512 and 1 not in door.open
    # They come again at once, as often as they like: those that have most among them change places.
    for each in strangers[:500]:
        door.connect(each)
    assert held in door.open and len(door.open) == 512


def test_of_those_who_have_as_many_as_anybody_none_takes_anothers_place() -> None:
    door = Door(Limits(6, 4, 0))
    assert [door.connect(each) for each in ("192.0.2.1", "192.0.2.2", "192.0.2.3") * 2] == [1, 2, 3, 4, 5, 6]
    assert door.connect("192.0.2.9") is None, "of the network that has them all"
    assert door.connect("203.0.113.1") == 7 and 1 not in door.open
    door.close(7)
    assert door.connect("192.0.2.9") == 8


def test_clients_that_the_operator_names_get_in_and_stay_in() -> None:
    door = Door(LIMITS, "203.0.113.0/24", "2001:db8:ffff::/48")
    for at in range(2000):
        door.connect(f"10.{at % 250}.{at // 250}.1")
    assert len(door.open) == 512 - 64, "strangers leave the reserve alone"
    clients = [door.connect(f"203.0.113.{at % 3}") for at in range(300)]
    assert all(clients) and len(door.open) == 512, "not bound to the reserve, nor to one address's share"
    assert door.connect("2001:db8:ffff::1") is not None
    for at in range(2000):
        door.connect(f"10.{at % 250}.9.1")
    assert set(clients) <= set(door.open)
    for each in [each for each, address in door.open.items() if not address.startswith("10.")]:
        door.close(each)
    assert all(door.connect("203.0.113.1") for _ in range(512)) and door.connect("203.0.113.1") is None
    assert door.connect("10.0.0.1") is None


def test_what_is_over_is_not_counted_any_more() -> None:
    door = Door(Limits(4, 2, 1), "203.0.113.1")
    for _ in range(1000):
        first, second = door.connect("192.0.2.1"), door.connect("203.0.113.1")
        assert first is not None and second is not None
        door.close(first)
        door.close(second)
    assert not door.admission._ones and not door.admission._wides and not door.admission._peers


def test_what_is_no_network_is_refused() -> None:
    assert parse_clients(["192.0.2.1", "2001:db8::/32"]) == (
        ip_network("192.0.2.1/32"),
        ip_network("2001:db8::/32"),
    )
    for wrong in ("", "witness.example", "192.0.2.1/24", "192.0.2.0/33"):
        with pytest.raises(RequestError, match="no address and no network"):
            parse_clients([wrong])
