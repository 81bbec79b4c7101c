"""`felix identity`: issue identities, and say what they may do."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from cli.output import iso, lines, note, out, print_json, styled, table
from cli.process import read_state
from cli.setting import IdentityOption, JsonOption, RegionOption, connect, folder_of, run
from felix.certificate import read_certificates
from felix.errors import FelixError, RequestError
from felix.files import read_file
from felix.identity_file import load_identity
from felix.names import SpiffeId
from felix.runtime.real import now_ms
from keys.authority import load_authority, save_issuing
from keys.bundle import decode_bundle
from keys.identity_request import requested_key
from policy.access import parse_rights
from policy.quantity import Duration
from region.bootstrap import certify_identity, identity_file, issue_identity
from region.client_folder import write_client_folder

app = typer.Typer(no_args_is_help=True)

Kind = Annotated[str, typer.Option(help="client, bridge, operator, approver or broker.")]


@app.command()
def issue(
    name: Annotated[str, typer.Argument(help="Its name, as in orders-svc.")],
    allow: Annotated[
        list[str] | None, typer.Option(help="A right, as in 'publish acme/ops/*'; may be repeated.")
    ] = None,
    kind: Kind = "client",
    lifetime: Annotated[str, typer.Option(help="How long the certificate holds, as in 30d.")] = "",
    renewable_for: Annotated[
        str, typer.Option(help="How long from now on it may renew itself, as in 90d; 0s: not at all.")
    ] = "",
    request: Annotated[
        Path | None,
        typer.Option(
            help="A certificate request (PKCS #10) of whoever has made the key and keeps it; takes --home.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            help="Also put what it needs on another machine into this folder, which is FELIX_HOME there.",
            file_okay=False,
        ),
    ] = None,
    region: RegionOption = "",
) -> None:
    """Issue (or renew) an identity; with --allow, give it these rights and no others."""
    folder, config = folder_of(region)
    if request is not None and home is None:
        raise RequestError(
            "The certificate of a requested identity is not kept here.",
            hint="Say with --home which folder it is written to, for the machine that has the key.",
        )
    rights = [str(right) for text in allow or [] for right in parse_rights(text)]
    if rights and read_state(folder.broker_pid) is None:
        raise RequestError(
            f"Rights are kept by the region's broker, and that of {config.region} does not run.",
            hint=f"Start it first: felix region up {config.region} --detach.",
        )
    life = timedelta(milliseconds=Duration.parse(lifetime)) if lifetime else None
    span = timedelta(milliseconds=Duration.parse(renewable_for)) if renewable_for else None
    issued_ms = now_ms()
    files: list[Path] = []
    if request is not None and home is not None:
        key = requested_key(read_file(request, "the certificate request"))
        spiffe_id, chain = certify_identity(
            folder, config, kind, name, key, issued_ms, lifetime=life, renewable_for=span
        )
        files.append(write_client_folder(folder, home, spiffe_id, chain))
    else:
        identity = issue_identity(folder, config, kind, name, issued_ms, lifetime=life, renewable_for=span)
        spiffe_id, chain = identity.spiffe_id, identity.chain_pem
        files.append(identity_file(folder, spiffe_id))
        if home is not None:
            files.append(write_client_folder(folder, home, spiffe_id, chain, identity.key_pem()))
    if rights:
        run(_put_rights(config.region, str(spiffe_id), rights))
    leaf, *above = read_certificates(chain)
    end_ms = min(each.not_after_ms for each in (leaf, *above))
    out.print(styled((str(spiffe_id), "bold"), f" is valid until {iso(end_ms)}"))
    # Certificates count in seconds.
    if life is not None and end_ms + 1000 < issued_ms + life / timedelta(milliseconds=1):
        note(
            "that is sooner than asked for: no identity outlives the certificate that the region issues with"
        )
    for path in files:
        out.print(f"  {path}")
    if leaf.renewal is not None and leaf.renewal.until_ms > end_ms:
        out.print(f"  renews itself while it is used, until {iso(leaf.renewal.until_ms)}")
    elif leaf.renewal is not None:
        out.print("  does not renew itself: issue it again before it ends")
    for right in rights:
        out.print(f"  may {right}")
    if home is not None:
        out.print(f"Copy {home} to its machine, whole, and set FELIX_HOME to it there.")
    if request is not None:
        out.print(f"The key goes beside the certificate, as {files[0].with_suffix('.key').name}, mode 600.")
    if kind == "bridge":
        out.print("The bundle names this bridge's audit log now: regions that trust this one need it again.")
        out.print(f"  {folder.bundle}")
        bundle = decode_bundle(folder.bundle.read_bytes()).bundle
        out.print(f"  fingerprint {bundle.fingerprint()}, the same as before")


async def _put_rights(region: str, identity: str, rights: list[str]) -> None:
    async with connect(region) as client:
        await client.put_rights(identity, rights)


@app.command()
def allow(
    name: Annotated[str, typer.Argument(help="The identity's name.")],
    rights: Annotated[
        list[str], typer.Argument(help="All its rights from now on; `felix identity forbid` takes all away.")
    ],
    kind: Kind = "client",
    region: RegionOption = "",
) -> None:
    """Replace what an identity may do, at once, in sessions that are open too."""
    _, config = folder_of(region)
    wanted = [str(right) for text in rights for right in parse_rights(text)]
    identity = SpiffeId(config.region, config.mesh, kind, name)
    run(_put_rights(config.region, str(identity), wanted))
    out.print(f"{identity} may now: {'; '.join(wanted)}")


@app.command()
def forbid(
    name: Annotated[str, typer.Argument(help="The identity's name.")],
    kind: Kind = "client",
    region: RegionOption = "",
) -> None:
    """Take all rights away, at once: its publishers and subscriptions end."""
    _, config = folder_of(region)
    identity = SpiffeId(config.region, config.mesh, kind, name)
    run(_put_rights(config.region, str(identity), []))
    out.print(f"{identity} may nothing any more")


@app.command("list")
def list_(region: RegionOption = "", identity: IdentityOption = "", json: JsonOption = False) -> None:
    """List the identities in the region's folder, and the rights that the broker holds."""
    folder, config = folder_of(region)
    rights = run(_rights(config.region, identity)) if read_state(folder.broker_pid) else {}
    rows: list[dict[str, object]] = []
    for path in sorted(folder.identities.glob("*.pem")):
        if path.name.endswith((".audit.pem", ".audit.mldsa.pem")):
            continue
        try:
            held = load_identity(path)
        except FelixError as error:
            rows.append({"identity": path.stem, "until": str(error), "rights": []})
            continue
        name = str(held.spiffe_id)
        rows.append({"identity": name, "until": iso(held.not_after_ms), "rights": rights.pop(name, [])})
    rows += [{"identity": name, "until": "", "rights": found} for name, found in sorted(rights.items())]
    if json:
        print_json(rows)
        return
    table(
        f"Identities of {config.region}",
        ["identity", "valid until", "rights"],
        [[r["identity"], r["until"], lines(r["rights"])] for r in rows],  # type: ignore[arg-type]
    )


async def _rights(region: str, identity: str) -> dict[str, list[str]]:
    async with connect(region, identity) as client:
        return await client.list_rights()


@app.command()
def renew_issuing(region: RegionOption = "") -> None:
    """Renew the certificate that the region issues identities with; this takes the root key."""
    folder, config = folder_of(region)
    authority = load_authority(folder.authority, config.region, config.mesh).renew_issuing(now_ms())
    save_issuing(authority, folder.authority)
    _, end_ms = authority.lives()["issuing"]
    out.print(f"the issuing certificate of {authority.trust_domain} is valid until {iso(end_ms)}")
    out.print("  Identities that were issued before stay valid; a broker that runs takes it by itself.")
