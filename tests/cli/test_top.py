"""`felix top`: rates from two samples, order and filters, and the command against a broker that works."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import msgspec
import pytest
from region_home import make_region, running
from region_peer import take
from rich.console import Console
from typer.testing import CliRunner, Result

import felix
from cli.main import app
from cli.top import Sample, TopStats, figures, picture, size, together
from felix.errors import RequestError
from felix.messages import CacheTraffic, LinkState, QuotaState, ReaderTraffic, RegionState, StreamTraffic
from felix.quota import QuotaLimits
from felix.settings import SubscriptionSettings

GAUGES = {
    "sessions": 3.0,
    "sessions_limit": 100.0,
    "subscriptions": 1.0,
    "ring_bytes": 5.0,
    "ring_bytes_limit": 10.0,
}
CREW, PAY = "acme/ops/crew", "globex/payments/orders"


def sample_of(at_s: float, *streams: StreamTraffic, **more: list[object]) -> Sample:
    region = RegionState("us-east", "acme", "b1", 0, GAUGES)
    return Sample(
        at_s,
        region,
        list(streams),
        more.get("readers", []),  # type: ignore[arg-type]
        more.get("quotas", []),  # type: ignore[arg-type]
        more.get("links", []),  # type: ignore[arg-type]
        more.get("caches", []),  # type: ignore[arg-type]
    )


def test_the_figures_of_several_brokers_are_added_up_and_caches_are_their_leaders() -> None:
    def at(broker: str, published: int, keys: int) -> TopStats:
        caches = [CacheTraffic("acme/ops/state", keys, keys, 100)]
        readers = [ReaderTraffic("subscription", "1", CREW, lag_records=keys)]
        before, after = (
            sample_of(at_s, StreamTraffic(CREW, 2, count, stored_bytes=count), caches=caches, readers=readers)
            for at_s, count in ((10.0, 0), (11.0, published))
        )
        region = RegionState("us-east", "acme", broker, 0, GAUGES)
        return figures(
            msgspec.structs.replace(before, region=region), msgspec.structs.replace(after, region=region)
        )

    found = together([at("b1", 10, 0), at("b2", 30, 7)])
    assert (found.broker, found.sessions, found.in_records, found.stored_bytes) == ("b1, b2", 6, 40, 40)
    (crew,) = found.streams
    assert (crew.in_records, crew.shards, crew.readers, crew.lag_records) == (40, 2, 2, 7)
    assert [each.name for each in found.readers] == ["1 at b2", "1 at b1"]
    assert [each.keys for each in found.caches] == [7]
    assert [(each.used_bytes, each.limit_bytes) for each in found.budgets] == [(10, 20)]
    assert "b1, b2" in drawn(found)


def drawn(found: TopStats, rows: int = 15) -> str:
    text = io.StringIO()
    Console(file=text, width=220).print(picture(found, rows))
    return text.getvalue()


def test_rates_are_between_two_samples_and_what_began_anew_counts_from_nothing() -> None:
    before = sample_of(10.0, StreamTraffic(CREW, 1, 100, 1000, 50, 500), StreamTraffic(PAY, 2, 900, 9000))
    after = sample_of(
        12.0, StreamTraffic(CREW, 1, 300, 5000, 150, 1500, stored_bytes=7), StreamTraffic(PAY, 2, 40, 400)
    )
    found = figures(before, after, sort="name")
    crew, pay = found.streams
    assert (crew.in_records, crew.in_bytes, crew.out_records, crew.out_bytes) == (100, 2000, 50, 500)
    assert (pay.in_records, pay.in_bytes) == (20, 200)
    assert (found.in_bytes, found.stored_bytes, found.sessions) == (2200, 7, 3)
    assert [(each.name, each.used_bytes, each.limit_bytes) for each in found.budgets] == [("ring", 5, 10)]


def test_streams_are_in_the_order_asked_for_and_of_the_tenant_asked_for() -> None:
    readers = [ReaderTraffic("subscription", "s/1", PAY, lag_records=70, waits="credit")]
    before = sample_of(0.0)
    after = sample_of(
        1.0,
        StreamTraffic(CREW, 1, published_bytes=10, stored_bytes=1),
        StreamTraffic(PAY, 1, delivered_bytes=5, stored_bytes=2),
        readers=readers,  # type: ignore[arg-type]
    )
    for sort, first in (("name", CREW), ("in", CREW), ("out", PAY), ("lag", PAY), ("stored", PAY)):
        assert figures(before, after, sort=sort).streams[0].stream == first  # type: ignore[arg-type]
    alone = figures(before, after, tenant="acme")
    assert [each.stream for each in alone.streams] == [CREW]
    assert not alone.readers


def test_only_whom_a_quota_held_back_meanwhile_is_shown() -> None:
    def quota(name: str, ms: int, refused: int = 0) -> QuotaState:
        limits = QuotaLimits(publish_bytes=5)
        return QuotaState("tenant", name, limits, limits, {}, {"publish_bytes": ms}, {"limit_rate": refused})

    before = sample_of(0.0, quotas=[quota("acme", 5), quota("globex", 5), quota("initech", 5)])
    after = sample_of(1.0, quotas=[quota("acme", 5), quota("globex", 900), quota("initech", 5, 1)])
    assert [each.name for each in figures(before, after).throttled] == ["globex", "initech"]


def test_caches_have_the_hit_ratio_of_the_gets_between_two_looks() -> None:
    def cache(name: str, hits: int, misses: int, evicted: int = 0) -> CacheTraffic:
        return CacheTraffic(name, 7, 500, 1_000, hits, misses, evicted, watches=2)

    crew, pay, idle = "acme/ops/seats", "globex/web/sessions", "acme/ops/idle"
    before = sample_of(0.0, caches=[cache(crew, 100, 0), cache(pay, 9_000, 9_000), cache(idle, 5, 5)])
    after = sample_of(2.0, caches=[cache(crew, 130, 10, 50), cache(pay, 30, 70), cache(idle, 5, 5)])
    found = figures(before, after)
    assert [(each.cache, each.gets, each.hit_ratio) for each in found.caches] == [
        (pay, 50, 0.3),  # the broker began anew: from nothing
        (crew, 20, 0.75),
        (idle, 0, None),
    ]
    assert found.caches[1].evicted == 25
    text = drawn(found)
    for words in (crew, "75.0%", "30.0%", "500 B", "1.0 KiB", "watches"):
        assert words in text, words
    assert [each.cache for each in figures(before, after, tenant="globex").caches] == [pay]


def test_the_picture_names_everything_and_keeps_to_its_rows() -> None:
    link = LinkState("g-1", CREW, 0, "us-east", "eu-west", "b", "paused", "by eu-west", lag_records=12)
    readers = [ReaderTraffic("subscription", f"s/{n}", CREW, lag_records=n) for n in range(30)]
    found = figures(
        sample_of(0.0),
        sample_of(1.0, StreamTraffic(CREW, 1, 5, 5_000_000), readers=readers, links=[link]),  # type: ignore[arg-type]
    )
    text = drawn(found, rows=5)
    for words in (CREW, "4.8 MiB", "s/29", "(5 of 30)", "g-1", "paused", "by eu-west", "ring 5 B of 10 B"):
        assert words in text
    assert "s/3 " not in text, "the furthest behind come first"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (500 << 20, "500 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_have_three_digits_and_a_unit(value: int, text: str) -> None:
    assert size(value) == text


async def command(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(words))


async def test_one_look_at_a_broker_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with running(make_region(tmp_path, "us-east")), felix.connect("us-east") as client:
        await client.create_stream(CREW)
        await client.create_stream(PAY)
        async with client.stream(CREW).subscribe("earliest") as reader:
            looking = asyncio.ensure_future(command("top", "--once", "--json", "--interval", "0.5"))
            while not looking.done():
                await client.stream(CREW).publish_many([bytes(100)] * 50)
                await take(reader, 50)
            said = await looking
            assert said.exit_code == 0, said.output
            found = json.loads(said.stdout)
            crew = next(each for each in found["streams"] if each["stream"] == CREW)
            assert crew["in_records"] > 0
            assert crew["out_records"] > 0
            assert crew["readers"] == 1
            assert crew["stored_bytes"] > 0
            (one,) = found["readers"]
            assert (one["kind"], one["stream"], one["identity"]) == ("subscription", CREW, "operator")
            cache = await client.create_cache("acme/ops/seats")
            await cache.put("a", b"1")
            await cache.get("a")
            (held,) = json.loads((await command("top", "--json", "--interval", "0.2")).stdout)["caches"]
            assert (held["cache"], held["keys"], held["hit_ratio"]) == ("acme/ops/seats", 1, None)
            for_people = await command("top", "--once", "--interval", "0.2", "--tenant", "globex")
            assert PAY in for_people.stdout
            assert CREW not in for_people.stdout
        refused = await command("top", "--once", "--tenant", "globex", "--stream", CREW)
        assert isinstance(refused.exception, RequestError)


async def test_a_stalled_reader_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with running(make_region(tmp_path, "us-east")) as node, felix.connect("us-east") as client:
        await client.create_stream(CREW)
        async with client.stream(CREW).subscribe("earliest", credit_bytes=2 << 20):
            async with client.stream(CREW).publisher() as publisher:
                await publisher.publish_many([bytes(100_000)] * 60)
            (reader,) = await client.reader_traffic()
            assert reader.waits == "credit"
            assert 0 < reader.lag_records < 60
            # Views add their readers: durable subscriptions and queues under their own names.
            await client.stream(CREW).create_subscription("billing", SubscriptionSettings(start="earliest"))
            await client.create_queue("acme/ops/jobs")
            await client.queue("acme/ops/jobs").put(b"1")
            durable, subscription = await client.reader_traffic(CREW)
            assert (durable.kind, durable.name, durable.lag_records) == ("durable", "billing", 60)
            assert durable.waits == "consumer"
            assert subscription.kind == "subscription"
            assert (await client.queue("acme/ops/jobs").describe()).ready == 1
            (queue,) = await client.reader_traffic("acme/ops/jobs")
            assert (queue.kind, queue.lag_records) == ("queue", 1)
        await client.put_rights("spiffe://us-east.acme/client/orders-svc", ["admin acme/*/*"])
    with pytest.raises(RequestError):
        await node.services.requests.describe_traffic(
            felix.SpiffeId.parse("spiffe://us-east.acme/client/orders-svc"),
            felix.messages.DescribeTraffic("streams"),
        )
