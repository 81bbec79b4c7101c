"""Handing a data key to a bridge."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from felix.batch import NewRecord, encode_batch
from felix.errors import TamperError
from felix.names import SpiffeId, StreamName
from keys.envelope import BatchSealer, DataKey, open_batch
from keys.errors import KeyScopeError
from keys.handoff import HandoffScope, open_data_key, scope_of, seal_data_key
from keys.hybrid import HybridKeyPair
from keys.key_id import KeyKind, new_key_id

PAIR = HybridKeyPair.generate()
BRIDGE = SpiffeId.parse("spiffe://us-east.acme/bridge/us-to-eu")
KEY = DataKey(
    new_key_id("us-east", KeyKind.DATA, b"r" * 11),
    "us-east",
    StreamName.parse("acme/ops/departures"),
    b"i" * 16,
    0,
    2,
    bytes(range(32)),
)
SCOPE = scope_of(KEY, grant_id="g-1", terms_hash=b"t" * 32, bridge=BRIDGE)


def test_the_bridge_opens_what_the_broker_sealed_and_seals_nothing_itself() -> None:
    batch = encode_batch([NewRecord(b"payload")])
    batch = batch.with_header(msgspec.structs.replace(batch.header, leader_epoch=2))
    sealed_batch = BatchSealer(replace(KEY)).seal(batch)
    key = open_data_key(seal_data_key(KEY, SCOPE, PAIR.public), SCOPE, PAIR)
    assert key == KEY
    assert open_batch(key, sealed_batch) == batch
    with pytest.raises(KeyScopeError):
        BatchSealer(key)


@pytest.mark.parametrize(
    "changes",
    [
        {"key_id": new_key_id("us-east", KeyKind.DATA, b"q" * 11)},
        {"region": "eu-west"},
        {"stream": StreamName.parse("acme/ops/crew")},
        {"incarnation": b"j" * 16},
        {"shard": 1},
        {"epoch": 3},
        {"grant_id": "g-2"},
        {"terms_hash": b"u" * 32},
        {"bridge": SpiffeId.parse("spiffe://us-east.acme/bridge/other")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_key_handed_over_for_one_thing_opens_for_nothing_else(changes: dict[str, object]) -> None:
    sealed = seal_data_key(KEY, SCOPE, PAIR.public)
    other: HandoffScope = replace(SCOPE, **changes)  # type: ignore[arg-type]
    with pytest.raises(TamperError, match="data key"):
        open_data_key(sealed, other, PAIR)


def test_another_bridges_key_pair_opens_nothing() -> None:
    with pytest.raises(TamperError):
        open_data_key(seal_data_key(KEY, SCOPE, PAIR.public), SCOPE, HybridKeyPair.generate())


def test_a_broker_seals_only_the_key_that_the_scope_names_and_only_for_its_own_bridges() -> None:
    with pytest.raises(KeyScopeError):
        seal_data_key(KEY, replace(SCOPE, shard=1), PAIR.public)
    for foreign in ("spiffe://eu-west.acme/bridge/us-to-eu", "spiffe://us-east.acme/client/orders"):
        with pytest.raises(KeyScopeError, match="only, not to"):
            seal_data_key(KEY, replace(SCOPE, bridge=SpiffeId.parse(foreign)), PAIR.public)
