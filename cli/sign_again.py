"""`felix bridge sign-again`: this region's half of a grant, with its policy key of now: the same terms, so approvals and the other half go on counting.

And where its links go on: truncations that it accepted, and resends, with the same content as before. What crossed since crossed under an incarnation that follows
from that (policy.truncation); another acceptance would begin another one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, cast

import typer

from cli.grants import known_bundles, operator_id, put_document
from cli.output import iso, out, styled
from cli.policy import fetch_policy
from cli.setting import IdentityOption, RegionOption, connect, folder_of, run
from cli.terms import confirm, show_terms
from felix.errors import Code, FelixError, RequestError
from felix.page import document_pages
from felix.runtime.real import now_ms
from keys.key_file import load_signing_key
from policy.approval import parse_document
from policy.grant import ExportGrant, Standing, open_export, sign_export, sign_import, sign_standing
from policy.signed import Purpose, SignedDocument, Trusted, decode_body, verify
from policy.truncation import Truncation


def sign_again(
    grant: Annotated[str, typer.Argument(help="The grant's id.")],
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
    identity: IdentityOption = "",
    region: RegionOption = "",
) -> None:
    """Sign this region's half of a grant again, with its policy key of now and under its policy in force: after that key, or the policy, was changed.

    The terms stay as they are, and so do the approvals. Truncations that were accepted are signed again, too. What the other region signed must be under its key of now.
    """
    folder, config = folder_of(region)
    own = known_bundles(folder)
    trusted = {name: bundle.policy_keys for name, bundle in own.items()}
    former = tuple(public for keys in own[config.region].former for public in keys.policy_keys)
    # Its own half is under a key that the region gave up. Whoever has that key can sign another one, so a person looks at the terms.
    keys = trusted | {config.region: (*trusted[config.region], *former)}
    document, export = run(_find(config.region, grant, keys))
    terms = export.terms
    show_terms(export)
    words = run(_going_on(config.region, grant, {config.region: former}, trusted))
    for word in words:
        cut = cast(Truncation, word.truncation)
        out.print(
            f"{cut.stream} shard {cut.shard} goes on from source offset {cut.offset}: {word.action} of {iso(word.at)}"
        )
    confirm(f"Sign these terms again for {config.region}?", yes)
    policy, key = run(fetch_policy(config.region)), load_signing_key(folder.policy_key).private_key
    if terms.from_region == config.region:
        run(put_document(config.region, "export", sign_export(terms, policy, key, now_ms()), identity))
    else:
        who = operator_id(config.region, identity)
        accepted = sign_import(document, policy, key, trusted, who, now_ms())
        run(put_document(config.region, "import", accepted, identity))
    for word in words:
        run(put_document(config.region, "standing", sign_standing(word, key), identity))
    out.print(styled((grant, "bold"), f"  is signed again by {config.region}"))


async def _going_on(region: str, grant: str, former: Trusted, trusted: Trusted) -> list[Standing]:
    """The region's words on where links of this grant go on, which only a key that it gave up stands behind: of those that end one incarnation the first."""
    said: dict[bool, list[Standing]] = {True: [], False: []}
    async with connect(region) as client:
        async for page in document_pages(client, "standing"):
            for data in page.documents.values():
                for is_former, keys in ((True, former), (False, trusted)):
                    # What neither key signed is told by others.
                    with suppress(FelixError):
                        said[is_former].append(_word(data, region, grant, keys))
    held = {_ended(word) for word in said[False]}
    first: dict[tuple[str, int, str], Standing] = {}
    for word in sorted(said[True], key=lambda word: word.at):
        if _ended(word) not in held:
            first.setdefault(_ended(word), word)
    return list(first.values())


def _word(data: bytes, region: str, grant: str, keys: Trusted) -> Standing:
    """Raises SignatureError, and RequestError where it is nothing of the kind."""
    document = parse_document(data)
    if not isinstance(document, SignedDocument) or document.region != region:
        raise RequestError("It is another region's, or an approval.")
    verify(document, keys)
    standing = decode_body(document, Standing, Purpose.STANDING)
    if (standing.grant, standing.region) != (grant, region) or not isinstance(
        standing.truncation, Truncation
    ):
        raise RequestError("It does not say where a link of the grant goes on.")
    return standing


def _ended(word: Standing) -> tuple[str, int, str]:
    cut = cast(Truncation, word.truncation)
    return cut.stream, cut.shard, cut.incarnation


async def _find(region: str, grant: str, keys: Trusted) -> tuple[SignedDocument, ExportGrant]:
    """The grant's export, as the region's broker holds it. Raises RequestError, SignatureError."""
    async with connect(region) as client:
        async for page in document_pages(client, "export"):
            if grant in page.documents:
                document = parse_document(page.documents[grant])
                assert isinstance(document, SignedDocument)
                export = open_export(document, keys)
                if export.grant == grant:
                    return document, export
    raise RequestError(f"{region} holds no grant {grant}.", code=Code.NOT_FOUND, hint="felix bridge list")
