"""F7, the claim as a whole: a text stands where the table says, and nowhere else, in no form.

Random canaries are put wherever a text can be put: record keys, headers and fields, behind compressed frames, documents' free text,
requests that are refused. Then every byte of both regions' folders, of the agent's folder and of what was on the wire between the regions is looked at.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from bridge_mesh import ACCEPTED_BY, BRIDGE, POLICIES, STREAM, Mesh, flight, two_regions, until
from e2e.relay import Relay
from e2e.scanner import Scanner
from region_peer import encode_request, raw_peer
from rogue_agent import Wild, granted, rogue_agent, wild_batch

from audit.leaf import Kind
from bridge.config import DestinationConfig
from felix.errors import Code, RequestError
from felix.frames import FrameType, encode_frame
from felix.identity_file import load_identity
from felix.messages import OpenIngest, OpenPublisher, OpenTransactions, PutDocument, encode_message
from felix.runtime.real import now_ms
from felix.transaction_messages import Fence
from policy.approval import sign_approval
from policy.grant import (
    DenyEntry,
    Standing,
    StandingAction,
    open_export,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import parse_policy
from policy.transform import build_spec

Tally = Callable[[str, int], None]
ENGINES = ("qh3", "aioquic")
TAILS = "acme/ops/tails"

US, EGRESS, EU = "us-east's documents", "the egress log", "eu-west's documents"
"""A region's documents: its audit log, its metadata store, and the broker's copies beside it."""
BOTH = frozenset({US, EGRESS, EU})
MAY_STAND: dict[str, frozenset[str]] = {
    "record key": frozenset(),
    "header that the terms do not name": frozenset(),
    "field that is dropped": frozenset(),
    "field that crosses": frozenset(),
    "record of a stream without a grant": frozenset(),
    "tail of a compressed frame that was published": frozenset(),
    "tail of a compressed frame that a bridge sent": frozenset(),
    "purpose of the grant": BOTH,
    "comment of an approval": BOTH,
    "reason of a pause": BOTH,
    "author of a pause": BOTH,
    "reason of a deny entry": BOTH,
    "reason of the other region's deny entry": BOTH,
    "reason of a deny entry towards a third region": frozenset({US}),
    "reason of a document that nobody signed": frozenset(),
    "grant of a refused request": frozenset(),
    "stream of a refused request": frozenset(),
    "region of a refused request": frozenset(),
    "transactional id of a refused fence": frozenset(),
}
"""Where a canary may stand in plain. What crosses as a signed document stands in both regions' logs and in the egress log: it *must*."""


def canary(what: str) -> bytes:
    # A name in every syntax that there is: a stream's part, a region, a transactional id.
    return b"c" + os.urandom(9).hex().encode()


@asynccontextmanager
async def relayed(mesh: Mesh, engine: str) -> AsyncIterator[Relay]:
    relay = Relay(mesh.ports["eu-west"])
    try:
        yield relay
    finally:
        relay.close()


@pytest.mark.parametrize("engine", ENGINES)
async def test_every_canary_stands_where_the_table_says(tmp_path: Path, engine: str, tally: Tally) -> None:
    words = {what: canary(what) for what in MAY_STAND}
    text = {what: word.decode() for what, word in words.items()}
    async with two_regions(tmp_path) as mesh, relayed(mesh, engine) as relay:
        await mesh.create("acme/ops/ungranted")
        await mesh.create()
        grant = await _grant(mesh, text)
        async with mesh.operator("us-east") as client:
            for number in range(30):
                await client.stream(STREAM).publish(
                    flight(number, hour=text["field that is dropped"], remarks=text["field that crosses"]),
                    key=words["record key"],
                    headers={"note": words["header that the terms do not name"]},
                )
                await client.stream("acme/ops/ungranted").publish(words["record of a stream without a grant"])
        await _forbid(mesh, text)
        destination = DestinationConfig(region="eu-west", addresses=(f"127.0.0.1:{relay.port}",))
        async with mesh.agent(destinations=(destination,), engine=engine) as agent:
            await mesh.crossed(30)
            await _behind_frames(mesh, relay.port, engine, words)
            await until(lambda: any(link.position == 31 for link in agent.links()), "the batch that stays")
            await _refused(mesh, relay.port, engine, words, text)
            await _pause(mesh, grant, text)
            pauses = lambda: [  # noqa: E731
                view
                for view in mesh.nodes["eu-west"].services.governance.book.list(now_ms())
                if view.paused_by
            ]
            await until(pauses, "the pause at the destination")
            await until(
                lambda: any(link.state == "paused" for link in agent.links()), "the pause at the link"
            )
        datagrams = list(relay.datagrams)
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        assert mesh.verify_egress().ok
        assert mesh.verify_ingress().ok
        assert [leaf.first_offset for leaf in mesh.headers(mesh.egress_folder, Kind.WITHHELD)] == [30]
        _scan(mesh, words, datagrams, tally)


async def _grant(mesh: Mesh, text: dict[str, str]) -> str:
    terms = mesh.terms(
        purpose=text["purpose of the grant"], transform=build_spec(pseudonymize=["tailnum"], drop=["hour"])
    )
    us, eu = (parse_policy(POLICIES[name], name) for name in ("us-east", "eu-west"))
    export = sign_export(terms, us, mesh.key("us-east"), now_ms())
    trusted = {name: mesh.bundle(name).policy_keys for name in ("us-east", "eu-west")}
    accepted = sign_import(export, eu, mesh.key("eu-west"), trusted, ACCEPTED_BY, now_ms())
    await mesh.put("us-east", "export", export)
    await mesh.put("eu-west", "export", export)
    await mesh.put("eu-west", "import", accepted)
    body = open_export(export, trusted)
    for region in ("us-east", "eu-west"):
        identity = load_identity(mesh.folder(region).identity("dpo"))
        comment = text["comment of an approval"] if region == "us-east" else ""
        approval = sign_approval(bytes.fromhex(body.terms_hash), identity, now_ms(), comment)
        await mesh.put(region, "approval", approval)
    return body.grant


async def _forbid(mesh: Mesh, text: dict[str, str]) -> None:
    """Deny entries for streams that no grant names."""
    for region, peer, what in (
        ("us-east", "eu-west", "reason of a deny entry"),
        ("eu-west", "us-east", "reason of the other region's deny entry"),
        ("us-east", "ap-south", "reason of a deny entry towards a third region"),
    ):
        entry = DenyEntry(
            streams="acme/ops/crew",
            peer=peer,
            region=region,
            sequence=1,
            at=now_ms(),
            by="alice",
            reason=text[what],
        )
        await mesh.put(region, "deny", sign_deny(entry, mesh.key(region)))


async def _pause(mesh: Mesh, grant: str, text: dict[str, str]) -> None:
    standing = Standing(
        grant=grant, action=StandingAction.PAUSE, region="us-east", sequence=1, at=now_ms(),
        by=text["author of a pause"], reason=text["reason of a pause"],
    )  # fmt: skip
    await mesh.put("us-east", "standing", sign_standing(standing, mesh.key("us-east")))


async def _behind_frames(mesh: Mesh, port: int, engine: str, words: dict[str, bytes]) -> None:
    """Bytes that no reader decodes, in a batch of a producer of us-east and in an envelope of its bridge."""
    tail = words["tail of a compressed frame that was published"]
    batch = wild_batch([Wild(flight(30), headers=())], compress=True, behind=tail)
    async with raw_peer(mesh.us, mesh.nodes["us-east"].address, engine=engine) as peer:
        stream = peer.open_stream()
        await peer.ask(OpenPublisher(STREAM), 1, stream)
        peer.send(encode_frame(FrameType.BATCH, batch, 2), stream)
        await until(lambda: peer.of(FrameType.APPENDED) or peer.errors(2), "the batch's end")
    grant = await granted(mesh, stream=TAILS)
    tail = words["tail of a compressed frame that a bridge sent"]
    async with rogue_agent(
        mesh, grant, stream=TAILS, engine=engine, address=("127.0.0.1", port), incarnation=b"t" * 16
    ) as rogue:
        await rogue.open()
        assert (await rogue.refused([Wild(b"{}")], compress=True, behind=tail)).code is Code.BATCH_MALFORMED
        await rogue.open()
        await rogue.cross([Wild(b"{}")], compress=True)


async def _refused(mesh: Mesh, port: int, engine: str, words: dict[str, bytes], text: dict[str, str]) -> None:
    """What a bridge of us-east asks at eu-west, over the same relay, and is refused."""
    identity = load_identity(mesh.us.identity(BRIDGE))
    forged = DenyEntry(
        streams="acme/ops/*", peer="*", region="us-east", sequence=9, at=now_ms(), by="mallory",
        reason=text["reason of a document that nobody signed"],
    )  # fmt: skip
    document = sign_deny(forged, mesh.key("eu-west"))
    document = type(document)(document.purpose, "us-east", document.key, document.body, document.signature)
    letters = words["grant of a refused request"].translate(bytes.maketrans(b"0189", b"ghij"))[:16].decode()
    words["grant of a refused request"] = letters.encode()
    asked = OpenIngest(
        grant=f"g-{letters}",
        from_region=text["region of a refused request"],
        stream=f"acme/ops/{text['stream of a refused request']}",
        shard=0,
        shards=1,
        incarnation=b"i" * 16,
        epoch=1,
        transfer_key=b"k",
        signature=b"s",
        statement=b"t",
    )
    async with raw_peer(
        mesh.eu, ("127.0.0.1", port), identity=identity, engine=engine, region="eu-west"
    ) as peer:
        with pytest.raises(RequestError):
            await peer.ask(PutDocument("deny", document.encode_file()), 1)
        for frames in (
            encode_request(asked, 2),
            encode_request(OpenTransactions(), 2)
            + encode_message(FrameType.CALL, Fence(text["transactional id of a refused fence"]), 3),
        ):
            stream = peer.peer.open_stream(bidirectional=True)
            peer.send(frames, stream)
            await until(lambda s=stream: peer.errors(stream_id=s) or peer.closed_with, "a refusal")
            assert peer.errors(stream_id=stream), peer.closed_with


def _areas(mesh: Mesh) -> dict[str, list[Path]]:
    """Every file of the three parties, by area."""
    areas: dict[str, list[Path]] = {}
    documents = {US: mesh.us.root / "data", EU: mesh.eu.root / "data"}
    for name, root in (("us-east", mesh.us.root), ("eu-west", mesh.eu.root)):
        for path in sorted(root.rglob("*")):
            if not path.is_file():
                continue
            area = f"elsewhere in {name}"
            if path.is_relative_to(mesh.egress_folder):
                area = EGRESS
            for region, data in documents.items():
                if path.is_relative_to(data):
                    within = path.relative_to(data)
                    if within.parts[0] in ("audit", "governance") or within.name.startswith("metadata.db"):
                        area = region
            areas.setdefault(area, []).append(path)
    return areas


def _scan(mesh: Mesh, words: dict[str, bytes], datagrams: list[bytes], tally: Tally) -> None:
    scanner = Scanner(words)
    stands: dict[str, set[str]] = {what: set() for what in words}
    for area, paths in _areas(mesh).items():
        for path in paths:
            for what, _ in scanner.find_in_files(path):
                stands[what].add(area)
    for what, _ in scanner.find_in_datagrams(datagrams):
        stands[what].add("the wire")
    assert stands == {what: set(may) for what, may in MAY_STAND.items()}
    # What crossed as a document has its leaf in each log that it stands in.
    for folder in (mesh.egress_folder, mesh.ingress_folder, mesh.us.root / "data" / "audit"):
        logged = b"".join(
            header.document
            for header in mesh.headers(folder, Kind.GRANT, Kind.APPROVE, Kind.STANDING, Kind.DENY_ENTRY)
        )
        for what, may in MAY_STAND.items():
            assert (words[what] in logged) == (
                may >= BOTH or (US in may and folder == mesh.us.root / "data" / "audit")
            )
    assert sum(map(len, datagrams)) > 20_000, "the relay saw the crossing"
    tally("bytes scanned", scanner.bytes_seen)
    tally("files scanned", scanner.files_seen)
    tally("datagrams scanned", len(datagrams))
    tally("canaries", len(words))
