"""Random worlds against an oracle: both brokers, the agent's plan and `felix bridge explain` decide as docs/policy.md says.

The oracle (world_oracle.py) is written from that page and imports nothing of the product. Each world is asked for every
stream and both bridges; where one of the four decides otherwise than the oracle, the world is printed.

Verifier, transfer register and report are asked about logs (world_logs.py): the world's documents as leaves, in an egress log and
in the destination's own, with crossings between and behind them. The verifier must find a crossing exactly where the oracle
says that it may not stand, given what is in the log by then, and where by it more crossed than the grant's budget; the register must name terms exactly where they are signed,
accepted and approved; the report must list the same crossings as breaches, under the names of docs/reports.md, and no other
leaf but documents that do not hold (world_reports.py). What a log does not show by design is listed in world_logs.py.

`FELIX_ATTACK_SCALE=500 python -m pytest --log-cli-level=INFO tests/attacks/test_worlds.py` tries 100,000 worlds of both kinds, and says
how far it is. Logs are drawn in slices of 2,000 worlds, each from a seed of its own: `FELIX_WORLDS_FROM=20` begins with slice 20, to go
on where a run was ended, or to see a disagreement again that its message names with its slice. `FELIX_ATTACK_SEED` draws other worlds.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from attacks import world_logs, world_reports, worlds
from attacks import world_oracle as oracle
from attacks.chance import Chance
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
    hash_of,
    render,
)
from slow_runs import only_slow

from audit import agreement
from audit.agreement import Agreements
from audit.allowance import Allowances
from audit.leaf import Header, Kind, Leaf, Side
from audit.origin import Origin
from audit.spark.agreements import _NAMES, LogDocuments, rows_of
from audit.tile import MemoryFiles
from audit.verify import OVER_BUDGET
from bridge.plan import Verdict, plan_links
from felix.errors import FelixError
from felix.messages import StreamState
from felix.names import SpiffeId, StreamName
from felix.settings import Durability, Retention
from policy import residency
from policy.explanation import explain_crossing
from policy.grant import CODES, Allowed, Attempt, RefusalKind
from region.governance.service import Governance

log_ = logging.getLogger(__name__)

Tally = Callable[[str, int], None]
WORLDS = 600
LOG_WORLDS = 200
WORLDS_MAX = 100_000
WORLDS_OF_A_SLICE = 2_000
"""A Spark job costs seconds, whatever it is about: all logs of a slice are one."""
FIRST_SLICE = "FELIX_WORLDS_FROM"
CROSSINGS = 12
"""of each log"""
SEED = 20_130_101
NAMES = {stream: StreamName.parse(stream) for stream in STREAMS}
IDS = {bridge: SpiffeId.parse(bridge) for bridge in BRIDGES}
KNOWN = {stream: StreamState(stream, b"i" * 16, 1, Durability(), Retention(), 0, 0) for stream in STREAMS}


@lru_cache(maxsize=1)
def pools(chance: Chance, attack_scale: int) -> Pools:
    return Pools(chance(SEED), min(60, 10 + attack_scale))


def broker(region: str, world: World, rendered: Rendered) -> Governance:
    """A region's governance as its broker has it, with this book and policy; everything else of a broker is not asked."""
    held = Governance.__new__(Governance)
    stub: Any = held
    stub.broker = SimpleNamespace(
        clock_ms=lambda: world["now"], require=lambda *_: None, refuse_reserved=lambda *_: None
    )
    stub.trail = stub.audit = SimpleNamespace(failure=None)
    stub.arrivals = SimpleNamespace(refusal=lambda: None)
    stub._own = SimpleNamespace(region=region)
    stub._mirror = SimpleNamespace(is_current=True)
    stub._cut_off_ms = None
    stub._judgement = SimpleNamespace(
        book=rendered.book,
        policy=rendered.policies[region],
        leaves=SimpleNamespace(is_current=True),
        changed_keys=SimpleNamespace(refusal=None),
    )
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
            lawful: dict[str, list[tuple[int, str]]] = {}
            for number, grant in enumerate(rendered.grants):
                if oracle.decide(world, number, stream, bridge, None) == "allowed":
                    terms = world["grants"][number]["terms"]
                    arriving = stream if terms["wildcard"] else terms["destination_stream"]
                    signed = max(
                        each["signed_at"] for each in world["grants"][number]["exports"] if not each["forged"]
                    )
                    lawful.setdefault(arriving, []).append((signed, grant))
            # One grant for each name that a stream has at the destination: the one that was signed first.
            wanted_rows |= {(min(grants)[1], stream) for grants in lawful.values()}
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
def test_brokers_agent_and_explain_decide_as_the_oracle_does(
    chance: Chance, attack_scale: int, tally: Tally
) -> None:
    random, counts = chance(SEED + 1), Counter[str]()
    tried = min(WORLDS_MAX, WORLDS * attack_scale)
    drawn = pools(chance, attack_scale)
    for number in range(tried):
        world = draw(random, drawn)
        rendered = render(world, random)
        wrong = compare(world, rendered, counts)
        if number % 5_000 == 4_999:
            log_.info("%d of %d worlds: no disagreement", number + 1, tried)
        assert not wrong, "\n".join([*wrong, json.dumps(world, indent=1)])
    # Each kind of answer must have been asked for often enough to mean something.
    seen = {name.strip("()"): count for name, count in counts.items() if name.startswith("(")}
    for kind in (
        "allowed", "denied", "no-grant", "export-missing", "import-missing", "forged", "terms-mismatch", "wrong-bridge",
        "revoked", "not-yet", "expired", "not-approved", "paused", "against-policy",
    ):  # fmt: skip
        assert seen.get(kind, 0) >= tried // 200, (kind, seen)
    tally("worlds", tried)
    for what, count in sorted(counts.items()):
        if not what.startswith("("):
            tally(f"answers of {what}", count)
    tally("of them allowed", seen["allowed"])
    tally("not approved", seen["not-approved"])


# -- logs ----------------------------------------------------------------------------------------------


@pytest.fixture
def read_once() -> Iterator[None]:
    """Reading policies and documents costs more than all else here; their signatures are verified each time."""
    read = cache(residency.parse_policy)
    with pytest.MonkeyPatch.context() as patch:
        for module in (residency, worlds):
            patch.setattr(module, "parse_policy", lambda text, _: read(text, "a world's policy"))
        patch.setattr(agreement, "parse_document", lru_cache(10_000)(agreement.parse_document))
        yield


def crossing_header(world: World, side: Side, crossing: dict[str, Any], now: int, number: int) -> Header:
    """The leaf of the log's crossing of this number."""
    terms_hash = hash_of(world["grants"][crossing["grant"]]["terms"])
    return Header(
        kind=Kind.INTENT if side is Side.EGRESS else Kind.ACK, side=side, time_ms=now, source_region=SOURCE,
        destination_region=DESTINATION, bridge=crossing["bridge"], stream=crossing["stream"],
        destination_stream=crossing["destination_stream"], grant_id=grants_of(world)[crossing["grant"]],
        terms_hash=bytes(32) if crossing["other_hash"] else terms_hash,
        shard=crossing["shard"], first_offset=crossing["first_offset"], last_offset=crossing["first_offset"] + 2,
        records=1 if crossing["bytes"] else 0, record_bytes=crossing["bytes"], envelope_sha256=number.to_bytes(32),
    )  # fmt: skip


class Verified(NamedTuple):
    """A log with its crossings: its leaves, what the verifier finds about each, what the report must call the crossings; and
    where verifier and oracle disagree."""

    leaves: list[Leaf]
    story: list[tuple[int, str]]
    over_budget: list[tuple[int, str]]
    breaches: dict[int, set[str]]
    has_terms: list[bool]
    """of each grant"""
    unknown: set[int]
    """leaves that name a grant wrongly: found where the grant is known, and agreeing with nothing where it is not"""
    wrong: list[str]


def verified(world: World, log: dict[str, Any], random: Random, counts: Counter[str]) -> Verified:
    """Feed the verifier with a log and crossings between its documents and behind them."""
    side, entries = log["side"], log["entries"]
    documents = world_logs.leaves_of(world, log)
    agreements = Agreements(world_logs.trust(), Origin.parse(world_logs.ORIGINS[side]))
    has_terms = [world_logs.has_terms(world, log, number) for number in range(len(world["grants"]))]
    told = Verified([], [], [], {}, has_terms, set(), [])
    allowances, crossed = Allowances(), list[tuple[int, dict[str, Any]]]()
    crossings = world_logs.draw_crossings(random, world, log, STREAMS, CROSSINGS)
    for at in range(len(entries) + 1):
        while crossings and crossings[0][0] == at:
            _, now, crossing = crossings.pop(0)
            index = len(told.leaves)
            wanted = world_logs.may_stand(world, log, at, now, crossing)
            crossed.append((at, crossing))
            is_over = world_logs.is_over_budget(world, log, crossed)
            header = crossing_header(world, side, crossing, now, len(crossed))
            found = agreements.judge(header)
            told.leaves.append(Leaf(header))
            told.story.extend((index, sentence) for sentence in found)
            allowed = agreements.allowed(header)
            beyond = (
                "" if allowed is None else allowances.take(index, header, allowed, told.leaves[index].version)
            )
            told.over_budget.extend([(index, beyond)] if beyond else [])
            told.breaches[index] = world_reports.wanted(
                world, log, at, now, crossing, wanted == "allowed", has_terms
            ) | ({OVER_BUDGET} if is_over else set())
            counts["crossings judged by the verifier"] += 1
            counts[f"({wanted})"] += 1
            if (found == []) != (wanted == "allowed"):
                told.wrong.append(
                    f"{side} leaf {at} at {now}: {crossing}: the verifier says {found}, the oracle {wanted}"
                )
            if bool(beyond) != is_over:
                told.wrong.append(
                    f"{side} leaf {at}: {crossed}: the verifier says {beyond or 'nothing'}, the oracle {'over' if is_over else 'within'} budget"
                )
        if at == len(entries):
            break
        data, index = entries[at]["made_of"], len(told.leaves)
        problems = agreements.take(index, documents[at], lambda header: header.document)
        told.leaves.append(documents[at])
        told.story.extend((index, sentence) for sentence in problems)
        # What names other terms than its grant is found where the grant is known, and agrees with nothing where it is not.
        began, ended = world["certificates"]
        forged = bool(
            data.get("forged")
            or data.get("defect", "") not in ("", "other-terms")
            or ("name" in data and not began <= data["at"] <= ended)
        )
        told.breaches[index] = {"rule-broken"} if forged else set()
        if not data.get("agrees", True):
            told.unknown.add(index)
        elif bool(problems) != forged:
            told.wrong.append(f"{side} leaf {at}: {data}: the verifier says {problems}")
        counts["documents read by the verifier"] += 1
    return told


def registered(
    world: World, log: dict[str, Any], told: Verified, documents: LogDocuments, counts: Counter[str]
) -> list[str]:
    """Where the register names terms that are not signed, or names none where they are."""
    wrong = []
    rows = [dict(zip(_NAMES, row, strict=True)) for row in documents.terms]
    signed = {row["terms_hash"] for row in rows if row["signed"]}
    for number, held in enumerate(world["grants"]):
        wanted = told.has_terms[number]
        found = hash_of(held["terms"]).hex() in signed
        counts[f"grants in the register {'with' if wanted else 'without'} terms"] += 1
        if found != wanted:
            wrong.append(f"{log['side']}: grant {number}: the register says {found}, the oracle {wanted}")
    return wrong


def told_of(log: dict[str, Any]) -> str:
    """A log's world and documents, to be printed."""
    entries = [[entry["time_ms"], entry["made_of"]] for entry in log["entries"]]
    return json.dumps({**log["world"], "log": entries}, indent=1)


class Due(NamedTuple):
    """A log whose report is still to be compared."""

    log: dict[str, Any]
    told: Verified


def reported(spark: Any, logs: world_reports.Logs, due: dict[str, Due], counts: Counter[str]) -> None:
    """Compare the breaches of the report on these logs, all in one job, with what the oracle calls each leaf."""
    found = logs.breaches(spark)
    for name, (log, told) in due.items():
        for index, wanted in told.breaches.items():
            if index in told.unknown:
                continue
            listed = found.get((name, index), set())
            counts["leaves judged by the report"] += 1
            for breach in wanted:
                counts[f"{breach} in the report"] += 1
            assert listed == wanted, (
                f"{name}, {log['side']} leaf {index}: {told.leaves[index].header}: the report says {listed or 'nothing'}, the oracle "
                f"{wanted or 'nothing'}; {[sentence for at, sentence in told.story if at == index]}\n{told_of(log)}"
            )


def ask_slice(
    spark: Any, number: int, worlds: int, chance: Chance, drawn: Pools, counts: Counter[str]
) -> None:
    """Draw this slice of worlds, and compare what verifier, register and report say of their logs with the oracle."""
    random, logs, due = chance(f"{SEED} {number}"), world_reports.Logs(), dict[str, Due]()
    for world_number in range(worlds):
        world = draw(random, drawn)
        for side in Side:
            log = world_logs.draw_log(random, world, side)
            told = verified(log["world"], log, random, counts)
            documents = rows_of(
                world_logs.ORIGINS[side], enumerate(told.leaves), MemoryFiles({}), world_logs.trust()
            )
            wrong = told.wrong + registered(log["world"], log, told, documents, counts)
            assert not wrong, "\n".join([f"slice {number}, world {world_number}", *wrong, told_of(log)])
            name = f"{number}-{world_number}-{side}"
            logs.add(name, told.leaves, documents, told.story, told.over_budget)
            due[name] = Due(log, told)
    counts["logs of worlds"] += 2 * worlds
    reported(spark, logs, due, counts)


@only_slow
@pytest.mark.spark
@pytest.mark.timeout(3 * 3_600)
@pytest.mark.usefixtures("read_once")
def test_verifier_register_and_report_find_what_may_not_stand_in_a_log(
    chance: Chance, attack_scale: int, tally: Tally, spark: Any
) -> None:
    counts, tried = Counter[str](), min(WORLDS_MAX, LOG_WORLDS * attack_scale)
    first, drawn = int(os.environ.get(FIRST_SLICE, "0")), pools(chance, attack_scale)
    for number, done in enumerate(range(0, tried, WORLDS_OF_A_SLICE), first):
        ask_slice(spark, number, min(WORLDS_OF_A_SLICE, tried - done), chance, drawn, counts)
        log_.info("slices %d to %d: no disagreement, %s", first, number, dict(counts))
    seen = {name.strip("()"): count for name, count in counts.items() if name.startswith("(")}
    for kind in (
        "allowed", "denied", "export-missing", "import-missing", "terms-mismatch", "wrong-bridge", "revoked", "not-yet",
        "expired", "not-approved", "paused", "against-policy", "other-terms", "no-policy",
    ):  # fmt: skip
        assert seen.get(kind, 0) >= tried // 50, (kind, seen)
    for breach in (
        "crossed-without-terms", "crossed-after-expiry", "crossed-before-start", "crossed-after-revocation", "rule-broken",
        OVER_BUDGET,
    ):  # fmt: skip
        assert counts[f"{breach} in the report"] >= tried // 50, (breach, counts)
    for what, count in sorted(counts.items()):
        if not what.startswith("("):
            tally(what, count)
    tally("crossings that may stand", seen["allowed"])
