"""Settings refuse what is out of bounds, with a sentence that names it, and travel unchanged."""

import msgspec
import pytest

from felix.errors import Code, RequestError
from felix.settings import (
    CacheSettings,
    Compaction,
    Deduplication,
    Offload,
    QueueSettings,
    Retries,
    SubscriptionSettings,
    Views,
)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (Views(queue=QueueSettings(visibility_ms=1)), "visibility of 1; 100 to"),
        (Views(queue=QueueSettings(retries=Retries(attempts_max=-1))), "attempts of -1"),
        (
            Views(queue=QueueSettings(retries=Retries(interval_ms=10, interval_ms_max=9))),
            "interval of 9; 10 to",
        ),
        (Views(cache=CacheSettings(bytes_max=1)), "cache bytes of 1"),
        (Views(cache=CacheSettings(eviction="random")), "eviction 'random'; it is lru or refuse"),
        (Views(compaction=Compaction(tombstone_ms=0)), "tombstones of 0"),
        (Views(deduplication=Deduplication(ids_max=0)), "ids of 0"),
        (Views(offload=Offload("")), "offload URL of 0 characters"),
        (Views(queue=QueueSettings(), cache=CacheSettings()), "a queue that is a cache"),
        (SubscriptionSettings(start="yesterday"), "start of 'yesterday'"),
        (SubscriptionSettings(ack_timeout_ms=0), "ack timeout of 0"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(
    settings: Views | SubscriptionSettings, sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence) as refused:
        settings.check()
    assert refused.value.code is Code.CONFIG_INVALID


def test_defaults_are_allowed_and_travel_unchanged() -> None:
    whole = Views(
        cache=CacheSettings(),
        compaction=Compaction(),
        deduplication=Deduplication(),
    )
    whole.check()
    Views(offload=Offload("file:///x")).check()
    SubscriptionSettings().check()
    Views(queue=QueueSettings()).check()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=Views) == whole
    assert msgspec.json.encode(Views()) == b"{}"


def test_what_is_compacted_is_not_offloaded() -> None:
    with pytest.raises(RequestError, match="compacted stream that is offloaded"):
        Views(cache=CacheSettings(), offload=Offload("file:///x")).check()


def test_a_cache_is_compacted_and_a_plain_stream_is_not() -> None:
    assert Views().compacted is None
    assert Views(cache=CacheSettings()).compacted == Compaction(lag_ms=120_000)
    assert Views(cache=CacheSettings(), compaction=Compaction(lag_ms=5)).compacted == Compaction(lag_ms=5)


def test_the_delay_doubles_up_to_its_bound_and_never_overflows() -> None:
    retries = Retries(interval_ms=100, interval_ms_max=1_000)
    assert [retries.delay_ms(attempts) for attempts in (1, 2, 3, 4, 5, 10_000)] == [
        100,
        200,
        400,
        800,
        1_000,
        1_000,
    ]
