"""`felix bridge sign-again`: this region's half of a grant, with its policy key of now: the same terms, so approvals and the other half go on counting."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.grants import known_bundles, operator_id, put_document
from cli.output import out, styled
from cli.policy import fetch_policy
from cli.setting import IdentityOption, RegionOption, connect, folder_of, run
from cli.terms import confirm, show_terms
from felix.errors import Code, RequestError
from felix.page import document_pages
from felix.runtime.real import now_ms
from keys.key_file import load_signing_key
from policy.approval import parse_document
from policy.grant import ExportGrant, open_export, sign_export, sign_import
from policy.signed import SignedDocument, Trusted


def sign_again(
    grant: Annotated[str, typer.Argument(help="The grant's id.")],
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
    identity: IdentityOption = "",
    region: RegionOption = "",
) -> None:
    """Sign this region's half of a grant again, with its policy key of now and under its policy in force: after that key, or the policy, was changed.

    The terms stay as they are, and so do the approvals. What the other region signed must be under its key of now.
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
    confirm(f"Sign these terms again for {config.region}?", yes)
    policy, key = run(fetch_policy(config.region)), load_signing_key(folder.policy_key).private_key
    if terms.from_region == config.region:
        run(put_document(config.region, "export", sign_export(terms, policy, key, now_ms()), identity))
    else:
        who = operator_id(config.region, identity)
        accepted = sign_import(document, policy, key, trusted, who, now_ms())
        run(put_document(config.region, "import", accepted, identity))
    out.print(styled((grant, "bold"), f"  is signed again by {config.region}"))


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
