"""Random worlds against an oracle: both brokers, the agent's plan and `felix bridge explain` decide as docs/policy.md says.

The oracle (world_oracle.py) is written from that page and imports nothing of the product. Each world is asked for every
stream and both bridges; where one of the four decides otherwise than the oracle, the world is printed.

The verifier and the transfer register are asked about logs (world_logs.py): the world's documents as leaves, in an egress log and
in the destination's own, with crossings between and behind them. The verifier must find a crossing exactly where the oracle
says that it may not stand, given what is in the log by then; the register must name terms exactly where they are signed,
accepted and approved. What a log does not show by design is listed in world_logs.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from attacks import world_logs
from attacks import world_oracle as oracle
from attacks.worlds import (
    BRIDGES,
    DESTINATION,
    SOURCE,
    STREAMS,
    Pools,
    Rendered,
    World,
    draw,
    grants_of,
    render,
    terms_of,
)

from audit.agreement import Agreements
from audit.leaf import Header, Kind, Leaf, Side
from audit.origin import Origin
from audit.spark.agreements import _NAMES, rows_of
from audit.tile import MemoryFiles
from bridge.plan import Verdict, plan_links
from cli.bridge import explain_crossing
from felix.errors import FelixError
from felix.messages import Durability, Retention, StreamState
from felix.names import SpiffeId, StreamName
from policy import residency
from policy.grant import CODES, Allowed, Attempt, RefusalKind
from region.governance import Governance

Tally = Callable[[str, int], None]
WORLDS = 600
LOG_WORLDS = 200
CROSSINGS = 12
"""of each log"""
SEED = 20_130_101
NAMES = {stream: StreamName.parse(stream) for stream in STREAMS}
IDS = {bridge: SpiffeId.parse(bridge) for bridge in BRIDGES}
KNOWN = {stream: StreamState(stream, b"i" * 16, 1, Durability(), Retention(), 0, 0) for stream in STREAMS}


@lru_cache(maxsize=1)
def pools() -> Pools:
    return Pools(Random(SEED))


def broker(region: str, world: World, rendered: Rendered) -> Governance:
    """A region's governance as its broker has it, with this book and policy; everything else of a broker is not asked."""
    held = Governance.__new__(Governance)
    stub: Any = held
    stub.broker = SimpleNamespace(
        clock_ms=lambda: world["now"], require=lambda *_: None, refuse_reserved=lambda *_: None
    )
    stub.trail = SimpleNamespace(failure=None)
    stub._own = SimpleNamespace(region=region)
    stub._mirror = SimpleNamespace(is_current=True)
    stub._cut_off_ms = None
    stub._book = rendered.book
    stub._policy = rendered.policies[region]
    stub.denied = lambda error, **_: error
    return held


def asked(question: Callable[[], object]) -> str:
    """ "allowed", or the number of the refusal."""
    try:
        question()
    except FelixError as error:
        return str(int(error.code))
    return "allowed"


def compare(world: World, rendered: Rendered, counts: Counter[str]) -> list[str]:
    """Where the product and the oracle disagree."""
    wrong = []
    brokers = {region: broker(region, world, rendered) for region in (SOURCE, DESTINATION)}

    def differ(what: str, found: object, wanted: object) -> None:
        counts[what.split(":")[0]] += 1
        if found != wanted:
            wrong.append(f"{what}: the product says {found}, the oracle {wanted}")

    for number, grant in enumerate(rendered.grants):
        terms = world["grants"][number]["terms"]
        for stream, name in NAMES.items():
            if not oracle.fits(terms["stream"], stream) and stream != STREAMS[-1]:
                continue
            for bridge, identity in IDS.items():
                if bridge != terms["bridge"] and (number or stream != "acme/ops/a"):
                    continue
                for region in (SOURCE, DESTINATION):
                    policy = world["policies"][region]
                    wanted = oracle.decide(world, number, stream, bridge, policy)
                    found = rendered.book.check(
                        Attempt(name, SOURCE, DESTINATION, identity), rendered.policies[region], world["now"],
                        grant=grant,
                    )  # fmt: skip
                    kind = "allowed" if isinstance(found, Allowed) else found.kind.value
                    differ(f"book of {region}: {grant} {stream} {bridge[-3:]}", kind, wanted)
                    counts[f"({wanted})"] += 1
                    code = wanted if wanted == "allowed" else str(int(CODES[RefusalKind(wanted)]))
                    if wanted == "no-grant":
                        continue  # another grant may say more
                    if region == SOURCE:
                        answer = asked(lambda: brokers[SOURCE].check_export(identity, grant, name, "read"))  # noqa: B023
                        if not any(not each["forged"] for each in world["grants"][number]["exports"]):
                            # It is not known where it leads: the broker refuses before it asks for more.
                            differ(f"source broker: {grant} {stream}", answer == "allowed", False)
                            continue
                    else:
                        answer = asked(
                            lambda: brokers[DESTINATION].check_import(identity, grant, SOURCE, name)  # noqa: B023
                        )
                    which = "source" if region == SOURCE else "destination"
                    differ(f"{which} broker: {grant} {stream} {bridge[-3:]}", answer, code)
    for bridge, identity in IDS.items():
        rows = plan_links(rendered.book, identity, KNOWN, [DESTINATION], world["now"])
        running = {(row.grant, row.stream) for row in rows if row.verdict is Verdict.RUN}
        wanted_rows = set()
        for stream in STREAMS:
            lawful = [
                grant
                for number, grant in enumerate(rendered.grants)
                if oracle.decide(world, number, stream, bridge, None) == "allowed"
            ]
            if lawful:
                wanted_rows.add((min(lawful), stream))
        differ(f"plan: {bridge[-3:]}", running, wanted_rows)
    for stream, name in NAMES.items():
        for region in (SOURCE, DESTINATION):
            told = explain_crossing(
                rendered.book, rendered.policies[region], name, SOURCE, DESTINATION, world["now"]
            )
            lawful_any = oracle.decide_any(world, stream, None, world["policies"][region])
            differ(f"explain in {region}: {stream}", told.crosses, lawful_any)
    return wrong


@pytest.mark.timeout(3_600)
def test_brokers_agent_and_explain_decide_as_the_oracle_does(attack_scale: int, tally: Tally) -> None:
    random, counts = Random(SEED + 1), Counter[str]()
    worlds = min(100_000, WORLDS * attack_scale)
    for _ in range(worlds):
        world = draw(random, pools())
        rendered = render(world, random)
        wrong = compare(world, rendered, counts)
        assert not wrong, "\n".join([*wrong, json.dumps(world, indent=1)])
    # Each kind of answer must have been asked for often enough to mean something.
    seen = {name.strip("()"): count for name, count in counts.items() if name.startswith("(")}
    for kind in (
        "allowed", "denied", "no-grant", "export-missing", "import-missing", "forged", "terms-mismatch", "wrong-bridge",
        "revoked", "not-yet", "expired", "not-approved", "paused", "against-policy",
    ):  # fmt: skip
        assert seen.get(kind, 0) >= worlds // 200, (kind, seen)
    tally("worlds", worlds)
    for what, count in sorted(counts.items()):
        if not what.startswith("("):
            tally(f"answers of {what}", count)
    tally("of them allowed", seen["allowed"])
    tally("not approved", seen["not-approved"])


# -- logs ----------------------------------------------------------------------------------------------


@pytest.fixture
def policies_read_once() -> Iterator[None]:
    """Reading a policy's YAML costs more than all else here; its signature is verified each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "parse_policy", cache(residency.parse_policy))
        yield


def crossing_header(world: World, side: Side, crossing: dict[str, Any], now: int) -> Header:
    terms_hash = terms_of(world["grants"][crossing["grant"]]["terms"]).hash()
    return Header(
        kind=Kind.INTENT if side is Side.EGRESS else Kind.ACK, side=side, time_ms=now, source_region=SOURCE,
        destination_region=DESTINATION, bridge=crossing["bridge"], stream=crossing["stream"],
        destination_stream=crossing["destination_stream"], grant_id=grants_of(world)[crossing["grant"]],
        terms_hash=bytes(32) if crossing["other_hash"] else terms_hash,
    )  # fmt: skip


def verified(
    world: World, log: dict[str, Any], leaves: list[Leaf], random: Random, counts: Counter[str]
) -> list[str]:
    """Where verifier and oracle disagree about a log's documents and crossings."""
    wrong = []
    side, entries = log["side"], log["entries"]
    agreements = Agreements(world_logs.trust(), Origin.parse(world_logs.ORIGINS[side]))
    places = Counter(random.choices(range(len(entries) + 1), k=CROSSINGS // 2))
    places[len(entries)] += CROSSINGS - CROSSINGS // 2
    for at in range(len(entries) + 1):
        # A crossing is written after the leaf before it, and before the one behind it.
        laters = (
            sorted(random.choices(world_logs.LATER, k=places[at])) if at == len(entries) else [0] * places[at]
        )
        for later in laters:
            now = world["now"] + later if at == len(entries) else entries[at]["time_ms"]
            crossing = world_logs.draw_crossing(random, world, STREAMS)
            wanted = world_logs.may_stand(world, log, at, now, crossing)
            found = agreements.judge(crossing_header(world, side, crossing, now))
            counts["crossings judged by the verifier"] += 1
            counts[f"({wanted})"] += 1
            if (found == []) != (wanted == "allowed"):
                wrong.append(
                    f"{side} leaf {at} at {now}: {crossing}: the verifier says {found}, the oracle {wanted}"
                )
        if at == len(entries):
            break
        data = entries[at]["made_of"]
        problems = agreements.take(at, leaves[at], lambda header: header.document)
        # What names other terms than its grant is found where the grant is known, and agrees with nothing where it is not.
        began, ended = world["certificates"]
        forged = (
            data.get("forged")
            or data.get("defect", "") not in ("", "other-terms")
            or ("name" in data and not began <= data["at"] <= ended)
        )
        if data.get("agrees", True) and bool(problems) != bool(forged):
            wrong.append(f"{side} leaf {at}: {data}: the verifier says {problems}")
        counts["documents read by the verifier"] += 1
    return wrong


def registered(world: World, log: dict[str, Any], leaves: list[Leaf], counts: Counter[str]) -> list[str]:
    """Where the register names terms that are not signed, or names none where they are."""
    wrong = []
    origin = world_logs.ORIGINS[log["side"]]
    rows = [
        dict(zip(_NAMES, row, strict=True))
        for row in rows_of(origin, enumerate(leaves), MemoryFiles({}), world_logs.trust()).terms
    ]
    signed = {row["terms_hash"] for row in rows if row["signed"]}
    for number, held in enumerate(world["grants"]):
        wanted = world_logs.has_terms(world, log, number)
        found = terms_of(held["terms"]).hash().hex() in signed
        counts[f"grants in the register {'with' if wanted else 'without'} terms"] += 1
        if found != wanted:
            wrong.append(f"{log['side']}: grant {number}: the register says {found}, the oracle {wanted}")
    return wrong


@pytest.mark.timeout(3_600)
@pytest.mark.usefixtures("policies_read_once")
def test_verifier_and_register_find_what_may_not_stand_in_a_log(attack_scale: int, tally: Tally) -> None:
    random, counts = Random(SEED + 2), Counter[str]()
    worlds = min(100_000, LOG_WORLDS * attack_scale)
    for _ in range(worlds):
        world = draw(random, pools())
        for side in Side:
            log = world_logs.draw_log(random, world, side)
            leaves = world_logs.leaves_of(log["world"], log)
            wrong = verified(log["world"], log, leaves, random, counts)
            wrong += registered(log["world"], log, leaves, counts)
            told = [[entry["time_ms"], entry["made_of"]] for entry in log["entries"]]
            assert not wrong, "\n".join([*wrong, json.dumps({**log["world"], "log": told}, indent=1)])
    seen = {name.strip("()"): count for name, count in counts.items() if name.startswith("(")}
    for kind in (
        "allowed", "denied", "export-missing", "import-missing", "terms-mismatch", "wrong-bridge", "revoked", "not-yet",
        "expired", "not-approved", "paused", "against-policy", "other-terms", "no-policy",
    ):  # fmt: skip
        assert seen.get(kind, 0) >= worlds // 50, (kind, seen)
    tally("logs of worlds", 2 * worlds)
    for what, count in sorted(counts.items()):
        if not what.startswith("("):
            tally(what, count)
    tally("crossings that may stand", seen["allowed"])
