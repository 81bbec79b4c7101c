"""F2: what crosses is what both logs commit to, count and budget, and what the terms let cross; nothing besides.

Tried as found. A: an honest agent, and a producer that puts its data into headers. B: a rogue agent that sends headers nobody
named, bytes behind a compressed frame, dropped fields, plain keys, and more than budget and rate allow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from bridge_mesh import STREAM, Mesh, two_regions, until
from rogue_agent import Wild, granted, rogue_agent

from audit.leaf import EMPTY_RANGE_BYTES, Kind, iter_entries
from bridge.link import LinkPhase
from felix.batch import encode_headers
from felix.errors import Code, FelixError
from felix.names import StreamName
from policy.transform import KeyRule, TransformSpec, build_spec
from region.crossing.grant_meter import GrantMeter

Tally = Callable[[str, int], None]
ENGINES = ("qh3", "aioquic")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


# A: an honest agent


async def test_headers_are_counted_committed_to_and_budgeted_by_an_honest_agent(
    mesh: Mesh, tally: Tally
) -> None:
    """8 records of 400 kB in a header that the terms name, under a budget of a million bytes."""
    await mesh.create()
    big, budget = b"x" * 400_000, 1_000_000
    async with mesh.operator("us-east") as client:
        publisher = client.stream(STREAM)
        for number in range(8):
            await publisher.publish(b'{"id":%d}' % number, headers={"note": big})
    await mesh.grant(transform=build_spec(keep=["id"], headers=["note"]), budget_bytes=budget)
    async with mesh.agent() as agent:
        links = agent._links
        await until(
            lambda: links.workers and all(worker.phase is LinkPhase.STOPPED for worker in links.workers),
            "the budget's end",
        )
        await mesh.crossed(2)
    await mesh.stop("eu-west")
    intents = mesh.headers(mesh.egress_folder, Kind.INTENT)
    acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
    crossed = sum(header.record_bytes for header in intents)
    assert sum(header.records for header in intents) == 2, "two of 400 kB fit a million"
    assert crossed == 2 * (len(b'{"id":0}') + len(encode_headers({"note": big, "felix-path": b"us-east"})))
    assert 800_000 < crossed == sum(header.record_bytes for header in acks) <= budget
    mesh.reconcile()
    denied = mesh.headers(mesh.egress_folder, Kind.DENY)
    assert {header.code for header in denied} == {Code.BUDGET_EXHAUSTED}
    tally("bytes in headers, all of them counted", crossed)


async def test_another_header_or_key_makes_another_commitment(mesh: Mesh, tally: Tally) -> None:
    """What the rogue of F2 did: its INTENT had the same entries, whatever stood in headers and keys."""
    grant = await granted(mesh, transform=TransformSpec(headers=("note",), key=KeyRule.KEEP))
    seen: set[bytes] = set()
    variants = [
        Wild(b"{}"), Wild(b"{}", b"k"), Wild(b"{}", b"kk"),
        *(Wild(b"{}", b"", ((b"note", note), (b"felix-path", b"us-east"))) for note in (b"", b"a", b"b", b"SSN 078-05-1120")),
        Wild(b"{}", b"", ((b"felix-path", b"us-east"), (b"note", b"a"))),
    ]  # fmt: skip
    for number, record in enumerate(variants):
        async with rogue_agent(mesh, grant, incarnation=bytes([number]) * 16) as agent:
            await agent.open()
            await agent.cross([record])
    await mesh.stop("eu-west")
    leaves = mesh.leaves(mesh.ingress_folder, Kind.ACK)
    for leaf, record in zip(leaves, variants, strict=True):
        (entry,) = iter_entries(leaf)
        assert entry.size == record.size == leaf.header.record_bytes
        seen.add(entry.commitment)
    assert len(seen) == len(variants)
    tally("records that differ outside their payload", len(variants))


# B: a rogue agent


def wild(headers: tuple[tuple[bytes, bytes], ...], payload: bytes = b'{"id":1}', key: bytes = b"") -> Wild:
    return Wild(payload, key, (*headers, (b"felix-path", b"us-east")))


REFUSED: dict[str, tuple[Wild, dict[str, object]]] = {
    "a header that nobody named": (wild(((b"x-customer-database", b"d" * 300_000),)), {}),
    "a reserved header": (wild(((b"felix.tombstone", b"deleted"),)), {}),
    "a header for a queue": (wild(((b"felix.deliver-at", b"9999999999999"),)), {}),
    "a message id": (wild(((b"felix.message-id", b"m"),)), {}),
    "a trace that nobody named": (wild(((b"traceparent", b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01"),)), {}),
    "the path twice": (wild(((b"felix-path", b"us-east"),)), {}),
    "a named header twice": (wild(((b"note", b"1"), (b"note", b"2"))), {}),
    "bytes behind a header": (Wild(b'{"id":1}', raw_headers=wild(()).encoded_headers() + b"tail"), {}),
    "no path": (Wild(b'{"id":1}', headers=()), {}),
    "a third region's record": (Wild(b'{"id":1}', headers=((b"felix-path", b"ap-south,us-east"),)), {}),
    "a field that keep excludes": (wild((), b'{"id":1,"card":"4111111111111111"}'), {}),
    "a name twice": (wild((), b'{"id":1,"id":"4111111111111111"}'), {}),
    "bytes behind the JSON": (wild((), b'{"id":1}\n\n4111111111111111'), {}),
    "no JSON": (wild((), b"4111111111111111"), {}),
    "a plain key": (wild((), key=b"alice@example.org"), {}),
    "bytes behind the frame": (wild((), b'{"id":' + b"1" * 18 + b"}"), {"compress": True, "behind": b"b" * 50_000}),
    "a second frame": (
        wild((), b'{"id":1}'), {"compress": True, "behind": bytes.fromhex("28b52ffd2000010000")},
    ),
    "bytes behind the columns": (wild(()), {"behind": b"tail"}),
    "a length that is not true": (wild(()), {"compress": True, "plain_length": 10}),
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_the_terms_do_not_let_cross_is_refused_where_it_arrives(
    mesh: Mesh, engine: str, tally: Tally
) -> None:
    await mesh.stop("eu-west")
    await mesh.start("eu-west", engine=engine)
    grant = await granted(mesh, transform=build_spec(keep=["id"], headers=["note"]))
    for number, (what, (record, batch)) in enumerate(REFUSED.items()):
        async with rogue_agent(mesh, grant, engine=engine, incarnation=bytes([number]) * 16) as agent:
            await agent.open()
            error = await agent.refused([record], **batch)
            assert error.code in (
                Code.OUTSIDE_TERMS, Code.LOOP_REFUSED, Code.RESIDENCY_DENIED, Code.BATCH_MALFORMED, Code.ENVELOPE_INVALID,
            ), (what, error)  # fmt: skip
            # One bad record refuses its whole envelope, wherever it stands.
            await agent.open()
            await agent.refused([wild(()), wild(()), record], **batch)
            await agent.open()
            await agent.cross([wild(((b"note", b"named"),))])
    hosted = mesh.nodes["eu-west"].broker.streams.get(StreamName.parse(STREAM))
    assert hosted is not None and hosted.shard(0).high_watermark == len(REFUSED)
    records = await mesh.read("eu-west", len(REFUSED))
    assert {bytes(found.payload) for found in records} == {b'{"id":1}'}
    assert all(set(found.headers) == {"note", "felix-path"} for found in records)
    await mesh.stop("eu-west")
    assert mesh.verify_ingress().ok
    denied = mesh.headers(mesh.ingress_folder, Kind.DENY)
    assert denied and all(header.grant_id in ("", grant[0]) for header in denied)
    for text in (b"4111111111111111", b"alice@example.org", b"x-customer-database", b"d" * 64, b"b" * 64):
        for path in mesh.ingress_folder.rglob("*"):
            assert not path.is_file() or text not in path.read_bytes(), (text, path)
    tally("envelopes outside their terms", 2 * len(REFUSED))


async def test_the_destination_counts_the_budget_for_itself_and_over_restarts(
    mesh: Mesh, tally: Tally
) -> None:
    record = wild(())
    budget = 10 * record.size + 1
    grant = await granted(mesh, transform=build_spec(keep=["id"]), budget_bytes=budget)
    taken = tried = 0
    for _ in range(6):
        async with rogue_agent(mesh, grant) as agent:
            await agent.open()
            try:
                for count in (1, 2):
                    tried += count
                    await agent.cross([record] * count)
                    taken += count
            except FelixError as error:
                assert error.code is Code.BUDGET_EXHAUSTED
        await mesh.stop("eu-west")
        await mesh.start("eu-west")
    assert taken == 10 < tried
    await mesh.stop("eu-west")
    acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
    assert sum(header.record_bytes for header in acks) == 10 * record.size <= budget
    tally("records beyond a budget", tried - taken)


async def test_envelopes_without_records_use_up_a_budget_too_and_over_restarts(
    mesh: Mesh, tally: Tally
) -> None:
    """Each is a leaf in the ingress log for ever: under a budget nobody writes as many as he likes."""
    grant = await granted(mesh, transform=build_spec(keep=["id"]), budget_bytes=4 * EMPTY_RANGE_BYTES + 1)
    position = 0
    for allowed in (3, 1, 0):
        async with rogue_agent(mesh, grant) as agent:
            await agent.open()
            for _ in range(allowed):
                agent.send_nothing(position, position)
                await agent.receipt()
                position += 1
            if not allowed:
                agent.send_nothing(position, position)
                with pytest.raises(FelixError) as refused:
                    await agent.receipt()
                assert refused.value.code is Code.BUDGET_EXHAUSTED
        await mesh.stop("eu-west")
        await mesh.start("eu-west")
    tally("envelopes without records beyond a budget", 1)


async def test_the_destination_holds_a_rogue_to_the_rate_and_refuses_no_one_for_it(
    mesh: Mesh, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 envelopes of a tenth of a second each, and one second's worth at once: the rest takes the time that it takes. One without
    records makes a leaf, too, and is not free."""
    charged: list[int] = []
    spend = GrantMeter.spend

    def spending(meter: GrantMeter, rate: int, size: int, now_s: float) -> None:
        charged.append(size)
        spend(meter, rate, size, now_s)

    monkeypatch.setattr(GrantMeter, "spend", spending)
    record = wild((), b'{"id":"' + b"x" * 1_000 + b'"}')
    rate = 10 * record.size
    grant = await granted(mesh, transform=build_spec(keep=["id"]), rate_bytes=rate)
    loop = asyncio.get_running_loop()
    async with rogue_agent(mesh, grant) as agent:
        await agent.open()
        begun = loop.time()
        for number in range(20):
            agent.send([record], base=number)
        for _ in range(20):
            await agent.receipt()
        took = loop.time() - begun
        agent.send_nothing(20, 1_000)
        await agent.receipt()
    assert charged == [record.size] * 20 + [EMPTY_RANGE_BYTES]
    # The first second's worth goes at once; a slow machine takes longer, and none may take less.
    assert took > 0.85
    assert await mesh.arrived() == 20
    tally("envelopes beyond a rate", 9)


async def test_a_large_envelope_does_not_hold_the_loop(mesh: Mesh, tally: Tally) -> None:
    """65,536 records in one envelope, under all rules; between its steps the broker answers others."""
    grant = await granted(mesh, transform=build_spec(keep=["id"]))
    records = [Wild(b'{"id":1}')] * 65_536
    steps = 0
    async with rogue_agent(mesh, grant) as agent:
        await agent.open()
        agent.send(records, compress=True)
        waiting = asyncio.ensure_future(agent.receipt())
        while not waiting.done():
            await asyncio.sleep(0)
            steps += 1
        receipt = await waiting
    assert receipt.records == 65_536
    # The tests' loop is the broker's, too: one that was held would have turned a few times only.
    assert steps > 50
    await mesh.stop("eu-west")
    assert mesh.verify_ingress().ok
    tally("turns of the loop during one envelope", steps)
