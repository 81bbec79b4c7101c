"""Proof files: for every record of a log, and for no altered document."""

from __future__ import annotations

import json
import threading
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audit_log import (
    COMMITMENT_KEY,
    STREAM,
    Link,
    egress_appends,
    key,
    log_signer,
    payload,
    record,
    region_bundle,
    trust,
    witness_signer,
)

from audit.checkpoint import open_checkpoint
from audit.leaf import Leaf
from audit.proof import Proven, check_proof, check_record, prove
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.trust import Trust
from audit.witness import MemoryWitnessStore, Witness
from felix.errors import Code, FelixError, RequestError, TamperError
from keys.bundle import AuditKey

SIGNER, WITNESS = log_signer(), witness_signer()


def write(path: Path, appends: list[list[Leaf]]) -> None:
    witness = Witness(WITNESS, [SIGNER.key], MemoryWitnessStore(), lambda: 1_760_000_000)
    trail = Trail.open(
        path, SIGNER, witnesses=[WITNESS.key], settings=TrailSettings(checkpoint_interval_ms=3_600_000)
    )
    ended = threading.Event()
    for leaves in appends:
        ended.clear()
        trail.append_nowait(leaves, lambda first, error: ended.set())
        assert ended.wait(30)
    trail.add_cosigned(witness.cosign(trail.publish(), []))
    trail.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """100 batches of three; batch n withholds its second record where n ends in 3, all where it ends in 7."""
    path = tmp_path_factory.mktemp("log")
    appends = list(egress_appends(150))
    link = Link(shard=1)
    appends += [link.agreement(), link.intent(1_500)]
    write(path, appends)
    return Folder(path)


def check(data: bytes, **more: object) -> Proven:
    arguments = {"trust": trust(), "cosignatures_min": 1} | more
    return check_proof(data, **arguments)  # type: ignore[arg-type]


def test_every_record_that_crossed_has_a_proof_and_no_other(log: Folder) -> None:
    offset = 0
    for batch in range(150):
        offset += 5 if batch % 25 == 24 else 0
        for at in range(3):
            withheld = (batch % 10 == 3 and at == 1) or batch % 10 == 7
            if withheld:
                with pytest.raises(RequestError, match="was withheld") as caught:
                    prove(log, trust(), STREAM, 0, offset + at)
                assert caught.value.code is Code.NOT_FOUND
            elif batch % 7 == 0 or batch > 140:
                proven = check(prove(log, trust(), STREAM, 0, offset + at))
                assert proven.offset == proven.entry.offset == offset + at
                assert proven.receipt is not None and proven.ack is not None
                assert proven.receipt.first_offset == offset
                check_record(proven, COMMITMENT_KEY, record(offset + at, proven.entry.time_ms))
        offset += 3
    for beyond in (offset, 75, 10**9):
        with pytest.raises(RequestError, match="No record"):
            prove(log, trust(), STREAM, 0, beyond)


def test_a_record_without_an_answer_has_a_proof_of_its_intent(log: Folder) -> None:
    for offset in (0, 940, 1_499):
        proven = check(prove(log, trust(), STREAM, 1, offset))
        assert proven.ack is None and proven.receipt is None and proven.entry.offset == offset


def test_the_record_is_checked_by_whoever_holds_the_commitment_key(log: Folder) -> None:
    proven = check(prove(log, trust(), STREAM, 0, 0))
    crossed = record(0, proven.entry.time_ms)
    check_record(proven, COMMITMENT_KEY, crossed)
    for other in (
        crossed._replace(payload=payload(2)),
        crossed._replace(key=b"key-1"),
        crossed._replace(headers={"felix-path": b"us-east"}),
        crossed._replace(headers=dict(reversed(crossed.headers.items()))),
        crossed._replace(timestamp_ms=crossed.timestamp_ms + 1),
    ):
        with pytest.raises(TamperError):
            check_record(proven, COMMITMENT_KEY, other)
    for wrong in (COMMITMENT_KEY._replace(secret=b"x" * 32), COMMITMENT_KEY._replace(key_id=b"x" * 16)):
        with pytest.raises(TamperError):
            check_record(proven, wrong, crossed)


def test_the_index_is_a_hint_that_may_be_missing(log: Folder, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(log.path, tmp_path / "copy")
    (tmp_path / "copy" / "index").unlink()
    assert prove(Folder(tmp_path / "copy"), trust(), STREAM, 0, 1) == prove(log, trust(), STREAM, 0, 1)


def test_a_proof_by_another_key_is_refused(log: Folder) -> None:
    data = prove(log, trust(), STREAM, 0, 1)
    us, eu = map(region_bundle, ("us-east", "eu-west"))
    other = AuditKey(SIGNER.key.name, "log", key(9).verify_key.public)
    with pytest.raises(TamperError, match="is not signed by the log"):
        check(data, trust=Trust.of([msgspec.structs.replace(us, audit_keys=(other,)), eu]))
    with pytest.raises(TamperError, match="0 trusted regions or witnesses other than us-east cosigned"):
        check(data, trust=Trust.of([us]))
    with pytest.raises(TamperError, match="eu-west, whose policy key is not known"):
        check(data, trust=Trust.of([us]), cosignatures_min=0)
    with pytest.raises(TamperError, match="none of eu-west's receipt keys"):
        check(data, trust=Trust.of([us, msgspec.structs.replace(eu, receipt_keys=us.receipt_keys)]))


def places(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every scalar of a JSON document, by its path."""
    if isinstance(value, dict):
        return [place for name, item in value.items() for place in places(item, (*at, name))]
    if isinstance(value, list):
        return [place for number, item in enumerate(value) for place in places(item, (*at, number))]
    return [at]


def changes(value: Any) -> list[Any]:
    """Other values for a scalar: a number by one, a text in one character at several places, bytes in one bit."""
    if isinstance(value, int):
        return [value + 1, value - 1, -1, str(value)]
    assert isinstance(value, str)
    found: list[Any] = [value + "A", value[:-1], "", None]
    found += [
        value[:at] + ("A" if value[at] != "A" else "B") + value[at + 1 :] for at in range(0, len(value), 97)
    ]
    try:
        raw = bytearray(b64decode(value, validate=True))
    except ValueError:
        return found
    for at in range(0, len(raw), 61):
        raw[at] ^= 1
        found.append(b64encode(raw).decode())
        raw[at] ^= 1
    return found


def test_no_altered_document_passes(log: Folder) -> None:
    data = prove(log, trust(), STREAM, 0, 4)
    document = json.loads(data)
    tried = 0
    for place in places(document):
        parent = document
        for name in place[:-1]:
            parent = parent[name]
        whole = parent[place[-1]]
        for changed in changes(whole):
            parent[place[-1]] = changed
            tried += 1
            try:
                proven = check(json.dumps(document).encode())
            except FelixError:
                continue
            # The leaf lists its neighbours too: named instead, they are what is proved, and nothing else is.
            assert place == ("record", "offset") and proven.offset == changed != 4, (place, changed)
        parent[place[-1]] = whole
    assert tried > 200
    check(json.dumps(document).encode())
    for name in document.keys() - {"beside", "parts"}:
        with pytest.raises(FelixError):
            check(json.dumps({other: value for other, value in document.items() if other != name}).encode())
    with pytest.raises(TamperError):
        check(json.dumps(document | {"more": 1}).encode())
    for part in ("intent", "ack"):
        path = document[part]["path"]
        for shorter in (path[1:], path[:-1], [*path, path[0]], path[::-1]):
            with pytest.raises(TamperError):
                check(json.dumps(document | {part: document[part] | {"path": shorter}}).encode())


def test_leaves_of_other_records_do_not_stand_in(log: Folder) -> None:
    ours, other = (json.loads(prove(log, trust(), STREAM, 0, offset)) for offset in (4, 6))
    for part in ("intent", "ack"):
        with pytest.raises(TamperError):
            check(json.dumps(ours | {part: other[part]}).encode())
    with pytest.raises(TamperError, match="no ACK"):
        check(json.dumps(ours | {"ack": ours["intent"]}).encode())
    with pytest.raises(TamperError, match="no INTENT"):
        check(json.dumps(ours | {"intent": ours["ack"]}).encode())


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"\xff", b"{" * 10_000, b'"' + b"a" * (2 << 20) + b'"']
)
def test_what_is_no_proof_is_refused(data: bytes) -> None:
    with pytest.raises(TamperError):
        check(data)


def test_a_record_that_crossed_twice_needs_to_be_named(tmp_path: Path) -> None:
    link = Link()
    grant, intent = link.agreement(), link.intent()
    again = [
        Leaf(
            msgspec.structs.replace(leaf.header, incarnation=b"2" * 16, envelope_sha256=b"2" * 32),
            leaf.entries,
        )
        for leaf in intent
    ]
    write(tmp_path, [grant, intent, again])
    folder = Folder(tmp_path)
    with pytest.raises(RequestError, match="more than once") as caught:
        prove(folder, trust(), STREAM, 0, 1)
    assert caught.value.code is Code.CONFLICT
    proven = check(prove(folder, trust(), STREAM, 0, 1, incarnation=b"2" * 16))
    assert proven.intent.incarnation == b"2" * 16
    with pytest.raises(RequestError):
        prove(folder, trust(), STREAM, 0, 1, destination_region="apac")


def test_there_is_no_proof_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no audit log"):
        prove(Folder(tmp_path), trust(), STREAM, 0, 1)


def test_the_proof_carries_the_cosigned_checkpoint(log: Folder) -> None:
    document = json.loads(prove(log, trust(), STREAM, 0, 1))
    signed = open_checkpoint(document["checkpoint"].encode(), SIGNER.key, [WITNESS.key])
    assert [by.time_s for by in signed.cosigned] == [1_760_000_000]


@pytest.mark.parametrize(
    ("once", "twice"),
    [
        (b'"record": {', b'"record": {"stream": "acme/ops/other", "shard": 0, "offset": 0},\n "record": {'),
        (b'"offset": 0', b'"offset": 2,\n  "offset": 0'),
        (b'"stream":', b'"str\\u0065am": "acme/ops/other",\n  "stream":'),
        (b'"beside": {', b'"beside": {"00": "", "00": ""},\n "beside": {'),
    ],
)
def test_a_file_that_says_a_thing_twice_is_refused(log: Folder, once: bytes, twice: bytes) -> None:
    """It is checked by the last word; a person, or another reader, may take the first."""
    data = prove(log, trust(), STREAM, 0, 0)
    assert check(data).offset == 0 and data.count(once) >= 1
    with pytest.raises(TamperError, match="says twice"):
        check(data.replace(once, twice, 1))
