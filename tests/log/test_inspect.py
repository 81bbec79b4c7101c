"""Inspection: a segment's structure, nothing of its contents, and damage by name."""

from __future__ import annotations

from pathlib import Path

from log.building import IDENTITY, batch_of, first_segment, open_disk, placed, write_batches

from region.log.frame import Frame
from region.log.inspect import DamageLine, EntryLine, inspect_entries
from region.log.segment import decode_segment_header


def test_structure_without_contents(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    write_batches(log, [batch_of(b"secret one"), batch_of(b"secret two", b"secret three", producer=5)])
    log.sync()
    log.write([Frame(None, 3, 0, 9, b"secret position")], 1_000)
    log.close()
    data = first_segment(tmp_path).read_bytes()
    assert decode_segment_header(data)[0].identity == IDENTITY
    lines = [line for line in inspect_entries(data) if isinstance(line, EntryLine)]
    assert [(line.base_offset, line.records, line.producer_id) for line in lines] == [
        (0, 1, 0),
        (1, 2, 5),
        (3, 0, 0),
    ]
    assert lines[2].annotation_length == 15 and lines[2].slot == 9
    assert lines[2].synced_to == lines[2].position
    assert "secret" not in repr(lines)


def test_damage_is_named_and_passed_over(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    write_batches(log, [batch_of(b"one"), batch_of(b"two"), batch_of(b"three")])
    log.close()
    data = bytearray(first_segment(tmp_path).read_bytes())
    whole = list(inspect_entries(data))
    second = whole[1]
    data[second.position + 20] ^= 1
    first, damage, third = inspect_entries(data)
    assert (first, third) == (whole[0], whole[2])
    assert isinstance(damage, DamageLine)
    assert (damage.position, damage.length) == (second.position, second.length)
    assert placed(batch_of(b"two"), 1).header.total_length < damage.length
