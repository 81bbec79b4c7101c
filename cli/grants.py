"""Grants as commands handle them: the region's bundles and grant book, documents sent to its broker, files and tokens."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cli.output import note
from cli.setting import connect, read_file, run
from felix.errors import Code, RequestError
from felix.messages import PutDocument
from felix.page import list_documents
from felix.peer import TrustBundle
from felix.profile import load_credentials, load_profile
from felix.runtime.real import now_ms
from keys.bundle import RegionBundle, decode_bundle
from keys.key_file import load_signing_key
from policy.approval import Document, parse_document
from policy.grant import GrantBook, Standing, StandingAction, lasts, sign_standing
from policy.signed import SignatureError, SignedDocument
from policy.truncation import Truncation
from region.folder import RegionFolder

if TYPE_CHECKING:
    from felix.client import RegionClient
    from region.config import RegionConfig


SAID: Final = ("standing", "deny")
KINDS: Final = ("export", "import", "approval", *SAID)
LISTED_AGAIN_MAX: Final = 3
"""Where documents come while they are listed, the broker may judge by one that was not listed yet."""
RIGHTS_LOOKS: Final = 50
RIGHTS_LOOK_S: Final = 0.1
"""How often, and after how long, rights that others change meanwhile are read again."""


def own_bundle(folder: RegionFolder) -> RegionBundle:
    """The region's own bundle."""
    return decode_bundle(folder.bundle.read_bytes()).bundle


def known_bundles(folder: RegionFolder) -> dict[str, RegionBundle]:
    """The region's own bundle and those it trusts, by region. Raises RequestError, which names the file that cannot be read."""
    # Only some commands need it: its imports would cost every other one its start.
    from region.trust.trusted_bundles import pinned_bundles

    own = own_bundle(folder)
    return {own.region: own} | pinned_bundles(folder)


async def fetch_book(region: str, folder: RegionFolder) -> GrantBook:
    """Every grant as the region's broker judges it: of the documents that it says it goes by, each verified here again, but for pauses, resumptions,
    revocations and denials, which it accepted under whichever keys their region had then. What is not believed here is in the book's problems."""
    async with connect(region) as client:
        held, judged = await _held_and_judged(client)
    bundles = known_bundles(folder)
    trusted = {name: bundle.policy_keys for name, bundle in bundles.items()}
    anchors = TrustBundle(bundle.anchor() for bundle in bundles.values())
    if judged is None:
        return GrantBook(held.values(), trusted, anchors)
    counted = [held[name] for name in judged if name in held]
    counted += [parse_document(body) for body in judged.values() if body]
    others = [document for name, document in held.items() if name not in judged]
    unbelieved = (problem.document for problem in GrantBook(others, trusted, anchors).problems)
    accepted = frozenset(document for document in counted if lasts(document))
    return GrantBook((*counted, *unbelieved), trusted, anchors, accepted=accepted)


async def fetch_said(region: str, folder: RegionFolder) -> GrantBook:
    """What the region said under the keys that it has now, as far as its broker knows, be it in force or not: the number of its next word is
    behind all of it."""
    async with connect(region) as client:
        said = await _documents(client, SAID)
    return GrantBook(said, {region: own_bundle(folder).policy_keys})


async def _held_and_judged(client: RegionClient) -> tuple[dict[str, Document], dict[str, bytes] | None]:
    """All documents of grants that the broker lists, by the SHA-256 (hex) of their files; and by the same which of them it judges by, with those
    that it does not list. None where it is of an earlier release, which does not say."""
    held: dict[str, Document] = {}
    judged: dict[str, bytes] | None = None
    for _ in range(LISTED_AGAIN_MAX):
        listed = await _documents(client, KINDS)
        held = {hashlib.sha256(document.encode_file()).hexdigest(): document for document in listed}
        try:
            judged = await list_documents(client, "judged")
        except RequestError as error:
            if error.code is not Code.INVALID:
                raise
            break
        if all(body or name in held for name, body in judged.items()):
            break
    return held, judged


async def _documents(client: RegionClient, kinds: tuple[str, ...]) -> list[Document]:
    """Those of these kinds. What cannot be read, whoever wrote it into the store, is told, and keeps nobody from stopping a grant."""
    found: list[Document] = []
    for kind in kinds:
        for name, body in (await list_documents(client, kind)).items():
            try:
                found.append(parse_document(body))
            except SignatureError as error:
                note(f"the {kind} document {name} in the store: {error.sentence}")
    return found


async def put_document(region: str, kind: str, document: Document, identity: str = "") -> str:
    """Hand a signed document or an approval to the region's broker; its sentence."""
    async with connect(region, identity) as client:
        answer = await client.request(PutDocument(kind, document.encode_file()))
        return answer.note


def stand(
    folder: RegionFolder,
    config: RegionConfig,
    grant: str,
    action: StandingAction,
    reason: str,
    truncation: Truncation | msgspec.UnsetType = msgspec.UNSET,
) -> str:
    """Sign a change of what holds of a grant with the region's policy key, and hand it to its broker; the broker's sentence."""
    said, now = run(fetch_said(config.region, folder)), now_ms()
    standing = Standing(
        grant=grant,
        action=action,
        region=config.region,
        sequence=said.next_sequence(grant, config.region, now),
        at=now,
        by=operator_id(config.region),
        reason=reason,
        truncation=truncation,
    )
    document = sign_standing(standing, load_signing_key(folder.policy_key).private_key)
    return run(put_document(config.region, "standing", document))


async def add_right(region: str, identity: str, right: str) -> None:
    """Give an identity one right besides those it has, also where others change them meanwhile. Raises RequestError(CONFLICT) where they go on to."""
    async with connect(region) as client:
        for looks_left in reversed(range(RIGHTS_LOOKS)):
            held = (await client.list_rights()).get(identity, [])
            if right in held:
                return
            try:
                return await client.put_rights(identity, [*held, right], held=held)
            except RequestError as error:
                if error.code is not Code.CONFLICT or not looks_left:
                    raise
            # The next one may be asked of a broker that hears of the change later.
            await asyncio.sleep(RIGHTS_LOOK_S)


def operator_id(region: str, identity: str = "") -> str:
    """The SPIFFE id of the operator as whom a command works. Raises RequestError where it is no operator."""
    who = load_credentials(load_profile(region, identity=identity)).identity.spiffe_id
    if who.kind != "operator":
        raise RequestError(
            f"{who} is of kind {who.kind}; grants are drawn up and accepted by operators.",
            code=Code.FORBIDDEN,
            hint="Come as an operator: --as NAME, one of those that region.yaml lists.",
        )
    return str(who)


def default_bridge(config: RegionConfig, to: str) -> str:
    """The name of a bridge where none is given: `<from>-to-<to>`."""
    return f"{config.region}-to-{to}"


def read_grant(text: str) -> SignedDocument:
    """A grant from a file or a token. Raises SignatureError, RequestError(NOT_FOUND)."""
    path = Path(text)
    if len(text) < 1024 and path.is_file():
        return SignedDocument.parse(read_file(path, "The grant"))
    if len(text) < 200:
        raise RequestError(
            f"There is no grant file {text}.",
            code=Code.NOT_FOUND,
            hint="Give the file that `felix bridge allow` wrote, or its token.",
        )
    return SignedDocument.parse(text)
