"""A rogue agent against an oracle of the terms: nothing is taken that the oracle refuses, nothing refused that it takes.

The oracle (tests/attacks/terms_oracle.py) is written from the documentation. Records are drawn as a sound agent would send
them, and most are then changed. First the destination's inspection alone, at scale; then over the wire, on both engines, where
some grants have a budget that is used up on the way.

`FELIX_ATTACK_SCALE=834 python -m pytest --timeout 20000 tests/attacks/test_rogue_agent.py` draws 100,000 envelopes for the inspection,
and as many for each engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from attacks.chance import Chance
from attacks.terms_oracle import OracleTerms, Sent, draw_terms, fits, lets_cross, mutate, sound_record
from bridge_mesh import Mesh, mesh_terms, two_regions
from rogue_agent import Wild, granted, rogue_agent

from audit.leaf import Kind, iter_entries
from felix.errors import Code, FelixError
from felix.names import StreamName
from felix.runtime.real import now_ms
from felix.transport.port import ENGINE_NAMES
from policy.inspection import Inspection
from policy.terms import GrantTerms
from policy.transform import Action, Encoding, FieldRule, Format, KeyRule, Missing, TransformSpec

Tally = Callable[[str, int], None]
PURE, WIRE, ENVELOPES_MAX = 4_000, 120, 100_000
"""Envelopes in the quick part, and what FELIX_ATTACK_SCALE multiplies them up to."""
GRANTS_MAX = 100


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def spec_of(terms: OracleTerms) -> TransformSpec:
    """The same terms as the product's own value: translated, not interpreted."""
    rules = tuple(
        FieldRule(
            field=name,
            do=Action(rule["do"]),
            missing=Missing(rule["missing"]),
            last=rule.get("last", 0),
            digest_bytes=rule.get("digest_bytes", 16),
            encoding=Encoding(rule.get("encoding", "base64url")),
        )
        for name, rule in terms.rules.items()
    )
    return TransformSpec(
        format=Format.OPAQUE if terms.opaque else Format.JSON,
        fields=rules,
        key=KeyRule(terms.key),
        headers=terms.headers,
        trace=terms.trace,
    )


def encoded(sent: Sent) -> bytes:
    return Wild(sent.payload, sent.key, tuple(sent.headers)).encoded_headers()


def test_the_inspection_and_the_oracle_decide_alike(
    grant_terms: GrantTerms, chance: Chance, attack_scale: int, tally: Tally
) -> None:
    random, decided = chance(20260105), Counter[bool]()
    envelopes = min(ENVELOPES_MAX, PURE * attack_scale)
    for number in range(envelopes):
        if number % 20 == 0:
            terms = draw_terms(random)
            inspection = Inspection(with_terms(grant_terms, terms))
        for _ in range(random.randrange(1, 4)):
            sent = sound_record(random, terms)
            assert lets_cross(terms, sent), (terms, sent)
            for _ in range(random.choice([0, 1, 1, 1, 2])):
                sent = mutate(random, sent)
            expected = lets_cross(terms, sent)
            try:
                inspection.record(sent.key, encoded(sent), sent.payload)
                found, why = True, ""
            except FelixError as error:
                found, why = False, str(error)
            assert found == expected, (terms, sent, why)
            decided[expected] += 1
    assert min(decided.values()) > envelopes // 5
    tally("records decided by the inspection alone", decided.total())
    tally("records that it refused", decided[False])


def with_terms(base: GrantTerms, terms: OracleTerms) -> GrantTerms:
    return msgspec.structs.replace(base, transform=spec_of(terms), onward=terms.onward)


@pytest.fixture
def grant_terms(tmp_path: Path) -> GrantTerms:
    return mesh_terms(now_ms(), transform=TransformSpec())


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_the_destination_and_the_oracle_decide_alike_over_the_wire(
    mesh: Mesh, engine: str, chance: Chance, attack_scale: int, tally: Tally
) -> None:
    await mesh.stop("eu-west")
    await mesh.start("eu-west", engine=engine)
    random, decided, beyond = chance(f"7 {engine}"), Counter[bool](), 0
    envelopes = min(ENVELOPES_MAX, WIRE * attack_scale)
    taken: list[Wild] = []
    grants = min(max(3, envelopes // 60), GRANTS_MAX)
    for number in range(grants):
        terms = draw_terms(random)
        if not any(rule["do"] == "keep" for rule in terms.rules.values()) and not terms.opaque and number % 2:
            terms.rules["id"] = {"do": "keep", "missing": "ok"}
        if number % 3:
            # Of 30 bytes and more an envelope: some are taken, and most of those that may cross are not.
            terms.budget = random.randrange(200, 200 + 20 * envelopes // grants)
        stream = f"acme/ops/departures-{number}"
        grant = await granted(
            mesh, stream=stream, transform=spec_of(terms), onward=terms.onward, budget_bytes=terms.budget
        )
        async with rogue_agent(mesh, grant, stream=stream, engine=engine) as agent:
            await agent.open()
            arrived: list[Wild] = []
            spent = 0
            for _ in range(envelopes // grants):
                records = []
                in_terms = True
                for _ in range(random.randrange(1, 4)):
                    sent = sound_record(random, terms)
                    if random.random() < 0.3:
                        sent = mutate(random, sent)
                    in_terms = in_terms and lets_cross(terms, sent)
                    records.append(Wild(sent.payload, sent.key, tuple(sent.headers)))
                size = sum(record.size for record in records)
                in_budget = fits(terms, spent, size)
                decided[in_terms and in_budget] += 1
                compress = random.random() < 0.3
                if in_terms and in_budget:
                    receipt = await agent.cross(records, compress=compress)
                    assert receipt.records == len(records)
                    arrived += records
                    spent += size
                    continue
                error = await agent.refused(records, compress=compress)
                codes = (
                    {Code.OUTSIDE_TERMS, Code.LOOP_REFUSED, Code.RESIDENCY_DENIED} if not in_terms else set()
                )
                assert error.code in (codes if in_budget else codes | {Code.BUDGET_EXHAUSTED}), error
                beyond += in_terms
                await agent.open()
            taken += arrived
        hosted = mesh.nodes["eu-west"].broker.streams.get(StreamName.parse(stream))
        assert hosted is not None and hosted.shard(0).high_watermark == len(arrived)
    await mesh.stop("eu-west")
    assert mesh.verify_ingress().ok
    acks = mesh.leaves(mesh.ingress_folder, Kind.ACK)
    sizes = [entry.size for leaf in acks for entry in iter_entries(leaf)]
    assert sizes == [record.size for record in taken]
    tally("envelopes over the wire", decided.total())
    tally("envelopes refused", decided[False])
    tally("of them for the budget alone", beyond)
