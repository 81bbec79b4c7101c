"""Real audit logs for the report's tests: two links' worth of days, written by the real trail.

The world is made once, by hand, in this order: two grants, with all that is signed for them; batches over several days in two streams and two shards, with
records withheld, in some batches all of them; denied attempts for a stream without a grant; a gap at the source; a grant that ends by its own term,
after which attempts are denied; a last batch that is still on its way. What is counted afterwards is counted from the
files (`count_files`), by code that shares nothing with the reports but the leaf codec.
"""

from __future__ import annotations

import random
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from audit_log import (
    BRIDGE,
    EGRESS_ORIGIN,
    INGRESS_ORIGIN,
    REGION_ORIGIN,
    log_signer,
    receipt_for,
    trust,
    witness_signer,
)
from signed_grants import (
    Signed,
    grant_leaves,
    opened_policy,
    paper_leaf,
    policy_document,
    signed_grant,
    standing,
)

from audit.errors import AuditUnavailableError
from audit.leaf import (
    CommitmentKey,
    Committer,
    GapKind,
    Header,
    Kind,
    Leaf,
    Side,
    decode_leaf,
    intent_leaves,
    iter_entries,
    split_leaves,
)
from audit.spark.report import ReportResult
from audit.tile import bundle_path
from audit.trail import Trail, TrailSettings
from audit.witness import MemoryWitnessStore, Witness
from felix.batch import Record
from policy.grant import StandingAction
from policy.terms import Basis
from policy.transform import KeyRule, build_spec

__all__ = ["EGRESS_ORIGIN", "INGRESS_ORIGIN", "REGION_ORIGIN", "trust"]

DAY_MS = 86_400_000
START_MS = 1_760_054_400_000
"""2025-10-10T00:00:00Z"""
DAYS = 5
DEPARTURES = "acme/ops/departures"
ORDERS = "acme/payments/orders"
CREW = "acme/ops/crew"
INCARNATION = sha256(b"incarnation").digest()[:16]
OVER = ("ap-south", "us-east")
"""Where the records of two batches of ORDERS had been, whose grant lets them."""
COMMITMENT_KEY = CommitmentKey(sha256(b"commitment key").digest()[:16], sha256(b"secret").digest())
QUIET = TrailSettings(checkpoint_interval_ms=3_600_000, checkpoint_leaves=1 << 30)

SIGNED = {
    DEPARTURES: signed_grant(
        purpose="delay analytics", mechanism="module two", transfer_assessment="TIA-2026-003",
        categories=("operational", "contact"), importer="Acme Europe B.V. <script>alert(1)</script>",
        owner="flight operations", stream=DEPARTURES, expires=START_MS + 90 * DAY_MS,
        transform=build_spec(
            pseudonymize=["tailnum"], drop=["crew"], filter_="carrier != 'XX'", headers=["x-batch"], trace=True
        ),
    ),
    ORDERS: signed_grant(
        purpose="fraud detection", basis=Basis.ADEQUACY, reference="=Decision 2023/1795", categories=("payment",),
        importer="Acme Europe B.V.", owner="payments", stream=ORDERS, expires=START_MS + 3 * DAY_MS, onward=True,
        transform=build_spec(keep=["amount"], mask=["card:4"], hash_=["customer"], key=KeyRule.HASH),
    ),
}  # fmt: skip
"""Both grants, with everything that regions and approvers sign."""
TERMS = {stream: signed.terms for stream, signed in SIGNED.items()}


class Made(NamedTuple):
    """Two logs, egress and ingress, and the report that was made of them."""

    logs: list[Path]
    result: ReportResult


def terms_hash(stream: str) -> bytes:
    return TERMS[stream].hash() if stream in TERMS else sha256(b"terms " + stream.encode()).digest()


def grant_id(stream: str) -> str:
    return SIGNED[stream].grant if stream in SIGNED else f"g-{terms_hash(stream).hex()[:16]}"


@dataclass
class World:
    """Both sides' appends, in order, and where each shard stands."""

    egress: list[list[Leaf]] = field(default_factory=list)
    ingress: list[list[Leaf]] = field(default_factory=list)
    offsets: Counter[tuple[str, int]] = field(default_factory=Counter)
    arrived: Counter[tuple[str, int]] = field(default_factory=Counter)
    random: random.Random = field(default_factory=lambda: random.Random(20250615))

    def header(self, kind: Kind, side: Side, time_ms: int, stream: str, **more: Any) -> Header:
        fields: dict[str, Any] = {
            "kind": kind, "side": side, "time_ms": time_ms, "source_region": "us-east", "destination_region": "eu-west",
            "bridge": BRIDGE, "stream": stream,
        }  # fmt: skip
        return Header(**(fields | more))

    def granted(self, stream: str, shard: int) -> dict[str, Any]:
        return {
            "destination_stream": stream, "shard": shard, "source_epoch": 1, "incarnation": INCARNATION,
            "grant_id": grant_id(stream), "terms_hash": terms_hash(stream), "policy_version": 1,
            "policy_hash": opened_policy(policy_document("us-east")).hash, "source_key_id": sha256(stream.encode()).digest()[:16],
        }  # fmt: skip

    def grant(self, stream: str, time_ms: int, signed: Signed | None = None) -> None:
        """All documents of a grant, in both logs: policy, both halves, approvals."""
        for side, appends in ((Side.EGRESS, self.egress), (Side.INGRESS, self.ingress)):
            appends.append(grant_leaves(signed or SIGNED[stream], side, time_ms))

    def batch(
        self,
        stream: str,
        shard: int,
        time_ms: int,
        count: int = 40,
        *,
        withheld: float = 0.02,
        receipt: bool = True,
        arrives: bool = True,
        change: Callable[[list[Leaf]], list[Leaf]] = lambda leaves: leaves,
        path: tuple[str, ...] = ("us-east",),
    ) -> None:
        """One batch: WITHHELD and INTENT, its arrival, its receipt. `change` is what an ill ingress log would say."""
        place = stream, shard
        first = self.offsets[place]
        self.offsets[place] += count
        records = [
            Record(
                first + at, time_ms - self.random.randrange(5_000), b"key %d" % (at % 7), {},
                self.random.randbytes(self.random.randrange(60, 300)),
            )
            for at in range(count)
        ]  # fmt: skip
        stay = [record for record in records if self.random.random() < withheld]
        cross = [record for record in records if record not in stay]
        committer = Committer(COMMITMENT_KEY, stream, INCARNATION, shard)
        common = self.granted(stream, shard) | {"first_offset": first, "last_offset": first + count - 1}
        leaves: list[Leaf] = []
        if stay:
            header = self.header(
                Kind.WITHHELD, Side.EGRESS, time_ms, stream, reason="transform-failed", code=509,
                sentence="The record is not JSON.", **common,
            )  # fmt: skip
            leaves += intent_leaves(header, stay, committer)
        envelope = sha256(f"{stream} {shard} {first} {common['grant_id']}".encode()).digest()
        common |= {"envelope_sha256": envelope}
        header = self.header(
            Kind.INTENT, Side.EGRESS, time_ms, stream, source_batch_sha256=sha256(envelope).digest(),
            destination_key_id=sha256(b"import key").digest()[:16], path=path if cross else (), **common,
        )  # fmt: skip
        intents = intent_leaves(header, cross, committer)
        self.egress.append(leaves + intents)
        self.cross(common, intents, receipt=receipt, arrives=arrives, change=change)

    def cross(
        self,
        common: dict[str, Any],
        intents: list[Leaf],
        *,
        receipt: bool = True,
        arrives: bool = True,
        change: Callable[[list[Leaf]], list[Leaf]] = lambda leaves: leaves,
    ) -> None:
        """What follows INTENT leaves: the arrival and the receipt. An envelope without records has no offsets there."""
        head = intents[0].header
        stream, time_ms, place = head.stream, head.time_ms, (head.stream, head.shard)
        count = sum(leaf.header.records for leaf in intents)
        to: dict[str, Any] = {}
        path = head.path if count else ()
        if count:
            first = self.arrived[place]
            to = {"destination_first_offset": first, "destination_last_offset": first + count - 1}
        self.arrived[place] += count
        at = sum(map(len, self.ingress))
        if arrives:
            header = self.header(
                Kind.ACK, Side.INGRESS, time_ms + 80, stream, attempt=1, path=path,
                commitment_key_id=COMMITMENT_KEY.key_id,
                **(common | to | {"destination_key_id": sha256(b"sealing key").digest()[:16]}),
            )  # fmt: skip
            self.ingress.append(change(split_leaves(header, b"".join(leaf.entries for leaf in intents))))
        if receipt:
            ack = self.header(
                Kind.ACK,
                Side.EGRESS,
                time_ms + 150,
                stream,
                records=count,
                attempt=1,
                path=path,
                **(common | to),
            )
            fields = {name: getattr(ack, name) for name in ack.__struct_fields__}
            self.egress.append([Leaf(Header(**(fields | {"receipt": receipt_for(ack, intents, at)})))])

    def deny(self, stream: str, time_ms: int, code: int, sentence: str, **more: Any) -> None:
        header = self.header(
            Kind.DENY, Side.EGRESS, time_ms, stream, actor=BRIDGE, action="read", rule="grant", code=code,
            sentence=sentence, **more,
        )  # fmt: skip
        self.egress.append([Leaf(header)])

    def gap(self, stream: str, shard: int, count: int, time_ms: int) -> None:
        """A GAP leaf, and the empty envelope that moves the destination's position over it."""
        first = self.offsets[stream, shard]
        self.offsets[stream, shard] += count
        common = self.granted(stream, shard) | {"first_offset": first, "last_offset": first + count - 1}
        gap = self.header(Kind.GAP, Side.EGRESS, time_ms, stream, gap=GapKind.RETENTION, **common)
        envelope = sha256(f"{stream} {shard} {first}".encode()).digest()
        common |= {"envelope_sha256": envelope}
        intent = self.header(
            Kind.INTENT, Side.EGRESS, time_ms, stream, source_batch_sha256=sha256(envelope).digest(),
            commitment_key_id=COMMITMENT_KEY.key_id, **common,
        )  # fmt: skip
        intents = split_leaves(intent, b"")
        self.egress.append([Leaf(gap), *intents])
        self.cross(common, intents)

    def revoke(self, stream: str, time_ms: int, region: str = "us-east") -> None:
        """A revocation that this region signed, in the egress log."""
        document = standing(grant_id(stream), StandingAction.REVOKE, region, at=time_ms)
        leaf = paper_leaf(document, SIGNED[stream], time_ms=time_ms, sentence="The contract ended.")
        self.egress.append([leaf])


def five_days(batches: int = 200) -> World:
    """The world of the module's docstring."""
    world = World()
    for stream in TERMS:
        world.grant(stream, START_MS - 1_000)
    for number in range(batches):
        time_ms = START_MS + DAYS * DAY_MS * number // batches
        stream = ORDERS if number % 3 == 1 else DEPARTURES
        if number % 31 == 7:
            world.deny(CREW, time_ms, 501, "No grant lets acme/ops/crew leave us-east for eu-west.")
        if stream == ORDERS and time_ms >= TERMS[ORDERS].expires:
            world.deny(
                ORDERS, time_ms, 503, "The grant has expired.", grant_id=grant_id(ORDERS),
                terms_hash=terms_hash(ORDERS),
            )  # fmt: skip
            continue
        if number == batches // 2:
            world.gap(DEPARTURES, 0, 25, time_ms)
        path = OVER if number in (61, 64) else ("us-east",)
        world.batch(stream, number % 2, time_ms + 10, withheld=1.0 if number % 50 == 20 else 0.02, path=path)
        if number == 64:
            # As before INTENTs named the regions of records that had taken several ways.
            world.egress[-2] = [
                Leaf(msgspec.structs.replace(leaf.header, path=()), leaf.entries) for leaf in world.egress[-2]
            ]
    return world


def write_log(path: Path, origin: str, appends: Iterable[list[Leaf]], *, cosign: bool = False) -> None:
    """Write a log with the real trail, wait until it is durable, checkpoint and close it."""
    other = "us-east" if origin == INGRESS_ORIGIN else "eu-west"
    signer = witness_signer(f"{other}.acme/witness")
    trail = Trail.open(path, log_signer(origin), witnesses=[signer.key], settings=QUIET)
    failed: list[AuditUnavailableError] = []
    ended = threading.Semaphore(0)

    def done(_: int, error: AuditUnavailableError | None) -> None:
        if error is not None:
            failed.append(error)
        ended.release()

    count = 0
    for leaves in appends:
        trail.append_nowait(leaves, done)
        count += 1
    for _ in range(count):
        assert ended.acquire(timeout=60)
    assert not failed
    note = trail.publish()
    if cosign:
        witness = Witness(
            signer, [trail.key], MemoryWitnessStore(), lambda: (START_MS + 400 * DAY_MS) // 1000
        )
        trail.add_cosigned(witness.cosign(note, []))
    trail.close()


def write_world(folder: Path, world: World, *, cosign: bool = True) -> list[Path]:
    """Both logs of a world: egress and ingress."""
    paths = [folder / "egress", folder / "ingress"]
    write_log(paths[0], EGRESS_ORIGIN, world.egress, cosign=cosign)
    write_log(paths[1], INGRESS_ORIGIN, world.ingress, cosign=cosign)
    return paths


def read_leaves(path: Path) -> list[Leaf]:
    """Every leaf of a log, straight from its entry bundles: no tiles, no tree, no Spark."""
    size = int((path / "checkpoint").read_text().split("\n")[1])
    leaves: list[Leaf] = []
    for first in range(0, size, 256):
        width = min(256, size - first)
        data = (path / bundle_path(first // 256, width)).read_bytes()
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from(">H", data, at)
            leaves.append(decode_leaf(data[at + 2 : at + 2 + length]))
            at += 2 + length
    assert len(leaves) == size
    return leaves


def count_files(egress: Path, ingress: Path) -> dict[str, Counter[Any]]:
    """Totals by record entry, in plain Python: one dictionary per question."""
    counts: dict[str, Counter[Any]] = {
        name: Counter()
        for name in (
            "crossed",
            "bytes",
            "withheld",
            "denied",
            "delivered",
            "acknowledged",
            "gap",
            "day",
            "entries",
        )
    }
    for leaf in read_leaves(egress):
        header = leaf.header
        entries = list(iter_entries(leaf))
        counts["entries"]["all"] += len(entries)
        day = header.time_ms // DAY_MS
        match header.kind:
            case Kind.INTENT:
                for entry in entries:
                    counts["crossed"][header.stream] += 1
                    counts["bytes"][header.stream] += entry.size
                    counts["day"][day, header.stream] += 1
            case Kind.WITHHELD:
                counts["withheld"][header.stream] += len(entries)
            case Kind.DENY:
                counts["denied"][header.stream] += 1
            case Kind.ACK:
                counts["acknowledged"][header.stream] += header.records
            case Kind.GAP:
                assert header.first_offset is not None and header.last_offset is not None
                counts["gap"][header.stream] += header.last_offset - header.first_offset + 1
    for leaf in read_leaves(ingress):
        count = len(list(iter_entries(leaf)))
        counts["entries"]["all"] += count
        if leaf.header.kind is Kind.ACK:
            counts["delivered"][leaf.header.stream] += count
    return counts
