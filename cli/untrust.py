"""`felix region untrust`: a region that is dissolved, sold or hostile is trusted no more; what it signed until then still verifies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.form import chosen
from cli.grants import fetch_book, stand
from cli.output import counted, iso, note, out, table
from cli.setting import RegionOption, folder_of, run
from cli.trust import Stood, not_told, put_documents
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.messages import PutDocument
from felix.names import parse_region
from felix.runtime.real import now_ms
from policy.grant import GrantState, GrantView, StandingAction
from region.folder import RegionFolder

if TYPE_CHECKING:
    from region.config import RegionConfig

GRANTS_NAMED: Final = 8
"""In the refusal; the table above it has all of them."""
_OVER: Final = (GrantState.REVOKED, GrantState.EXPIRED)


def untrust(
    other: Annotated[str, typer.Argument(help="The other region's name.", show_default=False)],
    region: RegionOption = "",
    revoke: Annotated[
        str,
        typer.Option(
            help="Revoke the grants with it that have not ended, first, for this reason; without it they keep the trust from being taken back.",
            show_default=False,
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Ask no broker for grants, and tell none: the first one that starts with this folder tells the others.",
        ),
    ] = False,
) -> None:
    """Trust another region no more: none of its bridges comes in, and nothing that it signs allows anything. What crossed before still verifies.

    It is signed with the policy key, has a leaf in the audit log, and reaches every broker and agent of this region. Until
    its bundle is compared again (`felix region trust`), nothing brings the trust back.
    """
    from region.trust.trusted_bundles import is_withdrawn

    folder, config = folder_of(region)
    _require_known(folder, config, other)
    if is_withdrawn(folder, other):
        _tell_again(folder, config, other, offline=offline)
        return
    if offline and revoke:
        raise RequestError(
            "Nothing is revoked without a broker.", hint="Leave --offline out, or --revoke REASON."
        )
    views = [] if offline else _standing(folder, config, other)
    if views:
        table(
            f"Grants with {other} that have not ended",
            ["grant", "state", "stream", "from", "to", "until"],
            [_row(view) for view in views],
        )
    if views and not revoke:
        named = [view.grant for view in views[:GRANTS_NAMED]]
        more = f" and {len(views) - len(named)} more" if len(views) > len(named) else ""
        raise RequestError(
            f"{counted(len(views), 'grant')} with {other} {'has' if len(views) == 1 else 'have'} not ended: {', '.join(named)}{more}.",
            code=Code.CONFLICT,
            hint=f"felix region untrust {other} --region {config.region} --revoke REASON revokes them first, for good, so that both regions' logs have it.",
        )
    _confirm(config, other, len(views), yes=yes)
    for view in views:
        out.print(stand(folder, config, view.grant, StandingAction.REVOKE, revoke))
    _withdraw(folder, config, other, offline=offline)
    out.print(
        f"{config.region} does not trust {other} any more; what it signed until now verifies by {folder.trusted / other}.json"
    )
    for sentence in _left(folder, other):
        note(sentence)


def _require_known(folder: RegionFolder, config: RegionConfig, other: str) -> None:
    """Raises RequestError where there is nobody to trust no more, or nothing to sign it with."""
    from region.trust.trusted_bundles import trusted_file

    if other == config.region:
        raise RequestError(f"{other} is this region itself.", hint="Name another one.")
    trusted_file(folder, parse_region(other))
    if not folder.policy_key.exists():
        raise RequestError(
            f"There is no policy key in {folder.secrets} to sign with that {other} is not trusted any more.",
            code=Code.CONFLICT,
            hint="Run it on the machine that has the key; all brokers and agents learn of it.",
        )


def _standing(folder: RegionFolder, config: RegionConfig, other: str) -> list[GrantView]:
    """The grants between both regions that are neither revoked nor expired. Raises UnavailableError where no broker says."""
    try:
        book = run(fetch_book(config.region, folder))
    except UnavailableError as error:
        raise UnavailableError(
            f"No broker of {config.region} says which grants there are with {other}. {error.sentence}",
            code=error.code,
            hint="Start one. Or --offline: then nothing is revoked, and brokers learn of it as they start.",
            retry_after_ms=error.retry_after_ms,
        ) from error
    return [view for view in book.list(now_ms()) if view.state not in _OVER and other in _ends(view)]


def _ends(view: GrantView) -> tuple[str, ...]:
    if view.export is not None:
        return view.export.terms.from_region, view.export.terms.to_region
    return () if view.accepted is None else (view.accepted.from_region, view.accepted.to_region)


def _row(view: GrantView) -> list[str]:
    stream = view.accepted.stream if view.accepted is not None else ""
    if view.export is not None:
        stream = view.export.terms.stream
    until = "" if view.export is None else iso(view.export.terms.expires)
    return [view.grant, view.state.value, stream, *_ends(view), until]


def _confirm(config: RegionConfig, other: str, grants: int, *, yes: bool) -> None:
    """Ask at a terminal. Raises RequestError where nobody answers, or the answer is no."""
    if yes:
        return
    if chosen.is_data:
        raise RequestError(
            f"Nobody said yes to {config.region} trusting {other} no more, and with -o {chosen.form} nothing is shown before.",
            hint="Call it without -o or --json to read which grants end, or with --yes.",
        )
    if not sys.stdin.isatty():
        raise RequestError(
            f"Nobody said yes to {config.region} trusting {other} no more, and there is no terminal to ask at.",
            hint="Call it with --yes.",
        )
    ended = f", and revoke {counted(grants, 'grant')} for good" if grants else ""
    if not typer.confirm(f"Trust {other} no more{ended}?", err=True):
        raise RequestError(f"{other} is trusted as before; nothing was changed.")


def _withdraw(folder: RegionFolder, config: RegionConfig, other: str, *, offline: bool) -> None:
    """Sign it, and tell the brokers. Raises what a broker refuses, and the folder is as before; UnavailableError where none was told."""
    from region.bootstrap import withdraw_trust

    before = Stood.read(folder.pin(other))
    document = PutDocument("pin", withdraw_trust(folder, other, now_ms()).encode())
    if offline:
        return
    try:
        run(put_documents(config.region, [document]))
    except UnavailableError as error:
        raise not_told(folder, config.region, error) from error
    except FelixError as error:
        if error.told:
            before.put_back()
            raise
        raise not_told(folder, config.region, error) from error


def _tell_again(folder: RegionFolder, config: RegionConfig, other: str, *, offline: bool) -> None:
    """What was taken back here is handed over once more: a broker may not have been told."""
    if not offline:
        run(put_documents(config.region, [PutDocument("pin", folder.pin(other).read_bytes())]))
    out.print(f"{config.region} does not trust {other} any more already")


def _left(folder: RegionFolder, other: str) -> Iterator[str]:
    """What this command does not change, for a person."""
    yield (
        f"{other} may trust this region still: have its operator run felix region untrust, too. Its word on what it did with the records that crossed is all there is."
    )
    named = sorted(path.parent.name for path in folder.bridges.glob("*/bridge.yaml") if _names(path, other))
    for bridge in named:
        yield f"The bridge {bridge} has {other} among its destinations: take it out of {folder.bridge(bridge) / 'bridge.yaml'}, and restart its agent."
    yield f"Rules of the residency policy that name {other} stand: felix policy apply puts one in force without them."


def _names(path: Path, other: str) -> bool:
    from bridge.config import load_config

    try:
        return any(each.region == other for each in load_config(path).destinations)
    except (FelixError, OSError):
        return False
