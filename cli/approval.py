"""`felix bridge approve` and `submit`: people sign a grant's terms, here or on a machine that has no region."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from cli.grants import fetch_book, known_bundles, put_document, read_grant
from cli.output import note, out, print_json, styled
from cli.setting import JsonOption, RegionOption, folder_of, known_regions, read_file, run
from cli.terms import confirm, show_terms
from felix.errors import Code, RequestError
from felix.files import write_output
from felix.identity import Identity
from felix.identity_file import load_identity
from felix.names import SpiffeId
from felix.peer import TrustBundle
from felix.profile import identity_files
from felix.runtime.real import now_ms
from keys.bundle import RegionBundle, decode_bundle
from policy.approval import APPROVER, open_approval, parse_document, sign_approval
from policy.grant import ExportGrant, open_export
from policy.signed import Purpose
from region.folder import RegionFolder

KINDS = {
    Purpose.EXPORT: "export",
    Purpose.IMPORT: "import",
    Purpose.APPROVAL: "approval",
    Purpose.STANDING: "standing",
    Purpose.DENY: "deny",
}
"""The broker's names for the kinds of documents that `submit` sends."""


class _ApprovalContext(NamedTuple):
    """Where somebody approves: the region's folder where it is on this machine, and the bundles that are known here."""

    region: str
    folder: RegionFolder | None
    bundles: dict[str, RegionBundle]


def _context(region: str, named: Path | None, files: list[Path]) -> _ApprovalContext:
    bundles = [decode_bundle(read_file(path, "The bundle")).bundle for path in files]
    known = {bundle.region: bundle for bundle in bundles}
    if region or named is None or not files:
        folder, config = folder_of(region)
        return _ApprovalContext(config.region, folder, {**known_bundles(folder), **known})
    return _ApprovalContext("", None, known)


def _identity(as_: str, path: Path | None, context: _ApprovalContext) -> Identity:
    if path is None:
        assert context.folder is not None
        path, other = context.folder.identity(as_), context.folder.approver(as_)
        if other.exists() and load_identity(*identity_files(other)).spiffe_id.name == as_:
            path = other
        if not path.exists():
            raise RequestError(
                f"There is no identity {as_!r} in {path.parent}.",
                code=Code.NOT_FOUND,
                hint=f"Issue it: felix identity issue {as_} --kind {APPROVER} --region {context.region}, or give a path.",
            )
    identity = load_identity(*identity_files(path))
    now = now_ms()
    if now > identity.not_after_ms:
        raise RequestError(
            f"The certificate of {identity.spiffe_id} has expired.",
            code=Code.IDENTITY_EXPIRED,
            hint=f"Have it renewed: felix identity issue {identity.spiffe_id.name} --kind {APPROVER}.",
        )
    return identity


def _export(grant: str, context: _ApprovalContext) -> ExportGrant:
    """The verified export grant, from a file, a token, or by its id from the region's broker."""
    is_id = len(grant) == 18 and grant.startswith("g-") and not Path(grant).exists()
    if not is_id:
        trusted = {name: bundle.policy_keys for name, bundle in context.bundles.items()}
        return open_export(read_grant(grant), trusted)
    if context.folder is None:
        raise RequestError(
            f"{grant} is an id, and there is no region on this machine to ask for it.",
            hint="Give the grant's file, and the bundles of both regions with --bundle.",
        )
    export = run(fetch_book(context.region, context.folder)).get(grant, now_ms()).export
    if export is None:
        raise RequestError(f"{context.region} has no export grant {grant}.", code=Code.GRANT_MISSING)
    return export


def approve(
    grant: Annotated[str, typer.Argument(help="A grant's id, its file, or its token.")],
    as_: Annotated[
        str, typer.Option("--as", help="The approver: an identity's name in the region's folder, or a path.")
    ],
    comment: Annotated[str, typer.Option(help="One line that is signed, too.")] = "",
    bundle: Annotated[
        list[Path] | None,
        typer.Option(help="A region's bundle, where there is no region on this machine; may be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--out", help="Write the approval here, and hand it to nobody.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Approve a grant: show all its terms, ask, and sign their hash as one person."""
    path = Path(as_).expanduser() if "/" in as_ or as_.endswith(".pem") else None
    context = _context(region, path, bundle or [])
    identity = _identity(as_, path, context)
    export = _export(grant, context)
    terms, who = export.terms, identity.spiffe_id
    if who.kind != APPROVER or who.region not in (terms.from_region, terms.to_region):
        raise RequestError(
            f"{who} cannot approve {export.grant}: it takes an approver of {terms.from_region} or {terms.to_region}.",
            code=Code.FORBIDDEN,
            hint=f"Issue one: felix identity issue NAME --kind {APPROVER}.",
        )
    if not json:
        show_terms(export)
    if who.name == SpiffeId.parse(terms.drawn_up_by).name:
        note(
            f"{who.name} drew this grant up: where a region asks for separate people, the approval does not count"
        )
    confirm(f"Sign these terms as {who}?", yes)
    approval = sign_approval(bytes.fromhex(export.terms_hash), identity, now_ms(), comment)
    own = context.bundles.get(who.region)
    if own is not None:
        open_approval(approval, TrustBundle([own.anchor()]))
    brought = ""
    if output is None and context.folder is not None:
        brought = run(put_document(context.region, "approval", approval))
    else:
        output = output or Path(f"{export.grant}.{who.region}.{who.name}.approval")
        write_output(output, approval.encode_file())
    if json:
        print_json(
            {
                "grant": export.grant, "approver": str(who), "terms": terms, "file": str(output) if output else None,
                "token": approval.encode_token(),
            }
        )  # fmt: skip
    elif output is None:
        out.print(brought)
    else:
        out.print(styled((export.grant, "bold"), f"  approved by {who}"))
        out.print(f"  file   {output}")
        out.print(f"Hand it in where {who.region} is:  felix bridge submit {output} --region {who.region}")


def submit(
    files: Annotated[list[str], typer.Argument(help="Files or tokens: approvals, grants, acceptances.")],
    region: RegionOption = "",
) -> None:
    """Hand documents that were signed elsewhere to the region's broker, which verifies them."""
    for text in files:
        path = Path(text)
        is_file = len(text) < 1024 and path.is_file()
        if not is_file and len(text) < 200:
            raise RequestError(f"There is no file {text}.", code=Code.NOT_FOUND)
        document = parse_document(read_file(path, "The document") if is_file else text)
        if document.purpose not in KINDS:
            raise RequestError(
                f"{text[:200]} is a {document.purpose}, which is not handed in this way.",
                hint="A residency policy is put in force with: felix policy apply FILE.",
            )
        chosen = region or (document.region if document.region in known_regions() else "")
        out.print(run(put_document(chosen, KINDS[document.purpose], document)))
