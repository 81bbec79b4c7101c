"""What a person should know of grants beside their terms: what an offered one waits for, and what a new one lets across. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from felix.messages import LinkState, StreamState
from felix.names import SpiffeId
from policy.grant import GrantState, GrantView, carrying_rank
from policy.terms import GrantTerms

SILENT_AFTER_MS: Final = 30_000
"""An agent reports its links every second: who said nothing for so long is gone, whatever its last word was."""


def silent_notes(links: Iterable[LinkState], now_ms: int) -> list[str]:
    """A sentence for each bridge whose agent has reported nothing for a while: what is shown of its links is of then."""
    newest: dict[str, int] = {}
    for link in links:
        newest[link.bridge] = max(link.reported_ms, newest.get(link.bridge, 0))
    return [
        f"{bridge} has said nothing for {(now_ms - reported) // 1_000:,} s: its links are shown as they were then. Look whether its agent runs, and reaches this region."
        for bridge, reported in sorted(newest.items())
        if reported and now_ms - reported > SILENT_AFTER_MS
    ]


def waiting_notes(views: Iterable[GrantView], region: str, connected: Collection[str]) -> list[str]:
    """A sentence for each grant that waits for something, which begins with its id."""
    said = ((view.grant, what_it_waits_for(view, region, connected)) for view in views)
    return [f"{grant} {'; '.join(found)}" for grant, found in said if found]


def what_it_waits_for(view: GrantView, region: str, connected: Collection[str]) -> list[str]:
    """Why nothing crosses under a grant yet, or now, for want of a half, an approval or a bridge; empty where nothing is missing.

    `connected`: the names of the region's own bridges that have a session with it.
    """
    said = [view.waits_for] if view.waits_for else []
    terms = None if view.export is None else view.export.terms
    if terms is not None and terms.to_region == region and said and view.state is GrantState.OFFERED:
        said.extend(
            f"what is signed in {tally.region} comes with its bridge"
            for tally in view.approvals
            if tally.missing and tally.region == terms.from_region
        )
    if (
        terms is None
        or terms.from_region != region
        or view.state not in (GrantState.OFFERED, GrantState.ACTIVE)
    ):
        return said
    bridge = SpiffeId.parse(terms.bridge).name
    if bridge not in connected:
        brings = ", and what is signed there comes only with it" if view.state is GrantState.OFFERED else ""
        said.append(
            f"its bridge {bridge} is not connected{brings} (felix bridge up {bridge} --region {region})"
        )
    return said


def backlog_note(
    terms: GrantTerms, views: Iterable[GrantView], state: StreamState, links: Iterable[LinkState]
) -> str:
    """What the stream holds that would cross under these terms; empty where it is nothing.

    A link continues where the previous one stopped, under whichever grant that was: `views` are the grants of the region's grant
    book, `links` what agents last reported of theirs.
    """
    leading = _leading_there(terms, views)
    active = [view for view in leading if view.state is GrantState.ACTIVE and view.export is not None]
    holding = [view.grant for view in active if _bridge_of(view) == terms.bridge]
    if not holding and active:
        return (
            f"{active[0].grant} holds for {_bridge_of(active[0])}, and leads into the same stream there: one of the two bridges carries at a time, under its own terms, and the other "
            "stands by"
        )
    if holding:
        return (
            f"{holding[0]} holds, and leads into the same stream there: nothing crosses under this grant before that one ends "
            f"(felix bridge revoke {holding[0]})"
        )
    before = [view.grant for view in leading]
    known = [link for link in links if link.grant in before and link.stream == terms.stream]
    waiting, held = 0, 0
    for shard, each in enumerate(state.state):
        stopped = max((link.position for link in known if link.shard == shard), default=0)
        waiting += max(0, each.high_watermark - max(each.log_start, stopped))
        held += each.high_watermark - each.log_start
    records = _records(waiting)
    if not before:
        return f"the grant covers the {records} that the stream holds already" if held else ""
    goes_on = f"{before[-1]} led into the same stream there: this grant goes on where its link stopped, and covers what was published since"
    if not known:
        return goes_on
    said = []
    # An agent that has started again knows where a link stands once that has opened.
    if any(link.position < 0 and (link.crossed or link.withheld or link.filtered) for link in known):
        said.append(goes_on)
    elif waiting:
        said.append(
            f"{before[-1]} led into the same stream there, and its link stopped {records} ago: this grant covers them, too. "
            "A filter on one of their fields leaves them out, on the record (--filter)"
        )
    withheld = sum(
        max(link.withheld for link in known if link.shard == shard)
        for shard in {link.shard for link in known}
    )
    if withheld:
        said.append(
            f"{_records(withheld)} stayed under earlier grants into that stream: what of them has not crossed since, felix bridge "
            "resend sends again under this one"
        )
    return ". ".join(said)


def carried_by_another(view: GrantView, views: Iterable[GrantView]) -> str:
    """The grant that carries this one's stream into the same one in its place, since it holds and was signed first; or that may, since it is another bridge's, and has other records
    cross; empty where there is none."""
    if view.export is None:
        return ""
    terms = view.export.terms
    others = (other for other in views if other.grant != view.grant)
    holding = [
        other.export
        for other in _leading_there(terms, others)
        if other.state is GrantState.ACTIVE and other.export is not None
    ]
    # Whichever bridge has the link carries, whatever was signed first.
    for export in holding:
        if export.terms.bridge != terms.bridge and export.terms.transform != terms.transform:
            return export.grant
    holding = [export for export in holding if export.terms.bridge == terms.bridge]
    if view.state is GrantState.ACTIVE:
        holding.append(view.export)
    first = min(holding, key=carrying_rank, default=view.export)
    return "" if first is view.export else first.grant


def _bridge_of(view: GrantView) -> str:
    return "" if view.export is None else view.export.terms.bridge


def _leading_there(terms: GrantTerms, views: Iterable[GrantView]) -> list[GrantView]:
    into = terms.destination_stream or terms.stream
    return [
        view
        for view in views
        if view.export is not None
        and view.accepted is not None
        and view.export.terms.to_region == terms.to_region
        and view.export.terms.stream == terms.stream
        and (view.export.terms.destination_stream or view.export.terms.stream) == into
    ]


def _records(count: int) -> str:
    return f"{count:,} record{'' if count == 1 else 's'}"


def where_truncations_are(view: GrantView, region: str) -> str:
    """What to do where this region knows of no truncated link of the grant."""
    if view.export is not None and (source := view.export.terms.from_region) != region:
        return f"The source decides: felix bridge resume {view.grant} --accept-truncation --region {source}."
    return "See felix bridge status while the bridge runs: it says which links are truncated."
