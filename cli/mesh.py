"""`felix mesh`: the regions, what may cross between them, and how that goes, drawn as a tree."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.text import Text
from rich.tree import Tree

from cli.form import chosen
from cli.mesh_map import ENDED, Crossing, MeshMap, RegionOnMap, draw_map, survey_all
from cli.output import counted, iso, note, out, print_json, styled
from cli.setting import IdentityOption, JsonOption, choose_region, known_regions, run
from felix.messages import AuditLog, Denial
from felix.visible import spelled_out

_GOOD: Final = frozenset(("up", "active"))
_BAD: Final = frozenset(("down", "revoked", "denied", "truncated", "stopped", "silent"))


def mesh(
    region: Annotated[
        list[str] | None, typer.Option("--region", "-r", help="Ask this region alone; may be repeated.")
    ] = None,
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Draw the mesh: regions, the grants between them, what crosses, how far it is behind, and what is denied."""
    asked = [choose_region(name) for name in region] if region else known_regions() or [choose_region()]
    found = draw_map(run(survey_all(asked, identity)))
    if json:
        print_json(found)
        return
    for tree in picture(found):
        out.print(tree, soft_wrap=chosen.form == "wide")
    for each in found.regions:
        if each.state == "down":
            note(f"{each.region} did not answer: {each.problem}")


def picture(found: MeshMap) -> list[Tree]:
    """A tree for each region: its audit log, where it grants streams to, and what it denies."""
    return [_tree(each, found) for each in found.regions]


def _tree(region: RegionOnMap, found: MeshMap) -> Tree:
    place = ", ".join(part for part in (region.country, spelled_out(region.jurisdiction)) if part)
    parts: list[str | tuple[str, str]] = [(region.region, "bold"), f"  {place}" if place else "", "  "]
    parts.append(_state(region.state))
    if region.state == "up":
        parts.append(f", {counted(region.streams, 'stream')}")
    tree = Tree(_line(*parts), guide_style="dim")
    for log in region.logs:
        if log.own:
            tree.add(_line(_log_line(log)))
    towards: dict[str, Tree] = {}
    for crossing in found.crossings:
        if crossing.from_region != region.region:
            continue
        if crossing.to_region not in towards:
            towards[crossing.to_region] = tree.add(_line("→ ", (crossing.to_region, "bold")))
        _add_crossing(towards[crossing.to_region], crossing)
    for denial in found.denials:
        if denial.region == region.region:
            tree.add(_line(_denial_line(denial)))
    return tree


def _add_crossing(tree: Tree, crossing: Crossing) -> None:
    stream = crossing.stream
    if crossing.destination_stream and crossing.destination_stream != stream:
        stream += f" as {crossing.destination_stream}"
    made = tree.add(_line(stream, "  ", _state(crossing.state)))
    figures = []
    if crossing.shards:
        figures = [f"{crossing.crossed:,} crossed"]
        if crossing.state in ENDED:
            # What the bridge counts goes on from grant to grant: under this one, nothing may have crossed.
            figures[0] += " under all grants of the stream"
        else:
            lag = (
                "lag unknown"
                if crossing.lag_records < 0
                else f"{counted(crossing.lag_records, 'record')} behind"
            )
            figures.insert(0, lag + (f", {crossing.lag_ms / 1000:,.1f} s" if crossing.lag_ms > 0 else ""))
        figures += [f"{crossing.withheld:,} withheld"] if crossing.withheld else []
        figures += [f"{crossing.filtered:,} filtered"] if crossing.filtered else []
        made.add(_line("; ".join(figures)))
    if crossing.reason:
        made.add(_line((spelled_out(crossing.reason), "" if crossing.state in _GOOD else "yellow")))
    until = f" until {iso(crossing.expires_ms)}" if crossing.expires_ms else ""
    made.add(_line((f"{crossing.grant}{until}", "dim")))


def _log_line(log: AuditLog) -> str:
    who = ", ".join(spelled_out(each.name) for each in log.cosigners)
    cosigned = f"; {log.cosigned_size:,} cosigned by {who}" if who else "; not cosigned"
    return f"audit log: {counted(log.size, 'leaf').replace('leafs', 'leaves')}{cosigned}"


def _denial_line(denial: Denial) -> str:
    peer = "any region" if denial.peer == "*" else denial.peer
    return f"denies {denial.streams} to and from {peer}" + (
        f": {spelled_out(denial.reason)}" if denial.reason else ""
    )


def _state(state: str) -> tuple[str, str]:
    return spelled_out(state), "green" if state in _GOOD else "bold red" if state in _BAD else "yellow"


def _line(*parts: str | tuple[str, str]) -> Text:
    """A line of the tree; where a name is wider than the terminal it goes on in the next line, and nothing of it is lost."""
    made = styled(*parts)
    made.overflow = "fold"
    return made
