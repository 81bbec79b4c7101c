"""Records of a cluster go to the store and back; what nobody may write there is refused with the key's name."""

from __future__ import annotations

import json

import msgspec
import pytest

from felix.errors import CorruptionError, RequestError
from region.cluster.records import (
    BrokerRecord,
    ClusterKeys,
    ControllerRecord,
    FrozenRecord,
    Health,
    NodeRecord,
    PulseRecord,
    ShardId,
    ShardRecord,
    Yielded,
    decode_broker,
    decode_controller,
    decode_frozen,
    decode_node,
    decode_pulse,
    decode_shard,
    encode,
)

KEYS = ClusterKeys("us-east")
FOLDER = "0f" * 16
SHARD = ShardRecord(
    stream="acme/payments/orders",
    epoch=7,
    election="00ff00ff00ff00ff",
    leader="b1",
    replicas=("b1", "b2", "b3"),
    isr={"b1": 4},
    elr={"b2": 9},
    min=2,
)
NODE = NodeRecord(folder=FOLDER, registration=5, boot="b", whole_since=1, kept_since=3, host="h1")
BROKER = BrokerRecord(
    registration=5, folder=FOLDER, host="h1", client_address="h1:7443", peer_address="h1:7443"
)
KEY = KEYS.shard(ShardId("ab" * 16, 3))


@pytest.mark.parametrize(
    ("record", "decoded"),
    [
        (SHARD, decode_shard),
        (msgspec.structs.replace(SHARD, yielded=Yielded(7, "failed"), leader="b2"), decode_shard),
        (msgspec.structs.replace(SHARD, leader="", target=("b4",), isr={"b4": 1}), decode_shard),
        (NODE, decode_node),
        (msgspec.structs.replace(BROKER, health=Health(open=True, reaches=("b2",))), decode_broker),
        (PulseRecord(0), decode_pulse),
        (ControllerRecord("b1", 5), decode_controller),
        (FrozenRecord("b1", "epoch 7 is back"), decode_frozen),
    ],
)
def test_a_record_comes_back_as_it_was_written_and_unknown_fields_are_passed_over(record, decoded) -> None:  # type: ignore[no-untyped-def]
    value = encode(record, KEY)
    assert decoded(value, KEY) == record
    later = json.dumps(json.loads(value) | {"of_a_later_version": [1]}).encode()
    assert decoded(later, KEY) == record


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"stream": "orders"}, "three parts"),
        ({"epoch": 0}, "its epoch is 0"),
        ({"epoch": 1 << 32}, "its epoch is 4294967296"),
        ({"unclean": 8}, "unclean one 8"),
        ({"yielded": Yielded(8, "drain")}, "epoch 8 has been yielded"),
        ({"election": "0"}, "election id"),
        ({"election": "00FF00FF00FF00FF"}, "election id"),
        ({"replicas": ()}, "no replicas"),
        ({"replicas": ("b1", "b2", "b1")}, "all different"),
        ({"replicas": tuple(f"b{n}" for n in range(8))}, "8 replicas"),
        ({"replicas": ("b1", "b2", "B_3")}, "no broker's id"),
        ({"isr": {"b1": 0}}, "b1 is 0"),
        ({"isr": {"b1": 4, "b4": 1}}, "b4 of isr"),
        ({"failed": {"b4": 1}}, "b4 of failed"),
        ({"elr": {"b1": 4}}, "in common"),
        ({"min": 0}, "min is 0"),
        ({"min": 1}, "although isr has 1"),
        ({"leader": "b2"}, "leader b2 is not in isr"),
        ({"leader": "b2", "yielded": Yielded(6, "drain")}, "leader b2 is not in isr"),
    ],
)
def test_a_shard_that_nobody_may_have_written_is_refused_by_reader_and_writer(
    changed: dict[str, object], why: str
) -> None:
    record = msgspec.structs.replace(SHARD, **changed)
    for refused in (
        lambda: encode(record, KEY),
        lambda: decode_shard(msgspec.json.encode(record), KEY),
    ):
        with pytest.raises(CorruptionError) as caught:
            refused()
        assert KEY in caught.value.sentence and why in caught.value.sentence


@pytest.mark.parametrize(
    "changed",
    [
        {"folder": "0"},
        {"registration": 2},
        {"whole_since": 4},
        {"whole_since": 0},
        {"clean": 6},
        {"host": "h" * 300},
    ],
)
def test_a_node_that_nobody_may_have_written_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CorruptionError):
        encode(msgspec.structs.replace(NODE, **changed), KEYS.node("b1"))


def test_what_is_no_json_or_of_another_kind_is_refused() -> None:
    for value in (b"", b"{}", b"[]", b"\xff", b'{"epoch": "7"}'):
        with pytest.raises(CorruptionError):
            decode_shard(value, KEY)


def test_keys_name_their_shard_and_broker() -> None:
    assert KEY.endswith("us-east/shards/" + "ab" * 16 + "/003")
    assert KEYS.shard_of(KEY) == ShardId("ab" * 16, 3)
    assert KEYS.node("b1") == "/felix/1/us-east/nodes/b1" and KEYS.broker_of(KEYS.broker("b1")) == "b1"
    for shard in (ShardId("ab", 3), ShardId("ab" * 16, 256), ShardId("ab" * 16, -1)):
        with pytest.raises(RequestError):
            KEYS.shard(shard)
    for key in (KEYS.node("b1"), KEY + "1", KEY[:-3] + "256"):
        with pytest.raises(CorruptionError):
            KEYS.shard_of(key)
