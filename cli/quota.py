"""`felix quota`: what tenants and identities may use, and what they do use."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from cli.output import out, print_json, table
from cli.setting import IdentityOption, JsonOption, RegionOption, connect, folder_of, run
from felix.errors import RequestError
from felix.messages import QuotaState
from felix.names import SpiffeId
from felix.quota import LIMITS, QuotaLimits
from policy.quantity import Rate, Size

app = typer.Typer(no_args_is_help=True)

UNBOUND: Final = "none"
UNSET: Final = "default"

Who = Annotated[str, typer.Argument(help="A tenant; with --identity, an identity's name.")]
OfIdentity = Annotated[bool, typer.Option("--identity", help="NAME is an identity, not a tenant.")]
Kind = Annotated[str, typer.Option(help="With --identity: client, bridge or operator.")]
RateOption = Annotated[str, typer.Option(help="As in 10MiB/s; none: without bound, default: the region's.")]
SizeOption = Annotated[str, typer.Option(help="As in 50GiB; none: without bound, default: the region's.")]
CountOption = Annotated[str, typer.Option(help="A number; none: without bound, default: the region's.")]


@app.command("set")
def set_(
    name: Who,
    publish_bytes: RateOption = "",
    publish_records: CountOption = "",
    delivery_bytes: RateOption = "",
    delivery_records: CountOption = "",
    requests: CountOption = "",
    sessions: CountOption = "",
    subscriptions: CountOption = "",
    transactions: CountOption = "",
    leases: CountOption = "",
    streams: CountOption = "",
    stored_bytes: SizeOption = "",
    of_identity: OfIdentity = False,
    kind: Kind = "client",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Set limits, at once; what is not named stays."""
    texts = {
        "publish_bytes": publish_bytes,
        "publish_records": publish_records,
        "delivery_bytes": delivery_bytes,
        "delivery_records": delivery_records,
        "requests": requests,
        "sessions": sessions,
        "subscriptions": subscriptions,
        "transactions": transactions,
        "leases": leases,
        "streams": streams,
        "stored_bytes": stored_bytes,
    }
    limits, unset = parse_limits(texts)
    if not limits.named and not unset:
        raise RequestError("No limit is named.", hint="As in: felix quota set acme --publish-bytes 10MiB/s.")
    scope, holder = _holder(name, of_identity, kind, region)

    async def work() -> QuotaState:
        async with connect(region, identity) as client:
            return await client.put_quota(scope, holder, limits, unset)

    state = run(work())
    if json:
        print_json(state)
    else:
        print_quotas([state])


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A tenant, or with --identity an identity's name; all that are known if left out."
        ),
    ] = "",
    of_identity: OfIdentity = False,
    kind: Kind = "client",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Show what counts for one, beside what it uses."""
    scope, holder = _holder(name, of_identity, kind, region) if name else ("", "")
    if not name and of_identity:
        scope = "identity"
    states = run(_states(region, identity, scope, holder))
    if json:
        print_json(states)
    else:
        print_quotas(states)


@app.command("list")
def list_(region: RegionOption = "", identity: IdentityOption = "", json: JsonOption = False) -> None:
    """List who has limits or was seen lately, with what was refused and slowed down."""
    states = run(_states(region, identity, "", ""))
    if json:
        print_json(states)
        return
    table(
        "Quotas, and their use at this broker",
        [
            "of",
            "name",
            "own limits",
            "published/s#",
            "delivered/s#",
            "sessions#",
            "stored#",
            "slowed s#",
            "refused#",
        ],
        [
            (
                state.scope,
                state.name,
                ", ".join(
                    f"{limit} {show_amount(limit, value)}" for limit, value in state.limits.named.items()
                ),
                show_amount("publish_bytes", state.used.get("publish_bytes", 0)),
                show_amount("delivery_bytes", state.used.get("delivery_bytes", 0)),
                int(state.used.get("sessions", 0)),
                show_amount("stored_bytes", state.used.get("stored_bytes", 0))
                if state.scope == "tenant"
                else "",
                max(state.throttled_ms.values(), default=0) / 1000,
                sum(state.refused.values()),
            )
            for state in states
        ],
    )


@app.command()
def clear(
    name: Who,
    of_identity: OfIdentity = False,
    kind: Kind = "client",
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Take a tenant's or an identity's own limits away: the region's defaults count."""
    scope, holder = _holder(name, of_identity, kind, region)

    async def work() -> str:
        async with connect(region, identity) as client:
            return await client.delete_quota(scope, holder)

    out.print(run(work()) or f"The region's defaults count for {scope} {holder} now.")


async def _states(region: str, identity: str, scope: str, holder: str) -> list[QuotaState]:
    async with connect(region, identity) as client:
        return await client.list_quotas(scope, holder)


def _holder(name: str, of_identity: bool, kind: str, region: str) -> tuple[str, str]:
    """Scope and name, as the broker wants them."""
    if not of_identity:
        return "tenant", name
    if name.startswith("spiffe://"):
        return "identity", str(SpiffeId.parse(name))
    _, config = folder_of(region)
    return "identity", str(SpiffeId(config.region, config.mesh, kind, name))


def parse_limits(texts: dict[str, str]) -> tuple[QuotaLimits, list[str]]:
    """Limits from what people write, and the names of those that the default is to count for. Raises RequestError."""
    named: dict[str, int] = {}
    unset: list[str] = []
    for name, text in texts.items():
        if not text:
            continue
        if text == UNSET:
            unset.append(name)
        elif text == UNBOUND:
            named[name] = 0
        else:
            named[name] = _parse(name, text)
    return QuotaLimits(**named), unset


def _parse(name: str, text: str) -> int:
    if name in ("publish_bytes", "delivery_bytes"):
        value = int(Rate.parse(text))
    elif name == "stored_bytes":
        value = int(Size.parse(text))
    elif text.isascii() and text.isdecimal():
        value = int(text)
    else:
        raise RequestError(f"{text!r} is not a number of {name.replace('_', ' ')}.", hint="As in: 100.")
    if not value:
        raise RequestError(
            f"{name.replace('_', ' ')} of 0 would let nothing through, and no quota does that.",
            hint="Take the rights away (felix identity forbid), or say none for no bound.",
        )
    return value


def show_amount(name: str, value: float) -> str:
    """A limit or what is used of it, with its unit."""
    if name in ("publish_bytes", "delivery_bytes"):
        return f"{_bytes(value)}/s"
    if name == "stored_bytes":
        return _bytes(value)
    shown = f"{value:,.0f}"
    return f"{shown}/s" if name in ("publish_records", "delivery_records", "requests") else shown


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" or value == int(value) else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def print_quotas(states: list[QuotaState]) -> None:
    """A table for each: the limit that counts, where it comes from, and what is used of it."""
    for state in states:
        rows = []
        for name in LIMITS:
            limit, used = state.in_force.of(name) or 0, state.used.get(name, 0.0)
            if not limit and not used:
                continue
            share = f"{100 * used / limit:,.0f} %" if limit else ""
            slowed = state.throttled_ms.get(name, 0) / 1000
            rows.append(
                (
                    name,
                    show_amount(name, used),
                    show_amount(name, limit) if limit else "no bound",
                    share,
                    "own" if state.limits.of(name) is not None else "default" if limit else "",
                    f"{slowed:,.1f}" if slowed else "",
                )
            )
        title = f"{state.scope.capitalize()} {state.name}"
        if not rows:
            out.print(f"{title}: no limits, nothing used")
            continue
        table(title, ["limit of", "used#", "limit#", "share#", "set by", "slowed s#"], rows)
        if state.refused:
            found = ", ".join(f"{code} {count:,}" for code, count in sorted(state.refused.items()))
            out.print(f"refused since the start: {found}")
