"""Two audit logs of one link, of any size: what a bridge and a destination would have written, made fast.

Genuine: leaves pass `audit.leaf.encode_leaf`, trees and tiles are RFC 6962 and C2SP tlog-tiles, checkpoints are signed and
cosigned by the other region, every receipt is signed by the destination, and the documents of each grant stand before its
first crossing, signed by whom they must be signed by. Made up: contents. Commitments and tags are
random bytes of the right length, which cannot be distinguished from real ones without the commitment key, because computing
them costs more than all the rest.

The logs have the form of an exported copy: no write-ahead file. Callers: cli.benchmark.reporting,
tests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Any, Final

import msgspec

from audit.checkpoint import Checkpoint
from audit.leaf import ENTRY_BYTES, Header, Kind, Leaf, Side, encode_leaf, split_leaves
from audit.merkle import TILE_WIDTH, Tile, Tree, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note
from audit.receipt import Receipt, sign_receipt
from audit.tile import CHECKPOINT_PATH, bundle_path, encode_bundle, tile_path
from audit.trust import Trust
from cli.benchmark.signed_link import (
    BRIDGE,
    DESTINATION,
    EGRESS_ORIGIN,
    INGRESS_ORIGIN,
    SOURCE,
    SignedLink,
    seeded_key,
    witness,
)
from felix.provenance import path_sha256

START_MS: Final = 1_760_000_000_000
BATCH_MS: Final = 400
"""Between two batches: 20,000,000 records in batches of 1,000 then span some two hours."""
_ENTRY: Final = Struct(">QqI32s16s")


class LogPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is made. `records` counts those that cross or are withheld."""

    records: int
    batch_records: int = 1_000
    streams: int = 2
    shards: int = 2
    withheld_every: int = 1_000
    """one record of so many stays; in `withheld_batches_every`th batches only"""
    withheld_batches_every: int = 10
    seed: int = 1


class LogBooks(msgspec.Struct, kw_only=True):
    """What was made, counted while it was made."""

    crossed: int = 0
    withheld: int = 0
    bytes: int = 0
    batches: int = 0
    egress_leaves: int = 0
    ingress_leaves: int = 0
    log_bytes: int = 0


class MadeLogs(msgspec.Struct, frozen=True):
    """Where the logs are, what is in them, and the two regions that a reader trusts."""

    egress: Path
    ingress: Path
    books: LogBooks
    trust: Trust


class LogWriter:
    """Writes one log as an exported copy: bundles, tiles, one checkpoint at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tree = Tree()
        self._bundle: list[bytes] = []
        self.bytes = 0

    @property
    def size(self) -> int:
        """Leaves so far."""
        return self._tree.size

    def append(self, leaves: Sequence[Leaf]) -> None:
        """Add leaves to the end."""
        for leaf in leaves:
            data = encode_leaf(leaf)
            self._bundle.append(data)
            full = self._tree.add(leaf_hash(data))
            if full:
                self._write(bundle_path(full[0].number), encode_bundle(self._bundle))
                self._bundle = []
            for tile in full:
                self._tile(tile)

    def close(self, signer: NoteSigner, witness: NoteSigner) -> None:
        """Write what is partial, and a checkpoint signed and cosigned."""
        if self._bundle:
            number = self.size // TILE_WIDTH
            self._write(bundle_path(number, len(self._bundle)), encode_bundle(self._bundle))
        for tile in self._tree.partial_tiles():
            self._tile(tile)
        text = Checkpoint(signer.key.name, self.size, self._tree.root()).text()
        signatures = (signer.sign(text), witness.cosign(text, START_MS // 1000))
        self._write(CHECKPOINT_PATH, encode_note(Note(text, ()).with_signatures(signatures)))

    def _tile(self, tile: Tile) -> None:
        self._write(tile_path(tile.level, tile.number, tile.width), tile.hashes)

    def _write(self, path: str, data: bytes) -> None:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        self.bytes += len(data)


def _digest(*parts: object) -> bytes:
    return sha256(" ".join(str(part) for part in parts).encode()).digest()


class _Link:
    """Headers of the link's leaves, and where each shard stands."""

    def __init__(self, plan: LogPlan) -> None:
        self.plan = plan
        self.random = random.Random(plan.seed)  # noqa: S311 - the same seed must give the same bytes
        self.offsets: Counter[tuple[str, int]] = Counter()
        self.arrived: Counter[tuple[str, int]] = Counter()
        # With names of this length, the two sides' headers leave room for another number of entries in a leaf: they cut
        # long batches differently, as the sides of a real link may.
        self.streams = [
            f"bench/reports/made-up-for-measuring-time-{number}" for number in range(plan.streams)
        ]
        self.signed = SignedLink(plan.seed, self.streams, START_MS)

    def header(self, kind: Kind, side: Side, time_ms: int, stream: str, **more: Any) -> Header:
        fields: dict[str, Any] = {
            "kind": kind, "side": side, "time_ms": time_ms, "source_region": SOURCE, "destination_region": DESTINATION,
            "bridge": BRIDGE, "stream": stream, "destination_stream": stream,
            **self.signed.crossing(stream),
        }  # fmt: skip
        return Header(**(fields | more))

    def entries(self, first: int, count: int, time_ms: int) -> bytes:
        """Packed entries of consecutive offsets; digests and tags are random."""
        noise = self.random.randbytes(48 * count)
        pack, sizes = _ENTRY.pack, self.random.randbytes(count)
        return b"".join(
            [
                pack(first + at, time_ms + at % 100, 200 + sizes[at], noise[48 * at : 48 * at + 32], noise[48 * at + 32 : 48 * at + 48])
                for at in range(count)
            ]
        )  # fmt: skip


def _drop(entries: bytes, places: Sequence[int]) -> tuple[bytes, bytes]:
    """The entries without those at `places`, and those."""
    view = memoryview(entries)
    stay = b"".join(view[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES] for at in places)
    rest, before = [], 0
    for at in places:
        rest.append(view[before * ENTRY_BYTES : at * ENTRY_BYTES])
        before = at + 1
    rest.append(view[before * ENTRY_BYTES :])
    return b"".join(rest), stay


def _batches(plan: LogPlan) -> Iterator[tuple[int, int]]:
    """(number, records)"""
    left, number = plan.records, 0
    while left > 0:
        count = min(plan.batch_records, left)
        yield number, count
        left, number = left - count, number + 1


def make_logs(folder: Path, plan: LogPlan) -> MadeLogs:
    """Write both logs below `folder`. Memory is one bundle per log."""
    link, books = _Link(plan), LogBooks()
    egress, ingress = LogWriter(folder / "egress"), LogWriter(folder / "ingress")
    egress.append(link.signed.leaves(Side.EGRESS))
    ingress.append(link.signed.leaves(Side.INGRESS))
    places = [(stream, shard) for shard in range(plan.shards) for stream in link.streams]
    for number, count in _batches(plan):
        _cross(link, egress, ingress, places[number % len(places)], number, count, books)
    egress.close(_signer(plan, EGRESS_ORIGIN), _signer(plan, witness(DESTINATION)))
    ingress.close(_signer(plan, INGRESS_ORIGIN), _signer(plan, witness(SOURCE)))
    books.egress_leaves, books.ingress_leaves = egress.size, ingress.size
    books.log_bytes = egress.bytes + ingress.bytes
    return MadeLogs(folder / "egress", folder / "ingress", books, link.signed.trust)


def _signer(plan: LogPlan, name: str) -> NoteSigner:
    algorithm = Algorithm.COSIGNATURE if name.endswith("/witness") else Algorithm.ED25519
    return NoteSigner.from_key(name, seeded_key(plan.seed, name), algorithm)


def _cross(
    link: _Link,
    egress: LogWriter,
    ingress: LogWriter,
    place: tuple[str, int],
    number: int,
    count: int,
    books: LogBooks,
) -> None:
    """One batch: WITHHELD and INTENT, its arrival, its receipt."""
    plan, (stream, shard) = link.plan, place
    time_ms = START_MS + 1 + number * BATCH_MS
    first = link.offsets[place]
    link.offsets[place] += count
    entries, stay = link.entries(first, count, time_ms), b""
    if number % plan.withheld_batches_every == 0:
        step = max(1, plan.withheld_every // plan.withheld_batches_every)
        entries, stay = _drop(entries, range(step // 2, count, step))
    incarnation = _digest("incarnation", stream)[:16]
    common: dict[str, Any] = {
        "shard": shard, "source_epoch": 1, "incarnation": incarnation, "first_offset": first,
        "last_offset": first + count - 1, "source_key_id": _digest("key", stream)[:16],
    }  # fmt: skip
    commitment = {"commitment_key_id": _digest("commitment")[:16]}
    if stay:
        withheld = link.header(
            Kind.WITHHELD, Side.EGRESS, time_ms, stream, reason="filtered", **commitment, **common
        )
        egress.append(split_leaves(withheld, stay))
    envelope = _digest("envelope", stream, shard, first)
    path = (SOURCE,) if entries else ()
    common |= {"envelope_sha256": envelope}
    intent = link.header(
        Kind.INTENT, Side.EGRESS, time_ms, stream, source_batch_sha256=_digest("batch", number),
        destination_key_id=_digest("import")[:16], path=path, **commitment, **common,
    )  # fmt: skip
    egress.append(split_leaves(intent, entries))
    crossed = len(entries) // ENTRY_BYTES
    to: dict[str, Any] = {}
    if crossed:
        landed = link.arrived[place]
        to = {"destination_first_offset": landed, "destination_last_offset": landed + crossed - 1}
        link.arrived[place] += crossed
    arrival = link.header(
        Kind.ACK, Side.INGRESS, time_ms + 80, stream, attempt=1, path=path,
        destination_key_id=_digest("sealing")[:16], **commitment, **common, **to,
    )  # fmt: skip
    at = ingress.size
    ingress.append(split_leaves(arrival, entries))
    ack = link.header(
        Kind.ACK, Side.EGRESS, time_ms + 150, stream, records=crossed, attempt=1, path=path, **common, **to
    )
    said = {
        name: getattr(ack, name) for name in Receipt.__struct_fields__ if name in ack.__struct_fields__
    } | {
        "ingress_origin": INGRESS_ORIGIN,
        "ingress_index": at,
        "time_ms": time_ms + 90,
        "entries_sha256": sha256(entries).digest(),
        "path_sha256": path_sha256(path),
    }
    receipt = sign_receipt(Receipt(**said), link.signed.receipt_key)
    egress.append([Leaf(msgspec.structs.replace(ack, receipt=receipt))])
    books.crossed += crossed
    books.withheld += len(stay) // ENTRY_BYTES
    books.bytes += sum(fields[2] for fields in _ENTRY.iter_unpack(entries))
    books.batches += 1
