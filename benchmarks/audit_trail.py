"""How fast the audit log is: commitments, and synced leaves. `felix bench report` has verification. Prints one line per measurement.

    python benchmarks/audit_trail.py [--folder DIR] [--leaves N] [--records N]

The folder should lie on the disk that will hold the log; a temporary one is made in it and removed.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from audit.leaf import (
    CommitmentKey,
    Committer,
    Header,
    Kind,
    Leaf,
    Side,
    decode_leaf,
    encode_leaf,
    intent_leaves,
)
from audit.note import Algorithm, NoteSigner
from audit.trail import Trail
from felix.batch import Record
from keys.signing import SigningKey

INCARNATION = b"i" * 16
COMMITTER = Committer(CommitmentKey(b"c" * 16, b"s" * 32), "acme/ops/departures", INCARNATION, 0)
IN_FLIGHT = 64
"""Appends waiting at once in the pipelined run: a bridge with this many batches under way."""


def header(kind: Kind, **more: object) -> Header:
    fields: dict[str, object] = {
        "kind": kind,
        "side": Side.EGRESS,
        "time_ms": 1_760_000_000_000,
        "source_region": "us-east",
        "destination_region": "eu-west",
        "bridge": "spiffe://us-east.acme/bridge/us-to-eu",
        "stream": "acme/ops/departures",
        "destination_stream": "acme/ops/departures",
        "incarnation": INCARNATION,
        "grant_id": "g-1",
        "terms_hash": b"t" * 32,
        "policy_version": 1,
        "policy_hash": b"p" * 32,
        "source_key_id": b"1" * 16,
        "destination_key_id": b"2" * 16,
    }
    return Header(**(fields | more))  # type: ignore[arg-type]


def intent(at: int, records: int) -> list[Leaf]:
    first = at * records
    batch = [Record(first + i, 1_760_000_000_000, b"k%d" % i, {}, b"p" * 256) for i in range(records)]
    digest = at.to_bytes(32, "big")
    head = header(
        Kind.INTENT,
        first_offset=first,
        last_offset=first + records - 1,
        source_batch_sha256=digest,
        envelope_sha256=digest,
    )
    return intent_leaves(head, batch, COMMITTER)


def acked(leaves: list[Leaf]) -> Leaf:
    head = leaves[0].header
    return Leaf(
        header(
            Kind.ACK,
            first_offset=head.first_offset,
            last_offset=leaves[-1].header.last_offset,
            records=sum(leaf.header.records for leaf in leaves),
            envelope_sha256=head.envelope_sha256,
            destination_first_offset=head.first_offset,
            destination_last_offset=leaves[-1].header.last_offset,
            receipt=b"r" * 700,
        )
    )


def say(what: str, count: int, unit: str, seconds: float, more: str = "") -> None:
    print(f"{what:<44} {count / seconds:>12,.0f} {unit}/s{more}")


def measure_entries(records: int) -> None:
    batch = [Record(i, 1_760_000_000_000, b"k%d" % i, {}, b"p" * 256) for i in range(records)]
    head = header(
        Kind.INTENT,
        first_offset=0,
        last_offset=records - 1,
        source_batch_sha256=b"b" * 32,
        envelope_sha256=b"e" * 32,
    )
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < 1:
        data = [encode_leaf(leaf) for leaf in intent_leaves(head, batch, COMMITTER)]
        rounds += 1
    say("commit and encode, 256 B payloads", rounds * records, "records", time.perf_counter() - began)
    began, decoded = time.perf_counter(), 0
    while time.perf_counter() - began < 1:
        decoded += sum(decode_leaf(leaf).header.records for leaf in data)
    say("decode", decoded, "records", time.perf_counter() - began)


async def measure_trail(folder: Path, leaves: int, records: int, in_flight: int) -> None:
    signer = NoteSigner.from_key("bench/log", SigningKey.generate(), Algorithm.ED25519)
    trail = await asyncio.to_thread(Trail.open, folder, signer)
    await trail.append([Leaf(header(Kind.GRANT, actor="bench", document_sha256=b"d" * 32))])
    made = [intent(at, records) for at in range(leaves)]
    waits: list[float] = []
    gate = asyncio.Semaphore(in_flight)

    async def cross(batch: list[Leaf]) -> None:
        async with gate:
            began = time.perf_counter()
            await trail.append(batch)
            waits.append(time.perf_counter() - began)
            await trail.append([acked(batch)])

    began = time.perf_counter()
    await asyncio.gather(*map(cross, made))
    seconds = time.perf_counter() - began
    size = trail.status().size
    await asyncio.to_thread(trail.close)
    waits.sort()
    more = (
        f"   INTENT durable after p50 {waits[len(waits) // 2] * 1e3:.2f} ms,"
        f" p99 {waits[len(waits) * 99 // 100] * 1e3:.2f} ms"
    )
    say(f"synced leaves (INTENT and ACK), {records} x {in_flight}", size, "leaves", seconds, more)
    say(f"synced record entries, {records} x {in_flight}", leaves * records, "records", seconds)
    began = time.perf_counter()
    trail = await asyncio.to_thread(Trail.open, folder, signer)
    print(f"{'opened again after':<44} {(time.perf_counter() - began) * 1e3:>12,.1f} ms")
    await asyncio.to_thread(trail.close)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--leaves", type=int, default=2_000)
    parser.add_argument("--records", type=int, default=400)
    arguments = parser.parse_args()
    measure_entries(arguments.records)
    for records, in_flight in ((arguments.records, 1), (arguments.records, IN_FLIGHT), (1, IN_FLIGHT)):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            asyncio.run(measure_trail(Path(folder), arguments.leaves, records, in_flight))


if __name__ == "__main__":
    main()
