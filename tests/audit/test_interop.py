"""Another verifier: written from the texts of C2SP and RFC 6962 and from docs/audit.md, sharing no code with `audit`.

It reads the files that the trail wrote, in plain functions over hashlib, struct, base64, MessagePack and Ed25519, and
comes to the same root, the same signatures, the same leaves and the same counts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audit_log import (
    COMMITMENT_KEY,
    INCARNATION,
    RECEIPT_KEY,
    STREAM,
    Link,
    egress_appends,
    log_signer,
    payload,
    trust,
    witness_signer,
)
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

import audit.proof
import audit.tile_disk
import audit.trail
import audit.witness

# The other verifier. Nothing from here on to the line below uses the package.


def read_vkey(text: str) -> tuple[str, bytes, int, bytes]:
    name, key_id, encoded = text.split("+", 2)
    material = base64.b64decode(encoded)
    assert hashlib.sha256(name.encode() + b"\n" + material).digest()[:4].hex() == key_id
    return name, bytes.fromhex(key_id), material[0], material[1:]


def open_note(data: bytes, vkeys: list[str]) -> tuple[str, dict[str, int | None]]:
    whole = data.decode()
    text, _, signatures = whole.rpartition("\n\n")
    text += "\n"
    known = {(name, key_id): (kind, public) for name, key_id, kind, public in map(read_vkey, vkeys)}
    signed: dict[str, int | None] = {}
    for line in signatures.removesuffix("\n").split("\n"):
        dash, name, encoded = line.split(" ")
        assert dash == "\u2014"
        raw = base64.b64decode(encoded)
        if (name, raw[:4]) not in known:
            continue
        kind, public = known[name, raw[:4]]
        if kind == 0x01:
            Ed25519PublicKey.from_public_bytes(public).verify(raw[4:], text.encode())
            signed[name] = None
        else:
            assert kind == 0x04
            (time_s,) = struct.unpack(">Q", raw[4:12])
            message = f"cosignature/v1\ntime {time_s}\n{text}".encode()
            Ed25519PublicKey.from_public_bytes(public).verify(raw[12:], message)
            signed[name] = time_s
    return text, signed


def tile_name(kind: str, index: int, width: int) -> str:
    digits = f"{index % 1000:03d}"
    while index >= 1000:
        index //= 1000
        digits = f"x{index % 1000:03d}/{digits}"
    return f"tile/{kind}/{digits}" + ("" if width == 256 else f".p/{width}")


def entries_of(log: Path, size: int) -> list[bytes]:
    entries = []
    for index in range((size + 255) // 256):
        width = min(256, size - index * 256)
        data = (log / tile_name("entries", index, width)).read_bytes()
        while data:
            (length,) = struct.unpack(">H", data[:2])
            entries.append(data[2 : 2 + length])
            data = data[2 + length :]
    assert len(entries) == size
    return entries


def mth(hashes: list[bytes]) -> bytes:
    if not hashes:
        return hashlib.sha256(b"").digest()
    if len(hashes) == 1:
        return hashes[0]
    k = 1
    while k * 2 < len(hashes):
        k *= 2
    return hashlib.sha256(b"\x01" + mth(hashes[:k]) + mth(hashes[k:])).digest()


def check_tiles(log: Path, hashes: list[bytes]) -> int:
    """MTH(D[(n*256+i)*256^l : (n*256+i+1)*256^l]) for every tile and hash that the tree has."""
    tiles, level = 0, 0
    while hashes:
        for index in range((len(hashes) + 255) // 256):
            row = hashes[index * 256 : (index + 1) * 256]
            assert (log / tile_name(str(level), index, len(row))).read_bytes() == b"".join(row)
            tiles += 1
        hashes = [mth(hashes[at : at + 256]) for at in range(0, len(hashes) - len(hashes) % 256, 256)]
        level += 1
    return tiles


def read_leaf(data: bytes) -> tuple[dict[str, Any], list[tuple[int, int, int, bytes, bytes]]]:
    magic, version, reserved, header_length, entries = struct.unpack(">2sBBHH", data[:8])
    assert (magic, version, reserved) == (b"FL", 2, 0)
    header = msgspec.msgpack.decode(data[8 : 8 + header_length])
    rows = list(struct.iter_unpack(">QqI32s16s", data[8 + header_length :]))
    assert len(rows) == entries
    return header, rows  # type: ignore[return-value]


def read_wal(path: Path) -> list[bytes]:
    data, at, leaves = path.read_bytes(), 0, []
    while at < len(data):
        magic, _flags, _zero, length, index, durable, _checksum = struct.unpack(
            ">4sB3sIQQQ", data[at : at + 36]
        )
        assert magic == b"FXwl" and durable <= index
        leaves.append(data[at + 36 : at + 36 + length])
        at += 36 + length
    return leaves


def root_from_path(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """RFC 9162 2.1.3.2, by recursion from the top: which side the leaf is on decides which hash is the sibling."""
    if size == 1:
        assert not path
        return leaf
    k = 1
    while k * 2 < size:
        k *= 2
    if index < k:
        left, right = root_from_path(leaf, index, k, path[:-1]), path[-1]
    else:
        left, right = path[-1], root_from_path(leaf, index - k, size - k, path[:-1])
    return hashlib.sha256(b"\x01" + left + right).digest()


# Up to here.


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log")
    witness = audit.witness.Witness(
        witness_signer(), [log_signer().key], audit.witness.MemoryWitnessStore(), lambda: 1_760_000_000
    )
    trail = audit.trail.Trail.open(path, log_signer(), witnesses=[witness.key])
    link, ended = Link(), threading.Event()
    for leaves in [*egress_appends(400, link), link.intent(2_000)]:
        ended.clear()
        trail.append_nowait(leaves, lambda first, error: ended.set())
        assert ended.wait(30)
    trail.add_cosigned(witness.cosign(trail.publish(), []))
    trail.close()
    return path


def test_the_other_verifier_agrees_on_every_file(log: Path) -> None:
    vkeys = [str(log_signer().key), str(witness_signer().key)]
    text, signed = open_note((log / "checkpoint").read_bytes(), vkeys)
    assert signed == {log_signer().key.name: None, witness_signer().key.name: 1_760_000_000}
    origin, size_line, root_line = text.removesuffix("\n").split("\n")
    assert origin == log_signer().key.name
    entries = entries_of(log, int(size_line))
    assert len(entries) > 768
    hashes = [hashlib.sha256(b"\x00" + entry).digest() for entry in entries]
    assert base64.b64encode(mth(hashes)).decode() == root_line
    assert check_tiles(log, hashes) >= 5
    wal = [leaf for file in sorted((log / "wal").iterdir()) for leaf in read_wal(file)]
    assert wal == entries


def test_the_other_verifier_notices_a_changed_byte(log: Path, tmp_path: Path) -> None:
    vkeys = [str(log_signer().key)]
    data = (log / "checkpoint").read_bytes()
    at = data.index(b"\n") + 1
    with pytest.raises(InvalidSignature):
        open_note(data[:at] + b"7" + data[at:], vkeys)


def encoded(offset: int) -> tuple[bytes, bytes, bytes]:
    """Key, headers and payload of the record at this offset, as docs/wire.md lays them out."""
    headers = b""
    if offset % 3 == 0:
        held = [(b"felix-path", b"us-east"), (b"note", b"n%d" % offset)]
        headers = struct.pack(">H", len(held)) + b"".join(
            struct.pack(">H", len(name)) + name + struct.pack(">I", len(value)) + value
            for name, value in held
        )
    return b"key-%d" % (offset % 5), headers, payload(offset)


def test_the_other_reader_understands_every_leaf(log: Path) -> None:
    size = int((log / "checkpoint").read_text().split("\n")[1])
    crossed: list[int] = []
    accounted = 0
    for entry in entries_of(log, size):
        header, rows = read_leaf(entry)
        if header["kind"] in (1, 4):
            accounted += len(rows)
            assert header.get("records", 0) == len(rows)
            assert header.get("record_bytes", 0) == sum(row[2] for row in rows)
        if header["kind"] == 1:
            crossed += [row[0] for row in rows]
            for offset, time_ms, length, commitment, tag in rows:
                name = STREAM.encode()
                context = struct.pack(">H", len(name)) + name + INCARNATION + struct.pack(">I", 0)
                key, headers, plain = encoded(offset)
                keyed = hashlib.blake2b(
                    context
                    + struct.pack(">QqII", offset, time_ms, len(key), len(headers))
                    + key
                    + headers
                    + plain,
                    key=COMMITMENT_KEY.secret,
                    digest_size=32,
                    person=b"felix/record/2",
                )
                size = len(key) + len(headers) + len(plain)
                assert (length, commitment) == (size, keyed.digest()) and len(tag) == 16
        if header["kind"] == 5:
            accounted += header["last_offset"] - header["first_offset"] + 1
        if header["kind"] == 2:
            receipt = msgspec.msgpack.decode(header["receipt"])
            Ed25519PublicKey.from_public_bytes(RECEIPT_KEY.verify_key.public).verify(
                receipt["signature"], b"felix/receipt/1\0" + receipt["body"]
            )
            assert msgspec.msgpack.decode(receipt["body"])["first_offset"] == header["first_offset"]
    assert crossed == sorted(set(crossed))
    assert accounted == 400 * 3 + 16 * 5 + 2_000


def test_the_other_verifier_checks_a_proof_file(log: Path) -> None:
    folder = audit.tile_disk.Folder(log)
    document = json.loads(audit.proof.prove(folder, trust(), STREAM, 0, 12))
    text, signed = open_note(
        document["checkpoint"].encode(), [str(log_signer().key), str(witness_signer().key)]
    )
    assert len(signed) == 2
    _, size, root = text.removesuffix("\n").split("\n")
    headers = {}
    for part in ("intent", "ack"):
        leaf = base64.b64decode(document[part]["leaf"])
        path = [base64.b64decode(hash_) for hash_ in document[part]["path"]]
        found = root_from_path(
            hashlib.sha256(b"\x00" + leaf).digest(), document[part]["index"], int(size), path
        )
        assert base64.b64encode(found).decode() == root
        headers[part] = read_leaf(leaf)
    assert 12 in [row[0] for row in headers["intent"][1]]
    assert headers["intent"][0]["envelope_sha256"] == headers["ack"][0]["envelope_sha256"]
