"""docs/bridges.md says what the code runs on."""

from __future__ import annotations

import re
from pathlib import Path

from bridge.failpoint import DOCUMENT_STEPS, STEPS
from bridge.link import TRANSITIONS, LinkEvent, LinkPhase
from region.session.audience import AUDIENCES, Audience, request_name

PAGE = (Path(__file__).parents[2] / "docs" / "bridges.md").read_text()


def test_the_table_of_events_is_the_table_of_the_code() -> None:
    rows = re.findall(r"^\| (\w+) \| ([\w, ]+) \| (\w+) \|$", PAGE, re.MULTILINE)
    found = {}
    for event, phases, after in rows:
        if event not in set(LinkEvent):
            continue
        if phases.startswith("all"):
            but = phases.removeprefix("all").removeprefix(" but ").strip()
            named = [phase for phase in LinkPhase if phase.value != but]
        else:
            named = [LinkPhase(phase) for phase in phases.split(", ")]
        for phase in named:
            found[phase, LinkEvent(event)] = LinkPhase(after)
    assert found == dict(TRANSITIONS)


def test_every_state_and_failpoint_is_named() -> None:
    for name in (*LinkPhase, *STEPS, *DOCUMENT_STEPS):
        assert f"`{name}`" in PAGE


def test_the_table_of_requests_is_the_one_that_the_broker_asks() -> None:
    section = PAGE.split("## Who may ask what")[1].split("\n## ")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert head[1:] == [audience.value for audience in Audience]
    found = {name: list(marks) for names, *marks in rows for name in re.findall(r"`(\w+)`", names)}
    expected = {
        request_name(request): [
            "no" if audience not in row.audiences else "with a right" if row.by_right else "yes"
            for audience in Audience
        ]
        for request, row in AUDIENCES.items()
    }
    assert found == expected
