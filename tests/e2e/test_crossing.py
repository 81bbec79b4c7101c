"""Thousands of flights cross under a grant, to the record; of what must stay, nothing is found on the other side."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from e2e.command_mesh import DESTINATION, SOURCE, CommandMesh, until
from e2e.scanner import Scanner, forms

import felix
from audit.leaf import Kind
from felix.names import StreamName
from keys.hierarchy import StreamEntry, decode_entry
from keys.keyring import open_keyring
from keys.store import KeyStore
from policy.grant import open_export
from policy.signed import SignedDocument
from policy.terms import pseudonym_scope

GRANTED = "acme/ops/departures"
UNGRANTED = "acme/ops/crew"
RECORDS = 3_000
WITHHELD_EVERY = 100
"""One record in so many has no tail number, and fails closed."""
FILTERED_EVERY = 75
"""One record in so many is of an airport that the filter leaves out."""


def canary(what: str) -> bytes:
    """A word that is nowhere else: 40 bytes, letters and digits."""
    return b"CANARY" + hashlib.sha256(what.encode()).hexdigest()[:34].upper().encode()


CANARIES = {
    what: canary(what)
    for what in (
        "ungranted payload", "ungranted key", "ungranted header", "dropped field", "pseudonymized field",
        "granted key", "granted header", "withheld payload", "filtered payload",
    )
}  # fmt: skip


def text(what: str) -> str:
    return CANARIES[what].decode()


def departure(number: int) -> bytes:
    """A flight. Its tail number, its crew's note and its key must not be seen abroad."""
    row: dict[str, Any] = {
        "flight": number,
        "carrier": "UA",
        "origin": "EWR",
        "dest": "IAH",
        "distance": 1400 + number % 7,
        "tailnum": f"{text('pseudonymized field')}-{number % 400}",
        "captain": f"{text('dropped field')}-{number}",
    }
    if withheld(number):
        del row["tailnum"]
        row["remark"] = text("withheld payload")
    elif filtered(number):
        row["origin"], row["remark"] = "JFK", text("filtered payload")
    return json.dumps(row).encode()


def withheld(number: int) -> bool:
    return number % WITHHELD_EVERY == 7


def filtered(number: int) -> bool:
    return not withheld(number) and number % FILTERED_EVERY == 5


STAYS = sum(withheld(number) or filtered(number) for number in range(RECORDS))


class Crossed(NamedTuple):
    mesh: CommandMesh
    grant: str
    delivered: list[dict[str, Any]]


async def _publish(mesh: CommandMesh) -> None:
    async with felix.connect(profile=mesh.profile(SOURCE)) as client:
        async with client.stream(GRANTED).publisher() as publisher:
            for number in range(RECORDS):
                key = b"%s-%d" % (CANARIES["granted key"], number)
                await publisher.send(departure(number), key, {"note": CANARIES["granted header"]})
            await publisher.flush()
        async with client.stream(UNGRANTED).publisher() as publisher:
            for number in range(300):
                roster = b'{"crew": "%s-%d"}' % (CANARIES["ungranted payload"], number)
                key = b"%s-%d" % (CANARIES["ungranted key"], number)
                await publisher.send(roster, key, {"pay": CANARIES["ungranted header"]})
            await publisher.flush()


@pytest.fixture(scope="module")
def crossed(mesh: CommandMesh) -> Iterator[Crossed]:
    """Everything published, everything granted delivered and acknowledged."""
    mesh.create(GRANTED, shards=2)
    mesh.create(UNGRANTED)
    asyncio.run(_publish(mesh))
    grant = mesh.grant(
        GRANTED, "--pseudonymize", "tailnum", "--drop", "captain", "--filter", "origin == 'EWR'"
    )

    def caught_up() -> bool:
        links = mesh.links(GRANTED)
        done = sum(link.crossed + link.withheld + link.filtered for link in links)
        return len(links) == 2 and done == RECORDS and not any(link.lag_records for link in links)

    until(caught_up, "everything on the other side")
    delivered = mesh.read(DESTINATION, GRANTED, RECORDS - STAYS)
    # The refused attempt on the other stream: as the bridge, under the grant that it has for the first one.
    mesh_refusal(mesh, grant)
    yield Crossed(mesh, grant, delivered)


def mesh_refusal(mesh: CommandMesh, grant: str) -> None:
    from e2e.refusal import refusal_of

    from cli.bridge import attempt

    refused = refusal_of(mesh, attempt(SOURCE, "us-east-to-eu-west", UNGRANTED, grant))
    assert refused.code in (felix.Code.NOT_FOUND_OR_FORBIDDEN, felix.Code.GRANT_MISSING)


def settled_leaves(mesh: CommandMesh, log: Path, kind: Kind) -> int:
    return sum(leaf.header.records for leaf in mesh.leaves(log, kind, stream=GRANTED))


def test_published_is_crossed_and_withheld_and_crossed_is_delivered(crossed: Crossed) -> None:
    mesh = crossed.mesh
    assert mesh.size(SOURCE, GRANTED) == RECORDS
    assert mesh.size(DESTINATION, GRANTED) == RECORDS - STAYS == len(crossed.delivered)
    # A checkpoint is signed about once a second: wait until it covers the last leaf.
    until(lambda: settled_leaves(mesh, mesh.egress, Kind.ACK) == RECORDS - STAYS, "the last ACK")
    until(lambda: settled_leaves(mesh, mesh.ingress, Kind.ACK) == RECORDS - STAYS, "the last arrival")
    assert settled_leaves(mesh, mesh.egress, Kind.INTENT) == RECORDS - STAYS
    assert settled_leaves(mesh, mesh.egress, Kind.WITHHELD) == STAYS
    reasons = {leaf.header.reason for leaf in mesh.leaves(mesh.egress, Kind.WITHHELD, stream=GRANTED)}
    assert reasons == {"transform-failed", "filtered"}


def test_each_record_arrives_once_in_the_order_of_its_shard(crossed: Crossed) -> None:
    wanted = {number for number in range(RECORDS) if not withheld(number) and not filtered(number)}
    numbers = [row["value"]["flight"] for row in crossed.delivered]
    assert sorted(numbers) == sorted(wanted)
    for shard in (0, 1):
        of_shard = [row["value"]["flight"] for row in crossed.delivered if row["shard"] == shard]
        assert of_shard == sorted(of_shard)
        assert of_shard


def test_what_crosses_is_transformed(crossed: Crossed) -> None:
    pseudonyms = {row["value"]["tailnum"] for row in crossed.delivered}
    assert len(pseudonyms) == len({n % 400 for n in range(RECORDS) if not withheld(n) and not filtered(n)}), (
        "stable pseudonyms, one for each tail number"
    )
    assert not any("captain" in row["value"] for row in crossed.delivered)
    assert {tuple(row["headers"]) for row in crossed.delivered} == {("felix-path",)}


def _places(mesh: CommandMesh) -> tuple[Path, ...]:
    """Where nothing of what stays may be found: the destination, the audit logs, the agent's folder with its log."""
    return mesh.eu.root, mesh.own_log, mesh.us.bridge("us-east-to-eu-west")


def test_no_canary_is_in_the_destination_the_logs_the_agent_or_on_the_wire(
    crossed: Crossed, record_property: Any
) -> None:
    mesh = crossed.mesh
    needles = dict(CANARIES)
    # Nor plain hashes of what was published: they can be guessed, and could not be erased.
    for number in (0, 5, 7, 1234):
        needles[f"SHA-256 of payload {number}"] = hashlib.sha256(departure(number)).digest()
    for what in ("granted key", "pseudonymized field"):
        for number in (0, 5, 7):
            word = b"%s-%d" % (CANARIES[what], number)
            needles[f"SHA-256 of {what} {number}"] = hashlib.sha256(word).digest()
    scanner = Scanner(needles)
    assert not scanner.find_in_files(*_places(mesh))
    assert not scanner.find_in_datagrams(list(mesh.relay.datagrams))
    assert not scanner.find(json.dumps(crossed.delivered).encode(), "what a subscriber reads")
    assert mesh.relay.size_bytes > 100_000, "the relay saw the crossing"
    assert scanner.bytes_seen > 1_000_000
    print(
        f"scanned {scanner.bytes_seen:,} bytes: {scanner.files_seen} files, {len(mesh.relay.datagrams):,} datagrams"
    )
    record_property("bytes_scanned", scanner.bytes_seen)


def test_only_the_granted_stream_is_at_the_destination(crossed: Crossed) -> None:
    streams = crossed.mesh.felix("stream", "list", "--region", DESTINATION, "--json").json()
    assert UNGRANTED not in {state["stream"] for state in streams["items"]}
    assert not [path for path in crossed.mesh.eu.root.rglob("*") if "crew" in path.name]


def _secrets(mesh: CommandMesh, crossed: Crossed, place: Path) -> dict[str, bytes]:
    """Every key of the source region as it is unwrapped there, from a copy of its key folder."""
    folder = place / "keys"
    shutil.copytree(mesh.us.keys, folder)
    found = {f"root {path.stem}": path.read_bytes()[-40:-8] for path in (folder / "roots").glob("*.key")}
    store = KeyStore(folder, SOURCE)
    entries = [decode_entry(body) for body in store.bodies]
    store.close()
    keyring = open_keyring(folder, SOURCE)
    document = SignedDocument.parse(mesh.grant_file(GRANTED).read_bytes())
    trusted = {
        SOURCE: (load_pem_private_key(mesh.us.policy_key.read_bytes(), None).public_key().public_bytes_raw(),)  # type: ignore[union-attr]
    }
    export = open_export(document, trusted)
    try:
        for key in keyring.list():
            if key.level == "data":
                found[f"data {key.key_id.hex()}"] = keyring.data_key(key.key_id).secret
        for entry in entries:
            if isinstance(entry, StreamEntry):
                found[f"stream {entry.stream}"] = keyring._stream_secret(entry)
                secrets = keyring.link_secrets(
                    StreamName.parse(entry.stream), entry.incarnation, export.grant,
                    bytes.fromhex(export.terms_hash), pseudonym_scope(export.terms),
                )  # fmt: skip
                found[f"pseudonyms {entry.stream}"] = secrets.fields
                found[f"link {entry.stream}"] = secrets.link
    finally:
        keyring.close()
    for path in (
        *mesh.us.secrets.glob("*.pem"),
        *mesh.us.authority.rglob("*.pem"),
        *mesh.us.identities.glob("*.pem"),
    ):
        data = path.read_bytes()
        if b"PRIVATE KEY" not in data:
            continue
        start = data.index(b"-----BEGIN PRIVATE KEY")
        key = load_pem_private_key(data[start:], None)
        body = key.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        # In PKCS #8 the secret stands at the end (Ed25519), or is the octet string after the version (EC).
        numbers = getattr(key, "private_numbers", None)
        found[f"private key {path.name}"] = (
            numbers().private_value.to_bytes(32, "big") if numbers else body[-32:]
        )
    return found


def test_no_key_of_the_source_is_in_the_destination_or_on_the_wire(
    crossed: Crossed, tmp_path: Path, record_property: Any
) -> None:
    mesh = crossed.mesh
    secrets = _secrets(mesh, crossed, tmp_path)
    levels = {name.split()[0] for name in secrets}
    assert {"root", "stream", "data", "pseudonyms", "link", "private"} <= levels
    assert sum(name.startswith("data") for name in secrets) >= 3
    scanner = Scanner(secrets)
    assert not scanner.find_in_files(mesh.eu.root, mesh.own_log, mesh.us.bridge("us-east-to-eu-west"))
    assert not scanner.find_in_datagrams(list(mesh.relay.datagrams))
    # The control: the roots are where they must be, in the source's key folder.
    assert {name for name, _ in scanner.find_in_files(mesh.us.keys)} >= {
        name for name in secrets if name.startswith("root")
    }
    print(f"scanned {scanner.bytes_seen:,} bytes for {len(secrets)} keys")
    record_property("bytes_scanned", scanner.bytes_seen)


def test_nor_is_a_key_of_the_destination_in_the_source(crossed: Crossed, tmp_path: Path) -> None:
    mesh = crossed.mesh
    scanner = Scanner(
        {path.stem: path.read_bytes()[-40:-8] for path in (mesh.eu.keys / "roots").glob("*.key")}
    )
    assert not scanner.find_in_files(mesh.us.root)


@pytest.mark.parametrize("shift", range(3))
def test_the_scanner_finds_a_canary_in_every_form(tmp_path: Path, shift: int) -> None:
    needle = CANARIES["ungranted payload"]
    for name, data in {
        "raw": b"before" + needle + b"after",
        "hex": (b"\x01" * shift + needle + b"\xff").hex().encode(),
        "upper": (b"\x01" * shift + needle).hex().upper().encode(),
        "base64": b64encode(b"\x9b" * shift + needle + b"\xee\x10\x77"),
        "short": b64encode(b"\x9b" * shift + needle),
    }.items():
        (tmp_path / name).write_bytes(b"\0" * 100 + data + b"\0" * 100)
        scanner = Scanner(CANARIES)
        assert {what for what, _ in scanner.find_in_files(tmp_path / name)} == {"ungranted payload"}, name
        assert {what for what, _ in scanner.find_in_datagrams([data])} == {"ungranted payload"}, name
    key = bytes(range(200, 232))
    for url_safe in (False, True):
        found = b64encode(b"\x00" * shift + key, altchars=b"-_" if url_safe else None)
        assert Scanner({"key": key}).find(found, "there")
    assert all(len(form) >= 12 for form in forms(key))


def test_the_scanner_finds_the_canaries_in_what_the_source_subscriber_reads(crossed: Crossed) -> None:
    said = crossed.mesh.felix(
        "stream", "subscribe", UNGRANTED, "--from", "earliest", "--count", "1", "--json", "--region", SOURCE
    )
    found = {what for what, _ in Scanner(CANARIES).find(said.out.encode(), "the source")}
    assert found == {"ungranted payload", "ungranted key", "ungranted header"}


def test_at_rest_the_source_does_not_show_them_either(crossed: Crossed) -> None:
    scanner = Scanner(CANARIES)
    assert not scanner.find_in_files(crossed.mesh.us.root)
