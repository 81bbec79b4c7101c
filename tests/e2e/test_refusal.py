"""What must not cross, and does not: each refusal with its own sentence, in the answer and in the audit logs."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from e2e.command_mesh import (
    BRIDGE,
    DESTINATION,
    MESH,
    POLICIES,
    ROOT,
    SOURCE,
    CommandMesh,
    command,
    environment,
    felix_command,
    until,
)
from e2e.refusal import refusal_of

import felix
from audit.leaf import Kind
from bridge.wire import IngestChannel
from cli.bridge import attempt
from felix.client import RegionClient
from felix.errors import Code, FelixError
from felix.messages import GetDataKey, GetLinkSecret, OpenIngest, PutDocument, RotateKeys
from felix.profile import Profile
from keys.hybrid import HybridKeyPair
from keys.key_file import load_signing_key
from policy.grant import ExportGrant, ImportGrant, Standing, StandingAction, sign_standing
from policy.signed import Purpose, SignedDocument, canonical, decode_body, sign
from policy.terms import grant_id
from region.metadata.catalog import Catalog
from region.metadata.embedded import EmbeddedStore

BRIDGE_ID = f"spiffe://{SOURCE}.{MESH}/bridge/{BRIDGE}"
THIEF = "thief"


def payloads(first: int, count: int) -> list[bytes]:
    return [
        json.dumps({"flight": number, "tailnum": f"N{number}"}).encode()
        for number in range(first, first + count)
    ]


def crossing(mesh: CommandMesh, stream: str, count: int = 50, **how: int) -> str:
    """A stream of its own with a grant, of which the first records have crossed; the grant's id."""
    mesh.create(stream)
    mesh.send(stream, payloads(0, count))
    grant = mesh.prepare(stream, **how)
    mesh.arrived(stream, count)
    return grant


def refused(mesh: CommandMesh, stream: str, grant: str, identity: str = BRIDGE) -> FelixError:
    """What the source answers to a bridge that asks for the stream's sealed batches."""
    return refusal_of(mesh, attempt(SOURCE, identity, stream, grant))


def stands_still(mesh: CommandMesh, stream: str, more: int) -> None:
    """What is published now does not arrive: the agent knows of it, and the destination has no more than before."""
    before = mesh.size(DESTINATION, stream)
    mesh.send(stream, payloads(10_000, more))
    published = mesh.size(SOURCE, stream)
    until(
        lambda: mesh.links(stream)[0].high_watermark == published,
        "an agent that has seen what it must not carry",
    )
    assert mesh.size(DESTINATION, stream) == before


def recorded(mesh: CommandMesh, log: Path, kind: Kind, stream: str) -> int:
    """Records in a log's leaves of one kind."""
    return sum(leaf.header.records for leaf in mesh.leaves(log, kind, stream=stream))


# -- a grant that ends, or is held ---------------------------------------------------------------------


@pytest.mark.parametrize("by", [SOURCE, DESTINATION])
def test_a_revocation_stops_the_flow_mid_stream(mesh: CommandMesh, by: str) -> None:
    stream = f"acme/ops/revoked-by-{by}"
    grant = crossing(mesh, stream)
    over = threading.Event()

    def publish() -> None:
        first = 50
        while not over.is_set():
            mesh.send(stream, payloads(first, 20))
            first += 20

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        mesh.arrived(stream, 150)
        said = mesh.felix("bridge", "revoke", grant, "--reason", "the project ended", "--region", by)
        assert f"{grant} is revoked by {by}" in said.out
        began = time.monotonic()
        link = mesh.link_state(stream, "stopped")
        print(f"revoked by {by}: stopped {time.monotonic() - began:.1f} s after the command")
        assert "revoked" in link.reason
    finally:
        over.set()
        publisher.join()
    stands_still(mesh, stream, 40)
    mesh.leaf(mesh.egress, Kind.REVOKE, stream)
    crossed = mesh.size(DESTINATION, stream)
    until(
        lambda: recorded(mesh, mesh.ingress, Kind.ACK, stream) == crossed,
        "a leaf for each record that arrived",
    )
    # Nothing arrived that was not announced; what was announced last, the destination may have refused.
    announced = recorded(mesh, mesh.egress, Kind.INTENT, stream)
    assert recorded(mesh, mesh.egress, Kind.ACK, stream) == crossed <= announced
    for log in (mesh.egress, mesh.own_log, mesh.ingress):
        held = mesh.leaf(log, Kind.REVOKE, stream)
        standing = decode_body(SignedDocument.parse(held.header.document), Standing, Purpose.STANDING)
        assert (held.header.grant_id, standing.reason) == (grant, "the project ended")
    error = refused(mesh, stream, grant)
    assert error.code is Code.GRANT_REVOKED
    assert f"{by} revoked the grant {grant}" in error.sentence
    assert "the project ended" in error.sentence
    assert mesh.leaf(mesh.own_log, Kind.DENY, stream, Code.GRANT_REVOKED).header.actor == BRIDGE_ID
    # It is final.
    assert "is revoked, for good" in mesh.felix("bridge", "resume", grant, "--region", by, code=3).err
    assert "is revoked already" in mesh.felix("bridge", "revoke", grant, "--region", by, code=3).err
    assert refused(mesh, stream, grant).code is Code.GRANT_REVOKED


def test_a_pause_holds_the_flow_until_the_same_region_resumes_it(mesh: CommandMesh) -> None:
    stream = "acme/ops/paused"
    grant = crossing(mesh, stream)
    mesh.felix("bridge", "pause", grant, "--reason", "an audit", "--region", DESTINATION)
    assert "paused" in mesh.link_state(stream, "paused").reason
    stands_still(mesh, stream, 30)
    error = refused(mesh, stream, grant)
    assert error.code is Code.PAUSED
    assert "eu-west paused the grant" in error.sentence
    said = mesh.felix("bridge", "resume", grant, "--region", SOURCE, code=1)
    assert "not paused by us-east; eu-west paused it" in said.err
    assert refused(mesh, stream, grant).code is Code.PAUSED, "one region cannot take the other's pause back"
    mesh.felix("bridge", "resume", grant, "--region", DESTINATION)
    mesh.arrived(stream, 80)


def test_a_deny_entry_wins_over_a_standing_grant_until_it_is_lifted(mesh: CommandMesh) -> None:
    stream = "acme/ops/denied"
    grant = crossing(mesh, stream)
    deny = (
        "bridge",
        "deny",
        "stream",
        stream,
        "--to",
        SOURCE,
        "--reason",
        "under inquiry",
        "--region",
        DESTINATION,
    )
    mesh.felix(*deny)
    mesh.link_state(stream, "denied")
    stands_still(mesh, stream, 30)
    error = refused(mesh, stream, grant)
    assert error.code is Code.RESIDENCY_DENIED
    assert f"eu-west denies that {stream} crosses" in error.sentence
    assert "under inquiry" in error.sentence
    explained = mesh.felix(
        "bridge", "explain", "stream", stream, "--to", DESTINATION, "--region", SOURCE, code=3
    )
    assert "under inquiry" in explained.out
    mesh.leaf(mesh.own_log, Kind.DENY, stream, Code.RESIDENCY_DENIED)
    mesh.felix(*deny, "--lift")
    mesh.arrived(stream, 80)


def test_a_policy_revision_stops_a_grant_that_it_outlaws(mesh: CommandMesh) -> None:
    stream, other = "acme/ops/outlawed", "acme/ops/still-lawful"
    grant = crossing(mesh, stream)
    crossing(mesh, other)
    outlaws = (
        POLICIES[SOURCE].replace("revision: 1", "revision: 2")
        + f"deny:\n  - name: stays-now\n    streams: [{stream}]\n    because: the works council said so\n"
    )
    mesh.enact(SOURCE, outlaws)
    mesh.link_state(stream, "denied")
    stands_still(mesh, stream, 30)
    error = refused(mesh, stream, grant)
    assert error.code is Code.RESIDENCY_DENIED
    assert "against the policy of us-east, revision 2" in error.sentence
    assert "the works council said so" in error.sentence
    mesh.leaf(mesh.own_log, Kind.DENY, stream, Code.RESIDENCY_DENIED)
    mesh.send(other, payloads(50, 10))
    mesh.arrived(other, 60)
    back = mesh.enact(SOURCE, POLICIES[SOURCE], code=None)
    assert back.code != 0, "an older revision does not take the place of a newer one"
    assert "revision" in back.err


def test_an_expired_grant_lets_nothing_more_cross(mesh: CommandMesh) -> None:
    stream = "acme/ops/expired"
    grant = crossing(mesh, stream, expires_ms=10_000)
    assert "expired" in mesh.link_state(stream, "stopped").reason
    stands_still(mesh, stream, 30)
    error = refused(mesh, stream, grant)
    assert error.code is Code.GRANT_EXPIRED
    assert f"The grant {grant} expired at" in error.sentence
    mesh.leaf(mesh.own_log, Kind.DENY, stream, Code.GRANT_EXPIRED)
    too_late = mesh.accept(mesh.grant_file(stream), code=3)
    assert "expired" in too_late.err


# -- a grant that never was ----------------------------------------------------------------------------


def test_half_a_grant_moves_nothing(mesh: CommandMesh) -> None:
    stream = "acme/ops/half-granted"
    mesh.create(stream)
    mesh.send(stream, payloads(0, 20))
    grant = mesh.allow(stream, "--pseudonymize", "tailnum")
    error = refused(mesh, stream, grant)
    assert error.code is Code.GRANT_MISSING
    assert "eu-west has not accepted it" in error.sentence
    leaf = mesh.leaf(mesh.own_log, Kind.DENY, stream, Code.GRANT_MISSING)
    assert (leaf.header.action, leaf.header.grant_id) == ("read", grant)
    until(lambda: mesh.links(stream), "a report of the link that waits")
    assert mesh.links(stream)[0].state == "waiting"
    assert mesh.size(DESTINATION, stream) == 0


@pytest.mark.parametrize(
    ("stream", "more", "words"),
    [
        ("acme/hr/payroll", (), "acme/hr/payroll"),
        ("globex/ops/unclassified", (), "class"),
        ("acme/ops/against-basis", ("--basis", "derogation", "--mechanism", "49(1)(a)"), "derogation"),
        ("acme/ops/against-lifetime", ("--expires", "400d"), "90 days are allowed"),
    ],
)
def test_a_grant_against_policy_cannot_be_signed(
    mesh: CommandMesh, stream: str, more: tuple[str, ...], words: str
) -> None:
    said = mesh.felix(
        "bridge", "allow", "stream", stream, "--to", DESTINATION, "--purpose", "analytics", "--basis", "scc",
        "--reference", "SCC-1", "--expires", "30d", "--region", SOURCE,
        "--out", str(mesh.grant_file(stream)), *more, code=3,
    )  # fmt: skip
    assert "residency-denied, 500" in said.err
    assert words in said.err
    assert not mesh.grant_file(stream).exists()


def test_who_grants_the_same_again_is_told_of_the_offer_that_nobody_has_accepted(mesh: CommandMesh) -> None:
    stream = "acme/ops/offered-again"
    mesh.create(stream)

    def allow(*more: str) -> str:
        said = mesh.felix(
            "bridge", "allow", "stream", stream, "--to", DESTINATION, "--purpose", "analytics", "--basis", "scc",
            "--reference", "SCC-1", "--expires", "30d", "--region", SOURCE,
            "--out", str(mesh.grant_file(stream)), *more,
        )  # fmt: skip
        return said.err

    assert "already" not in allow()
    first = json.loads(mesh.felix("bridge", "list", "--region", SOURCE, "--json").out)
    (grant,) = (each["grant"] for each in first["items"] if each["export"]["terms"]["stream"] == stream)
    assert "already" not in allow("--drop", "tailnum"), "these are other terms"
    said = " ".join(allow().split())
    assert f"with these terms {grant} is offered already and waits for {DESTINATION} to accept" in said
    assert f"felix bridge revoke {grant}" in said
    mesh.accept(mesh.grant_file(stream))
    asked = at_a_terminal(mesh, "bridge", "revoke", grant, "--region", SOURCE)
    assert f"{grant}: " in asked and f"{stream} from {SOURCE} to {DESTINATION} until" in asked
    assert "scc, analytics" in asked and "for good?" in asked
    mesh.felix("bridge", "revoke", grant, "--reason", "offered twice", "--region", SOURCE)
    assert "already" not in allow(), "one is accepted, and the other one was taken back"


def at_a_terminal(mesh: CommandMesh, *words: str) -> str:
    """What a person reads who is asked, and says no."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            command(*words), stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment(mesh.home, TERM="xterm", COLUMNS="400"), cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        seen = b""
        while b"[y/N]" not in seen:
            seen += os.read(ours, 1 << 16)
        os.write(ours, b"n\n")
        with suppress(OSError):  # a terminal that nobody has open any more
            while os.read(ours, 1 << 16):
                pass
        assert process.wait(timeout=120) == 1
    finally:
        os.close(ours)
    return seen.decode()


def test_a_forged_grant_is_refused_wherever_it_is_brought(mesh: CommandMesh, tmp_path: Path) -> None:
    stream = "acme/ops/forgery-template"
    mesh.create(stream)
    mesh.allow(stream)
    genuine = mesh.grant_file(stream).read_bytes()
    edited = tmp_path / "edited.grant"
    edited.write_bytes(genuine.replace(b"analytics", b"marketing"))
    said = mesh.accept(edited, code=3)
    assert "terms" in said.err or "does not hold" in said.err

    reformatted = tmp_path / "reformatted.grant"
    reformatted.write_bytes(json.dumps(json.loads(genuine)).encode())
    assert "edited or reformatted" in mesh.accept(reformatted, code=3).err

    _, other_key, borrowed = forgeries(genuine, stream, "acme/ops/forged")
    for name, document, words in (
        ("other-key", other_key, "none of us-east's policy keys"),
        ("borrowed-name", borrowed, "does not hold"),
    ):
        path = tmp_path / f"{name}.grant"
        path.write_bytes(document.encode_file())
        assert words in mesh.accept(path, code=3).err
        for region in (SOURCE, DESTINATION):

            async def put(client: RegionClient, document: SignedDocument = document) -> object:
                return await client.request(PutDocument("export", document.encode_file()))

            error = refusal_of(mesh, in_session(mesh, region, put))
            assert error.code is Code.GRANT_INVALID
            assert words in error.sentence


def forgeries(genuine: bytes, stream: str, forged: str) -> tuple[ExportGrant, SignedDocument, SignedDocument]:
    """A body for another stream; signed with a key of the forger's own, and the same under the true key's name."""
    document = SignedDocument.parse(genuine)
    body = decode_body(document, ExportGrant, Purpose.EXPORT)
    terms = msgspec.structs.replace(body.terms, stream=forged, destination_stream="")
    body = msgspec.structs.replace(
        body, terms=terms, terms_hash=terms.hash().hex(), grant=grant_id(terms.hash())
    )
    own = sign(Purpose.EXPORT, SOURCE, canonical(body), Ed25519PrivateKey.generate())
    return body, own, SignedDocument(own.purpose, own.region, document.key, own.body, own.signature)


async def in_session(
    mesh: CommandMesh,
    region: str,
    what: Callable[[RegionClient], Coroutine[Any, Any, object]],
    identity: str = "",
) -> object:
    async with felix.connect(profile=mesh.profile(region, identity)) as client:
        return await what(client)


def test_documents_that_an_administrator_writes_into_the_store_are_not_believed(mesh: CommandMesh) -> None:
    template, forged, lawful = "acme/ops/store-template", "acme/ops/store-forged", "acme/ops/store-lawful"
    mesh.create(template)
    mesh.allow(template)
    held = crossing(mesh, lawful)
    body, export, _ = forgeries(mesh.grant_file(template).read_bytes(), template, forged)
    stranger = Ed25519PrivateKey.generate()
    accepted = ImportGrant(
        grant=body.grant, terms_hash=body.terms_hash, stream=forged, destination_stream=forged,
        from_region=SOURCE, to_region=DESTINATION, bridge=BRIDGE_ID, accepted_by="spiffe://eu-west.acme/operator/nobody", approvals=0, separate=False,
        policy_revision=1, policy_hash=body.policy_hash, signed_at=body.signed_at,
    )  # fmt: skip
    half = sign(Purpose.IMPORT, DESTINATION, canonical(accepted), stranger)
    revocation = sign_standing(
        Standing(grant=held, action=StandingAction.REVOKE, region=SOURCE, sequence=9, at=1, by="nobody"),
        stranger,
    )
    mesh.create(forged)
    mesh.send(forged, payloads(0, 10))
    rights = _rights(mesh, forged)
    mesh.ask(SOURCE, lambda client: client.put_rights(BRIDGE_ID, rights))
    mesh.down()
    for region in (SOURCE, DESTINATION):
        asyncio.run(_inject(mesh, region, body.grant, export, half, revocation))
    mesh.up()
    error = refused(mesh, forged, body.grant)
    assert error.code is Code.GRANT_INVALID
    assert "is not believed" in error.sentence
    mesh.leaf(mesh.own_log, Kind.DENY, forged, Code.GRANT_INVALID)
    knock = refusal_of(mesh, knock_at_destination(mesh, forged, body.grant, BRIDGE))
    assert knock.code is Code.GRANT_INVALID
    assert "is not believed" in knock.sentence
    # The destination knows no such stream, so its log keeps the hash of what it was told.
    unknown = f"sha256:{sha256(forged.encode()).hexdigest()}"
    leaf = mesh.leaf(mesh.ingress, Kind.DENY, unknown, Code.GRANT_INVALID)
    assert (leaf.header.action, leaf.header.actor) == ("deliver", BRIDGE_ID)
    listed = mesh.felix("bridge", "list", "--region", SOURCE)
    assert "not believed: a document signed as us-east" in listed.err
    mesh.send(lawful, payloads(50, 10))
    mesh.arrived(lawful, 60)
    assert mesh.size(DESTINATION, forged) == 0


def _rights(mesh: CommandMesh, stream: str) -> list[str]:
    held = mesh.ask(SOURCE, RegionClient.list_rights)
    return [*held.get(BRIDGE_ID, []), f"bridge-read {stream}"]


async def _inject(
    mesh: CommandMesh,
    region: str,
    grant: str,
    export: SignedDocument,
    half: SignedDocument,
    standing: SignedDocument,
) -> None:
    store = await EmbeddedStore.open(mesh.folder(region).root / "data" / "metadata.db")
    try:
        catalog = Catalog(store, region)
        await catalog.put_document("grants", "export", grant, export.encode_file())
        await catalog.put_document("grants", "import", grant, half.encode_file())
        await catalog.put_document("revocations", "state", "g-forged.1", standing.encode_file())
    finally:
        await store.close()


# -- somebody who is not who the grant names -----------------------------------------------------------


async def knock_at_destination(mesh: CommandMesh, stream: str, grant: str, identity: str) -> None:
    """Open an ingest stream at eu-west as an identity of us-east. Raises the refusal."""
    async with felix.connect(profile=foreigner(mesh, identity)) as client:
        link = client.connection.link
        assert link is not None
        request = OpenIngest(grant, SOURCE, stream, 0, 1, bytes(16), 1, bytes(1200), bytes(64), b"")
        await IngestChannel.open(link, request, lambda position, receipt: None, lambda error: None)


def foreigner(mesh: CommandMesh, identity: str) -> Profile:
    """The way to eu-west for an identity of us-east."""
    return profile_as(mesh.profile(DESTINATION), mesh.us.identity(identity))


def profile_as(profile: Profile, identity: Path) -> Profile:
    return Profile(
        region=profile.region, mesh=profile.mesh, addresses=profile.addresses, authority=profile.authority,
        identity=identity, server_name=profile.server_name,
    )  # fmt: skip


@pytest.fixture(scope="module")
def thief(mesh: CommandMesh) -> str:
    """A second bridge identity of us-east, with the right to read and without a grant."""
    mesh.felix("identity", "issue", THIEF, "--kind", "bridge", "--region", SOURCE)
    mesh.felix("region", "trust", str(mesh.us.bundle), "--region", DESTINATION)
    return THIEF


def test_another_bridge_cannot_use_somebody_elses_grant(mesh: CommandMesh, thief: str) -> None:
    stream = "acme/ops/stolen"
    grant = crossing(mesh, stream)
    name = f"spiffe://{SOURCE}.{MESH}/bridge/{thief}"
    error = refused(mesh, stream, grant, thief)
    assert error.code is Code.NOT_FOUND_OR_FORBIDDEN, (
        "without the right to read, the stream is not even there"
    )
    mesh.felix("identity", "allow", thief, f"bridge-read {stream}", "--kind", "bridge", "--region", SOURCE)
    error = refused(mesh, stream, grant, thief)
    assert error.code is Code.IDENTITY_REFUSED
    assert f"is for the bridge {BRIDGE_ID}, not for {name}" in error.sentence
    assert mesh.leaf(mesh.own_log, Kind.DENY, stream, Code.IDENTITY_REFUSED).header.actor == name
    own = HybridKeyPair.generate().public.encoded
    for request in (GetDataKey(grant, stream, bytes(16), own), GetLinkSecret(grant, stream, own)):

        async def ask(client: RegionClient, request: Any = request) -> object:
            return await client.request(request)

        assert refusal_of(mesh, in_session(mesh, SOURCE, ask, thief)).code is Code.IDENTITY_REFUSED
    actions = {leaf.header.action for leaf in mesh.leaves(mesh.own_log, Kind.DENY, stream=stream)}
    until(
        lambda: (
            {leaf.header.action for leaf in mesh.leaves(mesh.own_log, Kind.DENY, stream=stream)}
            >= {"read", "take a data key", "take the link's secrets"}
        ),
        f"a leaf for each attempt, not only {actions}",
    )
    knock = refusal_of(mesh, knock_at_destination(mesh, stream, grant, thief))
    assert knock.code is Code.IDENTITY_REFUSED
    assert "is for the bridge" in knock.sentence
    assert mesh.leaf(mesh.ingress, Kind.DENY, stream, Code.IDENTITY_REFUSED).header.actor == name


def test_a_bridge_gets_no_key_of_a_stream_that_is_not_granted(mesh: CommandMesh) -> None:
    stream, secret = "acme/ops/key-granted", "acme/ops/key-secret"
    grant = crossing(mesh, stream)
    mesh.create(secret)
    mesh.send(secret, payloads(0, 10))
    keys = mesh.felix("keys", "list", "--stream", secret, "--region", SOURCE, "--json").json()["items"]
    foreign = bytes.fromhex(next(key["id"] for key in keys if key["level"] == "data"))
    own = HybridKeyPair.generate().public.encoded

    async def take(client: RegionClient, name: str) -> object:
        return await client.request(GetDataKey(grant, name, foreign, own))

    error = refusal_of(mesh, in_session(mesh, SOURCE, lambda client: take(client, stream), BRIDGE))
    assert error.code is Code.KEY_SCOPE
    assert f"is not one of {stream}" in error.sentence
    mesh.leaf(mesh.own_log, Kind.DENY, stream, Code.KEY_SCOPE)
    error = refusal_of(mesh, in_session(mesh, SOURCE, lambda client: take(client, secret), BRIDGE))
    assert error.code is Code.NOT_FOUND_OR_FORBIDDEN
    mesh.leaf(mesh.own_log, Kind.DENY, secret, Code.NOT_FOUND_OR_FORBIDDEN)
    with_right = _rights(mesh, secret)
    mesh.ask(SOURCE, lambda client: client.put_rights(BRIDGE_ID, with_right))
    error = refusal_of(mesh, in_session(mesh, SOURCE, lambda client: take(client, secret), BRIDGE))
    assert error.code is Code.GRANT_MISSING, "the right alone is not enough: the second check is the grant"
    leaf = mesh.leaf(mesh.own_log, Kind.DENY, secret, Code.GRANT_MISSING)
    assert leaf.header.action == "take a data key"


def test_identities_of_the_source_have_no_rights_at_the_destination(mesh: CommandMesh) -> None:
    stream = "acme/ops/knocked"
    crossing(mesh, stream)
    mesh.felix("identity", "issue", "orders-svc", "--region", SOURCE)
    for identity in ("orders-svc", "operator"):

        async def knock(
            what: Callable[[RegionClient], Coroutine[Any, Any, object]], name: str = identity
        ) -> object:
            async with felix.connect(profile=foreigner(mesh, name)) as client:
                return await what(client)

        async def read(client: RegionClient) -> object:
            async with client.stream(stream).subscribe(start="earliest") as subscription:
                return await anext(aiter(subscription))

        async def publish(client: RegionClient) -> object:
            return await client.stream(stream).publish(b"x")

        tried: list[Callable[[RegionClient], Coroutine[Any, Any, object]]] = [
            read,
            publish,
            lambda client: client.create_stream("acme/ops/mine"),
            lambda client: client.delete_stream(stream),
            lambda client: client.list_rights(),
            lambda client: client.put_rights(BRIDGE_ID, ["subscribe acme/ops/*"]),
            lambda client: client.list_keys(""),
            lambda client: client.request(RotateKeys("root", "")),
            lambda client: client.request(PutDocument("policy", b"{}")),
        ]  # fmt: skip
        for what in tried:
            error = refusal_of(mesh, knock(what))
            assert error.code is Code.WRONG_REGION, error
            assert "only a bridge of another region" in error.sentence


def test_a_certificate_of_another_authority_is_refused(mesh: CommandMesh, tmp_path: Path) -> None:
    """An impostor founds a region of the same name, and issues itself the bridge's and the operator's names."""
    felix_command(
        tmp_path, "region", "init", SOURCE, "--mesh", MESH, "--listen", "127.0.0.1:0", "--health", "none"
    )
    felix_command(tmp_path, "identity", "issue", BRIDGE, "--kind", "bridge", "--region", SOURCE)
    for region in (SOURCE, DESTINATION):
        for name in (BRIDGE, "operator"):
            stolen = tmp_path / SOURCE / "identities" / f"{name}.pem"
            profile = profile_as(mesh.profile(region), stolen)

            async def knock(profile: Profile = profile) -> None:
                async with felix.connect(profile=profile) as client:
                    await client.list_rights()

            error = refusal_of(mesh, knock())
            assert error.code is Code.IDENTITY_REFUSED
            assert SOURCE in error.sentence


def test_a_stranger_region_is_refused(mesh: CommandMesh, tmp_path: Path) -> None:
    felix_command(
        tmp_path, "region", "init", "ap-south", "--mesh", MESH, "--country", "IN", "--listen", "127.0.0.1:0",
        "--health", "none",
    )  # fmt: skip
    profile = profile_as(mesh.profile(DESTINATION), tmp_path / "ap-south" / "identities" / "operator.pem")

    async def knock() -> None:
        async with felix.connect(profile=profile) as client:
            await client.list_rights()

    error = refusal_of(mesh, knock())
    assert error.code is Code.WRONG_REGION
    assert "belongs to ap-south.acme, which is not trusted here" in error.sentence


def test_a_client_that_reaches_another_region_than_it_asked_for_stops(mesh: CommandMesh) -> None:
    there = mesh.profile(DESTINATION)
    here = mesh.profile(SOURCE)
    lured = Profile(
        region=here.region, mesh=here.mesh, addresses=there.addresses, authority=here.authority, identity=here.identity,
        server_name=here.server_name,
    )  # fmt: skip

    async def knock() -> None:
        async with felix.connect(profile=lured, connect_timeout_s=10) as client:
            await client.describe()

    error = refusal_of(mesh, knock())
    assert error.code in (Code.WRONG_REGION, Code.IDENTITY_REFUSED, Code.UNAVAILABLE, Code.DISCONNECTED), (
        error
    )
    assert SOURCE in str(error)


def test_a_region_cannot_speak_in_the_other_ones_name(mesh: CommandMesh) -> None:
    """eu-west is trusted to sign for itself alone: not to pause, revoke or deny as us-east."""
    stream = "acme/ops/ventriloquism"
    grant = crossing(mesh, stream)
    key = load_signing_key(mesh.eu.policy_key).private_key
    standing = Standing(
        grant=grant, action=StandingAction.REVOKE, region=SOURCE, sequence=5, at=1, by="nobody"
    )
    document = sign(Purpose.STANDING, DESTINATION, canonical(standing), key)
    before = len(mesh.leaves(mesh.own_log, Kind.REVOKE, stream=stream))

    async def put(client: RegionClient) -> object:
        return await client.request(PutDocument("standing", document.encode_file()))

    error = refusal_of(mesh, in_session(mesh, SOURCE, put))
    assert error.code is Code.GRANT_INVALID
    assert "signed by eu-west" in error.sentence
    mesh.send(stream, payloads(50, 10))
    mesh.arrived(stream, 60)
    assert len(mesh.leaves(mesh.own_log, Kind.REVOKE, stream=stream)) == before, (
        "and no leaf says that it did"
    )


def test_nothing_is_sent_again_under_a_grant_that_is_only_offered(mesh: CommandMesh) -> None:
    stream = "acme/ops/offered-alone"
    mesh.create(stream)
    mesh.publish(stream, [b'{"n": 1}'])
    grant = mesh.allow(stream)
    said = mesh.felix(
        "bridge", "resend", grant, "--from", "0", "--wait", "0s", "--yes", "--region", SOURCE, code=3
    )
    assert "its acceptance has not come" in said.err
    assert "felix bridge list" in said.err
