"""One party alone: each leaf kind and each field of it, changed by each party with every key that it holds.

The table of what a party can write is `tests/one_party.py`. Here every cell is tried: `verify` of each log, with one genuine
cosignature of the other region, and the reconciliation of both sides. A cell that nothing finds must be in the table with
its reason, and a new field of `Header` without a row fails.

Only the log that was changed is verified again: the other two are the world's, whose verdicts the first test asserts. Equal
policies are read once (`policies_read_once`), and equal leaves encoded once: both are functions of their bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache, lru_cache
from typing import Any, get_args

import msgspec
import pytest
from attacks.conftest import Tally
from audit_log import (
    BRIDGE,
    COMMITMENT_KEY,
    EGRESS_ORIGIN,
    INGRESS_ORIGIN,
    OPERATOR,
    REGION_ORIGIN,
    TIME_MS,
    Link,
    key,
    log_signer,
    receipt_for,
    trust,
    witness_signer,
)
from one_party import CAN, EGRESS, INGRESS, LOGS, PARTIES, REGION, SIGNS, UNUSED, Cell, reason
from signed_grants import deny_entry, paper_leaf, signing_key, standing

from audit.checkpoint import Checkpoint
from audit.leaf import ENTRY_COLUMNS, GapKind, Header, Kind, Leaf, Side, Terms, encode_leaf, iter_entries
from audit.merkle import Tree, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note
from audit.receipt import read_unverified, sign_receipt
from audit.tile import MemoryFiles, bundle_path, encode_bundle, tile_path
from audit.unclean_leaf import UncleanElection, unclean_leaf
from audit.verify import verify_log
from felix.errors import FelixError
from policy import residency
from policy.grant import StandingAction
from policy.signed import SignedDocument, sign

ORIGINS = {EGRESS: EGRESS_ORIGIN, INGRESS: INGRESS_ORIGIN, REGION: REGION_ORIGIN}
WITNESS = {EGRESS: "eu-west", INGRESS: "us-east", REGION: "eu-west"}
HEADER_FIELDS = Header.__struct_fields__
ENTRY_FIELDS = tuple(f"entries.{name}" for name, _ in ENTRY_COLUMNS)
Logs = dict[str, list[Leaf]]
COSIGNED_MS = TIME_MS + 4 * 365 * 86_400_000
"""Behind all leaves."""


@pytest.fixture(autouse=True, scope="module")
def policies_read_once() -> Iterator[None]:
    """A policy is YAML, and reading it costs more than all else of a verification. Its signature is verified each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "parse_policy", cache(residency.parse_policy))
        yield


encoded = lru_cache(maxsize=1_024)(encode_leaf)
"""Of the leaves that a change leaves as they are, the bytes."""


def event(kind: Kind, side: Side, region: str, **fields: Any) -> Leaf:
    return Leaf(
        Header(
            kind=kind, side=side, time_ms=TIME_MS, source_region=region, destination_region=region, **fields
        )
    )


@cache
def world() -> tuple[tuple[str, tuple[Leaf, ...]], ...]:
    """The three logs. Every kind that a log of its sort can have stands in it once at least."""
    link, other = Link(), Link(shard=1)
    signed = link.signed
    papers = {side: link.agreement(side) for side in Side}
    pause, resume = (
        standing(signed.grant, action, sequence=number)
        for number, action in enumerate((StandingAction.PAUSE, StandingAction.RESUME), 1)
    )
    denied = deny_entry("acme/ops/crew")
    later = [
        standing(signed.grant, StandingAction.REVOKE, sequence=3),
    ]
    first, gap = link.intent(3, (1,)), link.gap(5)
    second, third = link.intent(), other.intent()
    acks = [link.ack(first, 5), link.ack(second, 6), other.ack(third, 7)]
    arrived = [*arrivals(Link(), first), *arrivals(Link(), second, 2), *arrivals(Link(shard=1), third)]

    def documents(side: Side) -> list[Leaf]:
        return [paper_leaf(each, signed, side) for each in (pause, resume, denied)]

    def last(side: Side) -> list[Leaf]:
        return [paper_leaf(each, signed, side, drain_until_ms=TIME_MS + 60_000) for each in later]

    deny = event(
        Kind.DENY, Side.EGRESS, "us-east", actor=BRIDGE, action="read", rule="grant-missing", code=501,
        sentence="No grant names that stream.", stream="acme/ops/crew",
    )  # fmt: skip
    made = event(Kind.KEY, Side.INGRESS, "us-east", key_id=b"k" * 16, action="made", actor=OPERATOR)
    destroyed = event(
        Kind.KEY, Side.INGRESS, "us-east", key_id=b"d" * 16, action="destroyed", actor=OPERATOR,
        stream="acme/ops/crew", incarnation=b"g" * 16,
    )  # fmt: skip
    seal = event(Kind.SEAL, Side.EGRESS, "us-east", seal_file="register.parquet", seal_sha256=b"s" * 32)
    given_up = unclean_leaf(
        UncleanElection(
            stream="acme/ops/crew", incarnation="67" * 16, shard=0, epoch=9, election="0123456789abcdef", cause="recovered",
            leader="b2", end=20, given_up=("b1",), by=OPERATOR,
        ),
        region="us-east", time_ms=TIME_MS, writer=OPERATOR,
    )  # fmt: skip
    denied_there = Leaf(
        msgspec.structs.replace(
            deny.header, side=Side.INGRESS, destination_region="eu-west", actor=BRIDGE, action="ingest"
        )
    )
    logs: Logs = {
        EGRESS: [
            *papers[Side.EGRESS], *documents(Side.EGRESS), *first, gap, *second, *third, *acks, deny, seal,
            *last(Side.EGRESS),
        ],
        INGRESS: [*papers[Side.INGRESS], *documents(Side.INGRESS), *arrived, denied_there, *last(Side.INGRESS)],
        REGION: [*papers[Side.EGRESS], *documents(Side.EGRESS), deny, made, destroyed, given_up, *last(Side.EGRESS)],
    }  # fmt: skip
    return tuple((name, tuple(leaves)) for name, leaves in logs.items())


def arrivals(link: Link, intents: list[Leaf], first: int = 0) -> list[Leaf]:
    link.destination_offset = first
    return link.delivery(intents)


def files_of(
    log: str, leaves: Iterable[Leaf], *, signer: NoteSigner | None = None, cosigned_ms: int = COSIGNED_MS
) -> MemoryFiles:
    """The log with these leaves, signed by its key and cosigned by the other region, at that time."""
    found: dict[str, bytes] = {}
    data = [encoded(leaf) for leaf in leaves]
    tree = Tree()
    for each in data:
        tree.add(leaf_hash(each))
    assert len(data) < 256
    found[bundle_path(0, len(data))] = encode_bundle(data)
    for tile in tree.partial_tiles():
        found[tile_path(tile.level, tile.number, tile.width)] = tile.hashes
    text = Checkpoint(ORIGINS[log], len(data), tree.root()).text()
    signer = signer or log_signer(ORIGINS[log])
    cosigner = witness_signer(f"{WITNESS[log]}.acme/witness")
    signatures = (signer.sign(text), cosigner.cosign(text, cosigned_ms // 1000))
    found["checkpoint"] = encode_note(Note(text, signatures))
    return MemoryFiles(found)


@cache
def verified(log: str) -> bool:
    return verify_log(files_of(log, dict(world())[log]), trust()).ok


def reconciled(logs: Logs) -> bool:
    """What audit.spark.reconciliation compares, in plain Python: envelopes by link, stream, incarnation, shard and hash."""

    def sides(leaves: Iterable[Leaf], kind: Kind, side: Side) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {}
        for leaf in leaves:
            head = leaf.header
            if (head.kind, head.side) == (kind, side):
                place = (
                    head.source_region, head.destination_region, head.bridge, head.stream, head.incarnation, head.shard,
                    head.envelope_sha256,
                )  # fmt: skip
                found.setdefault(place, []).append((head.part, head.records, head.record_bytes, leaf.entries))
                ways.setdefault(place, set()).update({head.path} - {()})
        return found

    ways: dict[Any, set[tuple[str, ...]]] = {}
    intents = sides(logs[EGRESS], Kind.INTENT, Side.EGRESS)
    arrived = sides(logs[INGRESS], Kind.ACK, Side.INGRESS)
    receipts = sides(logs[EGRESS], Kind.ACK, Side.EGRESS)
    counted = {place: sum(part[1] for part in parts) for place, parts in intents.items()}
    received = {place: sum(part[1] for part in parts) for place, parts in receipts.items()}
    offsets = {
        (leaf.header.envelope_sha256): (
            leaf.header.destination_first_offset,
            leaf.header.destination_last_offset,
        )
        for leaf in logs[INGRESS]
        if leaf.header.kind is Kind.ACK
    }
    told = {
        leaf.header.envelope_sha256: (
            leaf.header.destination_first_offset,
            leaf.header.destination_last_offset,
        )
        for leaf in logs[EGRESS]
        if leaf.header.kind is Kind.ACK
    }
    alike = all(len(said) <= 1 for said in ways.values())
    return alike and intents == arrived and counted == received and offsets == told


def values(name: str, header: Header) -> Iterator[Any]:
    """Other values for a field: of its type, plausible and not."""
    held = getattr(header, name)
    if name == "kind":
        yield from (kind for kind in Kind if kind is not held)
    elif name == "terms":
        yield Terms(purpose="INVENTED", basis="adequacy", article="GDPR 45", reference="none")
    elif name == "path":
        yield ("ap-south", *(held or ("us-east",)))
        yield () if held else ("us-east",)
    elif name == "gap":
        yield from (kind for kind in GapKind if kind is not held)
    elif isinstance(held, Enum):
        yield from (each for each in type(held) if each is not held)
    elif isinstance(held, bool):
        yield not held
    elif isinstance(held, int):
        yield held + 1
        yield held - 1 if held else 10**12
    elif isinstance(held, bytes):
        yield bytes(len(held)) if any(held) else b"x" * (32 if "sha256" in name or "hash" in name else 16)
        if held:
            yield held[:-1] + bytes([held[-1] ^ 1])
    elif held is None:
        yield 0
    else:
        yield {"bridge": "spiffe://us-east.acme/bridge/other", "grant_id": "g-aaaaaaaaaaaaaaaa"}.get(
            name, "acme/ops/other"
        )
        yield "ap-south"


def changed(leaf: Leaf, field: str, signers: dict[str, Any]) -> Iterator[Leaf]:
    """The leaf with this field changed, re-signed by whatever key the party has for what the field holds."""
    header = leaf.header
    if field.startswith("entries."):
        entries = list(iter_entries(leaf))
        if not entries:
            return
        name = field.removeprefix("entries.")
        held = getattr(entries[0], name)
        for value in (held + 1, held + 7) if isinstance(held, int) else (bytes(len(held)), held[:-1] + b"?"):
            entries[0] = entries[0]._replace(**{name: value})
            packed = b"".join(_pack(each) for each in entries)
            size = sum(each.size for each in entries)
            yield Leaf(msgspec.structs.replace(header, record_bytes=size), packed)
        return
    if field == "receipt" and header.receipt:
        for signer in signers["receipts"]:
            for change in ({"records": header.records + 1}, {"time_ms": 1}, {}):
                told = msgspec.structs.replace(read_unverified(header.receipt), **change)
                yield Leaf(msgspec.structs.replace(header, receipt=sign_receipt(told, signer)), leaf.entries)
        yield Leaf(msgspec.structs.replace(header, receipt=b""), leaf.entries)
        return
    if field in ("document", "document_sha256") and header.document:
        from hashlib import sha256

        from policy.approval import parse_document

        document = None if header.kind is Kind.UNCLEAN else parse_document(header.document)
        forged = [b"", b"{}"]
        if document is None:
            forged.append(header.document.replace(b'"leader":"b2"', b'"leader":"b3"'))
        if isinstance(document, SignedDocument):
            for region in signers["policies"]:
                for old, new in (
                    (b'"purpose":"analytics"', b'"purpose":"marketing"'),
                    (b'"by":"alice"', b'"by":"eve"'),
                ):
                    body = document.body.replace(old, new)
                    if body != document.body:
                        forged.append(sign(document.purpose, region, body, signing_key(region)).encode_file())
        for data in forged:
            digest = sha256(data).digest() if data else header.document_sha256
            yield Leaf(msgspec.structs.replace(header, document=data, document_sha256=digest), leaf.entries)
    for value in values(field, header):
        yield Leaf(msgspec.structs.replace(header, **{field: value}), leaf.entries)


def _pack(entry: Any) -> bytes:
    import struct

    return struct.pack(">QqI32s16s", *entry)


HOLDS: dict[str, dict[str, Any]] = {
    "agent": {"receipts": [key(1)], "policies": []},
    "source operator": {"receipts": [key(6), key(8), key(1)], "policies": ["us-east"]},
    "destination operator": {"receipts": [key(3)], "policies": ["eu-west"]},
    "third region": {"receipts": [key(12)], "policies": ["ap-south"]},
}


@cache
def is_found(log: str, at: int, leaf: Leaf) -> bool:
    """Whether anything shows that this leaf stands there instead of the one that should."""
    logs = {name: list(leaves) for name, leaves in world()}
    logs[log][at] = leaf
    try:
        files = files_of(log, logs[log])
    except FelixError:
        # It cannot be written: whoever reads it finds it in step 6 (tests/audit/test_leaf.py).
        return True
    return not verify_log(files, trust()).ok or not reconciled(logs)


def used(leaf: Leaf, field: str) -> bool:
    return field.startswith("entries.") or getattr(leaf.header, field) != getattr(BARE, field)


BARE = Header(kind=Kind.KEY, side=Side.EGRESS, time_ms=0, source_region="", destination_region="")


def test_the_world_verifies_and_reconciles() -> None:
    for log in LOGS:
        report = verify_log(files_of(log, dict(world())[log]), trust())
        assert report.ok, (log, report.findings[:3])
    assert reconciled({name: list(leaves) for name, leaves in world()})
    kinds = {leaf.header.kind for _, leaves in world() for leaf in leaves}
    assert kinds == set(Kind), "every kind is tried"


@pytest.mark.parametrize("party", [party for party in PARTIES if SIGNS[party]])
def test_what_one_party_changes_is_found_or_in_the_table(party: str, tally: Tally, attack_scale: int) -> None:
    counts = dict.fromkeys(("found", "can", "unused", "tried"), 0)
    wrong: list[str] = []
    for log in SIGNS[party]:
        done: set[tuple[Kind, str]] = set()
        for at, leaf in enumerate(dict(world())[log]):
            for field in (*HEADER_FIELDS, *ENTRY_FIELDS):
                kind = leaf.header.kind
                if (kind, field) in done or (field in ENTRY_FIELDS and not leaf.entries):
                    continue
                done.add((kind, field))
                cell, is_used = Cell(party, log, kind.name, field), used(leaf, field)
                others = [other for other in changed(leaf, field, HOLDS[party]) if other != leaf]
                assert others, f"{cell}: nothing was tried"
                if not is_used and attack_scale == 1:
                    del others[1:]
                outcomes = [is_found(log, at, other) for other in others]
                counts["tried"] += len(outcomes)
                why = reason(cell, is_used)
                if all(outcomes):
                    counts["found"] += 1
                elif why:
                    counts["unused" if why == UNUSED else "can"] += 1
                else:
                    wrong.append(
                        f"{cell}: {outcomes.count(False)} of {len(outcomes)} changes are found by nothing"
                    )
    assert not wrong, "\n".join(wrong)
    tally(f"cells of the {party} found", counts["found"])
    tally(f"cells that the {party} can write, by the table", counts["can"])
    tally(f"cells of the {party} that no reader asks for", counts["unused"])
    tally("leaves changed and re-signed", counts["tried"])


@pytest.mark.parametrize("party", [party for party in PARTIES if SIGNS[party]])
def test_a_way_that_the_records_did_not_take_is_found(party: str) -> None:
    for log in {EGRESS, INGRESS} & set(SIGNS[party]):
        for at, leaf in enumerate(dict(world())[log]):
            if leaf.header.path:
                lies = [other for other in changed(leaf, "path", HOLDS[party]) if other.header.path]
                assert lies and all(is_found(log, at, lie) for lie in lies), (log, leaf.header.kind)


def test_who_signs_none_of_the_logs_is_found_by_the_signature(tally: Tally) -> None:
    """ap-south, or either operator in the other's log: whatever they change, the checkpoint is not the log's."""
    tried = 0
    for party in PARTIES:
        for log in set(LOGS) - set(SIGNS[party]):
            for seed in (12, 32, 3, 6, 8):
                signer = NoteSigner.from_key(ORIGINS[log], key(seed), Algorithm.ED25519)
                tried += 1
                report = verify_log(
                    files_of(log, dict(world())[log], signer=signer), trust("us-east", "eu-west", "ap-south")
                )
                assert 1 in {finding.step for finding in report.findings}
    tally("logs signed by who does not keep them", tried)


def test_every_rule_of_the_table_names_real_fields_and_kinds() -> None:
    for rule in CAN:
        assert rule.fields <= {*HEADER_FIELDS, *ENTRY_FIELDS} and rule.kinds <= set(Kind.__members__)
        assert rule.logs <= set(LOGS) and rule.reason
    assert get_args(Header.__annotations__) is not None and COMMITMENT_KEY.key_id and receipt_for
