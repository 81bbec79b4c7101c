"""`cluster:` in region.yaml: what it may say, and what one broker of it goes by."""

from __future__ import annotations

import pytest

from felix.address import Address
from felix.errors import Code, RequestError
from policy.documents import decode_document
from region.config import RegionConfig

HEAD = "region: us-east\nmesh: acme\ncountry: US\n"
ETCD = "metadata: {kind: etcd, endpoints: [127.0.0.1:2379]}\n"
TWO = """cluster:
  brokers:
    - {id: b1, listen: 127.0.0.1:7443, health: 127.0.0.1:8080}
    - {id: b2, listen: "0.0.0.0:7443", address: broker2.example:7443}
"""


def config(text: str) -> RegionConfig:
    return decode_document(HEAD + text, RegionConfig, "region.yaml")


def test_each_broker_has_an_address_and_a_data_folder_of_its_own() -> None:
    first, second = (config(ETCD + TWO).of_broker(name) for name in ("b1", "b2"))
    assert (first.listen, first.health, first.data) == (
        Address("127.0.0.1", 7443), Address("127.0.0.1", 8080), "data/b1",
    )  # fmt: skip
    assert (second.broker, second.health, second.data) == ("b2", None, "data/b2")
    assert config(ETCD + TWO).data_folders == ("data/b1", "data/b2") and config("").data_folders == ("data",)
    assert second.own_place is not None
    assert second.own_place.client_address == Address("broker2.example", 7443)


def test_a_region_without_cluster_has_one_broker() -> None:
    found = config("")
    assert found.cluster is None and found.own_place is None and found.data == "data"
    with pytest.raises(RequestError) as told:
        found.of_broker("b1")
    assert told.value.code is Code.NOT_FOUND


def test_a_broker_that_is_not_named_is_none() -> None:
    with pytest.raises(RequestError, match="has no broker b9"):
        config(ETCD + TWO).of_broker("b9")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TWO, "share their metadata in etcd"),
        (ETCD + "broker: b9\n" + TWO, "no such id"),
        (ETCD + TWO.replace("id: b2", "id: b1"), "Two brokers have the id b1"),
        (ETCD + TWO.replace("broker2.example", "127.0.0.1"), "Two brokers have the address"),
        (ETCD + TWO.replace("127.0.0.1:7443", '"127.0.0.1:0"'), "port 0"),
        (ETCD + TWO + "  lease: 500ms\n", "lease is 500"),
        (ETCD + TWO + "  lease: 2h\n", "lease is"),
        (ETCD + "cluster: {brokers: []}\n", "brokers"),
    ],
)
def test_what_would_not_work_is_refused_with_what_to_change(text: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as told:
        config(text)
    assert told.value.code is Code.CONFIG_INVALID
