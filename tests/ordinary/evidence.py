"""What the logs of a sequence say: each by itself, each held against what others remember of it, and all against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from audit.leaf import ENTRY_BYTES, Kind, Leaf, Side, decode_leaf
from audit.position import LinkShard
from audit.proof import check_proof, prove
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.verify import OUTLAWED, verify_log
from felix.errors import FelixError

if TYPE_CHECKING:
    from ordinary.world import World


class Envelope(NamedTuple):
    """What an INTENT announces, and an ACK says of it."""

    link: LinkShard
    incarnation: bytes
    sha256: bytes


class Disagreement(NamedTuple):
    """What one log says of an envelope, and another does not."""

    envelope: Envelope
    sentence: str


def findings(world: World) -> list[str]:
    """What verification finds in each log, and what does not agree between them; empty where all is well. What was lost
    with a log that could not be put back is shown, and no finding."""
    found = [*world.wrong, *world.findings_of_its_own()]
    logs = world.logs()
    for origin, path in logs.items():
        remembered = world.notes_of(origin) if origin not in world.ended.keys() | world.forked else []
        report = verify_log(
            Folder(path), world.trust, origin=origin, cosignatures_min=0, remembered=remembered
        )
        found += [
            f"{origin}: step {each.step}, leaf {each.leaf}: {each.sentence}" for each in report.findings
        ]
        found += [
            f"{origin}: leaf {each.leaf}: {each.sentence}" for each in report.notices if each.name == OUTLAWED
        ]
        if not report.findings:
            found += unproved(origin, path, world)
    return found + [each.sentence for each in disagreements(logs) if each.envelope not in world.lost]


def unproved(origin: str, path: Path, world: World) -> list[str]:
    """Of one record that an egress log says crossed, drawn by the sequence's number: why there is no proof of it, or why that does not hold."""
    crossed = [
        (index, leaf)
        for index, leaf in enumerate(read_leaves(path))
        if leaf.header.kind is Kind.INTENT and leaf.entries
    ]
    if not crossed:
        return []
    index, leaf = Random(world.number).choice(crossed)
    header, offset = leaf.header, int.from_bytes(leaf.entries[:8], "big")
    try:
        proof = prove(
            Folder(path), world.trust, header.stream, header.shard, offset,
            destination_region=header.destination_region, incarnation=header.incarnation, leaf=index,
        )  # fmt: skip
        proven = check_proof(proof, world.trust, cosignatures_min=0)
    except FelixError as error:
        return [f"{origin}: leaf {index}, offset {offset} has no proof: {error.sentence}"]
    is_it = (proven.stream, proven.shard, proven.offset, proven.intent) == (
        header.stream,
        header.shard,
        offset,
        header,
    )
    return [] if is_it else [f"{origin}: leaf {index}, offset {offset}: the proof is of {proven}"]


def shown_losses(world: World) -> set[str]:
    """The regions at either end of envelopes that a log lost for good, and another log shows: reports must say so."""
    lost = [each.envelope for each in disagreements(world.logs()) if each.envelope in world.lost]
    return {region for each in lost for region in (each.link.source_region, each.link.destination_region)}


def size_of(path: Path) -> int:
    """The leaves that a log's checkpoint covers."""
    note = Folder(path).read("checkpoint")
    return int(note.split(b"\n", 2)[1]) if note else 0


def read_leaves(path: Path) -> Iterator[Leaf]:
    """The leaves that a log's checkpoint covers."""
    return map(decode_leaf, _entries(path))


def _entries(path: Path) -> list[bytes]:
    size = size_of(path)
    return [data for _, data in read_entries(Folder(path), 0, size, size)]


def only_in(path: Path, other: Path) -> set[Envelope]:
    """The envelopes of a log's leaves behind those that it shares with another copy of it."""
    ours, theirs = _entries(path), _entries(other)
    shared = next((at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))  # noqa: B905
    return {envelope_of(decode_leaf(data)) for data in ours[shared:]}


def envelope_of(leaf: Leaf) -> Envelope:
    header = leaf.header
    return Envelope(LinkShard.of(header), header.incarnation, header.envelope_sha256)


def disagreements(logs: dict[str, Path]) -> list[Disagreement]:
    """Envelope by envelope: what was announced and acknowledged arrived, entry by entry; nothing else did, and no record
    twice. An envelope that was announced and not acknowledged may have arrived or not."""
    sides: dict[Kind | str, dict[Envelope, bytes]] = {"intent": {}, "receipt": {}, "arrival": {}}
    found = []
    for leaf in (leaf for path in logs.values() for leaf in read_leaves(path)):
        header = leaf.header
        key = envelope_of(leaf)
        if header.kind is Kind.INTENT:
            where = "intent"
        elif header.kind is Kind.ACK:
            where = "receipt" if header.side is Side.EGRESS else "arrival"
        else:
            continue
        if key in sides[where] and header.parts == 1:
            found.append(Disagreement(key, f"{where} of {key} stands in a log twice"))
        sides[where][key] = sides[where].get(key, b"") + leaf.entries
    for key, entries in sides["arrival"].items():
        if sides["intent"].get(key) != entries:
            found.append(Disagreement(key, f"what arrived under {key} is not what was announced"))
    found += [
        Disagreement(key, f"the receipt for {key} has no arrival")
        for key in sides["receipt"]
        if key not in sides["arrival"]
    ]
    offsets: Counter[tuple[LinkShard, bytes, bytes]] = Counter()
    for key, entries in sides["arrival"].items():
        for at in range(0, len(entries), ENTRY_BYTES):
            record = (key.link, key.incarnation, entries[at : at + 8])
            offsets[record] += 1
            if offsets[record] == 2:
                found.append(Disagreement(key, f"{record} arrived twice"))
    return found
