"""The mesh as the regions of this home tell it: what each answers, and one map of it all. `survey` asks, `draw_map` is pure.

A region reports its own grant book; if two regions report one grant, the map has it once, with both reports where they differ. A
region that does not answer stays on the map, with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

import felix
from cli.grant_notes import SILENT_AFTER_MS
from cli.setting import connect
from cli.top import Sample
from felix.errors import FelixError
from felix.messages import AuditLog, Denial, GrantSummary, LinkState, MeshPage

ENDED: Final = frozenset(("revoked", "expired"))
"""States of a grant under which nothing is still to cross."""


class Survey(msgspec.Struct, frozen=True):
    """What one region answered; `problem` says why it did not, empty where it did. `told_ms`: when, by its broker's clock."""

    region: str
    problem: str = ""
    told_ms: int = 0
    sample: Sample | None = None
    mesh: MeshPage = MeshPage()


class RegionOnMap(msgspec.Struct, frozen=True, kw_only=True):
    """One region. `state`: up, down (it did not answer; `problem` says why), or known (others trust it, but it cannot be queried
    from here).
    """

    region: str
    mesh: str = ""
    country: str = ""
    jurisdiction: str = ""
    state: str = "known"
    problem: str = ""
    broker: str = ""
    streams: int = 0
    logs: list[AuditLog] = []


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """One grant, and over all shards of the streams that cross under it, what its agent says. `state` is the grant's where that lets nothing
    cross, else the link's; `no-agent` where no link was ever reported, `silent` where its agent is. Lags are -1 where unknown."""

    grant: str
    stream: str
    destination_stream: str
    from_region: str
    to_region: str
    state: str
    reason: str = ""
    expires_ms: int = 0
    shards: int = 0
    lag_records: int = -1
    lag_ms: int = -1
    crossed: int = 0
    withheld: int = 0
    filtered: int = 0
    told_by: list[str] = []


class MeshMap(msgspec.Struct, frozen=True, kw_only=True):
    """What `felix mesh` draws, and prints with `-o json`. `name`: the mesh's; of several, all."""

    name: str
    regions: list[RegionOnMap]
    crossings: list[Crossing]
    denials: list[Denial]


async def survey(client: felix.RegionClient, region: str) -> Survey:
    """Ask one region for everything. Raises what the client raises."""
    state = await client.describe()
    at_s = time.monotonic()
    told_ms, streams = await client.stream_traffic()
    readers = await client.reader_traffic()
    links, caches = await client.list_links(), await client.cache_traffic()
    # What quotas hold back is for operators (felix top).
    sample = Sample(at_s, state, streams, readers, [], links, caches)
    return Survey(region, "", told_ms, sample, await client.describe_mesh())


async def survey_all(regions: Sequence[str], identity: str) -> list[Survey]:
    """Ask every region at once; who does not answer has a problem."""

    async def one(region: str) -> Survey:
        try:
            async with connect(region, identity) as client:
                return await survey(client, region)
        except FelixError as error:
            return Survey(region, error.sentence)

    return list(await asyncio.gather(*map(one, regions)))


def draw_map(surveys: Sequence[Survey]) -> MeshMap:
    """One map of what was answered. Regions, crossings and denials are sorted; each stands there once."""
    grants: dict[str, dict[str, GrantSummary]] = {}
    links: dict[str, list[LinkState]] = {}
    denials: dict[tuple[str, str, str], Denial] = {}
    for each in surveys:
        for grant in each.mesh.grants:
            grants.setdefault(grant.grant, {})[each.region] = grant
        for entry in each.mesh.denials:
            denials[entry.streams, entry.region, entry.peer] = entry
        for link in each.sample.links if each.sample else ():
            links.setdefault(link.grant, []).append(link)
    told = {each.region: each.told_ms for each in surveys}
    crossings = [_crossing(said, links.get(grant, []), told) for grant, said in grants.items()]
    crossings.sort(key=lambda each: (each.from_region, each.to_region, each.stream, each.grant))
    regions = _regions(surveys, crossings)
    return MeshMap(
        name=", ".join(sorted({each.mesh for each in regions if each.mesh})),
        regions=regions,
        crossings=crossings,
        denials=[denials[key] for key in sorted(denials)],
    )


def _regions(surveys: Sequence[Survey], crossings: Iterable[Crossing]) -> list[RegionOnMap]:
    known = {found.region: found for each in surveys for found in each.mesh.regions}
    answers = {each.region: each for each in surveys}
    names = {*known, *answers}
    for crossing in crossings:
        names |= {crossing.from_region, crossing.to_region}
    made = []
    for name in sorted(names):
        said, its = known.get(name), answers.get(name)
        sample = its.sample if its else None
        made.append(
            RegionOnMap(
                region=name,
                mesh=said.mesh if said else "",
                country=said.country if said else "",
                jurisdiction=said.jurisdiction if said else "",
                state="known" if its is None else "down" if sample is None else "up",
                problem=its.problem if its else "",
                broker=sample.region.broker if sample else "",
                streams=len(sample.streams) if sample else 0,
                logs=its.mesh.logs if its else [],
            )
        )
    return made


def _crossing(said: dict[str, GrantSummary], links: Sequence[LinkState], told: dict[str, int]) -> Crossing:
    """`said`: the grant as each region has it; the source's word comes first, since its agent carries it."""
    one = next(iter(said.values()))
    grant = said.get(one.from_region, one)
    differing = {region: each for region, each in sorted(said.items()) if each.state != grant.state}
    state, reason = grant.state, grant.reason
    if differing:
        reason = "; ".join(
            [
                *([reason] if reason else []),
                *(f"{name} has it as {each.state}" for name, each in differing.items()),
            ]
        )
    elif state == "active" and grant.from_region in said:
        state, reason = _link_state(links, told[grant.from_region])
    lags = [link.lag_records for link in links]
    times = [link.lag_ms for link in links]
    return Crossing(
        grant=grant.grant,
        stream=grant.stream,
        destination_stream=grant.destination_stream,
        from_region=grant.from_region,
        to_region=grant.to_region,
        state=state,
        reason=reason,
        expires_ms=grant.expires_ms,
        shards=len(links),
        lag_records=sum(lags) if lags and min(lags) >= 0 and state not in ENDED else -1,
        lag_ms=max(times, default=-1) if times and min(times) >= 0 and state not in ENDED else -1,
        # Counters are of a stream and shard, under all its grants.
        crossed=sum(link.crossed for link in links),
        withheld=sum(link.withheld for link in links),
        filtered=sum(link.filtered for link in links),
        told_by=sorted(said),
    )  # fmt: skip


def _link_state(links: Sequence[LinkState], told_ms: int) -> tuple[str, str]:
    if not links:
        return "no-agent", "no bridge agent has reported this link"
    newest = max(link.reported_ms for link in links)
    if told_ms - newest > SILENT_AFTER_MS:
        return "silent", f"its agent said nothing for {(told_ms - newest) // 1000} s"
    # One shard that stands still is what a person must see.
    worst = next((link for link in links if link.state != "active"), None)
    worst = worst or next((link for link in links if link.reason), links[0])
    return worst.state, worst.reason
