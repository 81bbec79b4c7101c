"""Random worlds against an oracle: both brokers, the agent's plan and `felix bridge explain` decide as docs/policy.md says.

The oracle (world_oracle.py) is written from that page and imports nothing of the product. Each world is asked for every
stream and both bridges; where one of the four decides otherwise than the oracle, the world is printed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from attacks import world_oracle as oracle
from attacks.worlds import BRIDGES, DESTINATION, SOURCE, STREAMS, Pools, Rendered, World, draw, render

from bridge.plan import Verdict, plan_links
from cli.bridge import explain_crossing
from felix.errors import FelixError
from felix.messages import Durability, Retention, StreamState
from felix.names import SpiffeId, StreamName
from policy.grant import CODES, Allowed, Attempt, RefusalKind
from region.governance import Governance

Tally = Callable[[str, int], None]
WORLDS = 600
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
