"""Random shards against an oracle that counts offset by offset: the verifier finds something in exactly those that are not lawful, and the
report reconciles exactly those that are (accounting_worlds.py).

`FELIX_ATTACK_SCALE` multiplies both, `FELIX_ATTACK_SEED` draws others. All shards of a report are shards of one stream in one log, so that a report costs one job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.accounting_worlds import INVENTED, SETTLED, SIGNED, UNLAWFUL, Said, draw, is_lawful, judged
from attacks.chance import Chance
from attacks.conftest import Tally
from audit_log import BRIDGE, receipt_for
from crossing_logs import (
    COMMITMENT_KEY,
    DAY_MS,
    DEPARTURES,
    INCARNATION,
    START_MS,
    World,
    trust,
    write_world,
)
from crossing_logs import SIGNED as GRANTS
from signed_grants import grant_leaves, signed_grant
from slow_runs import only_slow

from audit.continuity import Continuity
from audit.leaf import _ENTRY, Committer, GapKind, Header, Kind, Leaf, Side, intent_leaves, iter_entries
from audit.spark.report import run_report
from felix.batch import Record

SHARDS = 4_000
REPORTED_SHARDS = 60
KINDS = {
    "intent": Kind.INTENT,
    "withheld": Kind.WITHHELD,
    "gap": Kind.GAP,
    "elsewhere": Kind.GAP,
    "ack": Kind.ACK,
}
OTHER = signed_grant(stream=DEPARTURES, purpose="marketing", expires=START_MS + 90 * DAY_MS)
OTHER_BRIDGE = f"{BRIDGE}-2"
OTHERS = signed_grant(stream=DEPARTURES, bridge=OTHER_BRIDGE, expires=START_MS + 90 * DAY_MS)
INVENTED_ID = "g-aaaaaaaaaaaaaaaa"
PAPERS = dict(zip(SIGNED, (GRANTS[DEPARTURES], OTHER), strict=True))
TERMS = {
    said: {"grant_id": signed.grant, "terms_hash": signed.terms.hash()} for said, signed in PAPERS.items()
}
INVENTED_TERMS = {"grant_id": INVENTED_ID, "terms_hash": b"t" * 32}


def header(said: Said, shard: int, **more: Any) -> Header:
    """The fields of a leaf that say what it accounts for, under which grant."""
    fields: dict[str, Any] = {
        "kind": KINDS[said.kind], "side": Side.EGRESS, "time_ms": START_MS + 1_000, "source_region": "us-east",
        "destination_region": "eu-west", "bridge": BRIDGE, "stream": DEPARTURES, "destination_stream": DEPARTURES, "shard": shard,
        "source_epoch": 1, "incarnation": INCARNATION, "first_offset": said.first, "last_offset": said.last,
        "part": said.part, "parts": said.parts,
    }  # fmt: skip
    if said.envelope:
        fields["envelope_sha256"] = sha256(said.envelope.encode()).digest()
    if said.kind == "gap":
        fields["gap"] = GapKind.RETENTION
    elif said.kind == "elsewhere":
        fields["gap"] = GapKind.ELSEWHERE
    return Header(**(fields | TERMS.get(said.grant, INVENTED_TERMS) | more))


def found(leaves: list[Said]) -> list[str]:
    """What the verifier finds of one shard's leaves."""
    continuity, sentences = Continuity(), list[str]()
    announced = Counter[str]()
    for index, said in enumerate(leaves):
        signed = said.grant in SIGNED
        if said.kind == "intent":
            announced[said.envelope] += len(said.offsets)
        entries = b"".join(_ENTRY.pack(offset, 0, 0, bytes(32), bytes(16)) for offset in said.offsets)
        under = next((each.grant for each in leaves if each.envelope == said.envelope), said.grant)
        records = announced[said.envelope] if said.kind == "ack" else len(said.offsets)
        named = TERMS.get(under, INVENTED_TERMS) if said.kind == "ack" else {}
        sentences += continuity.apply(
            Leaf(header(said, 0, records=records, **named), entries), index, lambda signed=signed: signed
        )
        if said.kind != "ack" and not signed:
            sentences.append("Nobody signed its grant.")  # audit.agreement says that
    return sentences


def test_the_verifier_finds_exactly_the_shards_that_are_not_lawful(
    chance: Chance, attack_scale: int, tally: Tally
) -> None:
    random, lawful = chance(75), 0
    for number in range(SHARDS * attack_scale):
        leaves = draw(random, str(number), takeovers=number % 2 == 1)
        wanted, sentences = is_lawful(leaves), found(leaves)
        lawful += wanted
        assert (sentences == []) == wanted, (number, wanted, sentences, *leaves)
    assert 0.4 < lawful / (SHARDS * attack_scale) < 0.9
    tally("shards", SHARDS * attack_scale)
    tally("of them lawful", lawful)


class Logs(World):
    """Both logs of many shards."""

    def __init__(self) -> None:
        super().__init__()
        self.landed: dict[str, int] = {}
        """by envelope the leaf of its arrival"""

    def add(self, shard: int, leaves: list[Said]) -> list[Said]:
        """Write these. Returns what was written: an ACK that no receipt can be made for is left out."""
        committer = Committer(COMMITMENT_KEY, DEPARTURES, INCARNATION, shard)
        intents: dict[str, list[Leaf]] = {}
        written: list[Said] = []
        for number, said in enumerate(leaves):
            if said.kind == "ack":
                if _may_arrive(said, intents):
                    self.answer(shard, said, intents[said.envelope])
                    written.append(said)
                continue
            written.append(said)
            made = header(said, shard)
            records = [Record(at, START_MS, b"k", {}, b"payload %d" % at) for at in said.offsets]
            if said.kind == "intent":
                made = header(said, shard, source_batch_sha256=sha256(b"batch").digest(), path=("us-east",), commitment_key_id=COMMITMENT_KEY.key_id)  # fmt: skip
                (leaf,) = intent_leaves(made, records, committer)
                leaf = Leaf(header(said, shard, **_listed(leaf)), leaf.entries)
                intents.setdefault(said.envelope, []).append(leaf)
            elif said.kind == "withheld":
                made = header(said, shard, reason="filtered", commitment_key_id=COMMITMENT_KEY.key_id)
                (leaf,) = intent_leaves(made, records, committer)
            else:
                leaf = Leaf(made)
                if said.kind == "elsewhere":
                    # What this bridge brought before has landed, though the receipt may come later.
                    before = [
                        each for each in leaves[number:] if each.kind == "ack" and each.last < said.first
                    ]
                    for each in sorted(before, key=lambda each: each.first):
                        if each.envelope not in self.landed and _may_arrive(each, intents):
                            self.arrive(shard, each, intents[each.envelope])
                    self.brought(shard, said)
            self.egress.append([leaf])
        return written

    def brought(self, shard: int, said: Said) -> None:
        """The arrival of what another bridge brought, whose log nobody has."""
        committer = Committer(COMMITMENT_KEY, DEPARTURES, INCARNATION, shard)
        terms = {"bridge": OTHER_BRIDGE, "grant_id": OTHERS.grant, "terms_hash": OTHERS.terms.hash()}
        envelope = sha256(f"{shard} {said} {len(self.ingress)}".encode()).digest()
        intent = header(said, shard, **terms, kind=Kind.INTENT, gap=None, path=("us-east",), envelope_sha256=envelope, commitment_key_id=COMMITMENT_KEY.key_id)  # fmt: skip
        records = [Record(at, START_MS, b"k", {}, b"another") for at in range(said.first, said.last + 1)]
        names = ("destination_stream", "shard", "source_epoch", "incarnation", "envelope_sha256", "first_offset", "last_offset")  # fmt: skip
        common = {name: getattr(intent, name) for name in names} | terms
        self.cross(common, intent_leaves(intent, records, committer), receipt=False)

    def arrive(self, shard: int, said: Said, intents: list[Leaf]) -> None:
        head = intents[0].header
        common = {
            name: getattr(head, name)
            for name in ("destination_stream", "shard", "source_epoch", "incarnation", "grant_id", "terms_hash", "envelope_sha256")
        }  # fmt: skip
        at = sum(map(len, self.ingress))
        self.cross(common | {"first_offset": said.first, "last_offset": said.last}, intents, receipt=False)
        self.landed[said.envelope] = at

    def answer(self, shard: int, said: Said, intents: list[Leaf]) -> None:
        """The receipt, and the arrival before it."""
        if said.envelope not in self.landed:
            self.arrive(shard, said, intents)
        at = self.landed[said.envelope]
        arrived = [leaf for append in self.ingress for leaf in append][at].header
        names = ("destination_stream", "shard", "source_epoch", "incarnation", "grant_id", "terms_hash", "envelope_sha256",
                 "first_offset", "last_offset", "attempt", "path", "destination_first_offset", "destination_last_offset")  # fmt: skip
        said_there = {name: getattr(arrived, name) for name in names}
        count = sum(leaf.header.records for leaf in intents)
        ack = self.header(
            Kind.ACK, Side.EGRESS, arrived.time_ms + 70, DEPARTURES, records=count, **said_there
        )
        if count:
            last = (ack.destination_first_offset or 0) + count - 1
            ack = msgspec.structs.replace(ack, destination_last_offset=last, last_offset=said.last)
        self.egress.append([Leaf(msgspec.structs.replace(ack, receipt=receipt_for(ack, intents, at)))])


def _may_arrive(said: Said, intents: dict[str, list[Leaf]]) -> bool:
    """Whether a receipt can be made for this."""
    listed = [at for leaf in intents.get(said.envelope, ()) for at in iter_offsets(leaf)]
    return said.envelope in intents and listed == sorted({*listed} & {*range(said.first, said.last + 1)})


def is_brought_twice(leaves: list[Said]) -> bool:
    """Whether an offset arrives by another bridge, and by this one or once more."""
    arrivals = [range(said.first, said.last + 1) for said in leaves if said.kind in ("elsewhere", "ack")]
    others = {at for said in leaves if said.kind == "elsewhere" for at in range(said.first, said.last + 1)}
    brought = Counter(at for offsets in arrivals for at in offsets)
    return any(brought[at] > 1 for at in others)


def iter_offsets(leaf: Leaf) -> Iterator[int]:
    return (entry.offset for entry in iter_entries(leaf))


def _listed(leaf: Leaf) -> dict[str, Any]:
    return {
        name: getattr(leaf.header, name)
        for name in ("records", "record_bytes", "source_batch_sha256", "path", "commitment_key_id")
    }


@only_slow
@pytest.mark.spark
def test_the_report_reconciles_exactly_the_shards_that_are_lawful(
    spark: Any, tmp_path: Path, chance: Chance, attack_scale: int, tally: Tally
) -> None:
    random, wanted, world = chance(76), dict[int, list[Said]](), Logs()
    for signed in PAPERS.values():
        world.grant(DEPARTURES, START_MS - 1_000, signed)
    world.ingress.append(grant_leaves(OTHERS, Side.INGRESS, START_MS - 1_000))
    for shard in range(REPORTED_SHARDS * min(attack_scale, 40)):
        leaves = draw(random, str(shard), takeovers=shard % 2 == 1)
        # What two bridges brought differs by the destination's log, whatever this one says.
        if is_brought_twice(leaves):
            continue
        if not any(said.grant == INVENTED and said.kind in ("intent", "ack") for said in leaves):
            wanted[shard] = world.add(shard, leaves)
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    rows = {row["shard"]: row for row in result.report.reconciliation.records() if row["bridge"] == BRIDGE}
    # Under a grant that nobody signed nothing crosses, also where all offsets are accounted for: each such leaf is a breach.
    invented = {shard for shard, leaves in wanted.items() if any(said.grant == INVENTED for said in leaves)}
    assert sum(
        row["events"]
        for row in result.report.exceptions.records()
        if row["grant_id"] == INVENTED_ID and "no GRANT and no ACCEPT" in (row["sentence"] or "")
    ) == sum(said.grant == INVENTED for shard in invented for said in wanted.pop(shard))
    for shard, leaves in wanted.items():
        oracle, state = judged(leaves), rows[shard]["status"]
        assert (state == "reconciled") == (oracle == SETTLED), (oracle, rows[shard], *leaves)
        assert oracle != UNLAWFUL or state == "differs", (rows[shard], *leaves)
    tally("shards in a report", len(wanted))
    over = [shard for shard, leaves in wanted.items() if any(said.kind == "elsewhere" for said in leaves)]
    assert over
    tally("of them with takeovers", len(over))
