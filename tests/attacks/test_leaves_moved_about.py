"""One party alone, not leaf by leaf: leaves are left out, doubled, moved, exchanged, grafted from another log, and changed several at once or everywhere alike.

The world, the parties and their keys are those of `test_one_party_alone`: all is signed anew before the other region cosigns. What verifies, and reconciles with the
other side, must tell of the same records, receipts, ways, terms, acceptances and offsets that stayed. What the keeper may write by the table there is no part of that, nor are
words that forbid, which an agent can keep back (docs/claims.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from random import Random

import msgspec
import pytest
from attacks import test_one_party_alone as alone
from attacks.chance import Chance
from attacks.conftest import Tally
from audit_log import trust
from one_party import LOGS, PARTIES, SIGNS

from audit.agreement import Agreements
from audit.leaf import Kind, Leaf, Side
from audit.origin import Origin
from audit.verify import verify_log
from felix.errors import FelixError
from policy import residency

CHANGES = 400
"""Of each party, at scale 1."""
Log = list[Leaf]


@pytest.fixture(autouse=True, scope="module")
def policies_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "parse_policy", cache(residency.parse_policy))
        yield


def told(log: str, leaves: Log) -> list[str]:
    """What the log tells, the legal fields by its documents as of each leaf."""
    agreements, found = Agreements(trust(), Origin.parse(alone.ORIGINS[log])), list[str]()
    for index, leaf in enumerate(leaves):
        head = leaf.header
        agreements.take(index, leaf, lambda header: header.document)
        place = (
            head.bridge,
            head.source_region,
            head.destination_region,
            head.stream,
            head.shard,
            head.incarnation,
        )
        if (head.kind, head.side) in ((Kind.INTENT, Side.EGRESS), (Kind.ACK, Side.INGRESS)):
            agreed = agreements.agreement(head.grant_id)
            assert agreed is not None
            legal = (
                agreed.legal_fields,
                agreed.accepted_by,
                agreed.terms_hash,
                head.grant_id,
                head.terms_hash,
            )
            records = (head.first_offset, head.records, head.record_bytes, leaf.entries, head.envelope_sha256)
            found.append(repr(("moved", place, head.destination_stream, records, legal)))
        elif head.kind is Kind.ACK:
            found.append(repr(("received", head.receipt)))
        elif head.kind in (Kind.WITHHELD, Kind.GAP):
            found.append(repr((head.kind, place, head.first_offset, head.last_offset, head.records)))
    return sorted(found)


def changed(random: Random, party: str, log: str, held: Log) -> tuple[str, Log]:
    """One change, and how it is called."""
    leaves = list(held)
    at, other = random.randrange(len(leaves)), random.randrange(len(leaves))
    how = random.choice(("left out", "all of a kind left out", "doubled", "moved", "exchanged", "grafted", "replaced", "field exchanged", "everywhere", "twice"))  # fmt: skip
    leaf = leaves[at]
    match how:
        case "left out":
            del leaves[at]
        case "all of a kind left out":
            leaves = [each for each in leaves if each.header.kind is not leaf.header.kind]
        case "doubled":
            leaves.insert(other, leaf)
        case "moved":
            leaves.insert(other, leaves.pop(at))
        case "exchanged":
            leaves[at], leaves[other] = leaves[other], leaf
        case "replaced":
            leaves[at] = leaves[other]
        case "grafted":
            graft = random.choice(dict(alone.world())[random.choice([each for each in LOGS if each != log])])
            side = random.choice((Side.EGRESS, Side.INGRESS))
            leaves.insert(at, Leaf(msgspec.structs.replace(graft.header, side=side), graft.entries))
        case "field exchanged":
            field, there = random.choice(alone.HEADER_FIELDS), leaves[other]
            values = getattr(leaf.header, field), getattr(there.header, field)
            leaves[at] = Leaf(msgspec.structs.replace(leaf.header, **{field: values[1]}), leaf.entries)
            leaves[other] = Leaf(msgspec.structs.replace(there.header, **{field: values[0]}), there.entries)
        case "everywhere":
            field = random.choice(alone.HEADER_FIELDS)
            new = getattr(_one(random, party, leaf, field).header, field)
            old = getattr(leaf.header, field)
            leaves = [
                Leaf(msgspec.structs.replace(each.header, **{field: new}), each.entries)
                if getattr(each.header, field) == old
                else each
                for each in leaves
            ]
        case "twice":
            fields = (*alone.HEADER_FIELDS, *(alone.ENTRY_FIELDS if leaf.entries else ()))
            for field in random.sample(fields, 2):
                leaves[at] = _one(random, party, leaves[at], field)
    return f"{how}: {leaf.header.kind.name}", leaves


def _one(random: Random, party: str, leaf: Leaf, field: str) -> Leaf:
    return random.choice(list(alone.changed(leaf, field, alone.HOLDS[party])) or [leaf])


@pytest.mark.parametrize("party", [party for party in PARTIES if SIGNS[party]])
def test_what_is_found_by_nothing_tells_of_nothing_else(
    party: str, tally: Tally, attack_scale: int, chance: Chance
) -> None:
    random, world, wrong = (
        chance(party),
        {name: list(leaves) for name, leaves in alone.world()},
        Counter[str](),
    )
    honest, tried, whole = {log: told(log, world[log]) for log in LOGS}, 0, 0
    while tried < CHANGES * attack_scale:
        log = random.choice(SIGNS[party])
        try:
            how, leaves = changed(random, party, log, world[log])
            files = alone.files_of(log, leaves)
        except (FelixError, ValueError, TypeError, OverflowError):
            continue  # no log can be written so
        if leaves == world[log]:
            continue
        tried += 1
        if verify_log(files, trust()).ok and alone.reconciled({**world, log: leaves}):
            whole += 1
            wrong[f"{log}, {how}"] += told(log, leaves) != honest[log]
    assert not +wrong, +wrong
    tally(f"changes by the {party}", tried)
    tally("that are found by nothing, and tell of nothing else", whole)
