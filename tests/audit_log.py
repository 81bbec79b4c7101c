"""Material for tests of audit logs: keys, leaves of a link as a bridge and a region write them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, Final

from audit.leaf import (
    CommitmentKey,
    Committer,
    GapKind,
    Header,
    Kind,
    Leaf,
    Side,
    intent_leaves,
)
from audit.note import Algorithm, NoteSigner
from audit.position import LinkShard
from audit.receipt import Receipt, sign_receipt
from audit.signed_body import ReceiptKeys
from audit.trust import Trust
from felix.batch import Record
from felix.provenance import path_sha256
from keys.authority import RegionAuthority, create_authority
from keys.bundle import AuditKey, RegionBundle
from keys.hybrid import HybridKeyPair
from keys.signing import SigningKey
from policy.grant import StandingAction

STREAM: Final = "acme/ops/departures"
BRIDGE: Final = "spiffe://us-east.acme/bridge/us-to-eu"
OPERATOR: Final = "spiffe://us-east.acme/operator/alice"
INCARNATION: Final = b"i" * 16
COMMITMENT_KEY: Final = CommitmentKey(b"c" * 16, b"s" * 32)
TIME_MS: Final = 1_760_000_000_000
DOCUMENT: Final[dict[str, Any]] = {"document": b"signed", "document_sha256": sha256(b"signed").digest()}
EGRESS_ORIGIN: Final = "us-east.acme/bridge/us-to-eu"
INGRESS_ORIGIN: Final = "eu-west.acme/audit"
REGION_ORIGIN: Final = "us-east.acme/audit"
SEEDS: Final = {EGRESS_ORIGIN: 1, INGRESS_ORIGIN: 5, REGION_ORIGIN: 7}
"""Of each log's signing key."""
WITNESS_SEEDS: Final = {"eu-west.acme/witness": 2, "us-east.acme/witness": 4, "ap-south.acme/witness": 13}


def key(seed: int) -> SigningKey:
    return SigningKey.from_seed(bytes([seed]) * 32)


def log_signer(origin: str = EGRESS_ORIGIN, seed: int = 0) -> NoteSigner:
    return NoteSigner.from_key(origin, key(seed or SEEDS[origin]), Algorithm.ED25519)


def witness_signer(name: str = "eu-west.acme/witness", seed: int = 0) -> NoteSigner:
    return NoteSigner.from_key(name, key(seed or WITNESS_SEEDS[name]), Algorithm.COSIGNATURE)


COLLIDING: Final = {
    "us-east.acme/bridge/us-to-eu": (127_527, 153_337),
    "ap-south.acme/witness": (65_664, 101_644),
    "eu-west.acme/witness": (23_248, 97_250),
}
"""Numbers of two keys that have one key id under this name, as a log's or as a witness's: found in seconds."""


def colliding(name: str) -> tuple[SigningKey, SigningKey]:
    first, second = (
        SigningKey.from_seed(sha256(b"felix test %d" % number).digest()) for number in COLLIDING[name]
    )
    return first, second


RECEIPT_KEY: Final = key(3)
"""eu-west's; us-east's is `key(6)`."""
RECEIPT_KEYS: Final = ReceiptKeys.of("eu-west", INGRESS_ORIGIN, [RECEIPT_KEY.verify_key.public])
POLICY_SEEDS: Final = {"us-east": 8, "eu-west": 10, "ap-south": 12}
COUNTRIES: Final = {"us-east": ("US", "US"), "eu-west": ("IE", "EU"), "ap-south": ("IN", "IN")}


@cache
def authority(region: str) -> RegionAuthority:
    return create_authority(region, "acme", TIME_MS - 86_400_000)


@cache
def _import_key() -> bytes:
    return HybridKeyPair.generate().public.encoded


def region_bundle(region: str, **changes: object) -> RegionBundle:
    """The bundle of a region of these tests: the keys of `SEEDS`, `WITNESS_SEEDS`, `RECEIPT_KEY`, `POLICY_SEEDS`."""
    fields: dict[str, object] = {
        "region": region,
        "mesh": "acme",
        "country": COUNTRIES[region][0],
        "jurisdiction": COUNTRIES[region][1],
        "issued_ms": TIME_MS,
        "root_pem": authority(region).anchor().root_pem.decode(),
        "policy_keys": (key(POLICY_SEEDS[region]).verify_key.public,),
        "receipt_keys": ((RECEIPT_KEY if region == "eu-west" else key(6)).verify_key.public,),
        "audit_keys": tuple(
            AuditKey(name, role, key(seed).verify_key.public)
            for role, seeds in (("log", SEEDS), ("cosigner", WITNESS_SEEDS))
            for name, seed in seeds.items()
            if name.startswith(f"{region}.acme/")
        ),
        "import_key": _import_key(),
    }
    return RegionBundle(**(fields | changes))  # type: ignore[arg-type]


@cache
def trust(*regions: str) -> Trust:
    """Trust in these regions; in both ends of the link where none is named."""
    return Trust.of(map(region_bundle, regions or ("us-east", "eu-west")))


class Link:
    """Writes leaves as the two sides of a link do, batch after batch."""

    def __init__(self, shard: int = 0, grant_id: str = "") -> None:
        """`grant_id`: a made-up one; without it, the grant of `signed_grants.signed_grant()`."""
        from signed_grants import signed_grant

        self.signed = signed_grant()
        self.shard, self.grant_id = shard, grant_id or self.signed.grant
        self.offset = self.destination_offset = 0
        self.time_ms = TIME_MS
        self.random = random.Random(shard)

    @property
    def key(self) -> LinkShard:
        return LinkShard(BRIDGE, "us-east", "eu-west", STREAM, self.shard, STREAM)

    def header(self, kind: Kind, side: Side = Side.EGRESS, **more: object) -> Header:
        self.time_ms += 1
        fields: dict[str, object] = {
            "kind": kind,
            "side": side,
            "time_ms": self.time_ms,
            "source_region": "us-east",
            "destination_region": "eu-west",
            "bridge": BRIDGE,
            "stream": STREAM,
            "destination_stream": STREAM,
            "shard": self.shard,
            "source_epoch": 1,
            "incarnation": INCARNATION,
            "grant_id": self.grant_id,
            "terms_hash": self.signed.terms.hash(),
            "policy_version": 1,
            "policy_hash": b"p" * 32,
        }
        return Header(**(fields | more))  # type: ignore[arg-type]

    def grant(self, side: Side = Side.EGRESS, **more: object) -> Leaf:
        """The GRANT leaf alone."""
        from signed_grants import paper_leaf

        said = {"grant_id": self.grant_id} | more
        return paper_leaf(self.signed.export, self.signed, side, self.time_ms, **said)

    def agreement(self, side: Side = Side.EGRESS) -> list[Leaf]:
        """All documents that must stand before the first crossing."""
        from signed_grants import grant_leaves

        return grant_leaves(self.signed, side, self.time_ms)

    def records(self, count: int) -> list[Record]:
        return [record(self.offset + i, self.time_ms) for i in range(count)]

    def intent(self, count: int = 3, withhold: tuple[int, ...] = ()) -> list[Leaf]:
        """WITHHELD and INTENT leaves of the next batch; `withhold` counts from the batch's first record."""
        records, first = self.records(count), self.offset
        covered = {"first_offset": first, "last_offset": first + count - 1}
        envelope = sha256(b"envelope %d %d" % (self.shard, first)).digest()
        digests = {"source_batch_sha256": sha256(b"batch %d" % first).digest(), "envelope_sha256": envelope}
        committer = Committer(COMMITMENT_KEY, STREAM, INCARNATION, self.shard)
        leaves: list[Leaf] = []
        stay = [records[at] for at in withhold]
        if stay:
            held = self.header(Kind.WITHHELD, reason="transform-failed", code=509, **covered)
            leaves += intent_leaves(held, stay, committer)
        cross = [record for at, record in enumerate(records) if at not in withhold]
        path = ("us-east",) if cross else ()
        leaves += intent_leaves(self.header(Kind.INTENT, path=path, **covered, **digests), cross, committer)
        self.offset += count
        return leaves

    def delivery(self, intents: list[Leaf]) -> list[Leaf]:
        """The ingress log's ACK leaves for these INTENT leaves."""
        leaves = []
        for leaf in intents:
            if leaf.header.kind is not Kind.INTENT:
                continue
            first = self.destination_offset
            self.destination_offset += leaf.header.records
            fields = {name: getattr(leaf.header, name) for name in leaf.header.__struct_fields__}
            fields |= {
                "kind": Kind.ACK,
                "side": Side.INGRESS,
                "destination_first_offset": first if leaf.entries else None,
                "destination_last_offset": self.destination_offset - 1 if leaf.entries else None,
                "attempt": 1,
            }
            leaves.append(Leaf(Header(**fields), leaf.entries))
        return leaves

    def ack(self, intents: list[Leaf], ingress_index: int = 0) -> Leaf:
        """The egress log's ACK, with the receipt that the destination signs for these INTENT leaves."""
        intents = [leaf for leaf in intents if leaf.header.kind is Kind.INTENT]
        head, count = intents[0].header, sum(leaf.header.records for leaf in intents)
        to = self.destination_offset
        self.destination_offset += count
        ack = self.header(
            Kind.ACK,
            first_offset=head.first_offset,
            last_offset=intents[-1].header.last_offset,
            records=count,
            envelope_sha256=head.envelope_sha256,
            destination_first_offset=to if count else None,
            destination_last_offset=to + count - 1 if count else None,
            attempt=1,
            path=head.path,
        )
        receipt = receipt_for(ack, intents, ingress_index)
        return Leaf(self.header(**{**_fields(ack), "receipt": receipt}))  # type: ignore[arg-type]

    def gap(self, count: int, gap: GapKind = GapKind.RETENTION) -> Leaf:
        first = self.offset
        self.offset += count
        return Leaf(self.header(Kind.GAP, first_offset=first, last_offset=first + count - 1, gap=gap))

    def deny(self) -> Leaf:
        return Leaf(
            self.header(
                Kind.DENY,
                actor=BRIDGE,
                action="read",
                rule="grant-missing",
                code=501,
                sentence="No grant names that stream.",
                stream="acme/ops/crew",
            )
        )

    def revoke(self) -> Leaf:
        from signed_grants import paper_leaf, standing

        document = standing(self.signed.grant, StandingAction.REVOKE)
        return paper_leaf(document, self.signed, time_ms=self.time_ms, sentence="No longer needed.")


def _fields(header: Header) -> dict[str, object]:
    return {name: getattr(header, name) for name in header.__struct_fields__}


def receipt_for(ack: Header, intents: Sequence[Leaf], ingress_index: int = 0) -> bytes:
    """What the destination signs that has the records of these leaves."""
    assert ack.first_offset is not None and ack.last_offset is not None
    receipt = Receipt(
        grant_id=ack.grant_id,
        terms_hash=ack.terms_hash,
        source_region=ack.source_region,
        destination_region=ack.destination_region,
        bridge=ack.bridge,
        stream=ack.stream,
        destination_stream=ack.destination_stream,
        shard=ack.shard,
        source_epoch=ack.source_epoch,
        incarnation=ack.incarnation,
        first_offset=ack.first_offset,
        last_offset=ack.last_offset,
        records=ack.records,
        envelope_sha256=ack.envelope_sha256,
        destination_first_offset=ack.destination_first_offset,
        destination_last_offset=ack.destination_last_offset,
        ingress_origin=INGRESS_ORIGIN,
        ingress_index=ingress_index,
        time_ms=ack.time_ms,
        entries_sha256=sha256(b"".join(leaf.entries for leaf in intents)).digest(),
        path_sha256=path_sha256(ack.path),
    )
    return sign_receipt(receipt, RECEIPT_KEY)


def record(offset: int, time_ms: int) -> Record:
    """The record at this offset, as it crosses; every third has headers."""
    headers = {} if offset % 3 else {"felix-path": b"us-east", "note": b"n%d" % offset}
    return Record(offset, time_ms, b"key-%d" % (offset % 5), headers, payload(offset))


def payload(offset: int) -> bytes:
    return b'{"flight": %d, "tailnum": "pseudonym"}' % offset


def egress_appends(batches: int, link: Link | None = None) -> Iterator[list[Leaf]]:
    """What a bridge appends for so many batches: the documents of a grant, then per batch an append of its INTENT and one of its ACK."""
    link = link or Link()
    yield link.agreement()
    for at in range(batches):
        withhold = (1,) if at % 10 == 3 else (0, 1, 2) if at % 10 == 7 else ()
        if at % 25 == 24:
            yield [link.gap(5)]
        if at % 40 == 39:
            yield [link.deny()]
        intents = link.intent(3, withhold)
        yield intents
        yield [link.ack(intents)]
