"""`felix bridge resend`: what stayed in the source region crosses under the terms that hold now."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from cli.grant_notes import carried_by_another
from cli.grants import fetch_book, stand
from cli.output import out
from cli.setting import RegionOption, connect, folder_of, run
from cli.terms import confirm
from felix.errors import Code, RequestError
from felix.messages import StreamState
from felix.names import StreamName
from felix.runtime.real import now_ms
from policy.grant import GrantBook, GrantState, GrantView, StandingAction
from policy.quantity import Duration
from policy.truncation import TRUNCATIONS_MAX, Truncation
from region.folder import RegionFolder

FIND_S: Final = 10.0
"""How long the first record after a time is waited for."""
POLL_S: Final = 0.5
"""Between two looks at a grant whose acceptance is on its way."""


def resend(
    grant: Annotated[
        str, typer.Argument(help="A grant that holds; its id, as `felix bridge list` shows it.")
    ],
    start: Annotated[
        str, typer.Option("--from", help="A source offset, or a time with its zone: from there on.")
    ],
    shard: Annotated[int, typer.Option(help="Only this shard; all of them if left out.")] = -1,
    stream: Annotated[str, typer.Option(help="Which stream, where the grant is a pattern.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: Annotated[str, typer.Option(help="For the register and the audit log.")] = "",
    wait: Annotated[str, typer.Option(help="Wait so long for an acceptance that is on its way.")] = "30s",
    region: RegionOption = "",
) -> None:
    """Go back for records that were withheld or filtered: they cross under this grant. What crossed does not come again."""
    folder, config = folder_of(region)
    book = run(_book_when_accepted(config.region, folder, grant, Duration.parse(wait)))
    view = book.get(grant, now_ms())
    name = _stream(view, config.region, stream)
    if other := carried_by_another(view, book.list(now_ms())):
        raise RequestError(
            f"{other} holds, and leads {name} into the same stream there: what is sent again would cross under its terms.",
            code=Code.CONFLICT,
            hint=f"Revoke it first: felix bridge revoke {other}; or pause it until what is sent again has crossed.",
        )
    state = run(_describe(config.region, name))
    if shard >= state.shards:
        raise RequestError(f"{name} has no shard {shard}: it has {state.shards}, from 0 on.")
    crossed = run(_crossed(config.region, view, name))
    back = []
    for at in range(state.shards) if shard < 0 else [shard]:
        held = state.state[at]
        first = run(_offset(config.region, name, at, start))
        if first is None or first >= held.high_watermark:
            out.print(
                f"{name} shard {at}: nothing was written from {start} on; it ends at {held.high_watermark}."
            )
            continue
        if first < held.log_start:
            out.print(f"{name} shard {at}: records below {held.log_start} are gone at the source.")
            first = held.log_start
        lives = book.incarnations(view.grant, name, at, state.incarnation, crossed.get(at, ()))
        if len(lives) > TRUNCATIONS_MAX:
            raise RequestError(
                f"{name} shard {at} went back {TRUNCATIONS_MAX} times under grants into this stream; there is no more.",
                hint="Grant it into another stream: felix bridge allow … --as-stream.",
            )
        out.print(
            f"{name} shard {at}: offsets {first} to {held.high_watermark - 1} are looked at again; what crossed before stays."
        )
        # Which epoch it is need not be known: nothing was cut.
        back.append(
            Truncation(stream=name, shard=at, incarnation=lives[-1].incarnation.hex(), epoch=0, offset=first)
        )
    if not back:
        raise RequestError("There is nothing to send again.", code=Code.NOT_FOUND)
    confirm(f"Let what stayed cross under {view.grant}, on the record of both regions?", yes)
    for each in back:
        out.print(stand(folder, config, view.grant, StandingAction.RESEND, reason, each))


async def _crossed(region: str, view: GrantView, stream: str) -> dict[int, list[bytes]]:
    """Under which incarnations the stream's shards cross into that region, by shard, as their bridges say: also under other grants, and
    names. What follows from no document about this one says nothing."""
    assert view.export is not None
    to_region, found = view.export.terms.to_region, dict[int, list[bytes]]()
    async with connect(region) as client:
        for link in await client.list_links():
            if (link.stream, link.to_region) == (stream, to_region) and link.incarnation:
                found.setdefault(link.shard, []).append(link.incarnation)
    return found


async def _book_when_accepted(region: str, folder: RegionFolder, grant: str, wait: Duration) -> GrantBook:
    """The region's grant book, once the grant is no longer only offered, or after so long a wait: a bridge brings acceptances by
    itself.
    """
    until_ms = now_ms() + wait
    told = False
    while True:
        book = await fetch_book(region, folder)
        if book.get(grant, now_ms()).state is not GrantState.OFFERED or now_ms() >= until_ms:
            return book
        if not told:
            out.print(
                f"{grant} is offered: waiting up to {wait} for its acceptance, which the bridge brings."
            )
            told = True
        await asyncio.sleep(POLL_S)


def _stream(view: GrantView, region: str, stream: str) -> str:
    """The source stream that is meant. Raises RequestError where this region is not the grant's source, or it does not hold."""
    if view.export is None or view.export.terms.from_region != region:
        raise RequestError(f"{region} is not the source of {view.grant}; only the source sends again.")
    if view.state is not GrantState.ACTIVE:
        if view.state is GrantState.OFFERED:
            raise RequestError(
                f"The grant {view.grant} is offered, and its acceptance has not come: nothing crosses under it.",
                code=Code.FORBIDDEN,
                hint="felix bridge list says what it waits for. Let the bridge run, or wait longer: --wait 5m.",
            )
        raise RequestError(
            f"The grant {view.grant} is {view.state.value}: nothing crosses under it.",
            code=Code.FORBIDDEN,
            hint="Draw up a new one with the right terms (felix bridge allow), and send again under that.",
        )
    terms = view.export.terms
    if not terms.wildcard:
        return terms.stream
    if not stream or not terms.pattern.matches(StreamName.parse(stream)):
        raise RequestError(f"The grant is for {terms.stream}: name one of these streams with --stream.")
    return stream


async def _describe(region: str, name: str) -> StreamState:
    async with connect(region) as client:
        return await client.describe_stream(name)


async def _offset(region: str, name: str, shard: int, start: str) -> int | None:
    """The source offset that is meant: a number, or that of the first record of this time or later; None: there is none."""
    if start.isascii() and start.isdecimal():
        return int(start)
    try:
        moment = datetime.fromisoformat(start)
    except ValueError:
        raise RequestError(
            f"{start!r} is neither an offset nor a time.", hint="Write 1200, or 2027-01-31T12:00:00Z."
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    async with connect(region) as client:
        try:
            async with asyncio.timeout(FIND_S):
                async for record in client.stream(name).subscribe(start=moment, shards=[shard]):
                    return record.offset
        except TimeoutError:
            return None
    return None
