"""`felix bridge sign-again`: this region's half of a grant, with its policy key of now: the same terms, so approvals and the other half go on counting.

And where its links go on: truncations that the region accepted, and resends, with the same content as before. What crossed since crossed under an incarnation that follows
from that (policy.truncation); another acceptance would begin another one. Which ones these are says the region's audit log, and not the metadata store: there, who has the former key
may have put others. Those of a grant that has ended are signed again as words on the grant that carries the link now (policy.signed_again), by its terms: from the store, or, where that has
them no more, from the log, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, cast

import typer

from cli.grants import fetch_book, known_bundles, operator_id, put_document
from cli.output import iso, note, out, styled
from cli.policy import fetch_policy
from cli.setting import IdentityOption, RegionOption, connect, folder_of, run
from cli.terms import confirm, show_terms
from felix.errors import Code, FelixError, RequestError
from felix.page import document_pages, list_documents
from felix.runtime.real import now_ms
from keys.key_file import load_signing_key
from policy.approval import parse_document
from policy.grant import (
    ExportGrant,
    GrantBook,
    GrantError,
    Standing,
    open_export,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.quantity import Instant
from policy.signed import Purpose, SignedDocument, Trusted, decode_body, verify
from policy.signed_again import accepted_by, carried_by, words_again
from policy.terms import GrantTerms
from policy.truncation import Truncation


def sign_again(
    grant: Annotated[str, typer.Argument(help="The grant's id.")],
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
    identity: IdentityOption = "",
    region: RegionOption = "",
) -> None:
    """Sign this region's half of a grant again, with its policy key of now and under its policy in force: after that key, or the policy, was changed.

    The terms stay as they are, and so do the approvals. Truncations that were accepted on its links are signed again, too, also those that were accepted under a grant that has ended. What the other region signed must be under its key of now.
    """
    folder, config = folder_of(region)
    own = known_bundles(folder)
    trusted = {name: bundle.policy_keys for name, bundle in own.items()}
    former = tuple(public for keys in own[config.region].former for public in keys.policy_keys)
    # Its own half is under a key that the region gave up. Whoever has that key can sign another one, so a person looks at the terms.
    keys = trusted | {config.region: (*trusted[config.region], *former)}
    exports = run(_exports(config.region, grant, keys))
    if grant not in exports:
        raise RequestError(
            f"{config.region} holds no grant {grant}.",
            code=Code.NOT_FOUND,
            hint="felix bridge list says which it holds. Where the metadata store lost this one, make a new grant for the stream (felix bridge allow), and sign that again: truncations that were "
            "accepted go with it.",
        )
    document, export = exports[grant]
    terms = export.terms
    book = run(fetch_book(config.region, folder))
    grants = {name: each.terms for name, (_, each) in exports.items()}
    said = run(_logged(config.region, keys)) if terms.from_region == config.region else []
    if missing := {word.grant for word in said} - grants.keys():
        # Of a grant that ended the store may have nothing any more.
        grants |= run(_logged_terms(config.region, missing, keys))
    _require_not_ended(grant, grants, said, book, now_ms())
    show_terms(export)
    words = words_again(grant, grants, said, _begun(book, grant, said))
    for word, under in words:
        cut = cast(Truncation, word.truncation)
        out.print(
            f"{cut.stream} shard {cut.shard} goes on from source offset {cut.offset}: {word.action} of {iso(word.at)}"
            + (f", under {under}" if under != grant else "")
        )
    if unknown := sorted({word.grant for word in said} - grants.keys()):
        note(
            f"Neither the metadata store of {config.region} nor its audit log says which terms {', '.join(unknown)} had: truncations that were accepted under them are not signed again. "
            "A link that crossed under one of these stands until it leads to another stream."
        )
    confirm(f"Sign these terms again for {config.region}?", yes)
    policy, key = run(fetch_policy(config.region)), load_signing_key(folder.policy_key).private_key
    if terms.from_region == config.region:
        run(put_document(config.region, "export", sign_export(terms, policy, key, now_ms()), identity))
    else:
        who = operator_id(config.region, identity)
        accepted = sign_import(document, policy, key, trusted, who, now_ms())
        run(put_document(config.region, "import", accepted, identity))
    for word, _ in words:
        run(put_document(config.region, "standing", sign_standing(word, key), identity))
    out.print(styled((grant, "bold"), f"  is signed again by {config.region}"))


def _require_not_ended(
    grant: str, grants: Mapping[str, GrantTerms], said: Iterable[Standing], book: GrantBook, now: int
) -> None:
    """Raises RequestError for a grant that was revoked or has expired, and names the one that carries its stream now."""
    ended = _ended(grant, grants[grant], book, now)
    if ended is None:
        return
    code, sentence = ended
    others = [
        other
        for other in carried_by(grant, grants, said)
        if _ended(other, grants[other], book, now) is None and _has_half(book, other, now)
    ]
    again = " or ".join(f"felix bridge sign-again {other}" for other in others)
    raise RequestError(
        f"{sentence} It is not signed again.",
        code=code,
        hint=f"{again} signs truncations that were accepted under it again, too, for the same link."
        if others
        else "Make a new grant for the stream (felix bridge allow), and sign that again: the truncations that were accepted under this one go with it.",
    )


def _has_half(book: GrantBook, grant: str, now: int) -> bool:
    """Whether a half of the grant counts: of one of which this region's own is under a former key the other region's. Whoever has that key can make up a grant, and no more."""
    try:
        view = book.get(grant, now)
    except GrantError:
        return False
    return view.export is not None or view.accepted is not None


def _ended(grant: str, terms: GrantTerms, book: GrantBook, now: int) -> tuple[Code, str] | None:
    for region in (terms.from_region, terms.to_region):
        if book.is_revoked_by(grant, region):
            return Code.GRANT_REVOKED, f"{region} has revoked the grant {grant}, for good."
    if now >= terms.expires:
        return Code.GRANT_EXPIRED, f"The grant {grant} expired at {Instant(terms.expires)}."
    return None


def _begun(book: GrantBook, grant: str, said: Iterable[Standing]) -> set[bytes]:
    """The incarnations that begin by words which count on the grant's links as it is."""
    found = set[bytes]()
    for stream, shard in {(cut.stream, cut.shard) for cut in (accepted_by(word).truncation for word in said)}:
        for words in book.accepted_truncations(grant, stream, shard).values():
            found.update(word.incarnation for word in words)
    return found


async def _listed(region: str, kind: str) -> dict[str, bytes] | None:
    """Documents of a kind that the region's broker reads in its audit log; None of a broker of an earlier release, which does not know the kind. Raises RequestError."""
    async with connect(region) as client:
        try:
            return await list_documents(client, kind)
        except RequestError as error:
            if error.code is not Code.INVALID:
                raise
            return None


async def _logged(region: str, keys: Trusted) -> list[Standing]:
    """The region's words on where its links go on, as its broker reads them in its audit log. Raises RequestError, SignatureError."""
    documents = await _listed(region, "truncation")
    if documents is None:
        raise RequestError(
            f"The broker of {region} is of an earlier release, and does not say which accepted truncations its audit log has.",
            code=Code.UNSUPPORTED,
            hint="Upgrade the region's brokers first.",
        )
    return [_word(data, region, keys) for data in documents.values()]


async def _logged_terms(region: str, asked: Collection[str], keys: Trusted) -> dict[str, GrantTerms]:
    """The terms of those of these grants of which the region's audit log has an export that counts there, as its broker reads it; of a broker that does not say, none.
    Raises RequestError, SignatureError."""
    found = {}
    for data in (await _listed(region, "truncation-export") or {}).values():
        document = parse_document(data)
        if not isinstance(document, SignedDocument):
            raise RequestError("The broker lists an approval as a grant's export.")
        export = open_export(document, {region: keys[region]})
        if export.grant in asked:
            found[export.grant] = export.terms
    return found


def _word(data: bytes, region: str, keys: Trusted) -> Standing:
    document = parse_document(data)
    if not isinstance(document, SignedDocument):
        raise RequestError("The broker lists an approval as an accepted truncation.")
    verify(document, {region: keys[region]})
    word = decode_body(document, Standing, Purpose.STANDING)
    if word.region != region or not isinstance(word.truncation, Truncation):
        raise RequestError("The broker lists something else as a truncation that the region accepted.")
    return word


async def _exports(region: str, asked: str, keys: Trusted) -> dict[str, tuple[SignedDocument, ExportGrant]]:
    """The exports that the region's broker holds, by grant: those that hold under these keys. Raises SignatureError where the one that is asked for does not."""
    found: dict[str, tuple[SignedDocument, ExportGrant]] = {}
    async with connect(region) as client:
        async for page in document_pages(client, "export"):
            for grant, data in page.documents.items():
                try:
                    document = parse_document(data)
                    assert isinstance(document, SignedDocument)
                    export = open_export(document, keys)
                except FelixError:
                    # Of the others `felix bridge list` says why.
                    if grant == asked:
                        raise
                    continue
                if export.grant == grant:
                    found[grant] = document, export
    return found
